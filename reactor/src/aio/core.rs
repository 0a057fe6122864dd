//! The reactor and its desk, as all futures of a thread share them.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::desk::Desk;
use crate::{ConnectionId, Context, DetachedMessage, Error, ListenerId, Reactor, TimerId, Turn};

/// Something that a value does when it is dropped. It waits if the reactor is in use at that moment.
#[derive(Debug)]
pub(super) enum Farewell {
    Close(ConnectionId),
    Release(DetachedMessage),
    StopListening(ListenerId),
    Cancel(TimerId),
}

/// See the [module](self). Wakers are woken only while nothing is borrowed here: they may run code of the program.
pub(super) struct Core {
    inner: RefCell<Inner>,
    farewells: RefCell<Vec<Farewell>>,
    /// The task that takes turns, while it waits for something to be asked for.
    pub(super) driver: Cell<Option<Waker>>,
    /// Something was asked for since the last turn.
    pub(super) asked: Cell<bool>,
    /// `AsyncReactor::run` takes the turns.
    pub(super) runs: Cell<bool>,
}

struct Inner {
    reactor: Reactor,
    desk: Desk,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("asked", &self.asked).field("runs", &self.runs).finish_non_exhaustive()
    }
}

impl Core {
    pub(super) fn new(reactor: Reactor) -> Self {
        Self {
            inner: RefCell::new(Inner { reactor, desk: Desk::default() }),
            farewells: RefCell::default(),
            driver: Cell::default(),
            asked: Cell::new(false),
            runs: Cell::new(false),
        }
    }

    /// Lends the reactor.
    pub(super) fn reactor<R>(&self, act: impl FnOnce(&mut Reactor) -> R) -> R {
        act(&mut self.inner.borrow_mut().reactor)
    }

    /// Asks the reactor for something, and has a turn taken.
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Context<'_>, &mut Desk) -> R) -> R {
        let driver = self.driver.take();
        let result = {
            let Inner { reactor, desk } = &mut *self.inner.borrow_mut();
            // Whoever takes the turns takes one anyway, or is woken below.
            let seen_to = self.runs.get() || driver.is_some();
            let mut cx = if seen_to { reactor.quiet_context() } else { reactor.context() };
            act(&mut cx, desk)
        };
        self.asked.set(true);
        if let Some(driver) = driver {
            driver.wake();
        }
        result
    }

    /// Does what a value asks for that is dropped: now, or before the next turn if the reactor is in use.
    pub(super) fn part(&self, farewell: Farewell) {
        if self.inner.try_borrow_mut().is_ok() {
            self.with(|cx, desk| take_leave(cx, desk, farewell));
        } else {
            self.farewells.borrow_mut().push(farewell);
        }
    }

    /// Takes one turn, and wakes the tasks that it has news for.
    pub(super) fn turn(&self, timeout: Option<Duration>) -> Result<Turn, Error> {
        loop {
            let Some(farewell) = self.farewells.borrow_mut().pop() else { break };
            self.with(|cx, desk| take_leave(cx, desk, farewell));
        }
        self.asked.set(false);
        let (turn, mut ready) = {
            let Inner { reactor, desk } = &mut *self.inner.borrow_mut();
            let turn = reactor.turn(desk, timeout);
            (turn, std::mem::take(&mut desk.ready))
        };
        ready.drain(..).for_each(Waker::wake);
        // The list goes back with its memory. Nobody has put a waker into the new one: that happens in turns only.
        self.inner.borrow_mut().desk.ready = ready;
        turn
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.inner.borrow_mut().reactor.next_deadline()
    }
}

fn take_leave(cx: &mut Context<'_>, desk: &mut Desk, farewell: Farewell) {
    match farewell {
        Farewell::Close(conn) => {
            desk.forget(conn);
            cx.close(conn);
        }
        Farewell::Release(message) => cx.release(message),
        Farewell::StopListening(listener) => {
            cx.close_listener(listener);
            desk.stop_listening(listener).into_iter().for_each(|conn| cx.close(conn));
        }
        Farewell::Cancel(timer) => {
            desk.timers.remove(&timer);
            cx.cancel_timer(timer);
        }
    }
}
