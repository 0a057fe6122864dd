//! Bare TCP sockets as a competitor. They do the same work as this library, as efficiently as possible.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use clap::ValueEnum;
use hdrhistogram::Histogram;
use mio::{Events, Interest, Poll, Token};

use crate::pingpong::server::LISTENING;

use super::machine;

/// The kind of exchange over bare TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TcpExchange {
    /// Messages back and forth. Both sides retry their reads in a loop.
    Spin,
    /// Messages back and forth. Both sides sleep in epoll.
    Epoll,
    /// Writes one way. Both sides retry their writes or reads in a loop.
    Stream,
}

/// Runs the server, which prints its address and serves one client. `size` is the length in bytes of a message, a write or a read.
///
/// # Errors
/// A system call failed.
pub fn serve(kind: TcpExchange, size: usize) -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{LISTENING}{}", listener.local_addr()?);
    let (stream, _) = listener.accept()?;
    machine::equal_congestion(&stream);
    if kind == TcpExchange::Stream {
        return drain(stream, size);
    }
    let mut peer = TcpPeer::new(stream, kind, size)?;
    while peer.receive()? {
        peer.send()?;
    }
    Ok(())
}

/// Runs the client. Returns Gbit/s for a stream, and otherwise the median half round trip in microseconds.
///
/// # Errors
/// A system call failed, or the server went away.
pub fn measure(kind: TcpExchange, server: SocketAddr, size: usize, iterations: u64) -> io::Result<f64> {
    let stream = TcpStream::connect(server)?;
    machine::equal_congestion(&stream);
    if kind == TcpExchange::Stream {
        return fill(stream, size, iterations);
    }
    let mut peer = TcpPeer::new(stream, kind, size)?;
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

/// The way in which one side of a ping-pong waits for bytes.
enum TcpWait {
    /// The side does not sleep: it retries the read.
    Spin,
    Epoll(Poll, Events),
}

/// One side of a ping-pong.
// local: lengths of the benchmark
struct TcpPeer {
    stream: mio::net::TcpStream,
    wait: TcpWait,
    buffer: Vec<u8>,
}

impl TcpPeer {
    fn new(stream: TcpStream, kind: TcpExchange, size: usize) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut stream = mio::net::TcpStream::from_std(stream);
        let wait = match kind {
            TcpExchange::Epoll => {
                let poll = Poll::new()?;
                poll.registry().register(&mut stream, Token(0), Interest::READABLE)?;
                TcpWait::Epoll(poll, Events::with_capacity(4))
            }
            TcpExchange::Spin | TcpExchange::Stream => TcpWait::Spin,
        };
        Ok(Self { stream, wait, buffer: vec![0; size] })
    }

    fn send(&mut self) -> io::Result<()> {
        write_all(&mut self.stream, &self.buffer)
    }

    /// Receives one message. Returns false at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        let mut have = 0;
        while have < self.buffer.len() {
            // With `TcpWait::Epoll`, this side sleeps before each read. The next bytes have usually not arrived yet, so an immediate read
            // would be a wasted system call.
            if let TcpWait::Epoll(poll, events) = &mut self.wait {
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

/// Repeats a call while it fails with `WouldBlock`. For a stream, repeating the call is faster than sleeping, if each side has its own
/// processor.
fn insist<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

/// Writes all bytes. A message that fits in the send buffer needs one call.
fn write_all(stream: &mut impl Write, mut rest: &[u8]) -> io::Result<()> {
    while !rest.is_empty() {
        let written = insist(|| stream.write(rest))?;
        rest = &rest[written..];
    }
    Ok(())
}

/// Reads a stream to its end, then sends the peer a confirmation.
fn drain(mut stream: TcpStream, chunk: usize) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    let mut buffer = vec![0; chunk];
    while insist(|| stream.read(&mut buffer))? > 0 {}
    insist(|| stream.write(&[1])).map(|_| ())
}

/// Writes a stream. Returns Gbit/s. The measured time ends when the peer confirms that it has received everything.
fn fill(mut stream: TcpStream, chunk: usize, chunks: u64) -> io::Result<f64> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let buffer = vec![0; chunk];
    let started = Instant::now();
    for _ in 0..chunks {
        write_all(&mut stream, &buffer)?;
    }
    stream.shutdown(Shutdown::Write)?;
    if insist(|| stream.read(&mut [0]))? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((chunks * chunk as u64) as f64 * 8.0 / 1e9 / started.elapsed().as_secs_f64())
}
