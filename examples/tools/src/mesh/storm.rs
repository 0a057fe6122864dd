//! The order in which a rank connects to other ranks, and the limits and pauses of its connects.
//!
//! One side of each pair connects, so that a pair has one connection. Each rank begins with its neighbour and continues with the next rank.
//! So ranks that connect at the same time usually connect to different ranks. The number of a rank's concurrent connects is limited. A
//! failed connect is repeated after a random pause; the limit of this pause doubles after each failure.
//!
//! Times are durations since the start, and random numbers are arguments. So the same code runs in a simulation.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// The limit of the random pause after the first failure.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The largest limit of the random pause, at which the doubling stops.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Returns true if `rank` is the side of the pair that connects. Each rank connects to about half of the other ranks.
#[must_use]
pub const fn connects(rank: usize, peer: usize, ranks: usize) -> bool {
    let ahead = (peer + ranks - rank) % ranks;
    ahead > 0 && (2 * ahead < ranks || (2 * ahead == ranks && rank < peer))
}

/// The schedule of one rank's connects to other ranks.
// local: ranks of the run
#[derive(Debug)]
pub struct Storm {
    /// The ranks that were not tried yet. The last rank in the list is tried next.
    fresh: Vec<usize>,
    /// The ranks to retry, each with the time of the retry. The rank with the earliest time is popped first.
    again: BinaryHeap<Reverse<(Duration, usize)>>,
    /// The number of failed connects to each rank.
    failures: Vec<u32>,
    in_flight: usize,
    at_once: usize,
    until: Duration,
    /// The number of connects that were tried so far.
    attempts: u64,
}

/// The decision after a failed connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    /// The connect is tried again later.
    Again,
    /// The time limit has passed, so the connect is not tried again.
    GiveUp,
}

impl Storm {
    /// Makes the schedule for the connects of `rank`. At most `at_once` connects run concurrently.
    /// A failed connect is retried until the time `until` has passed.
    #[must_use]
    pub fn new(rank: usize, ranks: usize, at_once: usize, until: Duration) -> Self {
        let fresh = (1..ranks).rev().map(|ahead| (rank + ahead) % ranks).filter(|&peer| connects(rank, peer, ranks));
        Self {
            fresh: fresh.collect(),
            again: BinaryHeap::new(),
            failures: vec![0; ranks],
            in_flight: 0,
            at_once: at_once.max(1),
            until,
            attempts: 0,
        }
    }

    /// Removes and returns the next rank to connect to. Returns `None` if no connect may begin now.
    pub fn next(&mut self, now: Duration) -> Option<usize> {
        if self.in_flight >= self.at_once {
            return None;
        }
        let due = self.again.peek().is_some_and(|Reverse((at, _))| *at <= now);
        let peer = if due { self.again.pop().map(|Reverse((_, peer))| peer) } else { self.fresh.pop() }?;
        self.in_flight += 1;
        self.attempts += 1;
        Some(peer)
    }

    /// Returns the time of the next retry, at which [`Storm::next`] must be called again. Returns `None` if there is no retry or too
    /// many connects are in flight.
    #[must_use]
    pub fn wake_at(&self) -> Option<Duration> {
        let waits = self.in_flight < self.at_once;
        self.again.peek().filter(|_| waits).map(|Reverse((at, _))| *at)
    }

    /// Records a successful connect.
    pub const fn succeeded(&mut self) {
        self.in_flight -= 1;
    }

    /// Records a failed connect, and decides whether the connect is tried again. `random` is a uniformly distributed number.
    pub fn failed(&mut self, peer: usize, now: Duration, random: u64) -> RetryDecision {
        self.in_flight -= 1;
        let failures = self.failures[peer];
        self.failures[peer] = failures.saturating_add(1);
        let longest = FIRST_PAUSE.saturating_mul(1 << failures.min(16)).min(LONGEST_PAUSE);
        // The random pause is between one half of its limit and the full limit.
        let share = 0.5 + (random as f64 / u64::MAX as f64) / 2.0;
        let at = now + longest.mul_f64(share);
        if at >= self.until {
            return RetryDecision::GiveUp;
        }
        self.again.push(Reverse((at, peer)));
        RetryDecision::Again
    }

    /// Returns the number of connects to a rank that have failed.
    #[must_use]
    pub fn failures(&self, peer: usize) -> u32 {
        self.failures[peer]
    }

    /// Returns true if every connect has succeeded or was given up.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.in_flight == 0 && self.fresh.is_empty() && self.again.is_empty()
    }

    /// Returns the number of connects so far.
    #[must_use]
    pub const fn attempts(&self) -> u64 {
        self.attempts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_has_one_side_that_connects_and_each_rank_half_of_them() {
        for ranks in 1..=40 {
            for rank in 0..ranks {
                let mine = (0..ranks).filter(|&peer| connects(rank, peer, ranks)).count();
                assert!(mine == (ranks - 1) / 2 || mine == ranks / 2, "{mine} of {ranks}");
                for peer in (0..ranks).filter(|&peer| peer != rank) {
                    assert_ne!(
                        connects(rank, peer, ranks),
                        connects(peer, rank, ranks),
                        "{rank} and {peer} of {ranks}"
                    );
                }
            }
        }
    }

    #[test]
    fn ranks_that_keep_pace_never_meet_at_one_rank() {
        let mut storms: Vec<_> = (0..100).map(|rank| Storm::new(rank, 100, 1, Duration::MAX)).collect();
        for step in 0..49 {
            let mut targets: Vec<_> = storms.iter_mut().filter_map(|storm| storm.next(Duration::ZERO)).collect();
            storms.iter_mut().for_each(Storm::succeeded);
            targets.sort_unstable();
            targets.dedup();
            assert_eq!(targets.len(), 100, "step {step}");
        }
    }

    #[test]
    fn connects_are_bounded_repeated_later_and_given_up_in_the_end() {
        let second = Duration::from_secs(1);
        let mut storm = Storm::new(0, 20, 3, 2 * second);
        let first: Vec<_> = std::iter::from_fn(|| storm.next(Duration::ZERO)).collect();
        assert_eq!(first, [1, 2, 3]);
        assert_eq!(storm.failed(2, Duration::ZERO, 0), RetryDecision::Again);
        assert_eq!(storm.wake_at(), Some(Duration::from_millis(25)));
        assert_eq!(storm.next(Duration::ZERO), Some(4));
        assert_eq!(storm.wake_at(), None);
        storm.succeeded();
        assert_eq!(storm.next(second), Some(2));
        assert_eq!(storm.failed(2, second, u64::MAX), RetryDecision::Again);
        assert_eq!(storm.wake_at(), Some(Duration::from_millis(1100)));
        assert_eq!(storm.next(second), Some(5));
        assert_eq!(storm.failed(5, 2 * second, 0), RetryDecision::GiveUp);
        assert!(!storm.is_over());
    }
}
