//! Why something of a reactor on a thread of its own does not go on.

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
    /// The message is longer than the peer takes. The connection goes on.
    #[error("a message of {len} bytes: the peer takes at most {max}")]
    TooLong {
        /// Its length, bytes.
        len: usize,
        /// The peer's limit, bytes.
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
    /// The connection ended first, and the peer may have the message or not: [`Outcome::Failed`].
    #[error("the connection ended before the message was sent: {0:?}")]
    Unknown(Outcome),
}

/// The reason why the reactor's thread has ended before it was drained.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ThreadError {
    /// The reactor as a whole failed, with the text of [`crate::Error`].
    #[error("the reactor failed: {0}")]
    Failed(String),
    /// Something on the thread panicked, with the text of the panic.
    #[error("the reactor's thread panicked: {0}")]
    Panicked(String),
}

/// [`super::ThreadedReactor::block_on`] was called on the reactor's own thread, where it would wait for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reactor's own thread cannot wait for the reactor: use the Context, or another thread")]
pub struct OwnThread;
