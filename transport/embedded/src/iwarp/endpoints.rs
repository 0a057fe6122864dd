//! [`Endpoints`]: the table of all endpoints of a provider, and the state changes that several of
//! its modules use.

use std::time::{Duration, Instant};

use super::causes::{is_unreachable, lost, never_up};
use super::endpoint::{AttemptStep, CmEndpoint, Request, RequestStep, Work, WorkMut};
use super::flow::{End, Offered, Outcome};
use super::half_open::Handshakes;
use super::hub::{Hub, Owner, STALE_ID};
use super::linger::Linger;
use super::net::{Net, NetChannel, SocketId};
use super::ports::Ports;
use super::queue_pair::QueuePair;
use super::ring::RingFlow;
use crate::shm::link::{Link, PartedLink};
use crate::shm::packet::CALL_PACKET;
use crate::shm::segment::SegmentSide;
use rdma_transport::cm::{CmEvent, CmEventKind, CmId, ConnectFailure, DisconnectCause, ReadDepth};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::mr::{Access, MrId};
use rdma_transport::newcomers::Host;
use rdma_transport::slab::{Key, Slab};

/// The longest time for which the peer of a closed link can read the last records of the link. The
/// time is long, so that a peer process that was stopped can still read them when it runs again.
/// The number of lingering links and their bytes are limited.
pub(super) const PARTING: Duration = Duration::from_secs(600);

/// The endpoints of a provider, the unfinished handshakes, and the numbers of live connections.
#[derive(Debug)]
pub(super) struct Endpoints<N: Net> {
    table: Slab<CmEndpoint<N::Segment>>, // bound: connections, half-open, queries
    pub(super) handshakes: Handshakes,
    /// The number of live connections on TCP streams.
    pub(super) streams: usize,
    /// The number of live connections in shared memory.
    pub(super) rings: usize,
    /// The number of times that an endpoint was looked up.
    #[cfg(test)]
    pub(super) look_ups: std::cell::Cell<usize>,
}

/// A connection that moves from its TCP stream to shared memory.
pub(super) struct Move<S> {
    pub(super) stream: SocketId,
    /// The Unix socket to the peer.
    pub(super) socket: SocketId,
    pub(super) segment: S,
    pub(super) side: SegmentSide,
    pub(super) qp: Box<QueuePair>,
    pub(super) read_depth: ReadDepth,
    /// True if the event `Established` was raised.
    pub(super) announced: bool,
}

impl<N: Net> Endpoints<N> {
    pub(super) fn new() -> Self {
        Self {
            table: Slab::default(),
            handshakes: Handshakes::default(),
            streams: 0,
            rings: 0,
            #[cfg(test)]
            look_ups: Default::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn keys(&self) -> Vec<Key> {
        self.table.keys()
    }

    pub(super) fn get(&self, key: Key) -> Option<&CmEndpoint<N::Segment>> {
        self.count_look_up();
        self.table.get(key)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut CmEndpoint<N::Segment>> {
        self.count_look_up();
        self.table.get_mut(key)
    }

    /// Counts a look-up of an endpoint, for tests.
    #[inline]
    fn count_look_up(&self) {
        #[cfg(test)]
        self.look_ups.set(self.look_ups.get() + 1);
    }

    /// Returns the endpoint of an id. Returns an error if the endpoint does not exist, or if the
    /// program was not notified of it.
    pub(super) fn known(&self, id: CmId) -> Result<&CmEndpoint<N::Segment>> {
        self.get(id.0).filter(|endpoint| !endpoint.is_unknown()).ok_or(STALE_ID)
    }

    /// Returns the endpoint of an id. Returns an error if the endpoint does not exist, or if the
    /// program was not notified of it.
    pub(super) fn known_mut(&mut self, id: CmId) -> Result<&mut CmEndpoint<N::Segment>> {
        self.get_mut(id.0).filter(|endpoint| !endpoint.is_unknown()).ok_or(STALE_ID)
    }

    /// Adds an endpoint.
    pub(super) fn insert(&mut self, endpoint: CmEndpoint<N::Segment>) -> Key {
        self.table.insert(endpoint)
    }

    /// Changes the state of an endpoint. Returns the previous state, or `None` if the endpoint does
    /// not exist.
    pub(super) fn replace(
        &mut self,
        hub: &mut Hub<N>,
        key: Key,
        state: CmEndpoint<N::Segment>,
    ) -> Option<CmEndpoint<N::Segment>> {
        self.count_look_up();
        let endpoint = self.table.get_mut(key)?;
        match &state {
            CmEndpoint::Request(_) => self.handshakes.unfinished += 1,
            CmEndpoint::Stream(_) => self.streams += 1,
            CmEndpoint::Ring(_) => self.rings += 1,
            _ => {}
        }
        let previous = std::mem::replace(endpoint, state);
        self.uncount(hub, &previous);
        Some(previous)
    }

    fn uncount(&mut self, hub: &mut Hub<N>, endpoint: &CmEndpoint<N::Segment>) {
        match endpoint {
            CmEndpoint::Request(request) => {
                self.handshakes.unfinished -= 1;
                if let RequestStep::Reading { ticket, .. } = request.step {
                    self.handshakes.half_open.remove(ticket);
                }
                self.handshakes.resume(hub);
            }
            CmEndpoint::Stream(_) => self.streams -= 1,
            CmEndpoint::Ring(_) => self.rings -= 1,
            _ => {}
        }
    }

    /// Removes and returns the queue pair of a connection whose handshake completes.
    pub(super) fn take_queue_pair(&mut self, key: Key) -> Option<Box<QueuePair>> {
        match self.get_mut(key)? {
            CmEndpoint::Request(request) => request.qp.take(),
            CmEndpoint::Attempt(attempt) => attempt.qp.take(),
            _ => None,
        }
    }

    /// Removes an endpoint and its queue pair. Returns its socket, which the caller must close or
    /// let linger. For a link, this function adds the lingering socket, and returns `None`.
    pub(super) fn remove(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) -> Option<SocketId> {
        match self.take(hub, key)?.take_apart(hub) {
            (_, Some(Work::Ring(link, socket))) => {
                part(hub, link, socket, now);
                None
            }
            (socket, Some(Work::Stream(mut qp))) => {
                qp.completions.release(&mut qp.rx.queue, &mut hub.resources);
                socket
            }
            (socket, None) => socket,
        }
    }

    /// Removes an endpoint from the table, with its deadline and its queued start event. Does not
    /// close its socket.
    pub(super) fn take(&mut self, hub: &mut Hub<N>, key: Key) -> Option<CmEndpoint<N::Segment>> {
        let endpoint = self.table.remove(key)?;
        self.uncount(hub, &endpoint);
        hub.deadlines.clear(Owner::Endpoint(key));
        drop_start(hub, key, &endpoint);
        Some(endpoint)
    }

    /// Removes an endpoint of which the program was not notified, and closes its socket.
    pub(super) fn drop_socket(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        if let Some(socket) = self.remove(hub, key, now) {
            hub.close(socket, false);
        }
    }

    /// Ends a handshake. If `failure` is given, raises an event that reports the failure. `rest`
    /// contains bytes to send to the peer before the socket is closed, and the current time.
    pub(super) fn fail(
        &mut self,
        hub: &mut Hub<N>,
        key: Key,
        failure: Option<ConnectFailure>,
        rest: Option<(Vec<u8>, Instant)>,
    ) {
        let Some(endpoint) = self.replace(hub, key, CmEndpoint::Dead(None)) else { return };
        hub.deadlines.clear(Owner::Endpoint(key));
        drop_start(hub, key, &endpoint);
        let (socket, mut work) = endpoint.take_apart(hub);
        if let Some(Work::Stream(qp)) = &mut work {
            qp.end(None, &mut hub.resources.cqs);
        }
        self.keep(key, work);
        match (socket, rest) {
            (Some(socket), Some((rest, now))) => hub.linger(socket, rest, now),
            (Some(socket), None) => hub.close(socket, false),
            (None, _) => {}
        }
        if let Some(failure) = failure {
            hub.raise(key, CmEventKind::ConnectFailed(failure));
        }
    }

    /// Ends a live connection: flushes its work queues and raises one event, `Disconnected` or
    /// `ConnectFailed`. Unless the peer has ended the stream or the path has failed, the FPDUs that
    /// are already framed are sent before the socket is closed. After them, the Terminate of `end`
    /// is sent if there is one.
    pub(super) fn end(&mut self, hub: &mut Hub<N>, key: Key, end: End, now: Instant) {
        if !self.get(key).is_some_and(CmEndpoint::is_live) {
            return;
        }
        let End { cause, terminate } = end;
        let announced = match self.replace(hub, key, CmEndpoint::Dead(None)) {
            Some(CmEndpoint::Ring(mut flow)) => {
                let socket = flow.end(hub, &cause);
                self.keep(key, Some(Work::Ring(flow.link, socket)));
                flow.announced
            }
            Some(CmEndpoint::Stream(mut flow)) => {
                flow.forget_offer(hub);
                let rest = flow.qp.end(terminate, &mut hub.resources.cqs);
                let rest = flow.reply.unsent(rest);
                if is_unreachable(&cause) {
                    hub.close(flow.socket, false);
                } else {
                    hub.linger(flow.socket, rest, now);
                }
                self.keep(key, Some(Work::Stream(flow.qp)));
                flow.announced
            }
            _ => return,
        };
        hub.deadlines.clear(Owner::Endpoint(key));
        if hub.hot == Some(key) {
            hub.hot = None;
        }
        let kind = match cause {
            cause if announced || cause == DisconnectCause::Local => CmEventKind::Disconnected(cause),
            cause => CmEventKind::ConnectFailed(never_up(cause)),
        };
        hub.raise(key, kind);
    }

    /// Keeps the queue pair of a connection that has ended, until its id is destroyed.
    fn keep(&mut self, key: Key, work: Option<Work<N::Segment>>) {
        if let Some(endpoint) = self.get_mut(key) {
            *endpoint = CmEndpoint::Dead(work);
        }
    }

    /// Moves a connection to shared memory, and closes its TCP stream.
    pub(super) fn enter_segment(&mut self, hub: &mut Hub<N>, key: Key, connection: Move<N::Segment>, now: Instant) {
        let Move { stream, socket, segment, side, qp, read_depth, announced } = connection;
        let mut link = Link::new(segment, side, read_depth, qp.leave(), &hub.account);
        if side == SegmentSide::Active {
            link.begin();
        }
        let mut flow = RingFlow::new(key, socket, Box::new(link), announced, now);
        hub.own(socket, Owner::Endpoint(key));
        let promoted = hub.net.promote(socket);
        // The result is ignored, because the connection is served next anyway.
        let _ = flow.pump(hub);
        flow.enqueue(hub);
        // The passive side looks for the first record when a packet arrives on the Unix socket or
        // when the TCP stream ends. So the active side sends a packet.
        if side == SegmentSide::Active {
            let _ = hub.net.pass(socket, &CALL_PACKET, None);
        }
        hub.close(stream, false);
        hub.deadlines.clear(Owner::Endpoint(key));
        if promoted.is_ok() && !std::mem::replace(&mut flow.announced, true) {
            hub.raise(key, CmEventKind::Established { private_data: Box::default(), read_depth });
        }
        self.replace(hub, key, CmEndpoint::Ring(flow));
        log::debug!("connection {key} is in shared memory");
        if let Err(error) = promoted {
            return self.end(hub, key, End::of(lost(&error)), now);
        }
        hub.net.wake(NetChannel::Completion);
    }

    /// Moves a connection to shared memory on the passive side, if the peer has written its first
    /// record to the segment, and returns true. Otherwise returns false.
    pub(super) fn follow(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) -> bool {
        let Some(CmEndpoint::Stream(flow)) = self.get_mut(key) else { return false };
        match flow.offer.as_deref() {
            Some(Offered::Accepted(_, segment)) if Link::has_begun(segment, SegmentSide::Passive) => {}
            _ => return false,
        }
        let Some(CmEndpoint::Stream(flow)) = self.replace(hub, key, CmEndpoint::Dead(None)) else { return false };
        if let Some(Offered::Accepted(socket, segment)) = flow.offer.map(|offer| *offer) {
            let read_depth = flow.qp.read_depth;
            let (stream, qp, announced) = (flow.socket, flow.qp, flow.announced);
            let side = SegmentSide::Passive;
            self.enter_segment(hub, key, Move { stream, socket, segment, side, qp, read_depth, announced }, now);
        }
        true
    }

    /// Applies the outcome of serving a connection: moves the connection to shared memory, or ends
    /// it.
    #[inline]
    pub(super) fn settle(&mut self, hub: &mut Hub<N>, key: Key, outcome: Outcome, now: Instant) {
        let end = match outcome {
            Outcome::Going => return,
            Outcome::Moved if self.follow(hub, key, now) => return,
            Outcome::Moved => match self.get(key) {
                Some(CmEndpoint::Stream(flow)) => flow.end_of_stream(),
                _ => return,
            },
            Outcome::Ended(end) => end,
        };
        self.end(hub, key, end, now);
    }

    /// Ends the lendings of a region. No correct peer begins an access to the region through shared
    /// memory afterwards, but a peer that has mapped the region keeps its pages
    /// ([`Access::DIRECT`]). Called before the region is deregistered.
    pub(super) fn revoke(&mut self, hub: &mut Hub<N>, region: MrId) -> Result<()> {
        let (key, memory, access) = hub.resources.keys.memory(region)?;
        if rdma_transport::planted("a-lending-outlives-its-file") && memory.file().is_none() {
            return Ok(());
        }
        let all = if access.contains(Access::DIRECT) { self.keys() } else { Vec::new() };
        for id in all.into_iter().chain(hub.resources.keys.lent_to(region)) {
            if let Some(WorkMut::Ring(link)) = self.get_mut(id).and_then(CmEndpoint::work) {
                link.take_back(key);
            }
        }
        Ok(())
    }

    /// Creates the connection-manager id for the datagram id `key`.
    pub(super) fn add_datagrams(&mut self, ports: &mut Ports, key: Key) -> CmId {
        let id = CmId(self.insert(CmEndpoint::Datagram(key)));
        ports.name(key, id);
        id
    }

    /// Returns the key of an id for datagrams.
    pub(super) fn datagrams_of(&self, id: CmId) -> Result<Key> {
        match self.get(id.0) {
            Some(&CmEndpoint::Datagram(key)) => Ok(key),
            Some(endpoint) => {
                Err(TransportError::InvalidState { call: "a call for datagrams", state: endpoint.name() })
            }
            None => Err(STALE_ID),
        }
    }

    /// Removes a connection-manager id, and the id for datagrams that it names.
    pub(super) fn remove_datagrams(&mut self, ports: &mut Ports, hub: &mut Hub<N>, id: CmId) {
        if let Ok(key) = self.datagrams_of(id) {
            ports.remove(hub, key);
            self.table.remove(id.0);
        }
    }

    /// Creates a connection-manager id for each query that was received, and notifies the program.
    #[inline]
    pub(super) fn take_queries(&mut self, ports: &mut Ports, hub: &mut Hub<N>) {
        while let Some(query) = ports.next_query() {
            let id = self.add_datagrams(ports, query.key);
            hub.raise(id.0, query.event);
        }
    }

    /// Returns the next event. Drops the events of ids that were destroyed after the event.
    pub(super) fn next_event(&mut self, hub: &mut Hub<N>) -> Option<CmEvent> {
        loop {
            let event = hub.events.pop_front()?;
            if self.get(event.id.0).is_some() {
                return Some(event);
            }
        }
    }

    /// Removes and returns the next event with which a connection starts. The `accept_timeout` of a
    /// connect request begins only here. So no request expires in the queue, even if the program is
    /// slow to receive the events.
    pub(super) fn next_start(&mut self, hub: &mut Hub<N>, now: Instant) -> Option<CmEvent> {
        let event = hub.starts.pop()?;
        let CmId(key) = event.id;
        match self.get_mut(key) {
            Some(CmEndpoint::Request(Request { step, .. })) => {
                if let RequestStep::Queued(requested, _) = *step {
                    *step = RequestStep::Offered(requested);
                    hub.deadlines.set(Owner::Endpoint(key), now + hub.config.accept_timeout);
                }
            }
            Some(CmEndpoint::Attempt(attempt)) => attempt.step = AttemptStep::Resolved,
            _ => {}
        }
        Some(event)
    }
}

/// Publishes the last output of a link whose id is destroyed, and wakes the peer if the peer
/// sleeps. The link lingers until the peer has closed its Unix socket, but no longer than
/// [`PARTING`].
fn part<N: Net>(hub: &mut Hub<N>, mut link: Box<Link<N::Segment>>, socket: Option<SocketId>, now: Instant) {
    let calls = link.publish();
    link.part(&mut hub.resources);
    if hub.account.unmaps() {
        // The account unmaps a bounded number of windows per turn. Some windows of the link may
        // still be mapped, so another turn is needed.
        hub.net.wake(NetChannel::Completion);
    }
    let Some(socket) = socket else { return link.free() };
    if calls {
        let _ = hub.net.pass(socket, &CALL_PACKET, None);
    }
    hub.add_linger(Linger::of_link(socket, link), now + PARTING);
}

/// Removes the queued start event of a connection, if there is one.
fn drop_start<N: Net>(hub: &mut Hub<N>, key: Key, endpoint: &CmEndpoint<N::Segment>) {
    match endpoint {
        CmEndpoint::Request(Request { step: RequestStep::Queued(_, host), .. }) => hub.starts.remove(*host, CmId(key)),
        CmEndpoint::Attempt(attempt) if matches!(attempt.step, AttemptStep::Resolving) => {
            hub.starts.remove(Host::of(attempt.peer.ip()), CmId(key));
        }
        _ => {}
    }
}
