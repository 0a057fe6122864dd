//! Connection management: ids, the parameters of calls, and events.

use std::any::Any;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::datagram::DatagramPeer;
use crate::error::{Result, in_range};
pub use crate::handle::CmId;
use crate::handle::DeviceId;
use crate::wc::Failure;

/// The parameters of `connect` and of `accept` (`rdma_connect`(3)).
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnectParam<'a> {
    /// The private data, which the peer receives in the event `ConnectRequest`, `Established` or `Reached`. Some
    /// devices pad the private data with zeros, so include the length in the data.
    pub private_data: &'a [u8],
    /// The number of RDMA Reads that the peer may have outstanding at the local queue pair (IRD). 0 selects the
    /// device's default.
    pub responder_resources: u16,
    /// The number of RDMA Reads that the local queue pair may have outstanding at the peer (ORD). 0 selects the
    /// device's default.
    pub initiator_depth: u16,
    /// The limits and pauses of retransmissions. Ignored on iWARP, where TCP retransmits.
    pub retries: Retries,
    /// True if the private data contains its own length, so that the peer ignores bytes behind it.
    /// If true, the embedded provider may append 4 bytes to the private data of a connect request
    /// within the host. By these bytes, the peer detects a proxy on the path.
    pub self_delimiting: bool,
}

impl ConnectParam<'_> {
    /// Logs at level `info` that `provider` ignores [`ConnectParam::retries`]. Logs nothing if `retries` has its
    /// default value. Providers that do not support retry counts call this function.
    pub fn note_ignored(&self, provider: &str) {
        if self.retries != Retries::default() {
            local_log!(Info, "the provider {provider} has no retry counts, since TCP retransmits: ignored");
        }
    }
}

/// The number of times that a device retransmits a request, and the pauses between retransmissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retries {
    /// The number of times that either side retransmits an unanswered request, 0 to 7. The default is 7. The connecting
    /// side sets this number for both sides; `accept` ignores it. The pause before a retransmission is the ack timeout
    /// ([`PathOptions::ack_timeout`]). rxe interprets 7 as "no limit", so a connection from an rxe
    /// device has 6 instead of 7. If an rxe device accepts a connection through rdma_cm, and the
    /// peer has set 7, the device retransmits without limit.
    pub path: u8,
    /// The number of times that the **peer** retransmits a message that arrives when the local side has no receive
    /// posted, 0 to 6. 7, the default, means no limit. So each side sets the number that the other side uses
    /// (`rdma_connect`(3)).
    pub receiver_not_ready: u8,
    /// The pause of the peer before it retransmits a message that arrived when the local side had no receive posted.
    /// The value is a code from 0 to 31 (InfiniBand Architecture Specification, volume 1, table 45): 1 is 0.01 ms, 12
    /// is 0.64 ms, 31 is 491 ms, and 0 is 655 ms. The default is 12.
    pub min_rnr_timer: u8,
}

impl Default for Retries {
    fn default() -> Self {
        Self { path: 7, receiver_not_ready: 7, min_rnr_timer: 12 }
    }
}

impl Retries {
    /// Checks that all values are in their ranges.
    ///
    /// # Errors
    /// [`crate::TransportError::OutOfRange`] names the first value that is outside its range.
    pub fn check(&self) -> Result<()> {
        in_range("retry count", self.path, 0..=7, "0 to 7")?;
        in_range("receiver-not-ready retry count", self.receiver_not_ready, 0..=7, "0 to 7")?;
        in_range("minimum receiver-not-ready timer", self.min_rnr_timer, 0..=31, "0 to 31")
    }
}

/// Options for the path of a connection. The program chooses them before it resolves the peer's address. The system
/// chooses each option that is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathOptions {
    /// The type of service of each packet. Its upper six bits are the DSCP (RFC 2474). On InfiniBand the subnet manager
    /// derives the service level from the type of service. Siw of Linux 6.1 accepts the option but does not use it.
    pub type_of_service: Option<u8>,
    /// The time after which the device retransmits an unanswered request. The value is a code from 0 to 31, which means
    /// 4.096 us times 2 to the power of the code. 0 means that the device waits forever. By default the connection
    /// manager uses code 19 (about 2 s) or the value of the subnet manager.
    pub ack_timeout: Option<u8>,
    /// The local address or device from which the connection is made.
    pub source: Source,
}

/// The choice of the local end of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The system's routes choose the local address.
    #[default]
    Any,
    /// The connection uses this local address.
    Address(IpAddr),
    /// The connection uses this local device.
    Device {
        /// The name of the device, such as `mlx5_0`.
        name: String, // local: the name of a device
        /// The number of the port, from 1; `None` for any port of the device.
        port: Option<u8>,
    },
}

impl PathOptions {
    /// Checks that the values are in their ranges.
    ///
    /// # Errors
    /// [`crate::TransportError::OutOfRange`] names the value that is outside its range.
    pub fn check(&self) -> Result<()> {
        in_range("ack timeout", self.ack_timeout.unwrap_or(0), 0..=31, "a code from 0 to 31")
    }

    /// Logs at level `info`, in one line, which options are set although `provider` ignores them. A provider that
    /// supports neither the type of service nor the ack timeout calls this function. [`PathOptions::source`] is not
    /// logged, because a provider must use it or return an error.
    pub fn note_ignored(&self, provider: &str) {
        let requested = [("type of service", self.type_of_service), ("ack timeout", self.ack_timeout)];
        let ignored: Vec<&str> = requested.iter().filter(|option| option.1.is_some()).map(|option| option.0).collect();
        if !ignored.is_empty() {
            local_log!(Info, "the provider {provider} has no {}: ignored", ignored.join(" and no "));
        }
    }
}

/// The options of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenParam {
    /// The number of connect requests that may wait until the program accepts or rejects them. The system refuses
    /// further requests (`rdma_listen`(3), `listen`(2)). The default is 4096.
    pub backlog: u32,
    /// The type of service of incoming connections on iWARP, like [`PathOptions::type_of_service`]. It has no effect on
    /// InfiniBand and RoCE, where the peer's request sets the type of service of both directions.
    pub type_of_service: Option<u8>,
    /// The ack timeout of incoming connections, like [`PathOptions::ack_timeout`].
    pub ack_timeout: Option<u8>,
    /// If true, a listener on an IPv6 address accepts only IPv6. If false, it also accepts IPv4, which siw does not
    /// support. If `None`, the system decides.
    pub ipv6_only: Option<bool>,
}

impl Default for ListenParam {
    fn default() -> Self {
        Self { backlog: 4096, type_of_service: None, ack_timeout: None, ipv6_only: None }
    }
}

impl ListenParam {
    /// Checks that the values are in their ranges. Logs at level `info` which options are set although `provider`
    /// ignores them. A provider that supports none of the options except the backlog calls this function.
    ///
    /// # Errors
    /// [`crate::TransportError::OutOfRange`] names the value that is outside of its range.
    pub fn note_ignored(&self, provider: &str) -> Result<()> {
        let Self { type_of_service, ack_timeout, ipv6_only, .. } = *self;
        let path = PathOptions { type_of_service, ack_timeout, source: Source::Any };
        path.check()?;
        path.note_ignored(provider);
        if ipv6_only.is_some() {
            local_log!(Info, "the provider {provider} cannot choose between IPv6 only and both: ignored");
        }
        Ok(())
    }
}

/// Options of a connection by out-of-band exchange ([`Exchange`](crate::roles::Exchange)): the device, port and GID of its queue pair. The
/// provider derives each field that is `None` from the local address of the stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExchangeOptions {
    /// The name of the device, such as `mlx5_0`. Necessary if the stream and the device use different networks, or if
    /// the stream is a Unix socket.
    pub device: Option<String>, // local: a setting
    /// The number of the device's port, from 1.
    pub port: Option<u8>,
    /// The index in the port's table of GIDs. On Ethernet the GID must be of the type RoCE version 2, and the default is the GID of the
    /// stream's address. On InfiniBand the default is 0.
    pub gid_index: Option<u8>,
}

/// The limits of RDMA Reads and atomics that may be outstanding on a connection. Local requests beyond the limit wait
/// in the send queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadDepth {
    /// The limit of the peer's outstanding requests at the local side (IRD).
    pub responder_resources: u16,
    /// The limit of the local side's outstanding requests at the peer (ORD).
    pub initiator_depth: u16,
}

/// A connect request that is being moved from one provider to another. The first provider returns it from
/// [`Handover::detach`](crate::roles::Handover::detach). The second provider, which may be on another thread, consumes
/// it in [`attach`](crate::roles::Handover::attach). If the program drops the `Detached` instead, the peer's connection
/// attempt fails.
pub struct Detached {
    provider: &'static str,
    state: Box<dyn Any + Send>,
}

impl Detached {
    /// Makes a detached request. `provider` is the name of the provider that detaches it. `state` is the data that the
    /// attaching provider needs.
    pub fn new<T: Any + Send>(provider: &'static str, state: T) -> Self {
        Self { provider, state: Box::new(state) }
    }

    /// Returns the name of the provider that detached the request.
    #[must_use]
    pub const fn provider(&self) -> &'static str {
        self.provider
    }

    /// Returns the `state` that was passed to [`Detached::new`].
    ///
    /// # Errors
    /// Returns the request unchanged if its state is not a `T`: a provider of another kind detached it.
    pub fn into_state<T: Any>(self) -> std::result::Result<T, Self> {
        let Self { provider, state } = self;
        state.downcast().map(|state| *state).map_err(|state| Self { provider, state })
    }
}

impl fmt::Debug for Detached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Detached({})", self.provider)
    }
}

/// An event of the connection manager.
#[derive(Debug)]
pub struct CmEvent {
    /// The id that the event concerns. For a connect request, this is a new id.
    pub id: CmId,
    /// The kind of event, with its data.
    pub kind: CmEventKind,
}

/// The kinds of connection-manager events. Each of the sixteen events of `rdma_get_cm_event`(3) is
/// mapped to one of these kinds. Newer events are reported as [`CmEventKind::Other`].
#[derive(Debug)]
#[non_exhaustive]
pub enum CmEventKind {
    /// Address and route are resolved, and the id is bound to a device. Next, create the id's queue pair and connect.
    Resolved {
        /// The device through which the peer is reached.
        device: DeviceId,
    },
    /// A peer requests a connection. Create a queue pair, post receives and accept; or reject the request.
    ConnectRequest {
        /// The listener that received the request.
        listener: CmId,
        /// The device that received the request.
        device: DeviceId,
        /// The address of the peer.
        peer: SocketAddr,
        /// The peer's private data.
        private_data: Box<[u8]>,
        /// The limits of outstanding RDMA Reads and atomics that the peer requests. `responder_resources` is the limit
        /// for the peer's requests to the local side. `accept` grants at most these limits.
        read_depth: ReadDepth,
    },
    /// The connection is established.
    Established {
        /// The private data of the passive side; empty if the local side is the passive one.
        private_data: Box<[u8]>,
        /// The limits of outstanding RDMA Reads and atomics on which both sides have agreed.
        read_depth: ReadDepth,
    },
    /// The peer has answered the `connect` of a connection-manager id for datagrams. The peer accepts datagrams at the
    /// destination `peer`.
    Reached {
        /// The peer's private data.
        private_data: Box<[u8]>,
        /// The destination of the datagrams.
        peer: DatagramPeer,
    },
    /// The id has joined a multicast group. From now on, datagrams to the group arrive at the id's queue pair.
    Joined {
        /// The address of the group.
        group: IpAddr,
        /// The destination of datagrams to the group.
        peer: DatagramPeer,
    },
    /// The id could not join a multicast group, or has lost its membership.
    JoinFailed {
        /// The address of the group.
        group: IpAddr,
        /// The reason.
        reason: ConnectFailure,
    },
    /// The peer rejected the connection. Destroy the id.
    Rejected {
        /// The peer's private data.
        private_data: Box<[u8]>,
    },
    /// Connecting failed. Destroy the id.
    ConnectFailed(ConnectFailure),
    /// The connection has ended. This event may arrive late, twice, or never.
    Disconnected(DisconnectCause),
    /// The device is being removed. Destroy all objects on it.
    DeviceRemoval,
    /// The number of the id's queue pair may be reused from now on. This event may never arrive.
    TimewaitExit,
    /// A local address has moved to another device or port, for example because a bond has failed over. If the id is a
    /// listener on the old device, it receives no further requests, and no other event reports this: listen again with
    /// a new id. If the id is a connection, the connection is about to fail.
    AddressChange,
    /// An event that this library does not know. The number is the code of the event in librdmacm.
    Other(u32),
}

/// The reason why connecting failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
// local: the text of one error
pub enum ConnectFailure {
    /// No program listens at the address.
    #[error("connection refused: nothing listens there")]
    Refused,
    /// The peer did not answer in time.
    #[error("no answer in time")]
    Timeout,
    /// The address cannot be reached from this host, for the reason in the text.
    #[error("unreachable: {0}")]
    Unreachable(String),
    /// The peer accepts only connections in shared memory, and the local side cannot use the shared memory, for the
    /// reason in the text.
    #[error("the peer accepts only peers in shared memory: {0}")]
    SharedMemoryOnly(String),
    /// The peer closed the connection before it was established.
    #[error("the peer closed the connection while connecting")]
    PeerClosed,
    /// The peer violated the protocol, or requested something that the local side refuses. The text describes the
    /// violation or the request.
    #[error("not a usable RDMA peer: {0}")]
    Protocol(String),
    /// The system returned the error in the text.
    #[error("{0}")]
    System(String),
}

/// The reason why an established connection ended. A provider reports the most precise reason that it knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
// local: the text of one error
pub enum DisconnectCause {
    /// The local side disconnected.
    #[error("closed here")]
    Local,
    /// The peer disconnected or died.
    #[error("closed by the peer")]
    Peer,
    /// The peer's stream ended in the middle of a message, because the peer's process was killed or because the peer
    /// aborted the message.
    #[error("closed by the peer in the middle of a message")]
    Truncated,
    /// The peer violated the protocol. The local side has notified the peer of this.
    #[error("the peer broke the protocol: {0}")]
    PeerViolation(String),
    /// The peer reported that the local side violated the protocol.
    #[error("terminated by the peer: {0}")]
    TerminatedByPeer(String),
    /// The path to the peer failed. The text is the reason.
    #[error("the path failed: {0}")]
    Path(String),
    /// A work request failed. The `Failure` is the reason.
    #[error("a work request failed: {0}")]
    WorkRequest(Failure),
}
