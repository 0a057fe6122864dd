//! Address handles. An address handle is the route to the destination of a datagram.

use std::sync::Arc;

use super::device::RawDevice;
use super::ffi::{check, non_null};
use super::route::ah_attr;
use super::sys::{ibv_ah, ibv_create_ah, ibv_destroy_ah};
use rdma_transport::datagram::Route;
use rdma_transport::error::Result;

/// An address handle of libibverbs, which is destroyed when this value is dropped.
#[derive(Debug)]
pub(super) struct RawAddressHandle {
    raw: *mut ibv_ah,
    _device: Arc<RawDevice>,
}

// SAFETY: libibverbs lets any thread use and destroy a handle. Its owner destroys it once.
unsafe impl Send for RawAddressHandle {}

impl RawAddressHandle {
    pub(super) fn create(device: &Arc<RawDevice>, route: &Route) -> Result<Self> {
        let mut attr = ah_attr(route);
        // SAFETY: the domain is live, and the library reads the attributes during the call.
        let raw = unsafe { ibv_create_ah(device.protection_domain(), &raw mut attr) };
        Ok(Self { raw: non_null("ibv_create_ah", raw)?, _device: Arc::clone(device) })
    }

    pub(super) const fn as_ptr(&self) -> *mut ibv_ah {
        self.raw
    }
}

impl Drop for RawAddressHandle {
    fn drop(&mut self) {
        // SAFETY: the handle is destroyed once, and before the device.
        if let Err(error) = check("ibv_destroy_ah", unsafe { ibv_destroy_ah(self.raw) }) {
            local_log!(Warn, "{error}");
        }
    }
}

/// An address handle in the provider's table.
#[derive(Debug)]
pub(super) struct Address {
    /// The handle; `None` after the device was removed.
    pub(super) raw: Option<RawAddressHandle>,
    pub(super) device: u32,
}
