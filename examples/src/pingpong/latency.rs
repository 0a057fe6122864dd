//! The client's side of a latency measurement: one message to and fro.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rdma_reactor::{ConnectionId, Context};

use super::client::Work;
use super::figures::Measured;
use super::frame::Frame;
use super::outlet::{Outlet, Sent};
use super::plan::{Extent, Plan};

/// One message to and fro, again and again.
#[derive(Debug)]
pub struct Latency {
    size: u32,
    extent: Extent,
    outlet: Outlet,
    warmup: u64,
    done: u64,
    half_rtt: Histogram<u64>,
    started: Instant,
    sent_at: Instant,
    elapsed: Duration,
    /// The answer has come, the next question has not gone.
    my_turn: bool,
    over: bool,
}

impl Latency {
    /// As planned.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let now = Instant::now();
        Self {
            size: plan.job.size,
            extent: plan.extent,
            outlet: Outlet::new(plan.job.size),
            warmup: plan.warmup,
            done: 0,
            half_rtt: Histogram::new(3).expect("three digits are a valid precision"),
            started: now,
            sent_at: now,
            elapsed: Duration::ZERO,
            my_turn: true,
            over: false,
        }
    }
}

impl Work for Latency {
    fn begin(&mut self) {
        self.started = Instant::now();
    }

    fn arrived(&mut self, message: &[u8]) -> Result<(), String> {
        let now = Instant::now();
        if Frame::read(message, self.size) != Some(Frame::Data) || self.my_turn {
            return Err(format!("an unexpected message of {} bytes", message.len()));
        }
        self.my_turn = true;
        if self.warmup > 0 {
            self.warmup -= 1;
            self.started = now;
            return Ok(());
        }
        let rtt = now - self.sent_at;
        let half = u64::try_from(rtt.as_nanos() / 2).unwrap_or(u64::MAX);
        self.half_rtt.record(half).map_err(|error| format!("a round trip of {rtt:?} ({error})"))?;
        self.done += 1;
        self.elapsed = now - self.started;
        self.over |= self.extent.is_reached(self.done, self.elapsed);
        Ok(())
    }

    fn proceed(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if !self.my_turn || self.over {
            return;
        }
        self.sent_at = Instant::now();
        self.my_turn = self.outlet.data(cx, conn) == Sent::Blocked;
    }

    fn completed(&mut self) {}

    fn wind_down(&mut self) {
        self.over = true;
    }

    fn is_over(&self) -> bool {
        self.over
    }

    fn done(&self) -> u64 {
        self.done
    }

    fn progress(&self) -> f64 {
        self.extent.share(self.done, self.elapsed)
    }

    fn measured(&self) -> Measured {
        Measured {
            iterations: self.done,
            messages: self.done,
            elapsed: self.elapsed,
            half_rtt: (self.done > 0).then(|| self.half_rtt.clone()),
        }
    }
}
