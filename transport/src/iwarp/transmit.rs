//! The transmit direction of a queue pair. This direction frames the work requests of the send queue, and the responses to the peer's
//! requests, as FPDUs.
//!
//! Work requests are sent and complete in the order of their posting. A Read waits until fewer Reads are outstanding than the peer allows,
//! and all work requests behind that Read wait, too. A Read completes when its whole response has arrived. If responses and local messages
//! are both pending, they alternate.

use std::collections::VecDeque;
use std::io;

use super::fault::Fault;
use super::requester::{Outstanding, RequestKind, Requester};
use super::responder::{Responder, ServedRequest, execute};
use super::stag;
use super::startup::{Agreement, ReadyToReceive};
use super::stream::{Stream, max_ulpdu};
use super::wire::atomic::emit_response;
use super::wire::ddp::{MAX_ULPDU_LEN, TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use super::wire::opcode::{
    ATOMIC_RESPONSE_QUEUE, READ_REQUEST_QUEUE, SEND_QUEUE, TAGGED_HEADER_LEN, UNTAGGED_HEADER_LEN,
};
use super::wire::{AtomicRequest, Opcode, Quote, ReadRequest, Tagged, TerminateCause, Untagged};
use crate::mem::{SendSlice, Sge};
use crate::mr::Access;
use crate::slab::Key;
use crate::soft::completions::{ATOMIC_LEN, Done};
use crate::soft::keys::{KeyTable, Miss};
use crate::wc::WcStatus;
use crate::wr::{RemoteAddress, SendClass, SendFlags, SendOp, SendWr, SgeList};

/// The length in bytes of the longest payload that is always copied into the control buffer of the stream, next to its header. A longer
/// payload is normally sent from its own memory.
const COPY_MAX: usize = 256;
/// The length in bytes of the longest payload of an inline send. An inline payload is always copied.
pub(crate) const MAX_INLINE: usize = COPY_MAX;
/// The smallest segment size in bytes. If TCP reports a smaller size, this size is used instead (RFC 5044 §4.5).
const MIN_SEGMENT: usize = 128;
/// The number of bytes after which one connection stops sending, so that other connections are served.
const BUDGET: u64 = 4 << 20;

/// A posted work request of which at least one segment is not framed yet.
#[derive(Debug)]
struct UnframedSend {
    wr_id: u64,
    op: SendOp,
    flags: SendFlags,
    len: usize,
    sges: SgeList,
    /// The offset in the inline buffer at which the payload of an inline send is stored.
    inline: usize,
}

/// A posted work request whose segments are all framed.
#[derive(Debug)]
struct FramedSend {
    /// The completion that is added if the work request succeeds.
    done: Done,
    /// True if the work request completes only after the peer's response.
    answered: bool,
    /// The offset in the stream at which the last FPDU of the work request ends.
    end: u64,
}

impl UnframedSend {
    /// Returns true if the work request completes only after the peer's response. A Read of length 0 has no response, because it is never
    /// sent.
    #[inline]
    fn is_answered(&self) -> bool {
        self.op.answered() && (self.len > 0 || self.op.class() != SendClass::Read)
    }

    /// Returns the completion that is added if the work request succeeds.
    #[inline]
    fn done(&self) -> Done {
        Done::of(self.wr_id, self.op.class(), self.flags, self.len)
    }

    /// Returns the opcode of the work request's segments.
    #[inline]
    fn opcode(&self) -> Opcode {
        match (self.op, self.flags.contains(SendFlags::SOLICITED)) {
            (SendOp::Send, false) => Opcode::Send,
            (SendOp::Send, true) => Opcode::SendSolicited,
            (SendOp::SendInvalidate(_), false) => Opcode::SendInvalidate,
            (SendOp::SendInvalidate(_), true) => Opcode::SendSolicitedInvalidate,
            (SendOp::Write(_) | SendOp::WriteWithImmediate(..), _) => Opcode::Write,
            (SendOp::Read(_), _) => Opcode::ReadRequest,
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, _) => Opcode::AtomicRequest,
            // These operations are never queued: posting them fails.
            (SendOp::SendWithImmediate(_) | SendOp::Datagram(_) | SendOp::DatagramWithImmediate(..), _) => Opcode::Send,
        }
    }
}

/// The result of [`Transmitter::transmit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// TCP has accepted everything that can be sent now.
    All,
    /// The socket's buffer is full. An edge will report that the socket is writable.
    Blocked,
    /// More output is ready, but the connection has used its budget.
    More,
}

#[derive(Debug)]
pub(crate) struct Transmitter {
    stream: Stream,
    /// `untagged_segment` is the largest payload in bytes of an untagged segment. `tagged_segment` is the largest payload in bytes of a
    /// tagged segment.
    untagged_segment: usize,
    tagged_segment: usize,
    /// True while local messages are held: before the stream starts, and on a responder until [`Transmitter::release`]. Responses to the
    /// peer's requests are not held.
    held: bool,
    /// The work requests that are completely framed but not completed. The work requests in `queue` were posted after these.
    framed: VecDeque<FramedSend>, // bound: sends
    queue: VecDeque<UnframedSend>, // bound: sends
    /// The number of completed work requests. This number is also the sequence number of the oldest work request that is not completed.
    first: u64,
    /// The number of framed payload bytes of the first work request in `queue`.
    framed_part: usize,
    /// True if the data of a Write with Immediate is framed, but its Immediate Data message is not.
    immediate_next: bool,
    msn: u32,
    inline: Vec<u8>, // bound: sends
    inline_max: usize,
    inline_next: usize,
    inline_slots: usize,
    /// True if a pending response is framed before the next local message.
    answer_next: bool,
    /// A fault that was found while framing. The connection must end with this fault.
    fault: Option<Fault>,
}

impl Transmitter {
    pub(crate) fn new(depth: usize, inline_max: usize) -> Self {
        Self {
            stream: Stream::new(true, false),
            untagged_segment: 0,
            tagged_segment: 0,
            held: true,
            framed: VecDeque::with_capacity(depth),
            queue: VecDeque::new(),
            first: 0,
            framed_part: 0,
            immediate_next: false,
            msn: 1,
            inline: Vec::new(),
            inline_max,
            inline_next: 0,
            inline_slots: depth,
            answer_next: false,
            fault: None,
        }
    }

    /// Starts the stream with the negotiated CRC, markers and segment size.
    pub(crate) fn establish(&mut self, agreement: &Agreement, max_segment: usize) {
        self.stream = Stream::new(agreement.crc, agreement.markers);
        self.set_max_segment(max_segment);
    }

    /// Sets the segment size, so that one FPDU fits one TCP segment of `emss` bytes. The payload size is rounded down so that a full
    /// segment needs no pad: to a multiple of 8 bytes for untagged segments, and to a multiple of 4 bytes for tagged segments.
    pub(crate) fn set_max_segment(&mut self, emss: usize) {
        let ulpdu = max_ulpdu(emss.max(MIN_SEGMENT), self.stream.has_markers()).min(MAX_ULPDU_LEN);
        self.untagged_segment = (ulpdu - UNTAGGED_HEADER_LEN) & !7;
        self.tagged_segment = (ulpdu - TAGGED_HEADER_LEN) & !3;
    }

    /// Allows local messages to be sent. Before this call, a responder holds its work requests, because the initiator must send first.
    pub(crate) fn release(&mut self) {
        self.held = false;
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held
    }

    pub(crate) fn queued(&self) -> usize {
        self.framed.len() + self.queue.len()
    }

    #[inline]
    pub(crate) fn has_fault(&self) -> bool {
        self.fault.is_some()
    }

    pub(crate) fn take_fault(&mut self) -> Option<Fault> {
        self.fault.take()
    }

    /// Returns true if [`Transmitter::transmit`] has something to frame or to send, or a fault to report.
    #[inline]
    pub(crate) fn has_work(&self, requester: &Requester, responder: &Responder) -> bool {
        !self.stream.is_empty() || self.fault.is_some() || !responder.is_idle() || self.may_go(requester)
    }

    /// Returns true if the first work request in `queue` may be framed now: neither a fence nor the limit of outstanding Reads holds the
    /// work request back.
    #[inline]
    fn may_go(&self, requester: &Requester) -> bool {
        if self.held {
            return false;
        }
        let Some(entry) = self.queue.front() else { return false };
        if requester.is_idle() && !entry.is_answered() {
            return true;
        }
        let fenced = entry.flags.contains(SendFlags::FENCE) && !crate::planted("fence-ignored");
        (!fenced || self.framed_part > 0 || requester.is_idle())
            && (!entry.is_answered() || requester.has_room() || requester.depth() == 0)
    }

    /// Adds a work request whose payload has `len` bytes. The caller has checked that the send queue is not full and that an inline payload
    /// fits. A Send of at most [`COPY_MAX`] bytes, a Write or a Read is framed immediately under four conditions: a new message can be
    /// framed now ([`Transmitter::is_clear`]), the work request needs only one FPDU, it has exactly one scatter-gather entry, and it has
    /// neither an inline payload nor a fence. A Read must also have a payload, and be within the limit of outstanding Reads. Any other work
    /// request is queued.
    #[inline]
    pub(crate) fn post(&mut self, wr: &SendWr, len: usize, requester: &mut Requester, responder: &Responder) {
        match wr.sges.as_slice() {
            [sge]
                if matches!(wr.op, SendOp::Send)
                    && !wr.flags.intersects(SendFlags::INLINE | SendFlags::FENCE)
                    && self.frames_at_once(len, responder) =>
            {
                let opcode = if wr.flags.contains(SendFlags::SOLICITED) { Opcode::SendSolicited } else { Opcode::Send };
                let header = self.next_header(opcode, len);
                self.stream.small_entry(&header, sge);
                let done = Done::of(wr.wr_id, SendClass::Send, wr.flags, 0);
                self.framed.push_back(FramedSend { done, answered: false, end: self.stream.framed() });
            }
            _ => self.post_other(wr, len, requester, responder),
        }
    }

    /// Adds a work request that [`Transmitter::post`] has not framed as a small Send. Frames a Write or a Read immediately under the
    /// conditions of [`Transmitter::post`], and queues any other work request.
    #[inline(never)]
    fn post_other(&mut self, wr: &SendWr, len: usize, requester: &mut Requester, responder: &Responder) {
        let [sge] = wr.sges.as_slice() else { return self.enqueue(wr, len) };
        if wr.flags.intersects(SendFlags::INLINE | SendFlags::FENCE) || !self.is_clear(responder) {
            return self.enqueue(wr, len);
        }
        let class = match wr.op {
            SendOp::Write(remote) if len <= self.tagged_segment => {
                self.frame_write(&remote, wr, sge, len);
                SendClass::Write
            }
            SendOp::Read(remote) if len > 0 && requester.has_room() => {
                self.frame_read(&remote, sge, len, requester);
                SendClass::Read
            }
            _ => return self.enqueue(wr, len),
        };
        // A response that is pending now is framed before the next local message.
        self.answer_next = true;
        let done = Done::of(wr.wr_id, class, wr.flags, len);
        self.framed.push_back(FramedSend { done, answered: class == SendClass::Read, end: self.stream.framed() });
    }

    /// Returns true if a new message can be framed immediately: no other message or response must be framed first, and the batch of unsent
    /// FPDUs is not full.
    #[inline]
    fn is_clear(&self, responder: &Responder) -> bool {
        self.queue.is_empty() && !self.held && self.fault.is_none() && responder.is_idle() && self.stream.has_room()
    }

    /// Returns true if a Send of `len` bytes is one small segment that can be framed immediately.
    #[inline]
    pub(crate) fn frames_at_once(&self, len: usize, responder: &Responder) -> bool {
        let clear = self.is_clear(responder) || crate::planted("a-short-message-overtakes-in-the-provider");
        len <= COPY_MAX.min(self.untagged_segment) && clear
    }

    /// Frames a Send that has no work request. The payload of the message is `header`, followed by `payload`. The caller has checked
    /// [`Transmitter::frames_at_once`].
    #[inline]
    pub(crate) fn frame_bytes(&mut self, header: &[u8], payload: &[u8]) {
        let fpdu = self.next_header(Opcode::Send, header.len() + payload.len());
        if let Ok(header) = <&[u8; 8]>::try_from(header) {
            // The headers of the library's messages have 8 bytes. Such a header is copied together with the FPDU header.
            let mut both = [0; UNTAGGED_FPDU_HEADER_LEN + 8];
            both[..UNTAGGED_FPDU_HEADER_LEN].copy_from_slice(&fpdu);
            both[UNTAGGED_FPDU_HEADER_LEN..].copy_from_slice(header);
            return self.stream.small(&both, payload);
        }
        let start = self.stream.begin(&fpdu);
        self.stream.copy(header);
        self.stream.copy(payload);
        self.stream.seal(start);
    }

    /// Returns the FPDU header of the next Send message. The message has only one segment, with `len` bytes.
    #[inline]
    fn next_header(&mut self, opcode: Opcode, len: usize) -> [u8; UNTAGGED_FPDU_HEADER_LEN] {
        let (queue, msn) = (SEND_QUEUE, self.msn);
        self.msn = msn.wrapping_add(1);
        // A response that is pending now is framed before the next local message.
        self.answer_next = true;
        let header = Untagged { last: true, opcode, reserved_or_stag: 0, queue, msn, offset: 0 };
        let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
        header.emit_into((UNTAGGED_HEADER_LEN + len) as u16, &mut bytes);
        bytes
    }

    /// Frames a Write that has no work request. Returns false, and frames nothing, if the Write has more than [`COPY_MAX`] bytes or does
    /// not fit into one segment, if its data is in device memory, or if other messages are queued before it.
    #[inline]
    pub(crate) fn frame_write_now(&mut self, entry: &Sge, remote: &RemoteAddress, responder: &Responder) -> bool {
        let fits = entry.len() <= COPY_MAX.min(self.tagged_segment) && !entry.is_of_device();
        let frames = fits && self.is_clear(responder);
        if frames {
            self.stream.small_entry(&write_header(remote, entry.len()), entry);
            self.answer_next = true;
        }
        frames
    }

    /// Frames a Write that is one segment.
    #[inline]
    fn frame_write(&mut self, remote: &RemoteAddress, wr: &SendWr, sge: &Sge, len: usize) {
        let bytes = write_header(remote, len);
        if len <= COPY_MAX {
            self.stream.small_entry(&bytes, sge);
        } else {
            self.stream.refer(&bytes, &wr.sges, 0, len);
        }
    }

    /// Frames a Read Request, and records that its response is expected. The caller must append the work request of the Read to `framed`
    /// next.
    #[inline]
    fn frame_read(&mut self, remote: &RemoteAddress, sink: &Sge, len: usize, requester: &mut Requester) {
        let sequence = Some(self.first + self.framed.len() as u64);
        let (stag, offset, len) = (sink.local_key().0, address(sink), len as u32);
        let msn = requester.push(Outstanding {
            kind: RequestKind::Read,
            stag,
            offset,
            sink: *sink,
            len,
            done: 0,
            sequence,
            msn: 0,
        });
        let (source_stag, source_offset) = (remote.key.0, remote.address);
        let read = ReadRequest { sink_stag: stag, sink_offset: offset, size: len, source_stag, source_offset };
        self.stream.untagged(&request_header(Opcode::ReadRequest, msn), &read.emit());
    }

    /// Appends a work request to `queue`. Copies the payload of an inline send.
    #[inline(never)]
    fn enqueue(&mut self, wr: &SendWr, len: usize) {
        let mut inline = 0;
        if wr.flags.contains(SendFlags::INLINE) {
            if self.inline.is_empty() {
                // The inline buffer is allocated for the first inline send, because most connections use no inline sends.
                self.inline.resize(self.inline_slots * self.inline_max, 0);
            }
            inline = self.inline_next * self.inline_max;
            self.inline_next = (self.inline_next + 1) % self.inline_slots.max(1);
            let mut room = self.inline.get_mut(inline..inline + len).unwrap_or_default();
            for sge in wr.sges.as_slice() {
                let (now, rest) = room.split_at_mut(sge.len().min(room.len()));
                sge.copy_to(now);
                room = rest;
            }
        }
        self.queue.push_back(UnframedSend { wr_id: wr.wr_id, op: wr.op, flags: wr.flags, len, sges: wr.sges, inline });
    }

    /// Frames the initiator's ready-to-receive message. Its STag is 1, as in siw's, because some adapters refuse 0.
    pub(crate) fn ready_to_receive(&mut self, rtr: ReadyToReceive, requester: &mut Requester) {
        match rtr {
            ReadyToReceive::Write => self.tagged(&Tagged { last: true, opcode: Opcode::Write, stag: 1, offset: 0 }),
            ReadyToReceive::Read => {
                let read = ReadRequest { sink_stag: 1, sink_offset: 0, size: 0, source_stag: 1, source_offset: 0 };
                let (kind, sink) = (RequestKind::Read, Sge::default());
                let request = Outstanding { kind, stag: 1, offset: 0, sink, len: 0, done: 0, sequence: None, msn: 0 };
                let msn = requester.push(request);
                self.stream.untagged(&request_header(Opcode::ReadRequest, msn), &read.emit());
            }
            // An initiator never offers a Send as its ready-to-receive message.
            ReadyToReceive::Send => {}
        }
    }

    /// Frames a tagged segment that has no payload.
    fn tagged(&mut self, header: &Tagged) {
        let mut bytes = [0; TAGGED_FPDU_HEADER_LEN];
        header.emit_into(TAGGED_HEADER_LEN as u16, &mut bytes);
        let start = self.stream.begin(&bytes);
        self.stream.seal(start);
    }

    /// Frames messages until the batch of unsent FPDUs is full or nothing more can be framed.
    #[inline]
    fn frame(&mut self, requester: &mut Requester, responder: &mut Responder, keys: &KeyTable, scope: Key) {
        while self.stream.has_room() {
            if self.fault.is_some() {
                return;
            }
            // The segments of two messages are never mixed: a message that has begun is framed to its end first.
            let answer = responder.front().is_some_and(|pending| {
                pending.done > 0 || (self.framed_part == 0 && !self.immediate_next && self.answer_next)
            });
            if !answer && self.may_go(requester) {
                self.frame_own(requester);
                self.answer_next = true;
            } else if let Some(pending) = responder.front() {
                // An atomic operation may change memory from which an earlier response is still being sent. So the operation waits until
                // that response is sent.
                let atomic = matches!(pending.request, ServedRequest::Atomic(_));
                if atomic && self.stream.has_lent() && !crate::planted("an-atomic-overtakes-an-answer") {
                    return;
                }
                self.frame_answer(responder, keys, scope);
            } else {
                return;
            }
        }
    }

    /// Frames one segment of the first work request in `queue`. The caller has checked [`Transmitter::may_go`].
    #[inline]
    fn frame_own(&mut self, requester: &mut Requester) {
        let Self { stream, queue, framed_part, msn, inline, .. } = self;
        let Some(entry) = queue.front() else { return };
        let (offset, opcode) = (*framed_part, entry.opcode());
        let remote = match entry.op {
            SendOp::Send
            | SendOp::SendInvalidate(_)
            | SendOp::SendWithImmediate(_)
            | SendOp::Datagram(_)
            | SendOp::DatagramWithImmediate(..) => {
                let len = (entry.len - offset).min(self.untagged_segment);
                let last = offset + len == entry.len;
                let reserved_or_stag = if let SendOp::SendInvalidate(key) = entry.op { key.0 } else { 0 };
                let offset32 = offset as u32;
                let header =
                    Untagged { last, opcode, reserved_or_stag, queue: SEND_QUEUE, msn: *msn, offset: offset32 };
                let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
                header.emit_into((UNTAGGED_HEADER_LEN + len) as u16, &mut bytes);
                payload(stream, inline, entry, &bytes, offset, len);
                *framed_part = offset + len;
                if last {
                    *msn = msn.wrapping_add(1);
                    self.entry_framed();
                }
                return;
            }
            SendOp::WriteWithImmediate(_, data) if self.immediate_next => return self.frame_immediate(data),
            SendOp::Write(remote) | SendOp::WriteWithImmediate(remote, _) => remote,
            SendOp::Read(_) if entry.len == 0 => return self.entry_framed(),
            SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => {
                return self.frame_request(requester);
            }
        };
        let len = (entry.len - offset).min(self.tagged_segment);
        let last = offset + len == entry.len;
        let header = Tagged { last, opcode, stag: remote.key.0, offset: remote.address.wrapping_add(offset as u64) };
        let mut bytes = [0; TAGGED_FPDU_HEADER_LEN];
        header.emit_into((TAGGED_HEADER_LEN + len) as u16, &mut bytes);
        payload(stream, inline, entry, &bytes, offset, len);
        *framed_part = offset + len;
        if last && matches!(entry.op, SendOp::WriteWithImmediate(..)) {
            self.immediate_next = true;
        } else if last {
            self.entry_framed();
        }
    }

    /// Frames the Immediate Data message, which follows a Write and completes a receive of the peer (RFC 7306 §6).
    #[inline(never)]
    fn frame_immediate(&mut self, data: u32) {
        let solicited = self.queue.front().is_some_and(|e| e.flags.contains(SendFlags::SOLICITED));
        let opcode = if solicited { Opcode::ImmediateSolicited } else { Opcode::Immediate };
        let header = Untagged { last: true, opcode, reserved_or_stag: 0, queue: SEND_QUEUE, msn: self.msn, offset: 0 };
        self.stream.untagged(&header, &u64::from(data).to_be_bytes());
        self.msn = self.msn.wrapping_add(1);
        self.entry_framed();
    }

    /// Frames the Read Request or the Atomic Request of the first work request in `queue`.
    #[inline(never)]
    fn frame_request(&mut self, requester: &mut Requester) {
        let Some(entry) = self.queue.front() else { return };
        if requester.depth() == 0 {
            self.fault = Some(Fault::WorkRequest(WcStatus::LocalQpOperationError));
            return;
        }
        let sink = entry.sges.as_slice().first().copied().unwrap_or_default();
        let id = requester.msn;
        let atomic = match entry.op {
            SendOp::Read(remote) => {
                let len = entry.len;
                self.frame_read(&remote, &sink, len, requester);
                return self.entry_framed();
            }
            SendOp::CompareSwap { remote, expected, swap } => {
                AtomicRequest::compare_swap(id, remote.key.0, remote.address, expected, swap)
            }
            SendOp::FetchAdd { remote, add } => AtomicRequest::fetch_add(id, remote.key.0, remote.address, add),
            // These operations need no request: their payload is already framed.
            SendOp::Send
            | SendOp::SendWithImmediate(_)
            | SendOp::SendInvalidate(_)
            | SendOp::Datagram(_)
            | SendOp::DatagramWithImmediate(..)
            | SendOp::Write(_)
            | SendOp::WriteWithImmediate(..) => return self.entry_framed(),
        };
        let sequence = Some(self.first + self.framed.len() as u64);
        let (kind, stag, offset, len) = (RequestKind::Atomic(id), sink.local_key().0, address(&sink), ATOMIC_LEN);
        let msn = requester.push(Outstanding { kind, stag, offset, sink, len, done: 0, sequence, msn: 0 });
        self.stream.untagged(&request_header(Opcode::AtomicRequest, msn), &atomic.emit());
        self.entry_framed();
    }

    #[inline]
    fn entry_framed(&mut self) {
        if let Some(entry) = self.queue.pop_front() {
            let (done, answered) = (entry.done(), entry.is_answered());
            self.framed.push_back(FramedSend { done, answered, end: self.stream.framed() });
        }
        self.framed_part = 0;
        self.immediate_next = false;
    }

    /// Frames one segment of the response to the peer's oldest request. The region is looked up again for each segment, because the region
    /// may have been revoked since the previous segment.
    #[inline(never)]
    fn frame_answer(&mut self, responder: &mut Responder, keys: &KeyTable, scope: Key) {
        let Some(pending) = responder.front() else { return };
        let result = match pending.request {
            ServedRequest::Read(read) => {
                let left = (read.size - pending.done) as usize;
                let len = left.min(self.tagged_segment);
                let last = len == left;
                self.frame_response(&read, pending.done, len, last, keys, scope).map(|()| (len, last))
            }
            ServedRequest::Atomic(atomic) => {
                let result = self.frame_atomic_response(&atomic, responder.atomic_msn, keys, scope);
                responder.atomic_msn = responder.atomic_msn.wrapping_add(1);
                result.map(|()| (0, true))
            }
        };
        match result {
            Ok((len, last)) => {
                responder.advance(len, last);
                self.answer_next = !last;
            }
            Err(miss) => {
                let quote = responder.front().and_then(|pending| pending.quote());
                self.fault = Some(Fault::Violation(stag::request(miss), quote));
            }
        }
    }

    fn frame_response(
        &mut self,
        read: &ReadRequest,
        done: u32,
        len: usize,
        last: bool,
        keys: &KeyTable,
        scope: Key,
    ) -> Result<(), Miss> {
        let offset = read.sink_offset.wrapping_add(done.into());
        let header = Tagged { last, opcode: Opcode::ReadResponse, stag: read.sink_stag, offset };
        if read.size == 0 {
            self.tagged(&header);
            return Ok(());
        }
        let done = if crate::planted("read-one-byte-off") { done.saturating_sub(1) } else { done };
        let source = read.source_offset.checked_add(done.into()).ok_or(Miss::Wrap)?;
        let span = keys.remote(scope, read.source_stag, source, len, Access::REMOTE_READ)?;
        let mut bytes = [0; TAGGED_FPDU_HEADER_LEN];
        header.emit_into((TAGGED_HEADER_LEN + len) as u16, &mut bytes);
        if len > COPY_MAX && self.stream.lends() {
            self.stream.lend(&bytes, read.source_stag, source, len);
            return Ok(());
        }
        let start = self.stream.begin(&bytes);
        self.stream.copy_span(span);
        self.stream.seal(start);
        Ok(())
    }

    fn frame_atomic_response(
        &mut self,
        request: &AtomicRequest,
        msn: u32,
        keys: &KeyTable,
        scope: Key,
    ) -> Result<(), Miss> {
        let span = keys.remote(scope, request.stag, request.offset, ATOMIC_LEN as usize, Access::REMOTE_ATOMIC)?;
        let old = execute(request, span).ok_or(Miss::Misaligned)?;
        let twice = crate::planted("atomic-done-twice") && !self.stream.is_empty();
        let old = if twice { execute(request, span).unwrap_or(old) } else { old };
        let header = Untagged {
            last: true,
            opcode: Opcode::AtomicResponse,
            reserved_or_stag: 0,
            queue: ATOMIC_RESPONSE_QUEUE,
            msn,
            offset: 0,
        };
        self.stream.untagged(&header, &emit_response(request.request_id, old));
        Ok(())
    }

    /// Frames messages and hands their bytes to TCP. Stops when all messages are sent, when TCP accepts no more bytes, or when the
    /// connection has used its budget. Calls `done` with the completion of every work request that is complete.
    #[inline]
    pub(crate) fn transmit(
        &mut self,
        requester: &mut Requester,
        responder: &mut Responder,
        keys: &KeyTable,
        scope: Key,
        send: &mut impl FnMut(&[SendSlice<'_>]) -> io::Result<usize>,
        done: &mut impl FnMut(Done),
    ) -> io::Result<Sent> {
        let result = self.send_all(requester, responder, keys, scope, send, done);
        self.stream.settle((keys, scope));
        result
    }

    #[inline]
    fn send_all(
        &mut self,
        requester: &mut Requester,
        responder: &mut Responder,
        keys: &KeyTable,
        scope: Key,
        send: &mut impl FnMut(&[SendSlice<'_>]) -> io::Result<usize>,
        done: &mut impl FnMut(Done),
    ) -> io::Result<Sent> {
        let stop = self.stream.sent() + BUDGET;
        loop {
            self.frame(requester, responder, keys, scope);
            if self.stream.is_empty() {
                self.reap(requester, done);
                return Ok(Sent::All);
            }
            let all = match self.stream.flush((keys, scope), send) {
                Ok(all) => all,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Sent::Blocked),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.reap(requester, done);
            if !all {
                return Ok(Sent::Blocked);
            }
            if self.stream.sent() >= stop {
                return Ok(Sent::More);
            }
        }
    }

    /// Completes the work requests in `framed`, from the oldest on. Stops at the first work request that TCP has not accepted completely,
    /// or that still waits for its response.
    #[inline]
    pub(crate) fn reap(&mut self, requester: &Requester, done: &mut impl FnMut(Done)) {
        while let Some(framed) = self.framed.front() {
            if framed.end > self.stream.sent() || (framed.answered && self.first >= requester.answered()) {
                break;
            }
            done(framed.done);
            self.framed.pop_front();
            self.first += 1;
        }
    }

    /// Removes and returns the work requests in `queue`. Used when a connection that has sent nothing moves to shared memory. The second
    /// value is the copied payload of an inline send, and `None` for any other work request.
    pub(crate) fn leave(&mut self) -> Vec<(SendWr, Option<Box<[u8]>>)> {
        let Self { queue, inline, .. } = self;
        let inline = |entry: &UnframedSend| {
            let payload = inline.get(entry.inline..entry.inline + entry.len).unwrap_or_default();
            entry.flags.contains(SendFlags::INLINE).then(|| payload.into())
        };
        let request = |entry: UnframedSend| {
            (SendWr { wr_id: entry.wr_id, op: entry.op, sges: entry.sges, flags: entry.flags }, inline(&entry))
        };
        queue.drain(..).map(request).collect()
    }

    /// Ends the stream behind the last framed FPDU, with a Terminate if one is given. Returns a copy of the bytes that are still to be
    /// sent.
    pub(crate) fn end(&mut self, terminate: Option<(TerminateCause, Option<Quote>)>) -> Vec<u8> {
        self.fault = None;
        self.stream.end(terminate)
    }

    /// Completes all work requests after [`Transmitter::end`]. If `failed` is given, one work request completes with the status in
    /// `failed`. All other work requests complete as flushed. The number in `failed` is the sequence number of the failed work request. If
    /// this number is `None`, the failed work request is the first one that is not completely framed.
    pub(crate) fn flush(&mut self, failed: Option<(Option<u64>, WcStatus)>, done: &mut impl FnMut(Done)) {
        let unframed = self.first + self.framed.len() as u64;
        let framed = self.framed.drain(..).map(|framed| framed.done);
        let queued = self.queue.drain(..).map(|entry| entry.done());
        for flushed in framed.chain(queued) {
            let status = match failed {
                Some((at, status)) if at.unwrap_or(unframed) == self.first => status,
                _ => WcStatus::Flushed,
            };
            done(Done { status, signaled: true, ..flushed });
            self.first += 1;
        }
        (self.framed_part, self.immediate_next) = (0, false);
    }
}

/// Frames one segment of a work request: the `len` bytes of its payload at `offset`.
#[inline]
fn payload(stream: &mut Stream, inline: &[u8], entry: &UnframedSend, header: &[u8], offset: usize, len: usize) {
    if entry.flags.contains(SendFlags::INLINE) {
        let start = stream.begin(header);
        let from = entry.inline + offset;
        stream.copy(inline.get(from..from + len).unwrap_or_default());
        stream.seal(start);
    } else if len <= COPY_MAX {
        let start = stream.begin(header);
        entry.sges.visit(offset, len, |part| stream.copy_entry(&part));
        stream.seal(start);
    } else {
        stream.refer(header, &entry.sges, offset, len);
    }
}

/// Returns the Tagged Offset that stands for the start of a scatter-gather entry: the virtual address of the entry.
pub(crate) fn address(sge: &Sge) -> u64 {
    sge.address() as u64
}

/// Returns the FPDU header of a Write that is one segment with `len` bytes.
#[inline]
fn write_header(remote: &RemoteAddress, len: usize) -> [u8; TAGGED_FPDU_HEADER_LEN] {
    let header = Tagged { last: true, opcode: Opcode::Write, stag: remote.key.0, offset: remote.address };
    let mut bytes = [0; TAGGED_FPDU_HEADER_LEN];
    header.emit_into((TAGGED_HEADER_LEN + len) as u16, &mut bytes);
    bytes
}

fn request_header(opcode: Opcode, msn: u32) -> Untagged {
    Untagged { last: true, opcode, reserved_or_stag: 0, queue: READ_REQUEST_QUEUE, msn, offset: 0 }
}
