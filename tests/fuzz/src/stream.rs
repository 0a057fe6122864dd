//! The fuzz target of byte streams (`Streams`). The peer of the stream sends any messages: bytes, the end of the
//! stream, and bytes after the end, which are a violation.

use std::cell::RefCell;
use std::io::{BufRead, Write};
use std::net::Shutdown;
use std::rc::Rc;

use rdma_reactor::stream::{StreamContext, StreamHandler, Streams};
use rdma_reactor::{
    Config, ConnectionId, Context, DisconnectReason, Handler, Message, PeerViolation, SendErrorKind, Wait,
};
use rdma_reactor_tests::sim::quiet::{Node, network, reactor, step};
use rdma_reactor_tests::sim::tcp::address;
use rdma_transport_fuzz::iwarp::fuzz::Tape;

const SERVER: usize = 0;
const CLIENT: usize = 1;
/// The number of simulation steps within which the stream and its connection must end after the peer has closed the
/// connection.
const STEPS: u32 = 20_000;

/// The events and the bytes that the reading side of the stream has received.
#[derive(Debug, Default)]
struct Seen {
    id: Option<ConnectionId>,
    octets: Vec<u8>,
    hangups: u32,
    closed: u32,
    errors: Vec<DisconnectReason>,
    /// True if the program reads as soon as bytes are available. If false, it reads only when the tape says so.
    eager: bool,
}

/// The program that reads its connection as a stream.
#[derive(Clone, Default)]
struct Reader(Rc<RefCell<Seen>>);

impl Reader {
    /// Reads at most `most` bytes from the stream, and appends them to the record of received bytes.
    fn read(&self, cx: &mut StreamContext<'_>, id: ConnectionId, most: usize) {
        let mut left = most;
        while left > 0 {
            let mut stream = cx.stream(id);
            let Ok(octets) = stream.fill_buf() else { return };
            let len = octets.len().min(left);
            self.0.borrow_mut().octets.extend_from_slice(&octets[..len]);
            stream.consume(len);
            left -= len;
            if len == 0 {
                return;
            }
        }
    }
}

impl StreamHandler for Reader {
    fn on_open(&mut self, _: &mut StreamContext<'_>, id: ConnectionId) {
        self.0.borrow_mut().id = Some(id);
    }

    fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        if self.0.borrow().eager {
            self.read(cx, id, usize::MAX);
        }
    }

    fn on_hangup(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {
        self.0.borrow_mut().hangups += 1;
    }

    fn on_close(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.read(cx, id, usize::MAX);
        self.0.borrow_mut().closed += 1;
    }

    fn on_error(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, reason: DisconnectReason) {
        self.read(cx, id, usize::MAX);
        self.0.borrow_mut().errors.push(reason);
    }
}

/// The peer's program, which sends messages. It has two values: the id of the connection, and a flag that is true once
/// the connection has ended.
#[derive(Clone, Default)]
struct Writer(Rc<RefCell<(Option<ConnectionId>, bool)>>);

impl Handler for Writer {
    fn on_connect(&mut self, _: &mut Context<'_>, id: ConnectionId) {
        self.0.borrow_mut().0 = Some(id);
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {}

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        self.0.borrow_mut().1 = true;
    }
}

/// A handler that passes each callback to a shared `Streams`, so that the test can also use this `Streams` between two
/// turns.
struct Server(Rc<RefCell<Streams<Reader>>>);

impl Handler for Server {
    fn on_connect(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        self.0.borrow_mut().on_connect(cx, id);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, id: ConnectionId, message: Message<'_>) {
        self.0.borrow_mut().on_recv(cx, id, message);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        self.0.borrow_mut().on_writable(cx, id);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, id: ConnectionId, reason: DisconnectReason) {
        self.0.borrow_mut().on_disconnect(cx, id, reason);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: rdma_reactor::TimerId, token: u64) {
        self.0.borrow_mut().on_timer(cx, timer, token);
    }
}

/// Plays a tape (the fuzzer's input). The tape chooses messages of the peer, ends of the peer's stream, pauses, and
/// calls of the side that reads the stream.
///
/// # Panics
/// Panics if the read bytes differ from the bytes that the peer sent before it first ended its stream, or if the stream
/// does not end exactly once.
pub fn stream(tape: &[u8]) {
    let mut tape = Tape::new(tape);
    let fabric = network(2);
    let config = || {
        Config::default()
            .wait(Wait::Event)
            .buffer_size(256)
            .large_messages(|l| l.max_message = 0)
            .receive_depth(8)
            .send_depth(8)
    };
    let (reader, writer) = (Reader::default(), Writer::default());
    reader.0.borrow_mut().eager = tape.below(128);
    let streams = Rc::new(RefCell::new(Streams::new(reader.clone())));
    let mut nodes = [
        Node::new(reactor(SERVER, &fabric, config()), Box::new(Server(Rc::clone(&streams)))),
        Node::new(reactor(CLIENT, &fabric, config()), Box::new(writer.clone())),
    ];
    nodes[SERVER].reactor.context().listen(address(SERVER, 7471)).expect("a free port");
    nodes[CLIENT].reactor.context().connect(address(SERVER, 7471)).expect("room");
    let pass = |nodes: &mut [Node], steps: u32| {
        for _ in 0..steps {
            step(&fabric, nodes).unwrap_or_else(|(node, error)| panic!("node {node}: {error}"));
        }
    };
    while writer.0.borrow().0.is_none() || reader.0.borrow().id.is_none() {
        pass(&mut nodes, 1);
    }
    let peer = writer.0.borrow().0.expect("it is connected");
    let id = reader.0.borrow().id.expect("it is open");
    let (mut sent, mut ends, mut behind, mut own) = (Vec::new(), 0_u32, 0_u32, false);
    while !tape.is_over() && !writer.0.borrow().1 {
        match tape.byte() % 16 {
            0..=6 => {
                let octets = tape.octets(256);
                let sending = nodes[CLIENT].reactor.context().send(peer, octets);
                match sending {
                    Ok(_) if ends > 0 => behind += 1,
                    Ok(_) if octets.is_empty() => ends += 1,
                    Ok(_) => sent.extend_from_slice(octets),
                    Err(SendErrorKind::WouldBlock(_)) => pass(&mut nodes, 5),
                    Err(SendErrorKind::Closed) => {}
                    Err(error) => panic!("a message of {} bytes: {error:?}", octets.len()),
                }
            }
            7..=9 => pass(&mut nodes, u32::from(tape.byte() % 32)),
            10..=12 => {
                let most = tape.number() as usize;
                let cx = nodes[SERVER].reactor.context();
                reader.read(&mut streams.borrow_mut().context(cx), id, most);
            }
            13 => {
                let octets = tape.octets(2000);
                let cx = nodes[SERVER].reactor.context();
                let _ = streams.borrow_mut().context(cx).stream(id).write(octets);
            }
            14 => {
                let cx = nodes[SERVER].reactor.context();
                let _ = streams.borrow_mut().context(cx).stream(id).shutdown(Shutdown::Write);
            }
            _ => {
                own = true;
                let cx = nodes[SERVER].reactor.context();
                streams.borrow_mut().context(cx).stream(id).close();
            }
        }
    }
    // The peer closes the connection. From now on, the test reads all bytes of the stream between turns, whatever the
    // tape says.
    nodes[CLIENT].reactor.context().close(peer);
    for _ in 0..STEPS {
        let cx = nodes[SERVER].reactor.context();
        reader.read(&mut streams.borrow_mut().context(cx), id, usize::MAX);
        if reader.0.borrow().closed as usize + reader.0.borrow().errors.len() > 0 && writer.0.borrow().1 {
            break;
        }
        pass(&mut nodes, 1);
    }
    pass(&mut nodes, 200);
    let seen = reader.0.borrow();
    assert_eq!(seen.closed as usize + seen.errors.len(), 1, "the stream ends once: {seen:?}");
    assert!(sent.starts_with(&seen.octets), "it is something else than what was sent");
    assert!(seen.hangups <= ends.min(1), "{} hang-ups for {ends} ends", seen.hangups);
    if !own {
        let violated =
            matches!(seen.errors.first(), Some(DisconnectReason::PeerViolation(PeerViolation::MalformedMessage)));
        assert!(behind > 0 || !violated, "nothing came behind the end");
        assert!(ends == 0 || seen.octets == sent || behind > 0, "{} of {} bytes", seen.octets.len(), sent.len());
    }
    assert_eq!(nodes.iter().map(|node| node.reactor.stats().connections.current).sum::<usize>(), 0);
}
