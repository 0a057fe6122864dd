//! Datagrams of whole reactors on virtual time. Endpoints open, look each other up, join groups, send and close. Meanwhile packets are
//! lost, duplicated, damaged, late and out of order, sockets are full, and some paths lose all packets for a while.
//!
//! The test checks the promises of `DatagramHandler`:
//!
//! - Each accepted datagram completes once and in order. It completes with success, unless the
//!   close timeout of its endpoint has expired.
//! - A received datagram was sent to this endpoint, with exactly these bytes. It arrives at most twice, because the network may duplicate
//!   it once.
//! - Each lookup and each join ends once, within its time limit.
//! - After a refused send, the program is notified once that it can send again.
//! - A closed endpoint ends within its time limit, and no callback follows.
//! - After the network works again, each endpoint can be looked up and receives datagrams.
//! - No socket remains at the end.
//!
//! `ENDPOINT_WORLDS=100` sets the number of worlds (default: 1,000), and `ENDPOINT_SEED=7` runs only the world with that seed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, Context, Datagram, DatagramHandler, DisconnectReason, EndpointId, EndpointOptions, Handler,
    Outcome, PeerId, SendErrorKind, SendId,
};
use rdma_reactor_tests::sim::fabric::{Fabric, Shared, lock};
use rdma_reactor_tests::sim::poller::virtual_ns;
use rdma_reactor_tests::sim::quiet::{Node, reactor, step};
use rdma_reactor_tests::sim::rng::Rng;
use rdma_reactor_tests::sim::seeds::each_world_of;
use rdma_reactor_tests::sim::swarm::{FaultOptions, MS, Options};
use rdma_reactor_tests::sim::tcp::address;
use rdma_reactor_tests::sim::trace::Trace;
use rdma_reactor_tests::sim::udp::UdpOptions;

const NODES: usize = 3;
/// The number of random actions in a simulated world.
const ACTS: u64 = 150;
/// The number of simulation steps in which a condition must become true.
const STEPS: u64 = 400_000;
/// The largest number of open endpoints of a node.
const ENDPOINTS: usize = 2;
/// The time limit of a lookup or of a join, in ns.
const CONNECT: u64 = 1_500 * MS;
/// The time limit for the end of a closed endpoint, in ns.
const CLOSE: u64 = 200 * MS;
/// The longest time from a time limit to the event that it limits, in ns. It is not zero, because a turn may run late.
const LATE: u64 = 60 * MS;
/// The length of the shortest payload, which is the number of the datagram. All further bytes are derived from this number.
const HEAD: usize = 8;

fn group(nth: u64) -> IpAddr {
    Ipv4Addr::new(239, 1, 1, nth as u8).into()
}

fn payload(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend((HEAD..len).map(|at| (at as u64 ^ number.wrapping_mul(31)) as u8));
    bytes
}

/// The destination of a datagram: an endpoint or a multicast group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Endpoint(SocketAddr),
    Group(IpAddr),
}

/// The datagrams of all nodes of a simulated world.
#[derive(Default)]
struct Post {
    /// The length and the destination of each accepted datagram, by its number.
    sent: BTreeMap<u64, (usize, Target)>,
    /// The number of times that each datagram arrived at each endpoint.
    heard: BTreeMap<(u64, EndpointId), u32>,
    wrong: Vec<String>,
}

/// The test's record of an endpoint that has not ended.
struct Known {
    address: SocketAddr,
    max: usize,
    /// The datagrams that were accepted and have not completed, in order.
    pending: VecDeque<SendId>,
    peers: Vec<(PeerId, Target)>,
    /// The addresses that are being looked up, and the time by which each lookup must end, in ns.
    searches: Vec<(SocketAddr, u64)>,
    /// The groups that are being joined, and the time by which each join must end, in ns.
    joins: Vec<(IpAddr, u64)>,
    groups: BTreeSet<IpAddr>,
    /// All groups of which the endpoint was ever a member. A datagram that arrived before the endpoint left its group may be delivered
    /// after that.
    were: BTreeSet<IpAddr>,
    /// True from a refused send until the program is notified of room.
    refused: bool,
    /// The time by which the endpoint must end, in ns, if the program has closed it.
    closed: Option<u64>,
}

#[derive(Default)]
struct Book {
    endpoints: BTreeMap<EndpointId, Known>,
    /// The endpoints that have ended.
    gone: BTreeSet<EndpointId>,
    looks_back: bool,
    found: u64,
    received: u64,
    now: u64,
}

#[derive(Clone)]
struct Program(Rc<RefCell<Book>>, Rc<RefCell<Post>>);

impl Program {
    fn check(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.1.borrow_mut().wrong.push(what());
        }
    }

    /// Runs `act` on the record of the endpoint `id`, for which a callback was called. Returns the result of `act`. If the endpoint has
    /// already ended, the callback is recorded as an error, and `of` returns `None`.
    fn of<T>(&self, cx: &Context<'_>, id: EndpointId, what: &str, act: impl FnOnce(&mut Known) -> T) -> Option<T> {
        let book = &mut *self.0.borrow_mut();
        book.now = virtual_ns(cx.now());
        let known = book.endpoints.get_mut(&id).map(act);
        self.check(known.is_some(), || format!("{what} of {id}, which is gone"));
        known
    }
}

impl Handler for Program {
    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        Some(self)
    }
}

impl DatagramHandler for Program {
    fn on_datagram(&mut self, cx: &mut Context<'_>, id: EndpointId, datagram: Datagram<'_>) {
        let Some((address, groups, closed)) =
            self.of(cx, id, "a datagram", |known| (known.address, known.were.clone(), known.closed.is_some()))
        else {
            return;
        };
        self.check(!closed, || format!("{id} is closed and receives"));
        let number = datagram.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let sent = number.and_then(|number| self.1.borrow().sent.get(&number).copied());
        let whole = matches!((number, sent), (Some(number), Some((len, _))) if *datagram == payload(number, len)[..]);
        self.check(whole, || format!("{id} receives {} bytes that nobody has sent", datagram.len()));
        let (Some(number), Some((_, target))) = (number, sent) else { return };
        let mine = match target {
            Target::Endpoint(to) => to == address,
            Target::Group(to) => groups.contains(&to),
        };
        self.check(mine, || {
            format!("datagram {number} was for {target:?} and came to {id} at {address}, in {groups:?}")
        });
        let times = {
            let mut post = self.1.borrow_mut();
            let times = post.heard.entry((number, id)).or_default();
            *times += 1;
            *times
        };
        self.check(times <= 2, || format!("datagram {number} came to {id} {times} times"));
        self.0.borrow_mut().received += 1;
        if self.0.borrow().looks_back {
            let origin = datagram.origin();
            let back = cx.datagrams().peer_of(id, &origin);
            // If a datagram was sent to this endpoint, `peer_of` must return its sender. If it was sent to a group, `peer_of` must fail.
            let expected = matches!(target, Target::Endpoint(_));
            self.check(back.is_ok() == expected, || format!("the way back to {origin} from {target:?}: {back:?}"));
            if let Ok(peer) = back {
                cx.datagrams().forget_peer(peer);
            }
        }
    }

    fn on_datagram_sent(&mut self, cx: &mut Context<'_>, id: EndpointId, send: SendId, outcome: Outcome) {
        let now = virtual_ns(cx.now());
        let ended = self.of(cx, id, "an end", |known| {
            let is_over = known.closed.is_some_and(|until| until <= now);
            (known.pending.pop_front(), is_over)
        });
        let Some((first, is_over)) = ended else { return };
        self.check(first == Some(send), || format!("{send:?} of {id} ends, and {first:?} was the first"));
        self.check(outcome.is_sent() || is_over, || format!("{send:?} of {id} ends with {outcome:?} at {now}"));
    }

    fn on_datagram_writable(&mut self, cx: &mut Context<'_>, id: EndpointId) {
        let refused = self.of(cx, id, "room", |known| std::mem::take(&mut known.refused));
        self.check(refused == Some(true), || format!("{id} has room, and nothing was refused"));
    }

    fn on_peer(
        &mut self,
        cx: &mut Context<'_>,
        id: EndpointId,
        address: SocketAddr,
        found: Result<PeerId, ConnectError>,
    ) {
        let known = self.of(cx, id, "the end of a search", |known| {
            let place = known.searches.iter().position(|(to, _)| *to == address);
            if let Ok(peer) = found {
                known.peers.push((peer, Target::Endpoint(address)));
            }
            place.map(|place| known.searches.swap_remove(place))
        });
        self.check(known.flatten().is_some(), || format!("{id} has not looked for {address}"));
        self.0.borrow_mut().found += 1;
    }

    fn on_join(&mut self, cx: &mut Context<'_>, id: EndpointId, group: IpAddr, joined: Result<PeerId, ConnectError>) {
        let known = self.of(cx, id, "the end of a join", |known| {
            let place = known.joins.iter().position(|(to, _)| *to == group);
            if let Ok(peer) = joined {
                known.peers.push((peer, Target::Group(group)));
            }
            place.map(|place| known.joins.swap_remove(place))
        });
        self.check(known.flatten().is_some(), || format!("{id} has not joined {group}"));
    }

    fn on_endpoint_closed(&mut self, cx: &mut Context<'_>, id: EndpointId, _: DisconnectReason) {
        let pending = self.of(cx, id, "the end of an endpoint", |known| (known.pending.len(), known.closed.is_some()));
        self.check(pending == Some((0, true)), || format!("{id} is gone, {pending:?}"));
        let book = &mut *self.0.borrow_mut();
        book.endpoints.remove(&id);
        book.gone.insert(id);
    }
}

struct World {
    rng: Rng,
    fabric: Shared,
    nodes: Vec<Node>,
    programs: Vec<Program>,
    post: Rc<RefCell<Post>>,
    next: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let options = Options::draw(seed);
        let faults = FaultOptions { every: 0, kinds: Vec::new() };
        let mut rng = Rng::new(seed, "datagrams");
        let mut fabric = Fabric::new(seed, NODES, options.net, faults, Trace::new(0));
        let mut trouble = |most: u64| if rng.chance(300) { 0 } else { rng.skewed(0..=most) as u32 };
        let (lost, doubled, damaged, full, told) =
            (trouble(400), trouble(400), trouble(200), trouble(200), trouble(1000));
        let latency = (1_000, rng.skewed(2_000..=30 * MS));
        let mtu = rng.pick(&[400, 1500, 9000]);
        fabric.udp = Some(UdpOptions { lost, doubled, damaged, full, told, latency, mtu });
        let fabric = Arc::new(Mutex::new(fabric));
        let post = Rc::new(RefCell::new(Post::default()));
        let programs: Vec<Program> = (0..NODES)
            .map(|_| {
                let book = Book { looks_back: rng.chance(300), ..Book::default() };
                Program(Rc::new(RefCell::new(book)), Rc::clone(&post))
            })
            .collect();
        let nodes = (0..NODES)
            .map(|node| {
                let config = Config::default().completions(|c| c.per_turn = rng.skewed(1..=64) as u32).timeouts(|t| {
                    t.connect = Duration::from_nanos(CONNECT);
                    t.close = Duration::from_nanos(CLOSE);
                });
                Node::new(reactor(node, &fabric, config), Box::new(programs[node].clone()))
            })
            .collect();
        Self { rng, fabric, nodes, programs, post, next: 1 }
    }

    fn now(&self) -> u64 {
        lock(&self.fabric).now()
    }

    fn step(&mut self) {
        step(&self.fabric, &mut self.nodes).unwrap_or_else(|(node, error)| panic!("a turn of node {node}: {error}"));
        let now = self.now();
        let wrong = &self.post.borrow().wrong;
        assert!(wrong.is_empty(), "{wrong:?}");
        for program in &self.programs {
            for (id, known) in &program.0.borrow().endpoints {
                let late = |until: u64| now > until + LATE;
                assert!(!known.closed.is_some_and(late), "{id} is closed and not gone at {now}");
                assert!(
                    !known.searches.iter().any(|(_, until)| late(*until)),
                    "{id} still looks at {now}: {:?}",
                    known.searches
                );
                assert!(
                    !known.joins.iter().any(|(_, until)| late(*until)),
                    "{id} still joins at {now}: {:?}",
                    known.joins
                );
            }
        }
    }

    fn live(&self, node: usize) -> Vec<EndpointId> {
        let book = self.programs[node].0.borrow();
        book.endpoints.iter().filter(|(_, known)| known.closed.is_none()).map(|(id, _)| *id).collect()
    }

    fn open(&mut self, node: usize) {
        let depths = (self.rng.skewed(1..=32) as u32, self.rng.skewed(1..=16) as u32);
        let options = EndpointOptions::new().receive_depth(depths.0).send_depth(depths.1);
        let mut cx = self.nodes[node].reactor.context();
        // Opening an endpoint may fail, if no descriptors are left.
        let Ok(id) = cx.datagrams().open(address(node, 0), options) else { return };
        let address = cx.datagrams().address(id).expect("it is open");
        let known = Known {
            address,
            max: cx.datagrams().max_datagram(id).expect("it is open"),
            pending: VecDeque::new(),
            peers: Vec::new(),
            searches: Vec::new(),
            joins: Vec::new(),
            groups: BTreeSet::new(),
            were: BTreeSet::new(),
            refused: false,
            closed: None,
        };
        self.programs[node].0.borrow_mut().endpoints.insert(id, known);
    }

    /// Returns the address of an endpoint that the program has opened and that may be closing, or an address at which no endpoint is ever
    /// opened.
    fn somewhere(&mut self) -> SocketAddr {
        let node = self.rng.index(NODES);
        let all: Vec<SocketAddr> =
            self.programs[node].0.borrow().endpoints.values().map(|known| known.address).collect();
        if all.is_empty() || self.rng.chance(100) { address(node, 9) } else { self.rng.pick(&all) }
    }

    fn look_for(&mut self, node: usize, id: EndpointId, to: SocketAddr) {
        let until = self.now() + CONNECT;
        let twice = self.programs[node].0.borrow().endpoints[&id].searches.iter().any(|(other, _)| *other == to);
        if twice || self.nodes[node].reactor.context().datagrams().find_peer(id, to).is_err() {
            return;
        }
        let mut book = self.programs[node].0.borrow_mut();
        book.endpoints.get_mut(&id).expect("it is open").searches.push((to, until));
    }

    fn send(&mut self, node: usize, id: EndpointId) {
        let (peers, max) = {
            let book = self.programs[node].0.borrow();
            (book.endpoints[&id].peers.clone(), book.endpoints[&id].max)
        };
        if peers.is_empty() {
            return;
        }
        for _ in 0..self.rng.skewed(1..=24) {
            let (peer, target) = self.rng.pick(&peers);
            let len = HEAD + self.rng.skewed(0..=(max - HEAD) as u64) as usize;
            let number = self.next;
            self.next += 1;
            let sent = self.nodes[node].reactor.context().datagrams().send(id, peer, &payload(number, len));
            let mut book = self.programs[node].0.borrow_mut();
            let known = book.endpoints.get_mut(&id).expect("it is open");
            match sent {
                Ok(send) => {
                    known.pending.push_back(send);
                    self.post.borrow_mut().sent.insert(number, (len, target));
                }
                Err(SendErrorKind::WouldBlock(_)) => {
                    known.refused = true;
                    return;
                }
                // The endpoint has left the group since the test chose the group as the destination.
                Err(SendErrorKind::Closed) if matches!(target, Target::Group(_)) => {}
                Err(error) => panic!("{id} to {target:?}: {error:?}"),
            }
        }
    }

    fn close(&mut self, node: usize, id: EndpointId) {
        let until = self.now() + CLOSE;
        self.programs[node].0.borrow_mut().endpoints.get_mut(&id).expect("it is open").closed = Some(until);
        self.nodes[node].reactor.context().datagrams().close(id);
    }

    fn group_of(&mut self, node: usize, id: EndpointId) {
        let group = group(self.rng.below(2));
        let until = self.now() + CONNECT;
        let joined = self.programs[node].0.borrow().endpoints[&id].groups.contains(&group);
        let mut cx = self.nodes[node].reactor.context();
        let done = if joined { cx.datagrams().leave(id, group) } else { cx.datagrams().join(id, group) };
        let mut book = self.programs[node].0.borrow_mut();
        let known = book.endpoints.get_mut(&id).expect("it is open");
        match (joined, done) {
            (true, done) => {
                done.expect("it is in the group, or joins it");
                known.groups.remove(&group);
                known.joins.retain(|(other, _)| *other != group);
                known.peers.retain(|(_, target)| *target != Target::Group(group));
            }
            (false, Ok(())) => {
                known.groups.insert(group);
                known.were.insert(group);
                known.joins.push((group, until));
            }
            // A join may fail immediately, if no descriptors are left.
            (false, Err(_)) => {}
        }
    }

    fn act(&mut self) {
        let node = self.rng.index(NODES);
        let live = self.live(node);
        self.nodes[node].more = true;
        if live.len() < ENDPOINTS && (live.is_empty() || self.rng.chance(100)) {
            return self.open(node);
        }
        let id = live[self.rng.index(live.len())];
        match self.rng.below(100) {
            0..25 => {
                let to = self.somewhere();
                self.look_for(node, id, to);
            }
            25..80 => self.send(node, id),
            80..88 => self.group_of(node, id),
            88..92 => self.close(node, id),
            92..96 => {
                let other = (node + 1 + self.rng.index(NODES - 1)) % NODES;
                lock(&self.fabric).silence(node, other);
            }
            _ => lock(&self.fabric).mend(),
        }
    }

    fn settle(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        for _ in 0..STEPS {
            if done(self) {
                return;
            }
            self.step();
        }
        panic!("not in {STEPS} steps: {what}");
    }

    fn books(&self, holds: impl Fn(&Known) -> bool) -> bool {
        self.programs.iter().all(|program| program.0.borrow().endpoints.values().all(&holds))
    }

    /// Restores the network. Then checks that all other endpoints find the first one, and that their datagrams arrive at it.
    fn calm(&mut self) {
        let mut fabric = lock(&self.fabric);
        fabric.mend();
        fabric.heal();
        let udp = fabric.udp.as_mut().expect("there are packets");
        (udp.lost, udp.doubled, udp.damaged, udp.full) = (0, 0, 0, 0);
        udp.latency = (1_000, 20_000);
        drop(fabric);
        self.settle("everything that was begun ends", |world| {
            world.books(|known| {
                known.searches.is_empty() && known.joins.is_empty() && known.pending.is_empty() && !known.refused
            })
        });
        let open: Vec<(usize, EndpointId)> =
            (0..NODES).flat_map(|node| self.live(node).into_iter().map(move |id| (node, id))).collect();
        let Some(&(to, target)) = open.first() else { return };
        let at = self.programs[to].0.borrow().endpoints[&target].address;
        for &(node, id) in &open[1..] {
            self.programs[node].0.borrow_mut().endpoints.get_mut(&id).expect("it is open").peers.clear();
            self.nodes[node].more = true;
            self.look_for(node, id, at);
            self.settle("a search", |world| world.programs[node].0.borrow().endpoints[&id].searches.is_empty());
            let peers = self.programs[node].0.borrow().endpoints[&id].peers.len();
            assert_eq!(peers, 1, "{id} does not find {target} at {at}");
            let (number, before) = (self.next, self.programs[to].0.borrow().received);
            self.send(node, id);
            self.nodes[node].more = true;
            assert!(self.post.borrow().sent.contains_key(&number), "{id} has sent nothing");
            self.settle("the first of what was sent", |world| world.programs[to].0.borrow().received > before);
        }
    }

    fn end(mut self) -> (u64, u64) {
        for node in 0..NODES {
            for id in self.live(node) {
                self.close(node, id);
                self.nodes[node].more = true;
            }
        }
        self.settle("all endpoints are gone", |world| {
            world.programs.iter().all(|program| program.0.borrow().endpoints.is_empty())
        });
        let counts = self.programs.iter().map(|program| program.0.borrow()).map(|book| (book.found, book.received));
        let counts = counts.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
        self.nodes.clear();
        assert_eq!(lock(&self.fabric).sockets(), 0, "{}", lock(&self.fabric).describe_sockets());
        counts
    }
}

#[test]
fn datagrams_keep_their_promises_in_every_world() {
    let (mut found, mut received) = (0, 0);
    let world = |seed| {
        let mut world = World::new(seed);
        for _ in 0..ACTS {
            world.act();
            for _ in 0..world.rng.skewed(1..=20) {
                world.step();
            }
        }
        world.calm();
        world.end()
    };
    let worlds = each_world_of("ENDPOINT", 1_000, world, |(searches, datagrams)| {
        (found, received) = (found + searches, received + datagrams);
    });
    eprintln!("{worlds} worlds: {found} searches, {received} datagrams received");
    assert!(worlds < 100 || (found > worlds && received > 10 * worlds), "too little happens");
}
