//! The tasks that wait for one thing, in order of arrival.

use std::task::Waker;

/// The index of no entry.
const NONE: u32 = u32::MAX;

/// The place of a task in a line. Its future holds it, and leaves the line with it.
#[derive(Debug)]
pub(super) struct Place(u32);

#[derive(Debug)]
struct Entry {
    /// Number of the arrival, which decides between several lines.
    arrival: u64,
    /// How much the task may take when it has its turn.
    weight: u32,
    /// The task; `None` while it has its turn.
    waker: Option<Waker>,
    before: u32,
    behind: u32,
}

/// A line of tasks. The first one is called when there is something for it; then it has its turn, until it leaves or goes back.
/// Memory is allocated only when more tasks wait than ever before. A task that comes, is called or leaves takes constant time.
#[derive(Debug)]
pub(super) struct Waiters {
    entries: Vec<Entry>,
    /// The first of the entries that are not in use, chained by `behind`.
    free: u32,
    /// The ends of the chain of tasks that have no turn yet.
    first: u32,
    last: u32,
    /// The sum of the weights of those that have their turn.
    called: u32,
}

impl Default for Waiters {
    fn default() -> Self {
        Self { entries: Vec::new(), free: NONE, first: NONE, last: NONE, called: 0 }
    }
}

impl Waiters {
    /// Returns true if no task waits, and none has its turn.
    #[inline]
    pub(super) const fn is_empty(&self) -> bool {
        self.first == NONE && self.called == 0
    }

    /// Returns how much the tasks may take that have their turn.
    #[inline]
    pub(super) const fn called(&self) -> usize {
        self.called as usize
    }

    /// Returns the arrival and the weight of the task that is called next.
    pub(super) fn oldest(&self) -> Option<(u64, u32)> {
        self.entries.get(self.first as usize).map(|entry| (entry.arrival, entry.weight))
    }

    /// Adds a task at the end of the line. Its weight is more than 0.
    pub(super) fn join(&mut self, arrival: u64, weight: u32, waker: &Waker) -> Place {
        let entry = Entry { arrival, weight, waker: Some(waker.clone()), before: NONE, behind: NONE };
        let at = self.free;
        if let Some(unused) = self.entries.get_mut(at as usize) {
            self.free = unused.behind;
            *unused = entry;
            self.link(at, self.last, NONE);
            return Place(at);
        }
        let at = self.entries.len() as u32;
        self.entries.push(entry);
        self.link(at, self.last, NONE);
        Place(at)
    }

    /// Gives the first task its turn; returns its waker. `None`: no task waits.
    #[inline]
    pub(super) fn call(&mut self) -> Option<Waker> {
        let first = self.entries.get_mut(self.first as usize)?;
        let waker = first.waker.take();
        self.called += first.weight;
        self.unlink(self.first);
        waker
    }

    /// Returns true if a task has its turn.
    #[inline]
    pub(super) fn has_turn(&self, place: &Place) -> bool {
        self.entries[place.0 as usize].waker.is_none()
    }

    /// Notes by which waker a task wants to be called. Returns the old one, to be dropped while nothing is borrowed: it may be
    /// the last owner of a task.
    pub(super) fn renew(&mut self, place: &Place, waker: &Waker) -> Option<Waker> {
        let known = self.entries[place.0 as usize].waker.as_mut()?;
        if known.will_wake(waker) { None } else { Some(std::mem::replace(known, waker.clone())) }
    }

    /// Takes the turn of a task back: it waits where it has waited. It passes only those that have come back before it.
    pub(super) fn go_back(&mut self, place: &Place, waker: &Waker) {
        let entry = &mut self.entries[place.0 as usize];
        entry.waker = Some(waker.clone());
        self.called -= entry.weight;
        let (arrival, mut before, mut behind) = (entry.arrival, NONE, self.first);
        while let Some(other) = self.entries.get(behind as usize).filter(|other| other.arrival < arrival) {
            (before, behind) = (behind, other.behind);
        }
        self.link(place.0, before, behind);
    }

    /// Takes a task out, which has its turn or not. Returns its waker, to be dropped while nothing is borrowed; `None`: it had its
    /// turn, which is free now.
    pub(super) fn leave(&mut self, place: Place) -> Option<Waker> {
        let at = place.0;
        let entry = &mut self.entries[at as usize];
        let waker = entry.waker.take();
        match waker {
            Some(_) => self.unlink(at),
            None => self.called -= entry.weight,
        }
        self.entries[at as usize].behind = self.free;
        self.free = at;
        waker
    }

    /// Puts an entry between two others.
    #[inline]
    fn link(&mut self, at: u32, before: u32, behind: u32) {
        self.connect(before, at);
        self.connect(at, behind);
    }

    #[inline]
    fn unlink(&mut self, at: u32) {
        let Entry { before, behind, .. } = self.entries[at as usize];
        self.connect(before, behind);
    }

    /// Makes two entries neighbours, or one of them an end.
    #[inline]
    fn connect(&mut self, before: u32, behind: u32) {
        match self.entries.get_mut(before as usize) {
            Some(entry) => entry.behind = behind,
            None => self.first = behind,
        }
        match self.entries.get_mut(behind as usize) {
            Some(entry) => entry.before = before,
            None => self.last = before,
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

    /// A task in the line, or with its turn.
    struct Tried {
        arrival: u64,
        place: Place,
        waker: Waker,
        called: bool,
    }

    const fn weight(arrival: u64) -> u32 {
        1 + arrival as u32 % 3
    }

    /// Whatever tasks do, the one that is called has waited longest, and memory is taken for as many as waited together.
    #[test]
    fn the_task_that_has_waited_longest_is_called() {
        let (mut waiters, mut tasks, mut state, mut most) = (Waiters::default(), Vec::<Tried>::new(), 1_u64, 0);
        for arrival in 0..100_000 {
            // The generator of Knuth's MMIX.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (action, at) = (state >> 62, (state >> 33) as usize % tasks.len().max(1));
            match action {
                0 if tasks.len() < 20 => {
                    let waker = Waker::from(Arc::new(Task));
                    tasks.push(Tried {
                        arrival,
                        place: waiters.join(arrival, weight(arrival), &waker),
                        waker,
                        called: false,
                    });
                }
                1 => {
                    let first = tasks.iter_mut().filter(|task| !task.called).min_by_key(|task| task.arrival);
                    let oldest = first.as_ref().map(|task| (task.arrival, weight(task.arrival)));
                    assert_eq!(waiters.oldest(), oldest);
                    let called = waiters.call();
                    assert!(called.as_ref().map(Waker::data) == first.as_ref().map(|task| task.waker.data()));
                    first.into_iter().for_each(|task| task.called = true);
                }
                2 if tasks.get(at).is_some_and(|task| task.called) => {
                    waiters.go_back(&tasks[at].place, &tasks[at].waker);
                    tasks[at].called = false;
                }
                3 if !tasks.is_empty() => {
                    let Tried { place, called, .. } = tasks.swap_remove(at);
                    assert_eq!((waiters.has_turn(&place), waiters.leave(place).is_none()), (called, called));
                }
                _ => {}
            }
            most = most.max(tasks.len());
            let called = tasks.iter().filter(|task| task.called).map(|task| weight(task.arrival) as usize);
            assert_eq!(waiters.called(), called.sum::<usize>());
            assert_eq!((waiters.is_empty(), waiters.entries.len()), (tasks.is_empty(), most));
        }
        assert_eq!(most, 20);
    }
}
