//! Programs of people who wrote with the library for the first time, from its documents alone. Each
//! of them checks its own results, and returns an error that says what is wrong.
#![allow(clippy::disallowed_methods, reason = "programs, not the library")]

#[path = "../newcomer/discovery.rs"]
mod discovery;
#[path = "../newcomer/gateway.rs"]
mod gateway;
#[path = "../newcomer/hub.rs"]
mod hub;
#[path = "../newcomer/one_sided.rs"]
mod one_sided;
#[path = "../newcomer/own_loop.rs"]
mod own_loop;
#[path = "../newcomer/rpc_mtls.rs"]
mod rpc_mtls;

use std::fmt::Debug;

#[track_caller]
fn succeeds(outcome: Result<(), impl Debug>) {
    outcome.expect("a program that checks its own results");
}

#[test]
fn a_service_with_certificates() {
    succeeds(rpc_mtls::run());
}

#[test]
fn a_gateway_with_cancelled_requests() {
    succeeds(gateway::run());
}

#[test]
fn a_loop_with_other_sources() {
    succeeds(own_loop::run());
}

#[test]
fn a_hub_with_slow_readers() {
    succeeds(hub::run());
}

#[test]
fn a_store_without_a_program() {
    succeeds(one_sided::run());
}

#[test]
fn nodes_that_find_each_other() {
    succeeds(discovery::run());
}
