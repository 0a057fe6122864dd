//! The state of the turns of a reactor. A turn is one iteration of its event loop. The driver is the code that takes the turns.

/// The turn that is pending, because tasks have requested operations. The driver must take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingTurn {
    Nothing,
    /// A whole turn is pending, because a task has used the reactor since the last turn.
    Whole,
    /// The rest of the last turn is pending. That turn was left open after it had woken tasks, and still has to carry out the requests of
    /// these tasks.
    Rest,
}

/// The driver of the reactor, and the turn that the driver must take next. A turn that has woken tasks may stay open, to carry out the
/// requests of these tasks later. While a turn is open, requests do not make the descriptor readable. So a turn is left open only if the
/// driver takes the next turn without waiting for the descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turns {
    /// The program is the driver: it takes a turn when the descriptor is readable. `requested` is true if a task has used the reactor since
    /// the last turn.
    Program { requested: bool },
    /// A task is the driver: it waits for [`TurnRequested`](super::TurnRequested) and for the descriptor.
    Task(PendingTurn),
    /// [`AsyncReactor::run`](super::AsyncReactor::run) is the driver: it waits for events within
    /// its turns, and not for the descriptor, so it leaves every turn open. `requested` is true if
    /// a task has used the reactor since the last turn.
    Run { requested: bool },
}

impl Default for Turns {
    fn default() -> Self {
        Self::Program { requested: false }
    }
}

impl Turns {
    /// Requests a turn, because a task uses the reactor. Returns true if `run` is the driver: the
    /// caller then need not wake the driver, because `run` is about to take its next turn.
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

    /// Records that a task is the driver and waits for `TurnRequested`. Returns true if a turn is already requested, so that the task must
    /// not wait.
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

    /// Records that a turn begins. The turn carries out everything that was requested. Returns the turn that was pending before.
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

    /// Records that a turn, or the rest of a turn (`rest`), has woken tasks. Returns true if the
    /// turn stays open, to carry out the requests of these tasks. Returns false if the turn must be
    /// closed. After the rest of a turn, the next turn is a whole one: otherwise requests that
    /// complete as soon as they are posted would delay all other work.
    pub(super) const fn keep_open(&mut self, rest: bool) -> bool {
        match self {
            Self::Task(pending) => {
                *pending = if rest { PendingTurn::Whole } else { PendingTurn::Rest };
                true
            }
            Self::Program { .. } | Self::Run { .. } => false,
        }
    }

    /// Records that `run` has begun: it is the driver now.
    pub(super) const fn run(&mut self) {
        *self = Self::Run { requested: !matches!(self.begin(), PendingTurn::Nothing) };
    }

    /// Records that `run` or the task has ended. The program is the driver, and waits for the
    /// descriptor.
    pub(super) const fn end_driver(&mut self) {
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
        assert!(!turns.keep_open(false));
        assert!(!turns.wait());
        assert!(turns.keep_open(false) && turns.wait());
        // A request that is made while the turn is open needs no whole turn: the rest of the open turn carries it out.
        turns.request();
        assert_eq!((turns.begin(), turns.wait()), (PendingTurn::Rest, false));
        // The rest has woken tasks, too: their requests get a whole turn.
        assert!(turns.keep_open(true) && turns.wait());
        assert_eq!((turns.begin(), turns.wait()), (PendingTurn::Whole, false));
        turns.run();
        assert!(!turns.keep_open(false));
        turns.request();
        turns.end_driver();
        assert_eq!(turns, Turns::Program { requested: true });
    }
}
