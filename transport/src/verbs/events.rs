//! Reading and processing of events. Each event changes the id or the device that it concerns.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::async_event::{QpEvent, RawAsyncEvent};
use super::channel::{NewCmId, RawEvent};
use super::connecting::set_path;
use super::core::{ASYNC, CM, Verbs, milliseconds_to};
use super::entry::{IdEntry, IdState};
use super::exchange_socket;
use super::ffi::QueueName;
use super::id::{RawId, Service};
use super::srq::Srq;
use super::status::{connect_failure, connect_outcome};
use super::sys::rdma_cm_event_type as cm;
use crate::cm::{CmEvent, CmEventKind, CmId, ConnectFailure, DisconnectCause, ReadDepth};
use crate::error::{Result, TransportError};
use crate::event::{AsyncEvent, DeviceEventKind};
use crate::provider::{CqId, DeviceId};
use crate::qp::{QpId, SrqId};
use crate::slab::Key;

/// Status codes in a SIDR reply (`ib_cm.h`). With a SIDR reply, a peer names its queue pair for datagrams, or refuses
/// to name one.
const SIDR_UNSUPPORTED: i32 = 1;
const SIDR_REJECT: i32 = 2;
/// The maximum number of device events that wait until the program reads them.
const DEVICE_EVENTS: usize = 1000;
/// The maximum number of times that one call of `next_event` polls the event set. Peers that connect without a pause make a listener ready
/// again and again. Without a limit, they would keep the call from returning.
pub(super) const ROUNDS: usize = 16;

impl Verbs {
    pub(super) fn next_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        let mut rounds = 0;
        loop {
            while let Some(event) = self.events.pop_front() {
                // The program may have destroyed the id since the event was queued, or an attempt that was resolved may have failed.
                let Some(id) = self.ids.get(event.id.0) else { continue };
                let known = crate::planted("a-failed-attempt-is-resolved") || id.state != IdState::Closed;
                if known || !matches!(event.kind, CmEventKind::Resolved { .. }) {
                    return Ok(Some(event));
                }
            }
            if self.event_set.channel {
                match self.manager()?.next()? {
                    Some(event) => self.cm_event(event, now),
                    None => self.event_set.channel = false,
                }
            } else if let Some(device) = self.event_set.devices.pop() {
                self.async_events(device as usize);
            } else if let Some(key) = self.event_set.streams.pop_front() {
                self.stream_ready(key, now);
            } else if rounds == ROUNDS {
                // More descriptors may be ready. Wake the channel, so that the caller calls this function again.
                self.connector.wake();
                return Ok(None);
            } else if !self.poll_event_set()? {
                return Ok(None);
            } else {
                rounds += 1;
            }
        }
    }

    /// Polls the descriptors of the event set, and records which of them are ready. Returns true if at least one is
    /// ready.
    fn poll_event_set(&mut self) -> Result<bool> {
        match self.event_set.poll.poll(&mut self.event_set.ready, Some(Duration::ZERO)) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => return Ok(true),
            other => other.map_err(|source| TransportError::io("epoll_wait", source))?,
        }
        let mut any = false;
        let mut woken = false;
        for event in self.event_set.ready.iter() {
            any = true;
            match event.token() {
                CM => self.event_set.channel = true,
                token if exchange_socket::key_of(token).is_some() => {
                    self.event_set.streams.extend(exchange_socket::key_of(token))
                }
                token if token.0 >= ASYNC => self.event_set.devices.push((token.0 - ASYNC) as u32),
                _ => woken = true,
            }
        }
        if woken {
            for failed in self.connector.take_failed() {
                self.connect_failed(failed.key, connect_failure(&failed.error));
            }
        }
        Ok(any)
    }

    pub(super) fn push(&mut self, key: Key, kind: CmEventKind) {
        self.events.push_back(CmEvent { id: CmId(key), kind });
    }

    fn connect_failed(&mut self, key: Key, failure: ConnectFailure) {
        let Some(id) = self.ids.get_mut(key) else { return };
        id.handshaking = false;
        // Report the failure only once: an event may already have reported it.
        if id.state == IdState::Connecting {
            id.state = IdState::Closed;
            self.push(key, CmEventKind::ConnectFailed(failure));
        }
    }

    fn cm_event(&mut self, event: RawEvent, now: Instant) {
        let RawEvent { kind, status, key, request, private_data, read_depth, peer, join } = event;
        if let Some(request) = request {
            self.connect_request(key, &request, private_data, read_depth, now);
            return;
        }
        let Some(id) = self.ids.get_mut(key) else { return };
        log::trace!("event {kind} (status {status}) while {}", id.state.name());
        match kind {
            cm::RDMA_CM_EVENT_ADDR_RESOLVED => self.address_resolved(key, now),
            cm::RDMA_CM_EVENT_ROUTE_RESOLVED => {
                if let (IdState::Resolving, Some(device)) = (id.state, id.device) {
                    id.state = IdState::Resolved;
                    self.push(key, CmEventKind::Resolved { device });
                }
            }
            cm::RDMA_CM_EVENT_ESTABLISHED => match peer {
                Some(peer) if id.state == IdState::Connecting => {
                    id.state = IdState::Established;
                    self.push(key, CmEventKind::Reached { private_data, peer });
                }
                Some(_) => {}
                None => self.established(key, private_data, read_depth),
            },
            cm::RDMA_CM_EVENT_MULTICAST_JOIN | cm::RDMA_CM_EVENT_MULTICAST_ERROR => {
                self.join_ended(key, join, status, peer);
            }
            // This event with a positive status is a SIDR reply in which the peer refuses to name a queue pair.
            cm::RDMA_CM_EVENT_UNREACHABLE if id.raw.service() == Service::Datagram && status > 0 => {
                let kind = match status {
                    SIDR_UNSUPPORTED => CmEventKind::ConnectFailed(ConnectFailure::Refused),
                    SIDR_REJECT => CmEventKind::Rejected { private_data },
                    other => CmEventKind::ConnectFailed(ConnectFailure::System(format!(
                        "the peer refuses with status {other}"
                    ))),
                };
                if id.state == IdState::Connecting {
                    id.state = IdState::Closed;
                    self.push(key, kind);
                }
            }
            cm::RDMA_CM_EVENT_DISCONNECTED => {
                id.handshaking = false;
                let cause = match id.state {
                    IdState::Disconnecting { .. } => DisconnectCause::Local,
                    _ => DisconnectCause::Peer,
                };
                self.flush_closing(CmId(key));
                self.disconnected(key, cause);
            }
            cm::RDMA_CM_EVENT_DEVICE_REMOVAL => match id.device {
                Some(device) => self.device_removed(device),
                // An id with a local address is on a device before the peer's address is resolved. The removal ends the resolving, and
                // no other event follows (the kernel's drivers/infiniband/core/cma.c, `addr_handler`).
                None if id.state == IdState::Resolving => {
                    id.state = IdState::Closed;
                    let why = "the device of the local address was removed".into();
                    self.push(key, CmEventKind::ConnectFailed(ConnectFailure::Unreachable(why)));
                }
                None => {}
            },
            cm::RDMA_CM_EVENT_TIMEWAIT_EXIT => self.push(key, CmEventKind::TimewaitExit),
            cm::RDMA_CM_EVENT_ADDR_ERROR
            | cm::RDMA_CM_EVENT_ROUTE_ERROR
            | cm::RDMA_CM_EVENT_CONNECT_ERROR
            | cm::RDMA_CM_EVENT_UNREACHABLE
            | cm::RDMA_CM_EVENT_REJECTED => self.failed(key, kind, status, private_data),
            cm::RDMA_CM_EVENT_ADDR_CHANGE => {
                let (address, state) = (id.raw.local_address(), id.state.name());
                local_log!(Warn, "{address:?} has moved to another device or port, under an id that is {state}");
                if id.state != IdState::WatchingDevice {
                    self.push(key, CmEventKind::AddressChange);
                }
            }
            other => self.push(key, CmEventKind::Other(other)),
        }
    }

    fn address_resolved(&mut self, key: Key, now: Instant) {
        let Some(id) = self.ids.get(key).filter(|id| id.state == IdState::Resolving) else { return };
        let (raw, deadline) = (Arc::clone(&id.raw), id.deadline);
        let timeout = milliseconds_to(deadline, Some(now));
        // True if the id is to join a multicast group. Such an id must not resolve a route before it joins.
        let is_group =
            raw.service() == Service::Datagram && raw.peer_address().is_some_and(|peer| peer.ip().is_multicast());
        let routed = self.assign_device(key).and_then(|device| {
            self.check_port(Some(device), raw.port())?;
            if is_group {
                if let Some(id) = self.ids.get_mut(key) {
                    id.state = IdState::Resolved;
                }
                self.push(key, CmEventKind::Resolved { device });
                return Ok(());
            }
            raw.resolve_route(timeout)
        });
        if let Err(error) = routed {
            if let Some(id) = self.ids.get_mut(key) {
                id.state = IdState::Closed;
            }
            self.push(key, CmEventKind::ConnectFailed(ConnectFailure::System(error.to_string())));
        }
    }

    fn connect_request(
        &mut self,
        listener: Key,
        request: &NewCmId,
        private_data: Box<[u8]>,
        read_depth: ReadDepth,
        now: Instant,
    ) {
        let Ok(manager) = self.manager().cloned() else { return };
        // SAFETY: the event has delivered a new id, which nothing else owns.
        let raw = unsafe { RawId::from_raw(request.id, &manager) };
        let Some(listening) = self.ids.get(listener).filter(|id| id.state == IdState::Listening) else {
            // The program has destroyed the listener. Dropping the id of the connect request refuses the peer.
            return;
        };
        // The kernel does not apply the listener's options to the ids of its connect requests, so set the options here.
        set_path(&raw, listening.inherited.0, listening.inherited.1);
        let Some(peer) = raw.peer_address() else { return };
        let mut id = IdEntry::new(Arc::new(raw), IdState::RequestReceived);
        id.read_depth = read_depth;
        let key = self.add(id);
        match self.assign_device(key) {
            Ok(device) => {
                let listener = CmId(listener);
                self.push(key, CmEventKind::ConnectRequest { listener, device, peer, private_data, read_depth });
            }
            Err(error) => {
                peer_log!(self.log_limit, now, Refused, Warn, peer, "{peer} is refused: {error}");
                self.discard(key);
            }
        }
    }

    fn established(&mut self, key: Key, private_data: Box<[u8]>, agreed: ReadDepth) {
        let Some(id) = self.ids.get_mut(key) else { return };
        id.handshaking = false;
        let private_data = match id.state {
            IdState::Connecting => {
                id.read_depth = agreed;
                private_data
            }
            IdState::Accepting => Box::default(),
            // Ignore the event: it has arrived twice, or the program has disconnected before it arrived.
            _ => return,
        };
        let (active, read_depth) = (id.state == IdState::Connecting, id.read_depth);
        id.state = IdState::Established;
        if active {
            self.set_min_rnr_timer(key);
        }
        self.push(key, CmEventKind::Established { private_data, read_depth });
    }

    pub(super) fn set_min_rnr_timer(&self, key: Key) {
        let Some(id) = self.ids.get(key) else { return };
        let Some(device) = id.device.and_then(|device| self.devices.get(device.0 as usize)) else { return };
        if !device.limits.iwarp {
            if let Err(error) = id.raw.set_min_rnr_timer(id.min_rnr_timer) {
                log::debug!("{}: the receiver-not-ready timer stays long: {error}", device.info.name);
            }
        }
    }

    fn failed(&mut self, key: Key, kind: cm::Type, status: i32, private_data: Box<[u8]>) {
        let Some(id) = self.ids.get_mut(key) else { return };
        id.handshaking = false;
        match id.state {
            IdState::Resolving | IdState::Resolved | IdState::Connecting => {
                id.state = IdState::Closed;
                if let Some(outcome) = connect_outcome(kind, status, private_data) {
                    self.push(key, outcome);
                }
            }
            IdState::Accepting => {
                id.state = IdState::Closed;
                self.push(key, CmEventKind::ConnectFailed(ConnectFailure::PeerClosed));
            }
            // This event means that the peer has accepted, and has disconnected before it was notified that the
            // connection was established.
            IdState::Established if kind == cm::RDMA_CM_EVENT_REJECTED => {
                self.disconnected(key, DisconnectCause::Peer);
            }
            // Since Linux 6.0 the connection manager may report the event `UNREACHABLE` for an established connection.
            IdState::Established => {
                let error = std::io::Error::from_raw_os_error(status.saturating_abs());
                self.disconnected(key, DisconnectCause::Path(format!("the peer became unreachable: {error}")));
            }
            IdState::Disconnecting { .. } => self.flush_closing(CmId(key)),
            IdState::Listening
            | IdState::Bound
            | IdState::WatchingDevice
            | IdState::AwaitingRequest
            | IdState::RequestReceived
            | IdState::Closed => {}
        }
    }

    pub(super) fn disconnected(&mut self, key: Key, cause: DisconnectCause) {
        if let Some(id) = self.ids.get_mut(key) {
            if !matches!(id.state, IdState::Disconnecting { .. }) {
                id.state = IdState::Closed;
            }
            self.push(key, CmEventKind::Disconnected(cause));
        }
    }

    /// Reports the removal of a device by one event for every id on the device. Closes the device immediately if no id
    /// is on it.
    fn device_removed(&mut self, device: DeviceId) {
        let Some(entry) = self.devices.get_mut(device.0 as usize) else { return };
        let again = std::mem::replace(&mut entry.removed, true);
        if !again {
            local_log!(Warn, "the device {} was removed: {} ids are on it", entry.info.name, entry.ids);
        }
        if let Some(raw) = &entry.raw {
            raw.set_removed();
        }
        for key in self.ids.keys() {
            let Some(id) = self.ids.get_mut(key) else { continue };
            if id.device == Some(device) && id.state != IdState::WatchingDevice && !id.removal_reported {
                id.removal_reported = true;
                self.push(key, CmEventKind::DeviceRemoval);
            }
        }
        if !again {
            self.device_event(device.0 as usize, DeviceEventKind::Removed);
        }
        self.retire_now(device);
        self.close_if_unused(device);
    }

    fn async_events(&mut self, device: usize) {
        loop {
            let Some(raw) = self.devices.get(device).and_then(|device| device.raw.clone()) else { return };
            match raw.next_event() {
                Ok(Some(event)) => self.async_event(device, event),
                Ok(None) => return,
                Err(error) => {
                    log::debug!("asynchronous events of {}: {error}", self.devices[device].info.name);
                    return;
                }
            }
        }
    }

    fn async_event(&mut self, device: usize, event: RawAsyncEvent) {
        let name = &self.devices[device].info.name;
        match event {
            RawAsyncEvent::Qp { kind, name } => self.qp_event(device, kind, name),
            RawAsyncEvent::CqError(name) => {
                // The completion queue may belong to another provider in this process, which then reports its failure.
                if let Some((key, _)) = self.cqs.at(name.slot()).filter(|(_, cq)| cq.named(name).is_some()) {
                    self.queue_failed(CqId(key), "the completion queue overran");
                }
            }
            RawAsyncEvent::SrqError(name) => self.srq_failed(device, name),
            RawAsyncEvent::DeviceFatal => {
                local_log!(Error, "the device {name} failed");
                self.device_event(device, DeviceEventKind::Fatal);
                self.device_removed(DeviceId(device as u32));
            }
            RawAsyncEvent::Port(kind) => {
                local_log!(Warn, "{name}: {kind:?}");
                match kind {
                    DeviceEventKind::PortDown { port } => self.devices[device].set_down(port as u8, true),
                    DeviceEventKind::PortActive { port } => self.devices[device].set_down(port as u8, false),
                    _ => {}
                }
                self.device_event(device, kind);
                self.ports_changed(DeviceId(device as u32));
            }
            RawAsyncEvent::Other(code) => {
                log::debug!("{name}: event {code}");
                self.device_event(device, DeviceEventKind::Other(code));
            }
        }
    }

    fn qp_event(&mut self, device: usize, kind: QpEvent, queue: QueueName) {
        if kind == QpEvent::LastReceive && self.last_receive(queue) {
            return;
        }
        let name = &self.devices[device].info.name;
        let is_it = |id: &IdEntry| id.qp.as_ref().is_some_and(|qp| qp.name == queue);
        let key = self.ids.at(queue.slot()).filter(|(_, id)| is_it(id)).map(|(key, _)| key);
        let Some((key, id)) = key.and_then(|key| Some((key, self.ids.get_mut(key)?))) else {
            // The queue pair belongs to another provider in this process. Every provider receives all events of the
            // device.
            log::trace!("{name}: an event of a queue pair that is not this provider's: {kind:?}");
            return;
        };
        match kind {
            QpEvent::Failed(why) if matches!(id.state, IdState::Accepting | IdState::Established) => {
                let why = format!("{name}: {why}");
                self.push(key, CmEventKind::Disconnected(DisconnectCause::Path(why)));
            }
            QpEvent::CommunicationEstablished
                if id.state == IdState::Accepting && !id.handshaking && !id.raw.uses_exchange() =>
            {
                if let Err(error) = id.raw.notify_established() {
                    log::debug!("{name}: {error}");
                }
            }
            QpEvent::LastReceive => {
                if let Some(qp) = &mut id.qp {
                    qp.last_receive = true;
                }
                self.device_event(device, DeviceEventKind::LastReceive(QpId(key)));
            }
            other => log::trace!("{name}: {other:?}"),
        }
    }

    fn device_event(&mut self, device: usize, kind: DeviceEventKind) {
        if self.device_events.len() >= DEVICE_EVENTS {
            // The list is full: the program does not read the events, or the device reports events without end. Drop
            // the oldest event of a queue pair, because many queue pairs may end at the same time. If there is none,
            // drop the oldest event.
            let of_queue_pair = |event: &AsyncEvent| matches!(event.kind, DeviceEventKind::LastReceive(_));
            let place = self.device_events.iter().position(of_queue_pair).unwrap_or(0);
            self.device_events.remove(place);
        }
        self.device_events.push_back(AsyncEvent { device: DeviceId(device as u32), kind });
    }

    fn srq_failed(&mut self, device: usize, name: QueueName) {
        let ours = |srq: &Srq| srq.raw.as_ref().is_some_and(|raw| raw.name == name);
        let Some((key, _)) = self.srqs.at(name.slot()).filter(|(_, srq)| ours(srq)) else {
            log::trace!("an event of a shared receive queue that is not this provider's");
            return;
        };
        let srq = SrqId(key);
        local_log!(Error, "{}: a shared receive queue failed", self.devices[device].info.name);
        self.device_event(device, DeviceEventKind::SharedReceiveQueueFailed(srq));
        let on_it = |id: &IdEntry| id.qp.as_ref().is_some_and(|qp| qp.srq == Some(srq));
        let why = format!("{}: the shared receive queue failed", self.devices[device].info.name);
        self.path_failed(on_it, &why);
    }

    /// Reports to each id for which `concerned` returns true that its path has failed. `why` is the reason in the
    /// event.
    fn path_failed(&mut self, concerned: impl Fn(&IdEntry) -> bool, why: &str) {
        let keys: Vec<Key> = self.ids.iter().filter(|(_, id)| concerned(id)).map(|(key, _)| key).collect();
        for key in keys {
            self.push(key, CmEventKind::Disconnected(DisconnectCause::Path(why.into())));
        }
    }

    /// Handles the error of a call on a completion queue: the queue has failed. After the removal of the device such errors are expected,
    /// and change nothing, because the connections end already.
    pub(super) fn queue_call_failed(&mut self, queue: CqId, error: &TransportError) {
        let removed = self.cqs.get(queue.0).is_some_and(|cq| self.devices[cq.device as usize].removed);
        if !removed {
            self.queue_failed(queue, &error.to_string());
        }
    }

    /// Marks a completion queue as failed, because completions are lost. Ends the connections whose queue pairs use the queue.
    pub(super) fn queue_failed(&mut self, queue: CqId, why: &str) {
        let Some(cq) = self.cqs.get_mut(queue.0).filter(|cq| !cq.failed) else { return };
        cq.failed = true;
        let device = &mut self.devices[cq.device as usize];
        device.armed -= usize::from(cq.armed);
        cq.armed = false;
        let why = format!("{}: {why}", device.info.name);
        local_log!(Error, "{why}");
        let on_it = |id: &IdEntry| id.qp.as_ref().is_some_and(|qp| qp.completes_to(queue));
        self.path_failed(on_it, &why);
        // The failure may have been found by a poll, or when the queue was armed. Then nothing else makes the channel readable.
        self.connector.wake();
    }

    /// Treats a device as failed and removed. Its completion channel has failed, so the provider can no longer wait for
    /// completions.
    pub(super) fn channel_failed(&mut self, device: DeviceId, why: &str) {
        let index = device.0 as usize;
        local_log!(Error, "{}: {why}: the device is treated as failed", self.devices[index].info.name);
        self.device_event(index, DeviceEventKind::Fatal);
        self.device_removed(device);
        self.connector.wake();
    }
}
