//! A connection-manager id for datagrams: its phase, and the objects that it holds.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::mad::{MadOctets, SidrRequest};
use super::queue_pair::DatagramQueuePair;
use crate::error::Error;
use crate::provider::PostError;
use crate::qp::SrqId;
use crate::slab::Key;
use crate::wc::WcOpcode;

/// The largest number of groups of an id.
pub(crate) const GROUPS: usize = 64;

/// The phases of an id.
#[derive(Debug)]
pub(crate) enum DatagramPhase {
    /// Bound to an address of this host.
    Bound,
    /// Listens for queries at this port.
    Listening(u16),
    /// May query this peer until the deadline.
    Resolved(SocketAddr, Instant),
    /// Has sent a query.
    Querying(Box<PendingQuery>),
    /// The peer has replied with its queue pair.
    Reached,
    /// A peer has sent a query, and the program decides.
    Offered(Box<SidrRequest>, SocketAddr),
    /// The peer was sent the reply, which it may request again.
    Replied(u32, SocketAddr, Box<MadOctets>),
    /// Ended. The program has not destroyed it yet.
    Dead,
}

/// A query without a reply.
#[derive(Debug)]
pub(crate) struct PendingQuery {
    pub(crate) query: SidrRequest,
    pub(crate) to: SocketAddr,
    pub(crate) until: Instant,
    /// The time after which the query is sent again.
    pub(crate) wait: Duration,
}

/// A connection-manager id for datagrams.
#[derive(Debug)]
pub(crate) struct DatagramId {
    pub(crate) phase: DatagramPhase,
    /// The port that sends its datagrams.
    pub(crate) port: Key,
    pub(crate) qp: Option<Box<DatagramQueuePair>>,
    /// The groups that it has joined, with the port of each.
    pub(crate) groups: Vec<(IpAddr, Key)>,
}

impl DatagramId {
    pub(crate) const fn new(phase: DatagramPhase, port: Key) -> Self {
        Self { phase, port, qp: None, groups: Vec::new() }
    }

    /// Returns the name of its state, for errors.
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

    /// Returns true if a queue pair may be created for it.
    pub(crate) const fn may_have_queue_pair(&self) -> bool {
        matches!(self.phase, DatagramPhase::Bound | DatagramPhase::Resolved(..) | DatagramPhase::Offered(..))
    }

    /// Records a polled completion. Returns the shared queue that its receive was taken from, if any.
    pub(crate) fn polled(&mut self, opcode: WcOpcode) -> Option<SrqId> {
        self.qp.as_mut()?.polled(opcode)
    }

    /// Returns its queue pair, to post to.
    pub(crate) fn queue_pair(&mut self) -> std::result::Result<&mut DatagramQueuePair, PostError> {
        self.qp.as_deref_mut().ok_or(PostError { posted: 0, error: Error::Stale { object: "queue pair" } })
    }
}
