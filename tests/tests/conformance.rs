//! The conformance suite on sockets: the tests that need the system, and once all tests over TCP,
//! in shared memory, and on a provider that reads only into memory that peers may write to.
//! `conformance_virtual.rs` runs the other combinations.

use rdma_reactor_tests::conformance;

conformance!(iwarp, rdma_reactor_tests::conformance::Setup::iwarp());
conformance!(shm, rdma_reactor_tests::conformance::Setup::shm());
conformance!(reads open_sinks, rdma_reactor_tests::conformance::Setup::open_sinks());
conformance!(secured_system tls, rdma_reactor_tests::conformance::Setup::iwarp().secured(rdma_reactor::SecurityMode::Tls));
conformance!(secured_system shm_tls, rdma_reactor_tests::conformance::Setup::shm().secured(rdma_reactor::SecurityMode::Tls));
conformance!(secured_part tls_open_sinks, rdma_reactor_tests::conformance::Setup::open_sinks().secured(rdma_reactor::SecurityMode::Tls));
