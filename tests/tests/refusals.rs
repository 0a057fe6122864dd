//! Checks the error texts for bad inputs of the API. Each text names the wrong value and the cure,
//! in one line.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_reactor::transport::caps::Moderation;
use rdma_reactor::transport::cm::ConnectFailure;
use rdma_reactor::{
    Access, Config, ConnectError, ConnectOptions, DisconnectReason, EndpointOptions, Piece, Psk, Reactor,
    RegionOptions, RejectReason, RemoteRegion, SecurityError, SecurityMode, Tls, Transfer, TransferOptions,
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
    let moderated = |completions, microseconds| {
        move |c: Config| c.completions(|c| c.moderation = Some(Moderation { completions, microseconds }))
    };
    all_are(&[
        (config(|c| c.buffer_size(0)), "buffer_size is 0: it must be 1 to 1,073,741,824 bytes"),
        (config(|c| c.buffer_size(u32::MAX)), "buffer_size is 4294967295: it must be 1 to 1,073,741,824 bytes"),
        (config(|c| c.receive_depth(1)), "receive_depth is 1: it must be 5 to 32,768 messages"),
        (config(|c| c.receive_depth(40_000)), "receive_depth is 40000: it must be 5 to 32,768 messages"),
        (config(|c| c.send_depth(0)), "send_depth is 0: it must be 1 to 16,384 messages"),
        (config(|c| c.send_depth(20_000)), "send_depth is 20000: it must be 1 to 16,384 messages"),
        (config(|c| c.max_connections(0)), "max_connections is 0: it must be 1 to 16,777,216"),
        (config(|c| c.max_connections_per_host(0)), "max_connections_per_host is 0: it must be 1 to 16,777,216"),
        (config(|c| c.max_pending(0)), "max_pending is 0: it must be 1 to 16,777,216"),
        (config(|c| c.max_handshakes_per_peer(Some(0))), "max_handshakes_per_peer is 0: it must be at least 1"),
        (config(|c| c.shared_receives(Some(7))), "shared_receives is 7: it must be 8 to 32,768 messages"),
        (
            config(|c| c.large_messages(|l| l.max_message = 1 << 50)),
            "large.max_message is 1125899906842624: it must be 0 to large.memory, at most 1 TiB: set both",
        ),
        (config(|c| c.max_inline(1025)), "max_inline is 1025: it must be 0 to 1,024 bytes"),
        (config(|c| c.handle_queue(0)), "handle_queue is 0: it must be 1 to 16,777,216"),
        (config(|c| c.fairness(0, 1)), "fairness completions is 0: it must be at least 1"),
        (config(|c| c.fairness(1, 0)), "fairness bytes is 0: it must be at least 1"),
        (config(|c| c.completions(|c| c.per_turn = 0)), "completions.per_turn is 0: it must be at least 1"),
        (config(moderated(0, 1)), "completions.moderation.completions is 0: it must be 1 to 65,535"),
        (config(moderated(1, 0)), "completions.moderation.microseconds is 0: it must be 1 to 65,535"),
        (config(|c| c.look_interval(Duration::ZERO)), "look_interval is 0: it must be 1 us to 1 s (given here in ns)"),
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
        (
            config(|c| c.timeouts(|t| t.transfer = Duration::from_secs(90_000))),
            "timeouts.transfer is 90000000: it must be 1 ms to 24 h (given here in ms)",
        ),
        (
            config(|c| c.timeouts(|t| t.keepalive = t.keepalive_interval)),
            ": it must be longer than timeouts.keepalive_interval (both in ms)",
        ),
        (
            config(|c| c.iwarp(|i| i.max_handshakes = 1)),
            "iwarp.max_handshakes is 1: it must be at least max_pending, up to 4,096",
        ),
        (
            config(|c| c.iwarp(|i| i.request_grace = Duration::ZERO)),
            "iwarp.request_grace is 0: it must be 1 ms to 24 h (given here in ms)",
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
    let (list, within) = (vec![Piece::new(3, there)], TransferOptions::within(Duration::from_secs(1)));
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
        (
            text(cx.remote(conn).fetch_add(there, &mut region, 4, 1)),
            "an atomic operation at 4 in the local region: it must be a multiple of 8",
        ),
        (
            text(cx.remote(conn).fetch_add(RemoteRegion { address: there.address + 4, ..there }, &mut region, 0, 1)),
            "at the peer: it must be a multiple of 8",
        ),
        (text(cx.remote(conn).write(RemoteRegion { len: 7, ..there }, &region, 0..8)), "byte 8 of a region of 7 bytes"),
        (text(cx.remote(conn).write_vectored(there, &[])), "0 regions in one operation: the range is 1 to "),
        (
            text(cx.remote(conn).transfer(Transfer::Write(&[&region]), list, &within)),
            "the range ends at byte 67 of a region of 64 bytes",
        ),
        (text(cx.offer(conn, &region, 0..0, 7)), "an empty message cannot be offered: send it"),
        (
            text(cx.regions().register_at(at("127.0.0.1:0").ip(), 64, &rights)),
            "rights for a peer before there is one: set RegionOptions::any_peer, or register for a connection",
        ),
        (text(cx.connect_with(at("192.0.2.1:7"), with().ack_timeout(32))), "is 32: it must be "),
        (text(cx.listen(p.address)), "Address already in use (os error 98)"),
    ]);
    cx.close(conn);
    p.until("the end", |p| p.c.live() == 0);
    let mut cx = p.client.context();
    all_are(&[
        (text(cx.send(conn, b"late")), "the connection is not open"),
        (text(cx.remote(conn).write(there, &region, 0..8)), "the connection is not open"),
        (text(cx.regions().register(conn, 64, &rights)), "the connection is gone"),
    ]);
    drop(region);
    p.finish();
}

/// A drained reactor, and one whose callback has panicked, say so in their errors.
#[test]
fn a_reactor_that_is_over_says_so() {
    let reactor = || Reactor::<()>::new(Setup::iwarp().config()).expect("a reactor");
    let (mut drained, mut panicked) = (reactor(), reactor());
    let mut probe = Probe::default();
    drained.context().drain(Duration::from_secs(1));
    while !drained.is_drained() {
        drained.turn(&mut probe, Duration::ZERO).expect("a turn");
    }
    let over = "the reactor is drained: it opens no connections and no endpoints";
    panicked.context().timers().set(Duration::ZERO, 1);
    let mut clumsy = Probe::new(|_, _| panic!("a bug of the program"));
    let mut turn = || panicked.turn(&mut clumsy, Duration::from_secs(1));
    while catch_unwind(AssertUnwindSafe(&mut turn)).is_ok() {}
    all_are(&[
        (text(drained.context().listen(at("127.0.0.1:0"))), over),
        (text(drained.context().connect(at("127.0.0.1:7"))), over),
        (
            text(turn()),
            "a callback panicked in an earlier turn: drop the reactor, or contain panics (Config::contain_panics)",
        ),
    ]);
}

/// The reasons that come from a peer or from the system are printed as one line.
#[test]
fn reasons_are_one_line() {
    let lookup = ConnectError::Lookup { host: "nobody.example".into(), why: "Name or service not known".into() };
    all_are(&[
        (RejectReason::Refused.to_string(), "refused by the peer's program, or by its allowed_peers"),
        (RejectReason::NotOurs.to_string(), "the greeting is not one of rdma-reactor"),
        (RejectReason::Version.to_string(), "the protocol versions differ: the local side speaks version 2"),
        (RejectReason::Limits.to_string(), "the window or the message size is out of range"),
        (RejectReason::Busy.to_string(), "one of its limits, which its log names: try again later"),
        (RejectReason::Draining.to_string(), "the peer is shutting down"),
        (
            RejectReason::Security(SecurityMode::Plain).to_string(),
            "the peer takes plain connections: set Security::Plain",
        ),
        (
            RejectReason::Security(SecurityMode::Tls).to_string(),
            "the peer takes TLS: set Security::Tls with a certificate",
        ),
        (
            RejectReason::Security(SecurityMode::Psk).to_string(),
            "the peer takes a pre-shared key: set Security::Psk with",
        ),
        (RejectReason::SharedMemoryOnly.to_string(), "same host, same user, ProviderChoice::Auto or Shm"),
        (RejectReason::Other(77).to_string(), "reason 77, which a later version defines"),
        (ConnectError::Timeout.to_string(), "no connection within the connect timeout"),
        (ConnectError::Transport(ConnectFailure::Refused).to_string(), "connection refused: nothing listens there"),
        (lookup.to_string(), "nobody.example: Name or service not known: check the name and the resolver"),
        (DisconnectReason::Lost.to_string(), "lost: the peer disconnected without a goodbye"),
        (DisconnectReason::KeepaliveTimeout.to_string(), "the peer was silent for the keepalive timeout"),
    ]);
}

/// `connect_host` accepts an address in brackets: this is what remains if a program cuts `[::1]:7`
/// at the last colon. A link-local address is not refused if it has a zone, or if another address
/// is given.
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
    let ((certificate, key), (_, other)) = (authority.certify("node"), authority.certify("other"));
    let identity = authority.identity("node");
    let named = Tls::client(authority.pem().as_bytes()).expect("an authority").server_name("a b");
    let pem = |text: &str| rdma_reactor::TlsIdentity::from_pem(text.as_bytes(), key.as_bytes());
    all_are(&[
        (text(pem("")), "the certificates: no certificate in PEM: give one"),
        (text(Tls::mutual(&identity, b"")), "the certificate authorities: no certificate in PEM: give one"),
        (text(Tls::mutual(&identity, key.as_bytes())), "the certificate authorities: no certificate in PEM"),
        (text(rdma_reactor::TlsIdentity::from_pem(certificate.as_bytes(), other.as_bytes())), "KeyMismatch"),
        (
            text(rdma_reactor::TlsIdentity::from_pem(certificate.as_bytes(), b"")),
            "give one in PEM (PKCS #8, PKCS #1 or SEC 1)",
        ),
        (text(named), "\"a b\" cannot be the name in a certificate: give a host name or an address"),
        (text(Psk::parse("a:12")), "line 1 of the keys: write NAME:64-HEX-DIGITS"),
        (text(Psk::parse("# nothing\nno colon")), "line 2 of the keys: write NAME:64-HEX-DIGITS"),
        (text(Psk::parse("")), "there is no pre-shared key: write a line NAME:64-HEX-DIGITS"),
        (
            text(Psk::parse(&format!("a:{}", "0".repeat(64)))),
            "use 32 random ones, as `openssl rand -hex 32` prints them",
        ),
        (text(Psk::parse(&format!(":{}", "01".repeat(32)))), "a key with a name of 0 bytes: it must be 1 to "),
        (
            text(Psk::parse(&format!("a:{}\na:{}", "01".repeat(31) + "00", "02".repeat(31) + "00"))),
            "two different pre-shared keys have the same name: give each key its own name",
        ),
        (SecurityError::Refused("UnknownCA".into()).to_string(), "the peer does not accept the local side: UnknownCA"),
    ]);
    assert!(pem(&certificate).is_ok());
}

/// Returns the file and the line of the panic of `act`. `act` must panic.
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

/// If a range is outside of a region, the panic is reported at the line of the caller, as with
/// slices.
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
