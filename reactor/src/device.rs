//! A device as the reactor uses it: its buffer pool and its completion queues.

use std::sync::Arc;

use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, LocalKey, MrId};
use rdma_transport::provider::{CqId, DeviceId, Provider};

use crate::buffer::Home;
use crate::config::Config;
use crate::error::Error;
use crate::frame::HEADER_LEN;
use crate::pool::{Exhausted, Pool};

/// A completion queue and the room left on it.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(crate) id: CqId,
    /// Entries no connection has claimed.
    free: u32,
    /// Claims given back; usable once the queue was seen empty, because completions may linger in it.
    released: u32,
    pub(crate) armed: bool,
    /// On the list of queues to poll.
    pub(crate) ready: bool,
}

impl CompletionQueue {
    /// Notes that the queue is empty.
    pub(crate) fn drained(&mut self) {
        self.free += std::mem::take(&mut self.released);
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
        Self { id, name, pool, regions, cqs, has_events: false, home, max_payload, claims: 0, removed: false }
    }

    /// Buffers of one connection.
    fn buffers(config: &Config) -> usize {
        (config.receive_depth + config.send_slots()) as usize
    }

    /// Claims buffers and completion entries for a connection; returns the index of its completion queue.
    pub(crate) fn claim(&mut self, provider: &mut dyn Provider, config: &Config) -> Result<usize, Refusal> {
        let room = config.completion_room();
        let cq = self.claim_room(provider, config, room)?;
        let (id, regions) = (self.id, &mut self.regions);
        let reserved: Result<(), Error> =
            self.pool.reserve(Self::buffers(config), |bytes| register(provider, regions, id, bytes));
        match reserved {
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
                self.cqs.push(CompletionQueue { id, free: entries, released: 0, armed: false, ready: false });
                self.cqs.len() - 1
            }
        };
        self.cqs[cq].free -= room;
        self.claims += 1;
        Ok(cq)
    }

    /// Gives completion entries back.
    pub(crate) fn release_room(&mut self, cq: usize, room: u32) {
        self.cqs[cq].released += room;
        self.claims -= 1;
    }

    /// Gives a connection's claim back. Buffers that the user still has stay counted until they come home.
    pub(crate) fn release(&mut self, cq: usize, config: &Config, detached: usize) {
        self.release_room(cq, config.completion_room());
        self.pool.unreserve(Self::buffers(config));
        self.pool.lend(detached);
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
        for cq in self.cqs.drain(..) {
            if let Err(error) = provider.destroy_cq(cq.id) {
                log::warn!("destroying a completion queue: {error}");
            }
        }
        for (_, region) in self.regions.drain(..) {
            deregister(provider, region);
        }
    }
}
