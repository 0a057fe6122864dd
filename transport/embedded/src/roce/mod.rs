//! Unreliable datagrams of RoCE version 2 in user space: the packets, and their processing.
//!
//! | module | holds |
//! |---|---|
//! | `packet` | the headers of a datagram: BTH, DETH, immediate data |
//! | `icrc` | the invariant CRC |
//! | `frame` | the headers of IP and UDP that the invariant CRC covers, and the route header (GRH) in front of a received datagram |
//! | `mad` | the query for the queue pair of a service, and its reply |
//! | `numbers` | the assignment of queue pair numbers |
//! | `queue_pair` | a queue pair, which sends datagrams and puts received ones into posted receives |
//! | `port` | a UDP port: of a local address, or of a multicast group |
//! | `id` | a connection-manager id for datagrams |
//! | `tables` | the tables that all ids of a provider share |
//! | `config` | the settings |
//!
//! The modules use no sockets. The caller passes packets in and out, with the addresses of both ends.
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
