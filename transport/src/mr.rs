//! Memory regions: memory a device may reach, and the keys that name it.

use bitflags::bitflags;

pub use crate::handle::MrId;

bitflags! {
    /// What a memory region allows (`ibv_reg_mr`(3)). Local read access is always allowed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// Receives and read responses may be placed here.
        const LOCAL_WRITE = 1;
        /// The peer may write here.
        const REMOTE_WRITE = 2;
        /// The peer may read here.
        const REMOTE_READ = 4;
        /// The peer may do atomic operations here, where the device has them.
        const REMOTE_ATOMIC = 8;
        /// The region receives the answers to RDMA Reads of our own. It brings `LOCAL_WRITE`. On iWARP adapters a Read into
        /// a region without this right fails: there the sink of a Read must be open to writes of the peer (RFC 5040, section
        /// 3.1: the answer names the sink by its STag), so give it to the sinks of Reads and to nothing else.
        const READ_SINK = 16;
        /// The bus may reorder what the device writes here (PCI Express relaxed ordering). Faster on some machines. Never for
        /// memory that a program watches for a change instead of waiting for a completion. Ignored where there is none.
        const RELAXED_ORDERING = 32;
        /// The pages are not pinned: the device fetches them when it needs them (on-demand paging). Refused on devices
        /// without [`Features::ON_DEMAND_PAGING`](crate::Features::ON_DEMAND_PAGING).
        const ON_DEMAND = 64;
        /// Peers of this host map the memory and use it themselves, without the processor of its owner. The region is all of a memory of its
        /// own ([`Memory::new_shared`](crate::Memory::new_shared)). Such a peer keeps the pages, so the rights cannot be taken back:
        /// [`invalidate`](crate::roles::RemoteKeys::invalidate) and [`restrict`](crate::roles::RemoteKeys::restrict) refuse the region, and
        /// what is in the pages stays open to the peer after [`deregister`](crate::Provider::deregister). Only the embedded provider has it.
        const DIRECT = 128;
    }
}

impl Access {
    /// The rights of peers.
    pub const REMOTE: Self = Self::REMOTE_WRITE.union(Self::REMOTE_READ).union(Self::REMOTE_ATOMIC);

    /// The rights of the program itself, without those of peers: a remote right that writes brings the local one, as devices
    /// demand. How the device reaches the memory stays as it is.
    #[must_use]
    pub const fn local(self) -> Self {
        let kept = self.intersection(Self::READ_SINK.union(Self::RELAXED_ORDERING).union(Self::ON_DEMAND));
        let writes = Self::LOCAL_WRITE.union(Self::REMOTE_WRITE).union(Self::REMOTE_ATOMIC).union(Self::READ_SINK);
        if self.intersects(writes) { kept.union(Self::LOCAL_WRITE) } else { kept }
    }
}

/// Names a region in work requests of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LocalKey(pub u32);

/// Names a region to a peer: the STag of iWARP. Unpredictable, and valid only while registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteKey(pub u32);

/// A registered region.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRegion {
    /// Handle, to deregister.
    pub id: MrId,
    /// Key for scatter/gather entries.
    pub local_key: LocalKey,
    /// Key for a peer; it has no use without remote access rights.
    pub remote_key: RemoteKey,
}
