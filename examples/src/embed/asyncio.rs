//! A thin adapter that runs an [`AsyncReactor`] beside the other tasks of an executor, as `aio::drive` does on tokio. The adapter takes a
//! turn when the reactor's descriptor is readable, when the reactor's deadline has passed, and when a task has requested something.

use std::error::Error;
use std::pin::pin;
use std::time::Duration;

use futures_util::FutureExt;
use rdma_reactor::aio::AsyncReactor;

/// Takes the reactor's turns until the reactor is drained. Waits for events by async-io, the event loop of smol and async-std. Spawn this
/// future once; all tasks that use the reactor must run on the same thread.
///
/// # Errors
///
/// The reactor as a whole failed, or the process has no descriptors left.
pub async fn on_async_io(net: AsyncReactor) -> Result<(), Box<dyn Error>> {
    let descriptor = async_io::Async::new(net.descriptor()?)?;
    loop {
        let turn = net.turn(Duration::ZERO)?;
        // If the reactor is drained, no further turn is needed.
        if net.is_drained() {
            return Ok(());
        }
        if turn.more {
            let_others_go_on().await;
            continue;
        }
        let mut due = net.next_deadline().map_or_else(async_io::Timer::never, async_io::Timer::at).fuse();
        let mut readable = pin!(descriptor.readable().fuse());
        let mut requested = net.turn_requested().fuse();
        futures_util::select! {
            ready = readable => ready?,
            () = requested => {}
            _ = due => {}
        }
    }
}

/// Yields to the executor once, so that other tasks run.
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
