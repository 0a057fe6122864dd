//! The peers of datagram endpoints: adding, removing, and finding them by address.

use std::net::SocketAddr;

use log::Level;
use rdma_transport::cm::{CmEventKind, CmId, ConnectFailure, ConnectParam};
use rdma_transport::datagram::{AddressId, DatagramPeer, Destination, QUEUE_KEY};
use rdma_transport::provider::Provider;
use rdma_transport::roles::Datagrams;
use rdma_transport::slab::Key;
use rdma_transport_embedded::iwarp;

use super::endpoints::{DATAGRAMS, EndpointEvent, EndpointPeer, EndpointToken, Endpoints, PeerLookup};
use super::{Origin, PeerId};
use crate::driver::owners::CmIdOwner;
use crate::driver::{Driver, TimerPurpose};
use crate::error::{ConnectError, DisconnectReason, Error, RejectReason};
use crate::providers::{Handle, device_index, role};

/// Returns the datagram operations of the provider that has the device `device`.
pub(super) fn datagrams(driver: &mut Driver, device: usize) -> rdma_transport::Result<&mut dyn Datagrams> {
    role(driver.providers.of_device(device), Provider::datagrams, DATAGRAMS)
}

fn destroy_address(driver: &mut Driver, device: usize, address: AddressId) {
    let destroyed = datagrams(driver, device).and_then(|role| role.destroy_address(address));
    if let Err(error) = destroyed {
        log::debug!("destroying an address handle failed: {error}");
    }
}

impl Endpoints {
    /// Adds a peer to an endpoint, and creates the address handle of the peer. Returns the id of the peer.
    pub(super) fn add_peer(&mut self, driver: &mut Driver, key: Key, peer: &DatagramPeer) -> Result<PeerId, Error> {
        let endpoint = self.get_open(key).ok_or(Error::Gone("endpoint"))?;
        let index = endpoint.resources.device;
        let device = driver.devices.get(index).ok_or(Error::Gone("device"))?.id;
        let address = datagrams(driver, index)?.create_address(device, &peer.route)?;
        let destination = Destination { address, qp_number: peer.qp_number, queue_key: peer.queue_key };
        Ok(PeerId::new(driver.tag(), self.peers.insert(EndpointPeer { endpoint: key, device: index, destination })))
    }

    pub(crate) fn peer_of(&mut self, driver: &mut Driver, key: Key, origin: &Origin) -> Result<PeerId, Error> {
        let endpoint = self.get_open(key).ok_or(Error::Gone("endpoint"))?;
        let (device, cm) = (endpoint.resources.device, endpoint.resources.cm.id);
        let route = datagrams(driver, device)?.route_back(cm, &origin.completion, &origin.header)?;
        // A datagram does not contain the queue key of its sender. But all endpoints of one provider have the same
        // queue key: the configured key on the embedded provider, and `QUEUE_KEY` on other providers.
        let embedded = driver.providers.of_device(device).name() == iwarp::NAME;
        let queue_key = if embedded { driver.config.iwarp.roce.queue_key } else { QUEUE_KEY };
        let peer = DatagramPeer { route, qp_number: origin.qp_number(), queue_key };
        self.add_peer(driver, key, &peer)
    }

    /// Removes a peer. Datagrams to the peer that were already accepted are still sent.
    pub(crate) fn forget_peer(&mut self, driver: &mut Driver, peer: Key) {
        let Some(peer) = self.peers.remove(peer) else { return };
        let (key, device, address) = (peer.endpoint, peer.device, peer.destination.address);
        match self.all.get_mut(key) {
            Some(endpoint) => {
                endpoint.forgotten.push_back((endpoint.queues.accepted, address));
                self.drop_unused_addresses(driver, key);
            }
            None => destroy_address(driver, device, address),
        }
    }

    pub(super) fn forget_peers_of(&mut self, driver: &mut Driver, endpoint: Key) {
        for key in self.peers.keys() {
            if self.peers.get(key).is_some_and(|peer| peer.endpoint == endpoint) {
                self.forget_peer(driver, key);
            }
        }
    }

    /// Destroys the unused address handles of forgotten peers. An address handle is in use until the last send to its
    /// peer has completed.
    pub(super) fn drop_unused_addresses(&mut self, driver: &mut Driver, key: Key) {
        let Some(endpoint) = self.all.get_mut(key) else { return };
        while let Some(address) = endpoint.next_unused() {
            destroy_address(driver, endpoint.resources.device, address);
        }
    }

    /// Destroys the address handles of an endpoint that has ended. Its queue pair is already destroyed, so nothing uses
    /// the handles.
    pub(super) fn drop_addresses(
        driver: &mut Driver,
        device: usize,
        addresses: impl IntoIterator<Item = (u64, AddressId)>,
    ) {
        addresses.into_iter().for_each(|(_, address)| destroy_address(driver, device, address));
    }

    // Lookups, which find a peer by its address.

    pub(crate) fn find_peer(&mut self, driver: &mut Driver, key: Key, address: SocketAddr) -> Result<(), Error> {
        let endpoint = self.get_open(key).ok_or(Error::Gone("endpoint"))?;
        let mut from = endpoint.resources.address;
        from.set_port(0);
        let deadline = driver.now + driver.config.timeouts.connect;
        let (device, provider) = (endpoint.resources.device, endpoint.resources.cm.provider);
        let id = datagrams(driver, device)?.resolve_datagram(address, Some(from), deadline)?;
        let cm = Handle { provider, id };
        let lookup = self.lookups.insert(PeerLookup { endpoint: key, cm, address, timer: Key::new(0, 0) });
        let number = EndpointToken::Lookup(lookup).pack();
        let timer = driver.timers.insert(deadline, TimerPurpose::Endpoint(number));
        if let Some(lookup) = self.lookups.get_mut(lookup) {
            lookup.timer = timer;
        }
        driver.owners.own(cm, CmIdOwner::Endpoint(number));
        Ok(())
    }

    /// Handles a connection-manager event of a lookup: its next step, its result, or its failure.
    pub(super) fn lookup_event(&mut self, driver: &mut Driver, key: Key, kind: CmEventKind) {
        let Some(&PeerLookup { endpoint, cm, .. }) = self.lookups.get(key) else { return };
        let ended = match kind {
            CmEventKind::Resolved { device } => {
                let ours =
                    self.all.get(endpoint).is_some_and(|of| of.resources.device == device_index(cm.provider, device));
                let resolved = if ours {
                    driver
                        .providers
                        .numbered(cm.provider)
                        .connect(cm.id, &ConnectParam::default())
                        .map_err(|error| error.to_string())
                } else {
                    Err("the address is reached through another device than the endpoint's".into())
                };
                match resolved {
                    Ok(()) => return,
                    Err(why) => Err(ConnectError::Local(why)),
                }
            }
            CmEventKind::Reached { peer, .. } => {
                self.add_peer(driver, endpoint, &peer).map_err(|error| ConnectError::Local(error.to_string()))
            }
            CmEventKind::Rejected { private_data } => {
                let reason = RejectReason::Refused;
                Err(ConnectError::Rejected { reason, private_data: private_data.into_vec() })
            }
            CmEventKind::ConnectFailed(ConnectFailure::Timeout) => Err(ConnectError::Timeout),
            CmEventKind::ConnectFailed(failure) => Err(ConnectError::Transport(failure)),
            CmEventKind::DeviceRemoval => Err(ConnectError::Local(DisconnectReason::DeviceRemoved.to_string())),
            other => {
                log::debug!("lookup {key}: {other:?} ignored");
                return;
            }
        };
        self.end_lookup(driver, key, ended);
    }

    pub(super) fn end_lookup(&mut self, driver: &mut Driver, key: Key, found: Result<PeerId, ConnectError>) {
        if let Some(PeerLookup { endpoint, address, .. }) = self.drop_lookup(driver, key) {
            if let Some(endpoint) = self.all.get(endpoint).map(|endpoint| endpoint.id) {
                self.push_event(EndpointEvent::Peer { endpoint, address, found });
            }
        }
    }

    pub(super) fn drop_lookup(&mut self, driver: &mut Driver, key: Key) -> Option<PeerLookup> {
        let lookup = self.lookups.remove(key)?;
        driver.timers.cancel(lookup.timer);
        driver.discard(lookup.cm);
        Some(lookup)
    }

    pub(super) fn cancel_lookups(&mut self, driver: &mut Driver, endpoint: Key) {
        for key in self.lookups.keys() {
            if self.lookups.get(key).is_some_and(|lookup| lookup.endpoint == endpoint) {
                self.end_lookup(driver, key, Err(ConnectError::Cancelled));
            }
        }
    }

    /// Answers a peer that looks up an endpoint: sends the number and the queue key of the endpoint's queue pair. If
    /// the endpoint is closed, or if `Config::allowed_peers` does not admit the peer, the request of the peer is
    /// dropped. Nothing is allocated, so such requests cannot exhaust memory.
    pub(super) fn answer(&mut self, driver: &mut Driver, key: Key, query: Handle<CmId>, peer: SocketAddr) {
        let now = driver.now;
        let Some(endpoint) = self.get_open(key) else { return driver.discard(query) };
        if !driver.config.admits(peer.ip()) {
            driver.log_refusal(peer, Level::Info, "its network is not among those that may look up an endpoint");
            return driver.discard(query);
        }
        let (device, qp) = (endpoint.resources.device, endpoint.resources.qp);
        let answered = datagrams(driver, device).and_then(|role| role.answer_datagram(query.id, qp, &[], now));
        if let Err(error) = answered {
            driver.log_refusal(peer, Level::Info, &format!("answering it failed: {error}"));
        }
    }
}
