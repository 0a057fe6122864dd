//! Connects that fail, on virtual time. The tests check the error, the time until it is reported, and that no state remains.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::stream::{StreamContext, StreamHandler, Streams};
use rdma_reactor::{
    Config, ConnectError, ConnectOptions, ConnectRequest, ConnectionId, Context, Decision, Error, Handler,
    RejectReason, TimerId,
};
use rdma_reactor_tests::sim::fabric::{Shared, lock};
use rdma_reactor_tests::sim::quiet::{Attempts, Node, network, reactor, step, until};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;
use rdma_transport::cm::ConnectFailure;

/// The default of [`Timeouts::connect`], in ms.
const TIMEOUT: u64 = 10_000;

/// A server that rejects all connect requests, with private data.
struct Refuses;

impl Handler for Refuses {
    fn on_connect_request(&mut self, _: &mut Context<'_>, _: ConnectRequest<'_>) -> Decision {
        Decision::Reject(b"not today".to_vec())
    }
}

/// Returns the network, a server with this configuration and this handler, a client, and the record of the client's connects.
fn pair(config: Config, server: Box<dyn Handler>) -> (Shared, [Node; 2], Attempts) {
    let (fabric, attempts) = (network(2), Attempts::default());
    let nodes = [
        Node::new(reactor(0, &fabric, config), server),
        Node::new(reactor(1, &fabric, Config::default()), Box::new(attempts.clone())),
    ];
    (fabric, nodes, attempts)
}

/// Connects the client, which must fail. Returns the error, and the time until it was reported, in ns.
fn fails(fabric: &Shared, nodes: &mut [Node; 2], attempts: &Attempts) -> (ConnectError, u64) {
    let begun = lock(fabric).now();
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    let before = attempts.errors.borrow().len();
    until(fabric, nodes, "the error", |nodes| {
        attempts.errors.borrow().len() > before
            && nodes[1].reactor.stats().memory.pool_free == nodes[1].reactor.stats().memory.pool_buffers
    });
    let error = attempts.errors.borrow()[before].clone();
    (error, lock(fabric).now() - begun)
}

/// A program of streams that records the errors of its connects.
#[derive(Clone, Default)]
struct Connects(Rc<RefCell<Vec<ConnectError>>>);

impl StreamHandler for Connects {
    fn on_readable(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {}
    fn on_connect_error(&mut self, _: &mut StreamContext<'_>, _: ConnectionId, error: ConnectError) {
        self.0.borrow_mut().push(error);
    }
}

/// A drain of streams ends a connect whose peer does not answer, and an accepted connection whose peer does not continue. It does not wait
/// for them until its deadline.
#[test]
fn a_drain_of_streams_ends_connections_that_are_not_up() {
    let (fabric, connects) = (network(3), Connects::default());
    let mut nodes: Vec<_> =
        (0..3).map(|node| Node::new(reactor(node, &fabric, Config::default()), Box::<Attempts>::default())).collect();
    nodes[0].handler = Box::new(Streams::new(connects.clone()));
    for node in [0, 1] {
        nodes[node].reactor.context().listen(address(node, 7471)).expect("a free port");
    }
    nodes[1].dead = true;
    nodes[0].reactor.context().connect(address(1, 7471)).expect("connecting");
    nodes[2].reactor.context().connect(address(0, 7471)).expect("connecting");
    // Node 2 stops as soon as node 0 has its connect request.
    until(&fabric, &mut nodes, "the connect request", |nodes| nodes[0].reactor.stats().connections.current == 2);
    nodes[2].dead = true;
    let mut cx = nodes[0].reactor.context();
    assert_eq!(cx.connection_ids().count(), 0);
    cx.drain(Duration::from_secs(3600));
    let begun = lock(&fabric).now();
    until(&fabric, &mut nodes, "the end of the drain", |nodes| nodes[0].reactor.is_drained());
    assert_eq!(*connects.0.borrow(), [ConnectError::Cancelled]);
    let time = lock(&fabric).now() - begun;
    assert!(time < TIMEOUT * MS / 2, "{time} ns");
}

/// Row 11 of `docs/reliability.md`. A connect to an address without a listener is refused immediately.
#[test]
fn nobody_listens() {
    let (fabric, mut nodes, attempts) = pair(Config::default(), Box::<Attempts>::default());
    let (error, time) = fails(&fabric, &mut nodes, &attempts);
    assert_eq!(error, ConnectError::Transport(ConnectFailure::Refused));
    assert!(time < MS, "{time} ns");
    assert_eq!(nodes[1].reactor.stats().connections.current, 0);
}

/// Row 12 of `docs/reliability.md`. A connect without an answer ends after `Timeouts::connect`. In one run all packets of the client are
/// lost, and in another run the server's process stalls.
#[test]
fn nobody_answers() {
    for stops in [false, true] {
        let (fabric, mut nodes, attempts) = pair(Config::default(), Box::<Attempts>::default());
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        if stops {
            nodes[0].dead = true;
        } else {
            lock(&fabric).silence(1, 0);
        }
        let (error, time) = fails(&fabric, &mut nodes, &attempts);
        assert_eq!(error, ConnectError::Timeout, "{stops}");
        assert!((TIMEOUT * MS..(TIMEOUT + 10) * MS).contains(&time), "{stops}: {time} ns");
        assert_eq!(nodes[1].reactor.stats().connections.current, 0);
    }
}

/// Row 14 of `docs/reliability.md`. If the server's program rejects a request, the client receives the private data of the rejection, and
/// the server counts the request as refused.
#[test]
fn the_program_rejects() {
    let (fabric, mut nodes, attempts) = pair(Config::default(), Box::new(Refuses));
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let (error, time) = fails(&fabric, &mut nodes, &attempts);
    let told = ConnectError::Rejected { reason: RejectReason::Refused, private_data: b"not today".to_vec() };
    assert_eq!(error, told);
    assert!(time < MS, "{time} ns");
    let stats = nodes[0].reactor.stats().connections;
    assert_eq!((stats.refused, stats.connected, stats.current), (1, 0, 0), "{stats:?}");
}

/// Row 24 of `docs/reliability.md`. A reactor with `max_connections` connections rejects a further request as busy, and its own connects
/// fail immediately. When a connection has ended, another one is accepted.
#[test]
fn connections_are_limited_in_number() {
    const MOST: u32 = 3;
    let limited = Config::default().max_connections(MOST);
    let (fabric, mut nodes, attempts) = pair(limited, Box::<Attempts>::default());
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    for count in 1..=MOST as usize {
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "it is up", |_| attempts.up.borrow().len() == count);
    }
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "the refusal", |_| attempts.errors.borrow().len() == 1);
    let busy = matches!(attempts.errors.borrow()[0], ConnectError::Rejected { reason: RejectReason::Busy, .. });
    assert!(busy, "{:?}", attempts.errors);
    let own = nodes[0].reactor.context().connect(address(1, 7471));
    assert!(matches!(own, Err(Error::Limit { limit: "max_connections", value: 3 })), "{own:?}");
    let first = attempts.up.borrow()[0];
    nodes[1].reactor.context().close(first);
    until(&fabric, &mut nodes, "an end", |nodes| nodes[0].reactor.stats().connections.current == 2);
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "it is up", |_| attempts.up.borrow().len() == MOST as usize + 1);
}

/// Row 24 of `docs/reliability.md`. A client that stalls during its handshake loses its slot after `Timeouts::handshake`, so another client
/// can connect although `max_pending` is 1.
#[test]
fn an_unfinished_handshake_gives_its_place_up() {
    let limited = Config::default().max_pending(1).timeouts(|t| t.handshake = Duration::from_millis(50));
    let (fabric, mut nodes, attempts) = pair(limited, Box::<Attempts>::default());
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "the answer is on its way", |nodes| nodes[0].reactor.stats().connections.current == 1);
    // The client's process stalls, so the handshake stays unfinished.
    nodes[1].dead = true;
    until(&fabric, &mut nodes, "it is given up", |nodes| nodes[0].reactor.stats().connections.current == 0);
    assert_eq!(nodes[0].reactor.stats().connections.refused, 1);
    nodes[1].dead = false;
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "a connection", |nodes| nodes[0].reactor.stats().connections.connected == 1);
    assert!(!attempts.up.borrow().is_empty());
}

/// The program corks a connection before it is up, and the first address refuses the connection. The connection comes up at the next
/// address, on both sides, and its sends are held back there.
#[test]
fn a_cork_outlasts_a_failed_attempt() {
    let (fabric, attempts) = (network(3), Attempts::default());
    let mut nodes = [
        Node::new(reactor(0, &fabric, Config::default()), Box::<Attempts>::default()),
        Node::new(reactor(1, &fabric, Config::default()), Box::new(attempts.clone())),
        Node::new(reactor(2, &fabric, Config::default()), Box::<Attempts>::default()),
    ];
    // Nobody listens on the first address.
    nodes[2].reactor.context().listen(address(2, 7471)).expect("a free port");
    let peers = [address(0, 7471), address(2, 7471)];
    let conn = nodes[1].reactor.context().connect_any(&peers, ConnectOptions::new()).expect("connecting");
    nodes[1].reactor.context().cork(conn);
    until(&fabric, &mut nodes, "it is up", |nodes| {
        attempts.up.borrow()[..] == [conn] && nodes[2].reactor.stats().connections.connected == 1
    });
    nodes[1].reactor.context().send(conn, b"held back").expect("room");
    nodes[1].more = true;
    // The wait is shorter than 100 ms, because a ping after 100 ms would also post the corked
    // sends.
    let calm = lock(&fabric).now() + 50 * MS;
    until(&fabric, &mut nodes, "some time", |_| lock(&fabric).now() > calm);
    assert_eq!(nodes[2].reactor.stats().messages.received, 0, "the cork holds it back");
    nodes[1].reactor.context().flush(conn);
    until(&fabric, &mut nodes, "the message", |nodes| nodes[2].reactor.stats().messages.received == 1);
}

/// A program that closes its connection when a timer fires.
#[derive(Clone, Default)]
struct Closes {
    attempts: Attempts,
    conn: Rc<Cell<Option<ConnectionId>>>,
    /// True if the connection was not up when it was closed.
    in_time: Rc<Cell<bool>>,
}

impl Handler for Closes {
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        self.in_time.set(self.attempts.up.borrow().is_empty());
        cx.close(self.conn.get().expect("it connects first"));
    }
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.attempts.on_connect(cx, conn);
    }
    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.attempts.on_connect_error(cx, conn, error);
    }
}

/// The program closes a connection that still has another address to try: after every possible
/// number of steps, also when the first attempt has just failed. After the close, no other address
/// is tried, and the program receives exactly one `on_connect_error`.
#[test]
fn a_closed_connection_tries_no_other_address() {
    for steps in 0..1000 {
        let (fabric, program) = (network(3), Closes::default());
        let mut nodes = [
            Node::new(reactor(0, &fabric, Config::default()), Box::<Attempts>::default()),
            Node::new(reactor(1, &fabric, Config::default()), Box::new(program.clone())),
            Node::new(reactor(2, &fabric, Config::default()), Box::<Attempts>::default()),
        ];
        // Nobody listens on the first address.
        nodes[2].reactor.context().listen(address(2, 7471)).expect("a free port");
        let peers = [address(0, 7471), address(2, 7471)];
        let conn = nodes[1].reactor.context().connect_any(&peers, ConnectOptions::new()).expect("connecting");
        program.conn.set(Some(conn));
        for _ in 0..steps {
            step(&fabric, &mut nodes).expect("a turn");
        }
        nodes[1].reactor.context().timers().set(Duration::ZERO, 0);
        until(&fabric, &mut nodes, "the end", |nodes| nodes[1].reactor.stats().connections.current == 0);
        if !program.in_time.get() {
            assert!(steps > 1, "it was closed in several of the steps");
            return;
        }
        assert!(program.attempts.up.borrow().is_empty(), "closed after {steps} steps");
        assert_eq!(program.attempts.errors.borrow().len(), 1, "closed after {steps} steps");
    }
    panic!("it is never up");
}
