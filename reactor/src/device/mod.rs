//! A device as the reactor uses it: its buffers, its completion queues, and the accounts that keep both from
//! overrunning.

pub(crate) mod cq;
pub(crate) mod home;
pub(crate) mod pool;
pub(crate) mod srq;
pub(crate) mod table;

use std::sync::Arc;

use rdma_transport::caps::Features;
use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, LocalKey, MrId};
use rdma_transport::provider::{CqId, DeviceId, DeviceInfo, Provider};
use rdma_transport::qp::{QpAttr, SrqId};
use rdma_transport::slab::Key;
use rdma_transport::wr::RecvWr;

use self::cq::CompletionQueue;
use self::home::Home;
use self::pool::{Buffer, Exhausted, Pool};
use self::srq::queue::SharedReceives;
use crate::config::Config;
use crate::error::Error;
use crate::limits::{HEADER_LEN, TAG_ROOM, buffer_len};

/// The buffers of a device: the pool, and the receives that connections share.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(crate) pool: Pool,
    /// The receives that connections share, if they do.
    pub(crate) shared: Option<SharedReceives>,
}

impl Buffers {
    /// The buffers of connections that are on no device. There are none.
    pub(crate) fn none() -> Self {
        Self { pool: Pool::new(1, 0), shared: None }
    }

    /// Takes the buffer of a received message back. `shared`: its connection takes receives from the shared queue.
    #[inline]
    pub(crate) fn free_receive(&mut self, buffer: Buffer, shared: bool) {
        match &mut self.shared {
            Some(queue) if shared => queue.give(buffer),
            _ => self.pool.give(buffer),
        }
    }
}

/// The room that one connection claims of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Index of its completion queue.
    pub(crate) cq: usize,
    /// Number of completion entries claimed, and of buffers.
    pub(crate) entries: u32,
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) id: DeviceId,
    pub(crate) name: String,
    pub(crate) buffers: Buffers,
    /// Memory of the pool, as the device knows it.
    slabs: Vec<(LocalKey, MrId)>,
    pub(crate) cqs: Vec<CompletionQueue>,
    /// The completion channel may have events, so queues that are marked as armed may not be armed any more.
    pub(crate) has_events: bool,
    pub(crate) home: Arc<Home>,
    /// Largest payload of a message in one buffer, bytes: the configured size, or the device's limit less the header if
    /// that is smaller.
    pub(crate) buffer_size: u32,
    /// What the queue pairs of connections are made with, cut to what the device has, but for their completion queue.
    pub(crate) queues: QpAttr,
    /// The completion vector of its completion queues.
    vector: u32,
    /// The most entries that a completion queue of it has.
    max_completion_queue: u32,
    /// Number of claims on completion queues, of connections and of others.
    claims: usize,
    /// The device is going away or has failed. Nothing new is put on it, and it is not asked for anything.
    pub(crate) removed: bool,
}

impl From<Exhausted> for Error {
    fn from(_: Exhausted) -> Self {
        Self::Limit { limit: "max_memory", value: 0 }
    }
}

/// Allocates memory for buffers, and registers it with a device.
pub(crate) fn register(
    provider: &mut dyn Provider,
    slabs: &mut Vec<(LocalKey, MrId)>,
    id: DeviceId,
    bytes: usize,
) -> Result<(Arc<Memory>, LocalKey), Error> {
    let memory = Memory::new(bytes).map_err(|source| rdma_transport::Error::Memory { bytes, source })?;
    let memory = Arc::new(memory);
    // The memory has local access only, so that no peer can ever reach a pool.
    let region = provider.register(id, &memory, Access::LOCAL_WRITE)?;
    slabs.push((region.local_key, region.id));
    Ok((memory, region.local_key))
}

/// The completion vector to use: the one that was asked for, or one that the reactor's number leads to.
fn vector(asked: Option<u32>, reactor: u32, device: Option<&DeviceInfo>) -> u32 {
    let Some(DeviceInfo { name, capabilities }) = device else { return 0 };
    let vectors = capabilities.completion_vectors.max(1);
    match asked {
        Some(vector) if vectors == 1 => {
            if vector > 0 {
                log::info!("{name} has one completion vector: the choice of vector {vector} is ignored");
            }
            0
        }
        Some(vector) => vector,
        None => reactor % vectors,
    }
}

fn destroy_srq(provider: &mut dyn Provider, srq: SrqId) {
    if let Err(error) = provider.destroy_srq(srq) {
        log::warn!("destroying a shared receive queue: {error}");
    }
}

fn destroy_cq(provider: &mut dyn Provider, cq: CqId) {
    if let Err(error) = provider.destroy_cq(cq) {
        log::warn!("destroying a completion queue: {error}");
    }
}

/// Deregisters memory of buffers; logs a failure.
pub(crate) fn deregister(provider: &mut dyn Provider, slab: MrId) {
    if let Err(error) = provider.deregister(slab) {
        log::warn!("deregistering the memory of buffers: {error}");
    }
}

impl Device {
    pub(crate) fn new(id: DeviceId, provider: &dyn Provider, config: &Config, reactor: u32, home: Arc<Home>) -> Self {
        let info = provider.device(id);
        let longest = info.map_or(u64::MAX, |info| info.capabilities.max_message);
        let longest = u32::try_from(longest.saturating_sub((HEADER_LEN + TAG_ROOM) as u64)).unwrap_or(u32::MAX);
        let nowhere = CqId(Key::NONE);
        let queues = QpAttr {
            max_inline: config.max_inline,
            max_recv_sge: 1,
            ..QpAttr::new(nowhere, nowhere, config.send_slots(), config.receive_depth)
        };
        Self {
            id,
            name: info.map_or_else(|| format!("device {}", id.0), |info| info.name.clone()),
            buffers: Buffers { pool: Pool::new(buffer_len(config.buffer_size), config.max_memory), shared: None },
            slabs: Vec::new(),
            cqs: Vec::new(),
            has_events: false,
            home,
            buffer_size: config.buffer_size.min(longest),
            queues: info.map_or(queues, |info| queues.clamped(info)),
            vector: vector(config.completion_vector, reactor, info),
            max_completion_queue: info.map_or(u32::MAX, |info| info.capabilities.max_completion_queue),
            claims: 0,
            removed: false,
        }
    }

    /// Makes the queue of receives that connections share, on first use.
    pub(crate) fn share_receives(&mut self, provider: &mut dyn Provider, receives: u32) -> Result<(), Error> {
        if self.buffers.shared.is_some() {
            return Ok(());
        }
        let has = provider
            .device(self.id)
            .is_some_and(|info| info.capabilities.features.contains(Features::SHARED_RECEIVE_QUEUE));
        if !has {
            let (provider, feature) = (provider.name(), "shared receive queues on this device");
            return Err(rdma_transport::Error::Unsupported { provider, feature }.into());
        }
        let srq = provider.create_srq(self.id, receives)?;
        let (count, size) = (receives as usize, buffer_len(self.buffer_size));
        let reserved = self.reserve(provider, count);
        let pool = &mut self.buffers.pool;
        let made = reserved.and_then(|()| {
            let mut shared = SharedReceives::new(pool, srq, receives, size);
            match shared.post(provider, pool, &mut Vec::with_capacity(count)) {
                Ok(()) => Ok(shared),
                Err(error) => {
                    shared.empty(pool);
                    pool.unreserve(count);
                    Err(error)
                }
            }
        });
        match made {
            Ok(shared) => self.buffers.shared = Some(shared),
            Err(error) => {
                destroy_srq(provider, srq);
                return Err(error);
            }
        }
        Ok(())
    }

    fn reserve(&mut self, provider: &mut dyn Provider, count: usize) -> Result<(), Error> {
        let (id, slabs) = (self.id, &mut self.slabs);
        self.buffers.pool.reserve(count, |bytes| register(provider, slabs, id, bytes))
    }

    /// Claims buffers and completion entries for a connection. `shared`: the connection takes its receives from a
    /// shared queue with so many receives, for all of which its completion queue must have room.
    pub(crate) fn claim(
        &mut self,
        provider: &mut dyn Provider,
        config: &Config,
        shared: Option<u32>,
    ) -> Result<Room, Error> {
        let QpAttr { max_send_wr, max_recv_wr, .. } = self.queues;
        let entries = if shared.is_some() { max_send_wr } else { max_send_wr + max_recv_wr };
        let cq = match shared {
            // The room for the shared receives stays claimed as long as the completion queue exists.
            Some(all) => match self.with_room(provider, entries, true) {
                Some(index) => self.claim_of(index, entries),
                None => {
                    let index = self.claim_room(provider, config, entries + all)?;
                    self.cqs[index].shared = true;
                    index
                }
            },
            None => self.claim_room(provider, config, entries)?,
        };
        match self.reserve(provider, entries as usize) {
            Ok(()) => Ok(Room { cq, entries }),
            Err(error) => {
                self.release_room(cq, entries);
                Err(match error {
                    Error::Limit { limit, .. } => Error::Limit { limit, value: config.max_memory as u64 },
                    other => other,
                })
            }
        }
    }

    /// Claims completion entries; returns the index of their queue.
    pub(crate) fn claim_room(
        &mut self,
        provider: &mut dyn Provider,
        config: &Config,
        entries: u32,
    ) -> Result<usize, Error> {
        let index = match self.with_room(provider, entries, false) {
            Some(index) => index,
            None => {
                let size = config.completion_queue.min(self.max_completion_queue).max(entries);
                let id = provider.create_cq_on(self.id, size, self.vector)?;
                if let Some(to) = config.completion_moderation
                    && let Err(error) = provider.moderate_cq(id, to)
                {
                    destroy_cq(provider, id);
                    return Err(error.into());
                }
                let new = CompletionQueue::new(id, size);
                // A queue that has failed gives its place up when nobody uses it any more.
                match self.cqs.iter().position(|cq| cq.is_unused() && provider.has_failed(cq.id)) {
                    Some(index) => {
                        destroy_cq(provider, std::mem::replace(&mut self.cqs[index], new).id);
                        index
                    }
                    None => {
                        self.cqs.push(new);
                        self.cqs.len() - 1
                    }
                }
            }
        };
        Ok(self.claim_of(index, entries))
    }

    /// Finds a completion queue with so many free entries, which has not failed. `shared`: it has room for all shared receives.
    fn with_room(&self, provider: &dyn Provider, entries: u32, shared: bool) -> Option<usize> {
        let good = |cq: &CompletionQueue| cq.has_room(entries) && (cq.shared || !shared) && !provider.has_failed(cq.id);
        self.cqs.iter().position(good)
    }

    fn claim_of(&mut self, index: usize, entries: u32) -> usize {
        self.cqs[index].claim(entries);
        self.claims += 1;
        index
    }

    /// Number of receives posted to the shared queue, and of those that nobody claims.
    pub(crate) fn shared_levels(&self) -> Option<(usize, usize)> {
        let shared = self.buffers.shared.as_ref()?;
        Some((shared.posted(), shared.unclaimed(|cq, mark| self.cqs[cq].has_passed(mark)) as usize))
    }

    /// Posts the shared receives that came back, and then takes back the claims of connections that are gone. This must
    /// not run while completions are being handled, because they may be completions of those connections.
    pub(crate) fn settle_shared(&mut self, provider: &mut dyn Provider, chain: &mut Vec<RecvWr>) {
        let Buffers { pool, shared: Some(shared) } = &mut self.buffers else { return };
        if let Err(error) = shared.post(provider, pool, chain) {
            // Connections find out when they have something to post.
            log::warn!("{}: posting shared receives: {error}", self.name);
            return;
        }
        let cqs = &self.cqs;
        shared.settle(|cq, mark| cqs[cq].has_passed(mark));
    }

    /// Gives completion entries back.
    pub(crate) fn release_room(&mut self, cq: usize, entries: u32) {
        self.cqs[cq].release(entries);
        self.claims -= 1;
    }

    /// Gives a connection's claim back. `kept`: number of the connection's own receive buffers that the program still
    /// has. They stay counted until they come home. Buffers of the shared queue never count as a connection's own.
    pub(crate) fn release(&mut self, room: Room, kept: usize) {
        self.release_room(room.cq, room.entries);
        self.buffers.pool.unreserve(room.entries as usize);
        self.buffers.pool.lend(kept);
    }

    /// Whether the device is going away and no claims are left on it.
    pub(crate) const fn is_abandoned(&self) -> bool {
        self.removed && self.claims == 0
    }

    /// Takes a buffer for the program to fill. The pool grows if all its buffers are promised.
    pub(crate) fn take_for_program(&mut self, provider: &mut dyn Provider) -> Option<Buffer> {
        self.reserve(provider, 1).ok()?;
        let pool = &mut self.buffers.pool;
        pool.unreserve(1);
        let buffer = pool.take()?;
        pool.lend(1);
        Some(buffer)
    }

    /// Gives back memory of the pool that was not needed for a while.
    pub(crate) fn trim(&mut self, provider: &mut dyn Provider) {
        let slabs = &mut self.slabs;
        self.buffers.pool.trim(|key| {
            if let Some(at) = slabs.iter().position(|&(of, _)| of == key) {
                deregister(provider, slabs.swap_remove(at).1);
            }
        });
    }

    /// Destroys the queues and deregisters the buffers, after all connections are gone.
    pub(crate) fn close(&mut self, provider: &mut dyn Provider) {
        if let Some(shared) = self.buffers.shared.take() {
            destroy_srq(provider, shared.srq());
        }
        for cq in self.cqs.drain(..) {
            destroy_cq(provider, cq.id);
        }
        for (_, slab) in self.slabs.drain(..) {
            deregister(provider, slab);
        }
    }
}
