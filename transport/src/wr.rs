//! Work requests: what is posted to a queue pair.

use bitflags::bitflags;

use crate::datagram::Destination;
pub use crate::mem::Sge;
use crate::mr::RemoteKey;

/// Scatter/gather entries a work request can carry. Every known device takes as many.
pub const MAX_SGE: usize = 4;

/// Up to [`MAX_SGE`] scatter/gather entries, in place.
#[derive(Clone, Copy, Debug, Default)]
pub struct SgeList {
    items: [Sge; MAX_SGE],
    len: u8,
}

impl SgeList {
    /// A list of one entry.
    #[must_use]
    #[inline]
    pub fn one(sge: Sge) -> Self {
        let mut list = Self { items: [Sge::default(); MAX_SGE], len: 1 };
        list.items[0] = sge;
        list
    }

    /// Adds an entry; gives it back when the list is full.
    pub fn push(&mut self, sge: Sge) -> Result<(), Sge> {
        let slot = self.items.get_mut(usize::from(self.len)).ok_or(sge)?;
        *slot = sge;
        self.len += 1;
        Ok(())
    }

    /// The entries.
    #[must_use]
    #[inline]
    pub fn as_slice(&self) -> &[Sge] {
        &self.items[..usize::from(self.len)]
    }

    /// Bytes of all entries together.
    #[must_use]
    #[inline]
    pub fn total_len(&self) -> usize {
        self.as_slice().iter().map(|sge| sge.len()).sum()
    }
}

bitflags! {
    /// Flags of a send work request (`ibv_post_send`(3)).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct SendFlags: u8 {
        /// Produce a completion on success too. Failures always complete.
        const SIGNALED = 1;
        /// Wake a peer that armed for solicited completions only.
        const SOLICITED = 2;
        /// Copy the payload at post time; the memory is free again when the call returns.
        const INLINE = 4;
        /// Wait for earlier RDMA Reads before starting.
        const FENCE = 8;
    }
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddress {
    /// Virtual address (tagged offset on iWARP).
    pub address: u64,
    /// Its key.
    pub key: RemoteKey,
}

/// What a send work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendOp {
    /// Send to the peer's next posted receive.
    Send,
    /// Send, with 32 bits of data beside the payload.
    SendWithImmediate(u32),
    /// Send, and invalidate a key of the peer.
    SendInvalidate(RemoteKey),
    /// Send a datagram. Only datagram queue pairs do this and the next kind, and they do nothing else.
    Datagram(Destination),
    /// Send a datagram, with 32 bits of data beside the payload.
    DatagramWithImmediate(Destination, u32),
    /// Write to the peer's memory.
    Write(RemoteAddress),
    /// Write, then complete one receive of the peer with 32 bits of data.
    WriteWithImmediate(RemoteAddress, u32),
    /// Read the peer's memory.
    Read(RemoteAddress),
    /// Swap 8 bytes of the peer when they equal `expected`; the old value lands in the entry.
    CompareSwap {
        /// The 8 bytes.
        remote: RemoteAddress,
        /// What must be there.
        expected: u64,
        /// What is put there.
        swap: u64,
    },
    /// Add to 8 bytes of the peer; the old value lands in the entry.
    FetchAdd {
        /// The 8 bytes.
        remote: RemoteAddress,
        /// What is added.
        add: u64,
    },
}

/// A send work request.
#[derive(Clone, Copy, Debug)]
pub struct SendWr {
    /// The number that comes back in the completion. It is below 2^63: the highest bit is the provider's.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp,
    /// Local memory.
    pub sges: SgeList,
    /// Flags.
    pub flags: SendFlags,
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr {
    /// The number that comes back in the completion. It is below 2^63: the highest bit is the provider's.
    pub wr_id: u64,
    /// Where the message goes.
    pub sges: SgeList,
}
