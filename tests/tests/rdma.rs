//! The conformance suite on the kernel's RDMA devices. Built with the feature `verbs`, run where there are such devices:
//! `make test-rdma` brings its own. A device that is missing fails every test that needs it.
#![cfg(feature = "verbs")]

use rdma_reactor_tests::conformance;

conformance!(siw, rdma_reactor_tests::conformance::Setup::device("SIW"));
conformance!(rxe, rdma_reactor_tests::conformance::Setup::device("RXE"));
conformance!(shared siw_shared, rdma_reactor_tests::conformance::Setup::device("SIW").shared(128));
conformance!(shared rxe_shared, rdma_reactor_tests::conformance::Setup::device("RXE").shared(128));
