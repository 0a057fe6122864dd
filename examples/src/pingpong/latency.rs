//! The client's side of a latency measurement: one message to and fro, one write to and fro, or one read.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rdma_reactor::{ConnectionId, Context, RemoteRegion, SendKind};

use super::client::Work;
use super::failure::Failure;
use super::figures::Measured;
use super::frame::Frame;
use super::job::Op;
use super::outlet::{Outlet, Sent};
use super::plan::{Extent, Plan};
use super::target::{self, Inbox, Target};

/// Times kept aside: sorting them into the histogram takes longer than some of them are.
const RECENT: usize = 4096;

/// One to and fro, or one read, again and again.
#[derive(Debug)]
pub struct Latency {
    size: u32,
    op: Op,
    /// Where the answers to writes come.
    inbox: Option<Inbox>,
    extent: Extent,
    outlet: Outlet,
    warmup: u64,
    done: u64,
    times: Histogram<u64>,
    /// Since the histogram was last added to, of both ways.
    recent: Vec<Duration>,
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
            op: plan.job.op,
            inbox: None,
            extent: plan.extent,
            outlet: Outlet::new(plan.job.size),
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

impl Work for Latency {
    fn begin(&mut self) {
        self.started = Instant::now();
        self.sent_at = self.started;
    }

    fn resume(&mut self) {
        self.sent_at = Instant::now();
    }

    fn lent(&mut self, cx: &mut Context<'_>, conn: ConnectionId, memory: RemoteRegion) -> Result<(), Failure> {
        let target = Target::new(cx, conn, self.size, self.op, memory)?;
        self.outlet.aim(if self.op == Op::Write { target.counting(cx, conn)? } else { target });
        if self.op == Op::Write {
            let memory = target::lend(cx, conn, self.size, self.op)?;
            // Nothing else was sent: there is room.
            self.outlet.control(cx, conn, Frame::Lent(memory.remote()));
            self.inbox = Some(Inbox::new(memory));
        }
        Ok(())
    }

    fn arrived(&mut self, message: &[u8]) -> Result<(), String> {
        let now = Instant::now();
        if Frame::read(message, self.size) != Some(Frame::Data) || self.my_turn || self.op != Op::Send {
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
        // A read is its own answer.
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

    fn measured(&self) -> Measured {
        let mut times = self.times.clone();
        sort(&self.recent, self.op, &mut times);
        Measured {
            iterations: self.done,
            messages: self.done,
            elapsed: self.elapsed,
            latency: (self.done > 0).then_some(times),
        }
    }
}

impl Latency {
    /// The answer is here, and the next question goes at once: one look at the clock says both.
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
            sort(&self.recent, self.op, &mut self.times);
            self.recent.clear();
            self.resume();
        }
        self.done += 1;
        self.elapsed = now - self.started;
        self.over |= self.extent.is_reached(self.done, self.elapsed);
    }
}

/// Adds times of both ways to a histogram.
fn sort(times: &[Duration], op: Op, into: &mut Histogram<u64>) {
    for &both in times {
        let time = if op == Op::Read { both } else { both / 2 };
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // It grows as it has to; past what it can grow to, all are alike.
        if into.record(time).is_err() {
            into.saturating_record(time);
        }
    }
}
