//! The message buffers of a program: received messages, messages that it keeps, and messages that
//! it fills to send.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::device::pool::{Buffer, Slabs};
use crate::device::return_channel::{JoinedMessage, PoolId, ReturnChannel};
use crate::error::SendErrorKind;
use crate::id::ConnectionId;
use crate::limits::HEADER_LEN;
use crate::memory::region::Region;

/// A received message. Its bytes are in a registered buffer, or in separate memory if the message is longer than one
/// buffer. The program reads them there.
///
/// A message dereferences to its bytes. When the callback returns, the reactor posts the message's buffer as a receive
/// again, and returns the credit to the peer. The reactor does neither if [`Message::detach`] has kept the message.
pub struct Message<'a> {
    pub(crate) connection: ConnectionId,
    pub(crate) content: Content<'a>,
}

/// The memory that contains the bytes of a message.
pub(crate) enum Content<'a> {
    /// A receive buffer of the pool. The message is in the bytes from `start` to `end`.
    Pooled {
        start: usize,
        end: usize,
        buffer: &'a mut Option<Buffer>,
        slabs: &'a Arc<Slabs>,
        channel: &'a Arc<ReturnChannel>,
    },
    /// Separate memory, for a message that is longer than one buffer.
    Large(LargeContent<'a>),
}

/// The separate memory of a message that is longer than one buffer.
pub(crate) enum LargeContent<'a> {
    /// Memory into which the reactor has copied the parts of a message that arrived in several buffers.
    Joined { joined: &'a mut Option<JoinedMessage>, channel: &'a Arc<ReturnChannel> },
    /// The region into which the reactor has fetched the message by RDMA Read.
    Region(&'a mut Option<Box<Region>>),
}

impl Message<'_> {
    /// Keeps the message after the callback has returned, without a copy. The peer has one credit less until the
    /// program drops the kept message or passes it to [`crate::Context::release`].
    ///
    /// A message that is longer than `Config::buffer_size` is in separate memory. Such a message costs no credit. It
    /// counts towards `LargeMessageSettings::memory` instead. If that memory is used up, a message that arrived in
    /// several buffers costs one credit for each of these buffers.
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

/// A received message that the program keeps after `on_recv` has returned. It can be moved to another thread. A drop of
/// the message, on any thread, returns the buffer to the pool and the credit to the peer. The message stays readable
/// after its connection, its device or the reactor was dropped. In these cases, the memory of the pool exists until the
/// last message and the last send buffer in it are dropped.
pub struct DetachedMessage {
    connection: ConnectionId,
    content: DetachedContent,
}

/// The memory that contains the bytes of a kept message.
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

    /// Returns the region into which the message was fetched. The reactor fetches a message if it is longer than the
    /// peer's [`crate::LargeMessageSettings::eager_limit`], or if the peer had too few credits or send-queue slots to
    /// send it in several buffers. On a device with `Features::OPEN_READ_SINKS`, such as an iWARP adapter, the returned
    /// region contains a copy of the message, and is not registered.
    ///
    /// # Errors
    /// The unchanged message, if it was not fetched but arrived in one or several buffers of the pool.
    pub fn into_region(mut self) -> Result<Region, Self> {
        match &mut self.content {
            DetachedContent::Region(region) => region.take().map(|region| *region).ok_or(self),
            DetachedContent::Pooled { .. } | DetachedContent::Joined { .. } => Err(self),
        }
    }

    /// Takes the buffer out of the message, if the message is in one buffer and if `belongs_here` returns true for the
    /// buffer's return channel. Returns the pool, the buffer and the connection that received the message. Otherwise
    /// returns `None` and changes nothing. In that case, a drop of the message returns its memory to the reactor that
    /// received the message.
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

/// Converts the message to `Bytes` without a copy. The buffer of the message returns to the pool when the last clone of
/// these `Bytes` is dropped.
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

/// A registered buffer of the pool. The program fills it in place, and sends it without a copy. Its length is 0 at
/// first. The contents of bytes that the program has not written are unspecified.
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

    /// Returns the largest length of a message in this buffer, in bytes.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the length of the message, in bytes. A `len` above [`SendBuffer::capacity`] sets the length to the
    /// capacity.
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity);
    }

    pub(crate) fn channel(&self) -> &ReturnChannel {
        &self.channel
    }

    /// Returns the buffer of the pool, for a send to take. After a send has taken it, a drop of the
    /// `SendBuffer` returns no buffer to the pool.
    pub(crate) const fn buffer_mut(&mut self) -> &mut Option<Buffer> {
        &mut self.buffer
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

/// The error of [`crate::Context::send_buffer`]. It contains the buffer of the refused send, so that the program can
/// use the buffer again.
#[derive(Debug, thiserror::Error)]
#[error("{kind}")]
pub struct SendError {
    /// The reason why the send was refused.
    pub kind: SendErrorKind,
    /// The buffer of the send, unchanged.
    pub buffer: SendBuffer,
}
