//! The receive queue of a queue pair: the posted receives, and the message that is being put into the first of them.

use std::collections::VecDeque;

use super::srq::SharedReceiveQueue;
use crate::mem::{Sge, Span};
use crate::wr::RecvWr;

/// The completion of a receive that a message has filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReceivedMessage {
    pub(crate) wr_id: u64,
    pub(crate) len: u32,
    /// The key that the peer invalidated with the message.
    pub(crate) invalidated: Option<u32>,
    pub(crate) immediate: Option<u32>,
}

/// The receive queue of a queue pair: the posted receives, and the message that is being put into the first of them.
#[derive(Debug)]
pub struct ReceiveQueue {
    posted: VecDeque<RecvWr>,
    /// Sequence number of the current or next message, from 1.
    msn: u32,
    /// Bytes of the message that are in place.
    placed: usize,
    /// The entry that the next byte goes to, and the offset in that entry.
    entry: usize,
    entry_offset: usize,
}

impl ReceiveQueue {
    /// Creates an empty queue, with memory for `depth` receives.
    pub fn new(depth: usize) -> Self {
        Self { posted: VecDeque::with_capacity(depth), msn: 1, placed: 0, entry: 0, entry_offset: 0 }
    }

    /// Returns the number of receives that are posted and not filled.
    pub fn len(&self) -> usize {
        self.posted.len()
    }

    /// Returns true if all posted receives are filled.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.posted.is_empty()
    }

    /// Adds a receive.
    pub fn post(&mut self, wr: RecvWr) {
        self.posted.push_back(wr);
    }

    /// Removes all receives that are not filled.
    pub fn take_all(&mut self) -> VecDeque<RecvWr> {
        std::mem::take(&mut self.posted)
    }

    /// Removes the next receive. Returns its number.
    pub fn pop(&mut self) -> Option<u64> {
        self.posted.pop_front().map(|wr| wr.wr_id)
    }

    /// Returns true if no part of a message is in place.
    pub const fn is_between_messages(&self) -> bool {
        self.placed == 0
    }

    /// Returns the sequence number of the current or next message, from 1.
    pub const fn msn(&self) -> u32 {
        self.msn
    }

    /// Returns the room for the current or next message, bytes. Takes a receive from the shared queue if there is none. Returns `None` if
    /// no receive is available.
    #[inline]
    pub fn room(&mut self, shared: &mut Option<&mut SharedReceiveQueue>) -> Option<usize> {
        if self.posted.is_empty() && !self.has_next(shared) {
            return None;
        }
        self.posted.front().map(|wr| wr.sges.total_len().min(u32::MAX as usize))
    }

    /// Returns the number of bytes of the message that are in place.
    #[inline]
    #[must_use]
    pub const fn placed(&self) -> usize {
        self.placed
    }

    /// Returns true if there is a receive for the message. Takes one from the shared queue if there is none.
    #[cold]
    pub fn has_next(&mut self, shared: &mut Option<&mut SharedReceiveQueue>) -> bool {
        if self.posted.is_empty() {
            self.posted.extend(shared.as_mut().and_then(|queue| queue.take()));
        }
        !self.posted.is_empty()
    }

    /// Returns the memory for the next `len` bytes, or for the first part of them that is in one entry.
    #[inline]
    pub fn place(&self, len: usize) -> Option<Sge> {
        Some(self.posted.front()?.sges.as_slice().get(self.entry)?.part(self.entry_offset, len))
    }

    /// Returns the memory of the receive at index `nth`, if it is contiguous and nobody else uses it.
    pub(crate) fn expected(&self, nth: usize) -> Option<Sge> {
        match self.posted.get(nth)?.sges.as_slice() {
            [sge] if !sge.is_shared() => Some(*sge),
            _ => None,
        }
    }

    /// Records `n` bytes that were received into [`ReceiveQueue::place`].
    pub fn filled(&mut self, n: usize) {
        self.entry_offset += n;
        self.placed += n;
    }

    /// Copies the next bytes to their entries. The caller has checked that there is room.
    #[inline]
    pub fn fill(&mut self, bytes: &[u8]) {
        let mut done = 0;
        self.fill_with(bytes.len(), |place| {
            place.fill(&bytes[done..]);
            done += place.len();
        });
    }

    /// Puts a whole message into the next receive, if that has one entry with room for all of it, and no message is in progress. Returns
    /// the number of the receive, which is then filled.
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

    /// As [`ReceiveQueue::fill`], from memory that others may write meanwhile.
    #[inline]
    pub(crate) fn fill_from(&mut self, from: Span<'_>) {
        let mut done = 0;
        self.fill_with(from.len(), |place| {
            place.fill_from(from.part(done, place.len()));
            done += place.len();
        });
    }

    /// Calls `copy` with the memory for the next `len` bytes, in order.
    #[inline]
    fn fill_with(&mut self, mut len: usize, mut copy: impl FnMut(Sge)) {
        let Some(wr) = self.posted.front() else { return };
        if let [sge] = wr.sges.as_slice() {
            // Most receives have one entry: the offset in it is the number of placed bytes.
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

    /// Ends the message. Returns the number of the receive that it filled, and its length, bytes.
    #[inline]
    pub fn complete(&mut self) -> Option<(u64, u32)> {
        let wr = self.posted.pop_front()?;
        let len = self.placed as u32;
        (self.placed, self.entry, self.entry_offset) = (0, 0, 0);
        self.msn = self.msn.wrapping_add(1);
        Some((wr.wr_id, len))
    }

    /// Ends the message. Calls `out` with the completion of its receive, whose length is `len` or else the number of placed bytes.
    #[inline]
    pub(crate) fn end_message(
        &mut self,
        len: Option<u32>,
        invalidated: Option<u32>,
        immediate: Option<u32>,
        out: &mut impl FnMut(ReceivedMessage),
    ) {
        if let Some((wr_id, placed)) = self.complete() {
            out(ReceivedMessage { wr_id, len: len.unwrap_or(placed), invalidated, immediate });
        }
    }
}
