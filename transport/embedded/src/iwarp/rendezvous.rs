//! The setup of shared memory for connections within the host. A connection with shared memory no
//! longer uses its TCP stream. The messages are in `crate::shm::greeting`.
//!
//! The active side decides where the connection continues:
//!
//! 1. The passive side names a Unix socket in its MPA reply: the offer. The active side sends a
//!    hello to this socket, with a new segment.
//! 2. The passive side accepts the segment.
//! 3. The active side writes the first record to the segment, and closes the TCP stream. From then
//!    on both sides use the segment.
//!
//! If anything fails before step 3, the active side sends its first message on the TCP stream. The
//! passive side sends nothing until it has received a message on the stream or a record in the
//! segment. So both sides always choose the same path: the TCP stream or the segment.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::causes::is_exhaustion;
use super::config::SharedMemoryPolicy;
use super::endpoint::CmEndpoint;
use super::endpoints::Endpoints;
use super::flow::Offered;
use super::hub::{Hub, Owner};
use super::net::{Net, NetChannel, SocketId};
use super::startup::RequestTerms;
use crate::shm::greeting::{HELLO_LEN, Hello, NAME_LEN, Offer, is_same_secret};
use crate::shm::packet::ACCEPTED_PACKET;
use crate::shm::segment;
use rdma_transport::cm::ConnectFailure;
use rdma_transport::mem::{Memory, Sharing, Window};
use rdma_transport::slab::{Key, Slab};

/// The largest number of peers that one call of `accept_peers` accepts from the Unix listener.
const MAX_ACCEPTS: usize = 64;
/// The first bytes of the Unix listener's abstract name. Random digits follow.
const NAME: &[u8] = b"rdma-";
/// The largest number of accepted peers that have sent no hello. At the limit, a new peer replaces
/// the oldest one.
const MAX_NEW_PEERS: usize = 64;
/// The length of the first pause of the setup of shared memory. Each later pause is twice as long,
/// up to `LONGEST_PAUSE`: after each pause, other users can make the process keep further sockets
/// open until it ends, and longer pauses slow this down.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(24 * 60 * 60);

/// The Unix listener to which the peers with an offer connect, and the connected peers that have
/// sent no hello.
#[derive(Debug, Default)]
pub(super) struct Rendezvous {
    pub(super) open: Option<(SocketId, [u8; NAME_LEN])>,
    /// The end of the pause during which shared memory is not set up, because too many sockets of
    /// other users must stay open. Connections stay on TCP meanwhile.
    pub(super) shut_until: Option<Instant>,
    /// The length of the last pause.
    pause: Duration,
    /// The sockets of peers that have connected to the Unix listener and have sent no hello.
    new_peers: Slab<SocketId>, // bound: local-newcomers
    by_age: VecDeque<Key>, // bound: local-newcomers
}

impl Rendezvous {
    /// Creates the offer of shared memory for a connection that the program is accepting. Returns
    /// `None` if shared memory cannot be used with the peer.
    pub(super) fn offer<N: Net>(
        &mut self,
        hub: &mut Hub<N>,
        key: Key,
        path: Option<u32>,
        requested: &RequestTerms,
        now: Instant,
    ) -> Option<Offer> {
        let is_possible = hub.config.shared_memory != SharedMemoryPolicy::Off && requested.local && path.is_some();
        if !is_possible || !requested.is_direct(path) {
            return None;
        }
        let name = self.listener_name(hub, now)?;
        let mut secret = [0; 16];
        (hub.entropy)(&mut secret);
        Some(Offer { name, secret, key, required: hub.requires_shared_memory() })
    }

    /// Returns false during a pause of the setup of shared memory ([`Rendezvous::pause`]). After a
    /// pause, permits Unix connections again (`LocalSockets::renew_local`), and returns true.
    fn meets_peers<N: Net>(&mut self, hub: &mut Hub<N>, now: Instant) -> bool {
        match self.shut_until {
            Some(until) if now < until => false,
            Some(_) => {
                self.shut_until = None;
                hub.net.renew_local();
                true
            }
            None => true,
        }
    }

    /// Pauses the setup of shared memory, because too many sockets of other users must stay open.
    /// Closes the Unix listener. Connections that wait for a hello continue on TCP, or fail if they
    /// may not. After the pause, a new listener with another name is opened.
    fn pause<N: Net>(&mut self, endpoints: &mut Endpoints<N>, hub: &mut Hub<N>, why: &io::Error, now: Instant) {
        self.pause = (2 * self.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.shut_until = Some(now + self.pause);
        let pause = self.pause.as_secs();
        local_log!(Warn, "{why}: for {pause} s, connections within the host stay on TCP, or fail if they must not");
        if let Some((listener, _)) = self.open.take() {
            hub.close(listener, false);
        }
        for key in endpoints.keys() {
            let Some(CmEndpoint::Stream(flow)) = endpoints.get_mut(key) else { continue };
            if flow.awaits_hello() && flow.stay(hub, "the setup pauses").is_some() {
                let failure = ConnectFailure::Unreachable(format!("no shared memory with the peer: {why}"));
                endpoints.fail(hub, key, Some(failure), Some((Vec::new(), now)));
            }
        }
    }

    /// Returns the reason why no offer can be made to the peer of a request, and true if the reason
    /// is temporary.
    pub(super) fn reason(&self, path: Option<u32>, requested: &RequestTerms) -> (&'static str, bool) {
        match path {
            None => ("the peer is on another host", false),
            Some(_) if !requested.local => ("the peer uses no shared memory", false),
            Some(_) if !requested.is_direct(path) => ("there is a proxy between the peer and this process", false),
            Some(_) if self.shut_until.is_some() => ("other users have disturbed its setup", true),
            Some(_) => ("there is no listener for it", true),
        }
    }

    /// Returns the abstract name of the Unix listener. Opens the listener if necessary. Returns
    /// `None` if the listener cannot be opened, or the setup pauses.
    fn listener_name<N: Net>(&mut self, hub: &mut Hub<N>, now: Instant) -> Option<[u8; NAME_LEN]> {
        if !self.meets_peers(hub, now) {
            return None;
        }
        if let Some((_, name)) = self.open {
            return Some(name);
        }
        let mut name = [0; NAME_LEN];
        (hub.entropy)(&mut name[NAME.len()..]);
        for digit in &mut name[NAME.len()..] {
            *digit = b"0123456789abcdef"[usize::from(*digit % 16)];
        }
        name[..NAME.len()].copy_from_slice(NAME);
        match hub.net.listen_local(&name) {
            Ok(socket) => {
                hub.own(socket, Owner::SetupListener);
                self.open = Some((socket, name));
                Some(name)
            }
            Err(error) => {
                log::debug!("cannot listen for peers within the host: {error}; connections stay on TCP");
                None
            }
        }
    }

    /// Accepts the peers that have connected to the Unix listener. Returns true if more may wait.
    pub(super) fn accept_peers<N: Net>(
        &mut self,
        endpoints: &mut Endpoints<N>,
        hub: &mut Hub<N>,
        now: Instant,
    ) -> bool {
        let Some((listener, _)) = self.open else { return false };
        // An earlier call found no free descriptor, and set this deadline for the next attempt.
        if hub.deadlines.of(Owner::SetupListener).is_some_and(|until| now < until) {
            return false;
        }
        hub.deadlines.clear(Owner::SetupListener);
        for _ in 0..MAX_ACCEPTS {
            match hub.net.accept_local(listener) {
                Ok(socket) => {
                    let deadline = now + hub.config.within_host.meeting_timeout;
                    let (key, oldest) = self.add(socket);
                    hub.own(socket, Owner::NewPeer(key));
                    hub.deadlines.set(Owner::NewPeer(key), deadline);
                    if let Some((key, oldest)) = oldest {
                        hub.deadlines.clear(Owner::NewPeer(key));
                        hub.close(oldest, false);
                    }
                    self.read_hello(endpoints, hub, key, now);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                // No descriptor is free for the peer. The peer stays in the backlog of the listener
                // and causes no further edge, so a deadline is set for the next attempt to accept
                // the peer.
                Err(error) if is_exhaustion(&error) => {
                    log::debug!("cannot accept peers within the host for now: {error}");
                    let until = now + hub.config.accept_backoff;
                    hub.deadlines.set(Owner::SetupListener, until);
                    return false;
                }
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    self.pause(endpoints, hub, &error, now);
                    return false;
                }
                // The peer belongs to another user, and its socket was closed. When the peer
                // detects that its socket was closed, the peer stays on TCP.
                Err(error) => log::debug!("cannot accept a peer within the host: {error}"),
            }
        }
        // More peers may wait in the backlog of the Unix listener, and they cause no further edge.
        // So the Unix listener, represented by [`Key::NONE`], stays in `handshakes.backlog`, and
        // the channel is woken.
        hub.net.wake(NetChannel::Cm);
        endpoints.handshakes.accept_later(Key::NONE);
        true
    }

    /// Reads the hellos of the peers that have connected to the Unix listener, including those in
    /// its backlog. Called before a connection with an offer expires, because its hello may have
    /// arrived while the process did not run. Each connection has at most one hello, so the number
    /// of streams limits the number of peers that are accepted here.
    pub(super) fn read_waiting_hellos<N: Net>(&mut self, endpoints: &mut Endpoints<N>, hub: &mut Hub<N>, now: Instant) {
        for key in self.new_peers.keys() {
            self.read_hello(endpoints, hub, key, now);
        }
        for _ in 0..=endpoints.streams / MAX_ACCEPTS {
            if !self.accept_peers(endpoints, hub, now) {
                break;
            }
        }
    }

    /// Reads the hello of an accepted peer. If the hello is valid, accepts the peer's segment.
    pub(super) fn read_hello<N: Net>(
        &mut self,
        endpoints: &mut Endpoints<N>,
        hub: &mut Hub<N>,
        key: Key,
        now: Instant,
    ) {
        let Some(&socket) = self.new_peers.get(key) else { return };
        let mut room = [0; HELLO_LEN + 1];
        let heard = match hub.net.take(socket, &mut room) {
            Ok((len, file)) => Hello::parse(room.get(..len).unwrap_or_default()).zip(file),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(_) => None,
        };
        self.new_peers.remove(key);
        hub.deadlines.clear(Owner::NewPeer(key));
        let result = heard.ok_or_else(|| "it sent no valid hello".to_owned()).and_then(|(hello, file)| {
            self.accept_segment(endpoints, hub, &hello, socket, file, now)
                .map_err(|why| format!("connection {}: {why}", hello.key))
        });
        if let Err(why) = result {
            log::debug!("a peer of this host stays on TCP: {why}");
            hub.close(socket, false);
        }
    }

    /// Closes the socket of a peer that has not sent its hello in time. First reads the socket,
    /// because the hello may have arrived in time while the process did not run.
    pub(super) fn close_new_peer<N: Net>(
        &mut self,
        endpoints: &mut Endpoints<N>,
        hub: &mut Hub<N>,
        key: Key,
        now: Instant,
    ) {
        self.read_hello(endpoints, hub, key, now);
        if let Some(socket) = self.new_peers.remove(key) {
            hub.close(socket, false);
        }
    }

    /// Checks the hello of a peer, maps the peer's segment, and accepts the segment.
    fn accept_segment<N: Net>(
        &mut self,
        endpoints: &mut Endpoints<N>,
        hub: &mut Hub<N>,
        hello: &Hello,
        socket: SocketId,
        file: OwnedFd,
        now: Instant,
    ) -> Result<(), String> {
        let Some(CmEndpoint::Stream(flow)) = endpoints.get_mut(hello.key) else { return Err("it has ended".into()) };
        match flow.offer.as_deref() {
            Some(Offered::Waiting(secret)) if is_same_secret(&hello.secret, secret) => {}
            _ => return Err("the secret is not that of its offer".into()),
        }
        if hub.net.local_path(flow.socket) != Some(hello.path) && !rdma_transport::planted("a-proxy-is-not-noticed") {
            return Err("there is a proxy between it and this process".into());
        }
        let window = Window::map(&file, segment::LEN, Sharing::Lent).map_err(|error| error.to_string())?;
        let memory = window.into_memory().map_err(|_| "its segment cannot be written")?;
        let segment = hub.net.segment(memory);
        hub.net.pass(socket, &ACCEPTED_PACKET, None).map_err(|error| error.to_string())?;
        hub.own(socket, Owner::Setup(hello.key));
        flow.last_heard = now;
        flow.offer = Some(Box::new(Offered::Accepted(socket, segment)));
        Ok(())
    }

    /// Connects to the Unix socket of an offer, and sends a hello with a new segment. `stream` is
    /// the TCP socket of the connection. Returns the Unix socket and the segment.
    pub(super) fn send_hello<N: Net>(
        &mut self,
        endpoints: &mut Endpoints<N>,
        hub: &mut Hub<N>,
        stream: SocketId,
        offer: &Offer,
        now: Instant,
    ) -> io::Result<(SocketId, N::Segment)> {
        if !self.meets_peers(hub, now) {
            return Err(io::Error::other("the setup pauses, because other users have disturbed it"));
        }
        let mut memory = Memory::new_shared(segment::LEN, Sharing::Lent)?;
        let file = memory.take_file();
        let socket = hub.net.connect_local(&offer.name).inspect_err(|error| {
            if error.kind() == io::ErrorKind::ResourceBusy {
                self.pause(endpoints, hub, error, now);
            }
        })?;
        let path = hub.net.local_path(stream).unwrap_or_default();
        let hello = Hello { secret: offer.secret, key: offer.key, path };
        match hub.net.pass(socket, &hello.emit(), file.as_ref().map(std::os::fd::AsFd::as_fd)) {
            Ok(()) => Ok((socket, hub.net.segment(memory))),
            Err(error) => {
                hub.net.close(socket, false);
                Err(error)
            }
        }
    }

    /// Adds a connected peer and returns its key. At the limit of [`MAX_NEW_PEERS`], also removes
    /// and returns the oldest peer and its key. The caller must close the socket of that peer.
    fn add(&mut self, socket: SocketId) -> (Key, Option<(Key, SocketId)>) {
        let oldest = if self.new_peers.len() < MAX_NEW_PEERS { None } else { self.oldest() };
        let key = self.new_peers.insert(socket);
        if self.by_age.len() > 4 * MAX_NEW_PEERS {
            self.by_age.retain(|&key| self.new_peers.get(key).is_some());
        }
        self.by_age.push_back(key);
        (key, oldest)
    }

    fn oldest(&mut self) -> Option<(Key, SocketId)> {
        while let Some(key) = self.by_age.pop_front() {
            if let Some(socket) = self.new_peers.remove(key) {
                return Some((key, socket));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
