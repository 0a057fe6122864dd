//! Endpoints: a listener, or one end of a connection with its state, its socket and its queue pair.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use super::net::{Net, SocketId};
use super::pace::Pace;
use super::queue_pair::QueuePair;
use super::setup_listener::SegmentSetup;
use super::startup::{FrameReader, RequestTerms, StartupTerms};
use crate::cm::{CmId, ConnectFailure, DisconnectCause};
use crate::mem::SendSlice;
use crate::newcomers::Ticket;
use crate::roce::id::DatagramId;
use crate::shm::link::Link;
use crate::slab::Key;

/// An attempt to connect to a peer.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) terms: StartupTerms,
    pub(crate) private_data: Vec<u8>,
    pub(crate) reader: FrameReader,
}

impl Attempt {
    /// Returns the reason why the attempt failed if its TCP connection failed. The second connection of an attempt, for revision 1, is
    /// tried only after the peer closed the first one. The first closure is then the reason, whatever happens to the second connection.
    pub(crate) fn failure(&self, error: &io::Error) -> ConnectFailure {
        if self.terms.revision < 2 { ConnectFailure::PeerClosed } else { connect_failure(error) }
    }
}

/// The state of a listener: accepting or paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accepting {
    /// Accepts connections when an edge reports them.
    Yes,
    /// Paused until the endpoint's deadline, because the system had no descriptor or no memory for the last connection.
    Later,
    /// Paused until a handshake finishes, or until the endpoint's deadline, when a half-open connection may be evicted.
    WhenThereIsRoom,
}

#[derive(Debug)]
pub(crate) enum EndpointState {
    Listening(Accepting),
    /// Passive side: the request is being read. The program does not know of it yet.
    Requesting {
        reader: Box<FrameReader>,
        listener: CmId,
        peer: SocketAddr,
        ticket: Ticket,
    },
    /// Passive side: the program decides between accept and reject.
    Offered(RequestTerms),
    /// Active side: the address is known, and no socket exists yet.
    Resolved(SocketAddr),
    /// Active side: TCP is connecting.
    Connecting(Box<Attempt>, SocketAddr),
    /// Active side: the request is sent, and the reply is being read.
    Replying(Box<Attempt>, SocketAddr),
    /// Active side: the reply has arrived, and shared memory is being set up with the peer.
    SettingUp(SocketAddr),
    /// The connection is up, and FPDUs flow.
    Live,
    /// The connection has ended. The endpoint waits for the program to destroy it.
    Dead,
    /// The endpoint is an id for datagrams.
    Datagram(Box<DatagramId>),
}

impl EndpointState {
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Listening(_) => "listening",
            Self::Requesting { .. } => "reading the request",
            Self::Offered(_) => "waiting for accept or reject",
            Self::Resolved(_) => "resolved",
            Self::Connecting(..) | Self::Replying(..) | Self::SettingUp(_) => "connecting",
            Self::Live => "connected",
            Self::Dead => "closed",
            Self::Datagram(id) => id.name(),
        }
    }

    /// Returns true if this is an unfinished handshake that a peer started.
    pub(crate) const fn is_handshake(&self) -> bool {
        matches!(self, Self::Requesting { .. } | Self::Offered(_))
    }
}

#[derive(Debug)]
pub(crate) struct CmEndpoint<S> {
    pub(crate) state: EndpointState,
    pub(crate) socket: Option<SocketId>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) qp: Option<Box<QueuePair>>,
    /// The queue pair of a connection that has left its stream for shared memory. `qp` is `None` then, and `socket` is the Unix socket.
    pub(super) link: Option<Box<Link<S>>>,
    /// The progress of a connection that may leave its stream.
    pub(super) setup: Option<Box<SegmentSetup<S>>>,
    /// A startup frame to be sent, and the number of its bytes that are sent.
    pub(crate) frame: Vec<u8>,
    pub(crate) frame_sent: usize,
    /// True once `Established` was raised.
    pub(crate) announced: bool,
    /// True if there may be bytes to read.
    pub(crate) readable: bool,
    /// True if the peer's stream has ended or failed behind the unread bytes. A short read does not mean then that the socket is drained.
    pub(crate) closed: bool,
    /// True if the connection is in the ready queue.
    pub(crate) queued: bool,
    /// True if sending stopped at its budget.
    pub(crate) unfinished: bool,
    /// The error that sending failed with. The bytes that the peer sent before are still read.
    pub(crate) broken: Option<io::Error>,
    /// Number of transmissions, modulo 2^32. The segment size is read again after each 1,024.
    pub(crate) transmissions: u32,
    /// The time of the last sign of life ([`Pace::is_sign_of_life`]), initially the time at which the connection was made.
    pub(crate) last_heard: Option<Instant>,
    /// The amount that is received at a time.
    pub(super) pace: Pace,
}

impl<S> CmEndpoint<S> {
    pub(crate) fn new(state: EndpointState, socket: Option<SocketId>) -> Self {
        Self {
            state,
            socket,
            deadline: None,
            qp: None,
            link: None,
            setup: None,
            frame: Vec::new(),
            frame_sent: 0,
            announced: false,
            readable: false,
            closed: false,
            queued: false,
            unfinished: false,
            broken: None,
            transmissions: 0,
            last_heard: None,
            pace: Pace::new(),
        }
    }

    /// Puts the connection, whose key is `key`, at the end of the ready queue, unless it is in the queue.
    #[inline]
    pub(crate) fn enqueue(&mut self, key: Key, ready: &mut VecDeque<Key>) {
        if !self.queued {
            self.queued = true;
            ready.push_back(key);
        }
    }

    /// Sends the remaining bytes of the startup frame. Returns true when all of it is sent.
    pub(crate) fn send_frame(&mut self, net: &mut impl Net) -> io::Result<bool> {
        let Some(socket) = self.socket else { return Ok(false) };
        while self.frame_sent < self.frame.len() {
            match net.send(socket, &[SendSlice::new(&self.frame[self.frame_sent..])]) {
                Ok(n) => self.frame_sent += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        if !self.frame.is_empty() {
            self.frame = Vec::new();
            self.frame_sent = 0;
        }
        Ok(true)
    }

    /// Returns true if there is output that waits for room in the socket.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.frame.is_empty() || self.qp.as_ref().is_some_and(|qp| qp.has_output())
    }

    /// Returns the unsent bytes of the startup frame, followed by `more`.
    pub(crate) fn unsent(&mut self, more: Vec<u8>) -> Vec<u8> {
        if self.frame_sent >= self.frame.len() {
            return more;
        }
        let mut rest = self.frame.split_off(self.frame_sent);
        rest.extend_from_slice(&more);
        rest
    }
}

/// Returns the reason why an established connection ended, from the error of its socket.
pub(crate) fn lost(error: &io::Error) -> DisconnectCause {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
            DisconnectCause::Peer
        }
        _ => DisconnectCause::Path(error.to_string()),
    }
}

/// Returns the reason why a connection was not established, from the error of its socket.
pub(crate) fn connect_failure(error: &io::Error) -> ConnectFailure {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => ConnectFailure::Refused,
        io::ErrorKind::TimedOut => ConnectFailure::Timeout,
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
            ConnectFailure::PeerClosed
        }
        io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::NetworkDown
        | io::ErrorKind::AddrNotAvailable => ConnectFailure::Unreachable(error.to_string()),
        _ => ConnectFailure::System(error.to_string()),
    }
}

/// Returns the reason why a connection was not established that ended between accept and the peer's first bytes.
pub(crate) fn never_up(cause: DisconnectCause) -> ConnectFailure {
    match cause {
        DisconnectCause::Peer | DisconnectCause::Truncated => ConnectFailure::PeerClosed,
        DisconnectCause::PeerViolation(what) | DisconnectCause::TerminatedByPeer(what) => {
            ConnectFailure::Protocol(what)
        }
        other => ConnectFailure::System(other.to_string()),
    }
}
