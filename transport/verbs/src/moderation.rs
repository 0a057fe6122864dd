//! Completion moderation: a device raises one event for several completions instead of one event for each.

use super::NAME;
use super::ffi::check;
use super::sys::{ibv_cq, ibv_cq_attr_mask, ibv_moderate_cq, ibv_modify_cq_attr, modify_cq};
use rdma_transport::caps::Moderation;
use rdma_transport::error::{Result, TransportError};

/// Sets the moderation of a completion queue.
///
/// # Safety
/// `cq` is live.
pub(super) unsafe fn set(cq: *mut ibv_cq, to: Moderation) -> Result<()> {
    let moderate = ibv_moderate_cq { cq_count: to.completions, cq_period: to.microseconds };
    let mut attr = ibv_modify_cq_attr { attr_mask: ibv_cq_attr_mask::IBV_CQ_ATTR_MODERATE.0, moderate };
    // SAFETY: the caller promises that the queue is live. The library reads the attributes during the call.
    match unsafe { modify_cq(cq, &raw mut attr) } {
        libc::EOPNOTSUPP => Err(TransportError::Unsupported { provider: NAME, feature: "completion moderation" }),
        rc => check("ibv_modify_cq", rc),
    }
}
