//! A queue of arrived items, such as messages, and of the tasks that wait for one.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context as Task, Poll, Waker};

use super::wait_queue::{WaitQueue, WaiterId};

/// Items, and the tasks that wait for one. As many tasks are notified as there are items.
#[derive(Debug)]
pub(super) struct AsyncQueue<T> {
    items: VecDeque<T>,
    waiters: WaitQueue,
    /// True if no further item arrives.
    over: bool,
}

impl<T> Default for AsyncQueue<T> {
    fn default() -> Self {
        Self { items: VecDeque::new(), waiters: WaitQueue::default(), over: false }
    }
}

impl<T> AsyncQueue<T> {
    /// Adds an item. Returns the task to wake.
    #[inline]
    pub(super) fn add(&mut self, item: T) -> Option<Waker> {
        self.items.push_back(item);
        self.notify()
    }

    /// Ends the queue: no further item arrives. Adds the tasks to wake to `ready`.
    pub(super) fn end(&mut self, ready: &mut Vec<Waker>) {
        self.over = true;
        ready.extend(std::iter::from_fn(|| self.notify()));
    }

    pub(super) const fn is_over(&self) -> bool {
        self.over
    }

    /// Returns the number of items.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// Removes and returns all items.
    pub(super) fn take(&mut self) -> VecDeque<T> {
        std::mem::take(&mut self.items)
    }

    /// Notifies the next task if there is an item for it, or if the queue has ended. Returns its waker.
    #[inline]
    fn notify(&mut self) -> Option<Waker> {
        let enough = self.over || self.items.len() > self.waiters.notified();
        if enough { self.waiters.notify() } else { None }
    }

    /// Removes the next item if the task was notified, or if no task waits. `Ready(None)`: the queue is empty and has ended.
    pub(super) fn poll(queue: &RefCell<Self>, task: &Task<'_>, waiter: &mut Option<WaiterId>) -> Poll<Option<T>> {
        let mut this = queue.borrow_mut();
        let is_next = match waiter {
            Some(waiter) => this.waiters.is_notified(waiter),
            None => this.waiters.is_empty(),
        };
        if is_next && (this.over || !this.items.is_empty()) {
            let item = this.items.pop_front();
            if let Some(waiter) = waiter.take() {
                this.waiters.remove(waiter);
            }
            return Poll::Ready(item);
        }
        // Wakers are woken and dropped while nothing is borrowed.
        let (old, next) = match waiter {
            Some(waiter) => (this.waiters.set_waker(waiter, task.waker()), None),
            None => {
                *waiter = Some(this.waiters.push(0, 1, task.waker()));
                (None, this.notify())
            }
        };
        drop(this);
        drop(old);
        next.into_iter().for_each(Waker::wake);
        Poll::Pending
    }

    /// Removes a task from the queue. If the task was notified, notifies the next one instead.
    pub(super) fn stop_waiting(queue: &RefCell<Self>, waiter: &mut Option<WaiterId>) {
        let Some(waiter) = waiter.take() else { return };
        let mut this = queue.borrow_mut();
        let waker = this.waiters.remove(waiter);
        let next = if waker.is_none() { this.notify() } else { None };
        drop(this);
        drop(waker);
        next.into_iter().for_each(Waker::wake);
    }
}

/// The wait of a task for the next item. Dropping it removes the task from the queue.
pub(super) struct NextItem<'a, T> {
    queue: &'a RefCell<AsyncQueue<T>>,
    waiter: Option<WaiterId>,
}

impl<'a, T> NextItem<'a, T> {
    pub(super) const fn new(queue: &'a RefCell<AsyncQueue<T>>) -> Self {
        Self { queue, waiter: None }
    }
}

impl<T> Future for NextItem<'_, T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<Option<T>> {
        let this = &mut *self;
        AsyncQueue::poll(this.queue, task, &mut this.waiter)
    }
}

impl<T> Drop for NextItem<'_, T> {
    fn drop(&mut self) {
        if !cfg!(planted = "a-dropped-future-stays-in-line") {
            AsyncQueue::stop_waiting(self.queue, &mut self.waiter);
        }
    }
}
