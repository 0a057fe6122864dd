//! The tables that the datagram ids of a provider share: ports, numbers of queue pairs, addresses, queries.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::frame::{HEADROOM, ROOM};
use super::numbers::QueuePairNumbers;
use super::port::{PortKind, UdpPort};
use crate::mem::Packets;
use crate::slab::{Key, Slab};

/// The tables that the datagram ids of a provider share.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) ports: Slab<UdpPort>,
    pub(crate) numbers: QueuePairNumbers,
    /// The addresses that datagrams are sent to.
    pub(crate) addresses: Slab<SocketAddr>,
    /// Queries without a reply, by request id.
    pub(crate) queries: BTreeMap<u32, Key>,
    /// Received queries that were not replied to or may be repeated, by peer and request id.
    pub(crate) received_queries: BTreeMap<(SocketAddr, u32), Key>,
    /// Ports in the ready queue.
    pub(crate) ready: VecDeque<Key>,
    /// The port that received most recently.
    pub(crate) hot: Option<Key>,
    /// Ids that have sent a query since the time was last known.
    pub(crate) fresh: Vec<Key>,
    pub(crate) received: Packets,
    pub(crate) sending: Packets,
}

impl Tables {
    /// Adds a port.
    pub(crate) fn add(&mut self, port: UdpPort) -> Key {
        if self.sending.is_without_room() {
            (self.sending, self.received) = (Packets::new(ROOM, HEADROOM), Packets::new(ROOM, HEADROOM));
        }
        self.ports.insert(port)
    }

    /// Returns the port of an address that is shared by ids without a port of their own.
    pub(crate) fn shared(&self, ip: IpAddr, common: Option<u16>) -> Option<Key> {
        self.find(|port| match &port.kind {
            PortKind::Address { services } => {
                port.address.ip() == ip && common.map_or(services.is_empty(), |common| port.address.port() == common)
            }
            PortKind::Group { .. } => false,
        })
    }

    /// Returns the port of a group at an address.
    pub(crate) fn group(&self, group: IpAddr, at: IpAddr) -> Option<Key> {
        let of = |port: &UdpPort| matches!(port.kind, PortKind::Group { member, .. } if member == at);
        self.find(|port| of(port) && port.address.ip() == group)
    }

    fn find(&self, is: impl Fn(&UdpPort) -> bool) -> Option<Key> {
        self.ports.keys().into_iter().find(|key| self.ports.get(*key).is_some_and(&is))
    }

    /// Puts a port into the ready queue, unless it is in the queue.
    pub(crate) fn enqueue(&mut self, key: Key) {
        if let Some(port) = self.ports.get_mut(key) {
            if !std::mem::replace(&mut port.queued, true) {
                self.ready.push_back(key);
            }
        }
    }
}
