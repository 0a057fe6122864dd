//! The tests of byte streams: the behaviour of sockets on which programs rely.

use std::cell::{Cell, RefCell};
use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::stream::{StreamContext, StreamHandler, Streams, Unread};
use rdma_reactor::{Config, ConnectError, ConnectionId, DisconnectReason, PeerViolation, Reactor};

use super::harness::{Event, PATIENCE, Probe, Setup, now, pattern};

/// A recorded callback of a stream's handler.
#[derive(Clone, Debug, PartialEq, Eq)]
enum News {
    Open,
    Readable,
    Writable,
    Hangup,
    Close,
    Error(DisconnectReason),
    ConnectError(ConnectError),
}

type React = Box<dyn FnMut(&mut StreamContext<'_>, ConnectionId, &News)>;

/// A handler of one stream. The handler calls `react` for each callback, and then records the callback.
struct Script {
    news: Vec<News>,
    id: Option<ConnectionId>,
    react: React,
}

impl Script {
    fn new(react: impl FnMut(&mut StreamContext<'_>, ConnectionId, &News) + 'static) -> Self {
        Self { news: Vec::new(), id: None, react: Box::new(react) }
    }

    fn quiet() -> Self {
        Self::new(|_, _, _| {})
    }

    /// Creates a handler that takes the unread bytes from the stream when the stream ends. Returns the handler, and a shared cell for these
    /// bytes.
    fn keeper() -> (Self, Rc<RefCell<Unread>>) {
        let rest = Rc::new(RefCell::new(Unread::default()));
        let kept = Rc::clone(&rest);
        let script = Self::new(move |cx, id, news| {
            if matches!(news, News::Close | News::Error(_)) {
                *kept.borrow_mut() = cx.stream(id).take_unread();
            }
        });
        (script, rest)
    }

    fn count(&self, what: &News) -> usize {
        self.news.iter().filter(|news| *news == what).count()
    }

    fn is_over(&self) -> bool {
        matches!(self.news.last(), Some(News::Close | News::Error(_) | News::ConnectError(_)))
    }

    fn tell(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, news: News) {
        assert!(!self.is_over(), "{news:?} after the end: {:?}", self.news);
        assert_eq!(news == News::Open, self.news.is_empty(), "{news:?} after {:?}", self.news);
        self.id = Some(id);
        (self.react)(cx, id, &news);
        self.news.push(news);
    }
}

impl StreamHandler for Script {
    fn on_open(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.tell(cx, id, News::Open);
    }
    fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.tell(cx, id, News::Readable);
    }
    fn on_writable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.tell(cx, id, News::Writable);
    }
    fn on_hangup(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.tell(cx, id, News::Hangup);
    }
    fn on_close(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.tell(cx, id, News::Close);
    }
    fn on_error(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, reason: DisconnectReason) {
        self.tell(cx, id, News::Error(reason));
    }
    fn on_connect_error(&mut self, _: &mut StreamContext<'_>, _: ConnectionId, error: ConnectError) {
        self.news.push(News::ConnectError(error));
    }
}

/// A server and a client, with one stream between them.
struct Duo {
    server: Reactor,
    s: Streams<Script>,
    client: Reactor,
    c: Streams<Script>,
}

impl Duo {
    fn new(setup: &Setup, config: Config, s: Script, c: Script) -> Self {
        let mut server = (setup.reactor)(config.clone()).expect("the server's reactor");
        let mut client = (setup.reactor)(config).expect("the client's reactor");
        let listener = server.context().listen(setup.address).expect("listening");
        let address = server.context().listeners().local_address(listener).expect("the listener's address");
        client.context().connect(address).expect("connecting");
        let mut duo = Self { server, s: Streams::new(s), client, c: Streams::new(c) };
        duo.until("both sides are open", |d| d.s.handler.id.is_some() && d.c.handler.id.is_some());
        duo
    }

    fn here(&mut self) -> (StreamContext<'_>, ConnectionId) {
        let id = self.c.handler_id();
        (self.c.context(self.client.context()), id)
    }

    fn there(&mut self) -> (StreamContext<'_>, ConnectionId) {
        let id = self.s.handler_id();
        (self.s.context(self.server.context()), id)
    }

    fn turn(&mut self) {
        let server = self.server.turn(&mut self.s, Some(Duration::ZERO)).expect("the server's turn");
        let client = self.client.turn(&mut self.c, Some(Duration::ZERO)).expect("the client's turn");
        if !(server.progressed || server.more || client.progressed || client.more) {
            self.client.turn(&mut self.c, Some(Duration::from_millis(1))).expect("the client's turn");
        }
    }

    #[track_caller]
    fn until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        let deadline = now() + PATIENCE;
        while !condition(self) {
            let (s, c) = (&self.s.handler.news, &self.c.handler.news);
            assert!(now() < deadline, "not in time: {what}\nserver {s:?}\nclient {c:?}");
            self.turn();
        }
    }

    /// Waits until both streams have ended. Checks that all buffers are in their pools.
    #[track_caller]
    fn finish(mut self) {
        self.until("both streams are over", |d| d.s.handler.is_over() && d.c.handler.is_over());
        self.until("all buffers are home", |d| {
            [&d.server, &d.client].iter().all(|r| r.pool_levels().0 == r.pool_levels().1)
        });
        assert_eq!(self.server.context().connections() + self.client.context().connections(), 0);
    }
}

/// Gives access to the id of a handler's only stream.
trait HandlerId {
    fn handler_id(&self) -> ConnectionId;
}

impl HandlerId for Streams<Script> {
    fn handler_id(&self) -> ConnectionId {
        self.handler.id.expect("it was open")
    }
}

/// Reads a stream until it would block, at most `piece` bytes at a time. Returns true if the peer has ended its direction.
fn read_all(cx: &mut StreamContext<'_>, id: ConnectionId, piece: usize, into: &mut Vec<u8>) -> bool {
    let mut bytes = vec![0; piece];
    loop {
        match cx.stream(id).read(&mut bytes) {
            Ok(0) => return true,
            Ok(len) => into.extend_from_slice(&bytes[..len]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Writes until the stream would block. Returns the number of bytes that were written.
fn write_until_full(cx: &mut StreamContext<'_>, id: ConnectionId, bytes: &[u8]) -> usize {
    let mut taken = 0;
    loop {
        match cx.stream(id).write(&bytes[taken..]) {
            Ok(0) => panic!("there were not enough bytes to fill a window"),
            Ok(len) => taken += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return taken,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Returns a handler that writes `out` in pieces of irregular size, shuts down, and checks that it reads `expected`. The handler acts only
/// on edges. Also returns a counter of the bytes that the handler has read.
fn exchanger(out: Vec<u8>, expected: Vec<u8>, seed: usize, shuts: Shutdown) -> (Script, Rc<Cell<usize>>) {
    let read = Rc::new(Cell::new(0));
    let count = Rc::clone(&read);
    let (mut written, mut step) = (0, seed);
    let script = Script::new(move |cx, id, news| {
        // Most pieces have sizes near those of messages and of TCP segments.
        let mut piece = |most: usize| {
            step = step.wrapping_mul(25_214_903_917).wrapping_add(11);
            1 + (step >> 16) % [7, 100, 1500, 8191, 8192, 8193, most][(step >> 40) % 7]
        };
        match news {
            News::Open | News::Writable => {
                while written < out.len() {
                    let end = (written + piece(50_000)).min(out.len());
                    match cx.stream(id).write(&out[written..end]) {
                        Ok(len) => written += len,
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::WouldBlock);
                            return;
                        }
                    }
                }
                cx.stream(id).shutdown(shuts).expect("open");
            }
            News::Readable => loop {
                let mut bytes = vec![0; piece(50_000)];
                match cx.stream(id).read(&mut bytes) {
                    Ok(0) => return,
                    Ok(len) => {
                        let at = count.get();
                        assert!(bytes[..len] == expected[at..at + len], "{len} bytes at {at}");
                        count.set(at + len);
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::WouldBlock);
                        return;
                    }
                }
            },
            _ => {}
        }
    });
    (script, read)
}

/// Megabytes are sent in pieces of irregular size, in both directions at the same time, with small and large windows. Every byte must
/// arrive in order.
pub fn odd_pieces_arrive_in_order_both_ways(setup: &Setup) {
    for (depth, max_message, len) in [(64, 8192, 4 << 20), (5, 100, 50_000), (8, 65_536, 3 << 20)] {
        let (up, down) = (pattern(1, len), pattern(2, len + len / 3));
        let config = setup.config().receive_depth(depth).buffer_size(max_message);
        let (s, s_read) = exchanger(down.clone(), up.clone(), 7, Shutdown::Write);
        let (c, c_read) = exchanger(up.clone(), down.clone(), 8, Shutdown::Write);
        let mut d = Duo::new(setup, config, s, c);
        d.until("both have finished", |d| d.s.handler.is_over() && d.c.handler.is_over());
        for script in [&d.s.handler, &d.c.handler] {
            assert_eq!((script.news.last(), script.count(&News::Hangup)), (Some(&News::Close), 1));
        }
        assert_eq!((s_read.get(), c_read.get()), (up.len(), down.len()));
        d.finish();
    }
}

/// If the program does not read a stream, the writer must stop, and memory must stay bounded. When the program reads again, the writer must
/// get one edge and continue.
pub fn a_slow_reader_stops_the_writer(setup: &Setup) {
    let config = setup.config().receive_depth(8).send_depth(16).buffer_size(1000);
    let mut d = Duo::new(setup, config, Script::quiet(), Script::quiet());
    let bytes = pattern(3, 1 << 20);
    let (mut sent, mut got) = (0, Vec::new());
    for round in 0..10 {
        let (mut cx, id) = d.here();
        sent += write_until_full(&mut cx, id, &bytes[sent..]);
        // Unread bytes occupy the reader's receives. Two receives are reserved, and unread bytes never occupy these two.
        loop {
            let before = sent;
            for _ in 0..20 {
                d.turn();
            }
            let (mut cx, id) = d.here();
            sent += write_until_full(&mut cx, id, &bytes[sent..]);
            if sent == before && d.server.stats().messages.bytes_received == sent as u64 {
                break;
            }
        }
        assert!(sent - got.len() <= 8 * 1000, "round {round}: {} unread", sent - got.len());
        let (mut cx, id) = d.here();
        assert!(!cx.stream(id).readiness().writable);
        let edges = (d.s.handler.count(&News::Readable), d.c.handler.count(&News::Writable));
        let (mut cx, id) = d.there();
        assert!(!read_all(&mut cx, id, 333, &mut got));
        assert_eq!(got.len(), sent);
        d.until("on_writable", |d| d.c.handler.count(&News::Writable) == edges.1 + 1);
        assert_eq!(d.s.handler.count(&News::Readable), edges.0, "nothing new to read");
    }
    assert!(got == bytes[..sent]);
    let (mut cx, id) = d.here();
    cx.stream(id).close();
    d.until("the end", |d| d.s.handler.count(&News::Hangup) == 1);
    let (mut cx, id) = d.there();
    cx.stream(id).close();
    d.finish();
}

/// Each direction of a stream must end separately. When one direction has ended, the other one must continue. If the window is closed, the
/// end of a direction must wait for a credit.
pub fn half_close_each_way(setup: &Setup) {
    for full in [false, true] {
        let config = setup.config().receive_depth(8);
        let mut d = Duo::new(setup, config, Script::quiet(), Script::quiet());
        let bytes = pattern(4, 1 << 20);
        let mut sent = 0;
        let (mut cx, id) = d.here();
        if full {
            sent = write_until_full(&mut cx, id, &bytes);
        }
        cx.stream(id).shutdown(Shutdown::Write).expect("open");
        cx.stream(id).shutdown(Shutdown::Write).expect("open");
        assert_eq!(cx.stream(id).write(b"x").expect_err("shut down").kind(), ErrorKind::BrokenPipe);
        let mut got = Vec::new();
        let deadline = now() + PATIENCE;
        loop {
            d.turn();
            let (mut cx, id) = d.there();
            if read_all(&mut cx, id, 5000, &mut got) {
                break;
            }
            assert!(now() < deadline, "no end after {} of {sent} bytes", got.len());
        }
        assert!(got == bytes[..sent]);
        // A reader that has already read the end of the stream must not get another edge for this end.
        assert_eq!(d.s.handler.count(&News::Hangup), 1);
        let (mut cx, id) = d.there();
        let answered = write_until_full(&mut cx, id, &bytes);
        let mut back = Vec::new();
        while back.len() < answered {
            d.turn();
            let (mut cx, id) = d.here();
            assert!(!read_all(&mut cx, id, 777, &mut back));
        }
        assert!(back == bytes[..answered]);
        assert!(!d.c.handler.is_over() && !d.s.handler.is_over());
        let (mut cx, id) = d.there();
        cx.stream(id).shutdown(Shutdown::Both).expect("open");
        d.until("both are over", |d| d.s.handler.is_over() && d.c.handler.is_over());
        assert_eq!((d.s.handler.news.last(), d.c.handler.news.last()), (Some(&News::Close), Some(&News::Close)));
        d.finish();
    }
}

/// When the peer dies, the last callback must be able to read the bytes that arrived earlier. After these bytes, a read must return an
/// error. After the callback, the stream's id must be invalid.
pub fn a_dead_peer_is_an_error_after_its_bytes(setup: &Setup) {
    let bytes = pattern(5, 100_000);
    let expected = bytes.clone();
    let client = Script::new(move |cx, id, news| {
        if matches!(news, News::Error(_)) {
            assert_eq!(cx.stream(id).write(b"x").expect_err("gone").kind(), ErrorKind::BrokenPipe);
            let mut got = vec![0; expected.len()];
            cx.stream(id).read_exact(&mut got).expect("what came before");
            assert!(got == expected);
            let error = cx.stream(id).read(&mut got).expect_err("the peer had not finished");
            assert_eq!(
                (error.kind(), error.to_string()),
                (ErrorKind::ConnectionReset, "lost: the peer disconnected without a goodbye".into())
            );
            cx.stream(id).close();
            assert_eq!(cx.stream(id).read(&mut got).expect_err("closed").kind(), ErrorKind::NotConnected);
        }
    });
    end_with_the_peer(Duo::new(setup, setup.config(), Script::quiet(), client), &bytes);
}

/// When a stream ends, its unread bytes must be dropped. Otherwise a peer that resets its connections could use up memory.
pub fn a_stream_that_ends_keeps_nothing(setup: &Setup) {
    let bytes = pattern(5, 100_000);
    end_with_the_peer(Duo::new(setup, setup.config(), Script::quiet(), Script::quiet()), &bytes);
    // If a program takes the unread bytes when the stream ends, the bytes must be available until the program has read them.
    let (client, rest) = Script::keeper();
    end_with_the_peer(Duo::new(setup, setup.config(), Script::quiet(), client), &[]);
    assert!(rest.borrow().is_empty());
    let (client, rest) = Script::keeper();
    let d = Duo::new(setup, setup.config(), Script::quiet(), client);
    let mut ended = end_while(d, &bytes, |client| client.pool_levels().1 < client.pool_levels().0);
    let mut got = Vec::new();
    rest.borrow_mut().read_to_end(&mut got).expect("memory");
    assert!(got == bytes);
    until_at_home(&mut ended);
}

/// Writes bytes from the server and then drops the server. The client does not read these bytes. Checks that all buffers of the client are
/// in their pools afterwards, and returns the client.
fn end_with_the_peer(d: Duo, bytes: &[u8]) -> (Reactor, Streams<Script>) {
    let mut ended = end_while(d, bytes, |_| true);
    until_at_home(&mut ended);
    ended
}

fn end_while(mut d: Duo, bytes: &[u8], holds: impl Fn(&Reactor) -> bool) -> (Reactor, Streams<Script>) {
    let (mut cx, id) = d.there();
    assert_eq!(cx.stream(id).write(bytes).expect("room"), bytes.len());
    d.until("the bytes are there", |d| d.client.stats().messages.bytes_received == bytes.len() as u64);
    let Duo { server, s, mut client, mut c } = d;
    drop((server, s));
    let deadline = now() + PATIENCE;
    while !c.handler.is_over() {
        assert!(now() < deadline, "no end: {:?}", c.handler.news);
        client.turn(&mut c, Some(Duration::from_millis(10))).expect("a turn");
    }
    assert_eq!(c.handler.news.last(), Some(&News::Error(DisconnectReason::Lost)));
    assert!(holds(&client), "{:?}", client.pool_levels());
    let id = c.handler_id();
    let error = c.context(client.context()).stream(id).read(&mut [0]).expect_err("the id is stale");
    assert_eq!(error.kind(), ErrorKind::NotConnected);
    (client, c)
}

fn until_at_home((client, c): &mut (Reactor, Streams<Script>)) {
    let deadline = now() + PATIENCE;
    while client.pool_levels().0 != client.pool_levels().1 {
        assert!(now() < deadline, "buffers are missing: {:?}", client.pool_levels());
        client.turn(c, Some(Duration::from_millis(10))).expect("a turn");
    }
}

/// A handler may call `close` in every callback. After the close, only the last callback of the stream may follow.
pub fn a_stream_closes_in_every_callback(setup: &Setup) {
    type Condition = fn(&News, bool) -> bool;
    let conditions: [Condition; 6] = [
        |news, _| *news == News::Open,
        |news, _| *news == News::Readable,
        // A read returns the end of the peer's direction, and the program closes the stream immediately. In this case no hang-up must be
        // reported.
        |news, at_end| *news == News::Readable && at_end,
        |news, _| *news == News::Writable,
        |news, _| *news == News::Hangup,
        |news, _| *news == News::Close,
    ];
    for condition in conditions {
        for server_closes in [false, true] {
            let closed_here = Rc::new(Cell::new(false));
            let side = |closes: bool| {
                let closed = Rc::clone(&closed_here);
                Script::new(move |cx, id, news| {
                    let over = matches!(news, News::Close | News::Error(_));
                    assert!(!(closes && closed.get()) || over, "{news:?} after close");
                    if *news == News::Open {
                        write_until_full(cx, id, &[7; 1 << 20]);
                    }
                    let at_end = *news == News::Readable && read_to_the_end(cx, id);
                    if closes && condition(news, at_end) {
                        closed.set(true);
                        cx.stream(id).close();
                        cx.stream(id).close();
                        for error in [
                            cx.stream(id).read(&mut [0]).expect_err("closed"),
                            cx.stream(id).write(&[0]).expect_err("closed"),
                            cx.stream(id).shutdown(Shutdown::Both).expect_err("closed"),
                        ] {
                            assert_eq!(error.kind(), ErrorKind::NotConnected);
                        }
                    } else if *news == News::Writable {
                        cx.stream(id).shutdown(Shutdown::Write).expect("open");
                    }
                })
            };
            let config = setup.config().receive_depth(8);
            Duo::new(setup, config, side(server_closes), side(!server_closes)).finish();
            assert!(closed_here.get());
        }
    }
}

/// Reads all bytes that are available. Returns true if the peer has ended its direction.
fn read_to_the_end(cx: &mut StreamContext<'_>, id: ConnectionId) -> bool {
    let mut bytes = [0; 10_000];
    loop {
        match cx.stream(id).read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

/// Small writes in one turn must be sent together, in as few messages as their total length permits. Reads of any size must return the
/// written bytes, without a copy.
pub fn small_writes_share_a_message(setup: &Setup) {
    let mut d = Duo::new(setup, setup.config().buffer_size(1000), Script::quiet(), Script::quiet());
    let before = d.client.stats().messages.sent;
    let bytes = pattern(6, 2500);
    let (mut cx, id) = d.here();
    for piece in bytes.chunks(3) {
        assert_eq!(cx.stream(id).write(piece).expect("room"), piece.len());
        assert_eq!(cx.stream(id).write_with(|_| 0).expect("room"), 0);
        assert_eq!(cx.stream(id).write(b"").expect("nothing to do"), 0);
    }
    d.until("all is there", |d| d.server.stats().messages.bytes_received == 2500);
    assert_eq!(d.client.stats().messages.sent - before, 3);
    let (mut cx, id) = d.there();
    for message in bytes.chunks(1000) {
        let mut stream = cx.stream(id);
        assert!(stream.fill_buf().expect("bytes") == message);
        stream.consume(message.len());
    }
    assert_eq!(cx.stream(id).fill_buf().expect_err("empty").kind(), ErrorKind::WouldBlock);
    // The server closes the stream while one received message is unread. This message must be dropped, and the client must get an error.
    let (mut cx, id) = d.here();
    cx.stream(id).write_all(b"unread").expect("room");
    d.until("it is there", |d| d.server.stats().messages.bytes_received == 2506);
    let (mut cx, id) = d.there();
    cx.stream(id).close();
    d.until("the client knows", |d| d.c.handler.is_over());
    assert_eq!(d.c.handler.news.last(), Some(&News::Error(DisconnectReason::Closed)));
    d.finish();
}

/// Bytes that were written before `close` must arrive, even if the peer reads slowly. The end must follow them.
pub fn close_delivers_what_was_written(setup: &Setup) {
    let config = setup.config().receive_depth(8);
    let (server, rest) = Script::keeper();
    let mut d = Duo::new(setup, config, server, Script::quiet());
    d.c = d.c.linger(PATIENCE);
    let bytes = pattern(8, 1 << 20);
    let (mut cx, id) = d.here();
    let sent = write_until_full(&mut cx, id, &bytes);
    cx.stream(id).close();
    let mut got = Vec::new();
    while got.len() < sent {
        d.turn();
        let (mut cx, id) = d.there();
        let mut piece = [0; 2000];
        match cx.stream(id).read(&mut piece) {
            Ok(len) => got.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NotConnected);
                rest.borrow_mut().read_to_end(&mut got).expect("what was not read before the end");
                break;
            }
        }
    }
    assert!(got == bytes[..sent]);
    d.until("the end", |d| d.s.handler.is_over() && d.c.handler.is_over());
    assert_eq!(d.s.handler.count(&News::Hangup), 1);
    assert_eq!((d.s.handler.news.last(), d.c.handler.news.last()), (Some(&News::Close), Some(&News::Close)));
    d.finish();
}

/// A closed stream must end after its linger time, even if the peer does not read the bytes that precede the end of the stream.
pub fn close_does_not_wait_for_ever(setup: &Setup) {
    let config = setup.config().receive_depth(8);
    let (server, rest) = Script::keeper();
    let mut d = Duo::new(setup, config, server, Script::quiet());
    d.c = d.c.linger(Duration::from_millis(100));
    // A client that has received nothing yet sends a ping. If its pong arrived after the close, it
    // could bring a credit for the end of the stream. So both sides exchange a byte first. When the
    // client has received a byte, it sends no more such pings. When the server has received one, it
    // has answered earlier pings, and the answer precedes the second byte.
    let (mut cx, id) = d.there();
    cx.stream(id).write_all(&[0]).expect("room");
    d.until("the server's byte", |d| d.client.stats().messages.bytes_received == 1);
    let (mut cx, id) = d.here();
    cx.stream(id).write_all(&[1]).expect("room");
    d.until("the client's byte", |d| d.server.stats().messages.bytes_received == 1);
    // This byte brings the client the last credit that the server can grant while its program reads
    // nothing. So no later pong can bring a credit for the end of the client's stream.
    let (mut cx, id) = d.there();
    cx.stream(id).write_all(&[0]).expect("room");
    // `start` is read before the turn in which the stream is closed, because the linger timer counts from the start of that turn.
    let start = now();
    d.until("the second byte", |d| d.client.stats().messages.bytes_received == 2);
    let (mut cx, id) = d.here();
    assert_eq!(cx.stream(id).read(&mut [0; 3]).expect("two bytes"), 2);
    let sent = 1 + write_until_full(&mut cx, id, &[1; 1 << 20]);
    cx.stream(id).close();
    d.until("the end", |d| d.s.handler.is_over() && d.c.handler.is_over());
    assert!(now() - start >= Duration::from_millis(100));
    assert_eq!(d.c.handler.news.last(), Some(&News::Close));
    assert_eq!(d.s.handler.news.last(), Some(&News::Error(DisconnectReason::Closed)));
    let mut got = Vec::new();
    rest.borrow_mut().read_to_end(&mut got).expect("memory");
    assert_eq!(got, vec![1; sent], "what came before");
    d.finish();
}

/// Bytes that follow the end of a direction must be treated as a violation of the protocol.
pub fn bytes_after_the_end_are_a_violation(setup: &Setup) {
    let mut server = (setup.reactor)(setup.config()).expect("a reactor");
    let mut s = Streams::new(Script::new(|cx, id, news| {
        if *news == News::Readable {
            read_to_the_end(cx, id);
        }
    }));
    let listener = server.context().listen(setup.address).expect("listening");
    let address = server.context().listeners().local_address(listener).expect("an address");
    let mut client = (setup.reactor)(setup.config()).expect("a reactor");
    let mut c = Probe::new(|cx, event| {
        if let Event::Connect(conn, _) = event {
            for message in [&b"bytes"[..], b"", b"more"] {
                cx.send(*conn, message).expect("room");
            }
        }
    });
    client.context().connect(address).expect("connecting");
    let deadline = now() + PATIENCE;
    while !s.handler.is_over() {
        assert!(now() < deadline, "no end: {:?}", s.handler.news);
        client.turn(&mut c, Some(Duration::from_millis(1))).expect("a turn");
        server.turn(&mut s, Some(Duration::from_millis(1))).expect("a turn");
    }
    let violation = DisconnectReason::PeerViolation(PeerViolation::MalformedMessage);
    assert_eq!(s.handler.news, [News::Open, News::Readable, News::Readable, News::Hangup, News::Error(violation)]);
}
