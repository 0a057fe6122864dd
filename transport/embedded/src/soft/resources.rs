//! The objects that the queue pairs of a provider share: completion queues, memory regions, shared receive queues.

use std::collections::{BTreeMap, VecDeque};

use super::cq::CompletionQueues;
use super::keys::KeyTable;
use super::srq::SharedReceiveQueue;
use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::CqId;
use rdma_transport::qp::{QpId, SrqId};
use rdma_transport::slab::{Key, Slab};
use rdma_transport::wr::RecvWr;

const STALE: TransportError = TransportError::Stale { object: "shared receive queue" };

/// The objects that the queue pairs of a provider share.
#[derive(Debug, Default)]
pub struct Resources {
    /// The completion queues.
    pub cqs: CompletionQueues,
    /// The memory regions.
    pub keys: KeyTable,
    srqs: Slab<SharedReceiveQueue>, // local: one for each device
    /// For each destroyed queue pair: its shared receive queue, the completion queue of its receives, and the number of its receive
    /// completions that are not polled yet.
    orphans: BTreeMap<Key, (SrqId, CqId, u32)>, // bound: completions
}

impl Resources {
    /// Creates a shared receive queue with room for `depth` receives.
    pub fn create_srq(&mut self, depth: u32) -> SrqId {
        SrqId(self.srqs.insert(SharedReceiveQueue::new(depth)))
    }

    /// Returns a shared receive queue.
    ///
    /// # Errors
    /// Returns an error if the queue does not exist.
    pub fn srq(&mut self, srq: SrqId) -> Result<&mut SharedReceiveQueue> {
        self.srqs.get_mut(srq.0).ok_or(STALE)
    }

    /// Moves a shared receive queue out of its table, so that a queue pair can borrow the queue and the other resources at the same time.
    /// Returns `None` if `srq` is `None` or the queue does not exist. The caller moves the queue back with [`Resources::put_back`].
    #[inline]
    pub(crate) fn take_out(&mut self, srq: Option<SrqId>) -> Option<SharedReceiveQueue> {
        srq.and_then(|srq| self.srq(srq).ok().map(std::mem::take))
    }

    /// Moves a shared receive queue back to its table, after [`Resources::take_out`].
    #[inline]
    pub(crate) fn put_back(&mut self, srq: Option<SrqId>, queue: Option<SharedReceiveQueue>) {
        if let (Some(srq), Some(queue)) = (srq, queue) {
            if let Ok(slot) = self.srq(srq) {
                *slot = queue;
            }
        }
    }

    /// Destroys a shared receive queue and drops its receives.
    ///
    /// # Errors
    /// Returns an error if the queue does not exist, or if queue pairs use it.
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<()> {
        if self.srq(srq)?.is_used() {
            return Err(TransportError::InvalidState { call: "destroy_srq", state: "using the shared receive queue" });
        }
        if let Some(queue) = self.srqs.remove(srq.0) {
            let orphans = &self.orphans;
            let left = |cq: CqId| -> u32 {
                let of = orphans.values().filter(|orphan| (orphan.0, orphan.1) == (srq, cq));
                of.map(|orphan| orphan.2).sum()
            };
            queue.release(left, &mut self.cqs);
        }
        self.orphans.retain(|_, orphan| orphan.0 != srq);
        Ok(())
    }

    /// Adds a queue pair to a shared receive queue. The receives of the queue pair complete on `cq`. If `cq` is new to the shared queue,
    /// reserves entries on `cq` for all receives.
    pub fn attach(&mut self, srq: SrqId, cq: CqId) -> Result<()> {
        self.srqs.get_mut(srq.0).ok_or(STALE)?.attach(cq, &mut self.cqs)
    }

    /// Removes a destroyed queue pair from its shared receive queue. The receives in `begun`, which the queue pair had taken but not
    /// completed, return to the shared queue. `unpolled` is the number of the queue pair's receive completions that are not polled yet.
    pub fn detach(&mut self, srq: SrqId, cq: CqId, qp: QpId, begun: VecDeque<RecvWr>, unpolled: u32) {
        if let Ok(queue) = self.srq(srq) {
            queue.detach(cq);
            begun.into_iter().rev().for_each(|wr| queue.untake(wr));
            if unpolled > 0 {
                self.orphans.insert(qp.0, (srq, cq, unpolled));
            }
        }
    }

    /// Records that a completion of a destroyed queue pair was polled. For a receive from a shared receive queue, releases a slot of the
    /// shared queue. For any other completion, releases an entry of the completion queue.
    pub fn orphan_polled(&mut self, cq: CqId, qp: QpId, is_receive: bool) {
        let Some((srq, _, left)) = self.orphans.get_mut(&qp.0).filter(|_| is_receive) else {
            return self.cqs.release_orphan(cq);
        };
        let srq = *srq;
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.orphans.remove(&qp.0);
        }
        self.receive_polled(srq);
    }

    /// Records that the completion of a receive from a shared receive queue was polled. This releases the receive's slot in the shared
    /// queue.
    pub fn receive_polled(&mut self, srq: SrqId) {
        if let Ok(queue) = self.srq(srq) {
            queue.give_back(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The receives of a shared queue complete on two completion queues. When the shared queue is destroyed, each completion queue keeps
    /// entries for its own unpolled completions only, and releases them when they are polled.
    #[test]
    fn entries_are_kept_only_where_completions_are_not_polled() {
        let mut resources = Resources::default();
        let (a, b) = (resources.cqs.create(4), resources.cqs.create(4));
        let srq = resources.create_srq(4);
        let [of_a, of_b] = [1, 2].map(|slot| QpId(Key::new(slot, 1)));
        for cq in [a, b] {
            resources.attach(srq, cq).unwrap();
        }
        resources.detach(srq, a, of_a, VecDeque::new(), 2);
        resources.detach(srq, b, of_b, VecDeque::new(), 0);
        resources.destroy_srq(srq).unwrap();
        assert!(resources.cqs.reserve(a, 3).is_err());
        resources.cqs.reserve(b, 4).unwrap();
        for _ in 0..2 {
            resources.orphan_polled(a, of_a, true);
        }
        resources.cqs.reserve(a, 4).unwrap();
    }
}
