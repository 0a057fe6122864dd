//! [`RawDevice`]: the sole owner of the objects that the provider has opened on a device.

use std::any::Any;
use std::ffi::{CStr, c_int};
use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::async_event::RawAsyncEvent;
use super::dispatcher::Subscription;
use super::ffi::{check, non_null, set_nonblocking};
use super::sys::{
    alloc_parent_domain, alloc_td, dealloc_td, ibv_ack_async_event, ibv_alloc_pd, ibv_async_event, ibv_comp_channel,
    ibv_context, ibv_cq, ibv_create_comp_channel, ibv_create_cq, ibv_dealloc_pd, ibv_destroy_comp_channel,
    ibv_destroy_cq, ibv_device_attr, ibv_get_async_event, ibv_node_type, ibv_parent_domain_init_attr, ibv_pd,
    ibv_query_device, ibv_td, ibv_td_init_attr, ibv_transport_type, rdma_free_devices, rdma_get_devices,
};
use rdma_transport::error::{Result, TransportError};

/// An object that keeps the context of a device open while it exists. It is a private id of the provider that is bound to the device, or a
/// [`RawContext`](super::context::RawContext).
pub(super) type ContextOwner = Arc<dyn Any + Send + Sync>;

/// The driver of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Driver {
    /// The kernel's software iWARP.
    Siw,
    /// The kernel's software RoCE.
    Rxe,
    /// Any other driver, such as that of an adapter.
    Other,
}

impl Driver {
    /// Returns the driver of a device. Both software devices have their own vendor number (`SIW_VENDOR_ID`, `RXE_VENDOR_ID` in the kernel's
    /// `drivers/infiniband/sw`). Kernels from before 2020 report the vendor number 0. In this case the name decides.
    pub(super) fn of(vendor_id: u32, iwarp: bool, name: &str) -> Self {
        match vendor_id {
            0x0062_6d74 if iwarp => Self::Siw,
            0x00ff_ffff if !iwarp => Self::Rxe,
            0 if iwarp && name.starts_with("siw") => Self::Siw,
            0 if !iwarp && name.starts_with("rxe") => Self::Rxe,
            _ => Self::Other,
        }
    }
}

/// The owner of the objects that the provider has opened on a device: a protection domain, a completion channel, and a
/// subscription to the device's asynchronous events.
#[derive(Debug)]
pub(super) struct RawDevice {
    context: *mut ibv_context,
    pub(super) name: Box<str>,
    pub(super) iwarp: bool,
    pub(super) driver: Driver,
    pub(super) attr: DeviceAttr,
    /// The NUMA node to which the device is attached; `None` if it is unknown.
    pub(super) numa_node: Option<u32>,
    pd: *mut ibv_pd,
    /// A thread domain, and a parent domain that combines it with `pd`. Queue pairs in the parent domain need no lock for their doorbells,
    /// because one thread uses them. Both pointers are null if the device has no thread domains.
    threads: (*mut ibv_td, *mut ibv_pd),
    channel: *mut ibv_comp_channel,
    /// The completion queue that the function `guard` creates on siw. Null on other devices.
    guard: *mut ibv_cq,
    /// True if librdmacm has opened the device, so that librdmacm must also close it.
    managed: bool,
    /// True after the device was removed.
    removed: AtomicBool,
    /// The subscription to asynchronous events; `None` while the device is being closed.
    events: Option<Subscription>,
    /// The owner of the context. It is dropped last, because dropping it may close the context.
    context_owner: Option<ContextOwner>,
}

/// The attributes of a device, in a type that implements `Debug`.
#[derive(Clone, Copy)]
pub(super) struct DeviceAttr(pub(super) ibv_device_attr);

impl std::fmt::Debug for DeviceAttr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ibv_device_attr { vendor_id, vendor_part_id, hw_ver, .. } = self.0;
        write!(f, "vendor {vendor_id:#x} part {vendor_part_id:#x} hardware {hw_ver:#x}")
    }
}

/// The number of entries of the queue that [`guard`] creates. If an entry has at least 32 bytes, the queue's memory
/// covers page 144 of the context's mappings.
const GUARD_ENTRIES: c_int = 20_000;

/// Creates a completion queue that works around a defect of libsiw. The library treats a mapping at page 144 (`SIW_INVAL_UOBJ_KEY`,
/// 0x90000) as an error. The kernel places each new queue at the lowest free page. So with small queues, creating the 56th queue pair
/// fails, and so does creating every later one. The guard queue is large enough to cover page 144, so no other queue begins there.
fn guard(context: *mut ibv_context) -> *mut ibv_cq {
    // SAFETY: the context is live, and the new queue uses no channel. If the queue cannot be created, the result is
    // null, and there is no guard.
    unsafe { ibv_create_cq(context, GUARD_ENTRIES, ptr::null_mut(), ptr::null_mut(), 0) }
}

/// Parses the NUMA node of a device. Returns `None` for -1, which means that the device has no node.
fn parse_numa_node(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

// SAFETY: libibverbs lets any thread use a context, a domain and a channel. The last owner destroys them once. A thread domain promises
// that one thread at a time posts to its queues: this is the thread that drives the provider.
unsafe impl Send for RawDevice {}
// SAFETY: libibverbs lets several threads use a context, a domain and a channel at the same time. Only the thread that
// drives the provider posts to queues in the thread domain.
unsafe impl Sync for RawDevice {}

impl RawDevice {
    /// Opens the objects that the provider needs on the device of `context`. `managed` is true if librdmacm has opened the context.
    ///
    /// # Safety
    /// `context` stays live while `context_owner` exists.
    pub(super) unsafe fn open(context: *mut ibv_context, context_owner: ContextOwner, managed: bool) -> Result<Self> {
        // SAFETY: a live context has a live device, whose name is NUL-terminated.
        let (device, name) = unsafe { (&*(*context).device, CStr::from_ptr((*(*context).device).name.as_ptr())) };
        let name: Box<str> = name.to_string_lossy().into();
        let iwarp = device.transport_type == ibv_transport_type::IBV_TRANSPORT_IWARP
            || device.node_type == ibv_node_type::IBV_NODE_RNIC;
        // SAFETY: all fields are numbers, for which zeros are valid.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is live, and the pointer is to memory for the result.
        check("ibv_query_device", unsafe { ibv_query_device(context, &raw mut attr) })?;
        let driver = Driver::of(attr.vendor_id, iwarp, &name);
        let node = fs::read_to_string(format!("/sys/class/infiniband/{name}/device/numa_node"));
        // SAFETY: the context is live, and the result is checked.
        let pd = non_null("ibv_alloc_pd", unsafe { ibv_alloc_pd(context) })?;
        let mut opened = Self {
            context,
            name,
            iwarp,
            driver,
            attr: DeviceAttr(attr),
            numa_node: node.ok().and_then(|text| parse_numa_node(&text)),
            pd,
            threads: (ptr::null_mut(), ptr::null_mut()),
            channel: ptr::null_mut(),
            guard: if driver == Driver::Siw { guard(context) } else { ptr::null_mut() },
            managed,
            removed: AtomicBool::new(false),
            events: None,
            context_owner: Some(context_owner),
        };
        opened.events = Some(Subscription::new(context.addr())?);
        opened.threads = opened.thread_domain();
        // SAFETY: the context is live, and the result is checked.
        opened.channel = non_null("ibv_create_comp_channel", unsafe { ibv_create_comp_channel(context) })?;
        set_nonblocking(opened.completion_fd())?;
        set_nonblocking(opened.async_fd())?;
        Ok(opened)
    }

    /// Creates a thread domain, and a parent domain that combines it with the protection domain. Returns null pointers
    /// if the device has no thread domains.
    fn thread_domain(&self) -> (*mut ibv_td, *mut ibv_pd) {
        let mut td_attr = ibv_td_init_attr { comp_mask: 0 };
        // SAFETY: the context is live, and the library reads the attributes during the call.
        let td = unsafe { alloc_td(self.context, &raw mut td_attr) };
        if td.is_null() {
            return (ptr::null_mut(), ptr::null_mut());
        }
        // SAFETY: all fields are numbers or pointers, for which zeros are valid.
        let mut attr: ibv_parent_domain_init_attr = unsafe { std::mem::zeroed() };
        (attr.pd, attr.td) = (self.pd, td);
        // SAFETY: the context, the domain and the thread domain are live. The library reads the attributes during the
        // call.
        let parent = unsafe { alloc_parent_domain(self.context, &raw mut attr) };
        if parent.is_null() {
            log::debug!("{}: no domain around a thread domain: {}", self.name, io::Error::last_os_error());
            // SAFETY: this function has created the thread domain, and nothing uses it.
            unsafe { dealloc_td(td) };
            return (ptr::null_mut(), ptr::null_mut());
        }
        log::debug!("{}: queues have a thread domain", self.name);
        (td, parent)
    }

    pub(super) const fn context(&self) -> *mut ibv_context {
        self.context
    }

    /// Returns the protection domain in which memory is registered.
    pub(super) const fn protection_domain(&self) -> *mut ibv_pd {
        self.pd
    }

    /// Returns the domain in which queue pairs are created. These queue pairs can use memory of
    /// [`RawDevice::protection_domain`].
    pub(super) fn queue_domain(&self) -> *mut ibv_pd {
        if self.threads.1.is_null() { self.pd } else { self.threads.1 }
    }

    pub(super) const fn channel(&self) -> *mut ibv_comp_channel {
        self.channel
    }

    pub(super) fn completion_fd(&self) -> c_int {
        // SAFETY: the channel is live, and its descriptor never changes.
        unsafe { (*self.channel).fd }
    }

    fn async_fd(&self) -> c_int {
        // SAFETY: the context is live, and its descriptor never changes.
        unsafe { (*self.context).async_fd }
    }

    /// Returns the descriptors that become readable when asynchronous events may have arrived: the descriptor of the context, and the
    /// eventfd with which another provider of the process signals that it has passed an event to this provider.
    pub(super) fn event_fds(&self) -> impl Iterator<Item = c_int> {
        std::iter::once(self.async_fd()).chain(self.events.as_ref().map(Subscription::wake_fd))
    }

    /// Closes the device's files, so that the kernel can finish the removal although librdmacm keeps them open. The library still has the
    /// numbers of their descriptors. So this function makes these numbers refer to the null device, and the library can close the numbers
    /// later without harm. While `context_owner` exists, the library has the context open, so the numbers cannot refer to any other file.
    fn release_files(&self) {
        debug_assert!(self.context_owner.is_some());
        let Ok(null) = File::options().read(true).write(true).open("/dev/null") else { return };
        for fd in [self.cmd_fd(), self.async_fd()] {
            // SAFETY: the call replaces the library's file under a descriptor number that the library still owns.
            unsafe { libc::dup3(null.as_raw_fd(), fd, libc::O_CLOEXEC) };
        }
    }

    fn cmd_fd(&self) -> c_int {
        // SAFETY: the context is live, and its descriptor never changes.
        unsafe { (*self.context).cmd_fd }
    }

    /// Returns the number of completion vectors: the interrupts over which completion events can be distributed.
    pub(super) fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is live, and the number never changes.
        u32::try_from(unsafe { (*self.context).num_comp_vectors }).unwrap_or(1).max(1)
    }

    /// Converts the return code of a call that releases an object of the device. After the kernel has destroyed the process's objects on a
    /// removed device, each such call fails with `EIO`. In this case the object is already destroyed, so the error counts as success.
    pub(super) fn given_back(&self, call: &'static str, rc: c_int) -> Result<()> {
        match check(call, rc) {
            Err(TransportError::Io { source, .. })
                if source.raw_os_error() == Some(libc::EIO) && self.is_torn_down() =>
            {
                Ok(())
            }
            other => other.map_err(|error| error.on(&self.name)),
        }
    }

    /// Returns true if the device was removed and the kernel has destroyed this process's objects on it.
    ///
    /// With most drivers the kernel does so while processes still have the device open (`ib_uverbs_remove_one` with
    /// `disassociate_ucontext`, drivers/infiniband/core/uverbs_main.c). With other drivers (siw, rxe) the removal waits until the processes
    /// have closed the device, and until then their calls still work.
    ///
    /// A command that fails with `EIO` proves nothing: commands fail before the objects are destroyed, and a driver may return `EIO` for
    /// another reason. But the kernel destroys the newest objects first (`__uverbs_cleanup_ufile`, rdma_core.c), and the completion channel
    /// is older than all regions and queue pairs. So when the kernel has closed the channel (`ib_uverbs_free_event_queue`), the regions and
    /// queue pairs are already destroyed.
    fn is_torn_down(&self) -> bool {
        let mut fd = libc::pollfd { fd: self.completion_fd(), events: 0, revents: 0 };
        // SAFETY: `fd` is one descriptor, and exists until the call returns.
        unsafe { libc::poll(&raw mut fd, 1, 0) == 1 && fd.revents & libc::POLLERR != 0 }
    }

    /// Records that the device was removed. After this call, dropping this object also makes librdmacm close the
    /// device.
    pub(super) fn set_removed(&self) {
        self.removed.store(true, Ordering::Relaxed);
    }

    /// Returns the next asynchronous event for this provider. Returns `None` if no event is available.
    pub(super) fn next_event(&self) -> Result<Option<RawAsyncEvent>> {
        match &self.events {
            Some(events) => events.next(|| self.read_event()),
            None => Ok(None),
        }
    }

    fn read_event(&self) -> Result<Option<RawAsyncEvent>> {
        let mut event = MaybeUninit::<ibv_async_event>::uninit();
        let event = event.as_mut_ptr();
        // SAFETY: the context is live, and the pointer is to memory for the result.
        if unsafe { ibv_get_async_event(self.context, event) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(TransportError::io("ibv_get_async_event", error)),
            };
        }
        // SAFETY: the call has filled in the event. The object of the event exists until `ibv_ack_async_event`.
        let copy = unsafe { RawAsyncEvent::copy(event) };
        // SAFETY: the event is acknowledged once, and not used afterwards.
        unsafe { ibv_ack_async_event(event) }
        Ok(Some(copy))
    }
}

impl Drop for RawDevice {
    fn drop(&mut self) {
        let warn = |result: Result<()>| {
            if let Err(error) = result {
                local_log!(Warn, "{}: {error}", self.name);
            }
        };
        if !self.guard.is_null() {
            // SAFETY: `guard` has created the queue, nothing uses it, and it is destroyed once.
            warn(check("ibv_destroy_cq", unsafe { ibv_destroy_cq(self.guard) }));
        }
        if !self.channel.is_null() {
            // SAFETY: no completion queue uses the channel any more, because each queue keeps the device alive by an
            // `Arc`.
            warn(check("ibv_destroy_comp_channel", unsafe { ibv_destroy_comp_channel(self.channel) }));
        }
        if !self.threads.1.is_null() {
            // SAFETY: no queue pair is in the parent domain any more, because each queue pair keeps the device alive by an `Arc`. The
            // parent domain is destroyed before the two domains that it combines.
            warn(check("ibv_dealloc_pd", unsafe { ibv_dealloc_pd(self.threads.1) }));
            // SAFETY: the parent domain of this thread domain is destroyed.
            warn(check("ibv_dealloc_td", unsafe { dealloc_td(self.threads.0) }));
        }
        // SAFETY: no region and no queue pair is in the domain any more, because each of them keeps the device alive by
        // an `Arc`.
        warn(check("ibv_dealloc_pd", unsafe { ibv_dealloc_pd(self.pd) }));
        let last = self.events.take().is_some_and(Subscription::end);
        let removed = self.managed && self.removed.load(Ordering::Relaxed);
        if removed && last && !close_removed_devices() {
            // librdmacm has found no device, because this was the last device of the system. So librdmacm has not closed the removed
            // device, and would keep it open until the process ends.
            self.release_files();
        }
        self.context_owner = None;
        if removed {
            close_removed_devices();
        }
    }
}

/// Makes librdmacm list the devices. This makes librdmacm close the removed devices that are not in use, so that the kernel can finish
/// their removal. Returns `false` if librdmacm found no device at all, because in this case it closes none.
fn close_removed_devices() -> bool {
    // SAFETY: a null pointer means that the count is not requested. The list is freed unchanged.
    unsafe {
        let devices = rdma_get_devices(ptr::null_mut());
        if devices.is_null() {
            return false;
        }
        rdma_free_devices(devices);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_numa_node_is_a_number_or_none() {
        assert_eq!(["0\n", "3\n", "-1\n", "", "x"].map(parse_numa_node), [Some(0), Some(3), None, None, None]);
    }

    #[test]
    fn software_devices_are_told_by_their_vendor_number() {
        assert_eq!(Driver::of(0x0062_6d74, true, "eth_iwarp"), Driver::Siw);
        assert_eq!(Driver::of(0x00ff_ffff, false, "roce0"), Driver::Rxe);
        assert_eq!(Driver::of(0, false, "rxe0"), Driver::Rxe);
        assert_eq!(Driver::of(0x02c9, false, "rxe_of_a_wag"), Driver::Other);
        assert_eq!(Driver::of(0x8086, true, "siw0"), Driver::Other);
    }
}
