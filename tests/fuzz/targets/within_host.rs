//! The target `within_host` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|octets: &[u8]| rdma_reactor_fuzz::within_host(octets));
