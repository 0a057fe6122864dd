//! Captures the packets between two rxe devices at the ends of a veth pair. `tests/vm/wire.sh` sets the devices up in the virtual machine.
//! `make test-rdma-full` runs these tests.
#![cfg(feature = "verbs")]

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use rdma_reactor::{ConnectOptions, ListenOptions, Reactor, Source};
use rdma_reactor_tests::capture::{Capture, Packet};
use rdma_reactor_tests::conformance::Setup;
use rdma_reactor_tests::conformance::harness::{Pair, Probe, with_watchdog};
use rdma_reactor_tests::device::RXE;

/// The address of rxe0, the client's device.
const HERE: Ipv4Addr = Ipv4Addr::new(10, 77, 2, 1);
/// The address of rxe1, the server's device.
const THERE: Ipv4Addr = Ipv4Addr::new(10, 77, 3, 1);
/// The network device under rxe1, on which the packets between rxe0 and rxe1 are captured.
const BETWEEN: &str = "v1";
/// The number of bytes before and after the payload of a packet in the middle of a message: the headers of IP, UDP and BTH, and the
/// checksum ICRC.
const HEADERS: usize = 20 + 8 + 12 + 4;

/// Returns a server on rxe1 with these options, and a client.
fn pair(options: ListenOptions) -> Pair {
    let config = Setup::on(RXE).config();
    let [mut server, client] = [0; 2].map(|_| Reactor::new(config.clone()).expect("a reactor"));
    let any = SocketAddr::new(THERE.into(), 0);
    let listener = server.context().listen_with(any, options).expect("listening");
    let address = server.context().listeners().local_address(listener).expect("its address");
    Pair { server, s: Probe::echo(), client, c: Probe::default(), address, flushes: true, witness: None }
}

/// Connects the client with these options, and echoes messages of 5,000 bytes. Returns the packets of the connection.
fn exchange(p: &mut Pair, options: ConnectOptions) -> Vec<Packet> {
    let capture = Capture::on(BETWEEN).expect("the right to capture");
    let options = options.source(Source::Address(IpAddr::V4(HERE)));
    let conn = p.client.context().connect_with(p.address, options).expect("connecting");
    p.until("both sides are connected", |p| (p.s.live(), p.c.live()) == (1, 1));
    for nth in 1..=20 {
        p.client.context().send(conn, &[7; 5000]).expect("room");
        p.until("it is back", |p| p.c.received == nth);
    }
    let packets: Vec<_> = capture.take().into_iter().filter(Packet::is_of_connection).collect();
    assert!(packets.len() >= 2 * 20 * 2, "messages and their acknowledgements: {}", packets.len());
    packets
}

/// The type of service is in the IP header of each packet of the connection, including acknowledgements. On RoCE the value of the
/// connecting side is used in both directions: it arrives at the listener with the connect request, and the listener's own setting has no
/// effect.
#[test]
fn the_type_of_service_is_on_the_wire() {
    with_watchdog("the_type_of_service_is_on_the_wire", || {
        for ours in [None, Some(0x68), Some(0xfc)] {
            let mut p = pair(ListenOptions::new().type_of_service(0x20));
            let options = ours.map_or_else(ConnectOptions::new, |octet| ConnectOptions::new().type_of_service(octet));
            let packets = exchange(&mut p, options);
            let seen = |from: Ipv4Addr| -> BTreeSet<u8> {
                packets.iter().filter(|packet| packet.source == from).map(|packet| packet.type_of_service).collect()
            };
            println!(
                "{} packets; from the client {:x?}, from the server {:x?}",
                packets.len(),
                seen(HERE),
                seen(THERE)
            );
            let wanted = BTreeSet::from([ours.unwrap_or(0)]);
            assert_eq!((seen(HERE), seen(THERE)), (wanted.clone(), wanted));
            p.finish();
        }
    });
}

/// The path MTU follows from the MTU of the network device: 1024 for an MTU of 1500.
#[test]
fn the_path_mtu_is_that_of_the_network_device() {
    with_watchdog("the_path_mtu_is_that_of_the_network_device", || {
        let mut p = pair(ListenOptions::new());
        let packets = exchange(&mut p, ConnectOptions::new());
        assert_eq!(packets.iter().map(|packet| packet.len).max(), Some(1024 + HEADERS));
        p.finish();
    });
}
