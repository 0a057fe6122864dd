//! Opening the provider that a configuration asks for.

use rdma_transport::iwarp::{CrcPolicy, Iwarp, IwarpConfig, TcpConfig, TcpNet};
use rdma_transport::provider::Provider;

use crate::config::{Config, ProviderChoice};
use crate::error::Error;
use crate::seam::poller::Entropy;

/// Opens the provider. For `Auto` that is the devices and the embedded provider as one, if there are devices.
pub(crate) fn open(config: &Config, entropy: Entropy) -> Result<Box<dyn Provider>, Error> {
    match config.provider {
        ProviderChoice::Verbs => {
            let provider = devices::open()?;
            log::info!("provider verbs: as configured");
            Ok(provider)
        }
        ProviderChoice::Iwarp => {
            log::info!("provider iwarp: as configured");
            Ok(Box::new(iwarp(config, entropy)?))
        }
        ProviderChoice::Auto => devices::or(iwarp(config, entropy)?, config),
    }
}

fn iwarp(config: &Config, entropy: Entropy) -> Result<Iwarp<TcpNet>, Error> {
    let net = TcpNet::with_config(tcp(config));
    let net = net.map_err(|source| rdma_transport::Error::io("opening the channels", source))?;
    let mut settings = IwarpConfig::default();
    settings.crc = if config.crc { CrcPolicy::Require } else { CrcPolicy::Off };
    // Those that are complete are counted and rejected by this side; what is still silent gives way in there.
    settings.max_handshakes = settings.max_handshakes.max(config.max_pending as usize);
    settings.allowed_peers.clone_from(&config.allowed_peers);
    settings.max_handshakes_per_peer = config.max_handshakes_per_peer;
    settings.request_grace = config.request_grace;
    // Only where the greetings agree on them.
    settings.extensions = true;
    Ok(Iwarp::new(settings, net, entropy)?)
}

/// TCP gives no connection up whose peer the keepalive would still wait for: a peer that takes nothing for a while, because its
/// process is stopped or its machine is busy, is not gone.
fn tcp(config: &Config) -> TcpConfig {
    let mut tcp = TcpConfig::default();
    tcp.user_timeout = tcp.user_timeout.map(|timeout| timeout.max(config.keepalive_timeout));
    tcp
}

#[cfg(feature = "verbs")]
mod devices {
    use rdma_transport::dual::Dual;
    use rdma_transport::iwarp::{Iwarp, TcpNet};
    use rdma_transport::provider::Provider;
    use rdma_transport::verbs::Verbs;

    use crate::config::Config;
    use crate::error::Error;

    pub(super) fn open() -> Result<Box<dyn Provider>, Error> {
        Ok(Box::new(Verbs::open()?))
    }

    /// The devices together with the embedded provider, which is alone where there are none.
    pub(super) fn or(embedded: Iwarp<TcpNet>, config: &Config) -> Result<Box<dyn Provider>, Error> {
        match Verbs::open() {
            Ok(devices) => Ok(Box::new(Dual::new(devices, embedded, config.resolve_timeout)?)),
            Err(why) => {
                log::info!("provider iwarp: {why}; ProviderChoice::Verbs insists on a device");
                Ok(Box::new(embedded))
            }
        }
    }
}

#[cfg(not(feature = "verbs"))]
mod devices {
    use rdma_transport::iwarp::{Iwarp, TcpNet};
    use rdma_transport::provider::Provider;

    use crate::config::Config;
    use crate::error::Error;

    const MISSING: &str = "this build has no support for RDMA devices (feature `verbs`)";

    pub(super) fn open() -> Result<Box<dyn Provider>, Error> {
        Err(Error::NoProvider { provider: "verbs", reason: format!("{MISSING}; use the provider iwarp") })
    }

    pub(super) fn or(embedded: Iwarp<TcpNet>, _: &Config) -> Result<Box<dyn Provider>, Error> {
        log::info!("provider iwarp: {MISSING}");
        Ok(Box::new(embedded))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn tcp_waits_for_as_long_as_the_keepalive() {
        let usual = tcp(&Config::default()).user_timeout.expect("there is a limit");
        assert!(usual >= Config::default().keepalive_timeout);
        let patient = Config::default().keepalive(Duration::from_secs(20), Duration::from_secs(60));
        assert_eq!(tcp(&patient).user_timeout, Some(Duration::from_secs(60)));
    }
}
