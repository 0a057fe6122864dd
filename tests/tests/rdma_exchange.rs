//! Connecting by exchange on the kernel's rxe, where rdma_cm is not there: `tests/vm/exchange.sh` takes it away before. It is built with
//! the feature `verbs`; `make test-rdma` runs it.
#![cfg(feature = "verbs")]

/// The written contract of `Provider`.
mod contract {
    use rdma_reactor_tests::contract::{KERNEL, Real};
    use rdma_reactor_tests::device::RXE;
    use rdma_reactor_tests::exchanged;
    use rdma_transport::conformance::Need;
    use rdma_transport::provider_conformance;

    fn real() -> Real {
        Real {
            device: "rxe by exchange",
            address: RXE.address(),
            providers: |sides| (0..sides).map(|_| exchanged::provider()).collect(),
            missing: &[
                Need::RemoteInvalidation,
                Need::Liveness,
                Need::Extensions,
                Need::ImmediateSends,
                Need::SharedMemory,
            ],
            deviations: KERNEL,
        }
    }

    provider_conformance!(rxe, real());
}
