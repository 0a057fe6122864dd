//! The listener for peers within the host, and the progress of connections that leave their TCP stream for shared memory.

use std::collections::VecDeque;
use std::time::Instant;

use super::net::SocketId;
use super::startup::Agreement;
use crate::shm::greeting::{NAME_LEN, Secret};
use crate::slab::{Key, Slab};

/// The largest number of accepted peers that have sent no hello. At the limit the oldest one is closed.
const MAX_NEW_PEERS: usize = 64;

/// The setup of shared memory for one connection.
#[derive(Debug)]
pub(super) enum SegmentSetup<S> {
    /// Passive side: the offer is sent to the peer.
    Offered(Secret),
    /// Passive side: the peer has connected, and its segment was accepted.
    Accepted(SocketId, S),
    /// Active side: the segment is sent to the peer.
    Sent(Box<SentSegment<S>>),
}

/// The state with which the active side continues, in shared memory or on its stream.
#[derive(Debug)]
pub(super) struct SentSegment<S> {
    pub(super) socket: SocketId,
    pub(super) segment: S,
    pub(super) agreement: Agreement,
    pub(super) private_data: Box<[u8]>,
}

impl<S> SegmentSetup<S> {
    /// Returns the Unix socket.
    pub(super) fn socket(&self) -> Option<SocketId> {
        match self {
            Self::Offered(_) => None,
            Self::Accepted(socket, _) => Some(*socket),
            Self::Sent(sent) => Some(sent.socket),
        }
    }
}

/// An accepted peer that has sent no hello.
#[derive(Debug)]
pub(super) struct NewPeer {
    pub(super) socket: SocketId,
    deadline: Instant,
}

/// The listener for peers with an offer, and the accepted peers that have sent no hello.
#[derive(Debug, Default)]
pub(super) struct SetupListener {
    pub(super) open: Option<(SocketId, [u8; NAME_LEN])>,
    pub(super) new_peers: Slab<NewPeer>,
    /// No peer is accepted before this time, because the system had no descriptors.
    pub(super) paused_until: Option<Instant>,
    by_age: VecDeque<Key>,
}

impl SetupListener {
    /// Returns true if `at` is the deadline of a peer.
    pub(super) fn is_due(&self, key: Key, at: Instant) -> bool {
        self.new_peers.get(key).is_some_and(|peer| peer.deadline == at)
    }

    /// Adds a peer. Returns the one that must be closed to make room.
    pub(super) fn add(&mut self, socket: SocketId, deadline: Instant) -> (Key, Option<NewPeer>) {
        let oldest = if self.new_peers.len() < MAX_NEW_PEERS { None } else { self.oldest() };
        let key = self.new_peers.insert(NewPeer { socket, deadline });
        if self.by_age.len() > 4 * MAX_NEW_PEERS {
            self.by_age.retain(|&key| self.new_peers.get(key).is_some());
        }
        self.by_age.push_back(key);
        (key, oldest)
    }

    fn oldest(&mut self) -> Option<NewPeer> {
        while let Some(key) = self.by_age.pop_front() {
            if let Some(peer) = self.new_peers.remove(key) {
                return Some(peer);
            }
        }
        None
    }
}

/// The connections of a provider within the host.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// The listener for peers within the host.
    pub(super) listener: SetupListener,
    /// The number of links.
    pub(super) count: usize,
    /// The hot links, each with the number of rounds since its last input.
    pub(super) hot: Vec<(Key, u32)>,
    /// Rounds of a busy poll.
    pub(super) rounds: u32,
    /// True if some hot link may not be armed.
    pub(super) unarmed: bool,
}
