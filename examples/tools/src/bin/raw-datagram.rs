//! Exchanges unreliable datagrams with librdmacm's `udaddy` and `mckey`, which do not use this library:
//!
//! | other program | this one |
//! |---|---|
//! | `udaddy -s ADDR -C N -S S -c K` | `raw-datagram server ADDR -n N -s S -c K` |
//! | `udaddy -b ADDR -C N -S S` | `raw-datagram client ADDR -n N -s S` |
//! | `mckey -m GROUP -b ADDR -s -C N -S S` | `raw-datagram receive GROUP --bind ADDR -n N -s S` |
//! | `mckey -m GROUP -b ADDR -C N -S S` | `raw-datagram send GROUP --bind ADDR -n N -s S` |
//!
//! As in those programs, the immediate data of a datagram is the number of the sending queue pair. A lost datagram is not sent again:
//! the program waits for it until `--timeout`, and then fails.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rdma_reactor::{
    Config, ConnectError, Context, Datagram, DatagramHandler, DisconnectReason, EndpointId, EndpointOptions, Handler,
    Origin, Outcome, PeerId, Reactor, SendErrorKind, SendId, TimerId,
};
use rdma_reactor_tools::pingpong::address::resolve;
use rdma_reactor_tools::pingpong::cli::{Provider, parse_size};
use rdma_reactor_tools::pingpong::failure::{Ending, Failure};
use rdma_reactor_tools::pingpong::interrupt::Interrupt;
use rdma_reactor_tools::pingpong::output::Output;
use rdma_reactor_tools::program;

/// The port that udaddy always uses.
const PORT: u16 = 7174;
/// The smallest and the largest size of the endpoint's receive queue and send queue, in datagrams.
const DEPTH: (u32, u32) = (64, 4096);
/// The largest number of senders that the echo server answers. It drops the datagrams of further senders.
const SENDERS: usize = 1024;

/// Sends, echoes and receives datagrams and multicasts, for programs that only use verbs (udaddy, mckey).
#[derive(Debug, Parser)]
#[command(name = "raw-datagram", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

// local: arguments of the program
#[derive(Debug, Subcommand)]
enum Command {
    /// Send back every datagram
    Server {
        /// Address of a device, with or without a port
        #[arg(value_name = "ADDR")]
        bind: String,
        /// End after this many clients with --count datagrams each
        #[arg(short, long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
        clients: u32,
        #[command(flatten)]
        talk: TalkArgs,
    },
    /// Send --count datagrams and receive as many back
    Client {
        /// The server's host name or address, with or without a port
        #[arg(value_name = "ADDR")]
        address: String,
        /// Local address, of a device [default: the server's, for one on the same machine]
        #[arg(long, value_name = "ADDR")]
        bind: Option<String>,
        /// Check that each returned datagram has the bytes that were sent; udaddy answers with other bytes
        #[arg(long)]
        verify: bool,
        #[command(flatten)]
        talk: TalkArgs,
    },
    /// Join a group and receive --count datagrams
    Receive(GroupArgs),
    /// Join a group and send --count datagrams
    Send(GroupArgs),
}

// local: arguments of the program
#[derive(Debug, Args)]
struct GroupArgs {
    /// Multicast address
    #[arg(value_name = "GROUP")]
    group: IpAddr,
    /// Local address, of a device
    #[arg(long, value_name = "ADDR")]
    bind: String,
    #[command(flatten)]
    talk: TalkArgs,
}

#[derive(Clone, Debug, Args)]
struct TalkArgs {
    /// The port
    #[arg(short, long, default_value_t = PORT)]
    port: u16,
    /// Number of datagrams
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Bytes of each datagram; other lengths are an error
    #[arg(short, long, value_name = "S", default_value_t = 100, value_parser = parse_size)]
    size: u32,
    /// Fail if the run takes longer than this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    /// RDMA devices (verbs), the embedded provider (iwarp), or whichever exists
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    provider: Provider,
    /// UDP port of the embedded provider's datagrams; 4791 for devices of other hosts [default: a free one]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    udp_port: Option<u16>,
}

/// The role of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Sends datagrams back. The program ends after `total` datagrams.
    Echo { total: u32 },
    /// Sends datagrams to the server, and receives as many back. With `verify`, checks that the returned bytes are those that were sent.
    Ask { verify: bool },
    /// Receives the datagrams of a multicast group.
    Receive,
    /// Sends datagrams to a multicast group.
    Send,
}

#[derive(Debug)]
struct Talk {
    part: Part,
    count: u32,
    text: Vec<u8>, // local: its length is an argument
    number: u32,
    /// The senders that the echo server answers, each with its peer id.
    senders: BTreeMap<Origin, PeerId>, // bound: tool-datagrams
    /// The destination of this program's own datagrams, and the number of them that are not sent yet.
    left: Option<(PeerId, u32)>,
    /// Echoes whose sends were refused because the send queue was full. `on_datagram_writable` sends them again.
    waiting: VecDeque<(PeerId, Vec<u8>)>, // bound: tool-datagrams
    received: u32,
    sent: u32,
    failure: Option<Failure>,
    output: Output,
}

impl Talk {
    fn fail(&mut self, cx: &mut Context<'_>, why: impl std::fmt::Display) {
        self.failure.get_or_insert_with(|| Failure::new(why));
        cx.stop();
    }

    /// Returns the next datagram to send, with its destination.
    fn next_datagram(&self) -> Option<(PeerId, &[u8])> {
        let own = self.left.filter(|&(_, left)| left > 0).map(|(peer, _)| (peer, &self.text[..]));
        own.or_else(|| self.waiting.front().map(|(peer, bytes)| (*peer, &bytes[..])))
    }

    /// Records that the next datagram is sent.
    fn passed(&mut self) {
        match &mut self.left {
            Some((_, left @ 1..)) => *left -= 1,
            _ => drop(self.waiting.pop_front()),
        }
    }

    /// Sends datagrams until one is refused or none is left.
    fn pump(&mut self, cx: &mut Context<'_>, endpoint: EndpointId) {
        while let Some((peer, bytes)) = self.next_datagram() {
            match cx.datagrams().send_with_immediate(endpoint, peer, bytes, self.number) {
                Ok(_) => self.passed(),
                // The send queue is full. The reactor calls `on_datagram_writable` when the queue has space.
                Err(SendErrorKind::WouldBlock(_)) => return,
                Err(error) => return self.fail(cx, error.to_string()),
            }
        }
    }

    fn speak(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, to: PeerId) {
        self.left = Some((to, self.count));
        self.pump(cx, endpoint);
    }

    fn end_if_complete(&mut self, cx: &mut Context<'_>, endpoint: EndpointId) {
        let complete = match self.part {
            Part::Echo { total } => self.received >= total && self.sent >= total,
            Part::Ask { .. } => self.received >= self.count && self.sent >= self.count,
            Part::Receive => self.received >= self.count,
            Part::Send => self.sent >= self.count,
        };
        if complete {
            cx.datagrams().close(endpoint);
        }
    }
}

impl DatagramHandler for Talk {
    fn on_peer(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        address: SocketAddr,
        found: Result<PeerId, ConnectError>,
    ) {
        match found {
            Ok(peer) => self.speak(cx, endpoint, peer),
            Err(error) => self.fail(cx, format!("no datagram service at {address}: {error}")),
        }
    }

    fn on_join(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        group: IpAddr,
        joined: Result<PeerId, ConnectError>,
    ) {
        match joined {
            Ok(peer) => {
                self.output.line(format!("joined {group}"));
                if self.part == Part::Send {
                    self.speak(cx, endpoint, peer);
                }
            }
            Err(error) => self.fail(cx, format!("not in the group {group}: {error}")),
        }
    }

    fn on_datagram(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, datagram: Datagram<'_>) {
        if self.part == Part::Send {
            return; // A sender also receives the group's datagrams, even its own ones. It ignores them.
        }
        if datagram.len() != self.text.len() {
            let expected = self.text.len();
            return self.fail(cx, format!("a datagram of {} bytes where {expected} were expected", datagram.len()));
        }
        if datagram.immediate() != Some(datagram.origin().qp_number()) {
            return self.fail(cx, format!("the immediate data does not name {}", datagram.origin()));
        }
        self.received = self.received.saturating_add(1);
        match self.part {
            Part::Ask { verify: true } if *datagram != self.text[..] => {
                return self.fail(cx, format!("datagram {} is not what was sent", self.received));
            }
            Part::Echo { .. } => {
                let origin = datagram.origin();
                let peer = match self.senders.get(&origin) {
                    Some(peer) => *peer,
                    None if self.senders.len() >= SENDERS => return,
                    None => match cx.datagrams().peer_of(endpoint, &origin) {
                        Ok(peer) => {
                            self.senders.insert(origin, peer);
                            peer
                        }
                        Err(error) => return self.fail(cx, format!("no route back to {origin}: {error}")),
                    },
                };
                // If datagrams arrive faster than the server can send them back, the server drops some of them, as a network does.
                if self.waiting.len() < DEPTH.1 as usize {
                    self.waiting.push_back((peer, datagram.to_vec()));
                }
                self.pump(cx, endpoint);
            }
            _ => {}
        }
        self.end_if_complete(cx, endpoint);
    }

    fn on_datagram_sent(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, _: SendId, outcome: Outcome) {
        if outcome.is_sent() {
            self.sent = self.sent.saturating_add(1);
            self.end_if_complete(cx, endpoint);
        }
    }

    fn on_datagram_writable(&mut self, cx: &mut Context<'_>, endpoint: EndpointId) {
        self.pump(cx, endpoint);
    }

    fn on_endpoint_closed(&mut self, cx: &mut Context<'_>, _: EndpointId, reason: DisconnectReason) {
        let (received, sent) = (self.received, self.sent);
        match reason {
            DisconnectReason::Local { .. } => self.output.line(format!("{received} received, {sent} sent")),
            reason => self.fail(cx, format!("{received} received, {sent} sent: {reason}")),
        }
        cx.stop();
    }
}

impl Handler for Talk {
    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        Some(self)
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let (received, sent) = (self.received, self.sent);
        self.fail(
            cx,
            format!("it took longer than --timeout: {received} received, {sent} sent; datagrams may be lost"),
        );
    }
}

fn run(command: Command) -> Result<Ending, Failure> {
    let (talk, part, bind) = match &command {
        Command::Server { bind, clients, talk } => {
            (talk, Part::Echo { total: clients.saturating_mul(talk.count) }, resolve(bind, talk.port)?[0])
        }
        Command::Client { address, bind, verify, talk } => {
            let own = resolve(bind.as_ref().unwrap_or(address), 0)?[0];
            (talk, Part::Ask { verify: *verify }, SocketAddr::new(own.ip(), 0))
        }
        Command::Receive(group) => (&group.talk, Part::Receive, resolve(&group.bind, 0)?[0]),
        Command::Send(group) => (&group.talk, Part::Send, resolve(&group.bind, 0)?[0]),
    };
    let total = if let Part::Echo { total } = part { total } else { talk.count };
    let depth = total.clamp(DEPTH.0, DEPTH.1);
    let config = Config::default().provider(talk.provider.into());
    let mut reactor = Reactor::new(config.iwarp(|iwarp| iwarp.roce.port = talk.udp_port))?;
    Interrupt::on_signals()?.stops(reactor.handle());
    let mut cx = reactor.context();
    let endpoint = cx.datagrams().open(bind, EndpointOptions::new().receive_depth(depth).send_depth(depth))?;
    let max = cx.datagrams().max_datagram(endpoint).unwrap_or(0);
    if talk.size as usize > max {
        return Err(Failure::new(format!("--size {}: a datagram is at most {max} bytes here", talk.size)));
    }
    let mut handler = Talk {
        part,
        count: talk.count,
        text: (0..talk.size).map(|i| i as u8 ^ 0x5a).collect(),
        number: cx.datagrams().qp_number(endpoint).unwrap_or(0),
        senders: BTreeMap::new(),
        left: None,
        waiting: VecDeque::new(),
        received: 0,
        sent: 0,
        failure: None,
        output: Output::stdout(),
    };
    if let Some(seconds) = talk.timeout {
        cx.timers().set(Duration::from_secs(seconds), 0);
    }
    match &command {
        Command::Server { .. } => {
            let address = cx.datagrams().address(endpoint).unwrap_or(bind);
            handler.output.line(format!("listening on {address}"));
        }
        Command::Client { address, .. } => cx.datagrams().find_peer(endpoint, resolve(address, talk.port)?[0])?,
        Command::Receive(group) | Command::Send(group) => cx.datagrams().join(endpoint, group.group)?,
    }
    reactor.run(&mut handler)?;
    match handler.failure {
        Some(failure) => Err(failure),
        None if reactor.context().datagrams().address(endpoint).is_some() => Ok(Ending::Interrupted),
        None => Ok(Ending::Complete),
    }
}

fn main() -> ExitCode {
    program::main(std::env::args_os(), |cli: Cli| run(cli.command))
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
