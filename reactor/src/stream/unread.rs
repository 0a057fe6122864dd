//! What has arrived and was not read yet. No I/O.

use std::collections::VecDeque;
use std::ops::Deref;

/// Messages in order, the first one read in part.
#[derive(Debug)]
pub(super) struct Unread<M> {
    messages: VecDeque<M>,
    /// Bytes of the first one that are read.
    read: usize,
}

impl<M> Default for Unread<M> {
    fn default() -> Self {
        Self { messages: VecDeque::new(), read: 0 }
    }
}

impl<M: Deref<Target = [u8]>> Unread<M> {
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Adds a message that is not empty.
    pub(super) fn push(&mut self, message: M) {
        debug_assert!(!message.is_empty(), "an empty message would be an end");
        self.messages.push_back(message);
    }

    /// What comes next, as far as it is in one piece; nothing if there is nothing.
    pub(super) fn front(&self) -> &[u8] {
        self.messages.front().map_or(&[], |message| &message[self.read..])
    }

    /// Takes note that the first `len` bytes of the front are read, or all if it has less; returns the message if it is
    /// done with.
    pub(super) fn consume(&mut self, len: usize) -> Option<M> {
        self.read += len.min(self.front().len());
        if self.front().is_empty() { self.pop() } else { None }
    }

    /// Takes the first message, read or not.
    pub(super) fn pop(&mut self) -> Option<M> {
        self.read = 0;
        self.messages.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(messages: &[&str]) -> Unread<Vec<u8>> {
        let mut unread = Unread::default();
        for message in messages {
            unread.push(message.as_bytes().to_vec());
        }
        unread
    }

    #[test]
    fn a_message_is_done_with_when_its_last_byte_is_read() {
        let mut unread = some(&["abc", "d"]);
        assert_eq!(unread.consume(2), None);
        assert_eq!(unread.front(), b"c");
        assert_eq!(unread.consume(0), None);
        assert_eq!(unread.consume(1), Some(b"abc".to_vec()));
        assert_eq!(unread.front(), b"d");
        assert_eq!(unread.consume(100), Some(b"d".to_vec()));
        assert!(unread.is_empty() && unread.front().is_empty());
        assert_eq!(unread.consume(1), None);
    }

    #[test]
    fn what_is_dropped_leaves_nothing_behind() {
        let mut unread = some(&["abc", "def"]);
        assert_eq!(unread.consume(2), None);
        assert_eq!(unread.pop(), Some(b"abc".to_vec()));
        assert_eq!(unread.front(), b"def");
    }
}
