//! Receives that connections share: how much memory this saves, and the errors on a device without shared receive
//! queues.

use rdma_reactor::transport::caps::Features;
use rdma_reactor::{Config, ConnectError, Reactor, RejectReason};
use rdma_reactor_tests::conformance::harness::{Event, Pair, Probe, Setup, with_watchdog};
use rdma_reactor_tests::forward::Forward;
use rdma_reactor_tests::gate::Gate;
use rdma_reactor_tests::patience::patient;

/// Returns the total size of all buffers of a server with `count` idle connections, in bytes. `stride` is the size of
/// one buffer.
fn idle(config: Config, client: Config, count: usize, stride: usize) -> usize {
    let mut p = Pair::with_configs(&Setup::iwarp(), config, client, Probe::default(), Probe::default());
    for _ in 0..count {
        p.client.context().connect(p.address).expect("connecting");
    }
    p.until("all are up", |p| p.s.live() == count && p.c.live() == count);
    let bytes = p.server.stats().memory.pool_buffers * stride;
    p.finish();
    bytes
}

/// Compares the total size of the buffers of 500 idle connections: with 64 receives per connection, and with 2,880
/// receives that all connections share. A buffer holds a message of 8 KiB. Each case is measured with 64 sends per
/// connection (the default) and with 4 sends.
#[test]
fn idle_connections_take_less_memory() {
    with_watchdog("idle_connections_take_less_memory", || {
        const STRIDE: usize = 8256;
        // Both ends of the 500 connections are in this process.
        rlimit::increase_nofile_limit(1 << 16).expect("the limit of open files");
        let config = patient(Setup::iwarp().config());
        let small = patient(Setup::iwarp().config()).receive_depth(5).send_depth(1).buffer_size(64);
        let mib = |config: Config| idle(config, small.clone(), 500, STRIDE) >> 20;
        let own = mib(config.clone());
        let shared = mib(config.clone().shared_receives(Some(2880)));
        let own_short = mib(config.clone().send_depth(4));
        let shared_short = mib(config.send_depth(4).shared_receives(Some(2880)));
        println!("MiB: {own} and {shared} shared; with 4 sends each {own_short} and {shared_short} shared");
        // The memory of buffers grows in steps of 4 MiB, so the server may have up to 4 MiB more than it needs.
        assert!((511..=516).contains(&own), "{own} MiB");
        assert!((279..=284).contains(&shared), "{shared} MiB");
        assert!((275..=280).contains(&own_short), "{own_short} MiB");
        assert!((43..=48).contains(&shared_short), "{shared_short} MiB");
    });
}

fn without_shared_queues(config: Config) -> Reactor {
    Forward::reactor(config, Features::SHARED_RECEIVE_QUEUE, &Gate::default())
}

/// On a device without shared receive queues, a connect with shared receives fails. The error names the provider and
/// the missing feature. A listener refuses its peers.
#[test]
fn a_device_without_shared_queues_says_so() {
    with_watchdog("a_device_without_shared_queues_says_so", || {
        let config = Setup::iwarp().config();
        let sharing = config.clone().shared_receives(Some(64));
        let error = |p: &Pair| {
            p.c.events
                .iter()
                .find_map(|e| if let Event::ConnectError(_, error) = e { Some(error.clone()) } else { None })
        };
        let mut p = Pair::new(&Setup::iwarp(), config.clone(), Probe::default(), Probe::default());
        p.client = without_shared_queues(sharing.clone());
        p.client.context().connect(p.address).expect("connecting");
        p.until("the error", |p| error(p).is_some());
        let lacks = ConnectError::Unsupported { provider: "forward", feature: "shared receive queues on this device" };
        assert_eq!(error(&p), Some(lacks.clone()));
        assert_eq!(lacks.to_string(), "the provider forward has no shared receive queues on this device");
        // On a device without shared receive queues, connections without shared receives work.
        p.client = without_shared_queues(config.clone());
        p.c = Probe::default();
        p.connect();
        p.finish();

        let mut p = Pair::new(&Setup::iwarp(), config, Probe::default(), Probe::default());
        p.server = without_shared_queues(sharing);
        let listener = p.server.context().listen(Setup::iwarp().address).expect("listening");
        p.address = p.server.context().local_address(listener).expect("its address");
        p.client.context().connect(p.address).expect("connecting");
        p.until("the refusal", |p| error(p).is_some());
        assert!(matches!(error(&p), Some(ConnectError::Rejected { reason: RejectReason::Busy, .. })));
        p.until("the server has released it", |p| p.server.stats().connections.current == 0);
        assert_eq!(p.server.stats().memory.pool_buffers, 0, "nothing was spent on it");
        p.finish();
    });
}
