//! A queue of waiting tasks, in order of arrival.

use std::task::Waker;

/// The index that means "no entry". It is the field `previous` of the first entry of a chain, and the field `next` of the last entry.
const NONE: u32 = u32::MAX;

/// The id of a task in a queue: the index of its entry. The waiting future keeps the id, and removes the task with it.
#[derive(Debug)]
pub(super) struct WaiterId(u32);

#[derive(Debug)]
struct Waiter {
    /// The arrival number of the task. It orders the tasks of several queues.
    arrival: u64,
    /// The number of units, such as credits, that the task may use once it is notified.
    weight: u32,
    /// The waker of the task; `None` once the task is notified.
    waker: Option<Waker>,
    previous: u32,
    next: u32,
}

/// A queue of tasks that wait. `notify` selects the first task that is not notified yet, and returns its waker. The notified task stays in
/// the queue until it is removed or queued again. The queue allocates memory only when it has more tasks than at any earlier time. Pushing,
/// notifying and removing a task take constant time.
#[derive(Debug)]
pub(super) struct WaitQueue {
    waiters: Vec<Waiter>, // local: tasks that wait
    /// The index of the first unused entry of `waiters`. The field `next` of an unused entry is the index of the next unused entry.
    free: u32,
    /// `first` and `last` are the indices of the first and the last task in the chain of the tasks that are not notified.
    first: u32,
    last: u32,
    /// The sum of the weights of the notified tasks, which are not in the chain.
    notified: u32,
}

impl Default for WaitQueue {
    fn default() -> Self {
        Self { waiters: Vec::new(), free: NONE, first: NONE, last: NONE, notified: 0 }
    }
}

impl WaitQueue {
    /// Returns true if the queue has no task, not even a notified one.
    #[inline]
    pub(super) const fn is_empty(&self) -> bool {
        self.first == NONE && self.notified == 0
    }

    /// Returns the sum of the weights of the notified tasks.
    #[inline]
    pub(super) const fn notified(&self) -> usize {
        self.notified as usize
    }

    /// Returns the arrival number and the weight of the task that `notify` would select; `None` if all tasks are notified.
    pub(super) fn oldest(&self) -> Option<(u64, u32)> {
        self.waiters.get(self.first as usize).map(|waiter| (waiter.arrival, waiter.weight))
    }

    /// Adds a task at the end of the queue. `weight` must be more than 0: [`WaitQueue::is_empty`] recognizes notified tasks by the sum of
    /// their weights.
    pub(super) fn push(&mut self, arrival: u64, weight: u32, waker: &Waker) -> WaiterId {
        let waiter = Waiter { arrival, weight, waker: Some(waker.clone()), previous: NONE, next: NONE };
        let at = self.free;
        if let Some(unused) = self.waiters.get_mut(at as usize) {
            self.free = unused.next;
            *unused = waiter;
            self.link(at, self.last, NONE);
            return WaiterId(at);
        }
        let at = self.waiters.len() as u32;
        self.waiters.push(waiter);
        self.link(at, self.last, NONE);
        WaiterId(at)
    }

    /// Notifies the first task that is not notified yet. Returns its waker; `None` if there is no such task.
    #[inline]
    pub(super) fn notify(&mut self) -> Option<Waker> {
        let first = self.waiters.get_mut(self.first as usize)?;
        let waker = first.waker.take();
        self.notified += first.weight;
        self.unlink(self.first);
        waker
    }

    /// Returns true if the task is notified.
    #[inline]
    pub(super) fn is_notified(&self, id: &WaiterId) -> bool {
        self.waiters[id.0 as usize].waker.is_none()
    }

    /// Sets the waker of a task that is not notified. Returns the old waker if it was replaced. Returns `None` if the old waker wakes the
    /// same task. The caller must drop the returned waker while no `RefCell` is borrowed: dropping a waker may drop a task, whose
    /// destructors may use this queue.
    pub(super) fn set_waker(&mut self, id: &WaiterId, waker: &Waker) -> Option<Waker> {
        let known = self.waiters[id.0 as usize].waker.as_mut()?;
        if known.will_wake(waker) { None } else { Some(std::mem::replace(known, waker.clone())) }
    }

    /// Queues a notified task again, at its old position: before all tasks that arrived later. The search for this position is short,
    /// because it passes only earlier tasks that were also notified once and then queued again.
    pub(super) fn requeue(&mut self, id: &WaiterId, waker: &Waker) {
        let waiter = &mut self.waiters[id.0 as usize];
        waiter.waker = Some(waker.clone());
        self.notified -= waiter.weight;
        let (arrival, mut previous, mut next) = (waiter.arrival, NONE, self.first);
        while let Some(other) = self.waiters.get(next as usize).filter(|other| other.arrival < arrival) {
            (previous, next) = (next, other.next);
        }
        self.link(id.0, previous, next);
    }

    /// Removes a task. Returns `None` if the task was notified. Otherwise returns the waker of the task. The caller must drop the waker
    /// while no `RefCell` is borrowed, as with [`WaitQueue::set_waker`].
    pub(super) fn remove(&mut self, id: WaiterId) -> Option<Waker> {
        let at = id.0;
        let waiter = &mut self.waiters[at as usize];
        let waker = waiter.waker.take();
        match waker {
            Some(_) => self.unlink(at),
            None => self.notified -= waiter.weight,
        }
        self.waiters[at as usize].next = self.free;
        self.free = at;
        waker
    }

    /// Inserts the entry `at` into the chain between the entries `previous` and `next`. Each of these two may be `NONE`.
    #[inline]
    fn link(&mut self, at: u32, previous: u32, next: u32) {
        self.connect(previous, at);
        self.connect(at, next);
    }

    #[inline]
    fn unlink(&mut self, at: u32) {
        let Waiter { previous, next, .. } = self.waiters[at as usize];
        self.connect(previous, next);
    }

    /// Links two entries, so that `next` follows `previous`. If `previous` is `NONE`, `next` becomes the first entry of the chain. If
    /// `next` is `NONE`, `previous` becomes the last one.
    #[inline]
    fn connect(&mut self, previous: u32, next: u32) {
        match self.waiters.get_mut(previous as usize) {
            Some(waiter) => waiter.next = next,
            None => self.first = next,
        }
        match self.waiters.get_mut(next as usize) {
            Some(waiter) => waiter.previous = previous,
            None => self.last = previous,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Wake;

    use super::*;

    struct Task;

    impl Wake for Task {
        fn wake(self: Arc<Self>) {}
    }

    /// A task in the queue, and the state in which the test expects the task to be.
    struct Tried {
        arrival: u64,
        id: WaiterId,
        waker: Waker,
        notified: bool,
    }

    const fn weight(arrival: u64) -> u32 {
        1 + arrival as u32 % 3
    }

    /// Checks random sequences of operations. `notify` must always select the task that has waited longest. The number of allocated entries
    /// must not exceed the largest number of tasks that the queue ever had.
    #[test]
    fn the_task_that_has_waited_longest_is_called() {
        let (mut waiters, mut tasks, mut state, mut most) = (WaitQueue::default(), Vec::<Tried>::new(), 1_u64, 0);
        for arrival in 0..100_000 {
            // A linear congruential generator of random numbers, with the constants of Knuth's MMIX.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (action, at) = (state >> 62, (state >> 33) as usize % tasks.len().max(1));
            match action {
                0 if tasks.len() < 20 => {
                    let waker = Waker::from(Arc::new(Task));
                    tasks.push(Tried {
                        arrival,
                        id: waiters.push(arrival, weight(arrival), &waker),
                        waker,
                        notified: false,
                    });
                }
                1 => {
                    let first = tasks.iter_mut().filter(|task| !task.notified).min_by_key(|task| task.arrival);
                    let oldest = first.as_ref().map(|task| (task.arrival, weight(task.arrival)));
                    assert_eq!(waiters.oldest(), oldest);
                    let notified = waiters.notify();
                    assert!(notified.as_ref().map(Waker::data) == first.as_ref().map(|task| task.waker.data()));
                    first.into_iter().for_each(|task| task.notified = true);
                }
                2 if tasks.get(at).is_some_and(|task| task.notified) => {
                    waiters.requeue(&tasks[at].id, &tasks[at].waker);
                    tasks[at].notified = false;
                }
                3 if !tasks.is_empty() => {
                    let Tried { id, notified, .. } = tasks.swap_remove(at);
                    assert_eq!((waiters.is_notified(&id), waiters.remove(id).is_none()), (notified, notified));
                }
                _ => {}
            }
            most = most.max(tasks.len());
            let notified = tasks.iter().filter(|task| task.notified).map(|task| weight(task.arrival) as usize);
            assert_eq!(waiters.notified(), notified.sum::<usize>());
            assert_eq!((waiters.is_empty(), waiters.waiters.len()), (tasks.is_empty(), most));
        }
        assert_eq!(most, 20);
    }
}
