//! A listener that a task of any thread may use.

use std::fmt;
use std::net::SocketAddr;

use tokio::sync::mpsc;

use super::connection::ThreadedConnection;
use super::link::{ConnectionParts, ListenerHandle};

/// A listener of a [`super::ThreadedReactor`]. When the listener is dropped, the reactor stops listening, and closes the established
/// connections that no task has accepted.
pub struct ThreadedListener {
    handle: ListenerHandle,
    address: SocketAddr,
    backlog: mpsc::UnboundedReceiver<ConnectionParts>, // bound: accept-queue
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

    /// Returns the address that the listener is bound to.
    #[must_use]
    pub const fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next established connection, and returns it. While the reactor is being drained, and after its thread has ended, first
    /// returns the remaining established connections, and then `None`. Dropping the future loses no connection.
    ///
    /// A connection that has ended before a task accepts it is returned, too, so that the task gets
    /// its messages. While 1,024 ended connections wait on a listener, the reactor closes new
    /// connections of that listener.
    ///
    /// Example: the [module](super).
    pub async fn accept(&mut self) -> Option<ThreadedConnection> {
        self.backlog.recv().await.map(ThreadedConnection::new)
    }
}
