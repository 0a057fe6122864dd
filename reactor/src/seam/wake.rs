//! Wake-ups of a reactor by other threads. Each wake-up sets the same flag. Only the first wake-up after the reactor has cleared the flag
//! makes a system call.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::sync::{AtomicBool, AtomicU64, AtomicUsize};

/// Wakes a poller that may be waiting, from any thread.
pub trait Wake: Send + Sync + fmt::Debug {
    /// Ends the poller's current wait. If the poller is not waiting, its next wait returns immediately.
    ///
    /// # Errors
    /// The system's error, for example because the poller was dropped.
    fn wake(&self) -> io::Result<()>;
}

/// A waker for tests that have no poller.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct NoWake;

#[cfg(test)]
impl Wake for NoWake {
    fn wake(&self) -> io::Result<()> {
        Ok(())
    }
}

/// The requests from other threads to a reactor that need no queue: wake up, stop, and drain.
#[derive(Debug)]
pub(crate) struct WakeFlag {
    pending: AtomicBool,
    stop: AtomicBool,
    /// True if the reactor was dropped.
    gone: AtomicBool,
    /// The time until the deadline of a requested drain, in milliseconds, plus 1. It is 0 if no drain is requested.
    drain: AtomicU64,
    /// The number of the thread that runs a turn now, see [`this_thread`]. It is 0 between turns.
    turning: AtomicUsize,
    waker: Arc<dyn Wake>,
}

/// Returns a number that identifies the calling thread among all live threads. It is never 0.
fn this_thread() -> usize {
    #[cfg(not(loom_model))]
    thread_local!(static MARK: u8 = const { 0 });
    #[cfg(loom_model)]
    loom::thread_local!(static MARK: u8 = 0);
    MARK.with(|mark| std::ptr::from_ref(mark) as usize)
}

impl WakeFlag {
    pub(crate) fn new(waker: Arc<dyn Wake>) -> Self {
        let no = || AtomicBool::new(false);
        let (drain, turning) = (AtomicU64::new(0), AtomicUsize::new(0));
        Self { pending: no(), stop: no(), gone: no(), drain, turning, waker }
    }

    /// Makes the reactor check for requests from other threads. If a callback of the same reactor
    /// calls this function, no system call is made, because the turn checks the flag before it
    /// sleeps.
    pub(crate) fn wake(&self) {
        let was_pending = self.pending.swap(true, Ordering::AcqRel);
        let turning = self.turning.load(Ordering::Relaxed);
        let own = turning == this_thread() || crate::planted("a-turn-hides-calls") && turning != 0;
        if (!was_pending || crate::planted("every-wake-rings")) && !own {
            self.wake_poller();
        }
    }

    /// Wakes the poller even if a wake-up is pending already, because the poller may have consumed the event of the pending wake-up.
    pub(crate) fn wake_again(&self) {
        self.pending.store(true, Ordering::Release);
        self.wake_poller();
    }

    fn wake_poller(&self) {
        if let Err(error) = self.waker.wake() {
            log::debug!("waking the reactor failed: {error}");
        }
    }

    /// Notes that a turn begins on this thread.
    pub(crate) fn enter(&self) {
        self.turning.store(this_thread(), Ordering::Relaxed);
    }

    /// Notes that the turn has ended.
    pub(crate) fn leave(&self) {
        self.turning.store(0, Ordering::Relaxed);
    }

    /// Returns `true` if a wake-up is pending.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Clears the flag. Returns `true` if a wake-up was pending. The reactor must check for requests after this call: a request that
    /// arrives later sets the flag again.
    pub(crate) fn take(&self) -> bool {
        // Every turn calls this function. A plain load precedes the swap, because a swap always takes the cache line from other threads.
        self.pending.load(Ordering::Relaxed) && self.pending.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn take_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed) && self.stop.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn drain(&self, deadline: Duration) {
        let ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        // The first request determines the deadline. A later request does not replace it while it
        // is pending.
        let _ = self.drain.compare_exchange(0, ms.saturating_add(1), Ordering::AcqRel, Ordering::Relaxed);
        self.wake();
    }

    pub(crate) fn take_drain(&self) -> Option<Duration> {
        if self.drain.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.drain.swap(0, Ordering::AcqRel).checked_sub(1).map(Duration::from_millis)
    }

    /// Notes that the reactor is being dropped.
    pub(crate) fn abandon(&self) {
        self.gone.store(true, Ordering::Release);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}
