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

use super::async_event::AsyncEvent;
use super::dispatcher::Subscription;
use super::ffi::{check, non_null, set_nonblocking};
use super::sys::{
    alloc_parent_domain, alloc_td, dealloc_td, ibv_ack_async_event, ibv_alloc_pd, ibv_async_event, ibv_comp_channel,
    ibv_context, ibv_cq, ibv_create_comp_channel, ibv_create_cq, ibv_dealloc_pd, ibv_destroy_comp_channel,
    ibv_destroy_cq, ibv_device_attr, ibv_get_async_event, ibv_node_type, ibv_parent_domain_init_attr, ibv_pd,
    ibv_query_device, ibv_td, ibv_td_init_attr, ibv_transport_type, rdma_free_devices, rdma_get_devices,
};
use crate::error::{Error, Result};

/// The owner that keeps a context open as long as it lives: a private id of the provider that is bound to the device, or a
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
    /// Returns the driver, by the vendor number that both software devices report (`SIW_VENDOR_ID`, `RXE_VENDOR_ID` in the kernel's
    /// `drivers/infiniband/sw`), and for a kernel from before 2020 by the name.
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

/// Owns what the provider has opened on a device: protection domain, completion channel, and a share in its events.
#[derive(Debug)]
pub(super) struct RawDevice {
    context: *mut ibv_context,
    pub(super) name: Box<str>,
    pub(super) iwarp: bool,
    pub(super) driver: Driver,
    pub(super) attr: DeviceAttr,
    /// The NUMA node that the device is attached to.
    pub(super) numa_node: Option<u32>,
    pd: *mut ibv_pd,
    /// A thread domain, and the parent domain of it and `pd`, in which queues are created. Their doorbells then need no lock. Null if
    /// the device has no thread domains.
    threads: (*mut ibv_td, *mut ibv_pd),
    channel: *mut ibv_comp_channel,
    /// On siw, the queue that `guard` makes; else null.
    guard: *mut ibv_cq,
    /// True if librdmacm has opened the device, and so closes it.
    managed: bool,
    /// True once the device was removed.
    removed: AtomicBool,
    /// `None` while the device is being closed.
    events: Option<Subscription>,
    /// Dropped last, because the context may be closed afterwards.
    context_owner: Option<ContextOwner>,
}

/// Attributes of a device. The wrapper gives them a `Debug`.
#[derive(Clone, Copy)]
pub(super) struct DeviceAttr(pub(super) ibv_device_attr);

impl std::fmt::Debug for DeviceAttr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ibv_device_attr { vendor_id, vendor_part_id, hw_ver, .. } = self.0;
        write!(f, "vendor {vendor_id:#x} part {vendor_part_id:#x} hardware {hw_ver:#x}")
    }
}

/// Entries of a completion queue that covers page 144 of a context's mappings, for entries of 32 bytes or more.
const GUARD_ENTRIES: c_int = 20_000;

/// Creates a queue that works around a defect of libsiw. That library treats the mapping at page 144 (`SIW_INVAL_UOBJ_KEY`,
/// 0x90000) as an error, and the kernel gives each new queue the lowest free page: with small queues the 56th queue pair fails, and
/// every later one. This queue is large enough to cover the page, so no other begins there.
fn guard(context: *mut ibv_context) -> *mut ibv_cq {
    // SAFETY: a live context; a queue of its own, on no channel. Null when it cannot be made: then there is no guard.
    unsafe { ibv_create_cq(context, GUARD_ENTRIES, ptr::null_mut(), ptr::null_mut(), 0) }
}

/// Parses the NUMA node of a device, which is -1 if it has none.
fn parse_numa_node(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

// SAFETY: libibverbs lets any thread use a context, a domain and a channel. They are destroyed once, by the last owner. The
// thread domain promises that its queues are posted to by one thread at a time: the thread that drives the provider.
unsafe impl Send for RawDevice {}
// SAFETY: as above.
unsafe impl Sync for RawDevice {}

impl RawDevice {
    /// Opens the objects that the provider needs on the device of `context`. `managed` is true if librdmacm has opened the context.
    ///
    /// # Safety
    /// `context` is live for as long as `context_owner` is.
    pub(super) unsafe fn open(context: *mut ibv_context, context_owner: ContextOwner, managed: bool) -> Result<Self> {
        // SAFETY: a live context has a live device, whose name ends in zero.
        let (device, name) = unsafe { (&*(*context).device, CStr::from_ptr((*(*context).device).name.as_ptr())) };
        let name: Box<str> = name.to_string_lossy().into();
        let iwarp = device.transport_type == ibv_transport_type::IBV_TRANSPORT_IWARP
            || device.node_type == ibv_node_type::IBV_NODE_RNIC;
        // SAFETY: all fields are numbers.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: a live context and a place for the result.
        check("ibv_query_device", unsafe { ibv_query_device(context, &raw mut attr) })?;
        let driver = Driver::of(attr.vendor_id, iwarp, &name);
        let node = fs::read_to_string(format!("/sys/class/infiniband/{name}/device/numa_node"));
        // SAFETY: a live context. The result is checked.
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
        // SAFETY: a live context; the result is checked.
        opened.channel = non_null("ibv_create_comp_channel", unsafe { ibv_create_comp_channel(context) })?;
        set_nonblocking(opened.completion_fd())?;
        set_nonblocking(opened.async_fd())?;
        Ok(opened)
    }

    /// Creates a thread domain and its parent domain; null if the device has no thread domains.
    fn thread_domain(&self) -> (*mut ibv_td, *mut ibv_pd) {
        let mut td_attr = ibv_td_init_attr { comp_mask: 0 };
        // SAFETY: a live context; the attributes are read during the call.
        let td = unsafe { alloc_td(self.context, &raw mut td_attr) };
        if td.is_null() {
            return (ptr::null_mut(), ptr::null_mut());
        }
        // SAFETY: all fields are numbers and pointers for which null is good.
        let mut attr: ibv_parent_domain_init_attr = unsafe { std::mem::zeroed() };
        (attr.pd, attr.td) = (self.pd, td);
        // SAFETY: a live context, domain and thread domain; the attributes are read during the call.
        let parent = unsafe { alloc_parent_domain(self.context, &raw mut attr) };
        if parent.is_null() {
            log::debug!("{}: no domain around a thread domain: {}", self.name, io::Error::last_os_error());
            // SAFETY: made above, and used by nothing.
            unsafe { dealloc_td(td) };
            return (ptr::null_mut(), ptr::null_mut());
        }
        log::debug!("{}: queues have a thread domain", self.name);
        (td, parent)
    }

    pub(super) const fn context(&self) -> *mut ibv_context {
        self.context
    }

    /// Returns the domain in which memory is registered.
    pub(super) const fn protection_domain(&self) -> *mut ibv_pd {
        self.pd
    }

    /// Returns the domain in which queue pairs are created. It includes the memory of [`RawDevice::protection_domain`].
    pub(super) fn queue_domain(&self) -> *mut ibv_pd {
        if self.threads.1.is_null() { self.pd } else { self.threads.1 }
    }

    pub(super) const fn channel(&self) -> *mut ibv_comp_channel {
        self.channel
    }

    pub(super) fn completion_fd(&self) -> c_int {
        // SAFETY: the channel is live; its descriptor never changes.
        unsafe { (*self.channel).fd }
    }

    fn async_fd(&self) -> c_int {
        // SAFETY: the context is live; its descriptor never changes.
        unsafe { (*self.context).async_fd }
    }

    /// Returns the descriptors that have an edge when there may be asynchronous events: that of the context, and that of the subscription.
    pub(super) fn event_fds(&self) -> impl Iterator<Item = c_int> {
        std::iter::once(self.async_fd()).chain(self.events.as_ref().map(Subscription::wake_fd))
    }

    /// Releases the device to the kernel although the library keeps the numbers of its descriptors: the null device is put
    /// under these numbers, so that the library may close them later without harm. While the context_owner lives the library has the
    /// context open, so that no other file can be under them.
    fn release_files(&self) {
        debug_assert!(self.context_owner.is_some());
        let Ok(null) = File::options().read(true).write(true).open("/dev/null") else { return };
        for fd in [self.cmd_fd(), self.async_fd()] {
            // SAFETY: replaces a file of the library's by another, under a number that stays the library's.
            unsafe { libc::dup3(null.as_raw_fd(), fd, libc::O_CLOEXEC) };
        }
    }

    fn cmd_fd(&self) -> c_int {
        // SAFETY: the context is live; its descriptor never changes.
        unsafe { (*self.context).cmd_fd }
    }

    /// Returns the number of completion vectors: the interrupts over which completion events can be distributed.
    pub(super) fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is live; the number never changes.
        u32::try_from(unsafe { (*self.context).num_comp_vectors }).unwrap_or(1).max(1)
    }

    /// Returns the result of a call that releases an object of the device, from its return code. After the kernel has torn a device
    /// down, each such call fails with `EIO` although its object is destroyed: that counts as success.
    pub(super) fn given_back(&self, call: &'static str, rc: c_int) -> Result<()> {
        match check(call, rc) {
            Err(Error::Io { source, .. }) if source.raw_os_error() == Some(libc::EIO) && self.is_torn_down() => Ok(()),
            other => other.map_err(|error| error.on(&self.name)),
        }
    }

    /// Returns true if the kernel has destroyed this process's objects on the device, because the device was removed.
    ///
    /// Most drivers let the kernel do that while processes still have the device open (`ib_uverbs_remove_one` with
    /// `disassociate_ucontext`, drivers/infiniband/core/uverbs_main.c); with others (siw, rxe) the removal waits for the
    /// processes, whose calls go on working. Commands fail with `EIO` from before the destruction on, and `EIO` may be a driver's
    /// own, so it alone says nothing. But objects are destroyed with the newest first (`__uverbs_cleanup_ufile`, rdma_core.c),
    /// and the completion channel is older than all regions and queue pairs: when it is closed (`ib_uverbs_free_event_queue`),
    /// they are gone.
    fn is_torn_down(&self) -> bool {
        let mut fd = libc::pollfd { fd: self.completion_fd(), events: 0, revents: 0 };
        // SAFETY: one descriptor, in a place that outlives the call.
        unsafe { libc::poll(&raw mut fd, 1, 0) == 1 && fd.revents & libc::POLLERR != 0 }
    }

    /// Makes the drop of this device close it in the library, too.
    pub(super) fn set_removed(&self) {
        self.removed.store(true, Ordering::Relaxed);
    }

    /// Returns the next asynchronous event for this provider; `None` if there is none at the moment.
    pub(super) fn next_event(&self) -> Result<Option<AsyncEvent>> {
        match &self.events {
            Some(events) => events.next(|| self.read_event()),
            None => Ok(None),
        }
    }

    fn read_event(&self) -> Result<Option<AsyncEvent>> {
        let mut event = MaybeUninit::<ibv_async_event>::uninit();
        let event = event.as_mut_ptr();
        // SAFETY: a live context and a place for the result.
        if unsafe { ibv_get_async_event(self.context, event) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(Error::io("ibv_get_async_event", error)),
            };
        }
        // SAFETY: the call has filled the event. Its object lives until the event is acknowledged, which is below.
        let copy = unsafe { AsyncEvent::copy(event) };
        // SAFETY: acknowledged once, and not used any more.
        unsafe { ibv_ack_async_event(event) }
        Ok(Some(copy))
    }
}

impl Drop for RawDevice {
    fn drop(&mut self) {
        let warn = |result: Result<()>| {
            if let Err(error) = result {
                log::warn!("{}: {error}", self.name);
            }
        };
        if !self.guard.is_null() {
            // SAFETY: made by `guard`, used by nobody, destroyed once.
            warn(check("ibv_destroy_cq", unsafe { ibv_destroy_cq(self.guard) }));
        }
        if !self.channel.is_null() {
            // SAFETY: queues hold a share of the device, so none is left on the channel.
            warn(check("ibv_destroy_comp_channel", unsafe { ibv_destroy_comp_channel(self.channel) }));
        }
        if !self.threads.1.is_null() {
            // SAFETY: queue pairs hold a share of the device, so none is left in the domain, which goes before the two that
            // it is made of.
            warn(check("ibv_dealloc_pd", unsafe { ibv_dealloc_pd(self.threads.1) }));
            // SAFETY: the domain around it is gone.
            warn(check("ibv_dealloc_td", unsafe { dealloc_td(self.threads.0) }));
        }
        // SAFETY: regions and queue pairs hold a share of the device, so none is left in the domain.
        warn(check("ibv_dealloc_pd", unsafe { ibv_dealloc_pd(self.pd) }));
        let last = self.events.take().is_some_and(Subscription::end);
        let removed = self.managed && self.removed.load(Ordering::Relaxed);
        if removed && last && !close_removed_devices() {
            // It was the last device of the system. The library then closes no removed devices, and would keep this one open until
            // the process ends.
            self.release_files();
        }
        self.context_owner = None;
        if removed {
            close_removed_devices();
        }
    }
}

/// Makes librdmacm list the devices: it then closes the removed ones that are not in use. The kernel waits for that before it
/// finishes the removal. Returns `false` if the library found no device at all: then it closes none.
fn close_removed_devices() -> bool {
    // SAFETY: the count is not asked for; the list is freed unchanged.
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
