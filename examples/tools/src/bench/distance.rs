//! The distance between the two processors of a round. This distance determines the cost of moving a cache line from one to the other. The
//! host of a virtual machine moves the machine's processors from one group of cores with a common cache to another, every few seconds to
//! minutes. So each round probes the distance before and after its measurement.

use std::fmt;
use std::time::Duration;

use super::pair::Processors;
use super::ring;

/// The threshold of a probe, in ns. If the half round trip of 64 B takes less time, the two processors share a cache. On a Zen 4, this half
/// round trip took 90 ns with a shared cache, and 290 to 340 ns without one. The threshold is near the geometric mean of these times.
pub const NEAR_BELOW_NS: f64 = 180.0;
/// The number of exchanges in a probe.
const EXCHANGES: u64 = 20_000;
/// The time limit of a probe. A probe reaches this limit only if other load delays it.
const LIMIT: Duration = Duration::from_secs(1);

/// The distance between the two processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// The processors share a cache.
    Near,
    /// The processors share no cache.
    Far,
    /// The distance is unknown: it was not probed, or the process may use only one processor.
    Unknown,
}

impl Distance {
    /// Converts a measured half round trip to a distance. `ns` is that half round trip, in ns.
    #[must_use]
    pub fn of(ns: f64) -> Self {
        if ns < NEAR_BELOW_NS { Self::Near } else { Self::Far }
    }

    /// Returns the distance during a round, given the half round trips in ns that were measured before and after the round. Returns
    /// `Some(Distance::Unknown)` if there are no such values. Returns `None` if the two values mean different distances, because the
    /// processors moved during the round.
    #[must_use]
    pub fn of_round(probes: Option<[f64; 2]>) -> Option<Self> {
        let Some(probes) = probes else { return Some(Self::Unknown) };
        let [before, after] = probes.map(Self::of);
        (before == after).then_some(before)
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Near => "near",
            Self::Far => "far",
            Self::Unknown => "unknown",
        })
    }
}

/// Measures the half round trip of 64 B through memory between the two processors, in ns. Returns `None` if there is only one
/// processor.
#[must_use]
pub fn probe(processors: &Processors) -> Option<f64> {
    (processors.count() >= 2).then(|| ring::half_round_trip(processors, EXCHANGES, LIMIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_near_or_far_or_mixed() {
        for (probes, distance) in [
            (Some([90.0, 110.0]), Some(Distance::Near)),
            (Some([290.0, 340.0]), Some(Distance::Far)),
            (Some([90.0, 290.0]), None),
            (Some([290.0, 90.0]), None),
            (Some([NEAR_BELOW_NS - 0.1, NEAR_BELOW_NS]), None),
            (None, Some(Distance::Unknown)),
        ] {
            assert_eq!(Distance::of_round(probes), distance, "{probes:?}");
        }
    }
}
