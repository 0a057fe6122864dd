//! Tests of `aio`: connections, listeners and streams as futures.
#![allow(clippy::disallowed_methods, reason = "a client in a thread of its own")]

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context as Task, Poll, Waker};
use std::thread;
use std::time::Duration;

use futures_util::future::{Either, join, join_all, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use futures_util::{AsyncReadExt, AsyncWriteExt};
use rdma_reactor::aio::{AsyncConnection, AsyncListener, AsyncReactor, AsyncStream, OperationError, drive};
use rdma_reactor::stream::{StreamContext, StreamHandler, Streams};
use rdma_reactor::{
    Access, Config, ConnectError, ConnectOptions, ConnectionId, DisconnectReason, ListenOptions, ProviderChoice,
    Reactor, RegionOptions, RemoteRegion, SendErrorKind,
};
use rdma_reactor_tests::conformance::Setup;
use rdma_reactor_tests::conformance::harness::with_watchdog;
use rdma_reactor_tests::sim::fabric::lock;
use rdma_reactor_tests::sim::quiet::{network, reactor, settle};
use rdma_reactor_tests::sim::tcp::address;
use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::task::{LocalSet, spawn_local};

fn config() -> Config {
    Setup::iwarp().config()
}

/// Returns a reactor and its listener, to which the test connects from the same reactor.
fn net(config: Config) -> (AsyncReactor, AsyncListener) {
    let net = AsyncReactor::new(config).unwrap();
    let listener = net.listen(Setup::iwarp().address).unwrap();
    (net, listener)
}

/// Connects to the listener. Returns the end that has connected, and the end that was accepted.
async fn pair(net: &AsyncReactor, listener: &AsyncListener) -> (AsyncConnection, AsyncConnection) {
    let address = listener.local_address().unwrap();
    let (here, there) = join(net.connect(address), listener.accept()).await;
    (here.unwrap(), there.unwrap())
}

/// Runs a test on a reactor that connects to its own listener. Checks afterwards that no connection and no buffer is in use.
fn run<F: Future<Output = ()>>(
    name: &'static str,
    config: Config,
    test: impl FnOnce(AsyncReactor, Rc<AsyncListener>) -> F,
) {
    with_watchdog(name, || {
        let (net, listener) = net(config);
        let listener = Rc::new(listener);
        net.run(test(net.clone(), Rc::clone(&listener))).unwrap();
        drop(listener);
        assert_settles(&net);
    });
}

/// Runs turns until no connection is left and every buffer is in its pool. If this never happens, the watchdog of the test reports it.
fn assert_settles(net: &AsyncReactor) {
    let settled = |net: &AsyncReactor| {
        let stats = net.with(|cx| cx.stats());
        stats.connections.current == 0 && stats.memory.pool_buffers == stats.memory.pool_free
    };
    while !settled(net) {
        net.turn(Duration::from_millis(10)).unwrap();
    }
}

/// Echoes on all connections until the reactor is drained.
async fn echo(listener: &AsyncListener) {
    let mut served = FuturesUnordered::new();
    loop {
        let next = match select(pin!(listener.accept()), pin!(served.next())).await {
            Either::Left((Some(conn), _)) => Some(conn),
            Either::Left((None, _)) => return,
            Either::Right((Some(()), _)) => None,
            Either::Right((None, accept)) => match accept.await {
                Some(conn) => Some(conn),
                None => return,
            },
        };
        if let Some(conn) = next {
            served.push(async move {
                while let Ok(message) = conn.recv().await {
                    if conn.send(&message).await.is_err() {
                        break;
                    }
                }
            });
        }
    }
}

/// Runs `future` to its end, and `beside` concurrently. `beside` must not end before `future`.
async fn with_server<T>(future: impl Future<Output = T>, beside: impl Future<Output = ()>) -> T {
    match select(pin!(future), pin!(beside)).await {
        Either::Left((output, _)) => output,
        Either::Right(_) => panic!("the server has ended"),
    }
}

#[test]
fn messages_of_every_size_come_back_in_order() {
    run("messages_of_every_size", config().receive_depth(8), |net, listener| async move {
        let address = listener.local_address().unwrap();
        let ask = async {
            let conn = net.connect(address).await.unwrap();
            let sizes = [0, 1, 64, 8191, 8192, 8193, 100_000, 1 << 20];
            let send = async {
                for round in 0..20_u8 {
                    for size in sizes {
                        conn.send(&vec![round; size]).await.unwrap();
                    }
                }
            };
            let receive = async {
                for round in 0..20_u8 {
                    for size in sizes {
                        let answer = conn.recv().await.unwrap();
                        assert!(answer.len() == size && answer.iter().all(|&byte| byte == round));
                    }
                }
            };
            join(send, receive).await;
        };
        with_server(ask, echo(&listener)).await;
    });
}

#[test]
fn a_sender_waits_for_the_receiver() {
    run("a_sender_waits", config().receive_depth(8), |net, listener| async move {
        let (here, there) = pair(&net, &listener).await;
        let sent = Cell::new(0_u32);
        let send = async {
            for number in 0..1000_u32 {
                here.send(&number.to_le_bytes()).await.unwrap();
                sent.set(number + 1);
            }
        };
        let receive = async {
            for number in 0..1000_u32 {
                // The test receives no message during the pause below. So the sender can send at most as many further messages as the
                // window has credits (8).
                if number % 250 == 0 {
                    net.sleep(Duration::from_millis(5)).await;
                    assert!(sent.get() <= number + 8, "{} are sent, {number} received", sent.get());
                }
                let message = there.recv().await.unwrap();
                assert_eq!(message[..], number.to_le_bytes());
            }
        };
        join(send, receive).await;
    });
}

#[test]
fn thousand_tasks_share_a_reactor() {
    // Both ends of the thousand connections are in this process.
    rlimit::increase_nofile_limit(1 << 16).expect("the limit of open files");
    run("thousand_tasks", config().receive_depth(8).send_depth(8), |net, listener| async move {
        let address = listener.local_address().unwrap();
        let ask = |number: u32| {
            let net = &net;
            async move {
                let conn = net.connect(address).await.unwrap();
                for round in 0..5 {
                    let question = (u64::from(number) << 32 | round).to_le_bytes();
                    conn.send(&question).await.unwrap();
                    assert_eq!(conn.recv().await.unwrap()[..], question);
                }
            }
        };
        with_server(join_all((0..1000).map(ask)), echo(&listener)).await;
    });
}

/// Tasks that send on one connection without pause. Messages are counted from the moment at which all of these tasks have begun to send.
struct Senders {
    begun: Cell<usize>,
    counts: Vec<Cell<usize>>,
    all: Cell<usize>,
}

impl Senders {
    fn new(tasks: usize) -> Self {
        let counts = (0..tasks).map(|_| Cell::new(0)).collect();
        Self { begun: Cell::new(0), counts, all: Cell::new(0) }
    }

    async fn send(&self, task: usize, conn: &AsyncConnection) {
        let tasks = self.counts.len();
        conn.send(&[7; 64]).await.unwrap();
        self.begun.set(self.begun.get() + 1);
        while self.all.get() < tasks * 50 {
            conn.send(&[7; 64]).await.unwrap();
            // Messages are counted only once all tasks have begun to send. Before that, the first task had the whole window to itself.
            if self.begun.get() == tasks {
                self.counts[task].set(self.counts[task].get() + 1);
                self.all.set(self.all.get() + 1);
            }
        }
    }

    #[track_caller]
    fn assert_even(&self) {
        let (least, most) = (self.counts.iter().min().unwrap().get(), self.counts.iter().max().unwrap().get());
        assert!(most - least <= most / 10, "{} tasks: {least} to {most} messages", self.counts.len());
    }
}

/// Tasks that all send without pause on one connection share it equally. `aio_fair.rs` tests more executors.
#[test]
fn tasks_that_run_share_a_connection() {
    run("tasks_that_run", config(), |net, listener| async move {
        let (here, there) = pair(&net, &listener).await;
        let receive = async { while there.recv().await.is_ok() {} };
        let share = async {
            for tasks in [2, 10, 100, 1000] {
                let senders = Senders::new(tasks);
                let mut sending: FuturesUnordered<_> = (0..tasks).map(|task| senders.send(task, &here)).collect();
                while sending.next().await.is_some() {}
                senders.assert_even();
            }
        };
        with_server(share, receive).await;
    });
}

/// Tasks of a tokio runtime that all send without pause on one connection share it equally.
#[test]
fn tasks_of_tokio_share_a_connection() {
    with_watchdog("tasks_of_tokio", || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let (net, listener) = net(config());
            let driver = spawn_local(drive(net.clone()));
            let (here, there) = pair(&net, &listener).await;
            spawn_local(async move { while there.recv().await.is_ok() {} });
            for tasks in [2, 10, 100, 1000] {
                let senders = Rc::new(Senders::new(tasks));
                let sending = (0..tasks).map(|task| {
                    let (senders, here) = (Rc::clone(&senders), here.clone());
                    spawn_local(async move { senders.send(task, &here).await })
                });
                join_all(sending).await.into_iter().for_each(|ended| ended.unwrap());
                senders.assert_even();
            }
            here.close();
            net.with(|cx| cx.drain(Duration::from_secs(60)));
            driver.await.unwrap().unwrap();
        });
    });
}

/// After the task that took the turns was dropped, the program takes them. It waits for the
/// descriptor only, and misses nothing.
#[test]
fn the_program_takes_the_turns_after_a_driver() {
    with_watchdog("turns_after_a_driver", || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let (net, listener) = net(config());
            let driver = spawn_local(drive(net.clone()));
            let (here, there) = pair(&net, &listener).await;
            driver.abort();
            assert!(driver.await.unwrap_err().is_cancelled());
            let descriptor = net.descriptor().unwrap();
            let sent = spawn_local(async move {
                for _ in 0..100 {
                    here.send(b"ping").await.unwrap();
                    here.recv().await.unwrap();
                }
            });
            spawn_local(async move {
                while let Ok(message) = there.recv().await {
                    there.send(&message).await.unwrap();
                }
            });
            loop {
                tokio::task::yield_now().await;
                if sent.is_finished() {
                    break;
                }
                let mut events = [PollFd::new(&descriptor, PollFlags::IN)];
                let limit = Timespec { tv_sec: 300, tv_nsec: 0 };
                assert_eq!(rustix::event::poll(&mut events, Some(&limit)), Ok(1), "nothing wakes the program");
                net.turn(Duration::ZERO).unwrap();
            }
        });
    });
}

/// A task whose operations complete as soon as they are posted must not delay a task that waits for a time.
#[test]
fn operations_without_pause_leave_timers_alone() {
    with_watchdog("operations_without_pause", || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let (peer, listener) = net(Config::default().provider(ProviderChoice::Shm));
            let net = AsyncReactor::new(Config::default().provider(ProviderChoice::Shm)).unwrap();
            let drivers = [spawn_local(drive(net.clone())), spawn_local(drive(peer.clone()))];
            let (here, there) = pair(&net, &listener).await;
            let shared = there.register(4096, &RegionOptions::new().allow(Access::REMOTE_READ).direct()).unwrap();
            there.send(&shared.remote().to_bytes()).await.unwrap();
            let remote = RemoteRegion::from_bytes(&here.recv().await.unwrap()).unwrap();
            let mut local = here.register(4096, &RegionOptions::new()).unwrap();
            let slept = spawn_local({
                let net = net.clone();
                async move { net.sleep(Duration::from_millis(10)).await }
            });
            while !slept.is_finished() {
                here.read(remote, &mut local, 0..4096).await.unwrap();
            }
            here.close();
            [net, peer].iter().for_each(|net| net.with(|cx| cx.drain(Duration::from_secs(60))));
            join_all(drivers).await.into_iter().for_each(|driver| driver.unwrap().unwrap());
        });
    });
}

#[test]
fn the_end_of_a_message_is_awaited_whatever_the_setting() {
    run("end of a message", config().quiet_sends(true), |net, listener| async move {
        let (here, there) = pair(&net, &listener).await;
        for len in [10, 20_000, 300_000] {
            let message = vec![7; len];
            let sent = here.operate(|cx| cx.send(here.id(), &message));
            let (sent, heard) = join(sent, there.recv()).await;
            assert_eq!((sent.is_ok(), heard.unwrap().len()), (true, len));
        }
    });
}

#[test]
fn memory_is_read_written_and_counted_up() {
    run("memory", config(), |net, listener| async move {
        let (here, there) = pair(&net, &listener).await;
        let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let mut shared = there.register(4096, &RegionOptions::new().allow(rights)).unwrap();
        assert!(shared.store(0, 40).is_ok());
        there.send(&shared.remote().to_bytes()).await.unwrap();
        let remote = RemoteRegion::from_bytes(&here.recv().await.unwrap()).unwrap();
        let mut local = here.register(4096, &RegionOptions::new()).unwrap();
        local.bytes_mut().unwrap()[100..200].fill(9);
        here.write(remote.part(1000, 100).unwrap(), &local, 100..200).await.unwrap();
        here.read(remote, &mut local, 0..4096).await.unwrap();
        assert!(local.bytes().unwrap()[1000..1100].iter().all(|&byte| byte == 9));
        let word = remote.part(0, 8).unwrap();
        here.operate(|cx| cx.remote(here.id()).fetch_add(word, &mut local, 0, 2)).await.unwrap();
        assert_eq!((local.load(0), shared.load(0)), (40, 42));
        // The test posts more writes than the send queue has slots. The later writes wait for a free slot.
        join_all((0..500).map(|_| here.write(word, &local, 0..8))).await.into_iter().for_each(|done| done.unwrap());
        let refused = here.write(remote, &local, 4000..4097).await;
        assert!(matches!(refused, Err(OperationError::Refused(SendErrorKind::OutOfBounds { .. }))), "{refused:?}");
    });
}

#[test]
fn an_end_is_told_with_its_reason() {
    run("an_end", config(), |net, listener| async move {
        let address = listener.local_address().unwrap();
        let nobody = net.connect(([127, 0, 0, 1], 1).into()).await;
        assert!(matches!(nobody, Err(ConnectError::Transport(_))), "{nobody:?}");
        // A close by one end is reported to both. Messages that were sent before the close still arrive.
        let (here, there) = pair(&net, &listener).await;
        here.send(b"last words").await.unwrap();
        here.close();
        assert_eq!(here.send(b"late").await, Err(SendErrorKind::Closed));
        assert_eq!(there.recv().await.unwrap()[..], b"last words"[..]);
        assert_eq!(there.recv().await.unwrap_err(), DisconnectReason::Closed);
        assert_eq!(there.closed().await, DisconnectReason::Closed);
        assert_eq!(here.closed().await, DisconnectReason::Local { complete: true });
        // A connection is closed when its last handle is dropped.
        let (here, there) = pair(&net, &listener).await;
        let second = here.clone();
        drop(here);
        second.send(b"still open").await.unwrap();
        assert_eq!(there.recv().await.unwrap()[..], b"still open"[..]);
        drop(second);
        assert_eq!(there.closed().await, DisconnectReason::Closed);
        // When the peer is lost, the tasks that wait for a message, for room in the window, or for the end of the connection are woken.
        let (here, there) = pair(&net, &listener).await;
        let full = async { while here.send(&[0; 8192]).await.is_ok() {} };
        let lost = async {
            net.sleep(Duration::from_millis(5)).await;
            net.with(|cx| cx.abort(there.id()));
        };
        let ((), received, reason, ()) = futures_util::join!(full, here.recv(), here.closed(), lost);
        assert_eq!((received.unwrap_err(), reason), (DisconnectReason::Lost, DisconnectReason::Lost));
        assert_eq!(net.connect(address).await.unwrap().peer_address(), Some(address));
    });
}

#[test]
fn a_drained_reactor_accepts_nobody() {
    run("a_drained_reactor", config(), |net, listener| async move {
        let (here, _there) = pair(&net, &listener).await;
        net.with(|cx| cx.drain(Duration::from_secs(60)));
        assert!(listener.accept().await.is_none());
        assert_eq!(here.closed().await, DisconnectReason::Local { complete: true });
    });
}

#[test]
fn streams_end_each_way_on_their_own() {
    run("streams", config().receive_depth(8), |net, listener| async move {
        let (here, there) = pair(&net, &listener).await;
        let bytes: Vec<u8> = (0..300_000_u32).map(|n| (n % 251) as u8).collect();
        let write = async {
            let mut stream = AsyncStream::from(here.clone());
            stream.write_all(&bytes).await.unwrap();
            stream.close().await.unwrap();
            assert!(stream.write(b"x").await.is_err());
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            assert_eq!(answer, b"got all");
        };
        let read = async {
            let mut stream = AsyncStream::from(there.clone());
            let mut got = Vec::new();
            stream.read_to_end(&mut got).await.unwrap();
            assert!(got == bytes);
            stream.write_all(b"got all").await.unwrap();
            stream.close().await.unwrap();
        };
        join(write, read).await;
        // If a peer disconnects without having ended its stream, the reader gets an error after the received bytes.
        let (here, there) = pair(&net, &listener).await;
        let (mut writer, mut reader) = (AsyncStream::from(here), AsyncStream::from(there));
        writer.write_all(b"half").await.unwrap();
        drop(writer);
        let mut got = [0; 4];
        reader.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"half");
        assert_eq!(reader.read(&mut got).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
        assert!(reader.close().await.is_err());
        // If the peer has finished, and has then closed the connection, no one waits for the end of
        // the other direction.
        let (here, there) = pair(&net, &listener).await;
        let (mut writer, mut reader) = (AsyncStream::from(here), AsyncStream::from(there.clone()));
        writer.close().await.unwrap();
        drop(writer);
        assert_eq!(reader.read(&mut got).await.unwrap(), 0);
        // The connection is closing, and has not ended yet.
        reader.close().await.unwrap();
        there.closed().await;
        reader.close().await.unwrap();
    });
}

/// A program that sends back the bytes of each stream. When the peer has ended its direction of a stream, the program ends the other
/// direction.
#[derive(Default)]
struct Mirror {
    closed: u32,
}

impl StreamHandler for Mirror {
    fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        use std::io::{BufRead, Write};
        while let Ok(bytes) = cx.stream(id).fill_buf().map(<[u8]>::to_vec) {
            if bytes.is_empty() {
                let _ = cx.stream(id).shutdown(std::net::Shutdown::Write);
                return;
            }
            let Ok(taken) = cx.stream(id).write(&bytes) else { return };
            cx.stream(id).consume(taken);
        }
    }

    fn on_writable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.on_readable(cx, id);
    }

    fn on_hangup(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.on_readable(cx, id);
    }

    fn on_close(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {
        self.closed += 1;
    }
}

#[test]
fn a_stream_of_futures_talks_to_one_of_callbacks() {
    with_watchdog("a_stream_of_futures", || {
        let mut server = Reactor::new(config()).unwrap();
        let listener = server.context().listen(Setup::iwarp().address).unwrap();
        let address = server.context().listeners().local_address(listener).unwrap();
        let mut mirror = Streams::new(Mirror::default());
        let net = AsyncReactor::new(config()).unwrap();
        let bytes: Vec<u8> = (0..100_000_u32).map(|n| (n % 249) as u8).collect();
        let mut client = pin!(async {
            let conn = net.connect(address).await.unwrap();
            let (mut writer, mut reader) = (AsyncStream::from(conn.clone()), AsyncStream::from(conn));
            let mut got = Vec::new();
            let write = async {
                writer.write_all(&bytes).await.unwrap();
                writer.close().await.unwrap();
            };
            let (_, read) = join(write, reader.read_to_end(&mut got)).await;
            read.unwrap();
            assert!(got == bytes);
        });
        // The server has its own reactor on the same thread. The server's reactor runs one turn before each poll of the client.
        let both = poll_fn(|task: &mut Task<'_>| {
            server.turn(&mut mirror, Duration::ZERO).unwrap();
            let done = client.as_mut().poll(task);
            task.waker().wake_by_ref();
            done
        });
        net.run(both).unwrap();
        while mirror.handler.closed == 0 {
            server.turn(&mut mirror, Duration::from_millis(1)).unwrap();
            net.turn(Duration::ZERO).unwrap();
        }
        assert_settles(&net);
    });
}

/// Runs turns as an executor of another library would, until the drain has ended. Returns how many of these turns returned a `Turn` whose
/// `more` is false.
fn turns_until_drained(net: &AsyncReactor) -> u32 {
    let mut idle = 0;
    let waker = std::task::Waker::noop();
    while !net.is_drained() {
        let _ = pin!(net.turn_requested()).poll(&mut Task::from_waker(waker));
        if !net.turn(Duration::ZERO).unwrap().more {
            idle += 1;
        }
    }
    idle
}

/// A drain without connections ends in the next turn. The `Turn` of that turn has `more` set, and the reactor then has no deadline. So a
/// task that checks `is_drained` before each turn does not sleep.
#[test]
fn a_drain_without_connections_ends_with_its_turn() {
    with_watchdog("a drain", || {
        let (net, listener) = net(config());
        net.turn(Duration::ZERO).unwrap();
        net.with(|cx| cx.drain(Duration::from_secs(600)));
        assert_eq!(turns_until_drained(&net), 0);
        assert_eq!(net.next_deadline(), None);
        drop(listener);
        let mut reactor = Reactor::new(config()).unwrap();
        reactor.context().drain(Duration::from_secs(600));
        let mut streams = Streams::new(Mirror::default());
        while !reactor.is_drained() {
            assert!(reactor.turn(&mut streams, Duration::ZERO).unwrap().more || reactor.is_drained());
        }
        assert!(!reactor.turn(&mut streams, Duration::ZERO).unwrap().more, "only once");
        assert_eq!(reactor.next_deadline(), None);
    });
}

/// A program that waits for the reactor's descriptor alone is woken if the destructor of a future or of a listener has notified a task, and
/// if the action of a destructor is deferred.
#[test]
fn destructors_make_the_descriptor_readable() {
    let fabric = network(2);
    let nets = [0, 1].map(|node| AsyncReactor::from(reactor(node, &fabric, Config::default().receive_depth(8))));
    let task = &mut Task::from_waker(Waker::noop());
    let wakes = |node, what: &str| {
        assert!(lock(&fabric).is_runnable(node, true), "{what}: the descriptor is not readable");
        settle(&fabric, &nets);
        assert!(!lock(&fabric).is_runnable(node, true), "{what}: the descriptor stays readable");
    };
    // The listener is dropped while a task waits for the peers of the listener.
    let (listener, peers) = nets[1].listen_with_approval(address(1, 7472), ListenOptions::new()).unwrap();
    let mut next = pin!(peers.next());
    assert!(next.as_mut().poll(task).is_pending());
    settle(&fabric, &nets);
    drop(listener);
    wakes(1, "a dropped listener");
    assert!(matches!(next.as_mut().poll(task), Poll::Ready(None)));
    // More messages wait than the peer grants credits for. When credits arrive, a task is notified.
    // This task then drops its message.
    let listener = nets[1].listen(address(1, 7471)).unwrap();
    let mut connect = pin!(nets[0].connect(address(1, 7471)));
    assert!(connect.as_mut().poll(task).is_pending());
    settle(&fabric, &nets);
    let Poll::Ready(Ok(here)) = connect.as_mut().poll(task) else { panic!("no connection") };
    let Poll::Ready(Some(there)) = pin!(listener.accept()).poll(task) else { panic!("no connection is accepted") };
    let mut sent = 0;
    while here.try_send(b"message").is_ok() {
        sent += 1;
    }
    let mut waiting: Vec<_> = (0..100).map(|_| Box::pin(here.send(b"message"))).collect();
    assert!(waiting.iter_mut().all(|send| send.as_mut().poll(task).is_pending()));
    settle(&fabric, &nets);
    for _ in 0..sent {
        assert!(matches!(pin!(there.recv()).poll(task), Poll::Ready(Ok(_))));
    }
    settle(&fabric, &nets);
    drop(waiting.remove(0));
    wakes(0, "a dropped send");
    drop(waiting);
    settle(&fabric, &nets);
    // The last handle of a connection is dropped while the reactor is borrowed.
    nets[0].with(|_| drop(here));
    wakes(0, "a dropped connection");
    assert!(matches!(pin!(there.closed()).poll(task), Poll::Ready(DisconnectReason::Closed)));
}

/// The last message that a future sends is posted when the future ends, although no turn follows. If the reactor is then dropped, the peer
/// gets `DisconnectReason::Lost`. If the reactor is shut down first, the peer gets `DisconnectReason::Closed`.
#[test]
fn the_last_word_of_a_future_is_sent() {
    with_watchdog("the last word", || {
        for shuts_down in [false, true] {
            let (server, listener) = net(config());
            let address = listener.local_address().unwrap();
            let client = thread::spawn(move || {
                let net = AsyncReactor::new(config()).unwrap();
                net.run(async {
                    let conn = net.connect(address).await.unwrap();
                    conn.send(b"the only message").await.unwrap();
                })
                .unwrap();
                if shuts_down {
                    net.shutdown(Duration::from_secs(60)).unwrap();
                }
            });
            server
                .run(async {
                    let conn = listener.accept().await.unwrap();
                    assert_eq!(&conn.recv().await.unwrap()[..], b"the only message");
                    let end = conn.closed().await;
                    let wanted = if shuts_down { DisconnectReason::Closed } else { DisconnectReason::Lost };
                    assert_eq!(end, wanted);
                })
                .unwrap();
            client.join().unwrap();
        }
    });
}

#[test]
fn a_host_by_name_several_addresses_and_sends_that_do_not_wait() {
    run("a host", config(), |net, listener| async move {
        let address = listener.local_address().unwrap();
        let nobody = net.connect_host("no host", 1, ConnectOptions::new()).await;
        assert!(matches!(&nobody, Err(ConnectError::Lookup { host, .. }) if host == "no host"), "{nobody:?}");
        let refused: SocketAddr = ([127, 0, 0, 1], 1).into();
        let by_any = [refused, address];
        let (any, first) = join(net.connect_any(&by_any, ConnectOptions::new()), listener.accept()).await;
        let name = address.ip().to_string();
        let (host, second) =
            join(net.connect_host(&name, address.port(), ConnectOptions::new()), listener.accept()).await;
        let (any, host, first, second) = (any.unwrap(), host.unwrap(), first.unwrap(), second.unwrap());
        let mut sent = 0;
        while any.try_send(b"no waiting").is_ok() {
            sent += 1;
        }
        assert_eq!(any.try_send(b"").map_err(|error| matches!(error, SendErrorKind::WouldBlock(_))), Err(true));
        for _ in 0..sent {
            assert_eq!(&first.recv().await.unwrap().detach()[..], b"no waiting");
        }
        host.abort();
        assert_eq!(host.closed().await, DisconnectReason::Local { complete: false });
        assert_eq!(second.closed().await, DisconnectReason::Lost);
    });
}

/// Polls a future at most `polls` times, and drops it if it has not completed. Returns its output, or `None` if it was dropped.
async fn abandon<T>(future: impl Future<Output = T>, polls: usize) -> Option<T> {
    let mut future: Pin<Box<dyn Future<Output = T> + '_>> = Box::pin(future);
    let mut left = polls;
    poll_fn(|task| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(task) {
            // This was the last poll, so the future is dropped.
            Poll::Pending if left == 0 => Poll::Ready(None),
            other => other.map(Some),
        }
    })
    .await
}

/// Runs each kind of operation once, sequentially, on a new connection.
async fn everything(net: &AsyncReactor, listener: &AsyncListener, name: u64) {
    // An earlier connect whose future was dropped may have left a connection in the listener's queue. So the client sends the number `name`
    // first, and the server drops each connection whose first message is another one.
    let address = listener.local_address().unwrap();
    let connect = async {
        let here = net.connect(address).await.unwrap();
        here.send(&name.to_le_bytes()).await.unwrap();
        here
    };
    let accept = async {
        loop {
            let there = listener.accept().await.unwrap();
            if there.recv().await.is_ok_and(|first| first[..] == name.to_le_bytes()) {
                return there;
            }
        }
    };
    let (here, there) = join(connect, accept).await;
    let shared = there.register(4096, &RegionOptions::new().allow(Access::REMOTE_READ | Access::REMOTE_WRITE)).unwrap();
    there.send(&shared.remote().to_bytes()).await.unwrap();
    let remote = RemoteRegion::from_bytes(&here.recv().await.unwrap()).unwrap();
    let mut local = here.register(4096, &RegionOptions::new()).unwrap();
    here.write(remote, &local, 0..4096).await.unwrap();
    here.read(remote, &mut local, 0..4096).await.unwrap();
    net.sleep(Duration::from_millis(1)).await;
    let send = async {
        for number in 0..40_u8 {
            here.send(&[number; 100]).await.unwrap();
        }
        here.send(&[41; 20_000]).await.unwrap();
    };
    let receive = async {
        for number in 0..40_u8 {
            assert_eq!(there.recv().await.unwrap()[..], [number; 100]);
        }
        assert_eq!(there.recv().await.unwrap()[..], [41; 20_000]);
    };
    join(send, receive).await;
    let (mut writer, mut reader) = (AsyncStream::from(here.clone()), AsyncStream::from(there.clone()));
    let mut got = Vec::new();
    let write = async {
        writer.write_all(&[7; 50_000]).await.unwrap();
        writer.close().await.unwrap();
    };
    let (_, read) = join(write, reader.read_to_end(&mut got)).await;
    assert_eq!((read.unwrap(), got), (50_000, vec![7; 50_000]));
    here.close();
    there.closed().await;
}

#[test]
fn a_future_may_be_dropped_at_every_await() {
    run("dropped_at_every_await", config().receive_depth(8).send_depth(8), |net, listener| async move {
        let mut polls = 1;
        while abandon(everything(&net, &listener, 2 * polls as u64), polls).await.is_none() {
            // The dropped futures have left nothing that disturbs another complete run.
            everything(&net, &listener, 2 * polls as u64 + 1).await;
            polls += 1;
        }
        println!("dropped at each of {polls} polls");
        assert!(polls > 20, "{polls} polls are too few for all that waits");
    });
}

/// If a task drops the future of a receive or of a send while it waits, no message is lost, and the next receive or send is not blocked.
#[test]
fn what_a_dropped_future_waited_for_is_not_lost() {
    run("nothing_is_lost", config().receive_depth(8), |net, listener| async move {
        let (here, there) = pair(&net, &listener).await;
        for round in 0..100_u32 {
            assert!(abandon(there.recv(), 1).await.is_none());
            here.send(&round.to_le_bytes()).await.unwrap();
            assert_eq!(there.recv().await.unwrap()[..], round.to_le_bytes());
        }
        // If a send is dropped while the window is closed, its message is not sent. The next send succeeds.
        let mut sent = 0_u32;
        while abandon(here.send(&sent.to_le_bytes()), 1).await.is_some_and(|send| send.is_ok()) {
            sent += 1;
        }
        let next = async {
            here.send(b"next").await.unwrap();
            here.close();
        };
        let all = async {
            for number in 0..sent {
                assert_eq!(there.recv().await.unwrap()[..], number.to_le_bytes());
            }
            assert_eq!(there.recv().await.unwrap()[..], b"next"[..]);
            assert!(there.recv().await.is_err());
        };
        join(next, all).await;
    });
}
