//! The fuzz targets: functions that accept any bytes, and panic if a promise is broken.
//!
//! libFuzzer calls them from the programs in `targets` (`make fuzz`), and `tests/corpus.rs` with the files in `corpus`
//! (`make test`). [`TARGETS`] has all of them by name; each has a folder of that name in `corpus`.
#![allow(clippy::disallowed_methods, reason = "tests, not the library")]
// The unit tests in files of the reactor run there.
#![cfg(not(test))]

mod handshake;
mod headers;
mod messages;
mod programs;
mod records;
mod secured;
mod stream;

use std::path::PathBuf;

use rdma_reactor_tests::sim::hostile::play;
use rdma_transport_fuzz::exchange::fuzz as verbs;
use rdma_transport_fuzz::iwarp::fuzz as iwarp;

pub use self::handshake::{handshake_psk, handshake_tls};
pub use self::headers::headers;
pub use self::messages::{greeting, message};
pub use self::programs::programs;
pub use self::records::{records_psk, records_tls};
pub use self::stream::stream;

// Parts of the reactor without a public name. They are compiled as a part of this crate, so that the reactor need not export them.

#[allow(dead_code, unreachable_pub)]
#[path = "../../../reactor/src/error.rs"]
mod error;
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

/// The items that the files above share with the reactor.
mod memory {
    pub(crate) mod region {
        pub(crate) use rdma_reactor::RemoteRegion;
    }
}

/// A target: its name, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 15] = [
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
];

/// Returns the folder with the corpora.
#[must_use]
pub fn corpora() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// Fuzzes MPA startup frames.
pub fn startup(octets: &[u8]) {
    iwarp::startup(octets);
}

/// Fuzzes a stream of FPDUs, whole and cut: two bytes of choices, and the stream.
pub fn cuts(octets: &[u8]) {
    iwarp::cuts(octets);
}

/// Fuzzes the messages of connecting by exchange, and a conversation with a peer that sends any bytes.
pub fn exchange(bytes: &[u8]) {
    verbs::exchange(bytes);
}

/// Fuzzes datagrams of the embedded provider on a bad network.
pub fn datagrams(octets: &[u8]) {
    bad_network(octets);
}

/// Does the same as [`datagrams`]. Returns the numbers of received datagrams and of received lookups.
pub fn bad_network(octets: &[u8]) -> (usize, usize) {
    iwarp::datagrams(octets)
}

/// Fuzzes a queue pair of the embedded provider with a script.
pub fn script(octets: &[u8]) {
    iwarp::script(octets);
}

/// Fuzzes a simulated world: a server with an honest client, and a hostile one that follows the tape. Tapes longer than 600 bytes show
/// nothing more.
///
/// # Panics
/// Panics if the hostile peer disturbs the others.
pub fn hostile(octets: &[u8]) {
    let _ = play(&octets[..octets.len().min(600)], 50);
}
