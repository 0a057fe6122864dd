//! The segment of a connection: a memory file with a ring for each direction, the words by which a side announces that
//! it sleeps, and the tables of the memory that each side lets its peer map.
//!
//! A segment has two halves, one for each direction. All offsets are in bytes, from the start of the segment or of a
//! half.

use std::fmt;
use std::sync::atomic::{Ordering, fence};

use crate::mem::{Memory, Sge, Span};

/// The length of a segment, bytes.
pub const LEN: usize = 2 * HALF;
/// The length of the half of one direction, bytes.
pub const HALF: usize = 16 << 10;
/// The offset, in a half, of the position behind the last record, which the producer stores.
pub const HEAD: usize = 0;
/// The offset, in a half, of the position behind the last record that was consumed, which the consumer stores.
pub const TAIL: usize = 128;
/// The offset, in a half, of the word with the events that the consumer must be woken for: 1 records, 2 room; 0 while
/// it is awake.
pub const CALL: usize = 256;
/// The offset, in a half, of the table of the memory that the producer lets the consumer map.
pub const TABLE: usize = 384;
/// The number of entries of the table.
pub const SLOTS: usize = 32;
/// The offset, in a half, of the ring.
pub const RING: usize = 1 << 10;
/// The length of a ring, bytes.
pub const CAPACITY: usize = HALF - RING;

/// The side of a connection, which determines the half that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentSide {
    /// The side that connected and made the segment.
    Active,
    /// The side that accepted.
    Passive,
}

impl SegmentSide {
    /// Returns the offset of the half that this side produces in.
    pub const fn outgoing(self) -> usize {
        match self {
            Self::Active => 0,
            Self::Passive => HALF,
        }
    }

    /// Returns the offset of the half that this side consumes from.
    pub const fn incoming(self) -> usize {
        HALF - self.outgoing()
    }
}

/// Operations on the words of a segment: 8 bytes at a multiple of 8. `at` is an offset inside the segment.
///
/// A trait, so that a model checker and the simulation can interleave the operations of the two sides.
pub trait Words: fmt::Debug + Send {
    /// Loads a word that the peer stores, with acquire ordering: all that the peer wrote before the store is visible
    /// afterwards.
    fn load(&self, at: usize) -> u64;

    /// Stores a word that the peer loads, with release ordering: a peer that loads the value sees all that was written
    /// before.
    fn store(&self, at: usize, value: u64);

    /// Loads a word with relaxed ordering, such as one of a record.
    fn peek(&self, at: usize) -> u64;

    /// Stores a word with relaxed ordering, such as one of a record.
    fn poke(&self, at: usize, value: u64);

    /// Exchanges a word, sequentially consistent. Returns the old value.
    fn swap(&self, at: usize, value: u64) -> u64;

    /// Orders all stores before the fence ahead of all loads after it.
    fn fence(&self);
}

/// A segment that is mapped by one side.
pub trait Segment: Words {
    /// Returns `len` bytes at offset `at`, to read; `None` if they are not all inside the segment.
    fn part(&self, at: usize, len: usize) -> Option<Span<'_>>;

    /// Copies a payload to offset `at`. Does nothing if the payload does not fit there.
    fn put(&self, at: usize, payload: &SegmentPayload<'_>);
}

/// Bytes to be copied into a segment.
#[derive(Clone, Copy, Debug)]
pub enum SegmentPayload<'a> {
    /// Bytes that nobody writes during the copy.
    Bytes(&'a [u8]),
    /// The memory of a work request.
    Entry(&'a Sge),
    /// Memory that others may write during the copy.
    Span(Span<'a>),
}

impl SegmentPayload<'_> {
    /// Returns the length, bytes.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Entry(entry) => entry.len(),
            Self::Span(span) => span.len(),
        }
    }

    /// Returns true if the payload has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends a copy of the payload to `out`.
    pub fn append_to(&self, out: &mut Vec<u8>) {
        match self {
            Self::Bytes(bytes) => out.extend_from_slice(bytes),
            Self::Entry(entry) => entry.append_to(out),
            Self::Span(span) => span.append_to(out),
        }
    }

    /// Copies the payload to the start of `room`, as many bytes as fit.
    #[inline]
    pub(super) fn copy_into(&self, room: Span<'_>) {
        match self {
            Self::Bytes(bytes) => room.fill(bytes),
            Self::Entry(entry) => room.fill_from_entry(entry),
            Self::Span(span) => room.fill_from(*span),
        }
    }
}

/// A segment in memory that this process has mapped.
#[derive(Debug)]
pub struct MappedSegment(Memory);

impl MappedSegment {
    /// Makes a segment of mapped memory, which must have [`LEN`] bytes.
    #[must_use]
    pub const fn new(memory: Memory) -> Self {
        Self(memory)
    }
}

impl Words for MappedSegment {
    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.0.word(at).map_or(0, |word| word.load(Ordering::Acquire))
    }

    #[inline]
    fn store(&self, at: usize, value: u64) {
        if let Some(word) = self.0.word(at) {
            word.store(value, Ordering::Release);
        }
    }

    #[inline]
    fn peek(&self, at: usize) -> u64 {
        self.0.word(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    #[inline]
    fn poke(&self, at: usize, value: u64) {
        if let Some(word) = self.0.word(at) {
            word.store(value, Ordering::Relaxed);
        }
    }

    #[inline]
    fn swap(&self, at: usize, value: u64) -> u64 {
        self.0.word(at).map_or(0, |word| word.swap(value, Ordering::SeqCst))
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

impl Segment for MappedSegment {
    #[inline]
    fn part(&self, at: usize, len: usize) -> Option<Span<'_>> {
        self.0.span(at, len)
    }

    #[inline]
    fn put(&self, at: usize, payload: &SegmentPayload<'_>) {
        if let Some(room) = self.0.span(at, payload.len()) {
            payload.copy_into(room);
        }
    }
}
