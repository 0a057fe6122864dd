//! The word of flags for the stages of a turn that have something to do. A turn that finds no flag runs the hot stages only.

use super::Driver;

bitflags::bitflags! {
    /// The stages that have something to do. Code that adds work for a stage sets its flag; the stage clears it when it begins.
    ///
    /// Completions have separate lists ([`Driver::has_unseen`], backlogs), timers a deadline, and calls of other threads a flag that the
    /// callers set.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Stages: u8 {
        /// Channels of providers or devices must be watched.
        const CHANNELS = 1;
        /// Stages 4 and 5: there may be events of a connection manager or of a device.
        const EVENTS = 1 << 1;
        /// Stage 6: a provider can move bytes, or its deadline has passed.
        const PROVIDERS = 1 << 2;
        /// Stage 8: expired timers are left.
        const TIMERS = 1 << 3;
        /// Stage 9: descriptors of the program have edges.
        const DESCRIPTORS = 1 << 4;
        /// Stage 9: requests of other reactors and threads, or a requested drain.
        const OTHERS = 1 << 5;
        /// Stage 10: an ending connection or endpoint may have ended.
        const ENDS = 1 << 6;
        /// Stage 9: sends of other threads wait for capacity, which any turn may free. This alone is no reason for a
        /// turn.
        const WAITING_SENDS = 1 << 7;
    }
}

impl Stages {
    /// The flags that are a reason for another turn.
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

    /// Clears the flag of a stage, which begins. Returns true if it was set.
    #[inline]
    pub(crate) fn take(&mut self, stage: Stages) -> bool {
        let had = self.stages.intersects(stage);
        self.stages.remove(stage);
        had
    }

    /// Returns true if a stage other than the hot ones has something to do.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        !self.stages.is_empty() || self.timers.may_be_due(self.now) || self.os.wake.is_pending()
    }

    /// Returns true if something is left to do, so that nothing sleeps before the next turn.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        // Callbacks are pending if a message ended with its post outside of a turn.
        let calls = !self.effects.events.is_empty();
        calls || self.stages.intersects(Stages::WORK) || self.has_unseen() || self.fair.is_behind()
    }
}
