//! What the tests share: the conformance suite, the simulation, recorded exchanges.

pub mod conformance;
pub mod ends;
pub mod pcap;
pub mod peer;
pub mod sim;
