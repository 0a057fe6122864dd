//! A UDP port, from which ids send and at which they receive: the sockets of an address, and those of a group.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::packet::MAX_PAYLOAD;
use crate::mem::Interface;
use crate::slab::Key;

/// Headers that a payload may have, as devices count them: a route header, UDP, and all that a packet of any kind may have.
const OVERHEAD: u32 = 96;
/// The payloads of InfiniBand, octets.
const PAYLOADS: [u32; 5] = [MAX_PAYLOAD as u32, 2048, 1024, 512, 256];

/// What comes to a port.
#[derive(Debug)]
pub(crate) enum Kind {
    /// Datagrams of an address, and questions for the services there.
    Address { services: BTreeMap<u16, Key> },
    /// Datagrams of a group, at an address of an interface. The ids in the group hear them.
    Group { member: IpAddr, ids: Vec<Key> },
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Port {
    /// The handle of its socket.
    pub(crate) socket: Key,
    pub(crate) address: SocketAddr,
    pub(crate) interface: Interface,
    pub(crate) kind: Kind,
    /// Number of ids that use it.
    pub(crate) users: usize,
    /// Whether it is to be read from.
    pub(crate) queued: bool,
    /// Ids whose datagrams wait for room in the socket.
    pub(crate) waiting: VecDeque<Key>,
}

impl Port {
    pub(crate) fn new(socket: Key, address: SocketAddr, interface: Interface, kind: Kind) -> Self {
        Self { socket, address, interface, kind, users: 0, queued: false, waiting: VecDeque::new() }
    }

    /// Largest payload, octets: the largest of InfiniBand's that the interface carries.
    pub(crate) fn max_payload(&self) -> u32 {
        let fits = |payload: &&u32| **payload + OVERHEAD <= self.interface.mtu;
        PAYLOADS.iter().find(fits).copied().unwrap_or(PAYLOADS[PAYLOADS.len() - 1])
    }

    pub(crate) fn service(&self, port: u16) -> Option<Key> {
        match &self.kind {
            Kind::Address { services } => services.get(&port).copied(),
            Kind::Group { .. } => None,
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
            let kind = Kind::Address { services: BTreeMap::new() };
            Port::new(Key::NONE, address, Interface { index: 1, mtu }, kind).max_payload()
        };
        assert_eq!([65536, 9000, 4191, 1500, 1280, 576, 68].map(of), [4096, 4096, 2048, 1024, 1024, 256, 256]);
    }
}
