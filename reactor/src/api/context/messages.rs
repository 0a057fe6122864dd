//! Operations that send messages, and flow control.

use std::ops::Range;

use super::Context;
use crate::api::message::{DetachedMessage, SendBuffer, SendError};
use crate::conn::Need;
use crate::error::{Blocked, SendErrorKind};
use crate::id::{ConnectionId, SendId};
use crate::memory::region::Region;

impl Context<'_> {
    /// Sends a copy of `payload`, which may be empty. The reactor posts the message at the end of
    /// the turn, and calls `on_send_complete` when the send has ended. A message that is longer
    /// than [`crate::ConnectionContext::buffer_size`] is sent in one of two ways:
    ///
    /// - In several buffers of the peer, if the message is not longer than
    ///   [`crate::LargeMessageSettings::eager_limit`], and if there are enough credits and send-queue slots for all
    ///   these buffers.
    /// - Otherwise the reactor copies the message to separate memory, and the peer fetches the message from there by
    ///   RDMA Read.
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
    ///         if cx.connection(conn).listener().is_none() {
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
    /// # let server = context.listeners().local_address(listener).expect("it listens");
    /// # context.connect(server)?;
    /// # reactor.run(&mut Sender { left: 1000, arrived: 0 })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`SendErrorKind`]. After `WouldBlock`, `on_writable` follows once.
    #[inline]
    pub fn send(&mut self, conn: ConnectionId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        self.driver.send(conn, payload)
    }

    /// Takes a registered buffer out of the pool. The program fills the buffer, and sends it with
    /// [`Context::send_buffer`] without a copy. Returns `None` if the connection is not open, if the pool has reached
    /// `Config::max_memory`, or if memory for more buffers cannot be allocated or registered.
    ///
    /// If the connection uses shared memory and is not secured, its peer can read the buffer while
    /// the program fills it, and also later, until the bytes are overwritten. So write no data into
    /// the buffer that the peer of `conn` must not see: for each message, take a buffer for the
    /// connection on which the message will be sent.
    pub fn buffer(&mut self, conn: ConnectionId) -> Option<SendBuffer> {
        let (capacity, buffer, slabs, channel) = self.driver.send_buffer_for(conn)?;
        Some(SendBuffer::new(capacity, buffer, slabs, channel))
    }

    /// Sends a buffer that [`Context::buffer`] has returned, without a copy. The reactor posts the message at the end
    /// of the turn, and calls `on_send_complete` when the send has ended.
    ///
    /// If the peer of another connection can read the buffer ([`Context::buffer`]), the reactor
    /// sends a copy, and overwrites the buffer with zeros.
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
    /// The errors of [`Context::send`]. `TooLong` if the message is longer than
    /// [`crate::ConnectionContext::buffer_size`] of this connection: a buffer is never sent in
    /// parts. `ForeignBuffer` if the buffer belongs to another reactor or device, or if the program
    /// took the buffer before the device failed or was removed. The error contains the buffer.
    // The error is large because it contains the buffer, which the program may need again.
    #[allow(clippy::result_large_err)]
    pub fn send_buffer(&mut self, conn: ConnectionId, mut buffer: SendBuffer) -> Result<SendId, SendError> {
        let len = buffer.len();
        let apart = match self.driver.check_buffer(conn, buffer.channel()) {
            Ok(apart) => apart,
            Err(kind) => return Err(SendError { kind, buffer }),
        };
        let sent = self.driver.input(conn, |conn, env| conn.send_filled(len, env, apart, buffer.buffer_mut()));
        sent.unwrap_or(Err(SendErrorKind::Closed)).map_err(|kind| SendError { kind, buffer })
    }

    /// Sends a part of a region without a copy. The device may read the memory until `on_send_complete`. The program
    /// cannot change the memory before `on_send_complete`.
    ///
    /// A message that is longer than [`crate::ConnectionContext::buffer_size`] may be fetched by
    /// the peer. The peer fetches it if it is longer than
    /// [`crate::LargeMessageSettings::eager_limit`], or if there are not enough credits or
    /// send-queue slots. So the region of such a message must be registered with
    /// [`crate::Access::REMOTE_READ`], for this peer or for any peer.
    ///
    /// On a secured connection, the reactor sends an encrypted copy instead. The region then needs no
    /// [`crate::Access::REMOTE_READ`].
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
    /// See [`SendErrorKind`]. After `WouldBlock`, `on_writable` follows once.
    pub fn send_region(
        &mut self,
        conn: ConnectionId,
        region: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.send_region(conn, region, range)
    }

    /// Appends bytes to the last accepted message if the reactor has not posted it yet, and otherwise to a new message.
    /// Use this for byte streams, in which message boundaries have no meaning. `fill` receives a slice of at least one
    /// byte in a registered buffer, writes into the slice, and returns the number of bytes written. `append` returns
    /// the same number. If this number is 0, nothing is sent. The reactor posts the buffer at the end of the turn.
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
    /// The errors of [`Context::send`]. After an error, `fill` was not called.
    pub fn append(
        &mut self,
        conn: ConnectionId,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, SendErrorKind> {
        self.driver.input(conn, |conn, env| conn.append(fill, env)).unwrap_or(Err(SendErrorKind::Closed))
    }

    /// Releases a message that [`crate::Message::detach`] has kept, and returns its buffer to the pool immediately. A
    /// drop of the message returns the buffer only in the next turn. If the message belongs to another reactor, or is
    /// longer than one buffer, this call is the same as a drop.
    #[inline]
    pub fn release(&mut self, mut message: DetachedMessage) {
        let driver = &mut *self.driver;
        if let Some((pool, buffer, conn)) = message.take_buffer(|channel| driver.owns_buffers_of(channel)) {
            driver.take_home(pool, buffer, Some(conn));
        }
    }

    /// Calls `begin`, and returns its result. Each message that `begin` sends on the connection
    /// causes `on_send_complete`, even with [`crate::Config::quiet_sends`]. Messages that are sent
    /// from regions, and one-sided operations, always cause `on_send_complete`, also without this
    /// method.
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
        let before = self.driver.input(conn, |conn, _| conn.sends.tell_of_next(true));
        let result = begin(self);
        // Calls of `reporting` may be nested, for example around `Broadcast::publish`.
        self.driver.input(conn, |conn, _| conn.sends.tell_of_next(before == Some(true)));
        result
    }

    /// Requests a call of `on_writable`, as if the connection had refused a send with `missing` as
    /// the reason. Use this in programs that call [`Context::writable`] or
    /// [`crate::ConnectionContext::free_slots`] before they send. With [`Blocked::Queue`], the
    /// reactor calls `on_writable` when the send queue has free slots. With every other reason, the
    /// reactor calls it when `send` would accept a message. Returns `true` if the request was
    /// accepted, and `false` if the connection is not open.
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
        let need = if missing == Blocked::Queue { Need::Slot } else { Need::Message };
        self.driver.input(conn, |conn, env| conn.await_room(need, env)).unwrap_or(false)
    }

    /// Returns the number of messages of at most [`crate::ConnectionContext::buffer_size`] bytes
    /// that `send` would accept now.
    #[must_use]
    pub fn writable(&self, conn: ConnectionId) -> usize {
        self.driver.table.get(conn).map_or(0, |slot| slot.conn.writable())
    }

    /// Marks the next message that fits into one buffer, or the next write with immediate data, whichever the program
    /// sends first, as a solicited event. A solicited event wakes a peer with plain verbs that has armed its completion
    /// queue for solicited completions only. A peer that uses this library does not need this, because its reactor arms
    /// the queues for all completions.
    pub fn solicit(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.sends.solicit_next());
    }

    /// Holds back the sends of a connection until [`Context::flush`], even if several turns end before that. `flush`
    /// posts the held sends in one chain, which needs fewer doorbells than one chain for each turn. Use this if more
    /// sends will follow soon. The reactor posts the held sends before `flush` in these cases:
    ///
    /// - The held sends fill half of the send queue.
    /// - A send was refused.
    /// - The reactor has to send a control message: credits, a keepalive, or a part of a large message's protocol.
    /// - A large message or a transfer is in progress.
    /// - The connection is closed.
    ///
    /// After such a post, the connection still holds back its next sends. This call is ignored if the connection does
    /// not exist any more.
    pub fn cork(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.corked = true);
    }

    /// Posts the accepted sends of a connection immediately, and not only at the end of the turn. Also ends
    /// [`Context::cork`]. This call costs one doorbell. Use this for sends that cannot wait until a long callback
    /// returns. Ignored before `on_connect`, and if the connection does not exist any more.
    pub fn flush(&mut self, conn: ConnectionId) {
        self.driver.post_sends_of(conn);
    }
}
