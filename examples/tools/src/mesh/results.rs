//! The results of each rank and of each pair.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::control::{Entry, Figure, LatencyFigures, MeasuredFigure, ReceivedLoad};

/// The results of a rank.
// bound: tool-mesh
#[derive(Clone, Debug, Default)]
pub struct RankResults {
    /// The first report of the rank; `None` if it did not join.
    pub entry: Option<Entry>,
    /// The reason why the rank is gone; `None` while it is alive.
    pub gone: Option<String>,
    /// The time that the rank needed to connect to all others; `None` if the rank has not reported that time.
    pub connected: Option<Duration>,
    /// The number of connects that the rank has tried.
    pub attempts: u64,
    /// The peak memory of the rank's process, in KiB.
    pub memory_kib: Option<u64>,
    /// The hardware counters of the rank's device that have changed, with the amount of each change.
    pub moved: BTreeMap<String, u64>,
}

impl RankResults {
    /// Returns true if the rank has joined and is not gone.
    #[must_use]
    pub const fn is_here(&self) -> bool {
        self.entry.is_some() && self.gone.is_none()
    }

    /// Returns the name of the rank's host, or `?` if the rank did not join.
    #[must_use]
    pub fn host(&self) -> &str {
        self.entry.as_ref().map_or("?", |entry| &entry.host)
    }
}

/// The results of one direction of a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Direction {
    /// The rate of RDMA Writes in Gbit/s, if it was measured.
    pub gbit: Option<f64>,
    /// The rate of the all-to-all load in Gbit/s, if it was measured.
    pub loaded_gbit: Option<f64>,
    /// The number of messages that arrived in the all-to-all load.
    pub messages: u64,
}

/// The results of a pair of ranks.
// bound: tool-mesh
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pair {
    /// Half of a round trip, if it was measured.
    pub latency: Option<LatencyFigures>,
    /// The direction from the lower rank to the higher rank.
    pub up: Direction,
    /// The direction from the higher rank to the lower rank.
    pub down: Direction,
    /// True if the link is in shared memory, within a host.
    pub shm: bool,
    /// The first fault of the pair; `None` if it works.
    pub broken: Option<String>,
}

impl Pair {
    /// Returns true if the pair was never measured. This occurs only if the run was interrupted: otherwise, each pair has a latency, which
    /// is measured first, or a fault.
    #[must_use]
    pub const fn is_unmeasured(&self) -> bool {
        self.latency.is_none() && self.broken.is_none()
    }
}

/// The results of all ranks and pairs.
// local: ranks of the run
#[derive(Clone, Debug)]
pub struct Results {
    members: Vec<RankResults>,
    /// The results of each pair. The pairs of rank 0 with ranks 1, 2, ... come first, then those of rank 1 with ranks 2, 3, ...
    pairs: Vec<Pair>,
    interrupted: bool,
}

impl Results {
    /// Makes the results of a run with `ranks` ranks, without any figures.
    #[must_use]
    pub fn new(ranks: usize) -> Self {
        let pairs = vec![Pair::default(); ranks * (ranks - 1) / 2];
        Self { members: vec![RankResults::default(); ranks], pairs, interrupted: false }
    }

    /// Records that the user has interrupted the run, so figures may be missing.
    pub const fn interrupt(&mut self) {
        self.interrupted = true;
    }

    /// Returns true if the user has interrupted the run.
    #[must_use]
    pub const fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.members.len()
    }

    /// Returns the results of all ranks.
    #[must_use]
    pub fn members(&self) -> &[RankResults] {
        &self.members
    }

    /// Returns the results of one rank.
    pub fn member_mut(&mut self, rank: usize) -> &mut RankResults {
        &mut self.members[rank]
    }

    /// Returns all pairs, each with its lower rank first.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize, &Pair)> {
        let ranks = self.ranks();
        let names = (0..ranks).flat_map(move |a| (a + 1..ranks).map(move |b| (a, b)));
        names.zip(&self.pairs).map(|((a, b), pair)| (a, b, pair))
    }

    /// Returns the results of a pair. The two ranks must differ, and may be in any order.
    #[must_use]
    pub fn pair(&self, a: usize, b: usize) -> &Pair {
        &self.pairs[self.index(a, b)]
    }

    fn pair_mut(&mut self, a: usize, b: usize) -> &mut Pair {
        let index = self.index(a, b);
        &mut self.pairs[index]
    }

    fn index(&self, a: usize, b: usize) -> usize {
        let (low, high) = (a.min(b), a.max(b));
        low * (2 * self.ranks() - low - 1) / 2 + high - low - 1
    }

    /// Returns the results of one direction of a pair: from one rank to another.
    #[must_use]
    pub fn way(&self, from: usize, to: usize) -> &Direction {
        let pair = self.pair(from, to);
        if from < to { &pair.up } else { &pair.down }
    }

    fn way_mut(&mut self, from: usize, to: usize) -> &mut Direction {
        let pair = self.pair_mut(from, to);
        if from < to { &mut pair.up } else { &mut pair.down }
    }

    /// Returns the cost of a direction: the latency, or the inverse of the bandwidth. A lower cost is better. Returns `None` if the figure
    /// was not measured or the pair does not work.
    #[must_use]
    pub fn cost(&self, from: usize, to: usize, figure: Figure) -> Option<f64> {
        let pair = self.pair(from, to);
        if pair.broken.is_some() {
            return None;
        }
        match figure {
            Figure::Latency => pair.latency.map(|latency| latency.p50_us),
            Figure::Bandwidth => self.way(from, to).gbit.map(f64::recip),
        }
        .filter(|cost| cost.is_finite() && *cost > 0.0)
    }

    /// Records the result of a measurement. If there is already a result, the better of the two is kept, because a link may be slow by
    /// chance.
    pub fn measured(&mut self, from: usize, to: usize, measured: MeasuredFigure) {
        match measured {
            MeasuredFigure::Latency(latency) => {
                let known = &mut self.pair_mut(from, to).latency;
                if known.is_none_or(|known| latency.p50_us < known.p50_us) {
                    *known = Some(latency);
                }
            }
            MeasuredFigure::Bandwidth(gbit) => {
                let known = &mut self.way_mut(from, to).gbit;
                *known = Some(known.map_or(gbit, |known| known.max(gbit)));
            }
        }
    }

    /// Records the messages that the rank `by` has received in the all-to-all load.
    pub fn record_load(&mut self, by: usize, heard: &ReceivedLoad) {
        let way = self.way_mut(heard.from, by);
        (way.loaded_gbit, way.messages) = (Some(heard.gbit), heard.messages);
        let wrong = match (heard.errors, heard.complete, heard.messages) {
            (0, true, 1..) => return,
            (0, true, 0) => "no message arrived while all sent to all".into(),
            (0, false, messages) => format!("the stream to rank {by} did not end; {messages} messages arrived"),
            (errors, _, messages) => {
                format!("{errors} of {messages} messages to rank {by} were lost, double, out of order or wrong")
            }
        };
        self.fails(heard.from, by, &wrong);
    }

    /// Records that the link of a pair is in shared memory.
    pub fn shares(&mut self, a: usize, b: usize) {
        self.pair_mut(a, b).shm = true;
    }

    /// Returns the hosts with more ranks than processors: the number of ranks and of processors by
    /// the name of the host. There, ranks wait for a processor, so the figures of pairs within the
    /// host differ by any factor.
    #[must_use]
    pub fn crowded(&self) -> BTreeMap<&str, (usize, usize)> {
        let mut hosts = BTreeMap::new();
        for entry in self.members.iter().filter_map(|member| member.entry.as_ref()) {
            let (ranks, processors) = hosts.entry(entry.host.as_str()).or_insert((0, usize::MAX));
            *ranks += 1;
            *processors = entry.processors.map_or(*processors, |own| own.min(*processors));
        }
        hosts.retain(|_, (ranks, processors)| ranks > processors);
        hosts
    }

    /// Records that a pair does not work. If a reason is recorded already, it is kept.
    pub fn fails(&mut self, a: usize, b: usize, why: &str) {
        self.pair_mut(a, b).broken.get_or_insert_with(|| why.to_owned());
    }

    /// Records that a rank is gone, and that none of its pairs works. A reason that is already recorded for the rank or for a pair is kept.
    pub fn gone(&mut self, rank: usize, why: &str) {
        self.members[rank].gone.get_or_insert_with(|| why.to_owned());
        for peer in (0..self.ranks()).filter(|&peer| peer != rank) {
            self.fails(rank, peer, &format!("rank {rank} is gone: {why}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_has_a_place_of_its_own() {
        for ranks in 2..20 {
            let mut results = Results::new(ranks);
            for a in 0..ranks {
                for b in (0..ranks).filter(|&b| b != a) {
                    results.measured(a, b, MeasuredFigure::Bandwidth((1 + a * 100 + b) as f64));
                }
            }
            assert_eq!(results.pairs().count(), ranks * (ranks - 1) / 2);
            for (a, b, pair) in results.pairs() {
                assert_eq!(pair, results.pair(b, a));
                assert_eq!(
                    (pair.up.gbit, pair.down.gbit),
                    (Some((1 + a * 100 + b) as f64), Some((1 + b * 100 + a) as f64))
                );
                assert_eq!(results.cost(b, a, Figure::Bandwidth), Some(1.0 / (1 + b * 100 + a) as f64));
            }
        }
    }

    #[test]
    fn the_audit_of_a_load_has_four_outcomes() {
        let heard = |errors, complete, messages| {
            let mut results = Results::new(2);
            results.record_load(0, &ReceivedLoad { from: 1, messages, gbit: 1.0, errors, complete });
            assert_eq!(results.way(1, 0).messages, messages);
            results.pair(0, 1).broken.clone()
        };
        assert_eq!(heard(0, true, 5), None);
        assert!(heard(0, true, 0).unwrap().contains("no message"));
        assert!(heard(0, false, 5).unwrap().contains("did not end"));
        assert!(heard(2, true, 5).unwrap().starts_with("2 of 5"));
    }
}
