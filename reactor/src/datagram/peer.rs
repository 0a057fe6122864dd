//! Peers, and the search for them.

use std::net::SocketAddr;

use rdma_transport::cm::{CmEventKind, CmId, ConnectFailure, ConnectParam};
use rdma_transport::datagram::{AddressId, DatagramPeer, Destination, QUEUE_KEY};
use rdma_transport::slab::Key;

use super::table::{Endpoints, Event, Lookup, Number, Peer};
use super::{Origin, PeerId};
use crate::driver::fabric::Owner;
use crate::driver::{Driver, Due};
use crate::error::{ConnectError, DisconnectReason, Error, RejectReason};

fn destroy_address(driver: &mut Driver, address: AddressId) {
    if let Err(error) = driver.provider_mut().destroy_address(address) {
        log::debug!("destroying an address: {error}");
    }
}

impl Endpoints {
    /// Adds a peer; the endpoint owns its address handle from now on.
    pub(super) fn add_peer(&mut self, driver: &mut Driver, key: Key, peer: &DatagramPeer) -> Result<PeerId, Error> {
        let endpoint = self.open_one(key).ok_or(Error::Gone("endpoint"))?;
        let device = driver.device(endpoint.site.device).ok_or(Error::Gone("device"))?.id;
        let address = driver.provider_mut().create_address(device, &peer.route)?;
        let destination = Destination { address, qp_number: peer.qp_number, queue_key: peer.queue_key };
        Ok(PeerId::new(driver.tag(), self.peers.insert(Peer { endpoint: key, destination })))
    }

    pub(crate) fn peer_of(&mut self, driver: &mut Driver, key: Key, origin: &Origin) -> Result<PeerId, Error> {
        let endpoint = self.open_one(key).ok_or(Error::Gone("endpoint"))?;
        let route = driver.provider().route_back(endpoint.site.cm, &origin.completion, &origin.header)?;
        let peer = DatagramPeer { route, qp_number: origin.qp_number(), queue_key: QUEUE_KEY };
        self.add_peer(driver, key, &peer)
    }

    /// Forgets a peer. Datagrams that were accepted for the peer are still sent.
    pub(crate) fn forget_peer(&mut self, driver: &mut Driver, peer: Key) {
        let Some(peer) = self.peers.remove(peer) else { return };
        let (key, address) = (peer.endpoint, peer.destination.address);
        match self.all.get_mut(key) {
            Some(endpoint) => {
                endpoint.forgotten.push_back((endpoint.traffic.taken, address));
                self.drop_unused_addresses(driver, key);
            }
            None => destroy_address(driver, address),
        }
    }

    pub(super) fn forget_peers_of(&mut self, driver: &mut Driver, endpoint: Key) {
        for key in self.peers.keys() {
            if self.peers.get(key).is_some_and(|peer| peer.endpoint == endpoint) {
                self.forget_peer(driver, key);
            }
        }
    }

    /// Destroys the address handles of forgotten peers to which nothing is on its way any more. A device may use an
    /// address handle until then.
    pub(super) fn drop_unused_addresses(&mut self, driver: &mut Driver, key: Key) {
        while let Some(address) = self.all.get_mut(key).and_then(super::endpoint::Endpoint::next_unused) {
            destroy_address(driver, address);
        }
    }

    /// Destroys the addresses of an endpoint that is gone.
    pub(super) fn drop_addresses(driver: &mut Driver, addresses: impl IntoIterator<Item = (u64, AddressId)>) {
        addresses.into_iter().for_each(|(_, address)| destroy_address(driver, address));
    }

    // Finding.

    pub(crate) fn find_peer(&mut self, driver: &mut Driver, key: Key, address: SocketAddr) -> Result<(), Error> {
        let endpoint = self.open_one(key).ok_or(Error::Gone("endpoint"))?;
        let from = SocketAddr::new(endpoint.site.address.ip(), 0);
        let deadline = driver.now() + driver.config().connect_timeout;
        let cm = driver.provider_mut().resolve_datagram(address, Some(from), deadline)?;
        let lookup = self.lookups.insert(Lookup { endpoint: key, cm, address, timer: Key::new(0, 0) });
        let number = Number::Lookup(lookup).pack();
        let timer = driver.timers_mut().insert(deadline, Due::Guest(number));
        if let Some(lookup) = self.lookups.get_mut(lookup) {
            lookup.timer = timer;
        }
        driver.fabric_mut().own(cm, Owner::Guest(number));
        Ok(())
    }

    /// Handles an event of the connection manager for a lookup.
    pub(super) fn lookup_event(&mut self, driver: &mut Driver, key: Key, kind: CmEventKind) {
        let Some(&Lookup { endpoint, cm, .. }) = self.lookups.get(key) else { return };
        let ended = match kind {
            CmEventKind::Resolved { device } => {
                let ours = self.all.get(endpoint).is_some_and(|of| of.site.device == device.0 as usize);
                let asked = if ours {
                    driver.provider_mut().connect(cm, &ConnectParam::default()).map_err(|error| error.to_string())
                } else {
                    Err("another device leads there than the endpoint's".into())
                };
                match asked {
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
        if let Some(Lookup { endpoint, address, .. }) = self.drop_lookup(driver, key)
            && let Some(endpoint) = self.all.get(endpoint).map(|endpoint| endpoint.id)
        {
            self.tell(Event::Peer { endpoint, address, found });
        }
    }

    pub(super) fn drop_lookup(&mut self, driver: &mut Driver, key: Key) -> Option<Lookup> {
        let lookup = self.lookups.remove(key)?;
        driver.timers_mut().cancel(lookup.timer);
        driver.fabric_mut().disown(lookup.cm);
        let now = driver.now();
        driver.provider_mut().destroy_id(lookup.cm, now);
        Some(lookup)
    }

    pub(super) fn cancel_lookups(&mut self, driver: &mut Driver, endpoint: Key) {
        for key in self.lookups.keys() {
            if self.lookups.get(key).is_some_and(|lookup| lookup.endpoint == endpoint) {
                self.end_lookup(driver, key, Err(ConnectError::Cancelled));
            }
        }
    }

    /// Answers a peer that asks for an endpoint at its address. Nothing is allocated for the answer.
    pub(super) fn answer(&mut self, driver: &mut Driver, key: Key, asked: CmId) {
        let now = driver.now();
        let Some(endpoint) = self.open_one(key) else { return driver.provider_mut().destroy_id(asked, now) };
        if let Err(error) = driver.provider_mut().answer_datagram(asked, endpoint.site.qp, &[], now) {
            log::info!("{}: answering a peer that asks for it: {error}", endpoint.id);
        }
    }
}
