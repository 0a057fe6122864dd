//! The unread bytes of a stream.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufRead, Read};
use std::ops::Deref;

use crate::DetachedMessage;

/// The unread bytes of a stream, in the registered buffers in which they arrived. [`super::Stream::take_unread`] returns
/// them. Reads never block, and return `Ok(0)` after the last byte. A buffer returns to the reactor when its last byte is
/// read, or when the `Unread` is dropped. An `Unread` may move to another thread, and may outlive the stream and the
/// reactor.
pub struct Unread<M = DetachedMessage> {
    messages: VecDeque<M>, // bound: receives
    /// The number of bytes of the first message that the program has already read.
    read: usize,
}

impl<M> Default for Unread<M> {
    fn default() -> Self {
        Self { messages: VecDeque::new(), read: 0 }
    }
}

impl<M: Deref<Target = [u8]>> Unread<M> {
    /// Returns true if there are no unread bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Returns the number of unread bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.messages.iter().map(|message| message.len()).sum::<usize>() - self.read
    }

    /// Adds a message to the unread bytes. The message must not be empty, because an empty message ends a stream.
    pub(super) fn push(&mut self, message: M) {
        debug_assert!(!message.is_empty(), "an empty message is the end of a stream");
        self.messages.push_back(message);
    }

    /// Returns the unread bytes of the first message; an empty slice if there is no message.
    pub(super) fn front(&self) -> &[u8] {
        self.messages.front().map_or(&[], |message| &message[self.read..])
    }

    /// Marks the next `len` bytes of the first message as read. If fewer bytes are unread, marks all of them as read. If all bytes of the
    /// message are read now, removes the message and returns it; otherwise returns `None`.
    pub(super) fn advance(&mut self, len: usize) -> Option<M> {
        self.read += len.min(self.front().len());
        if self.front().is_empty() { self.pop() } else { None }
    }

    /// Removes and returns the first message, even if some of its bytes are unread. Returns `None` if there is no message.
    pub(super) fn pop(&mut self) -> Option<M> {
        self.read = 0;
        self.messages.pop_front()
    }
}

impl<M: Deref<Target = [u8]>> Read for Unread<M> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let mut len = 0;
        while len < out.len() && !self.is_empty() {
            let part = self.front().len().min(out.len() - len);
            out[len..len + part].copy_from_slice(&self.front()[..part]);
            self.advance(part);
            len += part;
        }
        Ok(len)
    }
}

impl<M: Deref<Target = [u8]>> BufRead for Unread<M> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        Ok(self.front())
    }

    fn consume(&mut self, len: usize) {
        self.advance(len);
    }
}

impl<M: Deref<Target = [u8]>> fmt::Debug for Unread<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Unread({} bytes)", self.len())
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
        assert_eq!(unread.advance(2), None);
        assert_eq!(unread.front(), b"c");
        assert_eq!(unread.advance(0), None);
        assert_eq!(unread.advance(1), Some(b"abc".to_vec()));
        assert_eq!(unread.front(), b"d");
        assert_eq!(unread.advance(100), Some(b"d".to_vec()));
        assert!(unread.is_empty() && unread.front().is_empty());
        assert_eq!(unread.advance(1), None);
    }

    #[test]
    fn what_is_dropped_leaves_nothing_behind() {
        let mut unread = some(&["abc", "def"]);
        assert_eq!(unread.advance(2), None);
        assert_eq!(unread.pop(), Some(b"abc".to_vec()));
        assert_eq!(unread.front(), b"def");
    }

    #[test]
    fn it_reads_to_its_end_and_counts_what_is_left() {
        let mut unread = some(&["abc", "def"]);
        let mut out = [0; 4];
        assert_eq!((unread.len(), unread.read(&mut out).expect("bytes"), &out), (6, 4, b"abcd"));
        assert_eq!((unread.len(), unread.fill_buf().expect("bytes")), (2, &b"ef"[..]));
        let mut rest = String::new();
        assert_eq!((unread.read_to_string(&mut rest).expect("bytes"), rest.as_str()), (2, "ef"));
        assert!(unread.is_empty());
    }
}
