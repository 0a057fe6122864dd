//! How connections end, and how a reactor drains.

pub(crate) mod close;
pub(crate) mod drain;
mod release;

use std::time::{Duration, Instant};

use rdma_transport::caps::Features;
use rdma_transport::cm::DisconnectCause;
use rdma_transport::slab::Key;

use self::close::Ends;
use self::drain::Drain;
use super::open::connect::Connector;
use super::open::group::GroupMembership;
use super::stages::Stages;
use super::table::Suspicion;
use super::{Driver, TimerPurpose, World};
use crate::conn::Connection;
use crate::conn::deadlines::Due;
use crate::conn::effects::Event;
use crate::conn::state::State;
use crate::error::DisconnectReason;
use crate::id::ConnectionId;
use crate::seam::timer::{Expired, FOREVER};

/// The largest number of connections that are released in one turn.
const ENDS_PER_TURN: usize = 256;

impl Driver {
    /// Closes a connection, as requested by the program. Sends that were accepted before are still
    /// sent.
    pub(crate) fn close(&mut self, id: ConnectionId) {
        self.world.table.forget_addresses(id);
        self.input(id, |conn, env| conn.close(env));
    }

    /// Closes a connection, as requested by the program, without sending the messages that are
    /// still queued.
    pub(crate) fn abort(&mut self, id: ConnectionId) {
        self.world.table.forget_addresses(id);
        self.input(id, |conn, env| conn.abort(env));
    }

    /// Ends a connection because one of its callbacks has panicked.
    pub(crate) fn panicked(&mut self, id: ConnectionId, why: String) {
        self.world.table.forget_addresses(id);
        self.input(id, |conn, env| conn.panicked(why, env));
        self.world.note(Stages::ENDS);
    }

    /// Limits the time until the program closes a connection, as requested by the program: after
    /// the close timeout, the connection is aborted. If this timeout runs already, it starts again.
    pub(crate) fn limit_close(&mut self, id: ConnectionId) {
        let until = self.world.now + self.world.config.timeouts.close;
        Ends::close_by(&mut self.world, id, until);
        self.world.ring();
    }

    /// Closes every connection. Sends that were accepted before are still sent.
    pub(crate) fn close_all(&mut self) {
        for id in self.world.table.ids() {
            self.close(id);
        }
    }

    /// Closes every connection that is not established yet.
    pub(crate) fn close_unestablished(&mut self) {
        for id in self.world.table.ids() {
            if self.world.table.get(id).is_some_and(|slot| !slot.conn.state().is_announced()) {
                self.close(id);
            }
        }
    }

    /// Handles the expired timer of a connection.
    fn connection_due(&mut self, id: ConnectionId) {
        let Some(slot) = self.world.table.get_mut(id) else { return };
        slot.link.timer = None;
        while let Some(due) = self.input(id, Connection::due).flatten() {
            match due {
                Due::Close => Ends::close_due(&mut self.world, id),
                Due::Step(at) => self.step_due(id, at),
            }
        }
        if self.world.table.get(id).is_some_and(|slot| slot.conn.state().is_ending()) {
            // If the program has closed the connection, the close may have waited for a list that
            // has ended now, so stage 10 checks if the connection can end.
            self.world.note(Stages::ENDS);
        }
        self.world.set_timer(id);
    }

    /// Handles the deadline `step` of a connection, which was due at the time `at`: the timeout of
    /// its current step, or a check of its peer.
    fn step_due(&mut self, id: ConnectionId, at: Instant) {
        let Some(slot) = self.world.table.get_mut(id) else { return };
        if matches!(slot.conn.state(), State::Closing(_)) {
            return Ends::flush_due(&mut self.world, id);
        }
        let late = self.world.now.saturating_duration_since(at);
        let mut suspicion = slot.link.suspect.take().filter(|(of, _)| *of == at).map(|(_, suspicion)| suspicion);
        if let Some(suspicion) = &mut suspicion {
            suspicion.since += late;
        }
        let silence = Ends::silence(&mut self.world, id, suspicion.as_mut(), late);
        let suspects = self.input(id, |conn, env| conn.timeout(&silence, env));
        if let (Some(true), Some(slot)) = (suspects, self.world.table.get_mut(id)) {
            let new = Suspicion { since: self.world.now, waits: self.world.stats.turns.waits, mark: None };
            slot.link.suspect = slot.conn.deadlines.step.map(|next| (next, suspicion.unwrap_or(new)));
        }
    }

    /// Stage 10: returns the connections that can be released, because their ends wait for nothing
    /// any more, or because their flush timeout has expired. Performs the next steps of the other
    /// ending connections. Returns at most [`ENDS_PER_TURN`] connections; the next turn returns the
    /// remaining ones.
    pub(crate) fn take_ended(&mut self) -> Vec<ConnectionId> {
        let mut ended = Vec::new();
        let mut list = std::mem::take(&mut self.ends.list);
        list.retain(|&id| {
            if ended.len() >= ENDS_PER_TURN {
                self.world.note(Stages::ENDS);
                return true;
            }
            if self.world.table.get(id).is_some_and(|slot| slot.conn.is_drained()) {
                let abrupt = self.has(id, Features::ABRUPT_DISCONNECT);
                self.input(id, |conn, env| conn.leave(abrupt, env));
            }
            let Some(over) = Ends::is_over(&mut self.world, id) else { return false };
            if over && !Connector::try_next_address(&mut self.world, id) {
                ended.push(id);
            }
            !over
        });
        // The failed attempts to connect may have freed memory.
        self.settle();
        list.append(&mut self.ends.list);
        self.ends.list = list;
        ended
    }

    /// Stage 10: ends a connection. Destroys its queue pair, and queues the callbacks for its
    /// remaining sends. Returns the callback that reports the end of the connection, or `None` if
    /// there is none. The caller must make the queued callbacks, then the returned callback, and
    /// then call [`Driver::release`].
    pub(crate) fn finish(&mut self, id: ConnectionId) -> Option<Event> {
        let World { table, providers, owners, now, stats, effects, .. } = &mut self.world;
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
        self.world.revoke_regions_of(id);
        if let Some(Event::Disconnected(reason)) = &last {
            if let DisconnectReason::Transport(DisconnectCause::WorkRequest(failure)) = **reason {
                // The reason that the program receives has the name of the device.
                let device = self.world.device_name(id).unwrap_or_default().into();
                return Some(Event::Disconnected(Box::new(DisconnectReason::WorkRequest { device, failure })));
            }
        }
        last
    }

    /// Requests a drain. A second request does not change the deadline.
    pub(crate) fn want_drain(&mut self, deadline: Duration) {
        if !self.world.drain.is_on() {
            self.world.drain = Drain::Wanted(deadline);
            self.world.note(Stages::OTHERS);
            self.world.ring();
        }
    }

    /// Stage 9: begins a requested drain. Returns the time until its deadline, for `on_drain`.
    /// `None` if no drain was requested.
    #[inline]
    pub(crate) fn begin_drain(&mut self) -> Option<Duration> {
        let Drain::Wanted(deadline) = self.world.drain else { return None };
        // The callback that requested the drain may have run for a long time, so `now` may be out
        // of date.
        self.world.look_at_clock();
        local_log!(Info, "draining {} connections within {deadline:?}", self.world.table.len());
        if let Some(membership) = &self.acceptor.membership {
            membership.close();
        }
        let until = self.world.now.checked_add(deadline).unwrap_or(self.world.now + FOREVER);
        self.world.drain = Drain::Draining(self.world.timers.insert(until, TimerPurpose::Drain));
        Some(deadline)
    }

    /// Handles the deadline of the drain: aborts all connections. Returns false if no drain was in
    /// progress.
    pub(crate) fn drain_overdue(&mut self) -> bool {
        if !matches!(self.world.drain, Drain::Draining(_)) {
            return false;
        }
        self.world.drain = Drain::Overdue;
        local_log!(Info, "the time to drain is over: {} connections are cut off", self.world.table.len());
        for id in self.world.table.ids() {
            if !crate::planted("a-drain-aborts-nothing") {
                self.input(id, |conn, env| conn.abort(env));
            }
        }
        true
    }

    /// Called after stage 10. Completes the drain if no connection and no endpoint exists any more.
    /// `others` is true if an endpoint still exists.
    pub(crate) fn finish_drain(&mut self, others: bool) {
        if !matches!(self.world.drain, Drain::Draining(_) | Drain::Overdue) {
            return;
        }
        // A reactor that listens accepts connections for its whole group. Its drain ends only after
        // every reactor of the group is draining.
        let membership = self.acceptor.membership.as_ref();
        if membership.is_some_and(|membership| membership.is_open() && !self.listeners.is_empty()) {
            return;
        }
        self.listeners.close_listeners(&mut self.world);
        let expects = membership.is_some_and(GroupMembership::expects);
        if self.world.table.is_empty() && !others && !expects {
            if let Drain::Draining(timer) = std::mem::replace(&mut self.world.drain, Drain::Done) {
                self.world.timers.cancel(timer);
            }
            self.world.stop = true;
        }
    }

    /// Stage 8: handles expired timers. Returns the next expired timer that the caller must handle:
    /// a timer of the program, of an endpoint, or of a drain. `budget` is the number of timers that
    /// this turn may still handle. Returns `None` if `expired` has no such timer, or if `budget`
    /// has become 0.
    pub(crate) fn next_due(&mut self, expired: &Expired, budget: &mut usize) -> Option<(Key, TimerPurpose)> {
        while *budget > 0 {
            let (key, due) = self.world.timers.pop_due(expired)?;
            *budget -= 1;
            match due {
                TimerPurpose::Connection(id) => self.connection_due(id),
                TimerPurpose::Region(key) => _ = self.world.revoke_region(key),
                TimerPurpose::Listen(_) if crate::planted("a-listener-without-its-device-is-forgotten") => {}
                TimerPurpose::Listen(key) => self.listeners.listen_again(&mut self.world, key),
                TimerPurpose::Trim => self.world.trim_pools(),
                TimerPurpose::Shortage => self.large.relieve_shortage(&mut self.world),
                TimerPurpose::Program(_) | TimerPurpose::Endpoint(_) | TimerPurpose::Drain => return Some((key, due)),
            }
            self.act();
        }
        None
    }

    /// Drops all connections, listeners and devices immediately, without callbacks.
    pub(crate) fn teardown(&mut self) {
        self.listeners.close_listeners(&mut self.world);
        for id in self.world.table.ids() {
            let Some(slot) = self.world.table.get(id) else { continue };
            let (cm, up) = (slot.link.cm, slot.link.qp.is_some());
            if up {
                let (provider, cm) = self.world.providers.of(cm);
                if let Err(error) = provider.disconnect(cm, self.world.now) {
                    log::debug!("{id}: disconnecting: {error}");
                }
            }
            // If the connection-manager id has no owner, `finish` was called before, and the
            // callback that reported the end has panicked.
            if self.world.owners.owner(cm).is_some() {
                self.finish(id);
            }
            self.release(id);
        }
        while self.world.effects.next_event().is_some() {}
        for index in 0..self.world.devices.len() {
            self.world.drop_regions_of_device(index);
        }
        for index in 0..self.world.devices.len() {
            self.world.close_device(index);
        }
    }

    /// Releases everything that a connection uses, and removes it from the table.
    pub(crate) fn release(&mut self, id: ConnectionId) {
        self.world.release(id);
        self.settle();
    }
}
