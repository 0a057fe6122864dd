//! The functions that `<infiniband/verbs.h>` defines inline: calls through the table that each context carries, on the data
//! path and for what came after the first version of the interface.
//!
//! Errors are returned as the drivers return them, positive or negative; an operation that a context lacks gives
//! `EOPNOTSUPP`.

use std::ffi::c_int;
use std::mem::offset_of;
use std::ptr;

use super::{
    ibv_context, ibv_cq, ibv_device_attr_ex, ibv_modify_cq_attr, ibv_parent_domain_init_attr, ibv_pd, ibv_port_attr,
    ibv_qp, ibv_query_port, ibv_recv_wr, ibv_send_wr, ibv_srq, ibv_td, ibv_td_init_attr, ibv_wc, verbs_context,
};

/// Polls up to `num_entries` completions (`ibv_poll_cq`(3)).
///
/// # Safety
/// `cq` is live, and `wc` points to memory for `num_entries` completions.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: a live queue has a live context; the rest is the caller's promise.
    unsafe { (*(*cq).context).ops.poll_cq.map_or(-libc::EOPNOTSUPP, |call| call(cq, num_entries, wc)) }
}

/// Arms a completion queue (`ibv_req_notify_cq`(3)).
///
/// # Safety
/// `cq` is live.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as for polling.
    unsafe { (*(*cq).context).ops.req_notify_cq.map_or(libc::EOPNOTSUPP, |call| call(cq, solicited_only)) }
}

/// Posts sends (`ibv_post_send`(3)).
///
/// # Safety
/// `qp` and the chain are live, and so is the memory that it names until it has completed.
#[inline]
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: a live queue pair has a live context; the rest is the caller's promise.
    unsafe { (*(*qp).context).ops.post_send.map_or(libc::EOPNOTSUPP, |call| call(qp, wr, bad)) }
}

/// Posts receives (`ibv_post_recv`(3)).
///
/// # Safety
/// The caller keeps the promises of [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: as for sends.
    unsafe { (*(*qp).context).ops.post_recv.map_or(libc::EOPNOTSUPP, |call| call(qp, wr, bad)) }
}

/// Posts receives to a shared queue (`ibv_post_srq_recv`(3)).
///
/// # Safety
/// The caller keeps the promises of [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: a live shared queue has a live context; the rest is the caller's promise.
    unsafe { (*(*srq).context).ops.post_srq_recv.map_or(libc::EOPNOTSUPP, |call| call(srq, wr, bad)) }
}

/// Returns the extended context of `context`, if it includes the field at `offset` bytes from its start. It grows at the
/// front: an older one is shorter. (The crate rdma-sys compares the marker with 32 bits where it has 64.)
///
/// # Safety
/// `context` is live.
unsafe fn extended(context: *mut ibv_context, offset: usize) -> Option<*mut verbs_context> {
    // SAFETY: live, says the caller.
    if unsafe { (*context).abi_compat }.addr() != usize::MAX {
        return None;
    }
    // SAFETY: the marker says that the context is the last field of an extended one.
    let whole = unsafe { context.cast::<u8>().sub(offset_of!(verbs_context, context)).cast::<verbs_context>() };
    // SAFETY: every extended context has its size.
    (unsafe { (*whole).sz } >= size_of::<verbs_context>() - offset).then_some(whole)
}

/// Returns a function of the extended context, if it exists.
macro_rules! extension {
    ($context:expr, $name:ident) => {
        // SAFETY: the callers below promise a live context; the field was found to be there.
        unsafe { extended($context, offset_of!(verbs_context, $name)).and_then(|whole| (*whole).$name) }
    };
}

/// Queries a port (`ibv_query_port`(3)).
///
/// # Safety
/// `context` is live, and `attr` points to memory for the result.
pub unsafe fn query_port(context: *mut ibv_context, port_num: u8, attr: *mut ibv_port_attr) -> c_int {
    match extension!(context, query_port) {
        // SAFETY: the caller's promise.
        Some(call) => unsafe { call(context, port_num, attr, size_of::<ibv_port_attr>()) },
        // SAFETY: the caller's promise. The old form fills the first fields only.
        None => unsafe {
            ptr::write_bytes(attr, 0, 1);
            ibv_query_port(context, port_num, attr.cast())
        },
    }
}

/// Queries the capabilities of a device beyond the classic attributes (`ibv_query_device_ex`(3)).
///
/// # Safety
/// `context` is live, and `attr` points to memory for the result.
pub unsafe fn query_device_ex(context: *mut ibv_context, attr: *mut ibv_device_attr_ex) -> c_int {
    match extension!(context, query_device_ex) {
        // SAFETY: the caller's promise.
        Some(call) => unsafe { call(context, ptr::null(), attr, size_of::<ibv_device_attr_ex>()) },
        None => libc::EOPNOTSUPP,
    }
}

/// Changes a completion queue (`ibv_modify_cq`(3)).
///
/// # Safety
/// `cq` and `attr` are live.
pub unsafe fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: a live queue has a live context.
    let context = unsafe { (*cq).context };
    match extension!(context, modify_cq) {
        // SAFETY: the caller's promise.
        Some(call) => unsafe { call(cq, attr) },
        None => libc::EOPNOTSUPP,
    }
}

/// Allocates a thread domain (`ibv_alloc_td`(3)). Returns null, with `errno`, if the device has none.
///
/// # Safety
/// `context` and `attr` are live.
pub unsafe fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    match extension!(context, alloc_td) {
        // SAFETY: the caller's promise.
        Some(call) => unsafe { call(context, attr) },
        None => unsupported(),
    }
}

/// Deallocates a thread domain (`ibv_dealloc_td`(3)).
///
/// # Safety
/// `td` is live and unused.
pub unsafe fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: a live thread domain has a live context.
    let context = unsafe { (*td).context };
    match extension!(context, dealloc_td) {
        // SAFETY: the caller's promise.
        Some(call) => unsafe { call(td) },
        None => libc::EOPNOTSUPP,
    }
}

/// Allocates a parent domain of a protection domain and a thread domain (`ibv_alloc_parent_domain`(3)). Returns null, with `errno`,
/// if the device has none.
///
/// # Safety
/// `context` and the domains in `attr` are live.
pub unsafe fn alloc_parent_domain(context: *mut ibv_context, attr: *mut ibv_parent_domain_init_attr) -> *mut ibv_pd {
    match extension!(context, alloc_parent_domain) {
        // SAFETY: the caller's promise.
        Some(call) => unsafe { call(context, attr) },
        None => unsupported(),
    }
}

fn unsupported<T>() -> *mut T {
    // SAFETY: the place of this thread's `errno`.
    unsafe { *libc::__errno_location() = libc::EOPNOTSUPP }
    ptr::null_mut()
}
