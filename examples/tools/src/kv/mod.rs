//! `kv`: a hash table that clients read by RDMA Read, without a callback in the server.
//!
//! The server registers its table for all peers to read, and sends its address ([`wire::TableHello`]). A client computes the
//! slot of a key, reads the slot, and checks its checksum ([`table`]). If the checksum is wrong, the server was writing
//! the slot meanwhile, and the client reads again. Clients store values by messages, so that only the server writes.

pub mod bench;
pub mod once;
pub mod reader;
pub mod server;
pub mod table;
pub mod wire;
