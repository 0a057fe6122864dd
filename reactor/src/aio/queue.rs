//! A queue of arrived items, such as messages, and of the tasks that wait for an item.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context as Task, Poll, Waker};

use super::wait_queue::{WaitQueue, WaiterId};

/// A queue of items, and of the tasks that wait for an item. A new item notifies at most one task.
#[derive(Debug)]
pub(super) struct AsyncQueue<T> {
    items: VecDeque<T>,
    waiters: WaitQueue,
    /// True once the queue has ended, that is, once no further item will be added. Tasks can still take the items that are in the queue.
    over: bool,
}

impl<T> Default for AsyncQueue<T> {
    fn default() -> Self {
        Self { items: VecDeque::new(), waiters: WaitQueue::default(), over: false }
    }
}

impl<T> AsyncQueue<T> {
    /// Adds an item. Returns the waker of the task that the item notifies; `None` if no task waits.
    #[inline]
    pub(super) fn add(&mut self, item: T) -> Option<Waker> {
        self.items.push_back(item);
        self.notify()
    }

    /// Ends the queue: the caller adds no further item. Notifies all waiting tasks, that is, adds their wakers to `ready`.
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

    /// Returns the number of items for which `is` returns true.
    pub(super) fn count(&self, is: impl Fn(&T) -> bool) -> usize {
        self.items.iter().filter(|item| is(item)).count()
    }

    /// Removes and returns all items.
    pub(super) fn take(&mut self) -> VecDeque<T> {
        std::mem::take(&mut self.items)
    }

    /// Notifies the task that has waited longest, if the queue has more items than notified tasks, or if the queue has ended. Returns the
    /// waker of the task; `None` if no task was notified.
    #[inline]
    fn notify(&mut self) -> Option<Waker> {
        let enough = self.over || self.items.len() > self.waiters.notified();
        if enough { self.waiters.notify() } else { None }
    }

    /// Removes the next item and returns it, if the task was notified or no task waits. Returns
    /// `Ready(None)` if the queue has ended and has no item. Otherwise queues the task, and returns
    /// `Pending`. `waiter` is the position of a queued task, and `None` for a task that is not
    /// queued.
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
        // Waking or dropping a waker may run code of the program, which may use this queue. So `next` is woken and `old` is dropped only
        // after the borrow `this` has ended.
        let (old, next) = match waiter {
            // A notified task finds no item if `take` has removed all items. The task then waits again.
            Some(waiter) if is_next => {
                this.waiters.requeue(waiter, task.waker());
                (None, None)
            }
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

    /// Removes a task from the queue, because its future was dropped. If the task was notified, the next task is notified instead.
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

/// The future that waits for the next item of a queue. Dropping the future removes the waiting task from the queue.
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
        if !crate::planted("a-dropped-future-stays-in-line") {
            AsyncQueue::stop_waiting(self.queue, &mut self.waiter);
        }
    }
}
