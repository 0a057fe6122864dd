//! The task that takes the reactor's turns on tokio.

use std::future::pending;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::AsyncReactor;
use crate::Error;

/// Takes the turns of a reactor as a task of tokio, beside the other tasks of the thread, until the reactor is drained. Use `drive` in a
/// single-threaded runtime, with tasks of `tokio::task::spawn_local`. For multi-threaded runtimes there is [`crate::threaded`]. If the
/// future is dropped, the connections stall until the program takes turns itself, for instance with [`AsyncReactor::run`].
///
/// ```
/// use rdma_reactor::aio::{AsyncReactor, drive};
/// use rdma_reactor::{Config, ProviderChoice};
/// use tokio::task::{LocalSet, spawn_local};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// LocalSet::new().block_on(&runtime, async {
///     let net = AsyncReactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
///     let driver = spawn_local(drive(net.clone()));
///     let listener = net.listen(([127, 0, 0, 1], 0).into())?;
///     let here = net.connect(listener.local_address().expect("it listens")).await?;
///     let there = listener.accept().await.expect("a client");
///     here.send(b"hello").await?;
///     assert_eq!(&there.recv().await?[..], b"hello");
///     net.with(|cx| cx.drain(std::time::Duration::from_secs(1)));
///     Ok(driver.await??)
/// })
/// # }
/// ```
///
/// # Errors
/// The errors of [`crate::Reactor::run`], and [`Error::Poll`] if the process has no file descriptor left.
///
/// # Panics
/// If the future is polled outside of a tokio runtime, or in a tokio runtime that has not enabled I/O and time.
pub async fn drive(net: AsyncReactor) -> Result<(), Error> {
    let descriptor = net.descriptor().map_err(Error::Poll)?;
    // SAFETY: `descriptor` is an owned duplicate, so no other code closes or replaces it. It stays open until `AsyncFd` drops it.
    let readable = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
    let readable = readable.map_err(|error| Error::Poll(error.into()))?;
    let _guard = net.driver_guard();
    loop {
        let turn = net.turn(Duration::ZERO)?;
        // The turn that completes the drain is the last one that the reactor needs.
        if net.is_drained() {
            return Ok(());
        }
        if turn.more {
            tokio::task::yield_now().await;
            continue;
        }
        let deadline = net.next_deadline();
        let due = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => pending().await,
            }
        };
        tokio::select! {
            // The readiness is cleared before the turn, so that `readable` also reports an event that arrives during the turn.
            ready = readable.readable() => ready.map_err(Error::Poll)?.clear_ready(),
            () = net.turn_requested() => {}
            () = due => {}
        }
    }
}
