//! The parts of a provider in software: queues, keys and events, without I/O.
//!
//! | module | holds |
//! |---|---|
//! | `checks` | whether a send may be posted |
//! | `completions` | what a queue pair completes, and what was not polled of it |
//! | [`cq`] | completion queues with room for all that may complete there, and the events of those that were armed |
//! | [`srq`] | a shared receive queue |
//! | [`receive_queue`] | the posted receives of a queue pair, and the message that is being put into the first of them |
//! | [`work_queues`] | the work queues of a queue pair whose sends end in their posts |
//! | [`keys`] | memory regions, and what a peer may reach by a key |
//! | [`resources`] | all of these for one provider, and the completions that destroyed queue pairs have left |
//!
//! The embedded provider is made of them. A provider of yours may be, too: see `docs/writing-a-provider.md`.

pub(crate) mod checks;
pub(crate) mod completions;
pub mod cq;
pub mod keys;
pub mod receive_queue;
pub mod resources;
pub mod srq;
pub mod work_queues;
