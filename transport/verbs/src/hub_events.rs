//! The processing of events: each changes the id or the device that it concerns.

use std::sync::Arc;
use std::time::Instant;

use super::async_event::QpEvent;
use super::channel::{NewCmId, RawEvent};
use super::connecting::set_path;
use super::entry::{IdEntry, IdState};
use super::ffi::QueueName;
use super::hub::{DeviceHub, milliseconds_to};
use super::id::{RawId, Service};
use super::status::connect_failure;
use super::sys::rdma_cm_event_type as cm;
use rdma_transport::cm::{CmEventKind, CmId, ConnectFailure, DisconnectCause, ReadDepth};
use rdma_transport::event::{AsyncEvent, DeviceEventKind};
use rdma_transport::provider::DeviceId;
use rdma_transport::qp::QpId;
use rdma_transport::slab::Key;

/// The maximum number of device events that wait until the program reads them.
const DEVICE_EVENTS: usize = 1000;

impl DeviceHub {
    /// Reports the connect calls that have failed on private threads.
    pub(super) fn connects_failed(&mut self) {
        for failed in self.connector.take_failed() {
            let Some(id) = self.ids.get_mut(failed.key) else { continue };
            if let Some(event) = id.connect_failed(connect_failure(&failed.error)) {
                self.push(failed.key, event);
            }
        }
    }

    pub(super) fn cm_event(&mut self, event: RawEvent, now: Instant) {
        let RawEvent { kind, status, key, request, private_data, read_depth, peer, join } = event;
        if let Some(request) = request {
            self.connect_request(key, &request, private_data, read_depth, now);
            return;
        }
        let Some(id) = self.ids.get_mut(key) else { return };
        log::trace!("event {kind} (status {status}) while {}", id.state.name());
        let outcome = match kind {
            cm::RDMA_CM_EVENT_ADDR_RESOLVED => return self.address_resolved(key, now),
            cm::RDMA_CM_EVENT_ROUTE_RESOLVED => id.device.filter(|_| id.state == IdState::Resolving).map(|device| {
                id.state = IdState::Resolved;
                CmEventKind::Resolved { device }
            }),
            cm::RDMA_CM_EVENT_ESTABLISHED => match peer {
                Some(peer) if id.state == IdState::Connecting => {
                    id.state = IdState::Established;
                    Some(CmEventKind::Reached { private_data, peer })
                }
                Some(_) => None,
                None => {
                    let is_active = id.state == IdState::Connecting;
                    let outcome = id.established(private_data, read_depth);
                    if is_active {
                        self.set_min_rnr_timer(key);
                    }
                    outcome
                }
            },
            cm::RDMA_CM_EVENT_MULTICAST_JOIN | cm::RDMA_CM_EVENT_MULTICAST_ERROR => id.join_ended(join, status, peer),
            // This event with a positive status is a SIDR reply in which the peer refuses to name a
            // queue pair.
            cm::RDMA_CM_EVENT_UNREACHABLE if id.raw.service() == Service::Datagram && status > 0 => {
                id.datagrams_refused(status, private_data)
            }
            cm::RDMA_CM_EVENT_DISCONNECTED => {
                id.handshaking = false;
                let cause = match id.state {
                    IdState::Disconnecting { .. } => DisconnectCause::Local,
                    _ => DisconnectCause::Peer,
                };
                id.flush_closing();
                Some(id.disconnected(cause))
            }
            cm::RDMA_CM_EVENT_DEVICE_REMOVAL => match id.device {
                Some(device) => return self.device_removed(device),
                // An id with a local address is on a device before the peer's address is resolved.
                // The removal ends the resolving, and no other event follows (the kernel's
                // drivers/infiniband/core/cma.c, `addr_handler`).
                None if id.state == IdState::Resolving => {
                    id.state = IdState::Closed;
                    let why = "the device of the local address was removed".into();
                    Some(CmEventKind::ConnectFailed(ConnectFailure::Unreachable(why)))
                }
                None => None,
            },
            cm::RDMA_CM_EVENT_TIMEWAIT_EXIT => Some(CmEventKind::TimewaitExit),
            cm::RDMA_CM_EVENT_ADDR_ERROR
            | cm::RDMA_CM_EVENT_ROUTE_ERROR
            | cm::RDMA_CM_EVENT_CONNECT_ERROR
            | cm::RDMA_CM_EVENT_UNREACHABLE
            | cm::RDMA_CM_EVENT_REJECTED => id.failed(kind, status, private_data),
            cm::RDMA_CM_EVENT_ADDR_CHANGE => {
                let (address, state) = (id.raw.local_address(), id.state.name());
                local_log!(Warn, "{address:?} has moved to another device or port, under an id that is {state}");
                (id.state != IdState::WatchingDevice).then_some(CmEventKind::AddressChange)
            }
            other => Some(CmEventKind::Other(other)),
        };
        if let Some(outcome) = outcome {
            self.push(key, outcome);
        }
    }

    fn address_resolved(&mut self, key: Key, now: Instant) {
        let Some(id) = self.ids.get(key).filter(|id| id.state == IdState::Resolving) else { return };
        let (raw, deadline) = (Arc::clone(&id.raw), id.deadline);
        let timeout = milliseconds_to(deadline, Some(now));
        // True if the id is to join a multicast group. Such an id must not resolve a route before
        // it joins.
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
            // The program has destroyed the listener. Dropping the id of the connect request
            // refuses the peer.
            return;
        };
        // The kernel does not apply the listener's options to the ids of its connect requests, so
        // set the options here.
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

    /// Treats a device that has failed as removed.
    pub(super) fn device_failed(&mut self, device: usize) {
        local_log!(Error, "the device {} failed", self.devices[device].info.name);
        self.device_event(device, DeviceEventKind::Fatal);
        self.device_removed(DeviceId(device as u32));
    }

    pub(super) fn port_event(&mut self, device: usize, kind: DeviceEventKind) {
        let entry = &mut self.devices[device];
        local_log!(Warn, "{}: {kind:?}", entry.info.name);
        match kind {
            DeviceEventKind::PortDown { port } => entry.set_down(port as u8, true),
            DeviceEventKind::PortActive { port } => entry.set_down(port as u8, false),
            _ => {}
        }
        entry.ports_changed();
        self.device_event(device, kind);
    }

    /// Processes an event of the queue pair with the name `queue`.
    pub(super) fn qp_event(&mut self, device: usize, kind: QpEvent, queue: QueueName) {
        let name = &self.devices[device].info.name;
        let is_it = |id: &IdEntry| id.qp.as_ref().is_some_and(|qp| qp.name == queue);
        let key = self.ids.at(queue.slot()).filter(|(_, id)| is_it(id)).map(|(key, _)| key);
        let Some((key, id)) = key.and_then(|key| Some((key, self.ids.get_mut(key)?))) else {
            // The queue pair belongs to another provider in this process. Every provider receives
            // all events of the device.
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

    /// Reports the removal of a device by one event for every id on the device.
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
        self.left.push(device);
    }

    /// Treats a device as failed and removed. Its completion channel has failed, so the provider
    /// can no longer wait for completions.
    pub(super) fn channel_failed(&mut self, device: DeviceId, why: &str) {
        let index = device.0 as usize;
        local_log!(Error, "{}: {why}: the device is treated as failed", self.devices[index].info.name);
        self.device_event(index, DeviceEventKind::Fatal);
        self.device_removed(device);
        self.connector.wake();
    }

    pub(super) fn device_event(&mut self, device: usize, kind: DeviceEventKind) {
        if self.device_events.len() >= DEVICE_EVENTS {
            // The list is full: the program does not read the events, or the device reports events
            // without end. Drop the oldest event of a queue pair, because many queue pairs may end
            // at the same time. If there is none, drop the oldest event.
            let of_queue_pair = |event: &AsyncEvent| matches!(event.kind, DeviceEventKind::LastReceive(_));
            let oldest = self.device_events.iter().position(of_queue_pair).unwrap_or(0);
            self.device_events.remove(oldest);
        }
        self.device_events.push_back(AsyncEvent { device: DeviceId(device as u32), kind });
    }
}
