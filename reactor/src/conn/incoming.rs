//! A large message that is being fetched from the peer's memory, piece by piece.

use rdma_transport::wr::Sge;

use super::frame::Offer;
use crate::id::OfferId;
use crate::memory::landing::{Landing, Offered};
use crate::memory::operations::Holds;
use crate::memory::region::Region;
use crate::security::Opener;
use crate::security::channel::{SEGMENT, Segments, TAG, segment, tail};

/// The longest Read, in bytes.
const PIECE: u64 = 1 << 20;

/// The shortest remainder that is read separately after other Reads, in bytes. The siw of Linux 6.1 answers a Read of
/// at most 32 bytes that crosses a page with wrong bytes.
const CRUMB: u64 = 64;

/// The largest number of Reads in flight on a connection for large messages.
pub(super) const PIECES: usize = 4;

/// The number of fetched bytes after which the sender is notified, before the notification of the whole message.
pub(super) const STRIDE: u64 = PIECE * PIECES as u64;

/// Returns the length of the next Read if `left` bytes are left.
fn piece(left: u64) -> u64 {
    if left > PIECE && left < PIECE + CRUMB { PIECE - CRUMB } else { left.min(PIECE) }
}

/// The data sink of an offered message (RFC 5040): the memory that it is read into.
#[derive(Debug)]
pub(super) enum Sink {
    /// The program has not answered the offer yet.
    Unanswered,
    /// Memory of the library, once it is available.
    Wanted,
    /// Memory of the library.
    Library(Box<Region>),
    /// Memory of the program.
    Program(Landing),
}

/// A message that is being fetched.
#[derive(Debug)]
pub(super) struct IncomingMessage {
    pub(super) offer: Offer,
    pub(super) sink: Sink,
    /// The bytes for which Reads are in flight or done.
    pub(super) asked: u64,
    pub(super) done: u64,
    /// The bytes that were reported to the peer as fetched; all of them if it does not want reports.
    pub(super) told: u64,
    /// The bytes to read in total: the message, and the tags of its segments if it is sealed.
    pub(super) total: u64,
    /// A sealed message that is being opened.
    segments: Option<Segments>,
}

impl IncomingMessage {
    /// Creates a message of which nothing is fetched yet. `sealed`: the messages of the connection are sealed. `reports`: the peer wants to
    /// be notified of the parts that are fetched.
    pub(super) const fn new(offer: Offer, sealed: bool, reports: bool) -> Self {
        let total = offer.region.len + if sealed { tail(offer.region.len) } else { 0 };
        let told = if reports { 0 } else { total };
        Self { offer, asked: 0, done: 0, told, total, segments: None, sink: Sink::Unanswered }
    }

    pub(super) const fn is_whole(&self) -> bool {
        self.done == self.total
    }

    /// Returns the offer as it is reported to the program.
    pub(super) const fn offered(&self) -> Offered {
        Offered { id: OfferId(self.offer.number), len: self.offer.region.len, tag: self.offer.tag }
    }

    /// Returns true if it is the message of this offer, and the program has not answered it. Messages in flight have different numbers.
    pub(super) const fn is_unanswered(&self, offer: OfferId) -> bool {
        self.offer.number == offer.0 && matches!(self.sink, Sink::Unanswered)
    }

    pub(super) const fn wants_memory(&self) -> bool {
        matches!(self.sink, Sink::Wanted)
    }

    /// Returns the library's memory of the message.
    pub(super) const fn region(&self) -> Option<&Region> {
        match &self.sink {
            Sink::Library(region) => Some(region),
            _ => None,
        }
    }

    /// Returns the entry for a Read of a part, and the holds on the memory meanwhile: a landing holds itself. `None` if it has no memory
    /// yet.
    pub(super) fn lend(&mut self, from: u64, len: u64) -> Option<(Sge, Holds)> {
        let mut holds = Holds::default();
        let sge = match &mut self.sink {
            Sink::Library(region) => {
                let (sge, hold) = region.lend_mut(from as usize..(from + len) as usize)?;
                holds[0] = Some((region.key(), hold));
                sge
            }
            Sink::Program(landing) => landing.entry(from, len)?,
            Sink::Unanswered | Sink::Wanted => return None,
        };
        Some((sge, holds))
    }

    /// Returns true if the peer must be notified of the bytes that are fetched. The end of a whole message is reported
    /// separately.
    pub(super) const fn owes_progress(&self) -> bool {
        self.done.saturating_sub(self.told) >= STRIDE && !self.is_whole()
    }

    const fn is_sealed(&self) -> bool {
        self.total > self.offer.region.len
    }

    /// Returns the start and the length of the Read after the first `asked` bytes. A sealed message is read from its end: the tags arrive
    /// first, and each piece is opened when it has arrived.
    pub(super) fn read_at(&self, asked: u64) -> (u64, u64) {
        if !self.is_sealed() {
            return (asked, piece(self.total - asked));
        }
        let end = self.total - asked;
        let from = end.min(self.offer.region.len).saturating_sub(1) / PIECE * PIECE;
        (from, end - from)
    }

    /// Opens the segments of the last `len` bytes. Returns false if they are not what the peer has sealed.
    pub(super) fn open(&mut self, len: u64, opener: &mut Opener) -> bool {
        let (whole, message) = (self.is_whole(), self.offer.region.len);
        let message_of = *self.segments.get_or_insert_with(|| opener.begin(message));
        let Sink::Library(region) = &mut self.sink else { return false };
        let (mut from, mut to) = (self.total - self.done, (self.total - self.done + len).min(message));
        if region.is_open() {
            // The device leaves the memory open to the peer: a copy is opened, once all bytes have arrived.
            if !whole {
                return true;
            }
            if let Err(error) = region.make_private() {
                log::warn!("memory for a copy of a message of {message} bytes: {error}");
                return false;
            }
            (from, to) = (0, message);
        }
        let segment_len = SEGMENT as u64;
        (from / segment_len..to.div_ceil(segment_len)).rev().all(|index| {
            let mut tag = [0; TAG];
            region.copy_to(message as usize + index as usize * TAG, &mut tag);
            let range = segment(index, message);
            let bytes = region.part_mut(range.start..range.end + TAG);
            bytes.is_some_and(|bytes| opener.open_segment(message_of, index, bytes, tag))
        })
    }
}
