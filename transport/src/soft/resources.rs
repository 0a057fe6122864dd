//! The objects that the queue pairs of a provider share: completion queues, memory regions, shared receive queues.

use std::collections::{BTreeMap, VecDeque};

use super::cq::CompletionQueues;
use super::keys::KeyTable;
use super::srq::SharedReceiveQueue;
use crate::error::{Error, Result};
use crate::provider::CqId;
use crate::qp::{QpId, SrqId};
use crate::slab::{Key, Slab};
use crate::wr::RecvWr;

const STALE: Error = Error::Stale { object: "shared receive queue" };

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Resources {
    /// The completion queues.
    pub cqs: CompletionQueues,
    /// The memory regions.
    pub keys: KeyTable,
    srqs: Slab<SharedReceiveQueue>,
    /// The number of completions that were not polled, of receives from a shared queue, for queue pairs that are
    /// destroyed.
    orphans: BTreeMap<Key, (SrqId, u32)>,
}

impl Resources {
    /// Makes a shared queue of that many receives.
    pub fn create_srq(&mut self, depth: u32) -> SrqId {
        SrqId(self.srqs.insert(SharedReceiveQueue::new(depth)))
    }

    /// Returns a shared queue.
    ///
    /// # Errors
    /// There is no such queue.
    pub fn srq(&mut self, srq: SrqId) -> Result<&mut SharedReceiveQueue> {
        self.srqs.get_mut(srq.0).ok_or(STALE)
    }

    /// Takes a shared queue out of its place, for a queue pair that uses it beside the other objects. [`Resources::put_back`] follows.
    #[inline]
    pub(crate) fn take_out(&mut self, srq: Option<SrqId>) -> Option<SharedReceiveQueue> {
        srq.and_then(|srq| self.srq(srq).ok().map(std::mem::take))
    }

    /// Puts a shared queue back that was taken out.
    #[inline]
    pub(crate) fn put_back(&mut self, srq: Option<SrqId>, queue: Option<SharedReceiveQueue>) {
        if let (Some(srq), Some(queue)) = (srq, queue) {
            if let Ok(place) = self.srq(srq) {
                *place = queue;
            }
        }
    }

    /// Destroys a shared queue. Its receives are dropped.
    ///
    /// # Errors
    /// There is no such queue, or queue pairs use it.
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<()> {
        if self.srq(srq)?.is_used() {
            return Err(Error::InvalidState { call: "destroy_srq", state: "using the shared receive queue" });
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

    /// Lets a queue pair complete receives of a shared queue on `cq`.
    pub fn attach(&mut self, srq: SrqId, cq: CqId) -> Result<()> {
        self.srqs.get_mut(srq.0).ok_or(STALE)?.attach(cq, &mut self.cqs)
    }

    /// Takes note that a queue pair is destroyed. Receives that it had `begun` go back to the shared queue; `unpolled`
    /// is the number of its receive completions that were not polled.
    pub fn detach(&mut self, srq: SrqId, cq: CqId, qp: QpId, begun: VecDeque<RecvWr>, unpolled: u32) {
        if let Ok(queue) = self.srq(srq) {
            queue.detach(cq);
            begun.into_iter().rev().for_each(|wr| queue.untake(wr));
            if unpolled > 0 {
                self.orphans.insert(qp.0, (srq, unpolled));
            }
        }
    }

    /// Takes note that a completion of a destroyed queue pair was polled.
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

    /// Takes note that the completion of a shared receive was polled, which frees its place.
    pub fn receive_polled(&mut self, srq: SrqId) {
        if let Ok(queue) = self.srq(srq) {
            queue.give_back(1);
        }
    }
}
