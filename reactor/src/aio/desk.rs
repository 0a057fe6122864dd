//! The handler behind the futures: it keeps what arrives until a task takes it, and notes which tasks to wake.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::Deref;
use std::rc::Rc;
use std::task::{Context as Task, Poll, Waker};
use std::time::Duration;

use super::arrivals::Arrivals;
use super::reply::{Asked, Reply};
use super::waiters::{Place, Waiters};
use super::writers::Writers;
use crate::call::{CallEvent, Calls};
use crate::{
    ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, ListenerId, Message, Outcome,
    PeerIdentity, SendId, TimerId, TransferEnd, TransferId,
};

/// The words for a peer that no task has looked at.
pub(super) const NOBODY_ANSWERS: &str = "nobody decides here who is let in";

/// The end of a connection.
#[derive(Clone, Debug)]
pub(super) enum End {
    Disconnected(DisconnectReason),
    NeverUp(ConnectError),
}

/// A one-sided operation that a task waits for.
#[derive(Debug, Default)]
pub(super) struct Awaited {
    pub(super) outcome: Option<Outcome>,
    pub(super) waker: Option<Waker>,
}

/// A transfer of a list that a task waits for.
#[derive(Debug, Default)]
pub(super) struct AwaitedEnd {
    pub(super) end: Option<TransferEnd>,
    pub(super) waker: Option<Waker>,
}

/// The account of a connection.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) up: bool,
    pub(super) end: Option<End>,
    /// Operations that tasks wait for, by their positions among all sends.
    pub(super) operations: BTreeMap<u64, Awaited>,
    /// Transfers of lists that tasks wait for.
    pub(super) transfers: BTreeMap<TransferId, AwaitedEnd>,
    /// Tasks that wait for room.
    pub(super) writers: Writers,
    /// Tasks that wait for the connection to be up, or to end. All of them are called.
    watchers: Waiters,
}

impl Account {
    fn call_watchers(&mut self, ready: &mut Vec<Waker>) {
        ready.extend(std::iter::from_fn(|| self.watchers.call()));
    }
}

/// A connection, shared by the desk and by the program's handles.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) id: ConnectionId,
    pub(super) account: RefCell<Account>,
    /// Messages that nobody has received yet. Each takes a receive of the connection, or room for large messages.
    pub(super) inbox: RefCell<Arrivals<DetachedMessage>>,
    /// Its messages are frames of calls.
    pub(super) carries_calls: Cell<bool>,
    /// Requests that nobody has taken yet. [`crate::call::CallLimits`] bounds them.
    pub(super) requests: RefCell<Arrivals<Asked>>,
}

impl Line {
    pub(super) fn new(id: ConnectionId) -> Rc<Self> {
        let (account, inbox, requests) = Default::default();
        Rc::new(Self { id, account, inbox, carries_calls: Cell::new(false), requests })
    }

    /// Waits until `look` finds in the account what it looks for.
    pub(super) async fn watch<R>(&self, look: impl Fn(&Account) -> Option<R>) -> R {
        let mut watch = Watch { line: self, place: None };
        poll_fn(|task| watch.poll(task, &look)).await
    }
}

/// A task among the watchers of a connection.
struct Watch<'a> {
    line: &'a Line,
    place: Option<Place>,
}

impl Watch<'_> {
    fn poll<R>(&mut self, task: &Task<'_>, look: impl FnOnce(&Account) -> Option<R>) -> Poll<R> {
        self.leave();
        let mut account = self.line.account.borrow_mut();
        match look(&account) {
            Some(seen) => Poll::Ready(seen),
            None => {
                self.place = Some(account.watchers.join(0, 1, task.waker()));
                Poll::Pending
            }
        }
    }

    fn leave(&mut self) {
        let Some(place) = self.place.take() else { return };
        let waker = self.line.account.borrow_mut().watchers.leave(place);
        // It may be the last owner of a task: it is dropped while nothing is borrowed.
        drop(waker);
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The connections that came through a listener and that nobody has accepted yet.
pub(super) type Backlog = Rc<RefCell<Arrivals<Rc<Line>>>>;

/// The peers of a listener that have proven who they are and wait for an answer.
pub(super) type Waiting = Rc<RefCell<Arrivals<ConnectionId>>>;

/// Largest number of them: as many as [`crate::Config::max_pending`] is by default. Those that are gone meanwhile count until a task
/// takes them. More are refused.
const MOST_WAITING: usize = 1024;

/// A timer of a task: whether it has fired, and the task.
#[derive(Debug)]
pub(super) enum Alarm {
    Set(Waker),
    Rung,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Desk {
    /// The connections that are not over, by slot.
    lines: Vec<Option<Rc<Line>>>,
    pub(super) listeners: BTreeMap<ListenerId, Backlog>,
    /// The listeners whose peers wait for an answer. `None`: nobody answers any more.
    pub(super) gates: BTreeMap<ListenerId, Option<Waiting>>,
    pub(super) timers: BTreeMap<TimerId, Alarm>,
    pub(super) calls: Calls<Rc<Reply>>,
    /// Tasks to wake when the turn is over.
    pub(super) ready: Vec<Waker>,
}

impl Desk {
    /// Adds a connection.
    pub(super) fn add(&mut self, line: &Rc<Line>) {
        let slot = line.id.slot();
        if self.lines.len() <= slot {
            self.lines.resize_with(slot + 1, || None);
        }
        self.lines[slot] = Some(Rc::clone(line));
    }

    /// The program has released a connection: it is closed, behind the requests that tasks still answer.
    pub(super) fn close(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let mut asked = Default::default();
        self.change(conn, |line, _| asked = line.requests.borrow_mut().take());
        asked.into_iter().for_each(|(request, _)| self.calls.dismiss(cx, request));
        self.forget(conn);
        self.calls.finish(cx, conn);
    }

    /// The program has let go of a connection: nothing of it is kept any more.
    pub(super) fn forget(&mut self, conn: ConnectionId) {
        let line = self.lines.get_mut(conn.slot());
        if let Some(line) = line.filter(|line| line.as_ref().is_some_and(|line| line.id == conn)) {
            *line = None;
        }
    }

    /// Takes a listener away; returns the connections that nobody has accepted.
    pub(super) fn stop_listening(&mut self, listener: ListenerId) -> Vec<ConnectionId> {
        self.gates.remove(&listener);
        let lines = self.listeners.remove(&listener).map(|backlog| backlog.borrow_mut().take()).unwrap_or_default();
        let left: Vec<_> = lines.iter().map(|line| line.id).collect();
        left.iter().for_each(|&conn| self.forget(conn));
        left
    }

    /// Refuses the peers that wait at a gate, and notes that nobody answers any more.
    pub(super) fn close_gate(&mut self, cx: &mut Context<'_>, listener: ListenerId) {
        let Some(waiting) = self.gates.get_mut(&listener).and_then(Option::take) else { return };
        let mut waiting = waiting.borrow_mut();
        waiting.take().into_iter().for_each(|conn| _ = cx.judge(conn, Err(NOBODY_ANSWERS.into())));
        waiting.end(&mut self.ready);
    }

    /// Changes a connection, with the list of tasks to wake.
    #[inline]
    fn change(&mut self, conn: ConnectionId, change: impl FnOnce(&Line, &mut Vec<Waker>)) {
        let Self { lines, ready, .. } = self;
        if let Some(line) = lines.get(conn.slot()).and_then(Option::as_ref).filter(|line| line.id == conn) {
            change(line, ready);
        }
    }

    /// Gives a turn to each task that waits for room on a connection, as far as there is room. They are woken with the turn of the
    /// reactor.
    pub(super) fn call_writers(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.change(conn, |line, ready| line.account.borrow_mut().writers.call(cx, conn, ready));
    }

    /// Handles a message of a connection that carries calls.
    pub(super) fn carried(&mut self, cx: &mut Context<'_>, line: &Line, message: impl Deref<Target = [u8]>) {
        let Self { calls, ready, .. } = self;
        match calls.on_recv(cx, line.id, message) {
            // It is copied: requests and answers that wait for their tasks hold no receive of the connection.
            Some(CallEvent::Request { id, payload }) => {
                ready.extend(line.requests.borrow_mut().add((id, payload.to_vec())));
            }
            Some(CallEvent::Answer { tag, payload, .. }) => ready.extend(tag.set(Ok(payload.to_vec()))),
            Some(CallEvent::Failed(failed)) => ready.extend(failed.tag.set(Err(failed.error))),
            _ => {}
        }
    }

    /// Notifies the tasks whose calls have ended without an answer.
    fn end_calls(&mut self) {
        let Self { calls, ready, .. } = self;
        while let Some(failed) = calls.next_failed() {
            ready.extend(failed.tag.set(Err(failed.error)));
        }
    }

    fn end(&mut self, conn: ConnectionId, end: End) {
        self.change(conn, |line, ready| {
            line.inbox.borrow_mut().end(ready);
            line.requests.borrow_mut().end(ready);
            let mut account = line.account.borrow_mut();
            account.end = Some(end);
            account.writers.end(ready);
            account.call_watchers(ready);
        });
        self.forget(conn);
    }
}

impl Handler for Desk {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let known = self.lines.get(conn.slot()).and_then(Option::as_ref).is_some_and(|line| line.id == conn);
        if known {
            return self.change(conn, |line, ready| {
                let mut account = line.account.borrow_mut();
                account.up = true;
                account.call_watchers(ready);
            });
        }
        // A connection that nobody listens for any more, or that the program has given up while it came up, or that comes up in a drain.
        let backlog = cx.listener(conn).and_then(|listener| self.listeners.get_mut(&listener));
        let Some(backlog) = backlog.filter(|backlog| !backlog.borrow().is_over()) else { return cx.close(conn) };
        let line = Line::new(conn);
        line.account.borrow_mut().up = true;
        self.ready.extend(backlog.borrow_mut().add(Rc::clone(&line)));
        self.add(&line);
    }

    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: &PeerIdentity) -> Result<(), String> {
        let Some(gate) = cx.listener(conn).and_then(|listener| self.gates.get(&listener)) else { return Ok(()) };
        let mut waiting = gate.as_ref().ok_or(NOBODY_ANSWERS)?.borrow_mut();
        if waiting.len() >= MOST_WAITING {
            return Err("too many peers wait for an answer here".into());
        }
        cx.postpone_judgement(conn);
        self.ready.extend(waiting.add(conn));
        Ok(())
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let line = self.lines.get(conn.slot()).and_then(Option::as_ref).filter(|line| line.id == conn);
        // A connection that nobody holds any more may have requests that tasks still answer. It accepts no others.
        let Some(line) = line else { return drop(self.calls.on_recv(cx, conn, message)) };
        if line.carries_calls.get() {
            let line = Rc::clone(line);
            return self.carried(cx, &line, message);
        }
        self.ready.extend(line.inbox.borrow_mut().add(message.detach()));
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        self.change(conn, |line, ready| {
            if let Some(awaited) = line.account.borrow_mut().operations.get_mut(&send.sequence()) {
                awaited.outcome = Some(outcome);
                ready.extend(awaited.waker.take());
            }
        });
    }

    fn on_transfer(&mut self, _: &mut Context<'_>, conn: ConnectionId, transfer: TransferId, end: TransferEnd) {
        self.change(conn, |line, ready| {
            if let Some(awaited) = line.account.borrow_mut().transfers.get_mut(&transfer) {
                awaited.end = Some(end);
                ready.extend(awaited.waker.take());
            }
        });
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
        self.change(conn, |line, ready| {
            let mut account = line.account.borrow_mut();
            account.writers.reopen();
            account.writers.call(cx, conn, ready);
        });
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.calls.on_disconnect(conn, &reason);
        self.end_calls();
        self.end(conn, End::Disconnected(reason));
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.end(conn, End::NeverUp(error));
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
        if self.calls.on_timer(cx, timer) {
            return self.end_calls();
        }
        let alarm = self.timers.get_mut(&timer).map(|alarm| std::mem::replace(alarm, Alarm::Rung));
        if let Some(Alarm::Set(waker)) = alarm {
            self.ready.push(waker);
        }
    }

    fn on_drain(&mut self, cx: &mut Context<'_>, _: Duration) {
        for backlog in self.listeners.values() {
            backlog.borrow_mut().end(&mut self.ready);
        }
        for waiting in self.gates.values().flatten() {
            waiting.borrow_mut().end(&mut self.ready);
        }
        let Self { lines, calls, .. } = self;
        if !lines.iter().flatten().any(|line| line.carries_calls.get()) {
            return cx.close_all();
        }
        // Calls and requests end in order, within the deadline. A connection without any is closed at once.
        lines.iter().flatten().for_each(|line| calls.finish(cx, line.id));
    }
}
