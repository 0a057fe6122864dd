//! Reactors of the tests' own providers, with the poller and the clock of the system.

use rdma_reactor::transport::iwarp::{Iwarp, IwarpConfig, TcpNet};
use rdma_reactor::transport::provider::Provider;
use rdma_reactor::{Clock, Config, MioPoller, Parts, Reactor, SystemClock, system_entropy};

/// The embedded provider with default settings, for a provider that is put in front of it.
pub(crate) fn embedded() -> Iwarp<TcpNet> {
    embedded_with(IwarpConfig::default())
}

/// The embedded provider with other settings.
pub(crate) fn embedded_with(config: IwarpConfig) -> Iwarp<TcpNet> {
    let net = TcpNet::new().expect("the channels");
    Iwarp::new(config, net, system_entropy()).expect("a provider")
}

/// A reactor on one provider.
pub(crate) fn reactor_on(provider: impl Provider + 'static, config: Config) -> Reactor {
    reactor_on_all(vec![Box::new(provider)], config)
}

/// A reactor on several providers.
pub(crate) fn reactor_on_all(providers: Vec<Box<dyn Provider>>, config: Config) -> Reactor {
    reactor_with(providers, config, Box::new(SystemClock))
}

/// A reactor on several providers, with a clock of the caller's.
pub(crate) fn reactor_with(providers: Vec<Box<dyn Provider>>, config: Config, clock: Box<dyn Clock>) -> Reactor {
    let poller = Box::new(MioPoller::new().expect("a poller"));
    Reactor::with_parts(config, Parts { providers, poller, clock }).expect("a reactor")
}
