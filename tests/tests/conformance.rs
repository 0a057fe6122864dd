//! Runs the conformance suite once per provider.

use rdma_reactor_tests::conformance;

conformance!(iwarp, rdma_reactor_tests::conformance::Setup::iwarp());
conformance!(shm, rdma_reactor_tests::conformance::Setup::shm());
conformance!(shared shm_shared, rdma_reactor_tests::conformance::Setup::shm().shared(128));
conformance!(secured shm_tls, rdma_reactor_tests::conformance::Setup::shm().secured(rdma_reactor::SecurityMode::Tls));
conformance!(secured_part shm_psk, rdma_reactor_tests::conformance::Setup::shm().secured(rdma_reactor::SecurityMode::Psk));
conformance!(reads open_sinks, rdma_reactor_tests::conformance::Setup::open_sinks());
conformance!(shared iwarp_shared, rdma_reactor_tests::conformance::Setup::iwarp().shared(128));
conformance!(secured tls, rdma_reactor_tests::conformance::Setup::iwarp().secured(rdma_reactor::SecurityMode::Tls));
conformance!(secured_part psk, rdma_reactor_tests::conformance::Setup::iwarp().secured(rdma_reactor::SecurityMode::Psk));
conformance!(secured_part tls_open_sinks, rdma_reactor_tests::conformance::Setup::open_sinks().secured(rdma_reactor::SecurityMode::Tls));
conformance!(secured_part tls_shared, rdma_reactor_tests::conformance::Setup::iwarp().shared(128).secured(rdma_reactor::SecurityMode::Tls));
