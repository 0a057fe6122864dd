//! Memory regions.
//!
//! A region that a peer may reach is registered twice: once for the program's own work requests, under the local key,
//! and once for peers, under the remote key. Taking the remote key back is giving the second registration back: a
//! device has no other way to do that from user space that works on all of them, and the local key stays good. It
//! counts twice towards RLIMIT_MEMLOCK.

use std::io;
use std::ops::Range;
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
    fn register(device: &Arc<RawDevice>, memory: &Arc<Memory>, range: &Range<usize>, access: Access) -> Result<Self> {
        let flags = access_flags(access).0 as i32;
        let (start, bytes) = (memory.as_ptr().wrapping_add(range.start), range.len());
        // SAFETY: a live protection domain, and memory that is mapped for as long as the registration lives, because
        // it holds a share; the range is within it. What the device may do to it when is promised at `Sge::new`.
        let raw = unsafe { ibv_reg_mr(device.protection_domain(), start.cast(), bytes, flags) };
        if raw.is_null() {
            return Err(Error::Memory { bytes, source: explain(io::Error::last_os_error()) });
        }
        Ok(Self { raw, _memory: Arc::clone(memory), _device: Arc::clone(device) })
    }

    fn local_key(&self) -> LocalKey {
        // SAFETY: the registration is live.
        LocalKey(unsafe { (*self.raw).lkey })
    }

    fn remote_key(&self) -> RemoteKey {
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
    local: Option<RawRegion>,
    /// For peers, until it is taken back.
    remote: Option<RawRegion>,
    pub(super) device: u32,
}

impl Region {
    /// Registers a part of a memory, and says its keys.
    pub(super) fn register(
        device: &Arc<RawDevice>,
        number: u32,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<(Self, LocalKey, RemoteKey)> {
        if range.start >= range.end || range.end > memory.len() {
            let (value, range) = (range.end as u64, "behind its start, and within the memory");
            return Err(Error::OutOfRange { what: "end of the region", value, range });
        }
        // All of it is about to be pinned, touched or not.
        memory.prefer_huge_pages();
        if let Some(node) = device.numa_node() {
            memory.prefer_node(node);
        }
        let local = RawRegion::register(device, memory, &range, access.local())?;
        let remote = match access.intersects(Access::REMOTE) {
            true => Some(RawRegion::register(device, memory, &range, access)?),
            false => None,
        };
        let keys = (local.local_key(), remote.as_ref().unwrap_or(&local).remote_key());
        Ok((Self { local: Some(local), remote, device: number }, keys.0, keys.1))
    }

    /// Takes the remote key back: when this returns, the device touches nothing for a peer.
    pub(super) fn invalidate(&mut self) {
        self.remote = None;
    }

    /// The device is gone.
    pub(super) fn close(&mut self) {
        (self.local, self.remote) = (None, None);
    }
}

fn access_flags(access: Access) -> ibv_access_flags {
    let mut flags = ibv_access_flags(0);
    for (ours, theirs) in [
        (Access::LOCAL_WRITE, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
        // The device demands the local right with the remote one.
        (Access::REMOTE_WRITE, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE | ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_READ, ibv_access_flags::IBV_ACCESS_REMOTE_READ),
        (Access::REMOTE_ATOMIC, ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC | ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
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
        assert_eq!(access_flags(Access::REMOTE_ATOMIC).0, 9);
        assert_eq!(access_flags(Access::REMOTE_ATOMIC.local()).0, 1);
        assert_eq!(access_flags(Access::REMOTE_READ.local()).0, 0);
    }

    #[test]
    fn only_a_lack_of_memory_is_explained() {
        let error = explain(io::Error::from_raw_os_error(libc::EINVAL));
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }
}
