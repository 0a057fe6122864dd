//! The rounds of a contest, and the medians of their results. In a round, this library and a competitor do the same work.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::contest::{Contest, PlotPoint};
use super::distance::Distance;
use super::pair::Processors;
use super::sample::{Sample, Tail};
use super::target::RowTarget;

/// The results of one round.
#[derive(Clone, Debug)]
pub struct Round {
    /// The sample of the competitor, if there is one.
    pub theirs: Option<Sample>,
    /// The sample of this library.
    pub ours: Sample,
    /// The half round trips between the two processors, measured before and after the round, in ns; `None` if they were not measured.
    pub probes_ns: Option<[f64; 2]>,
}

/// All rounds of a contest, and their evaluation.
// local: rows of the benchmark
#[derive(Debug)]
pub struct Outcome {
    /// The name of the contest.
    pub name: String,
    /// The position of the result in a picture, if a picture shows it.
    pub place: Option<PlotPoint>,
    /// The name of the competitor; empty if there is none.
    pub against: &'static str,
    target: RowTarget,
    /// The distance between the processors in the rounds to which the target applies. `None` if the
    /// contest names no distance.
    wanted_at: Option<Distance>,
    /// The command line of the competitor, if it is a program of another project.
    command: Option<String>,
    congestion: Option<String>,
    /// The reason why the contest was skipped; `None` if it was not skipped. A skipped contest has too few rounds or none.
    pub skipped: Option<String>,
    /// The failure that ended the contest; `None` if there was none.
    pub failed: Option<String>,
    rounds: BTreeMap<Distance, Vec<Round>>,
    /// The number of dropped rounds. A round is dropped if the distance between the processors changed during the round.
    pub mixed: usize,
}

impl Outcome {
    /// Makes an outcome without rounds.
    #[must_use]
    pub fn new(contest: &Contest, processors: &Processors) -> Self {
        Self {
            name: contest.name.clone(),
            place: contest.place,
            against: contest.theirs.name(),
            target: contest.target,
            wanted_at: contest.at,
            command: contest.theirs.command(),
            congestion: contest.congestion(),
            skipped: contest.hindrance(processors),
            failed: None,
            rounds: BTreeMap::new(),
            mixed: 0,
        }
    }

    /// Stores a round with the other rounds at its distance. If the distance changed during the round, only increments `mixed`.
    pub fn add(&mut self, round: Round) {
        match Distance::of_round(round.probes_ns) {
            Some(distance) => self.rounds.entry(distance).or_default().push(round),
            None => self.mixed += 1,
        }
    }

    /// Formats a line of the log about a round.
    #[must_use]
    pub fn note(&self, round: &Round) -> String {
        let theirs =
            round.theirs.as_ref().map(|theirs| format!("{}: {}, ", self.against, self.target.cell(theirs.figure)));
        let ours = self.target.cell(round.ours.figure);
        let distance =
            Distance::of_round(round.probes_ns).map_or_else(|| "mixed".into(), |distance| distance.to_string());
        format!("{}: {}ours: {ours} ({distance})", self.name, theirs.unwrap_or_default())
    }

    /// Returns the rounds in which the two processors were at this distance.
    #[must_use]
    pub fn at(&self, distance: Distance) -> &[Round] {
        self.rounds.get(&distance).map_or(&[], Vec::as_slice)
    }

    /// Returns the distance whose rounds are compared with the target. This is the distance that the contest names, or else the nearest
    /// distance at which rounds were measured. Returns `None` if there are no rounds.
    #[must_use]
    pub fn counted(&self) -> Option<Distance> {
        let nearest = self.rounds.keys().next().copied();
        match self.wanted_at {
            Some(at) => self.rounds.contains_key(&at).then_some(at),
            None => nearest,
        }
    }

    /// Returns the median of one side's figures at this distance, or `None` if there are no rounds.
    #[must_use]
    pub fn median(&self, side: ContestSide, distance: Distance) -> Option<f64> {
        median(self.samples(side, distance).map(|sample| sample.figure))
    }

    fn samples(&self, side: ContestSide, distance: Distance) -> impl Iterator<Item = &Sample> {
        self.at(distance).iter().filter_map(move |round| match side {
            ContestSide::Theirs => round.theirs.as_ref(),
            ContestSide::Ours => Some(&round.ours),
        })
    }

    /// Returns the ratio of this library's figure to the competitor's for each round. The median of these ratios is better than the
    /// ratio of medians, because the machine's other load changes less within a round than between rounds.
    fn ratios(&self, distance: Distance) -> Vec<f64> {
        let ratio = |round: &Round| Some(round.ours.figure / round.theirs.as_ref()?.figure);
        self.at(distance).iter().filter_map(ratio).collect()
    }

    /// Returns the processor time that this library needs for each message, in us: the client's and the server's. Returns `None` if it
    /// was not measured.
    fn processor_us(&self, distance: Distance) -> Option<[f64; 2]> {
        let of = |side: usize| {
            median(self.samples(ContestSide::Ours, distance).filter_map(|sample| Some(sample.processor_us?[side])))
        };
        Some([of(0)?, of(1)?])
    }

    /// Returns the medians of the quantiles that an open loop measured, in us, or `None` if this contest has no open loop.
    #[must_use]
    pub fn tail(&self, side: ContestSide, distance: Distance) -> Option<Tail> {
        let of = |place: usize| median(self.samples(side, distance).filter_map(|sample| Some(sample.tail?[place])));
        Some([of(0)?, of(1)?, of(2)?, of(3)?])
    }

    /// Returns true if the target is met. Also returns true if there is nothing to judge, because the contest was skipped or has no rounds.
    /// Returns false if the contest failed.
    #[must_use]
    pub fn is_met(&self) -> bool {
        if self.failed.is_some() {
            return false;
        }
        let Some(distance) = self.counted() else { return true };
        let ours = self.median(ContestSide::Ours, distance);
        self.skipped.is_some()
            || ours.is_none_or(|ours| self.target.is_met(ours, median(self.ratios(distance).into_iter())))
    }

    /// Formats the results and all rounds as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        let at = |distance: Distance| {
            let figures = |side| self.samples(side, distance).map(|sample| sample.figure).collect::<Vec<_>>();
            let tail = |side| {
                self.tail(side, distance)
                    .map(|[p50, p99, p999, max]| json!({ "p50": p50, "p99": p99, "p999": p999, "max": max }))
            };
            let probes = self.at(distance).iter().map(|round| round.probes_ns);
            json!({
                "other": self.median(ContestSide::Theirs, distance),
                "rdma_reactor": self.median(ContestSide::Ours, distance),
                "ratio": median(self.ratios(distance).into_iter()),
                "other_rounds": figures(ContestSide::Theirs),
                "rdma_reactor_rounds": figures(ContestSide::Ours),
                "other_tail_us": tail(ContestSide::Theirs),
                "rdma_reactor_tail_us": tail(ContestSide::Ours),
                "processor_us_per_message": self
                    .processor_us(distance)
                    .map(|[client, server]| json!({ "client": client, "server": server })),
                "probes_ns": probes.collect::<Vec<_>>(),
            })
        };
        let rounds: serde_json::Map<_, _> =
            self.rounds.keys().map(|distance| (distance.to_string(), at(*distance))).collect();
        json!({
            "name": self.name,
            "against": (!self.against.is_empty()).then_some(self.against),
            "command": self.command,
            "congestion_control": self.congestion,
            "skipped": self.skipped,
            "failed": self.failed,
            "unit": self.target.unit(),
            "target": self.target.to_string(),
            "counted": self.counted().map(|distance| distance.to_string()),
            "met": self.is_met(),
            "mixed": self.mixed,
            "rounds": rounds,
        })
    }

    /// Formats the contest's row of the table. `columns` are the distances that the table shows.
    #[must_use]
    pub fn row(&self, columns: &[Distance]) -> String {
        let mut cells = vec![self.name.clone(), self.against.into()];
        let [skipped, failed] = [("skipped", &self.skipped), ("failed", &self.failed)]
            .map(|(what, why)| why.as_ref().map(|why| format!("{what}: {}", why.replace('|', "/"))));
        if let Some(why) = failed.or(skipped) {
            cells.push(why);
            return line(&cells);
        }
        cells.push(self.congestion.clone().unwrap_or_default());
        for &distance in columns {
            let median_of = |side| self.median(side, distance).map(|figure| self.target.cell(figure));
            let processor = self.processor_us(distance).map(|[client, server]| format!("{client:.2} + {server:.2}"));
            let all = [
                median_of(ContestSide::Theirs),
                median_of(ContestSide::Ours),
                spread(&self.ratios(distance)),
                processor,
            ];
            cells.extend(all.into_iter().map(Option::unwrap_or_default));
        }
        cells.push(self.mixed.to_string());
        let missed = if self.is_met() { "" } else { ", missed" };
        let unmeasured = if self.counted().is_none() { ", not measured" } else { "" };
        cells.push(format!("{}{missed}{unmeasured}", self.target));
        line(&cells)
    }

    /// Formats the contest's rows in the table of open loops. Returns no rows for a contest without an open loop.
    pub fn tail_rows(&self, columns: &[Distance]) -> Vec<String> {
        let of = |distance: Distance, side| {
            let name = if side == ContestSide::Theirs { self.against } else { "rdma-reactor" };
            let tail = self.tail(side, distance)?;
            let first = [self.name.clone(), name.into(), distance.to_string()];
            Some(line(&first.into_iter().chain(tail.map(|us| format!("{us:.1} us"))).collect::<Vec<_>>()))
        };
        let both =
            columns.iter().flat_map(|&distance| [(distance, ContestSide::Theirs), (distance, ContestSide::Ours)]);
        both.filter_map(|(distance, side)| of(distance, side)).collect()
    }
}

/// A side of a contest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContestSide {
    /// The competitor.
    Theirs,
    /// This library.
    Ours,
}

/// Formats the head of the table in Markdown. `columns` are the distances that the table shows.
#[must_use]
pub fn head(columns: &[Distance]) -> String {
    let mut cells = vec![String::new(), "against".into(), "TCP".into()];
    for distance in columns {
        cells.extend(["its figure", "ours", "ratio", "processor, us"].map(|what| format!("{distance}: {what}")));
    }
    cells.extend(["mixed", "target"].map(Into::into));
    format!("{}\n{}", line(&cells), line(&vec!["---".into(); cells.len()]))
}

/// Formats the head of the table of open loops.
#[must_use]
pub fn tail_head() -> String {
    let cells = ["", "program", "processors", "p50", "p99", "p99.9", "max"].map(String::from);
    format!("{}\n{}", line(&cells), line(&vec!["---".into(); cells.len()]))
}

fn line(cells: &[String]) -> String {
    format!("| {} |", cells.join(" | "))
}

/// Formats the median of ratios, with the smallest and the largest ratio if there are several. Returns `None` if there are no ratios.
fn spread(ratios: &[f64]) -> Option<String> {
    let middle = median(ratios.iter().copied())?;
    let [low, high] = [f64::min, f64::max].map(|of| ratios.iter().copied().fold(middle, of));
    Some(if ratios.len() > 1 { format!("{middle:.2} ({low:.2} to {high:.2})") } else { format!("{middle:.2}") })
}

/// Returns the median, or `None` if there are no values.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[n / 2]),
        n => Some(f64::midpoint(sorted[n / 2 - 1], sorted[n / 2])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(theirs: f64, ours: f64, ns: f64) -> Round {
        let ours = Sample { figure: ours, processor_us: Some([0.25, 0.5]), tail: None };
        Round { theirs: Some(theirs.into()), ours, probes_ns: Some([ns; 2]) }
    }

    fn outcome(target: RowTarget, wanted_at: Option<Distance>, rounds: Vec<Round>) -> Outcome {
        let mut outcome = Outcome {
            name: "64 B".into(),
            place: None,
            against: "UCX",
            target,
            wanted_at,
            command: None,
            congestion: Some("reno".into()),
            skipped: None,
            failed: None,
            rounds: BTreeMap::new(),
            mixed: 0,
        };
        rounds.into_iter().for_each(|round| outcome.add(round));
        outcome
    }

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0].into_iter()), Some(2.5));
        assert_eq!(median([].into_iter()), None);
    }

    #[test]
    fn a_ratio_is_of_rounds_not_of_medians() {
        let (theirs, ours) = ([4.0, 4.0, 4.0, 6.0, 6.0], [5.0, 8.0, 5.0, 7.5, 7.5]);
        let rounds = theirs.into_iter().zip(ours).map(|(theirs, ours)| round(theirs, ours, 90.0));
        let outcome = outcome(RowTarget::TimesLatency(1.3), None, rounds.collect());
        assert_eq!(spread(&outcome.ratios(Distance::Near)).unwrap(), "1.25 (1.25 to 2.00)");
        assert!(outcome.is_met());
    }

    #[test]
    fn near_and_far_rounds_are_apart_and_mixed_ones_are_dropped() {
        let mixed = Round { probes_ns: Some([90.0, 300.0]), ..round(1.0, 9.0, 90.0) };
        let rounds = vec![round(4.0, 5.0, 90.0), round(8.0, 16.0, 300.0), mixed];
        let both = outcome(RowTarget::TimesLatency(1.3), None, rounds.clone());
        assert_eq!(both.note(&rounds[0]), "64 B: UCX: 4.00 us, ours: 5.00 us (near)");
        assert!(both.note(&rounds[2]).ends_with("(mixed)"));
        let columns = [Distance::Near, Distance::Far];
        let wanted = "| 64 B | UCX | reno | 4.00 us | 5.00 us | 1.25 | 0.25 + 0.50 | 8.00 us | 16.00 us | 2.00 | \
                      0.25 + 0.50 | 1 | <= 1.3 |";
        assert_eq!(both.row(&columns), wanted);
        assert_eq!(head(&columns).lines().next().unwrap().split('|').count(), wanted.split('|').count());
        let json = both.json();
        assert_eq!((&json["mixed"], &json["counted"], &json["met"]), (&1.into(), &"near".into(), &true.into()));
        assert_eq!(json["rounds"]["far"]["ratio"], 2.0);
        let far = outcome(RowTarget::TimesLatency(1.3), Some(Distance::Far), rounds.clone());
        assert!(!far.is_met() && far.row(&columns).ends_with("| <= 1.3, missed |"));
        let near_only = outcome(RowTarget::Latency(1.5), Some(Distance::Far), rounds[..1].to_vec());
        assert!(near_only.is_met() && near_only.row(&columns).ends_with("| <= 1.5 us, not measured |"));
    }

    #[test]
    fn a_tail_has_a_row_for_each_side() {
        let tail = |values| Sample { figure: 2.0, processor_us: None, tail: Some(values) };
        let (theirs, ours) = (tail([1.0, 2.0, 3.0, 4.0]), tail([5.0, 6.0, 7.0, 8.0]));
        let rounds = vec![Round { theirs: Some(theirs), ours, probes_ns: None }];
        let outcome = outcome(RowTarget::Figure("us"), None, rounds);
        let wanted = "| 64 B | rdma-reactor | unknown | 5.0 us | 6.0 us | 7.0 us | 8.0 us |";
        assert_eq!(outcome.tail_rows(&[Distance::Unknown])[1], wanted);
        assert_eq!(outcome.json()["rounds"]["unknown"]["other_tail_us"]["p999"], 3.0);
    }
}
