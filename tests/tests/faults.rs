//! Tests of the faults that can be caused with any provider, run on the embedded provider. `rdma_witnessed.rs` runs the
//! same tests on devices.

use rdma_reactor_tests::conformance;
use rdma_reactor_tests::conformance::Setup;

conformance!(faults iwarp, super::Setup::iwarp());
