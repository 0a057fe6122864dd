//! The connection-manager channel: accepts and opens TCP connections, and exchanges the MPA startup frames.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use super::endpoint::{Accepting, Attempt, CmEndpoint, EndpointState, connect_failure};
use super::hub::Owner;
use super::net::{Net, NetChannel, SocketId};
use super::provider::Iwarp;
use super::queue_pair::Role;
use super::startup::{self, Agreement, FrameReader, Judgement, Verdict};
use super::stream::Stream;
use super::wire::StartupKind;
use crate::cm::{CmEvent, CmEventKind, CmId, ConnectFailure};
use crate::error::{Result, TransportError};
use crate::log_limit::NOBODY;
use crate::mem::RecvSlice;
use crate::newcomers::Host;
use crate::provider::DeviceId;
use crate::slab::Key;

/// `ACCEPTS` is the largest number of connections that are accepted from one listener at a time. `ROUNDS` is the largest number of times
/// that one call of `next_event` reads edges.
const ACCEPTS: usize = 64;
const ROUNDS: usize = 16;

impl<N: Net> Iwarp<N> {
    /// Returns the next event of the CM channel. If no event is queued, first reads and handles edges. Returns `None` if there is still no
    /// event.
    pub(super) fn next_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        for _ in 0..ROUNDS {
            if let Some(event) = self.pop_event() {
                return Ok(Some(event));
            }
            self.timers(now);
            let mut more = self.collect(NetChannel::Cm, now).map_err(|source| TransportError::io("poll", source))?;
            for _ in 0..self.handshakes.backlog.len() {
                match self.handshakes.backlog.pop_front() {
                    Some(Key::NONE) => _ = self.accept_local_peers(now),
                    Some(key) => self.accept_some(key, now),
                    None => {}
                }
            }
            more |= !self.handshakes.backlog.is_empty();
            if self.hub.events.is_empty() {
                // Edges are read before each start of a connection. So connections that have started do not wait for all others to start,
                // and the queue has the requests of all hosts, and none that was taken back.
                if let Some(start) = self.next_start(now) {
                    return Ok(Some(start));
                }
                if !more {
                    return Ok(None);
                }
            }
        }
        // Edges may remain unread. Wake the channel, so that the caller calls this function again.
        self.hub.net.wake(NetChannel::Cm);
        Ok(self.pop_event().or_else(|| self.next_start(now)))
    }

    /// Returns the next event. Drops the events of ids that were destroyed after the event.
    fn pop_event(&mut self) -> Option<CmEvent> {
        loop {
            let event = self.hub.events.pop_front()?;
            if self.endpoints.get(event.id.0).is_some() {
                return Some(event);
            }
        }
    }

    /// Takes the next event from the queue of connections that wait to start. The time that the program has for its decision about a
    /// connect request starts here: a program that is slow to take requests refuses nobody.
    fn next_start(&mut self, now: Instant) -> Option<CmEvent> {
        let event = self.hub.starts.pop()?;
        let CmId(key) = event.id;
        match self.endpoints.get(key).map(|endpoint| &endpoint.state) {
            Some(&EndpointState::Queued(asked, _)) => {
                self.transition(key, EndpointState::Offered(asked));
                self.hub.deadlines.set(Owner::Endpoint(key), now + self.hub.config.accept_timeout);
            }
            Some(&EndpointState::Resolving(peer)) => _ = self.transition(key, EndpointState::Resolved(peer)),
            _ => {}
        }
        Some(event)
    }

    /// Removes the event of a connection that waits to start. `state` is the state in which the connection waited.
    fn drop_start(&mut self, key: Key, state: Option<&EndpointState>) {
        match state {
            Some(EndpointState::Queued(_, host)) => self.hub.starts.remove(*host, CmId(key)),
            Some(EndpointState::Resolving(peer)) => self.hub.starts.remove(Host::of(peer.ip()), CmId(key)),
            _ => {}
        }
    }

    /// Removes a connection that its peer has reset, if the program was not notified of the connection. Returns true if the connection was
    /// removed. The request of such a connection may still be readable, but an answer would reach nobody.
    pub(super) fn drop_if_reset(&mut self, key: Key) -> bool {
        let Some(CmEndpoint { state, socket: Some(socket), .. }) = self.endpoints.get(key) else { return false };
        let is_reset = state.is_unknown() && self.hub.net.connected(*socket).is_err();
        if is_reset {
            self.drop_socket(key);
        }
        is_reset
    }

    /// Accepts connections from a listener, until no connection waits or a limit is reached.
    pub(super) fn accept_some(&mut self, key: Key, now: Instant) {
        let Some(CmEndpoint { state: EndpointState::Listening(Accepting::Yes), socket: Some(socket), .. }) =
            self.endpoints.get(key)
        else {
            return;
        };
        let listener = *socket;
        for _ in 0..ACCEPTS {
            if let Err(until) = self.make_room(now) {
                log::debug!("{} handshakes are not finished: new connections wait", self.handshakes.unfinished);
                self.handshakes.paused.push(key);
                return self.pause(key, Accepting::WhenThereIsRoom, until);
            }
            match self.hub.net.accept(listener) {
                Ok((socket, peer)) if !self.hub.config.admits(peer.ip()) => {
                    log::debug!("{peer}: reset: it is in none of the allowed networks");
                    self.hub.net.close(socket, true);
                }
                Ok((socket, peer)) => self.requested(CmId(key), socket, peer, now),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    // The system lacks descriptors or memory. A half-open connection was evicted, which frees a descriptor and memory. So
                    // accept is tried again.
                    _ if is_exhaustion(&error) && self.evict(None, now).is_ok() => {}
                    _ => {
                        let (after, limit) = (self.hub.config.accept_backoff, &mut self.handshakes.log_limit);
                        peer_log!(
                            limit,
                            now,
                            NotAccepting,
                            Warn,
                            NOBODY,
                            "cannot accept a connection: {error}; trying again in {after:?}"
                        );
                        return self.pause(key, Accepting::Later, Some(now + after));
                    }
                },
            }
        }
        self.handshakes.accept_later(key);
        if !self.hub.within_cm {
            self.hub.net.wake(NetChannel::Cm);
        }
    }

    /// Sets the state of a listener. `until` is the latest time at which a pause ends. With `None`, only another event ends the pause.
    fn pause(&mut self, key: Key, accepting: Accepting, until: Option<Instant>) {
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.state = EndpointState::Listening(accepting);
        }
        match until {
            Some(until) => self.hub.deadlines.set(Owner::Endpoint(key), until),
            None => self.hub.deadlines.clear(Owner::Endpoint(key)),
        }
    }

    /// Resumes the listeners that are paused because the limit of handshakes was reached.
    pub(super) fn resume(&mut self) {
        if self.handshakes.paused.is_empty() {
            return;
        }
        for key in std::mem::take(&mut self.handshakes.paused) {
            self.pause(key, Accepting::Yes, None);
            self.handshakes.accept_later(key);
        }
        self.hub.net.wake(NetChannel::Cm);
    }

    /// Evicts the oldest half-open connections until one more handshake is within the limits. If too few connections can be evicted now,
    /// returns an error. The error contains the time at which the next eviction will be allowed, or `None` if there is no half-open
    /// connection.
    fn make_room(&mut self, now: Instant) -> std::result::Result<(), Option<Instant>> {
        while let Some(host) = self.handshakes.crowd {
            if self.handshakes.half_open.count_of(host) <= self.hub.config.handshakes_per_peer() {
                self.handshakes.crowd = None;
            } else {
                self.evict(Some(host), now)?;
            }
        }
        while self.handshakes.unfinished >= self.hub.config.max_handshakes {
            self.evict(None, now)?;
        }
        Ok(())
    }

    /// Evicts the oldest half-open connection of a host, or of all hosts. A connection may only be evicted after its `request_grace`. If
    /// none can be evicted now, returns an error. The error contains the time at which the eviction will be allowed, or `None` if there is
    /// no half-open connection.
    fn evict(&mut self, host: Option<Host>, now: Instant) -> std::result::Result<(), Option<Instant>> {
        let oldest = self.handshakes.half_open.oldest(host).ok_or(None)?;
        let due = oldest.since + self.hub.config.request_grace;
        if due > now {
            return Err(Some(due));
        }
        log::debug!("a connection without an MPA request gives way to a new one");
        if let Some(socket) = self.remove(oldest.id) {
            self.hub.close(socket, true);
        }
        Ok(())
    }

    /// Starts the handshake with a peer whose TCP connection was accepted.
    fn requested(&mut self, listener: CmId, socket: SocketId, peer: SocketAddr, now: Instant) {
        let key = self.endpoints.insert(CmEndpoint::new(EndpointState::Dead, Some(socket)));
        let reader = Box::new(FrameReader::new(StartupKind::Request));
        let host = Host::of(peer.ip());
        let ticket = self.handshakes.half_open.add(key, host, now);
        self.transition(key, EndpointState::Requesting { reader, listener, peer, ticket });
        self.hub.own(socket, Owner::Endpoint(key));
        self.hub.deadlines.set(Owner::Endpoint(key), now + self.hub.config.request_timeout);
        self.read_request(key, now);
        if self.handshakes.half_open.count_of(host) > self.hub.config.handshakes_per_peer() {
            self.handshakes.crowd = Some(host);
        }
    }

    /// Continues a handshake after an edge on its TCP socket.
    pub(super) fn advance(&mut self, key: Key, now: Instant) {
        match self.endpoints.get(key).map(|endpoint| &endpoint.state) {
            Some(EndpointState::Requesting { .. }) => self.read_request(key, now),
            Some(EndpointState::Connecting(..)) => self.finish_connect(key, now),
            Some(EndpointState::Replying(..)) => self.read_reply(key, now),
            Some(EndpointState::SettingUp(_)) => self.check_setup(key, now),
            _ => {}
        }
    }

    fn read_request(&mut self, key: Key, now: Instant) {
        let Some(CmEndpoint {
            state: EndpointState::Requesting { reader, listener, peer, .. },
            socket: Some(socket),
            ..
        }) = self.endpoints.get_mut(key)
        else {
            return;
        };
        let (socket, listener, peer) = (*socket, *listener, *peer);
        let header = match read_frame(&mut self.hub.net, socket, reader) {
            Ok(Some(header)) => header,
            Ok(None) => return,
            Err(failure) => {
                log::debug!("{peer}: no handshake: {failure}");
                return self.drop_socket(key);
            }
        };
        let (enhanced, private_data) = reader.body();
        let (private_data, path) = startup::split_path(&header, private_data);
        match startup::judge_request(&header, enhanced, self.hub.config.markers) {
            Judgement::Acceptable(mut asked) => {
                asked.path = path;
                let private_data = private_data.into();
                let read_depth = asked.read_depth(self.hub.config.read_depth);
                if self.endpoints.get(listener.0).is_none() {
                    let reply = startup::reject(&asked, &[]);
                    if let Some(socket) = self.remove(key) {
                        self.hub.linger(socket, reply, now);
                    }
                    return;
                }
                self.hub.deadlines.clear(Owner::Endpoint(key));
                let (host, device) = (Host::of(peer.ip()), DeviceId(0));
                self.transition(key, EndpointState::Queued(asked, host));
                let kind = CmEventKind::ConnectRequest { listener, device, peer, private_data, read_depth };
                self.hub.enqueue_start(host, key, kind);
            }
            Judgement::Refused(why, asked) => {
                peer_log!(self.handshakes.log_limit, now, Refused, Warn, peer, "{peer}: rejected: {why}");
                let reply = startup::reject(&asked, &[]);
                if let Some(socket) = self.remove(key) {
                    self.hub.linger(socket, reply, now);
                }
            }
            Judgement::Unknown(why) => {
                log::debug!("{peer}: not answered: {why}");
                self.drop_socket(key);
            }
        }
    }

    /// Resets a connection whose client has not sent its request in time.
    pub(super) fn expire_request(&mut self, key: Key, now: Instant) {
        self.read_request(key, now);
        if let Some(CmEndpoint { state: EndpointState::Requesting { peer, .. }, .. }) = self.endpoints.get(key) {
            log::debug!("{peer}: sent no MPA request in time");
            if let Some(socket) = self.remove(key) {
                self.hub.close(socket, true);
            }
        }
    }

    /// Removes an endpoint of which the program was not notified, and closes its socket.
    fn drop_socket(&mut self, key: Key) {
        if let Some(socket) = self.remove(key) {
            self.hub.close(socket, false);
        }
    }

    /// Removes an endpoint and its queue pair. Returns its socket, which the caller must close or let linger.
    pub(super) fn remove(&mut self, key: Key) -> Option<SocketId> {
        match self.transition(key, EndpointState::Dead) {
            Some(EndpointState::Datagram(id)) => self.datagrams.remove(&mut self.hub, id),
            state => self.drop_start(key, state.as_ref()),
        }
        self.hub.deadlines.clear(Owner::Endpoint(key));
        let endpoint = self.endpoints.remove(key)?;
        if let Some(mut qp) = endpoint.qp {
            qp.release_queues(&mut self.hub.resources);
        }
        if let Some(mut link) = endpoint.link {
            link.release_queues(&mut self.hub.resources);
            drop(link);
            if self.links.account.unmaps() {
                // Further windows of the link may wait for the next turn.
                self.hub.net.wake(NetChannel::Completion);
            }
        }
        endpoint.socket
    }

    /// Opens the TCP connection of a connection attempt.
    pub(super) fn open(&mut self, key: Key, attempt: Box<Attempt>, peer: SocketAddr) {
        match self.hub.net.connect(peer) {
            Ok(socket) => {
                self.hub.own(socket, Owner::Endpoint(key));
                self.transition(key, EndpointState::Connecting(attempt, peer));
                if let Some(endpoint) = self.endpoints.get_mut(key) {
                    endpoint.socket = Some(socket);
                }
            }
            Err(error) => self.fail_now(key, attempt.failure(&error)),
        }
    }

    /// Fails a connection attempt that has no socket yet.
    fn fail_now(&mut self, key: Key, failure: ConnectFailure) {
        self.transition(key, EndpointState::Dead);
        self.hub.deadlines.clear(Owner::Endpoint(key));
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            if let Some(qp) = &mut endpoint.qp {
                qp.end(None, &mut self.hub.resources.cqs);
            }
        }
        self.hub.raise(key, CmEventKind::ConnectFailed(failure));
    }

    /// Ends a handshake. If `failure` is given, raises an event that reports it. If `rest` is given, sends these bytes to the peer before
    /// the socket is closed.
    pub(super) fn fail(&mut self, key: Key, failure: Option<ConnectFailure>, rest: Option<Vec<u8>>, now: Instant) {
        let state = self.transition(key, EndpointState::Dead);
        self.drop_start(key, state.as_ref());
        let Some(endpoint) = self.endpoints.get_mut(key) else { return };
        self.hub.deadlines.clear(Owner::Endpoint(key));
        let socket = endpoint.socket.take();
        if let Some(qp) = &mut endpoint.qp {
            qp.end(None, &mut self.hub.resources.cqs);
        }
        match (socket, rest) {
            (Some(socket), Some(rest)) => self.hub.linger(socket, rest, now),
            (Some(socket), None) => self.hub.close(socket, false),
            (None, _) => {}
        }
        if let Some(failure) = failure {
            self.hub.raise(key, CmEventKind::ConnectFailed(failure));
        }
    }

    /// Sends the MPA request once TCP has connected, or fails the attempt.
    fn finish_connect(&mut self, key: Key, now: Instant) {
        let Some(CmEndpoint { state: EndpointState::Connecting(attempt, _), socket: Some(socket), .. }) =
            self.endpoints.get(key)
        else {
            return;
        };
        match self.hub.net.connected(*socket) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                let failure = attempt.failure(&error);
                return self.fail(key, Some(failure), None, now);
            }
        }
        // A peer that cannot know the path gets a CRC: there may be a proxy in front of it.
        let path = self.hub.net.local_path(*socket).filter(|_| attempt.shows_path);
        let (asks, crc) = (self.requests_offer(*socket), self.hub.config.crc.is_requested(path.is_some()));
        let Some(EndpointState::Connecting(mut attempt, peer)) = self.transition(key, EndpointState::Dead) else {
            return;
        };
        (attempt.terms.local, attempt.terms.crc, attempt.terms.path) = (asks, crc, path);
        let frame = startup::request(&attempt.terms, &attempt.private_data);
        self.transition(key, EndpointState::Replying(attempt, peer));
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.frame = frame;
            endpoint.frame_sent = 0;
        }
        self.read_reply(key, now);
    }

    fn read_reply(&mut self, key: Key, now: Instant) {
        let Some(endpoint) = self.endpoints.get_mut(key) else { return };
        let sent = endpoint.send_frame(&mut self.hub.net);
        let (EndpointState::Replying(attempt, peer), Some(socket)) = (&mut endpoint.state, endpoint.socket) else {
            return;
        };
        let peer = *peer;
        let header = match read_frame(&mut self.hub.net, socket, &mut attempt.reader) {
            Ok(Some(header)) => header,
            Ok(None) => {
                // If sending the request had failed, no reply will arrive. The failure is reported only after all received bytes were read,
                // because these bytes may show a more precise cause.
                if let Err(error) = sent {
                    let failure = attempt.failure(&error);
                    self.fail(key, Some(failure), None, now);
                }
                return;
            }
            Err(ConnectFailure::PeerClosed)
                if self.hub.config.retry_v1 && attempt.terms.revision > 1 && attempt.reader.is_untouched() =>
            {
                return self.retry(key, socket, peer);
            }
            Err(failure) => return self.fail(key, Some(failure), None, now),
        };
        let (enhanced, private_data) = attempt.reader.body();
        let private_data: Box<[u8]> = private_data.into();
        match startup::judge_reply(&attempt.terms, &header, enhanced) {
            Verdict::Accepted(agreement) => self.accepted(key, peer, agreement, &private_data, now),
            Verdict::Rejected => {
                self.fail(key, None, Some(Vec::new()), now);
                self.hub.raise(key, CmEventKind::Rejected { private_data });
            }
            Verdict::Failed(why, terminate) => {
                let rest = match terminate {
                    Some((cause, crc)) => Stream::new(crc, header.markers).end(Some((cause, None))),
                    None => Vec::new(),
                };
                self.fail(key, Some(ConnectFailure::Protocol(why.into())), Some(rest), now);
            }
        }
    }

    /// Tries again with MPA revision 1 over a new TCP connection, because some peers close a connection that requests revision 2.
    fn retry(&mut self, key: Key, socket: SocketId, peer: SocketAddr) {
        log::debug!("{peer}: no answer to MPA revision 2, trying revision 1");
        self.hub.close(socket, false);
        let Some(EndpointState::Replying(mut attempt, peer)) = self.transition(key, EndpointState::Dead) else {
            return;
        };
        attempt.terms.revision = 1;
        attempt.reader = FrameReader::new(StartupKind::Reply);
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.socket = None;
            endpoint.frame = Vec::new();
            endpoint.frame_sent = 0;
        }
        self.open(key, attempt, peer);
    }

    /// Starts the stream of a connection whose handshake is complete. Moves the socket of the connection to the completion channel.
    pub(super) fn begin(&mut self, key: Key, socket: SocketId, role: Role, agreement: &Agreement, now: Instant) {
        if let Err(error) = self.hub.net.promote(socket) {
            return self.end(key, super::endpoint::lost(&error), None, now);
        }
        let max_segment = self.hub.net.max_segment(socket).unwrap_or(536);
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.last_heard = Some(now);
            if let Some(qp) = endpoint.qp.as_mut() {
                qp.establish(role, agreement, max_segment);
            }
        }
        if role == Role::Responder {
            // An initiator that has agreed to send a first message gets `ready_timeout` to send it. Any other initiator gets `reply_grace`
            // to read the reply, before this side sends FPDUs.
            let wait = if agreement.rtr.is_some() {
                self.hub.config.ready_timeout
            } else {
                self.announce(key);
                self.hub.config.reply_grace
            };
            self.hub.deadlines.set(Owner::Endpoint(key), now + wait);
        }
        self.transmit(key);
    }
}

/// Returns true if `accept`(2) failed because the system has no descriptor or no memory left.
pub(super) fn is_exhaustion(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// Reads the available bytes of a startup frame. Returns the header once the frame is complete, and `None` while bytes are missing.
fn read_frame(
    net: &mut impl Net,
    socket: SocketId,
    reader: &mut FrameReader,
) -> std::result::Result<Option<super::wire::StartupHeader>, ConnectFailure> {
    loop {
        match net.recv(socket, &mut [RecvSlice::new(reader.space())]) {
            Ok(0) => return Err(ConnectFailure::PeerClosed),
            Ok(n) => match reader.filled(n) {
                Ok(None) => {}
                Ok(header) => return Ok(header),
                Err(error) => return Err(ConnectFailure::Protocol(error.to_string())),
            },
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(connect_failure(&error)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests;
