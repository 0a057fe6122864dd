//! The protocol of `valkey-server` with its RDMA transport, which `valkey-rdma` uses. Both directions work the same way:
//!
//! | receiver of bytes | | sender of bytes |
//! |---|---|---|
//! | sends the address of its transfer buffer ([`command`]) | message -> | |
//! | | <- RDMA Write with Immediate | writes bytes there; the immediate data is their number |
//! | | <- RDMA Write with Immediate | writes the next bytes after them, and so on |
//! | has read the buffer to its end, and sends its address again | message -> | writes from the beginning again |
//!
//! The transport does not interpret the bytes: they are those of a connection over TCP ([`resp`]). At the beginning, the client
//! requests the server's features, and reports which of them it uses; no features are defined yet. Each side may send a `Keepalive`. It
//! has no answer: if the peer is gone, the device reports that the send failed.
//!
//! There is no flow control. On iWARP, the connection ends if a side sends more messages than its peer has receives for. Both sides
//! post 1,024 receives. Each request of a client uses one of the server's receives, and so does each command. So [`MAX_PIPELINE`]
//! limits the unanswered requests.

pub mod command;
pub mod link;
pub mod resp;

/// The number of receives that each side posts. The protocol recommends this number.
pub const RECEIVES: u32 = 1024;
/// The largest number of unanswered requests. It is less than the number of the server's receives, so that some receives remain for
/// commands.
pub const MAX_PIPELINE: u64 = 1000;
