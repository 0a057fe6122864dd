//! Connections by out-of-band exchange: the calls of the program. `exchange_events` processes the messages of peers.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::capabilities::{Limits, port_attr, state_of};
use super::entry::{ExchangeSocket, IdEntry, IdState};
use super::exchange_socket::{DetachedStream, ExchangeListener, ExchangeStream, adopt};
use super::ffi::scoped_for;
use super::gid::{self, PortGid, SYSFS};
use super::hub::{DeviceHub, STALE_ID};
use super::id::{ConnectOffer, RawId};
use super::status::connect_failure;
use super::transitions::{self, Negotiated};
use crate::exchange::message::{Endpoint, ExchangeRefusal, Network};
use rdma_transport::cm::{
    CmEventKind, CmId, ConnectFailure, ExchangeOptions, ListenParam, PathOptions, ReadDepth, Source,
};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::newcomers::Newcomers;
use rdma_transport::provider::{DeviceId, Entropy};
use rdma_transport::slab::Key;

/// The default of the ack timeout, as a code: 19 means about 2 s. The connection manager has the same default.
const ACK_TIMEOUT: u8 = 19;
/// The time that a peer has to send the message Request after it has connected, and to send the
/// message Ready after the local side has sent Accept.
pub(super) const PEER_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of cached results of the search for a device port and GID, and the maximum
/// number of remembered searches without a result.
pub(super) const MAX_CACHED: usize = 16;

/// An entry of a cache: a local address and options, and the device port and GID that a search has
/// found for them.
pub(super) type CachedPortGid = (Option<SocketAddr>, ExchangeOptions, PortGid);

/// A local address and options for which a search has found no usable device port, and the time
/// until which connect requests with this address and these options cause no further search.
pub(super) type FailedSearch = (Option<SocketAddr>, ExchangeOptions, Instant);

/// The state that all connections by out-of-band exchange share.
pub(super) struct Exchanges {
    /// The source of random bytes for the sequence numbers of first packets. Without it the
    /// provider does not have the role [`Exchange`](rdma_transport::roles::Exchange).
    pub(super) entropy: Option<Entropy>,
    /// The folder in which the kernel lists the devices and their GIDs (sysfs).
    pub(super) sysfs: PathBuf,
    /// Accepted streams on which the peer has not sent a request yet.
    pub(super) newcomers: Newcomers<Key>, // bound: exchange-newcomers
    /// The deadlines of connections that are being set up, and the times at which listeners end
    /// their pauses. Each entry has the key of the connection's or the listener's id.
    pub(super) deadlines: BTreeSet<(Instant, Key)>, // bound: connections, exchange-newcomers
    /// A cache of the last searches for a device port and a GID. It avoids reading whole GID tables
    /// for each connect.
    pub(super) port_gids: VecDeque<CachedPortGid>, // bound: exchange-searches
    /// The recent searches that found no usable port for a connect request.
    pub(super) failed_searches: VecDeque<FailedSearch>, // bound: exchange-searches
}

impl Exchanges {
    pub(super) fn new() -> Self {
        Self {
            entropy: None,
            sysfs: SYSFS.into(),
            newcomers: Newcomers::default(),
            deadlines: BTreeSet::new(),
            port_gids: VecDeque::new(),
            failed_searches: VecDeque::new(),
        }
    }

    /// Closes the socket of an id, and destroys the id, which has no queue pair. Logs an error
    /// instead of returning it.
    pub(super) fn discard(&mut self, hub: &mut DeviceHub, key: Key) {
        let Some(id) = hub.ids.get_mut(key) else { return };
        let (state, exchange) = (id.state, id.exchange.take());
        hub.discard(key);
        if let Some(exchange) = exchange {
            self.close_exchange(hub, key, state, exchange);
        }
    }

    /// Registers the socket of an id in the epoll set. After an error, the id is destroyed.
    pub(super) fn watch(&mut self, hub: &mut DeviceHub, key: Key) -> io::Result<()> {
        let registry = hub.event_set.poll.registry();
        let watched = match hub.ids.get(key).and_then(|id| id.exchange.as_ref()) {
            Some(ExchangeSocket::Listener(listening)) => listening.watch(registry, key),
            Some(ExchangeSocket::Stream(stream)) => stream.watch(registry, key),
            None => Ok(()),
        };
        watched.inspect_err(|_| self.discard(hub, key))
    }

    // Functions that listen.

    pub(super) fn listen_by_exchange(
        &mut self,
        hub: &mut DeviceHub,
        address: SocketAddr,
        options: &ListenParam,
        exchange: &ExchangeOptions,
    ) -> Result<CmId> {
        let ListenParam { type_of_service, ack_timeout, .. } = *options;
        PathOptions { type_of_service, ack_timeout, source: Source::Any }.check()?;
        if exchange.device.is_some() {
            // Fail now if the device, port or GID that the program has named does not exist: with
            // such a listener, every incoming connection would fail.
            self.port_gid_for(None, exchange)?;
        }
        let listen = |source| TransportError::Listen { address, source };
        let listening = ExchangeListener::open(address, options, exchange).map_err(listen)?;
        let mut id = IdEntry::new(Arc::new(RawId::for_exchange(0, listening.address(), None)), IdState::Listening);
        id.exchange = Some(ExchangeSocket::Listener(Box::new(listening)));
        let key = hub.add(id);
        self.watch(hub, key).map_err(listen)?;
        Ok(CmId(key))
    }

    /// Passes a stream, which the program has accepted itself, to a listener, as if the listener had accepted it.
    pub(super) fn accept_stream(
        &mut self,
        hub: &mut DeviceHub,
        listener: CmId,
        stream: OwnedFd,
        now: Instant,
    ) -> Result<()> {
        let listening = hub.id_mut(listener)?;
        if listening.listener_mut().is_none() {
            return Err(TransportError::InvalidState { call: "accept_stream", state: listening.state.name() });
        }
        let socket = adopt(stream)?;
        let arrived = self.add_newcomer(hub, ExchangeStream::passive(socket, listener.0), now);
        hub.connector.wake();
        arrived.map_err(|source| TransportError::io("watching a stream", source))
    }

    // Functions that connect.

    /// Searches the GID tables for the device that has an address. Used if there is no connection
    /// manager.
    pub(super) fn device_at_gid(&mut self, hub: &mut DeviceHub, address: IpAddr) -> Result<DeviceId> {
        let options = ExchangeOptions::default();
        let port_gid = gid::choose(&self.sysfs, Some(SocketAddr::new(address, 0)), &options)?;
        let device = hub.device_of_port(&port_gid)?;
        hub.check_port(Some(device), port_gid.port)?;
        Ok(device)
    }

    /// Returns the device port and the GID for a connection whose stream has the local address
    /// `source`. Looks in the cache first.
    pub(super) fn port_gid_for(&mut self, source: Option<SocketAddr>, options: &ExchangeOptions) -> Result<PortGid> {
        let root = &self.sysfs;
        let same = |known: &&CachedPortGid| known.0 == source && known.1 == *options;
        if let Some((.., port_gid)) = self.port_gids.iter().find(same).filter(|known| known.2.holds(root)) {
            return Ok(port_gid.clone());
        }
        self.port_gids.retain(|known| !same(&known));
        let port_gid = gid::choose(root, source, options)?;
        if self.port_gids.len() >= MAX_CACHED {
            self.port_gids.pop_front();
        }
        self.port_gids.push_back((source, options.clone(), port_gid.clone()));
        Ok(port_gid)
    }

    /// Returns an error if the device port `port_gid` is down. In this case, removes the port from
    /// the cache: the next search may find another port of the device.
    pub(super) fn check_found_port(&mut self, hub: &mut DeviceHub, device: DeviceId, port_gid: &PortGid) -> Result<()> {
        let checked = hub.check_port(Some(device), port_gid.port);
        if checked.is_err() {
            self.port_gids.retain(|known| known.2 != *port_gid);
        }
        checked
    }

    /// Creates an id for an active connection, and chooses its device port and GID. The stream is
    /// connected later, by `connect`.
    pub(super) fn resolve_by_exchange(
        &mut self,
        hub: &mut DeviceHub,
        mut stream: ExchangeStream,
        path: &PathOptions,
        exchange: &ExchangeOptions,
        deadline: Instant,
    ) -> Result<CmId> {
        path.check()?;
        let mut exchange = exchange.clone();
        match &path.source {
            Source::Any => {}
            Source::Address(address) => stream.from = Some(scoped_for(*address, stream.to)),
            Source::Device { name, port } => {
                exchange.device.get_or_insert_with(|| name.clone());
                exchange.port = exchange.port.or(*port);
            }
        }
        let unreachable = |source| TransportError::io("finding the way to the peer", source);
        let local = match (stream.to, stream.from) {
            (Some(_), Some(from)) => Some(from),
            (Some(to), None) => Some(gid::source_for(to).map_err(unreachable)?),
            (None, _) => stream.local_address(),
        };
        // Set the TCP port to 0 for the search. The TCP port has no influence on the device's port and GID, and results
        // with different TCP ports would not be found in the cache.
        let source = local.map(|mut local| {
            local.set_port(0);
            local
        });
        let port_gid = self.port_gid_for(source, &exchange)?;
        let device = hub.device_of_port(&port_gid)?;
        self.check_found_port(hub, device, &port_gid)?;
        let peer = stream.to.or_else(|| stream.peer_address());
        let mut id = IdEntry::new(Arc::new(RawId::for_exchange(port_gid.port, local, peer)), IdState::Resolved);
        id.deadline = Some(deadline);
        (stream.type_of_service, stream.ack_timeout, stream.port_gid) =
            (path.type_of_service, path.ack_timeout, Some(port_gid));
        id.exchange = Some(ExchangeSocket::Stream(Box::new(stream)));
        let key = hub.add(id);
        hub.set_device(key, device);
        self.set_deadline(hub, key, Some(deadline));
        hub.push(key, CmEventKind::Resolved { device });
        hub.connector.wake();
        Ok(CmId(key))
    }

    /// Returns the attributes of the local queue pair that are sent to the peer. Fails if an InfiniBand port is not
    /// active: the subnet manager may not have given it a LID yet.
    fn endpoint(&mut self, hub: &mut DeviceHub, id: CmId, offer: &ConnectOffer) -> Result<Endpoint> {
        let mut octets = [0; 4];
        if let Some(entropy) = &mut self.entropy {
            entropy(&mut octets);
        }
        let entry = hub.id(id)?;
        let (Some(stream), Some(qp), Some(device)) = (entry.stream(), &entry.qp, entry.device) else {
            return Err(STALE_ID);
        };
        let Some(port_gid) = &stream.port_gid else { return Err(STALE_ID) };
        let open = hub.devices[device.0 as usize].live()?;
        let port = port_attr(open.context(), port_gid.port)?;
        if let (Network::InfiniBand, Err(state)) = (port_gid.network, state_of(&port)) {
            let reason = format!("port {} of {} is {state}; `rdma link` shows it", port_gid.port, open.name);
            return Err(TransportError::NoDevice { reason });
        }
        let narrow = |depth: u16| u8::try_from(depth).unwrap_or(u8::MAX);
        Ok(Endpoint {
            network: port_gid.network,
            mtu: port.active_mtu.clamp(1, 5) as u8,
            ack_timeout: stream.ack_timeout.unwrap_or(ACK_TIMEOUT),
            retry_count: offer.retry_count,
            rnr_retry_count: offer.rnr_retry_count,
            traffic_class: stream.type_of_service.unwrap_or(0),
            responder_resources: narrow(offer.read_depth.responder_resources),
            initiator_depth: narrow(offer.read_depth.initiator_depth),
            lid: if port_gid.network == Network::InfiniBand { port.lid } else { 0 },
            qp_number: qp.number,
            psn: u32::from_be_bytes(octets) & 0xff_ffff,
            gid: port_gid.gid,
        })
    }

    pub(super) fn connect_by_exchange(&mut self, hub: &mut DeviceHub, id: CmId, offer: &ConnectOffer) -> Result<()> {
        let own = self.endpoint(hub, id, offer)?;
        let registry = hub.event_set.poll.registry();
        let entry = hub.ids.get_mut(id.0).ok_or(STALE_ID)?;
        entry.min_rnr_timer = offer.min_rnr_timer;
        entry.state = IdState::Connecting;
        let Some(stream) = entry.stream_mut() else { return Err(STALE_ID) };
        stream.own = Some(own);
        stream.conversation.request(own, &offer.private_data);
        if let Err(error) = stream.open(registry, id.0) {
            self.fail_attempt(hub, id.0, connect_failure(&error));
            hub.connector.wake();
        }
        Ok(())
    }

    /// Returns the attributes that both sides use on a connection. The active side chooses some of
    /// them. The local side is the active one if the id is in the state `Connecting`.
    fn agreed(entry: &IdEntry, limits: &Limits, own: &Endpoint, peer: &Endpoint) -> Negotiated {
        let first = if entry.state == IdState::Connecting { own } else { peer };
        // In each direction, the number of outstanding Reads is the smaller of two numbers: the
        // requester's ORD and the responder's IRD.
        let read_depth = ReadDepth {
            responder_resources: own.responder_resources.min(peer.initiator_depth).into(),
            initiator_depth: own.initiator_depth.min(peer.responder_resources).into(),
        };
        Negotiated {
            mtu: own.mtu.min(peer.mtu),
            traffic_class: first.traffic_class,
            ack_timeout: own.ack_timeout,
            retry_count: limits.retry_count(first.retry_count),
            min_rnr_timer: entry.min_rnr_timer,
            read_depth,
        }
    }

    /// Moves the queue pair through RTR to RTS, so that it can receive and send. Returns the negotiated attributes.
    pub(super) fn connect_qp(hub: &mut DeviceHub, key: Key, own: &Endpoint, peer: &Endpoint) -> Result<Negotiated> {
        let entry = hub.ids.get_mut(key).ok_or(STALE_ID)?;
        let device = entry.device.ok_or(STALE_ID)?;
        let agreed = Self::agreed(entry, &hub.devices[device.0 as usize].limits, own, peer);
        let Some(port_gid) = entry.stream().and_then(|stream| stream.port_gid.as_ref()) else { return Err(STALE_ID) };
        entry.raw.modify(transitions::ready_to_receive(port_gid, peer, &agreed))?;
        entry.raw.modify(transitions::ready_to_send(own.psn, peer, &agreed))?;
        entry.read_depth = agreed.read_depth;
        Ok(agreed)
    }

    pub(super) fn accept_by_exchange(
        &mut self,
        hub: &mut DeviceHub,
        id: CmId,
        offer: &ConnectOffer,
        now: Instant,
    ) -> Result<()> {
        let mut own = self.endpoint(hub, id, offer)?;
        let entry = hub.ids.get_mut(id.0).ok_or(STALE_ID)?;
        entry.min_rnr_timer = offer.min_rnr_timer;
        let Some(peer) = entry.stream().and_then(|stream| stream.peer) else { return Err(STALE_ID) };
        if entry.stream().is_some_and(|stream| stream.ack_timeout.is_none()) {
            own.ack_timeout = peer.ack_timeout;
        }
        let agreed = Self::connect_qp(hub, id.0, &own, &peer)?;
        // The message Accept carries the negotiated attributes, which may differ from those that the active side has
        // proposed.
        (own.mtu, own.traffic_class, own.retry_count) = (agreed.mtu, agreed.traffic_class, agreed.retry_count);
        Self::request_answered(hub, id.0);
        let entry = hub.ids.get_mut(id.0).ok_or(STALE_ID)?;
        entry.state = IdState::Accepting;
        if let Some(stream) = entry.stream_mut() {
            stream.own = Some(own);
            stream.conversation.accept(own, &offer.private_data);
            if let Err(error) = stream.flush() {
                log::debug!("the answer to a peer cannot be sent: {error}");
            }
        }
        self.set_deadline(hub, id.0, Some(now + PEER_TIMEOUT));
        Ok(())
    }

    /// Refuses a request: sends the refusal to the peer, and destroys the id of the request.
    pub(super) fn refuse_exchange(&mut self, hub: &mut DeviceHub, key: Key, refusal: ExchangeRefusal) {
        if let Some(stream) = hub.ids.get_mut(key).and_then(IdEntry::stream_mut) {
            stream.conversation.refuse(refusal, &[]);
        }
        self.discard(hub, key);
    }

    // Functions that end connections.

    pub(super) fn disconnect_exchange(&mut self, hub: &mut DeviceHub, id: CmId) -> Result<()> {
        let entry = hub.id_mut(id)?;
        match entry.state {
            IdState::Disconnecting { .. } => return Ok(()),
            IdState::Listening => {
                return Err(TransportError::InvalidState { call: "disconnect", state: entry.state.name() });
            }
            _ => {}
        }
        Self::request_answered(hub, id.0);
        let entry = hub.id_mut(id)?;
        let was = std::mem::replace(&mut entry.state, IdState::Disconnecting { flush_at: None });
        // Flush the queue pair before the message Goodbye is sent. The flush loses no message whose send has completed: such a message has
        // reached the peer, and its completion is in the peer's completion queue before Goodbye arrives.
        if let Err(error) = entry.raw.flush() {
            log::debug!("{error}");
        }
        if let Some(stream) = entry.stream_mut() {
            if was == IdState::RequestReceived {
                stream.conversation.refuse(ExchangeRefusal::Program, &[]);
            }
            stream.conversation.disconnect();
            if let Err(error) = stream.flush() {
                log::debug!("Goodbye cannot be sent: {error}");
            }
        }
        self.set_deadline(hub, id.0, None);
        Ok(())
    }

    /// Closes the socket of an id, after the caller has removed the id from the table and destroyed its queue pair.
    pub(super) fn close_exchange(&mut self, hub: &mut DeviceHub, key: Key, state: IdState, exchange: ExchangeSocket) {
        let mut exchange = exchange;
        if let Some(due) = exchange.deadline_mut() {
            self.deadlines.remove(&(*due, key));
        }
        let ExchangeSocket::Stream(mut stream) = exchange else { return };
        stream.close(hub.event_set.poll.registry());
        if let Some(ticket) = stream.ticket {
            self.newcomers.remove(ticket);
        }
        Self::one_less_waits(hub, stream.listener.filter(|_| state == IdState::RequestReceived));
    }

    /// Ends a connection attempt with the event `ConnectFailed`.
    pub(super) fn fail_attempt(&mut self, hub: &mut DeviceHub, key: Key, failure: ConnectFailure) {
        let registry = hub.event_set.poll.registry();
        let Some(id) = hub.ids.get_mut(key) else { return };
        id.state = IdState::Closed;
        if let Some(stream) = id.stream_mut() {
            stream.close(registry);
        }
        self.set_deadline(hub, key, None);
        hub.push(key, CmEventKind::ConnectFailed(failure));
    }

    // Functions that move connect requests to another provider.

    /// Detaches a connect request together with its stream, for another provider.
    pub(super) fn detach_stream(&mut self, hub: &mut DeviceHub, id: CmId) -> Result<DetachedStream> {
        let entry = hub.id_mut(id)?;
        let Some(peer) = entry.raw.peer_address() else { return Err(STALE_ID) };
        let read_depth = entry.read_depth;
        Self::request_answered(hub, id.0);
        self.set_deadline(hub, id.0, None);
        let Some(ExchangeSocket::Stream(mut stream)) = hub.id_mut(id)?.exchange.take() else {
            return Err(STALE_ID);
        };
        stream.forget(hub.event_set.poll.registry());
        stream.listener = None;
        self.discard(hub, id.0);
        Ok(DetachedStream { stream: Some(stream), peer, read_depth })
    }

    /// Attaches a connect request that another provider has detached, together with the request's stream.
    pub(super) fn attach_stream(
        &mut self,
        hub: &mut DeviceHub,
        mut moving: DetachedStream,
    ) -> Result<(CmId, DeviceId)> {
        let Some(port_gid) = moving.stream.as_ref().and_then(|stream| stream.port_gid.clone()) else {
            return Err(STALE_ID);
        };
        let device = hub.device_of_port(&port_gid)?;
        let Some(stream) = moving.stream.take() else { return Err(STALE_ID) };
        let raw = RawId::for_exchange(port_gid.port, stream.local_address(), Some(moving.peer));
        let mut id = IdEntry::new(Arc::new(raw), IdState::RequestReceived);
        id.read_depth = moving.read_depth;
        id.exchange = Some(ExchangeSocket::Stream(stream));
        let key = hub.add(id);
        hub.set_device(key, device);
        self.watch(hub, key).map_err(|source| TransportError::io("watching a stream", source))?;
        Ok((CmId(key), device))
    }
}
