//! Limits on memory: each key is valid for one peer only, and peers may hold the memory for large messages only for some time. A send that
//! waits for memory is notified when it is free.

use rdma_reactor::{Transfer, TransferOptions};

use super::super::*;

/// A server that registers one region for its first peer, and keeps the region.
struct Vault(Rc<RefCell<Option<Region>>>);

impl Handler for Vault {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if self.0.borrow().is_none() {
            let options = RegionOptions::new().allow(Access::REMOTE_READ | Access::REMOTE_WRITE);
            *self.0.borrow_mut() = Some(cx.regions().register(conn, 64, &options).expect("a region"));
        }
    }
}

/// A program that, once it is connected, uses one guessed key in a Read or in a Write.
struct Guess {
    target: RemoteRegion,
    reads: bool,
    sink: Option<Region>,
    ended: Rc<Cell<u32>>,
}

impl Handler for Guess {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let mut region = cx.regions().register(conn, 64, &RegionOptions::new()).expect("a region");
        let sent = if self.reads {
            cx.remote(conn).read(self.target, &mut region, 0..8)
        } else {
            cx.remote(conn).write(self.target, &region, 0..8)
        };
        assert!(sent.is_ok(), "{sent:?}");
        self.sink = Some(region);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        assert!(!matches!(reason, DisconnectReason::Local { .. } | DisconnectReason::KeepaliveTimeout), "{reason:?}");
        self.ended.set(self.ended.get() + 1);
    }
}

/// Row 56 of `docs/reliability.md`. A wrong key ends the connection immediately, also a key that is valid for another peer. The region is
/// unchanged, and the connection of its rightful peer continues.
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

const OFFER: u8 = 6;
const PROGRESS: u8 = 11;
const SECOND: u64 = 1_000 * MS;
const MIB: usize = 1 << 20;

/// Returns the payload of an offer of a large message, which the receiver fetches by RDMA Reads.
fn offer(number: u32, region: RemoteRegion) -> Vec<u8> {
    [&number.to_le_bytes()[..], &[0; 4], &region.to_bytes()].concat()
}

/// A server that answers each message, and keeps the first `keeps` messages forever.
#[derive(Default)]
struct Answers {
    keeps: usize,
    kept: Vec<DetachedMessage>,
    ends: u32,
}

impl Handler for Answers {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        // The send fails if the peer grants no credits.
        let _ = cx.send(conn, b"here");
        if self.kept.len() < self.keeps {
            self.kept.push(message.detach());
        }
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        self.ends += 1;
    }
}

/// The times of the answers in ns, and the reason of the disconnect.
#[derive(Clone, Default)]
struct Log(Rc<RefCell<(Vec<u64>, Option<DisconnectReason>)>>);

impl Log {
    fn answers(&self) -> usize {
        self.0.borrow().0.len()
    }
    fn end(&self) -> Option<DisconnectReason> {
        self.0.borrow().1.clone()
    }
}

/// A program that sends `count` messages of `len` bytes, each after the answer to the previous one.
struct Asks {
    fabric: Shared,
    len: usize,
    count: usize,
    begun: u64,
    log: Log,
}

impl Asks {
    fn boxed(fabric: &Shared, len: usize, count: usize, log: &Log) -> Box<dyn Handler> {
        Box::new(Self { fabric: fabric.clone(), len, count, begun: 0, log: log.clone() })
    }
}

impl Handler for Asks {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.begun = lock(&self.fabric).now();
        if self.count > 0 {
            self.count -= 1;
            cx.send(conn, &vec![5; self.len]).expect("room");
        }
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: Message<'_>) {
        let took = lock(&self.fabric).now() - self.begun;
        self.log.0.borrow_mut().0.push(took);
        self.on_connect(cx, conn);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.log.0.borrow_mut().1 = Some(reason);
    }
}

/// Peers offer sixteen messages of 64 MiB each and answer no Reads, from one address or from several. They answer pings. They must not hold
/// memory for which an honest sender of such messages would have to wait.
#[test]
fn peers_that_answer_no_reads_hold_no_memory() {
    for count in [2, 8, 40] {
        for many in [false, true] {
            withheld(count, many);
        }
    }
}

fn withheld(count: usize, many: bool) {
    const LEN: usize = 64 * MIB;
    const ASKED: usize = 2;
    let (fabric, log) = (network(2 + count), Log::default());
    let mut nodes = vec![Node::new(reactor(0, &fabric, Config::default()), Box::<Answers>::default())];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let mut peers: Vec<_> = (0..count).map(|nth| Hostile::at(if many { 2 + nth } else { 2 }, &fabric)).collect();
    let pause = |nodes: &mut [Node], time: u64| {
        let end = lock(&fabric).now() + time;
        lock(&fabric).schedule(end, Script::Tick);
        until(&fabric, nodes, "a pause", |_| lock(&fabric).now() >= end);
    };
    for act in 0..3 {
        for peer in &mut peers {
            match act {
                0 => peer.open(address(0, 7471)),
                1 => peer.greet(),
                _ => (0..16).for_each(|number| {
                    let region = RemoteRegion { address: 0x1000, len: LEN as u64, key: number };
                    peer.message(&message(OFFER, 16, &offer(number, region)));
                }),
            }
        }
        pause(&mut nodes, 100 * MS);
    }
    assert_eq!(nodes[0].reactor.stats().connections.current, count, "all are up");
    nodes.push(Node::new(reactor(1, &fabric, Config::default()), Asks::boxed(&fabric, LEN, ASKED, &log)));
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    let (mut alive, end) = (0, lock(&fabric).now() + 60 * SECOND);
    until(&fabric, &mut nodes, "the answers", |_| {
        let now = lock(&fabric).now();
        if now >= alive {
            alive = now + SECOND;
            lock(&fabric).schedule(alive, Script::Tick);
            for peer in &mut peers {
                peer.read();
                peer.message(&message(PONG, 16, &[]));
            }
        }
        log.answers() == ASKED || log.end().is_some() || now > end
    });
    let (times, ended) = log.0.take();
    println!("{count} peers, of their own addresses: {many}: answers after {times:?} ns, {ended:?}");
    assert!(times.len() == ASKED && ended.is_none(), "{ended:?}");
    assert!(times.iter().all(|&time| time < 3 * SECOND), "{times:?} ns");
}

/// Returns settings with 16 MiB of memory for large messages. The last eighth is reserved for shorter messages, so only three messages of 4
/// MiB fit at the same time.
fn short_of_memory() -> Config {
    Config::default()
        .large_messages(|l| l.memory = 16 * MIB)
        .large_messages(|l| l.max_message = 4 << 20)
        .large_messages(|l| l.cache = 0)
}

/// Peers answer Reads at first, and then stall, some of them earlier than others. The server evicts a stalled peer when another peer waits
/// for the memory that the stalled peer holds. The waiting peers are delayed, but lose nothing.
#[test]
fn peers_that_stop_answering_give_way_to_those_that_wait() {
    for count in [2, 8, 40] {
        let (fabric, log) = (network(2 + count), Log::default());
        let mut nodes = vec![Node::new(reactor(0, &fabric, short_of_memory()), Box::<Answers>::default())];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        let nobody = Log::default();
        for nth in 0..count {
            let asks = Asks::boxed(&fabric, 4 * MIB, 2, &nobody);
            nodes.push(Node::new(reactor(1 + nth, &fabric, Config::default()), asks));
            nodes[1 + nth].reactor.context().connect(address(0, 7471)).expect("connecting");
            // The first three peers stall when they hold memory. Each further peer stalls after 5 ms, which is enough time to offer a
            // message and wait for memory.
            let end = lock(&fabric).now() + 5 * MS;
            lock(&fabric).schedule(end, Script::Tick);
            until(&fabric, &mut nodes, "an offer", |nodes| {
                let memory = nodes[0].reactor.stats().memory.fetched_bytes;
                if nth < 3 { memory == 4 * MIB * (nth + 1) } else { lock(&fabric).now() >= end }
            });
            nodes[1 + nth].dead = true;
        }
        nodes.push(Node::new(reactor(1 + count, &fabric, Config::default()), Asks::boxed(&fabric, 4 * MIB, 2, &log)));
        nodes[1 + count].reactor.context().connect(address(0, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "the answers", |_| log.answers() == 2 || log.end().is_some());
        let (times, ended) = log.0.take();
        println!("{count} peers: answers after {times:?} ns, {ended:?}");
        assert!(times.len() == 2 && ended.is_none(), "{ended:?}");
        // Three peers at a time hold the memory until their grace time ends, so the wait grows with the number of peers. The keepalive
        // limits the wait, because it ends all peers that are completely silent.
        let most = (2 * (count as u64 / 3 + 1) * SECOND).min(16 * SECOND);
        assert!(times.iter().all(|&time| time <= most), "{times:?} ns");
    }
}

/// A server has 64 MiB of memory for large messages. Three peers that answer pings but no Reads hold 4 MiB each. A sender on a slow path
/// holds memory for the first message of its first connection. Then another sender sends a message of `len` bytes. Returns three times in
/// ms: the time until the three peers were evicted, the time until the slow sender got its first answer, and the time until the other
/// sender got its answer. Neither sender may lose a connection.
fn beside_a_slow_one((slow_len, connections): (usize, usize), len: usize) -> [u64; 3] {
    const SILENT: usize = 3;
    const PERIOD: u64 = 900 * MS;
    const AWAKE: u64 = MS / 25;
    let (fabric, [slow, other]) = (network(3 + SILENT), [(); 2].map(|()| Log::default()));
    let server = Config::default().large_messages(|l| l.memory = 64 * MIB);
    let mut nodes = vec![Node::new(reactor(0, &fabric, server), Box::<Answers>::default())];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let held = |nodes: &[Node]| nodes[0].reactor.stats().memory.fetched_bytes;
    let mut silent: Vec<_> = (0..SILENT).map(|nth| Hostile::at(3 + nth, &fabric)).collect();
    for act in 0..3 {
        for peer in &mut silent {
            match act {
                0 => peer.open(address(0, 7471)),
                1 => peer.greet(),
                _ => {
                    let region = RemoteRegion { address: 0x1000, len: 4 << 20, key: 1 };
                    peer.message(&message(OFFER, 16, &offer(0, region)));
                }
            }
        }
        let end = lock(&fabric).now() + MS;
        lock(&fabric).schedule(end, Script::Tick);
        until(&fabric, &mut nodes, "a pause", |_| lock(&fabric).now() >= end);
    }
    assert_eq!(held(&nodes), 12 * MIB, "they have memory on trust");
    for (len, connections, log) in [(slow_len, connections, &slow), (len, 1, &other)] {
        let asks = Asks::boxed(&fabric, len, connections, log);
        let mut node = Node::new(reactor(nodes.len(), &fabric, Config::default()), asks);
        for _ in 0..connections {
            node.reactor.context().connect(address(0, 7471)).expect("connecting");
        }
        nodes.push(node);
        if nodes.len() == 2 {
            until(&fabric, &mut nodes, "the slow one has memory", |nodes| held(nodes) == 12 * MIB + slow_len);
        }
    }
    let (begun, mut window, mut alive, mut gone) = (lock(&fabric).now(), 0, 0, None);
    while slow.answers() == 0 || other.answers() == 0 || gone.is_none() {
        let now = lock(&fabric).now();
        if now >= window {
            window = now + PERIOD;
            lock(&fabric).schedule(window, Script::Tick);
            lock(&fabric).schedule(now + AWAKE, Script::Tick);
        }
        nodes[1].dead = now + PERIOD >= window + AWAKE;
        if now >= alive {
            alive = now + SECOND;
            for peer in &mut silent {
                peer.read();
                peer.message(&message(PONG, 16, &[]));
            }
        }
        step(&fabric, &mut nodes).unwrap_or_else(|(node, error)| panic!("node {node}: {error}"));
        let left = nodes[0].reactor.stats().connections.current - connections - 1;
        gone = gone.or_else(|| (left == 0).then(|| (now - begun) / MS));
        let ends = [slow.end(), other.end()];
        assert!(now < 100 * SECOND && ends == [None, None], "{now}: {ends:?}, {} bytes", held(&nodes));
    }
    let first = |log: &Log| log.0.borrow().0[0] / MS;
    let times = [gone.expect("just seen"), first(&slow), first(&other)];
    println!("the silent ones are gone after {} ms, and answers come after {:?} ms", times[0], &times[1..]);
    times
}

/// A message needs the whole memory, parts of which are held by a slow sender and by peers that answer no Reads. These peers are evicted
/// within their grace time, although the message must then still wait for the slow sender.
#[test]
fn peers_that_answer_no_reads_give_way_beside_a_slow_one() {
    let [gone, slow, large] = beside_a_slow_one((4 * MIB, 1), 64 * MIB);
    assert!(gone < 2_200 && (3_000..=slow).contains(&large), "nobody but the slow one was waited for");
}

/// A host has used its share of the memory for large messages, and its second message is the first in the queue for memory. This message
/// must wait until the host's first message releases memory. A message of another host is behind it in the queue. That message still gets
/// the memory that is taken from the peers that answer no Reads.
#[test]
fn a_host_that_waits_for_itself_hides_nobody() {
    let [_, slow, other] = beside_a_slow_one((28 * MIB, 2), 24 * MIB);
    assert!(other < 2_500 && slow > 20_000, "two of the three are enough");
}

/// Three senders on slow paths hold all the memory, and make progress. A fourth sender waits for memory longer than its transfer timeout.
/// All messages arrive, and no connection ends.
#[test]
fn slow_senders_are_served_and_waiting_for_memory_is_no_silence() {
    const SLOW: usize = 3;
    const PERIOD: u64 = 900 * MS;
    const AWAKE: u64 = MS / 25;
    let (fabric, logs) = (network(2 + SLOW), [(); SLOW + 1].map(|()| Log::default()));
    let mut nodes = vec![Node::new(
        reactor(0, &fabric, short_of_memory().timeouts(|t| t.transfer = Duration::from_secs(2))),
        Box::<Answers>::default(),
    )];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let limits = [30, 30, 30, 2].map(Duration::from_secs);
    let (mut window, mut opened) = (0, 1);
    while logs.iter().any(|log| log.answers() == 0) {
        let now = lock(&fabric).now();
        if opened <= SLOW + 1 {
            // The next sender connects when the previous ones hold their memory.
            let has_memory = nodes[0].reactor.stats().memory.fetched_bytes == 4 * MIB * (opened - 1);
            if has_memory {
                nodes[1..].iter_mut().for_each(|node| node.dead = true);
                let asks = Asks::boxed(&fabric, 4 * MIB, 1, &logs[opened - 1]);
                let client = Config::default().timeouts(|t| t.transfer = limits[opened - 1]);
                nodes.push(Node::new(reactor(opened, &fabric, client), asks));
                nodes[opened].reactor.context().connect(address(0, 7471)).expect("connecting");
                opened += 1;
            }
        } else {
            // Each slow sender runs only for `AWAKE` in each `PERIOD`. On average it sends about a mebibyte per second.
            if now >= window {
                window = now + PERIOD;
                lock(&fabric).schedule(window, Script::Tick);
                lock(&fabric).schedule(now + AWAKE, Script::Tick);
            }
            let asleep = now + PERIOD >= window + AWAKE;
            nodes[1..=SLOW].iter_mut().for_each(|node| node.dead = asleep);
        }
        step(&fabric, &mut nodes).unwrap_or_else(|(node, error)| panic!("node {node}: {error}"));
        assert!(now < 100 * SECOND, "{:?}", logs.each_ref().map(Log::answers));
        assert!(logs.iter().all(|log| log.end().is_none()), "{now}: {:?}", logs.each_ref().map(Log::end));
    }
    let times = logs.each_ref().map(|log| log.0.borrow().0[0] / MS);
    println!("answers after {times:?} ms");
    assert!(times[SLOW] > 2_000, "{times:?}: it had to wait for longer than its limit");
}

/// A receiver may report that it waits for its own memory. Such reports may delay the sender for at most four transfer timeouts.
#[test]
fn a_wait_for_the_peers_memory_has_a_limit_in_time() {
    const LIMIT: u64 = 2_000;
    let (fabric, logs) = (network(3), [(); 2].map(|()| Log::default()));
    let answers = Answers { keeps: 3, ..Answers::default() };
    let mut nodes = vec![Node::new(reactor(0, &fabric, short_of_memory()), Box::new(answers))];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    // Two connections are needed to use all of the memory, because one connection gets at most half of it.
    for (nth, log) in logs.iter().enumerate() {
        let client = Config::default().timeouts(|t| t.transfer = Duration::from_millis(LIMIT));
        let asks = Asks::boxed(&fabric, 4 * MIB, 4, log);
        nodes.push(Node::new(reactor(1 + nth, &fabric, client), asks));
        nodes[1 + nth].reactor.context().connect(address(0, 7471)).expect("connecting");
    }
    until(&fabric, &mut nodes, "the ends", |_| logs.iter().all(|log| log.end().is_some()));
    assert!(logs.iter().all(|log| log.end() == Some(DisconnectReason::TransferTimeout)));
    assert_eq!(logs.iter().map(Log::answers).sum::<usize>(), 3);
    let now = lock(&fabric).now();
    assert!((4 * LIMIT * MS..(4 * LIMIT + 100) * MS).contains(&now), "{now} ns");
}

/// A peer that encodes the protocol's messages itself. It offers one message, which can be fetched, and records the messages that it
/// receives.
struct Offerer {
    region: Option<Region>,
    got: Rc<RefCell<Vec<Vec<u8>>>>,
}

impl Handler for Offerer {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let options = RegionOptions::new().allow(Access::REMOTE_READ);
        let region = cx.regions().register(conn, 4 * MIB, &options).expect("a region");
        cx.send(conn, &message(HELLO, WINDOW, &[])).expect("room");
        cx.send(conn, &message(OFFER, WINDOW, &offer(7, region.remote()))).expect("room");
        self.region = Some(region);
    }
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.got.borrow_mut().push(message.to_vec());
    }
}

/// A receiver that waits for memory reports this to the peer, which would give up the message
/// otherwise.
#[test]
fn a_peer_is_told_of_a_wait_for_memory() {
    let (fabric, log, got) = (network(3), Log::default(), Rc::<RefCell<Vec<Vec<u8>>>>::default());
    let answers = Answers { keeps: 1, ..Answers::default() };
    // With one message of 4 MiB, the memory has no room for another one, because the last eighth is
    // reserved for shorter messages.
    let small = short_of_memory().large_messages(|l| l.memory = 8 * MIB);
    let offerer = Offerer { region: None, got: Rc::clone(&got) };
    let mut nodes = [
        Node::new(reactor(0, &fabric, small), Box::new(answers)),
        Node::new(reactor(1, &fabric, Config::default()), Asks::boxed(&fabric, 4 * MIB, 1, &log)),
        Node::new(reactor(2, &fabric, Config::default()), Box::new(offerer)),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "a message that is kept", |_| log.answers() == 1);
    let options = ConnectOptions::new().framing(Framing::Raw).private_data(greeting(WINDOW));
    nodes[2].reactor.context().connect_with(address(0, 7471), options).expect("connecting");
    let is_report = |message: &Vec<u8>| message[0] == PROGRESS;
    until(&fabric, &mut nodes, "a report", |_| got.borrow().iter().any(is_report));
}

/// A program that records its connections, and the connections for which `on_writable` was called.
#[derive(Clone, Default)]
struct Waits {
    up: Rc<Cell<usize>>,
    writable: Rc<RefCell<Vec<ConnectionId>>>,
}

impl Handler for Waits {
    fn on_connect(&mut self, _: &mut Context<'_>, _: ConnectionId) {
        self.up.set(self.up.get() + 1);
    }
    fn on_writable(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.writable.borrow_mut().push(conn);
    }
}

/// Returns a sender whose memory has room for one copy of 3,500,000 bytes, and its connections to `servers` servers. The servers grant
/// memory immediately, and send no messages. The sender is node 0. No timer of a connection runs out within an hour.
fn sender(fabric: &Shared, servers: usize) -> (Vec<Node>, Vec<ConnectionId>, Waits) {
    let hour = Duration::from_secs(3600);
    let config = Config::default()
        .receive_depth(8)
        .timeouts(|t| (t.keepalive_interval, t.keepalive, t.transfer) = (hour, 2 * hour, 2 * hour));
    let small = config.clone().large_messages(|l| (l.memory, l.max_message) = (5_000_000, 4_000_000));
    let waits = Waits::default();
    let mut nodes = vec![Node::new(reactor(0, fabric, small), Box::new(waits.clone()))];
    let mut conns = Vec::new();
    for server in 1..=servers {
        nodes.push(Node::new(reactor(server, fabric, config.clone()), Box::<Attempts>::default()));
        nodes[server].reactor.context().listen(address(server, 7471)).expect("a free port");
        conns.push(nodes[0].reactor.context().connect(address(server, 7471)).expect("connecting"));
    }
    until(fabric, &mut nodes, "all are up", |nodes| {
        let up = |node: &Node| node.reactor.stats().connections.connected == 1;
        waits.up.get() == servers && nodes[1..].iter().all(up)
    });
    (nodes, conns, waits)
}

/// Waits until the peer has fetched the only message of node 0. Checks that `on_writable` is called for `conn` at that time, and for no
/// other connection.
fn expect_writable(fabric: &Shared, nodes: &mut [Node], waits: &Waits, conn: ConnectionId) {
    assert!(waits.writable.borrow().is_empty(), "the memory is in use");
    until(fabric, nodes, "the message is fetched", |nodes| nodes[0].reactor.stats().memory.copied_bytes == 0);
    let free = lock(fabric).now();
    until(fabric, nodes, "the memory is free", |_| !waits.writable.borrow().is_empty());
    let took = lock(fabric).now() - free;
    assert!(took < MS, "on_writable came {took} ns after the memory was free");
    assert_eq!(waits.writable.borrow()[..], [conn]);
}

/// A send is refused because an earlier message of the same connection uses the memory. When the peer has fetched that message, the memory
/// is free, and `on_writable` is called in the same turn. The sender has nothing else to do then, so a later turn may be an hour away.
#[test]
fn a_send_that_waits_for_memory_is_not_forgotten() {
    let fabric = network(2);
    let (mut nodes, conns, waits) = sender(&fabric, 1);
    let message = vec![7; 3_500_000];
    nodes[0].reactor.context().send(conns[0], &message).expect("room");
    let refused = nodes[0].reactor.context().send(conns[0], &message);
    assert_eq!(refused, Err(SendErrorKind::WouldBlock(Blocked::Memory)));
    expect_writable(&fabric, &mut nodes, &waits, conns[0]);
}

/// A send is refused because the window is closed. When the window opens, the message of another connection uses the memory. When that
/// message is fetched, `on_writable` is called for the connection that was refused.
#[test]
fn a_send_that_waits_for_credits_and_then_for_memory_is_not_forgotten() {
    let fabric = network(3);
    let (mut nodes, conns, waits) = sender(&fabric, 2);
    let message = vec![7; 3_500_000];
    nodes[1..].iter_mut().for_each(|server| server.dead = true);
    let mut cx = nodes[0].reactor.context();
    cx.send(conns[0], &message).expect("room");
    while cx.writable(conns[1]) > 0 {
        cx.send(conns[1], b"x").expect("room");
    }
    assert_eq!(cx.send(conns[1], &message), Err(SendErrorKind::WouldBlock(Blocked::Window)));
    nodes[2].dead = false;
    while nodes[0].reactor.context().writable(conns[1]) == 0 {
        assert!(lock(&fabric).now() < SECOND, "the window never opens");
        step(&fabric, &mut nodes).unwrap_or_else(|(node, error)| panic!("node {node}: {error}"));
    }
    nodes[1].dead = false;
    expect_writable(&fabric, &mut nodes, &waits, conns[1]);
}

const SMALL: usize = 70_000;
const HELD: usize = 22;

/// Makes `conns[0]` wait for memory for a long message, so that it holds back the sends of other
/// connections. Sends [`HELD`] messages of [`SMALL`] bytes on `conns[2..]`, and makes `conns[1]`
/// wait behind the long message. From then on, the servers fetch nothing.
fn hold_back(nodes: &mut [Node], conns: &[ConnectionId]) {
    nodes[1..].iter_mut().for_each(|server| server.dead = true);
    let (long, behind, busy) = (conns[0], conns[1], &conns[2..]);
    let message = vec![7; SMALL];
    let send = |cx: &mut Context<'_>, count: usize| {
        for _ in 0..count {
            let conn = busy
                .iter()
                .copied()
                .find(|&conn| cx.connection(conn).writable_for(SMALL))
                .expect("room on one of them");
            cx.send(conn, &message).expect("room");
        }
    };
    let mut cx = nodes[0].reactor.context();
    send(&mut cx, 6);
    assert_eq!(cx.send(long, &vec![7; 4_000_000]), Err(SendErrorKind::WouldBlock(Blocked::Memory)));
    // After 16 other messages were accepted, the long message holds back all others.
    send(&mut cx, HELD - 6);
    assert_eq!(cx.send(behind, &message), Err(SendErrorKind::WouldBlock(Blocked::Memory)));
}

/// Checks that `on_writable` is called for `behind` immediately, and that the memory of no message is released before.
fn expect_behind(fabric: &Shared, nodes: &mut [Node], waits: &Waits, behind: ConnectionId, messages: usize) {
    let begun = lock(fabric).now();
    until(fabric, nodes, "the other one may send", |_| !waits.writable.borrow().is_empty());
    let took = lock(fabric).now() - begun;
    assert!(took < MS, "on_writable came {took} ns after the end");
    assert_eq!(waits.writable.borrow()[..], [behind]);
    assert_eq!(nodes[0].reactor.stats().memory.copied_bytes, messages * SMALL, "no memory was released");
}

/// A connection waits for memory for a long message, and holds back the sends of others. When this
/// connection ends, `on_writable` is called for the connection that was held back only by it,
/// although no memory is released.
#[test]
fn a_send_behind_one_that_waits_and_ends_is_not_forgotten() {
    let fabric = network(11);
    let (mut nodes, conns, waits) = sender(&fabric, 10);
    hold_back(&mut nodes, &conns);
    nodes[0].reactor.context().abort(conns[0]);
    expect_behind(&fabric, &mut nodes, &waits, conns[1], HELD);
}

/// A connection waits for memory for a long message, and holds back the sends of others. It then
/// sends a shorter message, which is accepted. After this, `on_writable` is called for the
/// connection that was held back only by it, although no memory is released.
#[test]
fn a_send_behind_one_that_sends_something_else_is_not_forgotten() {
    let fabric = network(11);
    let (mut nodes, conns, waits) = sender(&fabric, 10);
    hold_back(&mut nodes, &conns);
    nodes[0].reactor.context().send(conns[0], &[7; SMALL]).expect("memory");
    expect_behind(&fabric, &mut nodes, &waits, conns[1], HELD + 1);
}

/// A server that answers each message, and keeps it. When its timer fires, it begins a transfer from its first message, drops that message
/// while the transfer is in progress, and sends something to its second client.
#[derive(Clone, Default)]
struct Shelf {
    up: Rc<RefCell<Vec<ConnectionId>>>,
    kept: Rc<RefCell<Vec<DetachedMessage>>>,
}

impl Handler for Shelf {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.up.borrow_mut().push(conn);
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        cx.send(conn, b"here").expect("room");
        self.kept.borrow_mut().push(message.detach());
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let up = self.up.borrow();
        let region = self.kept.borrow_mut().remove(0).into_region().expect("it was fetched");
        let within = TransferOptions::within(Duration::from_secs(3600));
        cx.remote(up[0]).transfer(Transfer::Write(&[&region]), Vec::new(), &within).expect("it is open");
        drop(region);
        cx.send(up[1], b"something").expect("room");
    }
}

/// Two connections wait for memory, and the last memory belongs to a transfer on the first one. A
/// flush posts the first connection, and then the second one. The memory of the transfer, which has
/// ended, is released only while the second one is posted. Even so, the first connection gets this
/// memory.
#[test]
fn memory_that_is_released_while_connections_are_posted_reaches_those_posted_before() {
    let (fabric, shelf) = (network(3), Shelf::default());
    // The memory has room for one message of 4 MiB.
    let small = short_of_memory().large_messages(|l| l.memory = 8 * MIB);
    let (first, second) = (Log::default(), Log::default());
    let mut nodes = [
        Node::new(reactor(0, &fabric, small), Box::new(shelf.clone())),
        Node::new(reactor(1, &fabric, Config::default()), Asks::boxed(&fabric, 4 * MIB, 2, &first)),
        Node::new(reactor(2, &fabric, Config::default()), Asks::boxed(&fabric, 4 * MIB, 1, &second)),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "a message that is kept", |_| first.answers() == 1);
    nodes[2].reactor.context().connect(address(0, 7471)).expect("connecting");
    let calm = lock(&fabric).now() + 100 * MS;
    until(&fabric, &mut nodes, "both wait for memory", |_| lock(&fabric).now() > calm);
    assert_eq!((shelf.up.borrow().len(), shelf.kept.borrow().len()), (2, 1));
    nodes[0].reactor.context().timers().set(Duration::ZERO, 0);
    let end = lock(&fabric).now() + SECOND;
    until(&fabric, &mut nodes, "the next message", |_| first.answers() == 2 || lock(&fabric).now() > end);
    assert_eq!(first.answers(), 2, "it waits for ever");
}

/// The program keeps a message of a connection. Another connection of the same host waits, because
/// the host has used its share of the memory. When the first connection ends, its message no longer
/// counts for the host. The other connection gets memory immediately, and not only when its next
/// report is due.
#[test]
fn the_end_of_a_connection_gives_its_share_to_others_of_its_host() {
    let (fabric, shelf) = (network(2), Shelf::default());
    // A host may use 4 MiB.
    let small = short_of_memory().large_messages(|l| l.memory = 8 * MIB);
    let (first, second) = (Log::default(), Log::default());
    let mut nodes = [
        Node::new(reactor(0, &fabric, small), Box::new(shelf.clone())),
        Node::new(reactor(1, &fabric, Config::default()), Asks::boxed(&fabric, 3 * MIB, 1, &first)),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "a message that is kept", |_| first.answers() == 1);
    nodes[1].handler = Asks::boxed(&fabric, 3 * MIB, 1, &second);
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    let calm = lock(&fabric).now() + 100 * MS;
    until(&fabric, &mut nodes, "one waits for memory", |_| lock(&fabric).now() > calm);
    assert_eq!((shelf.up.borrow().len(), shelf.kept.borrow().len()), (2, 1));
    let ends = shelf.up.borrow()[0];
    nodes[0].reactor.context().abort(ends);
    let begun = lock(&fabric).now();
    until(&fabric, &mut nodes, "the other message", |_| second.answers() == 1);
    let took = lock(&fabric).now() - begun;
    assert!(took < SECOND / 2, "after {took} ns");
}
