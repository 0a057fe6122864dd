//! [`RawContext`]: a device context that the provider has opened without the connection manager.

use std::ffi::CStr;

use super::ffi::{check, non_null};
use super::sys::{ibv_close_device, ibv_context, ibv_free_device_list, ibv_get_device_list, ibv_open_device};
use rdma_transport::error::{Result, TransportError};

/// A device context that the provider has opened without the connection manager. It is closed when
/// this value is dropped.
#[derive(Debug)]
pub(super) struct RawContext(*mut ibv_context);

// SAFETY: libibverbs lets any thread use and close a context. Its owner closes it once.
unsafe impl Send for RawContext {}
// SAFETY: libibverbs lets several threads use a context at the same time.
unsafe impl Sync for RawContext {}

impl RawContext {
    /// Opens the device with this name.
    pub(super) fn new(name: &str) -> Result<Self> {
        let mut count = 0;
        // SAFETY: the pointer is to memory for the count, and the result is checked.
        let list = non_null("ibv_get_device_list", unsafe { ibv_get_device_list(&raw mut count) })?;
        let mut found = None;
        for at in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` devices, which exist until the list is freed. Their names are NUL-terminated.
            let (device, called) = unsafe {
                let device = *list.add(at);
                (device, CStr::from_ptr((*device).name.as_ptr()))
            };
            if called.to_bytes() == name.as_bytes() {
                // SAFETY: the device is in the list, and the result is checked.
                found = Some(non_null("ibv_open_device", unsafe { ibv_open_device(device) }));
                break;
            }
        }
        // SAFETY: the list is freed once. An open context keeps its device.
        unsafe { ibv_free_device_list(list) }
        match found {
            Some(context) => Ok(Self(context.map_err(|error| error.on(name))?)),
            None => Err(TransportError::NoDevice {
                reason: format!("libibverbs has no device {name}; `rdma link` shows those of the kernel"),
            }),
        }
    }

    pub(super) const fn context(&self) -> *mut ibv_context {
        self.0
    }
}

impl Drop for RawContext {
    fn drop(&mut self) {
        // SAFETY: the context is closed once, after every object on it was destroyed.
        if let Err(error) = check("ibv_close_device", unsafe { ibv_close_device(self.0) }) {
            local_log!(Warn, "{error}");
        }
    }
}
