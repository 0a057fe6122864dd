//! Flags for the stages of a turn that have work. If no flag is set, a turn runs only the stages that are always needed: waiting,
//! completions and posting (`docs/loop.md`).

bitflags::bitflags! {
    /// The stages of a turn that have work. Code that adds work for a stage sets its flag. The stage clears its flag when it begins.
    ///
    /// Three kinds of work have no flag here: completions (`Queues::has_unseen`, and the backlogs
    /// of connections), timers, and requests from other threads.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Stages: u8 {
        /// There are channels of providers or devices that are not registered with the poller yet.
        const CHANNELS = 1;
        /// Stages 4 and 5: a connection manager or a device may have events.
        const EVENTS = 1 << 1;
        /// Stage 6: a provider can send or receive bytes, or its deadline has passed.
        const PROVIDERS = 1 << 2;
        /// Stage 8: the last turn has not handled all expired timers.
        const TIMERS = 1 << 3;
        /// Stage 9: descriptors of the program have become ready.
        const DESCRIPTORS = 1 << 4;
        /// Stage 9: other reactors or threads have sent requests, or a drain was requested.
        const OTHERS = 1 << 5;
        /// Stage 10: an ending connection or endpoint may be ready to be released.
        const ENDS = 1 << 6;
        /// Stage 9: sends from other threads wait for capacity. The turn that frees capacity
        /// also executes these sends, so this flag triggers no additional turn.
        const WAITING_SENDS = 1 << 7;
    }
}

impl Stages {
    /// The flags that trigger another turn.
    pub(super) const WORK: Self = Self::WAITING_SENDS.complement();

    /// Clears the flag of a stage that begins. Returns true if the flag was set.
    #[inline]
    pub(crate) fn take(&mut self, stage: Self) -> bool {
        let had = self.intersects(stage);
        self.remove(stage);
        had
    }
}
