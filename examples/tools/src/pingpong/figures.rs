//! The results of a measurement.

use std::time::Duration;

use hdrhistogram::Histogram;
use rdma_reactor::Stats;

use super::intervals::Interval;
use super::plan::Plan;

/// The result of one connection, or the sum of several that were measured at the same time.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The number of messages that the client has sent. For latency, this is the number of round trips.
    pub iterations: u64,
    /// The number of messages that are reported. In a latency measurement, only the messages of the client count. In a throughput
    /// measurement, the messages of both sides count.
    pub messages: u64,
    /// The time from the client's first message to the last answer.
    pub elapsed: Duration,
    /// The latencies, in ns. For messages and RDMA Writes, a latency is half a round trip. For RDMA Reads, it is the time of a whole read.
    /// In an open loop, it is a whole round trip, from the scheduled time of the message.
    pub latency: Option<Histogram<u64>>,
}

impl Measured {
    /// Returns an empty result, to which others can be added.
    #[must_use]
    pub const fn none() -> Self {
        Self { iterations: 0, messages: 0, elapsed: Duration::ZERO, latency: None }
    }

    /// Adds the result of another connection that was measured at the same time.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.iterations += other.iterations;
        self.messages += other.messages;
        self.elapsed = self.elapsed.max(other.elapsed);
        self.latency = match (self.latency, other.latency) {
            (Some(mut all), Some(more)) => {
                // The addition cannot fail, because the histogram grows as needed.
                let _ = all.add(more);
                Some(all)
            }
            (one, another) => one.or(another),
        };
        self
    }
}

/// The processor time of the client and the server, from the first connection to the end of the measurement. The warm-up is included.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessorTimes {
    /// The processor time of the client's process.
    pub client: Duration,
    /// The processor time of the server's process; `None` if the server has not reported it.
    pub server: Option<Duration>,
}

/// The result of a planned measurement.
// local: intervals of the job
#[derive(Clone, Debug)]
pub struct Figures {
    /// The plan of the measurement.
    pub plan: Plan,
    /// The result of all connections together.
    pub measured: Measured,
    /// The result of each interval.
    pub intervals: Vec<Interval>,
    /// The processor time of the client and the server.
    pub processors: ProcessorTimes,
    /// The name of the provider that carried the connections.
    pub provider: String,
    /// The counters of the client's reactor, from its start to the end of the measurement.
    pub stats: Stats,
    /// True if the user interrupted the measurement.
    pub interrupted: bool,
}

impl Figures {
    /// Returns messages per second, or 0 if no time has passed.
    #[must_use]
    pub fn messages_per_second(&self) -> f64 {
        let seconds = self.measured.elapsed.as_secs_f64();
        if seconds > 0.0 { self.measured.messages as f64 / seconds } else { 0.0 }
    }

    /// Returns the processor time for one message, or for one round trip, in us: the client's and the server's. The warm-up is included
    /// in the times and in the number of messages.
    #[must_use]
    pub fn processor_us_per_message(&self) -> [Option<f64>; 2] {
        let warmup = self.plan.warmup * u64::from(self.plan.job.connections);
        let messages = (self.measured.iterations + warmup) as f64;
        let each = |time: Duration| (messages > 0.0).then(|| time.as_secs_f64() * 1e6 / messages);
        [each(self.processors.client), self.processors.server.and_then(each)]
    }

    /// Returns the throughput of payload, in Gbit/s.
    #[must_use]
    pub fn gbit_per_second(&self) -> f64 {
        self.messages_per_second() * f64::from(self.plan.job.size) * 8.0 / 1e9
    }
}

/// Converts nanoseconds to microseconds.
#[must_use]
pub fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// Formats a number of bytes for people, such as 64 B or 4 KiB.
#[must_use]
pub fn size_label(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}
