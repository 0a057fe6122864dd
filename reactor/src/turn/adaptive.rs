//! The adaptive wait (`Wait::Adaptive`) decides for how long the reactor polls before it sleeps. This file does no I/O and reads no clock.
//!
//! It estimates two times. The *gap* is the time from empty queues to the next completion. The *cost* is the delay of a completion that
//! must wake a sleeping thread. To measure the cost, one idle time in [`PROBE`] (one in [`FAR_PROBE`] if gaps are long) is a probe: the
//! reactor polls where it would otherwise sleep, or sleeps where it would otherwise poll. The cost is the length of an idle time in which
//! the reactor slept, minus the length of one in which it only polled.
//!
//! If polling finds a completion after the time `t`, it has used `t - cost` more processor time than sleeping would have used. If a share
//! `s` of a processor may be used for this, polling is worthwhile up to `cost / (1 - s)`: the *limit*. If the estimated gap is not longer
//! than the limit, the reactor polls up to the limit before it sleeps. Otherwise it sleeps immediately. A measured gap counts as at most
//! [`LONG`] times the limit. So one long pause does not stop the polling, but two do. Short gaps that alternate with long pauses also stop
//! it.
//!
//! If the reactor slept, the measured gap includes the cost, which is subtracted. The result counts as at least [`MISSED`] times the time
//! that the reactor polled before the sleep. Otherwise, a cost that is estimated too high and a gap that is estimated too short could
//! confirm each other.
//!
//! Regardless of the estimates, a credit limits the processor time that polling uses in addition to sleeping. The credit grows by the share
//! `s` of the time that passes. If the credit is smaller than the estimated gap, the reactor sleeps until the credit is large enough.

use std::time::{Duration, Instant};

/// The number of idle times from one probe to the next. A probe measures the cost of a wake-up.
const PROBE: u32 = 128;
/// The number of idle times from one probe to the next if gaps are long.
const FAR_PROBE: u32 = 8 * PROBE;
/// The upper limit on a measured gap (the time from empty queues to the next completion), as a
/// multiple of the polling limit.
const LONG: f64 = 4.0;
/// The lower limit on a measured gap in which the reactor slept, as a multiple of the time that the reactor polled before this sleep.
const MISSED: f64 = 1.5;
/// The weight of a new measurement in the estimates of times.
const WEIGHT: f64 = 1.0 / 8.0;
/// The weight of a new probe in the estimate of the cost of a wake-up.
const PROBE_WEIGHT: f64 = 1.0 / 4.0;
/// The initial estimate of the cost of a wake-up, in ns.
const COST: f64 = 20_000.0;
/// The smallest and the largest permitted estimate of the cost of a wake-up, in ns.
const COSTS: (f64, f64) = (2_000.0, 200_000.0);
/// The largest value of the polling limit, in ns. A probe may poll for longer: up to [`LONG`] times the limit, or for this time if gaps are
/// long.
const LONGEST: f64 = 1_000_000.0;
/// The share of a processor that polling may use in addition to the time that sleeping would have used.
const SHARE: f64 = 0.5;
/// The largest credit is `SHARE` times this time, in ns.
const SAVED: f64 = 4_000_000.0;

/// The estimates of the adaptive wait, and its credit.
#[derive(Debug)]
pub(crate) struct Adaptive {
    /// The estimated time from empty queues to the next completion, without the cost of a wake-up,
    /// in ns.
    gap: f64,
    /// The estimated length of an idle time in which the reactor slept, in ns. It includes the
    /// polling before the sleep.
    slept: f64,
    /// The estimated cost of a wake-up, in ns.
    cost: f64,
    /// The processor time that polling may use now in addition to the time that sleeping would use,
    /// in ns.
    credit: f64,
    credited: Instant,
    idle: Option<Idle>,
    count: u32,
}

/// The plan for one idle time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    Poll,
    Sleep,
    /// Poll in an idle time in which the reactor would otherwise sleep, to measure the cost of a wake-up.
    ProbePoll,
    ProbeSleep,
}

#[derive(Clone, Copy, Debug)]
struct Idle {
    since: Instant,
    /// The time at which the polling ends and the reactor sleeps.
    until: Instant,
    plan: Plan,
    slept: bool,
}

impl Adaptive {
    pub(crate) fn new(now: Instant) -> Self {
        // With these initial estimates the reactor polls. Two long gaps end the polling.
        Self { gap: COST / 2.0, slept: COST, cost: COST, credit: SAVED * SHARE, credited: now, idle: None, count: 0 }
    }

    /// Returns the limit, which is the longest useful polling in one idle time, in ns.
    fn limit(&self) -> f64 {
        (self.cost / (1.0 - SHARE)).min(LONGEST)
    }

    /// Returns the time for which the reactor may poll before it sleeps. All queues are empty at the time `now`.
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

    /// Subtracts the time of polling from the credit, less the cost of the wake-up that the polling
    /// has saved. `hit` is true if the polling found a completion.
    pub(crate) fn polled(&mut self, time: Duration, hit: bool) {
        // Polling that found a completion has saved a wake-up. Polling that found none has saved nothing, because the reactor sleeps next.
        let saved = if hit { self.cost } else { 0.0 };
        self.credit -= (nanos(time) - saved).max(0.0);
    }

    /// Notes that the reactor is about to sleep.
    pub(crate) fn sleeps(&mut self) {
        if let Some(idle) = &mut self.idle {
            idle.slept = true;
        }
    }

    /// Updates the estimates at the end of an idle time: completions were found at `now`.
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
        // A long pause of the peer must not be mistaken for a high cost of a wake-up, so the measured cost is limited.
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

    /// A simulated reactor with simulated traffic. All times are in ns.
    struct Trial {
        adaptive: Adaptive,
        start: Instant,
        now: u64,
        wake: u64,
        /// The total time of polling.
        polled: u64,
        /// The part of `polled` that exceeds the cost of the wake-ups that the polling has saved.
        extra: u64,
        sleeps: u64,
        /// The total time from completions to their callbacks.
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

        /// Simulates one round: the queues are empty for the time `gap`, then a completion arrives, and its callback runs for the time
        /// `busy`.
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

    /// All gaps are equal and slightly longer than the limit, and a wake-up costs much less than the initial estimate of the cost.
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
