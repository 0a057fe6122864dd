//! Opens the providers that a configuration selects.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdma_transport::provider::Provider;
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig, SharedMemoryPolicy, TcpConfig, TcpNet};

use crate::config::{Config, ProviderChoice};
use crate::error::Error;
use crate::seam::poller::Entropy;

/// Opens the providers that [`Config::provider`] selects, in the order in which a reactor tries them. For [`ProviderChoice::Auto`] these
/// are the RDMA devices, if there are any, and then the embedded provider.
///
/// A program with a provider of its own inserts it into the list, and passes the list to
/// [`Reactor::with_parts`](crate::Reactor::with_parts):
///
/// ```
/// use rdma_reactor::transport::Provider;
/// use rdma_reactor::{Config, Error, MioPoller, Parts, Reactor, SystemClock, open_providers, system_entropy};
///
/// fn reactor(config: Config, mine: Box<dyn Provider>) -> Result<Reactor, Error> {
///     let mut providers = open_providers(&config, system_entropy())?;
///     providers.insert(0, mine);
///     let poller = Box::new(MioPoller::new().map_err(Error::Poll)?);
///     Reactor::with_parts(config, Parts { providers, poller, clock: Box::new(SystemClock) })
/// }
/// ```
///
/// # Errors
/// [`ProviderChoice::Verbs`] was selected and there is no device, or the system refused the resources of the embedded provider.
pub fn open(config: &Config, entropy: Entropy) -> Result<Vec<Box<dyn Provider>>, Error> {
    match config.provider {
        ProviderChoice::Verbs => {
            let provider = devices::open(entropy)?;
            local_log!(Info, "provider verbs: as configured");
            Ok(vec![provider])
        }
        ProviderChoice::Iwarp => {
            local_log!(Info, "provider iwarp: as configured");
            Ok(vec![iwarp(config, SharedMemoryPolicy::Off, entropy)?])
        }
        ProviderChoice::Shm => {
            local_log!(Info, "provider shm: as configured");
            Ok(vec![iwarp(config, SharedMemoryPolicy::Require, entropy)?])
        }
        ProviderChoice::Auto => {
            let (one, other) = halves(entropy);
            let embedded = iwarp(config, config.iwarp.shared_memory, other)?;
            match devices::open(one) {
                Ok(devices) => Ok(vec![devices, embedded]),
                Err(why) => {
                    local_log!(Info, "provider iwarp: {why}; ProviderChoice::Verbs insists on a device");
                    Ok(vec![embedded])
                }
            }
        }
    }
}

/// Makes two handles to one source of randomness. A lock serializes the calls of both.
fn halves(entropy: Entropy) -> (Entropy, Entropy) {
    let shared = Arc::new(Mutex::new(entropy));
    let other = Arc::clone(&shared);
    let draw = |from: &Mutex<Entropy>, bytes: &mut [u8]| from.lock().unwrap_or_else(PoisonError::into_inner)(bytes);
    (Box::new(move |bytes| draw(&shared, bytes)), Box::new(move |bytes| draw(&other, bytes)))
}

fn iwarp(config: &Config, policy: SharedMemoryPolicy, entropy: Entropy) -> Result<Box<dyn Provider>, Error> {
    let net = TcpNet::with_config(tcp(config));
    let net = net.map_err(|source| rdma_transport::TransportError::io("opening the channels", source))?;
    let mut settings = settings(config);
    settings.shared_memory = policy;
    Ok(Box::new(Iwarp::new(settings, net, entropy)?))
}

/// Returns the settings of the embedded provider. If the program has not set the limits on peers
/// there, the limits of the reactor apply.
fn settings(config: &Config) -> IwarpConfig {
    let mut settings = config.iwarp.clone();
    // The reactor itself limits the handshakes in progress. The limit of the embedded provider must not be lower. Otherwise the embedded
    // provider would evict connections that are within the reactor's limit.
    settings.max_handshakes = settings.max_handshakes.max(config.max_pending as usize);
    settings.allowed_peers = settings.allowed_peers.or_else(|| config.allowed_peers.clone());
    settings.max_handshakes_per_peer = settings.max_handshakes_per_peer.or(config.max_handshakes_per_peer);
    settings
}

/// Returns the settings for TCP. TCP must not end a connection before the keepalive does. A peer that reads nothing for a while may still
/// be alive: its process may be stopped, or its machine may be busy.
fn tcp(config: &Config) -> TcpConfig {
    let mut tcp = TcpConfig::default();
    tcp.host_congestion.clone_from(&config.iwarp.within_host.congestion);
    tcp.user_timeout = tcp.user_timeout.map(|timeout| timeout.max(config.timeouts.keepalive));
    // TCP retransmits so often that a path which recovers carries data again before the keepalive
    // ends the connection.
    let [second, minutes] = [1, 120].map(Duration::from_secs);
    tcp.rto_max = Some((config.timeouts.keepalive / 8).clamp(second, minutes));
    tcp
}

#[cfg(feature = "verbs")]
mod devices {
    use rdma_transport::provider::Provider;
    use rdma_transport_verbs::Verbs;

    use crate::error::Error;
    use crate::seam::poller::Entropy;

    pub(crate) fn open(entropy: Entropy) -> Result<Box<dyn Provider>, Error> {
        Ok(Box::new(Verbs::open()?.with_entropy(entropy)))
    }
}

#[cfg(not(feature = "verbs"))]
mod devices {
    use rdma_transport::provider::Provider;

    use crate::error::Error;
    use crate::seam::poller::Entropy;

    pub(crate) fn open(_: Entropy) -> Result<Box<dyn Provider>, Error> {
        let reason = "this build has no support for RDMA devices (feature `verbs`); use the provider iwarp";
        Err(Error::NoProvider { provider: "verbs", reason: reason.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A setting that the program has set for the embedded provider takes precedence over that of the reactor.
    #[test]
    fn the_embedded_provider_has_what_is_set_for_it() {
        let networks = |text: &str| Some(vec![text.parse().unwrap()]);
        let both = Config::default().allowed_peers(networks("192.0.2.0/24")).max_handshakes_per_peer(Some(3));
        let usual = settings(&both);
        assert_eq!((usual.allowed_peers, usual.max_handshakes_per_peer), (networks("192.0.2.0/24"), Some(3)));
        assert!(usual.extensions);
        let own = settings(&both.max_pending(9000).iwarp(|iwarp| {
            (iwarp.allowed_peers, iwarp.max_handshakes_per_peer) = (networks("192.0.2.8/29"), Some(1));
            iwarp.extensions = false;
        }));
        assert_eq!((own.allowed_peers, own.max_handshakes_per_peer), (networks("192.0.2.8/29"), Some(1)));
        assert_eq!((own.max_handshakes, own.extensions), (9000, false));
    }

    #[test]
    fn tcp_waits_for_as_long_as_the_keepalive() {
        let usual = tcp(&Config::default()).user_timeout.expect("there is a limit");
        assert!(usual >= Config::default().timeouts.keepalive);
        let patient = Config::default()
            .timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_secs(20), Duration::from_secs(60)));
        assert_eq!(tcp(&patient).user_timeout, Some(Duration::from_secs(60)));
        for (seconds, milliseconds) in [(6, 1_000), (15, 1_875), (60, 7_500), (3_600, 120_000)] {
            let config = Config::default().timeouts(|t| t.keepalive = Duration::from_secs(seconds));
            assert_eq!(tcp(&config).rto_max, Some(Duration::from_millis(milliseconds)));
        }
    }
}
