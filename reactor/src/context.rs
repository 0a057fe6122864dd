//! What a callback may do.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::buffer::SendBuffer;
use crate::config::{ConnectOptions, Framing};
use crate::core::{Core, TimerKind};
use crate::error::{Error, SendError, SendErrorKind};
use crate::id::{ConnectionId, ListenerId, SendId, TimerId};
use crate::io::{Interest, IoId};
use crate::stats::Stats;

/// The reactor, inside a callback or from [`crate::Reactor::context`]. Nothing here blocks, and nothing calls back:
/// what a call sets off is reported later, from the loop.
#[derive(Debug)]
pub struct Context<'a> {
    pub(crate) core: &'a mut Core,
}

impl Context<'_> {
    /// The time of this turn.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.core.now
    }

    /// Listens on an address; port 0 takes a free one, see [`Context::local_address`].
    ///
    /// # Errors
    /// The address is in use, or not one of this machine.
    pub fn listen(&mut self, address: SocketAddr) -> Result<ListenerId, Error> {
        self.core.listen(address, Framing::Credits)
    }

    /// As [`Context::listen`], with another framing.
    ///
    /// # Errors
    /// As [`Context::listen`].
    pub fn listen_with(&mut self, address: SocketAddr, framing: Framing) -> Result<ListenerId, Error> {
        self.core.listen(address, framing)
    }

    /// The address a listener is bound to; `None` when it is gone.
    #[must_use]
    pub fn local_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.core.local_address(listener)
    }

    /// Stops listening. Connections that came through the listener stay.
    pub fn close_listener(&mut self, listener: ListenerId) {
        self.core.close_listener(listener);
    }

    /// Opens a connection: `on_connect` or `on_connect_error` follows.
    ///
    /// # Errors
    /// A limit is reached, or the provider refused at once; no callback follows.
    pub fn connect(&mut self, peer: SocketAddr) -> Result<ConnectionId, Error> {
        self.core.connect(peer, ConnectOptions::default())
    }

    /// As [`Context::connect`], with private data or another framing.
    ///
    /// # Errors
    /// As [`Context::connect`], and when the private data is too long.
    pub fn connect_with(&mut self, peer: SocketAddr, options: ConnectOptions) -> Result<ConnectionId, Error> {
        self.core.connect(peer, options)
    }

    /// Sends a copy of `payload`. It goes out at the end of the turn; `on_send_complete` follows.
    ///
    /// # Errors
    /// See [`SendErrorKind`]; after `WouldBlock`, `on_writable` follows once.
    #[inline]
    pub fn send(&mut self, conn: ConnectionId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        self.core.send(conn, payload)
    }

    /// A pooled buffer to fill and send without a copy; `None` when the connection is not open, or the pool is at
    /// `Config::max_memory`.
    pub fn buffer(&mut self, conn: ConnectionId) -> Option<SendBuffer> {
        self.core.buffer(conn)
    }

    /// Sends a buffer of [`Context::buffer`]. It goes out at the end of the turn; `on_send_complete` follows.
    ///
    /// # Errors
    /// As [`Context::send`], with the buffer.
    // The buffer comes back by value: that is the point of the error.
    #[allow(clippy::result_large_err)]
    pub fn send_buffer(&mut self, conn: ConnectionId, buffer: SendBuffer) -> Result<SendId, SendError> {
        self.core.send_buffer(conn, buffer)
    }

    /// Messages that `send` takes right now.
    #[must_use]
    pub fn writable(&self, conn: ConnectionId) -> usize {
        self.core.writable(conn)
    }

    /// Largest message the peer takes, bytes; `None` before `on_connect` and after `on_disconnect`.
    #[must_use]
    pub fn max_message(&self, conn: ConnectionId) -> Option<usize> {
        self.core.announced(conn).map(|c| c.max_message)
    }

    /// Closes a connection, after what was accepted for sending has been sent. `on_disconnect` follows; no message
    /// is delivered any more. A stale id is ignored.
    pub fn close(&mut self, conn: ConnectionId) {
        self.core.close(conn);
    }

    /// Address of the peer; `None` when the connection is gone.
    #[must_use]
    pub fn peer_address(&self, conn: ConnectionId) -> Option<SocketAddr> {
        self.core.connections.get(conn.0).map(|c| c.peer)
    }

    /// What the peer said while connecting; empty when it said nothing or is gone.
    #[must_use]
    pub fn private_data(&self, conn: ConnectionId) -> &[u8] {
        self.core.announced(conn).map_or(&[], |c| &c.private_data)
    }

    /// Attaches a number to a connection; ignored when it is gone.
    pub fn set_user(&mut self, conn: ConnectionId, value: u64) {
        if let Some(c) = self.core.connections.get_mut(conn.0) {
            c.user = value;
        }
    }

    /// The number attached to a connection, 0 at first; `None` when it is gone.
    #[must_use]
    pub fn user(&self, conn: ConnectionId) -> Option<u64> {
        self.core.connections.get(conn.0).map(|c| c.user)
    }

    /// Calls `on_timer` with `token` once, after `delay`. Resolution is about a millisecond while asleep.
    pub fn set_timer(&mut self, delay: Duration, token: u64) -> TimerId {
        // A delay past what the clock can express never fires in anyone's life.
        let at = self.core.now.checked_add(delay).unwrap_or(self.core.now + Duration::from_secs(86_400 * 365 * 30));
        TimerId(self.core.timers.insert(at, TimerKind::User(token)))
    }

    /// Takes a timer back; `false` when it has fired or was cancelled.
    pub fn cancel_timer(&mut self, timer: TimerId) -> bool {
        self.core.timers.cancel(timer.0).is_some()
    }

    /// Watches a descriptor of the program's own, such as a socket of std or mio, a pipe or a timer: `on_io_ready`
    /// follows, edge-triggered. Make it non-blocking, and on each call read or write until `WouldBlock`: what is
    /// left is not reported again. An edge may come for nothing.
    ///
    /// The descriptor stays the program's: take it back with [`Context::deregister_io`] before closing it.
    ///
    /// # Errors
    /// What the system says: it is registered here already, or is a file, which is always ready. `InvalidInput` when
    /// `interest` is empty.
    pub fn register_io(&mut self, source: &impl AsFd, interest: Interest) -> io::Result<IoId> {
        self.core.io.add(&mut *self.core.poller, source.as_fd(), interest)
    }

    /// Stops watching; no `on_io_ready` follows. `false` when it was not watched any more.
    pub fn deregister_io(&mut self, io: IoId) -> bool {
        self.core.io.remove(&mut *self.core.poller, io)
    }

    /// Makes [`crate::Reactor::run`] return after this turn.
    pub fn stop(&mut self) {
        self.core.stop = true;
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core.stats
    }

    /// Connections in any phase.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.core.connections.len()
    }
}
