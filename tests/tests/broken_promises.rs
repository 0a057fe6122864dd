//! A reactor whose provider violates the provider contract: the provider panics, or it returns a handle that an earlier object still has.
//! `fail_once.rs` tests the errors that a provider may return.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use rdma_reactor::transport::Features;
use rdma_reactor::{Config, Error, MioPoller, Parts, Reactor, SystemClock, system_entropy};
use rdma_reactor_tests::conformance::harness::{Event, Pair, Probe, Setup, with_watchdog};
use rdma_reactor_tests::forward::Forward;
use rdma_reactor_tests::gate::{Call, Gate};
use rdma_reactor_tests::patience::patient;
use rdma_reactor_tests::twice::{Kind, Twice};
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig, TcpNet};

fn config() -> Config {
    patient(Setup::iwarp().config())
}

fn pair() -> Pair {
    Pair::new(&Setup::iwarp(), config(), Probe::echo(), Probe::default())
}

/// A panic of the provider propagates out of the turn, even with `Config::contain_panics`. Later turns return an error. Dropping the
/// reactor releases all objects of the provider. The peer is notified of the end, and continues.
#[test]
fn a_panic_of_a_provider_ends_its_reactor_and_no_other() {
    with_watchdog("a_panic_of_a_provider_ends_its_reactor_and_no_other", || {
        for contained in [false, true] {
            for call in [Call::PollCq, Call::Progress, Call::PostSend] {
                let (mut p, gate) = (pair(), Gate::default());
                p.client = Forward::reactor(config().contain_panics(contained), Features::empty(), &gate);
                let conn = p.connect();
                gate.panic_next(call);
                p.client.context().send(conn, b"never answered").expect("room");
                let Pair { client, c, .. } = &mut p;
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    loop {
                        client.turn(c, None).expect("a turn that does not end");
                    }
                }));
                assert!(caught.is_err());
                assert!(matches!(client.turn(c, None), Err(Error::Panicked)), "{call:?}");
                (p.client, p.c) = (Reactor::new(config()).expect("a reactor"), Probe::default());
                let objects = gate.objects();
                assert_eq!(objects, Default::default(), "{call:?} leaves {objects:?}");
                p.until("the peer is notified of the end", |p| p.s.live() == 0);
                p.connect();
                p.finish();
            }
        }
    });
}

/// A provider returns the same handle for two objects. The reactor cannot notice this: it attributes all events of the handle to the second
/// object. So the two connections may fail in any way, but nothing may panic, and a third connection must work.
#[test]
fn a_handle_that_is_handed_out_twice_costs_the_two_that_have_it() {
    with_watchdog("a_handle_that_is_handed_out_twice_costs_the_two_that_have_it", || {
        for kind in [Kind::Cm, Kind::Cq, Kind::Qp] {
            let mut p = pair();
            let net = TcpNet::new().expect("the channels");
            let embedded = Iwarp::new(IwarpConfig::default(), net, system_entropy()).expect("a provider");
            let twice = Twice::new(embedded, kind);
            let struck = twice.struck();
            // Completion queues of this length have room for one connection only, so each connection gets its own completion queue.
            let config = config().completions(|completions| completions.queue = Some(130));
            let poller = Box::new(MioPoller::new().expect("a poller"));
            let parts = Parts { providers: vec![Box::new(twice)], poller, clock: Box::new(SystemClock) };
            p.client = Reactor::with_parts(config, parts).expect("a reactor");
            let conn = p.connect();
            p.client.context().send(conn, b"before").expect("room");
            p.until("it is back", |p| p.c.received == 1);
            p.client.context().connect(p.address).expect("connecting");
            p.until("the second has the handle of the first", |_| struck.load(Ordering::Relaxed));
            for _ in 0..200 {
                p.turn();
            }
            let third = p.client.context().connect(p.address).expect("connecting");
            p.until("the third is up", |p| {
                p.c.count(|event| matches!(event, Event::Connect(id, _) if *id == third)) == 1
            });
            let received = p.c.received;
            p.client.context().send(third, b"not for the others").expect("room");
            p.until("it is back", |p| p.c.received == received + 1);
            // Dropping the old reactor releases the objects that remain.
            (p.client, p.c) = (Reactor::new(self::config()).expect("a reactor"), Probe::default());
            p.until("the peer is notified of the ends", |p| p.s.live() == 0);
            p.finish();
        }
    });
}
