//! Timers: a heap of deadlines. Cancelling a timer takes amortized constant time, because the entry of the timer stays in the heap. The
//! entry is removed when it reaches the top of the heap, or when the heap has too many cancelled entries.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

/// A time span longer than any program runs: 30 years.
pub(crate) const FOREVER: Duration = Duration::from_secs(86_400 * 365 * 30);

use rdma_transport::slab::{Key, Slab};

/// The timers that have expired at the time `now`. A timer that is set after this value was created
/// is included only if its deadline is before `now`. So a timer with a delay of zero is not
/// included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expired {
    now: Instant,
    /// The sequence number of the next timer that is set.
    sequence: u64,
}

/// Timers, each with a deadline and a value.
#[derive(Debug)]
pub(crate) struct Timers<T> {
    heap: BinaryHeap<Reverse<(Instant, u64, Key)>>, // bound: timers
    live: Slab<T>,                                  // bound: timers
    /// A time that is not later than the earliest deadline. `None` if no timer was set. After timers were cancelled, this time may be too
    /// early.
    earliest: Option<Instant>,
    /// The number of timers that were set so far. Timers with equal deadlines expire in the order in which they were set.
    sequence: u64,
}

impl<T> Default for Timers<T> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), live: Slab::default(), earliest: None, sequence: 0 }
    }
}

impl<T> Timers<T> {
    /// Sets a timer with a deadline and a value. Returns its key.
    pub(crate) fn insert(&mut self, at: Instant, value: T) -> Key {
        let key = self.live.insert(value);
        self.heap.push(Reverse((at, self.sequence, key)));
        self.sequence += 1;
        self.earliest = Some(self.earliest.map_or(at, |earliest| earliest.min(at)));
        key
    }

    /// Cancels a timer and returns its value. `None` if the timer has expired or was cancelled before.
    pub(crate) fn cancel(&mut self, key: Key) -> Option<T> {
        let value = self.live.remove(key);
        // Remove the cancelled entries from the heap if they outnumber the live ones.
        if self.heap.len() > 64 && self.heap.len() > 2 * self.live.len() {
            let live = &self.live;
            self.heap.retain(|Reverse((_, _, key))| live.get(*key).is_some());
        }
        value
    }

    /// Returns `true` if a timer may have expired. This check is cheap, but may also return `true` if all timers that would have expired
    /// were cancelled.
    #[inline]
    pub(crate) fn may_be_due(&self, now: Instant) -> bool {
        self.earliest.is_some_and(|earliest| earliest <= now)
    }

    /// Returns the earliest deadline. `None` if there is no timer.
    pub(crate) fn next(&mut self) -> Option<Instant> {
        while let Some(Reverse((_, _, key))) = self.heap.peek() {
            if self.live.get(*key).is_some() {
                break;
            }
            self.heap.pop();
        }
        self.earliest = self.heap.peek().map(|Reverse((at, ..))| *at);
        self.earliest
    }

    /// Returns the timers that have expired at `now`, for [`Timers::pop_due`].
    pub(crate) const fn expired(&self, now: Instant) -> Expired {
        Expired { now, sequence: self.sequence }
    }

    /// If the earliest timer is one of `expired`, removes it and returns its key and value. Otherwise returns `None`.
    pub(crate) fn pop_due(&mut self, expired: &Expired) -> Option<(Key, T)> {
        self.next()?;
        let Reverse((at, sequence, key)) = self.heap.peek().copied()?;
        if (at, sequence) >= (expired.now, expired.sequence) {
            return None;
        }
        self.heap.pop();
        self.live.remove(key).map(|value| (key, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[allow(clippy::disallowed_methods, reason = "a test needs some instant")]
    fn start() -> Instant {
        Instant::now()
    }

    #[test]
    fn fires_in_order_and_once() {
        let t0 = start();
        let ms = Duration::from_millis;
        let mut timers = Timers::default();
        timers.insert(t0 + ms(3), 'c');
        timers.insert(t0 + ms(1), 'a');
        let b = timers.insert(t0 + ms(2), 'b');
        timers.insert(t0 + ms(3), 'd');
        assert_eq!(timers.next(), Some(t0 + ms(1)));
        assert!(timers.may_be_due(t0 + ms(1)) && !timers.may_be_due(t0));
        assert!(timers.pop_due(&timers.expired(t0)).is_none());
        assert_eq!(timers.cancel(b), Some('b'));
        assert_eq!(timers.cancel(b), None);
        let (expired, mut fired) = (timers.expired(t0 + ms(9)), Vec::new());
        while let Some((_, value)) = timers.pop_due(&expired) {
            fired.push(value);
        }
        assert_eq!(fired, ['a', 'c', 'd']);
        assert!(timers.next().is_none() && !timers.may_be_due(t0 + ms(9)));
    }

    #[test]
    fn what_is_set_afterwards_has_not_expired() {
        let t0 = start();
        let mut timers = Timers::default();
        timers.insert(t0, 0);
        timers.insert(t0, 1);
        let expired = timers.expired(t0);
        for value in [0, 1] {
            assert_eq!(timers.pop_due(&expired).map(|(_, value)| value), Some(value));
            timers.insert(t0, value + 2);
        }
        assert!(timers.pop_due(&expired).is_none());
        assert!(timers.may_be_due(t0));
        assert_eq!(timers.pop_due(&timers.expired(t0)).map(|(_, value)| value), Some(2));
    }

    #[test]
    fn cancelled_timers_do_not_pile_up() {
        let t0 = start();
        let mut timers = Timers::default();
        for _ in 0..10_000 {
            let key = timers.insert(t0 + Duration::from_secs(3600), ());
            timers.cancel(key);
        }
        assert!(timers.heap.len() <= 128, "{} entries for no timer", timers.heap.len());
    }
}
