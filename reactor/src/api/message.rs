//! Buffers in the program's hands: a message during its callback, a message that is kept, a send that is being filled.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::device::pool::{Buffer, Slabs};
use crate::device::return_channel::{JoinedMessage, PoolId, ReturnChannel};
use crate::error::SendErrorKind;
use crate::id::ConnectionId;
use crate::limits::HEADER_LEN;
use crate::memory::region::Region;

/// A received message, in the registered buffer it arrived in.
///
/// A message derefs to its bytes. When the callback returns, the buffer is posted again and the peer gets its credit back,
/// unless [`Message::detach`] kept the message.
pub struct Message<'a> {
    pub(crate) connection: ConnectionId,
    pub(crate) content: Content<'a>,
}

/// Where the bytes of a message are.
pub(crate) enum Content<'a> {
    /// In a buffer of the pool.
    Pooled {
        start: usize,
        end: usize,
        buffer: &'a mut Option<Buffer>,
        slabs: &'a Arc<Slabs>,
        channel: &'a Arc<ReturnChannel>,
    },
    /// In memory of its own.
    Large(LargeContent<'a>),
}

/// The memory of a message past one buffer.
pub(crate) enum LargeContent<'a> {
    /// The message came in several buffers.
    Joined { joined: &'a mut Option<JoinedMessage>, channel: &'a Arc<ReturnChannel> },
    /// It was fetched.
    Region(&'a mut Option<Box<Region>>),
}

impl Message<'_> {
    /// Keeps the message past the callback, without a copy. The peer has one credit less until the message is dropped; a
    /// message past `Config::buffer_size` takes of `LargeMessageSettings::memory` instead. If that is used up, a message that came in
    /// several buffers keeps a credit for each of them.
    #[must_use = "a detached message that is dropped at once was better not detached"]
    pub fn detach(self) -> DetachedMessage {
        let content = match self.content {
            Content::Pooled { start, end, buffer, slabs, channel } => DetachedContent::Pooled {
                start,
                end,
                buffer: buffer.take(),
                slabs: Arc::clone(slabs),
                channel: Arc::clone(channel),
            },
            Content::Large(LargeContent::Joined { joined, channel }) => {
                DetachedContent::Joined { joined: joined.take(), channel: Arc::clone(channel) }
            }
            Content::Large(LargeContent::Region(region)) => DetachedContent::Region(region.take()),
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
            Content::Large(LargeContent::Joined { joined, .. }) => joined.as_ref().map_or(&[], |joined| &joined.bytes),
            Content::Large(LargeContent::Region(region)) => {
                region.as_ref().and_then(|region| region.bytes()).unwrap_or(&[])
            }
        }
    }
}

impl fmt::Debug for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message({} bytes on {})", self.len(), self.connection)
    }
}

/// A received message that outlived its callback. It may go to another thread; dropping it anywhere sends the buffer home and
/// gives the peer its credit back. It stays readable when the connection, its device or the reactor is gone. The memory is then
/// released together with the last message or send buffer in it.
pub struct DetachedMessage {
    connection: ConnectionId,
    content: DetachedContent,
}

/// Where the bytes of a detached message are.
enum DetachedContent {
    Pooled { start: usize, end: usize, buffer: Option<Buffer>, slabs: Arc<Slabs>, channel: Arc<ReturnChannel> },
    Joined { joined: Option<JoinedMessage>, channel: Arc<ReturnChannel> },
    Region(Option<Box<Region>>),
}

impl DetachedMessage {
    /// The connection it came on.
    #[must_use]
    pub const fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// The memory that the message was fetched into. A message is fetched if it was longer than the peer's
    /// [`crate::LargeMessageSettings::eager_limit`], or had no room. On a device with `Features::OPEN_READ_SINKS`, as iWARP adapters are, the
    /// memory is a copy that is not registered.
    ///
    /// # Errors
    /// The message, unchanged, if it came in one or several buffers of the pool.
    pub fn into_region(mut self) -> Result<Region, Self> {
        match &mut self.content {
            DetachedContent::Region(region) => region.take().map(|region| *region).ok_or(self),
            DetachedContent::Pooled { .. } | DetachedContent::Joined { .. } => Err(self),
        }
    }

    /// Takes the buffer out if it belongs to a reactor that `belongs_here` knows; else it goes home on the drop.
    pub(crate) fn take_buffer(
        &mut self,
        belongs_here: impl FnOnce(&ReturnChannel) -> bool,
    ) -> Option<(PoolId, Buffer, ConnectionId)> {
        let DetachedContent::Pooled { buffer, channel, .. } = &mut self.content else { return None };
        let buffer = if belongs_here(channel) { buffer.take() } else { None };
        buffer.map(|buffer| (channel.pool, buffer, self.connection))
    }
}

impl Deref for DetachedMessage {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.content {
            DetachedContent::Pooled { start, end, buffer, slabs, .. } => {
                buffer.as_ref().map_or(&[], |buffer| &slabs.bytes(buffer, *end)[*start..])
            }
            DetachedContent::Joined { joined, .. } => joined.as_ref().map_or(&[], |joined| &joined.bytes),
            DetachedContent::Region(region) => region.as_ref().and_then(|region| region.bytes()).unwrap_or(&[]),
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
        match &mut self.content {
            DetachedContent::Pooled { buffer, channel, .. } => {
                if let Some(buffer) = buffer.take() {
                    channel.return_buffer(buffer, Some(self.connection));
                }
            }
            DetachedContent::Joined { joined, channel } => {
                if let Some(joined) = joined.take() {
                    channel.return_joined(joined, self.connection);
                }
            }
            DetachedContent::Region(_) => {}
        }
    }
}

/// A pooled, registered buffer to fill in place and send without a copy. It starts empty; its contents beyond what was
/// written are unspecified.
pub struct SendBuffer {
    len: usize,
    capacity: usize,
    buffer: Option<Buffer>,
    slabs: Arc<Slabs>,
    channel: Arc<ReturnChannel>,
}

impl SendBuffer {
    pub(crate) const fn new(capacity: usize, buffer: Buffer, slabs: Arc<Slabs>, channel: Arc<ReturnChannel>) -> Self {
        Self { len: 0, capacity, buffer: Some(buffer), slabs, channel }
    }

    /// Bytes it can hold.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets its length, at most [`SendBuffer::capacity`]; a larger one is cut to that.
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity);
    }

    pub(crate) fn channel(&self) -> &ReturnChannel {
        &self.channel
    }

    /// Takes the buffer out of its wrapper, to send it.
    pub(crate) fn take(&mut self) -> Option<Buffer> {
        self.buffer.take()
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
            self.channel.return_buffer(buffer, None);
        }
    }
}

/// A send that was not taken, with its buffer.
#[derive(Debug)]
pub struct SendError {
    /// Why.
    pub kind: SendErrorKind,
    /// The buffer, unchanged.
    pub buffer: SendBuffer,
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

impl std::error::Error for SendError {}
