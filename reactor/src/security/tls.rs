//! TLS 1.3 as QUIC uses it (RFC 9001). rustls produces the handshake and the keys, and messages of the reactor carry the handshake bytes.
//!
//! The handshake bytes are sent in records. The records after the ServerHello are encrypted with the handshake keys, so certificates cannot
//! be read in transit. The greetings of both sides are passed as transport parameters. So the handshake fails if the greetings were
//! changed.

use std::fmt;
use std::net::IpAddr;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::{ResolvesClientCert, Resumption};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, SubjectPublicKeyInfoDer};
use rustls::quic::{self, Connection, KeyChange, Keys, PacketKey, Secrets, Version};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig, SignatureScheme};

use super::channel::{Channel, CipherKey, Opener, Sealer, TAG};
use super::known_keys::KnownKeys;
use super::records::{Records, emit};
use super::{Handshake, HandshakeRole, PeerIdentity, SecurityError};

/// The certificates and the private key of the local side, or only a key pair. A clone shares its contents with the original. So
/// [`TlsIdentity::replace`] on a clone affects every listener and every connect with this identity, for all handshakes that begin later.
#[derive(Clone, Debug)]
pub struct TlsIdentity(Arc<KeyResolver>);

/// The certificates and the private key that are currently presented to peers.
#[derive(Debug)]
struct KeyResolver {
    /// True if a public key is presented instead of a certificate.
    raw: bool,
    now: Mutex<Arc<CertifiedKey>>,
}

impl TlsIdentity {
    /// Parses certificates and a private key in PEM. The first certificate is that of the local side. It is followed by the intermediate
    /// certificates up to the authority.
    ///
    /// Example: [the guide](crate::guide::security).
    ///
    /// # Errors
    /// [`SecurityError::Settings`] if there is no certificate or no key, or if the key does not belong to the first certificate.
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Self, SecurityError> {
        Ok(Self(Arc::new(KeyResolver { raw: false, now: Mutex::new(certified(certificates, key)?) })))
    }

    /// Parses a private key in PEM. Its public key is presented to peers instead of a certificate (RFC 7250). Used with
    /// [`Tls::public_keys`].
    ///
    /// # Errors
    /// [`SecurityError::Settings`] if there is no key, or if the key cannot be used.
    pub fn raw(key: &[u8]) -> Result<Self, SecurityError> {
        Ok(Self(Arc::new(KeyResolver { raw: true, now: Mutex::new(uncertified(key)?) })))
    }

    /// Returns the first certificate in DER. For a [raw](TlsIdentity::raw) identity, returns the public key as SubjectPublicKeyInfo in DER.
    /// The peer's program receives the same bytes in [`PeerIdentity::Certificates`].
    #[must_use]
    pub fn end_entity(&self) -> Vec<u8> {
        self.0.now().cert.first().map(|first| first.to_vec()).unwrap_or_default()
    }

    /// Replaces the certificates and the key, for all handshakes that begin from now on. Established connections stay open. Any thread may
    /// call this. For a [raw](TlsIdentity::raw) identity, `certificates` must be empty.
    ///
    /// Example: [the guide](crate::guide::security).
    ///
    /// # Errors
    /// Returns the same errors as [`TlsIdentity::from_pem`]. After an error, the identity is unchanged.
    pub fn replace(&self, certificates: &[u8], key: &[u8]) -> Result<(), SecurityError> {
        let new = match self.0.raw {
            true if !certificates.is_empty() => {
                return Err(settings("this identity is a key pair: replace it by a key and no certificates"));
            }
            true => uncertified(key)?,
            false => certified(certificates, key)?,
        };
        // A panic of another thread cannot have left the value inconsistent, because it is replaced in one step.
        *self.0.now.lock().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// Returns the resolver of the identity. `raw` is true if the caller requires a raw public key, and false if it requires certificates.
    /// Returns an error if the identity is of the other kind.
    fn of_kind(&self, raw: bool) -> Result<Arc<KeyResolver>, SecurityError> {
        match (self.0.raw, raw) {
            (true, false) => Err(settings("this identity has no certificate: use Tls::public_keys with it")),
            (false, true) => Err(settings("this identity has a certificate: use TlsIdentity::raw for a key pair")),
            _ => Ok(Arc::clone(&self.0)),
        }
    }
}

impl KeyResolver {
    fn now(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.now.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ResolvesServerCert for KeyResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.now())
    }

    fn only_raw_public_keys(&self) -> bool {
        self.raw
    }
}

impl ResolvesClientCert for KeyResolver {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.now())
    }

    fn has_certs(&self) -> bool {
        true
    }

    fn only_raw_public_keys(&self) -> bool {
        self.raw
    }
}

fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, SecurityError> {
    PrivateKeyDer::from_pem_slice(pem)
        .map_err(|error| settings(format!("the private key: {error}: give one in PEM (PKCS #8, PKCS #1 or SEC 1)")))
}

/// Returns a private key, with its public key in place of a certificate.
fn uncertified(key: &[u8]) -> Result<Arc<CertifiedKey>, SecurityError> {
    let key = provider().key_provider.load_private_key(private_key(key)?);
    let key = key.map_err(|error| settings(format!("the private key: {error}")))?;
    let public = key.public_key().ok_or_else(|| settings("the private key: its public key is not known"))?;
    let public = CertificateDer::from(public.to_vec());
    Ok(Arc::new(CertifiedKey::new(vec![public], key)))
}

fn certified(certificates: &[u8], key: &[u8]) -> Result<Arc<CertifiedKey>, SecurityError> {
    let (chain, key) = (chain(certificates, "certificates")?, private_key(key)?);
    let certified = CertifiedKey::from_der(chain, key, &provider())
        .map_err(|error| settings(format!("the certificate and its key: {error}")))?;
    Ok(Arc::new(certified))
}

/// Returns the certificates of a text in PEM. `what` names the setting that has the text.
fn chain(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>, SecurityError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let chain = chain.map_err(|error| settings(format!("the {what}: {error}: give them in PEM")))?;
    if chain.is_empty() { Err(settings(format!("the {what}: no certificate in PEM: give one"))) } else { Ok(chain) }
}

fn roots(pem: &[u8]) -> Result<Arc<RootCertStore>, SecurityError> {
    let mut roots = RootCertStore::empty();
    for certificate in chain(pem, "certificate authorities")? {
        roots.add(certificate).map_err(|error| settings(format!("the certificate authority: {error}")))?;
    }
    Ok(Arc::new(roots))
}

/// The settings of TLS. Only TLS 1.3 is supported, without session tickets and without early data.
#[derive(Clone)]
pub struct Tls {
    /// The settings of the side that connects. `None` if these settings are only for listening.
    client: Option<Arc<ClientConfig>>,
    /// The settings of the side that listens. `None` if these settings are only for connecting.
    server: Option<Arc<ServerConfig>>,
    /// The name that the peer's certificate must contain if the local side connects. If this is `None`, the certificate must contain the
    /// host name or the address that the local side connects to.
    name: Option<Box<ServerName<'static>>>,
}

/// A panic cannot leave these settings inconsistent: handshakes do not change them, and an identity is replaced in one step.
impl UnwindSafe for Tls {}
impl RefUnwindSafe for Tls {}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (connects, accepts) = (self.client.is_some(), self.server.is_some());
        f.debug_struct("Tls").field("connects", &connects).field("accepts", &accepts).field("name", &self.name).finish()
    }
}

impl Tls {
    /// Returns settings to connect and to listen. Both sides must present certificates that are signed by `authorities` (in PEM).
    ///
    /// Example: [the guide](crate::guide::security).
    ///
    /// # Errors
    /// [`SecurityError::Settings`] if the authorities cannot be used, or the identity is [raw](TlsIdentity::raw).
    pub fn mutual(identity: &TlsIdentity, authorities: &[u8]) -> Result<Self, SecurityError> {
        let (provider, roots) = (provider(), roots(authorities)?);
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let verifier = verifier.build().map_err(settings)?;
        let resolver = identity.of_kind(false)?;
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13]);
        let client = client.map_err(settings)?.with_root_certificates(roots);
        let client = client.with_client_cert_resolver(Arc::clone(&resolver) as _);
        let server = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]);
        let server = server.map_err(settings)?.with_client_cert_verifier(verifier).with_cert_resolver(resolver);
        Ok(Self::from_rustls(Some(client), Some(server)))
    }

    /// Returns settings to connect and to listen if there is no certificate authority. Both sides present public keys without certificates
    /// (RFC 7250). `peers` (in PEM, `PUBLIC KEY`) are the keys of the accepted peers.
    ///
    /// A key is not bound to a name, so the library cannot verify which of the accepted peers has
    /// which name. [`crate::ConnectionContext::identity`] returns the key of a peer.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (own, other) = (rcgen::KeyPair::generate()?, rcgen::KeyPair::generate()?);
    /// # let (key, peers) = (own.serialize_pem(), other.public_key_pem());
    /// use rdma_reactor::{Config, Security, Tls, TlsIdentity};
    ///
    /// // As `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` make them.
    /// let identity = TlsIdentity::raw(key.as_bytes())?;
    /// let config = Config::default().security(Security::Tls(Tls::public_keys(&identity, peers.as_bytes())?));
    /// # drop(config);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`SecurityError::Settings`] if there is no key among `peers`, or the identity is not [raw](TlsIdentity::raw).
    pub fn public_keys(identity: &TlsIdentity, peers: &[u8]) -> Result<Self, SecurityError> {
        let (provider, resolver) = (provider(), identity.of_kind(true)?);
        let peers: Result<Vec<_>, _> = SubjectPublicKeyInfoDer::pem_slice_iter(peers).collect();
        let peers = peers.map_err(|error| settings(format!("the public keys: {error}: give them in PEM")))?;
        if peers.is_empty() {
            return Err(settings("the public keys: there is no PUBLIC KEY in PEM"));
        }
        let known = Arc::new(KnownKeys::new(peers, provider.signature_verification_algorithms));
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13]);
        let client = client.map_err(settings)?.dangerous().with_custom_certificate_verifier(Arc::clone(&known) as _);
        let client = client.with_client_cert_resolver(Arc::clone(&resolver) as _);
        let server = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]);
        let server = server.map_err(settings)?.with_client_cert_verifier(known).with_cert_resolver(resolver);
        Ok(Self::from_rustls(Some(client), Some(server)))
    }

    /// Returns settings to connect. Only the side that listens presents a certificate. This certificate must be signed by one of
    /// `authorities` (in PEM).
    ///
    /// # Errors
    /// [`SecurityError::Settings`] if the authorities cannot be used.
    pub fn client(authorities: &[u8]) -> Result<Self, SecurityError> {
        let client = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&rustls::version::TLS13]);
        let client = client.map_err(settings)?.with_root_certificates(roots(authorities)?).with_no_client_auth();
        Ok(Self::from_rustls(Some(client), None))
    }

    /// Returns settings to listen, the counterpart of [`Tls::client`]. Every client is accepted, as [`PeerIdentity::Anonymous`].
    ///
    /// # Errors
    /// [`SecurityError::Settings`] if rustls does not accept the settings, or the identity is [raw](TlsIdentity::raw).
    pub fn server(identity: &TlsIdentity) -> Result<Self, SecurityError> {
        let server = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&rustls::version::TLS13]);
        let server = server.map_err(settings)?.with_no_client_auth().with_cert_resolver(identity.of_kind(false)?);
        Ok(Self::from_rustls(None, Some(server)))
    }

    /// Creates settings from settings of rustls, for programs that need other verifiers, another clock or other cryptography. Session
    /// tickets, resumption and early data are turned off.
    ///
    /// ```
    /// use rdma_reactor::{Security, Tls};
    ///
    /// /// Uses client settings that this library has no method for.
    /// fn security(client: rustls::ClientConfig) -> Security {
    ///     Security::Tls(Tls::from_rustls(Some(client), None))
    /// }
    /// ```
    #[must_use]
    pub fn from_rustls(client: Option<ClientConfig>, server: Option<ServerConfig>) -> Self {
        let client = client.map(|mut config| {
            config.resumption = Resumption::disabled();
            config.enable_early_data = false;
            Arc::new(config)
        });
        let server = server.map(|mut config| {
            config.send_tls13_tickets = 0;
            config.max_early_data_size = 0;
            Arc::new(config)
        });
        Self { client, server, name: None }
    }

    /// Sets the name that the certificate of the listening side must contain: a host name, or an address in text form. By default, this is
    /// the name that was passed to [`crate::Context::connect_host`], or else the address of the peer.
    ///
    /// # Errors
    /// [`SecurityError::Settings`] if `name` is neither a host name nor an address.
    pub fn server_name(mut self, name: &str) -> Result<Self, SecurityError> {
        self.name = Some(Box::new(server_name(name)?));
        Ok(self)
    }

    /// Appends the secrets of all connections with these settings to a file, and logs a warning. The environment variable `SSLKEYLOGFILE`
    /// names the file, which has the format of NSS. Does nothing if the variable is not set.
    ///
    /// This is for debugging only: anybody who can read the file can decrypt the connections. [The guide](crate::guide::security) says how.
    /// Needs the feature `keylog`.
    #[cfg(feature = "keylog")]
    #[must_use]
    pub fn log_keys(mut self) -> Self {
        let Some(path) = std::env::var_os("SSLKEYLOGFILE") else { return self };
        let path = std::path::PathBuf::from(path);
        match std::fs::OpenOptions::new().append(true).create(true).open(&path) {
            Ok(_) => {
                local_log!(Warn, "SSLKEYLOGFILE: the secrets of TLS connections are written to {}", path.display())
            }
            Err(error) => local_log!(Warn, "SSLKEYLOGFILE: no secrets are written to {}: {error}", path.display()),
        }
        let log = Arc::new(rustls::KeyLogFile::new());
        if let Some(config) = &mut self.client {
            Arc::make_mut(config).key_log = Arc::clone(&log) as _;
        }
        if let Some(config) = &mut self.server {
            Arc::make_mut(config).key_log = log;
        }
        self
    }

    pub(super) fn check(&self, connects: bool) -> Result<(), SecurityError> {
        match connects {
            true if self.client.is_none() => {
                Err(settings("these settings of TLS are for listening only: use Tls::mutual or Tls::client to connect"))
            }
            false if self.server.is_none() => {
                Err(settings("these settings of TLS are for connecting only: use Tls::mutual or Tls::server to listen"))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn start(&self, role: HandshakeRole<'_>, context: &[u8]) -> Result<TlsHandshake, SecurityError> {
        let parameters = context.to_vec();
        let conn = match (role, &self.client, &self.server) {
            (HandshakeRole::Active { host, address }, Some(config), _) => {
                let name = match (&self.name, host) {
                    (Some(name), _) => (**name).clone(),
                    (None, Some(host)) => server_name(host)?,
                    (None, None) => address_name(address),
                };
                let conn = quic::ClientConnection::new(Arc::clone(config), Version::V1, name, parameters);
                Connection::Client(conn.map_err(settings)?)
            }
            (HandshakeRole::Passive, _, Some(config)) => {
                let conn = quic::ServerConnection::new(Arc::clone(config), Version::V1, parameters);
                Connection::Server(conn.map_err(settings)?)
            }
            (role, ..) => {
                self.check(matches!(role, HandshakeRole::Active { .. }))?;
                return Err(settings("TLS is not set up"));
            }
        };
        Ok(TlsHandshake {
            conn,
            records: Records::default(),
            handshake_keys: None,
            channel: None,
            context: context.to_vec(),
        })
    }
}

/// Returns the name that the certificate of a host with this address must contain. An IPv4-mapped
/// IPv6 address counts as the IPv4 address.
fn address_name(address: IpAddr) -> ServerName<'static> {
    ServerName::IpAddress(address.to_canonical().into())
}

fn server_name(name: &str) -> Result<ServerName<'static>, SecurityError> {
    // The zone of an IPv6 address, as in `fe80::1%eth0`, has a meaning on the local host only, so certificates do not contain it.
    let unzoned = name.split_once('%').map(|(address, _)| address).filter(|address| address.contains(':'));
    if let Ok(address) = unzoned.unwrap_or(name).parse::<IpAddr>() {
        return Ok(address_name(address));
    }
    let parsed = ServerName::try_from(name.to_owned());
    parsed.map_err(|_| {
        settings(format!("\"{name}\" cannot be the name in a certificate: give a host name or an address"))
    })
}

/// The keys that encrypt the records of the handshake, and the number of records that each of these keys has encrypted or decrypted.
struct HandshakeKeys {
    keys: Keys,
    sealed: u64,
    opened: u64,
}

/// A TLS handshake.
pub(crate) struct TlsHandshake {
    conn: Connection,
    records: Records,
    /// The handshake keys. Set once the ServerHello was sent or received.
    handshake_keys: Option<HandshakeKeys>,
    /// The channel. Set once the keys of the channel are known. This may be before the peer has proven its identity.
    channel: Option<Channel>,
    /// The greetings that both sides have exchanged in plaintext.
    context: Vec<u8>, // bound: private-data
}

impl fmt::Debug for TlsHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a handshake of TLS")
    }
}

fn peer(why: impl fmt::Display) -> SecurityError {
    SecurityError::Peer(why.to_string())
}

impl TlsHandshake {
    fn record(&mut self, mut record: Vec<u8>) -> Result<(), SecurityError> {
        if self.is_proven() {
            return Err(peer("the handshake continues after its end"));
        }
        let bytes = match &mut self.handshake_keys {
            None => &record[..],
            Some(handshake_keys) => {
                let number = handshake_keys.opened;
                handshake_keys.opened += 1;
                let opened = handshake_keys.keys.remote.packet.decrypt_in_place(number, &[], &mut record);
                opened.map_err(|_| peer("a part of the handshake was changed on the way"))?
            }
        };
        self.conn.read_hs(bytes).map_err(peer)?;
        Ok(())
    }

    /// Appends to `out` the bytes that rustls has to send, and stores the keys that rustls
    /// provides.
    fn write(&mut self, out: &mut Vec<u8>) {
        loop {
            let mut bytes = Vec::new();
            let change = self.conn.write_hs(&mut bytes);
            let handshake_keys = &mut self.handshake_keys;
            emit(&bytes, out, |record| {
                if let Some(handshake_keys) = handshake_keys {
                    // The encryption of a record fails only if the record is too long, and `emit` makes no such record.
                    if let Ok(tag) =
                        handshake_keys.keys.local.packet.encrypt_in_place(handshake_keys.sealed, &[], record)
                    {
                        record.extend_from_slice(tag.as_ref());
                    }
                    handshake_keys.sealed += 1;
                }
            });
            match change {
                Some(KeyChange::Handshake { keys }) => {
                    self.handshake_keys = Some(HandshakeKeys { keys, sealed: 0, opened: 0 })
                }
                Some(KeyChange::OneRtt { keys, next }) => self.channel = Some(channel(keys, next)),
                None if bytes.is_empty() => return,
                None => {}
            }
        }
    }

    fn is_proven(&self) -> bool {
        self.channel.is_some() && !self.conn.is_handshaking()
    }
}

impl Handshake for TlsHandshake {
    fn begin(&mut self, out: &mut Vec<u8>) -> Result<(), SecurityError> {
        self.write(out);
        Ok(())
    }

    fn read(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), SecurityError> {
        self.records.push(bytes);
        while let Some(record) = self.records.next()? {
            let read = self.record(record);
            self.write(out);
            read?;
        }
        if self.is_proven() && self.conn.quic_transport_parameters() != Some(&self.context) {
            return Err(peer("the greetings were changed on the way"));
        }
        Ok(())
    }

    fn finish(&mut self) -> Option<(Channel, PeerIdentity)> {
        if !self.is_proven() || !self.records.is_empty() {
            return None;
        }
        let identity = match self.conn.peer_certificates() {
            Some(chain) => PeerIdentity::Certificates(chain.iter().map(|one| one.to_vec()).collect()),
            None => PeerIdentity::Anonymous,
        };
        Some((self.channel.take()?, identity))
    }

    fn alert(&self, error: &SecurityError) -> String {
        // The peer receives the alert that TLS would send (RFC 8446, section 6.2). If rustls has no
        // alert, the peer receives the text of an error that the peer itself has caused. The text
        // of a local error is never sent.
        match (self.conn.alert(), error) {
            (Some(alert), _) => format!("{alert:?}"),
            (None, SecurityError::Peer(why)) => why.clone(),
            (None, _) => "InternalError".into(),
        }
    }
}

/// The key of one sequence of messages or segments in one direction.
struct QuicKey {
    key: Box<dyn PacketKey>,
    /// The secrets from which the next keys are derived.
    next: Secrets,
    /// True if the key encrypts messages to the peer.
    own: bool,
}

impl CipherKey for QuicKey {
    fn seal(&self, number: u64, header: &[u8], body: &mut [u8]) -> Option<[u8; TAG]> {
        let tag = self.key.encrypt_in_place(number, header, body).ok()?;
        tag.as_ref().try_into().ok()
    }

    fn open(&self, number: u64, header: &[u8], body: &mut [u8]) -> bool {
        self.key.decrypt_in_place(number, header, body).is_ok()
    }

    fn renew(&mut self) {
        let keys = self.next.next_packet_keys();
        self.key = if self.own { keys.local } else { keys.remote };
    }
}

fn channel(keys: Keys, next: Secrets) -> Channel {
    let mut second = next.clone();
    let keys_of_second = second.next_packet_keys();
    let packets = |key, next: &Secrets, own| Box::new(QuicKey { key, next: next.clone(), own });
    Channel {
        sealer: Sealer::new(packets(keys.local.packet, &next, true), packets(keys_of_second.local, &second, true)),
        opener: Opener::new(packets(keys.remote.packet, &next, false), packets(keys_of_second.remote, &second, false)),
    }
}

fn settings(why: impl fmt::Display) -> SecurityError {
    SecurityError::Settings(why.to_string())
}

/// Returns the ciphers and key exchanges of ring. AES-128-GCM comes first, because it is the
/// fastest cipher on processors with AES instructions.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}
