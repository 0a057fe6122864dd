//! The contests: the work of both sides, the figure that counts, and the target.

use std::fmt;

use serde_json::{Value, json};

use crate::pingpong::failure::Failure;

use super::pair::{self, PINGPONG, Processors};

/// The target of a contest.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Target {
    /// At most this many times the competitor's latency.
    TimesLatency(f64),
    /// At least this many times the competitor's throughput.
    TimesThroughput(f64),
    /// At least this many messages per second; there is no competitor.
    Rate(f64),
}

/// A contest: the same work, done by bare TCP and by this library.
#[derive(Debug)]
struct Contest {
    name: &'static str,
    target: Target,
    /// The work of bare TCP, and the number of iterations.
    tcp: Option<(&'static str, u64)>,
    ours: Ours,
}

/// The work of this library.
#[derive(Debug)]
enum Ours {
    /// Flags of `rdma-pingpong client`, and the place of the figure in its JSON.
    Pingpong(&'static str, &'static str),
    /// The operation of `one-sided-client`, and the number of iterations.
    OneSided(&'static str, u64),
}

/// All contests.
const CONTESTS: [Contest; 7] = [
    Contest {
        name: "64 B half round trip, spinning",
        target: Target::TimesLatency(1.3),
        tcp: Some(("spin", 50_000)),
        ours: Ours::Pingpong("--mode latency --wait spin --size 64 --iters 50000 --warmup 5000", "/half_rtt_us/p50"),
    },
    Contest {
        name: "64 B half round trip, events",
        target: Target::TimesLatency(1.3),
        tcp: Some(("epoll", 10_000)),
        ours: Ours::Pingpong("--mode latency --wait event --size 64 --iters 10000 --warmup 1000", "/half_rtt_us/p50"),
    },
    Contest {
        name: "64 B one way",
        target: Target::Rate(1e6),
        tcp: None,
        ours: Ours::Pingpong(
            "--mode throughput --wait spin --size 64 --iters 2000000 --warmup 100000",
            "/messages_per_second",
        ),
    },
    Contest {
        name: "64 KiB one way",
        target: Target::TimesThroughput(0.8),
        tcp: Some(("stream", 32_768)),
        ours: Ours::Pingpong(
            "--mode throughput --wait spin --size 64K --iters 32768 --warmup 1000",
            "/gbit_per_second",
        ),
    },
    Contest {
        name: "RDMA Write of 64 KiB",
        target: Target::TimesThroughput(0.8),
        tcp: Some(("stream", 32_768)),
        ours: Ours::OneSided("write", 32_768),
    },
    Contest {
        name: "RDMA Read of 64 KiB",
        target: Target::TimesThroughput(0.8),
        tcp: Some(("stream", 32_768)),
        ours: Ours::OneSided("read", 32_768),
    },
    Contest {
        name: "RDMA Read of 8 B, half of it",
        target: Target::TimesLatency(1.4),
        tcp: Some(("spin-word", 50_000)),
        ours: Ours::OneSided("word", 50_000),
    },
];

impl Contest {
    /// Runs one round: first bare TCP, then this library.
    fn round(&self, processors: &Processors, outcome: &mut Outcome) -> Result<(), Failure> {
        if let Some((kind, iterations)) = self.tcp {
            outcome.tcp.push(bare(processors, kind, iterations)?);
        }
        outcome.ours.push(match self.ours {
            Ours::Pingpong(flags, figure) => pingpong(processors, flags, figure)?,
            Ours::OneSided(operation, iterations) => {
                let client = words(&format!("one-sided-client {operation} {{}} {iterations}"));
                figure(&pair::run(processors, &words("one-sided-server"), &client)?)?
            }
        });
        Ok(())
    }
}

fn pingpong(processors: &Processors, flags: &str, figure: &str) -> Result<f64, Failure> {
    let server = words(&format!("{PINGPONG} server --bind 127.0.0.1 --port 0 --provider iwarp --child"));
    let client = words(&format!("{PINGPONG} client {{}} --provider iwarp --json - {flags}"));
    let text = pair::run(processors, &server, &client)?;
    let value: Value = serde_json::from_str(&text).map_err(Failure::new)?;
    let found = value.pointer(figure).and_then(Value::as_f64);
    found.ok_or_else(|| Failure::new(format!("rdma-pingpong has no {figure} in {text}")))
}

/// Runs all contests, round by round, so that other work of the machine meets all of them alike.
///
/// # Errors
/// A process did not do its work.
pub fn run(rounds: u32, processors: &Processors) -> Result<Vec<Outcome>, Failure> {
    let mut outcomes: Vec<Outcome> = CONTESTS.iter().map(Outcome::new).collect();
    for _ in 0..rounds {
        for (contest, outcome) in CONTESTS.iter().zip(&mut outcomes) {
            contest.round(processors, outcome)?;
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
    tcp: Vec<f64>,
    ours: Vec<f64>,
}

impl Outcome {
    const fn new(contest: &Contest) -> Self {
        Self { name: contest.name, target: contest.target, tcp: Vec::new(), ours: Vec::new() }
    }

    /// This library's figure over the competitor's. The median is taken over the ratios of rounds, because other work
    /// of the machine changes more between rounds than within one.
    fn ratio(&self) -> Option<f64> {
        let ratios: Vec<f64> = self.ours.iter().zip(&self.tcp).map(|(ours, tcp)| ours / tcp).collect();
        (!ratios.is_empty()).then(|| median(&ratios))
    }

    /// Whether the target is met.
    #[must_use]
    pub fn is_met(&self) -> bool {
        match (self.target, self.ratio()) {
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
        }
    }

    /// Writes everything as JSON, with the rounds.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "name": self.name,
            "bare_tcp": (!self.tcp.is_empty()).then(|| median(&self.tcp)),
            "rdma_reactor": median(&self.ours),
            "unit": match self.target { Target::Rate(_) => "messages/s", _ => self.unit().0 },
            "ratio": self.ratio(),
            "met": self.is_met(),
            "bare_tcp_rounds": self.tcp,
            "rdma_reactor_rounds": self.ours,
        })
    }
}

/// The head of the table.
#[must_use]
pub fn head() -> String {
    format!("{:<32} {:>14} {:>14} {:>7} {:>10}", "", "bare TCP", "rdma-reactor", "ratio", "target")
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
        };
        let verdict = if self.is_met() { "ok" } else { "MISSED" };
        let (tcp, ours) = (cell(&self.tcp), cell(&self.ours));
        write!(f, "{:<32} {tcp:>14} {ours:>14} {ratio:>7} {target:>10} {verdict}", self.name)
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

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0]), 2.5);
    }

    #[test]
    fn a_target_is_met_on_its_own_side() {
        let outcome =
            |target, tcp: &[f64], ours: f64| Outcome { name: "", target, tcp: tcp.to_vec(), ours: vec![ours] };
        assert!(outcome(Target::TimesLatency(1.3), &[4.0], 5.0).is_met());
        assert!(!outcome(Target::TimesLatency(1.3), &[4.0], 6.0).is_met());
        assert!(outcome(Target::TimesThroughput(0.8), &[10.0], 9.0).is_met());
        assert!(!outcome(Target::TimesThroughput(0.8), &[10.0], 7.0).is_met());
        assert!(outcome(Target::Rate(1e6), &[], 2e6).is_met());
    }

    #[test]
    fn a_ratio_is_of_rounds_not_of_medians() {
        let (tcp, ours) = (vec![4.0, 4.0, 4.0, 6.0, 6.0], vec![5.0, 8.0, 5.0, 7.5, 7.5]);
        let outcome = Outcome { name: "", target: Target::TimesLatency(1.3), tcp, ours };
        assert_eq!(outcome.ratio(), Some(1.25));
    }
}
