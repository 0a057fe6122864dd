//! Capabilities of a device, to be asked before use instead of found out by failure.

use bitflags::bitflags;

use crate::error::{Error, Result};

bitflags! {
    /// Operations and behaviours of a device.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u32 {
        /// RDMA Read.
        const READ = 1 << 0;
        /// RDMA Write.
        const WRITE = 1 << 1;
        /// RDMA Write with immediate data. Absent on the standard iWARP wire.
        const WRITE_WITH_IMMEDIATE = 1 << 2;
        /// 8-byte compare-and-swap and fetch-and-add. Absent on the standard iWARP wire.
        const ATOMICS = 1 << 3;
        /// Send with Invalidate. Whether it invalidates a key depends on the peer: see `REMOTE_INVALIDATION`.
        const SEND_WITH_INVALIDATE = 1 << 4;
        /// Receive queues shared by queue pairs.
        const SHARED_RECEIVE_QUEUE = 1 << 5;
        /// Unreliable datagrams.
        const DATAGRAMS = 1 << 6;
        /// Multicast groups.
        const MULTICAST = 1 << 7;
        /// The passive side may send before the active side has.
        const SERVER_SENDS_FIRST = 1 << 8;
        /// Send with immediate data. iWARP has none.
        const SEND_WITH_IMMEDIATE = 1 << 9;
        /// A peer's Send with Invalidate invalidates a region's remote key. Where this is absent it ends the
        /// connection, since InfiniBand and RoCE allow it for memory windows only.
        const REMOTE_INVALIDATION = 1 << 10;
        /// Immediate data and atomics only on connections whose peer agreed
        /// ([`enable_extensions`](crate::roles::Extensions::enable_extensions)).
        const EXTENSIONS_BY_AGREEMENT = 1 << 11;
        /// Regions whose writes the bus may reorder ([`Access::RELAXED_ORDERING`](crate::Access::RELAXED_ORDERING)).
        const RELAXED_ORDERING = 1 << 12;
        /// Regions whose pages are not pinned, but fetched when the device needs them
        /// ([`Access::ON_DEMAND`](crate::Access::ON_DEMAND)).
        const ON_DEMAND_PAGING = 1 << 13;
        /// Regions over a dma-buf, such as memory of a GPU
        /// ([`ForeignMemory::register_dmabuf`](crate::roles::ForeignMemory::register_dmabuf)). The libraries can ask for one; whether the
        /// driver and the exporter of the memory agree is known only when it is tried.
        const DMABUF = 1 << 14;
        /// The sink of an RDMA Read must be open to writes of the peer
        /// ([`Access::READ_SINK`](crate::Access::READ_SINK)), as on iWARP adapters: a Read into other memory fails, and a peer
        /// that breaks the rules can write into a sink for as long as it is registered.
        const OPEN_READ_SINKS = 1 << 15;
        /// A disconnect may overtake sends that have completed, as on iWARP adapters and siw: a send completes when TCP has it, and
        /// TCP drops what it has when the peer sends something to a socket that is closed.
        const ABRUPT_DISCONNECT = 1 << 16;
        /// What a peer has written may still be placed when [`invalidate`](crate::roles::RemoteKeys::invalidate) or `deregister` of its
        /// region has returned, or the peer's Send with Invalidate has arrived, as on siw: another processor may be placing a
        /// part of a frame meanwhile. Once the queue pairs are destroyed, nothing is.
        const LATE_PLACEMENT = 1 << 17;
        /// Completion queues that are armed for solicited completions ([`Notify::Solicited`](crate::Notify::Solicited)).
        const SOLICITED_EVENTS = 1 << 18;
        /// A Write completes when the peer's device has placed it, as on InfiniBand and RoCE. On iWARP it completes when TCP has it,
        /// and only an answer to something behind it, such as a Read, shows that it was placed.
        const ACKNOWLEDGED_WRITES = 1 << 19;
    }
}

/// How long a device holds the events of a completion queue back: until so many completions have gathered, or until so
/// much time has passed since the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moderation {
    /// Completions.
    pub completions: u16,
    /// Microseconds.
    pub microseconds: u16,
}

/// What one device can do, and its limits.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// Operations and behaviours.
    pub features: Features,
    /// Largest payload of an inline send, bytes; 0 when there is none.
    pub max_inline: u32,
    /// Scatter/gather entries per work request.
    pub max_sge: u32,
    /// Scatter/gather entries per RDMA Read.
    pub max_read_sge: u32,
    /// Work requests per queue.
    pub max_queue_depth: u32,
    /// Entries per completion queue.
    pub max_completion_queue: u32,
    /// Private data of connect, accept and reject, bytes: the least of the three.
    pub max_private_data: usize,
    /// Largest message, bytes.
    pub max_message: u64,
    /// Receives per shared receive queue; 0 when there is none.
    pub max_shared_receives: u32,
    /// The most that a completion queue's events can be held back; `None` when they cannot.
    pub completion_moderation: Option<Moderation>,
    /// Largest datagram, bytes; 0 when there are none.
    pub max_datagram: u32,
    /// Outstanding RDMA Reads per queue pair, each direction.
    pub max_read_depth: u16,
    /// Completion vectors, at least 1: interrupts, each served by a processor of its own, that the events of completion
    /// queues can be spread over ([`CqAttr::vector`](crate::CqAttr::vector)).
    pub completion_vectors: u32,
    /// The NUMA node that the device is attached to, if the system knows. Memory for it is best taken from that node,
    /// and its reactor is best run there.
    pub numa_node: Option<u32>,
}

impl Capabilities {
    /// Capabilities with `features`, and with limits that every known device meets; a provider raises them where it
    /// can.
    #[must_use]
    pub const fn portable(features: Features) -> Self {
        Self {
            features,
            max_inline: 0,
            max_sge: 4,
            max_read_sge: 1,
            max_queue_depth: 4096,
            max_completion_queue: 32767,
            max_private_data: 56,
            max_message: 1 << 30,
            max_shared_receives: 0,
            completion_moderation: None,
            max_datagram: 0,
            max_read_depth: 16,
            completion_vectors: 1,
            numa_node: None,
        }
    }

    /// Checks the length of private data, for the provider of that name.
    ///
    /// # Errors
    /// [`Error::PrivateDataTooLong`].
    pub const fn check_private_data(&self, provider: &'static str, data: &[u8]) -> Result<()> {
        let (len, max) = (data.len(), self.max_private_data);
        if len > max { Err(Error::PrivateDataTooLong { provider, len, max }) } else { Ok(()) }
    }
}

/// A device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its name, such as `mlx5_0` or `iwarp0`.
    pub name: String,
    /// What it can do.
    pub capabilities: Capabilities,
}
