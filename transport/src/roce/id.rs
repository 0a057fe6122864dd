//! A connection-manager id for datagrams: how far it is, and what it holds.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::mad::{Ask, Octets};
use super::queue_pair::QueuePair;
use crate::error::Error;
use crate::provider::PostError;
use crate::qp::SrqId;
use crate::slab::Key;
use crate::wc::WcOpcode;

/// Most groups of an id.
pub(crate) const GROUPS: usize = 64;

/// How far an id is.
#[derive(Debug)]
pub(crate) enum Phase {
    /// It is at an address of this host.
    Bound,
    /// Peers ask it for the queue pair at this port.
    Listening(u16),
    /// It is to ask a peer, until then.
    Resolved(SocketAddr, Instant),
    /// It has asked.
    Asking(Box<Asking>),
    /// The peer has said where it takes datagrams.
    Reached,
    /// A peer has asked, and the user decides.
    Offered(Box<Ask>, SocketAddr),
    /// The peer has the answer, which it may ask for again.
    Answered(u32, SocketAddr, Box<Octets>),
    /// It has ended, and waits for the user to destroy it.
    Dead,
}

/// A question on its way.
#[derive(Debug)]
pub(crate) struct Asking {
    pub(crate) ask: Ask,
    pub(crate) to: SocketAddr,
    pub(crate) until: Instant,
    /// How long an answer is waited for before the question is sent again.
    pub(crate) wait: Duration,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Id {
    pub(crate) phase: Phase,
    /// The port that its datagrams leave from.
    pub(crate) port: Key,
    pub(crate) qp: Option<Box<QueuePair>>,
    /// The groups that it is in, with the port of each.
    pub(crate) groups: Vec<(IpAddr, Key)>,
}

impl Id {
    pub(crate) const fn new(phase: Phase, port: Key) -> Self {
        Self { phase, port, qp: None, groups: Vec::new() }
    }

    /// The name of its state, for errors.
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

    /// Whether a queue pair may be made for it.
    pub(crate) const fn may_have_queue_pair(&self) -> bool {
        matches!(self.phase, Phase::Bound | Phase::Resolved(..) | Phase::Offered(..))
    }

    /// Takes note of a polled completion. Returns the shared queue that its receive came from, if it did.
    pub(crate) fn polled(&mut self, opcode: WcOpcode) -> Option<SrqId> {
        self.qp.as_mut()?.polled(opcode)
    }

    /// Its queue pair, to post to.
    pub(crate) fn queue_pair(&mut self) -> std::result::Result<&mut QueuePair, PostError> {
        self.qp.as_deref_mut().ok_or(PostError { posted: 0, error: Error::Stale { object: "queue pair" } })
    }
}
