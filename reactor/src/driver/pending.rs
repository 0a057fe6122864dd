//! Connections that were accepted and are not up yet. Their number is limited. If all slots are used, this file chooses the connection that
//! is evicted when a new one arrives.
//!
//! The connection of an honest peer is up within milliseconds. If a connection takes much longer, its peer most likely only wants to occupy
//! the slot. The host with the most connections loses its oldest one first.

use std::time::{Duration, Instant};

use rdma_transport::newcomers::{Host, NewcomerEntry, Newcomers, Ticket};

use crate::id::ConnectionId;

/// A connection that is younger than this is evicted only if its host uses more slots than the host
/// of the new connection.
const GRACE: Duration = Duration::from_millis(100);

/// The slot that a connection uses while it is not up.
#[derive(Clone, Copy, Debug)]
pub(super) enum PendingSlot {
    /// The connection is expected to come up.
    ToComeUp(Ticket),
    /// The connection will not come up, and its queues are being flushed. It keeps its slot until the flush ends, because it still uses
    /// buffers.
    ToEnd(Ticket),
}

/// The connections that were accepted and are not up yet. Some of these are ending.
#[derive(Debug)]
pub(super) struct PendingConnections {
    coming: Newcomers<ConnectionId>, // bound: pending
    ending: Newcomers<ConnectionId>, // bound: pending
    /// The time up to which the reactor has handled everything that peers have sent.
    seen: Instant,
}

impl PendingConnections {
    pub(super) fn new(now: Instant) -> Self {
        Self { coming: Newcomers::default(), ending: Newcomers::default(), seen: now }
    }

    /// Notes that everything that peers had sent before `now` was handled.
    #[inline]
    pub(super) const fn saw(&mut self, now: Instant) {
        self.seen = now;
    }

    /// Adds a connection that was accepted at the time `now`. Returns its slot.
    pub(super) fn add(&mut self, id: ConnectionId, host: Host, now: Instant) -> PendingSlot {
        PendingSlot::ToComeUp(self.coming.add(id, host, now))
    }

    /// Notes that a connection will not come up. Returns the slot that it has from now on.
    pub(super) fn will_end(&mut self, slot: PendingSlot) -> PendingSlot {
        let PendingSlot::ToComeUp(ticket) = slot else { return slot };
        let Some(NewcomerEntry { id, since, host }) = self.coming.remove(ticket) else { return slot };
        PendingSlot::ToEnd(self.ending.add(id, host, since))
    }

    /// Frees the slot of a connection that is up or has ended.
    pub(super) fn remove(&mut self, slot: PendingSlot) {
        match slot {
            PendingSlot::ToComeUp(ticket) => _ = self.coming.remove(ticket),
            PendingSlot::ToEnd(ticket) => _ = self.ending.remove(ticket),
        }
    }

    /// Returns the number of slots in use.
    pub(super) fn len(&self) -> usize {
        self.coming.len() + self.ending.len()
    }

    /// Returns the number of slots that the connections from a host use.
    pub(super) fn count_of(&self, host: Host) -> usize {
        self.coming.count_of(host) + self.ending.count_of(host)
    }

    /// Returns the oldest connection of a host if that connection [is slow](Self::is_slow). A new connection of the same host may evict it.
    pub(super) fn slow_of(&self, host: Host) -> Option<ConnectionId> {
        self.coming.oldest(Some(host)).filter(|oldest| self.is_slow(oldest)).map(|oldest| oldest.id)
    }

    /// Returns true if a connection is older than `GRACE`, and the reactor has handled everything that its peer had sent before the
    /// connection reached that age.
    fn is_slow(&self, connection: &NewcomerEntry<ConnectionId>) -> bool {
        connection.since + GRACE <= self.seen
    }

    /// Returns the connection that a new connection of `host` evicts. `None` if the new connection must be refused.
    pub(super) fn gives_way(&self, host: Host) -> Option<ConnectionId> {
        let coming = &self.coming;
        // A host still uses the slots of those of its connections that are ending.
        let largest = [self.ending.largest(), coming.largest()].into_iter().flatten();
        let largest = largest.filter(|&host| coming.count_of(host) > 0 && !crate::planted("nobody-gives-way"));
        let largest = largest.max_by_key(|&host| self.count_of(host))?;
        let (own, most, all) = (self.count_of(host), self.count_of(largest), self.len());
        let (of_largest, of_all) = (coming.oldest(Some(largest))?, coming.oldest(None)?);
        let (is_majority, has_more) = (2 * most > all, own + 1 < most);
        // A host that already uses more than half of the occupied slots evicts no connection of
        // another host.
        let may_take = 2 * own <= all;
        let chosen = if self.is_slow(&of_largest) && (may_take || largest == host) || is_majority && has_more {
            of_largest
        } else if self.is_slow(&of_all) && may_take {
            // `of_all` may be a connection of any host.
            of_all
        } else if has_more {
            of_largest
        } else {
            return None;
        };
        Some(chosen.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ReactorTag;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::net::IpAddr;

    /// After `TIMEOUT` ms, a silent connection is closed. After `HANDSHAKE` ms, the connection of an honest peer is up.
    const TIMEOUT: u64 = 5_000;
    const HANDSHAKE: u64 = 10;

    fn host(number: u16) -> Host {
        let [high, low] = number.to_be_bytes();
        Host::of(IpAddr::from([10, 0, high, low]))
    }

    /// A host whose connections are ending uses their slots: it takes no slot of another host, and its own connections give way.
    #[test]
    fn connections_that_end_count() {
        #[allow(clippy::disallowed_methods, reason = "a point in time to count from")]
        let start = Instant::now();
        let (tag, later) = (ReactorTag::next(), start + 2 * GRACE);
        let mut pending = PendingConnections::new(start);
        let add = |pending: &mut PendingConnections, nth, from| {
            let id = ConnectionId::new(tag, nth, 1);
            (id, pending.add(id, host(from), start))
        };
        for nth in 0..8 {
            let (_, slot) = add(&mut pending, nth, 1);
            pending.will_end(slot);
        }
        for nth in 8..11 {
            add(&mut pending, nth, 2);
        }
        assert_eq!(pending.gives_way(host(1)), None);
        let (coming, slot) = add(&mut pending, 11, 1);
        assert_eq!(pending.gives_way(host(1)), None);
        assert_eq!([2, 3].map(|from| pending.gives_way(host(from))), [Some(coming); 2]);
        pending.saw(later);
        assert_eq!([1, 2, 3].map(|from| pending.gives_way(host(from))), [Some(coming); 3]);
        pending.remove(slot);
        assert_eq!(pending.gives_way(host(1)), None);
    }

    /// A model of a reactor with `limit` slots for connections that are not up. A turn takes one
    /// millisecond.
    struct PendingModel {
        pending: PendingConnections,
        limit: usize,
        start: Instant,
        now: u64,
        tag: ReactorTag,
        next: u32,
        /// The connections in the table, with their hosts, the times of their arrival, and their slots.
        held: BTreeMap<ConnectionId, (u16, u64, PendingSlot)>,
    }

    impl PendingModel {
        fn new(limit: usize) -> Self {
            #[allow(clippy::disallowed_methods, reason = "a point in time to count from")]
            let start = Instant::now();
            let (tag, held) = (ReactorTag::next(), BTreeMap::new());
            Self { pending: PendingConnections::new(start), limit, start, now: 0, tag, next: 0, held }
        }

        /// Adds a connection of the host `from`. Returns its id, or `None` if it is refused.
        fn connects(&mut self, from: u16) -> Option<ConnectionId> {
            if self.pending.len() >= self.limit {
                let victim = self.pending.gives_way(host(from))?;
                self.leaves(victim);
            }
            let id = ConnectionId::new(self.tag, self.next, 1);
            self.next += 1;
            let slot = self.pending.add(id, host(from), self.start + Duration::from_millis(self.now));
            self.held.insert(id, (from, self.now, slot));
            assert!(self.pending.len() <= self.limit && self.pending.len() == self.held.len());
            Some(id)
        }

        /// Removes a connection that is up or has ended. Returns false if the connection was removed before.
        fn leaves(&mut self, id: ConnectionId) -> bool {
            let held = self.held.remove(&id);
            held.map(|(_, _, slot)| self.pending.remove(slot)).is_some()
        }

        fn oldest(&self) -> Option<(ConnectionId, u64)> {
            self.held.first_key_value().map(|(id, held)| (*id, held.1))
        }

        fn turn(&mut self) {
            self.pending.saw(self.start + Duration::from_millis(self.now));
            self.now += 1;
            while let Some(id) = self.oldest().filter(|(_, since)| since + TIMEOUT <= self.now).map(|(id, _)| id) {
                self.leaves(id);
            }
        }

        /// Simulates an attack: peers on `hosts` hosts open `per_second` connections a second in total, and stay silent. Meanwhile an
        /// honest client connects every 5 ms, from one of `honest` other hosts in turn. Returns the percentage of honest clients that come
        /// up.
        fn attacked(&mut self, per_second: u64, hosts: u16, honest: u16) -> usize {
            let (mut due, mut nth, mut tried, mut up) = (0, 0, 0, 0);
            let mut clients = Vec::new();
            while self.now < 8_000 {
                while due <= self.now * per_second {
                    self.connects(1000 + nth % hosts);
                    (due, nth) = (due + 1000, nth.wrapping_add(1));
                }
                if matches!((self.now % 5, self.now > TIMEOUT), (0, true)) {
                    tried += 1;
                    clients.extend(self.connects((self.now / 5) as u16 % honest).map(|id| (id, self.now)));
                }
                let now = self.now;
                clients.retain(|&(id, since)| {
                    let done = now >= since + HANDSHAKE;
                    up += usize::from(done && self.leaves(id));
                    !done
                });
                self.turn();
            }
            100 * up / tried
        }
    }

    /// Peers on one, some or many hosts open connections all the time and stay silent. Connections of honest clients on one or several
    /// other hosts still come up.
    #[test]
    fn honest_newcomers_come_up_beside_silent_ones() {
        for (per_second, hosts) in
            [(205, 1), (1_000, 1), (20_000, 1), (205, 64), (1_000, 64), (20_000, 64), (1_000, 2_000), (5_000, 2_000)]
        {
            for honest in [1, 7] {
                let up = PendingModel::new(1024).attacked(per_second, hosts, honest);
                assert!(up >= 99, "{per_second} a second of {hosts} hosts: {up} % of those of {honest} are up");
            }
        }
    }

    /// A new connection evicts a silent connection of the same host. The connections of other hosts are not evicted.
    #[test]
    fn a_host_pays_for_itself() {
        let mut model = PendingModel::new(10);
        let first = model.connects(1).expect("a free slot");
        let other = model.connects(2).expect("a free slot");
        (0..8).for_each(|_| assert!(model.connects(1).is_some()));
        assert_eq!(model.connects(1), None, "all of them are new");
        (0..=GRACE.as_millis()).for_each(|_| model.turn());
        assert!(
            model.connects(1).is_some() && !model.leaves(first) && model.leaves(other),
            "its own oldest was evicted"
        );
    }

    /// Two thousand clients of one host connect at the same time. They get all slots, and none of them evicts another.
    #[test]
    fn a_burst_of_one_host_has_all_places() {
        let mut model = PendingModel::new(1024);
        let clients: Vec<_> = (0..2000).filter_map(|_| model.connects(1)).collect();
        assert_eq!(clients.len(), 1024);
        assert!(model.connects(2).is_some(), "another host gets its slot immediately");
        assert_eq!(clients.into_iter().filter(|&id| model.leaves(id)).count(), 1023);
    }

    /// With a single slot, a connection is not evicted immediately by the next one.
    #[test]
    fn the_only_place_is_not_taken_at_once() {
        let mut model = PendingModel::new(1);
        let first = model.connects(1).expect("a free slot");
        assert_eq!((model.connects(2), model.connects(1)), (None, None));
        (0..=GRACE.as_millis()).for_each(|_| model.turn());
        assert!(model.connects(2).is_some() && !model.leaves(first));
    }

    /// An ending connection occupies its slot, and cannot be evicted.
    #[test]
    fn what_ends_counts() {
        let mut model = PendingModel::new(4);
        let ids: Vec<_> = (0..4).filter_map(|_| model.connects(1)).collect();
        for id in &ids {
            let held = model.held.get_mut(id).expect("it has a slot");
            held.2 = model.pending.will_end(held.2);
        }
        (0..1000).for_each(|_| model.turn());
        assert_eq!((model.connects(2), model.pending.len(), model.pending.count_of(host(1))), (None, 4, 4));
        assert!(model.leaves(ids[0]) && model.connects(2).is_some());
    }

    proptest! {
        /// A connection that is younger than `GRACE` is evicted only by a connection of a host with fewer connections.
        #[test]
        fn nobody_pays_for_a_larger_host_at_once(steps in prop::collection::vec((0u16..5, 0u64..40), 1..300)) {
            let mut model = PendingModel::new(12);
            for (from, turns) in steps {
                let before = model.held.clone();
                let of = |host| before.values().filter(|held| held.0 == host).count();
                let (came, now) = (model.connects(from), model.now);
                let gone = before.iter().find(|(id, _)| !model.held.contains_key(id));
                if let Some((_, &(whose, since, _))) = gone {
                    prop_assert!(of(from) + 1 < of(whose) || since + 100 < now);
                }
                prop_assert!(came.is_some() || before.len() == 12);
                (0..turns).for_each(|_| model.turn());
            }
        }
    }
}
