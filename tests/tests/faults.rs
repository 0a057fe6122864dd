//! The faults that a test can inject with any provider, on the embedded one. `rdma_witnessed.rs` has them on devices.

use rdma_reactor_tests::conformance;
use rdma_reactor_tests::conformance::Setup;

conformance!(faults iwarp, super::Setup::iwarp());
