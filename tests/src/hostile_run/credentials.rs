//! The credentials of a process.

use rdma_reactor::{Security, SecurityMode, Tls, TlsIdentity};
use serde::{Deserialize, Serialize};

use super::Result;
use crate::identities::{Authority, psk};

/// The name in the certificates.
const NAME: &str = "node";

/// The security of connections, with certificates and a key that are created for one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Credentials {
    /// No security.
    Plain,
    /// TLS in both directions.
    Tls {
        /// The certificate of each process, PEM.
        certificate: String,
        /// Its key, PEM.
        key: String,
        /// The certificate of the authority, PEM.
        authority: String,
    },
    /// A pre-shared key.
    Psk,
}

impl Credentials {
    /// Creates new credentials.
    ///
    /// # Panics
    /// Panics if no certificate can be created.
    #[must_use]
    pub fn new(mode: SecurityMode) -> Self {
        match mode {
            SecurityMode::Tls => {
                let authority = Authority::new();
                let (certificate, key) = authority.certify(NAME);
                Self::Tls { certificate, key, authority: authority.pem() }
            }
            SecurityMode::Psk => Self::Psk,
            _ => Self::Plain,
        }
    }

    /// Returns the settings of a reactor.
    ///
    /// # Errors
    /// The certificates are damaged.
    pub fn security(&self) -> Result<Security> {
        Ok(match self {
            Self::Plain => Security::Plain,
            Self::Tls { certificate, key, authority } => {
                let identity = TlsIdentity::from_pem(certificate.as_bytes(), key.as_bytes())?;
                Security::Tls(Tls::mutual(&identity, authority.as_bytes())?.server_name(NAME)?)
            }
            Self::Psk => psk(1),
        })
    }
}
