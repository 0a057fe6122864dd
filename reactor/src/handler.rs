//! What a program implements.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::buffer::Message;
use crate::context::Context;
use crate::datagram::{Datagram, EndpointId, PeerId};
use crate::device_event::DeviceEvent;
use crate::error::{ConnectError, DisconnectReason, Outcome};
use crate::id::{ConnectionId, ListenerId, SendId, TimerId};
use crate::io::{IoId, Readiness};
use crate::reactors::Place;

/// A peer that wants a connection. Nothing is allocated for it yet.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ConnectRequest<'a> {
    /// The listener it came to.
    pub listener: ListenerId,
    /// Index of the reactor that listener is of, in its group; 0 without a group.
    pub reactor: usize,
    /// Its address.
    pub peer: SocketAddr,
    /// What it has to say. Not authenticated.
    pub private_data: &'a [u8],
}

/// What a peer's write with immediate data brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// The peer's 32 bits.
    pub value: u32,
    /// Bytes that were written.
    pub len: u32,
}

impl Immediate {
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (value, rest) = bytes.split_first_chunk()?;
        let len = <[u8; 4]>::try_from(rest).ok()?;
        Some(Self { value: u32::from_le_bytes(*value), len: u32::from_le_bytes(len) })
    }

    pub(crate) fn emit(self) -> [u8; 8] {
        let mut out = [0; 8];
        out[..4].copy_from_slice(&self.value.to_le_bytes());
        out[4..].copy_from_slice(&self.len.to_le_bytes());
        out
    }
}

/// Answer to a connect request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Decision {
    /// Take it.
    #[default]
    Accept,
    /// Take it, and tell the peer something: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes.
    AcceptWith(Vec<u8>),
    /// Refuse it, and tell the peer something: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes. Of more, nothing is told.
    Reject(Vec<u8>),
}

/// Callbacks of a reactor. All run on the thread that calls [`crate::Reactor::turn`] or [`crate::Reactor::run`], one
/// at a time; any method of [`Context`] may be called in any of them. A callback that takes long delays all others.
///
/// Per connection: `on_connect` comes first; `on_disconnect` comes last, once, after every accepted send had its
/// `on_send_complete`. A connection that never came up has `on_connect_error` instead, if it was ours to open, and
/// nothing otherwise.
///
/// `M` is what other threads send through a [`crate::Remote`]; a program that sends nothing leaves it out.
#[allow(unused_variables)]
pub trait Handler<M = ()> {
    /// On the reactor of a group that listens, before `on_connect_request` on the one that takes it: which is that?
    /// Default: the least loaded.
    fn on_place(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Place {
        Place::LeastLoaded
    }

    /// A peer wants a connection. Default: accept.
    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        Decision::Accept
    }

    /// A connection is up, either way: send.
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {}

    /// A message came.
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {}

    /// The peer has written to a region of this side, and says so with immediate data. What it wrote before is there.
    fn on_immediate(&mut self, cx: &mut Context<'_>, conn: ConnectionId, immediate: Immediate) {}

    /// A send, a message or a one-sided operation, has ended, in the order of sending. A message past one buffer ends
    /// when the peer has fetched it, maybe after some that were sent later, and when the connection ends, after some
    /// that were not sent.
    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {}

    /// A send was refused with `WouldBlock` before, and there is room again. Once per refusal. One of another thread
    /// ([`crate::Remote::send`]) that had to wait counts as refused, too: it is called with nothing of the handler's own to send.
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {}

    /// A connection is gone. The id is stale when this returns.
    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {}

    /// A connection of [`Context::connect`] did not come up. The id is stale when this returns.
    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {}

    /// A datagram came.
    fn on_datagram(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, datagram: Datagram<'_>) {}

    /// A datagram has ended, in the order of sending: once for each that was taken.
    fn on_datagram_sent(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, send: SendId, outcome: Outcome) {}

    /// A datagram was refused with `WouldBlock` before, and there is room again. Once per refusal.
    fn on_datagram_writable(&mut self, cx: &mut Context<'_>, endpoint: EndpointId) {}

    /// The end of [`Context::find_peer`]: a way to send to `address`, or why there is none.
    fn on_peer(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        address: SocketAddr,
        found: Result<PeerId, ConnectError>,
    ) {
    }

    /// The end of [`Context::join`]: the peer that is the group, or why the endpoint is not, or no longer, in it.
    fn on_join(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        group: IpAddr,
        joined: Result<PeerId, ConnectError>,
    ) {
    }

    /// An endpoint is gone, and its peers with it: closed, or its device failed or was removed. Its last callback; the id
    /// is stale when this returns.
    fn on_endpoint_closed(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, reason: DisconnectReason) {}

    /// A device in use, or one of its ports, has changed. Connections that this ends are told on their own.
    fn on_device_event(&mut self, cx: &mut Context<'_>, event: &DeviceEvent) {}

    /// A timer of [`Context::set_timer`] is due.
    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, token: u64) {}

    /// Something is new on a descriptor of [`Context::register_io`]. Edge-triggered: read, write or accept until
    /// `WouldBlock`; what is left without that is not reported again.
    fn on_io_ready(&mut self, cx: &mut Context<'_>, io: IoId, readiness: Readiness) {}

    /// The reactor is being drained, see [`Context::drain`]. Default: closes all. A handler that has something
    /// to finish says its goodbyes here, closes in time, and leaves it to the deadline otherwise.
    fn on_drain(&mut self, cx: &mut Context<'_>, deadline: Duration) {
        cx.close_all();
    }

    /// Another thread has sent a message, see [`crate::Remote::post`]. Those of one thread come in its order.
    fn on_wake(&mut self, cx: &mut Context<'_>, message: M) {}
}
