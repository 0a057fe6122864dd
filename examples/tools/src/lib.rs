//! The modules of the programs in this package.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "programs, not the library")]

pub mod bench;
#[cfg(feature = "completions")]
mod completions;
pub mod doctor;
pub mod hw_counters;
pub mod kv;
#[cfg(feature = "mesh")]
pub mod mesh;
pub mod pingpong;
pub mod program;
#[cfg(feature = "rcp")]
pub mod rcp;
pub mod rping;
pub mod secure;
mod signals;
pub mod text;
pub mod valkey;
