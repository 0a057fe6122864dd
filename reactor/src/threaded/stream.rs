//! A byte stream over a connection of a [`super::ThreadedReactor`], compatible with
//! [`crate::stream`].

use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll, ready};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, TryAcquireError};

use super::connection::ThreadedConnection;
use super::error::ConnectionEnd;
use crate::{DetachedMessage, DisconnectReason};

/// The largest number of bytes that one write accepts. They are one message.
const MAX_WRITE: usize = 64 << 10;

/// A wait for a permit to queue a message.
type PermitWait = Pin<Box<dyn Future<Output = Result<OwnedSemaphorePermit, AcquireError>> + Send>>;

/// A byte stream over a connection, on any thread: implements [`AsyncRead`], [`AsyncBufRead`] and
/// [`AsyncWrite`] of tokio, so that libraries for tokio's `TcpStream` run on it. From
/// [`ThreadedConnection::into_stream`].
///
/// The peer must use a stream, too: a `ThreadedStream`, a [`crate::aio::AsyncStream`] or a stream
/// of [`crate::stream`].
///
/// - Each write is one message of at most 64 KiB, which is sent without a flush. A write waits
///   while 64 messages are queued. Programs with small writes use tokio's `BufWriter`.
/// - `poll_shutdown` finishes writing: the peer reads all written bytes, then the end of the
///   stream. It also succeeds if the program has read the end of the peer's stream, and the peer
///   has closed the connection after that: the peer does not read the end, nor the bytes that were
///   written last.
/// - If the stream is dropped without `poll_shutdown`, the peer reads the bytes that were written,
///   and then its reads fail. Dropping the stream closes its connection.
/// - Unread bytes occupy receive buffers, so a peer must stop writing while its bytes are not read.
///
/// ```
/// use rdma_reactor::Config;
/// use rdma_reactor::threaded::ThreadedReactor;
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # tokio::runtime::Builder::new_multi_thread().build()?.block_on(async {
/// let reactor = ThreadedReactor::start(Config::default())?;
/// let mut listener = reactor.listen(([127, 0, 0, 1], 0).into()).await?;
/// let mut client = reactor.connect(listener.local_address()).await?.into_stream();
/// let server = tokio::spawn(async move {
///     let mut stream = listener.accept().await.expect("a client").into_stream();
///     let mut question = String::new();
///     stream.read_to_string(&mut question).await?;
///     stream.write_all(question.to_uppercase().as_bytes()).await?;
///     stream.shutdown().await
/// });
/// client.write_all(b"hello").await?;
/// client.shutdown().await?;
/// let mut answer = String::new();
/// client.read_to_string(&mut answer).await?;
/// assert_eq!(answer, "HELLO");
/// server.await??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })
/// # }
/// ```
pub struct ThreadedStream {
    conn: ThreadedConnection,
    /// The wait for a permit to queue the message of a write; `None` if no write waits.
    room: Option<PermitWait>,
    /// The message that the program is reading, and the number of its bytes that the program has
    /// read.
    unread: Option<(DetachedMessage, usize)>,
    /// True if the program has read the end of the stream that the peer has sent.
    peer_finished: bool,
    /// True if the program has finished writing: the end of the stream is queued.
    finished: bool,
}

impl ThreadedConnection {
    /// Uses this connection as a byte stream, with the traits of tokio, until the connection ends.
    /// The peer must use a stream, too.
    ///
    /// Example: [`ThreadedStream`].
    #[must_use]
    pub const fn into_stream(self) -> ThreadedStream {
        ThreadedStream { conn: self, room: None, unread: None, peer_finished: false, finished: false }
    }
}

impl fmt::Debug for ThreadedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadedStream").field("conn", &self.conn).finish_non_exhaustive()
    }
}

impl ThreadedStream {
    /// Returns the connection that carries the stream, for its id, its peer and the identity of the
    /// peer. A message that the program sends on it becomes a part of the stream.
    #[must_use]
    pub const fn connection(&self) -> &ThreadedConnection {
        &self.conn
    }

    /// Returns the reason why the connection has ended.
    fn error(&self) -> io::Error {
        match self.conn.sender.handle.state.ended() {
            ConnectionEnd::Disconnected(reason) => reason.into(),
            end => io::Error::new(io::ErrorKind::BrokenPipe, end),
        }
    }

    /// Returns true if the program of the peer has closed the connection.
    fn is_closed(&self) -> bool {
        matches!(self.conn.sender.handle.state.ended(), ConnectionEnd::Disconnected(DisconnectReason::Closed))
    }

    /// Waits for room for one message.
    fn poll_room(&mut self, task: &mut Task<'_>) -> Poll<io::Result<OwnedSemaphorePermit>> {
        let room = &self.conn.sender.handle.state.room;
        if self.room.is_none() {
            match Arc::clone(room).try_acquire_owned() {
                Ok(permit) => return Poll::Ready(Ok(permit)),
                Err(TryAcquireError::Closed) => return Poll::Ready(Err(self.error())),
                Err(TryAcquireError::NoPermits) => {}
            }
        }
        let wait = self.room.get_or_insert_with(|| Box::pin(Arc::clone(room).acquire_owned()));
        let permit = ready!(wait.as_mut().poll(task));
        self.room = None;
        Poll::Ready(permit.map_err(|_| self.error()))
    }

    /// Returns the largest number of bytes that one message may have.
    fn max_write(&self) -> usize {
        let peer = self.conn.sender.handle.state.peer.get();
        let most = peer.map_or(u64::MAX, |peer| peer.max_message);
        usize::try_from(most).map_or(MAX_WRITE, |most| most.min(MAX_WRITE))
    }
}

impl AsyncRead for ThreadedStream {
    fn poll_read(mut self: Pin<&mut Self>, task: &mut Task<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let front = ready!(self.as_mut().poll_fill_buf(task))?;
        let len = front.len().min(out.remaining());
        out.put_slice(&front[..len]);
        self.consume(len);
        Poll::Ready(Ok(()))
    }
}

impl AsyncBufRead for ThreadedStream {
    fn poll_fill_buf(self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<&[u8]>> {
        let this = self.get_mut();
        if this.unread.is_none() && !this.peer_finished {
            match ready!(this.conn.receiver.inbox.poll_recv(task)) {
                Some(message) if message.is_empty() => this.peer_finished = true,
                Some(message) => this.unread = Some((message, 0)),
                None => return Poll::Ready(Err(this.error())),
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

impl AsyncWrite for ThreadedStream {
    fn poll_write(self: Pin<&mut Self>, task: &mut Task<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(task, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        task: &mut Task<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.finished {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let all = slices.iter().map(|slice| slice.len()).fold(0, usize::saturating_add);
        let len = all.min(this.max_write());
        // An empty message would be the end of the stream.
        if len == 0 {
            return Poll::Ready(Ok(0));
        }
        let permit = ready!(this.poll_room(task))?;
        let mut message = BytesMut::with_capacity(len);
        for slice in slices {
            let most = len - message.len();
            message.extend_from_slice(&slice[..slice.len().min(most)]);
        }
        this.conn.sender.post(message.freeze(), None, permit);
        Poll::Ready(Ok(len))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: all written bytes are sent.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Task<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Finishes writing: queues the end of the stream, as an empty message.
    fn poll_shutdown(self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.finished {
            match ready!(this.poll_room(task)) {
                Ok(permit) => this.conn.sender.post(Bytes::new(), None, permit),
                Err(_) if this.peer_finished && this.is_closed() => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
            this.finished = true;
        }
        Poll::Ready(Ok(()))
    }
}
