//! Shared receive queues, from which several queue pairs take their receives.

use std::collections::VecDeque;

use super::cq::Completions;
use crate::error::{Error, Result};
use crate::provider::CqId;
use crate::wr::RecvWr;

#[derive(Debug, Default)]
pub(crate) struct SharedReceiveQueue {
    posted: VecDeque<RecvWr>,
    depth: u32,
    /// Receives that a queue pair has taken and that were not polled as completed.
    taken: u32,
    /// The completion queues that have room for all receives of this queue, each with the number of queue pairs that
    /// complete there.
    targets: Vec<(CqId, usize)>,
}

impl SharedReceiveQueue {
    pub(crate) fn new(depth: u32) -> Self {
        Self { posted: VecDeque::with_capacity(depth as usize), depth, taken: 0, targets: Vec::new() }
    }

    pub(crate) fn post(&mut self, wr: RecvWr) -> Result<()> {
        if self.posted.len() + self.taken as usize >= self.depth as usize {
            return Err(Error::QueueFull { queue: "shared receive", depth: self.depth });
        }
        self.posted.push_back(wr);
        Ok(())
    }

    /// The next receive, for a message that begins.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<RecvWr> {
        let wr = self.posted.pop_front()?;
        self.taken += 1;
        Some(wr)
    }

    /// Takes a receive back from a queue pair that is destroyed, as the next one.
    pub(crate) fn untake(&mut self, wr: RecvWr) {
        self.give_back(1);
        self.posted.push_front(wr);
    }

    /// Gives back the places of receives that are polled.
    pub(crate) fn give_back(&mut self, count: u32) {
        self.taken = self.taken.saturating_sub(count);
    }

    /// Adds a queue pair that completes its receives on `cq`.
    pub(crate) fn attach(&mut self, cq: CqId, cqs: &mut Completions) -> Result<()> {
        if let Some(target) = self.targets.iter_mut().find(|target| target.0 == cq) {
            target.1 += 1;
            return Ok(());
        }
        cqs.reserve(cq, self.depth)?;
        self.targets.push((cq, 1));
        Ok(())
    }

    /// Removes a queue pair. The room on its completion queue stays reserved until this queue is destroyed, because
    /// completions may be left there.
    pub(crate) fn detach(&mut self, cq: CqId) {
        if let Some(target) = self.targets.iter_mut().find(|target| target.0 == cq) {
            target.1 = target.1.saturating_sub(1);
        }
    }

    pub(crate) fn is_used(&self) -> bool {
        self.targets.iter().any(|target| target.1 > 0)
    }

    /// Gives up the room on the completion queues, except for `left` completions that were not polled.
    pub(crate) fn release(&self, left: u32, cqs: &mut Completions) {
        for target in &self.targets {
            cqs.release(target.0, self.depth, left);
        }
    }
}
