//! The part of the conformance suite that counts descriptors, on the kernel's RDMA devices; see `rdma.rs`.
#![cfg(feature = "verbs")]

use rdma_reactor_tests::conformance;

conformance!(scale siw, rdma_reactor_tests::conformance::Setup::device("SIW"));
conformance!(scale rxe, rdma_reactor_tests::conformance::Setup::device("RXE"));
