//! Queue pairs on shared receive queues. Before such a queue pair is destroyed, the provider waits for an event.
//!
//! A queue pair in the error state may still hold a receive that it has consumed from the shared queue. On InfiniBand and RoCE adapters, an
//! event reports that the queue pair's last receive has completed (`IBV_EVENT_QP_LAST_WQE_REACHED`; InfiniBand Architecture Specification,
//! volume 1, 10.2.9.2). If the queue pair is destroyed earlier, the receive may be lost, and the shared queue has one entry less from then
//! on. So the provider destroys the queue pair when the event has arrived. Not every driver sends the event, so there is a time limit. The
//! program does not wait for the event: the id is invalid as soon as the program has destroyed it.

use std::time::{Duration, Instant};

use super::cq::Cq;
use super::devices::Device;
use super::entry::{IdEntry, IdState, RetiringQp};
use super::ffi::QueueName;
use super::hub::DeviceHub;
use super::queues::DeviceQueues;
use rdma_transport::provider::DeviceId;
use rdma_transport::qp::QpId;
use rdma_transport::slab::Key;

/// The time limit for the event `IBV_EVENT_QP_LAST_WQE_REACHED`. After this time, the queue pair is destroyed without
/// the event.
const LIMIT: Duration = Duration::from_millis(500);

impl IdEntry {
    /// Returns true if the queue pair of an id may hold a shared receive, and the device will
    /// report the completion of this receive by an event. In this case, the queue pair must be kept
    /// until the event arrives.
    pub(super) fn must_retire(&self, devices: &[Device]) -> bool {
        // A peer may send as soon as the local side has accepted, before the connection is established here.
        let connected = matches!(
            self.state,
            IdState::Accepting | IdState::Established | IdState::Disconnecting { .. } | IdState::Closed
        );
        let on_shared = self.qp.as_ref().is_some_and(|qp| qp.srq.is_some() && !qp.last_receive);
        let device = self.device.map(|device| &devices[device.0 as usize]);
        let planted = rdma_transport::planted("a-shared-receive-ends-with-its-queue-pair");
        !planted
            && connected
            && on_shared
            && device.is_some_and(|device| device.limits.reports_last_receive() && !device.removed)
    }
}

impl DeviceQueues {
    /// Keeps the queue pair of an id that the program has destroyed, until its last shared receive has completed. The queue pair is in the
    /// error state. The id stays in the device's count of ids, so that the device is not closed.
    pub(super) fn retire(&mut self, key: Key, id: IdEntry, now: Instant) {
        let IdEntry { raw, qp: Some(qp), device: Some(device), state, .. } = id else { return };
        self.leave_queues(&qp, Cq::retire);
        self.retiring.push_back(RetiringQp { key, qp, raw, device, state, until: now + LIMIT });
    }

    /// Destroys the queue pair with this name, because its last shared receive has completed, and
    /// returns true. Returns false if no queue pair in `retiring` has this name.
    pub(super) fn last_receive(&mut self, hub: &mut DeviceHub, name: QueueName) -> bool {
        let Some(index) = self.retiring.iter().position(|retiring| retiring.qp.name == name) else { return false };
        if let Some(retiring) = self.retiring.remove(index) {
            self.destroy_retiring(hub, retiring);
        }
        true
    }

    /// Destroys the queue pairs in `retiring` whose time limit has passed.
    pub(super) fn retire_overdue(&mut self, hub: &mut DeviceHub, now: Instant) {
        let never = rdma_transport::planted("a-last-receive-is-awaited-for-ever");
        while !never && self.retiring.front().is_some_and(|retiring| retiring.until <= now) {
            if let Some(retiring) = self.retiring.pop_front() {
                log::debug!("{}: no event of a last receive", hub.devices[retiring.device.0 as usize].info.name);
                self.destroy_retiring(hub, retiring);
            }
        }
    }

    /// Destroys all queue pairs of a device in `retiring`, without waiting for their events.
    pub(super) fn retire_now(&mut self, hub: &mut DeviceHub, device: DeviceId) {
        let all = std::mem::take(&mut self.retiring);
        let (gone, left): (Vec<_>, Vec<_>) = all.into_iter().partition(|retiring| retiring.device == device);
        self.retiring = left.into();
        for retiring in gone {
            self.destroy_retiring(hub, retiring);
        }
    }

    fn destroy_retiring(&mut self, hub: &mut DeviceHub, retiring: RetiringQp) {
        let RetiringQp { key, qp, raw, device, state, .. } = retiring;
        // Poll the completions before the queue pair is destroyed, because some libraries drop the completions of a
        // queue pair that they destroy. Poll again afterwards, because destroying the queue pair may add completions.
        self.stash_completions(hub, key, &qp);
        raw.abandon();
        let destroyed = hub.devices[device.0 as usize].destroy_raw(state, raw, Ok(()));
        self.stash_completions(hub, key, &qp);
        match destroyed {
            Ok(()) => {
                if let Some(cq) = self.cqs.get_mut(qp.attr.send_cq.0) {
                    cq.retired(qp.attr.max_send_wr);
                }
            }
            // Only log the error: the queue pair is in the error state, in which the device accesses no memory for
            // the queue pair. It may still add completions, so its entries stay reserved.
            Err(error) => local_log!(Error, "{error}: the queue pair is left in the error state"),
        }
        hub.devices[device.0 as usize].numbers.remove(qp.number, QpId(key));
        hub.leave_device(Some(device));
    }
}
