//! Connections as futures, for programs that are written with async/await. Needs the feature `async`.
//!
//! An [`AsyncReactor`] is a [`Reactor`] whose callbacks wake tasks. The reactor and its connections stay on one thread. The module needs no
//! executor: [`AsyncReactor::run`] polls one future, and takes the turns of the reactor until that future is done. On an executor, one of
//! its tasks takes the turns. A turn is one iteration of the reactor's event loop.
//!
//! ```
//! use rdma_reactor::aio::AsyncReactor;
//! use rdma_reactor::{Config, ProviderChoice};
//!
//! let net = AsyncReactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
//! let listener = net.listen(([127, 0, 0, 1], 0).into())?;
//! let address = listener.local_address().expect("it listens");
//! let serve = async {
//!     let conn = listener.accept().await.expect("a client");
//!     while let Ok(message) = conn.recv().await {
//!         conn.send(&message).await.expect("the client listens");
//!     }
//! };
//! let ask = async {
//!     let conn = net.connect(address).await.expect("a connection");
//!     conn.send(b"hello").await.expect("it is open");
//!     let answer = conn.recv().await.expect("an answer");
//!     assert_eq!(&answer[..], b"hello");
//! };
//! # // Both run concurrently; the client's connection is closed when `ask` is done.
//! # let mut both = (std::pin::pin!(serve), std::pin::pin!(ask));
//! # let mut done = (false, false);
//! # net.run(std::future::poll_fn(|cx| {
//! #     use std::future::Future;
//! #     done.0 = done.0 || both.0.as_mut().poll(cx).is_ready();
//! #     done.1 = done.1 || both.1.as_mut().poll(cx).is_ready();
//! #     if done == (true, true) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
//! # }))?;
//! # Ok::<(), rdma_reactor::Error>(())
//! ```
//!
//! # Flow control
//!
//! [`AsyncConnection::send`] waits while the peer's window is closed, that is, until the peer grants further credits. Messages that the
//! program has not received occupy receive buffers of their connection. When all receive buffers of the connection are occupied, the peer
//! gets no credits, and waits. So every queue is bounded.
//!
//! # Several tasks
//!
//! Several tasks may send on a connection, receive from it, or accept from a listener. Tasks that wait for a message, for a connection, or
//! for room to send get it in the order in which they began to wait. No more tasks are notified than can proceed.
//!
//! Room on a connection goes to the task that has waited longest, with two exceptions:
//!
//! - RDMA Reads and Writes need no credit. While the peer's window is closed, they proceed although messages have waited longer. The same
//!   is true for an operation of [`AsyncConnection::operate`], until an attempt shows that the operation is a message.
//! - Messages that fit one buffer proceed although a longer message has waited longer, if the longer message waits for the end of another
//!   large message or for memory.
//!
//! [`AsyncConnection::try_send`] gets only the room that the waiting tasks do not need.
//!
//! When a future is notified, a message or room is reserved for it until it is polled or dropped.
//! Other tasks cannot use that message or room. So while a task holds a future that it does not
//! poll, for example in an arm of `select!`, do not await a second future of the same kind: the
//! second one cannot use the reserved message or room either.
//!
//! # Cancellation
//!
//! | future | if it is dropped before it is done |
//! |---|---|
//! | [`AsyncListener::accept`], [`PendingPeers::next`] | nothing is lost: the next call gets the connection, or the peer |
//! | [`AsyncReactor::connect`] | the attempt is cancelled |
//! | [`AsyncConnection::send`] | the message is not sent |
//! | [`AsyncConnection::recv`] | nothing is lost: the next call gets the message |
//! | [`AsyncConnection::read`], `write`, `operate` | a posted operation continues; its memory is lent until it completes |
//! | [`AsyncConnection::transfer`] | the transfer is cancelled: posted pieces complete, and no more are posted |
//! | [`AsyncCalls::call`] | the call is cancelled: the peer is notified, but may have served it |
//! | [`AsyncCalls::next`] | nothing is lost: the next call gets the request |
//! | [`AsyncRequest::cancelled`] | nothing is lost |
//! | [`AsyncConnection::closed`], [`AsyncReactor::sleep`], [`AsyncReactor::turn_requested`] | no effect |
//! | reads and writes of an [`AsyncStream`] | nothing is lost or sent twice; the stream keeps its queue position until it is dropped |
//!
//! If a notified future is dropped, the next task is notified instead.
//!
//! # Other executors
//!
//! On another executor, one of its tasks drives the reactor. That task takes a turn when [`AsyncReactor::descriptor`] is readable, when
//! [`AsyncReactor::next_deadline`] has passed, or when [`AsyncReactor::turn_requested`] is done. For tokio, `drive` is that task (feature
//! `tokio`). For async-io, the example `embed-async` has such a task.
//!
//! [`AsyncReactor::with`] gives access to [`Context`](crate::Context), for operations that have no async version. To receive datagrams or
//! immediate data, or to wait for descriptors of the program, use a [`Reactor`] with a [`Handler`](crate::Handler) of your
//! own.

mod calls;
mod connection;
mod core;
#[cfg(feature = "tokio")]
mod drive;
mod handler;
mod listener;
mod pending_peers;
mod queue;
mod reactor;
mod reply;
mod room_waiters;
mod stream;
mod timer;
mod turns;
mod wait_queue;

pub use self::calls::{AsyncCalls, AsyncRequest};
pub use self::connection::{AsyncConnection, OperationError, Received};
#[cfg(feature = "tokio")]
pub use self::drive::drive;
pub use self::listener::AsyncListener;
pub use self::pending_peers::{PendingPeer, PendingPeers};
pub use self::reactor::{AsyncReactor, TurnRequested};
pub use self::stream::AsyncStream;
pub use self::timer::Sleep;
#[cfg(doc)]
use crate::Reactor;
