//! The task that takes turns on tokio.

use std::future::pending;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::AsyncReactor;
use crate::Error;

/// Takes the turns of a reactor on tokio, beside the other tasks of its thread, until it is drained. It is for a runtime of one thread, in
/// which tasks are spawned with `tokio::task::spawn_local`; [`crate::threaded`] is for those of several threads. If the future is dropped,
/// the connections stay as they are until somebody takes turns again.
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
/// As [`crate::Reactor::run`]; [`Error::Poll`] if the process has no descriptors left.
///
/// # Panics
/// Outside of a tokio runtime, or in one whose I/O or time is not enabled.
pub async fn drive(net: AsyncReactor) -> Result<(), Error> {
    let descriptor = net.descriptor().map_err(Error::Poll)?;
    // SAFETY: the descriptor is owned, so nobody else closes it or puts another one in its place, and `AsyncFd` owns it until its own end.
    let readable = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
    let readable = readable.map_err(|error| Error::Poll(error.into()))?;
    loop {
        let turn = net.turn(Duration::ZERO)?;
        // The turn that ends a drain is the last one.
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
            // The readiness is cleared before the turn: what comes later makes the descriptor readable anew.
            ready = readable.readable() => ready.map_err(Error::Poll)?.clear_ready(),
            () = net.asked() => {}
            () = due => {}
        }
    }
}
