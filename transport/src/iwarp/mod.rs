//! The embedded provider: iWARP in user space over TCP, on the wire that adapters and the kernel's `siw` speak.
//!
//! | module | holds |
//! |---|---|
//! | [`wire`] | parse and emit of MPA, DDP and RDMAP |
//! | `startup` | the MPA handshake: frames, and what the two sides agree on |
//! | `receive`, `transmit` | the two directions of a queue pair: bytes in, bytes out |
//! | `receive_queue` | posted receives, and the message that fills the first of them |
//! | `stream`, `markers` | FPDUs on their way out |
//! | `intake`, `forecast` | where a receive call puts the next octets, and which are expected |
//! | `placement`, `fault` | where what comes in may go, and why a stream cannot go on |
//! | `requester`, `responder` | Reads and atomics that await their answer: ours, and the peer's |
//! | `stag` | memory regions, and what the wire may reach of them |
//! | `queue_pair`, `cq`, `srq` | both directions together, where they complete, where receives may come from |
//! | `resources` | what queue pairs share |
//! | `endpoint`, `linger` | a connection with its socket, and a socket that outlives its connection |
//! | `handshake`, `half_open` | connections that begin, and those that have sent no request |
//! | `drive`, `pace` | what happens on an edge or a deadline, and how much of one stream at a time |
//! | `door`, `meeting`, `unix` | sides within one host that find each other: where, how, and over which sockets |
//! | `links` | connections in shared memory: whose turn it is, and who is called |
//! | `handover` | connect requests that move to another provider |
//! | `datagrams`, `ports`, `udp` | ids for datagrams, what comes to their UDP ports, and the sockets; the packets are in `crate::roce` |
//! | [`provider`] | [`Iwarp`]: the [`crate::Provider`] |
//! | [`net`], [`tcp`] | the seam to the sockets, and the real ones |
//!
//! The modules down to `queue_pair` do no I/O: bytes and the time are arguments.
#![deny(unsafe_code)]

#[cfg(test)]
mod bench;
mod config;
mod datagrams;
mod door;
mod drive;
mod endpoint;
mod fault;
mod forecast;
#[cfg(fuzz_targets)]
#[path = "../../../tests/fuzz/transport/iwarp/mod.rs"]
pub mod fuzz;
mod half_open;
mod handover;
mod handshake;
mod intake;
mod linger;
mod links;
mod markers;
mod meeting;
pub mod net;
mod pace;
mod placement;
mod ports;
pub mod provider;
mod queue_pair;
mod receive;
mod requester;
mod responder;
mod stag;
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

/// Name of the provider.
pub const NAME: &str = "iwarp";

/// Its name if it connects within the host only.
const WITHIN_HOST: &str = "shm";
