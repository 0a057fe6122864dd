//! Keeps vectors for messages that arrive in several buffers. The reactor copies the parts of such a message into one
//! vector. Later messages reuse the kept vectors, so they need no allocation.

/// The largest number of vectors that are kept.
const MOST: usize = 64;

/// The vectors that are kept for later messages; see the [module](self).
#[derive(Debug)]
pub(crate) struct Joins {
    /// The vectors, used as a stack: the one that was kept last is taken first.
    kept: Vec<Vec<u8>>, // bound: kept-blocks
    /// The sum of the capacities of all vectors, in bytes.
    bytes: usize,
    limit: usize,
    /// The smallest number of vectors that were kept at one time since the last call of [`Joins::trim`]. That many of
    /// the kept vectors were not needed since that call.
    idle: usize,
}

impl Joins {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { kept: Vec::new(), bytes: 0, limit, idle: 0 }
    }

    /// Returns the number of bytes that are kept for later messages.
    pub(crate) const fn kept(&self) -> usize {
        self.bytes
    }

    /// Returns an empty vector with a capacity of at least `len` bytes. Reuses a kept vector if there is one, and
    /// otherwise allocates a new one.
    pub(crate) fn take(&mut self, len: usize) -> Vec<u8> {
        let mut memory = self.kept.pop().unwrap_or_default();
        self.bytes -= memory.capacity();
        self.idle = self.idle.min(self.kept.len());
        memory.clear();
        if memory.capacity() < len {
            // The capacity is rounded up to a power of two, so that a later message of about the same length fits into
            // the vector.
            memory.reserve_exact(len.checked_next_power_of_two().unwrap_or(len));
        }
        memory
    }

    /// Keeps a vector that its message does not need any more. Frees the vector instead if keeping it would exceed a
    /// limit.
    pub(crate) fn keep(&mut self, memory: Vec<u8>) {
        let bytes = self.bytes.saturating_add(memory.capacity());
        if bytes <= self.limit && self.kept.len() < MOST {
            self.bytes = bytes;
            self.kept.push(memory);
        }
    }

    /// Frees the kept vectors that were not needed since the last call.
    pub(crate) fn trim(&mut self) {
        for memory in self.kept.drain(..self.idle.min(self.kept.len())) {
            self.bytes -= memory.capacity();
        }
        self.idle = self.kept.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_kept_within_its_limit_and_goes_when_it_is_idle() {
        let mut joins = Joins::new(16 << 10);
        let [first, second] = [joins.take(5000), joins.take(8192)];
        assert_eq!((first.capacity(), second.capacity()), (8192, 8192));
        joins.keep(first);
        joins.keep(second);
        joins.keep(Vec::with_capacity(1));
        assert_eq!(joins.kept(), 16 << 10, "the third does not fit");
        joins.trim();
        assert_eq!(joins.kept(), 16 << 10, "both were just used");
        let mut memory = joins.take(8000);
        memory.push(1);
        joins.keep(memory);
        joins.trim();
        assert_eq!(joins.kept(), 8 << 10, "one was enough");
        assert!(joins.take(1).is_empty(), "no bytes of the message before remain");
        joins.trim();
        assert_eq!(joins.kept(), 0);
    }
}
