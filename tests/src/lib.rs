//! The common parts of the tests: the conformance suite, the simulation, recorded exchanges, and providers whose calls can fail.

pub mod auto;
pub mod capture;
pub mod conformance;
pub mod contract;
#[rustfmt::skip] // The file has the compact layout of `pass`.
mod delegate;
pub mod device;
pub mod ends;
#[rustfmt::skip] // The file has the compact layout of `pass`.
pub mod exchanged;
pub mod floods;
pub mod forward;
pub mod gate;
pub mod hostile_run;
pub mod identities;
pub mod life;
#[rustfmt::skip] // `docs/writing-a-provider.md` shows lines of this file.
pub mod loopback;
pub mod mutant;
pub mod null;
mod parts;
#[rustfmt::skip] // `docs/writing-a-provider.md` shows lines of this file.
pub mod pass;
pub mod patience;
pub mod pcap;
pub mod peer;
pub mod signals;
pub mod sim;
pub mod steady;
pub mod tasks;
#[rustfmt::skip] // The file has the compact layout of `pass`.
pub mod twice;
pub mod usage;
pub mod witness;
