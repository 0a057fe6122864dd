//! [`EventChannel`]: the connection manager's event channel. Its events are copied out and acknowledged as they are read.

use std::ffi::c_int;
use std::io;
use std::ptr;

use super::ffi::{check, key_of, non_null, set_nonblocking};
use super::route::route;
use super::sys::{
    rdma_ack_cm_event, rdma_cm_event, rdma_cm_event_type, rdma_cm_id, rdma_create_event_channel,
    rdma_destroy_event_channel, rdma_event_channel, rdma_get_cm_event, rdma_port_space,
};
use crate::cm::ReadDepth;
use crate::datagram::DatagramPeer;
use crate::error::{Error, Result};
use crate::slab::Key;

/// A non-blocking event channel.
#[derive(Debug)]
pub(super) struct EventChannel {
    raw: *mut rdma_event_channel,
}

// SAFETY: the channel is a descriptor in the library's memory; reading events and creating ids on it is safe from any
// thread, and it is destroyed once, by its last owner.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

/// An event of the connection manager, copied out and acknowledged.
#[derive(Debug)]
pub(super) struct RawEvent {
    pub(super) kind: rdma_cm_event_type::Type,
    pub(super) status: c_int,
    /// The key of the id; for a connect request, that of the listener.
    pub(super) key: Key,
    /// The new id of a connect request.
    pub(super) request: Option<NewCmId>,
    pub(super) private_data: Box<[u8]>,
    /// The read depth from the local point of view: in a connect request the requested one, on an active connection the negotiated one.
    pub(super) read_depth: ReadDepth,
    /// The route to the peer or the group of a datagram id.
    pub(super) peer: Option<DatagramPeer>,
    /// The number of the join, in an event of a multicast group.
    pub(super) join: usize,
}

/// The new id of a connect request.
#[derive(Debug)]
pub(super) struct NewCmId {
    /// The new id, which has no owner yet.
    pub(super) id: *mut rdma_cm_id,
}

impl EventChannel {
    pub(super) fn open() -> Result<Self> {
        // SAFETY: no arguments; the result is checked.
        let raw = non_null("rdma_create_event_channel", unsafe { rdma_create_event_channel() })?;
        let channel = Self { raw };
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    pub(super) const fn as_ptr(&self) -> *mut rdma_event_channel {
        self.raw
    }

    pub(super) fn fd(&self) -> c_int {
        // SAFETY: the channel lives as long as `self`; its descriptor never changes.
        unsafe { (*self.raw).fd }
    }

    /// Returns the next event; `None` if there is none at the moment.
    pub(super) fn next(&self) -> Result<Option<RawEvent>> {
        let mut event: *mut rdma_cm_event = ptr::null_mut();
        loop {
            // SAFETY: a live channel and a place for the result.
            if unsafe { rdma_get_cm_event(self.raw, &raw mut event) } == 0 {
                break;
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(None),
                io::ErrorKind::Interrupted => {}
                _ => return Err(Error::io("rdma_get_cm_event", error)),
            }
        }
        // SAFETY: the call succeeded: the event is whole, and ours until it is acknowledged, which is below.
        let copy = unsafe { Self::copy(&*event) };
        // SAFETY: acknowledged once, and not used any more.
        if let Err(error) = check("rdma_ack_cm_event", unsafe { rdma_ack_cm_event(event) }) {
            log::warn!("{error}");
        }
        Ok(Some(copy))
    }

    /// # Safety
    /// `event` came from `rdma_get_cm_event` and is not acknowledged.
    unsafe fn copy(event: &rdma_cm_event) -> RawEvent {
        let is_request = event.event == rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST;
        let concerned = if is_request { event.listen_id } else { event.id };
        // SAFETY: the ids of an event live until it is acknowledged.
        let key = key_of(unsafe { (*concerned).context });
        // SAFETY: the ids of an event live until it is acknowledged.
        if unsafe { (*concerned).ps } == rdma_port_space::RDMA_PS_UDP {
            // SAFETY: the event is of a datagram id; the rest is the caller's promise.
            return unsafe { Self::copy_datagram(event, key, is_request) };
        }
        // SAFETY: events of connected ids carry this variant.
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
            // SAFETY: the library says that so many bytes are there, until the event is acknowledged.
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
    /// `event` is of a datagram id, came from `rdma_get_cm_event` and is not acknowledged.
    unsafe fn copy_datagram(event: &rdma_cm_event, key: Key, is_request: bool) -> RawEvent {
        use rdma_cm_event_type as ty;
        // SAFETY: events of datagram ids carry this variant.
        let ud = unsafe { &event.param.ud };
        let established = event.event == ty::RDMA_CM_EVENT_ESTABLISHED;
        let joined = event.event == ty::RDMA_CM_EVENT_MULTICAST_JOIN;
        let is_group = joined || event.event == ty::RDMA_CM_EVENT_MULTICAST_ERROR;
        let private_data = if (is_request || established) && !ud.private_data.is_null() {
            let len = usize::from(ud.private_data_len);
            // SAFETY: the library says that so many bytes are there, until the event is acknowledged.
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
        // SAFETY: ids hold a share of the channel, so none is left; all events are acknowledged.
        unsafe { rdma_destroy_event_channel(self.raw) }
    }
}
