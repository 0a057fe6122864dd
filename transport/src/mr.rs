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
    }
}

impl Access {
    /// The rights of peers.
    pub const REMOTE: Self = Self::REMOTE_WRITE.union(Self::REMOTE_READ).union(Self::REMOTE_ATOMIC);

    /// The rights of the program itself. A right of peers to write brings the local right to write, as devices demand.
    #[must_use]
    pub const fn local(self) -> Self {
        if self.intersects(Self::LOCAL_WRITE.union(Self::REMOTE_WRITE).union(Self::REMOTE_ATOMIC)) {
            Self::LOCAL_WRITE
        } else {
            Self::empty()
        }
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
