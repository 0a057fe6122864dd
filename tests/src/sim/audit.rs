//! The books of both ends of every connection: what was promised, and whether it was kept.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use rdma_reactor::transport::cm::DisconnectCause;
use rdma_reactor::transport::wc::WcStatus;
use rdma_reactor::{ConnectError, ConnectionId, DisconnectReason};

use super::fabric::{Fabric, disturbed};
use super::rng::{Rng, mix};

/// The initiator's end.
pub const ACTIVE: usize = 0;
/// The listener's end.
pub const PASSIVE: usize = 1;

/// One end of a connection.
#[derive(Clone, Debug, Default)]
pub struct End {
    /// Whose.
    pub node: usize,
    /// Its name there, once there is one.
    pub id: Option<ConnectionId>,
    /// `on_connect` was called.
    pub announced: bool,
    /// The last callback, or the death of the node.
    pub ended: Option<String>,
    /// When it ended.
    pub over: Option<u64>,
    /// The node's reactor was dropped.
    pub killed: bool,
    /// When `close` was called first, and how long the node had been paused until then.
    pub closed: Option<(u64, u64)>,
    /// Sends that were taken.
    pub accepted: u64,
    /// Sends that have completed.
    pub completed: u64,
    /// Sends that completed with success.
    pub sent: u64,
    /// Messages that came.
    pub received: u64,
    /// Messages it wants to send.
    pub goal: u64,
    /// A send was refused, `on_writable` is owed.
    pub blocked: bool,
    /// Largest message of one buffer.
    pub max: usize,
    /// Messages that have not completed: those of one buffer, in order, and those past it.
    pub small: VecDeque<u64>,
    /// See `small`.
    pub large: BTreeSet<u64>,
    /// Such as completed after the close.
    pub fetched_late: u64,
    /// A message of one buffer was not sent.
    pub failed: bool,
}

/// A connection.
#[derive(Clone, Debug, Default)]
pub struct Pair {
    /// Both ends, [`ACTIVE`] and [`PASSIVE`].
    pub ends: [End; 2],
    /// When it was opened, and how long the node had been paused until then.
    pub opened: (u64, u64),
    /// Addresses the listener saw it from.
    pub initiators: Vec<SocketAddr>,
    /// The listener's program took it, the last time it was asked.
    pub taken: bool,
    /// What the listener's program answered.
    pub answers: Vec<Vec<u8>>,
}

/// All connections of a world, by cookie.
#[derive(Debug, Default)]
pub struct Audit {
    /// The connections.
    pub pairs: BTreeMap<u64, Pair>,
    /// Messages that came.
    pub messages: u64,
    /// Connections that came up on both sides.
    pub connected: u64,
}

/// Largest message at all, bytes.
pub const LARGEST: u64 = 256 << 10;

/// The `sequence`-th message from an end, past one buffer now and then.
#[must_use]
pub fn payload(cookie: u64, from: usize, sequence: u64, max: usize) -> Vec<u8> {
    let mut rng = Rng::from_state(mix(cookie ^ mix(sequence * 2 + from as u64)));
    let max = max as u64;
    let len = match rng.below(8) {
        _ if rng.chance(30) => max + rng.skewed(1..=(512 + 4 * max).min(LARGEST - max)),
        0 => max,
        1 => rng.range(0..=max),
        2..4 => rng.below(17).min(max),
        _ => rng.skewed(0..=max),
    };
    let mut bytes = vec![0; len as usize];
    rng.fill(&mut bytes);
    bytes
}

/// What travels with a connect request: the cookie, and some more that depends on it.
#[must_use]
pub fn request_data(cookie: u64) -> Vec<u8> {
    let mut rng = Rng::from_state(mix(cookie));
    let mut bytes = vec![0; rng.index(rdma_reactor::MAX_USER_PRIVATE_DATA - 7)];
    rng.fill(&mut bytes);
    [cookie.to_le_bytes().as_slice(), &bytes].concat()
}

/// The cookie of a connect request.
#[must_use]
pub fn cookie_of(data: &[u8]) -> Option<u64> {
    let cookie = u64::from_le_bytes(*data.first_chunk()?);
    (request_data(cookie) == data).then_some(cookie)
}

impl Pair {
    /// How its links were disturbed.
    #[must_use]
    pub fn disturbances(&self, fabric: &Fabric) -> u32 {
        let links = self.initiators.iter().fold(0, |all, &initiator| all | fabric.disturbances(initiator));
        let until = self.ends.iter().map(|end| end.over.unwrap_or(fabric.now())).max().unwrap_or(0);
        self.ends.iter().fold(links, |all, end| {
            let paused = fabric.was_paused(end.node, self.opened.0, until);
            all | if paused { disturbed::pause(end.node) } else { 0 }
        })
    }

    /// Whether both ends are up.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.ends.iter().all(|end| end.announced && end.ended.is_none())
    }

    /// Whether nothing is left to be done while it stays open.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let sides = [(&self.ends[0], &self.ends[1]), (&self.ends[1], &self.ends[0])];
        self.is_open()
            && sides.into_iter().all(|(from, to)| {
                from.accepted >= from.goal
                    && from.completed == from.accepted
                    && to.received == from.accepted
                    && !from.blocked
            })
    }

    /// Whether nothing more will be heard of it.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.ends[ACTIVE].ended.is_some() && (!self.ends[PASSIVE].announced || self.ends[PASSIVE].ended.is_some())
    }

    /// Whether a reason given by an end is one it may give.
    #[must_use]
    pub fn judge_reason(&self, side: usize, reason: &DisconnectReason, fabric: &Fabric) -> bool {
        let how = self.disturbances(fabric);
        let peer = &self.ends[1 - side];
        match reason {
            DisconnectReason::Local => self.ends[side].closed.is_some(),
            DisconnectReason::Peer => how != 0 || peer.closed.is_some() || !peer.announced,
            // Hardware may keep it to itself that a peer has closed.
            DisconnectReason::KeepaliveTimeout => {
                let silent = disturbed::CUT | disturbed::STALL | disturbed::pause(peer.node);
                how & silent != 0 || peer.closed.is_some() && fabric.forgetful
            }
            DisconnectReason::Transport(DisconnectCause::WorkRequest(WcStatus::Flushed)) => {
                how != 0 || peer.closed.is_some() || !peer.announced
            }
            DisconnectReason::Transport(DisconnectCause::Path(_)) => how != 0,
            _ => false,
        }
    }

    /// Whether an error of connecting is one it may give.
    #[must_use]
    pub fn judge_error(&self, error: &ConnectError, fabric: &Fabric) -> bool {
        match error {
            ConnectError::Rejected { private_data, .. } => {
                private_data.is_empty() || self.answers.contains(private_data)
            }
            ConnectError::Cancelled => self.ends[ACTIVE].closed.is_some(),
            ConnectError::Transport(rdma_reactor::transport::cm::ConnectFailure::Protocol(_)) => {
                self.disturbances(fabric) != 0
            }
            _ => true,
        }
    }
}

impl Audit {
    /// What was promised for connections that are over.
    pub fn judge(&self, fabric: &mut Fabric) {
        for (cookie, pair) in &self.pairs {
            let [active, passive] = &pair.ends;
            let clean = pair.disturbances(fabric) == 0;
            if !pair.is_over() {
                fabric.violation(format!("connection {cookie:x} never ended: {pair:?}"));
                continue;
            }
            if active.killed || passive.killed || !active.announced {
                continue;
            }
            if !passive.announced {
                if clean && pair.taken && active.sent > 0 {
                    fabric.violation(format!(
                        "connection {cookie:x}: {} messages were sent to a program that never heard of it",
                        active.sent
                    ));
                }
                continue;
            }
            for (from, to) in [(active, passive), (passive, active)] {
                if clean && to.closed.is_none() && to.received < from.sent {
                    fabric.violation(format!(
                        "connection {cookie:x}: node{} sent {} messages, node{} got {}",
                        from.node, from.sent, to.node, to.received
                    ));
                }
            }
            if clean && active.closed.is_none() && passive.closed.is_none() {
                fabric.violation(format!("connection {cookie:x} ended, and nobody closed it: {pair:?}"));
            }
        }
    }

    /// What is not settled, for a report.
    #[must_use]
    pub fn unsettled(&self, settled: fn(&Pair) -> bool) -> String {
        let unsettled = self.pairs.iter().filter(|(_, pair)| !settled(pair));
        unsettled.fold(String::new(), |text, (cookie, pair)| text + &format!("\n  {cookie:x}: {pair:?}"))
    }
}
