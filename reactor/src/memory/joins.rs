//! Keeps the memory in which messages in several buffers are joined, so that the next ones allocate nothing.

/// The largest number of pieces of memory that are kept.
const MOST: usize = 64;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Joins {
    /// The most recently kept ones are at the back.
    kept: Vec<Vec<u8>>,
    /// The size of all pieces together, in bytes.
    bytes: usize,
    limit: usize,
    /// The smallest number of pieces since the last call of `trim`: these were not needed.
    idle: usize,
}

impl Joins {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { kept: Vec::new(), bytes: 0, limit, idle: 0 }
    }

    /// Returns the number of bytes that are kept.
    pub(crate) const fn kept(&self) -> usize {
        self.bytes
    }

    /// Returns empty memory for a message of `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> Vec<u8> {
        let mut memory = self.kept.pop().unwrap_or_default();
        self.bytes -= memory.capacity();
        self.idle = self.idle.min(self.kept.len());
        memory.clear();
        if memory.capacity() < len {
            // Rounded up, so that a later message of about this length can reuse it.
            memory.reserve_exact(len.checked_next_power_of_two().unwrap_or(len));
        }
        memory
    }

    /// Keeps memory, if the limits allow.
    pub(crate) fn keep(&mut self, memory: Vec<u8>) {
        let bytes = self.bytes.saturating_add(memory.capacity());
        if bytes <= self.limit && self.kept.len() < MOST {
            self.bytes = bytes;
            self.kept.push(memory);
        }
    }

    /// Frees the pieces that were not needed since the last call.
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
