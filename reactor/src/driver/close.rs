//! The ends of connections: deadlines, the flush of their queues, and stage 10, which finishes them.

use std::time::{Duration, Instant};

use rdma_transport::caps::Features;
use rdma_transport::cm::DisconnectCause;
use rdma_transport::slab::Key;

use super::owners::Owners;
use super::stages::Stages;
use super::table::{Flush, Seat, Suspect};
use super::{Driver, Due};
use crate::conn::effects::Event;
use crate::conn::life::Silence;
use crate::conn::state::{Ending, State};
use crate::device::cq::CompletionQueue;
use crate::error::DisconnectReason;
use crate::id::{ConnectionId, WorkRequestId};
use crate::providers::Providers;
use crate::stats::Stats;

impl Seat {
    /// Destroys the queue pair of a connection. From then on nothing touches the buffers that are still posted, so they are free.
    /// If the device keeps the queue pair, they are lost, and what the connection uses is not given back.
    pub(super) fn destroy(&mut self, providers: &mut Providers, owners: &mut Owners, stats: &mut Stats, now: Instant) {
        let (provider, cm) = providers.of(self.link.cm);
        let destroyed = provider.destroy_id(cm, now);
        owners.disown(self.link.cm);
        self.link.qp = None;
        let destroyed = if cfg!(planted = "a-kept-queue-pair-counts-as-destroyed") { Ok(()) } else { destroyed };
        if let Err(error) = destroyed {
            let lost = self.conn.forsake();
            log::error!("{}: {error}: {lost} buffers are lost to the queue pair", self.conn.id());
            stats.connections.undestroyed += 1;
            self.link.lost = Some(lost);
        }
    }
}

/// Time until the next look at what was still to be looked at when the time to flush was over.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Largest number of connections that are finished in one turn.
const ENDS_PER_TURN: usize = 256;

impl Driver {
    /// The program closes a connection.
    pub(crate) fn close(&mut self, id: ConnectionId) {
        self.input(id, |conn, env| conn.close(env));
    }

    /// The program closes a connection, and what it has sent need not arrive.
    pub(crate) fn abort(&mut self, id: ConnectionId) {
        self.input(id, |conn, env| conn.abort(env));
    }

    /// A callback for a connection has panicked.
    pub(crate) fn panicked(&mut self, id: ConnectionId, why: String) {
        self.input(id, |conn, env| conn.panicked(why, env));
        self.note(Stages::ENDS);
    }

    /// Ends what is on a device that has failed, and asks that device for nothing any more.
    pub(super) fn fail_device(&mut self, index: usize, error: &rdma_transport::Error) {
        let Some(device) = self.devices.get_mut(index).filter(|device| !device.removed) else { return };
        log::error!("{}: {error}: its connections end", device.name);
        device.removed = true;
        self.end_connections_of(index);
        self.drop_if_abandoned(index);
    }

    /// A device is going away or has failed: its connections end.
    pub(crate) fn end_connections_of(&mut self, index: usize) {
        for id in self.table.ids() {
            if self.table.get(id).and_then(|seat| seat.link.place).is_some_and(|place| place.device == index) {
                self.input(id, |conn, env| conn.device_removed(env));
            }
        }
        self.note(Stages::ENDS);
    }

    // Time.

    /// A connection's deadline has passed.
    fn connection_due(&mut self, id: ConnectionId) {
        let Some(seat) = self.table.get_mut(id) else { return };
        seat.link.timer = None;
        if matches!(seat.conn.state(), State::Closing(_)) {
            return self.flush_due(id);
        }
        let silence = self.silence(id);
        let suspects = self.input(id, |conn, env| conn.timeout(&silence, env));
        self.suspect(id, suspects == Some(true));
    }

    /// What is known of the silence of a peer. Nothing of it can be left unseen when all was looked at that there was when the
    /// peer was first suspected to be gone: in the completion queue, and in the operating system.
    fn silence(&self, id: ConnectionId) -> Silence {
        let unknown = Silence { heard: None, caught_up: true };
        let Some(seat) = self.table.get(id) else { return unknown };
        let (Some(qp), Some(place)) = (seat.link.qp, seat.link.place) else { return unknown };
        let liveness = self.providers.get(seat.link.cm.provider).liveness();
        let cq = self.devices.get(place.device).and_then(|device| device.cqs.get(place.room.cq));
        let passed = match (seat.link.suspect, cq) {
            (Some(suspect), Some(cq)) => cq.has_passed(suspect.mark) && self.stats.turns.waits > suspect.waits,
            (None, Some(_)) => false,
            (_, None) => true,
        };
        let unread = liveness.is_some_and(|liveness| liveness.has_unread(qp)) || !seat.allowance.backlog.is_empty();
        Silence { heard: liveness.and_then(|liveness| liveness.last_heard(qp)), caught_up: passed && !unread }
    }

    /// Notes that a peer seems to be gone, or that it does not.
    fn suspect(&mut self, id: ConnectionId, suspects: bool) {
        let Self { table, devices, stats, .. } = self;
        let Some(seat) = table.get_mut(id) else { return };
        let cq = seat.link.place.and_then(|place| devices.cq(place.queue()));
        seat.link.suspect = match (suspects, seat.link.suspect, cq) {
            (true, None, Some(cq)) => Some(Suspect { mark: cq.mark(), waits: stats.turns.waits }),
            (true, suspect, _) => suspect,
            (false, ..) => None,
        };
    }

    // Flushing.

    /// Has the device flush the queues of a connection.
    pub(super) fn begin_flush(&mut self, id: ConnectionId) {
        let Self { table, devices, providers, now, .. } = self;
        table.will_end(id);
        let Some(seat) = table.get_mut(id) else { return };
        if seat.link.qp.is_some() {
            let (provider, cm) = providers.of(seat.link.cm);
            if let Err(error) = provider.disconnect(cm, *now) {
                log::debug!("{id}: disconnecting: {error}");
            }
        }
        let mark = seat.link.place.and_then(|place| devices.cq(place.queue())).map(CompletionQueue::mark);
        seat.link.flush = Flush::Waiting(mark.unwrap_or_default());
        self.set_timeout(id, self.config.timeouts.flush);
        self.watch_end(id);
    }

    /// Puts a connection on the list of those that end.
    pub(super) fn watch_end(&mut self, id: ConnectionId) {
        if self.table.get_mut(id).is_some_and(|seat| !std::mem::replace(&mut seat.link.ending, true)) {
            self.table.ending.push(id);
        }
        self.note(Stages::ENDS);
        self.ring();
    }

    /// The time to flush is over. What was flushed, or came before, may be among what is still to be looked at: that is waited
    /// for, and not what comes later.
    fn flush_due(&mut self, id: ConnectionId) {
        let behind = self.has_unseen() || self.fair.is_behind() || self.is_noted(Stages::PROVIDERS);
        let Some(seat) = self.table.get_mut(id) else { return };
        // The queues of a device that has failed or is going are not looked at any more.
        let cq = seat.link.place.and_then(|place| {
            self.devices.get_mut(place.device).filter(|device| !device.removed)?.cqs.get_mut(place.room.cq)
        });
        let waits = match (seat.link.flush, cq) {
            (Flush::Waiting(begun), Some(cq)) if behind => {
                seat.link.flush = Flush::Late(begun, cq.mark());
                true
            }
            (Flush::Late(_, mark), Some(cq)) => !cq.has_passed(mark),
            _ => false,
        };
        if waits || !seat.allowance.backlog.is_empty() {
            // That depends on the local side alone.
            self.set_timeout(id, self.config.timeouts.flush.min(LOOK_AGAIN));
        } else {
            // The device does not flush: stage 10 finishes the connection without.
            seat.link.flush = Flush::Over;
            self.note(Stages::ENDS);
        }
    }

    // Stage 10.

    /// Takes the connections that have nothing outstanding any more, or whose time is up: they are to be finished. What is past
    /// [`ENDS_PER_TURN`] is left for the next turn.
    pub(crate) fn take_ended(&mut self) -> Vec<ConnectionId> {
        let mut ended = Vec::new();
        let mut list = std::mem::take(&mut self.table.ending);
        list.retain(|&id| {
            if ended.len() >= ENDS_PER_TURN {
                self.note(Stages::ENDS);
                return true;
            }
            if self.table.get(id).is_some_and(|seat| seat.conn.is_drained()) {
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

    /// Whether a connection that ends has nothing left to wait for; `None` if it is gone.
    fn is_over(&mut self, id: ConnectionId) -> Option<bool> {
        let Self { table, devices, stages, .. } = self;
        let seat = table.get(id)?;
        let Some(closing) = seat.conn.state().closing() else { return Some(false) };
        let begun = match seat.link.flush {
            Flush::Over => return Some(true),
            Flush::Before => return Some(false),
            Flush::Waiting(begun) | Flush::Late(begun, _) => begun,
        };
        if seat.link.qp.is_none() {
            return Some(true);
        }
        if !seat.conn.is_flushed() {
            return Some(false);
        }
        // Receives of the shared queue do not show in the connection: none of its messages may be left on its completion queue.
        // Those of a connection that did not come up would not be delivered; of one that was being secured, the peer's last word
        // may be among them.
        let never_up = matches!(closing.ending, Ending::ConnectError(_)) && !seat.conn.is_secured();
        if !seat.conn.receives().is_shared() || never_up {
            return Some(true);
        }
        let place = seat.link.place?;
        let Some(device) = devices.get_mut(place.device).filter(|device| !device.removed) else { return Some(true) };
        let Some(cq) = device.cqs.get_mut(place.room.cq) else { return Some(true) };
        if cq.has_passed(begun) && seat.allowance.backlog.is_empty() {
            return Some(true);
        }
        // Has the queue looked at in the next turn.
        cq.armed = false;
        stages.insert(Stages::ENDS);
        Some(false)
    }

    /// The end of a connection: its queue pair goes, and its last callbacks are made. [`Driver::release`] follows the last.
    pub(crate) fn finish(&mut self, id: ConnectionId) -> Option<Event> {
        let Self { table, providers, owners, now, stats, .. } = self;
        let seat = table.get_mut(id)?;
        let (sends, receives) = seat.conn.unflushed();
        if (sends, receives) != (0, 0) {
            stats.connections.unflushed += 1;
            log::warn!("{id}: the device has not flushed {sends} sends and {receives} receives in time");
        }
        seat.destroy(providers, owners, stats, *now);
        let last = self.input(id, |conn, env| conn.finish(env)).flatten();
        self.revoke_regions_of(id);
        last.map(|event| self.with_device(id, event))
    }

    /// Names the device in the reason of an end that came from one of its work requests.
    fn with_device(&self, id: ConnectionId, event: Event) -> Event {
        let Event::Disconnected(reason) = &event else { return event };
        let DisconnectReason::Transport(DisconnectCause::WorkRequest(failure)) = **reason else { return event };
        let device = self.device_name(id).unwrap_or_default().into();
        Event::Disconnected(Box::new(DisconnectReason::WorkRequest { device, failure }))
    }

    /// Drops a connection of which the program has not heard, and whose connection-manager id lives on.
    pub(super) fn forget(&mut self, id: ConnectionId) {
        if let Some(seat) = self.table.get(id) {
            self.owners.disown(seat.link.cm);
            self.release(id);
        }
    }

    /// Ends a connection that was accepted and is not up, at once, so that its place and its buffers are free: the queue pair
    /// goes with what is posted, and nothing is flushed.
    pub(super) fn evict(&mut self, id: ConnectionId) {
        let Self { table, providers, owners, stats, now, .. } = self;
        let Some(seat) = table.get_mut(id) else { return };
        log::debug!("{id}: {} gives way to a new connection", seat.conn.peer());
        let qp = seat.link.qp;
        seat.destroy(providers, owners, stats, *now);
        // So that a shared queue is told that what is left of it in the completion queue is nobody's.
        seat.link.qp = qp;
        self.input(id, |conn, env| conn.finish(env));
        self.stats.connections.refused += 1;
        self.stats.connections.evicted += 1;
        self.forget(id);
    }

    /// Gives back all that a connection holds, and frees its slot.
    pub(crate) fn release(&mut self, id: ConnectionId) {
        self.large.leave(id);
        let Some(seat) = self.table.remove(id) else { return };
        // What the program keeps of it counts for nobody from now on.
        self.large.relieve(&seat);
        if let Some(membership) = &self.membership {
            membership.lost();
        }
        self.vacate(seat);
    }

    /// Gives back all that a connection held on its device.
    pub(super) fn vacate(&mut self, mut seat: Seat) {
        for timer in [seat.link.timer.take().map(|(timer, _)| timer), seat.link.lists.take()].into_iter().flatten() {
            self.timers.cancel(timer);
        }
        let Some(place) = seat.link.place else { return };
        if let Some(device) = self.devices.get_mut(place.device) {
            if let Some(slab) = seat.link.apart.flatten() {
                self.stats.memory.unreleased +=
                    device.remove_mapped_slab(self.providers.numbered(seat.link.cm.provider), slab);
            }
            let kept = seat.conn.receives().kept();
            let mark = device.cqs[place.room.cq].mark();
            match (seat.conn.receives().claim(), &mut device.buffers.shared) {
                (Some(claim), Some(shared)) => {
                    if let Some(qp) = seat.link.qp {
                        // What it has left in the completion queue is nobody's.
                        shared.disown(qp);
                    }
                    for wc in seat.allowance.backlog.drain(..) {
                        // The completion was polled and never handled.
                        if let WorkRequestId::SharedRecv { place } = WorkRequestId::of(wc.wr_id) {
                            if let Some(buffer) = shared.take(place) {
                                shared.give(buffer);
                            }
                        }
                    }
                    shared.leave(claim, kept, seat.link.lost.is_none().then_some((place.room.cq, mark)));
                    device.release(place.room, 0, seat.link.lost);
                }
                _ => {
                    seat.conn.receives_mut().empty(&mut device.buffers.pool);
                    device.release(place.room, kept as usize, seat.link.lost);
                }
            }
        }
        self.drop_if_abandoned(place.device);
        self.expect_trim();
    }

    /// Drops everything at once, without callbacks.
    pub(crate) fn teardown(&mut self) {
        self.close_listeners();
        for id in self.table.ids() {
            let Some(seat) = self.table.get(id) else { continue };
            let (cm, up) = (seat.link.cm, seat.link.qp.is_some());
            if up {
                let (provider, cm) = self.providers.of(cm);
                if let Err(error) = provider.disconnect(cm, self.now) {
                    log::debug!("{id}: disconnecting: {error}");
                }
            }
            // A connection without an owner of its id is finished: its last callback has panicked.
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

    /// Gives up the devices that are going away, or have gone.
    pub(super) fn drop_removed_devices(&mut self) {
        for index in 0..self.devices.len() {
            let Some(device) = self.devices.get_mut(index).filter(|device| !device.removed) else { continue };
            if self.providers.get_of_device(index).device(device.id).is_none() {
                device.removed = true;
                self.drop_if_abandoned(index);
            }
        }
    }

    pub(super) fn drop_if_abandoned(&mut self, index: usize) {
        let Some(device) = self.devices.get(index).filter(|device| device.is_abandoned()) else { return };
        log::info!("{}: nothing is left on it", device.name);
        self.drop_regions_of_device(index);
        self.close_device(index);
    }

    fn close_device(&mut self, index: usize) {
        let Some(mut device) = self.devices.take(index) else { return };
        let kept = device.close(self.providers.of_device(index));
        self.stats.connections.undestroyed += kept.queues;
        self.stats.memory.unreleased += kept.registrations;
    }

    /// Stage 8: the next timer that is due and is a guest's or the program's; others are done with here. `None`: none is due,
    /// or `budget` is used up.
    pub(crate) fn next_due(&mut self, budget: &mut usize) -> Option<(Key, Due)> {
        while *budget > 0 {
            let (key, due) = self.timers.pop_due(self.now)?;
            *budget -= 1;
            match due {
                Due::Connection(id) => self.connection_due(id),
                Due::Lists(id) => self.lists_due(id),
                Due::Region(key) => self.end_rights(key),
                Due::Listen(key) => self.listen_again(key),
                Due::Trim => self.trim_pools(),
                Due::Shortage => self.relieve_shortage(),
                Due::Program(_) | Due::Guest(_) | Due::Drain => return Some((key, due)),
            }
        }
        None
    }
}
