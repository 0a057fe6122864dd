//! Certificates and keys for tests. They are created once in each process.

use std::sync::OnceLock;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, PKCS_ED25519,
    SerialNumber,
};
use rdma_reactor::{Psk, Security, SecurityMode, Tls, TlsIdentity};

/// Returns a new Ed25519 key. All Ed25519 signatures have the same length, so the messages of simulated connections have the same lengths
/// in every run.
fn key() -> KeyPair {
    KeyPair::generate_for(&PKCS_ED25519).expect("a key")
}

/// A certificate authority.
#[derive(Debug)]
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    /// Creates a new authority.
    ///
    /// # Panics
    /// Panics if no certificate can be created.
    #[must_use]
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = key();
        // The name contains a part of the key, because otherwise two authorities with different keys would have the same name.
        let name = format!("tests {:02x?}", &key.public_key_raw()[..8]);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    /// Returns the authority's own certificate, in PEM.
    #[must_use]
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Creates an identity for clients and servers, signed by this authority. Returns its certificate and its key, in PEM.
    ///
    /// # Panics
    /// Panics if no certificate can be created.
    #[must_use]
    pub fn certify(&self, name: &str) -> (String, String) {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        params.serial_number = Some(SerialNumber::from(7));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = key();
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    }

    /// Creates an identity for clients and servers, signed by this authority.
    ///
    /// # Panics
    /// Panics if no certificate can be created.
    #[must_use]
    pub fn identity(&self, name: &str) -> TlsIdentity {
        let (certificate, key) = self.certify(name);
        TlsIdentity::from_pem(certificate.as_bytes(), key.as_bytes()).expect("an identity")
    }

    /// Returns settings for TLS with certificates on both sides. The settings have a new identity of this authority, and accept only a peer
    /// with the name `name`.
    ///
    /// # Panics
    /// Panics if no certificate can be created.
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

/// Returns settings with a pre-shared key. Each number gives a different key.
///
/// # Panics
/// Never: the key is valid.
#[must_use]
pub fn psk(number: u8) -> Security {
    let mut key = [number; 32];
    key[0] = !number;
    Security::Psk(Psk::new("tests", key).expect("a key"))
}

/// Returns the settings that all honest members of the tests use. Two members with these settings accept each other.
///
/// # Panics
/// Panics if no certificate can be created.
pub fn security(mode: SecurityMode) -> Security {
    static TLS: OnceLock<Security> = OnceLock::new();
    match mode {
        SecurityMode::Tls => TLS.get_or_init(|| Authority::new().tls("node")).clone(),
        SecurityMode::Psk => psk(1),
        _ => Security::Plain,
    }
}

/// Returns settings for the security mode `mode` with other credentials. A member with the settings of [`security`] does not accept a peer
/// with these settings.
///
/// # Panics
/// Panics if no certificate can be created.
pub fn stranger(mode: SecurityMode) -> Security {
    static TLS: OnceLock<Security> = OnceLock::new();
    match mode {
        SecurityMode::Tls => TLS.get_or_init(|| Authority::new().tls("node")).clone(),
        SecurityMode::Psk => psk(2),
        _ => Security::Plain,
    }
}
