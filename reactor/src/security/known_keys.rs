//! The public keys of accepted peers. If there is no certificate authority, peers present such keys instead of certificates (RFC 7250).

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, PeerIncompatible, SignatureScheme,
};

/// A verifier that accepts clients and servers which present one of these keys.
#[derive(Debug)]
pub(super) struct KnownKeys {
    keys: Vec<SubjectPublicKeyInfoDer<'static>>, // local: a setting
    algorithms: WebPkiSupportedAlgorithms,
}

/// The error for a peer whose public key is not in the list.
#[derive(thiserror::Error)]
#[error("its public key is not among those that are known here")]
struct UnknownKey;

/// rustls displays an [`OtherError`] with the `Debug` text of the error in it, so this text must be readable.
impl fmt::Debug for UnknownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl KnownKeys {
    pub(super) const fn new(
        keys: Vec<SubjectPublicKeyInfoDer<'static>>,
        algorithms: WebPkiSupportedAlgorithms,
    ) -> Self {
        Self { keys, algorithms }
    }

    fn check(&self, presented: &CertificateDer<'_>) -> Result<(), Error> {
        if self.keys.iter().any(|key| **key == **presented) {
            return Ok(());
        }
        Err(Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(UnknownKey)))))
    }

    fn check_signature(
        &self,
        message: &[u8],
        presented: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(presented.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

/// Returns the error for a TLS 1.2 signature, which is not supported.
fn too_old<T>() -> Result<T, Error> {
    Err(Error::PeerIncompatible(PeerIncompatible::Tls12NotOffered))
}

impl ServerCertVerifier for KnownKeys {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        too_old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        presented: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, presented, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for KnownKeys {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        too_old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        presented: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, presented, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
