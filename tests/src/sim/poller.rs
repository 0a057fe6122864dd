//! The simulated poller and clock of a node.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rdma_reactor::{Clock, Edge, Interest, Poller, Readiness, Wake};

use super::fabric::{Fabric, OwnDescriptor, Shared, let_others_speak, lock};
use super::net::descriptor;

/// Returns the instant at the virtual time `virtual_ns`. The instant of time 0 is arbitrary, but the same for all calls.
#[must_use]
pub fn instant(virtual_ns: u64) -> Instant {
    static BASE: OnceLock<Instant> = OnceLock::new();
    #[allow(clippy::disallowed_methods, reason = "virtual time needs some instant to start from")]
    let base = *BASE.get_or_init(Instant::now);
    base + Duration::from_nanos(virtual_ns)
}

/// Returns the virtual time of an instant, in ns.
#[must_use]
pub fn virtual_ns(at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(instant(0)).as_nanos()).unwrap_or(u64::MAX)
}

/// The virtual clock. Each reading advances the time a little.
pub struct SimClock(pub Shared);

impl std::fmt::Debug for SimClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimClock")
    }
}

impl Clock for SimClock {
    fn now(&mut self) -> Instant {
        let mut fabric = lock(&self.0);
        fabric.tick();
        let now = instant(fabric.now());
        drop(fabric);
        let_others_speak(&self.0);
        now
    }
}

/// The simulated poller of a node. It reports edges of the node's channels, as a poller of nested epoll descriptors does. Each event raises
/// an edge. Several edges of one channel are reported as one edge, and only if something is readable or writable. Some reported edges are
/// spurious.
pub struct SimPoller {
    node: usize,
    fabric: Shared,
    /// A real descriptor. The trait requires one, but nothing polls it.
    file: File,
}

impl SimPoller {
    /// Returns the poller of `node`.
    ///
    /// # Panics
    /// Panics if `/dev/null` does not exist.
    #[must_use]
    pub fn new(node: usize, fabric: Shared) -> Self {
        Self { node, fabric, file: File::open("/dev/null").expect("/dev/null") }
    }
}

impl std::fmt::Debug for SimPoller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimPoller of node{}", self.node)
    }
}

impl SimPoller {
    /// Adds the edges since the last call. Returns true if the node was woken since then.
    fn collect(&self, fabric: &mut Fabric, edges: &mut Vec<Edge>) -> bool {
        for channel in 0..2 {
            let spurious = fabric.net.spurious;
            let spurious = fabric.rng.chance(spurious);
            let readable = fabric.look(self.node, channel);
            let state = &mut fabric.ports[self.node].channels[channel];
            let Some(token) = state.token else { continue };
            if std::mem::take(&mut state.edge) && readable || spurious {
                edges.push(Edge { token, readiness: Readiness::new(true, false, false) });
            }
        }
        for own in &mut fabric.ports[self.node].own {
            if std::mem::take(&mut own.edge) && own.bytes > 0 {
                edges.push(Edge { token: own.token, readiness: Readiness::new(true, false, false) });
            }
        }
        std::mem::take(&mut fabric.ports[self.node].woken)
    }
}

impl Poller for SimPoller {
    fn register(&mut self, fd: RawFd, token: usize, _interest: Interest) -> io::Result<()> {
        let mut fabric = lock(&self.fabric);
        let Some(channel) = (0..2).find(|&i| descriptor(self.node, i) == fd) else {
            fabric.ports[self.node].own.push(OwnDescriptor { fd, token, edge: false, bytes: 0 });
            return Ok(());
        };
        fabric.ports[self.node].channels[channel].token = Some(token);
        if fabric.is_readable(self.node, channel) {
            fabric.raise(self.node, channel);
        }
        Ok(())
    }

    fn deregister(&mut self, fd: RawFd) -> io::Result<()> {
        let mut fabric = lock(&self.fabric);
        match (0..2).find(|&i| descriptor(self.node, i) == fd) {
            Some(channel) => fabric.ports[self.node].channels[channel].token = None,
            None => fabric.ports[self.node].own.retain(|own| own.fd != fd),
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Duration>, edges: &mut Vec<Edge>) -> io::Result<()> {
        let (mut fabric, before) = (lock(&self.fabric), edges.len());
        fabric.tick();
        let mut woken = self.collect(&mut fabric, edges);
        // This wait would sleep. That is a fault if the node has missed an event.
        if timeout != Some(Duration::ZERO) && edges.len() == before && !woken {
            if let Some(what) = fabric.asleep_on(self.node) {
                let violation = format!("node{} waits in spite of {what}", self.node);
                fabric.violations.push(violation);
            }
            let time = timeout.map_or(u64::MAX, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
            let end = fabric.now().saturating_add(time);
            while fabric.sleeps && edges.len() == before && !woken && fabric.now() < end {
                // If there is neither a deadline nor a scheduled event, the wait returns, as if a
                // signal had interrupted it.
                let Some(to) = fabric.next().map(|next| next.min(end)).or(timeout.map(|_| end)) else { break };
                fabric.advance(to);
                woken = self.collect(&mut fabric, edges);
            }
        }
        drop(fabric);
        let_others_speak(&self.fabric);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(SimWaker { node: self.node, fabric: self.fabric.clone() })
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

struct SimWaker {
    node: usize,
    fabric: Shared,
}

impl std::fmt::Debug for SimWaker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimWaker of node{}", self.node)
    }
}

impl Wake for SimWaker {
    fn wake(&self) -> io::Result<()> {
        lock(&self.fabric).wake(self.node);
        Ok(())
    }
}
