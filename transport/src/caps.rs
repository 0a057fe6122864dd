//! The capabilities and limits of a device.

use bitflags::bitflags;

use crate::error::{Result, TransportError};

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
        /// Send with Invalidate. The peer's key is invalidated only if the peer's device has `REMOTE_INVALIDATION`.
        const SEND_WITH_INVALIDATE = 1 << 4;
        /// Shared receive queues.
        const SHARED_RECEIVE_QUEUE = 1 << 5;
        /// Unreliable datagrams.
        const DATAGRAMS = 1 << 6;
        /// Multicast groups.
        const MULTICAST = 1 << 7;
        /// The passive side may send before it has received the first message of the active side.
        const SERVER_SENDS_FIRST = 1 << 8;
        /// Send with immediate data. Absent on iWARP.
        const SEND_WITH_IMMEDIATE = 1 << 9;
        /// A peer's Send with Invalidate can invalidate the remote key of a region. On a device without this feature,
        /// such a message ends the connection, because InfiniBand and RoCE allow it for memory windows only.
        const REMOTE_INVALIDATION = 1 << 10;
        /// Immediate data and atomics work only on connections on which both programs have enabled them
        /// ([`enable_extensions`](crate::roles::Extensions::enable_extensions)).
        const EXTENSIONS_BY_AGREEMENT = 1 << 11;
        /// Regions for which the bus may reorder the device's writes
        /// ([`Access::RELAXED_ORDERING`](crate::Access::RELAXED_ORDERING)).
        const RELAXED_ORDERING = 1 << 12;
        /// Regions whose pages are not pinned, but are paged in when the device accesses them
        /// ([`Access::ON_DEMAND`](crate::Access::ON_DEMAND)).
        const ON_DEMAND_PAGING = 1 << 13;
        /// Regions in a dma-buf, such as memory of a GPU
        /// ([`ForeignMemory::register_dmabuf`](crate::roles::ForeignMemory::register_dmabuf)). The feature means that
        /// the installed libraries have the call. The driver, or the exporter of the memory, may still refuse a
        /// registration.
        const DMABUF = 1 << 14;
        /// The memory into which an RDMA Read places data must be open to writes of the peer
        /// ([`Access::READ_SINK`](crate::Access::READ_SINK)), as on iWARP adapters. A Read into other memory fails. A
        /// peer that violates the protocol can write into this memory for as long as the memory is registered.
        const OPEN_READ_SINKS = 1 << 15;
        /// When a connection is closed, messages whose sends have completed may be lost, as on iWARP adapters and siw.
        /// These devices complete a send when TCP has accepted its bytes. If the peer then sends something to the
        /// closed socket, TCP drops the bytes that it has not delivered yet.
        const ABRUPT_DISCONNECT = 1 << 16;
        /// A peer's write may still be placed after the peer's access has ended. Access ends when
        /// [`invalidate`](crate::roles::RemoteKeys::invalidate) or `deregister` of the region returns, or when the
        /// peer's Send with Invalidate arrives. On siw, another processor may be placing a part of a frame at that
        /// moment. Nothing is placed after the queue pairs are destroyed.
        const LATE_PLACEMENT = 1 << 17;
        /// A completion queue can be armed so that only solicited completions raise an event
        /// ([`Notify::Solicited`](crate::Notify::Solicited)).
        const SOLICITED_EVENTS = 1 << 18;
        /// A Write completes when the peer's device has acknowledged it, as on InfiniBand and RoCE. On iWARP, a Write
        /// completes when TCP has accepted its bytes: only the response to a later operation, such as a Read, proves
        /// that the data was placed.
        const ACKNOWLEDGED_WRITES = 1 << 19;
        /// The memory of a completion queue grows with the completions that are in the queue, as in
        /// a provider in software. So one queue of the largest size is enough for all connections,
        /// and costs no more than a small one.
        const GROWING_COMPLETION_QUEUES = 1 << 20;
    }
}

/// The moderation of a completion queue. The device delays an event of the queue until `completions` completions have
/// arrived, or until `microseconds` microseconds have passed since the first of these completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moderation {
    /// The number of completions after which the device raises the event.
    pub completions: u16,
    /// The longest delay of the event, in microseconds.
    pub microseconds: u16,
}

/// The operations and behaviours of a device, and its limits.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// The operations and behaviours of the device.
    pub features: Features,
    /// The length of the largest payload of an inline send, in bytes; 0 if the device has no inline sends.
    pub max_inline: u32,
    /// The maximum number of scatter/gather entries per work request. RDMA Reads have their own limit, `max_read_sge`.
    pub max_sge: u32,
    /// The maximum number of scatter/gather entries per RDMA Read.
    pub max_read_sge: u32,
    /// The maximum depth of a send queue or a receive queue, in work requests.
    pub max_queue_depth: u32,
    /// The maximum number of entries per completion queue.
    pub max_completion_queue: u32,
    /// The maximum length of private data, in bytes: the smallest of the limits for connect, accept and reject.
    pub max_private_data: usize,
    /// The length of the largest message, in bytes.
    pub max_message: u64,
    /// The maximum number of receives per shared receive queue; 0 if the device has no shared receive queues.
    pub max_shared_receives: u32,
    /// The largest values that [`CqAttr::moderation`](crate::CqAttr::moderation) may have; `None` if the device has no
    /// moderation.
    pub completion_moderation: Option<Moderation>,
    /// The length of the largest datagram, in bytes; 0 if the device has no datagrams. If the ports
    /// of a device differ, this is the limit of the port that was used first;
    /// [`bind_datagram`](crate::roles::Datagrams::bind_datagram) returns the limit of the port that
    /// it uses.
    pub max_datagram: u32,
    /// The maximum number of outstanding RDMA Reads per queue pair, in each direction.
    pub max_read_depth: u16,
    /// The number of completion vectors, at least 1. A vector is an interrupt that one processor serves. Completion
    /// queues on different vectors ([`CqAttr::vector`](crate::CqAttr::vector)) distribute the events over the
    /// processors.
    pub completion_vectors: u32,
    /// The NUMA node to which the device is attached; `None` if it is unknown. Allocate memory for the device on this
    /// node, and run the device's reactor there.
    pub numa_node: Option<u32>,
}

impl Capabilities {
    /// Returns capabilities with `features`, and with limits that every known device supports. A
    /// provider raises the limits of a device that supports more.
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

    /// Checks the length of private data. `provider` is the name of the calling provider, for the error.
    ///
    /// # Errors
    /// [`TransportError::PrivateDataTooLong`] if there are more than `max_private_data` bytes.
    pub const fn check_private_data(&self, provider: &'static str, data: &[u8]) -> Result<()> {
        let (len, max) = (data.len(), self.max_private_data);
        if len > max { Err(TransportError::PrivateDataTooLong { provider, len, max }) } else { Ok(()) }
    }
}

/// A device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The name of the device, such as `mlx5_0` or `iwarp0`.
    pub name: String, // local: the name of a device
    /// The capabilities of the device.
    pub capabilities: Capabilities,
}
