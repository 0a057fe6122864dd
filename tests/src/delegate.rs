//! Providers that forward most calls to another one. Such a provider implements [`Delegate`] with
//! the methods that it changes, and is used as [`Delegated`].

use std::net::{IpAddr, SocketAddr};
use std::{ops::Range, os::fd::RawFd, sync::Arc, time::Instant};

use rdma_transport::roles::*;
use rdma_transport::*;

type Post<T> = std::result::Result<T, PostError>;

/// The methods of [`Provider`], each of which forwards its call to another provider. The roles are
/// not forwarded: a provider that replaces handles would have to replace them in the roles, too.
///
/// # Safety
/// The rules of [`Provider`] apply.
#[allow(missing_docs, reason = "the methods are those of `Provider`")]
pub unsafe trait Delegate: Send + std::fmt::Debug {
    /// The type of the provider to which calls are forwarded.
    type Inner: Provider;
    /// Returns the provider to which calls are forwarded.
    fn inner(&self) -> &Self::Inner;
    /// Returns the provider to which calls are forwarded.
    fn inner_mut(&mut self) -> &mut Self::Inner;

    fn name(&self) -> &'static str { self.inner().name() }
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> { self.inner().device(device) }
    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId> { self.inner_mut().device_at(address) }
    fn channel(&self, channel: Channel) -> Result<RawFd> { self.inner().channel(channel) }
    fn next_deadline(&self) -> Option<Instant> { self.inner().next_deadline() }
    fn progress(&mut self, now: Instant, drive: Drive) -> bool { self.inner_mut().progress(now, drive) }
    fn listen(&mut self, at: SocketAddr, options: &ListenParam) -> Result<CmId> { self.inner_mut().listen(at, options) }
    fn local_address(&self, id: CmId) -> Option<SocketAddr> { self.inner().local_address(id) }
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        self.inner_mut().resolve(peer, options, deadline)
    }
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> { self.inner_mut().connect(id, param) }
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> { self.inner_mut().accept(id, param, now) }
    fn reject(&mut self, id: CmId, data: &[u8], now: Instant) -> Result<()> { self.inner_mut().reject(id, data, now) }
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> { self.inner_mut().disconnect(id, now) }
    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> { self.inner_mut().destroy_id(id, now) }
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> { self.inner_mut().next_cm_event(now) }
    fn register(&mut self, on: DeviceId, of: &Arc<Memory>, at: Range<usize>, access: Access) -> Result<MemoryRegion> {
        self.inner_mut().register(on, of, at, access)
    }
    fn deregister(&mut self, region: MrId) -> Result<()> { self.inner_mut().deregister(region) }
    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> { self.inner_mut().create_cq(device, attr) }
    fn destroy_cq(&mut self, cq: CqId) -> Result<()> { self.inner_mut().destroy_cq(cq) }
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> { self.inner_mut().create_qp(id, attr) }
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> Post<()> { self.inner_mut().post_recv(qp, chain) }
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> Post<Posted> { self.inner_mut().post_send(qp, chain) }
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> { self.inner_mut().poll_cq(cq, max, out) }
    fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()> { self.inner_mut().req_notify(cq, notify) }
    fn next_completion_event(&mut self, on: DeviceId) -> Result<Option<CqId>> { self.inner_mut().next_completion_event(on) }
    fn shared_receives(&mut self) -> Option<&mut dyn SharedReceives> { None }
    fn remote_keys(&mut self) -> Option<&mut dyn RemoteKeys> { None }
    fn liveness(&self) -> Option<&dyn Liveness> { None }
    fn extensions(&mut self) -> Option<&mut dyn Extensions> { None }
    fn handover(&mut self) -> Option<&mut dyn Handover> { None }
    fn off_loop_registration(&mut self) -> Option<&mut dyn OffLoopRegistration> { None }
    fn foreign_memory(&mut self) -> Option<&mut dyn ForeignMemory> { None }
    fn datagrams(&mut self) -> Option<&mut dyn Datagrams> { None }
    fn adapter(&self) -> Option<&dyn Adapter> { None }
    fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends> { None }
    fn shared_memory(&mut self) -> Option<&mut dyn SharedMemory> { None }
    fn exchange(&mut self) -> Option<&mut dyn Exchange> { None }
    fn device_events(&mut self) -> Option<&mut dyn DeviceEvents> { None }
}

/// The provider that a [`Delegate`] is.
#[derive(Debug)]
pub struct Delegated<D>(pub D);

// SAFETY: all calls are forwarded to the delegate, which follows the rules.
unsafe impl<D: Delegate> Provider for Delegated<D> {
    fn name(&self) -> &'static str { self.0.name() }
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> { self.0.device(device) }
    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId> { self.0.device_at(address) }
    fn channel(&self, channel: Channel) -> Result<RawFd> { self.0.channel(channel) }
    fn next_deadline(&self) -> Option<Instant> { self.0.next_deadline() }
    fn progress(&mut self, now: Instant, drive: Drive) -> bool { self.0.progress(now, drive) }
    fn listen(&mut self, at: SocketAddr, options: &ListenParam) -> Result<CmId> { self.0.listen(at, options) }
    fn local_address(&self, id: CmId) -> Option<SocketAddr> { self.0.local_address(id) }
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        self.0.resolve(peer, options, deadline)
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
