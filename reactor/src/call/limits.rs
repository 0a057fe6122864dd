//! The limits on the requests that a peer may make the local side hold, and the counters of calls.

/// The limits of the calls of a reactor. A request past one of them is answered with [`super::CallError::Overloaded`] before its payload
/// is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallLimits {
    /// Largest number of unanswered requests of a connection. Queued answers count as requests. Default: 1,024.
    pub requests_per_connection: usize,
    /// Largest number of bytes of the payloads of these requests and answers. Default: 8 MiB.
    pub bytes_per_connection: usize,
    /// Largest number of unanswered requests of all connections, with queued answers. Default: 8,192.
    pub requests: usize,
    /// Largest number of bytes of their payloads. Default: 64 MiB.
    pub bytes: usize,
    /// Largest number of calls of the local side that are in flight on a connection. Those that have no room are queued, up to
    /// `bytes_per_connection`. Default: 1,024.
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
    /// Requests that were delivered to the program.
    pub admitted: u64,
    /// Requests that were refused because one of the [`CallLimits`] was reached.
    pub overloaded: u64,
    /// Requests that were dropped because their time was over on arrival.
    pub expired: u64,
    /// Refusals that were not sent because 1,024 of them were queued on their connection. Their callers wait until the deadline.
    pub refusals_dropped: u64,
    /// Answers that match no call in flight: late or repeated ones.
    pub unmatched: u64,
    /// Calls that ended at their deadlines.
    pub deadlines: u64,
}

/// A number of requests or frames, and the number of their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) count: usize,
    pub(super) bytes: usize,
}

impl Load {
    /// Returns true if another one of `bytes` fits within the limits.
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
