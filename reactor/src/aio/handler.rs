//! The handler behind the futures: queues arrived messages, requests and connections for tasks, and collects the tasks to wake.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::Deref;
use std::rc::Rc;
use std::task::{Context as Task, Poll, Waker};
use std::time::Duration;

use super::queue::AsyncQueue;
use super::reply::{QueuedRequest, Reply};
use super::room_waiters::RoomWaiters;
use super::wait_queue::{WaitQueue, WaiterId};
use crate::call::{CallEvent, Calls};
use crate::{
    ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, ListenerId, Message, Outcome,
    PeerIdentity, SendId, TimerId, TransferEnd, TransferId,
};

/// The reason that is sent to a peer which no task accepts or refuses.
pub(super) const NOT_APPROVED: &str = "no task of the program accepts or refuses peers";

/// The end of a connection.
#[derive(Clone, Debug)]
pub(super) enum EndReason {
    Disconnected(DisconnectReason),
    ConnectFailed(ConnectError),
}

/// An operation that a task waits for.
#[derive(Debug, Default)]
pub(super) struct PendingOperation {
    pub(super) outcome: Option<Outcome>,
    pub(super) waker: Option<Waker>,
}

/// A transfer of a list that a task waits for.
#[derive(Debug, Default)]
pub(super) struct PendingTransfer {
    pub(super) end: Option<TransferEnd>,
    pub(super) waker: Option<Waker>,
}

/// The state of a connection that tasks wait on.
#[derive(Debug, Default)]
pub(super) struct WaitState {
    /// True once the connection was established.
    pub(super) up: bool,
    pub(super) end: Option<EndReason>,
    /// Operations that tasks wait for, by [`SendId::sequence`].
    pub(super) operations: BTreeMap<u64, PendingOperation>,
    /// Transfers of lists that tasks wait for.
    pub(super) transfers: BTreeMap<TransferId, PendingTransfer>,
    /// Tasks that wait for room.
    pub(super) room_waiters: RoomWaiters,
    /// Tasks that wait for the connection to be established or to end. All of them are notified of both.
    watchers: WaitQueue,
}

impl WaitState {
    fn notify_watchers(&mut self, ready: &mut Vec<Waker>) {
        ready.extend(std::iter::from_fn(|| self.watchers.notify()));
    }
}

/// A connection, shared by the handler and the program's handles.
#[derive(Debug)]
pub(super) struct SharedConnection {
    pub(super) id: ConnectionId,
    pub(super) state: RefCell<WaitState>,
    /// Messages that the program has not received. Each holds a receive of the connection, or memory of large messages.
    pub(super) inbox: RefCell<AsyncQueue<DetachedMessage>>,
    /// True if the connection is used for calls.
    pub(super) carries_calls: Cell<bool>,
    /// Requests that the program has not taken. [`crate::call::CallLimits`] bounds them.
    pub(super) requests: RefCell<AsyncQueue<QueuedRequest>>,
}

impl SharedConnection {
    pub(super) fn new(id: ConnectionId) -> Rc<Self> {
        let (state, inbox, requests) = Default::default();
        Rc::new(Self { id, state, inbox, carries_calls: Cell::new(false), requests })
    }

    /// Waits until `look` returns `Some` for the state.
    pub(super) async fn watch<R>(&self, look: impl Fn(&WaitState) -> Option<R>) -> R {
        let mut watch = Watch { shared: self, waiter: None };
        poll_fn(|task| watch.poll(task, &look)).await
    }
}

/// The wait of a task for a change of the state.
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
        // The waker may be the last owner of a task: it is dropped while nothing is borrowed.
        drop(waker);
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The established connections of a listener that were not accepted yet.
pub(super) type Backlog = Rc<RefCell<AsyncQueue<Rc<SharedConnection>>>>;

/// The authenticated peers of a listener that wait for approval.
pub(super) type PeerQueue = Rc<RefCell<AsyncQueue<ConnectionId>>>;

/// Largest number of peers that wait for approval on a listener: the default of [`crate::Config::max_pending`]. Peers whose connections
/// have ended count until a task takes them. Further peers are refused.
const MAX_PENDING_PEERS: usize = 1024;

/// The state of a task's timer.
#[derive(Debug)]
pub(super) enum TimerState {
    /// The timer is set, and wakes this task.
    Set(Waker),
    Fired,
}

/// The handler of the program's tasks, see the [module](self).
#[derive(Debug, Default)]
pub(super) struct TaskHandler {
    /// The connections that have not ended, by slot.
    connections: Vec<Option<Rc<SharedConnection>>>,
    pub(super) listeners: BTreeMap<ListenerId, Backlog>,
    /// The listeners with approval, and their waiting peers. `None` once the `PendingPeers` was dropped: all peers are refused.
    pub(super) pending_peers: BTreeMap<ListenerId, Option<PeerQueue>>,
    pub(super) timers: BTreeMap<TimerId, TimerState>,
    pub(super) calls: Calls<Rc<Reply>>,
    /// Tasks to wake at the end of the turn.
    pub(super) ready: Vec<Waker>,
}

impl TaskHandler {
    /// Adds a connection.
    pub(super) fn add(&mut self, shared: &Rc<SharedConnection>) {
        let slot = shared.id.slot();
        if self.connections.len() <= slot {
            self.connections.resize_with(slot + 1, || None);
        }
        self.connections[slot] = Some(Rc::clone(shared));
    }

    /// Closes a connection whose last handle was dropped, once the requests that tasks hold are answered.
    pub(super) fn close(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let mut queued = Default::default();
        self.change(conn, |shared, _| queued = shared.requests.borrow_mut().take());
        queued.into_iter().for_each(|(request, _)| self.calls.dismiss(cx, request));
        self.forget(conn);
        self.calls.finish(cx, conn);
    }

    /// Removes a connection from the table.
    pub(super) fn forget(&mut self, conn: ConnectionId) {
        let shared = self.connections.get_mut(conn.slot());
        if let Some(shared) = shared.filter(|shared| shared.as_ref().is_some_and(|shared| shared.id == conn)) {
            *shared = None;
        }
    }

    /// Removes a listener. Returns the connections that were not accepted.
    pub(super) fn stop_listening(&mut self, listener: ListenerId) -> Vec<ConnectionId> {
        self.pending_peers.remove(&listener);
        let connections =
            self.listeners.remove(&listener).map(|backlog| backlog.borrow_mut().take()).unwrap_or_default();
        let left: Vec<_> = connections.iter().map(|shared| shared.id).collect();
        left.iter().for_each(|&conn| self.forget(conn));
        left
    }

    /// Refuses the waiting peers of a listener, and all later ones.
    pub(super) fn refuse_peers(&mut self, cx: &mut Context<'_>, listener: ListenerId) {
        let Some(peers) = self.pending_peers.get_mut(&listener).and_then(Option::take) else { return };
        let mut peers = peers.borrow_mut();
        peers.take().into_iter().for_each(|conn| _ = cx.judge(conn, Err(NOT_APPROVED.into())));
        peers.end(&mut self.ready);
    }

    /// Calls `change` with a connection and the list of tasks to wake, if the connection has not ended.
    #[inline]
    fn change(&mut self, conn: ConnectionId, change: impl FnOnce(&SharedConnection, &mut Vec<Waker>)) {
        let Self { connections, ready, .. } = self;
        if let Some(shared) = connections.get(conn.slot()).and_then(Option::as_ref).filter(|shared| shared.id == conn) {
            change(shared, ready);
        }
    }

    /// Notifies the tasks for which there is room on a connection. They are woken at the end of the turn.
    pub(super) fn notify_room_waiters(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.change(conn, |shared, ready| shared.state.borrow_mut().room_waiters.notify(cx, conn, ready));
    }

    /// Handles a message of a connection that is used for calls.
    pub(super) fn on_frame(
        &mut self,
        cx: &mut Context<'_>,
        shared: &SharedConnection,
        message: impl Deref<Target = [u8]>,
    ) {
        let Self { calls, ready, .. } = self;
        match calls.on_recv(cx, shared.id, message) {
            // Payloads are copied, so that requests and answers that wait for their tasks hold no receives.
            Some(CallEvent::Request { id, payload }) => {
                ready.extend(shared.requests.borrow_mut().add((id, payload.to_vec())));
            }
            Some(CallEvent::Answer { tag, payload, .. }) => ready.extend(tag.set(Ok(payload.to_vec()))),
            Some(CallEvent::Failed(failed)) => ready.extend(failed.tag.set(Err(failed.error))),
            _ => {}
        }
    }

    /// Notifies the tasks whose calls have ended without an answer.
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
        // Close a connection if its listener or its handle was dropped while it was being established, or if the reactor is being drained.
        let backlog = cx.listener(conn).and_then(|listener| self.listeners.get_mut(&listener));
        let Some(backlog) = backlog.filter(|backlog| !backlog.borrow().is_over()) else { return cx.close(conn) };
        let shared = SharedConnection::new(conn);
        shared.state.borrow_mut().up = true;
        self.ready.extend(backlog.borrow_mut().add(Rc::clone(&shared)));
        self.add(&shared);
    }

    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: &PeerIdentity) -> Result<(), String> {
        let Some(gate) = cx.listener(conn).and_then(|listener| self.pending_peers.get(&listener)) else {
            return Ok(());
        };
        let mut waiting = gate.as_ref().ok_or(NOT_APPROVED)?.borrow_mut();
        if waiting.len() >= MAX_PENDING_PEERS {
            return Err("too many peers wait for approval".into());
        }
        cx.postpone_judgement(conn);
        self.ready.extend(waiting.add(conn));
        Ok(())
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let shared = self.connections.get(conn.slot()).and_then(Option::as_ref).filter(|shared| shared.id == conn);
        // A connection without a handle may still have requests that tasks answer. `calls` refuses new ones.
        let Some(shared) = shared else { return drop(self.calls.on_recv(cx, conn, message)) };
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
        for backlog in self.listeners.values() {
            backlog.borrow_mut().end(&mut self.ready);
        }
        for waiting in self.pending_peers.values().flatten() {
            waiting.borrow_mut().end(&mut self.ready);
        }
        let Self { connections, calls, .. } = self;
        if !connections.iter().flatten().any(|shared| shared.carries_calls.get()) {
            return cx.close_all();
        }
        // Calls and requests may end within the deadline. A connection without any is closed immediately.
        connections.iter().flatten().for_each(|shared| calls.finish(cx, shared.id));
    }
}
