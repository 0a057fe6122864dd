//! What the tests share: the conformance suite, the simulation, recorded exchanges.

pub mod pcap;
pub mod conformance;
