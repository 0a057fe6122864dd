//! Exchanges messages with verbs programs that do not use this library and that only send and receive: `raw-echo server`, `raw-echo
//! client ADDR`.
//!
//! Messages have no headers ([`Framing::Raw`]). There are no credits, so both sides must agree on the number of messages in flight. On
//! each connection, one side sends messages first, and the other side echoes them:
//!
//! | other program | this one |
//! |---|---|
//! | `rdma_client -s ADDR` | `raw-echo server -n 1 -s 16` |
//! | `rdma_server` | `raw-echo client ADDR -n 1 -s 16` |
//! | `ucmatose -s ADDR -C N -S S -c K` | `raw-echo server --speak-first -n N -s S -c K` |
//! | `ucmatose -C N -S S -c K` | `raw-echo client ADDR --echo -n N -s S -c K` |
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rdma_reactor::transport::iwarp::CrcPolicy;
use rdma_reactor::{
    Config, ConnectError, ConnectOptions, ConnectionId, Context, DisconnectReason, Framing, Handler, ListenOptions,
    Message, Outcome, Reactor, SendErrorKind, SendId, TimerId,
};
use rdma_reactor_tools::pingpong::address::resolve;
use rdma_reactor_tools::pingpong::cli::{Provider, parse_size};
use rdma_reactor_tools::pingpong::failure::{Ending, Failure};
use rdma_reactor_tools::pingpong::interrupt::Interrupt;
use rdma_reactor_tools::pingpong::output::Output;
use rdma_reactor_tools::program;

/// The port that librdmacm's examples use.
const PORT: u16 = 7471;
/// The default size of the messages that a speaker sends, in bytes. `rdma_client` uses the same size.
const SIZE: u32 = 16;
/// The size of the largest message that the echoing side accepts by default, in bytes.
const MAX_SIZE: u32 = 64 << 10;
/// The number of messages in flight if neither a count nor a depth is given.
const DEPTH: u32 = 64;
/// The largest number of messages in flight that is chosen by default. Every device supports this many.
const MAX_DEPTH: u32 = 4096;

/// Sends and echoes plain messages, for programs that only use send and receive (rdma_client, ucmatose, ...).
#[derive(Debug, Parser)]
#[command(name = "raw-echo", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

// local: arguments of the program
#[derive(Debug, Subcommand)]
enum Command {
    /// Wait for connections, and echo every message
    Server {
        /// Address to listen on, with or without a port
        #[arg(long, value_name = "ADDR", default_value = "0.0.0.0")]
        bind: String,
        /// Send --count messages to each client, and receive as many back
        #[arg(long, requires = "count")]
        speak_first: bool,
        #[command(flatten)]
        talk: TalkArgs,
    },
    /// Connect, send --count messages, and receive as many back
    Client {
        /// The server's host name or address, with or without a port
        #[arg(value_name = "ADDR")]
        address: String,
        /// Wait for the server's messages and echo them
        #[arg(long)]
        echo: bool,
        #[command(flatten)]
        talk: TalkArgs,
    },
}

#[derive(Clone, Debug, Args)]
struct TalkArgs {
    /// The port
    #[arg(short, long, default_value_t = PORT)]
    port: u16,
    /// Messages per connection and direction [default: 1 to send, any number to echo]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
    /// Bytes per message; other lengths are an error [default: 16 to send, up to 64 KiB to echo]
    #[arg(short, long, value_name = "S", value_parser = parse_size)]
    size: Option<u32>,
    /// Connections: a client opens this many at the same time, a server ends
    /// after this many [default: 1 for a client, no limit for a server]
    #[arg(short, long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: Option<u32>,
    /// Messages in flight, at most the peer's number of receives [default: --count, at most 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16_384))]
    depth: Option<u32>,
    /// Check that each returned message has the bytes that were sent; rdma_server, for one, answers with other bytes
    #[arg(long)]
    verify: bool,
    /// Number, from 1, of the message that wakes a peer which waits for solicited events only [default: none]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    solicit: Option<u32>,
    /// Fail if the run takes longer than this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    /// RDMA devices (verbs), the embedded provider (iwarp), or whichever exists
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    provider: Provider,
    /// Disable the embedded provider's CRC32C
    #[arg(long)]
    no_crc: bool,
}

impl TalkArgs {
    fn depth(&self, count: Option<u32>) -> u32 {
        self.depth.unwrap_or_else(|| count.map_or(DEPTH, |count| count.min(MAX_DEPTH)))
    }

    fn config(&self, count: Option<u32>) -> Config {
        let depth = self.depth(count);
        Config::default()
            .provider(self.provider.into())
            // If the message size is given, a receive buffer is one byte larger than a message. So a message that is one byte too long
            // still arrives, and the program can report its length. With a smaller buffer, the device would report an error, and the
            // connection could end first.
            .buffer_size(self.size.map_or(MAX_SIZE, |size| size.saturating_add(1)))
            .receive_depth(depth.max(5))
            .send_depth(depth)
            .completions(|c| c.queue = Some((2 * depth + 16).max(16 << 10)))
            .iwarp(|i| i.crc = if self.no_crc { CrcPolicy::Off } else { CrcPolicy::default() })
    }
}

/// The role of this process on every connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Sends `count` messages first, and receives as many back.
    Speaker { count: u32 },
    /// Sends messages back. The peer must send exactly `count` messages on each connection; `None` allows any number.
    Echo { count: Option<u32> },
}

/// The state of one connection.
// bound: tool-clients
#[derive(Debug, Default)]
struct Talk {
    received: u32,
    sent: u32,
    /// The outcomes of the sends on this connection that failed, in the order of their completions.
    lost: Vec<Outcome>,
    /// Echoes whose sends were refused because the send queue was full. `on_writable` sends them again.
    waiting: VecDeque<Vec<u8>>,
    failure: Option<String>,
}

impl Talk {
    /// Counts a message that was sent. A peer may have more messages echoed than the counter can represent.
    const fn count_sent(&mut self) {
        self.sent = self.sent.saturating_add(1);
    }

    /// Ends the connection: frees the echoes that were not sent, because the state remains until another connection gets its slot. Returns
    /// the reason why the connection failed, if it did.
    fn end(&mut self) -> Option<String> {
        self.waiting = VecDeque::new();
        self.failure.take()
    }
}

/// The state of all connections.
#[derive(Debug)]
struct Talks {
    part: Part,
    size: Option<u32>,
    depth: u32,
    /// The message that a speaker sends. Returned messages must be equal to it.
    text: Vec<u8>, // local: its length is an argument
    verify: bool,
    solicit: Option<u32>,
    /// The state of each connection. The index is [`ConnectionId::slot`].
    talks: Vec<Talk>, // bound: tool-clients
    /// The slot of the connection that was established last; `None` before the first one.
    last: Option<usize>,
    /// The number of connections that were established.
    began: u64,
    ended: u32,
    /// The number of ended connections after which the program ends; `None` for no limit.
    until: Option<u32>,
    failure: Option<Failure>,
    output: Output,
}

impl Talks {
    /// Makes the state of a connection, in place of that of an earlier connection in the same slot. Returns the number of the connection.
    fn begin(&mut self, slot: usize) -> u64 {
        if self.talks.len() <= slot {
            self.talks.resize_with(slot + 1, Talk::default);
        }
        self.talks[slot] = Talk::default();
        self.last = Some(slot);
        self.began += 1;
        self.began
    }

    /// Returns the state of a connection, or `None` if it has no state.
    fn talk(&mut self, conn: ConnectionId) -> Option<&mut Talk> {
        self.talks.get_mut(conn.slot())
    }

    /// Records a failure, and closes the connection.
    fn fail(&mut self, cx: &mut Context<'_>, conn: ConnectionId, why: String) {
        if let Some(talk) = self.talk(conn) {
            talk.failure.get_or_insert(why);
        }
        cx.close(conn);
    }

    /// Sends messages until one is refused or `depth` messages are in flight.
    fn send(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let (part, depth, solicit) = (self.part, self.depth, self.solicit);
        let text = std::mem::take(&mut self.text);
        let mut failure = None;
        while let Some(talk) = self.talk(conn) {
            let next = match part {
                Part::Speaker { count } if talk.sent < count && talk.sent < talk.received.saturating_add(depth) => {
                    &text
                }
                Part::Speaker { .. } => break,
                Part::Echo { .. } => match talk.waiting.front() {
                    Some(message) => message,
                    None => break,
                },
            };
            if solicit.is_some_and(|number| number - 1 == talk.sent) {
                cx.solicit(conn);
            }
            match cx.send(conn, next) {
                Ok(_) => {
                    talk.count_sent();
                    talk.waiting.pop_front();
                }
                // The send queue is full. The reactor calls `on_writable` when the queue has space.
                Err(SendErrorKind::WouldBlock(_)) => break,
                Err(error) => {
                    failure = Some(error.to_string());
                    break;
                }
            }
        }
        self.text = text;
        if let Some(why) = failure {
            self.fail(cx, conn, why);
        }
    }

    fn take(&mut self, conn: ConnectionId, message: &[u8]) -> Result<(), String> {
        if let Some(size) = self.size.filter(|&size| message.len() != size as usize) {
            return Err(format!("a message of {} bytes where {size} were expected: see --size", message.len()));
        }
        let (part, depth) = (self.part, self.depth as usize);
        let wrong = self.verify && matches!(part, Part::Speaker { .. }) && message != self.text;
        let Some(talk) = self.talk(conn) else { return Ok(()) };
        talk.received = talk.received.saturating_add(1);
        match part {
            Part::Speaker { .. } if wrong => Err(format!("message {} is not what was sent", talk.received)),
            Part::Speaker { count } if talk.received > count => Err(format!("more than {count} messages arrived")),
            Part::Echo { count: Some(count) } if talk.received > count => {
                Err(format!("more than {count} messages arrived"))
            }
            Part::Echo { .. } if talk.waiting.len() > 4 * depth => {
                Err("the peer sends faster than it receives the echoes: see --depth".into())
            }
            Part::Echo { .. } => {
                talk.waiting.push_back(message.to_vec());
                Ok(())
            }
            Part::Speaker { .. } => Ok(()),
        }
    }
}

impl Handler for Talks {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let number = self.begin(conn.slot());
        cx.connection(conn).set_user(number);
        self.send(cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        match self.take(conn, &message) {
            Ok(()) => self.send(cx, conn),
            Err(why) => self.fail(cx, conn, why),
        }
        let part = self.part;
        if let (Part::Speaker { count }, Some(talk)) = (part, self.talk(conn)) {
            if talk.received >= count {
                cx.close(conn);
            }
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.send(cx, conn);
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: SendId, outcome: Outcome) {
        if !outcome.is_sent() {
            if let Some(talk) = self.talk(conn) {
                talk.lost.push(outcome);
            }
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        let (part, number) = (self.part, cx.connection(conn).user().unwrap_or(0));
        let peer = cx.connection(conn).peer_address().map_or_else(|| "?".into(), |peer| peer.to_string());
        let Some(talk) = self.talk(conn) else { return };
        let (received, sent, lost) = (talk.received, talk.sent, std::mem::take(&mut talk.lost));
        let expected = match part {
            Part::Speaker { count } | Part::Echo { count: Some(count) } => count,
            Part::Echo { count: None } => received,
        };
        let orderly = matches!(reason, DisconnectReason::Local { .. } | DisconnectReason::Closed);
        let why = talk.end().or_else(|| {
            // If a speaker has received an answer to each of its messages, all messages have arrived, even if the peer disconnected before
            // it acknowledged the last ones.
            let arrived = lost.is_empty() || matches!(part, Part::Speaker { .. });
            let complete = received == expected && sent == expected && arrived;
            (!complete || !orderly).then(|| {
                let first = match lost.first() {
                    Some(Outcome::Failed(failure)) => format!(" ({failure})"),
                    _ => String::new(),
                };
                let lost = lost.len();
                format!("{received} of {expected} received, {sent} sent, {lost} of them lost{first}; {reason}")
            })
        });
        match why {
            Some(why) => {
                self.failure.get_or_insert_with(|| Failure::new(format!("connection {number} with {peer}: {why}")));
            }
            None => {
                self.output
                    .line(format!("connection {number} with {peer}: {received} received, {sent} sent, {reason}"));
            }
        }
        self.ended += 1;
        if self.until.is_some_and(|until| self.ended >= until) {
            cx.stop();
        }
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        let peer = cx.connection(conn).peer_address().map_or_else(String::new, |peer| format!(" to {peer}"));
        self.failure.get_or_insert_with(|| Failure::new(format!("no connection{peer}: {error}")));
        cx.stop();
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let (ended, all) = (self.ended, self.began);
        let state = match self.last.map(|slot| &self.talks[slot]) {
            Some(last) => {
                format!("{ended} of {all} connections ended, the last: {} received, {} sent", last.received, last.sent)
            }
            None => "nobody connected".into(),
        };
        self.failure.get_or_insert_with(|| Failure::new(format!("it took longer than --timeout: {state}")));
        cx.stop();
    }
}

fn run(command: Command) -> Result<Ending, Failure> {
    let (talk, part) = match &command {
        Command::Server { speak_first: true, talk, .. } => {
            (talk.clone(), Part::Speaker { count: talk.count.unwrap_or(1) })
        }
        Command::Client { echo: false, talk, .. } => (talk.clone(), Part::Speaker { count: talk.count.unwrap_or(1) }),
        Command::Server { talk, .. } | Command::Client { talk, .. } => (talk.clone(), Part::Echo { count: talk.count }),
    };
    let (size, count) = match part {
        Part::Speaker { count } => (Some(talk.size.unwrap_or(SIZE)), Some(count)),
        Part::Echo { count } => (talk.size, count),
    };
    let mut talks = Talks {
        part,
        size,
        depth: talk.depth(count),
        text: (0..size.unwrap_or(0)).map(|i| i as u8 ^ 0x5a).collect(),
        verify: talk.verify,
        solicit: talk.solicit,
        talks: Vec::new(),
        last: None,
        began: 0,
        ended: 0,
        until: talk.connections,
        failure: None,
        output: Output::stdout(),
    };
    let mut reactor = Reactor::new(talk.config(count))?;
    Interrupt::on_signals()?.stops(reactor.handle());
    if let Some(seconds) = talk.timeout {
        reactor.context().timers().set(Duration::from_secs(seconds), 0);
    }
    match &command {
        Command::Server { bind, .. } => {
            let address = resolve(bind, talk.port)?[0];
            let mut cx = reactor.context();
            let listener = cx.listen_with(address, ListenOptions::new().framing(Framing::Raw))?;
            talks.output.line(format!("listening on {}", cx.listeners().local_address(listener).unwrap_or(address)));
        }
        Command::Client { address, .. } => {
            let address = resolve(address, talk.port)?[0];
            let connections = talk.connections.unwrap_or(1);
            talks.until = Some(connections);
            for _ in 0..connections {
                reactor.context().connect_with(address, ConnectOptions::new().framing(Framing::Raw))?;
            }
        }
    }
    reactor.run(&mut talks)?;
    match talks.failure {
        Some(failure) => Err(failure),
        None if talks.until.is_some_and(|until| talks.ended < until) => Ok(Ending::Interrupted),
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

    #[test]
    fn depth_follows_the_count() {
        let Command::Client { talk, .. } = Cli::parse_from(["raw-echo", "client", "h"]).command else { panic!() };
        assert_eq!([talk.depth(Some(10)), talk.depth(Some(10_000)), talk.depth(None)], [10, 4096, 64]);
    }

    #[test]
    fn a_connection_that_has_ended_keeps_no_echoes_and_the_counter_has_an_end() {
        let mut talk = Talk { sent: u32::MAX - 1, failure: Some("too fast".into()), ..Talk::default() };
        talk.waiting.extend([vec![0; 100], vec![0; 100]]);
        (0..2).for_each(|_| talk.count_sent());
        assert_eq!((talk.sent, talk.end().as_deref(), talk.waiting.capacity()), (u32::MAX, Some("too fast"), 0));
    }

    #[test]
    fn a_server_without_a_limit_keeps_the_state_of_current_connections_only() {
        let mut talks = Talks {
            part: Part::Echo { count: None },
            size: None,
            depth: DEPTH,
            text: Vec::new(),
            verify: false,
            solicit: None,
            talks: Vec::new(),
            last: None,
            began: 0,
            ended: 0,
            until: None,
            failure: None,
            output: Output::stdout(),
        };
        for number in 1..=1000 {
            // Two connections at a time: the slots are 0 and 1 in turn.
            let slot = number % 2;
            assert_eq!(talks.begin(slot), number as u64);
            let talk = &mut talks.talks[slot];
            assert_eq!((talk.received, &talk.failure), (0, &None), "nothing is left of an earlier connection");
            (talk.received, talk.failure) = (7, Some("too fast".into()));
        }
        assert_eq!((talks.talks.len(), talks.last, talks.began), (2, Some(0), 1000));
    }
}
