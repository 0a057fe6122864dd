//! The devices that a reactor uses, by number. The table has a device from its first use until the device was removed
//! and nothing is left on it.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};
use rdma_transport::provider::{DeviceId, Provider};
use rdma_transport::wr::RecvWr;

use super::cq::{CompletionQueue, Queue};
use super::home::{Home, Returned};
use super::pool::Pool;
use super::{Buffers, Device};
use crate::config::Config;
use crate::seam::wake::WakeFlag;
use crate::stats::MemoryStats;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Devices {
    all: Vec<Option<Device>>,
    /// Devices that came into use and whose channels are not watched yet.
    fresh: Vec<DeviceId>,
    /// The buffers of connections that are on no device.
    nowhere: Buffers,
    return_to: Sender<Returned>,
    returned: Receiver<Returned>,
    wake: Arc<WakeFlag>,
    /// The number of the reactor, which spreads reactors over completion vectors.
    reactor: u32,
    /// A timer is set for a look at pools that may have memory which nobody needs.
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

    /// A completion queue, also of a device that has failed or is going.
    #[inline]
    pub(crate) fn cq(&mut self, (device, at): Queue) -> Option<&mut CompletionQueue> {
        self.get_mut(device)?.cqs.get_mut(at)
    }

    /// The buffers of a device. An unknown device has none.
    #[inline]
    pub(crate) fn buffers(&mut self, index: usize) -> &mut Buffers {
        match self.all.get_mut(index) {
            Some(Some(device)) => &mut device.buffers,
            _ => &mut self.nowhere,
        }
    }

    /// Returns a device; adds it to the table on first use.
    pub(crate) fn use_device(&mut self, id: DeviceId, provider: &dyn Provider, config: &Config) -> &mut Device {
        let index = id.0 as usize;
        if self.all.len() <= index {
            self.all.resize_with(index + 1, || None);
        }
        let (fresh, channel, wake, reactor) = (&mut self.fresh, &self.return_to, &self.wake, self.reactor);
        self.all[index].get_or_insert_with(|| {
            fresh.push(id);
            let home = Home { device: index, channel: channel.clone(), wake: Arc::clone(wake) };
            Device::new(id, provider, config, reactor, Arc::new(home))
        })
    }

    /// The next device with a channel that is not watched yet.
    pub(crate) fn fresh(&self) -> Option<DeviceId> {
        self.fresh.last().copied()
    }

    /// Notes that the channel of that device is watched, or not needed any more.
    pub(crate) fn watched(&mut self) {
        self.fresh.pop();
    }

    #[inline]
    pub(crate) fn has_fresh(&self) -> bool {
        !self.fresh.is_empty()
    }

    /// Bound of the devices' numbers: each is below it.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Device> {
        self.all.iter().flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Device> {
        self.all.iter_mut().flatten()
    }

    /// Takes a device out of the table.
    pub(crate) fn take(&mut self, index: usize) -> Option<Device> {
        self.all.get_mut(index)?.take()
    }

    /// Takes the next buffer that came home.
    pub(crate) fn next_returned(&mut self) -> Option<Returned> {
        self.returned.try_recv().ok()
    }

    /// Whether a buffer belongs to a device of this reactor.
    pub(crate) fn is_home_of(&self, home: &Home) -> bool {
        home.channel.same_channel(&self.return_to)
    }

    /// Lends a list for work requests of receives; see [`Devices::put_receive_chain`].
    pub(crate) fn take_receive_chain(&mut self) -> Vec<RecvWr> {
        std::mem::take(&mut self.receive_chain)
    }

    /// Takes the list for work requests back, to reuse its memory.
    pub(crate) fn put_receive_chain(&mut self, chain: Vec<RecvWr>) {
        self.receive_chain = chain;
    }

    /// Posts the shared receives that came back, on all devices.
    pub(crate) fn settle_shared(&mut self, provider: &mut dyn Provider) {
        let chain = &mut self.receive_chain;
        self.all.iter_mut().flatten().for_each(|device| device.settle_shared(provider, chain));
    }

    /// Whether some pool has more than it needs.
    pub(crate) fn are_excessive(&self) -> bool {
        self.iter().any(|device| device.buffers.pool.is_excessive())
    }

    /// The current levels of all pools together.
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
