//! The fuzz targets: functions that take any octets, and panic when something breaks a promise.
//!
//! libFuzzer calls them by the programs in `targets` (`make fuzz`), and `tests/corpus.rs` with what is in `corpus`
//! (`make test`). [`TARGETS`] has all of them by name; each has a folder of that name in `corpus`.
#![allow(clippy::disallowed_methods, reason = "tests, not the library")]

mod headers;
mod programs;
mod stream;

use std::path::PathBuf;

use rdma_reactor::{SecurityMode, fuzz};
use rdma_reactor_tests::identities::security;
use rdma_reactor_tests::sim::hostile::play;
use rdma_transport::iwarp::fuzz as iwarp;

pub use self::headers::headers;
pub use self::programs::programs;
pub use self::stream::stream;

/// A target: its name, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 13] = [
    ("startup", startup),
    ("headers", headers),
    ("cuts", cuts),
    ("script", script),
    ("greeting", greeting),
    ("message", message),
    ("stream", stream),
    ("handshake_psk", handshake_psk),
    ("handshake_tls", handshake_tls),
    ("records_psk", records_psk),
    ("records_tls", records_tls),
    ("programs", programs),
    ("hostile", hostile),
];

/// The folder with the corpora.
#[must_use]
pub fn corpora() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// MPA startup frames.
pub fn startup(octets: &[u8]) {
    iwarp::startup(octets);
}

/// A stream of FPDUs, whole and cut: two octets of choices, and the stream.
pub fn cuts(octets: &[u8]) {
    iwarp::cuts(octets);
}

/// A queue pair of the embedded provider against a script.
pub fn script(octets: &[u8]) {
    iwarp::script(octets);
}

/// Private data, as a greeting.
pub fn greeting(octets: &[u8]) {
    fuzz::greeting(octets);
}

/// A message of the protocol between reactors: its header, and what control messages carry.
pub fn message(octets: &[u8]) {
    fuzz::message(octets);
}

/// A handshake with a pre-shared key, with a tape on the path.
pub fn handshake_psk(octets: &[u8]) {
    fuzz::handshake(&security(SecurityMode::Psk), octets);
}

/// A handshake of TLS, with a tape on the path.
pub fn handshake_tls(octets: &[u8]) {
    fuzz::handshake(&security(SecurityMode::Tls), octets);
}

/// Messages that were sealed after a handshake with a pre-shared key.
pub fn records_psk(octets: &[u8]) {
    fuzz::records(&security(SecurityMode::Psk), octets);
}

/// Messages that were sealed after a handshake of TLS.
pub fn records_tls(octets: &[u8]) {
    fuzz::records(&security(SecurityMode::Tls), octets);
}

/// A simulated world: a server with an honest client, and a hostile one that does what the tape says. Longer tapes than 600
/// octets show nothing more, and take seconds.
///
/// # Panics
/// When the hostile peer disturbs the others.
pub fn hostile(octets: &[u8]) {
    let _ = play(&octets[..octets.len().min(600)]);
}
