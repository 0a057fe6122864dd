//! A sample of the conformance suite on the kernel's siw and rxe. The whole suite is in `rdma.rs`.
//! It needs the feature `verbs` and both devices; a test fails if its device is missing. `make
//! test-rdma` runs these tests.
#![cfg(feature = "verbs")]

use rdma_reactor_tests::conformance;

conformance!(sample siw, rdma_reactor_tests::conformance::Setup::device("SIW"));
conformance!(sample rxe, rdma_reactor_tests::conformance::Setup::device("RXE"));
