//! Drops a reactor, and all objects that a program can hold, in every order, on virtual time.

use std::cell::RefCell;
use std::rc::Rc;

use rdma_reactor::{
    Access, Config, ConnectionId, Context, DetachedMessage, Handler, Message, ReactorHandle, Region, RegionOptions,
    SendBuffer,
};
use rdma_reactor_tests::gate::{Gate, Objects};
use rdma_reactor_tests::sim::fabric::lock;
use rdma_reactor_tests::sim::quiet::{Node, gated, network, reactor, step, until};
use rdma_reactor_tests::sim::tcp::address;

/// The objects that a program holds.
#[derive(Default)]
struct Held {
    conn: Option<ConnectionId>,
    region: Option<Region>,
    buffer: Option<SendBuffer>,
    messages: Vec<DetachedMessage>,
}

/// A program that keeps every object that it can get.
#[derive(Clone, Default)]
struct Holder(Rc<RefCell<Held>>);

impl Handler for Holder {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let options = RegionOptions::new().allow(Access::REMOTE_READ | Access::REMOTE_WRITE);
        let mut held = self.0.borrow_mut();
        held.conn = Some(conn);
        held.region = Some(cx.regions().register(conn, 4096, &options).expect("a region"));
        held.buffer = Some(cx.buffer(conn).expect("a buffer"));
    }
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.0.borrow_mut().messages.push(message.detach());
    }
}

/// A program that sends three messages: a short one, one in several buffers, and one that the peer fetches.
struct Giver;

impl Handler for Giver {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        for len in [10, 5_000, 100_000] {
            assert!(cx.send(conn, &vec![6; len]).is_ok(), "no room");
        }
    }
}

/// An object that is dropped or closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thing {
    Connection,
    Peer,
    Region,
    Buffer,
    Message,
    Reactor,
}

/// Returns all permutations of some objects.
fn orders(things: &[Thing]) -> Vec<Vec<Thing>> {
    if things.is_empty() {
        return vec![Vec::new()];
    }
    let with = |&first: &Thing| {
        let rest: Vec<Thing> = things.iter().copied().filter(|&thing| thing != first).collect();
        orders(&rest).into_iter().map(move |order| [&[first][..], &order].concat())
    };
    things.iter().flat_map(with).collect()
}

/// Runs until the program holds all objects, and drops them in this order, with `steps` steps after each. Then checks that no object of the
/// provider remains.
fn take_down(order: &[Thing], steps: u32) {
    let what = format!("{order:?}, {steps} steps");
    let (fabric, gate, holder) = (network(2), Gate::default(), Holder::default());
    let config = Config::default()
        .buffer_size(1024)
        .receive_depth(16)
        .send_depth(16)
        .large_messages(|l| l.eager_limit = 8 << 10);
    let mut server = gated(0, &fabric, &gate, config.clone()).expect("no call fails");
    server.context().listen(address(0, 7471)).expect("a free port");
    let remote: ReactorHandle = server.handle();
    let mut nodes =
        vec![Node::new(server, Box::new(holder.clone())), Node::new(reactor(1, &fabric, config), Box::new(Giver))];
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, &what, |_| holder.0.borrow().messages.len() == 3);
    let mut nodes = nodes.into_iter().map(Some).collect::<Vec<_>>();
    for &thing in order {
        match thing {
            Thing::Connection => {
                if let (Some(node), Some(conn)) = (&mut nodes[0], holder.0.borrow().conn) {
                    node.reactor.context().close(conn);
                    node.more = true;
                }
            }
            Thing::Peer => nodes[1] = None,
            Thing::Region => holder.0.borrow_mut().region = None,
            Thing::Buffer => holder.0.borrow_mut().buffer = None,
            Thing::Message => drop(holder.0.borrow_mut().messages.split_off(0)),
            Thing::Reactor => nodes[0] = None,
        }
        for _ in 0..steps {
            // Once the reactor under test is dropped, no node needs a turn.
            if nodes[0].is_none() {
                break;
            }
            let mut left: Vec<Node> = nodes.iter_mut().filter_map(Option::take).collect();
            step(&fabric, &mut left).unwrap_or_else(|(node, error)| panic!("{what}: node {node}: {error}"));
            for (place, node) in nodes.iter_mut().zip(left) {
                *place = Some(node);
            }
        }
    }
    remote.stop();
    drop((remote, holder));
    assert_eq!(gate.objects(), Objects::default(), "{what}");
    assert_eq!(lock(&fabric).sockets(), 0, "{what}");
}

/// Row 44 of `docs/reliability.md`. A connection, its peer, a region, a buffer, messages of all kinds, and the reactor are dropped in every
/// order. Nothing may panic, and no object of the provider may remain.
#[test]
fn everything_may_go_in_any_order() {
    let all = orders(&[Thing::Connection, Thing::Peer, Thing::Region, Thing::Buffer, Thing::Message, Thing::Reactor]);
    assert_eq!(all.len(), 720);
    for order in &all {
        for steps in [0, 1, 40] {
            take_down(order, steps);
        }
    }
}
