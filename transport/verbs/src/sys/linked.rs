//! The binding that the feature `rdma-sys` selects: the crate rdma-sys instead of this crate's declarations. The
//! program is linked with the libraries.

#![allow(clippy::missing_safety_doc, reason = "documented at the functions of the other binding")]

use std::ffi::{c_int, c_uint, c_void};

pub use rdma_sys::*;

/// An error that never occurs, because the system does not start a program if its libraries are missing.
pub use std::convert::Infallible as LibraryError;

/// Returns `Ok`: the system loads the libraries when it starts the program.
#[expect(clippy::unnecessary_wraps, reason = "the other binding can fail")]
pub const fn load() -> Result<(), LibraryError> {
    Ok(())
}

/// The types of asynchronous events, as plain numbers. The crate rdma-sys has a Rust enumeration for them instead. A
/// value that the enumeration does not have would be undefined behaviour.
pub mod ibv_event_type {
    use rdma_sys::ibv_event_type as ty;
    pub type Type = std::ffi::c_uint;
    pub const IBV_EVENT_CQ_ERR: Type = ty::IBV_EVENT_CQ_ERR as Type;
    pub const IBV_EVENT_QP_FATAL: Type = ty::IBV_EVENT_QP_FATAL as Type;
    pub const IBV_EVENT_QP_REQ_ERR: Type = ty::IBV_EVENT_QP_REQ_ERR as Type;
    pub const IBV_EVENT_QP_ACCESS_ERR: Type = ty::IBV_EVENT_QP_ACCESS_ERR as Type;
    pub const IBV_EVENT_COMM_EST: Type = ty::IBV_EVENT_COMM_EST as Type;
    pub const IBV_EVENT_SQ_DRAINED: Type = ty::IBV_EVENT_SQ_DRAINED as Type;
    pub const IBV_EVENT_PATH_MIG: Type = ty::IBV_EVENT_PATH_MIG as Type;
    pub const IBV_EVENT_PATH_MIG_ERR: Type = ty::IBV_EVENT_PATH_MIG_ERR as Type;
    pub const IBV_EVENT_DEVICE_FATAL: Type = ty::IBV_EVENT_DEVICE_FATAL as Type;
    pub const IBV_EVENT_PORT_ACTIVE: Type = ty::IBV_EVENT_PORT_ACTIVE as Type;
    pub const IBV_EVENT_PORT_ERR: Type = ty::IBV_EVENT_PORT_ERR as Type;
    pub const IBV_EVENT_SM_CHANGE: Type = ty::IBV_EVENT_SM_CHANGE as Type;
    pub const IBV_EVENT_SRQ_ERR: Type = ty::IBV_EVENT_SRQ_ERR as Type;
    pub const IBV_EVENT_QP_LAST_WQE_REACHED: Type = ty::IBV_EVENT_QP_LAST_WQE_REACHED as Type;
    pub const IBV_EVENT_CLIENT_REREGISTER: Type = ty::IBV_EVENT_CLIENT_REREGISTER as Type;
    pub const IBV_EVENT_GID_CHANGE: Type = ty::IBV_EVENT_GID_CHANGE as Type;
}

/// # Safety
/// The caller meets the requirements of `rdma_notify`(3).
pub unsafe fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type::Type) -> c_int {
    // This is the only event that `rdma_notify` supports.
    debug_assert_eq!(event, ibv_event_type::IBV_EVENT_COMM_EST);
    // SAFETY: the caller meets the requirements of `rdma_notify`(3).
    unsafe { rdma_sys::rdma_notify(id, rdma_sys::ibv_event_type::IBV_EVENT_COMM_EST) }
}

type RegMrIova2 = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;

/// Returns the function, always as `Some`. The result is an `Option` because the default binding has the same
/// interface, and returns `None` if the library is too old to have the function.
#[expect(clippy::unnecessary_wraps, reason = "the other binding may not have it")]
pub fn ibv_reg_mr_iova2() -> Option<RegMrIova2> {
    Some(rdma_sys::ibv_reg_mr_iova2)
}

type RegDmabufMr = unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;

/// Returns the function, always as `Some`. The result is an `Option` because the default binding has the same
/// interface, and returns `None` if the library is too old to have the function.
#[expect(clippy::unnecessary_wraps, reason = "the other binding may not have it")]
pub fn ibv_reg_dmabuf_mr() -> Option<RegDmabufMr> {
    Some(rdma_sys::ibv_reg_dmabuf_mr)
}
