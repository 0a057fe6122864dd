//! Growing pauses between connection attempts.

use std::time::Duration;

use crate::seam::poller::system_entropy;

/// Exponential backoff with jitter, for attempts to connect again. An upper bound of the pause doubles with each
/// attempt, up to a limit. Each pause is a random time between half of the bound and the bound. So when a server
/// restarts, its clients do not reconnect at the same moment.
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::Backoff;
///
/// let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
/// let first = backoff.next_pause();
/// assert!((50..=100).contains(&first.as_millis()));
/// for _ in 0..20 {
///     assert!(backoff.next_pause() <= Duration::from_secs(10));
/// }
/// backoff.reset();
/// assert!(backoff.next_pause() <= Duration::from_millis(100));
/// ```
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    most: Duration,
    attempts: u32,
    random: u64,
}

impl Backoff {
    /// Creates a backoff whose first pause is at most `first`, and whose pauses never exceed `most`. The system
    /// provides the random seed, so two backoffs with equal arguments give different pauses.
    ///
    /// Example: [`Backoff`].
    #[must_use]
    pub fn new(first: Duration, most: Duration) -> Self {
        let mut seed = [0; 8];
        system_entropy()(&mut seed);
        Self::with_seed(first, most, u64::from_ne_bytes(seed))
    }

    /// Creates a backoff as [`Backoff::new`] does, but with a fixed random seed: equal arguments give equal pauses. Use
    /// `with_seed` in tests.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::Backoff;
    ///
    /// let make = || Backoff::with_seed(Duration::from_millis(100), Duration::from_secs(10), 7);
    /// assert_eq!(make().next_pause(), make().next_pause());
    /// ```
    #[must_use]
    pub const fn with_seed(first: Duration, most: Duration, seed: u64) -> Self {
        Self { first, most, attempts: 0, random: seed }
    }

    /// Returns the pause before the next attempt. Pass it to [`crate::TimerContext::set`].
    #[must_use]
    pub fn next_pause(&mut self) -> Duration {
        let longest = self.first.saturating_mul(1 << self.attempts.min(31)).min(self.most);
        self.attempts = self.attempts.saturating_add(1);
        // The random number generator SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.random;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let share = ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64;
        let half = longest / 2;
        half + half.mul_f64(share)
    }

    /// Returns the number of pauses that were returned since the backoff was created, or since the last
    /// [`Backoff::reset`].
    #[must_use]
    pub const fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Resets the growth of the pauses: the next pause is at most the argument `first` of
    /// [`Backoff::new`]. Call `reset` after a connection has carried messages, not as soon as it is
    /// established, because a new connection may fail immediately.
    pub const fn reset(&mut self) {
        self.attempts = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_limit_and_differ() {
        let (first, most) = (Duration::from_millis(10), Duration::from_secs(1));
        let mut pauses = Backoff::with_seed(first, most, 7);
        let mut longest = first;
        for _ in 0..100 {
            let pause = pauses.next_pause();
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?} of {longest:?}");
            longest = (longest * 2).min(most);
        }
        let mut other = Backoff::with_seed(first, most, 8);
        pauses.reset();
        assert_ne!(pauses.next_pause(), other.next_pause());
    }

    #[test]
    fn extreme_lengths_do_not_panic() {
        let mut pauses = Backoff::with_seed(Duration::MAX, Duration::MAX, 1);
        assert!(pauses.next_pause() >= Duration::MAX / 3);
        let mut none = Backoff::with_seed(Duration::ZERO, Duration::ZERO, 1);
        assert_eq!(none.next_pause(), Duration::ZERO);
    }
}
