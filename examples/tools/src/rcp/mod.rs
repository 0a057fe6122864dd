//! Copies files to a peer. [`send`] is the sender, [`receive`] the receiver, and [`wire`] has their messages.
//!
//! A file is sent as messages of up to [`PIECE`] bytes. The receiver fetches each message from the sender's memory by RDMA Read. The
//! receiver then writes its file directly from the memory with the message, so neither side copies the bytes. The number of messages in
//! flight is limited, so a larger file needs no more memory.

pub mod folder;
pub mod hashed;
pub mod name;
pub mod parts;
pub mod receive;
pub mod send;
pub mod tree;
pub mod wire;

/// The length of the longest message, in bytes.
pub const PIECE: u32 = 4 << 20;

/// The largest number of pieces of one file that are in flight. The receiver has buffers for this many pieces of each of several senders.
pub const WINDOW: usize = 4;

/// The default port of the receiver.
pub const PORT: u16 = 7474;
