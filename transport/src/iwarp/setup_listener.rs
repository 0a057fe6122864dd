//! The state of shared memory setup within a host: the listener for peers, and the connections that may leave their TCP stream.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::net::SocketId;
use super::startup::Agreement;
use crate::shm::account::WindowAccount;
use crate::shm::greeting::{NAME_LEN, Secret};
use crate::slab::{Key, Slab};

/// The largest number of accepted peers that have sent no hello. At the limit, a new peer replaces the oldest one.
const MAX_NEW_PEERS: usize = 64;
/// The first pause of the setup. Each pause is twice as long as the one before, up to
/// `LONGEST_PAUSE`: each may cost some sockets, which stay open until the process ends.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(24 * 60 * 60);

/// The state of one connection while it sets up shared memory.
#[derive(Debug)]
pub(super) enum SegmentSetup<S> {
    /// Passive side: the MPA reply contains an offer with this secret. The peer has sent no hello yet.
    Offered(Secret),
    /// Passive side: the peer has sent a hello on this Unix socket, and its segment is accepted.
    Accepted(SocketId, S),
    /// Active side: the hello and the segment are sent. The peer has not accepted the segment yet.
    Sent(Box<SentSegment<S>>),
}

/// The state of the active side while it waits for the answer to its hello. If the peer accepts the segment, the connection continues in
/// the segment. Otherwise the connection continues on the TCP stream, with the terms of `agreement`, or fails if it may not.
#[derive(Debug)]
pub(super) struct SentSegment<S> {
    pub(super) socket: SocketId,
    pub(super) segment: S,
    pub(super) agreement: Agreement,
    pub(super) private_data: Box<[u8]>,
    /// The deadline of the connection attempt. The deadline of the setup may be earlier.
    pub(super) until: Option<Instant>,
    /// True if the connection may not stay on the TCP stream, because one of the two sides requires shared memory.
    pub(super) required: bool,
}

impl<S> SegmentSetup<S> {
    /// Returns the Unix socket to the peer. Returns `None` if there is no such socket yet: the peer has sent no hello.
    pub(super) fn socket(&self) -> Option<SocketId> {
        match self {
            Self::Offered(_) => None,
            Self::Accepted(socket, _) => Some(*socket),
            Self::Sent(sent) => Some(sent.socket),
        }
    }
}

/// A peer that has connected to the Unix listener and has sent no hello.
#[derive(Debug)]
pub(super) struct NewPeer {
    pub(super) socket: SocketId,
}

/// The Unix listener to which the peers with an offer connect, and the connected peers that have sent no hello.
#[derive(Debug, Default)]
pub(super) struct SetupListener {
    pub(super) open: Option<(SocketId, [u8; NAME_LEN])>,
    /// The end of the pause during which no peer is met, because too many sockets of other users
    /// must stay open. Connections stay on TCP meanwhile.
    pub(super) shut_until: Option<Instant>,
    /// The length of the last pause.
    pause: Duration,
    pub(super) new_peers: Slab<NewPeer>, // bound: local-newcomers
    by_age: VecDeque<Key>,               // bound: local-newcomers
}

impl SetupListener {
    /// Begins a pause, and returns its length.
    pub(super) fn shut(&mut self, now: Instant) -> Duration {
        self.pause = (2 * self.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.shut_until = Some(now + self.pause);
        self.pause
    }

    /// Adds a connected peer and returns its key. At the limit of [`MAX_NEW_PEERS`], also removes and returns the oldest peer and its key.
    /// The caller must close the socket of that peer.
    pub(super) fn add(&mut self, socket: SocketId) -> (Key, Option<(Key, NewPeer)>) {
        let oldest = if self.new_peers.len() < MAX_NEW_PEERS { None } else { self.oldest() };
        let key = self.new_peers.insert(NewPeer { socket });
        if self.by_age.len() > 4 * MAX_NEW_PEERS {
            self.by_age.retain(|&key| self.new_peers.get(key).is_some());
        }
        self.by_age.push_back(key);
        (key, oldest)
    }

    fn oldest(&mut self) -> Option<(Key, NewPeer)> {
        while let Some(key) = self.by_age.pop_front() {
            if let Some(peer) = self.new_peers.remove(key) {
                return Some((key, peer));
            }
        }
        None
    }
}

/// The connections of a provider that are in shared memory (links), and the Unix listener that is needed to set up new ones.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// The Unix listener for peers on this host.
    pub(super) listener: SetupListener,
    /// The number of live connections in shared memory.
    pub(super) count: usize,
    /// The memory of peers that the provider has mapped.
    pub(super) account: Arc<WindowAccount>,
    /// The links whose rings a busy poll checks in every round. The number beside a link's key is the number of rounds since the last input
    /// of the link.
    pub(super) hot: Vec<(Key, u32)>, // bound: hot-links
    /// The number of rounds of a busy poll.
    pub(super) rounds: u32,
    /// True if there may be a link that is not armed. The peer of such a link does not wake this side.
    pub(super) unarmed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_peer_without_a_hello_gives_way() {
        let mut listener = SetupListener::default();
        for slot in 0..1000 {
            let (_, oldest) = listener.add(SocketId(Key::new(slot, 1)));
            let expected = slot.checked_sub(MAX_NEW_PEERS as u32).map(|slot| SocketId(Key::new(slot, 1)));
            assert_eq!(oldest.map(|(_, peer)| peer.socket), expected);
            assert!(listener.by_age.len() <= 4 * MAX_NEW_PEERS + 1);
        }
    }
}
