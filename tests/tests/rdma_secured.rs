//! The conformance suite with secured connections on the kernel's RDMA devices. `make test-rdma-full` runs the tests with a pre-shared key,
//! and `tests/vm/secured.sh` runs all of them.
#![cfg(feature = "verbs")]

use rdma_reactor::SecurityMode::{Psk, Tls};
use rdma_reactor_tests::conformance;
use rdma_reactor_tests::conformance::Setup;

conformance!(secured siw_tls, super::Setup::device("SIW").secured(super::Tls));
conformance!(secured rxe_tls, super::Setup::device("RXE").secured(super::Tls));
conformance!(secured_part siw_psk, super::Setup::device("SIW").secured(super::Psk));
conformance!(secured_part rxe_psk, super::Setup::device("RXE").secured(super::Psk));
