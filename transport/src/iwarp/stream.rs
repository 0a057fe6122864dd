//! The outgoing stream: FPDUs that are framed and not yet handed to TCP.
//!
//! Headers, trailers and small payloads are written consecutively into a control buffer, so that many small messages are one slice of a
//! send call. Larger payloads of sends and writes are sent from their own memory, unless the peer requires markers, or others may change
//! the payload and there is a CRC.
//!
//! The memory of a region is used within one call of the transmitter only, because it may be revoked afterwards. The part that TCP has not
//! accepted by then is copied.

use std::collections::VecDeque;
use std::io;

use super::markers;
use super::wire::ddp::UNTAGGED_FPDU_HEADER_LEN;
use super::wire::mpa::CRC_LEN;
use super::wire::opcode::UNTAGGED_HEADER_LEN;
use super::wire::terminate::MAX_TERMINATE_LEN;
use super::wire::{Crc32c, Quote, Terminate, TerminateCause, Untagged, crc32c};
use crate::mem::{MAX_SLICES, SendSlice, Sge, Span, frame};
use crate::mr::Access;
use crate::slab::Key;
use crate::soft::keys::KeyTable;
use crate::wr::{MAX_SGE, SgeList};

/// The largest number of bytes that are framed and not sent, in total and in the control buffer.
const MAX_BATCH: usize = 512 * 1024;
const MAX_CONTROL: usize = 128 * 1024;
/// The largest number of pieces that one FPDU adds: a header, the entries of a work request, and a trailer.
const PIECES_PER_FPDU: usize = MAX_SGE + 2;

/// A piece of the stream.
#[derive(Clone, Copy, Debug)]
enum Piece {
    Control {
        start: usize,
        end: usize,
    },
    Memory(Sge),
    /// Memory of a region that the peer reads.
    Region {
        stag: u32,
        offset: u64,
        len: usize,
    },
}

/// The regions, and the connection that uses them.
pub(crate) type Regions<'a> = (&'a KeyTable, Key);

impl Piece {
    fn len(&self) -> usize {
        match self {
            Self::Control { start, end } => end - start,
            Self::Memory(sge) => sge.len(),
            Self::Region { len, .. } => *len,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Stream {
    crc: bool,
    markers: bool,
    control: Vec<u8>,
    /// Buffer for an FPDU before its markers are inserted.
    plain: Vec<u8>,
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that TCP has accepted.
    head: usize,
    framed: u64,
    sent: u64,
}

impl Stream {
    pub(crate) fn new(crc: bool, markers: bool) -> Self {
        Self {
            crc,
            markers,
            control: Vec::new(),
            plain: Vec::new(),
            pieces: VecDeque::new(),
            head: 0,
            framed: 0,
            sent: 0,
        }
    }

    /// Returns the number of bytes framed since the start of the stream.
    #[inline]
    pub(crate) fn framed(&self) -> u64 {
        self.framed
    }

    #[inline]
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    pub(crate) fn has_markers(&self) -> bool {
        self.markers
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    #[inline]
    fn unsent(&self) -> usize {
        (self.framed - self.sent) as usize
    }

    /// Returns true if this batch has room for one more FPDU.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.unsent() < MAX_BATCH
            && self.control.len() < MAX_CONTROL
            && self.pieces.len() + PIECES_PER_FPDU <= MAX_SLICES
    }

    /// Begins an FPDU that is copied as a whole; [`Stream::seal`] ends it. Returns its offset in the control buffer.
    #[inline]
    pub(crate) fn begin(&mut self, header: &[u8]) -> usize {
        let start = self.control.len();
        self.control.extend_from_slice(header);
        start
    }

    #[inline]
    pub(crate) fn copy(&mut self, bytes: &[u8]) {
        self.control.extend_from_slice(bytes);
    }

    /// Copies an entry of a work request.
    #[inline]
    pub(crate) fn copy_entry(&mut self, entry: &Sge) {
        entry.append_to(&mut self.control);
    }

    /// Adds an FPDU of a header and a copy of an entry's bytes.
    #[inline]
    pub(crate) fn small_entry<const N: usize>(&mut self, header: &[u8; N], entry: &Sge) {
        let (start, pad) = (self.control.len(), (N + entry.len()).wrapping_neg() & 3);
        frame::append_entry(&mut self.control, header, entry, pad + CRC_LEN);
        self.close_copied(start);
    }

    /// Adds an FPDU of a header and a copy of `bytes`.
    #[inline]
    pub(crate) fn small<const N: usize>(&mut self, header: &[u8; N], bytes: &[u8]) {
        let (start, pad) = (self.control.len(), (N + bytes.len()).wrapping_neg() & 3);
        frame::append_bytes(&mut self.control, header, bytes, pad + CRC_LEN);
        self.close_copied(start);
    }

    /// Ends an FPDU that was copied as a whole to the end of the control buffer, from `start` on, with zeros for its CRC.
    #[inline]
    fn close_copied(&mut self, start: usize) {
        let end = self.control.len() - CRC_LEN;
        if self.markers {
            self.control.truncate(end);
            return self.seal(start);
        }
        if self.crc {
            let sum = crc32c(&self.control[start..end]);
            self.control[end..].copy_from_slice(&sum.to_le_bytes());
        }
        self.extend_control(start);
    }

    /// Copies memory of a region. Its owner may write it at any time, so the CRC is computed over the copy.
    #[inline]
    pub(crate) fn copy_span(&mut self, span: Span<'_>) {
        span.append_to(&mut self.control);
    }

    /// Ends the FPDU that was begun at `start`, with pad, markers and CRC. Without a CRC, that field is 0.
    #[inline]
    pub(crate) fn seal(&mut self, start: usize) {
        let pad = (self.control.len() - start).wrapping_neg() & 3;
        if pad > 0 {
            self.control.extend_from_slice(&[0; 3][..pad]);
        }
        if self.markers {
            self.mark(start);
        }
        let sum = if self.crc { crc32c(&self.control[start..]) } else { 0 };
        self.control.extend_from_slice(&sum.to_le_bytes());
        self.extend_control(start);
    }

    /// Inserts the markers of the FPDU that was begun at `start`.
    #[cold]
    fn mark(&mut self, start: usize) {
        self.plain.clear();
        self.plain.extend_from_slice(&self.control[start..]);
        self.control.truncate(start);
        markers::insert(&self.plain, self.framed, &mut self.control);
    }

    /// Adds an FPDU. Its payload is sent from its own memory, unless there are markers to insert, or others may write the payload and there
    /// is a CRC, which must match the sent bytes.
    #[inline]
    pub(crate) fn refer(&mut self, header: &[u8], sges: &SgeList, offset: usize, len: usize) {
        let start = self.begin(header);
        if self.markers || (self.crc && sges.as_slice().iter().any(Sge::is_shared)) {
            sges.visit(offset, len, |part| part.append_to(&mut self.control));
            return self.seal(start);
        }
        self.extend_control(start);
        let pad = (header.len() + len).wrapping_neg() & 3;
        let sum = if self.crc { sum_of(header, sges, (offset, len), pad) } else { 0 };
        sges.visit(offset, len, |part| self.pieces.push_back(Piece::Memory(part)));
        self.framed += len as u64;
        self.close(pad, sum);
    }

    /// Adds pad and CRC behind a payload that is sent from its own memory.
    #[inline]
    fn close(&mut self, pad: usize, sum: u32) {
        let start = self.control.len();
        if pad > 0 {
            self.control.extend_from_slice(&[0; 3][..pad]);
        }
        self.control.extend_from_slice(&sum.to_le_bytes());
        self.extend_control(start);
    }

    /// Returns true if memory that others may change can be sent without a copy. A CRC has to match it, and markers need a copy.
    #[inline]
    pub(crate) fn lends(&self) -> bool {
        !self.crc && !self.markers
    }

    /// Adds an FPDU whose payload is sent from a region without a copy. It has no CRC; see [`Stream::lends`].
    pub(crate) fn lend(&mut self, header: &[u8], stag: u32, offset: u64, len: usize) {
        let start = self.begin(header);
        self.extend_control(start);
        self.pieces.push_back(Piece::Region { stag, offset, len });
        self.framed += len as u64;
        self.close((header.len() + len).wrapping_neg() & 3, 0);
    }

    /// Returns true if memory of a region is to be sent.
    pub(crate) fn has_lent(&self) -> bool {
        self.lends() && self.pieces.iter().any(|piece| matches!(piece, Piece::Region { .. }))
    }

    /// Copies the part of regions that TCP has not accepted. The regions may be revoked from now on.
    #[inline]
    pub(crate) fn settle(&mut self, regions: Regions<'_>) {
        if !self.is_empty() && self.lends() && !cfg!(planted = "a-region-is-lent-for-longer") {
            self.copy_regions(regions);
        }
    }

    #[cold]
    fn copy_regions(&mut self, (keys, scope): Regions<'_>) {
        for piece in &mut self.pieces {
            if let Piece::Region { stag, offset, len } = *piece {
                let start = self.control.len();
                if let Ok(span) = keys.remote(scope, stag, offset, len, Access::REMOTE_READ) {
                    span.append_to(&mut self.control);
                }
                *piece = Piece::Control { start, end: self.control.len() };
            }
        }
    }

    /// Adds an untagged FPDU whose payload is not memory of the program.
    #[inline]
    pub(crate) fn untagged(&mut self, header: &Untagged, payload: &[u8]) {
        let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
        header.emit_into((UNTAGGED_HEADER_LEN + payload.len()) as u16, &mut bytes);
        let start = self.begin(&bytes);
        self.copy(payload);
        self.seal(start);
    }

    /// Counts the control bytes from `start` on as part of the stream.
    #[inline]
    fn extend_control(&mut self, start: usize) {
        let len = self.control.len();
        self.framed += (len - start) as u64;
        match self.pieces.back_mut() {
            Some(Piece::Control { end, .. }) if *end == start => *end = len,
            _ => self.pieces.push_back(Piece::Control { start, end: len }),
        }
    }

    /// Returns the unsent bytes of the pieces, in order.
    #[inline]
    fn unsent_pieces<'a>(&'a self, regions: Option<Regions<'a>>) -> impl Iterator<Item = SendSlice<'a>> {
        let mut head = self.head;
        self.pieces.iter().map(move |piece| self.bytes(piece, regions).skip(std::mem::take(&mut head)))
    }

    /// Returns the bytes of a piece.
    #[inline]
    fn bytes<'a>(&'a self, piece: &'a Piece, regions: Option<Regions<'a>>) -> SendSlice<'a> {
        match piece {
            Piece::Control { start, end } => SendSlice::new(self.control.get(*start..*end).unwrap_or_default()),
            Piece::Memory(sge) => sge.send_slice(),
            &Piece::Region { stag, offset, len } => {
                let span = regions.map(|(keys, scope)| keys.remote(scope, stag, offset, len, Access::REMOTE_READ));
                span.and_then(Result::ok).map_or(SendSlice::new(&[]), |span| span.send_slice())
            }
        }
    }

    /// Hands the framed bytes to TCP, in one call. Returns true if TCP has accepted all of them.
    #[inline]
    pub(crate) fn flush(
        &mut self,
        regions: Regions<'_>,
        send: &mut impl FnMut(&[SendSlice<'_>]) -> io::Result<usize>,
    ) -> io::Result<bool> {
        let taken = match self.pieces.front() {
            Some(one) if self.pieces.len() == 1 => send(&[self.bytes(one, Some(regions)).skip(self.head)])?,
            _ => {
                let mut slices = [SendSlice::new(&[]); MAX_SLICES];
                for (slice, bytes) in slices.iter_mut().zip(self.unsent_pieces(Some(regions))) {
                    *slice = bytes;
                }
                send(&slices[..self.pieces.len().min(MAX_SLICES)])?
            }
        };
        if taken == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let taken = taken.min(self.unsent());
        self.advance(taken);
        Ok(self.pieces.is_empty())
    }

    fn advance(&mut self, mut left: usize) {
        self.sent += left as u64;
        if self.sent == self.framed {
            self.clear();
            return;
        }
        while left > 0 {
            let len = self.pieces.front().map_or(0, Piece::len) - self.head;
            if left < len {
                self.head += left;
                return;
            }
            left -= len;
            self.head = 0;
            if self.pieces.pop_front().is_none() {
                return;
            }
        }
    }

    fn clear(&mut self) {
        self.pieces.clear();
        self.control.clear();
        if self.control.capacity() > 2 * MAX_CONTROL {
            // The buffer grew for copies of regions.
            self.control = Vec::new();
        }
        self.head = 0;
    }

    /// Ends the stream behind the last FPDU in progress. Returns a copy of the framed and unsent bytes, with the Terminate behind them.
    pub(crate) fn end(&mut self, terminate: Option<(TerminateCause, Option<Quote>)>) -> Vec<u8> {
        if let Some((cause, quote)) = terminate {
            let mut payload = [0; MAX_TERMINATE_LEN];
            let len = Terminate::new(cause, quote).emit_into(&mut payload);
            self.untagged(&Untagged::TERMINATE, &payload[..len]);
        }
        let mut rest = Vec::with_capacity(self.unsent());
        for bytes in self.unsent_pieces(None) {
            bytes.append_to(&mut rest, usize::MAX);
        }
        self.clear();
        self.control = Vec::new();
        self.sent = self.framed;
        rest
    }
}

/// Returns the CRC of an FPDU with `len` bytes of these entries, from `offset` on.
#[inline(never)]
fn sum_of(header: &[u8], sges: &SgeList, (offset, len): (usize, usize), pad: usize) -> u32 {
    let mut sum = Crc32c::new();
    sum.update(header);
    sges.visit(offset, len, |part| part.visit(|bytes| sum.update(bytes)));
    sum.update(&[0; 3][..pad]);
    sum.finish()
}

/// Returns the longest ULPDU that fits a TCP segment of `emss` bytes with its framing (RFC 5044 §4.5).
pub(crate) const fn max_ulpdu(emss: usize, markers: bool) -> usize {
    let markers = if markers { markers::LEN * emss.div_ceil(markers::SPACING) } else { 0 };
    emss - (2 + CRC_LEN + markers + emss % 4)
}
