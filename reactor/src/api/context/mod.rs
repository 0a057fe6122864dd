//! The operations of a callback, by noun: connections and listeners here, [`messages`], [`memory`], [`landing`],
//! [`transfers`], [`time`], and datagrams in `DatagramContext`.

#[cfg(feature = "datagram")]
mod datagrams;
mod landing;
mod memory;
mod messages;
mod time;
mod transfers;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rdma_transport::caps::Capabilities;

#[cfg(feature = "datagram")]
pub use self::datagrams::{DatagramContext, DatagramHandler};
use crate::datagram::endpoints::Endpoints;
use crate::driver::Driver;
use crate::error::Error;
use crate::id::{ConnectionId, ListenerId};
use crate::options::{ConnectOptions, ListenOptions};
use crate::security::PeerIdentity;
use crate::stats::Stats;

/// The operations of a reactor, in a callback or from [`crate::Reactor::context`]. No method calls a callback: the
/// events that it causes are reported later, from the loop. No method blocks, except those that register memory or open
/// connections on devices, as their documentation says.
#[derive(Debug)]
pub struct Context<'a> {
    pub(crate) driver: &'a mut Driver,
    pub(crate) endpoints: &'a mut Endpoints,
}

impl Context<'_> {
    // Listening.

    /// Listens on an address. Port 0 selects a free port, see [`Context::local_address`].
    ///
    /// # Errors
    /// The address is in use or does not belong to this host; the reactor is draining.
    pub fn listen(&mut self, address: SocketAddr) -> Result<ListenerId, Error> {
        self.driver.listen(address, ListenOptions::default())
    }

    /// As [`Context::listen`], with options.
    ///
    /// ```
    /// use rdma_reactor::{Config, ListenOptions, ProviderChoice, Reactor};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    /// let listener = reactor.context().listen_with("[::]:0".parse()?, ListenOptions::new().ipv6_only(true))?;
    /// assert!(reactor.context().local_address(listener).is_some_and(|address| address.port() != 0));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Context::listen`]; an option is out of its range.
    pub fn listen_with(&mut self, address: SocketAddr, options: ListenOptions) -> Result<ListenerId, Error> {
        self.driver.listen(address, options)
    }

    /// Returns the address that a listener is bound to; `None` if the listener is closed.
    #[must_use]
    pub fn local_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.driver.local_address(listener)
    }

    /// Stops listening. Connections that the listener has accepted stay open.
    pub fn close_listener(&mut self, listener: ListenerId) {
        self.driver.close_listener(listener);
    }

    /// Accepts a connection by exchange on `stream`, as if a listener for exchange ([`ListenOptions::exchange`]) had accepted the stream.
    /// `stream` is a stream socket, of TCP or another kind. The connection owns it from now on, and makes it non-blocking. The reactor
    /// calls `on_connect_request` when the peer has sent its request. The peer has 10 s for that.
    ///
    /// ```
    /// use std::os::unix::net::UnixStream;
    ///
    /// use rdma_reactor::{Context, Error, ListenerId};
    ///
    /// /// Some other program listens on the Unix socket, and hands out what comes in.
    /// fn take(cx: &mut Context<'_>, listener: ListenerId, stream: UnixStream) -> Result<(), Error> {
    ///     cx.accept_over(listener, stream.into())
    /// }
    /// ```
    ///
    /// # Errors
    /// The descriptor is no stream socket; the listener is gone, or does not listen for exchange.
    pub fn accept_over(&mut self, listener: ListenerId, stream: OwnedFd) -> Result<(), Error> {
        self.driver.look_at_clock();
        self.driver.take_stream(listener, stream)
    }

    // Connections.

    /// Opens a connection. `on_connect` or `on_connect_error` follows.
    ///
    /// # Errors
    /// A limit has been reached, or the provider returned an error. No callback follows.
    pub fn connect(&mut self, peer: SocketAddr) -> Result<ConnectionId, Error> {
        self.connect_with(peer, ConnectOptions::default())
    }

    /// As [`Context::connect`], with options.
    ///
    /// ```
    /// use rdma_reactor::{Config, ConnectOptions, ProviderChoice, Reactor};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    /// let mut context = reactor.context();
    /// let options = ConnectOptions::new().private_data(b"who I am");
    /// let conn = context.connect_with("127.0.0.1:7471".parse()?, options)?;
    /// // Callbacks find the state of a connection by the number that is attached to it.
    /// context.set_user(conn, 42);
    /// assert_eq!(context.user(conn), Some(42));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Context::connect`]; the private data is too long, an option is out of its range, or the provider cannot
    /// choose the source address.
    pub fn connect_with(&mut self, peer: SocketAddr, options: ConnectOptions) -> Result<ConnectionId, Error> {
        self.connect_any(&[peer], options)
    }

    /// Opens a connection by exchange over a stream that the program has connected, such as one through a proxy or a Unix
    /// socket. The peer's program passes the other end to [`Context::accept_over`]. The descriptor must be a stream socket. It
    /// is made non-blocking, and belongs to the connection from now on. Name the device ([`ConnectOptions::exchange`]) if the
    /// stream has no address of it.
    ///
    /// ```
    /// use std::os::unix::net::UnixStream;
    ///
    /// use rdma_reactor::{ConnectOptions, ConnectionId, Context, Error, ExchangeOptions};
    ///
    /// fn connect(cx: &mut Context<'_>, stream: UnixStream) -> Result<ConnectionId, Error> {
    ///     let on = ExchangeOptions { device: Some("mlx5_0".into()), ..ExchangeOptions::default() };
    ///     cx.connect_over(stream.into(), ConnectOptions::new().exchange(on))
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::connect_with`]. Also if the descriptor is no stream socket, and if no provider connects by exchange, or
    /// none has the port.
    pub fn connect_over(&mut self, stream: OwnedFd, options: ConnectOptions) -> Result<ConnectionId, Error> {
        self.driver.look_at_clock();
        self.driver.connect_over(stream, options)
    }

    /// Opens a connection to the first address of a peer that works, such as those of its adapters. If an address is
    /// refused, unreachable or silent for `Timeouts::attempt`, the next one is tried, under the same id; the last one
    /// has `Timeouts::connect`. If the peer itself rejects the connection, no other address is tried. `on_connect`
    /// follows, and [`Context::peer_address`] returns the address that worked; or `on_connect_error` follows, with the
    /// error of the last address.
    ///
    /// ```
    /// use rdma_reactor::{ConnectOptions, ConnectionId, Context, Error};
    ///
    /// /// Connects to one of a peer's two adapters: the first one that works.
    /// fn connect(cx: &mut Context<'_>) -> Result<ConnectionId, Error> {
    ///     let adapters = [([192, 0, 2, 1], 7471).into(), ([198, 51, 100, 1], 7471).into()];
    ///     cx.connect_any(&adapters, ConnectOptions::new())
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::connect_with`]; [`Error::NoAddress`] if `peers` is empty.
    pub fn connect_any(&mut self, peers: &[SocketAddr], options: ConnectOptions) -> Result<ConnectionId, Error> {
        self.driver.look_at_clock();
        self.driver.connect(peers, options)
    }

    /// As [`Context::connect_any`], for the name of a host, such as `localhost` or `storage.example.org`, or an address
    /// in text form. Another thread looks the name up (`getaddrinfo`(3)), four names at a time. The addresses are tried
    /// sequentially in the order in which the system returns them, except that IPv6 and IPv4 alternate (RFC 8305,
    /// section 4). [`Context::peer_address`] is `0.0.0.0` until the name is resolved. If the name is unknown,
    /// `on_connect_error` follows with [`crate::ConnectError::Lookup`]; if it is not resolved in time, with
    /// [`crate::ConnectError::Timeout`].
    ///
    /// ```
    /// use rdma_reactor::{ConnectOptions, ConnectionId, Context, Error};
    ///
    /// fn connect(cx: &mut Context<'_>) -> Result<ConnectionId, Error> {
    ///     cx.connect_host("storage.example.org", 7471, ConnectOptions::new())
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::connect_with`], except for errors of the provider; [`Error::Lookup`] if the system cannot start a
    /// thread.
    pub fn connect_host(&mut self, host: &str, port: u16, options: ConnectOptions) -> Result<ConnectionId, Error> {
        self.driver.look_at_clock();
        self.driver.connect_host(host, port, options)
    }

    /// Closes a connection after all accepted sends were sent, for which there is `Timeouts::close`. `on_send_complete`
    /// reports for each whether it was. `on_disconnect` follows. No message is delivered any more, not even one that
    /// the peer has sent before. A stale id is ignored.
    pub fn close(&mut self, conn: ConnectionId) {
        self.driver.look_at_clock();
        self.driver.close(conn);
    }

    /// Closes a connection immediately. Accepted sends may not be sent. Otherwise as [`Context::close`].
    pub fn abort(&mut self, conn: ConnectionId) {
        self.driver.abort(conn);
    }

    /// Closes every connection as [`Context::close`] does, and every endpoint as `DatagramContext::close` does.
    pub fn close_all(&mut self) {
        self.driver.look_at_clock();
        self.endpoints.close_all(self.driver, false);
        self.driver.close_all();
    }

    /// Returns the connections that have had `on_connect` but not yet `on_disconnect`.
    pub fn connection_ids(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        let announced = |slot: &&crate::driver::table::ConnectionSlot| slot.conn.state().is_announced();
        self.driver.connections().iter().filter(announced).map(|slot| slot.conn.id())
    }

    /// Returns the number of connections in any state.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.driver.connections().len()
    }

    /// Returns the address of the peer; `None` if the connection does not exist any more.
    #[must_use]
    pub fn peer_address(&self, conn: ConnectionId) -> Option<SocketAddr> {
        self.driver.connections().get(conn).map(|slot| slot.conn.peer())
    }

    /// Returns the listener that accepted a connection. It may be closed, or belong to another reactor of the group.
    /// `None` if the connection does not exist any more, or was opened by the local side.
    #[must_use]
    pub fn listener(&self, conn: ConnectionId) -> Option<ListenerId> {
        self.driver.connections().get(conn)?.conn.listener()
    }

    /// Returns the private data that the peer sent while connecting; empty if there was none or the connection does not
    /// exist any more.
    #[must_use]
    pub fn private_data(&self, conn: ConnectionId) -> &[u8] {
        self.driver.announced(conn).map_or(&[], |conn| conn.private_data())
    }

    /// Returns the identity that the peer of a secured connection has proven. `None` without [`crate::Security`],
    /// before [`crate::Handler::on_identity`], and if the connection does not exist any more.
    #[must_use]
    pub fn identity(&self, conn: ConnectionId) -> Option<&PeerIdentity> {
        self.driver.identity(conn)
    }

    /// Postpones the decision of [`crate::Handler::on_identity`], within which it is called. The `Ok` that
    /// `on_identity` returns is ignored, and [`Context::judge`] decides later. Until then the connection is not
    /// established. It ends after `Timeouts::handshake`, or after `Timeouts::connect` on the side that connects.
    ///
    /// Example: [`Context::judge`].
    pub fn postpone_judgement(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.postpone_judgement());
    }

    /// Makes the decision that [`Context::postpone_judgement`] has postponed, with the same meaning as the result of
    /// [`crate::Handler::on_identity`]. Returns `false` if the connection waits for no decision: it does not exist any
    /// more, is ending, or has had its decision.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Handler, PeerIdentity};
    ///
    /// /// Has another thread decide about each peer.
    /// struct Server(std::sync::mpsc::Sender<(ConnectionId, PeerIdentity)>);
    ///
    /// impl Handler<(ConnectionId, Result<(), String>)> for Server {
    ///     fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, peer: &PeerIdentity) -> Result<(), String> {
    ///         cx.postpone_judgement(conn);
    ///         self.0.send((conn, peer.clone())).map_err(|_| "no decision is possible now".into())
    ///     }
    ///
    ///     fn on_wake(&mut self, cx: &mut Context<'_>, (conn, answer): (ConnectionId, Result<(), String>)) {
    ///         cx.judge(conn, answer);
    ///     }
    /// }
    /// ```
    pub fn judge(&mut self, conn: ConnectionId, answer: Result<(), String>) -> bool {
        self.driver.input(conn, |conn, env| conn.judged_late(answer.err(), env)).unwrap_or(false)
    }

    /// Attaches a number to a connection. Ignored if the connection does not exist any more.
    ///
    /// Example: [`Context::connect_with`].
    pub fn set_user(&mut self, conn: ConnectionId, value: u64) {
        self.driver.input(conn, |conn, _| conn.set_user(value));
    }

    /// Returns the number that is attached to a connection, 0 at first; `None` if the connection does not exist any
    /// more.
    #[must_use]
    pub fn user(&self, conn: ConnectionId) -> Option<u64> {
        self.driver.connections().get(conn).map(|slot| slot.conn.user())
    }

    /// Returns the capabilities of a connection's device; `None` if the connection does not exist any more or is not on
    /// a device yet.
    #[must_use]
    pub fn capabilities(&self, conn: ConnectionId) -> Option<Capabilities> {
        self.driver.capabilities(conn)
    }

    /// Returns the name of a connection's device, such as `mlx5_0`; `None` if the connection does not exist any more or
    /// is not on a device yet.
    #[must_use]
    pub fn device(&self, conn: ConnectionId) -> Option<&str> {
        self.driver.device_name(conn)
    }

    /// Returns the name of the transport that carries a connection: `verbs`, `iwarp`, or `shm` (memory that both
    /// processes map). `None` if the connection does not exist any more or is not on a device yet.
    #[must_use]
    pub fn provider(&mut self, conn: ConnectionId) -> Option<&'static str> {
        self.driver.carrier(conn)
    }

    // The reactor.

    /// Returns the same context with a shorter lifetime, to pass on.
    pub fn reborrow(&mut self) -> Context<'_> {
        Context { driver: self.driver, endpoints: self.endpoints }
    }

    /// Returns the time at which this turn began to call back, or a later one.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.driver.now()
    }

    /// Returns the operations on datagram endpoints.
    #[cfg(feature = "datagram")]
    pub fn datagrams(&mut self) -> DatagramContext<'_> {
        self.driver.ring();
        DatagramContext { driver: self.driver, endpoints: self.endpoints }
    }

    /// Drains the reactor. From now on it accepts no connection. Open connections continue, with messages and timers,
    /// until [`crate::Handler::on_drain`] or the program closes them; the default `on_drain` closes all of them
    /// immediately. [`crate::Reactor::run`] returns when none is left. After `deadline`, counted in whole milliseconds
    /// from now, the reactor cuts off the remaining connections and endpoints, each with its usual last callback, and
    /// nothing new can be opened. Ignored if the reactor is draining already.
    pub fn drain(&mut self, deadline: Duration) {
        self.driver.want_drain(deadline);
    }

    /// Makes [`crate::Reactor::run`] return after this turn.
    pub fn stop(&mut self) {
        self.driver.stop();
    }

    /// Returns the counters of the reactor.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.driver.stats()
    }
}
