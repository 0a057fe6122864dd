//! Converts the errors of sockets to the causes for which connections end or connection attempts
//! fail.

use std::io;

use rdma_transport::cm::{ConnectFailure, DisconnectCause};

/// Returns the cause for an established connection that ended because its socket has failed with
/// `error`.
pub(super) fn lost(error: &io::Error) -> DisconnectCause {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
            DisconnectCause::Peer
        }
        _ => DisconnectCause::Path(error.to_string()),
    }
}

/// Returns true if a connection ended because the peer has ended it or cannot be reached. Nothing
/// that is sent afterwards would arrive.
pub(super) const fn is_unreachable(cause: &DisconnectCause) -> bool {
    matches!(cause, DisconnectCause::Peer | DisconnectCause::Truncated | DisconnectCause::Path(_))
}

/// Returns the failure for a connection attempt that ended because its socket has failed with
/// `error`.
pub(super) fn connect_failure(error: &io::Error) -> ConnectFailure {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => ConnectFailure::Refused,
        io::ErrorKind::TimedOut => ConnectFailure::Timeout,
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
            ConnectFailure::PeerClosed
        }
        io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::NetworkDown
        | io::ErrorKind::AddrNotAvailable => ConnectFailure::Unreachable(error.to_string()),
        _ => ConnectFailure::System(error.to_string()),
    }
}

/// Converts the cause of a disconnect to a connect failure. Used for a connection that the program
/// had accepted or requested, and that ended before `Established` was raised.
pub(super) fn never_up(cause: DisconnectCause) -> ConnectFailure {
    match cause {
        DisconnectCause::Peer | DisconnectCause::Truncated => ConnectFailure::PeerClosed,
        DisconnectCause::PeerViolation(what) | DisconnectCause::TerminatedByPeer(what) => {
            ConnectFailure::Protocol(what)
        }
        other => ConnectFailure::System(other.to_string()),
    }
}

/// Returns true if `accept`(2) failed because the system has no descriptor or no memory left.
pub(super) fn is_exhaustion(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}
