//! The errors of a [`super::ThreadedReactor`] and of its connections.

use crate::{DisconnectReason, Outcome};

/// The reason why a message was not queued or received.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionEnd {
    /// The connection has ended.
    #[error(transparent)]
    Disconnected(DisconnectReason),
    /// The reactor's thread has ended.
    #[error("the reactor's thread has ended")]
    Reactor,
    /// The message is longer than the longest message that the peer accepts, or than the local
    /// [`LargeMessageSettings::memory`](crate::LargeMessageSettings::memory). The connection stays open.
    #[error("a message of {len} bytes is longer than the peer accepts, or than the memory for copies: at most {max}")]
    TooLong {
        /// The length of the message, in bytes.
        len: usize,
        /// The smaller of the two limits, in bytes.
        max: u64,
    },
}

/// The reason why [`super::Sender::deliver`] cannot confirm that a message was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeliverError {
    /// The message was not sent, with one exception: [`ConnectionEnd::Reactor`] means that the
    /// thread ended while the connection was open, and the message may have been sent.
    #[error(transparent)]
    NotSent(#[from] ConnectionEnd),
    /// The connection ended before the send completed ([`Outcome::Failed`]): the peer may or may not have received the
    /// message. Or the peer's program has refused the message ([`Outcome::Refused`]), and has not received it.
    #[error("the connection ended before the message was sent: {0:?}")]
    Unknown(Outcome),
}

/// The reason why the reactor's thread has ended without a drain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
// local: the text of one error
pub enum ThreadError {
    /// The reactor failed. The string is the text of the [`crate::Error`].
    #[error("the reactor failed: {0}")]
    Failed(String),
    /// The reactor's thread panicked. The string is the message of the panic.
    #[error("the reactor's thread panicked: {0}")]
    Panicked(String),
}

/// The error of [`super::ThreadedReactor::block_on`] when this method is called on the reactor's thread. That thread
/// would wait for itself forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block_on was called on the reactor's own thread: use the Context there, or call it on another thread")]
pub struct OwnThread;
