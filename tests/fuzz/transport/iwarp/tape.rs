//! A tape: bytes that a test reads as a sequence of choices. Any bytes are a valid tape. A tape that has ended returns
//! zeros.

/// Bytes that are read as a sequence of choices.
#[derive(Debug)]
pub struct Tape<'a>(&'a [u8]);

impl<'a> Tape<'a> {
    /// Creates a tape from these bytes.
    #[must_use]
    pub fn new(octets: &'a [u8]) -> Self {
        Self(octets)
    }

    /// Returns true if no bytes remain.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next byte, or 0 if the tape has ended.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// Returns the next four bytes as a little-endian number.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Reads one byte. Returns true if it is below `of`, so with a chance of `of` in 256.
    pub fn below(&mut self, of: u8) -> bool {
        self.byte() < of
    }

    /// Returns a number of any size that is small most of the time.
    pub fn number(&mut self) -> u32 {
        match self.byte() {
            octet @ 0..=199 => u32::from(octet),
            200..=239 => u32::from(self.byte()) << 3,
            _ => self.word(),
        }
    }

    /// Returns the next bytes. The tape chooses how many, at most `most`.
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
