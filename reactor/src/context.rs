//! What a callback may do.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rdma_transport::caps::Capabilities;
use rdma_transport::mem::Memory;
use rdma_transport::wr::SendOp;

use crate::buffer::SendBuffer;
use crate::config::{ConnectOptions, Framing};
use crate::core::{Core, TimerKind};
use crate::error::{Error, SendError, SendErrorKind};
use crate::id::{ConnectionId, ListenerId, SendId, SendKind, TimerId};
use crate::io::{Interest, IoId};
use crate::region::{Region, RegionOptions, RemoteRegion};
use crate::stats::Stats;
use crate::timer::FOREVER;

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

    /// Largest message the peer takes at all, bytes; `None` before `on_connect` and after `on_disconnect`.
    #[must_use]
    pub fn largest_message(&self, conn: ConnectionId) -> Option<u64> {
        self.core.announced(conn).map(|c| c.largest_message.max(c.max_message as u64))
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

    /// Sends a copy of `payload`. It goes out at the end of the turn; `on_send_complete` follows. What is longer than
    /// [`Context::max_message`] is copied to memory of its own, which the peer fetches it from.
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

    /// Sends a part of a region without a copy. Past [`Context::max_message`] the peer fetches it, for which the region
    /// must be registered with [`crate::Access::REMOTE_READ`] for this peer or any. The memory is lent to be read until
    /// `on_send_complete`.
    ///
    /// # Errors
    /// See [`SendErrorKind`]; after `WouldBlock`, `on_writable` follows once.
    pub fn send_region(
        &mut self,
        conn: ConnectionId,
        region: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.core.send_region(conn, region, range)
    }

    /// Messages that `send` takes right now.
    #[must_use]
    pub fn writable(&self, conn: ConnectionId) -> usize {
        self.core.writable(conn)
    }

    /// Largest message the peer takes in one buffer, bytes; `None` before `on_connect` and after `on_disconnect`.
    #[must_use]
    pub fn max_message(&self, conn: ConnectionId) -> Option<usize> {
        self.core.announced(conn).map(|c| c.max_message)
    }

    /// Registers memory of `len` bytes, zeroed, with the device of a connection: 1 byte to what the device allows. A peer
    /// gets at it only as `options` say. May take a while: register once, use often.
    ///
    /// # Errors
    /// The connection is gone, the provider lacks what is asked for, or the system refuses (a limit on locked memory is
    /// named with its cure).
    pub fn register(&mut self, conn: ConnectionId, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = Memory::new(len).map_err(|source| rdma_transport::Error::Memory { bytes: len, source })?;
        self.core.register(conn, memory, len, options)
    }

    /// As [`Context::register`], for memory of the user's, which the region owns from now on.
    ///
    /// # Errors
    /// As [`Context::register`]; the memory is freed.
    pub fn register_vec(
        &mut self,
        conn: ConnectionId,
        bytes: Vec<u8>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        let len = bytes.len();
        let memory = Memory::from_vec(bytes).map_err(|source| rdma_transport::Error::Memory { bytes: len, source })?;
        self.core.register(conn, memory, len, options)
    }

    /// Takes the rights of all peers to a region back, at once: nothing of a peer's touches the memory when this returns.
    /// A peer that tries gets an error, and loses its connection. Harmless when repeated.
    pub fn revoke(&mut self, region: &Region) {
        if region.home.same_channel(&self.core.return_to) {
            self.core.revoke_region(region.key);
        }
    }

    /// Reads the beginning of `remote` into `range` of `local`. `on_send_complete` follows, in the order of sends; the
    /// bytes are there when it says [`crate::Outcome::Sent`]. Needs no credit.
    ///
    /// # Errors
    /// See [`SendErrorKind`]; after `WouldBlock`, `on_writable` follows once.
    pub fn read(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &mut Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.core.read(conn, remote, &mut [(local, range)])
    }

    /// As [`Context::read`], into several ranges, one after another: 1 to 4, and no more than
    /// `Config::send_depth`.
    ///
    /// # Errors
    /// As [`Context::read`].
    pub fn read_vectored(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        locals: &mut [(&mut Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.core.read(conn, remote, locals)
    }

    /// Writes `range` of `local` to the beginning of `remote`. `on_send_complete` follows, when the memory of `local` is
    /// free again. The peer is not told; a message sent afterwards arrives after the bytes are there. Needs no credit.
    ///
    /// # Errors
    /// As [`Context::read`].
    pub fn write(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.core.write(conn, remote, &[(local, range)], None)
    }

    /// As [`Context::write`], from several ranges, one after another: 1 to 4.
    ///
    /// # Errors
    /// As [`Context::read`].
    pub fn write_vectored(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        locals: &[(&Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.core.write(conn, remote, locals, None)
    }

    /// As [`Context::write`], and the peer's `on_immediate` is called with 32 bits when the bytes are there. Takes a
    /// credit like a message. Where the device has no such operation, a write and a small message do the same,
    /// which takes a `Config::send_depth` of 2.
    ///
    /// # Errors
    /// As [`Context::read`]; with [`Framing::Raw`], the device must have it.
    pub fn write_with_immediate(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &Region,
        range: Range<usize>,
        immediate: u32,
    ) -> Result<SendId, SendErrorKind> {
        self.core.write(conn, remote, &[(local, range)], Some(immediate))
    }

    /// Replaces the 8 bytes at the beginning of `remote` by `swap` if they equal `expected`, in one step. The old value
    /// lands at `offset` of `local`: [`Region::load`] it when `on_send_complete` has come.
    ///
    /// # Errors
    /// As [`Context::read`]; not every device has this.
    pub fn compare_swap(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &mut Region,
        offset: usize,
        expected: u64,
        swap: u64,
    ) -> Result<SendId, SendErrorKind> {
        let op = SendOp::CompareSwap { remote: remote.address(), expected, swap };
        self.core.atomic(conn, remote, (local, offset), op, SendKind::CompareSwap)
    }

    /// Adds to the 8 bytes at the beginning of `remote`, in one step. The old value lands as with
    /// [`Context::compare_swap`].
    ///
    /// # Errors
    /// As [`Context::compare_swap`].
    pub fn fetch_add(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &mut Region,
        offset: usize,
        add: u64,
    ) -> Result<SendId, SendErrorKind> {
        let op = SendOp::FetchAdd { remote: remote.address(), add };
        self.core.atomic(conn, remote, (local, offset), op, SendKind::FetchAdd)
    }

    /// Lets the next send of any kind wait until the reads and atomics before it are done. Without this a write may
    /// overtake the answer to a read (RFC 5040 section 5.5).
    pub fn fence(&mut self, conn: ConnectionId) {
        if let Some(c) = self.core.connections.get_mut(conn.0) {
            c.fence = true;
        }
    }

    /// Lets the next message that fits one buffer, or write with immediate data, wake a peer that has asked for such
    /// completions only (a solicited event): a program on plain verbs. Reactors ask for all.
    pub fn solicit(&mut self, conn: ConnectionId) {
        if let Some(c) = self.core.connections.get_mut(conn.0) {
            c.solicited = true;
        }
    }

    /// Gathers what is sent on a connection, over turns, until [`Context::flush`]: fewer and longer chains for who knows
    /// that more is to come. It all goes out nevertheless, in one chain, when it fills half of the send queue, when a
    /// send was refused, when the reactor itself has something to say (credit, keepalive, a large message), and when the
    /// connection is closed; the cork stays in. Ignored when the connection is gone.
    pub fn cork(&mut self, conn: ConnectionId) {
        if let Some(c) = self.core.connections.get_mut(conn.0) {
            c.corked = true;
        }
    }

    /// Posts what is sent on a connection now, not at the end of the turn, and ends [`Context::cork`]: a doorbell of its
    /// own, for what is not to wait for the rest of a long callback. Ignored when the connection is gone.
    pub fn flush(&mut self, conn: ConnectionId) {
        self.core.uncork(conn);
    }

    /// What the device of a connection can do; `None` when the connection is gone or not on a device yet.
    #[must_use]
    pub fn capabilities(&self, conn: ConnectionId) -> Option<Capabilities> {
        self.core.capabilities(conn)
    }

    /// How long sends of a connection were refused for want of room, from the first refusal to the `on_writable` it led
    /// to, all times together; `None` when the connection is gone.
    #[must_use]
    pub fn stall_time(&self, conn: ConnectionId) -> Option<Duration> {
        let c = self.core.connections.get(conn.0)?;
        let now = if c.blocked { self.core.now.saturating_duration_since(c.blocked_since) } else { Duration::ZERO };
        Some(c.stalled + now)
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
        let at = self.core.now.checked_add(delay).unwrap_or(self.core.now + FOREVER);
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

    /// Closes every connection as [`Context::close`] does, and every endpoint as [`Context::close_endpoint`] does.
    pub fn close_all(&mut self) {
        self.core.close_all();
    }

    /// Drains the reactor: nothing comes in any more, [`crate::Handler::on_drain`] sees to it that connections end, and
    /// [`crate::Reactor::run`] returns when none is left. After `deadline`, counted in whole milliseconds from the start,
    /// what is left, endpoints too, is cut off with its usual last callback, and nothing new can be opened. Ignored while
    /// it drains already.
    pub fn drain(&mut self, deadline: Duration) {
        self.core.want_drain(deadline);
    }

    /// Makes [`crate::Reactor::run`] return after this turn.
    pub fn stop(&mut self) {
        self.core.stop = true;
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core.snapshot()
    }

    /// Connections in any phase.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.core.connections.len()
    }
}
