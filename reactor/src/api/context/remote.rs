//! The one-sided operations on the memory of a peer: RDMA Read, RDMA Write, atomics, and transfers
//! of lists.

use std::ops::Range;

use rdma_transport::wr::SendOp;

use crate::driver::Driver;
use crate::error::SendErrorKind;
use crate::id::{ConnectionId, SendId, SendKind, TransferId};
use crate::memory::list::{Piece, Transfer, TransferOptions};
use crate::memory::region::{Region, RemoteRegion};

/// The one-sided operations of one connection, from [`Context::remote`](crate::Context::remote):
/// they read and write the memory of the peer, without the peer's program. The guide has [a
/// page](crate::guide::remote_memory) about them.
#[derive(Debug)]
pub struct RemoteContext<'a> {
    pub(super) driver: &'a mut Driver,
    pub(super) conn: ConnectionId,
}

impl RemoteContext<'_> {
    /// Reads `range.len()` bytes from the beginning of `remote`, and stores them in `range` of
    /// `local`. The reactor calls `on_send_complete` for the read, in the order that
    /// [`Handler::on_send_complete`](crate::Handler::on_send_complete) documents. If the outcome is
    /// [`crate::Outcome::Sent`], the bytes are in `local`. A read uses no credit.
    ///
    /// ```
    /// use rdma_reactor::{
    ///     Access, Config, ConnectionId, Context, Handler, Message, Outcome, ProviderChoice, Reactor, Region,
    ///     RegionOptions, RemoteRegion, SendId,
    /// };
    ///
    /// /// The server registers memory to read, and sends its address.
    /// #[derive(Default)]
    /// struct Program {
    ///     open: Option<Region>,
    ///     copy: Option<Region>,
    /// }
    ///
    /// impl Handler for Program {
    ///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
    ///         if cx.connection(conn).listener().is_some() {
    ///             let options = RegionOptions::new().allow(Access::REMOTE_READ);
    ///             let region = cx.regions().register_vec(conn, b"what there is".to_vec(), &options).expect("memory");
    ///             cx.send(conn, &region.remote().to_bytes()).expect("room");
    ///             self.open = Some(region);
    ///         }
    ///     }
    ///
    ///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
    ///         let remote = RemoteRegion::from_bytes(&message).expect("the server's region");
    ///         let mut copy = cx.regions().register(conn, remote.len as usize, &RegionOptions::new()).expect("memory");
    ///         let all = 0..copy.len();
    ///         cx.remote(conn).read(remote, &mut copy, all).expect("room");
    ///         self.copy = Some(copy);
    ///     }
    ///
    ///     fn on_send_complete(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: SendId, outcome: Outcome) {
    ///         assert!(outcome.is_sent());
    ///         // The server's message completes as well; the server has no copy.
    ///         if self.copy.as_ref().is_some_and(|copy| copy.bytes() == Some(b"what there is")) {
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
    /// # reactor.run(&mut Program::default())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`SendErrorKind`]. After `WouldBlock`, `on_writable` follows once.
    #[inline]
    pub fn read(
        &mut self,
        remote: RemoteRegion,
        local: &mut Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.read(self.conn, remote, &mut [(local, range)])
    }

    /// Reads bytes from the beginning of `remote`, and stores them in 1 to 4 ranges: the first
    /// bytes in the first range, the next ones in the second range, and so on. The number of ranges
    /// must not exceed `Config::send_depth`. In all other respects, this method is like
    /// [`RemoteContext::read`].
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Reads a header of 64 bytes and the body behind it into two regions.
    /// fn fetch(
    ///     cx: &mut Context<'_>,
    ///     conn: ConnectionId,
    ///     from: RemoteRegion,
    ///     (head, body): (&mut Region, &mut Region),
    /// ) -> Result<(), SendErrorKind> {
    ///     let rest = body.len();
    ///     cx.remote(conn).read_vectored(from, &mut [(head, 0..64), (body, 0..rest)]).map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`RemoteContext::read`].
    #[inline]
    pub fn read_vectored(
        &mut self,
        remote: RemoteRegion,
        locals: &mut [(&mut Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.driver.read(self.conn, remote, locals)
    }

    /// Writes `range` of `local` to the beginning of `remote`. The reactor calls `on_send_complete`
    /// when the program may change `local` again. The peer is not notified of the write. If the
    /// program sends a message after the write, the peer receives that message only after the
    /// written bytes are in place. A write uses no credit.
    ///
    /// If the connection ends before the write has ended, for example because this process is
    /// killed, the peer's memory may have a part of the bytes, usually the first ones. The peer is
    /// only notified of the end of the connection.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Writes a whole region, and then notifies the peer with a message.
    /// fn publish(cx: &mut Context<'_>, conn: ConnectionId, to: RemoteRegion, region: &Region) -> Result<(), SendErrorKind> {
    ///     cx.remote(conn).write(to, region, 0..region.len())?;
    ///     cx.send(conn, b"written").map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`RemoteContext::read`].
    #[inline]
    pub fn write(
        &mut self,
        remote: RemoteRegion,
        local: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.write(self.conn, remote, &[(local, range)], None)
    }

    /// Writes the bytes of 1 to 4 local ranges to `remote`: the first range to the beginning of
    /// `remote`, and each further range directly behind the previous one. In all other respects,
    /// this method is like [`RemoteContext::write`].
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Writes a header and a body, which are in two regions, one behind the other.
    /// fn publish(
    ///     cx: &mut Context<'_>,
    ///     conn: ConnectionId,
    ///     to: RemoteRegion,
    ///     (head, body): (&Region, &Region),
    /// ) -> Result<(), SendErrorKind> {
    ///     cx.remote(conn).write_vectored(to, &[(head, 0..head.len()), (body, 0..body.len())]).map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`RemoteContext::read`].
    #[inline]
    pub fn write_vectored(
        &mut self,
        remote: RemoteRegion,
        locals: &[(&Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.driver.write(self.conn, remote, locals, None)
    }

    /// Writes like [`RemoteContext::write`], and notifies the peer: its `on_immediate` receives the
    /// 32 bits of `immediate` when the bytes are in place. The operation uses a credit, as a
    /// message does. On a device without Write with Immediate, the reactor sends a write and a
    /// small message instead. That needs a `Config::send_depth` of at least 2.
    ///
    /// Example: [`crate::RegionContext::register`].
    ///
    /// # Errors
    /// The errors of [`RemoteContext::read`]. With [`crate::Framing::Raw`] also `Unsupported`, if
    /// the device has no Write with Immediate.
    #[inline]
    pub fn write_with_immediate(
        &mut self,
        remote: RemoteRegion,
        local: &Region,
        range: Range<usize>,
        immediate: u32,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.write(self.conn, remote, &[(local, range)], Some(immediate))
    }

    /// Atomically compares the 8 bytes at the beginning of `remote` with `expected`, and replaces
    /// the 8 bytes with `swap` if they equal `expected`. In both cases, the local device stores the
    /// previous value of the 8 bytes at `offset` of `local`. Read the previous value with
    /// [`Region::load`] after `on_send_complete`.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Takes a lock in the peer's memory, which is free while it is 0. The old value is stored in the first word of `old`.
    /// fn lock(
    ///     cx: &mut Context<'_>,
    ///     conn: ConnectionId,
    ///     lock: RemoteRegion,
    ///     old: &mut Region,
    ///     owner: u64,
    /// ) -> Result<(), SendErrorKind> {
    ///     cx.remote(conn).compare_swap(lock, old, 0, 0, owner).map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`RemoteContext::read`]. Also `Unsupported` if the device has no atomics, and
    /// `Misaligned` if the remote address or the local address of the 8 bytes is not a multiple of
    /// 8.
    #[inline]
    pub fn compare_swap(
        &mut self,
        remote: RemoteRegion,
        local: &mut Region,
        offset: usize,
        expected: u64,
        swap: u64,
    ) -> Result<SendId, SendErrorKind> {
        let op = SendOp::CompareSwap { remote: remote.address(), expected, swap };
        self.driver.atomic(self.conn, remote, (local, offset), op, SendKind::CompareSwap)
    }

    /// Atomically adds `add` to the 8 bytes at the beginning of `remote`. The local device stores
    /// the previous value of the 8 bytes at `offset` of `local`. Read the previous value with
    /// [`Region::load`] after `on_send_complete`.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Draws a ticket from a counter in the peer's memory. The ticket is stored in the first word of `ticket`.
    /// fn draw(
    ///     cx: &mut Context<'_>,
    ///     conn: ConnectionId,
    ///     counter: RemoteRegion,
    ///     ticket: &mut Region,
    /// ) -> Result<(), SendErrorKind> {
    ///     cx.remote(conn).fetch_add(counter, ticket, 0, 1).map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`RemoteContext::compare_swap`].
    #[inline]
    pub fn fetch_add(
        &mut self,
        remote: RemoteRegion,
        local: &mut Region,
        offset: usize,
        add: u64,
    ) -> Result<SendId, SendErrorKind> {
        let op = SendOp::FetchAdd { remote: remote.address(), add };
        self.driver.atomic(self.conn, remote, (local, offset), op, SendKind::FetchAdd)
    }

    /// Fences the next send of any kind on a connection: the device begins this send only when all
    /// earlier reads and atomics of the connection have completed. Without a fence, the device may
    /// execute a write before the response to an earlier read has arrived (RFC 5040, section 5.5).
    #[inline]
    pub fn fence(&mut self) {
        self.driver.input(self.conn, |conn, _| conn.sends.fence_next());
    }

    /// Reads or writes a list of pieces. The reactor calls
    /// [`Handler::on_transfer`](crate::Handler::on_transfer) once, with the list and the state of
    /// its pieces. The call follows at the latest when the time of [`TransferOptions::within`] plus
    /// `Timeouts::flush` has passed. `on_send_complete` is not called for a transfer.
    ///
    /// The list waits outside of the send queue, and its posted pieces use at most two thirds of
    /// the queue. So the reactor never refuses a list because the send queue is full, and messages
    /// make progress during a transfer. The list keeps the memory of `pieces`: 40 bytes for each
    /// piece.
    ///
    /// The reactor posts the lists of one connection in the order in which the program has passed
    /// them to this method. Messages and other operations may overtake the pieces. Only the
    /// notification that `options` requests arrives after all pieces. Until `on_transfer`, the
    /// regions are lent: the program cannot change the bytes of the pieces. If the program closes
    /// the connection, the reactor finishes the list first, within `Timeouts::close`.
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
    ///         if cx.connection(conn).listener().is_some() {
    ///             let options = RegionOptions::new().allow(Access::REMOTE_WRITE);
    ///             let room = cx.regions().register(conn, 1000 * BLOCK as usize, &options).expect("memory");
    ///             cx.send(conn, &room.remote().to_bytes()).expect("room");
    ///             self.blocks = Some(room);
    ///         }
    ///     }
    ///
    ///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
    ///         if cx.connection(conn).listener().is_some() {
    ///             // All blocks are in place.
    ///             return assert_eq!(&message[..], b"filled");
    ///         }
    ///         let remote = RemoteRegion::from_bytes(&message).expect("the server's region");
    ///         let blocks = cx.regions().register(conn, remote.len as usize, &RegionOptions::new()).expect("memory");
    ///         let piece = |nth: u64| {
    ///             let to = remote.part(remote.len - (nth + 1) * BLOCK, BLOCK).expect("inside");
    ///             Piece::new((nth * BLOCK) as usize, to)
    ///         };
    ///         let pieces = (0..1000).map(piece).collect();
    ///         let options = TransferOptions::within(Duration::from_secs(10)).message(b"filled");
    ///         cx.remote(conn).transfer(Transfer::Write(&[&blocks]), pieces, &options).expect("an open connection");
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
    ///         if cx.connection(conn).listener().is_some() {
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
    /// # reactor.run(&mut Program::default())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`SendErrorKind`], but never `WouldBlock`. This call checks all pieces. If one piece is
    /// wrong, the reactor posts none of them.
    #[inline]
    pub fn transfer(
        &mut self,
        transfer: Transfer<'_>,
        pieces: Vec<Piece>,
        options: &TransferOptions,
    ) -> Result<TransferId, SendErrorKind> {
        self.driver.transfer(self.conn, transfer, pieces, options)
    }

    /// Cancels a transfer. The reactor posts no further piece of the transfer, and calls
    /// `on_transfer` when the posted pieces have completed. If all pieces and the notification were
    /// posted already, the outcome is [`Done`](crate::TransferOutcome::Done). Returns `true` if the
    /// transfer was in progress. Returns `false` if it has ended, or if the connection has no such
    /// transfer.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, TransferId};
    ///
    /// fn give_up(cx: &mut Context<'_>, conn: ConnectionId, transfer: TransferId) {
    ///     // on_transfer follows, unless it was called before.
    ///     cx.remote(conn).cancel_transfer(transfer);
    /// }
    /// ```
    #[inline]
    pub fn cancel_transfer(&mut self, transfer: TransferId) -> bool {
        self.driver.cancel_transfer(self.conn, transfer)
    }
}
