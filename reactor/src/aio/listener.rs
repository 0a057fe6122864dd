//! A listener, whose connections are accepted one by one.

use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::Poll;

use super::connection::Connection;
use super::core::{Core, Farewell};
use crate::ListenerId;

/// A place where connections come in. Dropping it ends that: connections that nobody has accepted are closed, and those that were
/// accepted stay.
pub struct Listener {
    core: Rc<Core>,
    id: ListenerId,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({})", self.id)
    }
}

impl Listener {
    pub(super) fn new(core: Rc<Core>, id: ListenerId) -> Self {
        core.with(|_, desk| _ = desk.listeners.insert(id, super::desk::Backlog::default()));
        Self { core, id }
    }

    /// The next connection that is up; `None` when the reactor is drained. Connections come in the order in which they came up.
    /// A future that is dropped takes no connection with it.
    pub async fn accept(&self) -> Option<Connection> {
        let line = poll_fn(|task| {
            self.core.with(|_, desk| {
                let Some(backlog) = desk.listeners.get_mut(&self.id) else { return Poll::Ready(None) };
                match backlog.lines.pop_front() {
                    Some(line) => Poll::Ready(Some(line)),
                    None if backlog.over => Poll::Ready(None),
                    None => {
                        backlog.waiters.add(task.waker());
                        Poll::Pending
                    }
                }
            })
        });
        Some(Connection::new(Rc::clone(&self.core), line.await?))
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
