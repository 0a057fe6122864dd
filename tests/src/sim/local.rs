//! The simulation of communication within a host: Unix sockets for packets with descriptors, and memory that two nodes map.
//!
//! A store of a node to such memory becomes visible to other nodes after a delay, as with the store buffer of a processor. The stores
//! become visible in order. Each one becomes visible after its own delay, or all of them at a fence or an atomic exchange. The node itself
//! sees its stores immediately. So one node can read the memory between any two stores of the other node's turn.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rdma_transport::mem::{Memory, Span};
use rdma_transport::slab::Key;
use rdma_transport_embedded::iwarp::net::NetChannel;
use rdma_transport_embedded::shm::segment::{CALL, HALF, HEAD, TAIL};
use rdma_transport_embedded::shm::{Segment, SegmentPayload, Words};

use super::fabric::{Event, Fabric, Shared, lock};
use super::tcp::{Kind, address};

/// The number of packets that a socket can hold.
const MOST_PACKETS: usize = 12;
/// The longest delay of a packet, or of a store until it is visible, in ns.
const PACKET: u64 = 40_000;
const STORE: u64 = 20_000;

/// A packet: its bytes, and its descriptor if it has one.
type Packet = (Vec<u8>, Option<OwnedFd>);

/// One end of a Unix socket for packets.
#[derive(Debug, Default)]
pub(super) struct Local {
    arrived: VecDeque<Packet>,
    /// The packets in flight to this end, with their arrival times. `None` instead of a packet means that the peer has closed the socket.
    coming: VecDeque<(u64, Option<Packet>)>,
    pub(super) eof: bool,
    peer: Option<Key>,
    /// If the socket is a listener: its name, and the connections that are not accepted yet.
    pub(super) listens: Option<(Vec<u8>, VecDeque<Key>)>,
}

impl PartialEq for Local {
    fn eq(&self, _: &Self) -> bool {
        false
    }
}

impl Eq for Local {}

impl Local {
    pub(super) fn is_readable(&self) -> bool {
        !self.arrived.is_empty() || self.eof || self.listens.as_ref().is_some_and(|(_, queue)| !queue.is_empty())
    }
}

/// One node's view of a segment of shared memory.
#[derive(Debug)]
pub(super) struct View {
    memory: Arc<Memory>,
    /// The stores of this node that other nodes cannot see yet: the time at which each becomes visible, its offset, and its bytes.
    stores: VecDeque<(u64, usize, Vec<u8>)>,
    last: u64,
    /// The socket over which the peer wakes this node; `None` until [`bind`] assigns it.
    socket: Option<Key>,
    node: usize,
    active: bool,
}

fn gone() -> io::Error {
    ErrorKind::NotConnected.into()
}

impl Fabric {
    fn local(&mut self, key: Key) -> io::Result<&mut Local> {
        match self.sockets.get_mut(key).map(|socket| &mut socket.kind) {
            Some(Kind::Local(local)) => Ok(local),
            _ => Err(gone()),
        }
    }

    fn insert_local(&mut self, node: usize, local: Local) -> Key {
        let here = address(node, 0);
        self.insert_socket(node, Kind::Local(Box::new(local)), here, here, here)
    }

    pub(super) fn listen_local(&mut self, node: usize, name: &[u8]) -> io::Result<Key> {
        if self.rng.chance(self.net.exhausted) {
            return Err(io::Error::other("no descriptors left"));
        }
        let local = Local { listens: Some((name.to_vec(), VecDeque::new())), ..Local::default() };
        let key = self.insert_local(node, local);
        self.watch(key, NetChannel::Cm);
        Ok(key)
    }

    pub(super) fn connect_local(&mut self, node: usize, name: &[u8]) -> io::Result<Key> {
        self.tick();
        let listener = self.sockets.iter().find_map(|(key, socket)| match &socket.kind {
            Kind::Local(local) if local.listens.as_ref().is_some_and(|(of, _)| of == name) => Some((key, socket.node)),
            _ => None,
        });
        let (listener, there) = listener.ok_or(ErrorKind::ConnectionRefused)?;
        if self.rng.chance(self.net.exhausted / 2) {
            return Err(ErrorKind::WouldBlock.into());
        }
        // The connecting side detects different users only in half of the cases: in a user
        // namespace, only the accepting side can detect them.
        if self.are_strangers([node, there]) && self.rng.chance(500) {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let far = self.insert_local(there, Local::default());
        let near = self.insert_local(node, Local { peer: Some(far), ..Local::default() });
        self.local(far)?.peer = Some(near);
        if let Some((_, queue)) = &mut self.local(listener)?.listens {
            queue.push_back(far);
        }
        self.edge(listener);
        self.watch(near, NetChannel::Cm);
        Ok(near)
    }

    pub(super) fn accept_local(&mut self, listener: Key) -> io::Result<Key> {
        self.tick();
        let refuses = self.rng.chance(self.net.exhausted / 4);
        if self.rng.chance(self.net.exhausted / 4) {
            // The accept fails, and the connection stays in the queue of the listener.
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        let queue = self.local(listener)?.listens.as_mut().map(|(_, queue)| queue);
        let key = queue.and_then(VecDeque::pop_front).ok_or(ErrorKind::WouldBlock)?;
        let peer = self.local(key)?.peer.and_then(|peer| Some(self.sockets.get(peer)?.node));
        let of = self.sockets.get(key).map(|socket| socket.node);
        let is_stranger = peer.zip(of).is_some_and(|(peer, of)| self.are_strangers([peer, of]));
        if refuses || is_stranger {
            self.close(key, false);
            return Err(ErrorKind::PermissionDenied.into());
        }
        self.watch(key, NetChannel::Cm);
        Ok(key)
    }

    pub(super) fn pass(&mut self, key: Key, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        self.tick();
        let peer = self.local(key)?.peer.ok_or(ErrorKind::BrokenPipe)?;
        let file = file.map(|file| file.try_clone_to_owned()).transpose()?;
        let at = self.seen_from(key);
        let there = self.local(peer).map_err(|_| ErrorKind::BrokenPipe)?;
        if there.arrived.len() + there.coming.len() >= MOST_PACKETS {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.send_local(peer, at, Some((packet.to_vec(), file)));
        Ok(())
    }

    fn send_local(&mut self, to: Key, at: u64, what: Option<Packet>) {
        let Ok(local) = self.local(to) else { return };
        let at = at.max(local.coming.back().map_or(0, |last| last.0));
        local.coming.push_back((at, what));
        self.at(at, Event::Packet(to));
    }

    /// Delivers the packets that are due, and the end of the socket if it is due.
    pub(super) fn packet_arrives(&mut self, key: Key) {
        let now = self.now;
        let Ok(local) = self.local(key) else { return };
        while local.coming.front().is_some_and(|(at, _)| *at <= now) {
            match local.coming.pop_front() {
                Some((_, Some(packet))) => local.arrived.push_back(packet),
                _ => local.eof = true,
            }
        }
        self.edge(key);
    }

    pub(super) fn take(&mut self, key: Key, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        self.tick();
        let local = self.local(key)?;
        match local.arrived.pop_front() {
            Some((packet, file)) => {
                let len = packet.len().min(room.len());
                room[..len].copy_from_slice(&packet[..len]);
                Ok((len, file))
            }
            None if local.eof => Ok((0, None)),
            None => Err(ErrorKind::WouldBlock.into()),
        }
    }

    /// Notifies the peer that this end sends nothing more, after the packets in flight have
    /// arrived.
    pub(super) fn shutdown_local(&mut self, key: Key) {
        let peer = self.local(key).ok().and_then(|local| local.peer);
        if let Some(peer) = peer {
            let at = self.seen_from(key);
            self.send_local(peer, at, None);
        }
    }

    /// Returns the time at which a packet of a socket arrives. The receiver then also sees the
    /// stores that the sender has made before.
    fn seen_from(&mut self, key: Key) -> u64 {
        let stores = self.views.iter().filter(|(_, view)| view.socket == Some(key)).map(|(_, view)| view.last + 1);
        stores.fold(self.now + self.rng.skewed(1..=PACKET), u64::max)
    }

    /// Notifies the peer that this end was closed, after the packets in flight have arrived.
    pub(super) fn close_local(&mut self, local: Local) {
        if let Some(peer) = local.peer {
            let at = self.now + self.rng.skewed(1..=PACKET);
            self.send_local(peer, at, None);
        }
        for key in local.listens.into_iter().flat_map(|(_, queue)| queue) {
            self.close(key, false);
        }
    }

    // The simulation of shared memory.

    fn view(&mut self, key: Key) -> &mut View {
        self.views.get_mut(key).expect("a view lives as long as its segment")
    }

    /// Schedules the time at which a store becomes visible, after earlier stores.
    fn store_later(&mut self, key: Key, at: usize, bytes: Vec<u8>) {
        self.tick();
        let after = if self.rng.chance(500) { 0 } else { self.rng.skewed(1..=STORE) };
        let now = self.now;
        let view = self.view(key);
        view.last = view.last.max(now + after);
        let due = view.last;
        view.stores.push_back((due, at, bytes));
        self.at(due, Event::Stores(key));
    }

    /// Makes the stores visible that are due. If `all` is true, makes all stores visible.
    pub(super) fn stores_arrive(&mut self, key: Key, all: bool) {
        let now = self.now;
        let Some(view) = self.views.get_mut(key) else { return };
        while view.stores.front().is_some_and(|(due, ..)| all || *due <= now) {
            if let Some((_, at, bytes)) = view.stores.pop_front() {
                let _ = view.memory.copy_in(at, &bytes);
            }
        }
    }

    /// Returns true if a node has missed a wake-up: it sleeps although it has not read a record in a ring, and no wake-up is in flight.
    pub(super) fn sleeps_over_a_record(&self, node: usize) -> bool {
        self.views.iter().any(|(_, view)| {
            let called = |key: Key| match self.sockets.get(key).map(|socket| (&socket.kind, socket.shut)) {
                Some((Kind::Local(local), false)) => local.is_readable() || !local.coming.is_empty(),
                // The connection has ended, so nobody needs a wake-up.
                _ => true,
            };
            let half = if view.active { HALF } else { 0 };
            let word = |at: usize| view.memory.word(half + at).map_or(0, |word| word.load(Ordering::SeqCst));
            view.node == node
                && word(CALL) != 0
                && word(HEAD) != word(TAIL)
                && view.socket.is_some_and(|key| !called(key))
        })
    }
}

/// A segment of shared memory, as a node maps it.
pub struct SimSegment {
    fabric: Shared,
    key: Key,
    memory: Arc<Memory>,
}

impl fmt::Debug for SimSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimSegment({})", self.key)
    }
}

impl SimSegment {
    /// Returns a segment that `node` maps. If `socket` is `None`, the socket is assigned later by [`bind`].
    pub(super) fn new(node: usize, fabric: &Shared, memory: Memory, socket: Option<Key>) -> Self {
        let memory = Arc::new(memory);
        let view = View {
            memory: Arc::clone(&memory),
            stores: VecDeque::new(),
            last: 0,
            socket,
            node,
            active: socket.is_some(),
        };
        let mut held = lock(fabric);
        held.met += 1;
        let key = held.views.insert(view);
        drop(held);
        Self { fabric: Arc::clone(fabric), key, memory }
    }

    pub(super) const fn key(&self) -> Key {
        self.key
    }
}

impl Drop for SimSegment {
    fn drop(&mut self) {
        let mut fabric = lock(&self.fabric);
        fabric.stores_arrive(self.key, true);
        fabric.views.remove(self.key);
    }
}

/// Assigns the socket over which the segment's node is woken.
pub(super) fn bind(fabric: &Shared, segment: Key, socket: Key) {
    if let Some(view) = lock(fabric).views.get_mut(segment) {
        view.socket.get_or_insert(socket);
    }
}

impl Words for SimSegment {
    fn load(&self, at: usize) -> u64 {
        let mut fabric = lock(&self.fabric);
        fabric.tick();
        let own = fabric.view(self.key).stores.iter().rev().find(|(_, of, bytes)| *of == at && bytes.len() == 8);
        if let Some(own) = own.and_then(|(_, _, bytes)| bytes.first_chunk()) {
            return u64::from_ne_bytes(*own);
        }
        drop(fabric);
        self.memory.word(at).map_or(0, |word| word.load(Ordering::SeqCst))
    }

    fn store(&self, at: usize, value: u64) {
        lock(&self.fabric).store_later(self.key, at, value.to_ne_bytes().to_vec());
    }

    fn peek(&self, at: usize) -> u64 {
        self.load(at)
    }

    fn poke(&self, at: usize, value: u64) {
        self.store(at, value);
    }

    fn swap(&self, at: usize, value: u64) -> u64 {
        self.fence();
        self.memory.word(at).map_or(0, |word| word.swap(value, Ordering::SeqCst))
    }

    fn fence(&self) {
        let mut fabric = lock(&self.fabric);
        fabric.stores_arrive(self.key, true);
        fabric.tick();
    }
}

impl Segment for SimSegment {
    fn part(&self, at: usize, len: usize) -> Option<Span<'_>> {
        self.memory.span(at, len)
    }

    fn put(&self, at: usize, payload: &SegmentPayload<'_>) {
        let mut bytes = Vec::new();
        payload.append_to(&mut bytes);
        if !bytes.is_empty() {
            lock(&self.fabric).store_later(self.key, at, bytes);
        }
    }

    fn keep_pages(&self) {
        self.memory.keep_pages();
    }
}
