//! Limits in time, memory and number that peers run into, on virtual time. Most peers here speak the protocol by hand
//! (`docs/wire.md`), and are honest but for one thing.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rdma_reactor::stream::{StreamContext, StreamHandler, Streams};
use rdma_reactor::{
    Access, Blocked, Config, ConnectError, ConnectOptions, ConnectRequest, ConnectionId, Context, Decision,
    DisconnectReason, Framing, Handler, Message, Region, RegionOptions, RejectReason, RemoteRegion, SendErrorKind,
    TimerId,
};
use rdma_reactor_tests::conformance::violations::{HELLO, WINDOW, greeting, message};
use rdma_reactor_tests::peer::{SEND, fpdu_untagged};
use rdma_reactor_tests::sim::fabric::{Script, Shared, lock};
use rdma_reactor_tests::sim::hostile::Hostile;
use rdma_reactor_tests::sim::neighbour::Street;
use rdma_reactor_tests::sim::quiet::{Attempts, Node, network, reactor, until};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;
use rdma_transport::iwarp::wire::Untagged;

/// Octets in front of the payload of a frame, at most.
const HEADER: u64 = 24;
/// Kinds of messages.
const DATA: u8 = 0;
const PING: u8 = 3;
const PONG: u8 = 4;
const FRAGMENT: u8 = 10;
/// Silence after which a peer is asked, and after which it is given up, ms.
const INTERVAL: u64 = 50;
const TIMEOUT: u64 = 150;
const SLACK: u64 = 15;

fn config() -> Config {
    let ms = Duration::from_millis;
    Config::default().keepalive(ms(INTERVAL), ms(TIMEOUT)).flush_timeout(ms(10)).close_timeout(ms(20))
}

/// How the connections of a program have ended, and when, ns.
#[derive(Clone, Default)]
struct Ends(Rc<RefCell<Vec<(u64, DisconnectReason)>>>);

/// A program that does one thing when a connection is up, and notes how connections end.
struct Honest<F> {
    fabric: Shared,
    ends: Ends,
    up: F,
}

impl<F: FnMut(&mut Context<'_>, ConnectionId)> Handler for Honest<F> {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        (self.up)(cx, conn);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        let now = lock(&self.fabric).now();
        self.ends.0.borrow_mut().push((now, reason));
    }
}

/// A peer by hand. It answers questions, and never grants anything; or it sends the beginning of something, and nothing behind
/// it but Writes of nothing, which are signs of life.
struct Rude {
    /// Signs of life: answers, and Writes of nothing.
    signs: Rc<Cell<u32>>,
    first: Vec<u8>,
    region: Option<Region>,
}

impl Handler for Rude {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        cx.send(conn, &message(HELLO, WINDOW, &[])).expect("room");
        if !self.first.is_empty() {
            cx.send(conn, &self.first).expect("room");
            self.region = Some(cx.register(conn, 8, &RegionOptions::new()).expect("a region"));
            cx.set_timer(Duration::from_millis(INTERVAL / 2), 0);
        }
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let nowhere = RemoteRegion { address: 0, len: 0, key: 0 };
        let conn = cx.connection_ids().next();
        if let (Some(region), Some(conn)) = (&self.region, conn) {
            self.signs.set(self.signs.get() + u32::from(cx.write(conn, nowhere, region, 0..0).is_ok()));
            cx.set_timer(Duration::from_millis(INTERVAL / 2), 0);
        }
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message_in: Message<'_>) {
        if message_in.first() == Some(&PING) && self.region.is_none() {
            self.signs.set(self.signs.get() + 1);
            cx.send(conn, &message(PONG, WINDOW, &[])).expect("room");
        }
    }
}

/// A server with this program, and a peer by hand, which has begun to connect.
fn beside_rude(fabric: &Shared, server: Config, program: Box<dyn Handler>, rude: Rude) -> [Node; 2] {
    let mut nodes =
        [Node::new(reactor(0, fabric, server), program), Node::new(reactor(1, fabric, config()), Box::new(rude))];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let options = ConnectOptions::new().framing(Framing::Raw).private_data(greeting(WINDOW));
    nodes[1].reactor.context().connect_with(address(0, 7471), options).expect("connecting");
    nodes
}

/// Time that a slow callback takes, ms: longer than every limit of its program.
const THOUGHT: u64 = 500;

/// A program with a slow callback, which asks for something at its end.
struct Slow {
    fabric: Shared,
    attempts: Attempts,
    answer: Vec<u8>,
    /// What it asks for first, of three things.
    first: usize,
    /// Times at which a timer was set and has fired, ns.
    timer: Rc<RefCell<Vec<u64>>>,
}

impl Handler for Slow {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: Message<'_>) {
        let now = lock(&self.fabric).now() + THOUGHT * MS;
        lock(&self.fabric).advance(now);
        for what in self.first..self.first + 3 {
            match what % 3 {
                0 => {
                    self.timer.borrow_mut().push(now);
                    cx.set_timer(Duration::from_millis(30), 0);
                }
                1 => _ = cx.connect(address(2, 7471)).expect("connecting"),
                _ => {
                    cx.send(conn, &self.answer).expect("room");
                    cx.close(conn);
                }
            }
        }
    }
    fn on_timer(&mut self, _: &mut Context<'_>, _: TimerId, _: u64) {
        self.timer.borrow_mut().push(lock(&self.fabric).now());
    }
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.attempts.on_connect(cx, conn);
    }
    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.attempts.on_connect_error(cx, conn, error);
    }
}

/// Times count from the call, however long the callback has taken: that of a timer, of an attempt to connect, and of a close, before
/// which a large message arrives.
#[test]
fn times_count_from_the_call() {
    (0..3).for_each(times_count_from);
}

fn times_count_from(first: usize) {
    let (fabric, ends, attempts, timer) = (network(3), Ends::default(), Attempts::default(), Rc::default());
    let slow = Slow {
        fabric: fabric.clone(),
        attempts: attempts.clone(),
        answer: vec![9; 600_000],
        first,
        timer: Rc::clone(&timer),
    };
    let up = |cx: &mut Context<'_>, conn: ConnectionId| _ = cx.send(conn, b"begin").expect("room");
    let asks = Honest { fabric: fabric.clone(), ends: ends.clone(), up };
    let ms = Duration::from_millis;
    let limits = Config::default().connect_timeout(ms(100)).close_timeout(ms(100));
    let mut nodes = [
        Node::new(reactor(0, &fabric, limits), Box::new(slow)),
        Node::new(reactor(1, &fabric, Config::default()), Box::new(asks)),
        Node::new(reactor(2, &fabric, Config::default()), Box::new(Attempts::default())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[2].reactor.context().listen(address(2, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "the end", |_| {
        !ends.0.borrow().is_empty() && timer.borrow().len() == 2 && attempts.up.borrow().len() == 2
    });
    assert_eq!(ends.0.borrow()[0].1, DisconnectReason::Closed, "all was sent before the close ran out of time");
    assert_eq!(nodes[1].reactor.stats().messages.received, 1);
    assert!(attempts.errors.borrow().is_empty());
    let timer: Vec<u64> = timer.take();
    assert!(timer[1] >= timer[0] + 30 * MS, "set and fired at {timer:?}");
}

/// Row 48. A peer that answers each question and never grants anything is given up when the last credit for a question is used,
/// whether the program sends or not.
#[test]
fn a_peer_that_answers_and_never_grants_is_given_up() {
    for sends in [true, false] {
        let (fabric, ends, signs) = (network(2), Ends::default(), Rc::new(Cell::new(0)));
        let refused = Rc::new(Cell::new(None));
        let noted = Rc::clone(&refused);
        let up = move |cx: &mut Context<'_>, conn: ConnectionId| {
            while sends && noted.get().is_none() {
                noted.set(cx.send(conn, b"to the void").err());
            }
        };
        let program = Honest { fabric: fabric.clone(), ends: ends.clone(), up };
        let rude = Rude { signs: Rc::clone(&signs), first: Vec::new(), region: None };
        let mut nodes = beside_rude(&fabric, config(), Box::new(program), rude);
        until(&fabric, &mut nodes, "the end", |_| !ends.0.borrow().is_empty());
        let (at, reason) = ends.0.borrow()[0].clone();
        assert_eq!(reason, DisconnectReason::KeepaliveTimeout);
        assert_eq!(refused.get().is_some(), sends);
        assert!(refused.get().is_none_or(|error| error == SendErrorKind::WouldBlock(Blocked::Window)));
        let questions = u64::from(signs.get());
        assert!(questions > 0 && questions <= u64::from(WINDOW), "{questions} questions were answered");
        let limit = (questions + 1) * (INTERVAL + 1) + TIMEOUT + SLACK;
        assert!(at <= limit * MS, "{at} ns, {questions} questions");
        until(&fabric, &mut nodes, "the end", |nodes| nodes[1].reactor.stats().connections.current == 0);
    }
}

/// Row 52. A message whose last part never comes ends its connection after `transfer_timeout`, though its sender is alive.
#[test]
fn a_message_without_its_last_part_has_a_limit_in_time() {
    const LIMIT: u64 = 400;
    let (fabric, ends, signs) = (network(2), Ends::default(), Rc::new(Cell::new(0)));
    let mut part = message(FRAGMENT, WINDOW, b"the first of three");
    part[1] = 2;
    let program = Honest { fabric: fabric.clone(), ends: ends.clone(), up: |_: &mut Context<'_>, _| {} };
    let rude = Rude { signs: Rc::clone(&signs), first: part, region: None };
    let config = config().transfer_timeout(Duration::from_millis(LIMIT));
    let mut nodes = beside_rude(&fabric, config, Box::new(program), rude);
    until(&fabric, &mut nodes, "the end", |_| !ends.0.borrow().is_empty());
    let (at, reason) = ends.0.borrow()[0].clone();
    assert_eq!(reason, DisconnectReason::TransferTimeout);
    assert!(signs.get() > 10, "it was alive");
    assert!((LIMIT * MS..(LIMIT + SLACK) * MS).contains(&at), "{at} ns");
    let (all, free) = nodes[0].reactor.pool_levels();
    assert_eq!(all, free, "the buffers of the parts are free");
}

/// Row 55. A frame that comes octet by octet is no sign of life: its sender is given up as a silent one. A frame that comes in
/// larger pieces over a longer time arrives.
#[test]
fn a_frame_that_comes_octet_by_octet_has_a_limit_in_time() {
    let payload = vec![5; 8_000];
    for (piece, arrives) in [(1, false), (20, false), (1_000, true)] {
        let (fabric, ends, received) = (network(3), Ends::default(), Rc::new(Cell::new(0)));
        let program = Honest { fabric: fabric.clone(), ends: ends.clone(), up: |_: &mut Context<'_>, _| {} };
        let mut nodes = [Node::new(reactor(0, &fabric, config()), Box::new(program))];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        let mut peer = Hostile::new(&fabric);
        peer.open(address(0, 7471));
        let pause = |nodes: &mut [Node], time: u64| {
            let end = lock(&fabric).now() + time;
            lock(&fabric).schedule(end, Script::Tick);
            until(&fabric, nodes, "a pause", |_| lock(&fabric).now() >= end);
        };
        pause(&mut nodes, MS);
        peer.greet();
        pause(&mut nodes, MS);
        let begun = lock(&fabric).now();
        let frame = fpdu_untagged(&Untagged { msn: 2, ..SEND }, &message(DATA, WINDOW, &payload), true);
        for part in frame.chunks(piece) {
            peer.read();
            peer.send(part.to_vec());
            pause(&mut nodes, INTERVAL * MS);
            received.set(nodes[0].reactor.stats().messages.received);
            if !ends.0.borrow().is_empty() {
                break;
            }
        }
        assert_eq!((received.get() == 1, ends.0.borrow().is_empty()), (arrives, arrives), "pieces of {piece}");
        if !arrives {
            let (at, reason) = ends.0.borrow()[0].clone();
            assert_eq!(reason, DisconnectReason::KeepaliveTimeout);
            // The header of the frame counts once it is there, and each 512 octets of the rest.
            let signs = (HEADER / piece as u64 + 1) * INTERVAL;
            assert!(at - begun <= (signs + TIMEOUT + SLACK) * MS, "pieces of {piece}: after {} ns", at - begun);
        }
    }
}

/// Writes to each stream as much as there is room for, and closes it some time later.
struct Writer {
    fabric: Shared,
    over: Rc<Cell<Option<u64>>>,
    id: Option<ConnectionId>,
}

/// The time at which the writer closes its stream, ms.
const CLOSES: u64 = 1_000;

impl StreamHandler for Writer {
    fn on_open(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.id = Some(id);
        while cx.stream(id).write(&[7; 5_000]).is_ok() {}
        cx.context().set_timer(Duration::from_millis(CLOSES), 0);
    }
    fn on_readable(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {}
    fn on_timer(&mut self, cx: &mut StreamContext<'_>, _: TimerId, _: u64) {
        if let Some(id) = self.id {
            cx.stream(id).close();
        }
    }
    fn on_close(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {
        self.over.set(Some(lock(&self.fabric).now()));
    }
    fn on_error(&mut self, _: &mut StreamContext<'_>, _: ConnectionId, _: DisconnectReason) {
        self.over.set(Some(lock(&self.fabric).now()));
    }
}

/// Opens a stream and reads nothing of it.
struct Deaf;

impl StreamHandler for Deaf {
    fn on_readable(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {}
}

/// Row 54. A stream whose peer never reads stays open as long as that is alive, and is over within the linger time and that of
/// closing when it is closed. If the peer's process stands still, it is given up as any other.
#[test]
fn a_stream_to_a_peer_that_never_reads_has_limits_in_time() {
    const LINGER: u64 = 300;
    for stops in [false, true] {
        let (fabric, over) = (network(2), Rc::new(Cell::new(None)));
        let writer = Writer { fabric: fabric.clone(), over: Rc::clone(&over), id: None };
        let writer = Streams::new(writer).linger(Duration::from_millis(LINGER));
        let mut nodes = [
            Node::new(reactor(0, &fabric, config()), Box::new(writer)),
            Node::new(reactor(1, &fabric, config()), Box::new(Streams::new(Deaf))),
        ];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "some time", |_| lock(&fabric).now() > 10 * MS);
        nodes[1].dead = stops;
        until(&fabric, &mut nodes, "the end", |_| over.get().is_some());
        let at = over.get().expect("it is over");
        let limits = if stops { (TIMEOUT, 10 + TIMEOUT + SLACK) } else { (CLOSES, CLOSES + LINGER + 20 + SLACK) };
        assert!((limits.0 * MS..limits.1 * MS).contains(&at), "{stops}: {at} ns");
        let (all, free) = nodes[0].reactor.pool_levels();
        assert_eq!(all, free, "the writer's buffers are free");
    }
}

/// A server that shows the first peer one region, and keeps it.
struct Vault(Rc<RefCell<Option<Region>>>);

impl Handler for Vault {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if self.0.borrow().is_none() {
            let options = RegionOptions::new().allow(Access::REMOTE_READ | Access::REMOTE_WRITE);
            *self.0.borrow_mut() = Some(cx.register(conn, 64, &options).expect("a region"));
        }
    }
}

/// Tries one key when it is connected, by a Write or by a Read.
struct Guess {
    target: RemoteRegion,
    reads: bool,
    sink: Option<Region>,
    ended: Rc<Cell<u32>>,
}

impl Handler for Guess {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let mut region = cx.register(conn, 64, &RegionOptions::new()).expect("a region");
        let sent = if self.reads {
            cx.read(conn, self.target, &mut region, 0..8)
        } else {
            cx.write(conn, self.target, &region, 0..8)
        };
        assert!(sent.is_ok(), "{sent:?}");
        self.sink = Some(region);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        assert!(!matches!(reason, DisconnectReason::Local | DisconnectReason::KeepaliveTimeout), "{reason:?}");
        self.ended.set(self.ended.get() + 1);
    }
}

/// Row 56. A guess of a key costs the connection that it was made on, at once, also a guess that another peer's rights make
/// right; the memory stays as it was, and its owner goes on.
#[test]
fn each_guess_of_a_key_costs_its_connection() {
    let (fabric, vault) = (network(3), Rc::new(RefCell::new(None)));
    let mut nodes = vec![
        Node::new(reactor(0, &fabric, config()), Box::new(Vault(Rc::clone(&vault)))),
        Node::new(reactor(1, &fabric, config()), Box::new(Streams::new(Deaf))),
        Node::new(reactor(2, &fabric, config()), Box::new(Streams::new(Deaf))),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "the owner", |_| vault.borrow().is_some());
    let real = vault.borrow().as_ref().expect("just seen").remote();
    let ended = Rc::new(Cell::new(0));
    for (nth, key) in (0..40_u32).map(|nth| real.key.wrapping_add(nth.wrapping_mul(nth))).enumerate() {
        let target = RemoteRegion { key, ..real };
        nodes[2].handler = Box::new(Guess { target, reads: nth % 2 == 0, sink: None, ended: Rc::clone(&ended) });
        let begun = lock(&fabric).now();
        nodes[2].reactor.context().connect(address(0, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "the end", |nodes| {
            ended.get() == nth as u32 + 1 && nodes[0].reactor.stats().connections.disconnected == nth as u64 + 1
        });
        let took = lock(&fabric).now() - begun;
        assert!(took < 2 * MS, "key {key:#x}: after {took} ns");
        assert_eq!(nodes[0].reactor.stats().connections.current, 1, "the owner's connection");
    }
    let mut bytes = [1; 64];
    vault.borrow().as_ref().expect("it is kept").copy_to(0, &mut bytes);
    assert_eq!(bytes, [0; 64], "nobody has written");
}

/// Row 41. The pools never have more than `max_memory`. A connection past that is refused, by its reason, on the side that has the
/// limit; the others go on, and another one fits when one has ended.
#[test]
fn connections_past_max_memory_are_refused() {
    const MEMORY: usize = 1 << 20;
    // Either side has the limit in turn.
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

/// Requests whose senders close at once count towards `max_pending` until nothing of them is left, so that they take no more
/// connections and buffers than that.
#[test]
fn requests_that_are_taken_back_count_until_they_are_gone() {
    const PENDING: usize = 4;
    /// Buffers of a connection: for the receives, the sends, and two messages of the reactor.
    const BUFFERS: usize = 64 + 64 + 2;
    let mut street = Street::echoing(&config().max_pending(PENDING as u32));
    let fabric = Arc::clone(&street.fabric);
    let (mut sockets, mut acts, mut most) = (Vec::new(), 0_usize, (0, 0));
    street.until(300, 2_000, |nodes| {
        if sockets.is_empty() {
            sockets.extend((0..30).map(|_| Hostile::new(&fabric)));
        }
        // All open, and later all ask and go at once.
        for socket in &mut sockets {
            if acts % 20 == 0 {
                socket.open(address(0, 7471));
            } else if acts % 20 == 10 {
                socket.greet();
                socket.close(acts % 40 == 10);
            }
        }
        acts += 1;
        let stats = nodes[0].reactor.stats();
        most = (most.0.max(stats.connections.current), most.1.max(stats.memory.pool_buffers));
    });
    let refused = street.stats().connections.refused;
    assert!(refused > 100, "{refused} of {acts} requests were refused");
    // The client's connection has its buffers, too, and the pool grows by whole slabs.
    assert!(most.0 <= PENDING + 1 && most.1 <= 2 * (PENDING + 1) * BUFFERS, "{most:?} connections and buffers");
}

/// Takes long over each request.
struct Ponders(Shared, u64);

impl Handler for Ponders {
    fn on_connect_request(&mut self, _: &mut Context<'_>, _: ConnectRequest<'_>) -> Decision {
        let now = lock(&self.0).now();
        lock(&self.0).advance(now + self.1);
        Decision::Accept
    }
}

/// Row 16. Requests whose peers have given up before the program decides are counted as refused, and leave nothing; a quick
/// decision is as good as before.
#[test]
fn undecided_requests_are_counted() {
    const CLIENTS: u64 = 5;
    let (fabric, attempts) = (network(2), Attempts::default());
    let hasty = config().connect_timeout(Duration::from_millis(100)).handshake_timeout(Duration::from_millis(100));
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
