//! A connection-manager id for datagrams: its phase, and the objects that the id owns.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::mad::{MadOctets, SidrRequest};
use super::queue_pair::DatagramQueuePair;
use rdma_transport::cm::CmId;
use rdma_transport::error::TransportError;
use rdma_transport::provider::PostError;
use rdma_transport::qp::SrqId;
use rdma_transport::slab::Key;
use rdma_transport::wc::WcOpcode;

/// The largest number of multicast groups that one id may join.
pub(crate) const GROUPS: usize = 64;

/// The phases of a connection-manager id for datagrams. A query requests the number of a peer's queue pair (SIDR).
#[derive(Debug)]
pub(crate) enum DatagramPhase {
    /// Bound to an address of this host.
    Bound,
    /// Listens for queries for the service with this port number.
    Listening(u16),
    /// The program may query this peer until the deadline.
    Resolved(SocketAddr, Instant),
    /// The id has sent a query to a peer. No reply has arrived.
    Querying(Box<PendingQuery>),
    /// The peer has replied with the number of its queue pair.
    Reached,
    /// A peer has sent this query, and the program has not accepted or rejected it yet. The reply to the query goes to this address.
    Offered(Box<SidrRequest>, SocketAddr),
    /// The program has accepted the query of a peer. The values are the request id, the address to which the reply goes, and the reply. The
    /// reply is sent again if the peer repeats the query.
    Replied(u32, SocketAddr, Box<MadOctets>),
    /// The id has failed or ended. The program has not destroyed it yet.
    Dead,
}

/// A query that has no reply yet.
#[derive(Debug)]
pub(crate) struct PendingQuery {
    pub(crate) query: SidrRequest,
    pub(crate) to: SocketAddr,
    pub(crate) until: Instant,
    /// The time to wait for a reply before the query is sent again.
    pub(crate) wait: Duration,
}

/// A connection-manager id for datagrams.
#[derive(Debug)]
pub(crate) struct DatagramId {
    /// The id that the program uses for this object; [`Key::NONE`] until the caller assigns one.
    pub(crate) id: CmId,
    pub(crate) phase: DatagramPhase,
    /// The UDP port that sends the id's datagrams.
    pub(crate) port: Key,
    pub(crate) qp: Option<Box<DatagramQueuePair>>,
    /// The multicast groups that the id has joined, each with the UDP port that receives its packets.
    pub(crate) groups: Vec<(IpAddr, Key)>, // local: groups of the program
}

impl DatagramId {
    pub(crate) const fn new(phase: DatagramPhase, port: Key) -> Self {
        Self { id: CmId(Key::NONE), phase, port, qp: None, groups: Vec::new() }
    }

    /// Returns the name of the phase, for error messages.
    pub(crate) const fn name(&self) -> &'static str {
        match self.phase {
            DatagramPhase::Bound => "bound for datagrams",
            DatagramPhase::Listening(_) => "listening for datagrams",
            DatagramPhase::Resolved(..) => "resolved for datagrams",
            DatagramPhase::Querying(_) => "querying a peer for its queue pair",
            DatagramPhase::Reached => "resolved to the queue pair of a peer",
            DatagramPhase::Offered(..) => "waiting for accept or reject",
            DatagramPhase::Replied(..) => "receiving datagrams",
            DatagramPhase::Dead => "closed",
        }
    }

    /// Returns true if the program may create a queue pair for this id in its phase.
    pub(crate) const fn may_have_queue_pair(&self) -> bool {
        matches!(self.phase, DatagramPhase::Bound | DatagramPhase::Resolved(..) | DatagramPhase::Offered(..))
    }

    /// Records that a completion of the id's queue pair was polled. If it is the completion of a receive from a shared receive queue,
    /// returns this queue. Otherwise returns `None`.
    pub(crate) fn polled(&mut self, opcode: WcOpcode) -> Option<SrqId> {
        self.qp.as_mut()?.polled(opcode)
    }

    /// Returns the id's queue pair, for posting. Returns an error if the id has no queue pair. This
    /// error states that no work request of the chain was posted.
    pub(crate) fn queue_pair(&mut self) -> std::result::Result<&mut DatagramQueuePair, PostError> {
        self.qp.as_deref_mut().ok_or(PostError { posted: 0, error: TransportError::Stale { object: "queue pair" } })
    }
}
