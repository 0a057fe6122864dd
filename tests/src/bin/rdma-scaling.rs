//! Measures the cost of connections: memory and processor time for each connection, on each side. The costs depend on the numbers of
//! connections and of reactors. The connections use the embedded provider over the loopback interface.
//!
//! - `rdma-scaling` prints the table of `docs/scaling.md`;
//! - `rdma-scaling one SETTINGS CONNECTIONS REACTORS` prints one row;
//! - `rdma-scaling active SETTINGS CONNECTIONS` measures the time of echoes on ten connections in two cases: a client has no other
//!   connections, or it has CONNECTIONS connections in total. The program alternates between the two cases, and prints both times;
//! - `rdma-scaling serve SETTINGS REACTORS` is the server of a row: it returns each message. For each line on its standard input, it prints
//!   its costs so far.
//!
//! Each side is a separate process. Memory and processor time are measured, because other work on the machine changes them little.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor, Reactors,
    SendErrorKind,
};
use rdma_reactor_tests::usage::resident_kib;

/// The number of echoes on each connection while a row of the table is measured.
const ECHOES: u32 = 4;
/// The length of a message, in bytes.
const SIZE: usize = 64;
/// The time limit of a row.
const LIMIT: Duration = Duration::from_secs(300);
/// The number of active connections in `active`.
const ACTIVE: usize = 10;
/// The number of rounds in `active`.
const ROUNDS: usize = 11;
/// The number of echoes on each active connection in a round of `active`.
const ROUND: u32 = 2000;
/// The time for which the processor time of idle connections is measured.
const IDLE: Duration = Duration::from_secs(3);

/// Returns the reactor settings that SETTINGS names.
fn config(settings: &str) -> std::result::Result<Config, String> {
    let usual = Config::default().provider(ProviderChoice::Iwarp).max_connections(20_000);
    let usual = usual.max_connections_per_host(20_000).max_pending(20_000);
    let usual =
        usual.timeouts(|t| t.connect = Duration::from_secs(60)).timeouts(|t| t.handshake = Duration::from_secs(60));
    // A limit far above the memory that the connections use. On TCP, pages that are not touched need no memory. An RDMA adapter would pin
    // all pages.
    let usual = usual.max_memory(64 << 30);
    match settings {
        "default" => Ok(usual),
        "small" => Ok(usual.receive_depth(8).send_depth(8).buffer_size(1024)),
        "shared" => Ok(usual.send_depth(8).buffer_size(1024).shared_receives(Some(32_768))),
        "shm" => Ok(usual.receive_depth(8).send_depth(8).buffer_size(1024).provider(ProviderChoice::Shm)),
        other => Err(format!("{other:?} are no settings: say default, small, shared or shm")),
    }
}

/// The memory and the processor time that a process has used so far.
#[derive(Clone, Copy, Debug)]
struct Cost {
    memory_kib: u64,
    cpu_ns: u64,
}

impl Cost {
    fn now() -> std::io::Result<Self> {
        let mut cpu_ns = 0;
        for task in std::fs::read_dir("/proc/self/task")? {
            let schedstat = std::fs::read_to_string(task?.path().join("schedstat"))?;
            cpu_ns += schedstat.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
        }
        Ok(Self { memory_kib: resident_kib()?, cpu_ns })
    }

    fn since(self, before: Self) -> Self {
        let memory_kib = self.memory_kib.saturating_sub(before.memory_kib);
        Self { memory_kib, cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns) }
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.memory_kib, self.cpu_ns)
    }
}

struct Echo;

impl Handler for Echo {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        // There is a credit for this send, because the server sends one message for each received message. If the send fails, the
        // connection is ending.
        let _ = cx.send(conn, &message);
    }
}

#[derive(Debug, Default)]
struct Client {
    connections: Vec<ConnectionId>,
    echoes: u64,
    failure: Option<String>,
}

impl Handler for Client {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.connections.push(conn);
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {
        self.echoes += 1;
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.failure.get_or_insert(error.to_string());
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.failure.get_or_insert(reason.to_string());
    }
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Runs the server of a row with `count` reactors. Returns when standard input has ended.
fn serve(settings: &str, count: usize) -> Result<()> {
    let settings = config(settings)?;
    let mut reactors =
        (0..count).map(|_| Reactor::new(settings.clone())).collect::<std::result::Result<Vec<_>, _>>()?;
    let group = Reactors::of(&mut reactors);
    let listener = reactors[0].context().listen(([127, 0, 0, 1], 0).into())?;
    println!("{}", reactors[0].context().listeners().local_address(listener).ok_or("the listener is closed")?);
    std::thread::scope(|scope| {
        for mut reactor in reactors {
            scope.spawn(move || reactor.run(&mut Echo).map_err(|error| eprintln!("rdma-scaling: {error}")));
        }
        for line in std::io::stdin().lines() {
            line?;
            println!("{}", Cost::now()?);
        }
        group.drain_all(Duration::from_millis(100));
        Ok(())
    })
}

/// The server's process.
struct Server {
    child: std::process::Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Server {
    fn start(settings: &str, reactors: usize) -> Result<(Self, SocketAddr)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["serve", settings, &reactors.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no pipe")?).lines();
        let address = lines.next().ok_or("the server does not start")??.parse()?;
        Ok((Self { child, lines }, address))
    }

    fn cost(&mut self) -> Result<Cost> {
        self.child.stdin.as_mut().ok_or("no pipe")?.write_all(b"\n")?;
        let line = self.lines.next().ok_or("the server has ended")??;
        let (memory, cpu) = line.split_once(' ').ok_or("no cost")?;
        Ok(Cost { memory_kib: memory.parse()?, cpu_ns: cpu.parse()? })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server ends when its standard input is closed.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Runs turns until `is_so` returns true. Fails if this takes longer than [`LIMIT`].
fn until(reactor: &mut Reactor, client: &mut Client, is_so: impl Fn(&Client) -> bool) -> Result<()> {
    let start = Instant::now();
    while !is_so(client) {
        reactor.turn(client, Duration::from_millis(100))?;
        if let Some(failure) = client.failure.take() {
            return Err(format!("after {} connections: {failure}", client.connections.len()).into());
        }
        if start.elapsed() > LIMIT {
            return Err(format!("not within {LIMIT:?}: {} connections", client.connections.len()).into());
        }
    }
    Ok(())
}

/// Measures one row of the table. Opens all connections at the same time, then sends echoes on all of them, then leaves them idle.
fn row(settings: &str, connections: usize, reactors: usize) -> Result<String> {
    let (mut server, address) = Server::start(settings, reactors)?;
    let (mut reactor, mut client) = (Reactor::new(config(settings)?)?, Client::default());
    let (here, there, start) = (Cost::now()?, server.cost()?, Instant::now());
    for _ in 0..connections {
        reactor.context().connect(address)?;
    }
    until(&mut reactor, &mut client, |client| client.connections.len() == connections)?;
    let took = start.elapsed();
    let (up_here, up_there) = (Cost::now()?.since(here), server.cost()?.since(there));
    let echoing = (Cost::now()?, server.cost()?);
    for echo in 1..=ECHOES {
        for place in 0..connections {
            let conn = client.connections[place];
            // With a small window, the credit for the next message may arrive after the echo of the last one. Until then the reactor
            // refuses the send, so the send is repeated.
            while let Err(error) = reactor.context().send(conn, &[7; SIZE]) {
                match error {
                    SendErrorKind::WouldBlock(_) => reactor.turn(&mut client, Duration::from_millis(10))?,
                    error => return Err(format!("{conn}: {error}").into()),
                };
            }
        }
        until(&mut reactor, &mut client, |client| client.echoes == u64::from(echo) * connections as u64)?;
    }
    let echoed = (Cost::now()?.since(echoing.0), server.cost()?.since(echoing.1));
    let after = (Cost::now()?.since(here), server.cost()?.since(there));
    let idle = server.cost()?;
    let quiet = Instant::now();
    while quiet.elapsed() < IDLE {
        reactor.turn(&mut client, Duration::from_millis(100))?;
    }
    let idle = server.cost()?.since(idle);
    let per = |value: u64| value as f64 / connections as f64;
    let per_echo = |cost: Cost| per(cost.cpu_ns) / f64::from(ECHOES) / 1e3;
    Ok(format!(
        "| {settings} | {reactors} | {connections} | {:.2} s | {:.0} us | {:.0} us | {:.1} KiB | {:.1} KiB | {:.1} us | {:.1} us | {:.3} % |",
        took.as_secs_f64(),
        per(up_here.cpu_ns) / 1e3,
        per(up_there.cpu_ns) / 1e3,
        per(after.0.memory_kib),
        per(after.1.memory_kib),
        per_echo(echoed.0),
        per_echo(echoed.1),
        idle.cpu_ns as f64 / IDLE.as_nanos() as f64 * 100.0,
    ))
}

/// A client, its connections, and the process of its server.
struct Side {
    reactor: Reactor,
    client: Client,
    _server: Server,
}

impl Side {
    fn new(settings: &str, connections: usize) -> Result<Self> {
        let (server, address) = Server::start(settings, 1)?;
        let (mut reactor, mut client) = (Reactor::new(config(settings)?)?, Client::default());
        for nth in 1..=connections {
            reactor.context().connect(address)?;
            // After every 1000 connects, waits until all of them are established: the system queues only a limited number of connects for a
            // listener.
            if nth % 1000 == 0 || nth == connections {
                until(&mut reactor, &mut client, |client| client.connections.len() == nth)?;
            }
        }
        Ok(Self { reactor, client, _server: server })
    }

    /// Returns the mean time of a round trip on the active connections, in microseconds.
    fn round(&mut self) -> Result<f64> {
        let Self { reactor, client, .. } = self;
        let start = Instant::now();
        for _ in 0..ROUND {
            for place in 0..ACTIVE {
                reactor.context().send(client.connections[place], &[7; SIZE])?;
            }
            let all = client.echoes + ACTIVE as u64;
            until(reactor, client, |client| client.echoes == all)?;
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUND))
    }
}

/// Measures echoes on ten active connections. Alternates between two clients: one has only these ten connections, the other has
/// `connections` connections, and all except for ten are idle. Returns the line with both times.
fn active(settings: &str, connections: usize) -> Result<String> {
    let (mut few, mut many) = (Side::new(settings, ACTIVE)?, Side::new(settings, connections)?);
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(few.round()?);
        beside.push(many.round()?);
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    };
    let (alone, beside) = (median(alone), median(beside));
    Ok(format!(
        "{settings}: {ACTIVE} echoes take {alone:.1} us alone, and {beside:.1} us on {ACTIVE} of {connections} connections: {:.2} times",
        beside / alone
    ))
}

fn table() -> Result<()> {
    println!(
        "| settings | reactors | connections | all up after | connect | accept | memory, client | memory, server | echo, client | echo, server | idle server |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    let many = [10, 100, 1_000, 10_000];
    let small = [1, 2].into_iter().flat_map(|reactors| many.map(|connections| ("small", connections, reactors)));
    let rows = [10, 100, 1_000, 2_000, 10_000].map(|connections| ("default", connections, 1)).into_iter().chain(small);
    for (settings, connections, reactors) in rows.chain([10, 100, 1_000, 2_000, 5_000].map(|n| ("shared", n, 1))) {
        // Each row is measured in a separate process, so that memory used by an earlier row does not count.
        let row = Command::new(std::env::current_exe()?)
            .args(["one", settings, &connections.to_string(), &reactors.to_string()])
            .output()?;
        print!("{}", String::from_utf8_lossy(&row.stdout));
        if !row.status.success() {
            return Err(String::from_utf8_lossy(&row.stderr).into());
        }
    }
    Ok(())
}

fn run() -> Result<()> {
    rlimit::increase_nofile_limit(1 << 16)?;
    let args: Vec<_> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => table(),
        ["serve", settings, reactors] => serve(settings, reactors.parse()?),
        ["one", settings, connections, reactors] => {
            println!("{}", row(settings, connections.parse()?, reactors.parse()?)?);
            Ok(())
        }
        ["active", settings, connections] => {
            println!("{}", active(settings, connections.parse()?)?);
            Ok(())
        }
        _ => Err(
            "say nothing, one SETTINGS CONNECTIONS REACTORS, active SETTINGS CONNECTIONS, or serve SETTINGS REACTORS"
                .into(),
        ),
    }
}

fn main() -> ExitCode {
    env_logger::init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rdma-scaling: {error}");
            ExitCode::FAILURE
        }
    }
}
