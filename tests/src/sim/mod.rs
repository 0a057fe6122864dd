//! Deterministic simulation: one world, virtual time, one seed.
//!
//! Two or three reactors run over the embedded provider, unchanged, in one thread. All they touch is simulated: the
//! byte streams, readiness with the semantics of nested edge-triggered epoll, the clock, randomness, and hardware that
//! completes in its own time. The programs on them call anything in any callback, and check everything they are told.
//!
//! | module | holds |
//! |---|---|
//! | [`swarm`] | what a seed decides first: sizes, and which faults are on |
//! | [`fabric`] | virtual time, the heap of things to come, descriptors |
//! | [`tcp`], [`net`] | byte streams and their faults; the provider's view of them |
//! | [`udp`] | packets, which datagrams are made of, and their faults |
//! | [`poller`] | a node's poller and clock |
//! | [`environment`] | both, for providers below a reactor |
//! | [`hardware`] | completions and events that arrive in their own time |
//! | [`program`], [`callbacks`] | what runs on a node |
//! | [`one_sided`], [`regions`], [`flow`] | its remote memory and its byte streams |
//! | [`audit`], [`memory`] | the books of both ends of every connection, and of the bytes that peers reach |
//! | [`threads`] | what other threads say to a node |
//! | [`world`] | the scheduler, and the phases of a life: chaos, settling, closing, silence |
//! | [`hostile`] | a hostile peer beside an honest one, on that network |
//! | [`middleman`] | somebody on the path between two secured reactors |
//! | [`neighbour`] | an honest client, and how long its echoes take beside somebody else |
//! | [`twins`], [`devices`] | a reactor with two devices that give equal keys, and worlds in which they fail and are removed |
//! | [`path`] | what a test breaks itself between two nodes |
//! | [`quiet`] | a network without faults, for tests that write their own history |
//! | [`run`] | many worlds, and the report of one that failed |
//! | [`seeds`] | the seeds of a test that has worlds of its own |
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
