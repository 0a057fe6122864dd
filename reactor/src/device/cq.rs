//! A completion queue of a device: its claimed entries, and the number of completions handled.

use rdma_transport::provider::CqId;

/// The index of a device, and the index of a completion queue on it.
pub(crate) type CqIndex = (usize, usize);

#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(crate) id: CqId,
    /// Number of entries of the queue.
    size: u32,
    /// Number of entries that are not claimed.
    free: u32,
    /// Number of released entries. They become free when the queue was seen empty, because completions of their former
    /// owner may still be in it.
    released: u32,
    /// The queue has entries claimed for all receives of the shared receive queue.
    pub(crate) shared: bool,
    /// Number of times that the queue was seen empty.
    drains: u64,
    /// Number of completions handled.
    handled: u64,
    pub(crate) armed: bool,
    /// The queue must be seen empty before the reactor sleeps: entries were released, a position was taken, or there
    /// were completions although the queue is armed.
    pub(crate) awaited: bool,
    /// The queue is on the list of queues to poll.
    pub(crate) ready: bool,
}

/// A position in the sequence of a queue's completions. [`CompletionQueue::has_passed`] tells whether all completions
/// that could be in the queue at that time have been handled.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CqPosition {
    drains: u64,
    /// The value of [`CompletionQueue::handled`] at which everything that the queue could hold at that time has been
    /// handled.
    handled: u64,
}

impl CompletionQueue {
    pub(crate) const fn new(id: CqId, size: u32) -> Self {
        let (shared, armed, awaited, ready) = (false, false, false, false);
        Self { id, size, free: size, released: 0, shared, drains: 0, handled: 0, armed, awaited, ready }
    }

    /// Returns `true` if `entries` entries are free.
    pub(crate) const fn has_room(&self, entries: u32) -> bool {
        self.free >= entries
    }

    /// Returns `true` if no entry is claimed.
    pub(crate) const fn is_unused(&self) -> bool {
        self.free == self.size
    }

    /// Claims free entries.
    pub(crate) const fn claim(&mut self, entries: u32) {
        self.free -= entries;
    }

    /// Releases claimed entries.
    pub(crate) const fn release(&mut self, entries: u32) {
        self.released += entries;
        self.awaited = true;
    }

    /// Notes that the queue was seen empty.
    #[inline]
    pub(crate) fn drained(&mut self) {
        self.free += std::mem::take(&mut self.released);
        self.drains += 1;
        self.awaited = false;
    }

    /// Counts handled completions.
    #[inline]
    pub(crate) const fn handled(&mut self, count: usize) {
        self.handled += count as u64;
    }

    /// Returns the current position.
    pub(crate) const fn mark(&mut self) -> CqPosition {
        self.awaited = true;
        CqPosition { drains: self.drains, handled: self.handled + (self.size - self.free) as u64 }
    }

    /// Returns `true` if all completions that could be in the queue at `mark` have been handled: the queue was seen
    /// empty since, or has returned as many completions as it could have held.
    pub(crate) const fn has_passed(&self, mark: CqPosition) -> bool {
        self.drains != mark.drains || self.handled >= mark.handled
    }
}
