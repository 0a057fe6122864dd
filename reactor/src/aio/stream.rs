//! A byte stream over a connection, compatible with [`crate::stream`].

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context as Task, Poll, ready};

use futures_io::{AsyncBufRead, AsyncRead, AsyncWrite};

use super::connection::{AsyncConnection, Received};
use super::queue::AsyncQueue;
use super::room_waiters::{AttemptKind, Ticket};
use super::wait_queue::WaiterId;
use crate::DisconnectReason;

/// A byte stream over a connection: implements [`AsyncRead`], [`AsyncBufRead`] and [`AsyncWrite`]
/// of futures-io. The peer must use a stream, too: an `AsyncStream` or a stream of
/// [`crate::stream`]. Written bytes are sent in the next turn of the reactor. Small writes between
/// two turns are sent in one message. `poll_close` finishes writing: the peer reads all written
/// bytes, then the end of the stream. `poll_close` also succeeds if this stream has read the end of
/// the peer's stream, and the peer has closed the connection after that. If a stream is dropped
/// without `poll_close`, the peer reads the bytes that were sent, and then its reads fail.
///
/// To read in one task and write in another, clone the [`AsyncConnection`], and make a stream of each clone.
pub struct AsyncStream {
    conn: AsyncConnection,
    /// `reading` is the position of this stream among the tasks that wait for a message; `None` while the stream does not wait to read.
    /// `writing` is the position among the tasks that wait for room to send.
    reading: Option<WaiterId>,
    writing: Option<Ticket>,
    /// The message that the program is reading, and the number of bytes of this message that the program has read.
    unread: Option<(Received, usize)>,
    /// True if the program has read the end of the stream that the peer has sent.
    peer_finished: bool,
    /// True if the program has finished writing: the end of the stream is queued for sending.
    finished: bool,
}

impl fmt::Debug for AsyncStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncStream").field("conn", &self.conn).finish_non_exhaustive()
    }
}

impl From<AsyncConnection> for AsyncStream {
    fn from(conn: AsyncConnection) -> Self {
        Self { conn, reading: None, writing: None, unread: None, peer_finished: false, finished: false }
    }
}

impl AsyncStream {
    /// Waits for the end of a connection on which a send has failed. Returns true if the peer has
    /// finished writing, and has closed the connection after that: no one would read the end of the
    /// local stream.
    fn poll_closed(&mut self, task: &mut Task<'_>) -> Poll<bool> {
        if !self.peer_finished {
            return Poll::Ready(false);
        }
        let end = ready!(self.conn.poll_recv(task, &mut self.reading));
        Poll::Ready(end.is_err() && matches!(self.conn.end(), DisconnectReason::Closed))
    }

    /// Returns the connection that carries the stream.
    #[must_use]
    pub const fn connection(&self) -> &AsyncConnection {
        &self.conn
    }
}

impl Drop for AsyncStream {
    fn drop(&mut self) {
        AsyncQueue::stop_waiting(&self.conn.shared().inbox, &mut self.reading);
        self.conn.stop_waiting(&mut self.writing);
    }
}

impl AsyncRead for AsyncStream {
    fn poll_read(mut self: Pin<&mut Self>, task: &mut Task<'_>, out: &mut [u8]) -> Poll<io::Result<usize>> {
        let front = ready!(self.as_mut().poll_fill_buf(task))?;
        let len = front.len().min(out.len());
        out[..len].copy_from_slice(&front[..len]);
        self.consume(len);
        Poll::Ready(Ok(len))
    }
}

impl AsyncBufRead for AsyncStream {
    fn poll_fill_buf(self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<&[u8]>> {
        let this = self.get_mut();
        if this.unread.is_none() && !this.peer_finished {
            let message = ready!(this.conn.poll_recv(task, &mut this.reading))?;
            if message.is_empty() {
                this.peer_finished = true;
            } else {
                this.unread = Some((message, 0));
            }
        }
        Poll::Ready(Ok(this.unread.as_ref().map_or(&[][..], |(message, read)| &message[*read..])))
    }

    fn consume(mut self: Pin<&mut Self>, len: usize) {
        if let Some((message, read)) = &mut self.unread {
            *read = message.len().min(*read + len);
            if *read == message.len() {
                self.unread = None;
            }
        }
    }
}

impl AsyncWrite for AsyncStream {
    fn poll_write(mut self: Pin<&mut Self>, task: &mut Task<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.finished {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let Self { conn, writing, .. } = &mut *self;
        let id = conn.id();
        let written = conn.attempt(task, writing, AttemptKind::Message(1), |cx| {
            cx.append(id, |room| {
                let len = bytes.len().min(room.len());
                room[..len].copy_from_slice(&bytes[..len]);
                len
            })
        });
        written.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Does nothing, because the next turn of the reactor sends all written bytes.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Task<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Finishes writing: sends the end of the stream to the peer, as an empty message. Waits while the connection has no room for that
    /// message.
    fn poll_close(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        if !self.finished {
            let Self { conn, writing, .. } = &mut *self;
            let id = conn.id();
            let sent = ready!(conn.attempt(task, writing, AttemptKind::Message(0), |cx| cx.send(id, &[])));
            if sent.is_err() && !ready!(self.poll_closed(task)) {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            self.finished = true;
        }
        Poll::Ready(Ok(()))
    }
}
