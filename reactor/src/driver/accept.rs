//! Stage 4: what the connection manager says, from resolving an address to a connection that is up.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;

use log::Level;
use rdma_transport::QpAttr;
use rdma_transport::caps::Features;
use rdma_transport::cm::{CmEvent, CmEventKind, CmId};
use rdma_transport::newcomers::Host;
use rdma_transport::provider::Provider;

use super::Driver;
use super::data_path::post_own_receives;
use super::fallback::{Attempt, Fallback};
use super::owners::Owner;
use super::stages::Stages;
use super::table::{Place, Seat};
use crate::config::{Config, Framing};
use crate::conn::greeting::{Greeting, MAX_USER_PRIVATE_DATA};
use crate::conn::recv_queue::RecvQueue;
use crate::conn::state::Ending;
use crate::conn::{Connection, Opening, Role};
use crate::error::{Error, RejectReason};
use crate::id::{ConnectionId, ListenerId};
use crate::limits::buffer_len;
use crate::log_limit::{Complaint, complain};
use crate::options::{ConnectOptions, Service, check_security};
use crate::providers::{EXCHANGE, Handle, SHARED_MEMORY, device_index, role};
use crate::security::Security;

/// What came of asking for an event of the connection manager.
#[derive(Debug)]
pub(crate) enum CmStep {
    /// There was none.
    Nothing,
    /// It was for a connection or a listener.
    Done,
    /// A peer wants a connection: the program is to be asked.
    Request(Request),
    /// It is a guest's, whose number comes with it.
    Guest(u64, Handle<CmId>, CmEventKind),
}

/// A connect request, wherever it came in. Nothing is allocated for it yet.
#[derive(Debug)]
pub(crate) struct Request {
    pub(super) cm: Handle<CmId>,
    /// Index of the reactor that listens, and its listener.
    pub(super) reactor: usize,
    pub(super) listener: ListenerId,
    pub(super) framing: Framing,
    pub(super) service: Service,
    pub(super) security: Security,
    /// Index of the device that it came in on.
    pub(super) device: usize,
    pub(super) peer: SocketAddr,
    pub(super) private_data: Box<[u8]>,
    /// The request counts as a connection of this reactor already.
    pub(super) placed: bool,
}

impl Request {
    /// What the peer says of itself.
    pub(super) fn greeting(&self) -> Result<Greeting<'_>, RejectReason> {
        match self.framing {
            Framing::Raw => Ok(Greeting::reject(RejectReason::Refused, &self.private_data)),
            Framing::Credits => Greeting::parse(&self.private_data).and_then(Greeting::checked),
        }
    }

    /// The listener, its reactor's index, the peer and its private data: what the program is told.
    pub(crate) fn parts(&self) -> (ListenerId, usize, SocketAddr, &[u8]) {
        let private_data = self.greeting().map_or(&[][..], |greeting| greeting.user);
        (self.listener, self.reactor, self.peer, private_data)
    }
}

impl Driver {
    // Connecting.

    /// Opens a connection to the first of several addresses that lets itself be connected to.
    pub(crate) fn connect(&mut self, peers: &[SocketAddr], options: ConnectOptions) -> Result<ConnectionId, Error> {
        let security = self.may_connect(&options)?;
        let ConnectOptions { private_data, framing, path, exchange, service, .. } = options;
        let mut fallback = Fallback::new(peers.iter().copied(), path, exchange);
        let Attempt { peer, cm, deadline } = fallback.resolve_next(&mut self.providers, &self.config, self.now)?;
        let opening = Opening { framing, peer, host: None, private_data, security };
        let id = self.insert(cm, service, Role::Active, opening);
        if let Some(seat) = self.table.get_mut(id) {
            seat.link.fallback = (!fallback.is_empty()).then_some(fallback);
        }
        self.set_deadline(id, Some(deadline));
        self.ring();
        Ok(id)
    }

    /// Opens a connection by exchange, over a stream of the program.
    pub(crate) fn connect_over(&mut self, stream: OwnedFd, options: ConnectOptions) -> Result<ConnectionId, Error> {
        let security = self.may_connect(&options)?;
        let ConnectOptions { private_data, framing, path, exchange, service, .. } = options;
        // Any descriptor may be asked for a peer; one that is no socket of IP has none.
        let stream = TcpStream::from(stream);
        let peer = stream.peer_addr().unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
        let (exchange, deadline) = (exchange.unwrap_or_default(), self.now + self.config.timeouts.connect);
        let provider = self.providers.exchanging()?;
        let role = role(self.providers.numbered(provider), Provider::exchange, EXCHANGE)?;
        let cm = Handle { provider, id: role.resolve_over(stream.into(), &path, &exchange, deadline)? };
        let opening = Opening { framing, peer, host: None, private_data, security };
        let id = self.insert(cm, service, Role::Active, opening);
        self.set_deadline(id, Some(deadline));
        self.ring();
        Ok(id)
    }

    /// Opens a connection to a host, by its name.
    pub(crate) fn connect_host(
        &mut self,
        host: &str,
        port: u16,
        options: ConnectOptions,
    ) -> Result<ConnectionId, Error> {
        let security = self.may_connect(&options)?;
        let ConnectOptions { private_data, framing, path, exchange, service, .. } = options;
        let unknown = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
        let opening = Opening { framing, peer: unknown, host: Some(host.into()), private_data, security };
        let id = self.insert(Handle::NONE, service, Role::Active, opening);
        if let Err(error) = self.look_up(id, (host.to_owned(), port), path, exchange) {
            self.release(id);
            return Err(Error::Lookup(error));
        }
        self.set_deadline(id, Some(self.now + self.config.timeouts.connect));
        self.ring();
        Ok(id)
    }

    /// Checks whether a connection may be opened; returns how it is to be secured.
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

    /// Goes on with the next address of a connection whose attempt has failed and has left nothing on the device. `false` if
    /// there is none, and the program is to be told of the end.
    pub(super) fn try_next_address(&mut self, id: ConnectionId) -> bool {
        if self.refuses_all() {
            return false;
        }
        let Some(seat) = self.table.get(id) else { return false };
        let Some(error) = seat.conn.failed_attempt() else { return false };
        // Completions that are still to come would be taken for those of the next attempt.
        if seat.conn.is_outstanding() || !seat.allowance.backlog.is_empty() {
            return false;
        }
        log::info!("{id}: {}: {error}", seat.conn.peer());
        self.attempt_next(id)
    }

    /// Begins an attempt with the next address of a connection; `false` if there is none.
    pub(super) fn attempt_next(&mut self, id: ConnectionId) -> bool {
        let Self { table, providers, owners, config, now, stats, .. } = self;
        let Some(seat) = table.get_mut(id) else { return false };
        let Some(opening) = seat.conn.reopening() else { return false };
        let Some(mut fallback) = seat.link.fallback.take() else { return false };
        let Ok(Attempt { peer, cm, deadline }) = fallback.resolve_next(providers, config, *now) else {
            return false;
        };
        log::info!("{id}: {peer} is tried");
        let mut conn = Connection::new(id, Role::Active, Opening { peer, ..opening }, config, *now);
        conn.set_user(seat.conn.user());
        let mut old = std::mem::replace(seat, Seat::new(conn, cm, seat.link.service));
        seat.link.fallback = (!fallback.is_empty()).then_some(fallback);
        seat.link.regions.clone_from(&old.link.regions);
        old.destroy(providers, owners, stats, *now);
        owners.own(cm, Owner::Connection(id));
        self.revoke_regions_of(id);
        self.vacate(old);
        self.set_deadline(id, Some(deadline));
        true
    }

    /// Adds a connection.
    fn insert(&mut self, cm: Handle<CmId>, service: Service, role: Role, opening: Opening) -> ConnectionId {
        let (config, now) = (&self.config, self.now);
        let id = self.table.insert(|id| Seat::new(Connection::new(id, role, opening, config, now), cm, service));
        if cm != Handle::NONE {
            self.owners.own(cm, Owner::Connection(id));
        }
        if let Some(membership) = &mut self.membership {
            membership.gained();
        }
        id
    }

    /// Takes the next event of the connection manager.
    pub(crate) fn next_cm(&mut self) -> Result<CmStep, Error> {
        let Some((provider, event)) = self.providers.next_cm_event(self.now)? else {
            self.drop_removed_devices();
            return Ok(CmStep::Nothing);
        };
        log::trace!("connection manager: {event:?}");
        let CmEvent { id, kind } = event;
        // The owner of a request is that of its listener.
        let of = if let CmEventKind::ConnectRequest { listener, .. } = kind { listener } else { id };
        let owner = self.owners.owner(Handle { provider, id: of });
        let cm = Handle { provider, id };
        if let Some(Owner::Guest(number)) = owner {
            return Ok(CmStep::Guest(number, cm, kind));
        }
        match (owner, kind) {
            (Some(Owner::Listener(key)), CmEventKind::ConnectRequest { device, peer, private_data, .. }) => {
                let device = device_index(provider, device);
                let request = self.request(cm, key, device, peer, private_data);
                return Ok(request.map_or(CmStep::Done, CmStep::Request));
            }
            (_, CmEventKind::ConnectRequest { .. }) => self.reject(cm, Framing::Raw, RejectReason::Busy, &[]),
            (Some(Owner::Listener(key)), CmEventKind::DeviceRemoval) => self.listener_lost(key),
            (Some(Owner::Listener(key)), CmEventKind::AddressChange) => self.listener_moved(key),
            (Some(Owner::Connection(id)), CmEventKind::Resolved { device }) => {
                self.cm_resolved(id, device_index(provider, device));
            }
            (Some(Owner::Connection(id)), kind) => self.cm_event(id, kind),
            // The event is late, or of no interest.
            _ => {}
        }
        Ok(CmStep::Done)
    }

    /// The address of a connection of this side is resolved: the provider carries the connection.
    fn cm_resolved(&mut self, id: ConnectionId, device: usize) {
        if let Some(seat) = self.table.get_mut(id) {
            self.providers.note_use(seat.link.cm.provider);
            let limit = seat.link.fallback.as_mut().and_then(Fallback::resolved);
            seat.link.fallback.take_if(|fallback| fallback.is_empty());
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
                // The address answers: from here on it has all the time that a connection may take.
                if self
                    .table
                    .get(id)
                    .is_some_and(|seat| seat.link.fallback.is_some() && seat.conn.state().is_securing())
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

    /// Notes how a connection that is up is carried.
    fn note_carried(&mut self, id: ConnectionId) {
        let Some(seat) = self.table.get(id) else { return };
        let Some(qp) = seat.link.qp else { return };
        if self.providers.note_carried(seat.link.cm.provider, qp) {
            log::info!("{id}: the peer is on this host: over {SHARED_MEMORY}");
        }
    }

    /// A connection of this side is on a device: it gets its queue pair and receives, and the peer is asked.
    fn resolved(&mut self, id: ConnectionId, device: usize) -> Result<(), Error> {
        if !self.table.get_mut(id).is_some_and(|seat| seat.conn.resolved()) {
            return Ok(());
        }
        self.equip(id, device)?;
        let (own, extensions) = (self.buffer_size_of(id), self.offers_extensions(id));
        let Some(seat) = self.table.get_mut(id) else { return Ok(()) };
        let private_data = seat.conn.request(own, extensions, &self.config);
        let (provider, cm) = self.providers.of(seat.link.cm);
        provider.connect(cm, &seat.link.service.param(&private_data))?;
        Ok(())
    }

    /// Gives a connection its queue pair, and posts its receives.
    fn equip(&mut self, id: ConnectionId, index: usize) -> Result<(), Error> {
        let Self { table, devices, providers, config, now, stages, .. } = self;
        let seat = table.get_mut(id).ok_or(Error::Gone("connection"))?;
        let sharing = config.shared_receives.filter(|_| seat.conn.framing() == Framing::Credits);
        stages.insert(Stages::CHANNELS);
        devices.use_device(index, providers, config);
        if let Some(receives) = sharing {
            let device = devices.get_mut(index).ok_or(Error::Gone("device"))?;
            device.share_receives(providers.of_device(index), receives)?;
            devices.settle_shared(providers);
        }
        let (provider, cm) = providers.of(seat.link.cm);
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
                let size = match seat.conn.framing() {
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
        seat.conn.equip((attr.max_send_wr, immediate), receives, window);
        (seat.link.place, seat.link.qp) = (Some(Place { device: index, room }), Some(qp));
        if sharing.is_none() {
            let mut chain = self.devices.take_receive_chain();
            let posted = match self.at_with_provider(id) {
                Some((seat, mut env, provider)) => post_own_receives(seat, &mut env, provider, qp, &mut chain),
                None => Ok(()),
            };
            self.devices.put_receive_chain(chain);
            posted?;
            // These are the receives that the greeting grants.
            self.input(id, |conn, _| conn.grant_initial(attr.max_recv_wr));
        }
        Ok(())
    }

    // Accepting.

    /// Whether a request can become a connection here; if not, it is refused.
    pub(crate) fn screen(&mut self, request: Request) -> Option<Request> {
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
            Ok(_) => self.find_place(&request).err().map(|error| (RejectReason::Busy, Level::Warn, error.to_string())),
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

    /// Finds a place for a connection that a peer wants: a free one (`None`), or that of a connection which gives way.
    fn find_place(&self, request: &Request) -> Result<Option<ConnectionId>, Error> {
        let Config { max_connections, max_pending, max_handshakes_per_peer, .. } = self.config;
        let (host, pending) = (Host::of(request.peer.ip()), &self.table.pending);
        // A handshake takes time to compute, so one host gets no more than a part of them, and pays for more by itself.
        let most = max_handshakes_per_peer.unwrap_or((max_pending as usize).div_ceil(2));
        if !request.security.is_plain() && pending.count_of(host) >= most {
            let limit = Error::Limit { limit: "max_handshakes_per_peer", value: most as u64 };
            return pending.slow_of(host).map(Some).ok_or(limit);
        }
        let (limit, value) = match (self.table.len(), pending.len()) {
            (all, _) if all >= max_connections as usize => ("max_connections", max_connections),
            (_, waiting) if waiting >= max_pending as usize => ("max_pending", max_pending),
            _ => return Ok(None),
        };
        pending.gives_way(host).map(Some).ok_or(Error::Limit { limit, value: value.into() })
    }

    /// The program takes a request, and has `answer` to say.
    pub(crate) fn accept(&mut self, request: Request, answer: &[u8]) {
        let (cm, framing, peer, placed) = (request.cm, request.framing, request.peer, request.placed);
        if let Err(error) = self.try_accept(request, answer) {
            let (reason, level) = match error {
                // This mistake of the program would be there at the peer's next attempt, too.
                Error::PrivateDataTooLong { .. } => (RejectReason::Refused, Level::Error),
                _ => (RejectReason::Busy, Level::Warn),
            };
            self.log_refusal(peer, level, &error.to_string());
            self.reject(cm, framing, reason, &[]);
        }
        self.request_done(placed);
    }

    /// Logs that a request is refused, unless its host has caused enough of such lines.
    fn log_refusal(&mut self, peer: SocketAddr, level: Level, why: &str) {
        let (limit, now) = (&mut self.effects.log_limit, self.now);
        complain!(limit, now, Complaint::Refused, level, peer, "{peer} is refused: {why}");
    }

    /// The program refuses a request, and has `answer` to say.
    pub(crate) fn refuse(&mut self, request: &Request, answer: &[u8]) {
        self.reject(request.cm, request.framing, RejectReason::Refused, answer);
        self.request_done(request.placed);
    }

    fn try_accept(&mut self, request: Request, answer: &[u8]) -> Result<(), Error> {
        let Request { cm, listener, framing, service, ref security, device, peer, placed, .. } = request;
        if framing == Framing::Credits && answer.len() > MAX_USER_PRIVATE_DATA {
            return Err(Error::PrivateDataTooLong { len: answer.len(), max: MAX_USER_PRIVATE_DATA });
        }
        let Ok(greeting) = request.greeting() else { return Err(Error::Gone("request")) };
        // The program may have opened connections since the request was screened.
        if let Some(oldest) = self.find_place(&request)? {
            self.evict(oldest);
        }
        log::debug!("{peer} is accepted on {listener}");
        if let Some(membership) = self.membership.as_mut().filter(|_| placed) {
            membership.begin();
        }
        let opening = Opening { framing, peer, host: None, private_data: Vec::new(), security: security.clone() };
        let id = self.insert(cm, service, Role::Passive, opening);
        let equipped = self.equip(id, device).or_else(|error| {
            // There may be a place and no memory for its buffers, or no shared receives.
            let is_limit = matches!(error, Error::Limit { .. });
            let oldest = self.table.pending.gives_way(Host::of(peer.ip())).filter(|_| is_limit).ok_or(error)?;
            self.evict(oldest);
            self.equip(id, device)
        });
        if let Err(error) = equipped {
            // Nobody has heard of the connection, and its connection-manager id lives on.
            self.forget(id);
            return Err(error);
        }
        let own = self.buffer_size_of(id);
        let offers = framing == Framing::Credits && greeting.extensions;
        let extensions = (offers || self.knows_extensions(id)) && self.enable_extensions(id);
        let Some(seat) = self.table.get_mut(id) else { return Ok(()) };
        seat.conn.came_to(listener);
        seat.conn.agree(&greeting, own, extensions, &self.config);
        let reply = seat.conn.greeting(answer, own, extensions, &self.config);
        seat.conn.note_greeting(&request.private_data);
        seat.conn.note_greeting(&reply);
        self.table.add_pending(id, self.now);
        self.set_timeout(id, self.config.timeouts.handshake);
        let (provider, cm) = self.providers.of(cm);
        if let Err(error) = provider.accept(cm, &service.param(&reply), self.now) {
            // The peer may have gone in between: no fault of this side, and nobody was told of the connection.
            log::debug!("{id}: accepting {peer}: {error}");
            self.input(id, |conn, env| conn.end(Ending::Silent, env));
        }
        Ok(())
    }

    /// Rejects a request; its id is gone afterwards.
    pub(super) fn reject(&mut self, cm: Handle<CmId>, framing: Framing, reason: RejectReason, user: &[u8]) {
        self.stats.connections.refused += 1;
        let fits = user.len() <= MAX_USER_PRIVATE_DATA;
        if !fits {
            log::error!("a rejection with {} bytes of private data: at most {MAX_USER_PRIVATE_DATA} fit", user.len());
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

    // What a device brings.

    /// Whether the device of a connection has something that its peer must agree on.
    fn offers_extensions(&self, id: ConnectionId) -> bool {
        let device = self.table.get(id).and_then(|seat| self.devices.get(seat.link.place?.device));
        let info = device.and_then(|device| self.providers.get_of_device(device.index()).device(device.id));
        info.is_some_and(|info| info.capabilities.features.contains(Features::EXTENSIONS_BY_AGREEMENT))
    }

    /// Whether the program has said that the peer has the extensions. Raw framing has no greeting that could.
    fn knows_extensions(&self, id: ConnectionId) -> bool {
        self.table.get(id).is_some_and(|seat| seat.conn.framing() == Framing::Raw && seat.link.service.extensions)
    }

    /// The peer offers the extensions: they are used if this side has them, too.
    fn enable_extensions(&mut self, id: ConnectionId) -> bool {
        let offered = self.offers_extensions(id);
        let Some(seat) = self.table.get(id).filter(|_| offered) else { return false };
        let (Some(qp), Some(role)) = (seat.link.qp, self.providers.numbered(seat.link.cm.provider).extensions()) else {
            return false;
        };
        role.enable_extensions(qp).is_ok()
    }

    /// Largest payload of a buffer on the device of a connection.
    fn buffer_size_of(&self, id: ConnectionId) -> u32 {
        let device = self.table.get(id).and_then(|seat| self.devices.get(seat.link.place?.device));
        device.map_or(self.config.buffer_size, |device| device.buffer_size)
    }
}
