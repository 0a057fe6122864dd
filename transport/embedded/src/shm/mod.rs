//! Connections within one host: rings of records in memory that the processes of both sides map.
//!
//! | module | holds |
//! |---|---|
//! | [`segment`] | the memory of a connection: its layout, and the operations on its words |
//! | `ring` | one direction: a producer and a consumer of records |
//! | `doorbell` | waking a side that sleeps |
//! | `record` | the records in the rings |
//! | `windows` | memory of one side that the peer maps: payloads that are not copied to the ring, and regions that both sides access |
//! | `account` | the limits of the windows of a provider |
//! | `outgoing` | the outgoing direction of a queue pair: turns work requests into records |
//! | `incoming` | the incoming direction of a queue pair: turns records into completions |
//! | `link` | the queue pair of a connection |
//! | `fault` | the faults that end a connection |
//! | `greeting` | the messages by which two sides that are connected by TCP move to shared memory |
//! | `packet` | the packets on the Unix socket of a connection |
//!
//! This module uses no sockets: the caller of `link` sends its packets on the Unix socket.
//! `docs/wire.md` has the layouts.
//!
//! The peer may write any value to the segment at any time. So each position, length and kind is
//! loaded only once and then checked. [`rdma_transport::mem`] copies a payload from memory that the
//! peer may be writing to memory that only the local side uses.

pub(crate) mod account;
mod doorbell;
pub(crate) mod fault;
pub(crate) mod greeting;
#[cfg(all(test, not(loom_model)))]
mod hostile;
#[cfg(any(all(test, not(loom_model)), fuzz_targets))]
#[allow(unsafe_code, reason = "files as a hostile process makes them")]
pub(crate) mod hostile_file;
mod incoming;
#[cfg(all(test, loom_model))]
mod interleavings;
pub(crate) mod link;
mod outgoing;
pub(crate) mod packet;
mod record;
mod ring;
pub mod segment;
mod windows;

pub use segment::{EntryPayload, MappedSegment, Segment, SegmentPayload, Words};
