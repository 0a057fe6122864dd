//! Reading and processing of events. Each event changes the id or the device that it concerns.

use std::time::Instant;

use super::async_event::{QpEvent, RawAsyncEvent};
use super::entry::IdState;
use super::parts::Verbs;
use rdma_transport::cm::{CmEvent, CmEventKind};
use rdma_transport::error::Result;
use rdma_transport::event::DeviceEventKind;

/// The maximum number of times that one call of `next_event` polls the event set. Peers that connect without a pause make a listener ready
/// again and again. Without a limit, they would keep the call from returning.
pub(super) const ROUNDS: usize = 16;

impl Verbs {
    pub(super) fn next_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        let mut rounds = 0;
        loop {
            while let Some(event) = self.hub.events.pop_front() {
                // Skip the event if the program has destroyed the id after the event was queued.
                // Skip `Resolved` if the attempt has failed after the event was queued.
                let Some(id) = self.hub.ids.get(event.id.0) else { continue };
                let known = rdma_transport::planted("a-failed-attempt-is-resolved") || id.state != IdState::Closed;
                if known || !matches!(event.kind, CmEventKind::Resolved { .. }) {
                    return Ok(Some(event));
                }
            }
            if self.hub.event_set.channel {
                match self.hub.manager()?.next()? {
                    Some(event) => self.hub.cm_event(event, now),
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
                    self.hub.connects_failed();
                }
                if !any {
                    return Ok(None);
                }
                rounds += 1;
            }
            self.settle();
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
            self.settle();
        }
    }

    fn async_event(&mut self, device: usize, event: RawAsyncEvent) {
        match event {
            RawAsyncEvent::Qp { kind, name } => {
                let ended = kind == QpEvent::LastReceive && self.queues.last_receive(&mut self.hub, name);
                if !ended {
                    self.hub.qp_event(device, kind, name);
                }
            }
            RawAsyncEvent::CqError(name) => self.queues.overran(&mut self.hub, name),
            RawAsyncEvent::SrqError(name) => self.queues.srq_failed(&mut self.hub, device, name),
            RawAsyncEvent::DeviceFatal => self.hub.device_failed(device),
            RawAsyncEvent::Port(kind) => self.hub.port_event(device, kind),
            RawAsyncEvent::Other(code) => {
                log::debug!("{}: event {code}", self.hub.devices[device].info.name);
                self.hub.device_event(device, DeviceEventKind::Other(code));
            }
        }
    }
}
