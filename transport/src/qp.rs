//! Queue pairs.

use crate::handle::CqId;
pub use crate::handle::{QpId, SrqId};

/// What a queue pair is made with (`rdma_create_qp`(3)): reliable connected service.
#[derive(Clone, Copy, Debug)]
pub struct QpAttr {
    /// Where sends complete.
    pub send_cq: CqId,
    /// Where receives complete; may be the same.
    pub recv_cq: CqId,
    /// Depth of the send queue, 1 to the device's limit.
    pub max_send_wr: u32,
    /// Depth of the receive queue, 1 to the device's limit.
    pub max_recv_wr: u32,
    /// Largest inline send, bytes.
    pub max_inline: u32,
}
