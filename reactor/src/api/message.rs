//! Buffers that the program holds: a message during its callback, a message that is kept, a send that is being filled.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::device::pool::{Buffer, Slabs};
use crate::device::return_channel::{JoinedMessage, PoolId, ReturnChannel};
use crate::error::SendErrorKind;
use crate::id::ConnectionId;
use crate::limits::HEADER_LEN;
use crate::memory::region::Region;

/// A received message, in the registered buffer that it arrived in.
///
/// A message derefs to its bytes. When the callback returns, the reactor posts the buffer again and returns the credit
/// to the peer, unless [`Message::detach`] kept the message.
pub struct Message<'a> {
    pub(crate) connection: ConnectionId,
    pub(crate) content: Content<'a>,
}

/// The memory that has the bytes of a message.
pub(crate) enum Content<'a> {
    /// A buffer of the pool.
    Pooled {
        start: usize,
        end: usize,
        buffer: &'a mut Option<Buffer>,
        slabs: &'a Arc<Slabs>,
        channel: &'a Arc<ReturnChannel>,
    },
    /// Separate memory.
    Large(LargeContent<'a>),
}

/// The separate memory of a message past one buffer.
pub(crate) enum LargeContent<'a> {
    /// Memory into which a message of several buffers was copied.
    Joined { joined: &'a mut Option<JoinedMessage>, channel: &'a Arc<ReturnChannel> },
    /// The region into which the message was fetched.
    Region(&'a mut Option<Box<Region>>),
}

impl Message<'_> {
    /// Keeps the message past the callback, without a copy. The peer has one credit less until the message is dropped.
    /// A message past `Config::buffer_size` uses up `LargeMessageSettings::memory` instead; if that is used up, a
    /// message that arrived in several buffers takes a credit for each of them.
    #[must_use = "a message that is dropped immediately need not be detached"]
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

/// A received message that the program keeps past its callback. It can be sent to another thread. Dropping it on any
/// thread returns the buffer to the pool and the credit to the peer. It stays readable after its connection, its device
/// or the reactor was dropped. In that case the memory is freed with the last message or send buffer that lies in it.
pub struct DetachedMessage {
    connection: ConnectionId,
    content: DetachedContent,
}

/// The memory that has the bytes of a detached message.
enum DetachedContent {
    Pooled { start: usize, end: usize, buffer: Option<Buffer>, slabs: Arc<Slabs>, channel: Arc<ReturnChannel> },
    Joined { joined: Option<JoinedMessage>, channel: Arc<ReturnChannel> },
    Region(Option<Box<Region>>),
}

impl DetachedMessage {
    /// Returns the connection that received the message.
    #[must_use]
    pub const fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// Returns the region that the message was fetched into. A message is fetched if it was longer than the peer's
    /// [`crate::LargeMessageSettings::eager_limit`], or if there were not enough credits or send-queue slots for all
    /// its parts. On a device with `Features::OPEN_READ_SINKS`, as on iWARP adapters, the region is a copy that is not
    /// registered.
    ///
    /// # Errors
    /// The message, unchanged, if it arrived in one or several buffers of the pool.
    pub fn into_region(mut self) -> Result<Region, Self> {
        match &mut self.content {
            DetachedContent::Region(region) => region.take().map(|region| *region).ok_or(self),
            DetachedContent::Pooled { .. } | DetachedContent::Joined { .. } => Err(self),
        }
    }

    /// Takes the buffer out if `belongs_here` says that it belongs to the calling reactor. Otherwise the drop returns
    /// it.
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

/// Converts without a copy. The buffer returns to the pool when the last of the `Bytes` is dropped.
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

/// A registered buffer of the pool, to fill in place and send without a copy. Its length is 0 at first. Bytes that were
/// not written are unspecified.
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

    /// Returns the capacity of the buffer, bytes.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the length of the message, bytes. A length of more than [`SendBuffer::capacity`] is reduced to it.
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity);
    }

    pub(crate) fn channel(&self) -> &ReturnChannel {
        &self.channel
    }

    /// Takes the buffer out, to send it.
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

/// A send that was refused, with its buffer.
#[derive(Debug)]
pub struct SendError {
    /// The reason.
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
