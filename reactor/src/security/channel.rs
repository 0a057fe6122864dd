//! The keys of a connection after its handshake: messages and large messages are sealed and opened in place.
//!
//! The transport is reliable and ordered, so the number of a message is implicit: each side counts. A message that was
//! changed, repeated, dropped or moved does not open, and its connection ends. Each direction has two sequences with keys of
//! their own: its messages, and the segments of its large messages, which are opened when they are fetched. Keys are
//! renewed after a fixed amount of work, which both sides count, so that nothing has to be said about it.

use std::fmt;
use std::ops::Range;

/// Octets that sealing adds to a message: the authentication tag of the AEAD.
pub(crate) const TAG: usize = 16;

/// Longest part of a large message that is sealed at once, bytes.
pub(crate) const SEGMENT: usize = 64 << 10;

/// Units of work after which a key is replaced. A message is one unit, and one more for each 16 KiB, which are 1,024
/// blocks of a cipher. So a key seals at most 2^33 blocks, less than the 2^35 of RFC 9001 section B.1, or one message that has
/// more.
const UNITS_PER_KEY: u64 = 1 << 22;

/// The key of one sequence. The caller never uses a number twice with the same key.
pub(crate) trait CipherKey: Send {
    /// Encrypts `body`, and authenticates it with `header`. `None`: it is too long.
    fn seal(&self, number: u64, header: &[u8], body: &mut [u8]) -> Option<[u8; TAG]>;

    /// Checks `body` with its tag at the end, and decrypts it; `false`: it is not what was sealed.
    fn open(&self, number: u64, header: &[u8], body: &mut [u8]) -> bool;

    /// Becomes the next key. The one before cannot be had from it.
    fn renew(&mut self);
}

/// The keys of one sequence in one direction.
struct Sequence {
    key: Box<dyn CipherKey>,
    /// Number of the next message or segment.
    next: u64,
    /// Units of work of the key.
    spent: u64,
}

impl Sequence {
    fn new(key: Box<dyn CipherKey>) -> Self {
        Self { key, next: 0, spent: 0 }
    }

    /// Takes `count` numbers for a message of `len` bytes, all of the same key. Returns the first.
    #[inline]
    fn take(&mut self, count: u64, len: usize) -> u64 {
        let units = count + (len as u64 >> 14);
        if self.spent + units > UNITS_PER_KEY && self.spent > 0 {
            // The keys in between are those of the direction's other sequence.
            self.key.renew();
            self.key.renew();
            self.spent = 0;
        }
        self.spent += units;
        let first = self.next;
        if !cfg!(planted = "nonce-reused") || first % 16 != 15 {
            self.next += count;
        }
        first
    }
}

/// The part of a message that is authenticated and not encrypted.
#[inline]
fn split(message: &mut [u8], header: usize) -> (&[u8], &mut [u8]) {
    let (header, body) = message.split_at_mut(header);
    (if cfg!(planted = "header-not-authenticated") { &[] } else { header }, body)
}

/// The two sequences of one direction.
struct Direction {
    messages: Sequence,
    segments: Sequence,
}

impl Direction {
    /// `first` and `second` are keys of a chain, one after the other.
    fn new(first: Box<dyn CipherKey>, second: Box<dyn CipherKey>) -> Self {
        Self { messages: Sequence::new(first), segments: Sequence::new(second) }
    }
}

/// The keys for what this side sends.
pub(crate) struct Sealer(Direction);

/// The keys for what the peer sends.
pub(crate) struct Opener(Direction);

/// The keys of both directions.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sealer({} messages)", self.0.messages.next)
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opener({} messages)", self.0.messages.next)
    }
}

impl Sealer {
    /// Each pair is a key and the one that follows it.
    #[allow(dead_code, reason = "without the features nothing makes one")]
    pub(super) fn new(first: Box<dyn CipherKey>, second: Box<dyn CipherKey>) -> Self {
        Self(Direction::new(first, second))
    }

    /// Seals a message: `header` octets at its beginning stay readable, and the last [`TAG`] octets are room for the tag.
    /// `false`: it is too long, and must not be sent.
    #[inline]
    #[must_use]
    pub(crate) fn seal(&mut self, message: &mut [u8], header: usize) -> bool {
        let end = message.len() - TAG;
        let number = self.0.messages.take(1, end);
        let (sealed, tag) = message.split_at_mut(end);
        let (header, body) = split(sealed, header);
        let Some(sum) = self.0.messages.key.seal(number, header, body) else { return false };
        tag.copy_from_slice(&sum);
        true
    }

    /// Begins a large message of `len` bytes; its segments are sealed before the next one begins.
    pub(crate) fn begin(&mut self, len: u64) -> Segments {
        Segments { len, first: self.0.segments.take(segments(len), len as usize) }
    }

    /// Seals segment `index` of a large message. Returns its tag.
    pub(crate) fn seal_segment(&self, of: Segments, index: u64, bytes: &mut [u8]) -> Option<[u8; TAG]> {
        self.0.segments.key.seal(of.first + index, &of.len.to_le_bytes(), bytes)
    }
}

impl Opener {
    /// See [`Sealer::new`].
    #[allow(dead_code, reason = "without the features nothing makes one")]
    pub(super) fn new(first: Box<dyn CipherKey>, second: Box<dyn CipherKey>) -> Self {
        Self(Direction::new(first, second))
    }

    /// Opens a message in place: behind `header` octets its body, and then the tag. Returns the length without the tag;
    /// `None`: it is not the next message that the peer has sealed.
    #[inline]
    pub(crate) fn open(&mut self, message: &mut [u8], header: usize) -> Option<usize> {
        let end = message.len().checked_sub(TAG).filter(|&end| end >= header)?;
        if cfg!(planted = "sequence-not-checked") {
            // Whichever of the last messages it is, and the next.
            for back in (0..=self.0.messages.next.min(8)).rev() {
                let mut copy = message.to_vec();
                let (header, body) = split(&mut copy, header);
                if self.0.messages.key.open(self.0.messages.next - back, header, body) {
                    message.copy_from_slice(&copy);
                    self.0.messages.next += u64::from(back == 0);
                    return Some(end);
                }
            }
            return None;
        }
        let number = self.0.messages.take(1, end);
        let (header, body) = split(message, header);
        self.0.messages.key.open(number, header, body).then_some(end)
    }

    /// Begins a large message of `len` bytes. The peer has begun its large messages in the same order.
    pub(crate) fn begin(&mut self, len: u64) -> Segments {
        Segments { len, first: self.0.segments.take(segments(len), len as usize) }
    }

    /// Opens segment `index` of a large message in place: `bytes` are those of the segment and, behind them, [`TAG`] octets
    /// that are changed and put back.
    #[must_use]
    pub(crate) fn open_segment(&self, of: Segments, index: u64, bytes: &mut [u8], tag: [u8; TAG]) -> bool {
        let Some(rest) = bytes.last_chunk_mut::<TAG>() else { return false };
        let kept = std::mem::replace(rest, tag);
        let opened = self.0.segments.key.open(of.first + index, &of.len.to_le_bytes(), bytes);
        if let Some(rest) = bytes.last_chunk_mut::<TAG>() {
            *rest = kept;
        }
        opened
    }
}

/// A large message that is sealed, or that is being opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segments {
    /// Its length, bytes.
    len: u64,
    /// Number of its first segment.
    first: u64,
}

/// Number of segments of a large message.
pub(crate) const fn segments(len: u64) -> u64 {
    len.div_ceil(SEGMENT as u64)
}

/// The octets of a segment.
pub(crate) fn segment(index: u64, len: u64) -> Range<usize> {
    let start = index * SEGMENT as u64;
    start as usize..(start + SEGMENT as u64).min(len) as usize
}

/// Octets behind a sealed large message: the tags of its segments, and what fills them up to 64. The siw of Linux 6.1
/// answers a read of at most 32 bytes that crosses a page with wrong bytes.
pub(crate) const fn tail(len: u64) -> u64 {
    let tags = segments(len) * TAG as u64;
    if tags < 64 { 64 } else { tags }
}
