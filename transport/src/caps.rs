//! The capabilities and limits of a device.

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
        /// RDMA Write with immediate data. Absent in standard iWARP.
        const WRITE_WITH_IMMEDIATE = 1 << 2;
        /// 8-byte compare-and-swap and fetch-and-add. Absent in standard iWARP.
        const ATOMICS = 1 << 3;
        /// Send with Invalidate. A key is only invalidated if the peer's device has `REMOTE_INVALIDATION`.
        const SEND_WITH_INVALIDATE = 1 << 4;
        /// Shared receive queues.
        const SHARED_RECEIVE_QUEUE = 1 << 5;
        /// Unreliable datagrams.
        const DATAGRAMS = 1 << 6;
        /// Multicast groups.
        const MULTICAST = 1 << 7;
        /// The passive side may send before it has received a message of the active side.
        const SERVER_SENDS_FIRST = 1 << 8;
        /// Send with immediate data. Absent on iWARP.
        const SEND_WITH_IMMEDIATE = 1 << 9;
        /// A peer's Send with Invalidate invalidates the remote key of a region. On a device without this feature it
        /// ends the connection, since InfiniBand and RoCE allow it for memory windows only.
        const REMOTE_INVALIDATION = 1 << 10;
        /// Immediate data and atomics work only on connections for which both programs have enabled them
        /// ([`enable_extensions`](crate::roles::Extensions::enable_extensions)).
        const EXTENSIONS_BY_AGREEMENT = 1 << 11;
        /// Regions in which the bus may reorder the device's writes
        /// ([`Access::RELAXED_ORDERING`](crate::Access::RELAXED_ORDERING)).
        const RELAXED_ORDERING = 1 << 12;
        /// Regions whose pages are not pinned, but paged in when the device needs them
        /// ([`Access::ON_DEMAND`](crate::Access::ON_DEMAND)).
        const ON_DEMAND_PAGING = 1 << 13;
        /// Regions over a dma-buf, such as memory of a GPU
        /// ([`ForeignMemory::register_dmabuf`](crate::roles::ForeignMemory::register_dmabuf)). The feature says that
        /// the libraries support the call. Support by the driver and by the exporter of the memory is only known after
        /// an attempt.
        const DMABUF = 1 << 14;
        /// The sink of an RDMA Read must be open to writes of the peer
        /// ([`Access::READ_SINK`](crate::Access::READ_SINK)), as on iWARP adapters. A Read into other memory fails. A
        /// peer that violates the protocol can write into a sink for as long as it is registered.
        const OPEN_READ_SINKS = 1 << 15;
        /// A disconnect may overtake completed sends, as on iWARP adapters and siw. There a send completes when TCP has
        /// accepted its bytes, and TCP drops them if the peer sends something to a closed socket.
        const ABRUPT_DISCONNECT = 1 << 16;
        /// Bytes that a peer has written may still be placed after [`invalidate`](crate::roles::RemoteKeys::invalidate)
        /// or `deregister` of their region has returned, or the peer's Send with Invalidate has arrived. That is so on
        /// siw, where another processor may be placing a part of a frame at that moment. Nothing is placed after the
        /// queue pairs were destroyed.
        const LATE_PLACEMENT = 1 << 17;
        /// Completion queues that can be armed for solicited completions
        /// ([`Notify::Solicited`](crate::Notify::Solicited)).
        const SOLICITED_EVENTS = 1 << 18;
        /// A Write completes when the peer's device has acknowledged it, as on InfiniBand and RoCE. On iWARP it
        /// completes when TCP has accepted its bytes, and only the response to a later operation, such as a Read, shows
        /// that it was placed.
        const ACKNOWLEDGED_WRITES = 1 << 19;
    }
}

/// The moderation of a completion queue: the device holds the queue's events back until a number of completions have
/// gathered, or a time has passed since the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moderation {
    /// The number of completions.
    pub completions: u16,
    /// The time, microseconds.
    pub microseconds: u16,
}

/// The operations and behaviours of a device, and its limits.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// Operations and behaviours.
    pub features: Features,
    /// The largest payload of an inline send, bytes; 0 if the device has no inline sends.
    pub max_inline: u32,
    /// The limit of scatter/gather entries per work request.
    pub max_sge: u32,
    /// The limit of scatter/gather entries per RDMA Read.
    pub max_read_sge: u32,
    /// The limit of work requests per queue.
    pub max_queue_depth: u32,
    /// The limit of entries per completion queue.
    pub max_completion_queue: u32,
    /// The limit of private data, bytes: the smallest of those for connect, accept and reject.
    pub max_private_data: usize,
    /// The largest message, bytes.
    pub max_message: u64,
    /// The limit of receives per shared receive queue; 0 if the device has none.
    pub max_shared_receives: u32,
    /// The limits of moderation; `None` if the device cannot hold events back.
    pub completion_moderation: Option<Moderation>,
    /// The largest datagram, bytes; 0 if the device has no datagrams.
    pub max_datagram: u32,
    /// The limit of outstanding RDMA Reads per queue pair, in each direction.
    pub max_read_depth: u16,
    /// The number of completion vectors, at least 1. Each vector is an interrupt that one processor serves; the events
    /// of completion queues can be spread over them ([`CqAttr::vector`](crate::CqAttr::vector)).
    pub completion_vectors: u32,
    /// The NUMA node that the device is attached to; `None` if the system does not know it. Allocate memory for the
    /// device on this node, and run its reactor there.
    pub numa_node: Option<u32>,
}

impl Capabilities {
    /// Returns capabilities with `features`, and with limits that every known device meets. A provider raises the
    /// limits where it can.
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

    /// Checks the length of private data, for a provider with this name.
    ///
    /// # Errors
    /// [`Error::PrivateDataTooLong`] if there are more than `max_private_data` bytes.
    pub const fn check_private_data(&self, provider: &'static str, data: &[u8]) -> Result<()> {
        let (len, max) = (data.len(), self.max_private_data);
        if len > max { Err(Error::PrivateDataTooLong { provider, len, max }) } else { Ok(()) }
    }
}

/// A device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The name of the device, such as `mlx5_0` or `iwarp0`.
    pub name: String,
    /// The capabilities of the device.
    pub capabilities: Capabilities,
}
