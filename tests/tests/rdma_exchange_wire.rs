//! Connecting by exchange (over a TCP stream instead of rdma_cm) between two rxe devices at the ends of a veth pair, over IPv4 and IPv6.
//! `tests/vm/exchange_wire.sh` creates the devices in the virtual machine.
#![cfg(feature = "verbs")]

use std::net::{IpAddr, SocketAddr};

use rdma_reactor::{Config, ConnectOptions, ExchangeOptions, ListenOptions, Reactor, Source};
use rdma_reactor_tests::conformance::Setup;
use rdma_reactor_tests::conformance::harness::{PATIENCE, Pair, Probe, with_watchdog};
use rdma_reactor_tests::device;
use rdma_reactor_tests::exchanged;

/// The devices at the two ends of the veth pair.
const DEVICES: [&str; 2] = ["rxe8", "rxe9"];

/// Returns the addresses of the two devices, for IPv4 or IPv6.
fn ends(v6: bool) -> [IpAddr; 2] {
    let texts = if v6 { ["fd77:8::1", "fd77:9::1"] } else { ["10.77.8.1", "10.77.9.1"] };
    texts.map(|text| text.parse().expect("an address"))
}

/// Returns the settings of both reactors. The keepalive and a flush have no short time limit: a busy machine may exceed the default, and
/// [`Pair::finish`] fails if a flush has exceeded its limit.
fn config() -> Config {
    device::config().timeouts(|t| (t.flush, t.keepalive) = (PATIENCE, PATIENCE))
}

/// Returns a server on the second device that listens for exchanges, and a client.
fn pair(v6: bool, options: ExchangeOptions) -> Pair {
    let [mut server, client] = [0; 2].map(|_| Reactor::new(config()).expect("a reactor"));
    let any = SocketAddr::new(ends(v6)[1], 0);
    let listener = server.context().listen_with(any, ListenOptions::new().exchange(options)).expect("a listener");
    let address = server.context().listeners().local_address(listener).expect("its address");
    Pair { server, s: Probe::echo(), client, c: Probe::default(), address, flushes: true, witness: None }
}

fn talk(v6: bool, options: ExchangeOptions) {
    let mut p = pair(v6, options.clone());
    let options = ConnectOptions::new()
        .exchange(ExchangeOptions { device: options.device.map(|_| DEVICES[0].into()), ..options })
        .source(Source::Address(ends(v6)[0]));
    let conn = p.client.context().connect_with(p.address, options).expect("an attempt");
    p.until("both sides are connected", |p| (p.s.live(), p.c.live()) == (1, 1));
    assert_eq!(p.client.context().connection(conn).device(), Some(DEVICES[0]));
    for (nth, len) in [1, 1000, 4000, 100_000, 1].into_iter().enumerate() {
        let sent = vec![nth as u8; len];
        p.client.context().send(conn, &sent).expect("room");
        p.until("it is back", |p| p.c.received == nth as u64 + 1);
    }
    p.finish();
}

#[test]
fn ipv4_connects_and_carries() {
    with_watchdog("ipv4_connects_and_carries", || talk(false, ExchangeOptions::default()));
}

#[test]
fn ipv6_connects_and_carries() {
    with_watchdog("ipv6_connects_and_carries", || talk(true, ExchangeOptions::default()));
}

/// The TCP stream of an exchange may use another network than the RDMA devices, which the options name. Here it uses the loopback.
#[test]
fn the_stream_may_take_another_network() {
    with_watchdog("the_stream_may_take_another_network", || {
        let named =
            |device: usize| ExchangeOptions { device: Some(DEVICES[device].into()), ..ExchangeOptions::default() };
        let [mut server, client] = [0; 2].map(|_| Reactor::new(config()).expect("a reactor"));
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = server.context().listen_with(any, ListenOptions::new().exchange(named(1))).expect("a listener");
        let address = server.context().listeners().local_address(listener).expect("its address");
        let mut p =
            Pair { server, s: Probe::echo(), client, c: Probe::default(), address, flushes: true, witness: None };
        let conn =
            p.client.context().connect_with(address, ConnectOptions::new().exchange(named(0))).expect("an attempt");
        p.until("both sides are connected", |p| (p.s.live(), p.c.live()) == (1, 1));
        p.client.context().send(conn, &[7; 3000]).expect("room");
        p.until("it is back", |p| p.c.received == 1);
        p.finish();
    });
}

fn setup(v6: bool) -> Setup {
    Setup {
        reactor: exchanged::reactor,
        datagrams: false,
        address: SocketAddr::new(ends(v6)[1], 0),
        ..Setup::device("RXE")
    }
}

rdma_reactor_tests::conformance!(exchanged_wire ipv4, super::setup(false));
rdma_reactor_tests::conformance!(exchanged_wire ipv6, super::setup(true));
