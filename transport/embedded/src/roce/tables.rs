//! The tables that all connection-manager ids for datagrams of a provider share: UDP ports, queue pair numbers, addresses, queries.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::frame::{HEADROOM, ROOM};
use super::numbers::QueuePairNumbers;
use super::port::{PortKind, UdpPort};
use crate::packets::Packets;
use rdma_transport::slab::{Key, Slab};

/// The tables that all connection-manager ids for datagrams of a provider share.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) ports: Slab<UdpPort>, // local: endpoints of the program
    pub(crate) numbers: QueuePairNumbers,
    /// The addresses of peers and groups to which the program sends datagrams.
    pub(crate) addresses: Slab<SocketAddr>, // local: peers that the program has looked up
    /// The ids with a query that has no reply yet, by request id.
    pub(crate) queries: BTreeMap<u32, Key>, // local: lookups of the program
    /// The connection-manager ids that were created for received queries. An id is in this map
    /// while the program has not answered the query, or while the reply may have to be sent again.
    /// The map's key is the address of the peer and the request id that the peer has chosen.
    pub(crate) received_queries: BTreeMap<(SocketAddr, u32), Key>, // bound: queries
    /// The number of received queries that the program has not answered yet.
    pub(crate) unanswered: usize,
    /// The ready queue: the ports that may have packets to read.
    pub(crate) ready: VecDeque<Key>, // local: endpoints of the program
    /// The port that received packets most recently. A busy poll reads from this port first.
    pub(crate) hot: Option<Key>,
    /// Ids that have sent a query whose resend time is not set. The call that sent the query did not know the current time.
    pub(crate) fresh: Vec<Key>, // local: lookups of the program
    pub(crate) received: Packets,
    pub(crate) sending: Packets,
}

impl Tables {
    /// Adds a port and returns its key. When the first port is added, allocates the buffers for packets.
    pub(crate) fn add(&mut self, port: UdpPort) -> Key {
        if self.sending.is_without_room() {
            (self.sending, self.received) = (Packets::new(ROOM, HEADROOM), Packets::new(ROOM, HEADROOM));
        }
        self.ports.insert(port)
    }

    /// Returns the UDP port that the ids at a local address share, or `None` if it is not open. If
    /// `common` is given, the shared UDP port has this port number. Otherwise, it is the UDP port
    /// on which no id listens. Ignores the port number in `local`.
    pub(crate) fn shared(&self, local: SocketAddr, common: Option<u16>) -> Option<Key> {
        self.find(|port| match &port.kind {
            PortKind::Address { services } => {
                host(port.address) == host(local)
                    && common.map_or(services.is_empty(), |common| port.address.port() == common)
            }
            PortKind::Group { .. } => false,
        })
    }

    /// Returns the UDP port that receives for a multicast group on the interface with the address `at` and the index `interface`. Returns
    /// `None` if that port is not open.
    pub(crate) fn group(&self, group: IpAddr, at: IpAddr, interface: u32) -> Option<Key> {
        let of = |port: &UdpPort| matches!(port.kind, PortKind::Group { member, .. } if member == at);
        self.find(|port| of(port) && port.interface.index == interface && port.address.ip() == group)
    }

    fn find(&self, is: impl Fn(&UdpPort) -> bool) -> Option<Key> {
        self.ports.keys().into_iter().find(|key| self.ports.get(*key).is_some_and(&is))
    }

    /// Appends a port to the ready queue, unless the queue contains it.
    pub(crate) fn enqueue(&mut self, key: Key) {
        if let Some(port) = self.ports.get_mut(key) {
            if !std::mem::replace(&mut port.queued, true) {
                self.ready.push_back(key);
            }
        }
    }
}

/// Returns the IP address in a socket address, and its scope: the index of the network interface of
/// a link-local address, and 0 for other addresses.
fn host(address: SocketAddr) -> (IpAddr, u32) {
    match address {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => (address.ip(), v6.scope_id()),
        _ => (address.ip(), 0),
    }
}
