//! Draining: no connection comes any more, those that are there end, and `run` returns; with a deadline.

use std::time::Duration;

use rdma_transport::slab::Key;

use super::stages::Stages;
use super::{Driver, Due};
use crate::seam::timer::FOREVER;

/// How far a reactor is with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Drain {
    #[default]
    No,
    /// A callback or another thread has asked for it.
    Wanted(Duration),
    /// Connections end, until this timer fires.
    Draining(Key),
    /// The deadline has passed: what is there is cut off, and nothing new begins.
    Overdue,
    /// Nothing is left.
    Done,
}

impl Drain {
    /// Whether connections are refused.
    pub(super) const fn is_on(self) -> bool {
        !matches!(self, Self::No)
    }
}

impl Driver {
    /// Asks for it. The first deadline holds.
    pub(crate) fn want_drain(&mut self, deadline: Duration) {
        if !self.drain.is_on() {
            self.drain = Drain::Wanted(deadline);
            self.note(Stages::OTHERS);
            self.ring();
        }
    }

    /// Stage 9: begins what was asked for; returns the time that the program has to drain.
    #[inline]
    pub(crate) fn begin_drain(&mut self) -> Option<Duration> {
        let Drain::Wanted(deadline) = self.drain else { return None };
        Some(self.begin_drain_of(deadline))
    }

    #[cold]
    fn begin_drain_of(&mut self, deadline: Duration) -> Duration {
        // The request may come from a callback that has taken long.
        self.look_at_clock();
        log::info!("draining {} connections within {deadline:?}", self.table.len());
        if let Some(membership) = &self.membership {
            membership.close();
        }
        let until = self.now.checked_add(deadline).unwrap_or(self.now + FOREVER);
        self.drain = Drain::Draining(self.timers.insert(until, Due::Drain));
        deadline
    }

    /// The deadline has passed: nothing is waited for any more. Whether that is new.
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

    /// After stage 10: whether nothing is left. `guests`: something else than a connection is.
    #[inline]
    pub(crate) fn finish_drain(&mut self, guests: bool) {
        if matches!(self.drain, Drain::Draining(_) | Drain::Overdue) {
            self.look_whether_drained(guests);
        }
    }

    #[cold]
    fn look_whether_drained(&mut self, guests: bool) {
        // A reactor that listens does so for the others, until there are none.
        if self.membership.as_ref().is_some_and(|membership| membership.is_open() && !self.listeners.is_empty()) {
            return;
        }
        self.close_listeners();
        let expects = self.membership.as_ref().is_some_and(|membership| membership.expects());
        if self.table.is_empty() && !guests && !expects {
            if let Drain::Draining(timer) = std::mem::replace(&mut self.drain, Drain::Done) {
                self.timers.cancel(timer);
            }
            self.stop = true;
        }
    }

    /// Whether nothing new may begin.
    pub(crate) const fn refuses_all(&self) -> bool {
        matches!(self.drain, Drain::Overdue | Drain::Done)
    }

    /// Whether a drain was asked for.
    pub(crate) const fn is_draining(&self) -> bool {
        self.drain.is_on()
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.drain == Drain::Done
    }

    /// Closes every connection, after what was accepted for sending has been sent.
    pub(crate) fn close_all(&mut self) {
        for id in self.table.ids() {
            self.close(id);
        }
    }
}
