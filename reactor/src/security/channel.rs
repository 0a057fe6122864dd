//! The keys of a connection after its handshake. They encrypt (*seal*) and decrypt (*open*) messages in place.
//!
//! The transport is reliable and ordered, so a message carries no sequence number: both sides count the messages. If a message was changed,
//! repeated, dropped or reordered, the next message that arrives is not authentic, and the connection ends.
//!
//! Each direction has two sequences with separate keys. One is for messages. The other is for the segments of large messages, because these
//! are decrypted later, after they were fetched. A key is renewed after a fixed amount of work. Both sides count this work, so renewal
//! needs no message.

use std::fmt;
use std::ops::Range;

/// The length of the authentication tag (AEAD) that sealing appends to a message, in bytes.
pub(crate) const TAG: usize = 16;

/// The length of a segment, in bytes. A large message is encrypted in segments of this length.
pub(crate) const SEGMENT: usize = 64 << 10;

/// The number of units of work after which a key is renewed. A message counts as one unit, plus one unit for each 16 KiB, which are 1,024
/// cipher blocks. So a key encrypts at most about 2^33 blocks, and RFC 9001 section B.1 permits 2^35. Only a single message with more than
/// 2^33 blocks exceeds this number.
const UNITS_PER_KEY: u64 = 1 << 22;

/// The key of one sequence. The caller must not encrypt two messages with the same number and the same key.
pub(crate) trait CipherKey: Send {
    /// Encrypts `body`, and authenticates it together with `header`. Returns the tag, or `None` if `body` is too long.
    fn seal(&self, number: u64, header: &[u8], body: &mut [u8]) -> Option<[u8; TAG]>;

    /// Verifies `body`, which ends with its tag, and decrypts it. Returns `false` if `body` is not authentic.
    fn open(&self, number: u64, header: &[u8], body: &mut [u8]) -> bool;

    /// Replaces the key by the next one. The old key cannot be derived from the next one.
    fn renew(&mut self);
}

/// The key and the counters of one sequence in one direction.
struct Sequence {
    key: Box<dyn CipherKey>,
    /// The number of the next message or segment.
    next: u64,
    /// The work for which numbers are reserved since `required` last changed, in the units of
    /// [`UNITS_PER_KEY`].
    spent: u64,
    /// The number of renewals after which the key encrypts or decrypts the message whose numbers
    /// were reserved last. A receiver may reserve numbers before it decrypts earlier messages. In
    /// this time, `required` can be greater than `renewals`.
    required: u64,
    /// The number of renewals of the key so far.
    renewals: u64,
}

impl Sequence {
    fn new(key: Box<dyn CipherKey>) -> Self {
        Self { key, next: 0, spent: 0, required: 0, renewals: 0 }
    }

    /// Reserves `count` numbers for a message of `len` bytes, all for the same key. Returns the first number. The key must be renewed
    /// `required` times before it encrypts or decrypts this message.
    #[inline]
    fn reserve(&mut self, count: u64, len: usize) -> u64 {
        let units = count + (len as u64 >> 14);
        if self.spent + units > UNITS_PER_KEY && self.spent > 0 {
            self.required += 1;
            self.spent = 0;
        }
        self.spent += units;
        let first = self.next;
        if !crate::planted("nonce-reused") || first % 16 != 15 {
            self.next += count;
        }
        first
    }

    /// Reserves numbers like [`Sequence::reserve`], and renews the key if the message requires it.
    #[inline]
    fn take(&mut self, count: u64, len: usize) -> u64 {
        let before = self.required;
        let first = self.reserve(count, len);
        if self.required != before {
            self.renew(self.required);
        }
        first
    }

    /// Renews the key until it was renewed `required` times.
    fn renew(&mut self, required: u64) {
        while self.renewals < required {
            // The keys of a direction form a chain. One sequence uses the keys at even positions of the chain, and the other sequence uses
            // the keys at odd positions. So each renewal moves two keys ahead.
            self.key.renew();
            self.key.renew();
            self.renewals += 1;
        }
    }
}

/// Splits a message into its header, which is only authenticated, and its body, which is also encrypted.
#[inline]
fn split(message: &mut [u8], header: usize) -> (&[u8], &mut [u8]) {
    let (header, body) = message.split_at_mut(header);
    (if crate::planted("header-not-authenticated") { &[] } else { header }, body)
}

/// The two sequences of one direction.
struct Direction {
    messages: Sequence,
    segments: Sequence,
}

impl Direction {
    /// Creates the two sequences of one direction from two consecutive keys of the direction's
    /// chain: see [`Sequence::renew`].
    fn new(first: Box<dyn CipherKey>, second: Box<dyn CipherKey>) -> Self {
        Self { messages: Sequence::new(first), segments: Sequence::new(second) }
    }
}

/// The keys that encrypt messages to the peer.
pub(crate) struct Sealer(Direction);

/// The keys that decrypt messages from the peer.
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
    /// Creates the keys of one direction from two consecutive keys of the direction's chain: see
    /// [`Sequence::renew`].
    #[allow(dead_code, reason = "without the features nothing makes one")]
    pub(super) fn new(first: Box<dyn CipherKey>, second: Box<dyn CipherKey>) -> Self {
        Self(Direction::new(first, second))
    }

    /// Encrypts a message in place. Its first `header` bytes stay readable, and its last [`TAG`] bytes are space for the tag. Returns
    /// `false` if the message is too long to be encrypted. Such a message must not be sent.
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

    /// Reserves the numbers of a large message of `len` bytes. All its segments must be encrypted before the next large message begins.
    pub(crate) fn begin(&mut self, len: u64) -> Segments {
        let first = self.0.segments.take(segments(len), len as usize);
        Segments { len, first, renewals: self.0.segments.renewals }
    }

    /// Encrypts segment `index` of a large message in place. Returns its tag, or `None` if the segment is too long.
    pub(crate) fn seal_segment(&self, of: Segments, index: u64, bytes: &mut [u8]) -> Option<[u8; TAG]> {
        self.0.segments.key.seal(of.first + index, &of.len.to_le_bytes(), bytes)
    }
}

impl Opener {
    /// Creates the keys of one direction from two consecutive keys of the direction's chain: see
    /// [`Sequence::renew`].
    #[allow(dead_code, reason = "without the features nothing makes one")]
    pub(super) fn new(first: Box<dyn CipherKey>, second: Box<dyn CipherKey>) -> Self {
        Self(Direction::new(first, second))
    }

    /// Decrypts a message in place. The message consists of a header of `header` bytes, the body, and the tag. Returns the length of the
    /// message without the tag. `None` if the message is not the next one that the peer has encrypted.
    #[inline]
    pub(crate) fn open(&mut self, message: &mut [u8], header: usize) -> Option<usize> {
        let end = message.len().checked_sub(TAG).filter(|&end| end >= header)?;
        if crate::planted("sequence-not-checked") {
            // A deliberate defect, which the tests must find: each of the last eight messages is accepted a second time.
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

    /// Reserves the numbers of a large message of `len` bytes. Call `begin` for all large messages
    /// in the order in which the peer has encrypted them, including messages that are refused and
    /// never decrypted. The call may precede the decryption of earlier messages.
    pub(crate) fn begin(&mut self, len: u64) -> Segments {
        let first = self.0.segments.reserve(segments(len), len as usize);
        Segments { len, first, renewals: self.0.segments.required }
    }

    /// Decrypts segment `index` of a large message in place. `bytes` has the segment, followed by
    /// [`TAG`] bytes that do not belong to the segment. These bytes are overwritten and then
    /// restored. Returns `false` if the segment is not authentic. The large messages must be
    /// decrypted in the order of the calls of [`Opener::begin`].
    #[must_use]
    pub(crate) fn open_segment(&mut self, of: Segments, index: u64, bytes: &mut [u8], tag: [u8; TAG]) -> bool {
        self.0.segments.renew(of.renewals);
        let Some(rest) = bytes.last_chunk_mut::<TAG>() else { return false };
        let kept = std::mem::replace(rest, tag);
        let opened = self.0.segments.key.open(of.first + index, &of.len.to_le_bytes(), bytes);
        if let Some(rest) = bytes.last_chunk_mut::<TAG>() {
            *rest = kept;
        }
        opened
    }
}

/// The sequence numbers of the segments of a large message that is being encrypted or decrypted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segments {
    /// The length of the message, in bytes.
    len: u64,
    /// The sequence number of the first segment. The next segments have the next numbers.
    first: u64,
    /// The number of renewals after which the key encrypts or decrypts this message.
    renewals: u64,
}

/// Returns the number of segments of a large message of `len` bytes.
pub(crate) const fn segments(len: u64) -> u64 {
    len.div_ceil(SEGMENT as u64)
}

/// Returns the byte range of segment `index` in a message of `len` bytes.
pub(crate) fn segment(index: u64, len: u64) -> Range<usize> {
    let start = index * SEGMENT as u64;
    start as usize..(start + SEGMENT as u64).min(len) as usize
}

/// Returns the number of bytes behind an encrypted large message of `len` bytes: the tags of its segments, padded to at least 64 bytes. The
/// padding is necessary because the siw driver of Linux 6.1 answers a Read of at most 32 bytes that crosses a page with wrong bytes.
pub(crate) const fn tail(len: u64) -> u64 {
    let tags = segments(len) * TAG as u64;
    if tags < 64 { 64 } else { tags }
}
