//! The deadlines of a connection. The driver keeps one timer, for the earliest of them.

use std::time::Instant;

/// The deadlines of a connection. The deadlines of its lists are in `Lists`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ConnectionDeadlines {
    /// The timeout of the current step of the connection, or the next check of the peer of an open
    /// connection.
    pub(crate) step: Option<Instant>,
    /// The time of the next early message to a peer that has sent nothing, and the number of early
    /// messages sent so far.
    pub(super) nudge: Option<(Instant, u8)>,
    /// The time at which the connection is aborted, unless the program closes it before.
    pub(crate) close: Option<Instant>,
}

/// A deadline that the driver handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// The deadline `step`, which was due at this time: call [`super::Connection::timeout`].
    Step(Instant),
    /// The deadline `close`: abort the connection.
    Close,
}

impl ConnectionDeadlines {
    /// Returns the earliest deadline. `None` if there is none.
    pub(super) fn next(&self) -> Option<Instant> {
        [self.step, self.nudge.map(|(at, _)| at), self.close].into_iter().flatten().min()
    }

    /// Removes and returns a deadline that has passed and that the driver must handle, `close`
    /// before `step`.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Due> {
        let close = self.close.take_if(|at| *at <= now).map(|_| Due::Close);
        close.or_else(|| self.step.take_if(|at| *at <= now).map(Due::Step))
    }
}
