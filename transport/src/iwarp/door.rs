//! Where the peers within the host come, and how far connections are that leave their TCP stream for a segment.

use std::collections::VecDeque;
use std::time::Instant;

use super::net::SocketId;
use super::startup::Agreement;
use crate::shm::greeting::{NAME_LEN, Secret};
use crate::slab::{Key, Slab};

/// The most peers that have come to the door and have not said hello. At the limit the oldest one is sent away.
const MAX_VISITORS: usize = 64;

/// How far a connection is on its way out of its stream.
#[derive(Debug)]
pub(super) enum Meeting<S> {
    /// Passive side: the peer was made an offer.
    Offered(Secret),
    /// Passive side: the peer has come, and its segment was accepted.
    Met(SocketId, S),
    /// Active side: the peer was sent a segment.
    Greeted(Box<Greeted<S>>),
}

/// What the active side goes on with, whether the peer accepts its segment or not.
#[derive(Debug)]
pub(super) struct Greeted<S> {
    pub(super) socket: SocketId,
    pub(super) segment: S,
    pub(super) agreement: Agreement,
    pub(super) private_data: Box<[u8]>,
}

impl<S> Meeting<S> {
    /// The Unix socket.
    pub(super) fn socket(&self) -> Option<SocketId> {
        match self {
            Self::Offered(_) => None,
            Self::Met(socket, _) => Some(*socket),
            Self::Greeted(greeted) => Some(greeted.socket),
        }
    }
}

/// Somebody who has come to the door, and has not said hello.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(super) socket: SocketId,
    deadline: Instant,
}

/// The listener where the peers of offers come, and those who have come and have not said hello.
#[derive(Debug, Default)]
pub(super) struct Door {
    pub(super) open: Option<(SocketId, [u8; NAME_LEN])>,
    pub(super) visitors: Slab<Visitor>,
    /// Nobody is let in before that time: there were no descriptors.
    pub(super) rests_until: Option<Instant>,
    by_age: VecDeque<Key>,
}

impl Door {
    /// Whether a visitor has until `at`.
    pub(super) fn is_due(&self, key: Key, at: Instant) -> bool {
        self.visitors.get(key).is_some_and(|visitor| visitor.deadline == at)
    }

    /// Adds a visitor. Returns the one that has to go for it.
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

/// What a provider has of its connections within the host.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// Where peers come.
    pub(super) door: Door,
    /// Number of links.
    pub(super) count: usize,
    /// The hot ones, each with the rounds since something came for it.
    pub(super) hot: Vec<(Key, u32)>,
    /// Rounds of a busy poll.
    pub(super) rounds: u32,
    /// Some hot link is not armed, or may not be.
    pub(super) unarmed: bool,
}
