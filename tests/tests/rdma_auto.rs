//! `ProviderChoice::Auto` on a host with the kernel's siw and rxe: which provider carries each connection and each listener.
//! `make test-rdma-full` runs these tests. `rdma_without_siw.rs` tests a host without iWARP.
#![cfg(feature = "verbs")]

use std::net::SocketAddr;
use std::time::Duration;

use rdma_reactor::{Config, ProviderChoice, Reactor};
use rdma_reactor_tests::auto::{
    IN_PROCESS, config, connect_to, device_of, each_where_it_belongs, echo, pair, with_loopback,
};
use rdma_reactor_tests::conformance::harness::{Event, Probe, with_watchdog};
use rdma_reactor_tests::device::{RXE, SIW};

/// An iWARP device owns the TCP port of a listener on an unspecified address. So the embedded provider does not listen there, and only the
/// devices do.
#[test]
fn an_iwarp_device_keeps_the_port_for_itself() {
    with_watchdog("an_iwarp_device_keeps_the_port_for_itself", || {
        let mut p = pair();
        assert_eq!(p.server.provider_name(), "verbs");
        for device in [SIW, RXE] {
            let conn = connect_to(&mut p, device.address().ip());
            assert_eq!(device_of(&mut p.client, conn), device.name());
            echo(&mut p, &[conn]);
        }
        p.finish();
    });
}

/// A listener on the address of a device uses that device, and a listener on another address uses the embedded provider. One reactor can
/// have both.
#[test]
fn each_address_is_listened_on_where_it_is() {
    with_watchdog("each_address_is_listened_on_where_it_is", || {
        let mut p = pair();
        for (ip, on) in [(RXE.address().ip(), RXE.name()), ([127, 0, 0, 1].into(), "iwarp0".to_owned())] {
            let listener = p.server.context().listen(SocketAddr::new(ip, 0)).expect("listening");
            p.address = p.server.context().listeners().local_address(listener).expect("its address");
            let conn = p.connect();
            assert_eq!(device_of(&mut p.client, conn), on);
            echo(&mut p, &[conn]);
        }
        p.finish();
    });
}

/// The program's own provider is tried before those of `Auto`: the devices and the embedded provider.
#[test]
fn three_providers_carry_each_what_is_theirs() {
    with_watchdog("three_providers_carry_each_what_is_theirs", || {
        let mut p = with_loopback(&config());
        // One of the devices is siw, which does not flush all work requests.
        p.flushes = false;
        assert_eq!(p.server.provider_name(), "loopback+verbs+iwarp");
        let devices = [
            (RXE.address().ip(), RXE.name()),
            (IN_PROCESS, "loopback0".to_owned()),
            (SIW.address().ip(), SIW.name()),
            ([127, 0, 0, 1].into(), "iwarp0".to_owned()),
        ];
        each_where_it_belongs(p, &devices);
    });
}

/// If no device resolves an address in time, the connect goes over TCP. Here no host has the address, so the connect then fails, too.
#[test]
fn what_does_not_resolve_in_time_is_tried_over_tcp() {
    with_watchdog("what_does_not_resolve_in_time_is_tried_over_tcp", || {
        let mine = RXE.address().ip().to_string();
        let (network, _) = mine.rsplit_once('.').expect("an IPv4 address");
        let nobody = format!("{network}.99:9").parse().expect("an address");
        let quick = Config::default()
            .provider(ProviderChoice::Auto)
            .timeouts(|t| t.resolve = Duration::from_millis(50))
            .timeouts(|t| t.connect = Duration::from_secs(20));
        let mut client = Reactor::new(quick).expect("a reactor");
        let mut probe = Probe::default();
        client.context().connect(nobody).expect("connecting");
        while probe.count(|event| matches!(event, Event::ConnectError(..))) == 0 {
            client.turn(&mut probe, None).expect("a turn");
        }
        assert_eq!(client.provider_name(), "iwarp", "the device did not carry it");
    });
}
