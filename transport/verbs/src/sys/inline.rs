//! The functions that `<infiniband/verbs.h>` defines inline. They call the driver through the table of functions in each context. They are
//! the functions of the data path, and functions that were added after the first version of the interface.
//!
//! The functions return the driver's error, which may be positive or negative. If the context lacks the operation, they return
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
    // SAFETY: a live queue has a live context. The caller promises that the queue is live and `wc` has enough memory.
    unsafe { (*(*cq).context).ops.poll_cq.map_or(-libc::EOPNOTSUPP, |call| call(cq, num_entries, wc)) }
}

/// Arms a completion queue (`ibv_req_notify_cq`(3)).
///
/// # Safety
/// `cq` is live.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller promises that the queue is live. A live queue has a live context.
    unsafe { (*(*cq).context).ops.req_notify_cq.map_or(libc::EOPNOTSUPP, |call| call(cq, solicited_only)) }
}

/// Posts sends (`ibv_post_send`(3)).
///
/// # Safety
/// `qp` and the chain are live. The memory that the chain names is live until its work requests have completed.
#[inline]
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: a live queue pair has a live context. The caller promises that the queue pair, the chain and its memory
    // are live.
    unsafe { (*(*qp).context).ops.post_send.map_or(libc::EOPNOTSUPP, |call| call(qp, wr, bad)) }
}

/// Posts receives (`ibv_post_recv`(3)).
///
/// # Safety
/// `qp` and the chain are live. The memory that the chain names is live until its work requests have completed.
#[inline]
pub unsafe fn ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: a live queue pair has a live context. The caller promises that the queue pair, the chain and its memory
    // are live.
    unsafe { (*(*qp).context).ops.post_recv.map_or(libc::EOPNOTSUPP, |call| call(qp, wr, bad)) }
}

/// Posts receives to a shared queue (`ibv_post_srq_recv`(3)).
///
/// # Safety
/// `srq` and the chain are live. The memory that the chain names is live until its work requests have completed.
#[inline]
pub unsafe fn ibv_post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: a live shared queue has a live context. The caller promises that the queue, the chain and its memory are
    // live.
    unsafe { (*(*srq).context).ops.post_srq_recv.map_or(libc::EOPNOTSUPP, |call| call(srq, wr, bad)) }
}

/// Returns the extended context that contains `context`. Returns `None` if the library's version does not have the
/// field at `offset`, in bytes from the start of the extended context. New versions add fields at the front, so that an
/// older extended context is shorter. (The crate rdma-sys compares the marker of an extended context with 32 bits,
/// although it has 64.)
///
/// # Safety
/// `context` is live.
unsafe fn extended(context: *mut ibv_context, offset: usize) -> Option<*mut verbs_context> {
    // SAFETY: the caller promises that the context is live.
    if unsafe { (*context).abi_compat }.addr() != usize::MAX {
        return None;
    }
    // SAFETY: the marker is set, so the context is the last field of an extended context.
    let whole = unsafe { context.cast::<u8>().sub(offset_of!(verbs_context, context)).cast::<verbs_context>() };
    // SAFETY: every extended context has the field with its size.
    (unsafe { (*whole).sz } >= size_of::<verbs_context>() - offset).then_some(whole)
}

/// Returns a function of the extended context; `None` if the library or the driver does not have it.
macro_rules! extension {
    ($context:expr, $name:ident) => {
        // SAFETY: each function that uses the macro promises a live context. `extended` has checked that the field
        // exists.
        unsafe { extended($context, offset_of!(verbs_context, $name)).and_then(|whole| (*whole).$name) }
    };
}

/// Queries a port (`ibv_query_port`(3)).
///
/// # Safety
/// `context` is live, and `attr` points to memory for the result.
pub unsafe fn query_port(context: *mut ibv_context, port_num: u8, attr: *mut ibv_port_attr) -> c_int {
    match extension!(context, query_port) {
        // SAFETY: the caller promises that the context is live and `attr` is valid.
        Some(call) => unsafe { call(context, port_num, attr, size_of::<ibv_port_attr>()) },
        // SAFETY: the caller promises that the context is live and `attr` is valid. The old query writes only the first
        // fields.
        None => unsafe {
            ptr::write_bytes(attr, 0, 1);
            ibv_query_port(context, port_num, attr.cast())
        },
    }
}

/// Queries the capabilities of a device that `ibv_query_device` does not report (`ibv_query_device_ex`(3)).
///
/// # Safety
/// `context` is live, and `attr` points to memory for the result.
pub unsafe fn query_device_ex(context: *mut ibv_context, attr: *mut ibv_device_attr_ex) -> c_int {
    match extension!(context, query_device_ex) {
        // SAFETY: the caller promises that the context is live and `attr` is valid.
        Some(call) => unsafe { call(context, ptr::null(), attr, size_of::<ibv_device_attr_ex>()) },
        None => libc::EOPNOTSUPP,
    }
}

/// Changes attributes of a completion queue (`ibv_modify_cq`(3)).
///
/// # Safety
/// `cq` and `attr` are live.
pub unsafe fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: a live queue has a live context.
    let context = unsafe { (*cq).context };
    match extension!(context, modify_cq) {
        // SAFETY: the caller promises that the queue and the attributes are live.
        Some(call) => unsafe { call(cq, attr) },
        None => libc::EOPNOTSUPP,
    }
}

/// Allocates a thread domain (`ibv_alloc_td`(3)). If the device has no thread domains, returns null and sets `errno`.
///
/// # Safety
/// `context` and `attr` are live.
pub unsafe fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    match extension!(context, alloc_td) {
        // SAFETY: the caller promises that the context and the attributes are live.
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
        // SAFETY: the caller promises that the thread domain is live and unused.
        Some(call) => unsafe { call(td) },
        None => libc::EOPNOTSUPP,
    }
}

/// Allocates a parent domain, which combines a protection domain with a thread domain (`ibv_alloc_parent_domain`(3)). If the device has no
/// parent domains, returns null and sets `errno`.
///
/// # Safety
/// `context` and the domains in `attr` are live.
pub unsafe fn alloc_parent_domain(context: *mut ibv_context, attr: *mut ibv_parent_domain_init_attr) -> *mut ibv_pd {
    match extension!(context, alloc_parent_domain) {
        // SAFETY: the caller promises that the context and the domains in `attr` are live.
        Some(call) => unsafe { call(context, attr) },
        None => unsupported(),
    }
}

fn unsupported<T>() -> *mut T {
    // SAFETY: the pointer is to this thread's `errno`.
    unsafe { *libc::__errno_location() = libc::EOPNOTSUPP }
    ptr::null_mut()
}
