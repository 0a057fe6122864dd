//! How a connection begins to end; stage 10, in `teardown`, finishes it.

use crate::connection::{Ending, Phase};
use crate::core::Core;
use crate::error::{ConnectError, DisconnectReason};
use crate::id::ConnectionId;

impl Core {
    pub(crate) fn close(&mut self, id: ConnectionId) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        c.closed_here = true;
        let (open, active) = (c.phase >= Phase::Open, c.active);
        self.discard_held(id);
        let ending = match (open, active) {
            (true, _) => Ending::Disconnect(DisconnectReason::Local),
            (false, true) => Ending::ConnectError(ConnectError::Cancelled),
            (false, false) => Ending::Silent(None),
        };
        self.end(id, ending);
    }

    /// Marks a connection as ending, for the first reason given. The rest happens at the end of the turn.
    pub(crate) fn end(&mut self, id: ConnectionId, ending: Ending) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if c.phase == Phase::Draining && !matches!(ending, Ending::Disconnect(DisconnectReason::Local)) {
            // It was leaving anyway; what was still to be sent cannot be.
            self.start_flush(id);
            return;
        }
        if c.ending.is_some() {
            return;
        }
        log::debug!("{id}: ending: {ending:?}");
        let graceful = matches!(ending, Ending::Disconnect(DisconnectReason::Local));
        // One that was never announced has no disconnect to report.
        c.ending = Some(match ending {
            Ending::Disconnect(reason @ DisconnectReason::Peer) if c.phase < Phase::Open && !c.active => {
                Ending::Silent(Some(reason))
            }
            _ if c.phase < Phase::Open && !c.active => Ending::Silent(None),
            Ending::Disconnect(reason) if c.phase < Phase::Open => {
                Ending::ConnectError(ConnectError::Local(reason.to_string()))
            }
            other => other,
        });
        self.ending.push(id);
        self.endings_moved = true;
        if graceful && c.phase == Phase::Open {
            c.phase = Phase::Draining;
            self.set_phase_timer(id, self.config.close_timeout);
            self.mark_dirty(id);
        } else {
            self.start_flush(id);
        }
    }

    /// Has the device flush the queues of a connection.
    pub(crate) fn start_flush(&mut self, id: ConnectionId) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if c.phase == Phase::Flushing {
            return;
        }
        if c.phase < Phase::Open && !c.active {
            self.pending = self.pending.saturating_sub(1);
        }
        c.phase = Phase::Flushing;
        self.endings_moved = true;
        if c.qp.is_some()
            && let Err(error) = self.provider.disconnect(c.cm, self.now)
        {
            log::debug!("{id}: disconnecting: {error}");
        }
        if c.share.is_some()
            && let Some(device) = &self.devices[c.device]
        {
            c.flush = device.cqs[c.cq].mark();
        }
        self.set_phase_timer(id, self.config.flush_timeout);
    }
}
