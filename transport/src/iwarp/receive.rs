//! The receive side of a queue pair: the byte stream is cut into FPDUs, each is checked and placed.
//!
//! Payload goes to the posted receive as it arrives; what it holds means nothing before its completion, and that
//! waits for the CRC of every segment. At most one header or trailer is kept between calls.

use std::collections::VecDeque;

use super::wire::ddp::{READ_REQUEST_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use super::wire::mpa::{CRC_LEN, LENGTH_LEN, fpdu_len, pad_len};
use super::wire::rdmap::{MAX_TERMINATE_LEN, READ_REQUEST_LEN, READ_REQUEST_QUEUE, SEND_QUEUE, TERMINATE_QUEUE};
use super::wire::{
    Crc32c, Header, HeaderError, Opcode, Quote, ReadRequest, Tagged, Terminate, TerminateCause, Untagged, crc32c,
    header_len,
};
use crate::mem::Sge;
use crate::wr::RecvWr;

/// Payload that is still to come is received in place from this length on.
pub(crate) const DIRECT_MIN: usize = 4096;

/// Why a stream cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The peer broke the protocol: it is told so, with the headers it is about.
    Violation(TerminateCause, Option<Quote>),
    /// The peer says that we did.
    Terminated(String),
}

impl From<TerminateCause> for Fault {
    fn from(cause: TerminateCause) -> Self {
        Self::Violation(cause, None)
    }
}

/// What came in, whole and checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// A message is in the receive with this id.
    Message { wr_id: u64, len: u32 },
    /// The peer reads nothing, and awaits an answer that says so.
    EmptyRead { sink_stag: u32, sink_offset: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Header,
    Payload,
    Trailer,
}

/// The FPDU being received.
#[derive(Clone, Copy, Debug)]
struct Segment {
    header: Header,
    /// Payload still to come, and then pad.
    left: usize,
    pad: usize,
    read: Option<ReadRequest>,
}

#[derive(Debug)]
pub(crate) struct Receiver {
    crc: bool,
    phase: Phase,
    /// An incomplete header or trailer.
    carry: [u8; READ_REQUEST_FPDU_HEADER_LEN],
    carried: usize,
    sum: Crc32c,
    segment: Segment,
    /// A Terminate's payload.
    terminate: [u8; MAX_TERMINATE_LEN],
    terminate_len: usize,
    posted: VecDeque<RecvWr>,
    /// Of the message in progress, which goes to the front of `posted`: bytes placed, and where the next goes.
    placed: usize,
    entry: usize,
    entry_offset: usize,
    send_msn: u32,
    read_msn: u32,
    /// Responses to our zero-length Reads that are still to come.
    pub(crate) empty_responses: u32,
    /// A valid FPDU has come.
    seen: bool,
}

impl Receiver {
    pub(crate) fn new(depth: usize) -> Self {
        let header = Header::Untagged(Untagged::TERMINATE);
        Self {
            crc: true,
            phase: Phase::Header,
            carry: [0; READ_REQUEST_FPDU_HEADER_LEN],
            carried: 0,
            sum: Crc32c::new(),
            segment: Segment { header, left: 0, pad: 0, read: None },
            terminate: [0; MAX_TERMINATE_LEN],
            terminate_len: 0,
            posted: VecDeque::with_capacity(depth),
            placed: 0,
            entry: 0,
            entry_offset: 0,
            send_msn: 1,
            read_msn: 1,
            empty_responses: 0,
            seen: false,
        }
    }

    pub(crate) fn establish(&mut self, crc: bool) {
        self.crc = crc;
    }

    pub(crate) fn has_seen(&self) -> bool {
        self.seen
    }

    pub(crate) fn posted_len(&self) -> usize {
        self.posted.len()
    }

    pub(crate) fn post(&mut self, wr: RecvWr) {
        self.posted.push_back(wr);
    }

    /// The next receive that will not be filled.
    pub(crate) fn pop_flushed(&mut self) -> Option<u64> {
        self.posted.pop_front().map(|wr| wr.wr_id)
    }

    /// Whether the stream could end here without loss.
    #[cfg(test)]
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.phase == Phase::Header && self.carried == 0 && self.placed == 0
    }

    /// Memory where the next bytes of the stream belong, if that is worth a separate entry of a receive call.
    #[inline]
    pub(crate) fn direct(&self) -> Option<Sge> {
        if self.phase != Phase::Payload || self.segment.left < DIRECT_MIN || !self.segment.header.opcode().is_send() {
            return None;
        }
        let sge = self.posted.front()?.sges.as_slice().get(self.entry)?.part(self.entry_offset, self.segment.left);
        (sge.len() >= DIRECT_MIN).then_some(sge)
    }

    /// Takes note of `n` bytes received into [`Receiver::direct`].
    pub(crate) fn filled(&mut self, n: usize) {
        let Some(sge) = self.direct() else { return };
        let n = n.min(sge.len());
        if self.crc {
            self.sum.update(sge.part(0, n).bytes());
        }
        self.entry_offset += n;
        self.placed += n;
        self.take_payload(n);
    }

    /// Takes the next bytes of the stream.
    pub(crate) fn input(
        &mut self,
        mut bytes: &[u8],
        out: &mut impl FnMut(Received) -> Result<(), TerminateCause>,
    ) -> Result<(), Fault> {
        while !bytes.is_empty() {
            bytes = match self.phase {
                Phase::Header if self.carried == 0 => self.whole_or_header(bytes, out)?,
                Phase::Header => self.carried_header(bytes)?,
                Phase::Payload => {
                    let (now, rest) = bytes.split_at(bytes.len().min(self.segment.left));
                    if self.crc {
                        self.sum.update(now);
                    }
                    self.place(now);
                    self.take_payload(now.len());
                    rest
                }
                Phase::Trailer => self.trailer(bytes, out)?,
            };
        }
        Ok(())
    }

    /// A header at the start of `bytes`, in the best case with its whole FPDU.
    #[inline]
    fn whole_or_header<'a>(
        &mut self,
        bytes: &'a [u8],
        out: &mut impl FnMut(Received) -> Result<(), TerminateCause>,
    ) -> Result<&'a [u8], Fault> {
        let Some(prefix) = bytes.first_chunk::<4>() else { return self.carried_header(bytes) };
        let ulpdu_len = usize::from(u16::from_be_bytes([prefix[0], prefix[1]]));
        if let Some((fpdu, rest)) = bytes.split_at_checked(fpdu_len(ulpdu_len)) {
            let (body, crc) = fpdu.split_at(fpdu.len() - CRC_LEN);
            if self.crc && crc32c(body).to_le_bytes() != crc {
                return Err(TerminateCause::LLP_CRC.into());
            }
            let len = header_len(prefix).map_err(|error| refuse(&error, body))?;
            let (header, rest_of_body) = body.split_at_checked(len).ok_or(TerminateCause::LLP_FPDU_LENGTH)?;
            self.begin(header)?;
            self.place(&rest_of_body[..self.segment.left.min(rest_of_body.len())]);
            self.finish(out)?;
            return Ok(rest);
        }
        let len = header_len(prefix).map_err(|error| refuse(&error, bytes))?;
        let Some((header, rest)) = bytes.split_at_checked(len) else { return self.carried_header(bytes) };
        self.open(header)?;
        Ok(rest)
    }

    /// A header that arrives in parts.
    fn carried_header<'a>(&mut self, mut bytes: &'a [u8]) -> Result<&'a [u8], Fault> {
        loop {
            let prefix = [self.carry[0], self.carry[1], self.carry[2], self.carry[3]];
            let need = if self.carried < prefix.len() {
                prefix.len()
            } else {
                header_len(&prefix).map_err(|error| refuse(&error, &self.carry[..self.carried]))?
            };
            if self.carried >= need {
                let header = self.carry;
                self.carried = 0;
                self.open(header.get(..need).unwrap_or(&header))?;
                return Ok(bytes);
            }
            if bytes.is_empty() {
                return Ok(bytes);
            }
            bytes = self.carry_some(bytes, need);
        }
    }

    /// Moves bytes to the carry until it holds `need`.
    fn carry_some<'a>(&mut self, bytes: &'a [u8], need: usize) -> &'a [u8] {
        let need = need.min(self.carry.len());
        let (now, rest) = bytes.split_at(bytes.len().min(need.saturating_sub(self.carried)));
        self.carry[self.carried..self.carried + now.len()].copy_from_slice(now);
        self.carried += now.len();
        rest
    }

    /// Begins a segment whose rest has not arrived yet.
    fn open(&mut self, header: &[u8]) -> Result<(), Fault> {
        self.begin(header)?;
        if self.crc {
            self.sum = Crc32c::new();
            self.sum.update(header);
        }
        self.phase = if self.segment.left > 0 { Phase::Payload } else { Phase::Trailer };
        Ok(())
    }

    fn take_payload(&mut self, n: usize) {
        self.segment.left = self.segment.left.saturating_sub(n);
        if self.segment.left == 0 {
            self.phase = Phase::Trailer;
        }
    }

    /// Pad and CRC.
    fn trailer<'a>(
        &mut self,
        bytes: &'a [u8],
        out: &mut impl FnMut(Received) -> Result<(), TerminateCause>,
    ) -> Result<&'a [u8], Fault> {
        let pad = self.segment.pad;
        let rest = self.carry_some(bytes, pad + CRC_LEN);
        if self.carried < pad + CRC_LEN {
            return Ok(rest);
        }
        self.carried = 0;
        self.phase = Phase::Header;
        if self.crc {
            self.sum.update(&self.carry[..pad]);
            if self.sum.finish().to_le_bytes() != self.carry[pad..pad + CRC_LEN] {
                return Err(TerminateCause::LLP_CRC.into());
            }
        }
        self.finish(out)?;
        Ok(rest)
    }

    /// Judges a segment by its header and finds the place for its payload.
    #[inline]
    fn begin(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        let header = Header::parse(bytes).map_err(|error| refuse(&error, bytes))?;
        let ulpdu_len = usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
        let left = (LENGTH_LEN + ulpdu_len).checked_sub(bytes.len()).ok_or(TerminateCause::LLP_FPDU_LENGTH)?;
        let read = match bytes.get(UNTAGGED_FPDU_HEADER_LEN..).and_then(<[u8]>::first_chunk::<READ_REQUEST_LEN>) {
            Some(request) if header.opcode() == Opcode::ReadRequest => Some(ReadRequest::parse(request)),
            _ => None,
        };
        match &header {
            Header::Untagged(untagged) if untagged.opcode.is_send() => self.judge_send(untagged, left),
            Header::Untagged(untagged) => self.judge_control(untagged, read),
            Header::Tagged(tagged) => self.judge_tagged(tagged, left),
        }
        .map_err(|cause| Fault::Violation(cause, Quote::new(bytes)))?;
        self.segment = Segment { header, left, pad: pad_len(ulpdu_len), read };
        Ok(())
    }

    #[inline]
    fn judge_send(&mut self, header: &Untagged, len: usize) -> Result<(), TerminateCause> {
        if header.queue != SEND_QUEUE {
            return Err(TerminateCause::INVALID_QN);
        }
        if header.msn != self.send_msn {
            return Err(TerminateCause::INVALID_MSN);
        }
        if header.offset as usize != self.placed {
            return Err(TerminateCause::INVALID_MO);
        }
        let Some(wr) = self.posted.front() else { return Err(TerminateCause::DDP_UNTAGGED_NO_BUFFER) };
        if self.placed + len > wr.sges.total_len().min(u32::MAX as usize) {
            return Err(TerminateCause::DDP_UNTAGGED_TOO_LONG);
        }
        if header.opcode.invalidates() {
            return Err(TerminateCause::RDMAP_CANNOT_INVALIDATE);
        }
        Ok(())
    }

    fn judge_control(&mut self, header: &Untagged, read: Option<ReadRequest>) -> Result<(), TerminateCause> {
        match header.opcode {
            Opcode::ReadRequest if header.queue != READ_REQUEST_QUEUE => Err(TerminateCause::INVALID_QN),
            Opcode::ReadRequest if header.msn != self.read_msn => Err(TerminateCause::INVALID_MSN),
            Opcode::ReadRequest if header.offset != 0 => Err(TerminateCause::INVALID_MO),
            // No region is open to the peer.
            Opcode::ReadRequest if read.is_none_or(|read| read.size > 0) => Err(TerminateCause::RDMAP_INVALID_STAG),
            Opcode::ReadRequest => Ok(()),
            Opcode::Terminate if header.queue != TERMINATE_QUEUE => Err(TerminateCause::INVALID_QN),
            Opcode::Terminate => {
                self.terminate_len = 0;
                Ok(())
            }
            _ => Err(TerminateCause::RDMAP_OPCODE),
        }
    }

    fn judge_tagged(&mut self, header: &Tagged, len: usize) -> Result<(), TerminateCause> {
        match header.opcode {
            // Nothing about a segment without payload may be checked (RFC 5041 §5.2).
            Opcode::Write if len == 0 => Ok(()),
            Opcode::Write => Err(TerminateCause::DDP_TAGGED_INVALID_STAG),
            Opcode::ReadResponse if len == 0 && self.empty_responses > 0 => Ok(()),
            _ => Err(TerminateCause::DDP_LOCAL_CATASTROPHIC),
        }
    }

    /// Puts payload where the segment's header said; there is room, as that was judged.
    #[inline]
    fn place(&mut self, mut bytes: &[u8]) {
        if !self.segment.header.opcode().is_send() {
            let room = self.terminate.get_mut(self.terminate_len..).unwrap_or_default();
            let n = bytes.len().min(room.len());
            room[..n].copy_from_slice(&bytes[..n]);
            self.terminate_len += n;
            return;
        }
        let Some(wr) = self.posted.front() else { return };
        while !bytes.is_empty() {
            let Some(sge) = wr.sges.as_slice().get(self.entry) else { return };
            let mut room = sge.part(self.entry_offset, bytes.len());
            let (now, rest) = bytes.split_at(room.len());
            room.bytes_mut().copy_from_slice(now);
            self.placed += now.len();
            self.entry_offset += now.len();
            bytes = rest;
            if self.entry_offset == sge.len() {
                self.entry += 1;
                self.entry_offset = 0;
            }
        }
    }

    /// Ends a segment that arrived whole and undamaged.
    #[inline]
    fn finish(&mut self, out: &mut impl FnMut(Received) -> Result<(), TerminateCause>) -> Result<(), Fault> {
        let segment = self.segment;
        self.seen = true;
        match segment.header.opcode() {
            opcode if opcode.is_send() => {
                if segment.header.last()
                    && let Some(wr) = self.posted.pop_front()
                {
                    let len = self.placed as u32;
                    (self.placed, self.entry, self.entry_offset) = (0, 0, 0);
                    self.send_msn = self.send_msn.wrapping_add(1);
                    out(Received::Message { wr_id: wr.wr_id, len })?;
                }
            }
            Opcode::ReadRequest => {
                self.read_msn = self.read_msn.wrapping_add(1);
                if let Some(ReadRequest { sink_stag, sink_offset, .. }) = segment.read {
                    out(Received::EmptyRead { sink_stag, sink_offset })?;
                }
            }
            Opcode::ReadResponse => self.empty_responses = self.empty_responses.saturating_sub(1),
            Opcode::Terminate => {
                let payload = self.terminate.get(..self.terminate_len).unwrap_or_default();
                let what = Terminate::parse(payload).map_or_else(|| "no reason given".into(), |t| t.to_string());
                return Err(Fault::Terminated(what));
            }
            _ => {}
        }
        Ok(())
    }
}

/// The fault of a header that cannot be read.
fn refuse(error: &HeaderError, bytes: &[u8]) -> Fault {
    let extension = match error {
        HeaderError::TooShort { opcode: Some(opcode), .. } | HeaderError::TooLong { opcode, .. } => {
            opcode.is_extension()
        }
        _ => false,
    };
    let cause = if extension { TerminateCause::RDMAP_OPCODE } else { error.cause() };
    Fault::Violation(cause, Quote::new(bytes))
}
