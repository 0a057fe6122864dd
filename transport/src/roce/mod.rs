//! Unreliable datagrams of RoCE version 2 in user space: the packets, and their processing.
//!
//! | module | holds |
//! |---|---|
//! | `packet` | the headers of a datagram: BTH, DETH, immediate data |
//! | `icrc` | the invariant CRC |
//! | `frame` | a packet with the headers of IP and UDP that its CRC covers, and the route header for its receiver |
//! | `mad` | the query for the queue pair at a port, and its reply |
//! | `numbers` | the numbers of queue pairs |
//! | `queue_pair` | a queue pair: sends datagrams, and receives them into its receives |
//! | `port` | a UDP port: of an address, or of a group |
//! | `id` | a connection-manager id |
//! | `tables` | the objects that all of these share |
//! | `config` | the settings |
//!
//! The modules use no sockets: packets are passed in and out, with the addresses of both ends.
#![deny(unsafe_code)]

mod config;
pub(crate) mod frame;
mod icrc;
pub(crate) mod id;
pub(crate) mod mad;
mod numbers;
pub(crate) mod packet;
pub(crate) mod port;
pub(crate) mod queue_pair;
pub(crate) mod tables;

pub use config::{ROCE_PORT, RoceConfig};
