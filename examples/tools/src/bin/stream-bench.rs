//! Measures latency and throughput of byte streams, as librdmacm's `rstream` does for sockets. The options and the table are those of
//! `rstream`. One side runs `stream-bench`, the other one `stream-bench -s ADDR`.
//!
//! An iteration is a burst of transfers one way, then as many the other way. A burst of one transfer is a ping-pong. Both sides copy
//! the bytes into and out of their own memory, as a program with sockets does.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::io::{ErrorKind, Read, Write};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use rdma_reactor::stream::{StreamContext, StreamHandler, Streams};
use rdma_reactor::{Config, ConnectError, ConnectionId, DisconnectReason, Reactor};
use rdma_reactor_tools::pingpong::address::resolve;
use rdma_reactor_tools::pingpong::cli::{Provider, parse_size};
use rdma_reactor_tools::pingpong::failure::{Ending, Failure};
use rdma_reactor_tools::pingpong::interrupt::Interrupt;
use rdma_reactor_tools::pingpong::job::WaitMode;
use rdma_reactor_tools::pingpong::output::Output;
use rdma_reactor_tools::program;

/// The length in bytes of the message that a client sends before each test. The message has the transfer size, the number of transfers and
/// the number of iterations.
const JOB_LEN: usize = 24;
/// The largest number of bytes in a burst. The server refuses clients that request more.
const MAX_BURST: u64 = 1 << 40;
/// The largest memory of one side of a stream, in bytes. Longer transfers use it several times. Otherwise, each client could make the
/// server allocate 1 GiB by one short message.
const MAX_MEMORY: u64 = 4 << 20;

/// Measures latency and throughput of byte streams between two processes; without -s, the program is the server.
// local: arguments of the program
#[derive(Debug, Parser)]
#[command(name = "stream-bench", version)]
struct Cli {
    /// The server's host name or address, with or without a port
    #[arg(short = 's', value_name = "ADDR")]
    server: Option<String>,
    /// Address to listen on
    #[arg(short = 'b', value_name = "ADDR", default_value = "0.0.0.0")]
    bind: String,
    /// The port
    #[arg(short = 'p', value_name = "PORT", default_value_t = 7471)]
    port: u16,
    /// Iterations of each test [default: fewer for larger transfers]
    #[arg(short = 'I', value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    iterations: Option<u64>,
    /// Transfers per iteration and direction; 1 measures latency [default: 1, then many]
    #[arg(short = 'C', value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    transfers: Option<u64>,
    /// Bytes per transfer [default: 64, then 64K]
    #[arg(short = 'S', value_name = "BYTES", value_parser = parse_size)]
    size: Option<u32>,
    /// A server: end after this many clients [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    clients: Option<u32>,
    /// Bytes per message that carries a stream
    #[arg(long, value_name = "BYTES", value_parser = parse_size, default_value = "16K")]
    message: u32,
    /// Wait mode of the local side [default: spin with two processors or more, else event]
    #[arg(long, value_enum)]
    wait: Option<WaitMode>,
    /// RDMA devices (verbs), the embedded provider (iwarp), or whichever exists
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    provider: Provider,
}

/// The parameters of one test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Job {
    size: u64,
    transfers: u64,
    iterations: u64,
}

impl Job {
    fn encode(self) -> [u8; JOB_LEN] {
        let mut out = [0; JOB_LEN];
        for (part, value) in out.chunks_exact_mut(8).zip([self.size, self.transfers, self.iterations]) {
            part.copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    /// Decodes the parameters that a client sends. Returns `None` if they are out of range.
    fn decode(bytes: &[u8; JOB_LEN]) -> Option<Self> {
        let word = |i: usize| bytes[i * 8..].first_chunk().map(|word| u64::from_le_bytes(*word));
        let job = Self { size: word(0)?, transfers: word(1)?, iterations: word(2)? };
        let burst = job.size.checked_mul(job.transfers)?;
        let sane = (1..=1 << 30).contains(&job.size) && (1..=MAX_BURST).contains(&burst) && job.iterations > 0;
        sane.then_some(job)
    }

    const fn burst(self) -> u64 {
        self.size * self.transfers
    }

    /// Makes the memory that a side sends from and receives into.
    fn memory(self) -> Vec<u8> {
        vec![0x5a; self.size.min(MAX_MEMORY) as usize]
    }

    /// Returns the default number of iterations of a test. All tests transfer about the same number of bytes, unless the number of
    /// iterations would be too small or too large.
    fn iterations(size: u64, transfers: u64) -> u64 {
        let bytes = if transfers == 1 { 64 << 20 } else { 256 << 20 };
        (bytes / (size * transfers)).clamp(10, if transfers == 1 { 20_000 } else { 500 })
    }

    fn all(cli: &Cli) -> Vec<Self> {
        let sizes = cli.size.map_or_else(|| vec![64, 64 << 10], |size| vec![u64::from(size)]);
        let mut jobs = Vec::new();
        for size in sizes {
            let many = (16_u64 << 20).div_ceil(size).min(1000);
            for transfers in cli.transfers.map_or_else(|| vec![1, many], |transfers| vec![transfers]) {
                let iterations = cli.iterations.unwrap_or_else(|| Self::iterations(size, transfers));
                jobs.push(Self { size, transfers, iterations });
            }
        }
        jobs
    }
}

/// The step that a side must finish next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The server waits for the parameters of the next test. `have` is the number of bytes received so far.
    Ask { have: usize },
    /// The number of bytes of this burst that must still be sent.
    Send(u64),
    /// The number of bytes of this burst that must still arrive.
    Receive(u64),
}

/// The state of one side of a stream.
// bound: tool-clients
#[derive(Debug)]
struct Side {
    active: bool,
    step: Step,
    asked: [u8; JOB_LEN],
    job: Job,
    /// The number of iterations that remain.
    left: u64,
    memory: Vec<u8>,
}

/// The result of [`Side::go`].
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    Waits,
    /// All iterations of the test are done.
    Done,
    /// The peer has ended the stream.
    Ended,
}

impl Side {
    fn server() -> Self {
        let job = Job { size: 1, transfers: 1, iterations: 1 };
        Self { active: false, step: Step::Ask { have: 0 }, asked: [0; JOB_LEN], job, left: 0, memory: Vec::new() }
    }

    fn client(job: Job) -> Self {
        let (left, memory) = (job.iterations, job.memory());
        Self { active: true, step: Step::Send(job.burst()), asked: [0; JOB_LEN], job, left, memory }
    }

    /// Sends and receives until the test is done, the stream would block, or the peer has ended the stream. Returns which of these
    /// happened.
    fn go(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) -> Result<Progress, Failure> {
        let mut stream = cx.stream(id);
        loop {
            let size = self.memory.len() as u64;
            let moved = match self.step {
                Step::Ask { have } => stream.read(&mut self.asked[have..]),
                Step::Send(left) => stream.write(&self.memory[..size.min(left) as usize]),
                Step::Receive(left) => stream.read(&mut self.memory[..size.min(left) as usize]),
            };
            let moved = match moved {
                Ok(0) => return Ok(Progress::Ended),
                Ok(moved) => moved,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Progress::Waits),
                Err(error) => return Err(Failure::new(error)),
            };
            self.step = match self.step {
                Step::Ask { have } if have + moved < JOB_LEN => Step::Ask { have: have + moved },
                Step::Ask { .. } => {
                    self.job = Job::decode(&self.asked).ok_or_else(|| Failure::new("the client sent no valid job"))?;
                    (self.left, self.memory) = (self.job.iterations, self.job.memory());
                    Step::Receive(self.job.burst())
                }
                Step::Send(left) if left > moved as u64 => Step::Send(left - moved as u64),
                Step::Receive(left) if left > moved as u64 => Step::Receive(left - moved as u64),
                Step::Send(_) if self.active => Step::Receive(self.job.burst()),
                Step::Receive(_) if !self.active => Step::Send(self.job.burst()),
                // The bursts in both directions are done, so the iteration is done.
                Step::Send(_) | Step::Receive(_) => {
                    self.left -= 1;
                    match (self.left, self.active) {
                        (0, true) => return Ok(Progress::Done),
                        (0, false) => Step::Ask { have: 0 },
                        (_, true) => Step::Send(self.job.burst()),
                        (_, false) => Step::Receive(self.job.burst()),
                    }
                }
            };
        }
    }
}

/// The server, with the state of its clients' streams.
// bound: tool-clients
#[derive(Debug)]
struct Server {
    sides: Vec<Option<Side>>,
    /// The number of clients after which the server ends; `None` for no limit.
    clients: Option<u32>,
}

impl Server {
    fn go(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let Some(side) = self.sides.get_mut(id.slot()).and_then(Option::as_mut) else { return };
        match side.go(cx, id) {
            Ok(Progress::Waits | Progress::Done) => {}
            Ok(Progress::Ended) => cx.stream(id).close(),
            Err(failure) => {
                eprintln!("stream-bench: {id}: {failure}");
                cx.stream(id).close();
            }
        }
    }

    fn over(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.sides[id.slot()] = None;
        self.clients = self.clients.map(|clients| clients.saturating_sub(1));
        if self.clients == Some(0) {
            cx.context().stop();
        }
    }
}

impl StreamHandler for Server {
    fn on_open(&mut self, _: &mut StreamContext<'_>, id: ConnectionId) {
        if self.sides.len() <= id.slot() {
            self.sides.resize_with(id.slot() + 1, || None);
        }
        self.sides[id.slot()] = Some(Side::server());
    }

    fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.go(cx, id);
    }

    fn on_writable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.go(cx, id);
    }

    fn on_close(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.over(cx, id);
    }

    fn on_error(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, reason: DisconnectReason) {
        eprintln!("stream-bench: {id}: {reason}");
        self.over(cx, id);
    }
}

/// The client, with its tests.
#[derive(Debug)]
struct Client {
    jobs: std::vec::IntoIter<Job>,
    side: Option<Side>,
    /// True during the warm-up before each test. A warm-up has a tenth of the iterations, and is
    /// not reported.
    warming: bool,
    since: Instant,
    failure: Option<Failure>,
    output: Output,
}

impl Client {
    fn start(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let Some(next) = self.jobs.as_slice().first().copied() else { return cx.stream(id).close() };
        let iterations = if self.warming { (next.iterations / 10).max(1) } else { next.iterations };
        let job = Job { iterations, ..next };
        if !self.warming {
            self.jobs.next();
        }
        match cx.stream(id).write(&job.encode()) {
            Ok(JOB_LEN) => {}
            // The stream has not accepted the whole request. Nothing is in flight between tests, so the peer's window is open. The only
            // possible cause is that the stream is ending.
            other => return self.fail(cx, id, Failure::new(format!("a test could not be requested: {other:?}"))),
        }
        self.since = Instant::now();
        self.side = Some(Side::client(job));
        self.go(cx, id);
    }

    fn go(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let Some(side) = &mut self.side else { return };
        match side.go(cx, id) {
            Ok(Progress::Waits) => {}
            Ok(Progress::Done) => {
                let job = side.job;
                self.side = None;
                self.warming = !self.warming;
                // `warming` already describes the next run. If that is a warm-up, the ended run was
                // a test, which is reported.
                if self.warming {
                    self.output.line(row(job, self.since.elapsed().as_secs_f64()));
                }
                self.start(cx, id);
            }
            Ok(Progress::Ended) => self.fail(cx, id, Failure::new("the server has ended the connection")),
            Err(failure) => self.fail(cx, id, failure),
        }
    }

    fn fail(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, failure: Failure) {
        self.failure.get_or_insert(failure);
        cx.stream(id).close();
    }
}

impl StreamHandler for Client {
    fn on_open(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.output.line(format!(
            "{:<10} {:>8} {:>8} {:>8} {:>12} {:>10} {:>10} {:>11}",
            "name", "bytes", "xfers", "iters", "total", "time", "Gb/sec", "usec/xfer"
        ));
        self.start(cx, id);
    }

    fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.go(cx, id);
    }

    fn on_writable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.go(cx, id);
    }

    fn on_close(&mut self, cx: &mut StreamContext<'_>, _: ConnectionId) {
        cx.context().stop();
    }

    fn on_error(&mut self, cx: &mut StreamContext<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.failure.get_or_insert(Failure::new(format!("the connection has ended: {reason}")));
        cx.context().stop();
    }

    fn on_connect_error(&mut self, cx: &mut StreamContext<'_>, _: ConnectionId, error: ConnectError) {
        self.failure.get_or_insert(Failure::no_connection(&error, "`stream-bench`"));
        cx.context().stop();
    }
}

/// Formats a line of the table. As in rstream, the transfers of both directions are counted, so an iteration has twice `job.transfers`
/// transfers.
fn row(job: Job, seconds: f64) -> String {
    let transfers = 2.0 * job.transfers as f64 * job.iterations as f64;
    let bytes = transfers * job.size as f64;
    format!(
        "{:<10} {:>8} {:>8} {:>8} {:>12} {:>9.3}s {:>10.3} {:>11.3}",
        format!("{}_{}", job.size, if job.transfers == 1 { "lat" } else { "bw" }),
        job.size,
        job.transfers,
        job.iterations,
        bytes,
        seconds,
        bytes * 8.0 / 1e9 / seconds,
        seconds * 1e6 / transfers
    )
}

fn run(cli: &Cli) -> Result<Ending, Failure> {
    let jobs = Job::all(cli);
    if let Some(Job { size, transfers, .. }) = jobs.iter().find(|job| job.burst() > MAX_BURST) {
        let cure = format!("give at most {MAX_BURST} bytes per iteration and direction");
        return Err(Failure::new(format!("-S {size} and -C {transfers}: {cure}")));
    }
    let config = Config::default()
        .provider(cli.provider.into())
        .wait(cli.wait.unwrap_or_else(WaitMode::suited).policy()?)
        .buffer_size(cli.message);
    let mut reactor = Reactor::new(config)?;
    Interrupt::on_signals()?.stops(reactor.handle());
    let Some(server) = &cli.server else {
        let listener = reactor.context().listen(resolve(&cli.bind, cli.port)?[0])?;
        if let Some(address) = reactor.context().listeners().local_address(listener) {
            Output::stdout().line(format!("listening on {address}"));
        }
        let mut server = Streams::new(Server { sides: Vec::new(), clients: cli.clients });
        reactor.run(&mut server)?;
        let is_early = server.handler.clients.is_some_and(|left| left > 0);
        return Ok(if is_early { Ending::Interrupted } else { Ending::Complete });
    };
    reactor.context().connect(resolve(server, cli.port)?[0])?;
    let (jobs, output) = (jobs.into_iter(), Output::stdout());
    let mut client =
        Streams::new(Client { jobs, side: None, warming: true, since: Instant::now(), failure: None, output });
    reactor.run(&mut client)?;
    match client.handler.failure {
        Some(failure) => Err(failure),
        // `side` is `Some` if the last test has not ended.
        None if client.handler.jobs.len() > 0 || client.handler.side.is_some() => Ok(Ending::Interrupted),
        None => Ok(Ending::Complete),
    }
}

fn main() -> ExitCode {
    program::main(std::env::args_os(), |cli: Cli| run(&cli))
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
    fn a_job_survives_the_trip_and_nonsense_does_not() {
        let job = Job { size: 65_536, transfers: 1000, iterations: 7 };
        assert_eq!(Job::decode(&job.encode()), Some(job));
        for nonsense in [
            Job { size: 0, ..job },
            Job { transfers: 0, ..job },
            Job { iterations: 0, ..job },
            Job { size: 1 << 31, ..job },
            Job { size: 1 << 30, transfers: u64::MAX, ..job },
        ] {
            assert_eq!(Job::decode(&nonsense.encode()), None, "{nonsense:?}");
        }
    }

    #[test]
    fn the_memory_of_a_stream_has_a_limit() {
        let memory = |size| Job { size, transfers: 1, iterations: 1 }.memory().len();
        assert_eq!([memory(1), memory(65_536), memory(1 << 30)], [1, 65_536, 4 << 20]);
    }

    #[test]
    fn a_row_counts_transfers_one_way() {
        let row = row(Job { size: 1000, transfers: 10, iterations: 50 }, 0.001);
        let fields: Vec<_> = row.split_whitespace().collect();
        assert_eq!(fields, ["1000_bw", "1000", "10", "50", "1000000", "0.001s", "8.000", "1.000"]);
    }
}
