//! The operations that a callback may call. This file contains those that open and close
//! connections, those on the reactor, and the methods that return the facets, such as
//! [`Context::timers`]. [`messages`] and [`landing`] contain the other operations of [`Context`].
//! Each facet has a separate file.

mod connection;
#[cfg(feature = "datagram")]
mod datagrams;
mod io;
mod landing;
mod listeners;
mod messages;
mod regions;
mod remote;
mod timers;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rdma_transport::cm::Source;

pub use self::connection::ConnectionContext;
#[cfg(feature = "datagram")]
pub use self::datagrams::{DatagramContext, DatagramHandler};
pub use self::io::IoContext;
pub use self::listeners::ListenerContext;
pub use self::regions::RegionContext;
pub use self::remote::RemoteContext;
pub use self::timers::TimerContext;
use crate::datagram::endpoints::Endpoints;
use crate::driver::Driver;
use crate::error::Error;
use crate::id::{ConnectionId, ListenerId};
use crate::options::{ConnectOptions, ListenOptions};
use crate::stats::Stats;

/// The operations of a reactor, for use in a callback or through [`crate::Reactor::context`]. No method calls a
/// callback directly: the reactor's loop reports the resulting events later. A method blocks only if its documentation
/// says so: some methods that register memory or open connections on RDMA devices block.
///
/// The context itself has the operations on messages, on connections and on the reactor. A facet,
/// such as `cx.timers()`, has the operations on one kind of object. It borrows the context for the
/// call.
///
/// | to | call |
/// |---|---|
/// | send a message | `send`, `append`; without a copy `buffer` and `send_buffer`, `send_region` |
/// | send only what is accepted | `writable`, `await_room` |
/// | choose when sends are posted, and which are reported | `cork`, `flush`, `solicit`, `reporting` |
/// | return the buffer of a kept message | `release` |
/// | exchange large messages without a copy | `offer`, `land`, `refuse_offer` |
/// | listen | `listen`, `listen_with` |
/// | connect | `connect`, `connect_with`, `connect_any`, `connect_host`, `connect_over` |
/// | close | `close`, `abort`, `limit_close`, `close_all`, `close_unestablished` |
/// | find the connections | `connection_ids`, `connections` |
/// | stop | `stop`, `drain` |
/// | measure and log | `now`, `stats`, `log_violation` |
/// | pass the context by value | `reborrow` |
/// | **`cx.connection(conn)`** | [`ConnectionContext`] |
/// | identify the peer | `peer_address`, `listener`, `private_data`, `identity` |
/// | decide about the peer later | `postpone_judgement`, `judge` |
/// | attach a number | `set_user`, `user` |
/// | find the device | `capabilities`, `device`, `provider` |
/// | find the limits of messages | `buffer_size`, `max_message`, `max_copied` |
/// | find the room for messages | `writable_for`, `free_slots`, `stall_time` |
/// | **`cx.remote(conn)`** | [`RemoteContext`] |
/// | read from the memory of the peer | `read`, `read_vectored` |
/// | write to it | `write`, `write_vectored`, `write_with_immediate` |
/// | change a word of it | `compare_swap`, `fetch_add` |
/// | wait for earlier reads | `fence` |
/// | read or write many pieces | `transfer`, `cancel_transfer` |
/// | **`cx.regions()`** | [`RegionContext`] |
/// | register new memory | `register`, `register_at` |
/// | register existing memory | `register_vec`, `register_memory`, `register_memory_at` |
/// | register foreign memory | `register_raw`, `register_dmabuf` |
/// | register memory on another thread | `maker`, `adopt` |
/// | end the rights of peers | `revoke` |
/// | **`cx.listeners()`** | [`ListenerContext`] |
/// | find the port, stop listening | `local_address`, `close` |
/// | accept a stream of the program | `accept_over` |
/// | **`cx.timers()`** | [`TimerContext`]: `set`, `cancel` |
/// | **`cx.io()`** | [`IoContext`]: `register`, `deregister` a file descriptor |
/// | **`cx.datagrams()`** | `DatagramContext` (feature `datagram`) |
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

/// Returns an error if no address can be tried, because each of them is link-local and lacks its
/// zone. If the options name a source device, no address needs a zone, because the device
/// determines the interface.
fn check_zones(peers: &[SocketAddr], options: &ConnectOptions) -> Result<(), Error> {
    match peers.first() {
        Some(&first) if !matches!(options.path.source, Source::Device { .. }) => {
            peers.iter().find_map(|&peer| check_zone(peer).ok()).map_or_else(|| check_zone(first), Ok)
        }
        _ => Ok(()),
    }
}

impl Context<'_> {
    // Facets.

    /// Returns the state of a connection: its peer, its device, and the number that the program has
    /// attached to it. Always succeeds; the methods of [`ConnectionContext`] say what they return
    /// for a stale id.
    #[inline]
    pub fn connection(&mut self, conn: ConnectionId) -> ConnectionContext<'_> {
        ConnectionContext { driver: self.driver, conn }
    }

    /// Returns the one-sided operations of a connection: RDMA Read, RDMA Write, atomics and
    /// transfers.
    #[inline]
    pub fn remote(&mut self, conn: ConnectionId) -> RemoteContext<'_> {
        RemoteContext { driver: self.driver, conn }
    }

    /// Returns the operations on regions of memory.
    #[inline]
    pub fn regions(&mut self) -> RegionContext<'_> {
        RegionContext { driver: self.driver }
    }

    /// Returns the operations on listeners.
    #[inline]
    pub fn listeners(&mut self) -> ListenerContext<'_> {
        ListenerContext { driver: self.driver }
    }

    /// Returns the operations on timers.
    #[inline]
    pub fn timers(&mut self) -> TimerContext<'_> {
        TimerContext { driver: self.driver }
    }

    /// Returns the operations on file descriptors of the program.
    #[inline]
    pub fn io(&mut self) -> IoContext<'_> {
        IoContext { driver: self.driver }
    }

    /// Returns the operations on datagram endpoints.
    #[cfg(feature = "datagram")]
    pub fn datagrams(&mut self) -> DatagramContext<'_> {
        self.driver.ring();
        DatagramContext { driver: self.driver, endpoints: self.endpoints }
    }

    // Operations on connections.

    /// Listens for connections on an address. Port 0 selects a free port;
    /// [`ListenerContext::local_address`] returns it.
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
    /// assert!(reactor.context().listeners().local_address(listener).is_some_and(|address| address.port() != 0));
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
    /// context.connection(conn).set_user(42);
    /// assert_eq!(context.connection(conn).user(), Some(42));
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

    /// Opens a connection over `stream`: a stream that the program has already connected, such as a
    /// Unix socket or a stream through a proxy. Both sides exchange the parameters of their queue
    /// pairs over this stream. The program of the peer passes the other end of the stream to
    /// [`crate::ListenerContext::accept_over`]. The descriptor must be a stream socket. The
    /// connection owns the descriptor from now on, and makes it non-blocking. If the local address
    /// of the stream does not identify an RDMA device, as with a Unix socket, name the device with
    /// [`ConnectOptions::exchange`].
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
    /// If an address works, the reactor calls `on_connect`, and
    /// [`crate::ConnectionContext::peer_address`] returns that address. If no address works, the
    /// reactor calls `on_connect_error`, with the error of the last address that was tried.
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
    /// [`crate::ConnectionContext::peer_address`] is `0.0.0.0` until the name is resolved. If the
    /// name is unknown, `on_connect_error` reports [`crate::ConnectError::Lookup`]. If the name is
    /// not resolved in time, `on_connect_error` reports [`crate::ConnectError::Timeout`].
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
        // A program that cuts `[::1]:7471` at its last colon passes an address in brackets.
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

    /// Aborts a connection, as [`Context::abort`] does, if the program has not closed it within
    /// [`Timeouts::close`](crate::Timeouts::close) from now on. Use this to close a connection
    /// while messages in a queue of the program wait for room: call `limit_close` first, and
    /// [`Context::close`] once the queue is empty. Until then, the connection stays open. Another
    /// call starts the time again. Ignored if the connection is not established, or is closed
    /// already.
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
    /// them, so a program can stop after its last connection as follows:
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
        self.driver.table.announced()
    }

    /// Returns the number of all connections of this reactor: established, being opened, and being
    /// closed. The connection of a running [`crate::Handler::on_disconnect`] or
    /// [`crate::Handler::on_connect_error`] is not counted. Until the callback returns, it still
    /// counts towards [`crate::Config::max_connections`].
    #[must_use]
    pub fn connections(&self) -> usize {
        self.driver.table.count()
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
        self.driver.now
    }

    /// Logs at `warn` that a peer has violated the protocol of the program. A peer can cause such
    /// lines as often as it likes, so their number is limited, like that of the reactor's own
    /// lines: in 10 s, at most one line for each host, and at most 256 lines for all hosts
    /// together. The line begins with the id of the connection.
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
        self.driver.stop = true;
    }

    /// Returns the counters of the reactor.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.driver.stats()
    }
}
