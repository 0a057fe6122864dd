//! The role [`Datagrams`] of the embedded provider: ids that bind, listen, query and reply. The packets themselves are processed in
//! `ports`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Instant;

use super::NAME;
use super::endpoint::{CmEndpoint, EndpointState};
use super::hub::Owner;
use super::net::{Net, NetChannel, SocketId};
use super::provider::{DEVICE, Iwarp, STALE_ID, STALE_QP};
use crate::cm::{CmEventKind, CmId, ConnectFailure, ListenParam, ReadDepth};
use crate::datagram::{AddressId, DatagramPeer, GRH_LEN, Route};
use crate::error::{Result, TransportError};
use crate::provider::DeviceId;
use crate::qp::{QpAttr, QpId};
use crate::roce::ROCE_PORT;
use crate::roce::frame;
use crate::roce::id::{DatagramId, DatagramPhase, GROUPS, PendingQuery};
use crate::roce::mad::{self, SidrRequest, SidrStatus};
use crate::roce::packet::GROUP;
use crate::roce::port::{PortKind, UdpPort};
use crate::roce::queue_pair::DatagramQueuePair;
use crate::roles::Datagrams;
use crate::slab::Key;
use crate::soft::completions::Completions;
use crate::soft::receive_queue::ReceiveQueue;
use crate::wc::WorkCompletion;

/// The hop limit in the routes to peers.
const HOPS: u8 = 64;
/// The range of service ports for listeners that the program starts at port 0, if `RoceConfig::port` is set. Such a listener gets the
/// lowest service port that is free.
const DYNAMIC: std::ops::RangeInclusive<u16> = 49152..=65535;

impl<N: Net> Iwarp<N> {
    fn datagram(&self, key: Key) -> Result<&DatagramId> {
        match self.endpoints.get(key) {
            Some(CmEndpoint { state: EndpointState::Datagram(id), .. }) => Ok(id),
            Some(endpoint) => {
                Err(TransportError::InvalidState { call: "a call for datagrams", state: endpoint.state.name() })
            }
            None => Err(STALE_ID),
        }
    }

    pub(super) fn datagram_mut(&mut self, key: Key) -> Option<&mut DatagramId> {
        match self.endpoints.get_mut(key) {
            Some(CmEndpoint { state: EndpointState::Datagram(id), .. }) => Some(id),
            _ => None,
        }
    }

    /// Opens a UDP port. Without `at`, the port is bound to the local address `address`. With `at`, the port joins the multicast group
    /// `address` on the interface with the address `at`.
    fn open_port(&mut self, address: SocketAddr, at: Option<SocketAddr>) -> Result<Key> {
        let listen = |source| TransportError::Listen { address, source };
        let interface = self.hub.net.interface(at.unwrap_or(address)).map_err(listen)?;
        let (socket, kind) = match at.map(|at| at.ip()) {
            Some(member) => {
                let socket = self.hub.net.open_group(address, member, interface).map_err(listen)?;
                (socket, PortKind::Group { member, ids: Vec::new() })
            }
            None => {
                (self.hub.net.open_packets(address).map_err(listen)?, PortKind::Address { services: BTreeMap::new() })
            }
        };
        let bound = self.hub.net.local_address(socket);
        let bound = bound.inspect_err(|_| self.hub.net.close(socket, false)).map_err(listen)?;
        let key = self.datagrams.add(UdpPort::new(socket.0, bound, interface, kind));
        self.hub.own(socket, Owner::Port(key));
        self.live += 1;
        Ok(key)
    }

    /// Increments the number of ids that use a port.
    pub(super) fn use_port(&mut self, key: Key) {
        if let Some(port) = self.datagrams.ports.get_mut(key) {
            port.users += 1;
        }
    }

    /// Decrements the number of ids that use a port. Closes the port if no id is left.
    fn leave_port(&mut self, key: Key) {
        let Some(port) = self.datagrams.ports.get_mut(key) else { return };
        port.users = port.users.saturating_sub(1);
        if port.users == 0 {
            let socket = SocketId(port.socket);
            self.datagrams.ports.remove(key);
            self.live -= 1;
            self.hub.close(socket, false);
        }
    }

    /// Returns the UDP port that the ids at a local address share. Opens the port if necessary. Ignores the port number in `local`.
    fn port_at(&mut self, mut local: SocketAddr) -> Result<Key> {
        let common = self.hub.config.roce.port;
        match self.datagrams.shared(local, common) {
            Some(port) => Ok(port),
            None => {
                local.set_port(common.unwrap_or(0));
                self.open_port(local, None)
            }
        }
    }

    /// Adds an id for datagrams. `phase` is the phase of the id. `port` is the UDP port with which the id sends.
    pub(super) fn add_datagram(&mut self, phase: DatagramPhase, port: Key) -> CmId {
        self.use_port(port);
        CmId(
            self.endpoints
                .insert(CmEndpoint::new(EndpointState::Datagram(Box::new(DatagramId::new(phase, port))), None)),
        )
    }

    fn is_of_a_device(address: SocketAddr) -> Result<()> {
        if address.ip().is_unspecified() || address.ip().is_multicast() {
            let reason = format!("{} is on none: datagrams need the address of a device", address.ip());
            return Err(TransportError::NoDevice { reason });
        }
        Ok(())
    }

    pub(super) fn address_of(&self, id: &DatagramId) -> Option<SocketAddr> {
        let mut address = self.datagrams.ports.get(id.port)?.address;
        if let DatagramPhase::Listening(service) = id.phase {
            address.set_port(service);
        }
        Some(address)
    }

    /// Creates the queue pair of an id. The caller has reserved entries on the completion queues. On failure, this function releases these
    /// entries.
    pub(super) fn add_datagram_qp(&mut self, key: Key, attr: &QpAttr) -> Result<()> {
        let mut salt = [0];
        (self.hub.entropy)(&mut salt);
        let made = self.make_queue_pair(key, attr, salt[0]);
        match (made, self.datagram_mut(key)) {
            (Ok(queue_pair), Some(id)) => id.qp = Some(queue_pair),
            (made, _) => {
                Completions::new(QpId(key), *attr).release(&mut ReceiveQueue::new(0), &mut self.hub.resources);
                return made.map(drop);
            }
        }
        Ok(())
    }

    fn make_queue_pair(&mut self, key: Key, attr: &QpAttr, salt: u8) -> Result<Box<DatagramQueuePair>> {
        let port = self.datagrams.ports.get(self.datagram(key)?.port).ok_or(STALE_ID)?;
        let full = TransportError::OutOfRange {
            what: "another datagram queue pair",
            value: 1,
            range: "0: all numbers are in use",
        };
        let number = self.datagrams.numbers.assign(key, salt).ok_or(full)?;
        Ok(Box::new(DatagramQueuePair::new(QpId(key), attr, number, port)))
    }

    /// Ends the query that an id has sent, or rejects the query for which the id was created. Flushes the work queues of the id.
    pub(super) fn end_datagrams(&mut self, key: Key) -> Result<()> {
        match &self.datagram(key)?.phase {
            DatagramPhase::Listening(_) => {
                return Err(TransportError::InvalidState { call: "disconnect", state: "listening" });
            }
            DatagramPhase::Offered(..) => self.reject_query(key, &[])?,
            DatagramPhase::Querying(_) => {
                let failure = ConnectFailure::System("disconnected here while connecting".into());
                self.fail_datagram(key, Some(failure));
            }
            _ => self.fail_datagram(key, None),
        }
        if let Some(CmEndpoint { state: EndpointState::Datagram(id), .. }) = self.endpoints.get_mut(key) {
            if let Some(qp) = &mut id.qp {
                qp.flush(&mut self.hub.resources.cqs);
            }
        }
        Ok(())
    }

    /// Releases everything that an id owns, before the id is destroyed. If the id was created for a query that the program has not
    /// answered, rejects the query.
    pub(super) fn release_datagram(&mut self, key: Key, mut id: DatagramId) {
        self.forget_query(key, &id.phase);
        if let DatagramPhase::Offered(query, to) = &id.phase {
            let reply = query.reply(SidrStatus::Rejected, &[]).emit();
            self.send_mad(id.port, *to, &reply);
        }
        for (_, port) in std::mem::take(&mut id.groups) {
            self.leave_group(key, port);
        }
        if let Some(qp) = &mut id.qp {
            self.datagrams.numbers.remove(qp.number);
            qp.release(&mut self.hub.resources);
        }
        if let (DatagramPhase::Listening(service), Some(port)) = (&id.phase, self.datagrams.ports.get_mut(id.port)) {
            if let PortKind::Address { services } = &mut port.kind {
                services.remove(service);
            }
        }
        self.leave_port(id.port);
    }

    fn leave_group(&mut self, key: Key, port: Key) {
        if let Some(UdpPort { kind: PortKind::Group { ids, .. }, .. }) = self.datagrams.ports.get_mut(port) {
            ids.retain(|member| *member != key);
        }
        self.leave_port(port);
    }

    /// Removes the query of an id from the tables. `phase` is the phase that the id leaves.
    fn forget_query(&mut self, key: Key, phase: &DatagramPhase) {
        match phase {
            DatagramPhase::Querying(pending) => {
                self.datagrams.queries.remove(&pending.query.request);
            }
            DatagramPhase::Offered(query, to) => {
                self.datagrams.unanswered -= 1;
                self.datagrams.received_queries.remove(&(*to, query.request));
            }
            DatagramPhase::Replied(request, to, _) => {
                self.datagrams.received_queries.remove(&(*to, *request));
            }
            _ => {}
        }
        self.datagrams.fresh.retain(|fresh| *fresh != key);
    }

    /// Changes the phase of an id and clears its deadline. Returns the previous phase.
    pub(super) fn set_phase(&mut self, key: Key, phase: DatagramPhase) -> Option<DatagramPhase> {
        self.hub.deadlines.clear(Owner::Endpoint(key));
        let before = std::mem::replace(&mut self.datagram_mut(key)?.phase, phase);
        self.forget_query(key, &before);
        Some(before)
    }

    /// Ends an id. If `failure` is given, raises an event that reports it.
    pub(super) fn fail_datagram(&mut self, key: Key, failure: Option<ConnectFailure>) {
        self.set_phase(key, DatagramPhase::Dead);
        if let Some(failure) = failure {
            self.hub.raise(key, CmEventKind::ConnectFailed(failure));
        }
    }

    /// Returns the UDP port of a peer to which queries for a service are sent.
    fn port_of_service(&self, service: u16) -> u16 {
        self.hub.config.roce.port.unwrap_or(service)
    }

    /// Queries a peer for the number of the queue pair that receives datagrams at its address.
    pub(super) fn query_peer(&mut self, key: Key, private_data: &[u8]) -> Result<()> {
        let id = self.datagram(key)?;
        let DatagramPhase::Resolved(peer, until) = id.phase else {
            return Err(TransportError::InvalidState { call: "connect", state: id.name() });
        };
        check_private_data(private_data, mad::REQUEST_DATA)?;
        let from = self.datagrams.ports.get(id.port).ok_or(STALE_ID)?.address;
        let mut octets = [0; 12];
        (self.hub.entropy)(&mut octets);
        let [a, b, c, d, transaction @ ..] = octets;
        let mut request = u32::from_ne_bytes([a, b, c, d]);
        while self.datagrams.queries.contains_key(&request) {
            request = request.wrapping_add(1);
        }
        let mut data = [0; mad::REQUEST_DATA];
        data[..private_data.len()].copy_from_slice(private_data);
        let transaction = u64::from_ne_bytes(transaction);
        let query = SidrRequest { transaction, request, service: peer.port(), from, to: peer.ip(), data };
        let mut to = peer;
        to.set_port(self.port_of_service(peer.port()));
        self.set_phase(
            key,
            DatagramPhase::Querying(Box::new(PendingQuery { query, to, until, wait: super::ports::FIRST_WAIT })),
        );
        self.hub.deadlines.set(Owner::Endpoint(key), until);
        self.datagrams.queries.insert(request, key);
        self.datagrams.fresh.push(key);
        self.hub.net.wake(NetChannel::Completion);
        self.send_query(key);
        Ok(())
    }

    /// Accepts the query of the id `asked`. The reply names the queue pair of the id `owner`. The peer sends its datagrams to that queue
    /// pair.
    pub(super) fn reply_to_query(
        &mut self,
        asked: Key,
        owner: Key,
        call: &'static str,
        private_data: &[u8],
    ) -> Result<()> {
        let id = self.datagram(asked)?;
        let DatagramPhase::Offered(query, to) = &id.phase else {
            return Err(TransportError::InvalidState { call, state: id.name() });
        };
        check_private_data(private_data, mad::REPLY_DATA)?;
        let without = TransportError::InvalidState { call, state: "without a queue pair" };
        let number = self.datagram(owner)?.qp.as_ref().ok_or(without)?.number;
        let status = SidrStatus::Known { number, queue_key: self.hub.config.roce.queue_key };
        let (request, to, port) = (query.request, *to, id.port);
        let reply = query.reply(status, private_data).emit();
        self.send_mad(port, to, &reply);
        self.set_phase(asked, DatagramPhase::Replied(request, to, Box::new(reply)));
        self.datagrams.received_queries.insert((to, request), asked);
        if asked == owner {
            let (private_data, read_depth) = (Box::default(), ReadDepth::default());
            self.hub.raise(asked, CmEventKind::Established { private_data, read_depth });
        }
        Ok(())
    }

    /// Rejects the query for which the id `key` was created.
    pub(super) fn reject_query(&mut self, key: Key, private_data: &[u8]) -> Result<()> {
        let id = self.datagram(key)?;
        let DatagramPhase::Offered(query, to) = &id.phase else {
            return Err(TransportError::InvalidState { call: "reject", state: id.name() });
        };
        check_private_data(private_data, mad::REPLY_DATA)?;
        let (reply, port, to) = (query.reply(SidrStatus::Rejected, private_data).emit(), id.port, *to);
        self.send_mad(port, to, &reply);
        self.fail_datagram(key, None);
        Ok(())
    }

    /// Returns the route to an address and a UDP port. The port is stored as the LID.
    pub(super) fn route_to(&self, address: SocketAddr) -> Route {
        let gid = match address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        Route { gid, is_global: true, hop_limit: HOPS, lid: address.port(), port: 1, ..Route::default() }
    }
}

fn is_link_local(address: SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local())
}

fn check_private_data(private_data: &[u8], max: usize) -> Result<()> {
    let len = private_data.len();
    if len > max { Err(TransportError::PrivateDataTooLong { provider: NAME, len, max }) } else { Ok(()) }
}

impl<N: Net> Datagrams for Iwarp<N> {
    fn bind_datagram(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId, u32)> {
        Self::is_of_a_device(address)?;
        let port = match (self.hub.config.roce.port, address.port()) {
            (None, 1..) => self.open_port(address, None)?,
            _ => self.port_at(address)?,
        };
        let max = self.datagrams.ports.get(port).ok_or(STALE_ID)?.max_payload();
        Ok((self.add_datagram(DatagramPhase::Bound, port), DEVICE, max))
    }

    fn answer_datagram(&mut self, id: CmId, qp: QpId, private_data: &[u8], _: Instant) -> Result<()> {
        let answered = self.reply_to_query(id.0, qp.0, "answer_datagram", private_data);
        if self.datagram(id.0).is_ok() {
            self.remove(id.0);
        }
        answered
    }

    fn listen_datagram(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        Self::is_of_a_device(address)?;
        options.note_ignored(NAME)?;
        let common = self.hub.config.roce.port;
        let key = match common {
            None => self.open_port(address, None)?,
            Some(_) => self.port_at(address)?,
        };
        let Some(UdpPort { address: bound, kind: PortKind::Address { services }, users, .. }) =
            self.datagrams.ports.get_mut(key)
        else {
            return Err(STALE_ID);
        };
        let service = match (common, address.port()) {
            (None, _) => Some(bound.port()),
            (Some(_), 0) => DYNAMIC.into_iter().find(|port| !services.contains_key(port)),
            (Some(_), port) => Some(port).filter(|port| !services.contains_key(port)),
        };
        let Some(service) = service else {
            debug_assert!(*users > 0, "it has services");
            return Err(TransportError::Listen { address, source: std::io::ErrorKind::AddrInUse.into() });
        };
        let id = self.add_datagram(DatagramPhase::Listening(service), key);
        if let Some(UdpPort { kind: PortKind::Address { services }, .. }) = self.datagrams.ports.get_mut(key) {
            services.insert(service, id.0);
        }
        Ok(id)
    }

    fn resolve_datagram(&mut self, peer: SocketAddr, from: Option<SocketAddr>, deadline: Instant) -> Result<CmId> {
        let from = match from {
            Some(from) => from,
            None => {
                let source = self.hub.net.source(peer);
                let source = source.map_err(|source| TransportError::io("finding a route to the peer", source))?;
                // The address is on the interface of the peer, so it has the peer's scope.
                let mut from = peer;
                from.set_ip(source);
                from
            }
        };
        Self::is_of_a_device(from)?;
        if from.is_ipv4() != peer.is_ipv4() {
            return Err(TransportError::InvalidState { call: "resolve_datagram", state: "from another version of IP" });
        }
        // The routes to peers have no scope. Only a socket at a link-local address knows the interface of a link-local peer.
        if is_link_local(peer) && !is_link_local(from) {
            let state = "to a link-local address, from another kind of address";
            return Err(TransportError::InvalidState { call: "resolve_datagram", state });
        }
        let port = self.port_at(from)?;
        let id = self.add_datagram(DatagramPhase::Resolved(peer, deadline), port);
        if !peer.ip().is_multicast() {
            self.hub.deadlines.set(Owner::Endpoint(id.0), deadline);
        }
        self.hub.raise(id.0, CmEventKind::Resolved { device: DEVICE });
        Ok(id)
    }

    fn join(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let of = self.datagram(id.0)?;
        let joined = of.groups.len();
        let state = match of.phase {
            DatagramPhase::Bound | DatagramPhase::Resolved(..) if of.qp.is_none() => Some("without a queue pair"),
            DatagramPhase::Bound | DatagramPhase::Resolved(..) if !group.is_multicast() => {
                Some("given an address that is no group")
            }
            DatagramPhase::Bound | DatagramPhase::Resolved(..)
                if of.groups.iter().any(|(in_it, _)| *in_it == group) =>
            {
                Some("in that group")
            }
            DatagramPhase::Bound | DatagramPhase::Resolved(..) => None,
            _ => Some(of.name()),
        };
        if let Some(state) = state {
            return Err(TransportError::InvalidState { call: "join", state });
        }
        if joined >= GROUPS {
            let (value, range) = (joined as u64 + 1, "at most 64");
            return Err(TransportError::OutOfRange { what: "multicast groups of an id", value, range });
        }
        let UdpPort { address: at, interface, .. } = self.datagrams.ports.get(of.port).ok_or(STALE_ID)?;
        let (at, interface) = (*at, interface.index);
        let address = SocketAddr::new(group, self.hub.config.roce.group_port);
        let port = match self.datagrams.group(group, at.ip(), interface) {
            Some(port) => port,
            None => self.open_port(address, Some(at))?,
        };
        self.use_port(port);
        if let Some(UdpPort { kind: PortKind::Group { ids, .. }, .. }) = self.datagrams.ports.get_mut(port) {
            ids.push(id.0);
        }
        if let Some(of) = self.datagram_mut(id.0) {
            of.groups.push((group, port));
        }
        let queue_key = self.hub.config.roce.queue_key;
        let peer = DatagramPeer { route: self.route_to(address), qp_number: GROUP, queue_key };
        self.hub.raise(id.0, CmEventKind::Joined { group, peer });
        Ok(())
    }

    fn leave(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        self.datagram(id.0)?;
        let of = self.datagram_mut(id.0).ok_or(STALE_ID)?;
        let place = of.groups.iter().position(|(in_it, _)| *in_it == group);
        let place = place.ok_or(TransportError::InvalidState { call: "leave", state: "not in that group" })?;
        let (_, port) = of.groups.swap_remove(place);
        self.hub.events.retain(|event| {
            event.id != id || !matches!(event.kind, CmEventKind::Joined { group: joined, .. } if joined == group)
        });
        self.leave_group(id.0, port);
        Ok(())
    }

    fn qp_number(&self, qp: QpId) -> Result<u32> {
        self.datagram(qp.0).ok().and_then(|id| id.qp.as_ref()).map(|qp| qp.number).ok_or(STALE_QP)
    }

    fn create_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId> {
        Self::is_device(device)?;
        if !route.is_global {
            return Err(TransportError::Unsupported { provider: NAME, feature: "routes without an IP address" });
        }
        let port = if route.lid == 0 { self.hub.config.roce.port.unwrap_or(ROCE_PORT) } else { route.lid };
        let address = SocketAddr::new(Ipv6Addr::from(route.gid).to_canonical(), port);
        Ok(AddressId(self.datagrams.addresses.insert(address)))
    }

    fn destroy_address(&mut self, address: AddressId) -> Result<()> {
        self.datagrams.addresses.remove(address.0).map(drop).ok_or(TransportError::Stale { object: "address" })
    }

    fn route_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
        self.datagram(id.0)?;
        match frame::parties(header) {
            Some((from, to)) if received.source.has_route_header() && !to.is_multicast() => {
                Ok(self.route_to(SocketAddr::new(from, received.source.lid)))
            }
            _ => Err(TransportError::io(
                "finding the route back of a datagram to a group",
                std::io::ErrorKind::InvalidInput.into(),
            )),
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "sockets of the system are driven by its clock")]
mod tests;
