//! Memory for messages past one buffer, shared by all connections: how much of it one connection may take now. Pure.
//!
//! Three rules keep one connection from taking everything, however many messages its peer offers:
//!
//! - The last parts of the memory are for small messages: one eighth is for messages of at most an eighth of all, and half
//!   of that is for messages of at most a 64th. When nothing is in use, a message may take all.
//! - A connection that has some memory gets no more than half of all.
//! - A request that cannot be granted waits in line. When the first in line was passed over [`PATIENCE`] times and needs
//!   nothing but the memory that small messages use, the others wait, too. So a large message is not kept out by a stream of
//!   small ones, and a large one that does not move on keeps no small ones out. A connection that has its half is no first in
//!   line: it waits for itself.

use std::collections::VecDeque;

use crate::id::ConnectionId;

/// What the memory of a region is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Account {
    /// The program's own.
    Program,
    /// A copy of a message that the peer is to fetch.
    Copied,
    /// A message that is being fetched, or was.
    Fetched,
}

/// Grants to others after which the first in line may hold them back.
const PATIENCE: u32 = 16;

/// A message of at most this part of the memory is small.
const SMALL: usize = 64;

/// A message of at most this part of the memory may use what larger ones may not.
const MEDIUM: usize = 8;

#[derive(Debug)]
struct Waiting {
    who: ConnectionId,
    bytes: usize,
    /// Requests of others that were granted meanwhile.
    passed: u32,
    /// The connection would have more than its share.
    over_share: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    used: usize,
    /// The part of `used` that small messages have.
    used_by_small: usize,
    line: VecDeque<Waiting>,
}

impl Budget {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { limit, used: 0, used_by_small: 0, line: VecDeque::new() }
    }

    pub(crate) const fn used(&self) -> usize {
        self.used
    }

    pub(crate) const fn limit(&self) -> usize {
        self.limit
    }

    const fn is_small(&self, bytes: usize) -> bool {
        bytes <= self.limit / SMALL
    }

    /// How much may be in use when a message of this length has its memory.
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

    /// Whether a request would be granted now. `own`: what the connection has already.
    pub(crate) fn would_grant(&self, who: ConnectionId, bytes: usize, own: usize) -> bool {
        let first = self.line.iter().find(|waiting| !waiting.over_share);
        let held_back = first.is_some_and(|first| {
            first.who != who && first.passed >= PATIENCE && self.fits(first.bytes, self.used - self.used_by_small)
        });
        !held_back && !self.is_over_share(bytes, own) && self.fits(bytes, self.used)
    }

    /// Whether a connection that has `own` already would have more than its share.
    const fn is_over_share(&self, bytes: usize, own: usize) -> bool {
        own > 0 && bytes.saturating_add(own) > self.limit / 2
    }

    /// Takes memory, or puts the connection in line.
    pub(crate) fn request(&mut self, who: ConnectionId, bytes: usize, own: usize) -> bool {
        let (granted, over_share) = (self.would_grant(who, bytes, own), self.is_over_share(bytes, own));
        if granted {
            self.used += bytes;
            self.used_by_small += if self.is_small(bytes) { bytes } else { 0 };
            self.leave(who);
            if let Some(first) = self.line.iter_mut().find(|waiting| !waiting.over_share) {
                first.passed = first.passed.saturating_add(1);
            }
        } else if let Some(waiting) = self.line.iter_mut().find(|waiting| waiting.who == who) {
            (waiting.bytes, waiting.over_share) = (bytes, over_share);
        } else {
            self.line.push_back(Waiting { who, bytes, passed: 0, over_share });
        }
        granted
    }

    /// Takes memory if there is some, and does not wait for it.
    pub(crate) fn take(&mut self, who: ConnectionId, bytes: usize, own: usize) -> bool {
        self.would_grant(who, bytes, own) && self.request(who, bytes, own)
    }

    /// A connection wants nothing any more.
    pub(crate) fn leave(&mut self, who: ConnectionId) {
        self.line.retain(|waiting| waiting.who != who);
    }

    /// Gives the memory of one message back.
    pub(crate) fn give_back(&mut self, bytes: usize) {
        debug_assert!(bytes <= self.used, "memory that nobody took comes back");
        self.used = self.used.saturating_sub(bytes);
        if self.is_small(bytes) {
            self.used_by_small = self.used_by_small.saturating_sub(bytes);
        }
    }

    /// The connections in line, first come first.
    pub(crate) fn in_line(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        self.line.iter().map(|waiting| waiting.who)
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

    #[test]
    fn one_connection_does_not_take_everything() {
        let mut budget = Budget::new(256);
        let (greedy, honest) = (id(1), id(2));
        let taken = (0..4).filter(|nth| budget.request(greedy, 64, nth * 64)).count();
        assert_eq!(taken, 2, "half of all");
        assert!(budget.request(honest, 1, 0));
        assert!(budget.request(id(3), 63, 0));
    }

    #[test]
    fn many_connections_leave_room_for_small_messages() {
        let mut budget = Budget::new(256);
        let all: Vec<_> = (0..100).map(id).collect();
        for &who in &all {
            budget.request(who, 64, 0);
        }
        assert_eq!(budget.used(), 192);
        for n in 101..120 {
            budget.request(id(n), 32, 0);
        }
        assert_eq!(budget.used(), 224);
        // However often the large ones are passed over: they wait for each other, not for small ones.
        let small = id(200);
        for _ in 0..1000 {
            assert!(budget.request(small, 4, 0));
            budget.give_back(4);
        }
    }

    #[test]
    fn one_that_has_its_share_holds_nobody_back() {
        let mut budget = Budget::new(256);
        let (greedy, honest) = (id(1), id(2));
        assert!(budget.request(greedy, 64, 0) && budget.request(greedy, 64, 64));
        assert!(!budget.request(greedy, 4, 128));
        for _ in 0..1000 {
            assert!(budget.request(honest, 32, 0));
            budget.give_back(32);
        }
        // When it gives something back, it is the first.
        budget.give_back(64);
        assert!(budget.request(greedy, 4, 64));
    }

    #[test]
    fn a_message_as_large_as_all_memory_gets_its_turn() {
        let mut budget = Budget::new(128);
        let (large, small) = (id(1), [id(2), id(3)]);
        assert!(budget.request(small[0], 1, 0));
        assert!(!budget.request(large, 128, 0));
        let mut rounds = 0;
        while budget.request(small[rounds % 2], 1, 0) {
            budget.give_back(1);
            rounds += 1;
            assert!(rounds < 1000, "it starves");
        }
        budget.give_back(1);
        assert!(budget.request(large, 128, 0));
    }

    proptest! {
        /// Whatever is asked for and given back in whatever order: never more than there is, and every request is granted in
        /// the end if all others give back what they have.
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
                } else if budget.request(who[n], bytes, own[n].iter().sum()) {
                    own[n].push(bytes);
                }
                prop_assert!(budget.used() <= limit);
                prop_assert_eq!(budget.used(), own.iter().flatten().sum::<usize>());
            }
            own.into_iter().flatten().for_each(|bytes| budget.give_back(bytes));
            prop_assert_eq!(budget.used_by_small, 0);
            let line: Vec<_> = budget.line.iter().map(|waiting| (waiting.who, waiting.bytes)).collect();
            for (nth, (next, bytes)) in line.into_iter().enumerate() {
                prop_assert!(budget.request(next, bytes, 0), "{nth} is still in line: {budget:?}");
                budget.give_back(bytes);
            }
        }
    }
}
