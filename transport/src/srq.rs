//! Shared receive queues.

use crate::caps::Capabilities;
use crate::error::{Result, in_range};

/// The attributes of a shared receive queue (`ibv_create_srq`(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// Number of receives, 1 to the device's [`max_queue_depth`](crate::Capabilities::max_queue_depth).
    pub max_wr: u32,
    /// Scatter/gather entries of a receive, 1 to the device's `max_sge`; 0 for as many as the device has. With 1 the entries of an
    /// adapter's queue are a quarter as long.
    pub max_sge: u32,
}

impl SrqAttr {
    /// A queue of that many receives, with as many entries for each as the device has.
    #[must_use]
    pub const fn new(max_wr: u32) -> Self {
        Self { max_wr, max_sge: 0 }
    }

    /// Checks the number of receives against the limits of a device, for its provider.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) if it is outside of its range.
    pub fn check(&self, limits: &Capabilities) -> Result<()> {
        let receives = 1..=limits.max_shared_receives.into();
        in_range("depth of the shared receive queue", self.max_wr, receives, "1 to the device's max_shared_receives")
    }
}
