//! Shared receive queues.

use crate::caps::Capabilities;
use crate::error::{Result, in_range};

/// The attributes of a shared receive queue (`ibv_create_srq`(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// The capacity, in receives: 1 to the device's [`max_shared_receives`](crate::Capabilities::max_shared_receives).
    pub max_wr: u32,
    /// The maximum number of scatter/gather entries per receive: 1 to the device's `max_sge`. 0 selects the device's
    /// `max_sge`. With 1 entry, an adapter's queue takes a quarter of the memory that it takes with 4.
    pub max_sge: u32,
}

impl SrqAttr {
    /// Returns the attributes of a queue with this capacity. A receive may have as many scatter/gather entries as the
    /// device supports.
    #[must_use]
    pub const fn new(max_wr: u32) -> Self {
        Self { max_wr, max_sge: 0 }
    }

    /// Checks the capacity against the limits of the device. A provider calls this when it creates a shared receive
    /// queue.
    ///
    /// # Errors
    /// [`TransportError::OutOfRange`](crate::TransportError::OutOfRange) if the capacity is outside its range.
    pub fn check(&self, limits: &Capabilities) -> Result<()> {
        let receives = 1..=limits.max_shared_receives.into();
        in_range("depth of the shared receive queue", self.max_wr, receives, "1 to the device's max_shared_receives")
    }
}
