//! The state of the turns: who takes them, and what they owe to the tasks.

/// What the taker of the turns owes to the tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owed {
    Nothing,
    /// A turn: a task has asked the reactor for something since the last one.
    Turn,
    /// The rest of the last turn, which was left open for the tasks that it has woken.
    Rest,
}

/// Who takes the turns. A turn is left open only if its taker is known to call again, whatever the descriptor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turns {
    /// The program, when the descriptor is readable.
    Program { owes: bool },
    /// A task that waits for [`Asked`](super::Asked), too.
    Task(Owed),
    /// [`AsyncReactor::run`](super::AsyncReactor::run), which leaves every turn open.
    Run { owes: bool },
}

impl Default for Turns {
    fn default() -> Self {
        Self::Program { owes: false }
    }
}

impl Turns {
    /// A task asks the reactor for something. Returns `true` if `run` takes the turns: it takes the next one before it sleeps.
    #[inline]
    pub(super) const fn ask(&mut self) -> bool {
        match self {
            Self::Program { owes } => *owes = true,
            Self::Task(owed @ Owed::Nothing) => *owed = Owed::Turn,
            Self::Task(Owed::Turn | Owed::Rest) => {}
            Self::Run { owes } => *owes = true,
        }
        matches!(self, Self::Run { .. })
    }

    /// The taker of the turns waits for `Asked`. Returns `true` if a turn is owed already.
    pub(super) const fn wait(&mut self) -> bool {
        match *self {
            Self::Program { owes } => {
                *self = Self::Task(if owes { Owed::Turn } else { Owed::Nothing });
                owes
            }
            Self::Task(owed) => !matches!(owed, Owed::Nothing),
            Self::Run { owes } => owes,
        }
    }

    /// A turn begins, which pays what is owed. Returns that.
    #[inline]
    pub(super) const fn pay(&mut self) -> Owed {
        match self {
            Self::Program { owes } | Self::Run { owes } => {
                let owed = if *owes { Owed::Turn } else { Owed::Nothing };
                *owes = false;
                owed
            }
            Self::Task(owed) => std::mem::replace(owed, Owed::Nothing),
        }
    }

    /// A turn has woken tasks. Returns `true` if it stays open for them.
    pub(super) const fn leave_open(&mut self) -> bool {
        match self {
            Self::Task(owed) => {
                *owed = Owed::Rest;
                true
            }
            Self::Program { .. } | Self::Run { .. } => false,
        }
    }

    /// `run` begins.
    pub(super) const fn run(&mut self) {
        *self = Self::Run { owes: !matches!(self.pay(), Owed::Nothing) };
    }

    /// `run` ends. Whoever takes the next turn is told by the descriptor.
    pub(super) const fn end_run(&mut self) {
        *self = Self::Program { owes: !matches!(self.pay(), Owed::Nothing) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_owed_until_it_begins() {
        for mut turns in [Turns::default(), Turns::Task(Owed::Nothing), Turns::Run { owes: false }] {
            assert_eq!(turns.pay(), Owed::Nothing);
            assert_eq!(turns.ask(), matches!(turns, Turns::Run { .. }));
            assert_eq!((turns.pay(), turns.pay()), (Owed::Turn, Owed::Nothing));
        }
    }

    #[test]
    fn a_turn_is_left_open_only_for_a_taker_that_waits_for_the_tasks() {
        let mut turns = Turns::default();
        assert!(!turns.leave_open());
        assert!(!turns.wait());
        assert!(turns.leave_open() && turns.wait());
        // What tasks ask for meanwhile is a part of the rest.
        turns.ask();
        assert_eq!((turns.pay(), turns.wait()), (Owed::Rest, false));
        turns.run();
        assert!(!turns.leave_open());
        turns.ask();
        turns.end_run();
        assert_eq!(turns, Turns::Program { owes: true });
    }
}
