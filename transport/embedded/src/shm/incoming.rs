//! The incoming direction of a queue pair. This direction turns records into received messages, writes, responses and
//! the peer's requests.

use super::fault::{LinkFault, Refusal};
use super::outgoing::{MAX_PIECE, Outgoing, PeerRequest};
use super::record::{RecordHeader, RecordKind, WORD};
use super::ring::Consumer;
use super::segment::{CAPACITY, Segment};
use super::windows::{Lendings, Windows};
use crate::entries::ENTRIES;
use crate::soft::keys::KeyTable;
use crate::soft::receive_queue::{ReceiveQueue, ReceivedMessage};
use crate::soft::srq::SharedReceiveQueue;
use rdma_transport::mem::Span;
use rdma_transport::mr::Access;
use rdma_transport::slab::Key;

/// The cost of processing a record without its payload, as a number of bytes that is subtracted from the budget.
const RECORD: usize = 512;

/// The state outside [`Incoming`] that is needed to process a record.
#[derive(Debug)]
pub(super) struct RecordContext<'a> {
    pub(super) scope: Key,
    pub(super) keys: &'a mut KeyTable,
    pub(super) srq: Option<&'a mut SharedReceiveQueue>,
    pub(super) outgoing: &'a mut Outgoing,
    pub(super) lendings: &'a mut Lendings,
    pub(super) windows: &'a Windows,
    pub(super) extensions: bool,
    /// Output: the key of a region that the peer may map (`Access::DIRECT`), but has accessed with a record. After
    /// [`Incoming::consume`] has returned, the caller lends the region to the peer.
    pub(super) direct: Option<u32>,
}

/// The reason why [`Incoming::consume`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Consumed {
    /// All published records are consumed.
    All,
    /// The budget is used up.
    Budget,
    /// The payload of the next record is in no valid window: the local side has not mapped the
    /// window, its lending has ended, or the payload is not within the window. The packet that
    /// announces the window may be unread, so the caller reads all packets and tries again. If the
    /// payload is still in no valid window, the peer has ended the lending, or has violated the
    /// protocol.
    UnknownWindow,
}

/// The incoming direction of a queue pair.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) ring: Consumer,
    pub(super) queue: ReceiveQueue,
    /// True if a part of a write was consumed, and its last part was not.
    writing: bool,
    /// True if a consumed record had its payload in a window. The peer cannot reuse the memory of that payload until
    /// the record is released.
    pub(super) release_due: bool,
}

impl Incoming {
    pub(super) const fn new(half: usize, queue: ReceiveQueue) -> Self {
        Self { ring: Consumer::new(half), queue, writing: false, release_due: false }
    }

    /// Returns true if no message and no write is partly received. If the peer ends the connection at any other point,
    /// a message is truncated.
    pub(super) const fn is_at_boundary(&self) -> bool {
        self.queue.is_between_messages() && !self.writing
    }

    /// Consumes records until none is left or `budget`, in bytes, is used up. Calls `out` for each message that is
    /// complete.
    #[inline]
    pub(super) fn consume<S: Segment>(
        &mut self,
        segment: &S,
        cx: &mut RecordContext<'_>,
        mut budget: usize,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<Consumed, LinkFault> {
        loop {
            let available = self.ring.available(segment)?;
            if available == 0 {
                return Ok(Consumed::All);
            }
            if budget == 0 {
                return Ok(Consumed::Budget);
            }
            let (at, header, size) = self.next_header(segment, available)?;
            if header.kind == RecordKind::Send && !header.is_in_window() {
                let payload = segment.part(at + header.body(), header.len as usize).ok_or(Refusal::Malformed)?;
                self.copy_to_receive(payload, cx)?;
                if header.is_last() {
                    self.queue.end_message(None, None, None, out);
                }
            } else if !self.consume_other(segment, header, at, cx, out)? {
                return Ok(Consumed::UnknownWindow);
            }
            self.ring.advance(size);
            budget = budget.saturating_sub(RECORD + header.len as usize);
        }
    }

    /// Returns the offset, the header and the size of the next record. `available` is the number of bytes in which the
    /// record must end.
    #[inline]
    fn next_header<S: Segment>(&self, segment: &S, available: usize) -> Result<(usize, RecordHeader, usize), Refusal> {
        let at = self.ring.next_record();
        let header = RecordHeader::parse(segment.peek(at)).ok_or(Refusal::Malformed)?;
        let size = header.size();
        if size > available || size < WORD || size % WORD != 0 {
            return Err(Refusal::Malformed);
        }
        Ok((at, header, size))
    }

    /// Drops the published records in front of the first refusal, and returns this refusal. Returns
    /// `None` if there is none. Each complete response among the dropped records removes its read
    /// or atomic operation from the outstanding requests. So the request that the peer has refused
    /// is then the oldest outstanding one.
    pub(super) fn find_refusal<S: Segment>(&mut self, segment: &S, outgoing: &mut Outgoing) -> Option<Refusal> {
        // The unread records of a correct peer fit into the ring. A hostile peer may publish more
        // during this loop.
        let mut left = CAPACITY;
        loop {
            let available = self.ring.available(segment).ok()?;
            let (at, header, size) = self.next_header(segment, available).ok()?;
            match header.kind {
                RecordKind::Refusal => return Some(Refusal::of(segment.peek(at + WORD))),
                RecordKind::Value => outgoing.sends.outstanding.complete(),
                RecordKind::Data if header.is_last() => outgoing.sends.outstanding.complete(),
                _ => {}
            }
            left = left.checked_sub(size)?;
            self.ring.advance(size);
        }
    }

    /// Returns the payload of a record. Returns `None` if the payload is in no valid window ([`Consumed::UnknownWindow`]).
    #[inline]
    fn payload<'a, S: Segment>(
        &mut self,
        segment: &'a S,
        windows: &'a Windows,
        header: RecordHeader,
        at: usize,
    ) -> Result<Option<Span<'a>>, LinkFault> {
        let len = header.len as usize;
        if !header.is_in_window() {
            return Ok(Some(segment.part(at + header.body(), len).ok_or(Refusal::Malformed)?));
        }
        if len > MAX_PIECE {
            return Err(Refusal::Malformed.into());
        }
        self.release_due = true;
        Ok(windows.payload(segment, header.slot, segment.peek(at + header.body()), len))
    }

    /// Appends a part of a message to the receive at the front of the queue.
    #[inline]
    fn copy_to_receive(&mut self, payload: Span<'_>, cx: &mut RecordContext<'_>) -> Result<(), LinkFault> {
        let room = self.queue.room(&mut cx.srq).ok_or(Refusal::NoBuffer)?;
        if payload.len() > room.saturating_sub(self.queue.placed()) {
            return Err(Refusal::TooLong.into());
        }
        self.queue.fill_from(payload);
        Ok(())
    }

    /// Returns true if a copied payload is valid: it was not in a window, or its window was still
    /// lent at the end of the copy.
    #[inline]
    fn is_valid<S: Segment>(segment: &S, windows: &Windows, header: RecordHeader) -> bool {
        !header.is_in_window() || windows.is_still_lent(segment, header.slot)
    }

    /// Executes any record except a Send whose payload is part of its record. Returns false if the payload is in no valid
    /// window ([`Consumed::UnknownWindow`]).
    #[inline(never)]
    fn consume_other<S: Segment>(
        &mut self,
        segment: &S,
        header: RecordHeader,
        at: usize,
        cx: &mut RecordContext<'_>,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<bool, LinkFault> {
        // Each word is loaded only once, because the peer may change the word between a check and a later use.
        let word = |nth: usize| segment.peek(at + WORD * (1 + nth));
        let len = header.len as usize;
        match header.kind {
            RecordKind::Pad | RecordKind::Ready => {}
            RecordKind::Send => {
                if !self.receive_payload(segment, header, at, cx)? {
                    return Ok(false);
                }
                if header.is_last() {
                    self.queue.end_message(None, None, None, out);
                }
            }
            RecordKind::SendInvalidate => {
                let key = word(0) as u32;
                if !cx.keys.may_invalidate(cx.scope, key) {
                    return Err(Refusal::CannotInvalidate.into());
                }
                if !self.receive_payload(segment, header, at, cx)? {
                    return Ok(false);
                }
                if header.is_last() {
                    if !cx.keys.invalidate_remotely(cx.scope, key) {
                        return Err(Refusal::CannotInvalidate.into());
                    }
                    self.queue.end_message(None, Some(key), None, out);
                }
            }
            RecordKind::Write => return self.write(segment, header, at, cx),
            RecordKind::Immediate => {
                if !cx.extensions {
                    return Err(Refusal::Opcode.into());
                }
                if !self.queue.is_between_messages() {
                    return Err(Refusal::Malformed.into());
                }
                if !self.queue.has_next(&mut cx.srq) {
                    return Err(Refusal::NoBuffer.into());
                }
                // The peer may have written the data of the write directly to the region, without a
                // record. So the length in this record is the length of the whole write. The memory
                // of the write may be lent, and is free when this record is released.
                self.release_due = true;
                self.queue.end_message(Some(header.len), None, Some(word(0) as u32), out);
            }
            RecordKind::Read | RecordKind::CompareSwap | RecordKind::FetchAdd => {
                Self::accept_request(header, word, cx)?;
            }
            RecordKind::Data => return self.take_data(segment, header, at, cx),
            RecordKind::Value => {
                let outstanding = &mut cx.outgoing.sends.outstanding;
                let front = outstanding.front().filter(|front| front.atomic).ok_or(Refusal::UnexpectedAnswer)?;
                ENTRIES.fill(&front.sink, &word(0).to_ne_bytes());
                outstanding.complete();
            }
            RecordKind::Refusal => return Err(LinkFault::Refused(Refusal::of(word(0)))),
            RecordKind::Mapped => cx.lendings.answered(header.slot, word(0), len == 1),
        }
        Ok(true)
    }

    /// Appends the payload of a record to the receive at the front of the queue. Returns false if
    /// the payload is in no valid window.
    fn receive_payload<S: Segment>(
        &mut self,
        segment: &S,
        header: RecordHeader,
        at: usize,
        cx: &mut RecordContext<'_>,
    ) -> Result<bool, LinkFault> {
        let Some(payload) = self.payload(segment, cx.windows, header, at)? else { return Ok(false) };
        self.copy_to_receive(payload, cx)?;
        Ok(Self::is_valid(segment, cx.windows, header))
    }

    /// Executes a part of a write of the peer. Returns false if the payload is in no valid window.
    fn write<S: Segment>(
        &mut self,
        segment: &S,
        header: RecordHeader,
        at: usize,
        cx: &mut RecordContext<'_>,
    ) -> Result<bool, LinkFault> {
        let (key, address) = (segment.peek(at + WORD) as u32, segment.peek(at + 2 * WORD));
        let len = header.len as usize;
        let Some(payload) = self.payload(segment, cx.windows, header, at)? else { return Ok(false) };
        // The key of a write without bytes is not checked, as in iWARP.
        if len > 0 {
            if rdma_transport::planted("key-checked-after-the-copy") {
                cx.keys.sink(key, address, len).into_iter().for_each(|span| span.fill_from(payload));
            }
            let span = cx.keys.remote(cx.scope, key, address, len, Access::REMOTE_WRITE);
            span.map_err(Refusal::Write)?.fill_from(payload);
            cx.direct = cx.keys.is_direct(key).then_some(key).or(cx.direct);
        }
        if !Self::is_valid(segment, cx.windows, header) {
            return Ok(false);
        }
        self.writing = !header.is_last();
        Ok(true)
    }

    /// Accepts a request of the peer. `word` returns the words that follow the header of the
    /// record.
    fn accept_request(
        header: RecordHeader,
        word: impl Fn(usize) -> u64,
        cx: &mut RecordContext<'_>,
    ) -> Result<(), LinkFault> {
        let (key, address, len) = (word(0) as u32, word(1), header.len as usize);
        let request = match header.kind {
            RecordKind::Read => {
                cx.keys.remote(cx.scope, key, address, len, Access::REMOTE_READ).map_err(Refusal::Request)?;
                PeerRequest::Read { key, address, len }
            }
            _ if !cx.extensions => return Err(Refusal::Opcode.into()),
            RecordKind::FetchAdd => PeerRequest::FetchAdd { key, address, add: word(2) },
            _ => PeerRequest::CompareSwap { key, address, expected: word(2), swap: word(3) },
        };
        let is_empty = len == 0 && header.kind == RecordKind::Read;
        if is_empty || !cx.outgoing.responses.has_room() {
            return Err(Refusal::TooManyRequests.into());
        }
        cx.outgoing.responses.push(request);
        Ok(())
    }

    /// Copies a part of the response to a local Read into the memory of the Read. Returns false if
    /// the payload is in no valid window.
    fn take_data<S: Segment>(
        &mut self,
        segment: &S,
        header: RecordHeader,
        at: usize,
        cx: &mut RecordContext<'_>,
    ) -> Result<bool, LinkFault> {
        let len = header.len as usize;
        let Some(payload) = self.payload(segment, cx.windows, header, at)? else { return Ok(false) };
        let outstanding = &mut cx.outgoing.sends.outstanding;
        let front = outstanding.front().filter(|front| !front.atomic).ok_or(Refusal::UnexpectedAnswer)?;
        let (done, left) = (front.done as usize, (front.len - front.done) as usize);
        if len == 0 || len > left || header.is_last() != (len == left) {
            return Err(Refusal::UnexpectedAnswer.into());
        }
        ENTRIES.fill_from(&front.sink.part(done, len), payload);
        if !Self::is_valid(segment, cx.windows, header) {
            return Ok(false);
        }
        outstanding.advance(len);
        if header.is_last() {
            outstanding.complete();
        }
        Ok(true)
    }
}

#[cfg(all(test, not(loom_model)))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::shm::account::account;
    use crate::shm::packet::ReceivedAnnouncement;
    use crate::shm::record::{IN_WINDOW, LAST};
    use crate::shm::ring::Producer;
    use crate::shm::segment::{EndingSegment, LEN, MappedSegment, SegmentSide, TABLE, Words};
    use crate::soft::send_queue::SendQueue;
    use crate::test_memory::TestMemory;
    use rdma_transport::cm::ReadDepth;
    use rdma_transport::mem::{Memory, Sharing};
    use rdma_transport::wr::{RecvWr, SgeList};

    /// A lending ends while the local side copies a payload from its window, so the peer may have written other bytes
    /// during the copy. The message is not delivered, and counts as truncated.
    #[test]
    fn a_payload_whose_lending_ends_during_the_copy_is_no_message() {
        const SIZE: usize = 8192;
        let (ours, theirs) = (SegmentSide::Passive.outgoing(), SegmentSide::Active.outgoing());
        let inner = MappedSegment::new(Memory::new_shared(LEN, Sharing::Write).expect("memory"));
        let segment = EndingSegment { inner, word: theirs + TABLE };
        let lent = Arc::new(Memory::new_shared(SIZE, Sharing::Read).expect("memory"));
        let mut of_peer = Lendings::new(theirs);
        assert_eq!(of_peer.lend(&segment, (&lent, SIZE, None), 5, Access::empty()), Some(0));
        let announcement = of_peer.announcements.pop().expect("an announcement");
        let file = announcement.file().expect("a file").try_clone_to_owned().expect("a descriptor");
        let (slot, word, rights) = (announcement.slot, announcement.word, announcement.rights);
        let announced = ReceivedAnnouncement { slot, word, rights, base: 0, len: SIZE as u64 };
        let mut windows = Windows::new(theirs, account());
        windows.open(announced, &file).expect("it is mapped");

        let mut ring = Producer::new(theirs);
        let header = RecordHeader { flags: LAST | IN_WINDOW, slot, ..RecordHeader::new(RecordKind::Send, SIZE as u32) };
        let at = ring.reserve(&segment, header.size()).expect("room");
        segment.poke(at, header.emit());
        segment.poke(at + WORD, 0);
        ring.commit(header.size());
        assert!(ring.publish(&segment));

        let sink = Memory::new(SIZE).expect("memory");
        let mut queue = ReceiveQueue::new(1);
        queue.post(RecvWr { wr_id: 1, sges: SgeList::one(sink.sge(0, SIZE)) });
        let mut incoming = Incoming::new(theirs, queue);
        let (mut keys, mut outgoing) =
            (KeyTable::default(), Outgoing::new(ours, SendQueue::new(1, 0), ReadDepth::default()));
        let (mut lendings, mut messages) = (Lendings::new(ours), Vec::new());
        let mut cx = RecordContext {
            scope: Key::NONE,
            keys: &mut keys,
            srq: None,
            outgoing: &mut outgoing,
            lendings: &mut lendings,
            windows: &windows,
            extensions: false,
            direct: None,
        };
        for attempt in 0..2 {
            let consumed = incoming.consume(&segment, &mut cx, usize::MAX, &mut |message| messages.push(message));
            assert!(matches!(consumed, Ok(Consumed::UnknownWindow)), "attempt {attempt}: {consumed:?}");
        }
        assert!(messages.is_empty() && !incoming.is_at_boundary());
        assert!(windows.has_ended(&segment, slot));
    }
}
