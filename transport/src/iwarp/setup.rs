//! The setup of shared memory for connections within the host. A connection with shared memory no longer uses its TCP stream. The messages
//! are in `crate::shm::greeting`.
//!
//! The active side decides where the connection continues:
//!
//! 1. The passive side names a Unix socket in its MPA reply: the offer. The active side sends a hello to this socket, with a new segment.
//! 2. The passive side accepts the segment.
//! 3. The active side writes the first record to the segment, and closes the TCP stream. From then on both sides use the segment.
//!
//! If anything fails before step 3, the active side sends its first message on the TCP stream. The passive side sends nothing until it has
//! received a message on the stream or a record in the segment. So both sides use the same one: the TCP stream or the segment.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::config::SharedMemoryPolicy;
use super::endpoint::{CmEndpoint, EndpointState};
use super::handshake::is_exhaustion;
use super::hub::Owner;
use super::net::{Net, NetChannel, SocketId};
use super::provider::Iwarp;
use super::queue_pair::Role;
use super::setup_listener::{NewPeer, SegmentSetup, SentSegment};
use super::startup::{Agreement, RequestTerms};
use crate::cm::{CmEventKind, ConnectFailure, DisconnectCause};
use crate::mem::{Memory, Sharing, Window};
use crate::shm::greeting::{HELLO_LEN, Hello, NAME_LEN, Offer, is_same_secret};
use crate::shm::link::Link;
use crate::shm::packet::{ACCEPTED_PACKET, CALL_PACKET, Packet};
use crate::shm::segment::{self, SegmentSide};
use crate::slab::Key;

/// The largest number of peers that are accepted from the Unix listener at a time.
const MAX_ACCEPTS: usize = 64;
/// The first bytes of the Unix listener's abstract name. Random digits follow.
const NAME: &[u8] = b"rdma-";

impl<N: Net> Iwarp<N> {
    /// Creates the offer of shared memory for a connection that the program is accepting. Returns `None` if shared memory cannot be used
    /// with the peer.
    pub(super) fn offer(&mut self, key: Key, path: Option<u32>, asked: &RequestTerms, now: Instant) -> Option<Offer> {
        let is_possible = self.hub.config.shared_memory != SharedMemoryPolicy::Off && asked.local && path.is_some();
        if !is_possible || !asked.is_direct(path) {
            return None;
        }
        let name = self.listener_name(now)?;
        let mut secret = [0; 16];
        (self.hub.entropy)(&mut secret);
        Some(Offer { name, secret, key, required: self.hub.requires_shared_memory() })
    }

    /// Returns true unless the setup of shared memory pauses ([`Iwarp::pause_setup`]). After a
    /// pause, the sockets may keep further ones open.
    fn meets_peers(&mut self, now: Instant) -> bool {
        match self.links.listener.shut_until {
            Some(until) if now < until => false,
            Some(_) => {
                self.links.listener.shut_until = None;
                self.hub.net.renew_local();
                true
            }
            None => true,
        }
    }

    /// Pauses the setup of shared memory, because too many sockets of other users must stay open.
    /// The Unix listener is closed, and connections whose peers may wait in its backlog go on
    /// without shared memory, or end. After the pause there is a new listener with another name.
    fn pause_setup(&mut self, why: &io::Error, now: Instant) {
        let pause = self.links.listener.shut(now).as_secs();
        local_log!(Warn, "{why}: for {pause} s, connections within the host stay on TCP, or fail if they must not");
        if let Some((listener, _)) = self.links.listener.open.take() {
            self.hub.close(listener, false);
        }
        for key in self.endpoints.keys() {
            if !self.awaits_hello(key) {
                continue;
            }
            if self.hub.requires_shared_memory() {
                let failure = ConnectFailure::Unreachable(format!("no shared memory with the peer: {why}"));
                self.fail(key, Some(failure), Some(Vec::new()), now);
            } else {
                self.end_setup(key, "the setup pauses", now);
            }
        }
    }

    /// Returns the abstract name of the Unix listener. Opens the listener if necessary. Returns `None` if the listener cannot be opened, or
    /// the setup pauses.
    fn listener_name(&mut self, now: Instant) -> Option<[u8; NAME_LEN]> {
        if !self.meets_peers(now) {
            return None;
        }
        if let Some((_, name)) = self.links.listener.open {
            return Some(name);
        }
        let mut name = [0; NAME_LEN];
        (self.hub.entropy)(&mut name[NAME.len()..]);
        for digit in &mut name[NAME.len()..] {
            *digit = b"0123456789abcdef"[usize::from(*digit % 16)];
        }
        name[..NAME.len()].copy_from_slice(NAME);
        match self.hub.net.listen_local(&name) {
            Ok(socket) => {
                self.hub.own(socket, Owner::SetupListener);
                self.links.listener.open = Some((socket, name));
                Some(name)
            }
            Err(error) => {
                log::debug!("cannot listen for peers within the host: {error}; connections stay on TCP");
                None
            }
        }
    }

    /// Accepts the peers that have connected to the Unix listener. Returns true if more may wait.
    pub(super) fn accept_local_peers(&mut self, now: Instant) -> bool {
        let Some((listener, _)) = self.links.listener.open else { return false };
        // After a lack of descriptors, a deadline is set for the next attempt.
        if self.hub.deadlines.of(Owner::SetupListener).is_some_and(|until| now < until) {
            return false;
        }
        self.hub.deadlines.clear(Owner::SetupListener);
        for _ in 0..MAX_ACCEPTS {
            match self.hub.net.accept_local(listener) {
                Ok(socket) => {
                    let deadline = now + self.hub.config.within_host.meeting_timeout;
                    let (key, oldest) = self.links.listener.add(socket);
                    self.hub.own(socket, Owner::NewPeer(key));
                    self.hub.deadlines.set(Owner::NewPeer(key), deadline);
                    if let Some((key, oldest)) = oldest {
                        self.hub.deadlines.clear(Owner::NewPeer(key));
                        self.hub.close(oldest.socket, false);
                    }
                    self.read_hello(key, now);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                // No descriptor is free for the peer. The peer stays in the backlog of the listener and causes no further edge, so a
                // deadline is set for the next attempt to accept the peer.
                Err(error) if is_exhaustion(&error) => {
                    log::debug!("cannot accept peers within the host for now: {error}");
                    let until = now + self.hub.config.accept_backoff;
                    self.hub.deadlines.set(Owner::SetupListener, until);
                    return false;
                }
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    self.pause_setup(&error, now);
                    return false;
                }
                // The peer belongs to another user, and its socket was closed. When the peer detects that its socket was closed, the peer
                // stays on TCP.
                Err(error) => log::debug!("cannot accept a peer within the host: {error}"),
            }
        }
        // More peers may wait in the backlog of the Unix listener, and they cause no further edge. So the Unix listener, represented by
        // [`Key::NONE`], stays in `handshakes.backlog`, and the channel is woken.
        self.hub.net.wake(NetChannel::Cm);
        self.handshakes.accept_later(Key::NONE);
        true
    }

    /// Returns true if a connection has an offer, and its peer has sent no hello.
    pub(super) fn awaits_hello(&self, key: Key) -> bool {
        let setup = self.endpoints.get(key).and_then(|endpoint| endpoint.setup.as_deref());
        matches!(setup, Some(SegmentSetup::Offered(_)))
    }

    /// Accepts the peers that have connected to the Unix listener, and reads their hellos, before a
    /// connection with an offer expires: if the process has not run for some time, its hello may
    /// have arrived without being read. A connection has at most one hello, so peers that send
    /// anything else cannot prolong this without end.
    pub(super) fn read_waiting_hellos(&mut self, now: Instant) {
        for key in self.links.listener.new_peers.keys() {
            self.read_hello(key, now);
        }
        for _ in 0..=self.sockets() / MAX_ACCEPTS {
            if !self.accept_local_peers(now) {
                break;
            }
        }
    }

    /// Reads the hello of an accepted peer. If the hello is valid, accepts the peer's segment.
    pub(super) fn read_hello(&mut self, key: Key, now: Instant) {
        let Some(&NewPeer { socket, .. }) = self.links.listener.new_peers.get(key) else { return };
        let mut room = [0; HELLO_LEN + 1];
        let heard = match self.hub.net.take(socket, &mut room) {
            Ok((len, file)) => Hello::parse(room.get(..len).unwrap_or_default()).zip(file),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(_) => None,
        };
        self.links.listener.new_peers.remove(key);
        self.hub.deadlines.clear(Owner::NewPeer(key));
        let result = heard.ok_or_else(|| "it sent no valid hello".to_owned()).and_then(|(hello, file)| {
            self.accept_segment(&hello, socket, file, now).map_err(|why| format!("connection {}: {why}", hello.key))
        });
        if let Err(why) = result {
            log::debug!("a peer of this host stays on TCP: {why}");
            self.hub.close(socket, false);
        }
    }

    /// Closes the socket of a peer that has not sent its hello in time. The process may not have run for some time: the hello may have
    /// arrived in time without being read, so it is read first.
    pub(super) fn close_new_peer(&mut self, key: Key, now: Instant) {
        self.read_hello(key, now);
        if let Some(peer) = self.links.listener.new_peers.remove(key) {
            self.hub.close(peer.socket, false);
        }
    }

    /// Checks the hello of a peer, maps the peer's segment, and accepts the segment.
    fn accept_segment(&mut self, hello: &Hello, socket: SocketId, file: OwnedFd, now: Instant) -> Result<(), String> {
        let Some(endpoint) = self.endpoints.get_mut(hello.key) else { return Err("it has ended".into()) };
        match endpoint.setup.as_deref() {
            Some(SegmentSetup::Offered(secret)) if is_same_secret(&hello.secret, secret) => {}
            _ => return Err("the secret is not that of its offer".into()),
        }
        let path = endpoint.socket.and_then(|stream| self.hub.net.local_path(stream));
        if path != Some(hello.path) && !crate::planted("a-proxy-is-not-noticed") {
            return Err("there is a proxy between it and this process".into());
        }
        let window = Window::map(&file, segment::LEN, Sharing::Write).map_err(|error| error.to_string())?;
        let memory = window.into_memory().map_err(|_| "its segment cannot be written")?;
        let segment = self.hub.net.segment(memory);
        self.hub.net.pass(socket, &ACCEPTED_PACKET, None).map_err(|error| error.to_string())?;
        self.hub.own(socket, Owner::Setup(hello.key));
        if let Some(endpoint) = self.endpoints.get_mut(hello.key) {
            endpoint.last_heard = Some(now);
            endpoint.setup = Some(Box::new(SegmentSetup::Accepted(socket, segment)));
        }
        Ok(())
    }

    /// Moves a connection to shared memory on the passive side, if the peer has written its first record to the segment, and returns true.
    /// Otherwise returns false.
    pub(super) fn follow(&mut self, key: Key, now: Instant) -> bool {
        let Some(endpoint) = self.endpoints.get_mut(key) else { return false };
        match endpoint.setup.as_deref() {
            Some(SegmentSetup::Accepted(_, segment)) if Link::has_begun(segment, SegmentSide::Passive) => {}
            _ => return false,
        }
        if let Some(SegmentSetup::Accepted(socket, segment)) = endpoint.setup.take().map(|setup| *setup) {
            self.enter_segment(key, socket, segment, SegmentSide::Passive, now);
            // If the Unix socket could not move to the completion channel, the connection has already failed.
            if self.endpoints.get(key).is_some_and(|endpoint| matches!(endpoint.state, EndpointState::Live)) {
                self.hub.deadlines.clear(Owner::Endpoint(key));
                self.announce(key);
            }
        }
        true
    }

    /// Returns true if the MPA request on this socket tells the peer that this side can use shared memory.
    pub(super) fn requests_offer(&self, socket: SocketId) -> bool {
        self.hub.config.shared_memory != SharedMemoryPolicy::Off && self.hub.net.local_path(socket).is_some()
    }

    /// Continues after an MPA reply that accepts the connection. If the reply contains an offer, sets up shared memory. Otherwise the
    /// connection stays on the stream. `data` is the private data of the reply.
    pub(super) fn accepted(&mut self, key: Key, peer: SocketAddr, agreement: Agreement, data: &[u8], now: Instant) {
        let socket = self.endpoints.get(key).and_then(|endpoint| endpoint.socket);
        let asked = socket.is_some_and(|socket| self.requests_offer(socket));
        let path = socket.and_then(|socket| self.hub.net.local_path(socket));
        let offer = if asked { Offer::split(data) } else { None };
        let private_data: Box<[u8]> = offer.as_ref().map_or(data, |(data, _)| *data).into();
        let required = self.hub.requires_shared_memory() || offer.as_ref().is_some_and(|(_, offer)| offer.required);
        let why = match offer {
            Some((_, offer)) => match self.send_hello(&offer, path.unwrap_or_default(), now) {
                Ok((socket, segment)) => {
                    self.transition(key, EndpointState::SettingUp(peer));
                    self.hub.own(socket, Owner::Setup(key));
                    if let Some(endpoint) = self.endpoints.get_mut(key) {
                        let until = self.hub.deadlines.of(Owner::Endpoint(key));
                        let sent = SentSegment { socket, segment, agreement, private_data, until, required };
                        endpoint.setup = Some(Box::new(SegmentSetup::Sent(Box::new(sent))));
                        // A connection that may not stay on TCP waits until the deadline of the attempt.
                        if !required {
                            let at_most = now + self.hub.config.within_host.meeting_timeout;
                            self.hub
                                .deadlines
                                .set(Owner::Endpoint(key), until.map_or(at_most, |until| until.min(at_most)));
                        }
                    }
                    return;
                }
                Err(error) => error.to_string(),
            },
            None if asked => "the peer offers none".into(),
            None => "the peer is not on this host".into(),
        };
        if required {
            return self.fail_without_segment(key, peer, &why, now);
        }
        self.stay_on_stream(key, peer, &agreement, private_data, &why, now);
    }

    /// Connects to the Unix socket of an offer, and sends a hello with a new segment. Returns the socket and the segment.
    fn send_hello(&mut self, offer: &Offer, path: u32, now: Instant) -> io::Result<(SocketId, N::Segment)> {
        if !self.meets_peers(now) {
            return Err(io::Error::other("the setup pauses, because other users have disturbed it"));
        }
        let mut memory = Memory::new_shared(segment::LEN, Sharing::Write)?;
        let file = memory.take_file();
        let socket = self.hub.net.connect_local(&offer.name).inspect_err(|error| {
            if error.kind() == io::ErrorKind::ResourceBusy {
                self.pause_setup(error, now);
            }
        })?;
        let hello = Hello { secret: offer.secret, key: offer.key, path };
        match self.hub.net.pass(socket, &hello.emit(), file.as_ref().map(std::os::fd::AsFd::as_fd)) {
            Ok(()) => Ok((socket, self.hub.net.segment(memory))),
            Err(error) => {
                self.hub.net.close(socket, false);
                Err(error)
            }
        }
    }

    /// Continues the setup of a connection after an edge on its Unix socket.
    pub(super) fn continue_setup(&mut self, key: Key, now: Instant) {
        if self.follow(key, now) {
            return;
        }
        let Some(CmEndpoint { setup: Some(setup), .. }) = self.endpoints.get_mut(key) else { return };
        let Some(socket) = setup.socket() else { return };
        let mut room = [0; 8];
        let why = match self.hub.net.take(socket, &mut room) {
            Ok((0, _)) => "the peer has refused".to_owned(),
            Ok((len, _)) => {
                let accepted = Packet::parse(room.get(..len).unwrap_or_default()) == Packet::Accepted;
                if accepted && matches!(**setup, SegmentSetup::Sent(_)) {
                    self.leave_stream(key, now);
                }
                return;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => error.to_string(),
        };
        self.end_setup(key, &why, now);
    }

    /// Moves a connection to shared memory on the active side, after the peer has accepted the segment.
    fn leave_stream(&mut self, key: Key, now: Instant) {
        let Some(endpoint) = self.endpoints.get_mut(key) else { return };
        let Some(SegmentSetup::Sent(sent)) = endpoint.setup.take().map(|setup| *setup) else { return };
        let SentSegment { socket, segment, agreement, private_data, .. } = *sent;
        endpoint.announced = true;
        if let Some(qp) = endpoint.qp.as_mut() {
            qp.read_depth = agreement.read_depth();
        }
        self.transition(key, EndpointState::Live);
        self.hub.deadlines.clear(Owner::Endpoint(key));
        self.hub.raise(key, CmEventKind::Established { private_data, read_depth: agreement.read_depth() });
        self.enter_segment(key, socket, segment, SegmentSide::Active, now);
    }

    /// Ends the setup on the active side if the peer has closed the TCP stream: it does not answer
    /// the hello any more.
    pub(super) fn check_setup(&mut self, key: Key, now: Instant) {
        if self.endpoints.get(key).is_some_and(|endpoint| endpoint.closed) {
            self.end_setup(key, "the peer has ended the connection", now);
        }
    }

    /// Handles the deadline of a setup on the active side. If the deadline of the connection attempt has passed, fails the attempt.
    /// Otherwise only the setup ends, unless the peer's answer has arrived without being read.
    pub(super) fn expire_setup(&mut self, key: Key, now: Instant) {
        let setup = self.endpoints.get(key).and_then(|endpoint| endpoint.setup.as_deref());
        if matches!(setup, Some(SegmentSetup::Sent(sent)) if sent.until.is_some_and(|until| until <= now)) {
            return self.fail(key, Some(ConnectFailure::Timeout), Some(Vec::new()), now);
        }
        self.continue_setup(key, now);
        if self.endpoints.get(key).is_some_and(|endpoint| matches!(endpoint.state, EndpointState::SettingUp(_))) {
            self.end_setup(key, "no answer in time", now);
        }
    }

    /// Ends the setup of shared memory, for the reason `why`. The connection stays on the TCP stream. If shared memory is required, the
    /// connection fails instead.
    pub(super) fn end_setup(&mut self, key: Key, why: &str, now: Instant) {
        let Some(endpoint) = self.endpoints.get_mut(key) else { return };
        let Some(setup) = endpoint.setup.take() else { return };
        if let Some(socket) = setup.socket() {
            self.hub.close(socket, false);
        }
        match (*setup, self.endpoints.get(key).map(|endpoint| &endpoint.state)) {
            (SegmentSetup::Sent(sent), Some(&EndpointState::SettingUp(peer))) if sent.required => {
                self.fail_without_segment(key, peer, why, now);
            }
            (SegmentSetup::Sent(sent), Some(&EndpointState::SettingUp(peer))) => {
                self.stay_on_stream(key, peer, &sent.agreement, sent.private_data, why, now);
            }
            _ if self.hub.requires_shared_memory() => self.refuse_stream(key, now),
            _ => log::debug!("connection {key} stays on TCP: {why}"),
        }
    }

    /// Fails a connection attempt that may not stay on TCP, because shared memory cannot be used, for the reason `why`.
    fn fail_without_segment(&mut self, key: Key, peer: SocketAddr, why: &str, now: Instant) {
        let failure = if self.hub.requires_shared_memory() {
            ConnectFailure::Unreachable(format!("no shared memory with {peer}: {why}"))
        } else {
            ConnectFailure::SharedMemoryOnly(why.into())
        };
        self.fail(key, Some(failure), Some(Vec::new()), now);
    }

    /// Ends an accepted connection whose peer continues on TCP although shared memory is required. The program is not notified of the
    /// connection, and no byte of its stream is processed.
    pub(super) fn refuse_stream(&mut self, key: Key, now: Instant) {
        let cause = "it continues on TCP although shared memory is required";
        self.end(key, DisconnectCause::PeerViolation(cause.into()), None, now);
    }

    /// Starts the TCP stream on the active side, because shared memory cannot be used, for the reason `why`.
    fn stay_on_stream(
        &mut self,
        key: Key,
        peer: SocketAddr,
        agreement: &Agreement,
        private_data: Box<[u8]>,
        why: &str,
        now: Instant,
    ) {
        if self.hub.config.shared_memory != SharedMemoryPolicy::Off {
            log::debug!("{peer}: over TCP, not in shared memory: {why}");
        }
        let Some(socket) = self.endpoints.get(key).and_then(|endpoint| endpoint.socket) else { return };
        self.transition(key, EndpointState::Live);
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.announced = true;
        }
        self.hub.deadlines.clear(Owner::Endpoint(key));
        self.hub.raise(key, CmEventKind::Established { private_data, read_depth: agreement.read_depth() });
        self.begin(key, socket, Role::Initiator, agreement, now);
    }

    /// Moves a live connection to shared memory, and closes its TCP stream. `socket` is the connection's Unix socket.
    fn enter_segment(&mut self, key: Key, socket: SocketId, segment: N::Segment, side: SegmentSide, now: Instant) {
        let Some(endpoint) = self.endpoints.get_mut(key) else { return };
        let Some(qp) = endpoint.qp.take() else { return };
        let mut link = Link::new(segment, side, qp.read_depth, qp.leave(), &self.links.account);
        if side == SegmentSide::Active {
            link.begin();
        }
        endpoint.link = Some(Box::new(link));
        endpoint.last_heard = Some(now);
        (endpoint.frame, endpoint.frame_sent) = (Vec::new(), 0);
        // Packets may have arrived on the Unix socket before the socket moved to the completion channel. So the socket is marked as
        // readable.
        (endpoint.readable, endpoint.closed) = (true, false);
        let stream = endpoint.socket.replace(socket);
        self.links.count += 1;
        self.hub.own(socket, Owner::Endpoint(key));
        let promoted = self.hub.net.promote(socket);
        self.pump(key);
        // The passive side looks for the first record when a packet arrives on the Unix socket or when the TCP stream ends. So the active
        // side sends a packet.
        if side == SegmentSide::Active {
            let _ = self.hub.net.pass(socket, &CALL_PACKET, None);
        }
        if let Some(stream) = stream {
            self.hub.close(stream, false);
        }
        log::debug!("connection {key} is in shared memory");
        if let Err(error) = promoted {
            return self.end(key, super::endpoint::lost(&error), None, now);
        }
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            self.hub.enqueue(key, &mut endpoint.queued);
        }
        self.hub.net.wake(NetChannel::Completion);
    }
}

#[cfg(test)]
mod tests;
