//! Copies a file to a peer: [`send`] and [`receive`] are the two ends, and [`wire`] has their messages.
//!
//! The file is sent as messages of up to [`PIECE`] bytes. The receiver fetches them from the sender's
//! memory by RDMA Read, and writes them to its file from the memory that they arrived in, so neither
//! end copies them. A few are in flight at a time, so neither end needs more memory for a larger file.

pub mod hashed;
pub mod name;
pub mod parts;
pub mod receive;
pub mod send;
pub mod tree;
pub mod wire;

/// The largest message, bytes.
pub const PIECE: u32 = 4 << 20;

/// The number of pieces in flight. The receiver has buffers for as many pieces from each of several senders.
pub const WINDOW: usize = 4;

/// The default port.
pub const PORT: u16 = 7474;
