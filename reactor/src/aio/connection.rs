//! A connection of an async reactor. Each operation that may wait is a future.

use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::ops::{Deref, Range};
use std::rc::Rc;
use std::task::{Context as Task, Poll};

use super::core::{Core, DropAction};
use super::handler::{EndReason, PendingOperation, PendingTransfer, SharedConnection};
use super::queue::{AsyncQueue, NextItem};
use super::room_waiters::{AttemptKind, FreeRoom, TaskNeed, Ticket};
use super::wait_queue::WaiterId;
use crate::{
    Blocked, ConnectionId, Context, DetachedMessage, DisconnectReason, Outcome, Piece, Region, RegionOptions,
    RemoteRegion, SendErrorKind, SendId, Transfer, TransferEnd, TransferId, TransferOptions,
};

/// A connection of an [`super::AsyncReactor`]. Clones share the connection, so that one task can send while another receives. When the last
/// clone is dropped, the reactor sends the accepted messages, then closes the connection. The reactor needs further turns for that. At the
/// end of a program, call [`super::AsyncReactor::shutdown`], which takes these turns.
#[derive(Clone)]
pub struct AsyncConnection {
    hold: Rc<Connection_OneThreadOnly_UseSpawnLocal>,
}

/// The part that all clones of an [`AsyncConnection`] share. Dropping this part closes the connection. If a program moves a connection to
/// another thread, the compiler's error prints the name of this type: so the name says what to do instead.
#[allow(non_camel_case_types, reason = "the name is read in the compiler's message, where it is the cure")]
struct Connection_OneThreadOnly_UseSpawnLocal {
    core: Rc<Core>,
    shared: Rc<SharedConnection>,
}

impl Drop for Connection_OneThreadOnly_UseSpawnLocal {
    fn drop(&mut self) {
        self.core.run_or_defer(DropAction::Close(self.shared.id));
    }
}

impl fmt::Debug for AsyncConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AsyncConnection({})", self.id())
    }
}

/// The reason why an operation that a task has waited for, such as an RDMA Read, has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// The operation was not posted.
    #[error(transparent)]
    Refused(#[from] SendErrorKind),
    /// The operation was posted, but did not succeed. The outcome is [`Outcome::Failed`] if the connection ended before the operation
    /// completed. It is [`Outcome::Refused`] if the operation is a message that the peer's program has refused.
    #[error("the connection ended before the operation: {0:?}")]
    Failed(Outcome),
}

impl AsyncConnection {
    pub(super) fn new(core: Rc<Core>, shared: Rc<SharedConnection>) -> Self {
        Self { hold: Rc::new(Connection_OneThreadOnly_UseSpawnLocal { core, shared }) }
    }

    pub(super) fn core(&self) -> &Rc<Core> {
        &self.hold.core
    }

    pub(super) fn shared(&self) -> &SharedConnection {
        &self.hold.shared
    }

    /// Returns the id of the connection. The program passes it to the operations of [`Context`], to which [`super::AsyncReactor::with`]
    /// gives access.
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.shared().id
    }

    /// Returns the address of the peer; `None` if the connection has ended.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.core().with(|cx, _| cx.connection(self.id()).peer_address())
    }

    // Operations on messages.

    /// Queues a copy of `payload` for sending. Waits while the connection has no room for the message, for instance no free slot in the
    /// send queue, or no credit from the peer. Tasks that wait for the same kind of room get it in the order of arrival. The reactor posts
    /// the message in its next turn. If the future is dropped before it is done, the message is not sent.
    ///
    /// # Errors
    /// The errors of [`Context::send`], except `WouldBlock`.
    pub async fn send(&self, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        let mut wait = RoomWait::new(self);
        poll_fn(|task| wait.attempt(task, AttemptKind::Message(payload.len()), |cx| cx.send(self.id(), payload))).await
    }

    /// Queues a copy of `payload` for sending, without waiting. Fails with `WouldBlock` if the connection has no room for the message, or
    /// if tasks that wait in [`AsyncConnection::send`] need all of that room. The reactor posts the message in its next turn.
    ///
    /// # Errors
    /// The errors of [`Context::send`].
    pub fn try_send(&self, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        self.core().with(|cx, _| match self.refusal(cx, payload.len()) {
            None => cx.send(self.id(), payload),
            Some(why) => Err(SendErrorKind::WouldBlock(why)),
        })
    }

    /// Returns `None` if [`AsyncConnection::try_send`] may attempt to send a message of `len` bytes. Returns a reason if the waiting tasks
    /// need the room: `try_send` then fails with `WouldBlock` and that reason.
    fn refusal(&self, cx: &mut Context<'_>, len: usize) -> Option<Blocked> {
        let state = self.shared().state.borrow();
        if state.room_waiters.is_empty() {
            return None;
        }
        let need = TaskNeed::of(AttemptKind::Message(len), cx, self.id());
        state.room_waiters.refusal(need, FreeRoom::of(cx, self.id()))
    }

    /// Attempts the operation `act`, which needs room on the connection. If the task must wait for room, puts the task into one of the
    /// queues of [`super::room_waiters`], and returns `Pending`. `ticket` is the position of the task in that queue; it is `None` while the
    /// task is in no queue.
    pub(super) fn attempt<R>(
        &self,
        task: &Task<'_>,
        ticket: &mut Option<Ticket>,
        kind: AttemptKind,
        act: impl FnOnce(&mut Context<'_>) -> Result<R, SendErrorKind>,
    ) -> Poll<Result<R, SendErrorKind>> {
        let alone = ticket.is_none() && self.shared().state.borrow().room_waiters.is_empty();
        if !alone && self.must_wait(task, ticket, kind) {
            return Poll::Pending;
        }
        match self.core().with(|cx, _| act(cx)) {
            Err(SendErrorKind::WouldBlock(why)) => {
                self.wait_for_room(task, ticket, kind, why);
                Poll::Pending
            }
            done => {
                self.stop_waiting(ticket);
                Poll::Ready(done)
            }
        }
    }

    /// Returns true if a task must wait before its next attempt. A task with a ticket must wait until it is notified. A task without a
    /// ticket must wait if the tasks in the queues need all the room of the connection. In this case the task is added to a queue.
    #[cold]
    fn must_wait(&self, task: &Task<'_>, ticket: &mut Option<Ticket>, kind: AttemptKind) -> bool {
        if let Some(ticket) = ticket {
            let mut state = self.shared().state.borrow_mut();
            let old = state.room_waiters.set_waker(ticket, task.waker());
            let waits = !state.room_waiters.is_notified(ticket);
            // Dropping a waker may drop its task, whose destructors may use this reactor. So the borrow `state` ends before the waker `old`
            // is dropped.
            drop(state);
            drop(old);
            return waits;
        }
        self.core().with(|cx, handler| {
            let mut state = self.shared().state.borrow_mut();
            let (need, room) = (TaskNeed::of(kind, cx, self.id()), FreeRoom::of(cx, self.id()));
            let passes = state.room_waiters.can_proceed(need, room) || crate::planted("a-newcomer-overtakes");
            if passes || state.end.is_some() {
                return false;
            }
            *ticket = Some(state.room_waiters.push(need, task.waker()));
            state.room_waiters.await_room(cx, self.id(), &mut handler.ready);
            state.room_waiters.notify(cx, self.id(), &mut handler.ready);
            true
        })
    }

    /// Queues a task whose attempt was refused. Then notifies other tasks that need less room, if the connection has enough room for them.
    #[cold]
    fn wait_for_room(&self, task: &Task<'_>, ticket: &mut Option<Ticket>, kind: AttemptKind, why: Blocked) {
        self.core().with(|cx, handler| {
            let room_waiters = &mut self.shared().state.borrow_mut().room_waiters;
            let known = ticket.take().ok_or_else(|| TaskNeed::of(kind, cx, self.id()));
            *ticket = Some(room_waiters.refused(known, why, FreeRoom::of(cx, self.id()), task.waker()));
            room_waiters.notify(cx, self.id(), &mut handler.ready);
        });
    }

    /// Removes a task from the queue in which it waits for room. If the task was notified, also notifies the next tasks for which the
    /// connection has room.
    #[inline]
    pub(super) fn stop_waiting(&self, ticket: &mut Option<Ticket>) {
        if let Some(ticket) = ticket.take() {
            self.leave_room_queue(ticket);
        }
    }

    #[cold]
    fn leave_room_queue(&self, ticket: Ticket) {
        let waker = self.shared().state.borrow_mut().room_waiters.remove(ticket);
        if waker.is_none() {
            self.core().run_or_defer(DropAction::NotifyWaiters(self.id()));
        }
        drop(waker);
    }

    /// Waits for the next message, and returns it. If several tasks wait, the task that has waited longest gets the next message. Once the
    /// connection has ended, `recv` first returns the messages that arrived before the end, and then the error. Dropping the future loses
    /// no message.
    ///
    /// # Errors
    /// The reason why the connection has ended.
    pub async fn recv(&self) -> Result<Received, DisconnectReason> {
        let message = NextItem::new(&self.shared().inbox).await;
        self.received(message)
    }

    pub(super) fn poll_recv(
        &self,
        task: &Task<'_>,
        waiter: &mut Option<WaiterId>,
    ) -> Poll<Result<Received, DisconnectReason>> {
        AsyncQueue::poll(&self.shared().inbox, task, waiter).map(|message| self.received(message))
    }

    fn received(&self, message: Option<DetachedMessage>) -> Result<Received, DisconnectReason> {
        message.map(|message| Received::new(Rc::clone(self.core()), message)).ok_or_else(|| self.end())
    }

    /// Returns the reason why the connection has ended. Call this only after the end of the connection.
    pub(super) fn end(&self) -> DisconnectReason {
        let state = self.shared().state.borrow();
        state.end.as_ref().map_or(DisconnectReason::Local { complete: false }, reason)
    }

    // Operations on remote memory.

    /// Registers memory, as [`crate::RegionContext::register`] does. If the connection uses a
    /// hardware device, this call may block.
    ///
    /// ```
    /// use rdma_reactor::aio::AsyncConnection;
    /// use rdma_reactor::{Access, Error, Region, RegionOptions};
    ///
    /// /// Registers memory that the peer may read.
    /// fn open(conn: &AsyncConnection) -> Result<Region, Error> {
    ///     conn.register(4096, &RegionOptions::new().allow(Access::REMOTE_READ))
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`crate::RegionContext::register`].
    pub fn register(&self, len: usize, options: &RegionOptions) -> Result<Region, crate::Error> {
        self.core().with(|cx, _| cx.regions().register(self.id(), len, options))
    }

    /// Fills `range` of `local` with the first bytes of `remote` by RDMA Read, and waits for the completion. If the future is dropped after
    /// the read was posted, the read continues. Until the read completes, that range of `local` is lent: the program cannot change it, and
    /// [`Region::bytes`] returns `None`.
    ///
    /// ```
    /// use rdma_reactor::aio::{AsyncConnection, OperationError};
    /// use rdma_reactor::{Region, RemoteRegion};
    ///
    /// /// Reads 4 KiB of the peer's memory.
    /// async fn fetch(conn: &AsyncConnection, from: RemoteRegion, into: &mut Region) -> Result<(), OperationError> {
    ///     conn.read(from, into, 0..4096).await
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`crate::RemoteContext::read`], except `WouldBlock`.
    /// [`OperationError::Failed`] if the connection ended before the operation completed.
    pub async fn read(
        &self,
        remote: RemoteRegion,
        local: &mut Region,
        range: Range<usize>,
    ) -> Result<(), OperationError> {
        self.perform(AttemptKind::Operation, |cx| cx.remote(self.id()).read(remote, local, range.clone())).await
    }

    /// Writes `range` of `local` to the first bytes of `remote` by RDMA Write, and waits for the completion. If the future is dropped after
    /// the write was posted, the write continues. Until the write completes, that range of `local` is lent: the program can read it, but
    /// cannot change it.
    ///
    /// ```
    /// use rdma_reactor::aio::{AsyncConnection, OperationError};
    /// use rdma_reactor::{Region, RemoteRegion};
    ///
    /// /// Writes all of a region to the peer's memory.
    /// async fn publish(conn: &AsyncConnection, to: RemoteRegion, region: &Region) -> Result<(), OperationError> {
    ///     conn.write(to, region, 0..region.len()).await
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`AsyncConnection::read`].
    pub async fn write(&self, remote: RemoteRegion, local: &Region, range: Range<usize>) -> Result<(), OperationError> {
        self.perform(AttemptKind::Operation, |cx| cx.remote(self.id()).write(remote, local, range.clone())).await
    }

    /// Posts an operation of [`Context`], such as an atomic, and waits for its completion. The closure `begin` requests the operation. If
    /// `begin` fails with `WouldBlock`, `begin` is called again when the connection may have room for the operation. If the future is
    /// dropped after the operation was posted, the operation continues, and its memory is lent until it completes.
    ///
    /// ```
    /// use rdma_reactor::aio::{AsyncConnection, OperationError};
    /// use rdma_reactor::{Region, RemoteRegion};
    ///
    /// /// Adds to a counter in the peer's memory; the old value lands in the first word of `old`.
    /// async fn add(conn: &AsyncConnection, to: RemoteRegion, old: &mut Region, what: u64) -> Result<(), OperationError> {
    ///     conn.operate(|cx| cx.remote(conn.id()).fetch_add(to, old, 0, what)).await
    /// }
    ///
    /// /// Sends a message, and waits until it is sent: [`AsyncConnection::send`] waits for room only.
    /// async fn send(conn: &AsyncConnection, bytes: &[u8]) -> Result<(), OperationError> {
    ///     conn.operate(|cx| cx.send(conn.id(), bytes)).await
    /// }
    /// ```
    ///
    /// # Errors
    /// The error that `begin` returns, except `WouldBlock`. [`OperationError::Failed`] if the connection ended before the operation
    /// completed, or if the peer's program has refused the message.
    pub async fn operate(
        &self,
        begin: impl FnMut(&mut Context<'_>) -> Result<SendId, SendErrorKind>,
    ) -> Result<(), OperationError> {
        self.perform(AttemptKind::Any, begin).await
    }

    async fn perform(
        &self,
        kind: AttemptKind,
        mut begin: impl FnMut(&mut Context<'_>) -> Result<SendId, SendErrorKind>,
    ) -> Result<(), OperationError> {
        let mut wait = RoomWait::new(self);
        let send = poll_fn(|task| wait.attempt(task, kind, |cx| cx.reporting(self.id(), &mut begin))).await?;
        let operation = OperationWait::new(self.shared(), send.sequence());
        match poll_fn(|task| operation.poll(task)).await {
            outcome if outcome.is_sent() => Ok(()),
            outcome => Err(OperationError::Failed(outcome)),
        }
    }

    /// Reads or writes a list of pieces, and waits for the end of the transfer. The wait takes at most the time limit of `options` plus
    /// `Timeouts::flush`. If the future is dropped, the transfer is cancelled: no more pieces are posted. Until the posted pieces have
    /// completed, the regions are lent: the program cannot change the lent bytes.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::aio::AsyncConnection;
    /// use rdma_reactor::{Piece, Region, SendErrorKind, Transfer, TransferOptions};
    ///
    /// /// Writes a list. Returns true if all pieces were placed at the peer.
    /// async fn fill(conn: &AsyncConnection, from: &Region, list: Vec<Piece>) -> Result<bool, SendErrorKind> {
    ///     let options = TransferOptions::within(Duration::from_secs(10)).confirm();
    ///     let end = conn.transfer(Transfer::Write(&[from]), list, &options).await?;
    ///     Ok(end.is_done())
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`crate::RemoteContext::transfer`]. An error means that the transfer was not
    /// started; the result of a started transfer is the [`TransferEnd`].
    pub async fn transfer(
        &self,
        transfer: Transfer<'_>,
        pieces: Vec<Piece>,
        options: &TransferOptions,
    ) -> Result<TransferEnd, SendErrorKind> {
        let transfer = self.core().with(|cx, _| cx.remote(self.id()).transfer(transfer, pieces, options))?;
        let wait = TransferWait::new(self, transfer);
        Ok(poll_fn(|task| wait.poll(task)).await)
    }

    // The end of the connection.

    /// Begins to close the connection: the reactor sends the accepted messages, then closes.
    /// [`AsyncConnection::closed`] waits for the end. Messages that the reactor has not delivered
    /// before this call are dropped. [`AsyncConnection::recv`] still returns the delivered
    /// messages.
    pub fn close(&self) {
        self.core().with(|cx, _| cx.close(self.id()));
    }

    /// Ends the connection immediately. Messages that are not yet sent are lost, and the peer sees [`DisconnectReason::Lost`].
    pub fn abort(&self) {
        self.core().with(|cx, _| cx.abort(self.id()));
    }

    /// Waits for the end of the connection, and returns its reason.
    pub async fn closed(&self) -> DisconnectReason {
        self.shared().watch(|state| state.end.as_ref().map(reason)).await
    }
}

/// Converts the recorded end of a connection to the [`DisconnectReason`] that the program gets. The program has handles only of connections
/// that were established, so `ConnectFailed` is not expected here.
fn reason(end: &EndReason) -> DisconnectReason {
    match end {
        EndReason::Disconnected(reason) => reason.clone(),
        EndReason::ConnectFailed(error) => DisconnectReason::Internal(error.to_string()),
    }
}

/// The state of a task that waits for room on a connection. Dropping this state removes the task from the queue of waiting tasks.
struct RoomWait<'a> {
    conn: &'a AsyncConnection,
    ticket: Option<Ticket>,
}

impl<'a> RoomWait<'a> {
    const fn new(conn: &'a AsyncConnection) -> Self {
        Self { conn, ticket: None }
    }

    #[inline]
    fn attempt<R>(
        &mut self,
        task: &Task<'_>,
        kind: AttemptKind,
        act: impl FnOnce(&mut Context<'_>) -> Result<R, SendErrorKind>,
    ) -> Poll<Result<R, SendErrorKind>> {
        self.conn.attempt(task, &mut self.ticket, kind, act)
    }
}

impl Drop for RoomWait<'_> {
    #[inline]
    fn drop(&mut self) {
        if !crate::planted("a-dropped-future-stays-in-line") {
            self.conn.stop_waiting(&mut self.ticket);
        }
    }
}

/// The state of a task that waits for the completion of an operation.
struct OperationWait<'a> {
    shared: &'a SharedConnection,
    sequence: u64,
}

impl<'a> OperationWait<'a> {
    fn new(shared: &'a SharedConnection, sequence: u64) -> Self {
        shared.state.borrow_mut().operations.insert(sequence, PendingOperation::default());
        Self { shared, sequence }
    }

    fn poll(&self, task: &Task<'_>) -> Poll<Outcome> {
        let mut state = self.shared.state.borrow_mut();
        let awaited = state.operations.entry(self.sequence).or_default();
        if let Some(outcome) = awaited.outcome {
            return Poll::Ready(outcome);
        }
        let old = awaited.waker.replace(task.waker().clone());
        drop(state);
        drop(old);
        Poll::Pending
    }
}

impl Drop for OperationWait<'_> {
    fn drop(&mut self) {
        let gone = self.shared.state.borrow_mut().operations.remove(&self.sequence);
        // `gone` contains a waker. Dropping a waker may drop its task, whose destructors may use this reactor. So `gone` is dropped here,
        // where no `RefCell` is borrowed.
        drop(gone);
    }
}

/// The state of a task that waits for the end of a transfer. If this state is dropped before the transfer has ended, the transfer is
/// cancelled.
struct TransferWait<'a> {
    conn: &'a AsyncConnection,
    transfer: TransferId,
}

impl<'a> TransferWait<'a> {
    fn new(conn: &'a AsyncConnection, transfer: TransferId) -> Self {
        conn.shared().state.borrow_mut().transfers.insert(transfer, PendingTransfer::default());
        Self { conn, transfer }
    }

    fn poll(&self, task: &Task<'_>) -> Poll<TransferEnd> {
        let mut state = self.conn.shared().state.borrow_mut();
        let awaited = state.transfers.entry(self.transfer).or_default();
        if let Some(end) = awaited.end.take() {
            state.transfers.remove(&self.transfer);
            return Poll::Ready(end);
        }
        let old = awaited.waker.replace(task.waker().clone());
        drop(state);
        drop(old);
        Poll::Pending
    }
}

impl Drop for TransferWait<'_> {
    fn drop(&mut self) {
        // `gone` contains a waker. Dropping a waker may drop its task, whose destructors may use this reactor. So `gone` is dropped only
        // after the borrow of `state` has ended.
        let gone = self.conn.shared().state.borrow_mut().transfers.remove(&self.transfer);
        if gone.is_some() {
            self.conn.core().run_or_defer(DropAction::CancelTransfer(self.conn.id(), self.transfer));
        }
        drop(gone);
    }
}

/// A received message, in the registered buffer in which it arrived. Dropping a `Received` releases the buffer, so that the peer gets a
/// credit for another message.
pub struct Received {
    core: Rc<Core>,
    /// The message; `None` once [`Received::detach`] has taken it.
    message: Option<DetachedMessage>,
}

impl Received {
    const fn new(core: Rc<Core>, message: DetachedMessage) -> Self {
        Self { core, message: Some(message) }
    }

    /// Returns the message as a value that may be sent to another thread.
    #[must_use]
    pub fn detach(mut self) -> DetachedMessage {
        self.message.take().expect("a message is detached once")
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
