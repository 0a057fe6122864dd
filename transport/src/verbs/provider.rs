//! [`Verbs`]: RDMA devices behind the [`Provider`] seam.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};

use super::channel::EventChannel;
use super::connector::Connector;
use super::cq::{self, Cq, RawCq};
use super::device::Device;
use super::ffi;
use super::id::{Id, RawId, State, Terms};
use super::mr::{RawRegion, Region};
use super::qp::{Chains, Qp, init_attr};
use super::status::{connect_failure, is_unreachable};
use crate::cm::{CmEvent, CmEventKind, CmId, ConnectParam};
use crate::error::{Error, Result};
use crate::mem::Memory;
use crate::mr::{Access, MemoryRegion, MrId};
use crate::provider::{CqId, DeviceId, DeviceInfo, Drive, PostError, Provider};
use crate::qp::{QpAttr, QpId};
use crate::slab::{Key, Slab};
use crate::wc::WorkCompletion;
use crate::wr::{RecvWr, SendWr};

/// Name of the provider.
pub(super) const NAME: &str = "verbs";
const STALE_ID: Error = Error::Stale { object: "connection id" };
const STALE_QP: Error = Error::Stale { object: "queue pair" };
const STALE_CQ: Error = Error::Stale { object: "completion queue" };

/// Tokens of the inner epoll set: the event channel, the waker, asynchronous events by device.
pub(super) const CM: Token = Token(0);
const WAKE: Token = Token(1);
pub(super) const ASYNC: usize = 2;

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
    regions: Slab<Region>,
    pub(super) devices: Vec<Device>,
    /// To be handed out.
    pub(super) events: VecDeque<CmEvent>,
    chains: Chains,
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
            regions: Slab::default(),
            devices: Vec::new(),
            events: VecDeque::new(),
            chains: Chains::default(),
            now: None,
        })
    }

    fn id(&self, id: CmId) -> Result<&Id> {
        self.ids.get(id.0).filter(|id| id.state != State::Watching).ok_or(STALE_ID)
    }

    fn id_mut(&mut self, id: CmId) -> Result<&mut Id> {
        self.ids.get_mut(id.0).filter(|id| id.state != State::Watching).ok_or(STALE_ID)
    }

    fn live_device(&self, device: DeviceId) -> Result<&Device> {
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

    /// Puts an id into the books of the device it is on, which is opened when it is the first.
    pub(super) fn land(&mut self, key: Key) -> Result<DeviceId> {
        let raw = Arc::clone(&self.ids.get(key).ok_or(STALE_ID)?.raw);
        let device = self.device_of(&raw)?;
        let entry = &mut self.devices[device.0 as usize];
        if let Some(open) = &entry.raw {
            raw.set_device(open);
        }
        if let Some(id) = self.ids.get_mut(key) {
            id.device = Some(device);
            entry.ids += 1;
        }
        Ok(device)
    }

    /// The device an id is on.
    pub(super) fn device_of(&mut self, id: &RawId) -> Result<DeviceId> {
        let context = id.context();
        if context.is_null() {
            return Err(Error::NoDevice { reason: "the address is not on an RDMA device".into() });
        }
        let known = |device: &Device| device.raw.as_ref().is_some_and(|raw| raw.context() == context);
        if let Some(index) = self.devices.iter().position(known) {
            return Ok(DeviceId(index as u32));
        }
        // An id of our own goes first, at the same address: it keeps the context open, and hears of the removal.
        let mut address = id.local_address().ok_or(Error::NoDevice { reason: "an id has no address".into() })?;
        address.set_port(0);
        let watch = Arc::new(RawId::create(&self.channel)?);
        watch.bind(address)?;
        if watch.context() != context {
            return Err(Error::NoDevice { reason: format!("{} is on more than one device", address.ip()) });
        }
        let device = Device::open(Arc::clone(&watch), id.port())?;
        let index = self.devices.len();
        let fd = device.live()?.async_fd();
        self.poll
            .registry()
            .register(&mut SourceFd(&fd), Token(ASYNC + index), Interest::READABLE)
            .map_err(|source| Error::io("watching a device", source))?;
        let mut watch = Id::new(watch, State::Watching);
        let handle = DeviceId(index as u32);
        watch.device = Some(handle);
        let key = self.add(watch);
        self.devices.push(device);
        self.devices[index].watch = Some(key);
        Ok(handle)
    }

    /// Watches every device that has an address: librdmacm opens them all when it looks for removed ones, and would
    /// keep those that nobody watches from being removed in their turn.
    fn watch_all(&mut self) {
        for address in ffi::local_addresses() {
            let watched = RawId::create(&self.channel).and_then(|id| {
                id.bind(address)?;
                if id.context().is_null() { Ok(()) } else { self.device_of(&id).map(drop) }
            });
            if let Err(error) = watched {
                // Most addresses are on no device.
                log::trace!("{} is not watched: {error}", address.ip());
            }
        }
    }

    /// Destroys an id with its queue pair.
    pub(super) fn remove(&mut self, key: Key) {
        let Some(id) = self.ids.remove(key) else { return };
        let Id { raw, qp, device, handshaking, state, .. } = id;
        if let Some(qp) = &qp {
            for (cq, depth) in [(qp.attr.send_cq, qp.attr.max_send_wr), (qp.attr.recv_cq, qp.attr.max_recv_wr)] {
                if let Some(cq) = self.cqs.get_mut(cq.0) {
                    cq.release(depth);
                }
            }
            if let Some(device) = device {
                self.devices[device.0 as usize].numbers.remove(qp.number, QpId(key));
            }
            // A thread may still hold the queue pair: from here on it touches no memory all the same.
            if (handshaking || Arc::strong_count(&raw) > 1)
                && let Err(error) = raw.flush()
            {
                log::debug!("{error}");
            }
        }
        if handshaking {
            // Destroying waits for the end of the handshake.
            self.connector.release(raw);
        } else {
            raw.abandon();
            drop(raw);
        }
        if let Some(device) = device
            && state != State::Watching
        {
            self.devices[device.0 as usize].ids -= 1;
            self.close_if_unused(device);
        }
    }

    /// Closes a removed device that has no ids any more: everything on it goes, so that the kernel can let it go.
    pub(super) fn close_if_unused(&mut self, device: DeviceId) {
        let entry = &mut self.devices[device.0 as usize];
        if !entry.removed || entry.ids > 0 || entry.raw.is_none() {
            return;
        }
        entry.armed = 0;
        let (raw, watch) = (entry.raw.take(), entry.watch.take());
        log::info!("the device {} is closed", entry.info.name);
        for key in self.cqs.keys() {
            if let Some(cq) = self.cqs.get_mut(key).filter(|cq| cq.device == device.0) {
                cq.armed = false;
                cq.raw = None;
            }
        }
        for key in self.regions.keys() {
            if let Some(region) = self.regions.get_mut(key).filter(|region| region.device == device.0) {
                region.raw = None;
            }
        }
        if let Some(raw) = &raw
            && let Err(error) = self.poll.registry().deregister(&mut SourceFd(&raw.async_fd()))
        {
            log::debug!("forgetting a device: {error}");
        }
        if let Some(watch) = watch {
            self.remove(watch);
        }
        drop(raw);
        self.watch_all();
    }

    /// What this side offers; `asked`: what the peer did.
    fn terms(&self, id: &Id, param: &ConnectParam<'_>, asked: Option<(u8, u8)>) -> Result<Terms> {
        let device = id.device.ok_or(Error::InvalidState { call: "connect", state: "on no device" })?;
        let device = &self.devices[device.0 as usize];
        check_private_data(param.private_data, device.info.capabilities.max_private_data)?;
        let limits = &device.limits;
        let within = |wanted: u16, limit: u8, asked: Option<u8>| {
            let wanted = if wanted == 0 { limit } else { u8::try_from(wanted).unwrap_or(u8::MAX).min(limit) };
            asked.map_or(wanted, |asked| wanted.min(asked))
        };
        Ok(Terms {
            private_data: param.private_data.into(),
            responder_resources: within(param.responder_resources, limits.responder_resources, asked.map(|a| a.0)),
            initiator_depth: within(param.initiator_depth, limits.initiator_depth, asked.map(|a| a.1)),
        })
    }

    fn is_iwarp(&self, id: &Id) -> bool {
        id.device.is_some_and(|device| self.devices[device.0 as usize].limits.iwarp)
    }

    fn owned_cq(&self, cq: CqId) -> Result<Arc<RawCq>> {
        let cq = self.cqs.get(cq.0).ok_or(STALE_CQ)?;
        cq.raw.clone().ok_or(STALE_CQ)
    }

    fn make_qp(&mut self, key: Key, attr: &QpAttr) -> Result<Qp> {
        let id = self.ids.get(key).ok_or(STALE_ID)?;
        let device = id.device.ok_or(Error::InvalidState { call: "create_qp", state: "on no device" })?;
        let device = &self.devices[device.0 as usize];
        let open = device.live()?;
        let (send_cq, recv_cq) = (self.owned_cq(attr.send_cq)?, self.owned_cq(attr.recv_cq)?);
        if !send_cq.is_on(open) || !recv_cq.is_on(open) {
            return Err(Error::InvalidState { call: "create_qp", state: "on another device than its queues" });
        }
        let capabilities = &device.info.capabilities;
        let mut made = init_attr(attr, capabilities, &send_cq, &recv_cq, key);
        let queues = [send_cq, recv_cq];
        let raw = match id.raw.create_qp(&mut made, queues.clone()) {
            // Room for inline data is a wish: with as many entries as these it may be too much.
            Err(_) if attr.max_inline > 0 => {
                made = init_attr(&QpAttr { max_inline: 0, ..*attr }, capabilities, &queues[0], &queues[1], key);
                let raw = id.raw.create_qp(&mut made, queues)?;
                made.cap.max_inline_data = 0;
                raw
            }
            other => other?,
        };
        Ok(Qp::new(raw, &made, attr, capabilities))
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
    }
}

impl Provider for Verbs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> {
        Some(&self.devices.get(device.0 as usize)?.info)
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
        let listen = |error| match error {
            Error::Io { source, .. } => Error::Listen { address, source },
            other => other,
        };
        let raw = RawId::create(&self.channel)?;
        raw.reuse_address().and_then(|()| raw.bind(address)).and_then(|()| raw.listen(backlog)).map_err(listen)?;
        let on_device = !raw.context().is_null();
        let key = self.add(Id::new(Arc::new(raw), State::Listening));
        if on_device && let Err(error) = self.land(key) {
            self.remove(key);
            return Err(error);
        }
        Ok(CmId(key))
    }

    fn local_address(&self, id: CmId) -> Option<SocketAddr> {
        self.id(id).ok()?.raw.local_address()
    }

    fn resolve(&mut self, peer: SocketAddr, deadline: Instant) -> Result<CmId> {
        let raw = Arc::new(RawId::create(&self.channel)?);
        let mut id = Id::new(Arc::clone(&raw), State::Resolving);
        id.deadline = Some(deadline);
        let key = self.add(id);
        match raw.resolve_address(peer, milliseconds_to(Some(deadline), self.now)) {
            Ok(()) => {}
            // As if it had been found out later.
            Err(Error::Io { source, .. }) if is_unreachable(&source) => {
                if let Some(id) = self.ids.get_mut(key) {
                    id.state = State::Dead;
                }
                self.push(key, CmEventKind::ConnectFailed(connect_failure(&source)));
                self.connector.wake();
            }
            Err(error) => {
                drop(raw);
                self.remove(key);
                return Err(error);
            }
        }
        Ok(CmId(key))
    }

    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        let entry = self.id(id)?;
        if entry.state != State::Resolved {
            return Err(Error::InvalidState { call: "connect", state: entry.state.name() });
        }
        if entry.qp.is_none() {
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
        let terms = self.terms(entry, param, Some(entry.asked))?;
        let iwarp = self.is_iwarp(entry);
        entry.raw.accept(&terms)?;
        let entry = self.id_mut(id)?;
        entry.handshaking = iwarp;
        entry.state = State::Accepting;
        self.set_min_rnr_timer(id.0);
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
        if let Err(error) = entry.raw.reject(private_data) {
            // The peer may have gone before.
            log::debug!("{error}");
        }
        self.remove(id.0);
        Ok(())
    }

    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        self.now = Some(now);
        let entry = self.id_mut(id)?;
        let tell = match entry.state {
            State::Listening | State::Watching => {
                return Err(Error::InvalidState { call: "disconnect", state: entry.state.name() });
            }
            // On iWARP this would wait for the end of the handshake; destroying the id ends it.
            State::Connecting | State::Accepting => !entry.handshaking,
            State::Established => true,
            // The peer was first: this answers it, and may be too late.
            State::Dead => entry.qp.is_some() && !entry.handshaking,
            State::Offered => {
                if let Err(error) = entry.raw.reject(&[]) {
                    log::debug!("{error}");
                }
                false
            }
            State::Resolving | State::Resolved | State::Disconnecting => false,
        };
        let again = entry.state == State::Disconnecting;
        entry.state = State::Disconnecting;
        if tell && let Err(error) = entry.raw.disconnect() {
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

    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        self.now = Some(now);
        self.next_event(now)
    }

    fn register(&mut self, device: DeviceId, memory: &Arc<Memory>, access: Access) -> Result<MemoryRegion> {
        let raw = RawRegion::register(self.live_device(device)?.live()?, memory, access)?;
        let (local_key, remote_key) = (raw.local_key(), raw.remote_key());
        let id = MrId(self.regions.insert(Region { raw: Some(raw), device: device.0 }));
        Ok(MemoryRegion { id, local_key, remote_key })
    }

    fn deregister(&mut self, region: MrId) -> Result<()> {
        self.regions.remove(region.0).map(drop).ok_or(Error::Stale { object: "memory region" })
    }

    fn create_cq(&mut self, device: DeviceId, entries: u32) -> Result<CqId> {
        let entry = self.live_device(device)?;
        if entries == 0 || entries > entry.info.capabilities.max_completion_queue {
            let (value, range) = (entries.into(), "1 to the device's max_completion_queue");
            return Err(Error::OutOfRange { what: "entries of a completion queue", value, range });
        }
        let open = Arc::clone(entry.live()?);
        // The key is needed to make the queue, and the queue to keep the key.
        let key = self.cqs.insert(Cq::new(device.0, entries));
        match RawCq::create(&open, entries, key) {
            Ok(raw) => {
                if let Some(cq) = self.cqs.get_mut(key) {
                    cq.raw = Some(Arc::new(raw));
                }
                Ok(CqId(key))
            }
            Err(error) => {
                self.cqs.remove(key);
                Err(error)
            }
        }
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        if self.cqs.get(cq.0).ok_or(STALE_CQ)?.is_used() {
            return Err(Error::InvalidState { call: "destroy_cq", state: "using the completion queue" });
        }
        if let Some(cq) = self.cqs.remove(cq.0) {
            self.devices[cq.device as usize].armed -= usize::from(cq.armed);
        }
        Ok(())
    }

    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        let entry = self.id(id)?;
        if !matches!(entry.state, State::Resolved | State::Offered) {
            return Err(Error::InvalidState { call: "create_qp", state: entry.state.name() });
        }
        if entry.qp.is_some() {
            return Err(Error::InvalidState { call: "create_qp", state: "with a queue pair" });
        }
        let device = entry.device.ok_or(Error::InvalidState { call: "create_qp", state: "on no device" })?;
        let max = self.devices[device.0 as usize].info.capabilities.max_queue_depth;
        for (what, depth) in
            [("depth of the send queue", attr.max_send_wr), ("depth of the receive queue", attr.max_recv_wr)]
        {
            if depth == 0 || depth > max {
                return Err(Error::OutOfRange {
                    what,
                    value: depth.into(),
                    range: "1 to the device's max_queue_depth",
                });
            }
        }
        self.cqs.get_mut(attr.send_cq.0).ok_or(STALE_CQ)?.reserve(attr.max_send_wr)?;
        let reserved = self.cqs.get_mut(attr.recv_cq.0).ok_or(STALE_CQ).and_then(|cq| cq.reserve(attr.max_recv_wr));
        let made = match reserved {
            Ok(()) => self.make_qp(id.0, attr).inspect_err(|_| {
                if let Some(cq) = self.cqs.get_mut(attr.recv_cq.0) {
                    cq.cancel(attr.max_recv_wr);
                }
            }),
            Err(error) => Err(error),
        };
        let qp = match made {
            Ok(qp) => qp,
            Err(error) => {
                if let Some(cq) = self.cqs.get_mut(attr.send_cq.0) {
                    cq.cancel(attr.max_send_wr);
                }
                return Err(error);
            }
        };
        let handle = QpId(id.0);
        self.devices[device.0 as usize].numbers.insert(qp.number, handle);
        self.id_mut(id)?.qp = Some(qp);
        Ok(handle)
    }

    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        match self.ids.get(qp.0).and_then(|id| id.qp.as_ref()) {
            Some(qp) => qp.post_recv(chain, &mut self.chains),
            None => Err(PostError { posted: 0, error: STALE_QP }),
        }
    }

    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<(), PostError> {
        match self.ids.get(qp.0).and_then(|id| id.qp.as_ref()) {
            Some(qp) => qp.post_send(chain, &mut self.chains),
            None => Err(PostError { posted: 0, error: STALE_QP }),
        }
    }

    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let cq = self.cqs.get_mut(cq.0).ok_or(STALE_CQ)?;
        let Some(raw) = &cq.raw else { return Ok(0) };
        let device = &self.devices[cq.device as usize];
        let taken = match raw.poll(max, &device.numbers, out) {
            Err(_) if device.removed => 0,
            other => other?,
        };
        if taken < max {
            cq.drained();
        }
        Ok(taken)
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
            let Some(key) = cq::next_event(raw, |key| cqs.get(key)?.raw.clone())? else { break };
            if let Some(cq) = self.cqs.get_mut(key) {
                device.armed -= usize::from(cq.armed);
                cq.armed = false;
                return Ok(Some(CqId(key)));
            }
        }
        Ok(None)
    }
}
