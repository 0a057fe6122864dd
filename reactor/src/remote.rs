//! What other threads may do to a reactor.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Wakes a poller that may be asleep, from any thread.
pub trait Wake: Send + Sync + fmt::Debug {
    /// Makes the poller's next or current wait return.
    ///
    /// # Errors
    /// What the system says; the poller may be gone.
    fn wake(&self) -> io::Result<()>;
}

/// Coalesces wake-ups: between two turns, one is enough.
#[derive(Debug)]
pub(crate) struct WakeFlag {
    pending: AtomicBool,
    stop: AtomicBool,
    waker: Arc<dyn Wake>,
}

impl WakeFlag {
    pub(crate) fn new(waker: Arc<dyn Wake>) -> Self {
        Self { pending: AtomicBool::new(false), stop: AtomicBool::new(false), waker }
    }

    pub(crate) fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            self.ring();
        }
    }

    /// Wakes even if somebody has called before: the poller may have seen that call already.
    pub(crate) fn wake_again(&self) {
        self.pending.store(true, Ordering::Release);
        self.ring();
    }

    fn ring(&self) {
        if let Err(error) = self.waker.wake() {
            log::debug!("waking the reactor: {error}");
        }
    }

    /// Whether somebody called and was not heard yet.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Whether somebody called since the last time; what they brought is to be looked at after this.
    pub(crate) fn take(&self) -> bool {
        // A plain load first: this is asked every turn, and a swap would take the cache line from the other threads.
        self.pending.load(Ordering::Relaxed) && self.pending.swap(false, Ordering::AcqRel)
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn take_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed) && self.stop.swap(false, Ordering::AcqRel)
    }
}

/// A reactor, seen from another thread or a signal handler's thread. Harmless when the reactor is gone.
#[derive(Clone, Debug)]
pub struct Remote {
    pub(crate) flag: Arc<WakeFlag>,
}

impl Remote {
    /// Makes [`crate::Reactor::run`] return after its current turn. Does not block.
    pub fn stop(&self) {
        self.flag.stop();
    }

    /// Makes a sleeping reactor take a turn. Does not block.
    pub fn wake(&self) {
        self.flag.wake();
    }
}
