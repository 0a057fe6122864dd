//! The loop: one turn, stage by stage, in the order of `docs/loop.md`.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_transport::provider::{Drive, Provider};
use rdma_transport::wc::WorkCompletion;

use crate::adaptive::Adaptive;
use crate::config::{Config, ProviderChoice};
use crate::context::Context;
use crate::core::Core;
use crate::drain::Drain;
use crate::error::Error;
use crate::handler::Handler;
use crate::io::{self, Interest};
use crate::poller::{Clock, Edge, MioPoller, Poller, SystemClock, system_entropy};
use crate::remote::{Inbox, Remote, WakeFlag};
use crate::stats::Stats;
use crate::waiting::LOOK_OFTEN;

/// Completions taken from a queue at a time.
pub(crate) const BATCH: usize = 256;

/// The poller's token of the connection-manager channel; completion channels follow, by device.
const CM_CHANNEL: usize = 0;

/// What a turn did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turn {
    /// Something happened: a callback ran or a connection moved on.
    pub progressed: bool,
    /// A stage stopped at its bound with work left: take another turn soon. The reactor's descriptor is readable.
    pub more: bool,
}

/// What a reactor runs on; [`Reactor::new`] brings the real ones, a simulation its own.
#[derive(Debug)]
pub struct Parts {
    /// Carries the connections.
    pub provider: Box<dyn Provider>,
    /// Readiness.
    pub poller: Box<dyn Poller>,
    /// Time.
    pub clock: Box<dyn Clock>,
}

/// The loop: drives one provider, and calls a [`Handler`].
///
/// It may be sent to another thread, and is used from one at a time. No call but [`Reactor::run`] and
/// [`Reactor::turn`] blocks. Dropping it closes every connection at once, without callbacks; see
/// [`Reactor::shutdown`] for the polite way. `M` is what other threads send to it, see [`Reactor::remote`].
pub struct Reactor<M = ()> {
    pub(crate) core: Core,
    pub(crate) inbox: Inbox<M>,
    pub(crate) clock: Box<dyn Clock>,
    pub(crate) adaptive: Adaptive,
    /// This turn's edges.
    pub(crate) edges: Vec<Edge>,
    /// Those of the program's descriptors.
    pub(crate) io_edges: Vec<Edge>,
    pub(crate) batch: Vec<WorkCompletion>,
    /// The queue that `batch` was polled from, before its turn came.
    pub(crate) batch_of: Option<(usize, usize)>,
    /// Completion queues to poll: device, index. Round robin.
    pub(crate) ready: VecDeque<(usize, usize)>,
    /// The connection-manager stage stopped at its bound, or may have events without an edge.
    pub(crate) cm_pending: bool,
    /// The provider stopped at its bound.
    pub(crate) provider_pending: bool,
    pub(crate) timers_pending: bool,
    /// This turn has asked the operating system for edges.
    pub(crate) looked: bool,
    /// When this turn's edges came, until its first callback.
    pub(crate) edge: Option<Instant>,
    /// Completions there had been when an edge led to some in this turn.
    pub(crate) woken: Option<u64>,
    pub(crate) last_wait: Instant,
    /// Time from it to the next look while there is work.
    pub(crate) look_again: Duration,
}

impl Reactor {
    /// A reactor on the provider of `config`.
    ///
    /// # Errors
    /// A setting is out of its range, the provider is not available, or the system has no descriptors left.
    pub fn new(config: Config) -> Result<Self, Error> {
        Self::with_messages(config)
    }
}

impl<M> Reactor<M> {
    /// As [`Reactor::new`], for messages of type `M` from other threads.
    ///
    /// # Errors
    /// As [`Reactor::new`].
    pub fn with_messages(config: Config) -> Result<Self, Error> {
        config.validate()?;
        let auto = config.provider == ProviderChoice::Auto;
        let provider = crate::choose::open(&config, system_entropy())?;
        let poller = Box::new(MioPoller::new().map_err(Error::Poll)?);
        let mut reactor = Self::with_parts(config, Parts { provider, poller, clock: Box::new(SystemClock) })?;
        if auto {
            reactor.core.stay_undecided();
        }
        Ok(reactor)
    }

    /// A reactor on parts of your own.
    ///
    /// # Errors
    /// A setting is out of its range, or the poller refused the provider's channel.
    pub fn with_parts(config: Config, parts: Parts) -> Result<Self, Error> {
        config.validate()?;
        let Parts { provider, poller, mut clock } = parts;
        let wake = Arc::new(WakeFlag::new(poller.waker()));
        let now = clock.now();
        let inbox = Inbox::new(Arc::clone(&wake), config.remote_queue);
        let adaptive = Adaptive::new(config.spin_share, now);
        let mut reactor = Self {
            adaptive,
            core: Core::new(config, provider, poller, wake, now),
            inbox,
            clock,
            edges: Vec::with_capacity(16),
            io_edges: Vec::new(),
            batch: Vec::with_capacity(BATCH),
            batch_of: None,
            ready: VecDeque::new(),
            cm_pending: true,
            provider_pending: false,
            timers_pending: false,
            looked: false,
            edge: None,
            woken: None,
            last_wait: now,
            look_again: LOOK_OFTEN,
        };
        reactor.register_channels()?;
        Ok(reactor)
    }

    /// The same operations as in a callback, from outside.
    pub fn context(&mut self) -> Context<'_> {
        self.core.now = self.clock.now();
        Context { core: &mut self.core }
    }

    /// A handle for other threads.
    #[must_use]
    pub fn remote(&self) -> Remote<M> {
        self.inbox.remote()
    }

    /// Name of the provider that carries the connections. With `ProviderChoice::Auto`, decided by the first address
    /// that is listened on or connected to.
    #[must_use]
    pub fn provider_name(&self) -> &'static str {
        self.core.provider.name()
    }

    /// Counters since the start, and levels of now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core.snapshot()
    }

    /// Pooled buffers that exist, and those that nobody holds; receives that wait in a shared queue are nobody's.
    #[must_use]
    pub fn pool_levels(&self) -> (usize, usize) {
        let Stats { pool_buffers, pool_free, shared_posted, .. } = self.core.snapshot();
        (pool_buffers, pool_free + shared_posted)
    }

    /// When a turn is due at the latest, though nothing becomes readable. `None`: no timer is set.
    pub fn next_deadline(&mut self) -> Option<Instant> {
        [self.core.timers.next(), self.core.provider.next_deadline()].into_iter().flatten().min()
    }

    /// Turns until [`Context::stop`] or [`Remote::stop`]. Connections stay open.
    ///
    /// # Errors
    /// The poller or the provider as a whole failed; connections that fail are the handler's business.
    pub fn run<H: Handler<M> + ?Sized>(&mut self, handler: &mut H) -> Result<(), Error> {
        while !std::mem::take(&mut self.core.stop) {
            self.turn_once(handler, None)?;
        }
        Ok(())
    }

    /// Takes one bounded turn; waits at most `timeout` for something to do (`None`: until there is). How to call it
    /// from another loop is in `docs/embedding.md`.
    ///
    /// # Errors
    /// As [`Reactor::run`].
    pub fn turn<H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Turn, Error> {
        let mut turn = self.turn_once(handler, timeout.into())?;
        if !turn.more {
            // The caller may sleep on the descriptor now, and an edge that it has seen does not come again: arm, and
            // look once more at everything.
            self.arm()?;
            turn.more = self.poll_any()?;
            if !turn.more && !self.looked {
                self.look(Some(Duration::ZERO))?;
                turn.more = !self.edges.is_empty() || self.core.wake.is_pending();
            }
        }
        if turn.more {
            self.core.wake.wake_again();
        }
        Ok(turn)
    }

    /// Whether it was drained and nothing is left, see [`Context::drain`]: for who calls [`Reactor::turn`].
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.core.drain == Drain::Done
    }

    /// Closes every listener, connection and endpoint, and turns until all are gone or `deadline` has passed.
    ///
    /// # Errors
    /// As [`Reactor::run`].
    pub fn shutdown<H: Handler<M> + ?Sized>(&mut self, handler: &mut H, deadline: Duration) -> Result<(), Error> {
        let until = self.context().now() + deadline;
        for key in self.core.listeners.keys() {
            self.core.close_listener(crate::id::ListenerId(key));
        }
        while !(self.core.connections.is_empty() && self.core.endpoints.is_empty()) && self.core.now < until {
            self.core.close_endpoints(false);
            for key in self.core.connections.keys() {
                self.core.close(crate::id::ConnectionId(key));
            }
            let left = until.saturating_duration_since(self.core.now);
            self.turn_once(handler, Some(left))?;
        }
        Ok(())
    }

    fn turn_once<H: Handler<M> + ?Sized>(&mut self, handler: &mut H, timeout: Option<Duration>) -> Result<Turn, Error> {
        let mut progressed = false;
        self.looked = false;
        self.core.stats.turns += 1;
        self.core.now = self.clock.now();
        self.register_channels()?;
        // A connect or send from outside a turn is posted before anything sleeps.
        self.core.flush();

        // Coming late to a deadline, this side was not listening: silence proves nothing then.
        let late = self.next_deadline().map_or(Duration::ZERO, |due| self.core.now.saturating_duration_since(due));
        let behind = late > self.core.config.keepalive_interval / 2;
        // 1. spin  2. arm  3. wait
        let sleep_until = timeout.map(|timeout| self.core.now.checked_add(timeout));
        self.spin(sleep_until)?;
        self.arm_and_wait(sleep_until)?;

        // 4. connection-manager channel  5. events of devices, which come the same way
        self.io_edges.extend(self.edges.extract_if(.., |edge| io::is_of_user(edge.token)));
        if self.take_edge(CM_CHANNEL) {
            self.core.stats.cm_edges += 1;
            self.cm_pending = true;
        }
        if self.cm_pending {
            self.cm_pending = self.core.connection_manager(handler, &mut progressed)?;
            self.cm_pending |= self.core.device_events(handler, &mut progressed);
            self.register_channels()?;
        }
        // 6. completion channels
        self.completion_channels();
        // 7. completion queues
        self.completion_queues(handler, &mut progressed)?;
        self.core.writables(handler);
        self.core.writable_endpoints(handler);
        // What answers a message waits for nothing that has nothing to do with it.
        self.core.flush();
        // 8. timers
        let behind = behind || self.has_unseen() || self.provider_pending;
        self.timers_pending = self.core.run_timers(handler, behind, &mut progressed);
        // 9. other descriptors, other threads
        self.other_descriptors(handler, &mut progressed);
        if self.core.wake.take() {
            progressed = true;
            self.inbox.pending = true;
            self.core.take_returned();
            self.core.stop |= self.core.wake.take_stop();
            self.core.look_for_others();
        }
        self.core.arrivals(handler, &mut progressed);
        self.inbox.serve(&mut self.core, handler, &mut progressed);
        self.core.begin_drain(handler, &mut progressed);
        // A callback may have brought a provider or a device into use.
        self.register_channels()?;
        // 10. ends
        self.core.finish_endings(handler, &mut progressed);
        self.core.finish_endpoints(handler, &mut progressed);
        self.core.finish_drain();
        // 11. flush
        self.core.flush();
        self.edge = None;
        if let Some(before) = self.woken.take() {
            self.core.stats.wake_completions += self.core.stats.completions - before;
        }
        Ok(Turn { progressed, more: self.has_more() })
    }

    pub(crate) fn has_more(&self) -> bool {
        self.cm_pending
            || self.core.awaits_turn()
            || self.provider_pending
            || self.timers_pending
            || self.inbox.pending
            || self.core.endings_moved
            || self.has_completions()
    }

    pub(crate) fn has_completions(&self) -> bool {
        self.has_unseen() || self.core.fair.is_behind()
    }

    /// Whether there may be completions of which it is not known yet whose they are.
    fn has_unseen(&self) -> bool {
        self.batch_of.is_some() || !self.ready.is_empty()
    }

    /// Watches the channels of a provider and of devices that came into use.
    #[inline]
    fn register_channels(&mut self) -> Result<(), Error> {
        if self.core.new_provider || !self.core.new_devices.is_empty() { self.register_new_channels() } else { Ok(()) }
    }

    fn register_new_channels(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut self.core.new_provider) {
            // The one before, if any, took its registration with its descriptor.
            let fd = self.core.provider.cm_channel();
            self.core.poller.register(fd, CM_CHANNEL, Interest::READABLE).map_err(Error::Poll)?;
            self.cm_pending = true;
        }
        while let Some(device) = self.core.new_devices.pop() {
            if self.core.provider.device(device).is_none() {
                continue; // removed again
            }
            let fd = self.core.provider.completion_channel(device)?;
            let token = CM_CHANNEL + 1 + device.0 as usize;
            self.core.poller.register(fd, token, Interest::READABLE).map_err(Error::Poll)?;
        }
        Ok(())
    }

    fn take_edge(&mut self, token: usize) -> bool {
        let before = self.edges.len();
        self.edges.retain(|edge| edge.token != token);
        self.edges.len() < before
    }

    /// Stage 9: tells the program of its descriptors.
    fn other_descriptors<H: Handler<M> + ?Sized>(&mut self, handler: &mut H, progressed: &mut bool) {
        let mut edges = std::mem::take(&mut self.io_edges);
        for Edge { token, readiness } in edges.drain(..) {
            // A callback may have taken it back meanwhile.
            if let Some(id) = self.core.io.find(token) {
                *progressed = true;
                self.core.stats.io_edges += 1;
                handler.on_io_ready(&mut Context { core: &mut self.core }, id, readiness);
            }
        }
        self.io_edges = edges;
    }

    /// Stage 6: lets the provider move. Whose completion events they are is asked before the next arming, and not
    /// now: the queues are polled at once.
    fn completion_channels(&mut self) {
        let now = self.core.now;
        let due = self.core.provider.next_deadline().is_some_and(|deadline| deadline <= now);
        self.core.stats.completion_edges += self.edges.len() as u64;
        if !self.edges.is_empty() || due || self.provider_pending {
            self.provider_pending = self.core.provider.progress(now, Drive::Full);
            // A deadline or a byte may have ended a connection: that is connection-manager news.
            self.cm_pending |= due;
            for device in self.core.devices.iter_mut().flatten() {
                device.has_events = true;
            }
        }
        self.edges.clear();
    }

    /// Stage 7: completion queues in turn, each until it is empty or the turn's budget is used up.
    fn completion_queues<H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        progressed: &mut bool,
    ) -> Result<(), Error> {
        self.core.fair.turn();
        let mut budget = self.core.config.completions_per_turn as usize;
        if self.core.fair.is_behind() {
            *progressed = true;
            // Half of the turn at most: what others have sent meanwhile is in the queues.
            let mut left = budget.div_ceil(2);
            budget -= left;
            self.core.backlogs(handler, &mut left);
            budget += left;
        }
        let mut polled = None;
        if let Some((d, i)) = self.batch_of.take() {
            budget = budget.saturating_sub(self.batch.len());
            let want = self.most();
            polled = Some((d, i)).filter(|_| self.batch.len() < want);
            self.dispatch(handler, d, i, want);
            *progressed = true;
        }
        self.mark_unarmed(polled);
        while budget > 0 {
            let Some((d, i)) = self.ready.pop_front() else { break };
            let Some(device) = self.core.devices[d].as_mut() else { continue };
            let cq = &mut device.cqs[i];
            cq.ready = false;
            self.batch.clear();
            let want = BATCH.min(budget);
            let count = self.core.provider.poll_cq(cq.id, want, &mut self.batch)?;
            if count == 0 {
                cq.drained();
                continue;
            }
            *progressed = true;
            budget -= count;
            self.dispatch(handler, d, i, want);
        }
        Ok(())
    }

    /// A queue that is not armed tells nothing, nor one whose events were not taken yet: it is looked at in its turn,
    /// however busy the others are. The one that was just polled and gave all it had is not asked again.
    fn mark_unarmed(&mut self, polled: Option<(usize, usize)>) {
        for d in 0..self.core.devices.len() {
            for i in 0..self.core.devices[d].as_ref().map_or(0, |device| device.cqs.len()) {
                if self.core.devices[d].as_ref().is_some_and(|device| device.has_events || !device.cqs[i].armed)
                    && polled != Some((d, i))
                {
                    self.mark_ready(d, i);
                }
            }
        }
    }

    /// Hands the batch to the callbacks. Its queue may hold more if it gave as many as were wanted; if not, the poll
    /// before the arming is soon enough for what comes meanwhile, and what this batch has to send goes out first.
    fn dispatch<H: Handler<M> + ?Sized>(&mut self, handler: &mut H, d: usize, i: usize, want: usize) {
        if self.batch.len() >= want {
            self.mark_ready(d, i);
        }
        if let Some(device) = &mut self.core.devices[d] {
            // One that is armed has raised an event by now, or is about to.
            device.has_events |= device.cqs[i].armed;
        }
        self.adaptive.found(self.core.now);
        if let Some(edge) = self.edge.take() {
            let time = self.clock.now().saturating_duration_since(edge);
            self.core.stats.wakes += 1;
            self.core.stats.wake_time += time;
            self.core.stats.wake_time_max = self.core.stats.wake_time_max.max(time);
            self.woken = Some(self.core.stats.completions);
        }
        self.core.completions(handler, d, &self.batch);
        if let Some(device) = &mut self.core.devices[d] {
            device.cqs[i].handled(self.batch.len());
        }
    }

    fn mark_ready(&mut self, d: usize, i: usize) {
        if let Some(cq) = self.core.devices[d].as_mut().and_then(|device| device.cqs.get_mut(i))
            && !cq.ready
        {
            cq.ready = true;
            self.ready.push_back((d, i));
        }
    }
}

impl<M> fmt::Debug for Reactor<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reactor").field("core", &self.core).field("inbox", &self.inbox).finish_non_exhaustive()
    }
}

impl<M> AsRawFd for Reactor<M> {
    /// The descriptor to nest in an outer loop: readable when a turn has something to do.
    fn as_raw_fd(&self) -> RawFd {
        self.core.poller.as_fd().as_raw_fd()
    }
}

impl<M> AsFd for Reactor<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.core.poller.as_fd()
    }
}

impl<M> Drop for Reactor<M> {
    fn drop(&mut self) {
        self.core.teardown();
        for device in 0..self.core.devices.len() {
            self.core.drop_regions_of_device(device);
        }
        for device in self.core.devices.iter_mut().flatten() {
            device.close(&mut *self.core.provider);
        }
    }
}
