//! The loop: one turn, stage by stage, in the order of `docs/loop.md`.

mod adaptive;
mod contain;
mod deliver;
mod group;
mod serve;
mod wait;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_transport::provider::Provider;

use self::deliver::Delivery;
use self::serve::Desk;
use self::wait::Waiting;
use crate::api::context::Context;
use crate::api::handler::Handler;
use crate::api::remote::{Commands, Remote};
use crate::config::Config;
use crate::datagram::table::Endpoints;
use crate::driver::queues::CM_CHANNEL;
use crate::driver::{Driver, choose};
use crate::error::Error;
use crate::seam::poller::{Clock, MioPoller, Poller, SystemClock, system_entropy};
use crate::seam::wake::WakeFlag;
use crate::stats::Stats;

/// The result of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turn {
    /// A callback ran, or a connection moved on.
    pub progressed: bool,
    /// A stage stopped at its bound with work left: take another turn soon. The reactor's descriptor is readable.
    pub more: bool,
}

/// The parts that a reactor runs on. [`Reactor::new`] takes the real ones, and a simulation brings its own.
#[derive(Debug)]
pub struct Parts {
    /// The provider that carries the connections.
    pub provider: Box<dyn Provider>,
    /// The source of readiness.
    pub poller: Box<dyn Poller>,
    /// The source of time.
    pub clock: Box<dyn Clock>,
}

/// The loop drives one provider, and calls a [`Handler`].
///
/// A reactor may be sent to another thread, and is used from one thread at a time. Only [`Reactor::run`],
/// [`Reactor::turn`] and [`Reactor::shutdown`] wait for something to happen. Dropping a reactor closes every connection
/// at once, without callbacks; see [`Reactor::shutdown`] for the polite way. `M` is the type of the messages from other
/// threads, see [`Reactor::remote`].
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::{Config, ConnectError, ConnectionId, Context, Handler, ProviderChoice, Reactor};
///
/// /// What became of a connection.
/// #[derive(Default)]
/// struct Program {
///     error: Option<ConnectError>,
/// }
///
/// impl Handler for Program {
///     fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
///         self.error = Some(error);
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (mut reactor, mut program) = (Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?, Program::default());
/// // Nobody listens there.
/// reactor.context().connect("127.0.0.1:1".parse()?)?;
/// // `run` does the same until it is stopped. A program that has its own loop takes turns.
/// while program.error.is_none() {
///     reactor.turn(&mut program, Duration::from_millis(100))?;
/// }
/// println!("{}", program.error.as_ref().expect("just seen"));
/// reactor.shutdown(&mut program, Duration::from_secs(1))?;
/// # Ok(())
/// # }
/// ```
pub struct Reactor<M = ()> {
    driver: Driver,
    endpoints: Endpoints,
    desk: Desk<M>,
    waiting: Waiting,
    /// The connection-manager stage has stopped at its bound, or may have events without an edge.
    cm_pending: bool,
    /// The timer stage has stopped at its bound.
    timers_pending: bool,
    /// A turn has begun and not ended.
    turning: bool,
}

impl Reactor {
    /// Makes a reactor on the provider that `config` names.
    ///
    /// # Errors
    /// A setting is out of its range, the provider is not available, or the system has no descriptors left.
    pub fn new(config: Config) -> Result<Self, Error> {
        Self::with_messages(config)
    }
}

impl<M> Reactor<M> {
    /// Makes a reactor as [`Reactor::new`] does, for messages of type `M` from other threads.
    ///
    /// # Errors
    /// As [`Reactor::new`].
    pub fn with_messages(config: Config) -> Result<Self, Error> {
        config.validate()?;
        let provider = choose::open(&config, system_entropy())?;
        let poller = Box::new(MioPoller::new().map_err(Error::Poll)?);
        Self::with_parts(config, Parts { provider, poller, clock: Box::new(SystemClock) })
    }

    /// Makes a reactor on parts of the caller's own.
    ///
    /// ```
    /// use rdma_reactor::{Config, Error, Parts, Reactor};
    ///
    /// /// A reactor of a simulation: its provider, its poller and its clock are the caller's.
    /// fn simulated(parts: Parts) -> Result<Reactor, Error> {
    ///     Reactor::with_parts(Config::default(), parts)
    /// }
    /// ```
    ///
    /// # Errors
    /// A setting is out of its range, or the poller refused the provider's channel.
    pub fn with_parts(config: Config, parts: Parts) -> Result<Self, Error> {
        config.validate()?;
        let Parts { provider, poller, clock } = parts;
        let wake = Arc::new(WakeFlag::new(poller.waker()));
        let commands = Commands::new(Arc::clone(&wake), config.remote_queue);
        let driver = Driver::new(config, provider, (poller, clock), wake);
        let mut reactor = Self {
            desk: Desk::new(commands),
            waiting: Waiting::new(driver.config(), driver.now()),
            driver,
            endpoints: Endpoints::default(),
            cm_pending: true,
            timers_pending: false,
            turning: false,
        };
        reactor.driver.watch_channels()?;
        reactor.driver.leave_turn();
        Ok(reactor)
    }

    /// As [`Config::quiet_sends`], for the connections that are opened from now on.
    #[cfg(feature = "async")]
    pub(crate) const fn quiet_sends(&mut self) {
        self.driver.quiet_sends();
    }

    /// Offers the operations of a callback outside of a turn. What they queue, open, set or drain is seen to in the next
    /// turn, and the reactor's descriptor becomes readable for that.
    pub fn context(&mut self) -> Context<'_> {
        self.driver.leave_turn();
        self.driver.look_at_clock();
        Context { driver: &mut self.driver, endpoints: &mut self.endpoints }
    }

    /// As [`Reactor::context`], for a caller that takes a turn before it waits for the descriptor: nothing makes the descriptor readable
    /// for what is asked for here. A loop of [`Reactor::turn`] with a timeout is such a caller, since the turn posts first, and waits then.
    pub fn quiet_context(&mut self) -> Context<'_> {
        self.driver.enter_turn();
        Context { driver: &mut self.driver, endpoints: &mut self.endpoints }
    }

    /// As [`Reactor::quiet_context`], at the time of the turn that was just taken.
    #[cfg(feature = "async")]
    pub(crate) fn late_context(&mut self) -> Context<'_> {
        self.driver.resume_turn();
        Context { driver: &mut self.driver, endpoints: &mut self.endpoints }
    }

    /// Makes a handle for other threads.
    #[must_use]
    pub fn remote(&self) -> Remote<M> {
        self.desk.commands.remote()
    }

    /// Name of the provider that carries the connections: `verbs` or `iwarp`. With `ProviderChoice::Auto` on a host with RDMA
    /// devices it is the one that was used so far, or `verbs+iwarp` if that is none or both.
    #[must_use]
    pub fn provider_name(&self) -> &'static str {
        self.driver.provider().name()
    }

    /// Counters since the start, and current levels.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.driver.stats()
    }

    /// Number of pooled buffers that exist, and of those that nobody holds. Receives that wait in a shared queue count
    /// as held by nobody.
    #[must_use]
    pub fn pool_levels(&self) -> (usize, usize) {
        let memory = self.driver.stats().memory;
        (memory.pool_buffers, memory.pool_free + memory.shared_posted)
    }

    /// Time at which a turn is due at the latest, even if nothing becomes readable. `None`: no timer is set.
    pub fn next_deadline(&mut self) -> Option<Instant> {
        self.driver.next_deadline()
    }

    /// Takes turns until [`Context::stop`] or [`Remote::stop`] is called, or a drain has ended. A stop leaves
    /// connections open; a reactor that was drained takes no turn any more.
    ///
    /// # Errors
    /// The poller or the provider as a whole failed; a connection that fails is reported to the handler instead. Nothing is
    /// lost by it, and the program may go on with another turn. [`Error::Panicked`] after a callback has panicked and the
    /// program has caught that: then the reactor can only be dropped, see [`Config::contain_panics`].
    pub fn run<H: Handler<M> + ?Sized>(&mut self, handler: &mut H) -> Result<(), Error> {
        while !self.driver.take_stop() && !self.driver.is_drained() {
            self.turn_once(handler, None)?;
        }
        Ok(())
    }

    /// Takes one bounded turn; waits at most `timeout` for something to do (`None`: until there is). How to call it
    /// from another loop is in [the guide](crate::guide::embedding).
    ///
    /// Example: [`Reactor`].
    ///
    /// # Errors
    /// As [`Reactor::run`].
    pub fn turn<H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Turn, Error> {
        let mut turn = self.turn_once(handler, timeout.into())?;
        turn.more = self.settle(turn.more)?;
        Ok(turn)
    }

    /// Prepares for a caller that sleeps on the descriptor: whatever there is to do makes it readable from now on. `more`: there
    /// is something. Returns whether there is.
    pub(crate) fn settle(&mut self, more: bool) -> Result<bool, Error> {
        // An edge that was seen does not come again. So arm, and look once more at everything.
        let more = more || self.waiting.look_before_sleep(&mut self.driver)?;
        let more = more || self.driver.os().wake.is_pending() && !cfg!(planted = "wake-lost-in-a-turn");
        if more {
            self.driver.os().wake.wake_again();
        }
        Ok(more)
    }

    /// Whether the reactor was drained and nothing is left, see [`Context::drain`]. This is for programs that call
    /// [`Reactor::turn`].
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.driver.is_drained()
    }

    /// Closes every listener, connection and endpoint, and takes turns until all are gone or `deadline` has passed.
    ///
    /// Example: [`Reactor`].
    ///
    /// # Errors
    /// As [`Reactor::run`].
    pub fn shutdown<H: Handler<M> + ?Sized>(&mut self, handler: &mut H, deadline: Duration) -> Result<(), Error> {
        let cx = self.context();
        let until = cx.now().checked_add(deadline);
        cx.driver.close_listeners();
        let is_left = |reactor: &Self| !(reactor.driver.connections().is_empty() && reactor.endpoints.is_empty());
        while is_left(self) && until.is_none_or(|until| self.driver.now() < until) {
            self.endpoints.close_all(&mut self.driver, false);
            self.driver.close_all();
            let left = until.map(|until| until.saturating_duration_since(self.driver.now()));
            self.turn_once(handler, left)?;
        }
        Ok(())
    }

    /// Takes one turn, unless a panic has ended the last one in the middle: then nobody knows what was left undone.
    pub(crate) fn turn_once<H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        timeout: Option<Duration>,
    ) -> Result<Turn, Error> {
        if std::mem::replace(&mut self.turning, true) {
            return Err(Error::Panicked);
        }
        self.driver.enter_turn();
        let was_drained = self.is_drained();
        let progressed = self.stages(handler, timeout);
        self.waiting.end_turn(&mut self.driver);
        self.driver.leave_turn();
        self.turning = false;
        // The turn that ends a drain is followed by a look of the caller, who would otherwise wait for nothing.
        Ok(Turn { progressed: progressed?, more: self.has_more() || self.is_drained() != was_drained })
    }

    /// Adds to the turn that was just taken: posts what tasks have asked for since, and handles what completes at once, as
    /// stage 7 does for callbacks.
    #[cfg(feature = "async")]
    pub(crate) fn follow_up<H: Handler<M> + ?Sized>(&mut self, handler: &mut H) -> Result<Turn, Error> {
        if std::mem::replace(&mut self.turning, true) {
            return Err(Error::Panicked);
        }
        self.driver.resume_turn();
        let (driver, endpoints, desk) = (&mut self.driver, &mut self.endpoints, &mut self.desk);
        let mut delivery = Delivery { driver, endpoints, desk, handler, lender: None, progressed: false };
        delivery.follow_up(|driver| self.waiting.found(driver));
        let progressed = delivery.progressed;
        self.driver.leave_turn();
        self.turning = false;
        Ok(Turn { progressed, more: self.has_more() })
    }

    /// Takes the stages of a turn; `docs/loop.md` describes them and their order. Whether something moved on. What a failed
    /// stage has left is done in the next turn.
    #[inline]
    fn stages<H: Handler<M> + ?Sized>(&mut self, handler: &mut H, timeout: Option<Duration>) -> Result<bool, Error> {
        self.begin()?;
        // 1. spin  2. arm  3. wait
        let more = self.has_more();
        self.waiting.wait(&mut self.driver, more, timeout)?;
        self.cm_pending |= self.waiting.take_edge(&mut self.driver, CM_CHANNEL);
        let (driver, endpoints, desk) = (&mut self.driver, &mut self.endpoints, &mut self.desk);
        let mut delivery = Delivery { driver, endpoints, desk, handler, lender: None, progressed: false };
        // 4. connection-manager channel  5. events of devices, which come over the same channel
        if self.cm_pending {
            self.cm_pending = delivery.connection_manager()?;
            self.cm_pending |= delivery.driver.watch_channels()?;
        }
        // 6. completion channels
        self.cm_pending |= self.waiting.drive(delivery.driver);
        // 7. completion queues, and what is to be posted because of them
        delivery.completion_queues(|driver| self.waiting.found(driver));
        // 8. timers
        self.timers_pending = delivery.timers();
        // 9. other descriptors, other threads
        delivery.descriptors(self.waiting.program_edges());
        delivery.calls();
        delivery.others();
        // A callback may have brought a device into use.
        self.cm_pending |= delivery.driver.watch_channels()?;
        // 10. ends
        delivery.ends();
        // 11. flush
        delivery.flush();
        Ok(delivery.progressed)
    }

    /// Begins a turn: work that was queued outside of a turn is posted before anything sleeps.
    fn begin(&mut self) -> Result<(), Error> {
        self.driver.counters().turns.taken += 1;
        self.cm_pending |= self.driver.watch_channels()?;
        self.driver.flush();
        self.endpoints.flush(&mut self.driver);
        Ok(())
    }

    /// Whether a stage has something left to do.
    fn has_more(&self) -> bool {
        self.cm_pending
            || self.timers_pending
            || self.desk.pending
            || (self.driver.queues().provider_pending && !cfg!(planted = "rest-of-the-edges-forgotten"))
            || self.driver.has_work()
    }
}

impl<M> fmt::Debug for Reactor<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reactor")
            .field("driver", &self.driver)
            .field("desk", &self.desk.commands)
            .finish_non_exhaustive()
    }
}

impl<M> AsRawFd for Reactor<M> {
    /// The descriptor to nest in an outer loop: readable when a turn has something to do.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl<M> AsFd for Reactor<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.os().poller.as_fd()
    }
}

impl<M> Drop for Reactor<M> {
    fn drop(&mut self) {
        self.endpoints.teardown(&mut self.driver);
        self.driver.teardown();
    }
}
