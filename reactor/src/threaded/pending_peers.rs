//! Approval of authenticated peers by tasks of any thread.

use std::fmt;
use std::net::SocketAddr;

use tokio::sync::mpsc;

use super::link::PendingHandle;
use crate::PeerIdentity;

/// The authenticated peers of a listener that wait for approval; see
/// [`super::ThreadedReactor::listen_with_approval`]. When this value is dropped, the peers that
/// wait and all later peers of the listener are refused.
pub struct ThreadedPendingPeers {
    peers: mpsc::Receiver<PendingHandle>, // bound: approvals
}

impl fmt::Debug for ThreadedPendingPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadedPendingPeers({} wait)", self.peers.len())
    }
}

impl ThreadedPendingPeers {
    pub(super) const fn new(peers: mpsc::Receiver<PendingHandle>) -> Self {
        Self { peers }
    }

    /// Waits for the next peer, and returns it. After the listener was dropped, or while the
    /// reactor is being drained, `next` first returns the peers that are still in the queue, and
    /// then `None`. These peers are refused, whatever the task decides. The connection of a
    /// returned peer may already have ended: then the decision has no effect. Dropping the future
    /// loses no peer.
    ///
    /// Example: [`super::ThreadedReactor::listen_with_approval`].
    pub async fn next(&mut self) -> Option<ThreadedPendingPeer> {
        self.peers.recv().await.map(|handle| ThreadedPendingPeer { handle })
    }
}

/// An authenticated peer that waits for approval. Its connection ends if the approval takes longer
/// than [`crate::Timeouts::handshake`]. Dropping this value refuses the peer.
pub struct ThreadedPendingPeer {
    handle: PendingHandle,
}

impl fmt::Debug for ThreadedPendingPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadedPendingPeer({}, {:?})", self.handle.id, self.handle.identity)
    }
}

impl ThreadedPendingPeer {
    /// Returns the identity that the peer has proven in the handshake.
    #[must_use]
    pub const fn identity(&self) -> &PeerIdentity {
        &self.handle.identity
    }

    /// Returns the address of the peer. Returns `None` if the reactor does not know the address.
    #[must_use]
    pub const fn peer_address(&self) -> Option<SocketAddr> {
        self.handle.address
    }

    /// Accepts the peer. [`super::ThreadedListener::accept`] returns the connection once it is
    /// established.
    pub fn accept(mut self) {
        self.handle.decide(Ok(()));
    }

    /// Refuses the peer. At most 200 bytes of `why` are sent to the peer, unencrypted.
    pub fn refuse(mut self, why: &str) {
        self.handle.decide(Err(why.to_owned()));
    }
}
