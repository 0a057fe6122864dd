//! The operations on datagram endpoints, and their callbacks.

use std::net::{IpAddr, SocketAddr};

use rdma_transport::caps::Capabilities;
use rdma_transport::slab::Key;

use super::Context;
use crate::datagram::endpoints::Endpoints;
use crate::datagram::{Datagram, EndpointId, EndpointOptions, Origin, PeerId};
use crate::driver::Driver;
use crate::error::{ConnectError, DisconnectReason, Error, Outcome, SendErrorKind};
use crate::id::SendId;

/// The callbacks for datagrams. [`crate::datagram`] describes datagrams. A [`crate::Handler`] that opens endpoints
/// returns itself, or a part of itself, from its `datagrams`. Each callback may call any method of [`Context`].
#[allow(unused_variables)]
pub trait DatagramHandler {
    /// A datagram has arrived.
    fn on_datagram(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, datagram: Datagram<'_>) {}

    /// A send of a datagram has ended. Called once for each accepted datagram, in the order of sending.
    fn on_datagram_sent(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, send: SendId, outcome: Outcome) {}

    /// A datagram was refused with `WouldBlock`, and one would be accepted now. Called once after a refusal.
    fn on_datagram_writable(&mut self, cx: &mut Context<'_>, endpoint: EndpointId) {}

    /// [`DatagramContext::find_peer`] has ended. `found` is the peer to send to, or the reason why `address` cannot be
    /// reached.
    fn on_peer(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        address: SocketAddr,
        found: Result<PeerId, ConnectError>,
    ) {
    }

    /// [`DatagramContext::join`] has ended. `joined` is the peer that stands for the group, or the reason why the endpoint is
    /// not, or no longer, a member.
    fn on_join(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        group: IpAddr,
        joined: Result<PeerId, ConnectError>,
    ) {
    }

    /// An endpoint has ended, together with its peers: it was closed, or its device failed or was removed. This is its
    /// last callback; the id is stale when it returns.
    fn on_endpoint_closed(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, reason: DisconnectReason) {}
}

/// The operations on the datagram endpoints of a reactor, from [`Context::datagrams`].
#[derive(Debug)]
pub struct DatagramContext<'a> {
    pub(super) driver: &'a mut Driver,
    pub(super) endpoints: &'a mut Endpoints,
}

impl DatagramContext<'_> {
    fn key(&self, endpoint: EndpointId) -> Result<Key, Error> {
        endpoint.key(self.driver.tag()).ok_or(Error::Gone("endpoint"))
    }

    fn info(&self, endpoint: EndpointId) -> Option<(SocketAddr, u32, usize, usize)> {
        self.endpoints.info(endpoint.key(self.driver.tag())?)
    }

    /// Opens a datagram endpoint at an address of a device. Port 0 selects a free port, see [`DatagramContext::address`]. The
    /// endpoint receives immediately. `on_endpoint_closed` is its last callback.
    ///
    /// ```no_run
    /// use rdma_reactor::{Config, Context, Datagram, DatagramHandler, EndpointId, EndpointOptions, Handler, Reactor};
    ///
    /// /// Returns each datagram to its sender.
    /// struct Echo;
    ///
    /// impl Handler for Echo {
    ///     fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
    ///         Some(self)
    ///     }
    /// }
    ///
    /// impl DatagramHandler for Echo {
    ///     fn on_datagram(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, datagram: Datagram<'_>) {
    ///         let mut datagrams = cx.datagrams();
    ///         if let Ok(peer) = datagrams.peer_of(endpoint, &datagram.origin()) {
    ///             // A datagram may be lost anyway, so a refusal is ignored.
    ///             let _ = datagrams.send(endpoint, peer, &datagram);
    ///             datagrams.forget_peer(peer);
    ///         }
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut reactor = Reactor::new(Config::default())?;
    /// reactor.context().datagrams().open("192.0.2.1:7471".parse()?, EndpointOptions::new())?;
    /// reactor.run(&mut Echo)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The provider or the device does not support datagrams ([`rdma_transport::Error::Unsupported`], which names it),
    /// the address belongs to no device or is in use, the device has no free resources, or the reactor is draining.
    pub fn open(&mut self, local: SocketAddr, options: EndpointOptions) -> Result<EndpointId, Error> {
        self.endpoints.open(self.driver, local, options)
    }

    /// Returns the address at which peers find an endpoint; `None` if the endpoint is closed.
    #[must_use]
    pub fn address(&self, endpoint: EndpointId) -> Option<SocketAddr> {
        self.info(endpoint).map(|(address, ..)| address)
    }

    /// Returns the number of an endpoint's queue pair, which some programs send as immediate data; `None` if the
    /// endpoint is closed.
    #[must_use]
    pub fn qp_number(&self, endpoint: EndpointId) -> Option<u32> {
        self.info(endpoint).map(|(_, qp_number, ..)| qp_number)
    }

    /// Returns the largest payload of a datagram, bytes; `None` if the endpoint is closed.
    #[must_use]
    pub fn max_datagram(&self, endpoint: EndpointId) -> Option<usize> {
        self.info(endpoint).map(|(.., max)| max)
    }

    /// Returns the capabilities of an endpoint's device, such as multicast; `None` if the endpoint is closed or the
    /// device was removed.
    #[must_use]
    pub fn capabilities(&self, endpoint: EndpointId) -> Option<Capabilities> {
        let index = self.info(endpoint)?.2;
        let device = self.driver.device(index)?;
        Some(self.driver.providers().get_of_device(index).device(device.id)?.capabilities)
    }

    /// Resolves the endpoint at `address`. `on_peer` follows, with a peer to send to.
    ///
    /// ```
    /// use rdma_reactor::{Context, Datagram, DatagramHandler, EndpointId, Error, PeerId};
    ///
    /// struct Client;
    ///
    /// impl Client {
    ///     fn start(&mut self, cx: &mut Context<'_>, endpoint: EndpointId) -> Result<(), Error> {
    ///         cx.datagrams().find_peer(endpoint, ([192, 0, 2, 1], 7471).into())
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// The endpoint is closed, or the provider returned an error. No callback follows.
    pub fn find_peer(&mut self, endpoint: EndpointId, address: SocketAddr) -> Result<(), Error> {
        let key = self.key(endpoint)?;
        self.endpoints.find_peer(self.driver, key, address)
    }

    /// Returns the sender of a received datagram as a peer to send to. This takes a system call: keep the result, by
    /// [`Origin`], instead of calling it for each datagram, and [forget](DatagramContext::forget_peer) the peer in the end.
    ///
    /// Example: [`DatagramContext::open`].
    ///
    /// # Errors
    /// The endpoint is closed; or the datagram was sent to a group, which does not name a local address to answer from:
    /// resolve the sender by its address instead.
    pub fn peer_of(&mut self, endpoint: EndpointId, origin: &Origin) -> Result<PeerId, Error> {
        let key = self.key(endpoint)?;
        self.endpoints.peer_of(self.driver, key, origin)
    }

    /// Releases a peer. Datagrams that were accepted for it before are still sent. A stale id is ignored.
    pub fn forget_peer(&mut self, peer: PeerId) {
        if let Some(peer) = peer.key(self.driver.tag()) {
            self.endpoints.forget_peer(self.driver, peer);
        }
    }

    /// Sends a copy of `payload`. The datagram is posted at the end of the turn. `on_datagram_sent` follows.
    ///
    /// Example: [`DatagramContext::open`].
    ///
    /// # Errors
    /// `TooLong`; `NoPeer` if the peer does not belong to this endpoint; `Closed`; `WouldBlock`, after which
    /// `on_datagram_writable` follows once.
    pub fn send(&mut self, endpoint: EndpointId, peer: PeerId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        let key = self.key(endpoint).map_err(|_| SendErrorKind::Closed)?;
        self.endpoints.send(self.driver, key, peer, payload, None)
    }

    /// As [`DatagramContext::send`], with 32 bits of immediate data.
    ///
    /// ```
    /// use rdma_reactor::{Context, EndpointId, PeerId, SendErrorKind};
    ///
    /// /// Sends a numbered datagram.
    /// fn send(cx: &mut Context<'_>, endpoint: EndpointId, to: PeerId, number: u32) -> Result<(), SendErrorKind> {
    ///     cx.datagrams().send_with_immediate(endpoint, to, b"some bytes", number).map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`DatagramContext::send`].
    pub fn send_with_immediate(
        &mut self,
        endpoint: EndpointId,
        peer: PeerId,
        payload: &[u8],
        immediate: u32,
    ) -> Result<SendId, SendErrorKind> {
        let key = self.key(endpoint).map_err(|_| SendErrorKind::Closed)?;
        self.endpoints.send(self.driver, key, peer, payload, Some(immediate))
    }

    /// Joins a multicast group. `on_join` follows, with the peer that stands for the group. Datagrams to the group are
    /// received from then on.
    ///
    /// ```
    /// use rdma_reactor::{Context, EndpointId, Error};
    ///
    /// /// Leaves one group, and joins another.
    /// fn change(cx: &mut Context<'_>, endpoint: EndpointId) -> Result<(), Error> {
    ///     cx.datagrams().leave(endpoint, [239, 1, 1, 1].into())?;
    ///     cx.datagrams().join(endpoint, [239, 1, 1, 2].into())
    /// }
    /// ```
    ///
    /// # Errors
    /// The endpoint is closed or is a member already, the device does not support multicast, or the provider returned
    /// an error.
    pub fn join(&mut self, endpoint: EndpointId, group: IpAddr) -> Result<(), Error> {
        let key = self.key(endpoint)?;
        self.endpoints.join(self.driver, key, group)
    }

    /// Leaves a group, or cancels joining it. No `on_join` follows. The group's peer is forgotten.
    ///
    /// Example: [`DatagramContext::join`].
    ///
    /// # Errors
    /// The endpoint is closed or is not a member of the group.
    pub fn leave(&mut self, endpoint: EndpointId, group: IpAddr) -> Result<(), Error> {
        let key = self.key(endpoint)?;
        self.endpoints.leave(self.driver, key, group)
    }

    /// Closes an endpoint after all accepted datagrams were sent, within `Timeouts::close`. `on_endpoint_closed`
    /// follows. Nothing is received any more. A stale id is ignored.
    pub fn close(&mut self, endpoint: EndpointId) {
        if let Some(key) = endpoint.key(self.driver.tag()) {
            self.endpoints.end(self.driver, key, DisconnectReason::Local { complete: false }, false);
        }
    }
}
