//! The release of connections that have ended, and of devices that nothing uses any more.

use std::time::Instant;

use rdma_transport::newcomers::Host;
use rdma_transport::qp::SrqId;

use crate::conn::state::Ending;
use crate::driver::World;
use crate::driver::owners::Owners;
use crate::driver::stages::Stages;
use crate::driver::table::ConnectionSlot;
use crate::driver::world::Freed;
use crate::error::DisconnectReason;
use crate::id::{ConnectionId, WorkRequestId};
use crate::providers::Providers;
use crate::stats::Stats;

impl ConnectionSlot {
    /// Destroys the queue pair of a connection. After that, the device does not access the posted
    /// buffers any more, so they return to the pool. If the device cannot destroy the queue pair,
    /// the buffers and other resources of the connection are lost, because the device may still
    /// access them.
    pub(crate) fn destroy(&mut self, providers: &mut Providers, owners: &mut Owners, stats: &mut Stats, now: Instant) {
        let (provider, cm) = providers.of(self.link.cm);
        let destroyed = provider.destroy_id(cm, now);
        owners.disown(self.link.cm);
        self.link.qp = None;
        let destroyed = if crate::planted("a-kept-queue-pair-counts-as-destroyed") { Ok(()) } else { destroyed };
        if let Err(error) = destroyed {
            let lost = self.conn.forsake();
            local_log!(Error, "{error}: {lost} buffers are lost to the queue pair");
            stats.connections.undestroyed += 1;
            self.link.lost = Some(lost);
        }
    }
}

impl World {
    /// Removes a connection of which the program was not notified, except by `on_identity`. Its
    /// connection-manager id is not destroyed.
    pub(crate) fn forget(&mut self, id: ConnectionId) {
        // In `on_identity`, the program may have registered regions for this peer.
        self.revoke_regions_of(id);
        if let Some(slot) = self.table.get(id) {
            self.owners.disown(slot.link.cm);
            self.release(id);
        }
    }

    /// Ends an accepted connection that is not up, so that a new connection can be accepted and use
    /// its buffers.
    pub(crate) fn evict(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get(id) else { return };
        log::debug!("{id}: {} is evicted for a new connection", slot.conn.peer());
        self.stats.connections.refused += 1;
        self.stats.connections.evicted += 1;
        self.withdraw(id);
    }

    /// Removes an accepted connection that is not up. Destroys the queue pair immediately, with all
    /// posted work requests, and does not wait for a flush.
    pub(crate) fn withdraw(&mut self, id: ConnectionId) {
        let Self { table, providers, owners, stats, now, .. } = self;
        let Some(slot) = table.get_mut(id) else { return };
        let qp = slot.link.qp;
        slot.destroy(providers, owners, stats, *now);
        // `vacate` needs the id of the destroyed queue pair, to notify the shared queue that the
        // remaining completions of this queue pair have no connection.
        slot.link.qp = qp;
        self.pass(id, |conn, env| conn.finish(env));
        self.forget(id);
    }

    /// Releases everything that a connection uses, and removes it from the table.
    pub(crate) fn release(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.remove(id) else { return };
        // The program may keep messages of this connection. From now on, the memory of these
        // messages is not charged to the peer's host any more.
        let (host, fetched_large) = (Host::of(slot.conn.peer().ip()), slot.link.fetched_large);
        self.freed.push_back(Freed::Connection { id, host, fetched_large });
        self.vacate(slot);
    }

    /// Releases everything that a connection has used on its device.
    pub(crate) fn vacate(&mut self, mut slot: ConnectionSlot) {
        if let Some((timer, _)) = slot.link.timer.take() {
            self.timers.cancel(timer);
        }
        self.stats.memory.held_receives -= slot.conn.receives.kept() as usize;
        let Some(binding) = slot.link.binding else { return };
        if let Some(device) = self.devices.get_mut(binding.device) {
            if let Some(slab) = slot.link.apart.flatten() {
                self.stats.memory.unreleased +=
                    device.remove_mapped_slab(self.providers.numbered(slot.link.cm.provider), slab);
            }
            let kept = slot.conn.receives.kept();
            let mark = device.cqs[binding.room.cq].mark();
            match (slot.conn.receives.claim(), &mut device.buffers.shared) {
                (Some(claim), Some(shared)) => {
                    if let Some(qp) = slot.link.qp {
                        // From now on, completions of this queue pair that are polled belong to no
                        // connection.
                        shared.disown(qp);
                    }
                    for wc in slot.allowance.backlog.drain(..) {
                        // This completion was polled, but was not passed to the connection. So the
                        // buffer of its receive is returned to the shared queue here.
                        if let WorkRequestId::SharedRecv { slot } = WorkRequestId::of(wc.wr_id) {
                            if let Some(buffer) = shared.take(slot) {
                                shared.give(buffer);
                            }
                        }
                    }
                    shared.leave(claim, kept, slot.link.lost.is_none().then_some((binding.room.cq, mark)));
                    device.release(binding.room, 0, slot.link.lost);
                }
                _ => {
                    slot.conn.receives.empty(&mut device.buffers.pool);
                    device.release(binding.room, kept as usize, slot.link.lost);
                }
            }
        }
        self.drop_if_abandoned(binding.device);
        self.expect_trim();
    }

    /// Marks a device as failed, so that it is not used any more, and ends its connections.
    pub(crate) fn fail_device(&mut self, index: usize, error: &rdma_transport::TransportError) {
        let Some(device) = self.devices.get_mut(index).filter(|device| !device.removed) else { return };
        local_log!(Error, "{}: {error}: its connections end", device.name);
        device.removed = true;
        self.devices.note_failed(index);
        self.end_connections_of(index);
        self.drop_if_abandoned(index);
    }

    /// Ends the connections of a device that is being removed or has failed.
    pub(crate) fn end_connections_of(&mut self, index: usize) {
        for id in self.table.ids() {
            if self.table.get(id).and_then(|slot| slot.link.binding).is_some_and(|binding| binding.device == index) {
                self.pass(id, |conn, env| conn.device_removed(env));
            }
        }
        self.note(Stages::ENDS);
    }

    /// Ends the connections that use the shared receive queue of a device, because that queue has
    /// failed. When nothing uses the queue any more, the next connection with shared receives gets
    /// a new queue.
    pub(crate) fn shared_queue_failed(&mut self, device: usize, srq: SrqId) {
        if !self.devices.buffers(device).shared.as_mut().is_some_and(|shared| shared.fail(srq)) {
            return;
        }
        for id in self.table.ids() {
            let on_it = self.table.get(id).is_some_and(|slot| {
                slot.conn.receives.is_shared() && slot.link.binding.is_some_and(|binding| binding.device == device)
            });
            if on_it {
                let reason = DisconnectReason::Internal("the shared receive queue failed".into());
                self.pass(id, |conn, env| conn.end(Ending::decided(reason), env));
            }
        }
        self.note(Stages::ENDS);
    }

    /// Marks devices as removed if their provider does not have them any more.
    pub(crate) fn drop_removed_devices(&mut self) {
        for index in 0..self.devices.len() {
            let Some(device) = self.devices.get_mut(index).filter(|device| !device.removed) else { continue };
            if self.providers.get_of_device(index).device(device.id).is_none() {
                device.removed = true;
                self.drop_if_abandoned(index);
            }
        }
    }

    pub(crate) fn drop_if_abandoned(&mut self, index: usize) {
        let Some(device) = self.devices.get(index).filter(|device| device.is_abandoned()) else { return };
        local_log!(Info, "{}: nothing is left on it", device.name);
        self.drop_regions_of_device(index);
        self.close_device(index);
    }

    pub(crate) fn close_device(&mut self, index: usize) {
        let Some(mut device) = self.devices.take(index) else { return };
        let kept = device.close(self.providers.of_device(index));
        self.stats.connections.undestroyed += kept.queues;
        self.stats.memory.unreleased += kept.registrations;
    }
}
