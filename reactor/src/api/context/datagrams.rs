//! What a program does with datagrams, and the callbacks for them.

use std::net::{IpAddr, SocketAddr};

use rdma_transport::caps::Capabilities;
use rdma_transport::slab::Key;

use super::Context;
use crate::datagram::endpoints::Endpoints;
use crate::datagram::{Datagram, EndpointId, EndpointOptions, Origin, PeerId};
use crate::driver::Driver;
use crate::error::{ConnectError, DisconnectReason, Error, Outcome, SendErrorKind};
use crate::id::SendId;

/// Callbacks for datagrams: see [`crate::datagram`] for what datagrams are. A [`crate::Handler`] that opens endpoints returns
/// itself, or a part of it, from its `datagrams`. Any method of [`Context`] may be called in any of them.
#[allow(unused_variables)]
pub trait DatagramHandler {
    /// A datagram came.
    fn on_datagram(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, datagram: Datagram<'_>) {}

    /// A datagram has ended, in the order of sending: once for each that was taken.
    fn on_datagram_sent(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, send: SendId, outcome: Outcome) {}

    /// A datagram was refused with `WouldBlock` before, and there is room again. Once per refusal.
    fn on_datagram_writable(&mut self, cx: &mut Context<'_>, endpoint: EndpointId) {}

    /// The end of [`Datagrams::find_peer`]: a way to send to `address`, or why there is none.
    fn on_peer(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        address: SocketAddr,
        found: Result<PeerId, ConnectError>,
    ) {
    }

    /// The end of [`Datagrams::join`]: the peer that is the group, or why the endpoint is not, or no longer, in it.
    fn on_join(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        group: IpAddr,
        joined: Result<PeerId, ConnectError>,
    ) {
    }

    /// An endpoint is gone, and its peers with it: it was closed, or its device failed or was removed. This is its last
    /// callback; the id is stale when it returns.
    fn on_endpoint_closed(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, reason: DisconnectReason) {}
}

/// The endpoints of a reactor, from [`Context::datagrams`].
#[derive(Debug)]
pub struct Datagrams<'a> {
    pub(super) driver: &'a mut Driver,
    pub(super) endpoints: &'a mut Endpoints,
}

impl Datagrams<'_> {
    fn key(&self, endpoint: EndpointId) -> Result<Key, Error> {
        endpoint.key(self.driver.tag()).ok_or(Error::Gone("endpoint"))
    }

    fn info(&self, endpoint: EndpointId) -> Option<(SocketAddr, u32, usize, usize)> {
        self.endpoints.info(endpoint.key(self.driver.tag())?)
    }

    /// Opens an endpoint for datagrams at an address of a device; port 0 takes a free one, see [`Datagrams::address`]. The
    /// endpoint receives at once; `on_endpoint_closed` is its last callback.
    ///
    /// ```no_run
    /// use rdma_reactor::{Config, Context, Datagram, DatagramHandler, EndpointId, EndpointOptions, Handler, Reactor};
    ///
    /// /// Sends back each datagram.
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
    ///             // A datagram may be lost, so nothing is made of a refusal.
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
    /// The provider or the device has no datagrams ([`rdma_transport::Error::Unsupported`], which names it), the address
    /// is on no device or in use, the device has no room, or the reactor is drained.
    pub fn open(&mut self, local: SocketAddr, options: EndpointOptions) -> Result<EndpointId, Error> {
        self.endpoints.open(self.driver, local, options)
    }

    /// Where peers find an endpoint; `None` when the endpoint is gone.
    #[must_use]
    pub fn address(&self, endpoint: EndpointId) -> Option<SocketAddr> {
        self.info(endpoint).map(|(address, ..)| address)
    }

    /// Number of an endpoint's queue pair, which some programs send as immediate data; `None` when the endpoint is gone.
    #[must_use]
    pub fn qp_number(&self, endpoint: EndpointId) -> Option<u32> {
        self.info(endpoint).map(|(_, qp_number, ..)| qp_number)
    }

    /// Largest payload of a datagram, bytes; `None` when the endpoint is gone.
    #[must_use]
    pub fn max_datagram(&self, endpoint: EndpointId) -> Option<usize> {
        self.info(endpoint).map(|(.., max)| max)
    }

    /// What the device of an endpoint can do, multicast for one; `None` when either is gone.
    #[must_use]
    pub fn capabilities(&self, endpoint: EndpointId) -> Option<Capabilities> {
        let index = self.info(endpoint)?.2;
        let device = self.driver.device(index)?;
        Some(self.driver.providers().get_of_device(index).device(device.id)?.capabilities)
    }

    /// Asks where the endpoint at `address` takes datagrams: `on_peer` follows, with a way to send there.
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
    /// The endpoint is closed, or the provider refused at once; no callback follows.
    pub fn find_peer(&mut self, endpoint: EndpointId, address: SocketAddr) -> Result<(), Error> {
        let key = self.key(endpoint)?;
        self.endpoints.find_peer(self.driver, key, address)
    }

    /// The way back to the sender of a datagram that came to this endpoint. Takes a system call: keep the result, by
    /// [`Origin`], instead of asking for each datagram, and [`Datagrams::forget_peer`] it in the end.
    ///
    /// Example: [`Datagrams::open`].
    ///
    /// # Errors
    /// The endpoint is closed. The datagram came to a group: that names no address of this side to answer from, so find its
    /// sender by address.
    pub fn peer_of(&mut self, endpoint: EndpointId, origin: &Origin) -> Result<PeerId, Error> {
        let key = self.key(endpoint)?;
        self.endpoints.peer_of(self.driver, key, origin)
    }

    /// Gives a peer back; what was sent to it before still goes out. A stale one is ignored.
    pub fn forget_peer(&mut self, peer: PeerId) {
        if let Some(peer) = peer.key(self.driver.tag()) {
            self.endpoints.forget_peer(self.driver, peer);
        }
    }

    /// Sends a copy of `payload`. It goes out at the end of the turn; `on_datagram_sent` follows.
    ///
    /// Example: [`Datagrams::open`].
    ///
    /// # Errors
    /// `TooLong`, `NoPeer` when the peer is not one of this endpoint, `Closed`; after `WouldBlock`,
    /// `on_datagram_writable` follows once.
    pub fn send(&mut self, endpoint: EndpointId, peer: PeerId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        let key = self.key(endpoint).map_err(|_| SendErrorKind::Closed)?;
        self.endpoints.send(self.driver, key, peer, payload, None)
    }

    /// As [`Datagrams::send`], with 32 bits beside the payload.
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
    /// As [`Datagrams::send`].
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

    /// Joins a multicast group: `on_join` follows, with the peer that is the group. What is sent there arrives from then on.
    ///
    /// ```
    /// use rdma_reactor::{Context, EndpointId, Error};
    ///
    /// /// Goes from one group to another.
    /// fn change(cx: &mut Context<'_>, endpoint: EndpointId) -> Result<(), Error> {
    ///     cx.datagrams().leave(endpoint, [239, 1, 1, 1].into())?;
    ///     cx.datagrams().join(endpoint, [239, 1, 1, 2].into())
    /// }
    /// ```
    ///
    /// # Errors
    /// The endpoint is closed or in the group, the device has no multicast, or the provider refused at once.
    pub fn join(&mut self, endpoint: EndpointId, group: IpAddr) -> Result<(), Error> {
        let key = self.key(endpoint)?;
        self.endpoints.join(self.driver, key, group)
    }

    /// Leaves a group, or gives up joining it; no `on_join` follows. Its peer is forgotten.
    ///
    /// Example: [`Datagrams::join`].
    ///
    /// # Errors
    /// The endpoint is closed, or not in the group.
    pub fn leave(&mut self, endpoint: EndpointId, group: IpAddr) -> Result<(), Error> {
        let key = self.key(endpoint)?;
        self.endpoints.leave(self.driver, key, group)
    }

    /// Closes an endpoint, after what was taken has been sent, for `Timeouts::close` at most. `on_endpoint_closed`
    /// follows; nothing more is received. A stale id is ignored.
    pub fn close(&mut self, endpoint: EndpointId) {
        if let Some(key) = endpoint.key(self.driver.tag()) {
            self.endpoints.end(self.driver, key, DisconnectReason::Local { complete: false }, false);
        }
    }
}
