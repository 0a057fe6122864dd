//! Reactors of the tests' own providers, with the poller and the clock of the system.

use rdma_reactor::transport::iwarp::{Iwarp, IwarpConfig, TcpNet};
use rdma_reactor::transport::provider::Provider;
use rdma_reactor::{Config, MioPoller, Parts, Reactor, SystemClock, system_entropy};

/// The embedded provider with default settings, for a provider that is put in front of it.
pub(crate) fn embedded() -> Iwarp<TcpNet> {
    let net = TcpNet::new().expect("the channels");
    Iwarp::new(IwarpConfig::default(), net, system_entropy()).expect("a provider")
}

/// A reactor on `provider`.
pub(crate) fn reactor_on(provider: impl Provider + 'static, config: Config) -> Reactor {
    let poller = Box::new(MioPoller::new().expect("a poller"));
    let parts = Parts { provider: Box::new(provider), poller, clock: Box::new(SystemClock) };
    Reactor::with_parts(config, parts).expect("a reactor")
}
