//! Shared receive queues.

use crate::caps::Capabilities;
use crate::error::{Result, in_range};

/// The attributes of a shared receive queue (`ibv_create_srq`(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// The capacity, 1 to the device's [`max_shared_receives`](crate::Capabilities::max_shared_receives).
    pub max_wr: u32,
    /// The number of scatter/gather entries per receive, 1 to the device's `max_sge`; 0 for as many as the device has.
    /// With 1, the entries of an adapter's queue are a quarter as long.
    pub max_sge: u32,
}

impl SrqAttr {
    /// Returns the attributes of a queue with this capacity, with as many entries per receive as the device has.
    #[must_use]
    pub const fn new(max_wr: u32) -> Self {
        Self { max_wr, max_sge: 0 }
    }

    /// Checks the capacity against the limits of a device, for its provider.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) if the capacity is outside its range.
    pub fn check(&self, limits: &Capabilities) -> Result<()> {
        let receives = 1..=limits.max_shared_receives.into();
        in_range("depth of the shared receive queue", self.max_wr, receives, "1 to the device's max_shared_receives")
    }
}
