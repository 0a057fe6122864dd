//! Macros that write the methods of `Provider` for providers that forward most calls to another
//! one, and for roles. `pass` has all of these methods, written out.

pub(crate) use std::net::{IpAddr, SocketAddr};
pub(crate) use std::{ops::Range, os::fd::RawFd, sync::Arc, time::Instant};

pub(crate) use rdma_transport::roles::*;
pub(crate) use rdma_transport::*;

/// The result of posting a chain.
pub(crate) type Post<T> = std::result::Result<T, PostError>;

/// Writes the named methods, each of which forwards its call to a field:
/// `delegate!(self.inner: name device)`. If a role is named, the provider has that of the field.
macro_rules! delegate {
    (self.$field:tt: $($method:ident)+) => { $( $crate::delegate::delegate!(@$method $field); )+ };
    (@name $f:tt) => {
        fn name(&self) -> &'static str { self.$f.name() }
    };
    (@device $f:tt) => {
        fn device(&self, device: DeviceId) -> Option<&DeviceInfo> { self.$f.device(device) }
    };
    (@device_at $f:tt) => {
        fn device_at(&mut self, address: IpAddr) -> Result<DeviceId> { self.$f.device_at(address) }
    };
    (@channel $f:tt) => {
        fn channel(&self, channel: Channel) -> Result<RawFd> { self.$f.channel(channel) }
    };
    (@next_deadline $f:tt) => {
        fn next_deadline(&self) -> Option<Instant> { self.$f.next_deadline() }
    };
    (@progress $f:tt) => {
        fn progress(&mut self, now: Instant, drive: Drive) -> bool { self.$f.progress(now, drive) }
    };
    (@listen $f:tt) => {
        fn listen(&mut self, at: SocketAddr, options: &ListenParam) -> Result<CmId> { self.$f.listen(at, options) }
    };
    (@local_address $f:tt) => {
        fn local_address(&self, id: CmId) -> Option<SocketAddr> { self.$f.local_address(id) }
    };
    (@resolve $f:tt) => {
        fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> { self.$f.resolve(peer, options, deadline) }
    };
    (@connect $f:tt) => {
        fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> { self.$f.connect(id, param) }
    };
    (@accept $f:tt) => {
        fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> { self.$f.accept(id, param, now) }
    };
    (@reject $f:tt) => {
        fn reject(&mut self, id: CmId, data: &[u8], now: Instant) -> Result<()> { self.$f.reject(id, data, now) }
    };
    (@disconnect $f:tt) => {
        fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> { self.$f.disconnect(id, now) }
    };
    (@destroy_id $f:tt) => {
        fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> { self.$f.destroy_id(id, now) }
    };
    (@next_cm_event $f:tt) => {
        fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> { self.$f.next_cm_event(now) }
    };
    (@register $f:tt) => {
        fn register(&mut self, on: DeviceId, of: &Arc<Memory>, at: Range<usize>, access: Access) -> Result<MemoryRegion> { self.$f.register(on, of, at, access) }
    };
    (@deregister $f:tt) => {
        fn deregister(&mut self, region: MrId) -> Result<()> { self.$f.deregister(region) }
    };
    (@create_cq $f:tt) => {
        fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> { self.$f.create_cq(device, attr) }
    };
    (@destroy_cq $f:tt) => {
        fn destroy_cq(&mut self, cq: CqId) -> Result<()> { self.$f.destroy_cq(cq) }
    };
    (@create_qp $f:tt) => {
        fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> { self.$f.create_qp(id, attr) }
    };
    (@post_recv $f:tt) => {
        fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> Post<()> { self.$f.post_recv(qp, chain) }
    };
    (@post_send $f:tt) => {
        fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> Post<Posted> { self.$f.post_send(qp, chain) }
    };
    (@poll_cq $f:tt) => {
        fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> { self.$f.poll_cq(cq, max, out) }
    };
    (@req_notify $f:tt) => {
        fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()> { self.$f.req_notify(cq, notify) }
    };
    (@next_completion_event $f:tt) => {
        fn next_completion_event(&mut self, on: DeviceId) -> Result<Option<CqId>> { self.$f.next_completion_event(on) }
    };
    (@$role:ident $f:tt) => { $crate::delegate::role!($role inner $f); };
}

/// Writes the methods of the named roles: `own` are those that the provider implements, and `none`
/// those that it does not have.
macro_rules! roles {
    ($how:ident: $($role:ident)+) => { $( $crate::delegate::role!($role $how); )+ };
}

macro_rules! role {
    (shared_receives $($how:tt)+) => {
        fn shared_receives(&mut self) -> Option<&mut dyn SharedReceives> { $crate::delegate::role!(@$($how)+ self shared_receives) }
    };
    (remote_keys $($how:tt)+) => {
        fn remote_keys(&mut self) -> Option<&mut dyn RemoteKeys> { $crate::delegate::role!(@$($how)+ self remote_keys) }
    };
    (liveness $($how:tt)+) => {
        fn liveness(&self) -> Option<&dyn Liveness> { $crate::delegate::role!(@$($how)+ self liveness) }
    };
    (extensions $($how:tt)+) => {
        fn extensions(&mut self) -> Option<&mut dyn Extensions> { $crate::delegate::role!(@$($how)+ self extensions) }
    };
    (handover $($how:tt)+) => {
        fn handover(&mut self) -> Option<&mut dyn Handover> { $crate::delegate::role!(@$($how)+ self handover) }
    };
    (off_loop_registration $($how:tt)+) => {
        fn off_loop_registration(&mut self) -> Option<&mut dyn OffLoopRegistration> { $crate::delegate::role!(@$($how)+ self off_loop_registration) }
    };
    (foreign_memory $($how:tt)+) => {
        fn foreign_memory(&mut self) -> Option<&mut dyn ForeignMemory> { $crate::delegate::role!(@$($how)+ self foreign_memory) }
    };
    (datagrams $($how:tt)+) => {
        fn datagrams(&mut self) -> Option<&mut dyn Datagrams> { $crate::delegate::role!(@$($how)+ self datagrams) }
    };
    (adapter $($how:tt)+) => {
        fn adapter(&self) -> Option<&dyn Adapter> { $crate::delegate::role!(@$($how)+ self adapter) }
    };
    (immediate_sends $($how:tt)+) => {
        fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends> { $crate::delegate::role!(@$($how)+ self immediate_sends) }
    };
    (shared_memory $($how:tt)+) => {
        fn shared_memory(&mut self) -> Option<&mut dyn SharedMemory> { $crate::delegate::role!(@$($how)+ self shared_memory) }
    };
    (exchange $($how:tt)+) => {
        fn exchange(&mut self) -> Option<&mut dyn Exchange> { $crate::delegate::role!(@$($how)+ self exchange) }
    };
    (device_events $($how:tt)+) => {
        fn device_events(&mut self) -> Option<&mut dyn DeviceEvents> { $crate::delegate::role!(@$($how)+ self device_events) }
    };
    (@none $self:ident $role:ident) => { None };
    (@own $self:ident $role:ident) => { Some($self) };
    (@inner $f:tt $self:ident $role:ident) => { $self.$f.$role() };
}

pub(crate) use {delegate, role, roles};
