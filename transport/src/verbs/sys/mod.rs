//! The binding to libibverbs and librdmacm. No module outside of this folder depends on the choice of the binding.
//!
//! By default it consists of the declarations in `ibv`, `cma` and `calls`: written from the interface that the headers
//! `<infiniband/verbs.h>` and `<rdma/rdma_cma.h>` fix for every version of rdma-core, the same on x86_64 and aarch64, and
//! needing neither headers nor libraries to be built. The libraries are loaded when the provider is opened
//! ([`load`]); a machine without them gets an error that says so.
//!
//! With the feature `rdma-sys` it is the crate of that name instead, generated from the installed headers and linked as
//! usual (`linked`). The tests of that build compare the two (`compare`): sizes, alignments, offsets, constants and the
//! types of functions; and both with the headers, through a C program.
//!
//! Inline functions of the headers are in `inline`, for both.

#![allow(non_camel_case_types, non_snake_case, missing_debug_implementations, missing_docs, unreachable_pub)]
#![cfg_attr(feature = "rdma-sys", allow(dead_code, reason = "the declarations are compared only"))]

use std::ffi::c_int;

mod inline;

#[cfg(any(not(feature = "rdma-sys"), test))]
mod calls;
#[cfg(any(not(feature = "rdma-sys"), test))]
mod cma;
#[cfg(any(not(feature = "rdma-sys"), test))]
mod declare;
#[cfg(any(not(feature = "rdma-sys"), test))]
mod ibv;

#[cfg(all(test, feature = "rdma-sys"))]
mod compare;
#[cfg(feature = "rdma-sys")]
mod linked;

pub use inline::{
    alloc_parent_domain, alloc_td, dealloc_td, ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_post_srq_recv,
    ibv_req_notify_cq, modify_cq, query_device_ex, query_port,
};

#[cfg(not(feature = "rdma-sys"))]
pub use {calls::*, cma::*, ibv::*};

#[cfg(feature = "rdma-sys")]
pub use linked::*;

/// `rdma_set_option`(3): the level of ids, and its options. The headers have them in enumerations without a name.
pub const RDMA_OPTION_ID: c_int = 0;
/// One byte: the type of service.
pub const RDMA_OPTION_ID_TOS: c_int = 0;
/// An `int`: bind to an address that closed connections still occupy.
pub const RDMA_OPTION_ID_REUSEADDR: c_int = 1;
/// An `int`: an IPv6 listener accepts no IPv4.
pub const RDMA_OPTION_ID_AFONLY: c_int = 2;
/// One byte: the code of the ack timeout.
pub const RDMA_OPTION_ID_ACK_TIMEOUT: c_int = 3;
