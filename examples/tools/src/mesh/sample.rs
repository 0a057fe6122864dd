//! Makes results for the tests of reports and drawings.

use super::control::{Entry, LatencyFigures, MeasuredFigure};
use super::results::Results;

/// Returns results of ranks on separate hosts, without figures.
fn named(ranks: usize) -> Results {
    let mut results = Results::new(ranks);
    for rank in 0..ranks {
        let (provider, device) = ("iwarp".into(), "iwarp0".into());
        let host = format!("n{rank}");
        let entry = Entry { host, address: None, port: 1, provider, device, processors: Some(1) };
        results.member_mut(rank).entry = Some(entry);
    }
    results
}

fn ranks_with(ranks: usize, with_slow_link: bool) -> Results {
    let mut results = named(ranks);
    for from in 0..ranks {
        for to in (0..ranks).filter(|&to| to != from) {
            let slow = from.min(to) == 1 && from.max(to) == 2 && with_slow_link;
            let p50_us = if slow { 120.0 } else { 10.0 };
            let latency = LatencyFigures { p50_us, p99_us: p50_us + 1.0, samples: 5 };
            results.measured(from, to, MeasuredFigure::Latency(latency));
            results.measured(from, to, MeasuredFigure::Bandwidth(if slow && from == 2 { 1.0 } else { 10.0 }));
        }
    }
    results
}

/// Returns results of ranks on separate hosts. All figures are equal.
pub(crate) fn even(ranks: usize) -> Results {
    ranks_with(ranks, false)
}

/// Returns results of a run that was interrupted before the pairs of the last rank were measured. The other pairs have equal latencies.
pub(crate) fn interrupted(ranks: usize) -> Results {
    let mut results = named(ranks);
    for a in 0..ranks - 1 {
        for b in a + 1..ranks - 1 {
            results.measured(a, b, MeasuredFigure::Latency(LatencyFigures { p50_us: 10.0, p99_us: 11.0, samples: 5 }));
        }
    }
    results.interrupt();
    results
}

/// Returns results of seven ranks with a slow link, a cut link, a stopped
/// rank, a link in shared memory, and a device that retransmitted.
pub(crate) fn faulty() -> Results {
    let mut results = ranks_with(7, true);
    results.shares(3, 6);
    results.member_mut(6).moved = [("completer_retry_err".to_owned(), 12), ("sent_pkts".to_owned(), 99)].into();
    results.fails(0, 4, "no connection: timeout");
    results.gone(5, "it does not answer: stopped, or cut off, in round 1 of latency");
    results
}
