//! The settings of datagrams on the embedded provider.

use rdma_transport::datagram::QUEUE_KEY;

/// The UDP port of RoCE version 2, as assigned by IANA (`roce`).
pub const ROCE_PORT: u16 = 4791;

/// The settings of the embedded provider's datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoceConfig {
    /// The UDP port of all datagrams except those to multicast groups.
    ///
    /// With `None`, the default, a listener at port `n` uses the UDP port `n`. For each local address, the ids that do not listen share one
    /// UDP port that the system chooses. So several processes can use one address for datagrams.
    ///
    /// With 4791, the program exchanges datagrams with RoCE devices of other hosts, such as the
    /// kernel's rxe. At each local address, only one process at a time can use this port.
    pub port: Option<u16>,
    /// The UDP port of datagrams to multicast groups. The default is 4791. Several processes can use the same port at the same time.
    pub group_port: u16,
    /// The Q_Key of this provider's queue pairs, [`QUEUE_KEY`] by default, as in rdma_cm. Datagrams with another Q_Key are dropped.
    /// Multicast groups use this Q_Key, too. Peers that query an endpoint receive this Q_Key in the reply. Change this setting to exchange
    /// datagrams with peers that agree on a Q_Key by other means, such as `ibv_ud_pingpong`(1).
    pub queue_key: u32,
}

impl Default for RoceConfig {
    fn default() -> Self {
        Self { port: None, group_port: ROCE_PORT, queue_key: QUEUE_KEY }
    }
}
