//! A connection, with a future for each thing that takes time.

use std::error::Error;
use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::ops::{Deref, Range};
use std::rc::Rc;
use std::task::{Context as Task, Poll};

use super::arrivals::{Arrivals, Next};
use super::core::{Core, Farewell};
use super::desk::{Awaited, AwaitedEnd, End, Line};
use super::waiters::Place;
use super::writers::{Attempt, Need, Room, Ticket};
use crate::{
    Blocked, ConnectionId, Context, DetachedMessage, DisconnectReason, Outcome, Piece, Region, RegionOptions,
    RemoteRegion, SendErrorKind, SendId, Transfer, TransferEnd, TransferId, TransferOptions,
};

/// A connection. Clones are the same connection, so that one task can send while another receives. It is closed when the last one
/// is dropped, after what was accepted for sending has been sent: that takes turns, see [`super::AsyncReactor::shutdown`].
#[derive(Clone)]
pub struct Connection {
    shared: Rc<OneThreadOnly_UseSpawnLocal>,
}

/// The name is for the same reader as that of [`Core`].
#[allow(non_camel_case_types, reason = "the name is read in the compiler's message, where it is the cure")]
struct OneThreadOnly_UseSpawnLocal {
    core: Rc<Core>,
    line: Rc<Line>,
}

impl Drop for OneThreadOnly_UseSpawnLocal {
    fn drop(&mut self) {
        self.core.part(Farewell::Close(self.line.id));
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({})", self.id())
    }
}

/// The failure of a one-sided operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OperationError {
    /// The operation was not begun.
    Refused(SendErrorKind),
    /// The operation was begun, and its connection has ended: [`Outcome::Failed`].
    Failed(Outcome),
}

impl fmt::Display for OperationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(kind) => kind.fmt(f),
            Self::Failed(outcome) => write!(f, "the connection ended before the operation: {outcome:?}"),
        }
    }
}

impl Error for OperationError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Refused(kind) => kind.source(),
            Self::Failed(_) => None,
        }
    }
}

impl From<SendErrorKind> for OperationError {
    fn from(kind: SendErrorKind) -> Self {
        Self::Refused(kind)
    }
}

impl Connection {
    pub(super) fn new(core: Rc<Core>, line: Rc<Line>) -> Self {
        Self { shared: Rc::new(OneThreadOnly_UseSpawnLocal { core, line }) }
    }

    pub(super) fn core(&self) -> &Rc<Core> {
        &self.shared.core
    }

    pub(super) fn line(&self) -> &Line {
        &self.shared.line
    }

    /// The name of the connection, for [`super::AsyncReactor::with`].
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.line().id
    }

    /// Address of the peer; `None` when the connection is gone.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.core().with(|cx, _| cx.peer_address(self.id()))
    }

    // Messages.

    /// Sends a copy of `payload`; waits while there is no room, behind the tasks that wait already. The message goes out with the next
    /// turn. It is not sent if the future is dropped before.
    ///
    /// # Errors
    /// As [`Context::send`], without `WouldBlock`.
    pub async fn send(&self, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        let mut wait = Wait::new(self);
        poll_fn(|task| wait.attempt(task, Attempt::Message(payload.len()), |cx| cx.send(self.id(), payload))).await
    }

    /// Sends a copy of `payload` if there is room now, and does not wait. Room for tasks that wait is theirs: if there is no more than
    /// that, this is refused. The message goes out with the next turn.
    ///
    /// # Errors
    /// As [`Context::send`].
    pub fn try_send(&self, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        self.core().with(|cx, _| match self.refuses(cx, payload.len()) {
            None => cx.send(self.id(), payload),
            Some(why) => Err(SendErrorKind::WouldBlock(why)),
        })
    }

    /// Returns the reason why a message that does not wait is refused in favour of tasks that do.
    fn refuses(&self, cx: &Context<'_>, len: usize) -> Option<Blocked> {
        let account = self.line().account.borrow();
        if account.writers.is_empty() {
            return None;
        }
        let need = Need::of(Attempt::Message(len), cx, self.id());
        account.writers.refuses(need, Room::of(cx, self.id()))
    }

    /// Tries something that may have to wait for room. `ticket` is its place in the line, if it waits.
    pub(super) fn attempt<R>(
        &self,
        task: &Task<'_>,
        ticket: &mut Option<Ticket>,
        what: Attempt,
        act: impl FnOnce(&mut Context<'_>) -> Result<R, SendErrorKind>,
    ) -> Poll<Result<R, SendErrorKind>> {
        let alone = ticket.is_none() && self.line().account.borrow().writers.is_empty();
        if !alone && self.stands_in_line(task, ticket, what) {
            return Poll::Pending;
        }
        match self.core().with(|cx, _| act(cx)) {
            Err(SendErrorKind::WouldBlock(why)) => {
                self.wait_for_room(task, ticket, what, why);
                Poll::Pending
            }
            done => {
                self.give_up_sending(ticket);
                Poll::Ready(done)
            }
        }
    }

    /// Returns false if it is a task's turn. A newcomer joins the line, unless it takes nothing away from those who stand there.
    #[cold]
    fn stands_in_line(&self, task: &Task<'_>, ticket: &mut Option<Ticket>, what: Attempt) -> bool {
        if let Some(ticket) = ticket {
            let mut account = self.line().account.borrow_mut();
            let old = account.writers.renew(ticket, task.waker());
            let waits = !account.writers.has_turn(ticket);
            // The old waker may be the last owner of a task: it is dropped while nothing is borrowed.
            drop(account);
            drop(old);
            return waits;
        }
        self.core().with(|cx, desk| {
            let mut account = self.line().account.borrow_mut();
            let (need, room) = (Need::of(what, cx, self.id()), Room::of(cx, self.id()));
            let passes = account.writers.lets_pass(need, room) || cfg!(planted = "a-newcomer-overtakes");
            if passes || account.end.is_some() {
                return false;
            }
            *ticket = Some(account.writers.join(need, task.waker()));
            account.writers.await_room(cx, self.id(), &mut desk.ready);
            account.writers.call(cx, self.id(), &mut desk.ready);
            true
        })
    }

    /// Waits after a refusal. Those that need less than this task may go on.
    #[cold]
    fn wait_for_room(&self, task: &Task<'_>, ticket: &mut Option<Ticket>, what: Attempt, why: Blocked) {
        self.core().with(|cx, desk| {
            let writers = &mut self.line().account.borrow_mut().writers;
            let known = ticket.take().ok_or_else(|| Need::of(what, cx, self.id()));
            *ticket = Some(writers.refused(known, why, Room::of(cx, self.id()), task.waker()));
            writers.call(cx, self.id(), &mut desk.ready);
        });
    }

    /// Leaves the line of those that wait for room, with what was waited for or without it. The room that is left is for those behind.
    #[inline]
    pub(super) fn give_up_sending(&self, ticket: &mut Option<Ticket>) {
        if let Some(ticket) = ticket.take() {
            self.leave_line(ticket);
        }
    }

    #[cold]
    fn leave_line(&self, ticket: Ticket) {
        let waker = self.line().account.borrow_mut().writers.leave(ticket);
        if waker.is_none() {
            self.core().part(Farewell::PassOn(self.id()));
        }
        drop(waker);
    }

    /// The next message. Messages that came before the end are received before its reason. Tasks get messages in the order in which they
    /// have called this. A future that is dropped takes no message with it.
    ///
    /// # Errors
    /// The reason why the connection has ended.
    pub async fn recv(&self) -> Result<Received, DisconnectReason> {
        let message = Next::new(&self.line().inbox).await;
        self.received(message)
    }

    pub(super) fn poll_recv(
        &self,
        task: &Task<'_>,
        place: &mut Option<Place>,
    ) -> Poll<Result<Received, DisconnectReason>> {
        Arrivals::poll(&self.line().inbox, task, place).map(|message| self.received(message))
    }

    fn received(&self, message: Option<DetachedMessage>) -> Result<Received, DisconnectReason> {
        message.map(|message| Received::new(Rc::clone(self.core()), message)).ok_or_else(|| self.end())
    }

    /// The reason of the end, when nothing arrives any more.
    pub(super) fn end(&self) -> DisconnectReason {
        let account = self.line().account.borrow();
        account.end.as_ref().map_or(DisconnectReason::Local { complete: false }, reason)
    }

    // Remote memory.

    /// Registers memory, as [`Context::register`] does. On a device this may block.
    ///
    /// ```
    /// use rdma_reactor::aio::Connection;
    /// use rdma_reactor::{Access, Error, Region, RegionOptions};
    ///
    /// /// Memory that the peer may read.
    /// fn open(conn: &Connection) -> Result<Region, Error> {
    ///     conn.register(4096, &RegionOptions::new().allow(Access::REMOTE_READ))
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::register`].
    pub fn register(&self, len: usize, options: &RegionOptions) -> Result<Region, crate::Error> {
        self.core().with(|cx, _| cx.register(self.id(), len, options))
    }

    /// Reads the beginning of `remote` into `range` of `local`, and waits until the bytes are there. If the future is dropped, a read
    /// that has begun goes on, and `local` is lent until it has ended.
    ///
    /// ```
    /// use rdma_reactor::aio::{Connection, OperationError};
    /// use rdma_reactor::{Region, RemoteRegion};
    ///
    /// /// Reads 4 KiB of the peer's memory.
    /// async fn fetch(conn: &Connection, from: RemoteRegion, into: &mut Region) -> Result<(), OperationError> {
    ///     conn.read(from, into, 0..4096).await
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::read`], without `WouldBlock`; or the connection ended first.
    pub async fn read(
        &self,
        remote: RemoteRegion,
        local: &mut Region,
        range: Range<usize>,
    ) -> Result<(), OperationError> {
        self.perform(Attempt::Operation, |cx| cx.read(self.id(), remote, local, range.clone())).await
    }

    /// Writes `range` of `local` to the beginning of `remote`, and waits until the device is done with `local`. Cancellation is as
    /// with [`Connection::read`].
    ///
    /// ```
    /// use rdma_reactor::aio::{Connection, OperationError};
    /// use rdma_reactor::{Region, RemoteRegion};
    ///
    /// /// Writes all of a region to the peer's memory.
    /// async fn publish(conn: &Connection, to: RemoteRegion, region: &Region) -> Result<(), OperationError> {
    ///     conn.write(to, region, 0..region.len()).await
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Connection::read`].
    pub async fn write(&self, remote: RemoteRegion, local: &Region, range: Range<usize>) -> Result<(), OperationError> {
        self.perform(Attempt::Operation, |cx| cx.write(self.id(), remote, local, range.clone())).await
    }

    /// Does an operation of [`Context`] that has a completion, such as an atomic, and waits for it. `begin` is called again each time
    /// that there may be room. Cancellation is as with [`Connection::read`].
    ///
    /// ```
    /// use rdma_reactor::aio::{Connection, OperationError};
    /// use rdma_reactor::{Region, RemoteRegion};
    ///
    /// /// Adds to a counter in the peer's memory; the old value lands in the first word of `old`.
    /// async fn add(conn: &Connection, to: RemoteRegion, old: &mut Region, what: u64) -> Result<(), OperationError> {
    ///     conn.operate(|cx| cx.fetch_add(conn.id(), to, old, 0, what)).await
    /// }
    ///
    /// /// Sends a message, and waits until it is sent: [`Connection::send`] waits for room only.
    /// async fn send(conn: &Connection, bytes: &[u8]) -> Result<(), OperationError> {
    ///     conn.operate(|cx| cx.send(conn.id(), bytes)).await
    /// }
    /// ```
    ///
    /// # Errors
    /// What `begin` says, without `WouldBlock`; or the connection ended first.
    pub async fn operate(
        &self,
        begin: impl FnMut(&mut Context<'_>) -> Result<SendId, SendErrorKind>,
    ) -> Result<(), OperationError> {
        self.perform(Attempt::Any, begin).await
    }

    async fn perform(
        &self,
        what: Attempt,
        mut begin: impl FnMut(&mut Context<'_>) -> Result<SendId, SendErrorKind>,
    ) -> Result<(), OperationError> {
        let mut wait = Wait::new(self);
        let send = poll_fn(|task| wait.attempt(task, what, |cx| cx.reporting(self.id(), &mut begin))).await?;
        let operation = Operation::new(self.line(), send.sequence());
        match poll_fn(|task| operation.poll(task)).await {
            outcome if outcome.is_sent() => Ok(()),
            outcome => Err(OperationError::Failed(outcome)),
        }
    }

    /// Reads or writes a list of pieces, and waits for its one end, which comes within the time of the options and `Timeouts::flush`.
    /// If the future is dropped, the transfer is cancelled, and the regions are lent until what is posted has ended.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::aio::Connection;
    /// use rdma_reactor::{Piece, Region, SendErrorKind, Transfer, TransferOptions};
    ///
    /// /// Writes a list, and returns whether it is there.
    /// async fn fill(conn: &Connection, from: &Region, list: Vec<Piece>) -> Result<bool, SendErrorKind> {
    ///     let options = TransferOptions::within(Duration::from_secs(10)).confirm();
    ///     let end = conn.transfer(Transfer::Write(&[from]), list, &options).await?;
    ///     Ok(end.is_done())
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::transfer`]: the transfer was not begun.
    pub async fn transfer(
        &self,
        transfer: Transfer<'_>,
        pieces: Vec<Piece>,
        options: &TransferOptions,
    ) -> Result<TransferEnd, SendErrorKind> {
        let transfer = self.core().with(|cx, _| cx.transfer(self.id(), transfer, pieces, options))?;
        let under_way = UnderWay::new(self, transfer);
        Ok(poll_fn(|task| under_way.poll(task)).await)
    }

    // The end.

    /// Closes the connection, after what was accepted for sending has been sent. [`Connection::closed`] waits for the end.
    pub fn close(&self) {
        self.core().with(|cx, _| cx.close(self.id()));
    }

    /// Ends the connection at once: what has not gone out is lost, and the peer sees [`DisconnectReason::Lost`].
    pub fn abort(&self) {
        self.core().with(|cx, _| cx.abort(self.id()));
    }

    /// Waits for the end of the connection.
    pub async fn closed(&self) -> DisconnectReason {
        self.line().watch(|account| account.end.as_ref().map(reason)).await
    }
}

/// The reason of an end. A connection in the hands of the program was up.
fn reason(end: &End) -> DisconnectReason {
    match end {
        End::Disconnected(reason) => reason.clone(),
        End::NeverUp(error) => DisconnectReason::Internal(error.to_string()),
    }
}

/// The wait of a task for room. It leaves the line when it is dropped.
struct Wait<'a> {
    conn: &'a Connection,
    ticket: Option<Ticket>,
}

impl<'a> Wait<'a> {
    const fn new(conn: &'a Connection) -> Self {
        Self { conn, ticket: None }
    }

    #[inline]
    fn attempt<R>(
        &mut self,
        task: &Task<'_>,
        what: Attempt,
        act: impl FnOnce(&mut Context<'_>) -> Result<R, SendErrorKind>,
    ) -> Poll<Result<R, SendErrorKind>> {
        self.conn.attempt(task, &mut self.ticket, what, act)
    }
}

impl Drop for Wait<'_> {
    #[inline]
    fn drop(&mut self) {
        if !cfg!(planted = "a-dropped-future-stays-in-line") {
            self.conn.give_up_sending(&mut self.ticket);
        }
    }
}

/// An operation that a task waits for. Nobody waits for it any more when this is dropped.
struct Operation<'a> {
    line: &'a Line,
    sequence: u64,
}

impl<'a> Operation<'a> {
    fn new(line: &'a Line, sequence: u64) -> Self {
        line.account.borrow_mut().operations.insert(sequence, Awaited::default());
        Self { line, sequence }
    }

    fn poll(&self, task: &Task<'_>) -> Poll<Outcome> {
        let mut account = self.line.account.borrow_mut();
        let awaited = account.operations.entry(self.sequence).or_default();
        if let Some(outcome) = awaited.outcome {
            return Poll::Ready(outcome);
        }
        let old = awaited.waker.replace(task.waker().clone());
        drop(account);
        drop(old);
        Poll::Pending
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let gone = self.line.account.borrow_mut().operations.remove(&self.sequence);
        // A waker may be the last owner of its task: it is dropped while nothing is borrowed.
        drop(gone);
    }
}

/// A transfer of a list that a task waits for. It is cancelled when this is dropped before its end.
struct UnderWay<'a> {
    conn: &'a Connection,
    transfer: TransferId,
}

impl<'a> UnderWay<'a> {
    fn new(conn: &'a Connection, transfer: TransferId) -> Self {
        conn.line().account.borrow_mut().transfers.insert(transfer, AwaitedEnd::default());
        Self { conn, transfer }
    }

    fn poll(&self, task: &Task<'_>) -> Poll<TransferEnd> {
        let mut account = self.conn.line().account.borrow_mut();
        let awaited = account.transfers.entry(self.transfer).or_default();
        if let Some(end) = awaited.end.take() {
            account.transfers.remove(&self.transfer);
            return Poll::Ready(end);
        }
        let old = awaited.waker.replace(task.waker().clone());
        drop(account);
        drop(old);
        Poll::Pending
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        // A waker may be the last owner of its task: it is dropped while nothing is borrowed.
        let gone = self.conn.line().account.borrow_mut().transfers.remove(&self.transfer);
        if gone.is_some() {
            self.conn.core().part(Farewell::CancelTransfer(self.conn.id(), self.transfer));
        }
        drop(gone);
    }
}

/// A received message, in the registered buffer that it arrived in. The peer gets its credit back when this is dropped.
pub struct Received {
    core: Rc<Core>,
    /// `None` once it was detached.
    message: Option<DetachedMessage>,
}

impl Received {
    const fn new(core: Rc<Core>, message: DetachedMessage) -> Self {
        Self { core, message: Some(message) }
    }

    /// The message, which may go to another thread.
    #[must_use]
    pub fn detach(mut self) -> DetachedMessage {
        self.message.take().expect("only this takes it")
    }
}

impl Deref for Received {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.message.as_deref().unwrap_or_default()
    }
}

impl fmt::Debug for Received {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Received({} bytes)", self.len())
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        self.core.release(&mut self.message);
    }
}
