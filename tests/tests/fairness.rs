//! A flood of messages on one connection next to an echo on another one, on virtual time. So the results do not depend
//! on the load of the machine.

use std::sync::Arc;
use std::time::Duration;

use rdma_reactor::{Config, Handler};
use rdma_reactor_tests::sim::fabric::lock;
use rdma_reactor_tests::sim::neighbour::{EmptyWrites, Flood, Ping, Server, Street};
use rdma_reactor_tests::sim::quiet::{Node, network, reactor, until};
use rdma_reactor_tests::sim::tcp::address;

/// The number of the flood's messages that are in flight at the same time.
const FLOOD: u32 = 2_000;

/// Measures echoes, with or without a flood on another connection. Returns the 99th percentile of the time of an echo
/// in ns, and the number of completions that were deferred to a later turn.
fn p99(config: &Config, flood: bool) -> (u64, u64) {
    let mut street = Street::echoing(config);
    if flood {
        street.add(config, Box::new(Flood));
    }
    let p99 = street.p99(u64::MAX, |_| {});
    (p99, street.stats().completions.deferred)
}

/// A dead peer is detected in time, although other peers send floods of messages or of RDMA Writes of zero bytes.
#[test]
fn a_dead_peer_is_given_up_beside_a_flood() {
    const TIMEOUT: Duration = Duration::from_millis(30);
    let config = Config::default().receive_depth(FLOOD).send_depth(FLOOD).buffer_size(256);
    let config = config.timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_millis(10), TIMEOUT));
    let floods: [fn() -> Box<dyn Handler>; 2] = [|| Box::new(Flood), || Box::<EmptyWrites>::default()];
    for flood in floods {
        let fabric = network(3);
        let mut nodes = [
            Node::new(reactor(0, &fabric, config.clone()), Box::new(Server(Arc::clone(&fabric)))),
            Node::new(reactor(1, &fabric, config.clone()), Box::new(Ping::default())),
            Node::new(reactor(2, &fabric, config.clone()), flood()),
        ];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        for node in &mut nodes[1..] {
            node.reactor.context().connect(address(0, 7471)).expect("a peer");
        }
        until(&fabric, &mut nodes, "both are up", |nodes| nodes[0].reactor.stats().connections.connected == 2);
        let died = lock(&fabric).now();
        nodes[1].dead = true;
        until(&fabric, &mut nodes, "a peer is given up", |nodes| nodes[0].reactor.stats().connections.disconnected > 0);
        let took = Duration::from_nanos(lock(&fabric).now() - died);
        let stats = nodes[0].reactor.stats().connections;
        assert_eq!((stats.keepalive_timeouts, stats.current), (1, 1), "the flood is alive: {stats:?}");
        println!("given up after {took:?}");
        // The peer may have sent its last sign of life up to one ping interval (10 ms) before it died. The flush of the
        // queue pair adds some time.
        assert!(took >= TIMEOUT - Duration::from_millis(1) && took < TIMEOUT * 3, "given up after {took:?}");
    }
}

#[test]
fn a_flood_leaves_its_neighbour_alone() {
    let deep =
        Config::default().receive_depth(FLOOD).send_depth(FLOOD).completions(|c| c.per_turn = 4096).buffer_size(256);
    // Both configurations have the default limit on the work of one connection in a turn.
    for (name, config) in [("default", Config::default()), ("deep", deep)] {
        let ((alone, none), (beside, deferred)) = (p99(&config, false), p99(&config, true));
        println!("{name}: p99 alone {alone} ns, beside a flood {beside} ns; {deferred} completions waited");
        assert_eq!(none, 0, "who is alone does not wait");
        assert!(deferred > 1_000, "a flood waits: {deferred}");
        assert!(beside <= 2 * alone, "{name}: p99 is {beside} ns beside a flood, {alone} ns alone");
        // Without the limit on the work of one connection in a turn, the echo takes more than twice as long. So the
        // test would notice a limit without effect.
        let (unfair, _) = p99(&config.fairness(u32::MAX, usize::MAX), true);
        println!("{name}: p99 beside an unbounded flood {unfair} ns");
        assert!(unfair > 2 * alone, "{name}: p99 is {unfair} ns beside an unbounded flood, {alone} ns alone");
    }
}
