//! The processor time of a reactor with little to do, on virtual time. Within a turn, time passes only with readings of the clock and calls
//! of the provider. So the time of turns shows busy polling and needless work.

use std::time::Duration;

use rdma_reactor::{
    Access, Config, ConnectionId, Context, Handler, Message, Region, RegionOptions, Stats, TimerId, Wait,
};
use rdma_reactor_tests::sim::fabric::{Shared, lock};
use rdma_reactor_tests::sim::poller::virtual_ns;
use rdma_reactor_tests::sim::quiet::{Node, network, reactor};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;

const WAITS: [Wait; 2] = [Wait::Event, Wait::Adaptive];

fn config(wait: Wait) -> Config {
    Config::default().wait(wait).receive_depth(8).send_depth(4).buffer_size(64)
}

/// A program that sends one message per `pace`. If `pace` is `None`, the program echoes each message that it receives.
struct Program {
    pace: Option<Duration>,
    conn: Option<ConnectionId>,
}

impl Handler for Program {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
        if let Some(pace) = self.pace {
            cx.timers().set(pace, 0);
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if self.pace.is_none() {
            cx.send(conn, &message).expect("room for an echo");
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if let (Some(pace), Some(conn)) = (self.pace, self.conn) {
            cx.timers().set(pace, 0);
            cx.send(conn, b"tick").expect("one at a time");
        }
    }
}

/// A server and its client, which share a network.
struct World {
    fabric: Shared,
    nodes: [Node; 2],
    /// The time that each node has spent in its turns, in ns.
    busy: [u64; 2],
}

impl World {
    /// Connects the client to the server `connections` times. If there is only one connection, the client sends a message per `pace` on it.
    fn new(wait: Wait, connections: usize, pace: Option<Duration>) -> Self {
        let fabric = network(2);
        let program = |pace| Box::new(Program { pace, conn: None });
        let mut nodes = [
            Node::new(reactor(0, &fabric, config(wait)), program(None)),
            Node::new(reactor(1, &fabric, config(wait)), program(None)),
        ];
        if connections == 1 {
            nodes[1].handler = program(pace);
        }
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        for _ in 0..connections {
            nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        }
        let mut world = Self { fabric, nodes, busy: [0; 2] };
        while world.nodes.iter().any(|node| node.reactor.stats().connections.connected < connections as u64) {
            world.step();
        }
        world
    }

    fn now(&self) -> u64 {
        lock(&self.fabric).now()
    }

    /// Runs a turn of each node whose turn is due. The turn may sleep, but its sleep returns immediately. The virtual time advances at the
    /// end of this function.
    fn step(&mut self) {
        let (now, mut idle) = (self.now(), true);
        let mut next = lock(&self.fabric).next();
        for (index, node) in self.nodes.iter_mut().enumerate() {
            let due = node.reactor.next_deadline().map(virtual_ns);
            if node.more || lock(&self.fabric).is_runnable(index, true) || due.is_some_and(|due| due <= now) {
                lock(&self.fabric).seen(index);
                let from = lock(&self.fabric).now();
                let turn = node.reactor.turn(&mut *node.handler, None).expect("a turn");
                // A turn that found work did not reach its sleep, so the node needs another turn.
                node.more = turn.more || turn.progressed;
                self.busy[index] += lock(&self.fabric).now() - from;
                idle = false;
            }
            next = next.into_iter().chain(due).min();
        }
        if idle {
            let next = next.expect("the keepalive is due at some time");
            lock(&self.fabric).advance(next.max(now + 1));
        }
    }

    /// Runs the nodes for `time` of virtual time without a measurement, and then for the same time with one. Returns the share of the
    /// measured time that each node spent in its turns, and the counters of both nodes at the beginning and at the end of the measured
    /// time.
    fn live(&mut self, time: Duration) -> ([f64; 2], [[Stats; 2]; 2]) {
        let time = time.as_nanos() as u64;
        let mut pass = || {
            let end = self.now() + time;
            self.busy = [0; 2];
            while self.now() < end {
                self.step();
            }
            (
                self.busy.map(|busy| busy as f64 / time as f64),
                [0, 1].map(|node: usize| self.nodes[node].reactor.stats()),
            )
        };
        let (_, before) = pass();
        let (busy, after) = pass();
        assert!(lock(&self.fabric).violations.is_empty(), "{:?}", lock(&self.fabric).violations);
        (busy, [before, after])
    }
}

/// On an idle connection, each direction has at most a ping and its answer per keepalive interval.
#[test]
fn a_thousand_idle_connections_take_next_to_nothing() {
    const CONNECTIONS: u64 = 1000;
    for wait in WAITS {
        let mut world = World::new(wait, CONNECTIONS as usize, None);
        // This time has 12 keepalive intervals of 5 s.
        let (busy, [before, after]) = world.live(Duration::from_secs(60));
        println!("{wait:?}: {busy:?} of the time");
        assert!(busy.iter().all(|&share| share < 0.01), "{wait:?}: {busy:?} of the time");
        let messages = |stats: &[Stats; 2]| stats.iter().map(|stats| stats.completions.polled).sum::<u64>();
        let turns = |stats: &[Stats; 2]| stats.iter().map(|stats| stats.turns.taken).sum::<u64>();
        let (messages, turns) = (messages(&after) - messages(&before), turns(&after) - turns(&before));
        println!("{wait:?}: {turns} turns, {messages} completions");
        // There are at most four messages per connection and interval, each with a completion on both sides.
        assert!(messages <= 12 * 8 * CONNECTIONS && turns <= messages, "{turns} turns, {messages} completions");
    }
}

#[test]
fn rare_messages_take_what_sleeping_takes() {
    // Returns the share of 10 s that each node spends in its turns, with a message per 10 ms.
    let busy = |wait| {
        let mut world = World::new(wait, 1, Some(Duration::from_nanos(10 * MS)));
        let (busy, [before, after]) = world.live(Duration::from_secs(10));
        let echoes = after[0].messages.sent - before[0].messages.sent;
        assert!((990..=1000).contains(&echoes), "{echoes} echoes");
        println!("{wait:?}: {busy:?} of the time");
        busy
    };
    let [event, adaptive] = WAITS.map(busy);
    for node in 0..2 {
        assert!(adaptive[node] < event[node] + 0.001, "{adaptive:?} of the time, and {event:?} asleep");
    }
    // Checks the measurement itself: a reactor that polls for 50 us before each sleep spends a larger share of the time in its turns.
    let spin = busy(Wait::Spin(Duration::from_micros(50)));
    assert!((0..2).all(|node| spin[node] > event[node] + 0.001), "{spin:?} of the time, and {event:?} asleep");
}

/// A program that registers a region with a lifetime of 5 ms, in a callback that has already run for 10 ms.
struct Lender {
    fabric: Shared,
    /// The region, and the virtual time at which it was registered.
    lent: Option<(Region, u64)>,
}

impl Handler for Lender {
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let registered = lock(&self.fabric).now() + 10 * MS;
        lock(&self.fabric).advance(registered);
        let options = RegionOptions::new().allow(Access::REMOTE_READ).any_peer().lifetime(Duration::from_millis(5));
        let region = cx.regions().register_at(address(0, 7471).ip(), 64, &options).expect("a region");
        self.lent = Some((region, registered));
    }
}

/// The lifetime of a region begins with its registration, and not with the turn in which the callback runs.
#[test]
fn a_long_callback_does_not_shorten_the_lifetime_of_a_region() {
    let fabric = network(1);
    let mut reactor = reactor(0, &fabric, config(Wait::Event));
    let mut lender = Lender { fabric, lent: None };
    reactor.context().timers().set(Duration::ZERO, 0);
    while lender.lent.is_none() {
        reactor.turn(&mut lender, Duration::ZERO).expect("a turn");
    }
    let due = reactor.next_deadline().map(virtual_ns).expect("the end of the lifetime");
    let registered = lender.lent.as_ref().map(|(_, registered)| *registered).expect("just seen");
    assert!(due >= registered + 5 * MS, "registered at {registered}, and over at {due}");
}
