//! The loop: one turn, stage by stage, in the order of `docs/loop.md`.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_transport::provider::{DeviceId, Drive, Provider};
use rdma_transport::wc::WorkCompletion;

use crate::adaptive::Adaptive;
use crate::config::{Config, ProviderChoice, Wait};
use crate::context::Context;
use crate::core::Core;
use crate::error::Error;
use crate::handler::Handler;
use crate::io::{self, Interest};
use crate::poller::{Clock, Edge, MioPoller, Poller, SystemClock, system_entropy};
use crate::remote::{Inbox, Remote, WakeFlag};
use crate::stats::Stats;

/// Completions taken from a queue at a time.
const BATCH: usize = 256;

/// While there is always work, the operating system is still asked this often for edges.
const LOOK_AROUND: Duration = Duration::from_micros(50);

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
    core: Core,
    inbox: Inbox<M>,
    clock: Box<dyn Clock>,
    adaptive: Adaptive,
    /// This turn's edges.
    edges: Vec<Edge>,
    /// Those of the program's descriptors.
    io_edges: Vec<Edge>,
    batch: Vec<WorkCompletion>,
    /// The queue that `batch` was polled from, before its turn came.
    batch_of: Option<(usize, usize)>,
    /// Completion queues to poll: device, index. Round robin.
    ready: VecDeque<(usize, usize)>,
    /// The connection-manager stage stopped at its bound, or may have events without an edge.
    cm_pending: bool,
    /// The provider stopped at its bound.
    provider_pending: bool,
    timers_pending: bool,
    /// This turn has asked the operating system for edges.
    looked: bool,
    /// When this turn's edges came, until its first callback.
    edge: Option<Instant>,
    last_wait: Instant,
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
            last_wait: now,
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

    /// Pooled buffers that exist, and those that nobody holds.
    #[must_use]
    pub fn pool_levels(&self) -> (usize, usize) {
        let Stats { pool_buffers, pool_free, .. } = self.core.snapshot();
        (pool_buffers, pool_free)
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

    /// Closes every listener and connection, and turns until all are gone or `deadline` has passed.
    ///
    /// # Errors
    /// As [`Reactor::run`].
    pub fn shutdown<H: Handler<M> + ?Sized>(&mut self, handler: &mut H, deadline: Duration) -> Result<(), Error> {
        let until = self.context().now() + deadline;
        for key in self.core.listeners.keys() {
            self.core.close_listener(crate::id::ListenerId(key));
        }
        while !self.core.connections.is_empty() && self.core.now < until {
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

        // 1. spin  2. arm  3. wait
        let sleep_until = timeout.map(|timeout| self.core.now.checked_add(timeout));
        self.spin(sleep_until)?;
        // Coming late to a deadline, this side was not listening: silence proves nothing then.
        let late = self.next_deadline().map_or(Duration::ZERO, |due| self.core.now.saturating_duration_since(due));
        let behind = late > self.core.config.keepalive_interval / 2;
        self.arm_and_wait(sleep_until)?;

        // 4. connection-manager channel  (5. devices' asynchronous events: no provider has any yet)
        self.io_edges.extend(self.edges.extract_if(.., |edge| io::is_of_user(edge.token)));
        if self.take_edge(CM_CHANNEL) {
            self.core.stats.cm_edges += 1;
            self.cm_pending = true;
        }
        if self.cm_pending {
            self.cm_pending = self.core.connection_manager(handler, &mut progressed)?;
            self.register_channels()?;
        }
        // 6. completion channels
        self.completion_channels()?;
        // 7. completion queues
        self.completion_queues(handler, &mut progressed)?;
        self.core.writables(handler);
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
        }
        self.inbox.serve(&mut self.core, handler, &mut progressed);
        // 10. ends
        self.core.finish_endings(handler, &mut progressed);
        // 11. flush
        self.core.flush();
        self.edge = None;
        Ok(Turn { progressed, more: self.has_more() })
    }

    fn has_more(&self) -> bool {
        self.cm_pending
            || self.provider_pending
            || self.timers_pending
            || self.inbox.pending
            || self.core.endings_moved
            || self.has_completions()
    }

    fn has_completions(&self) -> bool {
        self.has_unseen() || self.core.fair.is_behind()
    }

    /// Whether there may be completions of which it is not known yet whose they are.
    fn has_unseen(&self) -> bool {
        self.batch_of.is_some() || !self.ready.is_empty()
    }

    /// Watches the channels of a provider and of devices that came into use.
    fn register_channels(&mut self) -> Result<(), Error> {
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

    /// Stage 1: polls without sleeping while the budget lasts.
    fn spin(&mut self, sleep_until: Option<Option<Instant>>) -> Result<(), Error> {
        if self.has_more() {
            return Ok(());
        }
        let from = self.core.now;
        let adaptive = self.core.config.wait == Wait::Adaptive;
        let budget = match self.core.config.wait {
            Wait::Event => return Ok(()),
            Wait::Spin(budget) => budget,
            Wait::Adaptive => {
                // Who does not want to wait wants no polling either; what the flush has completed ends no idle time.
                if sleep_until == Some(Some(from)) || self.poll_any()? {
                    return Ok(());
                }
                let budget = self.adaptive.budget(from);
                if budget.is_zero() {
                    return Ok(());
                }
                budget
            }
        };
        let mut until = from.checked_add(budget);
        for deadline in [sleep_until.flatten(), self.next_deadline()].into_iter().flatten() {
            until = Some(until.map_or(deadline, |until| until.min(deadline)));
        }
        let hit = self.spin_until(until)?;
        self.core.stats.spin_hits += u64::from(hit);
        self.core.stats.spin_misses += u64::from(!hit);
        if adaptive {
            self.adaptive.polled(self.core.now.saturating_duration_since(from), hit);
        }
        Ok(())
    }

    /// Polls until there is a completion, and says so; or something else to do.
    fn spin_until(&mut self, until: Option<Instant>) -> Result<bool, Error> {
        loop {
            self.core.stats.spins += 1;
            let more = self.core.provider.progress(self.core.now, Drive::Spin);
            self.provider_pending |= more;
            if self.poll_any()? {
                return Ok(true);
            }
            self.core.now = self.clock.now();
            if until.is_some_and(|until| self.core.now >= until) || more {
                return Ok(false);
            }
            if self.core.now.saturating_duration_since(self.last_wait) > LOOK_AROUND {
                self.look(Some(Duration::ZERO))?;
                if !self.edges.is_empty() || self.core.wake.is_pending() {
                    return Ok(false);
                }
            }
        }
    }

    /// Polls the completion queues until one has something; whether one has.
    fn poll_any(&mut self) -> Result<bool, Error> {
        if self.has_completions() {
            return Ok(true);
        }
        let most = BATCH.min(self.core.config.completions_per_turn as usize);
        for (d, device) in self.core.devices.iter_mut().enumerate() {
            let Some(device) = device else { continue };
            for (i, cq) in device.cqs.iter_mut().enumerate() {
                self.batch.clear();
                if self.core.provider.poll_cq(cq.id, most, &mut self.batch)? > 0 {
                    self.batch_of = Some((d, i));
                    return Ok(true);
                }
                cq.drained();
            }
        }
        Ok(false)
    }

    /// Stages 2 and 3: arms what is not armed, looks once more, and sleeps only if there is nothing to do.
    fn arm_and_wait(&mut self, sleep_until: Option<Option<Instant>>) -> Result<(), Error> {
        let mut timeout = None;
        let mut busy = self.has_more() || !self.edges.is_empty() || self.poll_any()?;
        if !busy {
            self.arm()?;
            if self.poll_any()? {
                self.core.stats.arm_races += 1;
                busy = true;
            }
        }
        if busy || self.core.wake.is_pending() {
            // A flood that has to wait for its next share must not keep the others' edges from being seen.
            let recent = self.core.now.saturating_duration_since(self.last_wait) < LOOK_AROUND;
            if recent && !self.core.fair.is_behind() {
                return Ok(());
            }
            timeout = Some(Duration::ZERO);
        } else {
            for deadline in [sleep_until.flatten(), self.next_deadline()].into_iter().flatten() {
                let left = deadline.saturating_duration_since(self.core.now);
                timeout = Some(timeout.map_or(left, |t: Duration| t.min(left)));
            }
            self.adaptive.sleeps();
        }
        self.look(timeout)
    }

    fn arm(&mut self) -> Result<(), Error> {
        for device in self.core.devices.iter_mut().flatten() {
            for cq in &mut device.cqs {
                if !cq.armed {
                    self.core.provider.req_notify(cq.id)?;
                    cq.armed = true;
                    self.core.stats.arms += 1;
                }
            }
        }
        Ok(())
    }

    /// Asks the operating system for edges.
    fn look(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        let before = self.edges.len();
        self.looked = true;
        self.core.poller.wait(timeout, &mut self.edges).map_err(Error::Poll)?;
        self.core.stats.waits += 1;
        self.core.stats.empty_waits += u64::from(self.edges.len() == before);
        self.core.now = self.clock.now();
        self.last_wait = self.core.now;
        if self.edges.len() > before {
            self.edge = Some(self.core.now);
        }
        Ok(())
    }

    /// Stage 6: lets the provider move, and takes completion events until there are none.
    fn completion_channels(&mut self) -> Result<(), Error> {
        let now = self.core.now;
        let due = self.core.provider.next_deadline().is_some_and(|deadline| deadline <= now);
        self.core.stats.completion_edges += self.edges.len() as u64;
        if !self.edges.is_empty() || due || self.provider_pending {
            self.provider_pending = self.core.provider.progress(now, Drive::Full);
            // A deadline or a byte may have ended a connection: that is connection-manager news.
            self.cm_pending |= due;
        }
        for d in 0..self.core.devices.len() {
            if self.core.devices[d].is_none() {
                continue;
            }
            while let Some(cq_id) = self.core.provider.next_completion_event(DeviceId(d as u32))? {
                self.core.stats.completion_events += 1;
                let Some(device) = self.core.devices[d].as_mut() else { break };
                let Some(index) = device.cqs.iter().position(|cq| cq.id == cq_id) else { continue };
                device.cqs[index].armed = false;
                self.mark_ready(d, index);
            }
        }
        self.edges.clear();
        Ok(())
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
        if let Some((d, i)) = self.batch_of.take() {
            budget = budget.saturating_sub(self.batch.len());
            self.dispatch(handler, d, i);
            *progressed = true;
        }
        self.mark_unarmed();
        while budget > 0 {
            let Some((d, i)) = self.ready.pop_front() else { break };
            let Some(device) = self.core.devices[d].as_mut() else { continue };
            let cq = &mut device.cqs[i];
            cq.ready = false;
            self.batch.clear();
            let count = self.core.provider.poll_cq(cq.id, BATCH.min(budget), &mut self.batch)?;
            if count == 0 {
                cq.drained();
                continue;
            }
            *progressed = true;
            budget -= count;
            self.dispatch(handler, d, i);
        }
        Ok(())
    }

    /// A queue that is not armed tells nothing: it is looked at in its turn, however busy the others are.
    fn mark_unarmed(&mut self) {
        for d in 0..self.core.devices.len() {
            for i in 0..self.core.devices[d].as_ref().map_or(0, |device| device.cqs.len()) {
                if self.core.devices[d].as_ref().is_some_and(|device| !device.cqs[i].armed) {
                    self.mark_ready(d, i);
                }
            }
        }
    }

    /// Hands the batch to the callbacks; its queue may hold more.
    fn dispatch<H: Handler<M> + ?Sized>(&mut self, handler: &mut H, d: usize, i: usize) {
        self.mark_ready(d, i);
        self.adaptive.found(self.core.now);
        if let Some(edge) = self.edge.take() {
            let time = self.clock.now().saturating_duration_since(edge);
            self.core.stats.wakes += 1;
            self.core.stats.wake_time += time;
            self.core.stats.wake_time_max = self.core.stats.wake_time_max.max(time);
            self.core.stats.wake_completions += self.batch.len() as u64;
        }
        self.core.completions(handler, d, &self.batch);
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
