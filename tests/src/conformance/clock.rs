//! The clock of a test of the suite: the system's clock, or virtual time. With virtual time, the
//! reactors of the test are the nodes of a simulated network, and time passes only while a reactor
//! waits or the clock is read.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_reactor::{Config, Error, Reactor};

use crate::sim::fabric::{Shared, lock};
use crate::sim::poller::instant;
use crate::sim::quiet;

/// The largest number of reactors in a test.
const NODES: usize = 32;

/// A simulated network, the number of its nodes in use, and the last port that [`deserted`] chose.
struct World {
    fabric: Shared,
    used: usize,
    deserted: u16,
}

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

/// Makes this thread's tests run on virtual time, on a new network. If `one_host` is true, all
/// nodes are on one host. With the environment variable `SCHEDULE=N`, the latencies and the length
/// of TCP segments depend on N.
///
/// # Panics
/// Panics if `SCHEDULE` is not a number.
pub fn simulate(one_host: bool) {
    let schedule = std::env::var("SCHEDULE").ok().map(|text| text.parse().expect("SCHEDULE=N"));
    let fabric = schedule.map_or_else(|| quiet::network(NODES), |schedule| quiet::network_of_schedule(NODES, schedule));
    {
        let mut fabric = lock(&fabric);
        fabric.one_host = one_host;
        fabric.sleeps = true;
    }
    WORLD.set(Some(World { fabric, used: 0, deserted: 0 }));
}

/// Creates a reactor on the next node of the network.
///
/// # Errors
/// A setting is out of its range.
///
/// # Panics
/// Panics if [`simulate`] was not called, or if no node is left.
pub fn reactor(config: Config) -> Result<Reactor, Error> {
    WORLD.with_borrow_mut(|world| {
        let world = world.as_mut().expect("simulate() comes first");
        assert!(world.used < NODES, "{NODES} reactors in a test");
        let parts = quiet::parts(world.used, &world.fabric);
        world.used += 1;
        Reactor::with_parts(config, parts)
    })
}

/// Returns the time of a test's clock. Each reading advances virtual time by 100 ns.
#[must_use]
#[allow(clippy::disallowed_methods, reason = "a test's own clock")]
pub fn now() -> Instant {
    WORLD.with_borrow(|world| match world {
        Some(world) => {
            let mut fabric = lock(&world.fabric);
            let at = fabric.now() + 100;
            fabric.advance(at);
            instant(at)
        }
        None => Instant::now(),
    })
}

/// Returns an address of a simulated host on which nobody listens. The port is that of `address`.
/// If that port is 0, each call returns a new one. Returns `None` without a simulated network.
#[must_use]
pub fn deserted(mut address: SocketAddr) -> Option<SocketAddr> {
    WORLD.with_borrow_mut(|world| {
        let world = world.as_mut()?;
        if address.port() == 0 {
            world.deserted += 1;
            address.set_port(world.deserted);
        }
        Some(address)
    })
}

/// Blocks this thread for `time`. On virtual time, advances the clock by `time`.
#[allow(clippy::disallowed_methods, reason = "a test's own clock")]
pub fn pause(time: Duration) {
    WORLD.with_borrow(|world| match world {
        Some(world) => {
            let mut fabric = lock(&world.fabric);
            let end = fabric.now() + u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            fabric.advance(end);
        }
        None => std::thread::sleep(time),
    });
}

/// Checks that no reactor has waited although one of its descriptors was readable.
///
/// # Panics
/// Panics if a reactor has.
pub fn assert_awake() {
    WORLD.with_borrow(|world| {
        let missed = world.as_ref().map(|world| lock(&world.fabric).violations.clone()).unwrap_or_default();
        assert!(missed.is_empty(), "{missed:?}");
    });
}
