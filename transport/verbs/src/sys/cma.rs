//! The declarations from `<rdma/rdma_cma.h>` that the provider uses, in their layout on 64-bit Linux.

use std::ffi::{c_int, c_void};

use super::declare::{constants, structures};
use super::ibv::{ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_gid, ibv_pd, ibv_qp, ibv_srq};
use super::ibv_enums::ibv_qp_type;

structures! {
    pub struct rdma_event_channel {
        pub fd: c_int,
    }

    pub struct rdma_ib_addr {
        pub sgid: ibv_gid,
        pub dgid: ibv_gid,
        pub pkey: u16,
    }

    pub struct rdma_addr {
        pub src_addr_union: src_addr_union_t,
        pub dst_addr_union: dst_addr_union_t,
        pub addr: addr_union_t,
    }

    pub struct rdma_route {
        pub addr: rdma_addr,
        pub path_rec: *mut c_void,
        pub num_paths: c_int,
    }

    pub struct rdma_cm_id {
        pub verbs: *mut ibv_context,
        pub channel: *mut rdma_event_channel,
        pub context: *mut c_void,
        pub qp: *mut ibv_qp,
        pub route: rdma_route,
        pub ps: rdma_port_space::Type,
        pub port_num: u8,
        pub event: *mut rdma_cm_event,
        pub send_cq_channel: *mut ibv_comp_channel,
        pub send_cq: *mut ibv_cq,
        pub recv_cq_channel: *mut ibv_comp_channel,
        pub recv_cq: *mut ibv_cq,
        pub srq: *mut ibv_srq,
        pub pd: *mut ibv_pd,
        pub qp_type: ibv_qp_type::Type,
    }

    pub struct rdma_conn_param {
        pub private_data: *const c_void,
        pub private_data_len: u8,
        pub responder_resources: u8,
        pub initiator_depth: u8,
        pub flow_control: u8,
        pub retry_count: u8,
        pub rnr_retry_count: u8,
        pub srq: u8,
        pub qp_num: u32,
    }

    pub struct rdma_ud_param {
        pub private_data: *const c_void,
        pub private_data_len: u8,
        pub ah_attr: ibv_ah_attr,
        pub qp_num: u32,
        pub qkey: u32,
    }

    pub struct rdma_cm_event {
        pub id: *mut rdma_cm_id,
        pub listen_id: *mut rdma_cm_id,
        pub event: rdma_cm_event_type::Type,
        pub status: c_int,
        pub param: param_t,
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union src_addr_union_t {
    pub src_addr: libc::sockaddr,
    pub src_sin: libc::sockaddr_in,
    pub src_sin6: libc::sockaddr_in6,
    pub src_storage: libc::sockaddr_storage,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union dst_addr_union_t {
    pub dst_addr: libc::sockaddr,
    pub dst_sin: libc::sockaddr_in,
    pub dst_sin6: libc::sockaddr_in6,
    pub dst_storage: libc::sockaddr_storage,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union addr_union_t {
    pub ibaddr: rdma_ib_addr,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union param_t {
    pub conn: rdma_conn_param,
    pub ud: rdma_ud_param,
}

constants! {
    mod rdma_port_space: c_uint {
        RDMA_PS_TCP = 0x0106,
        RDMA_PS_UDP = 0x0111,
    }
    mod rdma_cm_event_type: c_uint {
        RDMA_CM_EVENT_ADDR_RESOLVED = 0,
        RDMA_CM_EVENT_ADDR_ERROR = 1,
        RDMA_CM_EVENT_ROUTE_RESOLVED = 2,
        RDMA_CM_EVENT_ROUTE_ERROR = 3,
        RDMA_CM_EVENT_CONNECT_REQUEST = 4,
        RDMA_CM_EVENT_CONNECT_RESPONSE = 5,
        RDMA_CM_EVENT_CONNECT_ERROR = 6,
        RDMA_CM_EVENT_UNREACHABLE = 7,
        RDMA_CM_EVENT_REJECTED = 8,
        RDMA_CM_EVENT_ESTABLISHED = 9,
        RDMA_CM_EVENT_DISCONNECTED = 10,
        RDMA_CM_EVENT_DEVICE_REMOVAL = 11,
        RDMA_CM_EVENT_MULTICAST_JOIN = 12,
        RDMA_CM_EVENT_MULTICAST_ERROR = 13,
        RDMA_CM_EVENT_ADDR_CHANGE = 14,
        RDMA_CM_EVENT_TIMEWAIT_EXIT = 15,
    }
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<rdma_addr>() == 296 && size_of::<rdma_route>() == 312);
    assert!(offset_of!(rdma_cm_id, ps) == 344 && offset_of!(rdma_cm_id, port_num) == 348);
    assert!(size_of::<rdma_cm_id>() == 416);
    assert!(size_of::<rdma_conn_param>() == 24 && size_of::<rdma_ud_param>() == 56);
    assert!(size_of::<rdma_cm_event>() == 80);
};
