//! The paths between nodes, for tests that choose the faults themselves: the direction, and the time.

use std::net::{IpAddr, SocketAddr};

use super::fabric::{Event, Fabric};

/// Returns the node that has an address of [`super::tcp::address`].
fn node_of(address: SocketAddr) -> usize {
    match address.ip() {
        IpAddr::V4(ip) => usize::from(ip.octets()[3]).wrapping_sub(1),
        IpAddr::V6(_) => usize::MAX,
    }
}

impl Fabric {
    /// Drops everything that `from` sends to `to` from now on, without notifying anyone. Connections cannot be
    /// established, either.
    pub fn silence(&mut self, from: usize, to: usize) {
        self.silent.insert((from, to));
        for key in self.pipes.keys() {
            if let Some(pipe) = self.pipes.get_mut(key).filter(|pipe| pipe.nodes == (from, to)) {
                pipe.stalled = u64::MAX;
            }
        }
    }

    /// Restores all paths. Data in flight arrives.
    pub fn mend(&mut self) {
        self.silent.clear();
        for key in self.pipes.keys() {
            if let Some(pipe) = self.pipes.get_mut(key).filter(|pipe| pipe.stalled == u64::MAX) {
                pipe.stalled = 0;
                self.at(self.now, Event::Deliver(key));
            }
        }
    }

    /// Kills the process of a node: its sockets are closed, as a kernel closes them, and it sends no goodbye.
    pub fn kill(&mut self, node: usize) {
        self.close_all(node);
    }

    /// Raises the readiness of a node's connection-manager channel, with an event that its provider has.
    pub fn ring(&mut self, node: usize) {
        self.ports[node].channels[0].wake = true;
        self.raise(node, 0);
    }

    /// Returns true if nothing passes from one node to the other.
    pub(super) fn is_silent(&self, from: usize, to: usize) -> bool {
        self.silent.contains(&(from, to))
    }

    /// Returns true if a path between two addresses is silent, in one direction or in both.
    pub(super) fn is_broken(&self, one: SocketAddr, other: SocketAddr) -> bool {
        let (one, other) = (node_of(one), node_of(other));
        self.is_silent(one, other) || self.is_silent(other, one)
    }
}
