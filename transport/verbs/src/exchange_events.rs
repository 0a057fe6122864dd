//! Connections by out-of-band exchange: the processing of messages from peers, and of deadlines.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::entry::{ExchangeSocket, IdEntry, IdState};
use super::exchange_calls::{Exchanges, MAX_CACHED, PEER_TIMEOUT};
use super::exchange_socket::{ExchangeStream, StreamRead};
use super::gid::PortGid;
use super::hub::DeviceHub;
use super::id::RawId;
use super::status::connect_failure;
use crate::exchange::conversation::ConversationEvent;
use crate::exchange::message::{Endpoint, ExchangeRefusal};
use rdma_transport::cm::{CmEventKind, CmId, ConnectFailure, DisconnectCause, ExchangeOptions, ReadDepth};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::log_limit::NOBODY;
use rdma_transport::newcomers::Host;
use rdma_transport::provider::DeviceId;
use rdma_transport::slab::Key;

/// The maximum number of streams on which the peer has not sent a Request. At the limit, the
/// provider closes one of these streams for each new one: the oldest stream of the host that has
/// the most of these streams.
pub(super) const MAX_NEWCOMERS: usize = 256;
/// The number of streams that a listener accepts before the provider processes other descriptors.
const MAX_ACCEPTS: usize = 64;
/// The time for which a listener accepts no streams after the system had no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The pause after a failed search for the device port of a connect request: the search has found
/// no port, or a port that is down. A search reads all GID tables, so without a pause peers could
/// keep the provider busy.
pub(super) const SEARCH_PAUSE: Duration = Duration::from_secs(1);

impl Exchanges {
    /// Processes input on an id's listening socket or stream, which epoll has reported as ready.
    pub(super) fn stream_ready(&mut self, hub: &mut DeviceHub, key: Key, now: Instant) {
        let Some(id) = hub.ids.get_mut(key) else { return };
        match &id.exchange {
            Some(ExchangeSocket::Listener(_)) => self.accept_streams(hub, key, now),
            Some(ExchangeSocket::Stream(_)) => self.read_stream(hub, key),
            None => {}
        }
    }

    // Functions that accept new peers.

    fn accept_streams(&mut self, hub: &mut DeviceHub, key: Key, now: Instant) {
        for _ in 0..MAX_ACCEPTS {
            let Some(listening) = hub.ids.get_mut(key).and_then(IdEntry::listener_mut) else { return };
            if listening.deadline.is_some_and(|until| now < until) {
                return;
            }
            match listening.accept() {
                Ok(socket) => {
                    if let Err(error) = self.add_newcomer(hub, ExchangeStream::passive(socket, key), now) {
                        log::debug!("a stream is not accepted: {error}");
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
                    ) =>
                {
                    peer_log!(
                        hub.log_limit,
                        now,
                        NotAccepting,
                        Warn,
                        NOBODY,
                        "no stream is accepted for {ACCEPT_PAUSE:?}: {error}"
                    );
                    self.set_deadline(hub, key, Some(now + ACCEPT_PAUSE));
                    return;
                }
                // Usually the peer has closed the stream before the listener accepted it.
                Err(error) => log::debug!("accepting a stream: {error}"),
            }
        }
        // More streams may be waiting, but epoll reports no further edge for them. So continue in the next turn.
        self.deadlines.insert((now, key));
    }

    /// Adds a stream on which the peer has not sent a Request yet.
    pub(super) fn add_newcomer(&mut self, hub: &mut DeviceHub, stream: ExchangeStream, now: Instant) -> io::Result<()> {
        // A stream without an IP address counts as a stream of this host.
        let host = Host::of(stream.peer_address().map_or(IpAddr::from([127, 0, 0, 1]), |peer| peer.ip()));
        if self.newcomers.len() >= MAX_NEWCOMERS
            && !rdma_transport::planted("a-newcomer-of-an-exchange-never-gives-way")
        {
            let gives_way = self.newcomers.oldest(self.newcomers.largest());
            if let Some(oldest) = gives_way {
                self.discard(hub, oldest.id);
            }
        }
        let raw = RawId::for_exchange(0, stream.local_address(), stream.peer_address());
        let mut id = IdEntry::new(Arc::new(raw), IdState::AwaitingRequest);
        id.exchange = Some(ExchangeSocket::Stream(Box::new(stream)));
        let key = hub.add(id);
        let ticket = self.newcomers.add(key, host, now);
        if let Some(stream) = hub.ids.get_mut(key).and_then(IdEntry::stream_mut) {
            stream.ticket = Some(ticket);
        }
        self.watch(hub, key)?;
        self.set_deadline(hub, key, Some(now + PEER_TIMEOUT));
        Ok(())
    }

    // Functions that process messages of peers.

    fn read_stream(&mut self, hub: &mut DeviceHub, key: Key) {
        // The loop always ends, because the protocol allows only a few messages on a stream. A message beyond these is
        // a violation, which ends the stream.
        loop {
            let Some(stream) = hub.ids.get_mut(key).and_then(IdEntry::stream_mut) else { return };
            if let Err(error) = stream.flush() {
                self.stream_ended(hub, key, &error);
                return;
            }
            match stream.read_message() {
                StreamRead::WouldBlock => return,
                StreamRead::End(error) => {
                    self.stream_ended(hub, key, &error);
                    return;
                }
                StreamRead::Event(event) => self.conversation_event(hub, key, event),
            }
        }
    }

    fn conversation_event(&mut self, hub: &mut DeviceHub, key: Key, event: ConversationEvent) {
        match event {
            ConversationEvent::Requested(peer, private_data) => self.requested(hub, key, peer, private_data),
            ConversationEvent::Accepted(peer, private_data) => self.accepted(hub, key, &peer, private_data),
            ConversationEvent::Refused(refusal, private_data) => self.refused(hub, key, refusal, private_data),
            ConversationEvent::Ready => self.peer_ready(hub, key),
            ConversationEvent::Goodbye => self.stream_ended(hub, key, &io::Error::from_raw_os_error(libc::ECONNRESET)),
            ConversationEvent::Violated(what) => self.violated(hub, key, what),
        }
    }

    fn requested(&mut self, hub: &mut DeviceHub, key: Key, peer: Endpoint, private_data: Box<[u8]>) {
        let Some(id) = hub.ids.get_mut(key) else { return };
        let Some(stream) = id.stream_mut() else { return };
        let (ticket, listening) = (stream.ticket.take(), stream.listener);
        stream.peer = Some(peer);
        let local = stream.local_address();
        // If the stream has no IP address, the event contains the IP address in the peer's GID instead.
        let from = stream.peer_address().unwrap_or_else(|| SocketAddr::new(gid_address(peer.gid), 0));
        let from = SocketAddr::new(from.ip().to_canonical(), from.port());
        if let Some(ticket) = ticket {
            self.newcomers.remove(ticket);
        }
        self.set_deadline(hub, key, None);
        // If the listener was destroyed, close the stream. The program is not notified of this request.
        let Some(listener) = listening else { return self.discard(hub, key) };
        let Some(listening) = hub.ids.get_mut(listener).and_then(IdEntry::listener_mut) else {
            return self.discard(hub, key);
        };
        let is_full = listening.waiting >= listening.options.backlog.max(1);
        if is_full && !rdma_transport::planted("requests-without-a-limit") {
            return self.refuse_exchange(hub, key, ExchangeRefusal::Busy);
        }
        let (exchange, ack_timeout) = (listening.exchange.clone(), listening.options.ack_timeout);
        let source = local.map(|mut local| {
            local.set_port(0);
            local
        });
        // Peers can cause the following log lines as often as they like, so the level is `debug`.
        let (port_gid, device) = match self.port_of_request(hub, source, &exchange) {
            Ok(assigned) => assigned,
            Err(error) => {
                log::debug!("{from} is refused: {error}");
                return self.refuse_exchange(hub, key, ExchangeRefusal::NoPort);
            }
        };
        if port_gid.network != peer.network {
            log::debug!("{from} is refused: {}", ExchangeRefusal::OtherNetwork.reason());
            return self.refuse_exchange(hub, key, ExchangeRefusal::OtherNetwork);
        }
        let read_depth = ReadDepth {
            responder_resources: peer.initiator_depth.into(),
            initiator_depth: peer.responder_resources.into(),
        };
        let Some(id) = hub.ids.get_mut(key) else { return };
        id.raw = Arc::new(RawId::for_exchange(port_gid.port, local, Some(from)));
        (id.state, id.read_depth) = (IdState::RequestReceived, read_depth);
        if let Some(stream) = id.stream_mut() {
            (stream.port_gid, stream.ack_timeout) = (Some(port_gid), ack_timeout);
        }
        hub.set_device(key, device);
        if let Some(listening) = hub.ids.get_mut(listener).and_then(IdEntry::listener_mut) {
            listening.waiting += 1;
        }
        let listener = CmId(listener);
        hub.push(key, CmEventKind::ConnectRequest { listener, device, peer: from, private_data, read_depth });
    }

    /// Returns the port, the GID and the device for a connect request whose stream has the local address `source`. Fails if the port is
    /// down. If the last search has found no port, or a port that is down, fails without a new
    /// search until [`SEARCH_PAUSE`] has passed.
    pub(super) fn port_of_request(
        &mut self,
        hub: &mut DeviceHub,
        source: Option<SocketAddr>,
        options: &ExchangeOptions,
    ) -> Result<(PortGid, DeviceId)> {
        let now = hub.now;
        let failed = &mut self.failed_searches;
        failed.retain(|(.., until)| now.is_some_and(|now| now < *until));
        if failed.iter().any(|(of, with, _)| *of == source && with == options) {
            let reason = "the last search has found no usable port for the address of this host on the stream".into();
            return Err(TransportError::NoDevice { reason });
        }
        let found = self.port_gid_for(source, options).and_then(|port_gid| {
            let device = hub.device_of_port(&port_gid)?;
            self.check_found_port(hub, device, &port_gid)?;
            Ok((port_gid, device))
        });
        if let (Some(now), true) = (now, found.is_err()) {
            let failed = &mut self.failed_searches;
            if failed.len() >= MAX_CACHED {
                failed.pop_front();
            }
            failed.push_back((source, options.clone(), now + SEARCH_PAUSE));
        }
        found
    }

    /// Records that a connect request no longer waits for the program: removes the listener from
    /// the entry of its id `key`, and decrements the listener's number of waiting requests.
    pub(super) fn request_answered(hub: &mut DeviceHub, key: Key) {
        let listener = hub.ids.get_mut(key).and_then(IdEntry::stream_mut).and_then(|stream| stream.listener.take());
        Self::one_less_waits(hub, listener);
    }

    /// Decrements the number of requests that wait at `listener`. Does nothing for `None`.
    pub(super) fn one_less_waits(hub: &mut DeviceHub, listener: Option<Key>) {
        let listening = listener.and_then(|listener| hub.ids.get_mut(listener)).and_then(IdEntry::listener_mut);
        if let Some(listening) = listening {
            listening.waiting = listening.waiting.saturating_sub(1);
        }
    }

    fn accepted(&mut self, hub: &mut DeviceHub, key: Key, peer: &Endpoint, private_data: Box<[u8]>) {
        let Some(id) = hub.ids.get_mut(key).filter(|id| id.state == IdState::Connecting) else { return };
        let Some(stream) = id.stream_mut() else { return };
        let Some(own) = stream.own else { return };
        if own.network != peer.network {
            let why = ExchangeRefusal::OtherNetwork.reason().into();
            return self.fail_attempt(hub, key, ConnectFailure::Protocol(why));
        }
        match Self::connect_qp(hub, key, &own, peer) {
            Ok(agreed) => {
                let Some(id) = hub.ids.get_mut(key) else { return };
                id.state = IdState::Established;
                if let Some(stream) = id.stream_mut() {
                    // Only queues the message Ready. `read_stream` sends it in the next round of
                    // its loop.
                    stream.conversation.ready();
                }
                self.set_deadline(hub, key, None);
                let read_depth = agreed.read_depth;
                hub.push(key, CmEventKind::Established { private_data, read_depth });
            }
            Err(error) => {
                let why = format!("the device refuses the peer's queue pair: {error}");
                self.fail_attempt(hub, key, ConnectFailure::System(why));
            }
        }
    }

    fn refused(&mut self, hub: &mut DeviceHub, key: Key, refusal: ExchangeRefusal, private_data: Box<[u8]>) {
        if hub.ids.get(key).is_none_or(|id| id.state != IdState::Connecting) {
            return;
        }
        match refusal {
            ExchangeRefusal::Program => {
                if let Some(id) = hub.ids.get_mut(key) {
                    id.state = IdState::Closed;
                }
                self.set_deadline(hub, key, None);
                hub.push(key, CmEventKind::Rejected { private_data });
            }
            other => self.fail_attempt(hub, key, ConnectFailure::Protocol(other.reason().into())),
        }
    }

    /// Processes the peer's message Ready: establishes the connection, which the program has accepted before.
    fn peer_ready(&mut self, hub: &mut DeviceHub, key: Key) {
        let Some(id) = hub.ids.get_mut(key).filter(|id| id.state == IdState::Accepting) else { return };
        id.state = IdState::Established;
        let read_depth = id.read_depth;
        self.set_deadline(hub, key, None);
        hub.push(key, CmEventKind::Established { private_data: Box::default(), read_depth });
    }

    fn violated(&mut self, hub: &mut DeviceHub, key: Key, what: &'static str) {
        let Some(id) = hub.ids.get(key) else { return };
        log::debug!("the peer of an exchange that is {}: {what}", id.state.name());
        match id.state {
            IdState::Connecting => self.fail_attempt(hub, key, ConnectFailure::Protocol(what.into())),
            IdState::Established => {
                Self::close_stream(hub, key);
                hub.disconnected(key, DisconnectCause::PeerViolation(what.into()));
            }
            _ => self.stream_ended(hub, key, &io::ErrorKind::InvalidData.into()),
        }
    }

    fn close_stream(hub: &mut DeviceHub, key: Key) {
        let registry = hub.event_set.poll.registry();
        if let Some(stream) = hub.ids.get_mut(key).and_then(IdEntry::stream_mut) {
            stream.forget(registry);
            stream.shut_down();
        }
    }

    /// Processes the end of a stream: the peer has sent Goodbye, or the stream has ended or failed.
    fn stream_ended(&mut self, hub: &mut DeviceHub, key: Key, error: &io::Error) {
        let Some(id) = hub.ids.get_mut(key) else { return };
        let state = id.state;
        self.set_deadline(hub, key, None);
        match state {
            IdState::AwaitingRequest => self.discard(hub, key),
            IdState::Connecting => self.fail_attempt(hub, key, connect_failure(error)),
            IdState::Accepting => self.fail_attempt(hub, key, ConnectFailure::PeerClosed),
            IdState::RequestReceived => {
                // The program has not answered the request yet. When the program accepts or rejects it, the call
                // returns an error, so no event is necessary.
                Self::request_answered(hub, key);
                Self::close_stream(hub, key);
                if let Some(id) = hub.ids.get_mut(key) {
                    id.state = IdState::Closed;
                }
            }
            IdState::Established => hub.disconnected(key, DisconnectCause::Peer),
            IdState::Disconnecting { .. } => {
                Self::close_stream(hub, key);
                hub.disconnected(key, DisconnectCause::Local);
            }
            _ => {}
        }
    }

    // Functions for deadlines.

    /// Sets or removes the deadline of an id. The deadline of a stream is the time by which the peer's next message
    /// must arrive. The deadline of a listener is the end of its pause.
    pub(super) fn set_deadline(&mut self, hub: &mut DeviceHub, key: Key, until: Option<Instant>) {
        let Some(id) = hub.ids.get_mut(key) else { return };
        let Some(due) = id.exchange.as_mut().map(ExchangeSocket::deadline_mut) else { return };
        if let Some(before) = std::mem::replace(due, until) {
            self.deadlines.remove(&(before, key));
        }
        if let Some(until) = until {
            self.deadlines.insert((until, key));
        }
    }

    /// Ends the connection attempts whose deadline has passed, and resumes the listeners whose pause has ended.
    pub(super) fn exchanges_overdue(&mut self, hub: &mut DeviceHub, now: Instant) {
        while let Some(&(until, key)) = self.deadlines.first().filter(|due| due.0 <= now) {
            self.deadlines.remove(&(until, key));
            let Some(id) = hub.ids.get_mut(key) else { continue };
            if let Some(listening) = id.listener_mut() {
                listening.deadline = None;
                hub.event_set.streams.push_back(key);
            } else {
                self.set_deadline(hub, key, None);
                match hub.ids.get(key).map(|id| id.state) {
                    Some(IdState::AwaitingRequest) => self.discard(hub, key),
                    Some(IdState::Resolved | IdState::Connecting | IdState::Accepting)
                        if !rdma_transport::planted("an-exchange-without-an-end") =>
                    {
                        self.fail_attempt(hub, key, ConnectFailure::Timeout);
                    }
                    _ => continue,
                }
            }
            hub.connector.wake();
        }
    }
}

/// Returns the IP address that a GID contains.
fn gid_address(gid: [u8; 16]) -> IpAddr {
    IpAddr::from(gid).to_canonical()
}
