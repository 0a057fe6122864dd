//! Endpoints: the objects behind connection-manager ids. An endpoint is a listener, one end of a connection, or an id for datagrams.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use super::net::{Net, SocketId};
use super::pace::Pace;
use super::queue_pair::QueuePair;
use super::setup_listener::SegmentSetup;
use super::startup::{FrameReader, RequestTerms, StartupTerms};
use super::transmit::Sent;
use crate::cm::{CmId, ConnectFailure, DisconnectCause};
use crate::mem::SendSlice;
use crate::newcomers::{Host, Ticket};
use crate::shm::Segment;
use crate::shm::link::Link;
use crate::slab::Key;

/// An attempt to connect to a peer. It exists until the MPA reply has arrived or the attempt has failed.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) terms: StartupTerms,
    pub(crate) private_data: Vec<u8>, // local: private data of the program
    /// True if the request may contain the hash of the path.
    pub(crate) shows_path: bool,
    pub(crate) reader: FrameReader,
}

impl Attempt {
    /// Returns the failure to report if the TCP connection of the attempt has failed with `error`. An attempt opens a second TCP
    /// connection, for MPA revision 1, only if the peer has closed the first one. If the second connection fails too, the failure of the
    /// first connection is reported.
    pub(crate) fn failure(&self, error: &io::Error) -> ConnectFailure {
        if self.terms.revision < 2 { ConnectFailure::PeerClosed } else { connect_failure(error) }
    }
}

/// The state of a listener: accepting or paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accepting {
    /// The listener accepts connections when an edge reports that connections wait.
    Yes,
    /// The listener is paused until the endpoint's deadline, because the system lacked a descriptor or memory for a connection.
    Later,
    /// The listener is paused because the limit of handshakes is reached. It resumes when a handshake finishes. It also resumes at the
    /// endpoint's deadline, when a half-open connection may be evicted.
    WhenThereIsRoom,
}

#[derive(Debug)]
pub(crate) enum EndpointState {
    Listening(Accepting),
    /// Passive side: the MPA request is being read. The program is not notified of the connection yet.
    Requesting {
        reader: Box<FrameReader>,
        listener: CmId,
        peer: SocketAddr,
        ticket: Ticket,
    },
    /// Passive side: the request waits until the program receives it.
    Queued(RequestTerms, Host),
    /// Passive side: the program has the request and has not accepted or rejected it yet.
    Offered(RequestTerms),
    /// Active side: the event that the address is resolved waits until the program receives it.
    Resolving(SocketAddr),
    /// Active side: the program has not called `connect` yet, so there is no socket.
    Resolved(SocketAddr),
    /// Active side: TCP is connecting.
    Connecting(Box<Attempt>, SocketAddr),
    /// Active side: the MPA request is sent, and the reply is being read.
    Replying(Box<Attempt>, SocketAddr),
    /// Active side: the MPA reply has arrived, and the two sides are setting up shared memory.
    SettingUp(SocketAddr),
    /// The handshake is complete, and FPDUs are exchanged.
    Live,
    /// The connection has ended. The program has not destroyed the endpoint yet.
    Dead,
    /// The endpoint is an id for datagrams.
    Datagram(Key),
}

impl EndpointState {
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Listening(_) => "listening",
            Self::Requesting { .. } => "reading the request",
            Self::Queued(..) => "with a request that waits",
            Self::Offered(_) => "waiting for accept or reject",
            Self::Resolving(_) => "resolving",
            Self::Resolved(_) => "resolved",
            Self::Connecting(..) | Self::Replying(..) | Self::SettingUp(_) => "connecting",
            Self::Live => "connected",
            Self::Dead => "closed",
            Self::Datagram(_) => "for datagrams",
        }
    }

    /// Returns true if a peer has started a handshake of which the program was not notified.
    pub(crate) const fn is_unknown(&self) -> bool {
        matches!(self, Self::Requesting { .. } | Self::Queued(..))
    }

    /// Returns true if this is the state of an unfinished handshake that a peer has started.
    pub(crate) const fn is_handshake(&self) -> bool {
        self.is_unknown() || matches!(self, Self::Offered(_))
    }
}

#[derive(Debug)]
pub(crate) struct CmEndpoint<S: Segment> {
    pub(crate) state: EndpointState,
    pub(crate) socket: Option<SocketId>,
    pub(crate) qp: Option<Box<QueuePair>>,
    /// The queue pair of a connection in shared memory. If `link` is `Some`, `qp` is `None`, and `socket` is the Unix socket.
    pub(super) link: Option<Box<Link<S>>>,
    /// The progress of setting up shared memory, for a connection that may leave its TCP stream.
    pub(super) setup: Option<Box<SegmentSetup<S>>>,
    /// The startup frame that is being sent. Empty after the whole frame was sent. `frame_sent` is the number of bytes of the frame that
    /// are sent.
    pub(crate) frame: Vec<u8>, // bound: private-data
    pub(crate) frame_sent: usize,
    /// True once the event `Established` was raised.
    pub(crate) announced: bool,
    /// True if the socket may have bytes to read.
    pub(crate) readable: bool,
    /// True if the peer's stream has ended or failed. Unread bytes may remain before the end. Even after a short read, the socket must be
    /// read until a receive call returns 0 or an error.
    pub(crate) closed: bool,
    /// True if the connection is in the ready queue.
    pub(crate) queued: bool,
    /// The result of the last transmission.
    pub(super) sent: Sent,
    /// The error with which sending failed, or `None`. After such an error, the connection ends once the peer's remaining bytes are read.
    pub(crate) broken: Option<io::Error>,
    /// The number of transmissions, modulo 2^32. TCP's segment size is read again once in 1,024 transmissions.
    pub(crate) transmissions: u32,
    /// The time of the peer's last sign of life: of an input ([`Pace::is_sign_of_life`]), or of a transmission to a socket that had been
    /// full. Before the first sign of life, the time at which the connection became live.
    pub(crate) last_heard: Option<Instant>,
    /// The pace, which limits the length of receive calls.
    pub(super) pace: Pace,
}

impl<S: Segment> CmEndpoint<S> {
    pub(crate) fn new(state: EndpointState, socket: Option<SocketId>) -> Self {
        Self {
            state,
            socket,
            qp: None,
            link: None,
            setup: None,
            frame: Vec::new(),
            frame_sent: 0,
            announced: false,
            readable: false,
            closed: false,
            queued: false,
            sent: Sent::All,
            broken: None,
            transmissions: 0,
            last_heard: None,
            pace: Pace::new(),
        }
    }

    /// Sends the remaining bytes of the startup frame. Returns true once all of them are sent.
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

    /// Returns true if output waits for the socket to become writable.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.frame.is_empty()
            || self.qp.as_ref().is_some_and(|qp| qp.has_output())
            || self.link.as_ref().is_some_and(|link| link.has_announcements())
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

/// Returns the cause for an established connection that ended because its socket has failed with `error`.
pub(crate) fn lost(error: &io::Error) -> DisconnectCause {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
            DisconnectCause::Peer
        }
        _ => DisconnectCause::Path(error.to_string()),
    }
}

/// Returns the failure for a connection attempt that ended because its socket has failed with `error`.
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

/// Converts the cause of a disconnect to a connect failure. Used for a connection that the program had accepted or requested, and that
/// ended before `Established` was raised.
pub(crate) fn never_up(cause: DisconnectCause) -> ConnectFailure {
    match cause {
        DisconnectCause::Peer | DisconnectCause::Truncated => ConnectFailure::PeerClosed,
        DisconnectCause::PeerViolation(what) | DisconnectCause::TerminatedByPeer(what) => {
            ConnectFailure::Protocol(what)
        }
        other => ConnectFailure::System(other.to_string()),
    }
}
