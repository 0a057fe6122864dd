//! [`Verbs`]: the parts of the provider, and the functions that use several of these parts.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::address::Address;
use super::channel::EventChannel;
use super::exchange_calls::Exchanges;
use super::ffi::check;
use super::hub::DeviceHub;
use super::mr::DeviceRegions;
use super::queues::DeviceQueues;
use super::sys::ibv_fork_init;
use rdma_transport::error::Result;
use rdma_transport::provider::{DeviceId, Entropy};
use rdma_transport::qp::QpId;
use rdma_transport::slab::{Key, Slab};

/// The provider of RDMA devices, through librdmacm and libibverbs. [`Verbs::open`] opens it.
///
/// The descriptor of its connection-manager channel is an epoll set. The set covers the event channel of librdmacm, the asynchronous events
/// of the devices in use, the streams of connections by out-of-band exchange, and the results of the private threads for iWARP.
pub struct Verbs {
    pub(super) hub: DeviceHub,
    pub(super) queues: DeviceQueues,
    pub(super) regions: DeviceRegions,
    pub(super) addresses: Slab<Address>, // local: peers that the program has looked up
    /// The number of multicast joins so far, which is also the number of the last join.
    pub(super) joins: usize,
    pub(super) exchanges: Exchanges,
    /// Ids that wait until their peer closes the connection, each with its time limit, in the order of the time limits. The list may
    /// contain ids that the program has destroyed.
    pub(super) closing: VecDeque<(Instant, Key)>, // bound: ending-ids
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verbs")
            .field("devices", &self.hub.devices)
            .field("ids", &self.hub.ids.len())
            .field("cqs", &self.queues.cqs.len())
            .field("regions", &self.regions.table.len())
            .finish_non_exhaustive()
    }
}

impl Verbs {
    /// Makes a provider. `manager` is the channel of the connection manager. If the connection manager cannot be used,
    /// `manager` is the reason.
    pub(super) fn on_channel(manager: std::result::Result<Arc<EventChannel>, String>) -> Result<Self> {
        protect_from_forks();
        Ok(Self {
            hub: DeviceHub::new(manager)?,
            queues: DeviceQueues::default(),
            regions: DeviceRegions::default(),
            addresses: Slab::default(),
            joins: 0,
            exchanges: Exchanges::new(),
            closing: VecDeque::new(),
        })
    }

    /// Sets the source of random bytes. Connections by out-of-band exchange use it for the sequence
    /// numbers of their first packets. After this call the provider has the role
    /// [`Exchange`](rdma_transport::roles::Exchange). Use a source that peers cannot predict.
    #[must_use]
    pub fn with_entropy(mut self, entropy: Entropy) -> Self {
        self.exchanges.entropy = Some(entropy);
        self
    }

    /// Destroys an id and its queue pair. The id is invalid afterwards. Fails if the device may
    /// still use the memory of the id's work requests. After such an error, the entries that the id
    /// has reserved in its completion queue and shared receive queue stay reserved.
    pub(super) fn remove(&mut self, key: Key) -> Result<()> {
        let Some(mut id) = self.hub.ids.remove(key) else { return Ok(()) };
        id.leave_all();
        let exchange = id.exchange.take();
        let on_shared = id.qp.as_ref().filter(|qp| qp.srq.is_some());
        let held = id.handshaking || Arc::strong_count(&id.raw) > 1;
        // If the queue pair uses a shared queue, put it into the error state first, so that the
        // device completes the shared receives that the queue pair has consumed. If another thread
        // still has an `Arc` of the id, the queue pair is destroyed later, so it must not access
        // memory from now on.
        let stopped = if held || on_shared.is_some() { id.raw.flush() } else { Ok(()) };
        if let Some(qp) = on_shared {
            // Poll the completions of shared receives before the queue pair is destroyed, because
            // some libraries drop the completions of a queue pair that they destroy. The shared
            // queue would count the receives of dropped completions as outstanding forever.
            self.queues.stash_completions(&mut self.hub, key, qp);
        }
        if let Some(now) =
            self.hub.now.filter(|_| on_shared.is_some() && stopped.is_ok() && id.must_retire(&self.hub.devices))
        {
            if let Some(exchange) = exchange {
                self.exchanges.close_exchange(&mut self.hub, key, id.state, exchange);
            }
            self.queues.retire(key, id, now);
            return Ok(());
        }
        let (qp, device, state, in_use) = (id.qp.take(), id.device, id.state, id.device_in_use());
        let ended = self.hub.destroy(id, stopped);
        if let Some(qp) = qp {
            if qp.srq.is_some() {
                self.queues.stash_completions(&mut self.hub, key, &qp);
            }
            if ended.is_ok() {
                self.queues.release_entries(&qp);
            }
            if let Some(device) = device {
                self.hub.devices[device.0 as usize].numbers.remove(qp.number, QpId(key));
            }
        }
        if let Some(exchange) = exchange {
            self.exchanges.close_exchange(&mut self.hub, key, state, exchange);
        }
        self.hub.leave_device(in_use);
        self.settle();
        ended
    }

    /// Destroys the queue pairs of removed devices that wait for their last shared receive. Closes
    /// each of these devices, and destroys all objects on it, if no id is on it any more.
    pub(super) fn settle(&mut self) {
        while let Some(device) = self.hub.left.pop() {
            self.queues.retire_now(&mut self.hub, device);
            let entry = &mut self.hub.devices[device.0 as usize];
            if !entry.removed || entry.ids > 0 || entry.raw.is_none() {
                continue;
            }
            entry.release_waiting(&self.hub.connector);
            self.queues.release(device);
            for key in self.addresses.keys() {
                if let Some(address) = self.addresses.get_mut(key).filter(|address| address.device == device.0) {
                    address.raw = None;
                }
            }
            self.regions.release(device);
            self.hub.close(device);
        }
    }
}

/// Makes libibverbs exclude registered memory from child processes. It must be called before the first registration. Otherwise,
/// copy-on-write after a `fork` could give this process other pages than those that the device uses. Since version 5.12 the kernel copies
/// such memory for the child during the fork. On such kernels this call does nothing (rdma-core asks the kernel, since version 33).
fn protect_from_forks() {
    // SAFETY: the call has no arguments, and may be repeated at any time.
    let rc = unsafe { ibv_fork_init() };
    if let Err(error) = check("ibv_fork_init", rc) {
        local_log!(
            Warn,
            "{error}: this process must not fork while it has RDMA devices open, unless the child only executes another program"
        );
    }
}

impl Drop for Verbs {
    fn drop(&mut self) {
        for key in self.hub.ids.keys() {
            if let Err(error) = self.remove(key) {
                local_log!(Error, "{error}: the device keeps the posted work requests");
            }
        }
        for device in 0..self.hub.devices.len() {
            self.queues.retire_now(&mut self.hub, DeviceId(device as u32));
            self.hub.devices[device].release_waiting(&self.hub.connector);
        }
    }
}
