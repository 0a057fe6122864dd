//! The tests of several reactors in a group. Before a connection is established, one reactor can hand it over to another one. The peer's
//! messages must then arrive at the other reactor. Further tests drain one reactor or all of them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdma_reactor::{
    ConnectError, ConnectOptions, ConnectRequest, ConnectionId, Context, Decision, Error, Handler, Message, Place,
    Reactor, Reactors, RejectReason, Stats,
};

use super::harness::{Event, PATIENCE, Probe, Setup, now};

const COUNT: usize = 3;
/// A duration that is longer than any test.
const NEVER: Duration = Duration::from_secs(3600);

/// A server that sends the number of its reactor to each client, and echoes. The private data of a client can request a reactor (`to
/// N`) or a refusal (`no`).
#[derive(Default)]
struct Server {
    index: usize,
    placed: usize,
    up: Arc<AtomicUsize>,
    /// True if the server closes no connections during a drain. In this case the reactor aborts the connections at the drain's deadline.
    stays: bool,
    live: usize,
}

fn wish(private_data: &[u8]) -> Option<usize> {
    std::str::from_utf8(private_data).ok()?.strip_prefix("to ")?.split(' ').next()?.parse().ok()
}

impl Handler for Server {
    fn on_place(&mut self, _: &mut Context<'_>, request: ConnectRequest<'_>) -> Place {
        self.placed += 1;
        wish(request.private_data).map_or(Place::LeastLoaded, Place::Reactor)
    }

    fn on_connect_request(&mut self, _: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        assert_eq!(request.reactor, 0, "the first one listens");
        if request.private_data.ends_with(b"no") {
            return Decision::Reject(format!("not on {}", self.index).into_bytes());
        }
        Decision::AcceptWith(vec![self.index as u8])
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.live += 1;
        self.up.fetch_add(1, Ordering::SeqCst);
        // The passive side may send first, on every reactor of the group.
        let said = cx.connection(conn).private_data().to_vec();
        cx.send(conn, &said).expect("a new connection has room");
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        cx.send(conn, &message).expect("an echo has room");
    }

    fn on_drain(&mut self, cx: &mut Context<'_>, _: Duration) {
        if !self.stays {
            cx.close_all();
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, _: rdma_reactor::DisconnectReason) {
        self.live -= 1;
        self.up.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A group of reactors, each on its own thread, and one client. The first reactor listens.
struct World {
    group: Reactors,
    threads: Vec<JoinHandle<(Server, Stats)>>,
    /// The number of open connections on each reactor.
    up: Vec<Arc<AtomicUsize>>,
    address: SocketAddr,
    client: Reactor,
    probe: Probe,
}

impl World {
    #[allow(clippy::disallowed_methods, reason = "a thread for each reactor")]
    fn new(setup: &Setup, stays: bool) -> Self {
        let mut reactors: Vec<_> = (0..COUNT).map(|_| (setup.reactor)(setup.config()).expect("a reactor")).collect();
        let group = Reactors::of(&mut reactors);
        let listener = reactors[0].context().listen(setup.address).expect("listening");
        let address = reactors[0].context().listeners().local_address(listener).expect("it listens");
        let up: Vec<_> = (0..COUNT).map(|_| Arc::default()).collect();
        let run = |(index, mut reactor): (usize, Reactor)| {
            let mut server = Server { index, stays, up: Arc::clone(&up[index]), ..Server::default() };
            thread::spawn(move || {
                reactor.run(&mut server).expect("a run");
                assert!(reactor.is_drained() && reactor.context().connections() == 0);
                (server, reactor.stats())
            })
        };
        let threads = reactors.into_iter().enumerate().map(run).collect();
        let client = (setup.reactor)(setup.config()).expect("a reactor");
        Self { group, threads, up, address, client, probe: Probe::default() }
    }

    fn connect(&mut self, private_data: &str) -> ConnectionId {
        let options = ConnectOptions::new().private_data(private_data);
        self.client.context().connect_with(self.address, options).expect("connecting")
    }

    fn until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        let end = now() + PATIENCE;
        while !condition(self) {
            assert!(now() < end, "not within {PATIENCE:?}: {what}: {:?} {:?}", self.group, self.probe);
            self.client.turn(&mut self.probe, Duration::from_millis(5)).expect("a turn");
        }
    }

    /// Opens one connection for each item of `wishes`, with the item as its private data. Waits until both sides of all connections have
    /// called `on_connect`.
    fn open(&mut self, wishes: &[&str]) {
        let before = self.probe.live() + wishes.len();
        for wish in wishes {
            self.connect(wish);
        }
        self.until("all are up", |world| world.probe.live() == before && world.loads().iter().sum::<usize>() == before);
    }

    fn loads(&self) -> Vec<usize> {
        self.up.iter().map(|up| up.load(Ordering::SeqCst)).collect()
    }

    /// Returns the number of the reactor that has accepted the newest connection. The client knows the number from the private data of the
    /// accept. Returns `None` if the client has no connection yet.
    fn last_place(&self) -> Option<u8> {
        self.probe.events.iter().rev().find_map(|event| match event {
            Event::Connect(_, said) => said.first().copied(),
            _ => None,
        })
    }

    /// Drains the remaining reactors. Returns the handler and the counters of each reactor.
    fn finish(mut self) -> Vec<(Server, Stats)> {
        self.group.drain_all(PATIENCE);
        self.until("all connections have ended", |world| world.probe.live() == 0);
        self.threads.into_iter().map(|thread| thread.join().expect("a reactor")).collect()
    }
}

/// Connections must be distributed evenly over the reactors. If a peer requests a reactor, its connection must be on the requested reactor.
pub fn a_group_shares_its_connections(setup: &Setup) {
    let mut world = World::new(setup, false);
    let wishes: Vec<_> = (0..4 * COUNT).map(|nth| format!("peer {nth}")).collect();
    world.open(&wishes.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(world.loads(), [4; COUNT]);
    assert_eq!((0..COUNT).map(|index| world.group.load(index)).collect::<Vec<_>>(), [Some(4); COUNT]);
    world.until("each said what its peer had said", |world| world.probe.messages().len() == 4 * COUNT);
    let mut said: Vec<_> = world.probe.messages().into_iter().map(<[u8]>::to_vec).collect();
    let mut expected: Vec<_> = wishes.into_iter().map(String::into_bytes).collect();
    said.sort();
    expected.sort();
    assert_eq!(said, expected);
    // Each connection must echo, on every reactor.
    let conns = world.probe.events.iter().filter_map(|event| match event {
        Event::Connect(conn, _) => Some(*conn),
        _ => None,
    });
    let conns: Vec<_> = conns.collect();
    for round in 0..20usize {
        for &conn in &conns {
            world.client.context().send(conn, &vec![round as u8; 100 * round]).expect("room");
        }
        world.until("echoes", |world| world.probe.received as usize == 4 * COUNT * (round + 2));
    }
    let ends = world.finish();
    assert_eq!(ends[0].0.placed, 4 * COUNT);
    assert_eq!(ends[0].1.connections.handed_over, 4 * (COUNT as u64 - 1));
    assert!(ends[1..].iter().all(|(_, stats)| stats.connections.taken_over == 4 && stats.connections.connected == 4));
}

/// The handler of the first reactor selects a reactor. The selected reactor must be able to refuse the connection.
pub fn a_handler_places_and_the_other_refuses(setup: &Setup) {
    let mut world = World::new(setup, false);
    world.open(&["to 2", "to 2", "to 1", "to 2", "to 0"]);
    assert_eq!(world.loads(), [1, 1, 3]);
    // A number that is out of range must select no reactor. In this case, the connection must be on the least loaded reactor.
    world.open(&["to 9"]);
    assert_eq!(world.loads().iter().sum::<usize>(), 6);
    for index in 0..COUNT {
        let refused = world.connect(&format!("to {index} no"));
        // The refusal is not always the last event: the first messages of other connections may arrive after it.
        let answer = |world: &World| {
            let of_it = |event: &&Event| matches!(event, Event::ConnectError(conn, _) if *conn == refused);
            world.probe.events.iter().find(of_it).cloned()
        };
        world.until("it is refused", |world| answer(world).is_some());
        let error = ConnectError::Rejected {
            reason: RejectReason::Refused,
            private_data: format!("not on {index}").into_bytes(),
        };
        assert_eq!(answer(&world), Some(Event::ConnectError(refused, error)));
    }
    let ends = world.finish();
    assert!(
        ends.iter().all(|(_, stats)| stats.connections.refused == 1),
        "{:?}",
        ends.iter().map(|(_, s)| s).collect::<Vec<_>>()
    );
}

/// One reactor is drained, and the others must continue. When the listening reactor is drained, its `run` must not return until all other
/// reactors of the group have ended.
pub fn one_is_drained_and_the_others_go_on(setup: &Setup) {
    let mut world = World::new(setup, false);
    world.open(&["to 0", "to 0", "to 1", "to 2"]);
    world.group.drain(0, PATIENCE);
    world.until("it is empty", |world| world.loads() == [0, 1, 1] && world.probe.live() == 2);
    assert_eq!((world.group.load(0), world.group.load(1)), (None, Some(1)));
    world.open(&["to 0", "to 0"]);
    assert_eq!(world.loads(), [0, 2, 2]);
    world.group.drain(1, PATIENCE);
    world.until("it is empty", |world| world.loads() == [0, 0, 2] && world.probe.live() == 2);
    world.until("its run has returned", |world| world.threads[1].is_finished());
    assert!(!world.threads[0].is_finished(), "the one that listens");
    world.open(&["", ""]);
    assert_eq!((world.loads(), world.last_place()), (vec![0, 0, 4], Some(2)));
    world.group.drain(2, PATIENCE);
    world.until("all have returned", |world| world.threads.iter().all(JoinHandle::is_finished));
    world.finish();
}

/// Connections that are not closed in time must be aborted at the deadline, with an `on_disconnect`.
pub fn draining_has_a_deadline(setup: &Setup) {
    let mut world = World::new(setup, true);
    world.open(&[""; 2 * COUNT]);
    let (start, deadline) = (now(), Duration::from_millis(300));
    world.group.drain_all(deadline);
    world.until("both sides know", |world| world.probe.live() == 0 && world.loads() == [0; COUNT]);
    assert!(now() - start >= deadline, "{:?}", now() - start);
    assert!(world.finish().iter().all(|(server, stats)| server.live == 0 && stats.connections.disconnected == 2));
}

/// A dropped reactor must get no new connections. If a connect request is assigned to a reactor that takes no turns, the request must end
/// when that reactor is dropped.
pub fn a_reactor_that_is_gone_is_passed_over(setup: &Setup) {
    let mut reactors: Vec<_> = (0..COUNT).map(|_| (setup.reactor)(setup.config()).expect("a reactor")).collect();
    let group = Reactors::of(&mut reactors);
    let listener = reactors[0].context().listen(setup.address).expect("listening");
    let address = reactors[0].context().listeners().local_address(listener).expect("it listens");
    let mut client = (setup.reactor)(setup.config()).expect("a reactor");
    let (mut probe, mut server) = (Probe::default(), Server::default());
    drop(reactors.pop());
    assert_eq!(group.load(2), None);
    let connect = |client: &mut Reactor, to: &str| {
        client.context().connect_with(address, ConnectOptions::new().private_data(to)).expect("connecting");
    };
    connect(&mut client, "to 1");
    connect(&mut client, "to 2");
    let end = now() + PATIENCE;
    let turn = |reactor: &mut Reactor, handler: &mut dyn Handler| {
        reactor.turn(handler, Duration::from_millis(2)).expect("a turn");
    };
    // The second reactor takes no turns, so one request waits for it. The other connection is on the first reactor.
    while probe.live() < 1 || reactors[0].stats().connections.handed_over < 1 {
        assert!(now() < end, "{group:?} {probe:?}");
        turn(&mut reactors[0], &mut server);
        turn(&mut client, &mut probe);
    }
    assert_eq!((group.load(0), group.load(1)), (Some(1), Some(1)));
    drop(reactors.pop());
    while probe.count(|event| matches!(event, Event::ConnectError(..))) < 1 {
        assert!(now() < end, "{group:?} {probe:?}");
        turn(&mut reactors[0], &mut server);
        turn(&mut client, &mut probe);
    }
    // When the group has only this reactor left, a drain must still complete.
    reactors[0].context().drain(NEVER);
    while !reactors[0].is_drained() {
        assert!(now() < end, "{group:?} {probe:?}");
        turn(&mut reactors[0], &mut server);
        turn(&mut client, &mut probe);
    }
    assert!(client.context().connect(address).is_ok() && reactors[0].context().connect(address).is_err());
}

/// After a drain, a reactor must not listen, and `run` must return immediately.
pub fn a_drained_reactor_is_over(setup: &Setup) {
    let mut reactor = (setup.reactor)(setup.config()).expect("a reactor");
    reactor.context().listen(setup.address).expect("listening");
    reactor.context().drain(NEVER);
    assert!(matches!(reactor.context().listen(setup.address), Err(Error::Drained)), "while it drains");
    for _ in 0..2 {
        reactor.run(&mut Probe::default()).expect("a run");
        assert!(reactor.is_drained());
    }
    assert!(matches!(reactor.context().listen(setup.address), Err(Error::Drained)), "after it has drained");
}
