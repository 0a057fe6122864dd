//! A provider that forwards all calls to another one, but always listens and connects by exchange: the addresses of queue pairs are
//! exchanged over TCP, without rdma_cm. A test suite that runs on this provider tests exchanges.

use std::net::{IpAddr, SocketAddr};
use std::{ops::Range, os::fd::RawFd, sync::Arc, time::Instant};

use rdma_transport::roles::*;
use rdma_transport::*;

type Post<T> = std::result::Result<T, PostError>;

/// The provider that connects by exchange, see the [module](self). The field is the inner provider, to which calls are forwarded.
#[derive(Debug)]
pub struct Exchanged<P>(pub P);

impl<P: Provider> Exchanged<P> {
    fn role(&mut self) -> &mut dyn Exchange { self.0.exchange().expect("the role") }
}

/// Returns a provider of this host's devices that does not use the connection manager.
///
/// # Panics
/// Panics if the host has no device.
#[cfg(feature = "verbs")]
#[must_use]
pub fn provider() -> Box<dyn Provider> {
    let verbs = rdma_transport_verbs::Verbs::open().expect("a device");
    Box::new(Exchanged(verbs.with_entropy(rdma_reactor::system_entropy())))
}

/// Returns a reactor on this host's devices that connects by exchange.
///
/// # Errors
/// This function always succeeds. Its type is that of `Setup::reactor`.
#[cfg(feature = "verbs")]
pub fn reactor(config: rdma_reactor::Config) -> std::result::Result<rdma_reactor::Reactor, rdma_reactor::Error> {
    Ok(crate::parts::reactor_on_all(vec![provider()], config))
}

// SAFETY: all calls are forwarded to the inner provider, and its answers are returned unchanged.
unsafe impl<P: Provider> Provider for Exchanged<P> {
    fn name(&self) -> &'static str { self.0.name() }
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> { self.0.device(device) }
    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId> { self.0.device_at(address) }
    fn channel(&self, channel: Channel) -> Result<RawFd> { self.0.channel(channel) }
    fn next_deadline(&self) -> Option<Instant> { self.0.next_deadline() }
    fn progress(&mut self, now: Instant, drive: Drive) -> bool { self.0.progress(now, drive) }
    fn listen(&mut self, at: SocketAddr, options: &ListenParam) -> Result<CmId> { self.role().listen_exchange(at, options, &ExchangeOptions::default()) }
    fn local_address(&self, id: CmId) -> Option<SocketAddr> { self.0.local_address(id) }
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        self.role().resolve_exchange(peer, options, &ExchangeOptions::default(), deadline)
    }
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> { self.0.connect(id, param) }
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> { self.0.accept(id, param, now) }
    fn reject(&mut self, id: CmId, data: &[u8], now: Instant) -> Result<()> { self.0.reject(id, data, now) }
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> { self.0.disconnect(id, now) }
    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> { self.0.destroy_id(id, now) }
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> { self.0.next_cm_event(now) }
    fn register(&mut self, on: DeviceId, of: &Arc<Memory>, at: Range<usize>, access: Access) -> Result<MemoryRegion> {
        self.0.register(on, of, at, access)
    }
    fn deregister(&mut self, region: MrId) -> Result<()> { self.0.deregister(region) }
    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> { self.0.create_cq(device, attr) }
    fn destroy_cq(&mut self, cq: CqId) -> Result<()> { self.0.destroy_cq(cq) }
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> { self.0.create_qp(id, attr) }
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> Post<()> { self.0.post_recv(qp, chain) }
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> Post<Posted> { self.0.post_send(qp, chain) }
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> { self.0.poll_cq(cq, max, out) }
    fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()> { self.0.req_notify(cq, notify) }
    fn next_completion_event(&mut self, on: DeviceId) -> Result<Option<CqId>> { self.0.next_completion_event(on) }
    fn shared_receives(&mut self) -> Option<&mut dyn SharedReceives> { self.0.shared_receives() }
    fn remote_keys(&mut self) -> Option<&mut dyn RemoteKeys> { self.0.remote_keys() }
    fn liveness(&self) -> Option<&dyn Liveness> { self.0.liveness() }
    fn extensions(&mut self) -> Option<&mut dyn Extensions> { self.0.extensions() }
    fn handover(&mut self) -> Option<&mut dyn Handover> { self.0.handover() }
    fn off_loop_registration(&mut self) -> Option<&mut dyn OffLoopRegistration> { self.0.off_loop_registration() }
    fn foreign_memory(&mut self) -> Option<&mut dyn ForeignMemory> { self.0.foreign_memory() }
    fn datagrams(&mut self) -> Option<&mut dyn Datagrams> { self.0.datagrams() }
    fn adapter(&self) -> Option<&dyn Adapter> { self.0.adapter() }
    fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends> { self.0.immediate_sends() }
    fn shared_memory(&mut self) -> Option<&mut dyn SharedMemory> { self.0.shared_memory() }
    fn exchange(&mut self) -> Option<&mut dyn Exchange> { self.0.exchange() }
    fn device_events(&mut self) -> Option<&mut dyn DeviceEvents> { self.0.device_events() }
}
