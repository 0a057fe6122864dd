//! The binding to libibverbs and librdmacm. There are two bindings with the same interface, and no module outside this
//! folder depends on which one is used.
//!
//! The default binding consists of the declarations in `ibv`, `cma` and `calls`. They follow the interface in the
//! headers `<infiniband/verbs.h>` and `<rdma/rdma_cma.h>`, which is the same in every version of rdma-core, and on
//! x86_64 and aarch64. Building it needs neither the headers nor the libraries. The libraries are loaded when the
//! program opens the provider ([`load`]). If they are missing, the program gets an error.
//!
//! The feature `rdma-sys` selects the other binding (`linked`): the crate rdma-sys, which is generated from the
//! installed headers and linked with the libraries. The tests of that build compare the two bindings (`compare`):
//! sizes, alignments, offsets, constants and the types of functions. They also compare both with the headers, by a C
//! program.
//!
//! `inline` has the inline functions of the headers, for both bindings.

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
#[cfg(any(not(feature = "rdma-sys"), test))]
mod ibv_enums;

#[cfg(all(test, feature = "rdma-sys"))]
mod compare;
#[cfg(feature = "rdma-sys")]
mod linked;

pub use inline::{
    alloc_parent_domain, alloc_td, dealloc_td, ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_post_srq_recv,
    ibv_req_notify_cq, modify_cq, query_device_ex, query_port,
};

#[cfg(not(feature = "rdma-sys"))]
pub use {calls::*, cma::*, ibv::*, ibv_enums::*};

#[cfg(feature = "rdma-sys")]
pub use linked::*;

/// The option level of ids in `rdma_set_option`(3). The headers have the level and its options in enumerations without
/// a name.
pub const RDMA_OPTION_ID: c_int = 0;
/// The type of service. The value is one byte.
pub const RDMA_OPTION_ID_TOS: c_int = 0;
/// Allows an id to bind to an address that closed connections still occupy. The value is an `int`.
pub const RDMA_OPTION_ID_REUSEADDR: c_int = 1;
/// Restricts a listener on an IPv6 address to IPv6. The value is an `int`.
pub const RDMA_OPTION_ID_AFONLY: c_int = 2;
/// The ack timeout, as a code. The value is one byte.
pub const RDMA_OPTION_ID_ACK_TIMEOUT: c_int = 3;
