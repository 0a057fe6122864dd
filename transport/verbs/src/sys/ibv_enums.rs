//! The constants of enumerations from `<infiniband/verbs.h>` that the provider uses. The names are
//! those of the header.

use super::declare::constants;

constants! {
    mod ibv_node_type: c_int {
        IBV_NODE_RNIC = 4,
    }
    mod ibv_transport_type: c_int {
        IBV_TRANSPORT_IWARP = 1,
    }
    mod ibv_atomic_cap: c_uint {
        IBV_ATOMIC_NONE = 0,
    }
    mod ibv_mtu: c_uint {}
    mod ibv_port_state: c_uint {
        IBV_PORT_DOWN = 1,
        IBV_PORT_INIT = 2,
        IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4,
        IBV_PORT_ACTIVE_DEFER = 5,
    }
    mod ibv_qp_type: c_uint {
        IBV_QPT_RC = 2,
        IBV_QPT_UD = 4,
    }
    mod ibv_qp_state: c_uint {
        IBV_QPS_INIT = 1,
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_ERR = 6,
    }
    mod ibv_wc_status: c_uint {
        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
    }
    mod ibv_wc_opcode: c_uint {
        IBV_WC_SEND = 0,
        IBV_WC_RDMA_WRITE = 1,
        IBV_WC_RDMA_READ = 2,
        IBV_WC_COMP_SWAP = 3,
        IBV_WC_FETCH_ADD = 4,
        IBV_WC_RECV = 128,
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
    }
    mod ibv_wr_opcode: c_uint {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3,
        IBV_WR_RDMA_READ = 4,
        IBV_WR_ATOMIC_CMP_AND_SWP = 5,
        IBV_WR_ATOMIC_FETCH_AND_ADD = 6,
        IBV_WR_SEND_WITH_INV = 9,
    }
    mod ibv_event_type: c_uint {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_COMM_EST = 4,
        IBV_EVENT_SQ_DRAINED = 5,
        IBV_EVENT_PATH_MIG = 6,
        IBV_EVENT_PATH_MIG_ERR = 7,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_SM_CHANGE = 13,
        IBV_EVENT_SRQ_ERR = 14,
        IBV_EVENT_QP_LAST_WQE_REACHED = 16,
        IBV_EVENT_CLIENT_REREGISTER = 17,
        IBV_EVENT_GID_CHANGE = 18,
    }
    flags ibv_device_cap_flags {
        IBV_DEVICE_MEM_MGT_EXTENSIONS = 1 << 21,
    }
    flags ibv_odp_general_caps {
        IBV_ODP_SUPPORT = 1,
    }
    flags ibv_odp_transport_cap_bits {
        IBV_ODP_SUPPORT_SEND = 1,
        IBV_ODP_SUPPORT_RECV = 2,
        IBV_ODP_SUPPORT_WRITE = 4,
        IBV_ODP_SUPPORT_READ = 8,
    }
    flags ibv_access_flags {
        IBV_ACCESS_LOCAL_WRITE = 1,
        IBV_ACCESS_REMOTE_WRITE = 2,
        IBV_ACCESS_REMOTE_READ = 4,
        IBV_ACCESS_REMOTE_ATOMIC = 8,
        IBV_ACCESS_ON_DEMAND = 64,
        IBV_ACCESS_RELAXED_ORDERING = 1 << 20,
    }
    flags ibv_cq_attr_mask {
        IBV_CQ_ATTR_MODERATE = 1,
    }
    flags ibv_qp_attr_mask {
        IBV_QP_STATE = 1,
        IBV_QP_ACCESS_FLAGS = 8,
        IBV_QP_PKEY_INDEX = 16,
        IBV_QP_PORT = 32,
        IBV_QP_AV = 128,
        IBV_QP_PATH_MTU = 256,
        IBV_QP_TIMEOUT = 512,
        IBV_QP_RETRY_CNT = 1024,
        IBV_QP_RNR_RETRY = 2048,
        IBV_QP_RQ_PSN = 4096,
        IBV_QP_MAX_QP_RD_ATOMIC = 8192,
        IBV_QP_MIN_RNR_TIMER = 32768,
        IBV_QP_SQ_PSN = 65536,
        IBV_QP_MAX_DEST_RD_ATOMIC = 131_072,
        IBV_QP_DEST_QPN = 1 << 20,
    }
    flags ibv_send_flags {
        IBV_SEND_FENCE = 1,
        IBV_SEND_SIGNALED = 2,
        IBV_SEND_SOLICITED = 4,
        IBV_SEND_INLINE = 8,
    }
    flags ibv_wc_flags {
        IBV_WC_GRH = 1,
        IBV_WC_WITH_IMM = 2,
        IBV_WC_WITH_INV = 8,
    }
}
