//! Calls on virtual time: a server that gets more requests than it can answer, and answers that exceed the window. The other tests are
//! about calls as futures, on the reactor's own thread and from other threads.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use rdma_reactor::aio::{AsyncCalls, AsyncReactor};
use rdma_reactor::call::{AnswerError, CallContext, CallError, CallEvent, CallHandler, CallId, CallResult, CallStats};
use rdma_reactor::call::{Calls, ReceivedPayload, RequestId, WithCalls};
use rdma_reactor::threaded::{Requests, ThreadedReactor};
use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message, ProviderChoice,
    TimerId,
};
use rdma_reactor_tests::conformance::harness::with_watchdog;
use rdma_reactor_tests::patience::{PATIENCE, patient};
use rdma_reactor_tests::sim::fabric::lock;
use rdma_reactor_tests::sim::poller::virtual_ns;
use rdma_reactor_tests::sim::quiet::{Node, network, reactor, until};
use rdma_reactor_tests::sim::tcp::address;

const PORT: u16 = 7471;
/// The time that the server needs for a request.
const WORK: Duration = Duration::from_millis(1);
/// The largest number of requests that the server admits from a connection. It refuses further ones as overloaded.
const QUEUE: usize = 20;
/// The time limit of each call.
const WITHIN: Duration = Duration::from_millis(100);

/// A server that serves its requests in order, one per millisecond.
struct Server {
    calls: Calls,
    queue: VecDeque<RequestId>,
    stats: Rc<Cell<CallStats>>,
}

impl Handler for Server {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if let Some(CallEvent::Request { id, .. }) = self.calls.on_recv(cx, conn, message) {
            self.queue.push_back(id);
            if self.queue.len() == 1 {
                cx.timers().set(WORK, 0);
            }
        }
        self.stats.set(self.calls.stats());
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if let Some(request) = self.queue.pop_front() {
            let _ = self.calls.answer(cx, request, b"done");
        }
        if !self.queue.is_empty() {
            cx.timers().set(WORK, 0);
        }
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
    }
}

/// The results of the client's calls.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    made: u32,
    answered: u32,
    overloaded: u32,
    other: u32,
    /// The longest time from a call to its refusal by the server, in ns.
    slowest: u64,
}

/// A client that makes one call per `period`, until `left` calls are made.
struct Client {
    conn: Option<ConnectionId>,
    left: u32,
    period: Duration,
    seen: Rc<Cell<Seen>>,
}

impl Client {
    fn note(&self, note: impl FnOnce(&mut Seen)) {
        let mut seen = self.seen.get();
        note(&mut seen);
        self.seen.set(seen);
    }
}

impl CallHandler for Client {
    type Tag = u64;

    fn on_connect(&mut self, cx: &mut CallContext<'_, u64>, conn: ConnectionId) {
        self.conn = Some(conn);
        cx.context().timers().set(self.period, 1);
    }
    fn on_end(&mut self, cx: &mut CallContext<'_, u64>, _: CallId, begun: u64, result: CallResult<'_>) {
        let took = virtual_ns(cx.context().now()) - begun;
        self.note(|seen| match result {
            Ok(_) => seen.answered += 1,
            Err(CallError::Overloaded) => {
                seen.overloaded += 1;
                seen.slowest = seen.slowest.max(took);
            }
            Err(_) => seen.other += 1,
        });
    }
    fn on_timer(&mut self, cx: &mut CallContext<'_, u64>, _: TimerId, _: u64) {
        let (conn, now) = (self.conn.expect("connected"), virtual_ns(cx.context().now()));
        cx.call(conn, &[7; 64], WITHIN, now).expect("an open connection");
        self.note(|seen| seen.made += 1);
        self.left -= 1;
        if self.left > 0 {
            cx.context().timers().set(self.period, 1);
        }
    }
}

/// Makes `calls` calls, one per `period`. Returns their results, the answers per second, and the server's counters.
fn load(calls: u32, period: Duration) -> (Seen, f64, CallStats) {
    let fabric = network(2);
    let config = Config::default();
    let (mut server, mut client) = (reactor(0, &fabric, config.clone()), reactor(1, &fabric, config));
    server.context().listen(address(0, PORT)).expect("a listener");
    client.context().connect(address(0, PORT)).expect("connecting");
    let (seen, stats) = (Rc::<Cell<Seen>>::default(), Rc::<Cell<CallStats>>::default());
    let mut own = Calls::new();
    own.limits().requests_per_connection = QUEUE;
    let server_side = Server { calls: own, queue: VecDeque::new(), stats: Rc::clone(&stats) };
    let client_side = Client { conn: None, left: calls, period, seen: Rc::clone(&seen) };
    let mut nodes =
        [Node::new(server, Box::new(server_side)), Node::new(client, Box::new(WithCalls::new(client_side)))];
    until(&fabric, &mut nodes, "all calls have ended", |_| {
        let Seen { made, answered, overloaded, other, .. } = seen.get();
        made == calls && answered + overloaded + other == calls
    });
    let seconds = lock(&fabric).now() as f64 / 1e9;
    (seen.get(), f64::from(seen.get().answered) / seconds, stats.get())
}

/// A server that gets twice as many requests as it can answer still answers as many as it can. It refuses the others within 10 ms, so no
/// call reaches its deadline.
#[test]
fn a_server_at_twice_its_capacity_keeps_its_throughput() {
    let (calm, alone, _) = load(2000, WORK * 10 / 9);
    assert_eq!((calm.answered, calm.overloaded), (2000, 0), "{calm:?}");
    let (_, full, _) = load(2000, WORK);
    let (seen, twice, stats) = load(4000, WORK / 2);
    println!(
        "answers per second: {alone:.0} at 0.9, {full:.0} at 1, {twice:.0} at 2; the slowest refusal: {} ns",
        seen.slowest
    );
    assert!(twice > 0.9 * full && twice > alone, "{seen:?}");
    assert!(seen.other == 0 && seen.overloaded > 1500, "{seen:?}");
    assert!(seen.slowest < 10_000_000, "{seen:?}");
    assert_eq!((stats.overloaded, stats.admitted), (u64::from(seen.overloaded), u64::from(seen.answered)));
}

/// A server that holds requests until it has 300, and then answers all of them in one callback.
#[derive(Default)]
struct Hoarder(Vec<RequestId>);

impl CallHandler for Hoarder {
    type Tag = ();

    fn on_request(&mut self, cx: &mut CallContext<'_, ()>, id: RequestId, _: ReceivedPayload<'_>) {
        self.0.push(id);
        if self.0.len() == 300 {
            for request in self.0.drain(..) {
                cx.answer(request, &[7; 1000]).expect("its caller waits");
            }
        }
    }
    fn on_end(&mut self, _: &mut CallContext<'_, ()>, _: CallId, (): (), _: CallResult<'_>) {}
}

/// Answers that do not fit into the window are queued, and all of them arrive.
#[test]
fn answers_that_find_no_room_are_sent_later() {
    let fabric = network(2);
    let config = Config::default().receive_depth(8).send_depth(8);
    let (mut server, mut client) = (reactor(0, &fabric, config.clone()), reactor(1, &fabric, config));
    server.context().listen(address(0, PORT)).expect("a listener");
    client.context().connect(address(0, PORT)).expect("connecting");
    let seen = Rc::<Cell<Seen>>::default();
    let period = Duration::from_micros(10);
    let client_side = Client { conn: None, left: 300, period, seen: Rc::clone(&seen) };
    let hoarder = WithCalls::new(Hoarder::default());
    let mut nodes = [Node::new(server, Box::new(hoarder)), Node::new(client, Box::new(WithCalls::new(client_side)))];
    until(&fabric, &mut nodes, "all calls have ended", |_| seen.get().answered + seen.get().other == 300);
    assert_eq!(seen.get().answered, 300);
}

/// The callbacks of both sides, in order.
type Log = Rc<RefCell<Vec<String>>>;

/// A client that makes five calls, each of which ends in another way.
struct Five(Log);

impl CallHandler for Five {
    type Tag = &'static str;

    fn on_connect(&mut self, cx: &mut CallContext<'_, Self::Tag>, conn: ConnectionId) {
        let mut call = |tag: &'static str| {
            let within = if tag == "late" { WITHIN } else { PATIENCE };
            cx.call(conn, tag.as_bytes(), within, tag).expect("an open connection")
        };
        let calls = ["answered", "dismissed", "late", "cancelled", "lost"].map(&mut call);
        assert_eq!((cx.cancel(calls[3]), cx.cancel(calls[3])), (Some("cancelled"), None));
        assert!(calls.iter().all(|call| call.connection() == conn));
    }
    fn on_end(&mut self, cx: &mut CallContext<'_, Self::Tag>, _: CallId, tag: Self::Tag, result: CallResult<'_>) {
        let text = result.map_or_else(|error| error.to_string(), |answer| String::from_utf8_lossy(&answer).into());
        self.0.borrow_mut().push(format!("{tag}: {text}"));
        if tag == "late" {
            // All calls have ended now, except for `lost`, which ends with the connection.
            cx.context().timers().set(Duration::ZERO, 5);
        }
    }
    fn on_timer(&mut self, cx: &mut CallContext<'_, Self::Tag>, _: TimerId, token: u64) {
        self.0.borrow_mut().push(format!("timer {token}"));
        cx.context().listen(address(1, PORT)).expect("a listener");
    }
    fn on_disconnect(&mut self, _: &mut CallContext<'_, Self::Tag>, _: ConnectionId, reason: DisconnectReason) {
        self.0.borrow_mut().push(format!("client: {reason}"));
    }
}

/// The server of [`Five`]. It makes one call itself. When a request is cancelled, it begins to
/// connect to the client, and repeats this until the client listens. When it is connected, it
/// aborts the first connection.
struct Holder(Log, Option<ConnectionId>);

impl CallHandler for Holder {
    type Tag = ();

    fn on_connect(&mut self, cx: &mut CallContext<'_, ()>, conn: ConnectionId) {
        match self.1 {
            None => _ = cx.call(conn, b"", PATIENCE, ()).expect("an open connection"),
            Some(first) => cx.context().abort(first),
        }
        self.1 = Some(conn);
    }
    fn on_connect_error(&mut self, cx: &mut CallContext<'_, ()>, _: ConnectionId, _: ConnectError) {
        cx.context().connect(address(1, PORT)).expect("connecting");
    }
    fn on_request(&mut self, cx: &mut CallContext<'_, ()>, id: RequestId, payload: ReceivedPayload<'_>) {
        match &payload[..] {
            b"answered" => cx.answer(id, b"yes").expect("its caller waits"),
            b"dismissed" => cx.dismiss(id),
            // The calls `late`, `cancelled` and `lost` get no answer.
            _ => assert!(cx.time_left(id).is_some()),
        }
    }
    fn on_cancelled(&mut self, cx: &mut CallContext<'_, ()>, id: RequestId) {
        self.0.borrow_mut().push("a request is cancelled".into());
        assert_eq!(cx.time_left(id), None);
        cx.dismiss(id);
        cx.context().connect(address(1, PORT)).expect("connecting");
    }
    fn on_end(&mut self, _: &mut CallContext<'_, ()>, _: CallId, (): (), result: CallResult<'_>) {
        self.0.borrow_mut().push(format!("server: {:?}", result.map(drop)));
    }
}

/// Each call of a handler ends once, whatever the reason, and before its connection ends. A handler
/// without `on_request` dismisses all requests.
#[test]
fn each_call_of_a_handler_has_one_end() {
    let (fabric, log) = (network(2), Log::default());
    let (mut server, mut client) = (reactor(0, &fabric, Config::default()), reactor(1, &fabric, Config::default()));
    server.context().listen(address(0, PORT)).expect("a listener");
    client.context().connect(address(0, PORT)).expect("connecting");
    let sides = (WithCalls::new(Holder(Rc::clone(&log), None)), WithCalls::new(Five(Rc::clone(&log))));
    let mut nodes = [Node::new(server, Box::new(sides.0)), Node::new(client, Box::new(sides.1))];
    let is_over = || log.borrow().last().is_some_and(|line| line.starts_with("client:"));
    until(&fabric, &mut nodes, "the connection has ended", |_| is_over());
    let log = log.take();
    let at = |line: &str| log.iter().position(|said| said == line).unwrap_or_else(|| panic!("no {line:?} in {log:?}"));
    for line in ["answered: yes", "a request is cancelled", "server: Err(Unanswered)"] {
        assert!(at(line) < at("timer 5"), "{log:?}");
    }
    assert!(log.len() == 8 && log.iter().any(|line| line.starts_with("dismissed: ")), "{log:?}");
    assert!(log[6].starts_with("lost: ") && log[7].starts_with("client: lost"), "{log:?}");
}

/// A client whose `on_end` panics for the first of three calls that end at the same time: at their
/// deadline, or with their connection.
struct Panicking(Log, CallError);

impl CallHandler for Panicking {
    type Tag = u8;

    fn on_connect(&mut self, cx: &mut CallContext<'_, u8>, conn: ConnectionId) {
        (0..3).for_each(|tag| _ = cx.call(conn, b"late", WITHIN, tag).expect("an open connection"));
        if self.1 != CallError::Deadline {
            cx.context().abort(conn);
        }
    }
    fn on_end(&mut self, _: &mut CallContext<'_, u8>, _: CallId, tag: u8, result: CallResult<'_>) {
        assert_eq!(result.map(drop).as_ref(), Err(&self.1));
        self.0.borrow_mut().push(tag.to_string());
        assert!(self.0.borrow().len() > 1, "the first one");
    }
    fn on_disconnect(&mut self, _: &mut CallContext<'_, u8>, _: ConnectionId, _: DisconnectReason) {
        self.0.borrow_mut().push("over".into());
    }
}

/// If `on_end` panics for one of several calls, the ends of the others are still reported, and
/// after them the end of the connection.
#[test]
fn a_panic_in_an_end_leaves_the_others() {
    for (error, ends) in
        [(CallError::Deadline, 3), (CallError::Disconnected(DisconnectReason::Local { complete: false }), 4)]
    {
        let (fabric, log) = (network(2), Log::default());
        let config = Config::default().contain_panics(true);
        let (mut server, mut client) = (reactor(0, &fabric, config.clone()), reactor(1, &fabric, config));
        server.context().listen(address(0, PORT)).expect("a listener");
        client.context().connect(address(0, PORT)).expect("connecting");
        let sides = (WithCalls::new(Hoarder::default()), WithCalls::new(Panicking(Rc::clone(&log), error)));
        let mut nodes = [Node::new(server, Box::new(sides.0)), Node::new(client, Box::new(sides.1))];
        until(&fabric, &mut nodes, "all have ended", |_| log.borrow().len() == ends);
        assert_eq!(log.borrow().iter().position(|line| line == "over"), (ends == 4).then_some(3));
    }
}

/// A peer that sends requests as fast as it can, and releases no received message, so that it accepts no answers.
struct Flood {
    left: u32,
    kept: Vec<DetachedMessage>,
}

impl Flood {
    fn pump(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // The header of a request with the longest possible time limit.
        const REQUEST: [u8; 16] = [0, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0];
        while self.left > 0 && cx.send(conn, &REQUEST).is_ok() {
            self.left -= 1;
        }
    }
}

impl Handler for Flood {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.pump(cx, conn);
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.pump(cx, conn);
    }
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.kept.push(message.detach());
    }
}

/// If the peer's window has no room, the server queues its refusals. It queues at most 1,024 refusals, and drops further ones.
#[test]
fn a_flood_of_a_peer_that_takes_no_answers_is_bounded() {
    let fabric = network(2);
    let config = Config::default();
    let (mut server, mut client) = (reactor(0, &fabric, config.clone()), reactor(1, &fabric, config));
    server.context().listen(address(0, PORT)).expect("a listener");
    client.context().connect(address(0, PORT)).expect("connecting");
    let stats = Rc::<Cell<CallStats>>::default();
    let mut calls = Calls::new();
    calls.limits().requests = 0;
    let server_side = Server { calls, queue: VecDeque::new(), stats: Rc::clone(&stats) };
    let flood = Flood { left: 3000, kept: Vec::new() };
    let mut nodes = [Node::new(server, Box::new(server_side)), Node::new(client, Box::new(flood))];
    until(&fabric, &mut nodes, "all requests have arrived", |_| stats.get().overloaded == 3000);
    // Up to 64 refusals were sent before the peer's window had no more room.
    let dropped = stats.get().refusals_dropped;
    assert!((3000 - 1024 - 64..=3000 - 1024).contains(&dropped), "{:?}", stats.get());
}

/// A server that holds all requests for a time, and then answers them with `ANSWER` bytes each.
struct Store {
    calls: Calls,
    held: Vec<RequestId>,
    /// The number of requests, and the number of answers that were accepted.
    served: Rc<Cell<(usize, usize)>>,
    stats: Rc<Cell<CallStats>>,
}

const ANSWER: usize = 64 << 10;

impl Handler for Store {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if let Some(CallEvent::Request { id, .. }) = self.calls.on_recv(cx, conn, message) {
            assert_eq!(self.calls.time_left(cx, id), Some(self.calls.limits().longest), "the peer asks for 71 minutes");
            self.held.push(id);
            if self.held.len() == 1 {
                cx.timers().set(Duration::from_secs(3), 0);
            }
        }
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let requests = self.held.len();
        let answers = self.held.drain(..).map(|request| self.calls.answer(cx, request, &[7; ANSWER]));
        let accepted = answers.filter(|answer| match answer {
            Ok(()) => true,
            Err(error) => {
                assert_eq!(*error, AnswerError::Overloaded);
                false
            }
        });
        self.served.set((requests, accepted.count()));
        self.stats.set(self.calls.stats());
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
    }
}

/// A peer sends 1,000 requests and accepts no answers. The queued answers stay within the limits,
/// and the program gets an error for each further answer. The time limits of the requests are
/// reduced to the longest one that the server permits.
#[test]
fn answers_that_wait_are_within_the_limits() {
    let fabric = network(2);
    let (mut server, mut client) = (reactor(0, &fabric, Config::default()), reactor(1, &fabric, Config::default()));
    server.context().listen(address(0, PORT)).expect("a listener");
    client.context().connect(address(0, PORT)).expect("connecting");
    let (served, stats) = (Rc::<Cell<(usize, usize)>>::default(), Rc::<Cell<CallStats>>::default());
    let mut calls = Calls::new();
    calls.limits().longest = Duration::from_secs(60);
    let limit = calls.limits().bytes_per_connection;
    let store = Store { calls, held: Vec::new(), served: Rc::clone(&served), stats: Rc::clone(&stats) };
    let flood = Flood { left: 1000, kept: Vec::new() };
    let mut nodes = [Node::new(server, Box::new(store)), Node::new(client, Box::new(flood))];
    until(&fabric, &mut nodes, "all are answered", |_| served.get().0 > 0);
    let (requests, accepted) = served.get();
    // Some answers fit into the window, so they are not queued.
    let window = 64 * (8 << 10) + (16 * ANSWER);
    assert!(requests == 1000 && accepted >= limit / ANSWER, "{requests} requests, {accepted} answers");
    assert!(accepted * ANSWER <= limit + window, "{accepted} answers");
    assert_eq!(stats.get().answers_dropped, (requests - accepted) as u64);
}

/// A server that answers each request immediately.
struct Prompt {
    calls: Calls,
}

impl Handler for Prompt {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if let Some(CallEvent::Request { id, .. }) = self.calls.on_recv(cx, conn, message) {
            let _ = self.calls.answer(cx, id, b"done");
        }
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
    }
}

/// A host with an honest client on its last connection. The other connections send as many requests
/// as they can, and accept no answers.
struct Host {
    hoards: usize,
    floods: Vec<(ConnectionId, Flood)>,
    /// The number of requests that the hoarding connections have not sent yet.
    left: Rc<Cell<u32>>,
    client: WithCalls<Client>,
}

/// The number of requests of a hoarding connection. It is larger than the number of requests that
/// the server holds for a connection.
const HOARD: u32 = 1200;

impl Host {
    fn new(hoards: usize, seen: &Rc<Cell<Seen>>) -> Self {
        let seen = Rc::clone(seen);
        let client = WithCalls::new(Client { conn: None, left: 1000, period: WORK, seen });
        Self { hoards, floods: Vec::new(), left: Rc::new(Cell::new(HOARD * hoards as u32)), client }
    }

    fn flood(&mut self, conn: ConnectionId) -> Option<&mut Flood> {
        self.floods.iter_mut().find(|(of, _)| *of == conn).map(|(_, flood)| flood)
    }

    fn pump(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> bool {
        let Some(flood) = self.flood(conn) else { return false };
        flood.pump(cx, conn);
        let unconnected = (self.hoards - self.floods.len()) as u32 * HOARD;
        self.left.set(unconnected + self.floods.iter().map(|(_, flood)| flood.left).sum::<u32>());
        true
    }
}

impl Handler for Host {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if self.floods.len() == self.hoards {
            return self.client.on_connect(cx, conn);
        }
        self.floods.push((conn, Flood { left: HOARD, kept: Vec::new() }));
        self.pump(cx, conn);
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        match self.flood(conn) {
            Some(flood) => flood.kept.push(message.detach()),
            None => self.client.on_recv(cx, conn, message),
        }
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if !self.pump(cx, conn) {
            self.client.on_writable(cx, conn);
        }
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, token: u64) {
        self.client.on_timer(cx, timer, token);
    }
}

/// Ten connections of a host make the server hold as many requests as its limits permit. Honest
/// clients on another host and on the same host are still served.
#[test]
fn connections_that_hoard_leave_room_for_others() {
    const HOARDS: usize = 10;
    let fabric = network(3);
    let config = || Config::default().timeouts(|t| (t.keepalive_interval, t.keepalive) = (PATIENCE, 2 * PATIENCE));
    let mut server = reactor(0, &fabric, config());
    server.context().listen(address(0, PORT)).expect("a listener");
    let (other, same) = (Rc::<Cell<Seen>>::default(), Rc::<Cell<Seen>>::default());
    let hoarding = Host::new(HOARDS, &same);
    let left = Rc::clone(&hoarding.left);
    let mut nodes = [
        Node::new(server, Box::new(Prompt { calls: Calls::new() })),
        Node::new(reactor(1, &fabric, config()), Box::new(hoarding)),
        Node::new(reactor(2, &fabric, config()), Box::new(Host::new(0, &other))),
    ];
    for _ in 0..HOARDS {
        nodes[1].reactor.context().connect(address(0, PORT)).expect("connecting");
    }
    until(&fabric, &mut nodes, "all are asked", |_| left.get() == 0);
    for honest in [1, 2] {
        nodes[honest].reactor.context().connect(address(0, PORT)).expect("connecting");
    }
    let ended = |seen: &Rc<Cell<Seen>>| seen.get().answered + seen.get().overloaded + seen.get().other;
    until(&fabric, &mut nodes, "all calls have ended", |_| ended(&other) == 1000 && ended(&same) == 1000);
    for (seen, host) in [(other, "another host"), (same, "the same host")] {
        assert!(seen.get().answered >= 950, "{host}: {:?}", seen.get());
    }
}

/// The limit on the time for which a connection that the program has finished stays open.
const CLOSE: Duration = Duration::from_secs(2);

/// The ends of connections: for each, the time from the `finish` to the end, in ns, and the reason of the end.
type Ends = Rc<RefCell<Vec<(u64, DisconnectReason)>>>;

/// A client whose server grants no credits. It makes as many calls as its limit permits. When all
/// of them have ended, it makes as many again. When these have ended, too, it finishes the
/// connection.
struct Unheard {
    calls: Calls,
    conn: Option<ConnectionId>,
    made: usize,
    failed: usize,
    finished: Option<u64>,
    ends: Ends,
}

impl Unheard {
    fn make_calls(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        for _ in 0..QUEUE {
            self.calls.call(cx, conn, &[7; 64], WITHIN, ()).expect("no earlier call is in flight");
            self.made += 1;
        }
    }
}

impl Handler for Unheard {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
        self.make_calls(cx, conn);
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
        assert!(self.calls.on_timer(cx, timer), "it sets no timer");
        while let Some(failed) = self.calls.next_failed() {
            assert_eq!(failed.error, CallError::Deadline);
            self.failed += 1;
        }
        let conn = self.conn.expect("connected");
        if self.failed == QUEUE && self.made == QUEUE {
            self.make_calls(cx, conn);
        } else if self.failed == 2 * QUEUE && self.finished.is_none() {
            self.finished = Some(virtual_ns(cx.now()));
            self.calls.finish(cx, conn);
        }
    }
    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.calls.on_disconnect(conn, &reason);
        self.ends.borrow_mut().push((virtual_ns(cx.now()) - self.finished.expect("it finishes"), reason));
    }
}

/// Calls that have ended while their requests waited for room leave nothing behind: the client can make as many calls again, and a finished
/// connection is closed.
#[test]
fn calls_that_were_never_sent_leave_nothing() {
    let fabric = network(2);
    let config = Config::default().receive_depth(8).send_depth(8).timeouts(|t| t.close = CLOSE);
    let (mut server, mut client) = (reactor(0, &fabric, config.clone()), reactor(1, &fabric, config));
    server.context().listen(address(0, PORT)).expect("a listener");
    client.context().connect(address(0, PORT)).expect("connecting");
    let (mut calls, ends) = (Calls::new(), Ends::default());
    calls.limits().calls_per_connection = QUEUE;
    let unheard = Unheard { calls, conn: None, made: 0, failed: 0, finished: None, ends: Rc::clone(&ends) };
    let keeper = Flood { left: 0, kept: Vec::new() };
    let mut nodes = [Node::new(server, Box::new(keeper)), Node::new(client, Box::new(unheard))];
    until(&fabric, &mut nodes, "the connection has ended", |_| !ends.borrow().is_empty());
    let (took, reason) = ends.borrow()[0].clone();
    assert!(matches!(reason, DisconnectReason::Local { .. }), "{reason:?}");
    assert!(Duration::from_nanos(took) < CLOSE * 2, "{took} ns");
}

/// A server that answers each request immediately, and finishes the connection after the last one. It forwards no timers to its `Calls`.
struct Finisher {
    calls: Calls,
    left: u32,
    finished: u64,
    ends: Ends,
}

impl Handler for Finisher {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if let Some(CallEvent::Request { id, .. }) = self.calls.on_recv(cx, conn, message) {
            self.calls.answer(cx, id, b"done").expect("its caller waits");
            self.left -= 1;
            if self.left == 0 {
                self.finished = virtual_ns(cx.now());
                self.calls.finish(cx, conn);
            }
        }
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
    }
    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.calls.on_disconnect(conn, &reason);
        self.ends.borrow_mut().push((virtual_ns(cx.now()) - self.finished, reason));
    }
}

/// If the peer grants no credits for the queued answers, a finished connection is cut off after `Timeouts::close`.
#[test]
fn a_finished_connection_does_not_wait_for_credits_for_ever() {
    let fabric = network(2);
    let config = Config::default().timeouts(|t| t.close = CLOSE);
    let (mut server, mut client) = (reactor(0, &fabric, config.clone()), reactor(1, &fabric, config));
    server.context().listen(address(0, PORT)).expect("a listener");
    client.context().connect(address(0, PORT)).expect("connecting");
    let ends = Ends::default();
    let finisher = Finisher { calls: Calls::new(), left: 300, finished: 0, ends: Rc::clone(&ends) };
    let flood = Flood { left: 300, kept: Vec::new() };
    let mut nodes = [Node::new(server, Box::new(finisher)), Node::new(client, Box::new(flood))];
    until(&fabric, &mut nodes, "the connection has ended", |_| !ends.borrow().is_empty());
    let (took, reason) = ends.borrow()[0].clone();
    assert_eq!(reason, DisconnectReason::Local { complete: false });
    assert!((CLOSE..CLOSE * 2).contains(&Duration::from_nanos(took)), "{took} ns");
}

fn config() -> Config {
    patient(Config::default().provider(ProviderChoice::Iwarp))
}

/// Connects a client to a server on one reactor. Runs both programs, each with the `AsyncCalls` of its end of the connection.
fn run_both<C: Future<Output = ()>, S: Future<Output = ()>>(
    client: impl FnOnce(AsyncCalls) -> C,
    server: impl FnOnce(AsyncReactor, AsyncCalls) -> S,
) {
    let net = AsyncReactor::new(config()).expect("a reactor");
    let listener = net.listen(([127, 0, 0, 1], 0).into()).expect("a listener");
    let address = listener.local_address().expect("it listens");
    net.run(async {
        let here = AsyncCalls::from(net.connect(address).await.expect("a connection"));
        let there = AsyncCalls::from(listener.accept().await.expect("a client"));
        join(client(here), server(net.clone(), there)).await;
    })
    .expect("turns");
}

/// A thousand tasks call on one connection at the same time. The server keeps all requests, and then answers the last one first.
#[test]
fn a_thousand_tasks_call_on_one_connection() {
    with_watchdog("a_thousand_tasks_call_on_one_connection", || {
        let kept = RefCell::new(Vec::new());
        run_both(
            |calls| async move {
                let answers = (0..1000_u64).map(|n| {
                    let calls = calls.clone();
                    async move { calls.call(&n.to_le_bytes(), PATIENCE).await }
                });
                // The server answers only when all requests have arrived.
                for (n, answer) in (0_u64..).zip(join_all(answers).await) {
                    assert_eq!(answer, Ok((n * 2).to_le_bytes().to_vec()));
                }
            },
            |_, calls| async move {
                while let Ok(request) = calls.next().await {
                    kept.borrow_mut().push(request);
                    if kept.borrow().len() == 1000 {
                        for request in kept.take().into_iter().rev() {
                            let n = u64::from_le_bytes(request[..].try_into().expect("8 bytes"));
                            request.answer(&(n * 2).to_le_bytes()).expect("its caller waits");
                        }
                    }
                }
            },
        );
    });
}

/// Dropping the future of a call cancels the call. If the server drops a request, or the deadline passes, the call fails.
#[test]
fn futures_that_are_dropped_end_their_calls() {
    with_watchdog("futures_that_are_dropped_end_their_calls", || {
        run_both(
            |calls| async move {
                let mut lost = Box::pin(calls.call(b"lost", PATIENCE));
                assert!(futures_util::poll!(&mut lost).is_pending());
                drop(lost);
                assert_eq!(calls.call(b"drop it", PATIENCE).await, Err(CallError::Unanswered));
                assert_eq!(calls.call(b"keep it", Duration::from_millis(5)).await, Err(CallError::Deadline));
                assert_eq!(calls.call(b"answer it", PATIENCE).await, Ok(b"done".to_vec()));
                let last = calls.call(b"close it", PATIENCE).await;
                assert!(matches!(last, Err(CallError::Disconnected(_))), "{last:?}");
            },
            |net, calls| async move {
                let mut kept = None;
                while let Ok(request) = calls.next().await {
                    match &request[..] {
                        // The server may accept this request before the client cancels it. `time_left` returns `None` once the cancellation
                        // arrives.
                        b"lost" => {
                            while request.time_left().is_some() {
                                net.sleep(Duration::from_millis(1)).await;
                            }
                        }
                        b"drop it" => drop(request),
                        b"keep it" => kept = Some(request),
                        b"answer it" => request.answer(b"done").expect("its caller waits"),
                        _ => calls.connection().close(),
                    }
                }
                drop(kept);
            },
        );
    });
}

/// A future waits until the caller of its request has cancelled the call, or the connection has
/// ended, whatever happens first.
#[test]
fn a_future_waits_for_the_cancellation_of_its_request() {
    with_watchdog("a_future_waits_for_the_cancellation_of_its_request", || {
        let (server_dropped, handle_dropped) = tokio::sync::oneshot::channel();
        run_both(
            |calls| async move {
                // The client cancels each call when the server asks for it.
                for name in ["waits", "has happened"] {
                    let mut call = Box::pin(calls.call(name.as_bytes(), PATIENCE));
                    assert!(futures_util::poll!(&mut call).is_pending());
                    let cancel = calls.next().await.expect("a request");
                    drop(call);
                    cancel.answer(b"").expect("its caller waits");
                }
                let mut call = Box::pin(calls.call(b"its connection has no handle", PATIENCE));
                assert!(futures_util::poll!(&mut call).is_pending());
                handle_dropped.await.expect("the server has dropped its handle");
                drop(call);
                calls.connection().closed().await;
            },
            |_, calls| async move {
                let request = calls.next().await.expect("a request");
                let mut dropped = Box::pin(request.cancelled());
                assert!(futures_util::poll!(&mut dropped).is_pending());
                drop(dropped);
                let all = join(request.cancelled(), request.cancelled());
                let (answer, _) = join(calls.call(b"cancel it", PATIENCE), all).await;
                assert_eq!((answer, request.time_left()), (Ok(Vec::new()), None));
                request.cancelled().await;
                assert_eq!(request.answer(b""), Err(AnswerError::Late));

                let request = calls.next().await.expect("a request");
                let mut first = Box::pin(request.cancelled());
                assert!(futures_util::poll!(&mut first).is_pending());
                assert_eq!(calls.call(b"cancel it", PATIENCE).await, Ok(Vec::new()));
                // Also while a future that was notified is not polled.
                assert!(futures_util::poll!(&mut Box::pin(request.cancelled())).is_ready());
                first.await;
                drop(request);

                let request = calls.next().await.expect("a request");
                drop(calls);
                server_dropped.send(()).expect("the client waits");
                request.cancelled().await;
            },
        );
        let (server_waits, waits) = tokio::sync::oneshot::channel();
        run_both(
            |calls| async move {
                let mut call = Box::pin(calls.call(b"ends with its connection", PATIENCE));
                assert!(futures_util::poll!(&mut call).is_pending());
                waits.await.expect("the server waits");
                calls.connection().abort();
            },
            |_, calls| async move {
                let request = calls.next().await.expect("a request");
                let mut cancelled = Box::pin(request.cancelled());
                assert!(futures_util::poll!(&mut cancelled).is_pending());
                server_waits.send(()).expect("the client waits");
                cancelled.await;
                request.cancelled().await;
            },
        );
    });
}

/// Requests that arrived before a drain can still be answered during the drain, also if the handle
/// of their connection was dropped.
#[test]
fn a_drain_answers_what_was_asked() {
    for drops in [false, true] {
        with_watchdog("a_drain_answers_what_was_asked", move || drain_with_requests(drops));
    }
}

fn drain_with_requests(drops: bool) {
    let server = AsyncReactor::new(config()).expect("a reactor");
    let listener = server.listen(([127, 0, 0, 1], 0).into()).expect("a listener");
    let address = listener.local_address().expect("it listens");
    let remote = ThreadedReactor::start(config()).expect("a reactor");
    let client = remote.clone();
    #[allow(clippy::disallowed_methods, reason = "a client of its own")]
    let thread = std::thread::spawn(move || {
        let calls = async {
            let (caller, _) = client.connect(address).await.expect("a connection").calls();
            let first = caller.call("first", PATIENCE);
            let second = caller.call("second", PATIENCE);
            join(first, second).await
        };
        client.block_on(calls).expect("another thread")
    });
    server
        .run(async {
            let calls = AsyncCalls::from(listener.accept().await.expect("a client"));
            let first = calls.next().await.expect("a request");
            let second = calls.next().await.expect("a request");
            let calls = (!drops).then_some(calls);
            server.with(|cx| cx.drain(PATIENCE));
            first.answer(b"one").expect("its caller waits");
            second.answer(b"two").expect("its caller waits");
            while !server.is_drained() {
                server.sleep(Duration::from_millis(1)).await;
            }
            drop(calls);
        })
        .expect("turns");
    let (first, second) = thread.join().expect("the client");
    assert_eq!((first.as_deref(), second.as_deref()), (Ok(&b"one"[..]), Ok(&b"two"[..])));
}

/// Answers each request in capitals, on a separate task.
async fn serve(mut requests: Requests) {
    while let Ok(request) = requests.next().await {
        tokio::spawn(async move {
            tokio::task::yield_now().await;
            let answer = request.to_ascii_uppercase();
            request.answer(answer);
        });
    }
}

/// Tasks on several threads make calls, and other tasks serve them.
#[test]
fn tasks_of_several_threads_call_and_serve() {
    with_watchdog("tasks_of_several_threads_call_and_serve", || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (server, client) = (ThreadedReactor::start(config()), ThreadedReactor::start(config()));
            let (server, client) = (server.expect("a reactor"), client.expect("a reactor"));
            let mut listener = server.listen(([127, 0, 0, 1], 0).into()).await.expect("a listener");
            let address = listener.local_address();
            let accepting = tokio::spawn(async move {
                while let Some(conn) = listener.accept().await {
                    tokio::spawn(serve(conn.calls().1));
                }
            });
            let (caller, _) = client.connect(address).await.expect("a connection").calls();
            let tasks: Vec<_> = (0..1000)
                .map(|n| {
                    let caller = caller.clone();
                    tokio::spawn(async move { (n, caller.call(format!("call {n}"), PATIENCE).await) })
                })
                .collect();
            for task in tasks {
                let (n, answer) = task.await.expect("a task");
                assert_eq!(answer.as_deref(), Ok(format!("CALL {n}").as_bytes()));
            }
            // A call with a time limit of zero ends without being sent.
            assert_eq!(caller.call("in vain", Duration::ZERO).await, Err(CallError::Deadline));
            server.drain(PATIENCE);
            server.ended().await.expect("a drain");
            let last = caller.call("too late", PATIENCE).await;
            assert!(matches!(last, Err(CallError::Disconnected(_) | CallError::Refused(_))), "{last:?}");
            accepting.await.expect("a drain");
            drop(caller);
            client.drain(PATIENCE);
            client.ended().await.expect("a drain");
        });
    });
}

/// If the peer cancels a call, its request has no time left, and the task that serves it is
/// notified. `next` skips such a request. The end of the connection has the same effect.
#[test]
fn a_cancelled_request_has_no_time_left() {
    with_watchdog("a_cancelled_request_has_no_time_left", || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (server, client) = (ThreadedReactor::start(config()), ThreadedReactor::start(config()));
            let (server, client) = (server.expect("a reactor"), client.expect("a reactor"));
            let mut listener = server.listen(([127, 0, 0, 1], 0).into()).await.expect("a listener");
            let (caller, mut of_server) = client.connect(listener.local_address()).await.expect("a connection").calls();
            let (back, mut requests) = listener.accept().await.expect("a client").calls();
            let mut served = Box::pin(caller.call("served", PATIENCE));
            assert!(futures_util::poll!(&mut served).is_pending());
            let request = requests.next().await.expect("a request");
            assert!(request.time_left().is_some());
            let mut cancelled = Box::pin(request.cancelled());
            assert!(futures_util::poll!(&mut cancelled).is_pending());
            let mut unread = Box::pin(caller.call("unread", PATIENCE));
            assert!(futures_util::poll!(&mut unread).is_pending());
            drop((served, unread));
            cancelled.await;
            // The client answers this call after it has cancelled the two others. So the server knows that they are cancelled when it has
            // the answer.
            let pong = async { of_server.next().await.expect("a request").answer("pong") };
            let (answer, ()) = join(back.call("ping", PATIENCE), pong).await;
            assert_eq!(answer.as_deref(), Ok(&b"pong"[..]));
            assert_eq!(request.time_left(), None);
            let next = async {
                let request = requests.next().await.expect("a request");
                assert_eq!(&request[..], b"last");
                request.answer("done");
            };
            let (answer, ()) = join(caller.call("last", PATIENCE), next).await;
            assert_eq!(answer.as_deref(), Ok(&b"done"[..]));
            let mut open = Box::pin(caller.call("open", PATIENCE));
            assert!(futures_util::poll!(&mut open).is_pending());
            let request = requests.next().await.expect("a request");
            client.drain(Duration::ZERO);
            request.cancelled().await;
            assert_eq!(request.time_left(), None);
            drop(open);
            drop((request, requests, back, caller, of_server));
            for reactor in [client, server] {
                reactor.drain(PATIENCE);
                reactor.ended().await.expect("a drain");
            }
        });
    });
}
