//! [`RawId`]: a connection-manager id and its queue pair, which it destroys on drop.

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
use rdma_transport::cm::ReadDepth;
use rdma_transport::error::{Result, TransportError};
use rdma_transport::slab::Key;

/// The service of an id's queue pair.
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
    /// The id connects by out-of-band exchange: the two sides exchange the attributes of their queue pairs over a
    /// stream. `port` is 0 while the port is unknown.
    Exchange { port: u8, local: Option<SocketAddr>, peer: Option<SocketAddr> },
}

/// A connection-manager id and its queue pair, which are destroyed on drop. It keeps the objects
/// alive on which they depend.
#[derive(Debug)]
pub(super) struct RawId {
    method: ConnectMethod,
    /// Set when the program has destroyed the id. No new call may then start on the id.
    abandoned: AtomicBool,
    /// The queue pair, and the queues that it uses; unset before the queue pair is created.
    qp: OnceLock<(*mut ibv_qp, Queues)>,
    device: OnceLock<Arc<RawDevice>>,
}

// SAFETY: librdmacm protects the data that several ids have in common by a lock. The calls of this type write only the fields of their id.
// Two threads call on one id at the same time only while one of them is inside `connect` (see `connector`). During this time, the driving
// thread calls only `abandon`, functions that use the queue pair (`flush`, `query`, posts), and functions that read fields which do not
// change any more (service, port, context, addresses). None of these accesses the fields that `rdma_connect` writes.
unsafe impl Send for RawId {}
// SAFETY: two threads use one id at the same time only while one of them is inside `connect`, and then access different
// fields of it (see the implementation of `Send`).
unsafe impl Sync for RawId {}

impl RawId {
    pub(super) fn create(channel: &Arc<EventChannel>, service: Service) -> Result<Self> {
        let mut raw = ptr::null_mut();
        let space = match service {
            Service::Connected => rdma_port_space::RDMA_PS_TCP,
            Service::Datagram => rdma_port_space::RDMA_PS_UDP,
        };
        // SAFETY: the channel is live, and `raw` has room for the result. The id's context is set later.
        let rc = unsafe { rdma_create_id(channel.as_ptr(), &raw mut raw, ptr::null_mut(), space) };
        check("rdma_create_id", rc)?;
        // SAFETY: `rdma_create_id` has made the id, and nothing else owns it.
        Ok(unsafe { Self::from_raw(raw, channel) })
    }

    /// # Safety
    /// `raw` is a live id on `channel`, and nothing else owns it.
    pub(super) unsafe fn from_raw(raw: *mut rdma_cm_id, channel: &Arc<EventChannel>) -> Self {
        Self::with_method(ConnectMethod::RdmaCm { raw, _channel: Arc::clone(channel) })
    }

    /// Makes an id that connects by out-of-band exchange, over a stream, on a port of a device. `port` is the number of
    /// the device's port.
    pub(super) fn for_exchange(port: u8, local: Option<SocketAddr>, peer: Option<SocketAddr>) -> Self {
        Self::with_method(ConnectMethod::Exchange { port, local, peer })
    }

    fn with_method(method: ConnectMethod) -> Self {
        Self { method, abandoned: AtomicBool::new(false), qp: OnceLock::new(), device: OnceLock::new() }
    }

    /// Returns the pointer to the id of the connection manager.
    ///
    /// # Errors
    /// The id connects by out-of-band exchange, so the connection manager does not have it.
    fn cm_id(&self) -> Result<*mut rdma_cm_id> {
        match self.method {
            ConnectMethod::RdmaCm { raw, .. } => Ok(raw),
            ConnectMethod::Exchange { .. } => {
                Err(TransportError::InvalidState { call: "a call of rdma_cm", state: "connecting by exchange" })
            }
        }
    }

    pub(super) const fn uses_exchange(&self) -> bool {
        matches!(self.method, ConnectMethod::Exchange { .. })
    }

    pub(super) fn service(&self) -> Service {
        let Ok(raw) = self.cm_id() else { return Service::Connected };
        // SAFETY: the id is live, and its port space never changes.
        match unsafe { (*raw).ps } {
            rdma_port_space::RDMA_PS_UDP => Service::Datagram,
            _ => Service::Connected,
        }
    }

    /// Joins a multicast group. The later events of this join carry `number`, by which the provider finds the join.
    pub(super) fn join(&self, group: IpAddr, number: usize) -> Result<()> {
        let raw = self.cm_id()?;
        let group = RawAddress::new(SocketAddr::new(group, 0));
        let number = ptr::without_provenance_mut(number);
        // SAFETY: the id is live and has a queue pair. The library reads the address during the call. `number` is never
        // used as a pointer.
        check("rdma_join_multicast", unsafe { rdma_join_multicast(raw, group.as_ptr(), number) })
    }

    pub(super) fn leave(&self, group: IpAddr) -> Result<()> {
        let raw = self.cm_id()?;
        let group = RawAddress::new(SocketAddr::new(group, 0));
        // SAFETY: the id is live, and the library reads the address during the call. The call waits for unacknowledged
        // events about the group. There are none, because the provider acknowledges each event when it reads it.
        check("rdma_leave_multicast", unsafe { rdma_leave_multicast(raw, group.as_ptr()) })
    }

    /// Moves an id without a queue pair to another event channel. The id is on no device afterwards. Neither channel
    /// may be read during the call.
    pub(super) fn migrate(&mut self, to: &Arc<EventChannel>) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: the channel is live. The id is live, and no other code uses it, because `self` is borrowed mutably.
        // The call waits for unacknowledged events of the id. There are none, because the provider acknowledges
        // each event when it reads it.
        check("rdma_migrate_id", unsafe { rdma_migrate_id(raw, to.as_ptr()) })?;
        self.method = ConnectMethod::RdmaCm { raw, _channel: Arc::clone(to) };
        self.device = OnceLock::new();
        Ok(())
    }

    /// Sets the key by which later events name the id.
    pub(super) fn set_key(&self, key: Key) {
        if let Ok(raw) = self.cm_id() {
            // SAFETY: the id is live. Only the driving thread reads the id's context, and that thread makes this call.
            unsafe { (*raw).context = context_of(key) }
        }
    }

    /// Stores in the id an `Arc` of its device, so that the device stays open.
    pub(super) fn set_device(&self, device: &Arc<RawDevice>) {
        let _ = self.device.set(Arc::clone(device));
    }

    #[cfg(all(test, not(feature = "rdma-sys")))]
    pub(super) fn as_ptr(&self) -> *mut rdma_cm_id {
        self.cm_id().unwrap_or(ptr::null_mut())
    }

    /// Returns the context of the id's device. Returns null while the id has no device.
    pub(super) fn context(&self) -> *mut ibv_context {
        match self.method {
            // SAFETY: the id is live.
            ConnectMethod::RdmaCm { raw, .. } => unsafe { (*raw).verbs },
            ConnectMethod::Exchange { .. } => self.device.get().map_or(ptr::null_mut(), |device| device.context()),
        }
    }

    /// Returns the number of the port, from 1, that the id uses on its device. Returns 0 while the id has no port.
    pub(super) fn port(&self) -> u8 {
        match self.method {
            // SAFETY: the id is live.
            ConnectMethod::RdmaCm { raw, .. } => unsafe { (*raw).port_num },
            ConnectMethod::Exchange { port, .. } => port,
        }
    }

    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        match self.method {
            // SAFETY: the id is live, and the union has room for an address of any family.
            ConnectMethod::RdmaCm { raw, .. } => unsafe {
                address((&raw const (*raw).route.addr.src_addr_union).cast())
            },
            ConnectMethod::Exchange { local, .. } => local,
        }
    }

    pub(super) fn peer_address(&self) -> Option<SocketAddr> {
        match self.method {
            // SAFETY: the id is live, and the union has room for an address of any family.
            ConnectMethod::RdmaCm { raw, .. } => unsafe {
                address((&raw const (*raw).route.addr.dst_addr_union).cast())
            },
            ConnectMethod::Exchange { peer, .. } => peer,
        }
    }

    pub(super) fn bind(&self, to: &RawAddress) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: the id is live, and the library reads the address during the call.
        check("rdma_bind_addr", unsafe { rdma_bind_addr(raw, to.as_ptr()) })
    }

    fn set_option<T>(&self, option: i32, mut value: T) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: the id is live. The option has the type `T`, as each caller ensures, and the library reads it during
        // the call.
        let rc = unsafe { rdma_set_option(raw, RDMA_OPTION_ID, option, (&raw mut value).cast(), size_of::<T>()) };
        check("rdma_set_option", rc)
    }

    /// Allows a listener to use an address that closed connections still occupy.
    pub(super) fn reuse_address(&self) -> Result<()> {
        self.set_option(RDMA_OPTION_ID_REUSEADDR, 1_i32)
    }

    /// If `only` is true, restricts an IPv6 listener to IPv6. If `only` is false, makes it also accept IPv4.
    pub(super) fn ipv6_only(&self, only: bool) -> Result<()> {
        self.set_option(RDMA_OPTION_ID_AFONLY, i32::from(only))
    }

    /// Sets the type of service of the packets. On RoCE this is the traffic class. On iWARP it is that of the TCP
    /// connection.
    pub(super) fn set_type_of_service(&self, value: u8) -> Result<()> {
        self.set_option(RDMA_OPTION_ID_TOS, value)
    }

    /// Sets the ack timeout by its code: the device retransmits after 4.096 us times 2 to the power of the code.
    pub(super) fn set_ack_timeout(&self, code: u8) -> Result<()> {
        self.set_option(RDMA_OPTION_ID_ACK_TIMEOUT, code)
    }

    pub(super) fn listen(&self, backlog: u32) -> Result<()> {
        let raw = self.cm_id()?;
        let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
        // SAFETY: the id is live.
        check("rdma_listen", unsafe { rdma_listen(raw, backlog) })
    }

    pub(super) fn resolve_address(&self, peer: &RawAddress, timeout_ms: i32) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: the id is live. There is no source address, and the library reads the peer's address during the call.
        check("rdma_resolve_addr", unsafe { rdma_resolve_addr(raw, ptr::null_mut(), peer.as_ptr(), timeout_ms) })
    }

    pub(super) fn resolve_route(&self, timeout_ms: i32) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: the id is live.
        check("rdma_resolve_route", unsafe { rdma_resolve_route(raw, timeout_ms) })
    }

    /// Connects. This call may block on iWARP until TCP has connected.
    pub(super) fn connect(&self, offer: &ConnectOffer) -> Result<()> {
        let raw = self.cm_id()?;
        let mut param = offer.param();
        // SAFETY: the id is live. The library reads the parameters, and the private data to which they point, during
        // the call.
        check("rdma_connect", unsafe { rdma_connect(raw, &raw mut param) })
    }

    pub(super) fn accept(&self, offer: &ConnectOffer) -> Result<()> {
        self.accept_for(offer, 0)
    }

    /// Accepts a connect request. If the id has no queue pair, the answer names the queue pair `qp_number`, which
    /// belongs to another id.
    pub(super) fn accept_for(&self, offer: &ConnectOffer, qp_number: u32) -> Result<()> {
        let raw = self.cm_id()?;
        let mut param = offer.param();
        param.qp_num = qp_number;
        // SAFETY: the id is live. The library reads the parameters, and the private data to which they point, during
        // the call.
        check("rdma_accept", unsafe { rdma_accept(raw, &raw mut param) })
    }

    pub(super) fn reject(&self, private_data: &[u8]) -> Result<()> {
        let raw = self.cm_id()?;
        let len = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
        // SAFETY: the id is live. `len` is at most the length of the private data, which the library reads during the
        // call.
        check("rdma_reject", unsafe { rdma_reject(raw, private_data.as_ptr().cast(), len) })
    }

    pub(super) fn disconnect(&self) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: the id is live.
        check("rdma_disconnect", unsafe { rdma_disconnect(raw) })
    }

    /// Notifies the connection manager that data has arrived on a connection before the event that the connection is
    /// established.
    pub(super) fn notify_established(&self) -> Result<()> {
        let raw = self.cm_id()?;
        // SAFETY: the id is live.
        check("rdma_notify", unsafe { rdma_notify(raw, ibv_event_type::IBV_EVENT_COMM_EST) })
    }

    /// Creates the queue pair with the attributes `attr`, which already contain the pointers to `queues`.
    pub(super) fn create_qp(&self, attr: &mut ibv_qp_init_attr, queues: Queues) -> Result<*mut ibv_qp> {
        let Some(device) = self.device.get() else {
            return Err(TransportError::InvalidState { call: "create_qp", state: "on no device" });
        };
        let qp = match self.method {
            ConnectMethod::RdmaCm { raw, .. } => {
                // SAFETY: the id is live and has no queue pair. The protection domain and the queues belong to the id's device. The library
                // reads and updates the attributes during the call.
                check("rdma_create_qp", unsafe { rdma_create_qp(raw, device.queue_domain(), attr) })?;
                // SAFETY: the call succeeded, so the id has a queue pair.
                unsafe { (*raw).qp }
            }
            ConnectMethod::Exchange { port, .. } => {
                // SAFETY: the domain and the queues belong to one device. The library reads and updates the attributes
                // during the call.
                let qp = non_null("ibv_create_qp", unsafe { ibv_create_qp(device.queue_domain(), attr) })?;
                let atomics = device.attr.0.atomic_cap != ibv_atomic_cap::IBV_ATOMIC_NONE;
                if let Err(error) = modify(qp, transitions::init(port, atomics)) {
                    // SAFETY: this function has created the queue pair, and nothing uses it.
                    unsafe { ibv_destroy_qp(qp) };
                    return Err(error);
                }
                qp
            }
        };
        let _ = self.qp.set((qp, queues));
        Ok(qp)
    }

    /// Returns the queue pair, which exists as long as the id. Returns `None` if no queue pair was created.
    fn qp(&self) -> Option<*mut ibv_qp> {
        self.qp.get().map(|(qp, _)| *qp)
    }

    /// Modifies the attributes of the queue pair. Does nothing if the id has no queue pair.
    pub(super) fn modify(&self, change: Change) -> Result<()> {
        self.qp().map_or(Ok(()), |qp| modify(qp, change))
    }

    /// Puts the queue pair into the error state, which flushes every work request. The device then no longer accesses memory for this queue
    /// pair.
    pub(super) fn flush(&self) -> Result<()> {
        let mut attr = transitions::none();
        attr.qp_state = ibv_qp_state::IBV_QPS_ERR;
        self.modify((attr, ibv_qp_attr_mask::IBV_QP_STATE))
    }

    /// Sets the receiver-not-ready timer by its code. Without this call the timer has code 0, which is the longest
    /// time.
    pub(super) fn set_min_rnr_timer(&self, code: u8) -> Result<()> {
        let mut attr = transitions::none();
        attr.min_rnr_timer = code;
        self.modify((attr, ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER))
    }

    /// Queries the attributes of the queue pair. Returns `None` if the id has no queue pair.
    pub(super) fn query(&self, mask: ibv_qp_attr_mask) -> Result<Option<ibv_qp_attr>> {
        let Some(qp) = self.qp() else { return Ok(None) };
        let mut attr = transitions::none();
        // SAFETY: all fields are numbers or pointers, for which zeros are valid.
        let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the queue pair is live, and the pointers are to memory for the results.
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

/// Modifies the attributes of a live queue pair.
fn modify(qp: *mut ibv_qp, (mut attr, mask): Change) -> Result<()> {
    // SAFETY: the queue pair is live, as each caller in this file ensures. The library reads the attributes during the
    // call.
    check("ibv_modify_qp", unsafe { ibv_modify_qp(qp, &raw mut attr, mask.0 as i32) })
}

impl RawId {
    /// Destroys an id and its queue pair, if nothing else owns the id. Fails if the device does not
    /// release the queue pair. If another thread still has an `Arc` of the id, that thread destroys
    /// the id later, and the call returns `stopped`: the result of putting the queue pair into the
    /// error state.
    pub(super) fn destroy(this: Arc<Self>, stopped: Result<()>) -> Result<()> {
        Arc::into_inner(this).map_or(stopped, |mut id| id.destroy_qp())
    }

    /// Destroys the queue pair. If the device does not release it, the objects that it uses are kept until the process
    /// ends.
    fn destroy_qp(&mut self) -> Result<()> {
        let Some((qp, queues)) = self.qp.take() else { return Ok(()) };
        // SAFETY: the queue pair is live, and is destroyed before the objects on which it depends. Its asynchronous events are acknowledged
        // when they are read. `rdma_destroy_qp` would do the same, but it does not report a failure.
        let rc = unsafe { ibv_destroy_qp(qp) };
        let rc = if rdma_transport::planted("a-failed-destroy-qp-counts-as-success") { 0 } else { rc };
        if let ConnectMethod::RdmaCm { raw, .. } = self.method {
            // SAFETY: the id is live, and nothing uses its queue pair any more.
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
            local_log!(Error, "{error}: the queue pair is left as it is");
        }
        let ConnectMethod::RdmaCm { raw, .. } = self.method else { return };
        // SAFETY: this is the last owner of the id. The call waits for unacknowledged events of the id. There are none, because the
        // provider acknowledges each event when it reads it.
        if let Err(error) = check("rdma_destroy_id", unsafe { rdma_destroy_id(raw) }) {
            local_log!(Warn, "{error}");
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

/// The parameters that the local side offers to a peer when it connects or accepts.
#[derive(Clone, Debug)]
pub(super) struct ConnectOffer {
    pub(super) private_data: Box<[u8]>,
    pub(super) read_depth: ReadDepth,
    /// The number of times that an unanswered request is retransmitted, 0 to 7.
    pub(super) retry_count: u8,
    /// The number of times that a message is retransmitted to a peer without a posted receive, 0 to 6; 7 means no
    /// limit.
    pub(super) rnr_retry_count: u8,
    /// The receiver-not-ready timer, as a code.
    pub(super) min_rnr_timer: u8,
}

impl ConnectOffer {
    /// Returns the parameters in the library's format. They point to the private data, so they are valid while `self`
    /// exists.
    fn param(&self) -> rdma_conn_param {
        // SAFETY: all fields are numbers or pointers, for which zeros are valid.
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
