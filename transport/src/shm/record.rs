//! The records in a ring. Each begins with a word: the kind in the lowest octet, then flags, a slot, zero, and in the upper half a length.
//! Words of its kind follow, then a word that says where the payload is, or the payload.

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Nothing, up to the end of the ring: the length is that of the record.
    Pad = 1,
    /// The first record of the active side: the connection is in its segment from here on.
    Ready,
    /// A part of a message.
    Send,
    /// The same, of a message that takes a key back.
    SendInvalidate,
    /// A part of a write.
    Write,
    /// The immediate data behind a write.
    Immediate,
    /// A question for memory.
    Read,
    /// Atomic operations.
    CompareSwap,
    FetchAdd,
    /// A part of the answer to a read.
    Data,
    /// The answer to an atomic operation.
    Value,
    /// The sender ends the connection: the peer has done what it may not.
    Refusal,
    /// The sender has mapped a window, or has not.
    Mapped,
}

/// The last part of what it is a part of.
pub(super) const LAST: u8 = 1;
/// The payload is in a window: behind the words of the kind, its offset there.
pub(super) const ELSEWHERE: u8 = 2;

/// Length of a word, bytes.
pub(super) const WORD: usize = 8;

impl Kind {
    const fn of(raw: u8) -> Option<Self> {
        Some(match raw {
            1 => Self::Pad,
            2 => Self::Ready,
            3 => Self::Send,
            4 => Self::SendInvalidate,
            5 => Self::Write,
            6 => Self::Immediate,
            7 => Self::Read,
            8 => Self::CompareSwap,
            9 => Self::FetchAdd,
            10 => Self::Data,
            11 => Self::Value,
            12 => Self::Refusal,
            13 => Self::Mapped,
            _ => return None,
        })
    }

    /// Words of the kind, behind the first one.
    pub(super) const fn words(self) -> usize {
        match self {
            Self::Pad | Self::Ready | Self::Send | Self::Data => 0,
            Self::SendInvalidate | Self::Immediate | Self::Value | Self::Refusal | Self::Mapped => 1,
            Self::Write | Self::Read => 2,
            Self::FetchAdd => 3,
            Self::CompareSwap => 4,
        }
    }

    /// Whether the length is that of a payload.
    const fn has_payload(self) -> bool {
        matches!(self, Self::Send | Self::SendInvalidate | Self::Write | Self::Data)
    }
}

/// The first word of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) flags: u8,
    /// The window that the payload is in, or that the record is about.
    pub(super) slot: u8,
    pub(super) len: u32,
}

impl Header {
    pub(super) const fn new(kind: Kind, len: u32) -> Self {
        Self { kind, flags: 0, slot: 0, len }
    }

    #[inline]
    pub(super) const fn emit(self) -> u64 {
        self.kind as u64 | (self.flags as u64) << 8 | (self.slot as u64) << 16 | (self.len as u64) << 32
    }

    /// `None` for a kind that is not known.
    #[inline]
    pub(super) const fn parse(word: u64) -> Option<Self> {
        let Some(kind) = Kind::of(word as u8) else { return None };
        Some(Self { kind, flags: (word >> 8) as u8, slot: (word >> 16) as u8, len: (word >> 32) as u32 })
    }

    #[inline]
    pub(super) const fn is_last(self) -> bool {
        self.flags & LAST != 0
    }

    #[inline]
    pub(super) const fn is_elsewhere(self) -> bool {
        self.flags & ELSEWHERE != 0
    }

    /// Where the payload, or the offset of one that is elsewhere, begins.
    #[inline]
    pub(super) const fn body(self) -> usize {
        WORD * (1 + self.kind.words())
    }

    /// Length of the record, bytes; of a length that a peer has stated, it may be far more than a ring holds.
    #[inline]
    pub(super) const fn size(self) -> usize {
        let rest = match self.kind {
            Kind::Pad => return self.len as usize,
            _ if self.is_elsewhere() => WORD,
            kind if kind.has_payload() => (self.len as usize).next_multiple_of(WORD),
            _ => 0,
        };
        self.body() + rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_emitted_is_parsed() {
        for raw in 0..=u8::MAX {
            let Some(kind) = Kind::of(raw) else {
                assert!(raw == 0 || raw > 13);
                continue;
            };
            for (flags, slot, len) in [(0, 0, 0), (LAST, 31, 1), (ELSEWHERE, 255, u32::MAX), (255, 7, 4096)] {
                let header = Header { kind, flags, slot, len };
                assert_eq!((Header::parse(header.emit()), kind as u8), (Some(header), raw));
                assert!(kind == Kind::Pad || header.size() >= header.body() && header.size() % 8 == 0, "{header:?}");
            }
        }
    }
}
