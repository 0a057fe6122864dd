//! The embedded provider: iWARP in user space over TCP, on the wire that adapters and the kernel's `siw` speak.
//!
//! | module | holds |
//! |---|---|
//! | [`wire`] | parsing and writing of MPA, DDP and RDMAP |
//! | `startup` | the MPA handshake: its frames, and the terms on which both peers agree |
//! | `receive`, `transmit` | the two directions of a queue pair: bytes in, bytes out |
//! | `stream`, `markers` | outgoing FPDUs, and the MPA markers in them |
//! | `intake`, `forecast` | the destinations of a receive call, and the segments that are expected next |
//! | `placement`, `fault` | the kinds of destinations for payload, and the faults that end a stream |
//! | `requester`, `responder` | outstanding Reads and atomic operations: of the local side, and of the peer |
//! | `stag` | the Terminates for a misused STag |
//! | `queue_pair` | a queue pair: both directions of one stream |
//! | `endpoint`, `linger` | a connection with its socket, and a socket that outlives its connection |
//! | `handshake`, `half_open`, `start_queue` | the handshakes of connections, those without a request, and connections that wait to start |
//! | `drive`, `pace` | the handling of edges and deadlines, and the amount that one stream receives at a time |
//! | `setup_listener`, `setup`, `unix` | the setup of shared memory within one host: its listener and state, its steps, and its sockets |
//! | `links` | connections in shared memory: their scheduling and notifications |
//! | `handover` | connect requests that move to another provider |
//! | `datagrams`, `ports`, `udp` | ids for datagrams, their UDP ports, and the sockets; the packets are in `crate::roce` |
//! | [`provider`] | [`Iwarp`]: the [`crate::Provider`] |
//! | [`net`], [`tcp`] | the interface to the sockets, and its implementation on the system |
//!
//! The modules from `startup` to `queue_pair` do no I/O: bytes and the time are arguments.
#![deny(unsafe_code)]

#[cfg(test)]
mod bench;
mod config;
mod datagrams;
mod drive;
mod endpoint;
mod fault;
mod forecast;
#[cfg(test)]
mod forward_net;
#[cfg(fuzz_targets)]
#[path = "../../../tests/fuzz/transport/iwarp/mod.rs"]
pub mod fuzz;
mod half_open;
mod handover;
mod handshake;
mod hub;
mod intake;
mod linger;
mod links;
mod markers;
pub mod net;
mod pace;
mod placement;
mod ports;
pub mod provider;
mod queue_pair;
mod receive;
mod requester;
mod responder;
mod roles;
mod setup;
mod setup_listener;
mod stag;
mod start_queue;
mod startup;
mod stream;
pub mod tcp;
mod transmit;
mod udp;
mod unix;
pub mod wire;

pub use crate::provider::Entropy;
pub use crate::roce::{ROCE_PORT, RoceConfig};
pub use config::{CrcPolicy, IwarpConfig, SharedMemoryPolicy, WithinHost};
pub use ipnet::IpNet;
pub use net::Net;
pub use provider::Iwarp;
pub use tcp::{TcpConfig, TcpNet};

/// The name of the provider.
pub const NAME: &str = "iwarp";

/// The name of the provider if its setting is to use shared memory only.
const WITHIN_HOST: &str = "shm";
