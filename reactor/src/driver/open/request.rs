//! Connect requests from peers, until each becomes a connection or is refused.

use std::net::SocketAddr;

use rdma_transport::cm::CmId;

use crate::config::Framing;
use crate::conn::greeting::Greeting;
use crate::error::RejectReason;
use crate::id::ListenerId;
use crate::options::Service;
use crate::providers::Handle;
use crate::security::Security;

/// The origin of a connect request: the listener at which it arrived, with the settings of that
/// listener, and the peer. It is the same for each reactor of the group that may answer the
/// request.
#[derive(Debug)]
pub(crate) struct RequestOrigin {
    /// The reactor that has the `listener`, as its index in the group.
    pub(crate) reactor: usize,
    pub(crate) listener: ListenerId,
    pub(crate) framing: Framing,
    pub(crate) service: Service,
    pub(crate) security: Security,
    pub(crate) peer: SocketAddr,
    pub(crate) private_data: Box<[u8]>,
}

impl RequestOrigin {
    /// Parses the peer's greeting. If the greeting is not valid, returns the reason with which the
    /// request must be rejected.
    pub(crate) fn greeting(&self) -> Result<Greeting<'_>, RejectReason> {
        match self.framing {
            Framing::Raw => Ok(Greeting::reject(RejectReason::Refused, &self.private_data)),
            Framing::Credits => Greeting::parse(&self.private_data).and_then(Greeting::checked),
        }
    }

    /// Returns the properties that the program sees: the listener, the index of the listener's
    /// reactor, the address of the peer, and the peer's private data.
    pub(crate) fn parts(&self) -> (ListenerId, usize, SocketAddr, &[u8]) {
        let private_data = self.greeting().map_or(&[][..], |greeting| greeting.user);
        (self.listener, self.reactor, self.peer, private_data)
    }
}

/// A connect request that arrived at this reactor or at another reactor of its group. Nothing is
/// allocated for it yet.
#[derive(Debug)]
pub(crate) struct IncomingRequest {
    pub(crate) cm: Handle<CmId>,
    /// The index of the device on which the request arrived.
    pub(crate) device: usize,
    pub(crate) origin: RequestOrigin,
    /// True if the request was assigned to this reactor by its group, and is counted in the load of
    /// the reactor.
    pub(crate) placed: bool,
}
