//! Draining: no connection comes any more, those that are there end, and `run` returns; with a deadline.

use std::time::Duration;

use crate::context::Context;
use crate::core::{Core, TimerKind};
use crate::handler::Handler;
use crate::id::{ConnectionId, ListenerId};

/// How far a reactor is with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Drain {
    #[default]
    No,
    /// Asked for, by a callback or another thread.
    Wanted(Duration),
    /// Connections end.
    Draining,
    /// The deadline has passed: what is there is cut off, and nothing new begins.
    Overdue,
    /// Nothing is left.
    Done,
}

impl Drain {
    /// Whether connections are refused.
    pub(crate) const fn is_on(self) -> bool {
        !matches!(self, Self::No)
    }
}

impl Core {
    /// Asks for it. The first deadline holds.
    pub(crate) fn want_drain(&mut self, deadline: Duration) {
        if !self.drain.is_on() {
            self.drain = Drain::Wanted(deadline);
        }
    }

    /// Stage 9: begins what was asked for.
    pub(crate) fn begin_drain<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, progressed: &mut bool) {
        let Drain::Wanted(deadline) = self.drain else { return };
        *progressed = true;
        self.drain = Drain::Draining;
        log::info!("draining {} connections within {deadline:?}", self.connections.len());
        if let Some(membership) = &self.membership {
            membership.close();
        }
        let until = self.now.checked_add(deadline).unwrap_or(self.now + crate::timer::FOREVER);
        self.timers.insert(until, TimerKind::Drain);
        handler.on_drain(&mut Context { core: self }, deadline);
    }

    /// The deadline has passed: nothing is waited for any more.
    pub(crate) fn drain_overdue(&mut self) {
        if self.drain != Drain::Draining {
            return;
        }
        self.drain = Drain::Overdue;
        log::info!("the time to drain is over: {} connections are cut off", self.connections.len());
        for key in self.connections.keys() {
            let id = ConnectionId(key);
            self.close(id);
            self.start_flush(id);
        }
        self.close_endpoints(true);
    }

    /// After stage 10: whether nothing is left.
    pub(crate) fn finish_drain(&mut self) {
        if !matches!(self.drain, Drain::Draining | Drain::Overdue) {
            return;
        }
        // Who listens does so for the others, until there are none.
        if self.membership.as_ref().is_some_and(|membership| membership.is_open() && !self.listeners.is_empty()) {
            return;
        }
        for key in self.listeners.keys() {
            self.close_listener(ListenerId(key));
        }
        let empty = self.connections.is_empty() && self.endpoints.is_empty();
        if empty && !self.membership.as_ref().is_some_and(|membership| membership.expects()) {
            self.drain = Drain::Done;
            self.stop = true;
        }
    }

    /// Closes every connection and endpoint, after what was accepted for sending has been sent.
    pub(crate) fn close_all(&mut self) {
        self.close_endpoints(false);
        for key in self.connections.keys() {
            self.close(ConnectionId(key));
        }
    }
}
