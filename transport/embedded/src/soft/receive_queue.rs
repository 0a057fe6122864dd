//! The receive queue of a queue pair: the posted receives, and the progress of the message that fills the first of them.

use std::collections::VecDeque;

use super::srq::SharedReceiveQueue;
use crate::entries::ENTRIES;
use rdma_transport::mem::{Sge, Span};
use rdma_transport::wr::RecvWr;

/// The values for the completion of a receive that a message has filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReceivedMessage {
    pub(crate) wr_id: u64,
    pub(crate) len: u32,
    /// The local STag that the message has invalidated. `None` if the message has invalidated no STag.
    pub(crate) invalidated: Option<u32>,
    pub(crate) immediate: Option<u32>,
}

/// The receive queue of a queue pair: the posted receives, and the progress of the message that fills the first of them.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    posted: VecDeque<RecvWr>, // bound: receives
    /// The sequence number of the current message, or of the next message if none is in progress.
    /// The first message has the number 1.
    msn: u32,
    /// The number of bytes of the current message that are written to its receive.
    placed: usize,
    /// The index of the scatter-gather entry to which the next byte of the message is written. `entry_offset` is the offset of that byte in
    /// the entry.
    entry: usize,
    entry_offset: usize,
}

impl ReceiveQueue {
    /// Creates an empty queue, with memory for `depth` receives.
    pub(crate) fn new(depth: usize) -> Self {
        Self { posted: VecDeque::with_capacity(depth), msn: 1, placed: 0, entry: 0, entry_offset: 0 }
    }

    /// Returns the number of posted receives that no message has filled.
    pub(crate) fn len(&self) -> usize {
        self.posted.len()
    }

    /// Appends a receive to the queue.
    pub(crate) fn post(&mut self, wr: RecvWr) {
        self.posted.push_back(wr);
    }

    /// Removes and returns all receives that no message has filled.
    pub(crate) fn take_all(&mut self) -> VecDeque<RecvWr> {
        std::mem::take(&mut self.posted)
    }

    /// Removes the next receive and returns its `wr_id`. Returns `None` if the queue is empty.
    pub(crate) fn pop(&mut self) -> Option<u64> {
        self.posted.pop_front().map(|wr| wr.wr_id)
    }

    /// Returns true if no byte of the current message is written to its receive.
    pub(crate) const fn is_between_messages(&self) -> bool {
        self.placed == 0
    }

    /// Returns the sequence number of the current message, or of the next message if none is in progress. The first message has the number
    /// 1.
    pub(crate) const fn msn(&self) -> u32 {
        self.msn
    }

    /// Returns the size in bytes of the receive for the current or next message. If this queue is
    /// empty, first moves a receive to it from the shared receive queue. Returns `None` if both
    /// queues are empty.
    #[inline]
    pub(crate) fn room(&mut self, shared: &mut Option<&mut SharedReceiveQueue>) -> Option<usize> {
        if self.posted.is_empty() && !self.has_next(shared) {
            return None;
        }
        self.posted.front().map(|wr| wr.sges.total_len().min(u32::MAX as usize))
    }

    /// Returns the number of bytes of the current message that are written to its receive.
    #[inline]
    #[must_use]
    pub(crate) const fn placed(&self) -> usize {
        self.placed
    }

    /// Returns true if a receive exists for the next message. If this queue is empty, first moves a
    /// receive to it from the shared receive queue.
    #[cold]
    pub(crate) fn has_next(&mut self, shared: &mut Option<&mut SharedReceiveQueue>) -> bool {
        if self.posted.is_empty() {
            self.posted.extend(shared.as_mut().and_then(|queue| queue.take()));
        }
        !self.posted.is_empty()
    }

    /// Returns the memory for the next `len` bytes of the message. The memory is shorter than `len` if the bytes continue in another
    /// scatter-gather entry. Returns `None` if the receive has no more entries.
    #[inline]
    pub(crate) fn next_memory(&self, len: usize) -> Option<Sge> {
        Some(self.posted.front()?.sges.as_slice().get(self.entry)?.part(self.entry_offset, len))
    }

    /// Returns the memory of the posted receive with the index `nth`, if it is one contiguous buffer that has no other users while the
    /// receive is posted.
    pub(crate) fn expected(&self, nth: usize) -> Option<Sge> {
        match self.posted.get(nth)?.sges.as_slice() {
            [sge] if !sge.is_shared() => Some(*sge),
            _ => None,
        }
    }

    /// Records that the next `n` bytes of the message were written to the memory that
    /// [`ReceiveQueue::next_memory`] returned.
    pub(crate) fn filled(&mut self, n: usize) {
        self.entry_offset += n;
        self.placed += n;
    }

    /// Copies the next bytes of the message to the receive. The caller has checked that the receive has room for them.
    #[inline]
    pub(crate) fn fill(&mut self, bytes: &[u8]) {
        let mut done = 0;
        self.fill_with(bytes.len(), |part| {
            ENTRIES.fill(&part, &bytes[done..]);
            done += part.len();
        });
    }

    /// Copies a whole message to the next receive, removes the receive from the queue and returns
    /// its `wr_id`. Returns `None`, and copies nothing, in these cases:
    ///
    /// - No receive is posted.
    /// - Another message is in progress.
    /// - The receive is too short, or does not have exactly one scatter-gather entry.
    #[inline]
    pub(crate) fn fill_whole(&mut self, bytes: &[u8]) -> Option<u64> {
        let wr = self.posted.front().filter(|_| self.placed == 0)?;
        let &[sge] = wr.sges.as_slice() else { return None };
        if bytes.len() > sge.len() {
            return None;
        }
        let wr_id = wr.wr_id;
        ENTRIES.fill(&sge, bytes);
        self.posted.pop_front();
        self.msn = self.msn.wrapping_add(1);
        Some(wr_id)
    }

    /// Copies the next bytes of the message to the receive, from memory that other threads or processes may write at the same time.
    #[inline]
    pub(crate) fn fill_from(&mut self, from: Span<'_>) {
        let mut done = 0;
        self.fill_with(from.len(), |part| {
            ENTRIES.fill_from(&part, from.part(done, part.len()));
            done += part.len();
        });
    }

    /// Calls `copy` with each piece of the receive's memory for the next `len` bytes, in order.
    #[inline]
    fn fill_with(&mut self, mut len: usize, mut copy: impl FnMut(Sge)) {
        let Some(wr) = self.posted.front() else { return };
        if let [sge] = wr.sges.as_slice() {
            // Most receives have one entry. In these receives, the offset in the entry is the number of bytes that are already written.
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

    /// Ends the current message and removes its receive. Returns the `wr_id` of the receive and the length of the message in bytes. Returns
    /// `None` if no receive is posted.
    #[inline]
    pub(crate) fn complete(&mut self) -> Option<(u64, u32)> {
        let wr = self.posted.pop_front()?;
        let len = self.placed as u32;
        (self.placed, self.entry, self.entry_offset) = (0, 0, 0);
        self.msn = self.msn.wrapping_add(1);
        Some((wr.wr_id, len))
    }

    /// Ends the current message and calls `out` with the values for its completion. The length is `len`, or the number of bytes written to
    /// the receive if `len` is `None`.
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
