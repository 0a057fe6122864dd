//! The handover of connect requests to another provider. A handover moves a socket on which the MPA
//! request was read but not answered.

use std::io;
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::NAME;
use super::endpoint::{CmEndpoint, Request, RequestStep};
use super::hub::{DEVICE, Owner, STALE_ID};
use super::net::Net;
use super::provider::Iwarp;
use super::startup::{self, RequestTerms};
use rdma_transport::cm::{CmId, Detached};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::DeviceId;
use rdma_transport::roles::Handover;

/// A connect request that has left one provider and has not entered another one. The request has no
/// queue pair yet.
#[derive(Debug)]
struct DetachedRequest {
    /// The socket on which the request arrived. `None` once a provider has adopted the request.
    socket: Option<OwnedFd>,
    requested: RequestTerms,
}

impl Drop for DetachedRequest {
    fn drop(&mut self) {
        // No provider has adopted the request, so the peer is rejected. The send buffer of the
        // socket is empty, so the reply fits into it.
        if let Some(socket) = self.socket.take() {
            if let Err(error) = TcpStream::from(socket).write_all(&startup::reject(&self.requested, &[])) {
                log::debug!("cannot send a rejection to a peer: {error}");
            }
        }
    }
}

impl<N: Net> Handover for Iwarp<N> {
    /// Removes a request that has no queue pair from this provider, with its socket.
    fn detach(&mut self, id: CmId) -> Result<Detached> {
        let (socket, requested) = match self.endpoints.known(id)? {
            CmEndpoint::Request(Request { step: RequestStep::Offered(_), qp: Some(_), .. }) => {
                return Err(TransportError::InvalidState { call: "detach", state: "with a queue pair" });
            }
            CmEndpoint::Request(Request { socket, step: RequestStep::Offered(requested), .. }) => (*socket, *requested),
            endpoint => return Err(TransportError::InvalidState { call: "detach", state: endpoint.name() }),
        };
        let released = self.hub.net.release(socket).map_err(|error| match error.kind() {
            io::ErrorKind::Unsupported => {
                TransportError::Unsupported { provider: NAME, feature: "sockets to hand over" }
            }
            _ => TransportError::io("detaching a socket", error),
        })?;
        self.hub.disown(socket);
        self.endpoints.take(&mut self.hub, id.0);
        Ok(Detached::new(self.hub.name(), DetachedRequest { socket: Some(released), requested }))
    }

    /// Adds a request that another provider has detached.
    fn attach(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)> {
        let mut request: DetachedRequest = request.into_state().map_err(|_| TransportError::Unsupported {
            provider: NAME,
            feature: "connect requests of other providers",
        })?;
        let (socket, requested) = (request.socket.take().ok_or(STALE_ID)?, request.requested);
        let socket = self.hub.net.adopt(socket).map_err(|source| TransportError::io("attaching a socket", source))?;
        let request = Request { socket, step: RequestStep::Offered(requested), qp: None, closed: false };
        let key = self.endpoints.insert(CmEndpoint::Dead(None));
        self.endpoints.replace(&mut self.hub, key, CmEndpoint::Request(request));
        self.hub.own(socket, Owner::Endpoint(key));
        self.hub.deadlines.set(Owner::Endpoint(key), now + self.hub.config.accept_timeout);
        Ok((CmId(key), DEVICE))
    }
}
