//! The conformance suite on the kernel's RDMA devices. It is built with the feature `verbs`, and needs such devices;
//! `make test-rdma` brings its own. If a device is missing, every test that needs it fails.
#![cfg(feature = "verbs")]

use rdma_reactor_tests::conformance;

conformance!(siw, rdma_reactor_tests::conformance::Setup::device("SIW"));
conformance!(rxe, rdma_reactor_tests::conformance::Setup::device("RXE"));
conformance!(shared siw_shared, rdma_reactor_tests::conformance::Setup::device("SIW").shared(128));
conformance!(shared rxe_shared, rdma_reactor_tests::conformance::Setup::device("RXE").shared(128));

// By default the reactors are spread over the completion vectors, and the connections of each share one completion queue.
conformance!(queues siw_vector, rdma_reactor_tests::conformance::Setup::device("SIW").on_vector(1));
conformance!(queues rxe_vector, rdma_reactor_tests::conformance::Setup::device("RXE").on_vector(1));
conformance!(queues siw_queues, rdma_reactor_tests::conformance::Setup::device("SIW").own_queues());
conformance!(queues rxe_queues, rdma_reactor_tests::conformance::Setup::device("RXE").own_queues());
