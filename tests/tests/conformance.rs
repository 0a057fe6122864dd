//! The conformance suite, once per provider.

use rdma_reactor_tests::conformance;

conformance!(iwarp, rdma_reactor_tests::conformance::Setup::iwarp());
conformance!(shared iwarp_shared, rdma_reactor_tests::conformance::Setup::iwarp().shared(128));
