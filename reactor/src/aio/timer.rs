//! A future that waits for an amount of time.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context as Task, Poll};
use std::time::Duration;

use super::core::{Core, DropAction};
use super::handler::TimerState;
use crate::TimerId;

/// The future of [`super::AsyncReactor::sleep`]. Dropping the future cancels the timer.
pub struct Sleep {
    core: Rc<Core>,
    delay: Duration,
    timer: Option<TimerId>,
}

impl fmt::Debug for Sleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sleep").field("delay", &self.delay).finish_non_exhaustive()
    }
}

impl Sleep {
    pub(super) const fn new(core: Rc<Core>, delay: Duration) -> Self {
        Self { core, delay, timer: None }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<()> {
        let delay = self.delay;
        let known = self.timer;
        // `old` may contain a waker. Dropping a waker may drop its task, whose destructors may use the reactor. So `old` is dropped only
        // after `with`, which borrows the reactor, has returned.
        let (timer, old) = self.core.with(|cx, handler| {
            let timer = known.unwrap_or_else(|| cx.timers().set(delay, 0));
            (timer, handler.timers.insert(timer, TimerState::Set(task.waker().clone())))
        });
        self.timer = Some(timer);
        if matches!(old, Some(TimerState::Fired)) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(timer) = self.timer {
            self.core.run_or_defer(DropAction::CancelTimer(timer));
        }
    }
}
