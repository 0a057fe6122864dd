//! One end of a connection, or a listener: its state, its socket, its queue pair.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use super::half_open::Ticket;
use super::net::{Net, SocketId};
use super::pace::Pace;
use super::queue_pair::QueuePair;
use super::startup::{Asked, FrameReader, Terms};
use crate::cm::{CmId, ConnectFailure, DisconnectCause};
use crate::mem::SendSlice;

/// An attempt to connect.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) terms: Terms,
    pub(crate) private_data: Vec<u8>,
    pub(crate) reader: FrameReader,
}

impl Attempt {
    /// Why the attempt failed when its TCP connection was not made. A second one is made, with revision 1, only because the
    /// peer has closed the first: that is the reason then, whatever becomes of the second.
    pub(crate) fn failure(&self, error: &io::Error) -> ConnectFailure {
        if self.terms.revision < 2 { ConnectFailure::PeerClosed } else { connect_failure(error) }
    }
}

/// Whether a listener takes connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accepting {
    /// An edge says that there are some.
    Yes,
    /// Not before the endpoint's deadline: the system had no descriptor or no memory for the last one.
    Later,
    /// Not before a handshake is done, or the endpoint's deadline, when one may be ended.
    WhenThereIsRoom,
}

#[derive(Debug)]
pub(crate) enum State {
    Listening(Accepting),
    /// Passive: the request is being read; the user does not know yet.
    Requesting {
        reader: Box<FrameReader>,
        listener: CmId,
        peer: SocketAddr,
        ticket: Ticket,
    },
    /// Passive: the user is to decide.
    Offered(Asked),
    /// Active: no socket yet.
    Resolved(SocketAddr),
    /// Active: TCP connects.
    Connecting(Box<Attempt>, SocketAddr),
    /// Active: the request is sent, the reply is being read.
    Replying(Box<Attempt>, SocketAddr),
    /// FPDUs flow.
    Live,
    /// Nothing flows any more; the user is to destroy it.
    Dead,
}

impl State {
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Listening(_) => "listening",
            Self::Requesting { .. } => "reading the request",
            Self::Offered(_) => "waiting for accept or reject",
            Self::Resolved(_) => "resolved",
            Self::Connecting(..) | Self::Replying(..) => "connecting",
            Self::Live => "connected",
            Self::Dead => "closed",
        }
    }

    /// Whether it counts as a handshake that a peer started.
    pub(crate) const fn is_handshake(&self) -> bool {
        matches!(self, Self::Requesting { .. } | Self::Offered(_))
    }
}

#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) state: State,
    pub(crate) socket: Option<SocketId>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) qp: Option<Box<QueuePair>>,
    /// A startup frame, and how much of it is sent.
    pub(crate) frame: Vec<u8>,
    pub(crate) frame_sent: usize,
    /// `Established` was raised.
    pub(crate) announced: bool,
    /// There may be bytes to read, or connections to accept.
    pub(crate) readable: bool,
    /// The end of the stream is near: a short read does not mean that the socket is drained.
    pub(crate) closed: bool,
    /// It is in the ready ring.
    pub(crate) queued: bool,
    /// Sending stopped at its budget.
    pub(crate) unfinished: bool,
    /// Sending failed; what the peer sent before is still read.
    pub(crate) broken: Option<io::Error>,
    /// Transmissions, to look at the segment size now and then.
    pub(crate) transmissions: u32,
    /// When octets of the stream last came; of the startup frames before the first.
    pub(crate) last_heard: Option<Instant>,
    /// How much is received at a time.
    pub(super) pace: Pace,
}

impl Endpoint {
    pub(crate) fn new(state: State, socket: Option<SocketId>) -> Self {
        Self {
            state,
            socket,
            deadline: None,
            qp: None,
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

    /// Sends what is left of the startup frame; whether all of it is out.
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

    /// Whether something waits for room in the socket.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.frame.is_empty() || self.qp.as_ref().is_some_and(|qp| qp.has_output())
    }

    /// What is left of the startup frame, and `more` behind it.
    pub(crate) fn unsent(&mut self, more: Vec<u8>) -> Vec<u8> {
        if self.frame_sent >= self.frame.len() {
            return more;
        }
        let mut rest = self.frame.split_off(self.frame_sent);
        rest.extend_from_slice(&more);
        rest
    }
}

/// Why a connection that was up is gone.
pub(crate) fn lost(error: &io::Error) -> DisconnectCause {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
            DisconnectCause::Peer
        }
        _ => DisconnectCause::Path(error.to_string()),
    }
}

/// Why a connection did not come up.
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

/// The same of a connection that ended between accept and its first bytes.
pub(crate) fn never_up(cause: DisconnectCause) -> ConnectFailure {
    match cause {
        DisconnectCause::Peer | DisconnectCause::Truncated => ConnectFailure::PeerClosed,
        DisconnectCause::PeerViolation(what) | DisconnectCause::TerminatedByPeer(what) => {
            ConnectFailure::Protocol(what)
        }
        other => ConnectFailure::System(other.to_string()),
    }
}
