//! The limits on the unanswered requests of peers, their shares for connections and hosts, and the
//! counters of calls.

use std::time::Duration;

use crate::transport::newcomers::Host;
use crate::transport::shares::Hosts;
use crate::transport::slab::Key;

/// The limits of the calls of a reactor. If a request of a peer would exceed a limit, the peer's call fails with
/// [`super::CallError::Overloaded`], and the payload of the request is not copied. If an answer
/// would exceed a limit, [`super::Calls::answer`] returns [`super::AnswerError::Overloaded`].
///
/// The limits `requests` and `bytes` apply to a sum: the load of a connection, plus the load of its
/// host, plus the load of all connections. The load is the number of unanswered requests, or of
/// their bytes. So one connection alone gets a third of a limit, and one host gets less than half.
/// Even if other connections use as much as they can, a new connection can still hold at least
/// about a third of the load that each of them holds. A host is an IPv4 address, or the IPv6
/// addresses with the same first 64 bits.
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
    /// The longest time that a peer's request may wait for its answer. A longer deadline of a peer
    /// is shortened to this time, counted from the arrival of the request. An answer that still
    /// waits for room at the deadline is not sent. Default: 5 minutes.
    pub longest: Duration,
}

impl Default for CallLimits {
    fn default() -> Self {
        Self {
            requests_per_connection: 1 << 10,
            bytes_per_connection: 8 << 20,
            requests: 1 << 13,
            bytes: 64 << 20,
            calls_per_connection: 1 << 10,
            longest: Duration::from_secs(300),
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
    /// The number of answers that were not sent because one of the [`CallLimits`] was reached.
    pub answers_dropped: u64,
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

/// The unanswered requests and waiting answers of all connections, in total and by host.
#[derive(Debug, Default)]
pub(super) struct HeldRequests {
    all: Load,
    hosts: Hosts<Load>, // bound: connections
}

impl HeldRequests {
    /// Adds a connection of `host`, or of an unknown host if `host` is `None`. Returns the key of
    /// the host.
    pub(super) fn open(&mut self, host: Option<Host>) -> Key {
        self.hosts.open(host)
    }

    /// Removes a connection, whose load is `held`.
    pub(super) fn close(&mut self, key: Key, held: &Load) {
        self.all.remove_all(held);
        if let Some(load) = self.hosts.load_mut(key) {
            load.remove_all(held);
        }
        self.hosts.close(key);
    }

    fn of_host(&self, key: Key) -> Load {
        self.hosts.load(key).copied().unwrap_or_default()
    }

    /// Returns true if a connection of the host `key` may hold one more request, of `bytes` bytes.
    /// `own` is the load of the connection.
    #[inline]
    pub(super) fn has_room(&self, key: Key, own: &Load, bytes: usize, limits: &CallLimits) -> bool {
        let host = self.of_host(key);
        own.has_room(bytes, limits.requests_per_connection, limits.bytes_per_connection)
            && own.count + host.count + self.all.count < limits.requests
            && (own.bytes + host.bytes + self.all.bytes).saturating_add(bytes) <= limits.bytes
    }

    /// Returns true if a connection of the host `key` may hold `bytes` more bytes, with an
    /// unchanged number of requests. `own` is the load of the connection.
    #[inline]
    pub(super) fn has_room_for_bytes(&self, key: Key, own: &Load, bytes: usize, limits: &CallLimits) -> bool {
        own.bytes.saturating_add(bytes) <= limits.bytes_per_connection
            && (own.bytes + self.of_host(key).bytes + self.all.bytes).saturating_add(bytes) <= limits.bytes
    }

    #[inline]
    pub(super) fn add(&mut self, key: Key, bytes: usize) {
        self.all.add(bytes);
        if let Some(host) = self.hosts.load_mut(key) {
            host.add(bytes);
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, key: Key, bytes: usize) {
        self.all.remove(bytes);
        if let Some(host) = self.hosts.load_mut(key) {
            host.remove(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of the connections: for each, the key of its host and its load.
    struct Model {
        held: HeldRequests,
        connections: Vec<(Key, Load)>,
        limits: CallLimits,
    }

    impl Model {
        fn new(limits: CallLimits) -> Self {
            Self { held: HeldRequests::default(), connections: Vec::new(), limits }
        }

        /// Opens connections of the host with this number.
        fn open(&mut self, host: u8, connections: usize) {
            for _ in 0..connections {
                let key = self.held.open(Some(Host::of([192, 0, 2, host].into())));
                self.connections.push((key, Load::default()));
            }
        }

        /// Admits requests of `bytes` bytes on all connections in turn, until all are refused.
        /// Returns the number of requests of each connection.
        fn fill(&mut self, bytes: usize) -> Vec<usize> {
            let mut progress = true;
            while std::mem::take(&mut progress) {
                for (key, own) in &mut self.connections {
                    if self.held.has_room(*key, own, bytes, &self.limits) {
                        own.add(bytes);
                        self.held.add(*key, bytes);
                        progress = true;
                    }
                }
            }
            self.connections.iter().map(|(_, own)| own.count).collect()
        }
    }

    fn limits() -> CallLimits {
        let (requests_per_connection, bytes_per_connection) = (usize::MAX, usize::MAX);
        CallLimits { requests_per_connection, bytes_per_connection, ..CallLimits::default() }
    }

    #[test]
    fn hoarders_leave_others_a_part_of_what_each_of_them_has() {
        for (hosts, each) in [(1, 1), (1, 10), (3, 10), (20, 2)] {
            // With requests of 0 bytes, the number of requests reaches its limit. With requests of
            // 64 KiB, the sum of their bytes does.
            for bytes in [0, 1 << 16] {
                let mut model = Model::new(limits());
                (1..=hosts).for_each(|host| model.open(host, each));
                let hoarded = model.fill(bytes);
                let (least, most) = (hoarded.iter().min().copied(), hoarded.iter().max().copied());
                assert!(
                    least.is_some_and(|least| least > 0 && Some(least + 1) >= most),
                    "{hosts} x {each}: {hoarded:?}"
                );
                // A new connection, of a host that hoards or of another host, gets at least a
                // quarter of the smallest number in `hoarded`.
                for host in [1, 100] {
                    model.open(host, 1);
                    let got = model.fill(bytes).pop().unwrap_or(0);
                    assert!(
                        Some(4 * got) >= least,
                        "{hosts} x {each}, {bytes} bytes: {got} of host {host}, {hoarded:?}"
                    );
                    let (key, own) = model.connections.pop().expect("just opened");
                    model.held.close(key, &own);
                }
            }
        }
    }

    #[test]
    fn a_connection_alone_has_its_own_limit_by_default() {
        let limits = CallLimits::default();
        for (bytes, most) in [(0, limits.requests_per_connection), (1 << 20, limits.bytes_per_connection >> 20)] {
            let mut model = Model::new(limits);
            model.open(1, 1);
            assert_eq!(model.fill(bytes), [most]);
        }
    }

    #[test]
    fn what_ends_is_free_again() {
        let mut model = Model::new(limits());
        model.open(1, 2);
        let before = model.fill(1000);
        for (key, own) in std::mem::take(&mut model.connections) {
            model.held.close(key, &own);
        }
        assert!(model.held.hosts.is_empty());
        assert_eq!((model.held.all.count, model.held.all.bytes), (0, 0));
        model.open(2, 2);
        assert_eq!(model.fill(1000), before);
    }
}
