//! The authenticated peers of a listener that wait for a task to accept or refuse them.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;

use super::connection::AsyncConnection;
use super::core::{Core, DropAction};
use super::handler::PeerQueue;
use super::queue::NextItem;
use crate::{ConnectionId, ListenerId, PeerIdentity};

/// The authenticated peers of a listener that wait for approval; see [`super::AsyncReactor::listen_with_approval`]. When `PendingPeers` is
/// dropped, the reactor refuses the waiting peers, and all peers of the listener that arrive later.
pub struct PendingPeers {
    core: Rc<Core>,
    listener: ListenerId,
    peers: PeerQueue, // bound: approvals
}

impl fmt::Debug for PendingPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PendingPeers({})", self.listener)
    }
}

impl PendingPeers {
    pub(super) const fn new(core: Rc<Core>, listener: ListenerId, peers: PeerQueue) -> Self {
        Self { core, listener, peers }
    }

    /// Waits for the next authenticated peer, and returns it. Returns `None` if the reactor is being drained or was shut down, or if the
    /// listener was dropped: no further peer arrives then. A drain also ends the connections of the peers that still wait. Dropping the
    /// future loses no peer.
    pub async fn next(&self) -> Option<PendingPeer> {
        loop {
            let id = NextItem::new(&self.peers).await?;
            // A connection that ended while its peer was in this queue has no identity. Skip such a peer.
            let identity = self.core.with(|cx, _| cx.connection(id).identity().cloned());
            if let Some(identity) = identity {
                return Some(PendingPeer { core: Rc::clone(&self.core), id, identity });
            }
        }
    }
}

impl Drop for PendingPeers {
    fn drop(&mut self) {
        self.core.run_or_defer(DropAction::RefusePeers(self.listener));
    }
}

/// An authenticated peer that waits for approval. The connection of the peer ends if the approval takes longer than
/// [`crate::Timeouts::handshake`]. Dropping a `PendingPeer` refuses the peer.
pub struct PendingPeer {
    core: Rc<Core>,
    id: ConnectionId,
    identity: PeerIdentity,
}

impl fmt::Debug for PendingPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PendingPeer({}, {:?})", self.id, self.identity)
    }
}

impl PendingPeer {
    /// Returns the identity that the peer has proven in the handshake.
    #[must_use]
    pub const fn identity(&self) -> &PeerIdentity {
        &self.identity
    }

    /// Returns the address of the peer; `None` if the connection has ended.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.core.with(|cx, _| cx.connection(self.id).peer_address())
    }

    /// Accepts the peer. [`super::AsyncListener::accept`] returns the connection once it is established.
    pub fn accept(self) {
        self.core.with(|cx, _| cx.connection(self.id).judge(Ok(())));
    }

    /// Refuses the peer. At most 200 bytes of `why` are sent to the peer, unencrypted.
    pub fn refuse(self, why: &str) {
        self.core.with(|cx, _| cx.connection(self.id).judge(Err(why.to_owned())));
    }
}

impl Drop for PendingPeer {
    fn drop(&mut self) {
        // If the program has called `accept` or `refuse` on this peer, this refusal has no effect: the first decision counts.
        self.core.run_or_defer(DropAction::RefusePeer(self.id));
    }
}

impl AsyncConnection {
    /// Returns the identity that the peer of a secured connection has proven. Returns `None` if the connection is not secured or has ended,
    /// as [`crate::ConnectionContext::identity`] does.
    #[must_use]
    pub fn identity(&self) -> Option<PeerIdentity> {
        self.core().with(|cx, _| cx.connection(self.id()).identity().cloned())
    }
}
