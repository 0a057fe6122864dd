//! A device as the reactor uses it: its buffer pool and its completion queues.

use std::sync::Arc;

use rdma_transport::caps::Features;
use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, LocalKey, MrId};
use rdma_transport::provider::{CqId, DeviceId, Provider};
use rdma_transport::qp::SrqId;

use crate::buffer::Home;
use crate::config::Config;
use crate::error::Error;
use crate::frame::HEADER_LEN;
use crate::pool::{Exhausted, Pool};
use crate::shared::SharedReceives;

/// A completion queue and the room left on it.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(crate) id: CqId,
    /// Entries it has.
    size: u32,
    /// Entries no connection has claimed.
    free: u32,
    /// Claims given back; usable once the queue was seen empty, because completions may linger in it.
    released: u32,
    /// It has room for all receives of the shared queue.
    shared: bool,
    /// How often it was seen empty.
    drains: u64,
    /// Completions of it that were handled.
    handled: u64,
    pub(crate) armed: bool,
    /// On the list of queues to poll.
    pub(crate) ready: bool,
}

/// A moment in the life of a completion queue, by what was in it then.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mark {
    drains: u64,
    /// Completions handled when even a full queue would have given them all.
    handled: u64,
}

impl CompletionQueue {
    /// Notes that the queue is empty.
    pub(crate) fn drained(&mut self) {
        self.free += std::mem::take(&mut self.released);
        self.drains += 1;
    }

    /// Counts completions that were handled.
    pub(crate) fn handled(&mut self, count: usize) {
        self.handled += count as u64;
    }

    /// This moment.
    pub(crate) fn mark(&self) -> Mark {
        Mark { drains: self.drains, handled: self.handled + u64::from(self.size - self.free) }
    }

    /// Whether nothing is left of what was in it: it was seen empty since, or has given as many as it could have held.
    pub(crate) fn has_passed(&self, mark: Mark) -> bool {
        self.drains != mark.drains || self.handled >= mark.handled
    }
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) id: DeviceId,
    pub(crate) name: String,
    pub(crate) pool: Pool,
    regions: Vec<(LocalKey, MrId)>,
    pub(crate) cqs: Vec<CompletionQueue>,
    /// Its completion channel may have events; some of the queues that count as armed may not be.
    pub(crate) has_events: bool,
    pub(crate) home: Arc<Home>,
    /// The receives that connections share, if they do.
    pub(crate) shared: Option<SharedReceives>,
    /// Largest payload it carries behind a header.
    pub(crate) max_payload: u32,
    /// Connections and endpoints that have a claim.
    claims: usize,
    /// It is going away: nothing new is put on it.
    pub(crate) removed: bool,
}

/// Why a device has no room for another connection.
pub(crate) type Refusal = Error;

impl From<Exhausted> for Error {
    fn from(_: Exhausted) -> Self {
        Self::Limit { limit: "max_memory", value: 0 }
    }
}

/// Memory for buffers, made known to a device.
pub(crate) fn register(
    provider: &mut dyn Provider,
    regions: &mut Vec<(LocalKey, MrId)>,
    id: DeviceId,
    bytes: usize,
) -> Result<(Arc<Memory>, LocalKey), Error> {
    let memory = Memory::new(bytes).map_err(|source| rdma_transport::Error::Memory { bytes, source })?;
    let memory = Arc::new(memory);
    // Local access only: a pool is never reachable from a peer.
    let region = provider.register(id, &memory, Access::LOCAL_WRITE)?;
    regions.push((region.local_key, region.id));
    Ok((memory, region.local_key))
}

fn destroy(provider: &mut dyn Provider, srq: SrqId) {
    if let Err(error) = provider.destroy_srq(srq) {
        log::warn!("destroying a shared receive queue: {error}");
    }
}

fn destroy_cq(provider: &mut dyn Provider, cq: CqId) {
    if let Err(error) = provider.destroy_cq(cq) {
        log::warn!("destroying a completion queue: {error}");
    }
}

fn deregister(provider: &mut dyn Provider, region: MrId) {
    if let Err(error) = provider.deregister(region) {
        log::warn!("deregistering a memory region: {error}");
    }
}

impl Device {
    pub(crate) fn new(id: DeviceId, provider: &dyn Provider, config: &Config, home: Arc<Home>) -> Self {
        let info = provider.device(id);
        let longest = info.map_or(u64::MAX, |info| info.capabilities.max_message);
        let name = info.map_or_else(|| format!("device {}", id.0), |info| info.name.clone());
        let max_payload = u32::try_from(longest.saturating_sub(HEADER_LEN as u64)).unwrap_or(u32::MAX);
        let pool = Pool::new(config.max_message as usize + HEADER_LEN, config.max_memory);
        let (regions, cqs) = (Vec::new(), Vec::new());
        let (shared, has_events, claims, removed) = (None, false, 0, false);
        Self { id, name, pool, regions, cqs, has_events, home, shared, max_payload, claims, removed }
    }

    /// Buffers of one connection, and completions that it may have outstanding.
    const fn needs(config: &Config, sharing: bool) -> u32 {
        if sharing { config.send_slots() } else { config.completion_room() }
    }

    /// Makes the queue of receives that connections share, on first use.
    pub(crate) fn share_receives(&mut self, provider: &mut dyn Provider, receives: u32) -> Result<(), Refusal> {
        if self.shared.is_some() {
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
        let count = receives as usize;
        let reserved = self.reserve(provider, count);
        let made = reserved.and_then(|()| {
            SharedReceives::new(provider, &mut self.pool, srq, receives).inspect_err(|_| self.pool.unreserve(count))
        });
        match made {
            Ok(shared) => self.shared = Some(shared),
            Err(error) => {
                destroy(provider, srq);
                return Err(error);
            }
        }
        Ok(())
    }

    fn reserve(&mut self, provider: &mut dyn Provider, count: usize) -> Result<(), Refusal> {
        let (id, regions) = (self.id, &mut self.regions);
        self.pool.reserve(count, |bytes| register(provider, regions, id, bytes))
    }

    /// Claims buffers and completion entries for a connection, and room for the `shared` receives if it takes its own from
    /// there; returns the index of its completion queue.
    pub(crate) fn claim(
        &mut self,
        provider: &mut dyn Provider,
        config: &Config,
        shared: Option<u32>,
    ) -> Result<usize, Refusal> {
        let room = Self::needs(config, shared.is_some());
        let cq = match shared {
            // The room for the shared queue stays until that is gone.
            Some(all) => match self.cqs.iter().position(|cq| cq.shared && cq.free >= room) {
                Some(index) => self.claim_of(index, room),
                None => {
                    let index = self.claim_room(provider, config, room + all)?;
                    self.cqs[index].shared = true;
                    index
                }
            },
            None => self.claim_room(provider, config, room)?,
        };
        match self.reserve(provider, room as usize) {
            Ok(()) => Ok(cq),
            Err(error) => {
                self.release_room(cq, room);
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
        room: u32,
    ) -> Result<usize, Refusal> {
        let cq = match self.cqs.iter().position(|cq| cq.free >= room) {
            Some(index) => index,
            None => {
                let entries = config.completion_queue.max(room);
                let id = provider.create_cq(self.id, entries)?;
                if let Some(to) = config.completion_moderation
                    && let Err(error) = provider.moderate_cq(id, to)
                {
                    destroy_cq(provider, id);
                    return Err(error.into());
                }
                self.cqs.push(CompletionQueue {
                    id,
                    size: entries,
                    free: entries,
                    released: 0,
                    shared: false,
                    drains: 0,
                    handled: 0,
                    armed: false,
                    ready: false,
                });
                self.cqs.len() - 1
            }
        };
        Ok(self.claim_of(cq, room))
    }

    fn claim_of(&mut self, cq: usize, room: u32) -> usize {
        self.cqs[cq].free -= room;
        self.claims += 1;
        cq
    }

    /// Receives posted to the shared queue, and those that nobody claims.
    pub(crate) fn shared_levels(&self) -> Option<(usize, usize)> {
        let shared = self.shared.as_ref()?;
        Some((shared.posted(), shared.unclaimed(|cq, mark| self.cqs[cq].has_passed(mark)) as usize))
    }

    /// Gives completion entries back.
    pub(crate) fn release_room(&mut self, cq: usize, room: u32) {
        self.cqs[cq].released += room;
        self.claims -= 1;
    }

    /// Gives a connection's claim back. Buffers that the user still has stay counted until they come home.
    /// Those of the shared queue are never a connection's own.
    pub(crate) fn release(&mut self, cq: usize, config: &Config, detached: usize, sharing: bool) {
        let room = Self::needs(config, sharing);
        self.release_room(cq, room);
        self.pool.unreserve(room as usize);
        if !sharing {
            self.pool.lend(detached);
        }
    }

    /// Whether it is going away and nothing is left on it.
    pub(crate) const fn is_abandoned(&self) -> bool {
        self.removed && self.claims == 0
    }

    /// Takes a buffer for the user to fill, growing the pool when all others are promised.
    pub(crate) fn take_for_user(&mut self, provider: &mut dyn Provider) -> Option<crate::pool::Buffer> {
        let (id, regions) = (self.id, &mut self.regions);
        let grown: Result<(), Error> = self.pool.reserve(1, |bytes| register(provider, regions, id, bytes));
        grown.ok()?;
        self.pool.unreserve(1);
        let buffer = self.pool.take()?;
        self.pool.lend(1);
        Some(buffer)
    }

    /// Gives memory of the pool back that was not needed for a while.
    pub(crate) fn trim(&mut self, provider: &mut dyn Provider) {
        let regions = &mut self.regions;
        self.pool.trim(|key| {
            if let Some(at) = regions.iter().position(|&(of, _)| of == key) {
                deregister(provider, regions.swap_remove(at).1);
            }
        });
    }

    /// Deregisters everything. The connections are gone by now.
    pub(crate) fn close(&mut self, provider: &mut dyn Provider) {
        if let Some(shared) = self.shared.take() {
            destroy(provider, shared.srq());
        }
        for cq in self.cqs.drain(..) {
            destroy_cq(provider, cq.id);
        }
        for (_, region) in self.regions.drain(..) {
            deregister(provider, region);
        }
    }
}
