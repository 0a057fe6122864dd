//! The conformance suite on the kernel's RDMA devices, siw and rxe. It needs the feature `verbs` and both devices; a test fails if its
//! device is missing. `make test-rdma-full` creates the devices.
#![cfg(feature = "verbs")]

use rdma_reactor_tests::conformance;

conformance!(siw, rdma_reactor_tests::conformance::Setup::device("SIW"));
conformance!(rxe, rdma_reactor_tests::conformance::Setup::device("RXE"));
conformance!(shared siw_shared, rdma_reactor_tests::conformance::Setup::device("SIW").shared(128));
conformance!(shared rxe_shared, rdma_reactor_tests::conformance::Setup::device("RXE").shared(128));

// By default, reactors are spread over the completion vectors, and all connections of a reactor share one completion queue. The runs below
// use one fixed vector, or one completion queue per connection.
conformance!(queues siw_vector, rdma_reactor_tests::conformance::Setup::device("SIW").on_vector(1));
conformance!(queues rxe_vector, rdma_reactor_tests::conformance::Setup::device("RXE").on_vector(1));
conformance!(queues siw_queues, rdma_reactor_tests::conformance::Setup::device("SIW").own_queues());
conformance!(queues rxe_queues, rdma_reactor_tests::conformance::Setup::device("RXE").own_queues());
