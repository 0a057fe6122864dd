//! A stream, to read and write.

use std::fmt;
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};

use super::table::{Table, Writing};
use super::unread::Unread;
use crate::{ConnectionId, Context, Readiness, SendErrorKind};

/// A stream, borrowed from its [`super::StreamContext`]. Nothing here blocks: what cannot be done now is
/// [`ErrorKind::WouldBlock`], and a callback follows. All calls fail with [`ErrorKind::NotConnected`] when the stream is not
/// there any more.
pub struct Stream<'a> {
    pub(super) table: &'a mut Table,
    pub(super) cx: Context<'a>,
    pub(super) id: ConnectionId,
}

impl Stream<'_> {
    /// The connection it is on.
    #[must_use]
    pub const fn id(&self) -> ConnectionId {
        self.id
    }

    /// Address of the peer; `None` when the connection is gone.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.cx.peer_address(self.id)
    }

    /// What can be done now, for loops that ask instead of being called. Readable: a read does not say `WouldBlock`.
    /// Writable: a write takes at least one byte. Closed: the peer writes no more, or the connection is gone.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        let Some(record) = self.table.get(self.id) else { return Readiness::new(true, false, true) };
        let closed = record.peer_finished || record.reason.is_some();
        let readable = !record.unread.is_empty() || record.deaf || closed;
        Readiness::new(readable, record.writing == Writing::Open && self.cx.writable(self.id) > 0, closed)
    }

    /// Writes without a copy: `fill` gets room of a buffer that goes out at the end of the turn, at least one byte, at
    /// most a message, and says how many bytes it has put there. Returns that.
    ///
    /// # Errors
    /// As `write`; `fill` is not called then.
    pub fn write_with(&mut self, fill: impl FnOnce(&mut [u8]) -> usize) -> io::Result<usize> {
        let record = self.table.get(self.id).ok_or(ErrorKind::NotConnected)?;
        if record.writing != Writing::Open {
            return Err(ErrorKind::BrokenPipe.into());
        }
        self.cx.append(self.id, fill).map_err(|kind| match kind {
            SendErrorKind::WouldBlock(_) => ErrorKind::WouldBlock.into(),
            // The connection is going: reads say why.
            _ => ErrorKind::BrokenPipe.into(),
        })
    }

    /// Ends one direction, or both. After `Write`, the peer reads what was written and then an end, writes here fail
    /// with `BrokenPipe`, and the other direction goes on; after `Read`, what is unread and what comes is dropped. When
    /// both sides have finished writing, the connection is closed. Harmless when repeated.
    ///
    /// # Errors
    /// [`ErrorKind::NotConnected`].
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

    /// Takes what has come and was not read yet, to be read elsewhere or later: after [`super::StreamHandler::on_close`] or
    /// `on_error`, say, for which this is the last chance. The peer gets its credit back as what was taken is read or dropped.
    /// Empty if there is nothing, or the stream is not there any more.
    pub fn take_unread(&mut self) -> Unread {
        self.table.get_mut(self.id).map(|record| std::mem::take(&mut record.unread)).unwrap_or_default()
    }

    /// Ends the stream; only `on_close` or `on_error` follows. What was written is sent, and an end behind it, for which
    /// room is awaited for [`super::Streams::linger`]. With bytes unread there is no end: to the peer it is an error, as
    /// with TCP. Harmless when repeated.
    pub fn close(mut self) {
        self.table.close(&mut self.cx, self.id);
    }
}

impl Read for Stream<'_> {
    /// Reads what is there, up to the length of `out`. `Ok(0)`: the peer has finished, or `out` is empty.
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
    /// What comes next, in the buffer it arrived in. Empty: the peer has finished.
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let record = self.table.get_mut(self.id).ok_or(ErrorKind::NotConnected)?;
        let early_end = cfg!(planted = "stream-ends-before-its-bytes") && record.peer_finished;
        if !record.unread.is_empty() && !early_end {
            return Ok(record.unread.front());
        }
        match &record.reason {
            _ if record.peer_finished || record.deaf => Ok(&[]),
            Some(reason) => Err(reason.clone().into()),
            None => Err(ErrorKind::WouldBlock.into()),
        }
    }

    /// Takes note that `len` bytes of `fill_buf` are read. The peer gets its credit back with the last one of a message.
    fn consume(&mut self, len: usize) {
        if let Some(message) = self.table.get_mut(self.id).and_then(|record| record.unread.advance(len)) {
            self.cx.release(message);
        }
    }
}

impl Write for Stream<'_> {
    /// Takes as much as there is room for. It goes out at the end of the turn.
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

    /// Does nothing: the end of the turn flushes.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Stream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("id", &self.id).field("readiness", &self.readiness()).finish()
    }
}
