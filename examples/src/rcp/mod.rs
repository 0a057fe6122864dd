//! Copies a file to a peer: [`send`] and [`receive`] are the two ends, [`wire`] is what they say to each other.
//!
//! The file goes as messages of up to [`PIECE`] bytes, which the receiver fetches out of the sender's memory by RDMA Read
//! and writes to its file from where they landed: no end copies them. A few are on their way at a time, so that neither
//! end needs more memory for a larger file.

pub mod hashed;
pub mod receive;
pub mod send;
pub mod wire;

/// Bytes of one message.
pub const PIECE: u32 = 4 << 20;

/// Pieces on their way; the receiver has room for as many of several senders.
pub const WINDOW: usize = 4;

/// Port unless said otherwise.
pub const PORT: u16 = 7474;
