//! Limits on the number of connections and handshakes, and how peers and the log are informed about refusals.

use super::super::*;

/// Row 41 of `docs/reliability.md`. The buffers of all connections never exceed `max_memory`. If another connection would exceed the
/// server's limit, the server rejects it and gives as reason that it is busy. If it would exceed the client's limit, the connect fails with
/// an error that names the limit. Existing connections continue. When one of them has ended, another connection is accepted.
#[test]
fn connections_past_max_memory_are_refused() {
    const MEMORY: usize = 1 << 20;
    // In the first run the server has the limit, and in the second run the client has it.
    for limited in 0..2 {
        let (fabric, attempts) = (network(2), Attempts::default());
        let small = config().buffer_size(4 << 10).receive_depth(32).send_depth(32);
        let config = |node: usize| if node == limited { small.clone().max_memory(MEMORY) } else { small.clone() };
        let mut nodes = [
            Node::new(reactor(0, &fabric, config(0)), Box::<Attempts>::default()),
            Node::new(reactor(1, &fabric, config(1)), Box::new(attempts.clone())),
        ];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        let over = |nodes: &mut [Node; 2], opened: usize| {
            nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
            until(&fabric, nodes, "an answer", |nodes| {
                let buffers = nodes[limited].reactor.stats().memory.pool_buffers;
                assert!(buffers * (4 << 10) <= MEMORY, "{buffers} buffers");
                attempts.up.borrow().len() + attempts.errors.borrow().len() == opened
            });
        };
        for opened in 1..=10 {
            over(&mut nodes, opened);
        }
        let fit = attempts.up.borrow().len();
        assert!((2..=4).contains(&fit), "{fit} connections of 66 buffers each");
        assert!(nodes[limited].reactor.stats().memory.pool_buffers >= 66 * fit, "all of them have their buffers");
        for error in attempts.errors.borrow().iter() {
            let told = match error {
                ConnectError::Rejected { reason, .. } => limited == 0 && *reason == RejectReason::Busy,
                ConnectError::Limit { limit, value } => {
                    limited == 1 && *limit == "max_memory" && *value == MEMORY as u64
                }
                _ => false,
            };
            assert!(told, "{error:?}");
        }
        let first = attempts.up.borrow()[0];
        nodes[1].reactor.context().close(first);
        until(&fabric, &mut nodes, "an end", |nodes| {
            nodes.iter().all(|node| node.reactor.stats().connections.current == fit - 1)
        });
        over(&mut nodes, 11);
        assert_eq!(attempts.up.borrow().len(), fit + 1, "another one fits");
    }
}

/// Lets one host open idle connections to a server until the server refuses them. Then 30 other
/// hosts connect, and one of them opens as many connections as it can. Checks that all 30 are
/// served, and that no connection is evicted. Returns the number of idle connections.
fn beside_idle(server: Config, tries: usize) -> usize {
    const AT_A_TIME: usize = 200;
    let (fabric, idle) = (network(32), Attempts::default());
    let many = Config::small().max_connections(tries as u32).max_memory(1 << 30);
    let mut nodes = vec![
        Node::new(reactor(0, &fabric, server), Box::<Attempts>::default()),
        Node::new(reactor(1, &fabric, many), Box::new(idle.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let answered = |attempts: &Attempts| attempts.up.borrow().len() + attempts.errors.borrow().len();
    let connect = |nodes: &mut [Node], node: usize, count: usize, attempts: &Attempts| {
        let before = answered(attempts);
        (0..count).for_each(|_| _ = nodes[node].reactor.context().connect(address(0, 7471)).expect("connecting"));
        until(&fabric, nodes, "the answers", |_| answered(attempts) == before + count);
    };
    for opened in (0..tries).step_by(AT_A_TIME) {
        connect(&mut nodes, 1, AT_A_TIME.min(tries - opened), &idle);
    }
    let held = idle.up.borrow().len();
    for node in 2..32 {
        let newcomer = Attempts::default();
        nodes.push(Node::new(reactor(node, &fabric, Config::small()), Box::new(newcomer.clone())));
        connect(&mut nodes, node, 1, &newcomer);
        assert_eq!(newcomer.up.borrow().len(), 1, "newcomer {node} beside {held}: {:?}", newcomer.errors);
        if node == 31 {
            connect(&mut nodes, node, 40, &newcomer);
            // The server permits this host 20 connections. The client's own limit is 64.
            assert_eq!(newcomer.up.borrow().len(), 20);
        }
    }
    connect(&mut nodes, 1, 1, &idle);
    let busy = ConnectError::Rejected { reason: RejectReason::Busy, private_data: Vec::new() };
    assert!(idle.errors.borrow().iter().all(|error| *error == busy), "{:?}", idle.errors);
    let stats = nodes[0].reactor.stats().connections;
    assert_eq!((idle.up.borrow().len(), stats.current, stats.evicted), (held, held + 30 + 19, 0));
    held
}

/// One host with idle connections cannot use up a server, whichever limit it reaches. It gets three
/// quarters of the slots, and the others are for hosts with few connections. The first row of the
/// table has the default limits of a server.
#[test]
fn idle_connections_of_one_host_leave_slots_for_others() {
    let fair = |config: Config| config.max_connections_per_host(20);
    let small = fair(Config::small().max_memory(64 << 20).max_pending(1_024)).completions(|c| c.queue = Some(4_096));
    for (server, tries, limit) in [
        (fair(Config::default()), 4_200, 4_001),
        (small.clone().max_connections(400), 420, 400),
        (small.max_connections(10_000).shared_receives(Some(2_400)), 440, 420),
    ] {
        assert_eq!(beside_idle(server, tries), limit - limit / 4);
    }
}

/// One host may have all connections of a server, if the program sets `max_connections_per_host` to
/// their number.
#[test]
fn a_proxy_may_have_all_connections() {
    let (fabric, proxied) = (network(2), Attempts::default());
    let server = config().max_connections(100).max_connections_per_host(100);
    let mut nodes = [
        Node::new(reactor(0, &fabric, server), Box::<Attempts>::default()),
        Node::new(reactor(1, &fabric, config()), Box::new(proxied.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    (0..100).for_each(|_| _ = nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting"));
    until(&fabric, &mut nodes, "all are up", |_| proxied.up.borrow().len() == 100);
}

/// Runs the nodes for `time` of virtual time, in ns.
fn pass(fabric: &Shared, nodes: &mut [Node], time: u64) {
    let end = lock(fabric).now() + time;
    lock(fabric).schedule(end, Script::Tick);
    until(fabric, nodes, "time passes", |_| lock(fabric).now() >= end);
}

/// A connect request that is cancelled immediately counts towards `max_pending` until the reactor
/// has released its state. So cancelled requests cannot cause more connections and buffers than
/// this limit allows. `TAKEN_BACK` sets the number of requests (default: 400,000; `make soak` sends
/// more). A server gets at most 24,000 requests, and the next ones go to a new server on a new
/// network, because a simulated network has only about 45,000 ports. Each server handles few
/// completions per turn, so that requests pile up. A server refuses about the same number of
/// requests in each round, however many arrive, so the rounds of all servers are between 300 and
/// 436 requests.
#[test]
fn requests_that_are_taken_back_count_until_they_are_gone() {
    const EACH: usize = 24_000;
    let all = std::env::var("TAKEN_BACK").map_or(400_000, |text| text.parse().expect("TAKEN_BACK=N"));
    for nth in 0..usize::div_ceil(all, EACH) {
        take_back(EACH.min(all - nth * EACH), 300 + 8 * (nth % 18));
    }
}

/// Sends `requests` connect requests to a new server, `at_a_time` of them together, and cancels each. Then checks that an honest client can
/// connect.
fn take_back(requests: usize, at_a_time: usize) {
    /// The number of buffers of one connection: 64 receives, 64 sends, and two for messages of the reactor.
    const BUFFERS: usize = 64 + 64 + 2;
    /// The value of `max_pending`. It is small, because a server that accepts 8 requests per turn ends connections nearly as fast.
    const SLOTS: usize = 128;
    let (fabric, attempts) = (network(3), Attempts::default());
    let scarce = config().max_pending(SLOTS as u32).completions(|c| c.per_turn = 8);
    let mut nodes = [
        Node::new(reactor(0, &fabric, scarce), Box::<Attempts>::default()),
        Node::new(reactor(1, &fabric, config()), Box::new(attempts.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let mut sockets: Vec<_> = (0..at_a_time).map(|_| Hostile::new(&fabric)).collect();
    let frame = startup_frame(&greeting(WINDOW));
    let mut most = 0;
    for round in 0..requests.div_ceil(at_a_time) {
        // Advances the virtual time without a turn of the server. So the server's next turn finds all events that occurred meanwhile.
        let wait = |time: u64| {
            let until = lock(&fabric).now() + time;
            lock(&fabric).advance(until);
        };
        sockets.iter_mut().for_each(|socket| socket.open(address(0, 7471)));
        wait(MS);
        sockets.iter_mut().for_each(|socket| socket.send(frame.clone()));
        wait(MS);
        if round % 2 == 0 {
            // The server runs some turns first, so that it has accepted or refused many of the requests before they are cancelled. It never
            // receives the others.
            for _ in 0..30 {
                step(&fabric, &mut nodes).expect("a turn");
            }
        }
        sockets.iter_mut().for_each(|socket| socket.close(round % 3 > 0));
        wait(MS);
        for _ in 0..=round % 2 {
            step(&fabric, &mut nodes).expect("a turn");
            let stats = nodes[0].reactor.stats();
            let (current, buffers) = (stats.connections.current, stats.memory.pool_buffers);
            most = most.max(current);
            assert!(current <= SLOTS, "{current} connections in round {round}");
            assert!(buffers <= 2 * SLOTS * BUFFERS, "{buffers} buffers in round {round}");
        }
    }
    let stats = nodes[0].reactor.stats().connections;
    println!("{requests} requests, {at_a_time} at a time: {most} connections, {} refused", stats.refused);
    assert!(most > SLOTS * 3 / 4 && stats.refused as usize > requests / 4 && stats.connected == 0, "{stats:?}");
    pass(&fabric, &mut nodes, 60_000 * MS);
    let stats = nodes[0].reactor.stats();
    assert_eq!(stats.connections.current, 0, "a minute later");
    assert!(stats.memory.pool_buffers <= 2 * BUFFERS, "a minute later: {:?}", stats.memory);
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "an honest client is up", |_| attempts.up.borrow().len() == 1);
}

/// Peers that connect and send a valid request, and then stay silent.
struct Silent {
    fabric: Shared,
    request: Vec<u8>,
    /// The peers that have connected and will send their request at the next call of `ask`.
    asking: Vec<Hostile>,
    /// The peers that have sent their request, oldest first, with the time of the request.
    held: VecDeque<(u64, Hostile)>,
    /// The disconnected peers. They are kept, because dropping one would close all sockets of its node.
    gone: Vec<Hostile>,
}

impl Silent {
    fn new(fabric: &Shared, mode: SecurityMode) -> Self {
        let mut greeting = greeting(WINDOW);
        greeting[7] = (mode as u8) << 4;
        let (asking, held, gone) = Default::default();
        Self { fabric: fabric.clone(), request: startup_frame(&greeting), asking, held, gone }
    }

    /// Connects another peer from `node`. The peer sends its request at the next call of `ask`.
    fn connect(&mut self, node: usize) {
        let mut socket = Hostile::at(node, &self.fabric);
        socket.open(address(0, 7471));
        self.asking.push(socket);
    }

    fn ask(&mut self) {
        let now = lock(&self.fabric).now();
        for mut socket in self.asking.drain(..) {
            socket.send(self.request.clone());
            self.held.push_back((now, socket));
        }
    }

    /// Disconnects the peers that sent their request at least `time` ago.
    fn go_after(&mut self, time: u64) {
        let now = lock(&self.fabric).now();
        while self.held.front().is_some_and(|(since, _)| since + time <= now) {
            let (_, mut socket) = self.held.pop_front().expect("there are some");
            socket.close(true);
            self.gone.push(socket);
        }
    }
}

/// Returns a server on node 0, a client on node 1, and the record of the client's connects.
fn secured_pair(fabric: &Shared, mode: SecurityMode) -> ([Node; 2], Attempts) {
    let attempts = Attempts::default();
    let server = Config::default().buffer_size(512).receive_depth(16).send_depth(8).security(security(mode));
    let client = Config::default().security(security(mode));
    let mut nodes = [
        Node::new(reactor(0, fabric, server), Box::<Attempts>::default()),
        Node::new(reactor(1, fabric, client), Box::new(attempts.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    (nodes, attempts)
}

/// The default of `max_pending`: the largest number of connections that are not established.
const PLACES: usize = 1024;

/// Lets silent peers connect from `hosts` hosts, `per_second` connections per second in total. Meanwhile honest clients connect from
/// another host, ten per second. If `hosts` is 0, the silent peers connect from the host of the honest clients. Returns the percentage of
/// honest clients that succeed.
fn beside_silent_newcomers(mode: SecurityMode, per_second: u64, hosts: usize) -> u64 {
    const SECONDS: u64 = 7;
    let fabric = network(2 + hosts);
    let ((mut nodes, attempts), mut silent) = (secured_pair(&fabric, mode), Silent::new(&fabric, mode));
    let (mut opened, mut tried, mut most) = (0, 0, 0);
    for ms in 0..SECONDS * 1000 {
        silent.ask();
        while opened * 1000 < ms * per_second {
            silent.connect((opened as usize).checked_rem(hosts).map_or(1, |nth| 2 + nth));
            opened += 1;
        }
        // The silent peers stay for longer than the server allows (5 s).
        silent.go_after(6000 * MS);
        if matches!(ms % 100, 0) {
            let mut cx = nodes[1].reactor.context();
            attempts.up.borrow_mut().drain(..).for_each(|id| cx.close(id));
            cx.connect(address(0, 7471)).expect("connecting");
            tried += 1;
        }
        pass(&fabric, &mut nodes, MS);
        most = most.max(nodes[0].reactor.stats().connections.current);
    }
    let stats = nodes[0].reactor.stats().connections;
    let up = 100 * stats.connected / tried;
    println!("{mode:?}, {per_second} a second from {hosts} hosts: {up} % are up, {most} connections, {stats:?}");
    assert!(most <= PLACES + 3, "{most} connections");
    up
}

/// Silent connections keep out at most one in ten honest clients, whether the silent connections come from one host, from many hosts, or
/// from the host of the honest clients. With 1,024 slots and 5 s per silent connection, 205 silent connections per second fill all slots.
/// The tested rates are higher.
#[test]
fn silent_newcomers_keep_nobody_out() {
    for mode in [SecurityMode::Plain, SecurityMode::Tls, SecurityMode::Psk] {
        for (per_second, hosts) in [(240, 0), (1_000, 0), (240, 1), (1_000, 1), (240, 64), (1_000, 64), (1_000, 200)] {
            let up = beside_silent_newcomers(mode, per_second, hosts);
            assert!(up >= 90, "{mode:?}, {per_second} a second from {hosts} hosts: {up} % are up");
        }
    }
}

/// Silent peers of one host try to hold more connections than the server has slots. Each stays for 5 s, and each slot that becomes free is
/// occupied again. Honest clients of the same host can still connect: for each honest client, the server evicts a silent connection.
#[test]
fn a_host_that_holds_all_places_lets_its_own_clients_in() {
    const HELD: usize = 1_100;
    for (mode, places) in
        [(SecurityMode::Plain, PLACES), (SecurityMode::Tls, PLACES / 2), (SecurityMode::Psk, PLACES / 2)]
    {
        let fabric = network(2);
        let ((mut nodes, attempts), mut silent) = (secured_pair(&fabric, mode), Silent::new(&fabric, mode));
        let mut tried = 0;
        for ms in 0..9_000 {
            silent.ask();
            silent.go_after(5_000 * MS);
            let up = attempts.up.borrow().len();
            let free = places.saturating_sub(nodes[0].reactor.stats().connections.current - up);
            let wanted = if ms < 50 { HELD - silent.held.len() } else { free };
            (0..wanted.min(64)).for_each(|_| silent.connect(1));
            if ms % 400 == 399 {
                nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
                tried += 1;
            }
            pass(&fabric, &mut nodes, MS);
        }
        assert_eq!((attempts.up.borrow().len(), attempts.errors.borrow().as_slice()), (tried, &[][..]), "{mode:?}");
        let stats = nodes[0].reactor.stats().connections;
        assert!(stats.current >= places && stats.evicted >= tried as u64, "{mode:?}: {stats:?}");
    }
}

/// Maps the addresses of the nodes 2 and 3 into one IPv6 network of 64 bits, and all others into another one.
fn on_two_networks(peer: SocketAddr) -> SocketAddr {
    let IpAddr::V4(v4) = peer.ip() else { return peer };
    let node = u16::from(v4.octets()[3]) - 1;
    let network = if matches!(node, 2 | 3) { 1 } else { 2 };
    SocketAddr::from((Ipv6Addr::new(0x2001, 0xdb8, 0, network, node, node, node, node), peer.port()))
}

/// IPv6 addresses with the same first 64 bits count as one host, so they share one limit on unfinished handshakes.
#[test]
fn addresses_of_one_network_share_its_handshakes() {
    const SHARE: usize = 8;
    let (fabric, attempts) = (network(4), Attempts::default());
    let config = || config().security(security(SecurityMode::Psk));
    let inner = parts(0, &fabric);
    let provider = |inner| Forward::gated(inner, Gate::default()).seen_as(on_two_networks);
    let providers = inner.providers.into_iter().map(|inner| Box::new(provider(inner)) as _).collect();
    let server = config().max_handshakes_per_peer(Some(SHARE));
    let mut nodes = [
        Node::new(
            Reactor::with_parts(server, Parts { providers, ..inner }).expect("settings in range"),
            Box::<Attempts>::default(),
        ),
        Node::new(reactor(1, &fabric, config()), Box::new(attempts.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let mut silent = Silent::new(&fabric, SecurityMode::Psk);
    for nth in 0..=SHARE {
        silent.connect(2 + nth % 2);
        pass(&fabric, &mut nodes, MS);
        silent.ask();
        pass(&fabric, &mut nodes, MS);
        let stats = nodes[0].reactor.stats().connections;
        assert_eq!((stats.current, stats.refused), (SHARE.min(nth + 1), (nth / SHARE) as u64), "{nth}: {stats:?}");
    }
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "a client of another network is up", |_| attempts.up.borrow().len() == 1);
}

/// Two thousand clients of one host connect at the same time, and all of them send their first message. At least as many connections are
/// established as the server has slots, and no connection is evicted.
#[test]
fn a_burst_of_one_host_is_served() {
    const CLIENTS: usize = 2_000;
    let (fabric, attempts) = (network(2), Attempts::default());
    let small = Config::default().buffer_size(512).receive_depth(16).send_depth(8);
    let mut nodes = [
        Node::new(reactor(0, &fabric, small.clone()), Box::<Attempts>::default()),
        Node::new(reactor(1, &fabric, small), Box::new(attempts.clone())),
    ];
    let many = ListenOptions::new().backlog(4096);
    nodes[0].reactor.context().listen_with(address(0, 7471), many).expect("a free port");
    for _ in 0..CLIENTS {
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    }
    until(&fabric, &mut nodes, "an answer to each", |_| {
        attempts.up.borrow().len() + attempts.errors.borrow().len() == CLIENTS
    });
    pass(&fabric, &mut nodes, 100 * MS);
    let stats = nodes[0].reactor.stats().connections;
    assert_eq!((stats.evicted, stats.connected), (0, attempts.up.borrow().len() as u64), "{stats:?}");
    assert!(stats.connected >= 1024, "{stats:?}");
}

/// A program that counts the connect requests of each turn.
#[derive(Clone, Default)]
struct CountsPerTurn(Rc<RefCell<BTreeMap<u64, usize>>>);

impl Handler for CountsPerTurn {
    fn on_connect_request(&mut self, cx: &mut Context<'_>, _: ConnectRequest<'_>) -> Decision {
        *self.0.borrow_mut().entry(cx.stats().turns.taken).or_default() += 1;
        Decision::Accept
    }
}

/// Requests that arrive together are handled in several turns, so that the messages of other connections do not wait for all of them.
#[test]
fn a_turn_has_few_connect_requests() {
    const CLIENTS: usize = 200;
    let (fabric, counts, attempts) = (network(2), CountsPerTurn::default(), Attempts::default());
    let mut nodes = [
        Node::new(reactor(0, &fabric, config()), Box::new(counts.clone())),
        Node::new(reactor(1, &fabric, config()), Box::new(attempts.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    for _ in 0..CLIENTS {
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    }
    until(&fabric, &mut nodes, "all are up", |_| attempts.up.borrow().len() == CLIENTS);
    let counts = counts.0.borrow();
    assert_eq!((counts.values().sum::<usize>(), counts.values().max()), (CLIENTS, Some(&8)), "{counts:?}");
}

/// A program that takes some virtual time to decide about each connect request.
struct Ponders(Shared, u64);

impl Handler for Ponders {
    fn on_connect_request(&mut self, _: &mut Context<'_>, _: ConnectRequest<'_>) -> Decision {
        let now = lock(&self.0).now();
        lock(&self.0).advance(now + self.1);
        Decision::Accept
    }
}

/// Row 16 of `docs/reliability.md`. Peers give up before the program has decided about their requests. The requests are counted as refused,
/// and leave no state. A program that decides quickly still accepts.
#[test]
fn undecided_requests_are_counted() {
    const CLIENTS: u64 = 5;
    let (fabric, attempts) = (network(2), Attempts::default());
    let hasty = config()
        .timeouts(|t| t.connect = Duration::from_millis(100))
        .timeouts(|t| t.handshake = Duration::from_millis(100));
    let mut nodes = [
        Node::new(reactor(0, &fabric, hasty.clone()), Box::new(Ponders(fabric.clone(), 30_000 * MS))),
        Node::new(reactor(1, &fabric, hasty), Box::new(attempts.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    for _ in 0..CLIENTS {
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    }
    until(&fabric, &mut nodes, "the ends", |nodes| {
        attempts.errors.borrow().len() as u64 == CLIENTS && nodes[0].reactor.stats().connections.refused == CLIENTS
    });
    assert!(attempts.errors.borrow().iter().all(|error| *error == ConnectError::Timeout), "{:?}", attempts.errors);
    let stats = nodes[0].reactor.stats().connections;
    assert_eq!((stats.connected, stats.current), (0, 0), "{stats:?}");
    let (all, free) = nodes[0].reactor.pool_levels();
    assert_eq!(all, free);
    nodes[0].handler = Box::new(Ponders(fabric.clone(), MS));
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "it is up", |_| attempts.up.borrow().len() == 1);
}

/// If a request arrives while the reactor drains, the reason of the reject is that the reactor is
/// draining, and not that it is busy.
#[test]
fn a_draining_reactor_says_so() {
    let (fabric, first, late) = (network(3), Attempts::default(), Attempts::default());
    let mut nodes = [
        Node::new(reactor(0, &fabric, config()), Box::<Attempts>::default()),
        Node::new(reactor(1, &fabric, config()), Box::new(first.clone())),
        Node::new(reactor(2, &fabric, config()), Box::new(late.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "it is up", |_| first.up.borrow().len() == 1);
    assert!(!nodes[0].reactor.is_draining());
    nodes[0].dead = true;
    nodes[2].reactor.context().connect(address(0, 7471)).expect("connecting");
    pass(&fabric, &mut nodes, MS);
    nodes[0].reactor.context().drain(Duration::from_secs(1));
    assert!(nodes[0].reactor.is_draining() && !nodes[0].reactor.is_drained());
    nodes[0].dead = false;
    until(&fabric, &mut nodes, "an answer", |_| !late.errors.borrow().is_empty());
    let error = late.errors.borrow()[0].clone();
    assert_eq!(error, ConnectError::Rejected { reason: RejectReason::Draining, private_data: Vec::new() });
    assert_eq!(error.to_string(), "rejected: the peer is shutting down");
    until(&fabric, &mut nodes, "it is drained", |nodes| nodes[0].reactor.is_drained());
    assert!(nodes[0].reactor.is_draining());
}

/// A program that publishes 500 messages to each subscriber, and then closes the subscriber's connection.
struct Publisher {
    left: BTreeMap<ConnectionId, usize>,
    ends: Rc<RefCell<Vec<(ConnectionId, DisconnectReason)>>>,
}

impl Handler for Publisher {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.left.insert(conn, 500);
        self.on_writable(cx, conn);
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let Some(left) = self.left.get_mut(&conn) else { return };
        while *left > 0 && cx.send(conn, &[7; 100]).is_ok() {
            *left -= 1;
        }
        if *left == 0 {
            cx.close(conn);
        }
    }
    fn on_drain(&mut self, _: &mut Context<'_>, _: Duration) {}
    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.ends.borrow_mut().push((conn, reason));
    }
}

/// A program that counts received messages. If `keeps` is true, the program also keeps them, so that it grants no credits.
#[derive(Default)]
struct Subscriber {
    keeps: Option<Vec<DetachedMessage>>,
    got: Rc<Cell<usize>>,
    end: Rc<RefCell<Option<DisconnectReason>>>,
}

impl Handler for Subscriber {
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.got.set(self.got.get() + 1);
        if let Some(kept) = &mut self.keeps {
            kept.push(message.detach());
        }
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        *self.end.borrow_mut() = Some(reason);
    }
}

/// When a server is drained, the reasons of its disconnects distinguish the peer that got all messages from the peer that was aborted at
/// the deadline, even with `quiet_sends`. The reasons that the two peers get differ as well.
#[test]
fn a_server_knows_whom_it_has_cut_off() {
    for quiet in [false, true] {
        let (fabric, ends) = (network(3), Rc::<RefCell<Vec<_>>>::default());
        let publisher = Publisher { left: BTreeMap::new(), ends: Rc::clone(&ends) };
        let served = Subscriber::default();
        let slow = Subscriber { keeps: Some(Vec::new()), ..Subscriber::default() };
        let (got, told) = (Rc::clone(&served.got), [Rc::clone(&served.end), Rc::clone(&slow.end)]);
        let mut nodes = [
            Node::new(reactor(0, &fabric, config().quiet_sends(quiet)), Box::new(publisher)),
            Node::new(reactor(1, &fabric, config()), Box::new(served)),
            Node::new(reactor(2, &fabric, config()), Box::new(slow)),
        ];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        for node in &mut nodes[1..] {
            node.reactor.context().connect(address(0, 7471)).expect("connecting");
        }
        until(&fabric, &mut nodes, "one is served", |_| ends.borrow().len() == 1);
        nodes[0].reactor.context().drain(Duration::from_millis(100));
        nodes[0].more = true;
        until(&fabric, &mut nodes, "both know", |nodes| {
            nodes[0].reactor.is_drained() && told.iter().all(|told| told.borrow().is_some())
        });
        let complete: Vec<_> = ends.borrow().iter().map(|(_, reason)| reason.clone()).collect();
        let expected = [true, false].map(|complete| DisconnectReason::Local { complete });
        assert_eq!(complete, expected, "quiet: {quiet}");
        assert_eq!(nodes[0].reactor.stats().connections.cut_off, 1);
        assert_eq!(got.get(), 500);
        let told = told.map(|told| told.borrow_mut().take());
        assert_eq!(told, [Some(DisconnectReason::Closed), Some(DisconnectReason::Lost)]);
    }
}

/// A logger that keeps the warnings about peers, each with the name of the thread that wrote it.
struct Warnings(Mutex<Vec<(String, String)>>);

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        const TARGETS: [&str; 3] = ["rdma_reactor::conn::", "rdma_reactor::api::", "rdma_transport_embedded::iwarp::"];
        metadata.level() <= log::Level::Warn && TARGETS.iter().any(|target| metadata.target().starts_with(target))
    }
    fn log(&self, record: &log::Record<'_>) {
        #[allow(clippy::disallowed_methods, reason = "a thread with a name tells whose lines they are")]
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        if self.enabled(record.metadata()) {
            self.0.lock().expect("nobody panics here").push((thread, record.args().to_string()));
        }
    }
    fn flush(&self) {}
}

static WARNINGS: Warnings = Warnings(Mutex::new(Vec::new()));

impl Warnings {
    fn begin() {
        static BEGUN: Once = Once::new();
        BEGUN.call_once(|| log::set_logger(&WARNINGS).expect("the first logger"));
        log::set_max_level(log::LevelFilter::Warn);
    }

    /// Removes and returns the lines whose thread has a name that ends with `test`.
    fn of(test: &str) -> Vec<String> {
        let mut lines = WARNINGS.0.lock().expect("nobody panics here");
        let (own, others) = lines.drain(..).partition(|(thread, _)| thread.ends_with(test));
        *lines = others;
        own.into_iter().map(|(_, line)| line).collect()
    }
}

/// The limit on log lines per host counts only lines that are logged. In this test, a host causes some lines of a level that is not logged,
/// and then a warning. The warning is logged, and does not say that lines were left out.
#[test]
fn lines_that_nobody_sees_are_not_counted() {
    Warnings::begin();
    let (fabric, attempts) = (network(2), Attempts::default());
    let mode = SecurityMode::Psk;
    let mut nodes = [
        Node::new(reactor(0, &fabric, config()), Box::<Attempts>::default()),
        Node::new(reactor(1, &fabric, config().security(stranger(mode))), Box::new(attempts.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let secured = ListenOptions::new().security(security(mode));
    nodes[0].reactor.context().listen_with(address(0, 7472), secured).expect("a free port");
    let mut silent = Silent::new(&fabric, SecurityMode::Plain);
    (0..3).for_each(|_| silent.connect(1));
    pass(&fabric, &mut nodes, MS);
    silent.ask();
    until(&fabric, &mut nodes, "nobody says hello", |nodes| nodes[0].reactor.stats().connections.refused == 3);
    nodes[1].reactor.context().connect(address(0, 7472)).expect("connecting");
    until(&fabric, &mut nodes, "an answer", |_| !attempts.errors.borrow().is_empty());
    let lines = Warnings::of("lines_that_nobody_sees_are_not_counted");
    assert!(
        matches!(lines.as_slice(), [line] if line.contains("keys differ") && !line.contains("left out")),
        "{lines:#?}"
    );
}

/// The server logs refused peers with their addresses, but only once in a while for each host.
#[test]
fn failed_handshakes_are_logged_once_in_a_while() {
    Warnings::begin();
    for mode in [SecurityMode::Psk, SecurityMode::Tls] {
        let (fabric, attempts) = (network(3), Attempts::default());
        let settings = |node| if node == 0 { security(mode) } else { stranger(mode) };
        let program = |node| if node == 0 { Attempts::default() } else { attempts.clone() };
        let mut nodes: Vec<_> = (0..3)
            .map(|node| Node::new(reactor(node, &fabric, config().security(settings(node))), Box::new(program(node))))
            .collect();
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        let fail = |nodes: &mut [Node], times: usize| {
            for nth in 0..times {
                let tried = attempts.errors.borrow().len() + attempts.up.borrow().len();
                nodes[1 + nth % 2].reactor.context().connect(address(0, 7471)).expect("connecting");
                until(&fabric, nodes, "an answer", |_| {
                    attempts.errors.borrow().len() + attempts.up.borrow().len() > tried
                });
                pass(&fabric, nodes, 10 * MS);
            }
        };
        fail(&mut nodes, 40);
        pass(&fabric, &mut nodes, 10_000 * MS);
        fail(&mut nodes, 1);
        let lines = Warnings::of("failed_handshakes_are_logged_once_in_a_while");
        assert_eq!(lines.len(), 3, "{mode:?}: {lines:#?}");
        for (line, host) in lines.iter().zip([1, 2, 1]) {
            assert!(line.contains(&address(host, 0).ip().to_string()), "{mode:?}: {line}");
        }
        assert!(lines[2].ends_with("(38 lines about peers were left out before this one)"), "{mode:?}: {}", lines[2]);
        assert_eq!(nodes[0].reactor.stats().connections.refused, 41);
    }
}

/// A program with calls.
struct Service(Calls);

impl Handler for Service {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        _ = self.0.on_recv(cx, conn, message);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.0.on_disconnect(conn, &reason);
    }
}

/// A program that sends one byte on each connection, which is no frame of a call.
struct SendsAByte;

impl Handler for SendsAByte {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        cx.send(conn, b"x").expect("room");
    }
}

/// A host that the provider refuses 1,000 times, and whose connections `Calls` ends 200 times,
/// causes one log line of each kind in 10 s.
#[test]
fn a_host_that_fails_often_is_a_few_lines() {
    Warnings::begin();
    let fabric = network(2);
    let mut without_markers = IwarpConfig::default();
    without_markers.markers = false;
    let provider = Iwarp::new(without_markers, SimNet::new(0, fabric.clone()), entropy(0)).expect("settings in range");
    let parts = Parts { providers: vec![Box::new(provider)], ..parts(0, &fabric) };
    let server = Reactor::with_parts(config(), parts).expect("settings in range");
    let mut nodes = [
        Node::new(server, Box::new(Service(Calls::new()))),
        Node::new(reactor(1, &fabric, config()), Box::new(SendsAByte)),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let (mut sockets, begun) = (Vec::new(), lock(&fabric).now());
    for nth in 0..1_000 {
        let mut socket = Hostile::at(1, &fabric);
        socket.open(address(0, 7471));
        pass(&fabric, &mut nodes, MS);
        // Bit 0x80 of the byte after the key: the peer requires markers.
        socket.send(b"MPA ID Req Frame\x80\x01\x00\x00".to_vec());
        sockets.push(socket);
        if nth % 5 == 0 {
            nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        }
        pass(&fabric, &mut nodes, MS);
    }
    until(&fabric, &mut nodes, "the ends", |nodes| nodes[0].reactor.stats().connections.connected == 200);
    pass(&fabric, &mut nodes, 100 * MS);
    let took = lock(&fabric).now() - begun;
    assert!(took < 9_000 * MS, "{took} ns");
    let lines = Warnings::of("a_host_that_fails_often_is_a_few_lines");
    assert!(
        matches!(&lines[..], [markers, call] if markers.contains("markers") && call.contains("not a frame of a call")),
        "{lines:#?}"
    );
    pass(&fabric, &mut nodes, 10_000 * MS);
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    pass(&fabric, &mut nodes, 100 * MS);
    let lines = Warnings::of("a_host_that_fails_often_is_a_few_lines");
    assert!(
        matches!(&lines[..], [call] if call.ends_with("(199 lines about peers were left out before this one)")),
        "{lines:#?}"
    );
}

/// A program that keeps all messages.
struct Keeper(Rc<RefCell<VecDeque<DetachedMessage>>>);

impl Handler for Keeper {
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.0.borrow_mut().push_back(message.detach());
    }
}

/// If a program keeps all messages of a peer, the peer can send no more. After
/// `Timeouts::transfer`, one log line reports that. If the program releases a message now and then,
/// no line is logged, although the program holds all receives most of the time.
#[test]
fn a_program_that_keeps_all_receives_is_told() {
    Warnings::begin();
    for shared in [None, Some(256)] {
        let (fabric, kept) = (network(2), Rc::<RefCell<VecDeque<_>>>::default());
        let publisher = Publisher { left: BTreeMap::new(), ends: Rc::default() };
        let keeps = config().shared_receives(shared).timeouts(|t| t.transfer = Duration::from_secs(3));
        let mut nodes = [
            Node::new(reactor(0, &fabric, config()), Box::new(publisher)),
            Node::new(reactor(1, &fabric, keeps), Box::new(Keeper(Rc::clone(&kept)))),
        ];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        let lines = || Warnings::of("a_program_that_keeps_all_receives_is_told");
        for _ in 0..10 {
            pass(&fabric, &mut nodes, 1_000 * MS);
            kept.borrow_mut().pop_front();
            nodes[1].more = true;
        }
        pass(&fabric, &mut nodes, 2_000 * MS);
        assert_eq!(lines(), Vec::<String>::new());
        pass(&fabric, &mut nodes, 20_000 * MS);
        let (number, lines) = (kept.borrow().len(), lines());
        assert!(
            shared.is_some() || number == 61,
            "{number} of 64 receives, of which three are kept for control messages"
        );
        let text = format!("can send nothing: the program has kept {number} messages, which are all, for 3s");
        assert!(matches!(&lines[..], [line] if line.ends_with(&text)), "{shared:?}, {number}: {lines:#?}");
        let held = |nodes: &[Node]| nodes[1].reactor.stats().memory.held_receives;
        assert_eq!(held(&nodes), number);
        kept.borrow_mut().clear();
        nodes[1].more = true;
        pass(&fabric, &mut nodes, MS);
        assert_eq!(held(&nodes), kept.borrow().len());
        let conn = nodes[1].reactor.context().connection_ids().next().expect("it is up");
        nodes[1].reactor.context().abort(conn);
        pass(&fabric, &mut nodes, 100 * MS);
        assert_eq!(held(&nodes), 0, "the others belong to no open connection");
    }
}
