//! Copies files to a peer. [`send`] is the sender, [`receive`] the receiver, and [`wire`] has their messages.
//!
//! A file is sent as messages of up to [`PIECE`] bytes. The receiver fetches each from the sender's memory by RDMA Read. It writes its
//! file from the memory that the message arrived in, so neither side copies the bytes. A few messages are in flight at a time, so a
//! larger file needs no more memory.

pub mod hashed;
pub mod name;
pub mod parts;
pub mod receive;
pub mod send;
pub mod tree;
pub mod wire;

/// The length of the longest message, in bytes.
pub const PIECE: u32 = 4 << 20;

/// The number of messages with pieces of a file that are in flight. The receiver has this many buffers for each of several senders.
pub const WINDOW: usize = 4;

/// The default port of the receiver.
pub const PORT: u16 = 7474;
