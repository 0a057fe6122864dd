//! The state of the turns: the driver that takes them, and whether one is pending.

/// The turn that the driver has to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingTurn {
    Nothing,
    /// A whole turn: a task has used the reactor since the last one.
    Whole,
    /// The rest of the last turn, which was left open for the tasks that it woke.
    Rest,
}

/// The driver of the reactor. A turn is left open only if the driver calls again even if the descriptor is not readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turns {
    /// The program, when the descriptor is readable.
    Program { requested: bool },
    /// A task that also waits for [`TurnRequested`](super::TurnRequested).
    Task(PendingTurn),
    /// [`AsyncReactor::run`](super::AsyncReactor::run), which leaves every turn open.
    Run { requested: bool },
}

impl Default for Turns {
    fn default() -> Self {
        Self::Program { requested: false }
    }
}

impl Turns {
    /// Requests a turn, for a task that uses the reactor. Returns true if `run` is the driver, which takes the next turn before it sleeps.
    #[inline]
    pub(super) const fn request(&mut self) -> bool {
        match self {
            Self::Program { requested } => *requested = true,
            Self::Task(pending @ PendingTurn::Nothing) => *pending = PendingTurn::Whole,
            Self::Task(PendingTurn::Whole | PendingTurn::Rest) => {}
            Self::Run { requested } => *requested = true,
        }
        matches!(self, Self::Run { .. })
    }

    /// Records that the driver waits for `TurnRequested`. Returns true if a turn is pending already.
    pub(super) const fn wait(&mut self) -> bool {
        match *self {
            Self::Program { requested } => {
                *self = Self::Task(if requested { PendingTurn::Whole } else { PendingTurn::Nothing });
                requested
            }
            Self::Task(pending) => !matches!(pending, PendingTurn::Nothing),
            Self::Run { requested } => requested,
        }
    }

    /// Begins a turn. Returns the turn that was pending.
    #[inline]
    pub(super) const fn begin(&mut self) -> PendingTurn {
        match self {
            Self::Program { requested } | Self::Run { requested } => {
                let pending = if *requested { PendingTurn::Whole } else { PendingTurn::Nothing };
                *requested = false;
                pending
            }
            Self::Task(pending) => std::mem::replace(pending, PendingTurn::Nothing),
        }
    }

    /// Records that a turn has woken tasks. Returns true if the turn stays open for them.
    pub(super) const fn keep_open(&mut self) -> bool {
        match self {
            Self::Task(pending) => {
                *pending = PendingTurn::Rest;
                true
            }
            Self::Program { .. } | Self::Run { .. } => false,
        }
    }

    /// Records that `run` has begun.
    pub(super) const fn run(&mut self) {
        *self = Self::Run { requested: !matches!(self.begin(), PendingTurn::Nothing) };
    }

    /// Records that `run` has ended. The descriptor notifies the next driver.
    pub(super) const fn end_run(&mut self) {
        *self = Self::Program { requested: !matches!(self.begin(), PendingTurn::Nothing) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_owed_until_it_begins() {
        for mut turns in [Turns::default(), Turns::Task(PendingTurn::Nothing), Turns::Run { requested: false }] {
            assert_eq!(turns.begin(), PendingTurn::Nothing);
            assert_eq!(turns.request(), matches!(turns, Turns::Run { .. }));
            assert_eq!((turns.begin(), turns.begin()), (PendingTurn::Whole, PendingTurn::Nothing));
        }
    }

    #[test]
    fn a_turn_is_left_open_only_for_a_taker_that_waits_for_the_tasks() {
        let mut turns = Turns::default();
        assert!(!turns.keep_open());
        assert!(!turns.wait());
        assert!(turns.keep_open() && turns.wait());
        // A request while the turn is open belongs to its rest.
        turns.request();
        assert_eq!((turns.begin(), turns.wait()), (PendingTurn::Rest, false));
        turns.run();
        assert!(!turns.keep_open());
        turns.request();
        turns.end_run();
        assert_eq!(turns, Turns::Program { requested: true });
    }
}
