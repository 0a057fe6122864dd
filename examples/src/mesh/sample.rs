//! Results for the tests of what is made of results.

use super::control::{Entry, Latency, Measured};
use super::results::Results;

/// Ranks on hosts of their own, with even figures.
pub(crate) fn even(ranks: usize) -> Results {
    let mut results = Results::new(ranks);
    for rank in 0..ranks {
        let (provider, device) = ("iwarp".into(), "iwarp0".into());
        let entry = Entry { host: format!("n{rank}"), address: None, port: 1, provider, device };
        results.member_mut(rank).entry = Some(entry);
    }
    for from in 0..ranks {
        for to in (0..ranks).filter(|&to| to != from) {
            let latency = Latency { p50_us: 10.0, p99_us: 20.0, samples: 5 };
            results.measured(from, to, Measured::Latency(latency));
            results.measured(from, to, Measured::Bandwidth(10.0));
        }
    }
    results
}

/// Seven ranks, with a slow link, a cut link and a stopped rank.
pub(crate) fn faulty() -> Results {
    let mut results = even(7);
    let latency = Latency { p50_us: 120.0, p99_us: 121.0, samples: 5 };
    results.measured(1, 2, Measured::Latency(latency));
    results.measured(2, 1, Measured::Bandwidth(1.0));
    results.fails(0, 4, "no connection: timeout");
    results.gone(5, "it does not answer: stopped, or cut off, in round 1 of latency");
    results
}
