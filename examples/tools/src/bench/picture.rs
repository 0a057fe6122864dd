//! Draws the pictures of the results.

use plotters::style::RGBColor;

use crate::pingpong::chart::{self, Line};
use crate::pingpong::failure::Failure;

use super::contest::PlotPoint;
use super::outcome::{ContestSide, Outcome};

/// The colour of this library's results.
const OURS: RGBColor = RGBColor(31, 96, 168);
/// The colour of the results of bare TCP.
const BARE: RGBColor = RGBColor(120, 120, 120);
/// The colour of the results of other projects' programs.
const OTHERS: RGBColor = RGBColor(214, 96, 32);
/// The x-coordinates of the quantiles p50, p99 and p99.9. One of `x` messages is slower than the quantile at the coordinate `x`. The
/// largest latency has no such coordinate, so it is not drawn.
const ONE_IN: [f64; 3] = [2.0, 100.0, 1000.0];

/// Draws the half round trips by message size, with both sides polling: one line for this library, and one for each competitor.
///
/// # Errors
/// No row with a size was measured.
pub fn latency_by_size(outcomes: &[Outcome]) -> Result<String, Failure> {
    let at = |place| if let PlotPoint::Size(size) = place { Some(size) } else { None };
    let of = |against, side| points(outcomes, against, at, side);
    let lines = [
        ("rdma-reactor, median", of("bare TCP", ContestSide::Ours), OURS),
        ("bare TCP, median", of("bare TCP", ContestSide::Theirs), BARE),
        ("UCX, median", of("UCX", ContestSide::Theirs), OTHERS),
        ("rdma-reactor, mean", of("libfabric", ContestSide::Ours), RGBColor(140, 180, 220)),
        ("libfabric, mean", of("libfabric", ContestSide::Theirs), RGBColor(60, 150, 80)),
    ];
    let lines: Vec<_> = lines.into_iter().filter(|(_, points, _)| !points.is_empty()).collect();
    chart::by_size("TCP over the loopback, both sides spinning", "half round trip, us", &lines)
}

/// Draws the echoes per second by the number of connections: one line for this library, and one for bare TCP.
///
/// # Errors
/// No row with connections was measured.
pub fn rate_by_connections(outcomes: &[Outcome]) -> Result<String, Failure> {
    let at = |place| if let PlotPoint::Connections(count) = place { Some(count) } else { None };
    let of = |side| points(outcomes, "bare TCP", at, side);
    let lines = [("rdma-reactor", of(ContestSide::Ours), OURS), ("bare TCP", of(ContestSide::Theirs), BARE)];
    chart::by_connections("TCP over the loopback, both sides sleeping", "echoes of 64 B per second", &lines)
}

/// Draws the quantiles of the round trips in the open loop.
///
/// # Errors
/// No open loop was measured.
pub fn open_loop(outcomes: &[Outcome]) -> Result<String, Failure> {
    let of = |name, side, color| -> Option<Line> {
        let tail = outcomes.iter().find_map(|outcome| outcome.tail(side, outcome.counted()?))?;
        Some((name, ONE_IN.into_iter().zip(tail).collect(), color))
    };
    let sides = [("rdma-reactor", ContestSide::Ours, OURS), ("sockperf", ContestSide::Theirs, OTHERS)];
    let lines: Vec<_> = sides.into_iter().filter_map(|(name, side, color)| of(name, side, color)).collect();
    chart::by_quantile("64 B on a schedule, TCP over the loopback", "round trip, us", &lines)
}

/// Returns the points of a line: for each contest with this competitor, its position and the median of one side. `at` returns the
/// position, or `None` if the contest belongs to another picture.
fn points(outcomes: &[Outcome], against: &str, at: fn(PlotPoint) -> Option<u32>, side: ContestSide) -> Vec<(f64, f64)> {
    let of_it = outcomes.iter().filter(|outcome| outcome.against == against);
    of_it
        .filter_map(|outcome| {
            let place = outcome.place.and_then(at)?;
            Some((f64::from(place), outcome.median(side, outcome.counted()?)?))
        })
        .collect()
}
