//! A UDP port with which connection-manager ids for datagrams send and receive. Its socket is bound to a local address, or has joined a
//! multicast group.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::packet::MAX_PAYLOAD;
use rdma_transport::slab::Key;
use rdma_transport::sockets::Interface;

/// The largest total length in octets of the headers in front of a payload: a route header, a UDP header, and the longest InfiniBand
/// headers. RDMA devices assume the same length.
const OVERHEAD: u32 = 96;
/// The payload sizes in octets that InfiniBand defines as MTUs.
const PAYLOADS: [u32; 5] = [MAX_PAYLOAD as u32, 2048, 1024, 512, 256];

/// The kinds of ports, by the datagrams that they receive.
#[derive(Debug)]
pub(crate) enum PortKind {
    /// Receives the datagrams to a local address. `services` maps the port number of each service
    /// to the connection-manager id that listens for queries for this service.
    Address { services: BTreeMap<u16, Key> }, // local: endpoints of the program
    /// Receives the datagrams to a multicast group, on the interface with the address `member`. `ids` are the ids that have joined the
    /// group on this interface.
    Group { member: IpAddr, ids: Vec<Key> }, // local: groups of the program
}

/// A UDP port of one provider.
#[derive(Debug)]
pub(crate) struct UdpPort {
    /// The handle of the port's socket.
    pub(crate) socket: Key,
    pub(crate) address: SocketAddr,
    pub(crate) interface: Interface,
    pub(crate) kind: PortKind,
    /// The number of ids that use this UDP port.
    pub(crate) users: usize,
    /// True if the port is in the ready queue, which contains the ports that may have packets to read.
    pub(crate) queued: bool,
    /// Ids with datagrams to send that did not fit into the socket's buffer.
    pub(crate) waiting: VecDeque<Key>, // local: endpoints of the program
}

impl UdpPort {
    pub(crate) fn new(socket: Key, address: SocketAddr, interface: Interface, kind: PortKind) -> Self {
        Self { socket, address, interface, kind, users: 0, queued: false, waiting: VecDeque::new() }
    }

    /// Returns the length in octets of the largest payload of a datagram. This length is the largest InfiniBand MTU with which a payload
    /// and all its headers fit into the MTU of the interface, or 256 if none fits.
    pub(crate) fn max_payload(&self) -> u32 {
        let fits = |payload: &&u32| **payload + OVERHEAD <= self.interface.mtu;
        PAYLOADS.iter().find(fits).copied().unwrap_or(PAYLOADS[PAYLOADS.len() - 1])
    }

    pub(crate) fn service(&self, port: u16) -> Option<Key> {
        match &self.kind {
            PortKind::Address { services } => services.get(&port).copied(),
            PortKind::Group { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_the_largest_that_fits_the_interface() {
        let of = |mtu| {
            let address = "127.0.0.1:1".parse().unwrap();
            let kind = PortKind::Address { services: BTreeMap::new() };
            UdpPort::new(Key::NONE, address, Interface { index: 1, mtu }, kind).max_payload()
        };
        assert_eq!([65536, 9000, 4191, 1500, 1280, 576, 68].map(of), [4096, 4096, 2048, 1024, 1024, 256, 256]);
    }
}
