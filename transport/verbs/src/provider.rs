//! The implementation of [`Provider`] for [`Verbs`].

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use super::NAME;
use super::address::{Address, RawAddressHandle};
use super::datagram;
use super::entry::IdState;
use super::exchange_socket::{DetachedStream, ExchangeStream, adopt};
use super::ffi::RawAddress;
use super::handover::DetachedId;
use super::id::{RawId, Service};
use super::mr::{DeviceRegistrar, DmaBuf, PreparedRegion, RegisteredRegion};
use super::parts::Verbs;
use super::path::PathState;
use super::queues::{STALE_QP, STALE_SRQ};
use crate::exchange::message::ExchangeRefusal;
use rdma_transport::caps::Features;
use rdma_transport::cm::{CmEvent, CmId, ConnectParam, Detached, ExchangeOptions, ListenParam, PathOptions};
use rdma_transport::cq::{CqAttr, Notify};
use rdma_transport::datagram::{AddressId, GRH_LEN, Route};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::event::AsyncEvent;
use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, MemoryRegion, MrId};
use rdma_transport::provider::{Channel, CqId, DeviceId, DeviceInfo, Drive, PostError, Posted, Provider};
use rdma_transport::qp::{QpAttr, QpId, SrqId};
use rdma_transport::registrar::{Registrar, Registration};
use rdma_transport::roles::{
    Adapter, Datagrams, DeviceEvents, Exchange, Extensions, ForeignMemory, Handover, ImmediateSends, Liveness,
    OffLoopRegistration, RemoteKeys, SharedMemory, SharedReceives,
};
use rdma_transport::srq::SrqAttr;
use rdma_transport::wc::WorkCompletion;
use rdma_transport::wr::{RecvWr, SendWr};

// SAFETY: the numbers are those of the contract of [`Provider`]. 1. to 3. By the contract of libibverbs (`ibv_post_send`(3),
// `ibv_poll_cq`(3), `ibv_modify_qp`(3)), a device uses the memory of a work request until its completion, completes work in order, and uses
// no memory for a queue pair that is destroyed or in the error state. `destroy_id` destroys the queue pair or puts it into the error state,
// or fails. An id may be kept for its last shared receive, for its port or for a thread: its queue pair is in the error state.
// `destroy_srq` returns an error while a queue pair could consume receives of the queue, and if the device does not release the queue. 4. A
// region in `mr` has an `Arc` of its memory. It drops the `Arc` after `ibv_dereg_mr` of each of its registrations has succeeded, or never.
// 5. The provider owns all objects, and destroys them when it is dropped. An object that a device does not release is kept together with
// everything on which it depends. 6. Handles are keys of slabs, which never return a key twice.
unsafe impl Provider for Verbs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> {
        self.hub.devices.get(device.0 as usize).filter(|device| !device.removed).map(|device| &device.info)
    }

    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId> {
        if self.hub.manager().is_err() {
            return self.exchanges.device_at_gid(&mut self.hub, address);
        }
        self.hub.device_at_address(address)
    }

    fn channel(&self, channel: Channel) -> Result<RawFd> {
        match channel {
            Channel::ConnectionManager => Ok(self.hub.event_set.poll.as_raw_fd()),
            Channel::Completions(device) => Ok(self.hub.live_device(device)?.live()?.completion_fd()),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let closing = self.closing.front().map(|closing| closing.0);
        let retiring = self.queues.retiring.front().map(|retiring| retiring.until);
        let exchanges = self.exchanges.deadlines.first().map(|due| due.0);
        closing.into_iter().chain(retiring).chain(exchanges).min()
    }

    fn progress(&mut self, now: Instant, _drive: Drive) -> bool {
        self.hub.now = Some(now);
        while let Some(&(_, key)) = self.closing.front().filter(|(until, _)| *until <= now) {
            self.closing.pop_front();
            if let Ok(id) = self.hub.id_mut(CmId(key)) {
                id.flush_closing();
            }
        }
        self.queues.retire_overdue(&mut self.hub, now);
        self.exchanges.exchanges_overdue(&mut self.hub, now);
        self.settle();
        false
    }

    fn listen(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        self.hub.listen_for(Service::Connected, address, options)
    }

    fn local_address(&self, id: CmId) -> Option<SocketAddr> {
        self.hub.id(id).ok()?.raw.local_address()
    }

    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        self.hub.resolve_from(peer, options, deadline)
    }

    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        let entry = self.hub.id(id)?;
        if entry.state != IdState::Resolved {
            return Err(TransportError::InvalidState { call: "connect", state: entry.state.name() });
        }
        if entry.qp.is_none() && entry.raw.service() == Service::Connected {
            return Err(TransportError::InvalidState { call: "connect", state: "without a queue pair" });
        }
        let offer = self.hub.offer(entry, param, None)?;
        if entry.raw.uses_exchange() {
            return self.exchanges.connect_by_exchange(&mut self.hub, id, &offer);
        }
        self.hub.connect_managed(id, offer)
    }

    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        self.hub.now = Some(now);
        let entry = self.hub.id(id)?;
        if entry.state != IdState::RequestReceived {
            return Err(TransportError::InvalidState { call: "accept", state: entry.state.name() });
        }
        if entry.qp.is_none() {
            return Err(TransportError::InvalidState { call: "accept", state: "without a queue pair" });
        }
        let offer = self.hub.offer(entry, param, Some(entry.read_depth))?;
        if entry.raw.uses_exchange() {
            let (device, port) = (entry.device, entry.raw.port());
            self.hub.check_port(device, port)?;
            return self.exchanges.accept_by_exchange(&mut self.hub, id, &offer, now);
        }
        self.hub.accept_managed(id, &offer)
    }

    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        self.hub.now = Some(now);
        let entry = self.hub.id(id)?;
        if entry.state != IdState::RequestReceived {
            return Err(TransportError::InvalidState { call: "reject", state: entry.state.name() });
        }
        if let Some(device) = entry.device {
            self.hub.devices[device.0 as usize].info.capabilities.check_private_data(NAME, private_data)?;
        }
        let (raw, device) = (Arc::clone(&entry.raw), entry.device);
        if raw.uses_exchange() {
            if let Some(stream) = self.hub.id_mut(id)?.stream_mut() {
                stream.conversation.refuse(ExchangeRefusal::Program, private_data);
            }
        } else if let Err(error) = self.hub.check_port(device, raw.port()).and_then(|()| raw.reject(private_data)) {
            // Only log the error: the peer may have disconnected before the rejection.
            log::debug!("{error}");
        }
        // Otherwise the queue pair would outlive the entries that `remove` releases.
        drop(raw);
        if let Err(error) = self.remove(id.0) {
            local_log!(Error, "{error}");
        }
        Ok(())
    }

    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        self.hub.now = Some(now);
        let entry = self.hub.id(id)?;
        if entry.raw.uses_exchange() {
            return self.exchanges.disconnect_exchange(&mut self.hub, id);
        }
        if let Some(until) = self.hub.disconnect_managed(id, now)? {
            self.closing.push_back((until, id.0));
        }
        Ok(())
    }

    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> {
        self.hub.now = Some(now);
        if self.hub.id(id).is_ok() { self.remove(id.0) } else { Ok(()) }
    }

    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        self.hub.now = Some(now);
        self.next_event(now)
    }

    fn register(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion> {
        let open = self.hub.live_device(device)?.check_access(access)?;
        let region = RegisteredRegion::register(open, device.0, memory, range, access)?;
        Ok(self.regions.add(region))
    }

    fn deregister(&mut self, region: MrId) -> Result<()> {
        self.regions.deregister(region)
    }

    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        self.queues.make_cq(&self.hub, device, attr)
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        self.queues.drop_cq(&mut self.hub, cq)
    }

    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        self.queues.make_qp(&mut self.hub, id, attr)
    }

    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        match self.hub.ids.get(qp.0).and_then(|id| id.qp.as_ref()) {
            Some(qp) => qp.post_recv(chain, &mut self.queues.chains),
            None => Err(PostError { posted: 0, error: STALE_QP }),
        }
    }

    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError> {
        match self.hub.ids.get(qp.0).and_then(|id| id.qp.as_ref()) {
            Some(qp) => qp.post_send(chain, &mut self.queues.chains, &self.addresses),
            None => Err(PostError { posted: 0, error: STALE_QP }),
        }
    }

    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        self.queues.poll(&mut self.hub, cq, max, out)
    }

    fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()> {
        self.queues.arm(&mut self.hub, cq, notify)
    }

    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        let entry = self.hub.devices.get_mut(device.0 as usize).ok_or(TransportError::Stale { object: "device" })?;
        match self.queues.next_event(entry) {
            Ok(event) => Ok(event),
            Err(error) => {
                if !entry.removed {
                    self.hub.channel_failed(device, &error.to_string());
                    self.settle();
                }
                Ok(None)
            }
        }
    }

    fn shared_receives(&mut self) -> Option<&mut dyn SharedReceives> {
        Some(self)
    }

    fn remote_keys(&mut self) -> Option<&mut dyn RemoteKeys> {
        Some(self)
    }

    fn liveness(&self) -> Option<&dyn Liveness> {
        None
    }

    fn extensions(&mut self) -> Option<&mut dyn Extensions> {
        None
    }

    fn handover(&mut self) -> Option<&mut dyn Handover> {
        Some(self)
    }

    fn off_loop_registration(&mut self) -> Option<&mut dyn OffLoopRegistration> {
        Some(self)
    }

    fn foreign_memory(&mut self) -> Option<&mut dyn ForeignMemory> {
        Some(self)
    }

    fn datagrams(&mut self) -> Option<&mut dyn Datagrams> {
        Some(self)
    }

    fn adapter(&self) -> Option<&dyn Adapter> {
        Some(self)
    }

    fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends> {
        None
    }

    fn shared_memory(&mut self) -> Option<&mut dyn SharedMemory> {
        None
    }

    fn exchange(&mut self) -> Option<&mut dyn Exchange> {
        if self.exchanges.entropy.is_some() { Some(self) } else { None }
    }

    fn device_events(&mut self) -> Option<&mut dyn DeviceEvents> {
        Some(self)
    }
}

impl Exchange for Verbs {
    fn listen_exchange(
        &mut self,
        address: SocketAddr,
        options: &ListenParam,
        exchange: &ExchangeOptions,
    ) -> Result<CmId> {
        self.exchanges.listen_by_exchange(&mut self.hub, address, options, exchange)
    }

    fn accept_stream(&mut self, listener: CmId, stream: OwnedFd, now: Instant) -> Result<()> {
        self.hub.now = Some(now);
        self.exchanges.accept_stream(&mut self.hub, listener, stream, now)
    }

    fn resolve_exchange(
        &mut self,
        peer: SocketAddr,
        options: &PathOptions,
        exchange: &ExchangeOptions,
        deadline: Instant,
    ) -> Result<CmId> {
        let stream = ExchangeStream::active(Some(peer), None);
        self.exchanges.resolve_by_exchange(&mut self.hub, stream, options, exchange, deadline)
    }

    fn resolve_exchange_over(
        &mut self,
        stream: OwnedFd,
        options: &PathOptions,
        exchange: &ExchangeOptions,
        deadline: Instant,
    ) -> Result<CmId> {
        let stream = ExchangeStream::active(None, Some(adopt(stream)?));
        self.exchanges.resolve_by_exchange(&mut self.hub, stream, options, exchange, deadline)
    }
}

impl SharedReceives for Verbs {
    fn create_srq(&mut self, device: DeviceId, attr: &SrqAttr) -> Result<SrqId> {
        self.queues.make_srq(&self.hub, device, attr)
    }

    fn destroy_srq(&mut self, srq: SrqId) -> Result<()> {
        self.queues.drop_srq(srq)
    }

    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        match self.queues.srqs.get_mut(srq.0) {
            Some(srq) => srq.post(chain, &mut self.queues.chains),
            None => Err(PostError { posted: 0, error: STALE_SRQ }),
        }
    }
}

impl RemoteKeys for Verbs {
    /// Returns `false`: a device has one protection domain for all connections, so a key cannot be restricted to one
    /// peer.
    fn restrict(&mut self, region: MrId, _: QpId) -> Result<bool> {
        self.regions.get_mut(region).map(|_| false)
    }

    fn invalidate(&mut self, region: MrId) -> Result<()> {
        self.regions.get_mut(region)?.invalidate()
    }
}

impl Handover for Verbs {
    fn detach(&mut self, id: CmId) -> Result<Detached> {
        let entry = self.hub.id(id)?;
        if entry.state != IdState::RequestReceived {
            return Err(TransportError::InvalidState { call: "detach", state: entry.state.name() });
        }
        if entry.qp.is_some() {
            return Err(TransportError::InvalidState { call: "detach", state: "with a queue pair" });
        }
        let detached = if entry.raw.uses_exchange() {
            self.exchanges.detach_stream(&mut self.hub, id).map(|stream| Detached::new(NAME, stream))
        } else {
            DetachedId::detach(&mut self.hub, id).map(|id| Detached::new(NAME, id))
        };
        self.settle();
        detached
    }

    fn attach(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)> {
        self.hub.now = Some(now);
        let request = match request.into_state::<DetachedStream>() {
            Ok(moving) => return self.exchanges.attach_stream(&mut self.hub, moving),
            Err(request) => request,
        };
        let request = request.into_state::<DetachedId>().map_err(|_| TransportError::Unsupported {
            provider: NAME,
            feature: "connect requests of other providers",
        })?;
        request.attach(&mut self.hub)
    }
}

impl OffLoopRegistration for Verbs {
    fn registrar(&self, device: DeviceId) -> Result<Box<dyn Registrar>> {
        Ok(Box::new(DeviceRegistrar::new(self.hub.live_device(device)?.live()?, device.0)))
    }

    fn adopt(&mut self, registration: Registration) -> Result<MemoryRegion> {
        let PreparedRegion { region, device, local_key, remote_key } = registration
            .into_state()
            .map_err(|_| TransportError::Unsupported { provider: NAME, feature: "registrations of other providers" })?;
        let ours = self.hub.live_device(DeviceId(region.device))?.live()?;
        if !Arc::ptr_eq(ours, &device) {
            return Err(TransportError::Stale { object: "device of a registration" });
        }
        Ok(self.regions.add((region, local_key, remote_key)))
    }
}

impl ForeignMemory for Verbs {
    fn register_dmabuf(
        &mut self,
        device: DeviceId,
        buffer: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        let open = self.hub.live_device(device)?.check_access(access)?;
        let region =
            RegisteredRegion::register_dmabuf(open, device.0, &DmaBuf { buffer, offset, len, address }, access)?;
        Ok(self.regions.add(region))
    }
}

impl Datagrams for Verbs {
    fn bind_datagram(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId, u32)> {
        self.hub.bind_datagrams(address)
    }

    fn answer_datagram(&mut self, id: CmId, qp: QpId, private_data: &[u8], now: Instant) -> Result<()> {
        self.hub.now = Some(now);
        let entry = self.hub.id(id)?;
        if entry.state != IdState::RequestReceived || entry.raw.service() != Service::Datagram {
            return Err(TransportError::InvalidState { call: "answer_datagram", state: entry.state.name() });
        }
        let (device, raw) = (entry.device, Arc::clone(&entry.raw));
        let number = self.hub.ids.get(qp.0).filter(|id| id.device == device).and_then(|id| id.qp.as_ref());
        let number =
            number.map(|qp| qp.number).ok_or(TransportError::Stale { object: "queue pair on the same device" });
        let answered = number.and_then(|number| {
            let param = ConnectParam { private_data, ..ConnectParam::default() };
            let offer = self.hub.offer(self.hub.id(id)?, &param, None)?;
            self.hub.check_port(device, raw.port())?;
            raw.accept_for(&offer, number)
        });
        if let Some(entry) = self.hub.ids.get_mut(id.0).filter(|_| answered.is_ok()) {
            entry.state = IdState::Established;
        }
        drop(raw);
        if let Err(error) = self.remove(id.0) {
            local_log!(Error, "{error}");
        }
        answered
    }

    fn listen_datagram(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        self.hub.listen_for(Service::Datagram, address, options)
    }

    fn resolve_datagram(&mut self, peer: SocketAddr, from: Option<SocketAddr>, deadline: Instant) -> Result<CmId> {
        let raw = RawId::create(self.hub.manager()?, Service::Datagram)?;
        if let Some(from) = from {
            raw.bind(&RawAddress::new(from))?;
        }
        self.hub.resolve_on(raw, peer, deadline)
    }

    fn join(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let info = self.hub.id(id)?.device.and_then(|device| self.hub.devices.get(device.0 as usize));
        let multicast = info.is_some_and(|device| device.info.capabilities.features.contains(Features::MULTICAST));
        self.hub.id_mut(id)?.join_group(group, multicast, &mut self.joins)
    }

    fn leave(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        self.hub.id_mut(id)?.leave_group(group)
    }

    fn qp_number(&self, qp: QpId) -> Result<u32> {
        self.hub.ids.get(qp.0).and_then(|id| id.qp.as_ref()).map(|qp| qp.number).ok_or(STALE_QP)
    }

    fn create_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId> {
        let raw = RawAddressHandle::create(self.hub.live_device(device)?.live()?, route)?;
        Ok(AddressId(self.addresses.insert(Address { raw: Some(raw), device: device.0 })))
    }

    fn destroy_address(&mut self, address: AddressId) -> Result<()> {
        self.addresses.remove(address.0).map(drop).ok_or(TransportError::Stale { object: "address" })
    }

    fn route_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
        datagram::route_to_sender(&self.hub.id(id)?.raw, received, header)
    }
}

impl Verbs {
    /// Returns the attributes that the device has stored for the path of a connection.
    ///
    /// # Errors
    /// [`TransportError::Stale`] if the queue pair is destroyed, [`TransportError::Io`] if
    /// `ibv_query_qp`(3) fails.
    pub fn path_of(&self, qp: QpId) -> Result<PathState> {
        PathState::of(&self.hub.ids.get(qp.0).ok_or(STALE_QP)?.raw)?.ok_or(STALE_QP)
    }
}

impl Adapter for Verbs {
    fn has_failed(&self, cq: CqId) -> bool {
        self.queues.cqs.get(cq.0).is_some_and(|cq| cq.failed)
    }

    fn acknowledgements(&self) -> u64 {
        self.queues.acknowledgements
    }
}

impl DeviceEvents for Verbs {
    fn next_device_event(&mut self) -> Option<AsyncEvent> {
        self.hub.device_events.pop_front()
    }
}
