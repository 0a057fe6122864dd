//! A stream of data messages or one-sided operations from one side. The number of operations in flight is limited by the depth of the job.
//! The number of messages in flight is limited by the send queue. A control message ends the stream.

use rdma_reactor::{ConnectionId, Context};

use super::frame::Frame;
use super::job::Job;
use super::outlet::{Outlet, Sent};
use super::target::Target;

/// The state of a stream: idle, flowing, or closing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamState {
    Idle,
    Flowing,
    /// The stream must still send this control message, and nothing after it.
    Closing(Frame),
}

/// The stream of one side.
#[derive(Debug)]
pub struct Stream {
    outlet: Outlet,
    depth: u32,
    /// The number of operations in flight. Messages are not counted, because their completions are not reported.
    outstanding: u32,
    /// The number of data messages or operations since [`Stream::start`].
    sent: u64,
    limit: u64,
    state: StreamState,
}

impl Stream {
    /// Makes a stream for the messages or operations of a job. It does not send yet.
    #[must_use]
    pub fn new(job: &Job) -> Self {
        Self { outlet: Outlet::new(job), depth: job.depth, outstanding: 0, sent: 0, limit: 0, state: StreamState::Idle }
    }

    /// Sets the target of one-sided operations.
    pub fn aim(&mut self, target: Target) {
        self.outlet.aim(target);
    }

    /// Returns the number of data messages or operations since [`Stream::start`].
    #[must_use]
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    /// Returns true after [`Stream::start`] and before [`Stream::end`].
    #[must_use]
    pub fn is_flowing(&self) -> bool {
        self.state == StreamState::Flowing
    }

    /// Starts the stream, for the first time or again after its end. The stream sends at most `limit` messages or operations. After these,
    /// the caller must call [`Stream::end`].
    pub fn start(&mut self, limit: u64) {
        (self.sent, self.limit, self.state) = (0, limit, StreamState::Flowing);
    }

    /// Ends the stream: the next message is the control message `with`.
    pub fn end(&mut self, with: Frame) {
        self.state = StreamState::Closing(with);
    }

    /// Stops the stream: it sends nothing more, and no control message.
    pub fn stop(&mut self) {
        self.state = StreamState::Idle;
    }

    /// Records that an operation has completed.
    pub fn completed(&mut self) {
        self.outstanding = self.outstanding.saturating_sub(1);
    }

    /// Permits sends again. Called by `on_writable`.
    pub const fn unblock(&mut self) {
        self.outlet.unblock();
    }

    /// Sends until a send is refused. Must be called after each event that may make a send possible.
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
