//! The contests: the work of both sides, the figure that counts, and the target.

use std::fmt;

use plotters::style::RGBColor;
use serde_json::{Value, json};

use crate::pingpong::chart;
use crate::pingpong::failure::Failure;
use crate::pingpong::figures::size_label;
use crate::pingpong::job;
use crate::pingpong::plan::usual_iterations;

use super::openssl;
use super::pair::{self, PINGPONG, Processors};
use super::peers::{self, Peer};
use super::secured::{Files, Mode};

/// The target of a contest.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Target {
    /// At most this many times the competitor's latency.
    TimesLatency(f64),
    /// At least this many times the competitor's throughput.
    TimesThroughput(f64),
    /// At least this many messages per second; there is no competitor.
    Rate(f64),
    /// At least this many times the competitor's messages per second.
    TimesRate(f64),
    /// Connections per second, of which nothing is wanted but the figure.
    Connections,
}

/// The place of a contest in a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In that of latency by size, bytes.
    Size(u32),
    /// In that of echoes by connections.
    Connections(u32),
}

/// A contest: the same work, done by this library and by somebody else.
#[derive(Debug)]
struct Contest {
    name: String,
    /// Its place in a picture.
    place: Option<Place>,
    target: Target,
    theirs: Option<Theirs>,
    ours: Work,
    /// How this library's connections are secured.
    mode: Option<Mode>,
}

/// The competitor.
#[derive(Debug)]
enum Theirs {
    /// Bare TCP: its work, the size of messages, and the number of iterations.
    Tcp(&'static str, u32, u64),
    /// Bare TCP with echoes: the number of connections, and of echoes on all of them.
    TcpEchoes(u32, u64),
    /// A program by others.
    Peer(Peer),
    /// This library with the same work, on connections that are not secured.
    Plain,
    /// This library with other work: what is different about it.
    Otherwise(&'static str, Work),
    /// `openssl s_server` and `openssl s_client`: the number of bytes.
    Openssl(u64),
}

impl Theirs {
    const fn name(&self) -> &'static str {
        match self {
            Self::Tcp(..) | Self::TcpEchoes(..) => "bare TCP",
            Self::Peer(peer) => peer.name(),
            Self::Plain => "plain",
            Self::Otherwise(difference, _) => difference,
            Self::Openssl(_) => "openssl",
        }
    }
}

/// The work of this library.
#[derive(Debug)]
enum Work {
    /// Flags of `rdma-pingpong client`, and the place of the figure in its JSON.
    Pingpong(String, &'static str),
    /// The operation of `one-sided-client`, and the number of iterations.
    OneSided(&'static str, u64),
    /// Connections one after another, and their number.
    Connections(u64),
    /// The number of connections, and of echoes on all of them together.
    Echoes(u32, u64),
    /// The buffers that carry the mix of requests, and the number of these.
    Mix(&'static str, u64),
}

/// Sizes of messages to and fro, bytes.
const LATENCY_SIZES: [u32; 5] = [64, 4 << 10, 8 << 10, 64 << 10, 1 << 20];
/// Sizes of messages one way, bytes.
const STREAM_SIZES: [u32; 5] = [4 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20];
/// Numbers of connections with echoes.
const CONNECTIONS: [u32; 5] = [1, 10, 100, 1_000, 10_000];
/// The longest block of `iperf3`, bytes.
const IPERF3_LONGEST: u32 = 1 << 20;
const MEDIAN: &str = "/half_rtt_us/p50";
const MEAN: &str = "/half_rtt_us/mean";
/// The target against a program by others: to be no slower.
const NO_SLOWER: f64 = 1.0;

/// Messages to and fro.
fn latency(wait: &str, size: u32, iterations: u64, figure: &'static str) -> Work {
    let warmup = iterations / 10;
    let flags = format!("--mode latency --wait {wait} --size {size} --iters {iterations} --warmup {warmup}");
    Work::Pingpong(flags, figure)
}

/// Messages one way.
fn one_way(wait: &str, size: u32, iterations: u64, figure: &'static str) -> Work {
    let warmup = iterations / 20;
    let flags = format!("--mode throughput --wait {wait} --size {size} --iters {iterations} --warmup {warmup}");
    Work::Pingpong(flags, figure)
}

/// Messages of 2 GiB together, one way.
fn bulk(wait: &str, size: u32) -> Work {
    one_way(wait, size, (2 << 30) / u64::from(size), "/gbit_per_second")
}

/// Messages of 64 B to and fro, for the contests that are not about sizes.
fn short() -> Work {
    latency("spin", 64, 50_000, MEDIAN)
}

/// All contests.
fn contests() -> Vec<Contest> {
    use Target::{Connections, Rate, TimesLatency, TimesRate, TimesThroughput};
    let new = |name: &str, target, theirs, ours| Contest {
        name: name.into(),
        place: None,
        target,
        theirs: Some(theirs),
        ours,
        mode: None,
    };
    let (peer, libfabric) = (Theirs::Peer, peers::libfabric_provider());
    let mut all = Vec::new();
    for size in LATENCY_SIZES {
        let name = format!("{} half round trip, spinning", size_label(size.into()));
        let iterations = usual_iterations(job::Mode::Latency, size);
        let ours = |figure| latency("spin", size, iterations, figure);
        let (ucx, libfabric) =
            (Peer::ucx_latency(size, iterations, ""), Peer::libfabric_latency(libfabric, size, iterations));
        let of_size = |contest: Contest| Contest { place: Some(Place::Size(size)), ..contest };
        all.push(of_size(new(&name, TimesLatency(1.3), Theirs::Tcp("spin", size, iterations), ours(MEDIAN))));
        all.push(of_size(new(&name, TimesLatency(NO_SLOWER), peer(ucx), ours(MEDIAN))));
        all.push(of_size(new(&name, TimesLatency(NO_SLOWER), peer(libfabric), ours(MEAN))));
    }
    let events = "64 B half round trip, events";
    let ours = || latency("event", 64, 10_000, MEDIAN);
    all.push(new(events, TimesLatency(1.3), Theirs::Tcp("epoll", 64, 10_000), ours()));
    all.push(new(events, TimesLatency(NO_SLOWER), peer(Peer::ucx_latency(64, 10_000, "-E sleep")), ours()));
    all.push(new(events, TimesLatency(NO_SLOWER), peer(Peer::sockperf_latency(64)), ours()));
    // A program that sleeps meets this library as it sleeps.
    let (spinning, sleeping) = ("64 B one way", "64 B one way, events");
    let ours = |wait| one_way(wait, 64, 2_000_000, "/messages_per_second");
    all.push(Contest { theirs: None, ..new(spinning, Rate(1e6), Theirs::Plain, ours("spin")) });
    all.push(new(spinning, TimesRate(NO_SLOWER), peer(Peer::ucx_rate(64, 500_000)), ours("spin")));
    all.push(new(sleeping, TimesRate(NO_SLOWER), peer(Peer::sockperf_rate(64)), ours("event")));
    for size in STREAM_SIZES {
        let name = format!("{} one way", size_label(size.into()));
        let ucx = Peer::ucx_throughput(size, usual_iterations(job::Mode::Throughput, size));
        if size == 64 << 10 {
            all.push(new(&name, TimesThroughput(0.8), Theirs::Tcp("stream", size, 32_768), bulk("spin", size)));
        }
        all.push(new(&name, TimesThroughput(NO_SLOWER), peer(ucx), bulk("spin", size)));
        if size <= IPERF3_LONGEST {
            let (name, iperf3) = (format!("{name}, events"), peer(Peer::iperf3(size)));
            all.push(new(&name, TimesThroughput(NO_SLOWER), iperf3, bulk("event", size)));
        }
    }
    for connections in CONNECTIONS {
        let echoes = if connections == 1 { 20_000 } else { 200_000 };
        let (theirs, ours) = (Theirs::TcpEchoes(connections, echoes), Work::Echoes(connections, echoes));
        let name = format!("64 B echoes on {connections} connection{}", if connections == 1 { "" } else { "s" });
        let place = Some(Place::Connections(connections));
        all.push(Contest { place, ..new(&name, TimesRate(0.8), theirs, ours) });
    }
    let large = Theirs::Otherwise("256 KiB buffers", Work::Mix("large", 20_000));
    all.push(new("requests of 1 B to 256 KiB", TimesRate(0.9), large, Work::Mix("default", 20_000)));
    let stream = || Theirs::Tcp("stream", 64 << 10, 32_768);
    all.push(new("RDMA Write of 64 KiB", TimesThroughput(0.8), stream(), Work::OneSided("write", 32_768)));
    all.push(new("RDMA Read of 64 KiB", TimesThroughput(0.8), stream(), Work::OneSided("read", 32_768)));
    let words = Theirs::Tcp("spin", 8, 50_000);
    all.push(new("RDMA Read of 8 B, half of it", TimesLatency(1.4), words, Work::OneSided("word", 50_000)));
    let tls = |contest| Contest { mode: Some(Mode::Tls), ..contest };
    let psk = |contest| Contest { mode: Some(Mode::Psk), ..contest };
    let bulk = || bulk("spin", 64 << 10);
    let (openssl, connections) = (Theirs::Openssl(2 << 30), Work::Connections(1000));
    all.push(tls(new("TLS: 64 B half round trip", TimesLatency(1.25), Theirs::Plain, short())));
    all.push(psk(new("pre-shared key: 64 B, the same", TimesLatency(1.25), Theirs::Plain, short())));
    all.push(tls(new("TLS: 64 KiB one way", TimesThroughput(0.45), Theirs::Plain, bulk())));
    all.push(tls(new("TLS: 64 KiB one way", TimesThroughput(0.9), openssl, bulk())));
    all.push(psk(new("pre-shared key: 64 KiB one way", TimesThroughput(0.45), Theirs::Plain, bulk())));
    all.push(tls(new("TLS: connections, mutual", Connections, Theirs::Plain, connections)));
    all
}

impl Contest {
    /// Why the contest cannot take place here.
    fn hindrance(&self) -> Option<String> {
        let program = match &self.theirs {
            _ if self.mode.is_some() && !cfg!(feature = "secure") => {
                return Some("built without the feature secure".into());
            }
            Some(Theirs::Openssl(_)) => "openssl",
            Some(Theirs::Peer(peer)) => peer.program(),
            _ => return None,
        };
        (!pair::is_installed(program)).then(|| format!("{program} is not installed (make bench-setup)"))
    }

    /// Runs one round: first the competitor, then this library. A program by others that fails ends the contest, and no other.
    fn round(&self, processors: &Processors, files: &Files, outcome: &mut Outcome) -> Result<(), Failure> {
        let theirs = match &self.theirs {
            Some(Theirs::Tcp(kind, size, iterations)) => Some(bare(processors, kind, *size, *iterations)?),
            Some(Theirs::TcpEchoes(connections, count)) => Some(echoes(processors, "tcp", *connections, *count)?),
            Some(Theirs::Peer(peer)) => match peer.measure(processors) {
                Ok(figure) => Some(figure),
                Err(failure) => {
                    outcome.skipped = Some(failure.to_string());
                    return Ok(());
                }
            },
            Some(Theirs::Plain) => Some(self.ours.figure(processors, None)?),
            Some(Theirs::Otherwise(_, work)) => Some(work.figure(processors, None)?),
            Some(Theirs::Openssl(bytes)) => Some(openssl::measure(processors, files, *bytes)?),
            None => None,
        };
        outcome.theirs.extend(theirs);
        outcome.ours.push(self.ours.figure(processors, self.mode.map(|mode| (mode, files)))?);
        Ok(())
    }
}

impl Work {
    /// Does the work once, on connections that are secured in this way.
    fn figure(&self, processors: &Processors, secured: Option<(Mode, &Files)>) -> Result<f64, Failure> {
        let flags = |side| secured.map(|(mode, files)| files.flags(mode, side)).unwrap_or_default();
        let [server, client] = ["server", "client"].map(flags);
        match self {
            Self::Pingpong(what, figure) => {
                let server =
                    words(&format!("{PINGPONG} server --bind 127.0.0.1 --port 0 --provider iwarp --child {server}"));
                let client = words(&format!("{PINGPONG} client {{}} --provider iwarp --json - {what} {client}"));
                pointed(&pair::run(processors, &server, &client)?, figure)
            }
            Self::OneSided(operation, iterations) => {
                let client = words(&format!("one-sided-client {operation} {{}} {iterations}"));
                figure(&pair::run(processors, &words("one-sided-server"), &client)?)
            }
            Self::Echoes(connections, count) => echoes(processors, "reactor", *connections, *count),
            Self::Mix(buffers, count) => {
                let client = words(&format!("mix-client {buffers} {{}} {count}"));
                figure(&pair::run(processors, &words(&format!("mix-server {buffers}")), &client)?)
            }
            Self::Connections(count) => {
                let server = words(&format!("connections-server {server}"));
                let client = words(&format!("connections-client {{}} {count} {client}"));
                figure(&pair::run(processors, &server, &client)?)
            }
        }
    }
}

/// Reads a figure from the JSON of `rdma-pingpong`.
fn pointed(text: &str, figure: &str) -> Result<f64, Failure> {
    let value: Value = serde_json::from_str(text).map_err(Failure::new)?;
    let found = value.pointer(figure).and_then(Value::as_f64);
    found.ok_or_else(|| Failure::new(format!("rdma-pingpong has no {figure} in {text}")))
}

/// Runs the contests that have `only` in their names, round by round, so that other work of the machine meets all of them alike.
///
/// # Errors
/// A process did not do its work, or no contest has such a name.
pub fn run(rounds: u32, only: &str, processors: &Processors) -> Result<Vec<Outcome>, Failure> {
    let (contests, others): (Vec<_>, Vec<_>) = contests().into_iter().partition(|contest| contest.name.contains(only));
    if contests.is_empty() {
        let mut names: Vec<_> = others.into_iter().map(|contest| contest.name).collect();
        names.dedup();
        return Err(Failure::new(format!(
            "--only {only}: no row has that in its name; the rows are: {}",
            names.join("; ")
        )));
    }
    let files = Files::new()?;
    let mut outcomes: Vec<Outcome> = contests.iter().map(Outcome::new).collect();
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        for (contest, outcome) in contests.iter().zip(&mut outcomes).filter(|(_, outcome)| outcome.skipped.is_none()) {
            contest.round(processors, &files, outcome)?;
        }
    }
    Ok(outcomes)
}

fn bare(processors: &Processors, kind: &str, size: u32, iterations: u64) -> Result<f64, Failure> {
    let client = words(&format!("tcp-client {kind} {{}} {size} {iterations}"));
    figure(&pair::run(processors, &words(&format!("tcp-server {kind} {size}")), &client)?)
}

fn echoes(processors: &Processors, carrier: &str, connections: u32, count: u64) -> Result<f64, Failure> {
    let client = words(&format!("many-client {carrier} {{}} {connections} {count}"));
    figure(&pair::run(processors, &words(&format!("many-server {carrier}")), &client)?)
}

/// Reads the figure that a client printed.
fn figure(text: &str) -> Result<f64, Failure> {
    text.trim().parse().map_err(|_| Failure::new(format!("a client printed {text:?}")))
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(String::from).collect()
}

/// The figures of a contest's rounds.
#[derive(Debug)]
pub struct Outcome {
    name: String,
    place: Option<Place>,
    target: Target,
    against: Option<&'static str>,
    /// The command line of a program by others.
    command: Option<String>,
    /// Why there are no figures, or not all of them.
    skipped: Option<String>,
    theirs: Vec<f64>,
    ours: Vec<f64>,
}

impl Outcome {
    fn new(contest: &Contest) -> Self {
        Self {
            name: contest.name.clone(),
            place: contest.place,
            target: contest.target,
            against: contest.theirs.as_ref().map(Theirs::name),
            command: match &contest.theirs {
                Some(Theirs::Peer(peer)) => Some(peer.command().into()),
                _ => None,
            },
            skipped: contest.hindrance(),
            theirs: Vec::new(),
            ours: Vec::new(),
        }
    }

    /// This library's figure over the competitor's. The median is taken over the ratios of rounds, because other work
    /// of the machine changes more between rounds than within one.
    fn ratio(&self) -> Option<f64> {
        let ratios: Vec<f64> = self.ours.iter().zip(&self.theirs).map(|(ours, theirs)| ours / theirs).collect();
        (!ratios.is_empty()).then(|| median(&ratios))
    }

    /// Whether the target is met, or there is none.
    #[must_use]
    pub fn is_met(&self) -> bool {
        match (self.target, self.ratio()) {
            _ if self.skipped.is_some() => true,
            (Target::Connections, _) => true,
            (Target::TimesLatency(most), Some(ratio)) => ratio <= most,
            (Target::TimesThroughput(least) | Target::TimesRate(least), Some(ratio)) => ratio >= least,
            (Target::Rate(least), _) => median(&self.ours) >= least,
            (_, None) => false,
        }
    }

    fn unit(&self) -> &'static str {
        match self.target {
            Target::TimesLatency(_) => "us",
            Target::TimesThroughput(_) => "Gbit/s",
            Target::Rate(_) | Target::TimesRate(_) => "messages/s",
            Target::Connections => "connections/s",
        }
    }

    /// Writes the median of figures for the table.
    fn cell(&self, figures: &[f64]) -> String {
        match (self.target, median(figures)) {
            _ if figures.is_empty() => "-".into(),
            (Target::Rate(_) | Target::TimesRate(_), rate) if rate >= 1e6 => format!("{:.2} M/s", rate / 1e6),
            (Target::Rate(_) | Target::TimesRate(_) | Target::Connections, rate) => format!("{rate:.0} /s"),
            (_, figure) => format!("{figure:.2} {}", self.unit()),
        }
    }

    /// Writes everything as JSON, with the rounds.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "name": self.name,
            "against": self.against,
            "command": self.command,
            "skipped": self.skipped,
            "other": (!self.theirs.is_empty()).then(|| median(&self.theirs)),
            "rdma_reactor": (!self.ours.is_empty()).then(|| median(&self.ours)),
            "unit": self.unit(),
            "ratio": self.ratio(),
            "met": self.is_met(),
            "other_rounds": self.theirs,
            "rdma_reactor_rounds": self.ours,
        })
    }
}

/// The head of the table.
#[must_use]
pub fn head() -> String {
    format!("{:<35} {:>15} {:>14} {:>14} {:>7} {:>10}", "", "against", "its figure", "rdma-reactor", "ratio", "target")
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let against = self.against.unwrap_or("-");
        if let Some(why) = &self.skipped {
            return write!(f, "{:<35} {against:>15} skipped: {why}", self.name);
        }
        let ratio = self.ratio().map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
        let target = match self.target {
            Target::TimesLatency(most) => format!("<= {most}"),
            Target::TimesThroughput(least) | Target::TimesRate(least) => format!(">= {least}"),
            Target::Rate(least) => format!(">= {} M/s", least / 1e6),
            Target::Connections => "-".into(),
        };
        let verdict = if self.is_met() { "ok" } else { "MISSED" };
        let (theirs, ours) = (self.cell(&self.theirs), self.cell(&self.ours));
        write!(f, "{:<35} {against:>15} {theirs:>14} {ours:>14} {ratio:>7} {target:>10} {verdict}", self.name)
    }
}

/// Draws the spinning half round trips by size: of this library, and of each competitor.
///
/// # Errors
/// No row with a size was measured.
pub fn latency_by_size(outcomes: &[Outcome]) -> Result<String, Failure> {
    let at = |place| if let Place::Size(size) = place { Some(size) } else { None };
    let theirs = |against| points(outcomes, against, at, |outcome| &outcome.theirs);
    let ours = |against| points(outcomes, against, at, |outcome| &outcome.ours);
    let lines = [
        ("rdma-reactor, median", ours("bare TCP"), RGBColor(31, 96, 168)),
        ("bare TCP, median", theirs("bare TCP"), RGBColor(120, 120, 120)),
        ("UCX, median", theirs("UCX"), RGBColor(214, 96, 32)),
        ("rdma-reactor, mean", ours("libfabric"), RGBColor(140, 180, 220)),
        ("libfabric, mean", theirs("libfabric"), RGBColor(60, 150, 80)),
    ];
    let lines: Vec<_> = lines.into_iter().filter(|(_, points, _)| !points.is_empty()).collect();
    chart::by_size("TCP over the loopback, both sides spinning", "half round trip, us", &lines)
}

/// Draws the echoes per second by connections: of this library, and of bare TCP.
///
/// # Errors
/// No row with connections was measured.
pub fn rate_by_connections(outcomes: &[Outcome]) -> Result<String, Failure> {
    let at = |place| if let Place::Connections(count) = place { Some(count) } else { None };
    let lines = [
        ("rdma-reactor", points(outcomes, "bare TCP", at, |outcome| &outcome.ours), RGBColor(31, 96, 168)),
        ("bare TCP", points(outcomes, "bare TCP", at, |outcome| &outcome.theirs), RGBColor(120, 120, 120)),
    ];
    chart::by_connections("TCP over the loopback, both sides sleeping", "echoes of 64 B per second", &lines)
}

/// The medians of the contests with a competitor that have a place in a picture.
fn points(
    outcomes: &[Outcome],
    against: &str,
    at: fn(Place) -> Option<u32>,
    figures: fn(&Outcome) -> &[f64],
) -> Vec<(f64, f64)> {
    let of_it = outcomes.iter().filter(|outcome| outcome.against == Some(against) && !outcome.theirs.is_empty());
    of_it.filter_map(|outcome| Some((f64::from(outcome.place.and_then(at)?), median(figures(outcome))))).collect()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn played(target: Target, theirs: Vec<f64>, ours: Vec<f64>) -> Outcome {
        let (name, place, against, command, skipped) = (String::new(), None, None, None, None);
        Outcome { name, place, target, against, command, skipped, theirs, ours }
    }

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0]), 2.5);
    }

    #[test]
    fn a_target_is_met_on_its_own_side() {
        let outcome = |target, theirs: &[f64], ours| played(target, theirs.to_vec(), vec![ours]);
        assert!(outcome(Target::TimesLatency(1.3), &[4.0], 5.0).is_met());
        assert!(!outcome(Target::TimesLatency(1.3), &[4.0], 6.0).is_met());
        assert!(outcome(Target::TimesThroughput(0.8), &[10.0], 9.0).is_met());
        assert!(!outcome(Target::TimesThroughput(0.8), &[10.0], 7.0).is_met());
        assert!(outcome(Target::Rate(1e6), &[], 2e6).is_met());
    }

    #[test]
    fn a_ratio_is_of_rounds_not_of_medians() {
        let (theirs, ours) = (vec![4.0, 4.0, 4.0, 6.0, 6.0], vec![5.0, 8.0, 5.0, 7.5, 7.5]);
        let outcome = played(Target::TimesLatency(1.3), theirs, ours);
        assert_eq!(outcome.ratio(), Some(1.25));
    }
}
