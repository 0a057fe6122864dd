//! `kv`: a hash table that clients read by RDMA Read, without a callback in the server.
//!
//! The server registers its table for all peers to read and tells where it is ([`wire::Hello`]). A client computes the
//! slot of a key, reads the slot, and sees by its checksum whether the server was writing meanwhile ([`table`]): then it
//! reads again. Values are stored by messages: only the server writes.

pub mod bench;
pub mod once;
pub mod reader;
pub mod server;
pub mod table;
pub mod wire;
