//! Unreliable datagrams: where they go, and where they came from.
//!
//! A datagram id is made by [`crate::roles::Datagrams::bind_datagram`], [`crate::roles::Datagrams::resolve_datagram`] or
//! [`crate::roles::Datagrams::listen_datagram`]; its queue pair is a datagram queue pair. One queue pair may serve many ids: it
//! answers the requests of peers ([`crate::roles::Datagrams::answer_datagram`]), and sends to the peers that ids without a
//! queue pair have found. A receive needs [`GRH_LEN`] bytes more than the datagram: they come first, and count in the
//! completion's `byte_len`. The sender does not learn whether a datagram has arrived. A datagram that finds no receive
//! posted is dropped.

pub use crate::handle::AddressId;

/// Bytes in front of every received datagram: the global route header, on RoCE version 2 the IP header.
pub const GRH_LEN: usize = 40;

/// The key of queue pairs whose peers found each other by address (`RDMA_UDP_QKEY`).
pub const QUEUE_KEY: u32 = 0x0123_4567;

/// How to get to a port: what an address handle is made of (`ibv_create_ah`(3)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// Its GID; on RoCE version 2 an IP address. Meaningful where `is_global` is set.
    pub gid: [u8; 16],
    /// Whether the GID is used: always on RoCE, and across subnets of InfiniBand.
    pub is_global: bool,
    /// Which of our own GIDs it is sent from.
    pub source_gid_index: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Routers it may pass.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Local identifier, on InfiniBand; on the embedded provider the UDP port.
    pub lid: u16,
    /// Service level.
    pub service_level: u8,
    /// Which of our own local identifiers it is sent from.
    pub path_bits: u8,
    /// Rate limit, as the device encodes it; 0 is none.
    pub static_rate: u8,
    /// Our own port.
    pub port: u8,
}

/// A queue pair that takes datagrams, or a multicast group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramPeer {
    /// The way there.
    pub route: Route,
    /// Its number; that of a group is the same everywhere.
    pub qp_number: u32,
    /// The key that its queue pairs demand.
    pub queue_key: u32,
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The way there, from [`crate::roles::Datagrams::create_address`].
    pub address: AddressId,
    /// The queue pair there.
    pub qp_number: u32,
    /// Its key.
    pub queue_key: u32,
}

/// Where a datagram came from, as far as its completion says; zeros in completions of other kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramSource {
    /// Number of the queue pair that sent it.
    pub qp_number: u32,
    /// Local identifier of the sender, on InfiniBand; on the embedded provider the UDP port that it takes datagrams at.
    pub lid: u16,
    /// Service level.
    pub service_level: u8,
    /// Which of our local identifiers it came to; the highest bit says that the first 40 bytes are a route header.
    pub(crate) path_bits: u8,
}

impl DatagramSource {
    pub(crate) const GLOBAL: u8 = 0x80;

    /// Whether the first [`GRH_LEN`] bytes are a route header that says which way it came, as always on RoCE.
    #[must_use]
    pub const fn has_route_header(self) -> bool {
        self.path_bits & 0x80 != 0
    }
}
