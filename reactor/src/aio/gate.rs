//! The peers of a listener that have proven who they are and wait for an answer.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;

use super::arrivals::Next;
use super::connection::Connection;
use super::core::{Core, Farewell};
use super::desk::Waiting;
use crate::{ConnectionId, ListenerId, PeerIdentity};

/// The place where the peers of a listener wait until a task has looked at who they are; see
/// [`super::AsyncReactor::listen_with_gate`]. When it is dropped, the peers that wait are refused, and so are those that come later.
pub struct Gate {
    core: Rc<Core>,
    listener: ListenerId,
    waiting: Waiting,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gate({})", self.listener)
    }
}

impl Gate {
    pub(super) const fn new(core: Rc<Core>, listener: ListenerId, waiting: Waiting) -> Self {
        Self { core, listener, waiting }
    }

    /// The next peer that has proven who it is; `None` when the reactor is drained or the listener was dropped. A future that is dropped
    /// takes no peer with it.
    pub async fn next(&self) -> Option<Newcomer> {
        loop {
            let id = Next::new(&self.waiting).await?;
            // A peer that is gone meanwhile needs no answer.
            let identity = self.core.with(|cx, _| cx.identity(id).cloned());
            if let Some(identity) = identity {
                return Some(Newcomer { core: Rc::clone(&self.core), id, identity });
            }
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.core.part(Farewell::CloseGate(self.listener));
    }
}

/// A peer that has proven who it is and waits for an answer. It is refused if this is dropped without one. It waits for no longer than
/// [`crate::Timeouts::handshake`].
pub struct Newcomer {
    core: Rc<Core>,
    id: ConnectionId,
    identity: PeerIdentity,
}

impl fmt::Debug for Newcomer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Newcomer({}, {:?})", self.id, self.identity)
    }
}

impl Newcomer {
    /// Who the peer is.
    #[must_use]
    pub const fn identity(&self) -> &PeerIdentity {
        &self.identity
    }

    /// Address of the peer; `None` when the connection is gone.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.core.with(|cx, _| cx.peer_address(self.id))
    }

    /// Lets the peer in: [`super::Listener::accept`] has the connection when it is up.
    pub fn accept(self) {
        self.core.with(|cx, _| cx.judge(self.id, Ok(())));
    }

    /// Does not let the peer in. `why` goes to the peer, in the clear, at most 200 bytes of it.
    pub fn refuse(self, why: &str) {
        self.core.with(|cx, _| cx.judge(self.id, Err(why.to_owned())));
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        // Nothing happens if it had its answer.
        self.core.part(Farewell::Refuse(self.id));
    }
}

impl Connection {
    /// Who the peer of a secured connection is, as [`crate::Context::identity`] says.
    #[must_use]
    pub fn identity(&self) -> Option<PeerIdentity> {
        self.core().with(|cx, _| cx.identity(self.id()).cloned())
    }
}
