//! Futures of `aio` on virtual time, over a network that is slow and loses connect requests. Each future is dropped at random while it
//! waits, and created again. The documented effects of cancellation must hold: no message is lost or duplicated, and no state remains.
//! Several tasks send and receive on each connection, and each of them makes progress whatever the others do.
//!
//! `AIO_WORLDS=100` sets the number of worlds (default: 4,000), and `AIO_SEED=7` runs only the world with that seed.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context as Task, Poll, Wake, Waker};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use rdma_reactor::aio::{AsyncConnection, AsyncListener, AsyncReactor};
use rdma_reactor::{Config, DisconnectReason, SendErrorKind, SendId};
use rdma_reactor_tests::sim::fabric::{Fabric, Shared, lock};
use rdma_reactor_tests::sim::poller::virtual_ns;
use rdma_reactor_tests::sim::quiet::reactor;
use rdma_reactor_tests::sim::rng::Rng;
use rdma_reactor_tests::sim::seeds::each_world;
use rdma_reactor_tests::sim::swarm::{FaultOptions, MS, Options};
use rdma_reactor_tests::sim::trace::Trace;

/// The largest number of simulation steps of a simulated world.
const STEPS: u64 = 200_000;

/// The address of node 0, which listens.
const SERVER: ([u8; 4], u16) = ([10, 0, 0, 1], 7471);

/// The waker of a task: true from a wake-up until the task is polled.
struct Bell(AtomicBool);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// The source of the random choices of a simulated world, and the number of futures that were dropped.
#[derive(Clone)]
struct Fate {
    rng: Rc<RefCell<Rng>>,
    dropped: Rc<RefCell<u64>>,
}

impl Fate {
    fn draw<T>(&self, from: impl FnOnce(&mut Rng) -> T) -> T {
        from(&mut self.rng.borrow_mut())
    }

    /// Polls a future at most `polls` times. Returns its output, or `None` if the future did not complete and is dropped.
    async fn polls<T>(&self, polls: u64, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        let mut left = polls;
        poll_fn(|task| match future.as_mut().poll(task) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left <= 1 => Poll::Ready(None),
            Poll::Pending => {
                left -= 1;
                Poll::Pending
            }
        })
        .await
    }

    /// Creates a future and polls it, until a future completes. Each future that does not complete is dropped, and the next one gets more
    /// polls on average. Returns the output.
    async fn insist<T, F: Future<Output = T>>(&self, mut make: impl FnMut() -> F) -> T {
        let mut patience = 1;
        loop {
            let polls = self.draw(|rng| if rng.chance(300) { u64::MAX } else { rng.range(1..=patience) });
            if let Some(output) = self.polls(polls, make()).await {
                return output;
            }
            *self.dropped.borrow_mut() += 1;
            patience *= 2;
            // Other tasks run before the next attempt. A wake-up that this task received meanwhile must not be lost with the dropped
            // future.
            let mut yielded = false;
            poll_fn(|task| {
                if std::mem::replace(&mut yielded, true) {
                    return Poll::Ready(());
                }
                task.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
        }
    }
}

/// Counts how often each waiting message of one end of a connection is overtaken. The integer is the number of messages that have begun to
/// wait so far. The map has an entry for each message that still waits, with the number of later messages that were sent before this
/// message.
#[derive(Clone, Default)]
struct Line(Rc<RefCell<(u64, BTreeMap<u64, usize>)>>);

impl Line {
    /// Sends a message, and checks that at most `2 * others` later messages overtake each waiting message. `others` is the number of other
    /// tasks. Each of them may overtake a waiting task twice: once if both are woken together and the other task is polled first, and once
    /// more if the waiting task then finds no room, because the reactor itself has used a credit.
    async fn send(&self, conn: &AsyncConnection, message: &[u8], others: usize) -> Result<SendId, SendErrorKind> {
        let mut place = InLine { line: self, number: None };
        let mut send = pin!(conn.send(message));
        poll_fn(|task| {
            let sent = send.as_mut().poll(task);
            let (arrivals, waiting) = &mut *self.0.borrow_mut();
            match (&sent, place.number) {
                (Poll::Pending, None) => {
                    *arrivals += 1;
                    place.number = Some(*arrivals);
                    waiting.insert(*arrivals, 0);
                }
                (Poll::Ready(Ok(_)), number) => {
                    for overtaken in waiting.range_mut(..number.unwrap_or(u64::MAX)).map(|(_, overtaken)| overtaken) {
                        *overtaken += 1;
                        assert!(*overtaken <= 2 * others, "{overtaken} messages have overtaken one, of {others} tasks");
                    }
                }
                _ => {}
            }
            sent
        })
        .await
    }
}

/// A message that waits to be sent. When this value is dropped, the message is removed from the line.
struct InLine<'a> {
    line: &'a Line,
    number: Option<u64>,
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.line.0.borrow_mut().1.remove(&number);
        }
    }
}

/// The numbers of tasks of each kind on each connection: those that send requests, those that receive answers, and those that answer
/// requests.
#[derive(Clone, Copy)]
struct Tasks {
    ask: u8,
    hear: u8,
    answer: u8,
}

/// Returns the content of a request: the client, the task and the number, and then padding.
fn content(client: u8, task: u8, number: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![client; len.max(6)];
    bytes[1] = task;
    bytes[2..6].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// The waiting messages of one end of a connection, in two lines: messages that fit into one buffer of the peer, and longer ones. A message
/// may overtake the messages of the other line.
#[derive(Clone)]
struct Lines {
    buffer: usize,
    lines: [Line; 2],
}

impl Lines {
    fn new(net: &AsyncReactor, conn: &AsyncConnection) -> Self {
        let buffer = net.with(|cx| cx.connection(conn.id()).buffer_size()).unwrap_or(usize::MAX);
        Self { buffer, lines: Default::default() }
    }

    fn of(&self, len: usize) -> &Line {
        &self.lines[usize::from(len > self.buffer)]
    }
}

/// Echoes the messages of a connection until the connection ends. Returns the reason of the end.
async fn echo(conn: AsyncConnection, lines: Lines, others: usize, fate: Fate) -> DisconnectReason {
    loop {
        let message = match fate.insist(|| conn.recv()).await {
            Ok(message) => message,
            Err(reason) => return reason,
        };
        let line = lines.of(message.len());
        match fate.insist(|| line.send(&conn, &message, others)).await {
            Ok(_) => {}
            // The connection is closed. The next receives return the remaining messages, and then the reason.
            Err(SendErrorKind::Closed) => {}
            Err(other) => panic!("an answer: {other}"),
        }
    }
}

/// Echoes on all connections. The future never completes.
async fn serve(net: AsyncReactor, listener: AsyncListener, tasks: Tasks, fate: Fate) {
    let mut echoes: FuturesUnordered<Pin<Box<dyn Future<Output = DisconnectReason>>>> = FuturesUnordered::new();
    let next = || fate.insist(|| listener.accept());
    let mut accept = Box::pin(next());
    loop {
        let accepted = poll_fn(|task| {
            while let Poll::Ready(Some(reason)) = echoes.poll_next_unpin(task) {
                assert!(matches!(reason, DisconnectReason::Closed | DisconnectReason::Lost), "{reason}");
            }
            accept.as_mut().poll(task)
        });
        let conn = accepted.await.expect("the reactor is not drained");
        let lines = Lines::new(&net, &conn);
        for _ in 0..tasks.answer {
            echoes.push(Box::pin(echo(conn.clone(), lines.clone(), tasks.answer.into(), fate.clone())));
        }
        accept.set(next());
    }
}

/// Connects a client, and checks that each of its requests is answered exactly once. If only one task answers requests and only one task
/// receives answers, the answers must arrive in the order of the requests.
async fn ask(net: AsyncReactor, client: u8, messages: u32, longest: u64, tasks: Tasks, fate: Fate) {
    let conn = loop {
        match fate.insist(|| net.connect(SERVER.into())).await {
            Ok(conn) => break conn,
            // The network may lose a connect request, so the client tries again later.
            Err(_) => fate.insist(|| net.sleep(Duration::from_millis(5))).await,
        }
    };
    let lens: Vec<_> = (0..messages).map(|_| fate.draw(|rng| rng.skewed(6..=longest)) as usize).collect();
    let lines = Lines::new(&net, &conn);
    let send = |task: u8| {
        let (conn, fate, lens, lines, net) = (&conn, &fate, &lens, &lines, &net);
        async move {
            for (number, &len) in (0..).zip(lens) {
                let content = content(client, task, number, len);
                let line = lines.of(content.len());
                fate.insist(|| line.send(conn, &content, tasks.ask.into())).await.expect("it is open");
                if fate.draw(|rng| rng.chance(100)) {
                    fate.insist(|| net.sleep(Duration::from_micros(700))).await;
                }
            }
        }
    };
    // For each task, the numbers of its requests that are not answered yet.
    let open: Vec<_> = (0..tasks.ask).map(|_| (0..messages).collect::<VecDeque<_>>()).collect();
    let open = RefCell::new(open);
    let left = Cell::new(u32::from(tasks.ask) * messages);
    let receive = |_| {
        let (conn, fate, lens, open, left) = (&conn, &fate, &lens, &open, &left);
        async move {
            while left.get() > 0 {
                left.set(left.get() - 1);
                let answer = fate.insist(|| conn.recv()).await.expect("an answer");
                let (task, number) = (answer[1], u32::from_le_bytes(answer[2..6].try_into().expect("four bytes")));
                let open = &mut open.borrow_mut()[usize::from(task)];
                let at = open.iter().position(|&open| open == number);
                let at = at.unwrap_or_else(|| panic!("client {client}: task {task} has answer {number} twice"));
                assert!(at == 0 || tasks.answer > 1 || tasks.hear > 1, "client {client}: task {task}, answer {number}");
                open.remove(at);
                assert!(
                    answer[..] == content(client, task, number, lens[number as usize]),
                    "client {client}: {number}"
                );
            }
        }
    };
    let all_sent = join_all((0..tasks.ask).map(send));
    futures_util::future::join(all_sent, join_all((0..tasks.hear).map(receive))).await;
    assert!(open.borrow().iter().all(VecDeque::is_empty), "client {client}: {open:?}");
    if fate.draw(|rng| rng.chance(500)) {
        conn.close();
        let reason = fate.insist(|| conn.closed()).await;
        assert!(matches!(reason, DisconnectReason::Local { .. }), "{reason}");
    }
}

/// A node: its reactor, and the future of its program.
struct Node {
    net: AsyncReactor,
    task: Option<Pin<Box<dyn Future<Output = ()>>>>,
    bell: Arc<Bell>,
    more: bool,
}

impl Node {
    fn new(net: AsyncReactor, task: impl Future<Output = ()> + 'static) -> Self {
        Self { net, task: Some(Box::pin(task)), bell: Arc::new(Bell(AtomicBool::new(true))), more: true }
    }

    /// Polls the program if it was woken. Returns true if it was polled.
    fn poll(&mut self) -> bool {
        let Some(task) = &mut self.task else { return false };
        if !self.bell.0.swap(false, Ordering::AcqRel) {
            return false;
        }
        let waker = Waker::from(Arc::clone(&self.bell));
        if task.as_mut().poll(&mut Task::from_waker(&waker)).is_ready() {
            self.task = None;
        }
        true
    }

    fn is_settled(&self) -> bool {
        let stats = self.net.with(|cx| cx.stats());
        stats.connections.current == 0
            && stats.memory.pool_buffers == stats.memory.pool_free
            && stats.memory.regions == 0
    }
}

/// Polls each program that was woken, and runs each turn that is due. If no program was woken and no turn is due, advances the virtual
/// time.
fn step(fabric: &Shared, nodes: &mut [Node]) {
    let now = lock(fabric).now();
    let mut next = lock(fabric).next();
    let mut idle = true;
    for (index, node) in nodes.iter_mut().enumerate() {
        idle &= !node.poll();
        let due = node.net.next_deadline().map(virtual_ns);
        if node.more || lock(fabric).is_runnable(index, true) || due.is_some_and(|due| due <= now) {
            lock(fabric).seen(index);
            node.more = node.net.turn(Duration::ZERO).expect("a turn").more;
            idle = false;
        }
        next = next.into_iter().chain(due).min();
    }
    if idle {
        lock(fabric).advance(next.map_or(now + MS, |next| next.max(now + 1)));
    }
}

/// Runs the world with this seed to its end. Returns the number of dropped futures.
fn world(seed: u64) -> u64 {
    let options = Options::draw(seed);
    let faults = FaultOptions { every: 0, kinds: Vec::new() };
    let fabric = Arc::new(Mutex::new(Fabric::new(seed, 2, options.net, faults, Trace::new(0))));
    let fate = Fate { rng: Rc::new(RefCell::new(Rng::new(seed, "fate"))), dropped: Rc::default() };
    let buffer = fate.draw(|rng| rng.pick(&[16, 200, 1500, 5000]));
    let config = || {
        Config::default()
            .buffer_size(buffer)
            .receive_depth(fate.draw(|rng| rng.skewed(5..=16)) as u32)
            .send_depth(fate.draw(|rng| rng.skewed(2..=16)) as u32)
            .completions(|c| c.per_turn = fate.draw(|rng| rng.skewed(1..=64)) as u32)
            .timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_secs(20), Duration::from_secs(60)))
    };
    let [server, client] = [0, 1].map(|node| AsyncReactor::from(reactor(node, &fabric, config())));
    let listener = server.listen(SocketAddr::from(SERVER)).expect("a listener");
    let clients = fate.draw(|rng| rng.range(1..=4)) as u8;
    let some = |most| fate.draw(|rng| if rng.chance(300) { rng.range(2..=most) } else { 1 }) as u8;
    let tasks = Tasks { ask: some(6), hear: some(3), answer: some(4) };
    let asking = (0..clients).map(|number| {
        let most = 60 / u64::from(tasks.ask);
        let (messages, longest) = fate.draw(|rng| (rng.skewed(1..=most) as u32, u64::from(buffer) * rng.range(1..=3)));
        ask(client.clone(), number, messages, longest, tasks, fate.clone())
    });
    let asking: Vec<_> = asking.collect();
    let serving = serve(server.clone(), listener, tasks, fate.clone());
    let mut nodes = [Node::new(server, serving), Node::new(client, async { _ = join_all(asking).await })];
    for _ in 0..STEPS {
        step(&fabric, &mut nodes);
        if nodes[1].task.is_none() && nodes.iter().all(Node::is_settled) {
            let dropped = *fate.dropped.borrow();
            let violations = lock(&fabric).violations.clone();
            assert!(violations.is_empty(), "{violations:?}");
            return dropped;
        }
    }
    panic!("not over in {STEPS} steps: {:?}", nodes.map(|node| (node.task.is_some(), node.net.with(|cx| cx.stats()))));
}

#[test]
fn futures_may_be_dropped_whenever_they_wait() {
    let mut dropped = 0;
    let worlds = each_world("AIO", world, |more| dropped += more);
    println!("{worlds} worlds, {dropped} futures dropped");
    assert!(dropped >= worlds, "{dropped} futures dropped are too few");
}
