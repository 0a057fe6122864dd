//! The deadlines of a connection. The driver keeps one timer, for the earliest of them.

use std::time::Instant;

/// The times at which a connection must be looked at. Those of its lists are in the lists.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ConnectionDeadlines {
    /// The end of the time for the current step of the connection, or the next check of its peer.
    pub(crate) step: Option<Instant>,
    /// The next early message to a peer that has sent nothing, and the number of earlier ones.
    pub(super) nudge: Option<(Instant, u8)>,
    /// The time at which the connection is aborted, unless the program closes it before.
    pub(crate) close: Option<Instant>,
}

/// A deadline that the driver handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// The time for the current step, which ended at this time: call
    /// [`super::Connection::timeout`].
    Step(Instant),
    /// The time within which the program must close the connection.
    Close,
}

impl ConnectionDeadlines {
    /// Returns the earliest deadline. `None` if there is none.
    pub(super) fn next(&self) -> Option<Instant> {
        [self.step, self.nudge.map(|(at, _)| at), self.close].into_iter().flatten().min()
    }

    /// Removes a deadline of the driver that has passed, and returns it.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Due> {
        let close = self.close.take_if(|at| *at <= now).map(|_| Due::Close);
        close.or_else(|| self.step.take_if(|at| *at <= now).map(Due::Step))
    }
}
