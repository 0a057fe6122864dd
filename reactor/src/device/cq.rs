//! A completion queue of a device, the room left on it, and the count of its handled completions.

use rdma_transport::provider::CqId;

/// Names a completion queue: the index of its device, and its own on it.
pub(crate) type CqIndex = (usize, usize);

#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(crate) id: CqId,
    /// Number of entries of the queue.
    size: u32,
    /// Number of entries that nobody has claimed.
    free: u32,
    /// Number of entries given back. They are free once the queue was seen empty, because completions may linger in it.
    released: u32,
    /// The queue has room for all receives of the shared receive queue.
    pub(crate) shared: bool,
    /// Number of times that the queue was seen empty.
    drains: u64,
    /// Number of completions handled.
    handled: u64,
    pub(crate) armed: bool,
    /// The queue is to be seen empty before anything sleeps: entries were given back, a moment was marked, or there were
    /// completions although it is armed.
    pub(crate) awaited: bool,
    /// The queue is on the list of queues to poll.
    pub(crate) ready: bool,
}

/// A moment in the life of a completion queue. It tells later whether the completions of that moment are all handled.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CqPosition {
    drains: u64,
    /// Number of completions that are handled once everything that the queue could hold at that moment was handled.
    handled: u64,
}

impl CompletionQueue {
    pub(crate) const fn new(id: CqId, size: u32) -> Self {
        let (shared, armed, awaited, ready) = (false, false, false, false);
        Self { id, size, free: size, released: 0, shared, drains: 0, handled: 0, armed, awaited, ready }
    }

    /// Whether `entries` entries are free.
    pub(crate) const fn has_room(&self, entries: u32) -> bool {
        self.free >= entries
    }

    /// Whether nobody has claimed any entry.
    pub(crate) const fn is_unused(&self) -> bool {
        self.free == self.size
    }

    /// Claims entries that are free.
    pub(crate) const fn claim(&mut self, entries: u32) {
        self.free -= entries;
    }

    /// Gives a claim back.
    pub(crate) const fn release(&mut self, entries: u32) {
        self.released += entries;
        self.awaited = true;
    }

    /// Notes that the queue is empty.
    #[inline]
    pub(crate) fn drained(&mut self) {
        self.free += std::mem::take(&mut self.released);
        self.drains += 1;
        self.awaited = false;
    }

    /// Counts completions that were handled.
    #[inline]
    pub(crate) const fn handled(&mut self, count: usize) {
        self.handled += count as u64;
    }

    /// Marks the current moment.
    pub(crate) const fn mark(&mut self) -> CqPosition {
        self.awaited = true;
        CqPosition { drains: self.drains, handled: self.handled + (self.size - self.free) as u64 }
    }

    /// Whether all completions of a marked moment are handled. They are if the queue was seen empty since, or has given
    /// as many completions as it could have held.
    pub(crate) const fn has_passed(&self, mark: CqPosition) -> bool {
        self.drains != mark.drains || self.handled >= mark.handled
    }
}
