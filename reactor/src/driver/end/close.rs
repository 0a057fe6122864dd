//! The end of connections: deadlines, the flush of the queues, and stage 10, which releases connections that have ended.

use std::time::{Duration, Instant};

use rdma_transport::caps::Features;
use rdma_transport::cm::DisconnectCause;
use rdma_transport::slab::Key;

use crate::conn::effects::Event;
use crate::conn::keepalive::LOOK_AGAIN;
use crate::conn::life::Silence;
use crate::conn::state::{Ending, State};
use crate::device::cq::CompletionQueue;
use crate::driver::owners::Owners;
use crate::driver::stages::Stages;
use crate::driver::table::{ConnectionSlot, Flush, Suspicion};
use crate::driver::{Driver, TimerPurpose};
use crate::error::DisconnectReason;
use crate::id::{ConnectionId, WorkRequestId};
use crate::providers::Providers;
use crate::seam::timer::Expired;
use crate::stats::Stats;

impl ConnectionSlot {
    /// Destroys the queue pair of a connection. After that, the device does not access the posted buffers any more, so they return to the
    /// pool. If the device cannot destroy the queue pair, the buffers and other resources of the connection are lost, because the device
    /// may still access them.
    pub(in crate::driver) fn destroy(
        &mut self,
        providers: &mut Providers,
        owners: &mut Owners,
        stats: &mut Stats,
        now: Instant,
    ) {
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

/// The largest number of connections that are released in one turn.
const ENDS_PER_TURN: usize = 256;

impl Driver {
    /// Closes a connection, as requested by the program. Sends that were accepted before are still sent.
    pub(crate) fn close(&mut self, id: ConnectionId) {
        self.forget_addresses(id);
        self.input(id, |conn, env| conn.close(env));
    }

    /// Closes a connection, as requested by the program, without sending the messages that are still queued.
    pub(crate) fn abort(&mut self, id: ConnectionId) {
        self.forget_addresses(id);
        self.input(id, |conn, env| conn.abort(env));
    }

    /// Makes the current attempt of a connection the last one. Otherwise, if this attempt has failed already, stage 10 would start the next
    /// attempt of a connection that the program has closed.
    fn forget_addresses(&mut self, id: ConnectionId) {
        if let Some(slot) = self.table.get_mut(id) {
            slot.link.fallback = None;
        }
    }

    /// Limits the time until the program closes a connection, as requested by the program: after the close timeout, the connection is
    /// aborted. If the time is limited already, it starts again.
    pub(crate) fn limit_close(&mut self, id: ConnectionId) {
        self.close_by(id, self.now + self.config.timeouts.close);
        self.ring();
    }

    fn close_by(&mut self, id: ConnectionId, at: Instant) {
        let Some(slot) = self.table.get_mut(id).filter(|slot| slot.conn.state().is_open()) else { return };
        if let Some(timer) = slot.link.close.take() {
            self.timers.cancel(timer);
        }
        slot.link.close = Some(self.timers.insert(at, TimerPurpose::Close(id)));
    }

    /// Ends a connection because one of its callbacks has panicked.
    pub(crate) fn panicked(&mut self, id: ConnectionId, why: String) {
        self.forget_addresses(id);
        self.input(id, |conn, env| conn.panicked(why, env));
        self.note(Stages::ENDS);
    }

    /// Marks a device as failed, so that it is not used any more, and ends its connections.
    pub(in crate::driver) fn fail_device(&mut self, index: usize, error: &rdma_transport::TransportError) {
        let Some(device) = self.devices.get_mut(index).filter(|device| !device.removed) else { return };
        local_log!(Error, "{}: {error}: its connections end", device.name);
        device.removed = true;
        self.devices.note_failed(index);
        self.end_connections_of(index);
        self.drop_if_abandoned(index);
    }

    /// Stage 10: returns the next device that [`Driver::fail_device`] has marked. The caller must end the endpoints on this device.
    pub(crate) fn next_failed_device(&mut self) -> Option<usize> {
        self.devices.next_failed()
    }

    /// Ends the connections of a device that is being removed or has failed.
    pub(crate) fn end_connections_of(&mut self, index: usize) {
        for id in self.table.ids() {
            if self.table.get(id).and_then(|slot| slot.link.place).is_some_and(|place| place.device == index) {
                self.input(id, |conn, env| conn.device_removed(env));
            }
        }
        self.note(Stages::ENDS);
    }

    // Timeouts.

    /// Handles the expired timer of a connection: the timeout of the connection's state, or the timeout of the flush of its queues.
    fn connection_due(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get_mut(id) else { return };
        let due = slot.link.timer.take().map_or(self.now, |(_, at)| at);
        if matches!(slot.conn.state(), State::Closing(_)) {
            return self.flush_due(id);
        }
        let late = self.now.saturating_duration_since(due);
        let mut suspicion = slot.link.suspect.take();
        if let Some(suspicion) = &mut suspicion {
            suspicion.since += late;
        }
        let silence = self.silence(id, suspicion.as_mut(), late);
        let suspects = self.input(id, |conn, env| conn.timeout(&silence, env));
        if let (Some(true), Some(slot)) = (suspects, self.table.get_mut(id)) {
            let new = Suspicion { since: self.now, waits: self.stats.turns.waits, mark: None };
            slot.link.suspect = suspicion.or(Some(new));
        }
    }

    /// Handles the end of the time that [`Driver::limit_close`] has set.
    fn close_due(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get_mut(id) else { return };
        slot.link.close = None;
        if !slot.conn.state().is_open() {
            return;
        }
        match slot.conn.fetches_until(self.config.timeouts.close).filter(|&until| until > self.now) {
            Some(until) => self.close_by(id, until),
            None => self.abort(id),
        }
    }

    /// Returns the facts about the silence of a peer. `caught_up` is false when the peer is first suspected to be lost. It becomes true
    /// when everything was handled that had arrived in the completion queue and in the operating system at the time of that first
    /// suspicion.
    fn silence(&mut self, id: ConnectionId, suspicion: Option<&mut Suspicion>, late: Duration) -> Silence {
        let since = suspicion.as_ref().map(|suspicion| suspicion.since);
        let unknown = Silence { heard: None, caught_up: true, since, late };
        let Self { table, devices, providers, stats, .. } = self;
        let Some(slot) = table.get(id) else { return unknown };
        let (Some(qp), Some(place)) = (slot.link.qp, slot.link.place) else { return unknown };
        let liveness = providers.get(slot.link.cm.provider).liveness();
        let heard = liveness.and_then(|liveness| liveness.last_heard(qp));
        let Some(cq) = devices.cq(place.queue()) else { return Silence { heard, ..unknown } };
        let Some(suspicion) = suspicion else { return Silence { heard, caught_up: false, since, late } };
        let unread = liveness.is_some_and(|liveness| liveness.has_unread(qp)) || !slot.allowance.backlog.is_empty();
        let looked = stats.turns.waits > suspicion.waits && !unread;
        let caught_up = looked && suspicion.mark.is_some_and(|mark| cq.has_passed(mark));
        suspicion.mark = looked.then(|| suspicion.mark.unwrap_or_else(|| cq.mark()));
        Silence { heard, caught_up, since, late }
    }

    // Flushing.

    /// Disconnects a connection, so that the device flushes its queues. The flush timeout starts.
    pub(in crate::driver) fn begin_flush(&mut self, id: ConnectionId) {
        let Self { table, devices, providers, now, .. } = self;
        table.will_end(id);
        let Some(slot) = table.get_mut(id) else { return };
        if slot.link.qp.is_some() {
            let (provider, cm) = providers.of(slot.link.cm);
            if let Err(error) = provider.disconnect(cm, *now) {
                log::debug!("{id}: disconnecting: {error}");
            }
        }
        let mark = slot.link.place.and_then(|place| devices.cq(place.queue())).map(CompletionQueue::mark);
        slot.link.flush = Flush::Waiting(mark.unwrap_or_default());
        self.set_timeout(id, self.config.timeouts.flush);
        self.watch_end(id);
    }

    /// Adds a connection to the list of ending connections, which stage 10 checks.
    pub(in crate::driver) fn watch_end(&mut self, id: ConnectionId) {
        if self.table.get_mut(id).is_some_and(|slot| !std::mem::replace(&mut slot.link.ending, true)) {
            self.table.ending.push(id);
        }
        self.note(Stages::ENDS);
        self.ring();
    }

    /// Handles the end of the flush timeout. If completions that arrived before the end of the timeout are still unhandled, the connection
    /// waits for these completions, but not for later ones.
    fn flush_due(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get_mut(id) else { return };
        // The queues of a failed or removed device are not polled any more, so no completion will arrive.
        let cq = slot.link.place.and_then(|place| {
            self.devices.get_mut(place.device).filter(|device| !device.removed)?.cqs.get_mut(place.room.cq)
        });
        let waits = match (slot.link.flush, cq) {
            (Flush::Waiting(begun), Some(cq)) => {
                slot.link.flush = Flush::Late(begun, cq.mark());
                true
            }
            (Flush::Late(_, mark), Some(cq)) => !cq.has_passed(mark),
            _ => false,
        };
        if waits || !slot.allowance.backlog.is_empty() {
            // The local side needs little time to handle the remaining completions, so the next check takes place soon.
            self.set_timeout(id, self.config.timeouts.flush.min(LOOK_AGAIN));
        } else {
            // The device has not flushed the queues within the flush timeout. Stage 10 releases the connection without waiting for more
            // completions.
            slot.link.flush = Flush::Over;
            self.note(Stages::ENDS);
        }
    }

    // Stage 10.

    /// Stage 10: returns the connections that can be released, because their ends wait for nothing any more, or because their flush timeout
    /// has expired. Performs the next steps of the other ending connections. Returns at most [`ENDS_PER_TURN`] connections; the next turn
    /// returns the remaining ones.
    pub(crate) fn take_ended(&mut self) -> Vec<ConnectionId> {
        let mut ended = Vec::new();
        let mut list = std::mem::take(&mut self.table.ending);
        list.retain(|&id| {
            if ended.len() >= ENDS_PER_TURN {
                self.note(Stages::ENDS);
                return true;
            }
            if self.table.get(id).is_some_and(|slot| slot.conn.is_drained()) {
                let abrupt = self.has(id, Features::ABRUPT_DISCONNECT);
                self.input(id, |conn, env| conn.leave(abrupt, env));
            }
            let Some(over) = self.is_over(id) else { return false };
            if over && !self.try_next_address(id) {
                ended.push(id);
            }
            !over
        });
        list.append(&mut self.table.ending);
        self.table.ending = list;
        ended
    }

    /// Returns true if the end of a connection waits for nothing any more. `None` if the connection does not exist any more.
    fn is_over(&mut self, id: ConnectionId) -> Option<bool> {
        let Self { table, devices, stages, .. } = self;
        let slot = table.get(id)?;
        let Some(closing) = slot.conn.state().closing() else { return Some(false) };
        let begun = match slot.link.flush {
            Flush::Over => return Some(true),
            Flush::Before => return Some(false),
            Flush::Waiting(begun) | Flush::Late(begun, _) => begun,
        };
        if slot.link.qp.is_none() {
            return Some(true);
        }
        if !slot.conn.is_flushed() {
            return Some(false);
        }
        // `is_flushed` does not cover receives of the shared queue. Messages of this connection may still be in the completion queue, and
        // must be handled first. The exception is a connection that the local side opened, that did not come up, and that is not secured:
        // it delivers no messages, unless it may have been up on the peer's side. On a secured connection that did not come up, one of the
        // messages may be the peer's refusal.
        let never_up =
            matches!(closing.ending, Ending::ConnectError(_)) && !closing.may_have_been_up() && !slot.conn.is_secured();
        if !slot.conn.receives().is_shared() || never_up {
            return Some(true);
        }
        let place = slot.link.place?;
        let Some(device) = devices.get_mut(place.device).filter(|device| !device.removed) else { return Some(true) };
        let Some(cq) = device.cqs.get_mut(place.room.cq) else { return Some(true) };
        if cq.has_passed(begun) && slot.allowance.backlog.is_empty() {
            return Some(true);
        }
        // Marks the completion queue as not armed, so that the next turn polls it.
        cq.armed = false;
        stages.insert(Stages::ENDS);
        Some(false)
    }

    /// Stage 10: ends a connection. Destroys its queue pair, and queues the callbacks for its remaining sends. Returns the callback that
    /// reports the end of the connection, or `None` if there is none. The caller must make the queued callbacks, then the returned
    /// callback, and then call [`Driver::release`].
    pub(crate) fn finish(&mut self, id: ConnectionId) -> Option<Event> {
        let Self { table, providers, owners, now, stats, effects, .. } = self;
        let slot = table.get_mut(id)?;
        let (sends, receives) = slot.conn.unflushed();
        if (sends, receives) != (0, 0) {
            stats.connections.unflushed += 1;
            let (peer, limit) = (slot.conn.peer(), &mut effects.log_limit);
            peer_log!(
                limit,
                *now,
                Failed,
                Warn,
                peer,
                "{id}: the device has not flushed {sends} sends and {receives} receives in time"
            );
        }
        slot.destroy(providers, owners, stats, *now);
        let last = self.input(id, |conn, env| conn.finish(env)).flatten();
        self.revoke_regions_of(id);
        last.map(|event| self.with_device(id, event))
    }

    /// Notes that the last callback of a connection begins: from now on, the program does not find
    /// the connection in lists and counts.
    pub(crate) fn begin_last_callback(&mut self, id: ConnectionId) {
        self.table.begin_last_callback(id);
    }

    /// If a failed work request ended the connection, adds the name of the device to the reason.
    fn with_device(&self, id: ConnectionId, event: Event) -> Event {
        let Event::Disconnected(reason) = &event else { return event };
        let DisconnectReason::Transport(DisconnectCause::WorkRequest(failure)) = **reason else { return event };
        let device = self.device_name(id).unwrap_or_default().into();
        Event::Disconnected(Box::new(DisconnectReason::WorkRequest { device, failure }))
    }

    /// Removes a connection of which the program was not notified, except by `on_identity`. Its connection-manager id is not destroyed.
    pub(in crate::driver) fn forget(&mut self, id: ConnectionId) {
        // In `on_identity`, the program may have registered regions for this peer.
        self.revoke_regions_of(id);
        if let Some(slot) = self.table.get(id) {
            self.owners.disown(slot.link.cm);
            self.release(id);
        }
    }

    /// Ends an accepted connection that is not up, so that a new connection gets its slot and buffers.
    pub(in crate::driver) fn evict(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get(id) else { return };
        log::debug!("{id}: {} is evicted for a new connection", slot.conn.peer());
        self.stats.connections.refused += 1;
        self.stats.connections.evicted += 1;
        self.withdraw(id);
    }

    /// Removes an accepted connection that is not up. Destroys the queue pair immediately, with all posted work requests, and does not wait
    /// for a flush.
    pub(in crate::driver) fn withdraw(&mut self, id: ConnectionId) {
        let Self { table, providers, owners, stats, now, .. } = self;
        let Some(slot) = table.get_mut(id) else { return };
        let qp = slot.link.qp;
        slot.destroy(providers, owners, stats, *now);
        // `vacate` needs the id of the destroyed queue pair, to notify the shared queue that the remaining completions of this queue pair
        // have no connection.
        slot.link.qp = qp;
        self.input(id, |conn, env| conn.finish(env));
        self.forget(id);
    }

    /// Releases everything that a connection uses, and frees its slot.
    pub(crate) fn release(&mut self, id: ConnectionId) {
        self.leave_lines(id);
        let Some(slot) = self.table.remove(id) else { return };
        // The program may keep messages of this connection. From now on, the memory of these messages is not charged to the peer's host any
        // more.
        self.relieve(&slot);
        if let Some(membership) = &self.membership {
            membership.lost();
        }
        self.vacate(slot);
    }

    /// Releases everything that a connection has used on its device.
    pub(in crate::driver) fn vacate(&mut self, mut slot: ConnectionSlot) {
        let timeout = slot.link.timer.take().map(|(timer, _)| timer);
        for timer in [timeout, slot.link.lists.take(), slot.link.close.take()].into_iter().flatten() {
            self.timers.cancel(timer);
        }
        self.stats.memory.held_receives -= slot.conn.receives().kept() as usize;
        let Some(place) = slot.link.place else { return };
        if let Some(device) = self.devices.get_mut(place.device) {
            if let Some(slab) = slot.link.apart.flatten() {
                self.stats.memory.unreleased +=
                    device.remove_mapped_slab(self.providers.numbered(slot.link.cm.provider), slab);
            }
            let kept = slot.conn.receives().kept();
            let mark = device.cqs[place.room.cq].mark();
            match (slot.conn.receives_mut().claim(), &mut device.buffers.shared) {
                (Some(claim), Some(shared)) => {
                    if let Some(qp) = slot.link.qp {
                        // From now on, completions of this queue pair that are polled belong to no connection.
                        shared.disown(qp);
                    }
                    for wc in slot.allowance.backlog.drain(..) {
                        // This completion was polled, but was not passed to the connection. So the buffer of its receive is returned to the
                        // shared queue here.
                        if let WorkRequestId::SharedRecv { place } = WorkRequestId::of(wc.wr_id) {
                            if let Some(buffer) = shared.take(place) {
                                shared.give(buffer);
                            }
                        }
                    }
                    shared.leave(claim, kept, slot.link.lost.is_none().then_some((place.room.cq, mark)));
                    device.release(place.room, 0, slot.link.lost);
                }
                _ => {
                    slot.conn.receives_mut().empty(&mut device.buffers.pool);
                    device.release(place.room, kept as usize, slot.link.lost);
                }
            }
        }
        self.drop_if_abandoned(place.device);
        self.expect_trim();
    }

    /// Drops all connections, listeners and devices immediately, without callbacks.
    pub(crate) fn teardown(&mut self) {
        self.close_listeners();
        for id in self.table.ids() {
            let Some(slot) = self.table.get(id) else { continue };
            let (cm, up) = (slot.link.cm, slot.link.qp.is_some());
            if up {
                let (provider, cm) = self.providers.of(cm);
                if let Err(error) = provider.disconnect(cm, self.now) {
                    log::debug!("{id}: disconnecting: {error}");
                }
            }
            // If the connection-manager id has no owner, `finish` was called before, and the callback that reported the end has panicked.
            if self.owners.owner(cm).is_some() {
                self.finish(id);
            }
            self.release(id);
        }
        while self.effects.next_event().is_some() {}
        for index in 0..self.devices.len() {
            self.drop_regions_of_device(index);
        }
        for index in 0..self.devices.len() {
            self.close_device(index);
        }
    }

    // Devices.

    /// Marks devices as removed if their provider does not have them any more.
    pub(in crate::driver) fn drop_removed_devices(&mut self) {
        for index in 0..self.devices.len() {
            let Some(device) = self.devices.get_mut(index).filter(|device| !device.removed) else { continue };
            if self.providers.get_of_device(index).device(device.id).is_none() {
                device.removed = true;
                self.drop_if_abandoned(index);
            }
        }
    }

    pub(in crate::driver) fn drop_if_abandoned(&mut self, index: usize) {
        let Some(device) = self.devices.get(index).filter(|device| device.is_abandoned()) else { return };
        local_log!(Info, "{}: nothing is left on it", device.name);
        self.drop_regions_of_device(index);
        self.close_device(index);
    }

    fn close_device(&mut self, index: usize) {
        let Some(mut device) = self.devices.take(index) else { return };
        let kept = device.close(self.providers.of_device(index));
        self.stats.connections.undestroyed += kept.queues;
        self.stats.memory.unreleased += kept.registrations;
    }

    /// Stage 8: handles expired timers. Returns the next expired timer that the caller must handle: a timer of the program, of an endpoint,
    /// or of a drain. `budget` is the number of timers that this turn may still handle. Returns `None` if `expired` has no such timer, or
    /// if `budget` has become 0.
    pub(crate) fn next_due(&mut self, expired: &Expired, budget: &mut usize) -> Option<(Key, TimerPurpose)> {
        while *budget > 0 {
            let (key, due) = self.timers.pop_due(expired)?;
            *budget -= 1;
            match due {
                TimerPurpose::Connection(id) => self.connection_due(id),
                TimerPurpose::Nudge(id, earlier) => {
                    self.input(id, |conn, env| conn.nudge(earlier, env));
                }
                TimerPurpose::Lists(id) => self.lists_due(id),
                TimerPurpose::Close(id) => self.close_due(id),
                TimerPurpose::Region(key) => self.end_rights(key),
                TimerPurpose::Listen(_) if crate::planted("a-listener-without-its-device-is-forgotten") => {}
                TimerPurpose::Listen(key) => self.listen_again(key),
                TimerPurpose::Trim => self.trim_pools(),
                TimerPurpose::Shortage => self.relieve_shortage(),
                TimerPurpose::Program(_) | TimerPurpose::Endpoint(_) | TimerPurpose::Drain => return Some((key, due)),
            }
        }
        None
    }
}
