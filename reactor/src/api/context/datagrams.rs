//! The callbacks of datagram endpoints, and the operations on datagram endpoints.

use std::net::{IpAddr, SocketAddr};

use rdma_transport::caps::Capabilities;
use rdma_transport::slab::Key;

use super::Context;
use crate::datagram::endpoints::Endpoints;
use crate::datagram::{Datagram, EndpointId, EndpointOptions, Origin, PeerId};
use crate::driver::Driver;
use crate::error::{ConnectError, DisconnectReason, Error, Outcome, SendErrorKind};
use crate::id::SendId;

/// The callbacks for datagrams. [`crate::datagram`] describes datagrams. A program that opens datagram endpoints
/// implements this trait for its handler, or for a part of the handler, and returns the implementation from
/// [`crate::Handler::datagrams`]. Each callback may call any method of [`Context`].
#[allow(unused_variables)]
pub trait DatagramHandler {
    /// A datagram has arrived.
    fn on_datagram(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, datagram: Datagram<'_>) {}

    /// The send of a datagram has ended with `outcome`. This is called once for each accepted datagram, in the order of
    /// sending.
    fn on_datagram_sent(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, send: SendId, outcome: Outcome) {}

    /// The endpoint is writable again: it has refused one or more datagrams with `WouldBlock`, and would accept a
    /// datagram now. The reactor calls this once, and again only after another refusal.
    fn on_datagram_writable(&mut self, cx: &mut Context<'_>, endpoint: EndpointId) {}

    /// The search of [`DatagramContext::find_peer`] has ended. `found` is the id with which the program sends to the
    /// peer, or the reason why `address` cannot be reached.
    fn on_peer(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        address: SocketAddr,
        found: Result<PeerId, ConnectError>,
    ) {
    }

    /// The attempt of [`DatagramContext::join`] to join a multicast group has ended. If the attempt succeeded, `joined` is the id with
    /// which the program sends to the group. Otherwise `joined` is the reason why the endpoint is not a member. If the endpoint loses its
    /// membership later, this is called again, with the reason as `joined`.
    fn on_join(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        group: IpAddr,
        joined: Result<PeerId, ConnectError>,
    ) {
    }

    /// An endpoint has ended: it was closed, or its device failed or was removed. This is the last callback of the
    /// endpoint. When it returns, the id of the endpoint and the ids of its peers are stale.
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

    /// Opens a datagram endpoint at `local`, an address of an RDMA device. On the embedded
    /// provider, `local` may be any address of this host. Port 0 selects a free port, which
    /// [`DatagramContext::address`] returns. The endpoint receives datagrams immediately.
    /// `on_endpoint_closed` is its last callback.
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
    /// One of these:
    ///
    /// - The provider or the device does not support datagrams ([`rdma_transport::TransportError::Unsupported`] says which of
    ///   them).
    /// - The address belongs to no device, or is in use.
    /// - The device has no free resources.
    /// - The deadline of a drain has passed ([`Error::Drained`]).
    /// - An option is out of its range.
    pub fn open(&mut self, local: SocketAddr, options: EndpointOptions) -> Result<EndpointId, Error> {
        self.endpoints.open(self.driver, local, options)
    }

    /// Returns the address to which peers send datagrams for this endpoint; `None` if the endpoint is closed.
    #[must_use]
    pub fn address(&self, endpoint: EndpointId) -> Option<SocketAddr> {
        self.info(endpoint).map(|(address, ..)| address)
    }

    /// Returns the number of an endpoint's queue pair; `None` if the endpoint is closed. Some protocols send this
    /// number to the peer as immediate data.
    #[must_use]
    pub fn qp_number(&self, endpoint: EndpointId) -> Option<u32> {
        self.info(endpoint).map(|(_, qp_number, ..)| qp_number)
    }

    /// Returns the largest payload of a datagram on this endpoint, in bytes; `None` if the endpoint is closed.
    #[must_use]
    pub fn max_datagram(&self, endpoint: EndpointId) -> Option<usize> {
        self.info(endpoint).map(|(.., max)| max)
    }

    /// Returns the capabilities of an endpoint's device, for example multicast; `None` if the endpoint is closed or the
    /// device was removed.
    #[must_use]
    pub fn capabilities(&self, endpoint: EndpointId) -> Option<Capabilities> {
        let index = self.info(endpoint)?.2;
        let device = self.driver.devices.get(index)?;
        Some(self.driver.providers.get_of_device(index).device(device.id)?.capabilities)
    }

    /// Resolves `address` to the datagram endpoint of a peer. The reactor calls `on_peer` with the id of the peer, or
    /// with an error.
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
    /// The endpoint is closed, or the provider returned an error. After an error, `on_peer` is not called.
    pub fn find_peer(&mut self, endpoint: EndpointId, address: SocketAddr) -> Result<(), Error> {
        self.driver.look_at_clock();
        let key = self.key(endpoint)?;
        self.endpoints.find_peer(self.driver, key, address)
    }

    /// Creates a peer id for the sender of a received datagram. The program can send to this id. Each call makes a system call. To answer
    /// many datagrams of one sender, keep the returned id, with the [`Origin`] as its key. Call
    /// [`forget_peer`](DatagramContext::forget_peer) when the id is not needed any more.
    ///
    /// Example: [`DatagramContext::open`].
    ///
    /// # Errors
    /// The endpoint is closed, or the datagram was sent to a multicast group. A datagram to a group does not name the
    /// local address from which to answer. In this case, resolve the sender's address with
    /// [`DatagramContext::find_peer`] instead.
    pub fn peer_of(&mut self, endpoint: EndpointId, origin: &Origin) -> Result<PeerId, Error> {
        let key = self.key(endpoint)?;
        self.endpoints.peer_of(self.driver, key, origin)
    }

    /// Releases a peer that the program does not need any more. Datagrams to this peer that the reactor has accepted
    /// before this call are still sent. A stale id is ignored.
    pub fn forget_peer(&mut self, peer: PeerId) {
        if let Some(peer) = peer.key(self.driver.tag()) {
            self.endpoints.forget_peer(self.driver, peer);
        }
    }

    /// Sends a copy of `payload` to a peer. The reactor posts the datagram at the end of the turn, and calls
    /// `on_datagram_sent` when the send has ended.
    ///
    /// Example: [`DatagramContext::open`].
    ///
    /// # Errors
    /// `TooLong` if the payload is longer than [`DatagramContext::max_datagram`]; `NoPeer` if the id is stale or
    /// belongs to another endpoint; `Closed` if the endpoint is closed; `WouldBlock` if the send queue is full. After
    /// `WouldBlock`, `on_datagram_writable` follows once.
    pub fn send(&mut self, endpoint: EndpointId, peer: PeerId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        let key = self.key(endpoint).map_err(|_| SendErrorKind::Closed)?;
        self.endpoints.send(self.driver, key, peer, payload, None)
    }

    /// Sends a copy of `payload` like [`DatagramContext::send`], with 32 bits of immediate data.
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
    /// The errors of [`DatagramContext::send`].
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

    /// Joins a multicast group. The reactor calls `on_join` with an error, or with the id with which the program sends
    /// to the group. After a success, the endpoint receives the datagrams that are sent to the group.
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

    /// Leaves a multicast group, or cancels an attempt to join it. `on_join` is not called. The id of the group is
    /// stale afterwards.
    ///
    /// Example: [`DatagramContext::join`].
    ///
    /// # Errors
    /// The endpoint is closed or is not a member of the group.
    pub fn leave(&mut self, endpoint: EndpointId, group: IpAddr) -> Result<(), Error> {
        let key = self.key(endpoint)?;
        self.endpoints.leave(self.driver, key, group)
    }

    /// Closes an endpoint, which then receives no more datagrams. The reactor first sends the
    /// datagrams that it has accepted, for at most `Timeouts::close`. Afterwards it calls
    /// `on_endpoint_closed`. A stale id is ignored.
    pub fn close(&mut self, endpoint: EndpointId) {
        self.driver.look_at_clock();
        if let Some(key) = endpoint.key(self.driver.tag()) {
            self.endpoints.end(self.driver, key, DisconnectReason::Local { complete: false }, false);
        }
    }
}
