//! Offered messages: the description of an offered message for the program, and the target if the program reads the
//! message into its own memory. An offered message is longer than one buffer, or the peer's program has offered it with
//! [`Context::offer`](crate::Context::offer).

use rdma_transport::slab::Key;
use rdma_transport::wr::Sge;

use super::region_memory::Lease;
use crate::id::OfferId;

/// A message that the peer offers. Its bytes stay in the peer's memory until the reactor fetches them or the program
/// refuses the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Offered {
    /// The id of the offer, for [`Context::land`](crate::Context::land) and
    /// [`Context::refuse_offer`](crate::Context::refuse_offer).
    pub id: OfferId,
    /// The length of the message, in bytes: 1 to `LargeMessageSettings::max_message`.
    pub len: u64,
    /// The tag that the peer's program has passed to [`Context::offer`](crate::Context::offer). The two programs agree
    /// on the meaning of tags. `None` if the peer has offered the message without a tag.
    pub tag: Option<u64>,
}

/// The target of an offered message: a part of a region of the program. The part is lent until the message has arrived or the connection
/// has ended.
#[derive(Debug)]
pub(crate) struct Landing {
    region: Key,
    lease: Lease,
    /// The offset in the region at which the message begins, in bytes.
    start: usize,
}

impl Landing {
    pub(crate) const fn new(region: Key, lease: Lease, start: usize) -> Self {
        Self { region, lease, start }
    }

    /// Returns the scatter/gather entry for `len` bytes of the message, from byte `from` of the message on; `None` if
    /// these bytes are not inside the target.
    pub(crate) fn entry(&self, from: u64, len: u64) -> Option<Sge> {
        let start = if crate::planted("a-landing-at-the-start-of-its-region") { 0 } else { self.start };
        self.lease.entry(start.checked_add(usize::try_from(from).ok()?)?, usize::try_from(len).ok()?)
    }

    /// Ends the loan of the region. No read into the region may be in flight. Returns the region's key if the owner has
    /// dropped the region while it was lent: the caller then deregisters the region. Returns `None` otherwise.
    pub(crate) fn done(self) -> Option<Key> {
        if crate::planted("a-landing-keeps-its-region") {
            return None;
        }
        self.lease.done().then_some(self.region)
    }
}
