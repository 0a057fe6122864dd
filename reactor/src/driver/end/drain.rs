//! Draining a reactor: new connections are refused, the existing connections end before a deadline
//! or are aborted at the deadline, and `run` returns after that.

use std::time::Duration;

use rdma_transport::slab::Key;

/// The progress of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Drain {
    #[default]
    No,
    /// A drain was requested, by a callback or another thread, and has not begun. The duration is
    /// the time until its deadline.
    Wanted(Duration),
    /// The drain has begun, and the program must end its connections before the deadline. The key
    /// is that of the timer for the deadline.
    Draining(Key),
    /// The deadline has passed. The remaining connections are aborted, and no new operation may
    /// begin.
    Overdue,
    /// All connections and endpoints have ended.
    Done,
}

impl Drain {
    /// Returns true if a drain was requested, so that new connections are refused.
    pub(crate) const fn is_on(self) -> bool {
        !matches!(self, Self::No)
    }

    /// Returns true if the deadline of a drain has passed, or the drain has ended, so that no new
    /// operation may begin.
    pub(crate) const fn refuses_all(self) -> bool {
        matches!(self, Self::Overdue | Self::Done)
    }

    pub(crate) const fn is_done(self) -> bool {
        matches!(self, Self::Done)
    }
}
