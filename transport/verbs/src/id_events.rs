//! The processing of events of an id. Each method returns the event that the program receives.

use super::entry::{IdEntry, IdState};
use super::status::connect_outcome;
use super::sys::rdma_cm_event_type as cm;
use rdma_transport::cm::{CmEventKind, ConnectFailure, DisconnectCause, ReadDepth};

impl IdEntry {
    /// Processes the failure of a connect call on a private thread.
    pub(super) fn connect_failed(&mut self, failure: ConnectFailure) -> Option<CmEventKind> {
        self.handshaking = false;
        // Report the failure only once: an event may already have reported it.
        if self.state != IdState::Connecting {
            return None;
        }
        self.state = IdState::Closed;
        Some(CmEventKind::ConnectFailed(failure))
    }

    /// Processes the event that the connection is established. `agreed` has the read depths of an
    /// active connection.
    pub(super) fn established(&mut self, private_data: Box<[u8]>, agreed: ReadDepth) -> Option<CmEventKind> {
        self.handshaking = false;
        let private_data = match self.state {
            IdState::Connecting => {
                self.read_depth = agreed;
                private_data
            }
            IdState::Accepting => Box::default(),
            // Ignore the event: it has arrived twice, or the program has disconnected before it
            // arrived.
            _ => return None,
        };
        self.state = IdState::Established;
        Some(CmEventKind::Established { private_data, read_depth: self.read_depth })
    }

    /// Processes an event that reports a failure.
    pub(super) fn failed(&mut self, kind: cm::Type, status: i32, private_data: Box<[u8]>) -> Option<CmEventKind> {
        self.handshaking = false;
        match self.state {
            IdState::Resolving | IdState::Resolved | IdState::Connecting => {
                self.state = IdState::Closed;
                connect_outcome(kind, status, private_data)
            }
            IdState::Accepting => {
                self.state = IdState::Closed;
                Some(CmEventKind::ConnectFailed(ConnectFailure::PeerClosed))
            }
            // This event means that the peer has accepted, and has disconnected before it was
            // notified that the connection was established.
            IdState::Established if kind == cm::RDMA_CM_EVENT_REJECTED => {
                Some(self.disconnected(DisconnectCause::Peer))
            }
            // Since Linux 6.0 the connection manager may report the event `UNREACHABLE` for an
            // established connection.
            IdState::Established => {
                let error = std::io::Error::from_raw_os_error(status.saturating_abs());
                Some(self.disconnected(DisconnectCause::Path(format!("the peer became unreachable: {error}"))))
            }
            IdState::Disconnecting { .. } => {
                self.flush_closing();
                None
            }
            IdState::Listening
            | IdState::Bound
            | IdState::WatchingDevice
            | IdState::AwaitingRequest
            | IdState::RequestReceived
            | IdState::Closed => None,
        }
    }

    pub(super) fn disconnected(&mut self, cause: DisconnectCause) -> CmEventKind {
        if !matches!(self.state, IdState::Disconnecting { .. }) {
            self.state = IdState::Closed;
        }
        CmEventKind::Disconnected(cause)
    }

    /// Ends the wait for the peer to close the connection: puts the queue pair into the error
    /// state. Does nothing if the id is not waiting for the peer.
    pub(super) fn flush_closing(&mut self) {
        if let IdState::Disconnecting { flush_at: Some(_) } = self.state {
            self.state = IdState::Disconnecting { flush_at: None };
            if let Err(error) = self.raw.flush() {
                log::debug!("{error}");
            }
        }
    }
}
