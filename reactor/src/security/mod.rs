//! The authentication of peers, and the encryption of messages.
//!
//! A connection first uses a [`Handshake`], which consumes bytes from the peer and produces bytes
//! for the peer, until both sides have proven their identities. The handshake then returns a
//! [`Channel`], which encrypts and decrypts messages in place. There are two kinds of handshakes,
//! [`tls`] and [`psk`]. This library implements no cryptography itself: it uses rustls, snow and
//! ring.

pub(crate) mod channel;
#[cfg(feature = "tls")]
mod known_keys;
#[cfg(feature = "tls")]
pub(crate) mod names;
#[cfg(feature = "psk")]
pub(crate) mod psk;
#[cfg(any(feature = "tls", feature = "psk"))]
mod records;
#[cfg(feature = "tls")]
pub(crate) mod tls;

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::IpAddr;

pub(crate) use self::channel::{Channel, Opener, Sealer};

/// The security of a connection: authentication of the peer, and encryption of all messages, on every provider.
///
/// Both sides must use the same kind of security. [`crate::Config::security`] sets it for all connections of a reactor.
/// [`crate::ConnectOptions::security`] replaces it for one connection that the local side opens, and [`crate::ListenOptions::security`] for
/// the connections of one listener. A peer with another kind is rejected ([`crate::RejectReason::Security`]). The kind is not negotiated,
/// so an attacker cannot make the sides agree on a weaker one.
///
/// With any kind but `Plain`, a handshake precedes `on_connect`. In the handshake, the peer proves its identity ([`PeerIdentity`]). Every
/// message after the handshake is encrypted and authenticated. One-sided operations are not encrypted, so they are refused unless
/// [`crate::Config::allow_plain_remote_memory`] is set. See [the guide](crate::guide::security).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Security {
    /// Messages are sent in plaintext, and anybody who can reach the listener may connect. This is the default.
    #[default]
    Plain,
    /// TLS 1.3, as QUIC carries it (RFC 9001). Certificates or raw public keys prove the identity of the sides.
    #[cfg(feature = "tls")]
    Tls(tls::Tls),
    /// A pre-shared key, which all members of a small cluster have. The handshake is that of Noise, with the pattern NNpsk0.
    #[cfg(feature = "psk")]
    Psk(psk::Psk),
}

/// The kind of [`Security`] that a side uses. Each side sends it in its greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SecurityMode {
    /// [`Security::Plain`].
    Plain,
    /// `Security::Tls`.
    Tls,
    /// `Security::Psk`.
    Psk,
}

impl SecurityMode {
    /// Returns the mode that this number encodes in a greeting. `None` if the number is unknown.
    pub(crate) const fn of(raw: u8) -> Option<Self> {
        match raw {
            0 => Some(Self::Plain),
            1 => Some(Self::Tls),
            2 => Some(Self::Psk),
            _ => None,
        }
    }
}

impl fmt::Display for SecurityMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain connections: set Security::Plain for it, or give it security",
            Self::Tls => "TLS: set Security::Tls with a certificate authority that both sides trust",
            Self::Psk => "a pre-shared key: set Security::Psk with the key of the cluster",
        })
    }
}

/// The identity of the peer of a secured connection. The peer has proven it in the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
// bound: handshake-bytes
pub enum PeerIdentity {
    /// The peer has presented no certificate, and the local TLS settings do not require one.
    Anonymous,
    /// The certificates that the peer has presented, in DER; the peer's own certificate is the first. If the peer uses raw public keys,
    /// this is only its key, as SubjectPublicKeyInfo in DER. The local TLS settings have accepted the certificates or the key, and the peer
    /// has proven that it has the private key. `PeerIdentity::names` returns the names in the peer's own certificate.
    Certificates(Vec<Vec<u8>>),
    /// The peer has the pre-shared key with this name.
    Psk(String),
}

/// The reason why a connection could not be secured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
// bound: handshake-bytes
pub enum SecurityError {
    /// The local side does not accept the peer's certificate, key or handshake.
    #[error("the peer is not accepted here: {0}")]
    Peer(String),
    /// The peer reported that it does not accept the local side. This report is not authenticated.
    #[error("the peer does not accept the local side: {0}")]
    Refused(String),
    /// The local settings cannot be used.
    #[error("{0}")]
    Settings(String),
}

/// Returns `true` if a character must not be displayed as part of untrusted text: it controls a terminal, changes the direction of text, or
/// is invisible.
pub(crate) fn is_hidden(c: char) -> bool {
    // For a character that cannot be printed, `escape_debug` returns more than two characters. For a quotation mark it returns two, so
    // quotation marks do not count as hidden.
    c.is_control() || c.escape_debug().len() > 2
}

/// The role of the local side in a handshake.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "without the features nothing asks for it")]
pub(crate) enum HandshakeRole<'a> {
    /// The local side connects to this address. `host` is the name of the host, if the program gave one.
    Active {
        host: Option<&'a str>,
        address: IpAddr,
    },
    Passive,
}

/// The handshake of one connection. It does no I/O.
pub(crate) trait Handshake: fmt::Debug + Send {
    /// If the local side sends the first bytes of the handshake, appends them to `out`.
    fn begin(&mut self, out: &mut Vec<u8>) -> Result<(), SecurityError>;

    /// Consumes bytes from the peer, which may be split at any position, and appends the answer to
    /// `out`. After an error, `out` may end with bytes that report the error to the peer.
    fn read(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), SecurityError>;

    /// Returns the channel and the peer's identity, once the peer has proven its identity and all bytes of the handshake are consumed.
    /// Returns `None` before that. Also returns `None` after a call has returned the channel and the identity.
    fn finish(&mut self) -> Option<(Channel, PeerIdentity)>;

    /// Returns the text that reports an error of [`Handshake::read`] to the peer.
    fn alert(&self, error: &SecurityError) -> String;
}

impl Security {
    pub(crate) const fn mode(&self) -> SecurityMode {
        match self {
            Self::Plain => SecurityMode::Plain,
            #[cfg(feature = "tls")]
            Self::Tls(_) => SecurityMode::Tls,
            #[cfg(feature = "psk")]
            Self::Psk(_) => SecurityMode::Psk,
        }
    }

    pub(crate) const fn is_plain(&self) -> bool {
        matches!(self, Self::Plain)
    }

    /// Checks that the settings can be used to connect if `connects` is true, and to listen otherwise.
    pub(crate) fn check(&self, connects: bool) -> Result<(), SecurityError> {
        match self {
            #[cfg(feature = "tls")]
            Self::Tls(tls) => tls.check(connects),
            _ => {
                let _ = connects;
                Ok(())
            }
        }
    }

    /// Starts a handshake. The handshake succeeds only if both sides pass the same `context`. So the handshake verifies that `context`,
    /// which is data that the sides exchanged before the handshake, was not changed in transit.
    pub(crate) fn start(&self, role: HandshakeRole<'_>, context: &[u8]) -> Result<Box<dyn Handshake>, SecurityError> {
        match self {
            Self::Plain => {
                let _ = (role, context);
                Err(SecurityError::Settings("plain connections have no handshake".into()))
            }
            #[cfg(feature = "tls")]
            Self::Tls(tls) => Ok(Box::new(tls.start(role, context)?)),
            #[cfg(feature = "psk")]
            Self::Psk(psk) => Ok(Box::new(psk.start(role, context)?)),
        }
    }
}
