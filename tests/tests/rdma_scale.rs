//! The part of the conformance suite that counts file descriptors, on the kernel's RDMA devices. It is alone in its
//! process; `rdma.rs` has the other parts.
#![cfg(feature = "verbs")]

use rdma_reactor_tests::conformance;

conformance!(scale siw, rdma_reactor_tests::conformance::Setup::device("SIW"));
conformance!(scale rxe, rdma_reactor_tests::conformance::Setup::device("RXE"));
