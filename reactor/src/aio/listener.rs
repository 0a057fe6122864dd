//! A listener, whose connections are accepted one by one.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;

use super::arrivals::Next;
use super::connection::Connection;
use super::core::{Core, Farewell};
use super::desk::Backlog;
use crate::ListenerId;

/// A place where connections come in. Dropping it ends that: connections that nobody has accepted are closed, and those that were
/// accepted stay.
pub struct Listener {
    core: Rc<Core>,
    id: ListenerId,
    backlog: Backlog,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({})", self.id)
    }
}

impl Listener {
    pub(super) fn new(core: Rc<Core>, id: ListenerId) -> Self {
        let backlog = Backlog::default();
        core.with(|_, desk| _ = desk.listeners.insert(id, Rc::clone(&backlog)));
        Self { core, id, backlog }
    }

    pub(super) const fn id(&self) -> ListenerId {
        self.id
    }

    /// The next connection that is up; `None` when the reactor is drained. Connections come in the order in which they came up, and
    /// tasks get them in the order in which they have called this. A future that is dropped takes no connection with it.
    pub async fn accept(&self) -> Option<Connection> {
        let line = Next::new(&self.backlog).await?;
        Some(Connection::new(Rc::clone(&self.core), line))
    }

    /// The address that it is bound to; `None` if its device is away.
    #[must_use]
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.core.with(|cx, _| cx.local_address(self.id))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.core.part(Farewell::StopListening(self.id));
    }
}
