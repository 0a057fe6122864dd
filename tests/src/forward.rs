//! A provider in front of the embedded one, which can lack features, have other limits, write down its calls, and fail.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rdma_reactor::transport::caps::{Capabilities, Features};
use rdma_reactor::transport::cm::{
    CmEvent, CmEventKind, CmId, ConnectParam, ListenOptions, PathOptions, ReadDepth, Retries,
};
use rdma_reactor::transport::iwarp::{Iwarp, IwarpConfig, TcpNet};
use rdma_reactor::transport::mem::Memory;
use rdma_reactor::transport::mr::{MemoryRegion, MrId};
use rdma_reactor::transport::provider::{CqId, DeviceId, DeviceInfo, Drive, PostError, Provider};
use rdma_reactor::transport::qp::{QpAttr, QpId};
use rdma_reactor::transport::wc::{WcStatus, WorkCompletion};
use rdma_reactor::transport::wr::{RecvWr, SendOp, SendWr};
use rdma_reactor::transport::{Access, Error, Result};
use rdma_reactor::{Config, MioPoller, Parts, Reactor, SystemClock, system_entropy};

/// The calls that a device serves until it fails. Clones belong to the same device.
#[derive(Clone, Debug)]
pub struct Health {
    /// Number of times that completion queues can still be polled.
    polls: Arc<AtomicU32>,
    /// Number of times that completion queues can still be armed.
    arms: Arc<AtomicU32>,
    /// The device's code for the failure of the next completion; 0 if that one is to be as it is.
    failure: Arc<AtomicU32>,
    /// The address of the first listener is about to move.
    moves: Arc<AtomicBool>,
}

impl Default for Health {
    fn default() -> Self {
        let ever = || Arc::new(AtomicU32::new(u32::MAX));
        Self { polls: ever(), arms: ever(), failure: Arc::default(), moves: Arc::default() }
    }
}

impl Health {
    /// Lets polls of completion queues fail after so many more.
    pub fn fail_after_polls(&self, polls: u32) {
        self.polls.store(polls, Ordering::Relaxed);
    }

    /// Lets arming of completion queues fail after so many more times.
    pub fn fail_after_arms(&self, arms: u32) {
        self.arms.store(arms, Ordering::Relaxed);
    }

    /// Lets the address of the first listener move, as a bond does that fails over: the listener is told, and hears no more.
    pub fn move_address(&self) {
        self.moves.store(true, Ordering::Relaxed);
    }

    /// Lets the next completion be a failure with this code of the device.
    pub fn fail_completion(&self, code: u32) {
        self.failure.store(code, Ordering::Relaxed);
    }
}

/// Counts a call, or fails it if there were enough.
fn count(left: &AtomicU32, call: &'static str) -> Result<()> {
    match left.load(Ordering::Relaxed) {
        u32::MAX => Ok(()),
        0 => Err(Error::io(call, io::Error::other("the device is ill"))),
        some => {
            left.store(some - 1, Ordering::Relaxed);
            Ok(())
        }
    }
}

/// A setting that has arrived at the provider.
#[derive(Clone, Debug)]
pub enum Asked {
    /// `listen_with`.
    Listen(ListenOptions),
    /// `resolve_with`.
    Resolve(PathOptions),
    /// `connect`.
    Connect(Retries, ReadDepth),
    /// `accept`.
    Accept(Retries, ReadDepth),
    /// `create_cq_on`: the number of entries, and the completion vector.
    CompletionQueue(u32, u32),
    /// `create_qp`.
    QueuePair(QpAttr),
    /// `register_range`.
    Register(Access),
}

/// What was asked for, oldest first. The clones are of one device.
#[derive(Clone, Debug, Default)]
pub struct Record(Arc<Mutex<Vec<Asked>>>);

impl Record {
    fn note(&self, asked: Asked) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(asked);
    }

    /// Takes what was written down.
    #[must_use]
    pub fn take(&self) -> Vec<Asked> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

const fn service(param: &ConnectParam<'_>) -> (Retries, ReadDepth) {
    let ConnectParam { responder_resources, initiator_depth, retries, .. } = *param;
    (retries, ReadDepth { responder_resources, initiator_depth })
}

/// See the [module](self).
#[derive(Debug)]
pub struct Forward {
    inner: Iwarp<TcpNet>,
    info: DeviceInfo,
    health: Health,
    record: Record,
    /// The keys of regions that may be read into.
    sinks: BTreeSet<u32>,
    first_listener: Option<CmId>,
}

impl Forward {
    /// Makes a reactor on this provider.
    ///
    /// # Panics
    /// When the system has no descriptors left, or a setting is out of its range.
    #[must_use]
    pub fn reactor(config: Config, lacks: Features, health: &Health) -> Reactor {
        Self::open(config, |capabilities| capabilities.features.remove(lacks), health.clone(), Record::default())
    }

    /// A reactor on a device that reads into open sinks only, as irdma and cxgb4 do on iWARP.
    ///
    /// # Panics
    /// As [`Forward::reactor`]; and the reactor's turns do when they post a Read into another region.
    #[must_use]
    pub fn with_open_sinks(config: Config) -> Reactor {
        let limits = |capabilities: &mut Capabilities| capabilities.features |= Features::OPEN_READ_SINKS;
        Self::open(config, limits, Health::default(), Record::default())
    }

    /// A reactor on one that writes down what it is asked for, on a device with other limits.
    ///
    /// # Panics
    /// As [`Forward::reactor`].
    #[must_use]
    pub fn recording(config: Config, limits: impl FnOnce(&mut Capabilities), record: &Record) -> Reactor {
        Self::open(config, limits, Health::default(), record.clone())
    }

    fn open(config: Config, limits: impl FnOnce(&mut Capabilities), health: Health, record: Record) -> Reactor {
        let net = TcpNet::new().expect("the channels");
        let inner = Iwarp::new(IwarpConfig::default(), net, system_entropy()).expect("a provider");
        let mut info = inner.device(DeviceId(0)).expect("its device").clone();
        limits(&mut info.capabilities);
        let parts = Parts {
            provider: Box::new(Self { inner, info, health, record, sinks: BTreeSet::new(), first_listener: None }),
            poller: Box::new(MioPoller::new().expect("a poller")),
            clock: Box::new(SystemClock),
        };
        Reactor::with_parts(config, parts).expect("a reactor")
    }
}

// SAFETY: every call is forwarded to the provider inside, and answers are passed on as they are.
unsafe impl Provider for Forward {
    fn name(&self) -> &'static str {
        "forward"
    }
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> {
        (device == DeviceId(0)).then_some(&self.info)
    }
    fn cm_channel(&self) -> RawFd {
        self.inner.cm_channel()
    }
    fn completion_channel(&self, device: DeviceId) -> Result<RawFd> {
        self.inner.completion_channel(device)
    }
    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
    }
    fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        self.inner.progress(now, drive)
    }
    fn listen(&mut self, address: SocketAddr, backlog: u32) -> Result<CmId> {
        self.inner.listen(address, backlog)
    }
    fn local_address(&self, id: CmId) -> Option<SocketAddr> {
        self.inner.local_address(id)
    }
    fn resolve(&mut self, peer: SocketAddr, deadline: Instant) -> Result<CmId> {
        self.inner.resolve(peer, deadline)
    }
    fn listen_with(&mut self, address: SocketAddr, backlog: u32, options: &ListenOptions) -> Result<CmId> {
        self.record.note(Asked::Listen(options.clone()));
        let listener = self.inner.listen_with(address, backlog, options)?;
        self.first_listener.get_or_insert(listener);
        Ok(listener)
    }
    fn resolve_with(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        self.record.note(Asked::Resolve(options.clone()));
        self.inner.resolve_with(peer, options, deadline)
    }
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        let (retries, depth) = service(param);
        self.record.note(Asked::Connect(retries, depth));
        self.inner.connect(id, param)
    }
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        let (retries, depth) = service(param);
        self.record.note(Asked::Accept(retries, depth));
        self.inner.accept(id, param, now)
    }
    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        self.inner.reject(id, private_data, now)
    }
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        self.inner.disconnect(id, now)
    }
    fn destroy_id(&mut self, id: CmId, now: Instant) {
        self.inner.destroy_id(id, now);
    }
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        if let Some(id) = self.first_listener
            && self.health.moves.swap(false, Ordering::Relaxed)
        {
            self.inner.destroy_id(id, now);
            return Ok(Some(CmEvent { id, kind: CmEventKind::AddressChange }));
        }
        self.inner.next_cm_event(now)
    }
    fn register(&mut self, device: DeviceId, memory: &Arc<Memory>, access: Access) -> Result<MemoryRegion> {
        self.inner.register(device, memory, access)
    }
    fn register_range(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion> {
        self.record.note(Asked::Register(access));
        let registered = self.inner.register_range(device, memory, range, access)?;
        if access.contains(Access::READ_SINK) {
            self.sinks.insert(registered.local_key.0);
        }
        Ok(registered)
    }
    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<()> {
        self.inner.restrict(region, qp)
    }
    fn invalidate(&mut self, region: MrId) -> Result<()> {
        self.inner.invalidate(region)
    }
    fn deregister(&mut self, region: MrId) -> Result<()> {
        self.inner.deregister(region)
    }
    fn create_cq(&mut self, device: DeviceId, entries: u32) -> Result<CqId> {
        self.inner.create_cq(device, entries)
    }
    fn create_cq_on(&mut self, device: DeviceId, entries: u32, vector: u32) -> Result<CqId> {
        if vector >= self.info.capabilities.completion_vectors {
            let range = "below the device's completion_vectors";
            return Err(Error::OutOfRange { what: "completion vector", value: vector.into(), range });
        }
        self.record.note(Asked::CompletionQueue(entries, vector));
        self.inner.create_cq(device, entries)
    }
    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        self.inner.destroy_cq(cq)
    }
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        self.record.note(Asked::QueuePair(*attr));
        self.inner.create_qp(id, attr)
    }
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        self.inner.post_recv(qp, chain)
    }
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<(), PostError> {
        if self.info.capabilities.features.contains(Features::OPEN_READ_SINKS) {
            let mut reads = chain.iter().filter(|wr| matches!(wr.op, SendOp::Read(_)));
            let open = |wr: &SendWr| wr.sges.as_slice().iter().all(|sge| self.sinks.contains(&sge.local_key().0));
            assert!(reads.all(open), "a Read into a region that is no sink");
        }
        self.inner.post_send(qp, chain)
    }
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        count(&self.health.polls, "ibv_poll_cq")?;
        let polled = self.inner.poll_cq(cq, max, out)?;
        if polled > 0
            && let code @ 1.. = self.health.failure.load(Ordering::Relaxed)
            && let Some(last) = out.last_mut()
        {
            self.health.failure.store(0, Ordering::Relaxed);
            (last.status, last.vendor_error) = (WcStatus::LocalProtectionError, code);
        }
        Ok(polled)
    }
    fn req_notify(&mut self, cq: CqId) -> Result<()> {
        count(&self.health.arms, "ibv_req_notify_cq")?;
        self.inner.req_notify(cq)
    }
    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        self.inner.next_completion_event(device)
    }
}
