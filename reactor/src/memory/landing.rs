//! A message past one buffer that a peer offers, as the program is told of it, and its place in the program's memory.

use rdma_transport::slab::Key;
use rdma_transport::wr::Sge;

use super::cells::Lease;
use crate::id::OfferId;

/// A message past one buffer that the peer offers: it stays in the peer's memory until it is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Offered {
    /// Its name.
    pub id: OfferId,
    /// Its length, bytes: 1 to `LargeMessageSettings::max_message`.
    pub len: u64,
    /// The peer's tag ([`Context::offer`](crate::Context::offer)). What it means is between the two programs.
    pub tag: Option<u64>,
}

/// The place of a message in a region of the program, which is lent until the message is there or its connection has ended.
#[derive(Debug)]
pub(crate) struct Landing {
    region: Key,
    lease: Lease,
    /// Offset of the message in the region, bytes.
    start: usize,
}

impl Landing {
    pub(crate) const fn new(region: Key, lease: Lease, start: usize) -> Self {
        Self { region, lease, start }
    }

    /// The entry of a part of the message.
    pub(crate) fn entry(&self, from: u64, len: u64) -> Option<Sge> {
        self.lease.entry(self.start.checked_add(usize::try_from(from).ok()?)?, usize::try_from(len).ok()?)
    }

    /// Gives the region back: no read into it is on its way. Returns its key if its owner has dropped it meanwhile.
    pub(crate) fn done(self) -> Option<Key> {
        self.lease.done().then_some(self.region)
    }
}
