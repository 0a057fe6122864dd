//! The credentials of the server and of its clients.

use rdma_reactor::{Security, SecurityMode, Tls, TlsIdentity};
use serde::{Deserialize, Serialize};

use super::Result;
use crate::identities::{Authority, psk};

/// The name for which the certificates are issued.
const NAME: &str = "node";

/// The credentials of a run. Certificates and the key are created for the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Credentials {
    /// Connections are not secured.
    Plain,
    /// TLS with certificates on both sides.
    Tls {
        /// The certificate of each process, in PEM.
        certificate: String,
        /// The private key of the certificate, in PEM.
        key: String,
        /// The certificate of the authority, in PEM.
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

    /// Returns the security settings of a reactor.
    ///
    /// # Errors
    /// The certificates cannot be parsed.
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
