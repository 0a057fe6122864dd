//! Each setting must reach the place where it takes effect.
//! `transport/verbs/tests/verbs/settings.rs` reads the same settings back from the queue pairs of
//! devices.

use std::cell::Cell;
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rdma_reactor::transport::caps::{Capabilities, Features};
use rdma_reactor::transport::{QpAttr, TransportError};
use rdma_reactor::{
    Access, Config, ConnectError, ConnectOptions, ConnectRequest, ConnectionId, Context, EndpointOptions, Error,
    Framing, Handler, ListenOptions, Message, Outcome, Place, Reactor, Reactors, ReadDepth, RegionOptions,
    RejectReason, Retries, SecurityMode, SendErrorKind, SendId, Source,
};
use rdma_reactor_tests::conformance::harness::{Event, Pair, Probe, Setup, pattern, with_watchdog};
use rdma_reactor_tests::forward::{Asked, Forward, Record};
use rdma_reactor_tests::identities::security;
use rdma_reactor_tests::sim::fabric::{Shared, lock};
use rdma_reactor_tests::sim::quiet::{Attempts, Node, network, reactor, until};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;

fn config() -> Config {
    Setup::iwarp().config()
}

fn pair() -> Pair {
    Pair::new(&Setup::iwarp(), config(), Probe::default(), Probe::default())
}

/// Returns a server and a client. The client's device has capabilities that `limits` changes, and its calls are recorded.
fn recorded(config: Config, limits: impl FnOnce(&mut Capabilities)) -> (Pair, Record) {
    let (mut p, record) = (pair(), Record::default());
    p.client = Forward::recording(config, limits, &record);
    (p, record)
}

fn queue_pair(asked: &[Asked]) -> QpAttr {
    let made = |asked: &Asked| if let Asked::QueuePair(attr) = asked { Some(*attr) } else { None };
    asked.iter().find_map(made).expect("a queue pair was made")
}

/// Returns the number of entries and the completion vector of the first completion queue that was created.
fn completion_queue(asked: &[Asked]) -> (u32, u32) {
    let made =
        |asked: &Asked| if let Asked::CompletionQueue(size, vector) = *asked { Some((size, vector)) } else { None };
    asked.iter().find_map(made).expect("a completion queue was made")
}

const RETRIES: Retries = Retries { path: 3, receiver_not_ready: 4, min_rnr_timer: 20 };
const DEPTH: ReadDepth = ReadDepth { responder_resources: 5, initiator_depth: 6 };

#[test]
fn options_of_a_connection_arrive() {
    with_watchdog("options_of_a_connection_arrive", || {
        let (mut p, record) = recorded(config(), |_| {});
        let options = ConnectOptions::new().type_of_service(0x68).ack_timeout(14).retries(RETRIES).read_depth(DEPTH);
        p.client.context().connect_with(p.address, options).expect("connecting");
        p.until("both sides are connected", |p| p.s.live() == 1 && p.c.live() == 1);
        let asked = record.take();
        let path = asked.iter().find_map(|asked| if let Asked::Resolve(path) = asked { Some(path) } else { None });
        let path = path.expect("an address was resolved");
        assert_eq!((path.type_of_service, path.ack_timeout, &path.source), (Some(0x68), Some(14), &Source::Any));
        assert!(asked.iter().any(|asked| matches!(asked, Asked::Connect(RETRIES, DEPTH))), "{asked:?}");
        p.finish();
    });
}

#[test]
fn options_of_a_listener_arrive_with_each_connection() {
    with_watchdog("options_of_a_listener_arrive_with_each_connection", || {
        let (mut p, record) = (pair(), Record::default());
        p.server = Forward::recording(config(), |_| {}, &record);
        let options = ListenOptions::new().type_of_service(8).ack_timeout(31).ipv6_only(true);
        let options = options.retries(RETRIES).read_depth(DEPTH).framing(Framing::Credits);
        let listener = p.server.context().listen_with(Setup::iwarp().address, options).expect("listening");
        p.address = p.server.context().listeners().local_address(listener).expect("its address");
        p.connect();
        let asked = record.take();
        let options =
            asked.iter().find_map(|asked| if let Asked::Listen(options) = asked { Some(options) } else { None });
        let options = options.expect("it listens");
        assert_eq!((options.type_of_service, options.ack_timeout, options.ipv6_only), (Some(8), Some(31), Some(true)));
        assert!(asked.iter().any(|asked| matches!(asked, Asked::Accept(RETRIES, DEPTH))), "{asked:?}");
        p.finish();
    });
}

/// Values that no device supports are refused immediately, with an error that names the setting. No connection or listener is opened.
#[test]
fn options_out_of_range_are_refused() {
    let mut p = pair();
    let wrong = [
        (ConnectOptions::new().ack_timeout(32), 32),
        (ConnectOptions::new().retries(Retries { path: 8, ..Retries::default() }), 8),
        (ConnectOptions::new().retries(Retries { receiver_not_ready: 9, ..Retries::default() }), 9),
        (ConnectOptions::new().retries(Retries { min_rnr_timer: 33, ..Retries::default() }), 33),
    ];
    for (options, wrong) in wrong {
        let error = p.client.context().connect_with(p.address, options).expect_err("it is out of range");
        assert!(
            matches!(error, Error::Transport(TransportError::OutOfRange { value, .. }) if value == wrong),
            "{error}"
        );
    }
    let wrong = [
        (ListenOptions::new().ack_timeout(40), 40),
        (ListenOptions::new().retries(Retries { min_rnr_timer: 41, ..Retries::default() }), 41),
    ];
    for (options, wrong) in wrong {
        let error = p.client.context().listen_with(Setup::iwarp().address, options).expect_err("it is out of range");
        assert!(
            matches!(error, Error::Transport(TransportError::OutOfRange { value, .. }) if value == wrong),
            "{error}"
        );
    }
    let elsewhere = ConnectOptions::new().source(Source::Address([127, 0, 0, 2].into()));
    let error = p.client.context().connect_with(p.address, elsewhere).expect_err("it cannot choose");
    assert!(matches!(error, Error::Transport(TransportError::Unsupported { .. })), "{error}");
    assert_eq!(p.client.context().connections(), 0);
}

/// The queue depths and the inline size are those of the configuration, or the device's limits if these are lower. The connection works in
/// both cases.
#[test]
fn queues_are_cut_to_the_device() {
    with_watchdog("queues_are_cut_to_the_device", || {
        let settings = config().send_depth(100).receive_depth(200).max_inline(32).completions(|c| c.queue = Some(5000));
        let cases = [(4096, 256, 32_767, (102, 200, 32, 5000)), (16, 8, 1000, (16, 16, 8, 1000))];
        for (depth, inline, entries, expected) in cases {
            let (mut p, record) = recorded(settings.clone(), |capabilities| {
                capabilities.max_queue_depth = depth;
                capabilities.max_inline = inline;
                capabilities.max_completion_queue = entries;
            });
            p.s = Probe::echo();
            let conn = p.connect();
            let asked = record.take();
            let QpAttr { max_send_wr, max_recv_wr, max_inline, max_recv_sge, .. } = queue_pair(&asked);
            let (size, _) = completion_queue(&asked);
            assert_eq!((max_send_wr, max_recv_wr, max_inline, size), expected);
            assert_eq!(max_recv_sge, 1, "receives are of one piece");
            // In each direction, there are more messages than the send queue or the receive queue has slots.
            for sent in 0..500 {
                while p.client.context().send(conn, b"there and back").is_err() {
                    p.turn();
                }
                p.until("not too many are on their way", |p| sent < p.c.received + 10);
            }
            p.until("all are back", |p| p.c.received == 500);
            p.finish();
        }
    });
}

/// Reactors are distributed round-robin over the completion vectors of a device, unless the program selects a vector.
#[test]
fn completion_vectors_are_spread_or_chosen() {
    with_watchdog("completion_vectors_are_spread_or_chosen", || {
        let vector = |vectors, config| {
            let (mut p, record) = recorded(config, |capabilities| capabilities.completion_vectors = vectors);
            p.connect();
            let (_, vector) = completion_queue(&record.take());
            p.finish();
            vector
        };
        for wanted in [0, 3] {
            assert_eq!(vector(4, config().completions(|c| c.vector = Some(wanted))), wanted);
        }
        assert_eq!(vector(1, config().completions(|c| c.vector = Some(3))), 0, "there is no choice");
        // Other tests create reactors at the same time, so two reactors of this test may get the same vector.
        let mut spread = std::collections::BTreeSet::new();
        while spread.len() < 2 {
            spread.insert(vector(4, config()));
            assert!(spread.iter().all(|&vector| vector < 4), "{spread:?}");
        }

        let (mut p, _) =
            recorded(config().completions(|c| c.vector = Some(4)), |capabilities| capabilities.completion_vectors = 4);
        p.client.context().connect(p.address).expect("connecting");
        let error = |p: &Pair| p.c.count(|event| matches!(event, Event::ConnectError(..)));
        p.until("the error", |p| error(p) == 1);
        let said = |event: &Event| matches!(event, Event::ConnectError(_, ConnectError::Local(why)) if why.starts_with("completion vector is 4"));
        assert_eq!(p.c.count(said), 1, "{:?}", p.c);
    });
}

/// Returns the first and the last of the established connections of a probe.
fn first_and_last(probe: &Probe) -> (ConnectionId, ConnectionId) {
    let connected = |event: &Event| if let Event::Connect(conn, _) = event { Some(*conn) } else { None };
    let all: Vec<_> = probe.events.iter().filter_map(connected).collect();
    (*all.first().expect("it was notified of a connection"), all[all.len() - 1])
}

/// On some devices, peers can write into memory that is the sink of a Read. On such a device, the reactor reads large messages into sinks
/// that it uses for one peer only, and delivers a copy that no peer can access. On other devices, it registers no memory as a sink that
/// peers can write.
#[test]
fn sinks_of_reads_are_open_only_where_they_must_be() {
    with_watchdog("sinks_of_reads_are_open_only_where_they_must_be", || {
        for open in [true, false] {
            let patient = config().timeouts(|t| t.pool_idle = Duration::from_secs(3600));
            let (mut p, record) = recorded(patient, |capabilities| {
                capabilities.features.set(Features::OPEN_READ_SINKS, open);
            });
            (p.s.large, p.c.large, p.c.keep) = (true, true, Some(Vec::new()));
            p.connect();
            let (there, here) = (first_and_last(&p.s).0, first_and_last(&p.c).0);
            for nth in 0..3 {
                p.server.context().send(there, &pattern(nth, 300_000)).expect("room");
            }
            p.until("the messages", |p| p.c.received == 3 && p.s.sent == 3);
            assert!(p.c.messages().into_iter().enumerate().all(|(nth, message)| message == pattern(nth, 300_000)));
            let sinks = |asked: &Asked| matches!(asked, Asked::Register(access) if access.contains(Access::READ_SINK));
            assert_eq!(record.take().iter().any(sinks), open);
            let message = p.c.keep.take().and_then(|mut kept| kept.pop()).expect("it is kept");
            let region = message.into_region().expect("it was past one buffer");
            assert_eq!(region.bytes(), Some(&pattern(2, 300_000)[..]), "no peer can write it");
            let sent = p.client.context().send_region(here, &region, 0..10);
            assert_eq!(sent.err(), open.then_some(SendErrorKind::ForeignRegion), "the copy is registered nowhere");

            let readable = RegionOptions::new().allow(Access::REMOTE_READ);
            let source = p.server.context().regions().register(there, 10, &readable).expect("a region");
            let mut closed = p.client.context().regions().register(here, 100, &RegionOptions::new()).expect("a region");
            let refused = p.client.context().remote(here).read(source.remote(), &mut closed, 0..10);
            assert_eq!(refused.err(), open.then_some(SendErrorKind::NotASink));
            let options = RegionOptions::new().allow(Access::READ_SINK);
            let mut sink = p.client.context().regions().register(here, 100, &options).expect("a region");
            p.client.context().remote(here).read(source.remote(), &mut sink, 0..10).expect("it is a sink");
            let reads = 1 + 2 * u64::from(!open);
            p.until("the read", |p| p.c.sent == reads);
            assert!(
                p.c.events.iter().all(|event| !matches!(event, Event::Sent(_, _, Outcome::Failed(_)))),
                "{:?}",
                p.c
            );
            p.client.context().regions().revoke(&sink).expect("the device takes keys back");
            assert_eq!(sink.bytes(), None, "it is open as long as it is registered");
            drop((region, sink, closed, source));
            p.until("all are released", |p| p.client.stats().memory.regions == 0);
            assert_eq!(p.client.stats().memory.fetched_bytes, 0);

            // A second peer must not get sinks whose keys the first peer knows.
            p.connect();
            let (_, other) = first_and_last(&p.s);
            for (to, fresh) in [(other, u64::from(open)), (there, 0)] {
                let before = (p.c.received, p.client.stats().messages.large_registrations);
                p.server.context().send(to, &pattern(3, 300_000)).expect("room");
                p.until("one more", |p| p.c.received == before.0 + 1 && p.client.stats().memory.fetched_bytes == 0);
                assert_eq!(p.client.stats().messages.large_registrations - before.1, fresh, "{to}, {open}");
            }
            let kept = p.client.stats().memory.kept_bytes;
            p.server.context().close(other);
            p.until("its end", |p| p.c.live() == 1);
            assert_eq!(p.client.stats().memory.kept_bytes < kept, open, "what its peer could write is gone");
            p.finish();
        }
    });
}

/// Returns the link-local addresses of this host that are in use, with their scopes.
fn link_local_addresses() -> Vec<SocketAddr> {
    let list = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let address = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| u32::from_str_radix(fields.get(at)?, 16).ok();
        let ip = Ipv6Addr::from(u128::from_str_radix(fields.first()?, 16).ok()?);
        // These flags mean that another host may have the address (IFA_F_DADFAILED, IFA_F_TENTATIVE).
        let in_use = number(4)? & (0x08 | 0x40) == 0;
        (ip.is_unicast_link_local() && in_use).then_some(SocketAddr::V6(SocketAddrV6::new(ip, 0, 0, number(1)?)))
    };
    list.lines().filter_map(address).collect()
}

/// The scope of a link-local address is passed to the sockets of an endpoint: without it, the system refuses the address.
#[test]
fn an_endpoint_at_a_link_local_address_keeps_its_scope() {
    with_watchdog("an_endpoint_at_a_link_local_address_keeps_its_scope", || {
        let addresses = link_local_addresses();
        println!("link-local addresses: {addresses:?}; the provider itself is tested without any, too");
        for local in addresses {
            let mut p = pair();
            let open = |reactor: &mut Reactor| reactor.context().datagrams().open(local, EndpointOptions::new());
            let [there, here] = [&mut p.server, &mut p.client].map(|reactor| open(reactor).expect("an endpoint"));
            let address = p.server.context().datagrams().address(there).expect("it is open");
            let scope = |of| if let SocketAddr::V6(v6) = of { v6.scope_id() } else { 0 };
            assert_eq!((address.ip(), scope(address)), (local.ip(), scope(local)));
            p.client.context().datagrams().find_peer(here, address).expect("asking");
            let answer = |event: &Event| if let Event::Peer(_, _, found) = event { Some(found.clone()) } else { None };
            let found = |p: &Pair| p.c.events.iter().find_map(answer);
            p.until("an answer", |p| found(p).is_some());
            let peer = found(&p).expect("an answer").expect("a peer");
            p.client.context().datagrams().send(here, peer, b"near").expect("there is room");
            p.until("the datagram", |p| p.s.count(|event| matches!(event, Event::Datagram(..))) == 1);
        }
    });
}

/// A peer whose address is not in an allowed network is refused. The embedded provider refuses the peer before it reads from the peer's
/// socket. If a provider does not check addresses, the reactor refuses the peer.
#[test]
fn only_allowed_networks_may_connect() {
    with_watchdog("only_allowed_networks_may_connect", || {
        let elsewhere = config().allowed_peers(Some(vec!["192.0.2.0/24".parse().expect("a network")]));
        let here = config().allowed_peers(Some(vec!["127.0.0.0/8".parse().expect("a network")]));
        for (config, admitted) in [(&elsewhere, false), (&here, true)] {
            for forwarded in [false, true] {
                let mut p = Pair::with_configs(
                    &Setup::iwarp(),
                    config.clone(),
                    self::config(),
                    Probe::default(),
                    Probe::default(),
                );
                if forwarded {
                    p.server = Forward::recording(config.clone(), |_| {}, &Record::default());
                    let listener = p.server.context().listen(Setup::iwarp().address).expect("listening");
                    p.address = p.server.context().listeners().local_address(listener).expect("its address");
                }
                if admitted {
                    p.connect();
                    p.finish();
                    continue;
                }
                p.client.context().connect(p.address).expect("connecting");
                p.until("the refusal", |p| p.c.count(|event| matches!(event, Event::ConnectError(..))) == 1);
                assert_eq!(p.s.events, [], "the program was not asked");
                let rejected = |event: &Event| {
                    matches!(
                        event,
                        Event::ConnectError(_, ConnectError::Rejected { reason: RejectReason::Refused, .. })
                    )
                };
                assert_eq!(p.c.count(rejected), usize::from(forwarded), "{:?}", p.c);
            }
        }
    });
}

/// The first reactor of a group checks a peer before it calls `on_place`. A peer of another
/// network, one without a valid greeting, and one that secures its connections in another way reach
/// no callback.
#[test]
fn a_group_places_only_peers_that_may_connect() {
    struct Placing(Rc<Cell<u32>>);
    impl Handler for Placing {
        fn on_place(&mut self, _: &mut Context<'_>, _: ConnectRequest<'_>) -> Place {
            self.0.set(self.0.get() + 1);
            Place::Reactor(0)
        }
    }
    let elsewhere = Config::default().allowed_peers(Some(vec!["192.0.2.0/24".parse().expect("a network")]));
    let secured = Config::default().security(security(SecurityMode::Psk));
    let stranger = ConnectOptions::new().framing(Framing::Raw).private_data(b"hello".to_vec());
    for (config, options, refusal) in [
        (elsewhere, ConnectOptions::new(), Some(RejectReason::Refused)),
        (Config::default(), stranger, Some(RejectReason::NotOurs)),
        (secured, ConnectOptions::new(), Some(RejectReason::Security(SecurityMode::Psk))),
        (Config::default(), ConnectOptions::new(), None),
    ] {
        let (fabric, placed) = (network(3), Rc::<Cell<u32>>::default());
        let mut servers = [0, 1].map(|node| reactor(node, &fabric, config.clone()));
        let group = Reactors::of(&mut servers);
        servers[0].context().listen(address(0, 7471)).expect("a listener");
        let attempts = Attempts::default();
        let [first, second] = servers.map(|server| Node::new(server, Box::new(Placing(Rc::clone(&placed)))));
        let client = Node::new(reactor(2, &fabric, Config::default()), Box::new(attempts.clone()));
        let mut nodes = [first, second, client];
        nodes[2].reactor.context().connect_with(address(0, 7471), options).expect("connecting");
        until(&fabric, &mut nodes, "an answer", |_| attempts.up.borrow().len() + attempts.errors.borrow().len() == 1);
        let reason = attempts.errors.borrow().first().map(|error| match error {
            ConnectError::Rejected { reason, .. } => *reason,
            other => panic!("{other:?}"),
        });
        assert_eq!((reason, placed.get()), (refusal, u32::from(refusal.is_none())), "{:?}", group.load(0));
        assert_eq!(nodes[0].reactor.stats().connections.refused, u64::from(refusal.is_some()));
    }
}

/// If one address has as many silent connections as the limit allows, a new connection from it evicts the oldest one. The oldest connection
/// is not evicted before its grace time (default: half a second) has ended.
#[test]
fn handshakes_of_one_address_are_limited_as_configured() {
    with_watchdog("handshakes_of_one_address_are_limited_as_configured", || {
        let settings = config().max_handshakes_per_peer(Some(1)).iwarp(|i| i.request_grace = Duration::from_millis(1));
        let mut p = Pair::with_configs(&Setup::iwarp(), settings, config(), Probe::default(), Probe::default());
        let [oldest, other] = [silent(p.address), silent(p.address)];
        p.until("the oldest has had its grace", |_| is_gone(&oldest));
        assert!(!is_gone(&other), "one may stay");
        p.connect();
        p.finish();
    });
}

#[allow(clippy::disallowed_methods, reason = "a peer that says nothing")]
fn silent(to: SocketAddr) -> std::net::TcpStream {
    let stream = std::net::TcpStream::connect(to).expect("a connection");
    stream.set_nonblocking(true).expect("a socket");
    stream
}

fn is_gone(stream: &std::net::TcpStream) -> bool {
    !stream.peek(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn an_ipv4_peer_of_an_ipv6_listener_has_its_ipv4_address() {
    let any = Setup { address: (std::net::Ipv6Addr::UNSPECIFIED, 0).into(), ..Setup::iwarp() };
    let mut server = Reactor::new(any.config()).unwrap();
    let options = ListenOptions::new().ipv6_only(false);
    let listener = server.context().listen_with(any.address, options).unwrap();
    let port = server.context().listeners().local_address(listener).unwrap().port();
    let client = Reactor::new(any.config()).unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut p =
        Pair { server, s: Probe::default(), client, c: Probe::default(), address, flushes: true, witness: None };
    p.connect();
    let there = p.s.connection().unwrap();
    assert_eq!(p.server.context().connection(there).peer_address().unwrap().ip(), address.ip());
    p.finish();
}

#[test]
fn a_silent_address_is_given_up_for_the_next() {
    const ATTEMPT: u64 = 20;
    const LIMIT: u64 = 3_600_000;
    let (fabric, attempts) = (network(3), Attempts::default());
    let hasty = Config::default().timeouts(|t| t.attempt = Duration::from_millis(ATTEMPT));
    let hasty = hasty.timeouts(|t| t.connect = Duration::from_millis(LIMIT));
    let mut nodes = [
        Node::new(reactor(0, &fabric, Config::default()), Box::<Attempts>::default()),
        Node::new(reactor(1, &fabric, hasty), Box::new(attempts.clone())),
        Node::new(reactor(2, &fabric, Config::default()), Box::<Attempts>::default()),
    ];
    let [silent, there] = [0, 2].map(|node| address(node, 7471));
    for (node, address) in [(0, silent), (2, there)] {
        nodes[node].reactor.context().listen(address).expect("a free port");
    }
    // The kernel of node 0 accepts the TCP connection, but the process of node 0 never answers.
    nodes[0].dead = true;
    let begun = lock(&fabric).now();
    let mut cx = nodes[1].reactor.context();
    let conn = cx.connect_any(&[silent, silent, there], ConnectOptions::new()).expect("connecting");
    until(&fabric, &mut nodes, "a connection", |_| !attempts.up.borrow().is_empty());
    let took = lock(&fabric).now() - begun;
    assert!((2 * ATTEMPT * MS..3 * ATTEMPT * MS).contains(&took), "{took} ns");
    assert_eq!(nodes[1].reactor.context().connection(conn).peer_address(), Some(there));
    // The last address of a list may use the whole connect timeout.
    let begun = lock(&fabric).now();
    nodes[1].reactor.context().connect_any(&[silent, silent], ConnectOptions::new()).expect("connecting");
    until(&fabric, &mut nodes, "the error", |_| !attempts.errors.borrow().is_empty());
    let took = lock(&fabric).now() - begun;
    assert_eq!(attempts.errors.borrow()[..], [ConnectError::Timeout]);
    assert!((LIMIT * MS..(LIMIT + 2 * ATTEMPT) * MS).contains(&took), "{took} ns");
}

/// A program that takes 600 ms of virtual time for each message.
struct Slow(Shared, Rc<Cell<u32>>);

impl Handler for Slow {
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {
        let now = lock(&self.0).now();
        lock(&self.0).advance(now + 600 * MS);
        self.1.set(self.1.get() + 1);
    }
}

/// A program that sends ten large messages, and then closes.
struct Sender(Rc<Cell<u32>>);

impl Handler for Sender {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        (0..10).for_each(|_| assert!(cx.send(conn, &[7; 400_000]).is_ok(), "no room"));
        cx.close(conn);
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, _: ConnectionId, _: SendId, outcome: Outcome) {
        self.0.set(self.0.get() + u32::from(outcome.is_sent()));
    }
}

#[test]
fn a_closed_connection_has_its_time_for_each_message() {
    let fabric = network(2);
    let (taken, sent) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let mut server = reactor(0, &fabric, Config::default());
    let address = ([10, 0, 0, 1], 7471).into();
    server.context().listen(address).expect("listening");
    // The close timeout is long enough for one message, but not for all ten. So this timeout must begin again with each message.
    let mut client = reactor(1, &fabric, Config::default().timeouts(|t| t.close = Duration::from_secs(1)));
    client.context().connect(address).expect("connecting");
    let slow = Slow(Arc::clone(&fabric), Rc::clone(&taken));
    let mut nodes = [Node::new(server, Box::new(slow)), Node::new(client, Box::new(Sender(Rc::clone(&sent))))];
    until(&fabric, &mut nodes, "the end", |nodes| {
        let stats = nodes[1].reactor.stats().connections;
        stats.disconnected > 0
    });
    assert_eq!((sent.get(), taken.get()), (10, 10));
}

/// Some devices, such as siw, may still write a peer's data after the access right of the peer was revoked. On such a device, memory that
/// peers could write is not lent to the program even after the revoke: the program must copy the data. Memory that peers could only read is
/// lent after the revoke.
#[test]
fn memory_that_peers_may_write_late_is_not_lent_again() {
    for late in [false, true] {
        let limits = |capabilities: &mut Capabilities| {
            if late {
                capabilities.features |= Features::LATE_PLACEMENT;
            }
        };
        let mut reactor = Forward::recording(Config::default(), limits, &Record::default());
        for (access, lent) in
            [(Access::REMOTE_WRITE, !late), (Access::REMOTE_ATOMIC, !late), (Access::REMOTE_READ, true)]
        {
            let options = RegionOptions::new().allow(access).any_peer();
            let mut region =
                reactor.context().regions().register_at([127, 0, 0, 1].into(), 64, &options).expect("a region");
            assert!(region.bytes_mut().is_none(), "a peer may use it");
            reactor.context().regions().revoke(&region).expect("the device takes keys back");
            let again = (region.bytes().is_some(), region.bytes_mut().is_some());
            assert_eq!(again, (lent, lent), "{access:?}, late: {late}");
            region.copy_from(0, &[7; 64]).expect("nothing is lent");
            let mut copy = [0; 64];
            region.copy_to(0, &mut copy);
            assert_eq!(copy, [7; 64]);
        }
    }
}
