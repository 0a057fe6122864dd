//! The roles of the embedded provider outside of the data path: datagrams, liveness, extensions,
//! and shared memory.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::NAME;
use super::datagrams;
use super::endpoint::{CmEndpoint, Work, WorkMut};
use super::hub::{DEVICE, STALE_QP};
use super::net::Net;
use super::provider::{Iwarp, is_device};
use rdma_transport::cm::{CmEventKind, CmId, ListenParam};
use rdma_transport::datagram::{AddressId, GRH_LEN, Route};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::mr::{Access, MrId};
use rdma_transport::provider::DeviceId;
use rdma_transport::qp::QpId;
use rdma_transport::roles::{Datagrams, Extensions, Liveness, SharedMemory};
use rdma_transport::wc::WorkCompletion;

impl<N: Net> Datagrams for Iwarp<N> {
    fn bind_datagram(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId, u32)> {
        let (key, max) = self.datagrams.bind(&mut self.hub, address)?;
        Ok((self.endpoints.add_datagrams(&mut self.datagrams, key), DEVICE, max))
    }

    fn answer_datagram(&mut self, id: CmId, qp: QpId, private_data: &[u8], _: Instant) -> Result<()> {
        let query_key = self.endpoints.datagrams_of(id)?;
        let owner = self.endpoints.datagrams_of(CmId(qp.0));
        let answered = owner.and_then(|owner| {
            self.datagrams.reply_to_query(&mut self.hub, query_key, owner, "answer_datagram", private_data)
        });
        self.endpoints.remove_datagrams(&mut self.datagrams, &mut self.hub, id);
        answered
    }

    fn listen_datagram(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        let key = self.datagrams.listen(&mut self.hub, address, options)?;
        Ok(self.endpoints.add_datagrams(&mut self.datagrams, key))
    }

    fn resolve_datagram(&mut self, peer: SocketAddr, from: Option<SocketAddr>, deadline: Instant) -> Result<CmId> {
        let key = self.datagrams.resolve(&mut self.hub, peer, from, deadline)?;
        let id = self.endpoints.add_datagrams(&mut self.datagrams, key);
        self.hub.raise(id.0, CmEventKind::Resolved { device: DEVICE });
        Ok(id)
    }

    fn join(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let key = self.endpoints.datagrams_of(id)?;
        self.datagrams.join(&mut self.hub, key, group)
    }

    fn leave(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let key = self.endpoints.datagrams_of(id)?;
        self.datagrams.leave(&mut self.hub, key, group)
    }

    fn qp_number(&self, qp: QpId) -> Result<u32> {
        self.datagrams.qp_number(self.endpoints.datagrams_of(CmId(qp.0)).map_err(|_| STALE_QP)?)
    }

    fn create_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId> {
        is_device(device)?;
        self.datagrams.create_address(&self.hub.config.roce, route)
    }

    fn destroy_address(&mut self, address: AddressId) -> Result<()> {
        self.datagrams.destroy_address(address)
    }

    fn route_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
        self.endpoints.datagrams_of(id)?;
        datagrams::route_back(received, header)
    }
}

impl<N: Net> Liveness for Iwarp<N> {
    fn last_heard(&self, qp: QpId) -> Option<Instant> {
        match self.endpoints.get(qp.0)? {
            CmEndpoint::Stream(flow) => Some(flow.last_heard),
            CmEndpoint::Ring(flow) => Some(flow.last_heard),
            _ => None,
        }
    }

    fn has_unread(&self, qp: QpId) -> bool {
        match self.endpoints.get(qp.0) {
            Some(CmEndpoint::Stream(flow)) => flow.readable,
            Some(CmEndpoint::Ring(flow)) => flow.readable || flow.link.has_news(),
            _ => false,
        }
    }
}

impl<N: Net> Extensions for Iwarp<N> {
    fn enable_extensions(&mut self, qp: QpId) -> Result<()> {
        if !self.hub.config.extensions {
            return Err(TransportError::Unsupported {
                provider: NAME,
                feature: "extensions: see IwarpConfig::extensions",
            });
        }
        match self.endpoints.get_mut(qp.0).and_then(CmEndpoint::work) {
            Some(WorkMut::Stream(qp)) => qp.extensions = true,
            Some(WorkMut::Ring(link)) => link.extensions = true,
            None => return Err(STALE_QP),
        }
        Ok(())
    }
}

impl<N: Net> SharedMemory for Iwarp<N> {
    fn is_shared(&self, qp: QpId) -> bool {
        matches!(self.endpoints.get(qp.0), Some(CmEndpoint::Ring(_) | CmEndpoint::Dead(Some(Work::Ring(..)))))
    }

    fn lend(&mut self, qp: QpId, region: MrId, file: Option<OwnedFd>) -> Result<bool> {
        let Self { hub, endpoints, .. } = self;
        let (key, memory, access) = hub.resources.keys.memory(region)?;
        let Some(CmEndpoint::Ring(flow)) = endpoints.get_mut(qp.0) else { return Ok(false) };
        let lent = hub.resources.keys.lent_to(region).is_none()
            && flow.link.lend((memory, file), key, access & Access::REMOTE_READ);
        if lent {
            hub.resources.keys.lend(region, qp.0)?;
        }
        if flow.pump(hub) {
            self.rings.heat(endpoints, hub, qp.0);
        }
        Ok(lent)
    }
}
