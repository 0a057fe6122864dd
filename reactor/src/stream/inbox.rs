//! What has arrived and was not read yet. No I/O.

use std::collections::VecDeque;
use std::ops::Deref;

/// Messages in order, the first one read in part.
#[derive(Debug)]
pub(crate) struct Inbox<M> {
    messages: VecDeque<M>,
    /// Bytes of the first one that are read.
    read: usize,
}

impl<M> Default for Inbox<M> {
    fn default() -> Self {
        Self { messages: VecDeque::new(), read: 0 }
    }
}

impl<M: Deref<Target = [u8]>> Inbox<M> {
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Adds a message that is not empty.
    pub(crate) fn push(&mut self, message: M) {
        debug_assert!(!message.is_empty(), "an empty message would be an end");
        self.messages.push_back(message);
    }

    /// What comes next, as far as it is in one piece; nothing if there is nothing.
    pub(crate) fn front(&self) -> &[u8] {
        self.messages.front().map_or(&[], |message| &message[self.read..])
    }

    /// Takes note that the first `len` bytes of the front are read, or all if it has less; returns the message if it is
    /// done with.
    pub(crate) fn consume(&mut self, len: usize) -> Option<M> {
        self.read += len.min(self.front().len());
        if self.front().is_empty() { self.pop() } else { None }
    }

    /// Takes the first message, read or not.
    pub(crate) fn pop(&mut self) -> Option<M> {
        self.read = 0;
        self.messages.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inbox(messages: &[&str]) -> Inbox<Vec<u8>> {
        let mut inbox = Inbox::default();
        for message in messages {
            inbox.push(message.as_bytes().to_vec());
        }
        inbox
    }

    #[test]
    fn a_message_is_done_with_when_its_last_byte_is_read() {
        let mut inbox = inbox(&["abc", "d"]);
        assert_eq!(inbox.consume(2), None);
        assert_eq!(inbox.front(), b"c");
        assert_eq!(inbox.consume(0), None);
        assert_eq!(inbox.consume(1), Some(b"abc".to_vec()));
        assert_eq!(inbox.front(), b"d");
        assert_eq!(inbox.consume(100), Some(b"d".to_vec()));
        assert!(inbox.is_empty() && inbox.front().is_empty());
        assert_eq!(inbox.consume(1), None);
    }

    #[test]
    fn what_is_dropped_leaves_nothing_behind() {
        let mut inbox = inbox(&["abc", "def"]);
        assert_eq!(inbox.consume(2), None);
        assert_eq!(inbox.pop(), Some(b"abc".to_vec()));
        assert_eq!(inbox.front(), b"def");
    }
}
