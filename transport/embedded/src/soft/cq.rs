//! Completion queues, and the events that they raise when they are armed.

use std::collections::VecDeque;

use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::CqId;
use rdma_transport::slab::Slab;
use rdma_transport::wc::WorkCompletion;

/// All completion queues of a provider. They are used by one thread.
#[derive(Debug, Default)]
pub struct CompletionQueues {
    queues: Slab<CompletionQueue>, // bound: completions
    events: VecDeque<CqId>,        // bound: completions
    /// True if a queue has raised an event since the last call of [`CompletionQueues::take_edge`].
    edge: bool,
    /// The number of completions that were ever added to any queue, modulo 2^32.
    pushed: u32,
    /// The number of armed queues.
    armed: usize,
}

#[derive(Debug)]
struct CompletionQueue {
    /// The completions in order. The first `polled` of them have been returned by [`CompletionQueues::poll`] and are removed later.
    ring: Vec<WorkCompletion>, // bound: completions
    polled: usize,
    entries: usize,
    /// The number of reserved entries: the depths of all work queues that complete on this queue, and the unpolled completions of destroyed
    /// queue pairs.
    reserved: usize,
    /// The number of work queues that complete on this queue. While this number is not 0, the completion queue cannot be destroyed.
    users: usize,
    armed: bool,
}

/// A new queue allocates memory for at most this number of entries. The memory grows when more completions are in the queue.
const FEW: usize = 256;

const STALE: TransportError = TransportError::Stale { object: "completion queue" };

impl CompletionQueues {
    /// Creates a queue with this number of entries.
    pub fn create(&mut self, entries: usize) -> CqId {
        let ring = Vec::with_capacity(entries.min(FEW));
        CqId(self.queues.insert(CompletionQueue { ring, polled: 0, entries, reserved: 0, users: 0, armed: false }))
    }

    /// Destroys a queue.
    ///
    /// # Errors
    /// Returns an error if the queue does not exist, or if work queues still complete on it.
    pub fn destroy(&mut self, cq: CqId) -> Result<()> {
        let queue = self.queues.get(cq.0).ok_or(STALE)?;
        if queue.users > 0 {
            return Err(TransportError::InvalidState { call: "destroy_cq", state: "using the completion queue" });
        }
        let gone = self.queues.remove(cq.0);
        self.armed -= usize::from(gone.is_some_and(|queue| queue.armed));
        Ok(())
    }

    /// Reserves entries for a work queue with `depth` work requests, so that the completion queue can never overrun.
    ///
    /// # Errors
    /// Returns an error if the completion queue does not exist, or if it has fewer than `depth` free entries.
    pub fn reserve(&mut self, cq: CqId, depth: u32) -> Result<()> {
        let queue = self.queues.get_mut(cq.0).ok_or(STALE)?;
        let reserved = queue.reserved + depth as usize;
        if reserved > queue.entries {
            let (value, range) = (reserved as u64, "at most the entries it was created with");
            return Err(TransportError::OutOfRange { what: "work requests on the completion queue", value, range });
        }
        queue.reserved = reserved;
        queue.users += 1;
        Ok(())
    }

    /// Releases the entries of a work queue with `depth` work requests. `unpolled` is the number of its completions that are still in the
    /// completion queue. These completions keep their entries.
    pub fn release(&mut self, cq: CqId, depth: u32, unpolled: u32) {
        if let Some(queue) = self.queues.get_mut(cq.0) {
            let unpolled = if rdma_transport::planted("an-unpolled-completion-has-no-entry") { 0 } else { unpolled };
            queue.reserved = queue.reserved.saturating_sub(depth.saturating_sub(unpolled) as usize);
            queue.users = queue.users.saturating_sub(1);
        }
    }

    /// Releases one entry, after the caller has polled a completion of a destroyed queue pair.
    pub fn release_orphan(&mut self, cq: CqId) {
        if let Some(queue) = self.queues.get_mut(cq.0) {
            queue.reserved = queue.reserved.saturating_sub(1);
        }
    }

    /// Adds a completion. The caller has reserved an entry for it. If the queue is armed, raises an event and disarms the queue.
    #[inline]
    pub fn push(&mut self, cq: CqId, completion: WorkCompletion) {
        let Some(queue) = self.queues.get_mut(cq.0) else { return };
        debug_assert!(queue.ring.len() - queue.polled < queue.entries, "completion queue overrun");
        queue.ring.push(completion);
        self.pushed = self.pushed.wrapping_add(1);
        if queue.armed {
            queue.armed = false;
            self.armed -= 1;
            self.events.push_back(cq);
            self.edge = true;
        }
    }

    /// Returns the number of completions that were ever added to any queue, modulo 2^32. If a call changes the number, some queue has a new
    /// completion to poll.
    #[must_use]
    #[inline]
    pub const fn pushed(&self) -> u32 {
        self.pushed
    }

    /// Appends up to `max` completions to `out` and returns their number. Copies nothing, and swaps
    /// `out` with the vector of the queue, if all of these conditions hold:
    ///
    /// - `out` is empty.
    /// - The queue has at most `max` completions.
    /// - The vector of the queue contains no completion that was already polled.
    #[inline]
    pub fn poll(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let Some(CompletionQueue { ring, polled, .. }) = self.queues.get_mut(cq.0) else { return Err(STALE) };
        let left = ring.len() - *polled;
        if left == 0 {
            return Ok(0);
        }
        if left <= max && *polled == 0 && out.is_empty() {
            std::mem::swap(ring, out);
            return Ok(left);
        }
        let count = max.min(left);
        out.extend_from_slice(&ring[*polled..*polled + count]);
        *polled += count;
        // The polled completions are removed once they are at least half of the vector. So the removal moves no more completions than were
        // polled.
        if *polled * 2 >= ring.len() {
            ring.drain(..std::mem::take(polled));
        }
        Ok(count)
    }

    /// Arms a queue: its next completion raises an event.
    ///
    /// # Errors
    /// Returns an error if the queue does not exist.
    pub fn arm(&mut self, cq: CqId) -> Result<()> {
        let Some(queue) = self.queues.get_mut(cq.0) else { return Err(STALE) };
        self.armed += usize::from(!std::mem::replace(&mut queue.armed, true));
        Ok(())
    }

    /// Returns true if all queues are armed. In that case, a caller need not arm a queue before it sleeps.
    #[inline]
    pub(crate) fn are_all_armed(&self) -> bool {
        self.armed == self.queues.len()
    }

    /// Removes the oldest event and returns its queue. Skips queues that were destroyed. Returns `None` if there are no events.
    pub fn next_event(&mut self) -> Option<CqId> {
        loop {
            let cq = self.events.pop_front()?;
            if self.queues.get(cq.0).is_some() {
                return Some(cq);
            }
        }
    }

    /// Returns true if a queue has raised an event since the last call of this function.
    pub fn take_edge(&mut self) -> bool {
        std::mem::take(&mut self.edge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma_transport::qp::QpId;
    use rdma_transport::slab::Key;
    use rdma_transport::wc::{WcOpcode, WcStatus};

    fn completion(wr_id: u64) -> WorkCompletion {
        WorkCompletion::new(QpId(Key::new(0, 1)), wr_id, WcOpcode::Send, WcStatus::Success, 0)
    }

    #[test]
    fn one_event_per_arming() {
        let mut cqs = CompletionQueues::default();
        let cq = cqs.create(8);
        cqs.push(cq, completion(0));
        cqs.arm(cq).unwrap();
        assert_eq!(cqs.next_event(), None);
        cqs.push(cq, completion(1));
        cqs.push(cq, completion(2));
        assert!(cqs.take_edge() && !cqs.take_edge());
        assert_eq!((cqs.next_event(), cqs.next_event()), (Some(cq), None));
        let mut out = Vec::new();
        assert_eq!(cqs.poll(cq, 2, &mut out).unwrap(), 2);
        assert_eq!(cqs.poll(cq, 2, &mut out).unwrap(), 1);
        assert_eq!(out.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [0, 1, 2]);
    }

    /// Polling returns each completion once, in order, both when the vectors are swapped and when completions are copied.
    #[test]
    fn each_completion_is_polled_once_in_order() {
        let mut cqs = CompletionQueues::default();
        let cq = cqs.create(2000);
        let (mut next, mut seen, mut out) = (0, 0, Vec::new());
        for round in 0..200 {
            for _ in 0..round % 17 {
                cqs.push(cq, completion(next));
                next += 1;
            }
            let kept = if round % 3 == 0 { out.len() } else { 0 };
            out.truncate(kept);
            let count = cqs.poll(cq, 1 + round % 13, &mut out).unwrap();
            assert!(out.len() == kept + count && count <= 1 + round % 13);
            for wc in &out[kept..] {
                assert_eq!(wc.wr_id, seen);
                seen += 1;
            }
        }
        out.clear();
        assert_eq!(cqs.poll(cq, 2000, &mut out).unwrap() as u64, next - seen);
        assert_eq!((cqs.pushed() as u64, cqs.poll(cq, 1, &mut out).unwrap()), (next, 0));
    }

    #[test]
    fn room_is_kept_for_every_work_request() {
        let mut cqs = CompletionQueues::default();
        let cq = cqs.create(8);
        cqs.reserve(cq, 6).unwrap();
        assert!(matches!(cqs.reserve(cq, 3), Err(TransportError::OutOfRange { value: 9, .. })));
        assert!(cqs.destroy(cq).is_err());
        cqs.release(cq, 6, 2);
        assert!(cqs.reserve(cq, 7).is_err());
        cqs.release_orphan(cq);
        cqs.reserve(cq, 7).unwrap();
        cqs.release(cq, 7, 0);
        cqs.destroy(cq).unwrap();
        assert!(matches!(cqs.arm(cq), Err(TransportError::Stale { .. })));
    }
}
