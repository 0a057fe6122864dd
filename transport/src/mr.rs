//! Memory regions: memory that a device may access, and the keys that name it.

use bitflags::bitflags;

pub use crate::handle::MrId;

bitflags! {
    /// The access rights of a memory region (`ibv_reg_mr`(3)). Local reads are always allowed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The device may place receives and read responses here.
        const LOCAL_WRITE = 1;
        /// The peer may write here.
        const REMOTE_WRITE = 2;
        /// The peer may read here.
        const REMOTE_READ = 4;
        /// The peer may do atomic operations here, if the device has them.
        const REMOTE_ATOMIC = 8;
        /// The region may be the sink of this side's RDMA Reads. It implies `LOCAL_WRITE`. On iWARP adapters a Read
        /// into a region without this right fails, because the sink of a Read must be open to writes of the peer there
        /// (RFC 5040, section 3.1: the response names the sink by its STag). So give the right to the sinks of Reads
        /// and to nothing else.
        const READ_SINK = 16;
        /// The bus may reorder the device's writes to the region (PCI Express relaxed ordering). That is faster on some
        /// machines. Never use it for memory that a program polls for a change instead of waiting for a completion.
        /// Ignored on machines without it.
        const RELAXED_ORDERING = 32;
        /// The pages are not pinned: they are paged in when the device needs them (on-demand paging). Refused on
        /// devices without [`Features::ON_DEMAND_PAGING`](crate::Features::ON_DEMAND_PAGING).
        const ON_DEMAND = 64;
        /// Peers on this host map the memory and access it themselves, without the processor of its owner. The region
        /// must cover a whole memory of [`Memory::new_shared`](crate::Memory::new_shared). Such a peer keeps the pages,
        /// so the rights cannot be revoked: [`invalidate`](crate::roles::RemoteKeys::invalidate) and
        /// [`restrict`](crate::roles::RemoteKeys::restrict) refuse the region, and the peer can still access the pages
        /// after [`deregister`](crate::Provider::deregister). Only the embedded provider has this right.
        const DIRECT = 128;
    }
}

impl Access {
    /// All rights of peers.
    pub const REMOTE: Self = Self::REMOTE_WRITE.union(Self::REMOTE_READ).union(Self::REMOTE_ATOMIC);

    /// Returns the rights of the program itself, without those of peers. A remote right to write implies the local one,
    /// as devices demand. The flags for how the device accesses the memory are kept.
    #[must_use]
    pub const fn local(self) -> Self {
        let kept = self.intersection(Self::READ_SINK.union(Self::RELAXED_ORDERING).union(Self::ON_DEMAND));
        let writes = Self::LOCAL_WRITE.union(Self::REMOTE_WRITE).union(Self::REMOTE_ATOMIC).union(Self::READ_SINK);
        if self.intersects(writes) { kept.union(Self::LOCAL_WRITE) } else { kept }
    }
}

/// The key of a region in the program's own work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LocalKey(pub u32);

/// The key of a region for peers: the STag of iWARP. It is unpredictable, and valid only while the region is
/// registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteKey(pub u32);

/// A registered region.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRegion {
    /// The handle, for deregistering.
    pub id: MrId,
    /// The key for scatter/gather entries.
    pub local_key: LocalKey,
    /// The key for peers; useless without remote access rights.
    pub remote_key: RemoteKey,
}
