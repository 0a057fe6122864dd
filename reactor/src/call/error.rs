//! The errors of calls and of answers.

use super::frame::Status;
use crate::{DisconnectReason, SendErrorKind};

/// The reason why a call was not made. The peer has not seen the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The connection has reached a limit of [`super::CallLimits`]: the largest number of calls in flight, or the largest number of bytes
    /// of queued requests.
    #[error("the connection has reached its limit of calls in flight or of queued bytes: wait for an answer")]
    Full,
    /// The connection does not accept the request: the connection is not open,
    /// [`super::Calls::finish`] was called, or the request is too long. The payload and the header
    /// of 16 bytes together must not exceed [`crate::ConnectionContext::max_copied`].
    #[error(transparent)]
    Send(SendErrorKind),
}

/// A call that was not made. It contains the reason and the tag of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct RefusedCall<T> {
    /// The reason why the call was not made.
    pub why: Refusal,
    /// The tag of the call.
    pub tag: T,
}

/// The reason why a call has ended without an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The call was not made: the peer has not received the request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// No answer arrived before the deadline of the call. The peer may have served the request, or may still serve it.
    #[error("no answer arrived within the time of the call")]
    Deadline,
    /// The peer has reached one of its limits, and has not served the request.
    #[error("the peer is overloaded: try again later, or elsewhere")]
    Overloaded,
    /// The peer accepts no more requests on this connection. It has not served the request of this call.
    #[error("the peer is being drained: try elsewhere")]
    Draining,
    /// The peer's program has dismissed the request without an answer.
    #[error("the peer's program has dismissed the request")]
    Unanswered,
    /// The peer has served the request, but its answer is longer than the longest message that the local side accepts, or than the
    /// peer's [`LargeMessageSettings::memory`](crate::LargeMessageSettings::memory).
    #[error("the answer is too long: raise LargeMessageSettings::max_message here, or memory at the peer")]
    AnswerTooLong,
    /// The connection has ended. The peer may have served the request.
    #[error("the connection has ended: {0}")]
    Disconnected(DisconnectReason),
    /// The reactor has ended. The call was not made, or its answer can no longer arrive.
    #[error("the reactor has ended")]
    Gone,
    /// The peer has refused the request with a status that this version does not know.
    #[error("the peer answered with the unknown status {0}")]
    Other(u8),
}

impl CallError {
    /// Returns true if the peer's program has certainly not received the request. The program can then make the call again, and the peer
    /// will not serve it twice.
    #[must_use]
    pub const fn is_unserved(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::Overloaded | Self::Draining)
    }

    pub(super) const fn of(status: Status) -> Self {
        match status {
            Status::OVERLOADED => Self::Overloaded,
            Status::DRAINING => Self::Draining,
            Status::UNANSWERED => Self::Unanswered,
            Status::TOO_LONG => Self::AnswerTooLong,
            Status(other) => Self::Other(other),
        }
    }
}

/// The reason why an answer was not sent. The request has ended nevertheless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AnswerError {
    /// The caller does not wait any more: the deadline of the call has passed, or the caller has cancelled the call.
    #[error("the caller does not wait for the answer any more")]
    Late,
    /// The connection has ended, or the request has already been answered or dismissed.
    #[error("there is no such request")]
    Gone,
    /// The connection has no room for the answer now, and the answer cannot be queued, because one
    /// of the [`super::CallLimits`] is reached. The caller gets [`CallError::Unanswered`].
    #[error(
        "the answers that wait for room have reached CallLimits::bytes_per_connection, or the connection's share of CallLimits::bytes"
    )]
    Overloaded,
    /// The connection does not accept the answer, for instance because the answer is longer than the longest message that the peer accepts.
    /// The caller gets an error instead.
    #[error(transparent)]
    Send(SendErrorKind),
}
