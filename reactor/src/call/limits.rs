//! The limits on the unanswered requests of peers, and the counters of calls.

/// The limits of the calls of a reactor. If a request of a peer would exceed a limit, the peer's call fails with
/// [`super::CallError::Overloaded`], and the payload of the request is not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallLimits {
    /// The largest number of unanswered requests of one connection. Answers that wait for room count as unanswered requests. Default:
    /// 1,024.
    pub requests_per_connection: usize,
    /// The largest sum of the bytes of the payloads of one connection's unanswered requests and waiting answers. Default: 8 MiB.
    pub bytes_per_connection: usize,
    /// The largest number of unanswered requests of all connections together. Answers that wait for room count as unanswered requests.
    /// Default: 8,192.
    pub requests: usize,
    /// The largest sum of the bytes of the payloads of all unanswered requests and waiting answers of all connections. Default: 64 MiB.
    pub bytes: usize,
    /// The largest number of calls of the local side that are in flight on one connection. Calls whose requests wait for room are included.
    /// The payloads of these waiting requests may have at most `bytes_per_connection` bytes in total. Default: 1,024.
    pub calls_per_connection: usize,
}

impl Default for CallLimits {
    fn default() -> Self {
        Self {
            requests_per_connection: 1 << 10,
            bytes_per_connection: 8 << 20,
            requests: 1 << 13,
            bytes: 64 << 20,
            calls_per_connection: 1 << 10,
        }
    }
}

/// The counters of calls and requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallStats {
    /// The number of requests that were delivered to the program.
    pub admitted: u64,
    /// The number of requests that were refused because one of the [`CallLimits`] was reached.
    pub overloaded: u64,
    /// The number of requests that were dropped because their deadlines had passed when they arrived.
    pub expired: u64,
    /// The number of refusals that were not sent, because 1,024 refusals already waited for room on the connection. The callers of the
    /// refused requests wait until their deadlines.
    pub refusals_dropped: u64,
    /// The number of answers that match no call in flight, because they arrived after the call had ended, or because the peer sent them
    /// twice.
    pub unmatched: u64,
    /// The number of calls that ended at their deadlines without an answer.
    pub deadlines: u64,
}

/// A number of requests or frames, and the sum of the bytes of their payloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) count: usize,
    pub(super) bytes: usize,
}

impl Load {
    /// Returns true if one more item, with a payload of `bytes` bytes, stays within both limits: `most` items, and `most_bytes` bytes.
    #[inline]
    pub(super) const fn has_room(&self, bytes: usize, most: usize, most_bytes: usize) -> bool {
        self.count < most && self.bytes.saturating_add(bytes) <= most_bytes
    }

    #[inline]
    pub(super) const fn add(&mut self, bytes: usize) {
        self.count += 1;
        self.bytes += bytes;
    }

    #[inline]
    pub(super) const fn remove(&mut self, bytes: usize) {
        self.count -= 1;
        self.bytes -= bytes;
    }

    pub(super) const fn remove_all(&mut self, other: &Self) {
        self.count -= other.count;
        self.bytes -= other.bytes;
    }
}
