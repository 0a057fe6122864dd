//! Tasks that wait for the same connection or listener are woken in the order in which they began to wait, whatever the executor. The tests
//! use virtual time.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context as Task, Poll, Wake, Waker};
use std::time::Duration;

use futures_util::future::select;
use rdma_reactor::aio::{AsyncCalls, AsyncConnection, AsyncListener, AsyncReactor, Received};
use rdma_reactor::{Access, Blocked, Config, DisconnectReason, RegionOptions, RemoteRegion, SendErrorKind, SendId};
use rdma_reactor_tests::sim::fabric::{Script, Shared, lock};
use rdma_reactor_tests::sim::poller::virtual_ns;
use rdma_reactor_tests::sim::quiet::{network, reactor};
use rdma_reactor_tests::sim::swarm::MS;

/// The address of node 0, which listens.
const SERVER: ([u8; 4], u16) = ([10, 0, 0, 1], 7471);

/// The number of simulation steps in which a condition must become true, or the test fails.
const STEPS: u64 = 200_000;

/// The order in which an executor polls the tasks that were woken.
#[derive(Clone, Copy, Debug)]
enum Order {
    FirstWokenFirst,
    LastWokenFirst,
}

const ORDERS: [Order; 2] = [Order::FirstWokenFirst, Order::LastWokenFirst];

/// The tasks that were woken. All wakers of a simulated world share this record.
#[derive(Default)]
struct Woken {
    /// The woken tasks that the executor has not polled since, in the order of their wake-ups.
    queue: Mutex<VecDeque<usize>>,
    /// All wake-ups in order, if a test records them.
    all: Mutex<Option<Vec<usize>>>,
}

/// The waker of one task. `rung` is true from a wake-up until the executor polls the task.
struct Bell {
    task: usize,
    rung: AtomicBool,
    wakes: AtomicU64,
    woken: Arc<Woken>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
        if let Some(all) = &mut *self.woken.all.lock().unwrap() {
            all.push(self.task);
        }
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.woken.queue.lock().unwrap().push_back(self.task);
        }
    }
}

/// A task, and its waker.
type Spawned = (Pin<Box<dyn Future<Output = ()>>>, Arc<Bell>);

/// A server and a client on virtual time, and an executor for the tasks of both.
struct World {
    fabric: Shared,
    nodes: [(AsyncReactor, bool); 2],
    tasks: Vec<Spawned>,
    woken: Arc<Woken>,
    order: Order,
}

impl World {
    fn new(order: Order, server: Config, client: Config) -> Self {
        let fabric = network(2);
        let nodes = [(0, server), (1, client)];
        let nodes = nodes.map(|(node, config)| (AsyncReactor::from(reactor(node, &fabric, config)), true));
        Self { fabric, nodes, tasks: Vec::new(), woken: Arc::default(), order }
    }

    fn server(&self) -> AsyncReactor {
        self.nodes[0].0.clone()
    }

    fn client(&self) -> AsyncReactor {
        self.nodes[1].0.clone()
    }

    /// Adds a task, which is polled in the next step. Returns its waker, which counts later wake-ups.
    fn spawn(&mut self, task: impl Future<Output = ()> + 'static) -> Arc<Bell> {
        let woken = Arc::clone(&self.woken);
        let bell = Arc::new(Bell { task: self.tasks.len(), rung: false.into(), wakes: 0.into(), woken });
        bell.wake_by_ref();
        bell.wakes.store(0, Ordering::Relaxed);
        self.tasks.push((Box::pin(task), Arc::clone(&bell)));
        bell
    }

    /// Polls the tasks that were woken, and runs the turns that are due. If no task was woken and no turn is due, advances the virtual
    /// time.
    fn step(&mut self) {
        let woken = std::mem::take(&mut *self.woken.queue.lock().unwrap());
        let mut idle = woken.is_empty();
        let mut poll = |task: usize| {
            let (future, bell) = &mut self.tasks[task];
            bell.rung.store(false, Ordering::Release);
            let waker = Waker::from(Arc::clone(bell));
            if future.as_mut().poll(&mut Task::from_waker(&waker)).is_ready() {
                *future = Box::pin(std::future::pending());
            }
        };
        match self.order {
            Order::FirstWokenFirst => woken.into_iter().for_each(&mut poll),
            Order::LastWokenFirst => woken.into_iter().rev().for_each(&mut poll),
        }
        let now = lock(&self.fabric).now();
        let mut next = lock(&self.fabric).next();
        for (node, (net, more)) in self.nodes.iter_mut().enumerate() {
            let due = net.next_deadline().map(virtual_ns);
            if *more || lock(&self.fabric).is_runnable(node, true) || due.is_some_and(|due| due <= now) {
                lock(&self.fabric).seen(node);
                *more = net.turn(Duration::ZERO).expect("a turn").more;
                idle = false;
            }
            next = next.into_iter().chain(due).min();
        }
        if idle {
            lock(&self.fabric).advance(next.map_or(now + MS, |next| next.max(now + 1)));
        }
    }

    #[track_caller]
    fn until(&mut self, what: &str, mut done: impl FnMut() -> bool) {
        for _ in 0..STEPS {
            if done() {
                return;
            }
            self.step();
        }
        panic!("not in {STEPS} steps: {what}");
    }

    /// Runs tasks and turns for 20 ms of virtual time.
    fn settle(&mut self) {
        let until = lock(&self.fabric).now() + 20 * MS;
        while lock(&self.fabric).now() < until {
            self.step();
        }
    }

    /// Runs turns for 1 ms. If the last step has sent a ping, it is answered within this time, and
    /// its credit is free again.
    fn answer_pings(&mut self) {
        let until = lock(&self.fabric).now() + MS;
        lock(&self.fabric).schedule(until, Script::Tick);
        while lock(&self.fabric).now() < until {
            self.step();
        }
    }

    /// Runs a future to its end. Returns its result.
    #[track_caller]
    fn wait<T: 'static>(&mut self, what: &str, future: impl Future<Output = T> + 'static) -> T {
        let done = self.begin(future);
        self.until(what, || done.borrow().is_some());
        done.take().expect("it is done")
    }

    /// Starts a future as a task. Returns a cell that receives its result.
    fn begin<T: 'static>(&mut self, future: impl Future<Output = T> + 'static) -> Rc<RefCell<Option<T>>> {
        let done = Rc::new(RefCell::new(None));
        let output = Rc::clone(&done);
        self.spawn(async move { *output.borrow_mut() = Some(future.await) });
        done
    }

    /// Connects the client to the server. Returns the client's end and the server's end of the connection.
    fn pair(&mut self) -> (AsyncConnection, AsyncConnection) {
        let listener = self.server().listen(SocketAddr::from(SERVER)).unwrap();
        let client = self.client();
        self.wait("a connection", async move {
            let (here, there) = futures_util::join!(client.connect(SERVER.into()), listener.accept());
            (here.unwrap(), there.unwrap())
        })
    }
}

/// Polls a future once, and drops it. Returns the result of the poll.
fn poll_once<T>(future: impl Future<Output = T>, waker: &Waker) -> Poll<T> {
    pin!(future).poll(&mut Task::from_waker(waker))
}

/// Starts a task that receives all messages of a connection.
fn receive_all(world: &mut World, conn: &AsyncConnection) {
    let conn = conn.clone();
    world.spawn(async move { while conn.recv().await.is_ok() {} });
}

/// The results of concurrent tasks that send on one connection.
struct Sends {
    /// The number of messages that each task has sent since all tasks have begun to send.
    counts: Vec<u64>,
    /// The number of wake-ups of all tasks together.
    wakes: u64,
    /// The largest number of messages that one task has sent while another task waited to send one message.
    overtakes: u64,
}

/// The tasks that wait to send. `line` has them by the order in which they began to wait, and `done` has the number of messages that each
/// task has sent.
#[derive(Default)]
struct Waiting {
    line: BTreeMap<u64, usize>,
    arrivals: u64,
    done: Vec<u64>,
    overtakes: u64,
}

/// Runs tasks that send `total` messages on one connection. Checks that waiting tasks are woken in the order in which they began to wait.
fn sends_by_each(order: Order, tasks: usize, total: u64, len: usize) -> Sends {
    let mut world = World::new(order, Config::default(), Config::default());
    let (here, there) = world.pair();
    receive_all(&mut world, &there);
    let (sent, begun) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let waiting = Rc::new(RefCell::new(Waiting { done: vec![0; tasks], ..Waiting::default() }));
    let counts: Vec<_> = (0..tasks).map(|_| Rc::new(Cell::new(0))).collect();
    let first = world.tasks.len();
    *world.woken.all.lock().unwrap() = Some(Vec::new());
    let bells: Vec<_> = counts
        .iter()
        .enumerate()
        .map(|(task, count)| {
            let (here, count, sent, begun) = (here.clone(), Rc::clone(count), Rc::clone(&sent), Rc::clone(&begun));
            let (waiting, woken) = (Rc::clone(&waiting), Arc::clone(&world.woken));
            world.spawn(async move {
                let payload = vec![7; len];
                let send = || in_line(task, first, &waiting, &woken, here.send(&payload));
                send().await;
                begun.set(begun.get() + 1);
                while sent.get() < total {
                    send().await;
                    // Messages are counted only once all tasks have begun to send. Before that, the first task had the whole window to
                    // itself.
                    if begun.get() == tasks {
                        count.set(count.get() + 1);
                    }
                    sent.set(sent.get() + 1);
                }
            })
        })
        .collect();
    world.until("all messages", || sent.get() >= total);
    let wakes = bells.iter().map(|bell| bell.wakes.load(Ordering::Relaxed)).sum();
    let overtakes = waiting.borrow().overtakes;
    Sends { counts: counts.iter().map(|count| count.get()).collect(), wakes, overtakes }
}

/// Awaits a send. Records when the task begins to wait, when it is woken, and how many messages other tasks send meanwhile.
async fn in_line(
    task: usize,
    first: usize,
    waiting: &RefCell<Waiting>,
    woken: &Woken,
    send: impl Future<Output = Result<SendId, SendErrorKind>>,
) {
    let (mut send, mut came, mut before) = (pin!(send), None, Vec::new());
    let sent = poll_fn(|cx| {
        let state = &mut *waiting.borrow_mut();
        // Each task that was woken since the last check must have been the first of those that wait.
        for called in woken.all.lock().unwrap().iter_mut().flat_map(|all| all.drain(..)) {
            let Some(called) = called.checked_sub(first).filter(|&called| called < state.done.len()) else { continue };
            if let Some((_, next)) = state.line.pop_first() {
                assert_eq!(called, next, "it came later than another one");
            }
        }
        let sent = send.as_mut().poll(cx);
        if sent.is_pending() {
            let arrival = *came.get_or_insert_with(|| {
                state.arrivals += 1;
                before.clone_from(&state.done);
                state.arrivals
            });
            // The task was woken, but the window still has no room. It keeps its position among the waiting tasks.
            state.line.insert(arrival, task);
        } else {
            let others = state.done.iter().zip(&before).map(|(done, before)| done - before);
            state.overtakes = others.max().unwrap_or(0).max(state.overtakes);
            state.done[task] += 1;
        }
        sent
    });
    sent.await.unwrap();
}

/// Waiting tasks are woken in the order in which they began to wait, in any executor. So no task sends more than two messages while another
/// task waits to send one. With an executor that polls tasks in the order of their wake-ups, all tasks send the same number of messages.
/// With an executor that polls the last woken task first, tasks that are woken together send in reverse order, and some tasks may send
/// twice as many messages as others.
#[test]
fn tasks_that_send_on_one_connection_send_as_much_as_each_other() {
    for order in ORDERS {
        // The last case has messages above `LargeMessageSettings::eager_limit`, of which 16 are in flight at the same time.
        for (tasks, each, len) in [(2, 100, 64), (10, 100, 64), (100, 100, 64), (1000, 100, 64), (40, 200, 300_000)] {
            let Sends { counts, overtakes, .. } = sends_by_each(order, tasks, tasks as u64 * each, len);
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            let what = format!("{order:?}, {tasks} tasks, {len} B: {least} to {most} messages, {overtakes} overtakes");
            println!("{what}");
            match order {
                Order::FirstWokenFirst => assert!(most - least <= most / 10 && overtakes <= 1, "{what}"),
                Order::LastWokenFirst => assert!(overtakes <= 2, "{what}"),
            }
        }
    }
}

#[test]
fn a_message_costs_one_wake_up_however_many_tasks_wait() {
    for tasks in [10, 5_000] {
        let Sends { wakes, .. } = sends_by_each(Order::FirstWokenFirst, tasks, 20_000, 64);
        println!("{tasks} tasks: {wakes} wake-ups for 20,000 messages");
        assert!(wakes <= 20_000 + 2 * tasks as u64, "{tasks} tasks: {wakes} wake-ups for 20,000 messages");
    }
}

/// Sends until the window of the connection is closed. The caller ensures that the peer receives nothing meanwhile. Returns the number of
/// sent messages.
fn fill(world: &mut World, conn: &AsyncConnection) -> u32 {
    let (mut sent, mut quiet) = (0_u32, 0);
    while quiet < 3 {
        quiet += 1;
        while conn.try_send(&sent.to_le_bytes()).is_ok() {
            (sent, quiet) = (sent + 1, 0);
        }
        world.settle();
    }
    assert_eq!(conn.try_send(b"one too many"), Err(SendErrorKind::WouldBlock(Blocked::Window)));
    sent
}

/// Receives as many messages as filled the window, so that the window has room again.
fn make_room(world: &mut World, conn: &AsyncConnection, filled: u32) {
    let conn = conn.clone();
    world.wait("room", async move {
        for _ in 0..filled {
            conn.recv().await.unwrap();
        }
    });
}

/// If a send is dropped while it waits, the next waiting send is not blocked, whether or not the dropped send was already woken.
#[test]
fn a_dropped_send_passes_its_turn_on() {
    for drop_with_turn in [false, true] {
        let config = || Config::default().receive_depth(8).send_depth(8);
        let mut world = World::new(Order::FirstWokenFirst, config(), config());
        let (here, there) = world.pair();
        let filled = fill(&mut world, &here);
        let bell = Arc::new(Bell { task: 0, rung: true.into(), wakes: 0.into(), woken: Arc::default() });
        let waker = Waker::from(Arc::clone(&bell));
        let conn = here.clone();
        let mut first: Pin<Box<dyn Future<Output = _>>> = Box::pin(async move { conn.send(b"first").await });
        assert!(first.as_mut().poll(&mut Task::from_waker(&waker)).is_pending());
        let conn = here.clone();
        let second = world.begin(async move { conn.send(b"second").await });
        world.settle();
        assert!(second.borrow().is_none() && bell.wakes.load(Ordering::Relaxed) == 0);
        assert!(matches!(here.try_send(b"third"), Err(SendErrorKind::WouldBlock(_))));
        if !drop_with_turn {
            first = Box::pin(std::future::pending());
        }
        // The peer receives the messages, so the window has room again. If the first task still exists, it is woken, but it is not polled.
        make_room(&mut world, &there, filled);
        world.settle();
        assert_eq!(bell.wakes.load(Ordering::Relaxed), u64::from(drop_with_turn));
        drop(first);
        world.until("the second message", || second.borrow().is_some());
        let receiver = there.clone();
        let got = world.wait("a message", async move { receiver.recv().await.unwrap().to_vec() });
        assert_eq!(got, b"second");
    }
}

/// The future of a task that sends.
type Sending = Pin<Box<dyn Future<Output = ()>>>;

thread_local! {
    /// The futures that only their wakers own. An [`Owner`] has the index of its future.
    static OWNED: RefCell<Vec<Option<Sending>>> = const { RefCell::new(Vec::new()) };
}

/// The waker of a task that was cancelled while it waited. A call of the waker drops the task's future, which the waker owns.
struct Owner(usize);

impl Wake for Owner {
    fn wake(self: Arc<Self>) {
        drop(OWNED.with_borrow_mut(|owned| owned[self.0].take()));
    }
}

/// If a call of a waker drops the send that it should wake, the turn of this send passes to the next waiting task. That task was not woken
/// before.
#[test]
fn a_waker_that_drops_its_send_passes_the_turn_on() {
    let config = || Config::default().receive_depth(8).send_depth(8);
    let mut world = World::new(Order::FirstWokenFirst, config(), config());
    let (here, there) = world.pair();
    let filled = fill(&mut world, &here);
    for task in 0..filled as usize {
        let conn = here.clone();
        let mut send: Sending = Box::pin(async move { conn.send(b"cancelled").await.map(drop).unwrap() });
        assert!(send.as_mut().poll(&mut Task::from_waker(&Waker::from(Arc::new(Owner(task))))).is_pending());
        OWNED.with_borrow_mut(|owned| owned.push(Some(send)));
    }
    let conn = here.clone();
    let last = world.begin(async move { conn.send(b"last").await.map(drop).unwrap() });
    world.settle();
    make_room(&mut world, &there, filled);
    world.until("the last message", || last.borrow().is_some());
    let got = world.wait("a message", async move { there.recv().await.unwrap().to_vec() });
    assert_eq!(got, b"last");
}

/// Room in the window is reserved for the waiting tasks, so `try_send` and new sends cannot overtake these tasks.
#[test]
fn room_for_tasks_that_wait_is_theirs() {
    let config = || Config::default().receive_depth(8).send_depth(8);
    let mut world = World::new(Order::FirstWokenFirst, config(), config());
    let (here, there) = world.pair();
    let filled = fill(&mut world, &here);
    let bell = Arc::new(Bell { task: 0, rung: true.into(), wakes: 0.into(), woken: Arc::default() });
    let waker = Waker::from(Arc::clone(&bell));
    let waiting: Vec<_> = (0..filled)
        .map(|_| {
            let here = here.clone();
            let mut send = Box::pin(async move { here.send(b"waits").await });
            assert!(send.as_mut().poll(&mut Task::from_waker(&waker)).is_pending());
            send
        })
        .collect();
    make_room(&mut world, &there, filled);
    world.settle();
    world.answer_pings();
    let room = world.client().with(|cx| cx.writable(here.id())) as u64;
    assert!(room > 0 && bell.wakes.load(Ordering::Relaxed) == room.min(waiting.len() as u64));
    assert!(matches!(here.try_send(b"overtakes"), Err(SendErrorKind::WouldBlock(Blocked::Window))));
    let late = here.clone();
    let late = world.begin(async move { late.send(b"late").await });
    world.step();
    assert!(late.borrow().is_none(), "a newcomer overtakes {} that wait", waiting.len());
    // The sends that waited complete first, and then the new send completes.
    receive_all(&mut world, &there);
    for send in waiting {
        world.wait("a message that has waited", send).unwrap();
    }
    world.until("the newcomer", || late.borrow().is_some());
}

/// A send that was woken but not polled again reserves room for one message only. Other tasks use the remaining room.
#[test]
fn a_task_that_does_not_use_its_turn_holds_nobody_up() {
    let config = || Config::default().receive_depth(16).send_depth(16);
    let mut world = World::new(Order::FirstWokenFirst, config(), config());
    let (here, there) = world.pair();
    fill(&mut world, &here);
    let conn = here.clone();
    let mut idle = Box::pin(async move { conn.send(b"never polled again").await });
    assert!(idle.as_mut().poll(&mut Task::from_waker(Waker::noop())).is_pending());
    let sent = Rc::new(Cell::new(0));
    for _ in 0..20 {
        let (here, sent) = (here.clone(), Rc::clone(&sent));
        world.spawn(async move {
            for _ in 0..50 {
                here.send(b"goes on").await.unwrap();
                sent.set(sent.get() + 1);
            }
        });
    }
    receive_all(&mut world, &there);
    world.until("the messages of the others", || sent.get() == 1000);
    drop(idle);
}

/// A message that waits for the peer's credits does not block RDMA operations of other tasks, which need no credits.
#[test]
fn operations_pass_messages_that_wait_for_the_peer() {
    let mut world = World::new(Order::FirstWokenFirst, Config::default(), Config::default());
    let (here, there) = world.pair();
    let shared = there.register(4096, &RegionOptions::new().allow(Access::REMOTE_WRITE)).unwrap();
    let remote = RemoteRegion::from_bytes(&shared.remote().to_bytes()).unwrap();
    fill(&mut world, &here);
    let conn = here.clone();
    let waiting = world.begin(async move { conn.send(b"waits for the peer").await });
    world.settle();
    let done = Rc::new(Cell::new(0));
    for _ in 0..200 {
        let (here, done) = (here.clone(), Rc::clone(&done));
        world.spawn(async move {
            let mut local = here.register(64, &RegionOptions::new()).unwrap();
            here.write(remote.part(0, 8).unwrap(), &local, 0..8).await.unwrap();
            local.bytes_mut().unwrap();
            done.set(done.get() + 1);
        });
    }
    let begun = lock(&world.fabric).now();
    world.until("all writes", || done.get() == 200);
    assert!(lock(&world.fabric).now() < begun + 1000 * MS, "the writes wait for a timer");
    assert!(waiting.borrow().is_none());
    // A send by `AsyncConnection::operate` also waits behind the sends that wait already.
    let conn = here.clone();
    let operation = world.begin(async move { conn.operate(|cx| cx.send(conn.id(), b"an operation")).await });
    world.settle();
    assert!(operation.borrow().is_none());
    receive_all(&mut world, &there);
    world.until("the messages", || waiting.borrow().is_some() && operation.borrow().is_some());
}

/// Large messages that wait for earlier ones, or for memory, do not block small messages.
#[test]
fn small_messages_pass_large_ones_that_wait() {
    for memory in [1 << 20, 64 << 20] {
        let client = Config::default()
            .large_messages(|l| l.eager_limit = 0)
            .large_messages(|l| l.max_message = 1 << 20)
            .large_messages(|l| l.memory = memory);
        // The server's program receives nothing. So the server's reactor fetches only as many large messages as fit into its memory for
        // them.
        let server =
            Config::default().large_messages(|l| l.max_message = 1 << 20).large_messages(|l| l.memory = 1 << 20);
        let mut world = World::new(Order::FirstWokenFirst, server, client);
        let (here, there) = world.pair();
        let large: Vec<_> = (0..40)
            .map(|_| {
                let here = here.clone();
                world.begin(async move { here.send(&[1; 100_000]).await })
            })
            .collect();
        world.settle();
        assert!(large.last().is_some_and(|last| last.borrow().is_none()), "the last one waits");
        for _ in 0..5 {
            let here = here.clone();
            world.wait("a small message", async move { here.send(b"small").await }).unwrap();
        }
        assert!(large.last().is_some_and(|last| last.borrow().is_none()), "the last one still waits");
        receive_all(&mut world, &there);
        world.until("the large messages", || large.iter().all(|send| send.borrow().is_some()));
    }
}

/// When one side closes the connection, its waiting sends and its later sends fail with `Closed`.
#[test]
fn tasks_that_wait_hear_of_a_close() {
    let mut world = World::new(Order::FirstWokenFirst, Config::default(), Config::default());
    let (here, _there) = world.pair();
    fill(&mut world, &here);
    let conn = here.clone();
    let waiting = world.begin(async move { conn.send(b"waits").await });
    world.settle();
    here.close();
    let conn = here.clone();
    let late = world.begin(async move { conn.send(b"comes late").await });
    world.until("their errors", || waiting.borrow().is_some() && late.borrow().is_some());
    assert_eq!((waiting.take(), late.take()), (Some(Err(SendErrorKind::Closed)), Some(Err(SendErrorKind::Closed))));
}

/// A task waits for a message and is notified. Before the task is polled, the connection becomes
/// one for calls, and the message becomes a call. The end of the connection must still wake the
/// task.
#[test]
fn a_task_whose_message_became_a_call_hears_of_the_end() {
    let mut world = World::new(Order::FirstWokenFirst, Config::default(), Config::default());
    let (here, there) = world.pair();
    let (conn, ended) = (there.clone(), Rc::new(Cell::new(false)));
    let output = Rc::clone(&ended);
    let bell = world.spawn(async move { output.set(conn.recv().await.is_err()) });
    let caller = AsyncCalls::from(here.clone());
    world.spawn(async move { drop(caller.call(b"a question", Duration::from_secs(60)).await) });
    world.until("a message", || bell.wakes.load(Ordering::Relaxed) > 0);
    let calls = AsyncCalls::from(there);
    world.settle();
    assert!(!ended.get(), "the connection is open");
    here.close();
    world.until("the end", || ended.get());
    drop(calls);
}

/// Tasks that wait for messages of one connection receive them in the order in which they began to wait. If a woken task is dropped, the
/// next task receives the message.
#[test]
fn tasks_that_receive_have_their_turns() {
    let mut world = World::new(Order::FirstWokenFirst, Config::default(), Config::default());
    let (here, there) = world.pair();
    let got: Rc<RefCell<Vec<(u32, u32)>>> = Rc::default();
    for task in 0..5 {
        let (there, got) = (there.clone(), Rc::clone(&got));
        world.spawn(async move {
            for _ in 0..10 {
                let message = there.recv().await.unwrap();
                let number = u32::from_le_bytes(message[..].try_into().unwrap());
                got.borrow_mut().push((task, number));
            }
        });
    }
    world.settle();
    for number in 0..50_u32 {
        here.try_send(&number.to_le_bytes()).unwrap();
        if number % 7 == 0 {
            world.settle();
        }
    }
    world.until("all messages", || got.borrow().len() == 50);
    let expected: Vec<_> = (0..50).map(|number| (number % 5, number)).collect();
    assert_eq!(*got.borrow(), expected);
    // The first of two waiting tasks is woken for a message, and is dropped before it receives the message.
    let bell = Arc::new(Bell { task: 0, rung: true.into(), wakes: 0.into(), woken: Arc::default() });
    let waker = Waker::from(Arc::clone(&bell));
    let conn = there.clone();
    let mut first = Box::pin(async move { conn.recv().await.map(Received::detach) });
    assert!(first.as_mut().poll(&mut Task::from_waker(&waker)).is_pending());
    let conn = there.clone();
    let second = world.begin(async move { conn.recv().await.unwrap().to_vec() });
    world.settle();
    here.try_send(b"for one of them").unwrap();
    world.settle();
    assert!(bell.wakes.load(Ordering::Relaxed) == 1 && second.borrow().is_none(), "it is the turn of the first one");
    drop(first);
    world.until("the message", || second.borrow().is_some());
    assert_eq!(second.take().unwrap(), b"for one of them");
}

#[test]
fn tasks_that_accept_have_their_turns() {
    let mut world = World::new(Order::FirstWokenFirst, Config::default(), Config::default());
    let listener: Rc<AsyncListener> = Rc::new(world.server().listen(SocketAddr::from(SERVER)).unwrap());
    let bell = Arc::new(Bell { task: 0, rung: true.into(), wakes: 0.into(), woken: Arc::default() });
    let waker = Waker::from(Arc::clone(&bell));
    let own = Rc::clone(&listener);
    let mut dropped = Box::pin(async move { own.accept().await });
    assert!(dropped.as_mut().poll(&mut Task::from_waker(&waker)).is_pending());
    let accepted: Rc<RefCell<Vec<usize>>> = Rc::default();
    for task in 0..3 {
        let (listener, accepted) = (Rc::clone(&listener), Rc::clone(&accepted));
        world.spawn(async move {
            let conn = listener.accept().await.unwrap();
            accepted.borrow_mut().push(task);
            conn.closed().await;
        });
    }
    world.settle();
    let client = world.client();
    let mut kept = Vec::new();
    for connected in 0..3 {
        let client = client.clone();
        kept.push(world.wait("a connection", async move { client.connect(SERVER.into()).await.unwrap() }));
        world.settle();
        assert_eq!(accepted.borrow().len(), connected, "the first one has its turn still");
    }
    assert_eq!(bell.wakes.load(Ordering::Relaxed), 1);
    drop(dropped);
    world.until("all connections", || accepted.borrow().len() == 3);
    assert_eq!(*accepted.borrow(), [0, 1, 2]);
}

/// Peers connect and disconnect again and again, and no task accepts the connections. The queue of the listener holds 1,024 ended
/// connections. While it is full, new connections are closed.
#[test]
fn ended_connections_that_no_task_accepts_are_limited() {
    let mut world = World::new(Order::FirstWokenFirst, Config::default(), Config::default());
    let (server, client) = (world.server(), world.client());
    let listener = server.listen(SocketAddr::from(SERVER)).unwrap();
    for number in 0..1024_u32 {
        let client = client.clone();
        world.wait("a connection that ends", async move {
            let conn = client.connect(SERVER.into()).await.unwrap();
            conn.send(&number.to_le_bytes()).await.unwrap();
            conn.close();
            conn.closed().await
        });
    }
    world.until("all have ended", || server.with(|cx| cx.connections()) == 0);
    let more = client.clone();
    let end = world.wait("the end of one too many", async move {
        let conn = more.connect(SERVER.into()).await.unwrap();
        conn.closed().await
    });
    assert_eq!(end, DisconnectReason::Closed);
    let (_listener, number) = world.wait("the first one", async move {
        let conn = listener.accept().await.unwrap();
        let number = conn.recv().await.unwrap().to_vec();
        (listener, number)
    });
    assert_eq!(number, 0_u32.to_le_bytes(), "what an ended connection has received is not lost");
    let last = world.wait("a connection", async move { client.connect(SERVER.into()).await.unwrap() });
    world.settle();
    assert_eq!(server.with(|cx| cx.connections()), 1, "there is room for {last:?}");
}

#[test]
fn a_shutdown_ends_the_wait_for_connections() {
    let mut world = World::new(Order::FirstWokenFirst, Config::default(), Config::default());
    let server = world.server();
    let listener = server.listen(SocketAddr::from(SERVER)).unwrap();
    let accepted = world.begin(async move { listener.accept().await.is_some() });
    world.settle();
    assert!(accepted.borrow().is_none());
    server.shutdown(Duration::from_secs(1)).unwrap();
    world.until("the end of the wait", || accepted.borrow().is_some());
    assert_eq!(accepted.take(), Some(false));
}

/// A closure of the program requests an operation, and then panics. The task that takes the turns is woken nevertheless, so that the
/// operation does not wait for the next event.
#[test]
fn a_closure_that_panics_wakes_the_driver() {
    let mut world = World::new(Order::FirstWokenFirst, Config::default(), Config::default());
    world.settle();
    let client = world.client();
    let bell = Arc::new(Bell { task: 0, rung: false.into(), wakes: 0.into(), woken: Arc::default() });
    let waker = Waker::from(Arc::clone(&bell));
    let mut requested = pin!(client.turn_requested());
    assert!(requested.as_mut().poll(&mut Task::from_waker(&waker)).is_pending());
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        client.with(|cx| {
            cx.timers().set(Duration::ZERO, 0);
            assert!(cx.connections() > 0, "a planted panic");
        });
    }));
    assert!(panicked.is_err());
    assert_eq!(bell.wakes.load(Ordering::Relaxed), 1);
    assert!(requested.as_mut().poll(&mut Task::from_waker(&waker)).is_ready());
}

thread_local! {
    /// The reactor that [`LastOwner`] uses, and the number of its uses.
    static USED: RefCell<(Option<AsyncReactor>, u32)> = const { RefCell::new((None, 0)) };
}

/// A waker that uses a reactor when it is dropped. The waker of a task does that if it is the last owner of the task, and the task has a
/// value whose destructor uses the reactor.
struct LastOwner;

impl Wake for LastOwner {
    fn wake(self: Arc<Self>) {}
}

impl Drop for LastOwner {
    fn drop(&mut self) {
        USED.with_borrow_mut(|(net, uses)| {
            *uses += 1;
            net.as_ref().map(|net| net.with(|cx| cx.connections()))
        });
    }
}

/// When a `Sleep` is dropped, its waker is dropped, too. The reactor is not borrowed then, so the owners of the waker may use it.
#[test]
fn a_waker_that_a_dropped_sleep_owns_may_use_the_reactor() {
    let world = World::new(Order::FirstWokenFirst, Config::default(), Config::default());
    let client = world.client();
    USED.set((Some(client.clone()), 0));
    let mut sleep = Box::pin(client.sleep(Duration::from_secs(60)));
    let waker = Waker::from(Arc::new(LastOwner));
    assert!(sleep.as_mut().poll(&mut Task::from_waker(&waker)).is_pending());
    drop(waker);
    assert_eq!(USED.with_borrow(|(_, uses)| *uses), 0, "the timer owns the waker");
    drop(sleep);
    let (_net, uses) = USED.take();
    assert_eq!(uses, 1);
}

/// A waker that counts how many wakers of its kind exist.
struct Counted(Arc<AtomicU64>);

impl Counted {
    fn waker(count: &Arc<AtomicU64>) -> Waker {
        count.fetch_add(1, Ordering::Relaxed);
        Waker::from(Arc::new(Self(Arc::clone(count))))
    }
}

impl Wake for Counted {
    fn wake(self: Arc<Self>) {}
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Futures that were polled and dropped on an idle connection leave neither wakers nor memory behind.
#[test]
fn a_hundred_thousand_dropped_futures_leave_nothing() {
    let mut world = World::new(Order::FirstWokenFirst, Config::default(), Config::default());
    let (here, there) = world.pair();
    let client = world.client();
    let listener = client.listen(([10, 0, 0, 2], 7471).into()).unwrap();
    fill(&mut world, &here);
    let tasks = Arc::new(AtomicU64::new(0));
    let give_up = |times: u32| {
        let timeout = || client.sleep(Duration::from_secs(60));
        for number in 0..times {
            let waker = Counted::waker(&tasks);
            assert!(poll_once(select(pin!(here.recv()), timeout()), &waker).is_pending());
            assert!(poll_once(select(pin!(here.send(b"no room")), timeout()), &waker).is_pending());
            assert!(poll_once(here.closed(), &waker).is_pending());
            assert!(poll_once(listener.accept(), &waker).is_pending());
            if number % 100 == 0 {
                client.turn(Duration::ZERO).unwrap();
            }
        }
    };
    give_up(1000);
    let used = allocation_counter::measure(|| give_up(100_000));
    assert_eq!(tasks.load(Ordering::Relaxed), 0, "wakers of dropped futures are kept");
    assert!(used.bytes_current <= 0, "{} bytes are kept", used.bytes_current);
    // The connection still works: messages are received and sent.
    receive_all(&mut world, &there);
    world.wait("a message", async move { here.send(b"there is room").await }).unwrap();
}
