//! Security settings with which two sides accept each other. They are for the copy of the security layer that is
//! compiled into this crate.

use std::sync::OnceLock;

use rdma_reactor_tests::identities::Authority;

use crate::security::Security;
use crate::security::psk::Psk;
use crate::security::tls::{Tls, TlsIdentity};

/// Returns settings with a pre-shared key.
pub(crate) fn psk() -> Security {
    Security::Psk(Psk::new("tests", std::array::from_fn(|at| at as u8)).expect("a key"))
}

/// Returns settings for TLS in which both sides present a certificate. The certificates are created once per process.
pub(crate) fn tls() -> &'static Security {
    static TLS: OnceLock<Security> = OnceLock::new();
    TLS.get_or_init(|| {
        let authority = Authority::new();
        let (certificate, key) = authority.certify("node");
        let identity = TlsIdentity::from_pem(certificate.as_bytes(), key.as_bytes()).expect("an identity");
        let tls = Tls::mutual(&identity, authority.pem().as_bytes()).expect("settings");
        Security::Tls(tls.server_name("node").expect("a name"))
    })
}
