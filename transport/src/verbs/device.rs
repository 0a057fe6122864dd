//! A device: context, protection domain, channels, what it can do, its asynchronous events.

use std::ffi::{CStr, c_int};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use rdma_sys::{
    ___ibv_query_port, ibv_ack_async_event, ibv_alloc_pd, ibv_async_event, ibv_atomic_cap, ibv_comp_channel,
    ibv_context, ibv_cq, ibv_create_comp_channel, ibv_create_cq, ibv_create_qp, ibv_dealloc_pd,
    ibv_destroy_comp_channel, ibv_destroy_cq, ibv_destroy_qp, ibv_device_attr, ibv_device_cap_flags, ibv_event_type,
    ibv_get_async_event, ibv_node_type, ibv_pd, ibv_port_attr, ibv_port_state, ibv_qp_init_attr, ibv_qp_type,
    ibv_query_device, ibv_transport_type, rdma_free_devices, rdma_get_devices,
};

use super::ffi::{check, key_of, non_null, set_nonblocking};
use super::id::RawId;
use super::qp::Numbers;
use crate::caps::{Capabilities, Features};
use crate::error::{Error, Result};
use crate::event::DeviceEventKind;
use crate::provider::DeviceInfo;
use crate::slab::Key;
use crate::wr::MAX_SGE;

/// What InfiniBand's connection manager carries with a request, beside the header of the kernel.
const IB_PRIVATE_DATA: usize = 56;
/// What MPA carries, beside what its enhanced setup takes, in a length of one byte.
const IWARP_PRIVATE_DATA: usize = 251;
/// Largest inline sends that are tried.
const INLINE: [u32; 6] = [512, 256, 128, 64, 32, 16];

/// The one owner of what the provider has opened on a device.
#[derive(Debug)]
pub(super) struct RawDevice {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    channel: *mut ibv_comp_channel,
    /// The device is going away.
    removed: AtomicBool,
    /// On siw: see `guard`. Else null.
    guard: *mut ibv_cq,
    /// The NUMA node that it is attached to.
    numa_node: Option<u32>,
    /// An id of the provider's own on the device. While it lives, librdmacm keeps the context open.
    anchor: Option<Arc<RawId>>,
}

/// Entries of a completion queue that covers page 144 of a context's mappings, whatever an entry's size from 32 bytes on.
const GUARD_ENTRIES: c_int = 20_000;

/// libsiw takes the mapping at page 144 (`SIW_INVAL_UOBJ_KEY`, 0x90000) for a failure, and since the kernel hands out the
/// lowest free page, so fails every queue from then on: with small queues, the 56th queue pair. A queue that is large
/// enough to cover the page keeps it from being anybody's first.
fn guard(context: *mut ibv_context, name: &str) -> *mut ibv_cq {
    if !name.starts_with("siw") {
        return ptr::null_mut();
    }
    // SAFETY: a live context; a queue of its own, on no channel. Null when there is none to be had: then it goes without.
    unsafe { ibv_create_cq(context, GUARD_ENTRIES, ptr::null_mut(), ptr::null_mut(), 0) }
}

/// What the system says of a device's NUMA node: -1 stands for none.
fn parse_numa_node(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

// SAFETY: libibverbs lets any thread use a context, a domain and a channel; they are destroyed once, by the last
// owner.
unsafe impl Send for RawDevice {}
// SAFETY: as above.
unsafe impl Sync for RawDevice {}

impl RawDevice {
    /// Opens the device that `anchor` is on.
    fn open(anchor: Arc<RawId>) -> Result<Self> {
        let context = anchor.context();
        // SAFETY: a live context: an id is on it. The result is checked.
        let pd = non_null("ibv_alloc_pd", unsafe { ibv_alloc_pd(context) })?;
        let (channel, removed) = (ptr::null_mut(), AtomicBool::new(false));
        // SAFETY: a live context has a live device, whose name ends in zero.
        let name = unsafe { CStr::from_ptr((*(*context).device).name.as_ptr()) }.to_string_lossy();
        let node = fs::read_to_string(format!("/sys/class/infiniband/{name}/device/numa_node"));
        let (guard, numa_node) = (guard(context, &name), node.ok().and_then(|text| parse_numa_node(&text)));
        let mut device = Self { context, pd, channel, removed, guard, numa_node, anchor: Some(anchor) };
        open_contexts().push(context.addr());
        // SAFETY: a live context; the result is checked.
        device.channel = non_null("ibv_create_comp_channel", unsafe { ibv_create_comp_channel(context) })?;
        set_nonblocking(device.completion_fd())?;
        set_nonblocking(device.async_fd())?;
        Ok(device)
    }

    pub(super) const fn context(&self) -> *mut ibv_context {
        self.context
    }

    pub(super) const fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    pub(super) const fn protection_domain(&self) -> *mut ibv_pd {
        self.pd
    }

    pub(super) const fn channel(&self) -> *mut ibv_comp_channel {
        self.channel
    }

    pub(super) fn completion_fd(&self) -> c_int {
        // SAFETY: the channel is live; its descriptor never changes.
        unsafe { (*self.channel).fd }
    }

    pub(super) fn async_fd(&self) -> c_int {
        // SAFETY: the context is live; its descriptor never changes.
        unsafe { (*self.context).async_fd }
    }

    fn cmd_fd(&self) -> c_int {
        // SAFETY: the context is live; its descriptor never changes.
        unsafe { (*self.context).cmd_fd }
    }

    /// Has the library close the device too, when this is dropped.
    pub(super) fn set_removed(&self) {
        self.removed.store(true, Ordering::Relaxed);
    }

    /// Whether a port can carry traffic; what it is like if not.
    pub(super) fn port_state(&self, port: u8) -> Result<std::result::Result<(), &'static str>> {
        use ibv_port_state as state;
        Ok(match port_attr(self.context, port)?.state {
            // Deferred: it is active, and its link flickers.
            state::IBV_PORT_ACTIVE | state::IBV_PORT_ACTIVE_DEFER => Ok(()),
            state::IBV_PORT_DOWN => Err("down"),
            state::IBV_PORT_INIT => Err("initializing: no subnet manager has set it up"),
            state::IBV_PORT_ARMED => Err("armed, not active: the subnet manager has not finished"),
            _ => Err("in a state that this library does not know"),
        })
    }

    /// The next asynchronous event; `None` when there is none now.
    pub(super) fn next_event(&self) -> Result<Option<AsyncEvent>> {
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
        // SAFETY: the call has filled it. The type is read as the number it is: the binding's enum does not know
        // events newer than itself.
        let kind = unsafe { (&raw const (*event).event_type).cast::<u32>().read() };
        // SAFETY: the type says which variant is there, and queue pairs and queues live until the event is
        // acknowledged, which is below.
        let copy = unsafe { AsyncEvent::copy(kind, event) };
        // SAFETY: acknowledged once, and not used any more.
        unsafe { ibv_ack_async_event(event) }
        Ok(Some(copy))
    }
}

impl Drop for RawDevice {
    fn drop(&mut self) {
        if !self.guard.is_null() {
            // SAFETY: made by `guard`, used by nobody, destroyed once.
            if let Err(error) = check("ibv_destroy_cq", unsafe { ibv_destroy_cq(self.guard) }) {
                log::warn!("{error}");
            }
        }
        if !self.channel.is_null() {
            // SAFETY: queues hold a share of the device, so none is left on the channel.
            if let Err(error) = check("ibv_destroy_comp_channel", unsafe { ibv_destroy_comp_channel(self.channel) }) {
                log::warn!("{error}");
            }
        }
        // SAFETY: regions and queue pairs hold a share of the device, so none is left in the domain.
        if let Err(error) = check("ibv_dealloc_pd", unsafe { ibv_dealloc_pd(self.pd) }) {
            log::warn!("{error}");
        }
        let files = OpenFiles::of(self.cmd_fd(), self.async_fd());
        let last = {
            let mut open = open_contexts();
            if let Some(index) = open.iter().position(|&context| context == self.context.addr()) {
                open.swap_remove(index);
            }
            !open.contains(&self.context.addr())
        };
        // From here on the context may be closed.
        self.anchor = None;
        if self.removed.load(Ordering::Relaxed) && !forget_removed() && last {
            // It was the last device of the system, for which the library does not look: it would keep it for ever.
            files.release();
        }
    }
}

/// The contexts on which providers of this process have something open, one entry each.
fn open_contexts() -> MutexGuard<'static, Vec<usize>> {
    static OPEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes librdmacm look which devices there are: it then closes those that are gone and in no use, for which the
/// kernel waits before it lets them go. `false` when it found no device at all, and then it closes none.
fn forget_removed() -> bool {
    // SAFETY: the count is not asked for; the list is given back as it came.
    unsafe {
        let devices = rdma_get_devices(ptr::null_mut());
        if devices.is_null() {
            return false;
        }
        rdma_free_devices(devices);
    }
    true
}

/// The two open files of a context, and how to know them again when the context may be gone.
struct OpenFiles([(c_int, Option<String>); 2]);

impl OpenFiles {
    fn of(cmd: c_int, events: c_int) -> Self {
        Self([cmd, events].map(|fd| (fd, Self::behind(fd))))
    }

    /// What is open under a descriptor, whether or not its name is still there.
    fn behind(fd: c_int) -> Option<String> {
        let name = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()?.to_string_lossy().into_owned();
        Some(name.trim_end_matches(" (deleted)").to_owned())
    }

    /// Lets the kernel have the device back without its user, the library, which keeps the numbers: what is open
    /// under them becomes the null device, and closing that later is harmless.
    fn release(self) {
        let Ok(null) = File::options().read(true).write(true).open("/dev/null") else { return };
        for (fd, file) in self.0 {
            let is_ours = file.as_ref().is_some_and(|file| file.contains("infiniband"));
            if is_ours && Self::behind(fd) == file {
                // SAFETY: replaces an open file by another, under a number that was just seen to be the device's.
                unsafe { libc::dup3(null.as_raw_fd(), fd, libc::O_CLOEXEC) };
            }
        }
    }
}

/// An asynchronous event, copied out and acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AsyncEvent {
    /// Of a queue pair: its key and address.
    Qp { kind: QpEvent, key: Key, address: usize },
    /// A completion queue failed: its key and address.
    CqError { key: Key, address: usize },
    /// A shared receive queue failed, or runs low: its key and address.
    Srq { failed: bool, key: Key, address: usize },
    /// The device failed.
    DeviceFatal,
    /// Something about a port.
    Port(DeviceEventKind),
    /// Anything else.
    Other(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QpEvent {
    /// It failed; why.
    Failed(&'static str),
    /// Data came before the word that the connection is up.
    CommunicationEstablished,
    /// It ends, and takes nothing more from its shared receive queue.
    LastReceive,
    /// Nothing to act on.
    Other(u32),
}

impl AsyncEvent {
    /// # Safety
    /// `event` was filled by `ibv_get_async_event`, with the type `kind`, and is not acknowledged.
    unsafe fn copy(kind: u32, event: *const ibv_async_event) -> Self {
        use ibv_event_type as ty;
        const CQ_ERR: u32 = ty::IBV_EVENT_CQ_ERR as u32;
        const QP_FATAL: u32 = ty::IBV_EVENT_QP_FATAL as u32;
        const QP_REQ_ERR: u32 = ty::IBV_EVENT_QP_REQ_ERR as u32;
        const QP_ACCESS_ERR: u32 = ty::IBV_EVENT_QP_ACCESS_ERR as u32;
        const COMM_EST: u32 = ty::IBV_EVENT_COMM_EST as u32;
        const SQ_DRAINED: u32 = ty::IBV_EVENT_SQ_DRAINED as u32;
        const PATH_MIG: u32 = ty::IBV_EVENT_PATH_MIG as u32;
        const PATH_MIG_ERR: u32 = ty::IBV_EVENT_PATH_MIG_ERR as u32;
        const QP_LAST_WQE: u32 = ty::IBV_EVENT_QP_LAST_WQE_REACHED as u32;
        const DEVICE_FATAL: u32 = ty::IBV_EVENT_DEVICE_FATAL as u32;
        const SRQ_ERR: u32 = ty::IBV_EVENT_SRQ_ERR as u32;
        const SRQ_LIMIT: u32 = ty::IBV_EVENT_SRQ_LIMIT_REACHED as u32;
        const PORT_ACTIVE: u32 = ty::IBV_EVENT_PORT_ACTIVE as u32;
        const PORT_ERR: u32 = ty::IBV_EVENT_PORT_ERR as u32;
        const SM_CHANGE: u32 = ty::IBV_EVENT_SM_CHANGE as u32;
        const CLIENT_REREGISTER: u32 = ty::IBV_EVENT_CLIENT_REREGISTER as u32;
        const GID_CHANGE: u32 = ty::IBV_EVENT_GID_CHANGE as u32;
        let qp_event = match kind {
            QP_FATAL => Some(QpEvent::Failed("the queue pair failed")),
            QP_REQ_ERR => Some(QpEvent::Failed("the peer sent an invalid request")),
            QP_ACCESS_ERR => Some(QpEvent::Failed("the peer reached for memory it has no right to")),
            COMM_EST => Some(QpEvent::CommunicationEstablished),
            QP_LAST_WQE => Some(QpEvent::LastReceive),
            SQ_DRAINED | PATH_MIG | PATH_MIG_ERR => Some(QpEvent::Other(kind)),
            _ => None,
        };
        if let Some(event_kind) = qp_event {
            // SAFETY: the type says that this is a queue pair, which lives until the event is acknowledged.
            let (qp, context) = unsafe {
                let qp = (*event).element.qp;
                (qp, (*qp).qp_context)
            };
            return Self::Qp { kind: event_kind, key: key_of(context), address: qp.addr() };
        }
        match kind {
            CQ_ERR => {
                // SAFETY: the type says that this is a completion queue, which lives until the event is acknowledged.
                let (cq, context) = unsafe {
                    let cq = (*event).element.cq;
                    (cq, (*cq).cq_context)
                };
                Self::CqError { key: key_of(context), address: cq.addr() }
            }
            SRQ_ERR | SRQ_LIMIT => {
                // SAFETY: the type says that this is a shared queue, which lives until the event is acknowledged.
                let (srq, context) = unsafe {
                    let srq = (*event).element.srq;
                    (srq, (*srq).srq_context)
                };
                Self::Srq { failed: kind == SRQ_ERR, key: key_of(context), address: srq.addr() }
            }
            DEVICE_FATAL => Self::DeviceFatal,
            PORT_ACTIVE..=SM_CHANGE | CLIENT_REREGISTER | GID_CHANGE => {
                // SAFETY: the type says that this is a port.
                let port = u32::try_from(unsafe { (*event).element.port_num }).unwrap_or(0);
                Self::Port(match kind {
                    PORT_ACTIVE => DeviceEventKind::PortActive { port },
                    PORT_ERR => DeviceEventKind::PortDown { port },
                    GID_CHANGE => DeviceEventKind::AddressChange { port },
                    code => DeviceEventKind::Port { code, port },
                })
            }
            _ => Self::Other(kind),
        }
    }
}

/// A device of the provider. Its place in the list is its handle.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) info: DeviceInfo,
    pub(super) limits: Limits,
    /// What is open; nothing any more when the device was removed.
    pub(super) raw: Option<Arc<RawDevice>>,
    /// It is going away, or gone.
    pub(super) removed: bool,
    /// Ids on it, but for the one that watches it.
    pub(super) ids: usize,
    /// The provider's own id on it.
    pub(super) watch: Option<Key>,
    /// Completion queues armed and without an event since.
    pub(super) armed: usize,
    /// Its queue pairs by their number.
    pub(super) numbers: Numbers,
    /// The port in use.
    pub(super) port: u8,
    /// That port was down when it was last asked.
    pub(super) down: bool,
    /// To be destroyed when the port is up.
    pub(super) parked: Vec<Arc<RawId>>,
}

/// What the provider keeps to beyond [`Capabilities`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) iwarp: bool,
    /// RDMA Reads outstanding here.
    pub(super) responder_resources: u8,
    /// RDMA Reads outstanding at the peer.
    pub(super) initiator_depth: u8,
    /// Entries of a receive on a shared queue.
    pub(super) shared_sge: u32,
}

impl Device {
    /// Opens what the provider needs on the device of `anchor`, an id that nothing else is done with.
    pub(super) fn open(anchor: Arc<RawId>, port: u8) -> Result<Self> {
        let raw = RawDevice::open(anchor)?;
        let context = raw.context;
        // SAFETY: all fields are numbers.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: a live context and a place for the result.
        check("ibv_query_device", unsafe { ibv_query_device(context, &raw mut attr) })?;
        // SAFETY: a context has its device, with a name that ends in zero, until it is closed.
        let (device, name) = unsafe { (&*(*context).device, CStr::from_ptr((*(*context).device).name.as_ptr())) };
        let iwarp = device.transport_type == ibv_transport_type::IBV_TRANSPORT_IWARP
            || device.node_type == ibv_node_type::IBV_NODE_RNIC;
        let reads = |limit: c_int| u8::try_from(limit.clamp(0, 16)).unwrap_or(16);
        let limits = Limits {
            iwarp,
            responder_resources: reads(attr.max_qp_rd_atom),
            initiator_depth: reads(attr.max_qp_init_rd_atom),
            shared_sge: u32::try_from(attr.max_srq_sge).unwrap_or(0),
        };
        let mut capabilities = capabilities(&attr, &limits);
        capabilities.max_inline = probe_inline(&raw);
        capabilities.numa_node = raw.numa_node();
        // SAFETY: a live context: the device has it.
        capabilities.completion_moderation = unsafe { super::moderation::most(raw.context()) };
        let port_attr = port_attr(context, port)?;
        if capabilities.features.contains(Features::DATAGRAMS) {
            // A datagram is one packet. The code of 256 bytes is 1.
            capabilities.max_datagram = 128u32.checked_shl(port_attr.active_mtu).unwrap_or(0).min(4096);
        }
        match port_attr.max_msg_sz {
            0 => {}
            max => capabilities.max_message = capabilities.max_message.min(max.into()),
        }
        let info = DeviceInfo { name: name.to_string_lossy().into_owned(), capabilities };
        log::debug!("device {}: {} {capabilities:?}", info.name, if iwarp { "iWARP" } else { "InfiniBand or RoCE" });
        let (raw, numbers, parked) = (Some(Arc::new(raw)), Numbers::default(), Vec::new());
        let (removed, down, ids, watch, armed) = (false, false, 0, None, 0);
        Ok(Self { info, limits, raw, removed, ids, watch, armed, numbers, port, down, parked })
    }

    /// What is open, while the device is there.
    pub(super) fn live(&self) -> Result<&Arc<RawDevice>> {
        self.raw
            .as_ref()
            .filter(|_| !self.removed)
            .ok_or_else(|| Error::NoDevice { reason: format!("{} was removed", self.info.name) })
    }
}

fn capabilities(attr: &ibv_device_attr, limits: &Limits) -> Capabilities {
    let mut features = Features::READ | Features::WRITE;
    if !limits.iwarp {
        features |= Features::WRITE_WITH_IMMEDIATE | Features::SEND_WITH_IMMEDIATE | Features::SERVER_SENDS_FIRST;
        features |= Features::DATAGRAMS;
        if attr.max_mcast_grp > 0 && attr.max_mcast_qp_attach > 0 {
            features |= Features::MULTICAST;
        }
        if attr.atomic_cap != ibv_atomic_cap::IBV_ATOMIC_NONE {
            features |= Features::ATOMICS;
        }
    }
    if attr.device_cap_flags & ibv_device_cap_flags::IBV_DEVICE_MEM_MGT_EXTENSIONS.0 != 0 {
        features |= Features::SEND_WITH_INVALIDATE;
        if limits.iwarp {
            features |= Features::REMOTE_INVALIDATION;
        }
    }
    if attr.max_srq > 0 && attr.max_srq_wr > 0 {
        features |= Features::SHARED_RECEIVE_QUEUE;
    }
    let mut capabilities = Capabilities::portable(features);
    let positive = |limit: c_int| u32::try_from(limit).unwrap_or(0);
    capabilities.max_sge = positive(attr.max_sge).min(MAX_SGE as u32);
    // Siw takes more than it reads into, and is silent about the rest.
    capabilities.max_read_sge = match attr.max_sge_rd {
        0 if limits.iwarp => 1,
        0 => capabilities.max_sge,
        limit => positive(limit).min(capabilities.max_sge),
    };
    capabilities.max_queue_depth = positive(attr.max_qp_wr);
    capabilities.max_shared_receives = if attr.max_srq > 0 { positive(attr.max_srq_wr) } else { 0 };
    capabilities.max_completion_queue = positive(attr.max_cqe);
    capabilities.max_private_data = if limits.iwarp { IWARP_PRIVATE_DATA } else { IB_PRIVATE_DATA };
    capabilities.max_read_depth = limits.responder_resources.min(limits.initiator_depth).into();
    capabilities
}

fn port_attr(context: *mut ibv_context, port: u8) -> Result<ibv_port_attr> {
    // SAFETY: all fields are numbers; the compatible form of the call fills them only in part.
    let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
    // SAFETY: a live context and a place for the result.
    check("ibv_query_port", unsafe { ___ibv_query_port(context, port.max(1), &raw mut attr) })?;
    Ok(attr)
}

/// Largest inline send: no attribute of a device says it, so queue pairs are tried.
fn probe_inline(device: &RawDevice) -> u32 {
    // SAFETY: a live context; no channel and no context of ours.
    let cq = unsafe { ibv_create_cq(device.context, 2, ptr::null_mut(), ptr::null_mut(), 0) };
    if cq.is_null() {
        return 0;
    }
    let found = INLINE.into_iter().find_map(|inline| {
        // SAFETY: all fields are numbers and pointers for which null is good.
        let mut attr: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        (attr.send_cq, attr.recv_cq, attr.qp_type) = (cq, cq, ibv_qp_type::IBV_QPT_RC);
        (attr.cap.max_send_wr, attr.cap.max_recv_wr) = (1, 1);
        (attr.cap.max_send_sge, attr.cap.max_recv_sge) = (1, 1);
        attr.cap.max_inline_data = inline;
        // SAFETY: a live domain and queue; the attributes are read and updated during the call.
        let qp = unsafe { ibv_create_qp(device.pd, &raw mut attr) };
        if qp.is_null() {
            return None;
        }
        // SAFETY: made above, and never used.
        unsafe { ibv_destroy_qp(qp) };
        Some(attr.cap.max_inline_data.min(inline))
    });
    // SAFETY: made above; no queue pair is left on it.
    unsafe { ibv_destroy_cq(cq) };
    found.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_follow_the_device() {
        // SAFETY: all fields are numbers.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        (attr.max_sge, attr.max_qp_wr, attr.max_cqe) = (32, 1 << 14, 1 << 20);
        attr.atomic_cap = ibv_atomic_cap::IBV_ATOMIC_HCA;
        let roce =
            capabilities(&attr, &Limits { iwarp: false, responder_resources: 16, initiator_depth: 4, shared_sge: 4 });
        assert!(roce.features.contains(Features::ATOMICS | Features::WRITE_WITH_IMMEDIATE | Features::READ));
        assert!(!roce.features.contains(Features::SEND_WITH_INVALIDATE));
        assert_eq!((roce.max_sge, roce.max_private_data, roce.max_read_depth), (4, 56, 4));
        let iwarp =
            capabilities(&attr, &Limits { iwarp: true, responder_resources: 16, initiator_depth: 16, shared_sge: 4 });
        assert_eq!(iwarp.features, Features::READ | Features::WRITE);
        assert_eq!((iwarp.max_private_data, iwarp.max_queue_depth), (251, 1 << 14));
    }

    #[test]
    fn a_numa_node_is_a_number_or_none() {
        assert_eq!(["0\n", "3\n", "-1\n", "", "x"].map(parse_numa_node), [Some(0), Some(3), None, None, None]);
    }

    #[test]
    fn the_last_receive_of_a_queue_pair_is_told() {
        let key = Key::new(5, 3);
        // SAFETY: all fields are numbers and pointers for which null is good.
        let mut qp: rdma_sys::ibv_qp = unsafe { std::mem::zeroed() };
        qp.qp_context = super::super::ffi::context_of(key);
        let element = rdma_sys::ibv_async_event_element_t { qp: &raw mut qp };
        let event = ibv_async_event { element, event_type: ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED };
        // SAFETY: the type has a queue pair, and it is alive.
        let copy = unsafe { AsyncEvent::copy(16, &raw const event) };
        assert_eq!(copy, AsyncEvent::Qp { kind: QpEvent::LastReceive, key, address: (&raw const qp).addr() });
    }

    #[test]
    fn events_that_the_binding_does_not_know_are_data() {
        // SAFETY: all variants are numbers or pointers for which zero is good; 0 is a known type.
        let event: ibv_async_event = unsafe { std::mem::zeroed() };
        // SAFETY: a type without a queue pair or queue.
        assert_eq!(unsafe { AsyncEvent::copy(4711, &raw const event) }, AsyncEvent::Other(4711));
        // SAFETY: as above.
        let port = unsafe { AsyncEvent::copy(ibv_event_type::IBV_EVENT_PORT_ERR as u32, &raw const event) };
        assert_eq!(port, AsyncEvent::Port(DeviceEventKind::PortDown { port: 0 }));
        // SAFETY: as above.
        let port = unsafe { AsyncEvent::copy(ibv_event_type::IBV_EVENT_CLIENT_REREGISTER as u32, &raw const event) };
        assert_eq!(port, AsyncEvent::Port(DeviceEventKind::Port { code: 17, port: 0 }));
    }
}
