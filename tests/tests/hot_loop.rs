//! A reactor whose polling always finds completions must still serve timers, descriptors and other
//! threads. A reactor whose polling finds nothing must let its peer run on the same processor. A
//! message that completes when it is posted must be sent in the same turn.
//!
//! The provider of most of these tests returns each sent message immediately, so that polling always finds work. Each reading of the clock
//! advances the time.

use std::cell::Cell;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectionId, Context, Handler, Interest, IoId, Message, ProviderChoice, Reactor, ReactorHandle, Reactors,
    Readiness, TimerId, Wait,
};
use rdma_reactor_tests::null::Null;
use rdma_reactor_tests::patience::patient;
use rdma_reactor_tests::sim::quiet::{Counts, Node, network, reactor, until};
use rdma_reactor_tests::sim::tcp::address;
use rdma_reactor_tests::steady::Steps;

/// The number of round trips of the load before the program makes its request.
const BEFORE: u64 = 10_000;
/// The number of round trips after which the request is late. Descriptors are polled some hundred times until then.
const LATE: u64 = 1_000_000;

const SPIN: Wait = Wait::Spin(Duration::from_secs(60));

/// The event for which a program under load waits.
enum Wanted {
    /// The program's own descriptor becomes readable. The descriptor is one end of a socket pair. The program writes to the other end,
    /// which is this stream.
    Edge(UnixStream),
    /// A timer of the program fires.
    Timer,
    /// Another thread sends a message to the reactor.
    Call(ReactorHandle),
}

/// A program that always has one message in flight, and requests one event.
struct Loaded {
    wanted: Wanted,
    conn: Option<ConnectionId>,
    round_trips: u64,
    served: bool,
}

impl Loaded {
    fn serve(&mut self, cx: &mut Context<'_>) {
        self.served = true;
        cx.stop();
    }
}

impl Handler for Loaded {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.round_trips += 1;
        if self.round_trips == BEFORE {
            match &mut self.wanted {
                Wanted::Edge(far) => far.write_all(b"x").expect("room for a byte"),
                Wanted::Timer => drop(cx.timers().set(Duration::from_millis(2), 0)),
                Wanted::Call(remote) => remote.post(()).expect("room for a message"),
            }
        }
        if self.round_trips > LATE {
            return cx.stop();
        }
        cx.send(conn, &message).expect("room for one message");
    }
    fn on_io_ready(&mut self, cx: &mut Context<'_>, _: IoId, _: Readiness) {
        if self.round_trips >= BEFORE {
            self.serve(cx);
        }
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        self.serve(cx);
    }
    fn on_wake(&mut self, cx: &mut Context<'_>, _: ()) {
        self.serve(cx);
    }
}

/// A program that sends nothing, and counts the received messages.
#[derive(Default)]
struct Peer {
    conn: Option<ConnectionId>,
    received: u64,
}

impl Handler for Peer {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
    }
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {
        self.received += 1;
    }
}

/// Runs a reactor under load, with an event that the program requests. Fails if the event is not served within `LATE` round trips.
fn served_under_load(wanted: impl FnOnce(&mut Reactor) -> Wanted) {
    let config = Config::default().wait(SPIN);
    let ([mut client, mut server], mirror) = Null::reactors(&config, || Box::new(Steps::new()));
    let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a listener");
    let address = server.context().listeners().local_address(listener).expect("it listens");
    client.context().connect(address).expect("an attempt");
    let wanted = wanted(&mut client);
    let (mut program, mut peer) = (Loaded { wanted, conn: None, round_trips: 0, served: false }, Peer::default());
    while program.conn.is_none() || peer.conn.is_none() {
        client.turn(&mut program, Duration::ZERO).expect("a turn");
        server.turn(&mut peer, Duration::ZERO).expect("a turn");
    }
    mirror.up();
    client.context().send(program.conn.expect("it is up"), b"load").expect("room for a message");
    client.run(&mut program).expect("turns");
    assert!(program.served, "not after {} round trips", program.round_trips - BEFORE);
}

#[test]
fn a_descriptor_is_served_under_load() {
    let (near, far) = UnixStream::pair().expect("two descriptors");
    near.set_nonblocking(true).expect("it does not block");
    served_under_load(|reactor| {
        reactor.context().io().register(&near, Interest::READABLE).expect("a registration");
        Wanted::Edge(far)
    });
}

#[test]
fn a_timer_fires_under_load() {
    served_under_load(|_| Wanted::Timer);
}

#[test]
fn a_call_is_heard_under_load() {
    served_under_load(|reactor| Wanted::Call(reactor.handle()));
}

/// Sends of other threads wait while the send queue is full. The reactor posts them in a turn that finds room in the send queue. Nothing
/// needs to wake the reactor for this.
#[test]
fn sends_of_other_threads_go_out_when_there_is_room() {
    const SENDS: u64 = 1_000;
    let ([mut client, mut server], _) = Null::reactors(&Config::default(), || Box::new(Steps::new()));
    let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a listener");
    let address = server.context().listeners().local_address(listener).expect("it listens");
    client.context().connect(address).expect("an attempt");
    let (mut program, mut peer) = (Peer::default(), Peer::default());
    let mut turns = |program: &mut Peer, peer: &mut Peer| {
        // The test calls `step` instead of `turn`, which would also call `arm`. `arm` may wake the reactor, as a call of another thread
        // does.
        client.step(program, Duration::ZERO).expect("a turn");
        server.step(peer, Duration::ZERO).expect("a turn");
        client.handle()
    };
    let mut remote = turns(&mut program, &mut peer);
    while program.conn.is_none() || peer.conn.is_none() {
        remote = turns(&mut program, &mut peer);
    }
    for _ in 0..SENDS {
        remote.send(program.conn.expect("it is up"), b"x").expect("room for a send");
    }
    for _ in 0..BEFORE {
        turns(&mut program, &mut peer);
    }
    assert_eq!(peer.received, SENDS);
}

/// A program that sends one message back and forth. `left` is the number of times that it still sends the message. With `None`, the program
/// only returns the messages of its peer.
struct Shuttle {
    left: Option<u64>,
    /// The count of polling rounds at the first message and at the last one.
    spins: Option<(u64, u64)>,
}

impl Shuttle {
    const fn new(left: Option<u64>) -> Self {
        Self { left, spins: None }
    }

    fn spent(&self) -> u64 {
        self.spins.map_or(0, |(first, last)| last - first)
    }
}

impl Handler for Shuttle {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if self.left.is_some() {
            cx.send(conn, b"x").expect("room for one message");
        }
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let spins = cx.stats().turns.spins;
        self.spins.get_or_insert((spins, spins)).1 = spins;
        if let Some(left) = &mut self.left {
            *left -= 1;
            if *left == 0 {
                return cx.stop();
            }
        }
        cx.send(conn, &message).expect("room for one message");
    }
}

/// Two threads that spin on one processor yield to each other long before their time slices end. A time slice is some milliseconds, which
/// is thousands of rounds of polling.
#[test]
#[allow(clippy::disallowed_methods, reason = "two threads are what it is about")]
fn spinning_threads_share_a_processor() {
    const ROUND_TRIPS: u64 = 300;
    let config = || patient(Config::default().provider(ProviderChoice::Iwarp).wait(SPIN));
    let reactor = move || Reactor::new(config()).expect("a reactor");
    let mut server = reactor();
    let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a listener");
    let address = server.context().listeners().local_address(listener).expect("it listens");
    let stop = server.handle();
    let serving = std::thread::spawn(move || {
        Reactors::pin(0).expect("a core");
        let mut program = Shuttle::new(None);
        server.run(&mut program).map(|()| program.spent())
    });
    let asking = std::thread::spawn(move || {
        Reactors::pin(0).expect("a core");
        let mut client = reactor();
        client.context().connect(address).expect("an attempt");
        let mut program = Shuttle::new(Some(ROUND_TRIPS));
        client.run(&mut program).map(|()| program.spent())
    });
    let asked = asking.join().expect("a thread").expect("turns");
    stop.stop();
    let served = serving.join().expect("a thread").expect("turns");
    let spins = [asked, served].map(|spins| spins / ROUND_TRIPS);
    println!("{spins:?} rounds of polling for each round trip");
    assert!(spins.iter().all(|&spins| spins < 1_000), "{spins:?} rounds of polling for each round trip");
}

/// The client: sends a message every 10 ms of virtual time.
struct Ticks {
    conn: Option<ConnectionId>,
    sent: u32,
    arrived: Rc<Cell<u32>>,
}

impl Handler for Ticks {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
        cx.timers().set(Duration::from_millis(10), 0);
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        assert_eq!(self.arrived.get(), self.sent, "messages have arrived 10 ms after the last of them was sent");
        self.sent += 1;
        cx.send(self.conn.expect("the connection"), b"tick").expect("room for one message");
        cx.timers().set(Duration::from_millis(10), 0);
    }
}

/// A message that completes when it is posted is sent in the same turn. No later message of the
/// connection triggers its sending: the keepalive sends the first ping after an hour.
#[test]
fn a_message_that_ends_with_its_post_leaves_with_its_turn() {
    let fabric = network(2);
    let arrived = Rc::new(Cell::new(0));
    let handlers: [Box<dyn Handler>; 2] =
        [Box::new(Counts(Rc::clone(&arrived))), Box::new(Ticks { conn: None, sent: 0, arrived: Rc::clone(&arrived) })];
    let mut nodes = Vec::new();
    for (node, handler) in handlers.into_iter().enumerate() {
        let config = patient(Config::default().quiet_sends(true).receive_depth(64));
        nodes.push(Node::new(reactor(node, &fabric, config), handler));
    }
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "messages arrive", |_| arrived.get() == 20);
}
