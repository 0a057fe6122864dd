//! Peers that fall silent: their path fails in one direction or in both, or their process is stopped or killed. All times are virtual.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message, Outcome, Region,
    RegionOptions, RemoteRegion, SecurityMode, SendErrorKind, SendId, TimerId,
};
use rdma_reactor_tests::conformance::harness::at_home;
use rdma_reactor_tests::identities::security;
use rdma_reactor_tests::sim::fabric::{Script, Shared, lock};
use rdma_reactor_tests::sim::path::LateDevice;
use rdma_reactor_tests::sim::quiet::{Node, network, reactor, step, until};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;

/// The silence after which the reactor pings a peer, in ms. It is a hundredth of the default.
const INTERVAL: u64 = 50;
/// The silence after which the connection of a peer ends, in ms. It is a hundredth of the default.
const TIMEOUT: u64 = 150;
/// The longest time from the keepalive timeout until both sides are notified of the end, in ms. It covers the flush and some turns.
const SLACK: u64 = 11;

fn config() -> Config {
    let ms = Duration::from_millis;
    Config::default()
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (ms(INTERVAL), ms(TIMEOUT)))
        .timeouts(|t| t.flush = ms(10))
        .timeouts(|t| t.close = ms(20))
        .timeouts(|t| t.connect = ms(100))
        .timeouts(|t| t.handshake = ms(50))
        .timeouts(|t| t.transfer = ms(300))
        .max_memory(64 << 20)
        .large_messages(|l| l.eager_limit = 0)
        .receive_depth(8)
        .send_depth(8)
        .large_messages(|l| l.memory = 8 << 20)
        .large_messages(|l| l.max_message = 1 << 20)
}

/// The activity of a connection when a fault occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traffic {
    /// The connection sends nothing.
    Idle,
    /// One message in each direction per millisecond.
    Echoes,
    /// As many messages as possible.
    Flood,
    /// Large messages, which the peer fetches by RDMA Reads.
    Offers,
    /// RDMA Writes to the peer's memory.
    Writes,
    /// Messages that the peer's program keeps, so that no credits are granted.
    Kept,
}

impl Traffic {
    /// Returns the ages of a connection at which a fault occurs, in ns. All kinds of traffic have a
    /// fault at the beginning and soon after it. `Idle` and `Kept` also have faults around the
    /// times of the pings.
    const fn ages(self) -> &'static [u64] {
        match self {
            Self::Idle | Self::Kept => &[0, 3 * MS, 49 * MS, 50 * MS, 51 * MS, 60 * MS, 99 * MS, 111 * MS, 149 * MS],
            _ => &[0, 3 * MS],
        }
    }
}

const ALL: [Traffic; 6] =
    [Traffic::Idle, Traffic::Echoes, Traffic::Flood, Traffic::Offers, Traffic::Writes, Traffic::Kept];

/// The events of a program.
#[derive(Debug, Default)]
struct Book {
    up: u32,
    /// The accepted sends that have not completed.
    sends: BTreeSet<SendId>,
    received: u64,
    ended: Vec<Result<DisconnectReason, ConnectError>>,
    kept: Vec<DetachedMessage>,
    remote: Option<RemoteRegion>,
}

/// The program of both nodes. Node 1 connects, and begins to send.
struct Program {
    book: Rc<RefCell<Book>>,
    traffic: Traffic,
    active: bool,
    region: Option<Region>,
    conn: Option<ConnectionId>,
}

impl Program {
    fn send(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let mut book = self.book.borrow_mut();
        loop {
            let sent = match self.traffic {
                Traffic::Idle => return,
                Traffic::Echoes | Traffic::Kept => cx.send(conn, &[1; 64]),
                Traffic::Flood => cx.send(conn, &[2; 100]),
                Traffic::Offers => cx.send(conn, &[3; 20_000]),
                Traffic::Writes => {
                    let (Some(remote), Some(region)) = (book.remote, &self.region) else { return };
                    cx.remote(conn).write(remote, region, 0..64)
                }
            };
            match sent {
                Ok(id) => assert!(book.sends.insert(id), "{id:?} names two sends"),
                Err(SendErrorKind::WouldBlock(_) | SendErrorKind::Closed) => return,
                Err(error) => panic!("{error}"),
            }
            if self.traffic == Traffic::Echoes || self.traffic == Traffic::Writes && book.sends.len() >= 4 {
                return;
            }
        }
    }
}

impl Handler for Program {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.book.borrow_mut().up += 1;
        self.conn = Some(conn);
        if self.traffic == Traffic::Writes {
            let region =
                cx.regions().register(conn, 4096, &RegionOptions::new().allow(rdma_reactor::Access::REMOTE_WRITE));
            let region = region.expect("memory");
            let name = cx.send(conn, &region.remote().to_bytes()).expect("room");
            self.book.borrow_mut().sends.insert(name);
            self.region = Some(region);
        } else if self.active {
            self.send(cx, conn);
        }
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.book.borrow_mut().received += 1;
        match self.traffic {
            Traffic::Echoes => drop(cx.timers().set(Duration::from_millis(1), 0)),
            Traffic::Kept => self.book.borrow_mut().kept.push(message.detach()),
            Traffic::Writes => {
                self.book.borrow_mut().remote = RemoteRegion::from_bytes(&message);
                if self.active {
                    self.send(cx, conn);
                }
            }
            _ => {}
        }
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if let Some(conn) = self.conn {
            self.send(cx, conn);
        }
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.send(cx, conn);
    }
    fn on_send_complete(&mut self, cx: &mut Context<'_>, _: ConnectionId, send: SendId, outcome: Outcome) {
        let mut book = self.book.borrow_mut();
        assert!(book.sends.remove(&send), "{send:?} completes once");
        if self.active && self.traffic == Traffic::Writes && outcome.is_sent() && book.sends.is_empty() {
            cx.timers().set(Duration::from_micros(200), 0);
        }
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        let mut book = self.book.borrow_mut();
        assert!(book.sends.is_empty(), "{} sends never completed", book.sends.len());
        book.ended.push(Ok(reason));
        book.kept.clear();
        (self.conn, self.region) = (None, None);
    }
    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.book.borrow_mut().ended.push(Err(error));
    }
}

/// Runs nodes for `time` of virtual time, in ns.
fn pass(fabric: &Shared, nodes: &mut [Node], time: u64) {
    let end = lock(fabric).now() + time;
    lock(fabric).schedule(end, Script::Tick);
    while lock(fabric).now() < end {
        step(fabric, nodes).unwrap_or_else(|(node, error)| panic!("node {node}: {error}"));
    }
}

/// Two nodes: node 0 listens, and node 1 connects to it.
struct World {
    fabric: Shared,
    nodes: [Node; 2],
    books: [Rc<RefCell<Book>>; 2],
}

impl World {
    fn new(traffic: Traffic, config: &Config) -> Self {
        let (fabric, books) = (network(2), <[Rc<RefCell<Book>>; 2]>::default());
        let node = |node: usize| {
            let book = Rc::clone(&books[node]);
            let program = Program { book, traffic, active: node == 1, region: None, conn: None };
            Node::new(reactor(node, &fabric, config.clone()), Box::new(program))
        };
        let mut nodes = [node(0), node(1)];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        Self { fabric, nodes, books }
    }

    /// Returns a world with a connection that was established `age` ns ago.
    fn up(traffic: Traffic, config: &Config, age: u64) -> Self {
        let mut world = Self::new(traffic, config);
        until(&world.fabric, &mut world.nodes, "it is up", |_| world.books.iter().all(|book| book.borrow().up == 1));
        world.pass(age);
        world
    }

    fn now(&self) -> u64 {
        lock(&self.fabric).now()
    }

    /// Runs the nodes for `time` of virtual time, in ns.
    fn pass(&mut self, time: u64) {
        pass(&self.fabric, &mut self.nodes, time);
    }

    fn ends(&self) -> [usize; 2] {
        [0, 1].map(|node| self.books[node].borrow().ended.len())
    }

    /// Runs until both sides are notified of the end. Returns the time until the notification of each side, in ns.
    fn times(&mut self, what: &str) -> [u64; 2] {
        let (begun, mut times) = (self.now(), [0; 2]);
        let Self { fabric, nodes, books } = self;
        until(fabric, nodes, what, |_| {
            for node in 0..2 {
                if times[node] == 0 && books[node].borrow().ended.len() == 1 {
                    times[node] = lock(fabric).now() - begun;
                }
            }
            times.iter().all(|&time| time > 0)
        });
        times
    }

    /// Checks that these nodes hold no resources any more, and that each program was notified of at most one end.
    fn check(&self, nodes: &[usize]) {
        for &node in nodes {
            let book = self.books[node].borrow();
            assert!(book.ended.len() <= 1 && book.sends.is_empty(), "node {node}: {book:?}");
            let stats = self.nodes[node].reactor.stats();
            assert_eq!((stats.connections.current, stats.memory.regions), (0, 0), "node {node}: {stats:?}");
            assert!(at_home(&self.nodes[node].reactor), "node {node}: {stats:?}");
            assert_eq!((stats.memory.fetched_bytes, stats.memory.copied_bytes), (0, 0), "node {node}: {stats:?}");
        }
    }

    /// Restores the path, and checks that a new connection works.
    fn serve_again(&mut self) {
        lock(&self.fabric).mend();
        for book in &self.books {
            *book.borrow_mut() = Book::default();
        }
        self.nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        let Self { fabric, nodes, books } = self;
        until(fabric, nodes, "a new connection", |_| books.iter().all(|book| book.borrow().up == 1));
    }
}

/// Rows 2 and 4 of `docs/reliability.md`. Both sides are notified in time if the path fails in either direction or in both, whatever the
/// connection is doing.
#[test]
fn a_dead_path_is_noticed_by_both_sides_in_time() {
    for traffic in ALL {
        for (zero_to_one, one_to_zero) in [(true, true), (true, false), (false, true)] {
            for &age in traffic.ages() {
                let mut world = World::up(traffic, &config(), age);
                if zero_to_one {
                    lock(&world.fabric).silence(0, 1);
                }
                if one_to_zero {
                    lock(&world.fabric).silence(1, 0);
                }
                let what = format!("{traffic:?}, {zero_to_one} {one_to_zero}, {age} ns old");
                let times = world.times(&what);
                for time in times {
                    assert!(time <= (TIMEOUT + SLACK) * MS, "{what}: {times:?} ns");
                }
                // The end may come up to one ping interval before the timeout, because the last sign of life may be older than the fault.
                assert!(times.iter().all(|&time| time >= (TIMEOUT - INTERVAL) * MS), "{what}: {times:?} ns");
                world.pass(10 * MS);
                world.check(&[0, 1]);
                world.serve_again();
            }
        }
    }
}

/// Rows 2 and 4 of `docs/reliability.md`. With the default timeouts, both sides are notified within 15 seconds after the path fails, plus
/// the time of a flush.
#[test]
fn a_dead_path_is_noticed_after_15_seconds_by_default() {
    for (from, to) in [(0, 1), (1, 0)] {
        let mut world = World::new(Traffic::Idle, &Config::default());
        world.pass(1_234 * MS);
        lock(&world.fabric).silence(from, to);
        let times = world.times("the default");
        assert!(times.iter().all(|&time| time <= 16_000 * MS), "{times:?}");
    }
}

/// Rows 2 and 4 of `docs/reliability.md`. If the path fails at any moment of connection setup, neither side keeps a connection: each side
/// that had established it is notified of its end.
#[test]
fn a_path_that_dies_in_a_handshake_leaves_nothing() {
    for mode in [SecurityMode::Plain, SecurityMode::Psk] {
        let config = config().security(security(mode));
        let longest = 2 * TIMEOUT + SLACK;
        for moment in (0..500_000).step_by(7_001) {
            for (zero_to_one, one_to_zero) in [(true, true), (true, false), (false, true)] {
                let mut world = World::new(Traffic::Idle, &config);
                world.pass(moment);
                for (from, _) in [(0, zero_to_one), (1, one_to_zero)].into_iter().filter(|(_, dead)| *dead) {
                    lock(&world.fabric).silence(from, 1 - from);
                }
                world.pass(longest * MS);
                let up = [0, 1].map(|node| world.books[node].borrow().up as usize);
                let ends = world.ends();
                assert_eq!(ends[1], 1, "{mode:?}, {moment} ns: {:?}", world.books);
                assert_eq!(ends[0], up[0], "{mode:?}, {moment} ns: {:?}", world.books);
                world.check(&[0, 1]);
            }
        }
    }
}

/// A device may withhold the first frames of a connection until a later frame arrives, as siw does
/// on a busy machine. The connection is established on the passive side soon after the device
/// begins to listen: within three times the delay of the device, plus about 100 ms.
#[test]
fn a_device_that_listens_late_delays_a_connection_and_does_not_end_it() {
    for mode in [SecurityMode::Plain, SecurityMode::Tls, SecurityMode::Psk] {
        for traffic in [Traffic::Idle, Traffic::Echoes] {
            for late in [0, 1, 90, 110, 310, 450, 1_000, 1_900, 3_000] {
                let mut world = World::new(traffic, &Config::default().security(security(mode)));
                lock(&world.fabric).late_device = Some(LateDevice::new(late * MS));
                let World { fabric, nodes, books } = &mut world;
                let what = format!("{mode:?}, {traffic:?}, {late} ms late");
                until(fabric, nodes, &what, |_| books.iter().all(|book| book.borrow().up == 1));
                let (now, longest) = (world.now(), 3 * late + 110);
                assert!(now <= longest * MS, "{what}: up after {now} ns");
                world.pass(20_000 * MS);
                assert_eq!(world.ends(), [0, 0], "{what}");
            }
        }
    }
}

/// A server that answers each message immediately, and its client, which sends the next message when an answer arrives.
struct Prompt {
    up: Rc<Cell<Option<ConnectionId>>>,
    received: Rc<Cell<u32>>,
}

impl Handler for Prompt {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.up.set(Some(conn));
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.received.set(self.received.get() + 1);
        cx.send(conn, &message).expect("as many as before have room");
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        panic!("{reason:?}");
    }
}

/// While a server takes no turns, its client sends early messages. These must leave credits for
/// `in_flight` messages of the client's program. When the server continues, the client must have a
/// credit for its next message at each answer.
#[test]
fn early_messages_to_a_slow_peer_leave_room_for_data() {
    for (depth, in_flight) in [(6, 1), (8, 1), (16, 5), (32, 13)] {
        for sent_at in [0, 50, 110, 450, 1_400, 4_100] {
            for slow in [0, 1, 60, 101, 330, 1_000, 1_500, 3_000, 4_500] {
                let (fabric, what) = (network(2), format!("{in_flight} of {depth}, at {sent_at} ms, {slow} ms slow"));
                let up: [Rc<Cell<Option<ConnectionId>>>; 2] = Default::default();
                let received: [Rc<Cell<u32>>; 2] = Default::default();
                let mut nodes = [0, 1].map(|node| {
                    let program = Prompt { up: Rc::clone(&up[node]), received: Rc::clone(&received[node]) };
                    let config =
                        Config::default().receive_depth(depth).timeouts(|t| t.handshake = Duration::from_secs(60));
                    Node::new(reactor(node, &fabric, config), Box::new(program))
                });
                nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
                nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
                until(&fabric, &mut nodes, &what, |_| up[1].get().is_some());
                assert!(up[0].get().is_none(), "{what}: the server is not slow");
                nodes[0].dead = true;
                pass(&fabric, &mut nodes, sent_at * MS);
                for _ in 0..in_flight {
                    let sent = nodes[1].reactor.context().send(up[1].get().expect("it is up"), &[1; 64]);
                    sent.unwrap_or_else(|error| panic!("{what}: {error}"));
                }
                pass(&fabric, &mut nodes, slow * MS);
                nodes[0].dead = false;
                pass(&fabric, &mut nodes, 20 * MS);
                assert!(received[1].get() > 10 * in_flight, "{what}: {} answers", received[1].get());
            }
        }
    }
}

/// Row 3 of `docs/reliability.md`. If a process is stopped for less than the timeout, counted from its last message, no connection ends.
#[test]
fn a_stop_shorter_than_the_timeout_ends_nothing() {
    for traffic in ALL {
        for node in 0..2 {
            for &age in traffic.ages() {
                let mut world = World::up(traffic, &config(), age);
                world.nodes[node].dead = true;
                world.pass((TIMEOUT - INTERVAL - 1) * MS);
                world.nodes[node].dead = false;
                let before = world.books[0].borrow().received;
                world.pass((TIMEOUT + SLACK) * MS);
                assert_eq!(world.ends(), [0, 0], "{traffic:?}: {:?}", world.books);
                let goes_on = world.books[0].borrow().received > before;
                assert!(
                    goes_on || matches!(traffic, Traffic::Idle | Traffic::Kept | Traffic::Writes),
                    "{traffic:?}: messages arrive again"
                );
            }
        }
    }
}

/// Row 8 of `docs/reliability.md`. If a path fails in one direction or in both, and works again before the timeout, no connection ends.
/// Messages in flight arrive.
#[test]
fn a_path_that_comes_back_in_time_ends_nothing() {
    for traffic in ALL {
        for paths in [&[(0, 1), (1, 0)][..], &[(0, 1)], &[(1, 0)]] {
            let mut world = World::up(traffic, &config(), 3 * MS);
            for &(from, to) in paths {
                lock(&world.fabric).silence(from, to);
            }
            world.pass((TIMEOUT - INTERVAL - 1) * MS);
            lock(&world.fabric).mend();
            let before = world.books[0].borrow().received;
            world.pass((TIMEOUT + SLACK) * MS);
            assert_eq!(world.ends(), [0, 0], "{traffic:?}, {paths:?}: {:?}", world.books);
            let goes_on = world.books[0].borrow().received > before;
            let quiet = matches!(traffic, Traffic::Idle | Traffic::Kept | Traffic::Writes);
            assert!(goes_on || quiet, "{traffic:?}, {paths:?}: messages arrive again");
        }
    }
}

/// Row 3 of `docs/reliability.md`. If a process is stopped for longer than the timeout, its peer is notified in time. The stopped side is
/// notified when it runs again.
#[test]
fn a_stop_longer_than_the_timeout_is_noticed_by_both_sides() {
    for traffic in ALL {
        for node in 0..2 {
            let mut world = World::up(traffic, &config(), 3 * MS);
            world.nodes[node].dead = true;
            world.pass((TIMEOUT + SLACK) * MS);
            let told = world.ends();
            assert_eq!((told[1 - node], told[node]), (1, 0), "{traffic:?}");
            let reason = world.books[1 - node].borrow().ended[0].clone();
            assert_eq!(reason, Ok(DisconnectReason::KeepaliveTimeout), "{traffic:?}");
            world.nodes[node].dead = false;
            world.pass(SLACK * MS);
            assert_eq!(world.ends(), [1, 1], "{traffic:?}: the stopped one is notified of it");
            world.check(&[0, 1]);
        }
    }
}

/// Row 1 of `docs/reliability.md`. The kernel closes the sockets of a killed process, so the peer is notified within a second.
#[test]
fn a_killed_peer_is_noticed_within_a_second() {
    for traffic in ALL {
        for node in 0..2 {
            for age in [0, MS / 50, 3 * MS] {
                let mut world = World::up(traffic, &Config::default(), age);
                lock(&world.fabric).kill(node);
                world.nodes[node].dead = true;
                world.pass(1_000 * MS);
                let ended = world.books[1 - node].borrow().ended.clone();
                assert_eq!(ended, [Ok(DisconnectReason::Lost)], "{traffic:?}, {age} ns old");
                world.check(&[1 - node]);
            }
        }
    }
}

/// Row 82 of `docs/reliability.md`. A drain aborts the remaining connections at its deadline, also those whose peers are dead.
#[test]
fn a_shutdown_does_not_wait_for_dead_peers() {
    const DEADLINE: u64 = 40;
    for traffic in ALL {
        for node in 0..2 {
            for killed_paths in [&[(0, 1), (1, 0)][..], &[(0, 1)], &[(1, 0)], &[]] {
                let mut world = World::up(traffic, &config(), 3 * MS);
                for &(from, to) in killed_paths {
                    lock(&world.fabric).silence(from, to);
                }
                world.nodes[1 - node].dead = killed_paths.is_empty();
                world.pass(10 * MS);
                world.nodes[node].reactor.context().drain(Duration::from_millis(DEADLINE));
                world.nodes[node].more = true;
                world.pass((DEADLINE + SLACK) * MS);
                let what = format!("{traffic:?}, node {node}, {killed_paths:?}");
                assert!(world.nodes[node].reactor.is_drained(), "{what}");
                let ended = world.books[node].borrow().ended.clone();
                assert!(matches!(ended[..], [Ok(DisconnectReason::Local { .. })]), "{what}: {ended:?}");
                world.check(&[node]);
            }
        }
    }
}
