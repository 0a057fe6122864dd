//! The client's side of a throughput measurement. In a round, the client sends a stream and its end, and waits until the server
//! confirms that everything has arrived. The first round is the warm-up, the second one the measurement.

use std::time::{Duration, Instant};

use rdma_reactor::{ConnectionId, Context, RemoteRegion, SendKind};

use super::client::ConnectionWork;
use super::failure::Failure;
use super::figures::Measured;
use super::frame::Frame;
use super::job::Op;
use super::plan::{Extent, Plan};
use super::stream::Stream;
use super::target::Target;

/// The number of messages between two readings of the clock.
const CLOCK_EVERY: u64 = 16;

/// The state of a throughput measurement.
#[derive(Debug)]
pub struct Throughput {
    size: u32,
    op: Op,
    bidirectional: bool,
    extent: Extent,
    stream: Stream,
    /// The number of messages in the warm-up round; 0 after that round.
    warmup: u64,
    /// The number of data messages that the server has sent in the current round.
    received: u64,
    looked_at: u64,
    started: Instant,
    elapsed: Duration,
    /// The number of messages in both directions. `None` until the server has confirmed the measured round, or the user has interrupted the
    /// warm-up.
    counted: Option<u64>,
}

impl Throughput {
    /// Makes the measurement that a plan describes.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        Self {
            size: plan.job.size,
            op: plan.job.op,
            bidirectional: plan.job.bidirectional,
            extent: plan.extent,
            stream: Stream::new(&plan.job),
            warmup: plan.warmup,
            received: 0,
            looked_at: 0,
            started: Instant::now(),
            elapsed: Duration::ZERO,
            counted: None,
        }
    }

    /// Returns true if the user has interrupted the warm-up. The server may still confirm that round.
    const fn is_stopped(&self) -> bool {
        self.warmup > 0 && self.counted.is_some()
    }

    /// Ends the round if enough messages are sent, or if the round has lasted long enough.
    fn look_at_the_clock(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let sent = self.stream.sent();
        if !self.stream.is_flowing() {
            return;
        }
        let enough = match (self.warmup, self.extent) {
            (0, Extent::Messages(count)) => sent >= count,
            (0, Extent::Time(_)) if sent < self.looked_at + CLOCK_EVERY => false,
            (0, Extent::Time(time)) => {
                self.looked_at = sent;
                self.elapsed = self.started.elapsed();
                self.elapsed >= time
            }
            (warmup, _) => sent >= warmup,
        };
        if enough {
            self.stream.end(Frame::Last(sent));
            self.stream.pump(cx, conn);
        }
    }
}

impl ConnectionWork for Throughput {
    fn begin(&mut self) {
        let limit = match (self.warmup, self.extent) {
            (0, Extent::Messages(count)) => count,
            (0, Extent::Time(_)) => u64::MAX,
            (warmup, _) => warmup,
        };
        (self.received, self.looked_at) = (0, 0);
        self.started = Instant::now();
        self.stream.start(limit);
    }

    fn lent(&mut self, cx: &mut Context<'_>, conn: ConnectionId, memory: RemoteRegion) -> Result<(), Failure> {
        self.stream.aim(Target::new(cx, conn, self.size, self.op, memory)?);
        Ok(())
    }

    fn arrived(&mut self, message: &[u8]) -> Result<(), String> {
        match Frame::read(message, self.size) {
            Some(Frame::Data) if self.bidirectional => self.received += 1,
            Some(Frame::Done(_)) if self.is_stopped() => {}
            Some(Frame::Done(count)) if !self.stream.is_flowing() && self.counted.is_none() => {
                self.elapsed = self.started.elapsed();
                let (expected, counted) = match self.bidirectional {
                    true => (self.received, self.received + self.stream.sent()),
                    false => (self.stream.sent(), self.stream.sent()),
                };
                if count != expected {
                    return Err(format!("it counted {count} messages where there were {expected}"));
                }
                if self.warmup == 0 {
                    self.counted = Some(counted);
                } else {
                    self.warmup = 0;
                    self.begin();
                }
            }
            _ => return Err(format!("an unexpected message of {} bytes", message.len())),
        }
        Ok(())
    }

    fn proceed(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.stream.pump(cx, conn);
        self.look_at_the_clock(cx, conn);
    }

    fn unblock(&mut self) {
        self.stream.unblock();
    }

    fn completed(&mut self, _: SendKind) {
        self.stream.completed();
    }

    fn wind_down(&mut self) {
        // The measurement was interrupted during the warm-up, so there are no results.
        if self.warmup > 0 {
            self.counted = Some(0);
            self.elapsed = Duration::ZERO;
            self.stream.stop();
        } else if self.stream.is_flowing() {
            self.stream.end(Frame::Last(self.stream.sent()));
        }
    }

    fn is_over(&self) -> bool {
        self.counted.is_some()
    }

    fn done(&self) -> u64 {
        if self.warmup > 0 { 0 } else { self.stream.sent() }
    }

    fn progress(&self) -> f64 {
        self.extent.share(self.done(), self.elapsed)
    }

    fn so_far(&self) -> Measured {
        if self.warmup > 0 {
            return Measured::none();
        }
        let (sent, elapsed) = (self.stream.sent(), self.started.elapsed());
        Measured { iterations: sent, messages: sent + self.received, elapsed, latency: None }
    }

    fn measured(&self) -> Measured {
        let messages = self.counted.unwrap_or(0);
        let iterations = if messages > 0 { self.stream.sent() } else { 0 };
        Measured { iterations, messages, elapsed: self.elapsed, latency: None }
    }
}

#[cfg(test)]
mod tests {
    use rdma_reactor::{ProviderChoice, Security};

    use super::*;
    use crate::pingpong::job::{Job, Mode};

    /// Returns a measurement whose warm-up has begun.
    fn warming() -> Throughput {
        let mut work = Throughput::new(&Plan {
            job: Job { mode: Mode::Throughput, ..Job::IDLE },
            extent: Extent::Messages(10),
            warmup: 5,
            rate: None,
            provider: ProviderChoice::Iwarp,
            exchange: None,
            security: Security::Plain,
            interval: None,
        });
        work.begin();
        work
    }

    /// The client may have sent the end of the warm-up before the user interrupts it. The server then confirms the warm-up afterwards.
    #[test]
    fn the_end_of_an_interrupted_warm_up_is_no_violation() {
        let mut work = warming();
        work.stream.end(Frame::Last(0));
        work.wind_down();
        assert!(work.is_over() && !work.stream.is_flowing());
        assert_eq!(work.arrived(&Frame::Done(0).control()), Ok(()));
        assert!(work.is_over() && work.measured().messages == 0);
    }

    #[test]
    fn an_interrupted_warm_up_sends_nothing_more() {
        let mut work = warming();
        assert!(work.stream.is_flowing());
        work.wind_down();
        assert!(work.is_over() && !work.stream.is_flowing());
        // The warm-up cannot become the measurement.
        assert_eq!((work.done(), work.so_far().messages, work.measured().iterations), (0, 0, 0));
    }
}
