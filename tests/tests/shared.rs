//! Receives that connections share: how much memory this saves, when they reach a connection that
//! waits for them, and the errors on a device without shared receive queues.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::transport::caps::Features;
use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DetachedMessage, Handler, Message, Reactor, RejectReason,
};
use rdma_reactor_tests::conformance::harness::{Event, Pair, Probe, Setup, with_watchdog};
use rdma_reactor_tests::forward::Forward;
use rdma_reactor_tests::gate::Gate;
use rdma_reactor_tests::patience::patient;
use rdma_reactor_tests::sim::fabric::lock;
use rdma_reactor_tests::sim::quiet::{Node, network, reactor, until};
use rdma_reactor_tests::sim::tcp::address;

/// Returns the total size of all buffers of a server with `count` idle connections, in bytes. `stride` is the size of
/// one buffer.
fn idle(config: Config, client: Config, count: usize, stride: usize) -> usize {
    let mut p = Pair::with_configs(&Setup::iwarp(), config, client, Probe::default(), Probe::default());
    for _ in 0..count {
        p.client.context().connect(p.address).expect("connecting");
    }
    p.until("all are up", |p| p.s.live() == count && p.c.live() == count);
    let bytes = p.server.stats().memory.pool_buffers * stride;
    p.finish();
    bytes
}

/// Compares the total size of the buffers of 500 idle connections: with 64 receives per connection, and with 2,880
/// receives that all connections share. A buffer holds a message of 8 KiB. Each case is measured with 64 sends per
/// connection (the default) and with 4 sends.
#[test]
fn idle_connections_take_less_memory() {
    with_watchdog("idle_connections_take_less_memory", || {
        const STRIDE: usize = 8256;
        // Both ends of the 500 connections are in this process.
        rlimit::increase_nofile_limit(1 << 16).expect("the limit of open files");
        let config = patient(Setup::iwarp().config()).max_connections_per_host(500);
        let small = patient(Setup::iwarp().config()).receive_depth(5).send_depth(1).buffer_size(64);
        let mib = |config: Config| idle(config, small.clone(), 500, STRIDE) >> 20;
        let own = mib(config.clone());
        let shared = mib(config.clone().shared_receives(Some(2880)));
        let own_short = mib(config.clone().send_depth(4));
        let shared_short = mib(config.send_depth(4).shared_receives(Some(2880)));
        println!("MiB: {own} and {shared} shared; with 4 sends each {own_short} and {shared_short} shared");
        // The memory of buffers grows in steps of 4 MiB, so the server may have up to 4 MiB more than it needs.
        assert!((511..=516).contains(&own), "{own} MiB");
        assert!((279..=284).contains(&shared), "{shared} MiB");
        assert!((275..=280).contains(&own_short), "{own_short} MiB");
        assert!((43..=48).contains(&shared_short), "{shared_short} MiB");
    });
}

/// A server that keeps all messages.
struct Keeper(Rc<RefCell<Vec<DetachedMessage>>>);

impl Handler for Keeper {
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.0.borrow_mut().push(message.detach());
    }
}

/// The state of a client: its connections, the number of them that send, and the number of messages
/// of each.
#[derive(Debug, Default)]
struct Sent {
    up: Vec<ConnectionId>,
    senders: usize,
    messages: [usize; CONNECTIONS],
    /// The number of calls of `on_writable` for each connection.
    writable: [usize; CONNECTIONS],
}

const CONNECTIONS: usize = 4;

struct Sender(Rc<RefCell<Sent>>);

impl Handler for Sender {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.0.borrow_mut().up.push(conn);
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let mut sent = self.0.borrow_mut();
        let number = sent.number(conn);
        sent.writable[number] += 1;
        sent.send(cx, conn);
    }
}

impl Sent {
    fn number(&self, conn: ConnectionId) -> usize {
        self.up.iter().position(|&up| up == conn).expect("it is up")
    }

    /// Sends as many messages as the connection accepts.
    fn send(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let number = self.number(conn);
        while number < self.senders && cx.send(conn, b"keep me").is_ok() {
            self.messages[number] += 1;
        }
    }
}

/// The connections use up the shared receives one by one, because the server keeps all messages.
/// Then the server releases the messages of the first connection. Each of the others gets credits
/// within the time of one message and its answer. The test uses virtual time, so this holds on a
/// slow machine, too.
#[test]
fn connections_that_wait_get_what_is_released() {
    const ROUND_TRIP: Duration = Duration::from_micros(100);
    let fabric = network(2);
    let config = patient(Config::default()).shared_receives(Some(128)).receive_depth(128).buffer_size(64);
    let (kept, sent) = (Rc::<RefCell<Vec<_>>>::default(), Rc::<RefCell<Sent>>::default());
    let mut nodes = [
        Node::new(reactor(0, &fabric, config.clone()), Box::new(Keeper(Rc::clone(&kept)))),
        Node::new(reactor(1, &fabric, config), Box::new(Sender(Rc::clone(&sent)))),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    for up in 1..=CONNECTIONS {
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "the connection", |_| sent.borrow().up.len() == up);
    }
    let mut of_first = 0;
    for number in 0..CONNECTIONS {
        let conn = sent.borrow().up[number];
        sent.borrow_mut().senders = number + 1;
        sent.borrow_mut().send(&mut nodes[1].reactor.context(), conn);
        let from = lock(&fabric).now();
        until(&fabric, &mut nodes, "ten seconds", |_| lock(&fabric).now() > from + 10_000_000_000);
        assert_eq!(sent.borrow().messages.iter().sum::<usize>(), kept.borrow().len(), "all are kept");
        if number == 0 {
            of_first = kept.borrow().len();
        }
    }
    sent.borrow_mut().senders = 0;
    let before = sent.borrow().writable;
    let from = lock(&fabric).now();
    for message in kept.borrow_mut().drain(..of_first) {
        nodes[0].reactor.context().release(message);
    }
    until(&fabric, &mut nodes, "all have room", |_| {
        (1..CONNECTIONS).all(|number| sent.borrow().writable[number] > before[number])
    });
    let took = Duration::from_nanos(lock(&fabric).now() - from);
    assert!(took < ROUND_TRIP, "{took:?}");
}

/// A server that keeps the messages of its first connection.
#[derive(Default)]
struct KeepsOfFirst {
    first: Option<ConnectionId>,
    kept: Vec<DetachedMessage>,
}

impl Handler for KeepsOfFirst {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.first.get_or_insert(conn);
    }
    fn on_recv(&mut self, _: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if self.first == Some(conn) {
            self.kept.push(message.detach());
        }
    }
}

/// A connection waits for shared receives, because the program keeps its messages, and another one
/// has claimed the remaining receives. The other one ends. Its receives become free when a poll
/// finds the completion queue empty, which may be the poll before a sleep. Even then, the
/// connection that waits gets them immediately, and not with its next keepalive.
#[test]
fn a_connection_that_waits_gets_what_an_ended_one_had() {
    const SOON: Duration = Duration::from_millis(1);
    let fabric = network(2);
    let config = patient(Config::default()).shared_receives(Some(128)).receive_depth(128).buffer_size(64);
    let sent = Rc::<RefCell<Sent>>::default();
    let mut nodes = [
        Node::new(reactor(0, &fabric, config.clone()), Box::<KeepsOfFirst>::default()),
        Node::new(reactor(1, &fabric, config), Box::new(Sender(Rc::clone(&sent)))),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    for up in 1..=2 {
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "the connection", |_| sent.borrow().up.len() == up);
    }
    let (waits, ends) = (sent.borrow().up[0], sent.borrow().up[1]);
    sent.borrow_mut().senders = 2;
    sent.borrow_mut().send(&mut nodes[1].reactor.context(), ends);
    until(&fabric, &mut nodes, "a busy connection", |_| sent.borrow().messages[1] > 5_000);
    sent.borrow_mut().senders = 1;
    sent.borrow_mut().send(&mut nodes[1].reactor.context(), waits);
    let from = lock(&fabric).now();
    until(&fabric, &mut nodes, "ten seconds", |_| lock(&fabric).now() > from + 10_000_000_000);
    let before = sent.borrow().writable[0];
    let from = lock(&fabric).now();
    nodes[1].reactor.context().abort(ends);
    until(&fabric, &mut nodes, "room", |_| sent.borrow().writable[0] > before);
    let took = Duration::from_nanos(lock(&fabric).now() - from);
    assert!(took < SOON, "{took:?}");
}

fn without_shared_queues(config: Config) -> Reactor {
    Forward::reactor(config, Features::SHARED_RECEIVE_QUEUE, &Gate::default())
}

/// On a device without shared receive queues, a connect with shared receives fails. The error names the provider and
/// the missing feature. A listener refuses its peers.
#[test]
fn a_device_without_shared_queues_says_so() {
    with_watchdog("a_device_without_shared_queues_says_so", || {
        let config = Setup::iwarp().config();
        let sharing = config.clone().shared_receives(Some(64));
        let error = |p: &Pair| {
            p.c.events
                .iter()
                .find_map(|e| if let Event::ConnectError(_, error) = e { Some(error.clone()) } else { None })
        };
        let mut p = Pair::new(&Setup::iwarp(), config.clone(), Probe::default(), Probe::default());
        p.client = without_shared_queues(sharing.clone());
        p.client.context().connect(p.address).expect("connecting");
        p.until("the error", |p| error(p).is_some());
        let lacks = ConnectError::Unsupported { provider: "forward", feature: "shared receive queues on this device" };
        assert_eq!(error(&p), Some(lacks.clone()));
        assert_eq!(lacks.to_string(), "the provider forward has no shared receive queues on this device");
        // On a device without shared receive queues, connections without shared receives work.
        p.client = without_shared_queues(config.clone());
        p.c = Probe::default();
        p.connect();
        p.finish();

        let mut p = Pair::new(&Setup::iwarp(), config, Probe::default(), Probe::default());
        p.server = without_shared_queues(sharing);
        let listener = p.server.context().listen(Setup::iwarp().address).expect("listening");
        p.address = p.server.context().listeners().local_address(listener).expect("its address");
        p.client.context().connect(p.address).expect("connecting");
        p.until("the refusal", |p| error(p).is_some());
        assert!(matches!(error(&p), Some(ConnectError::Rejected { reason: RejectReason::Busy, .. })));
        p.until("the server has released it", |p| p.server.stats().connections.current == 0);
        assert_eq!(p.server.stats().memory.pool_buffers, 0, "nothing was spent on it");
        p.finish();
    });
}
