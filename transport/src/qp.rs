//! Queue pairs.

use crate::caps::{Capabilities, DeviceInfo};
use crate::error::{Result, in_range};
use crate::handle::CqId;
pub use crate::handle::{QpId, SrqId};

/// The attributes of a queue pair (`rdma_create_qp`(3)). The queue pair's service is reliable connected, or unreliable
/// datagram if its connection-manager id was created for datagrams ([`Datagrams`](crate::roles::Datagrams)).
#[derive(Clone, Copy, Debug)]
pub struct QpAttr {
    /// The completion queue of sends.
    pub send_cq: CqId,
    /// The completion queue of receives. It may be the same queue as `send_cq`.
    pub recv_cq: CqId,
    /// The depth of the send queue: 1 to the device's `max_queue_depth`.
    pub max_send_wr: u32,
    /// The depth of the receive queue: 1 to the device's `max_queue_depth`.
    pub max_recv_wr: u32,
    /// The length of the largest inline send, in bytes.
    pub max_inline: u32,
    /// The maximum number of scatter/gather entries per receive: 1 to the device's `max_sge`. 0 selects the device's `max_sge`. With 1
    /// entry, an adapter's queue takes a quarter of the memory that it takes with 4. Ignored with a shared receive queue, which has
    /// [`SrqAttr::max_sge`](crate::SrqAttr::max_sge) instead.
    pub max_recv_sge: u32,
    /// The shared receive queue that the queue pair uses; `None` for a separate receive queue. With a shared queue,
    /// `max_recv_wr` is ignored, and `recv_cq` must have room for all receives of the shared queue.
    pub srq: Option<SrqId>,
}

impl QpAttr {
    /// Returns attributes with these depths, with a separate receive queue and without inline sends. A receive may have
    /// as many scatter/gather entries as the device supports.
    #[must_use]
    pub const fn new(send_cq: CqId, recv_cq: CqId, max_send_wr: u32, max_recv_wr: u32) -> Self {
        Self { send_cq, recv_cq, max_send_wr, max_recv_wr, max_inline: 0, max_recv_sge: 0, srq: None }
    }

    /// Checks the depths and the inline size against the limits of the device. A provider calls this when it creates a
    /// queue pair.
    ///
    /// # Errors
    /// [`TransportError::OutOfRange`](crate::TransportError::OutOfRange) names the first value that is outside its range.
    pub fn check(&self, limits: &Capabilities) -> Result<()> {
        let (depths, range) = (1..=limits.max_queue_depth.into(), "1 to the device's max_queue_depth");
        in_range("depth of the send queue", self.max_send_wr, depths.clone(), range)?;
        if self.srq.is_none() {
            in_range("depth of the receive queue", self.max_recv_wr, depths, range)?;
        }
        let inline = 0..=limits.max_inline.into();
        in_range("size of inline sends", self.max_inline, inline, "at most the device's max_inline")
    }

    /// Returns the attributes with the depths, the inline size and the entries per receive reduced to the limits of
    /// `device`. Logs each reduced value at level `info`.
    #[must_use]
    pub fn clamped(self, device: &DeviceInfo) -> Self {
        let Capabilities { max_queue_depth, max_inline, max_sge, .. } = device.capabilities;
        let cut = |what: &str, wanted: u32, limit: u32| {
            if wanted > limit {
                local_log!(Info, "{}: {what} is {wanted}, above the device's limit: {limit} is used", device.name);
            }
            wanted.min(limit)
        };
        Self {
            max_send_wr: cut("the depth of the send queue", self.max_send_wr, max_queue_depth),
            max_recv_wr: cut("the depth of the receive queue", self.max_recv_wr, max_queue_depth),
            max_inline: cut("the size of inline sends", self.max_inline, max_inline),
            max_recv_sge: cut("the number of entries of a receive", self.max_recv_sge, max_sge),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caps::Features;
    use crate::slab::Key;

    #[test]
    fn depths_are_cut_to_the_device_and_no_further() {
        let mut capabilities = Capabilities::portable(Features::empty());
        (capabilities.max_queue_depth, capabilities.max_inline) = (100, 64);
        let device = DeviceInfo { name: "small0".into(), capabilities };
        let cq = CqId(Key::new(0, 1));
        let attr = QpAttr { max_inline: 65, max_recv_sge: 9, ..QpAttr::new(cq, cq, 101, 100) }.clamped(&device);
        assert_eq!((attr.max_send_wr, attr.max_recv_wr, attr.max_inline, attr.max_recv_sge), (100, 100, 64, 4));
    }
}
