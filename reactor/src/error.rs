//! The errors that operations return, and the reasons why connections are not established or end.

use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;

use rdma_transport::cm::{ConnectFailure, DisconnectCause};
use rdma_transport::wc::Failure;

use crate::limits::VERSION;
use crate::security::{SecurityError, SecurityMode};

/// The error of an operation that creates or runs a reactor, opens a connection, listener or endpoint, or registers memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
// local: the text of one error
pub enum Error {
    /// A setting is out of its range.
    #[error("{setting} is {value}: it must be {range}")]
    Config {
        /// The name of the setting.
        setting: &'static str,
        /// The value that was set.
        value: u64,
        /// The valid values.
        range: Cow<'static, str>,
    },
    /// The reactor cannot use the provider on this machine. With the provider `any`: the program
    /// gave the reactor no providers, or too many.
    #[error("the provider {provider} is not available: {reason}")]
    NoProvider {
        /// The name of the provider.
        provider: &'static str,
        /// The reason, and what to do about it.
        reason: String,
    },
    /// The provider returned an error.
    #[error(transparent)]
    Transport(#[from] rdma_transport::TransportError),
    /// The reactor's poller failed. The poller is the part of the reactor that waits for descriptors in the operating system.
    #[error("polling failed: {0}")]
    Poll(#[source] io::Error),
    /// The connection, listener, timer, endpoint or device does not exist any more.
    #[error("the {0} is gone")]
    Gone(&'static str),
    /// A callback of the program panicked in an earlier turn, and the program caught that panic. The reactor takes no further turns.
    #[error("a callback panicked in an earlier turn: drop the reactor, or contain panics (Config::contain_panics)")]
    Panicked,
    /// The closure of `ThreadedReactor::with` has panicked.
    #[error("the closure panicked on the reactor's thread")]
    ClosurePanicked,
    /// The system could not start the thread that looks up a host name.
    #[error("cannot start the thread that looks up a host name: {0}")]
    Lookup(#[source] io::Error),
    /// The system could not start the reactor's thread.
    #[error("cannot start the thread of the reactor: {0}")]
    Thread(#[source] io::Error),
    /// The reactor is draining or has drained. After a drain was requested, the reactor cannot listen any more. After the deadline of the
    /// drain, it can neither open connections and endpoints nor register memory without a connection.
    #[error("the reactor is drained: it opens no connections and no endpoints")]
    Drained,
    /// A thread could not be bound to a core.
    #[error("thread {index} is not bound to a core: {reason}")]
    Pin {
        /// The argument `index` of [`crate::Reactors::pin`].
        index: usize,
        /// The reason why the binding failed.
        reason: &'static str,
    },
    /// The list of addresses, or the name of the host, to connect to is empty.
    #[error("no address to connect to: give at least one")]
    NoAddress,
    /// A link-local IPv6 address has no zone, so the system does not know the interface of the
    /// address.
    #[error("{} is link-local: name its interface as well, as in fe80::1%eth0", .0.ip())]
    NoZone(SocketAddr),
    /// The options allow a peer to access the region, but the region is registered without a connection, so there is no
    /// peer.
    #[error("rights for a peer before there is one: set RegionOptions::any_peer, or register for a connection")]
    NoPeer,
    /// The region was prepared by another reactor, or for a device that is not the device of the connection.
    #[error("the region was prepared for another device than the connection's")]
    ForeignDevice,
    /// The connection or listener cannot be secured with these settings.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// A limit of the configuration has been reached.
    #[error("{limit} has been reached ({value})")]
    Limit {
        /// The name of the setting that defines the limit.
        limit: &'static str,
        /// The value of the setting.
        value: u64,
    },
    /// The private data of the program does not fit into the connect request, which also contains the greeting of the reactor.
    #[error("{len} bytes of private data: the limit is {max}")]
    PrivateDataTooLong {
        /// The length of the private data, in bytes.
        len: usize,
        /// The largest length that fits, in bytes.
        max: usize,
    },
}

/// The resource that a refused send has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Blocked {
    /// A slot of the send queue. None of the `Config::send_depth` slots is free.
    #[error("the send queue is full")]
    Queue,
    /// A credit. The local side has used all credits that the peer has granted for messages of the program.
    #[error("the peer's window is closed")]
    Window,
    /// A slot for a large message, that is, for a message longer than one buffer. All such slots of the connection are in use. A slot
    /// becomes free when the send of its large message has completed.
    #[error("too many large messages are in flight")]
    Transfers,
    /// Memory for the copy of a message that is longer than one buffer; see `LargeMessageSettings::memory`.
    #[error("the memory for large messages is used up")]
    Memory,
}

/// The reason why a send or a one-sided operation was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendErrorKind {
    /// A resource is used up. When it is available again, the reactor calls `on_writable` once.
    #[error("{0}: wait for on_writable")]
    WouldBlock(Blocked),
    /// The length exceeds a limit:
    ///
    /// - A message may be at most as long as the longest message that the peer accepts.
    /// - A copied message that the peer would fetch by RDMA Read must also fit into the local
    ///   `LargeMessageSettings::memory`.
    /// - A [`crate::SendBuffer`] must fit into one buffer of the peer
    ///   ([`crate::ConnectionContext::buffer_size`]).
    /// - A datagram, a one-sided operation or a piece of a transfer may be at most as long as the
    ///   local device permits.
    #[error("{len} bytes in one message or operation: at most {max} are possible here")]
    TooLong {
        /// The length of the message, the operation or the piece, in bytes.
        len: usize,
        /// The limit that the length exceeds, in bytes.
        max: usize,
    },
    /// The device or the peer does not support a feature that this call needs.
    #[error("{provider} has no {feature} here")]
    Unsupported {
        /// Name of the provider.
        provider: &'static str,
        /// The missing feature.
        feature: &'static str,
    },
    /// The range of an operation exceeds the local or remote region to which the operation applies.
    #[error("the range ends at byte {end} of a region of {len} bytes")]
    OutOfBounds {
        /// The end of the range, in bytes from the start of the region.
        end: u64,
        /// The length of the region, in bytes.
        len: u64,
    },
    /// The 8 bytes of an atomic operation do not begin at a multiple of 8.
    #[error("an atomic operation at {at} {location}: it must be a multiple of 8")]
    Misaligned {
        /// The side whose memory is misaligned.
        location: MemoryLocation,
        /// The start of the 8 bytes: an offset in the local region, or an address of the peer's memory.
        at: u64,
    },
    /// An operation names no region, or more regions than it supports.
    #[error("{count} regions in one operation: the range is 1 to {max}")]
    TooManyRegions {
        /// The number of regions that the operation names.
        count: usize,
        /// The largest number of regions of one operation.
        max: usize,
    },
    /// A piece of a transfer names a region that is not in the transfer's list of regions.
    #[error("piece {piece} names region {region}, but the list has {count} regions")]
    NoSuchRegion {
        /// The index of the piece.
        piece: usize,
        /// The index of the region that the piece names.
        region: usize,
        /// The number of regions in the list.
        count: usize,
    },
    /// The peer may not read the region that contains the message. The peer must fetch this message by RDMA Read, because the message is
    /// longer than one buffer, or because the program offers it. Register the region with `Access::REMOTE_READ`.
    #[error(
        "the peer may not read the region, but fetches messages of more than {max} bytes from there: register it with Access::REMOTE_READ"
    )]
    NotReadable {
        /// The length in bytes of the longest message that the peer does not fetch. For an offer it is 0, because the peer fetches every
        /// offered message.
        max: usize,
    },
    /// The region is not registered with `Access::READ_SINK`, so the device cannot place the data of an RDMA Read in it. Devices with
    /// `Features::OPEN_READ_SINKS`, such as iWARP adapters, need this access right.
    #[error("this device reads only into regions with Access::READ_SINK: register the region with it")]
    NotASink,
    /// The connection is secured, and one-sided operations cannot be encrypted. To allow one-sided operations without encryption, set
    /// [`crate::Config::allow_plain_remote_memory`].
    #[error(
        "one-sided operations would travel in the clear on this secured connection: send messages, or set allow_plain_remote_memory"
    )]
    PlainRemoteMemory,
    /// The connection is secured, but the message is in the memory of a device, such as a GPU. This process cannot read
    /// that memory, so it cannot encrypt the message.
    #[error("memory of a device cannot be sent on a secured connection: copy it to memory of the host first")]
    Sealed,
    /// The reactor could not allocate or register memory for a message that is longer than one buffer. The log has the
    /// reason.
    #[error("no memory for a message of {len} bytes")]
    NoMemory {
        /// The length of the message, in bytes.
        len: usize,
    },
    /// The region is registered with another reactor or another device than those of the connection, or the device of the region was
    /// removed. On a device with `Features::OPEN_READ_SINKS` there is one more case: a received message that is longer than one buffer is
    /// delivered as a copy that is not registered, so its memory cannot be used as a region.
    #[error("the region is not registered on the connection's device")]
    ForeignRegion,
    /// The buffer belongs to another reactor or device, or the device of the buffer failed or was removed after the program had taken the
    /// buffer.
    #[error("the buffer does not belong to the connection's device: get one with Context::buffer for this connection")]
    ForeignBuffer,
    /// The offer cannot be answered any more: the program has already answered it, or the call of `on_offer` for it has returned.
    #[error("no such offer waits for an answer: answer it within its on_offer, once")]
    NoOffer,
    /// The message is empty. An empty message can be sent, but not offered.
    #[error("an empty message cannot be offered: send it")]
    Empty,
    /// The peer of a datagram is unknown: the program has forgotten the peer, the endpoint has left the group that is the peer, or the peer
    /// belongs to another endpoint.
    #[error("no such peer of this endpoint")]
    NoPeer,
    /// The connection or endpoint is not open. It is being established, is closing, has ended, or never existed.
    #[error("the connection is not open")]
    Closed,
}

/// The location of a memory range that an operation uses: the local side or the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryLocation {
    /// The region of the local side.
    #[error("in the local region")]
    Local,
    /// The memory of the peer.
    #[error("at the peer")]
    Remote,
}

/// The result of a send or a one-sided operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The send has completed, and its buffer is free. With the embedded provider, the send of a short message completes when it is posted,
    /// because the message is copied into the TCP stream or the shared memory. `Sent` does not prove that the peer's program has received
    /// the message: only an answer of that program does.
    Sent,
    /// The connection ended before the send completed. The peer may or may not have received the message. To report the device together
    /// with the failure, call [`crate::ConnectionContext::device`].
    Failed(Failure),
    /// The peer's program refused the message ([`crate::Context::refuse_offer`]). It can refuse
    /// only messages that its reactor fetches by RDMA Read: those of [`crate::Context::offer`], and
    /// those that are longer than one buffer and are not sent in several buffers.
    Refused,
}

impl Outcome {
    /// Returns `true` if the outcome is [`Outcome::Sent`].
    #[must_use]
    pub const fn is_sent(self) -> bool {
        matches!(self, Self::Sent)
    }
}

/// The reason why a connection was not established.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
// bound: private-data
pub enum ConnectError {
    /// The peer rejected the connection.
    #[error("rejected: {reason}")]
    Rejected {
        /// The reason that the peer has sent in its reject.
        reason: RejectReason,
        /// The private data that the peer's program has added to the reject. Empty if it has added no data.
        private_data: Vec<u8>,
    },
    /// The connection could not be secured, for instance because one side did not accept the identity of the other side.
    #[error("{0}")]
    Security(SecurityError),
    /// The connection was not established within `Timeouts::connect`, or a timeout of the transport expired before that
    /// ([`ConnectFailure::Timeout`]).
    #[error("no connection within the connect timeout")]
    Timeout,
    /// The transport could not establish the connection.
    #[error("{0}")]
    Transport(ConnectFailure),
    /// The system found no address for a host name ([`crate::Context::connect_host`]).
    #[error("{host}: {why}: check the name and the resolver")]
    Lookup {
        /// The host name.
        host: String,
        /// The error that the system returned.
        why: String,
    },
    /// The device does not support a feature that the settings need.
    #[error("the provider {provider} has no {feature}")]
    Unsupported {
        /// Name of the provider.
        provider: &'static str,
        /// The missing feature.
        feature: &'static str,
    },
    /// A limit of the local settings has been reached.
    #[error("{limit} has been reached ({value})")]
    Limit {
        /// The name of the setting that defines the limit.
        limit: &'static str,
        /// The value of the setting.
        value: u64,
    },
    /// Another operation failed on the local side. The text names the operation and the error.
    #[error("{0}")]
    Local(String),
    /// The local side closed the connection before it was established: the program closed it or
    /// shut the reactor down, or the deadline of a drain has passed. In `DatagramHandler::on_peer`,
    /// it means that the endpoint ended before it had found the peer.
    #[error("closed before it was established")]
    Cancelled,
}

impl From<Error> for ConnectError {
    fn from(error: Error) -> Self {
        match error {
            Error::Transport(rdma_transport::TransportError::Unsupported { provider, feature }) => {
                Self::Unsupported { provider, feature }
            }
            Error::Limit { limit, value } => Self::Limit { limit, value },
            Error::Security(error) => Self::Security(error),
            other => Self::Local(other.to_string()),
        }
    }
}

/// The reason why an open connection ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
// local: the text of one error
pub enum DisconnectReason {
    /// The local side closed the connection.
    #[error("{}", if *complete { "closed here" } else { "cut off here: not everything was sent" })]
    Local {
        /// `true` if every accepted send had completed with [`Outcome::Sent`] before the connection ended. This includes sends whose
        /// completions are not reported ([`crate::Config::quiet_sends`]). The reactor has also sent a goodbye message, so the peer sees
        /// [`DisconnectReason::Closed`]. The peer may still see another reason in two cases: the peer closed the connection as well, or the
        /// peer's process or the path failed before all data had arrived. The meaning of "completed" depends on the device:
        ///
        /// - InfiniBand and RoCE: the peer's device has received all data.
        /// - iWARP devices (siw): TCP has accepted all data, and the reactor has waited for the peer to end the connection.
        /// - The embedded provider: TCP has accepted all data, and continues to deliver the data after the end of the connection.
        ///
        /// Only an answer of the peer's program proves that the program has received a message.
        ///
        /// `false` if the connection ended before every accepted send had completed. The cause was `abort`, the deadline of
        /// `Timeouts::close` or of a drain, or a failure of the connection after the local side had closed it. Some sends
        /// may have failed, and the peer sees [`DisconnectReason::Lost`]. [`crate::ConnectionStats::cut_off`] counts these ends.
        complete: bool,
    },
    /// The peer's program closed the connection, and its reactor sent a goodbye message. [`crate::Framing::Raw`] has no goodbye message. On
    /// a connection with that framing, `Closed` is the reason for every orderly disconnect by the peer's transport, even if the peer's
    /// process exited.
    #[error("closed by the peer")]
    Closed,
    /// The connection ended without a goodbye message of the peer. The peer's process exited, or the peer's program called `abort`, dropped
    /// the reactor, or could not send all messages within `Timeouts::close`.
    #[error("lost: the peer disconnected without a goodbye")]
    Lost,
    /// Nothing was received from the peer for `Timeouts::keepalive`.
    #[error("the peer was silent for the keepalive timeout")]
    KeepaliveTimeout,
    /// A large message, or a transfer ([`crate::RemoteContext::transfer`]), did not make progress
    /// in time. A large message is offered to its receiver, which fetches it by RDMA Read. The
    /// cause is one of these:
    ///
    /// - The peer made no progress for `Timeouts::transfer`: it did not fetch a message that the local side had offered, or it did not
    ///   answer the local side's Reads of a message that the peer had offered.
    /// - The peer offered a message, but answered no Read of that message for 2 s, while other connections waited for memory for large
    ///   messages.
    /// - The peer reported that it was waiting for memory, and did not fetch an offered message within four times `Timeouts::transfer`.
    /// - The deadline of a transfer ([`crate::TransferOptions::within`]) passed while pieces of the
    ///   transfer were in flight.
    #[error("a large message made no progress for the transfer timeout, or a transfer was not done at its deadline")]
    TransferTimeout,
    /// The peer violated the protocol of this library.
    #[error("the peer violated the protocol: {0}")]
    PeerViolation(PeerViolation),
    /// The transport ended the connection.
    #[error("{0}")]
    Transport(DisconnectCause),
    /// A work request failed on a device.
    #[error("{device}: a work request failed: {failure}")]
    WorkRequest {
        /// The name of the device.
        device: String,
        /// The completion status, and the device's vendor error code.
        failure: Failure,
    },
    /// The device was removed.
    #[error("the device was removed")]
    DeviceRemoved,
    /// An error of the local side ended the connection. The text describes it.
    #[error("{0}")]
    Internal(String),
}

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

/// A violation of the protocol by the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerViolation {
    /// The peer sent a message without a credit.
    #[error("it sent without a credit")]
    CreditOverrun,
    /// The peer granted more credits than the largest possible window contains.
    #[error("it granted more credits than a window can have")]
    InvalidGrant,
    /// The peer offered a message that is too long, empty or already offered, or the peer offered too many messages at the same time. Also:
    /// the peer sent a message in several buffers that is too long.
    #[error("it offered a message that exceeds the limits")]
    InvalidOffer,
    /// The peer sent a message that is too short, too long, of an unknown kind, or not allowed in
    /// the current state of the connection.
    #[error("it sent a malformed message")]
    MalformedMessage,
    /// A message of a secured connection is not the next message that the peer has encrypted. The message was changed, repeated or forged
    /// in the network, or an earlier message was dropped.
    #[error("a message is not authentic")]
    NotAuthentic,
}

/// The reason why the peer rejected a connection. The private data of the reject contains this reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RejectReason {
    /// The peer's program refused the connection, or the peer's `Config::allowed_peers` does not contain the local address.
    #[error("refused by the peer's program, or by its allowed_peers")]
    Refused,
    /// The private data of the connect request is not a greeting of this library.
    #[error("the greeting is not one of rdma-reactor")]
    NotOurs,
    /// The two sides have different versions of the protocol.
    #[error("the protocol versions differ: the local side speaks version {}", VERSION)]
    Version,
    /// The window or the message size in the greeting is out of range.
    #[error("the window or the message size is out of range")]
    Limits,
    /// The peer has reached one of its limits.
    #[error("the peer has reached one of its limits, which its log names: try again later")]
    Busy,
    /// The peer's reactor is being drained.
    #[error("the peer is shutting down")]
    Draining,
    /// The two sides secure their connections in different ways. The value is the mode that the peer uses.
    #[error("the peer takes {0}")]
    Security(SecurityMode),
    /// The peer accepts only connections in shared memory (`ProviderChoice::Shm`), and shared memory cannot be used between
    /// the two sides: it needs the same host and user, and `ProviderChoice::Auto` or `Shm` on the connecting side.
    #[error("the peer accepts only peers in shared memory: same host, same user, ProviderChoice::Auto or Shm")]
    SharedMemoryOnly,
    /// A reason that this version of the library does not know.
    #[error("reason {0}, which a later version defines")]
    Other(u8),
}
