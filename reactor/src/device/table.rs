//! The devices that a reactor uses, by number. A device is in the table from its first use until it was removed and
//! nothing uses it any more.

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

/// The table of devices.
#[derive(Debug)]
pub(crate) struct Devices {
    all: Vec<Option<Device>>,
    /// Devices whose channels are not watched yet.
    fresh: Vec<usize>,
    /// The buffers of connections that are on no device.
    nowhere: Buffers,
    /// Number of pools created so far.
    pools: u64,
    return_to: Sender<Returned>,
    returned: Receiver<Returned>,
    wake: Arc<WakeFlag>,
    /// The number of the reactor, by which the reactors are spread over completion vectors.
    reactor: u32,
    /// A timer is set, at which the pools are trimmed.
    pub(crate) trimming: bool,
    receive_chain: Vec<RecvWr>,
}

impl Devices {
    pub(crate) fn new(wake: Arc<WakeFlag>, reactor: u32) -> Self {
        let (return_to, returned) = crossbeam_channel::unbounded();
        Self {
            all: Vec::new(),
            fresh: Vec::new(),
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

    /// Returns a completion queue, also of a device that has failed or is being removed.
    #[inline]
    pub(crate) fn cq(&mut self, (device, at): CqIndex) -> Option<&mut CompletionQueue> {
        self.get_mut(device)?.cqs.get_mut(at)
    }

    /// Returns the buffers of a device. An unknown device has none.
    #[inline]
    pub(crate) fn buffers(&mut self, index: usize) -> &mut Buffers {
        match self.all.get_mut(index) {
            Some(Some(device)) => &mut device.buffers,
            _ => &mut self.nowhere,
        }
    }

    /// As [`Devices::buffers`], with a list for receive work requests.
    #[inline]
    pub(crate) fn buffers_and_chain(&mut self, index: usize) -> (&mut Buffers, &mut Vec<RecvWr>) {
        let buffers = match self.all.get_mut(index) {
            Some(Some(device)) => &mut device.buffers,
            _ => &mut self.nowhere,
        };
        (buffers, &mut self.receive_chain)
    }

    /// Returns a device, which is added to the table on first use.
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

    /// Returns the next device with a channel that is not watched yet.
    pub(crate) fn fresh(&self) -> Option<usize> {
        self.fresh.last().copied()
    }

    /// Notes that the channel of that device is watched, or need not be watched any more.
    pub(crate) fn watched(&mut self) {
        self.fresh.pop();
    }

    /// Returns the upper bound of the devices' numbers: each is below it.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Device> {
        self.all.iter().flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Device> {
        self.all.iter_mut().flatten()
    }

    /// Removes a device from the table.
    pub(crate) fn take(&mut self, index: usize) -> Option<Device> {
        self.all.get_mut(index)?.take()
    }

    /// Returns the next returned buffer.
    pub(crate) fn next_returned(&mut self) -> Option<Returned> {
        self.returned.try_recv().ok()
    }

    /// Returns `true` if a device in the table has this pool. A device that was removed from the table has taken its
    /// pool with it, and a device with the same index has another one.
    pub(crate) fn has_pool(&self, pool: PoolId) -> bool {
        let by_index = cfg!(planted = "pools-known-by-their-index");
        self.get(pool.device).is_some_and(|device| by_index || device.return_channel.pool == pool)
    }

    /// Returns `true` if buffers with this return channel belong to a device of this reactor.
    pub(crate) fn owns_buffers_of(&self, channel: &ReturnChannel) -> bool {
        channel.sender.same_channel(&self.return_to) && self.has_pool(channel.pool)
    }

    /// Takes out the list for receive work requests; see [`Devices::put_receive_chain`].
    pub(crate) fn take_receive_chain(&mut self) -> Vec<RecvWr> {
        std::mem::take(&mut self.receive_chain)
    }

    /// Puts the list back, to reuse its memory.
    pub(crate) fn put_receive_chain(&mut self, chain: Vec<RecvWr>) {
        self.receive_chain = chain;
    }

    /// Posts the shared receives whose buffers are free again, on all devices.
    pub(crate) fn settle_shared(&mut self, providers: &mut Providers) {
        let chain = &mut self.receive_chain;
        for (index, device) in self.all.iter_mut().enumerate() {
            if let Some(device) = device {
                device.settle_shared(providers.of_device(index), chain);
            }
        }
    }

    /// Returns `true` if a pool has more memory than it needs.
    pub(crate) fn are_excessive(&self) -> bool {
        self.iter().any(|device| device.buffers.pool.is_excessive())
    }

    /// Returns the current levels of all pools together.
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
