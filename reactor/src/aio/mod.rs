//! Connections as futures, for programs that are written with async/await. Needs the feature `async`.
//!
//! An [`AsyncReactor`] is a [`Reactor`] whose callbacks wake tasks. It belongs to one thread, as its connections do, and brings no
//! executor: [`AsyncReactor::run`] takes turns until a future is done, and any other executor can take the turns instead.
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
//! # // The two run side by side; the client's connection is closed when `ask` is done.
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
//! # Waiting is the flow control
//!
//! [`Connection::send`] waits while the peer's window is closed, and messages that nobody has received yet take receives of their
//! connection, so that the peer waits in turn. No queue grows without bound.
//!
//! # Several tasks
//!
//! Several tasks may send on a connection, receive from it, or accept from a listener. They are served in the order in which they
//! came: a call that finds others waiting waits behind them, and as many tasks are woken as there is room, or as messages, for.
//!
//! What waits for room on a connection waits for different things. Room goes to the task that has waited longest, except that
//!
//! - reads and writes, which need no credit, pass messages while the peer's window is closed. So do operations of
//!   [`Connection::operate`], until one of them turns out to be a message;
//! - messages that fit one buffer pass longer ones that wait for the end of another one, or for memory.
//!
//! [`Connection::try_send`] gets the room that those who wait leave.
//!
//! A future that was woken and is not polled keeps its turn until it is polled or dropped: a message, or room for one. Others go on
//! with the rest. So do not await a call while another future of the same kind is kept and not polled, as in an arm of `select!`.
//!
//! # What happens to a future that is dropped
//!
//! | future | if it is dropped before it is done |
//! |---|---|
//! | [`Listener::accept`], [`Gate::next`] | nothing is lost: the next call gets the connection, or the peer |
//! | [`AsyncReactor::connect`] | the attempt is given up |
//! | [`Connection::send`] | the message is not sent |
//! | [`Connection::recv`] | nothing is lost: the next call gets the message |
//! | [`Connection::read`], [`write`](Connection::write) and atomics | an operation that has begun goes on, and its memory is lent until it has ended; nobody hears of its outcome |
//! | [`Connection::transfer`] | the transfer is cancelled: what is posted ends, and no more is posted; nobody hears of its end |
//! | [`Calls::call`] | the call is cancelled: the peer is notified, and may serve it all the same |
//! | [`Calls::next`] | nothing is lost: the next call gets the request |
//! | [`Connection::closed`], [`AsyncReactor::sleep`], [`AsyncReactor::asked`] | nothing |
//! | reads and writes of a [`Stream`] | nothing is lost or sent twice; the stream keeps its place until it is dropped |
//!
//! A dropped future leaves nothing behind. If it was its turn, the next task has it.
//!
//! # Other executors
//!
//! A task of the executor drives the reactor: it takes a turn when [`AsyncReactor::descriptor`] is readable, when
//! [`AsyncReactor::next_deadline`] has passed, or when [`AsyncReactor::asked`] is done. `drive` is that task for tokio (feature `tokio`);
//! `embed-async` of the examples has one for async-io.
//!
//! What has no future is there all the same: [`AsyncReactor::with`] lends the [`Context`](crate::Context). Datagrams, descriptors
//! of the program's own and immediate data need a [`Handler`](crate::Handler).

mod arrivals;
mod calls;
mod connection;
mod core;
mod desk;
#[cfg(feature = "tokio")]
mod drive;
mod gate;
mod listener;
mod reactor;
mod reply;
mod stream;
mod timer;
mod turns;
mod waiters;
mod writers;

pub use self::calls::{Calls, Request};
pub use self::connection::{Connection, OperationError, Received};
#[cfg(feature = "tokio")]
pub use self::drive::drive;
pub use self::gate::{Gate, Newcomer};
pub use self::listener::Listener;
pub use self::reactor::{Asked, AsyncReactor};
pub use self::stream::Stream;
pub use self::timer::Sleep;
#[cfg(doc)]
use crate::Reactor;
