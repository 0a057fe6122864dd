//! Things that arrive, such as messages, until tasks take them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context as Task, Poll, Waker};

use super::waiters::{Place, Waiters};

/// Things that nobody has taken yet, and the tasks that wait for one. As many tasks have their turn as there are things.
#[derive(Debug)]
pub(super) struct Arrivals<T> {
    things: VecDeque<T>,
    waiters: Waiters,
    /// Nothing arrives any more.
    over: bool,
}

impl<T> Default for Arrivals<T> {
    fn default() -> Self {
        Self { things: VecDeque::new(), waiters: Waiters::default(), over: false }
    }
}

impl<T> Arrivals<T> {
    /// Adds a thing; returns the task to wake.
    #[inline]
    pub(super) fn add(&mut self, thing: T) -> Option<Waker> {
        self.things.push_back(thing);
        self.call()
    }

    /// Notes that nothing arrives any more; adds the tasks to wake.
    pub(super) fn end(&mut self, ready: &mut Vec<Waker>) {
        self.over = true;
        ready.extend(std::iter::from_fn(|| self.call()));
    }

    pub(super) const fn is_over(&self) -> bool {
        self.over
    }

    /// Number of things that nobody has taken.
    pub(super) fn len(&self) -> usize {
        self.things.len()
    }

    /// Takes all things.
    pub(super) fn take(&mut self) -> VecDeque<T> {
        std::mem::take(&mut self.things)
    }

    /// Gives the next task its turn, if there is something for it; returns its waker.
    #[inline]
    fn call(&mut self) -> Option<Waker> {
        let enough = self.over || self.things.len() > self.waiters.called();
        if enough { self.waiters.call() } else { None }
    }

    /// Takes the next thing when it is the task's turn; `None`: all are taken, and nothing arrives any more.
    pub(super) fn poll(arrivals: &RefCell<Self>, task: &Task<'_>, place: &mut Option<Place>) -> Poll<Option<T>> {
        let mut this = arrivals.borrow_mut();
        let is_next = match place {
            Some(place) => this.waiters.has_turn(place),
            None => this.waiters.is_empty(),
        };
        if is_next && (this.over || !this.things.is_empty()) {
            let thing = this.things.pop_front();
            if let Some(place) = place.take() {
                this.waiters.leave(place);
            }
            return Poll::Ready(thing);
        }
        // Wakers are woken and dropped while nothing is borrowed.
        let (old, next) = match place {
            Some(place) => (this.waiters.renew(place, task.waker()), None),
            None => {
                *place = Some(this.waiters.join(0, 1, task.waker()));
                (None, this.call())
            }
        };
        drop(this);
        drop(old);
        next.into_iter().for_each(Waker::wake);
        Poll::Pending
    }

    /// Leaves the line. The next task has the turn of one that had it.
    pub(super) fn give_up(arrivals: &RefCell<Self>, place: &mut Option<Place>) {
        let Some(place) = place.take() else { return };
        let mut this = arrivals.borrow_mut();
        let waker = this.waiters.leave(place);
        let next = if waker.is_none() { this.call() } else { None };
        drop(this);
        drop(waker);
        next.into_iter().for_each(Waker::wake);
    }
}

/// The wait for the next thing. It leaves the line when it is dropped.
pub(super) struct Next<'a, T> {
    arrivals: &'a RefCell<Arrivals<T>>,
    place: Option<Place>,
}

impl<'a, T> Next<'a, T> {
    pub(super) const fn new(arrivals: &'a RefCell<Arrivals<T>>) -> Self {
        Self { arrivals, place: None }
    }
}

impl<T> Future for Next<'_, T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<Option<T>> {
        let this = &mut *self;
        Arrivals::poll(this.arrivals, task, &mut this.place)
    }
}

impl<T> Drop for Next<'_, T> {
    fn drop(&mut self) {
        if !cfg!(planted = "a-dropped-future-stays-in-line") {
            Arrivals::give_up(self.arrivals, &mut self.place);
        }
    }
}
