//! Remote calls of [`crate::call`], for tasks of any thread. [`Caller`] makes calls, and [`Requests`] receives the requests of the peer.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::error::ConnectionEnd;
use super::link::{ConnectionHandle, QueuedCall, ReceivedRequest, SharedState, ThreadCommand, ThreadLink};
use crate::call::{CallError, CallId, RequestId};
use crate::{Clock, PeerIdentity, SystemClock};

/// A handle with which tasks make calls on a connection. Clones share the connection, and tasks of any thread may use them at the same
/// time. The connection is closed when the last clone and the [`Requests`] of the connection are dropped.
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::threaded::{Requests, ThreadedReactor};
/// use rdma_reactor::{Config, ProviderChoice};
///
/// /// Answers the requests of a peer until the connection ends.
/// async fn serve(mut requests: Requests) {
///     while let Ok(request) = requests.next().await {
///         let answer = request.to_ascii_uppercase();
///         request.answer(answer);
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build()?;
/// let reactor = ThreadedReactor::start(Config::default().provider(ProviderChoice::Iwarp))?;
/// # runtime.block_on(async {
/// let mut listener = reactor.listen(([127, 0, 0, 1], 0).into()).await?;
/// let address = listener.local_address();
/// tokio::spawn(async move {
///     while let Some(conn) = listener.accept().await {
///         tokio::spawn(serve(conn.calls().1));
///     }
/// });
/// let (caller, _) = reactor.connect(address).await?.calls();
/// assert_eq!(&caller.call("hello", Duration::from_secs(10)).await?[..], b"HELLO");
/// # // `block_on` works on a thread without an executor.
/// # tokio::task::spawn_blocking(move || {
/// assert_eq!(&reactor.block_on(caller.call("again", Duration::from_secs(10)))??[..], b"AGAIN");
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// # }).await?.map_err(|error| error as Box<dyn std::error::Error>)
/// # })
/// # }
/// ```
#[derive(Clone)]
pub struct Caller {
    handle: Arc<ConnectionHandle>,
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Caller({})", self.handle.id)
    }
}

impl Caller {
    pub(super) const fn new(handle: Arc<ConnectionHandle>) -> Self {
        Self { handle }
    }

    /// Makes a call, waits for the answer, and returns the payload of the answer. The deadline of
    /// the call is `within` after the first poll of the future. While 64 messages and calls of the
    /// connection are queued, the call waits before its request is queued. The deadline does not
    /// end the wait for the queue: if the deadline has passed when the request can be queued, the
    /// request is not sent, and the call fails with [`CallError::Deadline`]. If the future is
    /// dropped, the call is cancelled.
    ///
    /// Example: [`Caller`].
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call(&self, payload: impl Into<Bytes>, within: Duration) -> Result<Bytes, CallError> {
        let begun = now();
        // If the deadline does not fit in an `Instant`, use a deadline that is more than two hours away. No call lasts longer than 71
        // minutes.
        let until = begun.checked_add(within).unwrap_or(begun + Duration::from_secs(1 << 13));
        let ConnectionHandle { link, id, state } = &*self.handle;
        let permit = Arc::clone(&state.room).acquire_owned().await.map_err(|_| ended(state))?;
        // The deadline may have passed while this task waited until the connection could queue another call. The reactor's thread might not
        // notice that, because it compares deadlines with the time at which the thread's current turn began.
        if until <= now() {
            return Err(CallError::Deadline);
        }
        let (answer, outcome) = oneshot::channel();
        let call_id = Arc::default();
        let mut pending = CancelOnDrop { link, call_id: Some(Arc::clone(&call_id)) };
        link.post(ThreadCommand::Call(
            *id,
            QueuedCall { payload: payload.into(), until, answer, call_id, _permit: permit },
        ));
        let outcome = outcome.await;
        pending.call_id = None;
        outcome.unwrap_or_else(|_| Err(ended(state)))
    }
}

/// A guard that cancels a call when it is dropped before the call has ended.
struct CancelOnDrop<'a> {
    link: &'a ThreadLink,
    /// The cell in which the reactor's thread stores the id of the call when it makes the call. `None` once the call has ended.
    call_id: Option<Arc<OnceLock<CallId>>>,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(call_id) = self.call_id.take() {
            self.link.post(ThreadCommand::CancelCall(call_id));
        }
    }
}

/// The requests that the peer of a connection makes. If the `Requests` is dropped, the requests that no task has received are dismissed:
/// their callers get [`CallError::Unanswered`].
pub struct Requests {
    handle: Arc<ConnectionHandle>,
    receiver: mpsc::UnboundedReceiver<ReceivedRequest>, // bound: requests
}

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Requests({})", self.handle.id)
    }
}

impl Requests {
    pub(super) const fn new(handle: Arc<ConnectionHandle>, receiver: mpsc::UnboundedReceiver<ReceivedRequest>) -> Self {
        Self { handle, receiver }
    }

    /// Returns the identity that the peer, which makes the requests, has proven in the handshake.
    /// Returns `None` if the connection is not secured.
    #[must_use]
    pub fn identity(&self) -> Option<&PeerIdentity> {
        self.handle.state.peer.get()?.identity.as_ref()
    }

    /// Waits for the next request of the peer, and returns it. Requests are returned in the order of their arrival. A request is skipped if
    /// its deadline has passed, or if its caller has cancelled the call. [`crate::call::CallLimits`] limits the number of arrived requests
    /// that no task has received yet.
    ///
    /// Example: [`Caller`].
    ///
    /// # Errors
    /// [`ConnectionEnd::Disconnected`] if the connection has ended, or [`ConnectionEnd::Reactor`] if the reactor's thread has ended.
    pub async fn next(&mut self) -> Result<ThreadedRequest, ConnectionEnd> {
        loop {
            let received = self.receiver.recv().await;
            let (id, payload, until, caller) = received.ok_or_else(|| self.handle.state.ended())?;
            let link = Arc::clone(&self.handle.link);
            let request = ThreadedRequest { link, id: Some(id), payload, until, caller };
            if request.time_left().is_some() {
                return Ok(request);
            }
        }
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // The reactor's thread may be sending a request on the channel now. That request would
        // arrive after the channel was emptied here. So the channel is emptied on the reactor's
        // thread, between two requests.
        let receiver = std::mem::replace(&mut self.receiver, mpsc::unbounded_channel().1);
        self.handle.link.post(ThreadCommand::DismissQueued(receiver));
    }
}

/// A request of a peer. A `ThreadedRequest` dereferences to the payload of the request. A task of any thread may keep it, and may answer it
/// later. If it is dropped without an answer, the caller at the peer gets [`CallError::Unanswered`].
pub struct ThreadedRequest {
    link: Arc<ThreadLink>,
    /// The id of the request; `None` once the request was answered.
    id: Option<RequestId>,
    payload: Bytes,
    until: Instant,
    /// The semaphore of the [`WaitingCaller`](super::link::WaitingCaller). Closed when the caller
    /// does not wait any more.
    caller: Arc<Semaphore>,
}

impl fmt::Debug for ThreadedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadedRequest({} bytes)", self.payload.len())
    }
}

impl Deref for ThreadedRequest {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.payload
    }
}

impl ThreadedRequest {
    /// Answers the request. The answer is dropped if the caller does not wait any more.
    ///
    /// Example: [`Caller`].
    pub fn answer(mut self, payload: impl Into<Bytes>) {
        if let Some(id) = self.id.take() {
            self.link.post(ThreadCommand::Answer(id, payload.into()));
        }
    }

    /// Returns the time that is left until the deadline of the request. Returns `None` if the
    /// deadline has passed, the caller has cancelled the call, or the connection has ended.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        if self.caller.is_closed() {
            return None;
        }
        self.until.checked_duration_since(now()).filter(|left| !left.is_zero())
    }

    /// Waits until the caller has cancelled the call, or its connection has ended. A server that
    /// selects between this future and its work stops work that nobody waits for. If the future is
    /// dropped, nothing is lost.
    ///
    /// The deadline of the request does not end the future: see [`ThreadedRequest::time_left`].
    ///
    /// ```
    /// use rdma_reactor::threaded::ThreadedRequest;
    ///
    /// async fn serve(request: ThreadedRequest) {
    ///     let left = request.time_left().unwrap_or_default();
    ///     let answer = tokio::select! {
    ///         answer = tokio::time::timeout(left, compute(&request)) => answer,
    ///         () = request.cancelled() => return,
    ///     };
    ///     if let Ok(answer) = answer {
    ///         request.answer(answer);
    ///     }
    /// }
    ///
    /// async fn compute(input: &[u8]) -> Vec<u8> {
    ///     input.to_ascii_uppercase()
    /// }
    /// ```
    pub async fn cancelled(&self) {
        // The semaphore has no permits, so this ends when it is closed.
        let _ = self.caller.acquire().await;
    }
}

impl Drop for ThreadedRequest {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.link.post(ThreadCommand::Dismiss(id));
        }
    }
}

/// Returns the current time of the clock that the reactor uses.
fn now() -> Instant {
    SystemClock.now()
}

/// Returns the error of a call whose connection or reactor has ended.
fn ended(state: &SharedState) -> CallError {
    match state.ended() {
        ConnectionEnd::Disconnected(reason) => CallError::Disconnected(reason),
        _ => CallError::Gone,
    }
}
