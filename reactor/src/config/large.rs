//! Settings of messages that are longer than one buffer.

/// The settings of messages that are longer than one buffer ([`Config::buffer_size`](crate::Config::buffer_size)).
/// Change them with [`Config::large_messages`](crate::Config::large_messages).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LargeMessageSettings {
    /// Length of the largest message that this reactor accepts, in bytes, rounded up to whole KiB. Range: 0 to 1 TiB,
    /// and at most `memory`. A message that fits into one buffer ([`Config::buffer_size`](crate::Config::buffer_size))
    /// is always accepted. A longer message arrives in several buffers (see `eager_limit`), or the reactor fetches it
    /// from the sender's memory by RDMA Read. The program receives one message in both cases. Default: 64 MiB.
    pub max_message: u64,
    /// Length of the largest message that this reactor sends in several buffers of the peer, in
    /// bytes. The reactor does so only if it has enough credits from the peer, and enough free
    /// slots in the send queue, for all parts. The peer's reactor copies the parts into one
    /// message. Every other message that is longer than the peer's
    /// [`Config::buffer_size`](crate::Config::buffer_size) is fetched by the peer. A fetch costs
    /// two more messages and an RDMA Read. With 0, the peer fetches every message that is longer
    /// than its `buffer_size`. Default: 256 KiB.
    pub eager_limit: usize,
    /// Memory for messages that are longer than
    /// [`Config::buffer_size`](crate::Config::buffer_size), in bytes. The reactor uses up to this
    /// many bytes for received messages: those that it fetches, and those that the program keeps.
    /// It uses up to the same number of bytes in addition for messages to send: copies that peers
    /// have yet to fetch. If the memory for received messages is used up, further messages wait in
    /// the memory of their senders. If the memory for copies is used up, the reactor refuses sends
    /// with [`Blocked::Memory`](crate::Blocked::Memory). A message counts for a page (4 KiB) at
    /// least, or for a 64th of this setting if that is less. Default: 256 MiB.
    pub memory: usize,
    /// Size of the cache of registered memory, in bytes. When a message longer than
    /// [`Config::buffer_size`](crate::Config::buffer_size) does not use its memory any more, the memory stays
    /// registered in this cache. Later messages of similar length use it again, and need no registration. This memory
    /// is in addition to `memory`. It consists of at most 256 blocks; each block is the memory of one message. A block
    /// is longer than its message by at most an eighth or one page, whichever is more. The reactor releases a block if
    /// no message has used it for [`Timeouts::pool_idle`](super::Timeouts::pool_idle), or if the system refuses memory
    /// for another message. With 0, the reactor keeps no blocks.
    ///
    /// The reactor keeps up to the same number of bytes in addition, for messages that arrive in several buffers. This
    /// memory is not registered, and is freed in the same way. Default: 256 MiB.
    pub cache: usize,
}

impl Default for LargeMessageSettings {
    fn default() -> Self {
        Self { max_message: 64 << 20, eager_limit: 256 << 10, memory: 256 << 20, cache: 256 << 20 }
    }
}
