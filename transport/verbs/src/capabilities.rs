//! The capabilities of a device, from the attributes that the libraries report.

use std::ffi::c_int;
use std::ptr;

use super::device::{Driver, RawDevice};
use super::ffi::check;
use super::sys::{
    ibv_atomic_cap, ibv_context, ibv_create_cq, ibv_create_qp, ibv_destroy_cq, ibv_destroy_qp, ibv_device_attr,
    ibv_device_attr_ex, ibv_device_cap_flags, ibv_odp_general_caps, ibv_odp_transport_cap_bits, ibv_port_attr,
    ibv_port_state, ibv_qp_init_attr, ibv_qp_type, ibv_reg_dmabuf_mr, ibv_reg_mr_iova2, query_device_ex, query_port,
};
use rdma_transport::caps::{Capabilities, Features, Moderation};
use rdma_transport::error::Result;
use rdma_transport::wr::MAX_SGE;

/// The maximum length of a program's private data in a connect request of InfiniBand's connection
/// manager, in bytes. The kernel's own header in the private data is not included.
const IB_PRIVATE_DATA: usize = 56;
/// The maximum length of a program's private data in an MPA frame, in bytes. The length field of librdmacm
/// (`private_data_len`) has one byte, so it allows 255 bytes. MPA's enhanced connection setup uses 4 of these bytes.
const IWARP_PRIVATE_DATA: usize = 251;
/// The sizes of inline sends that `probe_inline` tries, in bytes.
const INLINE: [u32; 6] = [512, 256, 128, 64, 32, 16];

/// Properties and limits of a device for which [`Capabilities`] has no field.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) iwarp: bool,
    pub(super) driver: Driver,
    /// The maximum number of RDMA Reads that a peer may have outstanding at the local side.
    pub(super) responder_resources: u8,
    /// The maximum number of RDMA Reads that the local side may have outstanding at a peer.
    pub(super) initiator_depth: u8,
    /// The maximum number of scatter/gather entries of a receive on a shared queue.
    pub(super) shared_sge: u32,
}

impl Limits {
    pub(super) fn of(device: &RawDevice) -> Self {
        let attr = &device.attr.0;
        let reads = |limit: c_int| u8::try_from(limit.clamp(0, 16)).unwrap_or(16);
        Self {
            iwarp: device.iwarp,
            driver: device.driver,
            responder_resources: reads(attr.max_qp_rd_atom),
            initiator_depth: reads(attr.max_qp_init_rd_atom),
            shared_sge: u32::try_from(attr.max_srq_sge).unwrap_or(0),
        }
    }

    /// Returns true if the device reports by an event that a queue pair in the error state has consumed its last receive from a shared
    /// queue (`IBV_EVENT_QP_LAST_WQE_REACHED`). iWARP has no such event, and rxe does not report it.
    pub(super) fn reports_last_receive(&self) -> bool {
        !self.iwarp && self.driver != Driver::Rxe
    }

    /// Returns the retry count to set on the device if the program has requested `wanted`. rxe
    /// interprets 7 as "no limit" (`rxe_completer` in drivers/infiniband/sw/rxe/rxe_comp.c, Linux
    /// 6.1): it would retransmit to a lost peer forever.
    pub(super) fn retry_count(&self, wanted: u8) -> u8 {
        if self.driver == Driver::Rxe { wanted.min(6) } else { wanted }
    }
}

/// Queries the capabilities of a device. The attributes of `port` limit messages and datagrams.
pub(super) fn query(device: &RawDevice, limits: &Limits, port: u8) -> Result<Capabilities> {
    let mut capabilities = from_attributes(&device.attr.0, limits);
    capabilities.max_inline = probe_inline(device);
    capabilities.numa_node = device.numa_node;
    capabilities.completion_vectors = device.completion_vectors();
    if ibv_reg_mr_iova2().is_some() {
        capabilities.features |= Features::RELAXED_ORDERING;
    }
    if ibv_reg_dmabuf_mr().is_some() && limits.driver == Driver::Other {
        capabilities.features |= Features::DMABUF;
    }
    // An iWARP device requires the remote right to write for the local memory of a Read. Only siw does not check this
    // right (drivers/infiniband/sw/siw/siw_qp_rx.c, siw_proc_rresp).
    if limits.iwarp && limits.driver != Driver::Siw {
        capabilities.features |= Features::OPEN_READ_SINKS;
    }
    // Siw checks the rights of a region for each part of a frame. It then places the part while it holds a reference to the pages, but no
    // lock (siw_proc_write, siw_dereg_mr). So a region may be deregistered between the check and the placement.
    if limits.driver == Driver::Siw {
        capabilities.features |= Features::LATE_PLACEMENT;
    } else {
        // Siw does not have this feature: its completion queues raise no event if they are armed for solicited
        // completions only.
        capabilities.features |= Features::SOLICITED_EVENTS;
    }
    add_extended(device.context(), &mut capabilities);
    let port = port_attr(device.context(), port)?;
    if capabilities.features.contains(Features::DATAGRAMS) {
        capabilities.max_datagram = max_datagram(&port);
    }
    if port.max_msg_sz > 0 {
        capabilities.max_message = capabilities.max_message.min(port.max_msg_sz.into());
    }
    log::debug!(
        "device {}: {}, {:?}, {capabilities:?}",
        device.name,
        if limits.iwarp { "iWARP" } else { "InfiniBand or RoCE" },
        device.attr
    );
    Ok(capabilities)
}

fn from_attributes(attr: &ibv_device_attr, limits: &Limits) -> Capabilities {
    let mut features = Features::READ | Features::WRITE;
    if limits.iwarp {
        features |= Features::ABRUPT_DISCONNECT;
    } else {
        features |= Features::WRITE_WITH_IMMEDIATE | Features::SEND_WITH_IMMEDIATE | Features::SERVER_SENDS_FIRST;
        features |= Features::DATAGRAMS | Features::ACKNOWLEDGED_WRITES;
        if attr.max_mcast_grp > 0 && attr.max_mcast_qp_attach > 0 {
            features |= Features::MULTICAST;
        }
        if attr.atomic_cap != ibv_atomic_cap::IBV_ATOMIC_NONE {
            features |= Features::ATOMICS;
        }
    }
    if attr.device_cap_flags & ibv_device_cap_flags::IBV_DEVICE_MEM_MGT_EXTENSIONS.0 != 0 {
        features |= Features::SEND_WITH_INVALIDATE;
        if limits.iwarp {
            features |= Features::REMOTE_INVALIDATION;
        }
    }
    if attr.max_srq > 0 && attr.max_srq_wr > 0 {
        features |= Features::SHARED_RECEIVE_QUEUE;
    }
    let mut capabilities = Capabilities::portable(features);
    let positive = |limit: c_int| u32::try_from(limit).unwrap_or(0);
    capabilities.max_sge = positive(attr.max_sge).min(MAX_SGE as u32);
    // The limit of scatter/gather entries for Reads is a separate attribute. On siw it is smaller than the limit for
    // other work requests, and siw reports no error for a Read with too many entries.
    capabilities.max_read_sge = match attr.max_sge_rd {
        0 if limits.iwarp => 1,
        0 => capabilities.max_sge,
        limit => positive(limit).min(capabilities.max_sge),
    };
    capabilities.max_queue_depth = positive(attr.max_qp_wr);
    capabilities.max_shared_receives = if attr.max_srq > 0 { positive(attr.max_srq_wr) } else { 0 };
    capabilities.max_completion_queue = positive(attr.max_cqe);
    capabilities.max_private_data = if limits.iwarp { IWARP_PRIVATE_DATA } else { IB_PRIVATE_DATA };
    capabilities.max_read_depth = limits.responder_resources.min(limits.initiator_depth).into();
    capabilities
}

/// Adds the capabilities that only the extended query reports. A device without this query has none of these
/// capabilities.
fn add_extended(context: *mut ibv_context, capabilities: &mut Capabilities) {
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut attr: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
    // SAFETY: the context is live, because the caller has the device. The pointer is to memory for the result.
    if unsafe { query_device_ex(context, &raw mut attr) } != 0 {
        return;
    }
    let most = Moderation { completions: attr.cq_mod_caps.max_cq_count, microseconds: attr.cq_mod_caps.max_cq_period };
    capabilities.completion_moderation = (most.completions > 0 && most.microseconds > 0).then_some(most);
    let (general, connected) = (attr.odp_caps.general_caps, attr.odp_caps.per_transport_caps.rc_odp_caps);
    use ibv_odp_transport_cap_bits as bits;
    let needed = bits::IBV_ODP_SUPPORT_SEND.0
        | bits::IBV_ODP_SUPPORT_RECV.0
        | bits::IBV_ODP_SUPPORT_WRITE.0
        | bits::IBV_ODP_SUPPORT_READ.0;
    if general & u64::from(ibv_odp_general_caps::IBV_ODP_SUPPORT.0) != 0 && connected & needed == needed {
        capabilities.features |= Features::ON_DEMAND_PAGING;
    }
}

/// Returns the length of the largest datagram that a port can send, in bytes. A datagram is one packet, so its limit is the MTU.
pub(super) fn max_datagram(port: &ibv_port_attr) -> u32 {
    // The device encodes 256 bytes as 1, 512 bytes as 2, and so on.
    128u32.checked_shl(port.active_mtu).unwrap_or(0).min(4096)
}

/// Queries the attributes of a port.
pub(super) fn port_attr(context: *mut ibv_context, port: u8) -> Result<ibv_port_attr> {
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the context is live, because each caller has the device. The pointer is to memory for the result.
    check("ibv_query_port", unsafe { query_port(context, port.max(1), &raw mut attr) })?;
    Ok(attr)
}

/// Queries the state of a port, and returns it like [`state_of`]. Returns `Err` if the query fails.
pub(super) fn port_state(context: *mut ibv_context, port: u8) -> Result<std::result::Result<(), &'static str>> {
    Ok(state_of(&port_attr(context, port)?))
}

/// Returns `Ok` if a port with these attributes can carry traffic. Otherwise returns a description of its state.
pub(super) fn state_of(port: &ibv_port_attr) -> std::result::Result<(), &'static str> {
    use ibv_port_state as state;
    match port.state {
        // In the state `ACTIVE_DEFER` the port is active, but its link is unstable.
        state::IBV_PORT_ACTIVE | state::IBV_PORT_ACTIVE_DEFER => Ok(()),
        state::IBV_PORT_DOWN => Err("down"),
        state::IBV_PORT_INIT => Err("initializing: no subnet manager has set it up"),
        state::IBV_PORT_ARMED => Err("armed, not active: the subnet manager has not finished"),
        _ => Err("in a state that this library does not know"),
    }
}

/// Finds the largest inline send by creating queue pairs with different sizes, because no device attribute reports it.
fn probe_inline(device: &RawDevice) -> u32 {
    // SAFETY: the context is live. The queue has no channel, and no context of the provider.
    let cq = unsafe { ibv_create_cq(device.context(), 2, ptr::null_mut(), ptr::null_mut(), 0) };
    if cq.is_null() {
        return 0;
    }
    let found = INLINE.into_iter().find_map(|inline| {
        // SAFETY: all fields are numbers or pointers, for which zeros are valid.
        let mut attr: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        (attr.send_cq, attr.recv_cq, attr.qp_type) = (cq, cq, ibv_qp_type::IBV_QPT_RC);
        (attr.cap.max_send_wr, attr.cap.max_recv_wr) = (1, 1);
        (attr.cap.max_send_sge, attr.cap.max_recv_sge) = (1, 1);
        attr.cap.max_inline_data = inline;
        // SAFETY: the domain and the queue are live. The library reads and updates the attributes during the call.
        let qp = unsafe { ibv_create_qp(device.protection_domain(), &raw mut attr) };
        if qp.is_null() {
            return None;
        }
        // SAFETY: this function has created the queue pair, which was never used.
        unsafe { ibv_destroy_qp(qp) };
        Some(attr.cap.max_inline_data.min(inline))
    });
    // SAFETY: this function has created the queue, and no queue pair uses the queue any more.
    unsafe { ibv_destroy_cq(cq) };
    found.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_follow_the_device() {
        let limits = |iwarp, initiator_depth| Limits {
            iwarp,
            driver: Driver::Other,
            responder_resources: 16,
            initiator_depth,
            shared_sge: 4,
        };
        // SAFETY: all fields are numbers, for which zeros are valid.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        (attr.max_sge, attr.max_qp_wr, attr.max_cqe) = (32, 1 << 14, 1 << 20);
        attr.atomic_cap = ibv_atomic_cap::IBV_ATOMIC_NONE + 1;
        let roce = from_attributes(&attr, &limits(false, 4));
        assert!(roce.features.contains(Features::ATOMICS | Features::WRITE_WITH_IMMEDIATE | Features::READ));
        assert!(roce.features.contains(Features::ACKNOWLEDGED_WRITES));
        assert!(!roce.features.contains(Features::SEND_WITH_INVALIDATE));
        assert_eq!((roce.max_sge, roce.max_private_data, roce.max_read_depth), (4, 56, 4));
        let iwarp = from_attributes(&attr, &limits(true, 16));
        assert_eq!(iwarp.features, Features::READ | Features::WRITE | Features::ABRUPT_DISCONNECT);
        assert_eq!((iwarp.max_private_data, iwarp.max_queue_depth), (251, 1 << 14));
    }
}
