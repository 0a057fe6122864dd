//! The conformance suite, once per provider.

use rdma_reactor_tests::conformance;

conformance!(iwarp, rdma_reactor_tests::conformance::Setup::iwarp());
conformance!(reads open_sinks, rdma_reactor_tests::conformance::Setup::open_sinks());
conformance!(shared iwarp_shared, rdma_reactor_tests::conformance::Setup::iwarp().shared(128));
