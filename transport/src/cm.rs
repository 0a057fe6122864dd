//! Connection management: ids, parameters, events.

use std::any::Any;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::datagram::DatagramPeer;
use crate::error::{Result, in_range};
pub use crate::handle::CmId;
use crate::handle::DeviceId;
use crate::wc::Failure;

/// What both ends tell each other while connecting (`rdma_connect`(3)).
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnectParam<'a> {
    /// Private data, which the peer gets with its event. Some devices pad it with zeros, so put its length into it.
    pub private_data: &'a [u8],
    /// RDMA Reads that the peer may have outstanding here (IRD); 0 takes the device's default.
    pub responder_resources: u16,
    /// RDMA Reads that this side will have outstanding at the peer (ORD); 0 takes the device's default.
    pub initiator_depth: u16,
    /// How often the device tries again before the connection fails. iWARP has none of this: TCP tries again.
    pub retries: Retries,
}

impl ConnectParam<'_> {
    /// Logs at `info` that the provider of that name ignores [`ConnectParam::retries`], unless these are the default: for a
    /// provider without retry counts.
    pub fn note_ignored(&self, provider: &str) {
        if self.retries != Retries::default() {
            log::info!("the provider {provider} has no retry counts, since TCP tries again: ignored");
        }
    }
}

/// How often a device sends a request again that nobody answers, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retries {
    /// Times that either side sends a request again without an answer, 0 to 7; 7 by default. The side that connects decides;
    /// `accept` ignores it. The time between two is the ack timeout ([`PathOptions::ack_timeout`]).
    pub path: u8,
    /// Times that the **peer** sends again what found no receive posted here, 0 to 6; 7, which is the default, is for ever. Each
    /// side decides for the other (`rdma_connect`(3)).
    pub receiver_not_ready: u8,
    /// How long a peer waits before it sends again what found no receive posted here: a code from 0 to 31 (InfiniBand
    /// Architecture Specification, volume 1, table 45: 1 is 0.01 ms, 12 is 0.64 ms, 31 is 491 ms, and 0 is 655 ms). 12 by
    /// default.
    pub min_rnr_timer: u8,
}

impl Default for Retries {
    fn default() -> Self {
        Self { path: 7, receiver_not_ready: 7, min_rnr_timer: 12 }
    }
}

impl Retries {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] names the first value that is outside of its range.
    pub fn check(&self) -> Result<()> {
        in_range("retry count", self.path, 0..=7, "0 to 7")?;
        in_range("receiver-not-ready retry count", self.receiver_not_ready, 0..=7, "0 to 7")?;
        in_range("minimum receiver-not-ready timer", self.min_rnr_timer, 0..=31, "0 to 31")
    }
}

/// Which way a connection takes: set before the peer's address is resolved. What is `None` is left to the system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathOptions {
    /// The type of service of every packet: the DSCP in the upper six bits (RFC 2474). On InfiniBand the subnet manager
    /// chooses the service level by it. Siw of Linux 6.1 takes the setting without using it.
    pub type_of_service: Option<u8>,
    /// Time after which the device sends a request again that is not answered: a code from 0 to 31, for 4.096 us times two to
    /// its power; 0 is for ever. The connection manager takes about 2 s (19) or what the subnet manager says.
    pub ack_timeout: Option<u8>,
    /// The address or device of ours that the connection leaves from.
    pub source: Source,
}

/// Where a connection leaves from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The system's routes decide.
    #[default]
    Any,
    /// An address of ours.
    Address(IpAddr),
    /// A device by its name, and one of its ports, from 1, or any of them.
    Device {
        /// The name, such as `mlx5_0`.
        name: String,
        /// The port.
        port: Option<u8>,
    },
}

impl PathOptions {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] names the value that is outside of its range.
    pub fn check(&self) -> Result<()> {
        in_range("ack timeout", self.ack_timeout.unwrap_or(0), 0..=31, "a code from 0 to 31")
    }

    /// Logs at `info`, in one line, which of the options the provider of that name ignores: for a provider that follows neither the
    /// type of service nor the ack timeout. It does not look at [`PathOptions::source`], which a provider follows or refuses.
    pub fn note_ignored(&self, provider: &str) {
        let asked = [("type of service", self.type_of_service), ("ack timeout", self.ack_timeout)];
        let ignored: Vec<&str> = asked.iter().filter(|option| option.1.is_some()).map(|option| option.0).collect();
        if !ignored.is_empty() {
            log::info!("the provider {provider} has no {}: ignored", ignored.join(" and no "));
        }
    }
}

/// How a listener takes connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenOptions {
    /// Connect requests that wait for this side before the system refuses more (`rdma_listen`(3), `listen`(2)). 1024 by default.
    pub backlog: u32,
    /// As for [`PathOptions::type_of_service`], for the connections that come in, on iWARP. On InfiniBand and RoCE the request of
    /// the peer brings the type of service for both directions, and this one has no effect.
    pub type_of_service: Option<u8>,
    /// As for [`PathOptions::ack_timeout`], for the connections that come in.
    pub ack_timeout: Option<u8>,
    /// Whether an IPv6 address takes IPv6 only (`true`) or IPv4 too (`false`, which siw does not follow).
    pub ipv6_only: Option<bool>,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self { backlog: 1024, type_of_service: None, ack_timeout: None, ipv6_only: None }
    }
}

impl ListenOptions {
    /// Checks the ranges, and logs at `info` which of the options the provider of that name ignores: for a provider that follows none
    /// of them but the backlog.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] names the value that is outside of its range.
    pub fn note_ignored(&self, provider: &str) -> Result<()> {
        let Self { type_of_service, ack_timeout, ipv6_only, .. } = *self;
        let path = PathOptions { type_of_service, ack_timeout, source: Source::Any };
        path.check()?;
        path.note_ignored(provider);
        if ipv6_only.is_some() {
            log::info!("the provider {provider} has no choice between IPv6 alone and both: ignored");
        }
        Ok(())
    }
}

/// RDMA Reads and atomics that may be outstanding on a connection. Those of this side that are more wait in the send
/// queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadDepth {
    /// Those of the peer, here (IRD).
    pub responder_resources: u16,
    /// Those of this side, at the peer (ORD).
    pub initiator_depth: u16,
}

/// A connect request on its way between two providers: [`Handover::detach`](crate::roles::Handover::detach) of one makes it, and
/// [`attach`](crate::roles::Handover::attach) of another takes it, on any thread. Dropping it ends the peer's attempt.
pub struct Detached {
    provider: &'static str,
    state: Box<dyn Any + Send>,
}

impl Detached {
    /// Packs what the provider that takes it needs.
    pub fn new<T: Any + Send>(provider: &'static str, state: T) -> Self {
        Self { provider, state: Box::new(state) }
    }

    /// Name of the provider it comes from.
    #[must_use]
    pub const fn provider(&self) -> &'static str {
        self.provider
    }

    /// What the provider that made it put in.
    ///
    /// # Errors
    /// It comes back if it was made by a provider of another kind.
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
    /// The id that it concerns; for a connect request, the new id.
    pub id: CmId,
    /// What happened.
    pub kind: CmEventKind,
}

/// Kinds of connection-manager events. The sixteen of `rdma_get_cm_event`(3) are mapped to these; newer ones arrive as
/// [`CmEventKind::Other`].
#[derive(Debug)]
#[non_exhaustive]
pub enum CmEventKind {
    /// Address and route are resolved, and the id is on a device. Make its queue pair and connect.
    Resolved {
        /// The device that reaches the address.
        device: DeviceId,
    },
    /// A peer asks for a connection. Make a queue pair, post receives and accept; or reject.
    ConnectRequest {
        /// The listener it came to.
        listener: CmId,
        /// The device it came in on.
        device: DeviceId,
        /// Address of the peer.
        peer: SocketAddr,
        /// Its private data.
        private_data: Box<[u8]>,
        /// What it asks for, as seen from this side; `accept` gives at most that.
        read_depth: ReadDepth,
    },
    /// The connection is up.
    Established {
        /// The passive side's private data; empty on the passive side itself.
        private_data: Box<[u8]>,
        /// What both agreed on.
        read_depth: ReadDepth,
    },
    /// A peer accepts datagrams of this side: `connect` of a datagram id has ended.
    Reached {
        /// The peer's private data.
        private_data: Box<[u8]>,
        /// Where to send them.
        peer: DatagramPeer,
    },
    /// The id is in a multicast group. What is sent to the group arrives here.
    Joined {
        /// The group.
        group: IpAddr,
        /// Where to send to it.
        peer: DatagramPeer,
    },
    /// The id is not, or no longer, in a multicast group.
    JoinFailed {
        /// The group.
        group: IpAddr,
        /// Why.
        reason: ConnectFailure,
    },
    /// The peer rejected the connection. Destroy the id.
    Rejected {
        /// Its private data.
        private_data: Box<[u8]>,
    },
    /// Connecting failed. Destroy the id.
    ConnectFailed(ConnectFailure),
    /// The connection has ended. This event may come late, twice, or not at all.
    Disconnected(DisconnectCause),
    /// The device is going away. Destroy everything on it.
    DeviceRemoval,
    /// The queue pair's number may be used again. This event may never come.
    TimewaitExit,
    /// A local address moved to another device or port, as a bond does when its link fails over. A listener there gets nothing
    /// any more, although it is not told so: make it anew. A connection there is about to fail.
    AddressChange,
    /// An event this library does not know.
    Other(u32),
}

/// Why connecting failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectFailure {
    /// Nobody listens there.
    Refused,
    /// No answer in time.
    Timeout,
    /// The address cannot be reached from here.
    Unreachable(String),
    /// The peer went away while connecting.
    PeerClosed,
    /// The peer does not speak the protocol, or asks for something that is refused here.
    Protocol(String),
    /// The system refused.
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

/// Why an established connection ended, as far as the provider can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DisconnectCause {
    /// This side disconnected.
    Local,
    /// The peer disconnected or died.
    Peer,
    /// The peer's stream ended in the middle of a message: its process was killed, or it gave up what it was sending.
    Truncated,
    /// The peer broke the protocol, and was told so.
    PeerViolation(String),
    /// The peer says that this side broke the protocol.
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
