//! [`EventChannel`]: the event channel of the connection manager. Each event is copied and acknowledged when it is
//! read.

use std::ffi::c_int;
use std::io;
use std::ptr;

use super::ffi::{check, key_of, non_null, set_nonblocking};
use super::route::route;
use super::sys::{
    rdma_ack_cm_event, rdma_cm_event, rdma_cm_event_type, rdma_cm_id, rdma_create_event_channel,
    rdma_destroy_event_channel, rdma_event_channel, rdma_get_cm_event, rdma_port_space,
};
use rdma_transport::cm::ReadDepth;
use rdma_transport::datagram::DatagramPeer;
use rdma_transport::error::{Result, TransportError};
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
        loop {
            // SAFETY: the channel is live, and the pointer is to memory for the result.
            if unsafe { rdma_get_cm_event(self.raw, &raw mut event) } == 0 {
                break;
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(None),
                io::ErrorKind::Interrupted => {}
                _ => return Err(TransportError::io("rdma_get_cm_event", error)),
            }
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
        let is_request = event.event == rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST;
        let concerned = if is_request { event.listen_id } else { event.id };
        // SAFETY: the ids in an event exist until the event is acknowledged.
        let key = key_of(unsafe { (*concerned).context });
        // SAFETY: the ids in an event exist until the event is acknowledged.
        if unsafe { (*concerned).ps } == rdma_port_space::RDMA_PS_UDP {
            // SAFETY: the event belongs to an id for datagrams. The caller promises that the event is valid and not
            // acknowledged.
            return unsafe { Self::copy_datagram(event, key, is_request) };
        }
        // SAFETY: events of connected ids have this field of the union.
        let conn = unsafe { &event.param.conn };
        let carries_data = matches!(
            event.event,
            rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST
                | rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_RESPONSE
                | rdma_cm_event_type::RDMA_CM_EVENT_REJECTED
                | rdma_cm_event_type::RDMA_CM_EVENT_ESTABLISHED
        );
        let private_data = if carries_data && !conn.private_data.is_null() {
            let len = usize::from(conn.private_data_len);
            // SAFETY: the library has stored `len` bytes there, which are valid until the event is acknowledged.
            unsafe { std::slice::from_raw_parts(conn.private_data.cast::<u8>(), len) }.into()
        } else {
            Box::default()
        };
        RawEvent {
            kind: event.event,
            status: event.status,
            key,
            request: is_request.then_some(NewCmId { id: event.id }),
            private_data,
            read_depth: ReadDepth {
                responder_resources: conn.responder_resources.into(),
                initiator_depth: conn.initiator_depth.into(),
            },
            peer: None,
            join: 0,
        }
    }
}

impl EventChannel {
    /// # Safety
    /// `event` is from `rdma_get_cm_event`, belongs to an id for datagrams, and is not acknowledged.
    unsafe fn copy_datagram(event: &rdma_cm_event, key: Key, is_request: bool) -> RawEvent {
        use rdma_cm_event_type as ty;
        // SAFETY: events of ids for datagrams have this field of the union.
        let ud = unsafe { &event.param.ud };
        let established = event.event == ty::RDMA_CM_EVENT_ESTABLISHED;
        let joined = event.event == ty::RDMA_CM_EVENT_MULTICAST_JOIN;
        let is_group = joined || event.event == ty::RDMA_CM_EVENT_MULTICAST_ERROR;
        let private_data = if (is_request || established) && !ud.private_data.is_null() {
            let len = usize::from(ud.private_data_len);
            // SAFETY: the library has stored `len` bytes there, which are valid until the event is acknowledged.
            unsafe { std::slice::from_raw_parts(ud.private_data.cast::<u8>(), len) }.into()
        } else {
            Box::default()
        };
        let peer = DatagramPeer { route: route(&ud.ah_attr), qp_number: ud.qp_num, queue_key: ud.qkey };
        RawEvent {
            kind: event.event,
            status: event.status,
            key,
            request: is_request.then_some(NewCmId { id: event.id }),
            private_data,
            read_depth: ReadDepth::default(),
            peer: (established || joined).then_some(peer),
            join: if is_group { ud.private_data.addr() } else { 0 },
        }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: no id on the channel exists any more, because each id keeps its channel alive by an `Arc`. All events
        // are acknowledged.
        unsafe { rdma_destroy_event_channel(self.raw) }
    }
}
