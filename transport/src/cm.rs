//! Connection management: ids, parameters, events.

use std::any::Any;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::datagram::DatagramPeer;
use crate::error::{Result, in_range};
pub use crate::handle::CmId;
use crate::handle::DeviceId;
use crate::wc::Failure;

/// The parameters that the two sides exchange while connecting (`rdma_connect`(3)).
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnectParam<'a> {
    /// Private data, which the peer receives with its event. Some devices pad it with zeros, so put its length into it.
    pub private_data: &'a [u8],
    /// The number of RDMA Reads that the peer may have outstanding at this side (IRD); 0 selects the device's default.
    pub responder_resources: u16,
    /// The number of RDMA Reads that this side may have outstanding at the peer (ORD); 0 selects the device's default.
    pub initiator_depth: u16,
    /// The number of retransmissions before the connection fails, and the pauses. Ignored on iWARP, where TCP
    /// retransmits.
    pub retries: Retries,
}

impl ConnectParam<'_> {
    /// Logs at `info` that a provider with this name ignores [`ConnectParam::retries`], unless these are the default.
    /// For a provider without retry counts.
    pub fn note_ignored(&self, provider: &str) {
        if self.retries != Retries::default() {
            log::info!("the provider {provider} has no retry counts, since TCP retransmits: ignored");
        }
    }
}

/// The number of times that a device retransmits a request without an answer, and the pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retries {
    /// The number of times that either side retransmits a request without an answer, 0 to 7. The default is 7. The
    /// connecting side decides; `accept` ignores it. The pause before a retransmission is the ack timeout
    /// ([`PathOptions::ack_timeout`]).
    pub path: u8,
    /// The number of times that the **peer** retransmits a message that found no receive posted here, 0 to 6. 7, the
    /// default, stands for no limit. Each side decides for the other one (`rdma_connect`(3)).
    pub receiver_not_ready: u8,
    /// The pause of a peer before it retransmits a message that found no receive posted here: a code from 0 to 31
    /// (InfiniBand Architecture Specification, volume 1, table 45: 1 is 0.01 ms, 12 is 0.64 ms, 31 is 491 ms, and 0 is
    /// 655 ms). The default is 12.
    pub min_rnr_timer: u8,
}

impl Default for Retries {
    fn default() -> Self {
        Self { path: 7, receiver_not_ready: 7, min_rnr_timer: 12 }
    }
}

impl Retries {
    /// Checks that the values are in their ranges.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] names the first value that is outside its range.
    pub fn check(&self) -> Result<()> {
        in_range("retry count", self.path, 0..=7, "0 to 7")?;
        in_range("receiver-not-ready retry count", self.receiver_not_ready, 0..=7, "0 to 7")?;
        in_range("minimum receiver-not-ready timer", self.min_rnr_timer, 0..=31, "0 to 31")
    }
}

/// The path of a connection, chosen before the peer's address is resolved. The system decides options that are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathOptions {
    /// The type of service of each packet: the DSCP in the upper six bits (RFC 2474). On InfiniBand the subnet manager
    /// derives the service level from it. siw of Linux 6.1 accepts the setting but does not use it.
    pub type_of_service: Option<u8>,
    /// The time after which the device retransmits an unanswered request: a code from 0 to 31, for 4.096 us times 2 to
    /// the power of the code; 0 waits forever. By default the connection manager uses about 2 s (19), or the value of
    /// the subnet manager.
    pub ack_timeout: Option<u8>,
    /// The local address or device of the connection.
    pub source: Source,
}

/// The local end of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The system's routes decide.
    #[default]
    Any,
    /// A local address.
    Address(IpAddr),
    /// A local device.
    Device {
        /// The name of the device, such as `mlx5_0`.
        name: String,
        /// The port, from 1; `None` for any port.
        port: Option<u8>,
    },
}

impl PathOptions {
    /// Checks that the values are in their ranges.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] names the value that is outside its range.
    pub fn check(&self) -> Result<()> {
        in_range("ack timeout", self.ack_timeout.unwrap_or(0), 0..=31, "a code from 0 to 31")
    }

    /// Logs at `info`, in one line, which of the options a provider with this name ignores. For a provider that uses
    /// neither the type of service nor the ack timeout. [`PathOptions::source`] is not reported: a provider must follow
    /// or refuse it.
    pub fn note_ignored(&self, provider: &str) {
        let asked = [("type of service", self.type_of_service), ("ack timeout", self.ack_timeout)];
        let ignored: Vec<&str> = asked.iter().filter(|option| option.1.is_some()).map(|option| option.0).collect();
        if !ignored.is_empty() {
            log::info!("the provider {provider} has no {}: ignored", ignored.join(" and no "));
        }
    }
}

/// The options of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenOptions {
    /// The number of connect requests that may wait for this side before the system refuses more (`rdma_listen`(3),
    /// `listen`(2)). The default is 1024.
    pub backlog: u32,
    /// The type of service of incoming connections on iWARP, as for [`PathOptions::type_of_service`]. No effect on
    /// InfiniBand and RoCE, where the peer's request sets the type of service of both directions.
    pub type_of_service: Option<u8>,
    /// The ack timeout of incoming connections, as for [`PathOptions::ack_timeout`].
    pub ack_timeout: Option<u8>,
    /// If true, a listener on an IPv6 address accepts IPv6 only; if false, IPv4 too, which siw does not do.
    pub ipv6_only: Option<bool>,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self { backlog: 1024, type_of_service: None, ack_timeout: None, ipv6_only: None }
    }
}

impl ListenOptions {
    /// Checks that the values are in their ranges, and logs at `info` which of the options a provider with this name
    /// ignores. For a provider that uses none of them but the backlog.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] names the value that is outside of its range.
    pub fn note_ignored(&self, provider: &str) -> Result<()> {
        let Self { type_of_service, ack_timeout, ipv6_only, .. } = *self;
        let path = PathOptions { type_of_service, ack_timeout, source: Source::Any };
        path.check()?;
        path.note_ignored(provider);
        if ipv6_only.is_some() {
            log::info!("the provider {provider} cannot choose between IPv6 only and both: ignored");
        }
        Ok(())
    }
}

/// The port and the GID of a queue pair that connects by exchange ([`Exchange`](crate::roles::Exchange)). The provider derives
/// each field that is `None` from the local address of the stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExchangeOptions {
    /// The device by its name, such as `mlx5_0`: needed where the stream is on another network than the device, or on none.
    pub device: Option<String>,
    /// The port of the device, from 1.
    pub port: Option<u8>,
    /// The index in the port's table of GIDs: of type RoCE version 2 on Ethernet. By default that of the stream's address, and on
    /// InfiniBand 0.
    pub gid_index: Option<u8>,
}

/// The limits of RDMA Reads and atomics that may be outstanding on a connection. Further ones of this side wait in the
/// send queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadDepth {
    /// The limit of the peer's requests at this side (IRD).
    pub responder_resources: u16,
    /// The limit of this side's requests at the peer (ORD).
    pub initiator_depth: u16,
}

/// A connect request that is passed from one provider to another. [`Handover::detach`](crate::roles::Handover::detach)
/// of the first one makes it, and [`attach`](crate::roles::Handover::attach) of the second one consumes it, on any
/// thread. Dropping it ends the peer's attempt.
pub struct Detached {
    provider: &'static str,
    state: Box<dyn Any + Send>,
}

impl Detached {
    /// Wraps the state that the attaching provider needs.
    pub fn new<T: Any + Send>(provider: &'static str, state: T) -> Self {
        Self { provider, state: Box::new(state) }
    }

    /// Returns the name of the provider that detached the request.
    #[must_use]
    pub const fn provider(&self) -> &'static str {
        self.provider
    }

    /// Returns the state that the detaching provider has wrapped.
    ///
    /// # Errors
    /// Returns the value unchanged if its state is of another type: a provider of another kind has detached the
    /// request.
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
    /// The id that the event belongs to; for a connect request, the new id.
    pub id: CmId,
    /// The kind of event, with its data.
    pub kind: CmEventKind,
}

/// The kinds of connection-manager events. The sixteen events of `rdma_get_cm_event`(3) are mapped to these; newer ones
/// are reported as [`CmEventKind::Other`].
#[derive(Debug)]
#[non_exhaustive]
pub enum CmEventKind {
    /// Address and route are resolved, and the id is on a device. Create its queue pair and connect.
    Resolved {
        /// The device that reaches the address.
        device: DeviceId,
    },
    /// A peer requests a connection. Create a queue pair, post receives and accept; or reject.
    ConnectRequest {
        /// The listener that received the request.
        listener: CmId,
        /// The device that received the request.
        device: DeviceId,
        /// The address of the peer.
        peer: SocketAddr,
        /// The peer's private data.
        private_data: Box<[u8]>,
        /// The limits that the peer requests, as seen from this side. `accept` grants at most these.
        read_depth: ReadDepth,
    },
    /// The connection is established.
    Established {
        /// The private data of the passive side; empty on the passive side itself.
        private_data: Box<[u8]>,
        /// The limits that both sides have agreed on.
        read_depth: ReadDepth,
    },
    /// A peer accepts datagrams of this side: `connect` of a datagram id has succeeded.
    Reached {
        /// The peer's private data.
        private_data: Box<[u8]>,
        /// The destination of the datagrams.
        peer: DatagramPeer,
    },
    /// The id has joined a multicast group. Datagrams to the group arrive at the id from now on.
    Joined {
        /// The group.
        group: IpAddr,
        /// The destination of datagrams to the group.
        peer: DatagramPeer,
    },
    /// The id could not join a multicast group, or has lost its membership.
    JoinFailed {
        /// The group.
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
    /// The device is being removed. Destroy everything on it.
    DeviceRemoval,
    /// The queue pair's number may be used again. This event may never arrive.
    TimewaitExit,
    /// A local address has moved to another device or port, for example because a bond has failed over. A listener on
    /// the old device receives no further requests, and no other event says so: make a new one. A connection there is
    /// about to fail.
    AddressChange,
    /// An event that this library does not know.
    Other(u32),
}

/// The reason why connecting failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectFailure {
    /// Nothing listens at the address.
    Refused,
    /// The peer did not answer in time.
    Timeout,
    /// The address cannot be reached from this host.
    Unreachable(String),
    /// The peer closed the connection while connecting.
    PeerClosed,
    /// The peer does not speak the protocol, or requests something that this side refuses.
    Protocol(String),
    /// The system returned an error.
    System(String),
}

impl fmt::Display for ConnectFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str("connection refused: nothing listens there"),
            Self::Timeout => f.write_str("no answer in time"),
            Self::Unreachable(why) => write!(f, "unreachable: {why}"),
            Self::PeerClosed => f.write_str("the peer closed the connection while connecting"),
            Self::Protocol(why) => write!(f, "not a usable RDMA peer: {why}"),
            Self::System(why) => f.write_str(why),
        }
    }
}

/// The reason why an established connection ended, as far as the provider knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DisconnectCause {
    /// This side disconnected.
    Local,
    /// The peer disconnected or died.
    Peer,
    /// The peer's stream ended in the middle of a message: its process was killed, or it abandoned a message that it
    /// was sending.
    Truncated,
    /// The peer violated the protocol, which was reported to it.
    PeerViolation(String),
    /// The peer reported that this side violated the protocol.
    TerminatedByPeer(String),
    /// The path failed.
    Path(String),
    /// A work request failed.
    WorkRequest(Failure),
}

impl fmt::Display for DisconnectCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("closed here"),
            Self::Peer => f.write_str("closed by the peer"),
            Self::Truncated => f.write_str("closed by the peer in the middle of a message"),
            Self::PeerViolation(what) => write!(f, "the peer broke the protocol: {what}"),
            Self::TerminatedByPeer(what) => write!(f, "terminated by the peer: {what}"),
            Self::Path(why) => write!(f, "the path failed: {why}"),
            Self::WorkRequest(failure) => write!(f, "a work request failed: {failure}"),
        }
    }
}
