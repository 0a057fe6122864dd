//! The traffic of the UDP ports: datagrams of queue pairs, and the queries and replies of the
//! connection manager.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::causes::connect_failure;
use super::hub::{DEVICE, Hub, Owner, SPIN_FULL, STALE_QP};
use super::net::{Net, Ready, SocketId};
use crate::packets::Packets;
use crate::roce::RoceConfig;
use crate::roce::frame::{self, HEADROOM};
use crate::roce::id::{DatagramId, DatagramPhase};
use crate::roce::mad::{self, MadOctets, SidrMessage, SidrReply, SidrRequest, SidrStatus};
use crate::roce::packet::{DatagramHeader, GROUP};
use crate::roce::port::{PortKind, UdpPort};
use crate::roce::queue_pair::{Arrival, DatagramQueuePair};
use crate::roce::tables::Tables;
use rdma_transport::cm::{CmEventKind, ConnectFailure, ReadDepth};
use rdma_transport::datagram::{DatagramPeer, DatagramSource, Route};
use rdma_transport::provider::PostError;
use rdma_transport::qp::SrqId;
use rdma_transport::slab::{Key, Slab};
use rdma_transport::sockets;
use rdma_transport::wc::WcOpcode;
use rdma_transport::wr::{RecvWr, SendWr};

/// The hop limit in the routes to peers.
const HOPS: u8 = 64;
/// `PACKETS` is the largest number of packets that are read from a port before the next port is
/// served. `CALLS` is the largest number of receive calls in which these packets are read.
const PACKETS: usize = 128;
const CALLS: usize = 8;
/// The largest number of network errors that one call of `read_network_errors` reads from a port.
/// With the system's default size of receive buffers, a socket's error queue holds fewer errors.
const REFUSALS: usize = 1024;
/// The time after which a query without a reply is sent again for the first time. The time doubles
/// with each attempt, up to `LAST_WAIT`.
pub(super) const FIRST_WAIT: Duration = Duration::from_millis(200);
const LAST_WAIT: Duration = Duration::from_secs(2);

/// A query from a peer, for which the provider must create a connection-manager id.
#[derive(Debug)]
pub(super) struct Query {
    /// The id for datagrams that waits for the program's answer.
    pub(super) key: Key,
    pub(super) event: CmEventKind,
}

/// The engine of datagrams: all UDP ports of a provider, and the ids for datagrams.
#[derive(Debug, Default)]
pub(super) struct Ports {
    pub(super) tables: Tables,
    pub(super) ids: Slab<DatagramId>, // bound: queries
    /// The received queries that have no connection-manager id yet.
    queries: VecDeque<Query>, // bound: queries
    /// The number of rounds of a busy poll while some port is hot (`Tables::hot`), modulo 2^32.
    /// Every `SPIN_FULL`-th round checks all sockets. If the provider also has connections, every
    /// second round does.
    spins: u32,
}

impl Ports {
    /// Removes and returns the next received query. The provider calls this function until it
    /// returns `None`, after each call that may read packets.
    #[inline]
    pub(super) fn next_query(&mut self) -> Option<Query> {
        self.queries.pop_front()
    }

    /// Raises an event of an id for datagrams.
    pub(super) fn raise<N: Net>(&self, hub: &mut Hub<N>, key: Key, kind: CmEventKind) {
        if let Some(id) = self.ids.get(key) {
            hub.raise(id.id.0, kind);
        }
    }

    pub(super) fn post_recv<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, chain: &[RecvWr]) -> Result<(), PostError> {
        self.queue_pair(key).and_then(|qp| qp.post_recv(chain, &mut hub.resources.cqs))
    }

    pub(super) fn post_send<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, chain: &[SendWr]) -> Result<(), PostError> {
        let Some(id) = self.ids.get_mut(key) else { return Err(PostError { posted: 0, error: STALE_QP }) };
        let (addresses, cqs) = (&self.tables.addresses, &mut hub.resources.cqs);
        let result = id.queue_pair().and_then(|qp| qp.post_send(chain, addresses, cqs));
        self.send_datagrams(hub, key);
        result
    }

    fn queue_pair(&mut self, key: Key) -> Result<&mut DatagramQueuePair, PostError> {
        self.ids.get_mut(key).ok_or(PostError { posted: 0, error: STALE_QP })?.queue_pair()
    }

    /// Records that a completion of an id's queue pair was polled ([`DatagramId::polled`]).
    pub(super) fn polled(&mut self, key: Key, opcode: WcOpcode) -> Option<SrqId> {
        self.ids.get_mut(key)?.polled(opcode)
    }

    /// Sends the queued datagrams of an id until the socket's buffer is full. A datagram that the
    /// system refuses is lost. Such a datagram still completes successfully, because unreliable
    /// datagrams may be lost anywhere.
    pub(super) fn send_datagrams<N: Net>(&mut self, hub: &mut Hub<N>, key: Key) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let (Some(qp), Some(port)) = (id.qp.as_deref_mut(), self.tables.ports.get_mut(id.port)) else { return };
        if qp.is_waiting() {
            return qp.wait();
        }
        let batch = &mut self.tables.sending;
        while qp.is_ready() {
            batch.clear();
            qp.fill(port.address, batch);
            let (mut done, mut again) = (0, true);
            while done < batch.len() {
                match hub.net.send_packets(SocketId(port.socket), batch, done) {
                    Ok(count) if count > 0 => (done, again) = (done + count, true),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        qp.sent(done, &mut hub.resources.cqs);
                        qp.wait();
                        port.waiting.push_back(key);
                        return;
                    }
                    // The error may belong to an earlier datagram, so the current datagram is
                    // sent once more.
                    Err(_) if again => again = false,
                    result => {
                        log::debug!("a datagram from {} is lost: {result:?}", port.address);
                        (done, again) = (done + 1, true);
                    }
                }
            }
            qp.sent(done, &mut hub.resources.cqs);
        }
    }

    /// Sends a management datagram. A datagram that the system refuses is lost. That does no harm,
    /// because a query without a reply is sent again.
    pub(super) fn send_mad<N: Net>(&mut self, hub: &mut Hub<N>, port: Key, to: SocketAddr, bytes: &MadOctets) {
        let Some(port) = self.tables.ports.get(port) else { return };
        let header = DatagramHeader {
            destination: mad::QUEUE_PAIR,
            source: mad::QUEUE_PAIR,
            queue_key: mad::QUEUE_KEY,
            immediate: None,
            solicited: false,
        };
        let batch = &mut self.tables.sending;
        batch.clear();
        batch.push(to, |buffer| {
            let start = HEADROOM + header.len();
            buffer[start..start + mad::LEN].copy_from_slice(bytes);
            let len = header.emit(0, mad::LEN, &mut buffer[HEADROOM..]);
            frame::seal(buffer, len, port.address, to)
        });
        for _ in 0..2 {
            match hub.net.send_packets(SocketId(port.socket), batch, 0) {
                Ok(_) => return,
                Err(error) => log::debug!("{to}: a query or a reply is not sent: {error}"),
            }
        }
    }

    /// Handles an edge on the socket of a port: notes that the port is readable, or sends the
    /// datagrams that could not be sent while the socket's buffer was full.
    pub(super) fn port_edge<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, ready: Ready) {
        if ready.closed {
            self.read_network_errors(hub, key);
        }
        if ready.readable {
            self.tables.enqueue(key);
        }
        let waiting = match self.tables.ports.get_mut(key) {
            Some(port) if ready.writable => std::mem::take(&mut port.waiting),
            _ => return,
        };
        for key in waiting {
            if let Some(qp) = self.ids.get_mut(key).and_then(|id| id.qp.as_mut()) {
                qp.resume();
            }
            self.send_datagrams(hub, key);
        }
    }

    /// Reads the network errors that packets of a port have caused. A query fails if its
    /// destination was unreachable.
    fn read_network_errors<N: Net>(&mut self, hub: &mut Hub<N>, key: Key) {
        let Some(socket) = self.tables.ports.get(key).map(|port| SocketId(port.socket)) else { return };
        for _ in 0..REFUSALS {
            let Ok((peer, why)) = hub.net.take_refusal(socket) else { return };
            let Some(peer) = peer else { continue };
            let failure = connect_failure(&why);
            if !matches!(failure, ConnectFailure::Refused | ConnectFailure::Unreachable(_)) {
                continue;
            }
            let asks = |of: &Key| {
                let to = |to: SocketAddr| (to.ip(), to.port()) == (peer.ip(), peer.port());
                self.ids.get(*of).is_some_and(|id| {
                    id.port == key && matches!(&id.phase, DatagramPhase::Querying(pending) if to(pending.to))
                })
            };
            let ended: Vec<Key> = self.tables.queries.values().copied().filter(asks).collect();
            for id in ended {
                self.fail_datagram(hub, id, Some(failure.clone()));
            }
        }
    }

    /// Reads a bounded number of packets from each port in the ready queue.
    #[inline]
    pub(super) fn serve_ports<N: Net>(&mut self, hub: &mut Hub<N>, now: Instant) {
        for _ in 0..self.tables.ready.len() {
            let Some(key) = self.tables.ready.pop_front() else { return };
            if let Some(port) = self.tables.ports.get_mut(key) {
                port.queued = false;
                if self.serve_port(hub, key, now) {
                    self.tables.enqueue(key);
                }
            }
        }
    }

    /// In most rounds of a busy poll, reads only from the port that received most recently, and
    /// returns true if more packets may remain. If this round must check all sockets, reads nothing
    /// and returns `None`. `alone` is true if the provider has no connections beside its ports.
    #[cold]
    pub(super) fn spin_port<N: Net>(&mut self, hub: &mut Hub<N>, alone: bool, now: Instant) -> Option<bool> {
        let key = self.tables.hot?;
        let Some(port) = self.tables.ports.get(key) else {
            self.tables.hot = None;
            return None;
        };
        self.spins = self.spins.wrapping_add(1);
        let full = if alone { SPIN_FULL } else { 2 };
        // If datagrams wait because the buffer of the socket is full, the edges of the socket must
        // be read.
        if self.spins % full == 0 || !port.waiting.is_empty() {
            return None;
        }
        // One call suffices, even if more packets remain: the next round reads them. Each packet
        // that has arrived since the last round that checked all sockets has an unread edge, so the
        // caller does not sleep while packets remain.
        let more = self.read_port(hub, key, now).is_some_and(|(_, more)| more);
        Some(more || !self.tables.ready.is_empty())
    }

    /// Reads a bounded number of packets from a port. Returns true if more packets may remain.
    pub(super) fn serve_port<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) -> bool {
        let mut count = 0;
        for _ in 0..CALLS {
            match self.read_port(hub, key, now) {
                Some((came, true)) => count += came,
                _ => return false,
            }
            if count >= PACKETS {
                break;
            }
        }
        true
    }

    /// Makes one receive call for a port, and processes the received packets. Returns their number,
    /// and true if more packets may remain. Returns `None` if the port is closed.
    #[inline]
    fn read_port<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) -> Option<(usize, bool)> {
        let socket = SocketId(self.tables.ports.get(key)?.socket);
        let mut received = std::mem::take(&mut self.tables.received);
        let result = hub.net.receive_packets(socket, &mut received);
        if let Ok((count, _)) = result {
            (0..count).for_each(|nth| self.take_packet(hub, key, &mut received, nth, now));
        }
        self.tables.received = received;
        match result {
            Ok((count, drained)) => {
                self.tables.hot = Some(key);
                Some((count, !drained))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Some((0, false)),
            Err(_) => {
                // The call has failed: the error belongs to a packet that was sent earlier, or a
                // signal interrupted the call.
                self.read_network_errors(hub, key);
                Some((0, true))
            }
        }
    }

    /// Processes the received packet with the index `nth`. An invalid packet is dropped silently.
    fn take_packet<N: Net>(&mut self, hub: &mut Hub<N>, at: Key, received: &mut Packets, nth: usize, now: Instant) {
        let Some((buffer, range, from)) = received.get(nth) else { return };
        if !hub.config.admits(from.ip()) {
            return;
        }
        let Some(port) = self.tables.ports.get_mut(at) else { return };
        let Some((header, payload)) = DatagramHeader::parse(&buffer[range.clone()]) else { return };
        let (to, len, payload) = (port.address, range.len(), payload.start + range.start..payload.end + range.start);
        match &mut port.kind {
            PortKind::Address { .. } if header.destination == mad::QUEUE_PAIR => {
                let known = header.queue_key == mad::QUEUE_KEY && payload.len() == mad::LEN;
                if known && frame::fits(buffer, len, from, to) {
                    match mad::parse(&buffer[payload]) {
                        Some(SidrMessage::Request(query)) => self.handle_query(hub, at, from, query, now),
                        Some(SidrMessage::Reply(reply)) => self.handle_reply(hub, from, &reply),
                        None => {}
                    }
                }
            }
            _ if header.queue_key != hub.config.roce.queue_key => {}
            PortKind::Address { .. } => {
                let Some(key) = self.tables.numbers.find(header.destination) else { return };
                // The datagram is only delivered if it was sent to the address of the queue pair.
                let own = self.ids.get(key).map(|id| id.port);
                let own = own.and_then(|own| self.tables.ports.get(own)).map(|port| port.address.ip());
                if own == Some(to.ip()) && frame::fits(buffer, len, from, to) {
                    self.deliver(hub, key, &arrival(&hub.config.roce, &header, from, to, len), &buffer[payload]);
                }
            }
            PortKind::Group { ids, .. } => {
                if header.destination == GROUP && frame::fits(buffer, len, from, to) {
                    let ids = std::mem::take(ids);
                    let arrival = arrival(&hub.config.roce, &header, from, to, len);
                    for key in &ids {
                        self.deliver(hub, *key, &arrival, &buffer[payload.clone()]);
                    }
                    if let Some(UdpPort { kind: PortKind::Group { ids: joined, .. }, .. }) =
                        self.tables.ports.get_mut(at)
                    {
                        *joined = ids;
                    }
                }
            }
        }
    }

    fn deliver<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, arrival: &Arrival, payload: &[u8]) {
        if let Some(qp) = self.ids.get_mut(key).and_then(|id| id.qp.as_mut()) {
            qp.deliver(arrival, payload, &mut hub.resources);
        }
    }

    /// Handles a query from a peer. A reply is as long as its query, so that nobody can use this
    /// host to amplify traffic.
    fn handle_query<N: Net>(
        &mut self,
        hub: &mut Hub<N>,
        at: Key,
        from: SocketAddr,
        query: Box<SidrRequest>,
        now: Instant,
    ) {
        let mut to = from;
        to.set_port(hub.config.roce.port.unwrap_or(from.port()));
        if let Some(&known) = self.tables.received_queries.get(&(to, query.request)) {
            // The peer has repeated a known query. If the program has already accepted the query,
            // send the same reply again.
            let id = self.ids.get(known);
            if let Some((port, DatagramPhase::Replied(_, _, reply))) = id.map(|id| (id.port, &id.phase)) {
                let reply = reply.clone();
                self.send_mad(hub, port, to, &reply);
            }
            return;
        }
        let Some(listener) = self.tables.ports.get(at).and_then(|port| port.service(query.service)) else {
            let reply = query.reply(SidrStatus::Unsupported, &[]).emit();
            return self.send_mad(hub, at, to, &reply);
        };
        if self.tables.unanswered >= hub.config.max_handshakes {
            log::debug!("{to}: too many unanswered queries: dropped");
            return;
        }
        let (request, private_data) = (query.request, Box::from(query.data));
        let peer = SocketAddr::new(from.ip(), query.from.port());
        let Some(listener) = self.ids.get(listener).map(|id| id.id) else { return };
        let key = self.add(DatagramPhase::Offered(query, to), at);
        self.tables.received_queries.insert((to, request), key);
        self.tables.unanswered += 1;
        hub.deadlines.set(Owner::Datagram(key), now + hub.config.accept_timeout);
        let read_depth = ReadDepth::default();
        let event = CmEventKind::ConnectRequest { listener, device: DEVICE, peer, private_data, read_depth };
        self.queries.push_back(Query { key, event });
    }

    /// Handles a reply from a peer. Ignores the reply unless the reply matches a local query and
    /// comes from the address to which that query was sent.
    fn handle_reply<N: Net>(&mut self, hub: &mut Hub<N>, from: SocketAddr, reply: &SidrReply) {
        let Some(&key) = self.tables.queries.get(&reply.request) else { return };
        let shared = hub.config.roce.port.is_some();
        let Some(DatagramPhase::Querying(pending)) = self.ids.get(key).map(|id| &id.phase) else { return };
        let to = pending.to;
        let is_there = from.ip() == to.ip() && (shared || from.port() == to.port());
        if !is_there || reply.transaction != pending.query.transaction {
            return;
        }
        match reply.status {
            SidrStatus::Known { number: number @ 2..GROUP, queue_key } => {
                self.set_phase(hub, key, DatagramPhase::Reached);
                let peer = DatagramPeer { route: route_to(to), qp_number: number, queue_key };
                self.raise(hub, key, CmEventKind::Reached { private_data: reply.data.into(), peer });
            }
            SidrStatus::Known { number, .. } => {
                let failure = ConnectFailure::Protocol(format!("{number:#x} is no queue pair for datagrams"));
                self.fail_datagram(hub, key, Some(failure));
            }
            SidrStatus::Unsupported => self.fail_datagram(hub, key, Some(ConnectFailure::Refused)),
            SidrStatus::Rejected => {
                self.fail_datagram(hub, key, None);
                self.raise(hub, key, CmEventKind::Rejected { private_data: reply.data.into() });
            }
            SidrStatus::Other(status) => {
                self.fail_datagram(hub, key, Some(ConnectFailure::Protocol(format!("the reply has status {status}"))));
            }
        }
    }

    /// Sends or resends the pending query of a datagram id.
    pub(super) fn send_query<N: Net>(&mut self, hub: &mut Hub<N>, key: Key) {
        let Some(id) = self.ids.get(key) else { return };
        if let DatagramPhase::Querying(pending) = &id.phase {
            let (port, to, bytes) = (id.port, pending.to, pending.query.emit());
            self.send_mad(hub, port, to, &bytes);
        }
    }

    /// Schedules the first resend of each query that was sent since the last call of this function.
    /// The functions that send a new query cannot schedule its resend, because they do not know the
    /// current time.
    #[inline]
    pub(super) fn time_queries<N: Net>(&mut self, hub: &mut Hub<N>, now: Instant) {
        while let Some(key) = self.tables.fresh.pop() {
            self.set_resend_time(hub, key, now);
        }
    }

    fn set_resend_time<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        if let Some(DatagramPhase::Querying(pending)) = self.ids.get(key).map(|id| &id.phase) {
            let again = (now + pending.wait).min(pending.until);
            hub.deadlines.set(Owner::Datagram(key), again);
        }
    }

    /// Handles the deadline of a datagram id: resends its query, or fails the id.
    pub(super) fn expire_datagram<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        match self.ids.get_mut(key).map(|id| &mut id.phase) {
            Some(DatagramPhase::Querying(pending)) if pending.until > now => {
                pending.wait = (pending.wait * 2).min(LAST_WAIT);
                self.send_query(hub, key);
                self.set_resend_time(hub, key, now);
            }
            Some(DatagramPhase::Querying(_) | DatagramPhase::Resolved(..) | DatagramPhase::Offered(..)) => {
                self.fail_datagram(hub, key, Some(ConnectFailure::Timeout));
            }
            _ => {}
        }
    }
}

fn arrival(config: &RoceConfig, header: &DatagramHeader, from: SocketAddr, to: SocketAddr, len: usize) -> Arrival {
    // The LID of the source is the UDP port to which the program replies. If the settings name one
    // UDP port for all datagrams, the program replies to that port, even if the datagram came from
    // another port.
    let lid = config.port.unwrap_or(from.port());
    let (qp_number, path_bits) = (header.source, DatagramSource::GLOBAL);
    Arrival {
        route: frame::route_header(from.ip(), to.ip(), len),
        immediate: header.immediate,
        source: DatagramSource { qp_number, lid, service_level: 0, path_bits },
    }
}

/// Returns the route to an address and a UDP port. The port is stored as the LID.
pub(super) fn route_to(address: SocketAddr) -> Route {
    let gid = sockets::mapped(address.ip()).octets();
    Route { gid, is_global: true, hop_limit: HOPS, lid: address.port(), port: 1, ..Route::default() }
}
