//! The state machine by which rank 0 controls a run. The ranks join, connect, measure in the rounds of a tournament, send to all others at
//! the same time, and end. Every wait has a time limit. If a rank fails, the other ranks continue.
//!
//! The input is reports and the time; the output is orders. This module does not use connections. Times are durations since the start
//! of the run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::control::{Entry, Figure, MeasuredFigure, Order, RankReport};
use super::odd::Judgement;
use super::results::Results;
use super::tournament;

/// The limits of a run, and the measurements that the run makes.
#[derive(Clone, Copy, Debug)]
pub struct RunPlan {
    /// The number of ranks.
    pub ranks: usize,
    /// The time limit for all ranks to join. After that, also the time limit for all ranks to connect to each other.
    pub patience: Duration,
    /// The longest time that one measurement may take before it counts as failed.
    pub measure: Duration,
    /// True if bandwidth is measured.
    pub bandwidth: bool,
    /// The duration of the all-to-all load, in which all ranks send to all; `None` skips it.
    pub load: Option<Duration>,
    /// The smallest additional time in which the ranks may report, after the time limit of
    /// connecting or of the all-to-all load.
    pub silence: Duration,
    /// The largest number of pairs that measure concurrently.
    pub at_once: usize,
    /// The factor by which a figure from one rank to another may be worse than comparable figures.
    /// A figure that exceeds it is measured a second time.
    pub tolerance: f64,
}

/// A pass over all pairs: the figure to measure, and the side that measures. That side is the higher rank of each pair if the second field
/// is true, and otherwise the lower rank.
type Pass = (Figure, bool);

/// The current phase of the run.
// local: ranks and measurements of the run
#[derive(Debug)]
enum Phase {
    /// The ranks join.
    Gathering { until: Duration },
    /// The ranks connect. `left` has the ranks that have not yet reported that they have finished connecting. `links` has the number of
    /// links that each rank has reported.
    Connecting { until: Duration, left: BTreeSet<usize>, links: Vec<usize> },
    /// Pairs of ranks measure.
    Measuring { step: MeasureStep, waiting: Vec<(usize, usize, Figure)>, running: BTreeMap<u32, Running> },
    /// All ranks send to all others. `left` has the ranks that have not reported the end of this load yet.
    Loading { until: Duration, left: BTreeSet<usize> },
    /// The run has ended.
    Over,
}

/// A step of the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MeasureStep {
    /// A round of the tournament: its number, and the pass that it is part of.
    Round { pass: usize, round: usize },
    /// The second measurement of the directions that were much worse than other directions.
    Again,
}

/// A measurement in progress.
#[derive(Clone, Copy, Debug)]
struct Running {
    from: usize,
    to: usize,
    figure: Figure,
    until: Duration,
}

/// The state machine by which rank 0 controls a run.
// local: ranks and measurements of the run
#[derive(Debug)]
pub struct Coordinator {
    plan: RunPlan,
    passes: Vec<Pass>,
    phase: Phase,
    results: Results,
    orders: VecDeque<(usize, Order)>,
    next_task: u32,
}

impl Coordinator {
    /// Makes the coordinator of a run that begins at `now`.
    #[must_use]
    pub fn new(plan: RunPlan, now: Duration) -> Self {
        let mut passes = vec![(Figure::Latency, false)];
        if plan.bandwidth {
            passes.extend([(Figure::Bandwidth, false), (Figure::Bandwidth, true)]);
        }
        Self {
            plan,
            passes,
            phase: Phase::Gathering { until: now + plan.patience },
            results: Results::new(plan.ranks),
            orders: VecDeque::new(),
            next_task: 0,
        }
    }

    /// Returns the results so far.
    #[must_use]
    pub const fn results(&self) -> &Results {
        &self.results
    }

    /// Removes and returns the next order, with the rank to send it to. Returns `None` if no order is queued.
    pub fn next_order(&mut self) -> Option<(usize, Order)> {
        self.orders.pop_front()
    }

    /// Returns the latest time at which [`Coordinator::tick`] must be called next, or `None` if nothing has a time limit.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        match &self.phase {
            Phase::Gathering { until } | Phase::Connecting { until, .. } | Phase::Loading { until, .. } => Some(*until),
            Phase::Measuring { running, .. } => running.values().map(|running| running.until).min(),
            Phase::Over => None,
        }
    }

    /// Returns true if the run has ended.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// Ends the run early. The figures that were not measured are missing in the results, and ranks that have not joined are gone. Does
    /// nothing if the run has ended.
    pub fn interrupt(&mut self) {
        if !self.is_over() {
            self.results.interrupt();
            for rank in 0..self.plan.ranks {
                // `Results::gone` would also record a fault for each pair of this rank. These pairs
                // have no fault: they were only not measured.
                let member = self.results.member_mut(rank);
                if member.entry.is_none() {
                    member.gone.get_or_insert_with(|| "it had not joined".into());
                }
            }
            self.end();
        }
    }

    /// Returns true if the rank has not joined yet and may still join.
    #[must_use]
    pub fn awaits(&self, rank: usize) -> bool {
        let known = self.results.members().get(rank).is_none_or(|member| member.entry.is_some());
        matches!(self.phase, Phase::Gathering { .. }) && !known
    }

    /// Returns the name of the current phase.
    #[must_use]
    pub fn stage(&self) -> &'static str {
        match &self.phase {
            Phase::Gathering { .. } => "waiting for ranks",
            Phase::Connecting { .. } => "connecting",
            Phase::Measuring { step: MeasureStep::Round { pass, .. }, .. } => match self.passes[*pass] {
                (Figure::Latency, _) => "latency",
                (Figure::Bandwidth, false) => "bandwidth up",
                (Figure::Bandwidth, true) => "bandwidth down",
            },
            Phase::Measuring { step: MeasureStep::Again, .. } => "second measurement of odd pairs",
            Phase::Loading { .. } => "all send to all",
            Phase::Over => "over",
        }
    }

    /// Describes the progress of the run in one line.
    #[must_use]
    pub fn progress(&self) -> String {
        let (stage, ranks) = (self.stage(), self.plan.ranks);
        match &self.phase {
            Phase::Gathering { .. } => {
                let here = self.results.members().iter().filter(|member| member.is_here()).count();
                format!("{stage}: {here} of {ranks} have joined")
            }
            Phase::Connecting { links, .. } => {
                format!("{stage}: {} of {} links", links.iter().sum::<usize>(), ranks * (ranks - 1) / 2)
            }
            Phase::Measuring { step: MeasureStep::Round { round, .. }, running, .. } => {
                let rounds = tournament::rounds(ranks);
                format!("{stage}: round {} of {rounds}, {} pairs measure", round + 1, running.len())
            }
            Phase::Measuring { step: MeasureStep::Again, waiting, running } => {
                format!("{stage}: {} directions are left", waiting.len() + running.len())
            }
            Phase::Loading { left, .. } => format!("{stage}: {} of {ranks} ranks have not reported", left.len()),
            Phase::Over => stage.into(),
        }
    }

    /// Handles a report of a rank.
    pub fn report(&mut self, rank: usize, report: RankReport, now: Duration) {
        if self.is_over() {
            // After the run, all ranks end, and report that the links to other ranks have ended. That is no fault.
            return;
        }
        match report {
            RankReport::Joined(entry) => self.joined(rank, entry),
            RankReport::Progress(count) => {
                if let Phase::Connecting { links, .. } = &mut self.phase {
                    links[rank] = count.min(self.plan.ranks);
                }
            }
            RankReport::Connected { took, attempts, failed, shm, memory_kib } => {
                self.results.member_mut(rank).memory_kib = Some(memory_kib);
                self.connected(rank, took, attempts, &failed, &shm);
            }
            RankReport::Moved(counters) => self.results.member_mut(rank).moved = counters,
            RankReport::Result { task, result } => self.result(rank, task, result),
            RankReport::Lost { peer, why } if self.is_peer(rank, peer) => self.results.fails(rank, peer, &why),
            RankReport::Lost { .. } => {}
            RankReport::Loaded { heard, memory_kib } => {
                self.results.member_mut(rank).memory_kib = Some(memory_kib);
                if let Phase::Loading { left, .. } = &mut self.phase {
                    if left.remove(&rank) {
                        for heard in heard.iter().filter(|heard| is_peer(self.plan.ranks, rank, heard.from)) {
                            self.results.record_load(rank, heard);
                        }
                    }
                }
            }
        }
        self.tick(now);
    }

    /// Records that the control connection of a rank has ended.
    pub fn gone(&mut self, rank: usize, why: &str, now: Duration) {
        if matches!(self.phase, Phase::Over) {
            return;
        }
        let when = match &self.phase {
            Phase::Gathering { .. } => {
                // Ranks may still join in this phase, so another process may join with the number of this rank.
                self.results.member_mut(rank).entry = None;
                return;
            }
            Phase::Connecting { .. } => "while connecting".into(),
            Phase::Measuring { step: MeasureStep::Round { pass, round }, .. } => {
                format!("in round {} of {}", round + 1, if *pass == 0 { "latency" } else { "bandwidth" })
            }
            Phase::Measuring { step: MeasureStep::Again, .. } => "at the second measurement".into(),
            Phase::Loading { .. } | Phase::Over => "while all sent to all".into(),
        };
        self.results.gone(rank, &format!("{why}, {when}"));
        match &mut self.phase {
            Phase::Connecting { left, .. } | Phase::Loading { left, .. } => {
                left.remove(&rank);
            }
            Phase::Measuring { running, .. } => running.retain(|_, running| running.from != rank && running.to != rank),
            Phase::Gathering { .. } | Phase::Over => {}
        }
        self.tick(now);
    }

    /// Handles expired time limits. Begins the next phase if the current one has nothing to wait for.
    pub fn tick(&mut self, now: Duration) {
        loop {
            let went_on = match &self.phase {
                Phase::Gathering { until } => {
                    let all = self.results.members().iter().all(|member| member.entry.is_some());
                    (all || now >= *until) && self.begin_connecting(now)
                }
                Phase::Connecting { until, left, .. } => {
                    let late = if now >= *until { left.iter().copied().collect() } else { Vec::new() };
                    (left.is_empty() || now >= *until) && self.begin_measuring(&late)
                }
                Phase::Measuring { .. } => self.measure(now),
                Phase::Loading { until, left } => {
                    let late = if now >= *until { left.iter().copied().collect() } else { Vec::new() };
                    for rank in &late {
                        self.results.gone(*rank, "no report after all sent to all");
                    }
                    let done = matches!(&self.phase, Phase::Loading { left, .. } if left.len() == late.len());
                    done && self.end()
                }
                Phase::Over => false,
            };
            if !went_on {
                return;
            }
        }
    }

    fn is_peer(&self, rank: usize, peer: usize) -> bool {
        is_peer(self.plan.ranks, rank, peer)
    }

    fn here(&self) -> BTreeSet<usize> {
        let members = self.results.members().iter().enumerate();
        members.filter(|(_, member)| member.is_here()).map(|(rank, _)| rank).collect()
    }

    fn joined(&mut self, rank: usize, entry: Entry) {
        if self.awaits(rank) {
            self.results.member_mut(rank).entry = Some(entry);
        }
    }

    fn begin_connecting(&mut self, now: Duration) -> bool {
        let missing: Vec<_> = (0..self.plan.ranks).filter(|rank| !self.here().contains(rank)).collect();
        for rank in missing {
            self.results.gone(rank, "it never joined");
        }
        let left = self.here();
        let ranks: Vec<_> = self.results.members().iter().map(|member| member.entry.clone()).collect();
        for &rank in &left {
            self.orders.push_back((rank, Order::Connect { ranks: ranks.clone() }));
        }
        // A rank stops connecting after `patience`, and then reports. The limit here is longer by `silence`, which is the time for that
        // report.
        let until = now + self.plan.patience + self.plan.silence;
        self.phase = Phase::Connecting { until, left, links: vec![0; self.plan.ranks] };
        true
    }

    fn connected(&mut self, rank: usize, took: Duration, attempts: u64, failed: &[(usize, String)], shm: &[usize]) {
        let Phase::Connecting { left, .. } = &mut self.phase else { return };
        left.remove(&rank);
        let member = self.results.member_mut(rank);
        (member.connected, member.attempts) = (Some(took), attempts);
        for (peer, why) in failed {
            if self.is_peer(rank, *peer) {
                self.results.fails(rank, *peer, why);
            }
        }
        for &peer in shm {
            if self.is_peer(rank, peer) {
                self.results.shares(rank, peer);
            }
        }
    }

    fn begin_measuring(&mut self, late: &[usize]) -> bool {
        for rank in late {
            self.results.gone(*rank, "no report while connecting");
        }
        self.phase = self.round(0, 0);
        true
    }

    /// Returns the phase that measures the pairs of one round in one pass. The first pair to measure is at the end of `waiting`.
    fn round(&self, pass: usize, round: usize) -> Phase {
        let back = self.passes[pass].1;
        let figure = self.passes[pass].0;
        let waiting = tournament::pairs(self.plan.ranks, round)
            .filter(|&(a, b)| self.results.pair(a, b).broken.is_none())
            .map(|(a, b)| if back { (b, a, figure) } else { (a, b, figure) })
            .collect();
        Phase::Measuring { step: MeasureStep::Round { pass, round }, waiting, running: BTreeMap::new() }
    }

    /// Returns the phase of the second measurement. The directions that are much worse than other directions are measured again, but at
    /// most as many directions as there are ranks. If more directions are worse, the cause is not a single link.
    fn again(&self) -> Phase {
        let tolerance = self.plan.tolerance;
        let odd = [Figure::Latency, Figure::Bandwidth].map(|figure| {
            let judgement = Judgement::new(&self.results, figure);
            judgement.odd_ways(tolerance).map(|way| (way.from, way.to, way.figure)).collect::<Vec<_>>()
        });
        let waiting = odd.into_iter().flatten().take(self.plan.ranks).collect();
        Phase::Measuring { step: MeasureStep::Again, waiting, running: BTreeMap::new() }
    }

    /// Orders as many measurements as may run concurrently. If all measurements of the current step are done, begins the next step. Returns
    /// true if the phase has changed.
    fn measure(&mut self, now: Duration) -> bool {
        let Phase::Measuring { step, waiting, running } = &mut self.phase else { return false };
        let at_once = if *step == MeasureStep::Again { 1 } else { self.plan.at_once };
        let late: Vec<_> = running.iter().filter(|(_, running)| now >= running.until).map(|(task, _)| *task).collect();
        for task in late {
            if let Some(Running { from, to, .. }) = running.remove(&task) {
                let seconds = self.plan.measure.as_secs();
                self.results.fails(from, to, &format!("no result from rank {from} within {seconds} s"));
            }
        }
        while running.len() < at_once {
            let Some((from, to, figure)) = waiting.pop() else { break };
            if self.results.pair(from, to).broken.is_some() {
                continue;
            }
            let task = self.next_task;
            self.next_task = self.next_task.wrapping_add(1);
            running.insert(task, Running { from, to, figure, until: now + self.plan.measure });
            self.orders.push_back((from, Order::Measure { task, peer: to, figure }));
        }
        if !running.is_empty() || !waiting.is_empty() {
            return false;
        }
        match *step {
            MeasureStep::Round { pass, round } if round + 1 < tournament::rounds(self.plan.ranks) => {
                self.phase = self.round(pass, round + 1);
            }
            MeasureStep::Round { pass, .. } if pass + 1 < self.passes.len() => self.phase = self.round(pass + 1, 0),
            MeasureStep::Round { .. } => self.phase = self.again(),
            MeasureStep::Again => self.begin_load(now),
        }
        true
    }

    fn begin_load(&mut self, now: Duration) {
        let Some(load) = self.plan.load else {
            self.end();
            return;
        };
        let left = self.here();
        self.orders.extend(left.iter().map(|&rank| (rank, Order::Load)));
        // A rank waits for the last messages of the other ranks for `silence` at most. The limit here is longer by another `silence`, so
        // that the rank's report can still arrive.
        self.phase = Phase::Loading { until: now + load + 2 * self.plan.silence, left };
    }

    fn result(&mut self, rank: usize, task: u32, result: Result<MeasuredFigure, String>) {
        let Phase::Measuring { running, .. } = &mut self.phase else { return };
        let Some(Running { from, to, figure, .. }) = running.get(&task).copied().filter(|running| running.from == rank)
        else {
            return;
        };
        running.remove(&task);
        match result {
            Ok(measured) if matches!(measured, MeasuredFigure::Latency(_)) == (figure == Figure::Latency) => {
                self.results.measured(from, to, measured);
            }
            Ok(_) => self.results.fails(from, to, "the result is not of the figure that was ordered"),
            Err(why) => self.results.fails(from, to, &why),
        }
    }

    fn end(&mut self) -> bool {
        self.orders.extend(self.here().into_iter().map(|rank| (rank, Order::End)));
        self.phase = Phase::Over;
        true
    }
}

fn is_peer(ranks: usize, rank: usize, peer: usize) -> bool {
    peer < ranks && peer != rank
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::control::{LatencyFigures, ReceivedLoad};

    const SECOND: Duration = Duration::from_secs(1);

    fn plan(ranks: usize) -> RunPlan {
        RunPlan {
            ranks,
            patience: 10 * SECOND,
            measure: 5 * SECOND,
            bandwidth: true,
            load: Some(SECOND),
            silence: 3 * SECOND,
            at_once: usize::MAX,
            tolerance: 3.0,
        }
    }

    fn entry(rank: usize) -> Entry {
        let (host, provider, device) = (format!("n{rank}"), "iwarp".into(), "iwarp0".into());
        Entry { host, address: None, port: 1, provider, device, processors: None }
    }

    /// Simulated ranks, which answer each order immediately. Ranks in `silent` do not answer.
    struct Cluster {
        coordinator: Coordinator,
        now: Duration,
        silent: BTreeSet<usize>,
        /// The latencies that the pair of ranks 1 and 2 reports; the last one is reported first.
        slow: Vec<f64>,
        /// The largest number of concurrent measurements so far.
        most: usize,
    }

    impl Cluster {
        fn new(plan: RunPlan) -> Self {
            let coordinator = Coordinator::new(plan, Duration::ZERO);
            Self { coordinator, now: Duration::ZERO, silent: BTreeSet::new(), slow: Vec::new(), most: 0 }
        }

        fn join(&mut self, ranks: impl IntoIterator<Item = usize>) {
            for rank in ranks {
                self.coordinator.report(rank, RankReport::Joined(entry(rank)), self.now);
            }
        }

        /// Runs to the end and returns the results. Calls `event` with each order before a rank carries it out.
        fn run(&mut self, mut event: impl FnMut(&mut Self, usize, &Order)) -> Results {
            while !self.coordinator.is_over() {
                let mut orders = Vec::new();
                while let Some(order) = self.coordinator.next_order() {
                    orders.push(order);
                }
                self.most = self.most.max(orders.iter().filter(|o| matches!(o.1, Order::Measure { .. })).count());
                if orders.is_empty() {
                    self.now = self.coordinator.deadline().expect("something is waited for");
                    self.coordinator.tick(self.now);
                }
                for (rank, order) in orders {
                    event(self, rank, &order);
                    let report = match order {
                        _ if self.silent.contains(&rank) => continue,
                        Order::Connect { .. } => {
                            // All simulated ranks are on one host, so each link uses shared memory.
                            let shm = (rank + 1..self.coordinator.plan.ranks).collect();
                            RankReport::Connected { took: SECOND, attempts: 1, failed: Vec::new(), shm, memory_kib: 1 }
                        }
                        Order::Measure { peer, .. } if self.silent.contains(&peer) => continue,
                        Order::Measure { task, peer, figure: Figure::Latency } => {
                            let slow = (rank == 1 && peer == 2).then(|| self.slow.pop()).flatten();
                            let latency = LatencyFigures { p50_us: slow.unwrap_or(1.0), p99_us: 2.0, samples: 3 };
                            RankReport::Result { task, result: Ok(MeasuredFigure::Latency(latency)) }
                        }
                        Order::Measure { task, .. } => {
                            RankReport::Result { task, result: Ok(MeasuredFigure::Bandwidth(8.0)) }
                        }
                        Order::Load => {
                            let silent = self.silent.clone();
                            let others =
                                (0..self.coordinator.plan.ranks).filter(|peer| *peer != rank && !silent.contains(peer));
                            let heard = |from| ReceivedLoad { from, messages: 9, gbit: 1.0, errors: 0, complete: true };
                            RankReport::Loaded { heard: others.map(heard).collect(), memory_kib: 1 }
                        }
                        Order::End => continue,
                    };
                    self.coordinator.report(rank, report, self.now);
                }
            }
            self.coordinator.results().clone()
        }
    }

    #[test]
    fn all_pairs_get_all_figures() {
        for (ranks, at_once) in [(2, 9), (5, 9), (8, 9), (8, 1)] {
            let mut cluster = Cluster::new(RunPlan { at_once, ..plan(ranks) });
            cluster.join(0..ranks);
            let results = cluster.run(|_, _, _| {});
            for (a, b, pair) in results.pairs() {
                assert!(pair.latency.is_some() && pair.broken.is_none(), "{a} and {b}: {pair:?}");
                assert!([pair.up, pair.down].iter().all(|way| way.gbit.is_some() && way.messages == 9));
                assert!(pair.shm, "{a} and {b}");
            }
            assert_eq!(cluster.most, at_once.min(ranks / 2));
            assert_eq!(cluster.now, Duration::ZERO, "nothing was waited for");
            let ends = std::iter::from_fn(|| cluster.coordinator.next_order()).count();
            assert_eq!(ends, ranks);
        }
    }

    #[test]
    fn who_does_not_come_is_a_row_and_the_others_go_on() {
        let mut cluster = Cluster::new(plan(4));
        cluster.join([0, 1, 3]);
        let results = cluster.run(|_, rank, _| assert_ne!(rank, 2));
        assert_eq!(results.members()[2].gone.as_deref(), Some("it never joined"));
        let broken: Vec<_> = results.pairs().filter(|(.., p)| p.broken.is_some()).map(|(a, b, _)| (a, b)).collect();
        assert_eq!(broken, [(0, 2), (1, 2), (2, 3)]);
    }

    #[test]
    fn a_rank_that_is_gone_in_the_middle_ends_no_other() {
        let mut cluster = Cluster::new(plan(5));
        cluster.join(0..5);
        let results = cluster.run(|cluster, _, order| {
            if matches!(order, Order::Measure { figure: Figure::Bandwidth, .. }) && cluster.silent.insert(3) {
                let now = cluster.now;
                cluster.coordinator.gone(3, "closed by the peer", now);
            }
        });
        let why = results.members()[3].gone.clone().unwrap();
        assert_eq!(why, "closed by the peer, in round 1 of bandwidth");
        for (a, b, pair) in results.pairs() {
            assert!(pair.latency.is_some(), "it was measured before");
            assert_eq!(pair.broken.is_some(), a == 3 || b == 3);
            assert_eq!(pair.up.loaded_gbit.is_some(), a != 3 && b != 3);
        }
    }

    #[test]
    fn a_rank_that_is_silent_costs_time_and_no_more() {
        let mut cluster = Cluster::new(plan(4));
        cluster.join(0..4);
        cluster.silent.insert(2);
        let results = cluster.run(|_, _, _| {});
        assert_eq!(results.members()[2].gone.as_deref(), Some("no report while connecting"));
        assert!(results.pairs().filter(|&(a, b, _)| a != 2 && b != 2).all(|(.., pair)| pair.broken.is_none()));

        // Rank 2 is silent from the first measurement on. Each of its pairs costs the time limit of one measurement, and is not
        // measured again.
        let mut cluster = Cluster::new(plan(4));
        cluster.join(0..4);
        let results = cluster.run(|cluster, _, order| {
            if matches!(order, Order::Measure { .. }) {
                cluster.silent.insert(2);
            }
        });
        assert_eq!(results.pairs().filter(|(.., pair)| pair.broken.is_some()).count(), 3);
        assert!(results.pair(0, 2).broken.as_ref().unwrap().contains("within 5 s"));
        assert!(cluster.now <= 22 * SECOND, "{:?}", cluster.now);
    }

    #[test]
    fn what_is_odd_is_measured_again_and_the_better_figure_stays() {
        for (looks, left, measured) in [(vec![90.0], 90.0, 7), (vec![80.0, 90.0], 80.0, 7), (vec![2.0], 2.0, 6)] {
            let mut cluster = Cluster::new(RunPlan { bandwidth: false, ..plan(4) });
            cluster.join(0..4);
            // The first measurement returns the last latency of the list `slow`, and the second measurement returns the latency before that
            // one.
            cluster.slow.clone_from(&looks);
            let mut count = 0;
            let results = cluster.run(|_, _, order| count += usize::from(matches!(order, Order::Measure { .. })));
            let p50 = results.pair(1, 2).latency.unwrap().p50_us;
            // If a pair was measured twice, the better latency counts. If the list has only one latency, the second measurement returns
            // 1.0.
            assert_eq!((p50, count), (if looks.len() == 1 && left > 3.0 { 1.0 } else { left }, measured), "{looks:?}");
        }
    }

    #[test]
    fn an_interrupted_run_has_pairs_that_were_not_measured() {
        let mut cluster = Cluster::new(plan(4));
        cluster.join(0..4);
        let mut count = 0;
        // A round has two pairs. The run is interrupted at the first order of the second round.
        let results = cluster.run(|cluster, _, order| {
            count += usize::from(matches!(order, Order::Measure { .. }));
            if count == 3 {
                cluster.coordinator.interrupt();
            }
        });
        assert!(results.is_interrupted());
        let unmeasured = results.pairs().filter(|(.., pair)| pair.is_unmeasured()).count();
        assert_eq!((unmeasured, results.pairs().filter(|(.., pair)| pair.broken.is_some()).count()), (4, 0));

        // The run is interrupted before rank 1 has joined.
        let mut cluster = Cluster::new(plan(3));
        cluster.join([0, 2]);
        cluster.coordinator.interrupt();
        let results = cluster.coordinator.results();
        let gone: Vec<_> = results.members().iter().map(|member| member.gone.as_deref()).collect();
        assert_eq!(gone, [None, Some("it had not joined"), None]);
        assert!(results.pairs().all(|(.., pair)| pair.is_unmeasured()));

        // A run that has ended is not interrupted any more.
        let mut cluster = Cluster::new(plan(4));
        cluster.join(0..4);
        let results = cluster.run(|_, _, _| {});
        cluster.coordinator.interrupt();
        assert!(!results.is_interrupted() && !cluster.coordinator.results().is_interrupted());
        assert_eq!(std::iter::from_fn(|| cluster.coordinator.next_order()).count(), 4, "one end for each rank");
    }

    #[test]
    fn nonsense_changes_nothing() {
        let mut cluster = Cluster::new(plan(3));
        cluster.join(0..3);
        let results = cluster.run(|cluster, _, order| {
            let now = cluster.now;
            let coordinator = &mut cluster.coordinator;
            coordinator.report(1, RankReport::Joined(entry(9)), now);
            coordinator.report(1, RankReport::Lost { peer: 1, why: "itself".into() }, now);
            coordinator.report(1, RankReport::Lost { peer: 77, why: "nobody".into() }, now);
            coordinator.report(1, RankReport::Progress(usize::MAX), now);
            let shm = vec![1, 77, usize::MAX];
            let (took, attempts, failed, memory_kib) = (SECOND, 1, Vec::new(), 1);
            coordinator.report(1, RankReport::Connected { took, attempts, failed, shm, memory_kib }, now);
            if let Order::Measure { task, .. } = order {
                coordinator.report(2, RankReport::Result { task: task + 50, result: Err("of nothing".into()) }, now);
            }
        });
        assert!(results.pairs().all(|(.., pair)| pair.broken.is_none()));
        assert_eq!(results.members()[1].host(), "n1");
    }
}
