//! The network paths between nodes, for tests that choose the faults of the network themselves.

use std::net::{IpAddr, SocketAddr};

use super::fabric::{Event, Fabric};

/// Returns the number of the node with this address, see [`super::tcp::address`].
fn node_of(address: SocketAddr) -> usize {
    match address.ip() {
        IpAddr::V4(ip) => usize::from(ip.octets()[3]).wrapping_sub(1),
        IpAddr::V6(_) => usize::MAX,
    }
}

impl Fabric {
    /// From now on, drops every packet that `from` sends to `to`. Neither node is notified. New connections between the two nodes cannot be
    /// established either.
    pub fn silence(&mut self, from: usize, to: usize) {
        self.silent.insert((from, to));
        for key in self.pipes.keys() {
            if let Some(pipe) = self.pipes.get_mut(key).filter(|pipe| pipe.nodes == (from, to)) {
                pipe.stalled = u64::MAX;
            }
        }
    }

    /// Restores all paths. Data that was in flight arrives.
    pub fn mend(&mut self) {
        self.silent.clear();
        for key in self.pipes.keys() {
            if let Some(pipe) = self.pipes.get_mut(key).filter(|pipe| pipe.stalled == u64::MAX) {
                pipe.stalled = 0;
                self.at(self.now, Event::Deliver(key));
            }
        }
    }

    /// Simulates that the process of a node is killed: closes the node's sockets, as the kernel does, and sends no goodbye.
    pub fn kill(&mut self, node: usize) {
        self.close_all(node);
    }

    /// Makes the connection-manager channel of a node readable. The caller must have made an event available at the provider.
    pub fn ring(&mut self, node: usize) {
        self.ports[node].channels[0].wake = true;
        self.raise(node, 0);
    }

    /// Returns true if packets from one node do not arrive at the other.
    pub(super) fn is_silent(&self, from: usize, to: usize) -> bool {
        self.silent.contains(&(from, to))
    }

    /// Returns true if packets between two addresses are dropped in one direction or both.
    pub(super) fn is_broken(&self, one: SocketAddr, other: SocketAddr) -> bool {
        let (one, other) = (node_of(one), node_of(other));
        self.is_silent(one, other) || self.is_silent(other, one)
    }
}

/// A device of node 0 that accepts a connection, and listens to its frames only some time later, like siw. Frames that arrive meanwhile
/// stay in the socket until another one arrives.
#[derive(Debug)]
pub struct LateDevice {
    /// The time from the reply to the connect request until the device listens, in ns.
    listens_after: u64,
    replied: Option<u64>,
    unnoticed: Vec<u8>,
}

impl LateDevice {
    /// Creates a device that listens `listens_after` ns after it has replied to the connect request.
    #[must_use]
    pub const fn new(listens_after: u64) -> Self {
        Self { listens_after, replied: None, unnoticed: Vec::new() }
    }

    /// Processes `octets`, which node `from` sends. Returns the bytes that now arrive at the other
    /// node.
    pub(super) fn pass(&mut self, from: usize, now: u64, octets: Vec<u8>) -> Vec<u8> {
        if from == 0 {
            self.replied.get_or_insert(now);
            return octets;
        }
        self.unnoticed.extend_from_slice(&octets);
        match self.replied {
            Some(at) if now < at + self.listens_after => Vec::new(),
            _ => std::mem::take(&mut self.unnoticed),
        }
    }
}
