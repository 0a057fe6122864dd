//! A message longer than one buffer that a peer offers, as reported to the program, and its target in the program's
//! memory.

use rdma_transport::slab::Key;
use rdma_transport::wr::Sge;

use super::region_memory::Lease;
use crate::id::OfferId;

/// A message longer than one buffer that the peer offers: it stays in the peer's memory until it is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Offered {
    /// The id of the offer.
    pub id: OfferId,
    /// The length, in bytes: 1 to `LargeMessageSettings::max_message`.
    pub len: u64,
    /// The peer's tag ([`Context::offer`](crate::Context::offer)). The two programs agree on its meaning.
    pub tag: Option<u64>,
}

/// The target of a message in a region of the program. The region is on loan until the message has arrived or its connection has ended.
#[derive(Debug)]
pub(crate) struct Landing {
    region: Key,
    lease: Lease,
    /// The offset of the message in the region, in bytes.
    start: usize,
}

impl Landing {
    pub(crate) const fn new(region: Key, lease: Lease, start: usize) -> Self {
        Self { region, lease, start }
    }

    /// Returns the entry of a part of the message.
    pub(crate) fn entry(&self, from: u64, len: u64) -> Option<Sge> {
        self.lease.entry(self.start.checked_add(usize::try_from(from).ok()?)?, usize::try_from(len).ok()?)
    }

    /// Releases the region: no read into it is in flight. Returns its key if its owner has dropped it meanwhile.
    pub(crate) fn done(self) -> Option<Key> {
        self.lease.done().then_some(self.region)
    }
}
