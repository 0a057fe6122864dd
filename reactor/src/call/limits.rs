//! The bounds of what a peer may make this side keep, and what is counted.

/// The limits of the calls of a reactor. A request past one of them is answered with [`super::CallError::Overloaded`] before its payload is
/// copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Largest number of requests of a connection that are not answered; an answer that waits for room counts, too. Default: 1,024.
    pub requests_per_connection: usize,
    /// Largest number of bytes of their payloads, and of the answers that wait for room. Default: 8 MiB.
    pub bytes_per_connection: usize,
    /// Largest number of requests of all connections that are not answered. Default: 8,192.
    pub requests: usize,
    /// Largest number of bytes of all connections. Default: 64 MiB.
    pub bytes: usize,
    /// Largest number of calls that this side has in flight on a connection. Their payloads may wait for room, up to
    /// `bytes_per_connection`. Default: 1,024.
    pub calls_per_connection: usize,
}

impl Default for Limits {
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

/// What has become of calls and requests so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallStats {
    /// Requests that were passed on to the program.
    pub admitted: u64,
    /// Requests that were refused at one of the [`Limits`].
    pub overloaded: u64,
    /// Requests that were dropped because their time was over when they arrived.
    pub expired: u64,
    /// Refusals that were not sent, because 1,024 of them waited for room on their connection. Their callers wait until the deadline.
    pub refusals_dropped: u64,
    /// Answers that match no call in flight: that came late, or twice.
    pub unmatched: u64,
    /// Calls that have ended at their deadlines.
    pub deadlines: u64,
}

/// A number of things, with a number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) count: usize,
    pub(super) bytes: usize,
}

impl Load {
    /// Returns true if another one fits within the limits.
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
