//! The connections of a reactor, each with its place in the world. A completion, an event or a call finds its connection
//! here, once.

use std::time::Instant;

use rdma_transport::cm::CmId;
use rdma_transport::newcomers::Host;
use rdma_transport::qp::QpId;
use rdma_transport::slab::Key;

use super::fair::Allowance;
use super::fallback::Fallback;
use super::pending::{Pending, Waits};
use crate::conn::Connection;
use crate::device::DeviceReservation;
use crate::device::cq::{CqIndex, CqPosition};
use crate::id::{ConnectionId, GENERATION_BITS, ReactorTag, SLOT_BITS};
use crate::options::Service;
use crate::providers::Handle;

/// A connection and its place in the world.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) conn: Connection,
    pub(crate) link: Link,
    pub(crate) allowance: Allowance,
}

impl Seat {
    /// The seat of a connection that is on no device yet.
    pub(super) fn new(conn: Connection, cm: Handle<CmId>, service: Service) -> Self {
        let link = Link {
            cm,
            service,
            fallback: None,
            qp: None,
            place: None,
            apart: None,
            timer: None,
            lists: None,
            waits: None,
            regions: Vec::new(),
            fetched: 0,
            fetched_large: 0,
            ending: false,
            flush: Flush::Before,
            suspect: None,
            lost: None,
        };
        Self { conn, link, allowance: Allowance::default() }
    }
}

/// What the driver knows of a connection.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) cm: Handle<CmId>,
    /// What its device is asked for.
    pub(super) service: Service,
    /// What is tried when this attempt fails.
    pub(super) fallback: Option<Fallback>,
    /// From when it is on a device until the queue pair was destroyed.
    pub(super) qp: Option<QpId>,
    /// Once it is on a device.
    pub(super) place: Option<Place>,
    /// Once it was asked for, the slab of buffers that its peer has mapped, if there is one.
    pub(super) apart: Option<Option<u16>>,
    /// The timer that calls `Connection::timeout`, and when.
    pub(super) timer: Option<(Key, Instant)>,
    /// The timer that calls `Connection::lists_due`.
    pub(super) lists: Option<Key>,
    /// The place among the connections of peers that are not up.
    pub(super) waits: Option<Waits>,
    /// Regions registered for this peer alone.
    pub(super) regions: Vec<Key>,
    /// Memory that messages past one buffer have, those that the program keeps included, bytes.
    pub(super) fetched: usize,
    /// The part of it that counts for the host of the peer, bytes.
    pub(super) fetched_large: usize,
    /// It is on the list of those that end.
    pub(super) ending: bool,
    /// When the flush of its queues began, and how it goes on.
    pub(super) flush: Flush,
    /// The peer seems to be gone, and what may still be unseen is looked at.
    pub(super) suspect: Option<Suspect>,
    /// The number of buffers that the queue pair has for good, if the device did not destroy it.
    pub(super) lost: Option<usize>,
}

/// Where on a device a connection is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) device: usize,
    pub(crate) room: DeviceReservation,
}

impl Place {
    /// The completion queue of the connection.
    pub(crate) const fn queue(&self) -> CqIndex {
        (self.device, self.room.cq)
    }
}

/// How far a connection that ends is with flushing its queues.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Flush {
    /// It has not begun.
    #[default]
    Before,
    /// The device was told. The mark is that of its completion queue then.
    Waiting(CqPosition),
    /// The time is over, but what was in the completion queue at the second mark is still to be looked at.
    Late(CqPosition, CqPosition),
    /// The device has not flushed in time.
    Over,
}

/// A moment when a peer seemed to be gone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspect {
    /// On its completion queue.
    pub(super) mark: CqPosition,
    /// Waits in the operating system until then.
    pub(super) waits: u64,
}

#[derive(Debug)]
struct Slot {
    /// The name of the connection that is here, or of the next one.
    id: ConnectionId,
    seat: Option<Seat>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Table {
    reactor: ReactorTag,
    slots: Vec<Slot>,
    vacant: Vec<u32>,
    live: usize,
    /// Connections of peers that were accepted and are not up yet, or never were and are not gone yet.
    pub(super) pending: Pending,
    /// Connections that end.
    pub(super) ending: Vec<ConnectionId>,
}

impl Table {
    pub(crate) fn new(reactor: ReactorTag, now: Instant) -> Self {
        let (slots, vacant, ending) = (Vec::new(), Vec::new(), Vec::new());
        Self { reactor, slots, vacant, live: 0, pending: Pending::new(now), ending }
    }

    /// Adds what `make` makes of its name.
    pub(super) fn insert(&mut self, make: impl FnOnce(ConnectionId) -> Seat) -> ConnectionId {
        let slot = match self.vacant.pop() {
            Some(slot) => slot as usize,
            None => {
                debug_assert!(self.slots.len() < 1 << SLOT_BITS, "max_connections is less");
                let id = ConnectionId::new(self.reactor, self.slots.len() as u32, 1);
                self.slots.push(Slot { id, seat: None });
                self.slots.len() - 1
            }
        };
        let slot = &mut self.slots[slot];
        slot.seat = Some(make(slot.id));
        self.live += 1;
        slot.id
    }

    /// Counts a connection of a peer that was accepted.
    pub(super) fn add_pending(&mut self, id: ConnectionId, now: Instant) {
        let Some(seat) = self.slots.get_mut(id.slot()).and_then(|slot| slot.seat.as_mut()) else { return };
        seat.link.waits = Some(self.pending.add(id, Host::of(seat.conn.peer().ip()), now));
    }

    /// Notes that a connection begins to end. It counts until it is gone.
    pub(super) fn will_end(&mut self, id: ConnectionId) {
        let Some(seat) = self.slots.get_mut(id.slot()).and_then(|slot| slot.seat.as_mut()) else { return };
        seat.link.waits = seat.link.waits.map(|place| self.pending.will_end(place));
        if cfg!(planted = "an-end-frees-its-place") {
            self.settled(id);
        }
    }

    /// Frees the place of a connection that a peer has opened: it is up.
    pub(super) fn settled(&mut self, id: ConnectionId) {
        if let Some(place) = self.get_mut(id).and_then(|seat| seat.link.waits.take()) {
            self.pending.remove(place);
        }
    }

    /// Takes a connection out. Its name is stale from now on.
    pub(super) fn remove(&mut self, id: ConnectionId) -> Option<Seat> {
        let slot = self.slots.get_mut(id.slot()).filter(|slot| slot.id == id)?;
        let mut seat = slot.seat.take()?;
        if let Some(place) = seat.link.waits.take() {
            self.pending.remove(place);
        }
        self.live -= 1;
        let generation = id.generation() + 1;
        // A slot whose generations are used up is never used again: an old name would mean a new connection.
        if generation < 1 << GENERATION_BITS {
            slot.id = ConnectionId::new(self.reactor, id.slot() as u32, generation);
            self.vacant.push(id.slot() as u32);
        }
        Some(seat)
    }

    #[inline]
    pub(crate) fn get(&self, id: ConnectionId) -> Option<&Seat> {
        self.slots.get(id.slot()).filter(|slot| slot.id == id)?.seat.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Seat> {
        self.slots.get_mut(id.slot()).filter(|slot| slot.id == id)?.seat.as_mut()
    }

    /// The connection whose slot and generation a work request id names.
    #[inline]
    pub(crate) fn of_work(&mut self, place: u64) -> Option<&mut Seat> {
        let right = |slot: &&mut Slot| slot.id.place() == place || cfg!(planted = "no-generation-check");
        self.slots.get_mut((place & ((1 << SLOT_BITS) - 1)) as usize).filter(right)?.seat.as_mut()
    }

    /// The reactor that the connections belong to.
    pub(crate) const fn tag(&self) -> ReactorTag {
        self.reactor
    }

    /// Connections in any state.
    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.live
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.live == 0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Seat> {
        self.slots.iter().filter_map(|slot| slot.seat.as_ref())
    }

    /// The names of all connections.
    pub(crate) fn ids(&self) -> Vec<ConnectionId> {
        self.iter().map(|seat| seat.conn.id()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Framing};
    use crate::conn::{Opening, Role};
    use crate::security::Security;

    fn seat(id: ConnectionId, config: &Config, now: Instant) -> Seat {
        let peer = ([127, 0, 0, 1], 1).into();
        let (framing, security) = (Framing::Credits, Security::Plain);
        let opening = Opening { framing, peer, host: None, private_data: Vec::new(), security };
        let conn = Connection::new(id, Role::Passive, opening, config, now);
        Seat::new(conn, Handle::NONE, Service::default())
    }

    /// A slot has had a million connections and more: its first name still means none of them.
    #[test]
    fn a_name_is_never_that_of_another_connection() {
        #[allow(clippy::disallowed_methods, reason = "a point in time to count from")]
        let now = Instant::now();
        let (mut table, config) = (Table::new(ReactorTag::next(), now), Config::default());
        let first = table.insert(|id| seat(id, &config, now));
        assert!(table.remove(first).is_some());
        let mut last = first;
        for nth in 0..=1 << GENERATION_BITS {
            let id = table.insert(|id| seat(id, &config, now));
            assert!(id != first && id != last, "the name {id} comes again after {nth} connections");
            assert!(table.get(first).is_none() && table.get(last).is_none());
            assert!(table.remove(id).is_some() && table.remove(id).is_none());
            last = id;
        }
        assert_eq!(last.slot(), 1, "the slot whose names are used up is not used again");
    }
}
