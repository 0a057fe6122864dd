//! The ends of connections: deadlines, the flush of their queues, and stage 10, which finishes them.

use rdma_transport::caps::Features;
use rdma_transport::cm::DisconnectCause;
use rdma_transport::slab::Key;

use super::table::{Flush, Seat, Suspect};
use super::{Driver, Due};
use crate::conn::effects::Event;
use crate::conn::life::Silence;
use crate::conn::state::{Ending, State};
use crate::device::Device;
use crate::device::cq::CompletionQueue;
use crate::error::DisconnectReason;
use crate::id::{ConnectionId, Work};

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
        self.table.note_ending();
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
        self.table.note_ending();
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
        let provider = &self.fabric.provider;
        let cq = self.devices.get(place.device).and_then(|device| device.cqs.get(place.room.cq));
        let passed = match (seat.link.suspect, cq) {
            (Some(suspect), Some(cq)) => cq.has_passed(suspect.mark) && self.stats.turns.waits > suspect.waits,
            (None, Some(_)) => false,
            (_, None) => true,
        };
        let unread = provider.has_unread(qp) || !seat.allowance.backlog.is_empty();
        Silence { heard: provider.last_heard(qp), caught_up: passed && !unread }
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
        let Self { table, devices, fabric, now, .. } = self;
        let Some(seat) = table.get_mut(id) else { return };
        if seat.link.qp.is_some()
            && let Err(error) = fabric.provider.disconnect(seat.link.cm, *now)
        {
            log::debug!("{id}: disconnecting: {error}");
        }
        let mark = seat.link.place.and_then(|place| devices.cq(place.queue())).map(CompletionQueue::mark);
        seat.link.flush = Flush::Waiting(mark.unwrap_or_default());
        self.set_timeout(id, self.config.flush_timeout);
        self.watch_end(id);
    }

    /// Puts a connection on the list of those that end.
    pub(super) fn watch_end(&mut self, id: ConnectionId) {
        if let Some(seat) = self.table.get_mut(id)
            && !std::mem::replace(&mut seat.link.ending, true)
        {
            self.table.ending.push(id);
        }
        self.table.note_ending();
        self.ring();
    }

    /// The time to flush is over. What was flushed, or came before, may be among what is still to be looked at: that is waited
    /// for, and not what comes later.
    fn flush_due(&mut self, id: ConnectionId) {
        let behind = self.has_unseen() || self.fair.is_behind() || self.queues.provider_pending;
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
            self.set_timeout(id, self.config.flush_timeout);
        } else {
            // The device does not flush: stage 10 finishes the connection without.
            seat.link.flush = Flush::Over;
            self.table.note_ending();
        }
    }

    // Stage 10.

    /// Whether some stage has work of connections left.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        self.table.ending_moved || self.awaits_turn() || self.has_unseen() || self.fair.is_behind()
    }

    /// Whether some connection that ends may have come to its end.
    #[inline]
    pub(crate) const fn has_ends(&self) -> bool {
        self.table.ending_moved
    }

    /// A connection that ends has moved on.
    #[inline]
    pub(crate) const fn note_ending(&mut self) {
        self.table.note_ending();
    }

    /// Takes the connections that have nothing outstanding any more, or whose time is up: they are to be finished.
    pub(crate) fn take_ended(&mut self) -> Vec<ConnectionId> {
        let mut ended = Vec::new();
        if !std::mem::take(&mut self.table.ending_moved) {
            return ended;
        }
        let mut list = std::mem::take(&mut self.table.ending);
        list.retain(|&id| {
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
        let Self { table, devices, .. } = self;
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
        table.note_ending();
        Some(false)
    }

    /// The end of a connection: its queue pair goes, and its last callbacks are made. [`Driver::release`] follows the last.
    pub(crate) fn finish(&mut self, id: ConnectionId) -> Option<Event> {
        let Self { table, fabric, now, stats, .. } = self;
        let seat = table.get_mut(id)?;
        let (sends, receives) = seat.conn.unflushed();
        if (sends, receives) != (0, 0) {
            stats.connections.unflushed += 1;
            log::warn!("{id}: the device has not flushed {sends} sends and {receives} receives in time");
        }
        // From here on nothing touches the buffers: those that are still posted are free.
        fabric.provider.destroy_id(seat.link.cm, *now);
        seat.link.qp = None;
        fabric.disown(seat.link.cm);
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
            self.fabric.disown(seat.link.cm);
            self.release(id);
        }
    }

    /// Gives back all that a connection holds, and frees its slot.
    pub(crate) fn release(&mut self, id: ConnectionId) {
        self.large.leave(id);
        let Some(seat) = self.table.remove(id) else { return };
        if let Some(membership) = &self.membership {
            membership.lost();
        }
        self.vacate(seat);
    }

    /// Gives back all that a connection held on its device.
    pub(super) fn vacate(&mut self, mut seat: Seat) {
        if let Some((timer, _)) = seat.link.timer.take() {
            self.timers.cancel(timer);
        }
        let Some(place) = seat.link.place else { return };
        if let Some(device) = self.devices.get_mut(place.device) {
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
                        if let Work::SharedRecv { place } = Work::of(wc.wr_id)
                            && let Some(buffer) = shared.take(place)
                        {
                            shared.give(buffer);
                        }
                    }
                    shared.leave(claim, kept, place.room.cq, mark);
                    device.release(place.room, 0);
                }
                _ => {
                    seat.conn.receives_mut().empty(&mut device.buffers.pool);
                    device.release(place.room, kept as usize);
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
            if up && let Err(error) = self.fabric.provider.disconnect(cm, self.now) {
                log::debug!("{id}: disconnecting: {error}");
            }
            // A connection without an owner of its id is finished: its last callback has panicked.
            if self.fabric.owner(cm).is_some() {
                self.finish(id);
            }
            self.release(id);
        }
        self.effects.events.clear();
        for index in 0..self.devices.len() {
            self.drop_regions_of_device(index);
        }
        for device in self.devices.iter_mut() {
            device.close(&mut *self.fabric.provider);
        }
    }

    // Devices.

    /// Gives up the devices that are going away, or have gone.
    pub(super) fn drop_removed_devices(&mut self) {
        for index in 0..self.devices.len() {
            if let Some(device) = self.devices.get_mut(index).filter(|device| !device.removed)
                && self.fabric.provider.device(device.id).is_none()
            {
                device.removed = true;
                self.drop_if_abandoned(index);
            }
        }
    }

    pub(super) fn drop_if_abandoned(&mut self, index: usize) {
        if !self.devices.get(index).is_some_and(Device::is_abandoned) {
            return;
        }
        self.drop_regions_of_device(index);
        if let Some(mut device) = self.devices.take(index) {
            log::info!("{}: nothing is left on it", device.name);
            device.close(&mut *self.fabric.provider);
        }
    }

    /// Stage 8: the next timer that is due and is a guest's or the program's; others are done with here. `None`: none is due,
    /// or `budget` is used up.
    #[inline]
    pub(crate) fn next_due(&mut self, budget: &mut usize) -> Option<(Key, Due)> {
        if self.timers.is_empty() { None } else { self.pop_due(budget) }
    }

    fn pop_due(&mut self, budget: &mut usize) -> Option<(Key, Due)> {
        while *budget > 0 {
            let (key, due) = self.timers.pop_due(self.now)?;
            *budget -= 1;
            match due {
                Due::Connection(id) => self.connection_due(id),
                Due::Region(key) => self.revoke_region(key),
                Due::Listen(key) => self.listen_again(key),
                Due::Trim => self.trim_pools(),
                Due::Program(_) | Due::Guest(_) | Due::Drain => return Some((key, due)),
            }
        }
        None
    }
}
