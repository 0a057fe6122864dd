//! What a program implements.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_transport::wc::Failure;

use super::context::Context;
#[cfg(feature = "datagram")]
use super::context::DatagramHandler;
use super::message::Message;
use crate::conn::frame::Immediate;
use crate::driver::DeviceEvent;
use crate::driver::group::Place;
use crate::error::{ConnectError, DisconnectReason, Outcome};
use crate::id::{ConnectionId, IoId, ListenerId, SendId, TimerId, TransferId};
use crate::memory::landing::Offered;
use crate::memory::list::TransferEnd;
use crate::seam::poller::Readiness;
use crate::security::PeerIdentity;

/// A peer that wants a connection. Nothing is allocated for it yet.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ConnectRequest<'a> {
    /// The listener that the peer came to.
    pub listener: ListenerId,
    /// Index of the reactor that listens, in its group; 0 without a group.
    pub reactor: usize,
    /// The peer's address.
    pub peer: SocketAddr,
    /// What the peer has to say. It is not authenticated.
    pub private_data: &'a [u8],
}

impl<'a> ConnectRequest<'a> {
    pub(crate) const fn new(listener: ListenerId, reactor: usize, peer: SocketAddr, private_data: &'a [u8]) -> Self {
        Self { listener, reactor, peer, private_data }
    }
}

/// Answer to a connect request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Decision {
    /// Take it.
    #[default]
    Accept,
    /// Take it, and tell the peer something: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes. If it is more, the peer is refused
    /// ([`crate::RejectReason::Refused`]), and the log has an error.
    AcceptWith(Vec<u8>),
    /// Refuse it, and tell the peer something: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes. Of more, nothing is told.
    Reject(Vec<u8>),
}

/// Callbacks of a reactor. All run on the thread that calls [`crate::Reactor::turn`] or [`crate::Reactor::run`], one at a
/// time; any method of [`Context`] may be called in any of them. A callback that takes long delays all others. Every callback
/// has a default, so that a program implements only what it needs:
///
/// | a program that | implements |
/// |---|---|
/// | exchanges messages | `on_connect`, `on_recv`, `on_send_complete`, `on_writable`, `on_disconnect`, `on_timer` |
/// | connects | `on_connect_error` besides |
/// | chooses its peers | `on_connect_request` besides, and `on_identity` |
/// | has memory that peers write | `on_immediate` besides |
/// | moves lists of pieces | `on_transfer` besides |
/// | receives large messages in memory of its own | `on_offer`, `on_landed` besides |
/// | has descriptors or threads of its own | `on_io_ready`, `on_wake` besides |
/// | runs for long | `on_device_event`, `on_drain` besides |
/// | is a group of reactors | `on_place` besides |
/// | sends datagrams (feature `datagram`) | `DatagramHandler`, and returns itself from `datagrams` |
///
/// Per connection: `on_connect` comes first; `on_disconnect` comes last, once, after every accepted send had its
/// `on_send_complete`. A connection that never came up has `on_connect_error` instead, if it was ours to open, and
/// nothing otherwise.
///
/// `M` is what other threads send through a [`crate::ReactorHandle`]; a program that sends nothing leaves it out.
///
/// ```
/// use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor};
///
/// /// The side that connects says hello, the side that listens sends back what it gets.
/// struct Echo;
///
/// impl Handler for Echo {
///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
///         if cx.listener(conn).is_none() {
///             cx.send(conn, b"hello").expect("a new connection has room");
///         }
///     }
///
///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
///         if cx.listener(conn).is_some() {
///             // One message at a time: there is always room for its answer. The README's server has no such limit.
///             cx.send(conn, &message).expect("room for an answer");
///         } else {
///             assert_eq!(&message[..], b"hello");
///             cx.stop();
///         }
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // One reactor may be both sides.
/// let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
/// let mut context = reactor.context();
/// let listener = context.listen("127.0.0.1:0".parse()?)?;
/// let server = context.local_address(listener).expect("it listens");
/// context.connect(server)?;
/// reactor.run(&mut Echo)?;
/// # Ok(())
/// # }
/// ```
#[allow(unused_variables)]
pub trait Handler<M = ()> {
    // Messages.

    /// A connection is up, whichever side opened it: send.
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {}

    /// A message came.
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {}

    /// A send, a message or a one-sided operation, has ended, in the order of sending. A message past one buffer ends
    /// when the peer has fetched it, maybe after some that were sent later, and when the connection ends, after some
    /// that were not sent. With [`Config::quiet_sends`](crate::Config::quiet_sends) messages that were copied have no such call,
    /// unless the peer refuses one.
    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {}

    /// One or more sends were refused with `WouldBlock` before, and at least one of them would be taken now. This is called once after
    /// the refusals, and again after the next refusal. A send of another thread ([`crate::ReactorHandle::send`]) that had
    /// to wait counts as refused, too: this is called with nothing of the handler's own to send.
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {}

    /// A connection is gone. The id is stale when this returns.
    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {}

    /// A timer of [`Context::set_timer`] is due.
    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, token: u64) {}

    /// The peer offers a message past one buffer, which is still in the peer's memory. Within this call [`Context::land`] has it read
    /// into the program's memory, and [`Context::refuse_offer`] refuses it; without either it arrives by `on_recv`. Offers
    /// are announced when they come, before messages of the same peer that were sent earlier and are still being fetched. Messages in several
    /// buffers are not offered ([`LargeMessageSettings::eager_limit`](crate::LargeMessageSettings::eager_limit)).
    fn on_offer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered) {}

    /// A message is in the place that [`Context::land`] gave it, in order with the other messages, and the region is the
    /// program's again; or the connection ended first, before `on_disconnect`, and what is in the place is unknown. Once per place.
    fn on_landed(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered, result: Result<(), Failure>) {}

    // Connecting and accepting.

    /// A connection of [`Context::connect`] did not come up. The id is stale when this returns.
    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {}

    /// A peer wants a connection. Default: accept.
    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        Decision::Accept
    }

    /// The peer of a connection with [`crate::Security`] has proven who it is: is it accepted? Called on both sides, before
    /// `on_connect`, for a connection that does not come up if this is an error. Its text goes to the peer, in the clear, at most
    /// 200 bytes of it. Nothing can be sent on the connection yet. [`Context::postpone_judgement`] has the answer wait. Default: yes.
    ///
    /// # Errors
    /// Why the peer is not accepted.
    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, peer: &PeerIdentity) -> Result<(), String> {
        Ok(())
    }

    // Remote memory.

    /// The peer has written to a region of this side, and says so with immediate data. What it wrote before is there.
    fn on_immediate(&mut self, cx: &mut Context<'_>, conn: ConnectionId, immediate: Immediate) {}

    /// A transfer of a list ([`Context::transfer`]) has ended: the one end of it. The regions are free again, and `end` has the list,
    /// and what is known of its pieces. It comes before `on_disconnect`, also for a transfer that the end of the connection has
    /// ended.
    fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, transfer: TransferId, end: TransferEnd) {}

    // Descriptors and other threads.

    /// Something is new on a descriptor of [`Context::register_io`]. Edge-triggered: read, write or accept until
    /// `WouldBlock`; what is left without that is not reported again.
    fn on_io_ready(&mut self, cx: &mut Context<'_>, io: IoId, readiness: Readiness) {}

    /// Another thread has sent a message, see [`crate::ReactorHandle::post`]. Those of one thread come in its order.
    fn on_wake(&mut self, cx: &mut Context<'_>, message: M) {}

    // The reactor itself.

    /// A device in use, or one of its ports, has changed. Connections that this ends are told on their own.
    fn on_device_event(&mut self, cx: &mut Context<'_>, event: &DeviceEvent) {}

    /// The reactor is being drained, see [`Context::drain`]. Default: closes all. A handler that has something
    /// to finish says its goodbyes here, closes in time, and leaves it to the deadline otherwise.
    fn on_drain(&mut self, cx: &mut Context<'_>, deadline: Duration) {
        cx.close_all();
    }

    /// Called on the reactor of a group that listens, before `on_connect_request` on the reactor that takes the connection:
    /// which reactor is that? Default: the least loaded.
    fn on_place(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Place {
        Place::LeastLoaded
    }

    /// The callbacks for datagrams, if the program has them. Default: none; then datagrams that come are dropped.
    #[cfg(feature = "datagram")]
    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        None
    }
}
