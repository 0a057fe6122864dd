//! The attacks of `rdma-hostile`, and the function that runs one of them.

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
use super::{flooder, lender, scribbler, server};
use crate::floods::Kind;

/// The time limit for the server's pool to shrink to its initial size after the server's last connection has ended. It is twice the default
/// of `Timeouts::pool_idle`.
pub const POOL_TIME: Duration = Duration::from_secs(60);
/// The time limit for the attackers to open [`Row::least`] connections. It begins when the last honest client has its result.
const LEAST_TIME: Duration = Duration::from_secs(600);
/// The largest number of echoes that the connected client requests in a control run.
const CONTROL: usize = 60_000;
/// The minimum fraction of the time for which a saturated server is busy. With the rates of
/// [`short`], the server of an otherwise idle machine is busy for at most a quarter of the time.
const SATURATED: f64 = 0.8;
/// The number of buffers in the pool of an idle server: those of four connections with default settings.
pub const POOL_BUFFERS: usize = 4 * 130;

/// The kind of an attack.
#[derive(Clone, Copy, Debug)]
pub enum Attack {
    /// The attackers connect and stop at some stage. The honest clients are newcomers.
    Connects(Plan),
    /// The attackers are connected, and send as much as their credits permit. The honest client is connected, too.
    Flood(Kind),
    /// The attackers are connected in shared memory, and overwrite all memory that they map. The honest client also uses shared memory.
    Scribbles,
    /// The attacker has this number of connections in shared memory, and lends memory of all kinds
    /// on all of them. The honest clients also use shared memory: one that requests echoes, and as
    /// many connections as the attacker has, each with a large message.
    Lendings(usize),
}

/// An attack, with the honest clients that run at the same time. It is a row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The security of the server's connections.
    pub security: SecurityMode,
    /// The attack that each attacker process carries out.
    pub attack: Attack,
    /// True if the server and the honest clients have a real-time priority. With this priority, these processes lose no processor time to
    /// the attackers, as if the attackers ran on other machines.
    pub is_first: bool,
    /// The number of attacker processes.
    pub attackers: usize,
    /// The honest clients begin after the attackers have opened this number of connections. In a flood, they begin after the attackers have
    /// sent this number of messages.
    pub warm: u64,
    /// The attack does not end before the attackers have opened this number of connections. With
    /// [`Attack::Lendings`], it is a number of lendings.
    pub least: u64,
    /// The number of newcomers, or the number of echoes of the connected client.
    pub count: usize,
    /// The time between the starts of two newcomers, or between two echoes.
    pub every: Duration,
}

/// The results of a run with an attack.
#[derive(Clone, Debug)]
pub struct Attacked {
    /// The outcome of the honest clients.
    pub honest: Outcome,
    /// The outcome of the honest connections with large messages. Empty unless the attack is
    /// [`Attack::Lendings`].
    pub crowd: Outcome,
    /// The report of a server whose peers are honest, but have as many connections as the attacker.
    /// `None` with `--short`, and unless the attack is [`Attack::Lendings`].
    pub beside: Option<server::Report>,
    /// The sum of all attackers' counters.
    pub attackers: attacker::Report,
    /// The server's report at the end of the run.
    pub server: server::Report,
    /// The server's processor time, as a fraction of the time since the attackers have begun.
    pub load: f64,
    /// The time in which the server was ready to run but had no processor, as a fraction of the
    /// time since the attackers have begun.
    pub waited: f64,
}

/// The memory of the server after an attack.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// The time from the end of the last connection until the pool had shrunk to its initial size. `None` if this took longer than
    /// [`POOL_TIME`].
    pub pool: Option<Duration>,
    /// The memory of the server's process when the pool had shrunk, or when [`POOL_TIME`] was over, in KiB.
    pub resident_kib: u64,
}

/// The results of an attack, including the control.
#[derive(Debug)]
pub struct Measured {
    /// The attack that was measured.
    pub row: Row,
    /// The outcome of the control: honest clients connect to one server while another server is attacked. `None` with `--short`.
    pub control: Option<Outcome>,
    /// The results of the attack.
    pub attacked: Attacked,
    /// A thread that waits for the server's memory to shrink, and returns the memory. `None` with `--short`, and for attackers on
    /// established connections.
    pub left: Option<JoinHandle<std::result::Result<Left, String>>>,
}

impl Row {
    /// Returns true if the row passes only when enough of its honest clients are successful. Returns false if several processes connect as
    /// fast as possible and the server has no real-time priority. While such a server gets no processor, the kernel drops connects, so the
    /// number of successful clients depends on chance.
    #[must_use]
    pub const fn counts_newcomers(&self) -> bool {
        self.is_first || self.attackers == 1 || !matches!(self.attack, Attack::Connects(_))
    }

    /// Returns true if the attackers exceed what the server can do on this machine: the attackers connect at a rate that does not depend on
    /// the speed of the server, the server has no real-time priority, and during the fraction `busy` of the time it used a processor or
    /// waited for one. Such a server loses newcomers even without a defect.
    #[must_use]
    pub const fn is_saturated(&self, busy: f64) -> bool {
        !self.is_first && matches!(self.attack, Attack::Connects(_)) && busy >= SATURATED
    }

    /// Returns the name of the attack. It does not include the security of the server.
    #[must_use]
    pub fn name(&self) -> String {
        let Plan { stage, rate, source, end, .. } = match self.attack {
            Attack::Connects(plan) => plan,
            Attack::Flood(kind) => return format!("flood of {kind:?}, {} processes", self.attackers).to_lowercase(),
            Attack::Scribbles => return format!("scribbles in shared memory, {} processes", self.attackers),
            Attack::Lendings(count) => return format!("lendings on {count} connections"),
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

    /// Returns true if all connections use shared memory.
    #[must_use]
    pub const fn is_within_host(&self) -> bool {
        matches!(self.attack, Attack::Scribbles | Attack::Lendings(_))
    }

    /// Returns true if the attack may slow the honest clients down only slightly. For this, the attackers must have established
    /// connections, or a single address that no honest client uses. The server must also have a real-time priority, so that it does not
    /// wait for a processor that an attacker uses.
    #[must_use]
    pub const fn is_unnoticed(&self) -> bool {
        let is_elsewhere = match self.attack {
            Attack::Connects(plan) => matches!(plan.source, Source::One),
            Attack::Flood(_) | Attack::Scribbles | Attack::Lendings(_) => true,
        };
        self.is_first && is_elsewhere
    }
}

/// Returns the plan of an attack whose connections stay open.
const fn holding(stage: Stage, rate: u32, source: Source) -> Plan {
    Plan { stage, held: 6000, rate: Some(rate), source, end: End::Server }
}

/// Returns the plan of an attack that opens and resets connections as fast as possible.
const fn resetting(stage: Stage, source: Source) -> Plan {
    Plan { stage, held: 256, rate: None, source, end: End::Reset }
}

/// Returns a row with one attacker process and this plan.
fn row(security: SecurityMode, plan: Plan, warm: u64) -> Row {
    let every = Duration::from_millis(30);
    let attack = Attack::Connects(plan);
    Row { security, attack, is_first: false, attackers: 1, warm, least: 0, count: 300, every }
}

/// Returns a row with three attacker processes, which open and reset connections as fast as possible.
fn flood(security: SecurityMode, stage: Stage, source: Source) -> Row {
    Row { attackers: 3, ..row(security, resetting(stage, source), 3000) }
}

/// Returns a row with three attackers in shared memory, and an honest client that requests `count` echoes.
#[must_use]
pub const fn scribbles(count: usize) -> Row {
    let (attack, every) = (Attack::Scribbles, Duration::from_millis(1));
    let (security, is_first) = (SecurityMode::Plain, false);
    Row { security, attack, is_first, attackers: 3, warm: 20, least: 0, count, every }
}

/// Returns the row of an attacker that lends memory `lendings` times on `connections` connections.
/// The honest client requests `count` echoes.
#[must_use]
pub const fn lendings(connections: usize, lendings: u64, count: usize) -> Row {
    let row = scribbles(count);
    Row { attack: Attack::Lendings(connections), attackers: 1, warm: 0, least: lendings, ..row }
}

/// Returns a few attacks with few newcomers. They take about twenty seconds in total.
#[must_use]
pub fn short() -> Vec<Row> {
    use SecurityMode::{Plain, Psk, Tls};
    let mut rows = Vec::new();
    // Attackers with a single address can occupy at most half of the server's slots for handshakes. The honest clients start at long
    // intervals, so that even a slow machine completes their handshakes.
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
    rows.push(lendings(50, 4000, 1000));
    rows
}

/// Returns all attacks. If `may_be_first` is true, the server has a real-time priority in all rows except for the last five: a second row
/// for each flood of messages, and the attack with the most connections.
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
    rows.push(lendings(1000, 90_000, 5000));
    if may_be_first {
        rows.extend(floods);
        rows.iter_mut().for_each(|row| row.is_first = true);
    }
    rows.extend(floods);
    // This attack takes about a minute. Each of the three processes opens 400,000 connections, faster than the server can handle them.
    rows.push(Row { least: 1_200_000, count: 2000, ..flood(Plain, Stage::Requested, One) });
    rows
}

/// The server process of one phase.
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

/// Starts a process that lends memory, and waits until it is connected. If `lendings` is 0, the
/// process is an honest peer.
fn lend(program: &Path, server: SocketAddr, connections: usize, lendings: u64) -> Result<Process> {
    let mut lender = Process::start(program, "lend", &lender::Settings { server, connections, lendings })?;
    lender.answer::<attacker::Report>()?;
    Ok(lender)
}

/// Runs attackers that attack the server `of`, and honest clients that connect to the server `to`.
/// In the control, these are two servers; otherwise they are the same server. Also returns the
/// outcome of the crowd, and the time at which the attackers have begun.
fn phase(
    program: &Path,
    row: &Row,
    credentials: &Credentials,
    of: SocketAddr,
    to: SocketAddr,
) -> Result<(Outcome, Outcome, attacker::Report, Instant)> {
    let mut attackers = Vec::new();
    for nth in 0..row.attackers as u64 {
        let mut attacker = match row.attack {
            Attack::Connects(plan) => {
                let settings = attacker::Settings { server: of, credentials: credentials.clone(), plan };
                Process::start(program, "attack", &settings)?
            }
            Attack::Flood(kind) => Process::start(program, "flood", &flooder::Settings { server: of, kind })?,
            Attack::Scribbles => Process::start(program, "scribble", &scribbler::Settings { server: of, seed: nth })?,
            Attack::Lendings(connections) => {
                attackers.push(lend(program, of, connections, row.least)?);
                continue;
            }
        };
        attacker.answer::<attacker::Report>()?;
        attackers.push(attacker);
    }
    let attacked_since = Instant::now();
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
                charged_kib: sum.charged_kib + one.charged_kib,
            })
        })
    };
    until("the attack has begun", || Ok((all()?.opened >= row.warm).then_some(())))?;
    let Row { count, every, .. } = *row;
    // Without a real-time priority, the server may have to wait for a processor, and may answer late. In this case the clients have a
    // longer time limit, and only a few clients may run at the same time.
    let (patience, at_once) = if row.is_first { (10, usize::MAX) } else { (60, 8) };
    let patience = Duration::from_secs(patience);
    let (within_host, credentials) = (row.is_within_host(), credentials.clone());
    let settings = newcomers::Settings { server: to, credentials, count, every, at_once, patience, within_host };
    let role = match row.attack {
        Attack::Connects(_) => "newcomers",
        Attack::Flood(_) | Attack::Scribbles | Attack::Lendings(_) => "established",
    };
    let mut clients = Process::start(program, role, &settings)?;
    if row.is_first {
        clients.be_first()?;
    }
    let outcome = clients.answer()?;
    let crowd = match row.attack {
        Attack::Lendings(count) => {
            Process::start(program, "crowd", &newcomers::Settings { count, ..settings })?.answer()?
        }
        _ => Outcome::default(),
    };
    let begin = Instant::now();
    loop {
        let report = all()?;
        // The control ends when the honest clients have ended, because only the honest clients are measured.
        if report.opened >= row.least || of != to || begin.elapsed() > LEAST_TIME {
            return Ok((outcome, crowd, report, attacked_since));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs an attack. If `has_control` is true, there are two more steps: before the attack, honest clients are measured while another server
/// is attacked; after an attack on the connection setup, a thread waits until the memory of the attacked server has shrunk.
///
/// # Errors
/// A process fails, or something does not happen within [`crate::patience::PATIENCE`].
pub fn measure(program: &Path, row: Row, has_control: bool) -> Result<Measured> {
    let credentials = Credentials::new(row.security);
    let mut beside = None;
    let control = if has_control {
        let other = Server::start(program, &credentials, &Row { is_first: false, ..row })?;
        let mut quiet = Server::start(program, &credentials, &row)?;
        let row = Row { count: row.count.min(CONTROL), ..row };
        let honest = match row.attack {
            Attack::Lendings(connections) => Some(lend(program, quiet.address, connections, 0)?),
            _ => None,
        };
        let outcome = phase(program, &row, &credentials, other.address, quiet.address)?.0;
        beside = honest.map(|_| quiet.process.report()).transpose()?;
        Some(outcome)
    } else {
        None
    };
    let mut server = Server::start(program, &credentials, &row)?;
    let (honest, crowd, attackers, since) = phase(program, &row, &credentials, server.address, server.address)?;
    let share = |time: Duration| time.as_secs_f64() / since.elapsed().as_secs_f64();
    let (load, waited) = (share(server.process.processor_time()?), share(server.process.waited()?));
    let attacked = Attacked { honest, crowd, beside, attackers, server: server.process.report()?, load, waited };
    // Only attacks on the connection setup use memory of the pool, so the memory is checked only after these attacks.
    let takes = has_control && matches!(row.attack, Attack::Connects(_));
    let left = takes.then(|| std::thread::spawn(move || left(&mut server.process).map_err(|error| error.to_string())));
    Ok(Measured { row, control, attacked, left })
}

/// Waits until the pool of the server has shrunk to the size of an idle server's pool.
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
