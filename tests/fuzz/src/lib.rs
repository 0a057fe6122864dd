//! The fuzz targets: functions that accept any bytes, and panic if the tested code breaks a promise.
//!
//! libFuzzer calls the targets from the programs in `targets` (`make fuzz`). `tests/corpus.rs` calls them with the files in `corpus`
//! (`make test`). [`TARGETS`] lists all of them by name. Each target has a folder of its name in `corpus`.
#![allow(clippy::disallowed_methods, reason = "tests, not the library")]
// This crate compiles some source files of the reactor as its own modules. The unit tests of these files run in the reactor's crate, so
// this crate is empty when it is built for unit tests.
#![cfg(not(test))]

mod conversations;
mod handshake;
mod headers;
mod messages;
mod programs;
mod records;
mod secured;
mod stream;

use std::path::PathBuf;

use rdma_reactor_tests::sim::hostile::play;
use rdma_transport::planted;
use rdma_transport_fuzz::iwarp::fuzz as iwarp;

pub use self::handshake::{handshake_psk, handshake_tls};
pub use self::headers::headers;
pub use self::messages::{greeting, message};
pub use self::programs::programs;
pub use self::records::{records_psk, records_tls};
pub use self::stream::stream;

// Parts of the provider of devices and of the reactor without a public name. They are compiled as a
// part of this crate, so that those need not export them.

#[allow(dead_code, unreachable_pub)]
#[path = "../../../reactor/src/error.rs"]
mod error;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../transport/verbs/src/exchange/mod.rs"]
mod exchange;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../reactor/src/conn/frame.rs"]
mod frame;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../reactor/src/conn/greeting.rs"]
mod greeting;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../reactor/src/limits.rs"]
mod limits;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../reactor/src/security/mod.rs"]
mod security;

/// Stands in for the reactor's module `memory`. `RemoteRegion` is the only type of that module that the reactor's source files in this
/// crate use.
mod memory {
    pub(crate) mod region {
        pub(crate) use rdma_reactor::RemoteRegion;
    }
}

/// A fuzz target: its name, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All fuzz targets.
pub const TARGETS: [Target; 16] = [
    ("startup", startup),
    ("headers", headers),
    ("cuts", cuts),
    ("script", script),
    ("datagrams", datagrams),
    ("greeting", greeting),
    ("message", message),
    ("stream", stream),
    ("handshake_psk", handshake_psk),
    ("handshake_tls", handshake_tls),
    ("records_psk", records_psk),
    ("records_tls", records_tls),
    ("programs", programs),
    ("hostile", hostile),
    ("exchange", exchange),
    ("within_host", within_host),
];

/// Returns the folder that contains the corpus of each target.
#[must_use]
pub fn corpora() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// Fuzzes the parsing of MPA startup frames, and the replies to them.
pub fn startup(octets: &[u8]) {
    iwarp::startup(octets);
}

/// Fuzzes a stream of FPDUs, delivered as a whole and cut into pieces. The first two bytes of the input choose the options; the other bytes
/// are the stream.
pub fn cuts(octets: &[u8]) {
    iwarp::cuts(octets);
}

/// Fuzzes the exchange, which sets up connections over a TCP stream instead of rdma_cm: the parser of its messages, and a conversation with
/// a peer that sends any bytes.
pub fn exchange(bytes: &[u8]) {
    conversations::exchange(bytes);
}

/// Fuzzes datagrams of the embedded provider on a network that loses, duplicates, damages and delays packets.
pub fn datagrams(octets: &[u8]) {
    bad_network(octets);
}

/// Does the same as [`datagrams`]. Returns two numbers: the datagrams that the provider received, and the lookup queries that arrived at
/// the provider.
pub fn bad_network(octets: &[u8]) -> (usize, usize) {
    iwarp::datagrams(octets)
}

/// Fuzzes shared memory within the host: hellos, packets, windows and records of a hostile peer.
pub fn within_host(octets: &[u8]) {
    shared_memory(octets);
}

/// Does the same as [`within_host`]. Returns two numbers: the connections that moved to shared
/// memory (0 or 1), and the messages that the provider received.
pub fn shared_memory(octets: &[u8]) -> (usize, usize) {
    iwarp::within_host(octets)
}

/// Fuzzes a queue pair of the embedded provider. The input is a script of operations of the program and of the peer.
pub fn script(octets: &[u8]) {
    iwarp::script(octets);
}

/// Fuzzes a simulated world with a server, an honest client, and a hostile client that takes its actions from the tape (the input). Only
/// the first 600 bytes of the tape are used, because longer tapes find nothing more.
///
/// # Panics
/// Panics if the hostile client disturbs the server or the honest client.
pub fn hostile(octets: &[u8]) {
    let _ = play(&octets[..octets.len().min(600)], 50);
}
