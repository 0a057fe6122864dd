//! The parts that the tests share: the conformance suite, the simulation, recorded exchanges, and failing providers.

pub mod auto;
pub mod capture;
pub mod conformance;
pub mod contract;
pub mod device;
pub mod ends;
#[rustfmt::skip] // Made of the form of `pass`.
pub mod exchanged;
pub mod floods;
pub mod forward;
pub mod gate;
pub mod hostile_run;
pub mod identities;
pub mod life;
#[rustfmt::skip] // The page that walks through it shows its lines.
pub mod loopback;
pub mod mutant;
pub mod null;
mod parts;
#[rustfmt::skip] // The page that walks through it shows its lines.
pub mod pass;
pub mod patience;
pub mod pcap;
pub mod peer;
pub mod signals;
pub mod sim;
pub mod steady;
pub mod tasks;
#[rustfmt::skip] // Derived from the form.
pub mod twice;
pub mod usage;
pub mod witness;
