//! The passive side of connections: accepts TCP connections, reads the MPA requests, and sends the
//! MPA replies when the program accepts or rejects the requests.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::WITHIN_HOST;
use super::causes::{connect_failure, is_exhaustion, lost};
use super::endpoint::{CmEndpoint, Request, RequestStep};
use super::endpoints::Endpoints;
use super::flow::{End, Offered, TcpFlow};
use super::frame::Frame;
use super::hub::{DEVICE, Hub, Owner};
use super::net::{Net, NetChannel, SocketId};
use super::queue_pair::Role;
use super::rendezvous::Rendezvous;
use super::startup::{self, FrameReader, Judgement, RequestTerms, StartupTerms};
use super::wire::{StartupHeader, StartupKind};
use rdma_transport::cm::{CmEventKind, CmId, ConnectFailure};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::log_limit::NOBODY;
use rdma_transport::mem::RecvSlice;
use rdma_transport::newcomers::Host;
use rdma_transport::slab::Key;

/// The largest number of connections that one call of `accept_some` accepts.
const ACCEPTS: usize = 64;

impl<N: Net> Endpoints<N> {
    /// Accepts connections from a listener, until no connection waits or a limit is reached.
    pub(super) fn accept_some(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        let Some(&CmEndpoint::Listener(listener)) = self.get(key) else { return };
        if self.handshakes.is_paused(hub, key) {
            return;
        }
        for _ in 0..ACCEPTS {
            if let Err(until) = self.make_room(hub, now) {
                log::debug!("{} handshakes are not finished: new connections wait", self.handshakes.unfinished);
                self.handshakes.paused.push(key);
                if let Some(until) = until {
                    hub.deadlines.set(Owner::Endpoint(key), until);
                }
                return;
            }
            match hub.net.accept(listener) {
                Ok((socket, peer)) if !hub.config.admits(peer.ip()) => {
                    log::debug!("{peer}: reset: it is in none of the allowed networks");
                    hub.net.close(socket, true);
                }
                Ok((socket, peer)) => self.requested(hub, CmId(key), socket, peer, now),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    // The system lacks descriptors or memory. A half-open connection was evicted,
                    // which frees a descriptor and memory. So accept is tried again.
                    _ if is_exhaustion(&error) && self.evict(hub, None, now).is_ok() => {}
                    _ => {
                        let (after, limit) = (hub.config.accept_backoff, &mut self.handshakes.log_limit);
                        peer_log!(
                            limit,
                            now,
                            NotAccepting,
                            Warn,
                            NOBODY,
                            "cannot accept a connection: {error}; trying again in {after:?}"
                        );
                        return hub.deadlines.set(Owner::Endpoint(key), now + after);
                    }
                },
            }
        }
        self.handshakes.accept_later(key);
        if !hub.within_cm {
            hub.net.wake(NetChannel::Cm);
        }
    }

    /// Ends the pause of a listener at its deadline, and accepts connections again.
    pub(super) fn end_pause(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        self.handshakes.paused.retain(|&paused| paused != key);
        if !rdma_transport::planted("a-listener-without-descriptors-is-forgotten") {
            self.accept_some(hub, key, now);
        }
    }

    /// Evicts the oldest half-open connections until one more handshake is within the limits. If
    /// too few connections can be evicted now, returns an error. The error contains the time at
    /// which the next eviction will be allowed, or `None` if there is no half-open connection.
    fn make_room(&mut self, hub: &mut Hub<N>, now: Instant) -> std::result::Result<(), Option<Instant>> {
        while let Some(host) = self.handshakes.crowd {
            if self.handshakes.half_open.count_of(host) <= hub.config.handshakes_per_peer() {
                self.handshakes.crowd = None;
            } else {
                self.evict(hub, Some(host), now)?;
            }
        }
        while self.handshakes.unfinished >= hub.config.max_handshakes
            && !rdma_transport::planted("handshakes-without-a-limit")
        {
            self.evict(hub, None, now)?;
        }
        Ok(())
    }

    /// Evicts the oldest half-open connection of a host, or of all hosts. A connection may only be
    /// evicted after its `request_grace`. If none can be evicted now, returns an error. The error
    /// contains the time at which the eviction will be allowed, or `None` if there is no half-open
    /// connection.
    fn evict(
        &mut self,
        hub: &mut Hub<N>,
        host: Option<Host>,
        now: Instant,
    ) -> std::result::Result<(), Option<Instant>> {
        let oldest = self.handshakes.half_open.oldest(host).ok_or(None)?;
        let due = oldest.since + hub.config.request_grace;
        if due > now {
            return Err(Some(due));
        }
        log::debug!("a connection without an MPA request gives way to a new one");
        if let Some(socket) = self.remove(hub, oldest.id, now) {
            hub.close(socket, true);
        }
        Ok(())
    }

    /// Starts the handshake with a peer whose TCP connection was accepted.
    fn requested(&mut self, hub: &mut Hub<N>, listener: CmId, socket: SocketId, peer: SocketAddr, now: Instant) {
        let host = Host::of(peer.ip());
        let key = self.insert(CmEndpoint::Dead(None));
        let reader = Box::new(FrameReader::new(StartupKind::Request));
        let ticket = self.handshakes.half_open.add(key, host, now);
        let step = RequestStep::Reading { reader, listener, peer, ticket };
        self.replace(hub, key, CmEndpoint::Request(Request { socket, step, qp: None, closed: false }));
        hub.own(socket, Owner::Endpoint(key));
        hub.deadlines.set(Owner::Endpoint(key), now + hub.config.request_timeout);
        self.read_request(hub, key, now);
        if self.handshakes.half_open.count_of(host) > hub.config.handshakes_per_peer() {
            self.handshakes.crowd = Some(host);
        }
    }

    /// Continues the handshake of a request after an edge on its socket. If the peer has reset the
    /// connection, and the program was not notified of the request, removes the request: its bytes
    /// may still be readable, but the peer would not receive a reply.
    pub(super) fn request_edge(&mut self, hub: &mut Hub<N>, key: Key, closed: bool, now: Instant) {
        let Some(endpoint) = self.get_mut(key) else { return };
        let is_unknown = endpoint.is_unknown();
        let CmEndpoint::Request(request) = endpoint else { return };
        request.closed |= closed;
        if closed && is_unknown && hub.net.connected(request.socket).is_err() {
            return self.drop_socket(hub, key, now);
        }
        self.read_request(hub, key, now);
    }

    fn read_request(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        let Some(CmEndpoint::Request(Request {
            socket,
            step: RequestStep::Reading { reader, listener, peer, .. },
            ..
        })) = self.get_mut(key)
        else {
            return;
        };
        let (socket, listener, peer) = (*socket, *listener, *peer);
        let header = match read_frame(&mut hub.net, socket, reader) {
            Ok(Some(header)) => header,
            Ok(None) => return,
            Err(failure) => {
                log::debug!("{peer}: no handshake: {failure}");
                return self.drop_socket(hub, key, now);
            }
        };
        let (enhanced, private_data) = reader.body();
        let (private_data, path) = startup::split_path(&header, private_data);
        match startup::judge_request(&header, enhanced, hub.config.markers) {
            Judgement::Acceptable(mut requested) => {
                requested.path = path;
                let private_data = private_data.into();
                if self.get(listener.0).is_none() {
                    return self.turn_away(hub, key, &requested, &[], now);
                }
                hub.deadlines.clear(Owner::Endpoint(key));
                self.queue_request(hub, key, requested, Host::of(peer.ip()));
                let read_depth = requested.read_depth(hub.config.read_depth);
                let kind = CmEventKind::ConnectRequest { listener, device: DEVICE, peer, private_data, read_depth };
                hub.enqueue_start(Host::of(peer.ip()), key, kind);
            }
            Judgement::Refused(why, requested) => {
                peer_log!(self.handshakes.log_limit, now, Refused, Warn, peer, "{peer}: rejected: {why}");
                self.turn_away(hub, key, &requested, &[], now);
            }
            Judgement::Unknown(why) => {
                log::debug!("{peer}: not answered: {why}");
                self.drop_socket(hub, key, now);
            }
        }
    }

    /// Changes the step of a request to `Queued`: its event waits until the program receives it.
    /// The connection is no longer half-open.
    fn queue_request(&mut self, hub: &mut Hub<N>, key: Key, requested: RequestTerms, host: Host) {
        let Some(CmEndpoint::Request(request)) = self.get_mut(key) else { return };
        let step = std::mem::replace(&mut request.step, RequestStep::Queued(requested, host));
        if let RequestStep::Reading { ticket, .. } = step {
            self.handshakes.half_open.remove(ticket);
        }
        self.handshakes.resume(hub);
    }

    /// Removes the endpoint of a request, and sends the peer an MPA reply that rejects it.
    pub(super) fn turn_away(
        &mut self,
        hub: &mut Hub<N>,
        key: Key,
        requested: &RequestTerms,
        private_data: &[u8],
        now: Instant,
    ) {
        if let Some(socket) = self.remove(hub, key, now) {
            hub.linger(socket, startup::reject(requested, private_data), now);
        }
    }

    /// Handles the deadline of a request: resets a connection whose client has not sent its MPA
    /// request in time, and rejects a request that the program has not accepted or rejected in
    /// time. First reads the socket, because the MPA request may have arrived in time while the
    /// process did not run.
    pub(super) fn expire_request(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        self.read_request(hub, key, now);
        match self.get(key) {
            Some(CmEndpoint::Request(Request { step: RequestStep::Reading { peer, .. }, .. })) => {
                log::debug!("{peer}: sent no MPA request in time");
                if let Some(socket) = self.remove(hub, key, now) {
                    hub.close(socket, true);
                }
            }
            Some(CmEndpoint::Request(Request { step: RequestStep::Offered(requested), .. })) => {
                let reply = startup::reject(requested, &[]);
                self.fail(hub, key, Some(ConnectFailure::Timeout), Some((reply, now)));
            }
            _ => {}
        }
    }

    /// Accepts the request of a peer for the program. Offers shared memory if the peer can use it.
    ///
    /// # Errors
    /// Returns an error, and leaves the request as it was, if the endpoint has no request or no
    /// queue pair, or if shared memory is required and the peer cannot use it.
    pub(super) fn accept(
        &mut self,
        rendezvous: &mut Rendezvous,
        hub: &mut Hub<N>,
        key: Key,
        terms: StartupTerms,
        private_data: &[u8],
        now: Instant,
    ) -> Result<()> {
        let endpoint = self.known(CmId(key))?;
        let CmEndpoint::Request(Request { socket, step: RequestStep::Offered(requested), qp, closed }) = endpoint
        else {
            return Err(TransportError::InvalidState { call: "accept", state: endpoint.name() });
        };
        if qp.is_none() {
            return Err(TransportError::InvalidState { call: "accept", state: "without a queue pair" });
        }
        let (socket, requested, closed) = (*socket, *requested, *closed);
        let path = hub.net.local_path(socket);
        let crc = hub.config.crc.is_requested(path.is_some() && path == requested.path);
        let offer = rendezvous.offer(hub, key, path, &requested, now);
        if offer.is_none() && hub.requires_shared_memory() {
            let (why, is_temporary) = rendezvous.reason(path, &requested);
            return Err(TransportError::SharedMemoryOnly { provider: WITHIN_HOST, why, is_temporary });
        }
        let mut private_data = private_data.to_vec();
        offer.iter().for_each(|offer| private_data.extend_from_slice(&offer.emit()));
        let (frame, agreement) = startup::accept(&StartupTerms { crc, ..terms }, &requested, &private_data);
        let Some(qp) = self.take_queue_pair(key) else { return Ok(()) };
        let mut flow = TcpFlow::new(key, socket, qp, closed, now);
        flow.reply = Frame::new(frame);
        flow.offer = offer.map(|offer| Box::new(Offered::Waiting(offer.secret)));
        self.begin(hub, flow, Role::Responder, &agreement, now);
        Ok(())
    }

    /// Ends an accepted connection whose client has sent no first message in time, neither on the
    /// stream nor in shared memory. The client gets another `ready_timeout` in two cases:
    ///
    /// - The hello of the client had arrived, but this process had not read it. So the client had
    ///   no answer yet.
    /// - `late`, the time since the deadline, is at least half of `ready_timeout`. The client may
    ///   be in this process, which did not run.
    pub(super) fn expire_unannounced(
        &mut self,
        rendezvous: &mut Rendezvous,
        hub: &mut Hub<N>,
        key: Key,
        late: Duration,
        now: Instant,
    ) {
        let waits = self.awaits_hello(key);
        if waits {
            rendezvous.read_waiting_hellos(self, hub, now);
        }
        if self.follow(hub, key, now) {
            return;
        }
        if let Some(CmEndpoint::Stream(flow)) = self.get_mut(key) {
            let outcome = flow.serve(hub, now);
            self.settle(hub, key, outcome, now);
        }
        if let Some(CmEndpoint::Stream(TcpFlow { announced: false, .. })) = self.get(key) {
            if waits && !self.awaits_hello(key) || late >= hub.config.ready_timeout / 2 {
                return hub.deadlines.set(Owner::Endpoint(key), now + hub.config.ready_timeout);
            }
            self.fail(hub, key, Some(ConnectFailure::Timeout), Some((Vec::new(), now)));
        }
    }

    fn awaits_hello(&self, key: Key) -> bool {
        matches!(self.get(key), Some(CmEndpoint::Stream(flow)) if flow.awaits_hello())
    }

    /// Starts the stream of a connection whose handshake is complete. Moves the socket of the
    /// connection to the completion channel.
    pub(super) fn begin(
        &mut self,
        hub: &mut Hub<N>,
        mut flow: TcpFlow<N::Segment>,
        role: Role,
        agreement: &startup::Agreement,
        now: Instant,
    ) {
        let key = flow.key;
        let promoted = hub.net.promote(flow.socket);
        if promoted.is_ok() {
            flow.start(hub, role, agreement, now);
        }
        self.replace(hub, key, CmEndpoint::Stream(flow));
        if let Err(error) = promoted {
            self.end(hub, key, End::of(lost(&error)), now);
        }
    }
}

/// Reads the available bytes of a startup frame. Returns the header once the frame is complete, and
/// `None` while bytes are missing.
pub(super) fn read_frame(
    net: &mut impl Net,
    socket: SocketId,
    reader: &mut FrameReader,
) -> std::result::Result<Option<StartupHeader>, ConnectFailure> {
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
