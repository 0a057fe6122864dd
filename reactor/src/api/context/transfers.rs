//! Transfers. Each transfer reads or writes a list of pieces of memory, and ends with one callback.

use super::Context;
use crate::error::SendErrorKind;
use crate::id::{ConnectionId, TransferId};
use crate::memory::list::{Piece, Transfer, TransferOptions};

impl Context<'_> {
    /// Reads or writes a list of pieces. The reactor calls [`Handler::on_transfer`](crate::Handler::on_transfer) once,
    /// with the list and the state of its pieces. The call follows at the latest when the time of
    /// [`TransferOptions::within`] plus `Timeouts::flush` has passed. `on_send_complete` is not called for a transfer.
    ///
    /// The list waits outside of the send queue, and its posted pieces use at most two thirds of the queue. So the
    /// reactor never refuses a list because the send queue is full, and messages make progress during a transfer. The
    /// list keeps the memory of `pieces`: 40 bytes for each piece.
    ///
    /// The reactor posts the lists of one connection in the order in which the program has passed them to this method.
    /// Messages and other operations may overtake the pieces. Only the notification that `options` requests arrives
    /// after all pieces. The regions are lent until `on_transfer`. If the program closes the connection, the reactor
    /// finishes the list first, within `Timeouts::close`.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::{
    ///     Access, Config, ConnectionId, Context, DisconnectReason, Handler, Message, Piece, ProviderChoice, Reactor, Region,
    ///     RegionOptions, RemoteRegion, Transfer, TransferEnd, TransferId, TransferOptions,
    /// };
    ///
    /// const BLOCK: u64 = 4096;
    ///
    /// /// The server has memory for 1,000 blocks, and the client fills it from the end.
    /// #[derive(Default)]
    /// struct Program {
    ///     blocks: Option<Region>,
    /// }
    ///
    /// impl Handler for Program {
    ///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
    ///         if cx.listener(conn).is_some() {
    ///             let options = RegionOptions::new().allow(Access::REMOTE_WRITE);
    ///             let room = cx.register(conn, 1000 * BLOCK as usize, &options).expect("memory");
    ///             cx.send(conn, &room.remote().to_bytes()).expect("room");
    ///             self.blocks = Some(room);
    ///         }
    ///     }
    ///
    ///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
    ///         if cx.listener(conn).is_some() {
    ///             // All blocks are in place.
    ///             return assert_eq!(&message[..], b"filled");
    ///         }
    ///         let remote = RemoteRegion::from_bytes(&message).expect("the server's region");
    ///         let blocks = cx.register(conn, remote.len as usize, &RegionOptions::new()).expect("memory");
    ///         let piece = |nth: u64| {
    ///             let to = remote.part(remote.len - (nth + 1) * BLOCK, BLOCK).expect("inside");
    ///             Piece::new((nth * BLOCK) as usize, to)
    ///         };
    ///         let pieces = (0..1000).map(piece).collect();
    ///         let options = TransferOptions::within(Duration::from_secs(10)).message(b"filled");
    ///         cx.transfer(conn, Transfer::Write(&[&blocks]), pieces, &options).expect("an open connection");
    ///         self.blocks = Some(blocks);
    ///     }
    ///
    ///     fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: TransferId, end: TransferEnd) {
    ///         assert!(end.is_done(), "{:?}: {} pieces are there", end.outcome, end.there);
    ///         cx.close(conn);
    ///     }
    ///
    ///     fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
    ///         // The server sees the end after all messages.
    ///         if cx.listener(conn).is_some() {
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
    /// # reactor.run(&mut Program::default())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`SendErrorKind`], but never `WouldBlock`. This call checks all pieces. If one piece is wrong, the reactor
    /// posts none of them.
    pub fn transfer(
        &mut self,
        conn: ConnectionId,
        transfer: Transfer<'_>,
        pieces: Vec<Piece>,
        options: &TransferOptions,
    ) -> Result<TransferId, SendErrorKind> {
        self.driver.transfer(conn, transfer, pieces, options)
    }

    /// Cancels a transfer. The reactor posts no further piece of the transfer, and calls `on_transfer` when the posted
    /// pieces have completed. If all pieces and the notification were posted already, the outcome is
    /// [`Done`](crate::TransferOutcome::Done). Returns `true` if the transfer was in progress. Returns `false` if it
    /// has ended, or if the connection has no such transfer.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, TransferId};
    ///
    /// fn give_up(cx: &mut Context<'_>, conn: ConnectionId, transfer: TransferId) {
    ///     // on_transfer follows, unless it was called before.
    ///     cx.cancel_transfer(conn, transfer);
    /// }
    /// ```
    pub fn cancel_transfer(&mut self, conn: ConnectionId, transfer: TransferId) -> bool {
        self.driver.cancel_transfer(conn, transfer)
    }
}
