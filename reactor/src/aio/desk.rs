//! The handler behind the futures: it keeps what arrives until a task takes it, and notes which tasks to wake.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use crate::{
    ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, ListenerId, Message, Outcome,
    SendId, TimerId,
};

/// The tasks that wait for something.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// Mostly there is one.
    first: Option<Waker>,
    others: Vec<Waker>,
}

impl Waiters {
    /// Adds a task, once.
    #[inline]
    pub(super) fn add(&mut self, waker: &Waker) {
        match &self.first {
            None => self.first = Some(waker.clone()),
            Some(known) if known.will_wake(waker) => {}
            Some(_) if self.others.iter().any(|known| known.will_wake(waker)) => {}
            Some(_) => self.others.push(waker.clone()),
        }
    }

    #[inline]
    fn wake(&mut self, ready: &mut Vec<Waker>) {
        if let Some(first) = self.first.take() {
            ready.push(first);
            ready.append(&mut self.others);
        }
    }
}

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
    pub(super) waiters: Waiters,
}

/// The account of a connection.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) up: bool,
    /// Messages that nobody has received yet. Each takes a receive of the connection, or room for large messages.
    pub(super) inbox: VecDeque<DetachedMessage>,
    pub(super) end: Option<End>,
    /// Operations that tasks wait for, by their positions among all sends.
    pub(super) operations: BTreeMap<u64, Awaited>,
    /// Tasks that wait for a message.
    pub(super) readers: Waiters,
    /// Tasks that wait for room.
    pub(super) writers: Waiters,
    /// Tasks that wait for the connection to be up, or to end.
    pub(super) watchers: Waiters,
}

/// A connection, shared by the desk and by the program's handles.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) id: ConnectionId,
    pub(super) account: RefCell<Account>,
}

impl Line {
    pub(super) fn new(id: ConnectionId) -> Rc<Self> {
        Rc::new(Self { id, account: RefCell::default() })
    }
}

/// The connections that came through a listener and that nobody has accepted yet.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    pub(super) lines: VecDeque<Rc<Line>>,
    pub(super) waiters: Waiters,
    /// Nothing comes any more.
    pub(super) over: bool,
}

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
    pub(super) timers: BTreeMap<TimerId, Alarm>,
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

    /// The program has let go of a connection: nothing of it is kept any more.
    pub(super) fn forget(&mut self, conn: ConnectionId) {
        if let Some(line) = self.lines.get_mut(conn.slot())
            && line.as_ref().is_some_and(|line| line.id == conn)
        {
            *line = None;
        }
    }

    /// Takes a listener away; returns the connections that nobody has accepted.
    pub(super) fn stop_listening(&mut self, listener: ListenerId) -> Vec<ConnectionId> {
        let lines = self.listeners.remove(&listener).map(|backlog| backlog.lines).unwrap_or_default();
        let left: Vec<_> = lines.iter().map(|line| line.id).collect();
        left.iter().for_each(|&conn| self.forget(conn));
        left
    }

    /// Changes the account of a connection, with the list of tasks to wake.
    fn change(&mut self, conn: ConnectionId, change: impl FnOnce(&mut Account, &mut Vec<Waker>)) {
        let Self { lines, ready, .. } = self;
        if let Some(line) = lines.get(conn.slot()).and_then(Option::as_ref).filter(|line| line.id == conn) {
            change(&mut line.account.borrow_mut(), ready);
        }
    }

    fn end(&mut self, conn: ConnectionId, end: End) {
        self.change(conn, |account, ready| {
            account.end = Some(end);
            account.readers.wake(ready);
            account.writers.wake(ready);
            account.watchers.wake(ready);
        });
        self.forget(conn);
    }
}

impl Handler for Desk {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let known = self.lines.get(conn.slot()).and_then(Option::as_ref).is_some_and(|line| line.id == conn);
        if known {
            return self.change(conn, |account, ready| {
                account.up = true;
                account.watchers.wake(ready);
            });
        }
        // A connection that nobody listens for any more, or that the program has given up while it came up.
        let backlog = cx.listener(conn).and_then(|listener| self.listeners.get_mut(&listener));
        let Some(backlog) = backlog else { return cx.close(conn) };
        let line = Line::new(conn);
        line.account.borrow_mut().up = true;
        backlog.lines.push_back(Rc::clone(&line));
        backlog.waiters.wake(&mut self.ready);
        self.add(&line);
    }

    fn on_recv(&mut self, _: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.change(conn, |account, ready| {
            account.inbox.push_back(message.detach());
            account.readers.wake(ready);
        });
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        self.change(conn, |account, ready| {
            if let Some(awaited) = account.operations.get_mut(&send.sequence()) {
                awaited.outcome = Some(outcome);
                awaited.waiters.wake(ready);
            }
        });
    }

    fn on_writable(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.change(conn, |account, ready| account.writers.wake(ready));
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.end(conn, End::Disconnected(reason));
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.end(conn, End::NeverUp(error));
    }

    fn on_timer(&mut self, _: &mut Context<'_>, timer: TimerId, _: u64) {
        if let Some(alarm) = self.timers.get_mut(&timer)
            && let Alarm::Set(waker) = std::mem::replace(alarm, Alarm::Rung)
        {
            self.ready.push(waker);
        }
    }

    fn on_drain(&mut self, cx: &mut Context<'_>, _: Duration) {
        for backlog in self.listeners.values_mut() {
            backlog.over = true;
            backlog.waiters.wake(&mut self.ready);
        }
        cx.close_all();
    }
}
