//! The table of the devices that a reactor uses, by index. A device is added on its first use. A device that was
//! removed from the host, or has failed, is taken out of the table when nothing uses it any more.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};
use rdma_transport::wr::RecvWr;

use super::cq::{CompletionQueue, CqIndex};
use super::pool::Pool;
use super::return_channel::{PoolId, ReturnChannel, Returned};
use super::{Buffers, Device};
use crate::config::Config;
use crate::providers::{Providers, device_of};
use crate::seam::wake::WakeFlag;
use crate::stats::MemoryStats;

/// The devices that a reactor uses, by index.
#[derive(Debug)]
pub(crate) struct Devices {
    all: Vec<Option<Device>>, // local: the devices
    /// The indexes of new devices. The reactor does not watch their completion channels yet.
    fresh: Vec<usize>, // local: the devices
    /// The indexes of devices that have failed. The endpoints on these devices have not been ended yet.
    failed: Vec<usize>, // local: the devices
    /// Buffers without memory. They are used for a device that is not in the table.
    nowhere: Buffers,
    /// Number of pools that were created so far. A new pool gets this count as its number, so each pool has a unique
    /// number.
    pools: u64,
    return_to: Sender<Returned>,
    returned: Receiver<Returned>, // bound: pool, large-messages
    wake: Arc<WakeFlag>,
    /// The number of the reactor in the process. It selects the reactor's completion vector, so that reactors use
    /// different vectors.
    reactor: u32,
    /// True if a timer is set that will trim the pools.
    pub(crate) trimming: bool,
    receive_chain: Vec<RecvWr>, // bound: receives
}

impl Devices {
    pub(crate) fn new(wake: Arc<WakeFlag>, reactor: u32) -> Self {
        let (return_to, returned) = crossbeam_channel::unbounded();
        Self {
            all: Vec::new(),
            fresh: Vec::new(),
            failed: Vec::new(),
            nowhere: Buffers::none(),
            pools: 0,
            return_to,
            returned,
            wake,
            reactor,
            trimming: false,
            receive_chain: Vec::new(),
        }
    }

    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&Device> {
        self.all.get(index)?.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut Device> {
        self.all.get_mut(index)?.as_mut()
    }

    /// Returns a completion queue by its index, even if the device has failed or is being removed. Returns `None` if
    /// the device or the queue is not in the table.
    #[inline]
    pub(crate) fn cq(&mut self, (device, at): CqIndex) -> Option<&mut CompletionQueue> {
        self.get_mut(device)?.cqs.get_mut(at)
    }

    /// Returns the buffers of a device. If the device is not in the table, returns buffers without memory.
    #[inline]
    pub(crate) fn buffers(&mut self, index: usize) -> &mut Buffers {
        match self.all.get_mut(index) {
            Some(Some(device)) => &mut device.buffers,
            _ => &mut self.nowhere,
        }
    }

    /// Returns the buffers of a device like [`Devices::buffers`], and the reactor's list for receive work requests.
    /// Callers use the same list again and again, so that it is not allocated each time.
    #[inline]
    pub(crate) fn buffers_and_chain(&mut self, index: usize) -> (&mut Buffers, &mut Vec<RecvWr>) {
        let buffers = match self.all.get_mut(index) {
            Some(Some(device)) => &mut device.buffers,
            _ => &mut self.nowhere,
        };
        (buffers, &mut self.receive_chain)
    }

    /// Returns a device, and adds it to the table on its first use.
    pub(crate) fn use_device(&mut self, index: usize, providers: &Providers, config: &Config) -> &mut Device {
        if self.all.len() <= index {
            self.all.resize_with(index + 1, || None);
        }
        let (fresh, sender, wake, reactor) = (&mut self.fresh, &self.return_to, &self.wake, self.reactor);
        let pools = &mut self.pools;
        self.all[index].get_or_insert_with(|| {
            fresh.push(index);
            *pools += 1;
            let pool = PoolId { device: index, number: *pools };
            let return_channel = ReturnChannel { pool, sender: sender.clone(), wake: Arc::clone(wake) };
            let (provider, id) = device_of(index);
            Device::new(id, providers.get(provider), config, reactor, Arc::new(return_channel))
        })
    }

    /// Returns the index of a new device: the reactor does not watch the completion channel of this device yet. Returns
    /// `None` if there is no new device.
    pub(crate) fn fresh(&self) -> Option<usize> {
        self.fresh.last().copied()
    }

    /// Removes the device that [`Devices::fresh`] has returned last from the list of new devices. The reactor now
    /// watches the completion channel of this device, or need not watch it.
    pub(crate) fn watched(&mut self) {
        self.fresh.pop();
    }

    /// Notes that a device has failed.
    pub(crate) fn note_failed(&mut self, index: usize) {
        self.failed.push(index);
    }

    /// Returns the next device that has failed since the last call; `None` if there is none. Skips a device that was
    /// taken out of the table, even if a new device has the same index.
    pub(crate) fn next_failed(&mut self) -> Option<usize> {
        while let Some(index) = self.failed.pop() {
            if self.get(index).is_some_and(|device| device.removed) {
                return Some(index);
            }
        }
        None
    }

    /// Returns the length of the table. The index of each device is below this length. Some entries of the table may be
    /// empty.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Device> {
        self.all.iter().flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Device> {
        self.all.iter_mut().flatten()
    }

    /// Takes a device out of the table; `None` if it is not in the table.
    pub(crate) fn take(&mut self, index: usize) -> Option<Device> {
        self.all.get_mut(index)?.take()
    }

    /// Receives the next piece of memory that the program has returned to the reactor; `None` if there is none at the
    /// moment.
    pub(crate) fn next_returned(&mut self) -> Option<Returned> {
        self.returned.try_recv().ok()
    }

    /// Returns `true` if the pool belongs to a device in the table. Returns `false` if the pool's device was taken out
    /// of the table. A new device with the same index has another pool.
    pub(crate) fn has_pool(&self, pool: PoolId) -> bool {
        let by_index = crate::planted("pools-known-by-their-index");
        self.get(pool.device).is_some_and(|device| by_index || device.return_channel.pool == pool)
    }

    /// Returns `true` if buffers with this return channel belong to this reactor, and to a pool that still exists.
    pub(crate) fn owns_buffers_of(&self, channel: &ReturnChannel) -> bool {
        channel.sender.same_channel(&self.return_to) && self.has_pool(channel.pool)
    }

    /// Takes the reactor's list for receive work requests out of the table. The caller puts it back with
    /// [`Devices::put_receive_chain`].
    pub(crate) fn take_receive_chain(&mut self) -> Vec<RecvWr> {
        std::mem::take(&mut self.receive_chain)
    }

    /// Puts the list for receive work requests back, so that the next caller reuses its memory.
    pub(crate) fn put_receive_chain(&mut self, chain: Vec<RecvWr>) {
        self.receive_chain = chain;
    }

    /// On every device with a shared receive queue, posts the free buffers of this queue as receives again, and takes
    /// back the claims of ended connections.
    pub(crate) fn settle_shared(&mut self, providers: &mut Providers) {
        let chain = &mut self.receive_chain;
        for (index, device) in self.all.iter_mut().enumerate() {
            if let Some(device) = device {
                device.settle_shared(providers.of_device(index), chain);
            }
        }
    }

    /// Returns `true` if the pool of some device has memory that trimming may release.
    pub(crate) fn are_excessive(&self) -> bool {
        self.iter().any(|device| device.buffers.pool.is_excessive())
    }

    /// Counts the buffers and the shared receives of all devices. The other counters in the result are 0.
    pub(crate) fn levels(&self) -> MemoryStats {
        let mut levels = MemoryStats::default();
        for device in self.iter() {
            let pool: &Pool = &device.buffers.pool;
            levels.pool_buffers += pool.capacity();
            levels.pool_free += pool.available();
            if let Some((posted, unclaimed)) = device.shared_levels() {
                levels.shared_posted += posted;
                levels.shared_unclaimed += unclaimed;
            }
        }
        levels
    }
}
