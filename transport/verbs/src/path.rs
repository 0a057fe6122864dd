//! The path attributes of a queue pair.

use rdma_transport::Result;

use super::id::RawId;
use super::sys::ibv_qp_attr_mask as mask;

/// The path attributes of a queue pair (`ibv_query_qp`(3)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathState {
    /// The port of the device, from 1.
    pub port: u8,
    /// The path MTU: the largest payload of a packet, in bytes. 0 if the device does not report it.
    pub mtu: u32,
    /// The type of service of every packet. Its upper six bits are the DSCP.
    pub type_of_service: u8,
    /// The ack timeout, as a code
    /// ([`PathOptions::ack_timeout`](rdma_transport::PathOptions::ack_timeout)).
    pub ack_timeout: u8,
    /// The number of times that the device retransmits an unanswered request before the connection
    /// fails.
    pub retry_count: u8,
    /// The number of times that the device retransmits a message for which the peer had no receive
    /// posted. The peer sets this number. 7 means no limit.
    pub rnr_retry_count: u8,
    /// The receiver-not-ready timer, as a code
    /// ([`Retries::min_rnr_timer`](rdma_transport::Retries::min_rnr_timer)).
    pub min_rnr_timer: u8,
    /// The number of RDMA Reads that the peer may have outstanding at this queue pair.
    pub responder_resources: u8,
    /// The number of RDMA Reads that this queue pair may have outstanding at the peer.
    pub initiator_depth: u8,
}

impl PathState {
    /// Queries the attributes of an id's queue pair. Returns `None` if the id has no queue pair.
    pub(super) fn of(id: &RawId) -> Result<Option<Self>> {
        let wanted = mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_MIN_RNR_TIMER
            | mask::IBV_QP_MAX_QP_RD_ATOMIC
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC;
        Ok(id.query(wanted)?.map(|attr| Self {
            port: id.port(),
            // The device encodes 256 bytes as 1, 512 bytes as 2, and so on.
            mtu: if attr.path_mtu == 0 { 0 } else { 128u32.checked_shl(attr.path_mtu).unwrap_or(0) },
            type_of_service: attr.ah_attr.grh.traffic_class,
            ack_timeout: attr.timeout,
            retry_count: attr.retry_cnt,
            rnr_retry_count: attr.rnr_retry,
            min_rnr_timer: attr.min_rnr_timer,
            responder_resources: attr.max_dest_rd_atomic,
            initiator_depth: attr.max_rd_atomic,
        }))
    }
}
