//! The Reads and atomic operations of the peer, oldest first, until their responses are completely
//! transmitted. The responses are transmitted in the order of the requests.

use std::collections::VecDeque;

/// A request of the peer. `done` is the number of bytes of its response that are transmitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingResponse<R> {
    pub(crate) request: R,
    pub(crate) done: u32,
}

/// The responses that the local side owes to the peer.
#[derive(Debug)]
pub(crate) struct PendingResponses<R> {
    queue: VecDeque<PendingResponse<R>>, // bound: reads
    limit: usize,
    /// True if a pending response is transmitted before the next work request. Responses and work
    /// requests alternate while both are pending.
    pub(crate) goes_next: bool,
}

impl<R> PendingResponses<R> {
    /// Creates an empty queue. `ird` is the number of requests that the peer may have outstanding
    /// by agreement. The limit is that number, rounded up to a power of two, plus one, because siw
    /// may have more requests outstanding than agreed.
    pub(crate) fn new(ird: u16) -> Self {
        let limit = usize::from(ird.max(1)).next_power_of_two() + 1;
        Self { queue: VecDeque::new(), limit, goes_next: false }
    }

    /// Returns false if the peer has as many requests outstanding as allowed, so that one more is
    /// a violation.
    pub(crate) fn has_room(&self) -> bool {
        self.queue.len() < self.limit
    }

    /// Adds a request. The caller has checked [`PendingResponses::has_room`].
    pub(crate) fn push(&mut self, request: R) {
        self.queue.push_back(PendingResponse { request, done: 0 });
    }

    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns the oldest request.
    #[inline]
    pub(crate) fn front(&self) -> Option<&PendingResponse<R>> {
        self.queue.front()
    }

    /// Records that `n` more bytes of the response to the oldest request are transmitted. If `last`
    /// is true, the response is complete: the request is removed, and a waiting work request is
    /// sent before the next response.
    pub(crate) fn advance(&mut self, n: usize, last: bool) {
        if last {
            self.queue.pop_front();
            self.goes_next = false;
        } else if let Some(front) = self.queue.front_mut() {
            front.done = front.done.saturating_add(n as u32);
        }
    }

    /// Removes all requests: the connection has ended.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
    }
}

#[cfg(all(test, not(loom_model)))]
mod tests {
    use super::*;

    /// The limit is a power of two plus one. Only the last part of a response frees its slot, and
    /// `advance` without a pending response does nothing.
    #[test]
    fn the_peer_has_a_limited_number_outstanding() {
        for (ird, limit) in [(0, 2), (1, 2), (2, 3), (3, 5), (128, 129)] {
            let mut responses = PendingResponses::new(ird);
            responses.advance(1, true);
            while responses.has_room() {
                responses.push(());
            }
            assert_eq!(responses.queue.len(), limit, "{ird}");
            responses.goes_next = true;
            responses.advance(3, false);
            responses.advance(usize::MAX, false);
            assert!(!responses.has_room() && responses.goes_next);
            responses.advance(0, true);
            assert!(responses.has_room() && !responses.goes_next);
            assert_eq!(responses.front().map(|pending| pending.done), (limit > 1).then_some(0));
            responses.clear();
            assert!(responses.is_idle() && responses.has_room());
        }
    }
}
