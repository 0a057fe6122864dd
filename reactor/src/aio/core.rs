//! The reactor and its desk, as all futures of a thread share them.

use std::cell::{Cell, RefCell, RefMut};
use std::fmt;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::desk::Desk;
use crate::{ConnectionId, Context, DetachedMessage, Error, ListenerId, Reactor, TimerId, Turn};

/// Something that a value does when it is dropped. It waits if the reactor is in use at that moment.
#[derive(Debug)]
pub(super) enum Farewell {
    Close(ConnectionId),
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
    /// Whoever takes the turns waits for [`Core::asked`], too.
    pub(super) heeds_asked: Cell<bool>,
    /// The last turn left its end to the tasks that it had woken.
    unsettled: Cell<bool>,
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
            heeds_asked: Cell::new(false),
            unsettled: Cell::new(false),
            runs: Cell::new(false),
        }
    }

    /// Lends the reactor.
    pub(super) fn reactor<R>(&self, act: impl FnOnce(&mut Reactor) -> R) -> R {
        act(&mut self.inner.borrow_mut().reactor)
    }

    /// Makes the reactor's descriptor readable, unless the reactor is in use, as it may be in a panic.
    pub(super) fn ring(&self) {
        if let Ok(inner) = self.inner.try_borrow() {
            inner.reactor.remote().wake();
        }
    }

    /// Asks the reactor for something, and has a turn taken.
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Context<'_>, &mut Desk) -> R) -> R {
        self.lend(self.inner.borrow_mut(), act)
    }

    fn lend<R>(&self, mut inner: RefMut<'_, Inner>, act: impl FnOnce(&mut Context<'_>, &mut Desk) -> R) -> R {
        let Inner { reactor, desk } = &mut *inner;
        self.asked.set(true);
        if self.runs.get() {
            return act(&mut reactor.late_context(), desk);
        }
        // The task that takes the turns takes one anyway when it is woken.
        let Some(driver) = self.driver.take() else { return act(&mut reactor.context(), desk) };
        let result = act(&mut reactor.quiet_context(), desk);
        drop(inner);
        driver.wake();
        result
    }

    /// Gives a message back, unless the reactor is in use: then its buffer goes home when it is dropped.
    pub(super) fn release(&self, message: &mut DetachedMessage) {
        if let Ok(inner) = self.inner.try_borrow_mut() {
            self.lend(inner, |cx, _| cx.take_back(message));
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
    /// next call, which follows them, takes the rest of the turn, and prepares for a sleep.
    pub(super) fn turn(&self, timeout: Option<Duration>) -> Result<Turn, Error> {
        let rest = self.unsettled.take() && timeout == Some(Duration::ZERO);
        self.move_on(|reactor, desk| {
            let mut turn = if rest { reactor.follow_up(desk)? } else { reactor.turn_once(desk, timeout)? };
            if !desk.ready.is_empty() && self.heeds_asked.get() {
                self.unsettled.set(true);
                self.asked.set(true);
                turn.more = true;
            } else {
                turn.more = reactor.settle(turn.more)?;
            }
            Ok(turn)
        })
    }

    /// Sees to what tasks have asked for since the last turn of `AsyncReactor::run`, and takes the next one, which sleeps if
    /// `idle` is set and no task was woken meanwhile.
    pub(super) fn turn_of_run(&self, idle: bool) -> Result<(), Error> {
        let asked = self.asked.get();
        self.move_on(|reactor, desk| {
            if asked {
                reactor.follow_up(desk)?;
            }
            let timeout = if idle && desk.ready.is_empty() { None } else { Some(Duration::ZERO) };
            reactor.turn_once(desk, timeout).map(drop)
        })
    }

    /// Posts what tasks have asked for last.
    pub(super) fn follow_up(&self) -> Result<Turn, Error> {
        self.move_on(|reactor, desk| reactor.follow_up(desk))
    }

    /// Closes everything, and takes turns until all is gone.
    pub(super) fn shutdown(&self, deadline: Duration) -> Result<(), Error> {
        self.move_on(|reactor, desk| reactor.shutdown(desk, deadline))
    }

    /// Lets the reactor move on, and wakes the tasks that it has news for.
    fn move_on<R>(&self, act: impl FnOnce(&mut Reactor, &mut Desk) -> R) -> R {
        loop {
            let Some(farewell) = self.farewells.borrow_mut().pop() else { break };
            self.with(|cx, desk| take_leave(cx, desk, farewell));
        }
        self.asked.set(false);
        let (result, mut ready) = {
            let Inner { reactor, desk } = &mut *self.inner.borrow_mut();
            let result = act(reactor, desk);
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
        Farewell::Close(conn) => {
            desk.forget(conn);
            cx.close(conn);
        }
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
