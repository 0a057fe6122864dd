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
//! # What happens to a future that is dropped
//!
//! | future | if it is dropped before it is done |
//! |---|---|
//! | [`Listener::accept`] | nothing is lost: the next call gets the connection |
//! | [`AsyncReactor::connect`] | the attempt is given up |
//! | [`Connection::send`] | the message is not sent |
//! | [`Connection::recv`] | nothing is lost: the next call gets the message |
//! | [`Connection::read`], [`write`](Connection::write) and atomics | an operation that has begun goes on, and its memory is lent until it has ended; nobody hears of its outcome |
//! | [`Connection::closed`], [`AsyncReactor::sleep`], [`AsyncReactor::asked`] | nothing |
//! | reads and writes of a [`Stream`] | nothing is lost or sent twice |
//!
//! # Other executors
//!
//! A task of the executor drives the reactor: it takes a turn when [`AsyncReactor::descriptor`] is readable, when
//! [`AsyncReactor::next_deadline`] has passed, or when [`AsyncReactor::asked`] is done. All of that is in one `select!`; `embed-async`
//! of the examples has it for tokio and for async-io.
//!
//! What has no future is there all the same: [`AsyncReactor::with`] lends the [`Context`](crate::Context). Datagrams, descriptors
//! of the program's own and immediate data need a [`Handler`](crate::Handler).

mod connection;
mod core;
mod desk;
mod listener;
mod reactor;
mod stream;
mod timer;

pub use self::connection::{Connection, OperationError, Received};
pub use self::listener::Listener;
pub use self::reactor::{Asked, AsyncReactor};
pub use self::stream::Stream;
pub use self::timer::Sleep;
#[cfg(doc)]
use crate::Reactor;
