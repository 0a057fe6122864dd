//! Finds the directions and the ranks that are odd, which means much worse than the others.
//!
//! A direction leads from one rank to another. Its figure is compared with two medians: the median
//! of the other directions from the same rank, and the median of the other directions to the same
//! rank. The worse of these two medians counts. If all directions of a rank are slow, the rank is
//! odd, but its directions are not odd. Directions within a host are compared only with each other;
//! the same applies to directions between hosts. Directions within a host that has more ranks than
//! processors are not compared at all.

use serde::Serialize;

use super::control::Figure;
use super::results::Results;

/// A direction that is worse than the directions it is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OddDirection {
    /// The rank that sends.
    pub from: usize,
    /// The rank that receives.
    pub to: usize,
    /// The figure that is worse: the latency or the bandwidth.
    pub figure: Figure,
    /// The factor by which the direction is worse than the median with which it is compared.
    pub times: f64,
}

/// A rank that is worse than the other ranks, by the median of all directions from it and to it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OddRank {
    /// The rank that is worse than the others.
    pub rank: usize,
    /// The figure that is worse: the latency or the bandwidth.
    pub figure: Figure,
    /// The factor by which the median of the rank's directions is worse than the median of the other ranks' medians.
    pub times: f64,
}

/// The comparison of all directions (from one rank to another) by one figure: the latency or the bandwidth.
// local: ranks of the run
#[derive(Clone, Debug)]
pub struct Judgement {
    figure: Figure,
    ranks: usize,
    /// The factor by which each direction is worse than the median with which it is compared. The index is `from * ranks + to`.
    times: Vec<Option<f64>>,
    ranks_times: Vec<Option<f64>>,
}

/// Returns the median of the costs, or `None` if there are none. If the number of costs is even, returns the smaller of the two middle
/// costs.
fn median(mut costs: Vec<f64>) -> Option<f64> {
    let middle = costs.len().checked_sub(1)? / 2;
    Some(*costs.select_nth_unstable_by(middle, f64::total_cmp).1)
}

impl Judgement {
    /// Compares all directions by this figure.
    #[must_use]
    pub fn new(results: &Results, figure: Figure) -> Self {
        let ranks = results.ranks();
        let hosts: Vec<_> = results.members().iter().map(|member| member.host()).collect();
        let crowded = results.crowded();
        let within = |a: usize, b: usize| hosts[a] == hosts[b];
        let mut times = vec![None; ranks * ranks];
        let others = |rank: usize| (0..ranks).filter(move |&other| other != rank);
        // The costs are sorted once for each row, each column, and each kind (within a host, between hosts). In a sorted list, the median
        // of all costs but one can be found by index.
        let sorted = |mut costs: Vec<f64>| {
            costs.sort_unstable_by(f64::total_cmp);
            costs
        };
        let lists = |inward: bool, kind: bool| -> Vec<Vec<f64>> {
            let cost = |rank: usize, other: usize| {
                if inward { results.cost(other, rank, figure) } else { results.cost(rank, other, figure) }
            };
            let list = |rank| others(rank).filter(move |&other| within(rank, other) == kind);
            (0..ranks).map(|rank| sorted(list(rank).filter_map(|other| cost(rank, other)).collect())).collect()
        };
        for kind in [true, false] {
            let (rows, columns) = (lists(false, kind), lists(true, kind));
            for from in 0..ranks {
                if kind && crowded.contains_key(hosts[from]) {
                    continue;
                }
                for to in others(from).filter(|&to| within(from, to) == kind) {
                    let Some(cost) = results.cost(from, to, figure) else { continue };
                    let expected = [without(&rows[from], cost), without(&columns[to], cost)];
                    let expected = expected.into_iter().flatten().max_by(f64::total_cmp);
                    times[from * ranks + to] = expected.map(|expected| cost / expected);
                }
            }
        }
        Self { figure, ranks, times, ranks_times: ranks_times(results, figure) }
    }

    /// Returns the factor by which a direction is worse than the median with which it is compared. Returns `None` if the direction's cost
    /// is not known, or if there is no such median.
    #[must_use]
    pub fn times(&self, from: usize, to: usize) -> Option<f64> {
        self.times[from * self.ranks + to]
    }

    /// Returns the directions whose factor ([`Judgement::times()`]) is greater than `tolerance`. The latency of a pair is returned once,
    /// because it is the same in both directions.
    pub fn odd_ways(&self, tolerance: f64) -> impl Iterator<Item = OddDirection> {
        let Self { figure, ranks, .. } = *self;
        let once = move |&(from, to): &(usize, usize)| from != to && (from < to || figure == Figure::Bandwidth);
        let ways = (0..ranks).flat_map(move |from| (0..ranks).map(move |to| (from, to))).filter(once);
        ways.filter_map(move |(from, to)| {
            let times = self.times(from, to).filter(|&times| times > tolerance)?;
            Some(OddDirection { from, to, figure, times })
        })
    }

    /// Returns the odd ranks. A rank is odd if the median of its directions is worse than the median of the other ranks' medians by more
    /// than the factor `tolerance`.
    pub fn odd_ranks(&self, tolerance: f64) -> impl Iterator<Item = OddRank> {
        let figure = self.figure;
        self.ranks_times.iter().enumerate().filter_map(move |(rank, times)| {
            let times = times.filter(|&times| times > tolerance)?;
            Some(OddRank { rank, figure, times })
        })
    }
}

/// Returns the median of a sorted list without one occurrence of `cost`. Returns `None` if the list has no other element.
fn without(sorted: &[f64], cost: f64) -> Option<f64> {
    let place = sorted.partition_point(|other| *other < cost);
    let middle = sorted.len().checked_sub(2)? / 2;
    Some(sorted[if middle < place { middle } else { middle + 1 }])
}

/// Returns a factor for each rank: the median of the rank's directions, divided by the median of
/// the other ranks' medians. If a rank has directions between hosts, only these directions count.
/// Directions within a host that has more ranks than processors do not count.
fn ranks_times(results: &Results, figure: Figure) -> Vec<Option<f64>> {
    let ranks = results.ranks();
    let hosts: Vec<_> = results.members().iter().map(|member| member.host()).collect();
    let crowded = results.crowded();
    let own = |rank: usize, between: bool| {
        if !between && crowded.contains_key(hosts[rank]) {
            return None;
        }
        let peers = (0..ranks).filter(|&peer| peer != rank && (hosts[peer] != hosts[rank]) == between);
        let costs = peers.flat_map(|peer| [results.cost(rank, peer, figure), results.cost(peer, rank, figure)]);
        median(costs.flatten().collect())
    };
    let mut all = vec![None; ranks];
    for between in [false, true] {
        let medians: Vec<_> = (0..ranks).map(|rank| own(rank, between)).collect();
        for rank in 0..ranks {
            let others =
                medians.iter().enumerate().filter(|(other, _)| *other != rank).filter_map(|(_, median)| *median);
            if let (Some(own), Some(usual)) = (medians[rank], median(others.collect())) {
                all[rank] = Some(own / usual);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::control::{Entry, LatencyFigures, MeasuredFigure};

    /// Makes results with latencies only. Each letter of `hosts` names the host of one rank; `us` returns the latency of a pair.
    fn results(hosts: &str, us: impl Fn(usize, usize) -> f64) -> Results {
        let ranks = hosts.len();
        let mut results = Results::new(ranks);
        for (rank, host) in hosts.chars().enumerate() {
            let (provider, device) = ("iwarp".into(), "iwarp0".into());
            results.member_mut(rank).entry =
                Some(Entry { host: host.into(), address: None, port: 1, provider, device, processors: Some(8) });
        }
        for a in 0..ranks {
            for b in a + 1..ranks {
                let latency = LatencyFigures { p50_us: us(a, b), p99_us: us(a, b), samples: 1 };
                results.measured(a, b, MeasuredFigure::Latency(latency));
            }
        }
        results
    }

    fn odd(results: &Results) -> (Vec<(usize, usize)>, Vec<usize>) {
        let judgement = Judgement::new(results, Figure::Latency);
        let ways = judgement.odd_ways(3.0).map(|way| (way.from, way.to)).collect();
        (ways, judgement.odd_ranks(3.0).map(|rank| rank.rank).collect())
    }

    #[test]
    fn a_slow_link_is_odd_and_its_ranks_are_not() {
        for hosts in ["abc", "abcd", "abcdefgh"] {
            let slow = |a, b| if (a, b) == (1, 2) { 100.0 } else { 10.0 + b as f64 };
            assert_eq!(odd(&results(hosts, slow)), (vec![(1, 2)], vec![]), "{hosts}");
        }
        let two = |a, b| if (a, b) == (1, 2) || (a, b) == (2, 3) { 100.0 } else { 10.0 };
        assert_eq!(odd(&results("abcdef", two)), (vec![(1, 2), (2, 3)], vec![]));
    }

    #[test]
    fn a_slow_rank_is_odd_and_its_links_are_not() {
        let slow = |a, b| if a == 2 || b == 2 { 100.0 } else { 10.0 };
        assert_eq!(odd(&results("abcd", slow)), (vec![], vec![2]));
        assert_eq!(odd(&results("abcdefgh", slow)), (vec![], vec![2]));
    }

    #[test]
    fn links_within_a_host_are_compared_with_their_like() {
        let hosts = "aabb";
        let near = |a: usize, b: usize| hosts.as_bytes()[a] == hosts.as_bytes()[b];
        assert_eq!(odd(&results(hosts, |a, b| if near(a, b) { 1.0 } else { 10.0 })), (vec![], vec![]));
        let slow = |a, b| {
            if (a, b) == (0, 3) {
                50.0
            } else if near(a, b) {
                1.0
            } else {
                10.0
            }
        };
        assert_eq!(odd(&results(hosts, slow)), (vec![(0, 3)], vec![]));
    }

    #[test]
    fn links_within_a_host_with_too_few_processors_are_not_judged() {
        let slow = |a, b| if (a, b) == (1, 2) { 100.0 } else { 10.0 };
        for (hosts, expected) in [("aaaa", vec![]), ("aabb", vec![(1, 2)])] {
            let mut crowded = results(hosts, slow);
            for rank in 0..4 {
                crowded.member_mut(rank).entry.as_mut().unwrap().processors = Some(if rank == 1 { 1 } else { 3 });
            }
            assert_eq!(odd(&crowded), (expected, vec![]), "{hosts}");
        }
        assert_eq!(odd(&results("aaaa", slow)), (vec![(1, 2)], vec![]), "eight processors");
    }

    #[test]
    fn a_pair_alone_and_a_broken_link_are_not_judged() {
        assert_eq!(odd(&results("ab", |_, _| 1000.0)), (vec![], vec![]));
        let mut broken = results("abc", |a, b| if (a, b) == (0, 1) { 100.0 } else { 10.0 });
        broken.fails(0, 1, "cut");
        assert_eq!(odd(&broken), (vec![], vec![]));
    }

    #[test]
    fn ways_have_directions() {
        let mut all = Results::new(4);
        for from in 0..4 {
            for to in (0..4).filter(|&to| to != from) {
                all.measured(from, to, MeasuredFigure::Bandwidth(if (from, to) == (3, 1) { 1.0 } else { 10.0 }));
            }
        }
        let odd: Vec<_> = Judgement::new(&all, Figure::Bandwidth).odd_ways(3.0).collect();
        assert_eq!(odd, [OddDirection { from: 3, to: 1, figure: Figure::Bandwidth, times: 10.0 }]);
    }

    #[test]
    fn the_median_without_one_member_is_that_of_the_others() {
        for list in [vec![1.0, 2.0], vec![1.0, 2.0, 3.0], vec![1.0, 1.0, 4.0, 9.0], vec![2.0, 3.0, 5.0, 7.0, 11.0]] {
            for (i, &cost) in list.iter().enumerate() {
                let mut others = list.clone();
                others.remove(i);
                assert_eq!(without(&list, cost), median(others), "{list:?} without {cost}");
            }
        }
        assert_eq!((without(&[1.0], 1.0), without(&[], 1.0)), (None, None));
    }
}
