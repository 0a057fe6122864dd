//! Calls and requests, seen from the tasks of any thread.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::error::ConnectionEnd;
use super::link::{Asked, Command, Hold, Link, Question, State};
use crate::call::{CallError, CallId, RequestId};
use crate::{Clock, SystemClock};

/// The time of the reactor's clock, as other threads see it.
fn now() -> Instant {
    SystemClock.now()
}

fn ended(state: &State) -> CallError {
    match state.ended() {
        ConnectionEnd::Disconnected(reason) => CallError::Disconnected(reason),
        _ => CallError::Gone,
    }
}

/// The calls that this side makes on a connection. Clones are the same; any number of tasks of any thread may use them. The connection is
/// closed when the last one and its [`Requests`] are dropped.
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::threaded::{Requests, ThreadedReactor};
/// use rdma_reactor::{Config, ProviderChoice};
///
/// /// Answers the requests of a peer until it goes.
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
/// # // A thread without an executor waits as well.
/// # tokio::task::spawn_blocking(move || {
/// assert_eq!(&reactor.block_on(caller.call("again", Duration::from_secs(10)))??[..], b"AGAIN");
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// # }).await?.map_err(|error| error as Box<dyn std::error::Error>)
/// # })
/// # }
/// ```
#[derive(Clone)]
pub struct Caller {
    hold: Arc<Hold>,
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Caller({})", self.hold.id)
    }
}

impl Caller {
    pub(super) const fn new(hold: Arc<Hold>) -> Self {
        Self { hold }
    }

    /// Makes a call, and waits for its end, which comes within `within`. If there is no room, the request waits; if its time is over before
    /// there is room, it is not sent. If the future is dropped, the call is cancelled.
    ///
    /// Example: [`Caller`].
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call(&self, payload: impl Into<Bytes>, within: Duration) -> Result<Bytes, CallError> {
        let begun = now();
        // A time past what the clock can express is cut by the call anyway.
        let until = begun.checked_add(within).unwrap_or(begun + Duration::from_secs(1 << 13));
        let Hold { link, id, state } = &*self.hold;
        let permit = Arc::clone(&state.room).acquire_owned().await.map_err(|_| ended(state))?;
        // The reactor's thread compares deadlines with the time of its turn, which may be earlier.
        if until <= now() {
            return Err(CallError::Deadline);
        }
        let (answer, outcome) = oneshot::channel();
        let name = Arc::default();
        let mut pending = Pending { link, name: Some(Arc::clone(&name)) };
        link.post(Command::Call(*id, Question { payload: payload.into(), until, answer, name, _permit: permit }));
        let outcome = outcome.await;
        pending.name = None;
        outcome.unwrap_or_else(|_| Err(ended(state)))
    }
}

/// A call that a task waits for. It is cancelled when this is dropped before its end.
struct Pending<'a> {
    link: &'a Link,
    name: Option<Arc<OnceLock<CallId>>>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if let Some(name) = self.name.take() {
            self.link.post(Command::CancelCall(name));
        }
    }
}

/// The requests of the peer of a connection. If this is dropped, they are dismissed.
pub struct Requests {
    hold: Arc<Hold>,
    asked: mpsc::UnboundedReceiver<Asked>,
}

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Requests({})", self.hold.id)
    }
}

impl Requests {
    pub(super) const fn new(hold: Arc<Hold>, asked: mpsc::UnboundedReceiver<Asked>) -> Self {
        Self { hold, asked }
    }

    /// The next request whose time is not over, in the order in which they arrived. Those that nobody has taken are bounded by
    /// [`crate::call::CallLimits`].
    ///
    /// Example: [`Caller`].
    ///
    /// # Errors
    /// [`ConnectionEnd::Disconnected`] or [`ConnectionEnd::Reactor`].
    pub async fn next(&mut self) -> Result<Request, ConnectionEnd> {
        loop {
            let asked = self.asked.recv().await;
            let (id, payload, until) = asked.ok_or_else(|| self.hold.state.ended())?;
            let request = Request { link: Arc::clone(&self.hold.link), id: Some(id), payload, until };
            if request.time_left().is_some() {
                return Ok(request);
            }
        }
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        self.asked.close();
        // The requests in it are dismissed.
        while let Ok((id, ..)) = self.asked.try_recv() {
            self.hold.link.post(Command::Dismiss(id));
        }
    }
}

/// A request of a peer. It derefs to its payload. It may be kept and answered on any thread. If it is dropped, its caller gets
/// [`CallError::Unanswered`].
pub struct Request {
    link: Arc<Link>,
    /// `None` once it was answered.
    id: Option<RequestId>,
    payload: Bytes,
    until: Instant,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request({} bytes)", self.payload.len())
    }
}

impl Deref for Request {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.payload
    }
}

impl Request {
    /// Answers the request. The answer is dropped if its caller has gone meanwhile.
    ///
    /// Example: [`Caller`].
    pub fn answer(mut self, payload: impl Into<Bytes>) {
        if let Some(id) = self.id.take() {
            self.link.post(Command::Answer(id, payload.into()));
        }
    }

    /// The time that its caller still waits; `None` when that is over.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        self.until.checked_duration_since(now()).filter(|left| !left.is_zero())
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.link.post(Command::Dismiss(id));
        }
    }
}
