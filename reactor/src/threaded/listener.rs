//! A listener, seen from the tasks of any thread.

use std::fmt;
use std::net::SocketAddr;

use tokio::sync::mpsc;

use super::connection::Connection;
use super::link::{Carried, ListenerHold};

/// A listener. When it is dropped, the reactor stops listening, and closes the connections that nobody has accepted.
pub struct Listener {
    hold: ListenerHold,
    address: SocketAddr,
    backlog: mpsc::UnboundedReceiver<Carried>,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({}, {})", self.hold.id, self.address)
    }
}

impl Listener {
    pub(super) const fn new(
        hold: ListenerHold,
        address: SocketAddr,
        backlog: mpsc::UnboundedReceiver<Carried>,
    ) -> Self {
        Self { hold, address, backlog }
    }

    /// The address that it listens on.
    #[must_use]
    pub const fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection of a peer; `None` when the reactor is drained or its thread has ended. A future that is dropped takes no
    /// connection with it.
    ///
    /// Example: the [module](super).
    pub async fn accept(&mut self) -> Option<Connection> {
        self.backlog.recv().await.map(Connection::new)
    }
}
