//! Runs the part of the conformance suite that counts file descriptors, once per provider.

use rdma_reactor_tests::conformance;

conformance!(scale iwarp, rdma_reactor_tests::conformance::Setup::iwarp());
