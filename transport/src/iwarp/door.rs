//! The listener for peers within the host, and the progress of connections that leave their TCP stream for shared memory.

use std::collections::VecDeque;
use std::time::Instant;

use super::net::SocketId;
use super::startup::Agreement;
use crate::shm::greeting::{NAME_LEN, Secret};
use crate::slab::{Key, Slab};

/// The largest number of accepted peers that have sent no hello. At the limit the oldest one is closed.
const MAX_VISITORS: usize = 64;

/// The setup of shared memory for one connection.
#[derive(Debug)]
pub(super) enum Meeting<S> {
    /// Passive side: the offer is sent to the peer.
    Offered(Secret),
    /// Passive side: the peer has connected, and its segment was accepted.
    Met(SocketId, S),
    /// Active side: the segment is sent to the peer.
    Greeted(Box<Greeted<S>>),
}

/// The state with which the active side continues, in shared memory or on its stream.
#[derive(Debug)]
pub(super) struct Greeted<S> {
    pub(super) socket: SocketId,
    pub(super) segment: S,
    pub(super) agreement: Agreement,
    pub(super) private_data: Box<[u8]>,
}

impl<S> Meeting<S> {
    /// Returns the Unix socket.
    pub(super) fn socket(&self) -> Option<SocketId> {
        match self {
            Self::Offered(_) => None,
            Self::Met(socket, _) => Some(*socket),
            Self::Greeted(greeted) => Some(greeted.socket),
        }
    }
}

/// An accepted peer that has sent no hello.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(super) socket: SocketId,
    deadline: Instant,
}

/// The listener for peers with an offer, and the accepted peers that have sent no hello.
#[derive(Debug, Default)]
pub(super) struct Door {
    pub(super) open: Option<(SocketId, [u8; NAME_LEN])>,
    pub(super) visitors: Slab<Visitor>,
    /// No peer is accepted before this time, because the system had no descriptors.
    pub(super) rests_until: Option<Instant>,
    by_age: VecDeque<Key>,
}

impl Door {
    /// Returns true if `at` is the deadline of a peer.
    pub(super) fn is_due(&self, key: Key, at: Instant) -> bool {
        self.visitors.get(key).is_some_and(|visitor| visitor.deadline == at)
    }

    /// Adds a peer. Returns the one that must be closed to make room.
    pub(super) fn add(&mut self, socket: SocketId, deadline: Instant) -> (Key, Option<Visitor>) {
        let oldest = if self.visitors.len() < MAX_VISITORS { None } else { self.oldest() };
        let key = self.visitors.insert(Visitor { socket, deadline });
        if self.by_age.len() > 4 * MAX_VISITORS {
            self.by_age.retain(|&key| self.visitors.get(key).is_some());
        }
        self.by_age.push_back(key);
        (key, oldest)
    }

    fn oldest(&mut self) -> Option<Visitor> {
        while let Some(key) = self.by_age.pop_front() {
            if let Some(visitor) = self.visitors.remove(key) {
                return Some(visitor);
            }
        }
        None
    }
}

/// The connections of a provider within the host.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// The listener for peers within the host.
    pub(super) door: Door,
    /// The number of links.
    pub(super) count: usize,
    /// The hot links, each with the number of rounds since its last input.
    pub(super) hot: Vec<(Key, u32)>,
    /// Rounds of a busy poll.
    pub(super) rounds: u32,
    /// True if some hot link may not be armed.
    pub(super) unarmed: bool,
}
