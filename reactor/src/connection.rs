//! One connection: its place in its life, its windows, and what it has posted. No I/O.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_transport::cm::CmId;
use rdma_transport::qp::QpId;
use rdma_transport::slab::Key;
use rdma_transport::wr::{MAX_SGE, SendFlags, SendOp, SendWr, Sge, SgeList};

use crate::config::{CONTROL_SENDS, Framing};
use crate::credit::{ReceiveWindow, SendWindow, may_control};
use crate::device::Mark;
use crate::error::{ConnectError, DisconnectReason, Outcome, SendErrorKind};
use crate::fair::Allowance;
use crate::frame::{HEADER_LEN, Kind};
use crate::id::{ConnectionId, SendId, SendKind, WorkId, WorkKind};
use crate::pool::{Buffer, Posted};
use crate::region::Hold;
use crate::rendezvous::Transfers;
use crate::share::Share;

/// Where a connection is in its life. Only forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Ours: the address is being resolved; no queue pair yet.
    Resolving,
    /// Ours: asked the peer.
    Connecting,
    /// Theirs: accepted, not up yet.
    Accepting,
    /// Theirs: up, the peer's hello is to come.
    Greeting,
    /// Announced, data flows.
    Open,
    /// Closed here: what was accepted is still being sent.
    Draining,
    /// The queues are being flushed.
    Flushing,
}

/// How the user hears of the end.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    Disconnect(DisconnectReason),
    ConnectError(ConnectError),
    /// It was never announced. If the peer has closed and its hello turns up after all, this is why it ended.
    Silent(Option<DisconnectReason>),
}

/// A send that has not completed.
#[derive(Debug, Default)]
pub(crate) struct Send {
    /// Of a message.
    pub(crate) buffer: Option<Posted>,
    /// Whether it uses regions: those at the front of `Connection::holds` when it is at the front.
    pub(crate) holds: bool,
    /// The user's name for it; control messages have none.
    pub(crate) id: Option<SendId>,
    /// Bytes of a large message that it reads.
    pub(crate) piece: u32,
    /// It waits for the peer's answer, and ends with its own completion only: on siw a later send may complete before.
    pub(crate) answered: bool,
    /// How it ended, when one before it has not.
    pub(crate) ended: Option<Outcome>,
}

/// The regions that one work request uses.
pub(crate) type Holds = [Option<(Key, Hold)>; MAX_SGE];

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    pub(crate) cm: CmId,
    pub(crate) qp: Option<QpId>,
    /// Whether it has a claim on its device.
    pub(crate) equipped: bool,
    /// Index of the device, once there is one.
    pub(crate) device: usize,
    /// Index of the completion queue on the device.
    pub(crate) cq: usize,
    pub(crate) peer: SocketAddr,
    pub(crate) active: bool,
    pub(crate) framing: Framing,
    /// Both sides know the extensions of the embedded provider.
    pub(crate) extensions: bool,
    pub(crate) phase: Phase,
    /// The user was told of it.
    pub(crate) announced: bool,
    /// The user has closed it, and wants to hear no more.
    pub(crate) closed_here: bool,
    pub(crate) ending: Option<Ending>,
    /// Why is only guessed, from a flushed work request or one that could not be posted: the connection manager may know
    /// better.
    pub(crate) provisional: bool,
    /// Our private data until it is sent, the peer's afterwards.
    pub(crate) private_data: Vec<u8>,
    pub(crate) user: u64,

    pub(crate) tx: SendWindow,
    pub(crate) rx: ReceiveWindow,
    /// Largest payload the peer takes in one buffer.
    pub(crate) max_message: usize,
    /// Largest message it fetches.
    pub(crate) largest_message: u64,
    pub(crate) transfers: Transfers,
    /// Sends that may be in `sends` at once, control included.
    pub(crate) send_slots: usize,

    /// Posted and not completed, then chained and not posted, in order.
    pub(crate) sends: VecDeque<Send>,
    /// Those of `sends` that wait for an answer.
    pub(crate) answers: usize,
    /// Regions of those sends that use any, in order.
    pub(crate) holds: VecDeque<Holds>,
    /// Position of the front of `sends` among all sends.
    pub(crate) sends_done: u16,
    /// To be posted at the end of the turn.
    pub(crate) chain: Vec<SendWr>,
    /// There is a message among them, to carry a grant.
    pub(crate) chained_message: bool,
    /// The user gathers sends over turns.
    pub(crate) corked: bool,
    /// The next work request waits for the reads before it.
    pub(crate) fence: bool,
    /// The next message wakes a peer that waits for such only.
    pub(crate) solicited: bool,
    /// Posted in a row without a signal.
    pub(crate) unsignaled: usize,
    /// Posted receives, in order.
    pub(crate) receives: VecDeque<Posted>,
    /// To be posted again at the end of the turn.
    pub(crate) reposts: Vec<Buffer>,
    /// Receives in the user's hands.
    pub(crate) detached: usize,
    /// What it claims of the shared receive queue, if it lives on that.
    pub(crate) share: Option<Share>,
    /// When the flush began, on its completion queue.
    pub(crate) flush: Mark,
    /// When the time to flush was over, and there was more to look at.
    pub(crate) overdue: Option<Mark>,
    pub(crate) next_send: u64,

    /// A send was refused; `on_writable` is owed.
    pub(crate) blocked: bool,
    /// What was refused is a copy of so many bytes.
    pub(crate) blocked_copy: usize,
    /// What was refused needs no credit.
    pub(crate) blocked_for_slot: bool,
    /// Registered for this peer alone.
    pub(crate) regions: Vec<Key>,
    pub(crate) blocked_since: Instant,
    /// Time with refused sends, up to the last `on_writable`.
    pub(crate) stalled: Duration,
    pub(crate) fair: Allowance,
    /// On the list of connections to flush.
    pub(crate) dirty: bool,
    pub(crate) owes: Owes,
    pub(crate) last_heard: Instant,
    pub(crate) pinged: bool,
    /// The peer has said nothing since its hello was sent.
    pub(crate) unheard: bool,
    /// Deadline of the current phase.
    pub(crate) phase_timer: Option<Key>,
    pub(crate) keepalive_timer: Option<Key>,
}

/// Control messages that are to be sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Owes {
    pub(crate) ping: bool,
    pub(crate) pong: bool,
}

impl Connection {
    /// Puts it on the list of those that have something to post, once.
    #[inline]
    pub(crate) fn mark_dirty(&mut self, dirty: &mut Vec<ConnectionId>) {
        if !std::mem::replace(&mut self.dirty, true) {
            dirty.push(self.id);
        }
    }

    /// Whether a data message may be queued now.
    #[inline]
    pub(crate) fn check_send(&self, len: usize) -> Result<(), SendErrorKind> {
        if self.phase != Phase::Open {
            return Err(SendErrorKind::Closed);
        }
        if len > self.max_message {
            let max = usize::try_from(self.largest_message).unwrap_or(usize::MAX).max(self.max_message);
            return Err(SendErrorKind::TooLong { len, max });
        }
        if self.has_room() { Ok(()) } else { Err(SendErrorKind::WouldBlock) }
    }

    /// Notes that a send was refused.
    pub(crate) fn block(&mut self, now: Instant) {
        if !std::mem::replace(&mut self.blocked, true) {
            self.blocked_since = now;
        }
    }

    /// Whether the peer's window and the send queue both have room for data.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        let credit = self.framing == Framing::Raw || self.tx.available_for_data() as usize > self.transfers.credits();
        credit && self.free_slots() > 0
    }

    /// Places in the send queue that the user's sends may take.
    #[inline]
    pub(crate) fn free_slots(&self) -> usize {
        self.send_slots.saturating_sub(self.sends.len() + CONTROL_SENDS as usize + self.transfers.slots())
    }

    /// Places in the send queue that the user's sends ever get.
    pub(crate) const fn most_slots(&self) -> usize {
        self.send_slots - CONTROL_SENDS as usize
    }

    /// Whether a send like the one that was refused would be taken now.
    pub(crate) fn is_unblocked(&self) -> bool {
        self.blocked
            && self.phase == Phase::Open
            && if self.blocked_for_slot { self.free_slots() > 0 } else { self.has_room() }
    }

    /// Whether a cork keeps the chain from being posted: while it is less than half of a queue, and neither a refused send,
    /// nor the peer's credit or question, nor a large message waits for it.
    pub(crate) fn is_holding_back(&self) -> bool {
        self.corked
            && self.phase == Phase::Open
            && !self.blocked
            && self.chain.len() * 2 < self.send_slots
            && !(self.owes.ping || self.owes.pong || self.rx.update_due())
            && !self.transfers.is_active()
    }

    /// Whether a control message can be sent now.
    pub(crate) fn has_room_for_control(&self) -> bool {
        may_control(&self.tx, &self.rx) && self.sends.len() < self.send_slots
    }

    /// The control message to send now, if one is due. Data that is going out anyway carries grants and shows life.
    pub(crate) fn due_control(&self) -> Option<Kind> {
        if !self.exchanges() {
            return None;
        }
        let kind = match self.owes {
            _ if self.chained_message => return None,
            Owes { pong: true, .. } => Kind::Pong,
            Owes { ping: true, .. } => Kind::Ping,
            _ if self.rx.update_due() => Kind::Credit,
            _ => return None,
        };
        self.has_room_for_control().then_some(kind)
    }

    /// Whether there is something to send, and the receives to be posted again can be granted by a later message: no
    /// grant will be due once they are posted. Without credits the peer may be about to use any of them.
    #[inline]
    pub(crate) fn owes_little(&self) -> bool {
        self.framing == Framing::Credits
            && self.share.is_none()
            && !self.chain.is_empty()
            && !self.transfers.is_active()
            && !self.rx.update_due_after(self.reposts.len() as u32)
    }

    /// Names the next data send.
    #[inline]
    pub(crate) fn next_send_id(&mut self, kind: SendKind) -> SendId {
        let id = SendId::new(self.next_send, kind);
        self.next_send += 1;
        id
    }

    /// Adds a message to the chain; takes its credit.
    #[inline]
    pub(crate) fn push_send(&mut self, buffer: Posted, sge: Sge, id: Option<SendId>) {
        self.push_message(Send { buffer: Some(buffer), id, ..Send::default() }, SendOp::Send, SgeList::one(sge));
    }

    /// Adds a work request that uses a receive of the peer's; takes its credit.
    #[inline]
    pub(crate) fn push_message(&mut self, send: Send, op: SendOp, sges: SgeList) {
        if self.framing == Framing::Credits {
            self.tx.take();
        }
        self.chained_message |= send.buffer.is_some();
        self.push(send, op, sges);
    }

    /// Adds a work request to the chain.
    #[inline]
    pub(crate) fn push(&mut self, mut send: Send, op: SendOp, sges: SgeList) {
        send.answered = matches!(op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        self.answers += usize::from(send.answered);
        let answered = send.answered;
        let of_user = send.id.is_some();
        let sequence = self.sends_done.wrapping_add(self.sends.len() as u16);
        let wr_id = WorkId { kind: WorkKind::Send, connection: self.id, sequence }.pack();
        self.sends.push_back(send);
        // An unsignaled send frees its slot only with a later signaled one: never more than half a queue of them.
        self.unsignaled += 1;
        let signaled = answered || self.unsignaled * 2 >= self.send_slots;
        if signaled {
            self.unsignaled = 0;
        }
        let mut flags = if signaled { SendFlags::SIGNALED } else { SendFlags::empty() };
        if std::mem::take(&mut self.fence) {
            flags |= SendFlags::FENCE;
        }
        if self.solicited && of_user && matches!(op, SendOp::Send | SendOp::WriteWithImmediate(..)) {
            self.solicited = false;
            flags |= SendFlags::SOLICITED;
        }
        self.chain.push(SendWr { wr_id, op, sges, flags });
    }

    /// Sends that the queue pair has.
    pub(crate) fn posted_sends(&self) -> usize {
        self.sends.len() - self.chain.len()
    }

    /// How many sends a completion of `sequence` ends; `None` when there is no such send.
    #[inline]
    pub(crate) fn sends_ended_by(&self, sequence: u16) -> Option<usize> {
        let count = usize::from(sequence.wrapping_sub(self.sends_done)) + 1;
        (count <= self.posted_sends()).then_some(count)
    }

    /// Notes a completion that ends `count` sends, except those that wait for an answer.
    pub(crate) fn note_ends(&mut self, count: usize, outcome: Outcome) {
        for (nth, send) in self.sends.iter_mut().take(count).enumerate() {
            if nth + 1 == count {
                send.ended = Some(outcome);
            } else if !send.answered {
                // Sends before the one that failed were only not signaled.
                send.ended.get_or_insert(Outcome::Sent);
            }
        }
    }

    /// Ends the oldest send.
    #[inline]
    pub(crate) fn pop_send(&mut self) -> Option<Send> {
        let send = self.sends.pop_front()?;
        self.answers -= usize::from(send.answered);
        self.sends_done = self.sends_done.wrapping_add(1);
        Some(send)
    }

    /// Work requests the queue pair still has.
    pub(crate) fn outstanding(&self) -> usize {
        self.posted_sends() + self.receives.len()
    }

    /// Bytes in front of every payload.
    pub(crate) const fn header_len(&self) -> usize {
        match self.framing {
            Framing::Credits => HEADER_LEN,
            Framing::Raw => 0,
        }
    }

    /// Whether messages are delivered. When the peer has closed, what it sent before still is.
    pub(crate) fn delivers(&self) -> bool {
        let violated = matches!(self.ending, Some(Ending::Disconnect(DisconnectReason::PeerViolation(_))));
        self.announced && !self.closed_here && !violated
    }
}
