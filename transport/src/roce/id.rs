//! A connection-manager id for datagrams: its phase, and the objects that it holds.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::mad::{Ask, Octets};
use super::queue_pair::QueuePair;
use crate::error::Error;
use crate::provider::PostError;
use crate::qp::SrqId;
use crate::slab::Key;
use crate::wc::WcOpcode;

/// The largest number of groups of an id.
pub(crate) const GROUPS: usize = 64;

/// The phases of an id.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Bound to an address of this host.
    Bound,
    /// Listens for queries at this port.
    Listening(u16),
    /// May query this peer until the deadline.
    Resolved(SocketAddr, Instant),
    /// Has sent a query.
    Asking(Box<Asking>),
    /// The peer has replied with its queue pair.
    Reached,
    /// A peer has sent a query, and the program decides.
    Offered(Box<Ask>, SocketAddr),
    /// The peer was sent the reply, which it may request again.
    Answered(u32, SocketAddr, Box<Octets>),
    /// Ended. The program has not destroyed it yet.
    Dead,
}

/// A query without a reply.
#[derive(Debug)]
pub(crate) struct Asking {
    pub(crate) ask: Ask,
    pub(crate) to: SocketAddr,
    pub(crate) until: Instant,
    /// The time after which the query is sent again.
    pub(crate) wait: Duration,
}

/// A connection-manager id for datagrams.
#[derive(Debug)]
pub(crate) struct Id {
    pub(crate) phase: Phase,
    /// The port that sends its datagrams.
    pub(crate) port: Key,
    pub(crate) qp: Option<Box<QueuePair>>,
    /// The groups that it has joined, with the port of each.
    pub(crate) groups: Vec<(IpAddr, Key)>,
}

impl Id {
    pub(crate) const fn new(phase: Phase, port: Key) -> Self {
        Self { phase, port, qp: None, groups: Vec::new() }
    }

    /// Returns the name of its state, for errors.
    pub(crate) const fn name(&self) -> &'static str {
        match self.phase {
            Phase::Bound => "bound for datagrams",
            Phase::Listening(_) => "listening for datagrams",
            Phase::Resolved(..) => "resolved for datagrams",
            Phase::Asking(_) => "asking where to send datagrams to",
            Phase::Reached => "knowing where to send datagrams to",
            Phase::Offered(..) => "waiting for accept or reject",
            Phase::Answered(..) => "receiving datagrams",
            Phase::Dead => "closed",
        }
    }

    /// Returns true if a queue pair may be created for it.
    pub(crate) const fn may_have_queue_pair(&self) -> bool {
        matches!(self.phase, Phase::Bound | Phase::Resolved(..) | Phase::Offered(..))
    }

    /// Records a polled completion. Returns the shared queue that its receive was taken from, if any.
    pub(crate) fn polled(&mut self, opcode: WcOpcode) -> Option<SrqId> {
        self.qp.as_mut()?.polled(opcode)
    }

    /// Returns its queue pair, to post to.
    pub(crate) fn queue_pair(&mut self) -> std::result::Result<&mut QueuePair, PostError> {
        self.qp.as_deref_mut().ok_or(PostError { posted: 0, error: Error::Stale { object: "queue pair" } })
    }
}
