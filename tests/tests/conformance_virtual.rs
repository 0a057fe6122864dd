//! The conformance suite on virtual time: the embedded provider on a simulated network.
//! `SCHEDULE=N` selects a network with other latencies and other segments of TCP. `conformance.rs`
//! runs on sockets.

use rdma_reactor::SecurityMode::{Psk, Tls};
use rdma_reactor_tests::conformance;
use rdma_reactor_tests::conformance::Setup;

conformance!(virtual iwarp, super::Setup::simulated(false));
conformance!(shared iwarp_shared, super::Setup::simulated(false).shared(128));
conformance!(secured_virtual tls, super::Setup::simulated(false).secured(super::Tls));
conformance!(secured_part psk, super::Setup::simulated(false).secured(super::Psk));
conformance!(secured_part tls_shared, super::Setup::simulated(false).shared(128).secured(super::Tls));
conformance!(faults faults, super::Setup::simulated(false));
conformance!(virtual shm, super::Setup::simulated(true));
conformance!(shared shm_shared, super::Setup::simulated(true).shared(128));
conformance!(secured_virtual shm_tls, super::Setup::simulated(true).secured(super::Tls));
conformance!(secured_part shm_psk, super::Setup::simulated(true).secured(super::Psk));
conformance!(faults shm_faults, super::Setup::simulated(true));
