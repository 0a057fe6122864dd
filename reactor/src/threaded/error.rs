//! The errors of a reactor on a separate thread.

use crate::{DisconnectReason, Outcome};

/// The reason why a connection did not carry a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionEnd {
    /// The connection has ended.
    #[error(transparent)]
    Disconnected(DisconnectReason),
    /// The reactor's thread has ended.
    #[error("the reactor's thread has ended")]
    Reactor,
    /// The message is longer than the peer accepts. The connection stays open.
    #[error("a message of {len} bytes is longer than the peer accepts: at most {max}")]
    TooLong {
        /// The length of the message, bytes.
        len: usize,
        /// The limit of the peer, bytes.
        max: u64,
    },
}

/// The reason why a message was not delivered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeliverError {
    /// The message was not sent.
    #[error(transparent)]
    NotSent(#[from] ConnectionEnd),
    /// The connection ended first. The peer may or may not have received the message: [`Outcome::Failed`].
    #[error("the connection ended before the message was sent: {0:?}")]
    Unknown(Outcome),
}

/// The reason why the reactor's thread has ended without a drain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ThreadError {
    /// The reactor failed, with the text of [`crate::Error`].
    #[error("the reactor failed: {0}")]
    Failed(String),
    /// The thread panicked, with the text of the panic.
    #[error("the reactor's thread panicked: {0}")]
    Panicked(String),
}

/// The error of [`super::ThreadedReactor::block_on`] on the reactor's own thread, where it would deadlock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block_on was called on the reactor's own thread: use the Context there, or call it on another thread")]
pub struct OwnThread;
