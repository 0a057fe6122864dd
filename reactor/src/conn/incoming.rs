//! A large message that the local side fetches from the peer's memory with several Reads.

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

/// The minimum length of the last Read of a message that needs several Reads, in bytes. Shorter Reads are avoided, because the siw driver
/// of Linux 6.1 answers a Read of at most 32 bytes that crosses a page with wrong bytes.
const CRUMB: u64 = 64;

/// The largest number of Reads for large messages that a connection has in flight.
pub(super) const PIECES: usize = 4;

/// The local side reports its progress to the sender each time it has fetched this number of bytes since the last report. The end of the
/// message is reported separately.
pub(super) const STRIDE: u64 = PIECE * PIECES as u64;

/// The data sink of an offered message (RFC 5040): the memory that its bytes are read into.
#[derive(Debug)]
pub(super) enum Sink {
    /// The program has not decided yet about the message that the peer offers.
    Unanswered,
    /// Memory of the library, which has not been allocated yet.
    Wanted,
    /// Memory of the library.
    Library(Box<Region>),
    /// Memory of the program.
    Program(Landing),
}

/// A large message that the peer has offered, and that the local side is fetching.
#[derive(Debug)]
pub(super) struct IncomingMessage {
    pub(super) offer: Offer,
    pub(super) sink: Sink,
    /// The number of bytes that are covered by the Reads posted so far, whether these have ended or not.
    pub(super) requested: u64,
    pub(super) done: u64,
    /// The number of bytes that were reported to the peer as fetched.
    pub(super) reported: u64,
    /// The number of bytes to read: the message, and the authentication tags of its segments if the message is encrypted.
    pub(super) total: u64,
    /// The numbers of the segments of an encrypted message.
    segments: Option<Segments>,
}

impl IncomingMessage {
    /// Creates a message of which nothing is fetched yet. `segments` are the numbers of its segments, if the messages of the connection are
    /// encrypted.
    pub(super) const fn new(offer: Offer, segments: Option<Segments>) -> Self {
        let total = offer.region.len + if segments.is_some() { tail(offer.region.len) } else { 0 };
        Self { offer, requested: 0, done: 0, reported: 0, total, segments, sink: Sink::Unanswered }
    }

    pub(super) const fn is_whole(&self) -> bool {
        self.done == self.total
    }

    /// Returns the offer as it is reported to the program.
    pub(super) const fn offered(&self) -> Offered {
        Offered { id: OfferId(self.offer.number), len: self.offer.region.len, tag: self.offer.tag }
    }

    /// Returns true if this is the message with the id `offer`, and the program has not decided about it. The offers in flight have
    /// different ids.
    pub(super) const fn is_unanswered(&self, offer: OfferId) -> bool {
        self.offer.number == offer.0 && matches!(self.sink, Sink::Unanswered)
    }

    pub(super) const fn wants_memory(&self) -> bool {
        matches!(self.sink, Sink::Wanted)
    }

    /// Returns the library's memory for the message. `None` if the program provides the memory, or none is assigned yet.
    pub(super) const fn region(&self) -> Option<&Region> {
        match &self.sink {
            Sink::Library(region) => Some(region),
            _ => None,
        }
    }

    /// Returns a scatter/gather entry for a Read of `len` bytes at offset `from`, and the holds that keep the entry's memory registered
    /// until the Read ends. For memory of the program, no hold is returned, because the `Landing` already has one. `None` if the message
    /// has no memory yet.
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

    /// Returns true if a progress report to the peer is due. The end of the whole message is reported separately.
    pub(super) const fn owes_progress(&self) -> bool {
        self.done.saturating_sub(self.reported) >= STRIDE && !self.is_whole()
    }

    const fn is_sealed(&self) -> bool {
        self.total > self.offer.region.len
    }

    /// Returns the offset and the length of the next Read, in bytes. Earlier Reads cover
    /// `requested` bytes. An encrypted message is read from its end, where the authentication tags
    /// are. Once the tags have arrived, each later piece can be decrypted as soon as it arrives.
    pub(super) fn read_at(&self, requested: u64) -> (u64, u64) {
        if !self.is_sealed() {
            return (requested, piece(self.total - requested));
        }
        let end = self.total - requested;
        let from = end.min(self.offer.region.len).saturating_sub(1) / PIECE * PIECE;
        (from, end - from)
    }

    /// Decrypts the segments in the `len` bytes that have just arrived. Returns false if a segment
    /// is not authentic.
    ///
    /// # Errors
    /// There is no memory for a private copy of the message.
    pub(super) fn open(&mut self, len: u64, opener: &mut Opener) -> Result<bool, String> {
        let (whole, message) = (self.is_whole(), self.offer.region.len);
        let (Some(message_of), Sink::Library(region)) = (self.segments, &mut self.sink) else { return Ok(false) };
        let (mut from, mut to) = (self.total - self.done, (self.total - self.done + len).min(message));
        if region.is_open() {
            // The peer can write to the memory of the message while that memory is registered. So when the whole message has arrived, it is
            // copied to memory that is not registered, and the copy is decrypted.
            if !whole {
                return Ok(true);
            }
            region.make_private().map_err(|error| error.to_string())?;
            (from, to) = (0, message);
        }
        let segment_len = SEGMENT as u64;
        let authentic = (from / segment_len..to.div_ceil(segment_len)).rev().all(|index| {
            let mut tag = [0; TAG];
            region.copy_to(message as usize + index as usize * TAG, &mut tag);
            let range = segment(index, message);
            let bytes = region.part_mut(range.start..range.end + TAG);
            bytes.is_some_and(|bytes| opener.open_segment(message_of, index, bytes, tag))
        });
        Ok(authentic)
    }
}

/// Returns the length of the next Read, in bytes, if `left` bytes of the message are not read yet.
fn piece(left: u64) -> u64 {
    if left > PIECE && left < PIECE + CRUMB { PIECE - CRUMB } else { left.min(PIECE) }
}
