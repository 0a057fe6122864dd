//! The adaptive wait (`Wait::Adaptive`) decides how long to poll before sleeping. This file does no I/O, and time is an
//! argument.
//!
//! It measures two things: the *gap* from empty queues to the next completion, and the *cost* of a wake-up, which is
//! the delay of a completion that has to wake a sleeping thread. To measure the cost, one idle time in [`PROBE`] (one
//! in [`FAR_PROBE`] if gaps are long) is spent the other way than the rest. The difference counts as the cost.
//!
//! Polling that finds a completion after `t` takes `t - cost` more processor time than sleeping. If a share `s` of a
//! processor may be spent, polling pays off up to `cost / (1 - s)`: the *limit*. If the usual gap is not above the
//! limit, an idle time begins with polling up to the limit; otherwise the reactor sleeps immediately. A gap counts as
//! at most [`LONG`] limits. So the estimate tolerates one long pause, but not two, and not short gaps that alternate
//! with pauses.
//!
//! If the reactor slept, the gap is the time that passed without the cost, and counts as longer than the polling before
//! it. Otherwise, a cost estimate that is too high and a gap estimate that is too short could confirm each other.
//!
//! Whatever the estimates are, polling that takes more processor time than sleeping is paid from a credit, which grows
//! by the share of the time that passes. If the credit is too small for the usual gap, it is saved up.

use std::time::{Duration, Instant};

/// The number of idle times per measurement of the cost of a wake-up.
const PROBE: u32 = 128;
/// The number of idle times per measurement of the cost if gaps are long.
const FAR_PROBE: u32 = 8 * PROBE;
/// The largest value of a gap, as a multiple of the limit.
const LONG: f64 = 4.0;
/// The smallest value of a gap during which the reactor slept, as a multiple of the polling before it.
const MISSED: f64 = 1.5;
/// The weight of a new measurement.
const WEIGHT: f64 = 1.0 / 8.0;
/// The weight of a probe.
const PROBE_WEIGHT: f64 = 1.0 / 4.0;
/// The first estimate of the cost of a wake-up, in ns.
const COST: f64 = 20_000.0;
/// The range of the estimate, in ns.
const COSTS: (f64, f64) = (2_000.0, 200_000.0);
/// The longest limit, in ns.
const LONGEST: f64 = 1_000_000.0;
/// The share of a processor that polling may take beyond what sleeping would have taken.
const SHARE: f64 = 0.5;
/// The length of the time for which the share can be saved up, in ns.
const SAVED: f64 = 4_000_000.0;

/// The plan for one idle time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    Poll,
    Sleep,
    /// Poll where the reactor would sleep, to measure the cost.
    ProbePoll,
    ProbeSleep,
}

#[derive(Clone, Copy, Debug)]
struct Idle {
    since: Instant,
    /// End of polling.
    until: Instant,
    plan: Plan,
    slept: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Adaptive {
    /// The usual time from empty queues to a completion, without the wake-up, in ns.
    gap: f64,
    /// The usual time from falling asleep to seeing a completion, in ns.
    slept: f64,
    /// The usual cost of a wake-up, in ns.
    cost: f64,
    /// The polling time that may be spent, in ns.
    credit: f64,
    credited: Instant,
    idle: Option<Idle>,
    count: u32,
}

impl Adaptive {
    pub(crate) fn new(now: Instant) -> Self {
        // With the first estimates, the reactor polls; two long gaps end that.
        Self { gap: COST / 2.0, slept: COST, cost: COST, credit: SAVED * SHARE, credited: now, idle: None, count: 0 }
    }

    /// Returns the limit: the longest polling in one idle time, in ns.
    fn limit(&self) -> f64 {
        (self.cost / (1.0 - SHARE)).min(LONGEST)
    }

    /// Returns how long to poll from now on, now that the queues are empty.
    pub(crate) fn budget(&mut self, now: Instant) -> Duration {
        if let Some(idle) = self.idle {
            return idle.until.saturating_duration_since(now);
        }
        let passed = nanos(now.saturating_duration_since(self.credited));
        self.credit = (self.credit + passed * SHARE).min(SAVED * SHARE);
        self.credited = now;
        self.count = self.count.wrapping_add(1);
        let (limit, probe) = (self.limit(), self.count % PROBE == 0);
        let (plan, longest) = if self.gap <= limit {
            match (probe, self.gap <= self.credit) {
                (true, _) => (Plan::ProbeSleep, 0.0),
                (false, true) => (Plan::Poll, limit),
                (false, false) => (Plan::Sleep, 0.0),
            }
        } else if probe && self.gap < 0.95 * LONG * limit {
            (Plan::ProbePoll, LONG * limit)
        } else if self.count % FAR_PROBE == 0 {
            (Plan::ProbePoll, LONGEST)
        } else {
            (Plan::Sleep, 0.0)
        };
        let budget = Duration::from_nanos(longest.min(self.credit).max(0.0) as u64);
        self.idle = Some(Idle { since: now, until: now + budget, plan, slept: false });
        budget
    }

    /// Charges polling that took `time`. `hit`: the polling found a completion.
    pub(crate) fn polled(&mut self, time: Duration, hit: bool) {
        // A hit saved the cost of a wake-up; after a miss, the wake-up still follows.
        let saved = if hit { self.cost } else { 0.0 };
        self.credit -= (nanos(time) - saved).max(0.0);
    }

    /// Notes that the reactor goes to sleep.
    pub(crate) fn sleeps(&mut self) {
        if let Some(idle) = &mut self.idle {
            idle.slept = true;
        }
    }

    /// Updates the estimates by the idle time that ended with completions.
    pub(crate) fn found(&mut self, now: Instant) {
        let Some(Idle { since, until, plan, slept }) = self.idle.take() else { return };
        let time = nanos(now.saturating_duration_since(since));
        match (plan, slept) {
            (Plan::ProbeSleep, true) => return self.learn_cost(time - self.gap),
            (Plan::ProbePoll, false) => self.learn_cost(self.slept - time),
            _ => {}
        }
        if slept {
            self.slept += (time.min(LONGEST) - self.slept) * WEIGHT;
        }
        let gap = if slept {
            let polled = nanos(until.saturating_duration_since(since));
            (time - self.cost).max(MISSED * polled)
        } else {
            time
        };
        self.gap += (gap.clamp(0.0, LONG * self.limit()) - self.gap) * WEIGHT;
    }

    fn learn_cost(&mut self, cost: f64) {
        // A pause of the peer must not count as the cost of a wake-up.
        let cost = cost.clamp(0.0, LONG * self.cost);
        self.cost = (self.cost + (cost - self.cost) * PROBE_WEIGHT).clamp(COSTS.0, COSTS.1);
    }
}

fn nanos(time: Duration) -> f64 {
    time.as_nanos() as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROUND: u64 = 100;

    /// A reactor with its traffic, and the time that they spent, in ns.
    struct Trial {
        adaptive: Adaptive,
        start: Instant,
        now: u64,
        wake: u64,
        /// The time of all polling.
        polled: u64,
        /// The part of it beyond the cost of sleeping.
        extra: u64,
        sleeps: u64,
        /// The time from completions to their callbacks.
        delay: u64,
    }

    impl Trial {
        #[allow(clippy::disallowed_methods, reason = "a test needs some instant")]
        fn new(wake: u64) -> Self {
            let start = Instant::now();
            let adaptive = Adaptive::new(start);
            Self { adaptive, start, now: 0, wake, polled: 0, extra: 0, sleeps: 0, delay: 0 }
        }

        fn at(&self) -> Instant {
            self.start + Duration::from_nanos(self.now)
        }

        /// Simulates empty queues for `gap`, and a callback of the completion that takes `busy`.
        fn cycle(&mut self, gap: u64, busy: u64) {
            let due = self.now + gap;
            let budget = self.adaptive.budget(self.at()).as_nanos() as u64;
            let from = self.now;
            while self.now < due && self.now - from < budget {
                self.now += ROUND;
            }
            let (spent, hit) = (self.now - from, self.now >= due);
            self.polled += spent;
            self.extra += if hit { (spent as f64 - self.adaptive.cost).max(0.0) as u64 } else { spent };
            if spent > 0 {
                self.adaptive.polled(Duration::from_nanos(spent), hit);
            }
            if !hit {
                self.sleeps += 1;
                self.adaptive.sleeps();
                self.now = due + self.wake;
            }
            self.delay += self.now - due;
            self.adaptive.found(self.at());
            self.now += busy;
        }
    }

    #[test]
    fn a_steady_ping_pong_is_polled() {
        for (gap, wake) in [(3_000, 8_000), (15_000, 20_000), (30_000, 40_000), (60_000, 60_000)] {
            let mut trial = Trial::new(wake);
            (0..20_000).for_each(|_| trial.cycle(gap, 5_000));
            let sleeps = trial.sleeps;
            (0..10_000).for_each(|_| trial.cycle(gap, 5_000));
            let slept = trial.sleeps - sleeps;
            assert!(slept < 200, "gap {gap}, wake {wake}: slept {slept} times of 10,000; {:?}", trial.adaptive);
        }
    }

    #[test]
    fn the_cost_of_a_wake_up_is_found_out() {
        for wake in [4_000_u64, 12_000, 50_000, 150_000] {
            let mut trial = Trial::new(wake);
            (0..20_000).for_each(|_| trial.cycle(wake / 2, 2_000));
            let cost = trial.adaptive.cost;
            assert!((cost / wake as f64 - 1.0).abs() < 0.2, "a wake-up of {wake} is taken for {cost}");
        }
    }

    /// A steady gap that is slightly too long to poll for, and a wake-up far cheaper than the first estimate.
    #[test]
    fn a_first_guess_does_not_stay() {
        let mut trial = Trial::new(2_000);
        (0..5_000).for_each(|_| trial.cycle(28_281, 1_000));
        assert!((2_000.0..3_000.0).contains(&trial.adaptive.cost), "{:?}", trial.adaptive);
        let polled = trial.polled;
        (0..1_000).for_each(|_| trial.cycle(28_281, 1_000));
        assert!(trial.polled - polled < 300_000, "polled for {} of 30,281,000 ns", trial.polled - polled);
    }

    #[test]
    fn an_odd_pause_does_not_end_the_polling() {
        let mut trial = Trial::new(20_000);
        for nth in 0..20_000 {
            trial.cycle(if nth % 200 == 0 { 4_000_000 } else { 10_000 }, 2_000);
        }
        assert!(trial.sleeps < 600, "slept {} times of 20,000", trial.sleeps);
    }

    #[test]
    fn rare_messages_are_slept_for() {
        for pattern in [&[10_000_000][..], &[10_000_000, 60_000], &[10_000_000, 0, 30_000], &[300_000]] {
            let mut trial = Trial::new(20_000);
            (0..100).for_each(|nth| trial.cycle(pattern[nth % pattern.len()], 5_000));
            let (polled, from) = (trial.polled, trial.now);
            (0..5_000).for_each(|nth| trial.cycle(pattern[nth % pattern.len()], 5_000));
            let share = (trial.polled - polled) as f64 / (trial.now - from) as f64;
            assert!(share < 0.01, "{pattern:?}: {:.2} % of the time", 100.0 * share);
        }
    }

    proptest! {
        #[test]
        fn the_share_is_never_exceeded(
            wake in 0..300_000_u64,
            cycles in prop::collection::vec((prop_oneof![0..2_000_u64, 0..100_000_u64, 0..20_000_000_u64], 0..50_000_u64), 1..2_000),
        ) {
            let mut trial = Trial::new(wake);
            for (gap, busy) in cycles {
                let before = trial.polled;
                trial.cycle(gap, busy);
                prop_assert!((trial.polled - before) as f64 <= LONG * LONGEST + ROUND as f64);
                prop_assert!(COSTS.0 <= trial.adaptive.cost && trial.adaptive.cost <= COSTS.1);
                let allowed = (SAVED + trial.now as f64) * SHARE + ROUND as f64;
                prop_assert!(trial.extra as f64 <= allowed, "{} of {allowed} ns", trial.extra);
            }
        }

        #[test]
        fn steady_gaps_settle(gap in 0..2_000_000_u64, wake in 2_000..200_000_u64) {
            let mut trial = Trial::new(wake);
            (0..30_000).for_each(|_| trial.cycle(gap, 1_000));
            let (polled, sleeps, from) = (trial.polled, trial.sleeps, trial.now);
            (0..5_000).for_each(|_| trial.cycle(gap, 1_000));
            let (slept, polled) = (trial.sleeps - sleeps, trial.polled - polled);
            if gap < wake {
                prop_assert!(slept < 500, "{slept} of 5,000");
            } else if gap > 10 * wake {
                prop_assert!((polled as f64) < 0.01 * (trial.now - from) as f64, "{polled} ns");
            }
        }
    }
}
