//! Bad inputs of the API in one table, each with the words that a program prints: the wrong value,
//! and the cure.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_reactor::{
    Access, Config, ConnectOptions, EndpointOptions, Psk, Reactor, RegionOptions, RejectReason, SecurityError, Tls,
};
use rdma_reactor_tests::conformance::harness::{Pair, Probe, Setup};
use rdma_reactor_tests::identities::Authority;

/// Returns the text of an error.
#[track_caller]
fn text<T>(result: Result<T, impl std::fmt::Display>) -> String {
    match result {
        Ok(_) => panic!("this is no bad input"),
        Err(error) => error.to_string(),
    }
}

fn config(set: impl FnOnce(Config) -> Config) -> String {
    text(Reactor::<()>::new(set(Setup::iwarp().config())))
}

fn at(address: &str) -> SocketAddr {
    address.parse().expect("an address")
}

#[track_caller]
fn all_are(rows: &[(String, &str)]) {
    for (text, words) in rows {
        assert!(text.contains(words), "no {words:?} in {text:?}");
        assert!(!text.contains('\n'), "{text:?}");
    }
}

#[test]
fn settings_out_of_range_name_the_range() {
    let small = |config: Config| config.buffer_size(1000).receive_depth(64).send_depth(64);
    all_are(&[
        (config(|c| c.buffer_size(0)), "buffer_size is 0: it must be 1 to 1,073,741,824 bytes"),
        (config(|c| c.receive_depth(1)), "receive_depth is 1: it must be 5 to 32,768 messages"),
        (config(|c| c.send_depth(0)), "send_depth is 0: it must be 1 to 16,384 messages"),
        (config(|c| c.max_connections(0)), "max_connections is 0: it must be 1 to 16,777,216"),
        (
            config(|c| small(c).max_memory(1)),
            "max_memory is 1: it must be at least 133120, the buffers of one connection: \
             (buffer_size + 24, rounded up to 64) x (receives + send_depth + 2)",
        ),
        (
            config(|c| small(c).completions(|c| c.queue = Some(129))),
            "completions.queue is 129: it must be at least 130, the sends, receives and shared receives of one connection",
        ),
        (
            config(|c| c.completions(|c| c.queue = Some(u32::MAX))),
            "completions.queue is 4294967295: it must be 1 to 16,777,216",
        ),
        (
            config(|c| c.timeouts(|t| t.connect = Duration::ZERO)),
            "timeouts.connect is 0: it must be 1 ms to 24 h (given here in ms)",
        ),
    ]);
}

#[test]
fn refused_operations_name_the_cure() {
    let mut p = Pair::new(&Setup::iwarp(), Setup::iwarp().config(), Probe::default(), Probe::default());
    let (conn, with) = (p.connect(), ConnectOptions::new);
    let mut cx = p.client.context();
    let rights = RegionOptions::new().allow(Access::REMOTE);
    let mut region = cx.regions().register(conn, 64, &rights).expect("a region");
    let there = region.remote();
    let zone = "fe80::1 is link-local: name its interface as well, as in fe80::1%eth0";
    let nobody = "no address to connect to: give at least one";
    let endpoint = EndpointOptions::new().receive_depth(0);
    all_are(&[
        (text(cx.listen(at("[fe80::1]:7"))), zone),
        (text(cx.connect(at("[fe80::1]:7"))), zone),
        (text(cx.connect_any(&[at("[fe80::1]:7"), at("[fe80::2]:7")], with())), zone),
        (text(cx.connect_host("fe80::1", 7, with())), zone),
        (text(cx.connect_host("[fe80::1]", 7, with())), zone),
        (text(cx.connect_host("", 7, with())), nobody),
        (text(cx.connect_host("[]", 7, with())), nobody),
        (text(cx.connect_any(&[], with())), nobody),
        (text(cx.listen(at("192.0.2.1:7"))), "cannot listen on 192.0.2.1:7: Cannot assign requested address"),
        (
            text(cx.connect_with(at("192.0.2.1:7"), with().private_data(vec![0; 57]))),
            "57 bytes of private data: the limit is 36",
        ),
        (
            text(cx.datagrams().open(at("127.0.0.1:0"), endpoint)),
            "endpoint's receive_depth is 0: it must be 1 to 16,384 datagrams",
        ),
        (text(cx.regions().register(conn, 0, &rights)), "cannot register 0 bytes of memory: give one byte at least"),
        (
            text(cx.regions().register_vec(conn, Vec::new(), &rights)),
            "cannot register 0 bytes of memory: give one byte at least",
        ),
        (
            text(cx.send(conn, &vec![0; 65 << 20])),
            "68157440 bytes in one message or operation: at most 67108864 are possible here",
        ),
        (text(cx.remote(conn).write(there, &region, 60..65)), "the range ends at byte 65 of a region of 64 bytes"),
        (text(cx.remote(conn).fetch_add(there, &mut region, 4, 1)), "4"),
    ]);
    drop(region);
    p.finish();
}

/// An address in brackets is what remains if `[::1]:7` is cut at its last colon. An address with
/// its zone, or beside another one, is tried.
#[test]
fn addresses_that_can_be_tried_are_tried() {
    let mut p = Pair::new(&Setup::iwarp(), Setup::iwarp().config(), Probe::default(), Probe::default());
    let (local, port) = (p.address, p.address.port());
    for host in ["127.0.0.1", "[::ffff:127.0.0.1]"] {
        p.client.context().connect_host(host, port, ConnectOptions::new()).expect("connecting");
    }
    p.client.context().connect_any(&[at("[fe80::1]:7"), local], ConnectOptions::new()).expect("connecting");
    p.until("all are up", |p| p.c.live() == 3 && p.s.live() == 3);
    p.client.context().connect(at("[fe80::1%1]:7")).expect("it has a zone");
    p.finish();
}

#[test]
fn refused_credentials_name_what_is_wrong() {
    let authority = Authority::new();
    let (certificate, key) = authority.certify("node");
    let identity = authority.identity("node");
    let pem = |text: &str| rdma_reactor::TlsIdentity::from_pem(text.as_bytes(), key.as_bytes());
    all_are(&[
        (text(pem("")), "the certificates: no certificate in PEM: give one"),
        (text(Tls::mutual(&identity, b"")), "the certificate authorities: no certificate in PEM: give one"),
        (text(Tls::mutual(&identity, key.as_bytes())), "the certificate authorities: no certificate in PEM"),
        (text(Psk::parse("a:12")), "line 1 of the keys: write NAME:64-HEX-DIGITS"),
        (SecurityError::Refused("UnknownCA".into()).to_string(), "the peer does not accept the local side: UnknownCA"),
        (RejectReason::Version.to_string(), "the protocol versions differ: the local side speaks version 2"),
    ]);
    assert!(pem(&certificate).is_ok());
}

/// Returns the place of the panic of `act`, which must panic.
fn place_of(act: impl FnOnce()) -> (String, u32) {
    let place = Arc::new(Mutex::new(None));
    let (kept, me) = (Arc::clone(&place), std::thread::current().id());
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() == me {
            let found = info.location().map(|place: &Location<'_>| (place.file().to_owned(), place.line()));
            *kept.lock().expect("no panic") = found;
        }
    }));
    let panicked = catch_unwind(AssertUnwindSafe(act)).is_err();
    std::panic::set_hook(before);
    assert!(panicked, "it was to panic");
    let found = place.lock().expect("no panic").take();
    found.expect("a place")
}

/// A panic over a range outside of a region is reported at the caller, as with slices.
#[test]
fn a_range_outside_of_a_region_is_the_callers_panic() {
    let mut reactor: Reactor = Reactor::new(Setup::iwarp().config()).expect("a reactor");
    let mut region =
        reactor.context().regions().register_at([127, 0, 0, 1].into(), 64, &RegionOptions::new()).expect("a region");
    let lines = line!();
    let places = [
        place_of(|| region.copy_to(60, &mut [0; 8])),
        place_of(|| region.copy_from(60, &[0; 8]).expect("not lent")),
        place_of(|| assert_eq!(region.load(60), 0)),
        place_of(|| region.store(64, 1).expect("not lent")),
    ];
    for (nth, (file, line)) in places.into_iter().enumerate() {
        assert_eq!((file.as_str(), line), (file!(), lines + 2 + nth as u32));
    }
}
