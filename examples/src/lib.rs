//! The parts that the examples share.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "programs, not the library")]

pub mod embed;
pub mod metrics;
