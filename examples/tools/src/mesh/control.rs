//! The messages between rank 0 and the other ranks. They are encoded as JSON, because few messages are sent. The [`super::hello`] detects a
//! rank with another version of the program.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::text::is_hidden;

/// The length of the longest name in a report, in bytes. Longer names are truncated.
const MAX_NAME: usize = 64;
/// The length of the longest reason in a report, in bytes. Longer reasons are truncated.
const MAX_REASON: usize = 300;

/// The largest number of hardware counters in a report. Further counters are dropped.
const MAX_COUNTERS: usize = 256;

/// The largest rate in a report, in Gbit/s. A report is refused if one of its numbers is above the limit for that number, is negative, or
/// is not a number.
const MOST_GBIT: f64 = 1e5;
/// The largest latency in a report: one hour, in us.
const MOST_US: f64 = 3.6e9;
/// The largest duration in a report: thirty days, in seconds.
const MOST_SECONDS: f64 = 2.6e6;
/// The largest count in a report: of connects, round trips, messages or errors.
pub(super) const MOST_COUNT: f64 = 1e15;
/// The largest amount of memory in a report: one pebibyte, in KiB.
const MOST_KIB: f64 = (1_u64 << 40) as f64;

/// A description of a rank. Each rank sends it as its first report.
// bound: tool-mesh
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name of the rank's host in the report.
    pub host: String,
    /// The address at which other ranks reach this rank. Rank 0 replaces it by the address from
    /// which the rank has connected, unless the rank's entry in the list of hosts resolves to it.
    /// `None` means that this rank is on the host of rank 0; the other ranks then use the address
    /// of rank 0.
    pub address: Option<IpAddr>,
    /// The port that the rank listens on.
    pub port: u16,
    /// The provider that carries the rank's connections.
    pub provider: String,
    /// The name of the device that the connections use.
    pub device: String,
    /// The number of processors that the rank's process may use. `None` if the system does not
    /// report it.
    pub processors: Option<usize>,
}

/// The quantity that a pair of ranks measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Figure {
    /// Half of a round trip.
    Latency,
    /// The rate of RDMA Writes, one way.
    Bandwidth,
}

/// An order from rank 0 to another rank.
// bound: tool-mesh
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Connect to the ranks that have joined.
    Connect {
        /// The first report of each rank; `None` for a rank that did not join.
        ranks: Vec<Option<Entry>>,
    },
    /// Measure one figure with another rank.
    Measure {
        /// The number of the measurement.
        task: u32,
        /// The rank to measure with.
        peer: usize,
        /// The figure to measure.
        figure: Figure,
    },
    /// Send to all other ranks at the same time.
    Load,
    /// The run is over.
    End,
}

/// The half round trip between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencyFigures {
    /// The median, us.
    pub p50_us: f64,
    /// The 99th percentile, us.
    pub p99_us: f64,
    /// The number of round trips.
    pub samples: u64,
}

/// The result of a measurement between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum MeasuredFigure {
    /// Half of a round trip.
    Latency(LatencyFigures),
    /// The rate towards the other rank, in Gbit/s.
    Bandwidth(f64),
}

/// The messages that one rank has received from another one in the all-to-all load, in which all ranks send to all.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceivedLoad {
    /// The rank that has sent the messages.
    pub from: usize,
    /// The number of messages that have arrived.
    pub messages: u64,
    /// The rate at which payload arrived, in Gbit/s.
    pub gbit: f64,
    /// The number of errors: messages that were lost, duplicated, out of order, or had wrong content.
    pub errors: u64,
    /// True if the sender's last message has arrived.
    pub complete: bool,
}

/// A report from a rank to rank 0.
// bound: tool-mesh
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RankReport {
    /// The rank has joined.
    Joined(Entry),
    /// The rank has finished connecting: each of its connects has succeeded or was given up.
    Connected {
        /// The time that connecting took.
        took: Duration,
        /// The number of connects that the rank has tried.
        attempts: u64,
        /// The ranks to which this rank has no link, with the reasons.
        failed: Vec<(usize, String)>,
        /// The other ranks on the same host to which this rank is connected in shared memory.
        shm: Vec<usize>,
        /// The peak memory of the rank's process so far, in KiB.
        memory_kib: u64,
    },
    /// The rank is still connecting. The field is the number of links that the rank has opened so far.
    Progress(usize),
    /// A measurement has ended, with success or not.
    Result {
        /// The number of the measurement.
        task: u32,
        /// The result, or the reason why it failed.
        result: Result<MeasuredFigure, String>,
    },
    /// The hardware counters of the rank's device that have changed since the rank began, with the amount of each change.
    Moved(BTreeMap<String, u64>),
    /// A link between this rank and another one has ended.
    Lost {
        /// The rank at the other end of the link.
        peer: usize,
        /// The reason why the link has ended.
        why: String,
    },
    /// The all-to-all load has ended.
    Loaded {
        /// The messages received from each rank. Ranks from which none arrived are missing.
        heard: Vec<ReceivedLoad>,
        /// The peak memory of the rank's process so far, in KiB.
        memory_kib: u64,
    },
}

impl RankReport {
    /// Decodes a report. Names and reasons are truncated, so that they fit in a table. Unprintable characters are removed from them.
    ///
    /// # Errors
    /// The message is not a report, or has an impossible number. The text describes the fault.
    pub fn read(message: &[u8]) -> Result<Self, String> {
        // The error's text may quote the message. So the text is truncated, and unprintable characters in it are removed.
        let mut report = serde_json::from_slice(message).map_err(|error| {
            let mut what = format!("it sent no report: {error}");
            tidy(&mut what, MAX_REASON);
            what
        })?;
        Self::check(&report)?;
        match &mut report {
            Self::Joined(entry) => {
                for name in [&mut entry.host, &mut entry.provider, &mut entry.device] {
                    tidy(name, MAX_NAME);
                }
            }
            Self::Connected { failed, .. } => failed.iter_mut().for_each(|(_, why)| tidy(why, MAX_REASON)),
            Self::Result { result: Err(why), .. } | Self::Lost { why, .. } => tidy(why, MAX_REASON),
            Self::Moved(counters) => {
                let tidied = std::mem::take(counters).into_iter().take(MAX_COUNTERS).map(|(mut name, by)| {
                    tidy(&mut name, MAX_NAME);
                    (name, by)
                });
                *counters = tidied.collect();
            }
            Self::Progress(_) | Self::Result { .. } | Self::Loaded { .. } => {}
        }
        Ok(report)
    }

    /// Checks that each number is within its limits. If a number is not, returns a description of the first such number as the error.
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Connected { took, attempts, memory_kib, .. } => {
                plausible(took.as_secs_f64(), MOST_SECONDS, "s")?;
                plausible(*attempts as f64, MOST_COUNT, "connects")?;
                plausible(*memory_kib as f64, MOST_KIB, "KiB")
            }
            Self::Result { result: Ok(MeasuredFigure::Latency(latency)), .. } => {
                plausible(latency.p50_us, MOST_US, "us")?;
                plausible(latency.p99_us, MOST_US, "us")?;
                plausible(latency.samples as f64, MOST_COUNT, "round trips")
            }
            Self::Result { result: Ok(MeasuredFigure::Bandwidth(gbit)), .. } => plausible(*gbit, MOST_GBIT, "Gbit/s"),
            Self::Loaded { heard, memory_kib } => {
                for heard in heard {
                    plausible(heard.gbit, MOST_GBIT, "Gbit/s")?;
                    plausible(heard.messages as f64, MOST_COUNT, "messages")?;
                    plausible(heard.errors as f64, MOST_COUNT, "errors")?;
                }
                plausible(*memory_kib as f64, MOST_KIB, "KiB")
            }
            // The change of a counter has no limit, because the change may seem very large after the counter was reset.
            Self::Moved(_) | Self::Joined(_) | Self::Progress(_) | Self::Result { .. } | Self::Lost { .. } => Ok(()),
        }
    }
}

fn plausible(figure: f64, most: f64, unit: &str) -> Result<(), String> {
    if (0.0..=most).contains(&figure) {
        return Ok(());
    }
    Err(format!("it reports {figure:e} {unit}, and nothing has less than 0 or more than {most:e}"))
}

fn tidy(text: &mut String, most: usize) {
    let printable = text.chars().filter(|&c| !is_hidden(c));
    *text = printable
        .scan(0, |len, c| {
            *len += c.len_utf8();
            (*len <= most).then_some(c)
        })
        .collect();
}

/// Encodes an order or a report as a message.
pub fn write(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("numbers and texts have a form in JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_survive_the_trip_and_texts_are_cut_to_what_is_printable() {
        let latency = LatencyFigures { p50_us: 4.25, p99_us: 9.5, samples: 1000 };
        let report = RankReport::Result { task: 7, result: Ok(MeasuredFigure::Latency(latency)) };
        assert_eq!(RankReport::read(&write(&report)), Ok(report));
        let why = format!("a\n\u{1b}\u{202e}[31m{}", "é".repeat(1000));
        let Ok(RankReport::Lost { why, peer: 3 }) = RankReport::read(&write(&RankReport::Lost { peer: 3, why })) else {
            panic!()
        };
        assert!(why.starts_with("a[31mé") && why.len() <= MAX_REASON && why.len() > MAX_REASON - 2);
        assert!(RankReport::read(b"\xff").is_err());
        let what =
            RankReport::read(format!("{{\"\u{202e}{}\":1}}", "x".repeat(9000)).as_bytes()).expect_err("nonsense");
        assert!(what.starts_with("it sent no report: unknown variant `x") && what.len() <= MAX_REASON, "{what}");
    }

    #[test]
    fn figures_that_cannot_be_are_refused() {
        let latency = |p50_us, p99_us, samples| RankReport::Result {
            task: 1,
            result: Ok(MeasuredFigure::Latency(LatencyFigures { p50_us, p99_us, samples })),
        };
        let rate = |gbit| RankReport::Result { task: 1, result: Ok(MeasuredFigure::Bandwidth(gbit)) };
        let heard = |gbit, messages, errors| {
            let heard = ReceivedLoad { from: 0, messages, gbit, errors, complete: true };
            RankReport::Loaded { heard: vec![heard], memory_kib: 1 }
        };
        let connected = |seconds, attempts, memory_kib| {
            let took = Duration::from_secs(seconds);
            RankReport::Connected { took, attempts, failed: Vec::new(), shm: Vec::new(), memory_kib }
        };
        let good =
            [latency(0.0, MOST_US, 0), rate(MOST_GBIT), rate(0.0), heard(400.0, 1 << 40, 3), connected(60, 9, 9)];
        let moved = RankReport::Moved([("rcvd_seq_err".to_owned(), u64::MAX)].into());
        let good = good.into_iter().chain([moved]);
        for report in good {
            assert_eq!(RankReport::read(&write(&report)), Ok(report));
        }
        let bad = [
            latency(-5.0, 1.0, 1),
            latency(1.0, 1e308, 1),
            latency(1.0, 1.0, u64::MAX),
            rate(1e308),
            rate(-1e-9),
            heard(1e308, 1, 0),
            heard(-1.0, 1, 0),
            heard(1.0, u64::MAX, 0),
            heard(1.0, 1, u64::MAX),
            connected(u64::MAX, 1, 1),
            connected(1, u64::MAX, 1),
            connected(1, 1, u64::MAX),
        ];
        let many = RankReport::Moved((0..1000).map(|nth| (format!("\n{nth}{}", "x".repeat(100)), 1)).collect());
        let Ok(RankReport::Moved(few)) = RankReport::read(&write(&many)) else { panic!("a report") };
        assert!(few.len() <= MAX_COUNTERS && few.keys().all(|name| name.len() <= MAX_NAME && !name.contains('\n')));
        for report in bad {
            let why = RankReport::read(&write(&report)).expect_err("no rank has that");
            assert!(why.starts_with("it reports ") && why.len() < 100, "{why}");
        }
        // JSON cannot express infinity, and a number beyond the range of f64 is refused.
        assert!(RankReport::read(b"{\"Result\":{\"task\":1,\"result\":{\"Ok\":{\"Bandwidth\":1e999}}}}").is_err());
        assert!(RankReport::read(&write(&rate(f64::NAN))).is_err());
    }
}
