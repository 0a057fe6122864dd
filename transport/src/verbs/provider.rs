//! [`Verbs`]: RDMA devices behind the [`Provider`] seam.

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};

use super::NAME;
use super::channel::EventChannel;
use super::connector::Connector;
use super::cq::{self, Batch, Cq};
use super::datagram::Address;
use super::device::Device;
use super::id::{Id, RawId, Service, State, Terms};
use super::mr::Region;
use super::qp::Chains;
use super::srq::Srq;
use super::status::{connect_failure, is_unreachable};
use crate::caps::{Features, Moderation};
use crate::cm::{CmEvent, CmEventKind, CmId, ConnectFailure, ConnectParam, Detached, ReadDepth};
use crate::datagram::{AddressId, GRH_LEN, Route};
use crate::error::{Error, Result};
use crate::event::DeviceEvent;
use crate::mem::Memory;
use crate::mr::{Access, MemoryRegion, MrId};
use crate::provider::{CqId, DeviceId, DeviceInfo, Drive, PostError, Provider};
use crate::qp::{QpAttr, QpId, SrqId};
use crate::slab::{Key, Slab};
use crate::wc::WorkCompletion;
use crate::wr::{RecvWr, SendWr};

pub(super) const STALE_ID: Error = Error::Stale { object: "connection id" };
const STALE_QP: Error = Error::Stale { object: "queue pair" };
pub(super) const STALE_CQ: Error = Error::Stale { object: "completion queue" };
pub(super) const STALE_SRQ: Error = Error::Stale { object: "shared receive queue" };

/// What every machine can connect to, and no device can.
pub(super) const NO_LOOPBACK: &str = "the loopback is on no RDMA device";

/// Tokens of the inner epoll set: the event channel, the waker, asynchronous events by device.
pub(super) const CM: Token = Token(0);
const WAKE: Token = Token(1);
pub(super) const ASYNC: usize = 2;

/// RDMA Reads outstanding that every iWARP device takes.
const USUAL_DEPTH: u16 = 16;

/// Time to resolve while nobody has said what time it is.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// RDMA devices, through librdmacm and libibverbs. [`Verbs::open`] makes one.
///
/// Its connection-manager channel is an epoll set over the event channel of librdmacm, the asynchronous events of the
/// devices in use, and what the private threads for iWARP report.
pub struct Verbs {
    pub(super) channel: Arc<EventChannel>,
    pub(super) poll: Poll,
    pub(super) ready: Events,
    /// The event channel may have events.
    pub(super) channel_ready: bool,
    /// Devices that may have asynchronous events.
    pub(super) async_ready: Vec<u32>,
    pub(super) connector: Connector,
    pub(super) ids: Slab<Id>,
    pub(super) cqs: Slab<Cq>,
    pub(super) srqs: Slab<Srq>,
    pub(super) regions: Slab<Region>,
    pub(super) addresses: Slab<Address>,
    /// Joins of multicast groups so far.
    pub(super) joins: usize,
    pub(super) batch: Batch,
    pub(super) devices: Vec<Device>,
    /// To be handed out.
    pub(super) events: VecDeque<CmEvent>,
    pub(super) device_events: VecDeque<DeviceEvent>,
    chains: Chains,
    acknowledgements: u64,
    /// The latest time anybody told.
    now: Option<Instant>,
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verbs")
            .field("devices", &self.devices)
            .field("ids", &self.ids.len())
            .field("cqs", &self.cqs.len())
            .field("regions", &self.regions.len())
            .finish_non_exhaustive()
    }
}

/// What is left until `deadline`, as the connection manager takes it.
pub(super) fn milliseconds_to(deadline: Option<Instant>, now: Option<Instant>) -> i32 {
    let left = match (deadline, now) {
        (Some(deadline), Some(now)) => deadline.saturating_duration_since(now),
        _ => RESOLVE_TIMEOUT,
    };
    i32::try_from(left.as_millis()).unwrap_or(i32::MAX).max(1)
}

impl Verbs {
    pub(super) fn on_channel(channel: Arc<EventChannel>) -> Result<Self> {
        let io = |source| Error::io("opening the connection-manager channel", source);
        let poll = Poll::new().map_err(io)?;
        poll.registry().register(&mut SourceFd(&channel.fd()), CM, Interest::READABLE).map_err(io)?;
        let waker = Waker::new(poll.registry(), WAKE).map_err(io)?;
        Ok(Self {
            channel,
            poll,
            ready: Events::with_capacity(16),
            channel_ready: true,
            async_ready: Vec::new(),
            connector: Connector::new(waker),
            ids: Slab::default(),
            cqs: Slab::default(),
            srqs: Slab::default(),
            regions: Slab::default(),
            addresses: Slab::default(),
            joins: 0,
            batch: Batch::default(),
            devices: Vec::new(),
            events: VecDeque::new(),
            device_events: VecDeque::new(),
            chains: Chains::default(),
            acknowledgements: 0,
            now: None,
        })
    }

    pub(super) fn id(&self, id: CmId) -> Result<&Id> {
        self.ids.get(id.0).filter(|id| id.state != State::Watching).ok_or(STALE_ID)
    }

    pub(super) fn id_mut(&mut self, id: CmId) -> Result<&mut Id> {
        self.ids.get_mut(id.0).filter(|id| id.state != State::Watching).ok_or(STALE_ID)
    }

    pub(super) fn live_device(&self, device: DeviceId) -> Result<&Device> {
        let device = self.devices.get(device.0 as usize).ok_or(Error::Stale { object: "device" })?;
        device.live()?;
        Ok(device)
    }

    pub(super) fn add(&mut self, id: Id) -> Key {
        let key = self.ids.insert(id);
        if let Some(id) = self.ids.get(key) {
            id.raw.set_key(key);
        }
        key
    }

    fn listen_for(&mut self, service: Service, address: SocketAddr, backlog: u32) -> Result<CmId> {
        let listen = |error| match error {
            Error::Io { source, .. } => Error::Listen { address, source },
            other => other,
        };
        let raw = RawId::create(&self.channel, service)?;
        raw.reuse_address().and_then(|()| raw.bind(address)).and_then(|()| raw.listen(backlog)).map_err(listen)?;
        let on_device = !raw.context().is_null();
        let key = self.add(Id::new(Arc::new(raw), State::Listening));
        if on_device && let Err(error) = self.land(key) {
            self.remove(key);
            return Err(error);
        }
        Ok(CmId(key))
    }

    pub(super) fn resolve_on(&mut self, raw: RawId, peer: SocketAddr, deadline: Instant) -> Result<CmId> {
        let raw = Arc::new(raw);
        let mut id = Id::new(Arc::clone(&raw), State::Resolving);
        id.deadline = Some(deadline);
        let key = self.add(id);
        let failure = match raw.resolve_address(peer, milliseconds_to(Some(deadline), self.now)) {
            Ok(()) => return Ok(CmId(key)),
            Err(_) if peer.ip().is_loopback() => ConnectFailure::Unreachable(NO_LOOPBACK.into()),
            Err(Error::Io { source, .. }) if is_unreachable(&source) => connect_failure(&source),
            Err(error) => {
                drop(raw);
                self.remove(key);
                return Err(error);
            }
        };
        // As if it had been found out later.
        if let Some(id) = self.ids.get_mut(key) {
            id.state = State::Dead;
        }
        self.push(key, CmEventKind::ConnectFailed(failure));
        self.connector.wake();
        Ok(CmId(key))
    }

    /// What this side offers; `asked`: what the peer did.
    pub(super) fn terms(&self, id: &Id, param: &ConnectParam<'_>, asked: Option<ReadDepth>) -> Result<Terms> {
        let device = id.device.ok_or(Error::InvalidState { call: "connect", state: "on no device" })?;
        let device = &self.devices[device.0 as usize];
        check_private_data(param.private_data, device.info.capabilities.max_private_data)?;
        let limits = &device.limits;
        let within = |wanted: u16, limit: u8, asked: Option<u16>| {
            let wanted = if wanted == 0 { limit.into() } else { wanted.min(limit.into()) };
            match asked {
                // A peer of MPA revision 1 tells no depths: it is taken to have the usual ones.
                Some(0) if limits.iwarp => wanted.min(USUAL_DEPTH),
                Some(asked) => wanted.min(asked),
                None => wanted,
            }
        };
        let read_depth = ReadDepth {
            responder_resources: within(
                param.responder_resources,
                limits.responder_resources,
                asked.map(|asked| asked.responder_resources),
            ),
            initiator_depth: within(
                param.initiator_depth,
                limits.initiator_depth,
                asked.map(|asked| asked.initiator_depth),
            ),
        };
        Ok(Terms { private_data: param.private_data.into(), read_depth })
    }

    fn is_iwarp(&self, id: &Id) -> bool {
        id.device.is_some_and(|device| self.devices[device.0 as usize].limits.iwarp)
    }
}

fn check_private_data(data: &[u8], max: usize) -> Result<()> {
    if data.len() > max {
        return Err(Error::PrivateDataTooLong { provider: NAME, len: data.len(), max });
    }
    Ok(())
}

impl Drop for Verbs {
    fn drop(&mut self) {
        for key in self.ids.keys() {
            self.remove(key);
        }
        for device in 0..self.devices.len() {
            self.release_parked(DeviceId(device as u32));
        }
    }
}

// SAFETY: 1. and 2. hold by the contract of libibverbs (`ibv_post_send`(3), `ibv_poll_cq`(3)): devices use what a work request
// names until its completion, and nothing of a queue pair or shared queue once it is destroyed, which `destroy_id` and
// `destroy_srq` do before they return. 3. Regions own a share of their memory, in `mr`, and give up theirs after
// `ibv_dereg_mr` of each registration. 4. Objects are owned by the provider and destroyed before it. 5. Handles are keys of
// slabs, which never reuse one.
unsafe impl Provider for Verbs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> {
        self.devices.get(device.0 as usize).filter(|device| !device.removed).map(|device| &device.info)
    }

    fn cm_channel(&self) -> RawFd {
        self.poll.as_raw_fd()
    }

    fn completion_channel(&self, device: DeviceId) -> Result<RawFd> {
        Ok(self.live_device(device)?.live()?.completion_fd())
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn progress(&mut self, now: Instant, _drive: Drive) -> bool {
        self.now = Some(now);
        false
    }

    fn listen(&mut self, address: SocketAddr, backlog: u32) -> Result<CmId> {
        self.listen_for(Service::Connected, address, backlog)
    }

    fn local_address(&self, id: CmId) -> Option<SocketAddr> {
        self.id(id).ok()?.raw.local_address()
    }

    fn resolve(&mut self, peer: SocketAddr, deadline: Instant) -> Result<CmId> {
        let raw = RawId::create(&self.channel, Service::Connected)?;
        self.resolve_on(raw, peer, deadline)
    }

    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        let entry = self.id(id)?;
        if entry.state != State::Resolved {
            return Err(Error::InvalidState { call: "connect", state: entry.state.name() });
        }
        if entry.qp.is_none() && entry.raw.service() == Service::Connected {
            return Err(Error::InvalidState { call: "connect", state: "without a queue pair" });
        }
        let terms = self.terms(entry, param, None)?;
        let (iwarp, raw) = (self.is_iwarp(entry), Arc::clone(&entry.raw));
        let mut refused = None;
        if iwarp {
            let started = self.connector.connect(id.0, raw, terms);
            started.map_err(|source| Error::io("starting a thread to connect on", source))?;
        } else if let Err(error) = raw.connect(&terms) {
            match error {
                Error::Io { source, .. } => refused = Some(connect_failure(&source)),
                other => return Err(other),
            }
        }
        let entry = self.id_mut(id)?;
        entry.handshaking = iwarp;
        entry.state = State::Connecting;
        if let Some(failure) = refused {
            entry.state = State::Dead;
            self.push(id.0, CmEventKind::ConnectFailed(failure));
            self.connector.wake();
        }
        Ok(())
    }

    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        self.now = Some(now);
        let entry = self.id(id)?;
        if entry.state != State::Offered {
            return Err(Error::InvalidState { call: "accept", state: entry.state.name() });
        }
        if entry.qp.is_none() {
            return Err(Error::InvalidState { call: "accept", state: "without a queue pair" });
        }
        let terms = self.terms(entry, param, Some(entry.read_depth))?;
        let (iwarp, device) = (self.is_iwarp(entry), entry.device);
        self.check_port(device)?;
        let entry = self.id_mut(id)?;
        entry.raw.accept(&terms)?;
        entry.handshaking = iwarp;
        entry.read_depth = terms.read_depth;
        entry.state = State::Accepting;
        if entry.raw.service() == Service::Datagram {
            // There is nothing to wait for, and no event.
            entry.state = State::Established;
            let (private_data, read_depth) = (Box::default(), ReadDepth::default());
            self.push(id.0, CmEventKind::Established { private_data, read_depth });
            self.connector.wake();
        } else {
            self.set_min_rnr_timer(id.0);
        }
        Ok(())
    }

    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        self.now = Some(now);
        let entry = self.id(id)?;
        if entry.state != State::Offered {
            return Err(Error::InvalidState { call: "reject", state: entry.state.name() });
        }
        let max = entry.device.map_or(0, |d| self.devices[d.0 as usize].info.capabilities.max_private_data);
        check_private_data(private_data, max)?;
        let (raw, device) = (Arc::clone(&entry.raw), entry.device);
        if let Err(error) = self.check_port(device).and_then(|()| raw.reject(private_data)) {
            // The peer may have gone before.
            log::debug!("{error}");
        }
        self.remove(id.0);
        Ok(())
    }

    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        self.now = Some(now);
        let device = self.id(id)?.device;
        let up = self.check_port(device).is_ok();
        let entry = self.id_mut(id)?;
        let tell = match entry.state {
            State::Listening | State::Watching => {
                return Err(Error::InvalidState { call: "disconnect", state: entry.state.name() });
            }
            // On iWARP this would wait for the end of the handshake; destroying the id ends it.
            State::Connecting | State::Accepting => !entry.handshaking && entry.raw.service() == Service::Connected,
            State::Established => entry.raw.service() == Service::Connected,
            // The peer was first: this answers it, and may be too late.
            State::Dead => entry.qp.is_some() && !entry.handshaking,
            State::Offered => {
                if up && let Err(error) = entry.raw.reject(&[]) {
                    log::debug!("{error}");
                }
                false
            }
            State::Bound | State::Resolving | State::Resolved | State::Disconnecting => false,
        };
        let again = entry.state == State::Disconnecting;
        entry.state = State::Disconnecting;
        if tell
            && up
            && let Err(error) = entry.raw.disconnect()
        {
            log::debug!("{error}");
        }
        if !again && let Err(error) = entry.raw.flush() {
            log::debug!("{error}");
        }
        Ok(())
    }

    fn destroy_id(&mut self, id: CmId, now: Instant) {
        self.now = Some(now);
        if self.id(id).is_ok() {
            self.remove(id.0);
        }
    }

    fn detach(&mut self, id: CmId) -> Result<Detached> {
        self.hand_out(id)
    }

    fn attach(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)> {
        self.now = Some(now);
        self.take_in(request)
    }

    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        self.now = Some(now);
        self.next_event(now)
    }

    fn next_device_event(&mut self) -> Option<DeviceEvent> {
        self.device_events.pop_front()
    }

    fn register(&mut self, device: DeviceId, memory: &Arc<Memory>, access: Access) -> Result<MemoryRegion> {
        self.register_range(device, memory, 0..memory.len(), access)
    }

    fn register_range(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion> {
        let entry = self.live_device(device)?;
        if access.contains(Access::REMOTE_ATOMIC) && !entry.info.capabilities.features.contains(Features::ATOMICS) {
            return Err(Error::Unsupported { provider: NAME, feature: "atomic operations on this device" });
        }
        let (region, local_key, remote_key) = Region::register(entry.live()?, device.0, memory, range, access)?;
        Ok(MemoryRegion { id: MrId(self.regions.insert(region)), local_key, remote_key })
    }

    fn invalidate(&mut self, region: MrId) -> Result<()> {
        self.regions.get_mut(region.0).map(Region::invalidate).ok_or(Error::Stale { object: "memory region" })
    }

    fn deregister(&mut self, region: MrId) -> Result<()> {
        self.regions.remove(region.0).map(drop).ok_or(Error::Stale { object: "memory region" })
    }

    fn create_cq(&mut self, device: DeviceId, entries: u32) -> Result<CqId> {
        self.make_cq(device, entries)
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        self.drop_cq(cq)
    }

    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        self.make_qp(id, attr, None)
    }

    fn moderate_cq(&mut self, cq: CqId, to: Moderation) -> Result<()> {
        self.hold_back(cq, to)
    }

    fn create_srq(&mut self, device: DeviceId, max_wr: u32) -> Result<SrqId> {
        self.make_srq(device, max_wr)
    }

    fn destroy_srq(&mut self, srq: SrqId) -> Result<()> {
        self.drop_srq(srq)
    }

    fn create_qp_with_srq(&mut self, id: CmId, attr: &QpAttr, srq: SrqId) -> Result<QpId> {
        self.make_qp(id, attr, Some(srq))
    }

    fn bind_datagram(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId)> {
        self.bind_datagrams(address)
    }

    fn answer_datagram(&mut self, id: CmId, qp: QpId, private_data: &[u8], now: Instant) -> Result<()> {
        self.now = Some(now);
        self.answer_for(id, qp, private_data)
    }

    fn listen_datagram(&mut self, address: SocketAddr, backlog: u32) -> Result<CmId> {
        self.listen_for(Service::Datagram, address, backlog)
    }

    fn resolve_datagram(&mut self, peer: SocketAddr, from: Option<SocketAddr>, deadline: Instant) -> Result<CmId> {
        self.resolve_datagrams(peer, from, deadline)
    }

    fn join(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        self.join_group(id, group)
    }

    fn leave(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        self.leave_group(id, group)
    }

    fn qp_number(&self, qp: QpId) -> Result<u32> {
        self.ids.get(qp.0).and_then(|id| id.qp.as_ref()).map(|qp| qp.number).ok_or(STALE_QP)
    }

    fn create_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId> {
        self.make_address(device, route)
    }

    fn destroy_address(&mut self, address: AddressId) -> Result<()> {
        self.addresses.remove(address.0).map(drop).ok_or(Error::Stale { object: "address" })
    }

    fn route_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
        self.way_back(id, received, header)
    }

    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        match self.srqs.get_mut(srq.0) {
            Some(srq) => srq.post(chain, &mut self.chains),
            None => Err(PostError { posted: 0, error: STALE_SRQ }),
        }
    }

    fn arm_srq(&mut self, srq: SrqId, limit: u32) -> Result<()> {
        self.srqs.get(srq.0).ok_or(STALE_SRQ)?.arm(limit)
    }

    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        match self.ids.get(qp.0).and_then(|id| id.qp.as_ref()) {
            Some(qp) => qp.post_recv(chain, &mut self.chains),
            None => Err(PostError { posted: 0, error: STALE_QP }),
        }
    }

    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<(), PostError> {
        match self.ids.get(qp.0).and_then(|id| id.qp.as_ref()) {
            Some(qp) => qp.post_send(chain, &mut self.chains, &self.addresses),
            None => Err(PostError { posted: 0, error: STALE_QP }),
        }
    }

    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let start = out.len();
        let entry = self.cqs.get_mut(cq.0).ok_or(STALE_CQ)?;
        let stashed = entry.unstash(max, out);
        let Some(raw) = &entry.raw else { return Ok(stashed) };
        let device = &self.devices[entry.device as usize];
        let taken = match raw.poll(max - stashed, &device.numbers, &mut self.batch, out) {
            Err(_) if device.removed => 0,
            other => other?,
        };
        if stashed + taken < max {
            entry.drained();
        }
        if entry.shared > 0 {
            self.count_shared(cq, &out[start + stashed..], None);
        }
        Ok(stashed + taken)
    }

    fn acknowledgements(&self) -> u64 {
        self.acknowledgements
    }

    fn req_notify(&mut self, cq: CqId) -> Result<()> {
        let cq = self.cqs.get_mut(cq.0).ok_or(STALE_CQ)?;
        let Some(raw) = &cq.raw else { return Ok(()) };
        let device = &mut self.devices[cq.device as usize];
        match raw.arm() {
            Err(_) if device.removed => return Ok(()),
            other => other?,
        }
        device.armed += usize::from(!cq.armed);
        cq.armed = true;
        Ok(())
    }

    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        let device = self.devices.get_mut(device.0 as usize).ok_or(Error::Stale { object: "device" })?;
        // A queue that is not armed raises no event: nothing to ask the system for.
        while device.armed > 0 {
            let Some(raw) = &device.raw else { break };
            let cqs = &self.cqs;
            let Some(key) = cq::next_event(raw, &mut self.acknowledgements, |key| cqs.get(key)?.raw.clone())? else {
                break;
            };
            if let Some(cq) = self.cqs.get_mut(key) {
                device.armed -= usize::from(cq.armed);
                cq.armed = false;
                return Ok(Some(CqId(key)));
            }
        }
        Ok(None)
    }
}
