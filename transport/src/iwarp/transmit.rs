//! The transmit side of a queue pair: the send queue is cut into FPDUs, and they are handed to TCP.
//!
//! Headers, trailers and small payloads are written one behind the other into a control buffer, so that many small
//! messages are one piece of a send call. Larger payloads are never copied.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use super::startup::ReadyToReceive;
use super::wire::ddp::{
    MAX_ULPDU_LEN, TAGGED_FPDU_HEADER_LEN, TAGGED_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN, UNTAGGED_HEADER_LEN,
};
use super::wire::mpa::pad_len;
use super::wire::rdmap::{MAX_TERMINATE_LEN, READ_REQUEST_LEN, READ_REQUEST_QUEUE, SEND_QUEUE};
use super::wire::{Crc32c, Opcode, Quote, ReadRequest, Tagged, Terminate, TerminateCause, Untagged, crc32c};
use crate::mem::Sge;
use crate::wr::{SendFlags, SgeList};

/// Payloads up to this length are copied next to their header.
const COPY_MAX: usize = 256;
/// Largest inline send: its payload is always small enough to be copied into the control buffer.
pub(crate) const MAX_INLINE: usize = COPY_MAX;
/// Pieces of one send call.
const MAX_PIECES: usize = 64;
/// Framed bytes that are not sent yet, and how many of them may be in the control buffer.
const MAX_BATCH: usize = 256 * 1024;
const MAX_CONTROL: usize = 64 * 1024;
/// Pieces one FPDU can add: every entry of a work request and a header and trailer.
const PIECES_PER_FPDU: usize = crate::wr::MAX_SGE + 2;
/// Smallest segment size believed (RFC 5044 §4.5).
const MIN_SEGMENT: usize = 128;

/// A piece of the stream.
#[derive(Clone, Copy, Debug)]
enum Piece {
    Control { start: usize, end: usize },
    Memory(Sge),
}

/// A posted send.
#[derive(Debug)]
struct Entry {
    wr_id: u64,
    signaled: bool,
    opcode: Opcode,
    len: usize,
    sges: SgeList,
    /// Where its payload is in the inline buffer.
    inline: Option<usize>,
    /// Stream offset behind its last byte, once framed.
    end: u64,
}

#[derive(Debug)]
pub(crate) struct Transmitter {
    crc: bool,
    /// Payload of one untagged segment.
    segment: usize,
    /// Nothing may be sent yet.
    held: bool,
    queue: VecDeque<Entry>,
    /// Entries at the front of the queue that are framed, and bytes framed of the one behind them.
    framed: usize,
    framed_part: usize,
    msn: u32,
    inline: Vec<u8>,
    inline_max: usize,
    inline_next: usize,
    inline_slots: usize,
    /// Answers owed to Reads of nothing.
    owed: VecDeque<(u32, u64)>,
    owed_max: usize,
    control: Vec<u8>,
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that are sent.
    head: usize,
    framed_bytes: u64,
    sent_bytes: u64,
}

/// How a transmission ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Nothing is left.
    All,
    /// TCP takes no more: a writable edge will come.
    Blocked,
}

impl Transmitter {
    pub(crate) fn new(depth: usize, inline_max: usize) -> Self {
        Self {
            crc: true,
            segment: 0,
            held: true,
            queue: VecDeque::with_capacity(depth),
            framed: 0,
            framed_part: 0,
            msn: 1,
            inline: vec![0; if inline_max > 0 { depth * inline_max } else { 0 }],
            inline_max,
            inline_next: 0,
            inline_slots: depth,
            owed: VecDeque::new(),
            owed_max: 0,
            control: Vec::new(),
            pieces: VecDeque::new(),
            head: 0,
            framed_bytes: 0,
            sent_bytes: 0,
        }
    }

    /// Starts the stream, with an RTR if one is due.
    pub(crate) fn establish(&mut self, crc: bool, ird: u16, max_segment: usize) {
        self.crc = crc;
        // siw rounds the depth up to a power of two, and exceeds ours by that.
        self.owed_max = usize::from(ird.max(1)).next_power_of_two() + 1;
        self.set_max_segment(max_segment);
    }

    /// MULPDU = EMSS - 6 - EMSS mod 4 (RFC 5044 §4.5), less the header, to a multiple of 8 so that no pad is needed.
    pub(crate) fn set_max_segment(&mut self, emss: usize) {
        let emss = emss.max(MIN_SEGMENT);
        let mulpdu = (emss - 6 - emss % 4).min(MAX_ULPDU_LEN);
        self.segment = (mulpdu - UNTAGGED_HEADER_LEN) & !7;
    }

    /// Lets queued sends go.
    pub(crate) fn release(&mut self) {
        self.held = false;
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held
    }

    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Whether a call of [`Transmitter::transmit`] could do anything.
    pub(crate) fn has_work(&self) -> bool {
        !self.pieces.is_empty() || !self.owed.is_empty() || (!self.held && self.framed < self.queue.len())
    }

    /// Queues a send. The caller has checked that there is room and that an inline payload fits.
    pub(crate) fn post(&mut self, wr_id: u64, opcode: Opcode, sges: &SgeList, flags: SendFlags) {
        let len = sges.total_len();
        let inline = flags.contains(SendFlags::INLINE).then(|| {
            let start = self.inline_next * self.inline_max;
            self.inline_next = (self.inline_next + 1) % self.inline_slots.max(1);
            let mut room = self.inline.get_mut(start..start + len).unwrap_or_default();
            for sge in sges.as_slice() {
                let (now, rest) = room.split_at_mut(sge.len().min(room.len()));
                now.copy_from_slice(&sge.bytes()[..now.len()]);
                room = rest;
            }
            start
        });
        let sges = if inline.is_some() { SgeList::default() } else { *sges };
        let signaled = flags.contains(SendFlags::SIGNALED);
        self.queue.push_back(Entry { wr_id, signaled, opcode, len, sges, inline, end: 0 });
    }

    /// Owes an answer to a Read of nothing.
    pub(crate) fn owe(&mut self, sink_stag: u32, sink_offset: u64) -> Result<(), TerminateCause> {
        if self.owed.len() >= self.owed_max {
            return Err(TerminateCause::RDMAP_STREAM_CATASTROPHIC);
        }
        self.owed.push_back((sink_stag, sink_offset));
        Ok(())
    }

    /// Puts the initiator's first message into the stream. STag 1, as siw: some adapters refuse 0.
    pub(crate) fn ready_to_receive(&mut self, rtr: ReadyToReceive) {
        match rtr {
            ReadyToReceive::Write => self.tagged(&Tagged { last: true, opcode: Opcode::Write, stag: 1, offset: 0 }),
            ReadyToReceive::Read => {
                let read = ReadRequest { sink_stag: 1, sink_offset: 0, size: 0, source_stag: 1, source_offset: 0 };
                let header = Untagged {
                    last: true,
                    opcode: Opcode::ReadRequest,
                    reserved_or_stag: 0,
                    queue: READ_REQUEST_QUEUE,
                    msn: 1,
                    offset: 0,
                };
                let start = self.control.len();
                untagged(&mut self.control, self.crc, &header, &read.emit());
                self.extend_control(start);
            }
            // We never offer it.
            ReadyToReceive::Send => {}
        }
    }

    /// A tagged segment without payload.
    fn tagged(&mut self, header: &Tagged) {
        let start = self.control.len();
        let mut bytes = [0; TAGGED_FPDU_HEADER_LEN];
        header.emit_into(TAGGED_HEADER_LEN as u16, &mut bytes);
        self.control.extend_from_slice(&bytes);
        seal(&mut self.control, start, self.crc);
        self.extend_control(start);
    }

    /// Counts the control bytes from `start` on as part of the stream.
    #[inline]
    fn extend_control(&mut self, start: usize) {
        let len = self.control.len();
        self.framed_bytes += (len - start) as u64;
        match self.pieces.back_mut() {
            Some(Piece::Control { end, .. }) if *end == start => *end = len,
            _ => self.pieces.push_back(Piece::Control { start, end: len }),
        }
    }

    fn unsent(&self) -> usize {
        (self.framed_bytes - self.sent_bytes) as usize
    }

    /// Frames what fits into a batch.
    fn frame(&mut self) {
        while self.unsent() < MAX_BATCH
            && self.control.len() < MAX_CONTROL
            && self.pieces.len() + PIECES_PER_FPDU <= MAX_PIECES
        {
            if let Some((stag, offset)) = self.owed.pop_front() {
                self.tagged(&Tagged { last: true, opcode: Opcode::ReadResponse, stag, offset });
            } else if self.held || !self.frame_send() {
                break;
            }
        }
    }

    /// Frames one segment of the send queue.
    #[inline]
    fn frame_send(&mut self) -> bool {
        let Some(entry) = self.queue.get(self.framed) else { return false };
        let (offset, opcode) = (self.framed_part, entry.opcode);
        let len = (entry.len - offset).min(self.segment);
        let last = offset + len == entry.len;
        let header =
            Untagged { last, opcode, reserved_or_stag: 0, queue: SEND_QUEUE, msn: self.msn, offset: offset as u32 };
        let ulpdu_len = UNTAGGED_HEADER_LEN + len;
        let start = self.control.len();
        let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
        header.emit_into(ulpdu_len as u16, &mut bytes);
        self.control.extend_from_slice(&bytes);
        if let Some(inline) = entry.inline {
            let from = inline + offset;
            self.control.extend_from_slice(self.inline.get(from..from + len).unwrap_or_default());
            seal(&mut self.control, start, self.crc);
            self.extend_control(start);
        } else if len <= COPY_MAX {
            parts(&entry.sges, offset, len, |part| self.control.extend_from_slice(part.bytes()));
            seal(&mut self.control, start, self.crc);
            self.extend_control(start);
        } else {
            let sges = entry.sges;
            self.extend_control(start);
            let mut sum = Crc32c::new();
            if self.crc {
                sum.update(&bytes);
            }
            parts(&sges, offset, len, |part| {
                if self.crc {
                    sum.update(part.bytes());
                }
                self.pieces.push_back(Piece::Memory(part));
            });
            self.framed_bytes += len as u64;
            let pad = &[0; 3][..pad_len(ulpdu_len)];
            sum.update(pad);
            let trailer = self.control.len();
            self.control.extend_from_slice(pad);
            self.control.extend_from_slice(&if self.crc { sum.finish() } else { 0 }.to_le_bytes());
            self.extend_control(trailer);
        }
        self.framed_part = offset + len;
        if last {
            if let Some(entry) = self.queue.get_mut(self.framed) {
                entry.end = self.framed_bytes;
            }
            self.framed += 1;
            self.framed_part = 0;
            self.msn = self.msn.wrapping_add(1);
        }
        true
    }

    /// Frames and hands over until nothing is left or TCP takes no more; `done` gets every send that TCP has taken
    /// whole, with whether it was signaled.
    pub(crate) fn transmit(
        &mut self,
        send: &mut impl FnMut(&[IoSlice<'_>]) -> io::Result<usize>,
        done: &mut impl FnMut(u64, bool),
    ) -> io::Result<Sent> {
        loop {
            self.frame();
            if self.pieces.is_empty() {
                return Ok(Sent::All);
            }
            let result = if self.pieces.len() == 1 {
                send(&[IoSlice::new(self.piece(0))])
            } else {
                let mut slices = [IoSlice::new(&[]); MAX_PIECES];
                let count = self.pieces.len().min(MAX_PIECES);
                for (index, slice) in slices[..count].iter_mut().enumerate() {
                    *slice = IoSlice::new(self.piece(index));
                }
                send(&slices[..count])
            };
            match result {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    let all = n >= self.unsent();
                    self.advance(n, done);
                    if !all {
                        return Ok(Sent::Blocked);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Sent::Blocked),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The unsent bytes of a piece.
    #[inline]
    fn piece(&self, index: usize) -> &[u8] {
        let bytes = match self.pieces.get(index) {
            Some(Piece::Control { start, end }) => self.control.get(*start..*end).unwrap_or_default(),
            Some(Piece::Memory(sge)) => sge.bytes(),
            None => &[],
        };
        if index == 0 { bytes.get(self.head..).unwrap_or_default() } else { bytes }
    }

    fn advance(&mut self, n: usize, done: &mut impl FnMut(u64, bool)) {
        self.sent_bytes += n as u64;
        if self.sent_bytes == self.framed_bytes {
            self.pieces.clear();
            self.control.clear();
            self.head = 0;
        } else {
            let mut left = n;
            while left > 0 {
                let len = self.piece(0).len();
                if left < len {
                    self.head += left;
                    break;
                }
                left -= len;
                self.head = 0;
                if self.pieces.pop_front().is_none() {
                    break;
                }
            }
        }
        while self.framed > 0
            && let Some(entry) = self.queue.front()
            && entry.end <= self.sent_bytes
        {
            done(entry.wr_id, entry.signaled);
            self.queue.pop_front();
            self.framed -= 1;
        }
    }

    /// The next send that TCP has not taken whole; call after [`Transmitter::rest`].
    pub(crate) fn pop_flushed(&mut self) -> Option<u64> {
        self.framed = 0;
        self.framed_part = 0;
        self.queue.pop_front().map(|entry| entry.wr_id)
    }

    /// Ends the stream behind the last FPDU begun: a copy of what is framed and not sent, and then a Terminate.
    pub(crate) fn rest(&mut self, terminate: Option<(TerminateCause, Option<Quote>)>) -> Vec<u8> {
        let mut rest = Vec::new();
        for index in 0..self.pieces.len() {
            rest.extend_from_slice(self.piece(index));
        }
        self.pieces.clear();
        self.owed.clear();
        self.control = Vec::new();
        self.head = 0;
        self.sent_bytes = self.framed_bytes;
        if let Some((cause, quote)) = terminate {
            append_terminate(&mut rest, self.crc, cause, quote);
        }
        rest
    }
}

/// Appends a Terminate message.
pub(crate) fn append_terminate(out: &mut Vec<u8>, crc: bool, cause: TerminateCause, quote: Option<Quote>) {
    let mut payload = [0; MAX_TERMINATE_LEN];
    let len = Terminate::new(cause, quote).emit_into(&mut payload);
    untagged(out, crc, &Untagged::TERMINATE, &payload[..len]);
}

/// Appends an untagged segment with a payload that is not user memory.
fn untagged(out: &mut Vec<u8>, crc: bool, header: &Untagged, payload: &[u8]) {
    debug_assert!(payload.len() <= MAX_TERMINATE_LEN.max(READ_REQUEST_LEN));
    let start = out.len();
    let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
    header.emit_into((UNTAGGED_HEADER_LEN + payload.len()) as u16, &mut bytes);
    out.extend_from_slice(&bytes);
    out.extend_from_slice(payload);
    seal(out, start, crc);
}

/// Appends pad and CRC to the FPDU that begins at `start` and is whole but for them. Without CRC the field is 0.
#[inline]
fn seal(out: &mut Vec<u8>, start: usize, crc: bool) {
    let pad = (out.len() - start).wrapping_neg() & 3;
    out.extend_from_slice(&[0; 3][..pad]);
    let sum = if crc { crc32c(&out[start..]) } else { 0 };
    out.extend_from_slice(&sum.to_le_bytes());
}

/// The parts of `sges` that hold `len` bytes from `offset` on.
#[inline]
fn parts(sges: &SgeList, mut offset: usize, mut len: usize, mut each: impl FnMut(Sge)) {
    for sge in sges.as_slice() {
        if offset >= sge.len() {
            offset -= sge.len();
            continue;
        }
        let part = sge.part(offset, len);
        offset = 0;
        len -= part.len();
        each(part);
        if len == 0 {
            return;
        }
    }
}
