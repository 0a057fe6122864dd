//! Sending messages, and flow control.

use std::ops::Range;
use std::time::Duration;

use super::Context;
use crate::api::message::{DetachedMessage, SendBuffer, SendError};
use crate::conn::Need;
use crate::error::{Blocked, SendErrorKind};
use crate::id::{ConnectionId, SendId};
use crate::memory::region::Region;

impl Context<'_> {
    /// Sends a copy of `payload`, which may be empty. The message is posted at the end of the turn. `on_send_complete`
    /// follows. A message that is longer than [`Context::buffer_size`] is sent in several buffers if it is not longer
    /// than [`crate::LargeMessageSettings::eager_limit`] and if there are credits and send-queue slots for all of them.
    /// Any other one is copied to separate memory, from which the peer fetches it.
    ///
    /// ```
    /// use rdma_reactor::{Blocked, Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor, SendErrorKind};
    ///
    /// /// Sends 1,000 messages, as many at a time as are accepted.
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

    /// Returns a registered buffer of the pool, to fill and send without a copy. `None` if the connection is not open,
    /// or the pool has reached `Config::max_memory`.
    pub fn buffer(&mut self, conn: ConnectionId) -> Option<SendBuffer> {
        let (capacity, buffer, slabs, channel) = self.driver.send_buffer_for(conn)?;
        Some(SendBuffer::new(capacity, buffer, slabs, channel))
    }

    /// Sends a buffer of [`Context::buffer`]. The message is posted at the end of the turn. `on_send_complete` follows.
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
    ///         // `refused.buffer` is the buffer, unchanged.
    ///         println!("{}", refused.kind);
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::send`]; the error has the buffer. `ForeignBuffer` for a buffer of another reactor or device, or of
    /// this device before it failed or was removed.
    // The error returns the buffer by value, on purpose.
    #[allow(clippy::result_large_err)]
    pub fn send_buffer(&mut self, conn: ConnectionId, mut buffer: SendBuffer) -> Result<SendId, SendError> {
        let len = buffer.len();
        if let Err(kind) = self.driver.check_buffer(conn, buffer.channel()) {
            return Err(SendError { kind, buffer });
        }
        let sent = self.driver.input(conn, |conn, env| conn.send_filled(len, env, || buffer.take()));
        sent.unwrap_or(Err(SendErrorKind::Closed)).map_err(|kind| SendError { kind, buffer })
    }

    /// Sends a part of a region without a copy. If the message is longer than [`Context::buffer_size`], the region must
    /// be registered with [`crate::Access::REMOTE_READ`] for this peer or for any, because the peer may fetch the
    /// message: it fetches messages that are longer than [`crate::LargeMessageSettings::eager_limit`], and those for
    /// which there are not enough credits or send-queue slots. The memory is lent to the device for reading until
    /// `on_send_complete`.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, SendErrorKind};
    ///
    /// /// Sends the beginning of a region, which cannot be changed until `on_send_complete`.
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

    /// Appends bytes to the last message that is not posted yet, or to a new one. It is for byte streams, in which
    /// message boundaries have no meaning. `fill` receives a slice of at least one byte in a registered buffer, and
    /// returns the number of bytes that it has written there. The buffer is posted at the end of the turn. Returns the
    /// number of bytes written. Nothing is sent if that is 0.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, SendErrorKind};
    ///
    /// /// Sends as much of a text as is accepted; returns the rest.
    /// fn write<'a>(cx: &mut Context<'_>, conn: ConnectionId, text: &'a [u8]) -> Result<&'a [u8], SendErrorKind> {
    ///     let sent = cx.append(conn, |room| {
    ///         let len = text.len().min(room.len());
    ///         room[..len].copy_from_slice(&text[..len]);
    ///         len
    ///     })?;
    ///     Ok(&text[sent..])
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::send`]; then `fill` is not called.
    pub fn append(
        &mut self,
        conn: ConnectionId,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, SendErrorKind> {
        self.driver.input(conn, |conn, env| conn.append(fill, env)).unwrap_or(Err(SendErrorKind::Closed))
    }

    /// Releases a message that [`crate::Message::detach`] kept. Unlike a drop, it returns the buffer immediately, not
    /// in the next turn. A message of another reactor is dropped.
    #[inline]
    pub fn release(&mut self, mut message: DetachedMessage) {
        let driver = &mut *self.driver;
        if let Some((pool, buffer, conn)) = message.take_buffer(|channel| driver.owns_buffers_of(channel)) {
            driver.take_home(pool, buffer, Some(conn));
        }
    }

    /// Calls `begin`. Each message that `begin` sends on the connection causes `on_send_complete`, also with
    /// [`crate::Config::quiet_sends`]. Sends that are not copied always do.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, SendErrorKind, SendId};
    ///
    /// /// Sends the last message of a batch. When it has ended, all messages before it, which are quiet, have ended as well.
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

    /// Requests `on_writable` for when `missing` is available again, as after a send that was refused for that reason.
    /// For [`Blocked::Queue`] that means free slots of the send queue; for every other reason it means that a message
    /// is accepted. It is for programs that call [`Context::writable`] or [`Context::free_slots`] before they send.
    /// Returns `false` if the connection is not open; then no call follows.
    ///
    /// ```
    /// use rdma_reactor::{Blocked, ConnectionId, Context};
    ///
    /// /// Sends both messages of a pair, or none now.
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

    /// Returns the number of free slots in a connection's send queue. A read needs one for each range that it fills.
    /// Most other operations, and messages in one buffer, need one. [`Context::writable`] also considers the peer's
    /// window.
    #[must_use]
    pub fn free_slots(&self, conn: ConnectionId) -> usize {
        self.driver.connections().get(conn).map_or(0, |slot| slot.conn.places())
    }

    /// Returns the number of messages of at most [`Context::buffer_size`] bytes that `send` accepts now.
    #[must_use]
    pub fn writable(&self, conn: ConnectionId) -> usize {
        self.driver.connections().get(conn).map_or(0, |slot| slot.conn.writable())
    }

    /// Returns `true` if `send` accepts a message of `len` bytes now.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context};
    ///
    /// /// Builds a message only if it can be sent.
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

    /// Returns the largest message that the peer accepts in one buffer, bytes; `None` before `on_connect` and after
    /// `on_disconnect`.
    #[must_use]
    pub fn buffer_size(&self, conn: ConnectionId) -> Option<usize> {
        self.driver.announced(conn).map(|conn| conn.terms().buffer_size)
    }

    /// Returns the largest message that the peer accepts, bytes; `None` before `on_connect` and after `on_disconnect`.
    #[must_use]
    pub fn max_message(&self, conn: ConnectionId) -> Option<u64> {
        let terms = self.driver.announced(conn)?.terms();
        Some(terms.max_message.max(terms.buffer_size as u64))
    }

    /// Sends the next message in one buffer, or the next write with immediate data, as a solicited event, which wakes a
    /// peer that armed its completion queue for solicited completions only. It is for peers that use plain verbs;
    /// reactors arm for all completions.
    pub fn solicit(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.sends_mut().solicit_next());
    }

    /// Gathers the sends of a connection over several turns, until [`Context::flush`]. A program that knows that more
    /// sends follow gets fewer and longer chains. The gathered sends are posted earlier, in one chain, if they fill
    /// half of the send queue, if a send was refused, if the reactor has to send a control message (credits, keepalive,
    /// a large message), or if the connection is closed. The connection stays corked after that. Ignored if the
    /// connection does not exist any more.
    pub fn cork(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.cork());
    }

    /// Posts the sends of a connection immediately, not at the end of the turn, and ends [`Context::cork`]. This costs
    /// one doorbell. It is for sends that cannot wait for the rest of a long callback. Ignored if the connection does
    /// not exist any more.
    pub fn flush(&mut self, conn: ConnectionId) {
        self.driver.post_sends_of(conn);
    }

    /// Returns the time during which sends of a connection were refused: the sum of all periods from a first refusal to
    /// the `on_writable` that followed. `None` if the connection does not exist any more.
    #[must_use]
    pub fn stall_time(&self, conn: ConnectionId) -> Option<Duration> {
        self.driver.connections().get(conn).map(|slot| slot.conn.stall_time(self.driver.now()))
    }
}
