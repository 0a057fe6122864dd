//! Settings of datagrams.

use crate::datagram::QUEUE_KEY;

/// The port of RoCE version 2 (IANA: `roce`).
pub const ROCE_PORT: u16 = 4791;

/// The settings of the embedded provider's datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoceConfig {
    /// The UDP port of all datagrams but those of groups. With `None`, the default, each listener uses the UDP port with its own number,
    /// and the other ids of an address share a free one, so that processes do not conflict. With 4791, datagrams are exchanged with RoCE
    /// devices of other hosts, such as the kernel's rxe; then only one process can use the port of an address.
    pub port: Option<u16>,
    /// The UDP port of multicast groups, 4791 by default. Processes share it.
    pub group_port: u16,
    /// The key (Q_Key) that the queue pairs of this provider require, [`QUEUE_KEY`] by default, as in rdma_cm. Peers that query an endpoint
    /// learn it; groups use it, too. Set it for peers that agree on a key by other means, such as `ibv_ud_pingpong`(1).
    pub queue_key: u32,
}

impl Default for RoceConfig {
    fn default() -> Self {
        Self { port: None, group_port: ROCE_PORT, queue_key: QUEUE_KEY }
    }
}
