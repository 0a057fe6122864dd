//! Work completions: the results of work requests.

use std::fmt;

use crate::datagram::DatagramSource;
use crate::handle::QpId;
use crate::mr::RemoteKey;

/// The status of a completion. The names follow `ibv_poll_cq`(3). Devices report the same fault with different
/// statuses, so portable programs distinguish only success and failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum WcStatus {
    /// The work request has succeeded.
    #[error("success")]
    Success,
    /// A receive was shorter than the message, or a send was longer than allowed.
    #[error("local length error")]
    LocalLengthError,
    /// The queue pair has failed internally.
    #[error("local queue pair operation error")]
    LocalQpOperationError,
    /// A scatter/gather entry names memory that is not registered, or that lacks the necessary access right.
    #[error("local protection error")]
    LocalProtectionError,
    /// The queue pair failed or was disconnected before the work request was done.
    #[error("work request flushed")]
    Flushed,
    /// The peer refused access to its memory.
    #[error("remote access error")]
    RemoteAccessError,
    /// The peer could not execute the operation.
    #[error("remote operation error")]
    RemoteOperationError,
    /// The peer refused the request as invalid, for example a request to invalidate a key that cannot be invalidated.
    #[error("remote invalid request")]
    RemoteInvalidRequest,
    /// The peer did not answer, even after the last retransmission.
    #[error("transport retry counter exceeded")]
    RetryExceeded,
    /// The peer had no receive posted, even at the last retransmission.
    #[error("receiver-not-ready retry counter exceeded")]
    ReceiverNotReady,
    /// A code that this library does not know.
    #[error("status {0}")]
    Other(u32),
}

impl WcStatus {
    /// Returns true for [`WcStatus::Success`].
    #[must_use]
    #[inline]
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Success)
    }
}

/// The reason why a work request has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The status of the failed work request's completion.
    pub status: WcStatus,
    /// The device's vendor-specific error code; 0 if there is none.
    pub vendor_error: u32,
}

impl From<WcStatus> for Failure {
    #[inline]
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

/// The operation of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WcOpcode {
    /// A send of any kind.
    Send,
    /// An RDMA Write.
    Write,
    /// An RDMA Read. A Read of 0 bytes may be reported as a Write, because not every device can execute such a Read.
    Read,
    /// An atomic operation.
    Atomic,
    /// A receive.
    Recv,
    /// A receive that a Write with immediate data has consumed.
    RecvWriteWithImmediate,
    /// An opcode that this library does not know.
    Other(u32),
}

impl WcOpcode {
    /// Returns true if the opcode is that of a receive.
    #[inline]
    pub const fn is_receive(self) -> bool {
        matches!(self, Self::Recv | Self::RecvWriteWithImmediate)
    }
}

/// One completion.
#[derive(Clone, Copy, Debug)]
pub struct WorkCompletion {
    /// The number that the program gave to the work request.
    pub wr_id: u64,
    /// The queue pair of the work request. For a receive of a shared queue, the queue pair that received the message.
    pub qp: QpId,
    /// The status. If the work request failed, only `wr_id`, `qp` and `vendor_error` are valid. `opcode` is then valid
    /// only in one respect: it tells a receive from a send.
    pub status: WcStatus,
    /// The operation. If the work request failed, this is [`WcOpcode::Recv`] for a receive, and any other opcode for a
    /// send.
    pub opcode: WcOpcode,
    /// The device's vendor-specific error code of a failure; 0 if there is none.
    pub vendor_error: u32,
    /// The number of bytes received or read.
    pub byte_len: u32,
    /// The immediate data that arrived with the message; `None` if there is none.
    pub immediate: Option<u32>,
    /// The key that the peer's Send with Invalidate has invalidated; `None` if no key was invalidated or the device
    /// does not report it.
    pub invalidated: Option<RemoteKey>,
    /// The sender of a received datagram; all fields are 0 in other completions.
    pub source: DatagramSource,
}

impl WorkCompletion {
    /// Makes a completion without immediate data, invalidated key, vendor-specific error code or datagram sender.
    #[must_use]
    #[inline]
    pub const fn new(qp: QpId, wr_id: u64, opcode: WcOpcode, status: WcStatus, byte_len: u32) -> Self {
        let source = DatagramSource { qp_number: 0, lid: 0, service_level: 0, path_bits: 0 };
        let (immediate, invalidated) = (None, None);
        Self { wr_id, qp, status, opcode, vendor_error: 0, byte_len, immediate, invalidated, source }
    }

    /// Converts the status into a `Result`.
    ///
    /// # Errors
    /// The status of the failed work request, with the device's vendor-specific error code.
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
