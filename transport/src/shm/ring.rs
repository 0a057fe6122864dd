//! One direction of a segment: a ring of records with one producer and one consumer. A record does not wrap around the
//! end of the ring. The consumer sees it once the producer has published the position behind it.
//!
//! A position counts all bytes since the start of the connection. Neither side trusts a position that it loads: it must
//! lie where a correct peer could have put it.

use super::record::{RecordHeader, RecordKind};
use super::segment::{CAPACITY, HEAD, RING, TAIL, Words};

/// Bytes that only the last record of a connection may use.
const LAST: usize = 64;

/// The error for a position that no correct peer stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidPosition;

/// The side of a ring that writes records.
#[derive(Debug)]
pub(super) struct Producer {
    half: usize,
    /// The position behind the last record, and its offset in the ring.
    pos: u64,
    at: usize,
    published: u64,
    /// The consumer's position when it was last loaded.
    tail: u64,
}

impl Producer {
    pub(super) const fn new(half: usize) -> Self {
        Self { half, pos: 0, at: 0, published: 0, tail: 0 }
    }

    /// Returns the offset of the half that the producer writes.
    #[inline]
    pub(super) const fn half(&self) -> usize {
        self.half
    }

    /// Returns the position behind the last record.
    #[inline]
    pub(super) const fn pos(&self) -> u64 {
        self.pos
    }

    /// Returns the consumer's position when it was last loaded.
    #[inline]
    pub(super) const fn tail(&self) -> u64 {
        self.tail
    }

    /// Loads the consumer's position. Returns true if it has advanced.
    #[inline]
    pub(super) fn refresh_tail<W: Words>(&mut self, words: &W) -> Result<bool, InvalidPosition> {
        let tail = words.load(self.half + TAIL);
        if tail == self.tail {
            return Ok(false);
        }
        if tail % 8 != 0 || tail.wrapping_sub(self.tail) > self.published - self.tail {
            return Err(InvalidPosition);
        }
        self.tail = tail;
        Ok(true)
    }

    /// Returns true if the consumer's position differs from the one that was last loaded, valid or not.
    #[inline]
    pub(super) fn has_tail_moved<W: Words>(&self, words: &W) -> bool {
        words.load(self.half + TAIL) != self.tail
    }

    /// Reserves `len` contiguous bytes for a record, a multiple of 8. Returns their offset in the segment; `None` if
    /// the ring is full, as far as is known without another load.
    #[inline]
    pub(super) fn reserve<W: Words>(&mut self, words: &W, len: usize) -> Option<usize> {
        self.make_room(words, len, LAST)
    }

    /// Reserves as [`Producer::reserve`] does, for the last record of a connection: at most [`LAST`] bytes with
    /// padding.
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
            words.poke(self.half + RING + self.at, RecordHeader::new(RecordKind::Pad, skip as u32).emit());
            self.pos += skip as u64;
            self.at = 0;
        }
        Some(self.half + RING + self.at)
    }

    /// Adds the record that the caller has written to the reserved bytes.
    #[inline]
    pub(super) const fn commit(&mut self, len: usize) {
        self.pos += len as u64;
        self.at += len;
        if self.at >= CAPACITY {
            self.at = 0;
        }
    }

    /// Publishes all records. Returns true if any of them is new to the consumer.
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

/// The side of a ring that reads records.
#[derive(Debug)]
pub(super) struct Consumer {
    half: usize,
    /// The position behind the last record that was consumed, and its offset in the ring.
    pos: u64,
    at: usize,
    /// The producer's position when it was last loaded.
    head: u64,
    /// The position that was last stored for the producer.
    released: u64,
}

impl Consumer {
    pub(super) const fn new(half: usize) -> Self {
        Self { half, pos: 0, at: 0, head: 0, released: 0 }
    }

    /// Returns the offset of the half that the consumer reads.
    #[inline]
    pub(super) const fn half(&self) -> usize {
        self.half
    }

    /// Returns the number of published bytes from the next record on, at most to the end of the ring. Loads the
    /// producer's position only if all known records are consumed.
    #[inline]
    pub(super) fn available<W: Words>(&mut self, words: &W) -> Result<usize, InvalidPosition> {
        if self.head == self.pos {
            let head = words.load(self.half + HEAD);
            if head % 8 != 0 || head.wrapping_sub(self.pos) > CAPACITY as u64 {
                return Err(InvalidPosition);
            }
            self.head = head;
        }
        Ok(((self.head - self.pos) as usize).min(CAPACITY - self.at))
    }

    /// Returns true if there are records to consume, or the producer stored an invalid position.
    #[inline]
    pub(super) fn has_news<W: Words>(&self, words: &W) -> bool {
        self.head != self.pos || words.load(self.half + HEAD) != self.pos
    }

    /// Returns the offset of the next record in the segment.
    #[inline]
    pub(super) const fn next_record(&self) -> usize {
        self.half + RING + self.at
    }

    /// Advances past a record of `len` bytes, which were available.
    #[inline]
    pub(super) const fn advance(&mut self, len: usize) {
        self.pos += len as u64;
        self.at += len;
        if self.at >= CAPACITY {
            self.at = 0;
        }
    }

    /// Returns the position behind the last record that was consumed.
    #[inline]
    pub(super) const fn pos(&self) -> u64 {
        self.pos
    }

    /// Returns the number of bytes that were consumed and not released.
    #[inline]
    pub(super) const fn owed(&self) -> usize {
        (self.pos - self.released) as usize
    }

    /// Releases the bytes that were consumed: stores the consumer's position for the producer.
    #[inline]
    pub(super) fn release<W: Words>(&mut self, words: &W) {
        self.released = self.pos;
        words.store(self.half + TAIL, self.pos);
    }
}
