//! Fairness in stage 7: what one connection may have handled in a turn. What is beyond that stays in the connection's
//! backlog, in order, for the next turn: others that come meanwhile are looked at before.

use std::collections::VecDeque;

use rdma_transport::wc::WorkCompletion;

use crate::core::Core;
use crate::handler::Handler;
use crate::id::{ConnectionId, WorkId};

/// What a connection has used of its share, and what waits. The backlog is bounded by the connection's work requests.
#[derive(Debug, Default)]
pub(crate) struct Allowance {
    /// The round these are of.
    round: u64,
    messages: u32,
    bytes: usize,
    pub(crate) backlog: VecDeque<WorkCompletion>,
}

impl Allowance {
    /// Takes a completion's part of the share; `false` when it is used up. The first of a round always fits.
    #[inline]
    fn take(&mut self, round: u64, wc: &WorkCompletion, limits: (u32, usize)) -> bool {
        if self.round != round {
            (self.round, self.messages, self.bytes) = (round, 0, 0);
        }
        if self.messages >= limits.0 || self.bytes >= limits.1 {
            return false;
        }
        self.messages += 1;
        self.bytes += wc.byte_len as usize;
        true
    }
}

/// The connections of a turn.
#[derive(Debug, Default)]
pub(crate) struct Fair {
    /// Each turn gives every connection a fresh share.
    round: u64,
    /// Connections with a backlog, in the order they came to it.
    waiting: VecDeque<ConnectionId>,
}

impl Fair {
    /// Whether something waits.
    pub(crate) fn is_behind(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Starts a turn.
    pub(crate) const fn turn(&mut self) {
        self.round += 1;
    }
}

impl Core {
    /// What a connection may have handled in a turn: anything while there is no other.
    #[inline]
    fn share(&self) -> (u32, usize) {
        match self.connections.len() {
            0 | 1 => (u32::MAX, usize::MAX),
            _ => (self.config.fair_messages, self.config.fair_bytes),
        }
    }

    /// Whether a completion is handled now; otherwise it waits in its connection's backlog, or has no connection any more.
    #[inline]
    pub(crate) fn has_its_turn(&mut self, id: ConnectionId, wc: &WorkCompletion) -> bool {
        let limits = self.share();
        let Some(c) = self.connections.get_mut(id.0) else {
            self.stats.stale_completions += 1;
            return false;
        };
        if c.fair.backlog.is_empty() {
            if c.fair.take(self.fair.round, wc, limits) {
                return true;
            }
            self.fair.waiting.push_back(id);
        }
        c.fair.backlog.push_back(*wc);
        self.stats.deferred += 1;
        false
    }

    /// Gives each connection with a backlog its share of the turn, oldest first, while `budget` lasts.
    pub(crate) fn backlogs<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, budget: &mut usize) {
        for _ in 0..self.fair.waiting.len() {
            if *budget == 0 {
                return;
            }
            let Some(id) = self.fair.waiting.pop_front() else { return };
            self.backlog(handler, id, budget);
            if self.connections.get(id.0).is_some_and(|c| !c.fair.backlog.is_empty()) {
                self.fair.waiting.push_back(id);
            }
        }
    }

    fn backlog<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: ConnectionId, budget: &mut usize) {
        let limits = self.share();
        let Some(device) = self.connections.get(id.0).map(|c| c.device) else { return };
        let Some((mut slabs, home)) = self.home(device) else { return };
        while *budget > 0 {
            let round = self.fair.round;
            let Some(c) = self.connections.get_mut(id.0) else { return };
            let Some(&wc) = c.fair.backlog.front() else { return };
            let Some(work) = WorkId::unpack(wc.wr_id) else { return };
            if !c.fair.take(round, &wc, limits) {
                return;
            }
            c.fair.backlog.pop_front();
            *budget -= 1;
            self.completed(handler, work, &wc, &mut slabs, &home);
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
    fn a_share_ends_by_messages_or_bytes_and_a_round_renews_it() {
        let mut allowance = Allowance::default();
        let take = |allowance: &mut Allowance, round, bytes| allowance.take(round, &receive(bytes), (3, 100));
        assert_eq!([1; 4].map(|bytes| take(&mut allowance, 1, bytes)), [true, true, true, false]);
        assert_eq!([1; 4].map(|bytes| take(&mut allowance, 2, bytes)), [true, true, true, false]);
        assert_eq!([90, 20, 1].map(|bytes| take(&mut allowance, 3, bytes)), [true, true, false]);
        assert_eq!([5000, 1].map(|bytes| take(&mut allowance, 4, bytes)), [true, false], "one always fits");
    }
}
