//! A connection, with a future for each thing that takes time.

use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::ops::{Deref, Range};
use std::rc::Rc;
use std::task::{Context as Task, Poll};

use super::core::{Core, Farewell};
use super::desk::{Awaited, End, Line};
use crate::{
    ConnectionId, Context, DetachedMessage, DisconnectReason, Error, Outcome, Region, RegionOptions, RemoteRegion,
    SendErrorKind, SendId,
};

/// A connection. Clones are the same connection, so that one task can send while another receives. It is closed when the last one
/// is dropped, after what was accepted for sending has been sent: that takes turns, see [`super::AsyncReactor::shutdown`].
#[derive(Clone)]
pub struct Connection {
    shared: Rc<Shared>,
}

struct Shared {
    core: Rc<Core>,
    line: Rc<Line>,
}

impl Drop for Shared {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// The operation was not begun.
    #[error(transparent)]
    Refused(#[from] SendErrorKind),
    /// The operation was begun, and its connection has ended: [`Outcome::Failed`].
    #[error("the connection ended before the operation: {0:?}")]
    Failed(Outcome),
}

impl Connection {
    pub(super) fn new(core: Rc<Core>, line: Rc<Line>) -> Self {
        Self { shared: Rc::new(Shared { core, line }) }
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

    /// Sends a copy of `payload`; waits while there is no room. The message goes out with the next turn. It is not sent if the future
    /// is dropped before.
    ///
    /// # Errors
    /// As [`Context::send`], without `WouldBlock`.
    pub async fn send(&self, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        poll_fn(|task| self.attempt(task, |cx| cx.send(self.id(), payload))).await
    }

    /// Sends a copy of `payload` if there is room now, and does not wait. The message goes out with the next turn.
    ///
    /// # Errors
    /// As [`Context::send`].
    pub fn try_send(&self, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        self.core().with(|cx, _| cx.send(self.id(), payload))
    }

    /// Tries something that may have to wait for room.
    pub(super) fn attempt<R>(
        &self,
        task: &Task<'_>,
        act: impl FnOnce(&mut Context<'_>) -> Result<R, SendErrorKind>,
    ) -> Poll<Result<R, SendErrorKind>> {
        match self.core().with(|cx, _| act(cx)) {
            Err(SendErrorKind::WouldBlock(_)) => {
                self.line().account.borrow_mut().writers.add(task.waker());
                Poll::Pending
            }
            done => Poll::Ready(done),
        }
    }

    /// The next message. Messages that came before the end are received before its reason. A future that is dropped takes no message
    /// with it.
    ///
    /// # Errors
    /// The reason why the connection has ended.
    pub async fn recv(&self) -> Result<Received, DisconnectReason> {
        poll_fn(|task| self.poll_recv(task)).await
    }

    pub(super) fn poll_recv(&self, task: &Task<'_>) -> Poll<Result<Received, DisconnectReason>> {
        let mut account = self.line().account.borrow_mut();
        match (account.inbox.pop_front(), &account.end) {
            (Some(message), _) => Poll::Ready(Ok(Received::new(Rc::clone(self.core()), message))),
            (None, Some(end)) => Poll::Ready(Err(reason(end))),
            (None, None) => {
                account.readers.add(task.waker());
                Poll::Pending
            }
        }
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
    pub fn register(&self, len: usize, options: &RegionOptions) -> Result<Region, Error> {
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
        self.operate(|cx| cx.read(self.id(), remote, local, range.clone())).await
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
        self.operate(|cx| cx.write(self.id(), remote, local, range.clone())).await
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
        mut begin: impl FnMut(&mut Context<'_>) -> Result<SendId, SendErrorKind>,
    ) -> Result<(), OperationError> {
        let send = poll_fn(|task| self.attempt(task, |cx| cx.told_of(self.id(), &mut begin))).await?;
        let operation = Operation::new(self.line(), send.sequence());
        match poll_fn(|task| operation.poll(task)).await {
            outcome if outcome.is_sent() => Ok(()),
            outcome => Err(OperationError::Failed(outcome)),
        }
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
        poll_fn(|task| {
            let mut account = self.line().account.borrow_mut();
            match &account.end {
                Some(end) => Poll::Ready(reason(end)),
                None => {
                    account.watchers.add(task.waker());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// The reason of an end. A connection in the hands of the program was up.
fn reason(end: &End) -> DisconnectReason {
    match end {
        End::Disconnected(reason) => reason.clone(),
        End::NeverUp(error) => DisconnectReason::Internal(error.to_string()),
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
        match awaited.outcome {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                awaited.waiters.add(task.waker());
                Poll::Pending
            }
        }
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let gone = self.line.account.borrow_mut().operations.remove(&self.sequence);
        // A waker may be the last owner of its task: it is dropped while nothing is borrowed.
        drop(gone);
    }
}

/// A received message, in the registered buffer that it arrived in. The peer gets its credit back when this is dropped.
pub struct Received {
    core: Rc<Core>,
    message: DetachedMessage,
}

impl Received {
    const fn new(core: Rc<Core>, message: DetachedMessage) -> Self {
        Self { core, message }
    }

    /// The message, which may go to another thread.
    #[must_use]
    pub fn detach(mut self) -> DetachedMessage {
        self.message.take()
    }
}

impl Deref for Received {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.message
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
