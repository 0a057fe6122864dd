//! The receive direction of a queue pair: cuts the byte stream into FPDUs, checks each FPDU and places its payload.
//!
//! The payload of Sends and Read Responses is placed as it arrives. The program must not read the payload before the work request
//! completes, and the work request completes only after the CRC of every segment was checked. A Write has no completion at its target. So
//! with a CRC, each segment of a Write is held until the whole segment has arrived and its CRC is correct.
//!
//! If the connection uses a CRC, an invalid header is reported only after the CRC of its FPDU was checked. So the reported fault does not
//! depend on how many octets each receive call returns.

use super::control::ControlReceiver;
use super::fault::{Fault, header_need, refuse, refuse_whole, violation};
use super::forecast::{self, Forecast, Start};
use super::intake::Intake;
use super::placement::{PayloadBuffer, PlacementContext, judge_response};
use super::stag;
use super::wire::ddp::{READ_REQUEST_FPDU_HEADER_LEN, TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use super::wire::mpa::{CRC_LEN, LENGTH_LEN, fpdu_len, pad_len};
use super::wire::opcode::SEND_QUEUE;
use super::wire::read::READ_REQUEST_LEN;
use super::wire::{Crc32c, Opcode, Quote, ReadRequest, SegmentHeader, Tagged, TerminateCause, Untagged, crc32c};
use crate::entries::ENTRIES;
use crate::soft::outstanding::OutstandingRequests;
use crate::soft::receive_queue::{ReceiveQueue, ReceivedMessage};
use rdma_transport::mem::Span;
use rdma_transport::mr::Access;
use rdma_transport::wc::WcStatus;

/// If at least this number of octets of a payload is still to arrive, these octets are received directly into their destination.
pub(crate) const DIRECT_MIN: usize = 4096;

#[derive(Debug)]
pub(crate) struct Receiver {
    crc: bool,
    phase: FpduPhase,
    /// The octets of an incomplete header, or of an incomplete pad and CRC.
    carry: [u8; READ_REQUEST_FPDU_HEADER_LEN],
    carried: usize,
    sum: Crc32c,
    segment: CurrentSegment,
    /// The fault in the current header. This fault is reported if the CRC of the FPDU is correct. If the CRC is wrong, the wrong CRC is
    /// reported instead.
    deferred: Option<Box<Fault>>,
    control: ControlReceiver,
    /// The payload of the current Write segment until its CRC is checked. Used if the segment does not arrive in one piece. The buffer is
    /// allocated when it is first used.
    held: Vec<u8>, // bound: held-write
    forecast: Forecast,
    pub(crate) queue: ReceiveQueue,
    /// `writing` is the number of octets of the Write in progress. `written` is the length of the last complete Write.
    writing: u32,
    written: u32,
    /// True once any valid FPDU has arrived.
    seen: bool,
    /// The number of FPDUs whose header has arrived, modulo 2^32.
    fpdus: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FpduPhase {
    Header,
    Payload,
    Trailer,
}

/// The FPDU that is arriving.
#[derive(Clone, Copy, Debug)]
struct CurrentSegment {
    header: SegmentHeader,
    /// `done` is the number of payload octets that have arrived, and `left` is the number of
    /// payload octets that are still to arrive. `pad` is the number of pad octets behind the
    /// payload.
    done: usize,
    left: usize,
    pad: usize,
    read: Option<ReadRequest>,
    /// True if the region of the payload was revoked while the FPDU arrived.
    revoked: bool,
}

impl Receiver {
    pub(crate) fn new(depth: usize) -> Self {
        let header = SegmentHeader::Untagged(Untagged::TERMINATE);
        Self {
            crc: true,
            phase: FpduPhase::Header,
            carry: [0; READ_REQUEST_FPDU_HEADER_LEN],
            carried: 0,
            sum: Crc32c::new(),
            segment: CurrentSegment { header, done: 0, left: 0, pad: 0, read: None, revoked: false },
            deferred: None,
            control: ControlReceiver::new(),
            held: Vec::new(),
            forecast: Forecast::new(),
            queue: ReceiveQueue::new(depth),
            writing: 0,
            written: 0,
            seen: false,
            fpdus: 0,
        }
    }

    pub(crate) fn establish(&mut self, crc: bool) {
        self.crc = crc;
    }

    pub(crate) fn has_seen(&self) -> bool {
        self.seen
    }

    /// Returns the number of FPDUs whose header has arrived, modulo 2^32.
    #[inline]
    pub(crate) fn fpdus(&self) -> u32 {
        self.fpdus
    }

    /// Returns true if no FPDU, no Send and no Write is partly received. Does not check if Read
    /// Response segments are still expected.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.phase == FpduPhase::Header && self.carried == 0 && self.queue.is_between_messages() && self.writing == 0
    }

    /// Plans the next receive call: adds the destinations of its payloads to `intake`. `shared` is true if the queue pair uses a shared
    /// receive queue.
    #[inline]
    pub(crate) fn plan(&self, intake: &mut Intake, shared: bool, outstanding: &OutstandingRequests) {
        if self.forecast.is_bulk() || (self.phase == FpduPhase::Payload && self.segment.left >= DIRECT_MIN) {
            self.plan_bulk(intake, shared, outstanding);
        }
    }

    #[inline(never)]
    fn plan_bulk(&self, intake: &mut Intake, shared: bool, outstanding: &OutstandingRequests) {
        let CurrentSegment { done, left, pad, header, .. } = self.segment;
        if self.deferred.is_some() {
            return;
        }
        let last = header.opcode().is_send() && header.last();
        let rest = (self.written as usize).saturating_sub(self.writing as usize + done + left);
        let start = match self.phase {
            FpduPhase::Payload => {
                let Some(buffer) = self.remaining_buffer() else { return };
                intake.add_remaining(buffer);
                if buffer.len() < left || matches!(buffer, PayloadBuffer::Held { .. }) {
                    return;
                }
                Start { gap: pad + CRC_LEN, carried: 0, left, last, rest }
            }
            FpduPhase::Trailer => Start { gap: pad + CRC_LEN - self.carried, carried: 0, left: 0, last, rest },
            FpduPhase::Header => Start { gap: 0, carried: self.carried, left: 0, last: false, rest: 0 },
        };
        // With a CRC, a whole Write segment is processed from the staging buffer without another copy. So nothing is planned for Writes.
        if !(self.crc && self.forecast.is_of_writes()) {
            self.forecast.plan(intake, &start, &self.queue, shared, outstanding);
        }
    }

    /// Returns the destination of the rest of the current payload, or of its first part if the rest
    /// is not contiguous. Returns `None` for an untagged segment that is not a Send: such a payload
    /// does not go to memory of the program.
    fn remaining_buffer(&self) -> Option<PayloadBuffer> {
        let CurrentSegment { header, done, left: len, .. } = self.segment;
        match header {
            SegmentHeader::Untagged(untagged) if untagged.opcode.is_send() => {
                self.queue.next_memory(len).filter(|sge| !sge.is_empty()).map(PayloadBuffer::Receive)
            }
            SegmentHeader::Untagged(_) => None,
            SegmentHeader::Tagged(tagged) => {
                let (stag, offset) = (tagged.stag, tagged.offset.wrapping_add(done as u64));
                Some(match tagged.opcode {
                    Opcode::ReadResponse => PayloadBuffer::Sink { stag, offset, len },
                    _ if self.crc => PayloadBuffer::Held { start: done, len },
                    _ => PayloadBuffer::Target { stag, offset, len },
                })
            }
        }
    }

    /// Returns the buffer for [`PayloadBuffer::Held`] destinations.
    pub(crate) fn held(&mut self) -> &mut [u8] {
        &mut self.held
    }

    /// Records that the next `n` octets of the payload were received directly into their destination.
    fn filled(&mut self, buffer: &PayloadBuffer, n: usize, cx: &mut PlacementContext<'_>) {
        let mut sum = std::mem::take(&mut self.sum);
        match *buffer {
            PayloadBuffer::Receive(sge) => {
                if self.crc {
                    ENTRIES.visit(&sge.part(0, n), |bytes| sum.update(bytes));
                }
                self.queue.filled(n);
            }
            PayloadBuffer::Sink { stag, offset, .. } => {
                let read = cx.outstanding.front().filter(|_| self.crc);
                if let Some((read, span)) = read.zip(cx.keys.sink(stag, offset, n)) {
                    let sink = read.sink.part(read.done as usize, n);
                    ENTRIES.visit_placed(sink, span, n, |bytes| sum.update(bytes));
                }
                cx.outstanding.advance(n);
            }
            // This destination is only used without a CRC. With a CRC, the payload of a Write goes to [`PayloadBuffer::Held`].
            PayloadBuffer::Target { .. } => {}
            PayloadBuffer::Held { start, .. } => sum.update(self.held.get(start..start + n).unwrap_or_default()),
        }
        self.sum = sum;
        self.take_payload(n);
    }

    /// Processes the `n` octets that the last receive call has written to the destinations in `intake`. Calls `out` for each complete
    /// message.
    #[inline]
    pub(crate) fn take(
        &mut self,
        intake: &mut Intake,
        n: usize,
        cx: &mut PlacementContext<'_>,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<(), Fault> {
        let n = if intake.step(0).is_none() { n } else { self.take_steps(intake, n, cx, out)? };
        self.input(intake.tail(n), cx, out)
    }

    /// Processes the octets in the planned destinations, and the trailers and headers in the gaps
    /// between them. Returns the number of octets behind the last destination, which the caller
    /// must still process.
    #[inline(never)]
    fn take_steps(
        &mut self,
        intake: &mut Intake,
        n: usize,
        cx: &mut PlacementContext<'_>,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<usize, Fault> {
        let mut left = n;
        let mut index = 0;
        while let Some(step) = intake.step(index) {
            let gap = left.min(step.gap);
            self.input(intake.gap(index, gap), cx, out)?;
            left -= gap;
            if left == 0 {
                break;
            }
            let here = left.min(step.buffer.len());
            let begun = self.phase == FpduPhase::Payload && self.deferred.is_none();
            let buffer = self.remaining_buffer().filter(|buffer| begun && buffer.begins_as(&step.buffer));
            let room = buffer.map_or(0, |buffer| buffer.len());
            let fits = here.min(room);
            if fits > 0 {
                self.filled(&step.buffer, fits, cx);
            }
            left -= fits;
            let misplaced = fits < here || room != step.buffer.len();
            if left > 0 && misplaced && !rdma_transport::planted("a-wrong-forecast-is-believed") {
                let gone = Fault::WorkRequest(WcStatus::LocalProtectionError);
                let spilled = intake.spill(index, fits, left, cx.keys).ok_or(gone)?;
                let result = self.input(&spilled, cx, out);
                intake.keep(spilled);
                return result.map(|()| 0);
            }
            index += 1;
        }
        Ok(left)
    }

    /// Processes `bytes`, the next octets of the stream. Calls `out` for each complete message.
    pub(crate) fn input(
        &mut self,
        mut bytes: &[u8],
        cx: &mut PlacementContext<'_>,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<(), Fault> {
        while !bytes.is_empty() {
            bytes = match self.phase {
                FpduPhase::Header if self.carried == 0 => self.whole_or_header(bytes, cx, out)?,
                FpduPhase::Header => self.carried_header(bytes, cx)?,
                FpduPhase::Payload => {
                    let (now, rest) = bytes.split_at(bytes.len().min(self.segment.left));
                    if self.crc {
                        self.sum.update(now);
                    }
                    self.place(now, false, cx);
                    self.take_payload(now.len());
                    rest
                }
                FpduPhase::Trailer => self.trailer(bytes, cx, out)?,
            };
        }
        Ok(())
    }

    /// Processes the FPDU at the start of `bytes`. If the FPDU is incomplete, processes only its header. Returns the unprocessed octets.
    #[inline]
    fn whole_or_header<'a>(
        &mut self,
        bytes: &'a [u8],
        cx: &mut PlacementContext<'_>,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<&'a [u8], Fault> {
        let Some(prefix) = bytes.first_chunk::<4>() else { return self.carried_header(bytes, cx) };
        let ulpdu_len = usize::from(u16::from_be_bytes([prefix[0], prefix[1]]));
        if let Some((fpdu, rest)) = bytes.split_at_checked(fpdu_len(ulpdu_len)) {
            let (body, crc) = fpdu.split_at(fpdu.len() - CRC_LEN);
            if self.crc && crc32c(body).to_le_bytes() != crc {
                return Err(TerminateCause::LLP_CRC.into());
            }
            self.whole(body, cx, out)?;
            return Ok(rest);
        }
        let Some((header, rest)) = bytes.split_at_checked(header_need(prefix)) else {
            return self.carried_header(bytes, cx);
        };
        self.open(header, cx)?;
        Ok(rest)
    }

    /// Processes a complete FPDU after its CRC was checked. `body` is the FPDU without the CRC.
    #[inline]
    fn whole(
        &mut self,
        body: &[u8],
        cx: &mut PlacementContext<'_>,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<(), Fault> {
        self.fpdus = self.fpdus.wrapping_add(1);
        if let Some(payload) = Untagged::whole_send(body, self.queue.msn()) {
            if let Some(wr_id) = self.queue.fill_whole(payload) {
                self.seen = true;
                self.forecast.record_segment(forecast::PayloadKind::Send, payload.len(), true);
                self.forecast.record_message(payload.len());
                out(ReceivedMessage { wr_id, len: payload.len() as u32, invalidated: None, immediate: None });
                return Ok(());
            }
        }
        let header = SegmentHeader::parse(body).map_err(|error| refuse_whole(&error, body, cx.extensions))?;
        let (bytes, payload) = body.split_at(header.octets().min(body.len()));
        let send = match &header {
            SegmentHeader::Untagged(send) if send.opcode.is_send() => send,
            SegmentHeader::Untagged(_) => return self.whole_control(header, bytes, payload, cx, out),
            SegmentHeader::Tagged(tagged) => return self.whole_tagged(tagged, bytes, payload, cx),
        };
        let payload = &payload[..payload_len(bytes).min(payload.len())];
        self.judge_send(send, payload.len(), cx).map_err(|cause| Fault::Violation(cause, Quote::new(bytes)))?;
        self.queue.fill(payload);
        self.finish_send(send, cx, out)
    }

    /// Processes a complete segment of a Write or of a Read Response. The region is looked up only once.
    #[inline(never)]
    fn whole_tagged(
        &mut self,
        header: &Tagged,
        bytes: &[u8],
        payload: &[u8],
        cx: &mut PlacementContext<'_>,
    ) -> Result<(), Fault> {
        let payload = &payload[..payload_len(bytes).min(payload.len())];
        let target = self.judge_tagged(header, payload.len(), cx);
        let target = target.map_err(|cause| Fault::Violation(cause, Quote::new(bytes)))?;
        if header.opcode == Opcode::ReadResponse {
            if !payload.is_empty() {
                let gone = Fault::WorkRequest(WcStatus::LocalProtectionError);
                cx.keys.sink(header.stag, header.offset, payload.len()).ok_or(gone)?.fill(payload);
                cx.outstanding.advance(payload.len());
            }
            if header.last {
                cx.outstanding.complete();
            }
        } else {
            if let Some(span) = target {
                span.fill(payload);
            }
            self.wrote(payload.len(), header.last);
        }
        self.seen = true;
        Ok(())
    }

    /// Processes a complete untagged FPDU of any operation except the Sends.
    #[inline(never)]
    fn whole_control(
        &mut self,
        header: SegmentHeader,
        bytes: &[u8],
        payload: &[u8],
        cx: &mut PlacementContext<'_>,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<(), Fault> {
        self.judge(header, bytes, cx)?;
        self.place(&payload[..self.segment.left.min(payload.len())], true, cx);
        self.finish(cx, out)
    }

    /// Processes more octets of a header that arrives in several parts. Returns the unprocessed octets.
    fn carried_header<'a>(&mut self, mut bytes: &'a [u8], cx: &mut PlacementContext<'_>) -> Result<&'a [u8], Fault> {
        loop {
            let prefix = [self.carry[0], self.carry[1], self.carry[2], self.carry[3]];
            let need = if self.carried < prefix.len() { prefix.len() } else { header_need(&prefix) };
            if self.carried >= need {
                let header = self.carry;
                self.carried = 0;
                self.open(header.get(..need).unwrap_or(&header), cx)?;
                return Ok(bytes);
            }
            if bytes.is_empty() {
                return Ok(bytes);
            }
            bytes = self.carry_some(bytes, need);
        }
    }

    /// Appends octets of `bytes` to `carry` until `carry` contains `need` octets. Returns the rest of `bytes`.
    fn carry_some<'a>(&mut self, bytes: &'a [u8], need: usize) -> &'a [u8] {
        let need = need.min(self.carry.len());
        let (now, rest) = bytes.split_at(bytes.len().min(need.saturating_sub(self.carried)));
        self.carry[self.carried..self.carried + now.len()].copy_from_slice(now);
        self.carried += now.len();
        rest
    }

    /// Begins to process a segment of which the header has arrived, but not all of the payload.
    fn open(&mut self, header: &[u8], cx: &mut PlacementContext<'_>) -> Result<(), Fault> {
        match self.begin(header, cx) {
            Ok(()) => {}
            Err(fault) if self.crc => {
                // The fault is reported only after the CRC was checked. If the CRC is wrong, the peer has possibly sent a different header.
                let ulpdu_len = header.first_chunk().map_or(0, |len| usize::from(u16::from_be_bytes(*len)));
                self.deferred = Some(Box::new(fault));
                self.segment.left = fpdu_len(ulpdu_len).saturating_sub(CRC_LEN + header.len());
                self.segment.pad = 0;
            }
            Err(fault) => return Err(fault),
        }
        if self.crc {
            self.sum = Crc32c::new();
            self.sum.update(header);
            let CurrentSegment { header, left, .. } = self.segment;
            if header.opcode() == Opcode::Write && self.deferred.is_none() && self.held.len() < left {
                self.held.resize(left.next_power_of_two(), 0);
            }
        }
        self.phase = if self.segment.left > 0 { FpduPhase::Payload } else { FpduPhase::Trailer };
        Ok(())
    }

    fn take_payload(&mut self, n: usize) {
        self.segment.done += n;
        self.segment.left = self.segment.left.saturating_sub(n);
        if self.segment.left == 0 {
            self.phase = FpduPhase::Trailer;
        }
    }

    /// Processes the pad and the CRC. Returns the unprocessed octets.
    fn trailer<'a>(
        &mut self,
        bytes: &'a [u8],
        cx: &mut PlacementContext<'_>,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<&'a [u8], Fault> {
        let pad = self.segment.pad;
        let rest = self.carry_some(bytes, pad + CRC_LEN);
        if self.carried < pad + CRC_LEN {
            return Ok(rest);
        }
        self.carried = 0;
        self.phase = FpduPhase::Header;
        if self.crc {
            self.sum.update(&self.carry[..pad]);
            if self.sum.finish().to_le_bytes() != self.carry[pad..pad + CRC_LEN] {
                return Err(TerminateCause::LLP_CRC.into());
            }
        }
        if let Some(fault) = self.deferred.take() {
            return Err(*fault);
        }
        self.finish(cx, out)?;
        Ok(rest)
    }

    /// Parses the header of a segment and checks the segment.
    fn begin(&mut self, bytes: &[u8], cx: &mut PlacementContext<'_>) -> Result<(), Fault> {
        self.fpdus = self.fpdus.wrapping_add(1);
        let header = SegmentHeader::parse(bytes).map_err(|error| refuse(&error, bytes, cx.extensions))?;
        self.judge(header, bytes, cx)
    }

    /// Checks whether the connection allows a segment with this header. If so, makes this segment the current segment. `bytes` are the
    /// octets of the header.
    fn judge(&mut self, header: SegmentHeader, bytes: &[u8], cx: &mut PlacementContext<'_>) -> Result<(), Fault> {
        let ulpdu_len = usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
        let left = payload_len(bytes);
        let mut read = None;
        match &header {
            SegmentHeader::Untagged(untagged) if untagged.opcode.is_send() => self.judge_send(untagged, left, cx),
            SegmentHeader::Untagged(untagged) => {
                if untagged.opcode == Opcode::ReadRequest {
                    let request =
                        bytes.get(UNTAGGED_FPDU_HEADER_LEN..).and_then(<[u8]>::first_chunk::<READ_REQUEST_LEN>);
                    read = request.map(ReadRequest::parse);
                }
                self.control.judge(untagged, read, &mut self.queue, cx)
            }
            SegmentHeader::Tagged(tagged) => self.judge_tagged(tagged, left, cx).map(drop),
        }
        .map_err(|cause| Fault::Violation(cause, Quote::new(bytes)))?;
        self.segment = CurrentSegment { header, done: 0, left, pad: pad_len(ulpdu_len), read, revoked: false };
        Ok(())
    }

    /// Checks a segment of a Send with `len` octets of payload: the segment must be the next one in sequence, and its receive must have
    /// room for the payload.
    #[inline]
    fn judge_send(
        &mut self,
        header: &Untagged,
        len: usize,
        cx: &mut PlacementContext<'_>,
    ) -> Result<(), TerminateCause> {
        self.forecast.record_segment(forecast::PayloadKind::Send, len, header.offset == 0);
        if header.queue != SEND_QUEUE {
            return Err(TerminateCause::INVALID_QN);
        }
        if header.msn != self.queue.msn() {
            return Err(TerminateCause::INVALID_MSN);
        }
        if header.offset as usize != self.queue.placed() {
            return Err(TerminateCause::INVALID_MO);
        }
        let room = self.queue.room(&mut cx.srq).ok_or(TerminateCause::DDP_UNTAGGED_NO_BUFFER)?;
        if self.queue.placed() + len > room {
            return Err(TerminateCause::DDP_UNTAGGED_TOO_LONG);
        }
        if header.opcode.invalidates() && !cx.keys.may_invalidate(cx.scope, header.reserved_or_stag) {
            return Err(TerminateCause::RDMAP_CANNOT_INVALIDATE);
        }
        Ok(())
    }

    /// Checks a tagged segment with `len` octets of payload. Returns the memory for the payload of a Write. Returns `None` if the payload
    /// is empty or belongs to a Read Response.
    #[inline]
    fn judge_tagged<'a>(
        &mut self,
        header: &Tagged,
        len: usize,
        cx: &'a PlacementContext<'_>,
    ) -> Result<Option<Span<'a>>, TerminateCause> {
        if header.opcode == Opcode::ReadResponse {
            let begins = cx.outstanding.front().is_some_and(|read| read.done == 0);
            self.forecast.record_segment(forecast::PayloadKind::Response, len, begins);
            return judge_response(cx.outstanding.front(), header, len).map(|()| None);
        }
        self.forecast.record_segment(forecast::PayloadKind::Write, len, self.writing == 0);
        // The STag and the offset of a segment without payload must not be checked (RFC 5041 §5.2).
        if len == 0 {
            return Ok(None);
        }
        let target = cx.keys.remote(cx.scope, header.stag, header.offset, len, Access::REMOTE_WRITE);
        target.map(Some).map_err(stag::tagged)
    }

    /// Records that a Write segment with `len` octets was placed. If `last` is true, the Write is complete.
    #[inline]
    fn wrote(&mut self, len: usize, last: bool) {
        self.writing = self.writing.saturating_add(len as u32);
        if last {
            self.written = std::mem::take(&mut self.writing);
        }
    }

    /// Copies octets of the current payload to their destination. The caller has checked that the destination has room for them. `whole` is
    /// true if the octets are the payload of a complete untagged segment.
    #[inline]
    fn place(&mut self, bytes: &[u8], whole: bool, cx: &mut PlacementContext<'_>) {
        if bytes.is_empty() || self.deferred.is_some() {
            return;
        }
        match self.segment.header {
            SegmentHeader::Untagged(untagged) if untagged.opcode.is_send() => self.queue.fill(bytes),
            SegmentHeader::Untagged(_) => {
                let n = self.control.fill(self.segment.done, bytes);
                if whole {
                    self.segment.done += n;
                }
            }
            SegmentHeader::Tagged(tagged) if tagged.opcode == Opcode::ReadResponse => {
                let offset = tagged.offset.wrapping_add(self.segment.done as u64);
                match cx.keys.sink(tagged.stag, offset, bytes.len()) {
                    Some(span) => span.fill(bytes),
                    None => self.segment.revoked = true,
                }
                cx.outstanding.advance(bytes.len());
            }
            SegmentHeader::Tagged(_) if self.crc => {
                let done = self.segment.done;
                if let Some(room) = self.held.get_mut(done..done + bytes.len()) {
                    room.copy_from_slice(bytes);
                }
            }
            SegmentHeader::Tagged(tagged) => {
                let offset = tagged.offset.wrapping_add(self.segment.done as u64);
                match cx.keys.remote(cx.scope, tagged.stag, offset, bytes.len(), Access::REMOTE_WRITE) {
                    Ok(span) => span.fill(bytes),
                    Err(_) => self.segment.revoked = true,
                }
            }
        }
    }

    /// Ends the current segment. The caller has received all of it and found its CRC correct.
    #[inline]
    fn finish(&mut self, cx: &mut PlacementContext<'_>, out: &mut impl FnMut(ReceivedMessage)) -> Result<(), Fault> {
        let segment = self.segment;
        match segment.header {
            SegmentHeader::Untagged(untagged) if untagged.opcode.is_send() => self.finish_send(&untagged, cx, out)?,
            SegmentHeader::Untagged(untagged) => self.control.finish(
                &untagged,
                segment.read,
                segment.done,
                (&mut self.queue, &mut self.written),
                cx,
                out,
            )?,
            SegmentHeader::Tagged(tagged) if tagged.opcode == Opcode::ReadResponse => {
                if segment.revoked {
                    return Err(Fault::WorkRequest(WcStatus::LocalProtectionError));
                }
                if tagged.last {
                    cx.outstanding.complete();
                }
            }
            SegmentHeader::Tagged(tagged) => self.finish_write(&tagged, cx)?,
        }
        self.seen = true;
        Ok(())
    }

    /// Ends a segment of a Send. If it is the last segment of the Send, completes the receive.
    #[inline]
    fn finish_send(
        &mut self,
        header: &Untagged,
        cx: &mut PlacementContext<'_>,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<(), Fault> {
        self.seen = true;
        if !header.last {
            return Ok(());
        }
        let mut invalidated = None;
        if header.opcode.invalidates() {
            let stag = header.reserved_or_stag;
            if !cx.keys.invalidate_remotely(cx.scope, stag) {
                return Err(violation(TerminateCause::RDMAP_CANNOT_INVALIDATE, header));
            }
            invalidated = Some(stag);
        }
        self.forecast.record_message(self.queue.placed());
        self.queue.end_message(None, invalidated, None, out);
        Ok(())
    }

    #[inline(never)]
    fn finish_write(&mut self, header: &Tagged, cx: &mut PlacementContext<'_>) -> Result<(), Fault> {
        let done = self.segment.done;
        if self.crc && done > 0 {
            let held = self.held.get(..done).unwrap_or_default();
            match cx.keys.remote(cx.scope, header.stag, header.offset, done, Access::REMOTE_WRITE) {
                Ok(span) => span.fill(held),
                Err(_) => self.segment.revoked = true,
            }
        }
        if self.segment.revoked {
            let mut bytes = [0; TAGGED_FPDU_HEADER_LEN];
            header.emit_into((TAGGED_FPDU_HEADER_LEN - LENGTH_LEN + done) as u16, &mut bytes);
            return Err(Fault::Violation(TerminateCause::DDP_TAGGED_INVALID_STAG, Quote::new(&bytes)));
        }
        self.wrote(done, header.last);
        Ok(())
    }
}

/// Returns the length of the payload, computed from the ULPDU_Length. `bytes` is the complete
/// header.
#[inline]
fn payload_len(bytes: &[u8]) -> usize {
    let ulpdu_len = bytes.first_chunk().map_or(0, |len| usize::from(u16::from_be_bytes(*len)));
    (LENGTH_LEN + ulpdu_len).saturating_sub(bytes.len())
}
