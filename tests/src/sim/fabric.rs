//! The fabric: the state that all nodes of a simulated world share. It has the virtual time, the heap of future events, and each node's
//! descriptors.
//!
//! Time advances between turns. It also advances a little with every reading of the clock and every call of a provider. So events can
//! happen during a turn, between any two calls.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_reactor::ConnectionStats;
use rdma_transport::slab::{Key, Slab};
use rdma_transport_embedded::iwarp::SharedMemoryPolicy;
use rdma_transport_embedded::iwarp::net::NetChannel;

use super::hardware::Hardware;
use super::local::View;
use super::middleman::Middleman;
use super::path::LateDevice;
use super::rng::Rng;
use super::swarm::{Fault, FaultOptions, Limits, MS, NetOptions, Slowness};
use super::tcp::{Kind, Pipe, Socket};
use super::threads::Threads;
use super::trace::Trace;
use super::udp::{Flying, UdpOptions};

/// A reference to the fabric that nodes share.
pub type Shared = Arc<Mutex<Fabric>>;

/// The first port that the simulated system chooses.
const FIRST_PORT: u16 = 20_000;

/// Locks the fabric. Ignores a poisoned lock, because the panic that poisoned it is reported elsewhere.
pub fn lock(shared: &Shared) -> MutexGuard<'_, Fabric> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends the messages that simulated other threads must send by now.
pub fn let_others_speak(shared: &Shared) {
    let mut fabric = lock(shared);
    let (spoken, threads) = (std::mem::take(&mut fabric.spoken), fabric.threads.clone());
    drop(fabric);
    for node in spoken {
        // The thread number `usize::MAX` is reserved for these messages. No program uses it.
        let said = threads.say(node, usize::MAX);
        let mut fabric = lock(shared);
        fabric.note(node, format_args!("another thread speaks: {said:?}"));
        said.unwrap_or_else(|error| fabric.violation(error));
    }
}

/// An event with a scheduled time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// Segments arrive at the receiver of a pipe (one direction of a TCP connection).
    Deliver(Key),
    /// A pipe may have space again.
    Room(Key),
    /// A connect request arrives at its listener.
    Syn(Key),
    /// The answer to a connect request arrives at the initiator.
    Connected(Key, Key),
    /// The initiator's acknowledgement arrives at the listener.
    Arrived(Key, Key),
    /// A connect request arrives at an address without a listener.
    Refused(Key),
    /// A reset arrives, because the peer has no such connection.
    Reset(Key),
    /// Completions or connection-manager events arrive at the simulated hardware of a node.
    Hardware(usize),
    /// A packet arrives at a Unix socket, or the notification that the peer has closed the socket.
    Packet(Key),
    /// At a UDP socket, a packet or a network error arrives, or there is space again.
    Udp(Key),
    /// Stores of a node to shared memory become visible to other nodes.
    Stores(Key),
    /// A random fault begins.
    Fault,
    /// An action of the world is due.
    Script(Script),
}

/// An action of the world between turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Script {
    /// A node opens a connection.
    Open(usize),
    /// A node's program drops messages that it has kept. This simulates another thread that drops them.
    Release(usize),
    /// The reactor of a node is dropped, without a shutdown.
    Kill(usize),
    /// Bytes arrive at a descriptor that a node's program has registered.
    Bytes(usize),
    /// A simulated other thread sends a message to a node, even during a turn.
    Speak(usize),
    /// Nothing happens, but time passes.
    Tick,
}

/// The readiness of one of a node's two channels. The channel simulates an epoll descriptor that is nested in the epoll descriptor of the
/// reactor (`epoll`(7)).
#[derive(Debug, Default)]
pub(super) struct ChannelState {
    /// The sockets with new readiness, in the order of their edges.
    pub(super) ready: VecDeque<Key>,
    /// True if [`rdma_transport_embedded::iwarp::net::StreamSockets::wake`] was called.
    pub(super) wake: bool,
    /// The token with which the reactor's poller has registered the channel.
    pub(super) token: Option<usize>,
    /// True if new readiness has arrived since the reactor's poller last polled.
    pub(super) edge: bool,
}

/// The descriptors of a node, and its pauses.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) name: String,
    pub(super) channels: [ChannelState; 2],
    /// True if the waker was called.
    pub(super) woken: bool,
    /// The number of calls of the waker since the last call of [`Fabric::take_rings`].
    pub(super) rings: u32,
    /// True if new readiness has arrived since the loop around the reactor last polled.
    pub(super) outer: bool,
    pub(super) paused_until: u64,
    /// The total virtual time for which the node was paused, in ns.
    pub(super) paused: u64,
    pub(super) hardware: Hardware,
    /// The descriptors that the program has registered.
    pub(super) own: Vec<OwnDescriptor>,
}

/// A descriptor that the program has registered with its reactor. The program reads all bytes that have arrived with one call.
#[derive(Debug)]
pub(super) struct OwnDescriptor {
    pub(super) fd: RawFd,
    pub(super) token: usize,
    pub(super) edge: bool,
    pub(super) bytes: u64,
}

/// The ways in which a link (a connection, named by its initiator's address) was disturbed, as bits.
pub mod disturbed {
    /// The connection was cut.
    pub const CUT: u32 = 1;
    /// The connection carried nothing for a while, or forever.
    pub const STALL: u32 = 2;
    /// The connection works, but an end has used a region without the right.
    pub const TRESPASS: u32 = 1 << 31;

    /// Returns the bit for a pause of this node.
    #[must_use]
    pub const fn pause(node: usize) -> u32 {
        4 << node
    }
}

/// The way in which a node drops connections that its peers have opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dropped {
    /// A connection that was not established is dropped in favour of a newer one.
    Evicted,
    /// A connection is refused, or was not established within the time limit.
    Refused,
}

/// The user and the policy of a node, in a world in which not all nodes of the host may share
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// The user to whom the node's process belongs.
    pub user: usize,
    /// The setting of the node's provider.
    pub policy: SharedMemoryPolicy,
}

/// The simulated network, see the [module](self).
#[derive(Debug)]
pub struct Fabric {
    pub(super) now: u64,
    sequence: u64,
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    pub(super) rng: Rng,
    pub(super) fault_rng: Rng,
    pub(super) net: NetOptions,
    faults: FaultOptions,
    pub(super) sockets: Slab<Socket>,
    pub(super) pipes: Slab<Pipe>,
    /// The faults of UDP packets; `None` if the nodes have no UDP sockets.
    pub udp: Option<UdpOptions>,
    pub(super) flying: Slab<Flying>,
    /// The links of all connects so far, each with the nodes at both ends and the time of the
    /// connect.
    pub(super) dialled: Vec<(SocketAddr, [usize; 2], u64)>,
    /// True if all nodes are on one host, so that they may use shared memory.
    pub one_host: bool,
    /// Each node's user and setting, if they differ; otherwise the list is empty.
    pub tenants: Vec<Tenant>,
    pub(super) views: Slab<View>,
    /// The number of times so far that a node has mapped shared memory.
    pub(super) met: u64,
    pub(super) ports: Vec<Port>,
    /// The disturbances of each link, by the initiator's address.
    pub(super) links: BTreeMap<SocketAddr, u32>,
    /// Pairs of nodes. Packets from the first node of a pair do not arrive at the second node.
    pub(super) silent: BTreeSet<(usize, usize)>,
    /// The long pauses of nodes so far: the node, and the times at which the pause begins and ends.
    pauses: Vec<(usize, u64, u64)>,
    /// For each node and kind of drop: the number of connections that the node has dropped in this
    /// way, and the time of the last such drop.
    dropped: BTreeMap<(usize, Dropped), (u64, u64)>,
    /// For each node that has stopped listening: the time at which it listened again, or `u64::MAX`.
    deaf: BTreeMap<usize, u64>,
    /// The slowness of nodes; `None` unless it is the only fault of the world.
    pub slowness: Option<Slowness>,
    /// The time limits of each node, for worlds with slow nodes.
    pub limits: Vec<Limits>,
    /// The node that takes a turn.
    pub(super) running: Option<usize>,
    pub(super) script: VecDeque<Script>,
    /// The nodes that still get a message from a simulated other thread. A node is in the list once for each message.
    spoken: Vec<usize>,
    threads: Threads,
    next_port: u16,
    pub(super) calm: bool,
    /// The processing time of node 0 for each byte that it receives or sends, in ps. All other nodes need no time.
    pub toll: u64,
    /// An attacker between node 0 and node 1, if there is one.
    pub middleman: Option<Middleman>,
    /// The device of node 0, if it listens late to the frames of a new connection.
    pub late_device: Option<LateDevice>,
    /// True if the hardware may fail to report a disconnect.
    pub forgetful: bool,
    /// The keepalive time of each node, in ns. The list is empty unless the simulated devices
    /// recognize a live peer only by complete messages. Such a device stalls while its node is
    /// paused; a real device does not stall.
    pub slow_to_hear: Vec<u64>,
    /// True if a node that waits advances the time itself, until something happens or its wait is
    /// over. False if the node's caller advances the time.
    pub sleeps: bool,
    /// The history of the world, see [`Trace`].
    pub trace: Trace,
    /// Descriptions of the broken promises, in the order of their detection.
    pub violations: Vec<String>,
}

pub(super) const fn index(channel: NetChannel) -> usize {
    match channel {
        NetChannel::Cm => 0,
        NetChannel::Completion => 1,
    }
}

impl Fabric {
    /// Returns a network of `nodes` nodes without sockets.
    #[must_use]
    pub fn new(seed: u64, nodes: usize, net: NetOptions, faults: FaultOptions, trace: Trace) -> Self {
        let port = |node| Port {
            name: format!("node{node}"),
            channels: Default::default(),
            woken: false,
            rings: 0,
            outer: true,
            paused_until: 0,
            paused: 0,
            hardware: Hardware::new(),
            own: Vec::new(),
        };
        let mut fabric = Self {
            now: 0,
            sequence: 0,
            heap: BinaryHeap::new(),
            rng: Rng::new(seed, "net"),
            fault_rng: Rng::new(seed, "faults"),
            net,
            faults,
            sockets: Slab::default(),
            pipes: Slab::default(),
            udp: None,
            flying: Slab::default(),
            dialled: Vec::new(),
            one_host: false,
            tenants: Vec::new(),
            views: Slab::default(),
            met: 0,
            ports: (0..nodes).map(port).collect(),
            links: BTreeMap::new(),
            silent: BTreeSet::new(),
            pauses: Vec::new(),
            dropped: BTreeMap::new(),
            deaf: BTreeMap::new(),
            slowness: None,
            limits: Vec::new(),
            running: None,
            script: VecDeque::new(),
            spoken: Vec::new(),
            threads: Threads::default(),
            next_port: FIRST_PORT,
            calm: false,
            toll: 0,
            middleman: None,
            late_device: None,
            forgetful: false,
            slow_to_hear: Vec::new(),
            sleeps: false,
            trace,
            violations: Vec::new(),
        };
        fabric.next_fault();
        fabric
    }

    /// Returns the simulated other threads.
    #[must_use]
    pub fn threads(&self) -> Threads {
        self.threads.clone()
    }

    /// Returns the virtual time, in ns.
    #[must_use]
    pub const fn now(&self) -> u64 {
        self.now
    }

    /// Adds a line about a node to the history.
    pub fn note(&mut self, node: usize, what: std::fmt::Arguments<'_>) {
        self.trace.line(self.now, &self.ports[node].name, what);
    }

    /// Records a broken promise.
    pub fn violation(&mut self, what: String) {
        self.trace.line(self.now, "ORACLE", format_args!("{what}"));
        self.violations.push(what);
    }

    pub(super) fn at(&mut self, at: u64, event: Event) {
        self.heap.push(Reverse((at.max(self.now), self.sequence, event)));
        self.sequence += 1;
    }

    /// Schedules an action of the world.
    pub fn schedule(&mut self, at: u64, script: Script) {
        self.at(at, Event::Script(script));
    }

    pub(super) fn latency(&mut self) -> u64 {
        let (least, most) = self.net.latency;
        self.rng.skewed(least..=most)
    }

    /// Returns the time of the next scheduled event, or `None` if no event is scheduled.
    #[must_use]
    pub fn next(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse((at, _, _))| *at)
    }

    /// Returns a port that the system chooses.
    pub(super) fn any_port(&mut self) -> u16 {
        let port = self.next_port;
        self.next_port = port.checked_add(1).unwrap_or(FIRST_PORT);
        port
    }

    /// Advances the time by a short random step, which simulates the duration of a call. A call of a slow node may take long.
    pub(super) fn tick(&mut self) {
        let step = self.rng.range(1..=self.net.tick);
        self.advance(self.now + step);
        let Some(slowness) = self.slowness.clone().filter(|_| !self.calm) else { return };
        if self.running.is_some_and(|node| slowness.affects(node)) {
            let stalls = self.fault_rng.chance(slowness.stalls);
            let stall = if stalls { self.fault_rng.skewed(MS..=slowness.longest) } else { 0 };
            self.stall(slowness.toll + stall);
        }
    }

    /// Advances the time by `time` ns within a turn. No node takes a turn meanwhile.
    pub(super) fn stall(&mut self, time: u64) {
        let until = self.now + time;
        (0..self.ports.len()).for_each(|node| _ = self.is_absent(node, until));
        self.advance(until);
    }

    /// Advances the time by a node's processing time for `octets` bytes.
    pub(super) fn work(&mut self, node: usize, octets: usize) {
        if self.toll > 0 && node == 0 {
            self.advance(self.now + octets as u64 * self.toll / 1000);
        }
    }

    /// Advances the time to `to`. Handles the events that are due until then.
    pub fn advance(&mut self, to: u64) {
        while let Some(&Reverse((at, _, event))) = self.heap.peek().filter(|next| next.0.0 <= to) {
            self.heap.pop();
            self.now = self.now.max(at);
            self.happen(event);
        }
        self.now = self.now.max(to);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Deliver(pipe) => self.deliver(pipe),
            Event::Room(socket) => self.room(socket),
            Event::Syn(socket) => self.syn(socket),
            Event::Connected(active, passive) => self.connected_now(active, passive),
            Event::Arrived(passive, listener) => self.arrived(passive, listener),
            Event::Refused(socket) => self.fail_socket(socket, std::io::ErrorKind::ConnectionRefused),
            Event::Reset(socket) => self.fail_socket(socket, std::io::ErrorKind::ConnectionReset),
            Event::Hardware(node) => self.hardware_arrives(node),
            Event::Packet(socket) => self.packet_arrives(socket),
            Event::Udp(flying) => self.lands(flying),
            Event::Stores(view) => self.stores_arrive(view, false),
            Event::Fault => {
                self.fault();
                self.next_fault();
            }
            Event::Script(Script::Speak(node)) => self.spoken.push(node),
            Event::Script(Script::Bytes(node)) => self.bytes_come(node),
            Event::Script(script) => self.script.push_back(script),
        }
    }

    // The simulated descriptors of nodes.

    pub(super) fn is_readable(&self, node: usize, channel: usize) -> bool {
        let port = &self.ports[node];
        let state = &port.channels[channel];
        state.wake
            || port.hardware.is_readable(channel)
            || state.ready.iter().any(|&key| self.mask(key).is_some_and(|ready| ready != Default::default()))
    }

    /// Returns true if a poll of a channel's descriptor would report something. Removes sockets without readiness from the channel's
    /// list.
    pub(super) fn look(&mut self, node: usize, channel: usize) -> bool {
        while let Some(&key) = self.ports[node].channels[channel].ready.front() {
            if self.mask(key).is_some_and(|ready| ready != Default::default()) {
                break;
            }
            self.ports[node].channels[channel].ready.pop_front();
            self.wants_room(key);
        }
        self.is_readable(node, channel)
    }

    /// Records new readiness of a channel's descriptor.
    pub(super) fn raise(&mut self, node: usize, channel: usize) {
        let port = &mut self.ports[node];
        port.channels[channel].edge = true;
        port.outer |= port.channels[channel].token.is_some();
    }

    pub(super) fn wake(&mut self, node: usize) {
        let port = &mut self.ports[node];
        port.woken = true;
        port.outer = true;
        port.rings += 1;
    }

    /// Returns the number of calls of a node's waker since the previous call of this function.
    pub fn take_rings(&mut self, node: usize) -> u32 {
        std::mem::take(&mut self.ports[node].rings)
    }

    /// Returns true if the loop around a node's reactor would take a turn because the reactor's descriptor is ready. `level` is true
    /// for a level-triggered loop.
    #[must_use]
    pub fn is_runnable(&mut self, node: usize, level: bool) -> bool {
        let port = &self.ports[node];
        if !level && !port.outer {
            return false;
        }
        let edge = |channel: usize| {
            port.channels[channel].edge && port.channels[channel].token.is_some() && self.is_readable(node, channel)
        };
        port.woken || edge(0) || edge(1) || port.own.iter().any(|own| own.edge && own.bytes > 0)
    }

    /// If a sleeping node has missed an event that should have woken it, returns a description of the event. Otherwise returns `None`.
    #[must_use]
    pub fn asleep_on(&self, node: usize) -> Option<String> {
        let port = &self.ports[node];
        for (channel, name) in [(0, "connection-manager"), (1, "completion")] {
            let state = &port.channels[channel];
            // Of a socket's readiness, only unread data counts as a missed event. A node may sleep although its socket has space to send,
            // because the network reports the space only after a delay.
            let read = state.ready.iter().any(|&key| self.mask(key).is_some_and(|ready| ready.readable));
            if state.token.is_some() && (read || state.wake || port.hardware.is_readable(channel)) {
                let of = if read {
                    "a socket"
                } else if state.wake {
                    "a wake-up"
                } else {
                    "an event"
                };
                return Some(format!("{of} on its {name} channel"));
            }
        }
        if port.own.iter().any(|own| own.bytes > 0) {
            return Some("something on a descriptor of the program".into());
        }
        let forgotten = port.hardware.unpolled();
        if forgotten > 0 {
            return Some(format!("{forgotten} completions"));
        }
        if self.sleeps_over_a_record(node) {
            return Some("a record in shared memory".into());
        }
        self.unread(node).map(|peer| format!("unread bytes from {peer}"))
    }

    /// Records that the loop around the reactor has consumed the readiness of the reactor's descriptor.
    pub fn seen(&mut self, node: usize) {
        self.ports[node].outer = false;
    }

    /// Returns the time at which the pause of a node ends.
    #[must_use]
    pub fn paused_until(&self, node: usize) -> u64 {
        self.ports[node].paused_until
    }

    /// Returns the total virtual time for which a node was paused so far, in ns.
    #[must_use]
    pub fn paused(&self, node: usize) -> u64 {
        let port = &self.ports[node];
        port.paused - port.paused_until.saturating_sub(self.now)
    }

    /// Pauses a node for the next `time` ns. A pause that lasts longer already is not shortened.
    pub fn pause(&mut self, node: usize, time: u64) {
        let until = self.now + time;
        if self.is_absent(node, until) {
            self.note(node, format_args!("does not run for {:.3} ms", time as f64 / 1e6));
        }
        self.at(until, Event::Script(Script::Tick));
    }

    /// Records that a node does not run until `until`. Returns false if it is paused for longer already.
    fn is_absent(&mut self, node: usize, until: u64) -> bool {
        let port = &mut self.ports[node];
        let from = port.paused_until.max(self.now);
        if until <= from {
            return false;
        }
        port.paused += until - from;
        port.paused_until = until;
        match self.pauses.iter_mut().rev().find(|(who, ..)| *who == node) {
            // Short pauses in one turn count as one.
            Some((.., end)) if from <= *end + MS => *end = until,
            _ => self.pauses.push((node, from, until)),
        }
        true
    }

    pub(super) fn disturb(&mut self, link: SocketAddr, how: u32) {
        *self.links.entry(link).or_default() |= how;
    }

    /// Records a disturbance of all links of a node.
    pub fn disturb_all(&mut self, node: usize, how: u32) {
        let mut links: Vec<_> = self.sockets.iter().filter(|(_, s)| s.node == node).map(|(_, s)| s.link).collect();
        if self.one_host {
            // A connection that has moved from TCP to shared memory has no TCP socket any more, so it is found in the list of all connects.
            links.extend(self.dialled.iter().filter(|(_, nodes, _)| nodes.contains(&node)).map(|(link, ..)| *link));
        }
        for link in links {
            self.disturb(link, how);
        }
    }

    /// Removes and returns the oldest action of the world that is due, or returns `None` if no action is due.
    pub fn next_script(&mut self) -> Option<Script> {
        self.script.pop_front()
    }

    /// Returns the disturbances of the link with this initiator.
    #[must_use]
    pub fn disturbances(&self, initiator: SocketAddr) -> u32 {
        self.links.get(&initiator).copied().unwrap_or(0)
    }

    /// Returns true if a link that `nodes[0]` has opened to `nodes[1]` since the time `since` was
    /// disturbed.
    #[must_use]
    pub fn has_disturbed(&self, nodes: [usize; 2], since: u64) -> bool {
        let mut links = self.dialled.iter().rev().take_while(|(_, _, at)| *at >= since);
        links.any(|&(link, ends, _)| ends == nodes && self.disturbances(link) != 0)
    }

    /// Returns the time for which a node was paused between `from` and `until`, in ns.
    #[must_use]
    pub fn absence(&self, node: usize, from: u64, until: u64) -> u64 {
        let of_node = self.pauses.iter().filter(|&&(who, ..)| who == node);
        of_node.map(|&(_, start, end)| end.min(until).saturating_sub(start.max(from))).sum()
    }

    /// Returns true if `node` was paused between `from` and `until` for so long that a peer on the
    /// node `by` may have given it up. If slowness is the only fault of the world, such pauses last
    /// half of the peer's shortest time limit or longer, and do not count on the peer's own node.
    /// In other worlds, every pause counts.
    #[must_use]
    pub fn tried_patience(&self, node: usize, by: usize, from: u64, until: u64) -> bool {
        let absence = self.absence(node, from, until);
        absence > 0 && (self.slowness.is_none() || node != by && absence >= self.limits[by].silence / 2)
    }

    /// Records the numbers of connections that a node has dropped so far.
    pub fn note_dropped(&mut self, node: usize, stats: &ConnectionStats) {
        for (how, count) in [(Dropped::Evicted, stats.evicted), (Dropped::Refused, stats.refused)] {
            let known = self.dropped.entry((node, how)).or_default();
            if count > known.0 {
                *known = (count, self.now);
            }
        }
    }

    /// Returns true if two nodes belong to different users.
    pub(super) fn are_strangers(&self, nodes: [usize; 2]) -> bool {
        let [one, other] = nodes.map(|node| self.tenants.get(node).map(|tenant| tenant.user));
        one != other
    }

    /// Returns true if the policy of a node requires shared memory.
    #[must_use]
    pub fn requires_shared_memory(&self, node: usize) -> bool {
        self.tenants.get(node).is_some_and(|tenant| tenant.policy == SharedMemoryPolicy::Require)
    }

    /// Returns true if no connection between two nodes can be established, because one of them
    /// requires shared memory, and they cannot share memory.
    #[must_use]
    pub fn are_apart(&self, nodes: [usize; 2]) -> bool {
        let is_off =
            |node: usize| self.tenants.get(node).is_some_and(|tenant| tenant.policy == SharedMemoryPolicy::Off);
        let requires = nodes.into_iter().any(|node| self.requires_shared_memory(node));
        requires && (self.are_strangers(nodes) || nodes.into_iter().any(is_off))
    }

    /// Returns true if a node has dropped a connection in this way since this time.
    #[must_use]
    pub fn dropped_since(&self, node: usize, how: Dropped, since: u64) -> bool {
        self.dropped.get(&(node, how)).is_some_and(|&(count, last)| count > 0 && last >= since)
    }

    /// Records that a node listens, or does not listen any more.
    pub fn note_listening(&mut self, node: usize, listens: bool) {
        if !listens || self.deaf.contains_key(&node) {
            self.deaf.insert(node, if listens { self.now } else { u64::MAX });
        }
    }

    /// Returns true if a node did not listen at some time after `since`.
    #[must_use]
    pub fn was_deaf_since(&self, node: usize, since: u64) -> bool {
        self.deaf.get(&node).is_some_and(|&until| until >= since)
    }

    /// Returns true if the device of a node stalls while the node is paused, and the node was paused for at least half of the last
    /// keepalive time.
    #[must_use]
    pub fn slept_through(&self, node: usize) -> bool {
        let Some(&timeout) = self.slow_to_hear.get(node) else { return false };
        self.absence(node, self.now.saturating_sub(timeout), self.now) >= timeout / 2
    }

    /// Returns the number of sockets. Listeners for connections within the host are not counted: each node has at most one, which
    /// exists as long as the node.
    #[must_use]
    pub fn sockets(&self) -> usize {
        self.sockets.iter().filter(|(_, s)| !matches!(&s.kind, Kind::Local(local) if local.listens.is_some())).count()
    }

    /// Describes all sockets, for a report.
    #[must_use]
    pub fn describe_sockets(&self) -> String {
        self.sockets.iter().fold(String::new(), |text, (key, s)| {
            text + &format!("{key} of node{}: {:?} {} -> {}; ", s.node, s.kind, s.local, s.peer)
        })
    }

    fn bytes_come(&mut self, node: usize) {
        let port = &mut self.ports[node];
        if !port.own.is_empty() {
            let nth = self.rng.index(port.own.len());
            (port.own[nth].edge, port.outer) = (true, true);
            port.own[nth].bytes += 1;
        }
    }

    /// Reads all bytes from a descriptor that a program has registered. Returns the number of bytes.
    pub fn read_own(&mut self, node: usize, fd: RawFd) -> u64 {
        let own = self.ports[node].own.iter_mut().find(|own| own.fd == fd);
        own.map_or(0, |own| std::mem::take(&mut own.bytes))
    }

    // The faults of the network.

    fn next_fault(&mut self) {
        if self.faults.every > 0 && !self.calm {
            let after = self.fault_rng.range(1..=2 * self.faults.every);
            self.at(self.now + after, Event::Fault);
        }
    }

    fn fault(&mut self) {
        if self.calm {
            return;
        }
        let kind = self.fault_rng.pick(&self.faults.kinds);
        let longest = self.slowness.as_ref().map_or(2000 * MS, |slowness| slowness.longest);
        let time = self.fault_rng.skewed(MS..=longest);
        if kind == Fault::Pause {
            let node = self.fault_rng.index(self.ports.len());
            let node = self.slowness.as_ref().and_then(|slowness| slowness.node).unwrap_or(node);
            self.pause(node, time);
        } else {
            self.break_link(kind, time);
        }
    }

    /// Ends all faults. Each disturbed link either works again, or its connection ends.
    pub fn heal(&mut self) {
        self.calm = true;
        self.trace.line(self.now, "world", format_args!("is calm from here on"));
        for port in &mut self.ports {
            port.paused -= port.paused_until.saturating_sub(self.now);
            port.paused_until = port.paused_until.min(self.now);
        }
        self.pauses.iter_mut().for_each(|(.., end)| *end = self.now.min(*end));
        self.heal_links();
    }
}
