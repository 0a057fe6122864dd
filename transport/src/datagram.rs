//! Unreliable datagrams: their destinations and sources.
//!
//! A datagram id is a connection-manager id for datagrams. [`bind_datagram`](crate::roles::Datagrams::bind_datagram),
//! [`resolve_datagram`](crate::roles::Datagrams::resolve_datagram) and
//! [`listen_datagram`](crate::roles::Datagrams::listen_datagram) create datagram ids.
//!
//! A queue pair belongs to one datagram id, but can serve many ids of its device, which then need
//! no queue pair. It can send to every peer that these ids have resolved. A program that listens
//! can answer all connect requests with the number of one queue pair
//! ([`answer_datagram`](crate::roles::Datagrams::answer_datagram)).
//!
//! A receive must be [`GRH_LEN`] bytes longer than the datagram. The device places a header of this length in front of
//! the payload, and the completion's `byte_len` includes the header. A datagram is dropped if no receive is posted. The
//! sender is not notified if a datagram arrives or is lost.

pub use crate::handle::AddressId;

/// The number of bytes that precede the payload of each received datagram: the global route header, or the IP header on
/// RoCE version 2.
pub const GRH_LEN: usize = 40;

/// The queue key of all queue pairs that peers resolve through the connection manager (`RDMA_UDP_QKEY`).
pub const QUEUE_KEY: u32 = 0x0123_4567;

/// The route to a peer's port. An address handle is created from it (`ibv_create_ah`(3)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// The GID of the peer's port. On RoCE version 2 it contains the IP address of the port. Meaningful only if
    /// `is_global` is true.
    pub gid: [u8; 16],
    /// True if datagrams carry the GID: always on RoCE, and between subnets of InfiniBand.
    pub is_global: bool,
    /// The index of the local GID that datagrams carry as their source.
    pub source_gid_index: u8,
    /// The flow label, 20 bits.
    pub flow_label: u32,
    /// The hop limit: the number of routers that a datagram may pass.
    pub hop_limit: u8,
    /// The traffic class.
    pub traffic_class: u8,
    /// The local identifier (LID) of the peer's port on InfiniBand. On the embedded provider, the
    /// peer's UDP port.
    pub lid: u16,
    /// The service level.
    pub service_level: u8,
    /// The path bits: the low bits of the local identifier that datagrams carry as their source.
    pub path_bits: u8,
    /// The rate limit, as the device encodes it; 0 for no limit.
    pub static_rate: u8,
    /// The number of the local port of the device, from 1.
    pub port: u8,
}

/// A peer of datagrams: a queue pair that receives them, or a multicast group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramPeer {
    /// The route to the queue pair or to the group.
    pub route: Route,
    /// The number of the queue pair. For a group, a fixed number that is the same for all groups.
    pub qp_number: u32,
    /// The queue key that datagrams to this peer must carry.
    pub queue_key: u32,
}

/// The destination of one posted datagram ([`SendOp::Datagram`](crate::SendOp::Datagram)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The address handle of the route, from [`crate::roles::Datagrams::create_address`].
    pub address: AddressId,
    /// The number of the peer's queue pair.
    pub qp_number: u32,
    /// The queue key of the peer's queue pair.
    pub queue_key: u32,
}

/// The sender of a received datagram, as its completion reports it. In completions of other work requests all fields
/// are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramSource {
    /// The number of the queue pair that sent the datagram.
    pub qp_number: u32,
    /// The local identifier (LID) of the sender on InfiniBand. On the embedded provider, the UDP
    /// port at which the sender itself receives datagrams.
    pub lid: u16,
    /// The service level of the datagram.
    pub service_level: u8,
    /// The path bits of the local identifier at which the datagram arrived. In addition, the highest bit (`GLOBAL`) is
    /// set if the first 40 bytes of the receive are a route header.
    pub path_bits: u8,
}

impl DatagramSource {
    /// The bit of `path_bits` that is set if the first bytes of the receive are a route header.
    pub const GLOBAL: u8 = 0x80;

    /// Returns true if the first [`GRH_LEN`] bytes of the receive are a route header with the sender's address. Always
    /// true on RoCE.
    #[must_use]
    #[inline]
    pub const fn has_route_header(self) -> bool {
        self.path_bits & 0x80 != 0
    }
}
