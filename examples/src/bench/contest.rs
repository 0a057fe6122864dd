//! The contests: the work of both sides, the figure that counts, and the target.

use std::fmt;

use serde_json::{Value, json};

use crate::pingpong::failure::Failure;

use super::openssl;
use super::pair::{self, PINGPONG, Processors};
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
    /// Connections per second, of which nothing is wanted but the figure.
    Connections,
}

/// A contest: the same work, done by this library and by somebody else.
#[derive(Debug)]
struct Contest {
    name: &'static str,
    target: Target,
    theirs: Option<Theirs>,
    ours: Work,
    /// How this library's connections are secured.
    mode: Option<Mode>,
}

/// The competitor.
#[derive(Clone, Copy, Debug)]
enum Theirs {
    /// Bare TCP: its work, and the number of iterations.
    Tcp(&'static str, u64),
    /// This library with the same work, on connections that are not secured.
    Plain,
    /// `openssl s_server` and `openssl s_client`: the number of bytes.
    Openssl(u64),
}

impl Theirs {
    const fn name(self) -> &'static str {
        match self {
            Self::Tcp(..) => "bare TCP",
            Self::Plain => "plain",
            Self::Openssl(_) => "openssl",
        }
    }
}

/// The work of this library.
#[derive(Debug)]
enum Work {
    /// Flags of `rdma-pingpong client`, and the place of the figure in its JSON.
    Pingpong(&'static str, &'static str),
    /// The operation of `one-sided-client`, and the number of iterations.
    OneSided(&'static str, u64),
    /// Connections one after another, and their number.
    Connections(u64),
}

const LATENCY: &str = "--mode latency --wait spin --size 64 --iters 50000 --warmup 5000";
const BULK: &str = "--mode throughput --wait spin --size 64K --iters 32768 --warmup 1000";

/// All contests.
const CONTESTS: [Contest; 13] = [
    Contest {
        name: "64 B half round trip, spinning",
        target: Target::TimesLatency(1.3),
        theirs: Some(Theirs::Tcp("spin", 50_000)),
        ours: Work::Pingpong(LATENCY, "/half_rtt_us/p50"),
        mode: None,
    },
    Contest {
        name: "64 B half round trip, events",
        target: Target::TimesLatency(1.3),
        theirs: Some(Theirs::Tcp("epoll", 10_000)),
        ours: Work::Pingpong("--mode latency --wait event --size 64 --iters 10000 --warmup 1000", "/half_rtt_us/p50"),
        mode: None,
    },
    Contest {
        name: "64 B one way",
        target: Target::Rate(1e6),
        theirs: None,
        ours: Work::Pingpong(
            "--mode throughput --wait spin --size 64 --iters 2000000 --warmup 100000",
            "/messages_per_second",
        ),
        mode: None,
    },
    Contest {
        name: "64 KiB one way",
        target: Target::TimesThroughput(0.8),
        theirs: Some(Theirs::Tcp("stream", 32_768)),
        ours: Work::Pingpong(BULK, "/gbit_per_second"),
        mode: None,
    },
    Contest {
        name: "RDMA Write of 64 KiB",
        target: Target::TimesThroughput(0.8),
        theirs: Some(Theirs::Tcp("stream", 32_768)),
        ours: Work::OneSided("write", 32_768),
        mode: None,
    },
    Contest {
        name: "RDMA Read of 64 KiB",
        target: Target::TimesThroughput(0.8),
        theirs: Some(Theirs::Tcp("stream", 32_768)),
        ours: Work::OneSided("read", 32_768),
        mode: None,
    },
    Contest {
        name: "RDMA Read of 8 B, half of it",
        target: Target::TimesLatency(1.4),
        theirs: Some(Theirs::Tcp("spin-word", 50_000)),
        ours: Work::OneSided("word", 50_000),
        mode: None,
    },
    Contest {
        name: "TLS: 64 B half round trip",
        target: Target::TimesLatency(1.25),
        theirs: Some(Theirs::Plain),
        ours: Work::Pingpong(LATENCY, "/half_rtt_us/p50"),
        mode: Some(Mode::Tls),
    },
    Contest {
        name: "pre-shared key: 64 B, the same",
        target: Target::TimesLatency(1.25),
        theirs: Some(Theirs::Plain),
        ours: Work::Pingpong(LATENCY, "/half_rtt_us/p50"),
        mode: Some(Mode::Psk),
    },
    Contest {
        name: "TLS: 64 KiB one way",
        target: Target::TimesThroughput(0.45),
        theirs: Some(Theirs::Plain),
        ours: Work::Pingpong(BULK, "/gbit_per_second"),
        mode: Some(Mode::Tls),
    },
    Contest {
        name: "TLS: 64 KiB one way",
        target: Target::TimesThroughput(0.9),
        theirs: Some(Theirs::Openssl(2 << 30)),
        ours: Work::Pingpong(BULK, "/gbit_per_second"),
        mode: Some(Mode::Tls),
    },
    Contest {
        name: "pre-shared key: 64 KiB one way",
        target: Target::TimesThroughput(0.45),
        theirs: Some(Theirs::Plain),
        ours: Work::Pingpong(BULK, "/gbit_per_second"),
        mode: Some(Mode::Psk),
    },
    Contest {
        name: "TLS: connections, mutual",
        target: Target::Connections,
        theirs: Some(Theirs::Plain),
        ours: Work::Connections(1000),
        mode: Some(Mode::Tls),
    },
];

impl Contest {
    /// Why the contest cannot take place here.
    fn hindrance(&self) -> Option<&'static str> {
        match (self.mode, self.theirs) {
            (Some(_), _) if !cfg!(feature = "secure") => Some("built without the feature secure"),
            (_, Some(Theirs::Openssl(_))) if !openssl::is_there() => Some("openssl is not installed"),
            _ => None,
        }
    }

    /// Runs one round: first the competitor, then this library.
    fn round(&self, processors: &Processors, files: &Files, outcome: &mut Outcome) -> Result<(), Failure> {
        match self.theirs {
            Some(Theirs::Tcp(kind, iterations)) => outcome.theirs.push(bare(processors, kind, iterations)?),
            Some(Theirs::Plain) => outcome.theirs.push(self.ours.figure(processors, None)?),
            Some(Theirs::Openssl(bytes)) => outcome.theirs.push(openssl::measure(processors, files, bytes)?),
            None => {}
        }
        outcome.ours.push(self.ours.figure(processors, self.mode.map(|mode| (mode, files)))?);
        Ok(())
    }
}

impl Work {
    /// Does the work once, on connections that are secured in this way.
    fn figure(&self, processors: &Processors, secured: Option<(Mode, &Files)>) -> Result<f64, Failure> {
        let flags = |side| secured.map(|(mode, files)| files.flags(mode, side)).unwrap_or_default();
        let [server, client] = ["server", "client"].map(flags);
        match *self {
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
    let contests: Vec<_> = CONTESTS.iter().filter(|contest| contest.name.contains(only)).collect();
    if contests.is_empty() {
        let names: Vec<_> = CONTESTS.iter().map(|contest| contest.name).collect();
        return Err(Failure::new(format!(
            "--only {only}: no row has that in its name; the rows are: {}",
            names.join("; ")
        )));
    }
    let files = Files::new()?;
    let mut outcomes: Vec<Outcome> = contests.iter().map(|contest| Outcome::new(contest)).collect();
    for _ in 0..rounds {
        for (contest, outcome) in contests.iter().zip(&mut outcomes).filter(|(_, outcome)| outcome.skipped.is_none()) {
            contest.round(processors, &files, outcome)?;
        }
    }
    Ok(outcomes)
}

fn bare(processors: &Processors, kind: &str, iterations: u64) -> Result<f64, Failure> {
    let client = words(&format!("tcp-client {kind} {{}} {iterations}"));
    figure(&pair::run(processors, &words(&format!("tcp-server {kind}")), &client)?)
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
    name: &'static str,
    target: Target,
    against: Option<&'static str>,
    /// Why there are no figures.
    skipped: Option<&'static str>,
    theirs: Vec<f64>,
    ours: Vec<f64>,
}

impl Outcome {
    fn new(contest: &Contest) -> Self {
        let (name, target, against) = (contest.name, contest.target, contest.theirs.map(Theirs::name));
        Self { name, target, against, skipped: contest.hindrance(), theirs: Vec::new(), ours: Vec::new() }
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
            (Target::TimesThroughput(least), Some(ratio)) => ratio >= least,
            (Target::Rate(least), _) => median(&self.ours) >= least,
            (_, None) => false,
        }
    }

    fn unit(&self) -> (&'static str, f64) {
        match self.target {
            Target::TimesLatency(_) => ("us", 1.0),
            Target::TimesThroughput(_) => ("Gbit/s", 1.0),
            Target::Rate(_) => ("M/s", 1e6),
            Target::Connections => ("/s", 1.0),
        }
    }

    /// Writes everything as JSON, with the rounds.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "name": self.name,
            "against": self.against,
            "skipped": self.skipped,
            "other": (!self.theirs.is_empty()).then(|| median(&self.theirs)),
            "rdma_reactor": (!self.ours.is_empty()).then(|| median(&self.ours)),
            "unit": match self.target {
                Target::Rate(_) => "messages/s",
                Target::Connections => "connections/s",
                _ => self.unit().0,
            },
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
    format!("{:<32} {:>8} {:>14} {:>14} {:>7} {:>10}", "", "against", "its figure", "rdma-reactor", "ratio", "target")
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let against = self.against.unwrap_or("-");
        if let Some(why) = self.skipped {
            return write!(f, "{:<32} {against:>8} skipped: {why}", self.name);
        }
        let (unit, scale) = self.unit();
        let cell = |values: &[f64]| match values {
            [] => "-".into(),
            _ => format!("{:.2} {unit}", median(values) / scale),
        };
        let ratio = self.ratio().map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
        let target = match self.target {
            Target::TimesLatency(most) => format!("<= {most}"),
            Target::TimesThroughput(least) => format!(">= {least}"),
            Target::Rate(least) => format!(">= {} M/s", least / 1e6),
            Target::Connections => "-".into(),
        };
        let verdict = if self.is_met() { "ok" } else { "MISSED" };
        let (theirs, ours) = (cell(&self.theirs), cell(&self.ours));
        write!(f, "{:<32} {against:>8} {theirs:>14} {ours:>14} {ratio:>7} {target:>10} {verdict}", self.name)
    }
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
        Outcome { name: "", target, against: None, skipped: None, theirs, ours }
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
