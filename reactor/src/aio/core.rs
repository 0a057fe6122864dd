//! The reactor and its handler, which all futures of a thread share.

use std::cell::{Cell, RefCell, RefMut};
use std::fmt;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::handler::{NOT_APPROVED, TaskHandler};
use super::turns::{PendingTurn, Turns};
use crate::call::{CallId, RequestId};
use crate::{ConnectionId, Context, DetachedMessage, Error, ListenerId, Reactor, TimerId, TransferId, Turn};

/// The action of a dropped value. It is deferred if the reactor is in use at that moment.
#[derive(Debug)]
pub(super) enum DropAction {
    Close(ConnectionId),
    StopListening(ListenerId),
    /// A notified task does not wait for room any more: notifies the next ones.
    NotifyWaiters(ConnectionId),
    CancelTimer(TimerId),
    CancelTransfer(ConnectionId, TransferId),
    CancelCall(CallId),
    /// Dismisses a request that was dropped without an answer.
    Dismiss(RequestId),
    /// Refuses the peers that wait for approval, now and later.
    RefusePeers(ListenerId),
    /// Refuses a peer whose `PendingPeer` was dropped.
    RefusePeer(ConnectionId),
}

/// The shared reactor, see the [module](self). Wakers are called only while nothing is borrowed here: they may run code of the program.
pub(super) type Core = OneThreadOnly_UseSpawnLocal;

/// The type that the compiler names if a future is passed to a function that may run it on another thread, such as `tokio::spawn`.
#[allow(non_camel_case_types, reason = "the name is read in the compiler's message, where it is the cure")]
pub(super) struct OneThreadOnly_UseSpawnLocal {
    inner: RefCell<Inner>,
    deferred: RefCell<Vec<DropAction>>,
    /// The waker of the task that takes turns, while it waits in `TurnRequested`.
    pub(super) driver: Cell<Option<Waker>>,
    turns: Cell<Turns>,
}

struct Inner {
    reactor: Reactor,
    handler: TaskHandler,
}

impl fmt::Debug for OneThreadOnly_UseSpawnLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("turns", &self.turns).finish_non_exhaustive()
    }
}

impl OneThreadOnly_UseSpawnLocal {
    pub(super) fn new(reactor: Reactor) -> Self {
        Self {
            inner: RefCell::new(Inner { reactor, handler: TaskHandler::default() }),
            deferred: RefCell::default(),
            driver: Cell::default(),
            turns: Cell::default(),
        }
    }

    /// Makes a transition of [`Turns`].
    #[inline]
    pub(super) fn turns<R>(&self, change: impl FnOnce(&mut Turns) -> R) -> R {
        let mut turns = self.turns.get();
        let result = change(&mut turns);
        self.turns.set(turns);
        result
    }

    /// Calls `act` with the reactor.
    pub(super) fn reactor<R>(&self, act: impl FnOnce(&mut Reactor) -> R) -> R {
        act(&mut self.inner.borrow_mut().reactor)
    }

    /// Ends `AsyncReactor::run`: closes its last turn, and makes the descriptor readable, so that the next driver carries out the last
    /// requests. Does nothing if the reactor is in use, as it may be during a panic.
    pub(super) fn end_run(&self) {
        self.turns(Turns::end_run);
        if let Ok(mut inner) = self.inner.try_borrow_mut() {
            if let Err(error) = inner.reactor.arm(Turn::default()) {
                log::debug!("closing the last turn: {error}");
            }
            inner.reactor.handle().wake();
        }
    }

    /// Calls `act` with the context and the handler, and requests a turn.
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Context<'_>, &mut TaskHandler) -> R) -> R {
        self.lend(self.inner.borrow_mut(), act)
    }

    fn lend<R>(&self, mut inner: RefMut<'_, Inner>, act: impl FnOnce(&mut Context<'_>, &mut TaskHandler) -> R) -> R {
        let Inner { reactor, handler } = &mut *inner;
        if self.turns(Turns::request) {
            return act(&mut reactor.quiet_context(), handler);
        }
        // Waking the driver is enough: it takes a turn, so the descriptor need not become readable.
        let Some(driver) = self.driver.take() else { return act(&mut reactor.context(), handler) };
        let result = act(&mut reactor.quiet_context(), handler);
        drop(inner);
        driver.wake();
        result
    }

    /// Releases a message. If the reactor is in use, `message` keeps it, and its buffer is returned when the message is dropped.
    #[inline]
    pub(super) fn release(&self, message: &mut Option<DetachedMessage>) {
        if let Ok(inner) = self.inner.try_borrow_mut() {
            self.lend(inner, |cx, _| message.take().map(|message| cx.release(message)));
        }
    }

    /// Runs the action of a dropped value: now, or before the next turn if the reactor is in use.
    pub(super) fn run_or_defer(&self, action: DropAction) {
        match self.inner.try_borrow_mut() {
            Ok(inner) => self.lend(inner, |cx, handler| run_drop_action(cx, handler, action)),
            Err(_) => self.deferred.borrow_mut().push(action),
        }
    }

    /// Takes one turn, and wakes the tasks that it has notified. These will most likely send or request something, so if the driver is a
    /// task, the turn stays open for them: the next call resumes and closes it.
    pub(super) fn turn(&self, timeout: Option<Duration>) -> Result<Turn, Error> {
        self.advance(|reactor, handler, pending| {
            // If tasks were notified between turns, the turn must not sleep.
            let timeout = if handler.ready.is_empty() { timeout } else { Some(Duration::ZERO) };
            let rest = pending == PendingTurn::Rest && timeout == Some(Duration::ZERO);
            let mut turn = if rest { reactor.resume(handler)? } else { reactor.step(handler, timeout)? };
            if !handler.ready.is_empty() && self.turns(Turns::keep_open) {
                turn.more = true;
                return Ok(turn);
            }
            reactor.arm(turn)
        })
    }

    /// Takes one turn of `AsyncReactor::run`. First carries out the requests of tasks since the last turn. The turn sleeps if `idle` is set
    /// and no task was notified meanwhile.
    pub(super) fn turn_of_run(&self, idle: bool) -> Result<(), Error> {
        self.advance(|reactor, handler, pending| {
            if pending != PendingTurn::Nothing {
                reactor.resume(handler)?;
            }
            let timeout = if idle && handler.ready.is_empty() { None } else { Some(Duration::ZERO) };
            reactor.step(handler, timeout).map(drop)
        })
    }

    /// Carries out the last requests of tasks.
    pub(super) fn resume(&self) -> Result<Turn, Error> {
        self.advance(|reactor, handler, _| reactor.resume(handler))
    }

    /// Closes all listeners and connections, and takes turns until all have ended or the deadline has passed.
    pub(super) fn shutdown(&self, deadline: Duration) -> Result<(), Error> {
        self.advance(|reactor, handler, _| reactor.shutdown(handler, deadline))
    }

    /// Runs the deferred actions, then `act`, and wakes the tasks that were notified.
    fn advance<R>(&self, act: impl FnOnce(&mut Reactor, &mut TaskHandler, PendingTurn) -> R) -> R {
        loop {
            let Some(action) = self.deferred.borrow_mut().pop() else { break };
            self.with(|cx, handler| run_drop_action(cx, handler, action));
        }
        let pending = self.turns(Turns::begin);
        let (result, mut ready) = {
            let Inner { reactor, handler } = &mut *self.inner.borrow_mut();
            let result = act(reactor, handler, pending);
            if handler.ready.is_empty() {
                return result;
            }
            (result, std::mem::take(&mut handler.ready))
        };
        ready.drain(..).for_each(Waker::wake);
        // Keeps the memory of the list. A waker may have dropped a task whose turn passed to the next one: that one is notified later.
        let notified = &mut self.inner.borrow_mut().handler.ready;
        if notified.is_empty() {
            *notified = ready;
        }
        result
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.inner.borrow_mut().reactor.next_deadline()
    }
}

fn run_drop_action(cx: &mut Context<'_>, handler: &mut TaskHandler, action: DropAction) {
    match action {
        DropAction::Close(conn) => handler.close(cx, conn),
        DropAction::StopListening(listener) => {
            cx.close_listener(listener);
            handler.refuse_peers(cx, listener);
            handler.stop_listening(listener).into_iter().for_each(|conn| cx.close(conn));
        }
        DropAction::NotifyWaiters(conn) => handler.notify_room_waiters(cx, conn),
        DropAction::CancelTimer(timer) => {
            handler.timers.remove(&timer);
            cx.cancel_timer(timer);
        }
        DropAction::CancelTransfer(conn, transfer) => _ = cx.cancel_transfer(conn, transfer),
        DropAction::CancelCall(call) => _ = handler.calls.cancel(cx, call),
        DropAction::Dismiss(request) => handler.calls.dismiss(cx, request),
        DropAction::RefusePeers(listener) => handler.refuse_peers(cx, listener),
        DropAction::RefusePeer(conn) => _ = cx.judge(conn, Err(NOT_APPROVED.into())),
    }
}
