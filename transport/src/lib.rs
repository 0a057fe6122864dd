//! RDMA transport: queue pairs, completion queues, memory regions and connection management.
//!
//! These are the modules, from the top layer down. No FFI type appears in a signature.
//!
//! | module | contents |
//! |---|---|
//! | [`provider`] | the trait [`Provider`] and its contract |
//! | [`roles`] | the traits that only some providers implement, such as shared receive queues and datagrams |
//! | [`cm`], [`event`], [`datagram`] | the parameters and results of calls for connections, device events and datagrams |
//! | [`cq`], [`srq`], [`qp`], [`wr`], [`wc`], [`mr`] | the parameters and results of calls for queues, work requests and memory regions |
//! | [`caps`], [`error`] | the capabilities of devices, and the errors of all calls |
//! | [`mem`] | registered memory, and most unsafe code of this crate |
//! | [`handle`], [`slab`] | the handles of a provider's objects, and a table whose slots have generations |
//! | [`sockets`] | options of sockets and network interfaces |
//! | [`newcomers`] | a table of connections whose peers have not shown yet that they are real clients |
//! | [`shares`] | the connections of each host, and the rule for the last quarter of a pool |
//! | [`log_limit`] | a limit on the log lines that peers can cause |
//! | [`registrar`] | registration of memory on other threads |
//! | [`station`] | a provider with its own memory, for posting work requests without unsafe code |
//! | `conformance` | the test suite for the contract of [`Provider`], for any provider (feature `conformance`) |
//!
//! Two crates have the providers: `rdma-transport-embedded` in user space, and
//! `rdma-transport-verbs` on RDMA devices. `docs/writing-a-provider.md` shows how to write one.
//!
//! A program drives a provider from one thread. No call waits for a peer, and no call reads a
//! clock: time is an argument. With shared memory, a hostile process of the same user can make
//! calls wait (`docs/guide/same-host.md`). On devices, [`Provider::register`] blocks while pages
//! are pinned. The crate `rdma-reactor` is an event loop on top of these crates.

// The macros of this module are in scope in the modules below it.
#[macro_use]
pub mod log_limit;

pub mod caps;
pub mod cm;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod cq;
pub mod datagram;
pub mod error;
pub mod event;
pub mod handle;
pub mod mem;
pub mod mr;
pub mod newcomers;
pub mod provider;
pub mod qp;
pub mod registrar;
pub mod roles;
pub mod shares;
pub mod slab;
pub mod sockets;
pub mod srq;
pub mod station;
pub mod wc;
pub mod wr;

pub use caps::{Capabilities, Features};
pub use cm::{
    CmEvent, CmEventKind, CmId, ConnectFailure, ConnectParam, Detached, DisconnectCause, ExchangeOptions, ListenParam,
    PathOptions, ReadDepth, Retries, Source,
};
pub use cq::{CqAttr, Notify};
pub use datagram::{AddressId, DatagramPeer, DatagramSource, Destination, Route};
pub use error::{Result, TransportError};
pub use event::{AsyncEvent, DeviceEventKind};
pub use mem::Memory;
pub use mr::{Access, LocalKey, MemoryRegion, MrId, RemoteKey};
pub use provider::{Channel, CqId, DeviceId, DeviceInfo, Drive, PostError, Posted, Provider};
pub use qp::{QpAttr, QpId, SrqId};
pub use registrar::{Registrar, Registration};
pub use srq::SrqAttr;
pub use station::Station;
pub use wc::{Failure, WcOpcode, WcStatus, WorkCompletion};
pub use wr::{RecvWr, RemoteAddress, SendClass, SendFlags, SendOp, SendWr, Sge, SgeList};

/// Returns true if the tests have planted the defect `name` (`tests/mutants`). Without
/// `--cfg plantable` this is a constant, so the compiler removes the code of the defect.
#[doc(hidden)]
#[cfg(not(plantable))]
#[inline(always)]
pub const fn planted(_: &str) -> bool {
    false
}

/// Returns true if the environment variable `PLANTED` names the defect `name`. Panics if `PLANTED`
/// is an unknown name: such a run plants nothing, and would look like tests that miss a defect.
#[doc(hidden)]
#[cfg(plantable)]
#[inline]
pub fn planted(name: &str) -> bool {
    // local: a variable of the environment
    static CHOSEN: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
        let chosen = std::env::var("PLANTED").unwrap_or_default();
        // Read `docs/testing.md` at run time, so that a change of it does not rebuild all programs.
        let table = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/testing.md");
        let known = |name: &str| std::fs::read_to_string(table).is_ok_and(|page| page.contains(name));
        assert!(chosen.is_empty() || known(&format!("\n| `{chosen}` |")), "PLANTED={chosen}: no such row in {table}");
        chosen
    });
    *CHOSEN == name
}

// `mem/test_memory.rs`, which the tests of other crates also use, names this crate by its name.
#[cfg(test)]
extern crate self as rdma_transport;
