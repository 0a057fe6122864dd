//! A large message that is being fetched from the peer's memory, piece by piece.

use rdma_transport::wr::Sge;

use super::frame::Offer;
use crate::id::OfferId;
use crate::memory::landing::{Landing, Offered};
use crate::memory::operations::Holds;
use crate::memory::region::Region;
use crate::security::Opener;
use crate::security::channel::{SEGMENT, Segments, TAG, segment, tail};

/// Longest read, bytes.
const PIECE: u64 = 1 << 20;

/// Shortest rest that gets a last read of its own after other reads, bytes. The siw of Linux 6.1 answers a read of at
/// most 32 bytes that crosses a page with wrong bytes.
const CRUMB: u64 = 64;

/// Largest number of reads that a connection has on their way for large messages.
pub(super) const PIECES: usize = 4;

/// Number of bytes of a message of which its sender hears each time that they were fetched, before it hears of the whole message.
pub(super) const STRIDE: u64 = PIECE * PIECES as u64;

/// Length of the next read if `left` bytes are left.
fn piece(left: u64) -> u64 {
    if left > PIECE && left < PIECE + CRUMB { PIECE - CRUMB } else { left.min(PIECE) }
}

/// The data sink of an offered message (RFC 5040): the memory that it is read into.
#[derive(Debug)]
pub(super) enum Sink {
    /// The program has not answered the offer yet.
    Unanswered,
    /// Memory of the library, as soon as there is some.
    Wanted,
    /// Memory of the library.
    Library(Box<Region>),
    /// Memory of the program.
    Program(Landing),
}

/// A message that is being fetched.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) offer: Offer,
    pub(super) sink: Sink,
    /// Bytes for which reads are on their way or done.
    pub(super) asked: u64,
    pub(super) done: u64,
    /// Bytes that the peer knows to be done; all of them if it does not want to hear of them.
    pub(super) told: u64,
    /// Bytes to read altogether: the message, and the tags of its segments if it is sealed.
    pub(super) total: u64,
    /// A sealed message that is being opened.
    segments: Option<Segments>,
}

impl Incoming {
    /// A message of which nothing is fetched yet. `sealed`: the messages of the connection are sealed. `reports`: the peer wants to be
    /// notified of the parts that are fetched.
    pub(super) const fn new(offer: Offer, sealed: bool, reports: bool) -> Self {
        let total = offer.region.len + if sealed { tail(offer.region.len) } else { 0 };
        let told = if reports { 0 } else { total };
        Self { offer, asked: 0, done: 0, told, total, segments: None, sink: Sink::Unanswered }
    }

    pub(super) const fn is_whole(&self) -> bool {
        self.done == self.total
    }

    /// What the program is told of it.
    pub(super) const fn offered(&self) -> Offered {
        Offered { id: OfferId(self.offer.number), len: self.offer.region.len, tag: self.offer.tag }
    }

    /// Whether it is the message of this offer, which the program has not answered. Messages on their way have different numbers.
    pub(super) const fn is_unanswered(&self, offer: OfferId) -> bool {
        self.offer.number == offer.0 && matches!(self.sink, Sink::Unanswered)
    }

    pub(super) const fn wants_memory(&self) -> bool {
        matches!(self.sink, Sink::Wanted)
    }

    /// Memory of the library that it has.
    pub(super) const fn region(&self) -> Option<&Region> {
        match &self.sink {
            Sink::Library(region) => Some(region),
            _ => None,
        }
    }

    /// The entry for a read of a part, and what holds the memory meanwhile: a landing place holds itself. `None`: it has no memory yet.
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

    /// Whether the peer is to hear of the bytes that are done. It hears of a whole message in another way.
    pub(super) const fn owes_progress(&self) -> bool {
        self.done.saturating_sub(self.told) >= STRIDE && !self.is_whole()
    }

    const fn is_sealed(&self) -> bool {
        self.total > self.offer.region.len
    }

    /// Where the read after the first `asked` bytes begins, and its length. The pieces of a sealed message are read from its end:
    /// the tags come first, and each piece is opened when it has come.
    pub(super) fn read_at(&self, asked: u64) -> (u64, u64) {
        if !self.is_sealed() {
            return (asked, piece(self.total - asked));
        }
        let end = self.total - asked;
        let from = end.min(self.offer.region.len).saturating_sub(1) / PIECE * PIECE;
        (from, end - from)
    }

    /// Opens the segments of the `len` bytes that came last; `false` if they are not what the peer has sealed.
    pub(super) fn open(&mut self, len: u64, opener: &mut Opener) -> bool {
        let (whole, message) = (self.is_whole(), self.offer.region.len);
        let message_of = *self.segments.get_or_insert_with(|| opener.begin(message));
        let Sink::Library(region) = &mut self.sink else { return false };
        let (mut from, mut to) = (self.total - self.done, (self.total - self.done + len).min(message));
        if region.is_open() {
            // The device leaves the memory open to the peer: what is opened is a copy, once all is there.
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
