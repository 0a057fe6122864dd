//! The handover of connect requests to another provider. A handover moves a socket on which the MPA request was read but not answered.

use std::io;
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::NAME;
use super::endpoint::{CmEndpoint, EndpointState};
use super::hub::Owner;
use super::net::Net;
use super::provider::{DEVICE, Iwarp, STALE_ID};
use super::startup::{self, RequestTerms};
use crate::cm::{CmId, Detached};
use crate::error::{Result, TransportError};
use crate::provider::{DeviceId, Provider};

/// A connect request that has left one provider and has not entered another one. The request has no queue pair yet.
#[derive(Debug)]
struct DetachedRequest {
    /// The socket on which the request arrived. `None` once a provider has adopted the request.
    socket: Option<OwnedFd>,
    asked: RequestTerms,
}

impl Drop for DetachedRequest {
    fn drop(&mut self) {
        // No provider has adopted the request, so the peer is rejected. The send buffer of the socket is empty, so the reply fits into it.
        if let Some(socket) = self.socket.take() {
            if let Err(error) = TcpStream::from(socket).write_all(&startup::reject(&self.asked, &[])) {
                log::debug!("cannot send a rejection to a peer: {error}");
            }
        }
    }
}

impl<N: Net> Iwarp<N> {
    pub(super) fn detach_request(&mut self, id: CmId) -> Result<Detached> {
        let endpoint = self.endpoint(id)?;
        let (EndpointState::Offered(asked), Some(socket)) = (&endpoint.state, endpoint.socket) else {
            return Err(TransportError::InvalidState { call: "detach", state: endpoint.state.name() });
        };
        if endpoint.qp.is_some() {
            return Err(TransportError::InvalidState { call: "detach", state: "with a queue pair" });
        }
        let asked = *asked;
        let released = self.hub.net.release(socket).map_err(|error| match error.kind() {
            io::ErrorKind::Unsupported => {
                TransportError::Unsupported { provider: NAME, feature: "sockets to hand over" }
            }
            _ => TransportError::io("detaching a socket", error),
        })?;
        self.hub.disown(socket);
        self.remove(id.0);
        Ok(Detached::new(self.name(), DetachedRequest { socket: Some(released), asked }))
    }

    pub(super) fn attach_request(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)> {
        let mut request: DetachedRequest = request.into_state().map_err(|_| TransportError::Unsupported {
            provider: NAME,
            feature: "connect requests of other providers",
        })?;
        let (socket, asked) = (request.socket.take().ok_or(STALE_ID)?, request.asked);
        let socket = self.hub.net.adopt(socket).map_err(|source| TransportError::io("attaching a socket", source))?;
        let key = self.endpoints.insert(CmEndpoint::new(EndpointState::Dead, Some(socket)));
        self.transition(key, EndpointState::Offered(asked));
        self.hub.own(socket, Owner::Endpoint(key));
        self.hub.deadlines.set(Owner::Endpoint(key), now + self.hub.config.accept_timeout);
        Ok((CmId(key), DEVICE))
    }
}
