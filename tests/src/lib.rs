//! The parts that the tests share: the conformance suite, the simulation, recorded exchanges, providers that fail.

#[cfg(feature = "verbs")]
pub mod auto;
pub mod capture;
pub mod conformance;
pub mod device;
pub mod ends;
pub mod forward;
pub mod gate;
pub mod identities;
pub mod life;
pub mod null;
mod parts;
pub mod pcap;
pub mod peer;
pub mod signals;
pub mod sim;
pub mod steady;
pub mod tasks;
pub mod usage;
pub mod witness;
