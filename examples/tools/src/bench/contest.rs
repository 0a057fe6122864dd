//! A contest: this library and a competitor do the same work in alternating rounds.

use std::thread;
use std::time::Duration;

use crate::pingpong::failure::Failure;
use crate::pingpong::output::Output;

use super::distance::{self, Distance};
use super::interrupt;
use super::machine;
use super::openssl;
use super::outcome::{Outcome, Round};
use super::pair::{self, Processors};
use super::peers::PeerProgram;
use super::ring;
use super::rows;
use super::sample::Sample;
use super::secured::{KeyFiles, SecurityMode};
use super::target::RowTarget;
use super::work::{self, Pingpong, RoundSettings, Work};

/// The x-coordinate of a contest's result in a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlotPoint {
    /// A position in the picture of the latency by message size. The field is the message size in bytes.
    Size(u32),
    /// A position in the picture of the echo rate by number of connections. The field is the number of connections.
    Connections(u32),
}

/// A contest: the same work, done by this library and by a competitor.
// local: rows of the benchmark
#[derive(Clone, Debug)]
pub struct Contest {
    /// The contest's name in the table.
    pub name: String,
    /// The position of the contest's result in a picture; `None` if no picture shows it.
    pub place: Option<PlotPoint>,
    /// The target that this library's result must meet.
    pub target: RowTarget,
    /// The distance between the processors in the rounds to which the target applies. If it is
    /// `None`, the target applies to the rounds with the nearest measured distance.
    pub at: Option<Distance>,
    /// The competitor that this library is compared with.
    pub theirs: Competitor,
    /// The measurement of this library.
    pub ours: Work,
    /// The security of this library's connections; `None` if they are not secured.
    pub mode: Option<SecurityMode>,
}

/// The competitor that this library is compared with.
#[derive(Clone, Debug)]
pub enum Competitor {
    /// There is no competitor: only this library is measured.
    Nobody,
    /// A measurement without any library, such as an exchange over bare TCP sockets.
    Bare(Baseline),
    /// A program of another project.
    Peer(PeerProgram),
    /// `sockperf` in an open loop. `sockperf` and this library send the same number of messages per second: the share `LOAD` of the
    /// maximum rate of the slower one.
    OpenLoop,
    /// This library with the same measurement, on connections that are not secured.
    Plain,
    /// This library with another measurement, which the text describes in the table.
    Otherwise(&'static str, Work),
    /// `openssl s_server` and `openssl s_client`. The field is the number of bytes to send.
    Openssl(u64),
}

/// A measurement without a library.
#[derive(Clone, Copy, Debug)]
pub enum Baseline {
    /// TCP: the kind of exchange, the size of a message in bytes, and the number of iterations.
    Tcp(&'static str, u32, u64),
    /// Echoes over TCP: the number of connections, and the total number of echoes on all connections.
    TcpEchoes(u32, u64),
    /// UDP: the kind of exchange, the size of a datagram in bytes, and the number of datagrams.
    Udp(&'static str, u32, u64),
    /// Messages of 64 B back and forth over a bare ring in shared memory. The field is the number of messages.
    RingLatency(u64),
    /// Messages of 64 B one way over a bare ring in shared memory. The field is the number of messages.
    RingRate(u64),
    /// One thread writes memory and another thread reads it: the size of a message in bytes, and the number of messages.
    RingTouched(u32, u64),
    /// Copies of memory: the size of a copy in bytes, and the number of copies.
    Memcpy(u32, u64),
}

/// The rate of an open loop, as a share of the slower side's maximum rate. The sides are the competitor and this library.
const LOAD: f64 = 0.8;
/// The time limit of one measurement on the bare ring.
const RING_LIMIT: Duration = Duration::from_secs(10);
/// The pause after an attempt that ran no round, because every contest already has enough rounds at the current distance between the
/// processors. During the pause, the host may move the processors.
const PAUSE: Duration = Duration::from_secs(2);

impl Baseline {
    fn measure(self, processors: &Processors) -> Result<Sample, Failure> {
        Ok(match self {
            Self::Tcp(kind, size, iterations) => work::bare(processors, kind, size, iterations)?,
            Self::TcpEchoes(connections, count) => work::echoes(processors, "tcp", connections, count)?,
            Self::Udp(kind, size, count) => work::datagrams(processors, "udp", kind, size, count)?,
            Self::RingLatency(count) => Sample::from(ring::half_round_trip(processors, count, RING_LIMIT) / 1e3),
            Self::RingRate(count) => Sample::from(ring::rate(processors, count)),
            Self::RingTouched(size, count) => Sample::from(ring::touched(processors, size, count)),
            Self::Memcpy(size, count) => Sample::from(ring::memcpy(processors, size, count)),
        })
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Tcp(..) | Self::TcpEchoes(..) => "bare TCP",
            Self::Udp(..) => "bare UDP",
            Self::RingLatency(_) | Self::RingRate(_) => "bare ring",
            Self::RingTouched(..) => "bare mapping",
            Self::Memcpy(..) => "memcpy",
        }
    }

    /// Returns the same measurement with one message, on at most [`work::SMOKE_CONNECTIONS`]
    /// connections.
    fn smoke(self) -> Self {
        match self {
            Self::Tcp(kind, size, _) => Self::Tcp(kind, size, 1),
            Self::TcpEchoes(connections, _) => Self::TcpEchoes(connections.min(work::SMOKE_CONNECTIONS), 1),
            Self::Udp(kind, size, _) => Self::Udp(kind, size, 1),
            Self::RingLatency(_) => Self::RingLatency(1),
            Self::RingRate(_) => Self::RingRate(1),
            Self::RingTouched(size, _) => Self::RingTouched(size, 1),
            Self::Memcpy(size, _) => Self::Memcpy(size, 1),
        }
    }

    /// Returns true if this measurement runs two threads that poll memory without pause, for more
    /// than one message.
    const fn spins(self) -> bool {
        matches!(self, Self::RingLatency(2..) | Self::RingRate(2..) | Self::RingTouched(_, 2..))
    }
}

impl From<Baseline> for Competitor {
    fn from(bare: Baseline) -> Self {
        Self::Bare(bare)
    }
}

impl From<PeerProgram> for Competitor {
    fn from(peer: PeerProgram) -> Self {
        Self::Peer(peer)
    }
}

impl From<Pingpong> for Work {
    fn from(work: Pingpong) -> Self {
        Self::Pingpong(work)
    }
}

impl Competitor {
    /// Returns the competitor's name in the table.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Nobody => "",
            Self::Bare(bare) => bare.name(),
            Self::Peer(peer) => peer.name(),
            Self::OpenLoop => "sockperf",
            Self::Plain => "plain",
            Self::Otherwise(difference, _) => difference,
            Self::Openssl(_) => "openssl",
        }
    }

    /// Returns the command line of the competitor if it is a program of another project, and otherwise `None`.
    #[must_use]
    pub fn command(&self) -> Option<String> {
        match self {
            Self::Peer(peer) => Some(peer.command().into()),
            Self::OpenLoop => Some(PeerProgram::sockperf_open_loop(None).command().into()),
            _ => None,
        }
    }

    /// Returns true if the competitor uses the system's congestion control and has no option to change that.
    const fn keeps_system_congestion(&self) -> bool {
        match self {
            Self::Peer(peer) => peer.keeps_system_congestion(),
            Self::OpenLoop | Self::Openssl(_) => true,
            _ => false,
        }
    }
}

/// The samples of one round: the competitor's, if there is one, and this library's.
type RoundSamples = (Option<Sample>, Sample);

impl Contest {
    /// Returns the measurements that use `rdma-pingpong`: this library's, the competitor's, both or
    /// none.
    pub fn pingpongs(&self) -> Vec<Pingpong> {
        let theirs = if let Competitor::Otherwise(_, work) = &self.theirs { Some(work) } else { None };
        let of = |work: &Work| if let Work::Pingpong(work) = work { Some(work.clone()) } else { None };
        [Some(&self.ours), theirs].into_iter().flatten().filter_map(of).collect()
    }

    /// Returns the reason why the contest cannot run on this machine. Returns `None` if the contest can run.
    #[must_use]
    pub fn hindrance(&self, processors: &Processors) -> Option<String> {
        let program = match &self.theirs {
            _ if self.mode.is_some() && !cfg!(feature = "secure") => {
                return Some("built without the feature secure".into());
            }
            Competitor::Bare(bare) if bare.spins() && processors.count() < 2 => {
                return Some("it needs two processors".into());
            }
            Competitor::Openssl(_) => "openssl",
            Competitor::OpenLoop => "sockperf",
            Competitor::Peer(peer) => peer.program(),
            _ => return None,
        };
        (!pair::is_installed(program)).then(|| format!("{program} is not installed (make bench-setup)"))
    }

    /// Returns the name of the TCP congestion control that both sides use, or `None` if they do not use TCP.
    #[must_use]
    pub fn congestion(&self) -> Option<String> {
        match &self.ours {
            Work::Pingpong(work) if work.provider == "shm" => None,
            Work::Datagrams(..) => None,
            _ if self.theirs.keeps_system_congestion() => Some(machine::system_congestion()),
            _ => Some(machine::own_congestion().map_or_else(machine::system_congestion, Into::into)),
        }
    }

    /// Returns the contest with one message and without the programs of other projects. It shows only if the contest works.
    #[must_use]
    pub fn smoke(self) -> Self {
        let theirs = match self.theirs {
            Competitor::Peer(_) | Competitor::OpenLoop | Competitor::Openssl(_) => Competitor::Nobody,
            Competitor::Bare(bare) => bare.smoke().into(),
            Competitor::Otherwise(difference, work) => Competitor::Otherwise(difference, work.smoke()),
            Competitor::Nobody | Competitor::Plain => self.theirs,
        };
        Self { theirs, ours: self.ours.smoke(), target: RowTarget::Figure(self.target.unit()), ..self }
    }

    /// Runs one round: first the competitor, then this library.
    fn round(&self, processors: &Processors, files: &KeyFiles) -> Result<RoundSamples, Failure> {
        let plain = RoundSettings { secured: None, system_congestion: self.theirs.keeps_system_congestion() };
        let terms = RoundSettings { secured: self.mode.map(|mode| (mode, files)), ..plain };
        let theirs = match &self.theirs {
            Competitor::Nobody => None,
            Competitor::Bare(bare) => Some(bare.measure(processors)?),
            Competitor::Peer(peer) => Some(peer.measure(processors)?),
            Competitor::OpenLoop => return self.open_loop(processors, &terms),
            Competitor::Plain => Some(self.ours.measure(processors, &plain)?),
            Competitor::Otherwise(_, work) => Some(work.measure(processors, &plain)?),
            Competitor::Openssl(bytes) => Some(openssl::measure(processors, files, *bytes)?.into()),
        };
        Ok((theirs, self.ours.measure(processors, &terms)?))
    }

    /// Measures the maximum rates of the competitor and of this library, and then the latency of both at the same lower rate.
    fn open_loop(&self, processors: &Processors, terms: &RoundSettings<'_>) -> Result<RoundSamples, Failure> {
        let theirs = PeerProgram::sockperf_open_loop(None).measure(processors)?.figure;
        let ours = self.ours.measure(processors, terms)?.figure;
        let rate = open_loop_rate(theirs, ours);
        let theirs = PeerProgram::sockperf_open_loop(Some(rate)).measure(processors)?;
        let ours = Pingpong::open_loop(rate as f64, "/open_loop_us/p99").measure(processors, terms)?;
        Ok((Some(theirs), ours))
    }
}

/// Returns the rate of an open loop in messages per second, given the maximum rates of both sides.
fn open_loop_rate(theirs: f64, ours: f64) -> u64 {
    (theirs.min(ours) * LOAD).max(1.0) as u64
}

/// The number of rounds that each contest needs, and the limit of attempts to measure them.
#[derive(Clone, Copy, Debug)]
pub struct RoundCounts {
    /// The number of rounds that a contest needs with near processors. A contest also runs up to this number of rounds with far processors.
    pub rounds: usize,
    /// The largest number of attempts. In each attempt, every contest that needs more rounds runs one round at most.
    pub tries: usize,
}

impl RoundCounts {
    /// Returns true if a contest with this outcome needs more rounds at this distance.
    fn is_missing(&self, outcome: &Outcome, distance: Distance) -> bool {
        outcome.at(distance).len() < self.rounds
    }

    /// Returns true if a contest needs no more rounds: it was skipped, it failed, or `rounds` rounds with near processors were measured.
    /// If the distance cannot be measured, rounds at an unknown distance count instead.
    fn is_over(&self, outcome: &Outcome) -> bool {
        outcome.skipped.is_some()
            || outcome.failed.is_some()
            || !self.is_missing(outcome, Distance::Near)
            || !self.is_missing(outcome, Distance::Unknown)
    }
}

/// Returns the contests whose names contain the text `only`.
///
/// # Errors
/// No contest's name contains `only`.
pub fn chosen(only: &str) -> Result<Vec<Contest>, Failure> {
    let (contests, others): (Vec<_>, Vec<_>) =
        rows::contests().into_iter().partition(|contest| contest.name.contains(only));
    if contests.is_empty() {
        let mut names: Vec<_> = others.into_iter().map(|contest| contest.name).collect();
        names.dedup();
        return Err(Failure::new(format!(
            "--only {only}: no row has that in its name; the rows are: {}",
            names.join("; ")
        )));
    }
    Ok(contests)
}

/// Runs the contests. Each attempt runs at most one round of every contest, so that other load of the machine affects all contests equally.
/// A failure ends only its contest. Returns early if a signal has requested the end of the program.
///
/// # Errors
/// The key files cannot be generated.
pub fn run(wanted: RoundCounts, contests: &[Contest], processors: &Processors) -> Result<Vec<Outcome>, Failure> {
    let files = KeyFiles::new()?;
    let mut outcomes: Vec<Outcome> = contests.iter().map(|contest| Outcome::new(contest, processors)).collect();
    let mut progress = Output::stderr();
    'tries: for attempt in 1..=wanted.tries {
        let mut measured = 0;
        let missing: Vec<_> =
            contests.iter().zip(&mut outcomes).filter(|(_, outcome)| !wanted.is_over(outcome)).collect();
        if missing.is_empty() {
            break;
        }
        progress.line(format_args!("try {attempt} of {}, {} rows", wanted.tries, missing.len()));
        for (contest, outcome) in missing {
            if interrupt::is_raised() {
                break 'tries;
            }
            let before = distance::probe(processors);
            if wanted.is_missing(outcome, before.map_or(Distance::Unknown, Distance::of)) {
                measured += 1;
                match contest.round(processors, &files) {
                    Ok((theirs, ours)) => {
                        let probes_ns = before.zip(distance::probe(processors)).map(|(before, after)| [before, after]);
                        let round = Round { theirs, ours, probes_ns };
                        progress.line(outcome.note(&round));
                        outcome.add(round);
                    }
                    // The signal has ended the processes of this round.
                    Err(_) if interrupt::is_raised() => break 'tries,
                    Err(failure) => {
                        progress.line(format_args!("{}: failed: {failure}", contest.name));
                        outcome.failed = Some(failure.to_string());
                    }
                }
            }
        }
        if measured == 0 {
            thread::sleep(PAUSE);
        }
    }
    Ok(outcomes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_side_sets_the_rate() {
        assert_eq!(open_loop_rate(100_000.0, 200_000.0), 80_000);
        assert_eq!(open_loop_rate(300_000.0, 200_000.0), 160_000);
        assert_eq!(open_loop_rate(0.0, 1.0), 1);
    }

    #[test]
    fn near_rounds_end_a_contest_and_far_ones_only_fill_their_column() {
        let processors = Processors::of_this_machine();
        let contest = rows::contests().into_iter().find(|contest| matches!(contest.theirs, Competitor::Nobody));
        let mut outcome = Outcome::new(&contest.expect("a contest without a competitor exists"), &processors);
        let wanted = RoundCounts { rounds: 2, tries: 5 };
        let round = |ns: f64| Round { theirs: None, ours: 1.0.into(), probes_ns: Some([90.0, ns]) };
        let far = || Round { probes_ns: Some([300.0; 2]), ..round(300.0) };
        outcome.add(far());
        assert!(wanted.is_missing(&outcome, Distance::Far) && !wanted.is_over(&outcome));
        outcome.add(far());
        assert!(!wanted.is_missing(&outcome, Distance::Far) && !wanted.is_over(&outcome));
        for ns in [90.0, 300.0] {
            outcome.add(round(ns));
            assert!(wanted.is_missing(&outcome, Distance::Near) && !wanted.is_over(&outcome));
        }
        outcome.add(round(90.0));
        assert!(wanted.is_over(&outcome));
        assert_eq!(outcome.mixed, 1);
        let mut alone = Outcome::new(&rows::contests()[0], &processors);
        alone.skipped = None;
        for _ in 0..2 {
            assert!(!wanted.is_over(&alone));
            alone.add(Round { theirs: None, ours: 1.0.into(), probes_ns: None });
        }
        assert!(wanted.is_over(&alone));
    }
}
