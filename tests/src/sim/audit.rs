//! The books of both ends of every connection, which show whether all promises were kept.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use rdma_reactor::transport::cm::DisconnectCause;
use rdma_reactor::transport::wc::WcStatus;
use rdma_reactor::{ConnectError, ConnectionId, DisconnectReason};

use super::fabric::{Fabric, disturbed};
use super::flow::Flow;
use super::memory::{Shared, Who};
use super::one_sided::Operation;
use super::rng::{Rng, mix};
use super::swarm::SHORTEST_CLOSE;

/// The initiator's end.
pub const ACTIVE: usize = 0;
/// The listener's end.
pub const PASSIVE: usize = 1;

/// The meaning of a [`rdma_reactor::SendId`].
#[derive(Clone, Debug)]
pub enum Stand {
    /// A message. A message past one buffer ends when it was fetched, maybe after later ones.
    Message {
        /// Whether it is past one buffer.
        large: bool,
    },
    /// A one-sided operation.
    Operation(Operation),
}

/// An event that the other end is to have, in the order of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A message.
    Message,
    /// Immediate data: the value, and how many bytes were written.
    Immediate(u32, u32),
}

/// One end of a connection.
#[derive(Clone, Debug, Default)]
pub struct End {
    /// The node of this end.
    pub node: usize,
    /// Its name on that node, once there is one.
    pub id: Option<ConnectionId>,
    /// `on_connect` was called.
    pub announced: bool,
    /// The last callback, or the death of the node.
    pub ended: Option<String>,
    /// Time of the end.
    pub over: Option<u64>,
    /// The node's reactor was dropped.
    pub killed: bool,
    /// Time of the first call of `close`, and total pause of the node until then.
    pub closed: Option<(u64, u64)>,
    /// Number of accepted sends of any kind, which is the number of the next one.
    pub posted: u64,
    /// Number of messages among them.
    pub accepted: u64,
    /// Number of messages whose ends are not told of.
    pub passed: u64,
    /// Those that have not ended.
    pub sends: BTreeMap<u64, Stand>,
    /// Events that the peer is still to have, with their numbers.
    pub coming: VecDeque<(u64, Arrival)>,
    /// Numbers of the messages and immediate data that were sent with success.
    pub sent: BTreeSet<u64>,
    /// Number of the first message that the peer was to fetch and did not: what was sent behind it may wait for it in vain.
    pub unfetched: Option<u64>,
    /// Messages that came.
    pub received: u64,
    /// Immediate data that came.
    pub immediates: u64,
    /// Fences in front of sends.
    pub fences: u64,
    /// The next send has a fence.
    pub fence: bool,
    /// Messages it wants to send.
    pub goal: u64,
    /// A send was refused, so an `on_writable` is owed.
    pub blocked: bool,
    /// One of the refused sends lacked only a place in the queue.
    pub for_slot: bool,
    /// Largest message of one buffer.
    pub max: usize,
    /// Number of messages past one buffer that completed after the close.
    pub fetched_late: u64,
    /// A send was not done.
    pub failed: bool,
    /// The byte stream on it.
    pub flow: Flow,
}

impl End {
    /// Notes a send that was refused for want of room. `for_slot`: the send needs no credit.
    pub fn refused(&mut self, for_slot: bool) {
        self.for_slot = for_slot || (self.blocked && self.for_slot);
        self.blocked = true;
    }

    /// Notes an accepted send; returns the number that it must have.
    pub fn take(&mut self, stand: Stand) -> u64 {
        let sequence = self.next();
        self.sends.insert(sequence, stand);
        sequence
    }

    /// Notes an accepted message whose end is not told of; returns the number that it must have.
    pub fn pass(&mut self) -> u64 {
        self.passed += 1;
        self.next()
    }

    /// The number of a send that was accepted now.
    fn next(&mut self) -> u64 {
        let sequence = self.posted;
        self.posted += 1;
        self.fences += u64::from(std::mem::take(&mut self.fence));
        sequence
    }

    /// Number of messages and immediate data that were sent with success and that the peer is to hear of.
    fn told(&self) -> u64 {
        let end = self.unfetched.unwrap_or(u64::MAX);
        self.sent.range(..end).count() as u64
    }

    /// Whether the close took as long as the shortest time that any program gives one.
    fn took_its_time(&self, now: u64) -> bool {
        self.closed.is_some_and(|(closed, _)| self.over.unwrap_or(now).saturating_sub(closed) >= SHORTEST_CLOSE)
    }

    /// Messages and immediate data that came.
    #[must_use]
    pub const fn heard(&self) -> u64 {
        self.received + self.immediates
    }
}

/// A connection.
#[derive(Clone, Debug, Default)]
pub struct Pair {
    /// Both ends, [`ACTIVE`] and [`PASSIVE`].
    pub ends: [End; 2],
    /// Time of opening, and total pause of the node until then.
    pub opened: (u64, u64),
    /// Addresses the listener saw it from.
    pub initiators: Vec<SocketAddr>,
    /// The listener's program took it, the last time it was asked.
    pub taken: bool,
    /// The answers of the listener's program.
    pub answers: Vec<Vec<u8>>,
    /// An end wanted something of a region that it may not have.
    pub trespass: bool,
}

/// All connections of a world, by cookie.
#[derive(Debug, Default)]
pub struct Audit {
    /// The connections.
    pub pairs: BTreeMap<u64, Pair>,
    /// Regions that peers may, or might, use.
    pub memory: Vec<Shared>,
    /// One-sided operations that ended well, and bytes of streams that were read.
    pub operations: u64,
    /// See `operations`.
    pub streamed: u64,
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
        _ if rng.chance(80) => max + rng.skewed(1..=(512 + 4 * max).min(LARGEST - max)),
        0 => max,
        1 => rng.range(0..=max),
        2..4 => rng.below(17).min(max),
        _ => rng.skewed(0..=max),
    };
    let mut bytes = vec![0; len as usize];
    rng.fill(&mut bytes);
    bytes
}

/// Whether a connection carries a byte stream, not messages.
#[must_use]
pub const fn is_stream(cookie: u64) -> bool {
    cookie & STREAM != 0
}

/// See [`is_stream`]. Below it is the node that opened the connection.
pub const STREAM: u64 = 8;

/// The private data of a connect request: the cookie, and more bytes that depend on it.
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
    /// The disturbances of the connection's links.
    #[must_use]
    pub fn disturbances(&self, fabric: &Fabric) -> u32 {
        let links = self.initiators.iter().fold(0, |all, &initiator| all | fabric.disturbances(initiator));
        let until = self.ends.iter().map(|end| end.over.unwrap_or(fabric.now())).max().unwrap_or(0);
        let links = links | if self.trespass { disturbed::TRESPASS } else { 0 };
        self.ends.iter().fold(links, |all, end| {
            let paused = fabric.was_paused(end.node, self.opened.0, until);
            all | if paused { disturbed::pause(end.node) } else { 0 }
        })
    }

    /// Whether connections that were not up gave way to others on the passive side since this one was opened.
    #[must_use]
    pub fn may_have_given_way(&self, fabric: &Fabric) -> bool {
        fabric.evicted_since(self.ends[PASSIVE].node, self.opened.0)
    }

    /// Whether both ends are up.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.ends.iter().all(|end| end.announced && end.ended.is_none())
    }

    /// Whether nothing is left to be done while it stays open. Streams end on their own.
    #[must_use]
    pub fn is_settled(&self, cookie: u64) -> bool {
        let done =
            |end: &End| end.accepted >= end.goal && end.sends.is_empty() && end.coming.is_empty() && !end.blocked;
        !is_stream(cookie) && self.is_open() && self.ends.iter().all(done)
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
            DisconnectReason::Local { complete } => {
                let end = &self.ends[side];
                end.closed.is_some() && !(*complete && end.failed)
            }
            DisconnectReason::Closed => peer.closed.is_some(),
            // A close that runs out of time cuts off the sends that are left, the reactor's own too, and says no goodbye.
            DisconnectReason::Lost => {
                let cut_off = peer.failed || !peer.sends.is_empty() || peer.took_its_time(fabric.now());
                how != 0 || !peer.announced || peer.closed.is_some() && cut_off
            }
            // Hardware may not report that a peer has closed, or has ended the connection for a trespass.
            DisconnectReason::KeepaliveTimeout => {
                let silent = disturbed::CUT | disturbed::STALL | disturbed::pause(peer.node);
                let slept = fabric.slept_through(self.ends[side].node);
                how & silent != 0 || slept || (peer.closed.is_some() || self.trespass) && fabric.forgetful
            }
            DisconnectReason::WorkRequest { failure, .. } if failure.status == WcStatus::Flushed => {
                how != 0 || peer.closed.is_some() || !peer.announced
            }
            DisconnectReason::Transport(DisconnectCause::Path(_)) => how != 0,
            DisconnectReason::Transport(_) | DisconnectReason::WorkRequest { .. } => self.trespass,
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
                self.disturbances(fabric) != 0 || self.may_have_given_way(fabric)
            }
            _ => true,
        }
    }
}

impl Audit {
    /// Notes that everything up to `sequence` has reached the peer of an end.
    pub fn arrived(&mut self, by: Who, sequence: u64) {
        self.memory.iter_mut().for_each(|shared| shared.arrived(by, sequence));
    }

    /// Checks the promises for connections that are over.
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
                if clean && pair.taken && active.told() > 0 && !pair.may_have_given_way(fabric) {
                    fabric.violation(format!(
                        "connection {cookie:x}: {} messages were sent to a program that never heard of it",
                        active.told()
                    ));
                }
                continue;
            }
            for (from, to) in [(active, passive), (passive, active)] {
                if clean && to.closed.is_none() && to.heard() < from.told() {
                    fabric.violation(format!(
                        "connection {cookie:x}: node{} sent {} messages, node{} got {}",
                        from.node,
                        from.told(),
                        to.node,
                        to.heard()
                    ));
                }
                if clean {
                    if let Some(lost) = from.flow.judge(&to.flow) {
                        fabric
                            .violation(format!("stream {cookie:x} from node{} to node{}: {lost}", from.node, to.node));
                    }
                }
            }
            if clean && active.closed.is_none() && passive.closed.is_none() {
                fabric.violation(format!("connection {cookie:x} ended, and nobody closed it: {pair:?}"));
            }
        }
    }

    /// Describes everything that is not settled, for a report.
    #[must_use]
    pub fn unsettled(&self, settled: fn(&(&u64, &Pair)) -> bool) -> String {
        let unsettled = self.pairs.iter().filter(|entry| !settled(entry));
        unsettled.fold(String::new(), |text, (cookie, pair)| text + &format!("\n  {cookie:x}: {pair:?}"))
    }
}
