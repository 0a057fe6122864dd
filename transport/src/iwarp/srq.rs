//! Shared receive queues, from which several queue pairs take their receives.

use std::collections::VecDeque;

use super::cq::Completions;
use crate::error::{Error, Result};
use crate::provider::CqId;
use crate::targets::Targets;
use crate::wr::RecvWr;

#[derive(Debug, Default)]
pub(crate) struct SharedReceiveQueue {
    posted: VecDeque<RecvWr>,
    depth: u32,
    /// Receives that a queue pair has taken and that were not polled as completed.
    taken: u32,
    targets: Targets,
}

impl SharedReceiveQueue {
    pub(crate) fn new(depth: u32) -> Self {
        Self { posted: VecDeque::with_capacity(depth as usize), depth, taken: 0, targets: Targets::default() }
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
        self.targets.attach(cq, || cqs.reserve(cq, self.depth))
    }

    /// Removes a queue pair.
    pub(crate) fn detach(&mut self, cq: CqId) {
        self.targets.detach(cq);
    }

    pub(crate) fn is_used(&self) -> bool {
        self.targets.is_used()
    }

    /// Gives up the room on the completion queues, except for `left` completions that were not polled.
    pub(crate) fn release(&self, left: u32, cqs: &mut Completions) {
        for cq in self.targets.iter() {
            cqs.release(cq, self.depth, left);
        }
    }
}
