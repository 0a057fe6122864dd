//! Tests of the provider `verbs` on the devices of the system. They cover the behaviour of devices. `tests/tests/rdma_contract.rs` runs the
//! test suite for the contract of a provider. Every test runs on an iWARP device (`siw`) and on a RoCE device (`rxe`). Both ends of its
//! connections are in this process, unless the test says otherwise.
//!
//! These tests need devices: `tests/vm/run.sh` creates the devices and sets the variables such as `RDMA_SIW_ADDR`. Without devices the
//! tests fail; none is skipped.
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
