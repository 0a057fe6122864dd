//! What the reactor's calls fail with, and why connections end.

use std::fmt;
use std::io;

use rdma_transport::cm::{ConnectFailure, DisconnectCause};
use rdma_transport::wc::WcStatus;

/// Why the reactor could not be made, or cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting outside its range.
    #[error("{setting} is {value}: it must be {range}")]
    Config {
        /// The setting.
        setting: &'static str,
        /// What was asked for.
        value: u64,
        /// What is possible.
        range: &'static str,
    },
    /// No provider of this name is in this build.
    #[error("the provider {provider} is not available: {reason}")]
    NoProvider {
        /// Its name.
        provider: &'static str,
        /// What is missing, and the cure.
        reason: String,
    },
    /// The provider refused.
    #[error(transparent)]
    Transport(#[from] rdma_transport::Error),
    /// The poller failed.
    #[error("polling failed: {0}")]
    Poll(#[source] io::Error),
    /// A connection, listener or timer that is gone.
    #[error("the {0} is gone")]
    Gone(&'static str),
    /// The reactor was drained.
    #[error("the reactor is drained: it opens no connections and no endpoints")]
    Drained,
    /// A thread could not be bound to a core.
    #[error("thread {index} is not bound to a core: {reason}")]
    Pin {
        /// What was asked for.
        index: usize,
        /// Why not.
        reason: &'static str,
    },
    /// A region was prepared for another device, or by another reactor, than that of the connection.
    #[error("the region was prepared for another device than the connection's")]
    ForeignDevice,
    /// A limit of the configuration is reached.
    #[error("{limit} is reached ({value})")]
    Limit {
        /// The setting that sets it.
        limit: &'static str,
        /// Its value.
        value: u64,
    },
    /// More private data than fits beside the greeting.
    #[error("{len} bytes of private data: at most {max} fit")]
    PrivateDataTooLong {
        /// Bytes asked for.
        len: usize,
        /// Bytes possible.
        max: usize,
    },
}

/// What a send has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Blocked {
    /// A place in the send queue: `Config::send_depth` sends are on their way.
    #[error("the send queue is full")]
    Queue,
    /// A credit: the peer has no receive posted for another message.
    #[error("the peer's window is closed")]
    Window,
    /// The end of another message past one buffer: as many as may be are under way.
    #[error("too many large messages are under way")]
    Transfers,
    /// Memory for the copy of a message past one buffer, see `Config::transfer_memory`.
    #[error("the memory for large messages is in use")]
    Memory,
}

/// Why a send was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendErrorKind {
    /// There is no room now: `on_writable` follows, once, when there is.
    #[error("{0}: wait for on_writable")]
    WouldBlock(Blocked),
    /// The message is longer than the peer takes.
    #[error("a message of {len} bytes: the peer takes at most {max}")]
    TooLong {
        /// Its length, bytes.
        len: usize,
        /// The peer's limit, bytes.
        max: usize,
    },
    /// The device, or the peer, lacks what this needs.
    #[error("{provider} has no {feature} here")]
    Unsupported {
        /// Which provider.
        provider: &'static str,
        /// What it lacks.
        feature: &'static str,
    },
    /// A range that is not inside the region, local or remote.
    #[error("a range that ends {end} bytes into a region of {len}")]
    OutOfBounds {
        /// Where the range ends, bytes from the region's start.
        end: u64,
        /// Length of the region, bytes.
        len: u64,
    },
    /// More regions than a work request can name.
    #[error("{count} regions in one operation: it takes 1 to {max}")]
    TooManyRegions {
        /// How many.
        count: usize,
        /// How many can be.
        max: usize,
    },
    /// A message past one buffer, in a region that the peer may not read: register it with `Access::REMOTE_READ`.
    #[error("the peer may not read the region: past {max} bytes it fetches a message itself")]
    NotReadable {
        /// Bytes that go without.
        max: usize,
    },
    /// No memory could be had or registered for a message past one buffer; the reason is logged.
    #[error("no memory for a message of {len} bytes")]
    NoMemory {
        /// Its length, bytes.
        len: usize,
    },
    /// The region is of another reactor or device, or its device was removed.
    #[error("the region is not on the connection's device")]
    ForeignRegion,
    /// The peer was forgotten, its group was left, or it is another endpoint's.
    #[error("no such peer of this endpoint")]
    NoPeer,
    /// The connection or endpoint is closed, closing, not open yet, or never was.
    #[error("the connection is not open")]
    Closed,
}

/// How a send ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The transport has taken responsibility for it; its buffer is free. Proof that the peer's program has seen it
    /// is only an answer of that program.
    Sent,
    /// The connection ended first; whether the peer got it is not known.
    Failed(WcStatus),
}

impl Outcome {
    /// Whether it was sent.
    #[must_use]
    pub const fn is_sent(self) -> bool {
        matches!(self, Self::Sent)
    }
}

/// Why a connection could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectError {
    /// The peer's side refused, with its private data.
    Rejected {
        /// Why, as far as the peer says.
        reason: RejectReason,
        /// What the peer's handler had to say.
        private_data: Vec<u8>,
    },
    /// Not established within `Config::connect_timeout`.
    Timeout,
    /// The transport failed.
    Transport(ConnectFailure),
    /// The device lacks what the settings ask for.
    Unsupported {
        /// Which provider.
        provider: &'static str,
        /// What it lacks.
        feature: &'static str,
    },
    /// A limit of this side's settings is reached.
    Limit {
        /// The setting.
        limit: &'static str,
        /// Its value.
        value: u64,
    },
    /// Something else on this side.
    Local(String),
    /// Closed before it was established.
    Cancelled,
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected { reason, .. } => write!(f, "rejected: {reason}"),
            Self::Timeout => f.write_str("no connection within the connect timeout"),
            Self::Transport(failure) => failure.fmt(f),
            Self::Unsupported { provider, feature } => write!(f, "the provider {provider} has no {feature}"),
            Self::Limit { limit, value } => write!(f, "{limit} is reached ({value})"),
            Self::Local(why) => f.write_str(why),
            Self::Cancelled => f.write_str("closed before it was established"),
        }
    }
}

impl std::error::Error for ConnectError {}

impl From<Error> for ConnectError {
    fn from(error: Error) -> Self {
        match error {
            Error::Transport(rdma_transport::Error::Unsupported { provider, feature }) => {
                Self::Unsupported { provider, feature }
            }
            Error::Limit { limit, value } => Self::Limit { limit, value },
            other => Self::Local(other.to_string()),
        }
    }
}

/// Why an open connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DisconnectReason {
    /// `close` was called here.
    Local,
    /// The peer closed, or its process ended.
    Peer,
    /// Nothing was heard for `Config::keepalive_timeout`.
    KeepaliveTimeout,
    /// A message past one buffer did not move for `Config::transfer_timeout`: the peer did not fetch what was offered to it,
    /// or did not let its own offer be fetched.
    TransferTimeout,
    /// The peer broke the protocol of this library.
    PeerViolation(PeerViolation),
    /// The transport gave up.
    Transport(DisconnectCause),
    /// The device is gone.
    DeviceRemoved,
    /// The connection could not go on for a reason of this side.
    Internal(String),
}

impl fmt::Display for DisconnectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("closed here"),
            Self::Peer => f.write_str("closed by the peer"),
            Self::KeepaliveTimeout => f.write_str("the peer was silent for the keepalive timeout"),
            Self::TransferTimeout => f.write_str("a large message did not move for the transfer timeout"),
            Self::PeerViolation(what) => write!(f, "the peer broke the protocol: {what}"),
            Self::Transport(cause) => cause.fmt(f),
            Self::DeviceRemoved => f.write_str("the device was removed"),
            Self::Internal(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for DisconnectReason {}

impl From<DisconnectReason> for io::Error {
    fn from(reason: DisconnectReason) -> Self {
        let kind = match &reason {
            DisconnectReason::Local => io::ErrorKind::NotConnected,
            DisconnectReason::Peer => io::ErrorKind::ConnectionReset,
            DisconnectReason::KeepaliveTimeout | DisconnectReason::TransferTimeout => io::ErrorKind::TimedOut,
            DisconnectReason::PeerViolation(_) => io::ErrorKind::InvalidData,
            DisconnectReason::Transport(_) | DisconnectReason::DeviceRemoved | DisconnectReason::Internal(_) => {
                io::ErrorKind::ConnectionAborted
            }
        };
        Self::new(kind, reason)
    }
}

/// What a peer did that an honest one does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerViolation {
    /// It sent without a credit.
    CreditOverrun,
    /// It granted more than any window holds.
    InvalidGrant,
    /// It offered a message that is too long, empty, or one too many.
    InvalidOffer,
    /// A message that is too short, of an unknown kind, or out of place.
    MalformedMessage,
}

impl fmt::Display for PeerViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CreditOverrun => "it sent without a credit",
            Self::InvalidGrant => "it granted more than any window holds",
            Self::InvalidOffer => "it offered a message past the limits",
            Self::MalformedMessage => "a malformed message",
        })
    }
}

/// Why a peer of ours was refused; travels in the private data of the reject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RejectReason {
    /// The peer's handler said no.
    Refused,
    /// The private data is not a greeting of this library.
    NotOurs,
    /// Another version of the protocol.
    Version,
    /// A window or message size that cannot work.
    Limits,
    /// The peer is at a limit of its own.
    Busy,
    /// A reason this version does not know.
    Other(u8),
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str("refused by the peer's program"),
            Self::NotOurs => f.write_str("the greeting is not one of rdma-reactor"),
            Self::Version => f.write_str("the protocol versions differ"),
            Self::Limits => f.write_str("the window or message size cannot work"),
            Self::Busy => f.write_str("the peer is at a limit of its own"),
            Self::Other(raw) => write!(f, "reason {raw}"),
        }
    }
}
