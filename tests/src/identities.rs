//! Certificates and keys for tests, made once per process.

use std::sync::OnceLock;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, PKCS_ED25519,
    SerialNumber,
};
use rdma_reactor::{Psk, Security, SecurityMode, Tls, TlsIdentity};

/// A key of which every signature has the same length, so that a history has the same lengths each time.
fn key() -> KeyPair {
    KeyPair::generate_for(&PKCS_ED25519).expect("a key")
}

/// A certificate authority.
#[derive(Debug)]
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    /// A new one.
    ///
    /// # Panics
    /// When no certificate can be made.
    #[must_use]
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = key();
        // Two authorities of one name would be told apart by their signatures only.
        let name = format!("tests {:02x?}", &key.public_key_raw()[..8]);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    /// The authority's own certificate.
    #[must_use]
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// The certificate and the key of a new identity of both roles that this authority has signed, PEM.
    ///
    /// # Panics
    /// When no certificate can be made.
    #[must_use]
    pub fn certify(&self, name: &str) -> (String, String) {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        params.serial_number = Some(SerialNumber::from(7));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = key();
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    }

    /// An identity of both roles that this authority has signed.
    ///
    /// # Panics
    /// When no certificate can be made.
    #[must_use]
    pub fn identity(&self, name: &str) -> TlsIdentity {
        let (certificate, key) = self.certify(name);
        TlsIdentity::from_pem(certificate.as_bytes(), key.as_bytes()).expect("an identity")
    }

    /// TLS in both directions with a new identity, for peers of that name.
    ///
    /// # Panics
    /// When no certificate can be made.
    #[must_use]
    pub fn tls(&self, name: &str) -> Security {
        let tls = Tls::mutual(&self.identity(name), self.pem().as_bytes()).expect("settings");
        Security::Tls(tls.server_name(name).expect("a name"))
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

/// A pre-shared key that depends on a number.
///
/// # Panics
/// Never: the key can be used.
#[must_use]
pub fn psk(number: u8) -> Security {
    let mut key = [number; 32];
    key[0] = !number;
    Security::Psk(Psk::new("tests", key).expect("a key"))
}

/// Settings with which all members of the tests accept each other.
///
/// # Panics
/// When no certificate can be made.
pub fn security(mode: SecurityMode) -> Security {
    static TLS: OnceLock<Security> = OnceLock::new();
    match mode {
        SecurityMode::Tls => TLS.get_or_init(|| Authority::new().tls("node")).clone(),
        SecurityMode::Psk => psk(1),
        _ => Security::Plain,
    }
}

/// Settings of the same kind that those of [`security`] do not accept.
///
/// # Panics
/// When no certificate can be made.
pub fn stranger(mode: SecurityMode) -> Security {
    static TLS: OnceLock<Security> = OnceLock::new();
    match mode {
        SecurityMode::Tls => TLS.get_or_init(|| Authority::new().tls("node")).clone(),
        SecurityMode::Psk => psk(2),
        _ => Security::Plain,
    }
}
