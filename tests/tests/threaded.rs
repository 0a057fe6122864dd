//! `ThreadedReactor`: a reactor on a thread of its own, which tasks of several threads use. No test depends on how fast time passes: each
//! test waits for its event, and a time limit ends a test that hangs.

use std::future::Future;
use std::io::{ErrorKind, IoSlice};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use futures_util::FutureExt;
use rdma_reactor::threaded::{
    ConnectionEnd, DeliverError, OwnThread, Receiver, ThreadError, ThreadedConnection, ThreadedReactor,
};
use rdma_reactor::{
    Config, ConnectError, ConnectOptions, DisconnectReason, Error, Framing, ProviderChoice, Psk, Security,
};
use rdma_reactor_tests::conformance::violations::{WINDOW, greeting};
use rdma_reactor_tests::patience::{HOUR, PATIENCE, patient};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

const LOOPBACK: ([u8; 4], u16) = ([127, 0, 0, 1], 0);

fn config() -> Config {
    patient(Config::default().provider(ProviderChoice::Iwarp))
}

/// Runs a test on a runtime with this number of threads, with a time limit.
fn on_threads<F: Future>(threads: usize, test: F) -> F::Output {
    let runtime = Builder::new_multi_thread().worker_threads(threads).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test).await.expect("the test hangs") })
}

/// Connects two reactors. Returns the connecting reactor and its connection, and then the accepting reactor and its connection.
async fn pair(config: Config) -> (ThreadedReactor, ThreadedConnection, ThreadedReactor, ThreadedConnection) {
    let (here, there) = (ThreadedReactor::start(config.clone()).unwrap(), ThreadedReactor::start(config).unwrap());
    let mut listener = there.listen(LOOPBACK.into()).await.unwrap();
    let conn = here.connect(listener.local_address()).await.unwrap();
    let accepted = listener.accept().await.unwrap();
    (here, conn, there, accepted)
}

/// Listens on a reactor, and echoes on each accepted connection until the reactor is drained. Returns the address of the listener.
async fn serve(reactor: ThreadedReactor) -> SocketAddr {
    let mut listener = reactor.listen(LOOPBACK.into()).await.unwrap();
    let address = listener.local_address();
    tokio::spawn(async move {
        while let Some(mut conn) = listener.accept().await {
            tokio::spawn(async move {
                while let Ok(message) = conn.recv().await {
                    if conn.send(message).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    address
}

async fn end(reactor: ThreadedReactor) {
    reactor.drain(PATIENCE);
    assert_eq!(reactor.ended().await, Ok(()));
}

#[test]
fn a_thousand_tasks_on_four_threads_get_their_own_answers() {
    // Both ends of the thousand connections are in this process.
    rlimit::increase_nofile_limit(1 << 16).expect("the limit of open files");
    on_threads(4, async {
        let server = ThreadedReactor::start(config()).unwrap();
        let address = serve(server.clone()).await;
        let client = ThreadedReactor::start(config()).unwrap();
        let mut tasks = JoinSet::new();
        for task in 0..1_000_u32 {
            let client = client.clone();
            tasks.spawn(async move {
                let mut conn = client.connect(address).await.unwrap();
                for call in 0..20_u32 {
                    let question = [task.to_le_bytes(), call.to_le_bytes()].concat();
                    conn.send(question.clone()).await.unwrap();
                    assert_eq!(conn.recv().await.unwrap()[..], question[..]);
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        let wakes = client.with(|cx| cx.stats().turns.waits).await.unwrap();
        println!("{wakes} waits of the client's reactor for 20,000 calls");
        end(client).await;
        end(server).await;
    });
}

#[test]
fn tasks_share_a_connection_and_keep_their_order() {
    on_threads(4, async {
        let (here, conn, there, mut accepted) = pair(config()).await;
        let (sender, _receiver) = conn.split();
        let mut tasks = JoinSet::new();
        for task in 0..8_u32 {
            let sender = sender.clone();
            tasks.spawn(async move {
                for message in 0..500_u32 {
                    sender.send([task.to_le_bytes(), message.to_le_bytes()].concat()).await.unwrap();
                }
            });
        }
        let mut next = [0; 8];
        for _ in 0..8 * 500 {
            let message = accepted.recv().await.unwrap();
            let (task, message) = message.split_at(4);
            let next = &mut next[u32::from_le_bytes(task.try_into().unwrap()) as usize];
            assert_eq!(u32::from_le_bytes(message.try_into().unwrap()), *next);
            *next += 1;
        }
        assert_eq!(next, [500; 8]);
        end(here).await;
        end(there).await;
    });
}

/// Sends until all queues and the window are full, because the peer's program receives nothing. Returns the number of sent messages.
async fn fill(here: &ThreadedReactor, conn: &ThreadedConnection, there: &ThreadedReactor) -> u64 {
    let mut sent = 0_u64;
    loop {
        if conn.send(sent.to_le_bytes().to_vec()).now_or_never().is_some() {
            sent += 1;
            here.with(|_| ()).await.unwrap();
            continue;
        }
        // The send waits for room. If all sent messages have arrived at the peer, only the peer's program can make room. Otherwise the
        // peer's thread may still make room, so this function sends again.
        let out = here.with(|cx| cx.stats().messages.sent).await.unwrap();
        if there.with(|cx| cx.stats().messages.received).await.unwrap() == out {
            return sent;
        }
    }
}

/// If the peer's program receives nothing, the sender waits once all queues and the window between the two are full.
#[test]
fn a_sender_waits_for_a_peer_that_does_not_receive() {
    on_threads(2, async {
        let (here, conn, there, mut accepted) = pair(config()).await;
        let sent = fill(&here, &conn, &there).await;
        assert!(sent >= 64, "{sent}");
        println!("{sent} messages until the sender waits");
        // The future that was dropped has not sent its message, and no earlier message is lost.
        for expected in 0..sent {
            assert_eq!(accepted.recv().await.unwrap()[..], expected.to_le_bytes());
        }
        conn.send("last").await.unwrap();
        assert_eq!(&accepted.recv().await.unwrap()[..], b"last");
        end(here).await;
        end(there).await;
    });
}

#[test]
fn a_dropped_connection_sends_what_was_taken_first() {
    on_threads(2, async {
        let (here, conn, there, mut accepted) = pair(config()).await;
        for message in 0..1_000_u32 {
            // There is no room for the message until the peer's thread has received earlier ones.
            while conn.send(message.to_le_bytes().to_vec()).now_or_never().is_none() {
                tokio::task::yield_now().await;
            }
            if message % 100 == 99 {
                for _ in 0..100 {
                    accepted.recv().await.unwrap();
                }
            }
        }
        for message in 0..50_u32 {
            conn.send(message.to_le_bytes().to_vec()).await.unwrap();
        }
        drop((conn, here));
        for message in 0..50_u32 {
            assert_eq!(accepted.recv().await.unwrap()[..], message.to_le_bytes());
        }
        assert_eq!(accepted.recv().await.unwrap_err(), ConnectionEnd::Disconnected(DisconnectReason::Closed));
        assert_eq!(accepted.send("too late").await, Err(ConnectionEnd::Disconnected(DisconnectReason::Closed)));
        end(there).await;
    });
}

/// If the peer's program receives nothing, a dropped connection is cut off after `Timeouts::close`, with messages in its queue.
#[test]
fn a_dropped_connection_does_not_wait_for_its_peer_for_ever() {
    on_threads(2, async {
        let settings = config().timeouts(|t| t.close = Duration::from_millis(50));
        let (here, conn, there, mut accepted) = pair(settings).await;
        let sent = fill(&here, &conn, &there).await;
        drop(conn);
        while here.with(|cx| cx.stats().connections.current).await.unwrap() > 0 {
            tokio::task::yield_now().await;
        }
        let mut received = 0;
        let reason = loop {
            match accepted.recv().await {
                Ok(_) => received += 1,
                Err(reason) => break reason,
            }
        };
        assert!(received < sent, "{received} of {sent}");
        assert_eq!(reason, ConnectionEnd::Disconnected(DisconnectReason::Lost));
        end_both(here, there).await;
    });
}

#[test]
fn deliver_waits_until_the_message_is_sent() {
    on_threads(2, async {
        let (here, conn, there, mut accepted) = pair(config()).await;
        conn.sender().deliver("one").await.unwrap();
        assert_eq!(&accepted.recv().await.unwrap()[..], b"one");
        accepted.peer_address().expect("it has an address");
        let id = accepted.id();
        there.with(move |cx| cx.abort(id)).await.unwrap();
        // The connection ends some time after the abort. From then on, no message is delivered.
        let end = loop {
            match conn.sender().deliver("two").await {
                Ok(()) => tokio::task::yield_now().await,
                Err(error) => break error,
            }
        };
        assert!(matches!(end, DeliverError::NotSent(_) | DeliverError::Unknown(_)), "{end}");
        end_both(here, there).await;
    });
}

/// A task delivers a message while its connection is ending, so the message is not sent. The task gets the reason of the end. That reason
/// is known only when the connection has ended.
#[test]
fn a_message_for_an_ending_connection_hears_the_reason_of_the_end() {
    on_threads(2, async {
        let (here, conn, there, _accepted) = pair(config()).await;
        let (id, sender, reactor) = (conn.id(), conn.sender().clone(), here.clone());
        let ((first, first_gate), (second, second_gate)) = (mpsc::channel::<()>(), mpsc::channel::<()>());
        let (handled, is_handled) = tokio::sync::oneshot::channel();
        // The thread of the reactor carries out three commands in one turn: it closes the connection, gets the message, and waits. The
        // first command also waits, until the other two are queued.
        let mut closes = pin!(reactor.with(move |cx| {
            first_gate.recv().unwrap();
            cx.close(id);
        }));
        assert!(closes.as_mut().now_or_never().is_none());
        let mut delivered = pin!(sender.deliver("too late"));
        assert!(delivered.as_mut().now_or_never().is_none());
        let mut waits = pin!(reactor.with(move |_| {
            handled.send(()).unwrap();
            second_gate.recv().unwrap();
        }));
        assert!(waits.as_mut().now_or_never().is_none());
        first.send(()).unwrap();
        is_handled.await.unwrap();
        let early = delivered.as_mut().now_or_never();
        assert_eq!(early, None, "the connection has not ended");
        second.send(()).unwrap();
        let end = delivered.await.unwrap_err();
        let DeliverError::NotSent(end) = end else { panic!("{end}") };
        assert!(matches!(end, ConnectionEnd::Disconnected(DisconnectReason::Local { .. })), "{end}");
        closes.await.unwrap();
        waits.await.unwrap();
        end_both(here, there).await;
    });
}

/// Peers connect and disconnect again and again, and no task accepts the connections. The queue of the listener holds 1,024 ended
/// connections. While it is full, new connections are closed.
#[test]
fn ended_connections_that_no_task_accepts_are_limited() {
    on_threads(2, async {
        let (here, there) = (ThreadedReactor::start(config()).unwrap(), ThreadedReactor::start(config()).unwrap());
        let mut listener = there.listen(LOOPBACK.into()).await.unwrap();
        let address = listener.local_address();
        for number in 0..1024_u32 {
            let conn = here.connect(address).await.unwrap();
            conn.send(number.to_le_bytes().to_vec()).await.unwrap();
        }
        while there.with(|cx| cx.stats().connections.disconnected).await.unwrap() < 1024 {
            tokio::task::yield_now().await;
        }
        let mut more = here.connect(address).await.unwrap();
        assert_eq!(more.recv().await.unwrap_err(), ConnectionEnd::Disconnected(DisconnectReason::Closed));
        let mut first = listener.accept().await.unwrap();
        assert_eq!(first.recv().await.unwrap()[..], 0_u32.to_le_bytes(), "an ended connection keeps its messages");
        // There is room for a connection again.
        let last = here.connect(address).await.unwrap();
        last.send("the last one").await.unwrap();
        for _ in 1..1024 {
            listener.accept().await.unwrap();
        }
        let mut accepted = listener.accept().await.unwrap();
        assert_eq!(&accepted.recv().await.unwrap()[..], b"the last one");
        end_both(here, there).await;
    });
}

async fn end_both(here: ThreadedReactor, there: ThreadedReactor) {
    end(here).await;
    end(there).await;
}

#[test]
fn a_message_that_is_too_long_for_the_peer_is_refused_by_its_length() {
    on_threads(2, async {
        let settings = config().large_messages(|large| large.max_message = 1 << 20);
        let (here, conn, there, mut accepted) = pair(settings).await;
        let refused = conn.send(vec![0; (1 << 20) + 1]).await.unwrap_err();
        assert!(matches!(refused, ConnectionEnd::TooLong { len: 1_048_577, max: 1_048_576 }), "{refused}");
        let (sent, received) = tokio::join!(conn.send(vec![7; 1 << 20]), accepted.recv());
        sent.unwrap();
        assert!(received.unwrap()[..] == vec![7; 1 << 20][..]);
        end_both(here, there).await;
    });
}

/// A message for which the local side has no memory must be refused, although its peer would accept it. The connection stays open.
#[test]
fn a_message_that_is_too_long_for_the_local_memory_is_refused_by_its_length() {
    on_threads(2, async {
        let small = config().large_messages(|large| (large.max_message, large.memory) = (1 << 20, 1 << 20));
        let (here, there) = (ThreadedReactor::start(small).unwrap(), ThreadedReactor::start(config()).unwrap());
        let mut listener = there.listen(LOOPBACK.into()).await.unwrap();
        let conn = here.connect(listener.local_address()).await.unwrap();
        let mut accepted = listener.accept().await.unwrap();
        let refused = conn.send(vec![0; (1 << 20) + 1]).await.unwrap_err();
        assert!(matches!(refused, ConnectionEnd::TooLong { len: 1_048_577, max: 1_048_576 }), "{refused}");
        let (sent, received) = tokio::join!(conn.send(vec![7; 1 << 20]), accepted.recv());
        sent.unwrap();
        assert!(received.unwrap()[..] == vec![7; 1 << 20][..]);
        end_both(here, there).await;
    });
}

#[test]
fn nobody_listens() {
    on_threads(2, async {
        let reactor = ThreadedReactor::start(config()).unwrap();
        let listener = reactor.listen(LOOPBACK.into()).await.unwrap();
        let address = listener.local_address();
        drop(listener);
        let refused = reactor.connect(address).await.unwrap_err();
        assert!(matches!(refused, ConnectError::Rejected { .. } | ConnectError::Transport(_)), "{refused}");
        end(reactor).await;
    });
}

#[test]
fn connections_of_a_dropped_listener_are_closed() {
    on_threads(2, async {
        let (here, there) = (ThreadedReactor::start(config()).unwrap(), ThreadedReactor::start(config()).unwrap());
        let listener = there.listen(LOOPBACK.into()).await.unwrap();
        let mut conn = here.connect(listener.local_address()).await.unwrap();
        drop(listener);
        assert_eq!(conn.recv().await.unwrap_err(), ConnectionEnd::Disconnected(DisconnectReason::Closed));
        end_both(here, there).await;
    });
}

#[test]
fn a_panic_on_the_thread_ends_every_wait() {
    on_threads(2, async {
        let (here, conn, there, mut accepted) = pair(config()).await;
        let (sender, mut receiver): (_, Receiver) = conn.split();
        let waits = tokio::spawn(async move { receiver.recv().await.map(|message| message.to_vec()) });
        let answer = here.with(|_| panic!("a planted panic")).await;
        assert!(matches!(answer, Err(Error::ClosurePanicked)), "{answer:?}");
        assert_eq!(here.ended().await, Err(ThreadError::Panicked("a planted panic".into())));
        assert_eq!(waits.await.unwrap(), Err(ConnectionEnd::Reactor));
        assert_eq!(sender.send("nobody is there").await, Err(ConnectionEnd::Reactor));
        assert!(here.connect(([127, 0, 0, 1], 9).into()).await.is_err());
        assert!(here.listen(LOOPBACK.into()).await.is_err());
        // The peer is notified of the end.
        assert!(accepted.recv().await.is_err());
        end(there).await;
    });
}

/// With `Config::contain_panics`, a panic of a closure is reported only to the caller of this
/// closure. The reactor continues.
#[test]
fn a_contained_panic_of_a_closure_is_told_to_its_caller() {
    on_threads(2, async {
        let reactor = ThreadedReactor::start(config().contain_panics(true)).unwrap();
        let answer = reactor.with(|_| panic!("a planted panic")).await;
        assert!(matches!(answer, Err(Error::ClosurePanicked)), "{answer:?}");
        assert_eq!(reactor.with(|cx| cx.stats().turns.panics).await.unwrap(), 1);
        end(reactor).await;
    });
}

#[test]
fn a_drain_ends_what_waits() {
    on_threads(2, async {
        let (here, mut conn, there, accepted) = pair(config()).await;
        let mut listener = there.listen(LOOPBACK.into()).await.unwrap();
        let accepts = tokio::spawn(async move { listener.accept().await.is_none() });
        let waits = tokio::spawn(async move { conn.recv().await.map(|message| message.to_vec()) });
        accepted.send("before the drain").await.unwrap();
        end(there).await;
        assert!(accepts.await.unwrap(), "nothing is accepted");
        assert_eq!(waits.await.unwrap(), Ok(b"before the drain".to_vec()));
        assert!(matches!(accepted.send("after").await, Err(ConnectionEnd::Disconnected(_))));
        end(here).await;
    });
}

/// A connection whose peer sends no hello is not up. A drain does not wait for it.
#[test]
fn a_drain_ends_connections_that_are_not_up() {
    on_threads(2, async {
        let (here, there) = (ThreadedReactor::start(config()).unwrap(), ThreadedReactor::start(config()).unwrap());
        let listener = there.listen(LOOPBACK.into()).await.unwrap();
        let options = ConnectOptions::new().framing(Framing::Raw).private_data(greeting(WINDOW));
        let mut silent = here.connect_with(listener.local_address(), options).await.unwrap();
        there.drain(HOUR);
        assert_eq!(there.ended().await, Ok(()));
        assert!(silent.recv().await.is_err());
        end(here).await;
    });
}

/// The thread of a reactor ends when its last handle is dropped. Then its connections end, too.
#[test]
fn the_thread_ends_with_its_last_holder() {
    on_threads(2, async {
        let (here, there) = (ThreadedReactor::start(config()).unwrap(), ThreadedReactor::start(config()).unwrap());
        let mut listener = there.listen(LOOPBACK.into()).await.unwrap();
        let mut conn = here.connect(listener.local_address()).await.unwrap();
        let accepted = listener.accept().await.unwrap();
        drop((there, listener));
        // The accepted connection still holds a handle, so the thread still runs.
        accepted.send("still here").await.unwrap();
        assert_eq!(&conn.recv().await.unwrap()[..], b"still here");
        drop(accepted);
        assert!(conn.recv().await.is_err());
        end(here).await;
    });
}

#[test]
fn without_an_executor_a_thread_waits() {
    let server = ThreadedReactor::start(config()).unwrap();
    let mut listener = server.block_on(server.listen(LOOPBACK.into())).unwrap().unwrap();
    let client = ThreadedReactor::start(config()).unwrap();
    let mut conn = client.block_on(client.connect(listener.local_address())).unwrap().unwrap();
    let mut accepted = server.block_on(listener.accept()).unwrap().unwrap();
    client.block_on(conn.send("hello")).unwrap().unwrap();
    let message = server.block_on(accepted.recv()).unwrap().unwrap();
    server.block_on(accepted.send(message)).unwrap().unwrap();
    assert_eq!(&client.block_on(conn.recv()).unwrap().unwrap()[..], b"hello");
    // `block_on` on the reactor's own thread would wait forever, because it blocks the thread that must run the turns. So it returns the
    // error `OwnThread`.
    let own = client.clone();
    let refused = client.block_on(client.with(move |_| own.block_on(async {}))).unwrap().unwrap();
    assert_eq!(refused, Err(OwnThread));
    for reactor in [client, server] {
        reactor.drain(PATIENCE);
        assert_eq!(reactor.block_on(reactor.ended()).unwrap(), Ok(()));
    }
}

/// If the future of a connect is dropped, the connection is closed as soon as it is established.
#[test]
fn a_dropped_connect_leaves_nothing() {
    on_threads(2, async {
        let (here, there) = (ThreadedReactor::start(config()).unwrap(), ThreadedReactor::start(config()).unwrap());
        let address = serve(there.clone()).await;
        for _ in 0..100 {
            let _ = here.connect(address).now_or_never();
        }
        let up = Arc::new(AtomicUsize::new(0));
        while here.with(|cx| cx.stats().connections.current).await.unwrap() > 0 {
            up.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
        }
        end_both(here, there).await;
    });
}

/// Returns `len` bytes, each of which differs from its neighbours.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251) as u8).collect()
}

/// Two megabytes cross each way at the same time, in writes of any length. Each side reads all
/// bytes of the other one, and then its end, in plain and in secured connections.
#[test]
fn streams_carry_all_bytes_both_ways_and_end() {
    const LEN: usize = 2 << 20;
    let key = Psk::new("tests", std::array::from_fn(|at| at as u8)).expect("a key");
    for config in [config(), config().security(Security::Psk(key))] {
        on_threads(3, async move {
            let (here, conn, there, accepted) = pair(config).await;
            let sides = [conn, accepted].map(|conn| {
                tokio::spawn(async move {
                    let (mut reads, mut writes) = tokio::io::split(conn.into_stream());
                    let writer = tokio::spawn(async move {
                        let (bytes, mut at) = (pattern(LEN), 0);
                        for len in (1..).step_by(997) {
                            let part = &bytes[at..LEN.min(at + len)];
                            writes.write_all(part).await.unwrap();
                            at += part.len();
                            if at == LEN {
                                break;
                            }
                        }
                        writes.shutdown().await.unwrap();
                        assert_eq!(writes.write(b"x").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
                    });
                    let mut read = Vec::new();
                    reads.read_to_end(&mut read).await.unwrap();
                    assert!(read == pattern(LEN), "{} bytes", read.len());
                    assert_eq!(reads.read(&mut [0]).await.unwrap(), 0, "the end stays");
                    writer.await.unwrap();
                })
            });
            for side in sides {
                side.await.unwrap();
            }
            end_both(here, there).await;
        });
    }
}

/// A write is sent as one message, which contains all slices, up to 64 KiB. The end of a direction
/// is an empty message, as on the streams of a handler.
#[test]
fn a_write_of_a_stream_is_one_message() {
    on_threads(2, async {
        let (here, conn, there, mut accepted) = pair(config()).await;
        let mut stream = conn.into_stream();
        assert!(stream.is_write_vectored() && stream.connection().peer_address().is_some());
        let slices = [b"to".as_slice(), b"", b"gether"].map(IoSlice::new);
        assert_eq!(stream.write_vectored(&slices).await.unwrap(), 8);
        assert_eq!((stream.write(b"").await.unwrap(), stream.write(&pattern(70_000)).await.unwrap()), (0, 64 << 10));
        stream.shutdown().await.unwrap();
        stream.shutdown().await.unwrap();
        let mut lens = Vec::new();
        while lens.last() != Some(&0) {
            lens.push(accepted.recv().await.unwrap().len());
        }
        assert_eq!(lens, [8, 64 << 10, 0]);
        end_both(here, there).await;
    });
}

/// Writes wait for a peer that does not read, and go on when it reads. A write that is dropped
/// while it waits has written nothing.
#[test]
fn a_stream_waits_for_a_peer_that_does_not_read() {
    on_threads(2, async {
        let (here, conn, there, accepted) = pair(config()).await;
        let (mut stream, mut peer) = (conn.into_stream(), accepted.into_stream());
        let mut written = 0;
        loop {
            if let Some(result) = stream.write(&[5; 1000]).now_or_never() {
                written += result.unwrap();
                here.with(|_| ()).await.unwrap();
                continue;
            }
            // As in [`fill`], only the peer's program can make room when all messages have arrived.
            let out = here.with(|cx| cx.stats().messages.sent).await.unwrap();
            if there.with(|cx| cx.stats().messages.received).await.unwrap() == out {
                break;
            }
        }
        assert!(written >= 64_000, "{written}");
        let mut read = vec![0; written];
        peer.read_exact(&mut read).await.unwrap();
        stream.write_all(b"last").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut rest = Vec::new();
        peer.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"last");
        end_both(here, there).await;
    });
}

/// A peer finishes its stream, and then closes the connection, as clients of HTTP do. Ending the
/// other direction is then no error, because nobody waits for that end.
#[test]
fn a_stream_ends_after_its_peer_has_finished_and_closed() {
    on_threads(2, async {
        let (here, conn, there, accepted) = pair(config()).await;
        let (mut stream, mut peer) = (conn.into_stream(), accepted.into_stream());
        stream.write_all(b"all").await.unwrap();
        stream.shutdown().await.unwrap();
        drop(stream);
        let mut read = Vec::new();
        peer.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, b"all");
        while peer.write(b"x").await.is_ok() {
            tokio::task::yield_now().await;
        }
        peer.shutdown().await.unwrap();
        end_both(here, there).await;
    });
}

/// The reads of a stream whose peer is gone without an end return the bytes that arrived, and then
/// fail. So do its writes.
#[test]
fn a_stream_without_an_end_fails_after_its_last_byte() {
    on_threads(2, async {
        let (here, conn, there, accepted) = pair(config()).await;
        let (mut stream, mut peer) = (conn.into_stream(), accepted.into_stream());
        stream.write_all(b"half").await.unwrap();
        drop(stream);
        let mut read = Vec::new();
        let error = peer.read_to_end(&mut read).await.unwrap_err();
        assert_eq!((read.as_slice(), error.kind()), (b"half".as_slice(), ErrorKind::ConnectionReset));
        assert_eq!(peer.write(b"x").await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(peer.shutdown().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        end_both(here, there).await;
    });
}
