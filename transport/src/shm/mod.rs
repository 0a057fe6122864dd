//! Connections within one host: rings in memory that two processes map.
//!
//! | module | holds |
//! |---|---|
//! | [`segment`] | the memory of a connection: where its words are, and how they are used |
//! | `ring` | one direction: a producer and a consumer of records |
//! | `doorbell` | who sleeps, and who has to be called |
//! | `record` | what is in the rings |
//! | `windows` | memory of a side that its peer maps: what is sent from where it is, and regions that both use |
//! | `outgoing`, `incoming` | the two directions of a queue pair: work requests in, records out, and back |
//! | `link` | the queue pair of a connection |
//! | `fault` | why a connection cannot go on |
//! | `greeting` | how two sides that are connected by TCP find each other |
//! | `packet` | the packets between two sides that have found each other |
//!
//! Nothing here knows a socket: packets and doorbells are what a link wants done. `docs/wire.md` has the layouts.
//!
//! A peer may write anything at any time. So each position, length and kind is loaded once and then checked, and payload is copied by
//! [`crate::mem`], from where it may change to memory that is only ours.

mod doorbell;
pub(crate) mod fault;
pub(crate) mod greeting;
#[cfg(all(test, not(loom_model)))]
mod hostile;
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

pub use segment::{Payload, Segment, Shared, Words};
