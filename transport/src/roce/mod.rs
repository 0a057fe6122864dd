//! Unreliable datagrams of RoCE version 2 in user space: what is in the packets, and what becomes of them.
//!
//! | module | holds |
//! |---|---|
//! | `packet` | the headers of a datagram: BTH, DETH, immediate data |
//! | `icrc` | the invariant CRC |
//! | `frame` | a packet with the headers of IP and UDP that its CRC covers, and the route header that its receiver gets |
//! | `mad` | the question for the queue pair at a port, and its answer |
//! | `numbers` | the numbers of queue pairs |
//! | `queue_pair` | a queue pair: datagrams out, and datagrams into its receives |
//! | `port` | a UDP port: of an address, or of a group |
//! | `id` | a connection-manager id |
//! | `tables` | what all of these share |
//! | `config` | the UDP ports |
//!
//! Nothing here knows a socket: packets go in and come out, with the addresses of both ends.
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
