//! The segment of a connection: a memory file that the processes of both sides map. The segment contains a ring of
//! records for each direction, the words in which a side announces that it sleeps, and the tables of the memory that
//! each side lends to its peer.
//!
//! A segment has two halves, one for each direction. All offsets are in bytes, from the start of the segment or of a
//! half.

use std::fmt;
use std::sync::atomic::{Ordering, fence};

use crate::entries::ENTRIES;
use rdma_transport::mem::{Memory, Sge, Span};

/// The length of a segment in bytes.
pub const LEN: usize = 2 * HALF; // bound: rings
/// The length in bytes of each of the two halves of a segment.
pub const HALF: usize = 16 << 10;
/// The offset in a half of the head word: the position behind the last record that the producer has
/// published. Only the producer stores it.
pub const HEAD: usize = 0;
/// The offset in a half of the tail word: the position behind the last record that the consumer has
/// released. Only the consumer stores it.
pub const TAIL: usize = 128;
/// The offset in a half of the call word. Before the consumer sleeps, it stores in this word the
/// events for which the producer must wake the consumer, as bits: 1 for new records, 2 for room in
/// the ring of the other half. The word is 0 while the consumer is awake.
pub const CALL: usize = 256;
/// The offset in a half of the table of lendings: memory of the producer that the consumer may map.
pub const TABLE: usize = 384;
/// The number of entries of the table of lendings.
pub const SLOTS: usize = 32;
/// The offset in a half of the ring of records.
pub const RING: usize = 1 << 10;
/// The length of a ring in bytes.
pub const CAPACITY: usize = HALF - RING;

/// The side of a connection. Each side produces records in its own half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentSide {
    /// The side that initiated the connection. It has created the segment.
    Active,
    /// The side that accepted the connection.
    Passive,
}

impl SegmentSide {
    /// Returns the offset of the half in which this side produces records.
    pub const fn outgoing(self) -> usize {
        match self {
            Self::Active => 0,
            Self::Passive => HALF,
        }
    }

    /// Returns the offset of the half from which this side consumes records.
    pub const fn incoming(self) -> usize {
        HALF - self.outgoing()
    }
}

/// Operations on the words of a segment. A word is 8 bytes at a multiple of 8; `at` is its offset in the segment.
///
/// This is a trait so that a model checker and the simulation can interleave the operations of the two sides.
pub trait Words: fmt::Debug + Send {
    /// Loads a word that the peer stores, with acquire ordering. Everything that the peer wrote before its store is
    /// visible afterwards.
    fn load(&self, at: usize) -> u64;

    /// Stores a word that the peer loads, with release ordering. A peer that loads the value also sees everything
    /// written before the store.
    fn store(&self, at: usize, value: u64);

    /// Loads a word with relaxed ordering. The words of a published record need no stronger ordering.
    fn peek(&self, at: usize) -> u64;

    /// Stores a word with relaxed ordering. The words of a record need no stronger ordering until the record is
    /// published.
    fn poke(&self, at: usize, value: u64);

    /// Stores a word with sequentially consistent ordering, and returns its old value.
    fn swap(&self, at: usize, value: u64) -> u64;

    /// Issues a sequentially consistent fence: a load behind the fence is never executed before a store in front of the
    /// fence.
    fn fence(&self);
}

/// A segment that one side has mapped.
pub trait Segment: Words + 'static {
    /// Returns `len` bytes at the offset `at` for reading. Returns `None` unless all these bytes are inside the
    /// segment.
    fn part(&self, at: usize, len: usize) -> Option<Span<'_>>;

    /// Copies a payload to the offset `at`. Does nothing if the payload would not end inside the segment.
    fn put(&self, at: usize, payload: &SegmentPayload<'_>);

    /// Keeps the pages of the segment when it is dropped ([`Memory::keep_pages`]), so that the peer
    /// can still read the last records.
    fn keep_pages(&self);
}

/// The source of bytes that are copied into a segment.
#[derive(Clone, Copy, Debug)]
pub enum SegmentPayload<'a> {
    /// Bytes that no other thread or process writes during the copy.
    Bytes(&'a [u8]),
    /// The memory of a work request's scatter-gather entry.
    Entry(EntryPayload<'a>),
    /// Memory that other threads or processes may write during the copy.
    Span(Span<'a>),
}

/// A scatter-gather entry of a posted work request that has not completed. Only the provider can
/// construct this type.
#[derive(Clone, Copy, Debug)]
pub struct EntryPayload<'a>(pub(super) &'a Sge);

impl SegmentPayload<'_> {
    /// Returns the length of the payload in bytes.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Entry(entry) => entry.0.len(),
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
            Self::Entry(entry) => ENTRIES.append_to(entry.0, out),
            Self::Span(span) => span.append_to(out),
        }
    }

    /// Copies the payload to the start of `room`. Copies only as many bytes as fit.
    #[inline]
    pub(super) fn copy_into(&self, room: Span<'_>) {
        match self {
            Self::Bytes(bytes) => room.fill(bytes),
            Self::Entry(entry) => ENTRIES.copy_to_span(entry.0, room),
            Self::Span(span) => room.fill_from(*span),
        }
    }
}

/// A segment in memory that this process has mapped.
#[derive(Debug)]
pub struct MappedSegment(Memory);

impl MappedSegment {
    /// Creates a segment from mapped memory, which must have [`LEN`] bytes.
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

    fn keep_pages(&self) {
        self.0.keep_pages();
    }
}

/// A segment for tests. Each load of the table word of one lending also ends this lending, as if
/// the peer ended it right after the load. So the lending ends while the local side copies a
/// payload.
#[cfg(all(test, not(loom_model)))]
#[derive(Debug)]
pub(super) struct EndingSegment {
    pub(super) inner: MappedSegment,
    /// The offset of the lending's word in the segment.
    pub(super) word: usize,
}

#[cfg(all(test, not(loom_model)))]
impl Words for EndingSegment {
    fn load(&self, at: usize) -> u64 {
        let value = self.inner.load(at);
        if at == self.word {
            self.inner.store(at, value.wrapping_add(1 << 32));
        }
        value
    }
    fn store(&self, at: usize, value: u64) {
        self.inner.store(at, value);
    }
    fn peek(&self, at: usize) -> u64 {
        self.inner.peek(at)
    }
    fn poke(&self, at: usize, value: u64) {
        self.inner.poke(at, value);
    }
    fn swap(&self, at: usize, value: u64) -> u64 {
        self.inner.swap(at, value)
    }
    fn fence(&self) {
        self.inner.fence();
    }
}

#[cfg(all(test, not(loom_model)))]
impl Segment for EndingSegment {
    fn part(&self, at: usize, len: usize) -> Option<Span<'_>> {
        self.inner.part(at, len)
    }
    fn put(&self, at: usize, payload: &SegmentPayload<'_>) {
        self.inner.put(at, payload);
    }
    fn keep_pages(&self) {
        self.inner.keep_pages();
    }
}
