//! Discovery by datagrams. Each node announces itself to a registry, again and again, and gets the
//! list of all nodes as the answer. Nodes that have learned of each other connect and exchange a
//! message. A node that leaves is not announced any more, so it expires.
//!
//! The registry and each node have their own thread and reactor. Here the registry ignores the
//! first announcement of each node, as if it had been lost.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, Datagram, DatagramHandler, DisconnectReason, EndpointId,
    EndpointOptions, Handler, Message, Origin, PeerId, ProviderChoice, Reactor, SendErrorKind, TimerId,
};

type Failure = Box<dyn Error + Send + Sync>;

const NODES: u32 = 4;
/// The node that leaves first, when it has talked to all others.
const LEAVER: u32 = 4;
/// The time between two announcements of a node.
const PERIOD: Duration = Duration::from_millis(30);
/// The time after which a node without announcements expires.
const LIFETIME: Duration = Duration::from_millis(300);
const TIME_LIMIT: Duration = Duration::from_secs(300);

/// The tokens of the timers of a node.
const ANNOUNCE: u64 = 0;
const GIVE_UP: u64 = 1;

/// An entry of the registry.
struct Entry {
    /// The address at which the node listens for connections.
    service: SocketAddr,
    origin: Origin,
    peer: PeerId,
    announced: Instant,
}

#[derive(Default)]
struct Registry {
    nodes: BTreeMap<u32, Entry>,
    /// The nodes whose first announcement was ignored.
    ignored: BTreeSet<u32>,
    expired: Vec<u32>,
}

impl Registry {
    /// Handles an announcement, which has the name of the node and its address, and answers it.
    fn announced(&mut self, cx: &mut Context<'_>, here: EndpointId, datagram: &Datagram<'_>) -> Option<()> {
        let (name, service) = parse(std::str::from_utf8(datagram).ok()?)?;
        if self.ignored.insert(name) {
            return None;
        }
        let (origin, announced) = (datagram.origin(), cx.now());
        let peer = match self.nodes.get(&name) {
            Some(entry) if entry.origin == origin => entry.peer,
            _ => cx.datagrams().peer_of(here, &origin).ok()?,
        };
        let old = self.nodes.insert(name, Entry { service, origin, peer, announced });
        if let Some(old) = old.filter(|old| old.peer != peer) {
            // The node has started again.
            cx.datagrams().forget_peer(old.peer);
        }
        let lines = self.nodes.iter().map(|(name, entry)| format!("{name} {}\n", entry.service));
        // The list of a few nodes fits into a datagram. An answer that is refused or lost is
        // repeated, because the node announces itself again.
        let _ = cx.datagrams().send(here, peer, lines.collect::<String>().as_bytes());
        Some(())
    }
}

/// Parses a line: the name of a node, and its address.
fn parse(line: &str) -> Option<(u32, SocketAddr)> {
    let (name, service) = line.split_once(' ')?;
    Some((name.parse().ok()?, service.parse().ok()?))
}

impl Handler for Registry {
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let now = cx.now();
        self.nodes.retain(|&name, entry| {
            let expired = now.duration_since(entry.announced) > LIFETIME;
            if expired {
                cx.datagrams().forget_peer(entry.peer);
                self.expired.push(name);
            }
            !expired
        });
        cx.timers().set(PERIOD, 0);
    }

    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        Some(self)
    }
}

impl DatagramHandler for Registry {
    fn on_datagram(&mut self, cx: &mut Context<'_>, here: EndpointId, datagram: Datagram<'_>) {
        // Anybody may send datagrams: those that are not understood are ignored.
        let _ = self.announced(cx, here, &datagram);
    }
}

struct Node {
    name: u32,
    /// The address at which this node listens for connections.
    service: SocketAddr,
    here: EndpointId,
    /// The registry, when it has been found.
    registry: Option<PeerId>,
    announcements: u32,
    /// The nodes of the registry's last answer.
    listed: BTreeSet<u32>,
    /// The nodes to which this node has opened a connection.
    called: BTreeMap<ConnectionId, u32>,
    /// The nodes whose message has arrived.
    talked: BTreeSet<u32>,
    failed: Option<String>,
}

impl Node {
    fn fail(&mut self, cx: &mut Context<'_>, error: impl std::fmt::Display) {
        self.failed.get_or_insert(format!("node {}: {error}", self.name));
        cx.stop();
    }

    fn announce(&mut self, cx: &mut Context<'_>) {
        let Some(registry) = self.registry else {
            return;
        };
        let text = format!("{} {}", self.name, self.service);
        match cx.datagrams().send(self.here, registry, text.as_bytes()) {
            Ok(_) => self.announcements += 1,
            // The next timer tries again.
            Err(SendErrorKind::WouldBlock(_)) => {}
            Err(error) => self.fail(cx, error),
        }
    }

    /// Opens connections to the nodes with higher names: so two nodes have one connection.
    fn connect(&mut self, cx: &mut Context<'_>, nodes: &BTreeMap<u32, SocketAddr>) {
        for (&name, &service) in nodes.range(self.name + 1..) {
            if self.called.values().all(|&called| called != name) {
                match cx.connect(service) {
                    Ok(conn) => drop(self.called.insert(conn, name)),
                    Err(error) => self.fail(cx, error),
                }
            }
        }
    }

    /// Returns true if this node has nothing left to do. The leaver does not wait; the others wait
    /// until it has expired.
    fn is_done(&self) -> bool {
        self.talked.len() as u32 == NODES - 1 && (self.name == LEAVER || !self.listed.contains(&LEAVER))
    }
}

impl Handler for Node {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Err(error) = cx.send(conn, &self.name.to_le_bytes()) {
            self.fail(cx, error);
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let Some(name) = message.first_chunk().map(|bytes| u32::from_le_bytes(*bytes)) else {
            return self.fail(cx, "a message without a name");
        };
        if self.called.get(&conn).is_some_and(|&called| called != name) {
            return self.fail(cx, format!("node {name} has answered for another one"));
        }
        if !self.talked.insert(name) {
            self.fail(cx, format!("node {name} has talked twice"));
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, token: u64) {
        if token == GIVE_UP {
            return self.fail(cx, format!("has talked to {:?} only", self.talked));
        }
        if self.is_done() {
            // Closes all connections and the endpoint; `run` returns when they have ended.
            return cx.drain(TIME_LIMIT);
        }
        self.announce(cx);
        cx.timers().set(PERIOD, ANNOUNCE);
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: ConnectError) {
        // The next answer of the registry has the node again, if it still exists.
        self.called.remove(&conn);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        use DisconnectReason::{Closed, Local};
        if !matches!(reason, Closed | Local { complete: true }) {
            self.fail(cx, format!("{conn}: {reason}"));
        }
    }

    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        Some(self)
    }
}

impl DatagramHandler for Node {
    fn on_peer(&mut self, cx: &mut Context<'_>, _: EndpointId, _: SocketAddr, found: Result<PeerId, ConnectError>) {
        match found {
            Ok(registry) => {
                self.registry = Some(registry);
                self.announce(cx);
            }
            Err(error) => self.fail(cx, error),
        }
    }

    fn on_datagram(&mut self, cx: &mut Context<'_>, _: EndpointId, datagram: Datagram<'_>) {
        let nodes = std::str::from_utf8(&datagram).ok().map(|text| text.lines().map(parse));
        let Some(nodes) = nodes.and_then(|lines| lines.collect::<Option<BTreeMap<_, _>>>()) else {
            return;
        };
        self.connect(cx, &nodes);
        self.listed = nodes.into_keys().collect();
    }
}

/// Runs a node until it has nothing left to do.
fn node(name: u32, registry: SocketAddr) -> Result<Node, Failure> {
    let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    let mut cx = reactor.context();
    let listener = cx.listen(([127, 0, 0, 1], 0).into())?;
    let service = cx.listeners().local_address(listener).ok_or("nobody listens")?;
    let here = cx.datagrams().open(([127, 0, 0, 1], 0).into(), EndpointOptions::new())?;
    cx.datagrams().find_peer(here, registry)?;
    cx.timers().set(PERIOD, ANNOUNCE);
    cx.timers().set(TIME_LIMIT, GIVE_UP);
    let mut node = Node {
        name,
        service,
        here,
        registry: None,
        announcements: 0,
        listed: BTreeSet::new(),
        called: BTreeMap::new(),
        talked: BTreeSet::new(),
        failed: None,
    };
    reactor.run(&mut node)?;
    Ok(node)
}

/// Runs all nodes, each on its own thread, and checks what they have done. Returns the number of
/// announcements.
fn nodes(registry: SocketAddr) -> Result<u32, Failure> {
    let threads: Vec<_> = (1..=NODES).map(|name| thread::spawn(move || node(name, registry))).collect();
    let mut announcements = 0;
    for thread in threads {
        let node = thread.join().map_err(|_| "a node has panicked")??;
        if let Some(why) = node.failed {
            return Err(why.into());
        }
        let others: BTreeSet<u32> = (1..=NODES).filter(|&other| other != node.name).collect();
        if node.talked != others || node.announcements < 2 {
            return Err(format!(
                "node {} has talked to {:?}, after {} announcements",
                node.name, node.talked, node.announcements
            )
            .into());
        }
        announcements += node.announcements;
    }
    Ok(announcements)
}

pub(super) fn run() -> Result<(), Failure> {
    let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    let mut cx = reactor.context();
    let endpoint = cx.datagrams().open(([127, 0, 0, 1], 0).into(), EndpointOptions::new())?;
    let address = cx.datagrams().address(endpoint).ok_or("the endpoint is closed")?;
    cx.timers().set(PERIOD, 0);
    let remote = reactor.handle();
    let thread = thread::spawn(move || {
        let mut registry = Registry::default();
        reactor.run(&mut registry).map(|()| registry)
    });
    let outcome = nodes(address);
    remote.stop();
    let registry = thread.join().map_err(|_| "the registry has panicked")??;
    let announcements = outcome?;

    if registry.ignored.len() as u32 != NODES {
        return Err(format!("only the nodes {:?} were ignored once", registry.ignored).into());
    }
    if registry.nodes.contains_key(&LEAVER) || !registry.expired.contains(&LEAVER) {
        return Err(format!("node {LEAVER} has not expired").into());
    }
    println!(
        "{NODES} nodes have all talked to each other; {announcements} announcements, {NODES} of them lost; node {LEAVER} has expired"
    );
    Ok(())
}
