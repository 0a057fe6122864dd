//! The outgoing direction of a queue pair: turns work requests, and the responses to the peer's requests, into records.
//!
//! The work requests of the send queue are transmitted and complete in order. A small payload is part of its record, so
//! its work request is done once the record is written. A large payload that lies in memory which the peer has mapped
//! is not copied: its work request is done once the peer has consumed the record. Any other payload is copied, part by
//! part, to the *staging buffer*, which the peer has mapped, too.

use std::collections::VecDeque;
use std::sync::Arc;

use super::fault::{LinkFault, Refusal};
use super::record::{IN_WINDOW, LAST, RecordHeader, RecordKind, WORD};
use super::ring::{InvalidPosition, Producer};
use super::segment::{Segment, SegmentPayload};
use super::windows::{LendingState, Lendings, Windows};
use crate::mem::{Memory, Sge, Sharing};
use crate::mr::Access;
use crate::slab::Key;
use crate::soft::completions::{ATOMIC_LEN, Done};
use crate::soft::keys::{KeyTable, Miss};
use crate::wc::WcStatus;
use crate::wr::{RemoteAddress, SendClass, SendFlags, SendOp, SendWr, SgeList};

/// The longest payload that is part of its record, bytes.
pub(super) const INLINE: usize = 1 << 10;
/// The longest payload of one record in a window, bytes.
pub(super) const MAX_PIECE: usize = 1 << 20;
/// The length of the staging buffer, and of the largest part that is copied there in one step, bytes.
const STAGING: usize = 256 << 10;
const STAGING_PIECE: usize = STAGING / 4;
/// The alignment of parts in the staging buffer, bytes.
const ALIGN: usize = 64;
/// The most bytes that are copied before other connections get their turn.
const BUDGET: usize = 4 << 20;
const ATOMIC: usize = ATOMIC_LEN as usize;

/// A work request that is not, or not wholly, written to records.
#[derive(Debug)]
struct QueuedSend {
    wr: SendWr,
    len: usize,
    /// A copy of the payload, if it was posted inline.
    inline: Option<Box<[u8]>>,
}

impl QueuedSend {
    /// Returns true if the work request waits for a response of the peer.
    fn is_answered(&self) -> bool {
        self.wr.op.answered() && (self.len > 0 || self.wr.op.class() != SendClass::Read)
    }

    /// Returns the successful completion of the work request.
    fn done(&self) -> Done {
        Done::of(self.wr.wr_id, self.wr.op.class(), self.wr.flags, self.len)
    }
}

/// The condition for a work request that is wholly in records to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CompletionCondition {
    /// The work requests before it are done.
    InOrder,
    /// The peer has consumed the records up to a position.
    Consumed(u64),
    /// The response of the peer has arrived.
    Answered,
}

/// A read or an atomic operation whose response has not wholly arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct AwaitedAnswer {
    pub(super) sink: Sge,
    pub(super) len: usize,
    pub(super) done: usize,
    pub(super) atomic: bool,
    number: u64,
}

/// A request of the peer that is not wholly answered.
#[derive(Clone, Copy, Debug)]
pub(super) enum PeerRequest {
    Read { key: u32, address: u64, len: usize, done: usize },
    CompareSwap { key: u32, address: u64, expected: u64, swap: u64 },
    FetchAdd { key: u32, address: u64, add: u64 },
}

/// The reason why [`Outgoing::transmit`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransmitProgress {
    /// Nothing more can be transmitted now.
    All,
    /// More can be transmitted, but other connections get their turn first.
    More,
}

/// The result of one transmission step.
enum TransmitStep {
    /// The step transmitted this number of bytes.
    Sent(usize),
    /// The peer must consume records, or answer, first.
    Blocked,
}

/// The part of a payload that is not transmitted yet.
struct SendPayload<'a> {
    sges: &'a SgeList,
    inline: Option<&'a [u8]>,
    offset: usize,
    left: usize,
}

/// Memory that payloads are copied to, used as a ring. The peer has mapped it.
#[derive(Debug)]
struct StagingBuffer {
    memory: Option<Arc<Memory>>,
    slot: u8,
    pos: u64,
    tail: u64,
    /// For each part: the position in the record ring that the peer must have consumed, and the position in the buffer
    /// up to which that frees it.
    parts: VecDeque<(u64, u64)>,
}

impl StagingBuffer {
    /// Reserves as many of `len` bytes as fit in one piece. Returns their offset and their number; `None` if the buffer
    /// is full.
    fn reserve(&mut self, len: usize) -> Option<(usize, usize)> {
        let len = len.min(STAGING_PIECE);
        if self.parts.is_empty() {
            // Begin with the same pages again: they are in the cache.
            (self.pos, self.tail) = (0, 0);
        }
        let at = (self.pos % STAGING as u64) as usize;
        let skip = if len > STAGING - at { STAGING - at } else { 0 };
        let used = (self.pos - self.tail) as usize;
        if used + skip + len > STAGING {
            return None;
        }
        self.pos += skip as u64;
        Some(((self.pos % STAGING as u64) as usize, len))
    }

    fn commit(&mut self, len: usize, end: u64) {
        self.pos += len.next_multiple_of(ALIGN) as u64;
        self.parts.push_back((end, self.pos));
    }

    fn consumed(&mut self, tail: u64) {
        while let Some(&(_, free)) = self.parts.front().filter(|(end, _)| *end <= tail) {
            self.tail = free;
            self.parts.pop_front();
        }
    }
}

/// The outgoing direction of a queue pair.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) ring: Producer,
    /// Work requests that are wholly in records and not done.
    inflight: VecDeque<(Done, CompletionCondition)>,
    /// The work requests behind them.
    queue: VecDeque<QueuedSend>,
    /// The number of the oldest work request that is not done.
    first: u64,
    /// The number of bytes of the first entry of `queue` that are transmitted.
    part: usize,
    /// True if the payload of the first entry of `queue` is transmitted, and its immediate data is next.
    immediate_next: bool,
    staging: StagingBuffer,
    awaited: VecDeque<AwaitedAnswer>,
    /// The limit of requests of this side that may be outstanding (ORD).
    depth: usize,
    /// Requests with lower numbers are answered.
    answered: u64,
    requests: VecDeque<PeerRequest>,
    /// The limit of requests that the peer may have outstanding.
    limit: usize,
    /// True if the next record belongs to a response, when both a response and a work request wait.
    answer_next: bool,
    /// The position behind the last record of a write.
    changes: u64,
    /// Replies to announced windows: slot, word, and true if the window is mapped.
    replies: VecDeque<(u8, u64, bool)>,
    pub(super) fault: Option<LinkFault>,
}

impl Outgoing {
    pub(super) fn new(half: usize, depths: (u16, u16)) -> Self {
        let (ird, ord) = depths;
        Self {
            ring: Producer::new(half),
            inflight: VecDeque::new(),
            queue: VecDeque::new(),
            first: 0,
            part: 0,
            immediate_next: false,
            staging: StagingBuffer { memory: None, slot: 0, pos: 0, tail: 0, parts: VecDeque::new() },
            awaited: VecDeque::new(),
            depth: usize::from(ord),
            answered: 0,
            requests: VecDeque::new(),
            limit: usize::from(ird.max(1)).next_power_of_two() + 1,
            answer_next: false,
            changes: 0,
            replies: VecDeque::new(),
            fault: None,
        }
    }

    /// Returns the number of work requests that are not done.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.inflight.len() + self.queue.len()
    }

    /// Returns the limit of reads and atomic operations that may be outstanding at the peer.
    pub(super) const fn depth(&self) -> usize {
        self.depth
    }

    /// Returns true if something waits for the peer to consume records.
    #[inline]
    pub(super) fn wants_room(&self) -> bool {
        !self.queue.is_empty() || !self.inflight.is_empty() || !self.requests.is_empty() || !self.replies.is_empty()
    }

    /// Returns true if a message may be written to the ring now, because no work request is waiting in front of it.
    #[inline]
    pub(super) fn is_clear(&self) -> bool {
        self.queue.is_empty() && self.fault.is_none()
    }

    /// Adds a work request. Copies its payload if it is inline.
    pub(super) fn post(&mut self, wr: &SendWr, len: usize) {
        let inline = wr.flags.contains(SendFlags::INLINE).then(|| {
            let mut copy = Vec::with_capacity(len);
            wr.sges.as_slice().iter().for_each(|sge| sge.append_to(&mut copy));
            copy.into_boxed_slice()
        });
        self.queue.push_back(QueuedSend { wr: *wr, len, inline });
    }

    /// Adds a work request that was posted before the move to shared memory, with the copy of its inline payload.
    pub(super) fn adopt(&mut self, wr: SendWr, inline: Option<Box<[u8]>>) {
        let len = inline.as_ref().map_or_else(|| wr.sges.total_len(), |bytes| bytes.len());
        self.queue.push_back(QueuedSend { wr, len, inline });
    }

    /// Writes a whole Send of at most [`INLINE`] bytes to the ring; `put` writes its payload. Returns false if the ring
    /// is full. The caller has checked [`Outgoing::is_clear`].
    #[inline]
    pub(super) fn message<S: Segment>(&mut self, segment: &S, len: usize, put: impl FnOnce(&S, usize)) -> bool {
        let header = RecordHeader { flags: LAST, ..RecordHeader::new(RecordKind::Send, len as u32) };
        let size = header.size();
        let Some(at) = self.ring.reserve(segment, size) else { return false };
        segment.poke(at, header.emit());
        put(segment, at + WORD);
        self.ring.commit(size);
        true
    }

    /// Counts a work request whose Send was written by [`Outgoing::message`]. Returns its completion if it is done.
    #[inline]
    pub(super) fn message_posted(&mut self, wr: &SendWr) -> Option<Done> {
        let done = Done::of(wr.wr_id, SendClass::Send, wr.flags, 0);
        if self.inflight.is_empty() {
            self.first += 1;
            return Some(done);
        }
        self.inflight.push_back((done, CompletionCondition::InOrder));
        None
    }

    /// Copies a message of the program to the staging buffer, and writes its record to the ring. Returns false if the
    /// message does not fit in both now.
    pub(super) fn message_in_window<S: Segment>(
        &mut self,
        segment: &S,
        lendings: &mut Lendings,
        parts: [&[u8]; 2],
    ) -> bool {
        let len = parts[0].len() + parts[1].len();
        if !self.has_staging_buffer(segment, lendings) || len > STAGING_PIECE {
            return false;
        }
        let header = RecordHeader {
            flags: LAST | IN_WINDOW,
            slot: self.staging.slot,
            ..RecordHeader::new(RecordKind::Send, len as u32)
        };
        let (Some(at), Some((offset, _))) = (self.ring.reserve(segment, header.size()), self.staging.reserve(len))
        else {
            return false;
        };
        let Some(memory) = &self.staging.memory else { return false };
        let mut place = offset;
        for part in parts {
            if !memory.copy_in(place, part) {
                return false;
            }
            place += part.len();
        }
        segment.poke(at, header.emit());
        segment.poke(at + WORD, offset as u64);
        self.ring.commit(header.size());
        self.staging.commit(len, self.ring.pos());
        true
    }

    /// Returns true if the peer has mapped the staging buffer. Makes and announces the buffer at the first call.
    fn has_staging_buffer<S: Segment>(&mut self, segment: &S, lendings: &mut Lendings) -> bool {
        if self.staging.memory.is_some() {
            return lendings.state(self.staging.slot) == LendingState::Mapped;
        }
        let made = Memory::new_shared(STAGING, Sharing::Read).inspect_err(|error| {
            log::debug!(
                "no memory for a staging buffer: {error}; payloads to a peer of this host are sent in small parts"
            );
        });
        if let Ok(mut memory) = made {
            let file = memory.take_file();
            let memory = Arc::new(memory);
            if let Some(slot) = lendings.lend(segment, (&memory, STAGING, file), 0, Access::empty()) {
                self.staging.slot = slot;
                self.staging.memory = Some(memory);
            }
        }
        false
    }

    /// Adds a request of the peer. Returns false if the peer has as many outstanding as it may have.
    pub(super) fn request(&mut self, request: PeerRequest) -> bool {
        let room = self.requests.len() < self.limit;
        if room {
            self.requests.push_back(request);
        }
        room
    }

    /// Adds the reply to an announced window. It replaces an earlier reply for the slot, so there are at most as many
    /// replies as slots.
    pub(super) fn reply(&mut self, slot: u8, word: u64, mapped: bool) {
        self.replies.retain(|reply| reply.0 != slot);
        self.replies.push_back((slot, word, mapped));
    }

    /// Returns the request whose response arrives next.
    pub(super) fn front(&mut self) -> Option<&mut AwaitedAnswer> {
        self.awaited.front_mut()
    }

    /// Removes the request whose response has wholly arrived.
    pub(super) fn end_answered(&mut self) {
        if let Some(awaited) = self.awaited.pop_front() {
            self.answered = awaited.number + 1;
        }
    }

    /// Returns the number of the oldest request that is not answered.
    pub(super) fn oldest_unanswered(&self) -> Option<u64> {
        Some(self.awaited.front()?.number)
    }

    /// Writes a record without payload to the ring. Returns false if the ring is full.
    pub(super) fn put_record<S: Segment>(&mut self, segment: &S, header: RecordHeader, words: &[u64]) -> bool {
        let reserved = if header.kind == RecordKind::Refusal {
            self.ring.reserve_last(segment, header.size())
        } else {
            self.ring.reserve(segment, header.size())
        };
        let Some(at) = reserved else { return false };
        segment.poke(at, header.emit());
        for (nth, &word) in words.iter().enumerate() {
            segment.poke(at + WORD * (1 + nth), word);
        }
        self.ring.commit(header.size());
        true
    }

    /// Loads the peer's position, and completes the work requests that are done.
    pub(super) fn reap<S: Segment>(&mut self, segment: &S, done: &mut impl FnMut(Done)) -> Result<(), InvalidPosition> {
        if self.ring.refresh_tail(segment)? {
            self.staging.consumed(self.ring.tail());
        }
        while let Some(&(front, until)) = self.inflight.front() {
            let waits = match until {
                CompletionCondition::InOrder => false,
                CompletionCondition::Consumed(end) => end > self.ring.tail(),
                CompletionCondition::Answered => self.first >= self.answered,
            };
            if waits {
                break;
            }
            self.inflight.pop_front();
            self.first += 1;
            done(front);
        }
        Ok(())
    }

    /// Writes as many records to the ring as fit, within the budget, and completes the work requests that are done.
    pub(super) fn transmit<S: Segment>(
        &mut self,
        segment: &S,
        cx: &mut TransmitContext<'_>,
        done: &mut impl FnMut(Done),
    ) -> TransmitProgress {
        let mut left = BUDGET;
        loop {
            while let Some(&(slot, word, mapped)) = self.replies.front() {
                if !self.put_record(
                    segment,
                    RecordHeader { slot, ..RecordHeader::new(RecordKind::Mapped, mapped.into()) },
                    &[word],
                ) {
                    break;
                }
                self.replies.pop_front();
            }
            let owes = !self.requests.is_empty();
            let may_go = self.may_go();
            let step = match (may_go, owes) {
                _ if self.fault.is_some() => TransmitStep::Blocked,
                (false, false) => TransmitStep::Blocked,
                (true, false) => self.step(segment, cx),
                (false, true) => self.answer(segment, cx),
                (true, true) => {
                    match if self.answer_next { self.answer(segment, cx) } else { self.step(segment, cx) } {
                        TransmitStep::Blocked if self.answer_next => self.step(segment, cx),
                        TransmitStep::Blocked => self.answer(segment, cx),
                        sent => sent,
                    }
                }
            };
            let before = self.ring.tail();
            if self.reap(segment, done).is_err() {
                self.fault = Some(LinkFault::Violation(Refusal::Malformed));
            }
            match step {
                TransmitStep::Sent(bytes) => left = left.saturating_sub(bytes),
                // The peer has consumed records meanwhile: try again.
                TransmitStep::Blocked if self.ring.tail() != before && self.fault.is_none() => {}
                TransmitStep::Blocked => return TransmitProgress::All,
            }
            if left == 0 {
                return TransmitProgress::More;
            }
        }
    }

    /// Returns true if the next work request may be transmitted now.
    #[inline]
    fn may_go(&self) -> bool {
        let Some(entry) = self.queue.front() else { return false };
        let fenced = entry.wr.flags.contains(SendFlags::FENCE) && self.part == 0 && !self.awaited.is_empty();
        !fenced && (!entry.is_answered() || self.awaited.len() < self.depth || self.depth == 0)
    }

    /// Transmits a part of the first work request of the queue.
    fn step<S: Segment>(&mut self, segment: &S, cx: &mut TransmitContext<'_>) -> TransmitStep {
        let Some(entry) = self.queue.pop_front() else { return TransmitStep::Blocked };
        let step = self.step_with(segment, cx, &entry);
        match step {
            Some(Some(until)) => {
                self.inflight.push_back((entry.done(), until));
                (self.part, self.immediate_next, self.answer_next) = (0, false, true);
                TransmitStep::Sent(entry.len.min(MAX_PIECE))
            }
            Some(None) => {
                let taken = entry.len.min(MAX_PIECE);
                self.queue.push_front(entry);
                TransmitStep::Sent(taken)
            }
            None => {
                self.queue.push_front(entry);
                TransmitStep::Blocked
            }
        }
    }

    /// Transmits a part of a work request. Returns `None` if it is blocked, `Some(None)` if more of it is left, and the
    /// condition for its completion if all of it is in records.
    fn step_with<S: Segment>(
        &mut self,
        segment: &S,
        cx: &mut TransmitContext<'_>,
        entry: &QueuedSend,
    ) -> Option<Option<CompletionCondition>> {
        let remote = match entry.wr.op {
            SendOp::Send
            | SendOp::SendInvalidate(_)
            | SendOp::SendWithImmediate(_)
            | SendOp::Datagram(_)
            | SendOp::DatagramWithImmediate(..) => {
                let (kind, key) = match entry.wr.op {
                    SendOp::SendInvalidate(key) => (RecordKind::SendInvalidate, key.0),
                    _ => (RecordKind::Send, 0),
                };
                let words = [u64::from(key)];
                return self.put_part(segment, cx.lendings, entry, kind, &words[..kind.words()]);
            }
            SendOp::WriteWithImmediate(_, data) if self.immediate_next => {
                let said = self.put_record(
                    segment,
                    RecordHeader::new(RecordKind::Immediate, entry.len as u32),
                    &[data.into()],
                );
                return said.then_some(Some(self.completion_condition(cx.lendings, entry)));
            }
            SendOp::Write(remote) | SendOp::WriteWithImmediate(remote, _) => {
                let until = if let Some(taken) = self.write_through(segment, cx.windows, entry, remote) {
                    self.part += taken;
                    (self.part == entry.len).then_some(CompletionCondition::InOrder)
                } else {
                    let address = remote.address.wrapping_add(self.part as u64);
                    let until =
                        self.put_part(segment, cx.lendings, entry, RecordKind::Write, &[remote.key.0.into(), address])?;
                    self.changes = self.ring.pos();
                    until
                };
                if until.is_some() && matches!(entry.wr.op, SendOp::WriteWithImmediate(..)) {
                    self.immediate_next = true;
                    return Some(None);
                }
                return Some(until);
            }
            SendOp::Read(_) if entry.len == 0 => return Some(Some(CompletionCondition::InOrder)),
            SendOp::Read(remote) | SendOp::CompareSwap { remote, .. } | SendOp::FetchAdd { remote, .. } => remote,
        };
        if self.use_directly(segment, cx.windows, entry, remote) {
            return Some(if self.part == entry.len { Some(CompletionCondition::InOrder) } else { None });
        }
        self.send_request(segment, entry, remote)
    }

    /// Writes one record with a part of a payload to the ring. Returns as [`Outgoing::step_with`] does.
    fn put_part<S: Segment>(
        &mut self,
        segment: &S,
        lendings: &mut Lendings,
        entry: &QueuedSend,
        kind: RecordKind,
        words: &[u64],
    ) -> Option<Option<CompletionCondition>> {
        let (offset, left) = (self.part, entry.len - self.part);
        let source = SendPayload { sges: &entry.wr.sges, inline: entry.inline.as_deref(), offset, left };
        self.part += self.put_payload(segment, lendings, &source, kind, words)?;
        Some((self.part == entry.len).then(|| self.completion_condition(lendings, entry)))
    }

    /// Returns the condition for the completion of a work request whose last record is in the ring. If a part of its
    /// payload is still in the program's memory, the peer must have consumed it.
    fn completion_condition(&self, lendings: &Lendings, entry: &QueuedSend) -> CompletionCondition {
        let lent = match entry.wr.sges.as_slice() {
            [one] if entry.inline.is_none() && entry.len > INLINE => lendings.locate(one).is_some(),
            _ => false,
        };
        if lent { CompletionCondition::Consumed(self.ring.pos()) } else { CompletionCondition::InOrder }
    }

    /// Writes one record with as much of a payload as it can carry. Returns the number of bytes; `None` if the ring or
    /// the staging buffer is full.
    fn put_payload<S: Segment>(
        &mut self,
        segment: &S,
        lendings: &mut Lendings,
        source: &SendPayload<'_>,
        kind: RecordKind,
        words: &[u64],
    ) -> Option<usize> {
        let SendPayload { sges, inline, offset, left } = *source;
        let mut header = RecordHeader::new(kind, left as u32);
        let small = left <= INLINE;
        let lent = match (sges.as_slice(), inline) {
            ([entry], None) if !small => lendings.locate(&entry.part(offset, left)),
            _ => None,
        };
        let mut place = None;
        let copies = lent.is_none() && !small && self.has_staging_buffer(segment, lendings);
        let taken = if let Some((slot, at)) = lent {
            (header.slot, place) = (slot, Some(at));
            left.min(MAX_PIECE)
        } else if copies {
            // If the ring is full, this reservation is not committed.
            let (at, taken) = self.staging.reserve(left)?;
            (header.slot, place) = (self.staging.slot, Some(at as u64));
            taken
        } else {
            left.min(INLINE)
        };
        header.len = taken as u32;
        header.flags = if taken == left { LAST } else { 0 } | if place.is_some() { IN_WINDOW } else { 0 };
        let at = self.ring.reserve(segment, header.size())?;
        segment.poke(at, header.emit());
        for (nth, &word) in words.iter().enumerate() {
            segment.poke(at + WORD * (1 + nth), word);
        }
        let body = at + header.body();
        if let Some(place) = place {
            segment.poke(body, place);
        }
        if lent.is_none() {
            let staging = self.staging.memory.as_deref().filter(|_| copies);
            let mut done = 0;
            let mut put = |payload: &SegmentPayload<'_>| {
                match (staging, place) {
                    (Some(memory), Some(place)) => {
                        if let Some(room) = memory.span(place as usize + done, payload.len()) {
                            payload.copy_into(room);
                        }
                    }
                    _ => segment.put(body + done, payload),
                }
                done += payload.len();
            };
            match inline {
                Some(bytes) => put(&SegmentPayload::Bytes(bytes.get(offset..offset + taken).unwrap_or_default())),
                None => sges.visit(offset, taken, |part| put(&SegmentPayload::Entry(&part))),
            }
        }
        self.ring.commit(header.size());
        if copies {
            self.staging.commit(taken, self.ring.pos());
        }
        Some(taken)
    }

    /// Returns true if all records that change memory of the peer have taken effect, so that this side may use that
    /// memory itself. A write has taken effect once it is consumed; an atomic operation may have to wait until its
    /// response fits in the peer's ring.
    fn is_in_order(&self) -> bool {
        self.changes <= self.ring.tail() && !self.awaited.iter().any(|awaited| awaited.atomic)
    }

    /// Writes a part of a payload directly to memory of the peer that this side has mapped. Returns the number of
    /// bytes; `None` if that is not possible.
    fn write_through<S: Segment>(
        &self,
        segment: &S,
        windows: &Windows,
        entry: &QueuedSend,
        remote: RemoteAddress,
    ) -> Option<usize> {
        if entry.len == 0 || !self.is_in_order() {
            return None;
        }
        let address = remote.address.checked_add(self.part as u64)?;
        let left = (entry.len - self.part).min(MAX_PIECE);
        let (window, offset) = windows.region(segment, remote.key.0, address, left, Access::REMOTE_WRITE)?;
        let sink = window.sink(offset, left)?;
        let mut done = 0;
        match entry.inline.as_deref() {
            Some(bytes) => sink.fill(bytes.get(self.part..self.part + left)?),
            None => entry.wr.sges.visit(self.part, left, |part| {
                sink.part(done, part.len()).fill_from_entry(&part);
                done += part.len();
            }),
        }
        Some(left)
    }

    /// Executes a read, a part of one, or an atomic operation directly on memory of the peer that this side has mapped.
    /// Returns false if that is not possible.
    fn use_directly<S: Segment>(
        &mut self,
        segment: &S,
        windows: &Windows,
        entry: &QueuedSend,
        remote: RemoteAddress,
    ) -> bool {
        if !self.is_in_order() {
            return false;
        }
        let sink = entry.wr.sges.as_slice().first().copied().unwrap_or_default();
        let (need, len) = match entry.wr.op {
            SendOp::Read(_) => (Access::REMOTE_READ, (entry.len - self.part).min(MAX_PIECE)),
            _ => (Access::REMOTE_ATOMIC, ATOMIC),
        };
        let Some(address) = remote.address.checked_add(self.part as u64) else { return false };
        let Some((window, offset)) = windows.region(segment, remote.key.0, address, len, need) else { return false };
        let old = match entry.wr.op {
            SendOp::CompareSwap { expected, swap, .. } => {
                window.sink(offset, len).and_then(|word| word.update(|old| if old == expected { swap } else { old }))
            }
            SendOp::FetchAdd { add, .. } => {
                window.sink(offset, len).and_then(|word| word.update(|old| old.wrapping_add(add)))
            }
            _ => {
                let Some(source) = window.source(offset, len) else { return false };
                sink.part(self.part, len).fill_from(source);
                self.part += len;
                return true;
            }
        };
        let Some(old) = old else { return false };
        sink.fill(&old.to_ne_bytes());
        self.part = entry.len;
        true
    }

    /// Writes a request to the ring. Returns as [`Outgoing::step_with`] does.
    fn send_request<S: Segment>(
        &mut self,
        segment: &S,
        entry: &QueuedSend,
        remote: RemoteAddress,
    ) -> Option<Option<CompletionCondition>> {
        if self.depth == 0 {
            self.fault = Some(LinkFault::WorkRequest(WcStatus::LocalQpOperationError));
            return None;
        }
        let key = u64::from(remote.key.0);
        // A part of the data may have been read directly before.
        let address = remote.address.wrapping_add(self.part as u64);
        let (kind, words) = match entry.wr.op {
            SendOp::CompareSwap { expected, swap, .. } => (RecordKind::CompareSwap, [key, address, expected, swap]),
            SendOp::FetchAdd { add, .. } => (RecordKind::FetchAdd, [key, address, add, 0]),
            _ => (RecordKind::Read, [key, address, 0, 0]),
        };
        let (len, atomic) = if kind == RecordKind::Read { (entry.len - self.part, false) } else { (ATOMIC, true) };
        if !self.put_record(segment, RecordHeader::new(kind, len as u32), &words[..kind.words()]) {
            return None;
        }
        let sink = entry.wr.sges.as_slice().first().copied().unwrap_or_default().part(self.part, len);
        let number = self.first + self.inflight.len() as u64;
        self.awaited.push_back(AwaitedAnswer { sink, len, done: 0, atomic, number });
        Some(Some(CompletionCondition::Answered))
    }

    /// Transmits a part of the response to the peer's oldest request. The memory is looked up again for each part,
    /// because its region may have been deregistered meanwhile.
    fn answer<S: Segment>(&mut self, segment: &S, cx: &mut TransmitContext<'_>) -> TransmitStep {
        let Some(&request) = self.requests.front() else { return TransmitStep::Blocked };
        let result = match request {
            PeerRequest::Read { key, address, len, done } => self.answer_read(segment, cx, (key, address, len, done)),
            PeerRequest::CompareSwap { key, address, expected, swap } => {
                self.answer_atomic(segment, cx, (key, address), |old| if old == expected { swap } else { old })
            }
            PeerRequest::FetchAdd { key, address, add } => {
                self.answer_atomic(segment, cx, (key, address), |old| old.wrapping_add(add))
            }
        };
        match result {
            Ok(Some(taken)) => TransmitStep::Sent(taken),
            Ok(None) => TransmitStep::Blocked,
            Err(miss) => {
                self.fault = Some(LinkFault::Violation(Refusal::Request(miss)));
                TransmitStep::Blocked
            }
        }
    }

    fn answer_read<S: Segment>(
        &mut self,
        segment: &S,
        cx: &mut TransmitContext<'_>,
        (key, address, len, done): (u32, u64, usize, usize),
    ) -> Result<Option<usize>, Miss> {
        let left = len - done;
        let most = if left <= INLINE {
            left
        } else if self.has_staging_buffer(segment, cx.lendings) {
            left.min(STAGING_PIECE)
        } else {
            INLINE
        };
        let from = address.checked_add(done as u64).ok_or(Miss::Wrap)?;
        let span = cx.keys.remote(cx.scope, key, from, most, Access::REMOTE_READ)?;
        cx.direct = cx.keys.is_direct(key).then_some(key).or(cx.direct);
        let mut header = RecordHeader::new(RecordKind::Data, most as u32);
        header.flags = if most == left { LAST } else { 0 };
        let place = if most > INLINE {
            let Some((at, _)) = self.staging.reserve(most) else { return Ok(None) };
            (header.slot, header.flags) = (self.staging.slot, header.flags | IN_WINDOW);
            Some(at)
        } else {
            None
        };
        let Some(at) = self.ring.reserve(segment, header.size()) else { return Ok(None) };
        segment.poke(at, header.emit());
        match (place, &self.staging.memory) {
            (Some(place), Some(memory)) => {
                segment.poke(at + WORD, place as u64);
                if let Some(room) = memory.span(place, most) {
                    room.fill_from(span);
                }
            }
            _ => segment.put(at + WORD, &SegmentPayload::Span(span)),
        }
        self.ring.commit(header.size());
        if place.is_some() {
            self.staging.commit(most, self.ring.pos());
        }
        if most == left {
            self.requests.pop_front();
            self.answer_next = false;
        } else if let Some(PeerRequest::Read { done, .. }) = self.requests.front_mut() {
            *done += most;
        }
        Ok(Some(most))
    }

    fn answer_atomic<S: Segment>(
        &mut self,
        segment: &S,
        cx: &mut TransmitContext<'_>,
        (key, address): (u32, u64),
        update: impl FnMut(u64) -> u64,
    ) -> Result<Option<usize>, Miss> {
        let header = RecordHeader::new(RecordKind::Value, ATOMIC as u32);
        let span = cx.keys.remote(cx.scope, key, address, ATOMIC, Access::REMOTE_ATOMIC)?;
        cx.direct = cx.keys.is_direct(key).then_some(key).or(cx.direct);
        let Some(at) = self.ring.reserve(segment, header.size()) else { return Ok(None) };
        let old = span.update(update).ok_or(Miss::Misaligned)?;
        segment.poke(at, header.emit());
        segment.poke(at + WORD, old);
        self.ring.commit(header.size());
        self.requests.pop_front();
        self.answer_next = false;
        Ok(Some(ATOMIC))
    }

    /// Flushes all work requests. One of them completes with the status in `failed`: the one with the number there, or,
    /// without a number, the first that is not in records.
    pub(super) fn flush(&mut self, failed: Option<(Option<u64>, WcStatus)>, done: &mut impl FnMut(Done)) {
        let unsent = self.first + self.inflight.len() as u64;
        let inflight = self.inflight.drain(..).map(|(done, _)| done);
        let queued = self.queue.drain(..).map(|entry| entry.done());
        for flushed in inflight.chain(queued) {
            let status = match failed {
                Some((at, status)) if at.unwrap_or(unsent) == self.first => status,
                _ => WcStatus::Flushed,
            };
            done(Done { status, signaled: true, ..flushed });
            self.first += 1;
        }
        self.requests.clear();
        self.awaited.clear();
        (self.part, self.immediate_next) = (0, false);
    }
}

/// The state that the outgoing direction uses besides its own.
#[derive(Debug)]
pub(super) struct TransmitContext<'a> {
    pub(super) scope: Key,
    pub(super) keys: &'a KeyTable,
    pub(super) lendings: &'a mut Lendings,
    pub(super) windows: &'a Windows,
    /// The key of a direct region that the peer has used, so that it may be lent to the peer.
    pub(super) direct: Option<u32>,
}
