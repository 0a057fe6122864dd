//! [`CmEndpoint`]: the object that a connection-manager id names: a listener, one end of a
//! connection in one of its states, or an id for datagrams.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use super::causes::connect_failure;
use super::flow::TcpFlow;
use super::frame::Frame;
use super::hub::Hub;
use super::net::{Net, SocketId};
use super::queue_pair::QueuePair;
use super::ring::RingFlow;
use super::startup::{Agreement, FrameReader, RequestTerms, StartupTerms};
use crate::shm::Segment;
use crate::shm::link::Link;
use rdma_transport::cm::{CmId, ConnectFailure};
use rdma_transport::newcomers::{Host, Ticket};
use rdma_transport::slab::Key;

/// The object that a connection-manager id names.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a connection is found without a further pointer")]
pub(super) enum CmEndpoint<S: Segment> {
    Listener(SocketId),
    /// Passive side: a connection that the program has not accepted yet.
    Request(Request),
    /// Active side: a connection whose handshake is not complete.
    Attempt(Box<Attempt<S>>),
    /// A connection on a TCP stream.
    Stream(TcpFlow<S>),
    /// A connection in shared memory.
    Ring(RingFlow<S>),
    /// An id for datagrams, with its key in the engine of datagrams.
    Datagram(Key),
    /// A connection that has ended. The program has not destroyed its id yet. Its queue pair
    /// flushes work requests that are posted.
    Dead(Option<Work<S>>),
}

/// A connection that a peer has requested.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) socket: SocketId,
    pub(super) step: RequestStep,
    pub(super) qp: Option<Box<QueuePair>>,
    /// True if the peer's stream has ended or failed, behind bytes that may be unread.
    pub(super) closed: bool,
}

/// The steps of a request.
#[derive(Debug)]
pub(super) enum RequestStep {
    /// The MPA request is being read. The program is not notified of the connection yet.
    Reading { reader: Box<FrameReader>, listener: CmId, peer: SocketAddr, ticket: Ticket },
    /// The event of the connect request is queued. The program has not received it yet.
    Queued(RequestTerms, Host),
    /// The program has the request and has not accepted or rejected it yet.
    Offered(RequestTerms),
}

/// An attempt to connect to a peer.
#[derive(Debug)]
pub(super) struct Attempt<S> {
    pub(super) peer: SocketAddr,
    pub(super) step: AttemptStep<S>,
    pub(super) qp: Option<Box<QueuePair>>,
    /// True if the peer's stream has ended or failed, behind bytes that may be unread.
    pub(super) closed: bool,
}

/// The steps of an attempt.
#[derive(Debug)]
pub(super) enum AttemptStep<S> {
    /// The event `Resolved` is queued. The program has not received it yet.
    Resolving,
    /// The program has not called `connect` yet, so there is no socket.
    Resolved,
    /// TCP is connecting, or the startup frames are being exchanged.
    Starting(SocketId, Box<Startup>),
    /// The MPA reply has arrived, and the two sides are setting up shared memory.
    SettingUp(SocketId, Box<SentSegment<S>>),
}

/// The exchange of startup frames on the active side.
#[derive(Debug)]
pub(super) struct Startup {
    pub(super) terms: StartupTerms,
    pub(super) private_data: Vec<u8>, // local: private data of the program
    /// True if the MPA request may carry the hash of the path behind the private data of the
    /// program.
    pub(super) shows_path: bool,
    /// True once TCP has connected.
    pub(super) connected: bool,
    pub(super) request: Frame,
    pub(super) reader: FrameReader,
}

impl Startup {
    /// Returns the failure to report if the TCP connection of the attempt has failed with `error`.
    /// An attempt opens a second TCP connection, for MPA revision 1, only if the peer has closed
    /// the first one. If the second connection fails too, the failure of the first connection is
    /// reported.
    pub(super) fn failure(&self, error: &io::Error) -> ConnectFailure {
        if self.terms.revision < 2 { ConnectFailure::PeerClosed } else { connect_failure(error) }
    }
}

/// The state of the active side while it waits for the answer to its hello. If the peer accepts the
/// segment, the connection continues in the segment. Otherwise the connection continues on the TCP
/// stream, with the terms of `agreement`, or fails if `required` is true.
#[derive(Debug)]
pub(super) struct SentSegment<S> {
    pub(super) socket: SocketId,
    pub(super) segment: S,
    pub(super) agreement: Agreement,
    pub(super) private_data: Box<[u8]>,
    /// The deadline of the connection attempt. The deadline of the setup may be earlier.
    pub(super) until: Option<Instant>,
    /// True if the connection may not stay on the TCP stream, because one of the two sides requires
    /// shared memory.
    pub(super) required: bool,
}

/// The queue pair of a connection: on a TCP stream, or in shared memory.
#[derive(Debug)]
pub(super) enum Work<S: Segment> {
    Stream(Box<QueuePair>),
    /// A link, and its Unix socket, which stays open while the peer may read the last records.
    Ring(Box<Link<S>>, Option<SocketId>),
}

/// A queue pair, borrowed from its endpoint.
pub(super) enum WorkMut<'a, S: Segment> {
    Stream(&'a mut QueuePair),
    Ring(&'a mut Link<S>),
}

impl<S: Segment> CmEndpoint<S> {
    /// Returns the name of the state, for error messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Listener(_) => "listening",
            Self::Request(Request { step: RequestStep::Reading { .. }, .. }) => "reading the request",
            Self::Request(Request { step: RequestStep::Queued(..), .. }) => "with a request that waits",
            Self::Request(Request { step: RequestStep::Offered(_), .. }) => "waiting for accept or reject",
            Self::Attempt(attempt) => match attempt.step {
                AttemptStep::Resolving => "resolving",
                AttemptStep::Resolved => "resolved",
                AttemptStep::Starting(..) | AttemptStep::SettingUp(..) => "connecting",
            },
            Self::Stream(_) | Self::Ring(_) => "connected",
            Self::Dead(_) => "closed",
            Self::Datagram(_) => "for datagrams",
        }
    }

    /// Returns true if a peer has started a handshake of which the program was not notified.
    pub(super) const fn is_unknown(&self) -> bool {
        matches!(self, Self::Request(Request { step: RequestStep::Reading { .. } | RequestStep::Queued(..), .. }))
    }

    pub(super) const fn is_live(&self) -> bool {
        matches!(self, Self::Stream(_) | Self::Ring(_))
    }

    /// Returns the queue pair of a connection.
    #[inline]
    pub(super) fn work(&mut self) -> Option<WorkMut<'_, S>> {
        match self {
            Self::Stream(flow) => Some(WorkMut::Stream(&mut flow.qp)),
            Self::Ring(flow) => Some(WorkMut::Ring(&mut flow.link)),
            Self::Request(Request { qp, .. }) => qp.as_deref_mut().map(WorkMut::Stream),
            Self::Attempt(attempt) => attempt.qp.as_deref_mut().map(WorkMut::Stream),
            Self::Dead(Some(Work::Stream(qp))) => Some(WorkMut::Stream(qp)),
            Self::Dead(Some(Work::Ring(link, _))) => Some(WorkMut::Ring(link)),
            Self::Listener(_) | Self::Datagram(_) | Self::Dead(None) => None,
        }
    }

    /// Returns the socket of a listener or of a connection.
    pub(super) fn socket(&self) -> Option<SocketId> {
        match self {
            Self::Listener(socket) | Self::Request(Request { socket, .. }) => Some(*socket),
            Self::Attempt(attempt) => match &attempt.step {
                AttemptStep::Starting(socket, _) | AttemptStep::SettingUp(socket, _) => Some(*socket),
                AttemptStep::Resolving | AttemptStep::Resolved => None,
            },
            Self::Stream(flow) => Some(flow.socket),
            Self::Ring(flow) => Some(flow.socket),
            Self::Dead(Some(Work::Ring(_, socket))) => *socket,
            Self::Datagram(_) | Self::Dead(_) => None,
        }
    }

    /// Splits an endpoint into its socket and its queue pair. Closes the Unix socket of an
    /// incomplete setup of shared memory. [`Work::Ring`] also contains the socket of a link.
    pub(super) fn take_apart<N: Net<Segment = S>>(self, hub: &mut Hub<N>) -> (Option<SocketId>, Option<Work<S>>) {
        let socket = self.socket();
        let work = match self {
            Self::Listener(_) | Self::Datagram(_) => None,
            Self::Request(request) => request.qp.map(Work::Stream),
            Self::Attempt(attempt) => {
                if let AttemptStep::SettingUp(_, sent) = &attempt.step {
                    hub.close(sent.socket, false);
                }
                attempt.qp.map(Work::Stream)
            }
            Self::Stream(mut flow) => {
                flow.forget_offer(hub);
                Some(Work::Stream(flow.qp))
            }
            Self::Ring(flow) => Some(Work::Ring(flow.link, Some(flow.socket))),
            Self::Dead(work) => work,
        };
        (socket, work)
    }
}
