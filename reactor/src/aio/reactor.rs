//! The reactor, and the ways to take its turns.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as Task, Poll, Wake, Waker};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::core::Core;
use super::desk::{End, Line, Waiting};
use super::gate::Gate;
use super::listener::Listener;
use super::timer::Sleep;
use super::turns::Turns;
use crate::call::CallLimits;
use crate::{
    Config, ConnectError, ConnectOptions, ConnectionId, Context, Error, ListenOptions, Reactor, ReactorHandle, Turn,
};

/// A reactor whose connections are futures; see the [module](super). Clones are the same reactor. It is of one thread.
#[derive(Clone)]
pub struct AsyncReactor {
    core: Rc<Core>,
}

impl fmt::Debug for AsyncReactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncReactor").finish_non_exhaustive()
    }
}

impl AsyncReactor {
    /// Makes a reactor, with [`Config::quiet_sends`]: only [`Connection::operate`] waits for the end of a message, and has it reported.
    ///
    /// # Errors
    /// As [`Reactor::new`].
    pub fn new(config: Config) -> Result<Self, Error> {
        Reactor::new(config.quiet_sends(true)).map(Self::from)
    }

    /// Listens on an address; port 0 takes a free one.
    ///
    /// # Errors
    /// As [`Context::listen`].
    pub fn listen(&self, address: SocketAddr) -> Result<Listener, Error> {
        self.listen_with(address, ListenOptions::new())
    }

    /// As [`AsyncReactor::listen`], with options.
    ///
    /// ```
    /// use rdma_reactor::aio::{AsyncReactor, Listener};
    /// use rdma_reactor::{Error, ListenOptions};
    ///
    /// fn listen(net: &AsyncReactor) -> Result<Listener, Error> {
    ///     net.listen_with(([0, 0, 0, 0], 7471).into(), ListenOptions::new().type_of_service(0x68))
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Context::listen_with`].
    pub fn listen_with(&self, address: SocketAddr, options: ListenOptions) -> Result<Listener, Error> {
        let id = self.core.with(|cx, _| cx.listen_with(address, options))?;
        Ok(Listener::new(Rc::clone(&self.core), id))
    }

    /// As [`AsyncReactor::listen_with`], with a gate: a peer of a secured connection that has proven who it is waits until a task has
    /// let it in. The task may wait for others meanwhile, such as for a database. Peers of plain connections prove nothing: they are
    /// accepted without passing the gate, so set [`ListenOptions::security`] or [`Config::security`].
    ///
    /// Example: [the guide](crate::guide::security).
    ///
    /// # Errors
    /// As [`AsyncReactor::listen_with`].
    pub fn listen_with_gate(&self, address: SocketAddr, options: ListenOptions) -> Result<(Listener, Gate), Error> {
        let listener = self.listen_with(address, options)?;
        let waiting = Waiting::default();
        self.core.with(|_, desk| _ = desk.gates.insert(listener.id(), Some(Rc::clone(&waiting))));
        let gate = Gate::new(Rc::clone(&self.core), listener.id(), waiting);
        Ok((listener, gate))
    }

    /// Sets the limits of the calls of this reactor ([`super::Calls`]).
    ///
    /// ```
    /// use rdma_reactor::aio::AsyncReactor;
    ///
    /// fn limit(net: &AsyncReactor) {
    ///     net.call_limits(|limits| limits.requests_per_connection = 100);
    /// }
    /// ```
    pub fn call_limits(&self, set: impl FnOnce(&mut CallLimits)) {
        self.core.with(|_, desk| set(desk.calls.limits()));
    }

    /// Opens a connection. A future that is dropped gives the attempt up.
    ///
    /// # Errors
    /// The reason why the connection did not come up.
    pub async fn connect(&self, peer: SocketAddr) -> Result<Connection, ConnectError> {
        self.connect_with(peer, ConnectOptions::new()).await
    }

    /// As [`AsyncReactor::connect`], with options.
    ///
    /// ```
    /// use rdma_reactor::aio::{AsyncReactor, Connection};
    /// use rdma_reactor::{ConnectError, ConnectOptions};
    ///
    /// async fn connect(net: &AsyncReactor) -> Result<Connection, ConnectError> {
    ///     let options = ConnectOptions::new().private_data(b"who I am");
    ///     net.connect_with(([192, 0, 2, 1], 7471).into(), options).await
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncReactor::connect`].
    pub async fn connect_with(&self, peer: SocketAddr, options: ConnectOptions) -> Result<Connection, ConnectError> {
        self.connect_by(|cx| cx.connect_with(peer, options)).await
    }

    /// As [`Context::connect_any`]: tries one address after the other.
    ///
    /// ```
    /// use std::net::SocketAddr;
    ///
    /// use rdma_reactor::aio::{AsyncReactor, Connection};
    /// use rdma_reactor::{ConnectError, ConnectOptions};
    ///
    /// async fn connect(net: &AsyncReactor, servers: &[SocketAddr]) -> Result<Connection, ConnectError> {
    ///     net.connect_any(servers, ConnectOptions::new()).await
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncReactor::connect`].
    pub async fn connect_any(&self, peers: &[SocketAddr], options: ConnectOptions) -> Result<Connection, ConnectError> {
        self.connect_by(|cx| cx.connect_any(peers, options)).await
    }

    /// As [`Context::connect_host`]: looks the name up on another thread, and tries one address after the other.
    ///
    /// ```
    /// use rdma_reactor::aio::{AsyncReactor, Connection};
    /// use rdma_reactor::{ConnectError, ConnectOptions};
    ///
    /// async fn connect(net: &AsyncReactor) -> Result<Connection, ConnectError> {
    ///     net.connect_host("server.example", 7471, ConnectOptions::new()).await
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncReactor::connect`].
    pub async fn connect_host(
        &self,
        host: &str,
        port: u16,
        options: ConnectOptions,
    ) -> Result<Connection, ConnectError> {
        self.connect_by(|cx| cx.connect_host(host, port, options)).await
    }

    async fn connect_by(
        &self,
        connect: impl FnOnce(&mut Context<'_>) -> Result<ConnectionId, Error>,
    ) -> Result<Connection, ConnectError> {
        let line = self.core.with(|cx, desk| {
            let line = Line::new(connect(cx)?);
            desk.add(&line);
            Ok::<_, Error>(line)
        })?;
        // If this future is dropped, so is the connection, which closes it.
        let conn = Connection::new(Rc::clone(&self.core), line);
        let up = conn.line().watch(|account| match (&account.end, account.up) {
            (Some(End::NeverUp(error)), _) => Some(Err(error.clone())),
            (Some(End::Disconnected(_)), _) | (None, true) => Some(Ok(())),
            (None, false) => None,
        });
        up.await?;
        Ok(conn)
    }

    /// Waits; the time counts from the first poll.
    pub fn sleep(&self, delay: Duration) -> Sleep {
        Sleep::new(Rc::clone(&self.core), delay)
    }

    /// Lends the operations of a callback, for what has no future.
    ///
    /// # Panics
    /// If it is called within itself, or within a turn.
    pub fn with<R>(&self, act: impl FnOnce(&mut Context<'_>) -> R) -> R {
        self.core.with(|cx, _| act(cx))
    }

    /// As [`crate::Reactor::is_draining`].
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.core.reactor(|reactor| reactor.is_draining())
    }

    /// Whether the reactor was drained and nothing is left, see [`Context::drain`]. Then no turn is needed any more.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.core.reactor(|reactor| reactor.is_drained())
    }

    /// A handle for other threads.
    #[must_use]
    pub fn handle(&self) -> ReactorHandle {
        self.core.reactor(|reactor| reactor.handle())
    }

    // Taking turns.

    /// Takes turns until a future is done. For more tasks than one, pass a future that polls them, such as `FuturesUnordered`.
    ///
    /// What the future sent last has gone to the device when this returns. Connections that it closed or dropped need more turns to end
    /// in order: [`AsyncReactor::shutdown`] takes them.
    ///
    /// # Errors
    /// As [`Reactor::run`].
    ///
    /// # Panics
    /// If it is called within a turn.
    pub fn run<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        let mut future = pin!(future);
        let bell = Arc::new(Bell::new(self.handle()));
        let waker = Waker::from(Arc::clone(&bell));
        let mut task = Task::from_waker(&waker);
        let _runs = Runs::new(&self.core);
        loop {
            if bell.rung.swap(false, Ordering::AcqRel) {
                if let Poll::Ready(output) = future.as_mut().poll(&mut task) {
                    self.core.resume()?;
                    return Ok(output);
                }
            }
            self.core.turn_of_run(!bell.rung.load(Ordering::Acquire))?;
        }
    }

    /// Closes every listener and connection, and takes turns until all are gone or `deadline` has passed. Connections end as by
    /// [`Connection::close`]; what is left at the deadline is cut off when the reactor is dropped. Tasks go on when this returns.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::aio::AsyncReactor;
    /// use rdma_reactor::{Config, ProviderChoice};
    ///
    /// let net = AsyncReactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    /// let _listener = net.listen(([127, 0, 0, 1], 0).into())?;
    /// net.shutdown(Duration::from_secs(1))?;
    /// # Ok::<(), rdma_reactor::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Reactor::shutdown`].
    ///
    /// # Panics
    /// If it is called within a turn.
    pub fn shutdown(&self, deadline: Duration) -> Result<(), Error> {
        self.core.shutdown(deadline)
    }

    /// Takes one turn, and wakes the tasks that it has news for. Waits for something to do for at most `timeout` (`None`: until
    /// there is). If it says `more`, let the tasks go on, and take another turn; the next [`AsyncReactor::asked`] is done at once then.
    ///
    /// # Errors
    /// As [`Reactor::turn`].
    ///
    /// # Panics
    /// If it is called within a turn.
    pub fn turn(&self, timeout: impl Into<Option<Duration>>) -> Result<Turn, Error> {
        self.core.turn(timeout.into())
    }

    /// A duplicate of the reactor's descriptor, which is readable when a turn has something to do.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.core.reactor(|reactor| reactor.as_fd().try_clone_to_owned())
    }

    /// Time at which a turn is due at the latest. It may change with every turn.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.core.next_deadline()
    }

    /// Waits until a task has asked the reactor for something: the task that takes turns is to take one. While it waits here,
    /// asking takes no system call.
    #[must_use]
    pub fn asked(&self) -> Asked {
        Asked { core: Rc::clone(&self.core) }
    }
}

impl From<Reactor> for AsyncReactor {
    /// Makes futures of a reactor that has no connections yet, such as one on parts of the program's own. Make it with
    /// [`Config::quiet_sends`]: without, it reports the end of each message, and nobody listens.
    fn from(reactor: Reactor) -> Self {
        Self { core: Rc::new(Core::new(reactor)) }
    }
}

/// The wait of [`AsyncReactor::asked`].
#[derive(Debug)]
pub struct Asked {
    core: Rc<Core>,
}

impl Future for Asked {
    type Output = ();

    fn poll(self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<()> {
        if self.core.turns(Turns::wait) {
            return Poll::Ready(());
        }
        self.core.driver.set(Some(task.waker().clone()));
        Poll::Pending
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.core.driver.take();
    }
}

/// Notes that `run` takes the turns, until it returns.
struct Runs<'a>(&'a Core);

impl<'a> Runs<'a> {
    fn new(core: &'a Core) -> Self {
        core.turns(Turns::run);
        Self(core)
    }
}

impl Drop for Runs<'_> {
    fn drop(&mut self) {
        self.0.end_run();
    }
}

/// The waker of `run`'s future.
struct Bell {
    rung: AtomicBool,
    thread: ThreadId,
    remote: ReactorHandle,
}

impl Bell {
    fn new(remote: ReactorHandle) -> Self {
        Self { rung: AtomicBool::new(true), thread: std::thread::current().id(), remote }
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        // On the reactor's own thread, `run` looks at the bell before it takes a turn.
        if std::thread::current().id() != self.thread {
            self.remote.wake();
        }
    }
}
