//! Simulated TCP, as a program sees it: streams with limited buffers. Segments arrive in order, each after its own delay.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};

use rdma_transport::mem::{RecvSlice, SendSlice};
use rdma_transport::slab::Key;
use rdma_transport_embedded::iwarp::net::{NetChannel, Ready};

use super::fabric::{Event, Fabric, disturbed, index};
use super::local::Local;
use super::swarm::{Fault, MS};
use super::udp::Udp;

/// The largest number of pieces in which a single write arrives.
const PIECES: usize = 48;

/// The kind of a socket.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Listening {
        queue: VecDeque<Key>,
        backlog: usize,
    },
    Connecting,
    Connected,
    /// A Unix socket for packets within a host.
    Local(Box<Local>),
    /// A socket for UDP packets.
    Udp(Box<Udp>),
}

/// One end of a TCP connection, a TCP listener, or a socket of another kind.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) node: usize,
    /// The channel that reports the socket's readiness; `None` until the program has accepted the connection.
    pub(super) channel: Option<NetChannel>,
    pub(super) kind: Kind,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    /// The address of the initiator. It identifies the connection.
    pub(super) link: SocketAddr,
    tx: Option<Key>,
    /// The socket at the other end of the connection.
    twin: Option<Key>,
    rx: VecDeque<u8>,
    eof: bool,
    /// True if the node has read the end of the stream. A socket that has bytes to send then stays
    /// open.
    eof_read: bool,
    error: Option<ErrorKind>,
    /// True if a send accepted too few bytes, so that the program must be notified when there is space.
    nospace: bool,
    pub(super) shut: bool,
}

/// One direction of a connection.
#[derive(Debug)]
pub(super) struct Pipe {
    src: Key,
    dst: Key,
    /// The node that sends, and the node that receives.
    pub(super) nodes: (usize, usize),
    segments: VecDeque<(u64, Segment)>,
    undelivered: usize,
    last: u64,
    /// The time before which nothing arrives.
    pub(super) stalled: u64,
    /// True if the connection was cut: bytes that are sent from now on are lost, and the sender gets a reset.
    cut: bool,
}

#[derive(Debug)]
enum Segment {
    Data(Vec<u8>),
    Fin,
    Rst,
}

fn gone() -> io::Error {
    ErrorKind::NotConnected.into()
}

/// Returns the address of a node with this port.
#[must_use]
pub fn address(node: usize, port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(10, 0, 0, node as u8 + 1), port))
}

/// Returns the number of the node with this address.
pub(super) fn node_of(address: SocketAddr) -> usize {
    match address {
        SocketAddr::V4(v4) => usize::from(v4.ip().octets()[3]).saturating_sub(1),
        SocketAddr::V6(_) => 0,
    }
}

impl Fabric {
    pub(super) fn insert_socket(
        &mut self,
        node: usize,
        kind: Kind,
        local: SocketAddr,
        peer: SocketAddr,
        link: SocketAddr,
    ) -> Key {
        self.sockets.insert(Socket {
            node,
            channel: None,
            kind,
            local,
            peer,
            link,
            tx: None,
            twin: None,
            rx: VecDeque::new(),
            eof: false,
            eof_read: false,
            error: None,
            nospace: false,
            shut: false,
        })
    }

    /// Returns the readiness of a socket, or `None` if it does not exist.
    pub(super) fn mask(&self, key: Key) -> Option<Ready> {
        let s = self.sockets.get(key)?;
        let failed = s.error.is_some();
        Some(match &s.kind {
            Kind::Listening { queue, .. } => Ready { readable: !queue.is_empty(), ..Ready::default() },
            Kind::Local(local) => Ready { readable: local.is_readable(), writable: false, closed: local.eof },
            Kind::Udp(udp) => udp.mask(),
            Kind::Connecting => Ready { readable: failed, writable: failed, closed: failed },
            Kind::Connected => {
                let closed = s.eof || failed;
                let room = s.tx.is_none() || self.free(key) >= (self.net.buffer / 3).max(1);
                Ready { readable: !s.rx.is_empty() || closed, writable: room || closed, closed }
            }
        })
    }

    /// Returns the number of bytes that a send would accept.
    fn free(&self, key: Key) -> usize {
        let Some(s) = self.sockets.get(key) else { return 0 };
        let unread = s.twin.and_then(|twin| self.sockets.get(twin)).map_or(0, |twin| twin.rx.len());
        let flying = s.tx.and_then(|pipe| self.pipes.get(pipe)).map_or(0, |pipe| pipe.undelivered);
        self.net.buffer.saturating_sub(unread + flying)
    }

    /// Records new readiness of a socket. The channel of the socket reports it as an edge.
    pub(super) fn edge(&mut self, key: Key) {
        let Some(s) = self.sockets.get(key) else { return };
        let (node, Some(channel)) = (s.node, s.channel) else { return };
        let ready = &mut self.ports[node].channels[index(channel)].ready;
        if !ready.contains(&key) {
            ready.push_back(key);
        }
        self.raise(node, index(channel));
    }

    /// Assigns a socket to a channel. If the socket is ready at this time, the channel reports an edge.
    pub(super) fn watch(&mut self, key: Key, channel: NetChannel) {
        let Some(s) = self.sockets.get_mut(key) else { return };
        let node = s.node;
        if let Some(old) = s.channel.replace(channel) {
            self.ports[node].channels[index(old)].ready.retain(|&other| other != key);
        }
        if self.mask(key).is_some_and(|ready| ready != Ready::default()) {
            self.edge(key);
        }
    }

    // The calls of programs on TCP sockets.

    pub(super) fn poll_channel(&mut self, node: usize, channel: NetChannel, out: &mut Vec<(Key, Ready)>) -> bool {
        self.tick();
        let i = index(channel);
        self.ports[node].channels[i].wake = false;
        let waiting = self.ports[node].channels[i].ready.len();
        let take =
            if waiting > 1 && self.rng.chance(self.net.poll_cut) { self.rng.index(waiting).max(1) } else { waiting };
        for _ in 0..take {
            let Some(key) = self.ports[node].channels[i].ready.pop_front() else { break };
            let Some(ready) = self.mask(key) else { continue };
            if !ready.writable {
                self.wants_room(key);
            }
            if ready != Ready::default() {
                out.push((key, ready));
            }
            if let Some(Kind::Udp(udp)) = self.sockets.get_mut(key).map(|socket| &mut socket.kind) {
                udp.polled();
            }
        }
        if self.rng.chance(self.net.spurious) {
            let mine: Vec<Key> = self
                .sockets
                .iter()
                .filter(|(_, s)| s.node == node && s.channel == Some(channel))
                .map(|(key, _)| key)
                .collect();
            if !mine.is_empty() {
                let key = mine[self.rng.index(mine.len())];
                out.push((key, Ready { readable: true, writable: true, closed: false }));
            }
        }
        take < waiting
    }

    pub(super) fn listen(&mut self, node: usize, mut local: SocketAddr, backlog: u32) -> io::Result<Key> {
        if local.port() == 0 {
            local.set_port(self.any_port());
        }
        if self.sockets.iter().any(|(_, s)| s.local == local && matches!(s.kind, Kind::Listening { .. })) {
            return Err(ErrorKind::AddrInUse.into());
        }
        let kind = Kind::Listening { queue: VecDeque::new(), backlog: backlog as usize };
        let key = self.insert_socket(node, kind, local, local, local);
        self.watch(key, NetChannel::Cm);
        Ok(key)
    }

    pub(super) fn accept(&mut self, listener: Key) -> io::Result<(Key, SocketAddr)> {
        self.tick();
        let exhausted = !self.calm && self.rng.chance(self.net.exhausted / 2);
        let s = self.sockets.get_mut(listener).ok_or_else(gone)?;
        let Kind::Listening { queue, .. } = &mut s.kind else { return Err(ErrorKind::InvalidInput.into()) };
        if queue.is_empty() {
            return Err(ErrorKind::WouldBlock.into());
        }
        if exhausted {
            return Err(io::Error::other("no descriptors left"));
        }
        let key = queue.pop_front().ok_or_else(gone)?;
        self.watch(key, NetChannel::Cm);
        let peer = self.sockets.get(key).ok_or_else(gone)?.peer;
        Ok((key, peer))
    }

    pub(super) fn connect(&mut self, node: usize, peer: SocketAddr) -> io::Result<Key> {
        self.tick();
        if !self.calm && self.rng.chance(self.net.exhausted) {
            return Err(ErrorKind::AddrNotAvailable.into());
        }
        let local = address(node, self.any_port());
        let key = self.insert_socket(node, Kind::Connecting, local, peer, local);
        self.dialled.push((local, [node, node_of(peer)], self.now));
        let latency = self.latency();
        if !self.calm && self.rng.chance(self.net.lost_connect) {
            // The first packet of the connect is lost. In half of the cases it is sent again after a second, in the other half never.
            if self.rng.chance(500) {
                self.at(self.now + 1000 * MS + latency, Event::Syn(key));
            }
        } else {
            self.at(self.now + latency, Event::Syn(key));
        }
        self.watch(key, NetChannel::Cm);
        self.note(node, format_args!("{local} connects to {peer}"));
        Ok(key)
    }

    pub(super) fn connected(&mut self, key: Key) -> io::Result<()> {
        let s = self.sockets.get_mut(key).ok_or_else(gone)?;
        match (s.error.take(), &s.kind) {
            (Some(kind), _) => Err(kind.into()),
            (None, Kind::Connected) => Ok(()),
            (None, _) => Err(ErrorKind::WouldBlock.into()),
        }
    }

    pub(super) fn promote(&mut self, key: Key) -> io::Result<()> {
        self.tick();
        self.sockets.get(key).ok_or_else(gone)?;
        self.watch(key, NetChannel::Completion);
        Ok(())
    }

    pub(super) fn all_acknowledged(&self, key: Key) -> bool {
        let pipe = self.sockets.get(key).and_then(|s| s.tx).and_then(|pipe| self.pipes.get(pipe));
        // If the opposite direction is silent, acknowledgements do not arrive.
        pipe.is_none_or(|pipe| pipe.undelivered == 0 && !self.is_silent(pipe.nodes.1, pipe.nodes.0))
    }

    pub(super) fn recv(&mut self, key: Key, bufs: &mut [RecvSlice<'_>]) -> io::Result<usize> {
        self.tick();
        if self.rng.chance(self.net.interrupted) {
            return Err(ErrorKind::Interrupted.into());
        }
        let s = self.sockets.get_mut(key).ok_or_else(gone)?;
        let mut count = 0;
        for buf in bufs.iter_mut() {
            let n = buf.fill(s.rx.make_contiguous());
            s.rx.drain(..n);
            count += n;
        }
        if count > 0 {
            let (node, twin) = (s.node, s.twin);
            self.work(node, count);
            if let Some(twin) = twin {
                let after = self.latency();
                self.at(self.now + after, Event::Room(twin));
            }
            return Ok(count);
        }
        match (s.error.take(), s.eof) {
            (Some(kind), _) => Err(kind.into()),
            (None, true) => {
                s.eof_read = true;
                Ok(0)
            }
            (None, false) => Err(ErrorKind::WouldBlock.into()),
        }
    }

    pub(super) fn send(&mut self, key: Key, bufs: &[SendSlice<'_>]) -> io::Result<usize> {
        self.tick();
        if self.rng.chance(self.net.interrupted) {
            return Err(ErrorKind::Interrupted.into());
        }
        let free = self.free(key);
        let s = self.sockets.get_mut(key).ok_or_else(gone)?;
        if let Some(kind) = s.error.take() {
            return Err(kind.into());
        }
        let (false, Some(pipe)) = (s.shut, s.tx) else { return Err(ErrorKind::BrokenPipe.into()) };
        let node = s.node;
        let total: usize = bufs.iter().map(|buf| buf.len()).sum();
        let mut n = total.min(free);
        if self.rng.chance(self.net.short_write) {
            n = self.rng.index(n + 1);
        }
        if n < total {
            s.nospace = true;
            if n < free {
                // The send accepted fewer bytes than there is space for. So the space that still exists must be reported soon.
                let after = self.latency();
                self.at(self.now + after, Event::Room(key));
            }
        }
        if n == 0 && total > 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        let mut bytes = Vec::with_capacity(n);
        for buf in bufs {
            let left = n - bytes.len();
            buf.append_to(&mut bytes, left);
        }
        if let Some(middleman) = &mut self.middleman {
            bytes = middleman.pass(node, &bytes);
        }
        if let Some(device) = &mut self.late_device {
            bytes = device.pass(node, self.now, bytes);
        }
        self.transmit(pipe, bytes);
        self.work(node, n);
        Ok(n)
    }

    pub(super) fn shutdown(&mut self, key: Key) {
        let Some(s) = self.sockets.get_mut(key) else { return };
        if !std::mem::replace(&mut s.shut, true) {
            if matches!(s.kind, Kind::Local(_)) {
                return self.shutdown_local(key);
            }
            if let Some(pipe) = s.tx.filter(|_| !self.middleman.as_ref().is_some_and(|middleman| middleman.silent)) {
                self.push(pipe, Segment::Fin);
            }
        }
    }

    pub(super) fn close(&mut self, key: Key, reset: bool) {
        self.tick();
        let Some(s) = self.sockets.remove(key) else { return };
        if let Some(channel) = s.channel {
            self.ports[s.node].channels[index(channel)].ready.retain(|&other| other != key);
        }
        self.note(
            s.node,
            format_args!("{} -> {} is closed{}", s.local, s.peer, if reset { " by a reset" } else { "" }),
        );
        match s.kind {
            Kind::Listening { queue, .. } => {
                for passive in queue {
                    self.close(passive, true);
                }
                return;
            }
            Kind::Local(local) => return self.close_local(*local),
            Kind::Udp(_) => return,
            Kind::Connecting | Kind::Connected => {}
        }
        let Some(pipe) = s.tx else { return };
        if reset || !s.rx.is_empty() {
            self.truncate(pipe);
            self.push(pipe, Segment::Rst);
        } else if !s.shut {
            self.push(pipe, Segment::Fin);
        }
    }

    /// Records that a program must be notified when there is space to send.
    pub(super) fn wants_room(&mut self, key: Key) {
        if let Some(s) = self.sockets.get_mut(key) {
            s.nospace = true;
        }
    }

    /// Returns the address of a peer whose connection with this node has something to read: bytes, the end of the stream, or an error.
    /// Returns `None` if no established connection of this node has something to read.
    pub(super) fn unread(&self, node: usize) -> Option<SocketAddr> {
        let mut established =
            self.sockets.iter().filter(|(_, s)| s.node == node && s.channel == Some(NetChannel::Completion));
        let left = established.find(|(_, s)| {
            let packets = matches!(&s.kind, Kind::Local(local) if local.is_readable());
            !s.rx.is_empty() || s.eof && !s.eof_read || s.error.is_some() || packets
        });
        left.map(|(_, s)| s.peer)
    }

    /// Closes the sockets that the program of a node has left open.
    pub(super) fn close_all(&mut self, node: usize) {
        for key in self.sockets.keys() {
            if self.sockets.get(key).is_some_and(|s| s.node == node) {
                self.close(key, false);
            }
        }
    }

    // The actions of the simulated network.

    fn transmit(&mut self, key: Key, bytes: Vec<u8>) {
        let Some(pipe) = self.pipes.get(key) else { return };
        if pipe.cut {
            let (src, after) = (pipe.src, self.latency());
            self.at(self.now + after, Event::Reset(src));
            return;
        }
        let shred = self.rng.chance(self.net.shred);
        let mut rest = bytes.as_slice();
        let mut pieces = 0;
        while !rest.is_empty() {
            let most = if shred && pieces < PIECES { 1 + self.rng.index(24) } else { self.net.segment };
            pieces += 1;
            let most = if pieces > 2 * PIECES { rest.len() } else { most };
            let (piece, after) = rest.split_at(most.min(rest.len()));
            self.push(key, Segment::Data(piece.to_vec()));
            rest = after;
        }
    }

    fn push(&mut self, key: Key, segment: Segment) {
        let latency = if self.rng.chance(300) { self.latency() } else { self.net.latency.0 };
        let Some(pipe) = self.pipes.get_mut(key) else { return };
        let stalled = if pipe.stalled == u64::MAX { 0 } else { pipe.stalled };
        let at = (self.now + latency).max(pipe.last).max(stalled);
        pipe.last = at;
        if let Segment::Data(bytes) = &segment {
            pipe.undelivered += bytes.len();
        }
        pipe.segments.push_back((at, segment));
        self.at(at, Event::Deliver(key));
    }

    /// Drops some of the segments in flight in a pipe: a random number of the last ones.
    fn truncate(&mut self, key: Key) {
        let Some(pipe) = self.pipes.get_mut(key) else { return };
        let keep = self.rng.index(pipe.segments.len() + 1);
        pipe.segments.truncate(keep);
        pipe.undelivered = pipe.segments.iter().map(|(_, s)| if let Segment::Data(b) = s { b.len() } else { 0 }).sum();
    }

    pub(super) fn deliver(&mut self, key: Key) {
        let now = self.now;
        // If the opposite direction is silent, acknowledgements do not arrive, so the sender cannot free its buffer.
        let unheard = self.pipes.get(key).is_some_and(|pipe| self.is_silent(pipe.nodes.1, pipe.nodes.0));
        while let Some(pipe) = self.pipes.get_mut(key) {
            if pipe.stalled > now {
                let stalled = pipe.stalled;
                if stalled != u64::MAX {
                    self.at(stalled, Event::Deliver(key));
                }
                return;
            }
            if pipe.segments.front().is_none_or(|(at, _)| *at > now) {
                return;
            }
            let Some((_, segment)) = pipe.segments.pop_front() else { return };
            let (src, dst) = (pipe.src, pipe.dst);
            match segment {
                Segment::Data(bytes) => {
                    pipe.undelivered -= bytes.len();
                    match self.sockets.get_mut(dst) {
                        Some(s) if s.error.is_none() => s.rx.extend(bytes),
                        Some(_) => {}
                        None if unheard => {}
                        None => {
                            self.pipes.remove(key);
                            self.fail_socket(src, ErrorKind::ConnectionReset);
                            return;
                        }
                    }
                }
                Segment::Fin => {
                    if let Some(s) = self.sockets.get_mut(dst) {
                        s.eof = true;
                    }
                }
                Segment::Rst => {
                    self.pipes.remove(key);
                    self.fail_socket(dst, ErrorKind::ConnectionReset);
                    return;
                }
            }
            self.edge(dst);
        }
    }

    /// Makes a socket fail with this error, because the connection of the socket does not exist any more.
    pub(super) fn fail_socket(&mut self, key: Key, kind: ErrorKind) {
        let Some(s) = self.sockets.get_mut(key) else { return };
        s.error = Some(kind);
        s.eof = true;
        let (node, local, peer) = (s.node, s.local, s.peer);
        if let Some(pipe) = s.tx.take() {
            self.pipes.remove(pipe);
        }
        self.note(node, format_args!("{local} -> {peer}: {kind}"));
        self.edge(key);
    }

    pub(super) fn room(&mut self, key: Key) {
        let enough = self.free(key) >= (self.net.buffer / 3).max(1);
        if let Some(s) = self.sockets.get_mut(key).filter(|s| s.nospace && enough) {
            s.nospace = false;
            self.edge(key);
        }
    }

    pub(super) fn syn(&mut self, active: Key) {
        let Some(s) = self.sockets.get(active) else { return };
        let (local, peer, from) = (s.local, s.peer, s.node);
        if self.is_broken(local, peer) {
            return;
        }
        let listener = self.sockets.iter().find_map(|(key, s)| match &s.kind {
            Kind::Listening { queue, backlog } if s.local == peer && queue.len() < *backlog => Some((key, s.node)),
            _ => None,
        });
        let after = self.latency();
        let Some((listener, node)) = listener else {
            self.at(self.now + after, Event::Refused(active));
            return;
        };
        let passive = self.insert_socket(node, Kind::Connected, peer, local, local);
        let pipe = |src, dst, nodes| {
            let segments = VecDeque::new();
            Pipe { src, dst, nodes, segments, undelivered: 0, last: 0, stalled: 0, cut: false }
        };
        let there = self.pipes.insert(pipe(active, passive, (from, node)));
        let back = self.pipes.insert(pipe(passive, active, (node, from)));
        for (key, twin, tx) in [(active, passive, there), (passive, active, back)] {
            if let Some(s) = self.sockets.get_mut(key) {
                s.twin = Some(twin);
                s.tx = Some(tx);
            }
        }
        self.at(self.now + after, Event::Connected(active, passive));
        self.at(self.now + 2 * after + 1, Event::Arrived(passive, listener));
    }

    pub(super) fn connected_now(&mut self, active: Key, passive: Key) {
        if self.sockets.get(active).is_some_and(|s| self.is_broken(s.local, s.peer)) {
            return;
        }
        match self.sockets.get_mut(active) {
            Some(s) => {
                s.kind = Kind::Connected;
                self.edge(active);
            }
            None => self.fail_socket(passive, ErrorKind::ConnectionReset),
        }
    }

    pub(super) fn arrived(&mut self, passive: Key, listener: Key) {
        match self.sockets.get_mut(listener).map(|s| &mut s.kind) {
            Some(Kind::Listening { queue, .. }) => {
                queue.push_back(passive);
                self.edge(listener);
            }
            _ => self.close(passive, true),
        }
    }

    // The faults of TCP connections.

    /// Injects a fault into a random connection.
    pub(super) fn break_link(&mut self, fault: Fault, time: u64) {
        let mut candidates = Vec::new();
        for (key, s) in self.sockets.iter() {
            if s.kind == Kind::Connected && s.link == s.local && s.tx.is_some() {
                candidates.push(key);
            }
        }
        if candidates.is_empty() {
            return;
        }
        let active = candidates[self.fault_rng.index(candidates.len())];
        let Some(s) = self.sockets.get(active) else { return };
        let (link, there) = (s.link, s.tx);
        let back = s.twin.and_then(|twin| self.sockets.get(twin)).and_then(|twin| twin.tx);
        self.trace.line(self.now, "FAULT", format_args!("{fault:?} of {link} ({:.3} ms)", time as f64 / 1e6));
        match fault {
            Fault::End | Fault::Reset => {
                self.disturb(link, disturbed::CUT);
                for pipe in [there, back].into_iter().flatten() {
                    self.truncate(pipe);
                    self.push(pipe, if fault == Fault::End { Segment::Fin } else { Segment::Rst });
                    if let Some(pipe) = self.pipes.get_mut(pipe) {
                        pipe.cut = true;
                    }
                }
            }
            Fault::Blackhole | Fault::HalfBlackhole | Fault::Stall | Fault::Pause => {
                let until = if fault == Fault::Stall { self.now + time } else { u64::MAX };
                if time > 10 * MS || fault != Fault::Stall {
                    self.disturb(link, disturbed::STALL);
                }
                let back = back.filter(|_| fault != Fault::HalfBlackhole);
                for pipe in [there, back].into_iter().flatten() {
                    if let Some(pipe) = self.pipes.get_mut(pipe) {
                        pipe.stalled = pipe.stalled.max(until);
                    }
                }
            }
        }
    }

    /// Restores the links on which nothing arrives. In some cases ends the connection instead, as TCP does after a timeout.
    pub(super) fn heal_links(&mut self) {
        for key in self.pipes.keys() {
            let give_up = self.fault_rng.chance(300);
            let Some(pipe) = self.pipes.get_mut(key).filter(|pipe| pipe.stalled > 0) else { continue };
            let forever = pipe.stalled == u64::MAX;
            pipe.stalled = 0;
            let (src, dst) = (pipe.src, pipe.dst);
            self.at(self.now, Event::Deliver(key));
            if forever && give_up {
                self.fail_socket(src, ErrorKind::TimedOut);
                self.fail_socket(dst, ErrorKind::TimedOut);
            }
        }
    }
}
