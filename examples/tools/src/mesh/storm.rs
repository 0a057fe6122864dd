//! The order and the pace in which one rank connects to others.
//!
//! In each pair, one side connects, so that a pair has one connection. All ranks begin with their neighbour and
//! continue with the next rank, so at no time do many connect to the same rank. The number of concurrent connects is
//! bounded. A failed connect is repeated after a pause with a random part. The pause doubles each time, up to a limit.
//!
//! The time is a duration since the start, and randomness is an argument, so the same code runs in a simulation.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// The pause after the first failure.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Returns true if `rank` is the side of the pair that connects. Each rank connects to half of the others.
#[must_use]
pub const fn connects(rank: usize, peer: usize, ranks: usize) -> bool {
    let ahead = (peer + ranks - rank) % ranks;
    ahead > 0 && (2 * ahead < ranks || (2 * ahead == ranks && rank < peer))
}

/// The connects of one rank.
#[derive(Debug)]
pub struct Storm {
    /// The ranks that were not tried yet, the next one last.
    fresh: Vec<usize>,
    /// The ranks to retry, ordered by time.
    again: BinaryHeap<Reverse<(Duration, usize)>>,
    /// The number of failures, by rank.
    failures: Vec<u32>,
    in_flight: usize,
    at_once: usize,
    until: Duration,
    /// The number of connects so far.
    attempts: u64,
}

/// The consequence of a failed connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    /// The connect is repeated later.
    Again,
    /// The time is up; the rank is not tried again.
    GiveUp,
}

impl Storm {
    /// Makes the connects of `rank`: at most `at_once` concurrently, with retries until `until`.
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

    /// Removes and returns the next rank to connect to now. Returns `None` if no connect may begin now.
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

    /// Returns the time at which [`Storm::next`] returns a rank again, if only a retry's time is missing.
    #[must_use]
    pub fn wake_at(&self) -> Option<Duration> {
        let waits = self.in_flight < self.at_once;
        self.again.peek().filter(|_| waits).map(|Reverse((at, _))| *at)
    }

    /// Records a successful connect.
    pub const fn succeeded(&mut self) {
        self.in_flight -= 1;
    }

    /// Records a failed connect. All bits of `random` are used.
    pub fn failed(&mut self, peer: usize, now: Duration, random: u64) -> RetryDecision {
        self.in_flight -= 1;
        let failures = self.failures[peer];
        self.failures[peer] = failures.saturating_add(1);
        let longest = FIRST_PAUSE.saturating_mul(1 << failures.min(16)).min(LONGEST_PAUSE);
        // The factor is between one half and one.
        let share = 0.5 + (random as f64 / u64::MAX as f64) / 2.0;
        let at = now + longest.mul_f64(share);
        if at >= self.until {
            return RetryDecision::GiveUp;
        }
        self.again.push(Reverse((at, peer)));
        RetryDecision::Again
    }

    /// Returns the number of failed connects to a rank.
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
