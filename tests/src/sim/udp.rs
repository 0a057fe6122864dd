//! Simulated UDP, as a program sees it. Packets are lost, duplicated, damaged, late and out of order. The network reports errors about
//! packets that no socket receives.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};

use rdma_transport::slab::Key;
use rdma_transport::sockets::Interface;
use rdma_transport_embedded::iwarp::net::{NetChannel, Ready};
use rdma_transport_embedded::packets::Packets;

use super::fabric::{Event, Fabric};
use super::tcp::{Kind, address, node_of};

/// If a socket has this number of unread packets, it drops further ones.
const UNREAD: usize = 48;
/// The largest number of network errors that a socket stores.
const REFUSALS: usize = 8;

/// The faults of UDP packets.
#[derive(Clone, Debug)]
pub struct UdpOptions {
    /// The probability, per thousand, that a packet is lost.
    pub lost: u32,
    /// The probability, per thousand, that a packet arrives twice.
    pub doubled: u32,
    /// The probability, per thousand, that a bit of a packet is inverted.
    pub damaged: u32,
    /// The probability, per thousand, that a socket is full for some time.
    pub full: u32,
    /// The probability, per thousand, that the network reports an error about a packet that no socket receives.
    pub told: u32,
    /// The shortest and the longest delay of a packet, in ns. Each packet has its own delay, so a packet may overtake an earlier one.
    pub latency: (u64, u64),
    /// The length of the longest IP packet on every interface, in bytes.
    pub mtu: u32,
}

/// The state of a UDP socket.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Udp {
    /// True if the socket has joined a multicast group.
    is_group: bool,
    unread: VecDeque<(SocketAddr, Vec<u8>)>,
    refusals: VecDeque<SocketAddr>,
    /// True if the socket is full.
    full: bool,
    /// True if the socket has space again and the program was not notified of that yet.
    room: bool,
}

/// Something in flight to a UDP socket.
#[derive(Debug)]
pub(super) enum Flying {
    Packet { from: SocketAddr, to: SocketAddr, octets: Vec<u8> },
    Refusal { from: SocketAddr, to: SocketAddr },
    Room(Key),
}

impl Udp {
    pub(super) fn mask(&self) -> Ready {
        let closed = !self.refusals.is_empty();
        Ready { readable: !self.unread.is_empty() || closed, writable: self.room, closed }
    }

    /// Records that the program was notified that the socket has space again.
    pub(super) fn polled(&mut self) {
        self.room = false;
    }
}

impl Fabric {
    fn udp(&mut self, key: Key) -> io::Result<&mut Udp> {
        match self.sockets.get_mut(key).map(|socket| &mut socket.kind) {
            Some(Kind::Udp(udp)) => Ok(udp),
            _ => Err(ErrorKind::NotConnected.into()),
        }
    }

    /// Returns the interface with the address `at`. Returns an error if `at` is not the address of the node.
    pub(super) fn interface(&self, node: usize, at: IpAddr) -> io::Result<Interface> {
        let mtu = self.udp.as_ref().map_or(0, |udp| udp.mtu);
        if at == address(node, 0).ip() {
            Ok(Interface { index: 1, mtu })
        } else {
            Err(ErrorKind::AddrNotAvailable.into())
        }
    }

    pub(super) fn open_udp(&mut self, node: usize, mut local: SocketAddr, is_group: bool) -> io::Result<Key> {
        self.tick();
        if !self.calm && self.rng.chance(self.net.exhausted) {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        if local.port() == 0 {
            local.set_port(self.any_port());
        }
        let taken = |(_, other): (Key, &super::tcp::Socket)| {
            other.node == node && other.local == local && matches!(&other.kind, Kind::Udp(_))
        };
        if self.sockets.iter().any(taken) {
            return Err(ErrorKind::AddrInUse.into());
        }
        let kind = Kind::Udp(Box::new(Udp { is_group, ..Udp::default() }));
        let key = self.insert_socket(node, kind, local, local, local);
        self.watch(key, NetChannel::Completion);
        Ok(key)
    }

    pub(super) fn send_packets(&mut self, key: Key, packets: &Packets, first: usize) -> io::Result<usize> {
        self.tick();
        let Some(options) = self.udp.clone() else { return Err(ErrorKind::Unsupported.into()) };
        let from = self.sockets.get(key).map(|socket| socket.local).ok_or(ErrorKind::NotConnected)?;
        if let Some(peer) = self.udp(key)?.refusals.front() {
            log::debug!("{from}: an error about an earlier packet to {peer}");
            return Err(ErrorKind::ConnectionRefused.into());
        }
        if self.udp(key)?.full || self.rng.chance(options.full) {
            if !std::mem::replace(&mut self.udp(key)?.full, true) {
                let after = self.latency();
                let room = self.flying.insert(Flying::Room(key));
                self.at(self.now + after, Event::Udp(room));
            }
            return Err(ErrorKind::WouldBlock.into());
        }
        let most = packets.len() - first;
        let count = if self.rng.chance(self.net.short_write) { 1 + self.rng.index(most) } else { most };
        for nth in first..first + count {
            let Some((octets, to)) = packets.read(nth) else { continue };
            let copies = u32::from(!self.rng.chance(options.lost)) + u32::from(self.rng.chance(options.doubled));
            for _ in 0..copies {
                let mut octets = octets.to_vec();
                if self.rng.chance(options.damaged) {
                    let at = self.rng.index(octets.len());
                    octets[at] ^= 1 << self.rng.below(8);
                }
                let after = self.rng.skewed(options.latency.0..=options.latency.1);
                let packet = self.flying.insert(Flying::Packet { from, to, octets });
                self.at(self.now + after, Event::Udp(packet));
            }
        }
        Ok(count)
    }

    pub(super) fn receive_packets(&mut self, key: Key, packets: &mut Packets) -> io::Result<(usize, bool)> {
        self.tick();
        packets.clear();
        let udp = self.udp(key)?;
        if !udp.refusals.is_empty() {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        while let Some((from, octets)) = (!packets.is_full()).then(|| udp.unread.pop_front()).flatten() {
            packets.arrive(from, &octets);
        }
        if packets.is_empty() { Err(ErrorKind::WouldBlock.into()) } else { Ok((packets.len(), udp.unread.is_empty())) }
    }

    pub(super) fn take_refusal(&mut self, key: Key) -> io::Result<(Option<SocketAddr>, io::Error)> {
        let peer = self.udp(key)?.refusals.pop_front().ok_or(ErrorKind::WouldBlock)?;
        Ok((Some(peer), ErrorKind::ConnectionRefused.into()))
    }

    /// Handles the arrival of something that was in flight.
    pub(super) fn lands(&mut self, flying: Key) {
        match self.flying.remove(flying) {
            Some(Flying::Packet { from, to, octets }) => self.packet_lands(from, to, &octets),
            Some(Flying::Refusal { from, to }) => {
                let sender = self.sockets.iter().find(|(_, socket)| socket.local == from);
                if let Some(key) = sender.map(|(key, _)| key) {
                    if let Ok(udp) = self.udp(key) {
                        udp.refusals.push_back(to);
                        udp.refusals.truncate(REFUSALS);
                        self.edge(key);
                    }
                }
            }
            Some(Flying::Room(key)) => {
                if let Ok(udp) = self.udp(key) {
                    (udp.full, udp.room) = (false, true);
                    self.edge(key);
                }
            }
            None => {}
        }
    }

    fn packet_lands(&mut self, from: SocketAddr, to: SocketAddr, octets: &[u8]) {
        let mut heard = false;
        for key in self.sockets.keys() {
            let Some(socket) = self.sockets.get(key) else { continue };
            let (node, is_group) = (socket.node, matches!(&socket.kind, Kind::Udp(udp) if udp.is_group));
            if socket.local != to || is_group != to.ip().is_multicast() || self.is_silent(node_of(from), node) {
                continue;
            }
            let Ok(udp) = self.udp(key) else { continue };
            heard = true;
            if udp.unread.len() < UNREAD {
                udp.unread.push_back((from, octets.to_vec()));
                self.edge(key);
            }
        }
        let Some(options) = self.udp.clone().filter(|_| !heard && !to.ip().is_multicast()) else { return };
        let (there, back) = (node_of(to), node_of(from));
        let reached = !self.is_silent(back, there) && !self.is_silent(there, back);
        if reached && self.rng.chance(options.told) {
            let refusal = self.flying.insert(Flying::Refusal { from, to });
            self.at(self.now + options.latency.0, Event::Udp(refusal));
        }
    }
}
