//! Unreliable datagrams: their destinations and sources.
//!
//! A datagram id is made by [`crate::roles::Datagrams::bind_datagram`], [`crate::roles::Datagrams::resolve_datagram`]
//! or [`crate::roles::Datagrams::listen_datagram`]; its queue pair is a datagram queue pair. One queue pair may serve
//! many ids: [`crate::roles::Datagrams::answer_datagram`] answers the requests of peers with it, and it sends to the
//! peers that ids without a queue pair have found. A receive needs [`GRH_LEN`] bytes more than the datagram: they
//! precede the payload, and count in the completion's `byte_len`. The sender is not notified whether a datagram has
//! arrived. A datagram that finds no receive posted is dropped.

pub use crate::handle::AddressId;

/// The number of bytes in front of each received datagram: the global route header, or the IP header on RoCE version 2.
pub const GRH_LEN: usize = 40;

/// The queue key of queue pairs whose peers have found each other by address (`RDMA_UDP_QKEY`).
pub const QUEUE_KEY: u32 = 0x0123_4567;

/// The route to a port, from which an address handle is made (`ibv_create_ah`(3)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// The GID of the port; on RoCE version 2 an IP address. Meaningful if `is_global` is set.
    pub gid: [u8; 16],
    /// True if the GID is used: always on RoCE, and between subnets of InfiniBand.
    pub is_global: bool,
    /// The index of the local GID that is the source.
    pub source_gid_index: u8,
    /// The flow label, 20 bits.
    pub flow_label: u32,
    /// The hop limit: the number of routers that a datagram may pass.
    pub hop_limit: u8,
    /// The traffic class.
    pub traffic_class: u8,
    /// The local identifier on InfiniBand; the UDP port on the embedded provider.
    pub lid: u16,
    /// The service level.
    pub service_level: u8,
    /// The path bits, which select the local identifier that is the source.
    pub path_bits: u8,
    /// The rate limit, as the device encodes it; 0 for none.
    pub static_rate: u8,
    /// The local port.
    pub port: u8,
}

/// A queue pair that receives datagrams, or a multicast group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramPeer {
    /// The route to it.
    pub route: Route,
    /// The number of the queue pair; for a group, a fixed number that is the same everywhere.
    pub qp_number: u32,
    /// The queue key that its queue pairs demand.
    pub queue_key: u32,
}

/// The destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The address handle, from [`crate::roles::Datagrams::create_address`].
    pub address: AddressId,
    /// The number of the queue pair.
    pub qp_number: u32,
    /// The key of the queue pair.
    pub queue_key: u32,
}

/// The source of a datagram, as far as its completion has it; zeros in other completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramSource {
    /// The number of the queue pair that sent it.
    pub qp_number: u32,
    /// The local identifier of the sender on InfiniBand; on the embedded provider the UDP port that the sender receives
    /// datagrams at.
    pub lid: u16,
    /// The service level.
    pub service_level: u8,
    /// The path bits of the local identifier that it arrived at. The highest bit is set if the first 40 bytes are a
    /// route header.
    pub(crate) path_bits: u8,
}

impl DatagramSource {
    pub(crate) const GLOBAL: u8 = 0x80;

    /// Returns true if the first [`GRH_LEN`] bytes are a route header with the path of the datagram, as always on RoCE.
    #[must_use]
    pub const fn has_route_header(self) -> bool {
        self.path_bits & 0x80 != 0
    }
}
