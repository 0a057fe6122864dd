//! The part of the conformance suite that counts descriptors, once per provider.

use rdma_reactor_tests::conformance;

conformance!(scale iwarp, rdma_reactor_tests::conformance::Setup::iwarp());
