//! Completion moderation: a device raises an event for many completions instead of each.

use std::mem::{offset_of, size_of};
use std::ptr;

use rdma_sys::{
    ibv_context, ibv_cq, ibv_cq_attr_mask, ibv_device_attr_ex, ibv_moderate_cq, ibv_modify_cq_attr, verbs_context,
};

use super::ffi::check;
use crate::caps::Moderation;
use crate::error::{Error, Result};

/// The calls that a context has beyond the classic ones, if it has any. The binding's own way to them compares a marker with
/// 32 bits where it has 64.
///
/// # Safety
/// `context` is live.
unsafe fn extended(context: *mut ibv_context) -> Option<*mut verbs_context> {
    // SAFETY: live, says the caller.
    let marker = unsafe { (*context).abi_compat };
    // SAFETY: the marker says that the context is the last field of an extended one.
    (marker.addr() == usize::MAX)
        .then(|| unsafe { context.cast::<u8>().sub(offset_of!(verbs_context, context)).cast::<verbs_context>() })
}

/// Whether an extended context is old enough to end before a field, which lies so far from its start. It grows at the front.
///
/// # Safety
/// `context` is a live extended one.
unsafe fn reaches(context: *mut verbs_context, offset: usize) -> bool {
    // SAFETY: live, says the caller; every one has its size.
    unsafe { (*context).sz >= size_of::<verbs_context>() - offset }
}

/// How much of it a device has; `None` when it has none.
///
/// # Safety
/// `context` is live.
pub(super) unsafe fn most(context: *mut ibv_context) -> Option<Moderation> {
    // SAFETY: live, says the caller; a field is read only if it is there; the call fills the attributes, which are numbers.
    let caps = unsafe {
        let extended = extended(context)?;
        if !reaches(extended, offset_of!(verbs_context, query_device_ex)) {
            return None;
        }
        let mut attr: ibv_device_attr_ex = std::mem::zeroed();
        let query = (*extended).query_device_ex?;
        if query(context, ptr::null(), &raw mut attr, size_of::<ibv_device_attr_ex>()) != 0 {
            return None;
        }
        attr.cq_mod_caps
    };
    let most = Moderation { completions: caps.max_cq_count, microseconds: caps.max_cq_period };
    (most.completions > 0 && most.microseconds > 0).then_some(most)
}

/// Sets it for one queue.
///
/// # Safety
/// `cq` is live.
pub(super) unsafe fn set(cq: *mut ibv_cq, to: Moderation) -> Result<()> {
    let unsupported = Error::Unsupported { provider: super::NAME, feature: "completion moderation" };
    let moderate = ibv_moderate_cq { cq_count: to.completions, cq_period: to.microseconds };
    let mut attr = ibv_modify_cq_attr { attr_mask: ibv_cq_attr_mask::IBV_CQ_ATTR_MODERATE.0, moderate };
    // SAFETY: live, says the caller; a field is read only if it is there; the attributes are read during the call.
    unsafe {
        let Some(extended) = extended((*cq).context) else { return Err(unsupported) };
        if !reaches(extended, offset_of!(verbs_context, modify_cq)) {
            return Err(unsupported);
        }
        let Some(modify) = (*extended).modify_cq else { return Err(unsupported) };
        check("ibv_modify_cq", modify(cq, &raw mut attr))
    }
}
