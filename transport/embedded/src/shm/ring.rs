//! One direction of a segment: a ring of records with one producer and one consumer. A record never wraps around the
//! end of the ring. The producer publishes the position at which a record ends. After that, the consumer can read the
//! record.
//!
//! A position is a number of bytes since the start of the connection. A side that loads the peer's position checks two
//! things: the position is a multiple of 8, and it is in the range in which a correct peer can have stored it.

use super::record::{RecordHeader, RecordKind};
use super::segment::{CAPACITY, HEAD, RING, TAIL, Words};

/// The number of free bytes in the ring that are kept for the last record of a connection.
const LAST: usize = 64;

/// The error for a position that a correct peer cannot have stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidPosition;

/// The side of a ring that writes records. Other modules only read its fields.
#[derive(Debug)]
pub(super) struct Producer {
    /// The offset of the half that contains the ring.
    pub(super) half: usize,
    /// The position behind the last written record. `at` is the offset of that position in the ring.
    pub(super) pos: u64,
    at: usize,
    /// The position up to which records are published.
    pub(super) published: u64,
    /// The consumer's position at the last load.
    pub(super) tail: u64,
}

impl Producer {
    pub(super) const fn new(half: usize) -> Self {
        Self { half, pos: 0, at: 0, published: 0, tail: 0 }
    }

    /// Loads the consumer's position. Returns true if the consumer has released records since the last load.
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

    /// Returns true if the consumer has stored another position since the last load. The position may be invalid.
    #[inline]
    pub(super) fn has_tail_moved<W: Words>(&self, words: &W) -> bool {
        words.load(self.half + TAIL) != self.tail
    }

    /// Reserves `len` contiguous bytes for a record; `len` is a multiple of 8. Returns the offset
    /// of the record in the segment. Returns `None` if the ring is full, as far as the producer
    /// knows from the last loaded position of the consumer.
    #[inline]
    pub(super) fn reserve<W: Words>(&mut self, words: &W, len: usize) -> Option<usize> {
        self.make_room(words, len, LAST)
    }

    /// Reserves bytes for the last record of a connection. Such a record, with its padding, may use the [`LAST`] bytes
    /// that [`Producer::reserve`] keeps free. Returns the same values as [`Producer::reserve`].
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

    /// Advances past the record of `len` bytes that the caller has written to the reserved bytes. The record is not
    /// published yet.
    #[inline]
    pub(super) const fn commit(&mut self, len: usize) {
        self.pos += len as u64;
        self.at += len;
        if self.at >= CAPACITY {
            self.at = 0;
        }
    }

    /// Publishes all written records. Returns true if at least one record was not published before.
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

/// The side of a ring that reads records. Other modules only read its fields.
#[derive(Debug)]
pub(super) struct Consumer {
    /// The offset of the half that contains the ring.
    pub(super) half: usize,
    /// The position behind the last consumed record. `at` is the offset of that position in the ring.
    pub(super) pos: u64,
    at: usize,
    /// The producer's position at the last load.
    head: u64,
    /// The position at the last release. The producer may reuse the bytes before this position.
    released: u64,
}

impl Consumer {
    pub(super) const fn new(half: usize) -> Self {
        Self { half, pos: 0, at: 0, head: 0, released: 0 }
    }

    /// Returns the number of contiguous bytes that are published and not consumed. Loads the producer's position only
    /// if all bytes up to the last loaded position are consumed.
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

    /// Returns true if the producer has published records, or has stored an invalid position.
    #[inline]
    pub(super) fn has_news<W: Words>(&self, words: &W) -> bool {
        self.head != self.pos || words.load(self.half + HEAD) != self.pos
    }

    /// Returns the offset of the next record to consume, in the segment.
    #[inline]
    pub(super) const fn next_record(&self) -> usize {
        self.half + RING + self.at
    }

    /// Advances past a consumed record of `len` bytes. The caller has checked that [`Consumer::available`] covers these
    /// bytes.
    #[inline]
    pub(super) const fn advance(&mut self, len: usize) {
        self.pos += len as u64;
        self.at += len;
        if self.at >= CAPACITY {
            self.at = 0;
        }
    }

    /// Returns the number of bytes that are consumed and not released yet.
    #[inline]
    pub(super) const fn owed(&self) -> usize {
        (self.pos - self.released) as usize
    }

    /// Releases all consumed bytes to the producer, by storing the consumer's position.
    #[inline]
    pub(super) fn release<W: Words>(&mut self, words: &W) {
        self.released = self.pos;
        words.store(self.half + TAIL, self.pos);
    }
}
