//! What a callback may do, in parts by noun: connections and listeners here, [`messages`], [`memory`], [`transfers`], [`time`], datagrams in
//! `Datagrams`.

#[cfg(feature = "datagram")]
mod datagrams;
mod landing;
mod memory;
mod messages;
mod time;
mod transfers;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_transport::caps::Capabilities;

#[cfg(feature = "datagram")]
pub use self::datagrams::{DatagramHandler, Datagrams};
use crate::datagram::endpoints::Endpoints;
use crate::driver::Driver;
use crate::error::Error;
use crate::id::{ConnectionId, ListenerId};
use crate::options::{ConnectOptions, ListenOptions};
use crate::security::PeerIdentity;
use crate::stats::Stats;

/// The reactor, inside a callback or from [`crate::Reactor::context`]. Nothing calls back from inside a call: what a call
/// sets off is reported later, from the loop. Nothing blocks, but for registering memory and opening connections on
/// devices, each as its documentation says.
#[derive(Debug)]
pub struct Context<'a> {
    pub(crate) driver: &'a mut Driver,
    pub(crate) endpoints: &'a mut Endpoints,
}

impl Context<'_> {
    // Listening.

    /// Listens on an address; port 0 takes a free one, see [`Context::local_address`].
    ///
    /// # Errors
    /// The address is in use, or not one of this machine; the reactor was drained.
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
    /// As [`Context::listen`], and an option out of its range.
    pub fn listen_with(&mut self, address: SocketAddr, options: ListenOptions) -> Result<ListenerId, Error> {
        self.driver.listen(address, options)
    }

    /// The address that a listener is bound to; `None` when the listener is gone.
    #[must_use]
    pub fn local_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.driver.local_address(listener)
    }

    /// Stops listening. Connections that came through the listener stay.
    pub fn close_listener(&mut self, listener: ListenerId) {
        self.driver.close_listener(listener);
    }

    // Connections.

    /// Opens a connection: `on_connect` or `on_connect_error` follows.
    ///
    /// # Errors
    /// A limit is reached, or the provider refused at once; no callback follows.
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
    /// // Callbacks find what belongs to a connection by the number that is attached to it.
    /// context.set_user(conn, 42);
    /// assert_eq!(context.user(conn), Some(42));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Context::connect`], when the private data is too long, an option is out of its range, or the provider cannot
    /// choose the source.
    pub fn connect_with(&mut self, peer: SocketAddr, options: ConnectOptions) -> Result<ConnectionId, Error> {
        self.connect_any(&[peer], options)
    }

    /// Opens a connection to the first of several addresses of a peer that lets itself be connected to, such as those of its
    /// adapters: when one is refused, unreachable or silent for `Timeouts::attempt`, the next one is tried, under the same
    /// id; the last one has `Timeouts::connect`. A peer that refuses by its own word is not asked again. `on_connect` follows, and [`Context::peer_address`] says which
    /// address it was; or `on_connect_error`, with the error of the last one.
    ///
    /// ```
    /// use rdma_reactor::{ConnectOptions, ConnectionId, Context, Error};
    ///
    /// /// Connects by the first of two adapters of a peer that works.
    /// fn connect(cx: &mut Context<'_>) -> Result<ConnectionId, Error> {
    ///     let adapters = [([192, 0, 2, 1], 7471).into(), ([198, 51, 100, 1], 7471).into()];
    ///     cx.connect_any(&adapters, ConnectOptions::new())
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::connect_with`]; [`Error::NoAddress`] for an empty list.
    pub fn connect_any(&mut self, peers: &[SocketAddr], options: ConnectOptions) -> Result<ConnectionId, Error> {
        self.driver.look_at_clock();
        self.driver.connect(peers, options)
    }

    /// As [`Context::connect_any`], for a host by its name: `localhost`, `storage.example.org`, or an address in text form. The name is
    /// looked up on another thread (`getaddrinfo`(3)), four names at a time. All of its addresses are tried, one after the other, in the
    /// order in which the system gives them, except that IPv6 and IPv4 take turns (RFC 8305, section 4). Until then [`Context::peer_address`] is `0.0.0.0`. A name that is unknown is told to
    /// `on_connect_error` ([`crate::ConnectError::Local`]), and one that is not answered in time is a `Timeout`.
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
    /// As [`Context::connect_with`], except for what the provider says; [`Error::Lookup`] when the system has no thread.
    pub fn connect_host(&mut self, host: &str, port: u16, options: ConnectOptions) -> Result<ConnectionId, Error> {
        self.driver.look_at_clock();
        self.driver.connect_host(host, port, options)
    }

    /// Closes a connection, after what was accepted for sending has been sent, for which there is `Timeouts::close`:
    /// `on_send_complete` tells whether it was. `on_disconnect` follows; no message is delivered any more, not even one that the
    /// peer has sent before. A stale id is ignored.
    pub fn close(&mut self, conn: ConnectionId) {
        self.driver.look_at_clock();
        self.driver.close(conn);
    }

    /// Closes a connection at once: what was accepted for sending may not be sent. Otherwise as [`Context::close`].
    pub fn abort(&mut self, conn: ConnectionId) {
        self.driver.abort(conn);
    }

    /// Closes every connection as [`Context::close`] does, and every endpoint as `Datagrams::close` does.
    pub fn close_all(&mut self) {
        self.driver.look_at_clock();
        self.endpoints.close_all(self.driver, false);
        self.driver.close_all();
    }

    /// The connections that the program was told of by `on_connect` and that have not had their `on_disconnect`.
    pub fn connection_ids(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        let told = |seat: &&crate::driver::table::Seat| seat.conn.state().is_announced();
        self.driver.connections().iter().filter(told).map(|seat| seat.conn.id())
    }

    /// Connections in any state.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.driver.connections().len()
    }

    /// Address of the peer; `None` when the connection is gone.
    #[must_use]
    pub fn peer_address(&self, conn: ConnectionId) -> Option<SocketAddr> {
        self.driver.connections().get(conn).map(|seat| seat.conn.peer())
    }

    /// The listener that a peer came to, which may be closed by now, or one of another reactor of the group; `None` when the
    /// connection is gone or was opened by this side.
    #[must_use]
    pub fn listener(&self, conn: ConnectionId) -> Option<ListenerId> {
        self.driver.connections().get(conn)?.conn.listener()
    }

    /// What the peer said while connecting; empty when it said nothing or the connection is gone.
    #[must_use]
    pub fn private_data(&self, conn: ConnectionId) -> &[u8] {
        self.driver.announced(conn).map_or(&[], |conn| conn.private_data())
    }

    /// Who the peer of a secured connection is, as its handshake has proven; `None` without [`crate::Security`], before
    /// [`crate::Handler::on_identity`], and when the connection is gone.
    #[must_use]
    pub fn identity(&self, conn: ConnectionId) -> Option<&PeerIdentity> {
        self.driver.identity(conn)
    }

    /// Postpones the answer of [`crate::Handler::on_identity`], in which it is called: the `Ok` that it returns means nothing, and
    /// [`Context::judge`] answers. Until then the connection does not come up; after `Timeouts::handshake`, or `Timeouts::connect` on
    /// the side that connects, it ends.
    ///
    /// Example: [`Context::judge`].
    pub fn postpone_judgement(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.postpone_judgement());
    }

    /// Gives the answer that [`Context::postpone_judgement`] has postponed, as [`crate::Handler::on_identity`] does. Returns `false`
    /// if the connection does not wait for one, because it is gone, ends, or had its answer.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Handler, PeerIdentity};
    ///
    /// /// Another thread looks peers up, and sends the answers.
    /// struct Server(std::sync::mpsc::Sender<(ConnectionId, PeerIdentity)>);
    ///
    /// impl Handler<(ConnectionId, Result<(), String>)> for Server {
    ///     fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, peer: &PeerIdentity) -> Result<(), String> {
    ///         cx.postpone_judgement(conn);
    ///         self.0.send((conn, peer.clone())).map_err(|_| "nobody can be looked up now".into())
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

    /// Attaches a number to a connection; ignored when the connection is gone.
    ///
    /// Example: [`Context::connect_with`].
    pub fn set_user(&mut self, conn: ConnectionId, value: u64) {
        self.driver.input(conn, |conn, _| conn.set_user(value));
    }

    /// The number attached to a connection, 0 at first; `None` when the connection is gone.
    #[must_use]
    pub fn user(&self, conn: ConnectionId) -> Option<u64> {
        self.driver.connections().get(conn).map(|seat| seat.conn.user())
    }

    /// What the device of a connection can do; `None` when the connection is gone or not on a device yet.
    #[must_use]
    pub fn capabilities(&self, conn: ConnectionId) -> Option<Capabilities> {
        self.driver.capabilities(conn)
    }

    /// Name of the device that a connection is on, such as `mlx5_0`; `None` when the connection is gone or not on a device yet.
    #[must_use]
    pub fn device(&self, conn: ConnectionId) -> Option<&str> {
        self.driver.device_name(conn)
    }

    /// Name of what carries a connection: `verbs`, `iwarp` or, in memory that both processes map, `shm`; `None` when the connection is gone
    /// or not on a device yet.
    #[must_use]
    pub fn provider(&mut self, conn: ConnectionId) -> Option<&'static str> {
        self.driver.carrier(conn)
    }

    // The reactor.

    /// The same context for a shorter while, to be passed on.
    pub fn reborrow(&mut self) -> Context<'_> {
        Context { driver: self.driver, endpoints: self.endpoints }
    }

    /// The time at which this turn began to call back, or a later one.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.driver.now()
    }

    /// Endpoints for datagrams, and what they do.
    #[cfg(feature = "datagram")]
    pub fn datagrams(&mut self) -> Datagrams<'_> {
        self.driver.ring();
        Datagrams { driver: self.driver, endpoints: self.endpoints }
    }

    /// Drains the reactor. From now on no connection is accepted. Those that are open go on, with messages and timers, until
    /// [`crate::Handler::on_drain`] or the program closes them; the default closes all of them at once.
    /// [`crate::Reactor::run`] returns when none is left. After `deadline`, counted in whole milliseconds from the start,
    /// what is left, endpoints too, is cut off with its usual last callback, and nothing new can be opened. Ignored while
    /// the reactor drains already.
    pub fn drain(&mut self, deadline: Duration) {
        self.driver.want_drain(deadline);
    }

    /// Makes [`crate::Reactor::run`] return after this turn.
    pub fn stop(&mut self) {
        self.driver.stop();
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.driver.stats()
    }
}
