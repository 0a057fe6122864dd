//! The tests of descriptors that the program registers with the reactor's loop.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rdma_reactor::{Config, ConnectionId, Context, Handler, Interest, IoId, Message, Reactor, Readiness};

use super::harness::{PATIENCE, Pair, Probe, Setup};

/// A handler that reads a stream until it would block, as edge-triggered readiness requires. It sends the bytes over a connection.
struct Bridge {
    stream: UnixStream,
    io: Option<IoId>,
    conn: Option<ConnectionId>,
    edges: usize,
    ended: bool,
    echoed: Vec<u8>,
}

impl Handler for Bridge {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
        self.io = Some(cx.io().register(&self.stream, Interest::READABLE | Interest::WRITABLE).expect("a stream"));
        let again = cx.io().register(&self.stream, Interest::READABLE);
        assert!(again.is_err(), "a descriptor is registered once");
    }

    fn on_io_ready(&mut self, cx: &mut Context<'_>, io: IoId, readiness: Readiness) {
        assert_eq!(self.io, Some(io));
        self.edges += 1;
        if !readiness.readable {
            return;
        }
        let mut bytes = [0; 64];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => {
                    self.ended = true;
                    assert!(readiness.closed, "the end of a stream is an end");
                    assert!(cx.io().deregister(io) && !cx.io().deregister(io), "deregistered once");
                    return;
                }
                Ok(n) => {
                    cx.send(self.conn.expect("registered after it"), &bytes[..n]).expect("room");
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.echoed.extend_from_slice(&message);
    }
}

/// A program's stream is registered with the loop and forwarded to a connection. The program must get one edge for each arrival of data.
/// After the stream was deregistered, the program must get no edge.
pub fn descriptors_share_the_loop(setup: &Setup) {
    // The client shuts down while the server takes no turns. On an iWARP device, the shutdown of the client waits for the server, at most
    // for this timeout.
    let config = setup.config().timeouts(|t| t.close = Duration::from_secs(2));
    let mut p = Pair::new(setup, config, Probe::echo(), Probe::default());
    let (mut ours, theirs) = UnixStream::pair().expect("a pair of streams");
    theirs.set_nonblocking(true).expect("a non-blocking stream");
    let mut bridge = Bridge { stream: theirs, io: None, conn: None, edges: 0, ended: false, echoed: Vec::new() };
    p.client.context().connect(p.address).expect("connecting");
    until(&mut p, &mut bridge, "connected", |b| b.io.is_some());
    until(&mut p, &mut bridge, "there is room at first: one edge", |b| b.edges == 1);
    for nth in 0_u8..100 {
        ours.write_all(&[nth]).expect("room");
        until(&mut p, &mut bridge, "the echo", |b| b.echoed.last() == Some(&nth));
    }
    let edges = bridge.edges;
    assert!(edges <= 201, "{edges} edges for 100 bytes: each comes with one, and one for room at most");
    drop(ours);
    until(&mut p, &mut bridge, "the end", |b| b.ended);
    let edges = bridge.edges;
    for _ in 0..20 {
        p.client.turn(&mut bridge, Some(Duration::ZERO)).expect("a turn");
    }
    assert_eq!(bridge.edges, edges, "no edge follows after it was deregistered");
    let idle = p.client.context().io().register(&bridge.stream, Interest::empty()).map_err(|error| error.kind());
    assert_eq!(idle, Err(ErrorKind::InvalidInput));
    p.client.shutdown(&mut bridge, PATIENCE).expect("the client's end");
    p.finish();
}

fn until(p: &mut Pair, bridge: &mut Bridge, what: &str, condition: impl Fn(&Bridge) -> bool) {
    let limit = super::harness::now() + PATIENCE;
    while !condition(bridge) {
        assert!(super::harness::now() < limit, "not in time: {what}");
        p.server.turn(&mut p.s, Some(Duration::ZERO)).expect("the server's turn");
        p.client.turn(bridge, Some(Duration::from_millis(1))).expect("the client's turn");
    }
}

/// A descriptor is closed without being deregistered. The registration must have no effect, even if a new descriptor gets the same
/// number.
pub fn a_closed_descriptor_is_forgotten(setup: &Setup) {
    struct Count(Vec<IoId>);
    impl Handler for Count {
        fn on_io_ready(&mut self, _: &mut Context<'_>, io: IoId, _: Readiness) {
            self.0.push(io);
        }
    }
    let mut reactor = Reactor::new(Config::default().provider(setup.provider)).expect("a reactor");
    let (a, mut b) = UnixStream::pair().expect("a pair of streams");
    let old = reactor.context().io().register(&a, Interest::READABLE).expect("a stream");
    b.write_all(b"x").expect("room");
    drop(a);
    // The new descriptors probably have the numbers of the closed ones. Whatever their numbers are, the system has already removed the old
    // registration.
    let (a, mut b) = UnixStream::pair().expect("a pair of streams");
    let new = reactor.context().io().register(&a, Interest::READABLE).expect("a stream");
    reactor.context().io().deregister(old);
    b.write_all(b"x").expect("room");
    let mut count = Count(Vec::new());
    while count.0.is_empty() {
        reactor.turn(&mut count, Some(PATIENCE)).expect("a turn");
    }
    assert_eq!(count.0, [new]);
}
