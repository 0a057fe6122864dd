//! Messages past one buffer: the sender offers its memory, the receiver reads it and says so.
//!
//! An offer is a message and takes its place among them: what comes behind it is held until it has been fetched, unless
//! messages may overtake. The bytes come by RDMA Read in pieces, so that other traffic and signs of life get between them.

use std::collections::VecDeque;
use std::ops::Range;

use rdma_transport::mem::Memory;
use rdma_transport::mr::Access;
use rdma_transport::slab::Key;
use rdma_transport::wr::{SendOp, SgeList};

use crate::config::{CONTROL_SENDS, Framing};
use crate::connection::{Connection, Holds, Phase, Send};
use crate::context::Context;
use crate::core::Core;
use crate::error::{Error, Outcome, PeerViolation, SendErrorKind};
use crate::frame::{HEADER_LEN, Header, Kind};
use crate::handler::{Handler, Immediate};
use crate::id::{ConnectionId, SendId, SendKind};
use crate::pool::Buffer;
use crate::region::{Hold, Region, RegionOptions, RemoteRegion};

/// Transfers of a connection that may be under way, in each direction.
pub(crate) const MAX_TRANSFERS: usize = 16;

/// Bytes of one read.
const PIECE: u64 = 1 << 20;

/// Bytes that are not left for a last read of their own: siw of Linux 6.1 answers a read of at most 32 bytes that crosses
/// a page with others.
const CRUMB: u64 = 64;

/// Reads of a connection on their way.
const PIECES: usize = 4;

/// How much of what is left to read next.
fn piece(left: u64) -> u64 {
    if left > PIECE && left < PIECE + CRUMB { PIECE - CRUMB } else { left.min(PIECE) }
}

/// What an offer says: `id:4 | zero:4 | region:20`, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    id: u32,
    region: RemoteRegion,
}

impl Offer {
    const LEN: usize = 8 + RemoteRegion::LEN;

    fn emit(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&self.id.to_le_bytes());
        out[8..].copy_from_slice(&self.region.to_bytes());
        out
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let (id, rest) = bytes.split_first_chunk()?;
        let (zero, region) = rest.split_first_chunk::<4>()?;
        (*zero == [0; 4]).then_some(())?;
        Some(Self { id: u32::from_le_bytes(*id), region: RemoteRegion::from_bytes(region)? })
    }
}

/// A message that the peer is to fetch.
#[derive(Debug)]
struct Outgoing {
    id: u32,
    send: SendId,
    key: Key,
    hold: Hold,
}

/// A message that is being fetched.
#[derive(Debug)]
struct Incoming {
    offer: Offer,
    /// Once there was memory for it.
    region: Option<Region>,
    /// Bytes whose reads are on their way or done.
    asked: u64,
    done: u64,
}

/// What waits for its turn to be delivered.
#[derive(Debug)]
enum Held {
    /// The oldest transfer that was not delivered.
    Transfer,
    Message {
        buffer: Buffer,
        end: usize,
    },
    Immediate(Immediate),
}

/// The large messages of one connection.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    next: u32,
    outgoing: VecDeque<Outgoing>,
    incoming: VecDeque<Incoming>,
    held: VecDeque<Held>,
    /// Fetched, and the peer is not told yet.
    fetched: VecDeque<u32>,
    /// Reads on their way.
    pieces: usize,
}

impl Transfers {
    /// Whether the peer has something to fetch still.
    pub(crate) fn offers(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Whether there is something to do when the connection is flushed.
    pub(crate) fn is_active(&self) -> bool {
        !self.incoming.is_empty() || !self.fetched.is_empty()
    }

    /// Messages to the peer for which a credit is to be left.
    pub(crate) fn credits(&self) -> usize {
        self.fetched.len()
    }

    /// Places in the send queue to be left.
    pub(crate) fn slots(&self) -> usize {
        let reading =
            self.pieces == 0 && self.incoming.iter().any(|transfer| transfer.asked < transfer.offer.region.len);
        self.fetched.len() + usize::from(reading)
    }
}

impl Connection {
    /// Whether messages go out: while it is open, and while the peer fetches what was accepted before it was closed.
    pub(crate) fn exchanges(&self) -> bool {
        self.phase == Phase::Open || (self.phase == Phase::Draining && self.transfers.offers())
    }
}

impl Core {
    // Sending.

    /// Offers a copy of `payload`.
    pub(crate) fn send_large(&mut self, id: ConnectionId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        self.check_offer(id, payload.len())?;
        let (len, most) = (payload.len(), self.config.transfer_memory);
        if len > most {
            return Err(SendErrorKind::TooLong { len, max: most });
        }
        if self.copied_bytes + len > most {
            let first = self.connections.get(id.0).is_some_and(|c| !c.blocked);
            let error = self.would_block(id, false);
            if let Some(c) = self.connections.get_mut(id.0).filter(|_| first) {
                c.blocked_copy = len;
            }
            return Err(error);
        }
        let no_memory = |error: &dyn std::fmt::Display| {
            log::warn!("{id}: memory for a message of {len} bytes: {error}");
            SendErrorKind::NoMemory { len }
        };
        let memory = Memory::from_vec(payload.to_vec()).map_err(|error| no_memory(&error))?;
        let options = RegionOptions::new().allow(Access::REMOTE_READ);
        let region = self.register(id, memory, len, &options).map_err(|error| no_memory(&error))?;
        self.account(&region, Account::Copied);
        // It goes when it was fetched.
        self.offer(id, &region, 0..len)
    }

    /// Sends a part of a region without a copy.
    pub(crate) fn send_region(
        &mut self,
        id: ConnectionId,
        region: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        let c = self.connections.get(id.0).filter(|c| c.phase == Phase::Open).ok_or(SendErrorKind::Closed)?;
        let (large, raw) = (range.len() > c.max_message, c.framing == Framing::Raw);
        self.check_local(id, region, &range)?;
        if large {
            if !self.readable_by(region.key, id) {
                return Err(SendErrorKind::NotReadable { max: c.max_message });
            }
            self.check_offer(id, range.len())?;
            return self.offer(id, region, range);
        }
        let c = self.connections.get_mut(id.0).expect("just seen");
        if let Err(kind) = c.check_send(range.len()) {
            return Err(self.refuse_send(id, kind));
        }
        let len = range.len();
        let (sge, hold) = region.lend(range).expect("checked before");
        let name = c.next_send_id(SendKind::Message);
        c.holds.push_back([Some((region.key, hold)), None, None, None]);
        let mut sges = SgeList::default();
        let mut header = None;
        if !raw {
            let device = self.devices[c.device].as_mut().expect("an open connection has a device");
            let mut buffer = device.pool.take().expect("every send slot has a buffer promised");
            let bytes = Header { kind: Kind::Data, grant: c.rx.told() }.emit();
            device.pool.slabs().bytes_mut(&mut buffer)[..HEADER_LEN].copy_from_slice(&bytes);
            let (posted, sge) = device.pool.post(buffer, HEADER_LEN);
            header = Some(posted);
            sges = SgeList::one(sge);
        }
        let pushed = sges.push(sge);
        debug_assert!(pushed.is_ok(), "room for two");
        c.push_message(Send { buffer: header, holds: true, id: Some(name), ..Send::default() }, SendOp::Send, sges);
        self.stats.messages_sent += 1;
        self.stats.bytes_sent += len as u64;
        self.mark_dirty(id);
        Ok(name)
    }

    fn check_offer(&mut self, id: ConnectionId, len: usize) -> Result<(), SendErrorKind> {
        let c = self.connections.get(id.0).filter(|c| c.phase == Phase::Open).ok_or(SendErrorKind::Closed)?;
        if len as u64 > c.largest_message {
            return Err(SendErrorKind::TooLong { len, max: usize::try_from(c.largest_message).unwrap_or(usize::MAX) });
        }
        let room = c.has_room() && c.transfers.outgoing.len() < MAX_TRANSFERS;
        if room { Ok(()) } else { Err(self.would_block(id, false)) }
    }

    fn offer(&mut self, id: ConnectionId, region: &Region, range: Range<usize>) -> Result<SendId, SendErrorKind> {
        let len = range.len();
        let part = region.remote().part(range.start as u64, len as u64).expect("checked before");
        let hold = region.lend_to_peer();
        self.transfer_begins(region.key);
        let c = self.connections.get_mut(id.0).expect("checked before");
        let send = c.next_send_id(SendKind::Message);
        let offer = Offer { id: c.transfers.next, region: part };
        c.transfers.next = c.transfers.next.wrapping_add(1);
        c.transfers.outgoing.push_back(Outgoing { id: offer.id, send, key: region.key, hold });
        self.queue_message(id, Kind::Offer, &offer.emit(), None);
        self.stats.messages_sent += 1;
        self.stats.bytes_sent += len as u64;
        Ok(send)
    }

    /// The peer has fetched a message; `false` if there is no such message.
    pub(crate) fn fetched<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        id: ConnectionId,
        transfer: u32,
    ) -> bool {
        let Some(c) = self.connections.get_mut(id.0) else { return true };
        let outgoing = &mut c.transfers.outgoing;
        let Some(at) = outgoing.iter().position(|out| out.id == transfer) else { return false };
        let out = outgoing.remove(at).expect("just found");
        let draining = c.phase == Phase::Draining;
        self.endings_moved |= c.phase > Phase::Open;
        if c.blocked {
            self.writable.push(id);
        }
        if draining {
            // It fetches: the others get their time too.
            self.set_phase_timer(id, self.config.close_timeout);
        }
        self.transfer_ended(out.key, out.hold);
        handler.on_send_complete(&mut Context { core: self }, id, out.send, Outcome::Sent);
        true
    }

    /// The end of a connection: what the peer did not fetch has failed.
    pub(crate) fn fail_transfers<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: ConnectionId) {
        while let Some(out) = self.connections.get_mut(id.0).and_then(|c| c.transfers.outgoing.pop_front()) {
            self.transfer_ended(out.key, out.hold);
            let outcome = Outcome::Failed(rdma_transport::wc::WcStatus::Flushed);
            handler.on_send_complete(&mut Context { core: self }, id, out.send, outcome);
        }
    }

    /// Gives back what a connection's transfers hold, without callbacks.
    pub(crate) fn drop_transfers(&mut self, id: ConnectionId) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        let transfers = std::mem::take(&mut c.transfers);
        let share = &mut c.share;
        if let Some(device) = self.devices.get_mut(c.device).and_then(Option::as_mut) {
            for held in transfers.held {
                if let Held::Message { buffer, .. } = held {
                    match (&mut device.shared, share.as_mut()) {
                        (Some(shared), Some(share)) => {
                            share.give();
                            shared.give(buffer);
                        }
                        _ => device.pool.give(buffer),
                    }
                }
            }
        }
        for out in transfers.outgoing {
            self.transfer_ended(out.key, out.hold);
        }
    }

    /// The user wants to hear no more of a connection: what is held makes room.
    pub(crate) fn discard_held(&mut self, id: ConnectionId) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        c.transfers.incoming.clear();
        for held in std::mem::take(&mut c.transfers.held) {
            if let Held::Message { buffer, .. } = held {
                self.recycle(id, buffer);
            }
        }
    }

    // Receiving.

    /// A peer offers a message.
    pub(crate) fn offered(&mut self, id: ConnectionId, offer: Offer) -> Result<(), PeerViolation> {
        let limit = self.config.largest_message;
        let Some(c) = self.connections.get_mut(id.0) else { return Ok(()) };
        if !c.delivers() {
            return Ok(());
        }
        if c.phase > Phase::Open {
            // It cannot be fetched any more, and nothing behind it is delivered.
            c.transfers.held.push_back(Held::Transfer);
            return Ok(());
        }
        let incoming = &mut c.transfers.incoming;
        if offer.region.len == 0 || offer.region.len > limit || incoming.len() >= MAX_TRANSFERS {
            return Err(PeerViolation::InvalidOffer);
        }
        incoming.push_back(Incoming { offer, region: None, asked: 0, done: 0 });
        c.transfers.held.push_back(Held::Transfer);
        self.mark_dirty(id);
        Ok(())
    }

    /// Keeps a message back while one before it is being fetched; gives it back if it can be delivered.
    #[inline]
    pub(crate) fn hold_message(&mut self, id: ConnectionId, buffer: Buffer, end: usize) -> Option<Buffer> {
        match self.holding(id) {
            Some(held) => {
                held.push_back(Held::Message { buffer, end });
                None
            }
            None => Some(buffer),
        }
    }

    /// As [`Core::hold_message`]; `false` if it can be delivered.
    pub(crate) fn hold_immediate(&mut self, id: ConnectionId, immediate: Immediate) -> bool {
        self.holding(id).map(|held| held.push_back(Held::Immediate(immediate))).is_some()
    }

    /// What is held on a connection, if messages are to wait.
    #[inline]
    fn holding(&mut self, id: ConnectionId) -> Option<&mut VecDeque<Held>> {
        let c = self.connections.get_mut(id.0)?;
        let (delivers, held) = (c.delivers(), &mut c.transfers.held);
        (!held.is_empty() && delivers && !self.config.overtake).then_some(held)
    }

    /// Posts the reads, and tells the peer of what was fetched, as far as there is room.
    pub(crate) fn pump_transfers(&mut self, id: ConnectionId) -> Result<(), Error> {
        self.find_memory(id)?;
        let Some(c) = self.connections.get_mut(id.0).filter(|c| c.phase == Phase::Open) else { return Ok(()) };
        let room = |c: &Connection| c.sends.len() + (CONTROL_SENDS as usize) < c.send_slots;
        'transfers: for at in 0..c.transfers.incoming.len() {
            loop {
                if c.transfers.pieces == PIECES || !room(c) {
                    break 'transfers;
                }
                let transfer = &mut c.transfers.incoming[at];
                let Some(region) = transfer.region.as_mut() else { break 'transfers };
                let (from, len) = (transfer.asked, piece(transfer.offer.region.len - transfer.asked));
                if len == 0 {
                    break;
                }
                let range = from as usize..(from + len) as usize;
                let Some((sge, hold)) = region.lend_mut(range) else { break 'transfers };
                let remote = transfer.offer.region.part(from, len).expect("inside").address();
                let holds: Holds = [Some((region.key, hold)), None, None, None];
                transfer.asked += len;
                c.transfers.pieces += 1;
                c.holds.push_back(holds);
                let send = Send { holds: true, piece: len as u32, ..Send::default() };
                c.push(send, SendOp::Read(remote), SgeList::one(sge));
            }
        }
        while let Some(c) = self.connections.get_mut(id.0)
            && c.tx.available_for_data() > 0
            && room(c)
            && let Some(transfer) = c.transfers.fetched.pop_front()
        {
            self.queue_message(id, Kind::Fetched, &transfer.to_le_bytes(), None);
        }
        Ok(())
    }

    /// Gives transfers their memory, in order, while there is any.
    fn find_memory(&mut self, id: ConnectionId) -> Result<(), Error> {
        loop {
            let Some(c) = self.connections.get_mut(id.0).filter(|c| c.phase == Phase::Open) else { return Ok(()) };
            let wanting = c.transfers.incoming.iter().position(|transfer| transfer.region.is_none());
            let Some(at) = wanting.filter(|&at| at == 0 || c.transfers.pieces < PIECES) else { return Ok(()) };
            let len = c.transfers.incoming[at].offer.region.len as usize;
            if self.fetched_bytes + len > self.config.transfer_memory {
                if !self.starved.contains(&id) {
                    self.starved.push(id);
                }
                return Ok(());
            }
            let memory = Memory::new(len).map_err(|source| rdma_transport::Error::Memory { bytes: len, source })?;
            let region = self.register(id, memory, len, &RegionOptions::new())?;
            self.account(&region, Account::Fetched);
            let c = self.connections.get_mut(id.0).expect("just seen");
            c.transfers.incoming[at].region = Some(region);
        }
    }

    /// A read of a transfer has ended.
    pub(crate) fn piece_arrived<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: ConnectionId, len: u32) {
        let now = self.now;
        let Some(c) = self.connections.get_mut(id.0) else { return };
        c.last_heard = now;
        c.pinged = false;
        c.transfers.pieces -= 1;
        // Reads end in order.
        let Some(transfer) = c.transfers.incoming.iter_mut().find(|t| t.done < t.offer.region.len) else { return };
        transfer.done += u64::from(len);
        if transfer.done == transfer.offer.region.len {
            let fetched = transfer.offer.id;
            c.transfers.fetched.push_back(fetched);
            self.deliver_held(handler, id);
        }
        self.mark_dirty(id);
    }

    /// Delivers what is held, up to the first message that is still being fetched.
    fn deliver_held<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: ConnectionId) {
        while let Some(c) = self.connections.get_mut(id.0) {
            let transfers = &mut c.transfers;
            match transfers.held.front() {
                Some(Held::Transfer) => {
                    let whole = transfers.incoming.front().is_some_and(|t| t.done == t.offer.region.len);
                    if !whole {
                        return;
                    }
                    transfers.held.pop_front();
                    let region = transfers.incoming.pop_front().and_then(|transfer| transfer.region);
                    self.deliver_region(handler, id, region);
                }
                Some(Held::Message { .. } | Held::Immediate(_)) => match transfers.held.pop_front() {
                    Some(Held::Message { buffer, end }) => self.deliver_pooled(handler, id, buffer, HEADER_LEN, end),
                    Some(Held::Immediate(immediate)) => self.tell_immediate(handler, id, immediate),
                    _ => return,
                },
                None => return,
            }
        }
    }
}

/// Whose memory a region is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Account {
    /// The user's own.
    User,
    /// A copy of a message that the peer is to fetch.
    Copied,
    /// A message that was or is being fetched.
    Fetched,
}

impl Core {
    fn account(&mut self, region: &Region, account: Account) {
        let bytes = match account {
            Account::User => return,
            Account::Copied => &mut self.copied_bytes,
            Account::Fetched => &mut self.fetched_bytes,
        };
        *bytes += region.len();
        self.set_account(region.key, account);
    }

    /// A region of a transfer is gone: there is room for others.
    pub(crate) fn settle(&mut self, account: Account, len: usize) {
        match account {
            Account::User => {}
            Account::Copied => {
                self.copied_bytes -= len;
                // Somebody may have been refused for it.
                for key in self.connections.keys() {
                    if self.connections.get(key).is_some_and(|c| c.blocked) {
                        self.writable.push(ConnectionId(key));
                    }
                }
            }
            Account::Fetched => {
                self.fetched_bytes -= len;
                for id in std::mem::take(&mut self.starved) {
                    self.mark_dirty(id);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_offer_survives_the_trip(id: u32, address in 0..u64::MAX / 2, len in 0..u64::MAX / 2, key: u32) {
            let offer = Offer { id, region: RemoteRegion { address, len, key } };
            prop_assert_eq!(Offer::parse(&offer.emit()), Some(offer));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = Offer::parse(&bytes);
        }
    }
}
