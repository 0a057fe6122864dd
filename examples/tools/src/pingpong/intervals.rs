//! Intermediate results of a measurement, one for each interval.

use std::fmt;
use std::time::Instant;

use super::figures::{Measured, us};

/// The result of one interval of a measurement.
#[derive(Clone, Debug)]
pub struct Interval {
    /// The beginning of the interval, in seconds since the beginning of the measurement.
    pub from: f64,
    /// The end of the interval, in seconds since the beginning of the measurement.
    pub to: f64,
    /// The number of messages, counted as in [`Measured::messages`].
    pub messages: u64,
    /// The length of a message, in bytes.
    size: u32,
    /// The median and the 99th percentile of the latencies, measured as in [`Measured::latency`]. Their histogram is not kept, because a
    /// long measurement has many intervals.
    pub latency: Option<[u64; 2]>,
}

impl Interval {
    /// Returns messages per second, or 0 if no time has passed.
    #[must_use]
    pub fn messages_per_second(&self) -> f64 {
        let seconds = self.to - self.from;
        if seconds > 0.0 { self.messages as f64 / seconds } else { 0.0 }
    }

    /// Returns the throughput of payload, in Gbit/s.
    #[must_use]
    pub fn gbit_per_second(&self) -> f64 {
        self.messages_per_second() * f64::from(self.size) * 8.0 / 1e9
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>7.2} - {:>7.2} s: {:>9} messages, ", self.from, self.to, self.messages)?;
        match self.latency {
            Some(quantiles) => {
                let [p50, p99] = quantiles.map(us);
                write!(f, "p50 {p50:.2} us, p99 {p99:.2} us")
            }
            None => write!(f, "{:.3} Gbit/s, {:.0} messages/s", self.gbit_per_second(), self.messages_per_second()),
        }
    }
}

/// The intervals of a measurement. The first one begins when the warm-up has ended.
// local: intervals of the job
#[derive(Debug)]
pub struct Intervals {
    size: u32,
    /// The beginning of the measurement, and that of the current interval. `None` during the warm-up.
    begin: Option<(Instant, Instant)>,
    before: Measured,
    /// The intervals that have ended.
    pub ended: Vec<Interval>,
}

impl Intervals {
    /// Makes the intervals of a measurement whose messages have `size` bytes.
    #[must_use]
    pub const fn new(size: u32) -> Self {
        Self { size, begin: None, before: Measured::none(), ended: Vec::new() }
    }

    /// Ends the current interval, and begins the next one. `so_far` is the result since the warm-up. Returns the interval that has
    /// ended, or `None` during the warm-up.
    pub fn end(&mut self, so_far: Measured, now: Instant) -> Option<&Interval> {
        if self.begin.is_none() && so_far.messages == 0 {
            return None;
        }
        let began = now.checked_sub(so_far.elapsed).unwrap_or(now);
        let (begin, since) = self.begin.unwrap_or((began, began));
        self.begin = Some((begin, now));
        let seconds = |at: Instant| at.saturating_duration_since(begin).as_secs_f64();
        let before = std::mem::replace(&mut self.before, so_far.clone());
        let latency = so_far.latency.map(|mut latency| {
            if let Some(before) = &before.latency {
                // The subtraction cannot fail: the current histogram has all samples of the earlier one.
                let _ = latency.subtract(before);
            }
            [0.5, 0.99].map(|quantile| latency.value_at_quantile(quantile))
        });
        let messages = so_far.messages.saturating_sub(before.messages);
        self.ended.push(Interval { from: seconds(since), to: seconds(now), messages, size: self.size, latency });
        self.ended.last()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hdrhistogram::Histogram;

    use super::*;

    fn measured(seconds: u64, times: &[u64]) -> Measured {
        let mut latency = Histogram::new(3).unwrap();
        times.iter().for_each(|&time| latency.record(time).unwrap());
        let (messages, elapsed) = (times.len() as u64, Duration::from_secs(seconds));
        Measured { messages, elapsed, latency: Some(latency), ..Measured::none() }
    }

    #[test]
    fn each_interval_has_its_own_messages_and_the_warm_up_is_none() {
        let begin = Instant::now();
        let at = |second: u64| begin + Duration::from_secs(second);
        let mut intervals = Intervals::new(100);
        assert!(intervals.end(measured(0, &[]), at(10)).is_none());
        let first = intervals.end(measured(4, &[10_000, 20_000]), at(20)).unwrap();
        assert_eq!((first.from, first.to, first.messages), (0.0, 4.0, 2));
        let second = intervals.end(measured(9, &[10_000, 20_000, 90_000]), at(26)).unwrap();
        assert_eq!((second.from, second.to, second.messages), (4.0, 10.0, 1));
        assert!(second.latency.unwrap().iter().all(|time| (90_000..90_064).contains(time)), "{second:?}");
        assert!(size_of::<Interval>() <= 64, "an interval has no histogram");
        assert!(second.to_string().contains("1 messages, p50 9"), "{second}");
        // An interval in which no message arrived must be reported, too.
        let third = intervals.end(measured(9, &[10_000, 20_000, 90_000]), at(30)).unwrap();
        assert_eq!((third.messages, third.gbit_per_second()), (0, 0.0));
    }
}
