//! The memory for messages longer than one buffer: copies that peers will fetch, and messages that are fetched from peers.

use std::ops::Range;
use std::time::Duration;

use rdma_transport::caps::Features;
use rdma_transport::mem::page_size;
use rdma_transport::newcomers::Host;

use crate::config::Framing;
use crate::conn::Need;
use crate::conn::shortage::PROBE;
use crate::conn::transfer::{OfferKind, OfferSource};
use crate::driver::table::ConnectionSlot;
use crate::driver::{Driver, TimerPurpose};
use crate::error::{Blocked, SendErrorKind};
use crate::id::{ConnectionId, OfferId, SendId};
use crate::memory::budget::{Budget, Claimant, MemoryShortage, MemoryUse};
use crate::memory::joins::Joins;
use crate::memory::landing::Landing;
use crate::memory::operations::outside;
use crate::memory::region::{Region, RemoteRegion};
use crate::security::Sealer;
use crate::security::channel::{SEGMENT, TAG, segment, segments};

/// A connection whose peer has answered no Read for this time ends, if its messages use memory that other connections wait for. A path of 5
/// Mbit/s transfers more than a mebibyte in this time.
const GRACE: Duration = Duration::from_secs(2);

/// The interval at which the use of memory is checked while connections wait for memory.
const LOOK: Duration = Duration::from_millis(50);

/// The memory that large messages use, and the requests that wait for it.
#[derive(Debug)]
pub(crate) struct LargeMessages {
    copied: Budget,
    fetched: Budget,
    /// The number of bytes that a message counts for at least.
    least: usize,
    /// True if a timer for [`Driver::relieve_shortage`] is set.
    looks: bool,
    /// The memory in which messages that arrive in several buffers are joined.
    pub(in crate::driver) joins: Joins,
}

impl LargeMessages {
    pub(in crate::driver) fn new(limit: usize, keep: usize) -> Self {
        let (copied, fetched) = (Budget::new(limit), Budget::new(limit));
        let least = page_size().min(fetched.small());
        Self { copied, fetched, least, looks: false, joins: Joins::new(keep) }
    }

    /// Returns the number of bytes that a message of `len` bytes counts for. A peer may offer
    /// single bytes, or accept messages of one byte in a buffer. Each message occupies a page.
    fn charge(&self, len: usize) -> usize {
        len.max(self.least)
    }

    /// Returns the number of bytes that fetched messages use, and the number of bytes that copies use.
    pub(in crate::driver) const fn levels(&self) -> (usize, usize) {
        (self.fetched.used(), self.copied.used())
    }
}

/// The payload of a large message.
#[derive(Debug)]
pub(in crate::driver) enum LargePayload<'a> {
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
            // A region is never copied here: the peer reads from the region.
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

impl Driver {
    /// Returns the limit of the memory for copies of large messages, in bytes.
    pub(crate) const fn copied_limit(&self) -> u64 {
        self.large.copied.limit() as u64
    }

    /// Sends a payload that is too long for one buffer. If there is capacity for all its fragments, the payload is sent in several buffers.
    /// Otherwise a copy of the payload is offered to the peer. The copy is encrypted if the connection is secured.
    #[cold]
    pub(in crate::driver) fn send_large(
        &mut self,
        id: ConnectionId,
        payload: LargePayload<'_>,
    ) -> Result<SendId, SendErrorKind> {
        // The program waits for the end of the send before it reuses its region, so the end must be reported.
        let told = matches!(payload, LargePayload::Region(..));
        let cut = self.input(id, |conn, env| {
            let len = payload.len();
            conn.may_cut(len).then(|| conn.send_cut(len, told, env, |range, room| payload.part(range, room)))
        });
        if let Some(sent) = cut.flatten() {
            return sent;
        }
        if !payload.is_readable() {
            return Err(SendErrorKind::Sealed);
        }
        let (len, most) = (payload.len(), self.large.copied.limit());
        if len > most {
            return Err(SendErrorKind::TooLong { len, max: most });
        }
        let own = self.input(id, |conn, env| {
            conn.check_offer(len, OfferKind::Copied, env)?;
            Ok::<_, SendErrorKind>(conn.copies())
        });
        let claimant = Claimant { who: id, host: None, own: own.ok_or(SendErrorKind::Closed)?? };
        if !self.large.copied.request(claimant, self.large.charge(len)) {
            self.input(id, |conn, env| conn.refuse_transfer(len, OfferKind::Copied, env));
            return Err(SendErrorKind::WouldBlock(Blocked::Memory));
        }
        self.leave_copied(id);
        let mut region = match self.block(id, len, MemoryUse::Copied) {
            Ok(region) => Box::new(region),
            Err(error) => {
                self.large.copied.give_back(self.large.charge(len));
                failure_log!(self, id, "memory for a message of {len} bytes: {error}");
                return Err(SendErrorKind::NoMemory { len });
            }
        };
        let (slot, _) = self.at(id).ok_or(SendErrorKind::Closed)?;
        // If the copy cannot be made, `region` is dropped, which releases its memory.
        let copied = match slot.conn.sealer_mut() {
            Some(sealer) => seal(sealer, &payload, &mut region),
            None => payload.copy_to(&mut region),
        };
        if !copied {
            self.input(id, |conn, env| conn.posting_failed("a large message could not be sealed".into(), env));
            return Err(SendErrorKind::Closed);
        }
        let remote = RemoteRegion { len: len as u64, ..region.remote() };
        self.input(id, |conn, env| conn.offer(remote, None, OfferSource::Copy { region, told }, env))
            .ok_or(SendErrorKind::Closed)
    }

    /// Sends a range of a region. The range is not copied, unless the connection is secured.
    pub(crate) fn send_region(
        &mut self,
        id: ConnectionId,
        region: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        let slot = self.open_slot(id)?;
        let conn = &slot.conn;
        let (max, raw, secured) = (conn.terms().buffer_size, conn.framing() == Framing::Raw, conn.is_secured());
        self.check_local(slot, region, &range)?;
        if range.len() <= max || raw {
            return self.input(id, |conn, env| conn.send_from(region, range, env)).ok_or(SendErrorKind::Closed)?;
        }
        if secured {
            // The peer reads an encrypted copy. A Read of the region itself would transfer plaintext.
            let max = usize::try_from(conn.terms().max_message).unwrap_or(usize::MAX);
            if range.len() > max {
                return Err(SendErrorKind::TooLong { len: range.len(), max });
            }
            return self.send_large(id, LargePayload::Region(region, range));
        }
        if !self.registry.readable_by(region.key(), id) {
            return Err(SendErrorKind::NotReadable { max });
        }
        if self.table.get(id).is_some_and(|slot| slot.conn.may_cut(range.len())) {
            return self.input(id, |conn, env| conn.send_cut_from(region, &range, env)).ok_or(SendErrorKind::Closed)?;
        }
        self.offer_checked(id, region, range, None)
    }

    /// Offers a range of a region to the peer, with a tag. The range must not be empty.
    pub(crate) fn offer(
        &mut self,
        id: ConnectionId,
        region: &Region,
        range: Range<usize>,
        tag: u64,
    ) -> Result<SendId, SendErrorKind> {
        let slot = self.open_slot(id)?;
        if slot.conn.is_secured() {
            return Err(self.lacks(id, "tagged offers on secured connections"));
        }
        self.check_local(slot, region, &range)?;
        if range.is_empty() {
            return Err(SendErrorKind::Empty);
        }
        if !self.registry.readable_by(region.key(), id) {
            return Err(SendErrorKind::NotReadable { max: 0 });
        }
        self.offer_checked(id, region, range, Some(tag))
    }

    /// Offers a range of a region. The caller has checked that the peer may read the region.
    fn offer_checked(
        &mut self,
        id: ConnectionId,
        region: &Region,
        range: Range<usize>,
        tag: Option<u64>,
    ) -> Result<SendId, SendErrorKind> {
        let (start, len) = (range.start as u64, range.len());
        let remote = region.remote().part(start, len as u64).ok_or_else(|| outside(region, &range))?;
        let kind = if tag.is_some() { OfferKind::Tagged } else { OfferKind::Lent };
        self.input(id, |conn, env| {
            conn.check_offer(len, kind, env)?;
            let hold = region.lend_to_peer(range);
            Ok(conn.offer(remote, tag, OfferSource::Lent(region.key(), hold), env))
        })
        .ok_or(SendErrorKind::Closed)?
    }

    /// Accepts an offered message. The message will be read into a region of the program, to the position `offset`.
    pub(crate) fn land(
        &mut self,
        id: ConnectionId,
        offer: OfferId,
        region: &mut Region,
        offset: usize,
    ) -> Result<(), SendErrorKind> {
        let slot = self.open_slot(id)?;
        let conn = &slot.conn;
        let (len, secured) = (conn.offered_len(offer).ok_or(SendErrorKind::NoOffer)?, conn.is_secured());
        if secured {
            return Err(self.lacks(id, "landing places on secured connections"));
        }
        let end = usize::try_from(len).ok().and_then(|len| offset.checked_add(len));
        let range = offset..end.ok_or(SendErrorKind::OutOfBounds { end: u64::MAX, len: region.len() as u64 })?;
        self.check_local(slot, region, &range)?;
        if self.has(id, Features::OPEN_READ_SINKS) && !self.registry.is_sink(region.key()) {
            return Err(SendErrorKind::NotASink);
        }
        let lease = region.lease_mut(range.clone()).ok_or_else(|| outside(region, &range))?;
        let landing = Landing::new(region.key(), lease, offset);
        self.input(id, |conn, env| conn.land(offer, landing, env)).ok_or(SendErrorKind::Closed)
    }

    /// Refuses an offered message.
    pub(crate) fn refuse_offer(&mut self, id: ConnectionId, offer: OfferId) -> Result<(), SendErrorKind> {
        self.open_slot(id)?;
        let refused = self.input(id, |conn, env| conn.refuse_offer(offer, env));
        if refused == Some(true) { Ok(()) } else { Err(SendErrorKind::NoOffer) }
    }

    /// Returns the identification of a connection for requests to the memory budget of fetched messages.
    fn claimant(slot: &ConnectionSlot) -> Claimant {
        let host = Some(Host::of(slot.conn.peer().ip()));
        Claimant { who: slot.conn.id(), host, own: slot.link.fetched }
    }

    /// Assigns memory to the offered messages of a connection, in order, while the budget grants it. While at most a quarter of all memory
    /// is in use, every peer gets memory. Beyond that, only a peer that has answered a Read within the last 2 seconds gets memory, or waits
    /// until more is free.
    pub(in crate::driver) fn find_memory(&mut self, id: ConnectionId) {
        while let Some(slot) = self.table.get_mut(id).filter(|slot| slot.conn.state().is_open()) {
            let Some(len) = slot.conn.wants_memory() else { return };
            let (claimant, charge) = (Self::claimant(slot), self.large.charge(len));
            if !slot.conn.has_shown(self.now) && !self.large.fetched.would_trust(claimant, charge) {
                // The peer has answered no Read recently. Its connection leaves the queue, so that it does not delay the connections behind
                // it.
                self.leave_fetched(id);
                return self.probe(id);
            }
            if !self.large.fetched.request(claimant, charge) {
                self.input(id, |conn, env| conn.wait_for_memory(env));
                self.expect_shortage();
                return self.probe(id);
            }
            slot.link.fetched += charge;
            slot.link.fetched_large += if self.large.fetched.is_small(charge) { 0 } else { charge };
            self.leave_fetched(id);
            match self.block(id, len, MemoryUse::Fetched) {
                Ok(region) => {
                    self.input(id, |conn, _| conn.give_memory(region));
                }
                Err(error) => {
                    self.give_back_fetched(Some(id), len);
                    failure_log!(self, id, "memory to fetch a message of {len} bytes: {error}");
                    self.input(id, |conn, env| conn.posting_failed(error.to_string(), env));
                    return;
                }
            }
        }
    }

    /// Sends a Read of a few bytes to a peer that has answered no Read recently. When the peer answers this Read, its connection requests
    /// memory again.
    fn probe(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get(id).filter(|slot| slot.conn.may_probe(self.now)) else { return };
        if !slot.conn.has_probe() {
            match self.block(id, PROBE as usize, MemoryUse::Program) {
                Ok(region) => _ = self.input(id, |conn, _| conn.take_probe(region)),
                Err(error) => {
                    failure_log!(self, id, "memory for a read of {PROBE} bytes: {error}");
                    self.input(id, |conn, env| conn.posting_failed(error.to_string(), env));
                    return;
                }
            }
        }
        self.input(id, |conn, env| conn.probe(env));
    }

    /// Schedules a check of the use of memory, because a connection waits for memory.
    fn expect_shortage(&mut self) {
        if !std::mem::replace(&mut self.large.looks, true) {
            self.timers.insert(self.now + LOOK, TimerPurpose::Shortage);
        }
    }

    /// Called while connections wait for memory. Ends connections whose peers have answered no Read for at least `GRACE`, if a waiting
    /// connection can use the memory that is released in this way. Begins with the connections that have stalled longest, and ends no more
    /// of them than necessary. Connections that make progress keep their memory.
    pub(in crate::driver) fn relieve_shortage(&mut self) {
        self.large.looks = false;
        if self.large.fetched.in_line().next().is_none() {
            return;
        }
        self.expect_shortage();
        let shortages = self.large.fetched.shortages();
        if shortages.is_empty() {
            return;
        }
        let grace = GRACE.min(self.config.timeouts.transfer);
        let (mut stalled, mut ending, mut giving_way) = (Vec::new(), Vec::new(), Vec::new());
        for slot in self.table.iter().filter(|slot| slot.link.fetched > 0) {
            let (id, host) = (slot.conn.id(), Host::of(slot.conn.peer().ip()));
            match slot.conn.stalled().filter(|_| slot.conn.state().is_open()) {
                Some((since, held)) if since + grace <= self.now => stalled.push((since, (id, host, held))),
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
            self.input(id, |conn, env| conn.give_way(env));
        }
    }

    /// Charges an arrived message of `len` bytes to a connection. Returns false if the budget does
    /// not cover it.
    pub(in crate::driver) fn take_fetched(&mut self, id: ConnectionId, len: usize) -> bool {
        let Some(slot) = self.table.get_mut(id) else { return false };
        let charge = self.large.charge(len);
        let taken = self.large.fetched.take(Self::claimant(slot), charge);
        if taken {
            slot.link.fetched += charge;
            slot.link.fetched_large += if self.large.fetched.is_small(charge) { 0 } else { charge };
        }
        taken
    }

    /// Returns the memory of a message of `len` bytes to the budget. If the connection `id` still
    /// exists, the message is no longer charged to it.
    fn give_back_fetched(&mut self, id: Option<ConnectionId>, len: usize) {
        let charge = self.large.charge(len);
        self.large.fetched.give_back(charge);
        if let Some(slot) = id.and_then(|id| self.table.get_mut(id)) {
            slot.link.fetched = slot.link.fetched.saturating_sub(charge);
            if !self.large.fetched.is_small(charge) {
                slot.link.fetched_large = slot.link.fetched_large.saturating_sub(charge);
                self.large.fetched.relieve(Host::of(slot.conn.peer().ip()), charge);
            }
        }
    }

    /// Notes that a connection has ended. Memory that it still uses is no longer charged to the
    /// host of its peer, so other connections of that host may get memory now.
    pub(in crate::driver) fn relieve(&mut self, slot: &ConnectionSlot) {
        if slot.link.fetched_large > 0 {
            self.large.fetched.relieve(Host::of(slot.conn.peer().ip()), slot.link.fetched_large);
            if !crate::planted("an-ended-connection-gives-its-share-to-nobody") {
                self.ask_for_memory();
            }
        }
    }

    /// Handles the release of the memory of a large message: returns the memory to the budget, and notifies the connections that wait for
    /// memory. `id` is the connection of the message.
    pub(in crate::driver) fn settle(&mut self, account: MemoryUse, len: usize, id: Option<ConnectionId>) {
        match account {
            MemoryUse::Program => {}
            MemoryUse::Copied => {
                self.large.copied.give_back(self.large.charge(len));
                self.effects.to_ask.extend(self.large.copied.in_line());
            }
            MemoryUse::Fetched => {
                self.give_back_fetched(id, len);
                self.ask_for_memory();
            }
        }
    }

    /// Removes the memory requests of a connection. If they have held back others, checks if those can be granted now.
    pub(in crate::driver) fn leave_lines(&mut self, id: ConnectionId) {
        self.leave_copied(id);
        self.leave_fetched(id);
    }

    fn leave_copied(&mut self, id: ConnectionId) {
        if self.large.copied.leave(id) {
            self.effects.to_ask.extend(self.large.copied.in_line());
            self.ring();
        }
    }

    fn leave_fetched(&mut self, id: ConnectionId) {
        if self.large.fetched.leave(id) {
            self.ask_for_memory();
        }
    }

    /// Makes the next flush request memory again for the connections that wait for memory to fetch messages. If a flush is in progress, no
    /// other one may follow in this turn, so this function triggers another turn.
    fn ask_for_memory(&mut self) {
        let waiting = self.large.fetched.in_line().collect::<Vec<_>>();
        if !waiting.is_empty() {
            self.os.wake.wake();
        }
        for id in waiting {
            self.input(id, |conn, env| conn.mark(env));
        }
    }

    /// Finds the next connection on which a send was refused and would be accepted now, and queues its `on_writable`. Returns false if
    /// there is no such connection. `on_writable` is called once for each refusal. The caller runs each callback before it calls this
    /// function again, because the callback may use the capacity that another connection waits for.
    #[inline]
    pub(crate) fn next_writable(&mut self) -> bool {
        !self.effects.to_ask.is_empty() && self.ask_writable()
    }

    fn ask_writable(&mut self) -> bool {
        while let Some(id) = self.effects.to_ask.pop_front() {
            let Some(slot) = self.table.get(id) else { continue };
            let memory = match slot.conn.is_unblocked() {
                None => continue,
                Some(Need::Transfer { copy, .. }) if copy > 0 => {
                    let claimant = Claimant { who: id, host: None, own: slot.conn.copies() };
                    let charge = self.large.charge(copy);
                    let granted = self.large.copied.would_grant(claimant, charge);
                    if !granted {
                        // If the send was refused before for lack of something else, its connection is not in the queue for memory yet.
                        // When memory is released, only the connections in this queue are asked again.
                        let queued = !self.large.copied.request(claimant, charge);
                        debug_assert!(queued, "memory that would not be granted was granted");
                    }
                    granted
                }
                Some(_) => true,
            };
            if memory {
                if let Some((slot, mut env)) = self.at(id) {
                    slot.conn.unblock(&mut env);
                    self.leave_copied(id);
                    return true;
                }
            }
        }
        false
    }

    /// Returns true if a message of `len` bytes would be accepted on this connection now.
    pub(crate) fn is_writable_for(&self, id: ConnectionId, len: usize) -> bool {
        let Some(slot) = self.table.get(id) else { return false };
        let conn = &slot.conn;
        if conn.writable() == 0 || len <= conn.terms().buffer_size {
            return conn.writable() > 0;
        }
        let claimant = Claimant { who: id, host: None, own: conn.copies() };
        conn.may_cut(len) || (conn.may_offer(len) && self.large.copied.would_grant(claimant, self.large.charge(len)))
    }
}
