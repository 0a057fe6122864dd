//! The embedded provider behind another one, which can lack features and fall ill.

use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use rdma_reactor::transport::caps::Features;
use rdma_reactor::transport::cm::{CmEvent, CmId, ConnectParam};
use rdma_reactor::transport::iwarp::{Iwarp, IwarpConfig, TcpNet};
use rdma_reactor::transport::mem::Memory;
use rdma_reactor::transport::mr::{MemoryRegion, MrId};
use rdma_reactor::transport::provider::{CqId, DeviceId, DeviceInfo, Drive, PostError, Provider};
use rdma_reactor::transport::qp::{QpAttr, QpId};
use rdma_reactor::transport::wc::WorkCompletion;
use rdma_reactor::transport::wr::{RecvWr, SendWr};
use rdma_reactor::transport::{Access, Error, Result};
use rdma_reactor::{Config, MioPoller, Parts, Reactor, SystemClock, system_entropy};

/// What a device does until it falls ill. The clones are of one device.
#[derive(Clone, Debug)]
pub struct Health {
    /// Times that completion queues can be polled still.
    polls: Arc<AtomicU32>,
    /// Times that they can be armed still.
    arms: Arc<AtomicU32>,
}

impl Default for Health {
    fn default() -> Self {
        let ever = || Arc::new(AtomicU32::new(u32::MAX));
        Self { polls: ever(), arms: ever() }
    }
}

impl Health {
    /// Completion queues can be polled so many times from now on.
    pub fn fail_after_polls(&self, polls: u32) {
        self.polls.store(polls, Ordering::Relaxed);
    }

    /// Completion queues can be armed so many times from now on.
    pub fn fail_after_arms(&self, arms: u32) {
        self.arms.store(arms, Ordering::Relaxed);
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

/// See the [module](self).
#[derive(Debug)]
pub struct Forward {
    inner: Iwarp<TcpNet>,
    info: DeviceInfo,
    health: Health,
}

impl Forward {
    /// A reactor on it.
    ///
    /// # Panics
    /// When the system has no descriptors left, or a setting is out of its range.
    #[must_use]
    pub fn reactor(config: Config, lacks: Features, health: &Health) -> Reactor {
        let net = TcpNet::new().expect("the channels");
        let inner = Iwarp::new(IwarpConfig::default(), net, system_entropy()).expect("a provider");
        let mut info = inner.device(DeviceId(0)).expect("its device").clone();
        info.capabilities.features.remove(lacks);
        let parts = Parts {
            provider: Box::new(Self { inner, info, health: health.clone() }),
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
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        self.inner.connect(id, param)
    }
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
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
        self.inner.next_cm_event(now)
    }
    fn register(&mut self, device: DeviceId, memory: &Arc<Memory>, access: Access) -> Result<MemoryRegion> {
        self.inner.register(device, memory, access)
    }
    fn deregister(&mut self, region: MrId) -> Result<()> {
        self.inner.deregister(region)
    }
    fn create_cq(&mut self, device: DeviceId, entries: u32) -> Result<CqId> {
        self.inner.create_cq(device, entries)
    }
    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        self.inner.destroy_cq(cq)
    }
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        self.inner.create_qp(id, attr)
    }
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        self.inner.post_recv(qp, chain)
    }
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<(), PostError> {
        self.inner.post_send(qp, chain)
    }
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        count(&self.health.polls, "ibv_poll_cq")?;
        self.inner.poll_cq(cq, max, out)
    }
    fn req_notify(&mut self, cq: CqId) -> Result<()> {
        count(&self.health.arms, "ibv_req_notify_cq")?;
        self.inner.req_notify(cq)
    }
    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        self.inner.next_completion_event(device)
    }
}
