//! Shared receive queues. Several queue pairs consume the receives of one shared receive queue.

use std::collections::VecDeque;

use super::cq::CompletionQueues;
use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::CqId;
use rdma_transport::wr::RecvWr;

/// A shared receive queue.
#[derive(Debug, Default)]
pub struct SharedReceiveQueue {
    posted: VecDeque<RecvWr>, // bound: shared-receives
    depth: u32,
    /// The number of receives that queue pairs have taken and whose completions are not polled yet. These receives still occupy slots of
    /// the queue.
    taken: u32,
    targets: Targets,
}

impl SharedReceiveQueue {
    /// Creates an empty queue with room for `depth` receives.
    pub fn new(depth: u32) -> Self {
        Self { posted: VecDeque::with_capacity(depth as usize), depth, taken: 0, targets: Targets::default() }
    }

    /// Adds a receive.
    ///
    /// # Errors
    /// Returns an error if the queue is full.
    pub fn post(&mut self, wr: RecvWr) -> Result<()> {
        if self.posted.len() + self.taken as usize >= self.depth as usize {
            return Err(TransportError::QueueFull { queue: "shared receive", depth: self.depth });
        }
        self.posted.push_back(wr);
        Ok(())
    }

    /// Removes and returns the next receive, for a queue pair with a new message. Returns `None` if the queue is empty.
    #[inline]
    pub fn take(&mut self) -> Option<RecvWr> {
        let wr = self.posted.pop_front()?;
        self.taken += 1;
        Some(wr)
    }

    /// Puts a receive back to the front of the queue, after the queue pair that had taken the receive was destroyed.
    pub fn untake(&mut self, wr: RecvWr) {
        self.give_back(1);
        self.posted.push_front(wr);
    }

    /// Releases the slots of `count` receives whose completions were polled.
    pub fn give_back(&mut self, count: u32) {
        self.taken = self.taken.saturating_sub(count);
    }

    /// Adds a queue pair that completes its receives on `cq`. If no queue pair was added for `cq` before, reserves entries on `cq` for all
    /// receives.
    pub fn attach(&mut self, cq: CqId, cqs: &mut CompletionQueues) -> Result<()> {
        self.targets.attach(cq, || cqs.reserve(cq, self.depth))
    }

    /// Removes a queue pair that completed its receives on `cq`.
    pub fn detach(&mut self, cq: CqId) {
        self.targets.detach(cq);
    }

    /// Returns true if any queue pair uses this shared queue.
    pub fn is_used(&self) -> bool {
        self.targets.is_used()
    }

    /// Releases the reserved entries on the completion queues. `left` returns the number of
    /// unpolled completions that receives of this shared queue have on a completion queue. These
    /// completions keep their entries.
    pub fn release(&self, left: impl Fn(CqId) -> u32, cqs: &mut CompletionQueues) {
        for cq in self.targets.iter() {
            cqs.release(cq, self.depth, left(cq));
        }
    }
}

/// The completion queues on which entries are reserved for all receives of a shared queue. With each completion queue is the number of
/// queue pairs that complete their receives on it. A destroyed queue pair may leave unpolled completions. So the entries stay reserved
/// until the shared queue is destroyed.
#[derive(Debug, Default)]
// bound: completions
struct Targets(Vec<(CqId, usize)>);

impl Targets {
    /// Adds a queue pair that completes its receives on `cq`. If no queue pair was added for `cq` before, calls `reserve` to reserve the
    /// entries.
    ///
    /// # Errors
    /// Returns the error of `reserve`. In that case, the queue pair is not added.
    fn attach<E>(
        &mut self,
        cq: CqId,
        reserve: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        if let Some(target) = self.0.iter_mut().find(|target| target.0 == cq) {
            target.1 += 1;
            return Ok(());
        }
        reserve()?;
        self.0.push((cq, 1));
        Ok(())
    }

    /// Removes a queue pair that completed its receives on `cq`.
    fn detach(&mut self, cq: CqId) {
        if let Some(target) = self.0.iter_mut().find(|target| target.0 == cq) {
            target.1 = target.1.saturating_sub(1);
        }
    }

    /// Returns true if any queue pair uses the shared queue.
    fn is_used(&self) -> bool {
        self.0.iter().any(|target| target.1 > 0)
    }

    /// Returns the completion queues on which entries are reserved.
    fn iter(&self) -> impl Iterator<Item = CqId> {
        self.0.iter().map(|target| target.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma_transport::slab::Key;

    #[test]
    fn room_is_made_once_and_kept() {
        let mut targets = Targets::default();
        let [a, b] = [1, 2].map(|slot| CqId(Key::new(slot, 1)));
        let mut made = 0;
        for cq in [a, b, a] {
            let reserve = || {
                made += 1;
                Ok::<_, ()>(())
            };
            targets.attach(cq, reserve).unwrap();
        }
        assert_eq!((made, targets.attach(CqId(Key::new(3, 1)), || Err(7))), (2, Err(7)));
        for (cq, used) in [(a, true), (b, true), (a, false), (a, false)] {
            targets.detach(cq);
            assert_eq!(targets.is_used(), used);
        }
        assert_eq!(targets.iter().collect::<Vec<_>>(), [a, b]);
    }
}
