//! [`TcpFlow`]: the engine of a connection on a TCP stream. It receives and sends, and returns what
//! happened to the connection.

use std::io;
use std::time::Instant;

use super::causes::lost;
use super::fault::Fault;
use super::frame::Frame;
use super::hub::{Hub, Owner};
use super::intake::Intake;
use super::net::{Net, NetChannel, Ready, SocketId};
use super::pace::Pace;
use super::queue_pair::{QueuePair, Role};
use super::startup::Agreement;
use super::transmit::Sent;
use super::wire::{Quote, TerminateCause};
use crate::shm::greeting::Secret;
use crate::soft::resources::Resources;
use rdma_transport::cm::{CmEventKind, DisconnectCause};
use rdma_transport::slab::Key;

/// The largest number of receive calls for one connection before other connections are served.
const RECEIVES: usize = 4;
/// The assumed maximum segment size of TCP, in bytes, if the system does not report it (RFC 9293,
/// section 3.7.1).
const DEFAULT_SEGMENT: usize = 536;

/// The result of serving a connection.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The connection continues. It is in the ready queue if it must be served again without an
    /// edge.
    Going,
    /// The peer has written its first record to the segment: the connection continues in shared
    /// memory.
    Moved,
    Ended(End),
}

/// The end of a live connection.
#[derive(Debug)]
pub(super) struct End {
    pub(super) cause: DisconnectCause,
    /// The Terminate to send to the peer.
    pub(super) terminate: Option<(TerminateCause, Option<Quote>)>,
}

impl End {
    pub(super) const fn of(cause: DisconnectCause) -> Self {
        Self { cause, terminate: None }
    }

    /// Returns the end of an accepted connection whose peer continues on TCP although shared memory
    /// is required. `Established` was not raised, and no byte of the stream is processed.
    fn of_refused_stream() -> Self {
        Self::of(DisconnectCause::PeerViolation("it continues on TCP although shared memory is required".into()))
    }
}

impl From<Fault> for End {
    /// Returns the end of a connection whose stream has this fault, with the Terminate that the
    /// RFCs require.
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Violation(cause, quote) => {
                Self { cause: DisconnectCause::PeerViolation(cause.to_string()), terminate: Some((cause, quote)) }
            }
            Fault::Terminated(terminate) => {
                let what = terminate.map_or_else(|| "no reason given".into(), |terminate| terminate.to_string());
                Self::of(DisconnectCause::TerminatedByPeer(what))
            }
            Fault::WorkRequest(status) => Self {
                cause: DisconnectCause::WorkRequest(status.into()),
                terminate: Some((TerminateCause::LOCAL_CATASTROPHIC, None)),
            },
        }
    }
}

/// The offer of shared memory in the MPA reply of the passive side.
#[derive(Debug)]
pub(super) enum Offered<S> {
    /// The offer contains this secret. The peer has sent no hello yet.
    Waiting(Secret),
    /// The peer has sent a hello on this Unix socket, and its segment is accepted.
    Accepted(SocketId, S),
}

/// A connection on a TCP stream whose handshake is complete.
#[derive(Debug)]
pub(super) struct TcpFlow<S> {
    /// The key of the connection's endpoint.
    pub(super) key: Key,
    pub(super) socket: SocketId,
    pub(super) qp: Box<QueuePair>,
    /// The MPA reply that is being sent.
    pub(super) reply: Frame,
    /// The offer of shared memory that the peer may still accept.
    pub(super) offer: Option<Box<Offered<S>>>,
    /// True once the event `Established` was raised.
    pub(super) announced: bool,
    /// True if the socket may have bytes to read.
    pub(super) readable: bool,
    /// True if the peer's stream has ended or failed. Unread bytes may remain before the end. Even
    /// after a short read, the socket must be read until a receive call returns 0 or an error.
    closed: bool,
    /// True if the connection is in the ready queue.
    queued: bool,
    /// The result of the last transmission.
    sent: Sent,
    /// The error with which sending failed, or `None`. After such an error, the connection ends
    /// once the peer's remaining bytes are read.
    broken: Option<io::Error>,
    /// The number of transmissions, modulo 2^32. TCP's segment size is read again once in 1,024
    /// transmissions.
    transmissions: u32,
    /// The time of the peer's last sign of life. A sign of life is received data
    /// ([`Pace::is_sign_of_life`]), or further bytes that a full socket accepts. Before the first
    /// sign of life, the time at which the connection became live.
    pub(super) last_heard: Instant,
    /// The pace, which limits the length of receive calls.
    pace: Pace,
}

/// The result of a receive call.
enum ReceiveResult {
    /// The number of received bytes, and true if the socket was drained.
    Bytes(usize, bool),
    Nothing,
    End,
    Lost(io::Error),
}

impl<S> TcpFlow<S> {
    /// Creates the flow of a connection whose handshake is complete. `closed` is true if the peer's
    /// stream has ended already, behind bytes that may be unread.
    pub(super) fn new(key: Key, socket: SocketId, qp: Box<QueuePair>, closed: bool, now: Instant) -> Self {
        Self {
            key,
            socket,
            qp,
            reply: Frame::default(),
            offer: None,
            announced: false,
            readable: false,
            closed,
            queued: false,
            sent: Sent::All,
            broken: None,
            transmissions: 0,
            last_heard: now,
            pace: Pace::new(),
        }
    }

    /// Starts the stream, after its socket has moved to the completion channel.
    pub(super) fn start<N: Net>(&mut self, hub: &mut Hub<N>, role: Role, agreement: &Agreement, now: Instant) {
        let max_segment = hub.net.max_segment(self.socket).unwrap_or(DEFAULT_SEGMENT);
        self.qp.establish(role, agreement, max_segment);
        if role == Role::Responder {
            // An initiator that has agreed to send a first message gets `ready_timeout` to send it.
            // Any other initiator gets `reply_grace` to read the reply, before the local side sends
            // FPDUs.
            let wait = if agreement.rtr.is_some() {
                hub.config.ready_timeout
            } else {
                self.announce(hub);
                hub.config.reply_grace
            };
            hub.deadlines.set(Owner::Endpoint(self.key), now + wait);
        }
        self.transmit(hub);
    }

    /// Raises the event `Established`, unless it was already raised.
    fn announce<N: Net>(&mut self, hub: &mut Hub<N>) {
        if !std::mem::replace(&mut self.announced, true) {
            let read_depth = self.qp.read_depth;
            hub.raise(self.key, CmEventKind::Established { private_data: Box::default(), read_depth });
        }
    }

    /// Handles an edge on the TCP socket.
    #[inline]
    pub(super) fn edge<N: Net>(&mut self, hub: &mut Hub<N>, ready: Ready) {
        self.closed |= ready.closed;
        self.readable |= ready.readable;
        if ready.readable {
            self.enqueue(hub);
        }
        if ready.writable && self.is_blocked() && !rdma_transport::planted("writable-edge-ignored") {
            self.transmit(hub);
        }
    }

    /// Returns true if output waits for the socket to become writable.
    #[inline]
    pub(super) fn is_blocked(&self) -> bool {
        !self.reply.is_sent() || self.qp.tx.has_work()
    }

    #[inline]
    fn enqueue<N: Net>(&mut self, hub: &mut Hub<N>) {
        hub.enqueue(self.key, &mut self.queued);
    }

    /// Returns true if the local side has offered shared memory, and the peer has sent no hello.
    pub(super) fn awaits_hello(&self) -> bool {
        matches!(self.offer.as_deref(), Some(Offered::Waiting(_)))
    }

    /// Drops the offer of shared memory, and closes the Unix socket to the peer if there is one.
    pub(super) fn forget_offer<N: Net>(&mut self, hub: &mut Hub<N>) {
        if let Some(Offered::Accepted(socket, _)) = self.offer.take().map(|offer| *offer) {
            hub.close(socket, false);
        }
    }

    /// Ends the setup of shared memory, for the reason `why`. Returns the end of the connection if
    /// it may not stay on its TCP stream.
    pub(super) fn stay<N: Net>(&mut self, hub: &mut Hub<N>, why: &str) -> Option<End> {
        self.offer.as_ref()?;
        self.forget_offer(hub);
        if hub.requires_shared_memory() {
            return Some(End::of_refused_stream());
        }
        log::debug!("connection {} stays on TCP: {why}", self.key);
        None
    }

    /// Ends the setup of shared memory if the peer has closed the Unix socket of its accepted
    /// segment. Returns the end of the connection if it may not stay on its TCP stream.
    pub(super) fn check_offer<N: Net>(&mut self, hub: &mut Hub<N>) -> Option<End> {
        let Some(Offered::Accepted(socket, _)) = self.offer.as_deref() else { return None };
        match hub.net.take(*socket, &mut [0; 8]) {
            Ok((0, _)) => self.stay(hub, "the peer has refused"),
            Ok(_) => None,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => self.stay(hub, &error.to_string()),
        }
    }

    /// Serves a connection that was removed from the ready queue, or whose socket is read without
    /// an edge: continues an unfinished transmission, and receives until the connection has used
    /// its budget. Puts the connection back into the ready queue if bytes may remain or sending has
    /// failed.
    pub(super) fn serve<N: Net>(&mut self, hub: &mut Hub<N>, now: Instant) -> Outcome {
        let mut budget = hub.config.receive_budget;
        self.queued = false;
        let rounds = if self.sent == Sent::More {
            self.transmit(hub);
            RECEIVES - 1
        } else {
            RECEIVES
        };
        for _ in 0..rounds {
            if let Some(fault) = self.qp.take_fault() {
                return Outcome::Ended(fault.into());
            }
            let (bytes, drained) = match self.receive(hub) {
                Ok(received) => received,
                Err(outcome) => return outcome,
            };
            // The peer sends on the stream although shared memory is required. Its bytes must not
            // reach `input`, which completes receives and answers Reads.
            let refuses = self.qp.tx.is_held() && hub.requires_shared_memory();
            if refuses && !rdma_transport::planted("a-refused-stream-is-read") {
                return Outcome::Ended(End::of_refused_stream());
            }
            let fpdus = self.qp.rx.fpdus();
            let result = self.qp.input(&mut hub.intake, bytes, &mut hub.resources);
            let fpdus = self.qp.rx.fpdus().wrapping_sub(fpdus) as usize;
            if self.pace.is_sign_of_life(bytes, fpdus) {
                self.last_heard = now;
            }
            let cost = self.pace.cost(bytes, fpdus, hub.config.receive_budget);
            self.readable = !drained;
            // If `transmit` fails below, `transmit` itself queues the connection again. If sending
            // had already failed before this call, this function must queue the connection again.
            let is_broken = self.broken.is_some();
            if self.qp.tx.is_held() && self.qp.rx.has_seen() {
                self.qp.tx.release();
                if let Some(end) = self.stay(hub, "the peer has started on the stream") {
                    return Outcome::Ended(end);
                }
                self.announce(hub);
                hub.deadlines.clear(Owner::Endpoint(self.key));
                self.transmit(hub);
            } else if self.qp.tx.has_work() {
                self.transmit(hub);
            }
            hub.hot = Some(self.key);
            if let Err(fault) = result {
                return Outcome::Ended(fault.into());
            }
            if drained {
                if is_broken {
                    self.enqueue(hub);
                }
                return Outcome::Going;
            }
            budget = budget.saturating_sub(cost);
            // Assume that the next receive call costs as much as this one.
            if budget < cost {
                break;
            }
        }
        self.enqueue(hub);
        Outcome::Going
    }

    /// Receives once. Returns the number of received bytes, and true if the socket is empty. If
    /// nothing was received, returns the outcome for the connection as the error.
    #[inline(always)]
    fn receive<N: Net>(&mut self, hub: &mut Hub<N>) -> Result<(usize, bool), Outcome> {
        let (room, socket) = (self.pace.room(), self.socket);
        match receive_once(&mut self.qp, &mut hub.intake, room, &hub.resources, &mut hub.net, socket) {
            ReceiveResult::Bytes(bytes, drained) => {
                Ok((bytes, drained && (!self.closed || rdma_transport::planted("short-read-before-the-end"))))
            }
            ReceiveResult::Nothing => {
                self.readable = false;
                Err(self.broken.take().map_or(Outcome::Going, |error| Outcome::Ended(End::of(lost(&error)))))
            }
            // A peer that moves to shared memory writes a record to the segment before it closes
            // the TCP stream. So the end of the stream is not always the end of the connection.
            ReceiveResult::End if matches!(self.offer.as_deref(), Some(Offered::Accepted(..))) => Err(Outcome::Moved),
            ReceiveResult::End => Err(Outcome::Ended(self.end_of_stream())),
            ReceiveResult::Lost(error) => Err(Outcome::Ended(End::of(lost(&error)))),
        }
    }

    /// Returns the end of a connection whose peer has closed the stream.
    pub(super) fn end_of_stream(&self) -> End {
        End::of(peer_has_gone(self.qp.is_at_boundary()))
    }

    /// Hands the output of the connection to TCP. If that fails, the connection ends when it is
    /// served next.
    pub(super) fn transmit<N: Net>(&mut self, hub: &mut Hub<N>) {
        if self.broken.is_some() {
            return;
        }
        let mut accepts = false;
        let result = match self.reply.send(&mut hub.net, self.socket) {
            Ok(true) => {
                let (net, socket) = (&mut hub.net, self.socket);
                self.transmissions = self.transmissions.wrapping_add(1);
                if self.transmissions % 1024 == 16 {
                    if let Ok(max_segment) = net.max_segment(socket) {
                        self.qp.tx.set_max_segment(max_segment);
                    }
                }
                self.qp.transmit(&mut |bufs| net.send(socket, bufs).inspect(|_| accepts = true), &mut hub.resources)
            }
            Ok(false) => Ok(Sent::Blocked),
            Err(error) => Err(error),
        };
        match result {
            Ok(sent) => {
                // A full socket accepts further bytes only after the peer's TCP has acknowledged
                // some of the sent bytes. Such an acknowledgment is a sign of life. On a slow
                // link, the answer to a ping would be too late, because the ping waits behind the
                // unsent data.
                if std::mem::replace(&mut self.sent, sent) == Sent::Blocked && accepts {
                    self.last_heard = hub.now.map_or(self.last_heard, |now| self.last_heard.max(now));
                }
                if sent != Sent::More && !self.qp.tx.has_fault() {
                    return;
                }
            }
            // The connection does not end yet, because the peer's last bytes, such as a Terminate,
            // may still be readable.
            Err(error) => {
                self.broken = Some(error);
                self.closed = true;
                self.sent = Sent::All;
            }
        }
        self.enqueue(hub);
        hub.net.wake(NetChannel::Completion);
    }

    /// Handles the end of the `reply_grace` of a peer that has not agreed to send first: releases
    /// the held sends if the peer has acknowledged the MPA reply. Otherwise sets the deadline for
    /// the next check to `retry`.
    pub(super) fn end_grace<N: Net>(&mut self, hub: &mut Hub<N>, retry: Instant) {
        if !self.reply.is_sent() || !hub.net.all_acknowledged(self.socket) {
            hub.deadlines.set(Owner::Endpoint(self.key), retry);
        } else if self.qp.tx.is_held() {
            self.qp.tx.release();
            self.transmit(hub);
        }
    }

    /// Ends the stream of a connection whose id is destroyed. Returns the framed bytes that are
    /// still to be sent.
    pub(super) fn abandon(&mut self) -> Vec<u8> {
        let rest = self.qp.abandon();
        std::mem::take(&mut self.reply).unsent(rest)
    }
}

/// Returns the cause for a connection that ended because the peer has closed the stream.
/// `at_boundary` is true if the stream ended between two messages.
pub(super) const fn peer_has_gone(at_boundary: bool) -> DisconnectCause {
    if at_boundary { DisconnectCause::Peer } else { DisconnectCause::Truncated }
}

#[inline]
fn receive_once(
    qp: &mut QueuePair,
    intake: &mut Intake,
    room: usize,
    resources: &Resources,
    net: &mut impl Net,
    socket: SocketId,
) -> ReceiveResult {
    loop {
        match qp.receive(intake, room, &resources.keys, &mut |slices| net.recv(socket, slices)) {
            Ok((0, _)) => return ReceiveResult::End,
            Ok((bytes, drained)) => return ReceiveResult::Bytes(bytes, drained),
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => return ReceiveResult::Nothing,
                _ => return ReceiveResult::Lost(error),
            },
        }
    }
}
