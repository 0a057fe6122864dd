//! Memory in which messages in several buffers are joined, kept for the next ones, so that these take none from the system.

/// The most pieces of memory that are kept.
const MOST: usize = 64;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Joins {
    /// Those that were kept last are at the back.
    kept: Vec<Vec<u8>>,
    /// Bytes of all together.
    bytes: usize,
    limit: usize,
    /// The least number of pieces that were there since the last look: nobody has needed so many.
    idle: usize,
}

impl Joins {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { kept: Vec::new(), bytes: 0, limit, idle: 0 }
    }

    /// Bytes that are kept.
    pub(crate) const fn kept(&self) -> usize {
        self.bytes
    }

    /// Returns memory for a message of `len` bytes, with nothing in it.
    pub(crate) fn take(&mut self, len: usize) -> Vec<u8> {
        let mut memory = self.kept.pop().unwrap_or_default();
        self.bytes -= memory.capacity();
        self.idle = self.idle.min(self.kept.len());
        memory.clear();
        if memory.capacity() < len {
            // Messages of about the same length can share it.
            memory.reserve_exact(len.checked_next_power_of_two().unwrap_or(len));
        }
        memory
    }

    /// Keeps memory, if there is room.
    pub(crate) fn keep(&mut self, memory: Vec<u8>) {
        let bytes = self.bytes.saturating_add(memory.capacity());
        if bytes <= self.limit && self.kept.len() < MOST {
            self.bytes = bytes;
            self.kept.push(memory);
        }
    }

    /// Gives back what was not needed since the last call.
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
        assert_eq!(joins.kept(), 16 << 10, "the third has no room");
        joins.trim();
        assert_eq!(joins.kept(), 16 << 10, "both were just used");
        let mut memory = joins.take(8000);
        memory.push(1);
        joins.keep(memory);
        joins.trim();
        assert_eq!(joins.kept(), 8 << 10, "one was enough");
        assert!(joins.take(1).is_empty(), "nothing is left of the message before");
        joins.trim();
        assert_eq!(joins.kept(), 0);
    }
}
