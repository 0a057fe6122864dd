//! The memory for messages longer than one buffer, shared by all connections: decides how much of it one connection may
//! use now. This file does no I/O.
//!
//! Four rules keep one peer from using all of it, however many messages it offers:
//!
//! - The last parts of the memory are for small messages: one eighth is for messages of at most an eighth of all, and half of that is for
//!   messages of at most a 64th. When nothing is in use, a message may use all.
//! - A connection that has some memory gets no more than half of all. The same holds for the connections of one host together,
//!   except for messages of at most a 64th of all.
//! - Only the first quarter is granted on trust. Past that a peer must have answered a Read before it gets memory or is queued.
//! - A request that cannot be granted is queued. When the first in the queue was passed over [`PATIENCE`] times and needs nothing but the
//!   memory that small messages use, the others wait, too. So a stream of small messages does not keep a large one out, and a large one
//!   that makes no progress keeps no small ones out. A connection or a host that has its half is never the first in the queue: it waits for
//!   itself.

use std::collections::{BTreeMap, VecDeque};

use rdma_transport::newcomers::Host;

use crate::id::ConnectionId;

/// The account to which the memory of a region is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryUse {
    /// Memory of the program.
    Program,
    /// A copy of a message that the peer will fetch.
    Copied,
    /// A message that is being fetched, or was fetched.
    Fetched,
}

/// The number of grants to others after which the first in the queue may hold them back.
const PATIENCE: u32 = 16;

/// Messages up to `1/SMALL` of the memory count as small.
const SMALL: usize = 64;

/// Messages up to `1/MEDIUM` of the memory may use memory that larger ones may not.
const MEDIUM: usize = 8;

/// `1/TRUST` of the memory is granted to peers that have not answered a Read yet.
const TRUST: usize = 4;

/// A connection that requests memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claimant {
    pub(crate) who: ConnectionId,
    /// The host of its peer; `None` if hosts have no shares.
    pub(crate) host: Option<Host>,
    /// The memory that it has already, in bytes.
    pub(crate) own: usize,
}

#[derive(Debug)]
struct QueuedClaim {
    claimant: Claimant,
    bytes: usize,
    /// The number of requests of others that were granted meanwhile.
    passed: u32,
    /// True if the connection, or its host, would have more than its share.
    over_share: bool,
}

/// The memory that a queued connection lacks because others use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryShortage {
    pub(crate) who: ConnectionId,
    pub(crate) bytes: usize,
    /// The host whose memory must be released, if the host has its share.
    pub(crate) of: Option<Host>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    used: usize,
    /// The part of `used` that small messages use.
    used_by_small: usize,
    /// The memory of messages that are not small, by host; no entry is 0.
    hosts: BTreeMap<Host, usize>,
    line: VecDeque<QueuedClaim>,
}

impl Budget {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { limit, used: 0, used_by_small: 0, hosts: BTreeMap::new(), line: VecDeque::new() }
    }

    pub(crate) const fn used(&self) -> usize {
        self.used
    }

    pub(crate) const fn limit(&self) -> usize {
        self.limit
    }

    /// Returns true for a message of at most a 64th of all memory. Such a message does not count for its host.
    pub(crate) const fn is_small(&self, bytes: usize) -> bool {
        bytes <= self.limit / SMALL
    }

    /// Returns how much may be in use when a message of this length has its memory.
    const fn ceiling(&self, bytes: usize) -> usize {
        if self.is_small(bytes) {
            self.limit
        } else if bytes <= self.limit / MEDIUM {
            self.limit - self.limit / MEDIUM / 2
        } else {
            self.limit - self.limit / MEDIUM
        }
    }

    const fn fits(&self, bytes: usize, beside: usize) -> bool {
        beside + bytes <= self.ceiling(bytes) || (beside == 0 && bytes <= self.limit)
    }

    /// Returns true if a request would be granted now.
    pub(crate) fn would_grant(&self, claimant: Claimant, bytes: usize) -> bool {
        let first = self.line.iter().find(|waiting| !waiting.over_share);
        let held_back = first.is_some_and(|first| {
            first.claimant.who != claimant.who
                && first.passed >= PATIENCE
                && self.fits(first.bytes, self.used - self.used_by_small)
        });
        !held_back && !self.is_over_share(claimant, bytes) && self.fits(bytes, self.used)
    }

    /// Returns true if a request would be granted now to a peer that has not answered a Read.
    pub(crate) fn would_trust(&self, claimant: Claimant, bytes: usize) -> bool {
        self.used.saturating_add(bytes) <= self.limit / TRUST && self.would_grant(claimant, bytes)
    }

    /// Returns true if a claimant with `own` bytes would have more than half.
    const fn is_too_much(&self, bytes: usize, own: usize) -> bool {
        own > 0 && bytes.saturating_add(own) > self.limit / 2
    }

    /// Returns the memory of a host's messages that are not small.
    fn of_host(&self, host: Host) -> usize {
        self.hosts.get(&host).copied().unwrap_or(0)
    }

    fn host_has_too_much(&self, host: Option<Host>, bytes: usize) -> bool {
        let shares = !cfg!(planted = "a-host-without-a-share");
        host.is_some_and(|host| shares && !self.is_small(bytes) && self.is_too_much(bytes, self.of_host(host)))
    }

    fn is_over_share(&self, claimant: Claimant, bytes: usize) -> bool {
        self.is_too_much(bytes, claimant.own) || self.host_has_too_much(claimant.host, bytes)
    }

    /// Grants memory, or queues the connection.
    pub(crate) fn request(&mut self, claimant: Claimant, bytes: usize) -> bool {
        let (granted, over_share) = (self.would_grant(claimant, bytes), self.is_over_share(claimant, bytes));
        if granted {
            self.used += bytes;
            let small = self.is_small(bytes);
            self.used_by_small += if small { bytes } else { 0 };
            if let Some(host) = claimant.host.filter(|_| !small) {
                *self.hosts.entry(host).or_default() += bytes;
            }
            self.leave(claimant.who);
            if let Some(first) = self.line.iter_mut().find(|waiting| !waiting.over_share) {
                first.passed = first.passed.saturating_add(1);
            }
        } else if let Some(waiting) = self.line.iter_mut().find(|waiting| waiting.claimant.who == claimant.who) {
            (waiting.claimant, waiting.bytes, waiting.over_share) = (claimant, bytes, over_share);
        } else {
            self.line.push_back(QueuedClaim { claimant, bytes, passed: 0, over_share });
        }
        granted
    }

    /// Grants memory if there is some, and does not queue the connection.
    pub(crate) fn take(&mut self, claimant: Claimant, bytes: usize) -> bool {
        self.would_grant(claimant, bytes) && self.request(claimant, bytes)
    }

    /// Removes a connection's request.
    pub(crate) fn leave(&mut self, who: ConnectionId) {
        self.line.retain(|waiting| waiting.claimant.who != who);
    }

    /// Returns the memory of one message to the budget.
    pub(crate) fn give_back(&mut self, bytes: usize) {
        debug_assert!(bytes <= self.used, "memory is released that was not in use");
        self.used = self.used.saturating_sub(bytes);
        if self.is_small(bytes) {
            self.used_by_small = self.used_by_small.saturating_sub(bytes);
        }
    }

    /// Reduces the memory of a host's messages that are not small: it was released, or its connection has ended.
    pub(crate) fn relieve(&mut self, host: Host, bytes: usize) {
        if let Some(of_host) = self.hosts.get_mut(&host) {
            *of_host = of_host.saturating_sub(bytes);
            if *of_host == 0 {
                self.hosts.remove(&host);
            }
        }
    }

    /// Returns the shortages of the first queued connection that waits for others, and of the first one of each host that has its share.
    pub(crate) fn shortages(&self) -> Vec<MemoryShortage> {
        let mut first = Vec::<MemoryShortage>::new();
        for shortage in self.line.iter().filter_map(|waiting| self.shortage(waiting)) {
            if first.iter().all(|other| other.of != shortage.of) {
                first.push(shortage);
            }
        }
        first
    }

    fn shortage(&self, waiting: &QueuedClaim) -> Option<MemoryShortage> {
        let (Claimant { who, host, own }, bytes) = (waiting.claimant, waiting.bytes);
        if self.is_too_much(bytes, own) {
            return None;
        }
        // A request that exceeds its share beside others waits until these have nothing.
        let beyond = |used: usize, most: usize| if bytes > most { used } else { (used + bytes).saturating_sub(most) };
        let missing = if self.fits(bytes, self.used) { 0 } else { beyond(self.used, self.ceiling(bytes)) };
        let of = host.filter(|_| self.host_has_too_much(host, bytes));
        let of_host = of.map_or(0, |host| beyond(self.of_host(host), self.limit / 2));
        let bytes = missing.max(of_host);
        (bytes > 0).then_some(MemoryShortage { who, bytes, of })
    }

    /// Returns the queued connections in order of arrival.
    pub(crate) fn in_line(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        self.line.iter().map(|waiting| waiting.claimant.who)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ReactorTag;
    use proptest::prelude::*;

    fn id(n: u32) -> ConnectionId {
        ConnectionId::new(ReactorTag::next(), n, 1)
    }

    /// Returns a claimant whose host has no other connection.
    fn alone(who: ConnectionId, own: usize) -> Claimant {
        Claimant { who, host: None, own }
    }

    /// Returns a claimant of a host that has no memory yet.
    fn of(n: u32, host: u8) -> Claimant {
        Claimant { who: id(n), host: Some(Host::of([192, 0, 2, host].into())), own: 0 }
    }

    #[test]
    fn the_connections_of_a_host_share_one_half() {
        let mut budget = Budget::new(256);
        assert_eq!((1..9).filter(|&n| budget.request(of(n, 1), 64)).count(), 2, "half of all");
        assert!(budget.request(of(9, 1), 4), "a small one does not count");
        // Another host is not kept waiting, however long those have been queued.
        for _ in 0..100 {
            assert!(budget.request(of(10, 2), 32));
            budget.give_back(32);
            budget.relieve(of(10, 2).host.unwrap(), 32);
        }
        assert!(budget.hosts.len() == 1, "{:?}", budget.hosts);
    }

    #[test]
    fn the_first_quarter_is_given_on_trust() {
        let mut budget = Budget::new(256);
        assert!(budget.would_trust(of(1, 1), 64) && !budget.would_trust(of(1, 1), 65));
        assert!(budget.request(of(1, 1), 64));
        assert!(!budget.would_trust(of(2, 2), 1) && budget.would_grant(of(2, 2), 64));
    }

    #[test]
    fn a_shortage_names_what_would_help() {
        let mut budget = Budget::new(256);
        assert!(budget.request(of(1, 1), 64) && budget.request(of(2, 1), 64) && budget.shortages().is_empty());
        let (third, other) = (of(3, 1), of(4, 2));
        assert!(!budget.request(third, 64));
        let of_its_host = MemoryShortage { who: third.who, bytes: 64, of: third.host };
        assert_eq!(budget.shortages(), [of_its_host]);
        assert!(budget.request(of(5, 3), 64) && !budget.request(other, 64));
        let behind = [of(6, 4), of(7, 1)];
        assert!(behind.iter().all(|&claimant| !budget.request(claimant, 64)));
        let of_all = MemoryShortage { who: other.who, bytes: 32, of: None };
        assert_eq!(budget.shortages(), [of_its_host, of_all], "a host that has its share hides no request behind it");
        behind.iter().chain([&third]).for_each(|claimant| budget.leave(claimant.who));
        assert_eq!(budget.shortages(), [of_all]);
        // A connection that waits for its own memory reports no shortage.
        budget.leave(other.who);
        assert!(!budget.request(Claimant { own: 128, ..other }, 64));
        assert_eq!(budget.shortages(), []);
    }

    #[test]
    fn one_connection_does_not_take_everything() {
        let mut budget = Budget::new(256);
        let (greedy, honest) = (id(1), id(2));
        let taken = (0..4).filter(|nth| budget.request(alone(greedy, nth * 64), 64)).count();
        assert_eq!(taken, 2, "half of all");
        assert!(budget.request(alone(honest, 0), 1));
        assert!(budget.request(alone(id(3), 0), 63));
    }

    #[test]
    fn many_connections_leave_room_for_small_messages() {
        let mut budget = Budget::new(256);
        let all: Vec<_> = (0..100).map(id).collect();
        for &who in &all {
            budget.request(alone(who, 0), 64);
        }
        assert_eq!(budget.used(), 192);
        for n in 101..120 {
            budget.request(alone(id(n), 0), 32);
        }
        assert_eq!(budget.used(), 224);
        // However often the large ones are passed over: they wait for each other, not for small ones.
        let small = id(200);
        for _ in 0..1000 {
            assert!(budget.request(alone(small, 0), 4));
            budget.give_back(4);
        }
    }

    #[test]
    fn one_that_has_its_share_holds_nobody_back() {
        let mut budget = Budget::new(256);
        let (greedy, honest) = (id(1), id(2));
        assert!(budget.request(alone(greedy, 0), 64) && budget.request(alone(greedy, 64), 64));
        assert!(!budget.request(alone(greedy, 128), 4));
        for _ in 0..1000 {
            assert!(budget.request(alone(honest, 0), 32));
            budget.give_back(32);
        }
        // When it releases some of its memory, it is the first.
        budget.give_back(64);
        assert!(budget.request(alone(greedy, 64), 4));
    }

    #[test]
    fn a_message_as_large_as_all_memory_gets_its_turn() {
        let mut budget = Budget::new(128);
        let (large, small) = (id(1), [id(2), id(3)]);
        assert!(budget.request(alone(small[0], 0), 1));
        assert!(!budget.request(alone(large, 0), 128));
        let mut rounds = 0;
        while budget.request(alone(small[rounds % 2], 0), 1) {
            budget.give_back(1);
            rounds += 1;
            assert!(rounds < 1000, "it starves");
        }
        budget.give_back(1);
        assert!(budget.request(alone(large, 0), 128));
    }

    proptest! {
        /// For any order of requests and releases: the memory in use never exceeds the limit, and every request is granted eventually if
        /// all others release their memory.
        #[test]
        fn never_too_much_and_nobody_for_ever(
            limit in 1_usize..1000,
            steps in proptest::collection::vec((0_usize..6, 1_usize..1000, any::<bool>()), 1..300),
        ) {
            let mut budget = Budget::new(limit);
            let who: Vec<_> = (0..6).map(|n| id(n as u32)).collect();
            let mut own: [Vec<usize>; 6] = Default::default();
            for (n, bytes, gives) in steps {
                let bytes = bytes.min(limit);
                if gives {
                    own[n].drain(..).for_each(|bytes| budget.give_back(bytes));
                } else if budget.request(alone(who[n], own[n].iter().sum()), bytes) {
                    own[n].push(bytes);
                }
                prop_assert!(budget.used() <= limit);
                prop_assert_eq!(budget.used(), own.iter().flatten().sum::<usize>());
            }
            own.into_iter().flatten().for_each(|bytes| budget.give_back(bytes));
            prop_assert_eq!(budget.used_by_small, 0);
            let line: Vec<_> = budget.line.iter().map(|waiting| (waiting.claimant.who, waiting.bytes)).collect();
            for (nth, (next, bytes)) in line.into_iter().enumerate() {
                prop_assert!(budget.request(alone(next, 0), bytes), "{nth} is still queued: {budget:?}");
                budget.give_back(bytes);
            }
        }
    }
}
