//! Faults: why a connection cannot go on.

use std::fmt;

use super::ring::Nonsense;
use crate::soft::keys::Miss;
use crate::wc::WcStatus;

/// What a peer does that it may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Malformed,
    NoBuffer,
    TooLong,
    Opcode,
    TooManyRequests,
    UnexpectedAnswer,
    CannotInvalidate,
    Write(Miss),
    Request(Miss),
    Other(u64),
}

const MISSES: [Miss; 5] = [Miss::Unknown, Miss::Access, Miss::Bounds, Miss::Wrap, Miss::Misaligned];

impl Refusal {
    /// The number that stands for it in a record.
    pub(super) fn code(self) -> u64 {
        let of = |miss| MISSES.iter().position(|&other| other == miss).unwrap_or(0) as u64;
        match self {
            Self::Malformed => 1,
            Self::NoBuffer => 2,
            Self::TooLong => 3,
            Self::Opcode => 4,
            Self::TooManyRequests => 5,
            Self::UnexpectedAnswer => 6,
            Self::CannotInvalidate => 7,
            Self::Write(miss) => 16 + of(miss),
            Self::Request(miss) => 32 + of(miss),
            Self::Other(code) => code,
        }
    }

    /// What a number stands for.
    pub(super) fn of(code: u64) -> Self {
        let miss = MISSES.get((code % 16) as usize).copied();
        match (code, miss) {
            (1, _) => Self::Malformed,
            (2, _) => Self::NoBuffer,
            (3, _) => Self::TooLong,
            (4, _) => Self::Opcode,
            (5, _) => Self::TooManyRequests,
            (6, _) => Self::UnexpectedAnswer,
            (7, _) => Self::CannotInvalidate,
            (16..32, Some(miss)) => Self::Write(miss),
            (32..48, Some(miss)) => Self::Request(miss),
            _ => Self::Other(code),
        }
    }

    /// The status of the work request that was refused.
    pub(super) const fn status(self) -> Option<WcStatus> {
        match self {
            Self::Request(Miss::Misaligned) | Self::TooManyRequests => Some(WcStatus::RemoteOperationError),
            Self::Request(_) => Some(WcStatus::RemoteAccessError),
            _ => None,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (of, miss) = match self {
            Self::Malformed => return f.write_str("a record that cannot be"),
            Self::NoBuffer => return f.write_str("no buffer available for a message"),
            Self::TooLong => return f.write_str("a message that is too long for its buffer"),
            Self::Opcode => return f.write_str("an operation that was not agreed on"),
            Self::TooManyRequests => return f.write_str("more reads outstanding than were agreed on"),
            Self::UnexpectedAnswer => return f.write_str("an answer that nobody awaits"),
            Self::CannotInvalidate => return f.write_str("a key that it cannot invalidate"),
            Self::Other(code) => return write!(f, "code {code}"),
            Self::Write(miss) => ("a write", miss),
            Self::Request(miss) => ("a read or an atomic operation", miss),
        };
        let what = match miss {
            Miss::Unknown => "by an invalid key",
            Miss::Access => "without the right",
            Miss::Bounds => "out of the bounds of a region",
            Miss::Wrap => "past the largest address",
            Miss::Misaligned => "at an address that is no multiple of 8",
        };
        write!(f, "{of} {what}")
    }
}

/// Why a connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The peer has done what it may not.
    Violation(Refusal),
    /// The peer says that this side has.
    Refused(Refusal),
    /// A work request of this side cannot be done.
    WorkRequest(WcStatus),
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Self {
        Self::Violation(refusal)
    }
}

impl From<Nonsense> for Fault {
    fn from(_: Nonsense) -> Self {
        Self::Violation(Refusal::Malformed)
    }
}
