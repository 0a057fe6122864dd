//! A contest: the same work in alternating rounds, done by this library and by somebody else.

use std::thread;
use std::time::Duration;

use crate::pingpong::failure::Failure;

use super::distance::{self, Distance};
use super::machine;
use super::openssl;
use super::outcome::{Outcome, Round};
use super::pair::{self, Processors};
use super::peers::Peer;
use super::ring;
use super::rows;
use super::sample::Sample;
use super::secured::{Files, Mode};
use super::target::Target;
use super::work::{self, Pingpong, Terms, Work};

/// The place of a contest in a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In that of latency by size, bytes.
    Size(u32),
    /// In that of echoes by connections.
    Connections(u32),
}

/// A contest: the same work, done by this library and by somebody else.
#[derive(Clone, Debug)]
pub struct Contest {
    /// Its name in the table.
    pub name: String,
    /// Its place in a picture.
    pub place: Option<Place>,
    /// The target.
    pub target: Target,
    /// The distance of the processors that the target is for; by default that of the nearest rounds.
    pub at: Option<Distance>,
    /// The competitor.
    pub theirs: Theirs,
    /// The work of this library.
    pub ours: Work,
    /// How this library's connections are secured.
    pub mode: Option<Mode>,
}

/// The competitor.
#[derive(Clone, Debug)]
pub enum Theirs {
    /// There is none.
    Nobody,
    /// What the machine does without a library.
    Bare(Bare),
    /// A program by others.
    Peer(Peer),
    /// `sockperf` with as many messages per second as this library: a part of what the slower of the two can do.
    OpenLoop,
    /// This library with the same work, on connections that are not secured.
    Plain,
    /// This library with other work: what is different about it.
    Otherwise(&'static str, Work),
    /// `openssl s_server` and `openssl s_client`: the number of bytes.
    Openssl(u64),
}

/// What the machine does without a library.
#[derive(Clone, Copy, Debug)]
pub enum Bare {
    /// TCP: its work, the size of messages, and the number of iterations.
    Tcp(&'static str, u32, u64),
    /// TCP with echoes: the number of connections, and of echoes on all of them.
    TcpEchoes(u32, u64),
    /// UDP: what is done with datagrams, their size, and their number.
    Udp(&'static str, u32, u64),
    /// Messages of 64 B to and fro on the bare ring, and their number.
    RingLatency(u64),
    /// Messages of 64 B one way on the bare ring, and their number.
    RingRate(u64),
    /// Memory that one thread writes and another one reads: the size of messages, and their number.
    RingTouched(u32, u64),
    /// Copies of so many bytes, and their number.
    Memcpy(u32, u64),
}

/// The share of the lower maximum at which an open loop runs.
const LOAD: f64 = 0.8;
/// Longest time of messages on the bare ring.
const RING_LIMIT: Duration = Duration::from_secs(10);
/// The pause after a try in which nothing was measured, because all rounds that are missing are of another distance.
const PAUSE: Duration = Duration::from_secs(2);

impl Bare {
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

    /// Whether two threads look at memory all the time.
    const fn spins(self) -> bool {
        matches!(self, Self::RingLatency(_) | Self::RingRate(_) | Self::RingTouched(..))
    }
}

impl From<Bare> for Theirs {
    fn from(bare: Bare) -> Self {
        Self::Bare(bare)
    }
}

impl From<Peer> for Theirs {
    fn from(peer: Peer) -> Self {
        Self::Peer(peer)
    }
}

impl From<Pingpong> for Work {
    fn from(work: Pingpong) -> Self {
        Self::Pingpong(work)
    }
}

impl Theirs {
    /// The name in the table.
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

    /// The command line of a program by others.
    #[must_use]
    pub fn command(&self) -> Option<String> {
        match self {
            Self::Peer(peer) => Some(peer.command().into()),
            Self::OpenLoop => Some(Peer::sockperf_open_loop(None).command().into()),
            _ => None,
        }
    }

    /// Whether the competitor has the system's congestion control, because it cannot be told to have another one.
    const fn keeps_system_congestion(&self) -> bool {
        match self {
            Self::Peer(peer) => peer.keeps_system_congestion(),
            Self::OpenLoop | Self::Openssl(_) => true,
            _ => false,
        }
    }
}

/// Two samples: of the competitor, and of this library.
type Both = (Option<Sample>, Sample);

impl Contest {
    /// The work of `rdma-pingpong` in this contest.
    pub fn pingpongs(&self) -> Vec<Pingpong> {
        let theirs = if let Theirs::Otherwise(_, work) = &self.theirs { Some(work) } else { None };
        let of = |work: &Work| if let Work::Pingpong(work) = work { Some(work.clone()) } else { None };
        [Some(&self.ours), theirs].into_iter().flatten().filter_map(of).collect()
    }

    /// Why the contest cannot take place here.
    #[must_use]
    pub fn hindrance(&self, processors: &Processors) -> Option<String> {
        let program = match &self.theirs {
            _ if self.mode.is_some() && !cfg!(feature = "secure") => {
                return Some("built without the feature secure".into());
            }
            Theirs::Bare(bare) if bare.spins() && processors.count() < 2 => {
                return Some("it takes two processors".into());
            }
            Theirs::Openssl(_) => "openssl",
            Theirs::OpenLoop => "sockperf",
            Theirs::Peer(peer) => peer.program(),
            _ => return None,
        };
        (!pair::is_installed(program)).then(|| format!("{program} is not installed (make bench-setup)"))
    }

    /// The congestion control of both sides; `None` without TCP.
    #[must_use]
    pub fn congestion(&self) -> Option<String> {
        match &self.ours {
            Work::Pingpong(work) if work.provider == "shm" => None,
            Work::Datagrams(..) => None,
            _ if self.theirs.keeps_system_congestion() => Some(machine::system_congestion()),
            _ => Some(machine::own_congestion().map_or_else(machine::system_congestion, Into::into)),
        }
    }

    /// Runs one round: first the competitor, then this library. A program by others that fails ends the contest, and no other: `Err` in
    /// `Ok` is why.
    fn round(&self, processors: &Processors, files: &Files) -> Result<Result<Both, Failure>, Failure> {
        let plain = Terms { secured: None, system_congestion: self.theirs.keeps_system_congestion() };
        let terms = Terms { secured: self.mode.map(|mode| (mode, files)), ..plain };
        let theirs = match &self.theirs {
            Theirs::Nobody => None,
            Theirs::Bare(bare) => Some(bare.measure(processors)?),
            Theirs::Peer(peer) => match peer.measure(processors) {
                Ok(sample) => Some(sample),
                Err(failure) => return Ok(Err(failure)),
            },
            Theirs::OpenLoop => return self.open_loop(processors, &terms),
            Theirs::Plain => Some(self.ours.measure(processors, &plain)?),
            Theirs::Otherwise(_, work) => Some(work.measure(processors, &plain)?),
            Theirs::Openssl(bytes) => Some(openssl::measure(processors, files, *bytes)?.into()),
        };
        Ok(Ok((theirs, self.ours.measure(processors, &terms)?)))
    }

    /// Measures what both can do, and then both at the same rate.
    fn open_loop(&self, processors: &Processors, terms: &Terms<'_>) -> Result<Result<Both, Failure>, Failure> {
        let theirs = match Peer::sockperf_open_loop(None).measure(processors) {
            Ok(sample) => sample.figure,
            Err(failure) => return Ok(Err(failure)),
        };
        let ours = self.ours.measure(processors, terms)?.figure;
        let rate = open_loop_rate(theirs, ours);
        let theirs = match Peer::sockperf_open_loop(Some(rate)).measure(processors) {
            Ok(sample) => sample,
            Err(failure) => return Ok(Err(failure)),
        };
        let ours = Pingpong::open_loop(rate as f64, "/open_loop_us/p99").measure(processors, terms)?;
        Ok(Ok((Some(theirs), ours)))
    }
}

/// The messages per second of an open loop, by what each side can do.
fn open_loop_rate(theirs: f64, ours: f64) -> u64 {
    (theirs.min(ours) * LOAD).max(1.0) as u64
}

/// The rounds that are wanted of each contest.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Rounds with near processors, and as many with far ones.
    pub rounds: usize,
    /// Tries, at most.
    pub tries: usize,
}

impl Wanted {
    /// Whether a round at this distance is missing.
    fn is_missing(&self, outcome: &Outcome, distance: Distance) -> bool {
        outcome.at(distance).len() < self.rounds
    }

    /// Whether a contest is over: it has its rounds with near processors, or, where no probe can tell, those.
    fn is_over(&self, outcome: &Outcome) -> bool {
        outcome.skipped.is_some()
            || !self.is_missing(outcome, Distance::Near)
            || !self.is_missing(outcome, Distance::Unknown)
    }
}

/// Runs the contests that have `only` in their names, round by round, so that other work of the machine meets all of them alike.
///
/// # Errors
/// A process did not do its work, or no contest has such a name.
pub fn run(wanted: Wanted, only: &str, processors: &Processors) -> Result<Vec<Outcome>, Failure> {
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
    let files = Files::new()?;
    let mut outcomes: Vec<Outcome> = contests.iter().map(|contest| Outcome::new(contest, processors)).collect();
    for attempt in 1..=wanted.tries {
        let mut measured = 0;
        let missing: Vec<_> =
            contests.iter().zip(&mut outcomes).filter(|(_, outcome)| !wanted.is_over(outcome)).collect();
        if missing.is_empty() {
            break;
        }
        eprintln!("try {attempt} of {}, {} rows", wanted.tries, missing.len());
        for (contest, outcome) in missing {
            let before = distance::probe(processors);
            if wanted.is_missing(outcome, before.map_or(Distance::Unknown, Distance::of)) {
                measured += 1;
                match contest.round(processors, &files)? {
                    Ok((theirs, ours)) => {
                        let probes_ns = before.zip(distance::probe(processors)).map(|(before, after)| [before, after]);
                        let round = Round { theirs, ours, probes_ns };
                        eprintln!("{}", outcome.note(&round));
                        outcome.add(round);
                    }
                    Err(failure) => outcome.skipped = Some(failure.to_string()),
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
        let contest = rows::contests().into_iter().find(|contest| matches!(contest.theirs, Theirs::Nobody));
        let mut outcome = Outcome::new(&contest.expect("one without a competitor"), &processors);
        let wanted = Wanted { rounds: 2, tries: 5 };
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
