//! The embedded provider: iWARP in user space over TCP, on the wire that adapters and the kernel's `siw` speak.
//!
//! - [`wire`]: parsing and writing of MPA, DDP and RDMAP
//! - `startup`: the MPA handshake: its frames, and the terms on which both peers agree
//! - `receive`, `transmit`: the two directions of a queue pair: bytes in, bytes out
//! - `stream`, `markers`: outgoing FPDUs, and the MPA markers in them
//! - `intake`, `forecast`: the destinations of a receive call, and the segments that are expected
//!   next
//! - `placement`, `fault`: the kinds of destinations for payload, and the faults that end a stream
//! - `responder`: the Reads and atomic operations of the peer
//! - `stag`: the Terminates for a misused STag
//! - `queue_pair`: a queue pair: both directions of one stream
//! - `hub`: the state that the engines share: sockets and their owners, regions and queues, events,
//!   deadlines, and the connections that wait to be served
//! - `flow`, `pace`: the engine of a connection on a TCP stream, and the amount that it receives at
//!   a time
//! - `ring`, `rings`: the engine of a connection in shared memory, and the rings that a busy poll
//!   checks
//! - `datagrams`, `ports`, `udp`: the engine of datagrams: its ids, its UDP ports, and their
//!   sockets; the packet formats are in `crate::roce`
//! - `endpoint`, `endpoints`: the object that a connection-manager id names, with its state; the
//!   table of all endpoints, and their state changes
//! - `accepting`, `half_open`, `start_queue`: the passive side of connections, the connections
//!   whose MPA request has not arrived, and those that wait to start
//! - `connecting`: the active side of connections
//! - `rendezvous`, `unix`: the setup of shared memory between two processes of one host, and its
//!   Unix sockets
//! - `frame`, `linger`, `causes`: a startup frame that is being sent, sockets that outlive their
//!   connections, and the meaning of socket errors
//! - `drive`: the rounds of the provider: finds the owner of an edge or a deadline, and applies the
//!   outcome that its engine returns
//! - `handover`, `roles`: connect requests that move to another provider, and the other roles of
//!   the provider outside of the data path
//! - [`provider`]: [`Iwarp`]: the [`rdma_transport::Provider`]
//! - [`net`], [`tcp`]: the interface to the sockets, and its implementation on the system
//!
//! The modules from `startup` to `queue_pair` do no I/O: bytes and the time are arguments.
mod accepting;
#[cfg(test)]
mod bench;
mod causes;
mod config;
mod connecting;
mod control;
mod datagrams;
mod drive;
mod endpoint;
mod endpoints;
mod fault;
mod flow;
mod forecast;
#[cfg(test)]
mod forward_net;
mod frame;
#[cfg(fuzz_targets)]
#[path = "../../../../tests/fuzz/transport/iwarp/mod.rs"]
pub mod fuzz;
mod half_open;
mod handover;
mod hub;
mod intake;
mod linger;
mod markers;
pub mod net;
mod pace;
mod placement;
mod ports;
pub mod provider;
mod queue_pair;
mod receive;
mod rendezvous;
mod responder;
mod ring;
mod rings;
mod roles;
mod stag;
mod start_queue;
mod startup;
mod stream;
pub mod tcp;
mod transmit;
mod udp;
mod unix;
pub mod wire;

pub use crate::roce::{ROCE_PORT, RoceConfig};
pub use config::{CrcPolicy, IwarpConfig, SharedMemoryPolicy, WithinHost};
pub use ipnet::IpNet;
pub use net::Net;
pub use provider::Iwarp;
pub use rdma_transport::provider::Entropy;
pub use tcp::{TcpConfig, TcpNet};

/// The name of the provider.
pub const NAME: &str = "iwarp";

/// The name of the provider with [`SharedMemoryPolicy::Require`].
const WITHIN_HOST: &str = "shm";
