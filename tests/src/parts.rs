//! Makes reactors on providers of the tests. They use the poller and the clock of the system.

use rdma_reactor::transport::iwarp::{Iwarp, IwarpConfig, TcpNet};
use rdma_reactor::transport::provider::Provider;
use rdma_reactor::{Clock, Config, MioPoller, Parts, Reactor, SystemClock, system_entropy};

/// Returns the embedded provider with default settings. A test provider forwards to it.
pub(crate) fn embedded() -> Iwarp<TcpNet> {
    embedded_with(IwarpConfig::default())
}

/// Returns the embedded provider with the settings `config`.
pub(crate) fn embedded_with(config: IwarpConfig) -> Iwarp<TcpNet> {
    let net = TcpNet::new().expect("the channels");
    Iwarp::new(config, net, system_entropy()).expect("a provider")
}

/// Returns a reactor on one provider.
pub(crate) fn reactor_on(provider: impl Provider + 'static, config: Config) -> Reactor {
    reactor_on_all(vec![Box::new(provider)], config)
}

/// Returns a reactor that uses all of these providers.
pub(crate) fn reactor_on_all(providers: Vec<Box<dyn Provider>>, config: Config) -> Reactor {
    reactor_with(providers, config, Box::new(SystemClock))
}

/// Returns a reactor that uses all of these providers, and this clock.
pub(crate) fn reactor_with(providers: Vec<Box<dyn Provider>>, config: Config, clock: Box<dyn Clock>) -> Reactor {
    let poller = Box::new(MioPoller::new().expect("a poller"));
    Reactor::with_parts(config, Parts { providers, poller, clock }).expect("a reactor")
}
