//! One direction of a segment: a ring of records with one producer and one consumer. A record is whole and in one piece, and is seen by
//! its consumer when the position behind it was published.
//!
//! Positions count all bytes so far. The consumer believes nothing that it loads: a position must lie where an honest producer could
//! have put it.

use super::record::{Header, Kind};
use super::segment::{CAPACITY, HEAD, RING, TAIL, Words};

/// Room that only the last record of a connection may use.
const LAST: usize = 64;

/// The peer has stored a position that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nonsense;

/// The side that writes records.
#[derive(Debug)]
pub(super) struct Producer {
    half: usize,
    /// Position behind the last record, and where in the ring that is.
    pos: u64,
    at: usize,
    published: u64,
    /// What the consumer has consumed, as far as known.
    tail: u64,
}

impl Producer {
    pub(super) const fn new(half: usize) -> Self {
        Self { half, pos: 0, at: 0, published: 0, tail: 0 }
    }

    /// Where the half begins that it writes.
    #[inline]
    pub(super) const fn half(&self) -> usize {
        self.half
    }

    /// The position behind the last record.
    #[inline]
    pub(super) const fn pos(&self) -> u64 {
        self.pos
    }

    /// What the consumer has consumed, as far as known.
    #[inline]
    pub(super) const fn tail(&self) -> u64 {
        self.tail
    }

    /// Looks how far the consumer is. Returns whether it has gone on.
    #[inline]
    pub(super) fn look<W: Words>(&mut self, words: &W) -> Result<bool, Nonsense> {
        let tail = words.load(self.half + TAIL);
        if tail == self.tail {
            return Ok(false);
        }
        if tail % 8 != 0 || tail.wrapping_sub(self.tail) > self.published - self.tail {
            return Err(Nonsense);
        }
        self.tail = tail;
        Ok(true)
    }

    /// Whether the consumer has gone on, or talks nonsense.
    #[inline]
    pub(super) fn is_moved<W: Words>(&self, words: &W) -> bool {
        words.load(self.half + TAIL) != self.tail
    }

    /// Makes room for a record of `len` bytes, a multiple of 8; returns where it goes. `None` if there is no room, as far as known.
    #[inline]
    pub(super) fn reserve<W: Words>(&mut self, words: &W, len: usize) -> Option<usize> {
        self.make_room(words, len, LAST)
    }

    /// As [`Producer::reserve`], for the last record of a connection, of at most [`LAST`] bytes with what is skipped.
    pub(super) fn reserve_last<W: Words>(&mut self, words: &W, len: usize) -> Option<usize> {
        self.make_room(words, len, 0)
    }

    #[inline]
    fn make_room<W: Words>(&mut self, words: &W, len: usize, keep: usize) -> Option<usize> {
        let to_end = CAPACITY - self.at;
        let skip = if len > to_end { to_end } else { 0 };
        if (self.pos - self.tail) as usize + skip + len + keep > CAPACITY {
            return None;
        }
        if skip > 0 {
            words.poke(self.half + RING + self.at, Header::new(Kind::Pad, skip as u32).emit());
            self.pos += skip as u64;
            self.at = 0;
        }
        Some(self.half + RING + self.at)
    }

    /// Adds the record that was written where [`Producer::reserve`] has said.
    #[inline]
    pub(super) const fn commit(&mut self, len: usize) {
        self.pos += len as u64;
        self.at += len;
        if self.at >= CAPACITY {
            self.at = 0;
        }
    }

    /// Lets the consumer see all records. Returns whether there are new ones.
    #[inline]
    pub(super) fn publish<W: Words>(&mut self, words: &W) -> bool {
        if self.published == self.pos {
            return false;
        }
        self.published = self.pos;
        words.store(self.half + HEAD, self.pos);
        true
    }
}

/// The side that reads records.
#[derive(Debug)]
pub(super) struct Consumer {
    half: usize,
    /// Position behind the last record that was consumed, and where in the ring that is.
    pos: u64,
    at: usize,
    /// What the producer has published, as far as known.
    head: u64,
    /// What the producer knows of `pos`.
    released: u64,
}

impl Consumer {
    pub(super) const fn new(half: usize) -> Self {
        Self { half, pos: 0, at: 0, head: 0, released: 0 }
    }

    /// Where the half begins that it reads.
    #[inline]
    pub(super) const fn half(&self) -> usize {
        self.half
    }

    /// The bytes that are there, from where the next record begins to the end of the ring at most; looks for new ones if all known ones
    /// are consumed.
    #[inline]
    pub(super) fn available<W: Words>(&mut self, words: &W) -> Result<usize, Nonsense> {
        if self.head == self.pos {
            let head = words.load(self.half + HEAD);
            if head % 8 != 0 || head.wrapping_sub(self.pos) > CAPACITY as u64 {
                return Err(Nonsense);
            }
            self.head = head;
        }
        Ok(((self.head - self.pos) as usize).min(CAPACITY - self.at))
    }

    /// Whether there is something to consume, or the producer talks nonsense.
    #[inline]
    pub(super) fn has_news<W: Words>(&self, words: &W) -> bool {
        self.head != self.pos || words.load(self.half + HEAD) != self.pos
    }

    /// Where the next record begins.
    #[inline]
    pub(super) const fn place(&self) -> usize {
        self.half + RING + self.at
    }

    /// Goes on behind a record of `len` bytes, at most as many as are available.
    #[inline]
    pub(super) const fn advance(&mut self, len: usize) {
        self.pos += len as u64;
        self.at += len;
        if self.at >= CAPACITY {
            self.at = 0;
        }
    }

    /// The position behind the last record that was consumed.
    #[inline]
    pub(super) const fn pos(&self) -> u64 {
        self.pos
    }

    /// The bytes that were consumed since the producer was told.
    #[inline]
    pub(super) const fn owed(&self) -> usize {
        (self.pos - self.released) as usize
    }

    /// Tells the producer what was consumed.
    #[inline]
    pub(super) fn release<W: Words>(&mut self, words: &W) {
        self.released = self.pos;
        words.store(self.half + TAIL, self.pos);
    }
}
