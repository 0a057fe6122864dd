//! Draining a reactor: new connections are refused, the existing connections end before a deadline or are aborted at the deadline, and
//! `run` returns after that.

use std::time::Duration;

use rdma_transport::slab::Key;

use crate::driver::stages::Stages;
use crate::driver::{Driver, TimerPurpose};
use crate::seam::timer::FOREVER;

/// The progress of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Drain {
    #[default]
    No,
    /// A drain was requested, by a callback or another thread, and has not begun. The duration is the time until its deadline.
    Wanted(Duration),
    /// The drain has begun, and the program must end its connections before the deadline. The key is that of the timer for the deadline.
    Draining(Key),
    /// The deadline has passed. The remaining connections are aborted, and no new operation may begin.
    Overdue,
    /// All connections and endpoints have ended.
    Done,
}

impl Drain {
    /// Returns true if a drain was requested, so that new connections are refused.
    pub(in crate::driver) const fn is_on(self) -> bool {
        !matches!(self, Self::No)
    }
}

impl Driver {
    /// Requests a drain. A second request does not change the deadline.
    pub(crate) fn want_drain(&mut self, deadline: Duration) {
        if !self.drain.is_on() {
            self.drain = Drain::Wanted(deadline);
            self.note(Stages::OTHERS);
            self.ring();
        }
    }

    /// Stage 9: begins a requested drain. Returns the time until its deadline, for `on_drain`. `None` if no drain was requested.
    #[inline]
    pub(crate) fn begin_drain(&mut self) -> Option<Duration> {
        let Drain::Wanted(deadline) = self.drain else { return None };
        Some(self.begin_drain_of(deadline))
    }

    #[cold]
    fn begin_drain_of(&mut self, deadline: Duration) -> Duration {
        // The callback that requested the drain may have run for a long time, so `now` may be out of date.
        self.look_at_clock();
        local_log!(Info, "draining {} connections within {deadline:?}", self.table.len());
        if let Some(membership) = &self.membership {
            membership.close();
        }
        let until = self.now.checked_add(deadline).unwrap_or(self.now + FOREVER);
        self.drain = Drain::Draining(self.timers.insert(until, TimerPurpose::Drain));
        deadline
    }

    /// Handles the deadline of the drain: aborts all connections. Returns false if no drain was in progress.
    pub(crate) fn drain_overdue(&mut self) -> bool {
        if !matches!(self.drain, Drain::Draining(_)) {
            return false;
        }
        self.drain = Drain::Overdue;
        local_log!(Info, "the time to drain is over: {} connections are cut off", self.table.len());
        for id in self.table.ids() {
            if !crate::planted("a-drain-aborts-nothing") {
                self.input(id, |conn, env| conn.abort(env));
            }
        }
        true
    }

    /// Called after stage 10. Completes the drain if no connection and no other object exists any more. `others` is true if an object that
    /// is not a connection, such as an endpoint, still exists.
    #[inline]
    pub(crate) fn finish_drain(&mut self, others: bool) {
        if matches!(self.drain, Drain::Draining(_) | Drain::Overdue) {
            self.check_drained(others);
        }
    }

    #[cold]
    fn check_drained(&mut self, others: bool) {
        // A reactor that listens accepts connections for its whole group. Its drain ends only after every reactor of the group is draining.
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

    /// Returns true if the deadline of a drain has passed, or the drain has ended, so that no new operation may begin.
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

    /// Closes every connection. Sends that were accepted before are still sent.
    pub(crate) fn close_all(&mut self) {
        for id in self.table.ids() {
            self.close(id);
        }
    }

    /// Closes every connection that is not established yet.
    pub(crate) fn close_unestablished(&mut self) {
        for id in self.table.ids() {
            if self.table.get(id).is_some_and(|slot| !slot.conn.state().is_announced()) {
                self.close(id);
            }
        }
    }
}
