//! `kv`: a hash table that clients read by RDMA Read, without a callback in the server.
//!
//! The server registers the table so that all peers may read it, and sends its address to each client ([`wire::TableHello`]). A client
//! computes the slot of a key, reads the slot, and verifies its checksum ([`table`]). If the checksum is wrong, the server was writing
//! the slot during the read, and the client reads again. Clients store values by sending messages, so only the server writes the table.

pub mod bench;
pub mod once;
pub mod reader;
pub mod server;
pub mod table;
pub mod wire;
