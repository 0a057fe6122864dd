//! Messages past one buffer.

/// How messages past one buffer are carried; see [`Config::large_messages`](crate::Config::large_messages).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LargeMessageSettings {
    /// Largest message this side takes at all, bytes, rounded up to whole KiB: 0 to 1 TiB, at most `memory`. A
    /// message that fits into one buffer ([`Config::buffer_size`](crate::Config::buffer_size)) is taken in any case. What is past that comes in several
    /// buffers (`eager_limit`) or is fetched from the sender's memory by RDMA Read, and arrives as one
    /// message. Default: 64 MiB.
    pub max_message: u64,
    /// Largest message that this side sends at once in several buffers of the peer, bytes, if the peer's window and the
    /// send queue have room for all of it. Every other message past the peer's [`Config::buffer_size`](crate::Config::buffer_size) is offered, and the peer
    /// fetches it, which takes two more messages and a Read. The peer puts the buffers together by a copy. 0 offers
    /// them all. Default: 256 KiB.
    pub eager_limit: usize,
    /// Memory for messages past [`Config::buffer_size`](crate::Config::buffer_size), bytes: so much for those that are being fetched or kept here, and so
    /// much again for copies of those that peers are to fetch. What has no room waits. Default: 256 MiB.
    pub memory: usize,
    /// Memory of messages past [`Config::buffer_size`](crate::Config::buffer_size) that stays registered when they are done, bytes, so that the next ones of
    /// about the same length register none. It comes on top of `memory`, in at most 256 pieces, and goes back
    /// to the system when it was not needed for [`Timeouts::pool_idle`](super::Timeouts::pool_idle), or when memory cannot be registered otherwise. A piece may
    /// be longer than its message by an eighth. 0 keeps nothing. Default: 256 MiB.
    pub cache: usize,
}

impl Default for LargeMessageSettings {
    fn default() -> Self {
        Self { max_message: 64 << 20, eager_limit: 256 << 10, memory: 256 << 20, cache: 256 << 20 }
    }
}
