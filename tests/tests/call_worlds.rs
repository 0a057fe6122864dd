//! Calls (`call::Calls`) on virtual time, over a simulated network with random delays and short writes. Sides stop, close, are killed,
//! drained or aborted at random. Each call must end exactly once, by its deadline, and with the answer to its own request. A call that is
//! reported as unserved must not have been served.
//!
//! `CALL_WORLDS=100` sets the number of worlds (default: 4,000), and `CALL_SEED=7` runs only the world with that seed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_reactor::call::{CallError, CallEvent, CallId, Calls, RefusedCall, RequestId};
use rdma_reactor::{Config, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor, TimerId};
use rdma_reactor_tests::sim::fabric::{Fabric, Shared, lock};
use rdma_reactor_tests::sim::poller::virtual_ns;
use rdma_reactor_tests::sim::quiet::reactor;
use rdma_reactor_tests::sim::rng::Rng;
use rdma_reactor_tests::sim::seeds::each_world;
use rdma_reactor_tests::sim::swarm::{FaultOptions, MS, Options};
use rdma_reactor_tests::sim::tcp::address;
use rdma_reactor_tests::sim::trace::Trace;

/// The number of random actions in a simulated world.
const ACTS: u64 = 150;
/// The number of simulation steps within which all calls and connections must have ended.
const STEPS: u64 = 400_000;
const PORT: u16 = 7471;
/// The longest time from a call's deadline to the end of the call, in ns. It is not zero, because a turn may run late.
const LATE: u64 = 5 * MS;
/// The indices of the two nodes.
const SERVER: usize = 0;
const CLIENT: usize = 1;

/// A call that has not ended.
#[derive(Clone, Debug)]
struct Made {
    /// The node that has made the call.
    node: usize,
    /// The time by which the call must have ended, in ns.
    until: u64,
    payload: Vec<u8>,
    id: CallId,
}

/// The number of calls by result.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    answered: u64,
    late: u64,
    overloaded: u64,
    draining: u64,
    disconnected: u64,
    unanswered: u64,
    cancelled: u64,
    unmatched: u64,
}

/// The record of all calls of a simulated world.
#[derive(Default)]
struct Book {
    next: u64,
    made: BTreeMap<u64, Made>,
    /// The calls that have arrived at the peer's program.
    served: BTreeSet<u64>,
    /// The calls that must not arrive at the peer's program any more: they were reported as unserved, or had a time limit of zero.
    never: BTreeSet<u64>,
    tally: Tally,
    wrong: Vec<String>,
}

/// Returns the number of a call, which is in the first eight bytes of its payload. `None` if the payload is shorter.
fn number(payload: &[u8]) -> Option<u64> {
    payload.first_chunk().map(|octets| u64::from_le_bytes(*octets))
}

impl Book {
    fn end(&mut self, node: usize, now: u64, tag: u64, end: Result<&[u8], &CallError>) {
        let Some(made) = self.made.remove(&tag) else { return self.wrong.push(format!("call {tag} has ended twice")) };
        if now > made.until || made.node != node {
            self.wrong.push(format!("call {tag} has ended at {now}: {made:?}"));
        }
        match end {
            Ok(payload) if *payload == made.payload => self.tally.answered += 1,
            Ok(payload) => self.wrong.push(format!("call {tag} has the answer of {:?}", number(payload))),
            Err(error) => {
                let counter = match error {
                    CallError::Deadline => &mut self.tally.late,
                    CallError::Overloaded => &mut self.tally.overloaded,
                    CallError::Draining => &mut self.tally.draining,
                    CallError::Disconnected(_) => &mut self.tally.disconnected,
                    CallError::Unanswered => &mut self.tally.unanswered,
                    other => return self.wrong.push(format!("call {tag}: {other}")),
                };
                *counter += 1;
                if error.is_unserved() {
                    self.never.insert(tag);
                    if self.served.contains(&tag) {
                        self.wrong.push(format!("call {tag} was served: {error}"));
                    }
                }
            }
        }
    }

    fn serve(&mut self, tag: u64) {
        self.served.insert(tag);
        if self.never.contains(&tag) {
            self.wrong.push(format!("call {tag} is served, and it was over before it arrived"));
        }
    }
}

/// The program of a node. It makes calls, and serves those of the peer.
#[derive(Clone)]
struct Side {
    node: usize,
    book: Rc<RefCell<Book>>,
    state: Rc<RefCell<State>>,
}

struct State {
    calls: Calls<u64>,
    up: Vec<ConnectionId>,
    held: Vec<(RequestId, Vec<u8>)>,
    /// Three limits on the requests that a program holds: the number of all requests, the number of requests of one connection, and the
    /// number of bytes.
    most: [usize; 3],
}

impl Side {
    fn new(node: usize, book: &Rc<RefCell<Book>>, rng: &mut Rng) -> Self {
        let mut calls = Calls::new();
        let most = [rng.skewed(1..=40) as usize, rng.skewed(1..=40) as usize, rng.skewed(300..=20_000) as usize];
        let limits = calls.limits();
        [limits.requests, limits.requests_per_connection, limits.bytes] = most;
        limits.calls_per_connection = rng.skewed(1..=60) as usize;
        let state = State { calls, up: Vec::new(), held: Vec::new(), most };
        Self { node, book: Rc::clone(book), state: Rc::new(RefCell::new(state)) }
    }

    fn look(&self, cx: &Context<'_>) {
        let (mut state, mut book) = (self.state.borrow_mut(), self.book.borrow_mut());
        while let Some(failed) = state.calls.next_failed() {
            book.end(self.node, virtual_ns(cx.now()), failed.tag, Err(&failed.error));
        }
    }
}

impl Handler for Side {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.state.borrow_mut().up.push(conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let (state, book) = (&mut *self.state.borrow_mut(), &mut *self.book.borrow_mut());
        let now = virtual_ns(cx.now());
        match state.calls.on_recv(cx, conn, message) {
            Some(CallEvent::Request { id, payload }) => {
                book.serve(number(&payload).unwrap_or(u64::MAX));
                state.held.push((id, payload.to_vec()));
                let bytes: usize = state.held.iter().map(|(_, payload)| payload.len()).sum();
                let of_one = state.held.iter().filter(|(id, _)| id.connection() == conn).count();
                let [all, one, most_bytes] = state.most;
                if state.held.len() > all || of_one > one || bytes > most_bytes {
                    book.wrong.push(format!("{} requests of {bytes} bytes are held", state.held.len()));
                }
            }
            Some(CallEvent::Answer { tag, payload, .. }) => book.end(self.node, now, tag, Ok(&payload)),
            Some(CallEvent::Failed(failed)) => book.end(self.node, now, failed.tag, Err(&failed.error)),
            Some(CallEvent::Cancelled(request)) => {
                let left = state.calls.time_left(cx, request);
                if left.is_some() || !state.held.iter().any(|(held, _)| *held == request) {
                    book.wrong.push(format!("{request:?} is cancelled, and has {left:?} left"));
                }
            }
            Some(other) => book.wrong.push(format!("{other:?}")),
            None => {}
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.state.borrow_mut().calls.on_writable(cx, conn);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
        self.state.borrow_mut().calls.on_timer(cx, timer);
        self.look(cx);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        {
            let mut state = self.state.borrow_mut();
            state.calls.on_disconnect(conn, &reason);
            state.up.retain(|&up| up != conn);
            state.held.retain(|(request, _)| request.connection() != conn);
        }
        self.look(cx);
    }

    fn on_drain(&mut self, cx: &mut Context<'_>, _: Duration) {
        let ids: Vec<_> = cx.connection_ids().collect();
        ids.into_iter().for_each(|conn| self.state.borrow_mut().calls.finish(cx, conn));
    }
}

struct World {
    rng: Rng,
    fabric: Shared,
    book: Rc<RefCell<Book>>,
    nodes: [(Reactor, Side); 2],
    config: Config,
    more: [bool; 2],
    /// The server is stopped and runs no turns until this time, in ns.
    stopped: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let options = Options::draw(seed);
        let faults = FaultOptions { every: 0, kinds: Vec::new() };
        let fabric = Arc::new(Mutex::new(Fabric::new(seed, 2, options.net, faults, Trace::new(0))));
        let mut rng = Rng::new(seed, "calls");
        let config = Config::default()
            .buffer_size(256)
            .receive_depth(rng.skewed(5..=32) as u32)
            .send_depth(rng.skewed(1..=32) as u32)
            .completions(|c| c.per_turn = rng.skewed(1..=64) as u32)
            .timeouts(|t| {
                (t.keepalive_interval, t.keepalive) = (Duration::from_millis(200), Duration::from_millis(700));
                (t.flush, t.close) = (Duration::from_millis(50), Duration::from_millis(100));
            });
        let book = Rc::<RefCell<Book>>::default();
        let nodes =
            [SERVER, CLIENT].map(|node| (reactor(node, &fabric, config.clone()), Side::new(node, &book, &mut rng)));
        let mut world = Self { rng, fabric, book, nodes, config, more: [true; 2], stopped: 0 };
        world.listen();
        world
    }

    fn listen(&mut self) {
        self.nodes[SERVER].0.context().listen(address(SERVER, PORT)).expect("a listener");
    }

    fn now(&self) -> u64 {
        lock(&self.fabric).now()
    }

    /// Runs one turn of each node whose turn is due. If no turn is due, advances the virtual time instead. Then checks the promises.
    fn step(&mut self) {
        let now = self.now();
        let (mut next, mut idle) = (lock(&self.fabric).next(), true);
        for node in [SERVER, CLIENT] {
            if node == SERVER && now < self.stopped {
                next = next.into_iter().chain([self.stopped]).min();
                continue;
            }
            let (reactor, side) = &mut self.nodes[node];
            let due = reactor.next_deadline().map(virtual_ns);
            if self.more[node] || lock(&self.fabric).is_runnable(node, true) || due.is_some_and(|due| due <= now) {
                lock(&self.fabric).seen(node);
                self.more[node] = reactor.turn(side, Duration::ZERO).expect("a turn").more;
                idle = false;
            }
            next = next.into_iter().chain(due).min();
        }
        if idle {
            lock(&self.fabric).advance(next.map_or(now + MS, |next| next.max(now + 1)).min(now + MS));
        }
        self.look();
    }

    /// Checks that no promise is broken and that no call is overdue.
    fn look(&self) {
        let (book, now) = (self.book.borrow(), self.now());
        assert!(book.wrong.is_empty(), "{:?}", book.wrong);
        for (tag, made) in &book.made {
            assert!(now <= made.until, "call {tag} is in flight at {now}: {made:?}");
        }
        let violations = &lock(&self.fabric).violations;
        assert!(violations.is_empty(), "{violations:?}");
    }

    fn act(&mut self) {
        let ups = [SERVER, CLIENT].map(|node| self.nodes[node].1.state.borrow().up.clone());
        if ups[CLIENT].len() < 3 && (ups[CLIENT].is_empty() || self.rng.chance(100)) {
            // The connect may fail immediately, if no descriptors are left. A later action tries again.
            let _ = self.nodes[CLIENT].0.context().connect(address(SERVER, PORT));
        }
        // The client acts more often than the server. While the server is stopped, only the client acts.
        let is_stopped = self.now() < self.stopped;
        let node = if !is_stopped && self.rng.chance(400) { SERVER } else { CLIENT };
        self.more = [true; 2];
        match self.rng.below(100) {
            0..50 => {
                let burst = self.rng.skewed(1..=12);
                let conn = ups[node].get(self.rng.index(ups[node].len().max(1))).copied();
                (0..burst).for_each(|_| conn.into_iter().for_each(|conn| self.call(node, conn)));
            }
            50..80 => self.answer(if is_stopped { CLIENT } else { node }),
            80..86 => self.cancel(node),
            86..88 => self.with_connection(node, |cx, _, conn| cx.close(conn)),
            88..89 => self.with_connection(node, |cx, _, conn| cx.abort(conn)),
            89..91 => self.with_connection(node, |cx, calls, conn| calls.finish(cx, conn)),
            91..93 => {
                let (from, to) = self.rng.pick(&[(0, 1), (1, 0)]);
                lock(&self.fabric).silence(from, to);
            }
            93..96 => lock(&self.fabric).mend(),
            96..97 => self.restart(),
            97..98 => {
                self.stopped = self.now() + self.rng.skewed(MS..=300 * MS);
                // A stopped server can end its own calls only after it continues.
                let until = self.stopped + LATE;
                let mut book = self.book.borrow_mut();
                let own = book.made.values_mut().filter(|made| made.node == SERVER);
                own.for_each(|made| made.until = made.until.max(until));
            }
            _ => {}
        }
    }

    fn with_connection(&mut self, node: usize, act: impl FnOnce(&mut Context<'_>, &mut Calls<u64>, ConnectionId)) {
        let (reactor, side) = &mut self.nodes[node];
        let state = &mut *side.state.borrow_mut();
        if let Some(&conn) = state.up.first() {
            act(&mut reactor.context(), &mut state.calls, conn);
        }
    }

    fn call(&mut self, node: usize, conn: ConnectionId) {
        let book = &mut *self.book.borrow_mut();
        let tag = book.next;
        book.next += 1;
        let size = self.rng.pick(&[0_u64, 0, 40, 400, 3000]);
        let mut payload = vec![tag as u8; 8 + self.rng.skewed(0..=size) as usize];
        payload[..8].copy_from_slice(&tag.to_le_bytes());
        let within = match self.rng.below(100) {
            0..3 => 0,
            3..40 => self.rng.skewed(100_000..=400 * MS),
            _ => self.rng.range(20 * MS..=400 * MS),
        };
        let (reactor, side) = &mut self.nodes[node];
        let mut cx = reactor.context();
        let made = side.state.borrow_mut().calls.call(&mut cx, conn, &payload, Duration::from_nanos(within), tag);
        match made {
            Ok(id) => {
                if within == 0 {
                    book.never.insert(tag);
                }
                let until = virtual_ns(cx.now()) + within + LATE;
                book.made.insert(tag, Made { node, until, payload, id });
            }
            Err(RefusedCall { tag: back, .. }) => assert_eq!(back, tag),
        }
    }

    /// Answers or drops some of the requests that the node holds.
    fn answer(&mut self, node: usize) {
        let (reactor, side) = &mut self.nodes[node];
        let (state, mut cx) = (&mut *side.state.borrow_mut(), reactor.context());
        for _ in 0..self.rng.range(1..=30) {
            if state.held.is_empty() {
                return;
            }
            let (request, payload) = state.held.swap_remove(self.rng.index(state.held.len()));
            if self.rng.chance(50) {
                state.calls.dismiss(&mut cx, request);
            } else {
                // The answer fails if the connection has ended.
                let _ = state.calls.answer(&mut cx, request, &payload);
            }
        }
    }

    fn cancel(&mut self, node: usize) {
        let book = &mut *self.book.borrow_mut();
        let own: Vec<_> = book.made.iter().filter(|(_, made)| made.node == node).map(|(&tag, _)| tag).collect();
        if own.is_empty() {
            return;
        }
        let tag = own[self.rng.index(own.len())];
        let (reactor, side) = &mut self.nodes[node];
        let cancelled = side.state.borrow_mut().calls.cancel(&mut reactor.context(), book.made[&tag].id);
        // `cancel` returns `None` if the call has already ended. The program is then notified of the call's result in a later turn.
        if cancelled.is_some() {
            assert_eq!(cancelled, Some(tag));
            book.made.remove(&tag);
            book.tally.cancelled += 1;
        }
    }

    /// Kills the server or drains it, and starts a new one.
    fn restart(&mut self) {
        if self.rng.chance(500) {
            self.stopped = 0;
            self.nodes[SERVER].0.context().drain(Duration::from_nanos(self.rng.skewed(MS..=100 * MS)));
            self.more[SERVER] = true;
            for _ in 0..STEPS {
                if self.nodes[SERVER].0.is_drained() {
                    break;
                }
                self.step();
            }
            assert!(self.nodes[SERVER].0.is_drained(), "the drain does not end");
            assert!(
                self.book.borrow().made.values().all(|made| made.node == CLIENT),
                "a call has survived its reactor"
            );
        }
        self.book.borrow_mut().made.retain(|_, made| made.node == CLIENT);
        let side = Side::new(SERVER, &self.book, &mut self.rng);
        self.book.borrow_mut().tally.unmatched += self.nodes[SERVER].1.state.borrow().calls.stats().unmatched;
        // The sockets of the old server must be closed before the new one listens on the same port. So the old server is replaced by an
        // idle reactor first.
        let idle = reactor(SERVER, &self.fabric, self.config.clone());
        drop(std::mem::replace(&mut self.nodes[SERVER], (idle, side)));
        self.listen();
        self.more = [true; 2];
    }

    fn is_over(&self) -> bool {
        self.nodes.iter().all(|(reactor, _)| {
            let stats = reactor.stats();
            stats.connections.current == 0 && stats.memory.pool_buffers == stats.memory.pool_free
        })
    }
}

fn world(seed: u64) -> Tally {
    let mut world = World::new(seed);
    for _ in 0..ACTS {
        world.act();
        for _ in 0..world.rng.skewed(1..=100) {
            world.step();
        }
    }
    if world.rng.chance(500) {
        lock(&world.fabric).mend();
        world.stopped = 0;
    }
    let mut closed = false;
    for _ in 0..STEPS {
        world.step();
        let idle = world.book.borrow().made.is_empty();
        if idle && !std::mem::replace(&mut closed, idle) {
            lock(&world.fabric).mend();
            world.nodes[CLIENT].0.context().close_all();
            world.more = [true; 2];
        }
        if closed && world.is_over() {
            let own: u64 = world.nodes.iter().map(|(_, side)| side.state.borrow().calls.stats().unmatched).sum();
            let tally = world.book.borrow().tally;
            return Tally { unmatched: tally.unmatched + own, ..tally };
        }
    }
    panic!("not over in {STEPS} steps: {:?}, {:?}", world.nodes[0].0.stats(), world.nodes[1].0.stats());
}

#[test]
fn each_call_ends_once_within_its_time() {
    let mut sum = Tally::default();
    let worlds = each_world("CALL", world, |tally| {
        sum.answered += tally.answered;
        sum.late += tally.late;
        sum.overloaded += tally.overloaded;
        sum.draining += tally.draining;
        sum.disconnected += tally.disconnected;
        sum.unanswered += tally.unanswered;
        sum.cancelled += tally.cancelled;
        sum.unmatched += tally.unmatched;
    });
    println!("{worlds} worlds: {sum:?}");
    let Tally { answered, late, overloaded, draining, disconnected, unanswered, cancelled, unmatched } = sum;
    let often = [answered, late, overloaded, disconnected, cancelled].iter().all(|&count| count > worlds);
    let seen = [draining, unanswered, unmatched].iter().all(|&count| count > worlds / 20);
    assert!(worlds < 100 || (often && seen), "the worlds show little: {sum:?}");
}
