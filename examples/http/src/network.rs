//! The networks of the programs of this package.

use rdma_reactor::{Config, ProviderChoice, Security, Tls, TlsIdentity};

use crate::Result;

/// Returns the settings for `iwarp`, `shm` or `tls`. Server and client use the same settings: with
/// `tls`, both have the identity that is made here, and trust it alone.
pub(crate) fn config(network: &str) -> Result<Config> {
    let config = Config::default();
    Ok(match network {
        "iwarp" => config.provider(ProviderChoice::Iwarp),
        "shm" => config.provider(ProviderChoice::Shm),
        "tls" => {
            let own = rcgen::generate_simple_self_signed(["server.example".to_owned()])?;
            let identity =
                TlsIdentity::from_pem(own.cert.pem().as_bytes(), own.signing_key.serialize_pem().as_bytes())?;
            let tls = Tls::mutual(&identity, own.cert.pem().as_bytes())?;
            config.provider(ProviderChoice::Iwarp).security(Security::Tls(tls.server_name("server.example")?))
        }
        other => return Err(format!("{other}: give iwarp, shm or tls, or, with 14-http, tcp").into()),
    })
}
