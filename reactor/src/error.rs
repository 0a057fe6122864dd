//! The errors of the reactor's calls, and the reasons for the end of connections.

use std::fmt;
use std::io;

use rdma_transport::cm::{ConnectFailure, DisconnectCause};
use rdma_transport::wc::Failure;

use crate::security::{SecurityError, SecurityMode};

/// The error of a reactor that could not be made or cannot go on, and of calls that open something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is outside of its range.
    #[error("{setting} is {value}: it must be {range}")]
    Config {
        /// The setting.
        setting: &'static str,
        /// The value that was asked for.
        value: u64,
        /// The possible values.
        range: &'static str,
    },
    /// The provider cannot be used here.
    #[error("the provider {provider} is not available: {reason}")]
    NoProvider {
        /// Name of the provider.
        provider: &'static str,
        /// The missing thing, and the cure.
        reason: String,
    },
    /// The provider refused.
    #[error(transparent)]
    Transport(#[from] rdma_transport::Error),
    /// The poller failed.
    #[error("polling failed: {0}")]
    Poll(#[source] io::Error),
    /// The connection, listener, timer, endpoint or device is gone.
    #[error("the {0} is gone")]
    Gone(&'static str),
    /// A callback has panicked in an earlier turn, and the program has caught the panic outside of the reactor.
    #[error("a callback has panicked in an earlier turn: drop the reactor, or contain panics (Config::contain_panics)")]
    Panicked,
    /// No thread could be had to look up a host name.
    #[error("no thread to look up a host name: {0}")]
    Lookup(#[source] io::Error),
    /// No thread could be had for the reactor.
    #[error("no thread for the reactor: {0}")]
    Thread(#[source] io::Error),
    /// The reactor was drained.
    #[error("the reactor is drained: it opens no connections and no endpoints")]
    Drained,
    /// A thread could not be bound to a core.
    #[error("thread {index} is not bound to a core: {reason}")]
    Pin {
        /// The value that was asked for.
        index: usize,
        /// The reason.
        reason: &'static str,
    },
    /// An empty list of addresses to connect to.
    #[error("no address to connect to: give one at least")]
    NoAddress,
    /// A region that is registered before there is a connection would give rights to the peer of none.
    #[error("rights for a peer before there is one: say RegionOptions::any_peer, or register for a connection")]
    NoPeer,
    /// A region was prepared for another device, or by another reactor, than that of the connection.
    #[error("the region was prepared for another device than the connection's")]
    ForeignDevice,
    /// The connection or listener cannot be secured as the settings ask.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// A limit of the configuration is reached.
    #[error("{limit} is reached ({value})")]
    Limit {
        /// The setting that has the limit.
        limit: &'static str,
        /// Its value.
        value: u64,
    },
    /// The private data is longer than the space beside the greeting.
    #[error("{len} bytes of private data: at most {max} fit")]
    PrivateDataTooLong {
        /// Length of the private data, bytes.
        len: usize,
        /// Largest possible length, bytes.
        max: usize,
    },
}

/// The thing that a send has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Blocked {
    /// A place in the send queue: `Config::send_depth` sends are on their way.
    #[error("the send queue is full")]
    Queue,
    /// A credit: the peer has no receive posted for another message.
    #[error("the peer's window is closed")]
    Window,
    /// The end of another message past one buffer: the largest possible number is under way.
    #[error("too many large messages are under way")]
    Transfers,
    /// Memory for the copy of a message past one buffer, see `LargeMessageSettings::memory`.
    #[error("the memory for large messages is in use")]
    Memory,
}

/// The reason why a send was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendErrorKind {
    /// There is no room now. One `on_writable` follows when there is room again.
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
    /// The device or the peer lacks a feature that this call needs.
    #[error("{provider} has no {feature} here")]
    Unsupported {
        /// Name of the provider.
        provider: &'static str,
        /// The missing feature.
        feature: &'static str,
    },
    /// A range is not inside its region, local or remote.
    #[error("a range that ends {end} bytes into a region of {len}")]
    OutOfBounds {
        /// End of the range, bytes from the region's start.
        end: u64,
        /// Length of the region, bytes.
        len: u64,
    },
    /// The 8 bytes of an atomic operation do not begin at a multiple of 8.
    #[error("an atomic operation at {at} {side}: it must be a multiple of 8")]
    Misaligned {
        /// The side that the bytes are on.
        side: Side,
        /// Where they begin: offset in the region of this side, or address at the peer.
        at: u64,
    },
    /// An operation names more regions than it can take.
    #[error("{count} regions in one operation: it takes 1 to {max}")]
    TooManyRegions {
        /// Number of regions that the operation names.
        count: usize,
        /// Largest number of regions.
        max: usize,
    },
    /// A piece of a list names a region that is not in the list of regions.
    #[error("piece {piece} names region {region} of a list of {count}")]
    NoSuchRegion {
        /// Index of the piece.
        piece: usize,
        /// The region that it names.
        region: usize,
        /// Number of regions in the list.
        count: usize,
    },
    /// The message is past one buffer, and the peer may not read its region. Register the region with
    /// `Access::REMOTE_READ`.
    #[error("the peer may not read the region: past {max} bytes it fetches a message itself")]
    NotReadable {
        /// Largest message that needs no such right, bytes.
        max: usize,
    },
    /// The device reads only into regions that are registered with `Access::READ_SINK`
    /// (`Features::OPEN_READ_SINKS`, on iWARP adapters).
    #[error("this device reads only into regions with Access::READ_SINK: register the region with it")]
    NotASink,
    /// One-sided operations cannot be encrypted. They are refused on a secured connection unless
    /// [`crate::Config::allow_plain_remote_memory`] is set.
    #[error(
        "one-sided operations would travel in the clear on this secured connection: send messages, or set allow_plain_remote_memory"
    )]
    PlainRemoteMemory,
    /// The region is a device's memory, which this side cannot look at, and so cannot seal for a secured connection.
    #[error("memory of a device cannot be sent on a secured connection: copy it to memory of the host first")]
    Sealed,
    /// No memory could be had or registered for a message past one buffer; the reason is logged.
    #[error("no memory for a message of {len} bytes")]
    NoMemory {
        /// Its length, bytes.
        len: usize,
    },
    /// The region belongs to another reactor or device, or its device was removed. On a device with
    /// `Features::OPEN_READ_SINKS` it may also be a message past one buffer, which is delivered as a copy.
    #[error("the region is not registered on the connection's device")]
    ForeignRegion,
    /// The buffer belongs to another reactor or device, or to this device before it failed or was removed.
    #[error("the buffer is not of the connection's device: get one with Context::buffer for this connection")]
    ForeignBuffer,
    /// No such offer waits for an answer: it was answered before, or its `on_offer` has returned.
    #[error("no such offer waits for an answer: answer it within its on_offer, once")]
    NoOffer,
    /// A message of no bytes cannot be offered.
    #[error("a message of no bytes cannot be offered: send it")]
    Empty,
    /// The peer was forgotten, its group was left, or it is another endpoint's.
    #[error("no such peer of this endpoint")]
    NoPeer,
    /// The connection or endpoint is closed, closing, not open yet, or never was.
    #[error("the connection is not open")]
    Closed,
}

/// A side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Side {
    /// This side.
    #[error("of the region of this side")]
    Local,
    /// The peer's side.
    #[error("at the peer")]
    Remote,
}

/// The outcome of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The transport has taken responsibility for the send, and its buffer is free. Only an answer of the peer's
    /// program proves that the program has seen the message.
    Sent,
    /// The connection ended first. Whether the peer got the message is not known. [`crate::Context::device`] names the
    /// connection's device.
    Failed(Failure),
    /// The peer's program does not want the message, which is past one buffer ([`crate::Context::refuse_offer`]).
    Refused,
}

impl Outcome {
    /// Whether the send has succeeded.
    #[must_use]
    pub const fn is_sent(self) -> bool {
        matches!(self, Self::Sent)
    }
}

/// The reason why a connection could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectError {
    /// The peer's side refused, with its private data.
    Rejected {
        /// The peer's reason, as far as the peer gives one.
        reason: RejectReason,
        /// The private data of the peer's handler.
        private_data: Vec<u8>,
    },
    /// The two sides did not accept each other.
    Security(SecurityError),
    /// The connection was not established within `Timeouts::connect`, or the transport gave up before that
    /// ([`ConnectFailure::Timeout`]).
    Timeout,
    /// The transport failed.
    Transport(ConnectFailure),
    /// The system found no address for the name of a host ([`crate::Context::connect_host`]): the name, and why.
    Lookup {
        /// The name.
        host: String,
        /// What the system says.
        why: String,
    },
    /// The device lacks a feature that the settings ask for.
    Unsupported {
        /// Name of the provider.
        provider: &'static str,
        /// The missing feature.
        feature: &'static str,
    },
    /// A limit of this side's settings is reached.
    Limit {
        /// The setting.
        limit: &'static str,
        /// Its value.
        value: u64,
    },
    /// Something else on this side failed.
    Local(String),
    /// The connection was closed before it was established.
    Cancelled,
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected { reason, .. } => write!(f, "rejected: {reason}"),
            Self::Security(error) => error.fmt(f),
            Self::Timeout => f.write_str("no connection within the connect timeout"),
            Self::Transport(failure) => failure.fmt(f),
            Self::Lookup { host, why } => write!(f, "{host}: {why}: check the name and the resolver"),
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
            Error::Security(error) => Self::Security(error),
            other => Self::Local(other.to_string()),
        }
    }
}

/// The reason why an open connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DisconnectReason {
    /// This side closed the connection.
    Local {
        /// Everything that was accepted for sending was sent before the end, as [`Outcome::Sent`] says, also with
        /// [`crate::Config::quiet_sends`]. A goodbye went behind it, so the peer sees [`DisconnectReason::Closed`], unless the peer closed
        /// the connection, too, or its process or the path fails before it has got all that. What "sent" means depends on the device.
        /// On InfiniBand and RoCE, the device of the peer has everything. On an iWARP device (siw), TCP has had everything, and this side
        /// has waited for the peer to end the connection. On the embedded provider, TCP has everything, and goes on delivering it. That the
        /// peer's program has seen a message is only proven by an answer of that program.
        ///
        /// `false`: the connection was cut off by `abort`, or at a deadline (`Timeouts::close`, a drain, a shutdown), or it broke
        /// after it was closed. Some sends may have failed, and the peer sees [`DisconnectReason::Lost`].
        /// [`crate::ConnectionStats::cut_off`] counts these ends.
        complete: bool,
    },
    /// The peer's program closed the connection. With [`crate::Framing::Raw`], which has no goodbye, this is any end that the
    /// peer's transport made in order, also that of a process that ended.
    Closed,
    /// The connection ended without a goodbye of the peer: its process ended, or its program called `abort`, dropped its
    /// reactor, or ran out of `Timeouts::close`.
    Lost,
    /// Nothing was heard of the peer for the timeout of `Timeouts::keepalive`.
    KeepaliveTimeout,
    /// A message past one buffer did not move for `Timeouts::transfer`: the peer did not fetch what was offered to it,
    /// or did not let its own offer be fetched. Or the peer answered no read of its offer for 2 s while others waited for the memory;
    /// or it said for four times `Timeouts::transfer` that it waits for memory of its own. Or the deadline of a transfer of a list
    /// ([`crate::TransferOptions::within`]) has passed while pieces of it were posted.
    TransferTimeout,
    /// The peer broke the protocol of this library.
    PeerViolation(PeerViolation),
    /// The transport gave up.
    Transport(DisconnectCause),
    /// A work request failed on a device.
    WorkRequest {
        /// Name of the device.
        device: String,
        /// The status that the device gave, and its own code.
        failure: Failure,
    },
    /// The device is gone.
    DeviceRemoved,
    /// The connection could not go on for a reason of this side.
    Internal(String),
}

impl fmt::Display for DisconnectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local { complete: true } => f.write_str("closed here"),
            Self::Local { complete: false } => f.write_str("cut off here: not everything was sent"),
            Self::Closed => f.write_str("closed by the peer"),
            Self::Lost => f.write_str("lost: the peer went without a goodbye"),
            Self::KeepaliveTimeout => f.write_str("the peer was silent for the keepalive timeout"),
            Self::TransferTimeout => f.write_str(
                "a large message did not move for the transfer timeout, or a transfer was not done at its deadline",
            ),
            Self::PeerViolation(what) => write!(f, "the peer broke the protocol: {what}"),
            Self::Transport(cause) => cause.fmt(f),
            Self::WorkRequest { device, failure } => write!(f, "{device}: a work request failed: {failure}"),
            Self::DeviceRemoved => f.write_str("the device was removed"),
            Self::Internal(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for DisconnectReason {}

impl From<DisconnectReason> for io::Error {
    fn from(reason: DisconnectReason) -> Self {
        let kind = match &reason {
            DisconnectReason::Local { .. } => io::ErrorKind::NotConnected,
            DisconnectReason::Closed | DisconnectReason::Lost => io::ErrorKind::ConnectionReset,
            DisconnectReason::KeepaliveTimeout | DisconnectReason::TransferTimeout => io::ErrorKind::TimedOut,
            DisconnectReason::PeerViolation(_) => io::ErrorKind::InvalidData,
            DisconnectReason::Transport(_)
            | DisconnectReason::WorkRequest { .. }
            | DisconnectReason::DeviceRemoved
            | DisconnectReason::Internal(_) => io::ErrorKind::ConnectionAborted,
        };
        Self::new(kind, reason)
    }
}

/// An act of a peer that an honest peer does not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerViolation {
    /// The peer sent without a credit.
    CreditOverrun,
    /// The peer granted more than any window holds.
    InvalidGrant,
    /// The peer offered a message that is too long, empty or already offered, or one message too many.
    InvalidOffer,
    /// The peer sent a message that is too short, too long, of an unknown kind, or out of place.
    MalformedMessage,
    /// A message of a secured connection is not the next one that the peer has sealed: somebody has changed, repeated,
    /// dropped or made it.
    NotAuthentic,
}

impl fmt::Display for PeerViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CreditOverrun => "it sent without a credit",
            Self::InvalidGrant => "it granted more than any window holds",
            Self::InvalidOffer => "it offered a message past the limits",
            Self::MalformedMessage => "a malformed message",
            Self::NotAuthentic => "a message that is not authentic",
        })
    }
}

/// The reason of a refusal. It travels in the private data of the reject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RejectReason {
    /// The peer's handler refused.
    Refused,
    /// The private data is not a greeting of this library.
    NotOurs,
    /// The two sides have different versions of the protocol.
    Version,
    /// The window or the message size cannot work.
    Limits,
    /// The peer is at a limit of its own.
    Busy,
    /// The peer is shutting down: its reactor is being drained. A peer of an older version says `Busy` instead.
    Draining,
    /// The peer secures its connections in this way, and this side in another.
    Security(SecurityMode),
    /// A reason that this version does not know.
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
            Self::Draining => f.write_str("the peer is shutting down"),
            Self::Security(mode) => write!(f, "the peer takes {mode}"),
            Self::Other(raw) => write!(f, "reason {raw}"),
        }
    }
}
