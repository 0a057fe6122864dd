//! The receive queue of a queue pair: the posted receives, and the message that is being put into the first of them.

use std::collections::VecDeque;

use super::srq::SharedReceiveQueue;
use crate::mem::{Sge, Span};
use crate::wr::RecvWr;

/// A message that has filled a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) wr_id: u64,
    pub(crate) len: u32,
    /// The key that the peer has invalidated with it.
    pub(crate) invalidated: Option<u32>,
    pub(crate) immediate: Option<u32>,
}

/// See the [module](self).
#[derive(Debug)]
pub struct ReceiveQueue {
    posted: VecDeque<RecvWr>,
    /// Sequence number of the message that is being received or comes next, from 1.
    msn: u32,
    /// Bytes of the message that are in place.
    placed: usize,
    /// The entry that the next byte goes to, and the offset in that entry.
    entry: usize,
    entry_offset: usize,
}

impl ReceiveQueue {
    /// An empty queue, with memory for that many receives.
    pub fn new(depth: usize) -> Self {
        Self { posted: VecDeque::with_capacity(depth), msn: 1, placed: 0, entry: 0, entry_offset: 0 }
    }

    /// Receives that are posted and not filled.
    pub fn len(&self) -> usize {
        self.posted.len()
    }

    /// Returns `true` if no receive is posted that is not filled.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.posted.is_empty()
    }

    /// Adds a receive.
    pub fn post(&mut self, wr: RecvWr) {
        self.posted.push_back(wr);
    }

    /// Gives up all receives that are not filled.
    pub fn take_all(&mut self) -> VecDeque<RecvWr> {
        std::mem::take(&mut self.posted)
    }

    /// Gives up the next receive; returns its number.
    pub fn pop(&mut self) -> Option<u64> {
        self.posted.pop_front().map(|wr| wr.wr_id)
    }

    /// Whether no part of a message is in place.
    pub const fn is_between_messages(&self) -> bool {
        self.placed == 0
    }

    /// Sequence number of the message that is being received or comes next, from 1.
    pub const fn msn(&self) -> u32 {
        self.msn
    }

    /// Room for the message that is being received or comes next, bytes; a receive is taken from the shared queue if there is none.
    /// `None` if no receive is there.
    #[inline]
    pub fn room(&mut self, shared: &mut Option<&mut SharedReceiveQueue>) -> Option<usize> {
        if self.posted.is_empty() && !self.has_next(shared) {
            return None;
        }
        self.posted.front().map(|wr| wr.sges.total_len().min(u32::MAX as usize))
    }

    /// Bytes of the message that are in place.
    #[inline]
    #[must_use]
    pub const fn placed(&self) -> usize {
        self.placed
    }

    /// Whether there is a receive for the message, after taking one from the shared queue if there is none.
    #[cold]
    pub fn has_next(&mut self, shared: &mut Option<&mut SharedReceiveQueue>) -> bool {
        if self.posted.is_empty() {
            self.posted.extend(shared.as_mut().and_then(|queue| queue.take()));
        }
        !self.posted.is_empty()
    }

    /// The place of the next `len` bytes, or of as many as go to the same entry.
    #[inline]
    pub fn place(&self, len: usize) -> Option<Sge> {
        Some(self.posted.front()?.sges.as_slice().get(self.entry)?.part(self.entry_offset, len))
    }

    /// The memory of a receive behind so many others, if it lies together and nobody else uses it.
    pub(crate) fn expected(&self, nth: usize) -> Option<Sge> {
        match self.posted.get(nth)?.sges.as_slice() {
            [sge] if !sge.is_shared() => Some(*sge),
            _ => None,
        }
    }

    /// Takes note of `n` bytes that were received into [`ReceiveQueue::place`].
    pub fn filled(&mut self, n: usize) {
        self.entry_offset += n;
        self.placed += n;
    }

    /// Copies the next bytes to their place. That there is room was judged before.
    #[inline]
    pub fn fill(&mut self, bytes: &[u8]) {
        let mut done = 0;
        self.fill_with(bytes.len(), |place| {
            place.fill(&bytes[done..]);
            done += place.len();
        });
    }

    /// Puts a whole message into the next receive if that has one entry, with room for all of it, and no message has begun. Returns the
    /// number of the receive, which is filled then.
    #[inline]
    pub(crate) fn fill_whole(&mut self, bytes: &[u8]) -> Option<u64> {
        let wr = self.posted.front().filter(|_| self.placed == 0)?;
        let &[sge] = wr.sges.as_slice() else { return None };
        if bytes.len() > sge.len() {
            return None;
        }
        let wr_id = wr.wr_id;
        sge.fill(bytes);
        self.posted.pop_front();
        self.msn = self.msn.wrapping_add(1);
        Some(wr_id)
    }

    /// As [`ReceiveQueue::fill`], of memory that others may write meanwhile.
    #[inline]
    pub(crate) fn fill_from(&mut self, from: Span<'_>) {
        let mut done = 0;
        self.fill_with(from.len(), |place| {
            place.fill_from(from.part(done, place.len()));
            done += place.len();
        });
    }

    /// Has `copy` put the next `len` bytes to their places, in order.
    #[inline]
    fn fill_with(&mut self, mut len: usize, mut copy: impl FnMut(Sge)) {
        let Some(wr) = self.posted.front() else { return };
        if let [sge] = wr.sges.as_slice() {
            // One entry, as most receives have: the message is as long as what is placed.
            copy(sge.part(self.placed, len));
            self.placed += len;
            self.entry_offset = self.placed;
            return;
        }
        while len > 0 {
            let Some(sge) = wr.sges.as_slice().get(self.entry) else { return };
            let room = sge.part(self.entry_offset, len);
            len -= room.len();
            self.placed += room.len();
            self.entry_offset += room.len();
            copy(room);
            if self.entry_offset == sge.len() {
                self.entry += 1;
                self.entry_offset = 0;
            }
        }
    }

    /// Ends the message. Returns the number of the receive that it filled, and its length.
    #[inline]
    pub fn complete(&mut self) -> Option<(u64, u32)> {
        let wr = self.posted.pop_front()?;
        let len = self.placed as u32;
        (self.placed, self.entry, self.entry_offset) = (0, 0, 0);
        self.msn = self.msn.wrapping_add(1);
        Some((wr.wr_id, len))
    }

    /// Ends the message for `out`. Its receive completes with the length of what is in it, or with `len` if that is given.
    #[inline]
    pub(crate) fn end_message(
        &mut self,
        len: Option<u32>,
        invalidated: Option<u32>,
        immediate: Option<u32>,
        out: &mut impl FnMut(Message),
    ) {
        if let Some((wr_id, placed)) = self.complete() {
            out(Message { wr_id, len: len.unwrap_or(placed), invalidated, immediate });
        }
    }
}
