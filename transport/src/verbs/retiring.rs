//! Queue pairs on a shared receive queue that are about to be destroyed.
//!
//! A queue pair in the error state may still hold a receive that it took from the shared queue. On InfiniBand and RoCE adapters
//! an event reports that the last one has completed (`IBV_EVENT_QP_LAST_WQE_REACHED`; InfiniBand Architecture
//! Specification, volume 1, 10.2.9.2). Destroyed before that, the queue pair may take the receive with it, and the shared queue
//! would be one shorter for good. So the queue pair is destroyed when the event has arrived, or after a time limit, because not
//! every driver sends it. The program does not wait: its id is invalid immediately.

use std::time::{Duration, Instant};

use super::core::Verbs;
use super::entry::{IdEntry, IdState, RetiringQp};
use super::ffi::QueueName;
use crate::provider::DeviceId;
use crate::qp::QpId;
use crate::slab::Key;

/// The time limit for the event.
const LIMIT: Duration = Duration::from_millis(500);

impl Verbs {
    /// Returns true if the queue pair of an id may hold a shared receive whose completion an event will report.
    pub(super) fn must_retire(&self, id: &IdEntry) -> bool {
        let connected = matches!(id.state, IdState::Established | IdState::Disconnecting { .. } | IdState::Closed);
        let on_shared = id.qp.as_ref().is_some_and(|qp| qp.srq.is_some() && !qp.last_receive);
        let device = id.device.map(|device| &self.devices[device.0 as usize]);
        connected && on_shared && device.is_some_and(|device| device.limits.reports_last_receive() && !device.removed)
    }

    /// Keeps the queue pair of a removed id, which is in the error state, for its last receive. Its id still counts as one on
    /// the device.
    pub(super) fn retire(&mut self, key: Key, id: IdEntry, now: Instant) {
        let IdEntry { raw, qp: Some(qp), device: Some(device), state, .. } = id else { return };
        self.release_entries(&qp);
        self.retiring.push_back(RetiringQp { key, qp, raw, device, state, until: now + LIMIT });
    }

    /// Destroys a queue pair whose last receive has completed. Returns true if one was waiting.
    pub(super) fn last_receive(&mut self, name: QueueName) -> bool {
        let Some(place) = self.retiring.iter().position(|retiring| retiring.qp.name == name) else { return false };
        if let Some(retiring) = self.retiring.remove(place) {
            self.destroy_retiring(retiring);
        }
        true
    }

    /// Destroys the queue pairs whose time limit has passed.
    pub(super) fn retire_overdue(&mut self, now: Instant) {
        while self.retiring.front().is_some_and(|retiring| retiring.until <= now) {
            if let Some(retiring) = self.retiring.pop_front() {
                log::debug!("{}: no event of a last receive", self.devices[retiring.device.0 as usize].info.name);
                self.destroy_retiring(retiring);
            }
        }
    }

    /// Destroys the waiting queue pairs of a device immediately.
    pub(super) fn retire_now(&mut self, device: DeviceId) {
        let all = std::mem::take(&mut self.retiring);
        let (gone, left): (Vec<_>, Vec<_>) = all.into_iter().partition(|retiring| retiring.device == device);
        self.retiring = left.into();
        for retiring in gone {
            self.destroy_retiring(retiring);
        }
    }

    fn destroy_retiring(&mut self, retiring: RetiringQp) {
        let RetiringQp { key, qp, raw, device, state, .. } = retiring;
        // Before, as some libraries drop what has completed with the queue pair; and after, for what comes with its end.
        self.stash_completions(key, &qp);
        raw.abandon();
        if let Err(error) = self.destroy_raw(Some(device), state, raw, Ok(())) {
            // It is in the error state, where it accesses no memory.
            log::error!("{error}: the queue pair is left in the error state");
        }
        self.stash_completions(key, &qp);
        let entry = &mut self.devices[device.0 as usize];
        entry.numbers.remove(qp.number, QpId(key));
        entry.ids -= 1;
        self.close_if_unused(device);
    }
}
