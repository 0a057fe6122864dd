//! All datagram endpoints of a reactor: how they are opened, send, complete and end. The driver does not know
//! endpoints. It stores a number for each event source and timer of an endpoint, and returns that number with each
//! event. This file encodes the endpoint or lookup in the number.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rdma_transport::QpAttr;
use rdma_transport::cm::{CmEventKind, CmId, ListenParam};
use rdma_transport::datagram::{Destination, GRH_LEN};
use rdma_transport::mr::{LocalKey, MrId};
use rdma_transport::provider::Provider;
use rdma_transport::slab::{Key, Slab};
use rdma_transport::wc::{Failure, WcStatus, WorkCompletion};
use rdma_transport::wr::{RecvWr, SendOp};

use super::endpoint::{
    Endpoint, EndpointQueues, EndpointResources, EndpointState, EndpointWorkRequest, GENERATION_BITS,
};
use super::{Datagram, EndpointId, EndpointOptions, PeerId};
use crate::device::pool::{Buffer, Pool, Posted, Slabs};
use crate::device::{deregister, register};
use crate::driver::owners::CmIdOwner;
use crate::driver::stages::Stages;
use crate::driver::{Driver, TimerPurpose};
use crate::error::{Blocked, ConnectError, DisconnectReason, Error, Outcome, SendErrorKind};
use crate::id::SendId;
use crate::providers::{Handle, device_index, device_of, role};

/// The name of the missing feature, in the error for a provider that does not support datagrams.
pub(super) const DATAGRAMS: &str = "datagrams";

/// A callback of the program that the reactor will call.
#[derive(Debug)]
pub(crate) enum EndpointEvent {
    /// A datagram has arrived. `len` is its length in bytes, including the route header.
    Datagram {
        endpoint: EndpointId,
        buffer: Buffer,
        len: usize,
        completion: WorkCompletion,
    },
    Sent {
        endpoint: EndpointId,
        send: SendId,
        outcome: Outcome,
    },
    Writable {
        endpoint: EndpointId,
    },
    Peer {
        endpoint: EndpointId,
        address: SocketAddr,
        found: Result<PeerId, ConnectError>,
    },
    Joined {
        endpoint: EndpointId,
        group: IpAddr,
        joined: Result<PeerId, ConnectError>,
    },
    /// The endpoint has ended. No other event of this endpoint follows.
    Closed {
        endpoint: EndpointId,
        reason: DisconnectReason,
    },
}

/// A peer of an endpoint, that is, a destination of the endpoint's datagrams.
#[derive(Debug)]
pub(super) struct EndpointPeer {
    pub(super) endpoint: Key,
    /// The index of the endpoint's device. The address handle in `destination` is an object of that device.
    pub(super) device: usize,
    pub(super) destination: Destination,
}

/// A lookup in progress. The connection manager resolves the route to the address of a peer, and requests the number of
/// the peer's queue pair.
#[derive(Debug)]
pub(super) struct PeerLookup {
    pub(super) endpoint: Key,
    pub(super) cm: Handle<CmId>,
    pub(super) address: SocketAddr,
    pub(super) timer: Key,
}

/// The owner of a connection-manager id or of a timer: an endpoint or a lookup. The driver stores the owner as a
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndpointToken {
    Endpoint(Key),
    Lookup(Key),
}

impl EndpointToken {
    pub(super) fn pack(self) -> u64 {
        let (kind, key) = match self {
            Self::Endpoint(key) => (0, key),
            Self::Lookup(key) => (1, key),
        };
        kind | u64::from(key.slot()) << 1 | u64::from(key.generation()) << 33
    }

    fn unpack(number: u64) -> Self {
        let key = Key::new((number >> 1) as u32, (number >> 33) as u32);
        if number & 1 == 0 { Self::Endpoint(key) } else { Self::Lookup(key) }
    }
}

/// The endpoints of a reactor, with their peers and lookups.
#[derive(Debug)]
pub(crate) struct Endpoints {
    pub(super) all: Slab<Endpoint>,       // local: endpoints of the program
    pub(super) peers: Slab<EndpointPeer>, // local: peers that the program has looked up
    pub(super) lookups: Slab<PeerLookup>, // local: lookups of the program
    events: VecDeque<EndpointEvent>,      // bound: turn
    /// The endpoints that have work requests to post, without duplicates.
    to_post: Vec<Key>, // local: endpoints of the program
    /// The endpoints that have refused a send, and that may have free slots in their send queues again.
    maybe_writable: Vec<Key>, // local: endpoints of the program
    /// The endpoints that are closed, and that still have a queue pair.
    ending: Vec<Key>, // local: endpoints of the program
    receive_chain: Vec<RecvWr>,           // bound: receives
}

impl Default for Endpoints {
    fn default() -> Self {
        Self {
            all: Slab::with_generation_bits(GENERATION_BITS),
            // The keys of endpoints and lookups are encoded in numbers, so their generations have fewer than 32 bits.
            // The keys of peers are not encoded, so their generations have 32 bits.
            peers: Slab::default(),
            lookups: Slab::with_generation_bits(31),
            events: VecDeque::new(),
            to_post: Vec::new(),
            maybe_writable: Vec::new(),
            ending: Vec::new(),
            receive_chain: Vec::new(),
        }
    }
}

impl Endpoints {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns an open endpoint; `None` if the endpoint does not exist or is not open.
    pub(super) fn get_open(&mut self, key: Key) -> Option<&mut Endpoint> {
        self.all.get_mut(key).filter(|endpoint| endpoint.is_open())
    }

    /// Queues a callback.
    pub(super) fn push_event(&mut self, event: EndpointEvent) {
        self.events.push_back(event);
    }

    /// Removes and returns the next callback to call; `None` if no callback is queued.
    #[inline]
    pub(crate) fn next_event(&mut self) -> Option<EndpointEvent> {
        self.events.pop_front()
    }

    fn mark(&mut self, key: Key) {
        if self.all.get_mut(key).is_some_and(|endpoint| !std::mem::replace(&mut endpoint.marked, true)) {
            self.to_post.push(key);
        }
    }

    // The opening of endpoints.

    pub(crate) fn open(
        &mut self,
        driver: &mut Driver,
        local: SocketAddr,
        options: EndpointOptions,
    ) -> Result<EndpointId, Error> {
        options.validate()?;
        if driver.drain.refuses_all() {
            return Err(Error::Drained);
        }
        let providers = &mut driver.providers;
        let provider = providers.serving(local.ip());
        let role = role(providers.numbered(provider), Provider::datagrams, DATAGRAMS)?;
        let mut any_port = local;
        any_port.set_port(0);
        let (id, device, max) = role.bind_datagram(any_port)?;
        let listener = role.listen_datagram(local, &ListenParam::default());
        providers.note_use(provider);
        let (cm, device) = (Handle { provider, id }, device_index(provider, device));
        let listener = match listener {
            Ok(id) => Handle { provider, id },
            Err(error) => {
                driver.discard(cm);
                return Err(error.into());
            }
        };
        match self.create(driver, [cm, listener], local, (device, max as usize), options) {
            Ok(id) => Ok(id),
            Err(error) => {
                driver.discard(listener);
                driver.discard(cm);
                Err(error)
            }
        }
    }

    /// Creates an endpoint with its queue pair and its memory, and posts its receives.
    fn create(
        &mut self,
        driver: &mut Driver,
        [cm, listener]: [Handle<CmId>; 2],
        local: SocketAddr,
        (index, max_datagram): (usize, usize),
        options: EndpointOptions,
    ) -> Result<EndpointId, Error> {
        let EndpointOptions { receive_depth, send_depth } = options;
        let device = device_of(index).1;
        let room = receive_depth + send_depth;
        let cq = driver.claim_room(index, room)?;
        let cq_id = driver.devices.get(index).ok_or(Error::Gone("device"))?.cqs[cq].id;
        let mut pool = Pool::new(GRH_LEN + max_datagram, usize::MAX);
        let mut slabs = Vec::new();
        let attr = QpAttr {
            send_cq: cq_id,
            recv_cq: cq_id,
            max_send_wr: send_depth,
            max_recv_wr: receive_depth,
            max_inline: 0,
            max_recv_sge: 1,
            srq: None,
        };
        let provider = driver.providers.numbered(cm.provider);
        let made = pool
            .reserve(room as usize, |bytes| register(provider, &mut slabs, device, bytes))
            .and_then(|()| Ok(provider.create_qp(cm.id, &attr)?));
        let qp = match made {
            Ok(qp) => qp,
            Err(error) => {
                drop_slabs(driver, index, slabs);
                driver.release_room(index, cq, room);
                return Err(error);
            }
        };
        let provider = driver.providers.numbered(cm.provider);
        let address = provider.local_address(listener.id).unwrap_or(local);
        let qp_number = provider.datagrams().and_then(|role| role.qp_number(qp).ok()).unwrap_or_default();
        let resources =
            EndpointResources { qp_number, cm, listener, address, qp, device: index, cq, room, max_datagram };
        let queues = EndpointQueues::new(pool, slabs, options);
        let key = self.all.insert(Endpoint {
            id: EndpointId::new(driver.tag(), Key::new(0, 0)),
            resources,
            state: EndpointState::Open,
            queues,
            forgotten: VecDeque::new(),
            groups: Vec::new(),
            blocked: false,
            marked: false,
        });
        let id = EndpointId::new(driver.tag(), key);
        if let Some(endpoint) = self.all.get_mut(key) {
            endpoint.id = id;
        }
        for cm in [cm, listener] {
            driver.owners.own(cm, CmIdOwner::Endpoint(EndpointToken::Endpoint(key).pack()));
        }
        self.mark(key);
        // Post the receives now, not at the end of the next turn: a datagram is lost if it arrives before the receives
        // are posted.
        self.flush(driver);
        Ok(id)
    }

    // Operations that the program calls.

    /// Returns four properties of an endpoint: the address at which peers find it, the number of its queue pair, the
    /// index of its device, and the largest length of a datagram in bytes. Returns `None` if there is no such endpoint.
    pub(crate) fn info(&self, key: Key) -> Option<(SocketAddr, u32, usize, usize)> {
        let resources = &self.all.get(key)?.resources;
        Some((resources.address, resources.qp_number, resources.device, resources.max_datagram))
    }

    pub(crate) fn send(
        &mut self,
        driver: &mut Driver,
        key: Key,
        peer: PeerId,
        payload: &[u8],
        immediate: Option<u32>,
    ) -> Result<SendId, SendErrorKind> {
        let Self { all, peers, .. } = self;
        let endpoint = all.get_mut(key).filter(|endpoint| endpoint.is_open()).ok_or(SendErrorKind::Closed)?;
        let peer = peer.key(driver.tag()).and_then(|peer| peers.get(peer)).filter(|peer| peer.endpoint == key);
        let peer = peer.ok_or(SendErrorKind::NoPeer)?;
        if payload.len() > endpoint.resources.max_datagram {
            return Err(SendErrorKind::TooLong { len: payload.len(), max: endpoint.resources.max_datagram });
        }
        let queues = &mut endpoint.queues;
        let buffer = if queues.has_room() { queues.pool.take() } else { None };
        let Some(mut buffer) = buffer else {
            endpoint.blocked = true;
            driver.stats.messages.send_stalls += 1;
            return Err(SendErrorKind::WouldBlock(Blocked::Queue));
        };
        queues.pool.slabs().bytes_mut(&mut buffer)[..payload.len()].copy_from_slice(payload);
        let op = match immediate {
            Some(value) => SendOp::DatagramWithImmediate(peer.destination, value),
            None => SendOp::Datagram(peer.destination),
        };
        let send = queues.push_send(key, buffer, payload.len(), op);
        self.mark(key);
        Ok(send)
    }

    // Events from the driver.

    /// Handles the completion of a work request of an endpoint. `number` is the part of the work request id that
    /// [`EndpointWorkRequest`] encodes.
    #[cold]
    pub(crate) fn completed(&mut self, driver: &mut Driver, number: u64, wc: &WorkCompletion) {
        let EndpointWorkRequest { endpoint, send } = EndpointWorkRequest::unpack(number);
        let known = match send {
            _ if self.all.get(endpoint).is_none() => false,
            Some(sequence) => self.sent(driver, endpoint, sequence, wc.result()),
            None => self.received(driver, endpoint, wc),
        };
        driver.stats.completions.stale += u64::from(!known);
    }

    fn sent(&mut self, driver: &mut Driver, key: Key, sequence: u16, result: Result<(), Failure>) -> bool {
        let Some(endpoint) = self.all.get(key) else { return false };
        let Some(count) = endpoint.queues.sends_ended_by(sequence) else {
            local_log!(Warn, "{}: a completion of a datagram that is not posted ({result:?})", endpoint.id);
            return false;
        };
        let last = result.map_or_else(Outcome::Failed, |()| Outcome::Sent);
        for nth in 1..=count {
            // Only the last of these sends is signaled. The sends before it have no completions, because they have
            // succeeded: a failed send always has a completion.
            self.end_send(driver, key, if nth < count { Outcome::Sent } else { last });
        }
        self.drop_unused_addresses(driver, key);
        if let Err(failure) = result {
            self.fail(driver, key, failure);
        } else if let Some(endpoint) = self.all.get(key) {
            if endpoint.blocked && !crate::planted("a-refused-datagram-is-forgotten") {
                self.maybe_writable.push(key);
            }
            if !endpoint.is_open() && endpoint.queues.sends.is_empty() {
                // The endpoint was closed before, and this was its last send: stage 10 ends the endpoint now.
                driver.note(Stages::ENDS);
            }
        }
        true
    }

    /// Ends the oldest send of an endpoint: frees its buffer, and queues `on_datagram_sent`.
    fn end_send(&mut self, driver: &mut Driver, key: Key, outcome: Outcome) {
        let Some(endpoint) = self.all.get_mut(key) else { return };
        let Some(sending) = endpoint.queues.sends.pop_front() else { return };
        endpoint.queues.pool.give(sending.buffer.done());
        driver.stats.messages.datagrams_sent += u64::from(outcome.is_sent());
        let endpoint = endpoint.id;
        self.push_event(EndpointEvent::Sent { endpoint, send: sending.id, outcome });
    }

    fn received(&mut self, driver: &mut Driver, key: Key, wc: &WorkCompletion) -> bool {
        let Some(endpoint) = self.all.get_mut(key) else { return false };
        let Some(buffer) = endpoint.queues.receives.pop_front().map(Posted::done) else {
            local_log!(Warn, "{}: a completion of a receive that is not posted ({})", endpoint.id, wc.status);
            return false;
        };
        if let Err(failure) = wc.result() {
            endpoint.queues.reposts.push(buffer);
            self.fail(driver, key, failure);
            return true;
        }
        let (id, len) = (endpoint.id, wc.byte_len as usize);
        // Without `allowed_peers` the address of the sender is not needed, so the route header is not read.
        if driver.config.allowed_peers.is_some() {
            let bytes = endpoint.queues.pool.slabs().bytes(&buffer, len);
            let sender = Datagram::of(wc, bytes).and_then(|datagram| datagram.origin().address());
            // A sender without an address may be on any network, so its datagram is dropped, too.
            if sender.is_none_or(|sender| !driver.config.admits(sender)) {
                self.repost(key, buffer);
                return true;
            }
        }
        self.push_event(EndpointEvent::Datagram { endpoint: id, buffer, len, completion: *wc });
        true
    }

    /// Returns the memory that contains a received datagram of an endpoint, and counts the datagram as received.
    /// Returns `None` if the endpoint is not open any more: the datagram is then not delivered to the program.
    pub(crate) fn slabs_of(&mut self, driver: &mut Driver, key: Key) -> Option<Arc<Slabs>> {
        let slabs = self.get_open(key)?.queues.slabs();
        driver.stats.messages.datagrams_received += 1;
        Some(slabs)
    }

    /// Frees the buffer of a received datagram. The buffer is posted as a receive again at the end of the turn.
    pub(crate) fn repost(&mut self, key: Key, buffer: Buffer) {
        if let Some(endpoint) = self.all.get_mut(key) {
            endpoint.queues.reposts.push(buffer);
            self.mark(key);
        }
    }

    /// Handles a connection-manager event of an endpoint or a lookup.
    pub(crate) fn cm_event(&mut self, driver: &mut Driver, number: u64, cm: Handle<CmId>, kind: CmEventKind) {
        match (EndpointToken::unpack(number), kind) {
            (EndpointToken::Endpoint(key), CmEventKind::ConnectRequest { peer, .. }) => {
                self.answer(driver, key, cm, peer);
            }
            (EndpointToken::Endpoint(key), kind) => self.endpoint_event(driver, key, kind),
            (EndpointToken::Lookup(key), kind) => self.lookup_event(driver, key, kind),
        }
    }

    /// Handles the expiry of a timer of an endpoint or a lookup.
    pub(crate) fn on_timer(&mut self, driver: &mut Driver, number: u64) {
        match EndpointToken::unpack(number) {
            // The time `Timeouts::close` has passed since the endpoint was closed. Datagrams that are not sent yet are
            // dropped.
            EndpointToken::Endpoint(key) => self.stop_sending(driver, key),
            EndpointToken::Lookup(key) => self.end_lookup(driver, key, Err(ConnectError::Timeout)),
        }
    }

    /// Queues `on_datagram_writable` for one endpoint that has refused a datagram and would accept one now. Returns
    /// `true` if there was such an endpoint. The caller repeats the call until it returns `false`.
    #[inline]
    pub(crate) fn next_writable(&mut self) -> bool {
        !self.maybe_writable.is_empty() && self.report_writable()
    }

    #[cold]
    fn report_writable(&mut self) -> bool {
        while let Some(key) = self.maybe_writable.pop() {
            let Some(endpoint) = self.get_open(key) else { continue };
            if endpoint.queues.has_room() && std::mem::take(&mut endpoint.blocked) {
                let endpoint = endpoint.id;
                self.push_event(EndpointEvent::Writable { endpoint });
                return true;
            }
        }
        false
    }

    /// Posts the work requests that endpoints have queued since the last call.
    #[inline]
    pub(crate) fn flush(&mut self, driver: &mut Driver) {
        if !self.to_post.is_empty() {
            self.post_marked(driver);
        }
    }

    #[cold]
    fn post_marked(&mut self, driver: &mut Driver) {
        while let Some(key) = self.to_post.pop() {
            let Some(endpoint) = self.all.get_mut(key) else { continue };
            endpoint.marked = false;
            if endpoint.is_over() {
                continue;
            }
            let (open, qp, queues) = (endpoint.is_open(), endpoint.resources.qp, &mut endpoint.queues);
            driver.stats.messages.doorbells += u64::from(!queues.chain.is_empty());
            let provider = driver.providers.numbered(endpoint.resources.cm.provider);
            let receives = if open { queues.post_receives(key, qp, provider, &mut self.receive_chain) } else { Ok(()) };
            if let Err(error) = receives.and_then(|()| queues.post_sends(qp, provider)) {
                local_log!(Warn, "{}: posting failed: {error}", endpoint.id);
                self.end(driver, key, DisconnectReason::Internal(error.to_string()), true);
            }
        }
    }

    // The end of endpoints.

    /// Closes an endpoint for `reason`. If the endpoint is closed already, its first reason stays. If `immediately` is
    /// true, datagrams that were accepted but not sent are dropped. Otherwise these datagrams are sent first, within
    /// `Timeouts::close`.
    pub(crate) fn end(&mut self, driver: &mut Driver, key: Key, reason: DisconnectReason, immediately: bool) {
        let Some(endpoint) = self.all.get_mut(key) else { return };
        if endpoint.is_open() {
            log::debug!("{}: ending: {reason}", endpoint.id);
            let until = driver.now + driver.config.timeouts.close;
            let timer = driver.timers.insert(until, TimerPurpose::Endpoint(EndpointToken::Endpoint(key).pack()));
            endpoint.state = EndpointState::Draining { reason, timer };
            self.ending.push(key);
            driver.note(Stages::ENDS);
        }
        if immediately {
            self.stop_sending(driver, key);
        }
    }

    /// Closes an endpoint, because one of its work requests has failed.
    fn fail(&mut self, driver: &mut Driver, key: Key, failure: Failure) {
        let Some(endpoint) = self.all.get(key) else { return };
        let device =
            driver.devices.get(endpoint.resources.device).map(|device| device.name.clone()).unwrap_or_default();
        self.end(driver, key, DisconnectReason::WorkRequest { device, failure }, true);
    }

    /// Stops sending on a closed endpoint. Datagrams that are not sent yet are dropped.
    fn stop_sending(&mut self, driver: &mut Driver, key: Key) {
        let Some(endpoint) = self.all.get_mut(key) else { return };
        if let EndpointState::Draining { reason, timer } = &endpoint.state {
            driver.timers.cancel(*timer);
            endpoint.state = EndpointState::Over { reason: reason.clone() };
            driver.note(Stages::ENDS);
        }
    }

    /// Closes all endpoints on a device, because the device has failed or was removed.
    pub(crate) fn end_on_device(&mut self, driver: &mut Driver, device: usize) {
        for key in self.all.keys() {
            if self.all.get(key).is_some_and(|endpoint| endpoint.resources.device == device) {
                self.end(driver, key, DisconnectReason::DeviceRemoved, true);
            }
        }
    }

    /// Closes all endpoints at the request of the program. `immediately` has the same effect as in [`Endpoints::end`].
    pub(crate) fn close_all(&mut self, driver: &mut Driver, immediately: bool) {
        for key in self.all.keys() {
            self.end(driver, key, DisconnectReason::Local { complete: false }, immediately);
        }
    }

    /// Destroys the queue pairs of closed endpoints that have no more datagrams to send. This is stage 10 of the turn,
    /// in which connections and endpoints end. Returns `true` if there were such endpoints. For each of them,
    /// [`EndpointEvent::Closed`] is queued. The caller calls [`Endpoints::release`] after that event.
    pub(crate) fn finish_ended(&mut self, driver: &mut Driver) -> bool {
        let mut any = false;
        for key in std::mem::take(&mut self.ending) {
            let Some(endpoint) = self.all.get(key) else { continue };
            let is_sent = endpoint.queues.sends.is_empty() || crate::planted("an-endpoint-ends-before-its-sends");
            if endpoint.is_over() || is_sent {
                any = true;
                self.finish(driver, key);
            } else {
                self.ending.push(key);
            }
        }
        any
    }

    fn finish(&mut self, driver: &mut Driver, key: Key) {
        let complete = self.all.get(key).is_some_and(|endpoint| endpoint.queues.sends.is_empty());
        self.stop_sending(driver, key);
        self.destroy_ids_of(driver, key);
        // The queue pair is destroyed, so the remaining sends have ended. If the device failed to destroy the queue
        // pair, the device may still access the buffers of these sends. That does no harm: no other endpoint uses these
        // buffers, and their memory is deregistered when the endpoint is released.
        while self.all.get(key).is_some_and(|endpoint| !endpoint.queues.sends.is_empty()) {
            self.end_send(driver, key, Outcome::Failed(WcStatus::Flushed.into()));
        }
        self.cancel_lookups(driver, key);
        let Some(endpoint) = self.all.get(key) else { return };
        let reason = match &endpoint.state {
            EndpointState::Open
            | EndpointState::Draining { reason: DisconnectReason::Local { .. }, .. }
            | EndpointState::Over { reason: DisconnectReason::Local { .. } } => DisconnectReason::Local { complete },
            EndpointState::Draining { reason, .. } | EndpointState::Over { reason } => reason.clone(),
        };
        let endpoint = endpoint.id;
        self.push_event(EndpointEvent::Closed { endpoint, reason });
    }

    fn destroy_ids_of(&mut self, driver: &mut Driver, key: Key) {
        let Some(endpoint) = self.all.get_mut(key) else { return };
        endpoint.queues.chain.clear();
        let (now, listener, cm) = (driver.now, endpoint.resources.listener, endpoint.resources.cm);
        driver.discard(listener);
        driver.owners.disown(cm);
        let (provider, id) = driver.providers.of(cm);
        if let Err(error) = provider.destroy_id(id, now) {
            local_log!(Error, "{}: {error}: the device keeps the queue pair", endpoint.id);
            driver.stats.connections.undestroyed += 1;
            // The device may still complete work requests of the queue pair. So `release` must not return the entries
            // that the endpoint has reserved in the completion queue.
            endpoint.resources.room = 0;
        }
    }

    /// Removes an endpoint, and releases its peers, address handles, memory and completion-queue entries.
    pub(crate) fn release(&mut self, driver: &mut Driver, key: Key) {
        self.forget_peers_of(driver, key);
        let Some(endpoint) = self.all.remove(key) else { return };
        Self::drop_addresses(driver, endpoint.resources.device, endpoint.forgotten);
        drop_slabs(driver, endpoint.resources.device, endpoint.queues.slabs);
        driver.release_room(endpoint.resources.device, endpoint.resources.cq, endpoint.resources.room);
    }

    /// Destroys all lookups and endpoints immediately, without callbacks, because the reactor is dropped.
    pub(crate) fn teardown(&mut self, driver: &mut Driver) {
        for key in self.lookups.keys() {
            self.drop_lookup(driver, key);
        }
        for key in self.all.keys() {
            self.stop_sending(driver, key);
            self.destroy_ids_of(driver, key);
            self.release(driver, key);
        }
        self.events.clear();
    }
}

fn drop_slabs(driver: &mut Driver, device: usize, slabs: Vec<(LocalKey, MrId)>) {
    for (_, slab) in slabs {
        let kept = deregister(driver.providers.of_device(device), slab);
        driver.stats.memory.unreleased += kept;
    }
}
