//! The target `greeting` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|octets: &[u8]| rdma_reactor_fuzz::greeting(octets));
