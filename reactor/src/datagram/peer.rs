//! Ways to send: peers, and how they are found.

use std::net::SocketAddr;

use rdma_transport::cm::{CmEventKind, CmId, ConnectFailure, ConnectParam};
use rdma_transport::datagram::{AddressId, DatagramPeer, Destination, QUEUE_KEY};
use rdma_transport::slab::Key;

use super::{EndpointId, Origin, PeerId};
use crate::context::Context;
use crate::core::{Core, Owner, TimerKind};
use crate::error::{ConnectError, DisconnectReason, Error};
use crate::frame::RejectReason;
use crate::handler::Handler;

/// Somewhere an endpoint sends to.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(super) endpoint: EndpointId,
    pub(super) destination: Destination,
}

/// A question where datagrams are taken.
#[derive(Debug)]
pub(crate) struct Lookup {
    endpoint: EndpointId,
    cm: CmId,
    address: SocketAddr,
    timer: Key,
}

impl Core {
    /// Notes a way to send; the address handle is the endpoint's from now on.
    pub(super) fn add_peer(&mut self, id: EndpointId, peer: &DatagramPeer) -> Result<PeerId, Error> {
        let endpoint = self.endpoints.open(id).ok_or(Error::Gone("endpoint"))?;
        let device = self.devices.get(endpoint.device).and_then(Option::as_ref).ok_or(Error::Gone("device"))?;
        let address = self.provider.create_address(device.id, &peer.route)?;
        let destination = Destination { address, qp_number: peer.qp_number, queue_key: peer.queue_key };
        Ok(PeerId(self.endpoints.peers.insert(Peer { endpoint: id, destination })))
    }

    pub(super) fn peer_of(&mut self, id: EndpointId, origin: &Origin) -> Result<PeerId, Error> {
        let endpoint = self.endpoints.open(id).ok_or(Error::Gone("endpoint"))?;
        let route = self.provider.route_back(endpoint.cm, &origin.completion, &origin.header)?;
        self.add_peer(id, &DatagramPeer { route, qp_number: origin.qp_number(), queue_key: QUEUE_KEY })
    }

    /// What was taken for it is still sent.
    pub(super) fn forget_peer(&mut self, peer: PeerId) {
        let Some(peer) = self.endpoints.peers.remove(peer.0) else { return };
        let (id, address) = (peer.endpoint, peer.destination.address);
        match self.endpoints.all.get_mut(id.0) {
            Some(endpoint) => {
                endpoint.forgotten.push_back((endpoint.taken, address));
                self.drop_unused_addresses(id);
            }
            None => self.destroy_address(address),
        }
    }

    pub(super) fn forget_peers_of(&mut self, id: EndpointId) {
        for key in self.endpoints.peers.keys() {
            if self.endpoints.peers.get(key).is_some_and(|peer| peer.endpoint == id) {
                self.forget_peer(PeerId(key));
            }
        }
    }

    /// Destroys the addresses of peers that were forgotten, once nothing is on its way there: a device may look at an
    /// address until then.
    pub(super) fn drop_unused_addresses(&mut self, id: EndpointId) {
        while let Some(address) = self.endpoints.all.get_mut(id.0).and_then(super::endpoint::Endpoint::next_unused) {
            self.destroy_address(address);
        }
    }

    pub(super) fn destroy_address(&mut self, address: AddressId) {
        if let Err(error) = self.provider.destroy_address(address) {
            log::debug!("destroying an address: {error}");
        }
    }

    // Finding.

    pub(super) fn find_peer(&mut self, id: EndpointId, address: SocketAddr) -> Result<(), Error> {
        let endpoint = self.endpoints.open(id).ok_or(Error::Gone("endpoint"))?;
        let from = SocketAddr::new(endpoint.address.ip(), 0);
        let deadline = self.now + self.config.connect_timeout;
        let cm = self.provider.resolve_datagram(address, Some(from), deadline)?;
        let timers = &mut self.timers;
        let key = self.endpoints.lookups.insert(Lookup { endpoint: id, cm, address, timer: Key::new(0, 0) });
        if let Some(lookup) = self.endpoints.lookups.get_mut(key) {
            lookup.timer = timers.insert(deadline, TimerKind::Lookup(key));
        }
        self.own(cm, Owner::Lookup(key));
        Ok(())
    }

    /// What the connection manager has to say about a question.
    pub(crate) fn lookup_event<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, key: Key, kind: CmEventKind) {
        let Some(&Lookup { endpoint, cm, .. }) = self.endpoints.lookups.get(key) else { return };
        let ended = match kind {
            CmEventKind::Resolved { device } => {
                let ours = self.endpoints.all.get(endpoint.0).is_some_and(|of| of.device == device.0 as usize);
                let asked = if ours {
                    self.provider.connect(cm, &ConnectParam::default()).map_err(|error| error.to_string())
                } else {
                    Err("another device leads there than the endpoint's".into())
                };
                match asked {
                    Ok(()) => return,
                    Err(why) => Err(ConnectError::Local(why)),
                }
            }
            CmEventKind::Reached { peer, .. } => {
                self.add_peer(endpoint, &peer).map_err(|error| ConnectError::Local(error.to_string()))
            }
            CmEventKind::Rejected { private_data } => {
                let reason = RejectReason::Refused;
                Err(ConnectError::Rejected { reason, private_data: private_data.into_vec() })
            }
            CmEventKind::ConnectFailed(ConnectFailure::Timeout) => Err(ConnectError::Timeout),
            CmEventKind::ConnectFailed(failure) => Err(ConnectError::Transport(failure)),
            CmEventKind::DeviceRemoval => Err(ConnectError::Local(DisconnectReason::DeviceRemoved.to_string())),
            other => {
                log::debug!("{endpoint}: {other:?} ignored");
                return;
            }
        };
        self.end_lookup(handler, key, ended);
    }

    pub(crate) fn end_lookup<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        key: Key,
        found: Result<PeerId, ConnectError>,
    ) {
        if let Some(Lookup { endpoint, address, .. }) = self.drop_lookup(key) {
            handler.on_peer(&mut Context { core: self }, endpoint, address, found);
        }
    }

    pub(super) fn drop_lookup(&mut self, key: Key) -> Option<Lookup> {
        let lookup = self.endpoints.lookups.remove(key)?;
        self.timers.cancel(lookup.timer);
        self.disown(lookup.cm);
        self.provider.destroy_id(lookup.cm, self.now);
        Some(lookup)
    }

    pub(super) fn cancel_lookups<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: EndpointId) {
        for key in self.endpoints.lookups.keys() {
            if self.endpoints.lookups.get(key).is_some_and(|lookup| lookup.endpoint == id) {
                self.end_lookup(handler, key, Err(ConnectError::Cancelled));
            }
        }
    }

    /// Somebody asks for an endpoint at its address. Nothing is allocated for it.
    pub(crate) fn answer_for_endpoint(&mut self, id: EndpointId, asked: CmId) {
        let answered = match self.endpoints.open(id) {
            Some(endpoint) => self.provider.answer_datagram(asked, endpoint.qp, &[], self.now),
            None => {
                self.provider.destroy_id(asked, self.now);
                return;
            }
        };
        if let Err(error) = answered {
            log::info!("{id}: answering who asks for it: {error}");
        }
    }
}
