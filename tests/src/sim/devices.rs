//! Simulated worlds in which a reactor uses two devices. Both devices often assign equal keys to their regions. The devices fail, are
//! removed, and are added again. Meanwhile, the program keeps messages, holds send buffers, and shares memory with peers. Peers write to
//! this memory, and invalidate its keys (Send with Invalidate). The devices sometimes refuse to release keys, regions and queue pairs.
//!
//! The promises that each world checks:
//!
//! - The program has no access to a region while a peer may use the region. As soon as no peer may use the region, the program has access.
//!   An equal key on the other device does not change this. While the program has access, nobody else writes to the region. If a device has
//!   refused to release a region, the program gets no access.
//! - The reactor counts exactly the objects that a device has failed to release. All other objects are released.
//! - Messages and buffers that the program holds never share memory, and their bytes do not change.
//! - A connection accepts a buffer only if the buffer belongs to the connection's device, and was taken after this device was last added.
//! - In the end, all buffers are in their pools. The memory of a device that the reactor has given up is released when the last message or
//!   buffer in this memory is dropped.

mod book;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdma_reactor::{
    Access, Config, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor, Region, RegionOptions,
    RemoteRegion, SendErrorKind, Stats,
};
use rdma_transport::mr::RemoteKey;

use self::book::{Book, Held, Lent, Rights, fill, is_data, message, number_of};
use super::fabric::{Fabric, Shared, lock};
use super::poller::virtual_ns;
use super::quiet::gated;
use super::rng::{Rng, mix};
use super::run::{panic_text, seed};
use super::swarm::{FaultOptions, MS, NetOptions};
use super::tcp::address;
use super::trace::Trace;
use super::twins::{self, PORT};
use crate::gate::{Call, Failure, Gate, Said};
use crate::life;

/// The number of peers. The server uses the first two nodes of the fabric, one for each device.
const PEERS: usize = 3;
/// The number of random actions after which a world ends.
const ACTS: u64 = 400;
/// The number of steps within which an expected event must happen.
const STEPS: u64 = 200_000;
/// The length of a shared region, in bytes.
const LEN: usize = 64;
/// The length of a message's header in bytes: its kind, a flag, and a number.
const HEAD: usize = 10;

/// The calls that the devices of a world may refuse. Each world uses one of these lists.
const REFUSALS: [&[Call]; 3] =
    [&[], &[Call::Invalidate, Call::Deregister], &[Call::Invalidate, Call::Deregister, Call::DestroyQp]];

const DATA: u8 = 0;
const OFFER: u8 = 1;
const TAKEN: u8 = 2;

/// The handler of the server, which uses two devices.
#[derive(Clone, Debug, Default)]
struct Server(Rc<RefCell<Book>>);

impl Handler for Server {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let mut book = self.0.borrow_mut();
        let listener = cx.connection(conn).listener().and_then(|id| book.listeners.iter().position(|&of| of == id));
        let side = listener.or_else(|| book.opened.get(&conn).copied()).expect("it was opened or accepted");
        book.up.insert(conn, side);
    }
    fn on_recv(&mut self, _: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let mut book = self.0.borrow_mut();
        book.received += 1;
        let number = number_of(&message);
        match message.first() {
            Some(&DATA) if !is_data(&message, number) => {
                book.wrong.push(format!("{conn}: message {number} is damaged"))
            }
            Some(&DATA) if message[1] == 1 => book.held.push(Held::Message(message.detach(), number)),
            Some(&TAKEN) => book.taken_back(conn, number),
            _ => {}
        }
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        let mut book = self.0.borrow_mut();
        book.up.remove(&conn);
        book.hide(|_, lent| lent.owner == Some(conn));
    }
}

/// A region of the server. A peer has received the key of this region.
#[derive(Clone, Copy, Debug)]
struct Offer {
    number: u64,
    remote: RemoteRegion,
    conn: ConnectionId,
}

/// The handler of a peer, which uses the regions of the server.
#[derive(Clone, Debug, Default)]
struct Peer(Rc<RefCell<(BTreeSet<ConnectionId>, Vec<Offer>)>>);

impl Handler for Peer {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.0.borrow_mut().0.insert(conn);
    }
    fn on_recv(&mut self, _: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if message.first() != Some(&OFFER) {
            return;
        }
        let word = |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().expect("eight bytes"));
        let remote = RemoteRegion { address: word(HEAD), len: LEN as u64, key: word(HEAD + 8) as u32 };
        self.0.borrow_mut().1.push(Offer { number: number_of(&message), remote, conn });
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        let (up, offers) = &mut *self.0.borrow_mut();
        up.remove(&conn);
        offers.retain(|offer| offer.conn != conn);
    }
}

struct Node {
    reactor: Reactor,
    handler: Box<dyn Handler>,
    /// The numbers that the fabric uses for this node: two for the server, one for a peer.
    ports: Vec<usize>,
    more: bool,
}

/// The counters of one or more worlds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The number of messages that the server has received.
    pub received: u64,
    /// The number of keys that peers have invalidated.
    pub taken: u64,
    /// The number of times that a reactor has given up a device.
    pub given_up: u64,
    /// The number of buffers that the program has used after their device was given up.
    pub late: u64,
    /// The number of buffers that a connection has refused because they were of another device, or older than the last removal of the
    /// device.
    pub foreign: u64,
    /// The number of remote keys, of regions and of queue pairs that a device has refused to release.
    pub kept: [u64; 3],
}

impl Report {
    /// Adds the counters of another world.
    pub fn add(&mut self, other: &Self) {
        self.received += other.received;
        self.taken += other.taken;
        self.given_up += other.given_up;
        self.late += other.late;
        self.foreign += other.foreign;
        self.kept.iter_mut().zip(other.kept).for_each(|(sum, kept)| *sum += kept);
    }
}

struct World {
    rng: Rng,
    fabric: Shared,
    server: Server,
    peers: Vec<Peer>,
    /// The gates that let calls fail: those of the server's two devices, then those of the peers.
    gates: Vec<Gate>,
    /// For each peer and connection, the region from which the peer writes bytes to the server.
    sources: Vec<BTreeMap<ConnectionId, Region>>,
    nodes: Vec<Node>,
    /// The calls that the devices sometimes refuse. If the devices refuse no release of queue pairs, all buffers must return to their
    /// pools.
    refusals: &'static [Call],
    /// For each device: true if it fails or is being removed, and the reactor has not given it up yet.
    going: [bool; 2],
    /// For each device, the number of its completion queues that were destroyed.
    destroyed: [u32; 2],
    report: Report,
}

fn config(rng: &mut Rng, is_server: bool) -> Config {
    let shared = (is_server && rng.chance(300)).then_some(64);
    let config = life::config()
        .buffer_size(rng.pick(&[128, 1024]))
        .shared_receives(shared)
        .large_messages(|l| l.memory = rng.pick(&[4 << 10, 1 << 20]))
        .large_messages(|l| l.max_message = 4 << 10)
        .large_messages(|l| l.eager_limit = rng.pick(&[0, 512, 64 << 10]));
    config.completions(|c| c.queue = Some(64 + shared.unwrap_or(0)))
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed, "devices");
        let net = NetOptions {
            segment: 1448,
            latency: (1_000, rng.skewed(2_000..=2 * MS)),
            buffer: 1 << 16,
            short_write: rng.pick(&[0, 100]),
            interrupted: rng.pick(&[0, 50]),
            shred: rng.pick(&[0, 100]),
            spurious: rng.pick(&[0, 50]),
            poll_cut: rng.pick(&[0, 50]),
            exhausted: 0,
            lost_connect: 0,
            tick: 100,
        };
        let faults = FaultOptions { every: 0, kinds: Vec::new() };
        let fabric = Arc::new(Mutex::new(Fabric::new(seed, 2 + PEERS, net, faults, Trace::new(0))));
        let gates: Vec<Gate> = (0..2 + PEERS).map(|_| Gate::default()).collect();
        let mut world = Self {
            fabric,
            server: Server::default(),
            peers: Vec::new(),
            gates,
            sources: (0..PEERS).map(|_| BTreeMap::new()).collect(),
            nodes: Vec::new(),
            refusals: rng.pick(&REFUSALS),
            going: [false; 2],
            destroyed: [0; 2],
            report: Report::default(),
            rng,
        };
        world.build(seed);
        world
    }

    fn build(&mut self, seed: u64) {
        let both = [self.gates[0].clone(), self.gates[1].clone()];
        self.server.0.borrow_mut().gates.clone_from(&both);
        let parts = twins::parts(mix(seed), &self.fabric, &both);
        let reactor = Reactor::with_parts(config(&mut self.rng, true), parts).expect("settings in range");
        let handler = Box::new(self.server.clone());
        self.nodes.push(Node { reactor, handler, ports: vec![0, 1], more: true });
        for side in 0..2 {
            let listener = self.nodes[0].reactor.context().listen(address(side, PORT)).expect("a free port");
            self.server.0.borrow_mut().listeners.push(listener);
        }
        for nth in 0..PEERS {
            let (node, peer) = (2 + nth, Peer::default());
            let config = config(&mut self.rng, false);
            let mut reactor = gated(node, &self.fabric, &self.gates[node], config).expect("no call fails");
            for port in [PORT, PORT + 1] {
                reactor.context().listen(address(node, port)).expect("a free port");
            }
            self.nodes.push(Node { reactor, handler: Box::new(peer.clone()), ports: vec![node], more: true });
            self.peers.push(peer);
        }
    }

    /// Gives one turn to each node that is due. If no node is due, advances the time.
    fn step(&mut self) -> Result<(), String> {
        let (mut idle, now) = (true, lock(&self.fabric).now());
        let mut next = lock(&self.fabric).next();
        for node in &mut self.nodes {
            let due = node.reactor.next_deadline().map(virtual_ns);
            let runnable = node.ports.iter().any(|&port| lock(&self.fabric).is_runnable(port, true));
            if node.more || runnable || due.is_some_and(|due| due <= now) {
                node.ports.iter().for_each(|&port| lock(&self.fabric).seen(port));
                let turn = node.reactor.turn(&mut *node.handler, Duration::ZERO);
                node.more = turn.map_err(|error| format!("a turn: {error}"))?.more;
                idle = false;
            }
            next = next.into_iter().chain(due).min();
        }
        if idle {
            lock(&self.fabric).advance(next.map_or(now + MS, |next| next.max(now + 1)));
        }
        self.look()
    }

    /// Checks all promises. If a device is being removed and has no connections left, also lets its removal complete.
    fn look(&mut self) -> Result<(), String> {
        for side in 0..2 {
            let mut book = self.server.0.borrow_mut();
            // When the reactor gives up a device, it destroys the device's completion queues.
            let destroyed = self.gates[side].counts().get(&Call::DestroyCq).copied().unwrap_or(0);
            if std::mem::replace(&mut self.destroyed[side], destroyed) != destroyed {
                self.going[side] = false;
                book.times[side] += 1;
                self.report.given_up += 1;
                book.hide(|_, lent| lent.side == side);
                drop(book);
                self.gates[side].heal();
                self.gates[side].plug_in();
            }
        }
        for side in 0..2 {
            // When the last id on a removed device was destroyed, the device's channel becomes readable. The world makes the channel
            // readable after a random delay.
            let left = self.server.0.borrow().up.values().any(|&of| of == side);
            if self.going[side] && !left && self.gates[side].is_unplugged() && self.rng.chance(100) {
                lock(&self.fabric).ring(side);
            }
        }
        let mut book = self.server.0.borrow_mut();
        book.check();
        let broken = lock(&self.fabric).violations.first().cloned();
        broken.or_else(|| book.wrong.first().cloned()).map_or(Ok(()), Err)
    }

    /// Returns true if the server has completion queues on this device.
    fn is_used(&self, side: usize) -> bool {
        self.gates[side].objects().completion_queues > 0
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) -> Result<(), String> {
        for _ in 0..STEPS {
            if done(self) {
                return Ok(());
            }
            self.step()?;
        }
        Err(format!("not in {STEPS} steps: {what}"))
    }

    /// Returns a random connection of the server with its device, or `None` if there is none.
    fn any_up(&mut self) -> Option<(ConnectionId, usize)> {
        let book = self.server.0.borrow();
        let nth = self.rng.index(book.up.len().max(1));
        book.up.iter().nth(nth).map(|(&conn, &side)| (conn, side))
    }

    fn act(&mut self) {
        match self.rng.below(100) {
            0..8 => self.connect(),
            8..22 => self.share(),
            22..40 => self.write(),
            40..52 => self.take_back(),
            52..56 => self.revoke(),
            56..70 => self.peer_sends(),
            70..80 => self.hold(),
            80..92 => self.let_go(),
            92..96 => self.refuse(),
            _ => self.give_up(),
        }
    }

    /// Opens a connection, from the server or from a peer.
    fn connect(&mut self) {
        let (side, nth, outward) = (self.rng.index(2), self.rng.index(PEERS), self.rng.chance(300));
        if self.going[side] || self.server.0.borrow().up.len() > 6 {
            return;
        }
        if outward {
            let peer = address(2 + nth, PORT + side as u16);
            let conn = self.nodes[0].reactor.context().connect(peer).expect("connecting");
            self.nodes[0].more = true;
            self.server.0.borrow_mut().opened.insert(conn, side);
        } else {
            self.nodes[1 + nth].reactor.context().connect(address(side, PORT)).expect("connecting");
            self.nodes[1 + nth].more = true;
        }
    }

    /// Registers a region of the server for a peer, and sends the region's key to the peer.
    fn share(&mut self) {
        let Some((conn, side)) = self.any_up() else { return };
        let access = self.rng.pick(&[Access::REMOTE_WRITE, Access::REMOTE_WRITE | Access::REMOTE_READ]);
        let options = RegionOptions::new().allow(access);
        let any_peer = self.rng.chance(500);
        let options = if any_peer { options.any_peer() } else { options };
        let mut book = self.server.0.borrow_mut();
        let mut cx = self.nodes[0].reactor.context();
        let Ok(region) = cx.regions().register(conn, LEN, &options) else { return };
        let (number, remote) = (book.number(), region.remote());
        let mut offer = message(OFFER, false, number, 16);
        offer[HEAD..HEAD + 8].copy_from_slice(&remote.address.to_le_bytes());
        offer[HEAD + 8..].copy_from_slice(&u64::from(remote.key).to_le_bytes());
        let _ = cx.send(conn, &offer);
        self.nodes[0].more = true;
        let ending = self.going[side] || book.asked.get(&(side, remote.key)).is_some_and(|&count| count > 0);
        let rights = if ending { Rights::Ending } else { Rights::Live };
        let owner = (!any_peer).then_some(conn);
        book.lent.insert(number, Lent { region, side, owner, rights });
    }

    /// Returns a random region that a peer believes it may use, with the number of the peer. Returns `None` if there is none.
    fn any_offer(&mut self) -> Option<(usize, Offer)> {
        let nth = self.rng.index(PEERS);
        let peer = self.peers[nth].0.borrow();
        let offer = peer.1.get(self.rng.index(peer.1.len().max(1))).copied()?;
        let book = self.server.0.borrow();
        let live = book.lent.get(&offer.number).is_some_and(|lent| lent.rights == Rights::Live);
        live.then_some((nth, offer))
    }

    /// Makes a peer write to memory of the server.
    fn write(&mut self) {
        let Some((nth, offer)) = self.any_offer() else { return };
        let mut cx = self.nodes[1 + nth].reactor.context();
        let source = match self.sources[nth].get(&offer.conn) {
            Some(source) => source,
            None => {
                let Ok(made) = cx.regions().register(offer.conn, LEN, &RegionOptions::new()) else { return };
                self.sources[nth].entry(offer.conn).or_insert(made)
            }
        };
        let _ = cx.remote(offer.conn).write(offer.remote, source, 0..LEN);
        self.nodes[1 + nth].more = true;
    }

    /// Makes a peer invalidate a key of the server.
    fn take_back(&mut self) {
        let Some((nth, offer)) = self.any_offer() else { return };
        let told = message(TAKEN, false, offer.number, 0);
        let mut cx = self.nodes[1 + nth].reactor.context();
        if cx.writable(offer.conn) == 0 {
            return;
        }
        // Posts the earlier sends now, because the next send that is posted invalidates the key.
        cx.flush(offer.conn);
        self.gates[2 + nth].take_back(RemoteKey(offer.remote.key));
        let sent = cx.send(offer.conn, &told);
        cx.flush(offer.conn);
        let left = self.gates[2 + nth].takes_key();
        self.nodes[1 + nth].more = true;
        if sent.is_err() {
            return;
        }
        let book = &mut *self.server.0.borrow_mut();
        if left.is_some() {
            return book.wrong.push(format!("peer {nth}: a message was not posted by a flush"));
        }
        let Some(side) = book.lent.get(&offer.number).map(|lent| lent.side) else { return };
        *book.asked.entry((side, offer.remote.key)).or_default() += 1;
        for lent in book.lent.values_mut() {
            if (lent.side, lent.region.remote().key, lent.rights) == (side, offer.remote.key, Rights::Live) {
                lent.rights = Rights::Ending;
            }
        }
    }

    /// Revokes the rights to a region of the server, or drops the region.
    fn revoke(&mut self) {
        let nth = self.rng.index(self.server.0.borrow().lent.len().max(1));
        let drops = self.rng.chance(500);
        let mut book = self.server.0.borrow_mut();
        let Some(number) = book.lent.keys().nth(nth).copied() else { return };
        if drops {
            book.lent.remove(&number);
        } else if let Some(lent) = book.lent.get(&number) {
            // The result is ignored: the device may refuse to release the key. The counters of the gate record such a refusal.
            let _ = self.nodes[0].reactor.context().regions().revoke(&lent.region);
            book.hide(|of, _| of == number);
        }
        self.nodes[0].more = true;
    }

    /// Sends a message from a peer to the server. Some of these messages request that the server keeps them.
    fn peer_sends(&mut self) {
        let nth = self.rng.index(PEERS);
        let (keep, len) = (self.rng.chance(600), self.rng.skewed(0..=2_000) as usize);
        let number = self.server.0.borrow_mut().number();
        let peer = self.peers[nth].0.borrow();
        let Some(&conn) = peer.0.iter().nth(self.rng.index(peer.0.len().max(1))) else { return };
        let _ = self.nodes[1 + nth].reactor.context().send(conn, &message(DATA, keep, number, len));
        self.nodes[1 + nth].more = true;
    }

    /// Takes a send buffer of the server. The program fills and sends the buffer later.
    fn hold(&mut self) {
        let Some((conn, side)) = self.any_up() else { return };
        let Some(mut buffer) = self.nodes[0].reactor.context().buffer(conn) else { return };
        let mut book = self.server.0.borrow_mut();
        let number = book.number();
        buffer.set_len(buffer.capacity());
        fill(&mut buffer, number);
        let of = (side, book.times[side]);
        book.held.push(Held::Buffer(buffer, number, of));
    }

    /// Drops a message or a buffer that the server holds, or sends the buffer on a random connection.
    fn let_go(&mut self) {
        let (up, how) = (self.any_up(), self.rng.below(3));
        let nth = self.rng.index(self.server.0.borrow().held.len().max(1));
        let mut book = self.server.0.borrow_mut();
        if nth >= book.held.len() {
            return;
        }
        let held = book.held.swap_remove(nth);
        if let Held::Buffer(_, _, (side, time)) = held {
            self.report.late += u64::from(time != book.times[side]);
        }
        let mut cx = self.nodes[0].reactor.context();
        match (held, up) {
            (Held::Message(message, _), _) if how == 0 => cx.release(message),
            (Held::Buffer(buffer, number, of), Some((conn, side))) if how > 0 => {
                let is_of_it = of == (side, book.times[side]);
                match cx.send_buffer(conn, buffer) {
                    Ok(_) if is_of_it => {}
                    Ok(_) => {
                        book.wrong.push(format!("buffer {number} of {of:?} was accepted by a connection of {side}"))
                    }
                    Err(refused) => {
                        let right = match refused.kind {
                            SendErrorKind::ForeignBuffer => !is_of_it,
                            SendErrorKind::WouldBlock(_) | SendErrorKind::TooLong { .. } => is_of_it,
                            kind => kind == SendErrorKind::Closed,
                        };
                        if !right {
                            book.wrong.push(format!("buffer {number} of {of:?} on {side}: {}", refused.kind));
                        }
                        self.report.foreign += u64::from(!is_of_it);
                        book.held.push(Held::Buffer(refused.buffer, number, of));
                    }
                }
            }
            (held, _) => drop(held),
        }
        self.nodes[0].more = true;
    }

    /// Makes one of the next release calls of a device fail.
    fn refuse(&mut self) {
        let (side, nth) = (self.rng.index(2), self.rng.index(self.refusals.len().max(1)));
        if let Some(&call) = self.refusals.get(nth) {
            self.gates[side].refuse(call);
        }
    }

    /// Makes a device fail, or removes it.
    fn give_up(&mut self) {
        let side = self.rng.index(2);
        if self.going[side] || !self.is_used(side) || !self.rng.chance(400) {
            return;
        }
        let gate = &self.gates[side];
        if self.rng.chance(500) {
            gate.say(Said::Removal);
            lock(&self.fabric).ring(side);
        } else {
            let polled = gate.counts().get(&Call::PollCq).copied().unwrap_or(0);
            gate.fail_nth(Call::PollCq, polled, Failure::Errno(libc::EIO));
        }
        self.going[side] = true;
        for lent in self.server.0.borrow_mut().lent.values_mut().filter(|lent| lent.side == side) {
            if lent.rights == Rights::Live {
                lent.rights = Rights::Ending;
            }
        }
    }

    fn run(&mut self) -> Result<Report, String> {
        let acts = self.rng.range(50..=ACTS);
        for _ in 0..acts {
            self.act();
            for _ in 0..self.rng.skewed(0..=40) {
                self.step()?;
            }
        }
        // Completes each removal of a device that is in progress. Some messages and buffers that the program holds must stay valid after
        // their connections have ended.
        for side in 0..2 {
            let book = self.server.0.borrow();
            let conn = book.up.iter().find(|&(_, &of)| of == side).map(|(&conn, _)| conn);
            drop(book);
            if let Some(conn) = conn.filter(|_| self.going[side]) {
                // The result is ignored: the message is sent only so that the reactor polls for its completion. That poll detects the
                // failure of the device.
                let _ = self.nodes[0].reactor.context().send(conn, b"");
                self.nodes[0].more = true;
            }
        }
        for _ in 0..self.rng.skewed(0..=20) {
            self.let_go();
        }
        for node in &mut self.nodes {
            node.more = true;
            let mut cx = node.reactor.context();
            cx.close_all();
        }
        self.until("the end of all connections", |world| {
            world.nodes.iter().all(|node| node.reactor.stats().connections.current == 0)
        })?;
        let held = std::mem::take(&mut self.server.0.borrow_mut().held);
        drop(held);
        self.server.0.borrow_mut().lent.clear();
        self.nodes[0].more = true;
        let refused = |world: &Self, call| [0, 1].map(|side| u64::from(world.gates[side].failed_of(call)));
        let queue_pairs = refused(self, Call::DestroyQp);
        self.until("everything is released", |world| {
            let reactor = &world.nodes[0].reactor;
            let (all, free) = reactor.pool_levels();
            let memory = reactor.stats().memory;
            // If a device fails to release a queue pair, the buffers of that queue pair and the memory of its operations are never
            // released.
            queue_pairs != [0; 2] || all == free && memory.regions == 0 && memory.fetched_bytes == 0
        })?;
        self.report.kept =
            [Call::Invalidate, Call::Deregister, Call::DestroyQp].map(|call| refused(self, call).iter().sum());
        let Stats { connections, memory, .. } = self.nodes[0].reactor.stats();
        let [_, regions, queue_pairs] = self.report.kept;
        // A queue pair that was not released still uses its shared receive queue. So that queue and its buffers are not released
        // either.
        let shared: u64 = refused(self, Call::DestroySrq).iter().sum();
        let (unreleased, undestroyed) = (memory.unreleased as u64, connections.undestroyed);
        if undestroyed != queue_pairs + shared || unreleased < regions || shared == 0 && unreleased > regions {
            return Err(format!(
                "kept: {queue_pairs} queue pairs, {shared} shared receive queues, {regions} regions and their buffers; \
                 counted: {undestroyed} queues, {unreleased} regions"
            ));
        }
        for side in 0..2 {
            let (memories, registered) = (self.gates[side].memories(), self.gates[side].objects().regions);
            if memories as i64 != registered {
                return Err(format!("device {side}: {memories} memories exist, and {registered} are registered"));
            }
        }
        self.nodes.clear();
        for (side, gate) in self.gates.iter().take(2).enumerate() {
            let (left, objects) = (gate.memories(), gate.objects());
            let kept = i64::from(gate.failed_of(Call::Deregister));
            // A queue pair that was not released still uses its completion queue, and its shared receive queue with the buffers in it.
            let queues = objects.completion_queues == 0 || gate.failed_of(Call::DestroyQp) > 0;
            let buffers = gate.failed_of(Call::DestroySrq) > 0;
            let regions = if buffers { objects.regions >= kept } else { left == 0 && objects.regions == kept };
            if !regions || !queues {
                return Err(format!("device {side}: {left} memories outlive the reactor, {objects:?}"));
            }
        }
        let book = self.server.0.borrow();
        (self.report.received, self.report.taken) = (book.received, book.taken);
        Ok(self.report)
    }
}

/// Runs the world with this seed. Returns its counters.
///
/// # Errors
/// The first broken promise, with the command that repeats the world.
pub fn check(seed: u64) -> Result<Report, String> {
    let mut world = World::new(seed);
    let result = catch_unwind(AssertUnwindSafe(|| world.run())).unwrap_or_else(|panic| {
        // After a panic, dropping the world could panic again, so it is leaked.
        std::mem::forget(world);
        Err(panic_text(&*panic))
    });
    let again =
        format!("SIM_SEED={seed:#018x} cargo test -p rdma-reactor-tests --test simulation replay_on_two_devices");
    result.map_err(|what| format!("seed {seed:#018x}: {what}\n\nto see it again:\n  {again} -- --nocapture"))
}

/// Runs `count` worlds on two threads. Returns the sum of their counters.
///
/// # Errors
/// The number of the first world that failed, counted from 1, and its failure.
pub fn check_many(first: u64, count: u64) -> Result<Report, (u64, String)> {
    let total = Mutex::new(Report::default());
    let worst = AtomicU64::new(u64::MAX);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (total, worst) = (&total, &worst);
            scope.spawn(move || {
                for nth in (first + thread..first + count).step_by(2) {
                    if nth > worst.load(Ordering::Relaxed) {
                        return;
                    }
                    match check(seed(nth)) {
                        Ok(report) => total.lock().unwrap_or_else(PoisonError::into_inner).add(&report),
                        Err(_) => _ = worst.fetch_min(nth, Ordering::Relaxed),
                    }
                }
            });
        }
    });
    match worst.into_inner() {
        u64::MAX => Ok(total.into_inner().unwrap_or_else(PoisonError::into_inner)),
        nth => {
            let failure = check(seed(nth)).err().unwrap_or_else(|| "it failed once, and not again".into());
            Err((nth - first + 1, failure))
        }
    }
}
