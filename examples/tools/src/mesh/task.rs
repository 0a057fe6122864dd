//! One measurement, on the side that carries it out. The peer answers pings, and provides memory to write to.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rdma_reactor::{ConnectionId, Context, Region, RegionOptions, RemoteRegion, SendErrorKind};

use super::control::{Figure, LatencyFigures, MeasuredFigure};
use super::frame::{self, LinkFrame};
use super::outbox::Outbox;

/// The length of an RDMA Write, in bytes.
pub const BLOCK: u32 = 64 << 10;
/// The number of RDMA Writes in flight during a bandwidth measurement.
const DEPTH: u32 = 8;
/// The time limit of a latency measurement. It is short, because on a large mesh many pairs wait for their turn.
const LATENCY_TIME: Duration = Duration::from_secs(1);

/// The sizes and durations of measurements.
#[derive(Clone, Copy, Debug)]
pub struct TaskExtent {
    /// The length of a ping, in bytes.
    pub size: usize,
    /// The largest number of pings. The time limit may end the measurement earlier.
    pub iterations: u64,
    /// The duration of a bandwidth measurement.
    pub bandwidth: Duration,
}

/// A measurement in progress.
#[derive(Debug)]
pub struct Task {
    number: u32,
    peer: usize,
    until: Instant,
    extent: TaskExtent,
    work: TaskState,
}

// local: the length of a ping is fixed
#[derive(Debug)]
enum TaskState {
    /// The measurement has not begun.
    New(Figure),
    /// Pings are exchanged. `times` has the half round trips. `warmup` is the number of remaining pings that are not measured.
    Pinging { ping: Vec<u8>, times: Histogram<u64>, warmup: u64, sent_at: Instant, end: Instant },
    /// The rank waits for memory of the peer.
    Borrowing,
    /// RDMA Writes are in flight. `out` is the number of Writes in flight, and `blocks` the number of Writes that have completed.
    Writing { local: Region, remote: RemoteRegion, out: u32, blocks: u64, started: Instant },
    /// The rank waits for the peer to confirm that all writes have arrived. The local memory is kept until then, because the last
    /// writes may still be in flight.
    Closing { bits: f64, started: Instant, _local: Region },
}

/// The result of a measurement, or the reason why it failed.
pub type TaskResult = Result<MeasuredFigure, String>;

impl Task {
    /// Makes a measurement, which fails if it has not ended by `until`.
    #[must_use]
    pub const fn new(number: u32, peer: usize, figure: Figure, extent: TaskExtent, until: Instant) -> Self {
        Self { number, peer, until, extent, work: TaskState::New(figure) }
    }

    /// Returns the number of the measurement.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// Returns the rank of the peer.
    #[must_use]
    pub const fn peer(&self) -> usize {
        self.peer
    }

    /// Returns true if the time limit of the measurement has passed.
    #[must_use]
    pub fn is_late(&self, now: Instant) -> bool {
        now >= self.until
    }

    /// Begins the measurement.
    pub fn begin(&mut self, cx: &mut Context<'_>, conn: ConnectionId, outbox: &mut Outbox, now: Instant) {
        let TaskState::New(figure) = self.work else { return };
        self.work = match figure {
            Figure::Latency => {
                let ping = frame::ping(self.number, self.extent.size);
                outbox.post(cx, conn, &ping);
                let times = Histogram::new(3).expect("three digits are a valid precision");
                let warmup = self.extent.iterations / 10;
                TaskState::Pinging { ping, times, warmup, sent_at: now, end: now + LATENCY_TIME }
            }
            Figure::Bandwidth => {
                outbox.post(cx, conn, &LinkFrame::Borrow(self.number, BLOCK).encode());
                TaskState::Borrowing
            }
        };
    }

    /// Handles an answer of the peer. Returns the result if the measurement has ended.
    pub fn answer(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        outbox: &mut Outbox,
        frame: LinkFrame,
        now: Instant,
    ) -> Option<TaskResult> {
        match (frame, &mut self.work) {
            (LinkFrame::Pong(task), TaskState::Pinging { ping, times, warmup, sent_at, end })
                if task == self.number =>
            {
                if *warmup > 0 && now < *end {
                    *warmup -= 1;
                } else {
                    let half = u64::try_from((now - *sent_at).as_nanos() / 2).unwrap_or(u64::MAX);
                    // The histogram grows as needed. If a time is beyond the largest value of the histogram, it is recorded as that value.
                    if times.record(half).is_err() {
                        times.saturating_record(half);
                    }
                }
                if times.len() >= self.extent.iterations || (now >= *end && !times.is_empty()) {
                    let us = |quantile| times.value_at_quantile(quantile) as f64 / 1e3;
                    let latency = LatencyFigures { p50_us: us(0.5), p99_us: us(0.99), samples: times.len() };
                    return Some(Ok(MeasuredFigure::Latency(latency)));
                }
                outbox.post(cx, conn, ping);
                *sent_at = now;
                None
            }
            (LinkFrame::Lent(task, remote), TaskState::Borrowing) if task == self.number => {
                if remote.len != u64::from(BLOCK) {
                    return Some(Err(format!("the peer lends {} bytes where {BLOCK} are needed", remote.len)));
                }
                match cx.regions().register(conn, BLOCK as usize, &RegionOptions::new()) {
                    Ok(local) => self.work = TaskState::Writing { local, remote, out: 0, blocks: 0, started: now },
                    Err(error) => return Some(Err(format!("no memory to write from: {error}"))),
                }
                self.write(cx, conn)
            }
            (LinkFrame::Seen(task), TaskState::Closing { bits, started, .. }) if task == self.number => {
                Some(Ok(MeasuredFigure::Bandwidth(*bits / (now - *started).as_secs_f64().max(1e-9) / 1e9)))
            }
            (LinkFrame::Refused(task, why), _) if task == self.number => Some(Err(format!("the peer refused: {why}"))),
            // The answer belongs to an earlier measurement, which was given up.
            _ => None,
        }
    }

    /// Handles the completion of a write. Posts the next write, or sends [`LinkFrame::Written`] if the duration of the measurement has
    /// passed. Returns the failure if the device has refused a write, and otherwise `None`.
    pub fn wrote(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        outbox: &mut Outbox,
        now: Instant,
    ) -> Option<TaskResult> {
        let TaskState::Writing { out, blocks, started, .. } = &mut self.work else { return None };
        *out = out.saturating_sub(1);
        *blocks += 1;
        if now - *started < self.extent.bandwidth {
            return self.write(cx, conn);
        }
        let (bits, started) = ((*blocks + u64::from(*out)) as f64 * f64::from(BLOCK) * 8.0, *started);
        // The peer receives this message after all earlier writes.
        outbox.post(cx, conn, &LinkFrame::Written(self.number).encode());
        if let TaskState::Writing { local, .. } = std::mem::replace(&mut self.work, TaskState::Borrowing) {
            self.work = TaskState::Closing { bits, started, _local: local };
        }
        None
    }

    /// Posts writes until `DEPTH` are in flight or a write is refused for now. If the device refuses to write, returns this failure.
    /// Otherwise returns `None`.
    pub fn write(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Option<TaskResult> {
        let TaskState::Writing { local, remote, out, .. } = &mut self.work else { return None };
        while *out < DEPTH {
            match cx.remote(conn).write(*remote, local, 0..BLOCK as usize) {
                Ok(_) => *out += 1,
                Err(SendErrorKind::WouldBlock(_) | SendErrorKind::Closed) => return None,
                Err(error) => return Some(Err(format!("the device refuses to write: {error}"))),
            }
        }
        None
    }
}
