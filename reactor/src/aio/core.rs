//! The reactor and its desk, as all futures of a thread share them.

use std::cell::{Cell, RefCell, RefMut};
use std::fmt;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::desk::{Desk, NOBODY_ANSWERS};
use super::turns::{Owed, Turns};
use crate::call::{CallId, RequestId};
use crate::{ConnectionId, Context, DetachedMessage, Error, ListenerId, Reactor, TimerId, TransferId, Turn};

/// Something that a value does when it is dropped. It waits if the reactor is in use at that moment.
#[derive(Debug)]
pub(super) enum Farewell {
    Close(ConnectionId),
    StopListening(ListenerId),
    /// A task that had its turn does not wait for room any more.
    PassOn(ConnectionId),
    Cancel(TimerId),
    /// Nobody waits for a transfer of a list any more.
    CancelTransfer(ConnectionId, TransferId),
    /// Nobody waits for the answer to a call any more.
    CancelCall(CallId),
    /// Nobody answers a request.
    Dismiss(RequestId),
    CloseGate(ListenerId),
    /// A peer has waited for an answer, and nobody gives one.
    Refuse(ConnectionId),
}

/// See the [module](self). Wakers are woken only while nothing is borrowed here: they may run code of the program.
pub(super) type Core = OneThreadOnly_UseSpawnLocal;

/// What the compiler names when a future is given to a function that may run it on another thread, such as `tokio::spawn`.
#[allow(non_camel_case_types, reason = "the name is read in the compiler's message, where it is the cure")]
pub(super) struct OneThreadOnly_UseSpawnLocal {
    inner: RefCell<Inner>,
    farewells: RefCell<Vec<Farewell>>,
    /// The task that takes turns, while it waits for something to be asked for.
    pub(super) driver: Cell<Option<Waker>>,
    turns: Cell<Turns>,
}

struct Inner {
    reactor: Reactor,
    desk: Desk,
}

impl fmt::Debug for OneThreadOnly_UseSpawnLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("turns", &self.turns).finish_non_exhaustive()
    }
}

impl OneThreadOnly_UseSpawnLocal {
    pub(super) fn new(reactor: Reactor) -> Self {
        Self {
            inner: RefCell::new(Inner { reactor, desk: Desk::default() }),
            farewells: RefCell::default(),
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

    /// Lends the reactor.
    pub(super) fn reactor<R>(&self, act: impl FnOnce(&mut Reactor) -> R) -> R {
        act(&mut self.inner.borrow_mut().reactor)
    }

    /// Ends the part of `AsyncReactor::run`: closes its last turn, and makes the descriptor readable, so that whoever takes turns
    /// next sees to what was asked for last. Does nothing if the reactor is in use, as it may be in a panic.
    pub(super) fn end_run(&self) {
        self.turns(Turns::end_run);
        if let Ok(mut inner) = self.inner.try_borrow_mut() {
            if let Err(error) = inner.reactor.arm(Turn::default()) {
                log::debug!("closing the last turn: {error}");
            }
            inner.reactor.handle().wake();
        }
    }

    /// Asks the reactor for something, and has a turn taken.
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Context<'_>, &mut Desk) -> R) -> R {
        self.lend(self.inner.borrow_mut(), act)
    }

    fn lend<R>(&self, mut inner: RefMut<'_, Inner>, act: impl FnOnce(&mut Context<'_>, &mut Desk) -> R) -> R {
        let Inner { reactor, desk } = &mut *inner;
        if self.turns(Turns::ask) {
            return act(&mut reactor.quiet_context(), desk);
        }
        // The task that takes the turns takes one anyway when it is woken.
        let Some(driver) = self.driver.take() else { return act(&mut reactor.context(), desk) };
        let result = act(&mut reactor.quiet_context(), desk);
        drop(inner);
        driver.wake();
        result
    }

    /// Releases a message. If the reactor is in use, the message stays, and its buffer goes home when it is dropped.
    #[inline]
    pub(super) fn release(&self, message: &mut Option<DetachedMessage>) {
        if let Ok(inner) = self.inner.try_borrow_mut() {
            self.lend(inner, |cx, _| message.take().map(|message| cx.release(message)));
        }
    }

    /// Does what a value asks for that is dropped: now, or before the next turn if the reactor is in use.
    pub(super) fn part(&self, farewell: Farewell) {
        match self.inner.try_borrow_mut() {
            Ok(inner) => self.lend(inner, |cx, desk| take_leave(cx, desk, farewell)),
            Err(_) => self.farewells.borrow_mut().push(farewell),
        }
    }

    /// Takes one turn, and wakes the tasks that it has news for. If there are any, they most likely ask for something: then the
    /// turn stays open, and the next call, which follows them, resumes and closes it.
    pub(super) fn turn(&self, timeout: Option<Duration>) -> Result<Turn, Error> {
        self.move_on(|reactor, desk, owed| {
            // Tasks that others have passed their turns on to are woken at once.
            let timeout = if desk.ready.is_empty() { timeout } else { Some(Duration::ZERO) };
            let rest = owed == Owed::Rest && timeout == Some(Duration::ZERO);
            let mut turn = if rest { reactor.resume(desk)? } else { reactor.step(desk, timeout)? };
            if !desk.ready.is_empty() && self.turns(Turns::leave_open) {
                turn.more = true;
                return Ok(turn);
            }
            reactor.arm(turn)
        })
    }

    /// Sees to what tasks have asked for since the last turn of `AsyncReactor::run`, and takes the next one, which sleeps if
    /// `idle` is set and no task was woken meanwhile.
    pub(super) fn turn_of_run(&self, idle: bool) -> Result<(), Error> {
        self.move_on(|reactor, desk, owed| {
            if owed != Owed::Nothing {
                reactor.resume(desk)?;
            }
            let timeout = if idle && desk.ready.is_empty() { None } else { Some(Duration::ZERO) };
            reactor.step(desk, timeout).map(drop)
        })
    }

    /// Posts what tasks have asked for last.
    pub(super) fn resume(&self) -> Result<Turn, Error> {
        self.move_on(|reactor, desk, _| reactor.resume(desk))
    }

    /// Closes everything, and takes turns until all is gone.
    pub(super) fn shutdown(&self, deadline: Duration) -> Result<(), Error> {
        self.move_on(|reactor, desk, _| reactor.shutdown(desk, deadline))
    }

    /// Lets the reactor move on, and wakes the tasks that it has news for.
    fn move_on<R>(&self, act: impl FnOnce(&mut Reactor, &mut Desk, Owed) -> R) -> R {
        loop {
            let Some(farewell) = self.farewells.borrow_mut().pop() else { break };
            self.with(|cx, desk| take_leave(cx, desk, farewell));
        }
        let owed = self.turns(Turns::pay);
        let (result, mut ready) = {
            let Inner { reactor, desk } = &mut *self.inner.borrow_mut();
            let result = act(reactor, desk, owed);
            if desk.ready.is_empty() {
                return result;
            }
            (result, std::mem::take(&mut desk.ready))
        };
        ready.drain(..).for_each(Waker::wake);
        // The list goes back with its memory. Nobody has put a waker into the new one: that happens in turns only.
        self.inner.borrow_mut().desk.ready = ready;
        result
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.inner.borrow_mut().reactor.next_deadline()
    }
}

fn take_leave(cx: &mut Context<'_>, desk: &mut Desk, farewell: Farewell) {
    match farewell {
        Farewell::Close(conn) => desk.close(cx, conn),
        Farewell::StopListening(listener) => {
            cx.close_listener(listener);
            desk.close_gate(cx, listener);
            desk.stop_listening(listener).into_iter().for_each(|conn| cx.close(conn));
        }
        Farewell::PassOn(conn) => desk.call_writers(cx, conn),
        Farewell::Cancel(timer) => {
            desk.timers.remove(&timer);
            cx.cancel_timer(timer);
        }
        Farewell::CancelTransfer(conn, transfer) => _ = cx.cancel_transfer(conn, transfer),
        Farewell::CancelCall(call) => _ = desk.calls.cancel(cx, call),
        Farewell::Dismiss(request) => desk.calls.dismiss(cx, request),
        Farewell::CloseGate(listener) => desk.close_gate(cx, listener),
        Farewell::Refuse(conn) => _ = cx.judge(conn, Err(NOBODY_ANSWERS.into())),
    }
}
