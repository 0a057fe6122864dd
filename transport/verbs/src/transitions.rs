//! The attributes for the state transitions of a queue pair that connects by out-of-band exchange, that is, without the
//! connection manager (InfiniBand Architecture Specification, volume 1, 10.3.1; `ibv_modify_qp`(3)).

use super::gid::PortGid;
use super::route::ah_attr;
use super::sys::{ibv_access_flags as access, ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_state as state};
use crate::exchange::message::{Endpoint, Network};
use rdma_transport::cm::ReadDepth;
use rdma_transport::datagram::Route;

/// The attributes of a transition, and the mask of the attributes that are set.
pub(super) type Change = (ibv_qp_attr, mask);

/// The attributes on which the two sides of a connection have agreed, from the point of view of one side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Negotiated {
    pub(super) mtu: u8,
    pub(super) traffic_class: u8,
    pub(super) ack_timeout: u8,
    pub(super) retry_count: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) read_depth: ReadDepth,
}

/// The hop limit of packets: the maximum number of routers between the two sides.
const HOP_LIMIT: u8 = 64;

pub(super) fn none() -> ibv_qp_attr {
    // SAFETY: all fields are numbers, for which zeros are valid.
    unsafe { std::mem::zeroed() }
}

fn narrow(depth: u16) -> u8 {
    u8::try_from(depth).unwrap_or(u8::MAX)
}

/// Returns the transition to INIT, in which receives may be posted. The access rights are the maximum for the queue pair. Each region
/// grants its own rights below this maximum.
pub(super) fn init(port: u8, atomics: bool) -> Change {
    let mut attr = none();
    attr.qp_state = state::IBV_QPS_INIT;
    attr.port_num = port;
    let mut rights = access::IBV_ACCESS_LOCAL_WRITE | access::IBV_ACCESS_REMOTE_WRITE | access::IBV_ACCESS_REMOTE_READ;
    if atomics {
        rights |= access::IBV_ACCESS_REMOTE_ATOMIC;
    }
    attr.qp_access_flags = rights.0;
    (attr, mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS)
}

/// Returns the transition to RTR (ready to receive), in which the queue pair receives from the peer.
pub(super) fn ready_to_receive(port_gid: &PortGid, peer: &Endpoint, agreed: &Negotiated) -> Change {
    let mut attr = none();
    attr.qp_state = state::IBV_QPS_RTR;
    attr.path_mtu = agreed.mtu.into();
    attr.dest_qp_num = peer.qp_number;
    attr.rq_psn = peer.psn;
    attr.max_dest_rd_atomic = narrow(agreed.read_depth.responder_resources);
    attr.min_rnr_timer = agreed.min_rnr_timer;
    // Within an InfiniBand subnet, the LID routes packets to the peer. Between subnets, a router needs the GID.
    let is_global = peer.network == Network::RoceV2 || peer.gid[..8] != port_gid.gid[..8];
    attr.ah_attr = ah_attr(&Route {
        gid: peer.gid,
        is_global,
        source_gid_index: port_gid.gid_index,
        flow_label: 0,
        hop_limit: HOP_LIMIT,
        traffic_class: agreed.traffic_class,
        lid: peer.lid,
        service_level: 0,
        path_bits: 0,
        static_rate: 0,
        port: port_gid.port,
    });
    let set = mask::IBV_QP_STATE
        | mask::IBV_QP_AV
        | mask::IBV_QP_PATH_MTU
        | mask::IBV_QP_DEST_QPN
        | mask::IBV_QP_RQ_PSN
        | mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | mask::IBV_QP_MIN_RNR_TIMER;
    (attr, set)
}

/// Returns the transition to RTS (ready to send), in which the queue pair also sends. `psn` is the sequence number of
/// its first packet.
pub(super) fn ready_to_send(psn: u32, peer: &Endpoint, agreed: &Negotiated) -> Change {
    let mut attr = none();
    attr.qp_state = state::IBV_QPS_RTS;
    attr.sq_psn = psn;
    attr.timeout = agreed.ack_timeout;
    attr.retry_cnt = agreed.retry_count;
    // The receiver of a message decides how often the sender retransmits it.
    attr.rnr_retry = peer.rnr_retry_count;
    attr.max_rd_atomic = narrow(agreed.read_depth.initiator_depth);
    let set = mask::IBV_QP_STATE
        | mask::IBV_QP_SQ_PSN
        | mask::IBV_QP_TIMEOUT
        | mask::IBV_QP_RETRY_CNT
        | mask::IBV_QP_RNR_RETRY
        | mask::IBV_QP_MAX_QP_RD_ATOMIC;
    (attr, set)
}
