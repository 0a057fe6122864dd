//! [`RawId`]: the sole owner of a connection-manager id and its queue pair.

use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::channel::EventChannel;
use super::cq::RawCq;
use super::device::RawDevice;
use super::ffi::{RawAddress, address, check, context_of, non_null};
use super::srq::RawSrq;
use super::sys::{
    RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, RDMA_OPTION_ID_AFONLY, RDMA_OPTION_ID_REUSEADDR, RDMA_OPTION_ID_TOS,
    ibv_atomic_cap, ibv_context, ibv_create_qp, ibv_destroy_qp, ibv_event_type, ibv_modify_qp, ibv_qp, ibv_qp_attr,
    ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state, ibv_query_qp, rdma_accept, rdma_bind_addr, rdma_cm_id,
    rdma_conn_param, rdma_connect, rdma_create_id, rdma_create_qp, rdma_destroy_id, rdma_disconnect,
    rdma_join_multicast, rdma_leave_multicast, rdma_listen, rdma_migrate_id, rdma_notify, rdma_port_space, rdma_reject,
    rdma_resolve_addr, rdma_resolve_route, rdma_set_option,
};
use super::transitions::{self, Change};
use crate::cm::ReadDepth;
use crate::error::{Error, Result};
use crate::slab::Key;

/// The kind of service that an id is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Service {
    /// Reliable connections.
    Connected,
    /// Unreliable datagrams.
    Datagram,
}

/// The method by which an id connects.
#[derive(Debug)]
enum ConnectMethod {
    /// The connection manager connects the id.
    RdmaCm { raw: *mut rdma_cm_id, _channel: Arc<EventChannel> },
    /// The id connects by exchange over a stream; the port is 0 while it is unknown.
    Exchange { port: u8, local: Option<SocketAddr>, peer: Option<SocketAddr> },
}

/// Owns an id and its queue pair, and shares the ownership of the objects that these depend on.
#[derive(Debug)]
pub(super) struct RawId {
    method: ConnectMethod,
    /// Set when the program has destroyed the id: no call may start on it.
    abandoned: AtomicBool,
    /// The queue pair, and the queues that it uses.
    qp: OnceLock<(*mut ibv_qp, Queues)>,
    device: OnceLock<Arc<RawDevice>>,
}

// SAFETY: the library locks what ids share. The id's own fields are written by the calls below, and two threads call on
// one id only while one of them is inside `connect` (see `connector`); then the other makes no call but `abandon`, `flush`
// and those that post, none of which touches what `rdma_connect` writes.
unsafe impl Send for RawId {}
// SAFETY: as above.
unsafe impl Sync for RawId {}

impl RawId {
    pub(super) fn create(channel: &Arc<EventChannel>, service: Service) -> Result<Self> {
        let mut raw = ptr::null_mut();
        let space = match service {
            Service::Connected => rdma_port_space::RDMA_PS_TCP,
            Service::Datagram => rdma_port_space::RDMA_PS_UDP,
        };
        // SAFETY: a live channel and a place for the result; the context is set later.
        let rc = unsafe { rdma_create_id(channel.as_ptr(), &raw mut raw, ptr::null_mut(), space) };
        check("rdma_create_id", rc)?;
        // SAFETY: the id was made by the call above, for us alone.
        Ok(unsafe { Self::from_raw(raw, channel) })
    }

    /// # Safety
    /// `raw` is a live id on `channel` that nobody else owns.
    pub(super) unsafe fn from_raw(raw: *mut rdma_cm_id, channel: &Arc<EventChannel>) -> Self {
        Self::with_method(ConnectMethod::RdmaCm { raw, _channel: Arc::clone(channel) })
    }

    /// Returns an id that connects by exchange, on a port of a device.
    pub(super) fn for_exchange(port: u8, local: Option<SocketAddr>, peer: Option<SocketAddr>) -> Self {
        Self::with_method(ConnectMethod::Exchange { port, local, peer })
    }

    fn with_method(method: ConnectMethod) -> Self {
        Self { method, abandoned: AtomicBool::new(false), qp: OnceLock::new(), device: OnceLock::new() }
    }

    /// Returns the id of the connection manager.
    ///
    /// # Errors
    /// The id connects by exchange.
    fn cm_id(&self) -> Result<*mut rdma_cm_id> {
        match self.method {
            ConnectMethod::RdmaCm { raw, .. } => Ok(raw),
            ConnectMethod::Exchange { .. } => {
                Err(Error::InvalidState { call: "a call of rdma_cm", state: "connecting by exchange" })
            }
        }
    }

    pub(super) const fn uses_exchange(&self) -> bool {
        matches!(self.method, ConnectMethod::Exchange { .. })
    }

    pub(super) fn service(&self) -> Service {
        let Ok(raw) = self.cm_id() else { return Service::Connected };
        // SAFETY: the id is live; its port space never changes.
        match unsafe { (*raw).ps } {
            rdma_port_space::RDMA_PS_UDP => Service::Datagram,
            _ => Service::Connected,
        }
    }

    /// Joins a group; its events carry `number`.
    pub(super) fn join(&self, group: IpAddr, number: usize) -> Result<()> {
        let raw = self.cm_id()?;
        let group = RawAddress::new(SocketAddr::new(group, 0));
        let number = ptr::without_provenance_mut(number);
        // SAFETY: a live id with a queue pair; the address is read during the call, the context is a number.
        check("rdma_join_multicast", unsafe { rdma_join_multicast(raw, group.as_ptr(), number) })
    }

    pub(super) fn leave(&self, group: IpAddr) -> Result<()> {
        let raw = self.cm_id()?;
        let group = RawAddress::new(SocketAddr::new(group, 0));
        // SAFETY: a live id; the address is read during the call, which waits until events about the group are
        // acknowledged. They are acknowledged as they are read.
        check("rdma_leave_multicast", unsafe { rdma_leave_multicast(raw, group.as_ptr()) })
    }

    /// Moves an id without a queue pair to another event channel, and off its device. The caller reads neither
    /// channel meanwhile.
    pub(super) fn migrate(&mut self, to: &Arc<EventChannel>) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: a live id that nobody else has, as `self` is borrowed mutably, and a live channel. The call waits until
        // events of the id are acknowledged. They are acknowledged as they are read.
        check("rdma_migrate_id", unsafe { rdma_migrate_id(raw, to.as_ptr()) })?;
        self.method = ConnectMethod::RdmaCm { raw, _channel: Arc::clone(to) };
        self.device = OnceLock::new();
        Ok(())
    }

    /// Sets the key that events of the id carry from now on.
    pub(super) fn set_key(&self, key: Key) {
        if let Ok(raw) = self.cm_id() {
            // SAFETY: the id is live, and only the driving thread, which calls this, reads its context.
            unsafe { (*raw).context = context_of(key) }
        }
    }

    /// Ties the id to the device it is on.
    pub(super) fn set_device(&self, device: &Arc<RawDevice>) {
        let _ = self.device.set(Arc::clone(device));
    }

    #[cfg(all(test, not(feature = "rdma-sys")))]
    pub(super) fn as_ptr(&self) -> *mut rdma_cm_id {
        self.cm_id().unwrap_or(ptr::null_mut())
    }

    /// Returns the context of the id's device; null while it has no device.
    pub(super) fn context(&self) -> *mut ibv_context {
        match self.method {
            // SAFETY: the id is live.
            ConnectMethod::RdmaCm { raw, .. } => unsafe { (*raw).verbs },
            ConnectMethod::Exchange { .. } => self.device.get().map_or(ptr::null_mut(), |device| device.context()),
        }
    }

    /// Returns the number of the device's port, from 1; 0 while the id has no device.
    pub(super) fn port(&self) -> u8 {
        match self.method {
            // SAFETY: the id is live.
            ConnectMethod::RdmaCm { raw, .. } => unsafe { (*raw).port_num },
            ConnectMethod::Exchange { port, .. } => port,
        }
    }

    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        match self.method {
            // SAFETY: the id is live, and the union has room for every family.
            ConnectMethod::RdmaCm { raw, .. } => unsafe {
                address((&raw const (*raw).route.addr.src_addr_union).cast())
            },
            ConnectMethod::Exchange { local, .. } => local,
        }
    }

    pub(super) fn peer_address(&self) -> Option<SocketAddr> {
        match self.method {
            // SAFETY: as for the local address.
            ConnectMethod::RdmaCm { raw, .. } => unsafe {
                address((&raw const (*raw).route.addr.dst_addr_union).cast())
            },
            ConnectMethod::Exchange { peer, .. } => peer,
        }
    }

    pub(super) fn bind(&self, to: &RawAddress) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: a live id; the address is read during the call.
        check("rdma_bind_addr", unsafe { rdma_bind_addr(raw, to.as_ptr()) })
    }

    fn set_option<T>(&self, option: i32, mut value: T) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: a live id; the option has this type, says each caller, and is read during the call.
        let rc = unsafe { rdma_set_option(raw, RDMA_OPTION_ID, option, (&raw mut value).cast(), size_of::<T>()) };
        check("rdma_set_option", rc)
    }

    /// Allows a listener to use an address that closed connections still occupy.
    pub(super) fn reuse_address(&self) -> Result<()> {
        self.set_option(RDMA_OPTION_ID_REUSEADDR, 1_i32)
    }

    /// Restricts an IPv6 listener to IPv6; with `false` it accepts IPv4, too.
    pub(super) fn ipv6_only(&self, only: bool) -> Result<()> {
        self.set_option(RDMA_OPTION_ID_AFONLY, i32::from(only))
    }

    /// Sets the type of service of the packets: on RoCE the traffic class, on iWARP that of the TCP connection.
    pub(super) fn set_type_of_service(&self, value: u8) -> Result<()> {
        self.set_option(RDMA_OPTION_ID_TOS, value)
    }

    /// Sets the code of the ack timeout: the device retransmits after 4.096 us times 2 to the power of the code.
    pub(super) fn set_ack_timeout(&self, code: u8) -> Result<()> {
        self.set_option(RDMA_OPTION_ID_ACK_TIMEOUT, code)
    }

    pub(super) fn listen(&self, backlog: u32) -> Result<()> {
        let raw = self.cm_id()?;
        let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
        // SAFETY: a live id.
        check("rdma_listen", unsafe { rdma_listen(raw, backlog) })
    }

    pub(super) fn resolve_address(&self, peer: &RawAddress, timeout_ms: i32) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: a live id; no source address, and the peer's is read during the call.
        check("rdma_resolve_addr", unsafe { rdma_resolve_addr(raw, ptr::null_mut(), peer.as_ptr(), timeout_ms) })
    }

    pub(super) fn resolve_route(&self, timeout_ms: i32) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: a live id.
        check("rdma_resolve_route", unsafe { rdma_resolve_route(raw, timeout_ms) })
    }

    /// Connects. May block on iWARP.
    pub(super) fn connect(&self, offer: &ConnectOffer) -> Result<()> {
        let raw = self.cm_id()?;
        let mut param = offer.param();
        // SAFETY: a live id; the parameters and the private data they point to are read during the call.
        check("rdma_connect", unsafe { rdma_connect(raw, &raw mut param) })
    }

    pub(super) fn accept(&self, offer: &ConnectOffer) -> Result<()> {
        self.accept_for(offer, 0)
    }

    /// Accepts for a queue pair of another id, if this one has none.
    pub(super) fn accept_for(&self, offer: &ConnectOffer, qp_number: u32) -> Result<()> {
        let raw = self.cm_id()?;
        let mut param = offer.param();
        param.qp_num = qp_number;
        // SAFETY: a live id; the parameters and the private data they point to are read during the call.
        check("rdma_accept", unsafe { rdma_accept(raw, &raw mut param) })
    }

    pub(super) fn reject(&self, private_data: &[u8]) -> Result<()> {
        let raw = self.cm_id()?;
        let len = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
        // SAFETY: a live id; at most as many bytes as there are, read during the call.
        check("rdma_reject", unsafe { rdma_reject(raw, private_data.as_ptr().cast(), len) })
    }

    pub(super) fn disconnect(&self) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: a live id.
        check("rdma_disconnect", unsafe { rdma_disconnect(raw) })
    }

    /// Notifies the connection manager that data has arrived before the event that establishes the connection.
    pub(super) fn notify_established(&self) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: a live id.
        check("rdma_notify", unsafe { rdma_notify(raw, ibv_event_type::IBV_EVENT_COMM_EST) })
    }

    /// Creates the queue pair with `attr`, which names `queues`.
    pub(super) fn create_qp(&self, attr: &mut ibv_qp_init_attr, queues: Queues) -> Result<*mut ibv_qp> {
        let Some(device) = self.device.get() else {
            return Err(Error::InvalidState { call: "create_qp", state: "on no device" });
        };
        let qp = match self.method {
            ConnectMethod::RdmaCm { raw, .. } => {
                // SAFETY: a live id without a queue pair, a protection domain and queues of the id's device; the attributes are
                // read and updated during the call.
                check("rdma_create_qp", unsafe { rdma_create_qp(raw, device.queue_domain(), attr) })?;
                // SAFETY: the call succeeded: the id has its queue pair.
                unsafe { (*raw).qp }
            }
            ConnectMethod::Exchange { port, .. } => {
                // SAFETY: a domain and queues of one device; the attributes are read and updated during the call.
                let qp = non_null("ibv_create_qp", unsafe { ibv_create_qp(device.queue_domain(), attr) })?;
                let atomics = device.attr.0.atomic_cap != ibv_atomic_cap::IBV_ATOMIC_NONE;
                if let Err(error) = modify(qp, transitions::init(port, atomics)) {
                    // SAFETY: made above, and used by nothing.
                    unsafe { ibv_destroy_qp(qp) };
                    return Err(error);
                }
                qp
            }
        };
        let _ = self.qp.set((qp, queues));
        Ok(qp)
    }

    /// The queue pair, which lives as long as the id.
    fn qp(&self) -> Option<*mut ibv_qp> {
        self.qp.get().map(|(qp, _)| *qp)
    }

    /// Changes the queue pair, if there is one.
    pub(super) fn modify(&self, change: Change) -> Result<()> {
        self.qp().map_or(Ok(()), |qp| modify(qp, change))
    }

    /// Puts the queue pair into the error state: every work request is flushed, and from here on the device touches no memory
    /// for this queue pair.
    pub(super) fn flush(&self) -> Result<()> {
        let mut attr = transitions::none();
        attr.qp_state = ibv_qp_state::IBV_QPS_ERR;
        self.modify((attr, ibv_qp_attr_mask::IBV_QP_STATE))
    }

    /// Sets the code of the receiver-not-ready timer. The connection manager leaves the longest time.
    pub(super) fn set_min_rnr_timer(&self, code: u8) -> Result<()> {
        let mut attr = transitions::none();
        attr.min_rnr_timer = code;
        self.modify((attr, ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER))
    }

    /// Queries the attributes of the queue pair; `None` if the id has no queue pair.
    pub(super) fn query(&self, mask: ibv_qp_attr_mask) -> Result<Option<ibv_qp_attr>> {
        let Some(qp) = self.qp() else { return Ok(None) };
        let mut attr = transitions::none();
        // SAFETY: all fields are numbers and pointers for which null is good.
        let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        // SAFETY: a live queue pair, and places for the results.
        check("ibv_query_qp", unsafe { ibv_query_qp(qp, &raw mut attr, mask.0 as i32, &raw mut init) })?;
        Ok(Some(attr))
    }

    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }
}

/// Changes a queue pair, which is live.
fn modify(qp: *mut ibv_qp, (mut attr, mask): Change) -> Result<()> {
    // SAFETY: a live queue pair, says each caller in this file; the attributes are read during the call.
    check("ibv_modify_qp", unsafe { ibv_modify_qp(qp, &raw mut attr, mask.0 as i32) })
}

impl RawId {
    /// Destroys an id that has no other owner, and its queue pair. Fails if the device keeps the queue pair. If a thread still shares
    /// the id, that thread destroys it; then the result is `stopped`: `Ok` if the queue pair is in the error state.
    pub(super) fn destroy(this: Arc<Self>, stopped: Result<()>) -> Result<()> {
        Arc::into_inner(this).map_or(stopped, |mut id| id.destroy_qp())
    }

    /// Destroys the queue pair. If the device keeps it, the objects that it uses are kept until the process ends, too.
    fn destroy_qp(&mut self) -> Result<()> {
        let Some((qp, queues)) = self.qp.take() else { return Ok(()) };
        // SAFETY: the queue pair is live, and goes before what it depends on; its asynchronous events are acknowledged as they
        // are read. `rdma_destroy_qp` would do the same, and would not say whether it has worked.
        let rc = unsafe { ibv_destroy_qp(qp) };
        let rc = if cfg!(planted = "a-failed-destroy-qp-counts-as-success") { 0 } else { rc };
        if let ConnectMethod::RdmaCm { raw, .. } = self.method {
            // SAFETY: the id is live, and nobody asks for its queue pair any more.
            unsafe { (*raw).qp = ptr::null_mut() };
        }
        let device = self.device.get();
        let destroyed =
            device.map_or_else(|| check("ibv_destroy_qp", rc), |device| device.given_back("ibv_destroy_qp", rc));
        if destroyed.is_err() {
            std::mem::forget((queues, device.cloned()));
        }
        destroyed
    }
}

impl Drop for RawId {
    fn drop(&mut self) {
        if let Err(error) = self.destroy_qp() {
            log::error!("{error}: the queue pair is left as it is");
        }
        let ConnectMethod::RdmaCm { raw, .. } = self.method else { return };
        // SAFETY: the last owner; the id's events are acknowledged as they are read, so this waits for nobody.
        if let Err(error) = check("rdma_destroy_id", unsafe { rdma_destroy_id(raw) }) {
            log::warn!("{error}");
        }
    }
}

/// The queues that a queue pair uses.
#[derive(Clone, Debug)]
pub(super) struct Queues {
    pub(super) send: Arc<RawCq>,
    pub(super) recv: Arc<RawCq>,
    pub(super) shared: Option<Arc<RawSrq>>,
}

/// The parameters that one side of a connection offers.
#[derive(Clone, Debug)]
pub(super) struct ConnectOffer {
    pub(super) private_data: Box<[u8]>,
    pub(super) read_depth: ReadDepth,
    /// The number of retransmissions of an unanswered request, 0 to 7.
    pub(super) retry_count: u8,
    /// The number of retransmissions to a peer without a posted receive, 0 to 6; 7 stands for no limit.
    pub(super) rnr_retry_count: u8,
}

impl ConnectOffer {
    /// Returns the parameters, which point to the private data: use them while `self` lives.
    fn param(&self) -> rdma_conn_param {
        // SAFETY: all fields are numbers and a pointer, for which null is good.
        let mut param: rdma_conn_param = unsafe { std::mem::zeroed() };
        param.private_data = self.private_data.as_ptr().cast();
        param.private_data_len = u8::try_from(self.private_data.len()).unwrap_or(u8::MAX);
        let narrow = |depth: u16| u8::try_from(depth).unwrap_or(u8::MAX);
        param.responder_resources = narrow(self.read_depth.responder_resources);
        param.initiator_depth = narrow(self.read_depth.initiator_depth);
        param.retry_count = self.retry_count;
        param.rnr_retry_count = self.rnr_retry_count;
        param
    }
}
