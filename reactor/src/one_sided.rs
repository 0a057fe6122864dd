//! Regions and the operations on them: registering, one-sided operations, and taking rights back.

use std::ops::Range;
use std::sync::Arc;

use rdma_transport::caps::{Capabilities, Features};
use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, MrId, RemoteKey};
use rdma_transport::slab::Key;
use rdma_transport::wr::{MAX_SGE, SendOp, Sge, SgeList};

use crate::config::Framing;
use crate::connection::{Holds, Phase, Send};
use crate::core::{Core, TimerKind};
use crate::error::{Error, SendErrorKind};
use crate::frame::Kind;
use crate::handler::Immediate;
use crate::id::{ConnectionId, SendId, SendKind};
use crate::region::{Hold, Region, RegionMemory, RegionOptions, RemoteRegion, Users};
use crate::rendezvous::Account;

/// A region as the reactor knows it.
#[derive(Debug)]
pub(crate) struct Registration {
    region: MrId,
    key: RemoteKey,
    access: Access,
    device: usize,
    users: Arc<Users>,
    /// The peers that may reach it.
    peers: Option<Hold>,
    /// The connection whose peer alone may.
    connection: Option<ConnectionId>,
    timer: Option<Key>,
    /// Messages in it that peers are to fetch.
    transfers: u32,
    /// The user has dropped it.
    dropped: bool,
    len: usize,
    account: Account,
}

/// The local side of an operation, ready to post.
struct Locals {
    sges: SgeList,
    holds: Holds,
}

impl Locals {
    /// Gathers entries; if one cannot be had, gives back those that could.
    fn gather(parts: impl Iterator<Item = Result<(Key, Sge, Hold), SendErrorKind>>) -> Result<Self, SendErrorKind> {
        let mut locals = Self { sges: SgeList::default(), holds: Holds::default() };
        for (part, slot) in parts.zip(0..MAX_SGE) {
            match part {
                Ok((key, sge, hold)) => {
                    let pushed = locals.sges.push(sge);
                    debug_assert!(pushed.is_ok(), "as many entries as slots");
                    locals.holds[slot] = Some((key, hold));
                }
                Err(error) => {
                    locals.holds.into_iter().flatten().for_each(|(_, hold)| hold.done());
                    return Err(error);
                }
            }
        }
        Ok(locals)
    }
}

impl Core {
    pub(crate) fn capabilities(&self, id: ConnectionId) -> Option<Capabilities> {
        let c = self.connections.get(id.0)?;
        let device = self.devices.get(c.device)?.as_ref()?;
        let mut capabilities = self.provider.device(device.id)?.capabilities;
        if capabilities.features.contains(Features::EXTENSIONS_BY_AGREEMENT) && !c.extensions {
            capabilities.features.remove(Features::WRITE_WITH_IMMEDIATE | Features::ATOMICS);
        }
        Some(capabilities)
    }

    // Regions.

    pub(crate) fn register(
        &mut self,
        id: ConnectionId,
        memory: Memory,
        len: usize,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        let c = self.connections.get(id.0).filter(|c| c.equipped).ok_or(Error::Gone("connection"))?;
        let (device, qp) = (c.device, c.qp);
        let dev = self.devices[device].as_ref().filter(|device| !device.removed).ok_or(Error::Gone("device"))?;
        memory.prefer_huge_pages();
        let memory = Arc::new(memory);
        let access = options.access;
        let registered = self.provider.register_range(dev.id, &memory, 0..len, access)?;
        let remote = access.intersects(Access::REMOTE);
        let scoped = remote && !options.any_peer;
        if let (true, Some(qp)) = (scoped, qp) {
            match self.provider.restrict(registered.id, qp) {
                // A device whose keys are of a whole protection domain: the key is all that the other peers lack.
                Ok(()) | Err(rdma_transport::Error::Unsupported { .. }) => {}
                Err(error) => {
                    self.deregister(registered.id);
                    return Err(error.into());
                }
            }
        }
        let address = memory.as_ptr() as u64;
        let mut memory = RegionMemory::new(memory, len);
        let key = self.regions.insert(Registration {
            region: registered.id,
            key: registered.remote_key,
            access,
            device,
            users: memory.users(),
            peers: memory.expose(access),
            connection: scoped.then_some(id),
            timer: None,
            transfers: 0,
            dropped: false,
            len,
            account: Account::User,
        });
        self.stats.regions += 1;
        if scoped && let Some(c) = self.connections.get_mut(id.0) {
            c.regions.push(key);
        }
        if let (true, Some(lifetime)) = (remote, options.lifetime)
            && let Some(at) = self.now.checked_add(lifetime)
        {
            let timer = self.timers.insert(at, TimerKind::Region(key));
            self.regions.get_mut(key).expect("just inserted").timer = Some(timer);
        }
        Ok(Region {
            memory,
            key,
            local_key: registered.local_key,
            remote: RemoteRegion { address, len: len as u64, key: registered.remote_key.0 },
            device,
            home: self.return_to.clone(),
            wake: Arc::clone(&self.wake),
        })
    }

    fn deregister(&mut self, region: MrId) {
        if let Err(error) = self.provider.deregister(region) {
            log::warn!("deregistering a memory region: {error}");
        }
    }

    /// Takes the rights of peers to a region back.
    pub(crate) fn revoke_region(&mut self, key: Key) {
        let Some(registration) = self.regions.get_mut(key) else { return };
        let Some(peers) = registration.peers.take() else { return };
        if let Err(error) = self.provider.invalidate(registration.region) {
            // The memory stays counted as written by peers: nobody gets a reference to it any more.
            log::warn!("taking back a remote key: {error}");
            registration.peers = Some(peers);
            return;
        }
        self.rights_ended(key, peers);
    }

    /// Nobody but the program reaches a region any more.
    fn rights_ended(&mut self, key: Key, peers: Hold) {
        peers.done();
        let Some(registration) = self.regions.get_mut(key) else { return };
        if let Some(timer) = registration.timer.take() {
            self.timers.cancel(timer);
        }
        if let Some(c) = registration.connection.take().and_then(|id| self.connections.get_mut(id.0)) {
            c.regions.retain(|&of_peer| of_peer != key);
        }
    }

    /// A peer's Send with Invalidate has taken a remote key back.
    pub(crate) fn invalidated(&mut self, remote: RemoteKey) {
        for key in self.regions.keys() {
            if let Some(registration) = self.regions.get_mut(key).filter(|registration| registration.key == remote)
                && let Some(peers) = registration.peers.take()
            {
                self.rights_ended(key, peers);
            }
        }
    }

    /// The peer of a connection is gone, and its rights with it.
    pub(crate) fn revoke_regions_of(&mut self, id: ConnectionId) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        for key in std::mem::take(&mut c.regions) {
            self.revoke_region(key);
        }
    }

    /// The user has dropped a region.
    pub(crate) fn drop_region(&mut self, key: Key) {
        if let Some(registration) = self.regions.get_mut(key) {
            registration.dropped = true;
            self.deregister_unused(key);
        }
    }

    /// Lets go of a region that the user has dropped, when nothing uses it any more.
    fn deregister_unused(&mut self, key: Key) {
        if self.regions.get(key).is_none_or(|registration| !registration.dropped || registration.transfers > 0) {
            return;
        }
        self.revoke_region(key);
        // Rights that cannot be taken back any other way end when it is deregistered.
        let peers = |registration: &Registration| usize::from(registration.peers.is_some());
        if self.regions.get(key).is_some_and(|registration| registration.users.count() == peers(registration)) {
            self.remove_region(key);
        }
    }

    /// Deregisters a region, and only then lets go of what peers could reach.
    fn remove_region(&mut self, key: Key) {
        let Some(registration) = self.regions.get_mut(key) else { return };
        let (region, peers) = (registration.region, registration.peers.take());
        self.deregister(region);
        if let Some(peers) = peers {
            self.rights_ended(key, peers);
        }
        let Some(registration) = self.regions.remove(key) else { return };
        self.stats.regions -= 1;
        self.settle(registration.account, registration.len);
    }

    /// Counts the memory of a region as something else than the user's.
    pub(crate) fn set_account(&mut self, key: Key, account: Account) {
        if let Some(registration) = self.regions.get_mut(key) {
            registration.account = account;
        }
    }

    /// Whether the peer of a connection may read a region.
    pub(crate) fn readable_by(&self, key: Key, id: ConnectionId) -> bool {
        self.regions.get(key).is_some_and(|registration| {
            registration.access.contains(Access::REMOTE_READ)
                && registration.peers.is_some()
                && registration.connection.is_none_or(|owner| owner == id)
        })
    }

    /// A peer is to fetch a message from a region.
    pub(crate) fn transfer_begins(&mut self, key: Key) {
        if let Some(registration) = self.regions.get_mut(key) {
            registration.transfers += 1;
        }
    }

    /// It has, or never will.
    pub(crate) fn transfer_ended(&mut self, key: Key, hold: Hold) {
        hold.done();
        if let Some(registration) = self.regions.get_mut(key) {
            registration.transfers -= 1;
            self.deregister_unused(key);
        }
    }

    /// A device is going: its regions are memory only, from now on.
    pub(crate) fn drop_regions_of_device(&mut self, device: usize) {
        for key in self.regions.keys() {
            if self.regions.get(key).is_some_and(|registration| registration.device == device) {
                self.remove_region(key);
            }
        }
    }

    /// The oldest work request that uses regions has ended; `false` if there is none.
    pub(crate) fn release_holds(&mut self, id: ConnectionId) -> bool {
        let Some(holds) = self.connections.get_mut(id.0).and_then(|c| c.holds.pop_front()) else { return false };
        for (key, hold) in holds.into_iter().flatten() {
            hold.done();
            self.deregister_unused(key);
        }
        true
    }

    // Operations.

    pub(crate) fn read(
        &mut self,
        id: ConnectionId,
        remote: RemoteRegion,
        locals: &mut [(&mut Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.check(id, remote, locals.iter().map(|(region, range)| (&**region, range)), false)?;
        if let Some(c) = self.connections.get(id.0).filter(|c| c.free_slots() < locals.len()) {
            let (count, max) = (locals.len(), c.most_slots());
            let never = count > max;
            return Err(if never { SendErrorKind::TooManyRegions { count, max } } else { self.would_block(id, true) });
        }
        // One Read for each range: a Read on iWARP has one sink, and many an adapter takes no more.
        let count = locals.len();
        let Locals { sges, holds } = Locals::gather(locals.iter_mut().map(|(region, range)| {
            let (sge, hold) = region.lend_mut(range.clone()).ok_or_else(|| outside(region, range))?;
            Ok((region.key, sge, hold))
        }))?;
        let c = self.connections.get_mut(id.0).expect("checked before");
        let name = c.next_send_id(SendKind::Read);
        let mut from = remote.address();
        for (i, (sge, hold)) in sges.as_slice().iter().zip(holds).enumerate() {
            c.holds.push_back([hold, None, None, None]);
            let send = Send { holds: true, id: (i + 1 == count).then_some(name), ..Send::default() };
            c.push(send, SendOp::Read(from), SgeList::one(*sge));
            from.address += sge.len() as u64;
        }
        self.mark_dirty(id);
        Ok(name)
    }

    pub(crate) fn write(
        &mut self,
        id: ConnectionId,
        remote: RemoteRegion,
        locals: &[(&Region, Range<usize>)],
        immediate: Option<u32>,
    ) -> Result<SendId, SendErrorKind> {
        let parts = locals.iter().map(|(region, range)| (*region, range));
        let len = self.check(id, remote, parts, immediate.is_some())?;
        let native = immediate.is_some() && self.has(id, Features::WRITE_WITH_IMMEDIATE);
        if let Some(c) = self.connections.get(id.0).filter(|_| immediate.is_some() && !native) {
            let lack = match c.framing {
                Framing::Raw => Some("writes with immediate data"),
                Framing::Credits if c.most_slots() < 2 => Some("writes with immediate data while send_depth is 1"),
                Framing::Credits => None,
            };
            if let Some(feature) = lack {
                return Err(SendErrorKind::Unsupported { provider: self.provider.name(), feature });
            }
            if c.free_slots() < 2 {
                return Err(self.would_block(id, false));
            }
        }
        let locals = Locals::gather(locals.iter().map(|(region, range)| {
            let (sge, hold) = region.lend(range.clone()).ok_or_else(|| outside(region, range))?;
            Ok((region.key, sge, hold))
        }))?;
        let remote = remote.address();
        Ok(match immediate {
            None => self.push_operation(id, SendOp::Write(remote), locals, SendKind::Write),
            Some(value) if native => {
                self.push_operation(id, SendOp::WriteWithImmediate(remote, value), locals, SendKind::Write)
            }
            Some(value) => self.push_write_and_message(id, SendOp::Write(remote), locals, Immediate { value, len }),
        })
    }

    pub(crate) fn atomic(
        &mut self,
        id: ConnectionId,
        remote: RemoteRegion,
        (local, offset): (&mut Region, usize),
        op: SendOp,
        kind: SendKind,
    ) -> Result<SendId, SendErrorKind> {
        let range = offset..offset.saturating_add(8);
        self.check(id, remote, std::iter::once((&*local, &range)), false)?;
        if !self.has(id, Features::ATOMICS) {
            let provider = self.provider.name();
            return Err(SendErrorKind::Unsupported { provider, feature: "atomic operations" });
        }
        let (sge, hold) = local.lend_mut(range.clone()).ok_or_else(|| outside(local, &range))?;
        let mut locals = Locals { sges: SgeList::one(sge), holds: Holds::default() };
        locals.holds[0] = Some((local.key, hold));
        Ok(self.push_operation(id, op, locals, kind))
    }

    /// Whether a connection has something.
    fn has(&self, id: ConnectionId, feature: Features) -> bool {
        self.capabilities(id).is_some_and(|capabilities| capabilities.features.contains(feature))
    }

    /// Checks that a range is one of a region on a connection's device.
    pub(crate) fn check_local(
        &self,
        id: ConnectionId,
        region: &Region,
        range: &Range<usize>,
    ) -> Result<(), SendErrorKind> {
        let known = region.home.same_channel(&self.return_to) && self.regions.get(region.key).is_some();
        if !known || self.connections.get(id.0).is_none_or(|c| c.device != region.device) {
            return Err(SendErrorKind::ForeignRegion);
        }
        if range.start > range.end || range.end > region.len() { Err(outside(region, range)) } else { Ok(()) }
    }

    /// Checks an operation; returns its length. `credit`: it uses a receive of the peer's.
    fn check<'a>(
        &mut self,
        id: ConnectionId,
        remote: RemoteRegion,
        locals: impl ExactSizeIterator<Item = (&'a Region, &'a Range<usize>)>,
        credit: bool,
    ) -> Result<u32, SendErrorKind> {
        if self.connections.get(id.0).is_none_or(|c| c.phase != Phase::Open) {
            return Err(SendErrorKind::Closed);
        }
        let count = locals.len();
        if !(1..=MAX_SGE).contains(&count) {
            return Err(SendErrorKind::TooManyRegions { count, max: MAX_SGE });
        }
        let mut total = 0_u64;
        for (region, range) in locals {
            self.check_local(id, region, range)?;
            total += range.len() as u64;
        }
        if total > remote.len {
            return Err(SendErrorKind::OutOfBounds { end: total, len: remote.len });
        }
        let max = self.capabilities(id).map_or(0, |capabilities| capabilities.max_message.min(u32::MAX.into()));
        if total > max {
            return Err(SendErrorKind::TooLong { len: total as usize, max: max as usize });
        }
        let c = self.connections.get(id.0).ok_or(SendErrorKind::Closed)?;
        let room = if credit { c.has_room() } else { c.free_slots() > 0 };
        if room { Ok(total as u32) } else { Err(self.would_block(id, !credit)) }
    }

    /// Chains an operation that was checked.
    fn push_operation(&mut self, id: ConnectionId, op: SendOp, locals: Locals, kind: SendKind) -> SendId {
        let c = self.connections.get_mut(id.0).expect("checked by the caller");
        let name = c.next_send_id(kind);
        let send = Send { holds: true, id: Some(name), ..Send::default() };
        c.holds.push_back(locals.holds);
        match op {
            SendOp::WriteWithImmediate(..) => c.push_message(send, op, locals.sges),
            _ => c.push(send, op, locals.sges),
        }
        self.mark_dirty(id);
        name
    }

    /// Chains a write, and the message that tells of it.
    fn push_write_and_message(&mut self, id: ConnectionId, op: SendOp, locals: Locals, immediate: Immediate) -> SendId {
        let c = self.connections.get_mut(id.0).expect("checked by the caller");
        let name = c.next_send_id(SendKind::Write);
        c.holds.push_back(locals.holds);
        c.push(Send { holds: true, ..Send::default() }, op, locals.sges);
        self.queue_message(id, Kind::Immediate, &immediate.emit(), Some(name));
        name
    }
}

fn outside(region: &Region, range: &Range<usize>) -> SendErrorKind {
    SendErrorKind::OutOfBounds { end: range.end.max(range.start) as u64, len: region.len() as u64 }
}
