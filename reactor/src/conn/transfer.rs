//! Messages past one buffer: the sender offers its memory, and the receiver reads it and reports that.
//!
//! An offer is a message and has its place in the order of messages. Messages behind it are held until the offered
//! message is fetched, unless they may overtake it (`Config::overtake`). The bytes come by RDMA Read in pieces, so that
//! other traffic and signs of life get between them. A transfer that does not move for `Config::transfer_timeout` ends
//! its connection, because other connections want the memory that it holds.

use std::collections::VecDeque;
use std::time::Instant;

use rdma_transport::slab::Key;
use rdma_transport::wr::{SendOp, SgeList};

use super::effects::{Action, Arrived, Event, Fragments};
use super::frame::{Immediate, Kind, Offer, Progress};
use super::send_queue::Entry;
use super::{Connection, Env, Need};
use crate::device::pool::Buffer;
use crate::error::{Blocked, Outcome, PeerViolation, SendErrorKind};
use crate::id::{SendId, SendKind};
use crate::limits::{HEADER_LEN, MAX_TRANSFERS};
use crate::memory::cells::Hold;
use crate::memory::operations::{Holds, Locals};
use crate::memory::region::{Region, RemoteRegion};
use crate::security::Opener;
use crate::security::channel::{SEGMENT, Segments, TAG, segment, tail};

/// Longest read, bytes.
const PIECE: u64 = 1 << 20;

/// Shortest rest that gets a last read of its own after other reads, bytes. The siw of Linux 6.1 answers a read of at
/// most 32 bytes that crosses a page with wrong bytes.
const CRUMB: u64 = 64;

/// Largest number of reads that a connection has on their way for large messages.
const PIECES: usize = 4;

/// Number of bytes of a message of which its sender hears each time that they were fetched, before it hears of the whole message.
const STRIDE: u64 = PIECE * PIECES as u64;

/// Length of the next read if `left` bytes are left.
fn piece(left: u64) -> u64 {
    if left > PIECE && left < PIECE + CRUMB { PIECE - CRUMB } else { left.min(PIECE) }
}

/// The memory that holds an offered message.
#[derive(Debug)]
pub(crate) enum Source {
    /// A copy, which is freed when the message was fetched. `told`: the program hears of that.
    Copy { region: Box<Region>, told: bool },
    /// A region of the program.
    Lent(Key, Hold),
}

/// A message that the peer is to fetch.
#[derive(Debug)]
struct Outgoing {
    number: u32,
    send: SendId,
    source: Source,
    len: u64,
    /// Bytes that the peer has said that it has fetched.
    fetched: u64,
}

/// A message that is being fetched.
#[derive(Debug)]
struct Incoming {
    offer: Offer,
    /// Memory for the message; `None` until there is some.
    region: Option<Box<Region>>,
    /// Bytes for which reads are on their way or done.
    asked: u64,
    done: u64,
    /// Bytes that the peer knows to be done; all of them if it does not want to hear of them.
    told: u64,
    /// Bytes to read altogether: the message, and the tags of its segments if it is sealed.
    total: u64,
    /// A sealed message that is being opened.
    segments: Option<Segments>,
}

impl Incoming {
    const fn is_whole(&self) -> bool {
        self.done == self.total
    }

    /// Whether the peer is to hear of the bytes that are done. It hears of a whole message in another way.
    const fn owes_progress(&self) -> bool {
        self.done.saturating_sub(self.told) >= STRIDE && !self.is_whole()
    }

    const fn is_sealed(&self) -> bool {
        self.total > self.offer.region.len
    }

    /// Where the read after the first `asked` bytes begins, and its length. The pieces of a sealed message are read from its end:
    /// the tags come first, and each piece is opened when it has come.
    fn read_at(&self, asked: u64) -> (u64, u64) {
        if !self.is_sealed() {
            return (asked, piece(self.total - asked));
        }
        let end = self.total - asked;
        let from = end.min(self.offer.region.len).saturating_sub(1) / PIECE * PIECE;
        (from, end - from)
    }

    /// Opens the segments of the `len` bytes that came last; `false` if they are not what the peer has sealed.
    fn open(&mut self, len: u64, opener: &mut Opener) -> bool {
        let (whole, message) = (self.is_whole(), self.offer.region.len);
        let message_of = *self.segments.get_or_insert_with(|| opener.begin(message));
        let Some(region) = &mut self.region else { return false };
        let (mut from, mut to) = (self.total - self.done, (self.total - self.done + len).min(message));
        if region.is_open() {
            // The device leaves the memory open to the peer: what is opened is a copy, once all is there.
            if !whole {
                return true;
            }
            if let Err(error) = region.make_private() {
                log::warn!("memory for a copy of a message of {message} bytes: {error}");
                return false;
            }
            (from, to) = (0, message);
        }
        let segment_len = SEGMENT as u64;
        (from / segment_len..to.div_ceil(segment_len)).rev().all(|index| {
            let mut tag = [0; TAG];
            region.copy_to(message as usize + index as usize * TAG, &mut tag);
            let range = segment(index, message);
            let bytes = region.part_mut(range.start..range.end + TAG);
            bytes.is_some_and(|bytes| opener.open_segment(message_of, index, bytes, tag))
        })
    }
}

/// An event that waits for its turn to be delivered.
#[derive(Debug)]
enum Held {
    /// The oldest transfer that is not delivered yet.
    Transfer,
    Message {
        buffer: Buffer,
        end: u32,
    },
    Immediate(Immediate),
    /// A message in several buffers.
    Fragments(Box<Fragments>),
}

/// The large messages of one connection.
#[derive(Debug, Default)]
pub(crate) struct Transfers(Option<Box<Active>>);

/// The large messages of a connection that has had at least one.
#[derive(Debug)]
struct Active {
    /// Number of the next offer from this side.
    next: u32,
    outgoing: VecDeque<Outgoing>,
    incoming: VecDeque<Incoming>,
    held: VecDeque<Held>,
    /// Numbers of messages that were fetched and of which the peer is not told yet.
    fetched: VecDeque<u32>,
    /// Number of reads on their way.
    pieces: usize,
    /// Time at which the last read ended, or the first was posted while none was on its way.
    read: Instant,
    /// Time at which the peer said last that it has fetched something, or was offered a message while it had none to fetch.
    answered: Instant,
    /// A message of which parts are still to come. Nothing else comes meanwhile.
    joining: Option<Box<Fragments>>,
    /// What the last message in several buffers has left, for the next one.
    spare: Option<Box<Fragments>>,
}

impl Active {
    /// Number of messages that the peer is to get about what was fetched.
    fn news(&self) -> usize {
        self.fetched.len() + usize::from(self.incoming.iter().any(Incoming::owes_progress))
    }
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
                joining: None,
                spare: None,
            })
        })
    }

    /// Whether the peer still has a message to fetch.
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

    /// Whether a message is held until a message before it is fetched, or until its last part has come.
    #[inline]
    pub(crate) fn holds(&self) -> bool {
        self.0.as_ref().is_some_and(|active| !active.held.is_empty() || active.joining.is_some())
    }

    /// Whether parts of a message are still to come.
    #[inline]
    pub(super) fn is_joining(&self) -> bool {
        self.0.as_ref().is_some_and(|active| active.joining.is_some())
    }

    /// The message of which parts are still to come.
    pub(super) fn joining(&self) -> Option<&Fragments> {
        self.0.as_ref()?.joining.as_deref()
    }

    /// The message of which parts are still to come, or a new one without parts.
    pub(super) fn join(&mut self, device: usize, now: Instant) -> &mut Fragments {
        let active = self.active(now);
        let spare = &mut active.spare;
        active.joining.get_or_insert_with(|| {
            let new = || Box::new(Fragments { parts: Vec::new(), len: 0, following: 0, since: now, device });
            spare.take().unwrap_or_else(new)
        })
    }

    /// Takes the message that has just become whole. Unless it may overtake the events before it, it waits for them.
    pub(super) fn take_joined(&mut self, overtake: bool) -> Option<Box<Fragments>> {
        let active = self.0.as_mut()?;
        let joined = active.joining.take()?;
        if active.held.is_empty() || overtake {
            return Some(joined);
        }
        active.held.push_back(Held::Fragments(joined));
        None
    }

    /// Takes back what a message in several buffers has left.
    pub(super) fn recycle(&mut self, mut fragments: Box<Fragments>) {
        if let Some(active) = &mut self.0 {
            fragments.parts.clear();
            active.spare = Some(fragments);
        }
    }

    /// Number of credits that are reserved for news of what was fetched.
    #[inline]
    pub(crate) fn credits(&self) -> usize {
        self.0.as_ref().map_or(0, |active| active.news())
    }

    /// Number of places in the send queue that are reserved for news of what was fetched, and for a read.
    #[inline]
    pub(crate) fn places(&self) -> usize {
        self.0.as_ref().map_or(0, |active| {
            let unread = |transfer: &Incoming| transfer.asked < transfer.total;
            active.news() + usize::from(active.pieces == 0 && active.incoming.iter().any(unread))
        })
    }

    /// Memory for copies of messages that the peer is to fetch, bytes.
    fn copies(&self) -> usize {
        self.0.as_ref().map_or(0, |active| {
            let copied = |outgoing: &Outgoing| match &outgoing.source {
                Source::Copy { region, .. } => region.len(),
                Source::Lent(..) => 0,
            };
            active.outgoing.iter().map(copied).sum()
        })
    }

    /// Length of the next message that needs memory, bytes. That is the oldest message, or one behind it while more
    /// reads may be posted.
    fn wants_memory(&self) -> Option<usize> {
        let active = self.0.as_ref()?;
        let at = active.incoming.iter().position(|transfer| transfer.region.is_none())?;
        (at == 0 || active.pieces < PIECES).then(|| active.incoming[at].offer.region.len as usize)
    }

    /// Takes memory for the message that [`Transfers::wants_memory`] means.
    fn give_memory(&mut self, region: Region) {
        let wanting = self.0.as_mut().and_then(|a| a.incoming.iter_mut().find(|transfer| transfer.region.is_none()));
        if let Some(transfer) = wanting {
            transfer.region = Some(Box::new(region));
        }
    }

    /// Numbers of messages that the peer is to fetch, that are being fetched, that are held back, and that are fetched
    /// without the peer's knowing.
    #[cfg(test)]
    pub(super) fn queued(&self) -> [usize; 4] {
        self.0.as_ref().map_or([0; 4], |a| [a.outgoing.len(), a.incoming.len(), a.held.len(), a.fetched.len()])
    }

    /// Time at which the peer said last that it has fetched something, while there is more for it to fetch.
    pub(crate) fn fetched_at(&self) -> Option<Instant> {
        let active = self.0.as_ref()?;
        (!active.outgoing.is_empty()).then_some(active.answered)
    }

    /// Time since which one of the two directions has stood still; `None` if nothing is under way that the peer is to
    /// move.
    pub(crate) fn stands_since(&self) -> Option<Instant> {
        let active = self.0.as_ref()?;
        let reads = (active.pieces > 0).then_some(active.read);
        let offers = self.fetched_at();
        let parts = active.joining.as_ref().map(|fragments| fragments.since);
        [reads, offers, parts].into_iter().flatten().min()
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

    /// See [`Transfers::copies`].
    pub(crate) fn copies(&self) -> usize {
        self.transfers.copies()
    }

    /// Whether the state, the peer's limit and the transfers under way allow an offer of `len` bytes.
    pub(crate) fn may_offer(&self, len: usize) -> bool {
        self.state.is_open() && len as u64 <= self.terms.max_message && self.transfers.has_room()
    }

    // Sending.

    /// Checks whether a message of `len` bytes can be offered now. `copy`: the message is to be copied.
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
            self.refuse_transfer(len, copy, env);
            SendErrorKind::WouldBlock(blocked)
        })
    }

    /// Notes that a message past one buffer was refused for want of room.
    pub(crate) fn refuse_transfer(&mut self, len: usize, copy: bool, env: &mut Env<'_>) {
        let parts = self.parts(len).unwrap_or(usize::MAX);
        self.refuse(Need::Transfer { parts, copy: if copy { len } else { 0 } }, env);
    }

    /// Offers a message that [`Connection::check_offer`] has allowed.
    pub(crate) fn offer(&mut self, region: RemoteRegion, mut source: Source, env: &mut Env<'_>) -> SendId {
        let send = self.sends.name(SendKind::Message);
        if let Source::Copy { told, .. } = &mut source {
            *told |= self.sends.tells_of_copies();
        }
        let active = self.transfers.active(env.now);
        let first = active.outgoing.is_empty();
        if first {
            active.answered = env.now;
        }
        let number = active.next;
        active.next = number.wrapping_add(1);
        active.outgoing.push_back(Outgoing { number, send, source, len: region.len, fetched: 0 });
        let offer = Offer { number, region };
        self.push_control(Kind::Offer, &offer.emit(), None, env);
        env.stats.messages.sent += 1;
        env.stats.messages.bytes_sent += region.len;
        if first {
            self.watch_transfers(env);
        }
        send
    }

    /// Handles the peer's news that it has fetched a message; `false` if there is no such message.
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

    /// Handles the peer's news that it has fetched a part of a message; `false` if that cannot be.
    pub(super) fn progressed(&mut self, payload: &[u8], env: &Env<'_>) -> bool {
        let Some(progress) = Progress::parse(payload) else { return false };
        let Some(active) = &mut self.transfers.0 else { return false };
        let found = active.outgoing.iter_mut().find(|outgoing| outgoing.number == progress.number);
        let Some(outgoing) = found else { return false };
        // Each time at least a stride, so that a peer cannot claim for ever that it fetches.
        let possible = outgoing.fetched + STRIDE..outgoing.len + tail(outgoing.len);
        if !possible.contains(&progress.done) {
            return false;
        }
        outgoing.fetched = progress.done;
        active.answered = env.now;
        true
    }

    /// Asks for a look after the transfer timeout, because large messages have begun to move and may come to a
    /// standstill.
    pub(super) fn watch_transfers(&self, env: &mut Env<'_>) {
        self.want(env, Action::LookBy(env.now + env.config.transfer_timeout));
    }

    fn end_offer(&self, outgoing: Outgoing, outcome: Outcome, env: &mut Env<'_>) {
        let told = match outgoing.source {
            Source::Copy { region, told } => {
                self.want(env, Action::Discard(region));
                told
            }
            Source::Lent(key, hold) => {
                if hold.done() {
                    self.want(env, Action::Unused(key));
                }
                true
            }
        };
        if told {
            self.tell(env, Event::Sent { send: outgoing.send, outcome });
        }
    }

    /// Ends all transfers at the end of the connection. Messages that the peer has not fetched have failed, and those
    /// to be fetched from it are dropped.
    pub(super) fn fail_transfers(&mut self, env: &mut Env<'_>) {
        self.discard_held(env);
        let Some(active) = &mut self.transfers.0 else { return };
        for outgoing in std::mem::take(&mut active.outgoing) {
            self.end_offer(outgoing, Outcome::Failed(rdma_transport::wc::WcStatus::Flushed.into()), env);
        }
    }

    /// Frees everything that is held or being fetched, because nothing more is delivered.
    pub(super) fn discard_held(&mut self, env: &mut Env<'_>) {
        let shared = self.receives.is_shared();
        let Some(active) = &mut self.transfers.0 else { return };
        let (held, incoming) = (std::mem::take(&mut active.held), std::mem::take(&mut active.incoming));
        active.fetched.clear();
        let joining = active.joining.take().map(Held::Fragments);
        for held in held.into_iter().chain(joining) {
            match held {
                Held::Transfer => {}
                Held::Message { buffer, .. } => {
                    self.receives.release();
                    env.buffers.free_receive(buffer, shared);
                }
                Held::Immediate(_) => self.receives.release(),
                Held::Fragments(fragments) => self.discard_fragments(*fragments, env),
            }
        }
        for region in incoming.into_iter().filter_map(|transfer| transfer.region) {
            self.want(env, Action::Discard(region));
        }
    }

    // Receiving.

    /// Handles an offer of the peer.
    pub(super) fn offered(&mut self, payload: &[u8], env: &mut Env<'_>) -> Result<(), PeerViolation> {
        let offer = Offer::parse(payload).ok_or(PeerViolation::MalformedMessage)?;
        if !self.state.delivers() {
            return Ok(());
        }
        let open = self.state.is_open();
        let active = self.transfers.active(env.now);
        if !open {
            // The message cannot be fetched any more, so nothing behind it is delivered.
            active.held.push_back(Held::Transfer);
            return Ok(());
        }
        let (len, sealed) = (offer.region.len, self.opener.is_some());
        if len > env.config.max_message {
            return Err(PeerViolation::InvalidOffer);
        }
        let known = active.incoming.iter().any(|transfer| transfer.offer.number == offer.number)
            || active.fetched.contains(&offer.number);
        // A transfer is under way until the peer is told that the message was fetched.
        let total = len + if sealed { tail(len) } else { 0 };
        let wraps = offer.region.address.checked_add(total).is_none();
        let full = active.incoming.len() + active.fetched.len() >= MAX_TRANSFERS;
        if len == 0 || full || known || wraps {
            return Err(PeerViolation::InvalidOffer);
        }
        let told = if self.terms.progress { 0 } else { total };
        active.incoming.push_back(Incoming { offer, region: None, asked: 0, done: 0, told, total, segments: None });
        active.held.push_back(Held::Transfer);
        self.mark(env);
        Ok(())
    }

    /// Holds a message back until those before it are fetched.
    pub(super) fn hold_message(&mut self, buffer: Buffer, end: u32, now: Instant) {
        self.receives.hold();
        self.transfers.active(now).held.push_back(Held::Message { buffer, end });
    }

    /// Holds immediate data back, as [`Connection::hold_message`] holds a message. The buffer is free, but its receive
    /// is not posted again, so that the peer's credits bound the number of events held.
    pub(super) fn hold_immediate(&mut self, immediate: Immediate, now: Instant) {
        self.receives.hold();
        self.transfers.active(now).held.push_back(Held::Immediate(immediate));
    }

    /// Whether messages are held back now.
    #[inline]
    pub(super) fn is_holding(&self, env: &Env<'_>) -> bool {
        self.transfers.holds() && !env.config.overtake && self.state.delivers()
    }

    /// Chains the reads, and the news for the peer of what was fetched, as far as there is room.
    pub(crate) fn pump_transfers(&mut self, env: &mut Env<'_>) {
        if !self.state.is_open() {
            return;
        }
        let Some(mut active) = self.transfers.0.take() else { return };
        let mut begun = false;
        'transfers: for transfer in &mut active.incoming {
            while active.pieces < PIECES && self.sends.room(0) > 0 {
                if transfer.asked == transfer.total {
                    continue 'transfers;
                }
                let (from, len) = transfer.read_at(transfer.asked);
                let Some(region) = transfer.region.as_mut() else { break 'transfers };
                let range = from as usize..(from + len) as usize;
                let memory = RemoteRegion { len: transfer.total, ..transfer.offer.region };
                let (Some((sge, hold)), Some(remote)) = (region.lend_mut(range), memory.part(from, len)) else {
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
        if active.fetched.is_empty()
            && self.tx.available_for_data() > 0
            && self.sends.room(0) > 0
            && let Some(transfer) = active.incoming.iter_mut().find(|transfer| transfer.owes_progress())
        {
            transfer.told = transfer.done;
            let progress = Progress { number: transfer.offer.number, done: transfer.done };
            self.push_control(Kind::Progress, &progress.emit(), None, env);
        }
        self.transfers.0 = Some(active);
        if begun {
            self.watch_transfers(env);
        }
    }

    /// Handles the end of a read of a transfer. The caller marks the connection, so that the next reads are posted.
    pub(super) fn piece_arrived(&mut self, len: u32, env: &mut Env<'_>) {
        self.heard = env.now;
        let Some(active) = &mut self.transfers.0 else { return };
        active.pieces = active.pieces.saturating_sub(1);
        active.read = env.now;
        // Reads end in order, so the read belongs to the first transfer that is not whole.
        let Some(transfer) = active.incoming.iter_mut().find(|transfer| !transfer.is_whole()) else { return };
        transfer.done += u64::from(len);
        if let Some(opener) = &mut self.opener
            && !transfer.open(u64::from(len), opener)
        {
            return self.violated(PeerViolation::NotAuthentic, env);
        }
        if transfer.is_whole() {
            let number = transfer.offer.number;
            active.fetched.push_back(number);
            self.deliver_held(env);
        }
    }

    /// Counts a read of a transfer that has failed. The connection is about to end.
    pub(super) fn piece_failed(&mut self) {
        if let Some(active) = &mut self.transfers.0 {
            active.pieces = active.pieces.saturating_sub(1);
        }
    }

    /// Delivers the held events in order, up to the first message that is still being fetched.
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
                    let Some(transfer) = active.incoming.pop_front() else { return };
                    let Some(mut region) = transfer.region else { return };
                    region.truncate(transfer.offer.region.len as usize);
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
                Some(Held::Fragments(fragments)) if delivers => self.deliver_fragments(fragments, env),
                Some(Held::Fragments(fragments)) => self.discard_fragments(*fragments, env),
                None => return,
            }
        }
    }
}
