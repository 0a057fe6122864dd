//! Stage 4: connection-manager events, from resolving an address to a connection that is up.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_transport::Features;
use rdma_transport::cm::{CmEvent, CmEventKind, CmId, ConnectFailure, ConnectParam, DisconnectCause};
use rdma_transport::provider::DeviceId;

use crate::config::Framing;
use crate::connection::{Ending, Phase};
use crate::context::Context;
use crate::core::{Core, Owner, TimerKind};
use crate::credit::SendWindow;
use crate::error::{ConnectError, DisconnectReason, Error};
use crate::frame::{Greeting, MAX_USER_PRIVATE_DATA, RejectReason};
use crate::handler::{Decision, Handler};
use crate::handover::Incoming;
use crate::id::{ConnectionId, ListenerId};

/// An active side that has heard nothing for this long after its hello asks once: the kernel's siw may sit on the first
/// frame of a connection until a second one comes.
const NUDGE: Duration = Duration::from_millis(100);

/// Events handled in one turn before the other stages get theirs.
const EVENTS_PER_TURN: usize = 256;

impl Core {
    /// Runs the stage; `true` when it stopped with events left.
    pub(crate) fn connection_manager<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        progressed: &mut bool,
    ) -> Result<bool, Error> {
        for _ in 0..EVENTS_PER_TURN {
            match self.provider.next_cm_event(self.now)? {
                Some(event) => self.cm_event(handler, event),
                None => {
                    self.drop_removed_devices();
                    return Ok(false);
                }
            }
            *progressed = true;
        }
        Ok(true)
    }

    fn cm_event<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, event: CmEvent) {
        log::trace!("connection manager: {event:?}");
        let CmEvent { id: cm, kind } = event;
        if let CmEventKind::ConnectRequest { listener, device, peer, private_data, .. } = kind {
            if let Some(Owner::Endpoint(id)) = self.owner(listener) {
                return self.answer_for_endpoint(id, cm);
            }
            self.connect_request(handler, cm, listener, device, peer, &private_data);
            return;
        }
        let id = match self.owner(cm) {
            Some(Owner::Connection(id)) => id,
            Some(Owner::Listener(id)) => {
                if matches!(kind, CmEventKind::DeviceRemoval) {
                    self.listener_lost(id);
                }
                return;
            }
            Some(Owner::Endpoint(id)) => return self.endpoint_event(handler, id, kind),
            Some(Owner::Lookup(key)) => return self.lookup_event(handler, key, kind),
            // Late, for an id that is gone.
            None => return,
        };
        match kind {
            CmEventKind::Resolved { device } => {
                if let Err(error) = self.resolved(id, device) {
                    self.end(id, Ending::ConnectError(error.into()));
                }
            }
            CmEventKind::Established { private_data, .. } => self.established(handler, id, &private_data),
            CmEventKind::Rejected { private_data } => {
                let error = match Greeting::parse(&private_data) {
                    Ok(no) => ConnectError::Rejected { reason: no.reason, private_data: no.user.to_vec() },
                    Err(_) => {
                        ConnectError::Rejected { reason: RejectReason::Refused, private_data: private_data.into_vec() }
                    }
                };
                self.end(id, Ending::ConnectError(error));
            }
            CmEventKind::ConnectFailed(failure) => {
                let error = match failure {
                    ConnectFailure::Timeout => ConnectError::Timeout,
                    other => ConnectError::Transport(other),
                };
                self.end(id, Ending::ConnectError(error));
            }
            CmEventKind::Disconnected(cause) => self.disconnected(id, cause),
            CmEventKind::DeviceRemoval => self.device_removed(id),
            CmEventKind::TimewaitExit => {}
            other => log::debug!("{id}: {other:?} ignored"),
        }
    }

    /// Ours is on a device: queue pair, receives, and the question to the peer.
    fn resolved(&mut self, id: ConnectionId, device: DeviceId) -> Result<(), Error> {
        match self.connections.get_mut(id.0) {
            Some(c) if c.phase == Phase::Resolving => c.phase = Phase::Connecting,
            _ => return Ok(()),
        }
        self.equip(id, device)?;
        let (max_message, extensions) = (self.max_message_of(id), self.offers_extensions(id));
        let Some(c) = self.connections.get_mut(id.0) else { return Ok(()) };
        let greeting = match c.framing {
            Framing::Raw => std::mem::take(&mut c.private_data),
            Framing::Credits => Greeting {
                window: c.rx.told(),
                max_message,
                largest: self.config.largest_in_kib(),
                extensions,
                reason: RejectReason::Refused,
                user: &c.private_data,
            }
            .emit(),
        };
        let param = ConnectParam { private_data: &greeting, ..ConnectParam::default() };
        self.provider.connect(c.cm, &param)?;
        Ok(())
    }

    /// Theirs asks, here or at another reactor that has handed it over: nothing is allocated before the handler has said yes.
    pub(crate) fn answer<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, cm: CmId, incoming: &Incoming<'_>) {
        let Incoming { framing, peer, device, .. } = *incoming;
        let greeting = match incoming.greeting() {
            Ok(greeting) => greeting,
            Err(reason) => {
                log::info!("{peer} is refused: {reason}");
                self.refuse(cm, framing, reason, &[]);
                return;
            }
        };
        let full = self.connections.len() >= self.config.max_connections as usize;
        if full || self.pending >= self.config.max_pending {
            let limit = if full { "max_connections" } else { "max_pending" };
            log::warn!("{peer} is refused: {limit} is reached");
            self.refuse(cm, framing, RejectReason::Busy, &[]);
            return;
        }
        if self.drain.is_on() {
            log::debug!("{peer} is refused: the reactor is being drained");
            self.refuse(cm, framing, RejectReason::Busy, &[]);
            return;
        }
        let answer = match handler.on_connect_request(&mut Context { core: self }, incoming.request(&greeting)) {
            Decision::Accept => Vec::new(),
            Decision::AcceptWith(data) => data,
            Decision::Reject(data) => {
                self.refuse(cm, framing, RejectReason::Refused, &data);
                return;
            }
        };
        if let Err(error) = self.accept(cm, incoming.listener, device, peer, &greeting, &answer, framing) {
            log::warn!("{peer} is refused: {error}");
            self.refuse(cm, framing, RejectReason::Busy, &[]);
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one request, used once")]
    fn accept(
        &mut self,
        cm: CmId,
        listener: ListenerId,
        device: DeviceId,
        peer: SocketAddr,
        greeting: &Greeting<'_>,
        answer: &[u8],
        framing: Framing,
    ) -> Result<(), Error> {
        if framing == Framing::Credits && answer.len() > MAX_USER_PRIVATE_DATA {
            return Err(Error::PrivateDataTooLong { len: answer.len(), max: MAX_USER_PRIVATE_DATA });
        }
        log::debug!("{peer} is accepted on {listener:?}");
        let id = self.insert(cm, peer, framing, Phase::Accepting, greeting.user.to_vec());
        if let Err(error) = self.equip(id, device) {
            self.forget(id);
            return Err(error);
        }
        let max_message = self.max_message_of(id);
        let extensions = framing == Framing::Credits && greeting.extensions && self.agree_on_extensions(id);
        let reply = match framing {
            Framing::Raw => answer.to_vec(),
            Framing::Credits => Greeting {
                window: self.connections.get(id.0).map_or(0, |c| c.rx.told()),
                max_message,
                largest: self.config.largest_in_kib(),
                extensions,
                reason: RejectReason::Refused,
                user: answer,
            }
            .emit(),
        };
        if let Some(c) = self.connections.get_mut(id.0) {
            c.tx = SendWindow::new(greeting.window);
            c.max_message = peer_limit(framing, greeting, max_message);
            c.largest_message = u64::from(greeting.largest) << 10;
        }
        self.pending += 1;
        self.set_phase_timer(id, self.config.handshake_timeout);
        let param = ConnectParam { private_data: &reply, ..ConnectParam::default() };
        if let Err(error) = self.provider.accept(cm, &param, self.now) {
            // The peer may have gone in between: no fault of this side, and nobody was told of the connection.
            log::debug!("{id}: accepting {peer}: {error}");
            self.end(id, Ending::Silent(None));
        }
        Ok(())
    }

    pub(crate) fn refuse(&mut self, cm: CmId, framing: Framing, reason: RejectReason, user: &[u8]) {
        self.stats.refused += 1;
        let fits = user.len() <= MAX_USER_PRIVATE_DATA;
        if !fits {
            log::error!("a rejection with {} bytes of private data: at most {MAX_USER_PRIVATE_DATA} fit", user.len());
        }
        let user = if fits { user } else { &[] };
        let data = match framing {
            Framing::Raw => user.to_vec(),
            Framing::Credits => Greeting::reject(reason, user).emit(),
        };
        if let Err(error) = self.provider.reject(cm, &data, self.now) {
            log::debug!("rejecting: {error}");
            self.provider.destroy_id(cm, self.now);
        }
    }

    fn established<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: ConnectionId, private_data: &[u8]) {
        let max_message = self.max_message_of(id);
        let Some(c) = self.connections.get_mut(id.0) else { return };
        match (c.phase, c.framing) {
            (Phase::Accepting, Framing::Credits) => c.phase = Phase::Greeting,
            (Phase::Accepting, Framing::Raw) => self.announce(handler, id),
            (Phase::Connecting, Framing::Raw) => {
                c.private_data = private_data.to_vec();
                c.max_message = max_message as usize;
                self.announce(handler, id);
            }
            (Phase::Connecting, Framing::Credits) => match Greeting::parse(private_data).and_then(Greeting::checked) {
                Ok(greeting) => {
                    c.tx = SendWindow::new(greeting.window);
                    c.max_message = peer_limit(c.framing, &greeting, max_message);
                    c.largest_message = u64::from(greeting.largest) << 10;
                    c.private_data = greeting.user.to_vec();
                    if greeting.extensions {
                        self.agree_on_extensions(id);
                    }
                    self.queue_hello(id);
                    self.announce(handler, id);
                }
                Err(reason) => {
                    let error = ConnectError::Rejected { reason, private_data: Vec::new() };
                    self.end(id, Ending::ConnectError(error));
                }
            },
            // Twice, or implied by data that came before it.
            _ => {}
        }
    }

    /// Tells the user that a connection is up.
    pub(crate) fn announce<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: ConnectionId) {
        let interval = self.config.keepalive_interval;
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if c.phase == Phase::Flushing {
            // The peer has closed before we heard its hello: what it sent is delivered all the same.
            if let Some(Ending::Silent(Some(reason))) = &c.ending {
                c.ending = Some(Ending::Disconnect(reason.clone()));
                c.announced = true;
                self.stats.connected += 1;
                handler.on_connect(&mut Context { core: self }, id);
            }
            return;
        }
        if !c.active {
            self.pending = self.pending.saturating_sub(1);
        }
        c.phase = Phase::Open;
        c.announced = true;
        c.last_heard = self.now;
        if let Some(timer) = c.phase_timer.take() {
            self.timers.cancel(timer);
        }
        if c.framing == Framing::Credits {
            c.unheard = c.active;
            let first = if c.active { interval.min(NUDGE) } else { interval };
            c.keepalive_timer = Some(self.timers.insert(self.now + first, TimerKind::Keepalive(id)));
        }
        self.stats.connected += 1;
        self.mark_dirty(id);
        handler.on_connect(&mut Context { core: self }, id);
    }

    fn device_removed(&mut self, id: ConnectionId) {
        if let Some(c) = self.connections.get_mut(id.0)
            && std::mem::take(&mut c.provisional)
            && let Some(Ending::Disconnect(guess)) = &mut c.ending
        {
            *guess = DisconnectReason::DeviceRemoved;
            self.endings_moved = true;
        }
        self.end(id, Ending::Disconnect(DisconnectReason::DeviceRemoved));
    }

    fn disconnected(&mut self, id: ConnectionId, cause: DisconnectCause) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if std::mem::take(&mut c.provisional) {
            self.endings_moved = true;
            let reason = match cause {
                // Whoever reports our own disconnect does not know that the queues were flushed before it.
                DisconnectCause::Peer | DisconnectCause::Local => DisconnectReason::Peer,
                cause => DisconnectReason::Transport(cause),
            };
            match &mut c.ending {
                // What could not be posted was no doing of the peer's.
                Some(Ending::Disconnect(DisconnectReason::Internal(_))) if reason == DisconnectReason::Peer => {}
                Some(Ending::Disconnect(guess)) => *guess = reason,
                _ => {}
            }
            return;
        }
        let ending = match (c.phase, cause) {
            (Phase::Connecting, cause) => {
                Ending::ConnectError(ConnectError::Transport(ConnectFailure::Protocol(cause.to_string())))
            }
            (_, DisconnectCause::Peer) => Ending::Disconnect(DisconnectReason::Peer),
            (_, DisconnectCause::Local) => Ending::Disconnect(DisconnectReason::Local),
            (_, cause) => Ending::Disconnect(DisconnectReason::Transport(cause)),
        };
        self.end(id, ending);
    }
}

impl Core {
    /// Whether the device of a connection has something that its peer must agree on.
    fn offers_extensions(&self, id: ConnectionId) -> bool {
        self.capabilities(id).is_some_and(|caps| caps.features.contains(Features::EXTENSIONS_BY_AGREEMENT))
    }

    /// The peer offers the extensions: they are used if we do, too.
    fn agree_on_extensions(&mut self, id: ConnectionId) -> bool {
        let offered = self.offers_extensions(id);
        if let Some(c) = self.connections.get_mut(id.0).filter(|_| offered)
            && let Some(qp) = c.qp
        {
            c.extensions = self.provider.enable_extensions(qp).is_ok();
            return c.extensions;
        }
        false
    }

    /// Largest payload on the device of a connection: what is configured, or what the device carries.
    fn max_message_of(&self, id: ConnectionId) -> u32 {
        let device = self.connections.get(id.0).and_then(|c| self.devices.get(c.device)?.as_ref());
        device.map_or(self.config.max_message, |device| self.config.max_message.min(device.max_payload))
    }
}

/// Largest payload to send: the peer's limit, and what a buffer of ours holds.
fn peer_limit(framing: Framing, greeting: &Greeting<'_>, own: u32) -> usize {
    match framing {
        Framing::Credits => greeting.max_message.min(own) as usize,
        Framing::Raw => own as usize,
    }
}
