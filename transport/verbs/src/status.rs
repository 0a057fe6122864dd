//! Conversions of the libraries' codes into this crate's types.

use std::io;

use super::sys::{ibv_wc_opcode as opcode, ibv_wc_status as status, rdma_cm_event_type as cm};

use rdma_transport::cm::{CmEventKind, ConnectFailure};
use rdma_transport::wc::{WcOpcode, WcStatus};

/// The reason why an RDMA device never reaches a loopback address.
pub(super) const NO_LOOPBACK: &str = "the loopback is on no RDMA device";

/// The reject codes of InfiniBand's connection manager (`ib_cm.h`).
const REJECT_TIMEOUT: i32 = 4;
const REJECT_INVALID_SERVICE: i32 = 8;
const REJECT_CONSUMER: i32 = 28;

pub(super) const fn wc_status(code: status::Type) -> WcStatus {
    match code {
        status::IBV_WC_SUCCESS => WcStatus::Success,
        status::IBV_WC_LOC_LEN_ERR => WcStatus::LocalLengthError,
        status::IBV_WC_LOC_QP_OP_ERR => WcStatus::LocalQpOperationError,
        status::IBV_WC_LOC_PROT_ERR => WcStatus::LocalProtectionError,
        status::IBV_WC_WR_FLUSH_ERR => WcStatus::Flushed,
        status::IBV_WC_REM_ACCESS_ERR => WcStatus::RemoteAccessError,
        status::IBV_WC_REM_INV_REQ_ERR => WcStatus::RemoteInvalidRequest,
        status::IBV_WC_REM_OP_ERR => WcStatus::RemoteOperationError,
        status::IBV_WC_RETRY_EXC_ERR => WcStatus::RetryExceeded,
        status::IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::ReceiverNotReady,
        other => WcStatus::Other(other),
    }
}

pub(super) const fn wc_opcode(code: opcode::Type) -> WcOpcode {
    match code {
        opcode::IBV_WC_SEND => WcOpcode::Send,
        opcode::IBV_WC_RDMA_WRITE => WcOpcode::Write,
        opcode::IBV_WC_RDMA_READ => WcOpcode::Read,
        opcode::IBV_WC_COMP_SWAP | opcode::IBV_WC_FETCH_ADD => WcOpcode::Atomic,
        opcode::IBV_WC_RECV => WcOpcode::Recv,
        opcode::IBV_WC_RECV_RDMA_WITH_IMM => WcOpcode::RecvWriteWithImmediate,
        other => WcOpcode::Other(other),
    }
}

/// Converts the error of a call or of an event into the failure of a connect attempt.
pub(super) fn connect_failure(error: &io::Error) -> ConnectFailure {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => ConnectFailure::Refused,
        Some(libc::ETIMEDOUT) => ConnectFailure::Timeout,
        Some(libc::ECONNRESET | libc::EPIPE | libc::ECONNABORTED | libc::ENOTCONN) => ConnectFailure::PeerClosed,
        _ if is_unreachable(error) => ConnectFailure::Unreachable(error.to_string()),
        Some(libc::EPROTO) => ConnectFailure::Protocol(error.to_string()),
        _ => ConnectFailure::System(error.to_string()),
    }
}

/// Returns true if the error means that this host has no route to the address, or no device that reaches it.
pub(super) fn is_unreachable(error: &io::Error) -> bool {
    const CODES: [i32; 9] = [
        libc::ENODEV,
        libc::ENOENT,
        libc::ENETUNREACH,
        libc::EHOSTUNREACH,
        libc::ENETDOWN,
        libc::EHOSTDOWN,
        libc::EADDRNOTAVAIL,
        libc::EAFNOSUPPORT,
        libc::ENXIO,
    ];
    error.raw_os_error().is_some_and(|code| CODES.contains(&code))
}

/// Converts an event by which an active connect fails into the event for the program. Returns `None` for an event of
/// another kind.
pub(super) fn connect_outcome(event: cm::Type, status: i32, private_data: Box<[u8]>) -> Option<CmEventKind> {
    // The status of an event is a negative error, or the positive reason for a reject on InfiniBand.
    let error = io::Error::from_raw_os_error(status.saturating_abs());
    Some(match event {
        cm::RDMA_CM_EVENT_ADDR_ERROR => failed(ConnectFailure::Unreachable(format!("no route resolves: {error}"))),
        cm::RDMA_CM_EVENT_ROUTE_ERROR => failed(ConnectFailure::Unreachable(format!("no path resolves: {error}"))),
        cm::RDMA_CM_EVENT_CONNECT_ERROR => failed(connect_failure(&error)),
        cm::RDMA_CM_EVENT_UNREACHABLE if status.abs() == libc::ETIMEDOUT || status == 0 => {
            failed(ConnectFailure::Timeout)
        }
        cm::RDMA_CM_EVENT_UNREACHABLE => failed(ConnectFailure::Unreachable(error.to_string())),
        cm::RDMA_CM_EVENT_REJECTED => match status {
            REJECT_CONSUMER => CmEventKind::Rejected { private_data },
            REJECT_INVALID_SERVICE => failed(ConnectFailure::Refused),
            REJECT_TIMEOUT => failed(ConnectFailure::Timeout),
            // On iWARP, `ECONNREFUSED` without private data means that no program listens. A reject by the peer's program
            // is reported as a reset, or has private data.
            _ if status == -libc::ECONNREFUSED && private_data.is_empty() => failed(ConnectFailure::Refused),
            _ if status <= 0 => CmEventKind::Rejected { private_data },
            reason => failed(ConnectFailure::System(format!("the peer's connection manager refuses: reason {reason}"))),
        },
        _ => return None,
    })
}

const fn failed(failure: ConnectFailure) -> CmEventKind {
    CmEventKind::ConnectFailed(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(event: cm::Type, status: i32, private_data: &[u8]) -> Option<CmEventKind> {
        connect_outcome(event, status, private_data.into())
    }

    #[test]
    fn known_completions_are_named_and_others_kept() {
        assert_eq!(wc_status(0), WcStatus::Success);
        assert_eq!(wc_status(5), WcStatus::Flushed);
        assert_eq!(wc_status(12), WcStatus::RetryExceeded);
        assert_eq!(wc_status(13), WcStatus::ReceiverNotReady);
        assert_eq!(wc_status(999), WcStatus::Other(999));
        assert_eq!(wc_opcode(128), WcOpcode::Recv);
        assert_eq!(wc_opcode(4), WcOpcode::Atomic);
        assert_eq!(wc_opcode(5), WcOpcode::Other(5));
    }

    #[test]
    fn a_refusal_looks_the_same_on_every_transport() {
        use CmEventKind::{ConnectFailed, Rejected};
        let rejected = cm::RDMA_CM_EVENT_REJECTED;
        assert!(matches!(outcome(rejected, 8, &[0; 148]), Some(ConnectFailed(ConnectFailure::Refused))));
        assert!(matches!(outcome(rejected, -111, b""), Some(ConnectFailed(ConnectFailure::Refused))));
        assert!(matches!(outcome(rejected, 28, b"no"), Some(Rejected { private_data }) if &*private_data == b"no"));
        assert!(matches!(outcome(rejected, -104, b"no"), Some(Rejected { private_data }) if &*private_data == b"no"));
        assert!(matches!(outcome(rejected, 4, b""), Some(ConnectFailed(ConnectFailure::Timeout))));
        assert!(matches!(outcome(rejected, 10, b""), Some(ConnectFailed(ConnectFailure::System(_)))));
    }

    #[test]
    fn silence_and_distance_are_told_apart() {
        use CmEventKind::ConnectFailed;
        let unreachable = cm::RDMA_CM_EVENT_UNREACHABLE;
        assert!(matches!(outcome(unreachable, -110, b""), Some(ConnectFailed(ConnectFailure::Timeout))));
        assert!(matches!(outcome(unreachable, -113, b""), Some(ConnectFailed(ConnectFailure::Unreachable(_)))));
        let address = cm::RDMA_CM_EVENT_ADDR_ERROR;
        assert!(matches!(outcome(address, -110, b""), Some(ConnectFailed(ConnectFailure::Unreachable(_)))));
        assert!(outcome(cm::RDMA_CM_EVENT_ESTABLISHED, 0, b"").is_none());
    }
}
