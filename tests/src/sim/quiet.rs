//! A simulated network without faults, for tests that decide themselves what happens. Nodes run on virtual time. Each node gets a turn when
//! it is due.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_reactor::aio::AsyncReactor;
use rdma_reactor::{Config, ConnectError, ConnectionId, Context, Error, Handler, Message, Parts, Reactor};
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig, SharedMemoryPolicy};

use super::fabric::{Fabric, Shared, lock};
use crate::forward::Forward;
use crate::gate::Gate;
use crate::gate::net::GatedNet;
use crate::gate::poller::GatedPoller;

use super::net::SimNet;
use super::poller::{SimClock, SimPoller, virtual_ns};
use super::rng::Rng;
use super::swarm::{FaultOptions, MS, NetOptions};
use super::trace::Trace;

/// The largest number of steps in a test.
const STEPS: u64 = 10_000_000;

/// Returns a network of `nodes` nodes.
#[must_use]
pub fn network(nodes: usize) -> Shared {
    network_of(nodes, 1448)
}

/// Returns a network of `nodes` nodes, with TCP segments of `segment` bytes.
#[must_use]
pub fn network_of(nodes: usize, segment: usize) -> Shared {
    network_with(nodes, segment, (20_000, 20_000))
}

/// Returns a network of `nodes` nodes. The length of TCP segments and the latencies depend on
/// `schedule`.
#[must_use]
pub fn network_of_schedule(nodes: usize, schedule: u64) -> Shared {
    let mut rng = Rng::new(schedule, "schedule");
    let segment = usize::try_from(rng.range(200..=9000)).expect("a length");
    let longest = rng.skewed(1_000..=10 * MS);
    network_with(nodes, segment, (1_000.min(longest), longest))
}

fn network_with(nodes: usize, segment: usize, latency: (u64, u64)) -> Shared {
    let net = NetOptions {
        segment,
        latency,
        buffer: 1 << 20,
        short_write: 0,
        interrupted: 0,
        shred: 0,
        spurious: 0,
        poll_cut: 0,
        exhausted: 0,
        lost_connect: 0,
        tick: 100,
    };
    let faults = FaultOptions { every: 0, kinds: Vec::new() };
    Arc::new(Mutex::new(Fabric::new(1, nodes, net, faults, Trace::new(0))))
}

/// Returns the source of a node's random numbers. They are the same in every run.
#[must_use]
pub fn entropy(node: usize) -> rdma_reactor::Entropy {
    let mut rng = Rng::new(node as u64, "entropy");
    Box::new(move |bytes: &mut [u8]| rng.fill(bytes))
}

/// Returns the default settings of the embedded provider. Nodes of one host prefer shared memory.
fn iwarp_config(fabric: &Shared) -> IwarpConfig {
    let mut config = IwarpConfig::default();
    if lock(fabric).one_host {
        config.shared_memory = SharedMemoryPolicy::Prefer;
    }
    config
}

/// Returns the parts of which a node's reactor is made: the embedded provider over simulated sockets, a poller and a clock.
///
/// # Panics
/// Panics if the default settings are refused.
#[must_use]
pub fn parts(node: usize, fabric: &Shared) -> Parts {
    let net = SimNet::new(node, Arc::clone(fabric));
    let provider = Iwarp::new(iwarp_config(fabric), net, entropy(node)).expect("default settings");
    Parts {
        providers: vec![Box::new(provider)],
        poller: Box::new(SimPoller::new(node, Arc::clone(fabric))),
        clock: Box::new(SimClock(Arc::clone(fabric))),
    }
}

/// Returns the reactor of a node.
///
/// # Panics
/// Panics if a setting is out of its range.
#[must_use]
pub fn reactor(node: usize, fabric: &Shared, config: Config) -> Reactor {
    Reactor::with_parts(config, parts(node, fabric)).expect("settings in range")
}

/// Returns the reactor of a node. A gate can let calls of its provider, its sockets and its poller fail.
///
/// # Errors
/// The first call that the gate lets fail.
///
/// # Panics
/// Panics if the default settings of the provider are refused.
pub fn gated(node: usize, fabric: &Shared, gate: &Gate, config: Config) -> Result<Reactor, Error> {
    let net = GatedNet::new(SimNet::new(node, Arc::clone(fabric)), gate.clone());
    let inner = Iwarp::new(iwarp_config(fabric), net, entropy(node)).expect("default settings");
    let parts = Parts {
        providers: vec![Box::new(Forward::gated(Box::new(inner), gate.clone()))],
        poller: Box::new(GatedPoller::new(SimPoller::new(node, Arc::clone(fabric)), gate.clone())),
        clock: Box::new(SimClock(Arc::clone(fabric))),
    };
    Reactor::with_parts(config, parts)
}

/// A node: its reactor, and its handler.
#[allow(missing_debug_implementations, reason = "a program is anything")]
pub struct Node {
    /// The reactor of the node.
    pub reactor: Reactor,
    /// The handler of the node.
    pub handler: Box<dyn Handler>,
    /// True if the last turn of the node has left work to do.
    pub more: bool,
    /// True if the node takes no turns.
    pub dead: bool,
}

impl Node {
    /// Returns a node whose first turn is due.
    #[must_use]
    pub fn new(reactor: Reactor, handler: Box<dyn Handler>) -> Self {
        Self { reactor, handler, more: true, dead: false }
    }
}

/// Gives one turn to each node that is due. If none is due, advances the time to the next event, or by a millisecond if no event is
/// scheduled.
///
/// # Errors
/// The first turn that has failed, with the number of its node. The node stays due, and the following nodes have had no turn.
pub fn step(fabric: &Shared, nodes: &mut [Node]) -> Result<(), (usize, Error)> {
    let now = lock(fabric).now();
    let mut idle = true;
    let mut next = lock(fabric).next();
    for (index, node) in nodes.iter_mut().enumerate().filter(|(_, node)| !node.dead) {
        let due = node.reactor.next_deadline().map(virtual_ns);
        if node.more || lock(fabric).is_runnable(index, true) || due.is_some_and(|due| due <= now) {
            lock(fabric).seen(index);
            node.more = true;
            node.more = node.reactor.turn(&mut *node.handler, Duration::ZERO).map_err(|error| (index, error))?.more;
            idle = false;
        }
        next = next.into_iter().chain(due).min();
    }
    if idle {
        lock(fabric).advance(next.map_or(now + MS, |next| next.max(now + 1)));
    }
    Ok(())
}

/// Takes steps until `done` returns true.
///
/// # Panics
/// Panics if a turn fails, or if `done` does not return true within ten million steps.
pub fn until(fabric: &Shared, nodes: &mut [Node], what: &str, mut done: impl FnMut(&[Node]) -> bool) {
    for _ in 0..STEPS {
        if done(nodes) {
            return;
        }
        step(fabric, nodes).unwrap_or_else(|(node, error)| panic!("{what}: a turn of node {node}: {error}"));
    }
    panic!("not in {STEPS} steps: {what}");
}

/// Runs turns of the reactors whose descriptors are readable, one turn of each. If no descriptor is readable, advances the time to the next
/// event of the network. Returns false if there is no event either. The index of a reactor is the number of its node. The caller polls the
/// futures of the reactors.
///
/// # Panics
/// Panics if a turn fails.
pub fn step_futures(fabric: &Shared, nets: &[AsyncReactor]) -> bool {
    let mut idle = true;
    for (node, net) in nets.iter().enumerate() {
        if lock(fabric).is_runnable(node, true) {
            net.turn(Duration::ZERO).unwrap_or_else(|error| panic!("a turn of node {node}: {error}"));
            idle = false;
        }
    }
    let next = lock(fabric).next();
    match next {
        _ if !idle => true,
        Some(at) => {
            lock(fabric).advance(at);
            true
        }
        None => false,
    }
}

/// Takes steps until no descriptor is readable, and no event of the network is left. Timers that expire later do not count.
///
/// # Panics
/// Panics if a turn fails, or if there is still something to do after ten million steps.
pub fn settle(fabric: &Shared, nets: &[AsyncReactor]) {
    let steps = (0..STEPS).take_while(|_| step_futures(fabric, nets)).count() as u64;
    assert!(steps < STEPS, "not settled in {STEPS} steps");
}

/// A handler that counts its messages. Clones share the same number.
#[derive(Clone, Debug, Default)]
pub struct Counts(pub Rc<Cell<u32>>);

impl Handler for Counts {
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {
        self.0.set(self.0.get() + 1);
    }
}

/// A handler that records the results of connects. Clones share the same records.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    /// The connections that were established.
    pub up: Rc<RefCell<Vec<ConnectionId>>>,
    /// The errors of the connects that have failed.
    pub errors: Rc<RefCell<Vec<ConnectError>>>,
}

impl Handler for Attempts {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.up.borrow_mut().push(conn);
    }
    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.errors.borrow_mut().push(error);
    }
}
