//! The client's side of a latency measurement. With messages, it repeatedly sends one and waits for the answer. With RDMA Writes, it
//! writes and waits for the server's write. With RDMA Reads, it waits for each completion.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rdma_reactor::{ConnectionId, Context, RemoteRegion, SendKind};

use super::client::ConnectionWork;
use super::failure::Failure;
use super::figures::Measured;
use super::frame::Frame;
use super::job::{Job, Op};
use super::outlet::{Outlet, Sent};
use super::plan::{Extent, Plan};
use super::target::{self, Inbox, Target};

/// The number of round trips that are buffered before they are added to the histogram. Adding a single round trip to the histogram may take
/// longer than the round trip itself, so round trips are added in batches.
const RECENT: usize = 4096;

/// A latency measurement.
// local: round trips that an argument limits
#[derive(Debug)]
pub struct Latency {
    job: Job,
    /// The memory in which the server's writes arrive; `None` for other operations.
    inbox: Option<Inbox>,
    extent: Extent,
    outlet: Outlet,
    warmup: u64,
    done: u64,
    times: Histogram<u64>,
    /// The round trips that are not in the histogram yet.
    recent: Vec<Duration>,
    started: Instant,
    sent_at: Instant,
    elapsed: Duration,
    /// True if the answer has arrived and the next message is not sent yet.
    my_turn: bool,
    over: bool,
}

impl Latency {
    /// Makes the measurement that a plan describes.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let now = Instant::now();
        Self {
            job: plan.job,
            inbox: None,
            extent: plan.extent,
            outlet: Outlet::new(&plan.job),
            warmup: plan.warmup,
            done: 0,
            times: Histogram::new(3).expect("three digits are a valid precision"),
            recent: Vec::with_capacity(RECENT),
            started: now,
            sent_at: now,
            elapsed: Duration::ZERO,
            my_turn: true,
            over: false,
        }
    }
}

impl ConnectionWork for Latency {
    fn begin(&mut self) {
        self.started = Instant::now();
        self.sent_at = self.started;
    }

    fn resume(&mut self) {
        self.sent_at = Instant::now();
    }

    fn lent(&mut self, cx: &mut Context<'_>, conn: ConnectionId, memory: RemoteRegion) -> Result<(), Failure> {
        let target = Target::new(cx, conn, self.job.size, self.job.op, memory)?;
        self.outlet.aim(if self.job.op == Op::Write { target.counting(cx, conn)? } else { target });
        if self.job.op == Op::Write {
            let memory = target::lend(cx, conn, &self.job)?;
            // The result is ignored: this is the first message, so the send queue is not full.
            self.outlet.control(cx, conn, Frame::Lent(memory.remote()));
            self.inbox = Some(Inbox::new(memory));
        }
        Ok(())
    }

    fn arrived(&mut self, message: &[u8]) -> Result<(), String> {
        let now = Instant::now();
        if Frame::read(message, self.job.size) != Some(Frame::Data) || self.my_turn || self.job.op != Op::Send {
            return Err(format!("an unexpected message of {} bytes", message.len()));
        }
        self.answered(now);
        Ok(())
    }

    fn proceed(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if !self.my_turn || self.over {
            return;
        }
        self.my_turn = self.outlet.data(cx, conn) == Sent::Blocked;
    }

    fn unblock(&mut self) {
        self.outlet.unblock();
    }

    fn completed(&mut self, kind: SendKind) {
        // An RDMA Read has no answer of the server: its completion counts as the answer.
        if kind == SendKind::Read {
            self.answered(Instant::now());
        }
    }

    fn is_watching(&self) -> bool {
        self.inbox.is_some() && !self.over
    }

    #[inline]
    fn look(&mut self) -> bool {
        self.inbox.as_mut().is_some_and(Inbox::has_come)
    }

    fn seen(&mut self) {
        self.answered(Instant::now());
    }

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

    fn so_far(&self) -> Measured {
        self.measured()
    }

    fn measured(&self) -> Measured {
        let mut times = self.times.clone();
        sort(&self.recent, self.job.op, &mut times);
        Measured {
            iterations: self.done,
            messages: self.done,
            elapsed: self.elapsed,
            latency: (self.done > 0).then_some(times),
        }
    }
}

impl Latency {
    /// Records an answer. The next message is sent immediately, so the same reading of the clock ends this round trip and begins the
    /// next one.
    fn answered(&mut self, now: Instant) {
        self.my_turn = true;
        let sent_at = std::mem::replace(&mut self.sent_at, now);
        if self.warmup > 0 {
            self.warmup -= 1;
            self.started = now;
            return;
        }
        self.recent.push(now - sent_at);
        if self.recent.len() == RECENT {
            sort(&self.recent, self.job.op, &mut self.times);
            self.recent.clear();
            self.resume();
        }
        self.done += 1;
        self.elapsed = now - self.started;
        self.over |= self.extent.is_reached(self.done, self.elapsed);
    }
}

/// Adds round trips to a histogram, as half round trips or, for RDMA Reads, as whole ones.
fn sort(times: &[Duration], op: Op, into: &mut Histogram<u64>) {
    for &both in times {
        let time = if op == Op::Read { both } else { both / 2 };
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // The histogram grows as needed. A time beyond its largest value is recorded as that value.
        if into.record(time).is_err() {
            into.saturating_record(time);
        }
    }
}
