//! The target `cuts` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|octets: &[u8]| rdma_reactor_fuzz::cuts(octets));
