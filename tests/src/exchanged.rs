//! A provider that forwards all calls to another one, but always listens and connects by exchange: the addresses of queue pairs are
//! exchanged over TCP, without rdma_cm. A test suite that runs on this provider tests exchanges.

use crate::delegate::*;

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
    delegate!(
        self.0:
        name device device_at channel next_deadline progress local_address connect accept reject
        disconnect destroy_id next_cm_event register deregister create_cq destroy_cq create_qp
        post_recv post_send poll_cq req_notify next_completion_event shared_receives remote_keys
        liveness extensions handover off_loop_registration foreign_memory datagrams adapter
        immediate_sends shared_memory exchange device_events
    );
    fn listen(&mut self, at: SocketAddr, options: &ListenParam) -> Result<CmId> { self.role().listen_exchange(at, options, &ExchangeOptions::default()) }
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        self.role().resolve_exchange(peer, options, &ExchangeOptions::default(), deadline)
    }
}
