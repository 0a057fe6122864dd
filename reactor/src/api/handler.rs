//! The callbacks that a program implements, and the types that they receive and return.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_transport::wc::Failure;

use super::context::Context;
#[cfg(feature = "datagram")]
use super::context::DatagramHandler;
use super::message::Message;
use crate::conn::frame::Immediate;
use crate::driver::DeviceEvent;
use crate::driver::open::group::Place;
use crate::error::{ConnectError, DisconnectReason, Outcome};
use crate::id::{ConnectionId, IoId, ListenerId, SendId, TimerId, TransferId};
use crate::memory::landing::Offered;
use crate::memory::list::TransferEnd;
use crate::seam::poller::Readiness;
use crate::security::PeerIdentity;

/// A connect request of a peer. The reactor has not allocated anything for the connection yet.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ConnectRequest<'a> {
    /// The listener that received the request.
    pub listener: ListenerId,
    /// Index of the listening reactor in its group of reactors; 0 if the reactor belongs to no group.
    pub reactor: usize,
    /// The address of the peer that requests the connection.
    pub peer: SocketAddr,
    /// The private data in the peer's request. It is not authenticated, so it proves nothing about the peer.
    pub private_data: &'a [u8],
}

impl<'a> ConnectRequest<'a> {
    pub(crate) const fn new(listener: ListenerId, reactor: usize, peer: SocketAddr, private_data: &'a [u8]) -> Self {
        Self { listener, reactor, peer, private_data }
    }
}

/// The answer of the program to a connect request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
// local: private data of the program
pub enum Decision {
    /// Accept the connection.
    #[default]
    Accept,
    /// Accept the connection, and send this private data to the peer: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes.
    /// If the data is longer, the reactor rejects the connection instead ([`crate::RejectReason::Refused`]) and logs an
    /// error.
    AcceptWith(Vec<u8>),
    /// Reject the connection, and send this private data to the peer: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes.
    /// If the data is longer, the reactor rejects the connection without private data.
    Reject(Vec<u8>),
}

/// The callbacks of a reactor. The reactor calls them sequentially, on the thread that calls
/// [`crate::Reactor::turn`] or [`crate::Reactor::run`]. Each of them may call any method of
/// [`Context`]. A slow callback delays all other callbacks. Every callback has a default, so a
/// program implements only those that it needs:
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
/// For each established connection, `on_connect` is the first callback after `on_connect_request` and `on_identity`,
/// and `on_disconnect` is the last callback. Before `on_disconnect`, every accepted send has had its `on_send_complete`
/// (with [`Config::quiet_sends`](crate::Config::quiet_sends), not every send has one). If a connection is never
/// established, `on_connect_error` is called on the side that opened it. On the side that accepted it, neither
/// `on_connect` nor `on_disconnect` is called.
///
/// `M` is the type of the messages that other threads send through a [`crate::ReactorHandle`]. A program without such
/// messages omits `M`.
///
/// ```
/// use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor};
///
/// /// The client sends a greeting, and the server returns each message.
/// struct Echo;
///
/// impl Handler for Echo {
///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
///         if cx.connection(conn).listener().is_none() {
///             cx.send(conn, b"hello").expect("a new connection has room");
///         }
///     }
///
///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
///         if cx.connection(conn).listener().is_some() {
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
/// let server = context.listeners().local_address(listener).expect("it listens");
/// context.connect(server)?;
/// reactor.run(&mut Echo)?;
/// # Ok(())
/// # }
/// ```
#[allow(unused_variables)]
pub trait Handler<M = ()> {
    // Messages on connections.

    /// A connection is established. Either side may have opened it. From now on the program may
    /// send. The two sides are not called at the same time. A message that is sent here arrives
    /// after the `on_connect` of the peer.
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {}

    /// A message from the peer has arrived.
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {}

    /// The send of a message, or a one-sided operation, has ended with `outcome`. These callbacks
    /// have the order of the sends, with one exception: if the peer fetches a message, its send
    /// ends when the peer has fetched or refused the message, and later sends may end earlier. When
    /// the connection ends, messages that the peer has not fetched are reported last: after all
    /// other sends, even later sends that were accepted but not sent.
    ///
    /// With [`Config::quiet_sends`](crate::Config::quiet_sends), messages that are not sent from regions do not cause
    /// this call, except for a message that the peer refuses.
    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {}

    /// The connection is writable again: it has refused one or more sends with `WouldBlock`, and
    /// would now accept at least one of these sends. The reactor calls this once, and again only
    /// after another refusal. If a send from another thread ([`crate::ReactorHandle::send`]) waits
    /// for a credit or a slot, that counts as a refused send. So this may also be called when the
    /// handler itself has nothing to send.
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {}

    /// A connection has ended. Its id is stale when this callback returns. Until then, the methods
    /// of [`Context`] that take its id still know the connection. But [`Context::connection_ids`]
    /// and [`Context::connections`] do not include it. In the `on_disconnect` of the last
    /// connection, the former is empty, and the latter is 0.
    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {}

    /// A timer has expired. `token` is the value that the program passed to
    /// [`crate::TimerContext::set`].
    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, token: u64) {}

    /// The peer offers a message: either the message is longer than one buffer, or the peer's program has called
    /// [`Context::offer`]. The bytes are still in the peer's memory. Within this callback the program may answer the
    /// offer: [`Context::land`] reads the message into the program's memory, and [`Context::refuse_offer`] refuses it.
    /// If the program does neither, the reactor fetches the message and calls `on_recv`.
    ///
    /// The reactor reports an offer when the offer arrives. At that time, the reactor may still be fetching earlier
    /// messages of the same peer; their callbacks follow later. Messages that the peer sends in several buffers are not
    /// offered ([`LargeMessageSettings::eager_limit`](crate::LargeMessageSettings::eager_limit)).
    fn on_offer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered) {}

    /// An offered message has arrived in the region that the program passed to [`Context::land`]. The program may use
    /// the region again. This is called once for each successful call of [`Context::land`]. These calls and the calls
    /// of `on_recv` are in the order in which the peer sent the messages. If `result` is an error, the connection has
    /// ended before the message was complete. In this case, the contents of the message's range in the region are
    /// unspecified, and `on_disconnect` follows.
    fn on_landed(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered, result: Result<(), Failure>) {}

    // Connecting and accepting connections.

    /// A connection that the program has opened was not established. Its id is stale when this
    /// callback returns, and [`Context::connections`] does not count it any more.
    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {}

    /// A peer requests a connection. Returns the answer to the peer. The default accepts the connection.
    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        Decision::Accept
    }

    /// Decides if the program accepts the peer of a secured connection ([`crate::Security`]). The
    /// peer has just proven its identity. The reactor calls this on both sides, before
    /// `on_connect`. Nothing can be sent on the connection yet.
    /// [`crate::ConnectionContext::postpone_judgement`] postpones the decision. The default accepts
    /// the peer.
    ///
    /// If this returns an error, the connection is not established. The reactor sends the error's text to the peer
    /// without encryption, at most 200 bytes.
    ///
    /// # Errors
    /// The reason why the program does not accept the peer.
    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, peer: &PeerIdentity) -> Result<(), String> {
        Ok(())
    }

    // Remote memory.

    /// The peer has written to a region of the local side, with immediate data. The bytes of this write, and of all
    /// earlier writes of the peer, are in place.
    fn on_immediate(&mut self, cx: &mut Context<'_>, conn: ConnectionId, immediate: Immediate) {}

    /// A transfer of a list of pieces ([`crate::RemoteContext::transfer`]) has ended. This is
    /// called once for each transfer, and before `on_disconnect` if the connection ends. The
    /// program may use the regions again. `end` contains the list and the state of its pieces.
    fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, transfer: TransferId, end: TransferEnd) {}

    // File descriptors, and messages from other threads.

    /// A file descriptor that [`crate::IoContext::register`] watches has become ready. Readiness is
    /// edge-triggered: read, write or accept until `WouldBlock`. If the program stops earlier, the
    /// reactor does not call this again for the remaining data.
    fn on_io_ready(&mut self, cx: &mut Context<'_>, io: IoId, readiness: Readiness) {}

    /// Another thread has sent a message with [`crate::ReactorHandle::post`]. The messages from one
    /// thread arrive in the order in which the thread has sent them.
    fn on_wake(&mut self, cx: &mut Context<'_>, message: M) {}

    // Events of the reactor itself.

    /// The state of a device that the reactor uses, or of a port of this device, has changed: see `event`. If
    /// connections end because of the change, `on_disconnect` reports each of them separately.
    fn on_device_event(&mut self, cx: &mut Context<'_>, event: &DeviceEvent) {}

    /// The reactor has begun to drain, see [`Context::drain`]. The default closes all connections and endpoints. A
    /// handler with unfinished work sends its last messages here, and closes its connections within the time
    /// `deadline`. After that time, the reactor aborts the remaining connections and endpoints.
    fn on_drain(&mut self, cx: &mut Context<'_>, deadline: Duration) {
        cx.close_all();
    }

    /// Chooses the reactor of a group that handles a connect request. This is called on the reactor
    /// that has received the request, if the peer may connect: if its network is one of
    /// `Config::allowed_peers`, and it secures its connections as the listener does. Afterwards
    /// `on_connect_request` is called on the chosen reactor. The default chooses the reactor with
    /// the lowest load.
    fn on_place(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Place {
        Place::LeastLoaded
    }

    /// Returns the implementation of the callbacks for datagrams. The default returns `None`. In that case the reactor
    /// drops received datagrams.
    #[cfg(feature = "datagram")]
    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        None
    }
}
