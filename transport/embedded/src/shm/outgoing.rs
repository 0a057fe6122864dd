//! The outgoing direction of a queue pair. This direction turns work requests, and the responses to the peer's
//! requests, into records.
//!
//! The order of the work requests is that of [`SendQueue`]. Records carry a payload in one of three
//! ways:
//!
//! - A small payload is part of its record. The work request is done once the record is written.
//! - A large payload in memory that the peer has mapped is not copied. The work request is done once the peer has
//!   consumed the record.
//! - Any other payload is copied in parts to the *staging buffer*, which the peer has mapped, too. The work request is
//!   done once the last part is copied. Until the peer has mapped the buffer, each part is small and part of its record.
//!
//! Writes, reads and atomic operations on a region that the local side has mapped need no record: the local side accesses
//! the region directly.

use std::collections::VecDeque;
use std::sync::Arc;

use super::account::STAGING;
use super::fault::{LinkFault, Refusal};
use super::record::{IN_WINDOW, LAST, RecordHeader, RecordKind, WORD};
use super::ring::{InvalidPosition, Producer};
use super::segment::{EntryPayload, Segment, SegmentPayload};
use super::windows::{LendingState, Lendings, Windows};
use crate::entries::ENTRIES;
use crate::soft::completions::{ATOMIC_LEN, Done};
use crate::soft::keys::{KeyTable, Miss};
use crate::soft::responses::{PendingResponse, PendingResponses};
use crate::soft::send_queue::{CompletionPosition, QueuedSend, SendQueue};
use rdma_transport::cm::ReadDepth;
use rdma_transport::mem::{Memory, Sharing, Span};
use rdma_transport::mr::Access;
use rdma_transport::slab::Key;
use rdma_transport::wc::WcStatus;
use rdma_transport::wr::{RemoteAddress, SendClass, SendOp, SendWr};

/// The length in bytes of the longest payload that is part of its record. (Inline sends of a program have a separate
/// limit.)
pub(super) const INLINE: usize = 1 << 10;
/// The length in bytes of the longest payload in a window that one record can refer to.
pub(super) const MAX_PIECE: usize = 1 << 20;
/// The length in bytes of the longest payload in the staging buffer that one record can refer to.
const STAGING_PIECE: usize = STAGING / 4;
/// The alignment in bytes of the parts in the staging buffer.
const ALIGN: usize = 64;
/// The number of bytes after which one connection stops transmitting, so that other connections are served.
const BUDGET: usize = 4 << 20;
const ATOMIC: usize = ATOMIC_LEN as usize;

/// The position of a work request that is done when all earlier work requests are done.
const IN_ORDER: CompletionPosition = (0, false);

/// A read or an atomic operation of the peer.
#[derive(Clone, Copy, Debug)]
pub(super) enum PeerRequest {
    Read { key: u32, address: u64, len: usize },
    CompareSwap { key: u32, address: u64, expected: u64, swap: u64 },
    FetchAdd { key: u32, address: u64, add: u64 },
}

/// The reason why [`Outgoing::transmit`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransmitProgress {
    /// All records that can be written now are written: none is left, or the next one must wait until the peer consumes
    /// records or responds, or a fault was found.
    All,
    /// The budget is used up. More records can possibly be written.
    More,
}

/// The result of one transmission step: of writing one record, or of one direct access to a region of the peer.
enum TransmitStep {
    /// The step is done. This number of bytes is subtracted from the budget.
    Sent(usize),
    /// The step must wait until the peer consumes records, or responds; or a fault was found.
    Blocked,
}

/// The staging buffer: memory that is lent to the peer, and to which payloads are copied once the peer has mapped the
/// memory. The buffer is used as a ring.
#[derive(Debug)]
struct StagingBuffer {
    memory: Option<Arc<Memory>>,
    slot: u8,
    pos: u64,
    tail: u64,
    /// The parts in the buffer, oldest first. The first number is the position in the ring at which
    /// the part's record ends. The second number is the position in the staging buffer at which the
    /// part ends. When the peer has released the ring up to the first number, the buffer is free up
    /// to the second number.
    parts: VecDeque<(u64, u64)>, // bound: staging
}

impl StagingBuffer {
    /// Reserves contiguous bytes for a payload of `len` bytes, or for the first `STAGING_PIECE` bytes of a longer
    /// payload. Returns the offset of the reserved bytes in the buffer, and the number of reserved bytes. Returns
    /// `None` if the buffer is full.
    fn reserve(&mut self, len: usize) -> Option<(usize, usize)> {
        let len = len.min(STAGING_PIECE);
        if self.parts.is_empty() {
            // An empty buffer is used from its start again, because the pages at the start are in the cache.
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
    /// The positions in this queue are positions in the ring. A work request completes only after
    /// the peer has released all records in front of its position.
    pub(super) sends: SendQueue,
    pub(super) responses: PendingResponses<PeerRequest>,
    /// True if the first work request in the queue is a write that has put at least one record into
    /// the ring. The last part of such a write is also sent in a record, because the peer must
    /// learn that the write is complete, and does not notice a direct access.
    recorded: bool,
    staging: StagingBuffer,
    /// The position behind the newest record of kind `Write`. If the peer has not yet released the
    /// records in front of this position, a write may not have taken effect.
    changes: u64,
    /// The unsent replies to the peer's announcements of memory. Each reply has the table slot and
    /// the word of the announcement, and is true if the local side has mapped the memory.
    replies: VecDeque<(u8, u64, bool)>, // bound: lendings
    pub(super) fault: Option<LinkFault>,
}

impl Outgoing {
    pub(super) fn new(half: usize, mut sends: SendQueue, depths: ReadDepth) -> Self {
        sends.establish(depths.initiator_depth);
        Self {
            ring: Producer::new(half),
            sends,
            responses: PendingResponses::new(depths.responder_resources),
            recorded: false,
            staging: StagingBuffer { memory: None, slot: 0, pos: 0, tail: 0, parts: VecDeque::new() },
            changes: 0,
            replies: VecDeque::new(),
            fault: None,
        }
    }

    /// Returns true if a work request, a response or a reply is unfinished. In that case, the peer must wake the local
    /// side when the peer releases records.
    #[inline]
    pub(super) fn wants_room(&self) -> bool {
        self.sends.len() > 0 || !self.responses.is_idle() || !self.replies.is_empty()
    }

    /// Returns true if a new message can be written to the ring directly: no posted work request waits to be written,
    /// and no fault was found.
    #[inline]
    pub(super) fn is_clear(&self) -> bool {
        self.sends.is_sent() && self.fault.is_none()
    }

    /// Writes the record of a whole Send to the ring. `put` writes the payload. The payload has
    /// `len` bytes, at most [`INLINE`]. If the ring seems full, loads the peer's position and tries
    /// once more. Returns false if the ring is full. The caller has checked [`Outgoing::is_clear`].
    #[inline]
    pub(super) fn message<S: Segment>(&mut self, segment: &S, len: usize, put: impl FnOnce(&S, usize)) -> bool {
        let header = RecordHeader { flags: LAST, ..RecordHeader::new(RecordKind::Send, len as u32) };
        let size = header.size();
        let mut at = self.ring.reserve(segment, size);
        if at.is_none() && self.load_tail(segment) == Ok(true) {
            at = self.ring.reserve(segment, size);
        }
        let Some(at) = at else { return false };
        segment.poke(at, header.emit());
        put(segment, at + WORD);
        self.ring.commit(size);
        true
    }

    /// Reserves a record in the ring, and `len` bytes in the staging buffer. Returns their offsets.
    fn reserve_both<S: Segment>(&mut self, segment: &S, record: usize, len: usize) -> Option<(usize, usize)> {
        Some((self.ring.reserve(segment, record)?, self.staging.reserve(len)?.0))
    }

    /// Loads the position up to which the peer has released records. Returns true if the position
    /// has changed. Completes no work requests: [`Outgoing::reap`] must be called later.
    fn load_tail<S: Segment>(&mut self, segment: &S) -> Result<bool, InvalidPosition> {
        let changed = self.ring.refresh_tail(segment)?;
        if changed {
            self.staging.consumed(self.ring.tail);
        }
        Ok(changed)
    }

    /// Records that the Send of this work request was written by [`Outgoing::message`]. Returns the completion of the
    /// work request, or `None` if earlier work requests must complete first.
    #[inline]
    pub(super) fn message_posted(&mut self, wr: &SendWr) -> Option<Done> {
        let done = Done::of(wr.wr_id, SendClass::Send, wr.flags, 0);
        if self.sends.post_done() {
            return Some(done);
        }
        self.sends.post_sent(done, IN_ORDER);
        None
    }

    /// Copies the message, which consists of `parts`, to the staging buffer, and writes the record
    /// of the message to the ring. Returns false, and writes no record, in these cases:
    ///
    /// - The message is longer than `STAGING_PIECE`.
    /// - The staging buffer or the ring is full.
    /// - The peer has not mapped the staging buffer.
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
        let mut room = self.reserve_both(segment, header.size(), len);
        if room.is_none() && self.load_tail(segment) == Ok(true) {
            room = self.reserve_both(segment, header.size(), len);
        }
        let Some((at, offset)) = room else { return false };
        let Some(memory) = &self.staging.memory else { return false };
        let mut position = offset;
        for part in parts {
            if !memory.copy_in(position, part) {
                return false;
            }
            position += part.len();
        }
        segment.poke(at, header.emit());
        segment.poke(at + WORD, offset as u64);
        self.ring.commit(header.size());
        self.staging.commit(len, self.ring.pos);
        true
    }

    /// Returns true if the peer has mapped the staging buffer. If there is no buffer yet, creates the buffer, lends it to
    /// the peer and returns false.
    fn has_staging_buffer<S: Segment>(&mut self, segment: &S, lendings: &mut Lendings) -> bool {
        if self.staging.memory.is_some() {
            return lendings.state(self.staging.slot) == LendingState::Mapped;
        }
        let made = Memory::new_shared(STAGING, Sharing::Lent).inspect_err(|error| {
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

    /// Drops the staging buffer if the peer has consumed all its parts.
    pub(super) fn drop_read<S: Segment>(&mut self, segment: &S) {
        let _ = self.load_tail(segment);
        if self.staging.parts.is_empty() {
            self.staging.memory = None;
        }
    }

    /// Returns the length of the staging buffer, in bytes: 0 if there is none.
    pub(super) fn staging_len(&self) -> usize {
        self.staging.memory.as_ref().map_or(0, |memory| memory.len())
    }

    /// Keeps the pages of the staging buffer when the buffer is dropped.
    pub(super) fn keep_pages(&self) {
        self.staging.memory.iter().for_each(|memory| memory.keep_pages());
    }

    /// Adds the reply to an announcement. Removes an earlier reply for the same slot, so that there is at most one
    /// reply per slot.
    pub(super) fn reply(&mut self, slot: u8, word: u64, mapped: bool) {
        self.replies.retain(|reply| reply.0 != slot);
        self.replies.push_back((slot, word, mapped));
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

    /// Loads the position up to which the peer has released records, and completes the work requests that are done.
    /// Returns an error if the position is invalid.
    pub(super) fn reap<S: Segment>(&mut self, segment: &S, done: &mut impl FnMut(Done)) -> Result<(), InvalidPosition> {
        self.load_tail(segment)?;
        self.sends.reap(self.ring.tail, done);
        Ok(())
    }

    /// Writes as many records to the ring as fit, until the budget is used up. Completes the work requests that are
    /// done.
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
            let goes_next = self.responses.goes_next;
            let step = match (self.sends.may_go(), !self.responses.is_idle()) {
                _ if self.fault.is_some() => TransmitStep::Blocked,
                (false, false) => TransmitStep::Blocked,
                (true, false) => self.step(segment, cx),
                (false, true) => self.answer(segment, cx),
                (true, true) => match if goes_next { self.answer(segment, cx) } else { self.step(segment, cx) } {
                    TransmitStep::Blocked if goes_next => self.step(segment, cx),
                    TransmitStep::Blocked => self.answer(segment, cx),
                    sent => sent,
                },
            };
            let before = self.ring.tail;
            if self.reap(segment, done).is_err() {
                self.fault = Some(LinkFault::Violation(Refusal::Malformed));
            }
            match step {
                TransmitStep::Sent(bytes) => left = left.saturating_sub(bytes),
                // The peer has released records since the attempt to write the record. So the loop tries again.
                TransmitStep::Blocked if self.ring.tail != before && self.fault.is_none() => {}
                TransmitStep::Blocked => return TransmitProgress::All,
            }
            if left == 0 {
                return TransmitProgress::More;
            }
        }
    }

    /// Executes one step of the first work request in the queue: writes one record, or accesses a region of the peer
    /// directly.
    fn step<S: Segment>(&mut self, segment: &S, cx: &mut TransmitContext<'_>) -> TransmitStep {
        let Some(&entry) = self.sends.front() else { return TransmitStep::Blocked };
        let Some((taken, position)) = self.step_with(segment, cx, &entry) else { return TransmitStep::Blocked };
        if self.sends.advance(taken, position) {
            (self.recorded, self.responses.goes_next) = (false, true);
        }
        TransmitStep::Sent(entry.len.min(MAX_PIECE))
    }

    /// Executes one step of a work request for [`Outgoing::step`]. Returns the number of
    /// transmitted bytes of the payload, and a completion position. The position counts only if
    /// this was the last step of the work request. Returns `None` if the step must wait or a fault
    /// was found.
    fn step_with<S: Segment>(
        &mut self,
        segment: &S,
        cx: &mut TransmitContext<'_>,
        entry: &QueuedSend,
    ) -> Option<(usize, CompletionPosition)> {
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
                return self.put_payload(segment, cx.lendings, entry, kind, &words[..kind.words()]);
            }
            SendOp::WriteWithImmediate(_, data) if self.sends.is_immediate_next() => {
                let header = RecordHeader::new(RecordKind::Immediate, entry.len as u32);
                let said = self.put_record(segment, header, &[data.into()]);
                return said.then(|| (0, self.completion_position(cx.lendings, entry)));
            }
            SendOp::Write(remote) | SendOp::WriteWithImmediate(remote, _) => {
                if let Some(taken) = self.write_through(segment, cx.windows, entry, remote) {
                    return Some((taken, IN_ORDER));
                }
                let words = [remote.key.0.into(), remote.address.wrapping_add(self.sends.part() as u64)];
                let step = self.put_payload(segment, cx.lendings, entry, RecordKind::Write, &words)?;
                (self.changes, self.recorded) = (self.ring.pos, true);
                return Some(step);
            }
            SendOp::Read(_) if entry.len == 0 => return Some((0, IN_ORDER)),
            SendOp::Read(remote) | SendOp::CompareSwap { remote, .. } | SendOp::FetchAdd { remote, .. } => remote,
        };
        match self.use_directly(segment, cx.windows, entry, remote) {
            Some(taken) => Some((taken, IN_ORDER)),
            None => self.send_request(segment, entry, remote),
        }
    }

    /// Returns the completion position of a work request. Called after its last record was written.
    /// A payload that was not copied is still in the program's memory. In that case, the peer must
    /// release the last record before the work request is done.
    fn completion_position(&self, lendings: &Lendings, entry: &QueuedSend) -> CompletionPosition {
        let lent = match entry.wr.sges.as_slice() {
            [one] if self.sends.inline().is_none() && entry.len > INLINE => lendings.locate(one).is_some(),
            _ => false,
        };
        if lent { (self.ring.pos, false) } else { IN_ORDER }
    }

    /// Writes one record with as many bytes of a payload as a record can hold. Returns the same
    /// values as [`Outgoing::step_with`]: `None` if the ring or the staging buffer is full.
    fn put_payload<S: Segment>(
        &mut self,
        segment: &S,
        lendings: &mut Lendings,
        entry: &QueuedSend,
        kind: RecordKind,
        words: &[u64],
    ) -> Option<(usize, CompletionPosition)> {
        let sges = &entry.wr.sges;
        let (offset, left) = (self.sends.part(), entry.len - self.sends.part());
        let mut header = RecordHeader::new(kind, left as u32);
        let small = left <= INLINE;
        let lent = match (sges.as_slice(), self.sends.inline()) {
            // Also the last part if it is small: the work request waits for the release of its
            // record, and the peer releases a record in a window without delay.
            ([sge], None) if entry.len > INLINE => lendings.locate(&sge.part(offset, left)),
            _ => None,
        };
        let mut window_offset = None;
        let copies = lent.is_none() && !small && self.has_staging_buffer(segment, lendings);
        let taken = if let Some((slot, at)) = lent {
            (header.slot, window_offset) = (slot, Some(at));
            left.min(MAX_PIECE)
        } else if copies {
            // If `ring.reserve` fails below, this reservation is not committed and has no effect.
            let (at, taken) = self.staging.reserve(left)?;
            (header.slot, window_offset) = (self.staging.slot, Some(at as u64));
            taken
        } else {
            left.min(INLINE)
        };
        header.len = taken as u32;
        header.flags = if taken == left { LAST } else { 0 } | if window_offset.is_some() { IN_WINDOW } else { 0 };
        let at = self.ring.reserve(segment, header.size())?;
        segment.poke(at, header.emit());
        for (nth, &word) in words.iter().enumerate() {
            segment.poke(at + WORD * (1 + nth), word);
        }
        let body = at + header.body();
        if let Some(window_offset) = window_offset {
            segment.poke(body, window_offset);
        }
        if lent.is_none() {
            let staging = self.staging.memory.as_deref().filter(|_| copies);
            let mut done = 0;
            let mut put = |payload: &SegmentPayload<'_>| {
                match (staging, window_offset) {
                    (Some(memory), Some(window_offset)) => {
                        if let Some(room) = memory.span(window_offset as usize + done, payload.len()) {
                            payload.copy_into(room);
                        }
                    }
                    _ => segment.put(body + done, payload),
                }
                done += payload.len();
            };
            match self.sends.inline() {
                Some(bytes) => put(&SegmentPayload::Bytes(bytes.get(offset..offset + taken).unwrap_or_default())),
                None => sges.visit(offset, taken, |part| put(&SegmentPayload::Entry(EntryPayload(&part)))),
            }
        }
        self.ring.commit(header.size());
        if copies {
            self.staging.commit(taken, self.ring.pos);
        }
        let position = if taken == left { self.completion_position(lendings, entry) } else { IN_ORDER };
        Some((taken, position))
    }

    /// Returns true if all records that change memory of the peer have taken effect. Only then may the local side
    /// access that memory directly. Otherwise the direct accesses of the local side would overtake the records. A write
    /// takes effect when the peer consumes its record. An atomic operation takes effect when the peer writes the
    /// response, which may have to wait for room in the peer's ring.
    fn is_in_order(&self) -> bool {
        self.changes <= self.ring.tail && !self.sends.outstanding.has_atomic()
    }

    /// Writes a part of a payload directly to a region of the peer that the local side has mapped.
    /// Returns the number of written bytes. Returns `None`, and writes nothing, in these cases:
    ///
    /// - The payload is empty.
    /// - No window with the right to write contains the destination.
    /// - Earlier records must take effect first.
    /// - This is the last part, and an earlier part of the same write was sent in a record.
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
        let part = self.sends.part();
        let address = remote.address.checked_add(part as u64)?;
        let left = (entry.len - part).min(MAX_PIECE);
        if self.recorded && part + left == entry.len {
            return None;
        }
        let (window, _, offset) = windows.region(segment, remote.key.0, address, left, Access::REMOTE_WRITE)?;
        let sink = window.sink(offset, left)?;
        let mut done = 0;
        match self.sends.inline() {
            Some(bytes) => sink.fill(bytes.get(part..part + left)?),
            None => entry.wr.sges.visit(part, left, |part| {
                ENTRIES.copy_to_span(&part, sink.part(done, part.len()));
                done += part.len();
            }),
        }
        Some(left)
    }

    /// Executes a part of a read, or a whole atomic operation, directly on a region of the peer
    /// that the local side has mapped. Returns the number of read bytes, or the length of the
    /// atomic operation. Returns `None`, and does nothing, if no window with the necessary right
    /// contains the bytes, if earlier records must take effect first, or if the address of an
    /// atomic operation is not a multiple of 8. Also returns `None` if the peer has ended the
    /// lending of the window during a read.
    fn use_directly<S: Segment>(
        &self,
        segment: &S,
        windows: &Windows,
        entry: &QueuedSend,
        remote: RemoteAddress,
    ) -> Option<usize> {
        if !self.is_in_order() {
            return None;
        }
        let sink = entry.wr.sges.as_slice().first().copied().unwrap_or_default();
        let part = self.sends.part();
        let address = remote.address.checked_add(part as u64)?;
        if matches!(entry.wr.op, SendOp::Read(_)) {
            let sink = sink.part(part, (entry.len - part).min(MAX_PIECE));
            // If the lending has ended, the peer may have written the bytes during the copy. In
            // that case, the caller sends a request, which reads the bytes again or fails.
            return windows.fetch(segment, remote.key.0, address, &sink).then_some(sink.len());
        }
        let region = windows.region(segment, remote.key.0, address, ATOMIC, Access::REMOTE_ATOMIC);
        let word = region.and_then(|(window, _, offset)| window.sink(offset, ATOMIC))?;
        let old = match entry.wr.op {
            SendOp::CompareSwap { expected, swap, .. } => word.compare_swap(expected, swap),
            SendOp::FetchAdd { add, .. } => word.fetch_add(add),
            _ => None,
        };
        ENTRIES.fill(&sink, &old?.to_ne_bytes());
        Some(entry.len)
    }

    /// Writes the request for a read or an atomic operation to the ring. Returns the same values as
    /// [`Outgoing::step_with`].
    fn send_request<S: Segment>(
        &mut self,
        segment: &S,
        entry: &QueuedSend,
        remote: RemoteAddress,
    ) -> Option<(usize, CompletionPosition)> {
        if self.sends.outstanding.depth() == 0 {
            self.fault = Some(LinkFault::WorkRequest(WcStatus::LocalQpOperationError));
            return None;
        }
        let key = u64::from(remote.key.0);
        // The first `part` bytes may already have been read directly.
        let part = self.sends.part();
        let address = remote.address.wrapping_add(part as u64);
        let (kind, words) = match entry.wr.op {
            SendOp::CompareSwap { expected, swap, .. } => (RecordKind::CompareSwap, [key, address, expected, swap]),
            SendOp::FetchAdd { add, .. } => (RecordKind::FetchAdd, [key, address, add, 0]),
            _ => (RecordKind::Read, [key, address, 0, 0]),
        };
        let (len, atomic) = if kind == RecordKind::Read { (entry.len - part, false) } else { (ATOMIC, true) };
        if !self.put_record(segment, RecordHeader::new(kind, len as u32), &words[..kind.words()]) {
            return None;
        }
        let sink = entry.wr.sges.as_slice().first().copied().unwrap_or_default().part(part, len);
        self.sends.request(sink, len as u32, atomic);
        Some((len, (0, true)))
    }

    /// Writes one record of the response to the peer's oldest request. The region is looked up again for each record,
    /// because the program may have deregistered the region since the previous record.
    fn answer<S: Segment>(&mut self, segment: &S, cx: &mut TransmitContext<'_>) -> TransmitStep {
        let Some(&PendingResponse { request, done }) = self.responses.front() else { return TransmitStep::Blocked };
        let result = match request {
            PeerRequest::Read { key, address, len } => {
                self.answer_read(segment, cx, (key, address, len, done as usize))
            }
            PeerRequest::CompareSwap { key, address, expected, swap } => {
                self.answer_atomic(segment, cx, (key, address), |word| word.compare_swap(expected, swap))
            }
            PeerRequest::FetchAdd { key, address, add } => {
                self.answer_atomic(segment, cx, (key, address), |word| word.fetch_add(add))
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
        let offset = if most > INLINE {
            let Some((at, _)) = self.staging.reserve(most) else { return Ok(None) };
            (header.slot, header.flags) = (self.staging.slot, header.flags | IN_WINDOW);
            Some(at)
        } else {
            None
        };
        let Some(at) = self.ring.reserve(segment, header.size()) else { return Ok(None) };
        segment.poke(at, header.emit());
        match (offset, &self.staging.memory) {
            (Some(offset), Some(memory)) => {
                segment.poke(at + WORD, offset as u64);
                if let Some(room) = memory.span(offset, most) {
                    room.fill_from(span);
                }
            }
            _ => segment.put(at + WORD, &SegmentPayload::Span(span)),
        }
        self.ring.commit(header.size());
        if offset.is_some() {
            self.staging.commit(most, self.ring.pos);
        }
        self.responses.advance(most, most == left);
        Ok(Some(most))
    }

    fn answer_atomic<S: Segment>(
        &mut self,
        segment: &S,
        cx: &mut TransmitContext<'_>,
        (key, address): (u32, u64),
        execute: impl FnOnce(Span<'_>) -> Option<u64>,
    ) -> Result<Option<usize>, Miss> {
        let header = RecordHeader::new(RecordKind::Value, ATOMIC as u32);
        let span = cx.keys.remote(cx.scope, key, address, ATOMIC, Access::REMOTE_ATOMIC)?;
        cx.direct = cx.keys.is_direct(key).then_some(key).or(cx.direct);
        let Some(at) = self.ring.reserve(segment, header.size()) else { return Ok(None) };
        let old = execute(span).ok_or(Miss::Misaligned)?;
        segment.poke(at, header.emit());
        segment.poke(at + WORD, old);
        self.ring.commit(header.size());
        self.responses.advance(0, true);
        Ok(Some(ATOMIC))
    }
}

/// The state outside [`Outgoing`] that is needed to transmit.
#[derive(Debug)]
pub(super) struct TransmitContext<'a> {
    pub(super) scope: Key,
    pub(super) keys: &'a KeyTable,
    pub(super) lendings: &'a mut Lendings,
    pub(super) windows: &'a Windows,
    /// Output: the key of a region that the peer may map (`Access::DIRECT`), but has accessed with a request. After
    /// [`Outgoing::transmit`] has returned, the caller lends the region to the peer.
    pub(super) direct: Option<u32>,
}

#[cfg(all(test, not(loom_model)))]
mod tests {
    use super::*;
    use crate::shm::account::account;
    use crate::shm::packet::ReceivedAnnouncement;
    use crate::shm::ring::Consumer;
    use crate::shm::segment::{EndingSegment, LEN, MappedSegment, SegmentSide, TABLE, Words};
    use crate::test_memory::TestMemory;
    use rdma_transport::mr::RemoteKey;
    use rdma_transport::wr::{SendFlags, SgeList};

    /// Returns an outgoing direction in which each side may have one read outstanding.
    fn one_read(half: usize) -> Outgoing {
        let depths = ReadDepth { responder_resources: 1, initiator_depth: 1 };
        Outgoing::new(half, SendQueue::new(4, 64), depths)
    }

    /// The local side maps a region of the peer while it transmits a write to this region. The write has begun with
    /// records, so it also ends with a record. Otherwise the peer would take the write for incomplete for ever, and the end
    /// of the connection for an end in the middle of a message.
    #[test]
    fn a_write_that_begins_with_a_record_ends_with_one() {
        const KEY: u32 = 5;
        const SIZE: usize = 2 * MAX_PIECE;
        let (here, there) = (SegmentSide::Active.outgoing(), SegmentSide::Passive.outgoing());
        let segment = MappedSegment::new(Memory::new_shared(LEN, Sharing::Write).expect("memory"));
        let region = Arc::new(Memory::new_shared(SIZE, Sharing::Write).expect("memory"));
        let mut of_peer = Lendings::new(there);
        of_peer.lend(&segment, (&region, SIZE, None), KEY, Access::REMOTE_WRITE).expect("a slot");
        let announcement = of_peer.announcements.pop().expect("an announcement");
        let file = announcement.file().expect("a file").try_clone_to_owned().expect("a descriptor");
        let (slot, word, rights, base) =
            (announcement.slot, announcement.word, announcement.rights, region.as_ptr() as u64);
        let announced = ReceivedAnnouncement { slot, word, rights, base, len: SIZE as u64 };

        let source = Memory::new(SIZE).expect("memory");
        source.write(0, &vec![7; SIZE]);
        let (mut outgoing, mut ring) = (one_read(here), Consumer::new(here));
        let op = SendOp::Write(RemoteAddress { address: base, key: RemoteKey(KEY) });
        let sges = SgeList::one(source.sge(0, SIZE));
        outgoing.sends.post(&SendWr { wr_id: 1, op, sges, flags: SendFlags::SIGNALED }, SIZE);
        let (keys, mut lendings, mut windows) =
            (KeyTable::default(), Lendings::new(here), Windows::new(there, account()));
        let (mut done, mut records) = (Vec::new(), Vec::new());
        for round in 0..1000 {
            let scope = Key::NONE;
            let mut cx =
                TransmitContext { scope, keys: &keys, lendings: &mut lendings, windows: &windows, direct: None };
            outgoing.transmit(&segment, &mut cx, &mut |one| done.push(one));
            outgoing.ring.publish(&segment);
            while ring.available(&segment).expect("a valid position") > 0 {
                let header = RecordHeader::parse(segment.peek(ring.next_record())).expect("a record");
                if header.kind == RecordKind::Write {
                    records.push(header.is_last());
                }
                ring.advance(header.size());
            }
            ring.release(&segment);
            // This call does what the next transmission would do if the peer consumed the records
            // in its middle.
            outgoing.reap(&segment, &mut |one| done.push(one)).expect("a valid position");
            if round == 0 {
                assert!(done.is_empty() && !records.is_empty(), "the ring has room for the whole write");
                windows.open(announced, &file).expect("it is mapped");
            }
            if !done.is_empty() {
                break;
            }
        }
        assert_eq!((done.len(), records.pop(), records.contains(&true)), (1, Some(true), false));
        assert_eq!(region.read(SIZE / 2, 8), [7; 8], "the middle of the write was not written directly");
    }

    /// The lending of a region ends while the local side reads from its window, so the peer may have
    /// written other bytes during the copy. The read does not complete: a request follows it.
    #[test]
    fn a_read_whose_lending_ends_during_the_copy_becomes_a_request() {
        const KEY: u32 = 5;
        const SIZE: usize = 4096;
        let (here, there) = (SegmentSide::Active.outgoing(), SegmentSide::Passive.outgoing());
        let inner = MappedSegment::new(Memory::new_shared(LEN, Sharing::Write).expect("memory"));
        let segment = EndingSegment { inner, word: there + TABLE };
        let region = Arc::new(Memory::new_shared(SIZE, Sharing::Read).expect("memory"));
        let mut of_peer = Lendings::new(there);
        of_peer.lend(&segment, (&region, SIZE, None), KEY, Access::REMOTE_READ).expect("a slot");
        let announcement = of_peer.announcements.pop().expect("an announcement");
        let file = announcement.file().expect("a file").try_clone_to_owned().expect("a descriptor");
        let (slot, word, rights, base) =
            (announcement.slot, announcement.word, announcement.rights, region.as_ptr() as u64);
        let mut windows = Windows::new(there, account());
        windows.open(ReceivedAnnouncement { slot, word, rights, base, len: SIZE as u64 }, &file).expect("it is mapped");

        let sink = Memory::new(SIZE).expect("memory");
        let mut outgoing = one_read(here);
        let op = SendOp::Read(RemoteAddress { address: base, key: RemoteKey(KEY) });
        let sges = SgeList::one(sink.sge(0, SIZE));
        outgoing.sends.post(&SendWr { wr_id: 1, op, sges, flags: SendFlags::SIGNALED }, SIZE);
        let (keys, mut lendings, mut done) = (KeyTable::default(), Lendings::new(here), Vec::new());
        let scope = Key::NONE;
        let mut cx = TransmitContext { scope, keys: &keys, lendings: &mut lendings, windows: &windows, direct: None };
        outgoing.transmit(&segment, &mut cx, &mut |one| done.push(one));
        assert!(windows.has_ended(&segment, slot) && done.is_empty(), "{done:?}");
        let awaited = outgoing.sends.outstanding.front().expect("a request");
        assert_eq!((awaited.done, awaited.len), (0, SIZE as u32));
    }

    /// A sender of short messages does not wait for a work request to complete, so nothing else
    /// loads the position up to which the peer has released records. So [`Outgoing::message`] loads
    /// the position itself when the ring is full, and writes the message if the ring has room
    /// again.
    #[test]
    fn a_full_ring_is_looked_at_again() {
        let here = SegmentSide::Active.outgoing();
        let segment = MappedSegment::new(Memory::new_shared(LEN, Sharing::Write).expect("memory"));
        let (mut outgoing, mut ring) = (one_read(here), Consumer::new(here));
        for _ in 0..3 {
            while outgoing.message(&segment, INLINE, |_, _| {}) {}
            outgoing.ring.publish(&segment);
            assert!(ring.available(&segment).expect("a valid position") > 0);
            while ring.available(&segment).expect("a valid position") > 0 {
                let header = RecordHeader::parse(segment.peek(ring.next_record())).expect("a record");
                ring.advance(header.size());
            }
            ring.release(&segment);
        }
        assert!(outgoing.message(&segment, INLINE, |_, _| {}), "the ring is empty");
    }
    /// A payload of any length is refused while the staging buffer is full, and fits again once the
    /// peer has consumed the oldest payload.
    #[test]
    fn the_staging_buffer_is_full_at_its_length() {
        for len in [1, ALIGN, 1000, STAGING_PIECE, 10 * STAGING_PIECE] {
            let mut staging = StagingBuffer { memory: None, slot: 0, pos: 0, tail: 0, parts: VecDeque::new() };
            let (mut end, mut free) = (0, None);
            for _ in 0..10_000 {
                match staging.reserve(len) {
                    Some((at, reserved)) => {
                        assert!(at + reserved <= STAGING && staging.parts.len() < STAGING / ALIGN);
                        end += 1;
                        staging.commit(reserved, end);
                    }
                    None => {
                        let done = end - staging.parts.len() as u64 + 1;
                        free.get_or_insert(staging.parts.len());
                        staging.consumed(done);
                    }
                }
            }
            let most = STAGING / len.min(STAGING_PIECE).next_multiple_of(ALIGN);
            assert_eq!(free, Some(most), "{len} bytes");
        }
    }
}
