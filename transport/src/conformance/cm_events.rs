//! Functions that find an event of the connection manager, and return its contents for a case.

use std::net::SocketAddr;

use crate::cm::{CmEvent, CmEventKind, CmId, ConnectFailure, DisconnectCause, ReadDepth};

/// A connect request.
#[derive(Debug)]
pub(super) struct IncomingRequest {
    pub(super) id: CmId,
    pub(super) listener: CmId,
    pub(super) peer: SocketAddr,
    pub(super) private_data: Box<[u8]>,
    pub(super) read_depth: ReadDepth,
}

/// Returns the cause if the event is `Disconnected` of this id. Returns `None` for other events.
pub(super) fn disconnected(event: &CmEvent, id: CmId) -> Option<DisconnectCause> {
    match &event.kind {
        CmEventKind::Disconnected(cause) if event.id == id => Some(cause.clone()),
        _ => None,
    }
}

/// Returns the failure if the event is `ConnectFailed` of this id. Returns `None` for other events.
pub(super) fn failed(event: &CmEvent, id: CmId) -> Option<ConnectFailure> {
    match &event.kind {
        CmEventKind::ConnectFailed(failure) if event.id == id => Some(failure.clone()),
        _ => None,
    }
}

/// Returns the connect request of an event. Returns `None` for other events.
pub(super) fn requested(event: &CmEvent) -> Option<IncomingRequest> {
    match &event.kind {
        CmEventKind::ConnectRequest { listener, peer, private_data, read_depth, .. } => Some(IncomingRequest {
            id: event.id,
            listener: *listener,
            peer: *peer,
            private_data: private_data.clone(),
            read_depth: *read_depth,
        }),
        _ => None,
    }
}

/// Returns `Some` if the event is `ConnectFailed` because the local port is in use.
pub(super) fn port_in_use(event: &CmEvent) -> Option<()> {
    let CmEventKind::ConnectFailed(failure) = &event.kind else { return None };
    failure.to_string().contains(&format!("(os error {})", libc::EADDRINUSE)).then_some(())
}
