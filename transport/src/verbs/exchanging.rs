//! Connecting by exchange: what the calls of a program do. `streams` has what comes from peers.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use super::NAME;
use super::capabilities::port_attr;
use super::core::{Known, STALE_ID, Verbs};
use super::entry::{Exchanged, Id, State};
use super::gid::{self, Place};
use super::id::{RawId, Terms};
use super::link::{Door, Link, Moving, adopt};
use super::status::connect_failure;
use super::transitions::{self, Agreed};
use crate::cm::{
    CmEventKind, CmId, ConnectFailure, Detached, ExchangeOptions, ListenOptions, PathOptions, ReadDepth, Source,
};
use crate::error::{Error, Result};
use crate::exchange::message::{Endpoint, Network, Refusal};
use crate::provider::DeviceId;
use crate::slab::Key;

/// The time after which a request is sent again if nobody says otherwise, as the connection manager has it: 2 s.
const ACK_TIMEOUT: u8 = 19;
/// Places of connections that are remembered.
const KNOWN: usize = 16;

impl Verbs {
    // Listening.

    pub(super) fn open_door(
        &mut self,
        address: SocketAddr,
        options: &ListenOptions,
        exchange: &ExchangeOptions,
    ) -> Result<CmId> {
        let ListenOptions { type_of_service, ack_timeout, .. } = *options;
        PathOptions { type_of_service, ack_timeout, source: Source::Any }.check()?;
        if exchange.device.is_some() {
            // What the options name is there, or this is the time to say so.
            self.place_for(None, exchange)?;
        }
        let listen = |source| Error::Listen { address, source };
        let door = Door::open(address, options, exchange).map_err(listen)?;
        let mut id = Id::new(Arc::new(RawId::exchanged(0, door.address(), None)), State::Listening);
        id.exchange = Some(Exchanged::Door(Box::new(door)));
        let key = self.add(id);
        let registry = self.watch.poll.registry();
        let watched = self.ids.get_mut(key).and_then(Id::door_mut).map_or(Ok(()), |door| door.watch(registry, key));
        if let Err(error) = watched {
            self.discard(key);
            return Err(listen(error));
        }
        Ok(CmId(key))
    }

    /// Takes a stream that the program has accepted.
    pub(super) fn let_in(&mut self, listener: CmId, stream: OwnedFd, now: Instant) -> Result<()> {
        let door = self.id_mut(listener)?;
        if door.door_mut().is_none() {
            return Err(Error::InvalidState { call: "take_stream", state: door.state.name() });
        }
        let socket = adopt(stream)?;
        let arrived = self.arrive(Link::passive(socket, listener.0), now);
        self.connector.wake();
        arrived.map_err(|source| Error::io("watching a stream", source))
    }

    // Connecting.

    /// Where a connection with this address of this host on its stream has its queue pair.
    pub(super) fn place_for(&mut self, source: Option<SocketAddr>, options: &ExchangeOptions) -> Result<Place> {
        let root = &self.exchanges.sysfs;
        let same = |known: &&Known| known.0 == source && known.1 == *options;
        if let Some((.., place)) = self.exchanges.known.iter().find(same).filter(|known| known.2.holds(root)) {
            return Ok(place.clone());
        }
        self.exchanges.known.retain(|known| !same(&known));
        let place = gid::choose(root, source, options)?;
        if self.exchanges.known.len() >= KNOWN {
            self.exchanges.known.pop_front();
        }
        self.exchanges.known.push_back((source, options.clone(), place.clone()));
        Ok(place)
    }

    /// Chooses port and GID for a connection of this side. The stream is connected together with the queue pair.
    pub(super) fn resolve_link(
        &mut self,
        mut link: Link,
        path: &PathOptions,
        exchange: &ExchangeOptions,
        deadline: Instant,
    ) -> Result<CmId> {
        path.check()?;
        let mut exchange = exchange.clone();
        match &path.source {
            Source::Any => {}
            Source::Address(address) => link.from = Some(*address),
            Source::Device { name, port } => {
                exchange.device.get_or_insert_with(|| name.clone());
                exchange.port = exchange.port.or(*port);
            }
        }
        let unreachable = |source| Error::io("finding the way to the peer", source);
        let local = match (link.to, link.from) {
            (Some(_), Some(from)) => Some(SocketAddr::new(from, 0)),
            (Some(to), None) => Some(gid::source_for(to).map_err(unreachable)?),
            (None, _) => link.local_address(),
        };
        // The port is the system's choice, and no part of the question.
        let source = local.map(|mut local| {
            local.set_port(0);
            local
        });
        let place = self.place_for(source, &exchange)?;
        let device = self.device_for(&place)?;
        self.check_port(Some(device), place.port)?;
        let peer = link.to.or_else(|| link.peer_address());
        let mut id = Id::new(Arc::new(RawId::exchanged(place.port, local, peer)), State::Resolved);
        id.deadline = Some(deadline);
        (link.type_of_service, link.ack_timeout, link.place) = (path.type_of_service, path.ack_timeout, Some(place));
        id.exchange = Some(Exchanged::Link(Box::new(link)));
        let key = self.add(id);
        self.put_on(key, device);
        self.set_due(key, Some(deadline));
        self.push(key, CmEventKind::Resolved { device });
        self.connector.wake();
        Ok(CmId(key))
    }

    /// Notes the device of an id by exchange.
    pub(super) fn put_on(&mut self, key: Key, device: DeviceId) {
        let entry = &mut self.devices[device.0 as usize];
        let Some(id) = self.ids.get_mut(key) else { return };
        if let Some(open) = &entry.raw {
            id.raw.set_device(open);
        }
        id.device = Some(device);
        entry.ids += 1;
    }

    /// What this side tells the peer.
    fn endpoint(&mut self, id: CmId, terms: &Terms) -> Result<Endpoint> {
        let mut octets = [0; 4];
        if let Some(entropy) = &mut self.exchanges.entropy {
            entropy(&mut octets);
        }
        let entry = self.id(id)?;
        let (Some(link), Some(qp), Some(device)) = (entry.link(), &entry.qp, entry.device) else {
            return Err(STALE_ID);
        };
        let Some(place) = &link.place else { return Err(STALE_ID) };
        let port = port_attr(self.devices[device.0 as usize].live()?.context(), place.port)?;
        let narrow = |depth: u16| u8::try_from(depth).unwrap_or(u8::MAX);
        Ok(Endpoint {
            network: place.network,
            mtu: port.active_mtu.clamp(1, 5) as u8,
            ack_timeout: link.ack_timeout.unwrap_or(ACK_TIMEOUT),
            retry_count: terms.retry_count,
            rnr_retry_count: terms.rnr_retry_count,
            traffic_class: link.type_of_service.unwrap_or(0),
            responder_resources: narrow(terms.read_depth.responder_resources),
            initiator_depth: narrow(terms.read_depth.initiator_depth),
            lid: if place.network == Network::InfiniBand { port.lid } else { 0 },
            qp_number: qp.number,
            psn: u32::from_be_bytes(octets) & 0xff_ffff,
            gid: place.gid,
        })
    }

    pub(super) fn connect_by_exchange(&mut self, id: CmId, terms: &Terms, min_rnr_timer: u8) -> Result<()> {
        let own = self.endpoint(id, terms)?;
        let registry = self.watch.poll.registry();
        let entry = self.ids.get_mut(id.0).ok_or(STALE_ID)?;
        entry.min_rnr_timer = min_rnr_timer;
        entry.state = State::Connecting;
        let Some(link) = entry.link_mut() else { return Err(STALE_ID) };
        (link.own, link.psn) = (Some(own), own.psn);
        link.conversation.ask(own, &terms.private_data);
        if let Err(error) = link.open(registry, id.0) {
            self.give_up(id.0, connect_failure(&error));
            self.connector.wake();
        }
        Ok(())
    }

    /// What both sides use, from what each has told the other. `asks`: this side was the first to do so, and decides.
    fn agreed(entry: &Id, own: &Endpoint, peer: &Endpoint, asks: bool) -> Agreed {
        let first = if asks { own } else { peer };
        // What one side has outstanding is what the other one serves.
        let read_depth = ReadDepth {
            responder_resources: own.responder_resources.min(peer.initiator_depth).into(),
            initiator_depth: own.initiator_depth.min(peer.responder_resources).into(),
        };
        Agreed {
            mtu: own.mtu.min(peer.mtu),
            traffic_class: first.traffic_class,
            ack_timeout: own.ack_timeout,
            retry_count: first.retry_count,
            min_rnr_timer: entry.min_rnr_timer,
            read_depth,
        }
    }

    /// Has the queue pair receive from the peer and send to it. Returns what was agreed on.
    pub(super) fn bring_up(&mut self, key: Key, own: &Endpoint, peer: &Endpoint, asks: bool) -> Result<Agreed> {
        let entry = self.ids.get_mut(key).ok_or(STALE_ID)?;
        let agreed = Self::agreed(entry, own, peer, asks);
        let Some(place) = entry.link().and_then(|link| link.place.as_ref()) else { return Err(STALE_ID) };
        entry.raw.modify(transitions::ready_to_receive(place, peer, &agreed))?;
        entry.raw.modify(transitions::ready_to_send(own.psn, peer, &agreed))?;
        entry.read_depth = agreed.read_depth;
        Ok(agreed)
    }

    pub(super) fn accept_by_exchange(
        &mut self,
        id: CmId,
        terms: &Terms,
        min_rnr_timer: u8,
        now: Instant,
    ) -> Result<()> {
        let mut own = self.endpoint(id, terms)?;
        let entry = self.ids.get_mut(id.0).ok_or(STALE_ID)?;
        entry.min_rnr_timer = min_rnr_timer;
        let Some(peer) = entry.link().and_then(|link| link.peer) else { return Err(STALE_ID) };
        if entry.link().is_some_and(|link| link.ack_timeout.is_none()) {
            own.ack_timeout = peer.ack_timeout;
        }
        let agreed = self.bring_up(id.0, &own, &peer, false)?;
        // The peer is told what this side uses.
        (own.mtu, own.traffic_class, own.retry_count) = (agreed.mtu, agreed.traffic_class, agreed.retry_count);
        self.answered(id.0);
        let entry = self.ids.get_mut(id.0).ok_or(STALE_ID)?;
        entry.state = State::Accepting;
        if let Some(link) = entry.link_mut() {
            link.own = Some(own);
            link.conversation.accept(own, &terms.private_data);
            if let Err(error) = link.flush() {
                log::debug!("an answer to a peer that is gone: {error}");
            }
        }
        self.await_ready(id.0, now);
        Ok(())
    }

    /// Refuses a request, whose id is gone afterwards.
    pub(super) fn refuse_exchange(&mut self, key: Key, refusal: Refusal, private_data: &[u8]) {
        if let Some(link) = self.ids.get_mut(key).and_then(Id::link_mut) {
            link.conversation.refuse(refusal, private_data);
        }
        self.discard(key);
    }

    // Ending.

    pub(super) fn disconnect_exchange(&mut self, id: CmId) -> Result<()> {
        let entry = self.id_mut(id)?;
        match entry.state {
            State::Disconnecting { .. } => return Ok(()),
            State::Listening => return Err(Error::InvalidState { call: "disconnect", state: entry.state.name() }),
            _ => {}
        }
        if entry.state == State::Offered {
            self.answered(id.0);
        }
        let entry = self.id_mut(id)?;
        let was = std::mem::replace(&mut entry.state, State::Disconnecting { flush_at: None });
        // What has completed is at the peer, so nothing is lost that is flushed now; the peer's own completions are in its queue
        // before the goodbye is.
        if let Err(error) = entry.raw.flush() {
            log::debug!("{error}");
        }
        if let Some(link) = entry.link_mut() {
            if was == State::Offered {
                link.conversation.refuse(Refusal::Program, &[]);
            }
            link.conversation.part();
            if let Err(error) = link.flush() {
                log::debug!("a goodbye that nobody gets: {error}");
            }
        }
        self.set_due(id.0, None);
        Ok(())
    }

    /// Ends what an id had for an exchange; the id is out of the table, and its queue pair is destroyed.
    pub(super) fn end_exchange(&mut self, key: Key, state: State, exchange: Exchanged) {
        let registry = self.watch.poll.registry();
        match exchange {
            Exchanged::Door(door) => {
                if let Some(due) = door.due {
                    self.exchanges.due.remove(&(due, key));
                }
            }
            Exchanged::Link(mut link) => {
                link.close(registry);
                if let Some(due) = link.due {
                    self.exchanges.due.remove(&(due, key));
                }
                if let Some(ticket) = link.ticket {
                    self.exchanges.newcomers.remove(ticket);
                }
                let door = link.listener.filter(|_| state == State::Offered);
                if let Some(door) = door.and_then(|door| self.ids.get_mut(door)).and_then(Id::door_mut) {
                    door.waiting = door.waiting.saturating_sub(1);
                }
            }
        }
    }

    /// Ends an attempt of this side.
    pub(super) fn give_up(&mut self, key: Key, failure: ConnectFailure) {
        let registry = self.watch.poll.registry();
        let Some(id) = self.ids.get_mut(key) else { return };
        id.state = State::Dead;
        if let Some(link) = id.link_mut() {
            link.close(registry);
        }
        self.set_due(key, None);
        self.push(key, CmEventKind::ConnectFailed(failure));
    }

    // Handing over.

    /// Takes a request out, with its stream.
    pub(super) fn hand_out_stream(&mut self, id: CmId) -> Result<Detached> {
        let entry = self.id_mut(id)?;
        let Some(peer) = entry.raw.peer_address() else { return Err(STALE_ID) };
        let read_depth = entry.read_depth;
        self.answered(id.0);
        self.set_due(id.0, None);
        let Some(Exchanged::Link(mut link)) = self.id_mut(id)?.exchange.take() else {
            return Err(STALE_ID);
        };
        link.forget(self.watch.poll.registry());
        link.listener = None;
        self.discard(id.0);
        Ok(Detached::new(NAME, Moving { link: Some(link), peer, read_depth }))
    }

    /// Takes a request in.
    pub(super) fn take_in_stream(&mut self, mut moving: Moving) -> Result<(CmId, DeviceId)> {
        let Some(place) = moving.link.as_ref().and_then(|link| link.place.clone()) else { return Err(STALE_ID) };
        let device = self.device_for(&place)?;
        let Some(link) = moving.link.take() else { return Err(STALE_ID) };
        let raw = RawId::exchanged(place.port, link.local_address(), Some(moving.peer));
        let mut id = Id::new(Arc::new(raw), State::Offered);
        id.read_depth = moving.read_depth;
        id.exchange = Some(Exchanged::Link(link));
        let key = self.add(id);
        self.put_on(key, device);
        let registry = self.watch.poll.registry();
        let watched = self.ids.get(key).and_then(Id::link).map_or(Ok(()), |link| link.watch(registry, key));
        if let Err(error) = watched {
            self.discard(key);
            return Err(Error::io("watching a stream", error));
        }
        Ok((CmId(key), device))
    }
}
