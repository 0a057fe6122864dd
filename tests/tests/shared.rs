//! Receives that connections share: what that saves, and a device that has no such queues.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_reactor::transport::caps::Features;
use rdma_reactor::transport::cm::{CmEvent, CmId, ConnectParam};
use rdma_reactor::transport::iwarp::{Iwarp, IwarpConfig, TcpNet};
use rdma_reactor::transport::mem::Memory;
use rdma_reactor::transport::mr::{MemoryRegion, MrId};
use rdma_reactor::transport::provider::{CqId, DeviceId, DeviceInfo, Drive, PostError, Provider};
use rdma_reactor::transport::qp::{QpAttr, QpId};
use rdma_reactor::transport::wc::WorkCompletion;
use rdma_reactor::transport::wr::{RecvWr, SendWr};
use rdma_reactor::transport::{Access, Result};
use rdma_reactor::{Config, ConnectError, MioPoller, Parts, Reactor, RejectReason, SystemClock, system_entropy};
use rdma_reactor_tests::conformance::harness::{Event, Pair, Probe, Setup, with_watchdog};

/// Bytes of the pool of a server with `count` idle connections.
fn idle(config: Config, client: Config, count: usize, stride: usize) -> usize {
    let mut p = Pair::with_configs(&Setup::iwarp(), config, client, Probe::default(), Probe::default());
    for _ in 0..count {
        p.client.context().connect(p.address).expect("connecting");
    }
    p.until("all are up", |p| p.s.live() == count && p.c.live() == count);
    let bytes = p.server.stats().pool_buffers * stride;
    p.finish();
    bytes
}

/// 500 idle connections at default settings (8 KiB messages, 64 receives and 64 sends each), with receives of their own
/// and with 2,880 for all; and with fewer sends, as becomes idle connections.
#[test]
fn idle_connections_take_less_memory() {
    with_watchdog("idle_connections_take_less_memory", || {
        const STRIDE: usize = 8256;
        let config = Setup::iwarp().config();
        let small = Setup::iwarp().config().receive_depth(5).send_depth(1).max_message(64);
        let mib = |config: Config| idle(config, small.clone(), 500, STRIDE) >> 20;
        let own = mib(config.clone());
        let shared = mib(config.clone().shared_receives(Some(2880)));
        let own_short = mib(config.clone().send_depth(4));
        let shared_short = mib(config.send_depth(4).shared_receives(Some(2880)));
        println!("MiB: {own} and {shared} shared; with 4 sends each {own_short} and {shared_short} shared");
        // A pool grows by slabs of 4 MiB.
        assert!((511..=516).contains(&own), "{own} MiB");
        assert!((279..=284).contains(&shared), "{shared} MiB");
        assert!((275..=280).contains(&own_short), "{own_short} MiB");
        assert!((43..=48).contains(&shared_short), "{shared_short} MiB");
    });
}

/// The embedded provider, as if it had none of what not every provider has.
#[derive(Debug)]
struct Plain {
    inner: Iwarp<TcpNet>,
    info: DeviceInfo,
}

impl Plain {
    fn reactor(config: Config) -> Reactor {
        let net = TcpNet::new().expect("the channels");
        let inner = Iwarp::new(IwarpConfig::default(), net, system_entropy()).expect("a provider");
        let mut info = inner.device(DeviceId(0)).expect("its device").clone();
        info.capabilities.features.remove(Features::SHARED_RECEIVE_QUEUE);
        let parts = Parts {
            provider: Box::new(Self { inner, info }),
            poller: Box::new(MioPoller::new().expect("a poller")),
            clock: Box::new(SystemClock),
        };
        Reactor::with_parts(config, parts).expect("a reactor")
    }
}

// SAFETY: every call is forwarded to the provider inside, and answers are passed on as they are.
unsafe impl Provider for Plain {
    fn name(&self) -> &'static str {
        "plain"
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
        self.inner.poll_cq(cq, max, out)
    }
    fn req_notify(&mut self, cq: CqId) -> Result<()> {
        self.inner.req_notify(cq)
    }
    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        self.inner.next_completion_event(device)
    }
}

/// A device without shared receive queues: who connects is told which provider lacks what, who is connected to refuses.
#[test]
fn a_device_without_shared_queues_says_so() {
    with_watchdog("a_device_without_shared_queues_says_so", || {
        let config = Setup::iwarp().config();
        let sharing = config.clone().shared_receives(Some(64));
        let error = |p: &Pair| {
            p.c.events
                .iter()
                .find_map(|e| if let Event::ConnectError(_, error) = e { Some(error.clone()) } else { None })
        };
        let mut p = Pair::new(&Setup::iwarp(), config.clone(), Probe::default(), Probe::default());
        p.client = Plain::reactor(sharing.clone());
        p.client.context().connect(p.address).expect("connecting");
        p.until("the error", |p| error(p).is_some());
        let lacks = ConnectError::Unsupported { provider: "plain", feature: "shared receive queues on this device" };
        assert_eq!(error(&p), Some(lacks.clone()));
        assert_eq!(lacks.to_string(), "the provider plain has no shared receive queues on this device");
        // Without the setting it goes without.
        p.client = Plain::reactor(config.clone());
        p.c = Probe::default();
        p.connect();
        p.finish();

        let mut p = Pair::new(&Setup::iwarp(), config, Probe::default(), Probe::default());
        p.server = Plain::reactor(sharing);
        let listener = p.server.context().listen(Setup::iwarp().address).expect("listening");
        p.address = p.server.context().local_address(listener).expect("its address");
        p.client.context().connect(p.address).expect("connecting");
        p.until("the refusal", |p| error(p).is_some());
        assert!(matches!(error(&p), Some(ConnectError::Rejected { reason: RejectReason::Busy, .. })));
        p.turn_for(Duration::from_millis(10));
        assert_eq!(p.server.stats().pool_buffers, 0, "nothing was spent on it");
        p.finish();
    });
}
