//! The deadlines of calls, which share one timer of the reactor.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use crate::transport::slab::Key;
use crate::{ConnectionId, Context, TimerId};

/// The deadline of a call: the time, and the connection and key of the call.
pub(super) type CallDeadline = (Instant, ConnectionId, Key);

/// Number of entries of ended calls that may stay in the heap, in addition to the number of calls in flight.
const MAX_STALE: usize = 64;

/// The deadlines of a reactor's calls. An entry of a call that has ended stays until it is the first one, or until [`Deadlines::prune`]
/// removes it.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    heap: BinaryHeap<Reverse<CallDeadline>>,
    /// The timer and its time, which is not later than the first deadline.
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

    /// Removes the entries of calls that have ended, if there are more than [`MAX_STALE`] and the number of calls in flight.
    #[inline]
    pub(super) fn prune(&mut self, in_flight: usize, is_in_flight: impl Fn(&CallDeadline) -> bool) {
        if self.heap.len() > 2 * in_flight + MAX_STALE {
            self.heap.retain(|Reverse(due)| is_in_flight(due));
        }
    }

    /// Returns true if `timer` is the timer of the deadlines, which is unset then.
    pub(super) fn has_fired(&mut self, timer: TimerId) -> bool {
        self.armed.take_if(|(_, armed)| *armed == timer).is_some()
    }

    /// Removes and returns the first deadline that is over.
    pub(super) fn next(&mut self, now: Instant) -> Option<CallDeadline> {
        let Reverse(due) = self.heap.peek().copied()?;
        if due.0 > now || cfg!(planted = "a-call-outlives-its-deadline") {
            return None;
        }
        self.heap.pop().map(|Reverse(due)| due)
    }

    /// Sets the timer for the first deadline of a call in flight.
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
            cx.cancel_timer(timer);
        }
        let timer = cx.set_timer(at.saturating_duration_since(cx.now()), 0);
        self.armed = Some((at, timer));
    }
}
