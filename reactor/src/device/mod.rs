//! A device as the reactor uses it: its buffers and its completion queues, and the reservations that keep both from
//! overflowing.

pub(crate) mod cq;
pub(crate) mod pool;
pub(crate) mod return_channel;
pub(crate) mod srq;
pub(crate) mod table;

use std::sync::Arc;

use rdma_transport::caps::Features;
use rdma_transport::cq::CqAttr;
use rdma_transport::mem::{Memory, Sharing};
use rdma_transport::mr::{Access, LocalKey, MrId};
use rdma_transport::provider::{CqId, DeviceId, DeviceInfo, Provider};
use rdma_transport::qp::{QpAttr, QpId, SrqId};
use rdma_transport::slab::Key;
use rdma_transport::srq::SrqAttr;
use rdma_transport::wr::RecvWr;

use self::cq::CompletionQueue;
use self::pool::{Buffer, Exhausted, Pool};
use self::return_channel::ReturnChannel;
use self::srq::queue::SharedReceives;
use crate::config::Config;
use crate::error::Error;
use crate::limits::{HEADER_LEN, TAG_ROOM, buffer_len};
use crate::providers::role;

/// The buffers of a device: the pool, and the receives that connections share.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(crate) pool: Pool,
    /// The shared receives; `None` if each connection has separate receives.
    pub(crate) shared: Option<SharedReceives>,
}

impl Buffers {
    /// Returns an empty set of buffers, for connections that are on no device.
    pub(crate) fn none() -> Self {
        Self { pool: Pool::new(1, 0), shared: None }
    }

    /// Frees the buffer of a received message. `shared` is `true` if its connection uses shared receives.
    #[inline]
    pub(crate) fn free_receive(&mut self, buffer: Buffer, shared: bool) {
        match &mut self.shared {
            Some(queue) if shared => queue.give(buffer),
            _ => self.pool.give(buffer),
        }
    }
}

/// The resources of a device that one connection has reserved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceReservation {
    /// Index of the completion queue.
    pub(crate) cq: usize,
    /// Number of completion entries, and of buffers.
    pub(crate) entries: u32,
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) id: DeviceId,
    pub(crate) name: String,
    pub(crate) buffers: Buffers,
    /// The registrations of the pool's memory.
    slabs: Vec<(LocalKey, MrId)>,
    pub(crate) cqs: Vec<CompletionQueue>,
    /// The completion channel may have events, so queues that are marked as armed may not be armed any more.
    pub(crate) has_events: bool,
    pub(crate) return_channel: Arc<ReturnChannel>,
    /// Largest payload of a message in one buffer, bytes: the configured size, or the device's limit less the header if
    /// that is smaller.
    pub(crate) buffer_size: u32,
    /// The attributes of the connections' queue pairs, reduced to the device's limits, except for the completion queue.
    pub(crate) queues: QpAttr,
    /// The completion vector of the completion queues.
    vector: u32,
    /// Largest number of entries of a completion queue.
    max_completion_queue: u32,
    /// The features of the device, and the length of its longest message, bytes. They are copied here because
    /// connections check them for each operation.
    pub(crate) features: Features,
    pub(crate) max_message: u64,
    /// Number of claims on completion queues, by connections and others.
    claims: usize,
    /// The device is being removed or has failed. Nothing new is put on it, and its completion queues are neither
    /// polled nor armed.
    pub(crate) removed: bool,
}

/// The objects that a device failed to release.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unreleased {
    /// Number of shared receive queues.
    pub(crate) queues: u64,
    /// Number of registrations.
    pub(crate) registrations: usize,
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
    // The memory has local access only, so no peer can ever access a pool.
    let region = provider.register(id, &memory, 0..bytes, Access::LOCAL_WRITE)?;
    slabs.push((region.local_key, region.id));
    Ok((memory, region.local_key))
}

/// Returns the completion vector to use: the configured one, or one derived from the reactor's number.
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

const SHARED_RECEIVES: &str = "shared receive queues on this device";

/// Destroys a shared receive queue. Returns `false` if the device failed to, and may go on using what is posted there.
fn destroy_srq(provider: &mut dyn Provider, srq: SrqId) -> bool {
    let destroyed = role(provider, Provider::shared_receives, SHARED_RECEIVES).and_then(|role| role.destroy_srq(srq));
    destroyed.inspect_err(|error| log::error!("destroying a shared receive queue failed: {error}")).is_ok()
}

/// Returns `true` if a completion queue has failed, so that nothing completes on it any more.
fn has_failed(provider: &dyn Provider, cq: &CompletionQueue) -> bool {
    provider.adapter().is_some_and(|adapter| adapter.has_failed(cq.id))
}

fn destroy_cq(provider: &mut dyn Provider, cq: CqId) {
    if let Err(error) = provider.destroy_cq(cq) {
        log::warn!("destroying a completion queue failed: {error}");
    }
}

/// Deregisters memory of buffers. Returns the number of registrations that the device failed to release: 0 or 1.
pub(crate) fn deregister(provider: &mut dyn Provider, slab: MrId) -> usize {
    let failed = provider.deregister(slab).inspect_err(|error| {
        log::error!("deregistering the memory of buffers failed: {error}");
    });
    usize::from(failed.is_err())
}

impl Device {
    /// Returns the index of the device in the reactor.
    pub(crate) fn index(&self) -> usize {
        self.return_channel.pool.device
    }

    pub(crate) fn new(
        id: DeviceId,
        provider: &dyn Provider,
        config: &Config,
        reactor: u32,
        return_channel: Arc<ReturnChannel>,
    ) -> Self {
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
            return_channel,
            buffer_size: config.buffer_size.min(longest),
            queues: info.map_or(queues, |info| queues.clamped(info)),
            vector: vector(config.completions.vector, reactor, info),
            max_completion_queue: info.map_or(u32::MAX, |info| info.capabilities.max_completion_queue),
            features: info.map_or(Features::empty(), |info| info.capabilities.features),
            max_message: info.map_or(0, |info| info.capabilities.max_message),
            claims: 0,
            removed: false,
        }
    }

    /// Creates the shared receive queue if it does not exist yet.
    pub(crate) fn share_receives(&mut self, provider: &mut dyn Provider, receives: u32) -> Result<(), Error> {
        if self.buffers.shared.is_some() {
            return Ok(());
        }
        let has = provider
            .device(self.id)
            .is_some_and(|info| info.capabilities.features.contains(Features::SHARED_RECEIVE_QUEUE));
        if !has {
            let (provider, feature) = (provider.name(), SHARED_RECEIVES);
            return Err(rdma_transport::Error::Unsupported { provider, feature }.into());
        }
        let srq = role(provider, Provider::shared_receives, SHARED_RECEIVES)?
            .create_srq(self.id, &SrqAttr { max_wr: receives, max_sge: 1 })?;
        let (count, size) = (receives as usize, buffer_len(self.buffer_size));
        if let Err(error) = self.reserve(provider, count) {
            destroy_srq(provider, srq);
            return Err(error);
        }
        let pool = &mut self.buffers.pool;
        let mut shared = SharedReceives::new(pool, srq, receives, size);
        let posted = shared.post(provider, pool, &mut Vec::with_capacity(count));
        // Some receives may be posted already, so their buffers are taken back only if the queue was destroyed. A queue
        // that the device keeps serves later connections.
        if posted.is_err() && destroy_srq(provider, srq) {
            shared.empty(pool);
            pool.unreserve(count);
        } else {
            self.buffers.shared = Some(shared);
        }
        posted
    }

    fn reserve(&mut self, provider: &mut dyn Provider, count: usize) -> Result<(), Error> {
        let (id, slabs) = (self.id, &mut self.slabs);
        self.buffers.pool.reserve(count, |bytes| register(provider, slabs, id, bytes))
    }

    /// Reserves buffers and completion entries for a connection. With `shared`, the connection uses a shared receive
    /// queue of so many receives, and its completion queue must have entries for all of them.
    pub(crate) fn claim(
        &mut self,
        provider: &mut dyn Provider,
        config: &Config,
        shared: Option<u32>,
    ) -> Result<DeviceReservation, Error> {
        let QpAttr { max_send_wr, max_recv_wr, .. } = self.queues;
        let entries = if shared.is_some() { max_send_wr } else { max_send_wr + max_recv_wr };
        let cq = match shared {
            // The entries for the shared receives stay claimed as long as the completion queue exists.
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
            Ok(()) => Ok(DeviceReservation { cq, entries }),
            Err(error) => {
                self.release_room(cq, entries);
                Err(match error {
                    Error::Limit { limit, .. } => Error::Limit { limit, value: config.max_memory as u64 },
                    other => other,
                })
            }
        }
    }

    /// Claims completion entries. Returns the index of their queue.
    pub(crate) fn claim_room(
        &mut self,
        provider: &mut dyn Provider,
        config: &Config,
        entries: u32,
    ) -> Result<usize, Error> {
        let index = match self.with_room(provider, entries, false) {
            Some(index) => index,
            None => {
                let size = config.completions.queue.min(self.max_completion_queue).max(entries);
                let attr = CqAttr { entries: size, vector: self.vector, moderation: config.completions.moderation };
                let id = provider.create_cq(self.id, &attr)?;
                let new = CompletionQueue::new(id, size);
                // A failed queue is replaced when nothing uses it any more.
                match self.cqs.iter().position(|cq| cq.is_unused() && has_failed(provider, cq)) {
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

    /// Finds a completion queue that has not failed and has so many free entries. With `shared`, it also has the
    /// entries for all shared receives.
    fn with_room(&self, provider: &dyn Provider, entries: u32, shared: bool) -> Option<usize> {
        let good = |cq: &CompletionQueue| cq.has_room(entries) && (cq.shared || !shared) && !has_failed(provider, cq);
        self.cqs.iter().position(good)
    }

    fn claim_of(&mut self, index: usize, entries: u32) -> usize {
        self.cqs[index].claim(entries);
        self.claims += 1;
        index
    }

    /// Returns the number of receives posted to the shared queue, and the number of those that are not claimed.
    pub(crate) fn shared_levels(&self) -> Option<(usize, usize)> {
        let shared = self.buffers.shared.as_ref()?;
        Some((shared.posted(), shared.unclaimed(|cq, mark| self.cqs[cq].has_passed(mark)) as usize))
    }

    /// Posts the shared receives whose buffers are free again, and then takes back the claims of connections that have
    /// ended. It must not run while completions are being handled, because they may be completions of those
    /// connections.
    pub(crate) fn settle_shared(&mut self, provider: &mut dyn Provider, chain: &mut Vec<RecvWr>) {
        let Buffers { pool, shared: Some(shared) } = &mut self.buffers else { return };
        if let Err(error) = shared.post(provider, pool, chain) {
            // Connections notice the failure when they post something.
            log::warn!("{}: posting shared receives failed: {error}", self.name);
            return;
        }
        let cqs = &self.cqs;
        shared.settle(|cq, mark| cqs[cq].has_passed(mark));
    }

    /// Releases completion entries.
    pub(crate) fn release_room(&mut self, cq: usize, entries: u32) {
        self.cqs[cq].release(entries);
        self.claims -= 1;
    }

    /// Releases the reservation of a connection. `kept` is the number of the connection's own receive buffers that the
    /// program holds. They stay counted until they are returned. Buffers of the shared queue never count as a
    /// connection's own. `lost` is the number of buffers that stay with a queue pair that the device failed to destroy.
    /// Such a queue pair may go on completing work requests, so its completion entries stay claimed.
    pub(crate) fn release(&mut self, room: DeviceReservation, kept: usize, lost: Option<usize>) {
        self.release_room(room.cq, if lost.is_none() { room.entries } else { 0 });
        self.buffers.pool.unreserve(room.entries as usize - lost.unwrap_or(0));
        self.buffers.pool.lend(kept);
    }

    /// Returns `true` if the device is being removed and has no claims left.
    pub(crate) const fn is_abandoned(&self) -> bool {
        self.removed && self.claims == 0
    }

    /// Takes a buffer for the program to fill. The pool grows if all its buffers are reserved.
    pub(crate) fn take_for_program(&mut self, provider: &mut dyn Provider) -> Option<Buffer> {
        self.reserve(provider, 1).ok()?;
        let pool = &mut self.buffers.pool;
        pool.unreserve(1);
        let buffer = pool.take()?;
        pool.lend(1);
        Some(buffer)
    }

    /// Adds buffers for the sends of one connection, which its peer maps, so that sends from there are not copied.
    /// Returns the number of their slab; `None` if the peer is not on this host, or the buffers cannot be allocated,
    /// registered or mapped.
    pub(crate) fn add_mapped_slab(&mut self, provider: &mut dyn Provider, qp: Option<QpId>) -> Option<u16> {
        let qp = qp.filter(|&qp| provider.shared_memory().is_some_and(|role| role.is_shared(qp)))?;
        let bytes = self.buffers.pool.mapped_slab_len(self.queues.max_send_wr as usize)?;
        let memory = Memory::new_shared(bytes, Sharing::Read).inspect_err(|error| {
            log::debug!("{}: allocating buffers for the peer to map failed: {error}", self.name);
        });
        let memory = Arc::new(memory.ok()?);
        let region = provider.register(self.id, &memory, 0..bytes, Access::LOCAL_WRITE).ok()?;
        let lent = provider.shared_memory().is_some_and(|role| role.lend(qp, region.id).unwrap_or(false));
        let slab = if lent { self.buffers.pool.add_mapped_slab(memory, region.local_key) } else { None };
        match slab {
            Some(_) => self.slabs.push((region.local_key, region.id)),
            None => drop(deregister(provider, region.id)),
        }
        slab
    }

    /// Removes the buffers that the peer of a connection maps, after its queue pair was destroyed. Returns the number
    /// of registrations that the device failed to release.
    pub(crate) fn remove_mapped_slab(&mut self, provider: &mut dyn Provider, slab: u16) -> usize {
        let Some(key) = self.buffers.pool.end_mapped_slab(slab) else { return 0 };
        let Some(at) = self.slabs.iter().position(|&(of, _)| of == key) else { return 0 };
        deregister(provider, self.slabs.swap_remove(at).1)
    }

    /// Returns memory of the pool to the system that was not needed for a while. Returns the number of registrations
    /// that the device failed to release.
    pub(crate) fn trim(&mut self, provider: &mut dyn Provider) -> usize {
        let (slabs, mut kept) = (&mut self.slabs, 0);
        self.buffers.pool.trim(|key| {
            if let Some(at) = slabs.iter().position(|&(of, _)| of == key) {
                kept += deregister(provider, slabs.swap_remove(at).1);
            }
        });
        kept
    }

    /// Destroys the queues and deregisters the buffers, after all connections have ended. Returns the objects that the
    /// device failed to release.
    pub(crate) fn close(&mut self, provider: &mut dyn Provider) -> Unreleased {
        let destroyed = self.buffers.shared.take().is_none_or(|shared| destroy_srq(provider, shared.srq()));
        for cq in self.cqs.drain(..) {
            destroy_cq(provider, cq.id);
        }
        let slabs = self.slabs.drain(..);
        if destroyed {
            Unreleased { queues: 0, registrations: slabs.map(|(_, slab)| deregister(provider, slab)).sum() }
        } else {
            // The device may still write to the posted buffers: they stay registered, so their memory is never freed.
            Unreleased { queues: 1, registrations: slabs.len() }
        }
    }
}
