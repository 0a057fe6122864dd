//! A completion queue of a device. Connections claim entries of it, so that it never overflows. Completions are
//! counted, so that the reactor knows when it has handled all completions of an ended connection.

use rdma_transport::provider::CqId;

/// The index of a device, and the index of one of its completion queues.
pub(crate) type CqIndex = (usize, usize);

#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(crate) id: CqId,
    /// Number of entries of the queue.
    size: u32,
    /// Number of entries that no connection or endpoint has claimed, and that are not in `released`.
    free: u32,
    /// Number of entries whose owner has released them. The entries may still contain completions of that owner, so
    /// they become free only when the reactor has seen the queue empty.
    released: u32,
    /// True if this queue has entries claimed for all receives of the device's shared receive queue.
    pub(crate) shared: bool,
    /// Number of times that the reactor has seen the queue empty.
    drains: u64,
    /// Number of completions of this queue that the reactor has handled.
    handled: u64,
    pub(crate) armed: bool,
    /// True if the reactor must see the queue empty before it sleeps, for one of these reasons: entries were released,
    /// [`CompletionQueue::mark`] was called, or completions arrived although the queue was armed.
    pub(crate) awaited: bool,
    /// True if the queue is in the reactor's list of queues to poll.
    pub(crate) ready: bool,
}

/// A position in the sequence of a queue's completions, taken by [`CompletionQueue::mark`].
/// [`CompletionQueue::has_passed`] returns true when the reactor has handled all completions that could be in the queue
/// when `mark` was called.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CqPosition {
    drains: u64,
    /// When the field `handled` of the queue has reached this value, the reactor has handled all completions that the
    /// queue could hold at this position.
    handled: u64,
}

impl CompletionQueue {
    pub(crate) const fn new(id: CqId, size: u32) -> Self {
        let (shared, armed, awaited, ready) = (false, false, false, false);
        Self { id, size, free: size, released: 0, shared, drains: 0, handled: 0, armed, awaited, ready }
    }

    /// Returns `true` if at least this number of entries is free.
    pub(crate) const fn has_room(&self, entries: u32) -> bool {
        self.free >= entries
    }

    /// Returns `true` if all entries of the queue are free.
    pub(crate) const fn is_unused(&self) -> bool {
        self.free == self.size
    }

    /// Claims entries for a new owner. The caller has checked that they are free.
    pub(crate) const fn claim(&mut self, entries: u32) {
        self.free -= entries;
    }

    /// Releases the entries of an owner that does not use the queue any more. They become free when the reactor has
    /// seen the queue empty.
    pub(crate) const fn release(&mut self, entries: u32) {
        self.released += entries;
        self.awaited = true;
    }

    /// Notes that the reactor has seen the queue empty. Released entries become free.
    #[inline]
    pub(crate) fn drained(&mut self) {
        self.free += std::mem::take(&mut self.released);
        self.drains += 1;
        self.awaited = false;
    }

    /// Adds `count` to the number of completions that the reactor has handled.
    #[inline]
    pub(crate) const fn handled(&mut self, count: usize) {
        self.handled += count as u64;
    }

    /// Returns the position after all completions that the queue can hold now.
    pub(crate) const fn mark(&mut self) -> CqPosition {
        self.awaited = true;
        CqPosition { drains: self.drains, handled: self.handled + (self.size - self.free) as u64 }
    }

    /// Returns `true` if the reactor has handled all completions that could be in the queue at the position `mark`.
    /// This is the case if, since that position, the reactor has seen the queue empty, or has handled as many
    /// completions as the queue had entries in use.
    pub(crate) const fn has_passed(&self, mark: CqPosition) -> bool {
        self.drains != mark.drains || self.handled >= mark.handled
    }
}
