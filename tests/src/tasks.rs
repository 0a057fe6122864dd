//! Steady states of [`crate::steady`] in which the client is a task. The module has one state for each kind of loop that can run a task,
//! and one state in which many tasks send on one connection.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as Task, Poll, Wake, Waker};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdma_reactor::aio::AsyncReactor;
use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor, ReactorHandle, Wait};

const SIZE: usize = 64;

/// A handler that sends every message back.
struct Echo;

impl Handler for Echo {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        cx.send(conn, &message).expect("room for an answer");
    }
}

/// The waker of an executor that has one task.
#[derive(Default)]
struct Bell(AtomicBool);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// Returns settings with which a reactor sleeps without polling first. With polling, the number of instructions would depend on time.
fn config() -> Config {
    Config::default().provider(ProviderChoice::Iwarp).wait(Wait::Event)
}

/// Returns a server's reactor, which listens, and its address.
fn server() -> (Reactor, SocketAddr) {
    let mut server = Reactor::new(config()).expect("a reactor");
    let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a listener");
    let address = server.context().listeners().local_address(listener).expect("it listens");
    (server, address)
}

/// Runs a server on a separate thread until it is stopped. Returns the thread, the handle that stops the server, and the address of the
/// server.
#[allow(clippy::disallowed_methods, reason = "the server of a client that sleeps")]
fn serving() -> (JoinHandle<()>, ReactorHandle, SocketAddr) {
    let (mut server, address) = server();
    let remote = server.handle();
    (thread::spawn(move || server.run(&mut Echo).expect("turns")), remote, address)
}

async fn ask(net: &AsyncReactor, address: SocketAddr, done: &Cell<u64>, times: u64) {
    let conn = net.connect(address).await.expect("a connection");
    while done.get() < times {
        conn.send(&[7; SIZE]).await.expect("it is open");
        let answer = conn.recv().await.expect("an answer");
        assert_eq!(answer.len(), SIZE);
        done.set(done.get() + 1);
    }
}

/// The handler of a client. The field is the number of round trips that the client must still make.
struct Client(u64);

impl Handler for Client {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        cx.send(conn, &[7; SIZE]).expect("room for a question");
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        assert_eq!(message.len(), SIZE);
        self.0 -= 1;
        if self.0 == 0 {
            return cx.stop();
        }
        cx.send(conn, &[7; SIZE]).expect("room for a question");
    }
}

/// Runs `times` round trips of a client that uses callbacks.
///
/// # Panics
/// Panics if the machine has no loopback interface.
pub fn round_trips_of_callbacks(times: u64) {
    let (thread, remote, address) = serving();
    let mut reactor = Reactor::new(config()).expect("a reactor");
    reactor.context().connect(address).expect("an attempt");
    measured_turns_of_callbacks(&mut reactor, &mut Client(times));
    remote.stop();
    thread.join().expect("a server");
}

/// Runs `times` round trips of a task that the reactor runs.
///
/// # Panics
/// Panics if the machine has no loopback interface.
pub fn round_trips_of_run(times: u64) {
    let (thread, remote, address) = serving();
    let net = AsyncReactor::new(config()).expect("a reactor");
    measured_turns_of_run(&net, ask(&net, address, &Cell::new(0), times));
    remote.stop();
    thread.join().expect("a server");
}

#[inline(never)]
fn measured_turns_of_callbacks(reactor: &mut Reactor, client: &mut Client) {
    reactor.run(client).expect("turns");
}

#[inline(never)]
fn measured_turns_of_run(net: &AsyncReactor, task: impl Future<Output = ()>) {
    net.run(task).expect("turns");
}

/// Runs at least `times` round trips of a task in another executor. The number of round trips may be one more.
///
/// # Panics
/// Panics if the machine has no loopback interface.
pub fn round_trips(times: u64) {
    let (mut server, address) = server();
    let net = AsyncReactor::new(config()).expect("a reactor");
    let done = Rc::new(Cell::new(0));
    let mut task = pin!(ask(&net, address, &done, u64::MAX));
    let bell = Arc::new(Bell(AtomicBool::new(true)));
    let waker = Waker::from(Arc::clone(&bell));
    while done.get() <= times {
        measured_turn(&net, &bell, &waker, task.as_mut());
        server.turn(&mut Echo, Duration::ZERO).expect("a turn");
    }
}

/// Takes one turn, in the place of an executor: polls the task if it was woken, and takes a turn of the reactor. callgrind counts only
/// functions whose names begin with `measured_turn`.
#[inline(never)]
fn measured_turn(net: &AsyncReactor, bell: &Bell, waker: &Waker, task: Pin<&mut impl Future<Output = ()>>) {
    let mut cx = Task::from_waker(waker);
    let mut requested = net.turn_requested();
    let _ = Pin::new(&mut requested).poll(&mut cx);
    if bell.0.swap(false, Ordering::AcqRel) {
        assert!(task.poll(&mut cx).is_pending(), "it sends requests forever");
    }
    drop(requested);
    net.turn(Duration::ZERO).expect("a turn");
}

/// A handler that receives every message and does nothing.
struct Sink;

impl Handler for Sink {}

/// The numbers of the tasks that were woken, in order.
type Woken = Arc<Mutex<VecDeque<usize>>>;

/// The waker of one of several tasks.
struct Ring {
    task: usize,
    woken: Woken,
}

impl Wake for Ring {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.lock().unwrap_or_else(PoisonError::into_inner).push_back(self.task);
    }
}

/// The tasks that send on one connection, each with its waker.
type Senders = Vec<(Pin<Box<dyn Future<Output = ()>>>, Waker)>;

/// Sends at least `times` messages on one connection, from `tasks` tasks. Each task's first message is not counted.
///
/// # Panics
/// Panics if the machine has no loopback interface.
pub fn sends(tasks: usize, times: u64) {
    let (mut server, address) = server();
    let net = AsyncReactor::new(config()).expect("a reactor");
    let mut connect = Box::pin(net.connect(address));
    let conn = loop {
        if let Poll::Ready(conn) = connect.as_mut().poll(&mut Task::from_waker(Waker::noop())) {
            break conn.expect("a connection");
        }
        net.turn(Duration::ZERO).expect("a turn");
        server.turn(&mut Sink, Duration::ZERO).expect("a turn");
    };
    let (sent, woken) = (Rc::new(Cell::new(0)), Woken::default());
    let mut senders: Senders = (0..tasks)
        .map(|task| {
            let (conn, sent) = (conn.clone(), Rc::clone(&sent));
            let sends: Pin<Box<dyn Future<Output = ()>>> = Box::pin(async move {
                loop {
                    conn.send(&[7; SIZE]).await.expect("it is open");
                    sent.set(sent.get() + 1);
                }
            });
            (sends, Waker::from(Arc::new(Ring { task, woken: Arc::clone(&woken) })))
        })
        .collect();
    senders.iter().for_each(|(_, waker)| waker.wake_by_ref());
    while sent.get() < tasks as u64 + times {
        measured_turn_of_senders(&net, &woken, &mut senders);
        server.turn(&mut Sink, Duration::ZERO).expect("a turn");
    }
}

/// Takes one turn, in the place of an executor: polls the tasks that were woken, and takes a turn of the reactor.
#[inline(never)]
fn measured_turn_of_senders(net: &AsyncReactor, woken: &Woken, senders: &mut Senders) {
    let called = std::mem::take(&mut *woken.lock().unwrap_or_else(PoisonError::into_inner));
    for task in called {
        let (sends, waker) = &mut senders[task];
        assert!(sends.as_mut().poll(&mut Task::from_waker(waker)).is_pending(), "it sends forever");
    }
    net.turn(Duration::ZERO).expect("a turn");
}
