//! Waits of `docs/design/waits.md` that no other program tests, on virtual time. Each wait must end
//! when the resource is available, and not only with the next ping.

use std::time::Duration;

use rdma_reactor::{Config, ConnectOptions, EndpointOptions, Framing, ListenOptions, Reactor};
use rdma_reactor_tests::forward::Forward;
use rdma_reactor_tests::gate::{Call, Failure, Gate, Said};
use rdma_reactor_tests::patience::patient;
use rdma_reactor_tests::sim::fabric::lock;
use rdma_reactor_tests::sim::quiet::{Attempts, Counts, Node, gated, network, parts, reactor, until};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;
use rdma_reactor_tests::sim::udp::UdpOptions;
use rdma_transport::provider::Provider;

/// The device refuses the last message of a chain, because its queue is full. The message is posted
/// again when an earlier one has completed. With this send depth, the third message of the chain
/// has a completion.
#[test]
fn a_chain_that_the_device_refuses_is_posted_when_there_is_room() {
    let (fabric, gate, up, counts) = (network(2), Gate::default(), Attempts::default(), Counts::default());
    let sender = gated(0, &fabric, &gate, patient(Config::default()).send_depth(4)).expect("a reactor");
    let mut nodes = [
        Node::new(sender, Box::new(up.clone())),
        Node::new(reactor(1, &fabric, patient(Config::default())), Box::new(counts.clone())),
    ];
    // With raw framing, there are no pings, and messages do not complete when they are posted.
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

/// The device of a listener is removed and added again. No event reports the addition, so the
/// reactor looks for the device from time to time. The listener then accepts connections again.
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

/// A closed endpoint releases its entries of the completion queue. They are free when the reactor
/// has found the queue empty, but no completion causes a poll. So the reactor polls the queue
/// before it sleeps, and the next endpoint needs no further queue.
#[test]
fn entries_of_a_completion_queue_that_were_released_are_used_again() {
    let (fabric, gate) = (network(1), Gate::default());
    let none = UdpOptions { lost: 0, doubled: 0, damaged: 0, full: 0, told: 0, latency: (1_000, 20_000), mtu: 1500 };
    lock(&fabric).udp = Some(none);
    let config = patient(Config::default()).completions(|c| c.queue = Some(256));
    let mut parts = parts(0, &fabric);
    let counted = |inner| Box::new(Forward::gated(inner, gate.clone())) as Box<dyn Provider>;
    parts.providers = parts.providers.into_iter().map(counted).collect();
    let reactor = Reactor::with_parts(config, parts).expect("a reactor");
    let mut nodes = [Node::new(reactor, Box::new(Attempts::default()))];
    let pass = |nodes: &mut [Node]| {
        nodes[0].more = true;
        let end = lock(&fabric).now() + 10 * MS;
        until(&fabric, nodes, "some turns", |_| lock(&fabric).now() > end);
    };
    for _ in 0..4 {
        let options = EndpointOptions::new().receive_depth(128).send_depth(128);
        let endpoint = nodes[0].reactor.context().datagrams().open(address(0, 0), options).expect("a free port");
        pass(&mut nodes);
        nodes[0].reactor.context().datagrams().close(endpoint);
        pass(&mut nodes);
        assert_eq!(gate.objects().completion_queues, 1);
    }
}

/// Sends of other threads wait for slots of the send queue. A resumed turn handles the completions
/// that free the slots, but their queue has raised its event earlier in the same turn. So no event
/// follows, and the reactor itself must schedule the turn that posts the sends.
#[test]
fn sends_of_other_threads_follow_a_resumed_turn() {
    const SENDS: u64 = 20;
    let (fabric, up) = (network(3), Attempts::default());
    // With shared receives, a send occupies its slot until its completion is polled.
    let config = patient(Config::default()).send_depth(4).shared_receives(Some(64));
    let mut nodes = [
        Node::new(reactor(0, &fabric, config), Box::new(up.clone())),
        Node::new(reactor(1, &fabric, patient(Config::default())), Box::<Attempts>::default()),
        Node::new(reactor(2, &fabric, patient(Config::default())), Box::<Attempts>::default()),
    ];
    for server in [1, 2] {
        nodes[server].reactor.context().listen(address(server, 7471)).expect("a free port");
        nodes[0].reactor.context().connect(address(server, 7471)).expect("connecting");
    }
    until(&fabric, &mut nodes, "the connections", |_| up.up.borrow().len() == 2);
    let calm = lock(&fabric).now() + 100 * MS;
    until(&fabric, &mut nodes, "silence", |_| lock(&fabric).now() > calm);
    // From now on, only the client takes turns. Its next turn polls for edges, because its last
    // poll was long ago.
    let later = lock(&fabric).now() + 100 * MS;
    lock(&fabric).advance(later);
    let Node { reactor: client, handler, .. } = &mut nodes[0];
    let conns = up.up.borrow().clone();
    let (handle, before) = (client.handle(), client.stats().messages.sent);
    client.quiet_context().send(conns[1], b"it raises the event").expect("room");
    for _ in 0..SENDS {
        handle.send(conns[0], b"x").expect("a place in the queue of commands");
    }
    let (mut others, mut more) = (1, true);
    while more || lock(&fabric).is_runnable(0, true) {
        client.step(&mut **handler, Duration::ZERO).expect("a turn");
        others += u64::from(client.context().send(conns[1], b"y").is_ok());
        let turn = client.resume(&mut **handler).expect("the rest");
        more = client.arm(turn).expect("the end").more;
    }
    assert_eq!(client.stats().messages.sent - before, SENDS + others);
}
