//! Settings of datagrams.

use crate::datagram::QUEUE_KEY;

/// The port of RoCE version 2 (IANA: `roce`).
pub const ROCE_PORT: u16 = 4791;

/// UDP ports of the embedded provider's datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoceConfig {
    /// The UDP port of all datagrams but those of groups. `None`, the default, gives each listener the UDP port with the number that
    /// it listens on, and the other ids of an address a free one together: no process is in the way of another. With 4791, datagrams are
    /// exchanged with RoCE devices of other hosts, the kernel's rxe among them; one process has the port of an address then.
    pub port: Option<u16>,
    /// The UDP port of multicast groups, 4791 by default, which processes share.
    pub group_port: u16,
    /// The key (Q_Key) that the queue pairs of this provider demand, [`QUEUE_KEY`] by default, as rdma_cm has it. Peers that ask for an
    /// endpoint learn it; groups use it, too. Set it for peers that agree on a key by other means, such as `ibv_ud_pingpong`(1).
    pub queue_key: u32,
}

impl Default for RoceConfig {
    fn default() -> Self {
        Self { port: None, group_port: ROCE_PORT, queue_key: QUEUE_KEY }
    }
}
