//! Messages past one buffer: the sender offers its memory, the receiver reads it and says so.
//!
//! An offer is a message and takes its place among messages: what comes behind it is held until the offered message was
//! fetched, unless messages may overtake. The bytes come by RDMA Read in pieces, so that other traffic and signs of life get
//! between them. A transfer that does not move for `Config::transfer_timeout` ends its connection: what it holds is wanted by
//! others.

use std::collections::VecDeque;
use std::time::Instant;

use rdma_transport::slab::Key;
use rdma_transport::wr::{SendOp, SgeList};

use super::effects::{Action, Arrived, Event};
use super::frame::{Immediate, Kind, Offer};
use super::send_queue::Entry;
use super::{Connection, Env, Need};
use crate::device::pool::Buffer;
use crate::error::{Blocked, Outcome, PeerViolation, SendErrorKind};
use crate::id::{SendId, SendKind};
use crate::limits::{HEADER_LEN, MAX_TRANSFERS};
use crate::memory::cells::Hold;
use crate::memory::operations::{Holds, Locals};
use crate::memory::region::{Region, RemoteRegion};

/// Bytes of one read.
const PIECE: u64 = 1 << 20;

/// Bytes that are not left for a last read of their own: siw of Linux 6.1 answers a read of at most 32 bytes that crosses
/// a page with other bytes.
const CRUMB: u64 = 64;

/// Reads of a connection that may be on their way.
const PIECES: usize = 4;

/// How much of what is left to read next.
fn piece(left: u64) -> u64 {
    if left > PIECE && left < PIECE + CRUMB { PIECE - CRUMB } else { left.min(PIECE) }
}

/// Where an offered message is.
#[derive(Debug)]
pub(crate) enum Source {
    /// In a copy that goes when the message was fetched.
    Copy(Box<Region>),
    /// In a region of the program's.
    Lent(Key, Hold),
}

/// A message that the peer is to fetch.
#[derive(Debug)]
struct Outgoing {
    number: u32,
    send: SendId,
    source: Source,
}

/// A message that is being fetched.
#[derive(Debug)]
struct Incoming {
    offer: Offer,
    /// Once there was memory for it.
    region: Option<Box<Region>>,
    /// Bytes whose reads are on their way or done.
    asked: u64,
    done: u64,
}

impl Incoming {
    const fn is_whole(&self) -> bool {
        self.done == self.offer.region.len
    }
}

/// What waits for its turn to be delivered.
#[derive(Debug)]
enum Held {
    /// The oldest transfer that was not delivered.
    Transfer,
    Message {
        buffer: Buffer,
        end: u32,
    },
    Immediate(Immediate),
}

/// The large messages of one connection.
#[derive(Debug, Default)]
pub(crate) struct Transfers(Option<Box<Active>>);

/// What a connection that has had a large message knows of them.
#[derive(Debug)]
struct Active {
    /// Number of the next offer.
    next: u32,
    outgoing: VecDeque<Outgoing>,
    incoming: VecDeque<Incoming>,
    held: VecDeque<Held>,
    /// Numbers of messages that were fetched, and the peer is not told yet.
    fetched: VecDeque<u32>,
    /// Reads on their way.
    pieces: usize,
    /// When a read ended, or the first of several was posted.
    read: Instant,
    /// When the peer has fetched something, or got its first offer.
    answered: Instant,
}

impl Transfers {
    fn active(&mut self, now: Instant) -> &mut Active {
        self.0.get_or_insert_with(|| {
            Box::new(Active {
                next: 0,
                outgoing: VecDeque::new(),
                incoming: VecDeque::new(),
                held: VecDeque::new(),
                fetched: VecDeque::new(),
                pieces: 0,
                read: now,
                answered: now,
            })
        })
    }

    /// Whether the peer has something to fetch still.
    pub(crate) fn offers(&self) -> bool {
        self.0.as_ref().is_some_and(|active| !active.outgoing.is_empty())
    }

    /// Whether another message may be offered.
    pub(crate) fn has_room(&self) -> bool {
        self.0.as_ref().is_none_or(|active| active.outgoing.len() < MAX_TRANSFERS)
    }

    /// Whether there may be something to do when the connection is flushed.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.0.as_ref().is_some_and(|active| !active.incoming.is_empty() || !active.fetched.is_empty())
    }

    /// Whether something is held until a message before it was fetched.
    #[inline]
    pub(crate) fn holds(&self) -> bool {
        self.0.as_ref().is_some_and(|active| !active.held.is_empty())
    }

    /// Messages to the peer for which a credit is to be left.
    #[inline]
    pub(crate) fn credits(&self) -> usize {
        self.0.as_ref().map_or(0, |active| active.fetched.len())
    }

    /// Places in the send queue to be left.
    #[inline]
    pub(crate) fn places(&self) -> usize {
        self.0.as_ref().map_or(0, |active| {
            let unread = |transfer: &Incoming| transfer.asked < transfer.offer.region.len;
            active.fetched.len() + usize::from(active.pieces == 0 && active.incoming.iter().any(unread))
        })
    }

    /// Memory that the connection has for messages it fetches, bytes.
    fn memory(&self) -> usize {
        self.0.as_ref().map_or(0, |active| {
            active.incoming.iter().filter_map(|transfer| transfer.region.as_ref()).map(|region| region.len()).sum()
        })
    }

    /// Memory that the connection has for copies of messages the peer is to fetch, bytes.
    fn copies(&self) -> usize {
        self.0.as_ref().map_or(0, |active| {
            let copied = |outgoing: &Outgoing| match &outgoing.source {
                Source::Copy(region) => region.len(),
                Source::Lent(..) => 0,
            };
            active.outgoing.iter().map(copied).sum()
        })
    }

    /// The length of the next message that has no memory yet: the oldest, or one behind it while fewer reads are on their
    /// way than may be.
    fn wants_memory(&self) -> Option<usize> {
        let active = self.0.as_ref()?;
        let at = active.incoming.iter().position(|transfer| transfer.region.is_none())?;
        (at == 0 || active.pieces < PIECES).then(|| active.incoming[at].offer.region.len as usize)
    }

    /// Takes memory for the message that [`Transfers::wants_memory`] is about.
    fn give_memory(&mut self, region: Region) {
        let wanting = self.0.as_mut().and_then(|a| a.incoming.iter_mut().find(|transfer| transfer.region.is_none()));
        if let Some(transfer) = wanting {
            transfer.region = Some(Box::new(region));
        }
    }

    /// Messages to be fetched by the peer, those being fetched, those held back, and those fetched that the peer does not
    /// know of.
    #[cfg(test)]
    pub(super) fn queued(&self) -> [usize; 4] {
        self.0.as_ref().map_or([0; 4], |a| [a.outgoing.len(), a.incoming.len(), a.held.len(), a.fetched.len()])
    }

    /// When either direction has stood still since; `None` if nothing is under way that the peer is to move.
    pub(crate) fn stands_since(&self) -> Option<Instant> {
        let active = self.0.as_ref()?;
        let reads = (active.pieces > 0).then_some(active.read);
        let offers = (!active.outgoing.is_empty()).then_some(active.answered);
        [reads, offers].into_iter().flatten().min()
    }
}

impl Connection {
    // Memory.

    /// See [`Transfers::wants_memory`].
    pub(crate) fn wants_memory(&self) -> Option<usize> {
        self.transfers.wants_memory()
    }

    /// See [`Transfers::give_memory`].
    pub(crate) fn give_memory(&mut self, region: Region) {
        self.transfers.give_memory(region);
    }

    /// See [`Transfers::memory`].
    pub(crate) fn fetching(&self) -> usize {
        self.transfers.memory()
    }

    /// See [`Transfers::copies`].
    pub(crate) fn copies(&self) -> usize {
        self.transfers.copies()
    }

    /// Whether a message of `len` bytes that is past one buffer could be offered, as far as others under way go.
    pub(crate) fn may_offer(&self, len: usize) -> bool {
        self.state.is_open() && len as u64 <= self.terms.max_message && self.transfers.has_room()
    }

    // Sending.

    /// Whether a message of `len` bytes can be offered now. `copy`: it is to be copied.
    pub(crate) fn check_offer(&mut self, len: usize, copy: bool, env: &mut Env<'_>) -> Result<(), SendErrorKind> {
        if !self.state.is_open() {
            return Err(SendErrorKind::Closed);
        }
        if len as u64 > self.terms.max_message {
            let max = usize::try_from(self.terms.max_message).unwrap_or(usize::MAX);
            return Err(SendErrorKind::TooLong { len, max });
        }
        let room = match self.room_for_message() {
            Ok(()) if !self.transfers.has_room() => Err(Blocked::Transfers),
            other => other,
        };
        room.map_err(|blocked| {
            self.refuse(Need::Transfer { copy: if copy { len } else { 0 } }, env);
            SendErrorKind::WouldBlock(blocked)
        })
    }

    /// Offers a message that [`Connection::check_offer`] was asked about.
    pub(crate) fn offer(&mut self, region: RemoteRegion, source: Source, env: &mut Env<'_>) -> SendId {
        let send = self.sends.name(SendKind::Message);
        let active = self.transfers.active(env.now);
        let first = active.outgoing.is_empty();
        if first {
            active.answered = env.now;
        }
        let number = active.next;
        active.next = number.wrapping_add(1);
        active.outgoing.push_back(Outgoing { number, send, source });
        let offer = Offer { number, region };
        self.push_control(Kind::Offer, &offer.emit(), None, env);
        env.stats.messages.sent += 1;
        env.stats.messages.bytes_sent += region.len;
        if first {
            self.watch_transfers(env);
        }
        send
    }

    /// The peer has fetched a message; `false` if there is no such message.
    pub(super) fn fetched(&mut self, payload: &[u8], env: &mut Env<'_>) -> bool {
        let Ok(number) = <[u8; 4]>::try_from(payload).map(u32::from_le_bytes) else { return false };
        let Some(active) = &mut self.transfers.0 else { return false };
        let Some(at) = active.outgoing.iter().position(|outgoing| outgoing.number == number) else { return false };
        let Some(outgoing) = active.outgoing.remove(at) else { return false };
        active.answered = env.now;
        self.ask_writable(env);
        self.end_offer(outgoing, Outcome::Sent, env);
        true
    }

    /// Large messages have begun to move: a standstill is to be noticed.
    fn watch_transfers(&self, env: &mut Env<'_>) {
        self.want(env, Action::LookBy(env.now + env.config.transfer_timeout));
    }

    fn end_offer(&self, outgoing: Outgoing, outcome: Outcome, env: &mut Env<'_>) {
        match outgoing.source {
            Source::Copy(region) => self.want(env, Action::Discard(region)),
            Source::Lent(key, hold) => {
                if hold.done() {
                    self.want(env, Action::Unused(key));
                }
            }
        }
        self.tell(env, Event::Sent { send: outgoing.send, outcome });
    }

    /// The end of the connection: what the peer has not fetched has failed, and what was to be fetched from it is not wanted.
    pub(super) fn fail_transfers(&mut self, env: &mut Env<'_>) {
        self.discard_held(env);
        let Some(active) = &mut self.transfers.0 else { return };
        for outgoing in std::mem::take(&mut active.outgoing) {
            self.end_offer(outgoing, Outcome::Failed(rdma_transport::wc::WcStatus::Flushed), env);
        }
    }

    /// Nothing more is delivered: what is held makes room.
    pub(super) fn discard_held(&mut self, env: &mut Env<'_>) {
        let shared = self.receives.is_shared();
        let Some(active) = &mut self.transfers.0 else { return };
        let (held, incoming) = (std::mem::take(&mut active.held), std::mem::take(&mut active.incoming));
        active.fetched.clear();
        for held in held {
            match held {
                Held::Transfer => {}
                Held::Message { buffer, .. } => {
                    self.receives.release();
                    env.buffers.free_receive(buffer, shared);
                }
                Held::Immediate(_) => self.receives.release(),
            }
        }
        for region in incoming.into_iter().filter_map(|transfer| transfer.region) {
            self.want(env, Action::Discard(region));
        }
    }

    // Receiving.

    /// A peer offers a message.
    pub(super) fn offered(&mut self, payload: &[u8], env: &mut Env<'_>) -> Result<(), PeerViolation> {
        let offer = Offer::parse(payload).ok_or(PeerViolation::MalformedMessage)?;
        if !self.state.delivers() {
            return Ok(());
        }
        let open = self.state.is_open();
        let active = self.transfers.active(env.now);
        if !open {
            // It cannot be fetched any more, and nothing behind it is delivered.
            active.held.push_back(Held::Transfer);
            return Ok(());
        }
        let len = offer.region.len;
        let known = active.incoming.iter().any(|transfer| transfer.offer.number == offer.number)
            || active.fetched.contains(&offer.number);
        // An offer is under way until the peer was told that it was fetched.
        let full = active.incoming.len() + active.fetched.len() >= MAX_TRANSFERS;
        if len == 0 || len > env.config.max_message || full || known {
            return Err(PeerViolation::InvalidOffer);
        }
        active.incoming.push_back(Incoming { offer, region: None, asked: 0, done: 0 });
        active.held.push_back(Held::Transfer);
        self.mark(env);
        Ok(())
    }

    /// Keeps a message back until those before it were fetched.
    pub(super) fn hold_message(&mut self, buffer: Buffer, end: u32, now: Instant) {
        self.receives.hold();
        self.transfers.active(now).held.push_back(Held::Message { buffer, end });
    }

    /// As [`Connection::hold_message`]. The buffer is free, but its receive is not posted again: the peer's credits bound what
    /// is held.
    pub(super) fn hold_immediate(&mut self, immediate: Immediate, now: Instant) {
        self.receives.hold();
        self.transfers.active(now).held.push_back(Held::Immediate(immediate));
    }

    /// Whether messages are held back now.
    #[inline]
    pub(super) fn is_holding(&self, env: &Env<'_>) -> bool {
        self.transfers.holds() && !env.config.overtake && self.state.delivers()
    }

    /// Chains the reads, and what tells the peer of messages that were fetched, as far as there is room.
    pub(crate) fn pump_transfers(&mut self, env: &mut Env<'_>) {
        if !self.state.is_open() {
            return;
        }
        let Some(mut active) = self.transfers.0.take() else { return };
        let mut begun = false;
        'transfers: for transfer in &mut active.incoming {
            while active.pieces < PIECES && self.sends.room(0) > 0 {
                let Some(region) = transfer.region.as_mut() else { break 'transfers };
                let (from, len) = (transfer.asked, piece(transfer.offer.region.len - transfer.asked));
                if len == 0 {
                    continue 'transfers;
                }
                let range = from as usize..(from + len) as usize;
                let (Some((sge, hold)), Some(remote)) = (region.lend_mut(range), transfer.offer.region.part(from, len))
                else {
                    break 'transfers;
                };
                let mut holds = Holds::default();
                holds[0] = Some((region.key(), hold));
                transfer.asked += len;
                if active.pieces == 0 {
                    active.read = env.now;
                    begun = true;
                }
                active.pieces += 1;
                let locals = Locals { sges: SgeList::one(sge), holds };
                self.sends.push_operation(Entry::piece(len as u32), SendOp::Read(remote.address()), locals);
            }
            if active.pieces == PIECES || self.sends.room(0) == 0 {
                break;
            }
        }
        while self.tx.available_for_data() > 0
            && self.sends.room(0) > 0
            && let Some(number) = active.fetched.pop_front()
        {
            self.push_control(Kind::Fetched, &number.to_le_bytes(), None, env);
            self.sends.hurry();
        }
        self.transfers.0 = Some(active);
        if begun {
            self.watch_transfers(env);
        }
    }

    /// A read of a transfer has ended. The caller has what follows posted.
    pub(super) fn piece_arrived(&mut self, len: u32, env: &mut Env<'_>) {
        self.heard = env.now;
        let Some(active) = &mut self.transfers.0 else { return };
        active.pieces = active.pieces.saturating_sub(1);
        active.read = env.now;
        // Reads end in order.
        let Some(transfer) = active.incoming.iter_mut().find(|transfer| !transfer.is_whole()) else { return };
        transfer.done += u64::from(len);
        if transfer.is_whole() {
            let number = transfer.offer.number;
            active.fetched.push_back(number);
            self.deliver_held(env);
        }
    }

    /// A read of a transfer has failed: the connection is about to end.
    pub(super) fn piece_failed(&mut self) {
        if let Some(active) = &mut self.transfers.0 {
            active.pieces = active.pieces.saturating_sub(1);
        }
    }

    /// Delivers what is held, up to the first message that is still being fetched.
    fn deliver_held(&mut self, env: &mut Env<'_>) {
        let shared = self.receives.is_shared();
        let delivers = self.state.delivers();
        while let Some(active) = &mut self.transfers.0 {
            match active.held.front() {
                Some(Held::Transfer) if !active.incoming.front().is_some_and(Incoming::is_whole) => return,
                None => return,
                Some(_) => {}
            }
            match active.held.pop_front() {
                Some(Held::Transfer) => {
                    let Some(region) = active.incoming.pop_front().and_then(|transfer| transfer.region) else { return };
                    if delivers {
                        env.stats.messages.received += 1;
                        env.stats.messages.bytes_received += region.len() as u64;
                        self.tell(env, Event::Fetched(region));
                    } else {
                        self.want(env, Action::Discard(region));
                    }
                }
                Some(Held::Message { buffer, end }) => {
                    self.receives.release();
                    if delivers {
                        let arrived = Arrived {
                            buffer: Some(buffer),
                            start: HEADER_LEN as u32,
                            end,
                            device: env.device as u16,
                            shared,
                        };
                        self.deliver(arrived, env);
                    } else {
                        env.buffers.free_receive(buffer, shared);
                    }
                }
                Some(Held::Immediate(immediate)) => {
                    self.receives.release();
                    if delivers {
                        self.tell(env, Event::Immediate(immediate));
                    }
                }
                None => return,
            }
        }
    }
}
