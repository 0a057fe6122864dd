//! Settings of messages past one buffer.

/// The settings of messages past one buffer; see [`Config::large_messages`](crate::Config::large_messages).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LargeMessageSettings {
    /// Largest message that this reactor accepts, bytes, rounded up to whole KiB: 0 to 1 TiB, at most `memory`. A
    /// message that fits into one buffer ([`Config::buffer_size`](crate::Config::buffer_size)) is always accepted. A
    /// longer one arrives in several buffers (`eager_limit`), or the reactor fetches it from the sender's memory by
    /// RDMA Read. Either way it is delivered as one message. Default: 64 MiB.
    pub max_message: u64,
    /// Largest message that this reactor sends in several buffers of the peer, bytes, if the peer's window and the send
    /// queue have room for all of it. The peer puts the parts together by a copy. Every other message past the peer's
    /// [`Config::buffer_size`](crate::Config::buffer_size) is offered, and the peer fetches it, which takes two more
    /// messages and a Read. 0 offers all of them. Default: 256 KiB.
    pub eager_limit: usize,
    /// Memory for messages past [`Config::buffer_size`](crate::Config::buffer_size), bytes. One such amount is for
    /// messages that are being fetched or kept here, and a second one is for copies of messages that peers have yet to
    /// fetch. Messages for which there is no memory wait. Default: 256 MiB.
    pub memory: usize,
    /// Memory of messages past [`Config::buffer_size`](crate::Config::buffer_size) that stays registered when they are
    /// done, bytes, so that later messages of similar length need no registration. It is in addition to `memory`, in at
    /// most 256 blocks. A block is returned to the system if it was not needed for
    /// [`Timeouts::pool_idle`](super::Timeouts::pool_idle), or if other memory cannot be registered without that. A
    /// block may be longer than its message by an eighth. 0 keeps nothing. Default: 256 MiB.
    pub cache: usize,
}

impl Default for LargeMessageSettings {
    fn default() -> Self {
        Self { max_message: 64 << 20, eager_limit: 256 << 10, memory: 256 << 20, cache: 256 << 20 }
    }
}
