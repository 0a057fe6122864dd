//! The records in a ring. The first word of a record is its header. Its lowest byte is the kind; the next three bytes
//! are the flags, a slot and a zero byte; the upper half of the header is a length. The kind defines the words that
//! follow the header. After these words is the payload, or a word with the offset of the payload in a window.

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum RecordKind {
    /// Fills the ring up to its end. The length in the header is that of the whole record.
    Pad = 1,
    /// The first record of the active side. From this record on, both sides use the segment and not the TCP stream.
    Ready,
    /// A part of a message.
    Send,
    /// A part of a message that invalidates a key of the receiver.
    SendInvalidate,
    /// A part of a write.
    Write,
    /// The immediate data of a write. This record follows the last part of the write.
    Immediate,
    /// A read request.
    Read,
    /// A compare-and-swap request.
    CompareSwap,
    /// A fetch-and-add request.
    FetchAdd,
    /// A part of the response to a read.
    Data,
    /// The response to an atomic operation.
    Value,
    /// The sender ends the connection because the receiver has violated the protocol.
    Refusal,
    /// The reply to an announcement of memory: the sender of the reply has mapped the memory as a window, or has failed
    /// to map it.
    Mapped,
}

/// The flag of the last part of a message, a write or a response.
pub(super) const LAST: u8 = 1;
/// The flag of a record whose payload is in a window. A word with the payload's offset in the window takes the place of
/// the payload.
pub(super) const IN_WINDOW: u8 = 2;

/// The length of a word in bytes.
pub(super) const WORD: usize = 8;

impl RecordKind {
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

    /// Returns the number of words that this kind of record has between header and payload.
    pub(super) const fn words(self) -> usize {
        match self {
            Self::Pad | Self::Ready | Self::Send | Self::Data => 0,
            Self::SendInvalidate | Self::Immediate | Self::Value | Self::Refusal | Self::Mapped => 1,
            Self::Write | Self::Read => 2,
            Self::FetchAdd => 3,
            Self::CompareSwap => 4,
        }
    }

    /// Returns true if the length in the header of this kind of record is the length of a payload.
    const fn has_payload(self) -> bool {
        matches!(self, Self::Send | Self::SendInvalidate | Self::Write | Self::Data)
    }
}

/// The header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordHeader {
    pub(super) kind: RecordKind,
    pub(super) flags: u8,
    /// The slot of the window with the payload. In a reply to an announcement, the slot that was announced.
    pub(super) slot: u8,
    pub(super) len: u32,
}

impl RecordHeader {
    pub(super) const fn new(kind: RecordKind, len: u32) -> Self {
        Self { kind, flags: 0, slot: 0, len }
    }

    #[inline]
    pub(super) const fn emit(self) -> u64 {
        self.kind as u64 | (self.flags as u64) << 8 | (self.slot as u64) << 16 | (self.len as u64) << 32
    }

    /// Parses a header. Returns `None` if the kind is unknown.
    #[inline]
    pub(super) const fn parse(word: u64) -> Option<Self> {
        let Some(kind) = RecordKind::of(word as u8) else { return None };
        Some(Self { kind, flags: (word >> 8) as u8, slot: (word >> 16) as u8, len: (word >> 32) as u32 })
    }

    #[inline]
    pub(super) const fn is_last(self) -> bool {
        self.flags & LAST != 0
    }

    #[inline]
    pub(super) const fn is_in_window(self) -> bool {
        self.flags & IN_WINDOW != 0
    }

    /// Returns the offset of the payload in the record. If the payload is in a window, returns the
    /// offset of the word that contains the payload's offset in the window.
    #[inline]
    pub(super) const fn body(self) -> usize {
        WORD * (1 + self.kind.words())
    }

    /// Returns the length of the record in bytes. A peer may write any payload length into the header, so the result may
    /// exceed the ring.
    #[inline]
    pub(super) const fn size(self) -> usize {
        let rest = match self.kind {
            RecordKind::Pad => return self.len as usize,
            _ if self.is_in_window() => WORD,
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
            let Some(kind) = RecordKind::of(raw) else {
                assert!(raw == 0 || raw > 13);
                continue;
            };
            for (flags, slot, len) in [(0, 0, 0), (LAST, 31, 1), (IN_WINDOW, 255, u32::MAX), (255, 7, 4096)] {
                let header = RecordHeader { kind, flags, slot, len };
                assert_eq!((RecordHeader::parse(header.emit()), kind as u8), (Some(header), raw));
                assert!(
                    kind == RecordKind::Pad || header.size() >= header.body() && header.size() % 8 == 0,
                    "{header:?}"
                );
            }
        }
    }
}
