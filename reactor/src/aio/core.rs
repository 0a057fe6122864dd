//! The shared part of an [`super::AsyncReactor`]: the reactor and its handler. All futures of the reactor use it.

use std::cell::{Cell, RefCell, RefMut};
use std::fmt;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::handler::{TaskHandler, TimerState};
use super::turns::{PendingTurn, Turns};
use crate::approval::NOT_APPROVED;
use crate::call::{CallId, RequestId};
use crate::{
    ConnectionId, Context, DetachedMessage, Error, ListenerId, Reactor, ReactorHandle, TimerId, TransferId, Turn,
};

/// The action of a destructor. For example, the destructor of the last handle of a connection closes the connection. If the reactor is
/// borrowed while the destructor runs, the action is deferred until the next turn.
#[derive(Debug)]
pub(super) enum DropAction {
    Close(ConnectionId),
    StopListening(ListenerId),
    /// Notifies the next tasks that wait for room on this connection, because a notified task has left its queue.
    NotifyWaiters(ConnectionId),
    CancelTimer(TimerId),
    CancelTransfer(ConnectionId, TransferId),
    CancelCall(CallId),
    /// Ends a request that was dropped without an answer: its caller gets `CallError::Unanswered`.
    Dismiss(RequestId),
    /// Refuses the peers that wait for approval on a listener, and all peers that arrive there later.
    RefusePeers(ListenerId),
    /// Refuses a peer whose `PendingPeer` was dropped.
    RefusePeer(ConnectionId),
}

/// The shared reactor and its handler. Wakers are called only while the field `inner` is not borrowed, because a waker may run code of the
/// program, and that code may use the reactor.
pub(super) type Core = OneThreadOnly_UseSpawnLocal;

/// The shared reactor. This type is not `Send`. If a program passes a future of this module to a function that may run it on another
/// thread, such as `tokio::spawn`, the compiler's error prints the name of this type: so the name says what to do instead.
#[allow(non_camel_case_types, reason = "the name is read in the compiler's message, where it is the cure")]
pub(super) struct OneThreadOnly_UseSpawnLocal {
    inner: RefCell<Inner>,
    deferred: RefCell<Vec<DropAction>>, // local: destructors of the program's values
    /// Makes the reactor's descriptor readable, also while `inner` is borrowed.
    remote: ReactorHandle,
    /// The waker of the task that takes the reactor's turns: `Some` while that task waits in `TurnRequested`, and `None` otherwise.
    pub(super) driver: Cell<Option<Waker>>,
    turns: Cell<Turns>,
}

struct Inner {
    reactor: Reactor,
    handler: TaskHandler,
}

/// Calls a waker when it is dropped, also if a panic drops it.
struct WakeOnDrop(Waker);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.wake_by_ref();
    }
}

/// The wakers of the tasks to wake, in reverse order. Dropping this value returns the vector to the
/// handler. If a waker has panicked, the next turn wakes the remaining tasks.
struct Notified<'a> {
    core: &'a Core,
    ready: Vec<Waker>, // bound: turn
}

impl Drop for Notified<'_> {
    fn drop(&mut self) {
        self.ready.reverse();
        let left = !self.ready.is_empty();
        // The call of a waker may have dropped a notified task. In that case, the next waiting task
        // was notified instead, and its waker is in a new vector of the handler.
        let Ok(mut inner) = self.core.inner.try_borrow_mut() else { return };
        self.ready.append(&mut inner.handler.ready);
        inner.handler.ready = std::mem::take(&mut self.ready);
        drop(inner);
        if left {
            self.core.remote.wake();
        }
    }
}

impl fmt::Debug for OneThreadOnly_UseSpawnLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("turns", &self.turns).finish_non_exhaustive()
    }
}

impl OneThreadOnly_UseSpawnLocal {
    pub(super) fn new(reactor: Reactor) -> Self {
        let remote = reactor.handle();
        Self {
            inner: RefCell::new(Inner { reactor, handler: TaskHandler::default() }),
            deferred: RefCell::default(),
            remote,
            driver: Cell::default(),
            turns: Cell::default(),
        }
    }

    /// Calls `change` with the state of the turns, stores the changed state, and returns the result of `change`.
    #[inline]
    pub(super) fn turns<R>(&self, change: impl FnOnce(&mut Turns) -> R) -> R {
        let mut turns = self.turns.get();
        let result = change(&mut turns);
        self.turns.set(turns);
        result
    }

    /// Calls `act` with the reactor, and returns the result of `act`. Unlike `with`, this function requests no turn.
    pub(super) fn reactor<R>(&self, act: impl FnOnce(&mut Reactor) -> R) -> R {
        act(&mut self.inner.borrow_mut().reactor)
    }

    /// Makes the program the driver again: completes the last turn of `AsyncReactor::run` or
    /// `drive`, and makes the reactor's descriptor readable, so that the program takes a further
    /// turn. That turn carries out the last requests of the tasks. If the reactor is borrowed,
    /// which is possible during a panic, this function only records who the driver is.
    pub(super) fn end_driver(&self) {
        self.turns(Turns::end_driver);
        if let Ok(mut inner) = self.inner.try_borrow_mut() {
            if let Err(error) = inner.reactor.arm(Turn::default()) {
                log::debug!("closing the last turn: {error}");
            }
            inner.reactor.handle().wake();
        }
    }

    /// Calls `act` with the context and the handler. Requests a turn, which carries out the operations that `act` requests.
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Context<'_>, &mut TaskHandler) -> R) -> R {
        self.lend(self.inner.borrow_mut(), act)
    }

    fn lend<R>(&self, mut inner: RefMut<'_, Inner>, act: impl FnOnce(&mut Context<'_>, &mut TaskHandler) -> R) -> R {
        if self.turns(Turns::request) {
            let Inner { reactor, handler } = &mut *inner;
            return act(&mut reactor.quiet_context(), handler);
        }
        // If a task drives the reactor, waking that task is enough: the task then takes a turn. This saves the system call that would make
        // the descriptor readable.
        let Some(driver) = self.driver.take() else {
            let Inner { reactor, handler } = &mut *inner;
            let rung = !handler.ready.is_empty();
            let result = act(&mut reactor.context(), handler);
            // If `act` has notified tasks, but requested no operation of the reactor, the context
            // has not made the descriptor readable. But a turn is needed, because it wakes the
            // notified tasks.
            if !rung && !handler.ready.is_empty() {
                self.ring();
            }
            return result;
        };
        // The driver is also woken if `act` panics, because `act` may have requested operations before. The variable `lent` is declared
        // after `_driver`, so it is dropped first: the reactor is not borrowed any more when the driver is woken.
        let _driver = WakeOnDrop(driver);
        let mut lent = inner;
        let Inner { reactor, handler } = &mut *lent;
        act(&mut reactor.quiet_context(), handler)
    }

    /// Makes the descriptor readable if the program takes the turns ([`Turns::Program`]), because
    /// the program may wait only for the descriptor. Drivers of the other kinds take their next
    /// turn even if the descriptor is not readable.
    #[cold]
    fn ring(&self) {
        if matches!(self.turns.get(), Turns::Program { .. }) {
            self.remote.wake();
        }
    }

    /// Releases a message: its receive buffer returns to the connection immediately. If the reactor is borrowed, the message stays in
    /// `message`. When the caller then drops `message`, the buffer returns in the next turn.
    #[inline]
    pub(super) fn release(&self, message: &mut Option<DetachedMessage>) {
        if let Ok(inner) = self.inner.try_borrow_mut() {
            self.lend(inner, |cx, _| message.take().map(|message| cx.release(message)));
        }
    }

    /// Runs the action of a destructor immediately. If the reactor is borrowed, defers the action until the next turn.
    pub(super) fn run_or_defer(&self, action: DropAction) {
        match self.inner.try_borrow_mut() {
            // The result is dropped after the borrow of the reactor has ended.
            Ok(inner) => drop(self.lend(inner, |cx, handler| run_drop_action(cx, handler, action))),
            Err(_) => {
                self.deferred.borrow_mut().push(action);
                self.ring();
            }
        }
    }

    /// Takes one turn, and wakes the tasks that were notified. These tasks most likely request operations, such as sends. So if a task of
    /// the executor takes the turns, this function does not complete the turn ([`Reactor::step`]). The next call of this function carries
    /// out the requests of the woken tasks, and completes the same turn. That costs less than a new turn.
    pub(super) fn turn(&self, timeout: Option<Duration>) -> Result<Turn, Error> {
        self.advance(|reactor, handler, pending| {
            // If a task was notified since the last turn, this turn must not block.
            let timeout = if handler.ready.is_empty() { timeout } else { Some(Duration::ZERO) };
            let rest = pending == PendingTurn::Rest && timeout == Some(Duration::ZERO);
            let mut turn = if rest { reactor.resume(handler)? } else { reactor.step(handler, timeout)? };
            if !handler.ready.is_empty() && self.turns(|turns| turns.keep_open(rest)) {
                turn.more = true;
                return Ok(turn);
            }
            reactor.arm(turn)
        })
    }

    /// Takes one turn of `AsyncReactor::run`. First carries out the requests that tasks have made since the last turn. Then polls for
    /// events. The poll blocks only if `idle` is true, and if carrying out the requests has notified no task. `idle` is true if the future
    /// that `run` polls was not woken.
    pub(super) fn turn_of_run(&self, idle: bool) -> Result<(), Error> {
        self.advance(|reactor, handler, pending| {
            if pending != PendingTurn::Nothing {
                reactor.resume(handler)?;
            }
            let timeout = if idle && handler.ready.is_empty() { None } else { Some(Duration::ZERO) };
            reactor.step(handler, timeout).map(drop)
        })
    }

    /// Carries out the requests that tasks have made since the last turn.
    pub(super) fn resume(&self) -> Result<Turn, Error> {
        self.advance(|reactor, handler, _| reactor.resume(handler))
    }

    /// Closes all listeners and connections, and takes turns until all have ended or the deadline has passed. Then notifies the tasks that
    /// wait on the listeners.
    pub(super) fn shutdown(&self, deadline: Duration) -> Result<(), Error> {
        self.advance(|reactor, handler, _| {
            let ended = reactor.shutdown(handler, deadline);
            handler.end_listeners();
            ended
        })
    }

    /// Runs the deferred actions of destructors, and then `act`. Then wakes the tasks that the actions and `act` have notified. Returns the
    /// result of `act`.
    fn advance<R>(&self, act: impl FnOnce(&mut Reactor, &mut TaskHandler, PendingTurn) -> R) -> R {
        loop {
            let Some(action) = self.deferred.borrow_mut().pop() else { break };
            drop(self.with(|cx, handler| run_drop_action(cx, handler, action)));
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
        ready.reverse();
        let mut notified = Notified { core: self, ready };
        while let Some(waker) = notified.ready.pop() {
            waker.wake();
        }
        result
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.inner.borrow_mut().reactor.next_deadline()
    }
}

/// Runs the action of a destructor. Returns the removed state of a timer, which may contain a waker. Dropping a waker may drop its task,
/// whose destructors may use the reactor. So the caller must drop the result while the reactor is not borrowed.
fn run_drop_action(cx: &mut Context<'_>, handler: &mut TaskHandler, action: DropAction) -> Option<TimerState> {
    match action {
        DropAction::Close(conn) => handler.close(cx, conn),
        DropAction::StopListening(listener) => {
            cx.listeners().close(listener);
            handler.refuse_peers(cx, listener);
            handler.stop_listening(listener).into_iter().for_each(|conn| cx.close(conn));
        }
        DropAction::NotifyWaiters(conn) => handler.notify_room_waiters(cx, conn),
        DropAction::CancelTimer(timer) => {
            cx.timers().cancel(timer);
            return handler.timers.remove(&timer);
        }
        DropAction::CancelTransfer(conn, transfer) => _ = cx.remote(conn).cancel_transfer(transfer),
        DropAction::CancelCall(call) => _ = handler.calls.cancel(cx, call),
        DropAction::Dismiss(request) => handler.dismiss(cx, request),
        DropAction::RefusePeers(listener) => handler.refuse_peers(cx, listener),
        DropAction::RefusePeer(conn) => _ = cx.connection(conn).judge(Err(NOT_APPROVED.into())),
    }
    None
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;
    use crate::{Config, ProviderChoice};

    /// A waker that counts its calls, and panics at the second one.
    #[derive(Default)]
    struct PanicsOnce(AtomicUsize);

    impl Wake for PanicsOnce {
        fn wake(self: Arc<Self>) {
            assert!(self.0.fetch_add(1, Ordering::Relaxed) != 1, "a planted panic");
        }
    }

    /// If the waker of a task panics, the tasks that were notified with it are woken in the next
    /// turn.
    #[test]
    fn a_panic_of_a_waker_leaves_the_others_to_the_next_turn() {
        let reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp)).expect("a reactor");
        let (core, waker) = (Core::new(reactor), Arc::new(PanicsOnce::default()));
        let woken = || waker.0.load(Ordering::Relaxed);
        let wakers = (0..4).map(|_| Waker::from(Arc::clone(&waker)));
        core.with(|_, handler| handler.ready.extend(wakers));
        let turn = || core.turn(Some(Duration::ZERO)).map(drop);
        assert!(catch_unwind(AssertUnwindSafe(turn)).is_err());
        assert_eq!(woken(), 2);
        turn().expect("a turn");
        assert_eq!(woken(), 4);
        turn().expect("a turn");
        assert_eq!(woken(), 4);
    }
}
