//! Messages: sending, and room for sends.

use std::ops::Range;
use std::time::Duration;

use super::Context;
use crate::api::message::{DetachedMessage, SendBuffer, SendError};
use crate::conn::Need;
use crate::error::{Blocked, SendErrorKind};
use crate::id::{ConnectionId, SendId};
use crate::memory::region::Region;

impl Context<'_> {
    /// Sends a copy of `payload`, which may be empty. It goes out at the end of the turn; `on_send_complete` follows. A message that
    /// is longer than [`Context::buffer_size`] goes in several buffers, up to [`crate::LargeMessageSettings::eager_limit`] and while there is room for
    /// all of it; another one is copied to memory of its own, from which the peer fetches it.
    ///
    /// ```
    /// use rdma_reactor::{Blocked, Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor, SendErrorKind};
    ///
    /// /// Sends 1,000 messages, as many at a time as there is room for.
    /// struct Sender {
    ///     left: u32,
    ///     arrived: u32,
    /// }
    ///
    /// impl Sender {
    ///     fn send(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
    ///         while self.left > 0 {
    ///             match cx.send(conn, b"some bytes") {
    ///                 Ok(_) => self.left -= 1,
    ///                 // `on_writable` follows.
    ///                 Err(SendErrorKind::WouldBlock(Blocked::Window | Blocked::Queue)) => return,
    ///                 Err(error) => panic!("{error}"),
    ///             }
    ///         }
    ///     }
    /// }
    ///
    /// impl Handler for Sender {
    ///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
    ///         if cx.listener(conn).is_none() {
    ///             self.send(cx, conn);
    ///         }
    ///     }
    ///
    ///     fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
    ///         self.send(cx, conn);
    ///     }
    ///
    ///     fn on_recv(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {
    ///         self.arrived += 1;
    ///         if self.arrived == 1000 {
    ///             cx.stop();
    ///         }
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    /// # let mut context = reactor.context();
    /// # let listener = context.listen("127.0.0.1:0".parse()?)?;
    /// # let server = context.local_address(listener).expect("it listens");
    /// # context.connect(server)?;
    /// # reactor.run(&mut Sender { left: 1000, arrived: 0 })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`SendErrorKind`]; after `WouldBlock`, `on_writable` follows once.
    #[inline]
    pub fn send(&mut self, conn: ConnectionId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        self.driver.send(conn, payload)
    }

    /// A pooled buffer to fill and send without a copy; `None` when the connection is not open, or the pool is at
    /// `Config::max_memory`.
    pub fn buffer(&mut self, conn: ConnectionId) -> Option<SendBuffer> {
        let (capacity, buffer, slabs, channel) = self.driver.send_buffer_for(conn)?;
        Some(SendBuffer::new(capacity, buffer, slabs, channel))
    }

    /// Sends a buffer of [`Context::buffer`]. It goes out at the end of the turn; `on_send_complete` follows.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context};
    ///
    /// /// Writes a number into a registered buffer, and sends that without a copy.
    /// fn send(cx: &mut Context<'_>, conn: ConnectionId, number: u64) {
    ///     let Some(mut buffer) = cx.buffer(conn) else { return };
    ///     buffer.set_len(8);
    ///     buffer.copy_from_slice(&number.to_le_bytes());
    ///     if let Err(refused) = cx.send_buffer(conn, buffer) {
    ///         // The buffer comes back, as it is.
    ///         println!("{}", refused.kind);
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::send`], with the buffer. `ForeignBuffer` for a buffer of another reactor or device, or of this device before
    /// it failed or was removed.
    // The buffer comes back by value: that is the point of the error.
    #[allow(clippy::result_large_err)]
    pub fn send_buffer(&mut self, conn: ConnectionId, mut buffer: SendBuffer) -> Result<SendId, SendError> {
        let len = buffer.len();
        if let Err(kind) = self.driver.check_buffer(conn, buffer.channel()) {
            return Err(SendError { kind, buffer });
        }
        let sent = self.driver.input(conn, |conn, env| conn.send_filled(len, env, || buffer.take()));
        sent.unwrap_or(Err(SendErrorKind::Closed)).map_err(|kind| SendError { kind, buffer })
    }

    /// Sends a part of a region without a copy. Past [`Context::buffer_size`] the region must be registered with
    /// [`crate::Access::REMOTE_READ`] for this peer or any, because the peer fetches what is past [`crate::LargeMessageSettings::eager_limit`] or has no
    /// room in buffers. The memory is lent to be read until `on_send_complete`.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, SendErrorKind};
    ///
    /// /// Sends the beginning of a region, which is not to be changed until `on_send_complete`.
    /// fn send_head(cx: &mut Context<'_>, conn: ConnectionId, region: &Region) -> Result<(), SendErrorKind> {
    ///     cx.send_region(conn, region, 0..region.len().min(4096)).map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// See [`SendErrorKind`]; after `WouldBlock`, `on_writable` follows once.
    pub fn send_region(
        &mut self,
        conn: ConnectionId,
        region: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.send_region(conn, region, range)
    }

    /// Adds bytes to the last message that has not gone out yet, or to a new one: for byte streams, to which the borders of
    /// messages mean nothing. `fill` gets room for at least one byte, in the registered buffer that goes out at the end of
    /// the turn, and says how many bytes it has put there; returns that. Nothing is sent if it has put none.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, SendErrorKind};
    ///
    /// /// Sends as much of a text as there is room for; returns the rest.
    /// fn write<'a>(cx: &mut Context<'_>, conn: ConnectionId, text: &'a [u8]) -> Result<&'a [u8], SendErrorKind> {
    ///     let taken = cx.append(conn, |room| {
    ///         let len = text.len().min(room.len());
    ///         room[..len].copy_from_slice(&text[..len]);
    ///         len
    ///     })?;
    ///     Ok(&text[taken..])
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::send`]; `fill` is not called then.
    pub fn append(
        &mut self,
        conn: ConnectionId,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, SendErrorKind> {
        self.driver.input(conn, |conn, env| conn.append(fill, env)).unwrap_or(Err(SendErrorKind::Closed))
    }

    /// Gives a message back that [`crate::Message::detach`] kept, as dropping it does, but at once: without waiting for a turn.
    /// Messages of other reactors are dropped.
    #[inline]
    pub fn release(&mut self, mut message: DetachedMessage) {
        let driver = &mut *self.driver;
        if let Some((pool, buffer, conn)) = message.take_buffer(|channel| driver.owns_buffers_of(channel)) {
            driver.take_home(pool, buffer, Some(conn));
        }
    }

    /// Calls `begin`, and has `on_send_complete` called for each message that it sends on a connection, also with
    /// [`crate::Config::quiet_sends`]. Sends that are not copied are reported in any case.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, SendErrorKind, SendId};
    ///
    /// /// Sends the last message of a batch: when it has ended, so have all before it, which are quiet.
    /// fn send_last(cx: &mut Context<'_>, conn: ConnectionId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
    ///     cx.reporting(conn, |cx| cx.send(conn, payload))
    /// }
    /// ```
    pub fn reporting<R>(&mut self, conn: ConnectionId, begin: impl FnOnce(&mut Self) -> R) -> R {
        self.driver.input(conn, |conn, _| conn.sends_mut().tell_of_next(true));
        let result = begin(self);
        self.driver.input(conn, |conn, _| conn.sends_mut().tell_of_next(false));
        result
    }

    /// Has `on_writable` called when there is more of what is `missing`, as after a send that was refused for that reason: free
    /// slots of the send queue for [`Blocked::Queue`], and room for a message for every other reason. It is for programs that ask
    /// [`Context::writable`] or [`Context::free_slots`] before they send. Returns `false` if the connection is not open: then no
    /// call follows.
    ///
    /// ```
    /// use rdma_reactor::{Blocked, ConnectionId, Context};
    ///
    /// /// Sends a pair of messages, or none of them now.
    /// fn send_both(cx: &mut Context<'_>, conn: ConnectionId, pair: [&[u8]; 2]) -> bool {
    ///     if cx.writable(conn) < pair.len() {
    ///         cx.await_room(conn, Blocked::Window);
    ///         return false;
    ///     }
    ///     pair.into_iter().all(|message| cx.send(conn, message).is_ok())
    /// }
    /// ```
    pub fn await_room(&mut self, conn: ConnectionId, missing: Blocked) -> bool {
        let need = if missing == Blocked::Queue { Need::Place } else { Need::Message };
        self.driver.input(conn, |conn, env| conn.await_room(need, env)).unwrap_or(false)
    }

    /// Work requests that the send queue of a connection accepts right now. A read needs one for each range that it fills; most other
    /// operations, and messages in one buffer, need one. [`Context::writable`] respects the peer's window, too.
    #[must_use]
    pub fn free_slots(&self, conn: ConnectionId) -> usize {
        self.driver.connections().get(conn).map_or(0, |seat| seat.conn.places())
    }

    /// Messages of at most [`Context::buffer_size`] bytes that `send` takes right now.
    #[must_use]
    pub fn writable(&self, conn: ConnectionId) -> usize {
        self.driver.connections().get(conn).map_or(0, |seat| seat.conn.writable())
    }

    /// Whether `send` takes a message of `len` bytes right now.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context};
    ///
    /// /// Makes a message only if it can be sent.
    /// fn report(cx: &mut Context<'_>, conn: ConnectionId, make: impl FnOnce() -> Vec<u8>) {
    ///     if cx.writable_for(conn, 64 << 10) {
    ///         cx.send(conn, &make()).expect("there is room");
    ///     }
    /// }
    /// ```
    #[must_use]
    pub fn writable_for(&self, conn: ConnectionId, len: usize) -> bool {
        self.driver.is_writable_for(conn, len)
    }

    /// Largest message that the peer takes in one buffer, bytes; `None` before `on_connect` and after `on_disconnect`.
    #[must_use]
    pub fn buffer_size(&self, conn: ConnectionId) -> Option<usize> {
        self.driver.announced(conn).map(|conn| conn.terms().buffer_size)
    }

    /// Largest message that the peer takes at all, bytes; `None` before `on_connect` and after `on_disconnect`.
    #[must_use]
    pub fn max_message(&self, conn: ConnectionId) -> Option<u64> {
        let terms = self.driver.announced(conn)?.terms();
        Some(terms.max_message.max(terms.buffer_size as u64))
    }

    /// Lets the next message that fits one buffer, or write with immediate data, wake a peer that has asked for such
    /// completions only (a solicited event): a program on plain verbs. Reactors ask for all.
    pub fn solicit(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.sends_mut().solicit_next());
    }

    /// Gathers what is sent on a connection, over turns, until [`Context::flush`]: fewer and longer chains for a program that
    /// knows that more is to come. It all goes out nevertheless, in one chain, when it fills half of the send queue, when a
    /// send was refused, when the reactor itself has something to say (credit, keepalive, a large message), and when the
    /// connection is closed; the cork stays in. Ignored when the connection is gone.
    pub fn cork(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.cork());
    }

    /// Posts what is sent on a connection now, not at the end of the turn, and ends [`Context::cork`]: a doorbell of its
    /// own, for what is not to wait for the rest of a long callback. Ignored when the connection is gone.
    pub fn flush(&mut self, conn: ConnectionId) {
        self.driver.post_sends_of(conn);
    }

    /// How long sends of a connection were refused for want of room, from the first refusal to the `on_writable` it led
    /// to, all times together; `None` when the connection is gone.
    #[must_use]
    pub fn stall_time(&self, conn: ConnectionId) -> Option<Duration> {
        self.driver.connections().get(conn).map(|seat| seat.conn.stall_time(self.driver.now()))
    }
}
