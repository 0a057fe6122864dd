//! Runs the suite of the `Provider` contract on the kernel's RDMA devices. It needs the feature `verbs` and the devices; `make test-rdma`
//! creates them.
#![cfg(feature = "verbs")]

use rdma_reactor_tests::contract::{KERNEL, Real};
use rdma_reactor_tests::device::{Device, RXE, SIW};
use rdma_transport::conformance::Need;
use rdma_transport::provider_conformance;
use rdma_transport_verbs::Verbs;

fn real(device: Device, missing: &'static [Need]) -> Real {
    Real {
        device: device.kind(),
        address: device.address(),
        providers: |sides| (0..sides).map(|_| Box::new(Verbs::open().expect("a device")) as _).collect(),
        missing,
        deviations: KERNEL,
    }
}

const SIW_LACKS: &[Need] = &[
    Need::Atomics,
    Need::SendWithImmediate,
    Need::WriteWithImmediate,
    Need::SolicitedEvents,
    Need::OrderlyDisconnect,
    Need::PromptInvalidation,
    Need::Liveness,
    Need::Extensions,
    Need::ImmediateSends,
    Need::SharedMemory,
];
const RXE_LACKS: &[Need] =
    &[Need::RemoteInvalidation, Need::Liveness, Need::Extensions, Need::ImmediateSends, Need::SharedMemory];

provider_conformance!(siw, real(SIW, SIW_LACKS));
provider_conformance!(rxe, real(RXE, RXE_LACKS));
