//! A client of Valkey over RDMA. `valkey-rdma ADDR COMMAND...` sends one command. `valkey-rdma ADDR` writes values, reads them back and
//! compares them.
//!
//! This program is an example to read and copy. It shows how to use raw framing for the protocol of another program.
//! `rdma_reactor_tools::valkey` describes this protocol.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use rdma_reactor::transport::iwarp::CrcPolicy;
use rdma_reactor::{
    Config, ConnectError, ConnectOptions, ConnectionId, Context, DisconnectReason, Error, Framing, Handler, Immediate,
    Message, Outcome, Reactor, SendId, TimerId,
};
use rdma_reactor_tools::pingpong::address::resolve;
use rdma_reactor_tools::pingpong::cli::{Provider, parse_size};
use rdma_reactor_tools::pingpong::failure::{Ending, Failure};
use rdma_reactor_tools::pingpong::interrupt::Interrupt;
use rdma_reactor_tools::pingpong::output::Output;
use rdma_reactor_tools::program;
use rdma_reactor_tools::text::shown;
use rdma_reactor_tools::valkey::command::{self, ValkeyCommand};
use rdma_reactor_tools::valkey::link::ValkeyLink;
use rdma_reactor_tools::valkey::resp::{Answer, Answers, request};
use rdma_reactor_tools::valkey::{MAX_PIPELINE, RECEIVES};

/// The length of the queue of unwritten bytes from which on the client adds no more requests, in
/// bytes.
const AHEAD: usize = 1 << 20;
/// The largest number of keys that the server holds at a time.
const KEYS: u64 = 1000;
/// The largest total length of the values that the server holds at a time, in bytes. If a single value is longer, the server holds only
/// that one.
const VALUES: u64 = 64 << 20;
/// The time between two keepalives. `valkey-server` uses the same time.
const KEEPALIVE: Duration = Duration::from_secs(3);
/// The token of the timer that ends the program at its time limit.
const TOO_LATE: u64 = 0;
/// The token of the timer that sends a keepalive.
const STILL_HERE: u64 = 1;

/// Sends a command to a valkey-server over RDMA; or sets values there, gets them and compares them.
// local: arguments of the program
#[derive(Debug, Parser)]
#[command(name = "valkey-rdma", version)]
struct Cli {
    /// The server's host name or address, with or without a port
    #[arg(value_name = "ADDR")]
    address: String,
    /// A command and its arguments [default: set values and get them]
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
    /// The port
    #[arg(short, long, default_value_t = 6379)]
    port: u16,
    /// Values to set and to get
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    count: u64,
    /// Bytes of a value
    #[arg(short, long, value_name = "S", default_value = "64", value_parser = parse_size)]
    size: u32,
    /// Number of requests in flight
    #[arg(short = 'P', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=MAX_PIPELINE))]
    pipeline: u64,
    /// Bytes that the server may write before it waits for the client
    #[arg(long, value_name = "S", default_value = "1M", value_parser = parse_size)]
    buffer: u32,
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

/// A step of the run: one request and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Command,
    Ping,
    /// Deletes all keys that an earlier run may have left.
    Clear,
    /// Sets the value of a key.
    Set(u64),
    Get(u64),
    /// Deletes all keys. The server's answer must be the number of keys that were set.
    End,
}

/// The work of a run: one command, or a series of values to set and get.
// local: arguments of the program
#[derive(Debug)]
struct Work {
    command: Vec<String>,
    count: u64,
    keys: u64,
    value: Vec<u8>,
}

impl Work {
    fn of(cli: &Cli) -> Self {
        let keys = (VALUES / u64::from(cli.size)).clamp(1, KEYS).min(cli.count);
        Self { command: cli.command.clone(), count: cli.count, keys, value: vec![0; cli.size as usize] }
    }

    fn steps(&self) -> u64 {
        if self.command.is_empty() { 2 * self.count + 3 } else { 1 }
    }

    fn step(&self, number: u64) -> Step {
        let (sets, gets) = (2, 2 + self.count);
        match number {
            _ if !self.command.is_empty() => Step::Command,
            0 => Step::Ping,
            1 => Step::Clear,
            _ if number < gets => Step::Set((number - sets) % self.keys),
            _ if number < gets + self.count => Step::Get((number - gets) % self.keys),
            _ => Step::End,
        }
    }

    /// Returns true if the step `number` is the first step of a part of the run. The parts are: setting the values, getting them, and
    /// deleting the keys. A part begins only after all answers to the previous part have arrived.
    fn begins_part(&self, number: u64) -> bool {
        self.command.is_empty() && [2, 2 + self.count, 2 + 2 * self.count].contains(&number)
    }

    /// Fills `self.value` with the value of this key.
    fn fill(&mut self, key: u64) {
        self.value.iter_mut().enumerate().for_each(|(at, byte)| *byte = (key as usize * 7 + at + at / 251) as u8);
    }

    fn request(&mut self, number: u64, out: &mut VecDeque<u8>) {
        let name = |key: u64| format!("rdma-reactor:{key}").into_bytes();
        match self.step(number) {
            Step::Command => request(out, &self.command),
            Step::Ping => request(out, &["PING"]),
            Step::Clear | Step::End => {
                let names = (0..self.keys).map(name);
                request(out, &[b"DEL".to_vec()].into_iter().chain(names).collect::<Vec<_>>());
            }
            Step::Set(key) => {
                self.fill(key);
                request(out, &[&b"SET"[..], &name(key), &self.value]);
            }
            Step::Get(key) => request(out, &[&b"GET"[..], &name(key)]),
        }
    }

    /// Checks the answer of a step. Returns the text to print, or `None` if there is nothing to print.
    fn check(&mut self, number: u64, answer: Answer) -> Result<Option<String>, String> {
        match (self.step(number), answer) {
            (_, Answer::Error(error)) => Err(format!("the server refuses: {}", shown(&error))),
            (Step::Command, answer) => Ok(Some(text(&answer))),
            (Step::Ping, Answer::Simple(pong)) if pong == "PONG" => Ok(None),
            (Step::Clear, Answer::Integer(_)) => Ok(None),
            (Step::Set(_), Answer::Simple(ok)) if ok == "OK" => Ok(None),
            (Step::Get(key), Answer::Bulk(bytes)) => {
                self.fill(key);
                if bytes == self.value { Ok(None) } else { Err(format!("value {key} is not what was set")) }
            }
            (Step::End, Answer::Integer(deleted)) if deleted == self.keys as i64 => Ok(None),
            (step, answer) => {
                let words: String = text(&answer).chars().take(100).collect();
                Err(format!("the server answers to {step:?}: {words}"))
            }
        }
    }
}

/// Formats an answer for people, with each element of an array on its own line.
fn text(answer: &Answer) -> String {
    match answer {
        Answer::Simple(text) => shown(text),
        Answer::Error(text) => format!("(error) {}", shown(text)),
        Answer::Integer(number) => number.to_string(),
        Answer::Bulk(bytes) => String::from_utf8_lossy(bytes).split('\n').map(shown).collect::<Vec<_>>().join("\n"),
        Answer::Null => "(nil)".into(),
        Answer::Array(items) => items.iter().map(text).collect::<Vec<_>>().join("\n"),
    }
}

// local: requests in flight of the program
#[derive(Debug)]
struct Client {
    /// Addresses of the server that were not tried yet.
    addresses: std::vec::IntoIter<SocketAddr>,
    buffer: usize,
    pipeline: u64,
    link: Option<ValkeyLink>,
    answers: Answers,
    work: Work,
    /// The number of steps whose requests are queued or sent.
    begun: u64,
    /// The number of steps whose answers were checked.
    done: u64,
    /// The time at which each part of the run began.
    parts: Vec<Instant>,
    failure: Option<Failure>,
    output: Output,
}

impl Client {
    /// Connects to the next address. Returns `None` if every address was tried, and otherwise the result of the call of `connect_with`.
    fn connect(&mut self, cx: &mut Context<'_>) -> Option<Result<ConnectionId, Error>> {
        // Valkey's protocol has no headers and no credits. It uses writes with immediate data, so the connection must allow this
        // extension.
        let options = ConnectOptions::new().framing(Framing::Raw).extensions(true);
        self.addresses.next().map(|address| cx.connect_with(address, options))
    }

    fn fail(&mut self, cx: &mut Context<'_>, why: impl std::fmt::Display) {
        self.failure.get_or_insert_with(|| Failure::new(why));
        match &self.link {
            Some(link) => cx.close(link.conn()),
            None => cx.stop(),
        }
    }

    /// Calls `run` with the connection's link, and then `proceed`. Does nothing if there is no connection. If one of these calls fails, the
    /// program fails.
    fn with(
        &mut self,
        cx: &mut Context<'_>,
        run: impl FnOnce(&mut ValkeyLink, &mut Context<'_>, &mut Answers) -> Result<(), String>,
    ) {
        let done = self.link.as_mut().map_or(Ok(()), |link| run(link, cx, &mut self.answers));
        if let Err(why) = done.and_then(|()| self.proceed(cx)) {
            self.fail(cx, why);
        }
    }

    /// Checks the answers that have arrived, and sends as many requests as the limits allow.
    fn proceed(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        let Some(link) = &mut self.link else { return Ok(()) };
        while let Some(answer) = self.answers.next_answer().map_err(|why| format!("the server sends {why}"))? {
            if self.done == self.begun {
                return Err("the server sends an answer without a request".into());
            }
            if let Some(text) = self.work.check(self.done, answer)? {
                self.output.line(text);
            }
            self.done += 1;
        }
        if self.done == self.work.steps() {
            cx.close(link.conn());
            return Ok(());
        }
        while self.begun < self.work.steps() && self.begun - self.done < self.pipeline && link.out().len() < AHEAD {
            if self.work.begins_part(self.begun) {
                if self.done < self.begun {
                    break;
                }
                self.parts.push(cx.now());
            }
            self.work.request(self.begun, link.out());
            self.begun += 1;
        }
        link.flush(cx)
    }
}

impl Handler for Client {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        match ValkeyLink::open(cx, conn, self.buffer) {
            Ok(link) => self.link = Some(link),
            Err(why) => return self.fail(cx, why),
        }
        cx.timers().set(KEEPALIVE, STILL_HERE);
        self.with(cx, |_, _, _| Ok(()));
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.with(cx, |link, cx, _| link.on_command(cx, &message));
    }

    fn on_immediate(&mut self, cx: &mut Context<'_>, _: ConnectionId, immediate: Immediate) {
        self.with(cx, |link, cx, answers| link.on_immediate(cx, immediate, answers.input()));
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, _: ConnectionId, id: SendId, outcome: Outcome) {
        self.with(cx, |link, cx, _| link.on_send_complete(cx, id, outcome));
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, _: ConnectionId) {
        self.with(cx, |_, _, _| Ok(()));
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        let (done, steps) = (self.done, self.work.steps());
        if done < steps {
            self.fail(cx, format!("the connection ended after {done} of {steps} answers: {reason}"));
        }
        cx.stop();
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        let server = cx.connection(conn).peer_address().map_or_else(String::new, |address| format!(" to {address}"));
        match self.connect(cx) {
            Some(Ok(_)) => {}
            Some(Err(error)) => self.fail(cx, error),
            None => {
                self.fail(
                    cx,
                    format!(
                        "no connection{server}: {error}; does valkey-server listen for RDMA there? check ADDR and -p"
                    ),
                );
            }
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, what: u64) {
        if what == STILL_HERE && self.link.is_some() {
            cx.timers().set(KEEPALIVE, STILL_HERE);
            self.with(cx, |link, cx, _| link.command(cx, ValkeyCommand::Keepalive));
        } else if what == TOO_LATE {
            let (done, steps) = (self.done, self.work.steps());
            let why = format!("it took longer than --timeout: {done} of {steps} answers");
            self.failure.get_or_insert_with(|| Failure::new(why));
            cx.stop();
        }
    }
}

fn run(cli: Cli) -> Result<Ending, Failure> {
    // The buffers are larger than a command. So a command that is too long still arrives, and the program can report its wrong length.
    let config = Config::default()
        .provider(cli.provider.into())
        .buffer_size(2 * command::LEN as u32)
        .receive_depth(RECEIVES)
        .iwarp(|i| i.crc = if cli.no_crc { CrcPolicy::Off } else { CrcPolicy::default() });
    let mut reactor = Reactor::new(config)?;
    let interrupt = Interrupt::on_signals()?;
    interrupt.stops(reactor.handle());
    if let Some(seconds) = cli.timeout {
        reactor.context().timers().set(Duration::from_secs(seconds), TOO_LATE);
    }
    let mut client = Client {
        addresses: resolve(&cli.address, cli.port)?.into_iter(),
        buffer: cli.buffer as usize,
        pipeline: cli.pipeline,
        link: None,
        answers: Answers::default(),
        work: Work::of(&cli),
        begun: 0,
        done: 0,
        parts: Vec::new(),
        failure: None,
        output: Output::stdout(),
    };
    if let Some(connected) = client.connect(&mut reactor.context()) {
        connected?;
    }
    reactor.run(&mut client)?;
    // After an interrupt, the shutdown ends the connection early, and `on_disconnect` records this as a failure, although it is none. So
    // the failure of the run is saved before the shutdown.
    let failure = client.failure.take();
    reactor.shutdown(&mut client, Duration::from_secs(1))?;
    let interrupted = client.done < client.work.steps();
    match (failure, &client.parts[..]) {
        (Some(failure), _) => return Err(failure),
        (None, [set, get, end]) => {
            let rate = |from: &Instant, to: &Instant| cli.count as f64 / to.duration_since(*from).as_secs_f64();
            let (count, size, provider) = (cli.count, cli.size, reactor.provider_name());
            let (sets, gets) = (rate(set, get), rate(get, end));
            let offers = client.link.as_ref().map_or(0, ValkeyLink::offers);
            client.output.line(format_args!(
                "{count} values of {size} bytes, all as they were set: {sets:.0} SET/s, {gets:.0} GET/s, {offers} offers of the buffer \
                 ({provider})"
            ));
        }
        _ => {}
    }
    Ok(if interrupted { Ending::Interrupted } else { Ending::Complete })
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
