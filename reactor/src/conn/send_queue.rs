//! The send queue of a connection. The first entries are the posted sends. The *chain* follows: the
//! sends that the next flush posts.

use std::collections::VecDeque;
use std::ops::Range;

use rdma_transport::slab::Key;
use rdma_transport::wc::WcStatus;
use rdma_transport::wr::{SendFlags, SendOp, SendWr, SgeList};

use super::list::{ListDirection, ListPart, Lists, Order};
use crate::device::pool::{Buffer, Pool, Posted};
use crate::error::Outcome;
use crate::id::{ConnectionId, SendId, SendKind, send_wr_id};
use crate::limits::{CONTROL_SENDS, HEADER_LEN};
use crate::memory::operations::Locals;
use crate::memory::region_memory::Hold;
use crate::security::Sealer;
use crate::security::channel::TAG;

/// The kind of a send. It decides what happens when the send ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendRole {
    /// A message in a buffer.
    Plain,
    /// The hello of the active side.
    Hello,
    /// An operation on regions, or a message with its payload in a region.
    Regions,
    /// A Read of this many bytes of a large message that the peer has offered.
    Large(u32),
    /// A work request of a list of Reads or Writes.
    List(ListPart),
}

/// A send in the queue.
#[derive(Debug)]
pub(crate) struct SendQueueEntry {
    /// The buffer with the message. If the payload is in a region, the buffer contains only the header.
    buffer: Option<Posted>,
    pub(super) role: SendRole,
    /// The number of regions that the send uses. [`SendQueue`] has as many holds for the send in `holds`. 0 for a piece of a list, because
    /// the list itself keeps its regions registered.
    pub(super) regions: u8,
    /// The id under which the program knows the send. `None` for control messages.
    pub(crate) id: Option<SendId>,
    /// True if the end of the send is not reported to the program. Only sends with a copied payload can be quiet.
    pub(super) quiet: bool,
    /// True for Reads and atomics, which end with the peer's answer. The completion of a later send does not prove that such an operation
    /// has ended: on siw, the later completion may arrive first.
    answered: bool,
    /// The outcome of the send, if it has completed while an earlier send has not. `None` otherwise.
    ended: Option<Outcome>,
}

impl SendQueueEntry {
    pub(super) const EMPTY: Self =
        Self { buffer: None, role: SendRole::Plain, regions: 0, id: None, quiet: false, answered: false, ended: None };

    pub(crate) const fn named(id: SendId) -> Self {
        Self { id: Some(id), ..Self::EMPTY }
    }

    /// Creates an entry for a message. The message is one of the program if `id` is set, and a control message otherwise.
    pub(super) const fn message(buffer: Posted, id: Option<SendId>) -> Self {
        Self { buffer: Some(buffer), id, ..Self::EMPTY }
    }

    pub(crate) const fn piece(len: u32) -> Self {
        Self { role: SendRole::Large(len), ..Self::EMPTY }
    }

    pub(super) const fn of_list(part: ListPart) -> Self {
        Self { role: SendRole::List(part), ..Self::EMPTY }
    }

    pub(super) fn with(mut self, buffer: Posted) -> Self {
        self.buffer = Some(buffer);
        self
    }
}

/// The setting that decides if the ends of copied messages are reported to the program. A message
/// whose end is not reported needs no signaled work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copies {
    Reported,
    /// `Config::quiet_sends` is set.
    Quiet,
    /// `Config::quiet_sends` is set, and the program has requested reports of the messages that it sends now.
    ReportedForNow,
}

/// The send queue of one connection.
#[derive(Debug)]
pub(crate) struct SendQueue {
    connection: ConnectionId,
    /// The number of slots: the largest number of sends in the queue, including control messages.
    slots: usize,
    /// All sends in the queue, in order: the posted ones, then those whose work requests are in `chain`.
    entries: VecDeque<SendQueueEntry>, // bound: sends
    /// The work requests that the next flush posts.
    chain: Vec<SendWr>, // bound: sends
    /// The number of work requests at the front of the chain that must not be changed any more. Each of these is already encrypted, or must
    /// stay unencrypted.
    sealed: usize,
    /// The number of entries with `answered` set.
    answers: usize,
    /// The holds that keep the regions of the entries registered, in the order of the entries.
    holds: VecDeque<(Key, Hold)>, // bound: sends
    /// The sequence number of the first entry, modulo 2^16.
    first: u16,
    /// The number of ids that were assigned to sends of the program.
    named: u64,
    /// The number of unsignaled work requests in the queue, posted or not, since the last signaled one.
    unsignaled: usize,
    /// The number of posted work requests since the last signaled one. None of these causes a completion unless it fails.
    silent: usize,
    copies: Copies,
    /// True if the next flush must signal its last work request, because the end of an unsignaled work request must be reported.
    wants_signal: bool,
    /// True if the chain has a message with a header, which can carry a grant of credits.
    has_carrier: bool,
    /// True if the peer waits for a message in the chain. In this case, the chain is posted even while the program corks the connection.
    pub(super) is_awaited: bool,
    /// The flags that the program has requested for the next send.
    next: SendFlags,
    /// True if the provider can complete sends when they are posted.
    immediate: bool,
    /// The number of messages and Writes since the last doorbell that were completed when they were posted.
    pub(super) unrung: usize,
    /// The lists of Reads and Writes whose pieces are added when slots become free.
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

    /// Sets the number of slots to that of the queue pair, and allocates memory for as many sends.
    /// `immediate` is true if the provider can complete sends when they are posted.
    pub(crate) fn reserve(&mut self, slots: u32, immediate: bool) {
        (self.slots, self.immediate) = (slots as usize, immediate);
        self.entries.reserve(self.slots);
        self.chain.reserve(self.slots);
    }

    /// Returns the number of free slots that sends of the program may use. The slots for control messages, the slots that are reserved for
    /// lists, and `reserved` more slots are not counted.
    #[inline]
    pub(crate) fn room(&self, reserved: usize) -> usize {
        self.slots.saturating_sub(self.entries.len() + CONTROL_SENDS as usize + reserved + self.lists.reserved_places())
    }

    /// Returns the number of sends in the queue.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the number of pieces in a full batch of a list: a third of the slots of the send queue. Only the last piece of a batch is
    /// signaled. Unsignaled sends before a batch may occupy up to half of the slots until the batch completes. The batch fits into the
    /// other half, so its signaled piece always gets a slot.
    pub(super) fn batch(&self) -> usize {
        (self.slots / 3).max(1)
    }

    /// Returns the number of slots that sends of the program can use when the queue is empty.
    pub(crate) const fn most_room(&self) -> usize {
        self.slots - CONTROL_SENDS as usize
    }

    /// Returns true if a slot is free for a control message.
    #[inline]
    pub(crate) fn has_control_room(&self) -> bool {
        self.entries.len() < self.slots
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns true if the chain has work requests to post.
    #[inline]
    pub(crate) fn is_chained(&self) -> bool {
        !self.chain.is_empty()
    }

    /// Returns true if the next flush has exactly one thing to do: post one work request, or ring the doorbell.
    #[inline]
    pub(crate) fn is_single(&self) -> bool {
        self.chain.len() + usize::from(self.is_unrung()) == 1
    }

    /// Returns true if a send may be completed when it is posted, without overtaking earlier sends.
    /// `reported` is true if the end of the send is reported to the program. Such a send requires
    /// an empty queue, because the ends of sends are reported in order. Between two doorbells, at
    /// most as many sends are completed in this way as the queue has slots.
    #[inline]
    pub(super) fn takes_immediate(&self, reported: bool) -> bool {
        let reported = reported && !crate::planted("an-immediate-end-is-told-first");
        let before = if reported { self.entries.len() } else { self.chain.len() };
        let first = before == 0 || crate::planted("an-immediate-send-overtakes");
        self.immediate && first && self.next.is_empty() && self.unrung < self.slots
    }

    /// Returns true if sends were completed when they were posted, and the doorbell was not rung after that.
    #[inline]
    pub(crate) const fn is_unrung(&self) -> bool {
        self.unrung > 0
    }

    /// Notes that the doorbell was rung.
    #[inline]
    pub(crate) const fn rung(&mut self) {
        self.unrung = 0;
    }

    /// Returns true if the chain fills at least half of the queue.
    pub(crate) fn is_half_chained(&self) -> bool {
        self.chain.len() * 2 >= self.slots
    }

    /// Returns true if the chain has a message with a header, which can carry a grant of credits.
    pub(crate) const fn has_carrier(&self) -> bool {
        self.has_carrier
    }

    /// Notes that the peer waits for the last message in the chain. So the chain is posted even while the program corks the connection.
    pub(super) const fn hurry(&mut self) {
        self.is_awaited = true;
    }

    /// Returns the number of sends that are posted and have not ended.
    #[inline]
    pub(crate) fn posted(&self) -> usize {
        self.entries.len() - self.chain.len()
    }

    /// Returns the number of posted sends that a completion will report. Unsignaled sends after the last signaled send are not counted.
    pub(crate) fn awaited(&self) -> usize {
        self.posted().saturating_sub(self.silent)
    }

    /// Fences the next work request: the device starts it after all earlier Reads have ended.
    pub(crate) fn fence_next(&mut self) {
        self.next |= SendFlags::FENCE;
    }

    /// Makes the next message of the program solicited: it causes a completion event at a peer that waits for solicited messages only.
    pub(crate) fn solicit_next(&mut self) {
        self.next |= SendFlags::SOLICITED;
    }

    /// Takes over the flags that the program has requested for the next send, from the queue of a failed attempt to connect.
    pub(super) fn inherit(&mut self, failed: &Self) {
        self.next = failed.next;
    }

    /// Assigns an id to the next send of the program.
    #[inline]
    pub(crate) const fn name(&mut self, kind: SendKind) -> SendId {
        let id = SendId::new(self.named, kind);
        self.named += 1;
        id
    }

    /// Adds a message of the program. Its header is in `buffer`, and its payload in the memory that `locals` names.
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
            debug_assert!(pushed.is_ok(), "slots for the header and a payload");
        }
        locals.sges = sges;
        self.push_operation(SendQueueEntry::message(posted, id), SendOp::Send, locals);
    }

    /// Adds an operation on regions: a Read, a Write, an atomic, or a message with its payload in a region.
    #[inline]
    pub(crate) fn push_operation(&mut self, mut entry: SendQueueEntry, op: SendOp, mut locals: Locals) {
        for held in locals.holds.iter_mut().map_while(Option::take) {
            if crate::planted("lease-ends-at-posting") {
                let _ = held.1.done();
            } else {
                self.holds.push_back(held);
                entry.regions += 1;
            }
        }
        if entry.role == SendRole::Plain {
            entry.role = SendRole::Regions;
        }
        self.push(entry, op, locals.sges);
    }

    /// Returns the flags of the next work request. `answered` is true if the work request completes
    /// with an answer from the peer. `message` is true if the work request is a message of the
    /// program, which uses a receive of the peer.
    #[inline]
    fn flags(&mut self, answered: bool, message: bool) -> SendFlags {
        // An unsignaled send keeps its slot until a later signaled send completes. So consecutive unsignaled sends occupy less than half of
        // the slots. With `quiet_sends` they occupy less than a quarter, because the chain may end with unsignaled sends.
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

    /// Adds a work request to the chain.
    #[inline(never)]
    pub(super) fn push(&mut self, entry: SendQueueEntry, op: SendOp, sges: SgeList) {
        self.push_now(entry, op, sges);
    }

    /// Adds a work request to the chain. Inlined, so that the compiler specializes it for a constant role.
    #[inline(always)]
    pub(super) fn push_now(&mut self, mut entry: SendQueueEntry, op: SendOp, sges: SgeList) {
        entry.answered = op.answered();
        self.answers += usize::from(entry.answered);
        self.has_carrier |= entry.buffer.is_some();
        let message = entry.id.is_some() && op.takes_receive();
        let copied = entry.role == SendRole::Plain && entry.id.is_some_and(|id| id.kind() == SendKind::Message);
        entry.quiet = copied && !self.reports_copies();
        self.wants_signal |= !entry.quiet;
        let flags = self.flags(entry.answered, message);
        let sequence = self.first.wrapping_add(self.entries.len() as u16);
        self.entries.push_back(entry);
        self.chain.push(SendWr { wr_id: send_wr_id(self.connection, sequence), op, sges, flags });
    }

    /// Adds a batch of pieces of a list. Only the last piece of the batch is signaled.
    pub(super) fn push_batch(&mut self, order: &Order, pieces: Range<usize>) {
        let pieces = order.pieces.get(pieces).unwrap_or_default();
        let (first, reads) =
            (self.first.wrapping_add(self.entries.len() as u16), order.direction == ListDirection::Read);
        let count = pieces.len() as u16;
        let entry = |before| SendQueueEntry { answered: reads, ..SendQueueEntry::of_list(ListPart::Piece { before }) };
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
        if let Some(last) = self.chain.last_mut().filter(|_| count > 0 && !crate::planted("a-batch-without-a-signal")) {
            last.flags |= SendFlags::SIGNALED;
        }
    }

    /// Returns `count` if the first `count` sends are exactly one batch of a list, and the batch has succeeded. Returns 0 otherwise.
    #[inline]
    pub(super) fn batch_ended(&self, count: usize, outcome: Outcome) -> usize {
        match self.entries.get(count - 1).map(|entry| entry.role) {
            Some(SendRole::List(ListPart::Piece { before }))
                if usize::from(before) + 1 == count && outcome.is_sent() =>
            {
                count
            }
            _ => 0,
        }
    }

    /// Removes the first `count` entries, which are pieces of one list and have ended.
    pub(super) fn pop_batch(&mut self, count: usize) {
        // The pieces of a batch are either all Reads or all Writes.
        let answered = self.entries.front().is_some_and(|entry| entry.answered);
        self.answers -= if answered { count } else { 0 };
        self.entries.drain(..count);
        self.first = self.first.wrapping_add(count as u16);
    }

    /// Returns the last message of the chain, so that bytes can be added to it. `None` if the last work request is not a message of the
    /// program in one buffer.
    pub(crate) fn open_message(&mut self) -> Option<(&mut Posted, &mut SgeList)> {
        let wr = self.chain[self.sealed..].last_mut().filter(|wr| wr.sges.as_slice().len() == 1)?;
        let entry =
            self.entries.back_mut().filter(|entry| entry.id.is_some_and(|id| id.kind() == SendKind::Message))?;
        Some((entry.buffer.as_mut()?, &mut wr.sges))
    }

    /// Writes the newest grant into the header of the first message of the chain that may still be changed. So the peer receives the grant
    /// before it answers this message or a later one.
    #[inline]
    pub(crate) fn carry(&mut self, pool: &Pool, grant: u32) {
        let chained = self.entries.range_mut(self.posted() + self.sealed..);
        if let Some(message) = chained.filter_map(|entry| entry.buffer.as_mut()).next() {
            message.patch(pool.slabs(), HEADER_LEN - 4, &grant.to_le_bytes());
        }
        self.has_carrier = false;
    }

    /// Makes the work requests that are in the chain now stay unencrypted. Work requests that are
    /// added later are encrypted.
    pub(super) fn seal_from_here(&mut self) {
        self.sealed = self.chain.len();
        self.has_carrier = false;
    }

    /// Encrypts the messages of the chain that are not encrypted yet, in order. Returns false if a message cannot be encrypted. In this
    /// case, the chain must not be posted.
    #[inline(never)]
    pub(super) fn seal(&mut self, pool: &Pool, sealer: &mut Sealer) -> bool {
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

    /// Returns a shift: at most `slots >> shift` consecutive sends may be unsignaled.
    #[inline]
    const fn run_shift(&self) -> u32 {
        1 + !matches!(self.copies, Copies::Reported) as u32
    }

    /// Returns true if the ends of messages whose payload is copied now are reported to the program.
    #[inline]
    pub(super) const fn reports_copies(&self) -> bool {
        !matches!(self.copies, Copies::Quiet)
    }

    /// Sets whether the ends of copied messages are reported from now on. If `telling` is true, these ends are always reported. Otherwise,
    /// they are reported if `Config::quiet_sends` is not set. Returns the value of `telling` in the last call, or false if `quiet_sends` is
    /// not set.
    pub(crate) const fn tell_of_next(&mut self, telling: bool) -> bool {
        let before = matches!(self.copies, Copies::ReportedForNow);
        self.copies = match (self.copies, telling) {
            (Copies::Reported, _) => Copies::Reported,
            (Copies::Quiet | Copies::ReportedForNow, true) => Copies::ReportedForNow,
            (Copies::Quiet | Copies::ReportedForNow, false) => Copies::Quiet,
        };
        before
    }

    /// Requests a report of the end of the last message, although its payload was copied. The program waits for that report before it
    /// writes to the region with the payload again.
    pub(super) fn report_last(&mut self) {
        if let Some(entry) = self.entries.back_mut() {
            (entry.quiet, self.wants_signal) = (false, true);
        }
    }

    /// Notes that the last message in the queue is the hello.
    pub(super) fn mark_hello(&mut self) {
        if let Some(entry) = self.entries.back_mut() {
            entry.role = SendRole::Hello;
        }
    }

    /// Returns true if all sends are posted and unsignaled, so that no completion is expected for any of them.
    pub(super) fn is_settled(&self) -> bool {
        self.awaited() == 0 && self.chain.is_empty()
    }

    /// Makes sure that a completion frees the slots of the sends in the queue, because the program waits for slots. Returns false if all
    /// sends are already posted and unsignaled. In this case, the caller must add a signaled send.
    pub(super) fn request_signal(&mut self) -> bool {
        self.wants_signal |= !self.chain.is_empty();
        self.entries.is_empty() || !self.is_settled()
    }

    /// Returns the chain for posting. Signals the last work request if a work request since the last signal must be reported.
    #[inline]
    pub(crate) fn chain(&mut self) -> &[SendWr] {
        (self.has_carrier, self.is_awaited) = (false, false);
        if self.wants_signal {
            if let Some(last) = self.chain.last_mut() {
                last.flags |= SendFlags::SIGNALED;
                if crate::planted("sends-never-signaled") {
                    last.flags.remove(SendFlags::SIGNALED);
                }
                (self.unsignaled, self.wants_signal) = (0, false);
            }
        }
        &self.chain
    }

    /// Notes that the first `count` work requests of the chain were posted.
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

    /// Returns the number of sends that the completion of `sequence` ends: that send and all earlier ones. `None` if no such send is
    /// posted.
    #[inline]
    pub(crate) fn ended_by(&self, sequence: u16) -> Option<usize> {
        let count = usize::from(sequence.wrapping_sub(self.first)) + 1;
        (count <= self.posted()).then_some(count)
    }

    /// Returns true if entries in the queue wait for answers from the peer. In this case, a
    /// completion is only recorded in the entries. The oldest send ends when
    /// [`SendQueue::front_ended`] returns its outcome.
    #[inline]
    pub(crate) fn has_answers(&self) -> bool {
        self.answers > 0 && !crate::planted("a-send-ends-the-reads-before-it")
    }

    /// Records a completion of the send at index `count - 1`. The completion ends that send, and the earlier sends that do not wait for
    /// answers. If the send is a Read of a list, the completion also ends the earlier Reads of the same batch.
    pub(crate) fn note_ends(&mut self, count: usize, outcome: Outcome) {
        // When a queue is flushed, the device reports each work request separately, so a flushed Read does not end the earlier Reads of its
        // batch.
        let flushed = matches!(outcome, Outcome::Failed(failure) if failure.status == WcStatus::Flushed);
        let covered = match self.entries.get(count.wrapping_sub(1)).map(|entry| entry.role) {
            Some(SendRole::List(ListPart::Piece { before })) if !flushed => usize::from(before),
            _ => 0,
        };
        for (nth, entry) in self.entries.iter_mut().take(count).enumerate() {
            if nth + 1 == count {
                entry.ended = Some(outcome);
            } else if !entry.answered || nth + 1 + covered >= count {
                // This earlier send was unsignaled. It has succeeded, because a failure would have been reported.
                entry.ended.get_or_insert(Outcome::Sent);
            }
        }
    }

    /// Returns the outcome of the oldest send. `None` if it has not completed.
    pub(crate) fn front_ended(&self) -> Option<Outcome> {
        self.entries.front()?.ended
    }

    /// Returns the outcome of the oldest send, like [`SendQueue::front_ended`], after the queue pair is destroyed. At that time, the hello
    /// and the Reads of large messages have no effect any more, so `None` is returned for these.
    pub(super) fn front_ended_at_last(&self) -> Option<Outcome> {
        let front = self.entries.front()?;
        front.ended.filter(|_| !matches!(front.role, SendRole::Hello | SendRole::Large(_)))
    }

    /// Returns true if the program waits for the oldest send: it is a send of the program, or belongs to a list. The parts of a send before
    /// its last part do not count, because the last part does not succeed without them.
    pub(super) fn front_is_of_program(&self) -> bool {
        self.entries.front().is_some_and(|entry| entry.id.is_some() || matches!(entry.role, SendRole::List(_)))
    }

    /// Removes up to `most` messages from the front of the queue, and returns their buffers to the pool. Either the ends of all removed
    /// messages are reported to the program, and their ids are consecutive, or none is reported. The removal stops before a message that
    /// would break this rule. Returns the number of removed messages, and the id of the first one, or `None` if the ends are not reported.
    #[inline]
    pub(super) fn pop_messages(&mut self, most: usize, pool: &mut Pool) -> (usize, Option<SendId>) {
        let (mut count, mut first) = (0, None::<SendId>);
        for entry in self.entries.iter_mut().take(most) {
            let reported = entry.id.filter(|_| !entry.quiet);
            let goes_on = match first {
                _ if entry.role != SendRole::Plain => false,
                None => reported.is_none() || count == 0,
                Some(first) => reported == Some(first.after(count)),
            };
            if !goes_on {
                break;
            }
            first = first.or(reported);
            count += 1;
            if let Some(buffer) = entry.buffer.take() {
                pool.give(buffer.done());
            }
        }
        self.entries.drain(..count as usize);
        self.first = self.first.wrapping_add(count as u16);
        (count as usize, first)
    }

    /// Removes the oldest send from the queue and returns its buffer to the pool. `None` if the queue is empty.
    #[inline]
    pub(crate) fn pop(&mut self, pool: &mut Pool) -> Option<SendQueueEntry> {
        let mut entry = self.entries.pop_front()?;
        self.answers -= usize::from(entry.answered);
        self.first = self.first.wrapping_add(1);
        if let Some(buffer) = entry.buffer.take() {
            pool.give(buffer.done());
        }
        Some(entry)
    }

    /// Makes sure that the buffers and the regions of the posted sends are never reused: the queue pair could not be destroyed, so the
    /// device may still access them. Returns the number of these buffers.
    pub(super) fn forsake(&mut self) -> usize {
        let posted = self.posted();
        let taken = self.entries.range_mut(..posted).map(|entry| usize::from(std::mem::take(&mut entry.regions)));
        let held = taken.sum::<usize>().min(self.holds.len());
        self.holds.drain(..held);
        self.entries.range_mut(..posted).filter_map(|entry| entry.buffer.take()).count()
    }

    /// Returns true if the oldest send is a message in a buffer ([`SendRole::Plain`]).
    #[inline]
    pub(super) fn front_is_plain(&self) -> bool {
        self.entries.front().is_some_and(|entry| entry.role == SendRole::Plain)
    }

    /// Removes the hold on the oldest region that a send uses, and returns it with the key of the
    /// region.
    #[inline]
    pub(super) fn pop_hold(&mut self) -> Option<(Key, Hold)> {
        self.holds.pop_front()
    }

    /// Drops the chain, because the queue pair was destroyed. The caller ends the sends in the
    /// queue.
    pub(crate) fn abandon_chain(&mut self) {
        self.chain.clear();
        self.sealed = 0;
        self.has_carrier = false;
    }
}
