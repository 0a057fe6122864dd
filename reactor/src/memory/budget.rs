//! Divides the memory for messages that are longer than one buffer among all connections. Decides for each request if
//! the connection gets memory now, or waits in a queue. This file does no I/O.
//!
//! Four rules keep one peer from using all of the memory, however many messages it offers:
//!
//! - The last parts of the memory are reserved for shorter messages. The last eighth is for messages of at most an eighth of all memory,
//!   and the last sixteenth is for *small* messages, of at most a 64th. As an exception, a message may use all memory if no other message
//!   uses any memory.
//! - A connection that already has memory gets at most half of all memory in total: this is its *share*. All connections of one host
//!   together have a share of the same size. Small messages do not count towards the share of the host.
//! - A peer that has not answered an RDMA Read recently (in the last 2 s) gets memory only while at most a quarter of all memory is in use.
//!   Beyond this quarter, such a peer neither gets memory nor is queued. The caller applies this rule, with [`Budget::would_trust`].
//! - A request that cannot be granted waits in a queue. When [`PATIENCE`] other requests were granted while a request was the first in the
//!   queue, this first request holds back all others, so that a stream of small messages does not delay a large one for ever. But large
//!   messages that make no progress must not block small ones. So the first request holds back the others only if it could be granted once
//!   all small messages had released their memory. For this rule, requests that exceed the share of their connection or host do not count
//!   as first: these requests wait until the same connection or host releases memory.

use std::collections::{BTreeMap, VecDeque};

use rdma_transport::newcomers::Host;

use crate::id::ConnectionId;

/// The purpose of a region's memory. The reactor has one [`Budget`] for `Copied` and another one for `Fetched`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryUse {
    /// Memory of the program, or a few bytes for the reactor's own Reads. This memory counts towards no budget.
    Program,
    /// A copy of a message to send. The peer will fetch the message from this copy.
    Copied,
    /// Memory for a received message that the reactor is fetching or has fetched.
    Fetched,
}

/// When this many requests of other connections were granted while a request was the first in the queue, the first
/// request may hold back all other requests.
const PATIENCE: u32 = 16;

/// Messages of at most `1/SMALL` of the memory count as small.
const SMALL: usize = 64;

/// The last `1/MEDIUM` of the memory is reserved for messages of at most `1/MEDIUM` of the memory.
const MEDIUM: usize = 8;

/// Peers that have not answered an RDMA Read recently get memory only while at most `1/TRUST` of all memory is in use.
const TRUST: usize = 4;

/// A connection that requests memory for a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claimant {
    pub(crate) who: ConnectionId,
    /// The host of the connection's peer; `None` if this budget does not limit hosts.
    pub(crate) host: Option<Host>,
    /// The memory that the connection has already, in bytes.
    pub(crate) own: usize,
}

#[derive(Debug)]
struct QueuedClaim {
    claimant: Claimant,
    bytes: usize,
    /// The number of requests of other connections that were granted while this request was the first in the queue.
    passed: u32,
    /// True if the connection or its host would exceed its share with this request.
    over_share: bool,
}

/// The memory that a queued request lacks, because other messages use it: the connection `who` waits until `bytes`
/// bytes are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryShortage {
    pub(crate) who: ConnectionId,
    pub(crate) bytes: usize,
    /// The host whose connections must release memory, if the host has used up its share. `None` if any connection can
    /// release the memory.
    pub(crate) of: Option<Host>,
}

/// The budget of the memory for one [`MemoryUse`]; see the [module](self).
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    used: usize,
    /// The part of `used` that small messages use, in bytes.
    used_by_small: usize,
    /// The sum of the lengths of the messages that are not small ([`Budget::is_small`]), in bytes,
    /// by host. A host without such messages has no entry.
    hosts: BTreeMap<Host, usize>, // bound: connections, large-messages
    line: VecDeque<QueuedClaim>, // bound: connections
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

    /// Returns the length of the longest small message: a 64th of all memory. Small messages do not
    /// count towards the share of their host.
    pub(crate) const fn small(&self) -> usize {
        self.limit / SMALL
    }

    /// Returns true if a message is small.
    pub(crate) const fn is_small(&self, bytes: usize) -> bool {
        bytes <= self.small()
    }

    /// Returns the largest number of bytes that may be in use after memory for a message of `bytes` bytes is granted.
    /// This limit is higher for shorter messages.
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

    /// Returns true if the request of a connection for `bytes` would be granted now.
    pub(crate) fn would_grant(&self, claimant: Claimant, bytes: usize) -> bool {
        let first = self.line.iter().find(|waiting| !waiting.over_share);
        let held_back = first.is_some_and(|first| {
            first.claimant.who != claimant.who
                && first.passed >= PATIENCE
                && self.fits(first.bytes, self.used - self.used_by_small)
        });
        !held_back && !self.is_over_share(claimant, bytes) && self.fits(bytes, self.used)
    }

    /// Returns true if the request of a connection for `bytes` would be granted now although its peer has not answered
    /// an RDMA Read recently.
    pub(crate) fn would_trust(&self, claimant: Claimant, bytes: usize) -> bool {
        self.used.saturating_add(bytes) <= self.limit / TRUST && self.would_grant(claimant, bytes)
    }

    /// Returns true if a connection or host that has `own` bytes would have more than half of all memory with `bytes`
    /// bytes more. Returns false if `own` is 0.
    const fn is_too_much(&self, bytes: usize, own: usize) -> bool {
        own > 0 && bytes.saturating_add(own) > self.limit / 2
    }

    /// Returns the sum of the lengths of a host's messages that are not small, in bytes.
    fn of_host(&self, host: Host) -> usize {
        self.hosts.get(&host).copied().unwrap_or(0)
    }

    fn host_has_too_much(&self, host: Option<Host>, bytes: usize) -> bool {
        let shares = !crate::planted("a-host-without-a-share");
        host.is_some_and(|host| shares && !self.is_small(bytes) && self.is_too_much(bytes, self.of_host(host)))
    }

    fn is_over_share(&self, claimant: Claimant, bytes: usize) -> bool {
        self.is_too_much(bytes, claimant.own) || self.host_has_too_much(claimant.host, bytes)
    }

    /// Requests memory for a message. Returns true if the memory is granted; the caller then calls [`Budget::leave`].
    /// Otherwise queues the request and returns false. If a request of the connection is queued already, replaces it.
    pub(crate) fn request(&mut self, claimant: Claimant, bytes: usize) -> bool {
        let (granted, over_share) = (self.would_grant(claimant, bytes), self.is_over_share(claimant, bytes));
        if granted {
            self.grant(claimant, bytes);
        } else if let Some(waiting) = self.line.iter_mut().find(|waiting| waiting.claimant.who == claimant.who) {
            (waiting.claimant, waiting.bytes, waiting.over_share) = (claimant, bytes, over_share);
        } else {
            self.line.push_back(QueuedClaim { claimant, bytes, passed: 0, over_share });
        }
        granted
    }

    /// Requests memory for a message like [`Budget::request`], but does not queue a request that
    /// cannot be granted. A request of the connection that is queued already is for another
    /// message, and keeps its position in the queue. Returns true if the memory is granted.
    pub(crate) fn take(&mut self, claimant: Claimant, bytes: usize) -> bool {
        let granted = self.would_grant(claimant, bytes);
        if granted {
            self.grant(claimant, bytes);
            if let Some(at) = self.line.iter().position(|waiting| waiting.claimant.who == claimant.who) {
                // With this memory, the queued request may exceed the share of the connection or host.
                let claimant = Claimant { own: claimant.own + bytes, ..claimant };
                let over_share = self.is_over_share(claimant, self.line[at].bytes);
                (self.line[at].claimant, self.line[at].over_share) = (claimant, over_share);
            }
        }
        granted
    }

    /// Counts memory for a message as used, because the request of a connection is granted.
    fn grant(&mut self, claimant: Claimant, bytes: usize) {
        self.used += bytes;
        let small = self.is_small(bytes);
        self.used_by_small += if small { bytes } else { 0 };
        if let Some(host) = claimant.host.filter(|_| !small) {
            *self.hosts.entry(host).or_default() += bytes;
        }
        let first = self.line.iter_mut().find(|waiting| !waiting.over_share);
        if let Some(first) = first.filter(|first| first.claimant.who != claimant.who) {
            first.passed = first.passed.saturating_add(1);
        }
    }

    /// Removes the queued request of a connection, if there is one. Returns true if this request
    /// may have held back others. In that case, the caller must repeat the other queued requests:
    /// they may be granted now, and perhaps no release of memory will cause a repetition.
    pub(crate) fn leave(&mut self, who: ConnectionId) -> bool {
        let at = self.line.iter().position(|waiting| waiting.claimant.who == who);
        at.and_then(|at| self.line.remove(at)).is_some_and(|left| left.passed >= PATIENCE)
    }

    /// Returns the memory of one message to the budget. `bytes` must be the length that was granted.
    pub(crate) fn give_back(&mut self, bytes: usize) {
        debug_assert!(bytes <= self.used, "memory is released that was not in use");
        self.used = self.used.saturating_sub(bytes);
        if self.is_small(bytes) {
            self.used_by_small = self.used_by_small.saturating_sub(bytes);
        }
    }

    /// Subtracts `bytes` from the memory that is charged to a host. The caller does this when a
    /// message that is not small ([`Budget::is_small`]) was released, or when a connection with
    /// such messages has ended.
    pub(crate) fn relieve(&mut self, host: Host, bytes: usize) {
        if let Some(of_host) = self.hosts.get_mut(&host) {
            *of_host = of_host.saturating_sub(bytes);
            if *of_host == 0 {
                self.hosts.remove(&host);
            }
        }
    }

    /// Returns the shortages that delay the queue, in the order of the queue: the shortage of the
    /// first request that exceeds no share, and, for each host that has used up its share, the
    /// shortage of its first request.
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
        // A request for more than `most` bytes can be granted only when no other memory is in use. So the shortage is
        // all memory in use.
        let beyond = |used: usize, most: usize| if bytes > most { used } else { (used + bytes).saturating_sub(most) };
        let missing = if self.fits(bytes, self.used) { 0 } else { beyond(self.used, self.ceiling(bytes)) };
        let of = host.filter(|_| self.host_has_too_much(host, bytes));
        let of_host = of.map_or(0, |host| beyond(self.of_host(host), self.limit / 2));
        let bytes = missing.max(of_host);
        (bytes > 0).then_some(MemoryShortage { who, bytes, of })
    }

    /// Returns the ids of the queued connections, in the order in which they were queued.
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

    /// Returns a claimant to which no limit of a host applies.
    fn alone(who: ConnectionId, own: usize) -> Claimant {
        Claimant { who, host: None, own }
    }

    /// Returns a claimant with the id `n`. Its peer is on the host with the number `host`, and it has no memory yet.
    fn of(n: u32, host: u8) -> Claimant {
        Claimant { who: id(n), host: Some(Host::of([192, 0, 2, host].into())), own: 0 }
    }

    #[test]
    fn the_connections_of_a_host_share_one_half() {
        let mut budget = Budget::new(256);
        assert_eq!((1..9).filter(|&n| budget.request(of(n, 1), 64)).count(), 2, "half of all");
        assert!(budget.request(of(9, 1), 4), "a small one does not count");
        // The queued requests of host 1 do not delay the requests of host 2.
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
        behind.iter().chain([&third]).for_each(|claimant| assert!(!budget.leave(claimant.who)));
        assert_eq!(budget.shortages(), [of_all]);
        // A connection that exceeds its own share must release memory itself, so its request counts as no shortage.
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
        // The large messages use 224 of the 256 bytes. Even if all small messages released their memory, the first
        // queued request (64 bytes) could not be granted. So it does not hold back this small request.
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
        // When the greedy connection has released memory, its request is granted.
        budget.give_back(64);
        assert!(budget.request(alone(greedy, 64), 4));
    }

    /// Two requests are queued: a large one, for which 16 others were granted, and a small one behind it, which only
    /// the large one holds back. When the large request leaves the queue, the small one can be granted.
    #[test]
    fn the_end_of_a_request_that_holds_others_back_is_told() {
        let mut budget = Budget::new(256);
        let [busy, large, small] = [id(1), id(2), id(3)];
        assert!(budget.request(alone(busy, 0), 1) && !budget.request(alone(large, 0), 256));
        for _ in 0..PATIENCE {
            assert!(budget.request(alone(busy, 1), 1));
            budget.give_back(1);
        }
        assert!(!budget.request(alone(small, 0), 1) && !budget.request(alone(busy, 1), 1));
        assert!(!budget.leave(busy), "it held nobody back");
        assert!(budget.leave(large) && !budget.leave(large));
        assert_eq!(budget.in_line().collect::<Vec<_>>(), [small]);
        assert!(budget.request(alone(small, 0), 1));
    }

    /// A connection has a queued request for a message that it will fetch. It gets memory for
    /// another message, which has arrived already. The queued request keeps its position in the
    /// queue, and its count of other requests that were granted meanwhile.
    #[test]
    fn what_is_taken_keeps_the_place_of_what_is_queued() {
        let mut budget = Budget::new(256);
        let [busy, first, second] = [id(1), id(2), id(3)];
        assert!(budget.request(alone(busy, 0), 64) && budget.request(alone(busy, 64), 64));
        assert!(!budget.request(alone(first, 0), 120) && !budget.request(alone(second, 0), 120));
        for nth in 0..PATIENCE {
            assert_eq!(budget.line[0].passed, nth);
            assert!(budget.take(alone(first, 0), 4));
            budget.give_back(4);
            assert!(budget.request(alone(id(4), 0), 4));
            budget.give_back(4);
        }
        assert_eq!(budget.in_line().collect::<Vec<_>>(), [first, second]);
        // With a longer message, the queued request exceeds the share of the connection, so it holds nobody back.
        assert!(!budget.line[0].over_share && budget.take(alone(first, 0), 32));
        assert!(budget.line[0].over_share);
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
        /// In any order of requests and releases, the memory in use never exceeds the limit. When all memory is released, every queued
        /// request can be granted in turn.
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
                    budget.leave(who[n]);
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
                budget.leave(next);
                budget.give_back(bytes);
            }
        }
    }
}
