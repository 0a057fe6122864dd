//! What a callback may do with datagrams.

use std::net::{IpAddr, SocketAddr};

use rdma_transport::caps::Capabilities;

use super::{EndpointId, EndpointOptions, Origin, PeerId};
use crate::context::Context;
use crate::error::{DisconnectReason, Error, SendErrorKind};
use crate::id::SendId;

impl Context<'_> {
    /// Opens an endpoint for datagrams at an address of a device; port 0 takes a free one, see
    /// [`Context::endpoint_address`]. It receives at once; `on_endpoint_closed` is its last callback. See
    /// [`crate::datagram`] for what datagrams are.
    ///
    /// # Errors
    /// The provider or the device has no datagrams ([`rdma_transport::Error::Unsupported`], which names it), the address
    /// is on no device or in use, the device has no room, or the reactor is drained.
    pub fn datagrams(&mut self, local: SocketAddr, options: EndpointOptions) -> Result<EndpointId, Error> {
        self.core.open_endpoint(local, options)
    }

    /// Where peers find an endpoint; `None` when it is gone.
    #[must_use]
    pub fn endpoint_address(&self, endpoint: EndpointId) -> Option<SocketAddr> {
        Some(self.core.endpoints.all.get(endpoint.0)?.address)
    }

    /// Number of an endpoint's queue pair, which some programs send as immediate data; `None` when it is gone.
    #[must_use]
    pub fn endpoint_number(&self, endpoint: EndpointId) -> Option<u32> {
        self.core.provider.qp_number(self.core.endpoints.all.get(endpoint.0)?.qp).ok()
    }

    /// Largest payload of a datagram, bytes; `None` when the endpoint is gone.
    #[must_use]
    pub fn max_datagram(&self, endpoint: EndpointId) -> Option<usize> {
        Some(self.core.endpoints.all.get(endpoint.0)?.max_datagram)
    }

    /// What the device of an endpoint can do, multicast for one; `None` when either is gone.
    #[must_use]
    pub fn endpoint_capabilities(&self, endpoint: EndpointId) -> Option<Capabilities> {
        let device = self.core.endpoints.all.get(endpoint.0)?.device;
        let device = self.core.devices.get(device)?.as_ref()?;
        Some(self.core.provider.device(device.id)?.capabilities)
    }

    /// Asks where the endpoint at `address` takes datagrams: `on_peer` follows, with a way to send there.
    ///
    /// # Errors
    /// The endpoint is closed, or the provider refused at once; no callback follows.
    pub fn find_peer(&mut self, endpoint: EndpointId, address: SocketAddr) -> Result<(), Error> {
        self.core.find_peer(endpoint, address)
    }

    /// The way back to the sender of a datagram that came to this endpoint. Takes a system call: keep the result, by
    /// [`Origin`], instead of asking for each datagram, and [`Context::forget_peer`] it in the end.
    ///
    /// # Errors
    /// The endpoint is closed. The datagram came to a group: that names no address of ours to answer from, so find its
    /// sender by address.
    pub fn peer_of(&mut self, endpoint: EndpointId, origin: &Origin) -> Result<PeerId, Error> {
        self.core.peer_of(endpoint, origin)
    }

    /// Gives a peer back; what was sent to it before still goes out. A stale one is ignored.
    pub fn forget_peer(&mut self, peer: PeerId) {
        self.core.forget_peer(peer);
    }

    /// Sends a copy of `payload`. It goes out at the end of the turn; `on_datagram_sent` follows.
    ///
    /// # Errors
    /// `TooLong`, `NoPeer` when the peer is not one of this endpoint, `Closed`; after `WouldBlock`,
    /// `on_datagram_writable` follows once.
    pub fn send_to(&mut self, endpoint: EndpointId, peer: PeerId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        self.core.send_datagram(endpoint, peer, payload, None)
    }

    /// As [`Context::send_to`], with 32 bits beside the payload.
    ///
    /// # Errors
    /// As [`Context::send_to`].
    pub fn send_to_with_immediate(
        &mut self,
        endpoint: EndpointId,
        peer: PeerId,
        payload: &[u8],
        immediate: u32,
    ) -> Result<SendId, SendErrorKind> {
        self.core.send_datagram(endpoint, peer, payload, Some(immediate))
    }

    /// Joins a multicast group: `on_join` follows, with the peer that is the group. What is sent there arrives from then on.
    ///
    /// # Errors
    /// The endpoint is closed or in the group, the device has no multicast, or the provider refused at once.
    pub fn join(&mut self, endpoint: EndpointId, group: IpAddr) -> Result<(), Error> {
        self.core.join_group(endpoint, group)
    }

    /// Leaves a group, or gives up joining it; no `on_join` follows. Its peer is forgotten.
    ///
    /// # Errors
    /// The endpoint is closed, or not in the group.
    pub fn leave(&mut self, endpoint: EndpointId, group: IpAddr) -> Result<(), Error> {
        self.core.leave_group(endpoint, group)
    }

    /// Closes an endpoint, after what was taken has been sent, for `Config::close_timeout` at most. `on_endpoint_closed`
    /// follows; nothing more is received. A stale id is ignored.
    pub fn close_endpoint(&mut self, endpoint: EndpointId) {
        self.core.end_endpoint(endpoint, DisconnectReason::Local, false);
    }
}
