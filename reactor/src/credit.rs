//! Credits: a sender sends only what the peer has receives posted for.
//!
//! Both sides count messages from the start of the connection, modulo 2^32. A grant is the absolute count up to which
//! the peer may send, so that a lost, repeated or overtaken grant does no harm. The last two credits are kept for control
//! messages, one to grant and one to ask or answer whether the other is there: data never takes them, so a side that is
//! out of credits can still grant.

/// Windows wider than this cannot be told apart from counters that ran backwards.
pub(crate) const MAX_WINDOW: u32 = 1 << 15;

/// Credits that data never takes.
pub(crate) const CONTROL_CREDITS: u32 = 2;

/// Smallest window that makes progress: the credits for control, and as many for data.
pub(crate) const MIN_WINDOW: u32 = 2 * CONTROL_CREDITS;

/// What the peer lets us send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendWindow {
    limit: u32,
    sent: u32,
}

impl SendWindow {
    /// A window in which the peer has posted `initial` receives.
    #[must_use]
    pub(crate) const fn new(initial: u32) -> Self {
        Self { limit: initial, sent: 0 }
    }

    /// Messages of any kind that can be sent now.
    #[must_use]
    #[inline]
    pub(crate) const fn available(&self) -> u32 {
        self.limit.wrapping_sub(self.sent)
    }

    /// Data messages that can be sent now: the credits for control stay.
    #[must_use]
    #[inline]
    pub(crate) const fn available_for_data(&self) -> u32 {
        self.available().saturating_sub(CONTROL_CREDITS)
    }

    /// Takes a credit. The caller has checked that there is one.
    #[inline]
    pub(crate) fn take(&mut self) {
        debug_assert!(self.available() > 0, "sending without a credit");
        self.sent = self.sent.wrapping_add(1);
    }

    /// Learns a grant. Old ones change nothing; one wider than any window is the peer's fault.
    ///
    /// # Errors
    /// The grant, when it can only be a fault.
    #[inline]
    pub(crate) fn grant(&mut self, limit: u32) -> Result<(), InvalidGrant> {
        let ahead = limit.wrapping_sub(self.limit);
        if ahead == 0 || ahead > u32::MAX / 2 {
            return Ok(());
        }
        if limit.wrapping_sub(self.sent) > MAX_WINDOW {
            return Err(InvalidGrant { limit, sent: self.sent });
        }
        self.limit = limit;
        Ok(())
    }
}

/// A grant no honest peer gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidGrant {
    /// The limit it named.
    pub(crate) limit: u32,
    /// What had been sent.
    pub(crate) sent: u32,
}

/// What we let the peer send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceiveWindow {
    /// Receives posted since the start.
    posted: u32,
    /// What the peer was last told.
    granted: u32,
    /// Messages received since the start.
    received: u32,
    /// Owed grants that are worth a message of their own.
    threshold: u32,
}

impl ReceiveWindow {
    /// The window of a connection with `depth` receives posted, all of them granted while connecting.
    #[must_use]
    pub(crate) const fn new(depth: u32) -> Self {
        Self { posted: depth, granted: depth, received: 0, threshold: if depth < 2 { 1 } else { depth / 2 } }
    }

    /// Counts receives that were posted again: only now may the peer use them.
    #[inline]
    pub(crate) fn posted(&mut self, count: u32) {
        self.posted = self.posted.wrapping_add(count);
    }

    /// Counts a message; `false` when the peer had no credit for it.
    #[inline]
    pub(crate) fn received(&mut self) -> bool {
        if self.granted == self.received {
            return false;
        }
        self.received = self.received.wrapping_add(1);
        true
    }

    /// Receives posted that the peer does not know of.
    #[must_use]
    #[inline]
    pub(crate) const fn owed(&self) -> u32 {
        self.posted.wrapping_sub(self.granted)
    }

    /// Whether enough is owed to say so without a message to ride on.
    #[must_use]
    #[inline]
    pub(crate) const fn update_due(&self) -> bool {
        self.owed() >= self.threshold
    }

    /// Whether it would be if so many more were posted.
    #[must_use]
    #[inline]
    pub(crate) const fn update_due_after(&self, more: u32) -> bool {
        self.owed().saturating_add(more) >= self.threshold
    }

    /// The grant to send now; it counts as told.
    #[inline]
    pub(crate) fn grant(&mut self) -> u32 {
        self.granted = self.posted;
        self.granted
    }

    /// The grant last told.
    #[must_use]
    #[inline]
    pub(crate) const fn told(&self) -> u32 {
        self.granted
    }

    /// Makes grants worth a message of their own when half of `window`, all that is posted, is owed.
    pub(crate) fn resize(&mut self, window: u32) {
        self.threshold = if window < 2 { 1 } else { window / 2 };
    }

    /// Receives posted and not yet used.
    pub(crate) const fn outstanding(&self) -> u32 {
        self.posted.wrapping_sub(self.received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn an_old_grant_changes_nothing_and_an_absurd_one_is_refused() {
        let mut window = SendWindow::new(8);
        window.take();
        window.grant(4).unwrap();
        assert_eq!(window.available(), 7);
        window.grant(9).unwrap();
        assert_eq!(window.available(), 8);
        assert!(window.grant(1 << 20).is_err());
        assert_eq!(window.available(), 8);
    }

    #[test]
    fn counters_wrap() {
        let mut tx = SendWindow { limit: 3, sent: u32::MAX - 2 };
        assert_eq!(tx.available(), 6);
        for _ in 0..6 {
            tx.take();
        }
        assert_eq!(tx.available(), 0);
        tx.grant(7).unwrap();
        assert_eq!(tx.available(), 4);
    }

    #[test]
    fn a_peer_without_credit_is_caught() {
        let mut rx = ReceiveWindow::new(4);
        for _ in 0..4 {
            assert!(rx.received());
        }
        assert!(!rx.received());
        rx.posted(1);
        assert!(!rx.received(), "posted but not granted");
        // One owed, and two are worth a message.
        assert!(!rx.update_due() && !rx.update_due_after(0) && rx.update_due_after(1));
        rx.grant();
        assert!(rx.received());
    }

    /// One end of the model: what the reactor does with the two windows, without a reactor.
    #[derive(Debug)]
    struct End {
        tx: SendWindow,
        rx: ReceiveWindow,
        wants: u32,
        sent: u32,
        delivered: u32,
        /// Receives taken by messages that the user keeps.
        held: u32,
        posted: u32,
        /// It has asked whether the other is there, and not heard from it since.
        asked: bool,
        owes_answer: bool,
    }

    #[derive(Clone, Copy, Debug)]
    struct Wire {
        kind: Kind,
        grant: u32,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Kind {
        Data,
        Grant,
        Question,
        Answer,
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Want { end: usize, count: u32 },
        Send { end: usize },
        Deliver { end: usize, hold: bool },
        Release { end: usize },
        Ask { end: usize },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..2_usize, 1..40_u32).prop_map(|(end, count)| Step::Want { end, count }),
            (0..2_usize).prop_map(|end| Step::Send { end }),
            (0..2_usize, any::<bool>()).prop_map(|(end, hold)| Step::Deliver { end, hold }),
            (0..2_usize).prop_map(|end| Step::Release { end }),
            (0..2_usize).prop_map(|end| Step::Ask { end }),
        ];
        proptest::collection::vec(step, 1..2000)
    }

    fn send(ends: &mut [End; 2], wires: &mut [VecDeque<Wire>; 2], end: usize) -> bool {
        let side = &mut ends[end];
        let kind = if side.wants > 0 && side.tx.available_for_data() > 0 {
            side.wants -= 1;
            side.sent += 1;
            Kind::Data
        } else if side.tx.available() == 0 {
            return false;
        } else if std::mem::take(&mut side.owes_answer) {
            Kind::Answer
        } else if side.rx.update_due() {
            Kind::Grant
        } else {
            return false;
        };
        put(side, &mut wires[end], kind);
        true
    }

    fn put(side: &mut End, wire: &mut VecDeque<Wire>, kind: Kind) {
        side.tx.take();
        wire.push_back(Wire { kind, grant: side.rx.grant() });
    }

    fn ask(ends: &mut [End; 2], wires: &mut [VecDeque<Wire>; 2], end: usize) {
        let side = &mut ends[end];
        if !side.asked && side.tx.available() > 0 {
            side.asked = true;
            put(side, &mut wires[end], Kind::Question);
        }
    }

    fn deliver(ends: &mut [End; 2], wires: &mut [VecDeque<Wire>; 2], end: usize, hold: bool) -> bool {
        let Some(wire) = wires[1 - end].pop_front() else { return false };
        let side = &mut ends[end];
        assert!(side.posted > 0, "a message met no posted receive");
        assert!(side.rx.received(), "a message came without a credit");
        side.posted -= 1;
        side.tx.grant(wire.grant).unwrap();
        side.asked = false;
        side.owes_answer |= wire.kind == Kind::Question;
        if wire.kind == Kind::Data {
            side.delivered += 1;
            if hold {
                side.held += 1;
                return true;
            }
        }
        side.posted += 1;
        side.rx.posted(1);
        true
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Over any history of both sides: no send without a receive posted for it, no grant lost, and once the users
        /// let go of what they hold, everything that was wanted is delivered: no deadlock.
        #[test]
        fn no_deadlock_no_overrun_no_lost_grant(
            depths in (MIN_WINDOW..40, MIN_WINDOW..40),
            history in steps(),
        ) {
            let end = |own: u32, peer: u32| End {
                tx: SendWindow::new(peer), rx: ReceiveWindow::new(own),
                wants: 0, sent: 0, delivered: 0, held: 0, posted: own, asked: false, owes_answer: false,
            };
            let mut ends = [end(depths.0, depths.1), end(depths.1, depths.0)];
            let mut wires = [VecDeque::new(), VecDeque::new()];
            let mut wanted = [0_u32; 2];
            for step in history {
                match step {
                    Step::Want { end, count } => { ends[end].wants += count; wanted[end] += count; }
                    Step::Send { end } => { send(&mut ends, &mut wires, end); }
                    Step::Ask { end } => ask(&mut ends, &mut wires, end),
                    Step::Deliver { end, hold } => { deliver(&mut ends, &mut wires, end, hold); }
                    Step::Release { end } => if ends[end].held > 0 {
                        ends[end].held -= 1;
                        ends[end].posted += 1;
                        ends[end].rx.posted(1);
                    },
                }
                for side in &ends {
                    prop_assert_eq!(side.rx.outstanding(), side.posted);
                }
            }
            for side in &mut ends {
                side.posted += side.held;
                side.rx.posted(side.held);
                side.held = 0;
            }
            let mut progress = true;
            while progress {
                progress = false;
                for end in 0..2 {
                    while send(&mut ends, &mut wires, end) { progress = true; }
                    while deliver(&mut ends, &mut wires, 1 - end, false) { progress = true; }
                }
            }
            for end in 0..2 {
                prop_assert_eq!(ends[end].wants, 0, "stuck: {:?}", ends);
                prop_assert_eq!(ends[1 - end].delivered, wanted[end]);
                prop_assert_eq!(ends[end].posted, ends[end].rx.outstanding());
            }
        }
    }
}
