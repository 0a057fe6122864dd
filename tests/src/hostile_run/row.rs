//! The attacks, and the run of one of them.

use std::net::SocketAddr;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdma_reactor::SecurityMode;

use super::Result;
use super::attacker::{self, End, Plan, Source, Stage};
use super::credentials::Credentials;
use super::newcomers::{self, Outcome};
use super::process::{GO, Process, until};
use super::{flooder, scribbler, server};
use crate::floods::Kind;

/// The time after the last connection within which the pool of a server must be as small as before: twice the default
/// of `Timeouts::pool_idle`.
pub const POOL_TIME: Duration = Duration::from_secs(60);
/// The time limit after the honest clients for the least work of attackers.
const LEAST_TIME: Duration = Duration::from_secs(600);
/// The largest number of echoes of a control.
const CONTROL: usize = 60_000;
/// The number of buffers in the pool of an idle server: those of four connections with default settings.
pub const POOL_BUFFERS: usize = 4 * 130;

/// The action of attackers.
#[derive(Clone, Copy, Debug)]
pub enum Attack {
    /// They connect, and stop at some stage. The honest clients are newcomers.
    Connects(Plan),
    /// They are connected, and send within their credits. The honest client is connected, too.
    Flood(Kind),
    /// They are connected in shared memory, and overwrite all memory that they map. The honest client is in shared
    /// memory, too.
    Scribbles,
}

/// An attack, with the honest clients next to it.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The security of the server's connections.
    pub security: SecurityMode,
    /// The action of each attacker.
    pub attack: Attack,
    /// The server and the honest clients run before all other processes. Attackers of a real server do not compute on its processors.
    pub is_first: bool,
    /// The number of attacking processes.
    pub attackers: usize,
    /// The number of connections (messages of a flood) of attackers after which the honest clients begin.
    pub warm: u64,
    /// The number of connections of attackers before which the attack does not end.
    pub least: u64,
    /// The number of newcomers, or of echoes of the connected client. Below it: the time from one to the next.
    pub count: usize,
    /// See above.
    pub every: Duration,
}

/// A run of a server under attack.
#[derive(Clone, Debug)]
pub struct Attacked {
    /// The results of the honest clients.
    pub honest: Outcome,
    /// The counters of all attackers together.
    pub attackers: attacker::Report,
    /// The report of the server at the end.
    pub server: server::Report,
    /// The share of one processor that the server used.
    pub load: f64,
    /// The share of the time in which the server was ready and had no processor.
    pub waited: f64,
}

/// The memory of a server after an attack.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// The time from the end of the last connection until the pool was small again, `None` if it was not within [`POOL_TIME`].
    pub pool: Option<Duration>,
    /// The memory of the process at that time, KiB.
    pub resident_kib: u64,
}

/// The result of a row.
#[derive(Debug)]
pub struct Measured {
    /// The row.
    pub row: Row,
    /// The honest clients of a server that nobody attacks, while the attack is directed at another one. Only in the
    /// full form.
    pub control: Option<Outcome>,
    /// The attack.
    pub attacked: Attacked,
    /// The memory after the attack. Only in the full form, and not of a flood.
    pub left: Option<JoinHandle<std::result::Result<Left, String>>>,
}

impl Row {
    /// Returns true if enough of the honest clients must connect. When several processes connect as fast as possible, the kernel drops
    /// connects to a server that gets no processor. The number of successful clients is then a matter of time, unless the server runs
    /// before all others.
    #[must_use]
    pub const fn counts_newcomers(&self) -> bool {
        self.is_first || self.attackers == 1 || !matches!(self.attack, Attack::Connects(_))
    }

    /// Returns the name of the attack, without the security of the server.
    #[must_use]
    pub fn name(&self) -> String {
        let Plan { stage, rate, source, end, .. } = match self.attack {
            Attack::Connects(plan) => plan,
            Attack::Flood(kind) => return format!("flood of {kind:?}, {} processes", self.attackers).to_lowercase(),
            Attack::Scribbles => return format!("scribbles in shared memory, {} processes", self.attackers),
        };
        let what = match (stage, end) {
            (Stage::Connected, End::Reset) => "TCP, reset",
            (Stage::Connected, End::Renewed) => "silent TCP, renewed",
            (Stage::Connected, _) => "silent TCP",
            (Stage::SlowRequest, _) => "request by 1 B/s",
            (Stage::Requested, _) => "request, taken back",
            (Stage::Started, _) => "no hello",
            (Stage::HalfSecured, End::Reset) => "first flight, reset",
            (Stage::HalfSecured, _) => "half a handshake",
            (Stage::Up, _) => "up, reset",
        };
        let rate = match rate {
            Some(rate) => format!("{rate}/s"),
            None => format!("{} processes", self.attackers),
        };
        let source = match source {
            Source::Shared => "same addr.",
            Source::One => "1 addr.",
            Source::Many => "64 addr.",
        };
        format!("{what}, {rate}, {source}")
    }

    /// Returns true if all connections are in shared memory.
    #[must_use]
    pub const fn is_within_host(&self) -> bool {
        matches!(self.attack, Attack::Scribbles)
    }

    /// Returns true if honest clients must hardly be affected: the attackers are connected, or have one address, which no honest client
    /// has. The processors that the attackers use must not count.
    #[must_use]
    pub const fn is_unnoticed(&self) -> bool {
        let is_elsewhere = match self.attack {
            Attack::Connects(plan) => matches!(plan.source, Source::One),
            Attack::Flood(_) | Attack::Scribbles => true,
        };
        self.is_first && is_elsewhere
    }
}

/// Returns the plan of an attack whose connections are held.
const fn holding(stage: Stage, rate: u32, source: Source) -> Plan {
    Plan { stage, held: 6000, rate: Some(rate), source, end: End::Server }
}

/// Returns the plan of an attack whose connections are reset, as fast as possible.
const fn resetting(stage: Stage, source: Source) -> Plan {
    Plan { stage, held: 256, rate: None, source, end: End::Reset }
}

/// Returns a row of one process with this plan.
fn row(security: SecurityMode, plan: Plan, warm: u64) -> Row {
    let every = Duration::from_millis(30);
    let attack = Attack::Connects(plan);
    Row { security, attack, is_first: false, attackers: 1, warm, least: 0, count: 300, every }
}

/// Returns a row of three processes that connect as fast as possible.
fn flood(security: SecurityMode, stage: Stage, source: Source) -> Row {
    Row { attackers: 3, ..row(security, resetting(stage, source), 3000) }
}

/// Returns a row of three processes in shared memory, next to a client that requests this number of echoes.
#[must_use]
pub const fn scribbles(count: usize) -> Row {
    let (attack, every) = (Attack::Scribbles, Duration::from_millis(1));
    let (security, is_first) = (SecurityMode::Plain, false);
    Row { security, attack, is_first, attackers: 3, warm: 20, least: 0, count, every }
}

/// Returns a few attacks, with few newcomers, for twenty seconds together.
#[must_use]
pub fn short() -> Vec<Row> {
    use SecurityMode::{Plain, Psk, Tls};
    let mut rows = Vec::new();
    // One address gets half of the slots at most. The rate of handshakes is one that a slow machine can compute, too.
    for (source, warm) in [(Source::One, 600), (Source::Many, 1100)] {
        rows.push(row(Plain, holding(Stage::Started, 1000, source), 1500));
        rows.push(row(Tls, holding(Stage::HalfSecured, 500, source), warm));
        rows.push(row(Psk, holding(Stage::HalfSecured, 500, source), warm));
    }
    rows.push(row(Plain, holding(Stage::Connected, 2500, Source::One), 4500));
    rows.push(flood(Plain, Stage::Requested, Source::One));
    let mut rows: Vec<_> =
        rows.into_iter().map(|row| Row { count: 50, every: Duration::from_millis(20), ..row }).collect();
    rows.push(scribbles(3000));
    rows
}

/// Returns all attacks. `may_be_first`: the servers run before all other processes, except in the last rows.
#[must_use]
pub fn all(may_be_first: bool) -> Vec<Row> {
    use SecurityMode::{Plain, Psk, Tls};
    use Source::{Many, One, Shared};
    let mut rows = Vec::new();
    for security in [Plain, Tls, Psk] {
        let last = if security == Plain { Stage::Started } else { Stage::HalfSecured };
        for (source, rate, warm) in [(One, 205, 1100), (One, 1000, 1500), (Many, 205, 1100), (Many, 1000, 1500)] {
            rows.push(row(security, holding(Stage::Started, rate, source), warm));
            if last == Stage::HalfSecured {
                rows.push(row(security, holding(last, rate, source), warm));
            }
        }
        rows.push(row(security, holding(last, 1000, Shared), 1500));
        for source in [One, Many] {
            rows.push(flood(security, Stage::Requested, source));
            if last == Stage::HalfSecured {
                rows.push(flood(security, last, source));
            }
        }
    }
    rows.push(flood(Plain, Stage::Requested, Shared));
    for source in [One, Many] {
        rows.push(row(Plain, Plan { held: 5000, ..holding(Stage::Connected, 2500, source) }, 5000));
        let renewed = Plan { held: 3000, end: End::Renewed, ..holding(Stage::Connected, 1000, source) };
        rows.push(row(Plain, renewed, 3500));
        rows.push(row(Plain, Plan { held: 3000, ..holding(Stage::SlowRequest, 1000, source) }, 3000));
    }
    rows.push(flood(Plain, Stage::Connected, One));
    rows.push(flood(Plain, Stage::Up, One));
    let floods = Kind::ALL.map(|kind| {
        let (attack, every) = (Attack::Flood(kind), Duration::from_millis(1));
        Row { security: Plain, attack, is_first: false, attackers: 4, warm: 100_000, least: 0, count: 5000, every }
    });
    rows.push(scribbles(60_000));
    if may_be_first {
        rows.extend(floods);
        rows.iter_mut().for_each(|row| row.is_first = true);
    }
    rows.extend(floods);
    // The attack lasts a minute, with 400,000 connections for each of three processes: more than the server can handle.
    rows.push(Row { least: 1_200_000, count: 2000, ..flood(Plain, Stage::Requested, One) });
    rows
}

/// The server of one phase.
struct Server {
    process: Process,
    address: SocketAddr,
}

impl Server {
    fn start(program: &Path, credentials: &Credentials, row: &Row) -> Result<Self> {
        let within_host = row.is_within_host();
        let settings = server::Settings { credentials: credentials.clone(), within_host };
        let mut process = Process::start(program, "serve", &settings)?;
        let address = process.answer()?;
        if row.is_first {
            process.be_first()?;
        }
        Ok(Self { process, address })
    }
}

/// Attacks one server while honest clients connect to another one, or to the same.
fn phase(
    program: &Path,
    row: &Row,
    credentials: &Credentials,
    of: SocketAddr,
    to: SocketAddr,
) -> Result<(Outcome, attacker::Report)> {
    let mut attackers = Vec::new();
    for nth in 0..row.attackers as u64 {
        let mut attacker = match row.attack {
            Attack::Connects(plan) => {
                let settings = attacker::Settings { server: of, credentials: credentials.clone(), plan };
                Process::start(program, "attack", &settings)?
            }
            Attack::Flood(kind) => Process::start(program, "flood", &flooder::Settings { server: of, kind })?,
            Attack::Scribbles => Process::start(program, "scribble", &scribbler::Settings { server: of, seed: nth })?,
        };
        attacker.answer::<attacker::Report>()?;
        attackers.push(attacker);
    }
    for attacker in &mut attackers {
        attacker.order(GO)?;
    }
    let mut all = || {
        attackers.iter_mut().try_fold(attacker::Report::default(), |sum, attacker| -> Result<_> {
            let one: attacker::Report = attacker.report()?;
            Ok(attacker::Report {
                opened: sum.opened + one.opened,
                reached: sum.reached + one.reached,
                refused: sum.refused + one.refused,
            })
        })
    };
    until("the attack has begun", || Ok((all()?.opened >= row.warm).then_some(())))?;
    let Row { count, every, .. } = *row;
    // A server that waits for a processor answers late, and its clients must not become a crowd because of that.
    let (patience, at_once) = if row.is_first { (10, usize::MAX) } else { (60, 8) };
    let patience = Duration::from_secs(patience);
    let (within_host, credentials) = (row.is_within_host(), credentials.clone());
    let settings = newcomers::Settings { server: to, credentials, count, every, at_once, patience, within_host };
    let role = match row.attack {
        Attack::Connects(_) => "newcomers",
        Attack::Flood(_) | Attack::Scribbles => "established",
    };
    let mut clients = Process::start(program, role, &settings)?;
    if row.is_first {
        clients.be_first()?;
    }
    let outcome = clients.answer()?;
    let begin = Instant::now();
    loop {
        let report = all()?;
        // The control measures only the honest clients.
        if report.opened >= row.least || of != to || begin.elapsed() > LEAST_TIME {
            return Ok((outcome, report));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs an attack. `has_control`: first measures honest clients of a server that nobody attacks, and checks the memory afterwards.
///
/// # Errors
/// A process fails, or an expected event does not happen within [`crate::patience::PATIENCE`].
pub fn measure(program: &Path, row: Row, has_control: bool) -> Result<Measured> {
    let credentials = Credentials::new(row.security);
    let control = if has_control {
        let other = Server::start(program, &credentials, &Row { is_first: false, ..row })?;
        let quiet = Server::start(program, &credentials, &row)?;
        let row = Row { count: row.count.min(CONTROL), ..row };
        Some(phase(program, &row, &credentials, other.address, quiet.address)?.0)
    } else {
        None
    };
    let mut server = Server::start(program, &credentials, &row)?;
    let begin = Instant::now();
    let (honest, attackers) = phase(program, &row, &credentials, server.address, server.address)?;
    let share = |time: Duration| time.as_secs_f64() / begin.elapsed().as_secs_f64();
    let (load, waited) = (share(server.process.processor_time()?), share(server.process.waited()?));
    let attacked = Attacked { honest, attackers, server: server.process.report()?, load, waited };
    // Attackers that were connected have used no memory.
    let takes = has_control && matches!(row.attack, Attack::Connects(_));
    let left = takes.then(|| std::thread::spawn(move || left(&mut server.process).map_err(|error| error.to_string())));
    Ok(Measured { row, control, attacked, left })
}

/// Waits until the server has no more buffers than an idle one.
fn left(server: &mut Process) -> Result<Left> {
    until("all connections have ended", || {
        let report: server::Report = server.report()?;
        Ok((report.current == 0).then_some(()))
    })?;
    let begin = Instant::now();
    loop {
        let server::Report { pool_buffers, resident_kib, .. } = server.report()?;
        let time = begin.elapsed();
        if pool_buffers <= POOL_BUFFERS || time > POOL_TIME {
            return Ok(Left { pool: Some(time).filter(|_| pool_buffers <= POOL_BUFFERS), resident_kib });
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}
