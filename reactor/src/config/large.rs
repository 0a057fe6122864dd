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
    /// Length of the largest message that this reactor sends in several buffers of the peer, in bytes. It does so only
    /// if the peer's window and the send queue have room for all parts; the peer then copies the parts together. The
    /// peer fetches every other message that is longer than its [`Config::buffer_size`](crate::Config::buffer_size). A
    /// fetch costs two more messages and an RDMA Read. With 0, the peer fetches all of them. Default: 256 KiB.
    pub eager_limit: usize,
    /// Memory for messages that are longer than [`Config::buffer_size`](crate::Config::buffer_size), in bytes. The
    /// reactor uses up to this much for messages that it fetches, or that the program keeps. It uses up to the same
    /// amount again for copies of messages that peers have yet to fetch. Messages for which there is no memory wait.
    /// Default: 256 MiB.
    pub memory: usize,
    /// Memory that stays registered after a message longer than [`Config::buffer_size`](crate::Config::buffer_size) has
    /// ended, in bytes. Later messages of similar length then need no registration. This memory is in addition to
    /// `memory`, and consists of at most 256 blocks. A block is longer than its message by at most an eighth or one
    /// page, whichever is more. The reactor releases a block if no message has used it for
    /// [`Timeouts::pool_idle`](super::Timeouts::pool_idle), or if the system refuses to register other memory. With 0,
    /// the reactor keeps no blocks. Default: 256 MiB.
    pub cache: usize,
}

impl Default for LargeMessageSettings {
    fn default() -> Self {
        Self { max_message: 64 << 20, eager_limit: 256 << 10, memory: 256 << 20, cache: 256 << 20 }
    }
}
