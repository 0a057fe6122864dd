//! The word of flags that says which stages of a turn have something to do. A turn that finds no flag takes the hot stages only.

use super::Driver;

bitflags::bitflags! {
    /// Stages with something to do. Whoever leaves or brings something for a stage sets its flag; the stage clears it when it begins.
    ///
    /// Completions have lists of their own ([`Driver::has_unseen`], backlogs), timers a deadline, and calls of other threads a flag that
    /// these set.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Stages: u8 {
        /// Channels of providers or devices are to be watched.
        const CHANNELS = 1;
        /// Stages 4 and 5: there may be events of a connection manager or of a device.
        const EVENTS = 1 << 1;
        /// Stage 6: a provider can move bytes, or its deadline has passed.
        const PROVIDERS = 1 << 2;
        /// Stage 8: timers that are due are left.
        const TIMERS = 1 << 3;
        /// Stage 9: descriptors of the program have edges.
        const DESCRIPTORS = 1 << 4;
        /// Stage 9: other reactors and threads, or a drain that was asked for.
        const OTHERS = 1 << 5;
        /// Stage 10: a connection or an endpoint that ends may have come to its end.
        const ENDS = 1 << 6;
        /// Stage 9: sends of other threads wait for room, which any turn may bring. This alone is no reason for a turn.
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

    /// Whether the flag of a stage is set.
    #[inline]
    pub(crate) const fn is_noted(&self, stage: Stages) -> bool {
        self.stages.contains(stage)
    }

    /// Clears the flag of a stage, which begins; returns whether it was set.
    #[inline]
    pub(crate) fn take(&mut self, stage: Stages) -> bool {
        let had = self.stages.intersects(stage);
        self.stages.remove(stage);
        had
    }

    /// Whether a stage other than the hot ones has something to do.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        !self.stages.is_empty() || self.timers.may_be_due(self.now) || self.os.wake.is_pending()
    }

    /// Whether something is left to do, so that nothing sleeps before the next turn.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        // Callbacks wait if a message ended with its post outside of a turn.
        let calls = !self.effects.events.is_empty();
        calls || self.stages.intersects(Stages::WORK) || self.has_unseen() || self.fair.is_behind()
    }
}
