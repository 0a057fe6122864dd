//! Memory regions: memory that a device may access, and the keys by which work requests and peers name a region.

use bitflags::bitflags;

pub use crate::handle::MrId;

bitflags! {
    /// The access rights of a memory region (`ibv_reg_mr`(3)). Local reads are always allowed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The device may place received messages and the results of RDMA Reads in the region.
        const LOCAL_WRITE = 1;
        /// The peer may write to the region.
        const REMOTE_WRITE = 2;
        /// The peer may read the region.
        const REMOTE_READ = 4;
        /// The peer may perform atomic operations on the region, if the device has atomics.
        const REMOTE_ATOMIC = 8;
        /// The local program may read into the region with RDMA Reads. Implies `LOCAL_WRITE`. On iWARP adapters a Read
        /// into a region without this right fails. On these adapters, the memory into which a Read places data must be
        /// open to writes of the peer, because the response names that memory by its STag (RFC 5040, section 3.1). So
        /// grant this right only for memory into which the program reads.
        const READ_SINK = 16;
        /// The bus may reorder the device's writes to the region (PCI Express relaxed ordering), which is faster on
        /// some machines. Never use this right for memory that a program polls for a change instead of waiting for a
        /// completion. Ignored on machines without relaxed ordering.
        const RELAXED_ORDERING = 32;
        /// The pages are not pinned: they are paged in when the device accesses them (on-demand paging). Refused on
        /// devices without [`Features::ON_DEMAND_PAGING`](crate::Features::ON_DEMAND_PAGING).
        const ON_DEMAND = 64;
        /// Peers on this host map the memory and access it themselves; the process that has registered it is not
        /// involved. The region must cover a whole memory that [`Memory::new_shared`](crate::Memory::new_shared) has
        /// made. A peer keeps its mapping, so the rights cannot be revoked:
        /// [`invalidate`](crate::roles::RemoteKeys::invalidate) and [`restrict`](crate::roles::RemoteKeys::restrict)
        /// refuse the region. The peer can access the pages even after [`deregister`](crate::Provider::deregister).
        /// Only the embedded provider has this right.
        const DIRECT = 128;
    }
}

impl Access {
    /// All rights of peers.
    pub const REMOTE: Self = Self::REMOTE_WRITE.union(Self::REMOTE_READ).union(Self::REMOTE_ATOMIC);

    /// Returns these rights without the rights of peers. A remote right to write becomes `LOCAL_WRITE`, because devices
    /// require both together. `READ_SINK`, `RELAXED_ORDERING` and `ON_DEMAND` are kept.
    #[must_use]
    pub const fn local(self) -> Self {
        let kept = self.intersection(Self::READ_SINK.union(Self::RELAXED_ORDERING).union(Self::ON_DEMAND));
        let writes = Self::LOCAL_WRITE.union(Self::REMOTE_WRITE).union(Self::REMOTE_ATOMIC).union(Self::READ_SINK);
        if self.intersects(writes) { kept.union(Self::LOCAL_WRITE) } else { kept }
    }
}

/// The key by which the program's work requests name a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LocalKey(pub u32);

/// The key by which peers name a region (the STag on iWARP). It is unpredictable, and valid only while the region is
/// registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteKey(pub u32);

/// A registered region.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRegion {
    /// The handle, with which the region is deregistered.
    pub id: MrId,
    /// The key for scatter/gather entries.
    pub local_key: LocalKey,
    /// The key for peers. A peer cannot use it if the region has no remote access rights.
    pub remote_key: RemoteKey,
}
