//! A long run of a server with many clients, on the embedded provider over the loopback interface. During the run, clients are killed, are
//! stopped, or drop their connections. Every message has a number, so that lost and duplicated messages are detected.
//!
//! - `rdma-endurance echo CONNECTIONS SECONDS EVERY`: 20 clients open CONNECTIONS connections in total. For SECONDS seconds, they send
//!   messages on all of these connections, and the server returns each message. A fault is injected every EVERY seconds;
//! - `rdma-endurance cycles COUNT`: opens COUNT connections sequentially. The server returns one message on each;
//! - `rdma-endurance serve` and `rdma-endurance client ADDRESS CONNECTIONS CYCLES`: the server and a client, which the commands above
//!   start.
//!
//! The exit status is 1 if a message is lost or duplicated, or if memory or descriptors grow.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a program, not the library")]

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor, TimerId,
};
use rdma_reactor_tests::usage::{descriptors, resident_kib};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The number of client processes.
const CLIENTS: usize = 20;
/// The shortest time of the fault that stops a client for long. It exceeds the keepalive timeout,
/// so the connections of the stopped client end.
const LONG: Duration = Duration::from_secs(20);
/// The length of a message, in bytes. The first eight bytes of a message are its number.
const SIZE: usize = 64;
/// The number of messages that a client has in flight on each connection.
const WINDOW: u64 = 3;
/// The number of connections that are open at the same time in `cycles`.
const AT_ONCE: u64 = 16;
/// The time that a client waits after a connection has failed or ended, before it opens the next one.
const AGAIN: Duration = Duration::from_millis(200);
/// The time limit within which the clients must restore all connections after a fault, or close all connections at the end.
const PATIENCE: Duration = Duration::from_secs(120);
/// The tolerated growth of a process's memory between two reports that [`flat`] compares, in KiB. Pools and lists grow in steps, and the
/// kernel uses huge pages.
const SLACK_KIB: u64 = 4096;

fn config() -> Config {
    Config::default()
        .provider(ProviderChoice::Iwarp)
        .max_connections(20_000)
        .max_pending(20_000)
        .timeouts(|t| t.connect = Duration::from_secs(60))
        .timeouts(|t| t.handshake = Duration::from_secs(60))
        .max_memory(16 << 30)
        .receive_depth(8)
        .send_depth(8)
        .buffer_size(256)
}

/// The state of one process. It is sent between the processes as a line of text.
#[derive(Clone, Copy, Debug, Default)]
struct Report {
    live: u64,
    begun: u64,
    ended: u64,
    messages: u64,
    /// The number of messages whose number was not the expected one.
    wrong: u64,
    /// The number of messages that were not answered, although the client closed their connection gracefully.
    lost: u64,
    resident_kib: u64,
    descriptors: u64,
}

impl Report {
    /// Returns this report with the current memory, the current number of descriptors, and `live` as the number of open connections.
    fn now(self, live: usize) -> Self {
        let (resident_kib, descriptors) = (resident_kib().unwrap_or(0), descriptors().unwrap_or(0) as u64);
        Self { live: live as u64, resident_kib, descriptors, ..self }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { live, begun, ended, messages, wrong, lost, resident_kib, descriptors } = self;
        write!(f, "{live} {begun} {ended} {messages} {wrong} {lost} {resident_kib} {descriptors}")
    }
}

impl FromStr for Report {
    type Err = Box<dyn Error>;

    fn from_str(line: &str) -> Result<Self> {
        let numbers = line.split(' ').map(str::parse).collect::<std::result::Result<Vec<u64>, _>>()?;
        let [live, begun, ended, messages, wrong, lost, resident_kib, descriptors] = numbers[..] else {
            return Err(format!("no report: {line}").into());
        };
        Ok(Self { live, begun, ended, messages, wrong, lost, resident_kib, descriptors })
    }
}

/// An order to a process. It arrives as a line of the process's standard input.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Print the current report.
    Report,
    /// Drop all connections without closing them, and open new ones.
    Flap,
    /// Wait for all answers, then close all connections.
    Finish,
    /// Standard input has ended.
    Stop,
}

impl Order {
    fn parse(line: &str) -> Option<Self> {
        match line {
            "report" => Some(Self::Report),
            "flap" => Some(Self::Flap),
            "finish" => Some(Self::Finish),
            _ => None,
        }
    }
}

/// Runs a reactor, and carries out the orders on standard input. Returns when standard input has ended.
fn obey(mut reactor: Reactor<Order>, handler: &mut impl Handler<Order>) -> Result<()> {
    let remote = reactor.handle();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(std::result::Result::ok) {
            let order = Order::parse(&line).unwrap_or_else(|| panic!("{line}: no order"));
            if remote.post(order).is_err() {
                return;
            }
        }
        let _ = remote.post(Order::Stop);
    });
    reactor.run(handler)?;
    reactor.shutdown(handler, Duration::from_secs(1))?;
    Ok(())
}

/// Returns the number that a message carries, or `None` if its bytes are inconsistent.
fn number(message: &[u8]) -> Option<u64> {
    let number = message.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))?;
    (message.len() == SIZE && message[8..].iter().all(|&byte| byte == number as u8)).then_some(number)
}

/// Returns the message that carries `number`.
fn message(number: u64) -> [u8; SIZE] {
    let mut message = [number as u8; SIZE];
    message[..8].copy_from_slice(&number.to_le_bytes());
    message
}

/// A server that echoes. It also checks that the messages of each connection have the numbers 0, 1, 2, and so on.
#[derive(Debug, Default)]
struct Server {
    seen: Report,
    /// The next expected number on each connection.
    next: HashMap<ConnectionId, u64>,
}

impl Handler<Order> for Server {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.seen.begun += 1;
        self.seen.wrong += u64::from(self.next.insert(conn, 0).is_some());
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.seen.messages += 1;
        let next = self.next.get_mut(&conn);
        self.seen.wrong += u64::from(next.as_deref().copied() != number(&message) || next.is_none());
        next.into_iter().for_each(|next| *next += 1);
        // There is a credit for this send, because the server sends one message for each received message. If the send fails, the
        // connection is ending.
        let _ = cx.send(conn, &message);
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        self.seen.ended += 1;
        self.seen.wrong += u64::from(self.next.remove(&conn).is_none());
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, order: Order) {
        match order {
            Order::Report => println!("{}", self.seen.now(self.next.len())),
            Order::Stop => cx.stop(),
            Order::Flap | Order::Finish => {}
        }
    }
}

/// The client's counters for one connection.
#[derive(Clone, Copy, Debug, Default)]
struct Traffic {
    sent: u64,
    answered: u64,
    /// True if the client has closed the connection gracefully.
    closed: bool,
}

/// A client that keeps a number of connections open, with messages in flight on each.
#[derive(Debug)]
struct Client {
    to: SocketAddr,
    seen: Report,
    live: HashMap<ConnectionId, Traffic>,
    /// In `cycles`, the number of connections that the client must still open, with one message on each. `None` in `echo`.
    cycles: Option<u64>,
    finishing: bool,
}

impl Client {
    fn open(&self, cx: &mut Context<'_>) {
        if cx.connect(self.to).is_err() {
            cx.timers().set(AGAIN, 0);
        }
    }

    /// Sends the next messages. If nothing remains to be sent and all messages are answered, closes the connection.
    fn go_on(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let Some(traffic) = self.live.get_mut(&conn) else { return };
        if !self.finishing && (self.cycles.is_none() || traffic.sent == 0) {
            // With a small window, the credit for the next message may arrive after the answer to the last one. A message that is refused
            // here is sent when a later answer arrives.
            while traffic.sent - traffic.answered < WINDOW && cx.send(conn, &message(traffic.sent)).is_ok() {
                traffic.sent += 1;
                if self.cycles.is_some() {
                    break;
                }
            }
        } else if traffic.sent == traffic.answered && !traffic.closed {
            traffic.closed = true;
            cx.close(conn);
        }
    }

    fn all(&self) -> Vec<ConnectionId> {
        self.live.keys().copied().collect()
    }
}

impl Handler<Order> for Client {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.seen.begun += 1;
        self.seen.wrong += u64::from(self.live.insert(conn, Traffic::default()).is_some());
        self.go_on(cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.seen.messages += 1;
        let Some(traffic) = self.live.get_mut(&conn) else {
            self.seen.wrong += 1;
            return;
        };
        self.seen.wrong += u64::from(number(&message) != Some(traffic.answered));
        traffic.answered += 1;
        self.go_on(cx, conn);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.go_on(cx, conn);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        self.seen.ended += 1;
        match self.live.remove(&conn) {
            Some(traffic) if traffic.closed => self.seen.lost += traffic.sent - traffic.answered,
            Some(_) => {}
            None => self.seen.wrong += 1,
        }
        match &mut self.cycles {
            Some(0) => {}
            Some(left) => {
                *left -= 1;
                self.open(cx);
            }
            None if self.finishing => {}
            None => drop(cx.timers().set(AGAIN, 0)),
        }
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: ConnectError) {
        cx.timers().set(AGAIN, 0);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if !self.finishing {
            self.open(cx);
        }
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, order: Order) {
        match order {
            Order::Report => println!("{}", self.seen.now(self.live.len())),
            Order::Flap => self.all().into_iter().for_each(|conn| cx.abort(conn)),
            Order::Finish => {
                self.finishing = true;
                self.all().into_iter().for_each(|conn| self.go_on(cx, conn));
            }
            Order::Stop => cx.stop(),
        }
    }
}

fn serve() -> Result<()> {
    let mut reactor = Reactor::with_messages(config())?;
    let listener = reactor.context().listen(([127, 0, 0, 1], 0).into())?;
    println!("{}", reactor.context().listeners().local_address(listener).ok_or("the listener is closed")?);
    obey(reactor, &mut Server::default())
}

fn client(to: SocketAddr, connections: u64, cycles: Option<u64>) -> Result<()> {
    let mut reactor = Reactor::with_messages(config())?;
    let left = cycles.map(|cycles| cycles.saturating_sub(connections));
    let mut client = Client { to, seen: Report::default(), live: HashMap::new(), cycles: left, finishing: false };
    for _ in 0..connections {
        client.open(&mut reactor.context());
    }
    obey(reactor, &mut client)
}

/// Another process of this program. Dropping this value kills the process.
struct Other {
    child: Child,
    orders: ChildStdin,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start(words: &[String]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let orders = child.stdin.take().ok_or("no pipe")?;
        let lines = BufReader::new(child.stdout.take().ok_or("no pipe")?).lines();
        Ok(Self { child, orders, lines })
    }

    fn server() -> Result<(Self, SocketAddr)> {
        let mut server = Self::start(&["serve".into()])?;
        let address = server.line()?.parse()?;
        Ok((server, address))
    }

    fn client(to: SocketAddr, connections: u64, cycles: u64) -> Result<Self> {
        Self::start(&["client".into(), to.to_string(), connections.to_string(), cycles.to_string()])
    }

    fn line(&mut self) -> Result<String> {
        Ok(self.lines.next().ok_or("the process has ended")??)
    }

    fn order(&mut self, order: &str) -> Result<()> {
        Ok(writeln!(self.orders, "{order}")?)
    }

    fn report(&mut self) -> Result<Report> {
        self.order("report")?;
        self.line()?.parse()
    }

    fn signal(&self, signal: &str) -> Result<()> {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status()?;
        if status.success() { Ok(()) } else { Err(format!("kill {signal}: {status}").into()) }
    }

    fn until(&mut self, what: &str, is_so: impl Fn(&Report) -> bool) -> Result<Report> {
        let start = Instant::now();
        loop {
            let report = self.report()?;
            if is_so(&report) {
                return Ok(report);
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("not within {PATIENCE:?}: {what}: {report:?}").into());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn right(who: &str, report: &Report) -> Result<()> {
    let Report { wrong, lost, .. } = report;
    if (*wrong, *lost) == (0, 0) { Ok(()) } else { Err(format!("{who}: {report:?}").into()) }
}

/// Checks that the memory of a process has grown by at most [`SLACK_KIB`] between the reports `before` and `after`. Fails if it has grown
/// by more.
fn flat(who: &str, before: &Report, after: &Report) -> Result<()> {
    if after.resident_kib <= before.resident_kib + SLACK_KIB {
        return Ok(());
    }
    Err(format!("{who} has grown: before {before:?}, now {after:?}").into())
}

fn echo(connections: u64, seconds: u64, every: Duration) -> Result<()> {
    let each = connections / CLIENTS as u64;
    let all = each * CLIENTS as u64;
    let (mut server, address) = Other::server()?;
    let fresh = server.report()?;
    let mut clients = (0..CLIENTS).map(|_| Other::client(address, each, 0)).collect::<Result<Vec<_>>>()?;
    let settled = server.until("all connections are established", |report| report.live == all)?;
    println!("{all} connections: {} KiB", settled.resident_kib);
    let (end, mut renewed) = (Instant::now() + Duration::from_secs(seconds), None);
    for round in 0_usize.. {
        if Instant::now() >= end {
            break;
        }
        let victim = (round * 7) % CLIENTS;
        let (what, pause) = match round % 4 {
            0 => {
                clients[victim] = Other::client(address, each, 0)?;
                ("killed", every)
            }
            1 => {
                clients[victim].signal("-STOP")?;
                ("stopped shortly", every)
            }
            2 => {
                clients[victim].order("flap")?;
                ("loses connections", every)
            }
            _ => {
                clients[victim].signal("-STOP")?;
                ("stopped for long", every.max(LONG))
            }
        };
        std::thread::sleep(pause);
        // SIGCONT continues the client if it is stopped. If the client is running, the signal has no effect.
        clients[victim].signal("-CONT")?;
        let report = server.report()?;
        println!("client {victim} {what}: {report:?}");
        right("the server", &report)?;
        if renewed.is_none() && report.begun >= 2 * all {
            // When every connection has been replaced once, pools and allocators have reached their
            // final size. Later reports are compared with this one.
            renewed = Some(server.until("all connections are restored", |report| report.live == all)?);
        }
    }
    let after = server.until("all connections are restored", |report| report.live == all)?;
    let mut answered = 0;
    for (nth, client) in clients.iter_mut().enumerate() {
        client.order("finish")?;
        let report = client.until("all connections are closed", |report| report.live == 0)?;
        right(&format!("client {nth}"), &report)?;
        if report.begun != report.ended {
            return Err(format!("client {nth}: {report:?}").into());
        }
        answered += report.messages;
    }
    let empty = server
        .until("all connections have ended", |report| report.live == 0 && report.descriptors <= fresh.descriptors)?;
    right("the server", &empty)?;
    if empty.begun != empty.ended {
        return Err(format!("the server: {empty:?}").into());
    }
    println!(
        "{seconds} s: {} messages at the server, {answered} answers at the clients that were left, {} connections",
        empty.messages, empty.begun
    );
    let Some(renewed) = renewed else {
        println!("memory is not judged: the time was too short to replace all connections");
        return Ok(());
    };
    println!("memory {} KiB when all were replaced, {} KiB at the end", renewed.resident_kib, after.resident_kib);
    flat("the server", &renewed, &after)
}

fn cycles(count: u64) -> Result<()> {
    let (mut server, address) = Other::server()?;
    let fresh = server.report()?;
    let mut client = Other::client(address, AT_ONCE, count)?;
    let mut first = None;
    for tenth in 1..=10 {
        let target = count * tenth / 10;
        let mut report = client.report()?;
        while report.ended < target {
            std::thread::sleep(Duration::from_millis(200));
            report = client.report()?;
        }
        let other = server.report()?;
        println!(
            "{} cycles: client {} KiB, {} descriptors; server {} KiB, {} descriptors",
            report.ended, report.resident_kib, report.descriptors, other.resident_kib, other.descriptors
        );
        if tenth == 2 {
            first = Some((report, other));
        }
    }
    let over = |report: &Report| report.ended == count && report.descriptors <= fresh.descriptors;
    let last = client.until("all have ended", over)?;
    let other = server.until("all have ended", over)?;
    right("the client", &last)?;
    right("the server", &other)?;
    if last.messages != count || other.messages != count {
        return Err(format!("each connection has one echo: {last:?}, {other:?}").into());
    }
    let (mine, theirs) = first.ok_or("no report")?;
    flat("the client", &mine, &last)?;
    flat("the server", &theirs, &other)
}

fn run() -> Result<()> {
    rlimit::increase_nofile_limit(1 << 16)?;
    let args: Vec<_> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["echo", connections, seconds, every] => {
            echo(connections.parse()?, seconds.parse()?, Duration::from_secs(every.parse()?))
        }
        ["cycles", count] => cycles(count.parse()?),
        ["serve"] => serve(),
        ["client", to, connections, "0"] => client(to.parse()?, connections.parse()?, None),
        ["client", to, connections, cycles] => client(to.parse()?, connections.parse()?, Some(cycles.parse()?)),
        _ => Err("say echo CONNECTIONS SECONDS EVERY, or cycles COUNT".into()),
    }
}

fn main() -> ExitCode {
    env_logger::init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rdma-endurance: {error}");
            ExitCode::FAILURE
        }
    }
}
