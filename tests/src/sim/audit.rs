//! The audit: the expected state of both ends of every connection, and the check that the reactors do what the documentation promises.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use rdma_reactor::transport::cm::{ConnectFailure, DisconnectCause};
use rdma_reactor::transport::wc::WcStatus;
use rdma_reactor::{ConnectError, ConnectionId, DisconnectReason, RejectReason};

use super::fabric::{Dropped, Fabric, disturbed};
use super::flow::Flow;
use super::memory::{Shared, Who};
use super::one_sided::Operation;
use super::rng::{Rng, mix};
use super::swarm::SHORTEST_CLOSE;

/// The index of the end that has opened the connection.
pub const ACTIVE: usize = 0;
/// The index of the end that has accepted the connection.
pub const PASSIVE: usize = 1;

/// An accepted send. [`rdma_reactor::SendId`] identifies it.
#[derive(Clone, Debug)]
pub enum Stand {
    /// A message. A message that does not fit in one buffer completes when the peer has fetched it, so sends that were accepted later may
    /// complete earlier.
    Message {
        /// True if the message is larger than one buffer.
        large: bool,
    },
    /// A one-sided operation.
    Operation(Operation),
}

/// An event that the peer must receive. Events arrive in the order of the sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A message.
    Message,
    /// Immediate data: its value, and the number of bytes that were written.
    Immediate(u32, u32),
}

/// One end of a connection.
#[derive(Clone, Debug, Default)]
pub struct End {
    /// The number of the node.
    pub node: usize,
    /// The node's id of the connection; `None` before it has one.
    pub id: Option<ConnectionId>,
    /// True if `on_connect` was called.
    pub announced: bool,
    /// A description of the last callback, or of the death of the node. `None` while the connection exists.
    pub ended: Option<String>,
    /// The virtual time of the last callback.
    pub over: Option<u64>,
    /// True if the node's reactor was dropped.
    pub killed: bool,
    /// Two times in ns, at the first call of `close`: the virtual time, and the total time for which the node had been paused. `None`
    /// before `close` was called.
    pub closed: Option<(u64, u64)>,
    /// The number of accepted sends of all kinds. It is also the number that the next send gets.
    pub posted: u64,
    /// The number of accepted messages.
    pub accepted: u64,
    /// The number of accepted messages for which `on_send_complete` is not called, because of quiet sends.
    pub passed: u64,
    /// The accepted sends that have not completed, by their numbers.
    pub sends: BTreeMap<u64, Stand>,
    /// The events that the peer must still receive, with the numbers of their sends.
    pub coming: VecDeque<(u64, Arrival)>,
    /// The numbers of the messages and the immediate data that have completed with success.
    pub sent: BTreeSet<u64>,
    /// The number of the first message that the peer could not fetch. The sends after this message may never complete.
    pub unfetched: Option<u64>,
    /// The number of received messages.
    pub received: u64,
    /// The number of immediate values that this end has received.
    pub immediates: u64,
    /// The number of fenced sends so far.
    pub fences: u64,
    /// True if the next send has a fence.
    pub fence: bool,
    /// The number of messages that this end must send.
    pub goal: u64,
    /// True if a send was refused, so that `on_writable` must follow.
    pub blocked: bool,
    /// True if an operation that takes no credit was refused because the send queue had no free slot.
    pub for_slot: bool,
    /// The length of the largest message that fits in one buffer, in bytes.
    pub max: usize,
    /// The number of large messages that have completed after this end was closed.
    pub fetched_late: u64,
    /// True if a send has completed with a failure.
    pub failed: bool,
    /// The byte stream of this end, if the connection carries one.
    pub flow: Flow,
}

impl End {
    /// Records a refused send. `for_slot` is true if the send needed a slot of the send queue, and no credit.
    pub fn refused(&mut self, for_slot: bool) {
        self.for_slot = for_slot || (self.blocked && self.for_slot);
        self.blocked = true;
    }

    /// Records an accepted send. Returns the sequence number that the reactor must give to the send.
    pub fn take(&mut self, stand: Stand) -> u64 {
        let sequence = self.next();
        self.sends.insert(sequence, stand);
        sequence
    }

    /// Records an accepted message for which `on_send_complete` is not called. Returns the sequence number that the reactor must give to
    /// the message.
    pub fn pass(&mut self) -> u64 {
        self.passed += 1;
        self.next()
    }

    /// Returns the number of the next send, and increments it.
    fn next(&mut self) -> u64 {
        let sequence = self.posted;
        self.posted += 1;
        self.fences += u64::from(std::mem::take(&mut self.fence));
        sequence
    }

    /// Returns the number of messages and immediate data of this end that have completed with success. The peer must receive all of them.
    fn told(&self) -> u64 {
        let end = self.unfetched.unwrap_or(u64::MAX);
        self.sent.range(..end).count() as u64
    }

    /// Returns true if the close may have reached its timeout.
    fn took_its_time(&self, fabric: &Fabric) -> bool {
        let until = self.over.unwrap_or(fabric.now());
        let least = if fabric.slowness.is_some() { fabric.limits[self.node].close } else { SHORTEST_CLOSE };
        self.closed.is_some_and(|(closed, _)| until.saturating_sub(closed) >= least)
    }

    /// Returns the number of messages and immediate data that were received.
    #[must_use]
    pub const fn heard(&self) -> u64 {
        self.received + self.immediates
    }
}

/// The state of a connection.
#[derive(Clone, Debug, Default)]
pub struct Pair {
    /// The two ends. The indices are [`ACTIVE`] and [`PASSIVE`].
    pub ends: [End; 2],
    /// Two times in ns, when the connection was opened: the virtual time, and the total time for which the opening node had been paused.
    pub opened: (u64, u64),
    /// The addresses from which the connection was opened, one for each attempt, as the listener sees them.
    pub initiators: Vec<SocketAddr>,
    /// True if the listener's program has accepted the last connect request.
    pub taken: bool,
    /// The private data of each answer that the listener's program has given to a connect request.
    pub answers: Vec<Vec<u8>>,
    /// True if an end has used a region without the right to do so.
    pub trespass: bool,
}

/// The expected state of all connections and shared regions in a world.
#[derive(Debug, Default)]
pub struct Audit {
    /// The connections, by cookie: a number in the private data that identifies the connection at both ends.
    pub pairs: BTreeMap<u64, Pair>,
    /// The regions that peers may use, and regions whose rights have ended but that a peer may still be able to use.
    pub memory: Vec<Shared>,
    /// The number of one-sided operations that have completed with success.
    pub operations: u64,
    /// The number of bytes that were read from streams.
    pub streamed: u64,
    /// The number of received messages.
    pub messages: u64,
    /// The number of connections that were established on both sides.
    pub connected: u64,
    /// The number of connects that had to fail, because the nodes cannot share memory.
    pub apart: u64,
}

/// The length of the largest message in all worlds, in bytes.
pub const LARGEST: u64 = 256 << 10;

/// Returns the message with this sequence number from one end of a connection. Some messages are larger than one buffer.
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

/// Returns true if the connection carries a byte stream instead of messages.
#[must_use]
pub const fn is_stream(cookie: u64) -> bool {
    cookie & STREAM != 0
}

/// The bit of a cookie that marks a byte stream. The lower bits are the number of the node that has opened the connection.
pub const STREAM: u64 = 8;

/// Returns the private data of a connect request: the cookie, and further bytes that are derived from it.
#[must_use]
pub fn request_data(cookie: u64) -> Vec<u8> {
    let mut rng = Rng::from_state(mix(cookie));
    let mut bytes = vec![0; rng.index(rdma_reactor::MAX_USER_PRIVATE_DATA - 7)];
    rng.fill(&mut bytes);
    [cookie.to_le_bytes().as_slice(), &bytes].concat()
}

/// Returns the cookie of a connect request, or `None` if its private data is wrong.
#[must_use]
pub fn cookie_of(data: &[u8]) -> Option<u64> {
    let cookie = u64::from_le_bytes(*data.first_chunk()?);
    (request_data(cookie) == data).then_some(cookie)
}

impl Pair {
    /// Returns the faults that may have disturbed the connection, as bits of [`disturbed`]: faults of its links, pauses of its nodes, and
    /// use of regions without the right.
    #[must_use]
    pub fn disturbances(&self, fabric: &Fabric) -> u32 {
        let links = self.initiators.iter().fold(0, |all, &initiator| all | fabric.disturbances(initiator));
        let until = self.ends.iter().map(|end| end.over.unwrap_or(fabric.now())).max().unwrap_or(0);
        let links = links | if self.trespass { disturbed::TRESPASS } else { 0 };
        self.ends.iter().rev().zip(&self.ends).fold(links, |all, (peer, end)| {
            let paused = fabric.tried_patience(end.node, peer.node, self.opened.0, until);
            all | if paused { disturbed::pause(end.node) } else { 0 }
        })
    }

    /// Returns true if, since this connection was opened, the passive node has dropped a connection that was not established, in favour of
    /// a newer one.
    #[must_use]
    pub fn may_have_given_way(&self, fabric: &Fabric) -> bool {
        fabric.dropped_since(self.ends[PASSIVE].node, Dropped::Evicted, self.opened.0)
    }

    /// Returns true if both ends have called `on_connect` and neither end has ended.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.ends.iter().all(|end| end.announced && end.ended.is_none())
    }

    /// Returns true if the connection is open, and nothing remains to be sent or received on it. Always returns false for a byte stream,
    /// which closes itself.
    #[must_use]
    pub fn is_settled(&self, cookie: u64) -> bool {
        let done =
            |end: &End| end.accepted >= end.goal && end.sends.is_empty() && end.coming.is_empty() && !end.blocked;
        !is_stream(cookie) && self.is_open() && self.ends.iter().all(done)
    }

    /// Returns true if both programs have closed the connection, with messages in flight in both
    /// directions. If each side waits until the peer has fetched a large message, the closes last
    /// for `Timeouts::close`, which may be a day in worlds with slow nodes.
    #[must_use]
    pub fn waits_for_its_closes(&self) -> bool {
        let unsent = |side: usize| !self.ends[side].sends.is_empty() || !self.ends[1 - side].coming.is_empty();
        self.ends.iter().all(|end| end.closed.is_some()) && [ACTIVE, PASSIVE].into_iter().all(unsent)
    }

    /// Returns true if no further callback may follow at either end.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.ends[ACTIVE].ended.is_some() && (!self.ends[PASSIVE].announced || self.ends[PASSIVE].ended.is_some())
    }

    /// Returns true if end number `side` may report this reason for its disconnect.
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
            // A peer whose close has reached its timeout discards its remaining sends, and sends no goodbye.
            DisconnectReason::Lost => {
                let cut_off = peer.failed || !peer.sends.is_empty() || peer.took_its_time(fabric);
                how != 0 || !peer.announced || peer.closed.is_some() && cut_off
            }
            // Simulated hardware may fail to report that the peer has closed the connection, or that an end has used a region without the
            // right.
            DisconnectReason::KeepaliveTimeout => {
                let silent = disturbed::CUT | disturbed::STALL | disturbed::pause(peer.node);
                let slept = fabric.slept_through(self.ends[side].node);
                how & silent != 0 || slept || (peer.closed.is_some() || self.trespass) && fabric.forgetful
            }
            DisconnectReason::WorkRequest { failure, .. } if failure.status == WcStatus::Flushed => {
                how != 0 || peer.closed.is_some() || !peer.announced
            }
            // A reset may be lost. In this case the end still waits for the peer's confirmation of
            // a message. If other connections wait for memory, only `Timeouts::transfer` ends this
            // connection.
            DisconnectReason::TransferTimeout => how & disturbed::CUT != 0,
            DisconnectReason::Transport(DisconnectCause::Path(_)) => how != 0,
            DisconnectReason::Transport(_) | DisconnectReason::WorkRequest { .. } => self.trespass,
            _ => false,
        }
    }

    /// Returns true if the node that opened the connection was absent for most of the time that a connect may take.
    fn was_short_of_time(&self, fabric: &Fabric) -> bool {
        let node = self.ends[ACTIVE].node;
        fabric.absence(node, self.opened.0, fabric.now()) >= fabric.limits[node].connect / 2
    }

    /// Returns true if a fault of the world explains this error of a connect. The faults are:
    ///
    /// - `disturbed`: a link was cut or stalled, perhaps before the listener knew of it; or a node
    ///   was paused; or the connection was dropped in favour of a newer one.
    /// - `deaf`: the listening node stopped listening, or was killed.
    /// - `scarce`: no descriptor was free, so a connect failed or an accept was late.
    /// - The first packet of a connect was lost.
    /// - `apart`: one of the nodes requires shared memory, but the two nodes cannot share memory.
    #[must_use]
    pub fn judge_error(&self, error: &ConnectError, fabric: &Fabric) -> bool {
        let ([active, listener], since) = (self.ends.each_ref().map(|end| end.node), self.opened.0);
        let disturbed = self.disturbances(fabric) != 0
            || fabric.has_disturbed([active, listener], since)
            || self.may_have_given_way(fabric);
        let deaf = fabric.was_deaf_since(listener, since);
        let scarce = fabric.net.exhausted > 0;
        let apart = fabric.are_apart([active, listener]);
        match error {
            ConnectError::Cancelled => self.ends[ACTIVE].closed.is_some(),
            // After a fault, the second attempt of a connect has no flag for shared memory (MPA
            // revision 1).
            ConnectError::Rejected { reason: RejectReason::SharedMemoryOnly, .. }
                if apart || fabric.requires_shared_memory(listener) && (scarce || disturbed) =>
            {
                true
            }
            ConnectError::Rejected { private_data, .. } => {
                let refused = deaf || fabric.dropped_since(listener, Dropped::Refused, since);
                private_data.is_empty() && refused || self.answers.contains(private_data)
            }
            // The connect timeout is a promise to the program. It also ends a connect whose own
            // node was paused for most of the time.
            ConnectError::Timeout => {
                disturbed || scarce || fabric.net.lost_connect > 0 || self.was_short_of_time(fabric)
            }
            ConnectError::Transport(ConnectFailure::Refused) => deaf,
            ConnectError::Transport(ConnectFailure::PeerClosed | ConnectFailure::Protocol(_)) => disturbed || deaf,
            ConnectError::Transport(ConnectFailure::Unreachable(_)) => {
                apart || scarce || fabric.one_host && (disturbed || deaf)
            }
            ConnectError::Transport(ConnectFailure::SharedMemoryOnly(_)) => {
                fabric.requires_shared_memory(listener) && (apart || scarce || disturbed || deaf)
            }
            ConnectError::Limit { .. } => true,
            _ => false,
        }
    }
}

impl Audit {
    /// Records that all sends of an end up to the number `sequence` have reached its peer.
    pub fn arrived(&mut self, by: Who, sequence: u64) {
        self.memory.iter_mut().for_each(|shared| shared.arrived(by, sequence));
    }

    /// Checks the promises about connections that have ended.
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
                        "connection {cookie:x}: {} messages were sent to a program that was never notified of it",
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

    /// Returns a description of the connections for which `settled` returns false.
    #[must_use]
    pub fn unsettled(&self, settled: impl Fn(&(&u64, &Pair)) -> bool) -> String {
        let unsettled = self.pairs.iter().filter(|&entry| !settled(&entry));
        unsettled.fold(String::new(), |text, (cookie, pair)| text + &format!("\n  {cookie:x}: {pair:?}"))
    }
}
