//! Futures on virtual time, over a network that is slow in all ways, each of them dropped at random while it waits. What a
//! future says of its cancellation holds: nothing is lost, nothing comes twice, and nothing is left over.
//!
//! `AIO_WORLDS=100` sets the number of worlds (default: 10000), and `AIO_SEED=7` runs that one only.

use std::cell::RefCell;
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
use rdma_reactor::aio::{AsyncReactor, Connection, Listener};
use rdma_reactor::{Config, DisconnectReason, SendErrorKind};
use rdma_reactor_tests::sim::fabric::{Fabric, Shared, lock};
use rdma_reactor_tests::sim::poller::virtual_ns;
use rdma_reactor_tests::sim::quiet::reactor;
use rdma_reactor_tests::sim::rng::Rng;
use rdma_reactor_tests::sim::swarm::{FaultOptions, MS, Options};
use rdma_reactor_tests::sim::trace::Trace;

/// Number of steps that a world may take.
const STEPS: u64 = 200_000;

/// The address of node 0, which listens.
const SERVER: ([u8; 4], u16) = ([10, 0, 0, 1], 7471);

/// The waker of a task.
struct Bell(AtomicBool);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// The chance by which futures are dropped, and how many were.
#[derive(Clone)]
struct Fate {
    rng: Rc<RefCell<Rng>>,
    dropped: Rc<RefCell<u64>>,
}

impl Fate {
    fn draw<T>(&self, from: impl FnOnce(&mut Rng) -> T) -> T {
        from(&mut self.rng.borrow_mut())
    }

    /// Lets a future have at most so many polls; `None` if it is dropped.
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

    /// Makes a future and drops it while it waits, again and again with more patience, until one comes to its end.
    async fn insist<T, F: Future<Output = T>>(&self, mut make: impl FnMut() -> F) -> T {
        let mut patience = 1;
        loop {
            let polls = self.draw(|rng| if rng.chance(300) { u64::MAX } else { rng.range(1..=patience) });
            if let Some(output) = self.polls(polls, make()).await {
                return output;
            }
            *self.dropped.borrow_mut() += 1;
            patience *= 2;
            // Others have their turn; what wakes this task meanwhile must not be lost with the future.
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

/// The content of a message of a client.
fn content(client: u8, number: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![client; len.max(5)];
    bytes[1..5].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Sends back what comes on a connection, until its end.
async fn echo(conn: Connection, fate: Fate) -> DisconnectReason {
    loop {
        let message = match fate.insist(|| conn.recv()).await {
            Ok(message) => message,
            Err(reason) => return reason,
        };
        match fate.insist(|| conn.send(&message)).await {
            Ok(_) => {}
            // The rest is received, and then the reason.
            Err(SendErrorKind::Closed) => {}
            Err(other) => panic!("an answer: {other}"),
        }
    }
}

/// Serves everybody.
async fn serve(listener: Listener, fate: Fate) {
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
        echoes.push(Box::pin(echo(conn, fate.clone())));
        accept.set(next());
    }
}

/// Connects, and gets an answer to each of its messages, in order.
async fn ask(net: AsyncReactor, client: u8, messages: u32, longest: u64, fate: Fate) {
    let conn = loop {
        match fate.insist(|| net.connect(SERVER.into())).await {
            Ok(conn) => break conn,
            // The network loses requests.
            Err(_) => fate.insist(|| net.sleep(Duration::from_millis(5))).await,
        }
    };
    let lens: Vec<_> = (0..messages).map(|_| fate.draw(|rng| rng.skewed(5..=longest)) as usize).collect();
    let send = async {
        for (number, &len) in (0..).zip(&lens) {
            let content = content(client, number, len);
            fate.insist(|| conn.send(&content)).await.expect("it is open");
            if fate.draw(|rng| rng.chance(100)) {
                fate.insist(|| net.sleep(Duration::from_micros(700))).await;
            }
        }
    };
    let receive = async {
        for (number, &len) in (0..).zip(&lens) {
            let answer = fate.insist(|| conn.recv()).await.expect("an answer");
            assert!(answer[..] == content(client, number, len), "client {client}: answer {number}");
        }
    };
    futures_util::future::join(send, receive).await;
    if fate.draw(|rng| rng.chance(500)) {
        conn.close();
        let reason = fate.insist(|| conn.closed()).await;
        assert!(matches!(reason, DisconnectReason::Local), "{reason}");
    }
}

/// A node: its reactor and its one task.
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

    /// Polls the task if it was woken; whether it was.
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

/// Polls each task that was woken, and takes each turn that is due. If there is nothing to do, time passes.
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

/// Runs a world; returns the number of futures that were dropped.
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
            .completions_per_turn(fate.draw(|rng| rng.skewed(1..=64)) as u32)
            .keepalive(Duration::from_secs(20), Duration::from_secs(60))
    };
    let [server, client] = [0, 1].map(|node| AsyncReactor::from(reactor(node, &fabric, config())));
    let listener = server.listen(SocketAddr::from(SERVER)).expect("a listener");
    let clients = fate.draw(|rng| rng.range(1..=4)) as u8;
    let asking = (0..clients).map(|number| {
        let (messages, longest) = fate.draw(|rng| (rng.skewed(1..=60) as u32, u64::from(buffer) * rng.range(1..=3)));
        ask(client.clone(), number, messages, longest, fate.clone())
    });
    let asking: Vec<_> = asking.collect();
    let serving = serve(listener, fate.clone());
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
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect("a number"));
    let seeds = match number("AIO_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("AIO_WORLDS").unwrap_or(10_000),
    };
    let mut dropped = 0;
    for seed in seeds.clone() {
        let run = std::panic::catch_unwind(|| world(seed));
        dropped += run.unwrap_or_else(|_| panic!("world {seed}: run it alone with AIO_SEED={seed}"));
    }
    println!("{} worlds, {dropped} futures dropped", seeds.end - seeds.start);
    assert!(dropped >= seeds.end - seeds.start, "{dropped} futures dropped are too few");
}
