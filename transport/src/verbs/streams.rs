//! Connecting by exchange: what comes from peers, and what is done when it does not come.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::core::Verbs;
use super::entry::{Exchanged, Id, State};
use super::id::RawId;
use super::link::{Heard, Link};
use super::status::connect_failure;
use crate::cm::{CmEventKind, CmId, ConnectFailure, DisconnectCause, ReadDepth};
use crate::exchange::conversation::Step;
use crate::exchange::message::{Endpoint, Refusal};
use crate::newcomers::Host;
use crate::slab::Key;

/// How long a peer has for its request, and for the word that it is up.
const PATIENCE: Duration = Duration::from_secs(10);
/// Peers that have sent no request, at most. At the limit, the host with the most of them loses its oldest.
const MAX_NEWCOMERS: usize = 256;
/// Streams that are let in before anything else is looked at.
const AT_ONCE: usize = 64;
/// How long nobody is let in after the system has had no descriptor.
const REST: Duration = Duration::from_millis(100);

impl Verbs {
    /// A stream or a listener may have something.
    pub(super) fn stream_ready(&mut self, key: Key, now: Instant) {
        let Some(id) = self.ids.get_mut(key) else { return };
        match &id.exchange {
            Some(Exchanged::Door(_)) => self.answer_door(key, now),
            Some(Exchanged::Link(_)) => self.hear(key),
            None => {}
        }
    }

    // Peers that come.

    fn answer_door(&mut self, key: Key, now: Instant) {
        for _ in 0..AT_ONCE {
            let Some(door) = self.ids.get_mut(key).and_then(Id::door_mut) else { return };
            if door.due.is_some_and(|until| now < until) {
                return;
            }
            match door.accept() {
                Ok(socket) => {
                    if let Err(error) = self.arrive(Link::passive(socket, key), now) {
                        log::debug!("a peer is not let in: {error}");
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
                    ) =>
                {
                    log::warn!("no peer is let in for a while: {error}");
                    self.set_due(key, Some(now + REST));
                    return;
                }
                // One that has gone meanwhile.
                Err(error) => log::debug!("accepting a stream: {error}"),
            }
        }
        // There may be more, which makes no edge.
        self.exchanges.due.insert((now, key));
    }

    /// Takes in a stream whose peer has sent nothing yet.
    pub(super) fn arrive(&mut self, link: Link, now: Instant) -> io::Result<()> {
        // A stream without an address is of this host.
        let host = Host::of(link.peer_address().map_or(IpAddr::from([127, 0, 0, 1]), |peer| peer.ip()));
        if self.exchanges.newcomers.len() >= MAX_NEWCOMERS {
            let gives_way = self.exchanges.newcomers.oldest(self.exchanges.newcomers.largest());
            if let Some(oldest) = gives_way {
                self.discard(oldest.id);
            }
        }
        let raw = RawId::exchanged(0, link.local_address(), link.peer_address());
        let mut id = Id::new(Arc::new(raw), State::Arriving);
        id.exchange = Some(Exchanged::Link(Box::new(link)));
        let key = self.add(id);
        let ticket = self.exchanges.newcomers.add(key, host, now);
        let registry = self.watch.poll.registry();
        let watched = self.ids.get_mut(key).and_then(Id::link_mut).map_or(Ok(()), |link| {
            link.ticket = Some(ticket);
            link.watch(registry, key)
        });
        if watched.is_err() {
            self.discard(key);
        } else {
            self.set_due(key, Some(now + PATIENCE));
        }
        watched
    }

    // What peers say.

    fn hear(&mut self, key: Key) {
        // A peer says six things at most.
        loop {
            let Some(link) = self.ids.get_mut(key).and_then(Id::link_mut) else { return };
            if let Err(error) = link.flush() {
                self.stream_ended(key, &error);
                return;
            }
            match link.hear() {
                Heard::Nothing => return,
                Heard::End(error) => {
                    self.stream_ended(key, &error);
                    return;
                }
                Heard::Step(step) => self.heard(key, step),
            }
        }
    }

    fn heard(&mut self, key: Key, step: Step) {
        match step {
            Step::Requested(peer, private_data) => self.requested(key, peer, private_data),
            Step::Accepted(peer, private_data) => self.accepted(key, &peer, private_data),
            Step::Refused(refusal, private_data) => self.refused(key, refusal, private_data),
            Step::Ready => self.up(key),
            Step::Goodbye => self.stream_ended(key, &io::Error::from_raw_os_error(libc::ECONNRESET)),
            Step::Violated(what) => self.violated(key, what),
        }
    }

    fn requested(&mut self, key: Key, peer: Endpoint, private_data: Box<[u8]>) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let Some(link) = id.link_mut() else { return };
        let (ticket, door) = (link.ticket.take(), link.listener);
        link.peer = Some(peer);
        let local = link.local_address();
        // A stream without an address has a peer that is known by what it says.
        let from = link.peer_address().unwrap_or_else(|| SocketAddr::new(gid_address(peer.gid), 0));
        let from = SocketAddr::new(from.ip().to_canonical(), from.port());
        if let Some(ticket) = ticket {
            self.exchanges.newcomers.remove(ticket);
        }
        self.set_due(key, None);
        // The listener may be gone, with which those go that have not been told to the program.
        let Some(listener) = door else { return self.discard(key) };
        let Some(door) = self.ids.get_mut(listener).and_then(Id::door_mut) else { return self.discard(key) };
        if door.waiting >= door.options.backlog.max(1) {
            return self.refuse_exchange(key, Refusal::Busy, &[]);
        }
        let (exchange, ack_timeout) = (door.exchange.clone(), door.options.ack_timeout);
        let source = local.map(|mut local| {
            local.set_port(0);
            local
        });
        let landed = self.place_for(source, &exchange).and_then(|place| {
            let device = self.device_for(&place)?;
            self.check_port(Some(device), place.port)?;
            Ok((place, device))
        });
        let (place, device) = match landed {
            Ok(landed) => landed,
            Err(error) => {
                log::warn!("{from} is refused: {error}");
                return self.refuse_exchange(key, Refusal::NoPort, &[]);
            }
        };
        if place.network != peer.network {
            log::warn!("{from} is refused: {}", Refusal::OtherNetwork.reason());
            return self.refuse_exchange(key, Refusal::OtherNetwork, &[]);
        }
        let read_depth = ReadDepth {
            responder_resources: peer.initiator_depth.into(),
            initiator_depth: peer.responder_resources.into(),
        };
        let Some(id) = self.ids.get_mut(key) else { return };
        id.raw = Arc::new(RawId::exchanged(place.port, local, Some(from)));
        (id.state, id.read_depth) = (State::Offered, read_depth);
        if let Some(link) = id.link_mut() {
            (link.place, link.ack_timeout) = (Some(place), ack_timeout);
        }
        self.put_on(key, device);
        if let Some(door) = self.ids.get_mut(listener).and_then(Id::door_mut) {
            door.waiting += 1;
        }
        let listener = CmId(listener);
        self.push(key, CmEventKind::ConnectRequest { listener, device, peer: from, private_data, read_depth });
    }

    /// A request waits for the program no longer.
    pub(super) fn answered(&mut self, key: Key) {
        let listener = self.ids.get_mut(key).and_then(Id::link_mut).and_then(|link| link.listener.take());
        if let Some(door) = listener.and_then(|listener| self.ids.get_mut(listener)).and_then(Id::door_mut) {
            door.waiting = door.waiting.saturating_sub(1);
        }
    }

    fn accepted(&mut self, key: Key, peer: &Endpoint, private_data: Box<[u8]>) {
        let Some(id) = self.ids.get_mut(key).filter(|id| id.state == State::Connecting) else { return };
        let Some(link) = id.link_mut() else { return };
        let Some(own) = link.own else { return };
        if own.network != peer.network {
            let why = Refusal::OtherNetwork.reason().into();
            return self.give_up(key, ConnectFailure::Protocol(why));
        }
        match self.bring_up(key, &own, peer, true) {
            Ok(agreed) => {
                let Some(id) = self.ids.get_mut(key) else { return };
                id.state = State::Established;
                if let Some(link) = id.link_mut() {
                    // What does not go out now goes out with the edge of the stream.
                    link.conversation.ready();
                }
                self.set_due(key, None);
                let read_depth = agreed.read_depth;
                self.push(key, CmEventKind::Established { private_data, read_depth });
            }
            Err(error) => {
                let why = format!("the device refuses the peer's queue pair: {error}");
                self.give_up(key, ConnectFailure::System(why));
            }
        }
    }

    fn refused(&mut self, key: Key, refusal: Refusal, private_data: Box<[u8]>) {
        if self.ids.get(key).is_none_or(|id| id.state != State::Connecting) {
            return;
        }
        match refusal {
            Refusal::Program => {
                if let Some(id) = self.ids.get_mut(key) {
                    id.state = State::Dead;
                }
                self.set_due(key, None);
                self.push(key, CmEventKind::Rejected { private_data });
            }
            other => self.give_up(key, ConnectFailure::Protocol(other.reason().into())),
        }
    }

    /// The peer of a connection that was accepted is up, too.
    fn up(&mut self, key: Key) {
        let Some(id) = self.ids.get_mut(key).filter(|id| id.state == State::Accepting) else { return };
        id.state = State::Established;
        let read_depth = id.read_depth;
        self.set_due(key, None);
        self.push(key, CmEventKind::Established { private_data: Box::default(), read_depth });
    }

    fn violated(&mut self, key: Key, what: &'static str) {
        let Some(id) = self.ids.get(key) else { return };
        log::debug!("the peer of an exchange that is {}: {what}", id.state.name());
        match id.state {
            State::Connecting => self.give_up(key, ConnectFailure::Protocol(what.into())),
            State::Established => {
                self.close_stream(key);
                self.disconnected(key, DisconnectCause::PeerViolation(what.into()));
            }
            _ => self.stream_ended(key, &io::ErrorKind::InvalidData.into()),
        }
    }

    fn close_stream(&mut self, key: Key) {
        let registry = self.watch.poll.registry();
        if let Some(link) = self.ids.get_mut(key).and_then(Id::link_mut) {
            link.forget(registry);
            link.socket = None;
        }
    }

    /// The peer has said goodbye, or its stream has ended.
    fn stream_ended(&mut self, key: Key, error: &io::Error) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let state = id.state;
        self.set_due(key, None);
        match state {
            State::Arriving => self.discard(key),
            State::Connecting => self.give_up(key, connect_failure(error)),
            State::Accepting => self.give_up(key, ConnectFailure::PeerClosed),
            State::Offered => {
                // The program learns of it when it answers.
                self.answered(key);
                self.close_stream(key);
                if let Some(id) = self.ids.get_mut(key) {
                    id.state = State::Dead;
                }
            }
            State::Established => self.disconnected(key, DisconnectCause::Peer),
            State::Disconnecting { .. } => {
                self.close_stream(key);
                self.disconnected(key, DisconnectCause::Local);
            }
            _ => {}
        }
    }

    // Time.

    /// Sets when the peer of an id must have said what is due.
    pub(super) fn set_due(&mut self, key: Key, until: Option<Instant>) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let due = match &mut id.exchange {
            Some(Exchanged::Door(door)) => &mut door.due,
            Some(Exchanged::Link(link)) => &mut link.due,
            None => return,
        };
        if let Some(before) = std::mem::replace(due, until) {
            self.exchanges.due.remove(&(before, key));
        }
        if let Some(until) = until {
            self.exchanges.due.insert((until, key));
        }
    }

    /// The peer has some time to say that it is up.
    pub(super) fn await_ready(&mut self, key: Key, now: Instant) {
        self.set_due(key, Some(now + PATIENCE));
    }

    /// Ends what peers have not answered in time.
    pub(super) fn exchanges_overdue(&mut self, now: Instant) {
        while let Some(&(until, key)) = self.exchanges.due.first().filter(|due| due.0 <= now) {
            self.exchanges.due.remove(&(until, key));
            let Some(id) = self.ids.get_mut(key) else { continue };
            if let Some(door) = id.door_mut() {
                door.due = None;
                self.watch.streams.push_back(key);
            } else {
                self.set_due(key, None);
                match self.ids.get(key).map(|id| id.state) {
                    Some(State::Arriving) => self.discard(key),
                    Some(State::Resolved | State::Connecting | State::Accepting) => {
                        self.give_up(key, ConnectFailure::Timeout);
                    }
                    _ => continue,
                }
            }
            self.connector.wake();
        }
    }
}

/// The address that a GID stands for.
fn gid_address(gid: [u8; 16]) -> IpAddr {
    IpAddr::from(gid).to_canonical()
}
