//! [`Acceptor`]: decides which connect requests become connections of this reactor.

use log::Level;
use rdma_transport::TransportError;
use rdma_transport::cm::{CmEventKind, CmId};
use rdma_transport::newcomers::Host;
use rdma_transport::shares::is_scarce;

use super::group::GroupMembership;
use super::request::{IncomingRequest, RequestOrigin};
use crate::config::{Config, Framing};
use crate::conn::greeting::MAX_USER_PRIVATE_DATA;
use crate::conn::state::Ending;
use crate::conn::{Opening, Role};
use crate::driver::World;
use crate::error::{Error, RejectReason};
use crate::id::ConnectionId;
use crate::providers::Handle;

/// The result of polling for an event of the connection manager.
#[derive(Debug)]
pub(crate) enum CmStep {
    /// There was no event.
    Nothing,
    /// The event concerned a connection or a listener, and was handled.
    Done,
    /// A peer requests a connection. The caller must let the program decide about it.
    Request(IncomingRequest),
    /// The event is for an endpoint. The fields are the endpoint's number, the connection-manager
    /// id of the event, and the event.
    Endpoint(u64, Handle<CmId>, CmEventKind),
}

/// A refusal: the reason that the peer receives, and the level and the text of the log line.
pub(crate) type RequestRefusal = (RejectReason, Level, String);

/// Checks the peer of a request: its network, its greeting, and the security of its connections.
/// The first reactor of a group does this before it calls `on_place`.
pub(crate) fn judge_peer(world: &World, request: &IncomingRequest) -> Option<RequestRefusal> {
    let origin = &request.origin;
    if !world.config.admits(origin.peer.ip()) {
        let why = "its network is not among those that may connect";
        return Some((RejectReason::Refused, Level::Info, why.into()));
    }
    match origin.greeting() {
        Err(reason) => Some((reason, Level::Info, reason.to_string())),
        Ok(greeting) if greeting.security != Some(origin.security.mode()) => {
            let why = "it secures its connections in another way than this listener";
            Some((RejectReason::Security(origin.security.mode()), Level::Warn, why.into()))
        }
        Ok(_) => None,
    }
}

/// Checks if a request can become a connection of this reactor. Checks the peer again, because
/// reactors of a group may have different settings.
pub(crate) fn judge_request(world: &World, request: &IncomingRequest) -> Option<RequestRefusal> {
    judge_peer(world, request).or_else(|| {
        if world.drain.is_on() {
            return Some((RejectReason::Draining, Level::Debug, "the reactor is being drained".into()));
        }
        let full = Acceptor::find_slot(world, request).err();
        full.map(|error| (RejectReason::Busy, Level::Warn, error.to_string()))
    })
}

/// Accepts the connect requests from peers, and counts the connections of this reactor for its
/// group.
#[derive(Debug, Default)]
pub(crate) struct Acceptor {
    /// The membership of this reactor in its group. `None` if the reactor is in no group.
    pub(crate) membership: Option<GroupMembership>,
}

impl Acceptor {
    /// Counts a new connection of this reactor for the group.
    pub(crate) fn gained(&mut self) {
        if let Some(membership) = &mut self.membership {
            membership.gained();
        }
    }

    /// Counts the end of a connection of this reactor for the group.
    pub(crate) fn lost(&self) {
        if let Some(membership) = &self.membership {
            membership.lost();
        }
    }

    /// Checks a request with [`judge_peer`] or [`judge_request`]. If `judge` returns a refusal,
    /// refuses the request and returns `None`.
    pub(crate) fn screen(
        &mut self,
        world: &mut World,
        request: IncomingRequest,
        judge: fn(&World, &IncomingRequest) -> Option<RequestRefusal>,
    ) -> Option<IncomingRequest> {
        let Some((reason, level, why)) = judge(world, &request) else { return Some(request) };
        world.log_refusal(request.origin.peer, level, &why);
        world.reject(request.cm, request.origin.framing, reason, &[]);
        self.request_done(request.placed);
        None
    }

    /// Checks if the limits on connections permit an incoming connection. `Ok(None)`: they do.
    /// `Ok(Some)`: the connection with this id must be evicted first. An error: a limit is reached,
    /// and no connection may be evicted.
    fn find_slot(world: &World, request: &IncomingRequest) -> Result<Option<ConnectionId>, Error> {
        let Config { max_connections, max_pending, max_handshakes_per_peer, .. } = world.config;
        let (host, pending) = (Host::of(request.origin.peer.ip()), &world.table.pending);
        // A handshake takes processor time, so one host may have only a part of the connections
        // that are not up. If the host already has this part, its new connection evicts the
        // oldest of them. If the oldest is not slow, the new connection is refused.
        // bound: handshakes
        let most = max_handshakes_per_peer.unwrap_or((max_pending as usize).div_ceil(2));
        if !request.origin.security.is_plain() && pending.count_of(host) >= most {
            let limit = Error::Limit { limit: "max_handshakes_per_peer", value: most as u64 };
            return pending.slow_of(host).map(Some).ok_or(limit);
        }
        // Near the limits, a host with many connections gets no more of them. Instead, its new
        // connection evicts the oldest of its connections that are not up, if that connection is
        // slow. Otherwise the new connection is refused.
        let most = world.config.max_connections_per_host;
        if world.table.hosts.connections(host) >= most as usize && Self::is_crowded(world, request.device) {
            let limit = Error::Limit { limit: "max_connections_per_host", value: most.into() };
            return pending.slow_of(host).map(Some).ok_or(limit);
        }
        let (limit, value) = match (world.table.len(), pending.len()) {
            (all, _) if all >= max_connections as usize => ("max_connections", max_connections),
            (_, waiting) if waiting >= max_pending as usize => ("max_pending", max_pending),
            _ => return Ok(None),
        };
        pending.gives_way(host).map(Some).ok_or(Error::Limit { limit, value: value.into() })
    }

    /// Returns true if one more connection on this device would be among the last that
    /// `max_connections` permits, or would use the last buffers or shared receives of the device.
    fn is_crowded(world: &World, device: usize) -> bool {
        let is_crowded = is_scarce(world.table.len() + 1, world.config.max_connections as usize)
            || world.devices.get(device).is_some_and(|device| device.is_crowded(&world.config));
        is_crowded && !crate::planted("one-host-takes-all-slots")
    }

    /// Accepts a request, as the program has decided. `answer` is the private data for the peer.
    pub(crate) fn accept(&mut self, world: &mut World, request: IncomingRequest, answer: &[u8]) {
        let (cm, framing, peer, placed) = (request.cm, request.origin.framing, request.origin.peer, request.placed);
        if let Err(error) = self.try_accept(world, request, answer) {
            let (reason, level) = match error {
                // The program has passed too much private data, and would do so again if the peer
                // tried again. So the peer receives the reason `Refused` and not `Busy`.
                Error::PrivateDataTooLong { .. } => (RejectReason::Refused, Level::Error),
                _ => (RejectReason::Busy, Level::Warn),
            };
            world.log_refusal(peer, level, &error.to_string());
            world.reject(cm, framing, reason, &[]);
        }
        self.request_done(placed);
    }

    /// Refuses a request, as the program has decided. `answer` is the private data for the peer.
    pub(crate) fn refuse(&mut self, world: &mut World, request: &IncomingRequest, answer: &[u8]) {
        world.reject(request.cm, request.origin.framing, RejectReason::Refused, answer);
        self.request_done(request.placed);
    }

    fn try_accept(&mut self, world: &mut World, request: IncomingRequest, answer: &[u8]) -> Result<(), Error> {
        let IncomingRequest { cm, device, ref origin, placed } = request;
        let RequestOrigin { listener, framing, service, ref security, peer, ref private_data, .. } = *origin;
        if framing == Framing::Credits && answer.len() > MAX_USER_PRIVATE_DATA {
            return Err(Error::PrivateDataTooLong { len: answer.len(), max: MAX_USER_PRIVATE_DATA });
        }
        let Ok(greeting) = origin.greeting() else { return Err(Error::Gone("request")) };
        // The program may have opened connections after the first call of `find_slot`, so this is a
        // second call.
        if let Some(oldest) = Self::find_slot(world, &request)? {
            world.evict(oldest);
        }
        log::debug!("{peer} is accepted on {listener}");
        if let Some(membership) = self.membership.as_mut().filter(|_| placed) {
            membership.begin();
        }
        let security = security.clone();
        let opening = Opening { framing, peer, host: None, private_data: Vec::new(), probes: false, security };
        let id = world.insert(cm, service, Role::Passive, opening);
        self.gained();
        let created = world.create_queue_pair(id, device).or_else(|error| {
            // The limits on connections permit this one, but the memory for buffers or the receives
            // of the shared queue may be used up. The eviction of another connection frees memory
            // and receives.
            let is_limit = matches!(error, Error::Limit { .. });
            let oldest = world.table.pending.gives_way(Host::of(peer.ip())).filter(|_| is_limit).ok_or(error)?;
            world.evict(oldest);
            world.create_queue_pair(id, device)
        });
        if let Err(error) = created {
            // The program was not notified of the connection, so it receives no callback. The
            // connection-manager id is kept, because the caller needs it to reject the request.
            world.forget(id);
            return Err(error);
        }
        let own = world.buffer_size_of(id);
        let offers = framing == Framing::Credits && greeting.extensions;
        let extensions = world.agree_on_extensions(id, offers);
        let Some(slot) = world.table.get_mut(id) else { return Ok(()) };
        slot.conn.came_to(listener);
        slot.conn.agree(&greeting, own, extensions, &world.config);
        let reply = slot.conn.greeting(answer, own, extensions, &world.config);
        slot.conn.note_greeting(private_data);
        slot.conn.note_greeting(&reply);
        let accepted = world.set_timeout(id, world.config.timeouts.handshake);
        world.table.add_accepted(id, accepted);
        let (provider, raw) = world.providers.of(cm);
        if let Err(error) = provider.accept(raw, &service.param(&reply, framing), world.now) {
            if let TransportError::SharedMemoryOnly { is_temporary, .. } = error {
                world.log_refusal(peer, Level::Info, &error.to_string());
                let reason = if is_temporary { RejectReason::Busy } else { RejectReason::SharedMemoryOnly };
                world.reject(cm, framing, reason, &[]);
                world.withdraw(id);
                return Ok(());
            }
            // The peer may have disconnected after it sent the request. This is no local fault, so
            // the error is only logged. The program was not notified of the connection.
            log::debug!("{id}: accepting {peer}: {error}");
            world.pass(id, |conn, env| conn.end(Ending::Silent, env));
        }
        Ok(())
    }
}
