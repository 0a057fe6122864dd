//! A tape: bytes as a source of choices. Any bytes are a tape, and a tape that has ended returns zeros.

/// A tape of bytes.
#[derive(Debug)]
pub struct Tape<'a>(&'a [u8]);

impl<'a> Tape<'a> {
    /// Creates a tape that begins at the first byte.
    #[must_use]
    pub fn new(octets: &'a [u8]) -> Self {
        Self(octets)
    }

    /// Returns true if no bytes remain.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// Returns the next four bytes, little-endian.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Returns true if the next byte is below `of`.
    pub fn below(&mut self, of: u8) -> bool {
        self.byte() < of
    }

    /// Returns a number from 0 to 2^32 - 1 that is small most of the time.
    pub fn number(&mut self) -> u32 {
        match self.byte() {
            octet @ 0..=199 => u32::from(octet),
            200..=239 => u32::from(self.byte()) << 3,
            _ => self.word(),
        }
    }

    /// Returns the next bytes, at most `most`. The tape chooses their number.
    pub fn octets(&mut self, most: usize) -> &'a [u8] {
        let len = (self.number() as usize).min(most).min(self.0.len());
        let (now, rest) = self.0.split_at(len);
        self.0 = rest;
        now
    }

    /// Returns all remaining bytes.
    #[must_use]
    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}
