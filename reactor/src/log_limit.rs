//! A limit on log lines that peers can cause.
//!
//! A peer that connects as fast as it can and fails each time would fill the log of the side that it connects to. So there is one
//! line of each kind and level per host and [`INTERVAL`], and at most [`MOST`] in all; a line says how many were left out before it.
//! Lines of a level that is not logged do not count.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use log::Level;
use rdma_transport::newcomers::Host;

/// The time for which a host causes no other line of the same kind.
const INTERVAL: Duration = Duration::from_secs(10);

/// Largest number of lines in that time.
const MOST: usize = 256;

/// A kind of line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Complaint {
    /// A connect request was refused.
    Refused,
    /// A connection did not come up.
    NotUp,
    /// A peer broke the protocol.
    Violation,
}

/// What makes two lines alike.
type Line = (Host, Complaint, Level);

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    /// The lines of the last interval, the oldest first.
    lines: VecDeque<(Instant, Line)>,
    /// The same, to find one.
    recent: BTreeSet<Line>,
    left_out: u64,
}

impl LogLimit {
    /// Returns the end of a line about a peer if the line is to be written now. The level is one that is logged: see [`complain`].
    pub(crate) fn admit(&mut self, kind: Complaint, level: Level, peer: IpAddr, now: Instant) -> Option<LeftOut> {
        while let Some(&(at, line)) = self.lines.front().filter(|(at, _)| *at + INTERVAL <= now) {
            self.lines.pop_front();
            self.recent.remove(&line);
            debug_assert!(at <= now, "time does not run backwards");
        }
        let line = (Host::of(peer), kind, level);
        if self.lines.len() >= MOST || !self.recent.insert(line) {
            self.left_out += 1;
            return None;
        }
        self.lines.push_back((now, line));
        Some(LeftOut(std::mem::take(&mut self.left_out)))
    }
}

/// Writes a line about a peer if its level is logged here and [`LogLimit::admit`] says so.
macro_rules! complain {
    ($limit:expr, $now:expr, $kind:expr, $level:expr, $peer:expr, $($text:tt)+) => {
        if log::log_enabled!($level) {
            if let Some(left_out) = $limit.admit($kind, $level, $peer.ip(), $now) {
                log::log!($level, "{}{left_out}", format_args!($($text)+));
            }
        }
    };
}
pub(crate) use complain;

/// The number of lines that were left out before this one, as the end of the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeftOut(u64);

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " ({count} lines about peers were left out before this one)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_failures_is_a_few_lines() {
        #[allow(clippy::disallowed_methods, reason = "a point in time to count from")]
        let start = Instant::now();
        let (mut limit, mut written, mut told) = (LogLimit::default(), 0, 0);
        let ms = |ms| start + Duration::from_millis(ms);
        let host = |number: u64| IpAddr::from(std::net::Ipv6Addr::from_bits(u128::from(number) << 64 | 7));
        assert_eq!(limit.admit(Complaint::NotUp, Level::Warn, host(1), ms(0)), Some(LeftOut(0)));
        assert_eq!(limit.admit(Complaint::NotUp, Level::Warn, host(1), ms(9_999)), None);
        assert_eq!(limit.admit(Complaint::Refused, Level::Warn, host(1), ms(9_999)), Some(LeftOut(1)), "another kind");
        assert_eq!(limit.admit(Complaint::NotUp, Level::Info, host(1), ms(9_999)), Some(LeftOut(0)), "another level");
        assert_eq!(limit.admit(Complaint::NotUp, Level::Warn, host(1), ms(10_000)), Some(LeftOut(0)));
        // A million failures of as many hosts within 100 s.
        for nth in 0..1_000_000 {
            if let Some(LeftOut(count)) = limit.admit(Complaint::NotUp, Level::Warn, host(nth), ms(20_000 + nth / 10)) {
                (written, told) = (written + 1, told + count);
            }
            assert!(limit.lines.len() <= MOST && limit.recent.len() == limit.lines.len());
        }
        assert_eq!((written, written + told + limit.left_out), (10 * MOST as u64, 1_000_000));
        assert_eq!(LeftOut(3).to_string(), " (3 lines about peers were left out before this one)");
    }
}
