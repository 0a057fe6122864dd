//! The handle of a stream, with which the program reads and writes.

use std::fmt;
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};

use super::table::{StreamTable, Writing};
use super::unread::Unread;
use crate::{ConnectionId, Context, Readiness, SendErrorKind};

/// A stream, borrowed from its [`super::StreamContext`]. No call blocks. If a read or a write can make no progress, it fails with
/// [`ErrorKind::WouldBlock`]. When it can make progress again, the reactor calls `on_readable` or `on_writable`. All calls fail with
/// [`ErrorKind::NotConnected`] once the stream has ended.
pub struct Stream<'a> {
    pub(super) table: &'a mut StreamTable,
    pub(super) cx: Context<'a>,
    pub(super) id: ConnectionId,
}

impl Stream<'_> {
    /// Returns the id of the connection that carries the stream. It is also the id of the stream.
    #[must_use]
    pub const fn id(&self) -> ConnectionId {
        self.id
    }

    /// Returns the address of the peer; `None` if the connection has ended.
    #[must_use]
    pub fn peer_address(&mut self) -> Option<SocketAddr> {
        self.cx.connection(self.id).peer_address()
    }

    /// Returns the readiness of the stream, for loops that poll:
    ///
    /// - Readable: a read does not fail with `WouldBlock`.
    /// - Writable: a write accepts at least one byte.
    /// - Closed: the peer has finished writing, or the connection has ended.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        let Some(record) = self.table.get(self.id) else { return Readiness::new(true, false, true) };
        let closed = record.peer_finished || record.reason.is_some();
        let readable = !record.unread.is_empty() || record.read_closed || closed;
        Readiness::new(readable, record.writing == Writing::Open && self.cx.writable(self.id) > 0, closed)
    }

    /// Writes bytes without copying them. The closure `fill` gets the free part of a registered send buffer. That part has at least one
    /// byte, and at most the length of the longest message in one buffer. `fill` returns the number of bytes that it has written to the
    /// part, and `write_with` returns the same number. The reactor posts the buffer at the end of the turn.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`] if the connection has no room, [`ErrorKind::BrokenPipe`] if the program has finished writing or the
    /// connection is ending, and [`ErrorKind::NotConnected`] if the stream has ended. If there is an error, `fill` was not called.
    pub fn write_with(&mut self, fill: impl FnOnce(&mut [u8]) -> usize) -> io::Result<usize> {
        let record = self.table.get(self.id).ok_or(ErrorKind::NotConnected)?;
        if record.writing != Writing::Open {
            return Err(ErrorKind::BrokenPipe.into());
        }
        self.cx.append(self.id, fill).map_err(|kind| match kind {
            SendErrorKind::WouldBlock(_) => ErrorKind::WouldBlock.into(),
            // The connection is ending: this write fails with `BrokenPipe`. Reads fail with the reason for the end.
            _ => ErrorKind::BrokenPipe.into(),
        })
    }

    /// Ends one direction of the stream, or both. After `Shutdown::Write`, local writes fail with `BrokenPipe`. The peer reads all bytes
    /// that were written, and then the end of the stream. The program may still read. After `Shutdown::Read`, unread bytes and bytes that
    /// arrive later are dropped. When both sides have finished writing, the connection is closed. A second call with the same direction has
    /// no effect.
    ///
    /// # Errors
    /// [`ErrorKind::NotConnected`] if the stream has ended.
    pub fn shutdown(&mut self, how: Shutdown) -> io::Result<()> {
        self.table.get(self.id).ok_or(ErrorKind::NotConnected)?;
        if how != Shutdown::Write {
            self.table.shut_down_reading(&mut self.cx, self.id);
        }
        if how != Shutdown::Read {
            self.table.shut_down_writing(&mut self.cx, self.id);
        }
        Ok(())
    }

    /// Removes the unread bytes from the stream, and returns them. The program may read the returned bytes later, or on another thread.
    /// Call `take_unread` no later than in the last callback of the stream, [`super::StreamHandler::on_close`] or `on_error`. The bytes
    /// occupy receive buffers, so the peer gets new credits only when the program reads or drops the bytes. The result is empty if there
    /// are no unread bytes, or if the stream has ended.
    pub fn take_unread(&mut self) -> Unread {
        self.table.get_mut(self.id).map(|record| std::mem::take(&mut record.unread)).unwrap_or_default()
    }

    /// Closes the stream. The only further callback of the stream is `on_close` or `on_error`. All bytes that were written are sent, and
    /// then the end of the stream, which is an empty message. If the connection has no room for this message, the message waits for up to
    /// [`super::Streams::linger`]. If the program has left received bytes unread, the end is not sent, and the peer gets an error, as with
    /// TCP. A second call has no effect.
    pub fn close(mut self) {
        self.table.close(&mut self.cx, self.id);
    }
}

impl Read for Stream<'_> {
    /// Copies arrived bytes to `out`, and returns the number of copied bytes. Returns `Ok(0)` if
    /// all bytes were read and the peer has finished writing, if the program has shut the stream
    /// down for reading, or if `out` is empty.
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let mut len = 0;
        while len < out.len() && (len == 0 || self.table.get(self.id).is_some_and(|record| !record.unread.is_empty())) {
            let front = self.fill_buf()?;
            let part = front.len().min(out.len() - len);
            if part == 0 {
                break;
            }
            out[len..len + part].copy_from_slice(&front[..part]);
            self.consume(part);
            len += part;
        }
        Ok(len)
    }
}

impl BufRead for Stream<'_> {
    /// Returns the next unread bytes, in the buffer in which they arrived. Returns an empty slice
    /// if all bytes were read and the peer has finished writing, or if the program has shut the
    /// stream down for reading.
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let record = self.table.get_mut(self.id).ok_or(ErrorKind::NotConnected)?;
        let early_end = crate::planted("stream-ends-before-its-bytes") && record.peer_finished;
        if !record.unread.is_empty() && !early_end {
            return Ok(record.unread.front());
        }
        match &record.reason {
            _ if record.peer_finished || record.read_closed => Ok(&[]),
            Some(reason) => Err(reason.clone().into()),
            None => Err(ErrorKind::WouldBlock.into()),
        }
    }

    /// Marks the next `len` unread bytes as read. These are the first bytes of the slice that `fill_buf` returns. When all bytes of a
    /// message are read, its buffer is released, and the peer gets a new credit.
    fn consume(&mut self, len: usize) {
        if let Some(message) = self.table.get_mut(self.id).and_then(|record| record.unread.advance(len)) {
            self.cx.release(message);
        }
    }
}

impl Write for Stream<'_> {
    /// Copies bytes to send buffers, until all are copied or the connection has no room. Returns the number of copied bytes. The reactor
    /// posts the buffers at the end of the turn.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut len = 0;
        while len < bytes.len() {
            let rest = &bytes[len..];
            let taken = self.write_with(|room| {
                let part = rest.len().min(room.len());
                room[..part].copy_from_slice(&rest[..part]);
                part
            });
            match taken {
                Ok(part) => len += part,
                Err(_) if len > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(len)
    }

    /// Does nothing, because the reactor sends all written bytes at the end of the turn.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Stream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("id", &self.id).field("readiness", &self.readiness()).finish()
    }
}
