//! Deterministic simulation. A world runs in virtual time, and one seed determines everything that happens in it.
//!
//! Two or three reactors run over the embedded provider, both unchanged, in one thread. Everything below them is simulated: the byte
//! streams, readiness as nested edge-triggered epoll reports it, the clock, random numbers, and hardware that completes at random
//! times. The programs on the reactors make random calls in all callbacks, and check every callback.
//!
//! | module | holds |
//! |---|---|
//! | [`swarm`] | the sizes and faults that a seed decides first |
//! | [`fabric`] | virtual time, the heap of future events, descriptors |
//! | [`tcp`], [`net`] | byte streams and their faults; the provider's view of them |
//! | [`udp`] | packets, which datagrams are made of, and their faults |
//! | [`poller`] | a node's poller and clock |
//! | [`environment`] | a poller and a clock, for providers without a reactor |
//! | [`hardware`] | completions and events that arrive at their own times |
//! | [`program`], [`callbacks`] | the program on a node |
//! | [`one_sided`], [`regions`], [`flow`] | the program's remote memory and byte streams |
//! | [`audit`], [`memory`] | the model of both ends of every connection, and of the bytes that peers reach |
//! | [`threads`] | messages from other threads to a node |
//! | [`world`] | the scheduler, and the phases of a life: chaos, settling, closing, silence |
//! | [`hostile`] | a hostile peer beside an honest one, on that network |
//! | [`middleman`] | an attacker on the path between two secured reactors |
//! | [`neighbour`] | an honest client, and how long its echoes take next to other clients |
//! | [`twins`], [`devices`] | a reactor with two devices that give equal keys, and worlds in which they fail and are removed |
//! | [`path`] | faults that a test injects between two nodes |
//! | [`quiet`] | a network without faults, for tests that write their own history |
//! | [`run`] | many worlds, and the report of one that failed |
//! | [`seeds`] | the seeds of a test that has its own worlds |
//! | [`rng`], [`trace`] | one stream of randomness per subsystem; the history |

pub mod audit;
pub mod callbacks;
pub mod devices;
pub mod environment;
pub mod fabric;
pub mod flow;
pub mod hardware;
pub mod hostile;
pub mod local;
pub mod memory;
pub mod middleman;
pub mod neighbour;
pub mod net;
pub mod one_sided;
pub mod path;
pub mod poller;
pub mod program;
pub mod quiet;
pub mod regions;
pub mod rng;
pub mod run;
pub mod seeds;
pub mod swarm;
pub mod tcp;
pub mod threads;
pub mod trace;
pub mod twins;
pub mod udp;
pub mod world;
