//! The segment of a connection: a memory file with one ring for each direction, the words that say who sleeps, and the table of the
//! memory that a side lets its peer map.
//!
//! A segment has two halves, one for each direction. All positions are offsets in the segment, bytes.

use std::fmt;
use std::sync::atomic::{Ordering, fence};

use crate::mem::{Memory, Sge, Span};

/// Length of a segment, bytes.
pub const LEN: usize = 2 * HALF;
/// Length of the half of one direction.
pub const HALF: usize = 16 << 10;
/// In a half: the position behind the last record, which its producer stores.
pub const HEAD: usize = 0;
/// In a half: the position behind the last record that was consumed, which its consumer stores.
pub const TAIL: usize = 128;
/// In a half: what its consumer, which may sleep, is to be called for.
pub const CALL: usize = 256;
/// In a half: the table of the memory that its producer lets its consumer map.
pub const TABLE: usize = 384;
/// Entries of the table.
pub const SLOTS: usize = 32;
/// In a half: the ring.
pub const RING: usize = 1 << 10;
/// Length of a ring.
pub const CAPACITY: usize = HALF - RING;

/// The end of a connection, which decides on the half that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that has connected, and has made the segment.
    Active,
    /// The one that has accepted.
    Passive,
}

impl Side {
    /// Where the half begins that this side produces in.
    pub const fn outgoing(self) -> usize {
        match self {
            Self::Active => 0,
            Self::Passive => HALF,
        }
    }

    /// Where the half begins that this side consumes from.
    pub const fn incoming(self) -> usize {
        HALF - self.outgoing()
    }
}

/// The words of a segment: 8 bytes at a multiple of 8. Positions are inside the segment.
///
/// The operations are a seam, so that a model checker and the simulation can put theirs between those of the two sides.
pub trait Words: fmt::Debug + Send {
    /// Loads a word that the peer stores: what the peer has written before is seen afterwards.
    fn load(&self, at: usize) -> u64;

    /// Stores a word that the peer loads: what was written before is seen by a peer that loads it.
    fn store(&self, at: usize, value: u64);

    /// Loads a word of a record, or one that orders nothing.
    fn peek(&self, at: usize) -> u64;

    /// Stores a word of a record, or one that orders nothing.
    fn poke(&self, at: usize, value: u64);

    /// Exchanges a word.
    fn swap(&self, at: usize, value: u64) -> u64;

    /// Orders all stores before it in front of all loads behind it.
    fn fence(&self);
}

/// A segment as one side has it mapped.
pub trait Segment: Words {
    /// A part of it to read; `None` if it is not wholly inside.
    fn part(&self, at: usize, len: usize) -> Option<Span<'_>>;

    /// Copies a payload into it, if that is wholly inside.
    fn put(&self, at: usize, payload: &Payload<'_>);
}

/// What is copied into a segment.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Bytes that nobody writes meanwhile.
    Bytes(&'a [u8]),
    /// The memory of a work request.
    Entry(&'a Sge),
    /// Memory that others may write meanwhile.
    Span(Span<'a>),
}

impl Payload<'_> {
    /// Its length, bytes.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Entry(entry) => entry.len(),
            Self::Span(span) => span.len(),
        }
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends a copy of it.
    pub fn append_to(&self, out: &mut Vec<u8>) {
        match self {
            Self::Bytes(bytes) => out.extend_from_slice(bytes),
            Self::Entry(entry) => entry.append_to(out),
            Self::Span(span) => span.append_to(out),
        }
    }

    /// Copies it to the start of a part of a memory, as much as fits.
    #[inline]
    pub(super) fn copy_into(&self, room: Span<'_>) {
        match self {
            Self::Bytes(bytes) => room.fill(bytes),
            Self::Entry(entry) => room.fill_from_entry(entry),
            Self::Span(span) => room.fill_from(*span),
        }
    }
}

/// A segment of this process.
#[derive(Debug)]
pub struct Shared(Memory);

impl Shared {
    /// A segment in mapped memory, which has [`LEN`] bytes.
    #[must_use]
    pub const fn new(memory: Memory) -> Self {
        Self(memory)
    }
}

impl Words for Shared {
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

impl Segment for Shared {
    #[inline]
    fn part(&self, at: usize, len: usize) -> Option<Span<'_>> {
        self.0.span(at, len)
    }

    #[inline]
    fn put(&self, at: usize, payload: &Payload<'_>) {
        if let Some(room) = self.0.span(at, payload.len()) {
            payload.copy_into(room);
        }
    }
}
