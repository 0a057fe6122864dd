//! A program panics in the closure `fill` that it passes to `Context::append` or `Stream::write_with`, with
//! `Config::contain_panics`. The reactor must lose no resources by these panics, however many occur.

use std::cell::RefCell;
use std::io::{ErrorKind, Read};
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::stream::{StreamContext, StreamHandler, Streams};
use rdma_reactor::{Config, ConnectionId, Context, DisconnectReason, Handler, Message, SendErrorKind, TimerId};
use rdma_reactor_tests::life;
use rdma_reactor_tests::sim::fabric::Shared;
use rdma_reactor_tests::sim::quiet::{Node, network, reactor, until};
use rdma_reactor_tests::sim::tcp::address;

const PANICS: usize = 1_000;
const TEXT: &[u8] = b"whole";
const PAUSE: Duration = Duration::from_millis(1);

fn config() -> Config {
    life::config().contain_panics(true)
}

/// The record of a node's program.
#[derive(Debug, Default)]
struct Book {
    up: Vec<ConnectionId>,
    gone: Vec<DisconnectReason>,
    panics: usize,
    /// The number of calls of `fill` that wrote `TEXT` and did not panic.
    filled: usize,
    received: Vec<u8>,
}

/// A program that panics in `fill` within timer callbacks. Such a panic ends no connection.
#[derive(Clone, Debug, Default)]
struct Program {
    book: Rc<RefCell<Book>>,
    /// True if the program also panics in `on_connect`, which ends the connection.
    at_connect: bool,
    /// In this many of every eight timer callbacks, the program appends bytes successfully before the panic.
    after: usize,
}

impl Program {
    /// Writes `TEXT` into `room`, and then panics if `panics` is true. Returns the number of written bytes.
    fn fill(&self, room: &mut [u8], panics: bool) -> usize {
        room[..TEXT.len()].copy_from_slice(TEXT);
        if panics {
            self.book.borrow_mut().panics += 1;
            panic!("in fill");
        }
        self.book.borrow_mut().filled += 1;
        TEXT.len()
    }
}

impl Handler for Program {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.book.borrow_mut().up.push(conn);
        if self.at_connect {
            let _ = cx.append(conn, |room| self.fill(room, true));
        }
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, token: u64) {
        if self.book.borrow().panics == PANICS {
            return;
        }
        cx.timers().set(PAUSE, token + 1);
        let conn = self.book.borrow().up[token as usize % 2];
        if token as usize % 8 < self.after {
            let len = cx.append(conn, |room| self.fill(room, false));
            assert!(matches!(len, Ok(_) | Err(SendErrorKind::WouldBlock(_))), "{len:?}");
        }
        let _ = cx.append(conn, |room| self.fill(room, true));
    }
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.book.borrow_mut().received.extend_from_slice(&message);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.book.borrow_mut().gone.push(reason);
    }
}

impl StreamHandler for Program {
    fn on_open(&mut self, _: &mut StreamContext<'_>, id: ConnectionId) {
        self.book.borrow_mut().up.push(id);
    }
    fn on_timer(&mut self, cx: &mut StreamContext<'_>, _: TimerId, token: u64) {
        if self.book.borrow().panics == PANICS {
            return;
        }
        cx.context().timers().set(PAUSE, token + 1);
        let id = self.book.borrow().up[token as usize % 2];
        let _ = cx.stream(id).write_with(|room| self.fill(room, true));
    }
    fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let mut bytes = [0; 64];
        while let Ok(len @ 1..) = cx.stream(id).read(&mut bytes) {
            self.book.borrow_mut().received.extend_from_slice(&bytes[..len]);
        }
    }
}

/// Returns the network, two connected nodes, and the server's program. Node 0 has `handler` and two connections to node
/// 1, the server.
fn connected(program: &Program, handler: Box<dyn Handler>) -> (Shared, Vec<Node>, Program) {
    let (fabric, server) = (network(2), Program::default());
    let mut nodes = vec![
        Node::new(reactor(0, &fabric, config()), handler),
        Node::new(reactor(1, &fabric, config()), Box::new(server.clone())),
    ];
    nodes[1].reactor.context().listen(address(1, 7471)).expect("a free port");
    for _ in 0..2 {
        nodes[0].reactor.context().connect(address(1, 7471)).expect("a peer");
    }
    until(&fabric, &mut nodes, "both are up", |_| {
        program.book.borrow().up.len() == 2 && server.book.borrow().up.len() == 2
    });
    (fabric, nodes, server)
}

/// Closes both connections, and checks that all buffers are free afterwards.
fn close(fabric: &Shared, nodes: &mut [Node], program: &Program) {
    for &conn in &program.book.borrow().up {
        nodes[0].reactor.context().close(conn);
    }
    until(fabric, nodes, "both ends", |nodes| nodes[0].reactor.stats().connections.current == 0);
    let (all, free) = nodes[0].reactor.pool_levels();
    assert_eq!(all, free, "buffers of connections that are gone");
}

/// Starts eight timers that fire each millisecond and panic. Runs until `PANICS` panics have occurred, which must have
/// ended no connection.
fn panic_often(fabric: &Shared, nodes: &mut [Node], program: &Program) {
    for nth in 0..8 {
        nodes[0].reactor.context().timers().set(PAUSE, nth);
    }
    until(fabric, nodes, "all panics", |nodes| nodes[0].reactor.stats().turns.panics == PANICS as u64);
    assert_eq!((program.book.borrow().panics, program.book.borrow().gone.len()), (PANICS, 0));
}

#[test]
fn panics_in_fill_lose_no_buffer() {
    for after in [0, 4] {
        let program = Program { after, ..Program::default() };
        let (fabric, mut nodes, server) = connected(&program, Box::new(program.clone()));
        panic_often(&fabric, &mut nodes, &program);
        let filled = program.book.borrow().filled;
        until(&fabric, &mut nodes, "what was sent", |_| server.book.borrow().received.len() >= filled * TEXT.len());
        // The bytes that were written before a panic have arrived. Bytes that `fill` wrote in a call that panicked have
        // not.
        let chunks = server.book.borrow().received.len() / TEXT.len();
        assert_eq!(server.book.borrow().received, TEXT.repeat(chunks));
        assert_eq!((chunks, chunks > 100), (filled, after > 0));
        // Each connection still has the credits of its window, and can send.
        let up = program.book.borrow().up.clone();
        let mut sent = 0;
        for conn in up {
            while nodes[0].reactor.context().send(conn, TEXT).is_ok() {
                sent += 1;
            }
        }
        // The peer grants credits in groups. So each of the two connections may have as little as one credit at this
        // moment.
        assert!(sent >= 2, "{sent} messages had room");
        until(&fabric, &mut nodes, "traffic afterwards", |_| {
            server.book.borrow().received.len() == (chunks + sent) * TEXT.len()
        });
        close(&fabric, &mut nodes, &program);
    }
}

#[test]
fn panics_of_streams_lose_no_buffer() {
    let program = Program::default();
    let (fabric, mut nodes, server) = connected(&program, Box::new(Streams::new(program.clone())));
    panic_often(&fabric, &mut nodes, &program);
    assert!(server.book.borrow().received.is_empty());
    let up = program.book.borrow().up.clone();
    for conn in &up {
        nodes[0].reactor.context().send(*conn, TEXT).expect("room");
    }
    until(&fabric, &mut nodes, "traffic afterwards", |_| server.book.borrow().received.len() == 2 * TEXT.len());
    close(&fabric, &mut nodes, &program);
}

/// A program of streams that reads nothing, and panics in the last callback of each stream. Its timer tries to read
/// from all streams, and records the results.
#[derive(Clone, Default)]
struct Careless {
    program: Program,
    reads: Rc<RefCell<Vec<Result<usize, ErrorKind>>>>,
}

impl StreamHandler for Careless {
    fn on_open(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.program.on_open(cx, id);
    }
    fn on_readable(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {
        self.program.book.borrow_mut().filled += 1;
    }
    fn on_close(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {
        panic!("at the end");
    }
    fn on_error(&mut self, _: &mut StreamContext<'_>, _: ConnectionId, _: DisconnectReason) {
        panic!("at the end");
    }
    fn on_timer(&mut self, cx: &mut StreamContext<'_>, _: TimerId, _: u64) {
        for &id in &self.program.book.borrow().up {
            let read = cx.stream(id).read(&mut [0; 64]);
            self.reads.borrow_mut().push(read.map_err(|error| error.kind()));
        }
    }
}

/// A stream ends with its last callback, also if that callback panics: it lends no receive buffers, and cannot be read
/// any more.
#[test]
fn panics_in_the_last_callback_leave_no_stream() {
    let careless = Careless::default();
    let program = careless.program.clone();
    let (fabric, mut nodes, server) = connected(&program, Box::new(Streams::new(careless.clone())));
    let peers = server.book.borrow().up.clone();
    for (nth, &peer) in peers.iter().enumerate() {
        let mut cx = nodes[1].reactor.context();
        cx.send(peer, TEXT).expect("room");
        // One of the streams ends with `on_close`, because its peer has finished writing, and the other one with
        // `on_error`.
        if nth == 0 {
            cx.send(peer, &[]).expect("room");
        }
    }
    until(&fabric, &mut nodes, "unread bytes", |_| program.book.borrow().filled == 2);
    for peer in peers {
        nodes[1].reactor.context().close(peer);
    }
    until(&fabric, &mut nodes, "both ends", |nodes| nodes[0].reactor.stats().connections.current == 0);
    assert_eq!(nodes[0].reactor.stats().turns.panics, 2);
    let (all, free) = nodes[0].reactor.pool_levels();
    assert_eq!(all, free, "buffers of streams that are gone");
    nodes[0].reactor.context().timers().set(PAUSE, 0);
    until(&fabric, &mut nodes, "the timer", |_| careless.reads.borrow().len() == 2);
    let closed: Result<usize, _> = Err(ErrorKind::NotConnected);
    assert_eq!(careless.reads.take(), [closed; 2]);
}

/// A panic in `on_connect` ends the connection. The buffers of this connection are then available to later connections.
#[test]
fn panics_in_fill_cost_their_connections_only() {
    let fabric = network(2);
    let (program, server) = (Program { at_connect: true, ..Program::default() }, Program::default());
    let mut nodes = vec![
        Node::new(reactor(0, &fabric, config()), Box::new(program.clone())),
        Node::new(reactor(1, &fabric, config()), Box::new(server.clone())),
    ];
    nodes[1].reactor.context().listen(address(1, 7471)).expect("a free port");
    for nth in 0..200 {
        nodes[0].reactor.context().connect(address(1, 7471)).expect("a peer");
        until(&fabric, &mut nodes, "the end", |_| program.book.borrow().gone.len() == nth + 1);
        let book = program.book.borrow();
        assert!(
            matches!(&book.gone[nth], DisconnectReason::Internal(why) if why.contains("in fill")),
            "{:?}",
            book.gone[nth]
        );
    }
    let (all, free) = nodes[0].reactor.pool_levels();
    assert_eq!(all, free, "buffers of connections that are gone");
    // After two hundred such connections, another one still has all its buffers and credits.
    nodes[0].handler = Box::<Program>::default();
    let conn = nodes[0].reactor.context().connect(address(1, 7471)).expect("a peer");
    let arrived = server.book.borrow().received.len();
    until(&fabric, &mut nodes, "it is up", |nodes| nodes[0].reactor.stats().connections.connected == 201);
    let mut sent = 0;
    while nodes[0].reactor.context().send(conn, TEXT).is_ok() {
        sent += 1;
    }
    assert!(sent >= 4, "{sent} messages had room");
    until(&fabric, &mut nodes, "traffic", |_| server.book.borrow().received.len() == arrived + sent * TEXT.len());
}
