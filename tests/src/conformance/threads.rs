//! The tests of other threads: their messages to the reactor, their sends, and their handles after the end of the reactor.

use std::collections::VecDeque;
use std::thread;
use std::time::Duration;

use rdma_reactor::{
    ConnectionId, Context, DetachedMessage, HandleError, Handler, Message, Outcome, Reactor, ReactorHandle, SendId,
};

use super::harness::{Event, PATIENCE, Pair, Probe, Setup};

const THREADS: u32 = 4;
const EACH: u32 = 5_000;

/// A message that another thread sends to the reactor.
#[derive(Debug, PartialEq, Eq)]
struct Said {
    thread: u32,
    nth: u32,
}

#[derive(Default)]
struct Listener {
    next: [u32; THREADS as usize],
    conn: Option<ConnectionId>,
    sent: u64,
    received: Vec<DetachedMessage>,
    total: u64,
    release: Option<crossbeam_channel::Sender<DetachedMessage>>,
}

impl Handler<Said> for Listener {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, Said { thread, nth }: Said) {
        assert_eq!(self.next[thread as usize], nth, "messages of one thread keep their order");
        self.next[thread as usize] += 1;
        if self.next.iter().all(|&next| next == EACH) {
            cx.stop();
        }
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.total += 1;
        match &self.release {
            Some(release) => release.send(message.detach()).expect("a thread that releases messages"),
            None => self.received.push(message.detach()),
        }
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, _: ConnectionId, _: SendId, outcome: Outcome) {
        assert!(outcome.is_sent());
        self.sent += 1;
    }
}

/// Each message of each thread must arrive once, even if the reactor sleeps. The messages of one thread must arrive in the order in which
/// the thread sent them. Several messages must cause only one wake-up.
#[allow(clippy::disallowed_methods, reason = "other threads are what is tested")]
pub fn messages_of_other_threads_arrive(setup: &Setup) {
    let mut reactor = Reactor::<Said>::with_messages(setup.config()).expect("a reactor");
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let remote = reactor.handle();
            thread::spawn(move || (0..EACH).for_each(|nth| remote.post(Said { thread, nth }).expect("a reactor")))
        })
        .collect();
    let mut listener = Listener::default();
    reactor.run(&mut listener).expect("a run");
    threads.into_iter().for_each(|thread| thread.join().expect("a thread"));
    assert_eq!(listener.next, [EACH; THREADS as usize]);
    let remote = reactor.handle();
    drop(reactor);
    assert_eq!(remote.post(Said { thread: 0, nth: 9 }), Err(HandleError::Gone(Said { thread: 0, nth: 9 })));
    remote.stop();
    remote.wake();
}

/// Sends from other threads must be posted in order, and must wait while the window is closed. The server's messages are released on
/// another thread. In the end, both sides must have all their buffers.
#[allow(clippy::disallowed_methods, reason = "other threads are what is tested")]
pub fn other_threads_send_and_let_go(setup: &Setup) {
    const COUNT: u32 = 3_000;
    let config = setup.config().receive_depth(8).send_depth(4);
    // A second thread holds messages, so the window stays closed and the echoes must wait.
    let mut echoes = VecDeque::new();
    let mut server = Probe::new(move |cx, event| {
        let (Event::Recv(conn, _) | Event::Writable(conn)) = event else { return };
        echoes.extend(if let Event::Recv(_, bytes) = event { Some(bytes.clone()) } else { None });
        while echoes.front().is_some_and(|bytes| cx.send(*conn, bytes).is_ok()) {
            echoes.pop_front();
        }
    });
    server.record_messages = false;
    let mut p = Pair::new(setup, config.clone(), server, Probe::default());
    let mut client = Reactor::<Said>::with_messages(config.handle_queue(COUNT)).expect("a reactor");
    let (release, released) = crossbeam_channel::unbounded::<DetachedMessage>();
    let mut listener = Listener { release: Some(release), ..Listener::default() };
    client.context().connect(p.address).expect("connecting");
    let limit = super::harness::now() + PATIENCE;
    let mut turn = |listener: &mut Listener, client: &mut Reactor<Said>| {
        assert!(super::harness::now() < limit, "{} came back, {} were sent", listener.total, listener.sent);
        p.server.turn(&mut p.s, Some(Duration::ZERO)).expect("the server's turn");
        client.turn(listener, Some(Duration::from_micros(100))).expect("the client's turn");
    };
    while listener.conn.is_none() {
        turn(&mut listener, &mut client);
    }
    let (remote, conn) = (client.handle(), listener.conn.expect("connected"));
    let sender = thread::spawn(move || {
        for nth in 0..COUNT {
            remote.send(conn, nth.to_le_bytes()).expect("a reactor with room");
        }
        remote
    });
    // The second thread checks the order of the messages, and releases them.
    let checker = thread::spawn(move || {
        for (nth, message) in (0_u32..).zip(released) {
            assert_eq!(*message, nth.to_le_bytes(), "in order");
        }
    });
    while listener.total < u64::from(COUNT) || listener.sent < u64::from(COUNT) {
        turn(&mut listener, &mut client);
    }
    let remote: ReactorHandle<Said> = sender.join().expect("the sender");
    client.context().close(conn);
    while client.context().connections() > 0 {
        turn(&mut listener, &mut client);
    }
    drop(listener.release.take());
    checker.join().expect("the checker");
    assert_eq!(client.stats().messages.handle_sends_dropped, 0);
    remote.send(conn, b"late".to_vec()).expect("a reactor");
    turn(&mut listener, &mut client);
    assert_eq!(client.stats().messages.handle_sends_dropped, 1, "nothing is sent on what is gone");
    assert_eq!(client.pool_levels().0, client.pool_levels().1, "all buffers are home");
}

/// A full message queue of the reactor must refuse a message and return it to the caller. A turn of the reactor must free space in the
/// queue.
pub fn a_full_queue_refuses(setup: &Setup) {
    let mut reactor = Reactor::<u8>::with_messages(setup.config().handle_queue(2)).expect("a reactor");
    struct Sum(u32);
    impl Handler<u8> for Sum {
        fn on_wake(&mut self, _: &mut Context<'_>, message: u8) {
            self.0 += u32::from(message);
        }
    }
    let (remote, mut sum) = (reactor.handle(), Sum(0));
    assert_eq!((remote.post(1), remote.post(2), remote.post(3)), (Ok(()), Ok(()), Err(HandleError::Full(3))));
    reactor.turn(&mut sum, Some(Duration::ZERO)).expect("a turn");
    assert_eq!((sum.0, remote.post(4)), (3, Ok(())));
}
