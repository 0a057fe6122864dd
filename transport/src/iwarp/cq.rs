//! Completion queues, and the events of those that were armed.

use std::collections::VecDeque;

use crate::error::{Error, Result};
use crate::provider::CqId;
use crate::slab::Slab;
use crate::wc::WorkCompletion;

#[derive(Debug)]
struct CompletionQueue {
    ring: VecDeque<WorkCompletion>,
    entries: usize,
    /// Entries that are promised to the work queues of queue pairs, and entries in the ring that destroyed queue pairs
    /// left there.
    reserved: usize,
    /// Work queues that complete here.
    users: usize,
    armed: bool,
}

/// All completion queues of a provider.
#[derive(Debug, Default)]
pub(crate) struct Completions {
    queues: Slab<CompletionQueue>,
    events: VecDeque<CqId>,
    /// Whether an event came since the last [`Completions::take_edge`].
    edge: bool,
}

/// Number of completions that are faster moved one by one.
const FEW: usize = 3;

const STALE: Error = Error::Stale { object: "completion queue" };

impl Completions {
    pub(crate) fn create(&mut self, entries: usize) -> CqId {
        let ring = VecDeque::with_capacity(entries);
        CqId(self.queues.insert(CompletionQueue { ring, entries, reserved: 0, users: 0, armed: false }))
    }

    pub(crate) fn destroy(&mut self, cq: CqId) -> Result<()> {
        let queue = self.queues.get(cq.0).ok_or(STALE)?;
        if queue.users > 0 {
            return Err(Error::InvalidState { call: "destroy_cq", state: "using the completion queue" });
        }
        self.queues.remove(cq.0);
        Ok(())
    }

    /// Reserves room for a work queue of `depth`, so that the completion queue can never overrun.
    pub(crate) fn reserve(&mut self, cq: CqId, depth: u32) -> Result<()> {
        let queue = self.queues.get_mut(cq.0).ok_or(STALE)?;
        let reserved = queue.reserved + depth as usize;
        if reserved > queue.entries {
            let (value, range) = (reserved as u64, "at most the entries it was created with");
            return Err(Error::OutOfRange { what: "work requests on the completion queue", value, range });
        }
        queue.reserved = reserved;
        queue.users += 1;
        Ok(())
    }

    /// Gives the room of a work queue back, except for its `unpolled` completions that are still in the ring.
    pub(crate) fn release(&mut self, cq: CqId, depth: u32, unpolled: u32) {
        if let Some(queue) = self.queues.get_mut(cq.0) {
            queue.reserved = queue.reserved.saturating_sub(depth.saturating_sub(unpolled) as usize);
            queue.users = queue.users.saturating_sub(1);
        }
    }

    /// Gives back the room of one completion that a destroyed queue pair left and that was polled now.
    pub(crate) fn release_orphan(&mut self, cq: CqId) {
        if let Some(queue) = self.queues.get_mut(cq.0) {
            queue.reserved = queue.reserved.saturating_sub(1);
        }
    }

    #[inline]
    pub(crate) fn push(&mut self, cq: CqId, completion: WorkCompletion) {
        let Some(queue) = self.queues.get_mut(cq.0) else { return };
        debug_assert!(queue.ring.len() < queue.entries, "completion queue overrun");
        queue.ring.push_back(completion);
        if queue.armed {
            queue.armed = false;
            self.events.push_back(cq);
            self.edge = true;
        }
    }

    /// Moves up to `max` completions to `out`; returns how many.
    #[inline]
    pub(crate) fn poll(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let Some(CompletionQueue { ring, .. }) = self.queues.get_mut(cq.0) else { return Err(STALE) };
        let count = max.min(ring.len());
        if count <= FEW {
            for _ in 0..count {
                out.extend(ring.pop_front());
            }
            return Ok(count);
        }
        // Two copies of what lies together, not one for each completion.
        let (front, back) = ring.as_slices();
        let first = count.min(front.len());
        out.extend_from_slice(&front[..first]);
        out.extend_from_slice(&back[..count - first]);
        ring.drain(..count);
        Ok(count)
    }

    pub(crate) fn arm(&mut self, cq: CqId) -> Result<()> {
        let Some(queue) = self.queues.get_mut(cq.0) else { return Err(STALE) };
        queue.armed = true;
        Ok(())
    }

    /// The next queue with an event, if it still exists.
    pub(crate) fn next_event(&mut self) -> Option<CqId> {
        loop {
            let cq = self.events.pop_front()?;
            if self.queues.get(cq.0).is_some() {
                return Some(cq);
            }
        }
    }

    /// Whether events came since the last call.
    pub(crate) fn take_edge(&mut self) -> bool {
        std::mem::take(&mut self.edge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qp::QpId;
    use crate::slab::Key;
    use crate::wc::{WcOpcode, WcStatus};

    fn completion(wr_id: u64) -> WorkCompletion {
        WorkCompletion {
            wr_id,
            qp: QpId(Key::new(0, 1)),
            status: WcStatus::Success,
            opcode: WcOpcode::Send,
            byte_len: 0,
            vendor_error: 0,
            immediate: None,
            invalidated: None,
            source: crate::datagram::DatagramSource::default(),
        }
    }

    #[test]
    fn one_event_per_arming() {
        let mut cqs = Completions::default();
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

    #[test]
    fn room_is_kept_for_every_work_request() {
        let mut cqs = Completions::default();
        let cq = cqs.create(8);
        cqs.reserve(cq, 6).unwrap();
        assert!(matches!(cqs.reserve(cq, 3), Err(Error::OutOfRange { value: 9, .. })));
        assert!(cqs.destroy(cq).is_err());
        cqs.release(cq, 6, 2);
        assert!(cqs.reserve(cq, 7).is_err());
        cqs.release_orphan(cq);
        cqs.reserve(cq, 7).unwrap();
        cqs.release(cq, 7, 0);
        cqs.destroy(cq).unwrap();
        assert!(matches!(cqs.arm(cq), Err(Error::Stale { .. })));
    }
}
