//! The proof of who the peer is, and the keys that keep everybody else out.
//!
//! A connection knows one thing of all this, in two lives. A [`Handshake`] takes octets of the peer and gives octets for
//! it, until both sides have proven who they are. Then it ends in a [`Channel`], which seals and opens messages in place.
//! [`tls`] and [`psk`] are the two kinds of handshakes. No cryptography is made here: it is that of rustls, snow and ring.

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

/// Who may connect, and who may read along: the same for every message of a connection, on every provider.
///
/// Both sides must ask for the same: the one that connects ([`crate::ConnectOptions::security`]) and the one that listens
/// ([`crate::ListenOptions::security`]), or [`crate::Config::security`] for all connections of a reactor. A peer that asks
/// for something else is refused ([`crate::RejectReason::Security`]); nothing is negotiated, so nothing can be negotiated
/// away. With anything but `Plain`, `on_connect` follows a handshake in which the peer has proven who it is
/// ([`PeerIdentity`]), and every message after it is encrypted and authenticated. One-sided operations are not, so they are
/// refused unless [`crate::Config::allow_plain_remote_memory`] is set. See [the guide](crate::guide::security).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Security {
    /// Messages travel as they are, and anybody who reaches the listener may connect. The default.
    #[default]
    Plain,
    /// TLS 1.3, as QUIC carries it (RFC 9001): certificates or raw public keys prove who the sides are.
    #[cfg(feature = "tls")]
    Tls(tls::Tls),
    /// A key that all members of a small cluster have: Noise, pattern NNpsk0.
    #[cfg(feature = "psk")]
    Psk(psk::Psk),
}

/// What a side asks of its peers, as the greeting says it.
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
    /// The mode that a number of the greeting stands for.
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

/// Who the peer of a secured connection is, as its handshake has proven.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerIdentity {
    /// The peer has shown no certificate, and the settings of TLS do not ask for one.
    Anonymous,
    /// The certificates that the peer has shown, in DER, its own first; or one raw public key, as SubjectPublicKeyInfo in
    /// DER. The settings of TLS have accepted them, and the peer has the private key. `PeerIdentity::names` reads the names.
    Certificates(Vec<Vec<u8>>),
    /// The name of the pre-shared key that the peer has.
    Psk(String),
}

/// The reason why a connection could not be secured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SecurityError {
    /// This side does not accept the peer: its certificate, its key, or what its handshake said.
    #[error("the peer is not accepted here: {0}")]
    Peer(String),
    /// The peer says that it does not accept this side. What it says is not authenticated.
    #[error("the peer does not accept this side: {0}")]
    Refused(String),
    /// The settings of this side cannot be used.
    #[error("{0}")]
    Settings(String),
}

/// Whether a character of a text by others commands a terminal, changes the direction of text, or cannot be seen by itself.
pub(crate) fn is_hidden(c: char) -> bool {
    // What cannot be printed has an escape sequence of more than two characters; those of quotation marks have two.
    c.is_control() || c.escape_debug().len() > 2
}

/// A side of a handshake.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "without the features nothing asks for it")]
pub(crate) enum HandshakeRole<'a> {
    /// This side connects to a host, if it was given by its name, at an address.
    Active {
        host: Option<&'a str>,
        address: IpAddr,
    },
    Passive,
}

/// A handshake of one connection. It does no I/O.
pub(crate) trait Handshake: fmt::Debug + Send {
    /// Adds the octets with which this side begins, if it does.
    fn begin(&mut self, out: &mut Vec<u8>) -> Result<(), SecurityError>;

    /// Takes octets of the peer, cut anywhere, and adds those of the answer. After an error `out` may end with octets that
    /// tell the peer.
    fn read(&mut self, octets: &[u8], out: &mut Vec<u8>) -> Result<(), SecurityError>;

    /// The end of a handshake in which the peer has proven who it is and after which no octets of it are to come. `None`: it
    /// is not that far, or has ended before.
    fn finish(&mut self) -> Option<(Channel, PeerIdentity)>;

    /// The words for the peer about an error of [`Handshake::read`].
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

    /// Checks whether a side can be taken with these settings.
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

    /// Starts a handshake. Both sides must have the same `context`, or the handshake fails.
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
