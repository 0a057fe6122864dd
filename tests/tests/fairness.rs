//! A flood on one connection, and messages on another, in virtual time. Nothing here depends on how busy the machine
//! is.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectionId, Context, Handler, Message, Parts, Reactor, Region, RegionOptions, RemoteRegion, SendErrorKind,
};
use rdma_reactor_tests::sim::fabric::{Fabric, Shared, lock};
use rdma_reactor_tests::sim::net::SimNet;
use rdma_reactor_tests::sim::poller::{SimClock, SimPoller, virtual_ns};
use rdma_reactor_tests::sim::rng::Rng;
use rdma_reactor_tests::sim::swarm::{FaultOptions, NetOptions};
use rdma_reactor_tests::sim::tcp::address;
use rdma_reactor_tests::sim::trace::Trace;
use rdma_transport::iwarp::{Iwarp, IwarpConfig};

const PINGS: usize = 400;
/// Time that the server's callback takes, ns.
const WORK: u64 = 1_000;
/// Messages of the flood on their way at once.
const FLOOD: u32 = 2_000;

/// A server that echoes short messages, and works a moment on every message.
struct Server(Shared);

impl Handler for Server {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let mut fabric = lock(&self.0);
        let done = fabric.now() + WORK;
        fabric.advance(done);
        drop(fabric);
        if message.len() == 8 {
            cx.send(conn, &message).expect("an echo has room");
        }
    }
}

/// A client that sends all the time.
struct Flood;

impl Handler for Flood {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.on_writable(cx, conn);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        while !matches!(cx.send(conn, &[7; 64]), Err(SendErrorKind::WouldBlock(_))) {}
    }
}

/// A client with one message at a time, and the times of its echoes.
#[derive(Clone, Default)]
struct Ping(Rc<RefCell<Vec<u64>>>, u64);

impl Handler for Ping {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.1 = virtual_ns(cx.now());
        cx.send(conn, &[0; 8]).expect("room");
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: Message<'_>) {
        let now = virtual_ns(cx.now());
        self.0.borrow_mut().push(now - self.1);
        self.on_connect(cx, conn);
    }
}

fn reactor(node: usize, fabric: &Shared, config: Config) -> Reactor {
    let mut entropy = Rng::new(node as u64, "entropy");
    let net = SimNet::new(node, Arc::clone(fabric));
    let provider = Iwarp::new(IwarpConfig::default(), net, Box::new(move |bytes: &mut [u8]| entropy.fill(bytes)));
    let parts = Parts {
        provider: Box::new(provider.expect("default settings")),
        poller: Box::new(SimPoller::new(node, Arc::clone(fabric))),
        clock: Box::new(SimClock(Arc::clone(fabric))),
    };
    Reactor::with_parts(config, parts).expect("settings in range")
}

/// A reactor, its program, and whether it has more to do.
type Node = (Reactor, Box<dyn Handler>, bool);

/// A network of three nodes on which nothing goes wrong.
fn network() -> Shared {
    let net = NetOptions {
        segment: 1448,
        latency: (20_000, 20_000),
        buffer: 1 << 20,
        short_write: 0,
        interrupted: 0,
        shred: 0,
        spurious: 0,
        poll_cut: 0,
        exhausted: 0,
        lost_connect: 0,
        tick: 100,
    };
    let faults = FaultOptions { every: 0, kinds: Vec::new() };
    Arc::new(Mutex::new(Fabric::new(1, 3, net, faults, Trace::new(0))))
}

/// Runs the nodes until a condition holds of the first one; those in `dead` do nothing.
fn run(fabric: &Shared, nodes: &mut [Node], what: &str, mut done: impl FnMut(&Node) -> bool, dead: &[usize]) {
    for _ in 0..10_000_000 {
        if done(&nodes[0]) {
            return;
        }
        let now = lock(fabric).now();
        let mut idle = true;
        let mut next = lock(fabric).next();
        for (node, (reactor, handler, more)) in nodes.iter_mut().enumerate().filter(|(node, _)| !dead.contains(node)) {
            let due = reactor.next_deadline().map(virtual_ns);
            if *more || lock(fabric).is_runnable(node, true) || due.is_some_and(|due| due <= now) {
                lock(fabric).seen(node);
                *more = reactor.turn(&mut **handler, Duration::ZERO).expect("a turn").more;
                idle = false;
            }
            next = next.into_iter().chain(due).min();
        }
        if idle {
            lock(fabric).advance(next.expect("something is to come"));
        }
    }
    panic!("not in 10,000,000 rounds: {what}");
}

/// Measures the 99th percentile of the echo's time, ns, with or without a flood next to it, and the number of
/// completions that waited.
fn p99(config: &Config, flood: bool) -> (u64, u64) {
    let fabric = network();
    let times = Ping::default();
    let mut nodes: Vec<Node> = vec![
        (reactor(0, &fabric, config.clone()), Box::new(Server(Arc::clone(&fabric))), true),
        (reactor(1, &fabric, config.clone()), Box::new(times.clone()), true),
        (reactor(2, &fabric, config.clone()), Box::new(Flood), true),
    ];
    nodes[0].0.context().listen(address(0, 7471)).expect("a free port");
    for (reactor, ..) in &mut nodes[1..if flood { 3 } else { 2 }] {
        reactor.context().connect(address(0, 7471)).expect("a peer");
    }
    run(&fabric, &mut nodes, "all echoes", |_| times.0.borrow().len() >= PINGS, &[]);
    let mut times = times.0.borrow_mut();
    // Echoes from before the flood was up do not count.
    let times = &mut times[20..];
    times.sort_unstable();
    (times[times.len() * 99 / 100], nodes[0].0.stats().completions.deferred)
}

/// A client that writes nothing to the peer's memory, all the time. It needs no credit and no right for that.
#[derive(Default)]
struct EmptyWrites(Option<Region>);

impl Handler for EmptyWrites {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.0 = Some(cx.register(conn, 8, &RegionOptions::new()).expect("a region"));
        self.on_writable(cx, conn);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let nowhere = RemoteRegion { address: 0, len: 0, key: 0 };
        let local = self.0.as_ref().expect("it is connected");
        while !matches!(cx.write(conn, nowhere, local, 0..0), Err(SendErrorKind::WouldBlock(_))) {}
    }
}

/// The silence of a peer is judged on its own. Work of others, be it messages or writes of nothing, neither delays nor
/// hurries the verdict.
#[test]
fn a_dead_peer_is_given_up_beside_a_flood() {
    const TIMEOUT: Duration = Duration::from_millis(30);
    let config = Config::default().receive_depth(FLOOD).send_depth(FLOOD).buffer_size(256);
    let config = config.keepalive(Duration::from_millis(10), TIMEOUT);
    let floods: [fn() -> Box<dyn Handler>; 2] = [|| Box::new(Flood), || Box::<EmptyWrites>::default()];
    for flood in floods {
        let fabric = network();
        let mut nodes: Vec<Node> = vec![
            (reactor(0, &fabric, config.clone()), Box::new(Server(Arc::clone(&fabric))), true),
            (reactor(1, &fabric, config.clone()), Box::new(Ping::default()), true),
            (reactor(2, &fabric, config.clone()), flood(), true),
        ];
        nodes[0].0.context().listen(address(0, 7471)).expect("a free port");
        for (reactor, ..) in &mut nodes[1..] {
            reactor.context().connect(address(0, 7471)).expect("a peer");
        }
        run(&fabric, &mut nodes, "both are up", |node| node.0.stats().connections.connected == 2, &[]);
        let died = lock(&fabric).now();
        run(&fabric, &mut nodes, "a peer is given up", |node| node.0.stats().connections.disconnected > 0, &[1]);
        let took = Duration::from_nanos(lock(&fabric).now() - died);
        let stats = nodes[0].0.stats().connections;
        assert_eq!((stats.keepalive_timeouts, stats.current), (1, 1), "the flood is alive: {stats:?}");
        println!("given up after {took:?}");
        // The first question is due after 10 ms, and the flush of a queue pair takes a moment.
        assert!(took >= TIMEOUT - Duration::from_millis(1) && took < TIMEOUT * 3, "given up after {took:?}");
    }
}

#[test]
fn a_flood_leaves_its_neighbour_alone() {
    let deep = Config::default().receive_depth(FLOOD).send_depth(FLOOD).completions_per_turn(4096).buffer_size(256);
    // With the default share of a turn, for the default windows and for deep ones.
    for (name, config) in [("default", Config::default()), ("deep", deep)] {
        let ((alone, none), (beside, deferred)) = (p99(&config, false), p99(&config, true));
        println!("{name}: p99 alone {alone} ns, beside a flood {beside} ns; {deferred} completions waited");
        assert_eq!(none, 0, "who is alone does not wait");
        assert!(deferred > 1_000, "a flood waits: {deferred}");
        assert!(beside <= 2 * alone, "{name}: p99 is {beside} ns beside a flood, {alone} ns alone");
        // Without a bound on one connection the times are worse, so the test can fail.
        let (unfair, _) = p99(&config.fairness(u32::MAX, usize::MAX), true);
        println!("{name}: p99 beside an unbounded flood {unfair} ns");
        assert!(unfair > 2 * alone, "{name}: p99 is {unfair} ns beside an unbounded flood, {alone} ns alone");
    }
}
