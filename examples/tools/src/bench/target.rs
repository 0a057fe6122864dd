//! The target of a row of the table: the limit for this library's result, absolute or relative to the competitor's result. This module also
//! formats results.

use std::fmt;

/// The target that this library must meet in one row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowTarget {
    /// The latency is at most this multiple of the competitor's.
    TimesLatency(f64),
    /// The throughput is at least this multiple of the competitor's.
    TimesThroughput(f64),
    /// The number of messages per second is at least this multiple of the competitor's.
    TimesRate(f64),
    /// The number of messages per second is at least this.
    Rate(f64),
    /// The latency is at most this, in us.
    Latency(f64),
    /// There is no target. The result is reported in this unit.
    Figure(&'static str),
}

impl RowTarget {
    /// Returns true if this library meets the target. `ours` is this library's result. `ratio` is this library's result divided by the
    /// competitor's; `None` if there is no competitor.
    #[must_use]
    pub fn is_met(self, ours: f64, ratio: Option<f64>) -> bool {
        match self {
            Self::TimesLatency(most) => ratio.is_some_and(|ratio| ratio <= most),
            Self::TimesThroughput(least) | Self::TimesRate(least) => ratio.is_some_and(|ratio| ratio >= least),
            Self::Rate(least) => ours >= least,
            Self::Latency(most) => ours <= most,
            Self::Figure(_) => true,
        }
    }

    /// Returns the unit of the results.
    #[must_use]
    pub const fn unit(self) -> &'static str {
        match self {
            Self::TimesLatency(_) | Self::Latency(_) => "us",
            Self::TimesThroughput(_) => "Gbit/s",
            Self::TimesRate(_) | Self::Rate(_) => "messages/s",
            Self::Figure(unit) => unit,
        }
    }

    /// Formats a result for the table.
    #[must_use]
    pub fn cell(self, figure: f64) -> String {
        match self.unit() {
            unit if !unit.ends_with("s/s") => format!("{figure:.2} {unit}"),
            _ if figure >= 1e6 => format!("{:.2} M/s", figure / 1e6),
            _ => format!("{figure:.0}/s"),
        }
    }
}

impl fmt::Display for RowTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimesLatency(most) => write!(f, "<= {most}"),
            Self::TimesThroughput(least) | Self::TimesRate(least) => write!(f, ">= {least}"),
            Self::Rate(least) => write!(f, ">= {} M/s", least / 1e6),
            Self::Latency(most) => write!(f, "<= {most} us"),
            Self::Figure(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_met_on_its_own_side() {
        assert!(RowTarget::TimesLatency(1.3).is_met(5.0, Some(1.25)));
        assert!(!RowTarget::TimesLatency(1.3).is_met(6.0, Some(1.5)));
        assert!(RowTarget::TimesThroughput(0.8).is_met(9.0, Some(0.9)));
        assert!(!RowTarget::TimesRate(0.8).is_met(7.0, Some(0.7)));
        assert!(!RowTarget::TimesRate(0.8).is_met(7.0, None));
        assert!(RowTarget::Rate(1e6).is_met(2e6, None) && !RowTarget::Rate(1e6).is_met(9e5, None));
        assert!(RowTarget::Latency(0.5).is_met(0.4, None) && !RowTarget::Latency(0.5).is_met(0.6, None));
        assert!(RowTarget::Figure("us").is_met(0.6, None));
    }

    #[test]
    fn figures_have_their_units() {
        assert_eq!(RowTarget::Figure("us").cell(0.456), "0.46 us");
        assert_eq!(RowTarget::TimesThroughput(1.0).cell(43.21), "43.21 Gbit/s");
        assert_eq!(RowTarget::Rate(1e6).cell(4_440_000.0), "4.44 M/s");
        assert_eq!(RowTarget::Figure("connections/s").cell(857.4), "857/s");
    }
}
