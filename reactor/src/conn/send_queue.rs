//! The send queue of a connection: the sends that are posted, and behind them the chain that the next flush posts. The
//! file also has the ways in which sends enter the queue, and the ways in which they end.

use std::collections::VecDeque;
use std::ops::Range;

use rdma_transport::slab::Key;
use rdma_transport::wc::{Failure, WcStatus};
use rdma_transport::wr::{RemoteAddress, SendFlags, SendOp, SendWr, Sge, SgeList};

use super::credit::may_control;
use super::effects::{Action, Event};
use super::frame::{Header, Immediate, Kind};
use super::list::{Lists, Order, Part, Way};
use super::state::State;
use super::{Connection, Env, Need};
use crate::config::Framing;
use crate::device::pool::{Buffer, Pool, Posted};
use crate::error::{Blocked, Outcome, SendErrorKind};
use crate::id::{ConnectionId, SendId, SendKind, send_wr_id};
use crate::limits::{CONTROL_SENDS, HEADER_LEN, TAG_ROOM};
use crate::memory::region_memory::Hold;
use crate::memory::operations::{Holds, Locals};
use crate::memory::region::Region;
use crate::security::Sealer;
use crate::security::channel::TAG;

/// What a send is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// A message in a buffer.
    Plain,
    /// An operation on regions, or a message of which a region has the payload.
    Regions,
    /// It reads so many bytes of a large message.
    Large(u32),
    /// It is a part of a list of transfers.
    List(Part),
}

/// A send that has not ended.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The message, or its header if the payload is elsewhere.
    buffer: Option<Posted>,
    role: Role,
    /// Number of regions that it uses: their holds are at the front of `holds` once the send is at the front of the queue. The
    /// regions of a list are lent to all of it.
    regions: u8,
    /// The program's name for the send; control messages have none.
    pub(crate) id: Option<SendId>,
    /// The program does not want to hear of the send: it is a message whose payload was copied.
    quiet: bool,
    /// The send waits for the peer's answer, and ends with its own completion only. On siw a later send may complete
    /// before it.
    answered: bool,
    /// The outcome of a send that has completed while a send before it has not.
    ended: Option<Outcome>,
}

impl Entry {
    const EMPTY: Self =
        Self { buffer: None, role: Role::Plain, regions: 0, id: None, quiet: false, answered: false, ended: None };

    pub(crate) const fn named(id: SendId) -> Self {
        Self { id: Some(id), ..Self::EMPTY }
    }

    /// A message of the program, or one of the reactor if it has no name.
    pub(super) const fn message(buffer: Posted, id: Option<SendId>) -> Self {
        Self { buffer: Some(buffer), id, ..Self::EMPTY }
    }

    pub(crate) const fn piece(len: u32) -> Self {
        Self { role: Role::Large(len), ..Self::EMPTY }
    }

    pub(super) const fn of_list(part: Part) -> Self {
        Self { role: Role::List(part), ..Self::EMPTY }
    }

    pub(super) fn with(mut self, buffer: Posted) -> Self {
        self.buffer = Some(buffer);
        self
    }
}

/// Whether the program is notified of the ends of messages that were copied. Those that it is not notified of need no signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copies {
    Reported,
    /// `Config::quiet_sends` is set.
    Quiet,
    /// `Config::quiet_sends` is set, and the program wants to be notified of the messages that it adds now.
    ReportedForNow,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct SendQueue {
    connection: ConnectionId,
    /// Largest number of sends in the queue, control messages included.
    slots: usize,
    /// Sends that have not ended: first the posted ones, then those of `chain`, in order.
    entries: VecDeque<Entry>,
    /// Work requests that the next flush posts.
    chain: Vec<SendWr>,
    /// Number of work requests at the front of the chain that are not changed any more: they are sealed, or went into the
    /// chain before the connection was.
    sealed: usize,
    /// Number of entries that wait for an answer.
    answers: usize,
    /// Regions that entries use, in the order of the entries.
    holds: VecDeque<(Key, Hold)>,
    /// Position of the first entry among all sends; only the low 16 bits.
    first: u16,
    /// Number of sends of the program so far.
    named: u64,
    /// Number of work requests in a row without a signal, up to the last one.
    unsignaled: usize,
    /// The same, up to the last one that is posted: unless they fail, no completion tells of them.
    silent: usize,
    copies: Copies,
    /// One of the work requests in a row without a signal is to be heard of.
    wants_signal: bool,
    /// A message in the chain can carry a grant.
    has_carrier: bool,
    /// The peer waits for a message in the chain, so a cork does not hold the chain back.
    is_awaited: bool,
    /// Flags that the next work requests are to have.
    next: SendFlags,
    /// The provider has sends that end with their post.
    immediate: bool,
    /// Number of messages and Writes that have ended with their post and wait for the doorbell.
    unrung: usize,
    /// Lists whose pieces get into the queue as there is room.
    pub(super) lists: Lists,
}

impl SendQueue {
    pub(crate) fn new(connection: ConnectionId, slots: u32, quiet: bool) -> Self {
        Self {
            connection,
            slots: slots as usize,
            entries: VecDeque::new(),
            chain: Vec::new(),
            sealed: 0,
            answers: 0,
            holds: VecDeque::new(),
            first: 0,
            named: 0,
            unsignaled: 0,
            silent: 0,
            copies: if quiet { Copies::Quiet } else { Copies::Reported },
            wants_signal: false,
            has_carrier: false,
            is_awaited: false,
            next: SendFlags::empty(),
            immediate: false,
            unrung: 0,
            lists: Lists::default(),
        }
    }

    /// Allocates the memory for as many sends as the queue pair has places, once. `immediate`: messages may end with their post.
    pub(crate) fn reserve(&mut self, slots: u32, immediate: bool) {
        (self.slots, self.immediate) = (slots as usize, immediate);
        self.entries.reserve(self.slots);
        self.chain.reserve(self.slots);
    }

    /// Number of places that sends of the program may take while `reserved` places are kept for something else.
    #[inline]
    pub(crate) fn room(&self, reserved: usize) -> usize {
        self.slots.saturating_sub(self.entries.len() + CONTROL_SENDS as usize + reserved + self.lists.reserved_places())
    }

    /// Number of sends in the queue.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Most pieces of a list that one signal is for: a third of the queue. With the half that may be without a signal before, that is
    /// less than the queue, so the signal gets into it.
    pub(super) fn batch(&self) -> usize {
        (self.slots / 3).max(1)
    }

    /// Number of places for sends of the program in an empty queue.
    pub(crate) const fn most_room(&self) -> usize {
        self.slots - CONTROL_SENDS as usize
    }

    /// Whether there is a place for a control message.
    #[inline]
    pub(crate) fn has_control_room(&self) -> bool {
        self.entries.len() < self.slots
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether there is something to post.
    #[inline]
    pub(crate) fn is_chained(&self) -> bool {
        !self.chain.is_empty()
    }

    /// Whether one work request is to be posted, or the doorbell is to be rung and no more.
    #[inline]
    pub(crate) fn is_single(&self) -> bool {
        self.chain.len() + usize::from(self.is_unrung()) == 1
    }

    /// Whether a message or a Write that ends with its post overtakes nothing here. `told`: the program is told of its end, which is to be
    /// behind that of each send before it. There are no more of them in a turn than the queue has places, as of others.
    #[inline]
    fn takes_immediate(&self, told: bool) -> bool {
        let before = if told { self.entries.len() } else { self.chain.len() };
        let first = before == 0 || cfg!(planted = "an-immediate-send-overtakes");
        self.immediate && first && self.next.is_empty() && self.unrung < self.slots
    }

    /// Whether messages have ended with their post since the last doorbell.
    #[inline]
    pub(crate) const fn is_unrung(&self) -> bool {
        self.unrung > 0
    }

    /// Notes that the doorbell was rung.
    #[inline]
    pub(crate) const fn rung(&mut self) {
        self.unrung = 0;
    }

    /// Whether the chain takes half of the queue, or more.
    pub(crate) fn is_half_chained(&self) -> bool {
        self.chain.len() * 2 >= self.slots
    }

    /// Whether a message in the chain can carry a grant.
    pub(crate) const fn has_carrier(&self) -> bool {
        self.has_carrier
    }

    /// Notes that the peer waits for the message that was added last. A cork does not hold it back.
    pub(super) const fn hurry(&mut self) {
        self.is_awaited = true;
    }

    /// Number of sends that the queue pair has.
    #[inline]
    pub(crate) fn posted(&self) -> usize {
        self.entries.len() - self.chain.len()
    }

    /// Number of sends that the queue pair has, without the last ones, of which no completion tells.
    pub(crate) fn awaited(&self) -> usize {
        self.posted().saturating_sub(self.silent)
    }

    /// Lets the next work request wait for the reads before it.
    pub(crate) fn fence_next(&mut self) {
        self.next |= SendFlags::FENCE;
    }

    /// Lets the next message of the program wake a peer that waits for such messages only.
    pub(crate) fn solicit_next(&mut self) {
        self.next |= SendFlags::SOLICITED;
    }

    /// Names the next send of the program.
    #[inline]
    pub(crate) const fn name(&mut self, kind: SendKind) -> SendId {
        let id = SendId::new(self.named, kind);
        self.named += 1;
        id
    }

    /// Adds a message of the program that consists of a header in a buffer and of the memory that `locals` names.
    pub(super) fn push_gathered(
        &mut self,
        pool: &Pool,
        buffer: Buffer,
        header: [u8; HEADER_LEN],
        id: Option<SendId>,
        mut locals: Locals,
    ) {
        let (posted, sge) = pool.post_behind(buffer, header, 0);
        let mut sges = SgeList::one(sge);
        for &sge in locals.sges.as_slice() {
            let pushed = sges.push(sge);
            debug_assert!(pushed.is_ok(), "room for the header and a payload");
        }
        locals.sges = sges;
        self.push_operation(Entry::message(posted, id), SendOp::Send, locals);
    }

    /// Adds a one-sided operation.
    #[inline]
    pub(crate) fn push_operation(&mut self, mut entry: Entry, op: SendOp, mut locals: Locals) {
        for held in locals.holds.iter_mut().map_while(Option::take) {
            if cfg!(planted = "lease-ends-at-posting") {
                let _ = held.1.done();
            } else {
                self.holds.push_back(held);
                entry.regions += 1;
            }
        }
        if entry.role == Role::Plain {
            entry.role = Role::Regions;
        }
        self.push(entry, op, locals.sges);
    }

    /// Returns the flags of the next work request. `answered`: the work request completes with an answer of the peer.
    /// `message`: it is a message of the program that uses a receive of the peer.
    #[inline]
    fn flags(&mut self, answered: bool, message: bool) -> SendFlags {
        // An unsignaled send frees its place only with a later signaled one. So at most half a queue of sends in a row
        // is unsignaled, and a quarter where the chain may end with one.
        self.unsignaled += 1;
        let mut flags = SendFlags::empty();
        if answered || self.unsignaled << self.run_shift() >= self.slots {
            (self.unsignaled, self.wants_signal) = (0, false);
            flags = SendFlags::SIGNALED;
        }
        if !self.next.is_empty() {
            flags |= self.next & SendFlags::FENCE;
            self.next.remove(SendFlags::FENCE);
            if message {
                flags |= self.next;
                self.next = SendFlags::empty();
            }
        }
        flags
    }

    /// Adds a work request.
    #[inline(never)]
    pub(super) fn push(&mut self, entry: Entry, op: SendOp, sges: SgeList) {
        self.push_now(entry, op, sges);
    }

    /// The same, where it is known what the work request is.
    #[inline(always)]
    fn push_now(&mut self, mut entry: Entry, op: SendOp, sges: SgeList) {
        entry.answered = op.answered();
        self.answers += usize::from(entry.answered);
        self.has_carrier |= entry.buffer.is_some();
        let message = entry.id.is_some() && op.takes_receive();
        let copied = entry.role == Role::Plain && entry.id.is_some_and(|id| id.kind() == SendKind::Message);
        entry.quiet = copied && !self.tells_of_copies();
        self.wants_signal |= !entry.quiet;
        let flags = self.flags(entry.answered, message);
        let sequence = self.first.wrapping_add(self.entries.len() as u16);
        self.entries.push_back(entry);
        self.chain.push(SendWr { wr_id: send_wr_id(self.connection, sequence), op, sges, flags });
    }

    /// Adds a batch of pieces of a list, the last one with a signal.
    pub(super) fn push_batch(&mut self, order: &Order, pieces: Range<usize>) {
        let pieces = order.pieces.get(pieces).unwrap_or_default();
        let (first, reads) = (self.first.wrapping_add(self.entries.len() as u16), order.way == Way::Read);
        let count = pieces.len() as u16;
        let entry = |before| Entry { answered: reads, ..Entry::of_list(Part::Piece { before }) };
        self.entries.extend((0..count).map(entry));
        let connection = self.connection;
        let chained = self.chain.len();
        self.chain.extend(pieces.iter().zip(0..count).map(|(piece, nth)| {
            let (remote, sge) = (piece.remote.address(), order.leases.entry(piece));
            debug_assert!(sge.is_some(), "the list was checked");
            let op = if reads { SendOp::Read(remote) } else { SendOp::Write(remote) };
            let wr_id = send_wr_id(connection, first.wrapping_add(nth));
            SendWr { wr_id, op, sges: SgeList::one(sge.unwrap_or_default()), flags: SendFlags::empty() }
        }));
        self.answers += if reads { pieces.len() } else { 0 };
        if let [first, ..] = &mut self.chain[chained..] {
            first.flags = self.next & SendFlags::FENCE;
            self.next.remove(SendFlags::FENCE);
            (self.unsignaled, self.wants_signal) = (0, false);
        }
        if let Some(last) = self.chain.last_mut().filter(|_| count > 0 && !cfg!(planted = "a-batch-without-a-signal")) {
            last.flags |= SendFlags::SIGNALED;
        }
    }

    /// Returns the number of pieces of a list that a completion of the first `count` sends ends, if these are one batch and it has
    /// succeeded; 0 otherwise.
    #[inline]
    fn batch_ended(&self, count: usize, outcome: Outcome) -> usize {
        match self.entries.get(count - 1).map(|entry| entry.role) {
            Some(Role::List(Part::Piece { before })) if usize::from(before) + 1 == count && outcome.is_sent() => count,
            _ => 0,
        }
    }

    /// Takes pieces of a list that have ended out of the queue.
    fn pop_batch(&mut self, count: usize) {
        // The pieces of a batch are all of one kind.
        let answered = self.entries.front().is_some_and(|entry| entry.answered);
        self.answers -= if answered { count } else { 0 };
        self.entries.drain(..count);
        self.first = self.first.wrapping_add(count as u16);
    }

    /// Returns the last send of the chain, for more bytes, if it is a message of the program in one buffer.
    pub(crate) fn open_message(&mut self) -> Option<(&mut Posted, &mut SgeList)> {
        let wr = self.chain[self.sealed..].last_mut().filter(|wr| wr.sges.as_slice().len() == 1)?;
        let entry =
            self.entries.back_mut().filter(|entry| entry.id.is_some_and(|id| id.kind() == SendKind::Message))?;
        Some((entry.buffer.as_mut()?, &mut wr.sges))
    }

    /// Puts the newest grant into the first message of the chain that can carry it. So the peer learns of the grant
    /// before it answers any message of the chain.
    #[inline]
    pub(crate) fn carry(&mut self, pool: &Pool, grant: u32) {
        let chained = self.entries.range_mut(self.posted() + self.sealed..);
        if let Some(message) = chained.filter_map(|entry| entry.buffer.as_mut()).next() {
            message.patch(pool.slabs(), HEADER_LEN - 4, &grant.to_le_bytes());
        }
        self.has_carrier = false;
    }

    /// Leaves the work requests of the chain as they are when those behind them are sealed.
    pub(super) fn seal_from_here(&mut self) {
        self.sealed = self.chain.len();
        self.has_carrier = false;
    }

    /// Seals the messages of the chain that are not sealed yet, in their order. `false`: one cannot be, and must not be posted.
    #[inline(never)]
    fn seal(&mut self, pool: &Pool, sealer: &mut Sealer) -> bool {
        let first = self.posted() + self.sealed;
        for (entry, wr) in self.entries.range_mut(first..).zip(&mut self.chain[self.sealed..]) {
            let Some(buffer) = &mut entry.buffer else { continue };
            let len = wr.sges.total_len() + TAG;
            debug_assert!(wr.sges.as_slice().len() == 1, "a message that is to be sealed is in its buffer");
            let Some(message) = buffer.unposted(pool.slabs()).get_mut(..len) else { return false };
            if !sealer.seal(message, HEADER_LEN) {
                return false;
            }
            wr.sges = SgeList::one(pool.sge(buffer, len));
        }
        self.sealed = self.chain.len();
        true
    }

    /// The binary logarithm of the share of a queue that may be in a row without a signal.
    #[inline]
    const fn run_shift(&self) -> u32 {
        1 + !matches!(self.copies, Copies::Reported) as u32
    }

    /// Whether the program is notified of messages that are copied now.
    #[inline]
    pub(super) const fn tells_of_copies(&self) -> bool {
        !matches!(self.copies, Copies::Quiet)
    }

    /// If `telling` is set, sends that are added from now on always report their completion; otherwise `Config::quiet_sends`
    /// decides.
    pub(crate) const fn tell_of_next(&mut self, telling: bool) {
        self.copies = match (self.copies, telling) {
            (Copies::Reported, _) => Copies::Reported,
            (Copies::Quiet | Copies::ReportedForNow, true) => Copies::ReportedForNow,
            (Copies::Quiet | Copies::ReportedForNow, false) => Copies::Quiet,
        };
    }

    /// Makes the last message report its completion although it was copied: the program waits for that before it reuses the region.
    pub(super) fn tell_of_last(&mut self) {
        if let Some(entry) = self.entries.back_mut() {
            (entry.quiet, self.wants_signal) = (false, true);
        }
    }

    /// Whether all sends in the queue are posted, and none of them completes unless a later one does.
    pub(super) fn is_settled(&self) -> bool {
        self.awaited() == 0 && self.chain.is_empty()
    }

    /// Asks for a completion that frees the places of all sends, because somebody waits for places. `false`: nothing in the queue
    /// is to complete.
    pub(super) fn request_signal(&mut self) -> bool {
        self.wants_signal |= !self.chain.is_empty();
        self.entries.is_empty() || !self.is_settled()
    }

    /// Returns the chain, ready to be posted. Its last work request is signaled, unless nobody wants to hear of the last ones.
    #[inline]
    pub(crate) fn chain(&mut self) -> &[SendWr] {
        (self.has_carrier, self.is_awaited) = (false, false);
        if self.wants_signal {
            if let Some(last) = self.chain.last_mut() {
                last.flags |= SendFlags::SIGNALED;
                if cfg!(planted = "sends-never-signaled") {
                    last.flags.remove(SendFlags::SIGNALED);
                }
                (self.unsignaled, self.wants_signal) = (0, false);
            }
        }
        &self.chain
    }

    /// Notes that the queue pair has taken the first `count` work requests of the chain.
    #[inline]
    pub(crate) fn taken(&mut self, count: usize) {
        if count == self.chain.len() {
            self.chain.clear();
            self.silent = self.unsignaled;
        } else {
            let taken = self.chain.drain(..count).rev();
            let silent = taken.take_while(|wr| !wr.flags.contains(SendFlags::SIGNALED)).count();
            self.silent = if silent < count { silent } else { self.silent + count };
        }
        self.sealed = self.sealed.saturating_sub(count);
    }

    /// Returns the number of sends that a completion of `sequence` ends; `None` if no such send is posted.
    #[inline]
    pub(crate) fn ended_by(&self, sequence: u16) -> Option<usize> {
        let count = usize::from(sequence.wrapping_sub(self.first)) + 1;
        (count <= self.posted()).then_some(count)
    }

    /// Whether some entries wait for answers. Then completions are noted in the entries, and sends end as
    /// [`SendQueue::front_ended`] says.
    #[inline]
    pub(crate) const fn has_answers(&self) -> bool {
        self.answers > 0 && !cfg!(planted = "a-send-ends-the-reads-before-it")
    }

    /// Notes a completion that ends `count` sends, except those that wait for an answer. That of a piece of a list ends the pieces
    /// before it in its batch.
    pub(crate) fn note_ends(&mut self, count: usize, outcome: Outcome) {
        // A device that flushes tells of each one.
        let flushed = matches!(outcome, Outcome::Failed(failure) if failure.status == WcStatus::Flushed);
        let covered = match self.entries.get(count.wrapping_sub(1)).map(|entry| entry.role) {
            Some(Role::List(Part::Piece { before })) if !flushed => usize::from(before),
            _ => 0,
        };
        for (nth, entry) in self.entries.iter_mut().take(count).enumerate() {
            if nth + 1 == count {
                entry.ended = Some(outcome);
            } else if !entry.answered || nth + 1 + covered >= count {
                // The sends before the last one have succeeded; they had no signal.
                entry.ended.get_or_insert(Outcome::Sent);
            }
        }
    }

    /// The outcome of the oldest send, if it has completed.
    pub(crate) fn front_ended(&self) -> Option<Outcome> {
        self.entries.front()?.ended
    }

    /// Takes messages in buffers, of at most `most` sends, out of the front of the queue: those that the program is to be told of and
    /// that follow one another, or those that it is not to be told of. Their buffers go back to the pool. Returns their number, and the
    /// name of the first one that is to be told of.
    #[inline]
    fn pop_messages(&mut self, most: usize, pool: &mut Pool) -> (usize, Option<SendId>) {
        let (mut count, mut first) = (0, None::<SendId>);
        for entry in self.entries.iter_mut().take(most) {
            let told = entry.id.filter(|_| !entry.quiet);
            let goes_on = match first {
                _ if entry.role != Role::Plain => false,
                None => told.is_none() || count == 0,
                Some(first) => told == Some(first.after(count)),
            };
            if !goes_on {
                break;
            }
            first = first.or(told);
            count += 1;
            if let Some(buffer) = entry.buffer.take() {
                pool.give(buffer.done());
            }
        }
        self.entries.drain(..count as usize);
        self.first = self.first.wrapping_add(count as u16);
        (count as usize, first)
    }

    /// Takes the oldest send out of the queue; its buffer goes back to the pool.
    #[inline]
    pub(crate) fn pop(&mut self, pool: &mut Pool) -> Option<Entry> {
        let mut entry = self.entries.pop_front()?;
        self.answers -= usize::from(entry.answered);
        self.first = self.first.wrapping_add(1);
        if let Some(buffer) = entry.buffer.take() {
            pool.give(buffer.done());
        }
        Some(entry)
    }

    /// Leaves what is posted to a queue pair that goes on using it: buffers, and the holds of regions. Returns the number of
    /// buffers.
    pub(super) fn forsake(&mut self) -> usize {
        let posted = self.posted();
        let taken = self.entries.range_mut(..posted).map(|entry| usize::from(std::mem::take(&mut entry.regions)));
        let held = taken.sum::<usize>().min(self.holds.len());
        self.holds.drain(..held);
        self.entries.range_mut(..posted).filter_map(|entry| entry.buffer.take()).count()
    }

    /// Forgets the chain after its queue pair is gone; the caller ends the entries.
    pub(crate) fn abandon_chain(&mut self) {
        self.chain.clear();
        self.sealed = 0;
        self.has_carrier = false;
    }
}

impl Connection {
    /// Whether a message of `len` bytes fits one buffer of the peer and can be queued now.
    #[inline(always)]
    fn check_message(&mut self, len: usize, env: &mut Env<'_>) -> Result<(), SendErrorKind> {
        if !self.state.is_open() {
            return Err(SendErrorKind::Closed);
        }
        if len > self.terms.buffer_size {
            let max = usize::try_from(self.terms.max_message).unwrap_or(usize::MAX).max(self.terms.buffer_size);
            return Err(SendErrorKind::TooLong { len, max });
        }
        self.room_for_message().map_err(|blocked| {
            self.refuse(Need::Message, env);
            SendErrorKind::WouldBlock(blocked)
        })
    }

    /// Queues a message with a copy of `payload`.
    #[inline(always)]
    pub(crate) fn send(&mut self, payload: &[u8], env: &mut Env<'_>) -> Result<SendId, SendErrorKind> {
        self.check_message(payload.len(), env)?;
        let Some(buffer) = env.buffers.pool.take() else { return Err(no_buffer()) };
        let message = match self.framing {
            Framing::Credits => env.buffers.pool.post_copy(buffer, &self.header(Kind::Data).emit(), payload),
            Framing::Raw => env.buffers.pool.post_copy(buffer, &[], payload),
        };
        Ok(self.push_data(message, payload.len(), env))
    }

    /// Whether a message of `len` bytes may end with its post: it overtakes nothing, and nothing is owed to the peer that would have to
    /// go first, such as the grant of receives that are to be posted.
    #[inline]
    fn may_send_now(&self, len: usize) -> bool {
        self.sends.takes_immediate(self.sends.tells_of_copies())
            && self.state.is_open()
            && !self.corked
            && self.sealer.is_none()
            && !self.receives.is_shared()
            && !self.transfers.is_active()
            && !(self.keepalive.owes_ping || self.keepalive.owes_pong)
            && !self.receives.owes_grant(&self.rx)
            && len <= self.terms.buffer_size
            && self.room_for_message().is_ok()
    }

    /// Sends a message that ends with its post. `send` gets the header, and returns false if the provider cannot send the message now.
    /// Returns `None` if the message is to be queued.
    #[inline]
    pub(crate) fn send_now(
        &mut self,
        len: usize,
        env: &mut Env<'_>,
        send: impl FnOnce(&[u8]) -> bool,
    ) -> Option<SendId> {
        if !self.may_send_now(len) {
            return None;
        }
        let told = self.rx;
        let header = Header { kind: Kind::Data, grant: self.rx.grant() };
        if !send(&header.emit()) {
            self.rx = told;
            return None;
        }
        self.tx.take();
        self.sends.unrung += 1;
        self.count_sent(len, env);
        let send = self.sends.name(SendKind::Message);
        if self.sends.tells_of_copies() {
            self.tell(env, Event::Sent { send, count: 1, outcome: Outcome::Sent });
        }
        Some(send)
    }

    /// Carries out a Write that ends with its post, as [`Connection::send_now`] sends a message. `write` returns false if the provider
    /// cannot do so now. Returns `None` if the Write is to be queued.
    #[inline]
    pub(crate) fn write_now(&mut self, env: &mut Env<'_>, write: impl FnOnce() -> bool) -> Option<SendId> {
        let may = self.sends.takes_immediate(true) && self.state.is_open() && !self.corked && !self.feeds_itself();
        if !(may && write()) {
            return None;
        }
        self.sends.unrung += 1;
        self.mark(env);
        let send = self.sends.name(SendKind::Write);
        self.tell(env, Event::Sent { send, count: 1, outcome: Outcome::Sent });
        Some(send)
    }

    /// Queues a message with a payload that is already in a buffer, behind room for a header.
    pub(crate) fn send_filled(
        &mut self,
        len: usize,
        env: &mut Env<'_>,
        buffer: impl FnOnce() -> Option<Buffer>,
    ) -> Result<SendId, SendErrorKind> {
        self.check_message(len, env)?;
        let mut buffer = buffer().ok_or(SendErrorKind::Closed)?;
        // The program had borrowed the buffer until now.
        env.buffers.pool.unlend(&buffer);
        if self.framing == Framing::Raw {
            // A raw message has no header, so the payload moves to the beginning of the buffer.
            env.buffers.pool.slabs().bytes_mut(&mut buffer).copy_within(HEADER_LEN..HEADER_LEN + len, 0);
        }
        Ok(self.push_filled(buffer, len, env))
    }

    /// Queues a message with a payload that the device reads from the region.
    pub(crate) fn send_from(
        &mut self,
        region: &Region,
        range: Range<usize>,
        env: &mut Env<'_>,
    ) -> Result<SendId, SendErrorKind> {
        let len = range.len();
        self.check_message(len, env)?;
        if self.is_secured() {
            // What is sealed is a copy: the region stays readable to its program.
            let Some(mut buffer) = env.buffers.pool.take() else { return Err(no_buffer()) };
            let room = &mut env.buffers.pool.slabs().bytes_mut(&mut buffer)[HEADER_LEN..HEADER_LEN + len];
            if !region.try_copy_to(range.start, room) {
                env.buffers.pool.give(buffer);
                return Err(SendErrorKind::Sealed);
            }
            let id = self.push_filled(buffer, len, env);
            self.sends.tell_of_last();
            return Ok(id);
        }
        let locals = Locals::to_read(&[(region, range)])?;
        let id = self.sends.name(SendKind::Message);
        match self.framing {
            Framing::Raw => self.sends.push_operation(Entry::named(id), SendOp::Send, locals),
            Framing::Credits => {
                let Some(buffer) = env.buffers.pool.take() else { return Err(no_buffer()) };
                let header = self.header(Kind::Data);
                self.sends.push_gathered(&env.buffers.pool, buffer, header.emit(), Some(id), locals);
            }
        }
        self.count_sent(len, env);
        Ok(id)
    }

    /// Adds bytes to the last message that is not posted yet, or to a new one. `fill` gets room for at least one byte,
    /// and returns how many bytes it has put there. If `fill` returns 0, nothing is sent.
    pub(crate) fn append(
        &mut self,
        fill: impl FnOnce(&mut [u8]) -> usize,
        env: &mut Env<'_>,
    ) -> Result<usize, SendErrorKind> {
        if !self.state.is_open() {
            return Err(SendErrorKind::Closed);
        }
        let start = self.header_len();
        let end = start + self.terms.buffer_size.min(env.buffers.pool.stride() - HEADER_LEN - TAG_ROOM);
        if let Some((message, sges)) = self.sends.open_message() {
            let written = sges.total_len();
            let bytes = message.unposted(env.buffers.pool.slabs());
            // What is added to the last fragment would be added to a message whose length is known.
            let whole = start == 0 || bytes[0] == Kind::Data as u8;
            if whole && (start + 1..end).contains(&written) {
                let len = fill(&mut bytes[written..end]).min(end - written);
                *sges = SgeList::one(env.buffers.pool.sge(message, written + len));
                env.stats.messages.bytes_sent += len as u64;
                return Ok(len);
            }
        }
        self.check_message(1, env)?;
        let Some(mut filling) = env.buffers.pool.take_to_fill() else { return Err(no_buffer()) };
        let len = fill(&mut filling.room()[start..end]).min(end - start);
        if len == 0 {
            return Ok(0);
        }
        if let Some(buffer) = filling.keep() {
            self.push_filled(buffer, len, env);
        }
        Ok(len)
    }

    /// Length of the header in front of every payload, bytes.
    #[inline]
    const fn header_len(&self) -> usize {
        match self.framing {
            Framing::Credits => HEADER_LEN,
            Framing::Raw => 0,
        }
    }

    /// Queues a message of the program with a payload that is already in place.
    #[inline]
    fn push_filled(&mut self, buffer: Buffer, len: usize, env: &mut Env<'_>) -> SendId {
        let message = match self.framing {
            Framing::Credits => env.buffers.pool.post_behind(buffer, self.header(Kind::Data).emit(), len),
            Framing::Raw => env.buffers.pool.post(buffer, len),
        };
        self.push_data(message, len, env)
    }

    /// Queues a message of the program. `len`: length of the payload, bytes.
    #[inline(always)]
    fn push_data(&mut self, (posted, sge): (Posted, Sge), len: usize, env: &mut Env<'_>) -> SendId {
        let id = self.sends.name(SendKind::Message);
        self.sends.push_now(Entry::message(posted, Some(id)), SendOp::Send, SgeList::one(sge));
        self.count_sent(len, env);
        id
    }

    #[inline]
    pub(super) fn count_sent(&mut self, len: usize, env: &mut Env<'_>) {
        env.stats.messages.sent += 1;
        env.stats.messages.bytes_sent += len as u64;
        self.mark(env);
    }

    /// Takes a credit, and returns the header of the message that uses it.
    #[inline]
    pub(super) fn header(&mut self, kind: Kind) -> Header {
        self.tx.take();
        Header { kind, grant: self.rx.told() }
    }

    /// Queues a message of the reactor's own. The caller has checked that there are a credit and a place.
    pub(super) fn push_control(&mut self, kind: Kind, payload: &[u8], name: Option<SendId>, env: &mut Env<'_>) {
        let Some(buffer) = env.buffers.pool.take() else {
            debug_assert!(false, "every place in the send queue has a buffer promised");
            return;
        };
        let (posted, sge) = env.buffers.pool.post_copy(buffer, &self.header(kind).emit(), payload);
        self.sends.push(Entry::message(posted, name), SendOp::Send, SgeList::one(sge));
        self.mark(env);
    }

    // One-sided operations.

    /// Checks whether a one-sided operation of `places` work requests can be queued now. `credit`: the operation uses a
    /// receive of the peer.
    pub(crate) fn check_operation(
        &mut self,
        places: usize,
        credit: bool,
        env: &mut Env<'_>,
    ) -> Result<(), SendErrorKind> {
        if !self.state.is_open() {
            return Err(SendErrorKind::Closed);
        }
        let most = self.sends.most_room();
        if places > most {
            return Err(SendErrorKind::TooManyRegions { count: places, max: most });
        }
        let room = if credit { self.room_for_message() } else { Ok(()) };
        let enough = self.sends.room(self.transfers.places()) >= places;
        room.and(if enough { Ok(()) } else { Err(Blocked::Queue) }).map_err(|blocked| {
            self.refuse(if credit { Need::Message } else { Need::Place }, env);
            SendErrorKind::WouldBlock(blocked)
        })
    }

    /// Queues an operation that [`Connection::check_operation`] has allowed.
    pub(crate) fn operate(&mut self, kind: SendKind, op: SendOp, locals: Locals, env: &mut Env<'_>) -> SendId {
        let id = self.sends.name(kind);
        if self.framing == Framing::Credits && op.takes_receive() {
            self.tx.take();
        }
        self.sends.push_operation(Entry::named(id), op, locals);
        self.mark(env);
        id
    }

    /// Queues reads into several ranges, one after another, as one operation.
    pub(crate) fn read(&mut self, mut from: RemoteAddress, locals: Locals, env: &mut Env<'_>) -> SendId {
        let id = self.sends.name(SendKind::Read);
        // Each range gets a Read of its own: a Read on iWARP has one sink, and many adapters take no more.
        let count = locals.sges.as_slice().len();
        for (nth, (&sge, hold)) in locals.sges.as_slice().iter().zip(locals.holds).enumerate() {
            let entry = if nth + 1 == count { Entry::named(id) } else { Entry::EMPTY };
            let mut holds = Holds::default();
            holds[0] = hold;
            self.sends.push_operation(entry, SendOp::Read(from), Locals { sges: SgeList::one(sge), holds });
            // A peer may name a region around the end of all addresses. The device refuses it.
            from.address = from.address.wrapping_add(sge.len() as u64);
        }
        self.mark(env);
        id
    }

    /// Queues a write and a message that tells of it. This replaces a write with immediate data on devices that have
    /// none.
    pub(crate) fn write_and_tell(
        &mut self,
        to: RemoteAddress,
        locals: Locals,
        immediate: Immediate,
        env: &mut Env<'_>,
    ) -> SendId {
        let id = self.sends.name(SendKind::Write);
        let late = cfg!(planted = "immediate-before-its-write");
        if late {
            self.push_control(Kind::Immediate, &immediate.emit(), Some(id), env);
        }
        self.sends.push_operation(Entry::EMPTY, SendOp::Write(to), locals);
        if !late {
            self.push_control(Kind::Immediate, &immediate.emit(), Some(id), env);
        }
        id
    }

    // Posting.

    /// Whether control messages go out and receives are posted. That is so while the connection is open, and after a
    /// close while the peer still fetches messages that were offered before.
    pub(crate) fn exchanges(&self) -> bool {
        match self.state {
            State::Open | State::Securing(_) => true,
            State::Draining => self.delays_its_close(),
            _ => false,
        }
    }

    /// Whether a cork keeps the chain from being posted. It does while the chain is less than half of a queue and
    /// nothing waits for the chain: no refused send, no ping, pong or grant that is due, and no large message.
    fn is_holding_back(&self) -> bool {
        self.corked
            && self.state.is_open()
            && self.refused.is_none()
            && !self.sends.is_half_chained()
            && !self.sends.is_awaited
            && !(self.keepalive.owes_ping || self.keepalive.owes_pong || self.rx.update_due())
            && !self.feeds_itself()
    }

    /// Whether the flush is to post the sends before the receives, so that the peer gets the message that it waits for sooner.
    /// That is so for one message, if no grant would be due after the receives are posted. Several messages have to carry the grant
    /// of these receives: a peer that answers each of them must not find the window closed because the grants are behind.
    #[inline]
    pub(crate) fn sends_first(&self) -> bool {
        self.framing == Framing::Credits
            && self.sends.is_single()
            && !self.receives.is_shared()
            && !self.feeds_itself()
            && !self.rx.update_due_after(self.receives.to_post())
    }

    /// Whether the next flush is to post receives.
    #[inline]
    pub(crate) fn receives_due(&self) -> bool {
        let control = self.keepalive.owes_ping || self.keepalive.owes_pong;
        self.receives.to_post() > 0
            && self.exchanges()
            && (control || self.framing == Framing::Raw || self.receives.worth_posting(&self.rx))
    }

    /// Counts receives that were posted, or claimed of the shared queue. The peer may be told of them.
    #[inline]
    pub(crate) fn receives_posted(&mut self, count: u32) {
        if !cfg!(planted = "credit-at-completion") {
            self.rx.posted(count);
        }
    }

    /// Adjusts the number of shared receives that the connection promises its peer.
    pub(crate) fn renew_claim(&mut self, env: &mut Env<'_>) {
        let ending = self.state.is_ending() && !self.exchanges();
        if self.receives.is_shared() && !ending {
            let more = self.receives.renew(env.buffers, &self.rx, env.config.receive_depth, env.now);
            self.rx.posted(more);
        }
    }

    /// Gets the chain ready to be posted: adds a control message if one is due, and puts the newest grant into the
    /// first message. Returns an empty chain if nothing is to be posted now.
    #[inline]
    pub(crate) fn ready_chain(&mut self, env: &mut Env<'_>) -> &[SendWr] {
        let sends = match self.state {
            State::Open | State::Leaving => true,
            State::Draining => {
                if self.sends.is_chained() {
                    // No completion tells of sends without a signal: the close goes on when they are posted.
                    self.want(env, Action::Ending);
                }
                true
            }
            State::Securing(_) | State::Greeting | State::Refusing(_) => {
                self.pump_handshake(env);
                true
            }
            _ => false,
        };
        if !sends || self.is_holding_back() {
            return &[];
        }
        if self.framing == Framing::Credits {
            if let Some(kind) = self.due_control() {
                env.stats.connections.pings += u64::from(kind == Kind::Ping);
                env.stats.messages.credit_updates += u64::from(kind == Kind::Credit);
                self.keepalive.owes_ping &= kind != Kind::Ping;
                self.push_control(kind, &[], None, env);
            }
            if self.sends.has_carrier() {
                // Any message is a sign of life, and so answers a ping.
                self.keepalive.owes_pong = false;
                self.sends.carry(&env.buffers.pool, self.rx.grant());
            }
        }
        if self.sealer.as_mut().is_some_and(|sealer| !self.sends.seal(&env.buffers.pool, sealer)) {
            self.posting_failed("a message cannot be sealed".into(), env);
            return &[];
        }
        self.sends.chain()
    }

    /// The control message to send now, if one is due. A message that goes out anyway replaces a pong and a grant.
    #[inline]
    fn due_control(&self) -> Option<Kind> {
        let carried = self.sends.has_carrier();
        let kind = if self.keepalive.owes_ping {
            Kind::Ping
        } else if carried {
            return None;
        } else if self.keepalive.owes_pong {
            Kind::Pong
        } else if self.rx.update_due() {
            Kind::Credit
        } else {
            return None;
        };
        (self.exchanges() && may_control(&self.tx, &self.rx) && self.sends.has_control_room()).then_some(kind)
    }

    // Completing.

    /// Handles the completion of the send at position `sequence`, which also ends those before it. `false` if no such
    /// send is posted.
    #[inline]
    pub(crate) fn sent(&mut self, sequence: u16, result: Result<(), Failure>, env: &mut Env<'_>) -> bool {
        let Some(count) = self.sends.ended_by(sequence) else { return false };
        let last = result.map_or_else(Outcome::Failed, |()| Outcome::Sent);
        let batch = self.sends.batch_ended(count, last);
        if batch > 0 {
            self.sends.pop_batch(batch);
            self.pieces_ended(batch, last, env);
        } else if self.sends.has_answers() {
            self.sends.note_ends(count, last);
            while let Some(outcome) = self.sends.front_ended() {
                self.end_send(outcome, env);
            }
        } else {
            // Those before the last one had no signal.
            let succeeded = if last.is_sent() { count } else { count - 1 };
            self.end_sends(succeeded, env);
            if succeeded < count {
                self.end_send(last, env);
            }
        }
        self.ask_writable(env);
        if !self.is_marked()
            && (self.sends.is_chained() || self.feeds_itself() || self.owes_control() || self.state.is_securing())
        {
            // Messages and reads that are to be posted may have waited for a place.
            self.mark(env);
        }
        if let Err(failure) = result {
            self.cut_off();
            self.work_request_failed(failure, env);
        }
        true
    }

    /// Whether the queue pair has sends of which a completion is to tell.
    pub(crate) fn awaits_sends(&self) -> bool {
        self.sends.awaited() > 0
    }

    fn owes_control(&self) -> bool {
        self.keepalive.owes_ping || self.keepalive.owes_pong || self.rx.update_due()
    }

    /// Ends the oldest sends, which have succeeded and wait for no answer.
    #[inline]
    fn end_sends(&mut self, mut count: usize, env: &mut Env<'_>) {
        while count > 0 {
            if self.sends.entries.front().is_none_or(|entry| entry.role != Role::Plain) {
                self.end_send(Outcome::Sent, env);
                count -= 1;
                continue;
            }
            let (ended, first) = self.sends.pop_messages(count, &mut env.buffers.pool);
            if let Some(send) = first {
                self.tell(env, Event::Sent { send, count: ended as u32, outcome: Outcome::Sent });
            }
            count -= ended;
        }
    }

    /// Ends the oldest send.
    #[inline]
    pub(super) fn end_send(&mut self, outcome: Outcome, env: &mut Env<'_>) {
        let Some(entry) = self.sends.pop(&mut env.buffers.pool) else { return };
        if entry.role != Role::Plain {
            self.end_role(entry.role, entry.regions, outcome, env);
        }
        if let Some(send) = entry.id.filter(|_| !entry.quiet) {
            self.tell(env, Event::Sent { send, count: 1, outcome });
        }
    }

    /// Lets go of the regions of the oldest send.
    #[inline]
    fn let_go(&mut self, regions: u8, env: &mut Env<'_>) {
        for _ in 0..regions {
            let Some((key, hold)) = self.sends.holds.pop_front() else { return };
            if hold.done() {
                self.want(env, Action::Unused(key));
            }
        }
    }

    /// Ends what the oldest send was besides a message: lets go of its regions, and tells those that it was a part of.
    #[inline(never)]
    fn end_role(&mut self, role: Role, regions: u8, outcome: Outcome, env: &mut Env<'_>) {
        self.let_go(regions, env);
        match role {
            Role::Plain | Role::Regions => {}
            Role::Large(len) if outcome.is_sent() => self.piece_arrived(len, env),
            Role::Large(_) => self.piece_failed(),
            Role::List(Part::Piece { .. }) => self.pieces_ended(1, outcome, env),
            Role::List(part) => self.part_ended(part, outcome, env),
        }
    }
}

pub(super) fn no_buffer() -> SendErrorKind {
    debug_assert!(false, "every place in the send queue has a buffer promised");
    SendErrorKind::WouldBlock(Blocked::Queue)
}
