//! A listener, for tasks of any thread.

use std::fmt;
use std::net::SocketAddr;

use tokio::sync::mpsc;

use super::connection::ThreadedConnection;
use super::link::{ConnectionParts, ListenerHandle};

/// A listener of a [`super::ThreadedReactor`]. When it is dropped, the reactor stops listening, and closes the connections that were not
/// accepted.
pub struct ThreadedListener {
    handle: ListenerHandle,
    address: SocketAddr,
    backlog: mpsc::UnboundedReceiver<ConnectionParts>,
}

impl fmt::Debug for ThreadedListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadedListener({}, {})", self.handle.id, self.address)
    }
}

impl ThreadedListener {
    pub(super) const fn new(
        handle: ListenerHandle,
        address: SocketAddr,
        backlog: mpsc::UnboundedReceiver<ConnectionParts>,
    ) -> Self {
        Self { handle, address, backlog }
    }

    /// Returns the address that it listens on.
    #[must_use]
    pub const fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next connection of a peer. Returns `None` if the reactor is being drained or its thread has ended. Dropping the future
    /// loses no connection.
    ///
    /// Example: the [module](super).
    pub async fn accept(&mut self) -> Option<ThreadedConnection> {
        self.backlog.recv().await.map(ThreadedConnection::new)
    }
}
