//! The conformance suite on sockets: all tests over TCP and in shared memory; the tests of reads on
//! a provider that can read only into memory that peers may write to; and on secured connections,
//! the tests that need the system. `conformance_virtual.rs` runs the other combinations.

use rdma_reactor_tests::conformance;

conformance!(iwarp, rdma_reactor_tests::conformance::Setup::iwarp());
conformance!(shm, rdma_reactor_tests::conformance::Setup::shm());
conformance!(reads open_sinks, rdma_reactor_tests::conformance::Setup::open_sinks());
conformance!(secured_system tls, rdma_reactor_tests::conformance::Setup::iwarp().secured(rdma_reactor::SecurityMode::Tls));
conformance!(secured_system shm_tls, rdma_reactor_tests::conformance::Setup::shm().secured(rdma_reactor::SecurityMode::Tls));
conformance!(secured_part tls_open_sinks, rdma_reactor_tests::conformance::Setup::open_sinks().secured(rdma_reactor::SecurityMode::Tls));
