//! [`Ends`]: the connections that are ending, from the flush of their queues until they are over.

use std::time::{Duration, Instant};

use crate::conn::keepalive::LOOK_AGAIN;
use crate::conn::life::Silence;
use crate::conn::state::Ending;
use crate::device::cq::CompletionQueue;
use crate::driver::World;
use crate::driver::stages::Stages;
use crate::driver::table::{Flush, Suspicion};
use crate::id::ConnectionId;

/// The connections that are ending.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// The connections that stage 10 checks.
    pub(super) list: Vec<ConnectionId>, // bound: connections
}

impl Ends {
    /// Disconnects a connection, so that the device flushes its queues. The flush timeout starts.
    pub(crate) fn begin_flush(&mut self, world: &mut World, id: ConnectionId) {
        let World { table, devices, providers, now, .. } = world;
        table.will_end(id);
        let Some(slot) = table.get_mut(id) else { return };
        if slot.link.qp.is_some() {
            let (provider, cm) = providers.of(slot.link.cm);
            if let Err(error) = provider.disconnect(cm, *now) {
                log::debug!("{id}: disconnecting: {error}");
            }
        }
        let mark = slot.link.binding.and_then(|binding| devices.cq(binding.queue())).map(CompletionQueue::mark);
        slot.link.flush = Flush::Waiting(mark.unwrap_or_default());
        world.set_timeout(id, world.config.timeouts.flush);
        self.watch_end(world, id);
    }

    /// Adds a connection to the list of ending connections, which stage 10 checks.
    pub(crate) fn watch_end(&mut self, world: &mut World, id: ConnectionId) {
        if world.table.get_mut(id).is_some_and(|slot| !std::mem::replace(&mut slot.link.ending, true)) {
            self.list.push(id);
        }
        world.note(Stages::ENDS);
        world.ring();
    }

    /// Handles the end of the flush timeout. If completions that arrived before the end of the
    /// timeout are still unhandled, the connection waits for these completions, but not for later
    /// ones.
    pub(crate) fn flush_due(world: &mut World, id: ConnectionId) {
        let Some(slot) = world.table.get_mut(id) else { return };
        // The queues of a failed or removed device are not polled any more, so no completion will
        // arrive.
        let cq = slot.link.binding.and_then(|binding| {
            world.devices.get_mut(binding.device).filter(|device| !device.removed)?.cqs.get_mut(binding.room.cq)
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
            // The local side needs little time to handle the remaining completions, so the next
            // check takes place soon.
            world.set_timeout(id, world.config.timeouts.flush.min(LOOK_AGAIN));
        } else {
            // The device has not flushed the queues within the flush timeout. Stage 10 releases the
            // connection without waiting for more completions.
            slot.link.flush = Flush::Over;
            world.note(Stages::ENDS);
        }
    }

    /// Returns true if an ending connection can be released now. `None` if the connection does not
    /// exist.
    pub(crate) fn is_over(world: &mut World, id: ConnectionId) -> Option<bool> {
        let World { table, devices, stages, .. } = world;
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
        // `is_flushed` does not cover receives of the shared queue. Messages of this connection may
        // still be in the completion queue, and must be handled first. The exception is a
        // connection that the local side opened, that did not come up, and that is not secured: it
        // delivers no messages, unless it may have been up on the peer's side. On a secured
        // connection that did not come up, one of the messages may be the peer's refusal.
        let never_up =
            matches!(closing.ending, Ending::ConnectError(_)) && !closing.may_have_been_up() && !slot.conn.is_secured();
        if !slot.conn.receives.is_shared() || never_up {
            return Some(true);
        }
        let binding = slot.link.binding?;
        let Some(device) = devices.get_mut(binding.device).filter(|device| !device.removed) else { return Some(true) };
        let Some(cq) = device.cqs.get_mut(binding.room.cq) else { return Some(true) };
        if cq.has_passed(begun) && slot.allowance.backlog.is_empty() {
            return Some(true);
        }
        // Marks the completion queue as not armed, so that the next turn polls it.
        cq.armed = false;
        stages.insert(Stages::ENDS);
        Some(false)
    }

    /// Returns the facts about the silence of a peer. `caught_up` is false when the peer is first
    /// suspected to be lost. It becomes true when everything was handled that had arrived in the
    /// completion queue and in the operating system at the time of that first suspicion.
    pub(crate) fn silence(
        world: &mut World,
        id: ConnectionId,
        suspicion: Option<&mut Suspicion>,
        late: Duration,
    ) -> Silence {
        let since = suspicion.as_ref().map(|suspicion| suspicion.since);
        let unknown = Silence { heard: None, caught_up: true, since, late };
        let World { table, devices, providers, stats, .. } = world;
        let Some(slot) = table.get(id) else { return unknown };
        let (Some(qp), Some(binding)) = (slot.link.qp, slot.link.binding) else { return unknown };
        let liveness = providers.get(slot.link.cm.provider).liveness();
        let heard = liveness.and_then(|liveness| liveness.last_heard(qp));
        let Some(cq) = devices.cq(binding.queue()) else { return Silence { heard, ..unknown } };
        let Some(suspicion) = suspicion else { return Silence { heard, caught_up: false, since, late } };
        let unread = liveness.is_some_and(|liveness| liveness.has_unread(qp)) || !slot.allowance.backlog.is_empty();
        let looked = stats.turns.waits > suspicion.waits && !unread;
        let caught_up = looked && suspicion.mark.is_some_and(|mark| cq.has_passed(mark));
        suspicion.mark = looked.then(|| suspicion.mark.unwrap_or_else(|| cq.mark()));
        Silence { heard, caught_up, since, late }
    }

    /// Handles the deadline that [`Self::close_by`] has set: aborts the connection, unless the peer
    /// still fetches large messages.
    pub(crate) fn close_due(world: &mut World, id: ConnectionId) {
        let Some(slot) = world.table.get_mut(id) else { return };
        if !slot.conn.state().is_open() {
            return;
        }
        match slot.conn.fetches_until(world.config.timeouts.close).filter(|&until| until > world.now) {
            Some(until) => Self::close_by(world, id, until),
            None => {
                slot.link.fallback = None;
                world.pass(id, |conn, env| conn.abort(env));
            }
        }
    }

    /// Limits the time until the program closes an open connection: at the time `at`, the
    /// connection is aborted. Replaces an earlier limit.
    pub(crate) fn close_by(world: &mut World, id: ConnectionId, at: Instant) {
        let Some(slot) = world.table.get_mut(id).filter(|slot| slot.conn.state().is_open()) else { return };
        slot.conn.deadlines.close = Some(at);
        world.set_timer(id);
    }
}
