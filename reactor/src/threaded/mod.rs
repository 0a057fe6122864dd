//! A reactor on a thread of its own, for programs whose tasks run on any thread, such as those of tokio's multi-threaded runtime. Needs
//! the feature `tokio`.
//!
//! A [`ThreadedReactor`] starts the thread; its connections are `Send`, and their futures run on any executor. What the reactor's thread
//! is asked for goes through a queue without a lock, and wakes it once for all that comes until it looks. [`crate::aio`] has the
//! connections of a reactor on the tasks' own thread, which need no queue.
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
//! [`Sender::send`] waits while 64 messages of its connection have not been accepted by the device, be it that the peer's window
//! is closed or that the reactor's thread is busy. Messages that nobody has received take receives of their connection, so that the
//! peer waits in turn.
//!
//! # What happens to a future that is dropped
//!
//! | future | if it is dropped before it is done |
//! |---|---|
//! | [`Sender::send`] | the message is not sent |
//! | [`Sender::deliver`] | the message is not sent, or it is sent and nobody hears of its outcome |
//! | [`Caller::call`] | the call is cancelled: the peer is notified, and may serve it all the same |
//! | [`Requests::next`] | nothing is lost: the next call gets the request |
//! | [`Receiver::recv`], [`Listener::accept`] | nothing is lost: the next call gets the message, or the connection |
//! | [`ThreadedReactor::connect`] | the attempt is given up |
//! | [`ThreadedReactor::with`] | what was asked for is done all the same |
//!
//! # The end
//!
//! A connection is closed when its sender, with all clones, and its receiver are dropped, after what was accepted for sending has been
//! sent. The thread ends when all of its connections, listeners and [`ThreadedReactor`]s are dropped, and after
//! [`ThreadedReactor::drain`]; [`ThreadedReactor::ended`] waits for that. If the thread panics, every future that waits for it is done
//! with an error.
//!
//! # Without an executor
//!
//! [`ThreadedReactor::block_on`] waits for any of these futures on the caller's own thread.

mod calls;
mod connection;
mod error;
mod link;
mod listener;
mod owner;

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::{Context as Task, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use tokio::sync::{oneshot, watch};

pub use self::calls::{Caller, Request, Requests};
pub use self::connection::{Connection, Receiver, Sender};
pub use self::error::{ConnectionEnd, DeliverError, OwnThread, ThreadError};
use self::link::{Command, Link};
pub use self::listener::Listener;
use self::owner::Owner;
use crate::call::CallLimits;
use crate::{Config, ConnectError, ConnectOptions, ConnectionId, Context, Error, ListenOptions, Reactor};

/// Largest number of messages of a connection that tasks have sent and the device has not accepted.
const DEPTH: u32 = 64;

/// Length of the queue to the reactor's thread. The messages of all connections fit, and leave room for other commands.
const QUEUE: u32 = 1 << 24;

/// A reactor on a thread of its own; see the [module](self). Clones are the same reactor.
#[derive(Clone)]
pub struct ThreadedReactor {
    link: Arc<Link>,
}

impl fmt::Debug for ThreadedReactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadedReactor").field("handle", &self.link.handle).finish_non_exhaustive()
    }
}

impl ThreadedReactor {
    /// Makes a reactor and its thread. [`Config::quiet_sends`] is set, and [`Config::handle_queue`] to its maximum, since what is queued is
    /// bounded by the number of connections: 64 messages of each, or fewer with more than 240,000 of them.
    ///
    /// # Errors
    /// As [`Reactor::new`]; [`Error::Thread`].
    pub fn start(config: Config) -> Result<Self, Error> {
        let config = config.quiet_sends(true).handle_queue(QUEUE);
        let depth = DEPTH.min((QUEUE - QUEUE / 16) / config.max_connections.max(1)).max(1) as usize;
        let mut reactor = Reactor::<Command>::with_messages(config)?;
        let (handle, (tell, end)) = (reactor.handle(), watch::channel(None));
        let (give, link) = std::sync::mpsc::sync_channel::<Weak<Link>>(1);
        let work = move || {
            let result = catch_unwind(AssertUnwindSafe(|| {
                let mut owner = Owner::new(link.recv().unwrap_or_default());
                reactor.run(&mut owner)
            }));
            let end = match result {
                Ok(run) => run.map_err(|error| ThreadError::Failed(error.to_string())),
                Err(panic) => Err(ThreadError::Panicked(crate::turn::text_of_panic(&*panic).to_owned())),
            };
            if let Err(error) = &end {
                log::error!("{error}");
            }
            // Commands that the reactor has not taken are dropped with it, and whoever waits for their answers hears of that.
            drop(reactor);
            tell.send_replace(Some(end));
        };
        let spawned = thread::Builder::new().name("rdma-reactor".into()).spawn(work).map_err(Error::Thread)?;
        let link = Arc::new(Link { handle, thread: spawned.thread().id(), end, depth });
        // The thread waits for it.
        let _ = give.send(Arc::downgrade(&link));
        Ok(Self { link })
    }

    /// Listens on an address; port 0 takes a free one.
    ///
    /// Example: the [module](self).
    ///
    /// # Errors
    /// As [`Context::listen`]; [`Error::Gone`] if the reactor's thread has ended.
    pub async fn listen(&self, address: SocketAddr) -> Result<Listener, Error> {
        self.listen_with(address, ListenOptions::new()).await
    }

    /// As [`ThreadedReactor::listen`], with options.
    ///
    /// ```
    /// use rdma_reactor::threaded::{Listener, ThreadedReactor};
    /// use rdma_reactor::{Error, ListenOptions};
    ///
    /// async fn listen(reactor: &ThreadedReactor) -> Result<Listener, Error> {
    ///     reactor.listen_with(([0, 0, 0, 0], 7471).into(), ListenOptions::new().type_of_service(0x68)).await
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`ThreadedReactor::listen`].
    pub async fn listen_with(&self, address: SocketAddr, options: ListenOptions) -> Result<Listener, Error> {
        let opening = self.ask(|answer| Command::Listen(address, options, answer)).await;
        opening.map(|(hold, address, backlog)| Listener::new(hold, address, backlog))
    }

    /// Sets the limits of the calls of this reactor ([`Connection::calls`]).
    ///
    /// ```
    /// use rdma_reactor::threaded::ThreadedReactor;
    ///
    /// fn limit(reactor: &ThreadedReactor) {
    ///     reactor.call_limits(|limits| limits.requests_per_connection = 100);
    /// }
    /// ```
    pub fn call_limits(&self, set: impl FnOnce(&mut CallLimits) + Send + 'static) {
        self.link.post(Command::LimitCalls(Box::new(set)));
    }

    /// Opens a connection. A future that is dropped gives the attempt up.
    ///
    /// Example: the [module](self).
    ///
    /// # Errors
    /// The reason why the connection did not come up.
    pub async fn connect(&self, peer: SocketAddr) -> Result<Connection, ConnectError> {
        self.connect_with(peer, ConnectOptions::new()).await
    }

    /// As [`ThreadedReactor::connect`], with options.
    ///
    /// ```
    /// use rdma_reactor::threaded::{Connection, ThreadedReactor};
    /// use rdma_reactor::{ConnectError, ConnectOptions};
    ///
    /// async fn connect(reactor: &ThreadedReactor) -> Result<Connection, ConnectError> {
    ///     let options = ConnectOptions::new().private_data(b"who I am");
    ///     reactor.connect_with(([192, 0, 2, 1], 7471).into(), options).await
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`ThreadedReactor::connect`].
    pub async fn connect_with(&self, peer: SocketAddr, options: ConnectOptions) -> Result<Connection, ConnectError> {
        self.connect_by(move |cx| cx.connect_with(peer, options)).await
    }

    /// As [`Context::connect_host`]: looks the name up on another thread, and tries one address after the other.
    ///
    /// ```
    /// use rdma_reactor::threaded::{Connection, ThreadedReactor};
    /// use rdma_reactor::{ConnectError, ConnectOptions};
    ///
    /// async fn connect(reactor: &ThreadedReactor) -> Result<Connection, ConnectError> {
    ///     reactor.connect_host("server.example", 7471, ConnectOptions::new()).await
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`ThreadedReactor::connect`].
    pub async fn connect_host(
        &self,
        host: &str,
        port: u16,
        options: ConnectOptions,
    ) -> Result<Connection, ConnectError> {
        let host = host.to_owned();
        self.connect_by(move |cx| cx.connect_host(&host, port, options)).await
    }

    async fn connect_by(
        &self,
        connect: impl FnOnce(&mut Context<'_>) -> Result<ConnectionId, Error> + Send + 'static,
    ) -> Result<Connection, ConnectError> {
        let (carried, up) = self.ask(|answer| Command::Connect(Box::new(connect), answer)).await?;
        // If this future is dropped, so is the connection, which closes it.
        up.await.unwrap_or_else(|_| Err(Error::Gone("reactor").into()))?;
        Ok(Connection::new(carried))
    }

    /// Has something done on the reactor's thread, where it delays all connections, and waits for its result. It is for what has no
    /// future here, such as [`Context::stats`].
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
    /// [`Error::Gone`]: the reactor's thread has ended.
    pub async fn with<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Context<'_>) -> R + Send + 'static,
    ) -> Result<R, Error> {
        self.ask(|answer| Command::Act(Box::new(move |cx| _ = answer.send(Ok(act(cx)))))).await
    }

    /// Asks the reactor's thread for something.
    async fn ask<R>(&self, command: impl FnOnce(oneshot::Sender<Result<R, Error>>) -> Command) -> Result<R, Error> {
        let (answer, answered) = oneshot::channel();
        self.link.post(command(answer));
        answered.await.unwrap_or(Err(Error::Gone("reactor")))
    }

    /// Drains the reactor, as [`Context::drain`]: it accepts and opens no connections any more, and closes those that there are, which have
    /// until `deadline` to send what is queued. The thread ends after that.
    pub fn drain(&self, deadline: Duration) {
        self.link.drain(deadline);
    }

    /// Waits until the reactor's thread has ended.
    ///
    /// # Errors
    /// The reason, if it was not drained.
    pub async fn ended(&self) -> Result<(), ThreadError> {
        let mut end = self.link.end.clone();
        let ended = end.wait_for(Option::is_some).await;
        // The thread says how it ends, whatever happens there.
        ended.ok().and_then(|end| end.clone()).unwrap_or(Ok(()))
    }

    /// Waits on this thread until a future is done, such as one of those here. In a task of an executor, await it instead.
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
    /// [`OwnThread`], if it is called in a closure of [`ThreadedReactor::with`].
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

/// Wakes a thread that waits in [`ThreadedReactor::block_on`].
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
