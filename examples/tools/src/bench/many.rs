//! Echoes on many connections at the same time, over this library and over bare TCP. Each connection has one message of 64 B in flight.
//! Both sides sleep until a message arrives.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor, Wait,
};

use crate::pingpong::failure::Failure;
use crate::pingpong::server::LISTENING;

use super::machine;
use super::pair;

/// The length of a message, in bytes.
const SIZE: usize = 64;
/// The largest number of connections that the server or the client supports.
const MOST: u32 = 20_000;
/// The time limit for establishing all connections.
const PATIENCE: Duration = Duration::from_secs(60);
/// The largest number of socket events that one poll returns.
const BATCH: usize = 1024;

/// The transport of the echoes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EchoTransport {
    /// This library
    Reactor,
    /// Bare TCP
    Tcp,
}

/// Runs the server, which prints its address and answers until it is killed.
///
/// # Errors
/// A system call failed.
pub fn serve(carrier: EchoTransport) -> Result<(), Failure> {
    permit_many()?;
    match carrier {
        EchoTransport::Reactor => pair::serve(reactor()?, &mut EchoServer),
        EchoTransport::Tcp => answer_on_sockets().map_err(Failure::new),
    }
}

/// Runs the client. Returns the number of echoes per second on all `connections` connections together. Measures `count` echoes. Before
/// them, the client runs an unmeasured warm-up of `count / 10` echoes, but at least one for each connection.
///
/// # Errors
/// A system call failed, or the server went away.
pub fn measure(carrier: EchoTransport, server: SocketAddr, connections: u32, count: u64) -> Result<f64, Failure> {
    permit_many()?;
    let pace = EchoRate::new(connections, count);
    match carrier {
        EchoTransport::Reactor => ask_on_reactor(server, connections, pace),
        EchoTransport::Tcp => ask_on_sockets(server, connections, pace).map_err(Failure::new),
    }
}

/// Raises the process's soft limit of descriptors to its hard limit.
fn permit_many() -> Result<(), Failure> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(Failure::new)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).map_err(Failure::new)
}

/// Counts echoes. The measured time begins after the last echo of the warm-up.
struct EchoRate {
    echoes: u64,
    warmup: u64,
    last: u64,
    started: Instant,
}

impl EchoRate {
    fn new(connections: u32, count: u64) -> Self {
        let warmup = (count / 10).max(connections.into());
        Self { echoes: 0, warmup, last: warmup + count, started: Instant::now() }
    }

    /// Counts an echo. If this was the last one, returns the number of echoes per second. Otherwise returns `None`.
    fn echo(&mut self) -> Option<f64> {
        self.echoes += 1;
        if self.echoes == self.warmup {
            self.started = Instant::now();
        }
        (self.echoes == self.last).then(|| (self.last - self.warmup) as f64 / self.started.elapsed().as_secs_f64())
    }
}

// The echoes over this library.

/// Makes a reactor whose receive windows have space for one message. With the default windows, ten thousand connections would need 10 GiB.
fn reactor() -> Result<Reactor, Failure> {
    let config = Config::default().provider(ProviderChoice::Iwarp).wait(Wait::Event);
    let config = config
        .max_connections(MOST)
        .max_pending(MOST)
        .timeouts(|t| t.connect = PATIENCE)
        .timeouts(|t| t.handshake = PATIENCE);
    Reactor::new(config.receive_depth(8).send_depth(8).buffer_size(1024)).map_err(Failure::new)
}

struct EchoServer;

impl Handler for EchoServer {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        // Credit is available, because each connection has only one message in flight. So an error is a failure of the connection.
        if cx.send(conn, &message).is_err() {
            cx.close(conn);
        }
    }
}

// local: connections of the benchmark
struct EchoClient {
    /// The connections that are established so far. The list is emptied when all of them are established.
    up: Vec<ConnectionId>,
    wanted: usize,
    pace: EchoRate,
    /// The echoes per second, or the failure. `None` during the run.
    result: Option<Result<f64, Failure>>,
}

impl EchoClient {
    fn end(&mut self, cx: &mut Context<'_>, result: Result<f64, Failure>) {
        self.result.get_or_insert(result);
        cx.stop();
    }

    fn ask(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Err(error) = cx.send(conn, &[7; SIZE]) {
            self.end(cx, Err(Failure::new(error)));
        }
    }
}

impl Handler for EchoClient {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.up.push(conn);
        if self.up.len() == self.wanted {
            for conn in std::mem::take(&mut self.up) {
                self.ask(cx, conn);
            }
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: Message<'_>) {
        match self.pace.echo() {
            Some(rate) => self.end(cx, Ok(rate)),
            None => self.ask(cx, conn),
        }
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.end(cx, Err(Failure::new(error)));
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.end(cx, Err(Failure::new(reason)));
    }
}

fn ask_on_reactor(server: SocketAddr, connections: u32, pace: EchoRate) -> Result<f64, Failure> {
    let mut reactor = reactor()?;
    let wanted = connections as usize;
    let mut client = EchoClient { up: Vec::with_capacity(wanted), wanted, pace, result: None };
    for _ in 0..connections {
        reactor.context().connect(server).map_err(Failure::new)?;
    }
    reactor.run(&mut client).map_err(Failure::new)?;
    client.result.unwrap_or_else(|| Err(Failure::new("the client was stopped")))
}

// The echoes over bare TCP.

/// A socket, and the bytes of the current message that have arrived so far.
struct Socket {
    stream: TcpStream,
    message: [u8; SIZE],
    have: usize,
}

impl Socket {
    fn new(poll: &Poll, mut stream: TcpStream, place: usize) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        machine::equal_congestion(&stream);
        poll.registry().register(&mut stream, Token(place), Interest::READABLE)?;
        Ok(Self { stream, message: [7; SIZE], have: 0 })
    }

    /// Sends a message. The send buffer has room, because only one message is in flight.
    fn send(&mut self) -> io::Result<()> {
        (&self.stream).write_all(&self.message)
    }

    /// Reads after an edge of epoll. Returns `Some(true)` if a message is complete, `Some(false)` if a part is missing, and `None` at
    /// the end of the stream. One read is enough: the peer sends nothing more before it gets an answer, and later bytes raise another
    /// edge.
    fn receive(&mut self) -> io::Result<Option<bool>> {
        match self.stream.read(&mut self.message[self.have..]) {
            Ok(0) => return Ok(None),
            Ok(n) => self.have += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(error),
        }
        let is_whole = self.have == SIZE;
        self.have %= SIZE;
        Ok(Some(is_whole))
    }
}

fn answer_on_sockets() -> io::Result<()> {
    let (mut poll, mut events) = (Poll::new()?, Events::with_capacity(BATCH));
    let mut listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0).into())?;
    println!("{LISTENING}{}", listener.local_addr()?);
    poll.registry().register(&mut listener, Token(usize::MAX - 1), Interest::READABLE)?;
    let mut sockets = Vec::new();
    loop {
        poll.poll(&mut events, None)?;
        for event in &events {
            let Token(place) = event.token();
            let Some(socket) = sockets.get_mut(place) else {
                accept(&poll, &listener, &mut sockets)?;
                continue;
            };
            match socket.receive()? {
                Some(true) => socket.send()?,
                Some(false) => {}
                None => poll.registry().deregister(&mut socket.stream)?,
            }
        }
    }
}

fn accept(poll: &Poll, listener: &TcpListener, sockets: &mut Vec<Socket>) -> io::Result<()> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => sockets.push(Socket::new(poll, stream, sockets.len())?),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

fn ask_on_sockets(server: SocketAddr, connections: u32, mut pace: EchoRate) -> io::Result<f64> {
    let (mut poll, mut events) = (Poll::new()?, Events::with_capacity(BATCH));
    let mut sockets = Vec::with_capacity(connections as usize);
    for place in 0..connections as usize {
        let stream = std::net::TcpStream::connect(server)?;
        stream.set_nonblocking(true)?;
        sockets.push(Socket::new(&poll, TcpStream::from_std(stream), place)?);
    }
    sockets.iter_mut().try_for_each(Socket::send)?;
    loop {
        poll.poll(&mut events, None)?;
        for event in &events {
            let socket = &mut sockets[event.token().0];
            match socket.receive()? {
                Some(true) => match pace.echo() {
                    Some(rate) => return Ok(rate),
                    None => socket.send()?,
                },
                Some(false) => {}
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_echo_ends_the_measurement() {
        let mut pace = EchoRate::new(3, 10);
        assert!((0..12).all(|_| pace.echo().is_none()));
        assert!(pace.echo().is_some_and(|rate| rate > 0.0));
    }
}
