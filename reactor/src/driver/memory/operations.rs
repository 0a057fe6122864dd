//! The calls of the program that move memory: one-sided operations, lists of them, and messages
//! that the peer reads from a region.

use std::ops::Range;

use rdma_transport::caps::Features;
use rdma_transport::wr::{MAX_SGE, SendOp, Sge};

use crate::config::Framing;
use crate::conn::frame::Immediate;
use crate::conn::list::{CONFIRMATION_LEN, ListDirection, Order};
use crate::conn::transfer::{OfferKind, OfferSource};
use crate::device::return_channel::{JoinedMessage, PoolId};
use crate::driver::Driver;
use crate::driver::memory::large::LargePayload;
use crate::driver::stages::Stages;
use crate::driver::table::ConnectionSlot;
use crate::error::{MemoryLocation, SendErrorKind};
use crate::id::{ConnectionId, OfferId, SendId, SendKind, TransferId};
use crate::memory::budget::MemoryUse;
use crate::memory::landing::Landing;
use crate::memory::list::{Piece, Transfer, TransferNotification, TransferOptions};
use crate::memory::operations::{Locals, outside};
use crate::memory::region::{Region, RemoteRegion};

/// A region, and the range of this region that an operation reads.
type LocalRange<'a> = (&'a Region, Range<usize>);

impl Driver {
    /// Reads from the start of `remote` into several local ranges, in their order.
    pub(crate) fn read(
        &mut self,
        id: ConnectionId,
        remote: RemoteRegion,
        locals: &mut [(&mut Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        let parts = locals.iter().map(|(region, range)| (&**region, range));
        self.check_parts(self.world.open_slot(id)?, remote, parts)?;
        let are_sinks = || locals.iter().all(|(region, _)| self.world.registry.is_sink(region.key()));
        if self.has(id, Features::OPEN_READ_SINKS) && !are_sinks() {
            return Err(SendErrorKind::NotASink);
        }
        let slots = locals.len();
        self.input(id, |conn, env| {
            conn.check_operation(slots, false, env)?;
            let locals = Locals::to_write(locals)?;
            Ok(conn.read(remote.address(), locals, env))
        })
        .ok_or(SendErrorKind::Closed)?
    }

    /// Writes several local ranges to the start of `remote`, in their order. If `immediate` is set,
    /// the peer is notified, and receives this value.
    pub(crate) fn write(
        &mut self,
        id: ConnectionId,
        remote: RemoteRegion,
        locals: &[LocalRange<'_>],
        immediate: Option<u32>,
    ) -> Result<SendId, SendErrorKind> {
        let slot = self.world.open_slot(id)?;
        let len = self.check_parts(slot, remote, locals.iter().map(|(region, range)| (*region, range)))?;
        let native = immediate.is_some() && self.world.features(slot).contains(Features::WRITE_WITH_IMMEDIATE);
        let tells = immediate.is_some() && !native;
        if tells && slot.conn.framing() == Framing::Raw {
            return Err(self.lacks(id, "writes with immediate data"));
        }
        if tells && self.world.config.send_depth < 2 {
            return Err(self.lacks(id, "writes with immediate data while send_depth is 1"));
        }
        let Some((slot, mut env, provider)) = self.world.at_with_provider(id) else {
            return Err(SendErrorKind::Closed);
        };
        let (conn, to) = (&mut slot.conn, remote.address());
        if let ([(region, range)], None, Some(qp)) = (locals, immediate, slot.link.qp) {
            let now = || {
                let role = region.entry(range.clone()).zip(provider.immediate_sends());
                role.is_some_and(|(entry, role)| role.write_now(qp, &entry, to))
            };
            if let Some(id) = conn.write_now(&mut env, now) {
                self.act();
                return Ok(id);
            }
        }
        let mut post = || {
            conn.check_operation(if tells { 2 } else { 1 }, immediate.is_some(), &mut env)?;
            let locals = Locals::to_read(locals)?;
            Ok(match immediate {
                None => conn.operate(SendKind::Write, SendOp::Write(to), locals, &mut env),
                Some(value) if native => {
                    conn.operate(SendKind::Write, SendOp::WriteWithImmediate(to, value), locals, &mut env)
                }
                Some(value) => conn.write_and_tell(to, locals, Immediate { value, len }, &mut env),
            })
        };
        let posted = post();
        self.act();
        posted
    }

    /// Posts an atomic operation on the first 8 bytes of `remote`. The old value will be stored at
    /// `offset` in `local`.
    pub(crate) fn atomic(
        &mut self,
        id: ConnectionId,
        remote: RemoteRegion,
        (local, offset): (&mut Region, usize),
        op: SendOp,
        kind: SendKind,
    ) -> Result<SendId, SendErrorKind> {
        let range = offset..offset.saturating_add(8);
        self.check_parts(self.world.open_slot(id)?, remote, std::iter::once((&*local, &range)))?;
        if !self.has(id, Features::ATOMICS) {
            return Err(self.lacks(id, "atomic operations"));
        }
        for (location, at) in [(MemoryLocation::Local, offset as u64), (MemoryLocation::Remote, remote.address)] {
            if at % 8 != 0 {
                return Err(SendErrorKind::Misaligned { location, at });
            }
        }
        self.input(id, |conn, env| {
            conn.check_operation(1, false, env)?;
            let locals = Locals::to_write(&mut [(local, range)])?;
            Ok(conn.operate(kind, op, locals, env))
        })
        .ok_or(SendErrorKind::Closed)?
    }

    /// Checks a list of Reads or Writes, and starts the transfer of the list. Returns the id of the
    /// transfer.
    pub(crate) fn transfer(
        &mut self,
        id: ConnectionId,
        mut transfer: Transfer<'_>,
        pieces: Vec<Piece>,
        options: &TransferOptions,
    ) -> Result<TransferId, SendErrorKind> {
        let slot = self.world.open_slot(id)?;
        let conn = &slot.conn;
        let (raw, max) = (conn.framing() == Framing::Raw, conn.terms().buffer_size);
        match &options.notification {
            Some(TransferNotification::Message(payload)) if payload.len() > max => {
                return Err(SendErrorKind::TooLong { len: payload.len(), max });
            }
            Some(TransferNotification::Immediate(_)) if raw => {
                return Err(self.lacks(id, "immediate data behind a list"));
            }
            _ => {}
        }
        if self.world.hides_memory(slot) {
            return Err(SendErrorKind::PlainRemoteMemory);
        }
        let sinks = transfer.is_read() && self.world.features(slot).contains(Features::OPEN_READ_SINKS);
        for region in (0..transfer.len()).filter_map(|index| transfer.region(index)) {
            self.check_local(slot, region, &(0..region.len()))?;
            if sinks && !self.world.registry.is_sink(region.key()) {
                return Err(SendErrorKind::NotASink);
            }
        }
        let longest = self.world.device_of(slot).map_or(0, |device| device.max_message);
        let longest = usize::try_from(longest.min(Sge::MAX_LEN.into())).unwrap_or(usize::MAX);
        let direction = match transfer {
            Transfer::Read(_) => ListDirection::Read,
            Transfer::Write(_) if self.world.features(slot).contains(Features::ACKNOWLEDGED_WRITES) => {
                ListDirection::PlacedWrite
            }
            Transfer::Write(_) => ListDirection::Write,
        };
        let confirmation = if direction == ListDirection::Write && options.confirm {
            Some(Box::new(self.world.block(id, CONFIRMATION_LEN, MemoryUse::Program).map_err(|error| {
                failure_log!(self, id, "memory for a read of {CONFIRMATION_LEN} bytes: {error}");
                SendErrorKind::NoMemory { len: CONFIRMATION_LEN }
            })?))
        } else {
            None
        };
        let leases = transfer.lease(&pieces, longest)?;
        self.world.look_at_clock();
        let deadline = self.world.now.checked_add(options.within);
        let order =
            Order { pieces, leases, direction, deadline, notification: options.notification.clone(), confirmation };
        self.input(id, |conn, env| conn.begin_list(order, env)).ok_or(SendErrorKind::Closed)
    }

    /// Cancels a list, so that no more of its pieces are posted. Returns false if there is no such
    /// list.
    pub(crate) fn cancel_transfer(&mut self, id: ConnectionId, transfer: TransferId) -> bool {
        // If the program has closed the connection, the close may have waited for this list, so
        // stage 10 checks if the connection can end now.
        self.world.note(Stages::ENDS);
        self.world.ring();
        self.input(id, |conn, env| conn.cancel_list(transfer, env)).unwrap_or(false)
    }

    /// Sends a range of a region. The range is not copied, unless the connection is secured.
    pub(crate) fn send_region(
        &mut self,
        id: ConnectionId,
        region: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        let slot = self.world.open_slot(id)?;
        let conn = &slot.conn;
        let (max, raw, secured) = (conn.terms().buffer_size, conn.framing() == Framing::Raw, conn.is_secured());
        self.check_local(slot, region, &range)?;
        if range.len() <= max || raw {
            return self.input(id, |conn, env| conn.send_from(region, range, env)).ok_or(SendErrorKind::Closed)?;
        }
        if secured {
            // The peer reads an encrypted copy. A Read of the region itself would transfer
            // plaintext.
            let max = usize::try_from(conn.terms().max_message).unwrap_or(usize::MAX);
            if range.len() > max {
                return Err(SendErrorKind::TooLong { len: range.len(), max });
            }
            let sent = self.large.send_large(&mut self.world, id, LargePayload::Region(region, range));
            self.act();
            return sent;
        }
        if !self.world.registry.readable_by(region.key(), id) {
            return Err(SendErrorKind::NotReadable { max });
        }
        if self.world.table.get(id).is_some_and(|slot| slot.conn.may_cut(range.len())) {
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
        let slot = self.world.open_slot(id)?;
        if slot.conn.is_secured() {
            return Err(self.lacks(id, "tagged offers on secured connections"));
        }
        self.check_local(slot, region, &range)?;
        if range.is_empty() {
            return Err(SendErrorKind::Empty);
        }
        if !self.world.registry.readable_by(region.key(), id) {
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

    /// Accepts an offered message. The message will be read into a region of the program, to the
    /// position `offset`.
    pub(crate) fn land(
        &mut self,
        id: ConnectionId,
        offer: OfferId,
        region: &mut Region,
        offset: usize,
    ) -> Result<(), SendErrorKind> {
        let slot = self.world.open_slot(id)?;
        let conn = &slot.conn;
        let (len, secured) = (conn.offered_len(offer).ok_or(SendErrorKind::NoOffer)?, conn.is_secured());
        if secured {
            return Err(self.lacks(id, "landing places on secured connections"));
        }
        let end = usize::try_from(len).ok().and_then(|len| offset.checked_add(len));
        let range = offset..end.ok_or(SendErrorKind::OutOfBounds { end: u64::MAX, len: region.len() as u64 })?;
        self.check_local(slot, region, &range)?;
        if self.has(id, Features::OPEN_READ_SINKS) && !self.world.registry.is_sink(region.key()) {
            return Err(SendErrorKind::NotASink);
        }
        let lease = region.lease_mut(range.clone()).ok_or_else(|| outside(region, &range))?;
        let landing = Landing::new(region.key(), lease, offset);
        self.input(id, |conn, env| conn.land(offer, landing, env)).ok_or(SendErrorKind::Closed)
    }

    /// Refuses an offered message.
    pub(crate) fn refuse_offer(&mut self, id: ConnectionId, offer: OfferId) -> Result<(), SendErrorKind> {
        self.world.open_slot(id)?;
        let refused = self.input(id, |conn, env| conn.refuse_offer(offer, env));
        if refused == Some(true) { Ok(()) } else { Err(SendErrorKind::NoOffer) }
    }

    /// Returns true if a connection supports a feature.
    pub(crate) fn has(&self, id: ConnectionId, feature: Features) -> bool {
        self.world.table.get(id).is_some_and(|slot| self.world.features(slot).contains(feature))
    }

    fn lacks(&self, id: ConnectionId, feature: &'static str) -> SendErrorKind {
        let provider = self.world.table.get(id).map_or(0, |slot| slot.link.cm.provider);
        SendErrorKind::Unsupported { provider: self.world.providers.get(provider).name(), feature }
    }

    /// Checks that a region is registered on the connection's device, and that a range is inside
    /// the region.
    #[inline]
    fn check_local(&self, slot: &ConnectionSlot, region: &Region, range: &Range<usize>) -> Result<(), SendErrorKind> {
        if !self.world.registry.knows(region)
            || slot.link.binding.is_none_or(|binding| binding.device != region.device())
        {
            return Err(SendErrorKind::ForeignRegion);
        }
        if range.start > range.end || range.end > region.len() { Err(outside(region, range)) } else { Ok(()) }
    }

    /// Checks the local and the remote ranges of an operation. Returns the total length of the
    /// local ranges, in bytes.
    #[inline]
    fn check_parts<'a>(
        &self,
        slot: &ConnectionSlot,
        remote: RemoteRegion,
        locals: impl ExactSizeIterator<Item = (&'a Region, &'a Range<usize>)>,
    ) -> Result<u32, SendErrorKind> {
        if self.world.hides_memory(slot) {
            return Err(SendErrorKind::PlainRemoteMemory);
        }
        let count = locals.len();
        if !(1..=MAX_SGE).contains(&count) {
            return Err(SendErrorKind::TooManyRegions { count, max: MAX_SGE });
        }
        let mut total = 0_u64;
        for (region, range) in locals {
            self.check_local(slot, region, range)?;
            total += range.len() as u64;
        }
        if total > remote.len {
            return Err(SendErrorKind::OutOfBounds { end: total, len: remote.len });
        }
        let max = self.world.device_of(slot).map_or(0, |device| device.max_message.min(u32::MAX.into()));
        if total > max {
            return Err(SendErrorKind::TooLong { len: total as usize, max: max as usize });
        }
        Ok(total as u32)
    }

    /// Releases a joined message that the program has not kept after its callback.
    pub(crate) fn end_joined(&mut self, id: ConnectionId, device: usize, joined: JoinedMessage) {
        self.large.end_joined(&mut self.world, id, device, joined);
        self.act();
    }

    /// Returns true if a message of `len` bytes would be accepted on this connection now.
    pub(crate) fn is_writable_for(&self, id: ConnectionId, len: usize) -> bool {
        self.large.is_writable_for(&self.world, id, len)
    }

    /// Returns the limit of the memory for copies of large messages, in bytes.
    pub(crate) const fn copied_limit(&self) -> u64 {
        self.large.copied_limit()
    }

    /// Releases a joined message that the program kept after its callback.
    pub(crate) fn take_joined_home(&mut self, pool: PoolId, joined: JoinedMessage, of: Option<ConnectionId>) {
        let JoinedMessage { bytes, receives } = joined;
        if receives.is_empty() {
            self.large.settle(&mut self.world, MemoryUse::Fetched, bytes.len(), of);
            self.act();
        }
        for buffer in receives {
            self.take_home(pool, buffer, of);
        }
        self.world.joins.keep(bytes);
        self.world.expect_trim();
    }
}
