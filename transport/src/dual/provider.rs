//! [`Provider`] for [`Dual`]: each call goes to the provider that its id names.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use super::Dual;
use super::ids::{Outer, Side, inner_device};
use crate::caps::Moderation;
use crate::cm::{CmEvent, CmId, ConnectParam, Detached, ListenOptions, PathOptions};
use crate::datagram::{AddressId, GRH_LEN, Route};
use crate::error::{Error, Result};
use crate::event::DeviceEvent;
use crate::handle::{MrId, QpId, SrqId};
use crate::mem::Memory;
use crate::mr::{Access, MemoryRegion};
use crate::place::Place;
use crate::provider::{CqId, DeviceId, DeviceInfo, Drive, PathState, PostError, Provider};
use crate::qp::QpAttr;
use crate::registrar::{Registrar, Registration};
use crate::wc::WorkCompletion;
use crate::wr::{RecvWr, SendWr};

/// Calls a method of the provider that an id names. The two calls are direct, so that the data path has one branch more than on
/// the provider alone.
macro_rules! direct {
    ($self:ident.$call:ident($id:ident $(, $argument:expr)*)) => {{
        match $id.inner() {
            (Side::Devices, id) => $self.devices.$call(id $(, $argument)*),
            (Side::Embedded, id) => $self.embedded.$call(id $(, $argument)*),
        }
    }};
}

/// The name of an object at the provider of another one that it is used with.
fn at_same<T: Outer>(side: Side, id: T, object: &'static str) -> Result<T> {
    let (of, id) = id.inner();
    if of == side { Ok(id) } else { Err(Error::Stale { object }) }
}

fn inner_attr(side: Side, attr: &QpAttr) -> Result<QpAttr> {
    let object = "completion queue of the connection's provider";
    let (send_cq, recv_cq) = (at_same(side, attr.send_cq, object)?, at_same(side, attr.recv_cq, object)?);
    Ok(QpAttr { send_cq, recv_cq, ..*attr })
}

fn outer_region(side: Side, region: MemoryRegion) -> MemoryRegion {
    MemoryRegion { id: region.id.outer(side), ..region }
}

// SAFETY: each promise is kept by the provider that a call goes to, and every object is used with the provider that made it: the
// lowest bit of an id says which one that is, and `poll_cq` puts it into the ids of completions. 5. Two objects of different
// providers differ in that bit, and those of the same provider in the rest, which is the provider's own handle; the bit that the
// shift drops is never set, since no slab has 2^31 slots.
unsafe impl<E: Provider> Provider for Dual<E> {
    /// Name of the provider that was used so far; of both, if both were or none.
    fn name(&self) -> &'static str {
        match self.used {
            [true, false] => self.devices.name(),
            [false, true] => self.embedded.name(),
            _ => "verbs+iwarp",
        }
    }

    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> {
        let (side, device) = inner_device(device);
        self.look_at(side).device(device)
    }

    fn cm_channel(&self) -> RawFd {
        self.channel.as_raw_fd()
    }

    fn completion_channel(&self, device: DeviceId) -> Result<RawFd> {
        let (side, device) = inner_device(device);
        self.look_at(side).completion_channel(device)
    }

    fn next_deadline(&self) -> Option<Instant> {
        let of_both = [self.devices.next_deadline(), self.embedded.next_deadline(), self.attempts.next()];
        of_both.into_iter().flatten().min()
    }

    fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        self.attempts.at(now);
        if self.attempts.is_overdue(now) {
            self.devices.ring();
        }
        let more = self.devices.progress(now, drive);
        self.embedded.progress(now, drive) || more
    }

    fn listen(&mut self, address: SocketAddr, backlog: u32) -> Result<CmId> {
        self.listen_on(address, backlog, &ListenOptions::default())
    }

    fn listen_with(&mut self, address: SocketAddr, backlog: u32, options: &ListenOptions) -> Result<CmId> {
        self.listen_on(address, backlog, options)
    }

    fn listen_at(&mut self, place: Place, backlog: u32, options: &ListenOptions) -> Result<CmId> {
        match place {
            Place::Ip(address) => self.listen_on(address, backlog, options),
            Place::Ib(_) => {
                self.note_use(Side::Devices);
                Ok(self.devices.listen_at(place, backlog, options)?.outer(Side::Devices))
            }
        }
    }

    fn local_address(&self, id: CmId) -> Option<SocketAddr> {
        let (side, id) = id.inner();
        self.look_at(side).local_address(id)
    }

    fn resolve(&mut self, peer: SocketAddr, deadline: Instant) -> Result<CmId> {
        self.resolve_on(peer, &PathOptions::default(), deadline)
    }

    fn resolve_with(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        self.resolve_on(peer, options, deadline)
    }

    fn resolve_to(&mut self, place: Place, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        match place {
            Place::Ip(peer) => self.resolve_on(peer, options, deadline),
            Place::Ib(_) => {
                self.note_use(Side::Devices);
                Ok(self.devices.resolve_to(place, options, deadline)?.outer(Side::Devices))
            }
        }
    }

    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        let (side, id) = id.inner();
        self.at(side).connect(id, param)
    }

    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        let (side, id) = id.inner();
        self.at(side).accept(id, param, now)
    }

    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        let (side, id) = id.inner();
        self.at(side).reject(id, private_data, now)
    }

    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        let (side, id) = id.inner();
        self.at(side).disconnect(id, now)
    }

    fn destroy_id(&mut self, id: CmId, now: Instant) {
        let (side, id) = id.inner();
        if side == Side::Devices {
            self.attempts.end(id);
            self.end_listener(id, now);
        }
        self.at(side).destroy_id(id, now);
    }

    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        self.attempts.at(now);
        if let Some(event) = self.give_up_one(now) {
            return Ok(Some(self.translate(Side::Devices, event)));
        }
        let first = self.first;
        self.first = first.other();
        match self.event_of(first, now)? {
            None => self.event_of(first.other(), now),
            event => Ok(event),
        }
    }

    fn next_device_event(&mut self) -> Option<DeviceEvent> {
        match self.devices.next_device_event() {
            Some(event) => Some(Side::Devices.outer_event(event)),
            None => self.embedded.next_device_event().map(|event| Side::Embedded.outer_event(event)),
        }
    }

    fn register(&mut self, device: DeviceId, memory: &Arc<Memory>, access: Access) -> Result<MemoryRegion> {
        let (side, device) = inner_device(device);
        Ok(outer_region(side, self.at(side).register(device, memory, access)?))
    }

    fn deregister(&mut self, region: MrId) -> Result<()> {
        let (side, region) = region.inner();
        self.at(side).deregister(region)
    }

    fn create_cq(&mut self, device: DeviceId, entries: u32) -> Result<CqId> {
        let (side, device) = inner_device(device);
        Ok(self.at(side).create_cq(device, entries)?.outer(side))
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        let (side, cq) = cq.inner();
        self.at(side).destroy_cq(cq)
    }

    fn has_failed(&self, cq: CqId) -> bool {
        let (side, cq) = cq.inner();
        self.look_at(side).has_failed(cq)
    }

    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        let (side, id) = id.inner();
        Ok(self.at(side).create_qp(id, &inner_attr(side, attr)?)?.outer(side))
    }

    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        direct!(self.post_recv(qp, chain))
    }

    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<(), PostError> {
        direct!(self.post_send(qp, chain))
    }

    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let start = out.len();
        let (side, cq) = cq.inner();
        let count = match side {
            Side::Devices => self.devices.poll_cq(cq, max, out)?,
            Side::Embedded => self.embedded.poll_cq(cq, max, out)?,
        };
        for completion in &mut out[start..] {
            completion.qp = completion.qp.outer(side);
        }
        Ok(count)
    }

    fn req_notify(&mut self, cq: CqId) -> Result<()> {
        direct!(self.req_notify(cq))
    }

    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        let (side, device) = inner_device(device);
        let event = match side {
            Side::Devices => self.devices.next_completion_event(device)?,
            Side::Embedded => self.embedded.next_completion_event(device)?,
        };
        Ok(event.map(|cq| cq.outer(side)))
    }

    fn acknowledgements(&self) -> u64 {
        self.devices.acknowledgements() + self.embedded.acknowledgements()
    }

    fn create_cq_on(&mut self, device: DeviceId, entries: u32, vector: u32) -> Result<CqId> {
        let (side, device) = inner_device(device);
        Ok(self.at(side).create_cq_on(device, entries, vector)?.outer(side))
    }

    fn register_dmabuf(
        &mut self,
        device: DeviceId,
        buffer: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        let (side, device) = inner_device(device);
        let region = self.at(side).register_dmabuf(device, buffer, offset, len, address, access)?;
        Ok(outer_region(side, region))
    }

    fn registrar(&self, device: DeviceId) -> Result<Box<dyn Registrar>> {
        let (side, device) = inner_device(device);
        self.look_at(side).registrar(device)
    }

    fn adopt(&mut self, registration: Registration) -> Result<MemoryRegion> {
        // The embedded provider has no registrar.
        Ok(outer_region(Side::Devices, self.devices.adopt(registration)?))
    }

    fn path_of(&self, qp: QpId) -> Result<PathState> {
        let (side, qp) = qp.inner();
        self.look_at(side).path_of(qp)
    }

    fn detach(&mut self, id: CmId) -> Result<Detached> {
        let (side, id) = id.inner();
        self.at(side).detach(id)
    }

    fn attach(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)> {
        let side = if request.provider() == self.embedded.name() { Side::Embedded } else { Side::Devices };
        let (id, device) = self.at(side).attach(request, now)?;
        self.note_use(side);
        Ok((id.outer(side), side.outer_device(device)))
    }

    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId> {
        let (side, _) = self.serving(SocketAddr::new(address, 0));
        let device = self.at(side).device_at(address)?;
        self.note_use(side);
        Ok(side.outer_device(device))
    }

    fn register_range(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion> {
        let (side, device) = inner_device(device);
        Ok(outer_region(side, self.at(side).register_range(device, memory, range, access)?))
    }

    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<()> {
        let (side, region) = region.inner();
        let qp = at_same(side, qp, "queue pair of the region's provider")?;
        self.at(side).restrict(region, qp)
    }

    fn invalidate(&mut self, region: MrId) -> Result<()> {
        let (side, region) = region.inner();
        self.at(side).invalidate(region)
    }

    fn moderate_cq(&mut self, cq: CqId, to: Moderation) -> Result<()> {
        let (side, cq) = cq.inner();
        self.at(side).moderate_cq(cq, to)
    }

    fn create_srq(&mut self, device: DeviceId, max_wr: u32) -> Result<SrqId> {
        let (side, device) = inner_device(device);
        Ok(self.at(side).create_srq(device, max_wr)?.outer(side))
    }

    fn create_srq_of(&mut self, device: DeviceId, max_wr: u32, max_sge: u32) -> Result<SrqId> {
        let (side, device) = inner_device(device);
        Ok(self.at(side).create_srq_of(device, max_wr, max_sge)?.outer(side))
    }

    fn destroy_srq(&mut self, srq: SrqId) -> Result<()> {
        let (side, srq) = srq.inner();
        self.at(side).destroy_srq(srq)
    }

    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        direct!(self.post_srq_recv(srq, chain))
    }

    fn create_qp_with_srq(&mut self, id: CmId, attr: &QpAttr, srq: SrqId) -> Result<QpId> {
        let (side, id) = id.inner();
        let srq = at_same(side, srq, "shared receive queue of the connection's provider")?;
        Ok(self.at(side).create_qp_with_srq(id, &inner_attr(side, attr)?, srq)?.outer(side))
    }

    fn arm_srq(&mut self, srq: SrqId, limit: u32) -> Result<()> {
        let (side, srq) = srq.inner();
        self.at(side).arm_srq(srq, limit)
    }

    fn bind_datagram(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId)> {
        let (side, _) = self.serving(address);
        let (id, device) = self.at(side).bind_datagram(address)?;
        self.note_use(side);
        Ok((id.outer(side), side.outer_device(device)))
    }

    fn answer_datagram(&mut self, id: CmId, qp: QpId, private_data: &[u8], now: Instant) -> Result<()> {
        let (side, id) = id.inner();
        let qp = at_same(side, qp, "queue pair of the request's provider")?;
        self.at(side).answer_datagram(id, qp, private_data, now)
    }

    fn listen_datagram(&mut self, address: SocketAddr, backlog: u32) -> Result<CmId> {
        let (side, _) = self.serving(address);
        Ok(self.at(side).listen_datagram(address, backlog)?.outer(side))
    }

    fn resolve_datagram(&mut self, peer: SocketAddr, from: Option<SocketAddr>, deadline: Instant) -> Result<CmId> {
        Ok(self.devices.resolve_datagram(peer, from, deadline)?.outer(Side::Devices))
    }

    fn join(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let (side, id) = id.inner();
        self.at(side).join(id, group)
    }

    fn leave(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let (side, id) = id.inner();
        self.at(side).leave(id, group)
    }

    fn qp_number(&self, qp: QpId) -> Result<u32> {
        let (side, qp) = qp.inner();
        self.look_at(side).qp_number(qp)
    }

    fn create_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId> {
        let (side, device) = inner_device(device);
        self.at(side).create_address(device, route)
    }

    fn destroy_address(&mut self, address: AddressId) -> Result<()> {
        self.devices.destroy_address(address)
    }

    fn route_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
        let (side, id) = id.inner();
        self.look_at(side).route_back(id, received, header)
    }

    fn last_heard(&self, qp: QpId) -> Option<Instant> {
        let (side, qp) = qp.inner();
        self.look_at(side).last_heard(qp)
    }

    fn has_unread(&self, qp: QpId) -> bool {
        let (side, qp) = qp.inner();
        self.look_at(side).has_unread(qp)
    }

    fn enable_extensions(&mut self, qp: QpId) -> Result<()> {
        let (side, qp) = qp.inner();
        self.at(side).enable_extensions(qp)
    }
}
