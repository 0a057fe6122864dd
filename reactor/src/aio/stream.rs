//! A byte stream over a connection, which a peer with [`crate::stream`] understands.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context as Task, Poll, ready};

use futures_io::{AsyncBufRead, AsyncRead, AsyncWrite};

use super::arrivals::Arrivals;
use super::connection::{Connection, Received};
use super::waiters::Place;
use super::writers::{Attempt, Ticket};

/// A connection as bytes in order: [`AsyncRead`], [`AsyncBufRead`] and [`AsyncWrite`] of futures-io. The peer is a stream, too, of this
/// kind or of [`crate::stream`]. What is written goes out with the next turn; small writes between two turns share a message. Closing
/// ends the writing: the peer reads everything, then an end. A stream that is dropped unclosed is an error to its peer.
///
/// For two halves in two tasks, take two clones of the [`Connection`], one to read and one to write, and make a stream of each.
pub struct Stream {
    conn: Connection,
    /// Where this stream waits for a message, and for room.
    reading: Option<Place>,
    writing: Option<Ticket>,
    /// The message that is being read, and the bytes of it that are.
    unread: Option<(Received, usize)>,
    /// The peer writes no more.
    peer_finished: bool,
    /// This side writes no more.
    finished: bool,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("conn", &self.conn).finish_non_exhaustive()
    }
}

impl From<Connection> for Stream {
    fn from(conn: Connection) -> Self {
        Self { conn, reading: None, writing: None, unread: None, peer_finished: false, finished: false }
    }
}

impl Stream {
    /// The connection that carries the stream.
    #[must_use]
    pub const fn connection(&self) -> &Connection {
        &self.conn
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        Arrivals::give_up(&self.conn.line().inbox, &mut self.reading);
        self.conn.give_up_sending(&mut self.writing);
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, task: &mut Task<'_>, out: &mut [u8]) -> Poll<io::Result<usize>> {
        let front = ready!(self.as_mut().poll_fill_buf(task))?;
        let len = front.len().min(out.len());
        out[..len].copy_from_slice(&front[..len]);
        self.consume(len);
        Poll::Ready(Ok(len))
    }
}

impl AsyncBufRead for Stream {
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

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, task: &mut Task<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.finished {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let Self { conn, writing, .. } = &mut *self;
        let id = conn.id();
        let written = conn.attempt(task, writing, Attempt::Message(1), |cx| {
            cx.append(id, |room| {
                let len = bytes.len().min(room.len());
                room[..len].copy_from_slice(&bytes[..len]);
                len
            })
        });
        written.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Does nothing: the next turn sends what was written.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Task<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Tells the peer that this side writes no more; waits while there is no room for that.
    fn poll_close(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        if !self.finished {
            let Self { conn, writing, .. } = &mut *self;
            let id = conn.id();
            let told = ready!(conn.attempt(task, writing, Attempt::Message(0), |cx| cx.send(id, &[])));
            told.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
            self.finished = true;
        }
        Poll::Ready(Ok(()))
    }
}
