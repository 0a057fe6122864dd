//! The faults that a test can cause with any provider, on the embedded provider. `rdma_witnessed.rs` has the same on
//! devices.

use rdma_reactor_tests::conformance;
use rdma_reactor_tests::conformance::Setup;

conformance!(faults iwarp, super::Setup::iwarp());
