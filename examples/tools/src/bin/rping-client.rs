//! Does the same as `rping -c`: lets a server read a ping from local memory and write it back. The server may be this project's or
//! librdmacm's.
//!
//! This program is an example to read and copy. It shows how to give a peer access to memory. `rdma_reactor_tools::rping` describes the
//! steps of a round.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use rdma_reactor::{
    Access, ConnectError, ConnectOptions, ConnectionId, Context, DisconnectReason, Error, Framing, Handler, Message,
    Region, RegionOptions, TimerId,
};
use rdma_reactor_tools::pingpong::address::resolve;
use rdma_reactor_tools::pingpong::cli::parse_size;
use rdma_reactor_tools::pingpong::failure::{Ending, Failure};
use rdma_reactor_tools::pingpong::output::Output;
use rdma_reactor_tools::program;
use rdma_reactor_tools::rping::options::Options;
use rdma_reactor_tools::rping::{advert, ping};
use serde_json::json;

/// The time in which the current round may finish after the first Ctrl-C. A second Ctrl-C ends the
/// program immediately.
const LAST_ROUND: Duration = Duration::from_secs(10);

/// Offers memory to an rping server, which reads a ping from this memory and writes the ping back.
// local: arguments of the program
#[derive(Debug, Parser)]
#[command(name = "rping-client", version, disable_version_flag = true)]
struct Cli {
    /// The server's host name or address, with or without a port
    #[arg(short, long, value_name = "ADDR")]
    address: String,
    /// Bytes of a ping; rping's server accepts 23 to 65535, and needs the same -S
    #[arg(short = 'S', long, default_value_t = 64, value_parser = parse_size)]
    size: u32,
    #[command(flatten)]
    options: Options,
}

/// The step that the server must finish next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The server reads the source, the region with the ping.
    Source,
    /// The server writes the ping to the sink, the region for the returned ping.
    Sink,
}

/// A connection, with the memory that the server may access while the connection lasts.
#[derive(Debug)]
struct Session {
    conn: ConnectionId,
    source: Region,
    sink: Region,
    step: Step,
}

// local: the length of a ping is an argument
#[derive(Debug)]
struct Client {
    options: Options,
    /// Addresses of the server that were not tried yet.
    addresses: std::vec::IntoIter<SocketAddr>,
    session: Option<Session>,
    /// The ping of this round.
    text: Vec<u8>,
    /// The buffer for the returned ping.
    back: Vec<u8>,
    rounds: u64,
    started: Option<Instant>,
    elapsed: Duration,
    interrupted: bool,
    failure: Option<Failure>,
    output: Output,
}

impl Client {
    fn new(options: Options, addresses: Vec<SocketAddr>, size: u32) -> Self {
        Self {
            addresses: addresses.into_iter(),
            session: None,
            text: vec![0; size as usize],
            back: vec![0; size as usize],
            rounds: 0,
            started: None,
            elapsed: Duration::ZERO,
            interrupted: false,
            failure: None,
            output: options.output(),
            options,
        }
    }

    /// Connects to the next address. Returns `None` if every address was tried, and otherwise the result of the call of `connect_with`.
    fn connect(&mut self, cx: &mut Context<'_>) -> Option<Result<ConnectionId, Error>> {
        // rping's messages have no headers, and there are no credits.
        let options = ConnectOptions::new().framing(Framing::Raw);
        self.addresses.next().map(|address| cx.connect_with(address, options))
    }

    fn fail(&mut self, cx: &mut Context<'_>, why: impl std::fmt::Display) {
        self.failure.get_or_insert_with(|| Failure::new(why));
        match &self.session {
            Some(session) => cx.close(session.conn),
            None => cx.stop(),
        }
    }

    /// Returns true if all requested rounds are done.
    fn is_over(&self) -> bool {
        self.options.count == Some(self.rounds)
    }

    /// Writes the next ping to the source region, and sends the address of this region to the server.
    fn begin(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        let Some(session) = &mut self.session else { return Ok(()) };
        ping::fill(self.rounds, &mut self.text);
        // `bytes_mut` would return no reference, because the server has the right to read the region. `copy_from` is safe here: the server
        // has no reason to read the region before it receives the region's address.
        session.source.copy_from(0, &self.text).map_err(|error| error.to_string())?;
        if self.options.verify {
            // Fills the sink, so that a comparison detects a server that wrote nothing.
            self.back.fill(0xff);
            session.sink.copy_from(0, &self.back).map_err(|error| error.to_string())?;
        }
        session.step = Step::Source;
        let sent = cx.send(session.conn, &advert::encode(session.source.remote()));
        sent.map(drop).map_err(|error| error.to_string())
    }

    /// Handles a message of the server. With each message, the server reports that it has finished with the source or with the sink.
    fn proceed(&mut self, cx: &mut Context<'_>, message: &[u8]) -> Result<(), String> {
        let Some(session) = &mut self.session else { return Ok(()) };
        advert::checked(message)?;
        if session.step == Step::Source {
            session.step = Step::Sink;
            let sent = cx.send(session.conn, &advert::encode(session.sink.remote()));
            return sent.map(drop).map_err(|error| error.to_string());
        }
        // The server writes the ping to the sink before it sends this message. So the whole ping has arrived.
        session.sink.copy_to(0, &mut self.back);
        let conn = session.conn;
        if self.options.verify {
            ping::check(self.rounds, &self.back)?;
        }
        if self.options.verbose {
            self.output.line(format_args!("ping data: {}", ping::text(&self.back)));
        }
        self.rounds += 1;
        self.elapsed = self.started.map_or(Duration::ZERO, |started| cx.now().duration_since(started));
        if self.is_over() || self.interrupted {
            cx.close(conn);
            return Ok(());
        }
        self.begin(cx)
    }
}

impl Handler for Client {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.started = Some(cx.now());
        let mut region = |access| cx.regions().register(conn, self.text.len(), &RegionOptions::new().allow(access));
        match (region(Access::REMOTE_READ), region(Access::REMOTE_WRITE)) {
            (Ok(source), Ok(sink)) => self.session = Some(Session { conn, source, sink, step: Step::Source }),
            (Err(error), _) | (_, Err(error)) => return self.fail(cx, error),
        }
        if let Err(why) = self.begin(cx) {
            self.fail(cx, why);
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        if let Err(why) = self.proceed(cx, &message) {
            self.fail(cx, why);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.session = None;
        if !self.is_over() && !self.interrupted {
            let why =
                format!("the connection ended in round {}: {reason}; does the server use the same -S?", self.rounds);
            self.fail(cx, why);
        }
        cx.stop();
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        if self.interrupted {
            // The user has interrupted the connect, so it is no failure, and no other address is tried.
            return;
        }
        let server = cx.connection(conn).peer_address().map_or_else(String::new, |address| format!(" to {address}"));
        match self.connect(cx) {
            Some(Ok(_)) => {}
            Some(Err(error)) => self.fail(cx, error),
            None => self
                .fail(cx, format!("no connection{server}: {error}; is an rping server running there? check -a and -p")),
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        // If all rounds are done, only the connection is still closing. `Reactor::shutdown` limits the time for that.
        if self.interrupted || self.is_over() {
            return cx.stop();
        }
        let state = if self.session.is_some() { "the server does not answer" } else { "no connection" };
        let why = format!("it took longer than --timeout: {state} in round {}", self.rounds);
        self.failure.get_or_insert_with(|| Failure::new(why));
        cx.stop();
    }
}

fn run(cli: Cli) -> Result<Ending, Failure> {
    let Cli { address, size, options } = cli;
    let (mut reactor, interrupt) = options.reactor()?;
    let addresses = resolve(&address, options.port)?;
    let mut client = Client::new(options, addresses, size);
    if let Some(connected) = client.connect(&mut reactor.context()) {
        connected?;
    }
    reactor.run(&mut client)?;
    client.interrupted = interrupt.is_raised() && !client.is_over();
    if client.interrupted && client.session.is_some() {
        // The current round may finish within `LAST_ROUND`. If the client left during a round, the server might report an error.
        reactor.context().timers().set(LAST_ROUND, 0);
        reactor.run(&mut client)?;
    }
    reactor.shutdown(&mut client, Duration::from_secs(1))?;
    if let Some(failure) = client.failure {
        return Err(failure);
    }
    let (rounds, seconds, provider) = (client.rounds, client.elapsed.as_secs_f64(), reactor.provider_name());
    if client.options.json {
        Output::stdout().line(json!({
            "provider": provider, "size": size, "rounds": rounds, "seconds": seconds,
            "verified": client.options.verify, "interrupted": client.interrupted,
        }));
    } else {
        client.output.line(format_args!("{rounds} rounds of {size} bytes in {seconds:.3} s ({provider})"));
    }
    Ok(if client.interrupted { Ending::Interrupted } else { Ending::Complete })
}

fn main() -> ExitCode {
    program::main(std::env::args_os(), run)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rdma_reactor::{Config, ProviderChoice, Reactor};

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    /// Makes a client for one round.
    fn client(addresses: Vec<SocketAddr>) -> (Reactor, Client) {
        let reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp)).unwrap();
        let Cli { size, options, .. } = Cli::parse_from(["rping-client", "-a", "127.0.0.1", "-C", "1"]);
        (reactor, Client::new(options, addresses, size))
    }

    #[test]
    fn a_connect_that_is_interrupted_is_no_failure_and_the_last() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut reactor, mut client) = client(vec![silent.local_addr().unwrap(); 2]);
        let conn = client.connect(&mut reactor.context()).unwrap().unwrap();
        client.interrupted = true;
        client.on_connect_error(&mut reactor.context(), conn, ConnectError::Cancelled);
        assert_eq!((client.failure, client.addresses.len()), (None, 1));
    }

    #[test]
    fn a_timeout_after_the_last_round_is_no_failure() {
        for (rounds, fails) in [(1, false), (0, true)] {
            let (mut reactor, mut client) = client(Vec::new());
            client.rounds = rounds;
            let timer = reactor.context().timers().set(Duration::ZERO, 0);
            client.on_timer(&mut reactor.context(), timer, 0);
            assert_eq!(client.failure.is_some(), fails, "{rounds} of 1 rounds");
        }
    }
}
