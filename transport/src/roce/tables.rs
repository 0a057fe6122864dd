//! What the datagram ids of a provider share: ports, numbers of queue pairs, addresses, questions.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::frame::{HEADROOM, ROOM};
use super::numbers::Numbers;
use super::port::{Kind, Port};
use crate::mem::Packets;
use crate::slab::{Key, Slab};

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) ports: Slab<Port>,
    pub(crate) numbers: Numbers,
    /// The addresses that datagrams are sent to.
    pub(crate) addresses: Slab<SocketAddr>,
    /// Questions that wait for an answer, by number.
    pub(crate) questions: BTreeMap<u32, Key>,
    /// Questions that have come, and were not answered or may be asked again: by who asks, and number.
    pub(crate) asked: BTreeMap<(SocketAddr, u32), Key>,
    /// Ports that are to be read from.
    pub(crate) ready: VecDeque<Key>,
    /// The port that something came to last.
    pub(crate) hot: Option<Key>,
    /// Ids that have asked since the time was last known.
    pub(crate) fresh: Vec<Key>,
    pub(crate) received: Packets,
    pub(crate) sending: Packets,
}

impl Tables {
    /// Adds a port.
    pub(crate) fn add(&mut self, port: Port) -> Key {
        if self.sending.is_without_room() {
            (self.sending, self.received) = (Packets::new(ROOM, HEADROOM), Packets::new(ROOM, HEADROOM));
        }
        self.ports.insert(port)
    }

    /// The port of an address that ids without a port of their own share.
    pub(crate) fn shared(&self, ip: IpAddr, common: Option<u16>) -> Option<Key> {
        self.find(|port| match &port.kind {
            Kind::Address { services } => {
                port.address.ip() == ip && common.map_or(services.is_empty(), |common| port.address.port() == common)
            }
            Kind::Group { .. } => false,
        })
    }

    /// The port of a group at an address.
    pub(crate) fn group(&self, group: IpAddr, at: IpAddr) -> Option<Key> {
        let of = |port: &Port| matches!(port.kind, Kind::Group { member, .. } if member == at);
        self.find(|port| of(port) && port.address.ip() == group)
    }

    fn find(&self, is: impl Fn(&Port) -> bool) -> Option<Key> {
        self.ports.keys().into_iter().find(|key| self.ports.get(*key).is_some_and(&is))
    }

    /// Has a port read from, if it is not going to be.
    pub(crate) fn enqueue(&mut self, key: Key) {
        if let Some(port) = self.ports.get_mut(key) {
            if !std::mem::replace(&mut port.queued, true) {
                self.ready.push_back(key);
            }
        }
    }
}
