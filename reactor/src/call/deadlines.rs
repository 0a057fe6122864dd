//! The deadlines of all calls. They share one timer of the reactor.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use crate::transport::slab::Key;
use crate::{ConnectionId, Context, TimerId};

/// The deadline of a call: the time, and the connection and key of the call.
pub(super) type CallDeadline = (Instant, ConnectionId, Key);

/// The heap may contain this many entries of ended calls, plus one for each call in flight.
/// [`Deadlines::prune`] enforces this limit after each new call.
const MAX_STALE: usize = 64;

/// The deadlines of a reactor's calls. When a call ends, its entry stays in the heap. The entry is removed when it becomes the first entry
/// of the heap, or by [`Deadlines::prune`].
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    heap: BinaryHeap<Reverse<CallDeadline>>, // bound: calls
    /// The time at which the timer expires, and the timer. That time is not later than the first deadline. `None` if no timer is set.
    armed: Option<(Instant, TimerId)>,
}

impl Deadlines {
    #[inline]
    pub(super) fn insert(&mut self, cx: &mut Context<'_>, due: CallDeadline) {
        self.heap.push(Reverse(due));
        if self.armed.is_none_or(|(at, _)| due.0 < at) {
            self.arm(cx, due.0);
        }
    }

    /// Removes the entries of calls that have ended, if their number exceeds the number of calls in flight plus [`MAX_STALE`].
    #[inline]
    pub(super) fn prune(&mut self, in_flight: usize, is_in_flight: impl Fn(&CallDeadline) -> bool) {
        if self.heap.len() > 2 * in_flight + MAX_STALE {
            self.heap.retain(|Reverse(due)| is_in_flight(due));
        }
    }

    /// Handles the expiry of a timer. Returns true if `timer` was the timer of the deadlines: the caller must then set this timer again.
    /// Returns false if `timer` was another timer.
    pub(super) fn has_fired(&mut self, timer: TimerId) -> bool {
        self.armed.take_if(|(_, armed)| *armed == timer).is_some()
    }

    /// Removes and returns the earliest deadline if it has passed; `None` if no deadline has passed.
    pub(super) fn next(&mut self, now: Instant) -> Option<CallDeadline> {
        let Reverse(due) = self.heap.peek().copied()?;
        if due.0 > now || crate::planted("a-call-outlives-its-deadline") {
            return None;
        }
        self.heap.pop().map(|Reverse(due)| due)
    }

    /// Lets the timer expire in the next turn.
    #[cold]
    pub(super) fn expire(&mut self, cx: &mut Context<'_>) {
        self.arm(cx, cx.now());
    }

    /// Sets the timer for the earliest deadline of a call that is in flight. Removes the earlier entries of ended calls from the heap.
    pub(super) fn rearm(&mut self, cx: &mut Context<'_>, is_in_flight: impl Fn(&CallDeadline) -> bool) {
        while let Some(&Reverse(due)) = self.heap.peek() {
            if is_in_flight(&due) {
                return self.arm(cx, due.0);
            }
            self.heap.pop();
        }
    }

    #[cold]
    fn arm(&mut self, cx: &mut Context<'_>, at: Instant) {
        if let Some((_, timer)) = self.armed.take() {
            cx.timers().cancel(timer);
        }
        let delay = at.saturating_duration_since(cx.now());
        let timer = cx.timers().set(delay, 0);
        self.armed = Some((at, timer));
    }
}
