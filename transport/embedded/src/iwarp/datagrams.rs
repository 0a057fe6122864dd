//! The connection-manager ids for datagrams, and their calls: bind, listen, query, reply, and join
//! a multicast group. The packets themselves are processed in `ports`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Instant;

use super::NAME;
use super::hub::{Hub, Owner, STALE_ID, STALE_QP};
use super::net::{Net, NetChannel, SocketId};
use super::ports::{Ports, route_to};
use crate::roce::frame;
use crate::roce::id::{DatagramId, DatagramPhase, GROUPS, PendingQuery};
use crate::roce::mad::{self, SidrRequest, SidrStatus};
use crate::roce::packet::GROUP;
use crate::roce::port::{PortKind, UdpPort};
use crate::roce::queue_pair::DatagramQueuePair;
use crate::roce::{ROCE_PORT, RoceConfig};
use crate::soft::completions::Completions;
use crate::soft::receive_queue::ReceiveQueue;
use rdma_transport::cm::{CmEventKind, CmId, ConnectFailure, ListenParam, ReadDepth};
use rdma_transport::datagram::{AddressId, DatagramPeer, GRH_LEN, Route};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::qp::{QpAttr, QpId};
use rdma_transport::slab::Key;
use rdma_transport::wc::WorkCompletion;

/// The range of service ports for listeners that the program starts at port 0, if
/// `RoceConfig::port` is set. Such a listener gets the lowest service port that is free.
const DYNAMIC: std::ops::RangeInclusive<u16> = 49152..=65535;

impl Ports {
    fn id(&self, key: Key) -> Result<&DatagramId> {
        self.ids.get(key).ok_or(STALE_ID)
    }

    /// Opens a UDP port. Without `at`, the port is bound to the local address `address`. With `at`,
    /// the port joins the multicast group `address` on the interface with the address `at`.
    fn open_port<N: Net>(&mut self, hub: &mut Hub<N>, address: SocketAddr, at: Option<SocketAddr>) -> Result<Key> {
        let listen = |source| TransportError::Listen { address, source };
        let interface = hub.net.interface(at.unwrap_or(address)).map_err(listen)?;
        let (socket, kind) = match at.map(|at| at.ip()) {
            Some(member) => {
                let socket = hub.net.open_group(address, member, interface).map_err(listen)?;
                (socket, PortKind::Group { member, ids: Vec::new() })
            }
            None => (hub.net.open_packets(address).map_err(listen)?, PortKind::Address { services: BTreeMap::new() }),
        };
        let bound = hub.net.local_address(socket);
        let bound = bound.inspect_err(|_| hub.net.close(socket, false)).map_err(listen)?;
        let key = self.tables.add(UdpPort::new(socket.0, bound, interface, kind));
        hub.own(socket, Owner::Port(key));
        Ok(key)
    }

    /// Increments the number of ids that use a port.
    pub(super) fn use_port(&mut self, key: Key) {
        if let Some(port) = self.tables.ports.get_mut(key) {
            port.users += 1;
        }
    }

    /// Decrements the number of ids that use a port. Closes the port if no id is left.
    fn leave_port<N: Net>(&mut self, hub: &mut Hub<N>, key: Key) {
        let Some(port) = self.tables.ports.get_mut(key) else { return };
        port.users = port.users.saturating_sub(1);
        if port.users == 0 {
            let socket = SocketId(port.socket);
            self.tables.ports.remove(key);
            hub.close(socket, false);
        }
    }

    /// Returns the UDP port that the ids at a local address share. Opens the port if necessary.
    /// Ignores the port number in `local`.
    fn port_at<N: Net>(&mut self, hub: &mut Hub<N>, mut local: SocketAddr) -> Result<Key> {
        let common = hub.config.roce.port;
        match self.tables.shared(local, common) {
            Some(port) => Ok(port),
            None => {
                local.set_port(common.unwrap_or(0));
                self.open_port(hub, local, None)
            }
        }
    }

    /// Adds an id for datagrams. `phase` is the phase of the id. `port` is the UDP port with which
    /// the id sends. The caller names the id afterwards ([`Ports::name`]).
    pub(super) fn add(&mut self, phase: DatagramPhase, port: Key) -> Key {
        self.use_port(port);
        self.ids.insert(DatagramId::new(phase, port))
    }

    /// Stores the connection-manager id that the program uses for the datagram id `key`.
    pub(super) fn name(&mut self, key: Key, id: CmId) {
        if let Some(datagrams) = self.ids.get_mut(key) {
            datagrams.id = id;
        }
    }

    /// Returns true if an id has no queue pair yet.
    ///
    /// # Errors
    /// Returns an error if the id may not have a queue pair in its phase.
    pub(super) fn may_have_queue_pair(&self, key: Key) -> Result<bool> {
        let id = self.id(key)?;
        if !id.may_have_queue_pair() {
            return Err(TransportError::InvalidState { call: "create_qp", state: id.name() });
        }
        Ok(id.qp.is_none())
    }

    pub(super) fn address_of(&self, key: Key) -> Option<SocketAddr> {
        let id = self.ids.get(key)?;
        let mut address = self.tables.ports.get(id.port)?.address;
        if let DatagramPhase::Listening(service) = id.phase {
            address.set_port(service);
        }
        Some(address)
    }

    /// Creates the queue pair of an id. The caller has reserved entries on the completion queues.
    /// On failure, this function releases these entries.
    pub(super) fn add_queue_pair<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, attr: &QpAttr) -> Result<()> {
        let mut salt = [0];
        (hub.entropy)(&mut salt);
        let name = QpId(self.id(key)?.id.0);
        let made = self.make_queue_pair(key, name, attr, salt[0]);
        match (made, self.ids.get_mut(key)) {
            (Ok(queue_pair), Some(id)) => id.qp = Some(queue_pair),
            (made, _) => {
                Completions::new(name, *attr).release(&mut ReceiveQueue::new(0), &mut hub.resources);
                return made.map(drop);
            }
        }
        Ok(())
    }

    fn make_queue_pair(&mut self, key: Key, name: QpId, attr: &QpAttr, salt: u8) -> Result<Box<DatagramQueuePair>> {
        let port = self.tables.ports.get(self.id(key)?.port).ok_or(STALE_ID)?;
        let full = TransportError::OutOfRange {
            what: "another datagram queue pair",
            value: 1,
            range: "0: all numbers are in use",
        };
        let number = self.tables.numbers.assign(key, salt).ok_or(full)?;
        Ok(Box::new(DatagramQueuePair::new(name, attr, number, port)))
    }

    /// Ends the query that an id has sent, or rejects the query for which the id was created.
    /// Flushes the work queues of the id.
    pub(super) fn end_datagrams<N: Net>(&mut self, hub: &mut Hub<N>, key: Key) -> Result<()> {
        match &self.id(key)?.phase {
            DatagramPhase::Listening(_) => {
                return Err(TransportError::InvalidState { call: "disconnect", state: "listening" });
            }
            DatagramPhase::Offered(..) => self.reject_query(hub, key, &[])?,
            DatagramPhase::Querying(_) => {
                let failure = ConnectFailure::System("disconnected here while connecting".into());
                self.fail_datagram(hub, key, Some(failure));
            }
            _ => self.fail_datagram(hub, key, None),
        }
        if let Some(qp) = self.ids.get_mut(key).and_then(|id| id.qp.as_mut()) {
            qp.flush(&mut hub.resources.cqs);
        }
        Ok(())
    }

    /// Releases everything that an id owns, before the id is destroyed. If the id was created for a
    /// query that the program has not answered, rejects the query.
    pub(super) fn remove<N: Net>(&mut self, hub: &mut Hub<N>, key: Key) {
        let Some(mut id) = self.ids.remove(key) else { return };
        hub.deadlines.clear(Owner::Datagram(key));
        self.forget_query(key, &id.phase);
        if let DatagramPhase::Offered(query, to) = &id.phase {
            let reply = query.reply(SidrStatus::Rejected, &[]).emit();
            self.send_mad(hub, id.port, *to, &reply);
        }
        for (_, port) in std::mem::take(&mut id.groups) {
            self.leave_group(hub, key, port);
        }
        if let Some(qp) = &mut id.qp {
            self.tables.numbers.remove(qp.number);
            qp.release(&mut hub.resources);
        }
        if let (DatagramPhase::Listening(service), Some(port)) = (&id.phase, self.tables.ports.get_mut(id.port)) {
            if let PortKind::Address { services } = &mut port.kind {
                services.remove(service);
            }
        }
        self.leave_port(hub, id.port);
    }

    fn leave_group<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, port: Key) {
        if let Some(UdpPort { kind: PortKind::Group { ids, .. }, .. }) = self.tables.ports.get_mut(port) {
            ids.retain(|member| *member != key);
        }
        self.leave_port(hub, port);
    }

    /// Removes the query of an id from the tables. `phase` is the phase that the id leaves.
    fn forget_query(&mut self, key: Key, phase: &DatagramPhase) {
        match phase {
            DatagramPhase::Querying(pending) => {
                self.tables.queries.remove(&pending.query.request);
            }
            DatagramPhase::Offered(query, to) => {
                self.tables.unanswered -= 1;
                self.tables.received_queries.remove(&(*to, query.request));
            }
            DatagramPhase::Replied(request, to, _) => {
                self.tables.received_queries.remove(&(*to, *request));
            }
            _ => {}
        }
        self.tables.fresh.retain(|fresh| *fresh != key);
    }

    /// Changes the phase of an id and clears its deadline. Returns the previous phase.
    pub(super) fn set_phase<N: Net>(
        &mut self,
        hub: &mut Hub<N>,
        key: Key,
        phase: DatagramPhase,
    ) -> Option<DatagramPhase> {
        hub.deadlines.clear(Owner::Datagram(key));
        let before = std::mem::replace(&mut self.ids.get_mut(key)?.phase, phase);
        self.forget_query(key, &before);
        Some(before)
    }

    /// Moves an id to the phase `Dead`. If `failure` is given, raises an event that reports it.
    pub(super) fn fail_datagram<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, failure: Option<ConnectFailure>) {
        self.set_phase(hub, key, DatagramPhase::Dead);
        if let Some(failure) = failure {
            self.raise(hub, key, CmEventKind::ConnectFailed(failure));
        }
    }

    /// Queries a peer for the number of the queue pair that receives datagrams at its address.
    pub(super) fn query_peer<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, private_data: &[u8]) -> Result<()> {
        let id = self.id(key)?;
        let DatagramPhase::Resolved(peer, until) = id.phase else {
            return Err(TransportError::InvalidState { call: "connect", state: id.name() });
        };
        check_private_data(private_data, mad::REQUEST_DATA)?;
        let from = self.tables.ports.get(id.port).ok_or(STALE_ID)?.address;
        let mut bytes = [0; 12];
        (hub.entropy)(&mut bytes);
        let [a, b, c, d, transaction @ ..] = bytes;
        let mut request = u32::from_ne_bytes([a, b, c, d]);
        while self.tables.queries.contains_key(&request) {
            request = request.wrapping_add(1);
        }
        let mut data = [0; mad::REQUEST_DATA];
        data[..private_data.len()].copy_from_slice(private_data);
        let transaction = u64::from_ne_bytes(transaction);
        let query = SidrRequest { transaction, request, service: peer.port(), from, to: peer.ip(), data };
        let mut to = peer;
        to.set_port(hub.config.roce.port.unwrap_or(peer.port()));
        self.set_phase(
            hub,
            key,
            DatagramPhase::Querying(Box::new(PendingQuery { query, to, until, wait: super::ports::FIRST_WAIT })),
        );
        hub.deadlines.set(Owner::Datagram(key), until);
        self.tables.queries.insert(request, key);
        self.tables.fresh.push(key);
        hub.net.wake(NetChannel::Completion);
        self.send_query(hub, key);
        Ok(())
    }

    /// Accepts the query of the id `query_key`. The reply names the queue pair of the id `owner`.
    /// The peer sends its datagrams to that queue pair.
    pub(super) fn reply_to_query<N: Net>(
        &mut self,
        hub: &mut Hub<N>,
        query_key: Key,
        owner: Key,
        call: &'static str,
        private_data: &[u8],
    ) -> Result<()> {
        let id = self.id(query_key)?;
        let DatagramPhase::Offered(query, to) = &id.phase else {
            return Err(TransportError::InvalidState { call, state: id.name() });
        };
        check_private_data(private_data, mad::REPLY_DATA)?;
        let without = TransportError::InvalidState { call, state: "without a queue pair" };
        let number = self.id(owner)?.qp.as_ref().ok_or(without)?.number;
        let status = SidrStatus::Known { number, queue_key: hub.config.roce.queue_key };
        let (request, to, port) = (query.request, *to, id.port);
        let reply = query.reply(status, private_data).emit();
        self.send_mad(hub, port, to, &reply);
        self.set_phase(hub, query_key, DatagramPhase::Replied(request, to, Box::new(reply)));
        self.tables.received_queries.insert((to, request), query_key);
        if query_key == owner {
            let (private_data, read_depth) = (Box::default(), ReadDepth::default());
            self.raise(hub, query_key, CmEventKind::Established { private_data, read_depth });
        }
        Ok(())
    }

    /// Rejects the query for which the id `key` was created.
    pub(super) fn reject_query<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, private_data: &[u8]) -> Result<()> {
        let id = self.id(key)?;
        let DatagramPhase::Offered(query, to) = &id.phase else {
            return Err(TransportError::InvalidState { call: "reject", state: id.name() });
        };
        check_private_data(private_data, mad::REPLY_DATA)?;
        let (reply, port, to) = (query.reply(SidrStatus::Rejected, private_data).emit(), id.port, *to);
        self.send_mad(hub, port, to, &reply);
        self.fail_datagram(hub, key, None);
        Ok(())
    }
}

fn is_of_a_device(address: SocketAddr) -> Result<()> {
    if address.ip().is_unspecified() || address.ip().is_multicast() {
        let reason = format!("{} is on none: datagrams need the address of a device", address.ip());
        return Err(TransportError::NoDevice { reason });
    }
    Ok(())
}

fn is_link_local(address: SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local())
}

fn check_private_data(private_data: &[u8], max: usize) -> Result<()> {
    let len = private_data.len();
    if len > max { Err(TransportError::PrivateDataTooLong { provider: NAME, len, max }) } else { Ok(()) }
}

impl Ports {
    pub(super) fn bind<N: Net>(&mut self, hub: &mut Hub<N>, address: SocketAddr) -> Result<(Key, u32)> {
        is_of_a_device(address)?;
        let port = match (hub.config.roce.port, address.port()) {
            (None, 1..) => self.open_port(hub, address, None)?,
            _ => self.port_at(hub, address)?,
        };
        let max = self.tables.ports.get(port).ok_or(STALE_ID)?.max_payload();
        Ok((self.add(DatagramPhase::Bound, port), max))
    }

    pub(super) fn listen<N: Net>(
        &mut self,
        hub: &mut Hub<N>,
        address: SocketAddr,
        options: &ListenParam,
    ) -> Result<Key> {
        is_of_a_device(address)?;
        options.note_ignored(NAME)?;
        let common = hub.config.roce.port;
        let key = match common {
            None => self.open_port(hub, address, None)?,
            Some(_) => self.port_at(hub, address)?,
        };
        let Some(UdpPort { address: bound, kind: PortKind::Address { services }, users, .. }) =
            self.tables.ports.get_mut(key)
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
        let id = self.add(DatagramPhase::Listening(service), key);
        if let Some(UdpPort { kind: PortKind::Address { services }, .. }) = self.tables.ports.get_mut(key) {
            services.insert(service, id);
        }
        Ok(id)
    }

    pub(super) fn resolve<N: Net>(
        &mut self,
        hub: &mut Hub<N>,
        peer: SocketAddr,
        from: Option<SocketAddr>,
        deadline: Instant,
    ) -> Result<Key> {
        let from = match from {
            Some(from) => from,
            None => {
                let source = hub.net.source(peer);
                let source = source.map_err(|source| TransportError::io("finding a route to the peer", source))?;
                // The local address is on the interface that leads to the peer, so the scope in the
                // peer's address also applies to the local address.
                let mut from = peer;
                from.set_ip(source);
                from
            }
        };
        is_of_a_device(from)?;
        if from.is_ipv4() != peer.is_ipv4() {
            return Err(TransportError::InvalidState { call: "resolve_datagram", state: "from another version of IP" });
        }
        // The routes to peers have no scope. Only a socket at a link-local address knows the
        // interface of a link-local peer.
        if is_link_local(peer) && !is_link_local(from) {
            let state = "to a link-local address, from another kind of address";
            return Err(TransportError::InvalidState { call: "resolve_datagram", state });
        }
        let port = self.port_at(hub, from)?;
        let key = self.add(DatagramPhase::Resolved(peer, deadline), port);
        if !peer.ip().is_multicast() {
            hub.deadlines.set(Owner::Datagram(key), deadline);
        }
        Ok(key)
    }

    pub(super) fn join<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, group: IpAddr) -> Result<()> {
        let of = self.id(key)?;
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
        let UdpPort { address: at, interface, .. } = self.tables.ports.get(of.port).ok_or(STALE_ID)?;
        let (at, interface) = (*at, interface.index);
        let address = SocketAddr::new(group, hub.config.roce.group_port);
        let port = match self.tables.group(group, at.ip(), interface) {
            Some(port) => port,
            None => self.open_port(hub, address, Some(at))?,
        };
        self.use_port(port);
        if let Some(UdpPort { kind: PortKind::Group { ids, .. }, .. }) = self.tables.ports.get_mut(port) {
            ids.push(key);
        }
        if let Some(of) = self.ids.get_mut(key) {
            of.groups.push((group, port));
        }
        let queue_key = hub.config.roce.queue_key;
        let peer = DatagramPeer { route: route_to(address), qp_number: GROUP, queue_key };
        self.raise(hub, key, CmEventKind::Joined { group, peer });
        Ok(())
    }

    pub(super) fn leave<N: Net>(&mut self, hub: &mut Hub<N>, key: Key, group: IpAddr) -> Result<()> {
        let of = self.ids.get_mut(key).ok_or(STALE_ID)?;
        let joined = of.groups.iter().position(|(in_it, _)| *in_it == group);
        let joined = joined.ok_or(TransportError::InvalidState { call: "leave", state: "not in that group" })?;
        let (id, (_, port)) = (of.id, of.groups.swap_remove(joined));
        hub.events.retain(|event| {
            event.id != id || !matches!(event.kind, CmEventKind::Joined { group: joined, .. } if joined == group)
        });
        self.leave_group(hub, key, port);
        Ok(())
    }

    pub(super) fn qp_number(&self, key: Key) -> Result<u32> {
        self.id(key).ok().and_then(|id| id.qp.as_ref()).map(|qp| qp.number).ok_or(STALE_QP)
    }

    pub(super) fn create_address(&mut self, config: &RoceConfig, route: &Route) -> Result<AddressId> {
        if !route.is_global {
            return Err(TransportError::Unsupported { provider: NAME, feature: "routes without an IP address" });
        }
        let port = if route.lid == 0 { config.port.unwrap_or(ROCE_PORT) } else { route.lid };
        let address = SocketAddr::new(Ipv6Addr::from(route.gid).to_canonical(), port);
        Ok(AddressId(self.tables.addresses.insert(address)))
    }

    pub(super) fn destroy_address(&mut self, address: AddressId) -> Result<()> {
        self.tables.addresses.remove(address.0).map(drop).ok_or(TransportError::Stale { object: "address" })
    }
}

/// Returns the route back to the sender of a received datagram. `header` is the route header in
/// front of its payload.
pub(super) fn route_back(received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
    match frame::parties(header) {
        Some((from, to)) if received.source.has_route_header() && !to.is_multicast() => {
            Ok(route_to(SocketAddr::new(from, received.source.lid)))
        }
        _ => Err(TransportError::io(
            "finding the route back of a datagram to a group",
            std::io::ErrorKind::InvalidInput.into(),
        )),
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "sockets of the system are driven by its clock")]
mod tests;
