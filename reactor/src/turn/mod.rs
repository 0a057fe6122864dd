//! The loop of a reactor. It runs turns, each of them stage by stage, in the order that `docs/loop.md` describes.

mod adaptive;
mod contain;
mod deliver;
mod group;
mod hot;
mod serve;
mod stages;
mod wait;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_transport::provider::Provider;

#[cfg(feature = "tokio")]
pub(crate) use self::contain::text as text_of_panic;
use self::deliver::{Delivery, Lender};
use self::serve::CommandReceiver;
use self::wait::IdleWait;
use crate::api::context::Context;
use crate::api::handle::{Commands, ReactorHandle};
use crate::api::handler::Handler;
use crate::config::Config;
use crate::datagram::endpoints::Endpoints;
use crate::driver::Driver;
use crate::driver::open::choose;
use crate::driver::run::queues::Queues;
use crate::driver::stages::Stages;
use crate::error::Error;
use crate::providers::Providers;
use crate::seam::poller::{Clock, MioPoller, Poller, SystemClock, system_entropy};
use crate::seam::wake::WakeFlag;
use crate::stats::Stats;

/// The result of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turn {
    /// True if a callback ran, or a connection made progress.
    pub progressed: bool,
    /// True if work is left, for example because a stage has reached its limit. The program should
    /// run another turn soon. After [`Reactor::turn`] and [`Reactor::arm`], the reactor's
    /// descriptor is readable until that turn.
    pub more: bool,
}

/// The parts that a reactor uses. [`Reactor::new`] uses the providers that the configuration selects, and the poller and the clock of the
/// operating system. A simulation provides its own parts.
#[derive(Debug)]
pub struct Parts {
    /// The providers that carry the connections, 1 to 8, in the order of preference.
    ///
    /// A listener on an unspecified address uses all of them. A listener on another address uses the first one that has a device with that
    /// address. A connection uses the first one that resolves the peer's address. For loopback addresses, the order is reversed.
    pub providers: Vec<Box<dyn Provider>>, // local: the providers
    /// The source of readiness.
    pub poller: Box<dyn Poller>,
    /// The source of time.
    pub clock: Box<dyn Clock>,
}

/// A reactor: a loop that runs its providers, and calls a [`Handler`].
///
/// A reactor may be sent to another thread; only one thread at a time uses it. Only [`Reactor::run`], [`Reactor::turn`], [`Reactor::step`]
/// and [`Reactor::shutdown`] block until something happens. Dropping a reactor closes every connection immediately, without callbacks;
/// [`Reactor::shutdown`] closes them gracefully. `M` is the type of the messages from other threads, see [`Reactor::handle`].
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::{Config, ConnectError, ConnectionId, Context, Handler, ProviderChoice, Reactor};
///
/// /// The outcome of a connection.
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
/// // No process listens on this port.
/// reactor.context().connect("127.0.0.1:1".parse()?)?;
/// // `run` takes turns until it is stopped. A program with its own loop calls `turn`.
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
    receiver: CommandReceiver<M>,
    idle_wait: IdleWait,
    /// The device, the memory and the return channel of the last message's buffer. They are kept here, because the buffer of the next
    /// message most likely has the same ones.
    lender: Option<Lender>,
    phase: TurnPhase,
}

/// The phase of the reactor between and during turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnPhase {
    /// No turn is running or open.
    Outside,
    /// [`Reactor::step`] has run a turn and has left it open.
    Open,
    /// A turn is running. If a panic has ended a turn early, the phase stays `Inside`, because it is not known which work of the turn was
    /// not done.
    Inside,
}

impl Reactor {
    /// Creates a reactor with the providers that `config` selects.
    ///
    /// # Errors
    /// A setting is out of its range, the provider is not available, or the system has no descriptors left.
    pub fn new(config: Config) -> Result<Self, Error> {
        Self::with_messages(config)
    }
}

impl<M> Reactor<M> {
    /// Creates a reactor like [`Reactor::new`], for messages of type `M` from other threads.
    ///
    /// # Errors
    /// Returns the same errors as [`Reactor::new`].
    pub fn with_messages(config: Config) -> Result<Self, Error> {
        config.validate()?;
        let providers = choose::open(&config, system_entropy())?;
        let poller = Box::new(MioPoller::new().map_err(Error::Poll)?);
        Self::with_parts(config, Parts { providers, poller, clock: Box::new(SystemClock) })
    }

    /// Creates a reactor with parts that the caller provides.
    ///
    /// ```
    /// use rdma_reactor::{Config, Error, Parts, Reactor};
    ///
    /// /// A reactor of a simulation: its providers, its poller and its clock are the caller's.
    /// fn simulated(parts: Parts) -> Result<Reactor, Error> {
    ///     Reactor::with_parts(Config::default(), parts)
    /// }
    /// ```
    ///
    /// # Errors
    /// A setting or the number of providers is out of its range, or the poller refused the channel of a provider.
    pub fn with_parts(config: Config, parts: Parts) -> Result<Self, Error> {
        config.validate()?;
        let Parts { providers, poller, clock } = parts;
        let providers = Providers::new(providers)?;
        let wake = Arc::new(WakeFlag::new(poller.waker()));
        let commands = Commands::new(Arc::clone(&wake), config.handle_queue);
        let driver = Driver::new(config, providers, (poller, clock), wake);
        let mut reactor = Self {
            receiver: CommandReceiver::new(commands),
            idle_wait: IdleWait::new(driver.now),
            lender: None,
            driver,
            endpoints: Endpoints::default(),
            phase: TurnPhase::Outside,
        };
        Queues::watch_channels(&mut reactor.driver.world)?;
        reactor.driver.leave_turn();
        Ok(reactor)
    }

    /// Returns a context with the operations that a callback has, for use outside of a turn. When the program requests an operation, the
    /// reactor's descriptor becomes readable, and the next turn executes the operation. While a turn is open after [`Reactor::step`],
    /// returns the same context as [`Reactor::quiet_context`].
    pub fn context(&mut self) -> Context<'_> {
        if self.phase == TurnPhase::Open {
            return self.quiet_context();
        }
        self.driver.leave_turn();
        self.driver.look_at_clock();
        Context { driver: &mut self.driver, endpoints: &mut self.endpoints }
    }

    /// Returns a context like [`Reactor::context`], but the requested operations do not make the
    /// reactor's descriptor readable. So the caller must run a turn before it waits for the
    /// descriptor. A loop that only calls [`Reactor::turn`] with a timeout meets this condition,
    /// because a turn posts the requests before it waits.
    ///
    /// While a turn is open after [`Reactor::step`], the time of the context is that of this turn,
    /// as in a callback.
    pub fn quiet_context(&mut self) -> Context<'_> {
        match self.phase {
            TurnPhase::Open => self.driver.resume_turn(),
            TurnPhase::Outside | TurnPhase::Inside => self.driver.enter_turn(),
        }
        Context { driver: &mut self.driver, endpoints: &mut self.endpoints }
    }

    /// Returns a handle through which other threads call this reactor.
    #[must_use]
    pub fn handle(&self) -> ReactorHandle<M> {
        self.receiver.commands.handle()
    }

    /// Returns the names of the providers that were used so far, joined by `+`, such as `verbs`, `iwarp` or `verbs+iwarp`. If none was used
    /// yet, returns the names of all providers. The name `shm` stands for connections in shared memory.
    #[must_use]
    pub fn provider_name(&self) -> String {
        self.driver.providers.name()
    }

    /// Returns the counters since the start, and the current values of the gauges.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.driver.stats()
    }

    /// Returns the number of buffers in the pools, and the number of those that are free. Buffers that are posted to a shared receive queue
    /// count as free.
    #[must_use]
    pub fn pool_levels(&self) -> (usize, usize) {
        let memory = self.driver.stats().memory;
        (memory.pool_buffers, memory.pool_free + memory.shared_posted)
    }

    /// Returns the time at which the next turn must run, even if the descriptor does not become readable. `None` if no timer is set.
    pub fn next_deadline(&mut self) -> Option<Instant> {
        self.driver.next_deadline()
    }

    /// Runs turns until [`Context::stop`] or [`ReactorHandle::stop`] is called, or a drain has ended. A stop leaves connections open. A
    /// drained reactor runs no more turns.
    ///
    /// # Errors
    /// The poller, or a provider as a whole, has failed. If only a connection fails, `run` returns no error: the failure is reported to the
    /// handler. After such an error, the reactor is still usable, and the program may continue with another turn.
    ///
    /// [`Error::Panicked`] if a callback has panicked and the program has caught the panic. In this case, the reactor can only be dropped,
    /// see [`Config::contain_panics`].
    pub fn run<H: Handler<M> + ?Sized>(&mut self, handler: &mut H) -> Result<(), Error> {
        while !std::mem::take(&mut self.driver.stop) && !self.driver.drain.is_done() {
            self.turn_once(handler, None)?;
        }
        Ok(())
    }

    /// Runs one turn of limited length. If there is nothing to do, waits for at most `timeout`; `None` means no limit. [The
    /// guide](crate::guide::embedding) shows how to call it from another loop.
    ///
    /// Example: [`Reactor`].
    ///
    /// # Errors
    /// Returns the same errors as [`Reactor::run`].
    pub fn turn<H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Turn, Error> {
        let turn = self.turn_once(handler, timeout.into())?;
        self.arm(turn)
    }

    /// Runs one turn of limited length, and leaves it open. [`Reactor::turn`] does the same, and then calls [`Reactor::arm`]. This method
    /// is for executors and other loops whose code runs between turns and uses the reactor as a callback does. If there is nothing to do,
    /// `step` waits like [`Reactor::turn`].
    ///
    /// While the turn is open, [`Reactor::context`] neither makes the descriptor readable nor reads the clock. Before the program waits for
    /// the descriptor, it must call [`Reactor::resume`], which posts the requests, and then [`Reactor::arm`], which closes the turn.
    /// [`Reactor::turn`] does both instead. A loop that waits only in `step` needs neither, because each `step` first posts the requests.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::{Context, Error, Handler, Reactor, Turn};
    ///
    /// /// A turn of a loop that waits for the descriptor. `tasks` runs the tasks that the callbacks made ready.
    /// fn turn(reactor: &mut Reactor, handler: &mut impl Handler, tasks: impl FnOnce(&mut Context<'_>)) -> Result<Turn, Error> {
    ///     reactor.step(handler, Duration::ZERO)?;
    ///     tasks(&mut reactor.context());
    ///     let turn = reactor.resume(handler)?;
    ///     reactor.arm(turn)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Reactor::run`].
    pub fn step<H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Turn, Error> {
        let turn = self.turn_once(handler, timeout.into())?;
        self.phase = TurnPhase::Open;
        Ok(turn)
    }

    /// Continues the turn that [`Reactor::step`] has left open, without waiting. Posts the requests that were made since [`Reactor::step`]
    /// returned. After that, handles the completions that are already available, as a turn does after its callbacks. `resume` takes a
    /// fraction of the time of a turn. The turn stays open. If no turn is open, begins one.
    ///
    /// Example: [`Reactor::step`].
    ///
    /// # Errors
    /// [`Error::Panicked`], as [`Reactor::run`].
    pub fn resume<H: Handler<M> + ?Sized>(&mut self, handler: &mut H) -> Result<Turn, Error> {
        match std::mem::replace(&mut self.phase, TurnPhase::Inside) {
            TurnPhase::Open => self.driver.resume_turn(),
            TurnPhase::Outside => self.driver.enter_turn(),
            TurnPhase::Inside => return Err(Error::Panicked),
        }
        let Self { driver, endpoints, receiver, lender, .. } = self;
        let mut delivery = Delivery { driver, endpoints, receiver, handler, lender, progressed: false };
        let now = delivery.driver.now;
        if delivery.resume() {
            self.idle_wait.found(now);
            // The completions may have freed capacity that sends from other threads wait for. Stage
            // 9, which executes these sends, does not run here, so another turn must follow.
            let waits = delivery.driver.stages.contains(Stages::WAITING_SENDS);
            if waits && !crate::planted("a-resumed-turn-forgets-waiting-sends") {
                delivery.driver.note(Stages::OTHERS);
            }
        }
        let progressed = delivery.progressed;
        self.driver.leave_turn();
        self.phase = TurnPhase::Open;
        Ok(Turn { progressed, more: self.driver.has_work() })
    }

    /// Closes the turn that [`Reactor::step`] has left open. After that, the caller may wait for the descriptor: all new work makes the
    /// descriptor readable. For this purpose, `arm` arms the completion queues, and checks all sources of events once more. `arm` posts no
    /// requests: call [`Reactor::resume`] first.
    ///
    /// Returns `turn`. Its `more` is also set if the check has found something to do.
    ///
    /// Example: [`Reactor::step`].
    ///
    /// # Errors
    /// The poller or the provider as a whole failed.
    pub fn arm(&mut self, turn: Turn) -> Result<Turn, Error> {
        if self.phase == TurnPhase::Open {
            self.driver.leave_turn();
            self.phase = TurnPhase::Outside;
        }
        // The system reports each edge only once. So `look_before_sleep` arms the completion queues, and then checks for events once more.
        let more = turn.more || self.idle_wait.look_before_sleep(&mut self.driver)?;
        let more = more || self.driver.os.wake.is_pending() && !crate::planted("wake-lost-in-a-turn");
        if more {
            self.driver.os.wake.wake_again();
        }
        Ok(Turn { more, ..turn })
    }

    /// Returns true if a drain was requested with [`Context::drain`], [`ReactorHandle::drain`] or [`crate::Reactors::drain`], and the
    /// reactor has processed this request. New connections are refused with [`crate::RejectReason::Draining`]. Still returns true after the
    /// drain has ended.
    #[must_use]
    pub const fn is_draining(&self) -> bool {
        self.driver.world.drain.is_on()
    }

    /// Returns true if a drain has ended: no connection and no endpoint is left, see [`Context::drain`]. This function is for programs that
    /// call [`Reactor::turn`]: [`Reactor::run`] returns after a drain.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.driver.world.drain.is_done()
    }

    /// Closes every listener, connection and endpoint, and runs turns until all have ended or `deadline` has passed.
    ///
    /// Example: [`Reactor`].
    ///
    /// # Errors
    /// Returns the same errors as [`Reactor::run`].
    pub fn shutdown<H: Handler<M> + ?Sized>(&mut self, handler: &mut H, deadline: Duration) -> Result<(), Error> {
        let cx = self.context();
        cx.driver.look_at_clock();
        let until = cx.now().checked_add(deadline);
        cx.driver.listeners.close_listeners(&mut cx.driver.world);
        let is_left = |reactor: &Self| !(reactor.driver.table.is_empty() && reactor.endpoints.is_empty());
        while is_left(self) && until.is_none_or(|until| self.driver.now < until) {
            self.endpoints.close_all(&mut self.driver, false);
            self.driver.close_all();
            let left = until.map(|until| until.saturating_duration_since(self.driver.now));
            self.turn_once(handler, left)?;
        }
        Ok(())
    }

    /// Runs one turn. Returns [`Error::Panicked`] if a panic has ended the last turn early.
    fn turn_once<H: Handler<M> + ?Sized>(&mut self, handler: &mut H, timeout: Option<Duration>) -> Result<Turn, Error> {
        if std::mem::replace(&mut self.phase, TurnPhase::Inside) == TurnPhase::Inside {
            return Err(Error::Panicked);
        }
        self.driver.enter_turn();
        let was_drained = self.is_drained();
        let progressed = self.stages(handler, timeout);
        self.idle_wait.end_turn(&mut self.driver);
        self.driver.leave_turn();
        self.phase = TurnPhase::Outside;
        // The turn that ends a drain sets `more`, so that the caller does not wait, but checks `is_drained`. Otherwise the caller would
        // wait for an event that never arrives.
        Ok(Turn { progressed: progressed?, more: self.driver.has_work() || self.is_drained() != was_drained })
    }
}

impl<M> fmt::Debug for Reactor<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reactor")
            .field("driver", &self.driver)
            .field("receiver", &self.receiver.commands)
            .finish_non_exhaustive()
    }
}

impl<M> AsRawFd for Reactor<M> {
    /// Returns the descriptor for use in an outer loop. It is readable when a turn has something to do.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl<M> AsFd for Reactor<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.os.poller.as_fd()
    }
}

impl<M> Drop for Reactor<M> {
    fn drop(&mut self) {
        self.endpoints.teardown(&mut self.driver);
        self.driver.teardown();
    }
}
