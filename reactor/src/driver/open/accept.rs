//! Stage 4: handles the events of the connection manager, from the resolution of an address to an established connection.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Instant;

use log::Level;
use rdma_transport::caps::Features;
use rdma_transport::cm::{CmEvent, CmEventKind, CmId};
use rdma_transport::log_limit::{LogLimit, NOBODY};
use rdma_transport::newcomers::Host;
use rdma_transport::provider::Provider;
use rdma_transport::shares::is_scarce;
use rdma_transport::{QpAttr, TransportError};

use crate::config::{Config, Framing};
use crate::conn::greeting::{Greeting, MAX_USER_PRIVATE_DATA};
use crate::conn::recv_queue::RecvQueue;
use crate::conn::state::Ending;
use crate::conn::{Connection, Env, Opening, Role};
use crate::driver::Driver;
use crate::driver::open::fallback::{ConnectAttempt, Fallback};
use crate::driver::owners::CmIdOwner;
use crate::driver::run::data_path::post_own_receives;
use crate::driver::stages::Stages;
use crate::driver::table::{ConnectionSlot, DeviceBinding};
use crate::error::{Error, RejectReason};
use crate::id::{ConnectionId, ListenerId};
use crate::limits::buffer_len;
use crate::options::{ConnectOptions, Service, check_security};
use crate::providers::{EXCHANGE, Handle, SHARED_MEMORY, device_index, role};
use crate::security::Security;

/// The result of polling for an event of the connection manager.
#[derive(Debug)]
pub(crate) enum CmStep {
    /// There was no event.
    Nothing,
    /// The event concerned a connection or a listener, and was handled.
    Done,
    /// A peer requests a connection. The caller must let the program decide about it.
    Request(IncomingRequest),
    /// The event is for an endpoint. The fields are the endpoint's number, the connection-manager id of the event, and the event.
    Endpoint(u64, Handle<CmId>, CmEventKind),
}

/// A connect request that arrived at this reactor or at another reactor of its group. Nothing is allocated for it yet.
#[derive(Debug)]
pub(crate) struct IncomingRequest {
    pub(in crate::driver) cm: Handle<CmId>,
    /// The reactor that has the `listener`, as its index in the group.
    pub(in crate::driver) reactor: usize,
    pub(in crate::driver) listener: ListenerId,
    pub(in crate::driver) framing: Framing,
    pub(in crate::driver) service: Service,
    pub(in crate::driver) security: Security,
    /// The index of the device on which the request arrived.
    pub(in crate::driver) device: usize,
    pub(in crate::driver) peer: SocketAddr,
    pub(in crate::driver) private_data: Box<[u8]>,
    /// True if the request was assigned to this reactor by its group, and is counted in the load of the reactor.
    pub(in crate::driver) placed: bool,
}

impl IncomingRequest {
    /// Parses the peer's greeting. If the greeting is not valid, returns the reason with which the request must be rejected.
    pub(in crate::driver) fn greeting(&self) -> Result<Greeting<'_>, RejectReason> {
        match self.framing {
            Framing::Raw => Ok(Greeting::reject(RejectReason::Refused, &self.private_data)),
            Framing::Credits => Greeting::parse(&self.private_data).and_then(Greeting::checked),
        }
    }

    /// Returns the properties that the program sees: the listener, the index of the listener's reactor, the address of the peer, and the
    /// peer's private data.
    pub(crate) fn parts(&self) -> (ListenerId, usize, SocketAddr, &[u8]) {
        let private_data = self.greeting().map_or(&[][..], |greeting| greeting.user);
        (self.listener, self.reactor, self.peer, private_data)
    }
}

impl Driver {
    // Connecting.

    /// Opens a connection to the first of `peers` that can be reached.
    pub(crate) fn connect(&mut self, peers: &[SocketAddr], options: ConnectOptions) -> Result<ConnectionId, Error> {
        let security = self.may_connect(&options)?;
        let ConnectOptions { private_data, framing, path, exchange, service, .. } = options;
        let probes = exchange.is_some();
        let mut fallback = Fallback::new(peers.iter().copied(), path, exchange);
        let ConnectAttempt { peer, cm, deadline } =
            fallback.resolve_next(&mut self.providers, &self.config, &mut self.effects.log_limit, self.now)?;
        let opening = Opening { framing, peer, host: None, private_data, probes, security };
        let id = self.insert(cm, service, Role::Active, opening);
        if let Some(slot) = self.table.get_mut(id) {
            slot.link.fallback = (!fallback.is_empty()).then_some(fallback);
        }
        self.set_deadline(id, Some(deadline));
        self.ring();
        Ok(id)
    }

    /// Opens a connection over a stream that the program has connected. The two sides exchange their queue pair numbers over this stream.
    pub(crate) fn connect_over(&mut self, stream: OwnedFd, options: ConnectOptions) -> Result<ConnectionId, Error> {
        let security = self.may_connect(&options)?;
        let ConnectOptions { private_data, framing, path, exchange, service, .. } = options;
        // The program may pass any descriptor. One that is not an IP socket has no peer address.
        let stream = TcpStream::from(stream);
        let peer = stream.peer_addr().unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
        let (exchange, deadline) = (exchange.unwrap_or_default(), self.now + self.config.timeouts.connect);
        let provider = self.providers.exchanging()?;
        let role = role(self.providers.numbered(provider), Provider::exchange, EXCHANGE)?;
        let cm = Handle { provider, id: role.resolve_exchange_over(stream.into(), &path, &exchange, deadline)? };
        let opening = Opening { framing, peer, host: None, private_data, probes: true, security };
        let id = self.insert(cm, service, Role::Active, opening);
        self.set_deadline(id, Some(deadline));
        self.ring();
        Ok(id)
    }

    /// Opens a connection to a host by its name.
    pub(crate) fn connect_host(
        &mut self,
        host: &str,
        port: u16,
        options: ConnectOptions,
    ) -> Result<ConnectionId, Error> {
        let security = self.may_connect(&options)?;
        let ConnectOptions { private_data, framing, path, exchange, service, .. } = options;
        let unknown = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
        let probes = exchange.is_some();
        let opening = Opening { framing, peer: unknown, host: Some(host.into()), private_data, probes, security };
        let id = self.insert(Handle::NONE, service, Role::Active, opening);
        if let Err(error) = self.look_up(id, (host.to_owned(), port), path, exchange) {
            self.release(id);
            return Err(Error::Lookup(error));
        }
        self.set_deadline(id, Some(self.now + self.config.timeouts.connect));
        self.ring();
        Ok(id)
    }

    /// Checks that a connection may be opened with these options. Returns the security settings of the connection.
    fn may_connect(&self, options: &ConnectOptions) -> Result<Security, Error> {
        options.check()?;
        let security = options.security.as_ref().unwrap_or(&self.config.security);
        check_security(security, options.framing, true)?;
        if options.framing == Framing::Credits && options.private_data.len() > MAX_USER_PRIVATE_DATA {
            return Err(Error::PrivateDataTooLong { len: options.private_data.len(), max: MAX_USER_PRIVATE_DATA });
        }
        if self.refuses_all() {
            return Err(Error::Drained);
        }
        if self.table.len() >= self.config.max_connections as usize {
            return Err(Error::Limit { limit: "max_connections", value: self.config.max_connections.into() });
        }
        Ok(security.clone())
    }

    /// After a failed attempt to connect, starts the next attempt. Returns false if no attempt remains, or if no other attempt is
    /// permitted. In this case, the caller must report the end of the connection to the program.
    pub(in crate::driver) fn try_next_address(&mut self, id: ConnectionId) -> bool {
        if self.refuses_all() {
            return false;
        }
        let Some(slot) = self.table.get(id) else { return false };
        let Some(error) = slot.conn.failed_attempt() else { return false };
        // Completions of the failed attempt are missing or not handled yet. They could be mistaken for completions of the next attempt.
        if slot.conn.is_outstanding() || !slot.allowance.backlog.is_empty() {
            return false;
        }
        let (peer, limit) = (slot.conn.peer(), &mut self.effects.log_limit);
        peer_log!(limit, self.now, NotUp, Info, peer, "{id}: {peer}: {error}");
        self.attempt_next(id)
    }

    /// Notes that the program has postponed its decision about the peer's identity. From now on, no other address is tried: all attempts of
    /// a connection have the same id, so the decision could be mistaken for a decision about the peer at another address.
    pub(crate) fn postpone_judgement(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get_mut(id) else { return };
        if slot.conn.postpone_judgement() {
            slot.link.fallback = None;
        }
    }

    /// Starts the next attempt of a connection, with the same connection id. Returns false if no attempt remains.
    pub(in crate::driver) fn attempt_next(&mut self, id: ConnectionId) -> bool {
        let Self { table, devices, providers, owners, config, now, effects, stats, os, .. } = self;
        let Some(slot) = table.get_mut(id) else { return false };
        let Some(opening) = slot.conn.reopening() else { return false };
        let Some(mut fallback) = slot.link.fallback.take() else { return false };
        // A callback of this turn may have run for a long time, so `now` may be out of date.
        let begun = os.clock.now();
        let resolved = fallback.resolve_next(providers, config, &mut effects.log_limit, begun);
        let Ok(ConnectAttempt { peer, cm, deadline }) = resolved else {
            return false;
        };
        log::debug!("{id}: {peer} is tried");
        let mut conn = Connection::new(id, Role::Active, Opening { peer, ..opening }, config, *now);
        conn.inherit(&slot.conn);
        let mut old = std::mem::replace(slot, ConnectionSlot::new(conn, cm, slot.link.service));
        slot.link.fallback = (!fallback.is_empty()).then_some(fallback);
        slot.link.regions.clone_from(&old.link.regions);
        let qp = old.link.qp;
        old.destroy(providers, owners, stats, *now);
        // The connection keeps its id, so `vacate` must notify the shared queue that the remaining completions of the destroyed queue pair
        // have no connection. Otherwise they would count as completions of the next attempt.
        old.link.qp = qp;
        let device = old.link.place.map_or(usize::MAX, |place| place.device);
        old.conn.drop_attempt(&mut Env { now: *now, config, device, buffers: devices.buffers(device), effects, stats });
        owners.own(cm, CmIdOwner::Connection(id));
        self.revoke_regions_of(id);
        self.vacate(old);
        self.set_deadline(id, Some(deadline));
        true
    }

    /// Adds a new connection to the table and returns its id.
    fn insert(&mut self, cm: Handle<CmId>, service: Service, role: Role, opening: Opening) -> ConnectionId {
        let (config, now) = (&self.config, self.now);
        let id =
            self.table.insert(|id| ConnectionSlot::new(Connection::new(id, role, opening, config, now), cm, service));
        if cm != Handle::NONE {
            self.owners.own(cm, CmIdOwner::Connection(id));
        }
        if let Some(membership) = &mut self.membership {
            membership.gained();
        }
        id
    }

    /// Handles the next event of the connection manager.
    pub(crate) fn next_cm(&mut self) -> Result<CmStep, Error> {
        let Some((provider, event)) = self.providers.next_cm_event(self.now)? else {
            self.drop_removed_devices();
            return Ok(CmStep::Nothing);
        };
        log::trace!("connection manager: {event:?}");
        let CmEvent { id, kind } = event;
        // The connection-manager id of a new connect request has no owner yet. So the owner of the listener's id handles the event.
        let of = if let CmEventKind::ConnectRequest { listener, .. } = kind { listener } else { id };
        let owner = self.owners.owner(Handle { provider, id: of });
        let cm = Handle { provider, id };
        if let Some(CmIdOwner::Endpoint(number)) = owner {
            return Ok(CmStep::Endpoint(number, cm, kind));
        }
        match (owner, kind) {
            (Some(CmIdOwner::Listener(key)), CmEventKind::ConnectRequest { device, peer, private_data, .. }) => {
                let device = device_index(provider, device);
                let request = self.request(cm, key, device, peer, private_data);
                return Ok(request.map_or(CmStep::Done, CmStep::Request));
            }
            (_, CmEventKind::ConnectRequest { .. }) => self.reject(cm, Framing::Raw, RejectReason::Busy, &[]),
            (Some(CmIdOwner::Listener(key)), CmEventKind::DeviceRemoval) => self.listener_lost(key),
            (Some(CmIdOwner::Listener(key)), CmEventKind::AddressChange) => self.listener_moved(key),
            (Some(CmIdOwner::Connection(id)), CmEventKind::Resolved { device }) => {
                self.cm_resolved(id, device_index(provider, device));
            }
            (Some(CmIdOwner::Connection(id)), kind) => self.cm_event(id, kind),
            // The event is for a connection or a listener that has ended, or is of a kind that the owner does not need.
            _ => {}
        }
        Ok(CmStep::Done)
    }

    /// Handles the event that the address of a new connection is resolved: a provider has found a device through which it can reach the
    /// peer.
    fn cm_resolved(&mut self, id: ConnectionId, device: usize) {
        if let Some(slot) = self.table.get_mut(id) {
            self.providers.note_use(slot.link.cm.provider);
            let limit = slot.link.fallback.as_mut().and_then(Fallback::resolved);
            slot.link.fallback.take_if(|fallback| fallback.is_empty());
            if limit.is_some() {
                self.set_deadline(id, limit);
            }
        }
        if let Err(error) = self.resolved(id, device) {
            let ending = Ending::ConnectError(error.into());
            self.input(id, |conn, env| conn.end(ending, env));
        }
    }

    fn cm_event(&mut self, id: ConnectionId, kind: CmEventKind) {
        match kind {
            CmEventKind::Established { private_data, .. } => {
                let own = self.buffer_size_of(id);
                let offers = self.input(id, |conn, env| conn.established(&private_data, own, env));
                self.note_carried(id);
                // The peer has accepted the connection at this address. The time limit of a single attempt, which is shorter, no longer
                // applies, so the handshake gets the full connect timeout.
                if self
                    .table
                    .get(id)
                    .is_some_and(|slot| slot.link.fallback.is_some() && slot.conn.state().is_securing())
                {
                    self.set_timeout(id, self.config.timeouts.connect);
                }
                if (offers == Some(true) || self.knows_extensions(id)) && self.enable_extensions(id) {
                    self.input(id, |conn, _| conn.use_extensions());
                }
            }
            CmEventKind::Rejected { private_data } => {
                self.input(id, |conn, env| conn.rejected(private_data.into_vec(), env));
            }
            CmEventKind::ConnectFailed(failure) => {
                self.input(id, |conn, env| conn.connect_failed(failure, env));
            }
            CmEventKind::Disconnected(cause) => {
                self.input(id, |conn, env| conn.disconnected(cause, env));
                self.note(Stages::ENDS);
            }
            CmEventKind::DeviceRemoval => {
                self.input(id, Connection::device_removed);
                self.note(Stages::ENDS);
            }
            CmEventKind::TimewaitExit => {}
            other => log::debug!("{id}: {other:?} ignored"),
        }
    }

    /// Records and logs whether an established connection uses shared memory.
    fn note_carried(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get(id) else { return };
        let Some(qp) = slot.link.qp else { return };
        if self.providers.note_carried(slot.link.cm.provider, qp) {
            let (peer, limit) = (slot.conn.peer(), &mut self.effects.log_limit);
            peer_log!(limit, self.now, Carried, Info, peer, "{id}: the peer is on this host: over {SHARED_MEMORY}");
        }
    }

    /// Creates the queue pair of a connection whose address is resolved, posts its receives, and sends the connect request.
    fn resolved(&mut self, id: ConnectionId, device: usize) -> Result<(), Error> {
        if !self.table.get_mut(id).is_some_and(|slot| slot.conn.resolved()) {
            return Ok(());
        }
        self.create_queue_pair(id, device)?;
        let (own, extensions) = (self.buffer_size_of(id), self.offers_extensions(id));
        let Some(slot) = self.table.get_mut(id) else { return Ok(()) };
        let private_data = slot.conn.request(own, extensions, &self.config);
        let (provider, cm) = self.providers.of(slot.link.cm);
        provider.connect(cm, &slot.link.service.param(&private_data, slot.conn.framing()))?;
        Ok(())
    }

    /// Creates the queue pair of a connection on the device `index`, and posts its receives.
    fn create_queue_pair(&mut self, id: ConnectionId, index: usize) -> Result<(), Error> {
        let Self { table, devices, providers, config, now, stages, .. } = self;
        let slot = table.get_mut(id).ok_or(Error::Gone("connection"))?;
        let sharing = config.shared_receives.filter(|_| slot.conn.framing() == Framing::Credits);
        stages.insert(Stages::CHANNELS);
        devices.use_device(index, providers, config);
        if let Some(receives) = sharing {
            devices.settle_shared(providers);
            let device = devices.get_mut(index).ok_or(Error::Gone("device"))?;
            device.share_receives(providers.of_device(index), receives)?;
        }
        let (provider, cm) = providers.of(slot.link.cm);
        let device = devices.get_mut(index).filter(|device| !device.removed).ok_or(Error::Gone("device"))?;
        let room = device.claim(provider, config, sharing)?;
        let cq = device.cqs[room.cq].id;
        let attr = QpAttr { send_cq: cq, recv_cq: cq, ..device.queues };
        let made = match (&mut device.buffers.shared, sharing) {
            (Some(shared), Some(receives)) => match shared.claims.join(*now) {
                Some(claim) => match provider.create_qp(cm, &QpAttr { srq: Some(shared.srq()), ..attr }) {
                    Ok(qp) => {
                        shared.own(qp, id);
                        let window = claim.receives();
                        Ok((qp, RecvQueue::shared(claim), window))
                    }
                    Err(error) => {
                        shared.claims.take_back(claim.receives());
                        Err(error.into())
                    }
                },
                None => Err(Error::Limit { limit: "shared_receives", value: receives.into() }),
            },
            _ => {
                let size = match slot.conn.framing() {
                    Framing::Credits => buffer_len(device.buffer_size),
                    Framing::Raw => device.buffer_size as usize,
                };
                let receives = RecvQueue::own(attr.max_recv_wr, size);
                provider.create_qp(cm, &attr).map(|qp| (qp, receives, 0)).map_err(Error::from)
            }
        };
        let (qp, receives, window) = match made {
            Ok(made) => made,
            Err(error) => {
                device.release(room, 0, None);
                return Err(error);
            }
        };
        let immediate = provider.immediate_sends().is_some();
        slot.conn.set_queues((attr.max_send_wr, immediate), receives, window);
        (slot.link.place, slot.link.qp) = (Some(DeviceBinding { device: index, room }), Some(qp));
        if sharing.is_none() {
            let mut chain = self.devices.take_receive_chain();
            let posted = match self.at_with_provider(id) {
                Some((slot, mut env, provider)) => post_own_receives(slot, &mut env, provider, qp, &mut chain),
                None => Ok(()),
            };
            self.devices.put_receive_chain(chain);
            posted?;
            // The greeting will grant these receives to the peer.
            self.input(id, |conn, _| conn.grant_initial(attr.max_recv_wr));
        }
        Ok(())
    }

    // Accepting.

    /// Checks that a request can become a connection of this reactor. Otherwise refuses the request and returns `None`.
    pub(crate) fn screen(&mut self, request: IncomingRequest) -> Option<IncomingRequest> {
        let peer = request.peer;
        let refusal = match request.greeting() {
            Err(reason) => Some((reason, Level::Info, reason.to_string())),
            Ok(greeting) if greeting.security != Some(request.security.mode()) => {
                let why = "it secures its connections in another way than this listener";
                Some((RejectReason::Security(request.security.mode()), Level::Warn, why.into()))
            }
            Ok(_) if !self.config.admits(peer.ip()) => {
                let why = "its network is not among those that may connect";
                Some((RejectReason::Refused, Level::Info, why.into()))
            }
            Ok(_) if self.drain.is_on() => {
                Some((RejectReason::Draining, Level::Debug, "the reactor is being drained".into()))
            }
            Ok(_) => self.find_slot(&request).err().map(|error| (RejectReason::Busy, Level::Warn, error.to_string())),
        };
        match refusal {
            Some((reason, level, why)) => {
                self.log_refusal(peer, level, &why);
                self.reject(request.cm, request.framing, reason, &[]);
                self.request_done(request.placed);
                None
            }
            None => Some(request),
        }
    }

    /// Checks if there is a slot for an incoming connection. `Ok(None)`: a slot is free. `Ok(Some)`: the connection with this id must be
    /// evicted first. An error: a limit is reached, and no connection may be evicted.
    fn find_slot(&self, request: &IncomingRequest) -> Result<Option<ConnectionId>, Error> {
        let Config { max_connections, max_pending, max_handshakes_per_peer, .. } = self.config;
        let (host, pending) = (Host::of(request.peer.ip()), &self.table.pending);
        // A handshake takes processor time, so one host may use only a part of the slots. If the host already uses this part, its new
        // connection evicts the oldest of its connections. If that connection is not slow, the new connection is refused.
        // bound: handshakes
        let most = max_handshakes_per_peer.unwrap_or((max_pending as usize).div_ceil(2));
        if !request.security.is_plain() && pending.count_of(host) >= most {
            let limit = Error::Limit { limit: "max_handshakes_per_peer", value: most as u64 };
            return pending.slow_of(host).map(Some).ok_or(limit);
        }
        // A host with many connections gets none of the last slots. Instead it pays for its new
        // connection as above.
        let most = self.config.max_connections_per_host;
        if self.table.hosts.connections(host) >= most as usize && self.is_crowded(request.device) {
            let limit = Error::Limit { limit: "max_connections_per_host", value: most.into() };
            return pending.slow_of(host).map(Some).ok_or(limit);
        }
        let (limit, value) = match (self.table.len(), pending.len()) {
            (all, _) if all >= max_connections as usize => ("max_connections", max_connections),
            (_, waiting) if waiting >= max_pending as usize => ("max_pending", max_pending),
            _ => return Ok(None),
        };
        pending.gives_way(host).map(Some).ok_or(Error::Limit { limit, value: value.into() })
    }

    /// Returns true if one more connection on this device would use the last slots of
    /// `max_connections`, or the last of the device's buffers or shared receives.
    fn is_crowded(&self, device: usize) -> bool {
        let is_crowded = is_scarce(self.table.len() + 1, self.config.max_connections as usize)
            || self.devices.get(device).is_some_and(|device| device.is_crowded(&self.config));
        is_crowded && !crate::planted("one-host-takes-all-slots")
    }

    /// Accepts a request, as the program has decided. `answer` is the private data for the peer.
    pub(crate) fn accept(&mut self, request: IncomingRequest, answer: &[u8]) {
        let (cm, framing, peer, placed) = (request.cm, request.framing, request.peer, request.placed);
        if let Err(error) = self.try_accept(request, answer) {
            let (reason, level) = match error {
                // The program has passed too much private data, and would do so again if the peer tried again. So the peer receives the
                // reason `Refused` and not `Busy`.
                Error::PrivateDataTooLong { .. } => (RejectReason::Refused, Level::Error),
                _ => (RejectReason::Busy, Level::Warn),
            };
            self.log_refusal(peer, level, &error.to_string());
            self.reject(cm, framing, reason, &[]);
        }
        self.request_done(placed);
    }

    /// Logs that a request is refused. The number of such log lines per host is limited.
    pub(crate) fn log_refusal(&mut self, peer: SocketAddr, level: Level, why: &str) {
        let (limit, now) = (&mut self.effects.log_limit, self.now);
        peer_log!(limit, now, Refused, level, peer, "{peer} is refused: {why}");
    }

    /// Returns the address of a connection's peer, the time, and the limit on the lines about
    /// peers.
    pub(crate) fn log_limit_of(&mut self, id: ConnectionId) -> Option<(SocketAddr, Instant, &mut LogLimit)> {
        let peer = self.table.get(id)?.conn.peer();
        Some((peer, self.now, &mut self.effects.log_limit))
    }

    /// Refuses a request, as the program has decided. `answer` is the private data for the peer.
    pub(crate) fn refuse(&mut self, request: &IncomingRequest, answer: &[u8]) {
        self.reject(request.cm, request.framing, RejectReason::Refused, answer);
        self.request_done(request.placed);
    }

    fn try_accept(&mut self, request: IncomingRequest, answer: &[u8]) -> Result<(), Error> {
        let IncomingRequest { cm, listener, framing, service, ref security, device, peer, placed, .. } = request;
        if framing == Framing::Credits && answer.len() > MAX_USER_PRIVATE_DATA {
            return Err(Error::PrivateDataTooLong { len: answer.len(), max: MAX_USER_PRIVATE_DATA });
        }
        let Ok(greeting) = request.greeting() else { return Err(Error::Gone("request")) };
        // The program may have opened connections after the first call of `find_slot`, so call it again.
        if let Some(oldest) = self.find_slot(&request)? {
            self.evict(oldest);
        }
        log::debug!("{peer} is accepted on {listener}");
        if let Some(membership) = self.membership.as_mut().filter(|_| placed) {
            membership.begin();
        }
        let security = security.clone();
        let opening = Opening { framing, peer, host: None, private_data: Vec::new(), probes: false, security };
        let id = self.insert(cm, service, Role::Passive, opening);
        let created = self.create_queue_pair(id, device).or_else(|error| {
            // A slot was free, but the memory for buffers or the receives of the shared queue may be used up. The eviction of another
            // connection frees memory and receives.
            let is_limit = matches!(error, Error::Limit { .. });
            let oldest = self.table.pending.gives_way(Host::of(peer.ip())).filter(|_| is_limit).ok_or(error)?;
            self.evict(oldest);
            self.create_queue_pair(id, device)
        });
        if let Err(error) = created {
            // The program was not notified of the connection, so it receives no callback. The connection-manager id is kept, because the
            // caller needs it to reject the request.
            self.forget(id);
            return Err(error);
        }
        let own = self.buffer_size_of(id);
        let offers = framing == Framing::Credits && greeting.extensions;
        let extensions = (offers || self.knows_extensions(id)) && self.enable_extensions(id);
        let Some(slot) = self.table.get_mut(id) else { return Ok(()) };
        slot.conn.came_to(listener);
        slot.conn.agree(&greeting, own, extensions, &self.config);
        let reply = slot.conn.greeting(answer, own, extensions, &self.config);
        slot.conn.note_greeting(&request.private_data);
        slot.conn.note_greeting(&reply);
        let accepted = self.set_timeout(id, self.config.timeouts.handshake);
        self.table.add_accepted(id, accepted);
        let (provider, raw) = self.providers.of(cm);
        if let Err(error) = provider.accept(raw, &service.param(&reply, framing), self.now) {
            if let TransportError::SharedMemoryOnly { is_temporary, .. } = error {
                self.log_refusal(peer, Level::Info, &error.to_string());
                let reason = if is_temporary { RejectReason::Busy } else { RejectReason::SharedMemoryOnly };
                self.reject(cm, framing, reason, &[]);
                self.withdraw(id);
                return Ok(());
            }
            // The peer may have disconnected after it sent the request. This is no local fault, so the error is only logged. The program
            // was not notified of the connection.
            log::debug!("{id}: accepting {peer}: {error}");
            self.input(id, |conn, env| conn.end(Ending::Silent, env));
        }
        Ok(())
    }

    /// Rejects a request and destroys its connection-manager id. `user` is the program's private data for the peer.
    pub(in crate::driver) fn reject(&mut self, cm: Handle<CmId>, framing: Framing, reason: RejectReason, user: &[u8]) {
        self.stats.connections.refused += 1;
        let fits = user.len() <= MAX_USER_PRIVATE_DATA;
        if !fits {
            let (len, limit) = (user.len(), &mut self.effects.log_limit);
            let now = self.now;
            peer_log!(
                limit,
                now,
                Failed,
                Error,
                NOBODY,
                "{len} bytes of private data: at most {MAX_USER_PRIVATE_DATA} fit"
            );
        }
        let user = if fits { user } else { &[] };
        let data = match framing {
            Framing::Raw => user.to_vec(),
            Framing::Credits => Greeting::reject(reason, user).emit(),
        };
        let (provider, id) = self.providers.of(cm);
        if let Err(error) = provider.reject(id, &data, self.now) {
            log::debug!("rejecting: {error}");
            self.discard(cm);
        }
    }

    // The features of a device.

    /// Returns true if the device of a connection has extensions, which can be used only if the peer supports them too.
    fn offers_extensions(&self, id: ConnectionId) -> bool {
        let device = self.table.get(id).and_then(|slot| self.devices.get(slot.link.place?.device));
        let info = device.and_then(|device| self.providers.get_of_device(device.index()).device(device.id));
        info.is_some_and(|info| info.capabilities.features.contains(Features::EXTENSIONS_BY_AGREEMENT))
    }

    /// Returns true if the program has declared that the peer supports the extensions. With `Framing::Raw`, only this declaration enables
    /// the extensions, because there is no greeting in which the sides could agree on them.
    fn knows_extensions(&self, id: ConnectionId) -> bool {
        self.table.get(id).is_some_and(|slot| slot.conn.framing() == Framing::Raw && slot.link.service.extensions)
    }

    /// Enables the extensions on a connection whose peer supports them. Returns false if the local device does not have them, or if
    /// enabling them failed.
    fn enable_extensions(&mut self, id: ConnectionId) -> bool {
        let offered = self.offers_extensions(id);
        let Some(slot) = self.table.get(id).filter(|_| offered) else { return false };
        let (Some(qp), Some(role)) = (slot.link.qp, self.providers.numbered(slot.link.cm.provider).extensions()) else {
            return false;
        };
        role.enable_extensions(qp).is_ok()
    }

    /// Returns the largest payload of one buffer on the device of a connection, in bytes.
    fn buffer_size_of(&self, id: ConnectionId) -> u32 {
        let device = self.table.get(id).and_then(|slot| self.devices.get(slot.link.place?.device));
        device.map_or(self.config.buffer_size, |device| device.buffer_size)
    }
}
