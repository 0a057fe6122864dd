//! Work completions: how a work request ended.

use std::fmt;

use crate::datagram::DatagramSource;
use crate::handle::QpId;
use crate::mr::RemoteKey;

/// Status of a completion; names follow `ibv_poll_cq`(3). Devices differ in the status that they give for a fault, so
/// portable programs only tell success from the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WcStatus {
    /// Done.
    Success,
    /// A receive was too small for the message, or a send too long.
    LocalLengthError,
    /// The queue pair failed internally.
    LocalQpOperationError,
    /// A scatter/gather entry was not registered or not allowed.
    LocalProtectionError,
    /// The queue pair left the ready state before this was done.
    Flushed,
    /// The peer refused access to its memory.
    RemoteAccessError,
    /// The peer could not do the operation.
    RemoteOperationError,
    /// The peer refused the request as invalid, such as one to invalidate a key that cannot be invalidated.
    RemoteInvalidRequest,
    /// The peer did not answer.
    RetryExceeded,
    /// The peer had no receive posted, for too long.
    ReceiverNotReady,
    /// A code this library does not know.
    Other(u32),
}

impl WcStatus {
    /// Whether the operation was done.
    #[must_use]
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Success)
    }
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Success => f.write_str("success"),
            Self::LocalLengthError => f.write_str("local length error"),
            Self::LocalQpOperationError => f.write_str("local queue pair operation error"),
            Self::LocalProtectionError => f.write_str("local protection error"),
            Self::Flushed => f.write_str("work request flushed"),
            Self::RemoteAccessError => f.write_str("remote access error"),
            Self::RemoteOperationError => f.write_str("remote operation error"),
            Self::RemoteInvalidRequest => f.write_str("remote invalid request"),
            Self::RetryExceeded => f.write_str("transport retry counter exceeded"),
            Self::ReceiverNotReady => f.write_str("receiver-not-ready retry counter exceeded"),
            Self::Other(code) => write!(f, "status {code}"),
        }
    }
}

/// Why a work request has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The status of its completion.
    pub status: WcStatus,
    /// The device's own code, which its vendor can explain; 0 where there is none.
    pub vendor_error: u32,
}

impl From<WcStatus> for Failure {
    fn from(status: WcStatus) -> Self {
        Self { status, vendor_error: 0 }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.vendor_error {
            0 => self.status.fmt(f),
            code => write!(f, "{} (vendor error {code:#x})", self.status),
        }
    }
}

/// What completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WcOpcode {
    /// A send of any kind.
    Send,
    /// An RDMA Write.
    Write,
    /// An RDMA Read. A Read of nothing may be reported as a Write, since not every device can do one.
    Read,
    /// An atomic operation.
    Atomic,
    /// A receive.
    Recv,
    /// A receive completed by a write with immediate data.
    RecvWriteWithImmediate,
    /// An opcode this library does not know.
    Other(u32),
}

impl WcOpcode {
    /// Whether it is that of a receive.
    #[inline]
    pub(crate) const fn is_receive(self) -> bool {
        matches!(self, Self::Recv | Self::RecvWriteWithImmediate)
    }
}

/// One completion.
#[derive(Clone, Copy, Debug)]
pub struct WorkCompletion {
    /// The number of the work request, as posted.
    pub wr_id: u64,
    /// The queue pair it was posted to.
    pub qp: QpId,
    /// How it ended. Without success only `wr_id`, `qp`, `vendor_error`, and whether it was a receive are meaningful.
    pub status: WcStatus,
    /// What completed. Of a work request that failed: [`WcOpcode::Recv`] for a receive, and anything else for a send.
    pub opcode: WcOpcode,
    /// The device's own code for a failure, which its vendor can explain; 0 where there is none.
    pub vendor_error: u32,
    /// Bytes received or read.
    pub byte_len: u32,
    /// Immediate data that came with a receive.
    pub immediate: Option<u32>,
    /// The key that the peer's Send with Invalidate invalidated, where the device reports it.
    pub invalidated: Option<RemoteKey>,
    /// Sender of a received datagram.
    pub source: DatagramSource,
}

impl WorkCompletion {
    /// A completion without immediate data, an invalidated key, a vendor's code or the sender of a datagram.
    #[must_use]
    #[inline]
    pub const fn new(qp: QpId, wr_id: u64, opcode: WcOpcode, status: WcStatus, byte_len: u32) -> Self {
        let source = DatagramSource { qp_number: 0, lid: 0, service_level: 0, path_bits: 0 };
        let (immediate, invalidated) = (None, None);
        Self { wr_id, qp, status, opcode, vendor_error: 0, byte_len, immediate, invalidated, source }
    }

    /// Whether the work request is done, and if not, why it failed.
    ///
    /// # Errors
    /// The status without success, with the device's own code.
    #[inline]
    pub const fn result(&self) -> Result<(), Failure> {
        match self.status {
            WcStatus::Success => Ok(()),
            status => Err(Failure { status, vendor_error: self.vendor_error }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_what_the_vendor_calls_it() {
        let failure = Failure { vendor_error: 0x88, ..WcStatus::RemoteAccessError.into() };
        assert_eq!(failure.to_string(), "remote access error (vendor error 0x88)");
        assert_eq!(Failure::from(WcStatus::Flushed).to_string(), "work request flushed");
    }
}
