//! The parts of a provider in software: queues, keys and events, without I/O.
//!
//! | module | holds |
//! |---|---|
//! | `checks` | the checks of a send before it is posted |
//! | `completions` | the completions of a queue pair, and the number of unpolled ones |
//! | [`cq`] | completion queues with reserved entries for all work queues, and the events of armed queues |
//! | [`srq`] | a shared receive queue |
//! | [`receive_queue`] | the posted receives of a queue pair, and the progress of the message that fills the first of them |
//! | `send_queue` | the send queue of a reliable queue pair: the order in which work requests are sent and complete |
//! | `outstanding` | the Reads and atomic operations that wait for a response of the peer |
//! | `responses` | the Reads and atomic operations of the peer that wait for their response |
//! | [`work_queues`] | the work queues of a queue pair whose sends complete while they are posted |
//! | [`keys`] | memory regions, and the access of peers by STag |
//! | [`resources`] | the objects that a provider's queue pairs share, and the unpolled completions of destroyed queue pairs |
//!
//! The embedded provider uses all of them. Other providers can use them, too: see `docs/writing-a-provider.md`.

pub(crate) mod checks;
pub(crate) mod completions;
pub mod cq;
pub mod keys;
pub(crate) mod outstanding;
pub mod receive_queue;
pub mod resources;
pub(crate) mod responses;
pub(crate) mod send_queue;
pub mod srq;
pub mod work_queues;
