//! Draining: new connections are refused, existing ones end, and `run` returns; with a deadline.

use std::time::Duration;

use rdma_transport::slab::Key;

use super::stages::Stages;
use super::{Driver, TimerPurpose};
use crate::seam::timer::FOREVER;

/// The progress of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Drain {
    #[default]
    No,
    /// A callback or another thread has requested it.
    Wanted(Duration),
    /// Connections end, until this timer expires.
    Draining(Key),
    /// The deadline has passed: existing connections are cut off, and nothing new begins.
    Overdue,
    /// Nothing is left.
    Done,
}

impl Drain {
    /// Returns true if connections are refused.
    pub(super) const fn is_on(self) -> bool {
        !matches!(self, Self::No)
    }
}

impl Driver {
    /// Requests a drain. The first deadline counts.
    pub(crate) fn want_drain(&mut self, deadline: Duration) {
        if !self.drain.is_on() {
            self.drain = Drain::Wanted(deadline);
            self.note(Stages::OTHERS);
            self.ring();
        }
    }

    /// Stage 9: begins a requested drain; returns the time that the program has to drain.
    #[inline]
    pub(crate) fn begin_drain(&mut self) -> Option<Duration> {
        let Drain::Wanted(deadline) = self.drain else { return None };
        Some(self.begin_drain_of(deadline))
    }

    #[cold]
    fn begin_drain_of(&mut self, deadline: Duration) -> Duration {
        // The request may come from a callback that took long.
        self.look_at_clock();
        log::info!("draining {} connections within {deadline:?}", self.table.len());
        if let Some(membership) = &self.membership {
            membership.close();
        }
        let until = self.now.checked_add(deadline).unwrap_or(self.now + FOREVER);
        self.drain = Drain::Draining(self.timers.insert(until, TimerPurpose::Drain));
        deadline
    }

    /// Handles the expired deadline: the drain waits for nothing any more. Returns true if that is new.
    pub(crate) fn drain_overdue(&mut self) -> bool {
        if !matches!(self.drain, Drain::Draining(_)) {
            return false;
        }
        self.drain = Drain::Overdue;
        log::info!("the time to drain is over: {} connections are cut off", self.table.len());
        for id in self.table.ids() {
            self.input(id, |conn, env| conn.abort(env));
        }
        true
    }

    /// After stage 10: returns true if nothing is left. `others`: something other than a connection is left.
    #[inline]
    pub(crate) fn finish_drain(&mut self, others: bool) {
        if matches!(self.drain, Drain::Draining(_) | Drain::Overdue) {
            self.check_drained(others);
        }
    }

    #[cold]
    fn check_drained(&mut self, others: bool) {
        // A reactor that listens does so for the others, until none accepts connections.
        if self.membership.as_ref().is_some_and(|membership| membership.is_open() && !self.listeners.is_empty()) {
            return;
        }
        self.close_listeners();
        let expects = self.membership.as_ref().is_some_and(|membership| membership.expects());
        if self.table.is_empty() && !others && !expects {
            if let Drain::Draining(timer) = std::mem::replace(&mut self.drain, Drain::Done) {
                self.timers.cancel(timer);
            }
            self.stop = true;
        }
    }

    /// Returns true if nothing new may begin.
    pub(crate) const fn refuses_all(&self) -> bool {
        matches!(self.drain, Drain::Overdue | Drain::Done)
    }

    /// Returns true if a drain was requested.
    pub(crate) const fn is_draining(&self) -> bool {
        self.drain.is_on()
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.drain == Drain::Done
    }

    /// Closes every connection after its accepted sends have been sent.
    pub(crate) fn close_all(&mut self) {
        for id in self.table.ids() {
            self.close(id);
        }
    }
}
