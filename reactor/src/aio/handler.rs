//! The [`Handler`] of an async reactor. It queues messages, requests and connections until tasks receive them, and collects the wakers of
//! the tasks to wake.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::future::poll_fn;
use std::ops::Deref;
use std::rc::Rc;
use std::task::{Context as Task, Poll, Waker};
use std::time::Duration;

use super::queue::AsyncQueue;
use super::reply::{QueuedRequest, Reply};
use super::room_waiters::RoomWaiters;
use super::wait_queue::{WaitQueue, WaiterId};
use crate::approval::{MAX_PENDING_PEERS, NOT_APPROVED, TOO_MANY_PENDING};
use crate::call::{AnswerError, CallEvent, Calls, RequestId};
use crate::{
    ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, ListenerId, Message, Outcome,
    PeerIdentity, SendId, TimerId, TransferEnd, TransferId,
};

/// The end of a connection: the callback that has reported the end, and the reason.
#[derive(Clone, Debug)]
pub(super) enum EndReason {
    Disconnected(DisconnectReason),
    ConnectFailed(ConnectError),
}

/// An operation, such as a read, whose completion a task waits for.
#[derive(Debug, Default)]
pub(super) struct PendingOperation {
    pub(super) outcome: Option<Outcome>,
    pub(super) waker: Option<Waker>,
}

/// A transfer of a list of pieces. A task waits for the end of the transfer.
#[derive(Debug, Default)]
pub(super) struct PendingTransfer {
    pub(super) end: Option<TransferEnd>,
    pub(super) waker: Option<Waker>,
}

/// The state of a connection, and the tasks that wait for a change of the state. A task may wait until the connection is established or
/// ends, until an operation completes, or until room becomes available.
#[derive(Debug, Default)]
pub(super) struct WaitState {
    /// True once the connection was established. It stays true after the connection has ended.
    pub(super) up: bool,
    pub(super) end: Option<EndReason>,
    /// The operations whose completions tasks wait for. The key is [`SendId::sequence`].
    pub(super) operations: BTreeMap<u64, PendingOperation>, // local: operations that tasks wait for
    /// The transfers whose end a task waits for. A transfer reads or writes a list of pieces.
    // local: transfers that tasks wait for
    pub(super) transfers: BTreeMap<TransferId, PendingTransfer>,
    /// The tasks that wait for room to send a message or to post an operation.
    pub(super) room_waiters: RoomWaiters,
    /// The tasks that wait for the connection to be established or to end. Both events notify all of these tasks.
    watchers: WaitQueue,
}

impl WaitState {
    fn notify_watchers(&mut self, ready: &mut Vec<Waker>) {
        ready.extend(std::iter::from_fn(|| self.watchers.notify()));
    }
}

/// The data of a connection. [`TaskHandler`] and the program's handles of that connection share it.
#[derive(Debug)]
pub(super) struct SharedConnection {
    pub(super) id: ConnectionId,
    pub(super) state: RefCell<WaitState>,
    /// The messages that have arrived, and that no task has received yet. Each message occupies a receive buffer of the connection. A
    /// message that is longer than one buffer occupies separate memory instead.
    pub(super) inbox: RefCell<AsyncQueue<DetachedMessage>>, // bound: receives
    /// True if the program uses the connection for calls. The connection then carries no other messages.
    pub(super) carries_calls: Cell<bool>,
    /// The requests that have arrived, and that no task has received. [`crate::call::CallLimits`] limits their number.
    pub(super) requests: RefCell<AsyncQueue<QueuedRequest>>, // bound: requests
}

impl SharedConnection {
    pub(super) fn new(id: ConnectionId) -> Rc<Self> {
        let (state, inbox, requests) = Default::default();
        Rc::new(Self { id, state, inbox, carries_calls: Cell::new(false), requests })
    }

    /// Waits until `look` returns `Some` for the connection's state, and returns that value. `look` is called again when the connection is
    /// established and when it ends, but not after other changes of the state.
    pub(super) async fn watch<R>(&self, look: impl Fn(&WaitState) -> Option<R>) -> R {
        let mut watch = Watch { shared: self, waiter: None };
        poll_fn(|task| watch.poll(task, &look)).await
    }
}

/// The state of a task that waits until the connection is established or ends.
struct Watch<'a> {
    shared: &'a SharedConnection,
    waiter: Option<WaiterId>,
}

impl Watch<'_> {
    fn poll<R>(&mut self, task: &Task<'_>, look: impl FnOnce(&WaitState) -> Option<R>) -> Poll<R> {
        self.leave();
        let mut state = self.shared.state.borrow_mut();
        match look(&state) {
            Some(seen) => Poll::Ready(seen),
            None => {
                self.waiter = Some(state.watchers.push(0, 1, task.waker()));
                Poll::Pending
            }
        }
    }

    fn leave(&mut self) {
        let Some(waiter) = self.waiter.take() else { return };
        let waker = self.shared.state.borrow_mut().watchers.remove(waiter);
        // Dropping a waker may drop its task, whose destructors may use this connection. So the waker is dropped only here, after the
        // borrow of `state` has ended.
        drop(waker);
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// For one listener: the established connections that no task has accepted yet.
pub(super) type Backlog = Rc<RefCell<AsyncQueue<Rc<SharedConnection>>>>;

/// For one listener: the authenticated peers that wait for approval.
pub(super) type PeerQueue = Rc<RefCell<AsyncQueue<ConnectionId>>>;

/// The largest number of ended connections that may wait for a task to accept them on a listener.
/// At this number, new connections are closed. The number of connections that have not ended is
/// limited by [`crate::Config::max_connections`].
const MAX_ENDED_IN_BACKLOG: usize = 1024;

/// Returns true if a listener closes new connections, because too many of the connections that no task has accepted have already ended.
fn is_overfull(backlog: &AsyncQueue<Rc<SharedConnection>>) -> bool {
    backlog.len() >= MAX_ENDED_IN_BACKLOG
        && backlog.count(|shared| shared.state.borrow().end.is_some()) >= MAX_ENDED_IN_BACKLOG
}

/// For one request of a peer: the tasks that wait until the caller has cancelled the call, or the
/// connection has ended. The queue never has an item; it ends then.
pub(super) type Cancellation = Rc<RefCell<AsyncQueue<Infallible>>>;

/// The state of a timer that a task waits for.
#[derive(Debug)]
pub(super) enum TimerState {
    /// The timer has not expired. When it expires, this task is woken.
    Set(Waker),
    Fired,
}

/// The handler that an [`super::AsyncReactor`] passes to its turns, see the [module](self).
#[derive(Debug, Default)]
pub(super) struct TaskHandler {
    /// The connections that have not ended. The index is the slot of the [`ConnectionId`].
    connections: Vec<Option<Rc<SharedConnection>>>, // bound: connections
    pub(super) listeners: BTreeMap<ListenerId, Backlog>, // bound: accept-queue
    /// The listeners whose peers need approval. Each has the queue of the peers that wait for approval. The queue is `None` once the
    /// program has dropped the `PendingPeers` of the listener: all peers of that listener are then refused.
    pub(super) pending_peers: BTreeMap<ListenerId, Option<PeerQueue>>, // bound: approvals
    pub(super) timers: BTreeMap<TimerId, TimerState>,    // local: timers of tasks
    pub(super) calls: Calls<Rc<Reply>>,
    /// For each connection: the requests that are cancelled, and those for which a task has called
    /// [`super::AsyncRequest::cancelled`].
    cancellations: BTreeMap<ConnectionId, BTreeMap<RequestId, Cancellation>>, // bound: requests
    /// The connections whose handles were dropped while they carried calls. They are closed when
    /// the tasks have answered or dropped their requests.
    finishing: BTreeSet<ConnectionId>, // bound: connections
    /// The wakers of the tasks to wake at the end of the turn.
    pub(super) ready: Vec<Waker>, // bound: turn
}

impl TaskHandler {
    /// Adds a connection to the table, in its slot.
    pub(super) fn add(&mut self, shared: &Rc<SharedConnection>) {
        let slot = shared.id.slot();
        if self.connections.len() <= slot {
            self.connections.resize_with(slot + 1, || None);
        }
        self.connections[slot] = Some(Rc::clone(shared));
    }

    /// Closes a connection, because the program has dropped its last handle of that connection. The requests that no task has received are
    /// dismissed. If tasks hold other requests, the connection is closed once the tasks have answered or dropped all of these requests.
    pub(super) fn close(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let mut queued = Default::default();
        let mut carries_calls = false;
        self.change(conn, |shared, _| {
            queued = shared.requests.borrow_mut().take();
            carries_calls = shared.carries_calls.get();
        });
        if carries_calls {
            self.finishing.insert(conn);
        }
        queued.into_iter().for_each(|(request, _)| self.dismiss(cx, request));
        self.forget(conn);
        self.calls.finish(cx, conn);
    }

    /// Removes a connection from the table, because the connection has ended, or because the program has no handle of the connection any
    /// more.
    pub(super) fn forget(&mut self, conn: ConnectionId) {
        let shared = self.connections.get_mut(conn.slot());
        if let Some(shared) = shared.filter(|shared| shared.as_ref().is_some_and(|shared| shared.id == conn)) {
            *shared = None;
        }
    }

    /// Removes a listener. Returns the ids of its established connections that no task has accepted. The caller must close these
    /// connections.
    pub(super) fn stop_listening(&mut self, listener: ListenerId) -> Vec<ConnectionId> {
        self.pending_peers.remove(&listener);
        let connections =
            self.listeners.remove(&listener).map(|backlog| backlog.borrow_mut().take()).unwrap_or_default();
        let left: Vec<_> = connections.iter().map(|shared| shared.id).collect();
        left.iter().for_each(|&conn| self.forget(conn));
        left
    }

    /// Notifies the tasks that wait for connections or peers, because the reactor accepts no more connections on its listeners.
    pub(super) fn end_listeners(&mut self) {
        for backlog in self.listeners.values() {
            backlog.borrow_mut().end(&mut self.ready);
        }
        for waiting in self.pending_peers.values().flatten() {
            waiting.borrow_mut().end(&mut self.ready);
        }
    }

    /// Refuses the peers that wait for approval on a listener, and all peers that arrive there later.
    pub(super) fn refuse_peers(&mut self, cx: &mut Context<'_>, listener: ListenerId) {
        let Some(peers) = self.pending_peers.get_mut(&listener).and_then(Option::take) else { return };
        let mut peers = peers.borrow_mut();
        peers.take().into_iter().for_each(|conn| _ = cx.connection(conn).judge(Err(NOT_APPROVED.into())));
        peers.end(&mut self.ready);
    }

    /// Calls `change` with a connection's shared data and the list of wakers to call. Does nothing if the connection is not in the table,
    /// for instance because the connection has ended.
    #[inline]
    fn change(&mut self, conn: ConnectionId, change: impl FnOnce(&SharedConnection, &mut Vec<Waker>)) {
        let Self { connections, ready, .. } = self;
        if let Some(shared) = connections.get(conn.slot()).and_then(Option::as_ref).filter(|shared| shared.id == conn) {
            change(shared, ready);
        }
    }

    /// Notifies the tasks for which the connection has room. They are woken at the end of the turn.
    pub(super) fn notify_room_waiters(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.change(conn, |shared, ready| shared.state.borrow_mut().room_waiters.notify(cx, conn, ready));
    }

    /// Returns the queue in which tasks wait until the caller of a request has cancelled the call,
    /// or the connection has ended. Returns `None` if one of the two has happened.
    pub(super) fn cancellation(&mut self, cx: &mut Context<'_>, request: RequestId) -> Option<Cancellation> {
        let conn = request.connection();
        cx.connection(conn).peer_address()?;
        let tasks = self.cancellations.entry(conn).or_default().entry(request).or_default();
        (!tasks.borrow().is_over()).then(|| Rc::clone(tasks))
    }

    /// Notifies the tasks that wait until the caller of a request has cancelled the call.
    fn on_cancelled(&mut self, request: RequestId) {
        let requests = self.cancellations.entry(request.connection()).or_default();
        requests.entry(request).or_default().borrow_mut().end(&mut self.ready);
    }

    pub(super) fn answer(
        &mut self,
        cx: &mut Context<'_>,
        request: RequestId,
        payload: &[u8],
    ) -> Result<(), AnswerError> {
        self.forget_request(request);
        self.calls.answer(cx, request, payload)
    }

    /// Ends a request without an answer.
    pub(super) fn dismiss(&mut self, cx: &mut Context<'_>, request: RequestId) {
        self.forget_request(request);
        self.calls.dismiss(cx, request);
    }

    fn forget_request(&mut self, request: RequestId) {
        let Some(requests) = self.cancellations.get_mut(&request.connection()) else { return };
        requests.remove(&request);
        if requests.is_empty() {
            self.cancellations.remove(&request.connection());
        }
    }

    /// Handles a message that arrived on a connection that is used for calls: a request, an answer or another frame of [`crate::call`].
    pub(super) fn on_frame(
        &mut self,
        cx: &mut Context<'_>,
        shared: &SharedConnection,
        message: impl Deref<Target = [u8]>,
    ) {
        let Self { calls, ready, .. } = self;
        match calls.on_recv(cx, shared.id, message) {
            // The payloads of requests and answers are copied. So a payload that no task has received yet occupies no receive buffer.
            Some(CallEvent::Request { id, payload }) => {
                ready.extend(shared.requests.borrow_mut().add((id, payload.to_vec())));
            }
            Some(CallEvent::Answer { tag, payload, .. }) => ready.extend(tag.set(Ok(payload.to_vec()))),
            Some(CallEvent::Failed(failed)) => ready.extend(failed.tag.set(Err(failed.error))),
            Some(CallEvent::Cancelled(request)) => self.on_cancelled(request),
            _ => {}
        }
    }

    /// Stores the errors of the calls that have ended without an answer, and notifies the tasks that wait for these calls.
    fn report_failed_calls(&mut self) {
        let Self { calls, ready, .. } = self;
        while let Some(failed) = calls.next_failed() {
            ready.extend(failed.tag.set(Err(failed.error)));
        }
    }

    fn end(&mut self, conn: ConnectionId, end: EndReason) {
        self.change(conn, |shared, ready| {
            shared.inbox.borrow_mut().end(ready);
            shared.requests.borrow_mut().end(ready);
            let mut state = shared.state.borrow_mut();
            state.end = Some(end);
            state.room_waiters.notify_all(ready);
            state.notify_watchers(ready);
        });
        self.forget(conn);
    }
}

impl Handler for TaskHandler {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let known = self.connections.get(conn.slot()).and_then(Option::as_ref).is_some_and(|shared| shared.id == conn);
        if known {
            return self.change(conn, |shared, ready| {
                let mut state = shared.state.borrow_mut();
                state.up = true;
                state.notify_watchers(ready);
            });
        }
        // This connection is not in the table: a listener has accepted the connection, or the program has dropped the future that opened
        // it. Close the connection if no listener can queue it: the connection has no listener, the listener was dropped, the reactor is
        // being drained, or the queue is full.
        let backlog = cx.connection(conn).listener().and_then(|listener| self.listeners.get_mut(&listener));
        let takes = |backlog: &AsyncQueue<_>| !backlog.is_over() && !is_overfull(backlog);
        let Some(backlog) = backlog.filter(|backlog| takes(&backlog.borrow())) else { return cx.close(conn) };
        let shared = SharedConnection::new(conn);
        shared.state.borrow_mut().up = true;
        self.ready.extend(backlog.borrow_mut().add(Rc::clone(&shared)));
        self.add(&shared);
    }

    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: &PeerIdentity) -> Result<(), String> {
        let Some(listener) = cx.connection(conn).listener() else { return Ok(()) };
        if !self.listeners.contains_key(&listener) {
            // The program has dropped the listener, so no task would get the connection.
            return Err(NOT_APPROVED.into());
        }
        let Some(gate) = self.pending_peers.get(&listener) else { return Ok(()) };
        let mut waiting = gate.as_ref().ok_or(NOT_APPROVED)?.borrow_mut();
        if waiting.is_over() {
            // The reactor is being drained, so no task waits for peers any more.
            return Err(NOT_APPROVED.into());
        }
        if waiting.len() >= MAX_PENDING_PEERS {
            return Err(TOO_MANY_PENDING.into());
        }
        cx.connection(conn).postpone_judgement();
        self.ready.extend(waiting.add(conn));
        Ok(())
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let shared = self.connections.get(conn.slot()).and_then(Option::as_ref).filter(|shared| shared.id == conn);
        // A connection that is not in the table has no handle in the program, but tasks may still
        // hold requests that arrived on it. `calls` handles the message, and refuses new requests.
        let Some(shared) = shared else {
            if let Some(CallEvent::Cancelled(request)) = self.calls.on_recv(cx, conn, message) {
                self.on_cancelled(request);
            }
            return;
        };
        if shared.carries_calls.get() {
            let shared = Rc::clone(shared);
            return self.on_frame(cx, &shared, message);
        }
        self.ready.extend(shared.inbox.borrow_mut().add(message.detach()));
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        self.change(conn, |shared, ready| {
            if let Some(awaited) = shared.state.borrow_mut().operations.get_mut(&send.sequence()) {
                awaited.outcome = Some(outcome);
                ready.extend(awaited.waker.take());
            }
        });
    }

    fn on_transfer(&mut self, _: &mut Context<'_>, conn: ConnectionId, transfer: TransferId, end: TransferEnd) {
        self.change(conn, |shared, ready| {
            if let Some(awaited) = shared.state.borrow_mut().transfers.get_mut(&transfer) {
                awaited.end = Some(end);
                ready.extend(awaited.waker.take());
            }
        });
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
        self.change(conn, |shared, ready| {
            let mut state = shared.state.borrow_mut();
            state.room_waiters.unblock();
            state.room_waiters.notify(cx, conn, ready);
        });
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.calls.on_disconnect(conn, &reason);
        self.finishing.remove(&conn);
        let requests = self.cancellations.remove(&conn).unwrap_or_default();
        requests.values().for_each(|tasks| tasks.borrow_mut().end(&mut self.ready));
        self.report_failed_calls();
        self.end(conn, EndReason::Disconnected(reason));
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.end(conn, EndReason::ConnectFailed(error));
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
        if self.calls.on_timer(cx, timer) {
            return self.report_failed_calls();
        }
        let alarm = self.timers.get_mut(&timer).map(|alarm| std::mem::replace(alarm, TimerState::Fired));
        if let Some(TimerState::Set(waker)) = alarm {
            self.ready.push(waker);
        }
    }

    fn on_drain(&mut self, cx: &mut Context<'_>, _: Duration) {
        self.end_listeners();
        let Self { connections, finishing, pending_peers, calls, .. } = self;
        if finishing.is_empty() && !connections.iter().flatten().any(|shared| shared.carries_calls.get()) {
            return cx.close_all();
        }
        // The waiting peers are refused: if a task accepted one of them now, its connection would
        // be closed as soon as it is established.
        for conn in pending_peers.values().flatten().flat_map(|peers| peers.borrow_mut().take()) {
            cx.connection(conn).judge(Err(NOT_APPROVED.into()));
        }
        // `finish` closes a connection once the calls and requests on it have ended. If a connection has no calls and no requests, `finish`
        // closes it immediately. The drain ends the remaining connections at its deadline.
        connections.iter().flatten().for_each(|shared| calls.finish(cx, shared.id));
    }
}
