//! The handover of connect requests to another provider. A handover moves a socket on which the MPA
//! request was read but not answered.

use std::io;
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::NAME;
use super::endpoint::{CmEndpoint, Request, RequestStep};
use super::endpoints::Endpoints;
use super::hub::{DEVICE, Hub, Owner, STALE_ID};
use super::net::Net;
use super::startup::{self, RequestTerms};
use rdma_transport::cm::{CmId, Detached};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::DeviceId;

/// A connect request that has left one provider and has not entered another one. The request has no
/// queue pair yet.
#[derive(Debug)]
struct DetachedRequest {
    /// The socket on which the request arrived. `None` once a provider has adopted the request.
    socket: Option<OwnedFd>,
    asked: RequestTerms,
}

impl Drop for DetachedRequest {
    fn drop(&mut self) {
        // No provider has adopted the request, so the peer is rejected. The send buffer of the
        // socket is empty, so the reply fits into it.
        if let Some(socket) = self.socket.take() {
            if let Err(error) = TcpStream::from(socket).write_all(&startup::reject(&self.asked, &[])) {
                log::debug!("cannot send a rejection to a peer: {error}");
            }
        }
    }
}

impl<N: Net> Endpoints<N> {
    /// Takes a request that has no queue pair out of a provider, with its socket.
    pub(super) fn detach(&mut self, hub: &mut Hub<N>, id: CmId) -> Result<Detached> {
        let (socket, asked) = match self.known(id)? {
            CmEndpoint::Request(Request { step: RequestStep::Offered(_), qp: Some(_), .. }) => {
                return Err(TransportError::InvalidState { call: "detach", state: "with a queue pair" });
            }
            CmEndpoint::Request(Request { socket, step: RequestStep::Offered(asked), .. }) => (*socket, *asked),
            endpoint => return Err(TransportError::InvalidState { call: "detach", state: endpoint.name() }),
        };
        let released = hub.net.release(socket).map_err(|error| match error.kind() {
            io::ErrorKind::Unsupported => {
                TransportError::Unsupported { provider: NAME, feature: "sockets to hand over" }
            }
            _ => TransportError::io("detaching a socket", error),
        })?;
        hub.disown(socket);
        self.take(hub, id.0);
        Ok(Detached::new(hub.name(), DetachedRequest { socket: Some(released), asked }))
    }

    /// Adds a request that another provider has detached.
    pub(super) fn attach(&mut self, hub: &mut Hub<N>, request: Detached, now: Instant) -> Result<(CmId, DeviceId)> {
        let mut request: DetachedRequest = request.into_state().map_err(|_| TransportError::Unsupported {
            provider: NAME,
            feature: "connect requests of other providers",
        })?;
        let (socket, asked) = (request.socket.take().ok_or(STALE_ID)?, request.asked);
        let socket = hub.net.adopt(socket).map_err(|source| TransportError::io("attaching a socket", source))?;
        let request = Request { socket, step: RequestStep::Offered(asked), qp: None, closed: false };
        let key = self.insert(CmEndpoint::Dead(None));
        self.replace(hub, key, CmEndpoint::Request(request));
        hub.own(socket, Owner::Endpoint(key));
        hub.deadlines.set(Owner::Endpoint(key), now + hub.config.accept_timeout);
        Ok((CmId(key), DEVICE))
    }
}
