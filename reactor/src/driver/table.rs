//! The table of connections, with the driver's state for each. A completion, an event or a call of the program finds its connection here
//! with one lookup.

use std::time::Instant;

use rdma_transport::cm::CmId;
use rdma_transport::newcomers::Host;
use rdma_transport::qp::QpId;
use rdma_transport::shares::Hosts;
use rdma_transport::slab::Key;

use super::open::fallback::Fallback;
use super::pending::{PendingConnections, PendingSlot};
use super::run::fair::Allowance;
use crate::conn::Connection;
use crate::device::DeviceReservation;
use crate::device::cq::{CqIndex, CqPosition};
use crate::id::{ConnectionId, GENERATION_BITS, ReactorTag, SLOT_BITS};
use crate::options::Service;
use crate::providers::Handle;

/// A connection and the driver's state for it.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    pub(crate) conn: Connection,
    pub(crate) link: ConnectionLink,
    pub(crate) allowance: Allowance,
}

impl ConnectionSlot {
    /// Creates the entry of a connection that has no device yet.
    pub(super) fn new(conn: Connection, cm: Handle<CmId>, service: Service) -> Self {
        let link = ConnectionLink { cm, service, ..ConnectionLink::default() };
        Self { conn, link, allowance: Allowance::default() }
    }
}

/// The driver's state for a connection.
#[derive(Debug, Default)]
pub(crate) struct ConnectionLink {
    pub(super) cm: Handle<CmId>,
    /// The type of service that the connection requests from its device.
    pub(super) service: Service,
    /// The attempts that remain if the current one fails.
    pub(super) fallback: Option<Fallback>,
    /// The queue pair. Set once the connection has a device; cleared when the queue pair is destroyed.
    pub(super) qp: Option<QpId>,
    /// The device of the connection, and the resources that are reserved there for the connection. Set once the connection has a device.
    pub(super) binding: Option<DeviceBinding>,
    /// The slab of buffers that the peer maps as shared memory. `None` if the slab was not requested yet. `Some(None)` if the peer is on
    /// another host, the connection is secured, or the slab could not be allocated, registered or
    /// mapped.
    pub(super) apart: Option<Option<u16>>,
    /// The timer for the earliest deadline of the connection, and its time.
    pub(super) timer: Option<(Key, Instant)>,
    /// The slot among the pending connections, if a peer opened the connection and it is not up.
    pub(super) waits: Option<PendingSlot>,
    /// The key, in `ConnectionTable::hosts`, of the host that opened the connection.
    host: Option<Key>,
    /// The regions that only this peer can access.
    pub(super) regions: Vec<Key>, // local: regions of the program
    /// The number of bytes that are charged to the connection for fetched messages, including the messages that the program keeps.
    pub(super) fetched: usize,
    /// The part of `fetched` that is also charged to the peer's host, in bytes. Messages that count as small in the memory budget are not
    /// charged to the host.
    pub(super) fetched_large: usize,
    /// True if the connection is in the list of ending connections.
    pub(super) ending: bool,
    /// The progress of the flush of the connection's queues.
    pub(super) flush: Flush,
    /// Set while the peer is suspected to be lost, with the time of the next check. The suspicion
    /// is outdated if the deadline `step` of the connection is not this time any more.
    pub(super) suspect: Option<(Instant, Suspicion)>,
    /// The number of buffers that were lost because the device could not destroy the queue pair.
    pub(super) lost: Option<usize>,
}

/// The device of a connection, and its resources there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceBinding {
    pub(crate) device: usize,
    pub(crate) room: DeviceReservation,
}

impl DeviceBinding {
    /// Returns the index of the connection's completion queue.
    pub(crate) const fn queue(&self) -> CqIndex {
        (self.device, self.room.cq)
    }
}

/// The progress of the flush of an ending connection's queues.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Flush {
    /// The flush has not begun.
    #[default]
    Before,
    /// The device is flushing. The position is the end of the completion queue at the time when the flush started.
    Waiting(CqPosition),
    /// The flush timeout has expired, but completions up to the second position must still be handled. The first position has the same
    /// meaning as that of `Waiting`.
    Late(CqPosition, CqPosition),
    /// The flush timeout has expired, and no completion is awaited any more.
    Over,
}

/// The progress of the reactor since a peer was first suspected to be lost. The peer counts as lost
/// only when the reactor has processed everything that had arrived at that time. This takes two
/// steps: the provider turns the data in the operating system into completions, and the reactor
/// handles these completions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspicion {
    /// The time of the first suspicion, plus the delays of all later checks.
    pub(super) since: Instant,
    /// The number of checks for readiness that the reactor had made at the time of the suspicion. After one more check, the reactor knows
    /// of everything that had arrived at the time of the suspicion.
    pub(super) waits: u64,
    /// The position of the end of the completion queue at the time when the provider had processed
    /// all data of the peer. `None` before that time.
    pub(super) mark: Option<CqPosition>,
}

#[derive(Debug)]
struct TableEntry {
    /// The id of the connection in this entry. If the entry is empty, the id of the next connection in this entry.
    id: ConnectionId,
    slot: Option<ConnectionSlot>,
}

/// The connections of one reactor. The comment of the [module](self) has an overview.
#[derive(Debug)]
pub(crate) struct ConnectionTable {
    reactor: ReactorTag,
    entries: Vec<TableEntry>, // bound: connections
    vacant: Vec<u32>,         // bound: connections
    live: usize,
    /// The connection whose last callback is running. [`ConnectionTable::count`] does not count it.
    last: Option<ConnectionId>,
    /// The connections that peers opened and that are not up. A connection that fails to come up stays here until it has ended.
    pub(super) pending: PendingConnections,
    /// The hosts that opened connections, with the number of their connections in any state.
    pub(super) hosts: Hosts<()>, // bound: connections
}

impl ConnectionTable {
    pub(crate) fn new(reactor: ReactorTag, now: Instant) -> Self {
        let (entries, vacant) = (Vec::new(), Vec::new());
        let (pending, hosts) = (PendingConnections::new(now), Hosts::default());
        Self { reactor, entries, vacant, live: 0, last: None, pending, hosts }
    }

    /// Assigns an id, inserts the entry that `make` builds for it, and returns the id.
    pub(super) fn insert(&mut self, make: impl FnOnce(ConnectionId) -> ConnectionSlot) -> ConnectionId {
        let entry = match self.vacant.pop() {
            Some(entry) => entry as usize,
            None => {
                debug_assert!(self.entries.len() < 1 << SLOT_BITS, "max_connections is less");
                let id = ConnectionId::new(self.reactor, self.entries.len() as u32, 1);
                self.entries.push(TableEntry { id, slot: None });
                self.entries.len() - 1
            }
        };
        let entry = &mut self.entries[entry];
        entry.slot = Some(make(entry.id));
        self.live += 1;
        entry.id
    }

    /// Counts a connection that a peer has opened in the number of connections of the peer's host.
    /// Adds the connection to the connections that are not up.
    pub(super) fn add_accepted(&mut self, id: ConnectionId, now: Instant) {
        let Some(slot) = self.entries.get_mut(id.slot()).and_then(|entry| entry.slot.as_mut()) else { return };
        let host = Host::of(slot.conn.peer().ip());
        slot.link.waits = Some(self.pending.add(id, host, now));
        slot.link.host = Some(self.hosts.open(Some(host)));
    }

    /// Records that the reactor has handled everything that peers have sent until now, or will
    /// handle it in this turn.
    #[inline]
    pub(crate) const fn caught_up(&mut self, now: Instant) {
        self.pending.saw(now);
    }

    /// Makes the current attempt of a connection the last one. Otherwise, if this attempt has
    /// failed already, stage 10 would start the next attempt of a connection that the program has
    /// closed.
    pub(super) fn forget_addresses(&mut self, id: ConnectionId) {
        if let Some(slot) = self.get_mut(id) {
            slot.link.fallback = None;
        }
    }

    /// Notes that a connection begins to end. If a peer opened the connection and it is not up, it
    /// still counts towards the limit on such connections until it is removed from the table.
    pub(super) fn will_end(&mut self, id: ConnectionId) {
        let Some(entry) = self.entries.get_mut(id.slot()).filter(|entry| entry.id == id) else { return };
        let Some(slot) = entry.slot.as_mut() else { return };
        slot.link.waits = slot.link.waits.map(|slot| self.pending.will_end(slot));
        if crate::planted("an-end-frees-its-place") {
            self.settled(id);
        }
    }

    /// Frees the slot that a connection has used among the pending ones, because it is up.
    pub(super) fn settled(&mut self, id: ConnectionId) {
        if let Some(waits) = self.get_mut(id).and_then(|slot| slot.link.waits.take()) {
            self.pending.remove(waits);
        }
    }

    /// Removes a connection from the table and returns it. Its id refers to nothing from now on.
    pub(super) fn remove(&mut self, id: ConnectionId) -> Option<ConnectionSlot> {
        let entry = self.entries.get_mut(id.slot()).filter(|entry| entry.id == id)?;
        let mut slot = entry.slot.take()?;
        if let Some(waits) = slot.link.waits.take() {
            self.pending.remove(waits);
        }
        if let Some(host) = slot.link.host.take() {
            self.hosts.close(host);
        }
        self.live -= 1;
        self.last = self.last.filter(|&last| last != id);
        let generation = id.generation() + 1;
        // An entry whose generation number would overflow is never used again. Otherwise the id of an earlier connection would refer to a
        // later connection.
        if generation < 1 << GENERATION_BITS {
            entry.id = ConnectionId::new(self.reactor, id.slot() as u32, generation);
            self.vacant.push(id.slot() as u32);
        }
        Some(slot)
    }

    #[inline]
    pub(crate) fn get(&self, id: ConnectionId) -> Option<&ConnectionSlot> {
        self.entries.get(id.slot()).filter(|entry| entry.id == id)?.slot.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut ConnectionSlot> {
        self.entries.get_mut(id.slot()).filter(|entry| entry.id == id)?.slot.as_mut()
    }

    /// Returns the connection that has posted a work request. `number` is the part of the work
    /// request id that encodes the entry and the generation of the connection.
    #[inline]
    pub(crate) fn of_work(&mut self, number: u64) -> Option<&mut ConnectionSlot> {
        let right = |entry: &&mut TableEntry| entry.id.entry() == number || crate::planted("no-generation-check");
        self.entries.get_mut((number & ((1 << SLOT_BITS) - 1)) as usize).filter(right)?.slot.as_mut()
    }

    /// Returns the tag of the reactor that this table belongs to.
    pub(crate) const fn tag(&self) -> ReactorTag {
        self.reactor
    }

    /// Returns the number of connections in any state.
    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.live
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Notes that the last callback of a connection begins. After this callback, the caller must
    /// call [`ConnectionTable::remove`].
    pub(crate) fn begin_last_callback(&mut self, id: ConnectionId) {
        self.last = Some(id);
    }

    /// Returns the number of connections in any state whose last callback has not begun.
    pub(crate) fn count(&self) -> usize {
        self.live - usize::from(self.last.is_some())
    }

    /// Returns the ids of the connections that had `on_connect` and whose last callback has not
    /// begun.
    pub(crate) fn announced(&self) -> impl Iterator<Item = ConnectionId> {
        let last = self.last;
        let announced = self.iter().map(|slot| &slot.conn).filter(|conn| conn.state().is_announced());
        announced.map(Connection::id).filter(move |&id| Some(id) != last)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ConnectionSlot> {
        self.entries.iter().filter_map(|entry| entry.slot.as_ref())
    }

    /// Returns the ids of all connections.
    pub(crate) fn ids(&self) -> Vec<ConnectionId> {
        self.iter().map(|slot| slot.conn.id()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Framing};
    use crate::conn::{Opening, Role};
    use crate::security::Security;

    fn slot(id: ConnectionId, config: &Config, now: Instant) -> ConnectionSlot {
        let peer = ([127, 0, 0, 1], 1).into();
        let (framing, security) = (Framing::Credits, Security::Plain);
        let opening = Opening { framing, peer, host: None, private_data: Vec::new(), probes: false, security };
        let conn = Connection::new(id, Role::Passive, opening, config, now);
        ConnectionSlot::new(conn, Handle::NONE, Service::default())
    }

    /// More than a million connections use one entry of the table in sequence. The id of the first connection refers to none of the later
    /// ones.
    #[test]
    fn a_name_is_never_that_of_another_connection() {
        #[allow(clippy::disallowed_methods, reason = "a point in time to count from")]
        let now = Instant::now();
        let (mut table, config) = (ConnectionTable::new(ReactorTag::next(), now), Config::default());
        let first = table.insert(|id| slot(id, &config, now));
        assert!(table.remove(first).is_some());
        let mut last = first;
        for nth in 0..=1 << GENERATION_BITS {
            let id = table.insert(|id| slot(id, &config, now));
            assert!(id != first && id != last, "the name {id} comes again after {nth} connections");
            assert!(table.get(first).is_none() && table.get(last).is_none());
            assert!(table.remove(id).is_some() && table.remove(id).is_none());
            last = id;
        }
        assert_eq!(last.slot(), 1, "the slot whose names are used up is not used again");
    }
}
