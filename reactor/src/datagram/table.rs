//! All endpoints of a reactor: opening, sending, completions, the end.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use rdma_transport::QpAttr;
use rdma_transport::cm::CmId;
use rdma_transport::datagram::GRH_LEN;
use rdma_transport::mr::{LocalKey, MrId};
use rdma_transport::provider::DeviceId;
use rdma_transport::slab::{Key, Slab};
use rdma_transport::wc::{WcStatus, WorkCompletion};
use rdma_transport::wr::{RecvWr, SendOp};

use super::endpoint::Endpoint;
use super::message::{Datagram, Origin};
use super::peer::{Lookup, Peer};
use super::{EndpointId, EndpointOptions, PeerId};
use crate::choose::Use;
use crate::context::Context;
use crate::core::{Core, Owner, TimerKind};
use crate::device::register;
use crate::drain::Drain;
use crate::error::{DisconnectReason, Error, Outcome, SendErrorKind};
use crate::handler::Handler;
use crate::id::{DATAGRAM_RECV, DATAGRAM_SEND, GENERATION_BITS, SendId, unpack_work};
use crate::pool::{Pool, Posted};

/// The endpoints, and what belongs to them.
#[derive(Debug)]
pub(crate) struct Endpoints {
    pub(super) all: Slab<Endpoint>,
    pub(super) peers: Slab<Peer>,
    pub(super) lookups: Slab<Lookup>,
    /// Endpoints with something to post.
    dirty: Vec<EndpointId>,
    /// Endpoints that were refused a send and may have room again.
    writable: Vec<EndpointId>,
    /// Endpoints on their way out.
    ending: Vec<EndpointId>,
    receive_chain: Vec<RecvWr>,
}

impl Default for Endpoints {
    fn default() -> Self {
        Self {
            all: Slab::with_generation_bits(GENERATION_BITS),
            peers: Slab::default(),
            lookups: Slab::default(),
            dirty: Vec::new(),
            writable: Vec::new(),
            ending: Vec::new(),
            receive_chain: Vec::new(),
        }
    }
}

impl Endpoints {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// One that is open.
    pub(super) fn open(&mut self, id: EndpointId) -> Option<&mut Endpoint> {
        self.all.get_mut(id.0).filter(|endpoint| endpoint.closing.is_none())
    }

    #[inline]
    pub(crate) fn are_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    fn mark_dirty(&mut self, id: EndpointId) {
        if let Some(endpoint) = self.all.get_mut(id.0)
            && !endpoint.dirty
        {
            endpoint.dirty = true;
            self.dirty.push(id);
        }
    }
}

impl Core {
    pub(super) fn open_endpoint(&mut self, local: SocketAddr, options: EndpointOptions) -> Result<EndpointId, Error> {
        options.validate()?;
        if matches!(self.drain, Drain::Overdue | Drain::Done) {
            return Err(Error::Drained);
        }
        self.decide(local, Use::Listen);
        let (cm, device) = self.provider.bind_datagram(SocketAddr::new(local.ip(), 0))?;
        let listener = match self.provider.listen_datagram(local, self.config.backlog) {
            Ok(listener) => listener,
            Err(error) => {
                self.provider.destroy_id(cm, self.now);
                return Err(error.into());
            }
        };
        match self.furnish(cm, listener, device, options) {
            Ok(endpoint) => {
                let id = EndpointId(self.endpoints.all.insert(endpoint));
                if let Some(endpoint) = self.endpoints.all.get_mut(id.0) {
                    endpoint.id = id;
                    endpoint.address = self.provider.local_address(listener).unwrap_or(local);
                }
                self.own(cm, Owner::Endpoint(id));
                self.own(listener, Owner::Endpoint(id));
                self.endpoints.mark_dirty(id);
                // It hears from the start, not from the next turn on.
                self.flush_endpoints();
                Ok(id)
            }
            Err(error) => {
                self.provider.destroy_id(listener, self.now);
                self.provider.destroy_id(cm, self.now);
                Err(error)
            }
        }
    }

    /// Gives an endpoint its queue pair and its memory.
    fn furnish(
        &mut self,
        cm: CmId,
        listener: CmId,
        device: DeviceId,
        options: EndpointOptions,
    ) -> Result<Endpoint, Error> {
        let EndpointOptions { receive_depth, send_depth } = options;
        let info = self.provider.device(device).ok_or(Error::Gone("device"))?;
        let max_datagram = info.capabilities.max_datagram as usize;
        let room = receive_depth + send_depth;
        self.device(device);
        let index = device.0 as usize;
        let Some(dev) = self.devices[index].as_mut() else { return Err(Error::Gone("device")) };
        let cq = dev.claim_room(&mut *self.provider, &self.config, room)?;
        let cq_id = dev.cqs[cq].id;
        let mut pool = Pool::new(GRH_LEN + max_datagram, usize::MAX);
        let mut regions = Vec::new();
        let attr = QpAttr {
            send_cq: cq_id,
            recv_cq: cq_id,
            max_send_wr: send_depth,
            max_recv_wr: receive_depth,
            max_inline: 0,
            max_recv_sge: 0,
        };
        let provider = &mut *self.provider;
        let made = pool
            .reserve(room as usize, |bytes| register(provider, &mut regions, device, bytes))
            .and_then(|()| Ok(self.provider.create_qp(cm, &attr)?));
        let qp = match made {
            Ok(qp) => qp,
            Err(error) => {
                self.drop_pool_regions(regions);
                if let Some(dev) = self.devices[index].as_mut() {
                    dev.release_room(cq, room);
                }
                return Err(error);
            }
        };
        let reposts = (0..receive_depth).map_while(|_| pool.take()).collect();
        Ok(Endpoint {
            id: EndpointId(Key::new(0, 0)),
            cm,
            listener,
            address: SocketAddr::from(([0, 0, 0, 0], 0)),
            qp,
            device: index,
            cq,
            room,
            pool,
            regions,
            max_datagram,
            receives: VecDeque::with_capacity(receive_depth as usize),
            reposts,
            sends: VecDeque::with_capacity(send_depth as usize),
            chain: Vec::with_capacity(send_depth as usize),
            send_depth: send_depth as usize,
            taken: 0,
            forgotten: VecDeque::new(),
            groups: Vec::new(),
            blocked: false,
            dirty: false,
            closing: None,
            over: false,
            timer: None,
        })
    }

    fn drop_pool_regions(&mut self, regions: Vec<(LocalKey, MrId)>) {
        for (_, region) in regions {
            if let Err(error) = self.provider.deregister(region) {
                log::warn!("deregistering a memory region: {error}");
            }
        }
    }

    pub(super) fn send_datagram(
        &mut self,
        id: EndpointId,
        peer: PeerId,
        payload: &[u8],
        immediate: Option<u32>,
    ) -> Result<SendId, SendErrorKind> {
        let endpoint = self.endpoints.all.get_mut(id.0).filter(|endpoint| endpoint.closing.is_none());
        let endpoint = endpoint.ok_or(SendErrorKind::Closed)?;
        let peer = self.endpoints.peers.get(peer.0).filter(|peer| peer.endpoint == id).ok_or(SendErrorKind::NoPeer)?;
        if payload.len() > endpoint.max_datagram {
            return Err(SendErrorKind::TooLong { len: payload.len(), max: endpoint.max_datagram });
        }
        if !endpoint.has_room() {
            endpoint.blocked = true;
            self.stats.send_stalls += 1;
            return Err(SendErrorKind::WouldBlock);
        }
        let Some(mut buffer) = endpoint.pool.take() else {
            debug_assert!(false, "every send has a buffer promised");
            return Err(SendErrorKind::WouldBlock);
        };
        endpoint.pool.slabs().bytes_mut(&mut buffer)[..payload.len()].copy_from_slice(payload);
        let op = match immediate {
            Some(value) => SendOp::DatagramWithImmediate(peer.destination, value),
            None => SendOp::Datagram(peer.destination),
        };
        let send = endpoint.push_send(buffer, payload.len(), op);
        self.endpoints.mark_dirty(id);
        Ok(send)
    }

    /// A completion of no connection: of an endpoint, if it is anybody's.
    #[cold]
    pub(crate) fn endpoint_completed<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, wc: &WorkCompletion) {
        let (kind, key, sequence) = unpack_work(wc.wr_id);
        let id = EndpointId(key);
        if self.endpoints.all.get(key).is_none() {
            self.stats.stale_completions += 1;
            return;
        }
        match kind {
            DATAGRAM_SEND => self.datagram_sent(handler, id, sequence, wc.status),
            DATAGRAM_RECV => self.datagram_received(handler, id, wc),
            _ => self.stats.stale_completions += 1,
        }
    }

    fn datagram_sent<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        id: EndpointId,
        sequence: u16,
        status: WcStatus,
    ) {
        let Some(count) = self.endpoints.all.get(id.0).and_then(|endpoint| endpoint.sends_ended_by(sequence)) else {
            log::warn!("{id}: a completion of a datagram that is not posted ({status})");
            self.stats.stale_completions += 1;
            return;
        };
        let last = if status.is_success() { Outcome::Sent } else { Outcome::Failed(status) };
        for nth in 1..=count {
            // Those before the one that failed were only not signaled.
            self.end_datagram(handler, id, if nth < count { Outcome::Sent } else { last });
        }
        self.drop_unused_addresses(id);
        if !status.is_success() {
            self.end_endpoint(id, DisconnectReason::Transport(work_request(status)), true);
        } else if self.endpoints.all.get(id.0).is_some_and(|endpoint| endpoint.blocked) {
            self.endpoints.writable.push(id);
        }
    }

    /// Ends the oldest datagram of an endpoint and tells the user.
    fn end_datagram<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: EndpointId, outcome: Outcome) {
        let Some(endpoint) = self.endpoints.all.get_mut(id.0) else { return };
        let Some(sending) = endpoint.sends.pop_front() else { return };
        endpoint.pool.give(sending.buffer.done());
        self.stats.datagrams_sent += u64::from(outcome.is_sent());
        handler.on_datagram_sent(&mut Context { core: self }, id, sending.id, outcome);
    }

    fn datagram_received<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: EndpointId, wc: &WorkCompletion) {
        let Some(endpoint) = self.endpoints.all.get_mut(id.0) else { return };
        let Some(buffer) = endpoint.receives.pop_front().map(Posted::done) else {
            log::warn!("{id}: a completion of a receive that is not posted ({})", wc.status);
            self.stats.stale_completions += 1;
            return;
        };
        let (open, slabs) = (endpoint.closing.is_none(), Arc::clone(endpoint.pool.slabs()));
        if !wc.status.is_success() {
            endpoint.reposts.push(buffer);
            self.end_endpoint(id, DisconnectReason::Transport(work_request(wc.status)), true);
            return;
        }
        if let (true, Some((header, payload))) = (open, slabs.bytes(&buffer, wc.byte_len as usize).split_first_chunk())
        {
            self.stats.datagrams_received += 1;
            let datagram = Datagram { origin: Origin { completion: *wc, header: *header }, payload };
            handler.on_datagram(&mut Context { core: self }, id, datagram);
        }
        if let Some(endpoint) = self.endpoints.all.get_mut(id.0) {
            endpoint.reposts.push(buffer);
            self.endpoints.mark_dirty(id);
        }
    }

    /// Tells users that there is room for datagrams again: once per refusal.
    pub(crate) fn writable_endpoints<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H) {
        for id in std::mem::take(&mut self.endpoints.writable) {
            let Some(endpoint) = self.endpoints.open(id) else { continue };
            if endpoint.has_room() && std::mem::take(&mut endpoint.blocked) {
                handler.on_datagram_writable(&mut Context { core: self }, id);
            }
        }
    }

    /// Posts what the turn has gathered.
    pub(crate) fn flush_endpoints(&mut self) {
        while let Some(id) = self.endpoints.dirty.pop() {
            let Some(endpoint) = self.endpoints.all.get_mut(id.0) else { continue };
            endpoint.dirty = false;
            if endpoint.over {
                continue;
            }
            self.stats.doorbells += u64::from(!endpoint.chain.is_empty());
            if let Err(error) = endpoint.post(&mut *self.provider, &mut self.endpoints.receive_chain) {
                log::warn!("{id}: posting failed: {error}");
                self.end_endpoint(id, DisconnectReason::Internal(error.to_string()), true);
            }
        }
    }

    // Ending.

    /// Marks an endpoint as ending, for the first reason given; `at_once`: without sending what was taken.
    pub(crate) fn end_endpoint(&mut self, id: EndpointId, reason: DisconnectReason, at_once: bool) {
        let Some(endpoint) = self.endpoints.all.get_mut(id.0) else { return };
        endpoint.over |= at_once;
        self.endings_moved = true;
        if endpoint.closing.is_some() {
            return;
        }
        log::debug!("{id}: ending: {reason}");
        endpoint.closing = Some(reason);
        self.endpoints.ending.push(id);
        if !at_once {
            let at = self.now + self.config.close_timeout;
            endpoint.timer = Some(self.timers.insert(at, TimerKind::Endpoint(id)));
        }
    }

    /// An endpoint had its time to send what was taken.
    pub(crate) fn endpoint_expired(&mut self, id: EndpointId) {
        if let Some(endpoint) = self.endpoints.all.get_mut(id.0) {
            endpoint.timer = None;
            endpoint.over = true;
        }
    }

    pub(crate) fn end_endpoints_of(&mut self, device: usize) {
        for key in self.endpoints.all.keys() {
            if self.endpoints.all.get(key).is_some_and(|endpoint| endpoint.device == device) {
                self.end_endpoint(EndpointId(key), DisconnectReason::DeviceRemoved, true);
            }
        }
    }

    pub(crate) fn close_endpoints(&mut self, at_once: bool) {
        for key in self.endpoints.all.keys() {
            self.end_endpoint(EndpointId(key), DisconnectReason::Local, at_once);
        }
    }

    /// Stage 10: finishes the endpoints that have nothing left to send.
    pub(crate) fn finish_endpoints<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, progressed: &mut bool) {
        for id in std::mem::take(&mut self.endpoints.ending) {
            let Some(endpoint) = self.endpoints.all.get(id.0) else { continue };
            if !endpoint.over && !endpoint.sends.is_empty() {
                self.endpoints.ending.push(id);
                continue;
            }
            *progressed = true;
            self.finish_endpoint(handler, id);
        }
    }

    fn finish_endpoint<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: EndpointId) {
        self.destroy_ids_of(id);
        // From here on nothing touches the buffers.
        while self.endpoints.all.get(id.0).is_some_and(|endpoint| !endpoint.sends.is_empty()) {
            self.end_datagram(handler, id, Outcome::Failed(WcStatus::Flushed));
        }
        self.cancel_lookups(handler, id);
        let reason = self.endpoints.all.get_mut(id.0).and_then(|endpoint| endpoint.closing.take());
        if let Some(endpoint) = self.endpoints.all.get_mut(id.0) {
            // Still not open, for what the callback may call.
            endpoint.closing = Some(DisconnectReason::Local);
        }
        handler.on_endpoint_closed(&mut Context { core: self }, id, reason.unwrap_or(DisconnectReason::Local));
        self.release_endpoint(id);
    }

    fn destroy_ids_of(&mut self, id: EndpointId) {
        let Some(endpoint) = self.endpoints.all.get_mut(id.0) else { return };
        endpoint.chain.clear();
        for cm in [endpoint.listener, endpoint.cm] {
            self.disown(cm);
            self.provider.destroy_id(cm, self.now);
        }
    }

    /// Gives back all that an endpoint holds and frees its slot.
    fn release_endpoint(&mut self, id: EndpointId) {
        self.forget_peers_of(id);
        let Some(endpoint) = self.endpoints.all.remove(id.0) else { return };
        if let Some(timer) = endpoint.timer {
            self.timers.cancel(timer);
        }
        for (_, address) in endpoint.forgotten {
            self.destroy_address(address);
        }
        self.drop_pool_regions(endpoint.regions);
        if let Some(device) = self.devices.get_mut(endpoint.device).and_then(Option::as_mut) {
            device.release_room(endpoint.cq, endpoint.room);
        }
        self.drop_if_abandoned(endpoint.device);
    }

    /// Drops everything at once, without callbacks.
    pub(crate) fn teardown_endpoints(&mut self) {
        for key in self.endpoints.lookups.keys() {
            self.drop_lookup(key);
        }
        for key in self.endpoints.all.keys() {
            self.destroy_ids_of(EndpointId(key));
            self.release_endpoint(EndpointId(key));
        }
    }
}

fn work_request(status: WcStatus) -> rdma_transport::cm::DisconnectCause {
    rdma_transport::cm::DisconnectCause::WorkRequest(status)
}
