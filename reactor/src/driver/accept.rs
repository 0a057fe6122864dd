//! Stage 4: what the connection manager says, from resolving an address to a connection that is up.

use std::net::{Ipv4Addr, SocketAddr};

use log::Level;
use rdma_transport::QpAttr;
use rdma_transport::caps::Features;
use rdma_transport::cm::{CmEvent, CmEventKind, CmId};
use rdma_transport::provider::DeviceId;
use rdma_transport::slab::Key;

use super::Driver;
use super::data_path::post_own_receives;
use super::fabric::Owner;
use super::fallback::{Attempt, Fallback};
use super::table::{Place, Seat};
use crate::config::Framing;
use crate::conn::greeting::{Greeting, MAX_USER_PRIVATE_DATA};
use crate::conn::recv_queue::RecvQueue;
use crate::conn::state::{Certainty, Ending};
use crate::conn::{Connection, Opening, Role};
use crate::error::{Error, RejectReason};
use crate::id::{ConnectionId, ListenerId};
use crate::limits::buffer_len;
use crate::options::{ConnectOptions, Service, check_security};
use crate::security::Security;

/// The connection-manager id of a connection whose address is not known yet: it names nothing.
pub(super) const NOWHERE: CmId = CmId(Key::NONE);

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
    Guest(u64, CmEvent),
}

/// A connect request, wherever it came in. Nothing is allocated for it yet.
#[derive(Debug)]
pub(crate) struct Request {
    pub(super) cm: CmId,
    /// Index of the reactor that listens, and its listener.
    pub(super) reactor: usize,
    pub(super) listener: ListenerId,
    pub(super) framing: Framing,
    pub(super) service: Service,
    pub(super) security: Security,
    pub(super) device: DeviceId,
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
        let ConnectOptions { private_data, framing, path, service, .. } = options;
        let mut fallback = Fallback::new(peers.iter().copied(), path);
        let Attempt { peer, cm, deadline } =
            fallback.resolve_next(&mut *self.fabric.provider, &self.config, self.now)?;
        let opening = Opening { framing, peer, host: None, private_data, security };
        let id = self.insert(cm, service, Role::Active, opening);
        if let Some(seat) = self.table.get_mut(id) {
            seat.link.fallback = (!fallback.is_empty()).then_some(fallback);
        }
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
        let ConnectOptions { private_data, framing, path, service, .. } = options;
        let unknown = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
        let opening = Opening { framing, peer: unknown, host: Some(host.into()), private_data, security };
        let id = self.insert(NOWHERE, service, Role::Active, opening);
        if let Err(error) = self.look_up(id, host.to_owned(), port, path) {
            self.release(id);
            return Err(Error::Lookup(error));
        }
        self.set_deadline(id, Some(self.now + self.config.connect_timeout));
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
        let Self { table, fabric, config, now, .. } = self;
        let Some(seat) = table.get_mut(id) else { return false };
        let Some(mut fallback) = seat.link.fallback.take() else { return false };
        let Ok(Attempt { peer, cm, deadline }) = fallback.resolve_next(&mut *fabric.provider, config, *now) else {
            return false;
        };
        log::info!("{id}: {peer} is tried");
        let mut conn = Connection::new(id, Role::Active, seat.conn.reopening(peer), config, *now);
        conn.set_user(seat.conn.user());
        let old = std::mem::replace(seat, Seat::new(conn, cm, seat.link.service));
        seat.link.fallback = (!fallback.is_empty()).then_some(fallback);
        seat.link.regions.clone_from(&old.link.regions);
        fabric.provider.destroy_id(old.link.cm, *now);
        fabric.disown(old.link.cm);
        fabric.own(cm, Owner::Connection(id));
        self.revoke_regions_of(id);
        self.vacate(old);
        self.set_deadline(id, Some(deadline));
        true
    }

    /// Adds a connection.
    fn insert(&mut self, cm: CmId, service: Service, role: Role, opening: Opening) -> ConnectionId {
        let (config, now) = (&self.config, self.now);
        let id = self.table.insert(|id| Seat::new(Connection::new(id, role, opening, config, now), cm, service));
        if cm != NOWHERE {
            self.fabric.own(cm, Owner::Connection(id));
        }
        if let Some(membership) = &mut self.membership {
            membership.gained();
        }
        id
    }

    /// Takes the next event of the connection manager.
    pub(crate) fn next_cm(&mut self) -> Result<CmStep, Error> {
        let Some(event) = self.fabric.provider.next_cm_event(self.now)? else {
            self.drop_removed_devices();
            return Ok(CmStep::Nothing);
        };
        log::trace!("connection manager: {event:?}");
        // The owner of a request is that of its listener.
        let of = if let CmEventKind::ConnectRequest { listener, .. } = event.kind { listener } else { event.id };
        let owner = self.fabric.owner(of);
        if let Some(Owner::Guest(number)) = owner {
            return Ok(CmStep::Guest(number, event));
        }
        let CmEvent { id: cm, kind } = event;
        match (owner, kind) {
            (Some(Owner::Listener(key)), CmEventKind::ConnectRequest { device, peer, private_data, .. }) => {
                let request = self.request(cm, key, device, peer, private_data);
                return Ok(request.map_or(CmStep::Done, CmStep::Request));
            }
            (_, CmEventKind::ConnectRequest { .. }) => self.reject(cm, Framing::Raw, RejectReason::Busy, &[]),
            (Some(Owner::Listener(key)), CmEventKind::DeviceRemoval) => self.listener_lost(key),
            (Some(Owner::Listener(key)), CmEventKind::AddressChange) => self.listener_moved(key),
            (Some(Owner::Connection(id)), kind) => self.cm_event(id, kind),
            // The event is late, or of no interest.
            _ => {}
        }
        Ok(CmStep::Done)
    }

    fn cm_event(&mut self, id: ConnectionId, kind: CmEventKind) {
        match kind {
            CmEventKind::Resolved { device } => {
                if let Err(error) = self.resolved(id, device) {
                    let ending = Ending::ConnectError(error.into());
                    self.input(id, |conn, env| conn.end(ending, Certainty::Known, env));
                }
            }
            CmEventKind::Established { private_data, .. } => {
                let own = self.buffer_size_of(id);
                let offers = self.input(id, |conn, env| conn.established(&private_data, own, env));
                // The address answers: from here on it has all the time that a connection may take.
                if self
                    .table
                    .get(id)
                    .is_some_and(|seat| seat.link.fallback.is_some() && seat.conn.state().is_securing())
                {
                    self.set_timeout(id, self.config.connect_timeout);
                }
                if offers == Some(true) && self.enable_extensions(id) {
                    self.input(id, |conn, _| conn.use_extensions());
                }
            }
            CmEventKind::Rejected { private_data } => {
                self.input(id, |conn, env| conn.rejected(private_data.into_vec(), env));
            }
            CmEventKind::Moved { to } => self.moved(id, to),
            CmEventKind::ConnectFailed(failure) => {
                self.input(id, |conn, env| conn.connect_failed(failure, env));
            }
            CmEventKind::Disconnected(cause) => {
                self.input(id, |conn, env| conn.disconnected(cause, env));
                self.table.note_ending();
            }
            CmEventKind::DeviceRemoval => {
                self.input(id, Connection::device_removed);
                self.table.note_ending();
            }
            CmEventKind::TimewaitExit => {}
            other => log::debug!("{id}: {other:?} ignored"),
        }
    }

    /// A connection of this side goes on under another id of the connection manager.
    fn moved(&mut self, id: ConnectionId, to: CmId) {
        let Some(seat) = self.table.get_mut(id) else { return };
        let from = std::mem::replace(&mut seat.link.cm, to);
        self.fabric.disown(from);
        self.fabric.provider.destroy_id(from, self.now);
        self.fabric.own(to, Owner::Connection(id));
    }

    /// A connection of this side is on a device: it gets its queue pair and receives, and the peer is asked.
    fn resolved(&mut self, id: ConnectionId, device: DeviceId) -> Result<(), Error> {
        if !self.table.get_mut(id).is_some_and(|seat| seat.conn.resolved()) {
            return Ok(());
        }
        self.equip(id, device)?;
        let (own, extensions) = (self.buffer_size_of(id), self.offers_extensions(id));
        let Some(seat) = self.table.get_mut(id) else { return Ok(()) };
        let private_data = seat.conn.greeting(seat.conn.private_data(), own, extensions, &self.config);
        if seat.conn.is_secured() {
            seat.conn.note_greeting(&private_data);
        }
        self.fabric.provider.connect(seat.link.cm, &seat.link.service.param(&private_data))?;
        Ok(())
    }

    /// Gives a connection its queue pair, and posts its receives.
    fn equip(&mut self, id: ConnectionId, device: DeviceId) -> Result<(), Error> {
        let Self { table, devices, fabric, config, now, .. } = self;
        let provider = &mut *fabric.provider;
        let seat = table.get_mut(id).ok_or(Error::Gone("connection"))?;
        let index = device.0 as usize;
        let sharing = config.shared_receives.filter(|_| seat.conn.framing() == Framing::Credits);
        devices.use_device(device, provider, config);
        if let Some(receives) = sharing {
            let device = devices.get_mut(index).ok_or(Error::Gone("device"))?;
            device.share_receives(provider, receives)?;
            devices.settle_shared(provider);
        }
        let device = devices.get_mut(index).filter(|device| !device.removed).ok_or(Error::Gone("device"))?;
        let room = device.claim(provider, config, sharing)?;
        let cq = device.cqs[room.cq].id;
        let attr = QpAttr { send_cq: cq, recv_cq: cq, ..device.queues };
        let made = match (&mut device.buffers.shared, sharing) {
            (Some(shared), Some(receives)) => match shared.claims.join(*now) {
                Some(claim) => match provider.create_qp_with_srq(seat.link.cm, &attr, shared.srq()) {
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
                provider.create_qp(seat.link.cm, &attr).map(|qp| (qp, receives, 0)).map_err(Error::from)
            }
        };
        let (qp, receives, window) = match made {
            Ok(made) => made,
            Err(error) => {
                device.release(room, 0);
                return Err(error);
            }
        };
        seat.conn.equip(attr.max_send_wr, receives, window);
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
            Err(reason) => {
                log::info!("{peer} is refused: {reason}");
                Some(reason)
            }
            Ok(greeting) if greeting.security != Some(request.security.mode()) => {
                let reason = RejectReason::Security(request.security.mode());
                log::info!("{peer} is refused: it secures its connections in another way than this listener");
                Some(reason)
            }
            Ok(_) if !self.config.admits(peer.ip()) => {
                log::info!("{peer} is refused: its network is not among those that may connect");
                Some(RejectReason::Refused)
            }
            Ok(_) if self.drain.is_on() => {
                log::debug!("{peer} is refused: the reactor is being drained");
                Some(RejectReason::Busy)
            }
            Ok(_) => {
                let full = self.table.len() >= self.config.max_connections as usize;
                let pending = self.table.pending() >= self.config.max_pending;
                // A handshake takes time to compute, so one host gets no more than a part of them.
                let most =
                    self.config.max_handshakes_per_peer.unwrap_or((self.config.max_pending as usize).div_ceil(2));
                let crowds = !request.security.is_plain() && self.table.pending_of(peer.ip()) as usize >= most;
                let limit = match (full, pending) {
                    (true, _) => "max_connections",
                    (_, true) => "max_pending",
                    _ => "max_handshakes_per_peer",
                };
                (full || pending || crowds).then(|| {
                    log::warn!("{peer} is refused: {limit} is reached");
                    RejectReason::Busy
                })
            }
        };
        match refusal {
            Some(reason) => {
                self.reject(request.cm, request.framing, reason, &[]);
                self.request_done(request.placed);
                None
            }
            None => Some(request),
        }
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
            log::log!(level, "{peer} is refused: {error}");
            self.reject(cm, framing, reason, &[]);
        }
        self.request_done(placed);
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
        log::debug!("{peer} is accepted on {listener}");
        if placed && let Some(membership) = &mut self.membership {
            membership.begin();
        }
        let opening = Opening { framing, peer, host: None, private_data: Vec::new(), security: security.clone() };
        let id = self.insert(cm, service, Role::Passive, opening);
        if let Err(error) = self.equip(id, device) {
            // Nobody has heard of the connection, and its connection-manager id lives on.
            self.forget(id);
            return Err(error);
        }
        let own = self.buffer_size_of(id);
        let extensions = framing == Framing::Credits && greeting.extensions && self.enable_extensions(id);
        let Some(seat) = self.table.get_mut(id) else { return Ok(()) };
        seat.conn.came_to(listener);
        seat.conn.agree(&greeting, own, extensions, &self.config);
        let reply = seat.conn.greeting(answer, own, extensions, &self.config);
        if seat.conn.is_secured() {
            seat.conn.note_greeting(&request.private_data);
            seat.conn.note_greeting(&reply);
        }
        self.table.add_pending(peer.ip());
        self.set_timeout(id, self.config.handshake_timeout);
        if let Err(error) = self.fabric.provider.accept(cm, &service.param(&reply), self.now) {
            // The peer may have gone in between: no fault of this side, and nobody was told of the connection.
            log::debug!("{id}: accepting {peer}: {error}");
            self.input(id, |conn, env| conn.end(Ending::Silent, Certainty::Known, env));
        }
        Ok(())
    }

    /// Rejects a request; its id is gone afterwards.
    pub(super) fn reject(&mut self, cm: CmId, framing: Framing, reason: RejectReason, user: &[u8]) {
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
        if let Err(error) = self.fabric.provider.reject(cm, &data, self.now) {
            log::debug!("rejecting: {error}");
            self.fabric.provider.destroy_id(cm, self.now);
        }
    }

    // What a device brings.

    /// Whether the device of a connection has something that its peer must agree on.
    fn offers_extensions(&self, id: ConnectionId) -> bool {
        let device = self.table.get(id).and_then(|seat| self.devices.get(seat.link.place?.device));
        let info = device.and_then(|device| self.fabric.provider.device(device.id));
        info.is_some_and(|info| info.capabilities.features.contains(Features::EXTENSIONS_BY_AGREEMENT))
    }

    /// The peer offers the extensions: they are used if this side has them, too.
    fn enable_extensions(&mut self, id: ConnectionId) -> bool {
        let offered = self.offers_extensions(id);
        let qp = self.table.get(id).and_then(|seat| seat.link.qp).filter(|_| offered);
        qp.is_some_and(|qp| self.fabric.provider.enable_extensions(qp).is_ok())
    }

    /// Largest payload of a buffer on the device of a connection.
    fn buffer_size_of(&self, id: ConnectionId) -> u32 {
        let device = self.table.get(id).and_then(|seat| self.devices.get(seat.link.place?.device));
        device.map_or(self.config.buffer_size, |device| device.buffer_size)
    }
}
