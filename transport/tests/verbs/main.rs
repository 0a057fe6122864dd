//! The provider `verbs` on the devices of the system. These tests are about devices; `tests/tests/rdma_contract.rs` runs the suite for the
//! contract of a provider. Every test runs on an iWARP device (`siw`) and on a RoCE device (`rxe`), with both ends in this process unless
//! the test says otherwise.
//!
//! These tests need the devices: `tests/vm/run.sh` brings them up and sets the variables `RDMA_SIW_ADDR` and so on. Without the devices
//! the tests fail; none is skipped.
#![cfg(feature = "verbs")]
#![allow(clippy::disallowed_methods, reason = "tests on real devices need the real clock, and wait")]

mod bond;
mod connection;
mod datagram;
mod interop;
mod memory;
mod one_sided;
mod peer;
mod port;
mod removal;
mod settings;
mod world;
