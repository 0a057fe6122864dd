//! A provider that forwards all calls to another one, but always listens and connects by exchange: the addresses of queue pairs are
//! exchanged over TCP, without rdma_cm. A test suite that runs on this provider tests exchanges.

use std::net::SocketAddr;
use std::time::Instant;

use crate::delegate::{Delegate, Delegated};
use rdma_transport::roles::*;
use rdma_transport::*;

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
    Box::new(Delegated(Exchanged(verbs.with_entropy(rdma_reactor::system_entropy()))))
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
unsafe impl<P: Provider> Delegate for Exchanged<P> {
    type Inner = P;
    fn inner(&self) -> &P { &self.0 }
    fn inner_mut(&mut self) -> &mut P { &mut self.0 }
    fn listen(&mut self, at: SocketAddr, options: &ListenParam) -> Result<CmId> { self.role().listen_exchange(at, options, &ExchangeOptions::default()) }
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        self.role().resolve_exchange(peer, options, &ExchangeOptions::default(), deadline)
    }
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
