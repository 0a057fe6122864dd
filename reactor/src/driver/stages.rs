//! Flags for the stages of a turn that have work. If no flag is set, a turn runs only the stages that are always needed: waiting,
//! completions and posting (`docs/loop.md`).

use super::Driver;

bitflags::bitflags! {
    /// The stages of a turn that have work. Code that adds work for a stage sets its flag. The stage clears its flag when it begins.
    ///
    /// Three kinds of work have no flag here: completions ([`Driver::has_unseen`], and the backlogs of connections), timers, and calls of
    /// other threads.
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
        /// Stage 9: sends of other threads wait for capacity. Any turn may free capacity and then executes these sends, so this flag
        /// triggers no additional turn.
        const WAITING_SENDS = 1 << 7;
    }
}

impl Stages {
    /// The flags that trigger another turn.
    const WORK: Self = Self::WAITING_SENDS.complement();
}

impl Driver {
    /// Sets the flag of a stage.
    #[inline]
    pub(crate) fn note(&mut self, stage: Stages) {
        self.stages.insert(stage);
    }

    /// Returns true if the flag of a stage is set.
    #[inline]
    pub(crate) const fn is_noted(&self, stage: Stages) -> bool {
        self.stages.contains(stage)
    }

    /// Clears the flag of a stage that begins. Returns true if the flag was set.
    #[inline]
    pub(crate) fn take(&mut self, stage: Stages) -> bool {
        let had = self.stages.intersects(stage);
        self.stages.remove(stage);
        had
    }

    /// Returns true if one of the stages that do not run in every turn has work.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        !self.stages.is_empty() || self.timers.may_be_due(self.now) || self.os.wake.is_pending()
    }

    /// Returns true if the next turn already has work to do, so that the reactor must not sleep before that turn.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        // If a send that was made outside of a turn has completed when it was posted, its callback is pending. After stage 7, the program
        // or a timer may have released what a refused send waits for.
        let calls = self.effects.has_events() || !self.effects.to_ask.is_empty();
        let stages = self.stages.intersects(Stages::WORK);
        // The poll before a sleep may have passed the last completion of an ended connection, whose
        // receives are then free for connections that wait.
        let due = || self.has_due_receives() && !crate::planted("an-ended-connection-wakes-no-claim");
        calls || stages || self.has_unseen() || self.fair.is_behind() || due()
    }
}
