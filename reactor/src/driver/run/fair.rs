//! Fairness between connections in stage 7 of a turn, which handles completions. The number of completions that a connection handles in one
//! turn is limited. Its remaining completions wait in the connection's *backlog*, in order, for the next turn. So a connection with many
//! completions does not delay other connections.

use std::collections::VecDeque;

use rdma_transport::wc::WorkCompletion;

use crate::driver::World;
use crate::id::ConnectionId;

/// The limits on the work of one connection in a turn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TurnLimits {
    /// The number of the turn for which these limits are valid.
    turn: u64,
    completions: u32,
    bytes: usize,
}

impl TurnLimits {
    /// Returns true if there is no limit in this turn, so that completions and bytes need not be counted.
    #[inline]
    const fn are_none(&self) -> bool {
        self.completions == u32::MAX
    }
}

/// The completions of a connection that were handled in a turn, and its backlog. A connection has a limited number of work requests in
/// flight, so its backlog is limited too.
#[derive(Debug, Default)]
pub(crate) struct Allowance {
    /// The number of the turn in which `completions` and `bytes` were counted.
    turn: u64,
    completions: u32,
    bytes: usize,
    pub(crate) backlog: VecDeque<WorkCompletion>, // bound: completions
}

impl Allowance {
    /// Counts a completion and returns true, if the connection has not used up its limits in this turn. Otherwise returns false. The first
    /// completion of a connection in a turn is always allowed.
    #[inline]
    fn take(&mut self, wc: &WorkCompletion, limits: &TurnLimits) -> bool {
        if self.turn != limits.turn {
            (self.turn, self.completions, self.bytes) = (limits.turn, 0, 0);
        }
        if self.completions >= limits.completions || self.bytes >= limits.bytes {
            return false;
        }
        self.completions += 1;
        self.bytes += wc.byte_len as usize;
        true
    }

    /// Returns true if the connection may handle this completion now. Otherwise adds the completion to the backlog. If the backlog was
    /// empty, also adds the connection to `waiting`. `spared` returns true if the connection may exceed its limits.
    #[inline]
    pub(crate) fn admit_or_defer(
        &mut self,
        id: ConnectionId,
        wc: &WorkCompletion,
        fair: &mut Fair,
        spared: impl FnOnce() -> bool,
    ) -> bool {
        if self.backlog.is_empty() {
            if fair.limits.are_none() || self.take(wc, &fair.limits) || spared() {
                return true;
            }
            fair.waiting.push_back(id);
        }
        self.backlog.push_back(*wc);
        false
    }
}

/// The limits of the current turn, and the connections that have a backlog.
#[derive(Debug, Default)]
pub(crate) struct Fair {
    limits: TurnLimits,
    /// The connections that have a backlog, in the order in which their backlogs began.
    waiting: VecDeque<ConnectionId>, // bound: connections
}

impl Fair {
    /// Returns true if at least one connection has a backlog.
    #[inline]
    pub(crate) fn is_behind(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Starts the limits of a new turn. If there is only one connection, it has no limit.
    #[inline]
    pub(crate) fn begin_turn(&mut self, world: &mut World) {
        world.table.caught_up(world.now);
        let turn = self.limits.turn + 1;
        self.limits = match world.table.len() {
            0 | 1 => TurnLimits { turn, completions: u32::MAX, bytes: usize::MAX },
            _ => TurnLimits { turn, completions: world.config.fair_messages, bytes: world.config.fair_bytes },
        };
    }

    /// Removes all connections from the list of those with a backlog, and returns them, oldest backlog first.
    pub(crate) fn take_waiting(&mut self) -> VecDeque<ConnectionId> {
        std::mem::take(&mut self.waiting)
    }

    /// Puts connections back to the front of the list of connections with a backlog, because this turn could not handle their backlogs.
    pub(crate) fn put_waiting(&mut self, mut waiting: VecDeque<ConnectionId>) {
        waiting.append(&mut self.waiting);
        self.waiting = waiting;
    }

    /// Removes and returns the next completion of a connection's backlog, if the limits of the connection allow it. If the limits do not
    /// allow it, returns `None`, and adds the connection to the list of connections with a backlog again. Also returns `None` if the
    /// backlog is empty.
    pub(crate) fn next_deferred(&mut self, world: &mut World, id: ConnectionId) -> Option<WorkCompletion> {
        let limits = self.limits;
        let allowance = &mut world.table.get_mut(id)?.allowance;
        let wc = *allowance.backlog.front()?;
        if !allowance.take(&wc, &limits) {
            self.waiting.push_back(id);
            return None;
        }
        allowance.backlog.pop_front()
    }

    /// Adds a connection to the list of connections with a backlog, if its backlog is not empty.
    pub(crate) fn wait_on(&mut self, world: &World, id: ConnectionId) {
        if world.table.get(id).is_some_and(|slot| !slot.allowance.backlog.is_empty()) {
            self.waiting.push_back(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma_transport::qp::QpId;
    use rdma_transport::slab::Key;
    use rdma_transport::wc::{WcOpcode, WcStatus};

    fn receive(byte_len: u32) -> WorkCompletion {
        WorkCompletion {
            wr_id: 0,
            qp: QpId(Key::new(0, 1)),
            status: WcStatus::Success,
            opcode: WcOpcode::Recv,
            byte_len,
            vendor_error: 0,
            immediate: None,
            invalidated: None,
            source: Default::default(),
        }
    }

    #[test]
    fn an_allowance_ends_by_completions_or_bytes_and_a_turn_renews_it() {
        let mut allowance = Allowance::default();
        let mut take = |turn, bytes| allowance.take(&receive(bytes), &TurnLimits { turn, completions: 3, bytes: 100 });
        assert_eq!([1; 4].map(|bytes| take(1, bytes)), [true, true, true, false]);
        assert_eq!([1; 4].map(|bytes| take(2, bytes)), [true, true, true, false]);
        assert_eq!([90, 20, 1].map(|bytes| take(3, bytes)), [true, true, false]);
        assert_eq!([5000, 1].map(|bytes| take(4, bytes)), [true, false], "one always fits");
    }
}
