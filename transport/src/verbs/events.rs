//! Reading and processing of events. Each event changes the id or the device that it concerns.

use std::time::Instant;

use super::async_event::{QpEvent, RawAsyncEvent};
use super::channel::RawEvent;
use super::core::Verbs;
use super::entry::IdState;
use super::id::Service;
use super::status::connect_failure;
use super::sys::rdma_cm_event_type as cm;
use crate::cm::{CmEvent, CmEventKind, ConnectFailure, DisconnectCause};
use crate::error::Result;
use crate::event::DeviceEventKind;
use crate::provider::DeviceId;

/// The maximum number of times that one call of `next_event` polls the event set. Peers that connect without a pause make a listener ready
/// again and again. Without a limit, they would keep the call from returning.
pub(super) const ROUNDS: usize = 16;

impl Verbs {
    pub(super) fn next_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        let mut rounds = 0;
        loop {
            while let Some(event) = self.hub.events.pop_front() {
                // The program may have destroyed the id since the event was queued, or an attempt that was resolved may have failed.
                let Some(id) = self.hub.ids.get(event.id.0) else { continue };
                let known = crate::planted("a-failed-attempt-is-resolved") || id.state != IdState::Closed;
                if known || !matches!(event.kind, CmEventKind::Resolved { .. }) {
                    return Ok(Some(event));
                }
            }
            if self.hub.event_set.channel {
                match self.hub.manager()?.next()? {
                    Some(event) => self.cm_event(event, now),
                    None => self.hub.event_set.channel = false,
                }
            } else if let Some(device) = self.hub.event_set.devices.pop() {
                self.async_events(device as usize);
            } else if let Some(key) = self.hub.event_set.streams.pop_front() {
                self.exchanges.stream_ready(&mut self.hub, key, now);
            } else if rounds == ROUNDS {
                // More descriptors may be ready. Wake the channel, so that the caller calls this function again.
                self.hub.connector.wake();
                return Ok(None);
            } else {
                let (any, woken) = self.hub.event_set.poll()?;
                if woken {
                    self.connects_failed();
                }
                if !any {
                    return Ok(None);
                }
                rounds += 1;
            }
            self.settle();
        }
    }

    /// Reports the connect calls that have failed on private threads.
    fn connects_failed(&mut self) {
        for failed in self.hub.connector.take_failed() {
            let Some(id) = self.hub.ids.get_mut(failed.key) else { continue };
            if let Some(event) = id.connect_failed(connect_failure(&failed.error)) {
                self.hub.push(failed.key, event);
            }
        }
    }

    fn cm_event(&mut self, event: RawEvent, now: Instant) {
        let RawEvent { kind, status, key, request, private_data, read_depth, peer, join } = event;
        if let Some(request) = request {
            self.hub.connect_request(key, &request, private_data, read_depth, now);
            return;
        }
        let Some(id) = self.hub.ids.get_mut(key) else { return };
        log::trace!("event {kind} (status {status}) while {}", id.state.name());
        let outcome = match kind {
            cm::RDMA_CM_EVENT_ADDR_RESOLVED => return self.hub.address_resolved(key, now),
            cm::RDMA_CM_EVENT_ROUTE_RESOLVED => match (id.state, id.device) {
                (IdState::Resolving, Some(device)) => {
                    id.state = IdState::Resolved;
                    Some(CmEventKind::Resolved { device })
                }
                _ => None,
            },
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
                        self.hub.set_min_rnr_timer(key);
                    }
                    outcome
                }
            },
            cm::RDMA_CM_EVENT_MULTICAST_JOIN | cm::RDMA_CM_EVENT_MULTICAST_ERROR => id.join_ended(join, status, peer),
            // This event with a positive status is a SIDR reply in which the peer refuses to name a queue pair.
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
                Some(device) => return self.hub.device_removed(device),
                // An id with a local address is on a device before the peer's address is resolved. The removal ends the resolving, and
                // no other event follows (the kernel's drivers/infiniband/core/cma.c, `addr_handler`).
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
            self.hub.push(key, outcome);
        }
    }

    fn async_events(&mut self, device: usize) {
        loop {
            let Some(raw) = self.hub.devices.get(device).and_then(|device| device.raw.clone()) else { return };
            match raw.next_event() {
                Ok(Some(event)) => self.async_event(device, event),
                Ok(None) => return,
                Err(error) => {
                    log::debug!("asynchronous events of {}: {error}", self.hub.devices[device].info.name);
                    return;
                }
            }
        }
    }

    fn async_event(&mut self, device: usize, event: RawAsyncEvent) {
        let name = &self.hub.devices[device].info.name;
        match event {
            RawAsyncEvent::Qp { kind, name } => {
                if kind != QpEvent::LastReceive || !self.queues.last_receive(&mut self.hub, name) {
                    self.hub.qp_event(device, kind, name);
                }
            }
            RawAsyncEvent::CqError(name) => {
                // The completion queue may belong to another provider in this process, which then reports its failure.
                self.queues.overran(&mut self.hub, name);
            }
            RawAsyncEvent::SrqError(name) => self.queues.srq_failed(&mut self.hub, device, name),
            RawAsyncEvent::DeviceFatal => {
                local_log!(Error, "the device {name} failed");
                self.hub.device_event(device, DeviceEventKind::Fatal);
                self.hub.device_removed(DeviceId(device as u32));
            }
            RawAsyncEvent::Port(kind) => {
                local_log!(Warn, "{name}: {kind:?}");
                match kind {
                    DeviceEventKind::PortDown { port } => self.hub.devices[device].set_down(port as u8, true),
                    DeviceEventKind::PortActive { port } => self.hub.devices[device].set_down(port as u8, false),
                    _ => {}
                }
                self.hub.device_event(device, kind);
                self.hub.ports_changed(DeviceId(device as u32));
            }
            RawAsyncEvent::Other(code) => {
                log::debug!("{name}: event {code}");
                self.hub.device_event(device, DeviceEventKind::Other(code));
            }
        }
    }
}
