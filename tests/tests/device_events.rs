//! Events of devices and of the connection manager that arrive at the wrong time, or never, on virtual time. The tests run a script
//! ([`rdma_reactor_tests::life`]) in which connections are established in both directions, use every operation, and end. Each event is
//! produced at each step of the script.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use rdma_reactor::{
    ConnectError, ConnectOptions, ConnectionId, Context, DetachedMessage, DeviceEvent, DisconnectReason, Framing,
    Handler, ListenOptions, Message, Outcome, Parts, Reactor, SendId,
};
use rdma_reactor_tests::conformance::harness::Probe;
use rdma_reactor_tests::conformance::violations::{HELLO, WINDOW, greeting, message};
use rdma_reactor_tests::gate::{Gate, Said};
use rdma_reactor_tests::life::{Ended, How, Kind, Program, config};
use rdma_reactor_tests::sim::fabric::{Shared, lock};
use rdma_reactor_tests::sim::hardware::HardwareProvider;
use rdma_reactor_tests::sim::quiet::{Node, entropy, gated, network, reactor, step, until};
use rdma_reactor_tests::sim::rng::Rng;
use rdma_reactor_tests::sim::swarm::{HardwareOptions, MS};
use rdma_reactor_tests::sim::tcp::address;
use rdma_reactor_tests::sim::{net::SimNet, poller::SimClock, poller::SimPoller};
use rdma_transport::cm::DisconnectCause;
use rdma_transport::event::DeviceEventKind;
use rdma_transport::wc::{Failure, WcStatus};
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig};

/// The virtual time within which the script of all connections must be complete, in ns.
const PATIENCE: u64 = 30_000 * MS;
/// The number of simulation steps within which the script of all connections must be complete.
const STEPS: u64 = 300_000;

/// A node whose device produces events when the test requests them, and the peer of this node.
struct World {
    fabric: Shared,
    gate: Gate,
    nodes: Vec<Node>,
    programs: [Program; 2],
    steps: u64,
}

impl World {
    fn new() -> Self {
        let (fabric, gate, programs) = (network(2), Gate::default(), <[Program; 2]>::default());
        let reactors = [gated(0, &fabric, &gate, config()).expect("no call fails"), reactor(1, &fabric, config())];
        let pairs = reactors.into_iter().zip(&programs);
        let mut nodes: Vec<Node> =
            pairs.map(|(reactor, program)| Node::new(reactor, Box::new(program.clone()))).collect();
        for (nth, node) in nodes.iter_mut().enumerate() {
            node.reactor.context().listen(address(nth, 7471)).expect("a free port");
        }
        Self { fabric, gate, nodes, programs, steps: 0 }
    }

    fn open(&self, kind: Kind) -> usize {
        self.programs.iter().map(|program| program.0.borrow().open(kind)).sum()
    }

    /// Runs the script on two connections at the same time: node 0 opens one of them, and its peer opens the other. At step `at` and at the
    /// following step, the device of node 0 produces the event `said`. If `at` is `None`, it produces no event.
    fn round(&mut self, at: Option<u64>, said: Said, what: &str) {
        for from in 0..2 {
            self.programs[from].open(&mut self.nodes[from].reactor.context(), address(1 - from, 7471), Kind::Life);
        }
        let (end, first) = (lock(&self.fabric).now() + PATIENCE, self.steps);
        while self.open(Kind::Life) > 0 || at.is_some_and(|at| self.steps <= first + at + 1) {
            assert!(lock(&self.fabric).now() < end && self.steps < first + STEPS, "{what}: {:#?}", self.programs);
            if at.is_some_and(|at| (at..at + 2).contains(&(self.steps - first))) {
                self.gate.say(said);
                lock(&self.fabric).ring(0);
            }
            step(&self.fabric, &mut self.nodes).unwrap_or_else(|(node, error)| panic!("{what}: node {node}: {error}"));
            self.steps += 1;
        }
    }

    /// Returns the connections of node 0 that ended before their script was complete.
    fn undone(&self) -> Vec<Ended> {
        self.programs[0].0.borrow().ended.iter().filter(|ended| !ended.done).cloned().collect()
    }

    /// Runs until no connection is left. Then checks that all buffers, regions and completion queues are released.
    fn check(&mut self, what: &str) {
        until(&self.fabric, &mut self.nodes, what, |nodes| {
            let left = |node: &Node| (node.reactor.stats().connections.current, node.reactor.stats().memory.regions);
            nodes.iter().all(|node| left(node) == (0, 0))
        });
        for (nth, node) in self.nodes.iter().enumerate() {
            let stats = node.reactor.stats();
            let (all, free) = node.reactor.pool_levels();
            assert_eq!(all, free, "{what}: buffers of node {nth}: {stats:?}");
        }
        let queues = self.gate.objects().completion_queues;
        assert!(queues <= 2, "{what}: {queues} completion queues");
    }
}

/// Runs the script once without events, and then once for each of its steps, with the event `said` at that step. Each connection that ends
/// before its script is complete must have a reason for which `is_true` returns true. Returns the number of such connections in all runs.
fn at_each_step(said: Said, is_true: impl Fn(&How) -> bool) -> usize {
    let mut quiet = World::new();
    quiet.round(None, said, "nothing happens");
    assert!(quiet.undone().is_empty() && quiet.steps > 50, "{} steps", quiet.steps);
    let mut ends = 0;
    for at in 0..quiet.steps {
        let (mut world, what) = (World::new(), format!("{said:?} at step {at}"));
        world.round(Some(at), said, &what);
        let undone = world.undone();
        for ended in &undone {
            assert!(is_true(&ended.how), "{what}: {:?}", ended.how);
        }
        ends += undone.len();
        // The test waits until the queue pairs are flushed and a removed listener is created again, which takes up to a second.
        let calm = lock(&world.fabric).now() + 1_500 * MS;
        world.gate.plug_in();
        until(&world.fabric, &mut world.nodes, &what, |_| lock(&world.fabric).now() > calm);
        world.check(&what);
        let before = world.undone().len();
        world.round(None, said, &what);
        assert_eq!(world.undone().len(), before, "{what}: service afterwards: {:?}", world.undone());
        world.check(&what);
    }
    ends
}

/// Rows 6, 10 and 30 of `docs/reliability.md`. If the device reports a failed queue pair or an unreachable address, the reactor ends each
/// connection that has a queue pair, whatever the connection is doing. The program gets the device's reason.
#[test]
fn the_device_says_that_connections_have_failed() {
    const WHY: &str = "the queue pair failed";
    let ends = at_each_step(Said::Failed(WHY), |how| match how {
        How::Disconnected(DisconnectReason::Transport(DisconnectCause::Path(why))) => why == WHY,
        How::NotConnected(ConnectError::Transport(why)) => why.to_string().contains(WHY),
        _ => false,
    });
    assert!(ends > 50, "{ends} connections were cut off");
}

/// Row 32 of `docs/reliability.md`. If a completion queue overruns, its connections end, and their reason names the overrun. Each send
/// still completes, although the device's completion is lost. New connections get another completion queue, and the queue that overran is
/// destroyed.
#[test]
fn the_completion_queue_overruns() {
    let ends = at_each_step(Said::Overrun, |how| match how {
        How::Disconnected(DisconnectReason::Transport(DisconnectCause::Path(why))) => why.contains("overran"),
        How::NotConnected(ConnectError::Transport(why)) => why.to_string().contains("overran"),
        _ => false,
    });
    assert!(ends > 50, "{ends} connections were cut off");
}

/// Rows 28 and 29 of `docs/reliability.md`. If a device is removed, its connections end, also those that are being established. When the
/// device is added again, its listener accepts connections again.
#[test]
fn the_device_is_removed() {
    let ends = at_each_step(Said::Removal, |how| match how {
        How::Disconnected(reason) => *reason == DisconnectReason::DeviceRemoved,
        How::NotConnected(ConnectError::Local(why)) => why.contains("device"),
        How::NotConnected(_) => false,
    });
    assert!(ends > 50, "{ends} connections were cut off");
}

/// Row 20 of `docs/reliability.md`. A TIMEWAIT event that arrives too early or twice changes nothing.
#[test]
fn the_end_of_timewait_is_told_too_early_and_twice() {
    assert_eq!(at_each_step(Said::Timewait, |_| false), 0);
}

/// A program that records the events of devices.
#[derive(Clone, Default)]
struct Listener(Rc<RefCell<Vec<DeviceEvent>>>);

impl Handler for Listener {
    fn on_device_event(&mut self, _: &mut Context<'_>, event: &DeviceEvent) {
        self.0.borrow_mut().push(event.clone());
    }
}

/// Row 30 of `docs/reliability.md`. Events of a port, and unknown events, are passed to the program in order and with the name of the
/// device. They end no connection.
#[test]
fn events_of_a_port_are_told_and_end_nothing() {
    let (fabric, gate, told) = (network(2), Gate::default(), Listener::default());
    let server = gated(0, &fabric, &gate, config()).expect("no call fails");
    let mut nodes =
        [Node::new(server, Box::new(told.clone())), Node::new(reactor(1, &fabric, config()), Box::<Probe>::default())];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "it is up", |nodes| nodes[0].reactor.stats().connections.connected == 1);
    let kinds = [
        DeviceEventKind::PortDown { port: 1 },
        DeviceEventKind::PortActive { port: 1 },
        DeviceEventKind::AddressChange { port: 1 },
        DeviceEventKind::Port { code: 17, port: 1 },
        DeviceEventKind::Other(4711),
    ];
    kinds.iter().for_each(|&kind| gate.say(Said::Device(kind)));
    lock(&fabric).ring(0);
    let calm = lock(&fabric).now() + 10_000 * MS;
    until(&fabric, &mut nodes, "some time", |_| lock(&fabric).now() > calm);
    let told = told.0.borrow();
    assert_eq!(told.iter().map(|event| event.kind).collect::<Vec<_>>(), kinds);
    assert!(told.iter().all(|event| event.device == "iwarp0"), "{told:?}");
    assert_eq!(nodes[0].reactor.stats().connections.current, 1, "the connection goes on");
}

/// Row 18 of `docs/reliability.md`. If the `Established` event of a connection is lost, the peer's first message establishes the
/// connection.
#[test]
fn a_beginning_that_is_never_told_is_that_of_the_first_message() {
    let mut world = World::new();
    world.gate.lose_beginnings();
    world.round(None, Said::Timewait, "lost beginnings");
    assert!(world.undone().is_empty(), "{:?}", world.undone());
    assert_eq!(world.nodes[0].reactor.stats().connections.connected, 2);
    world.check("lost beginnings");
}

/// A peer that encodes the protocol's messages itself. It sends the first message of the protocol (the hello) or nothing. Then it closes
/// the connection, or leaves it open.
struct Rude {
    says_hello: bool,
    closes: bool,
}

impl Handler for Rude {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if self.says_hello {
            cx.send(conn, &message(HELLO, WINDOW, &[])).expect("room");
        }
        if self.closes {
            cx.close(conn);
        }
    }
}

/// Row 18 of `docs/reliability.md`. The `Established` event is lost, and the peer disconnects. If the peer had sent a first message, the
/// program is notified of the connection and then of its end. Otherwise it is notified of neither.
#[test]
fn an_end_without_a_beginning_is_told_to_nobody() {
    for (says_hello, closes) in [(false, false), (false, true), (true, true)] {
        let mut world = World::new();
        world.gate.lose_beginnings();
        world.nodes[1].handler = Box::new(Rude { says_hello, closes });
        let options = ConnectOptions::new().framing(Framing::Raw).private_data(greeting(WINDOW));
        world.nodes[1].reactor.context().connect_with(address(0, 7471), options).expect("connecting");
        let calm = 2_100 * MS;
        until(&world.fabric, &mut world.nodes, "the handshake timeout", |_| lock(&world.fabric).now() > calm);
        let stats = world.nodes[0].reactor.stats().connections;
        let told = u64::from(says_hello);
        assert_eq!((stats.connected, stats.disconnected, stats.refused), (told, told, 1 - told), "{stats:?}");
        // The program's record panics if a callback is called twice, or if `on_disconnect` comes without `on_connect`.
        assert_eq!(world.programs[0].0.borrow().ended.len() as u64, told);
        world.check("an end without a beginning");
    }
}

/// A program that sends some messages, and records their outcomes and the reason of the disconnect.
#[derive(Clone, Default)]
struct Sender {
    messages: usize,
    outcomes: Rc<RefCell<Vec<Outcome>>>,
    reason: Rc<RefCell<Option<DisconnectReason>>>,
}

impl Handler for Sender {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        (0..self.messages).for_each(|_| assert!(cx.send(conn, b"anybody there?").is_ok(), "no room"));
    }
    fn on_send_complete(&mut self, _: &mut Context<'_>, _: ConnectionId, _: SendId, outcome: Outcome) {
        self.outcomes.borrow_mut().push(outcome);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        *self.reason.borrow_mut() = Some(reason);
    }
}

/// Rows 6 and 7 of `docs/reliability.md`. If the device's retries are exhausted, the connection ends with the status of the device: either
/// the peer did not answer, or it had no posted receive.
#[test]
fn retries_that_are_used_up_are_the_reason_of_the_end() {
    for status in [WcStatus::RetryExceeded, WcStatus::ReceiverNotReady] {
        let (fabric, gate, sender) = (network(2), Gate::default(), Sender { messages: 3, ..Sender::default() });
        let client = gated(0, &fabric, &gate, config()).expect("no call fails");
        let mut nodes = [
            Node::new(client, Box::new(sender.clone())),
            Node::new(reactor(1, &fabric, config()), Box::<Probe>::default()),
        ];
        nodes[1].reactor.context().listen(address(1, 7471)).expect("a free port");
        nodes[0].reactor.context().connect(address(1, 7471)).expect("connecting");
        let failure = Failure { status, vendor_error: 0x81 };
        gate.fail_completion(failure);
        until(&fabric, &mut nodes, "both ends", |nodes| {
            nodes.iter().all(|node| node.reactor.stats().connections.disconnected == 1)
        });
        let reason = DisconnectReason::WorkRequest { device: "iwarp0".into(), failure };
        assert_eq!(*sender.reason.borrow(), Some(reason));
        assert_eq!(sender.outcomes.borrow().len(), 3, "each send ends once");
    }
}

/// A program that keeps every received message, and records the reason of the disconnect.
struct Keeper(Vec<DetachedMessage>, Rc<RefCell<Option<DisconnectReason>>>);

impl Handler for Keeper {
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.0.push(message.detach());
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        *self.1.borrow_mut() = Some(reason);
    }
}

/// Row 7 of `docs/reliability.md`. If a message arrives on iWARP and no receive is posted, the receiving side ends the connection. Both
/// sides get the missing receive as the reason.
#[test]
fn a_message_without_a_receive_is_the_reason_of_the_end() {
    let (fabric, sender, kept) = (network(2), Sender { messages: 8, ..Sender::default() }, Rc::default());
    let mut nodes = [
        Node::new(reactor(0, &fabric, config().receive_depth(5)), Box::new(Keeper(Vec::new(), Rc::clone(&kept)))),
        Node::new(reactor(1, &fabric, config()), Box::new(sender.clone())),
    ];
    let raw = ListenOptions::new().framing(Framing::Raw);
    nodes[0].reactor.context().listen_with(address(0, 7471), raw).expect("a free port");
    let raw = ConnectOptions::new().framing(Framing::Raw);
    nodes[1].reactor.context().connect_with(address(0, 7471), raw).expect("connecting");
    until(&fabric, &mut nodes, "both ends", |nodes| {
        nodes.iter().all(|node| node.reactor.stats().connections.disconnected == 1)
    });
    let why = |reason: &RefCell<Option<DisconnectReason>>| match &*reason.borrow() {
        Some(DisconnectReason::Transport(cause)) => cause.clone(),
        other => panic!("{other:?}"),
    };
    let (here, there) = (why(&kept), why(&sender.reason));
    assert!(matches!(&here, DisconnectCause::PeerViolation(why) if why.contains("no buffer available")), "{here:?}");
    assert!(
        matches!(&there, DisconnectCause::TerminatedByPeer(why) if why.contains("no buffer available")),
        "{there:?}"
    );
    assert_eq!(sender.outcomes.borrow().len(), 8, "each send ends once");
}

/// Returns a reactor on a device that flushes the work requests of an ended connection only after the reactor has stopped waiting for their
/// completions. `purge` is the chance, in 1/1000, that the device discards these completions together with the queue pair.
fn lazy(fabric: &Shared, purge: u32) -> Reactor {
    let options = HardwareOptions {
        late: 0,
        late_by: 0,
        cm_late: 0,
        short_poll: 0,
        before_arming: 0,
        lazy_flush: 1000,
        twice: 0,
        never: 0,
        purge,
        extensions: true,
        overtaking: false,
        keeps: 0,
    };
    let inner = Iwarp::new(IwarpConfig::default(), SimNet::new(0, Arc::clone(fabric)), entropy(0));
    let inner = inner.expect("default settings");
    let provider = HardwareProvider::new(inner, 0, Arc::clone(fabric), options, Rng::new(0, "hardware"));
    let parts = Parts {
        providers: vec![Box::new(provider)],
        poller: Box::new(SimPoller::new(0, Arc::clone(fabric))),
        clock: Box::new(SimClock(Arc::clone(fabric))),
    };
    Reactor::with_parts(config(), parts).expect("settings in range")
}

/// Row 35 of `docs/reliability.md`. Completions that arrive after their connection has ended are counted, and have no other effect. If the
/// device discards them with the queue pair, none is counted.
#[test]
fn completions_of_connections_that_are_gone_are_counted() {
    // Six receives are posted at the end: all except the two that the hello and the goodbye have used.
    for (purge, stale) in [(0, 6), (1000, 0)] {
        let fabric = network(2);
        let mut nodes = [
            Node::new(lazy(&fabric, purge), Box::<Probe>::default()),
            Node::new(reactor(1, &fabric, config()), Box::<Probe>::default()),
        ];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        let conn = nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "it is up", |nodes| nodes[0].reactor.stats().connections.connected == 1);
        nodes[1].reactor.context().close(conn);
        let calm = lock(&fabric).now() + 5_000 * MS;
        until(&fabric, &mut nodes, "the end", |_| lock(&fabric).now() > calm);
        let stats = nodes[0].reactor.stats();
        assert_eq!((stats.connections.disconnected, stats.completions.stale), (1, stale), "{stats:?}");
        let (all, free) = nodes[0].reactor.pool_levels();
        assert_eq!(all, free, "the receives are free");
        // The late completions have released their entries of the completion queue, so the queue has room for many more connections.
        for _ in 0..200 {
            let conn = nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
            until(&fabric, &mut nodes, "it is up", |nodes| nodes[0].reactor.stats().connections.current == 1);
            nodes[1].reactor.context().close(conn);
            until(&fabric, &mut nodes, "the end", |nodes| nodes[0].reactor.stats().connections.current == 0);
        }
    }
}
