//! Thin adapters that let an [`AsyncReactor`] run beside the other tasks of an executor. Each one takes turns when the
//! reactor's descriptor is readable, when its deadline has passed, and when a task has asked for something.

use std::convert::Infallible;
use std::error::Error;
use std::future::pending;
use std::pin::pin;
use std::time::Duration;

use futures_util::FutureExt;
use rdma_reactor::aio::AsyncReactor;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Takes turns on tokio, until something fails. One task runs this beside all others of its thread.
///
/// # Errors
/// The reactor as a whole failed, or the process has no descriptors left.
pub async fn on_tokio(net: AsyncReactor) -> Result<Infallible, Box<dyn Error>> {
    #[allow(deprecated, reason = "the safe one of two; what it could be misused for, an OwnedFd does not do")]
    let readable = AsyncFd::with_interest(net.descriptor()?, Interest::READABLE)?;
    loop {
        if net.turn(Duration::ZERO)?.more {
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
            ready = readable.readable() => ready?.clear_ready(),
            () = net.asked() => {}
            () = due => {}
        }
    }
}

/// As [`on_tokio`], on async-io, which smol and async-std use.
///
/// # Errors
/// As [`on_tokio`].
pub async fn on_async_io(net: AsyncReactor) -> Result<Infallible, Box<dyn Error>> {
    let descriptor = async_io::Async::new(net.descriptor()?)?;
    loop {
        if net.turn(Duration::ZERO)?.more {
            let_others_go_on().await;
            continue;
        }
        let mut due = net.next_deadline().map_or_else(async_io::Timer::never, async_io::Timer::at).fuse();
        let mut readable = pin!(descriptor.readable().fuse());
        let mut asked = net.asked().fuse();
        futures_util::select! {
            ready = readable => ready?,
            () = asked => {}
            _ = due => {}
        }
    }
}

/// Lets the other tasks go on.
async fn let_others_go_on() {
    let mut yielded = false;
    std::future::poll_fn(|task| {
        if std::mem::replace(&mut yielded, true) {
            return std::task::Poll::Ready(());
        }
        task.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}
