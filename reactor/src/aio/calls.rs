//! Calls and requests as futures.

use std::fmt;
use std::future::poll_fn;
use std::ops::Deref;
use std::rc::Rc;
use std::task::{Context as Task, Poll};
use std::time::Duration;

use super::arrivals::Next;
use super::connection::Connection;
use super::core::{Core, Farewell};
use super::reply::{Outcome, Reply};
use crate::DisconnectReason;
use crate::call::{AnswerError, CallError, CallId, RefusedCall, RequestId};

/// The calls of a connection: those that this side makes, and those that it serves. `Calls::from(conn)` makes calls of the messages of a
/// connection, from now on and for good; the peer does the same. Nothing else is received or sent on it. Clones, and those that are made of
/// clones of the connection, are the same, and any number of tasks may use them. The connection is closed when all of them are dropped, behind
/// the requests that tasks still answer.
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::aio::{AsyncReactor, Calls};
/// use rdma_reactor::call::CallError;
/// use rdma_reactor::{Config, ProviderChoice};
///
/// /// Answers the requests of a peer until it goes.
/// async fn serve(calls: Calls) {
///     while let Ok(request) = calls.next().await {
///         let answer = request.to_ascii_uppercase();
///         // An error says that the caller has gone.
///         let _ = request.answer(&answer);
///     }
/// }
///
/// /// Any number of tasks may do so on one connection.
/// async fn ask(calls: &Calls) -> Result<Vec<u8>, CallError> {
///     calls.call(b"hello", Duration::from_secs(10)).await
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let net = AsyncReactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
/// let listener = net.listen(([127, 0, 0, 1], 0).into())?;
/// let address = listener.local_address().ok_or("nobody listens")?;
/// net.run(async {
///     let client = Calls::from(net.connect(address).await?);
///     let server = Calls::from(listener.accept().await.ok_or("drained")?);
///     let asked = async {
///         let answer = ask(&client).await;
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
pub struct Calls {
    conn: Connection,
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Calls({})", self.conn.id())
    }
}

impl From<Connection> for Calls {
    fn from(conn: Connection) -> Self {
        let line = conn.line();
        line.carries_calls.set(true);
        let arrived = line.inbox.borrow_mut().take();
        conn.core().with(|cx, desk| arrived.into_iter().for_each(|message| desk.carried(cx, line, message)));
        Self { conn }
    }
}

impl Calls {
    /// The connection, to close it or to learn its end.
    #[must_use]
    pub const fn connection(&self) -> &Connection {
        &self.conn
    }

    /// Makes a call, and waits for its end, which comes within `within`. If there is no room, the request waits. The call is made when the
    /// future is polled first. If the future is dropped, the call is cancelled.
    ///
    /// Example: [`Calls`].
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call(&self, payload: &[u8], within: Duration) -> Result<Vec<u8>, CallError> {
        let reply = Rc::<Reply>::default();
        let (id, tag) = (self.conn.id(), Rc::clone(&reply));
        let made = self.conn.core().with(|cx, desk| desk.calls.call(cx, id, payload, within, tag));
        let call = made.map_err(|RefusedCall { why, .. }| why)?;
        let mut pending = Pending { core: self.conn.core(), reply, call: Some(call) };
        poll_fn(|task| pending.poll(task)).await
    }

    /// The next request of the peer that its caller still waits for. Requests come in the order in which they arrived, and tasks get them
    /// in the order in which they have called this. Those that nobody has taken are bounded by [`crate::call::CallLimits`].
    ///
    /// Example: [`Calls`].
    ///
    /// # Errors
    /// The reason why the connection has ended.
    pub async fn next(&self) -> Result<Request, DisconnectReason> {
        loop {
            let asked = Next::new(&self.conn.line().requests).await;
            let (id, payload) = asked.ok_or_else(|| self.conn.end())?;
            let request = Request { core: Rc::clone(self.conn.core()), id: Some(id), payload };
            if request.time_left().is_some() {
                return Ok(request);
            }
        }
    }
}

/// A call that a task waits for. It is cancelled when this is dropped before its end.
struct Pending<'a> {
    core: &'a Rc<Core>,
    reply: Rc<Reply>,
    call: Option<CallId>,
}

impl Pending<'_> {
    fn poll(&mut self, task: &Task<'_>) -> Poll<Outcome> {
        let outcome = self.reply.poll(task);
        if outcome.is_ready() {
            self.call = None;
        }
        outcome
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if let Some(call) = self.call {
            // A waker may be the last owner of its task: it is dropped while nothing is borrowed.
            let waker = self.reply.take_waker();
            self.core.part(Farewell::CancelCall(call));
            drop(waker);
        }
    }
}

/// A request of a peer. It derefs to its payload. It may be kept and answered by another task. If it is dropped, its caller gets
/// [`CallError::Unanswered`].
pub struct Request {
    core: Rc<Core>,
    /// `None` once it was answered.
    id: Option<RequestId>,
    payload: Vec<u8>,
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
    /// Answers the request. An answer that finds no room waits, and is sent when there is room.
    ///
    /// Example: [`Calls`].
    ///
    /// # Errors
    /// [`AnswerError`].
    pub fn answer(mut self, payload: &[u8]) -> Result<(), AnswerError> {
        let id = self.id.take().ok_or(AnswerError::Gone)?;
        self.core.with(|cx, desk| desk.calls.answer(cx, id, payload))
    }

    /// The time that its caller still waits. `None`: it does not any more, see [`crate::call::Calls::time_left`].
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        self.core.with(|cx, desk| desk.calls.time_left(cx, self.id?))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.core.part(Farewell::Dismiss(id));
        }
    }
}
