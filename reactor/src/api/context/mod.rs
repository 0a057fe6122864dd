//! The operations that a callback may call. This file contains the operations on connections, on listeners, and on the
//! reactor. The others are in [`messages`], [`memory`], [`landing`], [`transfers`] and [`time`]. `DatagramContext`
//! contains the operations on datagrams.

#[cfg(feature = "datagram")]
mod datagrams;
mod landing;
mod memory;
mod messages;
mod time;
mod transfers;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rdma_transport::caps::Capabilities;
use rdma_transport::cm::Source;

#[cfg(feature = "datagram")]
pub use self::datagrams::{DatagramContext, DatagramHandler};
use crate::datagram::endpoints::Endpoints;
use crate::driver::Driver;
use crate::error::Error;
use crate::id::{ConnectionId, ListenerId};
use crate::options::{ConnectOptions, ListenOptions};
use crate::security::PeerIdentity;
use crate::stats::Stats;

/// The operations of a reactor, for use in a callback or through [`crate::Reactor::context`]. No method calls a
/// callback directly: the reactor's loop reports the resulting events later. A method blocks only if its documentation
/// says so: some methods that register memory or open connections on RDMA devices block.
#[derive(Debug)]
pub struct Context<'a> {
    pub(crate) driver: &'a mut Driver,
    pub(crate) endpoints: &'a mut Endpoints,
}

/// Returns an error if an address is link-local and has no zone. The system would refuse it with
/// "Invalid argument".
fn check_zone(address: SocketAddr) -> Result<(), Error> {
    match address {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 => Err(Error::NoZone(address)),
        _ => Ok(()),
    }
}

/// Returns an error if no address can be tried, because each of them lacks its zone. A source
/// device names the interface, too.
fn check_zones(peers: &[SocketAddr], options: &ConnectOptions) -> Result<(), Error> {
    match peers.first() {
        Some(&first) if !matches!(options.path.source, Source::Device { .. }) => {
            peers.iter().find_map(|&peer| check_zone(peer).ok()).map_or_else(|| check_zone(first), Ok)
        }
        _ => Ok(()),
    }
}

impl Context<'_> {
    // Operations on listeners.

    /// Listens for connections on an address. Port 0 selects a free port; [`Context::local_address`] returns it.
    ///
    /// # Errors
    /// The address is in use or does not belong to this host, a link-local address has no zone
    /// ([`Error::NoZone`]), or the reactor is draining.
    pub fn listen(&mut self, address: SocketAddr) -> Result<ListenerId, Error> {
        self.listen_with(address, ListenOptions::default())
    }

    /// Listens like [`Context::listen`], with options.
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
    /// The errors of [`Context::listen`]. Also if an option is out of its range.
    pub fn listen_with(&mut self, address: SocketAddr, options: ListenOptions) -> Result<ListenerId, Error> {
        check_zone(address)?;
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

    /// Accepts a connection over `stream`: a stream socket, for example of TCP, that the program has already accepted. Both sides exchange
    /// the parameters of their queue pairs over the stream, as with a listener that has [`ListenOptions::exchange`]. The connection owns
    /// the descriptor from now on, and makes it non-blocking. When the connect request of the peer arrives, the reactor calls
    /// `on_connect_request`. If the request does not arrive within 10 s, the reactor closes the stream.
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
    /// The descriptor is no stream socket, the listener is closed, or the listener does not have
    /// [`ListenOptions::exchange`].
    pub fn accept_over(&mut self, listener: ListenerId, stream: OwnedFd) -> Result<(), Error> {
        self.driver.look_at_clock();
        self.driver.take_stream(listener, stream)
    }

    // Operations on connections.

    /// Opens a connection to `peer`. The reactor calls `on_connect` when the connection is established, or
    /// `on_connect_error` if that fails.
    ///
    /// # Errors
    /// A limit of the [`crate::Config`] has been reached, the deadline of a drain has passed ([`Error::Drained`]), the
    /// connection cannot be secured with the settings, or the provider returned an error. After an error, no callback
    /// follows.
    pub fn connect(&mut self, peer: SocketAddr) -> Result<ConnectionId, Error> {
        self.connect_with(peer, ConnectOptions::default())
    }

    /// Opens a connection like [`Context::connect`], with options.
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
    /// The errors of [`Context::connect`]. Also if the private data is too long, an option is out of its range, or the
    /// provider cannot choose the source address.
    pub fn connect_with(&mut self, peer: SocketAddr, options: ConnectOptions) -> Result<ConnectionId, Error> {
        self.connect_any(&[peer], options)
    }

    /// Opens a connection over `stream`: a stream that the program has already connected, such as a Unix socket or a stream through a
    /// proxy. Both sides exchange the parameters of their queue pairs over this stream. The program of the peer passes the other end of the
    /// stream to [`Context::accept_over`]. The descriptor must be a stream socket. The connection owns the descriptor from now on, and
    /// makes it non-blocking. If the local address of the stream does not identify an RDMA device, as with a Unix socket, name the device
    /// with [`ConnectOptions::exchange`].
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
    /// The errors of [`Context::connect_with`]. Also if the descriptor is no stream socket, if no provider supports such connections, or if
    /// no port of an RDMA device matches the stream's local address and the options.
    pub fn connect_over(&mut self, stream: OwnedFd, options: ConnectOptions) -> Result<ConnectionId, Error> {
        self.driver.look_at_clock();
        self.driver.connect_over(stream, options)
    }

    /// Opens a connection to a peer that has several addresses, such as the addresses of its adapters. The reactor
    /// tries the addresses in order until one of them works. All attempts have the same connection id. The reactor
    /// tries the next address if the current one refuses the connection, is unreachable, or does not answer within
    /// `Timeouts::attempt`. For the last address, the reactor waits for `Timeouts::connect` instead. If the peer itself
    /// rejects the connection, the reactor tries no other address.
    ///
    /// If an address works, the reactor calls `on_connect`, and [`Context::peer_address`] returns that address. If no
    /// address works, the reactor calls `on_connect_error`, with the error of the last address that was tried.
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
    /// The errors of [`Context::connect_with`]. Also [`Error::NoAddress`] if `peers` is empty.
    pub fn connect_any(&mut self, peers: &[SocketAddr], options: ConnectOptions) -> Result<ConnectionId, Error> {
        check_zones(peers, &options)?;
        self.driver.look_at_clock();
        self.driver.connect(peers, options)
    }

    /// Opens a connection to a host: tries the addresses of the host in order until one of them
    /// works, like [`Context::connect_any`]. `host` is a name, such as `localhost` or
    /// `storage.example.org`, or an address in text form, also in brackets or with a zone. Other
    /// threads resolve names (`getaddrinfo`(3)), at most four names at a time. The order of the
    /// addresses is that of the system, except that IPv6 and IPv4 addresses alternate (RFC 8305,
    /// section 4).
    ///
    /// [`Context::peer_address`] is `0.0.0.0` until the name is resolved. If the name is unknown, `on_connect_error`
    /// reports [`crate::ConnectError::Lookup`]. If the name is not resolved in time, `on_connect_error` reports
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
    /// The errors of [`Context::connect_with`] that do not come from a provider. Also
    /// [`Error::NoAddress`] if `host` is empty, and [`Error::Lookup`] if the system cannot start a
    /// thread.
    pub fn connect_host(&mut self, host: &str, port: u16, options: ConnectOptions) -> Result<ConnectionId, Error> {
        // `[::1]:7471`, cut at its last colon, leaves an address in brackets.
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err(Error::NoAddress);
        }
        if let Ok(ip) = host.parse() {
            check_zones(&[SocketAddr::new(ip, port)], &options)?;
        }
        self.driver.look_at_clock();
        self.driver.connect_host(host, port, options)
    }

    /// Closes a connection. From the call of this method on, the reactor delivers no message of this connection, not
    /// even one that has already arrived. The reactor first posts the sends that it has accepted, and waits for their
    /// completion. [`Timeouts::close`](crate::Timeouts::close) limits this wait. The reactor calls `on_send_complete`
    /// for each of these sends; the outcome says if the send succeeded. Afterwards it calls `on_disconnect`. If the
    /// connection is not established yet, the reactor calls `on_connect_error` on the side that opened it, and no
    /// callback on the other side. A stale id is ignored.
    pub fn close(&mut self, conn: ConnectionId) {
        self.driver.look_at_clock();
        self.driver.close(conn);
    }

    /// Closes a connection immediately. Sends that were accepted but not sent yet may be discarded. In all other
    /// respects, this method is like [`Context::close`].
    pub fn abort(&mut self, conn: ConnectionId) {
        self.driver.abort(conn);
    }

    /// Limits the time until a connection is closed. A program with messages in a queue of its own, for which the
    /// connection has no room, calls this when it wants to close the connection, and calls [`Context::close`] once its
    /// queue is empty. Until then, the connection stays open. If it is not closed within
    /// [`Timeouts::close`](crate::Timeouts::close), the reactor aborts it, as [`Context::abort`] does. Another call
    /// starts this time again. Ignored if the connection is not established, or is closed already.
    pub fn limit_close(&mut self, conn: ConnectionId) {
        self.driver.look_at_clock();
        self.driver.limit_close(conn);
    }

    /// Closes every connection like [`Context::close`], and every datagram endpoint like `DatagramContext::close`.
    pub fn close_all(&mut self) {
        self.driver.look_at_clock();
        self.endpoints.close_all(self.driver, false);
        self.driver.close_all();
    }

    /// Closes every connection that is not established yet, like [`Context::close`]. A program whose
    /// [`crate::Handler::on_drain`] closes the established connections itself calls this method, too. Otherwise the
    /// drain waits for connections that are being opened.
    pub fn close_unestablished(&mut self) {
        self.driver.look_at_clock();
        self.driver.close_unestablished();
    }

    /// Returns the ids of the established connections: those that have had `on_connect` but not yet
    /// `on_disconnect`. The connection of a running [`crate::Handler::on_disconnect`] is not among
    /// them, so a program that stops when no connection is left may write there:
    ///
    /// ```
    /// # use rdma_reactor::{ConnectionId, Context, DisconnectReason, Handler};
    /// # struct Client;
    /// # impl Handler for Client {
    /// fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
    ///     if cx.connection_ids().next().is_none() {
    ///         cx.stop();
    ///     }
    /// }
    /// # }
    /// ```
    pub fn connection_ids(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        self.driver.connections().announced()
    }

    /// Returns the number of all connections of this reactor: established, being opened, and being
    /// closed. The connection of a running [`crate::Handler::on_disconnect`] or
    /// [`crate::Handler::on_connect_error`] is not counted. It still has its share of
    /// [`crate::Config::max_connections`], until the callback returns.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.driver.connections().count()
    }

    /// Returns the address of a connection's peer; `None` if the connection does not exist any more.
    #[must_use]
    pub fn peer_address(&self, conn: ConnectionId) -> Option<SocketAddr> {
        self.driver.connections().get(conn).map(|slot| slot.conn.peer())
    }

    /// Returns the listener that accepted a connection. The listener may be closed by now, or belong to another reactor
    /// of the group. Returns `None` if the local side opened the connection, or if the connection does not exist any
    /// more.
    #[must_use]
    pub fn listener(&self, conn: ConnectionId) -> Option<ListenerId> {
        self.driver.connections().get(conn)?.conn.listener()
    }

    /// Returns the private data that the peer sent with its connect request or its answer. Returns an empty slice
    /// before `on_connect`, if the peer sent none, or if the connection does not exist any more.
    #[must_use]
    pub fn private_data(&self, conn: ConnectionId) -> &[u8] {
        self.driver.announced(conn).map_or(&[], |conn| conn.private_data())
    }

    /// Returns the identity that the peer of a secured connection has proven. Returns `None` without
    /// [`crate::Security`], before [`crate::Handler::on_identity`], and if the connection does not exist any more.
    #[must_use]
    pub fn identity(&self, conn: ConnectionId) -> Option<&PeerIdentity> {
        self.driver.identity(conn)
    }

    /// Postpones the decision about the peer's identity. Call this within [`crate::Handler::on_identity`]; after that,
    /// the reactor ignores the `Ok` that this `on_identity` returns. The connection is established only after
    /// [`Context::judge`] accepts the peer. If no decision is made in time, the connection ends: after
    /// `Timeouts::connect` on the side that connects, and after `Timeouts::handshake` on the side that accepts. The
    /// decision is about the peer at the current address. So if this connection is not established, the reactor tries
    /// no other address ([`Context::connect_any`]).
    ///
    /// Example: [`Context::judge`].
    pub fn postpone_judgement(&mut self, conn: ConnectionId) {
        self.driver.postpone_judgement(conn);
    }

    /// Makes the decision that [`Context::postpone_judgement`] has postponed. `answer` has the meaning of the result of
    /// [`crate::Handler::on_identity`]. Returns `true` if the decision was pending. Returns `false` if the connection
    /// does not exist any more, is ending, or has had its decision already.
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

    /// Attaches a number of the program's choice to a connection. Ignored if the connection does not exist any more.
    ///
    /// Example: [`Context::connect_with`].
    pub fn set_user(&mut self, conn: ConnectionId, value: u64) {
        self.driver.input(conn, |conn, _| conn.set_user(value));
    }

    /// Returns the number that [`Context::set_user`] has attached to a connection, or 0 if none was attached. Returns
    /// `None` if the connection does not exist any more.
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

    // Operations on the reactor itself.

    /// Returns the same context with a shorter lifetime, to pass to another function by value.
    pub fn reborrow(&mut self) -> Context<'_> {
        Context { driver: self.driver, endpoints: self.endpoints }
    }

    /// Returns the time at which the reactor last read the clock. The reactor reads the clock before it calls the
    /// callbacks of a turn, and not for each call of this method. So the result may be earlier than the current time.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.driver.now()
    }

    /// Logs at `warn` that a peer has violated the protocol of the program. A peer can cause such
    /// lines as often as it likes, so their number is limited as that of the reactor's own lines:
    /// in 10 s, a host causes one such line, and all hosts together cause 256 lines. The line
    /// begins with the id of the connection.
    ///
    /// ```
    /// # use rdma_reactor::{ConnectionId, Context};
    /// fn judge(cx: &mut Context<'_>, conn: ConnectionId, kind: u8) {
    ///     if kind > 3 {
    ///         cx.log_violation(conn, format_args!("a request of an unknown kind, {kind}"));
    ///         cx.close(conn);
    ///     }
    /// }
    /// ```
    pub fn log_violation(&mut self, conn: ConnectionId, what: fmt::Arguments<'_>) {
        if let Some((peer, now, limit)) = self.driver.log_limit_of(conn) {
            peer_log!(limit, now, Violation, Warn, peer, "{conn}: {what}");
        }
    }

    /// Logs at `warn` that an operation on a connection has failed. The number of such lines per
    /// host is limited.
    #[cfg(feature = "tokio")]
    pub(crate) fn log_failure(&mut self, conn: ConnectionId, why: fmt::Arguments<'_>) {
        crate::driver::failure_log!(self.driver, conn, "{why}");
    }

    /// Returns the operations on datagram endpoints.
    #[cfg(feature = "datagram")]
    pub fn datagrams(&mut self) -> DatagramContext<'_> {
        self.driver.ring();
        DatagramContext { driver: self.driver, endpoints: self.endpoints }
    }

    /// Drains the reactor. From now on the reactor accepts no connection. Open connections continue until the program
    /// closes them: they exchange messages, and timers still expire. The reactor calls [`crate::Handler::on_drain`] in
    /// this turn or the next one. The default of `on_drain` calls [`Context::close_all`]. [`crate::Reactor::run`]
    /// returns when all connections and endpoints have ended. When `deadline` has passed since `on_drain`, the reactor
    /// aborts the remaining connections and endpoints. Each of them still gets its last callback. After the deadline,
    /// no connection or endpoint can be opened. The call is ignored if the reactor is draining already.
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
