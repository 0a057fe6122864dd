//! Memory regions.

use std::io;
use std::sync::Arc;

use rdma_sys::{ibv_access_flags, ibv_dereg_mr, ibv_mr, ibv_reg_mr};

use super::device::RawDevice;
use super::ffi::check;
use crate::error::{Error, Result};
use crate::mem::Memory;
use crate::mr::{Access, LocalKey, RemoteKey};

/// The one owner of a registration, with its share of the memory.
#[derive(Debug)]
pub(super) struct RawRegion {
    raw: *mut ibv_mr,
    _memory: Arc<Memory>,
    _device: Arc<RawDevice>,
}

// SAFETY: a registration belongs to no thread; it is read, and given back once, by its owner.
unsafe impl Send for RawRegion {}

impl RawRegion {
    pub(super) fn register(device: &Arc<RawDevice>, memory: &Arc<Memory>, access: Access) -> Result<Self> {
        let flags = access_flags(access).0 as i32;
        // SAFETY: a live protection domain, and memory that is mapped for as long as the registration lives, because
        // it holds a share. What the device may do to it when is promised at `Sge::new`.
        let raw = unsafe { ibv_reg_mr(device.protection_domain(), memory.as_ptr().cast(), memory.len(), flags) };
        if raw.is_null() {
            let source = explain(io::Error::last_os_error());
            return Err(Error::Memory { bytes: memory.len(), source });
        }
        Ok(Self { raw, _memory: Arc::clone(memory), _device: Arc::clone(device) })
    }

    pub(super) fn local_key(&self) -> LocalKey {
        // SAFETY: the registration is live.
        LocalKey(unsafe { (*self.raw).lkey })
    }

    pub(super) fn remote_key(&self) -> RemoteKey {
        // SAFETY: the registration is live.
        RemoteKey(unsafe { (*self.raw).rkey })
    }
}

impl Drop for RawRegion {
    fn drop(&mut self) {
        // SAFETY: given back once, before the memory and the device.
        if let Err(error) = check("ibv_dereg_mr", unsafe { ibv_dereg_mr(self.raw) }) {
            log::warn!("{error}");
        }
    }
}

/// A region of the provider; one on a device that was removed has no registration any more.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) raw: Option<RawRegion>,
    pub(super) device: u32,
}

fn access_flags(access: Access) -> ibv_access_flags {
    let mut flags = ibv_access_flags(0);
    for (ours, theirs) in [
        (Access::LOCAL_WRITE, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
        // The device demands the local right with the remote one.
        (Access::REMOTE_WRITE, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE | ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_READ, ibv_access_flags::IBV_ACCESS_REMOTE_READ),
    ] {
        if access.contains(ours) {
            flags |= theirs;
        }
    }
    flags
}

/// Says which limit a registration met, and the cure.
fn explain(error: io::Error) -> io::Error {
    if !matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM)) {
        return error;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the result.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0 || limit.rlim_cur == libc::RLIM_INFINITY {
        return error;
    }
    let kib = limit.rlim_cur / 1024;
    let text = format!(
        "{error}: this process may lock {kib} KiB (RLIMIT_MEMLOCK); raise it with `ulimit -l`, or LimitMEMLOCK= of its \
         service, or use less memory"
    );
    io::Error::new(error.kind(), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_write_brings_the_local_right_that_devices_demand() {
        assert_eq!(access_flags(Access::empty()).0, 0);
        assert_eq!(access_flags(Access::LOCAL_WRITE).0, 1);
        assert_eq!(access_flags(Access::REMOTE_WRITE).0, 3);
        assert_eq!(access_flags(Access::REMOTE_READ).0, 4);
    }

    #[test]
    fn only_a_lack_of_memory_is_explained() {
        let error = explain(io::Error::from_raw_os_error(libc::EINVAL));
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }
}
