//! The settings of datagrams on the embedded provider.

use crate::datagram::QUEUE_KEY;

/// The UDP port of RoCE version 2, as assigned by IANA (`roce`).
pub const ROCE_PORT: u16 = 4791;

/// The settings of the embedded provider's datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoceConfig {
    /// The UDP port of all datagrams except those to multicast groups.
    ///
    /// With `None`, the default, each listener uses the UDP port with the number that it listens at. All other ids of an address share one
    /// free port. So several processes can use one address.
    ///
    /// With 4791, the program exchanges datagrams with RoCE devices of other hosts, such as the kernel's rxe. Then only one process can use
    /// an address for datagrams.
    pub port: Option<u16>,
    /// The UDP port of datagrams to multicast groups, 4791 by default. Several processes can use it at the same time.
    pub group_port: u16,
    /// The Q_Key of this provider's queue pairs, [`QUEUE_KEY`] by default, as in rdma_cm. Datagrams with another Q_Key are dropped. Peers
    /// that query an endpoint receive the Q_Key in the reply, and multicast groups use it, too. Set it for peers that agree on a Q_Key by
    /// other means, such as `ibv_ud_pingpong`(1).
    pub queue_key: u32,
}

impl Default for RoceConfig {
    fn default() -> Self {
        Self { port: None, group_port: ROCE_PORT, queue_key: QUEUE_KEY }
    }
}
