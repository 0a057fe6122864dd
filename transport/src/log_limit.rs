//! A rate limit on log lines that peers can cause.
//!
//! Without a limit, a peer that connects as fast as it can, and fails each time, would fill the
//! log. So within `INTERVAL`, a host causes at most one line of each kind and level, and all hosts
//! together cause at most `MAX_LINES` lines. Further lines are left out. The next line that is
//! written contains the number of lines that were left out before it. Lines of a level that is not
//! logged are not counted.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

#[doc(hidden)]
pub use log;
use log::Level;

use crate::newcomers::Host;

/// The length of an interval. After a line is written, no further line with the same host, kind and level is written
/// for this time.
const INTERVAL: Duration = Duration::from_secs(10);

/// The largest number of lines that are written within `INTERVAL`, for all hosts together.
const MAX_LINES: usize = 256;

/// The peer's address for a line that many peers cause together, and that concerns no single peer.
pub const NOBODY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// The kind of a log line about a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Complaint {
    /// The reactor refused a connect request.
    Refused,
    /// A connection was not established.
    NotUp,
    /// A peer violated the protocol.
    Violation,
    /// A connection failed, because memory, the device or the program's callback failed.
    Failed,
    /// A connection does not make progress.
    Stalled,
    /// A connection uses shared memory.
    Carried,
    /// The listener of a provider cannot accept connections for now.
    NotAccepting,
}

/// The host, the kind and the level of a log line. Within `INTERVAL`, only one line with the same
/// key is written.
type LineKey = (Host, Complaint, Level);

/// The lines that were written within the last `INTERVAL`, and the number of lines that were left
/// out since the most recently written line.
#[derive(Debug, Default)]
pub struct LogLimit {
    /// The lines that were written within the last `INTERVAL`, the oldest first.
    lines: VecDeque<(Instant, LineKey)>, // bound: log-lines
    /// The keys of all entries of `lines`, for a fast search.
    recent: BTreeSet<LineKey>, // bound: log-lines
    left_out: u64,
}

impl LogLimit {
    /// Decides if a line about a peer may be written now. If the line may be written, returns the
    /// number of lines that were left out since the previous line: the caller appends this number
    /// to the line. Otherwise counts the line as left out, and returns `None`. The caller,
    /// [`peer_log!`](crate::peer_log), has already checked that `level` is logged.
    pub fn admit(&mut self, kind: Complaint, level: Level, peer: IpAddr, now: Instant) -> Option<LeftOut> {
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

/// Logs a line about a peer if its level is logged and [`LogLimit::admit`] allows it. The arguments
/// are the [`LogLimit`], the time, the [`Complaint`], the level, the peer's address and the text.
///
/// Each line at `error`, `warn` or `info` with the address of a peer or the id of a connection uses
/// this macro: a peer can cause such a line for each of its connections. Other lines use
/// [`local_log!`](crate::local_log). `tests/tests/structure.rs` checks that.
#[doc(hidden)]
#[macro_export]
macro_rules! peer_log {
    ($limit:expr, $now:expr, $kind:expr, $level:expr, $peer:expr, $($text:tt)+) => {
        {
            #[allow(unused_imports, reason = "the level and the kind may be variables")]
            use $crate::log_limit::{Complaint::*, log, log::Level::*};
            if log::log_enabled!($level) {
                if let Some(left_out) = $limit.admit($kind, $level, $peer.ip(), $now) {
                    log::log!($level, "{}{left_out}", format_args!($($text)+));
                }
            }
        }
    };
}

/// Logs a line about the program, the host or its devices, which peers cannot cause repeatedly. It
/// has no address of a peer and no id of a connection.
#[doc(hidden)]
#[macro_export]
macro_rules! local_log {
    ($level:ident, $($text:tt)+) => {{
        use $crate::log_limit::log;
        log::log!(log::Level::$level, $($text)+)
    }};
}

/// The number of lines that were left out before a line that is written. The formatted number is appended to that line;
/// it is an empty string if the number is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut(u64);

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
