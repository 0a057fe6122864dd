//! Sends standard input to the peer, and writes the peer's bytes to standard output, as netcat does: `stream-pipe server`, `stream-pipe
//! client ADDR`. The end of standard input ends only that direction of the stream.
//!
//! The program has its own event loop, which contains a reactor. The loop calls `poll`(2) for the reactor's descriptor, standard input and
//! standard output, as a program with sockets does. The loop also asks the stream whether the stream is readable or writable.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::fs::File;
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rdma_reactor::stream::{Stream, StreamContext, StreamHandler, Streams, Unread};
use rdma_reactor::{
    Config, ConnectError, ConnectRequest, ConnectionId, Decision, DisconnectReason, ListenerId, Reactor,
};
use rdma_reactor_tools::pingpong::address::resolve;
use rdma_reactor_tools::pingpong::cli::Provider;
use rdma_reactor_tools::pingpong::failure::{Ending, Failure};
use rdma_reactor_tools::pingpong::interrupt::Interrupt;
use rdma_reactor_tools::program;
use rdma_reactor_tools::secure::SecurityArgs;

/// The number of bytes that a pipe accepts without blocking if `poll`(2) reports it writable (`PIPE_BUF`).
const ATOMIC: usize = 4096;

/// Connects standard input and output of two processes.
#[derive(Debug, Parser)]
#[command(name = "stream-pipe", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// RDMA devices (verbs), the embedded provider (iwarp), or whichever exists
    #[arg(long, value_enum, default_value_t = Provider::Auto, global = true)]
    provider: Provider,
    /// The port
    #[arg(short, long, default_value_t = 7472, global = true)]
    port: u16,
    #[command(flatten)]
    security: SecurityArgs,
}

// local: arguments of the program
#[derive(Debug, Subcommand)]
enum Command {
    /// Wait for one peer
    Server {
        /// Address to listen on, with or without a port; the actual one is printed to standard error
        #[arg(long, value_name = "ADDR", default_value = "0.0.0.0")]
        bind: String,
    },
    /// Connect
    Client {
        /// The server's host name or address, with or without a port
        #[arg(value_name = "ADDR")]
        address: String,
    },
}

/// The handler, with the only stream that the program accepts.
#[derive(Debug, Default)]
struct Peer {
    listener: Option<ListenerId>,
    stream: Option<ConnectionId>,
    end: Option<Result<(), Failure>>,
    /// The received bytes that the program had not read when the stream ended.
    rest: Unread,
}

impl StreamHandler for Peer {
    fn on_connect_request(&mut self, _: &mut StreamContext<'_>, _: ConnectRequest<'_>) -> Decision {
        if self.stream.is_some() { Decision::Reject(Vec::new()) } else { Decision::Accept }
    }

    fn on_open(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        if self.stream.is_some() {
            // The program accepts one stream. A second one is closed.
            return cx.stream(id).close();
        }
        self.stream = Some(id);
        if let Some(listener) = self.listener.take() {
            cx.context().listeners().close(listener);
        }
    }

    // The loop polls the stream for its readiness, so this callback does nothing.
    fn on_readable(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {}

    fn on_close(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        if self.stream == Some(id) {
            self.rest = cx.stream(id).take_unread();
            self.end = Some(Ok(()));
        }
    }

    fn on_error(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, reason: DisconnectReason) {
        if self.stream == Some(id) {
            self.rest = cx.stream(id).take_unread();
            self.end = Some(Err(Failure::new(format!("the connection has ended: {reason}"))));
        }
    }

    fn on_connect_error(&mut self, _: &mut StreamContext<'_>, _: ConnectionId, error: ConnectError) {
        self.end = Some(Err(Failure::no_connection(&error, "`stream-pipe server`")));
    }
}

/// Duplicates the descriptor of a standard stream. The result is a file without the standard library's buffer, so `poll`(2) reports all
/// of its data.
fn unbuffered(fd: &impl AsFd) -> Result<File, Failure> {
    let owned = fd.as_fd().try_clone_to_owned();
    owned.map(File::from).map_err(|error| Failure::new(format!("a standard stream is not open: {error}")))
}

/// Reads standard input directly into the stream's send buffers. Returns false at the end of standard input.
fn feed(input: &mut File, stream: &mut Stream<'_>) -> Result<bool, Failure> {
    let mut result = Ok(0);
    let written = stream.write_with(|room| {
        result = input.read(room);
        *result.as_ref().unwrap_or(&0)
    });
    match (written, result) {
        (_, Err(error)) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => Ok(true),
        (_, Err(error)) => Err(Failure::new(format!("standard input: {error}"))),
        (Ok(0), Ok(_)) => Ok(false),
        // The stream accepted no bytes, because the peer's window is closed or the connection is ending. If the connection is ending, the
        // handler is notified of the reason.
        (Ok(_) | Err(_), Ok(_)) => Ok(true),
    }
}

/// Writes received bytes to standard output, directly from the buffers that they arrived in. Returns false at the end of the stream.
fn drain(output: &mut File, stream: &mut impl BufRead) -> Result<bool, Failure> {
    let bytes = match stream.fill_buf() {
        Ok([]) => return Ok(false),
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
        // The stream has failed. `on_error` has already reported the reason.
        Err(_) => return Ok(false),
    };
    match output.write(&bytes[..bytes.len().min(ATOMIC)]) {
        Ok(written) => stream.consume(written),
        Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
        Err(error) => return Err(Failure::new(format!("standard output: {error}"))),
    }
    Ok(true)
}

/// Waits until the reactor has events or one of `others` is ready. Each returned value is true if the descriptor at the same index of
/// `others` is ready.
fn wait(reactor: &mut Reactor, others: [Option<(BorrowedFd<'_>, PollFlags)>; 2]) -> Result<[bool; 2], Failure> {
    // The time until the reactor's next deadline. It is rounded up to whole milliseconds, because a turn before the deadline would have
    // nothing to do.
    let left =
        reactor.next_deadline().map(|at| at.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
    let timeout = left.map_or(PollTimeout::NONE, |left| PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
    let mut fds = vec![PollFd::new(reactor.as_fd(), PollFlags::POLLIN)];
    fds.extend(others.iter().flatten().map(|(fd, flags)| PollFd::new(*fd, *flags)));
    match poll(&mut fds, timeout) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(error) => return Err(Failure::new(format!("poll: {error}"))),
    }
    let mut ready = fds[1..].iter().map(|fd| fd.any().unwrap_or(false));
    Ok(others.map(|other| other.is_some() && ready.next().unwrap_or(false)))
}

/// Writes the bytes that arrived before the end of the stream to standard output. Writes only when standard output has room, because a
/// write that blocks would hide a signal. The reactor still takes turns, so that only new events make its descriptor readable.
fn finish(
    reactor: &mut Reactor,
    peer: &mut Streams<Peer>,
    rest: &mut impl BufRead,
    output: &mut File,
    interrupt: &Interrupt,
) -> Result<Ending, Failure> {
    while rest.fill_buf().is_ok_and(|bytes| !bytes.is_empty()) {
        let [_, has_room] = wait(reactor, [None, Some((output.as_fd(), PollFlags::POLLOUT))])?;
        reactor.turn(peer, Some(Duration::ZERO))?;
        if interrupt.is_raised() {
            return Ok(Ending::Interrupted);
        }
        if has_room {
            drain(output, rest)?;
        }
    }
    Ok(Ending::Complete)
}

fn run(cli: &Cli) -> Result<Ending, Failure> {
    let (mut input, mut output) = (unbuffered(&io::stdin())?, unbuffered(&io::stdout())?);
    let mut reactor = Reactor::new(Config::default().provider(cli.provider.into()).security(cli.security.security()?))?;
    let interrupt = Interrupt::on_signals()?;
    interrupt.stops(reactor.handle());
    let mut peer = Streams::new(Peer::default());
    match &cli.command {
        Command::Server { bind } => {
            let listener = reactor.context().listen(resolve(bind, cli.port)?[0])?;
            peer.handler.listener = Some(listener);
            if let Some(address) = reactor.context().listeners().local_address(listener) {
                eprintln!("listening on {address}");
            }
        }
        Command::Client { address } => {
            reactor.context().connect(resolve(address, cli.port)?[0])?;
        }
    }
    let (mut feeding, mut draining) = (true, true);
    loop {
        reactor.turn(&mut peer, Some(Duration::ZERO))?;
        // A signal also makes the reactor's descriptor readable, so that `wait` returns.
        if interrupt.is_raised() {
            return Ok(Ending::Interrupted);
        }
        let Some(id) = peer.handler.stream else {
            if let Some(Err(failure)) = peer.handler.end.take() {
                return Err(failure);
            }
            wait(&mut reactor, [None; 2])?;
            continue;
        };
        if let Some(end) = peer.handler.end.take() {
            let mut rest = std::mem::take(&mut peer.handler.rest);
            return match finish(&mut reactor, &mut peer, &mut rest, &mut output, &interrupt)? {
                Ending::Interrupted => Ok(Ending::Interrupted),
                Ending::Complete => end.map(|()| Ending::Complete),
            };
        }
        let ready = peer.context(reactor.context()).stream(id).readiness();
        let wants_input = (feeding && ready.writable).then(|| (input.as_fd(), PollFlags::POLLIN));
        let wants_output = (draining && ready.readable).then(|| (output.as_fd(), PollFlags::POLLOUT));
        let [has_input, has_room] = wait(&mut reactor, [wants_input, wants_output])?;
        let mut cx = peer.context(reactor.context());
        let mut stream = cx.stream(id);
        if has_input && !feed(&mut input, &mut stream)? {
            feeding = false;
            // The shutdown fails only if the stream has already ended. In that case the peer needs no notice.
            let _ = stream.shutdown(Shutdown::Write);
        }
        if has_room {
            draining = drain(&mut output, &mut stream)?;
        }
    }
}

fn main() -> ExitCode {
    program::main(std::env::args_os(), |cli: Cli| run(&cli))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use rdma_reactor::ProviderChoice;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_stalled_reader_of_the_last_bytes_does_not_hide_a_signal() {
        let (mut full, _reader) = UnixStream::pair().unwrap();
        full.set_nonblocking(true).unwrap();
        let mut written = 0;
        while let Ok(len) = full.write(&[0; ATOMIC]) {
            written += len;
        }
        assert!(written > 0);
        full.set_nonblocking(false).unwrap();
        let mut output = File::from(OwnedFd::from(full));
        let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp)).unwrap();
        let (mut peer, interrupt) = (Streams::new(Peer::default()), Interrupt::default());
        interrupt.stops(reactor.handle());
        assert!(!interrupt.raise());
        let mut rest = &b"rest"[..];
        let ending = finish(&mut reactor, &mut peer, &mut rest, &mut output, &interrupt);
        assert_eq!((ending, rest), (Ok(Ending::Interrupted), &b"rest"[..]));
    }
}
