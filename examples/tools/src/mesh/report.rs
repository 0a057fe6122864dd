//! The report for the user: the verdict, the worst pairs, and the ranks that are gone or much worse than the others.

use std::fmt::Write;

use super::control::Figure;
use super::odd::{Judgement, OddDirection, OddRank};
use super::results::{Pair, Results};
use crate::hw_counters::troubles;

/// The results of a run, with their evaluation.
// local: ranks of the run
#[derive(Debug)]
pub struct Report<'a> {
    /// The results that are evaluated.
    pub results: &'a Results,
    /// The tolerance: the factor by which a direction or a rank may be worse than the median with which it is compared.
    pub tolerance: f64,
    /// The evaluation by latency.
    pub latency: Judgement,
    /// The evaluation by bandwidth.
    pub bandwidth: Judgement,
    /// The directions that are worse than other directions by more than the tolerance.
    pub odd_ways: Vec<OddDirection>,
    /// The ranks that are worse than other ranks by more than the tolerance.
    pub odd_ranks: Vec<OddRank>,
}

/// The explanation of the mark `shm` in the report.
pub const SHM: &str = "shm: the link is in shared memory, within a host";

/// Returns the name of a figure for use in a sentence.
#[must_use]
pub const fn name(figure: Figure) -> &'static str {
    match figure {
        Figure::Latency => "latency",
        Figure::Bandwidth => "bandwidth",
    }
}

/// Formats a number with about three digits, and `None` as a dash.
fn number(value: Option<f64>) -> String {
    match value {
        None => "-".into(),
        Some(value) if value < 9.995 => format!("{value:.2}"),
        Some(value) if value < 99.95 => format!("{value:.1}"),
        Some(value) => format!("{value:.0}"),
    }
}

impl<'a> Report<'a> {
    /// Evaluates the results of a run.
    #[must_use]
    pub fn new(results: &'a Results, tolerance: f64) -> Self {
        let latency = Judgement::new(results, Figure::Latency);
        let bandwidth = Judgement::new(results, Figure::Bandwidth);
        let odd_ways = latency.odd_ways(tolerance).chain(bandwidth.odd_ways(tolerance)).collect();
        let odd_ranks = latency.odd_ranks(tolerance).chain(bandwidth.odd_ranks(tolerance)).collect();
        Self { results, tolerance, latency, bandwidth, odd_ways, odd_ranks }
    }

    /// Returns true if every pair works, no direction or rank exceeds the tolerance, and the run was not interrupted.
    #[must_use]
    pub fn is_good(&self) -> bool {
        let is_complete = !self.results.is_interrupted();
        is_complete && self.odd_ways.is_empty() && self.odd_ranks.is_empty() && self.broken() == 0
    }

    /// Returns true if any link is in shared memory.
    #[must_use]
    pub fn has_shm(&self) -> bool {
        self.results.pairs().any(|(.., pair)| pair.shm)
    }

    fn broken(&self) -> usize {
        self.results.pairs().filter(|(.., pair)| pair.broken.is_some()).count()
    }

    /// Describes the faults of a pair, with one text for each fault. Returns an empty list if there
    /// are none. A missing measurement of the pair is a fault, too.
    #[must_use]
    pub fn complaints(&self, a: usize, b: usize) -> Vec<String> {
        let pair = self.results.pair(a, b);
        let broken = pair.broken.iter().cloned();
        let unmeasured = pair.is_unmeasured().then(|| "not measured: the run was interrupted".to_owned());
        let of_pair = |way: &&OddDirection| (way.from, way.to) == (a, b) || (way.from, way.to) == (b, a);
        let odd = self.odd_ways.iter().filter(of_pair).map(|way| {
            let direction = match way.figure {
                Figure::Latency => String::new(),
                Figure::Bandwidth => format!(" from {} to {}", way.from, way.to),
            };
            format!("{}{direction} is {:.1} times worse than its row and column", name(way.figure), way.times)
        });
        broken.chain(unmeasured).chain(odd).collect()
    }

    /// Returns a number by which pairs are sorted: a greater number means a worse pair. The number is infinite for a pair that does not
    /// work. A pair that was not measured has the greatest finite number.
    fn badness(&self, a: usize, b: usize, pair: &Pair) -> f64 {
        if pair.broken.is_some() {
            return f64::INFINITY;
        }
        if pair.is_unmeasured() {
            return f64::MAX;
        }
        let times = [self.latency.times(a, b), self.bandwidth.times(a, b), self.bandwidth.times(b, a)];
        times.into_iter().flatten().fold(0.0, f64::max)
    }

    /// Returns at most `most` pairs, the worst first. Pairs of ranks that are gone are left out.
    #[must_use]
    pub fn worst(&self, most: usize) -> Vec<(usize, usize)> {
        let gone = |rank: usize| !self.results.members()[rank].is_here();
        let mut pairs: Vec<_> = self
            .results
            .pairs()
            .filter(|&(a, b, _)| !gone(a) && !gone(b))
            .map(|(a, b, pair)| (self.badness(a, b, pair), a, b))
            .collect();
        pairs.sort_by(|x, y| y.0.total_cmp(&x.0).then((x.1, x.2).cmp(&(y.1, y.2))));
        pairs.into_iter().take(most).map(|(_, a, b)| (a, b)).collect()
    }

    /// Returns sentences about the ranks that are gone, about the ranks that are much worse than
    /// the others, and about hosts with more ranks than processors.
    #[must_use]
    pub fn about_ranks(&self) -> Vec<String> {
        let members = self.results.members();
        let gone = members.iter().enumerate().filter_map(|(rank, member)| {
            let why = member.gone.as_ref()?;
            Some(format!("rank {rank} on {} is gone: {why}", member.host()))
        });
        let odd = self.odd_ranks.iter().map(|odd| {
            let (rank, host) = (odd.rank, members[odd.rank].host());
            format!(
                "rank {rank} on {host}: its {} is {:.1} times worse than that of the others",
                name(odd.figure),
                odd.times
            )
        });
        // Ranks on the same device read the same counters. So a change of these counters is reported for each of these ranks.
        let counted = members.iter().enumerate().filter_map(|(rank, member)| {
            let troubles = troubles(&member.moved);
            let device = member.entry.as_ref().map_or("?", |entry| &entry.device);
            let line = || format!("rank {rank} on {}: {device} counted: {}", member.host(), troubles.join("; "));
            (!troubles.is_empty()).then(line)
        });
        let crowded = self.results.crowded().into_iter().map(|(host, (ranks, processors))| {
            format!(
                "{host} has {ranks} ranks and {processors} processors: its pairs wait for each other, and are not compared"
            )
        });
        gone.chain(odd).chain(counted).chain(crowded).collect()
    }

    /// Formats the report as text, with at most `most` pairs in its table.
    #[must_use]
    pub fn text(&self, most: usize) -> String {
        let members = self.results.members();
        let width = members.iter().map(|member| member.host().chars().count()).max().unwrap_or(0).max(4);
        let mut text = format!(
            "\n{:>5} {:width$} {:>5} {:width$} {:4} {:>9} {:>9} {:>8} {:>8} {:>8} {:>8}  worst pairs first: what is odd\n",
            "#rank", "host", "rank", "host", "link", "p50[us]", "p99[us]", "Gb/s >", "Gb/s <", "load >", "load <"
        );
        for (a, b) in self.worst(most) {
            let pair = self.results.pair(a, b);
            let complaints = self.complaints(a, b);
            let odd = if complaints.is_empty() { "-".into() } else { complaints.join("; ") };
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "{a:>5} {:width$} {b:>5} {:width$} {:4} {:>9} {:>9} {:>8} {:>8} {:>8} {:>8}  {odd}",
                members[a].host(),
                members[b].host(),
                if pair.shm { "shm" } else { "-" },
                number(pair.latency.map(|latency| latency.p50_us)),
                number(pair.latency.map(|latency| latency.p99_us)),
                number(pair.up.gbit),
                number(pair.down.gbit),
                number(pair.up.loaded_gbit),
                number(pair.down.loaded_gbit),
            );
        }
        if self.has_shm() {
            let _ = writeln!(text, "{SHM}");
        }
        for line in self.about_ranks() {
            let _ = writeln!(text, "{line}");
        }
        let _ = writeln!(text, "\n{}", self.summary());
        text
    }

    /// Returns the verdict on the run, in one line.
    #[must_use]
    pub fn summary(&self) -> String {
        let members = self.results.members();
        let (ranks, pairs) = (members.len(), self.results.pairs().count());
        let connected = members.iter().filter_map(|member| member.connected).max().unwrap_or_default();
        let attempts: u64 = members.iter().map(|member| member.attempts).sum();
        let memory = members.iter().filter_map(|member| member.memory_kib).max().unwrap_or(0);
        let odd: std::collections::BTreeSet<_> =
            self.odd_ways.iter().map(|way| (way.from.min(way.to), way.from.max(way.to))).collect();
        let unmeasured = self.results.pairs().filter(|(.., pair)| pair.is_unmeasured()).count();
        let interrupted = match self.results.is_interrupted() {
            true => format!("interrupted before {unmeasured} pairs were measured; "),
            false => String::new(),
        };
        format!(
            "{interrupted}{ranks} ranks, {pairs} pairs: {} do not work, {} are more than {} times worse than their like, and {} ranks are; \
             connected in {:.3} s with {attempts} connects; at most {:.1} MiB per rank",
            self.broken(),
            odd.len(),
            self.tolerance,
            self.odd_ranks.iter().map(|odd| odd.rank).collect::<std::collections::BTreeSet<_>>().len(),
            connected.as_secs_f64(),
            memory as f64 / 1024.0,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::sample;

    #[test]
    fn a_good_run_has_no_complaint() {
        let results = sample::even(4);
        let report = Report::new(&results, 3.0);
        assert!(report.is_good());
        assert!(report.about_ranks().is_empty() && report.complaints(0, 1).is_empty());
        assert!(report.text(10).contains("4 ranks, 6 pairs: 0 do not work, 0 are more"), "{}", report.text(10));
        assert!(!report.text(10).contains("shm"));
        assert_eq!(report.text(2).lines().filter(|line| line.trim_end().ends_with('-')).count(), 2);
    }

    #[test]
    fn an_interrupted_run_is_not_good() {
        let results = sample::interrupted(3);
        let report = Report::new(&results, 3.0);
        assert!(!report.is_good());
        assert_eq!(report.complaints(0, 1), Vec::<String>::new());
        assert_eq!(report.complaints(2, 1), ["not measured: the run was interrupted"]);
        let summary = report.summary();
        assert!(summary.starts_with("interrupted before 2 pairs were measured; 3 ranks, 3 pairs: 0 do"), "{summary}");
        // Even if all pairs have figures, the measurements that were left out could have found a fault.
        let mut results = sample::even(3);
        results.interrupt();
        assert!(!Report::new(&results, 3.0).is_good());
    }

    /// Fifteen pairs do not fit into the table. The five pairs that were not measured follow the pair that does not work.
    #[test]
    fn pairs_that_were_not_measured_come_before_those_that_were() {
        let mut results = sample::interrupted(6);
        results.fails(3, 4, "no connection: timeout");
        let report = Report::new(&results, 3.0);
        assert_eq!(report.worst(6), [(3, 4), (0, 5), (1, 5), (2, 5), (3, 5), (4, 5)]);
        let text = report.text(10);
        assert_eq!(text.matches("  not measured: the run was interrupted\n").count(), 5, "{text}");
    }

    #[test]
    fn what_is_wrong_is_named_with_ranks_hosts_and_figures() {
        let results = sample::faulty();
        let report = Report::new(&results, 3.0);
        assert!(!report.is_good());
        let text = report.text(3);
        let rows: Vec<_> = text.lines().skip(2).collect();
        assert!(rows[0].contains(" 0 n0 ") && rows[0].contains(" 4 n4 ") && rows[0].contains("no connection: timeout"));
        assert!(rows[1].contains(" 1 n1 ") && rows[1].contains(" 2 n2 ") && rows[1].contains("120 "), "{text}");
        assert!(rows[1].contains("latency is 12.0 times worse than its row and column"), "{text}");
        assert!(rows[1].contains("bandwidth from 2 to 1 is 10.0 times worse"), "{text}");
        assert!(text.contains("rank 5 on n5 is gone: it does not answer"), "{text}");
        let counted = "rank 6 on n6: iwarp0 counted: sent again, since no acknowledgement came in time (completer_retry_err +12)\n";
        assert!(text.contains(counted), "{text}");
        let text = report.text(21);
        let rows: Vec<_> = text.lines().filter(|line| line.contains(" shm ")).collect();
        assert!(rows.len() == 1 && rows[0].contains(" 3 n3 ") && rows[0].contains(" 6 n6 "), "{text}");
        assert_eq!(text.lines().filter(|line| *line == SHM).count(), 1, "{text}");
    }
}
