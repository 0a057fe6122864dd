//! The faults that end a connection.

use std::fmt;

use super::ring::InvalidPosition;
use crate::soft::keys::Miss;
use rdma_transport::wc::WcStatus;

/// A violation of the protocol that a side detects at its peer.
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
    /// Returns the code with which a record reports the violation.
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

    /// Returns the violation with this code.
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

    /// Returns the status with which a refused read or atomic operation completes. Returns `None` if the violation is
    /// not about a read or an atomic operation.
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
            Self::Malformed => return f.write_str("a malformed record"),
            Self::NoBuffer => return f.write_str("no buffer available for a message"),
            Self::TooLong => return f.write_str("a message that is longer than its buffer"),
            Self::Opcode => return f.write_str("an operation that was not negotiated"),
            Self::TooManyRequests => return f.write_str("more outstanding reads than were negotiated"),
            Self::UnexpectedAnswer => return f.write_str("a response without a request"),
            Self::CannotInvalidate => return f.write_str("invalidation of a key that it may not invalidate"),
            Self::Other(code) => return write!(f, "code {code}"),
            Self::Write(miss) => ("a write", miss),
            Self::Request(miss) => ("a read or an atomic operation", miss),
        };
        let what = match miss {
            Miss::Unknown => "with an invalid key",
            Miss::Access => "without the access right",
            Miss::Bounds => "outside the bounds of a region",
            Miss::Wrap => "past the largest address",
            Miss::Misaligned => "at an address that is not a multiple of 8",
        };
        write!(f, "{of} {what}")
    }
}

/// A fault that ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkFault {
    /// The local side has detected a violation by the peer.
    Violation(Refusal),
    /// The peer has reported a violation by the local side.
    Refused(Refusal),
    /// A local work request has failed with this status.
    WorkRequest(WcStatus),
}

impl From<Refusal> for LinkFault {
    fn from(refusal: Refusal) -> Self {
        Self::Violation(refusal)
    }
}

impl From<InvalidPosition> for LinkFault {
    fn from(_: InvalidPosition) -> Self {
        Self::Violation(Refusal::Malformed)
    }
}
