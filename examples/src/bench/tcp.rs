//! The competitor does the same work on bare TCP sockets, as well as it can be done.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use clap::ValueEnum;
use hdrhistogram::Histogram;
use mio::{Events, Interest, Poll, Token};

use crate::pingpong::server::LISTENING;

/// Length of the messages that go to and fro, bytes.
const MESSAGE: usize = 64;
const WORD: usize = 8;
/// Length of one write and of one read of a stream, bytes.
pub const CHUNK: usize = 64 << 10;

/// The work to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// 64 bytes to and fro, receiving in a loop
    Spin,
    /// 8 bytes to and fro, receiving in a loop
    SpinWord,
    /// 64 bytes to and fro, sleeping in epoll
    Epoll,
    /// 64 KiB writes, one way, trying again in a loop
    Stream,
}

/// Runs the server, which prints its address and serves one client.
///
/// # Errors
/// The system refused.
pub fn serve(kind: Kind) -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{LISTENING}{}", listener.local_addr()?);
    let (stream, _) = listener.accept()?;
    if kind == Kind::Stream {
        return drain(stream);
    }
    let mut peer = Peer::new(stream, kind)?;
    while peer.receive()? {
        peer.send()?;
    }
    Ok(())
}

/// Runs the client. Returns the median half round trip in microseconds, or for a stream Gbit/s.
///
/// # Errors
/// The system refused, or the server went away.
pub fn measure(kind: Kind, server: SocketAddr, iterations: u64) -> io::Result<f64> {
    let stream = TcpStream::connect(server)?;
    if kind == Kind::Stream {
        return fill(stream, iterations);
    }
    let mut peer = Peer::new(stream, kind)?;
    let mut half_rtt = Histogram::<u64>::new(3).map_err(io::Error::other)?;
    let warmup = iterations / 10;
    for iteration in 0..warmup + iterations {
        let sent_at = Instant::now();
        peer.send()?;
        if !peer.receive()? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let rtt = sent_at.elapsed();
        if iteration >= warmup {
            half_rtt.record(rtt.as_nanos() as u64 / 2).map_err(io::Error::other)?;
        }
    }
    Ok(half_rtt.value_at_quantile(0.5) as f64 / 1e3)
}

/// The way in which a peer waits for bytes.
enum Wait {
    /// The peer does not sleep, but asks again.
    Spin,
    Epoll(Poll, Events),
}

/// One side of a ping-pong.
struct Peer {
    stream: mio::net::TcpStream,
    wait: Wait,
    buffer: Vec<u8>,
}

impl Peer {
    fn new(stream: TcpStream, kind: Kind) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut stream = mio::net::TcpStream::from_std(stream);
        let wait = match kind {
            Kind::Epoll => {
                let poll = Poll::new()?;
                poll.registry().register(&mut stream, Token(0), Interest::READABLE)?;
                Wait::Epoll(poll, Events::with_capacity(4))
            }
            Kind::Spin | Kind::SpinWord | Kind::Stream => Wait::Spin,
        };
        let len = if kind == Kind::SpinWord { WORD } else { MESSAGE };
        Ok(Self { stream, wait, buffer: vec![0; len] })
    }

    fn send(&mut self) -> io::Result<()> {
        match self.stream.write(&self.buffer)? {
            all if all == self.buffer.len() => Ok(()),
            // A short write cannot happen, because one message fits an empty send buffer.
            short => Err(io::Error::other(format!("a short write of {short} bytes"))),
        }
    }

    /// Takes one message; `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        let mut have = 0;
        while have < self.buffer.len() {
            // The peer sleeps before it reads, because the answer is not there yet and asking would be one call for
            // nothing.
            if let Wait::Epoll(poll, events) = &mut self.wait {
                poll.poll(events, None)?;
            }
            match self.stream.read(&mut self.buffer[have..]) {
                Ok(0) => return Ok(false),
                Ok(n) => have += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// Repeats a call while it fails with `WouldBlock`. For a stream, too, spinning is the faster way as long as each side
/// has a processor.
fn insist<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

/// Reads a stream to its end, then tells the peer.
fn drain(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    let mut buffer = vec![0; CHUNK];
    while insist(|| stream.read(&mut buffer))? > 0 {}
    insist(|| stream.write(&[1])).map(|_| ())
}

/// Writes a stream. The clock stops when the other side says that it has everything.
fn fill(mut stream: TcpStream, chunks: u64) -> io::Result<f64> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let buffer = vec![0; CHUNK];
    let started = Instant::now();
    for _ in 0..chunks {
        let mut rest = &buffer[..];
        while !rest.is_empty() {
            let written = insist(|| stream.write(rest))?;
            rest = &rest[written..];
        }
    }
    stream.shutdown(Shutdown::Write)?;
    if insist(|| stream.read(&mut [0]))? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((chunks * CHUNK as u64) as f64 * 8.0 / 1e9 / started.elapsed().as_secs_f64())
}
