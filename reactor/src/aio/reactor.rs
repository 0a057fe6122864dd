//! [`AsyncReactor`]: opens listeners and connections, and takes the turns of the reactor.

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

use super::connection::AsyncConnection;
use super::core::Core;
use super::handler::{EndReason, PeerQueue, SharedConnection};
use super::listener::AsyncListener;
use super::pending_peers::PendingPeers;
use super::timer::Sleep;
use super::turns::Turns;
use crate::call::CallLimits;
use crate::{
    Config, ConnectError, ConnectOptions, ConnectionId, Context, Error, ListenOptions, Reactor, ReactorHandle, Turn,
};

/// A reactor with an async interface; see the [module](super). Clones share one reactor, and cannot move to another thread.
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
    /// Creates a reactor. Sets [`Config::quiet_sends`]: the reactor does not report that a message was sent, because no task waits for
    /// that. The only exceptions are the messages that [`AsyncConnection::operate`] sends.
    ///
    /// # Errors
    /// The errors of [`Reactor::new`].
    pub fn new(config: Config) -> Result<Self, Error> {
        Reactor::new(config.quiet_sends(true)).map(Self::from)
    }

    /// Listens on an address. Port 0 selects a free port.
    ///
    /// # Errors
    /// The errors of [`crate::Context::listen`].
    pub fn listen(&self, address: SocketAddr) -> Result<AsyncListener, Error> {
        self.listen_with(address, ListenOptions::new())
    }

    /// Listens on an address, with options.
    ///
    /// ```
    /// use rdma_reactor::aio::{AsyncListener, AsyncReactor};
    /// use rdma_reactor::{Error, ListenOptions};
    ///
    /// fn listen(net: &AsyncReactor) -> Result<AsyncListener, Error> {
    ///     net.listen_with(([0, 0, 0, 0], 7471).into(), ListenOptions::new().type_of_service(0x68))
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`crate::Context::listen_with`].
    pub fn listen_with(&self, address: SocketAddr, options: ListenOptions) -> Result<AsyncListener, Error> {
        let id = self.core.with(|cx, _| cx.listen_with(address, options))?;
        Ok(AsyncListener::new(Rc::clone(&self.core), id))
    }

    /// Listens on an address, with approval: an authenticated peer of a secured connection waits until a task accepts or refuses it.
    /// Returns the listener, and the queue of the peers that wait. Before the task decides, it may wait for other events, for instance for
    /// the answer of a database. Set [`ListenOptions::security`] or [`Config::security`]. Without these settings, connections are not
    /// secured: peers are not authenticated, and are accepted without approval. While 1,024 peers of this listener wait, further peers are
    /// refused.
    ///
    /// Example: [the guide](crate::guide::security).
    ///
    /// # Errors
    /// The errors of [`AsyncReactor::listen_with`].
    pub fn listen_with_approval(
        &self,
        address: SocketAddr,
        options: ListenOptions,
    ) -> Result<(AsyncListener, PendingPeers), Error> {
        let listener = self.listen_with(address, options)?;
        let peers = PeerQueue::default();
        self.core.with(|_, handler| _ = handler.pending_peers.insert(listener.id(), Some(Rc::clone(&peers))));
        let gate = PendingPeers::new(Rc::clone(&self.core), listener.id(), peers);
        Ok((listener, gate))
    }

    /// Sets the limits of the calls of this reactor ([`super::AsyncCalls`]). The closure `set` receives the current limits, and changes
    /// them.
    ///
    /// ```
    /// use rdma_reactor::aio::AsyncReactor;
    ///
    /// fn limit(net: &AsyncReactor) {
    ///     net.call_limits(|limits| limits.requests_per_connection = 100);
    /// }
    /// ```
    pub fn call_limits(&self, set: impl FnOnce(&mut CallLimits)) {
        self.core.with(|_, handler| set(handler.calls.limits()));
    }

    /// Opens a connection, and waits until it is established. Dropping the future cancels the attempt.
    ///
    /// # Errors
    /// The reason why the connection was not established.
    pub async fn connect(&self, peer: SocketAddr) -> Result<AsyncConnection, ConnectError> {
        self.connect_with(peer, ConnectOptions::new()).await
    }

    /// Opens a connection, with options.
    ///
    /// ```
    /// use rdma_reactor::aio::{AsyncConnection, AsyncReactor};
    /// use rdma_reactor::{ConnectError, ConnectOptions};
    ///
    /// async fn connect(net: &AsyncReactor) -> Result<AsyncConnection, ConnectError> {
    ///     let options = ConnectOptions::new().private_data(b"who I am");
    ///     net.connect_with(([192, 0, 2, 1], 7471).into(), options).await
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`AsyncReactor::connect`].
    pub async fn connect_with(
        &self,
        peer: SocketAddr,
        options: ConnectOptions,
    ) -> Result<AsyncConnection, ConnectError> {
        self.connect_by(|cx| cx.connect_with(peer, options)).await
    }

    /// Opens a connection to one of several addresses: tries them sequentially, as [`Context::connect_any`] does, until one succeeds.
    ///
    /// ```
    /// use std::net::SocketAddr;
    ///
    /// use rdma_reactor::aio::{AsyncConnection, AsyncReactor};
    /// use rdma_reactor::{ConnectError, ConnectOptions};
    ///
    /// async fn connect(net: &AsyncReactor, servers: &[SocketAddr]) -> Result<AsyncConnection, ConnectError> {
    ///     net.connect_any(servers, ConnectOptions::new()).await
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`AsyncReactor::connect`].
    pub async fn connect_any(
        &self,
        peers: &[SocketAddr],
        options: ConnectOptions,
    ) -> Result<AsyncConnection, ConnectError> {
        self.connect_by(|cx| cx.connect_any(peers, options)).await
    }

    /// Opens a connection to a host, as [`Context::connect_host`] does: resolves the name on another thread, and tries the addresses of the
    /// host sequentially.
    ///
    /// ```
    /// use rdma_reactor::aio::{AsyncConnection, AsyncReactor};
    /// use rdma_reactor::{ConnectError, ConnectOptions};
    ///
    /// async fn connect(net: &AsyncReactor) -> Result<AsyncConnection, ConnectError> {
    ///     net.connect_host("server.example", 7471, ConnectOptions::new()).await
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`AsyncReactor::connect`].
    pub async fn connect_host(
        &self,
        host: &str,
        port: u16,
        options: ConnectOptions,
    ) -> Result<AsyncConnection, ConnectError> {
        self.connect_by(|cx| cx.connect_host(host, port, options)).await
    }

    async fn connect_by(
        &self,
        connect: impl FnOnce(&mut Context<'_>) -> Result<ConnectionId, Error>,
    ) -> Result<AsyncConnection, ConnectError> {
        let shared = self.core.with(|cx, handler| {
            let shared = SharedConnection::new(connect(cx)?);
            handler.add(&shared);
            Ok::<_, Error>(shared)
        })?;
        // `conn` cancels the connection attempt when it is dropped. That happens if the caller drops the future of `connect_by` before the
        // connection is established.
        let conn = AsyncConnection::new(Rc::clone(&self.core), shared);
        let up = conn.shared().watch(|state| match (&state.end, state.up) {
            (Some(EndReason::ConnectFailed(error)), _) => Some(Err(error.clone())),
            (Some(EndReason::Disconnected(_)), _) | (None, true) => Some(Ok(())),
            (None, false) => None,
        });
        up.await?;
        Ok(conn)
    }

    /// Returns a future that is done when `delay` has passed since its first poll.
    pub fn sleep(&self, delay: Duration) -> Sleep {
        Sleep::new(Rc::clone(&self.core), delay)
    }

    /// Calls `act` with the [`Context`], for operations that have no async version.
    ///
    /// # Panics
    /// If `act` calls `with` again, or if `with` is called during a turn.
    pub fn with<R>(&self, act: impl FnOnce(&mut Context<'_>) -> R) -> R {
        self.core.with(|cx, _| act(cx))
    }

    /// Returns true if a drain has begun ([`Context::drain`]): the reactor accepts no further connections.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.core.reactor(|reactor| reactor.is_draining())
    }

    /// Returns true if a drain ([`Context::drain`]) is complete. The reactor needs no further turn then.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.core.reactor(|reactor| reactor.is_drained())
    }

    /// Returns a handle with which other threads can send messages on connections, and wake or drain the reactor.
    /// [`ReactorHandle::stop`] has no effect, because [`AsyncReactor::run`] returns only when its future is done.
    #[must_use]
    pub fn handle(&self) -> ReactorHandle {
        self.core.reactor(|reactor| reactor.handle())
    }

    // Methods that take turns, or help the program to take them.

    /// Polls a future and takes turns until the future is done. Returns its output. To run several tasks, pass a future that polls them,
    /// such as `FuturesUnordered`.
    ///
    /// When `run` returns, the last messages of the future have been posted. Connections that the future has closed or dropped need more
    /// turns until they have ended. [`AsyncReactor::shutdown`] takes these turns.
    ///
    /// # Errors
    /// The errors of [`Reactor::run`].
    ///
    /// # Panics
    /// If `run` is called within a turn.
    pub fn run<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        let mut future = pin!(future);
        let run_waker = Arc::new(RunWaker::new(self.handle()));
        let waker = Waker::from(Arc::clone(&run_waker));
        let mut task = Task::from_waker(&waker);
        self.core.turns(Turns::run);
        let _guard = self.driver_guard();
        loop {
            if run_waker.woken.swap(false, Ordering::AcqRel) {
                if let Poll::Ready(output) = future.as_mut().poll(&mut task) {
                    self.core.resume()?;
                    return Ok(output);
                }
            }
            self.core.turn_of_run(!run_waker.woken.load(Ordering::Acquire))?;
        }
    }

    /// Closes all listeners and connections, and takes turns until all have ended or `deadline` has passed. Connections end as with
    /// [`AsyncConnection::close`]. Connections that remain at the deadline are aborted when the reactor is dropped. Tasks do not run during
    /// the shutdown: they continue when `shutdown` returns. [`AsyncListener::accept`] then returns `None`.
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
    /// The errors of [`Reactor::shutdown`].
    ///
    /// # Panics
    /// If `shutdown` is called within a turn.
    pub fn shutdown(&self, deadline: Duration) -> Result<(), Error> {
        self.core.shutdown(deadline)
    }

    /// Takes one turn, and wakes the tasks that it has notified. If there is nothing to do, the
    /// turn waits for events, for at most `timeout`; `None` sets no limit. If [`Turn::more`] of the
    /// result is true, let the tasks run, and take another turn without waiting for the descriptor:
    /// [`AsyncReactor::turn_requested`] is done immediately in this case.
    ///
    /// # Errors
    /// The errors of [`Reactor::turn`].
    ///
    /// # Panics
    /// If `turn` is called within a turn.
    pub fn turn(&self, timeout: impl Into<Option<Duration>>) -> Result<Turn, Error> {
        self.core.turn(timeout.into())
    }

    /// Returns a duplicate of the reactor's descriptor, which is readable when a turn has something to do. Add the duplicate to the poller
    /// of an executor or of another event loop.
    ///
    /// # Errors
    /// Fails if the process has no file descriptor left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.core.reactor(|reactor| reactor.as_fd().try_clone_to_owned())
    }

    /// Returns the time by which the program must take a turn, because a timer expires; `None` if no timer is set. Call this after every
    /// turn, because every turn may change the time.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.core.next_deadline()
    }

    /// Returns a future that is done when a task has requested an operation of the reactor, for instance a send. The driver, which is the
    /// task that takes the turns, must take a turn then. While the driver waits for this future, a request wakes the driver directly.
    /// Otherwise a request must make the descriptor readable, which costs a system call.
    #[must_use]
    pub fn turn_requested(&self) -> TurnRequested {
        TurnRequested { core: Rc::clone(&self.core) }
    }
}

impl AsyncReactor {
    pub(super) fn driver_guard(&self) -> DriverGuard<'_> {
        DriverGuard(&self.core)
    }
}

impl From<Reactor> for AsyncReactor {
    /// Converts a reactor that has no connections yet, for instance a reactor that was built from [`crate::Parts`]. Create that reactor
    /// with [`Config::quiet_sends`]. Otherwise the reactor reports the completion of each message, and these reports are discarded.
    fn from(reactor: Reactor) -> Self {
        Self { core: Rc::new(Core::new(reactor)) }
    }
}

/// The future of [`AsyncReactor::turn_requested`].
#[derive(Debug)]
pub struct TurnRequested {
    core: Rc<Core>,
}

impl Future for TurnRequested {
    type Output = ();

    fn poll(self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<()> {
        if self.core.turns(Turns::wait) {
            return Poll::Ready(());
        }
        self.core.driver.set(Some(task.waker().clone()));
        Poll::Pending
    }
}

impl Drop for TurnRequested {
    fn drop(&mut self) {
        self.core.driver.take();
    }
}

/// Makes the program the driver of the reactor again when the guard is dropped, because
/// [`AsyncReactor::run`] or `drive` has ended.
pub(super) struct DriverGuard<'a>(&'a Core);

impl Drop for DriverGuard<'_> {
    fn drop(&mut self) {
        self.0.end_driver();
    }
}

/// The waker of the future that [`AsyncReactor::run`] polls.
struct RunWaker {
    woken: AtomicBool,
    thread: ThreadId,
    remote: ReactorHandle,
}

impl RunWaker {
    fn new(remote: ReactorHandle) -> Self {
        Self { woken: AtomicBool::new(true), thread: std::thread::current().id(), remote }
    }
}

impl Wake for RunWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        // On the reactor's thread, `run` checks `woken` before its next turn. On another thread, also wake the reactor, because it may be
        // waiting for events.
        if std::thread::current().id() != self.thread {
            self.remote.wake();
        }
    }
}
