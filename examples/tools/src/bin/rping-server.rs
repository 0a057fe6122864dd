//! Does the same as `rping -s`: reads a ping from the memory of a client and writes it back. The client may be this project's or
//! librdmacm's.
//!
//! This program is an example to read and copy. It shows how to use the memory of a peer. `rdma_reactor_tools::rping` describes the
//! steps of a round.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::fmt;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use rdma_reactor::{
    Access, ConnectRequest, ConnectionId, Context, Decision, DisconnectReason, Framing, Handler, ListenOptions,
    Message, Outcome, Region, RegionOptions, SendId, SendKind, TimerId,
};
use rdma_reactor_tools::pingpong::address::resolve;
use rdma_reactor_tools::pingpong::cli::parse_size;
use rdma_reactor_tools::pingpong::failure::{Ending, Failure};
use rdma_reactor_tools::pingpong::output::Output;
use rdma_reactor_tools::program;
use rdma_reactor_tools::rping::options::Options;
use rdma_reactor_tools::rping::{advert, ping};
use serde_json::json;

/// Serves rping clients: reads a ping from a client's memory and writes it back.
// local: arguments of the program
#[derive(Debug, Parser)]
#[command(name = "rping-server", version, disable_version_flag = true)]
struct Cli {
    /// Address to listen on, with or without a port
    #[arg(short, long, value_name = "ADDR", default_value = "0.0.0.0")]
    address: String,
    /// Largest ping accepted, bytes
    #[arg(short = 'S', long, default_value_t = 64 << 10, value_parser = parse_size)]
    size: u32,
    /// Serve any number of clients, several at the same time, until Ctrl-C [default: one]
    #[arg(short = 'P', long)]
    persistent: bool,
    /// With -P: end after this many clients
    #[arg(long, value_name = "N", requires = "persistent", value_parser = clap::value_parser!(u64).range(1..))]
    clients: Option<u64>,
    #[command(flatten)]
    options: Options,
}

/// The step of the current round on a connection.
#[derive(Debug)]
enum Step {
    /// The server waits for the address of the source, the client's region with the ping.
    Source,
    /// The server reads the ping by RDMA Read.
    Ping { len: usize },
    /// The server waits for the address of the sink, the client's region for the returned ping.
    Sink { len: usize },
}

// local: a text
#[derive(Debug)]
struct Client {
    address: Option<SocketAddr>,
    /// The local memory that pings are read into, and written from.
    ping: Region,
    step: Step,
    rounds: u64,
    failure: Option<String>,
}

impl Client {
    /// Handles a message with the address of the client's source or sink: reads or writes the ping.
    fn advertised(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) -> Result<(), String> {
        let remote = advert::decode(message)?;
        match self.step {
            Step::Source => {
                let len = usize::try_from(remote.len).unwrap_or(usize::MAX);
                if len > self.ping.len() {
                    return Err(format!(
                        "a ping of {len} bytes where at most {} are accepted: see -S",
                        self.ping.len()
                    ));
                }
                cx.remote(conn).read(remote, &mut self.ping, 0..len).map_err(|error| error.to_string())?;
                self.step = Step::Ping { len };
            }
            Step::Ping { .. } => return Err("it sends out of turn".into()),
            Step::Sink { len } => {
                cx.remote(conn).write(remote, &self.ping, 0..len).map_err(|error| error.to_string())?;
                // The ping was written before this message is sent on the same connection. So the client has the whole ping when it
                // receives this message.
                cx.send(conn, &[0; advert::LEN]).map_err(|error| error.to_string())?;
                self.step = Step::Source;
                self.rounds += 1;
            }
        }
        Ok(())
    }

    /// Handles a completed read of a ping.
    fn fetched(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        options: &Options,
        output: &mut Output,
    ) -> Result<(), String> {
        let Step::Ping { len } = self.step else { return Ok(()) };
        if options.verify || options.verbose {
            let mut ping = vec![0; len];
            self.ping.copy_to(0, &mut ping);
            if options.verify {
                ping::check(self.rounds, &ping)?;
            }
            if options.verbose {
                output.line(format_args!("server ping data: {}", ping::text(&ping)));
            }
        }
        self.step = Step::Sink { len };
        cx.send(conn, &[0; advert::LEN]).map(drop).map_err(|error| error.to_string())
    }

    /// Returns a description of what went wrong with a client that has disconnected, or `None` if nothing went wrong.
    fn complaint(&self, reason: &DisconnectReason, count: Option<u64>) -> Option<String> {
        let rounds = self.rounds;
        match (&self.failure, reason, &self.step) {
            (Some(why), ..) => Some(why.clone()),
            (None, DisconnectReason::Local { .. }, _) => None,
            (None, DisconnectReason::Closed, Step::Source) => match count {
                Some(count) if count != rounds => Some(format!("it leaves after {rounds} of {count} rounds")),
                _ => None,
            },
            (None, ..) => Some(reason.to_string()),
        }
    }
}

#[derive(Debug)]
struct Server {
    options: Options,
    output: Output,
    /// The length of the largest ping, in bytes.
    size: usize,
    /// The state of each connection. The index is [`ConnectionId::slot`].
    clients: Vec<Option<Client>>, // bound: tool-clients
    /// The number of clients that have connected.
    came: u64,
    /// The number of clients that have disconnected. The server ends when this number reaches `until`.
    gone: u64,
    until: Option<u64>,
    rounds: u64,
    failed: u64,
    failure: Option<Failure>,
}

impl Server {
    fn failed(&mut self, address: Option<SocketAddr>, round: u64, why: impl fmt::Display) {
        let address = address.map_or_else(|| "?".into(), |address| address.to_string());
        let failure = Failure::new(format!("client {address}, round {round}: {why}"));
        // A server for a single client returns the failure of that client as its result, and the failure is printed when the server ends.
        // So it is not printed here.
        if self.until != Some(1) {
            self.output.line(&failure);
        }
        self.failed += 1;
        self.failure.get_or_insert(failure);
    }
}

impl Handler for Server {
    fn on_connect_request(&mut self, _: &mut Context<'_>, _: ConnectRequest<'_>) -> Decision {
        if self.until.is_some_and(|until| self.came >= until) {
            return Decision::Reject(b"no more clients: see -P".to_vec());
        }
        Decision::Accept
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.came += 1;
        let address = cx.connection(conn).peer_address();
        if self.clients.len() <= conn.slot() {
            self.clients.resize_with(conn.slot() + 1, || None);
        }
        match cx.regions().register(conn, self.size, &RegionOptions::new().allow(Access::READ_SINK)) {
            Ok(ping) => {
                let client = Client { address, ping, step: Step::Source, rounds: 0, failure: None };
                self.clients[conn.slot()] = Some(client);
            }
            Err(error) => {
                self.failed(address, 0, error);
                cx.close(conn);
            }
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let Some(client) = &mut self.clients[conn.slot()] else { return };
        if let Err(why) = client.advertised(cx, conn, &message) {
            client.failure = Some(why);
            cx.close(conn);
        }
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        let Some(client) = &mut self.clients[conn.slot()] else { return };
        // A successful read has fetched the client's ping. After a failed read, the connection ends, and `on_disconnect` reports the
        // reason.
        if send.kind() == SendKind::Read && outcome.is_sent() && client.failure.is_none() {
            if let Err(why) = client.fetched(cx, conn, &self.options, &mut self.output) {
                client.failure = Some(why);
                cx.close(conn);
            }
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if let Some(client) = self.clients[conn.slot()].take() {
            self.rounds += client.rounds;
            if let Some(why) = client.complaint(&reason, self.options.count) {
                self.failed(client.address, client.rounds, why);
            }
        }
        self.gone += 1;
        if self.until == Some(self.gone) {
            cx.stop();
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let (came, gone) = (self.came, self.gone);
        let why = format!("it took longer than --timeout: {came} clients connected, {gone} of them ended");
        self.failure.get_or_insert_with(|| Failure::new(why));
        cx.stop();
    }
}

fn run(cli: Cli) -> Result<Ending, Failure> {
    let (mut reactor, interrupt) = cli.options.reactor()?;
    let mut server = Server {
        output: cli.options.output(),
        size: cli.size as usize,
        clients: Vec::new(),
        came: 0,
        gone: 0,
        until: if cli.persistent { cli.clients } else { Some(1) },
        rounds: 0,
        failed: 0,
        failure: None,
        options: cli.options,
    };
    let address = resolve(&cli.address, server.options.port)?[0];
    let mut cx = reactor.context();
    let listener = cx.listen_with(address, ListenOptions::new().framing(Framing::Raw))?;
    let address = cx.listeners().local_address(listener).unwrap_or(address);
    server.output.line(format_args!("listening on {address} (provider {})", reactor.provider_name()));
    reactor.run(&mut server)?;
    let interrupted = interrupt.is_raised();
    reactor.shutdown(&mut server, Duration::from_secs(1))?;

    let (clients, rounds, provider) = (server.gone, server.rounds, reactor.provider_name());
    if server.options.json {
        Output::stdout().line(json!({
            "provider": provider, "clients": clients, "failed": server.failed, "rounds": rounds,
            "verified": server.options.verify, "interrupted": interrupted,
        }));
    } else {
        server.output.line(format_args!("{rounds} rounds for {clients} clients ({provider})"));
    }
    match server.failure {
        Some(failure) => Err(failure),
        // A signal is the normal end of a server without a limit. A server with a limit has not completed its work if a signal ends it.
        None if interrupted && server.until.is_some() => Ok(Ending::Interrupted),
        None => Ok(Ending::Complete),
    }
}

fn main() -> ExitCode {
    program::main(std::env::args_os(), run)
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
