//! [`EventChannel`]: the event channel of the connection manager. Each event is copied and acknowledged when it is
//! read.

use std::ffi::c_int;
use std::ptr;

use super::ffi::{check, has_event, key_of, non_null, set_nonblocking};
use super::route::route;
use super::sys::{
    rdma_ack_cm_event, rdma_cm_event, rdma_cm_event_type, rdma_cm_id, rdma_create_event_channel,
    rdma_destroy_event_channel, rdma_event_channel, rdma_get_cm_event, rdma_port_space,
};
use rdma_transport::cm::ReadDepth;
use rdma_transport::datagram::DatagramPeer;
use rdma_transport::error::Result;
use rdma_transport::slab::Key;

/// A non-blocking event channel.
#[derive(Debug)]
pub(super) struct EventChannel {
    raw: *mut rdma_event_channel,
}

// SAFETY: the channel is a descriptor in the library's memory. Any thread may read events and create ids on it. The
// last owner destroys it once.
unsafe impl Send for EventChannel {}
// SAFETY: several threads may read events and create ids on a channel at the same time.
unsafe impl Sync for EventChannel {}

/// A copy of a connection manager's event, which is already acknowledged.
#[derive(Debug)]
pub(super) struct RawEvent {
    pub(super) kind: rdma_cm_event_type::Type,
    pub(super) status: c_int,
    /// The key of the id that the event concerns. A connect request has the key of the listener instead.
    pub(super) key: Key,
    /// The new id of a connect request; `None` in other events.
    pub(super) request: Option<NewCmId>,
    pub(super) private_data: Box<[u8]>,
    /// The read depth (IRD and ORD) of the local side. In a connect request, it is the depth that the peer requests. In the event that an
    /// active connection is established, it is the negotiated depth.
    pub(super) read_depth: ReadDepth,
    /// For an id for datagrams: the peer or the multicast group, with its route.
    pub(super) peer: Option<DatagramPeer>,
    /// In an event about a multicast group: the number that was passed to `RawId::join` for this membership.
    pub(super) join: usize,
}

/// The new id of a connect request.
#[derive(Debug)]
pub(super) struct NewCmId {
    /// The pointer to the id. The receiver of the event must take ownership of it.
    pub(super) id: *mut rdma_cm_id,
}

impl EventChannel {
    pub(super) fn open() -> Result<Self> {
        // SAFETY: the call has no arguments, and the result is checked.
        let raw = non_null("rdma_create_event_channel", unsafe { rdma_create_event_channel() })?;
        let channel = Self { raw };
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    pub(super) const fn as_ptr(&self) -> *mut rdma_event_channel {
        self.raw
    }

    pub(super) fn fd(&self) -> c_int {
        // SAFETY: the channel exists as long as `self`, and its descriptor never changes.
        unsafe { (*self.raw).fd }
    }

    /// Returns the next event. Returns `None` if no event is available.
    pub(super) fn next(&self) -> Result<Option<RawEvent>> {
        let mut event: *mut rdma_cm_event = ptr::null_mut();
        // SAFETY: the channel is live, and the pointer is to memory for the result.
        if !has_event("rdma_get_cm_event", || unsafe { rdma_get_cm_event(self.raw, &raw mut event) })? {
            return Ok(None);
        }
        // SAFETY: the call succeeded, so the event is complete. It stays valid until `rdma_ack_cm_event`.
        let copy = unsafe { Self::copy(&*event) };
        // SAFETY: the event is acknowledged once, and not used afterwards.
        if let Err(error) = check("rdma_ack_cm_event", unsafe { rdma_ack_cm_event(event) }) {
            local_log!(Warn, "{error}");
        }
        Ok(Some(copy))
    }

    /// # Safety
    /// `event` is from `rdma_get_cm_event` and is not acknowledged.
    unsafe fn copy(event: &rdma_cm_event) -> RawEvent {
        use rdma_cm_event_type as ty;
        let kind = event.event;
        let is_request = kind == ty::RDMA_CM_EVENT_CONNECT_REQUEST;
        let concerned = if is_request { event.listen_id } else { event.id };
        // SAFETY: the ids in an event exist until the event is acknowledged.
        let (context, space) = unsafe { ((*concerned).context, (*concerned).ps) };
        let mut copy = RawEvent {
            kind,
            status: event.status,
            key: key_of(context),
            request: is_request.then_some(NewCmId { id: event.id }),
            private_data: Box::default(),
            read_depth: ReadDepth::default(),
            peer: None,
            join: 0,
        };
        let established = kind == ty::RDMA_CM_EVENT_ESTABLISHED;
        let (carries_data, data, len) = if space == rdma_port_space::RDMA_PS_UDP {
            // SAFETY: events of ids for datagrams have this field of the union.
            let ud = unsafe { &event.param.ud };
            let joined = kind == ty::RDMA_CM_EVENT_MULTICAST_JOIN;
            let peer = DatagramPeer { route: route(&ud.ah_attr), qp_number: ud.qp_num, queue_key: ud.qkey };
            copy.peer = (established || joined).then_some(peer);
            let is_group = joined || kind == ty::RDMA_CM_EVENT_MULTICAST_ERROR;
            copy.join = if is_group { ud.private_data.addr() } else { 0 };
            (is_request || established, ud.private_data, ud.private_data_len)
        } else {
            // SAFETY: events of connected ids have this field of the union.
            let conn = unsafe { &event.param.conn };
            copy.read_depth.responder_resources = conn.responder_resources.into();
            copy.read_depth.initiator_depth = conn.initiator_depth.into();
            let answered = matches!(kind, ty::RDMA_CM_EVENT_CONNECT_RESPONSE | ty::RDMA_CM_EVENT_REJECTED);
            (is_request || established || answered, conn.private_data, conn.private_data_len)
        };
        if carries_data && !data.is_null() {
            // SAFETY: the library has stored `len` bytes there, which are valid until the event is
            // acknowledged.
            copy.private_data = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), usize::from(len)) }.into();
        }
        copy
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: no id on the channel exists any more, because each id keeps its channel alive by an `Arc`. All events
        // are acknowledged.
        unsafe { rdma_destroy_event_channel(self.raw) }
    }
}
