//! A provider that forwards calls to another one, for tests. It can hide features, change limits, record settings, and make calls fail.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, PoisonError};

use rdma_reactor::{Config, Reactor};
use rdma_transport::slab::Key;

use crate::delegate::*;
use crate::gate::{Call, Failure, Gate, Said, Unresolved};
use crate::parts::{embedded, reactor_on, reactor_on_all};

/// A recorded call, with the settings that were passed to the provider.
#[derive(Clone, Debug)]
pub enum Asked {
    /// `listen_with`.
    Listen(ListenParam),
    /// `resolve_with`.
    Resolve(PathOptions),
    /// `connect`.
    Connect(Retries, ReadDepth),
    /// `accept`.
    Accept(Retries, ReadDepth),
    /// `create_cq_on`, with the number of entries and the completion vector.
    CompletionQueue(u32, u32),
    /// `create_qp`.
    QueuePair(QpAttr),
    /// `register_range`.
    Register(Access),
}

/// The recorded calls, the oldest first. Clones share the same record.
#[derive(Clone, Debug, Default)]
pub struct Record(Arc<Mutex<Vec<Asked>>>);

impl Record {
    fn note(&self, asked: Asked) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(asked);
    }

    /// Removes and returns the recorded calls.
    #[must_use]
    pub fn take(&self) -> Vec<Asked> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

const fn service(param: &ConnectParam<'_>) -> (Retries, ReadDepth) {
    let ConnectParam { responder_resources, initiator_depth, retries, .. } = *param;
    (retries, ReadDepth { responder_resources, initiator_depth })
}

/// The forwarding provider, see the [module](self).
#[derive(Debug)]
pub struct Forward {
    inner: Box<dyn Provider>,
    info: DeviceInfo,
    gate: Gate,
    record: Record,
    /// The remote keys of regions that may be the destination of RDMA Reads.
    sinks: BTreeSet<u32>,
    /// The address of the memory of each region.
    places: BTreeMap<Key, u64>,
    first_listener: Option<CmId>,
    /// The connections and listeners that are not destroyed: the id of each, and true if it has a queue pair.
    ids: Vec<(CmId, bool)>,
    /// The events of the device that the reactor has not polled yet: those of the connection manager, and those of the device itself.
    said: (VecDeque<CmEvent>, VecDeque<AsyncEvent>),
    /// The completion queues: the id of each, and true if it has failed.
    queues: Vec<(CqId, bool)>,
    /// The shared receive queue that was created last.
    shared_queue: Option<SrqId>,
    /// The function that changes the address from which a peer appears to connect.
    seen_as: fn(SocketAddr) -> SocketAddr,
}

impl Forward {
    /// Returns a reactor on a provider that forwards to the embedded one, without the features `lacks`. Each call queries `gate` first.
    ///
    /// # Panics
    /// Panics if the system has no descriptors left, or if a setting is out of range.
    #[must_use]
    pub fn reactor(config: Config, lacks: Features, gate: &Gate) -> Reactor {
        Self::open(config, |capabilities| capabilities.features.remove(lacks), gate.clone(), Record::default())
    }

    /// Returns a provider whose device has the name `device`.
    ///
    /// # Panics
    /// Those of [`Forward::reactor`].
    #[must_use]
    pub fn named(device: &str) -> Self {
        let mut provider = Self::gated(Box::new(embedded()), Gate::default());
        provider.info.name = device.into();
        provider
    }

    /// Returns a reactor on several devices. Each has its own gate, and a name: `forward0`, `forward1`, ...
    ///
    /// # Panics
    /// Those of [`Forward::reactor`].
    #[must_use]
    pub fn reactor_on_each(config: Config, gates: &[Gate]) -> Reactor {
        let provider = |(nth, gate): (usize, &Gate)| {
            let provider = Self { gate: gate.clone(), ..Self::named(&format!("forward{nth}")) };
            Box::new(provider) as Box<dyn Provider>
        };
        reactor_on_all(gates.iter().enumerate().map(provider).collect(), config)
    }

    /// Returns a reactor on a device that can read only into regions that peers may write to. The iWARP drivers irdma and cxgb4 have
    /// this restriction.
    ///
    /// # Panics
    /// Those of [`Forward::reactor`]. A turn of the reactor panics if it posts a Read into another region.
    #[must_use]
    pub fn with_open_sinks(config: Config) -> Reactor {
        let limits = |capabilities: &mut Capabilities| capabilities.features |= Features::OPEN_READ_SINKS;
        Self::open(config, limits, Gate::default(), Record::default())
    }

    /// Returns a reactor on a provider that records the settings of its calls. `limits` changes the capabilities of the device.
    ///
    /// # Panics
    /// Those of [`Forward::reactor`].
    #[must_use]
    pub fn recording(config: Config, limits: impl FnOnce(&mut Capabilities), record: &Record) -> Reactor {
        Self::open(config, limits, Gate::default(), record.clone())
    }

    /// Makes a provider that forwards to `inner`, which must have one device. Each call queries `gate` first.
    ///
    /// # Panics
    /// Panics if `inner` has no device.
    #[must_use]
    pub fn gated(inner: Box<dyn Provider>, gate: Gate) -> Self {
        let info = inner.device(DeviceId(0)).expect("its device").clone();
        let (record, sinks, places, said, ids, queues) = Default::default();
        let (first_listener, shared_queue, seen_as) = (None, None, |peer| peer);
        Self { inner, info, gate, record, sinks, places, first_listener, ids, said, queues, shared_queue, seen_as }
    }

    /// Changes the address from which each peer appears to connect.
    #[must_use]
    pub fn seen_as(self, seen_as: fn(SocketAddr) -> SocketAddr) -> Self {
        Self { seen_as, ..self }
    }

    fn open(config: Config, limits: impl FnOnce(&mut Capabilities), gate: Gate, record: Record) -> Reactor {
        let mut provider = Self { record, ..Self::gated(Box::new(embedded()), gate) };
        limits(&mut provider.info.capabilities);
        reactor_on(provider, config)
    }

    /// Counts a call. Returns an error if the gate requests that this call fails.
    fn pass(&self, call: Call, name: &'static str) -> Result<()> {
        match self.gate.pass(call) {
            None => Ok(()),
            Some(failure) => Err(TransportError::io(name, failure.system()).on(&self.info.name)),
        }
    }

    fn pass_memory(&self, bytes: usize) -> Result<()> {
        match self.gate.pass(Call::Register) {
            None => Ok(()),
            Some(failure) => Err(TransportError::Memory { bytes, source: failure.system() }),
        }
    }

    /// Counts a call that posts the work requests `chain`. If the gate requests a failure, calls `post` only for the work requests before
    /// the one that fails.
    fn post<W, T>(
        &mut self,
        (call, name, queue): (Call, &'static str, &'static str),
        chain: &[W],
        post: impl FnOnce(&mut dyn Provider, &[W]) -> std::result::Result<T, PostError>,
    ) -> std::result::Result<T, PostError> {
        let Some(failure) = self.gate.pass(call) else { return post(&mut *self.inner, chain) };
        let posted = match failure {
            Failure::Errno(_) | Failure::Full | Failure::Panic => 0,
            Failure::LastErrno(_) | Failure::LastFull => chain.len().saturating_sub(1),
        };
        if posted > 0 {
            post(&mut *self.inner, &chain[..posted])?;
        }
        let error = match failure {
            Failure::Full | Failure::LastFull => TransportError::QueueFull { queue, depth: chain.len() as u32 },
            _ => TransportError::io(name, failure.system()).on(&self.info.name),
        };
        Err(PostError { posted, error })
    }

    /// Records a new id, and returns it.
    fn opened(&mut self, id: CmId) -> CmId {
        self.gate.note(|objects| objects.ids += 1);
        self.ids.push((id, false));
        id
    }

    fn closed(&mut self, id: CmId) {
        self.gate.note(|objects| objects.ids -= 1);
        self.ids.retain(|&(of, _)| of != id);
        self.said.0.retain(|event| event.id != id);
    }

    fn equipped(&mut self, id: CmId) {
        self.ids.iter_mut().filter(|(of, _)| *of == id).for_each(|(_, equipped)| *equipped = true);
    }

    /// Queues the spontaneous events that the gate requests from the device.
    fn hear(&mut self) {
        while let Some(said) = self.gate.takes_said() {
            for &(id, equipped) in &self.ids {
                let kind = match said {
                    Said::Overrun if equipped => {
                        CmEventKind::Disconnected(DisconnectCause::Path("the completion queue overran".into()))
                    }
                    Said::Failed(why) if equipped => CmEventKind::Disconnected(DisconnectCause::Path(why.into())),
                    Said::Timewait if equipped => CmEventKind::TimewaitExit,
                    Said::Removal => CmEventKind::DeviceRemoval,
                    _ => continue,
                };
                self.said.0.push_back(CmEvent { id, kind });
            }
            let device = DeviceId(0);
            match said {
                Said::Removal => self.said.1.push_back(AsyncEvent { device, kind: DeviceEventKind::Removed }),
                Said::Device(kind) => self.said.1.push_back(AsyncEvent { device, kind }),
                Said::SharedQueueFailed => self.said.1.extend(self.shared_queue.map(|srq| {
                    let kind = DeviceEventKind::SharedReceiveQueueFailed(srq);
                    AsyncEvent { device, kind }
                })),
                Said::Overrun => self.queues.iter_mut().for_each(|(_, failed)| *failed = true),
                Said::Failed(_) | Said::Timewait => {}
            }
        }
    }

    /// Returns an error if the device is removed.
    fn plugged(&self, name: &'static str) -> Result<()> {
        let gone = || TransportError::io(name, std::io::Error::from_raw_os_error(libc::ENODEV)).on(&self.info.name);
        if self.gate.is_unplugged() { Err(gone()) } else { Ok(()) }
    }

    /// Counts a call that releases a region or its remote key. Returns an error if the gate requests that this call fails.
    fn taken_back(&self, call: Call, region: MrId) -> Result<()> {
        let result = self.pass(call, "ibv_dereg_mr");
        if let Some(&place) = self.places.get(&region.0) {
            self.gate.note_taken_back(place, result.is_ok());
        }
        result
    }

    fn registered(&self, region: MemoryRegion) -> MemoryRegion {
        self.gate.note(|objects| objects.regions += 1);
        region
    }
}

/// The message of a panic that cannot happen, because the inner provider is the embedded one, which has all of these roles.
const HAS_ROLES: &str = "a provider with shared receives, remote keys, liveness and extensions";

// SAFETY: calls are forwarded to the inner provider, and its answers are returned unchanged. A call that fails here is not forwarded, so it
// posts, registers or destroys nothing. If posting a chain fails, exactly the work requests that the error counts as posted are posted.
unsafe impl Provider for Forward {
    delegate!(self.inner: device_at next_deadline local_address datagrams shared_memory);
    fn name(&self) -> &'static str {
        "forward"
    }
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> {
        let there = !self.gate.is_unplugged() || !self.ids.is_empty();
        (device == DeviceId(0) && there).then_some(&self.info)
    }
    fn channel(&self, channel: Channel) -> Result<RawFd> {
        if matches!(channel, Channel::Completions(_)) {
            self.pass(Call::CompletionChannel, "ibv_create_comp_channel")?;
        }
        self.inner.channel(channel)
    }
    fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        self.gate.pass(Call::Progress);
        self.inner.progress(now, drive)
    }
    fn listen(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        self.record.note(Asked::Listen(options.clone()));
        if let Some(failure) = self.gate.pass(Call::Listen) {
            return Err(TransportError::Listen { address, source: failure.system() });
        }
        self.plugged("rdma_listen")?;
        let listener = self.inner.listen(address, options)?;
        self.first_listener.get_or_insert(listener);
        Ok(self.opened(listener))
    }
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        self.record.note(Asked::Resolve(options.clone()));
        self.pass(Call::Resolve, "rdma_resolve_addr")?;
        self.plugged("rdma_resolve_addr")?;
        let id = self.inner.resolve(peer, options, deadline)?;
        Ok(self.opened(id))
    }
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        let (retries, depth) = service(param);
        self.record.note(Asked::Connect(retries, depth));
        self.pass(Call::Connect, "rdma_connect")?;
        self.inner.connect(id, param)
    }
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        let (retries, depth) = service(param);
        self.record.note(Asked::Accept(retries, depth));
        self.pass(Call::Accept, "rdma_accept")?;
        self.inner.accept(id, param, now)
    }
    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        self.pass(Call::Reject, "rdma_reject")?;
        self.inner.reject(id, private_data, now)?;
        self.closed(id);
        Ok(())
    }
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        self.pass(Call::Disconnect, "rdma_disconnect")?;
        self.inner.disconnect(id, now)
    }
    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> {
        let equipped = self.ids.contains(&(id, true));
        self.closed(id);
        let destroyed = if equipped { self.pass(Call::DestroyQp, "ibv_destroy_qp") } else { Ok(()) };
        if destroyed.is_ok() {
            return self.inner.destroy_id(id, now);
        }
        // This call returns an error, although the id is destroyed and the peer is notified.
        self.inner.disconnect(id, now)?;
        destroyed
    }
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        self.pass(Call::NextCmEvent, "rdma_get_cm_event")?;
        self.hear();
        if let Some(event) = self.said.0.pop_front() {
            return Ok(Some(event));
        }
        if let Some(id) = self.first_listener.filter(|_| self.gate.takes_move()) {
            self.inner.destroy_id(id, now)?;
            return Ok(Some(CmEvent { id, kind: CmEventKind::AddressChange }));
        }
        let mut event = self.inner.next_cm_event(now)?;
        while matches!(&event, Some(CmEvent { kind: CmEventKind::Established { private_data, .. }, .. })
            if private_data.is_empty() && self.gate.loses_beginnings())
        {
            event = self.inner.next_cm_event(now)?;
        }
        match &mut event {
            Some(CmEvent { id, kind: CmEventKind::ConnectRequest { peer, .. } }) => {
                *peer = (self.seen_as)(*peer);
                let id = *id;
                self.opened(id);
            }
            Some(CmEvent { kind: kind @ CmEventKind::Resolved { .. }, .. }) => match self.gate.takes_unresolved() {
                Some(Unresolved::Failed) => {
                    *kind =
                        CmEventKind::ConnectFailed(ConnectFailure::Unreachable("no device reaches the address".into()));
                }
                Some(Unresolved::Silent) => event = None,
                None => {}
            },
            _ => {}
        }
        Ok(event)
    }
    fn register(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion> {
        self.record.note(Asked::Register(access));
        self.pass_memory(range.len())?;
        self.gate.watch(memory);
        let place = memory.as_ptr() as u64 + range.start as u64;
        let region = self.inner.register(device, memory, range, access)?;
        self.places.insert(region.id.0, place);
        if access.contains(Access::READ_SINK) {
            self.sinks.insert(region.local_key.0);
        }
        Ok(self.registered(region))
    }
    fn deregister(&mut self, region: MrId) -> Result<()> {
        self.taken_back(Call::Deregister, region)?;
        self.places.remove(&region.0);
        self.inner.deregister(region)?;
        self.gate.note(|objects| objects.regions -= 1);
        Ok(())
    }
    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        let CqAttr { entries, vector, .. } = *attr;
        if vector >= self.info.capabilities.completion_vectors {
            let range = "below the device's completion_vectors";
            return Err(TransportError::OutOfRange { what: "completion vector", value: vector.into(), range });
        }
        self.record.note(Asked::CompletionQueue(entries, vector));
        self.pass(Call::CreateCq, "ibv_create_cq")?;
        let cq = self.inner.create_cq(device, &CqAttr::new(entries))?;
        self.gate.note(|objects| objects.completion_queues += 1);
        self.queues.push((cq, false));
        Ok(cq)
    }
    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        self.pass(Call::DestroyCq, "ibv_destroy_cq")?;
        self.inner.destroy_cq(cq)?;
        self.gate.note(|objects| objects.completion_queues -= 1);
        self.queues.retain(|&(queue, _)| queue != cq);
        Ok(())
    }
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        self.record.note(Asked::QueuePair(*attr));
        self.pass(Call::CreateQp, "rdma_create_qp")?;
        self.equipped(id);
        self.inner.create_qp(id, attr)
    }
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        let what = (Call::PostRecv, "ibv_post_recv", "receive");
        self.post(what, chain, |inner, chain| inner.post_recv(qp, chain))
    }
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError> {
        if self.info.capabilities.features.contains(Features::OPEN_READ_SINKS) {
            let mut reads = chain.iter().filter(|wr| matches!(wr.op, SendOp::Read(_)));
            let open = |wr: &SendWr| wr.sges.as_slice().iter().all(|sge| self.sinks.contains(&sge.local_key().0));
            assert!(reads.all(open), "a Read into a region that is no sink");
        }
        let what = (Call::PostSend, "ibv_post_send", "send");
        let mut chain = chain.to_vec();
        for wr in chain.iter_mut().filter(|wr| wr.op == SendOp::Send) {
            let Some(key) = self.gate.takes_key() else { break };
            wr.op = SendOp::SendInvalidate(key);
        }
        let chain = &chain[..];
        self.post(what, chain, |inner, chain| inner.post_send(qp, chain))
    }
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        self.pass(Call::PollCq, "ibv_poll_cq")?;
        let before = out.len();
        let polled = self.inner.poll_cq(cq, max, out)?;
        if self.has_failed(cq) {
            out.truncate(before);
            return Ok(0);
        }
        if let Some(last) = out.last_mut().filter(|_| polled > 0) {
            if let Some(failure) = self.gate.takes_completion() {
                (last.status, last.vendor_error) = (failure.status, failure.vendor_error);
            }
        }
        Ok(polled)
    }
    fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()> {
        self.pass(Call::ReqNotify, "ibv_req_notify_cq")?;
        self.inner.req_notify(cq, notify)
    }
    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        self.pass(Call::NextCompletionEvent, "ibv_get_cq_event")?;
        self.inner.next_completion_event(device)
    }
    fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends> {
        // If the next message must invalidate a key, this method returns `None`, so that the message is posted as a work request.
        if self.gate.is_to_take_key() { None } else { self.inner.immediate_sends() }
    }
    roles!(
        own:
        shared_receives remote_keys liveness extensions foreign_memory adapter device_events
    );
    roles!(none: handover off_loop_registration exchange);
}

impl SharedReceives for Forward {
    fn create_srq(&mut self, device: DeviceId, attr: &SrqAttr) -> Result<SrqId> {
        self.pass(Call::CreateSrq, "ibv_create_srq")?;
        let srq = self.inner.shared_receives().expect(HAS_ROLES).create_srq(device, attr)?;
        self.gate.note(|objects| objects.shared_queues += 1);
        self.shared_queue = Some(srq);
        Ok(srq)
    }
    fn destroy_srq(&mut self, srq: SrqId) -> Result<()> {
        self.pass(Call::DestroySrq, "ibv_destroy_srq")?;
        let destroyed = self.inner.shared_receives().expect(HAS_ROLES).destroy_srq(srq);
        // Destroying a shared receive queue may fail: a queue pair that the device has refused to destroy still uses the queue.
        destroyed.inspect_err(|_| self.gate.note_failed(Call::DestroySrq))?;
        self.gate.note(|objects| objects.shared_queues -= 1);
        Ok(())
    }
    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        let what = (Call::PostSrqRecv, "ibv_post_srq_recv", "shared receive");
        self.post(what, chain, |inner, chain| inner.shared_receives().expect(HAS_ROLES).post_srq_recv(srq, chain))
    }
}

impl RemoteKeys for Forward {
    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<bool> {
        self.pass(Call::Restrict, "ibv_bind_mw")?;
        self.inner.remote_keys().expect(HAS_ROLES).restrict(region, qp)
    }
    fn invalidate(&mut self, region: MrId) -> Result<()> {
        self.taken_back(Call::Invalidate, region)?;
        self.inner.remote_keys().expect(HAS_ROLES).invalidate(region)
    }
}

impl Liveness for Forward {
    fn last_heard(&self, qp: QpId) -> Option<Instant> {
        self.inner.liveness().expect(HAS_ROLES).last_heard(qp)
    }
    fn has_unread(&self, qp: QpId) -> bool {
        self.inner.liveness().expect(HAS_ROLES).has_unread(qp)
    }
}

impl Extensions for Forward {
    fn enable_extensions(&mut self, qp: QpId) -> Result<()> {
        self.pass(Call::EnableExtensions, "ibv_modify_qp")?;
        self.inner.extensions().expect(HAS_ROLES).enable_extensions(qp)
    }
}

impl ForeignMemory for Forward {
    /// Registers ordinary memory instead of a dma-buf. The reactor never reads a dma-buf, so any memory suffices.
    fn register_dmabuf(
        &mut self,
        device: DeviceId,
        _: std::os::fd::BorrowedFd<'_>,
        _: u64,
        len: usize,
        _: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        self.pass(Call::Register, "ibv_reg_dmabuf_mr")?;
        let memory = Arc::new(Memory::new(len).expect("memory"));
        let region = self.inner.register(device, &memory, 0..len, access)?;
        Ok(self.registered(region))
    }
}

impl Adapter for Forward {
    fn has_failed(&self, cq: CqId) -> bool {
        self.queues.contains(&(cq, true))
    }
    fn acknowledgements(&self) -> u64 {
        0
    }
}

impl DeviceEvents for Forward {
    fn next_device_event(&mut self) -> Option<AsyncEvent> {
        self.hear();
        self.said.1.pop_front()
    }
}
