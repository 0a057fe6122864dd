//! A rate limit on log lines that peers can cause.
//!
//! Without a limit, a peer that connects as fast as it can, and fails each time, would fill the log. So within
//! [`INTERVAL`], a host causes at most one line of each kind and level, and all hosts together cause at most
//! [`MAX_LINES`] lines. Further lines are left out. The next line that is written contains the number of lines that
//! were left out before it. Lines of a level that is not logged are not counted.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use log::Level;
use rdma_transport::newcomers::Host;

/// The length of an interval. After a line is written, no further line with the same host, kind and level is written
/// for this time.
const INTERVAL: Duration = Duration::from_secs(10);

/// The largest number of lines that are written within [`INTERVAL`], for all hosts together.
const MAX_LINES: usize = 256;

/// The kind of a log line about a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Complaint {
    /// The reactor refused a connect request.
    Refused,
    /// A connection was not established.
    NotUp,
    /// A peer violated the protocol.
    Violation,
}

/// The host, the kind and the level of a log line. Within [`INTERVAL`], only one line with the same key is written.
type LineKey = (Host, Complaint, Level);

/// The lines that were written within the last [`INTERVAL`], and the number of lines that were left out since the most
/// recently written line.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    /// The lines that were written within the last [`INTERVAL`], the oldest first.
    lines: VecDeque<(Instant, LineKey)>,
    /// The keys of all entries of `lines`, for a fast search.
    recent: BTreeSet<LineKey>,
    left_out: u64,
}

impl LogLimit {
    /// Decides if a line about a peer may be written now. If the line may be written, returns the number of lines that
    /// were left out since the previous line: the caller appends this number to the line. Otherwise counts the line as
    /// left out, and returns `None`. The caller, [`complain`], has already checked that `level` is logged.
    pub(crate) fn admit(&mut self, kind: Complaint, level: Level, peer: IpAddr, now: Instant) -> Option<LeftOut> {
        while let Some(&(at, line)) = self.lines.front().filter(|(at, _)| *at + INTERVAL <= now) {
            self.lines.pop_front();
            self.recent.remove(&line);
            debug_assert!(at <= now, "time does not run backwards");
        }
        let line = (Host::of(peer), kind, level);
        if self.lines.len() >= MAX_LINES || !self.recent.insert(line) {
            self.left_out += 1;
            return None;
        }
        self.lines.push_back((now, line));
        Some(LeftOut(std::mem::take(&mut self.left_out)))
    }
}

/// Logs a line about a peer if its level is logged and [`LogLimit::admit`] allows it.
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

/// The number of lines that were left out before a line that is written. The formatted number is appended to that line;
/// it is an empty string if the number is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeftOut(u64);

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            1 => f.write_str(" (1 line about peers was left out before this one)"),
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
        let (mut limit, mut written, mut reported) = (LogLimit::default(), 0, 0);
        let ms = |ms| start + Duration::from_millis(ms);
        let host = |number: u64| IpAddr::from(std::net::Ipv6Addr::from_bits(u128::from(number) << 64 | 7));
        assert_eq!(limit.admit(Complaint::NotUp, Level::Warn, host(1), ms(0)), Some(LeftOut(0)));
        assert_eq!(limit.admit(Complaint::NotUp, Level::Warn, host(1), ms(9_999)), None);
        assert_eq!(limit.admit(Complaint::Refused, Level::Warn, host(1), ms(9_999)), Some(LeftOut(1)), "another kind");
        assert_eq!(limit.admit(Complaint::NotUp, Level::Info, host(1), ms(9_999)), Some(LeftOut(0)), "another level");
        assert_eq!(limit.admit(Complaint::NotUp, Level::Warn, host(1), ms(10_000)), Some(LeftOut(0)));
        // A million hosts fail once each, within 100 s.
        for nth in 0..1_000_000 {
            if let Some(LeftOut(count)) = limit.admit(Complaint::NotUp, Level::Warn, host(nth), ms(20_000 + nth / 10)) {
                (written, reported) = (written + 1, reported + count);
            }
            assert!(limit.lines.len() <= MAX_LINES && limit.recent.len() == limit.lines.len());
        }
        assert_eq!((written, written + reported + limit.left_out), (10 * MAX_LINES as u64, 1_000_000));
        assert_eq!(LeftOut(1).to_string(), " (1 line about peers was left out before this one)");
        assert_eq!(LeftOut(3).to_string(), " (3 lines about peers were left out before this one)");
    }
}
