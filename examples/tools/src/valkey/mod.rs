//! Valkey over RDMA, as `valkey-rdma` speaks it: the protocol of `valkey-server` with its RDMA transport. Both sides do the same:
//!
//! | receiver of bytes | | sender of bytes |
//! |---|---|---|
//! | says where its transfer buffer is ([`command`]) | message -> | |
//! | | <- RDMA Write with Immediate | puts bytes there; the immediate data is their number |
//! | | <- RDMA Write with Immediate | puts the next bytes behind them, and so on |
//! | has read the buffer to its end, and offers it anew | message -> | begins at its start again |
//!
//! What the bytes mean is not the transport's affair: they are those of a connection over TCP ([`resp`]). The client asks for the
//! server's features first and says which it uses; there are none yet. Each side may send a `Keepalive`, which has no answer: if the
//! peer is gone, the device notices.
//!
//! There is no flow control: a side that sends more than its peer has receives for loses the connection on iWARP. Both sides post 1,024.
//! Each request of a client takes a receive of the server, and so does the end of a buffer, so [`MAX_PIPELINE`] requests without an answer
//! always find one.

pub mod command;
pub mod link;
pub mod resp;

/// Receives that both sides post, as the protocol recommends.
pub const RECEIVES: u32 = 1024;
/// Most requests without an answer: fewer than the server's receives, so that some are left for commands.
pub const MAX_PIPELINE: u64 = 1000;
