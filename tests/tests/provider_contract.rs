//! Runs the suite of the `Provider` contract on each provider of this project that needs no device.

use rdma_reactor_tests::contract;
use rdma_transport::conformance::run;
use rdma_transport::provider_conformance;

provider_conformance!(embedded, contract::EMBEDDED);
provider_conformance!(shared, contract::SHARED);
provider_conformance!(forward, contract::FORWARD);
provider_conformance!(null, contract::NULL);
provider_conformance!(loopback, contract::IN_PROCESS);
provider_conformance!(hardware, contract::hardware(0));

/// With each seed, the simulated device reports completions and events in another order.
#[test]
fn hardware_of_many_seeds() {
    for seed in 1..=100 {
        let failures = run(&contract::hardware(seed), "");
        assert!(failures.is_empty(), "seed {seed}: {failures:?}");
    }
}
