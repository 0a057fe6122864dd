//! Memory regions.
//!
//! A region that a peer may access is registered twice: once for the program's own work requests, under the local key, and once for peers,
//! under the remote key. Invalidating the remote key deregisters the second registration, and the local key stays valid. User space has no
//! other way to do this on all devices. The region counts twice towards RLIMIT_MEMLOCK.
//!
//! If a device refuses to release a registration, the registration stays valid, and peers may still write to the memory. So the provider
//! keeps the registration and its `Arc` of the memory. The memory is then not freed, and still counts as memory that peers may access.

use std::ffi::c_int;
use std::fmt;
use std::io;
use std::mem;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

use super::NAME;
use super::device::RawDevice;
use super::sys::{ibv_access_flags, ibv_dereg_mr, ibv_mr, ibv_reg_dmabuf_mr, ibv_reg_mr, ibv_reg_mr_iova2};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, LocalKey, MemoryRegion, MrId, RemoteKey};
use rdma_transport::provider::DeviceId;
use rdma_transport::registrar::{Registrar, Registration};
use rdma_transport::slab::Slab;

/// A registration of memory with a device, which is released on drop. It keeps the memory alive by
/// an `Arc`.
#[derive(Debug)]
pub(super) struct RawRegion {
    /// The registration. Null after it was released.
    raw: *mut ibv_mr,
    /// The registered memory. `None` for a dma-buf, which the kernel keeps alive.
    memory: Option<Arc<Memory>>,
    device: Arc<RawDevice>,
}

// SAFETY: any thread may use a registration. Only its owner reads it, and releases it once.
unsafe impl Send for RawRegion {}

impl RawRegion {
    fn register(device: &Arc<RawDevice>, memory: &Arc<Memory>, range: &Range<usize>, access: Access) -> Result<Self> {
        let flags = access_flags(access, device.iwarp);
        let (start, bytes) = (memory.as_ptr().wrapping_add(range.start), range.len());
        let domain = device.protection_domain();
        let raw = match ibv_reg_mr_iova2() {
            // SAFETY: the protection domain is live. The range is within the memory, which stays mapped while the registration exists,
            // because the `RawRegion` keeps the memory alive. The promise of `Sge::new` covers the accesses of the device.
            Some(register) => unsafe { register(domain, start.cast(), bytes, start.addr() as u64, flags.0) },
            None => {
                // The older call `ibv_reg_mr` has no optional flags, so it would refuse the flag for relaxed ordering.
                let flags = flags.0 & !ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;
                // SAFETY: the protection domain is live. The range is within the memory, which stays mapped while the
                // registration exists. The promise of `Sge::new` covers the accesses of the device.
                unsafe { ibv_reg_mr(domain, start.cast(), bytes, flags as c_int) }
            }
        };
        if raw.is_null() {
            return Err(registration_error(device, bytes));
        }
        Ok(Self { raw, memory: Some(Arc::clone(memory)), device: Arc::clone(device) })
    }

    fn register_dmabuf(device: &Arc<RawDevice>, part: &DmaBuf<'_>, access: Access) -> Result<Self> {
        const NO_DMABUF: TransportError =
            TransportError::Unsupported { provider: NAME, feature: "regions over a dma-buf on this device" };
        let register = ibv_reg_dmabuf_mr().ok_or(TransportError::Unsupported {
            provider: NAME,
            feature: "regions over a dma-buf: libibverbs has no ibv_reg_dmabuf_mr, install rdma-core 34 or newer",
        })?;
        let flags = access_flags(access, device.iwarp).0 as c_int;
        let (domain, fd) = (device.protection_domain(), part.buffer.as_raw_fd());
        // SAFETY: the protection domain and the descriptor are live. The kernel checks the range, and holds a reference
        // to the buffer.
        let raw = unsafe { register(domain, part.offset, part.len, part.address, fd, flags) };
        if raw.is_null() {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT) => NO_DMABUF,
                _ => TransportError::io("ibv_reg_dmabuf_mr", error).on(&device.name),
            });
        }
        Ok(Self { raw, memory: None, device: Arc::clone(device) })
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

impl RawRegion {
    /// Releases the registration. After an error the registration is unchanged: the device may still access the memory, and the call may be
    /// repeated.
    fn deregister(&mut self) -> Result<()> {
        if self.raw.is_null() {
            return Ok(());
        }
        // SAFETY: the registration is live. Nothing uses it after the call has succeeded.
        let rc = unsafe { ibv_dereg_mr(self.raw) };
        let rc = if rdma_transport::planted("a-failed-dereg-mr-counts-as-success") { 0 } else { rc };
        self.device.given_back("ibv_dereg_mr", rc)?;
        self.raw = ptr::null_mut();
        Ok(())
    }
}

impl Drop for RawRegion {
    fn drop(&mut self) {
        if let Err(error) = self.deregister() {
            local_log!(Error, "{error}: its memory stays registered and is never freed");
            mem::forget((self.memory.take(), Arc::clone(&self.device)));
        }
    }
}

/// A part of a dma-buf, and the address by which work requests name its first byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct DmaBuf<'a> {
    pub(super) buffer: BorrowedFd<'a>,
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) address: u64,
}

/// A region in the provider's table. After its device was removed, a region has no registration.
#[derive(Debug)]
pub(super) struct RegisteredRegion {
    local: Option<RawRegion>,
    /// The registration for peers. `None` if peers have no rights, or after the remote key was invalidated.
    remote: Option<RawRegion>,
    pub(super) device: u32,
}

impl RegisteredRegion {
    /// Registers a part of a memory. Returns the region and its two keys. Blocks while the pages are pinned.
    pub(super) fn register(
        device: &Arc<RawDevice>,
        number: u32,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<(Self, LocalKey, RemoteKey)> {
        if range.start >= range.end || range.end > memory.len() {
            let (value, range) = (range.end as u64, "behind its start, and within the memory");
            return Err(TransportError::OutOfRange { what: "end of the region", value, range });
        }
        if !access.contains(Access::ON_DEMAND) {
            // The registration pins all pages. Pages that were never touched are allocated now, so set the memory
            // policy first.
            memory.prefer_huge_pages();
            if let Some(node) = device.numa_node {
                memory.prefer_node(node);
            }
        }
        Self::of(number, access, |access| RawRegion::register(device, memory, &range, access))
    }

    /// Registers a part of a dma-buf. Returns the region and its two keys.
    pub(super) fn register_dmabuf(
        device: &Arc<RawDevice>,
        number: u32,
        part: &DmaBuf<'_>,
        access: Access,
    ) -> Result<(Self, LocalKey, RemoteKey)> {
        Self::of(number, access, |access| RawRegion::register_dmabuf(device, part, access))
    }

    fn of(
        device: u32,
        access: Access,
        register: impl Fn(Access) -> Result<RawRegion>,
    ) -> Result<(Self, LocalKey, RemoteKey)> {
        let local = register(access.local())?;
        let remote = if access.intersects(Access::REMOTE) { Some(register(access)?) } else { None };
        let keys = (local.local_key(), remote.as_ref().unwrap_or(&local).remote_key());
        Ok((Self { local: Some(local), remote, device }, keys.0, keys.1))
    }

    /// Invalidates the remote key. After this call has succeeded, the device accesses no memory of the region for a
    /// peer.
    pub(super) fn invalidate(&mut self) -> Result<()> {
        release(&mut self.remote)
    }

    /// Releases both registrations. A registration that the device does not release stays in the entry, and its error
    /// is returned.
    pub(super) fn deregister(&mut self) -> Result<()> {
        let (remote, local) = (self.invalidate(), release(&mut self.local));
        remote.and(local)
    }
}

fn release(registration: &mut Option<RawRegion>) -> Result<()> {
    registration.as_mut().map_or(Ok(()), RawRegion::deregister)?;
    *registration = None;
    Ok(())
}

/// The regions of the provider.
#[derive(Debug, Default)]
pub(super) struct DeviceRegions {
    pub(super) table: Slab<RegisteredRegion>, // bound: pool, large-messages, copies, kept-blocks
}

impl DeviceRegions {
    pub(super) fn add(
        &mut self,
        (region, local_key, remote_key): (RegisteredRegion, LocalKey, RemoteKey),
    ) -> MemoryRegion {
        MemoryRegion { id: MrId(self.table.insert(region)), local_key, remote_key }
    }

    pub(super) fn get_mut(&mut self, region: MrId) -> Result<&mut RegisteredRegion> {
        self.table.get_mut(region.0).ok_or(TransportError::Stale { object: "memory region" })
    }

    pub(super) fn deregister(&mut self, region: MrId) -> Result<()> {
        self.get_mut(region)?.deregister()?;
        self.table.remove(region.0);
        Ok(())
    }

    /// Deregisters all regions of a removed device. The handles of the regions stay valid.
    pub(super) fn release(&mut self, device: DeviceId) {
        for key in self.table.keys() {
            if let Some(region) = self.table.get_mut(key).filter(|region| region.device == device.0) {
                if let Err(error) = region.deregister() {
                    local_log!(Error, "{error}: the memory stays registered");
                }
            }
        }
    }
}

/// A registrar: it registers memory for one device on any thread. It keeps the device open.
pub(super) struct DeviceRegistrar {
    device: Arc<RawDevice>,
    number: u32,
}

impl fmt::Debug for DeviceRegistrar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceRegistrar({})", self.device.name)
    }
}

impl DeviceRegistrar {
    pub(super) fn new(device: &Arc<RawDevice>, number: u32) -> Self {
        Self { device: Arc::clone(device), number }
    }
}

/// A registration that a registrar has made, and that is not in the table of a provider yet.
#[derive(Debug)]
pub(super) struct PreparedRegion {
    pub(super) region: RegisteredRegion,
    pub(super) device: Arc<RawDevice>,
    pub(super) local_key: LocalKey,
    pub(super) remote_key: RemoteKey,
}

impl Registrar for DeviceRegistrar {
    fn register(&self, memory: &Arc<Memory>, range: Range<usize>, access: Access) -> Result<Registration> {
        let device = Arc::clone(&self.device);
        let (region, local_key, remote_key) = RegisteredRegion::register(&device, self.number, memory, range, access)?;
        Ok(Registration::new(NAME, PreparedRegion { region, device, local_key, remote_key }))
    }
}

/// Returns the flags of a registration. On iWARP the response to a Read is a write of the peer. So [`Access::READ_SINK`] includes the
/// remote right to write, which adapters require. The kernel grants this right for its own Reads, too (drivers/infiniband/core/rw.c).
fn access_flags(access: Access, iwarp: bool) -> ibv_access_flags {
    use ibv_access_flags as flags;
    let local_and_remote_write = flags::IBV_ACCESS_LOCAL_WRITE | flags::IBV_ACCESS_REMOTE_WRITE;
    let mut all = ibv_access_flags(0);
    for (ours, theirs) in [
        (Access::LOCAL_WRITE, flags::IBV_ACCESS_LOCAL_WRITE),
        // Devices require the local right to write together with the remote one.
        (Access::REMOTE_WRITE, local_and_remote_write),
        (Access::REMOTE_READ, flags::IBV_ACCESS_REMOTE_READ),
        (Access::REMOTE_ATOMIC, flags::IBV_ACCESS_REMOTE_ATOMIC | flags::IBV_ACCESS_LOCAL_WRITE),
        (Access::READ_SINK, if iwarp { local_and_remote_write } else { flags::IBV_ACCESS_LOCAL_WRITE }),
        (Access::RELAXED_ORDERING, flags::IBV_ACCESS_RELAXED_ORDERING),
        (Access::ON_DEMAND, flags::IBV_ACCESS_ON_DEMAND),
    ] {
        if access.contains(ours) {
            all |= theirs;
        }
    }
    all
}

fn registration_error(device: &RawDevice, bytes: usize) -> TransportError {
    let source = explain(io::Error::last_os_error());
    let source = io::Error::new(source.kind(), format!("{}: {source}", device.name));
    TransportError::Memory { bytes, source }
}

/// Adds the limit on locked memory, and how to raise it, to the error of a registration.
fn explain(error: io::Error) -> io::Error {
    if !matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM)) {
        return error;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to memory for the result.
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
        let flags = |access| access_flags(access, false).0;
        assert_eq!(flags(Access::empty()), 0);
        assert_eq!(flags(Access::LOCAL_WRITE), 1);
        assert_eq!(flags(Access::REMOTE_WRITE), 3);
        assert_eq!(flags(Access::REMOTE_READ), 4);
        assert_eq!(flags(Access::REMOTE_ATOMIC), 9);
        assert_eq!(flags(Access::REMOTE_ATOMIC.local()), 1);
        assert_eq!(flags(Access::REMOTE_READ.local()), 0);
        assert_eq!(flags(Access::RELAXED_ORDERING | Access::ON_DEMAND), 1 << 20 | 64);
    }

    #[test]
    fn sinks_of_reads_are_open_to_the_answer_on_iwarp_and_nothing_else_is() {
        assert_eq!(access_flags(Access::READ_SINK.local(), true).0, 3);
        assert_eq!(access_flags(Access::READ_SINK.local(), false).0, 1);
        assert_eq!(access_flags(Access::LOCAL_WRITE.local(), true).0, 1);
    }

    #[test]
    fn only_a_lack_of_memory_is_explained() {
        let error = explain(io::Error::from_raw_os_error(libc::EINVAL));
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }
}
