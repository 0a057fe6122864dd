//! The errors of calls and of answers.

use std::fmt;

use super::frame::Status;
use crate::{DisconnectReason, SendErrorKind};

/// The reason why a call was not made. The peer has not seen it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// As many calls are in flight on this connection, or as many bytes wait for room on it, as [`super::Limits`] allows.
    #[error("as many calls of this connection are in flight as its limits allow: wait for an answer")]
    Full,
    /// The connection does not accept it: it is not open, it is being finished ([`super::Calls::finish`]), or the payload with its header of
    /// 16 bytes is longer than the peer takes.
    #[error(transparent)]
    Send(SendErrorKind),
}

/// A call that was not made, and its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedCall<T> {
    /// The reason.
    pub why: Refusal,
    /// The tag of the call.
    pub tag: T,
}

impl<T> fmt::Display for RefusedCall<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)
    }
}

impl<T: fmt::Debug> std::error::Error for RefusedCall<T> {}

/// The reason why a call has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// It was not made.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Its time is over. The peer may have served it, or may still do so.
    #[error("no answer within the time of the call")]
    Deadline,
    /// The peer is at one of its limits, and has not served it.
    #[error("the peer is overloaded: try again later, or elsewhere")]
    Overloaded,
    /// The peer serves no more calls on this connection, and has not served it.
    #[error("the peer is being drained: try elsewhere")]
    Draining,
    /// The program of the peer has dropped the request without an answer.
    #[error("the program of the peer has dropped the request")]
    Unanswered,
    /// The peer has served it, and this side does not take an answer of that length.
    #[error("the answer is longer than this side takes: raise LargeMessageSettings::max_message")]
    AnswerTooLong,
    /// The connection has ended. The peer may have served it.
    #[error("the connection has ended: {0}")]
    Disconnected(DisconnectReason),
    /// The reactor of the call is gone.
    #[error("the reactor is gone")]
    Gone,
    /// A reason that this version does not know.
    #[error("the peer gives the unknown reason {0}")]
    Other(u8),
}

impl CallError {
    /// Returns true if the program of the peer has certainly not seen the request, so that making the call again does nothing twice.
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

/// The reason why an answer was not sent. The request is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AnswerError {
    /// The caller does not wait for it any more: the time of the call is over, or the caller has cancelled it.
    #[error("the caller does not wait for the answer any more")]
    Late,
    /// The connection has ended, or the request was answered before.
    #[error("there is no such request")]
    Gone,
    /// The connection does not accept the answer, for instance because it is longer than the peer takes. The caller is notified.
    #[error(transparent)]
    Send(SendErrorKind),
}
