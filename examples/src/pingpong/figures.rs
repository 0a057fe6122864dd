//! What a measurement found.

use std::time::Duration;

use hdrhistogram::Histogram;
use rdma_reactor::Stats;

use super::plan::Plan;

/// What one connection measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Messages of the client; of latency, round trips.
    pub iterations: u64,
    /// Messages that count: of latency those one way, of throughput those of all directions.
    pub messages: u64,
    /// From the first message to the last answer.
    pub elapsed: Duration,
    /// Halves of the round trips or whole reads, ns; of latency only.
    pub latency: Option<Histogram<u64>>,
}

/// What one connection measured, and how.
#[derive(Clone, Debug)]
pub struct Figures {
    /// What was to be measured.
    pub plan: Plan,
    /// What was.
    pub measured: Measured,
    /// Name of the provider that carried it.
    pub provider: &'static str,
    /// The client's loop, from the start of its reactor to the end of the measurement.
    pub stats: Stats,
    /// The user stopped it.
    pub interrupted: bool,
}

impl Figures {
    /// Messages per second; 0 when there is nothing to divide.
    #[must_use]
    pub fn messages_per_second(&self) -> f64 {
        let seconds = self.measured.elapsed.as_secs_f64();
        if seconds > 0.0 { self.measured.messages as f64 / seconds } else { 0.0 }
    }

    /// Payload, Gbit/s.
    #[must_use]
    pub fn gbit_per_second(&self) -> f64 {
        self.messages_per_second() * f64::from(self.plan.job.size) * 8.0 / 1e9
    }
}

/// Nanoseconds as microseconds.
#[must_use]
pub fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// Bytes as people write them: 64 B, 4 KiB.
#[must_use]
pub fn size_label(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}
