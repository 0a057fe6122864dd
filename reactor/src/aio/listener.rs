//! A listener of an async reactor. Tasks accept its connections.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;

use super::connection::AsyncConnection;
use super::core::{Core, DropAction};
use super::handler::Backlog;
use super::queue::NextItem;
use crate::ListenerId;

/// A listener of an [`super::AsyncReactor`]. When the listener is dropped, the reactor stops listening, and closes the established
/// connections that no task has accepted.
pub struct AsyncListener {
    core: Rc<Core>,
    id: ListenerId,
    backlog: Backlog, // bound: accept-queue
}

impl fmt::Debug for AsyncListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AsyncListener({})", self.id)
    }
}

impl AsyncListener {
    pub(super) fn new(core: Rc<Core>, id: ListenerId) -> Self {
        let backlog = Backlog::default();
        core.with(|_, handler| _ = handler.listeners.insert(id, Rc::clone(&backlog)));
        Self { core, id, backlog }
    }

    pub(super) const fn id(&self) -> ListenerId {
        self.id
    }

    /// Waits for the next established connection, and returns it. Returns `None` if the reactor is being drained or was shut down, and all
    /// established connections were returned. Connections are returned in the order in which they were established. If several tasks wait,
    /// the task that has waited longest gets the next connection. Dropping the future loses no connection.
    ///
    /// A connection that has ended before a task accepts it is returned, too, so that the task gets
    /// its messages. While 1,024 ended connections wait on a listener, the reactor closes new
    /// connections of that listener.
    pub async fn accept(&self) -> Option<AsyncConnection> {
        let shared = NextItem::new(&self.backlog).await?;
        Some(AsyncConnection::new(Rc::clone(&self.core), shared))
    }

    /// Returns the address that the listener is bound to. Returns `None` once the reactor has closed the listener: after a
    /// shutdown, or at the end of a drain.
    #[must_use]
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.core.with(|cx, _| cx.listeners().local_address(self.id))
    }
}

impl Drop for AsyncListener {
    fn drop(&mut self) {
        self.core.run_or_defer(DropAction::StopListening(self.id));
    }
}
