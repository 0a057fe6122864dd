//! A reactor on a separate thread, for programs whose tasks run on several threads, for instance in tokio's multi-threaded runtime. Needs
//! the feature `tokio`.
//!
//! A [`ThreadedReactor`] starts the thread. Its connections are `Send`, and their futures run on any executor. Tasks post commands to a
//! lock-free queue. One wake-up of the reactor's thread is enough for all commands that tasks post until the thread reads them. In
//! contrast, the reactor of [`crate::aio`] shares one thread with its tasks, and needs no queue.
//!
//! ```
//! use rdma_reactor::threaded::ThreadedReactor;
//! use rdma_reactor::{Config, ProviderChoice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # tokio::runtime::Builder::new_multi_thread().worker_threads(2).build()?.block_on(async {
//! let reactor = ThreadedReactor::start(Config::default().provider(ProviderChoice::Iwarp))?;
//! let mut listener = reactor.listen(([127, 0, 0, 1], 0).into()).await?;
//! let address = listener.local_address();
//! let server = tokio::spawn(async move {
//!     let mut conn = listener.accept().await.expect("a client");
//!     while let Ok(message) = conn.recv().await {
//!         conn.send(message).await.expect("the client listens");
//!     }
//! });
//! let mut conn = reactor.connect(address).await?;
//! conn.send("hello").await?;
//! assert_eq!(&conn.recv().await?[..], b"hello");
//! drop(conn);
//! server.await?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })
//! # }
//! ```
//!
//! # Back-pressure
//!
//! [`Sender::send`] waits while 64 messages of its connection are queued, because the peer has granted no credits or the reactor's thread
//! is busy. Messages that the program has not received occupy receive buffers of their connection. When all receive buffers of the
//! connection are occupied, the peer gets no credits, and waits.
//!
//! # Cancellation
//!
//! | future | if it is dropped before it is done |
//! |---|---|
//! | [`Sender::send`] | the message is not sent |
//! | [`Sender::deliver`] | the message may or may not be sent; its outcome is not reported |
//! | [`Caller::call`] | the call is cancelled: not sent, or the peer is notified, but may have served it |
//! | [`Requests::next`] | nothing is lost: the next call gets the request |
//! | [`ThreadedRequest::cancelled`] | nothing is lost |
//! | [`Receiver::recv`], [`ThreadedListener::accept`] | nothing is lost: the next call gets the message, or the connection |
//! | [`ThreadedPendingPeers::next`] | nothing is lost: the next call gets the peer |
//! | reads and writes of a [`ThreadedStream`] | nothing is lost or sent twice |
//! | [`ThreadedReactor::connect`] | the attempt is cancelled |
//! | [`ThreadedReactor::with`] | the closure still runs |
//!
//! # The end
//!
//! A connection is closed when its [`Receiver`] and all clones of its [`Sender`] are dropped. One
//! that is used for calls is closed when its [`Requests`] and all clones of its [`Caller`] are
//! dropped, and no request is unanswered.
//! Queued messages are sent first, unless the peer accepts none of them for
//! [`Timeouts::close`](crate::Timeouts::close): then the connection is aborted. The reactor's
//! thread ends when the last [`ThreadedReactor`], connection, listener and [`ThreadedRequest`] is
//! dropped, or after [`ThreadedReactor::drain`]. After the last drop, the connections have 10 s to
//! send their queued messages. With [`ThreadedReactor::drain`], the program sets this time.
//! [`ThreadedReactor::ended`] waits for the end of the thread. If the thread panics, every future
//! that waits for a result of the thread ends with an error.
//!
//! # Without an executor
//!
//! [`ThreadedReactor::block_on`] polls one future of this module on the calling thread, and blocks that thread until the future is done.

mod calls;
mod connection;
mod error;
mod handler;
mod link;
mod listener;
mod pending_peers;
mod stream;

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::{Context as Task, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

pub use self::calls::{Caller, Requests, ThreadedRequest};
pub use self::connection::{Receiver, Sender, ThreadedConnection};
pub use self::error::{ConnectionEnd, DeliverError, OwnThread, ThreadError};
use self::handler::ThreadHandler;
use self::link::{PendingSender, ThreadCommand, ThreadLink};
pub use self::listener::ThreadedListener;
pub use self::pending_peers::{ThreadedPendingPeer, ThreadedPendingPeers};
pub use self::stream::ThreadedStream;
use crate::approval::MAX_PENDING_PEERS;
use crate::call::CallLimits;
use crate::{Config, ConnectError, ConnectOptions, ConnectionId, Context, Error, HandleError, ListenOptions, Reactor};

/// The largest number of queued messages and calls of one connection.
const MAX_QUEUED: u32 = 64;

/// The length of the command queue of the reactor's thread. `ThreadedReactor::start` limits the queued messages and calls of all
/// connections together to 15/16 of this length, so they leave room for other commands.
const COMMAND_QUEUE: u32 = 1 << 24;

/// A handle of a reactor on a separate thread; see the [module](self). Clones share the reactor.
#[derive(Clone)]
pub struct ThreadedReactor {
    link: Arc<ThreadLink>,
}

impl fmt::Debug for ThreadedReactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadedReactor").field("handle", &self.link.handle).finish_non_exhaustive()
    }
}

impl ThreadedReactor {
    /// Creates a reactor and starts its thread. Sets [`Config::quiet_sends`] to true, and [`Config::handle_queue`] to its maximum. Each
    /// connection may have at most 64 queued messages and calls, or fewer if [`Config::max_connections`] is above 245,760. The lower limit
    /// keeps the queued messages and calls of all connections together within the capacity of the command queue.
    ///
    /// # Errors
    /// The errors of [`Reactor::new`]; [`Error::Thread`] if the system could not start the thread.
    pub fn start(config: Config) -> Result<Self, Error> {
        let config = config.quiet_sends(true).handle_queue(COMMAND_QUEUE);
        let depth =
            MAX_QUEUED.min((COMMAND_QUEUE - COMMAND_QUEUE / 16) / config.max_connections.max(1)).max(1) as usize;
        let mut reactor = Reactor::<ThreadCommand>::with_messages(config)?;
        let (handle, (end_sender, end)) = (reactor.handle(), watch::channel(None));
        let (link_sender, link) = std::sync::mpsc::sync_channel::<Weak<ThreadLink>>(1);
        let work = move || {
            let result = catch_unwind(AssertUnwindSafe(|| {
                let mut handler = ThreadHandler::new(link.recv().unwrap_or_default());
                reactor.run(&mut handler)
            }));
            let end = match result {
                Ok(run) => run.map_err(|error| ThreadError::Failed(error.to_string())),
                Err(panic) => Err(ThreadError::Panicked(crate::turn::text_of_panic(&*panic).to_owned())),
            };
            if let Err(error) = &end {
                local_log!(Error, "{error}");
            }
            // The reactor contains the commands that are still queued. Dropping these commands wakes the tasks that wait for their results.
            drop(reactor);
            end_sender.send_replace(Some(end));
        };
        let spawned = thread::Builder::new().name("rdma-reactor".into()).spawn(work).map_err(Error::Thread)?;
        let link = Arc::new(ThreadLink { handle, thread: spawned.thread().id(), end, depth });
        // This send cannot fail: the new thread waits for this message before it does anything else.
        let _ = link_sender.send(Arc::downgrade(&link));
        Ok(Self { link })
    }

    /// Listens on an address. Port 0 selects a free port.
    ///
    /// Example: the [module](self).
    ///
    /// # Errors
    /// The errors of [`crate::Context::listen`]; [`Error::Gone`] if the reactor's thread
    /// has ended.
    pub async fn listen(&self, address: SocketAddr) -> Result<ThreadedListener, Error> {
        self.listen_with(address, ListenOptions::new()).await
    }

    /// Listens on an address, with options.
    ///
    /// ```
    /// use rdma_reactor::threaded::{ThreadedListener, ThreadedReactor};
    /// use rdma_reactor::{Error, ListenOptions};
    ///
    /// async fn listen(reactor: &ThreadedReactor) -> Result<ThreadedListener, Error> {
    ///     reactor.listen_with(([0, 0, 0, 0], 7471).into(), ListenOptions::new().type_of_service(0x68)).await
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`ThreadedReactor::listen`].
    pub async fn listen_with(&self, address: SocketAddr, options: ListenOptions) -> Result<ThreadedListener, Error> {
        self.open_listener(address, options, None).await
    }

    /// Listens on an address, with approval: an authenticated peer of a secured connection waits
    /// until a task accepts or refuses it, for at most [`crate::Timeouts::handshake`]. Returns the
    /// listener, and the queue of the peers that wait. Set [`ListenOptions::security`] or
    /// [`Config::security`]: without them, connections are not secured, and peers are accepted
    /// without approval. While 1,024 peers wait in the queue, further peers are refused.
    ///
    /// ```
    /// use rdma_reactor::threaded::{ThreadedListener, ThreadedReactor};
    /// use rdma_reactor::{Error, ListenOptions, PeerIdentity, Security};
    ///
    /// async fn listen(reactor: &ThreadedReactor, security: Security) -> Result<ThreadedListener, Error> {
    ///     let options = ListenOptions::new().security(security);
    ///     let (listener, mut peers) = reactor.listen_with_approval(([0, 0, 0, 0], 7471).into(), options).await?;
    ///     tokio::spawn(async move {
    ///         while let Some(peer) = peers.next().await {
    ///             // Or the answer of a database, in a task for each peer.
    ///             match peer.identity() {
    ///                 PeerIdentity::Psk(name) if name == "cluster" => peer.accept(),
    ///                 _ => peer.refuse("not on the list"),
    ///             }
    ///         }
    ///     });
    ///     Ok(listener)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`ThreadedReactor::listen`].
    pub async fn listen_with_approval(
        &self,
        address: SocketAddr,
        options: ListenOptions,
    ) -> Result<(ThreadedListener, ThreadedPendingPeers), Error> {
        let (pending, peers) = mpsc::channel(MAX_PENDING_PEERS);
        let listener = self.open_listener(address, options, Some(pending)).await?;
        Ok((listener, ThreadedPendingPeers::new(peers)))
    }

    async fn open_listener(
        &self,
        address: SocketAddr,
        options: ListenOptions,
        pending: Option<PendingSender>,
    ) -> Result<ThreadedListener, Error> {
        let opening = self.request(|answer| ThreadCommand::Listen(address, options, pending, answer)).await;
        opening.map(|(handle, address, backlog)| ThreadedListener::new(handle, address, backlog))
    }

    /// Sets the limits of the calls of this reactor ([`ThreadedConnection::calls`]). The closure `set` runs on the reactor's thread. It
    /// receives the limits that apply at that time, and changes them.
    ///
    /// ```
    /// use rdma_reactor::threaded::ThreadedReactor;
    ///
    /// fn limit(reactor: &ThreadedReactor) {
    ///     reactor.call_limits(|limits| limits.requests_per_connection = 100);
    /// }
    /// ```
    pub fn call_limits(&self, set: impl FnOnce(&mut CallLimits) + Send + 'static) {
        self.link.post(ThreadCommand::LimitCalls(Box::new(set)));
    }

    /// Opens a connection, and waits until it is established. Dropping the future cancels the attempt.
    ///
    /// Example: the [module](self).
    ///
    /// # Errors
    /// The reason why the connection was not established.
    pub async fn connect(&self, peer: SocketAddr) -> Result<ThreadedConnection, ConnectError> {
        self.connect_with(peer, ConnectOptions::new()).await
    }

    /// Opens a connection, with options.
    ///
    /// ```
    /// use rdma_reactor::threaded::{ThreadedConnection, ThreadedReactor};
    /// use rdma_reactor::{ConnectError, ConnectOptions};
    ///
    /// async fn connect(reactor: &ThreadedReactor) -> Result<ThreadedConnection, ConnectError> {
    ///     let options = ConnectOptions::new().private_data(b"who I am");
    ///     reactor.connect_with(([192, 0, 2, 1], 7471).into(), options).await
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`ThreadedReactor::connect`].
    pub async fn connect_with(
        &self,
        peer: SocketAddr,
        options: ConnectOptions,
    ) -> Result<ThreadedConnection, ConnectError> {
        self.connect_by(move |cx| cx.connect_with(peer, options)).await
    }

    /// Opens a connection to a host, as [`Context::connect_host`] does: resolves the name on another thread, and tries the addresses of the
    /// host sequentially.
    ///
    /// ```
    /// use rdma_reactor::threaded::{ThreadedConnection, ThreadedReactor};
    /// use rdma_reactor::{ConnectError, ConnectOptions};
    ///
    /// async fn connect(reactor: &ThreadedReactor) -> Result<ThreadedConnection, ConnectError> {
    ///     reactor.connect_host("server.example", 7471, ConnectOptions::new()).await
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`ThreadedReactor::connect`].
    pub async fn connect_host(
        &self,
        host: &str,
        port: u16,
        options: ConnectOptions,
    ) -> Result<ThreadedConnection, ConnectError> {
        let host = host.to_owned();
        self.connect_by(move |cx| cx.connect_host(&host, port, options)).await
    }

    async fn connect_by(
        &self,
        connect: impl FnOnce(&mut Context<'_>) -> Result<ConnectionId, Error> + Send + 'static,
    ) -> Result<ThreadedConnection, ConnectError> {
        let (parts, up) = self.request(|answer| ThreadCommand::Connect(Box::new(connect), answer)).await?;
        // If the caller drops the future of `connect_by` while this line waits for the connection, `parts` is dropped, too. That cancels
        // the connection attempt.
        up.await.unwrap_or_else(|_| Err(Error::Gone("reactor").into()))?;
        Ok(ThreadedConnection::new(parts))
    }

    /// Runs a closure on the reactor's thread, waits for the result of the closure, and returns that result. Use `with` for operations of
    /// [`Context`] that have no async version, such as [`Context::stats`]. While the closure runs, all connections of the reactor wait, so
    /// it must not block.
    ///
    /// ```
    /// use rdma_reactor::threaded::ThreadedReactor;
    /// use rdma_reactor::{Error, Stats};
    ///
    /// async fn stats(reactor: &ThreadedReactor) -> Result<Stats, Error> {
    ///     reactor.with(|cx| cx.stats()).await
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Error::Gone`] if the reactor's thread has ended; [`Error::ClosurePanicked`] if the closure
    /// has panicked. With [`Config::contain_panics`], the reactor continues after such a panic.
    /// [`Error::Limit`] if 16,777,216 commands are queued for the thread.
    pub async fn with<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Context<'_>) -> R + Send + 'static,
    ) -> Result<R, Error> {
        let run = |answer: oneshot::Sender<_>| {
            ThreadCommand::Run(Box::new(move |cx| {
                let mut answer = ClosureAnswer(Some(answer));
                let result = act(cx);
                answer.send(Ok(result));
            }))
        };
        self.request(run).await
    }

    /// Posts a command to the reactor's thread, waits for the result of the command, and returns that result.
    async fn request<R>(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<R, Error>>) -> ThreadCommand,
    ) -> Result<R, Error> {
        let (answer, answered) = oneshot::channel();
        if let Err(HandleError::Full(_)) = self.link.handle.post(command(answer)) {
            return Err(Error::Limit { limit: "handle_queue", value: COMMAND_QUEUE.into() });
        }
        answered.await.unwrap_or(Err(Error::Gone("reactor")))
    }

    /// Drains the reactor, as [`Context::drain`] does: the reactor accepts no more connections, and closes the existing connections. The
    /// connections have the time `deadline` to send their queued messages: connections that remain then are aborted. A connection whose
    /// peer accepts no queued message for [`Timeouts::close`](crate::Timeouts::close) is aborted earlier. When all connections have ended,
    /// the reactor's thread ends.
    pub fn drain(&self, deadline: Duration) {
        self.link.drain(deadline);
    }

    /// Waits until the reactor's thread has ended.
    ///
    /// # Errors
    /// The reason why the thread has ended. There is no error if the thread has ended after a drain.
    pub async fn ended(&self) -> Result<(), ThreadError> {
        let mut end = self.link.end.clone();
        let ended = end.wait_for(Option::is_some).await;
        // The thread sends its result even after a panic, so the result is always available here.
        ended.ok().and_then(|end| end.clone()).unwrap_or(Ok(()))
    }

    /// Blocks the calling thread until a future is done, and returns its output. In a task of an executor, await the future instead.
    ///
    /// ```
    /// use rdma_reactor::threaded::ThreadedReactor;
    /// use rdma_reactor::{Config, ProviderChoice};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let reactor = ThreadedReactor::start(Config::default().provider(ProviderChoice::Iwarp))?;
    /// let stats = reactor.block_on(reactor.with(|cx| cx.stats()))??;
    /// println!("{} turns", stats.turns.taken);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`OwnThread`] if `block_on` is called on the reactor's thread, for instance in a closure of [`ThreadedReactor::with`].
    pub fn block_on<F: Future>(&self, future: F) -> Result<F::Output, OwnThread> {
        let this = thread::current();
        if this.id() == self.link.thread {
            return Err(OwnThread);
        }
        let waker = Waker::from(Arc::new(Unpark(this)));
        let (mut future, mut task) = (pin!(future), Task::from_waker(&waker));
        loop {
            match future.as_mut().poll(&mut task) {
                Poll::Ready(output) => return Ok(output),
                Poll::Pending => thread::park(),
            }
        }
    }
}

/// The channel to the task that waits for the result of a closure. If the closure panics, the task
/// gets [`Error::ClosurePanicked`].
struct ClosureAnswer<R>(Option<oneshot::Sender<Result<R, Error>>>);

impl<R> ClosureAnswer<R> {
    fn send(&mut self, result: Result<R, Error>) {
        if let Some(task) = self.0.take() {
            // If the task has stopped waiting, the result is dropped.
            _ = task.send(result);
        }
    }
}

impl<R> Drop for ClosureAnswer<R> {
    fn drop(&mut self) {
        self.send(Err(Error::ClosurePanicked));
    }
}

/// The waker of a thread that waits in [`ThreadedReactor::block_on`].
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
