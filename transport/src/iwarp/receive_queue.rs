//! The receive queue of a queue pair: the posted receives, and the message that is being put into the first of them.

use std::collections::VecDeque;

use super::srq::SharedReceiveQueue;
use super::wire::opcode::SEND_QUEUE;
use super::wire::{TerminateCause, Untagged};
use crate::mem::Sge;
use crate::wr::RecvWr;

#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    posted: VecDeque<RecvWr>,
    /// MSN of the message that is being received or comes next.
    msn: u32,
    /// Octets of the message that are in place.
    placed: usize,
    /// The entry that the next octet goes to, and the offset in that entry.
    entry: usize,
    entry_offset: usize,
}

impl ReceiveQueue {
    pub(crate) fn new(depth: usize) -> Self {
        Self { posted: VecDeque::with_capacity(depth), msn: 1, placed: 0, entry: 0, entry_offset: 0 }
    }

    /// Receives that are posted and not filled.
    pub(crate) fn len(&self) -> usize {
        self.posted.len()
    }

    pub(crate) fn post(&mut self, wr: RecvWr) {
        self.posted.push_back(wr);
    }

    /// Gives up all receives that are not filled.
    pub(crate) fn take_all(&mut self) -> VecDeque<RecvWr> {
        std::mem::take(&mut self.posted)
    }

    /// Gives up the next receive; returns its number.
    pub(crate) fn pop(&mut self) -> Option<u64> {
        self.posted.pop_front().map(|wr| wr.wr_id)
    }

    /// Whether no part of a message is in place.
    pub(crate) const fn is_between_messages(&self) -> bool {
        self.placed == 0
    }

    /// MSN of the message that is being received or comes next.
    pub(crate) const fn msn(&self) -> u32 {
        self.msn
    }

    /// Judges a segment of a Send with `len` octets of payload: it must be the next one, and there must be room for it.
    #[inline]
    pub(crate) fn judge(
        &mut self,
        header: &Untagged,
        len: usize,
        shared: &mut Option<&mut SharedReceiveQueue>,
    ) -> Result<(), TerminateCause> {
        if header.queue != SEND_QUEUE {
            return Err(TerminateCause::INVALID_QN);
        }
        if header.msn != self.msn {
            return Err(TerminateCause::INVALID_MSN);
        }
        if header.offset as usize != self.placed {
            return Err(TerminateCause::INVALID_MO);
        }
        if self.posted.is_empty() && !self.has_next(shared) {
            return Err(TerminateCause::DDP_UNTAGGED_NO_BUFFER);
        }
        let room = self.posted.front().map_or(0, |wr| wr.sges.total_len().min(u32::MAX as usize));
        if self.placed + len > room {
            return Err(TerminateCause::DDP_UNTAGGED_TOO_LONG);
        }
        Ok(())
    }

    /// Whether there is a receive for the message, after taking one from the shared queue if there is none.
    #[cold]
    pub(crate) fn has_next(&mut self, shared: &mut Option<&mut SharedReceiveQueue>) -> bool {
        if self.posted.is_empty()
            && let Some(wr) = shared.as_mut().and_then(|queue| queue.take())
        {
            self.posted.push_back(wr);
        }
        !self.posted.is_empty()
    }

    /// The place of the next `len` octets, or of as many as go to the same entry.
    #[inline]
    pub(crate) fn place(&self, len: usize) -> Option<Sge> {
        Some(self.posted.front()?.sges.as_slice().get(self.entry)?.part(self.entry_offset, len))
    }

    /// Takes note of `n` octets that were received into [`ReceiveQueue::place`].
    pub(crate) fn filled(&mut self, n: usize) {
        self.entry_offset += n;
        self.placed += n;
    }

    /// Copies the next octets to their place. That there is room was judged before.
    #[inline]
    pub(crate) fn fill(&mut self, mut bytes: &[u8]) {
        let Some(wr) = self.posted.front() else { return };
        if let [sge] = wr.sges.as_slice() {
            // One entry, as most receives have: the message is as long as what is placed.
            sge.part(self.placed, bytes.len()).fill(bytes);
            self.placed += bytes.len();
            self.entry_offset = self.placed;
            return;
        }
        while !bytes.is_empty() {
            let Some(sge) = wr.sges.as_slice().get(self.entry) else { return };
            let room = sge.part(self.entry_offset, bytes.len());
            let (now, rest) = bytes.split_at(room.len());
            room.fill(now);
            self.placed += now.len();
            self.entry_offset += now.len();
            bytes = rest;
            if self.entry_offset == sge.len() {
                self.entry += 1;
                self.entry_offset = 0;
            }
        }
    }

    /// Ends the message. Returns the number of the receive that it filled, and its length.
    #[inline]
    pub(crate) fn complete(&mut self) -> Option<(u64, u32)> {
        let wr = self.posted.pop_front()?;
        let len = self.placed as u32;
        (self.placed, self.entry, self.entry_offset) = (0, 0, 0);
        self.msn = self.msn.wrapping_add(1);
        Some((wr.wr_id, len))
    }
}
