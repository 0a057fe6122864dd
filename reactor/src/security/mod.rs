//! Authentication of peers, and encryption of messages.
//!
//! A connection uses two objects in sequence. A [`Handshake`] consumes bytes of the peer and produces bytes for it,
//! until both sides have proven their identity. It ends in a [`Channel`], which seals and opens messages in place.
//! [`tls`] and [`psk`] are the two kinds of handshakes. No cryptography is implemented here: it is that of rustls, snow
//! and ring.

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
/// Both sides must use the same kind of security: the one that connects ([`crate::ConnectOptions::security`]) and the
/// one that listens ([`crate::ListenOptions::security`]); [`crate::Config::security`] sets it for all connections of a
/// reactor. A peer with another kind is rejected ([`crate::RejectReason::Security`]). Nothing is negotiated, so no
/// attacker can negotiate it away. With any kind but `Plain`, `on_connect` follows a handshake in which the peer has
/// proven its identity ([`PeerIdentity`]), and every later message is encrypted and authenticated. One-sided operations
/// are not, so they are refused unless [`crate::Config::allow_plain_remote_memory`] is set. See [the
/// guide](crate::guide::security).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Security {
    /// Messages are sent in the clear, and anybody who can reach the listener may connect. The default.
    #[default]
    Plain,
    /// TLS 1.3, as QUIC carries it (RFC 9001). Certificates or raw public keys prove the identity of the sides.
    #[cfg(feature = "tls")]
    Tls(tls::Tls),
    /// A pre-shared key, which all members of a small cluster have: Noise, pattern NNpsk0.
    #[cfg(feature = "psk")]
    Psk(psk::Psk),
}

/// The kind of [`Security`] that a side uses, as the greeting states it.
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
    /// Returns the mode with this number in the greeting; `None` if the number is unknown.
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

/// The identity of a secured connection's peer, which its handshake has proven.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerIdentity {
    /// The peer has presented no certificate, and the settings of TLS do not require one.
    Anonymous,
    /// The certificates that the peer has presented, in DER, its own first; or one raw public key, as
    /// SubjectPublicKeyInfo in DER. The settings of TLS have accepted them, and the peer has the private key.
    /// `PeerIdentity::names` returns the names in them.
    Certificates(Vec<Vec<u8>>),
    /// The name of the pre-shared key that the peer has.
    Psk(String),
}

/// The reason why a connection could not be secured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SecurityError {
    /// The local side does not accept the peer: its certificate, its key, or its handshake.
    #[error("the peer is not accepted here: {0}")]
    Peer(String),
    /// The peer reported that it does not accept the local side. This report is not authenticated.
    #[error("the peer does not accept this side: {0}")]
    Refused(String),
    /// The local settings cannot be used.
    #[error("{0}")]
    Settings(String),
}

/// Returns `true` if a character of an untrusted text controls a terminal, changes the direction of text, or is
/// invisible by itself.
pub(crate) fn is_hidden(c: char) -> bool {
    // A character that cannot be printed has an escape sequence of more than two characters; those of quotation marks
    // have two.
    c.is_control() || c.escape_debug().len() > 2
}

/// The role of the local side in a handshake.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "without the features nothing asks for it")]
pub(crate) enum HandshakeRole<'a> {
    /// The local side connects to an address. `host` is the name of the host if the program gave one.
    Active {
        host: Option<&'a str>,
        address: IpAddr,
    },
    Passive,
}

/// The handshake of one connection. It does no I/O.
pub(crate) trait Handshake: fmt::Debug + Send {
    /// Appends the local side's first bytes to `out`, if it begins.
    fn begin(&mut self, out: &mut Vec<u8>) -> Result<(), SecurityError>;

    /// Consumes bytes of the peer, cut anywhere, and appends the answer to `out`. After an error, `out` may end with
    /// bytes that report the error to the peer.
    fn read(&mut self, octets: &[u8], out: &mut Vec<u8>) -> Result<(), SecurityError>;

    /// Returns the channel and the peer's identity once the peer has proven it and no bytes of the handshake remain.
    /// Returns `None` before that, and after it has returned them.
    fn finish(&mut self) -> Option<(Channel, PeerIdentity)>;

    /// Returns the text about an error of [`Handshake::read`] that is sent to the peer.
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

    /// Checks that these settings are usable for connecting (`connects`) or for listening.
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

    /// Starts a handshake. It fails if the two sides have different `context`s.
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
