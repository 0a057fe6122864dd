//! Remote calls of [`crate::call`] as futures: [`AsyncCalls`] makes calls, and receives the requests of the peer.

use std::fmt;
use std::future::poll_fn;
use std::ops::Deref;
use std::rc::Rc;
use std::task::{Context as Task, Poll};
use std::time::Duration;

use super::connection::AsyncConnection;
use super::core::{Core, DropAction};
use super::queue::NextItem;
use super::reply::{Reply, ReplyResult};
use crate::DisconnectReason;
use crate::call::{AnswerError, CallError, CallId, RefusedCall, RequestId};

/// The calls of a connection: the calls that the local side makes, and the requests of the peer that the local side answers.
/// `AsyncCalls::from(conn)` turns a connection into one that carries only calls, until the connection ends. The peer must use the
/// connection for calls, too, and neither side may send other messages. Any number of tasks may use the calls of one connection, each with
/// a clone of the `AsyncCalls`. When the last clone and the last handle of the connection are dropped, the connection is closed. If tasks
/// still hold requests of the peer, the connection stays open until the tasks have answered or dropped them.
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::aio::{AsyncCalls, AsyncReactor};
/// use rdma_reactor::call::CallError;
/// use rdma_reactor::{Config, ProviderChoice};
///
/// /// Answers the requests of a peer until the connection ends.
/// async fn serve(calls: AsyncCalls) {
///     while let Ok(request) = calls.next().await {
///         let answer = request.to_ascii_uppercase();
///         // Fails if the caller does not wait any more.
///         let _ = request.answer(&answer);
///     }
/// }
///
/// /// Makes a call. Any number of tasks may call this on one connection.
/// async fn request(calls: &AsyncCalls) -> Result<Vec<u8>, CallError> {
///     calls.call(b"hello", Duration::from_secs(10)).await
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let net = AsyncReactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
/// let listener = net.listen(([127, 0, 0, 1], 0).into())?;
/// let address = listener.local_address().ok_or("nobody listens")?;
/// net.run(async {
///     let client = AsyncCalls::from(net.connect(address).await?);
///     let server = AsyncCalls::from(listener.accept().await.ok_or("drained")?);
///     let asked = async {
///         let answer = request(&client).await;
///         drop(client);
///         answer
///     };
///     let (answer, ()) = tokio::join!(asked, serve(server));
///     assert_eq!(answer?, b"HELLO");
///     Ok::<(), Box<dyn std::error::Error>>(())
/// })?
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncCalls {
    conn: AsyncConnection,
}

impl fmt::Debug for AsyncCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AsyncCalls({})", self.conn.id())
    }
}

impl From<AsyncConnection> for AsyncCalls {
    fn from(conn: AsyncConnection) -> Self {
        let shared = conn.shared();
        shared.carries_calls.set(true);
        let arrived = shared.inbox.borrow_mut().take();
        conn.core().with(|cx, handler| arrived.into_iter().for_each(|message| handler.on_frame(cx, shared, message)));
        Self { conn }
    }
}

impl AsyncCalls {
    /// Returns the connection, for instance to close it or to wait for its end.
    #[must_use]
    pub const fn connection(&self) -> &AsyncConnection {
        &self.conn
    }

    /// Makes a call, waits for the answer for at most `within`, and returns the payload of the answer. The call is made when the future is
    /// first polled. If the connection has no room for the request, the request is queued. If the future is dropped, the call is cancelled.
    ///
    /// Example: [`AsyncCalls`].
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call(&self, payload: &[u8], within: Duration) -> Result<Vec<u8>, CallError> {
        let reply = Rc::<Reply>::default();
        let (id, tag) = (self.conn.id(), Rc::clone(&reply));
        let made = self.conn.core().with(|cx, handler| handler.calls.call(cx, id, payload, within, tag));
        let call = made.map_err(|RefusedCall { why, .. }| why)?;
        let mut wait = CallWait { core: self.conn.core(), reply, call: Some(call) };
        poll_fn(|task| wait.poll(task)).await
    }

    /// Waits for the next request of the peer, and returns it. Requests are returned in the order of their arrival. A request is skipped if
    /// its caller has stopped waiting. If several tasks wait, the task that has waited longest gets the next request.
    /// [`crate::call::CallLimits`] limits the number of arrived requests that no task has received yet.
    ///
    /// Example: [`AsyncCalls`].
    ///
    /// # Errors
    /// The reason why the connection has ended.
    pub async fn next(&self) -> Result<AsyncRequest, DisconnectReason> {
        loop {
            let request = NextItem::new(&self.conn.shared().requests).await;
            let (id, payload) = request.ok_or_else(|| self.conn.end())?;
            let request = AsyncRequest { core: Rc::clone(self.conn.core()), id: Some(id), payload };
            if request.time_left().is_some() {
                return Ok(request);
            }
        }
    }
}

/// The state of a task that waits for the end of a call. If this state is dropped before the call has ended, the call is cancelled.
struct CallWait<'a> {
    core: &'a Rc<Core>,
    reply: Rc<Reply>,
    call: Option<CallId>,
}

impl CallWait<'_> {
    fn poll(&mut self, task: &Task<'_>) -> Poll<ReplyResult> {
        let outcome = self.reply.poll(task);
        if outcome.is_ready() {
            self.call = None;
        }
        outcome
    }
}

impl Drop for CallWait<'_> {
    fn drop(&mut self) {
        if let Some(call) = self.call {
            // Dropping a waker may drop its task, whose destructors may use this reactor. So `waker` is taken here, and is dropped only
            // after `run_or_defer`, which borrows the reactor.
            let waker = self.reply.take_waker();
            self.core.run_or_defer(DropAction::CancelCall(call));
            drop(waker);
        }
    }
}

/// A request of a peer. An `AsyncRequest` dereferences to the payload of the request. The task that receives a request may keep it, or pass
/// it to another task, which answers it. If the `AsyncRequest` is dropped without an answer, the caller at the peer gets
/// [`CallError::Unanswered`].
pub struct AsyncRequest {
    core: Rc<Core>,
    /// The id of the request; `None` once the request was answered.
    id: Option<RequestId>,
    payload: Vec<u8>, // bound: requests
}

impl fmt::Debug for AsyncRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AsyncRequest({} bytes)", self.payload.len())
    }
}

impl Deref for AsyncRequest {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.payload
    }
}

impl AsyncRequest {
    /// Answers the request. If the connection has no room, the answer is queued.
    ///
    /// Example: [`AsyncCalls`].
    ///
    /// # Errors
    /// [`AnswerError`].
    pub fn answer(mut self, payload: &[u8]) -> Result<(), AnswerError> {
        let id = self.id.take().ok_or(AnswerError::Gone)?;
        self.core.with(|cx, handler| handler.answer(cx, id, payload))
    }

    /// Returns the time that is left until the caller stops waiting for the answer. Returns `None` if the caller has already stopped
    /// waiting: see [`crate::call::Calls::time_left`].
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        self.core.with(|cx, handler| handler.calls.time_left(cx, self.id?))
    }

    /// Waits until the caller has cancelled the call, or its connection has ended. A server that
    /// selects between this future and its work stops work that nobody waits for. Any number of
    /// tasks may wait. If the future is dropped, nothing is lost.
    ///
    /// The deadline of the request does not end the future: see [`AsyncRequest::time_left`].
    ///
    /// ```
    /// use rdma_reactor::aio::{AsyncReactor, AsyncRequest};
    ///
    /// async fn serve(net: &AsyncReactor, request: AsyncRequest) {
    ///     let left = request.time_left().unwrap_or_default();
    ///     let answer = tokio::select! {
    ///         answer = compute(&request) => answer,
    ///         () = net.sleep(left) => return,
    ///         () = request.cancelled() => return,
    ///     };
    ///     // Fails if the caller does not wait any more.
    ///     let _ = request.answer(&answer);
    /// }
    ///
    /// async fn compute(input: &[u8]) -> Vec<u8> {
    ///     input.to_ascii_uppercase()
    /// }
    /// ```
    pub async fn cancelled(&self) {
        let tasks = self.core.with(|cx, handler| handler.cancellation(cx, self.id?));
        if let Some(tasks) = tasks {
            NextItem::new(&tasks).await;
        }
    }
}

impl Drop for AsyncRequest {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.core.run_or_defer(DropAction::Dismiss(id));
        }
    }
}
