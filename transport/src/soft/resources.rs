//! The objects that the queue pairs of a provider share: completion queues, memory regions, shared receive queues.

use std::collections::{BTreeMap, VecDeque};

use super::cq::CompletionQueues;
use super::keys::KeyTable;
use super::srq::SharedReceiveQueue;
use crate::error::{Result, TransportError};
use crate::provider::CqId;
use crate::qp::{QpId, SrqId};
use crate::slab::{Key, Slab};
use crate::wr::RecvWr;

const STALE: TransportError = TransportError::Stale { object: "shared receive queue" };

/// The objects that the queue pairs of a provider share.
#[derive(Debug, Default)]
pub struct Resources {
    /// The completion queues.
    pub cqs: CompletionQueues,
    /// The memory regions.
    pub keys: KeyTable,
    srqs: Slab<SharedReceiveQueue>,
    /// For each destroyed queue pair: its shared receive queue, and the number of its receive completions that are not polled yet.
    orphans: BTreeMap<Key, (SrqId, u32)>,
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
            if let Ok(place) = self.srq(srq) {
                *place = queue;
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
        let mut left = 0;
        self.orphans.retain(|_, orphan| {
            left += if orphan.0 == srq { orphan.1 } else { 0 };
            orphan.0 != srq
        });
        if let Some(queue) = self.srqs.remove(srq.0) {
            queue.release(left, &mut self.cqs);
        }
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
                self.orphans.insert(qp.0, (srq, unpolled));
            }
        }
    }

    /// Records that a completion of a destroyed queue pair was polled. For a receive from a shared receive queue, releases a slot of the
    /// shared queue. For any other completion, releases an entry of the completion queue.
    pub fn orphan_polled(&mut self, cq: CqId, qp: QpId, is_receive: bool) {
        let Some((srq, left)) = self.orphans.get_mut(&qp.0).filter(|_| is_receive) else {
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
