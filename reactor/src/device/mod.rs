//! A device as the reactor uses it: its buffers, its completion queues, and the reservations that connections make of
//! both. Because of these reservations, the queues never overflow and the buffers never run out.

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
use rdma_transport::shares::is_scarce;
use rdma_transport::slab::Key;
use rdma_transport::srq::SrqAttr;
use rdma_transport::wr::RecvWr;

use self::cq::CompletionQueue;
use self::pool::{Buffer, Exhausted, Pool};
use self::return_channel::ReturnChannel;
use self::srq::queue::{SharedReceives, claimable};
use crate::config::Config;
use crate::error::Error;
use crate::limits::{HEADER_LEN, MIN_WINDOW, TAG_ROOM, buffer_len};
use crate::providers::role;

/// The buffers of a device: the pool, and the queue of receives that connections share.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(crate) pool: Pool,
    /// The shared receive queue; `None` if each connection has separate receives.
    pub(crate) shared: Option<SharedReceives>,
}

impl Buffers {
    /// Returns buffers without any memory, for connections that are on no device.
    pub(crate) fn none() -> Self {
        Self { pool: Pool::new(1, 0), shared: None }
    }

    /// Returns the buffer of a received message to the shared receive queue if `shared` is true, and otherwise to the
    /// pool. The caller passes true if the message's connection uses the shared receive queue.
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
    /// Index of the connection's completion queue on the device.
    pub(crate) cq: usize,
    /// Number of reserved completion queue entries. It is also the number of reserved buffers, because each work
    /// request needs one entry and one buffer.
    pub(crate) entries: u32,
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) id: DeviceId,
    pub(crate) name: String, // local: the name of a device
    pub(crate) buffers: Buffers,
    /// The registrations of the pool's slabs. A slab is a block of memory that contains buffers.
    slabs: Vec<(LocalKey, MrId)>, // bound: pool
    pub(crate) cqs: Vec<CompletionQueue>, // bound: completions
    /// True if the completion channel may have events. In that case, the device may have disarmed queues that the
    /// reactor still counts as armed.
    pub(crate) has_events: bool,
    pub(crate) return_channel: Arc<ReturnChannel>,
    /// Length of the largest payload of a message in one buffer, in bytes: the lower of `Config::buffer_size`, and the
    /// device's largest message less the header and the authentication tag.
    pub(crate) buffer_size: u32,
    /// The attributes of the connections' queue pairs, reduced to the device's limits. The completion queues in these
    /// attributes are placeholders: each connection fills in its own completion queue.
    pub(crate) queues: QpAttr,
    /// The completion vector on which this device's completion queues raise their events.
    vector: u32,
    /// The number of entries of a new completion queue, unless a connection needs more.
    completion_queue: u32,
    /// The features of the device. This field and `max_message` (the length of the device's longest message, in bytes)
    /// are copies, because connections check both values for each operation.
    pub(crate) features: Features,
    pub(crate) max_message: u64,
    /// Number of connections and datagram endpoints that have claimed entries of completion queues.
    claims: usize,
    /// True if the device has failed or is being removed. Such a device gets no new connections, and the reactor
    /// neither polls nor arms its completion queues.
    pub(crate) removed: bool,
}

/// Counts of the objects that a device failed to release. The memory of these objects stays allocated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unreleased {
    /// Number of shared receive queues that the device failed to destroy.
    pub(crate) queues: u64,
    /// Number of registrations of memory that were not released.
    pub(crate) registrations: usize,
}

impl From<Exhausted> for Error {
    fn from(_: Exhausted) -> Self {
        Self::Limit { limit: "max_memory", value: 0 }
    }
}

/// Allocates `bytes` bytes of memory for buffers, registers the memory with a device, and adds the registration to
/// `slabs`. Returns the memory and its local key.
pub(crate) fn register(
    provider: &mut dyn Provider,
    slabs: &mut Vec<(LocalKey, MrId)>,
    id: DeviceId,
    bytes: usize,
) -> Result<(Arc<Memory>, LocalKey), Error> {
    let memory = Memory::new(bytes).map_err(|source| rdma_transport::TransportError::Memory { bytes, source })?;
    let memory = Arc::new(memory);
    // The registration allows local access only, so no peer can ever access the pool's buffers.
    let region = provider.register(id, &memory, 0..bytes, Access::LOCAL_WRITE)?;
    slabs.push((region.local_key, region.id));
    Ok((memory, region.local_key))
}

/// Returns the number of entries of a device's completion queues: the configured number
/// (`requested`), but at most the device's limit. By default, it is `DEFAULT_ENTRIES`, or the
/// device's limit if a queue allocates memory only as it grows.
fn completion_queue(requested: Option<u32>, device: Option<&DeviceInfo>) -> u32 {
    let Some(DeviceInfo { capabilities, .. }) = device else { return requested.unwrap_or(DEFAULT_ENTRIES) };
    let grows = capabilities.features.contains(Features::GROWING_COMPLETION_QUEUES);
    requested.unwrap_or(if grows { u32::MAX } else { DEFAULT_ENTRIES }).min(capabilities.max_completion_queue)
}

/// Returns the completion vector for a device's queues: the configured one (`requested`), or one
/// derived from the number of the reactor, so that the reactors of a process use different vectors.
fn vector(requested: Option<u32>, reactor: u32, device: Option<&DeviceInfo>) -> u32 {
    let Some(DeviceInfo { name, capabilities }) = device else { return 0 };
    let vectors = capabilities.completion_vectors.max(1);
    match requested {
        Some(vector) if vectors == 1 => {
            if vector > 0 {
                local_log!(Info, "{name} has one completion vector: the choice of vector {vector} is ignored");
            }
            0
        }
        Some(vector) => vector,
        None => reactor % vectors,
    }
}

/// The default number of entries of a completion queue that allocates the memory of all its entries
/// when it is created.
const DEFAULT_ENTRIES: u32 = 16 << 10;

const SHARED_RECEIVES: &str = "shared receive queues on this device";

/// Destroys a shared receive queue. Returns `false` if the device failed to destroy it. After such a failure, the
/// device may still write to the buffers of the posted receives.
fn destroy_srq(provider: &mut dyn Provider, srq: SrqId) -> bool {
    let destroyed = role(provider, Provider::shared_receives, SHARED_RECEIVES).and_then(|role| role.destroy_srq(srq));
    destroyed.inspect_err(|error| local_log!(Error, "destroying a shared receive queue failed: {error}")).is_ok()
}

/// Returns `true` if a completion queue has failed. No work request completes on a failed queue any more.
fn has_failed(provider: &dyn Provider, cq: &CompletionQueue) -> bool {
    provider.adapter().is_some_and(|adapter| adapter.has_failed(cq.id))
}

fn destroy_cq(provider: &mut dyn Provider, cq: CqId) {
    if let Err(error) = provider.destroy_cq(cq) {
        local_log!(Warn, "destroying a completion queue failed: {error}");
    }
}

/// Deregisters one slab, a block of memory that contains buffers. Returns the number of registrations that the device
/// failed to release: 0 or 1.
pub(crate) fn deregister(provider: &mut dyn Provider, slab: MrId) -> usize {
    let failed = provider.deregister(slab).inspect_err(|error| {
        local_log!(Error, "deregistering the memory of buffers failed: {error}");
    });
    usize::from(failed.is_err())
}

impl Device {
    /// Returns the index of this device in the reactor's table of devices.
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
            completion_queue: completion_queue(config.completions.queue, info),
            features: info.map_or(Features::empty(), |info| info.capabilities.features),
            max_message: info.map_or(0, |info| info.capabilities.max_message),
            claims: 0,
            removed: false,
        }
    }

    /// Creates the device's shared receive queue, and posts its receives, if the queue does not exist yet, or has
    /// failed.
    pub(crate) fn share_receives(&mut self, provider: &mut dyn Provider, receives: u32) -> Result<(), Error> {
        match self.buffers.shared.as_ref().map(SharedReceives::has_failed) {
            Some(true) => self.drop_shared(provider)?,
            Some(false) => return Ok(()),
            None => {}
        }
        let has = provider
            .device(self.id)
            .is_some_and(|info| info.capabilities.features.contains(Features::SHARED_RECEIVE_QUEUE));
        if !has {
            let (provider, feature) = (provider.name(), SHARED_RECEIVES);
            return Err(rdma_transport::TransportError::Unsupported { provider, feature }.into());
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
        // If posting failed, the device may have accepted some of the receives. So the buffers return to the pool only
        // if the device has destroyed the shared receive queue. If it failed to destroy the queue, later connections
        // use this queue.
        if posted.is_err() && destroy_srq(provider, srq) {
            shared.empty(pool);
            pool.unreserve(count);
        } else {
            self.buffers.shared = Some(shared);
        }
        posted
    }

    /// Destroys the shared receive queue, so that another one can replace it, and returns its buffers to the pool. The
    /// messages that the program still holds count as lent.
    ///
    /// # Errors
    /// A connection still uses the queue, or the device has failed to destroy the queue and may still write to its
    /// buffers. In both cases nothing changes.
    fn drop_shared(&mut self, provider: &mut dyn Provider) -> Result<(), Error> {
        let Buffers { pool, shared } = &mut self.buffers;
        let unused = shared.take_if(|shared| shared.is_unused() && destroy_srq(provider, shared.srq()));
        let mut unused = unused.ok_or(Error::Gone("shared receive queue"))?;
        let (receives, kept) = unused.buffers();
        pool.unreserve(receives);
        pool.lend(kept);
        unused.empty(pool);
        Ok(())
    }

    fn reserve(&mut self, provider: &mut dyn Provider, count: usize) -> Result<(), Error> {
        let (id, slabs) = (self.id, &mut self.slabs);
        self.buffers.pool.reserve(count, |bytes| register(provider, slabs, id, bytes))
    }

    /// Reserves buffers and completion queue entries for a connection. If the connection uses the shared receive queue,
    /// `shared` is the number of receives in this queue: the connection's completion queue must have entries for all of
    /// them.
    pub(crate) fn claim(
        &mut self,
        provider: &mut dyn Provider,
        config: &Config,
        shared: Option<u32>,
    ) -> Result<DeviceReservation, Error> {
        let QpAttr { max_send_wr, max_recv_wr, .. } = self.queues;
        let entries = if shared.is_some() { max_send_wr } else { max_send_wr + max_recv_wr };
        let cq = match shared {
            // `all` is the number of shared receives. The first connection with shared receives on
            // a completion queue also claims entries for all shared receives (`entries + all`).
            // Later connections on this completion queue claim only their own `entries`. The `all`
            // entries stay claimed as long as the completion queue exists.
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

    /// Returns true if one more connection would use the last buffers, or the last receives of the
    /// shared receive queue. A connection counts as [`MIN_WINDOW`] receives, even if its claim is
    /// larger: a busy connection leaves half of the unclaimed receives to new connections.
    pub(crate) fn is_crowded(&self, config: &Config) -> bool {
        let QpAttr { max_send_wr, max_recv_wr, .. } = self.queues;
        let pool = &self.buffers.pool;
        match config.shared_receives {
            Some(all) => {
                let shared = if self.buffers.shared.is_some() { all as usize } else { 0 };
                is_scarce((self.claims + 1) * MIN_WINDOW as usize, claimable(all) as usize)
                    || pool.is_crowded(max_send_wr as usize, shared)
            }
            None => pool.is_crowded((max_send_wr + max_recv_wr) as usize, 0),
        }
    }

    /// Claims completion queue entries for a connection or a datagram endpoint. Returns the index of the completion
    /// queue. If no completion queue has enough free entries, creates a new one.
    pub(crate) fn claim_room(
        &mut self,
        provider: &mut dyn Provider,
        config: &Config,
        entries: u32,
    ) -> Result<usize, Error> {
        let index = match self.with_room(provider, entries, false) {
            Some(index) => index,
            None => {
                let size = self.completion_queue.max(entries);
                let attr = CqAttr { entries: size, vector: self.vector, moderation: config.completions.moderation };
                let id = provider.create_cq(self.id, &attr)?;
                let new = CompletionQueue::new(id, size);
                // If there is a failed completion queue that nothing uses any more, the new queue replaces it under the
                // same index.
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

    /// Returns the index of a completion queue that has not failed and has at least `entries` free entries. If `shared`
    /// is true, the queue must also have claimed the entries for all shared receives. Returns `None` if there is no
    /// such queue.
    fn with_room(&self, provider: &dyn Provider, entries: u32, shared: bool) -> Option<usize> {
        let good = |cq: &CompletionQueue| cq.has_room(entries) && (cq.shared || !shared) && !has_failed(provider, cq);
        self.cqs.iter().position(good)
    }

    fn claim_of(&mut self, index: usize, entries: u32) -> usize {
        self.cqs[index].claim(entries);
        self.claims += 1;
        index
    }

    /// Returns two numbers about the shared receive queue: the number of posted receives, and the number of receives
    /// that a new connection could claim. Returns `None` if the device has no such queue.
    pub(crate) fn shared_levels(&self) -> Option<(usize, usize)> {
        let shared = self.buffers.shared.as_ref()?;
        Some((shared.posted(), shared.unclaimed(|cq, mark| self.cqs[cq].has_passed(mark)) as usize))
    }

    /// Returns true if a connection waits for unclaimed receives of the shared receive queue, and
    /// [`Device::settle_shared`] would take back the claim of an ended connection.
    pub(crate) fn has_due_receives(&self) -> bool {
        let shared = self.buffers.shared.as_ref();
        shared.is_some_and(|shared| shared.has_due(|cq, mark| self.cqs[cq].has_passed(mark)))
    }

    /// Posts the free buffers of the shared receive queue as receives again, and takes back the claims of ended
    /// connections. The caller must not be in the middle of handling a batch of completions: the batch may contain
    /// completions of the ended connections.
    pub(crate) fn settle_shared(&mut self, provider: &mut dyn Provider, chain: &mut Vec<RecvWr>) {
        let Buffers { pool, shared: Some(shared) } = &mut self.buffers else { return };
        if let Err(error) = shared.post(provider, pool, chain) {
            // A warning is enough: if the device has failed, the connections notice the failure when they post their
            // own work requests.
            local_log!(Warn, "{}: posting shared receives failed: {error}", self.name);
            return;
        }
        let cqs = &self.cqs;
        shared.settle(|cq, mark| cqs[cq].has_passed(mark));
    }

    /// Releases the completion queue entries that one connection or endpoint has claimed on the queue with index `cq`.
    pub(crate) fn release_room(&mut self, cq: usize, entries: u32) {
        self.cqs[cq].release(entries);
        self.claims -= 1;
    }

    /// Releases the reservation of a connection that has ended.
    ///
    /// - `kept` is the number of receive buffers that the program still holds and that are not from the shared receive
    ///   queue. These buffers count as lent until the program returns them.
    /// - `lost` is `None` if the device has destroyed the queue pair. Otherwise it is the number of buffers that stay
    ///   with the queue pair. This queue pair may go on completing work requests, so its completion queue entries stay
    ///   claimed.
    pub(crate) fn release(&mut self, room: DeviceReservation, kept: usize, lost: Option<usize>) {
        self.release_room(room.cq, if lost.is_none() { room.entries } else { 0 });
        self.buffers.pool.unreserve(room.entries as usize - lost.unwrap_or(0));
        self.buffers.pool.lend(kept);
    }

    /// Returns `true` if the device has failed or is being removed, and no connection or endpoint uses its completion
    /// queues.
    pub(crate) const fn is_abandoned(&self) -> bool {
        self.removed && self.claims == 0
    }

    /// Takes a buffer out of the pool for the program to fill. If all buffers are reserved for connections, the pool
    /// grows first. Returns `None` if the pool has reached its limit, or if memory for more buffers cannot be allocated
    /// or registered.
    pub(crate) fn take_for_program(&mut self, provider: &mut dyn Provider) -> Option<Buffer> {
        self.reserve(provider, 1).ok()?;
        let pool = &mut self.buffers.pool;
        pool.unreserve(1);
        let buffer = pool.take()?;
        pool.lend(1);
        Some(buffer)
    }

    /// Adds a slab of buffers for the sends of one connection whose peer is on this host. The peer maps the slab into
    /// its own memory, so sends from these buffers are not copied. Returns the number of the slab. Returns `None` if
    /// the peer is on another host, or if the slab cannot be allocated, registered or mapped.
    pub(crate) fn add_mapped_slab(&mut self, provider: &mut dyn Provider, qp: Option<QpId>) -> Option<u16> {
        let qp = qp.filter(|&qp| provider.shared_memory().is_some_and(|role| role.is_shared(qp)))?;
        let bytes = self.buffers.pool.mapped_slab_len(self.queues.max_send_wr as usize)?;
        let memory = Memory::new_shared(bytes, Sharing::Read).inspect_err(|error| {
            log::debug!("{}: allocating buffers for the peer to map failed: {error}", self.name);
        });
        let mut memory = memory.ok()?;
        let (file, memory) = (memory.take_file(), Arc::new(memory));
        let region = provider.register(self.id, &memory, 0..bytes, Access::LOCAL_WRITE).ok()?;
        let lent = provider.shared_memory().is_some_and(|role| role.lend(qp, region.id, file).unwrap_or(false));
        let slab = if lent { self.buffers.pool.add_mapped_slab(memory, region.local_key) } else { None };
        match slab {
            Some(_) => self.slabs.push((region.local_key, region.id)),
            None => drop(deregister(provider, region.id)),
        }
        slab
    }

    /// Removes the slab that the peer of a connection has mapped, after the connection's queue pair was destroyed.
    /// Returns the number of registrations that the device failed to release: 0 or 1.
    pub(crate) fn remove_mapped_slab(&mut self, provider: &mut dyn Provider, slab: u16) -> usize {
        let Some(key) = self.buffers.pool.end_mapped_slab(slab) else { return 0 };
        let Some(at) = self.slabs.iter().position(|&(of, _)| of == key) else { return 0 };
        deregister(provider, self.slabs.swap_remove(at).1)
    }

    /// Deregisters the slabs that the pool has not needed since the last call, and returns their memory to the system.
    /// Returns the number of slabs that the device failed to deregister.
    pub(crate) fn trim(&mut self, provider: &mut dyn Provider) -> usize {
        let (slabs, mut kept) = (&mut self.slabs, 0);
        self.buffers.pool.trim(|key| {
            if let Some(at) = slabs.iter().position(|&(of, _)| of == key) {
                kept += deregister(provider, slabs.swap_remove(at).1);
            }
        });
        kept
    }

    /// Destroys the queues of the device, and deregisters its buffers, after all connections have ended. Returns the
    /// counts of the objects that the device failed to release.
    pub(crate) fn close(&mut self, provider: &mut dyn Provider) -> Unreleased {
        let destroyed = self.buffers.shared.take().is_none_or(|shared| destroy_srq(provider, shared.srq()));
        for cq in self.cqs.drain(..) {
            destroy_cq(provider, cq.id);
        }
        let slabs = self.slabs.drain(..);
        if destroyed {
            Unreleased { queues: 0, registrations: slabs.map(|(_, slab)| deregister(provider, slab)).sum() }
        } else {
            // The device failed to destroy the shared receive queue, and may still write to the buffers of its
            // receives. So all slabs stay registered, and their memory is never freed.
            Unreleased { queues: 1, registrations: slabs.len() }
        }
    }
}
