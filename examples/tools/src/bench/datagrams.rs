//! The exchange of datagrams, over this library and over bare UDP: back and forth, or one way. Both sides poll without sleeping.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use hdrhistogram::Histogram;
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrIn, recvmmsg, sendmmsg};
use rdma_reactor::{
    Config, ConnectError, Context, Datagram, DatagramHandler, EndpointId, EndpointOptions, Handler, Origin, PeerId,
    ProviderChoice, Reactor, TimerId, Wait,
};

use crate::pingpong::failure::Failure;
use crate::pingpong::server::LISTENING;

/// The transport of the datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DatagramTransport {
    /// Sockets
    Udp,
    /// This library
    Reactor,
}

/// The kind of exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DatagramExchange {
    /// Datagrams back and forth, one at a time
    Echo,
    /// Datagrams one way, as fast as they can be sent; the result counts those that arrive
    Flood,
}

/// The largest number of datagrams that one system call of bare UDP sends or receives.
const BATCH: usize = 32;
/// The size of the send queue of an endpoint of this library, in datagrams.
const SENDS: u32 = 64;
/// The size of the receive queue of an endpoint of this library, in datagrams.
const RECEIVES: u32 = 1024;
/// The length in bytes of the datagram by which the client requests the result of a flood.
const END: usize = 1;
/// The time after which the client requests the result again, if no answer has arrived.
const AGAIN: Duration = Duration::from_millis(20);

/// The result of a flood: the number of received bytes, and the time from the first datagram to the last.
#[derive(Debug, Default)]
struct FloodResult {
    bytes: u64,
    first: Option<Instant>,
    nanos: u64,
}

impl FloodResult {
    fn add(&mut self, len: usize) {
        self.bytes += len as u64;
    }

    /// Records the current time as that of the last datagram. One call suffices for several datagrams that arrive together.
    fn mark(&mut self) {
        let now = Instant::now();
        self.nanos = (now - *self.first.get_or_insert(now)).as_nanos() as u64;
    }

    fn to_bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[8..].copy_from_slice(&self.nanos.to_le_bytes());
        bytes
    }
}

/// Returns the throughput of a flood in Gbit/s, computed from the number of bytes and the time in the server's answer. Returns `None` if
/// the answer is malformed.
fn figure(answer: &[u8]) -> Option<f64> {
    let bytes = u64::from_le_bytes(*answer.first_chunk()?);
    let nanos = u64::from_le_bytes(*answer.get(8..)?.first_chunk()?);
    Some(bytes as f64 * 8.0 / nanos.max(1) as f64)
}

/// Runs the server, which prints its address and serves until it is killed.
///
/// # Errors
/// A system call failed.
pub fn serve(carrier: DatagramTransport, kind: DatagramExchange) -> Result<(), Failure> {
    match (carrier, kind) {
        (DatagramTransport::Udp, DatagramExchange::Echo) => echo_on_socket().map_err(Failure::new),
        (DatagramTransport::Udp, DatagramExchange::Flood) => drain_socket().map_err(Failure::new),
        (DatagramTransport::Reactor, _) => {
            let mut reactor = reactor()?;
            let mut datagrams = reactor.context();
            let mut datagrams = datagrams.datagrams();
            let endpoint = datagrams.open(([127, 0, 0, 1], 0).into(), options()).map_err(Failure::new)?;
            let address = datagrams.address(endpoint).ok_or_else(|| Failure::new("the endpoint has no address"))?;
            println!("{LISTENING}{address}");
            reactor.run(&mut DatagramServer { kind, came: FloodResult::default(), last: None }).map_err(Failure::new)
        }
    }
}

/// Runs the client. Returns the median half round trip in microseconds for echoes, or Gbit/s for a flood.
///
/// # Errors
/// A system call failed.
pub fn measure(
    carrier: DatagramTransport,
    kind: DatagramExchange,
    server: SocketAddr,
    size: usize,
    count: u64,
) -> Result<f64, Failure> {
    match (carrier, kind) {
        (DatagramTransport::Udp, DatagramExchange::Echo) => ask_on_socket(server, size, count).map_err(Failure::new),
        (DatagramTransport::Udp, DatagramExchange::Flood) => flood_socket(server, size, count).map_err(Failure::new),
        (DatagramTransport::Reactor, _) => {
            let mut reactor = reactor()?;
            let mut context = reactor.context();
            let mut datagrams = context.datagrams();
            let endpoint = datagrams.open(([127, 0, 0, 1], 0).into(), options()).map_err(Failure::new)?;
            datagrams.find_peer(endpoint, server).map_err(Failure::new)?;
            let half_rtt = Histogram::new(3).map_err(Failure::new)?;
            let (bytes, sent_at, warmup) = (vec![7; size], Instant::now(), count / 10);
            let mut client =
                DatagramClient { kind, to: None, bytes, count, done: 0, warmup, sent_at, half_rtt, result: None };
            reactor.run(&mut client).map_err(Failure::new)?;
            client.result.unwrap_or_else(|| Err(Failure::new("the client was stopped")))
        }
    }
}

// The exchange over bare UDP.

fn spin<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

fn socket() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn echo_on_socket() -> io::Result<()> {
    let (socket, mut buffer) = (socket()?, [0; 8192]);
    println!("{LISTENING}{}", socket.local_addr()?);
    loop {
        let (len, peer) = spin(|| socket.recv_from(&mut buffer))?;
        spin(|| socket.send_to(&buffer[..len], peer))?;
    }
}

fn ask_on_socket(server: SocketAddr, size: usize, count: u64) -> io::Result<f64> {
    let (socket, mut buffer) = (socket()?, vec![7; size]);
    let mut half_rtt = Histogram::<u64>::new(3).map_err(io::Error::other)?;
    for nth in 0..count / 10 + count {
        let sent_at = Instant::now();
        spin(|| socket.send_to(&buffer, server))?;
        spin(|| socket.recv_from(&mut buffer))?;
        let rtt = sent_at.elapsed();
        if nth >= count / 10 {
            half_rtt.record(rtt.as_nanos() as u64 / 2).map_err(io::Error::other)?;
        }
    }
    Ok(half_rtt.value_at_quantile(0.5) as f64 / 1e3)
}

fn drain_socket() -> io::Result<()> {
    let (socket, mut buffers) = (socket()?, vec![[0; 8192]; BATCH]);
    println!("{LISTENING}{}", socket.local_addr()?);
    let mut came = FloodResult::default();
    loop {
        let mut headers = MultiHeaders::<SockaddrIn>::preallocate(BATCH, None);
        let mut slices: Vec<_> = buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
        let mut asked = None;
        let fd = socket.as_raw_fd();
        match recvmmsg(fd, &mut headers, slices.iter_mut(), MsgFlags::MSG_DONTWAIT, None) {
            Ok(messages) => {
                for message in messages {
                    match (message.bytes, message.address) {
                        (END, address) => asked = address,
                        (len, _) => came.add(len),
                    }
                }
            }
            Err(nix::Error::EAGAIN) => continue,
            Err(error) => return Err(error.into()),
        }
        match asked {
            Some(peer) => drop(spin(|| socket.send_to(&came.to_bytes(), SocketAddr::V4(peer.into())))?),
            None => came.mark(),
        }
    }
}

fn flood_socket(server: SocketAddr, size: usize, count: u64) -> io::Result<f64> {
    let (socket, buffer) = (socket()?, vec![7; size]);
    let SocketAddr::V4(peer) = server else { return Err(io::ErrorKind::Unsupported.into()) };
    let addresses = [Some(SockaddrIn::from(peer)); BATCH];
    let slices: Vec<_> = (0..BATCH).map(|_| [IoSlice::new(&buffer)]).collect();
    let mut sent = 0;
    while sent < count {
        let mut headers = MultiHeaders::preallocate(BATCH, None);
        let fd = socket.as_raw_fd();
        match sendmmsg(fd, &mut headers, slices.iter(), addresses, [], MsgFlags::MSG_DONTWAIT) {
            Ok(messages) => sent += messages.count() as u64,
            Err(nix::Error::EAGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let mut answer = [0; 16];
    loop {
        let until = Instant::now() + AGAIN;
        spin(|| socket.send_to(&[0; END], server))?;
        while Instant::now() < until {
            if socket.recv(&mut answer).is_ok() {
                return figure(&answer).ok_or(io::ErrorKind::InvalidData.into());
            }
        }
    }
}

// The exchange over this library.

fn reactor() -> Result<Reactor, Failure> {
    let config = Config::default().provider(ProviderChoice::Iwarp).wait(Wait::Spin(Duration::from_secs(3600)));
    Reactor::new(config).map_err(Failure::new)
}

fn options() -> EndpointOptions {
    EndpointOptions::new().receive_depth(RECEIVES).send_depth(SENDS)
}

struct DatagramServer {
    kind: DatagramExchange,
    came: FloodResult,
    /// The origin of the last answered datagram, and the peer id of that origin. If the next datagram has the same origin, the server uses
    /// this peer id instead of requesting it again.
    last: Option<(Origin, PeerId)>,
}

impl DatagramServer {
    fn answer(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, to: Origin, payload: &[u8]) {
        let known = self.last.filter(|(origin, _)| *origin == to).map(|(_, peer)| peer);
        let Some(peer) = known.or_else(|| cx.datagrams().peer_of(endpoint, &to).ok()) else { return };
        self.last = Some((to, peer));
        // The result of the send is ignored. The send queue has room, because only one answer is in flight. If the answer is lost, the
        // client repeats its request.
        let _ = cx.datagrams().send(endpoint, peer, payload);
    }
}

impl Handler for DatagramServer {
    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        Some(self)
    }
}

impl DatagramHandler for DatagramServer {
    fn on_datagram(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, datagram: Datagram<'_>) {
        let origin = datagram.origin();
        match (self.kind, datagram.len()) {
            (DatagramExchange::Echo, _) => self.answer(cx, endpoint, origin, &datagram),
            (DatagramExchange::Flood, END) => self.answer(cx, endpoint, origin, &self.came.to_bytes()),
            (DatagramExchange::Flood, len) => {
                self.came.add(len);
                self.came.mark();
            }
        }
    }
}

// local: lengths of the benchmark
struct DatagramClient {
    kind: DatagramExchange,
    to: Option<(EndpointId, PeerId)>,
    bytes: Vec<u8>,
    count: u64,
    /// The number of datagrams that were sent in a flood, or of echoes that have returned.
    done: u64,
    warmup: u64,
    sent_at: Instant,
    half_rtt: Histogram<u64>,
    result: Option<Result<f64, Failure>>,
}

impl DatagramClient {
    fn end(&mut self, cx: &mut Context<'_>, result: Result<f64, Failure>) {
        self.result.get_or_insert(result);
        cx.stop();
    }

    fn ask(&mut self, cx: &mut Context<'_>) {
        let Some((endpoint, peer)) = self.to else { return };
        self.sent_at = Instant::now();
        if let Err(error) = cx.datagrams().send(endpoint, peer, &self.bytes) {
            self.end(cx, Err(Failure::new(error)));
        }
    }

    fn flood(&mut self, cx: &mut Context<'_>) {
        let Some((endpoint, peer)) = self.to else { return };
        while self.done < self.count {
            if cx.datagrams().send(endpoint, peer, &self.bytes).is_err() {
                return; // The reactor calls `on_datagram_writable` when the send queue has space.
            }
            self.done += 1;
        }
        let _ = cx.datagrams().send(endpoint, peer, &[0; END]);
        cx.timers().set(AGAIN, 0);
    }
}

impl Handler for DatagramClient {
    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        Some(self)
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        self.flood(cx);
    }
}

impl DatagramHandler for DatagramClient {
    fn on_peer(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        _: SocketAddr,
        found: Result<PeerId, ConnectError>,
    ) {
        match found {
            Ok(peer) => self.to = Some((endpoint, peer)),
            Err(error) => return self.end(cx, Err(Failure::new(error))),
        }
        match self.kind {
            DatagramExchange::Echo => self.ask(cx),
            DatagramExchange::Flood => self.flood(cx),
        }
    }

    fn on_datagram(&mut self, cx: &mut Context<'_>, _: EndpointId, datagram: Datagram<'_>) {
        if self.kind == DatagramExchange::Flood {
            let result = figure(&datagram).ok_or_else(|| Failure::new("an answer without a figure"));
            return self.end(cx, result);
        }
        let rtt = self.sent_at.elapsed();
        self.done += 1;
        if self.done > self.warmup {
            if let Err(error) = self.half_rtt.record(rtt.as_nanos() as u64 / 2) {
                return self.end(cx, Err(Failure::new(error)));
            }
        }
        if self.done == self.warmup + self.count {
            let median = self.half_rtt.value_at_quantile(0.5) as f64 / 1e3;
            return self.end(cx, Ok(median));
        }
        self.ask(cx);
    }

    fn on_datagram_writable(&mut self, cx: &mut Context<'_>, _: EndpointId) {
        if self.kind == DatagramExchange::Flood {
            self.flood(cx);
        }
    }
}
