//! The declarations from `<infiniband/verbs.h>` that the provider uses, in their layout on 64-bit
//! Linux: structures. `ibv_enums.rs` has the constants of enumerations. The names are those of the
//! header. A union that has no name in C has its name from the crate rdma-sys.
//!
//! The size of a structure that contains a mutex depends on the architecture, because the size of the C library's mutex does. The offsets
//! of all fields that the provider uses do not depend on it.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::declare::structures;
use super::ibv_enums::*;

/// A function that the provider never calls. It is declared because it influences the offsets of other functions in a
/// table.
pub type Unused = Option<unsafe extern "C" fn()>;

/// A deliberately wrong type. The test that compares the two bindings must detect it (tests/layout.sh).
#[cfg(planted = "layout")]
type MwAccessFlags = u64;
#[cfg(not(planted = "layout"))]
type MwAccessFlags = c_uint;

structures! {
    pub struct _ibv_device_ops {
        pub _dummy1: Unused,
        pub _dummy2: Unused,
    }

    pub struct ibv_device {
        pub _ops: _ibv_device_ops,
        pub node_type: ibv_node_type::Type,
        pub transport_type: ibv_transport_type::Type,
        pub name: [c_char; 64],
        pub dev_name: [c_char; 64],
        pub dev_path: [c_char; 256],
        pub ibdev_path: [c_char; 256],
    }

    pub struct ibv_context_ops {
        pub _compat_query_device: Unused,
        pub _compat_query_port: Unused,
        pub _compat_alloc_pd: Unused,
        pub _compat_dealloc_pd: Unused,
        pub _compat_reg_mr: Unused,
        pub _compat_rereg_mr: Unused,
        pub _compat_dereg_mr: Unused,
        pub alloc_mw: Unused,
        pub bind_mw: Unused,
        pub dealloc_mw: Unused,
        pub _compat_create_cq: Unused,
        pub poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
        pub req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
        pub _compat_cq_event: Unused,
        pub _compat_resize_cq: Unused,
        pub _compat_destroy_cq: Unused,
        pub _compat_create_srq: Unused,
        pub _compat_modify_srq: Unused,
        pub _compat_query_srq: Unused,
        pub _compat_destroy_srq: Unused,
        pub post_srq_recv: Option<unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
        pub _compat_create_qp: Unused,
        pub _compat_query_qp: Unused,
        pub _compat_modify_qp: Unused,
        pub _compat_destroy_qp: Unused,
        pub post_send: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
        pub post_recv: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
        pub _compat_create_ah: Unused,
        pub _compat_destroy_ah: Unused,
        pub _compat_attach_mcast: Unused,
        pub _compat_detach_mcast: Unused,
        pub _compat_async_event: Unused,
    }

    pub struct ibv_context {
        pub device: *mut ibv_device,
        pub ops: ibv_context_ops,
        pub cmd_fd: c_int,
        pub async_fd: c_int,
        pub num_comp_vectors: c_int,
        pub mutex: libc::pthread_mutex_t,
        pub abi_compat: *mut c_void,
    }

    pub struct verbs_context {
        pub query_port: Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int>,
        pub advise_mr: Unused,
        pub alloc_null_mr: Unused,
        pub read_counters: Unused,
        pub attach_counters_point_flow: Unused,
        pub create_counters: Unused,
        pub destroy_counters: Unused,
        pub reg_dm_mr: Unused,
        pub alloc_dm: Unused,
        pub free_dm: Unused,
        pub modify_flow_action_esp: Unused,
        pub destroy_flow_action: Unused,
        pub create_flow_action_esp: Unused,
        pub modify_qp_rate_limit: Unused,
        pub alloc_parent_domain:
            Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd>,
        pub dealloc_td: Option<unsafe extern "C" fn(*mut ibv_td) -> c_int>,
        pub alloc_td: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td>,
        pub modify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int>,
        pub post_srq_ops: Unused,
        pub destroy_rwq_ind_table: Unused,
        pub create_rwq_ind_table: Unused,
        pub destroy_wq: Unused,
        pub modify_wq: Unused,
        pub create_wq: Unused,
        pub query_rt_values: Unused,
        pub create_cq_ex: Unused,
        pub priv_: *mut c_void,
        pub query_device_ex: Option<
            unsafe extern "C" fn(
                *mut ibv_context,
                *const ibv_query_device_ex_input,
                *mut ibv_device_attr_ex,
                usize,
            ) -> c_int,
        >,
        pub ibv_destroy_flow: Unused,
        pub ABI_placeholder2: Unused,
        pub ibv_create_flow: Unused,
        pub ABI_placeholder1: Unused,
        pub open_qp: Unused,
        pub create_qp_ex: Unused,
        pub get_srq_num: Unused,
        pub create_srq_ex: Unused,
        pub open_xrcd: Unused,
        pub close_xrcd: Unused,
        pub _ABI_placeholder3: u64,
        pub sz: usize,
        pub context: ibv_context,
    }

    pub struct ibv_pd {
        pub context: *mut ibv_context,
        pub handle: u32,
    }

    pub struct ibv_td {
        pub context: *mut ibv_context,
    }

    pub struct ibv_td_init_attr {
        pub comp_mask: u32,
    }

    pub struct ibv_parent_domain_init_attr {
        pub pd: *mut ibv_pd,
        pub td: *mut ibv_td,
        pub comp_mask: u32,
        pub alloc: Unused,
        pub free: Unused,
        pub pd_context: *mut c_void,
    }

    pub struct ibv_comp_channel {
        pub context: *mut ibv_context,
        pub fd: c_int,
        pub refcnt: c_int,
    }

    pub struct ibv_cq {
        pub context: *mut ibv_context,
        pub channel: *mut ibv_comp_channel,
        pub cq_context: *mut c_void,
        pub handle: u32,
        pub cqe: c_int,
        pub mutex: libc::pthread_mutex_t,
        pub cond: libc::pthread_cond_t,
        pub comp_events_completed: u32,
        pub async_events_completed: u32,
    }

    pub struct ibv_qp {
        pub context: *mut ibv_context,
        pub qp_context: *mut c_void,
        pub pd: *mut ibv_pd,
        pub send_cq: *mut ibv_cq,
        pub recv_cq: *mut ibv_cq,
        pub srq: *mut ibv_srq,
        pub handle: u32,
        pub qp_num: u32,
        pub state: ibv_qp_state::Type,
        pub qp_type: ibv_qp_type::Type,
        pub mutex: libc::pthread_mutex_t,
        pub cond: libc::pthread_cond_t,
        pub events_completed: u32,
    }

    pub struct ibv_srq {
        pub context: *mut ibv_context,
        pub srq_context: *mut c_void,
        pub pd: *mut ibv_pd,
        pub handle: u32,
        pub mutex: libc::pthread_mutex_t,
        pub cond: libc::pthread_cond_t,
        pub events_completed: u32,
    }

    pub struct ibv_mr {
        pub context: *mut ibv_context,
        pub pd: *mut ibv_pd,
        pub addr: *mut c_void,
        pub length: usize,
        pub handle: u32,
        pub lkey: u32,
        pub rkey: u32,
    }

    pub struct ibv_ah {
        pub context: *mut ibv_context,
        pub pd: *mut ibv_pd,
        pub handle: u32,
    }

    pub struct ibv_device_attr {
        pub fw_ver: [c_char; 64],
        pub node_guid: u64,
        pub sys_image_guid: u64,
        pub max_mr_size: u64,
        pub page_size_cap: u64,
        pub vendor_id: u32,
        pub vendor_part_id: u32,
        pub hw_ver: u32,
        pub max_qp: c_int,
        pub max_qp_wr: c_int,
        pub device_cap_flags: c_uint,
        pub max_sge: c_int,
        pub max_sge_rd: c_int,
        pub max_cq: c_int,
        pub max_cqe: c_int,
        pub max_mr: c_int,
        pub max_pd: c_int,
        pub max_qp_rd_atom: c_int,
        pub max_ee_rd_atom: c_int,
        pub max_res_rd_atom: c_int,
        pub max_qp_init_rd_atom: c_int,
        pub max_ee_init_rd_atom: c_int,
        pub atomic_cap: ibv_atomic_cap::Type,
        pub max_ee: c_int,
        pub max_rdd: c_int,
        pub max_mw: c_int,
        pub max_raw_ipv6_qp: c_int,
        pub max_raw_ethy_qp: c_int,
        pub max_mcast_grp: c_int,
        pub max_mcast_qp_attach: c_int,
        pub max_total_mcast_qp_attach: c_int,
        pub max_ah: c_int,
        pub max_fmr: c_int,
        pub max_map_per_fmr: c_int,
        pub max_srq: c_int,
        pub max_srq_wr: c_int,
        pub max_srq_sge: c_int,
        pub max_pkeys: u16,
        pub local_ca_ack_delay: u8,
        pub phys_port_cnt: u8,
    }

    pub struct ibv_query_device_ex_input {
        pub comp_mask: u32,
    }

    pub struct ibv_odp_caps__bindgen_ty_1 {
        pub rc_odp_caps: u32,
        pub uc_odp_caps: u32,
        pub ud_odp_caps: u32,
    }

    pub struct ibv_odp_caps {
        pub general_caps: u64,
        pub per_transport_caps: ibv_odp_caps__bindgen_ty_1,
    }

    pub struct ibv_tso_caps {
        pub max_tso: u32,
        pub supported_qpts: u32,
    }

    pub struct ibv_rss_caps {
        pub supported_qpts: u32,
        pub max_rwq_indirection_tables: u32,
        pub max_rwq_indirection_table_size: u32,
        pub rx_hash_fields_mask: u64,
        pub rx_hash_function: u8,
    }

    pub struct ibv_packet_pacing_caps {
        pub qp_rate_limit_min: u32,
        pub qp_rate_limit_max: u32,
        pub supported_qpts: u32,
    }

    pub struct ibv_tm_caps {
        pub max_rndv_hdr_size: u32,
        pub max_num_tags: u32,
        pub flags: u32,
        pub max_ops: u32,
        pub max_sge: u32,
    }

    pub struct ibv_cq_moderation_caps {
        pub max_cq_count: u16,
        pub max_cq_period: u16,
    }

    pub struct ibv_pci_atomic_caps {
        pub fetch_add: u16,
        pub swap: u16,
        pub compare_swap: u16,
    }

    pub struct ibv_device_attr_ex {
        pub orig_attr: ibv_device_attr,
        pub comp_mask: u32,
        pub odp_caps: ibv_odp_caps,
        pub completion_timestamp_mask: u64,
        pub hca_core_clock: u64,
        pub device_cap_flags_ex: u64,
        pub tso_caps: ibv_tso_caps,
        pub rss_caps: ibv_rss_caps,
        pub max_wq_type_rq: u32,
        pub packet_pacing_caps: ibv_packet_pacing_caps,
        pub raw_packet_caps: u32,
        pub tm_caps: ibv_tm_caps,
        pub cq_mod_caps: ibv_cq_moderation_caps,
        pub max_dm_size: u64,
        pub pci_atomic_caps: ibv_pci_atomic_caps,
        pub xrc_odp_caps: u32,
        pub phys_port_cnt_ex: u32,
    }

    pub struct ibv_port_attr {
        pub state: ibv_port_state::Type,
        pub max_mtu: ibv_mtu::Type,
        pub active_mtu: ibv_mtu::Type,
        pub gid_tbl_len: c_int,
        pub port_cap_flags: u32,
        pub max_msg_sz: u32,
        pub bad_pkey_cntr: u32,
        pub qkey_viol_cntr: u32,
        pub pkey_tbl_len: u16,
        pub lid: u16,
        pub sm_lid: u16,
        pub lmc: u8,
        pub max_vl_num: u8,
        pub sm_sl: u8,
        pub subnet_timeout: u8,
        pub init_type_reply: u8,
        pub active_width: u8,
        pub active_speed: u8,
        pub phys_state: u8,
        pub link_layer: u8,
        pub flags: u8,
        pub port_cap_flags2: u16,
    }

    pub struct ibv_gid_global_t {
        pub subnet_prefix: u64,
        pub interface_id: u64,
    }

    pub struct ibv_grh {
        pub version_tclass_flow: u32,
        pub paylen: u16,
        pub next_hdr: u8,
        pub hop_limit: u8,
        pub sgid: ibv_gid,
        pub dgid: ibv_gid,
    }

    pub struct ibv_global_route {
        pub dgid: ibv_gid,
        pub flow_label: u32,
        pub sgid_index: u8,
        pub hop_limit: u8,
        pub traffic_class: u8,
    }

    pub struct ibv_ah_attr {
        pub grh: ibv_global_route,
        pub dlid: u16,
        pub sl: u8,
        pub src_path_bits: u8,
        pub static_rate: u8,
        pub is_global: u8,
        pub port_num: u8,
    }

    pub struct ibv_srq_attr {
        pub max_wr: u32,
        pub max_sge: u32,
        pub srq_limit: u32,
    }

    pub struct ibv_srq_init_attr {
        pub srq_context: *mut c_void,
        pub attr: ibv_srq_attr,
    }

    pub struct ibv_qp_cap {
        pub max_send_wr: u32,
        pub max_recv_wr: u32,
        pub max_send_sge: u32,
        pub max_recv_sge: u32,
        pub max_inline_data: u32,
    }

    pub struct ibv_qp_init_attr {
        pub qp_context: *mut c_void,
        pub send_cq: *mut ibv_cq,
        pub recv_cq: *mut ibv_cq,
        pub srq: *mut ibv_srq,
        pub cap: ibv_qp_cap,
        pub qp_type: ibv_qp_type::Type,
        pub sq_sig_all: c_int,
    }

    pub struct ibv_qp_attr {
        pub qp_state: ibv_qp_state::Type,
        pub cur_qp_state: ibv_qp_state::Type,
        pub path_mtu: ibv_mtu::Type,
        pub path_mig_state: c_uint,
        pub qkey: u32,
        pub rq_psn: u32,
        pub sq_psn: u32,
        pub dest_qp_num: u32,
        pub qp_access_flags: c_uint,
        pub cap: ibv_qp_cap,
        pub ah_attr: ibv_ah_attr,
        pub alt_ah_attr: ibv_ah_attr,
        pub pkey_index: u16,
        pub alt_pkey_index: u16,
        pub en_sqd_async_notify: u8,
        pub sq_draining: u8,
        pub max_rd_atomic: u8,
        pub max_dest_rd_atomic: u8,
        pub min_rnr_timer: u8,
        pub port_num: u8,
        pub timeout: u8,
        pub retry_cnt: u8,
        pub rnr_retry: u8,
        pub alt_port_num: u8,
        pub alt_timeout: u8,
        pub rate_limit: u32,
    }

    pub struct ibv_moderate_cq {
        pub cq_count: u16,
        pub cq_period: u16,
    }

    pub struct ibv_modify_cq_attr {
        pub attr_mask: u32,
        pub moderate: ibv_moderate_cq,
    }

    pub struct ibv_wc {
        pub wr_id: u64,
        pub status: ibv_wc_status::Type,
        pub opcode: ibv_wc_opcode::Type,
        pub vendor_err: u32,
        pub byte_len: u32,
        pub imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t,
        pub qp_num: u32,
        pub src_qp: u32,
        pub wc_flags: c_uint,
        pub pkey_index: u16,
        pub slid: u16,
        pub sl: u8,
        pub dlid_path_bits: u8,
    }

    pub struct ibv_sge {
        pub addr: u64,
        pub length: u32,
        pub lkey: u32,
    }

    pub struct ibv_recv_wr {
        pub wr_id: u64,
        pub next: *mut ibv_recv_wr,
        pub sg_list: *mut ibv_sge,
        pub num_sge: c_int,
    }

    pub struct rdma_t {
        pub remote_addr: u64,
        pub rkey: u32,
    }

    pub struct atomic_t {
        pub remote_addr: u64,
        pub compare_add: u64,
        pub swap: u64,
        pub rkey: u32,
    }

    pub struct ud_t {
        pub ah: *mut ibv_ah,
        pub remote_qpn: u32,
        pub remote_qkey: u32,
    }

    pub struct xrc_t {
        pub remote_srqn: u32,
    }

    pub struct ibv_mw_bind_info {
        pub mr: *mut ibv_mr,
        pub addr: u64,
        pub length: u64,
        pub mw_access_flags: MwAccessFlags,
    }

    pub struct bind_mw_t {
        pub mw: *mut c_void,
        pub rkey: u32,
        pub bind_info: ibv_mw_bind_info,
    }

    pub struct tso_t {
        pub hdr: *mut c_void,
        pub hdr_sz: u16,
        pub mss: u16,
    }

    pub struct ibv_send_wr {
        pub wr_id: u64,
        pub next: *mut ibv_send_wr,
        pub sg_list: *mut ibv_sge,
        pub num_sge: c_int,
        pub opcode: ibv_wr_opcode::Type,
        pub send_flags: c_uint,
        pub imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t,
        pub wr: wr_t,
        pub qp_type: qp_type_t,
        pub bind_mw_tso_union: bind_mw_tso_union_t,
    }

    pub struct ibv_async_event {
        pub element: ibv_async_event_element_t,
        pub event_type: c_uint,
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_gid {
    pub raw: [u8; 16],
    pub global: ibv_gid_global_t,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union imm_data_invalidated_rkey_union_t {
    /// The immediate data, in network byte order.
    pub imm_data: u32,
    pub invalidated_rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union wr_t {
    pub rdma: rdma_t,
    pub atomic: atomic_t,
    pub ud: ud_t,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union qp_type_t {
    pub xrc: xrc_t,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union bind_mw_tso_union_t {
    pub bind_mw: bind_mw_t,
    pub tso: tso_t,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_async_event_element_t {
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub srq: *mut ibv_srq,
    pub port_num: c_int,
}

/// The port attributes of libibverbs 1.0, which the old query writes. They are the first fields of [`ibv_port_attr`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct _compat_ibv_port_attr {
    _unused: [u8; 0],
}

// The asserted sizes and offsets are the same on x86_64 and aarch64. The compiler checks them for the target of the
// build.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<ibv_device>() == 664 && offset_of!(ibv_device, name) == 24);
    assert!(size_of::<ibv_context_ops>() == 32 * 8);
    assert!(offset_of!(ibv_context, cmd_fd) == 264 && offset_of!(ibv_context, async_fd) == 268);
    assert!(offset_of!(verbs_context, context) == 40 * 8 && offset_of!(verbs_context, sz) == 39 * 8);
    assert!(size_of::<ibv_wc>() == 48 && offset_of!(ibv_wc, qp_num) == 28);
    assert!(size_of::<ibv_send_wr>() == 128 && offset_of!(ibv_send_wr, wr) == 40);
    assert!(size_of::<ibv_recv_wr>() == 32 && size_of::<ibv_sge>() == 16);
    assert!(offset_of!(ibv_qp, qp_num) == 52 && offset_of!(ibv_cq, cq_context) == 16);
    assert!(size_of::<ibv_qp_init_attr>() == 64 && size_of::<ibv_qp_attr>() == 144);
    assert!(size_of::<ibv_device_attr>() == 232 && size_of::<ibv_device_attr_ex>() == 400);
    assert!(size_of::<ibv_port_attr>() == 52 && size_of::<ibv_ah_attr>() == 32 && size_of::<ibv_grh>() == 40);
    assert!(size_of::<ibv_mr>() == 48 && offset_of!(ibv_mr, lkey) == 36 && offset_of!(ibv_mr, rkey) == 40);
    assert!(size_of::<ibv_async_event>() == 16);
};
