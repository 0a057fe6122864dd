//! The roles of the embedded provider that do not belong to the path of a message.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::datagrams;
use super::endpoint::{CmEndpoint, EndpointState};
use super::net::Net;
use super::provider::{DEVICE, Iwarp, STALE_ID, STALE_QP};
use crate::cm::{CmEventKind, CmId, ListenParam};
use crate::datagram::{AddressId, GRH_LEN, Route};
use crate::error::{Result, TransportError};
use crate::provider::DeviceId;
use crate::qp::QpId;
use crate::roles::Datagrams;
use crate::slab::Key;
use crate::wc::WorkCompletion;

impl<N: Net> Iwarp<N> {
    /// Creates the connection-manager id of an id for datagrams.
    fn add_datagrams(&mut self, key: Key) -> CmId {
        let id = CmId(self.endpoints.insert(CmEndpoint::new(EndpointState::Datagram(key), None)));
        self.datagrams.name(key, id);
        id
    }

    /// Creates a connection-manager id for each query that was received, and notifies the program.
    pub(super) fn take_queries(&mut self) {
        while let Some(query) = self.datagrams.next_query() {
            let id = self.add_datagrams(query.key);
            self.hub.raise(id.0, query.event);
        }
    }

    pub(super) fn datagrams_of(&self, id: CmId) -> Result<Key> {
        match self.endpoints.get(id.0) {
            Some(&CmEndpoint { state: EndpointState::Datagram(key), .. }) => Ok(key),
            Some(endpoint) => {
                Err(TransportError::InvalidState { call: "a call for datagrams", state: endpoint.state.name() })
            }
            None => Err(STALE_ID),
        }
    }
}

impl<N: Net> Datagrams for Iwarp<N> {
    fn bind_datagram(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId, u32)> {
        let (key, max) = self.datagrams.bind(&mut self.hub, address)?;
        Ok((self.add_datagrams(key), DEVICE, max))
    }

    fn answer_datagram(&mut self, id: CmId, qp: QpId, private_data: &[u8], _: Instant) -> Result<()> {
        let asked = self.datagrams_of(id)?;
        let owner = self.datagrams_of(CmId(qp.0));
        let answered = owner.and_then(|owner| {
            self.datagrams.reply_to_query(&mut self.hub, asked, owner, "answer_datagram", private_data)
        });
        self.remove(id.0);
        answered
    }

    fn listen_datagram(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        let key = self.datagrams.listen(&mut self.hub, address, options)?;
        Ok(self.add_datagrams(key))
    }

    fn resolve_datagram(&mut self, peer: SocketAddr, from: Option<SocketAddr>, deadline: Instant) -> Result<CmId> {
        let key = self.datagrams.resolve(&mut self.hub, peer, from, deadline)?;
        let id = self.add_datagrams(key);
        self.hub.raise(id.0, CmEventKind::Resolved { device: DEVICE });
        Ok(id)
    }

    fn join(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let key = self.datagrams_of(id)?;
        self.datagrams.join(&mut self.hub, key, group)
    }

    fn leave(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let key = self.datagrams_of(id)?;
        self.datagrams.leave(&mut self.hub, key, group)
    }

    fn qp_number(&self, qp: QpId) -> Result<u32> {
        self.datagrams.qp_number(self.datagrams_of(CmId(qp.0)).map_err(|_| STALE_QP)?)
    }

    fn create_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId> {
        Self::is_device(device)?;
        self.datagrams.create_address(&self.hub.config.roce, route)
    }

    fn destroy_address(&mut self, address: AddressId) -> Result<()> {
        self.datagrams.destroy_address(address)
    }

    fn route_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
        self.datagrams_of(id)?;
        datagrams::route_back(received, header)
    }
}
