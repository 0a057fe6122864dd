//! The deadlines of calls, behind one timer of the reactor.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use crate::transport::slab::Key;
use crate::{ConnectionId, Context, TimerId};

/// The deadline of a call.
pub(super) type Due = (Instant, ConnectionId, Key);

/// Entries that may be left of calls that have ended, besides as many as there are calls in flight.
const LEFT: usize = 64;

/// Deadlines. That of a call that has ended stays until it surfaces, or until too many have gathered.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    heap: BinaryHeap<Reverse<Due>>,
    /// The timer, and its time. It is not later than the first deadline.
    armed: Option<(Instant, TimerId)>,
}

impl Deadlines {
    #[inline]
    pub(super) fn insert(&mut self, cx: &mut Context<'_>, due: Due) {
        self.heap.push(Reverse(due));
        if self.armed.is_none_or(|(at, _)| due.0 < at) {
            self.arm(cx, due.0);
        }
    }

    /// Removes the deadlines of calls that have ended, if there are too many of them.
    #[inline]
    pub(super) fn tidy(&mut self, in_flight: usize, is_live: impl Fn(&Due) -> bool) {
        if self.heap.len() > 2 * in_flight + LEFT {
            self.heap.retain(|Reverse(due)| is_live(due));
        }
    }

    /// Returns true if the timer is the one of the deadlines.
    pub(super) fn has_fired(&mut self, timer: TimerId) -> bool {
        self.armed.take_if(|(_, armed)| *armed == timer).is_some()
    }

    /// Takes the first deadline that is over.
    pub(super) fn next(&mut self, now: Instant) -> Option<Due> {
        let Reverse(due) = self.heap.peek().copied()?;
        if due.0 > now || cfg!(planted = "a-call-outlives-its-deadline") {
            return None;
        }
        self.heap.pop().map(|Reverse(due)| due)
    }

    /// Sets the timer for the first deadline of a call in flight.
    pub(super) fn rearm(&mut self, cx: &mut Context<'_>, is_live: impl Fn(&Due) -> bool) {
        while let Some(&Reverse(due)) = self.heap.peek() {
            if is_live(&due) {
                return self.arm(cx, due.0);
            }
            self.heap.pop();
        }
    }

    #[cold]
    fn arm(&mut self, cx: &mut Context<'_>, at: Instant) {
        if let Some((_, timer)) = self.armed.take() {
            cx.cancel_timer(timer);
        }
        let timer = cx.set_timer(at.saturating_duration_since(cx.now()), 0);
        self.armed = Some((at, timer));
    }
}
