//! The outgoing stream: FPDUs that are framed and that TCP has not accepted yet.
//!
//! Headers, trailers and small payloads are written one behind the other into a control buffer, so that one slice of a send call can carry
//! many small messages. Larger payloads are sent from their own memory without a copy. Two cases need a copy: markers, and a CRC over
//! memory that the program or a peer may change during the send.
//!
//! The memory of a region is only read within one call of the transmitter, because the region may be revoked afterwards. At the end of the
//! call, the bytes of regions that TCP has not accepted are copied.

use std::collections::VecDeque;
use std::io;

use super::markers;
use super::wire::ddp::UNTAGGED_FPDU_HEADER_LEN;
use super::wire::mpa::CRC_LEN;
use super::wire::opcode::UNTAGGED_HEADER_LEN;
use super::wire::terminate::MAX_TERMINATE_LEN;
use super::wire::{Crc32c, Quote, Terminate, TerminateCause, Untagged, crc32c};
use crate::entries::ENTRIES;
use crate::soft::keys::KeyTable;
use rdma_transport::mem::frame;
use rdma_transport::mem::{MAX_SLICES, SendSlice, Sge, Span};
use rdma_transport::mr::Access;
use rdma_transport::slab::Key;
use rdma_transport::wr::{MAX_SGE, SgeList};

/// Framing stops when `MAX_BATCH` framed bytes wait for TCP to accept them, or when the control
/// buffer contains `MAX_CONTROL` bytes.
const MAX_BATCH: usize = 512 * 1024;
const MAX_CONTROL: usize = 128 * 1024;
/// The largest number of pieces that one FPDU adds: a header, the scatter-gather entries of a work request, and a trailer.
const PIECES_PER_FPDU: usize = MAX_SGE + 2;

/// The table of regions, and the key of the connection whose peer reads them.
pub(crate) type Regions<'a> = (&'a KeyTable, Key);

#[derive(Debug)]
pub(crate) struct Stream {
    crc: bool,
    markers: bool,
    control: Vec<u8>, // bound: frames
    /// A buffer for an FPDU into which markers are to be inserted.
    plain: Vec<u8>, // bound: frames
    pieces: VecDeque<Piece>, // bound: frames
    /// TCP has accepted this number of bytes of the first piece.
    head: usize,
    framed: u64,
    sent: u64,
}

/// A contiguous piece of the outgoing bytes.
#[derive(Clone, Copy, Debug)]
enum Piece {
    Control {
        start: usize,
        end: usize,
    },
    Memory(Sge),
    /// Memory of a local region, for the response to the peer's Read.
    Region {
        stag: u32,
        offset: u64,
        len: usize,
    },
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Self::Control { start, end } => end - start,
            Self::Memory(sge) => sge.len(),
            Self::Region { len, .. } => *len,
        }
    }
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

    /// Returns the number of bytes that were framed since the start of the stream.
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

    /// Returns true if one more FPDU may be framed before TCP accepts the previous FPDUs.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.unsent() < MAX_BATCH
            && self.control.len() < MAX_CONTROL
            && self.pieces.len() + PIECES_PER_FPDU <= MAX_SLICES
    }

    /// Begins an FPDU in the control buffer, with its header. Returns the offset of the FPDU in the control buffer. The caller appends the
    /// payload and calls [`Stream::seal`] with this offset.
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

    /// Appends the bytes of a scatter-gather entry to the FPDU in the control buffer.
    #[inline]
    pub(crate) fn copy_entry(&mut self, entry: &Sge) {
        ENTRIES.append_to(entry, &mut self.control);
    }

    /// Adds a whole FPDU to the control buffer. Its payload is a copy of a scatter-gather entry's bytes.
    #[inline]
    pub(crate) fn small_entry<const N: usize>(&mut self, header: &[u8; N], entry: &Sge) {
        let (start, pad) = (self.control.len(), (N + entry.len()).wrapping_neg() & 3);
        ENTRIES.append_frame(&mut self.control, header, entry, pad + CRC_LEN);
        self.close_copied(start);
    }

    /// Adds a whole FPDU to the control buffer. Its payload is a copy of `bytes`.
    #[inline]
    pub(crate) fn small<const N: usize>(&mut self, header: &[u8; N], bytes: &[u8]) {
        let (start, pad) = (self.control.len(), (N + bytes.len()).wrapping_neg() & 3);
        frame::append_bytes(&mut self.control, header, bytes, pad + CRC_LEN);
        self.close_copied(start);
    }

    /// Completes the FPDU at the end of the control buffer. The FPDU begins at `start`, and has zeros in place of its CRC.
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

    /// Appends the bytes of a region to the FPDU in the control buffer. The program may change the region at any time, so the CRC is
    /// computed over the copy.
    #[inline]
    pub(crate) fn copy_span(&mut self, span: Span<'_>) {
        span.append_to(&mut self.control);
    }

    /// Completes the FPDU that begins at the offset `start` of the control buffer with pad, markers and CRC. The CRC field is 0 if no CRC
    /// was negotiated.
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

    /// Inserts the markers into the FPDU that begins at `start` of the control buffer.
    #[cold]
    fn mark(&mut self, start: usize) {
        self.plain.clear();
        self.plain.extend_from_slice(&self.control[start..]);
        self.control.truncate(start);
        markers::insert(&self.plain, self.framed, &mut self.control);
    }

    /// Adds an FPDU whose payload is `len` bytes of a work request's entries, from `offset` on. The payload is sent without a copy, except
    /// in two cases: with markers, and with a CRC over memory that the program or a peer may change during the send.
    #[inline]
    pub(crate) fn refer(&mut self, header: &[u8], sges: &SgeList, offset: usize, len: usize) {
        let start = self.begin(header);
        if self.markers || (self.crc && sges.as_slice().iter().any(Sge::is_shared)) {
            sges.visit(offset, len, |part| ENTRIES.append_to(&part, &mut self.control));
            return self.seal(start);
        }
        self.extend_control(start);
        let pad = (header.len() + len).wrapping_neg() & 3;
        let sum = if self.crc { sum_of(header, sges, (offset, len), pad) } else { 0 };
        sges.visit(offset, len, |part| self.pieces.push_back(Piece::Memory(part)));
        self.framed += len as u64;
        self.close(pad, sum);
    }

    /// Adds the pad and the CRC `sum` of an FPDU whose payload is not in the control buffer.
    #[inline]
    fn close(&mut self, pad: usize, sum: u32) {
        let start = self.control.len();
        if pad > 0 {
            self.control.extend_from_slice(&[0; 3][..pad]);
        }
        self.control.extend_from_slice(&sum.to_le_bytes());
        self.extend_control(start);
    }

    /// Returns true if a region can be sent without a copy. A CRC needs a copy, because the program could change the region after the CRC
    /// was computed. Markers need a copy, because they are inserted between the bytes of the region.
    #[inline]
    pub(crate) fn lends(&self) -> bool {
        !self.crc && !self.markers
    }

    /// Adds an FPDU whose payload is sent from a region without a copy. The caller has checked [`Stream::lends`].
    pub(crate) fn lend(&mut self, header: &[u8], stag: u32, offset: u64, len: usize) {
        let start = self.begin(header);
        self.extend_control(start);
        self.pieces.push_back(Piece::Region { stag, offset, len });
        self.framed += len as u64;
        self.close((header.len() + len).wrapping_neg() & 3, 0);
    }

    /// Returns true if a payload is still to be sent from a region.
    pub(crate) fn has_lent(&self) -> bool {
        self.lends() && self.pieces.iter().any(|piece| matches!(piece, Piece::Region { .. }))
    }

    /// Copies the bytes of regions that are framed and not yet accepted by TCP. After that, the regions may be revoked.
    #[inline]
    pub(crate) fn settle(&mut self, regions: Regions<'_>) {
        if !self.is_empty() && self.lends() && !rdma_transport::planted("a-region-is-lent-for-longer") {
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

    /// Adds an untagged FPDU. Its payload, which is not the program's data, is copied.
    #[inline]
    pub(crate) fn untagged(&mut self, header: &Untagged, payload: &[u8]) {
        let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
        header.emit_into((UNTAGGED_HEADER_LEN + payload.len()) as u16, &mut bytes);
        let start = self.begin(&bytes);
        self.copy(payload);
        self.seal(start);
    }

    /// Adds the bytes of the control buffer from `start` on to the outgoing pieces.
    #[inline]
    fn extend_control(&mut self, start: usize) {
        let len = self.control.len();
        self.framed += (len - start) as u64;
        match self.pieces.back_mut() {
            Some(Piece::Control { end, .. }) if *end == start => *end = len,
            _ => self.pieces.push_back(Piece::Control { start, end: len }),
        }
    }

    /// Returns the bytes of all pieces in order, without the bytes that TCP has already accepted.
    #[inline]
    fn unsent_pieces<'a>(&'a self, regions: Option<Regions<'a>>) -> impl Iterator<Item = SendSlice<'a>> {
        let mut head = self.head;
        self.pieces.iter().map(move |piece| self.bytes(piece, regions).skip(std::mem::take(&mut head)))
    }

    /// Returns the bytes of a piece. For a region, returns no bytes if `regions` is `None` or if the region was revoked.
    #[inline(always)]
    fn bytes<'a>(&'a self, piece: &'a Piece, regions: Option<Regions<'a>>) -> SendSlice<'a> {
        match piece {
            Piece::Control { start, end } => SendSlice::new(self.control.get(*start..*end).unwrap_or_default()),
            Piece::Memory(sge) => ENTRIES.send_slice(sge),
            &Piece::Region { stag, offset, len } => {
                let span = regions.map(|(keys, scope)| keys.remote(scope, stag, offset, len, Access::REMOTE_READ));
                span.and_then(Result::ok).map_or(SendSlice::new(&[]), |span| span.send_slice())
            }
        }
    }

    /// Hands the framed bytes to TCP in one send call. Returns true if TCP has accepted all of them.
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
            // The control buffer is larger than usual, because regions were copied into it. Free its memory.
            self.control = Vec::new();
        }
        self.head = 0;
    }

    /// Ends the stream behind the last framed FPDU, with a Terminate if one is given. Returns a copy of the bytes that TCP has not
    /// accepted.
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

/// Returns the CRC of an FPDU whose payload is `len` bytes of these scatter-gather entries, from `offset` on.
#[inline(never)]
fn sum_of(header: &[u8], sges: &SgeList, (offset, len): (usize, usize), pad: usize) -> u32 {
    let mut sum = Crc32c::new();
    sum.update(header);
    sges.visit(offset, len, |part| ENTRIES.visit(&part, |bytes| sum.update(bytes)));
    sum.update(&[0; 3][..pad]);
    sum.finish()
}

/// Returns the length of the longest ULPDU that fits, with its framing, into a TCP segment of `emss` bytes (RFC 5044 §4.5).
pub(crate) const fn max_ulpdu(emss: usize, markers: bool) -> usize {
    let markers = if markers { markers::LEN * emss.div_ceil(markers::SPACING) } else { 0 };
    emss - (2 + CRC_LEN + markers + emss % 4)
}
