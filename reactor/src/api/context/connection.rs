//! The view of one connection: its peer, its device, its limits, and the number that the program
//! attaches to it.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_transport::caps::Capabilities;

use crate::driver::Driver;
use crate::id::{ConnectionId, ListenerId};
use crate::security::PeerIdentity;

/// The state of one connection, from [`Context::connection`](crate::Context::connection). After the
/// connection has ended, its id is stale: a query then returns `None`, 0, `false` or an empty
/// slice, and a change has no effect.
///
/// ```
/// use rdma_reactor::{ConnectionId, Context};
///
/// /// Describes a connection in one line of a log.
/// fn line(cx: &mut Context<'_>, conn: ConnectionId) -> Option<String> {
///     let mut connection = cx.connection(conn);
///     let (peer, provider) = (connection.peer_address()?, connection.provider().unwrap_or("none yet"));
///     Some(format!("{conn}: {peer} over {provider}, device {}", connection.device().unwrap_or("none yet")))
/// }
/// ```
#[derive(Debug)]
pub struct ConnectionContext<'a> {
    pub(super) driver: &'a mut Driver,
    pub(super) conn: ConnectionId,
}

impl<'a> ConnectionContext<'a> {
    /// Returns the address of a connection's peer; `None` if the connection does not exist any
    /// more.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.driver.table.get(self.conn).map(|slot| slot.conn.peer())
    }

    /// Returns the listener that accepted a connection. The listener may be closed by now, or
    /// belong to another reactor of the group. Returns `None` if the local side opened the
    /// connection, or if the connection does not exist any more.
    #[must_use]
    pub fn listener(&self) -> Option<ListenerId> {
        self.driver.table.get(self.conn)?.conn.listener()
    }

    /// Returns the private data that the peer sent with its connect request or its answer. Returns
    /// an empty slice before `on_connect`, if the peer sent none, or if the connection does not
    /// exist any more.
    #[must_use]
    pub fn private_data(self) -> &'a [u8] {
        self.driver.announced(self.conn).map_or(&[], |conn| conn.private_data())
    }

    /// Returns the identity that the peer of a secured connection has proven. Returns `None`
    /// without [`crate::Security`], before [`crate::Handler::on_identity`], and if the connection
    /// does not exist any more.
    #[must_use]
    pub fn identity(self) -> Option<&'a PeerIdentity> {
        self.driver.identity(self.conn)
    }

    /// Postpones the decision about the peer's identity. Call this within
    /// [`crate::Handler::on_identity`]; after that, the reactor ignores the `Ok` that this
    /// `on_identity` returns. The connection is established only after [`ConnectionContext::judge`]
    /// accepts the peer. If no decision is made in time, the connection ends: after
    /// `Timeouts::connect` on the side that connects, and after `Timeouts::handshake` on the side
    /// that accepts. The decision is about the peer at the current address. So if this connection
    /// is not established, the reactor tries no other address ([`crate::Context::connect_any`]).
    ///
    /// Example: [`ConnectionContext::judge`].
    pub fn postpone_judgement(&mut self) {
        self.driver.postpone_judgement(self.conn);
    }

    /// Makes the decision that [`ConnectionContext::postpone_judgement`] has postponed. `answer`
    /// has the meaning of the result of [`crate::Handler::on_identity`]. Returns `true` if the
    /// decision was pending. Returns `false` if the connection does not exist any more, is ending,
    /// or has had its decision already.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Handler, PeerIdentity};
    ///
    /// /// Has another thread decide about each peer.
    /// struct Server(std::sync::mpsc::Sender<(ConnectionId, PeerIdentity)>);
    ///
    /// impl Handler<(ConnectionId, Result<(), String>)> for Server {
    ///     fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, peer: &PeerIdentity) -> Result<(), String> {
    ///         cx.connection(conn).postpone_judgement();
    ///         self.0.send((conn, peer.clone())).map_err(|_| "no decision is possible now".into())
    ///     }
    ///
    ///     fn on_wake(&mut self, cx: &mut Context<'_>, (conn, answer): (ConnectionId, Result<(), String>)) {
    ///         cx.connection(conn).judge(answer);
    ///     }
    /// }
    /// ```
    pub fn judge(&mut self, answer: Result<(), String>) -> bool {
        self.driver.input(self.conn, |conn, env| conn.judged_late(answer.err(), env)).unwrap_or(false)
    }

    /// Attaches a number of the program's choice to a connection. Ignored if the connection does
    /// not exist any more.
    ///
    /// Example: [`crate::Context::connect_with`].
    pub fn set_user(&mut self, value: u64) {
        self.driver.input(self.conn, |conn, _| conn.user = value);
    }

    /// Returns the number that [`ConnectionContext::set_user`] has attached to a connection, or 0
    /// if none was attached. Returns `None` if the connection does not exist any more.
    #[inline]
    #[must_use]
    pub fn user(&self) -> Option<u64> {
        self.driver.table.get(self.conn).map(|slot| slot.conn.user)
    }

    /// Returns the capabilities of a connection's device; `None` if the connection does not exist
    /// any more or is not on a device yet.
    #[must_use]
    pub fn capabilities(&self) -> Option<Capabilities> {
        self.driver.capabilities(self.conn)
    }

    /// Returns the name of a connection's device, such as `mlx5_0`; `None` if the connection does
    /// not exist any more or is not on a device yet.
    #[must_use]
    pub fn device(self) -> Option<&'a str> {
        self.driver.device_name(self.conn)
    }

    /// Returns the name of the transport that carries a connection: `verbs`, `iwarp`, or `shm`
    /// (memory that both processes map). `None` if the connection does not exist any more or is not
    /// on a device yet.
    #[must_use]
    pub fn provider(&mut self) -> Option<&'static str> {
        self.driver.carrier(self.conn)
    }

    /// Returns the length of the largest message that the peer accepts in one buffer, in bytes.
    /// Returns `None` before `on_connect` and after `on_disconnect`.
    #[must_use]
    pub fn buffer_size(&self) -> Option<usize> {
        self.driver.announced(self.conn).map(|conn| conn.terms().buffer_size)
    }

    /// Returns the length of the largest message that the peer accepts, in bytes. Such a message
    /// may be longer than one buffer of the peer ([`ConnectionContext::buffer_size`]). Returns
    /// `None` before `on_connect` and after `on_disconnect`.
    #[must_use]
    pub fn max_message(&self) -> Option<u64> {
        let terms = self.driver.announced(self.conn)?.terms();
        Some(terms.max_message.max(terms.buffer_size as u64))
    }

    /// Returns the length of the longest message that [`crate::Context::send`] can send, in bytes.
    /// This is [`ConnectionContext::max_message`], but no more than the memory for copies
    /// ([`LargeMessageSettings::memory`](crate::LargeMessageSettings::memory)): the local side
    /// keeps a copy of a message that is longer than one buffer. Returns `None` before `on_connect`
    /// and after `on_disconnect`.
    #[must_use]
    pub fn max_copied(&self) -> Option<u64> {
        let one_buffer = self.buffer_size()? as u64;
        Some(self.max_message()?.min(one_buffer.max(self.driver.copied_limit())))
    }

    /// Returns `true` if `send` would accept a message of `len` bytes now.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context};
    ///
    /// /// Builds a message only if it can be sent.
    /// fn report(cx: &mut Context<'_>, conn: ConnectionId, make: impl FnOnce() -> Vec<u8>) {
    ///     if cx.connection(conn).writable_for(64 << 10) {
    ///         cx.send(conn, &make()).expect("there is room");
    ///     }
    /// }
    /// ```
    #[must_use]
    pub fn writable_for(&self, len: usize) -> bool {
        self.driver.is_writable_for(self.conn, len)
    }

    /// Returns the number of free slots in a connection's send queue; 0 if the connection is not
    /// open. A read needs one slot for each range that it fills. A message needs one slot for each
    /// buffer of the peer that it occupies. A write with immediate data needs two slots on secured
    /// connections, and if the device does not support Write with Immediate
    /// ([`ConnectionContext::capabilities`]). Every other operation needs one slot. A message also
    /// needs credits from the peer: [`crate::Context::writable`] considers both slots and credits.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        self.driver.table.get(self.conn).map_or(0, |slot| slot.conn.free_slots())
    }

    /// Returns the total time during which the connection refused sends: the sum of all periods
    /// from the first refusal of a send to the next `on_writable`. A period that has not ended yet
    /// is included up to now. Returns `None` if the connection does not exist any more.
    #[must_use]
    pub fn stall_time(&self) -> Option<Duration> {
        self.driver.table.get(self.conn).map(|slot| slot.conn.stall_time(self.driver.now))
    }
}
