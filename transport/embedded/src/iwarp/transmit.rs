//! The transmit direction of a queue pair. This direction frames the work requests of the send queue, and the responses to the peer's
//! requests, as FPDUs.
//!
//! The order of the work requests is that of [`SendQueue`]. If responses and local messages are
//! both pending, they alternate.

use std::io;

use super::fault::Fault;
use super::responder::{ServedOperation, ServedRequest, execute, quote};
use super::stag;
use super::startup::{Agreement, ReadyToReceive};
use super::stream::{Stream, max_ulpdu};
use super::wire::atomic::emit_response;
use super::wire::ddp::{MAX_ULPDU_LEN, TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use super::wire::opcode::{
    ATOMIC_RESPONSE_QUEUE, READ_REQUEST_QUEUE, SEND_QUEUE, TAGGED_HEADER_LEN, UNTAGGED_HEADER_LEN,
};
use super::wire::{AtomicRequest, Opcode, Quote, ReadRequest, Tagged, TerminateCause, Untagged};
use crate::soft::completions::{ATOMIC_LEN, Done};
use crate::soft::keys::{KeyTable, Miss};
use crate::soft::outstanding::OutstandingRequest;
use crate::soft::responses::PendingResponses;
use crate::soft::send_queue::{QueuedSend, SendQueue};
use rdma_transport::mem::{SendSlice, Sge};
use rdma_transport::mr::Access;
use rdma_transport::slab::Key;
use rdma_transport::wc::WcStatus;
use rdma_transport::wr::{RemoteAddress, SendClass, SendFlags, SendOp, SendWr};

/// The length in bytes of the longest payload that is always copied into the control buffer of the stream, next to its header. A longer
/// payload is normally sent from its own memory.
const COPY_MAX: usize = 256;
/// The length in bytes of the longest payload of an inline send. An inline payload is always copied.
pub(crate) const MAX_INLINE: usize = COPY_MAX;
/// The smallest segment size in bytes. If TCP reports a smaller size, this size is used instead (RFC 5044 §4.5).
const MIN_SEGMENT: usize = 128;
/// The number of bytes after which one connection stops sending, so that other connections are served.
const BUDGET: u64 = 4 << 20;

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
    /// True while local messages must wait: before the stream starts, and on a responder until
    /// [`Transmitter::release`]. Responses to the peer's requests do not wait.
    held: bool,
    /// The send queue. The completion position of a work request is the offset in the stream at
    /// which its last FPDU ends.
    pub(crate) sends: SendQueue,
    pub(crate) responses: PendingResponses<ServedRequest>,
    /// The MSN of the next message on the send queue.
    msn: u32,
    /// The MSN of the next Atomic Response.
    atomic_msn: u32,
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
            sends: SendQueue::new(depth, inline_max),
            responses: PendingResponses::new(0),
            msn: 1,
            atomic_msn: 1,
            fault: None,
        }
    }

    /// Starts the stream with the negotiated CRC, markers, numbers of Reads and segment size.
    pub(crate) fn establish(&mut self, agreement: &Agreement, max_segment: usize) {
        self.stream = Stream::new(agreement.crc, agreement.markers);
        self.sends.establish(agreement.ord);
        self.responses = PendingResponses::new(agreement.ird);
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

    #[inline]
    pub(crate) fn has_fault(&self) -> bool {
        self.fault.is_some()
    }

    pub(crate) fn take_fault(&mut self) -> Option<Fault> {
        self.fault.take()
    }

    /// Returns true if [`Transmitter::transmit`] has something to frame or to send, or a fault to report.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        !self.stream.is_empty() || self.fault.is_some() || !self.responses.is_idle() || self.may_go()
    }

    /// Returns true if the next work request may be framed now.
    #[inline]
    fn may_go(&self) -> bool {
        !self.held && self.sends.may_go()
    }

    /// Adds a work request whose payload has `len` bytes. The caller has checked that the send queue is not full and that an inline payload
    /// fits. A Send of at most [`COPY_MAX`] bytes, a Write or a Read is framed immediately under four conditions: a new message can be
    /// framed now ([`Transmitter::is_clear`]), the work request needs only one FPDU, it has exactly one scatter-gather entry, and it has
    /// neither an inline payload nor a fence. A Read must also have a payload, and be within the limit of outstanding Reads. Any other work
    /// request is queued.
    #[inline]
    pub(crate) fn post(&mut self, wr: &SendWr, len: usize) {
        match wr.sges.as_slice() {
            [sge]
                if matches!(wr.op, SendOp::Send)
                    && !wr.flags.intersects(SendFlags::INLINE | SendFlags::FENCE)
                    && self.frames_at_once(len) =>
            {
                let opcode = if wr.flags.contains(SendFlags::SOLICITED) { Opcode::SendSolicited } else { Opcode::Send };
                let header = self.next_header(opcode, len);
                self.stream.small_entry(&header, sge);
                let done = Done::of(wr.wr_id, SendClass::Send, wr.flags, 0);
                self.sends.post_sent(done, (self.stream.framed(), false));
            }
            _ => self.post_other(wr, len),
        }
    }

    /// Adds a work request that [`Transmitter::post`] has not framed as a small Send. Frames a Write or a Read immediately under the
    /// conditions of [`Transmitter::post`], and queues any other work request.
    #[inline(never)]
    fn post_other(&mut self, wr: &SendWr, len: usize) {
        let [sge] = wr.sges.as_slice() else { return self.sends.post(wr, len) };
        if wr.flags.intersects(SendFlags::INLINE | SendFlags::FENCE) || !self.is_clear() {
            return self.sends.post(wr, len);
        }
        let class = match wr.op {
            SendOp::Write(remote) if len <= self.tagged_segment => {
                self.frame_write(&remote, wr, sge, len);
                SendClass::Write
            }
            SendOp::Read(remote) if len > 0 && self.sends.outstanding.has_room() => {
                self.frame_read(&remote, sge, len);
                SendClass::Read
            }
            _ => return self.sends.post(wr, len),
        };
        // A response that is pending now is framed before the next local message.
        self.responses.goes_next = true;
        let done = Done::of(wr.wr_id, class, wr.flags, len);
        self.sends.post_sent(done, (self.stream.framed(), class == SendClass::Read));
    }

    /// Returns true if a new message can be framed immediately: no other message or response must be framed first, and the batch of unsent
    /// FPDUs is not full.
    #[inline]
    fn is_clear(&self) -> bool {
        self.sends.is_sent() && !self.held && self.fault.is_none() && self.responses.is_idle() && self.stream.has_room()
    }

    /// Returns true if a Send of `len` bytes is one small segment that can be framed immediately.
    #[inline]
    pub(crate) fn frames_at_once(&self, len: usize) -> bool {
        let clear = self.is_clear() || rdma_transport::planted("a-short-message-overtakes-in-the-provider");
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
        self.responses.goes_next = true;
        let header = Untagged { last: true, opcode, reserved_or_stag: 0, queue, msn, offset: 0 };
        let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
        header.emit_into((UNTAGGED_HEADER_LEN + len) as u16, &mut bytes);
        bytes
    }

    /// Frames a Write that has no work request. Returns false, and frames nothing, if the Write has more than [`COPY_MAX`] bytes or does
    /// not fit into one segment, if its data is in device memory, or if other messages are queued before it.
    #[inline]
    pub(crate) fn frame_write_now(&mut self, entry: &Sge, remote: &RemoteAddress) -> bool {
        let fits = entry.len() <= COPY_MAX.min(self.tagged_segment) && !entry.is_of_device();
        let frames = fits && self.is_clear();
        if frames {
            self.stream.small_entry(&write_header(remote, entry.len()), entry);
            self.responses.goes_next = true;
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

    /// Frames a Read Request, and records that its response is expected.
    #[inline]
    fn frame_read(&mut self, remote: &RemoteAddress, sink: &Sge, len: usize) {
        let size = len as u32;
        let msn = self.sends.request(*sink, size, false);
        let (sink_stag, sink_offset) = (sink.local_key().0, sink.address() as u64);
        let read =
            ReadRequest { sink_stag, sink_offset, size, source_stag: remote.key.0, source_offset: remote.address };
        self.stream.untagged(&request_header(Opcode::ReadRequest, msn), &read.emit());
    }

    /// Frames the initiator's ready-to-receive message. Its STag is 1, as in siw's, because some adapters refuse 0.
    pub(crate) fn ready_to_receive(&mut self, rtr: ReadyToReceive) {
        match rtr {
            ReadyToReceive::Write => self.tagged(&Tagged { last: true, opcode: Opcode::Write, stag: 1, offset: 0 }),
            ReadyToReceive::Read => {
                let read = ReadRequest { sink_stag: 1, sink_offset: 0, size: 0, source_stag: 1, source_offset: 0 };
                let nothing = OutstandingRequest::new(Sge::default(), 0, false, None);
                let (stag, offset) = (read.sink_stag, read.sink_offset);
                let msn = self.sends.outstanding.push(OutstandingRequest { stag, offset, ..nothing });
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
    fn frame(&mut self, keys: &KeyTable, scope: Key) {
        while self.stream.has_room() {
            if self.fault.is_some() {
                return;
            }
            // The segments of two messages are never mixed: a message that has begun is framed to its end first.
            let answer = self.responses.front().is_some_and(|pending| {
                pending.done > 0 || (self.sends.is_between_messages() && self.responses.goes_next)
            });
            if !answer && self.may_go() {
                self.frame_own();
                self.responses.goes_next = true;
            } else if let Some(pending) = self.responses.front() {
                // An atomic operation may change memory from which an earlier response is still being sent. So the operation waits until
                // that response is sent.
                let atomic = matches!(pending.request.operation, ServedOperation::Atomic(_));
                if atomic && self.stream.has_lent() && !rdma_transport::planted("an-atomic-overtakes-an-answer") {
                    return;
                }
                self.frame_answer(keys, scope);
            } else {
                return;
            }
        }
    }

    /// Frames one segment of the first work request in the queue. The caller has checked
    /// [`Transmitter::may_go`].
    #[inline]
    fn frame_own(&mut self) {
        let Self { stream, sends, msn, .. } = self;
        let Some(entry) = sends.front() else { return };
        let (offset, opcode) = (sends.part(), opcode_of(&entry.wr));
        let remote = match entry.wr.op {
            SendOp::Send
            | SendOp::SendInvalidate(_)
            | SendOp::SendWithImmediate(_)
            | SendOp::Datagram(_)
            | SendOp::DatagramWithImmediate(..) => {
                let len = (entry.len - offset).min(self.untagged_segment);
                let last = offset + len == entry.len;
                let reserved_or_stag = if let SendOp::SendInvalidate(key) = entry.wr.op { key.0 } else { 0 };
                let offset32 = offset as u32;
                let header =
                    Untagged { last, opcode, reserved_or_stag, queue: SEND_QUEUE, msn: *msn, offset: offset32 };
                let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
                header.emit_into((UNTAGGED_HEADER_LEN + len) as u16, &mut bytes);
                payload(stream, sends.inline(), entry, &bytes, offset, len);
                *msn = msn.wrapping_add(last.into());
                return self.framed(len, false);
            }
            SendOp::WriteWithImmediate(_, data) if sends.is_immediate_next() => return self.frame_immediate(data),
            SendOp::Write(remote) | SendOp::WriteWithImmediate(remote, _) => remote,
            SendOp::Read(_) if entry.len == 0 => return self.framed(0, false),
            SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => return self.frame_request(),
        };
        let len = (entry.len - offset).min(self.tagged_segment);
        let last = offset + len == entry.len;
        let header = Tagged { last, opcode, stag: remote.key.0, offset: remote.address.wrapping_add(offset as u64) };
        let mut bytes = [0; TAGGED_FPDU_HEADER_LEN];
        header.emit_into((TAGGED_HEADER_LEN + len) as u16, &mut bytes);
        payload(stream, sends.inline(), entry, &bytes, offset, len);
        self.framed(len, false);
    }

    /// Records that `len` more bytes of the payload of the first work request in the queue are
    /// framed.
    #[inline]
    fn framed(&mut self, len: usize, answered: bool) {
        self.sends.advance(len, (self.stream.framed(), answered));
    }

    /// Frames the Immediate Data message, which follows a Write and completes a receive of the peer (RFC 7306 §6).
    #[inline(never)]
    fn frame_immediate(&mut self, data: u32) {
        let solicited = self.sends.front().is_some_and(|entry| entry.wr.flags.contains(SendFlags::SOLICITED));
        let opcode = if solicited { Opcode::ImmediateSolicited } else { Opcode::Immediate };
        let header = Untagged { last: true, opcode, reserved_or_stag: 0, queue: SEND_QUEUE, msn: self.msn, offset: 0 };
        self.stream.untagged(&header, &u64::from(data).to_be_bytes());
        self.msn = self.msn.wrapping_add(1);
        self.framed(0, false);
    }

    /// Frames the Read Request or the Atomic Request of the first work request in the queue.
    #[inline(never)]
    fn frame_request(&mut self) {
        let Some(&QueuedSend { wr, len }) = self.sends.front() else { return };
        if self.sends.outstanding.depth() == 0 {
            self.fault = Some(Fault::WorkRequest(WcStatus::LocalQpOperationError));
            return;
        }
        let sink = wr.sges.as_slice().first().copied().unwrap_or_default();
        if let SendOp::Read(remote) = wr.op {
            self.frame_read(&remote, &sink, len);
            return self.framed(len, true);
        }
        // An Atomic Request has its MSN as its identifier.
        let id = self.sends.request(sink, ATOMIC_LEN, true);
        let atomic = match wr.op {
            SendOp::CompareSwap { remote, expected, swap } => {
                AtomicRequest::compare_swap(id, remote.key.0, remote.address, expected, swap)
            }
            SendOp::FetchAdd { remote, add } => AtomicRequest::fetch_add(id, remote.key.0, remote.address, add),
            // All other operations are sent without a request message.
            _ => return,
        };
        self.stream.untagged(&request_header(Opcode::AtomicRequest, id), &atomic.emit());
        self.framed(len, true);
    }

    /// Frames one segment of the response to the peer's oldest request. The region is looked up again for each segment, because the region
    /// may have been revoked since the previous segment.
    #[inline(never)]
    fn frame_answer(&mut self, keys: &KeyTable, scope: Key) {
        let Some(&pending) = self.responses.front() else { return };
        let result = match pending.request.operation {
            ServedOperation::Read(read) => {
                let left = (read.size - pending.done) as usize;
                let len = left.min(self.tagged_segment);
                let last = len == left;
                self.frame_response(&read, pending.done, len, last, keys, scope).map(|()| (len, last))
            }
            ServedOperation::Atomic(atomic) => self.frame_atomic_response(&atomic, keys, scope).map(|()| (0, true)),
        };
        match result {
            Ok((len, last)) => self.responses.advance(len, last),
            Err(miss) => self.fault = Some(Fault::Violation(stag::request(miss), quote(&pending))),
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
        let done = if rdma_transport::planted("read-one-byte-off") { done.saturating_sub(1) } else { done };
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

    fn frame_atomic_response(&mut self, request: &AtomicRequest, keys: &KeyTable, scope: Key) -> Result<(), Miss> {
        let span = keys.remote(scope, request.stag, request.offset, ATOMIC_LEN as usize, Access::REMOTE_ATOMIC)?;
        let old = execute(request, span).ok_or(Miss::Misaligned)?;
        let twice = rdma_transport::planted("atomic-done-twice") && !self.stream.is_empty();
        let old = if twice { execute(request, span).unwrap_or(old) } else { old };
        let header = Untagged {
            last: true,
            opcode: Opcode::AtomicResponse,
            reserved_or_stag: 0,
            queue: ATOMIC_RESPONSE_QUEUE,
            msn: self.atomic_msn,
            offset: 0,
        };
        self.atomic_msn = self.atomic_msn.wrapping_add(1);
        self.stream.untagged(&header, &emit_response(request.request_id, old));
        Ok(())
    }

    /// Frames messages and hands their bytes to TCP. Stops when all messages are sent, when TCP accepts no more bytes, or when the
    /// connection has used its budget. Calls `done` with the completion of every work request that is complete.
    #[inline]
    pub(crate) fn transmit(
        &mut self,
        keys: &KeyTable,
        scope: Key,
        send: &mut impl FnMut(&[SendSlice<'_>]) -> io::Result<usize>,
        done: &mut impl FnMut(Done),
    ) -> io::Result<Sent> {
        let result = self.send_all(keys, scope, send, done);
        self.stream.settle((keys, scope));
        result
    }

    #[inline]
    fn send_all(
        &mut self,
        keys: &KeyTable,
        scope: Key,
        send: &mut impl FnMut(&[SendSlice<'_>]) -> io::Result<usize>,
        done: &mut impl FnMut(Done),
    ) -> io::Result<Sent> {
        let stop = self.stream.sent() + BUDGET;
        loop {
            self.frame(keys, scope);
            if self.stream.is_empty() {
                self.reap(done);
                return Ok(Sent::All);
            }
            let all = match self.stream.flush((keys, scope), send) {
                Ok(all) => all,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Sent::Blocked),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.reap(done);
            if !all {
                return Ok(Sent::Blocked);
            }
            if self.stream.sent() >= stop {
                return Ok(Sent::More);
            }
        }
    }

    /// Completes the work requests whose last FPDU TCP has accepted, if they wait for no response.
    #[inline]
    pub(crate) fn reap(&mut self, done: &mut impl FnMut(Done)) {
        self.sends.reap(self.stream.sent(), done);
    }

    /// Ends the stream behind the last framed FPDU, with a Terminate if one is given. Returns a copy of the bytes that are still to be
    /// sent.
    pub(crate) fn end(&mut self, terminate: Option<(TerminateCause, Option<Quote>)>) -> Vec<u8> {
        self.fault = None;
        self.responses.clear();
        self.stream.end(terminate)
    }
}

/// Frames one segment of a work request: the `len` bytes of its payload at `offset`. `inline` is
/// the copied payload of an inline send.
#[inline]
fn payload(stream: &mut Stream, inline: Option<&[u8]>, entry: &QueuedSend, header: &[u8], offset: usize, len: usize) {
    if let Some(inline) = inline {
        let start = stream.begin(header);
        stream.copy(inline.get(offset..offset + len).unwrap_or_default());
        stream.seal(start);
    } else if len <= COPY_MAX {
        let start = stream.begin(header);
        entry.wr.sges.visit(offset, len, |part| stream.copy_entry(&part));
        stream.seal(start);
    } else {
        stream.refer(header, &entry.wr.sges, offset, len);
    }
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

/// Returns the opcode of the work request's segments.
#[inline]
fn opcode_of(wr: &SendWr) -> Opcode {
    match (wr.op, wr.flags.contains(SendFlags::SOLICITED)) {
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
