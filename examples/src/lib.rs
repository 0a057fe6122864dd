//! The parts that the programs of this package are made of.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "programs, not the library")]

pub mod bench;
pub mod doctor;
pub mod embed;
pub mod kv;
pub mod mesh;
pub mod metrics;
pub mod pingpong;
pub mod program;
pub mod rcp;
pub mod rping;
