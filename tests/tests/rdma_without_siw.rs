//! `ProviderChoice::Auto` on a host with RoCE and without iWARP: the kernel's rxe, after siw was removed. siw cannot be removed while a
//! process has it open, so this test is alone in its process. `make test-rdma-full` runs it.
#![cfg(feature = "verbs")]

use std::time::Duration;

use rdma_reactor::Reactor;
use rdma_reactor_tests::auto::{connect_to, device_of, echo, pair};
use rdma_reactor_tests::conformance::Setup;
use rdma_reactor_tests::conformance::harness::{Probe, with_watchdog};
use rdma_reactor_tests::device::{RXE, SIW};

/// One listener on an unspecified address serves a client over a RoCE device, and clients over TCP. This requires that no iWARP device
/// exists, because such a device would own the TCP port.
#[test]
fn one_listener_serves_roce_and_tcp() {
    with_watchdog("one_listener_serves_roce_and_tcp", || {
        assert!(SIW.remove().wait().expect("rdma").success());
        let mut p = pair();
        let over_rdma = connect_to(&mut p, RXE.address().ip());
        let over_loopback = connect_to(&mut p, [127, 0, 0, 1].into());
        // This address belongs to the host, but to no RDMA device any more.
        let over_tcp = connect_to(&mut p, SIW.address().ip());
        let on = [over_rdma, over_loopback, over_tcp].map(|conn| device_of(&mut p.client, conn));
        assert_eq!(on, [RXE.name(), "iwarp0".to_owned(), "iwarp0".to_owned()]);
        assert_eq!([p.server.provider_name(), p.client.provider_name()], ["verbs+shm", "verbs+shm"]);
        echo(&mut p, &[over_rdma, over_loopback, over_tcp]);
        // The first client is shut down. A second client, which uses no RDMA, must be able to connect over TCP to the address of the RDMA
        // device.
        p.client.shutdown(&mut p.c, Duration::from_secs(5)).expect("the client's end");
        p.until("both sides are disconnected", |p| p.s.live() + p.c.live() == 0);
        (p.client, p.c) = (Reactor::new(Setup::iwarp().config()).expect("a reactor"), Probe::default());
        let conn = connect_to(&mut p, RXE.address().ip());
        assert_eq!(device_of(&mut p.client, conn), "iwarp0");
        echo(&mut p, &[conn]);
        p.finish();
        SIW.add();
    });
}
