//! Waits of `docs/design/waits.md` that no other program tests, on virtual time. Each wait must end
//! when the resource is available, and not only with the next ping.

use rdma_reactor::{Config, ConnectOptions, Framing, ListenOptions};
use rdma_reactor_tests::gate::{Call, Failure, Gate, Said};
use rdma_reactor_tests::patience::patient;
use rdma_reactor_tests::sim::fabric::lock;
use rdma_reactor_tests::sim::quiet::{Attempts, Counts, Node, gated, network, reactor, until};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;

/// The device has no room for the last message of a chain. It is posted again when a message before
/// it has completed, which makes room. With this depth, the third message has a completion.
#[test]
fn a_chain_that_the_device_refuses_is_posted_when_there_is_room() {
    let (fabric, gate, up, counts) = (network(2), Gate::default(), Attempts::default(), Counts::default());
    let sender = gated(0, &fabric, &gate, patient(Config::default()).send_depth(4)).expect("a reactor");
    let mut nodes = [
        Node::new(sender, Box::new(up.clone())),
        Node::new(reactor(1, &fabric, patient(Config::default())), Box::new(counts.clone())),
    ];
    // With this framing, there are no pings, and messages do not end with their post.
    let (listens, connects) = (ListenOptions::new(), ConnectOptions::new());
    nodes[1].reactor.context().listen_with(address(1, 7471), listens.framing(Framing::Raw)).expect("a free port");
    nodes[0].reactor.context().connect_with(address(1, 7471), connects.framing(Framing::Raw)).expect("connecting");
    until(&fabric, &mut nodes, "the connection", |_| up.up.borrow().len() == 1);
    let calm = lock(&fabric).now() + 100 * MS;
    until(&fabric, &mut nodes, "silence", |_| lock(&fabric).now() > calm);
    let conn = up.up.borrow()[0];
    let posted = gate.counts().get(&Call::PostSend).copied().unwrap_or(0);
    gate.fail_nth(Call::PostSend, posted, Failure::LastFull);
    for _ in 0..4 {
        nodes[0].reactor.context().send(conn, b"x").expect("room");
    }
    let end = lock(&fabric).now() + 10 * MS;
    until(&fabric, &mut nodes, "the messages", |_| counts.0.get() == 4 || lock(&fabric).now() > end);
    assert_eq!((gate.failed_of(Call::PostSend), counts.0.get()), (1, 4));
}

/// The device of a listener is removed and comes back. No event reports that, so the listener looks
/// for it from time to time, and accepts connections again.
#[test]
fn a_listener_finds_its_device_again() {
    let (fabric, gate, client) = (network(2), Gate::default(), Attempts::default());
    let server = gated(0, &fabric, &gate, patient(Config::default())).expect("a reactor");
    let mut nodes = [
        Node::new(server, Box::new(Attempts::default())),
        Node::new(reactor(1, &fabric, patient(Config::default())), Box::new(client.clone())),
    ];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "the connection", |_| client.up.borrow().len() == 1);
    gate.say(Said::Removal);
    lock(&fabric).ring(0);
    until(&fabric, &mut nodes, "the removal", |nodes| nodes[0].reactor.stats().connections.current == 0);
    assert!(gate.is_unplugged());
    gate.plug_in();
    let back = lock(&fabric).now() + 2000 * MS;
    until(&fabric, &mut nodes, "two seconds", |_| lock(&fabric).now() > back);
    nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "the outcome", |_| client.up.borrow().len() + client.errors.borrow().len() == 2);
    assert!(client.errors.borrow().is_empty(), "{:?}", client.errors);
}
