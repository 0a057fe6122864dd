//! Sends standard input to the peer, and writes the peer's bytes to standard output, as netcat does: `stream-pipe
//! server`, `stream-pipe client ADDR`. The end of standard input ends one direction of the stream; the other continues.
//!
//! The program is an outer loop with a reactor in it. It calls `poll`(2) for the reactor's descriptor,
//! standard input and standard output, like a program with sockets, and queries the stream for its readiness.
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
use rdma_reactor_tools::program;
use rdma_reactor_tools::secure::SecurityArgs;

/// The number of bytes that a pipe accepts without blocking once `poll`(2) reports it writable (`PIPE_BUF`).
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

/// The one stream, and its end.
#[derive(Debug, Default)]
struct Peer {
    listener: Option<ListenerId>,
    stream: Option<ConnectionId>,
    end: Option<Result<(), Failure>>,
    /// The bytes that were unread when the stream ended.
    rest: Unread,
}

impl StreamHandler for Peer {
    fn on_connect_request(&mut self, _: &mut StreamContext<'_>, _: ConnectRequest<'_>) -> Decision {
        if self.stream.is_some() { Decision::Reject(Vec::new()) } else { Decision::Accept }
    }

    fn on_open(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        if self.stream.is_some() {
            // Another stream was accepted at the same time.
            return cx.stream(id).close();
        }
        self.stream = Some(id);
        if let Some(listener) = self.listener.take() {
            cx.context().close_listener(listener);
        }
    }

    // The loop queries the stream for its readiness, so there is nothing to do here.
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
        self.end = Some(Err(Failure::new(format!("no connection: {error}; is `stream-pipe server` running there?"))));
    }
}

/// Duplicates a standard stream as a file without the buffer of the standard library.
fn unbuffered(fd: &impl AsFd) -> Result<File, Failure> {
    let owned = fd.as_fd().try_clone_to_owned();
    owned.map(File::from).map_err(|error| Failure::new(format!("a standard stream is not open: {error}")))
}

/// Moves bytes from standard input into the stream's send buffers. Returns `false` at the end.
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
        // The window has closed meanwhile, or the connection is ending; the stream reports the reason.
        (Ok(_) | Err(_), Ok(_)) => Ok(true),
    }
}

/// Moves bytes from the buffers that they arrived in to standard output. Returns `false` at the end.
fn drain(output: &mut File, stream: &mut impl BufRead) -> Result<bool, Failure> {
    let bytes = match stream.fill_buf() {
        Ok([]) => return Ok(false),
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
        // The callback `on_error` has reported the reason.
        Err(_) => return Ok(false),
    };
    match output.write(&bytes[..bytes.len().min(ATOMIC)]) {
        Ok(written) => stream.consume(written),
        Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
        Err(error) => return Err(Failure::new(format!("standard output: {error}"))),
    }
    Ok(true)
}

/// Waits until the reactor has events or one of the other descriptors is ready. Returns which of the others are ready.
fn wait(reactor: &mut Reactor, others: [Option<(BorrowedFd<'_>, PollFlags)>; 2]) -> Result<[bool; 2], Failure> {
    // The time is rounded up, because a turn before the deadline would have nothing to do.
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

fn run(cli: &Cli) -> Result<(), Failure> {
    let (mut input, mut output) = (unbuffered(&io::stdin())?, unbuffered(&io::stdout())?);
    let mut reactor = Reactor::new(Config::default().provider(cli.provider.into()).security(cli.security.security()?))?;
    let mut peer = Streams::new(Peer::default());
    match &cli.command {
        Command::Server { bind } => {
            let listener = reactor.context().listen(resolve(bind, cli.port)?[0])?;
            peer.handler.listener = Some(listener);
            if let Some(address) = reactor.context().local_address(listener) {
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
        let Some(id) = peer.handler.stream else {
            if let Some(Err(failure)) = peer.handler.end.take() {
                return Err(failure);
            }
            wait(&mut reactor, [None; 2])?;
            continue;
        };
        if let Some(end) = peer.handler.end.take() {
            // All bytes from before the end are written to standard output before the program ends.
            while drain(&mut output, &mut peer.handler.rest)? {
                wait(&mut reactor, [None, Some((output.as_fd(), PollFlags::POLLOUT))])?;
            }
            return end;
        }
        let ready = peer.context(reactor.context()).stream(id).readiness();
        let wants_input = (feeding && ready.writable).then(|| (input.as_fd(), PollFlags::POLLIN));
        let wants_output = (draining && ready.readable).then(|| (output.as_fd(), PollFlags::POLLOUT));
        let [has_input, has_room] = wait(&mut reactor, [wants_input, wants_output])?;
        let mut cx = peer.context(reactor.context());
        let mut stream = cx.stream(id);
        if has_input && !feed(&mut input, &mut stream)? {
            feeding = false;
            // If the stream is gone already, nobody needs the notice.
            let _ = stream.shutdown(Shutdown::Write);
        }
        if has_room {
            draining = drain(&mut output, &mut stream)?;
        }
    }
}

fn main() -> ExitCode {
    program::main(std::env::args_os(), |cli: Cli| run(&cli).map(|()| Ending::Complete))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
