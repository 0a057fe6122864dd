//! An honest client in a simulated world, which requests echoes from its server. It measures the time of its echoes while other clients
//! disturb the server.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use rdma_reactor::{
    Config, ConnectionId, Context, Handler, Message, Region, RegionOptions, RemoteRegion, SendErrorKind, Stats,
};

use super::fabric::{Shared, lock};
use super::poller::virtual_ns;
use super::quiet::{Node, network, reactor, step};
use super::tcp::address;

const PINGS: usize = 400;
/// The number of echoes that the honest client gets before the other clients connect. These echoes are not measured.
const EARLY: usize = 20;
/// The virtual time that the server's callback takes, in ns.
const WORK: u64 = 1_000;
/// The number of steps within which all echoes must arrive.
const STEPS: u64 = 5_000_000;

/// The handler of the server. It echoes messages of 8 bytes. For every message, its callback takes `WORK` ns of virtual time.
#[allow(missing_debug_implementations, reason = "the fabric has no short form")]
pub struct Server(pub Shared);

impl Handler for Server {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let mut fabric = lock(&self.0);
        let done = fabric.now() + WORK;
        fabric.advance(done);
        drop(fabric);
        if message.len() == 8 {
            // The result is ignored: a client that never grants a credit gets no echo.
            let _ = cx.send(conn, &message);
        }
    }
}

/// The handler of the honest client, which has one message in flight. The list has the times from each message to its echo, in ns. The
/// number is the virtual time at which the last message was sent, in ns.
#[derive(Clone, Debug, Default)]
pub struct Ping(Rc<RefCell<Vec<u64>>>, u64);

impl Handler for Ping {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.1 = virtual_ns(cx.now());
        cx.send(conn, &[0; 8]).expect("room");
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: Message<'_>) {
        let now = virtual_ns(cx.now());
        self.0.borrow_mut().push(now - self.1);
        self.on_connect(cx, conn);
    }
}

/// The handler of a client that sends messages without pause.
#[derive(Clone, Copy, Debug)]
pub struct Flood;

impl Handler for Flood {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.on_writable(cx, conn);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        while !matches!(cx.send(conn, &[7; 64]), Err(SendErrorKind::WouldBlock(_))) {}
    }
}

/// The handler of a client that posts RDMA Writes of zero bytes without pause. They need neither a credit nor a right.
#[derive(Debug, Default)]
pub struct EmptyWrites(Option<Region>);

impl Handler for EmptyWrites {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.0 = Some(cx.regions().register(conn, 8, &RegionOptions::new()).expect("a region"));
        self.on_writable(cx, conn);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let nowhere = RemoteRegion { address: 0, len: 0, key: 0 };
        let local = self.0.as_ref().expect("it is connected");
        while !matches!(cx.remote(conn).write(nowhere, local, 0..0), Err(SendErrorKind::WouldBlock(_))) {}
    }
}

/// A simulated world with a server, its honest client, and other clients.
#[allow(missing_debug_implementations, reason = "a program is anything")]
pub struct Street {
    /// The network of the world.
    pub fabric: Shared,
    /// The nodes: first the server, then the honest client, then the others.
    pub nodes: Vec<Node>,
    times: Ping,
}

impl Street {
    /// Returns a world whose server has this handler. The honest client has begun to connect. Four more nodes can be added.
    ///
    /// # Panics
    /// Panics if a setting is out of range.
    #[must_use]
    pub fn new(config: &Config, server: impl FnOnce(&Shared) -> Box<dyn Handler>) -> Self {
        let (fabric, times) = (network(6), Ping::default());
        let server = server(&fabric);
        let mut nodes = vec![
            Node::new(reactor(0, &fabric, config.clone()), server),
            Node::new(reactor(1, &fabric, config.clone()), Box::new(times.clone())),
        ];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        nodes[1].reactor.context().connect(address(0, 7471)).expect("a peer");
        Self { fabric, nodes, times }
    }

    /// Returns a world whose server echoes.
    #[must_use]
    pub fn echoing(config: &Config) -> Self {
        Self::new(config, |fabric| Box::new(Server(Arc::clone(fabric))))
    }

    /// Adds another client, and begins to connect it.
    ///
    /// # Panics
    /// Panics if a setting is out of range.
    pub fn add(&mut self, config: &Config, handler: Box<dyn Handler>) {
        let mut node = Node::new(reactor(self.nodes.len(), &self.fabric, config.clone()), handler);
        node.reactor.context().connect(address(0, 7471)).expect("a peer");
        self.nodes.push(node);
    }

    /// Runs all nodes until all echoes have arrived. Calls `act` whenever `pause` ns of virtual time have passed. Returns the 99th
    /// percentile of the times of the echoes, in ns.
    ///
    /// # Panics
    /// Panics if a turn fails, or if the echoes do not arrive.
    pub fn p99(&mut self, pause: u64, act: impl FnMut(&mut [Node])) -> u64 {
        self.until(PINGS, pause, act);
        let mut times = self.times.0.borrow_mut().split_off(EARLY);
        times.sort_unstable();
        times[times.len() * 99 / 100]
    }

    /// Runs all nodes until `echoes` echoes have arrived. Calls `act` whenever `pause` ns of virtual time have passed.
    ///
    /// # Panics
    /// Panics if a turn fails, or if the echoes do not arrive.
    pub fn until(&mut self, echoes: usize, pause: u64, mut act: impl FnMut(&mut [Node])) {
        let mut next = 0;
        for _ in 0..STEPS {
            if self.times.0.borrow().len() >= echoes {
                return;
            }
            let now = lock(&self.fabric).now();
            if now >= next {
                act(&mut self.nodes);
                next = now.saturating_add(pause);
            }
            step(&self.fabric, &mut self.nodes).unwrap_or_else(|(node, error)| panic!("node {node}: {error}"));
        }
        panic!("{} echoes in {STEPS} steps", self.times.0.borrow().len());
    }

    /// Returns the counters of the server.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.nodes[0].reactor.stats()
    }
}
