//! Opening the provider that a configuration asks for.

use std::net::SocketAddr;

use rdma_transport::iwarp::{CrcPolicy, Iwarp, IwarpConfig, TcpNet};
use rdma_transport::provider::Provider;

use crate::config::{Config, ProviderChoice};
use crate::error::Error;
use crate::seam::poller::Entropy;

/// What an address is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Use {
    Listen,
    Connect,
}

/// Opens the provider to start with. For `Auto` that is the embedded one, until the first address decides.
pub(crate) fn open(config: &Config, entropy: Entropy) -> Result<Box<dyn Provider>, Error> {
    match config.provider {
        ProviderChoice::Verbs => {
            let provider = devices::open()?;
            log::info!("provider verbs: as configured");
            Ok(provider)
        }
        ProviderChoice::Iwarp => {
            log::info!("provider iwarp: as configured");
            iwarp(config, entropy)
        }
        ProviderChoice::Auto => iwarp(config, entropy),
    }
}

/// For `Auto`: the devices, if one of them serves the first address that is used; says which provider it is, and why.
pub(crate) fn for_address(address: SocketAddr, usage: Use) -> Option<Box<dyn Provider>> {
    match devices::serving(address, usage) {
        Ok((provider, device)) => {
            log::info!("provider verbs: the device {device} serves {address}");
            if address.ip().is_unspecified() && matches!(usage, Use::Listen) {
                log::warn!(
                    "{address} is listened on by the devices alone: clients over the loopback and over other networks need a \
                     reactor with ProviderChoice::Iwarp"
                );
            }
            Some(provider)
        }
        Err(why) => {
            log::info!("provider iwarp: {why}; ProviderChoice::Verbs insists on a device");
            None
        }
    }
}

/// For `Auto` in a group: the provider that a connect request of another reactor is of.
pub(crate) fn named(name: &'static str) -> Result<Box<dyn Provider>, Error> {
    log::info!("provider {name}: as another reactor of the group");
    devices::open()
}

fn iwarp(config: &Config, entropy: Entropy) -> Result<Box<dyn Provider>, Error> {
    let net = TcpNet::new().map_err(|source| rdma_transport::Error::io("opening the channels", source))?;
    let mut settings = IwarpConfig::default();
    settings.crc = if config.crc { CrcPolicy::Require } else { CrcPolicy::Off };
    // Those that are complete are counted and rejected by this side; what is still silent gives way in there.
    settings.max_handshakes = settings.max_handshakes.max(config.max_pending as usize);
    settings.allowed_peers.clone_from(&config.allowed_peers);
    settings.max_handshakes_per_peer = config.max_handshakes_per_peer;
    settings.request_grace = config.request_grace;
    // Only where the greetings agree on them.
    settings.extensions = true;
    Ok(Box::new(Iwarp::new(settings, net, entropy)?))
}

#[cfg(feature = "verbs")]
mod devices {
    use std::net::SocketAddr;
    use std::time::Duration;

    use rdma_transport::provider::Provider;
    use rdma_transport::verbs::{Reach, Verbs};

    use super::Use;
    use crate::error::Error;

    /// Time that resolving an address may take when it decides on the provider.
    const RESOLVE: Duration = Duration::from_millis(200);

    pub(super) fn open() -> Result<Box<dyn Provider>, Error> {
        Ok(Box::new(Verbs::open()?))
    }

    pub(super) fn serving(address: SocketAddr, usage: Use) -> Result<(Box<dyn Provider>, String), String> {
        let mut verbs = Verbs::open().map_err(|error| error.to_string())?;
        let reach = match usage {
            Use::Listen => verbs.serves(address),
            Use::Connect => verbs.reaches(address, RESOLVE),
        };
        match reach.map_err(|error| error.to_string())? {
            Reach::Yes { device } => Ok((Box::new(verbs), device)),
            Reach::No { reason } => Err(format!("no RDMA device serves {address}: {reason}")),
        }
    }
}

#[cfg(not(feature = "verbs"))]
mod devices {
    use std::net::SocketAddr;

    use rdma_transport::provider::Provider;

    use super::Use;
    use crate::error::Error;

    pub(super) fn open() -> Result<Box<dyn Provider>, Error> {
        let reason = "this build has no support for RDMA devices (feature `verbs`); use the provider iwarp";
        Err(Error::NoProvider { provider: "verbs", reason: reason.into() })
    }

    pub(super) fn serving(_: SocketAddr, _: Use) -> Result<(Box<dyn Provider>, String), String> {
        Err("this build has no support for RDMA devices (feature `verbs`)".into())
    }
}
