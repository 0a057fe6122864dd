//! Virtual time and simulated readiness for the provider conformance suite.

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use rdma_reactor::{Interest, Poller};
use rdma_transport::conformance::Environment;

use super::fabric::{Shared, lock};
use super::poller::{SimPoller, instant, virtual_ns};

/// The virtual time that a reading of the clock takes, in ns.
const LOOK: u64 = 1_000;

/// Virtual time for providers without reactors, see the [module](self).
#[derive(Debug)]
pub struct VirtualTime {
    fabric: Shared,
    pollers: Vec<SimPoller>,
}

impl VirtualTime {
    /// Returns an environment on the virtual time of `fabric`. The first `sides` nodes of the
    /// fabric are the sides of the suite.
    #[must_use]
    pub fn new(fabric: &Shared, sides: usize) -> Self {
        Self { fabric: fabric.clone(), pollers: (0..sides).map(|node| SimPoller::new(node, fabric.clone())).collect() }
    }
}

impl Environment for VirtualTime {
    fn now(&mut self) -> Instant {
        let mut fabric = lock(&self.fabric);
        let now = fabric.now() + LOOK;
        fabric.advance(now);
        instant(now)
    }

    fn watch(&mut self, side: usize, descriptor: RawFd) {
        self.pollers[side].register(descriptor, side, Interest::READABLE).expect("a channel");
    }

    fn wait(&mut self, until: Instant, sides: &mut Vec<usize>) {
        let (until, mut edges) = (virtual_ns(until), Vec::new());
        loop {
            self.pollers.iter_mut().for_each(|poller| poller.wait(Some(Duration::ZERO), &mut edges).expect("a look"));
            let mut fabric = lock(&self.fabric);
            if !edges.is_empty() || fabric.now() >= until {
                return sides.extend(edges.iter().map(|edge| edge.token));
            }
            // Polling all nodes takes some virtual time. During this time, something may have arrived at a node that was polled first.
            if (0..self.pollers.len()).any(|node| fabric.is_runnable(node, true)) {
                continue;
            }
            let next = fabric.next().map_or(until, |next| next.min(until)).max(fabric.now() + 1);
            fabric.advance(next);
        }
    }
}
