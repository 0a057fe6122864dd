//! Connection management: ids, parameters, events.

use std::any::Any;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::datagram::DatagramPeer;
pub use crate::handle::CmId;
use crate::handle::DeviceId;
use crate::wc::WcStatus;

/// What both ends tell each other while connecting (`rdma_connect`(3)).
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnectParam<'a> {
    /// Private data, which the peer gets with its event. Some devices pad it with zeros, so put its length into it.
    pub private_data: &'a [u8],
    /// RDMA Reads that the peer may have outstanding here (IRD); 0 takes the device's default.
    pub responder_resources: u16,
    /// RDMA Reads that this side will have outstanding at the peer (ORD); 0 takes the device's default.
    pub initiator_depth: u16,
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

/// A connect request on its way between two providers: [`crate::Provider::detach`] of one makes it, and
/// [`crate::Provider::attach`] of another takes it, on any thread. Dropping it ends the peer's attempt.
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
    pub fn into_state<T: Any>(self) -> Result<T, Self> {
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
    WorkRequest(WcStatus),
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
            Self::WorkRequest(status) => write!(f, "a work request failed: {status}"),
        }
    }
}
