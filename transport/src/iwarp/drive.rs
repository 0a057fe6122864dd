//! The implementation of `progress`: receives and sends bytes, ends connections, and handles deadlines.

use std::io;
use std::time::{Duration, Instant};

use super::config::SharedMemoryPolicy;
use super::endpoint::{Accepting, CmEndpoint, EndpointState, lost, never_up};
use super::fault::Fault;
use super::hub::Owner;
use super::intake::Intake;
use super::net::{Net, NetChannel, Ready, SocketId};
use super::provider::Iwarp;
use super::queue_pair::QueuePair;
use super::startup;
use super::transmit::Sent;
use super::wire::{Quote, TerminateCause};
use crate::cm::{CmEventKind, ConnectFailure, DisconnectCause};
use crate::provider::Drive;
use crate::slab::Key;
use crate::soft::resources::Resources;

/// With one connection, a busy poll checks all sockets only in every `SPIN_FULL`-th round. In the other rounds, a busy poll only reads from
/// that connection.
pub(super) const SPIN_FULL: u32 = 8;
/// The largest number of receive calls for one connection before other connections are served.
const RECEIVES: usize = 4;
/// The largest number of connections that one call of `progress` serves. With this limit, the received data is still in the CPU caches when
/// the program processes it after the call.
const SERVED: usize = 32;
/// The least time until an established connection is checked again whose MPA reply is not sent or not acknowledged. Without such a time, a
/// `reply_grace` of 0 would never let [`Iwarp::timers`] return.
const RETRY: Duration = Duration::from_millis(1);

/// The result of a receive call.
enum ReceiveResult {
    /// The number of received bytes, and true if the socket was drained.
    Bytes(usize, bool),
    Nothing,
    End,
    Lost(io::Error),
}

impl<N: Net> Iwarp<N> {
    /// Carries out one call of `progress`: receives and sends bytes, and handles deadlines. Returns true if more work remains.
    pub(super) fn drive(&mut self, now: Instant, drive: Drive) -> bool {
        self.hub.now = Some(now);
        self.links.account.begin_turn();
        let more = self.drive_round(now, drive) || self.links.account.unmaps();
        // The caller may sleep after a full call, and after any call if all completion queues are armed. So peers in shared memory must be
        // able to wake the caller.
        let sleeps = self.links.unarmed && (drive == Drive::Full || self.hub.resources.cqs.are_all_armed());
        (sleeps && self.arm_links()) || more
    }

    #[inline]
    fn drive_round(&mut self, now: Instant, drive: Drive) -> bool {
        if drive == Drive::Spin && self.links.count > 0 && self.hub.ready.is_empty() {
            if let Some(more) = self.spin_links(now) {
                return more;
            }
        }
        let spins = drive == Drive::Spin && self.hub.ready.is_empty();
        // If the send buffer of a connection's socket is full, only an edge reports that the socket is writable again. So the edges must be
        // read.
        let blocked = |hot| self.endpoints.get(hot).is_some_and(|endpoint| endpoint.is_blocked());
        if let Some(hot) = self.hot.filter(|&hot| spins && !blocked(hot)) {
            self.spins = self.spins.wrapping_add(1);
            let full = if self.sockets() > 1 { 2 } else { SPIN_FULL };
            if self.spins % full != 0 {
                if self.receive(hot, now) {
                    self.enqueue(hot);
                }
                return !(self.hub.ready.is_empty() && self.datagrams.tables.ready.is_empty());
            }
        }
        if spins && self.hot.is_none() && self.datagrams.tables.ready.is_empty() {
            let alone = self.live == 0;
            let more = self.datagrams.spin_port(&mut self.hub, alone, now);
            self.take_queries();
            if let Some(more) = more {
                return more;
            }
        }
        // Without a connection, a busy poll has nothing to read. It need not send either: an edge wakes the caller when a closed connection
        // can send its unsent bytes. The caller also wakes up at the next deadline.
        if drive == Drive::Spin && self.sockets() == 0 && self.hub.ready.is_empty() {
            return false;
        }
        // Read all edges, because `has_unread` is only correct if no edge is left unread. Each socket has at most one edge, which bounds
        // the number of rounds.
        let mut more = true;
        for _ in 0..self.sockets() + 2 {
            more = self.collect(NetChannel::Completion, now).unwrap_or_else(|error| {
                local_log!(Error, "cannot poll for events of connections: {error}");
                false
            });
            if !more {
                break;
            }
        }
        for _ in 0..self.hub.ready.len().min(SERVED) {
            let Some(key) = self.hub.ready.pop_front() else { break };
            if self.receive(key, now) {
                self.enqueue(key);
            }
        }
        self.datagrams.serve_ports(&mut self.hub, now);
        self.take_queries();
        self.timers(now);
        more || !(self.hub.ready.is_empty() && self.datagrams.tables.ready.is_empty())
    }

    pub(super) fn enqueue(&mut self, key: Key) {
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            self.hub.enqueue(key, &mut endpoint.queued);
        }
    }

    /// Reads edges of a channel and handles them. Returns true if more edges remain.
    pub(super) fn collect(&mut self, channel: NetChannel, now: Instant) -> io::Result<bool> {
        let mut edges = std::mem::take(&mut self.edges);
        let more = self.hub.net.poll(channel, &mut edges);
        for (socket, ready) in edges.drain(..) {
            self.edge(socket, ready, now);
        }
        self.edges = edges;
        more
    }

    fn edge(&mut self, socket: SocketId, ready: Ready, now: Instant) {
        match self.hub.owner(socket) {
            Some(Owner::Endpoint(key)) => match self.endpoints.get_mut(key) {
                Some(endpoint @ CmEndpoint { state: EndpointState::Live, .. }) => {
                    endpoint.closed |= ready.closed;
                    endpoint.readable |= ready.readable;
                    if ready.readable {
                        self.hub.enqueue(key, &mut endpoint.queued);
                    }
                    if ready.writable && endpoint.is_blocked() && !crate::planted("writable-edge-ignored") {
                        self.transmit(key);
                    }
                }
                Some(CmEndpoint { state: EndpointState::Listening(_), .. }) => self.accept_some(key, now),
                Some(endpoint) => {
                    // The bytes behind the startup frame are not read yet. These bytes cause a new edge when the socket moves to the
                    // completion channel.
                    endpoint.closed |= ready.closed;
                    if !(ready.closed && self.drop_if_reset(key)) {
                        self.advance(key, now);
                    }
                }
                None => {}
            },
            Some(Owner::SetupListener) => _ = self.accept_local_peers(now),
            Some(Owner::NewPeer(key)) => self.read_hello(key, now),
            Some(Owner::Setup(key)) => self.continue_setup(key, now),
            Some(Owner::Port(key)) => self.datagrams.port_edge(&mut self.hub, key, ready),
            Some(Owner::Datagram(_)) => {}
            Some(Owner::Linger(key)) => {
                if !crate::planted("a-closed-socket-sends-no-more") {
                    self.hub.serve_linger(key);
                }
            }
            None => {}
        }
    }

    /// Serves a live connection that was removed from the ready queue: continues an unfinished transmission, and receives until the
    /// connection has used its budget. Returns true if the connection must be queued again, because bytes may remain or sending has failed.
    fn receive(&mut self, key: Key, now: Instant) -> bool {
        let mut budget = self.hub.config.receive_budget;
        for round in 0..RECEIVES {
            let Some(endpoint @ CmEndpoint { state: EndpointState::Live, .. }) = self.endpoints.get_mut(key) else {
                if self.hot == Some(key) {
                    self.hot = None;
                }
                return false;
            };
            if round == 0 {
                endpoint.queued = false;
                if endpoint.sent == Sent::More {
                    self.transmit(key);
                    continue;
                }
            }
            if endpoint.link.is_some() {
                return self.serve(key, now);
            }
            let (Some(socket), Some(qp)) = (endpoint.socket, endpoint.qp.as_mut()) else { return false };
            if let Some(fault) = qp.take_fault() {
                self.broke(key, fault, now);
                return false;
            }
            let room = endpoint.pace.room();
            let net = &mut self.hub.net;
            let (octets, drained) = match receive_once(qp, &mut self.hub.intake, room, &self.hub.resources, net, socket)
            {
                ReceiveResult::Bytes(octets, drained) => {
                    (octets, drained && (!endpoint.closed || crate::planted("short-read-before-the-end")))
                }
                ReceiveResult::Nothing => {
                    endpoint.readable = false;
                    if let Some(error) = endpoint.broken.take() {
                        self.end(key, lost(&error), None, now);
                    }
                    return false;
                }
                ReceiveResult::End => {
                    let cause = peer_has_gone(qp.is_at_boundary());
                    // A peer that moves to shared memory writes a record to the segment before it closes the TCP stream. So the end of the
                    // stream is not always the end of the connection.
                    if !self.follow(key, now) {
                        self.end(key, cause, None, now);
                    }
                    return false;
                }
                ReceiveResult::Lost(error) => {
                    self.end(key, lost(&error), None, now);
                    return false;
                }
            };
            // The check precedes `input`, which completes receives and answers Reads.
            let refuses = qp.is_held() && self.hub.config.shared_memory == SharedMemoryPolicy::Require;
            if refuses && !crate::planted("a-refused-stream-is-read") {
                self.refuse_stream(key, now);
                return false;
            }
            let fpdus = qp.fpdus();
            let result = qp.input(&mut self.hub.intake, octets, &mut self.hub.resources);
            let fpdus = qp.fpdus().wrapping_sub(fpdus) as usize;
            if endpoint.pace.is_sign_of_life(octets, fpdus) {
                endpoint.last_heard = Some(now);
            }
            let cost = endpoint.pace.cost(octets, fpdus, self.hub.config.receive_budget);
            endpoint.readable = !drained;
            // If `transmit` fails below, `transmit` itself queues the connection again. If sending had already failed before this call,
            // this function must queue the connection again.
            let is_broken = endpoint.broken.is_some();
            if qp.is_held() && qp.has_received() {
                qp.release();
                self.end_setup(key, "the peer has started on the stream", now);
                self.announce(key);
                self.hub.deadlines.clear(Owner::Endpoint(key));
                self.transmit(key);
            } else if qp.has_output() {
                self.transmit(key);
            }
            self.hot = Some(key);
            if let Err(fault) = result {
                self.broke(key, fault, now);
                return false;
            }
            if drained {
                return is_broken;
            }
            budget = budget.saturating_sub(cost);
            // Assume that the next receive call costs as much as this one.
            if budget < cost {
                break;
            }
        }
        true
    }

    /// Hands the output of a connection to TCP. If that fails, the next call of `progress` ends the connection.
    pub(super) fn transmit(&mut self, key: Key) {
        let Some(endpoint @ CmEndpoint { state: EndpointState::Live, .. }) = self.endpoints.get_mut(key) else {
            return;
        };
        if endpoint.link.is_some() {
            return self.pump(key);
        }
        if endpoint.broken.is_some() {
            return;
        }
        let mut accepts = false;
        let result = match endpoint.send_frame(&mut self.hub.net) {
            Ok(true) => {
                let (Some(socket), Some(qp)) = (endpoint.socket, endpoint.qp.as_mut()) else { return };
                endpoint.transmissions = endpoint.transmissions.wrapping_add(1);
                if endpoint.transmissions % 1024 == 16 {
                    if let Ok(max_segment) = self.hub.net.max_segment(socket) {
                        qp.set_max_segment(max_segment);
                    }
                }
                let net = &mut self.hub.net;
                qp.transmit(&mut |bufs| net.send(socket, bufs).inspect(|_| accepts = true), &mut self.hub.resources)
            }
            Ok(false) => Ok(Sent::Blocked),
            Err(error) => Err(error),
        };
        let error = match result {
            Ok(sent) => {
                // A full socket accepts bytes again only after the peer's TCP has acknowledged some. On a slow link, the answer to a ping
                // arrives late, because the ping waits behind the data that is still unsent.
                if std::mem::replace(&mut endpoint.sent, sent) == Sent::Blocked && accepts {
                    endpoint.last_heard = endpoint.last_heard.max(self.hub.now);
                }
                if sent == Sent::More || endpoint.qp.as_ref().is_some_and(|qp| qp.has_fault()) {
                    self.enqueue(key);
                    self.hub.net.wake(NetChannel::Completion);
                }
                return;
            }
            Err(error) => error,
        };
        // The connection does not end yet, because the peer's last bytes, such as a Terminate, may still be readable.
        endpoint.broken = Some(error);
        endpoint.closed = true;
        endpoint.sent = Sent::All;
        self.enqueue(key);
        self.hub.net.wake(NetChannel::Completion);
    }

    /// Ends a connection because of a fault in its stream. Sends a Terminate if the RFCs require one.
    fn broke(&mut self, key: Key, fault: Fault, now: Instant) {
        match fault {
            Fault::Violation(cause, quote) => {
                self.end(key, DisconnectCause::PeerViolation(cause.to_string()), Some((cause, quote)), now);
            }
            Fault::Terminated(terminate) => {
                let what = terminate.map_or_else(|| "no reason given".into(), |terminate| terminate.to_string());
                self.end(key, DisconnectCause::TerminatedByPeer(what), None, now);
            }
            Fault::WorkRequest(status) => {
                let terminate = Some((TerminateCause::LOCAL_CATASTROPHIC, None));
                self.end(key, DisconnectCause::WorkRequest(status.into()), terminate, now);
            }
        }
    }

    /// Raises the event `Established` for a connection, unless this event was already raised.
    pub(super) fn announce(&mut self, key: Key) {
        if let Some(endpoint) = self.endpoints.get_mut(key).filter(|endpoint| !endpoint.announced) {
            endpoint.announced = true;
            let of_link = endpoint.link.as_ref().map(|link| link.read_depth);
            let read_depth = of_link.or(endpoint.qp.as_ref().map(|qp| qp.read_depth)).unwrap_or_default();
            self.hub.raise(key, CmEventKind::Established { private_data: Box::default(), read_depth });
        }
    }

    /// Ends a live connection: flushes its work queues and raises one event, `Disconnected` or `ConnectFailed`. Unless the peer has ended
    /// the stream or the path has failed, the FPDUs that are already framed are sent before the socket is closed. After them, `terminate`
    /// is sent if it is given.
    pub(super) fn end(
        &mut self,
        key: Key,
        cause: DisconnectCause,
        terminate: Option<(TerminateCause, Option<Quote>)>,
        now: Instant,
    ) {
        let Some(EndpointState::Live) = self.transition(key, EndpointState::Dead) else { return };
        self.end_link(key);
        let Some(endpoint) = self.endpoints.get_mut(key) else { return };
        self.hub.deadlines.clear(Owner::Endpoint(key));
        let rest = endpoint.qp.as_mut().map(|qp| qp.end(terminate, &mut self.hub.resources.cqs)).unwrap_or_default();
        let rest = endpoint.unsent(rest);
        let (announced, socket) = (endpoint.announced, endpoint.socket.take());
        if self.hot == Some(key) {
            self.hot = None;
        }
        if let Some(socket) = socket {
            match cause {
                DisconnectCause::Peer | DisconnectCause::Truncated | DisconnectCause::Path(_) => {
                    self.hub.close(socket, false);
                }
                _ => self.hub.linger(socket, rest, now),
            }
        }
        let kind = match cause {
            cause if announced || cause == DisconnectCause::Local => CmEventKind::Disconnected(cause),
            cause => CmEventKind::ConnectFailed(never_up(cause)),
        };
        self.hub.raise(key, kind);
    }

    /// Handles the deadlines that have passed.
    pub(super) fn timers(&mut self, now: Instant) {
        self.datagrams.time_queries(&mut self.hub, now);
        while let Some((at, owner)) = self.hub.deadlines.pop_passed(now) {
            match owner {
                Owner::Endpoint(key) => self.expire(key, at, now),
                Owner::Linger(key) => self.hub.end_linger(key),
                Owner::NewPeer(key) => self.close_new_peer(key, now),
                Owner::SetupListener => _ = self.accept_local_peers(now),
                Owner::Datagram(key) => self.datagrams.expire_datagram(&mut self.hub, key, now),
                Owner::Setup(_) | Owner::Port(_) => {}
            }
        }
    }

    /// Handles the deadline of an endpoint. The process may not have run for some time: a client's part of the handshake may have arrived
    /// in time without being read. It is read before the client's connection ends.
    fn expire(&mut self, key: Key, due: Instant, now: Instant) {
        let Some(endpoint) = self.endpoints.get_mut(key) else { return };
        match &endpoint.state {
            EndpointState::Listening(_) => {
                endpoint.state = EndpointState::Listening(Accepting::Yes);
                self.handshakes.paused.retain(|&paused| paused != key);
                if !crate::planted("a-listener-without-descriptors-is-forgotten") {
                    self.accept_some(key, now);
                }
            }
            EndpointState::Requesting { .. } => self.expire_request(key, now),
            EndpointState::Offered(asked) => {
                let reply = startup::reject(asked, &[]);
                self.fail(key, Some(ConnectFailure::Timeout), Some(reply), now);
            }
            EndpointState::Resolving(_)
            | EndpointState::Resolved(_)
            | EndpointState::Connecting(..)
            | EndpointState::Replying(..) => {
                self.fail(key, Some(ConnectFailure::Timeout), None, now);
            }
            EndpointState::SettingUp(_) => self.expire_setup(key, now),
            EndpointState::Live if !endpoint.announced => {
                self.expire_unannounced(key, now.saturating_duration_since(due), now)
            }
            EndpointState::Live => {
                let acknowledged = endpoint.socket.is_none_or(|socket| self.hub.net.all_acknowledged(socket));
                if !endpoint.frame.is_empty() || !acknowledged {
                    self.hub.deadlines.set(Owner::Endpoint(key), now + self.hub.config.reply_grace.max(RETRY));
                } else if let Some(qp) = endpoint.qp.as_mut().filter(|qp| qp.is_held()) {
                    qp.release();
                    self.transmit(key);
                }
            }
            EndpointState::Queued(..) | EndpointState::Dead | EndpointState::Datagram(_) => {}
        }
    }

    /// Ends a connection whose client has not sent its first message in time, neither on the stream
    /// nor in shared memory. If its hello has arrived, but is only read now, the client has the
    /// same time again, because it could not continue without an answer. The same holds if the
    /// deadline, which was `late` ago, was handled late by half of the limit: the client may be in
    /// this process, which did not run.
    fn expire_unannounced(&mut self, key: Key, late: Duration, now: Instant) {
        let waits = self.awaits_hello(key);
        if waits {
            self.read_waiting_hellos(now);
        }
        if self.follow(key, now) {
            return;
        }
        if self.receive(key, now) {
            self.enqueue(key);
        }
        if let Some(CmEndpoint { state: EndpointState::Live, announced: false, .. }) = self.endpoints.get(key) {
            if waits && !self.awaits_hello(key) || late >= self.hub.config.ready_timeout / 2 {
                return self.hub.deadlines.set(Owner::Endpoint(key), now + self.hub.config.ready_timeout);
            }
            self.transition(key, EndpointState::Dead);
            self.fail(key, Some(ConnectFailure::Timeout), Some(Vec::new()), now);
        }
    }
}

/// Returns the cause for a connection that ended because the peer has closed the stream. `at_boundary` is true if the stream ended between
/// two messages.
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
            Ok((octets, drained)) => return ReceiveResult::Bytes(octets, drained),
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => return ReceiveResult::Nothing,
                _ => return ReceiveResult::Lost(error),
            },
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "sockets of the system are driven by its clock")]
mod tests;
