//! The callbacks that a program implements.

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

/// A connect request of a peer. Nothing is allocated for it yet.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ConnectRequest<'a> {
    /// The listener that received the request.
    pub listener: ListenerId,
    /// Index of the listening reactor in its group; 0 without a group.
    pub reactor: usize,
    /// The peer's address.
    pub peer: SocketAddr,
    /// The private data of the peer. It is not authenticated.
    pub private_data: &'a [u8],
}

impl<'a> ConnectRequest<'a> {
    pub(crate) const fn new(listener: ListenerId, reactor: usize, peer: SocketAddr, private_data: &'a [u8]) -> Self {
        Self { listener, reactor, peer, private_data }
    }
}

/// The answer to a connect request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Decision {
    /// Accept the connection.
    #[default]
    Accept,
    /// Accept the connection, and send private data to the peer: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes. If it
    /// is longer, the reactor rejects the connection ([`crate::RejectReason::Refused`]) and logs an error.
    AcceptWith(Vec<u8>),
    /// Reject the connection, and send private data to the peer: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes. If it
    /// is longer, none is sent.
    Reject(Vec<u8>),
}

/// The callbacks of a reactor. The thread that calls [`crate::Reactor::turn`] or [`crate::Reactor::run`] runs them, one
/// at a time. Each of them may call any method of [`Context`]. A callback that takes long delays all others. Every
/// callback has a default, so a program implements only those that it needs:
///
/// | a program that | implements |
/// |---|---|
/// | exchanges messages | `on_connect`, `on_recv`, `on_send_complete`, `on_writable`, `on_disconnect`, `on_timer` |
/// | connects | also `on_connect_error` |
/// | chooses its peers | also `on_connect_request` and `on_identity` |
/// | has memory that peers write | also `on_immediate` |
/// | transfers lists of pieces | also `on_transfer` |
/// | receives large messages in its own memory | also `on_offer`, `on_landed` |
/// | watches descriptors, or has other threads | also `on_io_ready`, `on_wake` |
/// | runs for long | also `on_device_event`, `on_drain` |
/// | uses a group of reactors | also `on_place` |
/// | uses datagrams (feature `datagram`) | also `datagrams`, which returns a `DatagramHandler` |
///
/// For each connection, `on_connect` is called first. `on_disconnect` is called last and once, after every accepted
/// send has had its `on_send_complete`. A connection that was never established has `on_connect_error` instead if the
/// local side opened it, and no callback otherwise.
///
/// `M` is the type of the messages that other threads send through a [`crate::ReactorHandle`]. A program without such
/// messages leaves it out.
///
/// ```
/// use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor};
///
/// /// The client sends a greeting, and the server returns each message.
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

    /// A connection is established, opened by either side. From now on the program may send.
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {}

    /// A message has arrived.
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {}

    /// A message or a one-sided operation has ended. Calls are in the order of sending, with two exceptions: a message
    /// past one buffer ends when the peer has fetched it, which may be after later sends; and when the connection ends,
    /// it may end after later sends that were not sent. With [`Config::quiet_sends`](crate::Config::quiet_sends),
    /// messages that were copied do not cause this call, unless the peer refuses one.
    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {}

    /// One or more sends were refused with `WouldBlock`, and at least one of them would be accepted now. This is called
    /// once after the refusals, and again after the next refusal. A queued send of another thread
    /// ([`crate::ReactorHandle::send`]) counts as refused while it waits, so this may be called when the handler itself
    /// has nothing to send.
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {}

    /// A connection has ended. The id is stale when this returns.
    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {}

    /// A timer of [`Context::set_timer`] has expired.
    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, token: u64) {}

    /// The peer offers a message past one buffer. The message is still in the peer's memory. Within this call,
    /// [`Context::land`] has it read into the program's memory, and [`Context::refuse_offer`] refuses it. Without
    /// either, it is delivered by `on_recv`. An offer is reported when it arrives, before earlier messages of the same
    /// peer that are still being fetched. Messages that are sent in several buffers are not offered
    /// ([`LargeMessageSettings::eager_limit`](crate::LargeMessageSettings::eager_limit)).
    fn on_offer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered) {}

    /// A message is in the memory that [`Context::land`] chose, in order with the other messages, and the region
    /// belongs to the program again. If `result` is an error, the connection ended first, and the contents of that
    /// memory are unspecified; this call comes before `on_disconnect`. Called once for each accepted [`Context::land`].
    fn on_landed(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered, result: Result<(), Failure>) {}

    // Connecting and accepting.

    /// A connection of [`Context::connect`] was not established. The id is stale when this returns.
    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {}

    /// A peer requests a connection. Default: accepts it.
    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        Decision::Accept
    }

    /// The peer of a connection with [`crate::Security`] has proven its identity, and the program decides whether to
    /// accept it. This is called on both sides, before `on_connect`. If it returns an error, the connection is not
    /// established, and the text goes to the peer in the clear, at most 200 bytes of it. Nothing can be sent on the
    /// connection yet. [`Context::postpone_judgement`] postpones the decision. Default: accepts the peer.
    ///
    /// # Errors
    /// The reason why the program does not accept the peer.
    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, peer: &PeerIdentity) -> Result<(), String> {
        Ok(())
    }

    // Remote memory.

    /// The peer has written to a local region, with immediate data. Everything that the peer wrote before is in place.
    fn on_immediate(&mut self, cx: &mut Context<'_>, conn: ConnectionId, immediate: Immediate) {}

    /// A transfer of a list ([`Context::transfer`]) has ended. This is called once for each transfer. The regions are
    /// free again, and `end` has the list and the state of its pieces. The call comes before `on_disconnect`, also for
    /// a transfer that ended with its connection.
    fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, transfer: TransferId, end: TransferEnd) {}

    // Descriptors and other threads.

    /// A descriptor of [`Context::register_io`] has become ready. This is edge-triggered: read, write or accept until
    /// `WouldBlock`. A program that stops earlier is not notified of the rest.
    fn on_io_ready(&mut self, cx: &mut Context<'_>, io: IoId, readiness: Readiness) {}

    /// Another thread has sent a message, see [`crate::ReactorHandle::post`]. Messages of one thread come in their
    /// order.
    fn on_wake(&mut self, cx: &mut Context<'_>, message: M) {}

    // The reactor itself.

    /// A device in use, or one of its ports, has changed. The end of a connection because of that is reported
    /// separately, by `on_disconnect`.
    fn on_device_event(&mut self, cx: &mut Context<'_>, event: &DeviceEvent) {}

    /// The reactor is draining, see [`Context::drain`]. Default: closes all connections and endpoints. A handler with
    /// work to finish sends its last messages here, and closes its connections before `deadline`; the reactor cuts off
    /// the rest.
    fn on_drain(&mut self, cx: &mut Context<'_>, deadline: Duration) {
        cx.close_all();
    }

    /// Chooses the reactor for a connect request. This is called on the listening reactor of a group, before
    /// `on_connect_request` is called on the chosen reactor. Default: the least loaded one.
    fn on_place(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Place {
        Place::LeastLoaded
    }

    /// Returns the callbacks for datagrams. Default: `None`, and then received datagrams are dropped.
    #[cfg(feature = "datagram")]
    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        None
    }
}
