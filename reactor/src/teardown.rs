//! Stages 8 and 10: what time brings to a connection, and its end.

use rdma_transport::wc::WcStatus;

use crate::connection::{Ending, Phase};
use crate::context::Context;
use crate::core::{Core, TimerKind};
use crate::device::Device;
use crate::error::{ConnectError, DisconnectReason, Outcome};
use crate::handler::Handler;
use crate::id::{ConnectionId, TimerId, WorkId, WorkKind};

/// Timers fired in one turn before the other stages get theirs.
const TIMERS_PER_TURN: usize = 1024;

impl Core {
    /// Stage 8; `true` when it stopped with due timers left. `behind`: this side was not listening for a while, or
    /// still has messages to look at, so that silence proves nothing.
    pub(crate) fn run_timers<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        behind: bool,
        progressed: &mut bool,
    ) -> bool {
        for _ in 0..TIMERS_PER_TURN {
            let Some((key, kind)) = self.timers.pop_due(self.now) else { return false };
            *progressed = true;
            match kind {
                TimerKind::User(token) => handler.on_timer(&mut Context { core: self }, TimerId(key), token),
                TimerKind::Phase(id) => self.phase_expired(id, behind),
                TimerKind::Keepalive(id) => self.keepalive(id, behind),
                TimerKind::Region(key) => self.revoke_region(key),
                TimerKind::Listen(id) => self.listen_again(id),
                TimerKind::Drain => self.drain_overdue(),
                TimerKind::Trim => self.trim_pools(),
                TimerKind::Endpoint(id) => self.endpoint_expired(id),
                TimerKind::Lookup(key) => self.end_lookup(handler, key, Err(ConnectError::Timeout)),
            }
        }
        true
    }

    /// Pools have let go of buffers: looks later whether they needed them.
    pub(crate) fn expect_trim(&mut self) {
        let excessive = |device: &Device| device.pool.is_excessive();
        if !self.trimming && self.devices.iter().flatten().any(excessive) {
            self.trimming = true;
            self.timers.insert(self.now + self.config.pool_idle, TimerKind::Trim);
        }
    }

    fn trim_pools(&mut self) {
        self.trimming = false;
        for device in self.devices.iter_mut().flatten() {
            device.trim(&mut *self.provider);
        }
        self.expect_trim();
    }

    fn phase_expired(&mut self, id: ConnectionId, behind: bool) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        c.phase_timer = None;
        match c.phase {
            Phase::Resolving | Phase::Connecting => self.end(id, Ending::ConnectError(ConnectError::Timeout)),
            Phase::Accepting | Phase::Greeting => {
                log::info!("{} was not up within the handshake timeout", c.peer);
                self.end(id, Ending::Silent(None));
            }
            Phase::Draining => self.start_flush(id),
            Phase::Flushing => {
                let queue = self.devices[c.device].as_ref().and_then(|device| device.cqs.get(c.cq));
                // What was flushed, or came before, may be among what is still to be looked at: that is waited for, and
                // not for what comes later.
                let unseen = match (queue, c.overdue) {
                    (Some(queue), None) if behind => {
                        c.overdue = Some(queue.mark());
                        true
                    }
                    (Some(queue), Some(mark)) => !queue.has_passed(mark),
                    _ => false,
                };
                if unseen || !c.fair.backlog.is_empty() {
                    self.set_phase_timer(id, self.config.flush_timeout);
                } else {
                    // The device does not flush: stage 10 finishes it without.
                    self.endings_moved = true;
                }
            }
            Phase::Open => {}
        }
    }

    fn keepalive(&mut self, id: ConnectionId, behind: bool) {
        let (interval, timeout) = (self.config.keepalive_interval, self.config.keepalive_timeout);
        let now = self.now;
        let Some(c) = self.connections.get_mut(id.0) else { return };
        c.keepalive_timer = None;
        if c.phase != Phase::Open {
            return;
        }
        // Part of a large message is no silence.
        if let Some(heard) = c.qp.and_then(|qp| self.provider.last_heard(qp)).filter(|&heard| heard > c.last_heard) {
            (c.last_heard, c.pinged) = (heard, false);
        }
        // Its own queue pair may have something that was not read yet.
        let behind = behind || c.qp.is_some_and(|qp| self.provider.has_unread(qp));
        let silence = now.saturating_duration_since(c.last_heard);
        // What waits in its own backlog was heard, and not noted yet.
        let next = if behind || !c.fair.backlog.is_empty() {
            now + interval / 2
        } else if silence >= timeout && c.pinged {
            self.stats.keepalive_timeouts += 1;
            self.end(id, Ending::Disconnect(DisconnectReason::KeepaliveTimeout));
            return;
        } else if silence >= interval {
            // Asked once per silence, and again when the first could not be sent.
            c.owes.ping |= !c.pinged;
            c.pinged = true;
            let next = (c.last_heard + timeout).max(now + interval / 4).min(now + interval);
            self.mark_dirty(id);
            next
        } else {
            if std::mem::take(&mut c.unheard) {
                c.owes.ping = true;
                self.mark_dirty(id);
            }
            self.connections.get(id.0).map_or(now, |c| c.last_heard) + interval
        };
        let timer = self.timers.insert(next, TimerKind::Keepalive(id));
        if let Some(c) = self.connections.get_mut(id.0) {
            c.keepalive_timer = Some(timer);
        }
    }

    /// Stage 10: finishes the connections that have nothing outstanding, or whose time is up.
    pub(crate) fn finish_endings<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, progressed: &mut bool) {
        if !std::mem::take(&mut self.endings_moved) {
            return;
        }
        for id in std::mem::take(&mut self.ending) {
            let Some(c) = self.connections.get(id.0) else { continue };
            if c.phase == Phase::Draining && c.sends.is_empty() && !c.transfers.offers() {
                self.start_flush(id);
            }
            let Some(c) = self.connections.get(id.0) else { continue };
            let flushed = c.qp.is_none() || (c.outstanding() == 0 && !c.provisional);
            let (flushing, overdue) = (c.phase == Phase::Flushing, c.phase_timer.is_none());
            let done = flushing && (overdue || (flushed && self.is_flushed_from_shared(id)));
            if done {
                *progressed = true;
                self.finish(handler, id);
            } else {
                self.ending.push(id);
            }
        }
    }

    /// The end of a connection: its last callbacks, then nothing is left of it.
    fn finish<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: ConnectionId) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if c.outstanding() > 0 {
            log::warn!("{id}: the device did not flush {} work requests in time", c.outstanding());
        }
        // From here on nothing touches the buffers: those still posted are free.
        let cm = c.cm;
        self.provider.destroy_id(cm, self.now);
        c.qp = None;
        c.chain.clear();
        self.disown(cm);
        while self.connections.get(id.0).is_some_and(|c| !c.sends.is_empty()) {
            self.end_send(handler, id, Outcome::Failed(WcStatus::Flushed));
        }
        self.fail_transfers(handler, id);
        self.revoke_regions_of(id);
        match self.connections.get_mut(id.0).and_then(|c| c.ending.take()) {
            Some(Ending::Disconnect(reason)) => {
                self.stats.disconnected += 1;
                handler.on_disconnect(&mut Context { core: self }, id, reason);
            }
            Some(Ending::ConnectError(error)) => {
                self.stats.connect_errors += 1;
                handler.on_connect_error(&mut Context { core: self }, id, error);
            }
            Some(Ending::Silent(_)) | None => self.stats.refused += 1,
        }
        self.release(id);
    }

    /// Drops a connection of which nobody has heard and whose connection-manager id lives on.
    pub(crate) fn forget(&mut self, id: ConnectionId) {
        if let Some(c) = self.connections.get(id.0) {
            self.disown(c.cm);
            self.release(id);
        }
    }

    /// Drops everything at once, without callbacks.
    pub(crate) fn teardown(&mut self) {
        for key in self.listeners.keys() {
            self.close_listener(crate::id::ListenerId(key));
        }
        self.teardown_endpoints();
        for key in self.connections.keys() {
            let id = ConnectionId(key);
            if let Some(c) = self.connections.get_mut(key) {
                if c.qp.is_some()
                    && let Err(error) = self.provider.disconnect(c.cm, self.now)
                {
                    log::debug!("{id}: disconnecting: {error}");
                }
                self.provider.destroy_id(c.cm, self.now);
                c.chain.clear();
                while let Some(send) = c.pop_send() {
                    if let (Some(buffer), Some(device)) = (send.buffer, self.devices[c.device].as_mut()) {
                        device.pool.give(buffer.done());
                    }
                }
                while self.release_holds(id) {}
                self.revoke_regions_of(id);
            }
            self.release(id);
        }
    }

    /// Gives back all that a connection holds and frees its slot.
    fn release(&mut self, id: ConnectionId) {
        self.drop_transfers(id);
        let Some(mut c) = self.connections.remove(id.0) else { return };
        if let Some(membership) = &self.membership {
            membership.lost();
        }
        for timer in [c.phase_timer.take(), c.keepalive_timer.take()].into_iter().flatten() {
            self.timers.cancel(timer);
        }
        let Some(device) = self.devices.get_mut(c.device).and_then(Option::as_mut) else { return };
        if let (Some(share), Some(shared)) = (&c.share, &mut device.shared) {
            for wc in c.fair.backlog.drain(..) {
                // Polled, and never handled.
                if let Some(WorkId { kind: WorkKind::Recv, sequence, .. }) = WorkId::unpack(wc.wr_id)
                    && let Some(buffer) = shared.take(sequence)
                {
                    shared.give(buffer);
                }
            }
            shared.leave(share, c.detached as u32, c.cq, device.cqs[c.cq].mark());
        }
        for posted in c.receives.drain(..) {
            device.pool.give(posted.done());
        }
        for buffer in c.reposts.drain(..) {
            device.pool.give(buffer);
        }
        if c.equipped {
            device.release(c.cq, &self.config, c.detached, c.share.is_some());
        }
        self.drop_if_abandoned(c.device);
        self.expect_trim();
    }

    /// Gives up the devices that are going away, or have gone.
    pub(crate) fn drop_removed_devices(&mut self) {
        for index in 0..self.devices.len() {
            if let Some(device) = self.devices[index].as_mut().filter(|device| !device.removed)
                && self.provider.device(device.id).is_none()
            {
                device.removed = true;
                self.drop_if_abandoned(index);
            }
        }
    }

    pub(crate) fn drop_if_abandoned(&mut self, index: usize) {
        if !self.devices[index].as_ref().is_some_and(Device::is_abandoned) {
            return;
        }
        self.drop_regions_of_device(index);
        if let Some(mut device) = self.devices[index].take() {
            log::info!("device {}: removed, nothing is left on it", device.id.0);
            device.close(&mut *self.provider);
        }
    }
}
