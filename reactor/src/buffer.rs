//! Buffers in the user's hands: a message during its callback, a message kept, a send being filled.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crossbeam_channel::Sender;
use rdma_transport::slab::Key;

use crate::core::Core;
use crate::frame::HEADER_LEN;
use crate::id::ConnectionId;
use crate::pool::{Buffer, Slabs};
use crate::region::Region;
use crate::remote::WakeFlag;

/// Something of the user's on its way back to the reactor.
#[derive(Debug)]
pub(crate) enum Returned {
    Buffer {
        pool: usize,
        buffer: Buffer,
        /// The connection whose receive it was, to be posted again.
        receive_of: Option<ConnectionId>,
    },
    /// A region that nobody wants any more.
    Region(Key),
}

/// The way home for buffers that leave a callback, from any thread.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) pool: usize,
    pub(crate) channel: Sender<Returned>,
    pub(crate) wake: Arc<WakeFlag>,
}

impl Home {
    fn give(&self, buffer: Buffer, receive_of: Option<ConnectionId>) {
        // A reactor that is gone needs no buffers; the memory goes with the last holder.
        if self.channel.send(Returned::Buffer { pool: self.pool, buffer, receive_of }).is_ok() {
            self.wake.wake();
        }
    }
}

/// A received message, in the registered buffer it arrived in.
///
/// Derefs to its bytes. When the callback returns, the buffer is posted again and the peer gets its credit back,
/// unless [`Message::detach`] kept it.
pub struct Message<'a> {
    pub(crate) connection: ConnectionId,
    pub(crate) content: Content<'a>,
}

/// Where the bytes of a message are.
pub(crate) enum Content<'a> {
    /// In a buffer of the pool.
    Pooled { start: usize, end: usize, buffer: &'a mut Option<Buffer>, slabs: &'a Arc<Slabs>, home: &'a Arc<Home> },
    /// In memory of its own: it was fetched.
    Region(&'a mut Option<Region>),
}

impl Message<'_> {
    /// Keeps the message past the callback, without a copy. The peer has one credit less until it is dropped; one past
    /// `Config::max_message` takes of `Config::transfer_memory` instead.
    #[must_use = "a detached message that is dropped at once was better not detached"]
    pub fn detach(self) -> DetachedMessage {
        let content = match self.content {
            Content::Pooled { start, end, buffer, slabs, home } => {
                Kept::Pooled { start, end, buffer: buffer.take(), slabs: Arc::clone(slabs), home: Arc::clone(home) }
            }
            Content::Region(region) => Kept::Region(region.take()),
        };
        DetachedMessage { connection: self.connection, content }
    }
}

impl Deref for Message<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.content {
            Content::Pooled { start, end, buffer, slabs, .. } => {
                buffer.as_ref().map_or(&[], |buffer| &slabs.bytes(buffer, *end)[*start..])
            }
            Content::Region(region) => region.as_ref().and_then(Region::bytes).unwrap_or(&[]),
        }
    }
}

impl fmt::Debug for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message({} bytes on {})", self.len(), self.connection)
    }
}

/// A received message that outlived its callback. May go to another thread; dropping it anywhere sends the buffer
/// home and gives the peer its credit back. Stays readable when the connection or the reactor is gone.
pub struct DetachedMessage {
    connection: ConnectionId,
    content: Kept,
}

/// Where the bytes of a detached message are.
enum Kept {
    Pooled { start: usize, end: usize, buffer: Option<Buffer>, slabs: Arc<Slabs>, home: Arc<Home> },
    Region(Option<Region>),
}

impl DetachedMessage {
    /// The connection it came on.
    #[must_use]
    pub const fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// The memory it was fetched into; the message itself if it came in a buffer of the pool.
    ///
    /// # Errors
    /// The message, unchanged.
    pub fn into_region(mut self) -> Result<Region, Self> {
        match &mut self.content {
            Kept::Region(region) => region.take().ok_or(self),
            Kept::Pooled { .. } => Err(self),
        }
    }

    /// Gives the buffer back at once, from the reactor's own thread: no wake-up, no waiting for a turn.
    pub(crate) fn give_back(mut self, core: &mut Core) {
        if let Kept::Pooled { buffer, home, .. } = &mut self.content
            && home.channel.same_channel(&core.return_to)
            && let Some(buffer) = buffer.take()
        {
            core.take_home(home.pool, buffer, Some(self.connection));
        }
    }
}

impl Deref for DetachedMessage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.content {
            Kept::Pooled { start, end, buffer, slabs, .. } => {
                buffer.as_ref().map_or(&[], |buffer| &slabs.bytes(buffer, *end)[*start..])
            }
            Kept::Region(region) => region.as_ref().and_then(Region::bytes).unwrap_or(&[]),
        }
    }
}

/// Without a copy: the buffer goes home when the last of the `Bytes` is dropped.
#[cfg(feature = "bytes")]
impl From<DetachedMessage> for bytes::Bytes {
    fn from(message: DetachedMessage) -> Self {
        Self::from_owner(message)
    }
}

impl AsRef<[u8]> for DetachedMessage {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for DetachedMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DetachedMessage({} bytes of {})", self.len(), self.connection)
    }
}

impl Drop for DetachedMessage {
    fn drop(&mut self) {
        if let Kept::Pooled { buffer, home, .. } = &mut self.content
            && let Some(buffer) = buffer.take()
        {
            home.give(buffer, Some(self.connection));
        }
    }
}

/// A pooled, registered buffer to fill in place and send without a copy. Starts empty; its contents beyond what was
/// written are unspecified.
pub struct SendBuffer {
    pub(crate) len: usize,
    pub(crate) capacity: usize,
    pub(crate) buffer: Option<Buffer>,
    pub(crate) slabs: Arc<Slabs>,
    pub(crate) home: Arc<Home>,
}

impl SendBuffer {
    /// Bytes it can hold.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets its length, at most [`SendBuffer::capacity`] (a larger one is cut to it).
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity);
    }

    /// Takes the buffer out of its wrapper, to send it.
    pub(crate) fn into_parts(mut self) -> Option<(Buffer, usize)> {
        let len = self.len;
        self.buffer.take().map(|buffer| (buffer, len))
    }
}

impl Deref for SendBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let end = HEADER_LEN + self.len;
        self.buffer.as_ref().map_or(&[], |buffer| &self.slabs.bytes(buffer, end)[HEADER_LEN..])
    }
}

impl DerefMut for SendBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let end = HEADER_LEN + self.len;
        match self.buffer.as_mut() {
            Some(buffer) => &mut self.slabs.bytes_mut(buffer)[HEADER_LEN..end],
            None => &mut [],
        }
    }
}

impl fmt::Debug for SendBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendBuffer({} of {} bytes)", self.len, self.capacity)
    }
}

impl Drop for SendBuffer {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.home.give(buffer, None);
        }
    }
}
