//! The header in front of every message of ours, and the greeting that rides in the private data.
//!
//! Both are little more than a version and a few counters; the layouts are in `docs/wire.md`.

use crate::credit::{MAX_WINDOW, MIN_WINDOW};

/// Bytes in front of every payload.
pub(crate) const HEADER_LEN: usize = 8;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A user's message.
    Data,
    /// The active side's first message: opens the passive side.
    Hello,
    /// A grant with nothing to ride on.
    Credit,
    /// Are you there?
    Ping,
    /// Yes.
    Pong,
    /// The writes before it are placed: four bytes of immediate data, four of how much was written.
    Immediate,
    /// A message past one buffer, to be read from the sender's memory.
    Offer,
    /// It was: the memory is free.
    Fetched,
}

impl Kind {
    pub(crate) const fn raw(self) -> u8 {
        match self {
            Self::Data => 0,
            Self::Hello => 1,
            Self::Credit => 2,
            Self::Ping => 3,
            Self::Pong => 4,
            Self::Immediate => 5,
            Self::Offer => 6,
            Self::Fetched => 7,
        }
    }

    const fn from_raw(raw: u8) -> Option<Self> {
        Some(match raw {
            0 => Self::Data,
            1 => Self::Hello,
            2 => Self::Credit,
            3 => Self::Ping,
            4 => Self::Pong,
            5 => Self::Immediate,
            6 => Self::Offer,
            7 => Self::Fetched,
            _ => return None,
        })
    }
}

/// `kind:8 | zero:24 | grant:32`, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Absolute count of messages the receiver of this may send.
    pub(crate) grant: u32,
}

impl Header {
    #[inline]
    pub(crate) const fn emit(self) -> [u8; HEADER_LEN] {
        let g = self.grant.to_le_bytes();
        [self.kind.raw(), 0, 0, 0, g[0], g[1], g[2], g[3]]
    }

    /// Reads a header; `None` when the message is too short, of an unknown kind, or has reserved bits set.
    #[inline]
    pub(crate) fn parse(message: &[u8]) -> Option<(Self, &[u8])> {
        let (header, payload) = message.split_first_chunk::<HEADER_LEN>()?;
        let [kind, r0, r1, r2, g0, g1, g2, g3] = *header;
        if (r0 | r1 | r2) != 0 {
            return None;
        }
        let kind = Kind::from_raw(kind)?;
        if matches!(kind, Kind::Hello | Kind::Credit | Kind::Ping | Kind::Pong) && !payload.is_empty() {
            return None;
        }
        Some((Self { kind, grant: u32::from_le_bytes([g0, g1, g2, g3]) }, payload))
    }
}

/// Private data that every connection manager carries (`rdma_connect`(3)).
pub(crate) const PORTABLE_PRIVATE_DATA: usize = 56;
const MAGIC: [u8; 4] = *b"RDXR";
const VERSION: u8 = 1;
/// The feature bit.
const EXTENSIONS: u8 = 1;
const GREETING_LEN: usize = 20;

/// Private data left to the user, bytes.
pub const MAX_USER_PRIVATE_DATA: usize = PORTABLE_PRIVATE_DATA - GREETING_LEN;

/// Why a peer of ours was refused; travels in the private data of the reject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RejectReason {
    /// The peer's handler said no.
    Refused,
    /// The private data is not a greeting of this library.
    NotOurs,
    /// Another version of the protocol.
    Version,
    /// A window or message size that cannot work.
    Limits,
    /// The peer is at a limit of its own.
    Busy,
    /// A reason this version does not know.
    Other(u8),
}

impl RejectReason {
    const fn raw(self) -> u8 {
        match self {
            Self::Refused => 0,
            Self::NotOurs => 1,
            Self::Version => 2,
            Self::Limits => 3,
            Self::Busy => 4,
            Self::Other(raw) => raw,
        }
    }

    const fn from_raw(raw: u8) -> Self {
        match raw {
            0 => Self::Refused,
            1 => Self::NotOurs,
            2 => Self::Version,
            3 => Self::Limits,
            4 => Self::Busy,
            other => Self::Other(other),
        }
    }
}

impl std::fmt::Display for RejectReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused => f.write_str("refused by the peer's program"),
            Self::NotOurs => f.write_str("the greeting is not one of rdma-reactor"),
            Self::Version => f.write_str("the protocol versions differ"),
            Self::Limits => f.write_str("the window or message size cannot work"),
            Self::Busy => f.write_str("the peer is at a limit of its own"),
            Self::Other(raw) => write!(f, "reason {raw}"),
        }
    }
}

/// `magic:4 | version:1 | user_len:1 | reason:1 | features:1 | window:4 | max_message:4 | largest:4 | user…`, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting<'a> {
    /// Receives posted for the peer.
    pub(crate) window: u32,
    /// Largest payload taken in one buffer, bytes.
    pub(crate) max_message: u32,
    /// Largest message fetched, KiB; 0: none is.
    pub(crate) largest: u32,
    /// Immediate data and atomics of the embedded provider are understood: used if both sides say so.
    pub(crate) extensions: bool,
    /// Meaningful in a reject only.
    pub(crate) reason: RejectReason,
    pub(crate) user: &'a [u8],
}

impl<'a> Greeting<'a> {
    /// A greeting that says no.
    pub(crate) const fn reject(reason: RejectReason, user: &'a [u8]) -> Self {
        Self { window: 0, max_message: 0, largest: 0, extensions: false, reason, user }
    }

    /// The bytes to send; `user` past [`MAX_USER_PRIVATE_DATA`] is the caller's to refuse.
    pub(crate) fn emit(&self) -> Vec<u8> {
        debug_assert!(self.user.len() <= MAX_USER_PRIVATE_DATA);
        let mut out = Vec::with_capacity(PORTABLE_PRIVATE_DATA);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[
            VERSION,
            self.user.len() as u8,
            self.reason.raw(),
            u8::from(self.extensions) * EXTENSIONS,
        ]);
        out.extend_from_slice(&self.window.to_le_bytes());
        out.extend_from_slice(&self.max_message.to_le_bytes());
        out.extend_from_slice(&self.largest.to_le_bytes());
        out.extend_from_slice(self.user);
        out
    }

    /// Refuses a window or message size that the protocol cannot work with.
    ///
    /// # Errors
    /// [`RejectReason::Limits`].
    pub(crate) fn checked(self) -> Result<Self, RejectReason> {
        let sound = (MIN_WINDOW..=MAX_WINDOW).contains(&self.window) && self.max_message > 0;
        if sound { Ok(self) } else { Err(RejectReason::Limits) }
    }

    /// Reads a greeting from private data that may have been padded.
    ///
    /// # Errors
    /// The reason to reject it with.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, RejectReason> {
        let (fixed, rest) = bytes.split_first_chunk::<GREETING_LEN>().ok_or(RejectReason::NotOurs)?;
        let word = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
        if fixed[..4] != MAGIC {
            return Err(RejectReason::NotOurs);
        }
        if fixed[4] != VERSION {
            return Err(RejectReason::Version);
        }
        let user = rest.get(..usize::from(fixed[5])).ok_or(RejectReason::NotOurs)?;
        let reason = RejectReason::from_raw(fixed[6]);
        // Bits of later versions are theirs to agree on.
        let extensions = fixed[7] & EXTENSIONS != 0;
        Ok(Self { reason, extensions, window: word(8), max_message: word(12), largest: word(16), user })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_greeting_survives_padding() {
        let reason = RejectReason::Refused;
        let greeting = Greeting { window: 64, max_message: 8192, largest: 9, extensions: true, reason, user: b"hello" };
        let mut bytes = greeting.emit();
        assert_eq!(Greeting::parse(&bytes), Ok(greeting));
        bytes.resize(196, 0);
        assert_eq!(Greeting::parse(&bytes), Ok(greeting));
    }

    #[test]
    fn a_strangers_greeting_has_a_typed_reason() {
        assert_eq!(Greeting::parse(b""), Err(RejectReason::NotOurs));
        assert_eq!(Greeting::parse(&[0; 56]), Err(RejectReason::NotOurs));
        let mut bytes = Greeting::reject(RejectReason::Busy, b"").emit();
        assert_eq!(Greeting::parse(&bytes).unwrap().reason, RejectReason::Busy);
        bytes[4] = 9;
        assert_eq!(Greeting::parse(&bytes), Err(RejectReason::Version));
        bytes[4] = VERSION;
        bytes[5] = 40;
        assert_eq!(Greeting::parse(&bytes), Err(RejectReason::NotOurs), "a user length past the end");
    }

    proptest! {
        #[test]
        fn a_header_survives_the_trip(kind in 0_u8..8, grant: u32) {
            let header = Header { kind: Kind::from_raw(kind).unwrap(), grant };
            let bytes = header.emit();
            prop_assert_eq!(Header::parse(&bytes), Some((header, &[][..])));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Header::parse(&bytes);
            let _ = Greeting::parse(&bytes);
        }
    }
}
