//! Limits on time: slow callbacks, peers that send too slowly or not at all, and peers that never read.

use super::super::*;

/// The time that a slow callback takes, in ms. It is longer than each time limit of its program.
const THOUGHT: u64 = 500;

/// A program with a slow callback, which makes three requests at its end: it sets a timer, it connects, and it sends a message and closes
/// the connection. `first` selects the request that is made first.
struct Slow {
    fabric: Shared,
    attempts: Attempts,
    answer: Vec<u8>,
    /// The request that is made first: 0 is the timer, 1 is the connect, and 2 is the close.
    first: usize,
    /// The time at which the timer was set, and the time at which it has fired, in ns.
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
                    cx.timers().set(Duration::from_millis(30), 0);
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

/// The time limit of a request counts from the call that makes the request, and not from the beginning of the callback. This holds for a
/// timer, a connect, and a close after a large message, however long the callback ran before the call.
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
    let limits = Config::default().timeouts(|t| t.connect = ms(100)).timeouts(|t| t.close = ms(100));
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

/// A program whose timers and whose `on_connect_request` take a long time.
#[derive(Clone)]
struct Thinker {
    fabric: Shared,
    attempts: Attempts,
}

impl Thinker {
    fn think(&self) {
        let now = lock(&self.fabric).now() + THOUGHT * MS;
        lock(&self.fabric).advance(now);
    }
}

impl Handler for Thinker {
    fn on_connect_request(&mut self, _: &mut Context<'_>, _: ConnectRequest<'_>) -> Decision {
        self.think();
        Decision::Accept
    }
    fn on_timer(&mut self, _: &mut Context<'_>, _: TimerId, _: u64) {
        self.think();
    }
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.attempts.on_connect(cx, conn);
    }
    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.attempts.on_connect_error(cx, conn, error);
    }
}

/// The time limit of an attempt to connect counts from the beginning of the attempt, although a
/// callback of the same turn has taken longer than this limit. The slow callback is tested after
/// every step of the first attempt, also in the turn in which the second attempt begins.
#[test]
fn the_time_of_an_attempt_counts_from_its_beginning() {
    let limit = Duration::from_millis(100);
    for steps in 0..1000 {
        let (fabric, attempts) = (network(3), Attempts::default());
        let thinker = Thinker { fabric: fabric.clone(), attempts: attempts.clone() };
        let limits = Config::default().timeouts(|t| (t.connect, t.attempt) = (limit, limit));
        let mut nodes = [
            Node::new(reactor(0, &fabric, limits), Box::new(thinker)),
            Node::new(reactor(1, &fabric, Config::default()), Box::new(Attempts::default())),
            Node::new(reactor(2, &fabric, Config::default()), Box::new(Attempts::default())),
        ];
        // Nobody listens on the first address.
        nodes[2].reactor.context().listen(address(2, 7471)).expect("a free port");
        let peers = [address(1, 7471), address(2, 7471)];
        let conn = nodes[0].reactor.context().connect_any(&peers, ConnectOptions::new()).expect("connecting");
        for _ in 0..steps {
            step(&fabric, &mut nodes).expect("a turn");
        }
        if nodes[0].reactor.context().connection(conn).peer_address() != Some(peers[0]) {
            assert!(steps > 1, "the first attempt takes several steps");
            return;
        }
        nodes[0].reactor.context().timers().set(Duration::ZERO, 0);
        until(&fabric, &mut nodes, "the outcome", |_| {
            !attempts.up.borrow().is_empty() || !attempts.errors.borrow().is_empty()
        });
        assert!(attempts.errors.borrow().is_empty(), "after {steps} steps: {:?}", attempts.errors);
    }
    panic!("the first attempt never ends");
}

/// A program that always has a timer of zero: its work is in slices, one for each timer.
struct Slices(Rc<RefCell<u64>>);

impl Handler for Slices {
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        *self.0.borrow_mut() += 1;
        cx.timers().set(Duration::ZERO, 0);
    }
}

/// A turn calls `on_timer` once for a timer of zero that is set again in each callback, so the reactor serves its connections between the
/// callbacks. The simulated clock advances each time that it is read, so each timer has expired when the next one is looked for. Timers
/// that are set at an unchanged time are the subject of a unit test of the timers.
#[test]
fn work_in_slices_has_one_slice_in_each_turn() {
    let (fabric, slices) = (network(1), Rc::new(RefCell::new(0)));
    let mut nodes = [Node::new(reactor(0, &fabric, Config::default()), Box::new(Slices(Rc::clone(&slices))))];
    nodes[0].reactor.context().timers().set(Duration::ZERO, 0);
    for _ in 0..100 {
        step(&fabric, &mut nodes).expect("a turn");
    }
    let turns = nodes[0].reactor.stats().turns.taken;
    assert!((50..=turns).contains(&slices.borrow()), "{} slices in {turns} turns", slices.borrow());
}

/// The time limit of a handshake counts from the acceptance of the request, although `on_connect_request` has taken longer than this limit.
#[test]
fn the_time_of_a_handshake_counts_from_the_acceptance() {
    let (fabric, attempts) = (network(2), Attempts::default());
    let thinker = Thinker { fabric: fabric.clone(), attempts: attempts.clone() };
    let limits = Config::default().timeouts(|t| t.handshake = Duration::from_millis(100));
    let client = Attempts::default();
    let mut nodes = [
        Node::new(reactor(0, &fabric, limits), Box::new(thinker)),
        Node::new(reactor(1, &fabric, Config::default()), Box::new(client.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "the outcome", |nodes| {
        nodes[0].reactor.stats().connections.refused > 0 || !attempts.up.borrow().is_empty()
    });
    assert_eq!(attempts.up.borrow().len(), 1, "{:?}", nodes[0].reactor.stats().connections);
    assert!(client.errors.borrow().is_empty());
}

/// A server takes no turns for longer than the time limit of a handshake. Meanwhile the client
/// sends everything that the handshake needs, over TCP or in shared memory. The client was not
/// silent for longer than the limit, so the connection is established. The pause is tested after
/// every step.
#[test]
fn the_absence_of_a_server_is_not_the_silence_of_its_client() {
    for one_host in [false, true] {
        the_absence_of_a_server(one_host);
    }
}

fn the_absence_of_a_server(one_host: bool) {
    const LIMIT: u64 = 100;
    let mut accepted = false;
    for steps in 0..1000 {
        let (fabric, server, client) = (network(2), Attempts::default(), Attempts::default());
        lock(&fabric).one_host = one_host;
        let limits = Config::default().timeouts(|t| t.handshake = Duration::from_millis(LIMIT));
        let mut nodes = [
            Node::new(reactor(0, &fabric, limits), Box::new(server.clone())),
            Node::new(reactor(1, &fabric, Config::default()), Box::new(client.clone())),
        ];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        for _ in 0..steps {
            step(&fabric, &mut nodes).expect("a turn");
        }
        if !server.up.borrow().is_empty() {
            assert!(accepted, "the server is absent during the handshake");
            return;
        }
        accepted |= nodes[0].reactor.stats().connections.current > 0;
        nodes[0].dead = true;
        until(&fabric, &mut nodes, "the client has sent everything", |nodes| {
            let mut fabric = lock(&fabric);
            !nodes[1].more && !fabric.is_runnable(1, true) && fabric.next().is_none()
        });
        let now = lock(&fabric).now();
        lock(&fabric).advance(now + 2 * LIMIT * MS);
        nodes[0].dead = false;
        until(&fabric, &mut nodes, "the outcome", |nodes| {
            nodes[0].reactor.stats().connections.refused > 0 || !server.up.borrow().is_empty()
        });
        assert_eq!(server.up.borrow().len(), 1, "after {steps} steps: {:?}", nodes[0].reactor.stats().connections);
        until(&fabric, &mut nodes, "the client", |_| !client.up.borrow().is_empty());
    }
    panic!("the connection never comes up");
}

/// A node takes no turn for longer than its `Timeouts::transfer`. Meanwhile the peer does its part
/// of the transfer. The node must not count its own absence as silence of the peer, so the message
/// arrives. The pause is tested after every step of a large message.
#[test]
fn an_absence_in_a_transfer_is_not_the_peers() {
    for absent in 0..2 {
        let lasts = |steps| !absent_in_a_transfer(absent, steps);
        let steps = (0..1000).take_while(|&steps| lasts(steps)).count();
        assert!((3..1000).contains(&steps), "node {absent} was absent after each of {steps} steps");
    }
}

/// Node 0 sends a message to node 1. After `steps` steps, the node `absent` takes no turn for a while. Returns true if the transfer was
/// over before.
fn absent_in_a_transfer(absent: usize, steps: usize) -> bool {
    const LIMIT: u64 = 400;
    let (fabric, ends) = (network(2), Ends::default());
    let up = |cx: &mut Context<'_>, conn: ConnectionId| _ = cx.send(conn, &[7; 300_000]).expect("room");
    let sender = Honest { fabric: fabric.clone(), ends: ends.clone(), up };
    let limits = |node: usize| {
        let limit = if node == absent { Duration::from_millis(LIMIT) } else { HOUR };
        patient(Config::default()).timeouts(|t| t.transfer = limit).large_messages(|l| l.eager_limit = 0)
    };
    let mut nodes = [
        Node::new(reactor(0, &fabric, limits(0)), Box::new(sender)),
        Node::new(reactor(1, &fabric, limits(1)), Box::new(Attempts::default())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "the offer", |nodes| nodes[0].reactor.stats().connections.connected == 1);
    (0..steps).for_each(|_| step(&fabric, &mut nodes).expect("a turn"));
    if nodes[1].reactor.stats().messages.received == 1 {
        return true;
    }
    nodes[absent].dead = true;
    let back = lock(&fabric).now() + 10 * LIMIT * MS;
    lock(&fabric).schedule(back, Script::Tick);
    until(&fabric, &mut nodes, "the absence is over", |_| lock(&fabric).now() >= back);
    nodes[absent].dead = false;
    until(&fabric, &mut nodes, "the outcome", |nodes| {
        !ends.0.borrow().is_empty() || nodes[1].reactor.stats().messages.received == 1
    });
    assert!(ends.0.borrow().is_empty(), "node {absent} is absent after {steps} steps: {:?}", ends.0.borrow());
    false
}

/// Row 48 of `docs/reliability.md`. A peer answers each ping but never grants credits. Its connection ends when the last credit for a ping
/// is used, whether or not the program sends.
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

/// Row 52 of `docs/reliability.md`. If the last part of a message never arrives, the connection ends after `Timeouts::transfer`, although
/// the sender is alive.
#[test]
fn a_message_without_its_last_part_has_a_limit_in_time() {
    const LIMIT: u64 = 400;
    let (fabric, ends, signs) = (network(2), Ends::default(), Rc::new(Cell::new(0)));
    let mut part = message(FRAGMENT, WINDOW, b"the first of three");
    part[1] = 2;
    let program = Honest { fabric: fabric.clone(), ends: ends.clone(), up: |_: &mut Context<'_>, _| {} };
    let rude = Rude { signs: Rc::clone(&signs), first: part, region: None };
    let config = config().timeouts(|t| t.transfer = Duration::from_millis(LIMIT));
    let mut nodes = beside_rude(&fabric, config, Box::new(program), rude);
    until(&fabric, &mut nodes, "the end", |_| !ends.0.borrow().is_empty());
    let (at, reason) = ends.0.borrow()[0].clone();
    assert_eq!(reason, DisconnectReason::TransferTimeout);
    assert!(signs.get() > 10, "it was alive");
    assert!((LIMIT * MS..(LIMIT + SLACK) * MS).contains(&at), "{at} ns");
    let (all, free) = nodes[0].reactor.pool_levels();
    assert_eq!(all, free, "the buffers of the parts are free");
}

/// Row 55 of `docs/reliability.md`. A frame that arrives byte by byte is no sign of life, so its sender counts as silent. A frame that
/// arrives in larger pieces is received, although it takes longer than the timeout.
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
            // The complete header of the frame is a sign of life, and so is each further piece of 512 bytes.
            let signs = (HEADER / piece as u64 + 1) * INTERVAL;
            assert!(at - begun <= (signs + TIMEOUT + SLACK) * MS, "pieces of {piece}: after {} ns", at - begun);
        }
    }
}

/// A program that writes to its stream until the stream is full, and closes the stream at the time `CLOSES`.
struct Writer {
    fabric: Shared,
    over: Rc<Cell<Option<u64>>>,
    id: Option<ConnectionId>,
}

/// The time at which the writer closes its stream, in ms.
const CLOSES: u64 = 1_000;

impl StreamHandler for Writer {
    fn on_open(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.id = Some(id);
        while cx.stream(id).write(&[7; 5_000]).is_ok() {}
        cx.context().timers().set(Duration::from_millis(CLOSES), 0);
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

/// Row 54 of `docs/reliability.md`. A stream whose peer never reads stays open as long as the peer is alive. After a close it ends within
/// the linger time and the close timeout. If the peer's process stalls, the stream ends by the keepalive timeout.
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

/// A program that sends a message in parts of one byte. The pause between two parts is a little shorter than `Timeouts::transfer`, so a
/// timeout that began again with each part would never expire. RDMA Writes of zero bytes, as signs of life, precede and follow each part.
struct Drip {
    left: u8,
    ticks: u64,
    region: Option<Region>,
}

impl Drip {
    fn part(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.left -= 1;
        let mut part = message(FRAGMENT, WINDOW, b"x");
        part[1] = self.left;
        cx.send(conn, &part).expect("room");
    }
}

impl Handler for Drip {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        cx.send(conn, &message(HELLO, WINDOW, &[])).expect("room");
        self.region = Some(cx.regions().register(conn, 8, &RegionOptions::new()).expect("a region"));
        self.part(cx, conn);
        cx.timers().set(Duration::from_millis(10), 0);
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let nowhere = RemoteRegion { address: 0, len: 0, key: 0 };
        let Some(conn) = cx.connection_ids().next() else { return };
        self.ticks += 1;
        if let Some(region) = &self.region {
            let _ = cx.remote(conn).write(nowhere, region, 0..0);
        }
        if self.ticks % 38 == 0 && self.left > 0 {
            self.part(cx, conn);
        }
        cx.timers().set(Duration::from_millis(10), 0);
    }
}

/// `Timeouts::transfer` limits the time of a message as a whole, so its sender gains no time with each part.
#[test]
fn a_message_in_parts_has_one_limit_in_time_as_a_whole() {
    const LIMIT: u64 = 400;
    let (fabric, ends) = (network(2), Ends::default());
    let program = Honest { fabric: fabric.clone(), ends: ends.clone(), up: |_: &mut Context<'_>, _| {} };
    let server = config().timeouts(|t| t.transfer = Duration::from_millis(LIMIT));
    let drip = Drip { left: 60, ticks: 0, region: None };
    let mut nodes = [
        Node::new(reactor(0, &fabric, server), Box::new(program)),
        Node::new(reactor(1, &fabric, config()), Box::new(drip)),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let options = ConnectOptions::new().framing(Framing::Raw).private_data(greeting(WINDOW));
    nodes[1].reactor.context().connect_with(address(0, 7471), options).expect("connecting");
    until(&fabric, &mut nodes, "the end", |nodes| {
        !ends.0.borrow().is_empty() || nodes[0].reactor.stats().messages.received > 0
    });
    let (at, reason) = ends.0.borrow().first().cloned().expect("the message must not arrive");
    assert_eq!(reason, DisconnectReason::TransferTimeout);
    assert!((LIMIT * MS..(LIMIT + SLACK) * MS).contains(&at), "{at} ns");
}
