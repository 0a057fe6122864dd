//! The client's side of an open loop: it sends messages on a schedule, even if answers are late. The latency of a message begins at its
//! scheduled time. If a message is sent late because of an earlier one, that delay is included. Otherwise slow answers would be hidden
//! (coordinated omission).

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rdma_reactor::{ConnectionId, Context, RemoteRegion, SendKind};

use super::client::ConnectionWork;
use super::failure::Failure;
use super::figures::Measured;
use super::frame::Frame;
use super::outlet::{Outlet, Sent};
use super::plan::{Extent, Plan};

/// The longest latency that the histogram distinguishes, in ns. Longer latencies are recorded as this value.
const LONGEST: u64 = 60_000_000_000;

/// The schedule: the times at which messages are due, relative to the beginning of the schedule.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    /// The number of messages that are due in a second.
    rate: f64,
}

impl Schedule {
    /// Returns the time at which a message is due. The first message has the number 0.
    fn time_of(self, message: u64) -> Duration {
        Duration::from_secs_f64(message as f64 / self.rate)
    }

    /// Returns the total number of messages: `warmup` messages, and then the number of messages that the extent of the measurement
    /// requires.
    fn total(self, warmup: u64, extent: Extent) -> u64 {
        warmup.saturating_add(match extent {
            Extent::Messages(count) => count,
            Extent::Time(time) => (time.as_secs_f64() * self.rate).ceil() as u64,
        })
    }
}

/// A measurement whose messages are sent on a schedule.
#[derive(Debug)]
pub struct Paced {
    size: u32,
    schedule: Schedule,
    outlet: Outlet,
    warmup: u64,
    /// The number of messages, including those of the warm-up.
    total: u64,
    sent: u64,
    answered: u64,
    times: Histogram<u64>,
    /// The time at which the schedule began; `None` before that.
    started: Option<Instant>,
    /// The time at which the warm-up ended, and the time of the last answer. `None` during the warm-up.
    counted: Option<(Instant, Instant)>,
}

impl Paced {
    /// Makes the measurement that a plan describes, with `rate` messages per second.
    #[must_use]
    pub fn new(plan: &Plan, rate: f64) -> Self {
        let schedule = Schedule { rate };
        Self {
            size: plan.job.size,
            schedule,
            outlet: Outlet::new(&plan.job),
            warmup: plan.warmup,
            total: schedule.total(plan.warmup, plan.extent),
            sent: 0,
            answered: 0,
            times: Histogram::new_with_bounds(1, LONGEST, 3).expect("three digits are a valid precision"),
            started: None,
            counted: None,
        }
    }

    /// Returns the time at which a message is due, or `None` before the schedule has begun.
    fn time_of(&self, message: u64) -> Option<Instant> {
        self.started.map(|started| started + self.schedule.time_of(message))
    }

    fn is_due(&self, now: Instant) -> bool {
        self.sent < self.total && self.time_of(self.sent).is_some_and(|time| time <= now)
    }
}

impl ConnectionWork for Paced {
    fn begin(&mut self) {
        let now = Instant::now();
        self.started = Some(now);
        if self.warmup == 0 {
            self.counted = Some((now, now));
        }
    }

    fn lent(&mut self, _: &mut Context<'_>, _: ConnectionId, _: RemoteRegion) -> Result<(), Failure> {
        Err(Failure::new("the server lends memory that was not requested"))
    }

    fn arrived(&mut self, message: &[u8]) -> Result<(), String> {
        let now = Instant::now();
        let scheduled = self.time_of(self.answered).filter(|_| self.answered < self.sent);
        let Some(scheduled) = scheduled.filter(|_| Frame::read(message, self.size) == Some(Frame::Data)) else {
            return Err(format!("an unexpected message of {} bytes", message.len()));
        };
        // Answers arrive in the order of the messages, so this answer belongs to the oldest unanswered message.
        self.answered += 1;
        if self.answered <= self.warmup {
            if self.answered == self.warmup {
                self.counted = Some((now, now));
            }
            return Ok(());
        }
        self.counted = self.counted.map(|(from, _)| (from, now));
        let time = now.saturating_duration_since(scheduled).as_nanos();
        self.times.saturating_record(u64::try_from(time).unwrap_or(LONGEST));
        Ok(())
    }

    fn proceed(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let now = Instant::now();
        while self.is_due(now) && self.outlet.data(cx, conn) == Sent::Yes {
            self.sent += 1;
        }
    }

    fn unblock(&mut self) {
        self.outlet.unblock();
    }

    fn completed(&mut self, _: SendKind) {}

    fn is_watching(&self) -> bool {
        self.started.is_some() && self.sent < self.total
    }

    fn look(&mut self) -> bool {
        !self.outlet.is_blocked() && self.is_due(Instant::now())
    }

    fn wind_down(&mut self) {
        self.total = self.sent;
    }

    fn is_over(&self) -> bool {
        self.answered == self.total
    }

    fn done(&self) -> u64 {
        self.times.len()
    }

    fn progress(&self) -> f64 {
        self.answered as f64 / self.total.max(1) as f64
    }

    fn so_far(&self) -> Measured {
        self.measured()
    }

    fn measured(&self) -> Measured {
        let elapsed = self.counted.map_or(Duration::ZERO, |(from, to)| to - from);
        let done = self.done();
        let latency = (done > 0).then(|| self.times.clone());
        Measured { iterations: done, messages: done, elapsed, latency }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_is_even_and_does_not_drift() {
        let schedule = Schedule { rate: 250_000.0 };
        assert_eq!(schedule.time_of(0), Duration::ZERO);
        assert_eq!(schedule.time_of(1), Duration::from_micros(4));
        assert_eq!(schedule.time_of(250_000 * 86_400), Duration::from_secs(86_400));
    }

    #[test]
    fn a_schedule_ends_with_its_extent() {
        let schedule = Schedule { rate: 1000.0 };
        assert_eq!(schedule.total(10, Extent::Messages(90)), 100);
        assert_eq!(schedule.total(10, Extent::Time(Duration::from_millis(1500))), 1510);
        assert_eq!(schedule.total(10, Extent::Messages(u64::MAX)), u64::MAX);
        assert_eq!(Schedule { rate: 0.5 }.total(0, Extent::Time(Duration::from_secs(1))), 1);
    }
}
