//! The protocol of `valkey-server` with its RDMA transport, which `valkey-rdma` uses. Both directions work the same way:
//!
//! | receiver of bytes | | sender of bytes |
//! |---|---|---|
//! | names its transfer buffer ([`command`]) | message -> | |
//! | | <- RDMA Write with Immediate | writes bytes there; the immediate data is their number |
//! | | <- RDMA Write with Immediate | writes the next bytes after them, and so on |
//! | has read the buffer to its end, and offers it again | message -> | starts at its beginning again |
//!
//! The transport does not interpret the bytes: they are those of a connection over TCP ([`resp`]). The client requests the
//! server's features first and reports which it uses; none are defined yet. Each side may send a `Keepalive`, which has no answer: if the
//! peer is gone, the device notices.
//!
//! There is no flow control: a side that sends more than its peer has receives for loses the connection on iWARP. Both sides post 1,024.
//! Each request of a client uses a receive of the server, and so does the end of a buffer, so [`MAX_PIPELINE`] requests without an answer
//! always find one.

pub mod command;
pub mod link;
pub mod resp;

/// The number of receives that both sides post, as the protocol recommends.
pub const RECEIVES: u32 = 1024;
/// The largest number of unanswered requests: fewer than the server's receives, so that some are left for commands.
pub const MAX_PIPELINE: u64 = 1000;
