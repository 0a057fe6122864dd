//! Opening the provider that a configuration asks for.

use rdma_transport::iwarp::{CrcPolicy, Iwarp, IwarpConfig, TcpNet};
use rdma_transport::provider::Provider;

use crate::config::{Config, ProviderChoice};
use crate::error::Error;
use crate::poller::Entropy;

/// Opens the provider of `config`, and says which and why.
pub(crate) fn open(config: &Config, entropy: Entropy) -> Result<Box<dyn Provider>, Error> {
    match config.provider {
        ProviderChoice::Verbs => Err(Error::NoProvider {
            provider: "verbs",
            reason: "this build has no support for RDMA devices; use the provider iwarp".into(),
        }),
        ProviderChoice::Iwarp => iwarp(config, entropy),
        ProviderChoice::Auto => {
            log::info!("provider iwarp: this build has no support for RDMA devices");
            iwarp(config, entropy)
        }
    }
}

fn iwarp(config: &Config, entropy: Entropy) -> Result<Box<dyn Provider>, Error> {
    let net = TcpNet::new().map_err(|source| rdma_transport::Error::io("opening the channels", source))?;
    let mut settings = IwarpConfig::default();
    settings.crc = if config.crc { CrcPolicy::Require } else { CrcPolicy::Off };
    settings.max_handshakes = config.max_pending as usize;
    Ok(Box::new(Iwarp::new(settings, net, entropy)?))
}
