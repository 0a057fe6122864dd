//! Credits: a side sends a message only if the peer has posted a receive for it. This file does no
//! I/O.
//!
//! Both sides count messages from the start of the connection, modulo 2^32. A grant is an absolute
//! count: the number of messages that the peer may have sent in total. So a grant may be repeated,
//! lost or overtaken by another grant without harm.
//!
//! Control messages (grants, pings and pongs) need credits too. Three rules guarantee that both
//! sides can always grant, ping and answer, in whatever order their messages cross:
//!
//! - Data messages leave the last [`CONTROL_CREDITS`] unused. So at least three receives of each
//!   side are never occupied by messages that the program keeps.
//! - The last credit is used only for a message that carries a grant ([`may_control`]). So the two
//!   sides are never out of credits at the same time. Consider the last message of each side:
//!   either one was sent after the other had arrived, or they crossed and each carries a grant.
//! - A grant message is due if at least two credits can be granted, and one of two conditions
//!   holds: the peer's remaining credits are at most as many as the grant would add, or the peer
//!   has no credit left for data ([`ReceiveWindow::update_due`]). A side with one credit left
//!   therefore always receives a grant. Between two grant messages of a side, at least two messages
//!   from the peer arrive. So two sides that have nothing else to send stop granting.
//!
//! After a message was processed, its receive is not posted again immediately. The free receives
//! are posted together when they are a quarter of the window, or earlier if posting them makes a
//! grant due ([`ReceiveWindow::worth_posting`]).

use crate::limits::{CONTROL_CREDITS, MAX_WINDOW};

/// Returns true if a control message can be sent. The last credit is reserved for a message that carries a grant.
#[must_use]
pub(crate) const fn may_control(tx: &SendWindow, rx: &ReceiveWindow) -> bool {
    match tx.available() {
        0 => false,
        1 => rx.owed() > 0,
        _ => true,
    }
}

/// The credits of the local side: the messages that the peer allows it to send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendWindow {
    limit: u32,
    sent: u32,
}

impl SendWindow {
    /// Creates the window of a connection whose peer has posted `initial` receives.
    #[must_use]
    pub(crate) const fn new(initial: u32) -> Self {
        Self { limit: initial, sent: 0 }
    }

    /// Returns the number of messages of any kind that can be sent now.
    #[must_use]
    #[inline]
    pub(crate) const fn available(&self) -> u32 {
        self.limit.wrapping_sub(self.sent)
    }

    /// Returns the number of data messages that can be sent now. The last credits are reserved for control messages.
    #[must_use]
    #[inline]
    pub(crate) const fn available_for_data(&self) -> u32 {
        self.available().saturating_sub(CONTROL_CREDITS)
    }

    /// Returns true if less than half of the initial credits for data is used. The caller has
    /// checked that the peer has granted no further credits.
    #[must_use]
    pub(crate) const fn is_half_unused(&self) -> bool {
        self.available_for_data() > self.sent
    }

    /// Uses a credit. The caller has checked that one is available.
    #[inline]
    pub(crate) fn take(&mut self) {
        debug_assert!(self.available() > 0, "sending without a credit");
        self.sent = self.sent.wrapping_add(1);
    }

    /// Processes a grant from the peer. An old grant has no effect.
    ///
    /// # Errors
    /// [`InvalidGrant`] if the grant exceeds the largest window, which is a protocol violation of the peer.
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

/// A grant that exceeds the largest window of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidGrant {
    /// The limit in the grant.
    pub(crate) limit: u32,
    /// The number of messages that the local side had sent when the grant arrived, modulo 2^32.
    pub(crate) sent: u32,
}

/// The credits of the peer: the messages that the local side allows the peer to send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceiveWindow {
    /// The number of receives posted since the start, modulo 2^32.
    posted: u32,
    /// The last grant that was sent to the peer.
    granted: u32,
    /// The number of messages received since the start, modulo 2^32.
    received: u32,
}

impl ReceiveWindow {
    /// Creates the window of a connection with `depth` posted receives. The greeting has granted all of them.
    #[must_use]
    pub(crate) const fn new(depth: u32) -> Self {
        Self { posted: depth, granted: depth, received: 0 }
    }

    /// Counts receives that were posted again, and can now be granted to the peer.
    #[inline]
    pub(crate) fn posted(&mut self, count: u32) {
        self.posted = self.posted.wrapping_add(count);
    }

    /// Counts a message that arrived. Returns false if the peer had no credit for it.
    #[inline]
    pub(crate) fn received(&mut self) -> bool {
        if self.granted == self.received {
            return false;
        }
        self.received = self.received.wrapping_add(1);
        true
    }

    /// Returns true if a message has arrived.
    #[must_use]
    pub(crate) const fn has_received(&self) -> bool {
        self.received > 0
    }

    /// Returns the number of messages that the peer may still send.
    #[must_use]
    pub(crate) const fn left(&self) -> u32 {
        self.granted.wrapping_sub(self.received)
    }

    /// Returns the number of posted receives that were not granted to the peer yet.
    #[must_use]
    #[inline]
    pub(crate) const fn owed(&self) -> u32 {
        self.posted.wrapping_sub(self.granted)
    }

    /// Returns true if a separate grant message should be sent now: enough receives are posted and not granted, and the peer has few
    /// credits left. The comment of the [module](self) has the exact rule.
    #[must_use]
    #[inline]
    pub(crate) const fn update_due(&self) -> bool {
        self.update_due_after(0)
    }

    /// Returns true if a separate grant message would be due after `more` additional receives were posted.
    #[must_use]
    #[inline]
    pub(crate) const fn update_due_after(&self, more: u32) -> bool {
        let owed = self.owed().saturating_add(more);
        let left = self.left();
        owed >= 2 && (owed >= left || left <= CONTROL_CREDITS)
    }

    /// Returns true if `free` receives, of `depth` in total, should be posted again now.
    #[must_use]
    #[inline]
    pub(crate) const fn worth_posting(&self, free: u32, depth: u32) -> bool {
        free > 0 && (free >= depth.div_ceil(4) || self.update_due_after(free))
    }

    /// Returns true if `free` receives, of `depth` in total, should be posted again now, or if a grant message is due without posting them.
    #[must_use]
    #[inline]
    pub(crate) const fn grant_due(&self, free: u32, depth: u32) -> bool {
        // If a grant is due before the free receives are posted, a grant is also due after they are posted. So `update_due_after` covers
        // both cases.
        (free > 0 && free >= depth.div_ceil(4)) || self.update_due_after(free)
    }

    /// Returns the grant to send now, and records it as sent to the peer.
    #[inline]
    pub(crate) fn grant(&mut self) -> u32 {
        self.granted = self.posted;
        self.granted
    }

    /// Returns the last grant that was sent to the peer.
    #[must_use]
    #[inline]
    pub(crate) const fn last_grant(&self) -> u32 {
        self.granted
    }

    /// Returns the number of posted receives in which no message has arrived.
    pub(crate) const fn outstanding(&self) -> u32 {
        self.posted.wrapping_sub(self.received)
    }

    /// Returns `None` if the peer can send data now, or after a grant that is due when `more`
    /// additional receives are posted. Otherwise returns the smallest value of
    /// [`ReceiveWindow::outstanding`] for which such a grant is due.
    #[inline]
    pub(crate) fn lacking(&self, more: u32) -> Option<u32> {
        let left = self.left();
        let can_send =
            left > CONTROL_CREDITS || (self.outstanding() + more > CONTROL_CREDITS && self.update_due_after(more));
        (!can_send).then(|| (CONTROL_CREDITS + 1).max(left + 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MIN_WINDOW;
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
        // One credit can be granted. A grant message is due from two credits on.
        assert!(!rx.update_due() && !rx.update_due_after(0) && rx.update_due_after(1));
        rx.grant();
        assert!(rx.received());
    }

    #[test]
    fn the_last_credit_is_for_a_grant() {
        let (mut tx, mut rx) = (SendWindow::new(5), ReceiveWindow::new(5));
        (0..3).for_each(|_| tx.take());
        assert!(may_control(&tx, &rx), "two are left");
        tx.take();
        assert!(!may_control(&tx, &rx), "it would bring nothing");
        assert!(rx.received());
        rx.posted(1);
        assert!(may_control(&tx, &rx));
        tx.take();
        assert!(!may_control(&tx, &rx), "none is left");
    }

    /// One side of the model of a connection. It uses the two windows as a connection does.
    #[derive(Debug)]
    struct End {
        tx: SendWindow,
        rx: ReceiveWindow,
        wants: u32,
        delivered: u32,
        /// The number of receives, in any state.
        depth: u32,
        /// The number of receives that are occupied by messages which the program keeps.
        held: u32,
        /// The number of receives to post again.
        free: u32,
        /// True if the side may have something to post. As in the reactor, a flush skips a side that is not marked.
        marked: bool,
        /// True if the side must send a ping.
        asks: bool,
        owes_answer: bool,
    }

    #[derive(Clone, Copy, Debug)]
    struct ModelMessage {
        kind: ModelMessageKind,
        grant: u32,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum ModelMessageKind {
        Data,
        Grant,
        Question,
        Answer,
    }

    #[derive(Clone, Copy, Debug)]
    enum ModelStep {
        Want { end: usize, count: u32 },
        Send { end: usize },
        Deliver { end: usize, hold: bool },
        Release { end: usize },
        Ask { end: usize },
    }

    fn steps() -> impl Strategy<Value = Vec<ModelStep>> {
        let step = prop_oneof![
            1 => (0..2_usize, 1..40_u32).prop_map(|(end, count)| ModelStep::Want { end, count }),
            3 => (0..2_usize).prop_map(|end| ModelStep::Send { end }),
            3 => (0..2_usize, any::<bool>()).prop_map(|(end, hold)| ModelStep::Deliver { end, hold }),
            1 => (0..2_usize).prop_map(|end| ModelStep::Release { end }),
            1 => (0..2_usize).prop_map(|end| ModelStep::Ask { end }),
        ];
        proptest::collection::vec(step, 1..2000)
    }

    /// Two sides, and the messages that each side has in flight.
    #[derive(Debug)]
    struct Model {
        ends: [End; 2],
        wires: [VecDeque<ModelMessage>; 2],
    }

    impl Model {
        fn new(depths: [u32; 2]) -> Self {
            let end = |own: u32, peer: u32| End {
                tx: SendWindow::new(peer),
                rx: ReceiveWindow::new(own),
                wants: 0,
                delivered: 0,
                depth: own,
                held: 0,
                free: 0,
                marked: false,
                asks: false,
                owes_answer: false,
            };
            Self {
                ends: [end(depths[0], depths[1]), end(depths[1], depths[0])],
                wires: [VecDeque::new(), VecDeque::new()],
            }
        }

        /// Flushes a side as the reactor flushes a connection: posts receives, sends data, and sends a control message if one is due and no
        /// data message makes it unnecessary. Returns the number of messages sent.
        fn flush(&mut self, end: usize) -> u32 {
            let side = &mut self.ends[end];
            if !std::mem::take(&mut side.marked) {
                return 0;
            }
            let control = side.owes_answer || side.asks;
            if side.rx.worth_posting(side.free, side.depth) || control {
                side.rx.posted(std::mem::take(&mut side.free));
            }
            let mut sent = 0;
            while side.wants > 0 && side.tx.available_for_data() > 0 {
                side.wants -= 1;
                side.tx.take();
                sent += 1;
            }
            for nth in 1..=sent {
                // The last message carries the newest grant.
                let grant = if nth == sent { side.rx.grant() } else { side.rx.last_grant() };
                self.wires[end].push_back(ModelMessage { kind: ModelMessageKind::Data, grant });
            }
            if sent > 0 {
                side.owes_answer = false;
            }
            let kind = if side.asks {
                ModelMessageKind::Question
            } else if sent > 0 {
                return sent;
            } else if side.owes_answer {
                ModelMessageKind::Answer
            } else if side.rx.update_due() {
                ModelMessageKind::Grant
            } else {
                return sent;
            };
            if !may_control(&side.tx, &side.rx) {
                return sent;
            }
            side.asks &= kind != ModelMessageKind::Question;
            side.owes_answer = false;
            side.tx.take();
            self.wires[end].push_back(ModelMessage { kind, grant: side.rx.grant() });
            sent + 1
        }

        fn deliver(&mut self, end: usize, hold: bool) -> bool {
            let Some(message) = self.wires[1 - end].pop_front() else { return false };
            let side = &mut self.ends[end];
            assert!(side.rx.received(), "a message came without a credit");
            side.tx.grant(message.grant).unwrap();
            side.owes_answer |= message.kind == ModelMessageKind::Question;
            side.delivered += u32::from(message.kind == ModelMessageKind::Data);
            if message.kind == ModelMessageKind::Data && hold {
                side.held += 1;
            } else {
                side.free += 1;
            }
            // The grant in this message may allow this side to send messages that wait for credits. This message may also make a control
            // message due, even if the program keeps this message.
            side.marked |= side.wants > 0 || side.owes_answer || side.asks;
            side.marked |= side.rx.update_due() || side.rx.worth_posting(side.free, side.depth);
            true
        }

        fn release(&mut self, end: usize, count: u32) {
            let side = &mut self.ends[end];
            let count = count.min(side.held);
            side.held -= count;
            side.free += count;
            side.marked = true;
        }

        fn step(&mut self, step: ModelStep) {
            match step {
                ModelStep::Want { end, count } => {
                    self.ends[end].wants += count;
                    self.ends[end].marked = true;
                }
                ModelStep::Send { end } => {
                    self.flush(end);
                }
                ModelStep::Deliver { end, hold } => {
                    self.deliver(end, hold);
                }
                ModelStep::Release { end } => self.release(end, 1),
                ModelStep::Ask { end } => self.ask(end),
            }
        }

        fn ask(&mut self, end: usize) {
            self.ends[end].asks = true;
            self.ends[end].marked = true;
        }

        /// Runs both sides until neither has anything to send. Returns the number of messages sent.
        fn settle(&mut self, hold: bool) -> u32 {
            let (mut messages, mut progress) = (0, true);
            while std::mem::take(&mut progress) {
                for end in 0..2 {
                    let sent = self.flush(end);
                    messages += sent;
                    progress |= sent > 0;
                    while self.deliver(1 - end, hold) {
                        progress = true;
                    }
                }
                assert!(messages < 100_000, "they never fall silent: {self:?}");
            }
            messages
        }
    }

    proptest! {
        /// Checks random histories of both sides. No message arrives without a posted receive, and no grant is lost. Whatever messages the
        /// programs keep, both sides stop sending when they have nothing to send, and after that a ping of either side is answered. When
        /// the programs release the messages that they keep, all remaining messages are delivered.
        #[test]
        fn no_deadlock_no_overrun_no_lost_grant(
            depths in prop_oneof![[MIN_WINDOW..9, MIN_WINDOW..9], [MIN_WINDOW..40, MIN_WINDOW..40]],
            history in steps(),
        ) {
            let mut model = Model::new(depths);
            let mut wanted = [0_u32; 2];
            for step in history {
                if let ModelStep::Want { end, count } = step { wanted[end] += count; }
                model.step(step);
                for (side, depth) in model.ends.iter().zip(depths) {
                    prop_assert_eq!(side.rx.outstanding() + side.held + side.free, depth, "no receive is lost or added");
                }
            }
            model.settle(true);
            for end in 0..2 {
                prop_assert!(model.ends.iter().all(|side| !side.asks && !side.owes_answer), "deaf: {model:?}");
                model.ask(end);
                prop_assert!(model.settle(true) >= 2, "no answer: {model:?}");
            }
            for end in 0..2 { model.release(end, u32::MAX); }
            let messages = model.settle(false);
            prop_assert!(model.ends.iter().all(|side| side.wants == 0), "stuck: {model:?}");
            prop_assert_eq!(model.ends.each_ref().map(|side| side.delivered), [wanted[1], wanted[0]]);
            prop_assert!(messages <= 2 * (wanted[0] + wanted[1]) + 8, "{messages} messages");
        }
    }
}
