//! The conformance suite on one RDMA device of any kind, and the faults that a test can cause without root. `make hardware-report` sets
//! `RDMA_ADAPTER_ADDR` to one of the device's addresses. Every test fails without this variable.
#![cfg(feature = "verbs")]

use std::net::SocketAddr;
use std::time::Duration;

use rdma_reactor::{DisconnectReason, ProviderChoice, Reactor};
use rdma_reactor_tests::conformance;
use rdma_reactor_tests::conformance::Setup;
use rdma_reactor_tests::conformance::harness::{Event, Pair, Probe, now, with_watchdog};
use rdma_reactor_tests::device::{Peer, config};

conformance!(adapter, rdma_reactor_tests::conformance::Setup::adapter());
conformance!(shared adapter_shared, rdma_reactor_tests::conformance::Setup::adapter().shared(128));

/// With `ProviderChoice::Auto`, one listener on an unspecified address serves two clients at the same time: one over the device, and one
/// over TCP on the loopback interface. An iWARP device owns the TCP port itself, so with such a device the test has only the first client.
#[test]
fn a_wildcard_listener_serves_the_device_and_the_loopback() {
    with_watchdog("a_wildcard_listener_serves_the_device_and_the_loopback", || {
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        let setup = Setup { provider: ProviderChoice::Auto, address: any, ..Setup::adapter() };
        let mut p = Pair::new(&setup, setup.config(), Probe::echo(), Probe::default());
        let both = p.server.provider_name().contains('+');
        println!("provider {}", p.server.provider_name());
        let mut connections = Vec::new();
        p.address.set_ip(Setup::adapter().address.ip());
        connections.push(p.connect());
        if both {
            p.address.set_ip([127, 0, 0, 1].into());
            connections.push(p.connect());
            let on = p.client.context().connection(connections[1]).device().map(str::to_owned);
            assert_eq!(on.as_deref(), Some("iwarp0"));
        }
        assert_ne!(p.client.context().connection(connections[0]).device(), Some("iwarp0"));
        for &conn in &connections {
            p.client.context().send(conn, b"there and back").expect("room");
        }
        p.until("all are back", |p| p.c.received == connections.len() as u64);
        p.finish();
    });
}

/// The number of connections to the process that is killed or stopped.
const HIT: usize = 8;

/// Sends `signal` to a peer process that has connections. Checks that each connection ends once with `reason`, and that the reactor serves
/// a second peer process afterwards.
fn end_by(signal: &str, reason: &DisconnectReason) {
    let mut reactor = Reactor::new(config()).expect("a reactor");
    let mut probe = Probe::default();
    let turn_until = |reactor: &mut Reactor, probe: &mut Probe, what: &str, enough: fn(&Probe) -> bool| {
        let deadline = now() + Duration::from_secs(60);
        while !enough(probe) {
            assert!(now() < deadline, "not in time: {what}\n{probe:?}");
            reactor.turn(probe, Some(Duration::from_millis(10))).expect("the loop goes on");
        }
    };
    for _ in 0..2 {
        let (peer, to) = Peer::serve(env!("CARGO_BIN_EXE_rdma-peer"), &[Setup::adapter().address]);
        for _ in 0..HIT {
            reactor.context().connect(to[0]).expect("connecting");
        }
        turn_until(&mut reactor, &mut probe, "all are up", |probe| probe.live() == HIT);
        peer.signal(signal);
        turn_until(&mut reactor, &mut probe, "all have ended", |probe| probe.live() == 0);
        let ends: Vec<_> = probe
            .events
            .drain(..)
            .filter_map(|event| if let Event::Disconnect(_, why) = event { Some(why) } else { None })
            .collect();
        assert_eq!(ends, vec![reason.clone(); HIT]);
    }
    reactor.shutdown(&mut probe, Duration::from_secs(10)).expect("the end");
    let (all, free) = reactor.pool_levels();
    assert_eq!(all, free, "buffers are missing");
}

#[test]
fn a_peer_that_dies() {
    with_watchdog("a_peer_that_dies", || end_by("KILL", &DisconnectReason::Lost));
}

#[test]
fn a_peer_that_stands_still() {
    with_watchdog("a_peer_that_stands_still", || end_by("STOP", &DisconnectReason::KeepaliveTimeout));
}
