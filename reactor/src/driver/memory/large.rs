//! The memory for messages longer than one buffer: copies that peers will fetch, messages that are
//! fetched from peers, and messages that arrived in several buffers and are joined.

use std::ops::Range;
use std::time::Duration;

use rdma_transport::mem::page_size;
use rdma_transport::newcomers::Host;

use crate::conn::Need;
use crate::conn::effects::Fragments;
use crate::conn::shortage::PROBE;
use crate::conn::transfer::{OfferKind, OfferSource};
use crate::device::return_channel::JoinedMessage;
use crate::driver::table::ConnectionSlot;
use crate::driver::{TimerPurpose, World};
use crate::error::{Blocked, SendErrorKind};
use crate::id::{ConnectionId, SendId};
use crate::limits::HEADER_LEN;
use crate::memory::budget::{Budget, Claimant, MemoryShortage, MemoryUse};
use crate::memory::region::{Region, RemoteRegion};
use crate::security::Sealer;
use crate::security::channel::{SEGMENT, TAG, segment, segments};

/// A connection whose peer has answered no Read for this time ends, if its messages use memory that
/// other connections wait for. A path of 5 Mbit/s transfers the longest Read, a mebibyte, in this
/// time.
const GRACE: Duration = Duration::from_secs(2);

/// The interval at which the use of memory is checked while connections wait for memory.
const LOOK: Duration = Duration::from_millis(50);

/// The memory that large messages use, and the requests that wait for it.
#[derive(Debug)]
pub(crate) struct LargeMessages {
    copied: Budget,
    fetched: Budget,
    /// The smallest number of bytes that is charged to the budget for a message.
    least: usize,
    /// True if a timer for [`Self::relieve_shortage`] is set.
    looks: bool,
}

impl LargeMessages {
    pub(crate) fn new(limit: usize) -> Self {
        let (copied, fetched) = (Budget::new(limit), Budget::new(limit));
        let least = page_size().min(fetched.small());
        Self { copied, fetched, least, looks: false }
    }

    /// Returns the number of bytes that are charged for a message of `len` bytes. Each message
    /// occupies a page, even if a peer offers single bytes, or has buffers of one byte.
    fn charge(&self, len: usize) -> usize {
        len.max(self.least)
    }

    /// Returns the number of bytes that fetched messages use, and the number of bytes that copies use.
    pub(crate) const fn levels(&self) -> (usize, usize) {
        (self.fetched.used(), self.copied.used())
    }
}

/// The payload of a large message.
#[derive(Debug)]
pub(crate) enum LargePayload<'a> {
    Bytes(&'a [u8]),
    /// A range of a region.
    Region(&'a Region, Range<usize>),
}

impl LargePayload<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Region(_, range) => range.len(),
        }
    }

    /// Copies a part of the payload to `out`. Returns false if the payload is a region that the CPU cannot read, such as a dma-buf.
    fn part(&self, range: Range<usize>, out: &mut [u8]) -> bool {
        match self {
            Self::Bytes(bytes) => {
                out.copy_from_slice(&bytes[range]);
                true
            }
            Self::Region(region, within) => region.try_copy_to(within.start + range.start, out),
        }
    }

    /// Returns true if the CPU can read the payload. It cannot read a region over a dma-buf.
    fn is_readable(&self) -> bool {
        match self {
            Self::Bytes(_) => true,
            Self::Region(region, range) => region.try_copy_to(range.start, &mut []),
        }
    }

    /// Copies the whole payload to `to`. Returns false if the copy failed, or if the payload is a region, which is never copied here.
    fn copy_to(&self, to: &mut Region) -> bool {
        match self {
            Self::Bytes(bytes) => to.copy_from(0, bytes).is_ok(),
            Self::Region(..) => false,
        }
    }
}

/// Writes the encrypted segments of a large message to a region, and their authentication tags after them. The peer, and everyone who knows
/// the region's remote key, can read the region at any time, so plaintext is never written to it. Returns false if the payload cannot be
/// read, the region `to` cannot be written, or a segment cannot be encrypted. After false, the caller must end the connection, because the
/// peer could not decrypt later large messages.
fn seal(sealer: &mut Sealer, payload: &LargePayload<'_>, to: &mut Region) -> bool {
    let len = payload.len() as u64;
    let message = sealer.begin(len);
    let mut scratch = vec![0; SEGMENT.min(payload.len())];
    (0..segments(len)).all(|index| {
        let range = segment(index, len);
        let bytes = &mut scratch[..range.len()];
        payload.part(range.clone(), bytes)
            && sealer.seal_segment(message, index, bytes).is_some_and(|tag| {
                to.copy_from(range.start, bytes).is_ok()
                    && to.copy_from(payload.len() + index as usize * TAG, &tag).is_ok()
            })
    })
}

impl LargeMessages {
    /// Sends a payload that is too long for one buffer. If there is capacity for all its fragments, the payload is sent in several buffers.
    /// Otherwise a copy of the payload is offered to the peer. The copy is encrypted if the connection is secured.
    #[cold]
    pub(crate) fn send_large(
        &mut self,
        world: &mut World,
        id: ConnectionId,
        payload: LargePayload<'_>,
    ) -> Result<SendId, SendErrorKind> {
        // The program waits for the end of the send before it reuses its region, so the end must be reported.
        let reported = matches!(payload, LargePayload::Region(..));
        let cut = world.pass(id, |conn, env| {
            let len = payload.len();
            conn.may_cut(len).then(|| conn.send_cut(len, reported, env, |range, room| payload.part(range, room)))
        });
        if let Some(sent) = cut.flatten() {
            return sent;
        }
        if !payload.is_readable() {
            return Err(SendErrorKind::Sealed);
        }
        let (len, most) = (payload.len(), self.copied.limit());
        if len > most {
            return Err(SendErrorKind::TooLong { len, max: most });
        }
        let own = world.pass(id, |conn, env| {
            conn.check_offer(len, OfferKind::Copied, env)?;
            Ok::<_, SendErrorKind>(conn.copies())
        });
        let claimant = Claimant { who: id, host: None, own: own.ok_or(SendErrorKind::Closed)?? };
        if !self.copied.request(claimant, self.charge(len)) {
            world.pass(id, |conn, env| conn.refuse_transfer(len, OfferKind::Copied, env));
            return Err(SendErrorKind::WouldBlock(Blocked::Memory));
        }
        self.leave_copied(world, id);
        let mut region = match world.block(id, len, MemoryUse::Copied) {
            Ok(region) => Box::new(region),
            Err(error) => {
                self.copied.give_back(self.charge(len));
                failure_log!(world, id, "memory for a message of {len} bytes: {error}");
                return Err(SendErrorKind::NoMemory { len });
            }
        };
        let (slot, _) = world.at(id).ok_or(SendErrorKind::Closed)?;
        // If the copy cannot be made, `region` is dropped, which releases its memory.
        let copied = match slot.conn.sealer_mut() {
            Some(sealer) => seal(sealer, &payload, &mut region),
            None => payload.copy_to(&mut region),
        };
        if !copied {
            world.pass(id, |conn, env| conn.posting_failed("a large message could not be sealed".into(), env));
            return Err(SendErrorKind::Closed);
        }
        let remote = RemoteRegion { len: len as u64, ..region.remote() };
        let source = OfferSource::Copy { region, reported };
        world.pass(id, |conn, env| conn.offer(remote, None, source, env)).ok_or(SendErrorKind::Closed)
    }

    /// Returns the identification of a connection for requests to the memory budget of fetched messages.
    fn claimant(slot: &ConnectionSlot) -> Claimant {
        let host = Some(Host::of(slot.conn.peer().ip()));
        Claimant { who: slot.conn.id(), host, own: slot.link.fetched }
    }

    /// Assigns memory to the offered messages of a connection, in order, while the budget grants it. While at most a quarter of all memory
    /// is in use, every peer gets memory. Beyond that, only a peer that has answered a Read within the last 2 seconds gets memory, or waits
    /// until more is free.
    pub(crate) fn find_memory(&mut self, world: &mut World, id: ConnectionId) {
        while let Some(slot) = world.table.get_mut(id).filter(|slot| slot.conn.state().is_open()) {
            let Some(len) = slot.conn.wants_memory() else { return };
            let (claimant, charge) = (Self::claimant(slot), self.charge(len));
            if !slot.conn.has_shown(world.now) && !self.fetched.would_trust(claimant, charge) {
                // The peer has answered no Read recently. Its connection leaves the queue, so that it does not delay the connections behind
                // it.
                self.leave_fetched(world, id);
                return self.probe(world, id);
            }
            if !self.fetched.request(claimant, charge) {
                world.pass(id, |conn, env| conn.wait_for_memory(env));
                self.expect_shortage(world);
                return self.probe(world, id);
            }
            slot.link.fetched += charge;
            slot.link.fetched_large += if self.fetched.is_small(charge) { 0 } else { charge };
            self.leave_fetched(world, id);
            match world.block(id, len, MemoryUse::Fetched) {
                Ok(region) => {
                    world.pass(id, |conn, _| conn.give_memory(region));
                }
                Err(error) => {
                    self.give_back_fetched(world, Some(id), len);
                    failure_log!(world, id, "memory to fetch a message of {len} bytes: {error}");
                    world.pass(id, |conn, env| conn.posting_failed(error.to_string(), env));
                    return;
                }
            }
        }
    }

    /// Sends a Read of a few bytes to a peer that has answered no Read recently. When the peer answers this Read, its connection requests
    /// memory again.
    fn probe(&mut self, world: &mut World, id: ConnectionId) {
        let Some(slot) = world.table.get(id).filter(|slot| slot.conn.may_probe(world.now)) else { return };
        if !slot.conn.has_probe() {
            match world.block(id, PROBE as usize, MemoryUse::Program) {
                Ok(region) => _ = world.pass(id, |conn, _| conn.take_probe(region)),
                Err(error) => {
                    failure_log!(world, id, "memory for a read of {PROBE} bytes: {error}");
                    world.pass(id, |conn, env| conn.posting_failed(error.to_string(), env));
                    return;
                }
            }
        }
        world.pass(id, |conn, env| conn.probe(env));
    }

    /// Schedules a check of the use of memory, because a connection waits for memory.
    fn expect_shortage(&mut self, world: &mut World) {
        if !std::mem::replace(&mut self.looks, true) {
            world.timers.insert(world.now + LOOK, TimerPurpose::Shortage);
        }
    }

    /// Called while connections wait for memory. Ends connections whose peers have answered no Read for at least `GRACE`, if a waiting
    /// connection can use the memory that is released in this way. Begins with the connections that have stalled longest, and ends no more
    /// of them than necessary. Connections that make progress keep their memory.
    pub(crate) fn relieve_shortage(&mut self, world: &mut World) {
        self.looks = false;
        if self.fetched.in_line().next().is_none() {
            return;
        }
        self.expect_shortage(world);
        let shortages = self.fetched.shortages();
        if shortages.is_empty() {
            return;
        }
        let grace = GRACE.min(world.config.timeouts.transfer);
        let (mut stalled, mut ending, mut giving_way) = (Vec::new(), Vec::new(), Vec::new());
        for slot in world.table.iter().filter(|slot| slot.link.fetched > 0) {
            let (id, host) = (slot.conn.id(), Host::of(slot.conn.peer().ip()));
            match slot.conn.stalled().filter(|_| slot.conn.state().is_open()) {
                Some((since, held)) if since + grace <= world.now => stalled.push((since, (id, host, held))),
                // The connection is ending, so its memory will be released soon.
                None if slot.conn.state().is_ending() => ending.push((id, host, slot.link.fetched)),
                _ => {}
            }
        }
        stalled.sort_unstable_by_key(|&(since, _)| since);
        for MemoryShortage { who, mut bytes, of } in shortages {
            let helps = |id, host| id != who && of.is_none_or(|of| of == host);
            for &(_, _, held) in ending.iter().filter(|&&(id, host, _)| helps(id, host)) {
                bytes = bytes.saturating_sub(held);
            }
            stalled.retain(|&(_, (id, host, held))| {
                let goes = bytes > 0 && helps(id, host);
                if goes {
                    bytes = bytes.saturating_sub(held);
                    ending.push((id, host, held));
                    giving_way.push(id);
                }
                !goes
            });
        }
        for id in giving_way {
            world.pass(id, |conn, env| conn.give_way(env));
        }
    }

    /// Charges an arrived message of `len` bytes to a connection. Returns false if the budget does
    /// not cover it.
    pub(crate) fn take_fetched(&mut self, world: &mut World, id: ConnectionId, len: usize) -> bool {
        let Some(slot) = world.table.get_mut(id) else { return false };
        let charge = self.charge(len);
        let taken = self.fetched.take(Self::claimant(slot), charge);
        if taken {
            slot.link.fetched += charge;
            slot.link.fetched_large += if self.fetched.is_small(charge) { 0 } else { charge };
        }
        taken
    }

    /// Returns the memory of a message of `len` bytes to the budget. If the connection `id` still
    /// exists, the message is no longer charged to it.
    fn give_back_fetched(&mut self, world: &mut World, id: Option<ConnectionId>, len: usize) {
        let charge = self.charge(len);
        self.fetched.give_back(charge);
        if let Some(slot) = id.and_then(|id| world.table.get_mut(id)) {
            slot.link.fetched = slot.link.fetched.saturating_sub(charge);
            if !self.fetched.is_small(charge) {
                slot.link.fetched_large = slot.link.fetched_large.saturating_sub(charge);
                self.fetched.relieve(Host::of(slot.conn.peer().ip()), charge);
            }
        }
    }

    /// Notes that a connection has ended. The bytes of `fetched_large` are no longer charged to the
    /// host of its peer, so other connections of that host may get memory now.
    pub(crate) fn relieve(&mut self, world: &mut World, host: Host, fetched_large: usize) {
        if fetched_large > 0 {
            self.fetched.relieve(host, fetched_large);
            if !crate::planted("an-ended-connection-gives-its-share-to-nobody") {
                self.ask_for_memory(world);
            }
        }
    }

    /// Handles the release of the memory of a large message: returns the memory to the budget, and notifies the connections that wait for
    /// memory. `id` is the connection of the message.
    pub(crate) fn settle(&mut self, world: &mut World, account: MemoryUse, len: usize, id: Option<ConnectionId>) {
        match account {
            MemoryUse::Program => {}
            MemoryUse::Copied => {
                self.copied.give_back(self.charge(len));
                world.effects.to_ask.extend(self.copied.in_line());
            }
            MemoryUse::Fetched => {
                self.give_back_fetched(world, id, len);
                self.ask_for_memory(world);
            }
        }
    }

    /// Removes the memory requests of a connection. If they have held back other requests, checks
    /// if those can be granted now.
    pub(crate) fn leave_lines(&mut self, world: &mut World, id: ConnectionId) {
        self.leave_copied(world, id);
        self.leave_fetched(world, id);
    }

    fn leave_copied(&mut self, world: &mut World, id: ConnectionId) {
        if self.copied.leave(id) {
            world.effects.to_ask.extend(self.copied.in_line());
            world.ring();
        }
    }

    fn leave_fetched(&mut self, world: &mut World, id: ConnectionId) {
        if self.fetched.leave(id) {
            self.ask_for_memory(world);
        }
    }

    /// Makes the next flush request memory again for the connections that wait for memory to fetch
    /// messages. A flush that is in progress may be the last one of this turn, so this function
    /// triggers another turn.
    fn ask_for_memory(&mut self, world: &mut World) {
        let waiting = self.fetched.in_line().collect::<Vec<_>>();
        if !waiting.is_empty() {
            world.os.wake.wake();
        }
        for id in waiting {
            world.pass(id, |conn, env| conn.mark(env));
        }
    }

    /// Finds the next connection on which a send was refused and would be accepted now, and queues its `on_writable`. Returns false if
    /// there is no such connection. `on_writable` is called once for each refusal. The caller runs each callback before it calls this
    /// function again, because the callback may use the capacity that another connection waits for.
    #[inline]
    pub(crate) fn next_writable(&mut self, world: &mut World) -> bool {
        !world.effects.to_ask.is_empty() && self.ask_writable(world)
    }

    fn ask_writable(&mut self, world: &mut World) -> bool {
        while let Some(id) = world.effects.to_ask.pop_front() {
            let Some(slot) = world.table.get(id) else { continue };
            let memory = match slot.conn.is_unblocked() {
                None => continue,
                Some(Need::Transfer { copy, .. }) if copy > 0 => {
                    let claimant = Claimant { who: id, host: None, own: slot.conn.copies() };
                    let charge = self.charge(copy);
                    let granted = self.copied.would_grant(claimant, charge);
                    if !granted {
                        // If the send was refused because a send queue slot, a credit or a transfer
                        // was missing, its connection is not in the queue for memory yet. When
                        // memory is released, only the connections in this queue are checked again.
                        let queued = !self.copied.request(claimant, charge);
                        debug_assert!(queued, "memory that would not be granted was granted");
                    }
                    granted
                }
                Some(_) => true,
            };
            if memory {
                if let Some((slot, mut env)) = world.at(id) {
                    slot.conn.unblock(&mut env);
                    self.leave_copied(world, id);
                    return true;
                }
            }
        }
        false
    }

    /// Returns true if a message of `len` bytes would be accepted on this connection now.
    pub(crate) fn is_writable_for(&self, world: &World, id: ConnectionId, len: usize) -> bool {
        let Some(slot) = world.table.get(id) else { return false };
        let conn = &slot.conn;
        if conn.writable() == 0 || len <= conn.terms().buffer_size {
            return conn.writable() > 0;
        }
        let claimant = Claimant { who: id, host: None, own: conn.copies() };
        conn.may_cut(len) || (conn.may_offer(len) && self.copied.would_grant(claimant, self.charge(len)))
    }

    /// Returns the limit of the memory for copies of large messages, in bytes.
    pub(crate) const fn copied_limit(&self) -> u64 {
        self.copied.limit() as u64
    }

    /// Copies the fragments of a message to one block of memory. If the memory budget covers this
    /// block, the receives of the fragments are freed now. Otherwise the receives stay occupied
    /// until the program releases the message. This limits the memory that a peer can use.
    pub(crate) fn join(&mut self, world: &mut World, id: ConnectionId, mut fragments: Box<Fragments>) -> JoinedMessage {
        let (device, len) = (fragments.device, fragments.len);
        let accounted = self.take_fetched(world, id, len);
        let mut bytes = world.joins.take(len);
        let buffers = world.devices.buffers(device);
        let shared = world.table.get(id).is_some_and(|slot| slot.conn.receives.is_shared());
        let parts = if crate::planted("last-fragment-forgotten") { fragments.parts.len() - 1 } else { usize::MAX };
        for (buffer, end) in fragments.parts.iter().take(parts) {
            bytes.extend_from_slice(&buffers.pool.slabs().bytes(buffer, *end as usize)[HEADER_LEN..]);
        }
        let mut receives = Vec::new();
        for (buffer, _) in fragments.parts.drain(..) {
            if accounted {
                buffers.free_receive(buffer, shared);
            } else {
                receives.push(buffer);
            }
        }
        if let Some(slot) = world.table.get_mut(id) {
            slot.conn.recycle(fragments);
        }
        JoinedMessage { bytes, receives }
    }

    /// Releases a joined message that the program has not kept after its callback.
    pub(crate) fn end_joined(
        &mut self,
        world: &mut World,
        id: ConnectionId,
        device: usize,
        JoinedMessage { bytes, receives }: JoinedMessage,
    ) {
        if receives.is_empty() {
            self.settle(world, MemoryUse::Fetched, bytes.len(), Some(id));
        }
        let shared = world.table.get(id).is_some_and(|slot| slot.conn.receives.is_shared());
        for buffer in receives {
            world.devices.buffers(device).free_receive(buffer, shared);
        }
        world.joins.keep(bytes);
        world.expect_trim();
    }
}
