//! One side's stream of messages or operations. As many operations are in flight as the depth
//! allows, and as many messages as the send queue holds. A control message ends the stream.

use rdma_reactor::{ConnectionId, Context};

use super::frame::Frame;
use super::job::Job;
use super::outlet::{Outlet, Sent};
use super::target::Target;

/// The state of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamState {
    Idle,
    Flowing,
    /// The stream sends this control message, and then nothing.
    Closing(Frame),
}

/// One side's stream of messages.
#[derive(Debug)]
pub struct Stream {
    outlet: Outlet,
    depth: u32,
    /// The number of operations that have not completed. The completions of messages are not reported.
    outstanding: u32,
    /// The number of data messages since [`Stream::start`].
    sent: u64,
    limit: u64,
    state: StreamState,
}

impl Stream {
    /// Makes an idle stream of the messages or operations of a job.
    #[must_use]
    pub fn new(job: &Job) -> Self {
        Self { outlet: Outlet::new(job), depth: job.depth, outstanding: 0, sent: 0, limit: 0, state: StreamState::Idle }
    }

    /// Directs reads or writes to `target` from now on.
    pub fn aim(&mut self, target: Target) {
        self.outlet.aim(target);
    }

    /// Returns the number of data messages since the start.
    #[must_use]
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    /// Returns true if the stream is between its start and its end.
    #[must_use]
    pub fn is_flowing(&self) -> bool {
        self.state == StreamState::Flowing
    }

    /// Restarts the stream with at most `limit` messages. After them, the caller must end the stream.
    pub fn start(&mut self, limit: u64) {
        (self.sent, self.limit, self.state) = (0, limit, StreamState::Flowing);
    }

    /// Ends the stream with a control message.
    pub fn end(&mut self, with: Frame) {
        self.state = StreamState::Closing(with);
    }

    /// Records a completion of an operation.
    pub fn completed(&mut self) {
        self.outstanding = self.outstanding.saturating_sub(1);
    }

    /// Records that `on_writable` was called.
    pub const fn unblock(&mut self) {
        self.outlet.unblock();
    }

    /// Sends until a send is refused. The caller calls this after everything that may make sends possible.
    pub fn pump(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if self.outlet.is_blocked() {
            return;
        }
        while self.state == StreamState::Flowing && self.sent < self.limit && self.outstanding < self.depth {
            if self.outlet.data(cx, conn) != Sent::Yes {
                return;
            }
            self.sent += 1;
            self.outstanding += u32::from(self.outlet.is_aimed());
        }
        if let StreamState::Closing(frame) = self.state {
            if self.outlet.control(cx, conn, frame) == Sent::Yes {
                self.outstanding += u32::from(self.outlet.is_aimed());
                self.state = StreamState::Idle;
            }
        }
    }
}
