//! The paths between nodes, for tests that say themselves what breaks: which way, and until when.

use std::net::{IpAddr, SocketAddr};

use super::fabric::{Event, Fabric};

/// The node that has an address of [`super::tcp::address`].
fn node_of(address: SocketAddr) -> usize {
    match address.ip() {
        IpAddr::V4(ip) => usize::from(ip.octets()[3]).wrapping_sub(1),
        IpAddr::V6(_) => usize::MAX,
    }
}

impl Fabric {
    /// From now on nothing that `from` sends arrives at `to`, and nobody is told. Connections do not come up, either.
    pub fn silence(&mut self, from: usize, to: usize) {
        self.silent.insert((from, to));
        for key in self.pipes.keys() {
            if let Some(pipe) = self.pipes.get_mut(key).filter(|pipe| pipe.nodes == (from, to)) {
                pipe.stalled = u64::MAX;
            }
        }
    }

    /// All paths work again. What was on its way arrives.
    pub fn mend(&mut self) {
        self.silent.clear();
        for key in self.pipes.keys() {
            if let Some(pipe) = self.pipes.get_mut(key).filter(|pipe| pipe.stalled == u64::MAX) {
                pipe.stalled = 0;
                self.at(self.now, Event::Deliver(key));
            }
        }
    }

    /// The process of a node is killed: its sockets are closed, as a kernel does, and it says no goodbye.
    pub fn kill(&mut self, node: usize) {
        self.close_all(node);
    }

    /// There is something new on the connection-manager channel of a node, which its provider knows.
    pub fn ring(&mut self, node: usize) {
        self.ports[node].channels[0].wake = true;
        self.raise(node, 0);
    }

    /// Whether nothing gets from one node to the other.
    pub(super) fn is_silent(&self, from: usize, to: usize) -> bool {
        self.silent.contains(&(from, to))
    }

    /// Whether a path between two addresses is silent, one way or both.
    pub(super) fn is_broken(&self, one: SocketAddr, other: SocketAddr) -> bool {
        let (one, other) = (node_of(one), node_of(other));
        self.is_silent(one, other) || self.is_silent(other, one)
    }
}
