//! The guide, in the order in which a program needs it. The pages are those of the folder `docs` of the repository; their code
//! is compiled and run.
//!
//! 1. The first program is the README's.
//! 2. [The loop and its promises](the_loop)
//! 3. [Flow control](flow_control): what to do when a send is refused
//! 4. [Remote memory](remote_memory): regions, reads, writes and atomics
//! 5. [Stopping](stopping): five ways, and what each one leaves
//! 6. [Errors and reasons](errors): cause and cure of each
//! 7. [Security](security): who may connect, and who reads along
//! 8. [A reactor in another loop](embedding), and other things in a reactor's loop
//! 9. async/await: the page `async_await`, with the feature `async`
//! 10. [Coming from sockets, from ibverbs, from UCX](coming_from)
//! 11. [Testing without hardware](testing)
//! 12. [Devices](hardware): what was tested on which, and how to test yours
//! 13. [Performance](performance)
//!
//! Behind it: [the architecture](architecture), [the wire](wire).

#[doc = include_str!("../docs/architecture.md")]
pub mod architecture {}
#[cfg(feature = "async")]
#[doc = include_str!("../docs/guide/async.md")]
pub mod async_await {}
#[doc = include_str!("../docs/guide/coming-from.md")]
pub mod coming_from {}
#[doc = include_str!("../docs/embedding.md")]
pub mod embedding {}
#[doc = include_str!("../docs/guide/errors.md")]
pub mod errors {}
#[doc = include_str!("../docs/guide/flow-control.md")]
pub mod flow_control {}
#[doc = include_str!("../docs/hardware.md")]
pub mod hardware {}
#[doc = include_str!("../docs/performance.md")]
pub mod performance {}
#[doc = include_str!("../docs/guide/remote-memory.md")]
pub mod remote_memory {}
#[doc = include_str!("../docs/security.md")]
pub mod security {}
#[doc = include_str!("../docs/guide/stopping.md")]
pub mod stopping {}
#[doc = include_str!("../docs/testing.md")]
pub mod testing {}
#[doc = include_str!("../docs/loop.md")]
pub mod the_loop {}
#[doc = include_str!("../docs/wire.md")]
pub mod wire {}
