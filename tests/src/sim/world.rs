//! A simulated world: its nodes, and a scheduler in the place of each program's event loop.
//!
//! A node gets a turn only when a correct event loop would take one: its descriptor has become readable, its deadline has passed, or
//! its last turn has returned `more`. So if the reactor loses a wake-up, the world stalls, and the test fails.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_reactor::{Config, Context, Parts, Reactor, SecurityMode, Stats, Wait};
use rdma_transport::provider::Provider;
use rdma_transport_embedded::iwarp::{CrcPolicy, Iwarp, IwarpConfig, SharedMemoryPolicy};

use crate::conformance::harness::at_home;
use crate::identities::security;
use crate::patience::limited_to;

use super::audit::{Audit, LARGEST, Pair};
use super::fabric::{Fabric, Script, Shared, Tenant, disturbed, let_others_speak, lock};
use super::flow::SETTLE;
use super::hardware::HardwareProvider;
use super::net::SimNet;
use super::poller::{SimClock, SimPoller, virtual_ns};
use super::program::{Program, State, is_quiet};
use super::rng::{Rng, mix};
use super::swarm::{MS, NodeOptions, Options};
use super::threads::{Said, Threads};
use super::trace::Trace;

/// The virtual time within which all work must complete after the last fault, in ns.
const PATIENCE: u64 = 30_000 * MS;
/// The largest number of consecutive turns without progress.
const FUTILE: u64 = 5_000;
/// The largest number of turns in a world.
const TURNS: u64 = 2_000_000;
/// The largest number of turns that a node without work may take in [`IDLE_TIME`]. Some turns are permitted, because an ended connection
/// leaves a few deadlines at which nothing happens.
const IDLE: u64 = 100;
const IDLE_PER_CONNECTION: u64 = 4;
const IDLE_TIME: u64 = 5_000 * MS;

#[derive(Debug)]
struct Node {
    reactor: Option<Reactor<Said>>,
    state: State,
    options: NodeOptions,
    more: bool,
    turns: u64,
}

/// The kind of world.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// The security of all connections.
    pub secured: SecurityMode,
    /// True if all nodes are on one host. Such nodes use the embedded provider, and prefer shared memory.
    pub one_host: bool,
    /// True if the nodes of the one host belong to two users, and some require shared memory or do
    /// not use it.
    pub tenants: bool,
    /// The faults of the world.
    pub faults: Faults,
}

/// The faults of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Faults {
    /// Faults of every kind.
    #[default]
    All,
    /// Only slow nodes.
    Slowness,
    /// Only faults that are detected without pings. The nodes send no pings.
    Unasked,
}

impl Variant {
    /// A network whose connections are not secured.
    pub const PLAIN: Self = Self { secured: SecurityMode::Plain, one_host: false, tenants: false, faults: Faults::All };
}

/// The results of a world in which all promises were kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The hash of the whole history.
    pub hash: u64,
    /// The number of turns of all nodes.
    pub turns: u64,
    /// The number of messages that were delivered.
    pub messages: u64,
    /// The number of one-sided operations that have completed with success.
    pub operations: u64,
    /// The number of bytes that were read from streams.
    pub streamed: u64,
    /// The number of connections that were established.
    pub connections: u64,
    /// The number of times that a node has mapped shared memory.
    pub met: u64,
    /// The number of connects that have failed because the nodes cannot share memory, and one
    /// requires it.
    pub apart: u64,
    /// The virtual time at the end of the world, in ns.
    pub time: u64,
}

/// A simulated world, see the [module](self).
#[derive(Debug)]
pub struct World {
    options: Options,
    fabric: Shared,
    threads: Threads,
    nodes: Vec<Node>,
    audit: Audit,
    rng: Rng,
    futile: u64,
}

/// Returns the number of receives that all connections of a node share, or `None` if each connection has its own receives. Connections
/// share receives only in some worlds, and never in worlds with simulated hardware.
fn shared(seed: u64, node: usize, options: &Options) -> Option<u32> {
    let rng = &mut Rng::new(mix(seed) ^ node as u64, "shared");
    (options.hardware.is_none() && rng.chance(400)).then(|| rng.skewed(8..=64) as u32)
}

/// Returns the length of the longest message that a node sends immediately in several buffers: 0, a random length, or [`LARGEST`].
fn eager(seed: u64, node: usize) -> usize {
    let rng = &mut Rng::new(mix(seed) ^ node as u64, "eager");
    match rng.index(4) {
        0 => 0,
        1 => rng.skewed(1..=LARGEST) as usize,
        _ => LARGEST as usize,
    }
}

/// Returns the user and the policy of a node, in a world in which nodes have different users and
/// policies.
fn tenant(seed: u64, node: usize) -> Tenant {
    let rng = &mut Rng::new(mix(seed) ^ node as u64, "tenant");
    let policies = [SharedMemoryPolicy::Require, SharedMemoryPolicy::Prefer, SharedMemoryPolicy::Off];
    Tenant { user: rng.index(2), policy: policies[rng.index(policies.len())] }
}

fn config(options: &NodeOptions, unheard: u32, shared: Option<u32>, secured: SecurityMode) -> Config {
    let room = options.receive_depth + options.send_depth + 2;
    let time = Duration::from_nanos;
    let config = Config::default();
    let config = match options.steps {
        Some(steps) => limited_to(time(steps), config),
        None => config,
    };
    config
        .wait(match options.spin {
            0 if options.adaptive => Wait::Adaptive,
            0 => Wait::Event,
            spin => Wait::Spin(time(spin)),
        })
        .buffer_size(options.max_message)
        .large_messages(|l| l.max_message = LARGEST)
        .large_messages(|l| l.memory = options.transfer_memory)
        .receive_depth(options.receive_depth)
        .send_depth(options.send_depth)
        .shared_receives(shared)
        .completions(|c| c.queue = Some(options.per_queue * room + shared.unwrap_or(0)))
        .completions(|c| c.per_turn = options.completions_per_turn)
        .fairness(options.fairness.0, options.fairness.1)
        .max_connections(options.max_connections)
        .max_pending(options.max_pending)
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (time(options.keepalive.0), time(options.keepalive.1)))
        .timeouts(|t| t.connect = time(options.connect_timeout))
        .timeouts(|t| t.handshake = time(options.handshake_timeout))
        .timeouts(|t| t.close = time(options.close_timeout))
        .timeouts(|t| t.flush = time(options.flush_timeout))
        .iwarp(|i| i.crc = if options.crc { CrcPolicy::Require } else { CrcPolicy::Off })
        .handle_queue(unheard)
        .security(security(secured))
        .allow_plain_remote_memory(true)
        .max_handshakes_per_peer(Some(options.max_pending as usize))
}

fn provider(seed: u64, node: usize, options: &Options, fabric: &Shared) -> Box<dyn Provider> {
    let mut settings = IwarpConfig::default();
    settings.crc = if options.nodes[node].crc { CrcPolicy::Require } else { CrcPolicy::Off };
    settings.extensions = options.extensions;
    let steps = options.nodes[node].steps.map(Duration::from_nanos);
    if let Some(steps) = steps {
        (settings.request_timeout, settings.accept_timeout, settings.ready_timeout) = (steps, steps, steps);
    }
    let budget = &mut Rng::new(mix(seed) ^ node as u64, "receive budget");
    if budget.chance(300) {
        // With a small receive budget, a poll often leaves received bytes in the socket.
        settings.receive_budget = budget.skewed(1..=64 << 10) as usize;
    }
    if lock(fabric).one_host {
        let slow = options.slowness.is_some();
        let requires = slow && Rng::new(mix(seed), "policy").chance(500);
        let usual = if requires { SharedMemoryPolicy::Require } else { SharedMemoryPolicy::Prefer };
        settings.shared_memory = lock(fabric).tenants.get(node).map_or(usual, |tenant| tenant.policy);
        let patience = &mut Rng::new(mix(seed) ^ node as u64, "meeting");
        // In slow worlds, and if nodes may require shared memory, this timeout must be longer than
        // the delays of the network.
        let shortest = if slow || !lock(fabric).tenants.is_empty() { 100 * MS } else { 10_000 };
        settings.within_host.meeting_timeout = Duration::from_nanos(patience.skewed(shortest..=200 * MS));
    }
    let mut entropy = Rng::new(mix(seed) ^ node as u64, "entropy");
    let net = SimNet::new(node, Arc::clone(fabric));
    let iwarp = Iwarp::new(settings, net, Box::new(move |bytes: &mut [u8]| entropy.fill(bytes)));
    let iwarp = iwarp.expect("the default settings are in range");
    match &options.hardware {
        None => Box::new(iwarp),
        Some(hardware) => {
            let rng = Rng::new(mix(seed) ^ node as u64, "hardware");
            Box::new(HardwareProvider::new(iwarp, node, Arc::clone(fabric), hardware.clone(), rng))
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.threads.disperse();
    }
}

impl World {
    /// Returns the world with this seed, of this kind. Keeps the last `keep` lines of its history as text.
    ///
    /// # Panics
    /// Panics if a reactor refuses valid settings.
    #[must_use]
    pub fn new(seed: u64, keep: usize, variant: Variant) -> Self {
        let mut options = Options::draw(seed);
        if variant.one_host {
            options.hardware = None;
        }
        options = match variant.faults {
            Faults::All => options,
            Faults::Slowness => options.slow(seed),
            Faults::Unasked => options.unasked(),
        };
        let options = options;
        let mut trace = Trace::new(keep);
        trace.line(0, "world", format_args!("{options:?}"));
        let mut fabric = Fabric::new(seed, options.nodes.len(), options.net.clone(), options.faults.clone(), trace);
        fabric.one_host = variant.one_host;
        if variant.tenants {
            fabric.tenants = (0..options.nodes.len()).map(|node| tenant(seed, node)).collect();
        }
        fabric.slowness.clone_from(&options.slowness);
        fabric.limits = options.nodes.iter().map(NodeOptions::limits).collect();
        fabric.forgetful = options.hardware.as_ref().is_some_and(|hardware| hardware.never > 0);
        if options.hardware.as_ref().is_some_and(|hardware| !hardware.extensions) {
            fabric.slow_to_hear = options.nodes.iter().map(|node| node.keepalive.1).collect();
        }
        let threads = fabric.threads();
        let fabric = Arc::new(Mutex::new(fabric));
        // The number of receives that a node grants at first varies in two cases: shared receives
        // are granted as connections use them, and the handshake of a secured connection uses
        // credits.
        let varies = |node| variant.secured != SecurityMode::Plain || shared(seed, node, &options).is_some();
        let depths = options.nodes.iter().map(|node| node.receive_depth).enumerate();
        let windows: Vec<u32> = depths.map(|(node, depth)| if varies(node) { 0 } else { depth }).collect();
        let node = |node: usize| {
            let unheard = options.work.unheard;
            let parts = Parts {
                providers: vec![provider(seed, node, &options, &fabric)],
                poller: Box::new(SimPoller::new(node, Arc::clone(&fabric))),
                clock: Box::new(SimClock(Arc::clone(&fabric))),
            };
            let reactor = Reactor::with_parts(
                config(&options.nodes[node], unheard, shared(seed, node, &options), variant.secured)
                    .large_messages(|l| l.eager_limit = eager(seed, node))
                    .quiet_sends(is_quiet(seed, node)),
                parts,
            );
            let reactor = reactor.expect("settings in range");
            threads.listen(reactor.handle(), unheard);
            let (work, fabric) = (&options.work, Arc::clone(&fabric));
            let mut state = State::new(seed, node, &options.nodes, work, fabric, threads.clone());
            state.windows.clone_from(&windows);
            Node { reactor: Some(reactor), state, options: options.nodes[node].clone(), more: true, turns: 0 }
        };
        let nodes = (0..options.nodes.len()).map(node).collect();
        Self { nodes, fabric, threads, audit: Audit::default(), rng: Rng::new(seed, "world"), options, futile: 0 }
    }

    /// Returns the network. It has the history of the world.
    #[must_use]
    pub fn fabric(&self) -> Shared {
        Arc::clone(&self.fabric)
    }

    fn now(&self) -> u64 {
        lock(&self.fabric).now()
    }

    /// Calls a function of a node's program between two turns. The node then gets a turn.
    fn outside(&mut self, node: usize, act: impl FnOnce(&mut Program<'_>, &mut Context<'_>)) {
        let Node { reactor: Some(reactor), state, more, .. } = &mut self.nodes[node] else { return };
        *more = true;
        act(&mut Program { state, audit: &mut self.audit }, &mut reactor.context());
    }

    /// Runs the world to its end. Returns the results.
    ///
    /// # Errors
    /// A promise was broken. The error is the first one.
    pub fn run(&mut self) -> Result<Report, String> {
        self.plan();
        let end = self.options.chaos;
        self.until("chaos", end, |_| false)?;
        lock(&self.fabric).heal();
        for node in 0..self.nodes.len() {
            self.outside(node, |program, cx| program.settle(cx));
            self.settle_streams(node);
        }
        let end = self.now() + PATIENCE;
        let slow = self.options.slowness.is_some();
        let settled = |&(&cookie, pair): &(&u64, &Pair)| {
            pair.is_over() || pair.is_settled(cookie) || slow && pair.waits_for_its_closes()
        };
        if !self.until("settling", end, |world| world.audit.pairs.iter().all(|entry| settled(&entry)))? {
            return Err(format!("no progress: {}", self.audit.unsettled(settled)));
        }
        self.close_all();
        let end = self.now() + PATIENCE;
        let over = |&(_, pair): &(&u64, &Pair)| pair.is_over();
        if !self.until("closing", end, |world| world.audit.pairs.iter().all(|entry| over(&entry)))? {
            return Err(format!("not closed: {}", self.audit.unsettled(over)));
        }
        for node in 0..self.nodes.len() {
            self.look(node, true);
            self.settle_streams(node);
            self.outside(node, |program, _| program.drop_regions());
        }
        for node in 0..self.nodes.len() {
            self.outside(node, |program, cx| program.cancel_timers(cx));
        }
        self.quiesce()
    }

    /// Reads and writes all streams of a node to their ends.
    fn settle_streams(&mut self, node: usize) {
        self.outside(node, |program, cx| {
            program.state.streams.handler.calm = true;
            cx.timers().set(Duration::ZERO, SETTLE);
        });
    }

    /// Checks the memory of a node. If `all` is false, checks only what may have changed.
    fn look(&mut self, node: usize, all: bool) {
        let Node { reactor: Some(_), state, .. } = &mut self.nodes[node] else { return };
        Program { state, audit: &mut self.audit }.look_at_memory(all);
    }

    /// Schedules the random actions of the world for the time with faults.
    fn plan(&mut self) {
        for node in 0..self.nodes.len() {
            self.outside(node, |program, cx| program.listen(cx));
        }
        let chaos = self.options.chaos;
        let mut fabric = lock(&self.fabric);
        for _ in 0..self.options.work.connections {
            let (at, node) = (self.rng.range(0..=chaos * 7 / 10), self.rng.index(self.nodes.len()));
            fabric.schedule(at, Script::Open(node));
        }
        for _ in 0..self.rng.below(20) {
            let (at, node) = (self.rng.range(0..=chaos), self.rng.index(self.nodes.len()));
            fabric.schedule(at, Script::Release(node));
        }
        for _ in 0..self.rng.below(30) {
            let (at, node) = (self.rng.range(0..=chaos), self.rng.index(self.nodes.len()));
            fabric.schedule(at, Script::Bytes(node));
        }
        for _ in 0..self.options.work.said {
            let (at, node) = (self.rng.range(0..=chaos), self.rng.index(self.nodes.len()));
            fabric.schedule(at, Script::Speak(node));
        }
        if self.rng.chance(100) && self.options.slowness.is_none() {
            let (at, node) = (self.rng.range(0..=chaos), self.rng.index(self.nodes.len()));
            fabric.schedule(at, Script::Kill(node));
        }
    }

    fn close_all(&mut self) {
        let slow = self.options.slowness.is_some();
        for node in 0..self.nodes.len() {
            let both = self.rng.chance(400);
            let live: Vec<_> =
                self.nodes[node].state.live.iter().map(|(&id, &(cookie, side))| (id, cookie, side)).collect();
            self.outside(node, |program, cx| {
                program.close_listener(cx);
                for (id, cookie, side) in live {
                    let pair = &program.audit.pairs[&cookie];
                    let mine = (cookie >> 4) % 2 == side as u64;
                    if both || mine || !pair.is_open() {
                        program.close(cx, id);
                    }
                    if slow && program.audit.pairs[&cookie].waits_for_its_closes() {
                        cx.abort(id);
                    }
                }
            });
        }
    }

    fn kill(&mut self, node: usize) {
        if let Some(reactor) = self.nodes[node].reactor.take() {
            let mut fabric = lock(&self.fabric);
            fabric.note(node, format_args!("its reactor is dropped"));
            fabric.disturb_all(node, disturbed::CUT);
            fabric.note_listening(node, false);
            drop(fabric);
            for pair in self.audit.pairs.values_mut() {
                for end in pair.ends.iter_mut().filter(|end| end.node == node) {
                    end.killed = true;
                    end.ended.get_or_insert_with(|| "killed".into());
                }
            }
            self.nodes[node].state.live.clear();
            drop(reactor);
            self.threads.gone(node);
            self.nodes[node].state.release(true);
            let Node { state, .. } = &mut self.nodes[node];
            Program { state, audit: &mut self.audit }.forget_regions();
        }
    }

    fn script(&mut self) {
        let_others_speak(&self.fabric);
        loop {
            let next = lock(&self.fabric).next_script();
            match next {
                None => return,
                Some(Script::Open(node)) => self.outside(node, |program, cx| program.open(cx)),
                // This action simulates another thread that releases messages. The world gives the node no turn because of it, so the
                // reactor must wake itself.
                Some(Script::Release(node)) => self.nodes[node].state.release(false),
                Some(Script::Kill(node)) => self.kill(node),
                Some(Script::Tick | Script::Speak(_) | Script::Bytes(_)) => {}
            }
        }
    }

    /// Runs the world until `done` returns true, or until the time `end`. Returns true if `done` has returned true.
    fn until(&mut self, phase: &str, end: u64, done: impl Fn(&Self) -> bool) -> Result<bool, String> {
        lock(&self.fabric).trace.line(end, "world", format_args!("{phase} until then"));
        loop {
            self.script();
            if let Some(violation) = lock(&self.fabric).violations.first() {
                return Err(violation.clone());
            }
            if done(self) {
                return Ok(true);
            }
            if self.now() >= end {
                return Ok(false);
            }
            self.step(end)?;
        }
    }

    /// Gives one turn to one node, or advances the time.
    fn step(&mut self, end: u64) -> Result<(), String> {
        let now = self.now();
        let mut runnable = [0_usize; 8];
        let mut count = 0;
        let mut next = end;
        for (i, node) in self.nodes.iter_mut().enumerate() {
            let Some(reactor) = &mut node.reactor else { continue };
            let mut fabric = lock(&self.fabric);
            let paused = fabric.paused_until(i);
            let ready = fabric.is_runnable(i, node.options.level);
            drop(fabric);
            let deadline = reactor.next_deadline().map_or(u64::MAX, virtual_ns);
            let at = if ready || node.more { now } else { deadline }.max(paused);
            if at <= now {
                runnable[count] = i;
                count += 1;
            }
            next = next.min(at);
        }
        if count > 0 {
            let node = runnable[self.rng.index(count)];
            return self.turn(node);
        }
        self.futile = 0;
        let mut fabric = lock(&self.fabric);
        for (i, node) in self.nodes.iter().enumerate() {
            if node.reactor.is_some() && fabric.paused_until(i) <= now {
                if let Some(what) = fabric.asleep_on(i) {
                    return Err(format!("node{i} sleeps in spite of {what}"));
                }
            }
            if node.reactor.is_some() && fabric.paused_until(i) <= now && self.threads.unheard(i) > 0 {
                return Err(format!("node{i} sleeps, and has not received a message of another thread"));
            }
        }
        let next = fabric.next().map_or(next, |at| at.min(next));
        fabric.advance(next.max(now + 1));
        Ok(())
    }

    fn turn(&mut self, node: usize) -> Result<(), String> {
        let Node { reactor: Some(reactor), state, options, more, turns } = &mut self.nodes[node] else {
            return Ok(());
        };
        let mut fabric = lock(&self.fabric);
        fabric.seen(node);
        fabric.running = Some(node);
        let rings = fabric.take_rings(node);
        drop(fabric);
        if rings > 1 {
            return Err(format!("node{node} was woken {rings} times for one turn"));
        }
        let longest = if options.spin > 0 { options.spin } else { u64::from(options.adaptive) * 50_000 };
        let timeout = if longest > 0 && self.rng.chance(500) { longest } else { 0 };
        let mut program = Program { state, audit: &mut self.audit };
        let turn = reactor.turn(&mut program, Some(Duration::from_nanos(timeout)));
        let turn = turn.map_err(|error| format!("node{node}: the turn failed: {error}"))?;
        *turns += 1;
        program.look_at_memory(false);
        let rings = lock(&self.fabric).take_rings(node);
        if rings > 3 {
            return Err(format!("node{node} was woken {rings} times in one turn"));
        }
        // A loop that watches the descriptor edge-triggered may ignore `more`, because a reactor that returns `more` also makes its
        // descriptor readable.
        *more = turn.more && options.level;
        let dropped = reactor.stats().connections;
        let mut fabric = lock(&self.fabric);
        fabric.running = None;
        fabric.note_dropped(node, &dropped);
        fabric.note(node, format_args!("{turn:?}"));
        drop(fabric);
        self.futile = if turn.progressed { 0 } else { self.futile + 1 };
        if self.futile > FUTILE {
            return Err(format!("node{node} runs turns without progress"));
        }
        if *turns > TURNS {
            return Err(format!("node{node} ran {turns} turns"));
        }
        Ok(())
    }

    /// Checks the world after all connections were closed: no object may remain, nothing more may happen, and all promises must have been
    /// kept.
    fn quiesce(&mut self) -> Result<Report, String> {
        let end = self.now() + PATIENCE;
        if !self.until("lingering", end, |world| lock(&world.fabric).sockets() == 0)? {
            return Err(format!("sockets are left: {}", lock(&self.fabric).describe_sockets()));
        }
        let before: Vec<u64> = self.nodes.iter().map(|node| node.turns).collect();
        let end = self.now() + IDLE_TIME;
        self.until("idle", end, |_| false)?;
        for (i, node) in self.nodes.iter_mut().enumerate() {
            let Some(reactor) = &mut node.reactor else { continue };
            let (all, free) = reactor.pool_levels();
            let Stats { connections, memory, .. } = reactor.stats();
            let (kept, counted) =
                (lock(&self.fabric).ports[i].hardware.refused(), (connections.undestroyed, memory.unreleased));
            if kept != counted {
                return Err(format!(
                    "node{i}: the device has kept {kept:?} queue pairs and registrations: {counted:?}"
                ));
            }
            // If a device has refused to release a queue pair, the buffers of that queue pair do not return to their pools, so this check
            // is skipped.
            let whole = connections.undestroyed == 0;
            if whole && all != free {
                return Err(format!("node{i}: {} of {all} buffers were never returned", all - free));
            }
            if whole && !at_home(reactor) {
                return Err(format!("node{i}: shared receives are still claimed: {:?}", reactor.stats()));
            }
            let regions = reactor.stats().memory.regions;
            if whole && regions > 0 {
                return Err(format!("node{i}: {regions} regions are left"));
            }
            let unflushed = reactor.stats().connections.unflushed;
            // Simulated hardware may flush late or never, so this check is only for worlds without it.
            if unflushed > 0 && self.options.hardware.is_none() {
                return Err(format!("node{i}: {unflushed} connections were never flushed"));
            }
            let left = reactor.context().connections();
            if left > 0 {
                return Err(format!("node{i}: {left} connections are left"));
            }
            if node.turns - before[i] > IDLE + IDLE_PER_CONNECTION * self.audit.pairs.len() as u64 {
                return Err(format!("node{i}: {} turns while idle", node.turns - before[i]));
            }
        }
        for node in &mut self.nodes {
            node.reactor = None;
        }
        let mut fabric = lock(&self.fabric);
        if fabric.sockets() > 0 {
            return Err(format!("sockets outlived their reactors: {}", fabric.describe_sockets()));
        }
        self.audit.judge(&mut fabric);
        if let Some(violation) = fabric.violations.first() {
            return Err(violation.clone());
        }
        Ok(Report {
            hash: fabric.trace.hash(),
            turns: self.nodes.iter().map(|node| node.turns).sum(),
            messages: self.audit.messages,
            operations: self.audit.operations,
            streamed: self.audit.streamed,
            connections: self.audit.connected,
            met: fabric.met / 2,
            apart: self.audit.apart,
            time: fabric.now(),
        })
    }
}
